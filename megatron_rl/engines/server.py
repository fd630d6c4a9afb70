"""One server of rollouts, as a pool uses it: the verbs that the clients of all engines have, and what these share."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from megatron_rl.engines import response_parsing
from megatron_rl.engines.http import CONTROL_S, REFUSED, Http, RequestRefused, ServerLost
from megatron_rl.engines.protocol import Completion, Sampling, TopScores

MARGIN_S = 30.0  # seconds beyond what a refit may take, before its request is given up


@dataclass(frozen=True)
class Adapters:
    """The place of a role's adapters, for a server that computes with them beside a model."""

    directory: Path  # with v{version} in it
    place: int = 0  # of the role among the roles that share the server
    roles: int = 1  # roles that share the server


class Server:
    """A client of one replica. Every verb raises ServerLost when the replica does not answer in time, RequestRefused
    when it says no.

    Requests for rollouts and scores, of which there are many at a time, wait on the caller's event loop; the other
    verbs hold the thread that calls them. A server whose weights are its own refuses the verbs of refits and sleep.
    """

    health: ClassVar[str]  # route that answers while the server is ready
    speaker: ClassVar[str]  # whose answers the client expects, for messages: "vLLM's"
    retry_after_s: ClassVar[float] = 0.0  # seconds that a server is left alone whose answer makes no sense

    def __init__(
        self, url: str, headers: Mapping[str, str], *, ends: Collection[int], vocab: int, refused: str = REFUSED
    ) -> None:
        """`ends`: the model's end-of-sequence tokens. `vocab`: size of the vocabulary, 0 where it is not known.
        `refused`: what is wrong, and the cure, when the server does not know who asks.
        """
        self.url = url
        self._http = Http(url, headers, refused=refused)
        self._ends, self._vocab = frozenset(ends), vocab

    def ready(self) -> bool:
        """Tells whether the server answers now; raises nothing."""
        return self._http.answers(self.health)

    async def generate(
        self, prompt: np.ndarray, sampling: Sampling, *, seed: int, timeout_s: float
    ) -> list[Completion]:
        """Returns `sampling.n` completions of [T] int32, each with its `versions`; a completion that a refit cut short
        has Stop.ABORTED. Sample j draws by `seed` + j. A prompt that fills the context has empty completions.

        Raises ValueError for impossible sampling settings, and for settings that the engine has no words for.
        """
        raise NotImplementedError

    async def score(self, sequences: Sequence[np.ndarray], k: int, *, timeout_s: float) -> list[TopScores]:
        """Returns for each [T] int32 the log-probs of its tokens under the model at temperature 1, 0 for the first, and
        the k likeliest tokens at every place (k may be 0). Raises EngineError where the server does not tell them.
        """
        raise NotImplementedError

    def join(self, host: str, port: int, secret: str, replica: int) -> None:
        """Joins the trainer's refit store. `secret`: what signs there."""
        raise self._has_own_weights()

    def pause(self) -> None:
        """Prepares for a refit: no request writes tokens from here on, as `engine.pause` says. A server that sleeps
        takes the memory of its weights again, and not yet the memory of its keys and values.
        """
        raise self._has_own_weights()

    def update(self, version: int, wait_s: float) -> None:
        """Takes part in the refit that comes within `wait_s`; returns when the weights are in, under this version, and
        no old cache is left.
        """
        raise self._has_own_weights()

    def resume(self) -> None:
        """Lets requests go on after a refit; a server that sleeps goes on sleeping."""
        raise self._has_own_weights()

    def sleep(self, *, discard: bool) -> None:
        """Gives the memory of the GPU back until `wake`; requests under way end as by an abort. `discard`: the weights
        are dropped, as a refit brings all of them before the next request; else host memory keeps them.
        """
        raise self._has_own_weights()

    def wake(self) -> None:
        """Takes all memory again that `sleep` gave back, and answers requests from here on. A server that is awake
        stays as it is.
        """
        raise self._has_own_weights()

    def version(self) -> int:
        """Returns the version of the server's weights; -1 before the first refit."""
        return 0

    def hang_up(self) -> None:
        """Breaks off the verbs under way, which raise ServerLost now. Any thread may call it."""
        self._http.hang_up()

    def close(self) -> None:
        """Hangs up for good: later verbs raise ServerLost too."""
        self._http.close()

    def _has_own_weights(self) -> RequestRefused:
        return RequestRefused(f"{self.url}: the server's weights are its own; a role that is trained needs an engine")

    def _understood(self) -> contextlib.AbstractContextManager[None]:
        """Treats an answer of another shape than the engine's as a failed request."""
        return response_parsing.understood(self.url, self.speaker, retry_after_s=self.retry_after_s)

    def _post(self, path: str, body: Any = None, *, timeout_s: float = CONTROL_S) -> Any:
        return self._http.call("POST", path, body, timeout_s=timeout_s)

    def _check_count(self, found: Sequence[Any], count: int) -> None:
        """Raises ServerLost when there are not `count` completions."""
        if len(found) != count:
            raise ServerLost(f"{self.url} sent {len(found)} completions, not {count}", retry_after_s=self.retry_after_s)

    def _check_version(self, version: int) -> None:
        """Raises ServerLost when the server has other weights after a refit."""
        if (found := self.version()) != version:
            raise ServerLost(f"{self.url} has version {found} of the weights after a refit to {version}")

    def _stops(self, sampling: Sampling) -> list[int]:
        """Returns all tokens that end a completion."""
        return sorted(self._ends.union(sampling.stop_tokens))

    def _scores(self, logprobs: np.ndarray, ids: np.ndarray) -> TopScores:
        """Returns the scores of one text: `logprobs` [T, 1 + k] of its tokens and of the likeliest ones, `ids` [T, k]
        of the likeliest ones. Raises AnswerError for numbers that make no sense.
        """
        logprobs = response_parsing.read_logprobs(logprobs, (len(ids), 1 + ids.shape[1]))
        response_parsing.check_ids(ids, self._vocab)
        return TopScores(logprobs=logprobs[:, 0].copy(), ids=ids, top_logprobs=logprobs[:, 1:].copy())
