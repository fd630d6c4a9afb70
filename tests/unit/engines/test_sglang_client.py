"""What the SGLang client asks for and makes of answers, with a stand-in for the server: also what the real one only
does on a GPU.
"""

from __future__ import annotations

import asyncio
import base64
import json
import pickle
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from tiny_models import make_model

from megatron_rl.config.schema import ConfigError
from megatron_rl.engines.auth_middleware import HEADER
from megatron_rl.engines.http import RequestRefused, ServerLost
from megatron_rl.engines.kind import ModelFacts, ServerStart
from megatron_rl.engines.protocol import EngineError, Sampling
from megatron_rl.engines.sglang.client import SglangServer
from megatron_rl.engines.sglang.kind import command
from megatron_rl.engines.sglang.routes import OWN, PATH, Framed, framed
from megatron_rl.engines.sglang.settings import Sglang
from megatron_rl.lib.frames import unpack_parts
from megatron_rl.types import Stop

INFO = {"tp_size": 2, "max_req_input_len": 506, "sampling_mask_max_tokens": 50, "enable_deterministic_inference": False}
OPEN = "a weight-update session is already open; call end_weight_update() first"


def answer(tokens=(5, 6), reason=None, **more):
    about = {
        "finish_reason": reason or {"type": "length", "length": 2},
        "output_token_logprobs": [[-1.0 * t, t, None] for t in tokens],
    }
    return {
        "output_ids": list(tokens),
        "meta_info": about | {"weight_versions": [{"version": "3", "start": 0, "end": 2}]} | more,
    }


class Stub:
    """Answers by path, in order, the last one again and again; keeps what it was asked."""

    def __init__(self, answers):
        self.answers = {"/server_info": [INFO]} | answers
        self.asked = []
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                path = OWN if self.path == PATH else self.path
                stub.asked.append((path, json.loads(body) if body else None))
                left = stub.answers.get(path, [{}])
                said = left.pop(0) if len(left) > 1 else left[0]
                status, said = said if isinstance(said, tuple) else (200, said)
                self.send_response(401 if self.headers[HEADER] != "t" else status)
                self.end_headers()
                content = said.encode() if isinstance(said, str) else json.dumps(said).encode()
                self.wfile.write(framed(content) if path == OWN and not isinstance(said, str) else content)

            do_GET = do_POST

            def log_message(self, *arguments):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def client(self, token="t", **settings):
        url = f"http://127.0.0.1:{self.server.server_port}"
        return SglangServer(url, token, Sglang(**settings), 5, ModelFacts(ends=frozenset({7}), vocab=97))

    def bodies(self, path):
        return [body for asked, body in self.asked if asked == path]

    def paths(self):
        return [path for path, _ in self.asked]


@pytest.fixture
def stub():
    made = []

    def make(**answers):
        made.append(Stub({f"/{name}": said for name, said in answers.items()}))
        return made[-1]

    yield make
    for one in made:
        one.server.shutdown()
        one.server.server_close()


def ask(server, sampling, prompt=(1, 2)):
    return asyncio.run(server.generate(np.array(prompt, np.int32), sampling, seed=40, timeout_s=5))


def test_a_plain_draw_has_the_log_probs_of_the_model(stub):
    one = stub(generate=[answer()])
    [c] = ask(one.client(), Sampling(max_tokens=9))
    assert (c.tokens.tolist(), c.logprobs.tolist(), c.model_logprobs.tolist()) == ([5, 6], [-5.0, -6.0], [-5.0, -6.0])
    assert (c.tokens.dtype, c.logprobs.dtype) == (np.int32, np.float32)
    assert c.stop is Stop.LENGTH and c.versions == [(0, 3)]
    [body] = one.bodies("/generate")
    assert (
        body["input_ids"] == [1, 2]
        and body["sampling_params"]["stop_token_ids"] == [7]
        and body["sampling_params"]["n"] == 1
    )


def test_several_samples_go_as_one_request_unless_each_has_a_seed(stub):
    one = stub(generate=[[answer()] * 3])
    ask(one.client(), Sampling(max_tokens=9, n=3))
    assert one.bodies("/generate")[0]["sampling_params"]["n"] == 3
    heedful = stub(generate=[[answer()] * 3], server_info=[INFO | {"enable_deterministic_inference": True}])
    ask(heedful.client(), Sampling(max_tokens=9, n=3))
    [body] = heedful.bodies("/generate")
    assert body["input_ids"] == [[1, 2]] * 3 and [p["sampling_seed"] for p in body["sampling_params"]] == [40, 41, 42]
    assert not any("n" in p for p in body["sampling_params"])


