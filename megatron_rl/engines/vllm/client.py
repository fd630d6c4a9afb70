"""A client of a vLLM server. It does not import vLLM, which is installed only in the server's environment."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from megatron_rl.algorithms.tandem_authors import Rule, fingerprint, replay
from megatron_rl.engines import response_parsing, sampling_seeds
from megatron_rl.engines.auth_middleware import HEADER
from megatron_rl.engines.http import RequestRefused, ServerLost
from megatron_rl.engines.kind import ModelFacts
from megatron_rl.engines.protocol import Completion, Sampling, TandemSampling, TopScores, empty
from megatron_rl.engines.server import MARGIN_S, Server
from megatron_rl.engines.vllm.names import ADAPTER, TANDEM
from megatron_rl.engines.vllm.routes import PATH as GENERATE
from megatron_rl.engines.vllm.routes import SCORE_PATH as SCORE
from megatron_rl.engines.vllm.settings import Vllm
from megatron_rl.lib import frames


class VllmServer(Server):
    """A client of a vLLM server. Weight syncs replace the server's weights (with LoRA adapters merged into them).
    Verified with vLLM 0.32.
    """

    health, speaker, version_route = "/health", "vLLM's", "/weight_info"

    def __init__(self, url: str, token: str, settings: Vllm, refit_timeout_s: float, facts: ModelFacts) -> None:
        super().__init__(url, {HEADER: token}, ends=facts.ends, vocab=facts.vocab)
        self._pause, self._refit_timeout_s, self._at_once = settings.pause, refit_timeout_s, settings.max_batch
        # True if the server already sleeps when a weight sync begins, so that `pause` does not have to pause requests
        self._sleeps = settings.colocate
        self._context: int | None = None
        self._boundaries = facts.boundaries
        # {Tandem RL rule: boundary tokens}. Has a rule after the server has confirmed that it uses the same tokens.
        self._agreed: dict[Rule, frozenset[int]] = {}

    async def generate(
        self, prompt: np.ndarray, sampling: Sampling, *, seed: int, timeout_s: float, priority: int = 0
    ) -> list[Completion]:
        """Implements `Server.generate`. A request for many samples is divided into several requests to the server."""
        sampling_seeds.check(sampling)
        room = await self._room() - len(prompt)
        if room <= 0:
            return [empty(sampling)] * sampling.n
        if sampling.tandem is not None:
            await self._agree(sampling.tandem.rule)
        # vLLM samples only one completion if a greedy request has n > 1
        at_once = 1 if sampling.greedy else self._at_once
        if sampling.greedy and sampling.tandem is None:
            parameters = self._parameters(sampling, 1, seed, room) | {"priority": priority}
            return await self._draw(prompt, sampling, parameters, timeout_s) * sampling.n
        out: list[Completion] = []
        while len(out) < sampling.n:  # sample j has seed + j, in vLLM too
            n = min(sampling.n - len(out), at_once)
            parameters = self._parameters(sampling, n, seed + len(out), room) | {"priority": priority}
            out += await self._draw(prompt, sampling, parameters, timeout_s)
        return out

    async def score(self, sequences: Sequence[np.ndarray], k: int, *, timeout_s: float) -> list[TopScores]:
        """Implements `Server.score`. vLLM does not use its prefix cache in scoring requests."""
        lengths = [len(tokens) for tokens in sequences]
        asked = {"lengths": lengths, "top_k": k} | self._adapter()
        longest = response_parsing.FREE_BYTES + sum(lengths) * (1 + k) * response_parsing.ENTRY_BYTES
        answer = await self._exchange(SCORE, asked, np.concatenate(sequences), timeout_s, longest)
        ends = np.cumsum(lengths)[:-1]
        with self._understood():
            _, found = frames.unpack(answer)
            shape = found["ids"].shape
            response_parsing.require(
                shape == (sum(lengths), k), f"ids {shape} of the {k} likeliest of {sum(lengths)} tokens"
            )
            logprobs = response_parsing.read_logprobs(found["logprobs"], (sum(lengths), 1 + k))
            parts = zip(np.split(logprobs, ends), np.split(found["ids"].copy(), ends), strict=True)
            return [self._scores(own, ids) for own, ids in parts]

    def join(self, host: str, port: int, secret: str, replica: int) -> None:
        info = {"host": host, "port": port, "secret": secret, "replica": replica}
        self._post("/init_weight_transfer_engine", {"init_info": info})

    def pause(self) -> None:
        if self._sleeps:
            self._post("/wake_up?tags=weights", timeout_s=self._refit_timeout_s)
        else:
            self._post(f"/pause?mode={self._pause}", timeout_s=self._refit_timeout_s)

    def update(self, version: int, wait_s: float) -> None:
        self._post("/start_weight_update", {})
        info = {"update_info": {"version": version, "wait_s": wait_s}}
        self._post("/update_weights", info, timeout_s=wait_s + self._refit_timeout_s + MARGIN_S)
        self._post("/finish_weight_update", {"weight_version": str(version)})
        # vLLM's prefix cache finds entries by tokens, not by weights, so it would reuse entries of the old weights.
        # Requests that were paused also have entries of the old weights.
        # With `reset_running_requests=true`, vLLM empties the cache and recomputes the entries of paused requests.
        # Without `reset_running_requests=true`, vLLM keeps the cache but reports success.
        self._post("/reset_prefix_cache?reset_running_requests=true")
        self._check_version(version)

    def resume(self) -> None:
        # A sleeping server cannot resume, as it has no KV cache. It resumes by itself when all memory is allocated.
        if not self._sleeps:
            self._post("/resume")

    def sleep(self, *, discard: bool) -> None:
        """Implements `Server.sleep`. Level 2 drops the weights and keeps the model's buffers; level 1 copies both to
        the host. Both levels empty the prefix cache.
        """
        answer = self._post(f"/sleep?level={2 if discard else 1}&mode=abort", timeout_s=self._refit_timeout_s)
        self._expect(answer, "sleeping", "sleep")

    def wake(self) -> None:
        """Implements `Server.wake`. Also raises ServerLost if a part of the server's memory is still released."""
        self._expect(self._post("/wake_up", timeout_s=self._refit_timeout_s), "awake", "wake up")

    def _expect(self, answer: Any, status: str, what: str) -> None:
        with self._understood():
            found = answer["status"]
        if found != status:
            raise ServerLost(f"{self.url} did not {what}: its status is {found!r}")

    def _adapter(self) -> dict[str, Any]:
        """Returns the request fields that select a LoRA adapter; an empty dict if the server has merged weights."""
        return {}

    async def _draw(
        self, prompt: np.ndarray, sampling: Sampling, parameters: Mapping[str, Any], timeout_s: float
    ) -> list[Completion]:
        """Sends one sampling request to the server and returns the n completions. `prompt`: [T] int32. `parameters`:
        the result of `_parameters`, with the additional field `priority`.
        """
        n, room, seed = parameters["n"], parameters["max_tokens"], parameters["seed"]
        longest = response_parsing.longest_answer(n, len(prompt) + room, sampling.num_top)
        answer = await self._exchange(GENERATE, {**parameters, **self._adapter()}, prompt, timeout_s, longest)
        with self._understood():
            parts = frames.unpack_parts(answer)
            self._check_count(parts, n)
            completions = [self._drawn(choice, part, sampling, len(prompt), room) for choice, part in parts]
        if sampling.tandem is not None:
            return [self._with_authors(c, sampling.tandem, prompt, seed + j) for j, c in enumerate(completions)]
        return completions

    def _parameters(self, sampling: Sampling, n: int, seed: int, room: int) -> dict[str, Any]:
        """Returns the sampling parameters of a request in vLLM's format."""
        # Truncation would not change the greedy tokens, but it would change the model's log-probs.
        greedy = sampling.greedy
        parameters: dict[str, Any] = {
            "n": n,
            "max_tokens": min(sampling.max_tokens, room),
            "temperature": sampling.temperature,
            "top_p": 1.0 if greedy else sampling.top_p,
            "top_k": 0 if greedy else sampling.top_k,
            "min_p": 0.0 if greedy else sampling.min_p,
            "seed": seed,
            "logprobs": sampling.num_top if sampling.logprobs else None,
            "stop": list(sampling.stop_strings),
            "stop_token_ids": self._stops(sampling),
            "detokenize": bool(sampling.stop_strings),
            "include_stop_str_in_output": True,
        }
        if sampling.tandem is not None:
            settings = asdict(sampling.tandem)
            parameters["extra_args"] = {TANDEM: {name: value for name, value in settings.items() if value is not None}}
        return parameters

    async def _exchange(self, path: str, about: Any, tokens: np.ndarray, timeout_s: float, max_bytes: int) -> bytes:
        """Posts a frame (a binary message, see frames.py) with tokens and a JSON description. Returns the response,
        which is a frame too, as bytes.
        """
        body = bytes(frames.pack(about, {"tokens": tokens}))
        return await self._http.exchange(path, body, frames.CONTENT_TYPE, timeout_s=timeout_s, max_bytes=max_bytes)

    def _with_authors(
        self, completion: Completion, tandem: TandemSampling, prompt: np.ndarray, seed: int
    ) -> Completion:
        """Returns a copy of the completion that has the author of each token: in Tandem RL, the senior or the junior
        model. vLLM's responses do not contain the authors, so they are computed again from the seed and the tokens.
        """
        before, ids = prompt[len(prompt) - tandem.written :], self._agreed[tandem.rule]
        written = np.concatenate([before, completion.tokens]).tolist()
        authors = replay(tandem.rule, ids, seed if tandem.seed is None else tandem.seed, written)
        return replace(completion, authors=np.asarray(authors, np.bool_)[len(before) :])

    async def _agree(self, rule: Rule) -> None:
        """Checks once per Tandem RL rule that the server has a junior model and the same boundary tokens as the
        client. Raises RequestRefused otherwise, because a vLLM server without a junior would ignore the Tandem RL
        settings of a request.
        """
        if rule in self._agreed:
            return
        if self._boundaries is None:
            raise RequestRefused("sampling.tandem without boundaries: roles.NAME.tandem gives them to the client")
        ids = self._boundaries(rule)
        call = {"method": "tandem_boundaries", "args": [asdict(rule)]}
        answer = await self._http.ask("POST", "/collective_rpc", call)
        with self._understood():
            found = set(answer["results"])
        if found != {fingerprint(ids)}:
            raise RequestRefused(
                f"{self.url} is no tandem, or has another tokenizer: its boundaries are {found}; "
                "start it by this config"
            )
        self._agreed[rule] = ids

    async def _room(self) -> int:
        """Returns the server's context length in tokens."""
        if self._context is None:
            answer = await self._http.ask("GET", "/v1/models")
            with self._understood():
                self._context = response_parsing.read_whole(answer["data"][0]["max_model_len"], 1)
        return self._context

    def _drawn(
        self, choice: Mapping[str, Any], part: frames.Arrays, sampling: Sampling, prompt: int, room: int
    ) -> Completion:
        """Parses one completion of at most `room` tokens. `prompt`: number of tokens of the prompt. For a malformed
        response, raises AnswerError, or another error that `_understood` converts to ServerLost.
        """
        tokens = response_parsing.read_tokens(part["tokens"], self._vocab, room)
        told = part["logprobs"] if sampling.logprobs else None
        experts = part.get("experts")
        if experts is not None:
            valid = experts.ndim == 3 and experts.min(initial=0) >= 0
            response_parsing.require(valid, f"experts {experts.shape}, or some below 0")
            # After an aborted request, for example, experts of some tokens are missing. Then all experts are dropped.
            experts = experts if 0 < len(experts) == prompt + len(tokens) - 1 else None
        model = told if sampling.plain or sampling.greedy else None
        return self._completion(choice, tokens, sampling, drawn=told, model=model, experts=experts, arrays=part)


