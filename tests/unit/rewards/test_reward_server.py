"""The reward function that asks a server for the scores of a reward model: what it sends, what it makes of the answers,
and when it asks again. tests/servers/test_reward_model_vllm.py asks a real vLLM server.
"""

from __future__ import annotations

import asyncio
import json
import math
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from megatron_rl.config.schema import Reward
from megatron_rl.network.retries import asked_pause_s, pause_s
from megatron_rl.rewards.grading_pool import GradePool
from megatron_rl.rewards.reward_server import ServedRewardModel
from megatron_rl.types import Outcome


class Classifier(ThreadingHTTPServer):
    """Answers like vLLM's route /classify: the score of a text is the length of its last part. The first `failing`
    requests are answered with 503.
    """

    daemon_threads = True

    def __init__(self, *, failing=0, labels=1, retry_after=()):
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies, self.left, self.labels, self.keys = [], failing, labels, set()
        self.retry_after = list(retry_after)  # a value of the header for each failing request
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_POST(self):
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if server.left:
            server.left -= 1
            self.send_response(503)
            self.send_header("Retry-After", server.retry_after.pop(0) if server.retry_after else "")
            self.end_headers()
            return
        server.keys.add(self.headers.get("Authorization"))
        server.bodies.append((self.path, body))
        texts = body["input"] if "input" in body else [body["messages"][-1]["content"]]
        if any("refuse" in text for text in texts):
            self.send_error(400, "no such text")
            return
        rows = [{"index": i, "probs": [float(len(text))] * server.labels} for i, text in enumerate(texts)]
        said = json.dumps({"data": rows[::-1]}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(said)


def graded(server, responses, payloads, **args):
    reward = Reward(
        target="megatron_rl.rewards.reward_server:ServedRewardModel", workers=1, timeout_s=60.0, range=(-100.0, 100.0),
        args={"url": server.url, "scale": "none", **args},
    )  # fmt: skip
    with GradePool(reward) as pool:
        return pool.grade(responses, payloads)


def test_a_batch_of_texts_and_conversations_is_scored_in_order(tmp_path):
    (tmp_path / "asks.txt").write_text("Q: {question} A: ")
    talk = [{"role": "user", "content": "hi"}]
    payloads = [{"question": "ab"}, {"question": "hi", "messages": talk}, {"question": "c"}]
    with Classifier() as server:
        found = graded(
            server, ["one", "two+", "three!"], payloads, template=str(tmp_path / "asks.txt"), end="<eos>", model="rm"
        )
    texts = ["Q: ab A: one<eos>", "Q: c A: three!<eos>"]
    assert [one.score for one in found] == [len(texts[0]), 4, len(texts[1])]
    assert {path for path, _ in server.bodies} == {"/classify"}
    plain = {"model": "rm", "use_activation": False}
    chat = {"messages": [*talk, {"role": "assistant", "content": "two+"}]} | plain
    assert sorted((body for _, body in server.bodies), key=lambda body: "input" in body) == [
        chat,
        {"input": texts} | plain,
    ]


def test_a_chat_an_answer_alone_and_a_sigmoid(monkeypatch):
    begun = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "I "}]
    with Classifier() as server:
        reward = ServedRewardModel(url=server.url + "/", chat=True, reads="answer", key_variable="SCORES_KEY")
        monkeypatch.setenv("SCORES_KEY", "s3cret")
        scores = asyncio.run(reward(prompts=["ab", begun], completions=["hm</think>\nyes", [{"content": "say"}]]))
    assert scores == pytest.approx([1 / (1 + math.exp(-3)), 1 / (1 + math.exp(-5))])
    asked = sorted((body["messages"] for _, body in server.bodies), key=lambda messages: messages[0]["content"])
    assert asked == [
        [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "yes"}],
        [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "I say"}],
    ]
    assert server.keys == {"Bearer s3cret"}


def test_a_busy_server_is_asked_again_and_a_refused_text_fails_alone():
    with Classifier(failing=2) as server:
        found = graded(server, ["a", "refuse", "abc"], [{"question": ""}] * 3)
    assert [one.score for one in found] == [1.0, 0.0, 3.0]
    assert [one.outcome for one in found] == [Outcome.SCORE, Outcome.ERROR, Outcome.SCORE]
    assert "/classify answered 400" in found[1].detail


def test_twins_a_reward_server_that_asks_for_a_pause_gets_it_as_a_generating_server_does(monkeypatch):
    """Retry-After: 7 and then none. The pauses of the pool are those of the same function."""
    pauses = []

    async def sleep(seconds):
        pauses.append(seconds)

    monkeypatch.setattr("megatron_rl.rewards.reward_server.asyncio.sleep", sleep)
    with Classifier(failing=3, retry_after=["7", "", "later"]) as server:
        reward = ServedRewardModel(url=server.url)
        assert len(asyncio.run(reward(prompts=["a"], completions=["b"]))) == 1
    asked = [asked_pause_s(503, {"Retry-After": text}) for text in ("7", "", "later")]
    assert pauses == [7.0, 1.0, 2.0] == [pause_s(asked_s, 0.5, i) for i, asked_s in enumerate(asked, start=1)]


def test_a_server_that_is_gone_or_holds_another_model_fails_the_grading():
    with Classifier(labels=2) as server:
        [found] = graded(server, ["ab"], [{"question": ""}])
    assert found.outcome is Outcome.ERROR and "answered [2] numbers for 1 texts: serve a sequence" in found.detail
    [gone] = graded(server, ["ab"], [{"question": ""}], attempts=2)
    assert gone.outcome is Outcome.ERROR and "/classify cannot be reached" in gone.detail


def test_a_served_reward_model_is_one_of_several_rewards():
    """RewardFunctions makes an instance of a class that it is given."""
    with Classifier() as server:
        parts = [
            {"target": "megatron_rl.rewards.reward_server:ServedRewardModel", "weight": 0.5, "name": "liked",
             "args": {"url": server.url, "scale": "none"}},
            {"target": "megatron_rl.rewards.tiny_task:grade", "name": "task"},
        ]  # fmt: skip
        reward = Reward(
            target="megatron_rl.rewards.reward_functions:RewardFunctions", workers=1, timeout_s=60.0,
            range=(-100.0, 100.0), args={"functions": parts},
        )  # fmt: skip
        with GradePool(reward) as pool:
            [found] = pool.grade(["aaaa"], [{"question": "", "answer": "a"}])
    assert found.metrics["liked"] == 4.0 and found.score == 0.5 * 4.0 + found.metrics["task"]