def test_a_cool_draw_has_no_log_probs_of_the_model_and_a_greedy_one_is_certain(stub):
    one = stub(generate=[answer()])
    [cool] = ask(one.client(), Sampling(max_tokens=9, temperature=0.5))
    assert cool.logprobs.tolist() == [-5.0, -6.0] and cool.model_logprobs is None
    greedy = ask(one.client(), Sampling(max_tokens=9, temperature=0, n=2, top_p=0.5))
    told = [(c.logprobs.tolist(), c.model_logprobs.tolist()) for c in greedy]
    assert told == [([0.0, 0.0], [-5.0, -6.0])] * 2


def test_a_truncated_draw_has_the_log_probs_of_what_was_left(stub):
    one = stub(generate=[[answer(output_token_sampling_logprobs=[-0.5, -0.25])]])
    [c] = ask(one.client(), Sampling(max_tokens=9, top_k=20, top_p=0.9))
    assert (c.logprobs.tolist(), c.model_logprobs.tolist()) == ([-0.5, -0.25], [-5.0, -6.0])
    [body] = one.bodies("/generate")
    assert body["return_sampling_mask"] and body["input_ids"] == [[1, 2]], (
        "SGLang fails masks that are asked for with n"
    )
    for sampling in (Sampling(max_tokens=9, top_p=0.9), Sampling(max_tokens=9, top_k=51)):
        with pytest.raises(ValueError, match="only under a top_k of 1 to 50"):
            ask(one.client(), sampling)
    with pytest.raises(ServerLost, match=r"log-probs are \(0,\) for \(2,\)"):
        ask(stub(generate=[[answer()]]).client(), Sampling(max_tokens=9, top_k=20))


def scored(*logprobs, reason="length", top=None):
    told = [[None, 5, None], *([p, 5, None] for p in logprobs)]
    about = {"finish_reason": {"type": reason}, "input_token_logprobs": told}
    if top is not None:
        about["input_top_logprobs"] = [None, *([[p, t, None] for t, p in place] for place in top)]
    return {"output_ids": [], "meta_info": about}


def test_scores_are_those_of_the_prompts_tokens(stub):
    one = stub(generate=[[scored(-1.5, -2.5), scored()]])
    sequences = [np.array(tokens, np.int32) for tokens in ([1, 2, 3], [4])]
    found = [scores.logprobs for scores in asyncio.run(one.client().score(sequences, 0, timeout_s=5))]
    assert [each.tolist() for each in found] == [[0.0, -1.5, -2.5], [0.0]] and found[0].dtype == np.float32
    [body] = one.bodies("/generate")
    assert body["input_ids"] == [[1, 2, 3], [4]] and body["logprob_start_len"] == 0 and body["return_logprob"]
    assert body["sampling_params"] == {"max_new_tokens": 0, "temperature": 1.0}
    for broken, says in (
        (scored(-1.5), "scored 1 of 3 tokens"),
        (scored(-1.5, -2.5, reason="abort"), "abort"),
        (scored(-1.5, float("nan")), "log-probs that are not numbers"),
        ("{}", "not SGLang's"),
    ):
        with pytest.raises(ServerLost, match=says):
            asyncio.run(stub(generate=[broken]).client().score(sequences[:1], 0, timeout_s=5))
    with pytest.raises(RequestRefused, match="a sequence of 507 tokens: .* scores at most 506"):
        asyncio.run(one.client().score([np.ones(507, np.int32)], 0, timeout_s=5))


