"""The base class for clients of one rollout server. A pool of servers has one client per server. Each kind of engine
has a subclass.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from megatron_rl.engines import response_parsing
from megatron_rl.engines.http import CONTROL_S, REFUSED, Http, ServerLost
from megatron_rl.engines.protocol import Completion, Sampling, TopScores
from megatron_rl.types import Stop

STOPS = {"length": Stop.LENGTH, "abort": Stop.ABORTED}
MARGIN_S = 30.0  # seconds by which the timeout of a refit request exceeds the maximum duration of the refit


@dataclass(frozen=True)
class Adapters:
    """The location of a role's LoRA adapters, for a server that applies LoRA adapters to an unchanged base model."""

    directory: Path  # contains one directory v{version} per weight version
    place: int = 0  # index of the role among the roles that share the server
    roles: int = 1  # number of roles that share the server


class Server:
    """A client of one server (replica). Every method that sends a request raises ServerLost if the server does not
    answer in time, and RequestRefused if the server refuses the request.

    Requests for rollouts and scores, many of which run concurrently, are coroutines on the caller's event loop. The
    other methods block the calling thread. The methods for weight syncs (refits) and sleep are no-ops for a server
    whose weights never change.
    """

    health: ClassVar[str]  # route that answers successfully while the server is ready
    version_route: ClassVar[str | None] = None  # route that returns `weight_version`; None if weights never change
    speaker: ClassVar[str]  # name of the engine in the possessive, for error messages, such as "vLLM's"
    # seconds before a failed request is sent again, unless the server asks for another delay
    retry_after_s: ClassVar[float] = 0.0

    def __init__(
        self, url: str, headers: Mapping[str, str], *, ends: Collection[int], vocab: int, refused: str = REFUSED
    ) -> None:
        """`ends`: the model's end-of-sequence tokens.
        `vocab`: size of the vocabulary; 0 if unknown.
        `refused`: the error message for a server that rejects the client's credentials.
        """
        self.url = url
        self._http = Http(url, headers, refused=refused)
        self._ends, self._vocab = frozenset(ends), vocab

    def ready(self) -> bool:
        """Returns whether the server is ready to answer now. Does not raise."""
        return self._http.answers(self.health)

    async def generate(
        self, prompt: np.ndarray, sampling: Sampling, *, seed: int, timeout_s: float, priority: int = 0
    ) -> list[Completion]:
        """Returns `sampling.n` completions of a prompt [T] int32. The field `versions` of a completion has the weight
        versions that generated its tokens. A completion that a weight sync (refit) interrupted has Stop.ABORTED. Sample
        j uses the seed `seed` + j. If the prompt fills the context, the completions are empty. A server with a queue by
        priority serves requests with a lower `priority` first.

        Raises ValueError for invalid sampling settings, and for settings that the engine does not support.
        """
        raise NotImplementedError

    async def score(self, sequences: Sequence[np.ndarray], k: int, *, timeout_s: float) -> list[TopScores]:
        """Returns for each sequence [T] int32 the log-probs of its tokens under the model at temperature 1 (0 for the
        first token), and the k most likely tokens at every position (k may be 0). Raises EngineError if the server
        cannot return these values.
        """
        raise NotImplementedError

    def join(self, host: str, port: int, secret: str, replica: int) -> None:
        """Connects the server to the trainer's refit store, which coordinates weight syncs. `secret`: the key that
        signs messages to the store.
        """

    def pause(self) -> None:
        """Prepares the server for a weight sync (refit). From now on, no tokens are generated; requests in progress are
        handled as `engine.pause` specifies. A sleeping server allocates the memory of its weights again, but not yet
        the memory of its KV cache.
        """

    def update(self, version: int, wait_s: float) -> None:
        """Takes part in the next weight sync (refit), which must begin within `wait_s` seconds. Returns when the server
        has the weights of `version`, and has dropped all cache entries of older weights.
        """

    def resume(self) -> None:
        """Continues requests after a weight sync (refit). A sleeping server stays asleep."""

    def sleep(self, *, discard: bool) -> None:
        """Puts the server to sleep: releases its GPU memory until `wake`. Requests in progress end as if aborted.

        `discard`: if True, the weights are dropped, because a weight sync (refit) sends all weights before the next
        request; otherwise the weights are kept in host memory.
        """

    def wake(self) -> None:
        """Wakes the server: allocates all memory that `sleep` released, and accepts requests again. A no-op for a
        server that is awake.
        """

    def version(self) -> int:
        """Returns the version of the server's weights; -1 before the first weight sync (refit)."""
        if self.version_route is None:
            return 0
        answer = self._http.call("GET", self.version_route)
        with self._understood():
            return _version_of(answer["weight_version"])

    def hang_up(self) -> None:
        """Aborts the requests in progress: they raise ServerLost. Thread-safe."""
        self._http.hang_up()

    def close(self) -> None:
        """Aborts the requests in progress and makes later requests raise ServerLost."""
        self._http.close()

    def _understood(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context manager for code that parses a response. It raises ServerLost for a malformed response."""
        return response_parsing.understood(self.url, self.speaker)

    def _post(self, path: str, body: Any = None, *, timeout_s: float = CONTROL_S) -> Any:
        return self._http.call("POST", path, body, timeout_s=timeout_s)

    def _check_count(self, found: Sequence[Any], count: int) -> None:
        """Raises AnswerError unless there are exactly `count` completions."""
        response_parsing.require(len(found) == count, f"{len(found)} completions, not {count}")

    def _completion(
        self,
        about: Mapping[str, Any],
        tokens: np.ndarray,
        sampling: Sampling,
        *,
        drawn: Any,
        model: Any,
        experts: np.ndarray | None = None,
        arrays: Mapping[str, np.ndarray] | None = None,
    ) -> Completion:
        """Checks and returns one completion of T `tokens`. Raises AnswerError for invalid values, and KeyError if
        `about` lacks a field.

        `about`: a mapping with the fields `finish_reason` (why the completion ended), `stop_reason` (the token or
        string that ended the completion) and, if the server's weights change, `weight_versions` (pairs of the index of
        the first token and the name of the weight version).
        `drawn`: [T] log-probs under the sampling distribution, or None if the server returned none (nan in the
        completion).
        `model`: [T] log-probs under the model at temperature 1, or None if the server returned none.
        `arrays`: the arrays of the response. If the most likely tokens were requested, `top_ids` and `top` are their
            ids and log-probs, [T, k] each. A completion without tokens, as of an aborted request, comes without them.
        """
        told, own = (
            None if each is None else response_parsing.read_logprobs(each, tokens.shape) for each in (drawn, model)
        )
        shape = len(tokens), sampling.num_top
        # A greedy token is sampled from a point mass, so its log-prob is 0.
        unknown = 0.0 if sampling.greedy else np.nan
        told_spans = () if self.version_route is None else about["weight_versions"]
        spans = [(start, _version_of(name)) for start, name in told_spans]
        return Completion(
            tokens=tokens,
            logprobs=np.full(len(tokens), unknown) if told is None or sampling.greedy else told,
            stop=self._stop(about["finish_reason"], about["stop_reason"], sampling),
            model_logprobs=own,
            experts=experts,
            **(response_parsing.read_top(arrays or {}, shape, self._vocab) if sampling.num_top else {}),
            versions=response_parsing.read_versions(spans, len(tokens)),
        )

    def _stop(self, reason: str, by: Any, sampling: Sampling) -> Stop:
        """Returns why a completion ended. `reason`: the reason that the server reports. `by`: the token or string that
        ended the completion, or None. The reason "stop" with `by` None means that the text ended.
        """
        match reason, by:
            case "stop", None:
                return Stop.EOS
            case "stop", int(token) if token in self._ends or token not in sampling.stop_tokens:
                return Stop.EOS
            case "stop", _:
                return Stop.STOP
        response_parsing.require(reason in STOPS, f"a completion that ended for an unknown reason: {reason}")
        return STOPS[reason]

    def _check_version(self, version: int) -> None:
        """Raises ServerLost if the server does not have this weight version after a weight sync (refit)."""
        if (found := self.version()) != version:
            raise ServerLost(f"{self.url} has version {found} of the weights after a refit to {version}")

    def _stops(self, sampling: Sampling) -> list[int]:
        """Returns the sorted ids of all tokens that end a completion: end-of-sequence tokens and stop tokens."""
        return sorted(self._ends.union(sampling.stop_tokens))

    def _scores(self, logprobs: np.ndarray, ids: np.ndarray) -> TopScores:
        """Checks and returns the scores of one sequence of T tokens.

        `logprobs`: [T, 1 + k], the log-prob of each token, then of the k most likely tokens.
        `ids`: [T, k], the k most likely tokens.

        Raises AnswerError for invalid values.
        """
        logprobs = response_parsing.read_logprobs(logprobs, (len(ids), 1 + ids.shape[1]))
        response_parsing.check_ids(ids, self._vocab)
        return TopScores(logprobs=logprobs[:, 0].copy(), ids=ids, top_logprobs=logprobs[:, 1:].copy())


def _version_of(name: str) -> int:
    """Converts the name that a server gives to a weight version to an integer. The initial weights, named "default",
    have version -1. Raises ValueError for any other name that is not an integer.
    """
    return -1 if name == "default" else int(name)