class AdapterServer(VllmServer):
    """A client of a vLLM server that applies LoRA adapters to a base model, which never changes. A weight version is
    the LoRA adapter in the directory `adapters.directory`/v{version}.

    Several roles may share the server, each with a separate client. The weight sync (refit) of one role then does not
    interrupt requests of any role: requests in progress finish with the adapter that they started with.
    """

    def __init__(self, url: str, token: str, settings: Vllm, refit_timeout_s: float, facts: ModelFacts) -> None:
        super().__init__(url, token, settings, refit_timeout_s, facts)
        assert facts.adapters is not None
        self._adapters, self._version = facts.adapters, -1
        # Random part of the names of adapters, because vLLM's prefix cache identifies an adapter by its name and path.
        # A server may outlive a trainer, and the restarted trainer writes different weights under the same version
        # number. The random part distinguishes the adapters of both trainers.
        self._start = secrets.token_hex(4)

    def join(self, host: str, port: int, secret: str, replica: int) -> None:
        """A no-op: adapters are loaded from files, so there is no refit store to join."""

    def pause(self) -> None:
        if self._adapters.roles == 1:
            super().pause()

    def update(self, version: int, wait_s: float) -> None:
        order = {"method": "take_adapter", "args": self._named(version)}
        answer = self._post("/collective_rpc", order, timeout_s=wait_s + MARGIN_S)
        with self._understood():
            if {str(result) for result in answer["results"]} != {"True"}:  # vLLM returns each rank's result as a string
                raise ServerLost(f"{self.url} could not load the adapter of version {version}: see its log")
        self._version = version

    def resume(self) -> None:
        if self._adapters.roles == 1:
            super().resume()

    def version(self) -> int:
        return self._version

    def _adapter(self) -> dict[str, Any]:
        if self._version < 0:
            raise ServerLost(f"{self.url} has no adapter yet: a refit brings the first")
        return {ADAPTER: [*self._named(self._version), self._version]}

    def _named(self, version: int) -> list[Any]:
        """Returns [name, id, directory] of the LoRA adapter of a version. vLLM identifies adapters by ids above 0.
        The id is 1 + the index of the role + the version * the number of roles, so ids of roles on one server differ.
        """
        own = self._adapters
        return [f"{self._start}-v{version}", version * own.roles + own.place + 1, str(own.directory / f"v{version}")]


def open_client(url: str, token: str, settings: Vllm, refit_timeout_s: float, facts: ModelFacts) -> VllmServer:
    """Creates the client of a vLLM server: an AdapterServer if `facts.adapters` is set, otherwise a VllmServer."""
    kind = VllmServer if facts.adapters is None else AdapterServer
    return kind(url, token, settings, refit_timeout_s, facts)