def test_the_likeliest_tokens_of_a_prompts_places_are_asked_for_and_told(stub):
    top = [[(7, -0.25), (3, -1.5)], [(9, -0.5), (2, -1.0)]]
    one = stub(generate=[[scored(-1.5, -2.5, top=top), scored(top=[])]])
    sequences = [np.array(tokens, np.int32) for tokens in ([1, 3, 4], [4])]
    first, second = asyncio.run(one.client().score(sequences, 2, timeout_s=5))
    assert first.ids.tolist() == [[0, 0], [7, 3], [9, 2]] and first.ids.dtype == np.int32
    assert first.top_logprobs.tolist() == [[0.0, 0.0], [-0.25, -1.5], [-0.5, -1.0]]
    assert first.logprobs.tolist() == [0.0, -1.5, -2.5] and second.ids.shape == (1, 2) and not second.top_logprobs.any()
    [body] = one.bodies("/generate")
    assert body["top_logprobs_num"] == 2
    with pytest.raises(EngineError, match=r"told \(2, 2\) of the 3 likeliest tokens of 2 places"):
        asyncio.run(stub(generate=[[scored(-1.5, -2.5, top=top)]]).client().score(sequences[:1], 3, timeout_s=5))


def test_the_servers_middleware_turns_good_answers_into_bytes_and_leaves_the_rest():
    async def sglang(scope, receive, send):
        seen.append(scope["path"])
        status = 200 if (await receive())["body"] else 400
        await send({"type": "http.response.start", "status": status, "headers": [(b"x", b"y")]})
        said = json.dumps(answer()).encode()
        for part in (said[:9], said[9:]):
            await send({"type": "http.response.body", "body": part, "more_body": True})

    def post(path, body):
        sent = []

        async def receive():
            return {"type": "http.request", "body": body}

        async def send(message):
            sent.append(message)

        asyncio.run(Framed(sglang)({"type": "http", "path": path, "raw_path": path.encode()}, receive, send))
        return sent[0], b"".join(message.get("body", b"") for message in sent[1:])

    seen: list[str] = []
    start, content = post(PATH, b"{}")
    [(about, arrays)] = unpack_parts(content)
    assert arrays["tokens"].tolist() == [5, 6] and arrays["scaled"].tolist() == [-5.0, -6.0]
    assert about["finish_reason"] == "length" and about["weight_versions"] == [[0, "3"]]
    assert dict(start["headers"])[b"content-length"] == str(len(content)).encode()
    start, content = post(PATH, b"")
    assert start["status"] == 400 and start["headers"] == [(b"x", b"y")] and json.loads(content) == answer()
    assert json.loads(post("/model_info", b"{}")[1]) == answer() and seen == [OWN, OWN, "/model_info"]


@pytest.mark.parametrize(
    ("reason", "stop"),
    [
        ({"type": "stop", "matched": 7}, Stop.EOS),
        ({"type": "stop", "matched": 8}, Stop.EOS),  # an end that SGLang found by itself
        ({"type": "stop", "matched": 9}, Stop.STOP),
        ({"type": "stop", "matched": "</answer>"}, Stop.STOP),
        ({"type": "length", "length": 2}, Stop.LENGTH),
        ({"type": "abort", "message": "Abort in waiting queue"}, Stop.ABORTED),
    ],
)
def test_every_way_to_end_has_its_name(stub, reason, stop):
    [c] = ask(stub(generate=[answer(reason=reason)]).client(), Sampling(max_tokens=9, stop_tokens=(9,)))
    assert c.stop is stop


@pytest.mark.parametrize("name", ["finish_reason", "stop_reason", "weight_versions"])
def test_a_completion_that_does_not_tell_its_end_or_its_weights_is_malformed(stub, name):
    """Such a completion counted as one of the newest weights that had reached the end of its text."""
    client = stub().client()
    about = {"finish_reason": "stop", "stop_reason": None, "weight_versions": [[0, "3"]]}
    arrays = {"tokens": np.array([5], np.int32), "scaled": np.array([-1.0], np.float32)}
    assert client._drawn(about, arrays, Sampling(max_tokens=9), 9).versions == [(0, 3)]
    del about[name]
    with pytest.raises(ServerLost, match=f"KeyError '{name}'"), client._understood():
        client._drawn(about, arrays, Sampling(max_tokens=9), 9)


def test_prompts_that_sglang_would_die_of_are_not_sent(stub):
    one = stub(generate=[answer()])
    for prompt in ([], [97], [-1, 5]):
        with pytest.raises(RequestRefused, match="empty or has tokens outside of 0 to 96"):
            ask(one.client(), Sampling(max_tokens=9), prompt)
    [full] = ask(one.client(), Sampling(max_tokens=9), [1] * 506)
    assert len(full.tokens) == 0 and full.stop is Stop.LENGTH and "/generate" not in one.paths()
    ask(one.client(), Sampling(max_tokens=600), [1] * 500)
    assert one.bodies("/generate")[0]["sampling_params"]["max_new_tokens"] == 10


def test_a_refit_stands_in_a_session_and_empties_the_cache(stub):
    one = stub(model_info=[{"weight_version": "4"}], flush_cache=[(400, "requests are running"), "Cache flushed."])
    server = one.client(pause="keep", tp=2)
    server.join("10.0.0.1", 77, "s3", 1)
    server.pause()
    server.update(4, 2.0)
    server.resume()
    session = ["/begin_weight_update", "/update_weights_from_tensor", "/end_weight_update"]
    wanted = [
        *session,
        "/pause_generation",
        *session,
        "/flush_cache",
        "/flush_cache",
        "/model_info",
        "/continue_generation",
    ]
    assert [p for p in one.paths() if p != "/server_info"] == wanted
    assert one.bodies("/pause_generation") == [{"mode": "retract"}]
    join, update = one.bodies("/update_weights_from_tensor")
    orders = [
        pickle.loads(base64.b64decode(body["serialized_named_tensors"][rank]))
        for body in (join, update)
        for rank in (0, 1)
    ]
    assert orders[0] == orders[1] == {"verb": "join", "replica": 1, "address": ["10.0.0.1", 77, "s3"]}
    assert orders[2] == orders[3] == {"verb": "take part", "version": 4, "wait_s": 2.0}
    assert "weight_version" not in join and update["weight_version"] == "4" and not update["flush_cache"]


def test_a_refused_update_closes_its_session_and_an_open_one_is_ended_first(stub):
    one = stub(
        update_weights_from_tensor=[(400, {"message": "rank 1: it does not fit"})],
        begin_weight_update=[(400, {"message": OPEN}), {}],
    )
    with pytest.raises(RequestRefused, match="rank 1: it does not fit"):
        one.client().join("10.0.0.1", 77, "s3", 0)
    begin, end = "/begin_weight_update", "/end_weight_update"
    assert [p for p in one.paths() if p != "/server_info"] == [begin, end, begin, "/update_weights_from_tensor", end]


def test_a_version_that_is_not_the_one_asked_for_is_found_out(stub):
    with pytest.raises(ServerLost, match="has version -1 of the weights after a refit to 2"):
        stub(model_info=[{"weight_version": "default"}]).client().update(2, 1.0)


def test_a_pause_that_waits_does_so_for_requests_under_way(stub):
    one = stub(generate=[answer()])
    server, held, seen = one.client(pause="wait"), threading.Event(), []
    with server._counted():
        thread = threading.Thread(target=lambda: (server.pause(), seen.append(one.paths()), held.set()))
        thread.start()
        assert not held.wait(0.1) and "/pause_generation" not in one.paths()
    thread.join(5)
    assert seen[0][-1] == "/pause_generation"


def test_a_wrong_token_is_a_mistake_in_the_settings(stub):
    with pytest.raises(ConfigError, match="refuses the job's token"):
        stub().client(token="other").version()


def test_the_command_line_holds_no_token_and_binds_to_the_host_alone(tmp_path):
    model = make_model(tmp_path / "model", "qwen2")
    settings = Sglang(
        host="10.1.2.3", tp=2, expert_parallel=True, max_model_len=100, kv_cache_gib=0.5, args=("--random-seed", "1")
    )
    start = ServerStart(
        python="python", model=model, dtype="bfloat16", port=9, token_file=tmp_path / "token", on_gpu=True
    )
    words = command(settings, start).words
    for name, value in (
        ("--host", "10.1.2.3"),
        ("--port", "9"),
        ("--tp-size", "2"),
        ("--ep-size", "2"),
        ("--context-length", "100"),
    ):
        assert words[words.index(name) + 1] == value
    assert words[-2:] == ["--random-seed", "1"] and not {"--api-key", "--admin-api-key", "--device"} & set(words)
    on_cpu = command(settings, replace(start, on_gpu=False))
    tokens = int(on_cpu.words[on_cpu.words.index("--max-total-tokens") + 1])
    assert tokens == 2**29 // (2 * 4 * 2 * 16 * 2) and on_cpu.environment["SGLANG_CPU_OMP_THREADS_BIND"] == "0-0|1-1"
