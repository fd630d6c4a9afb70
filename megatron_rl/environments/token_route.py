"""The token route: an HTTP server through which programs on this machine request tokens from the roles' engines.

Requests and responses have the format of vLLM's /inference/v1/generate, which the libraries verifiers and renderers
use. The server records the sampled tokens with float32 log-probs and weight versions, so that no information is lost in
the conversion to JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import itertools
import math
import secrets
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

import numpy as np
import pydantic
from aiohttp import web

from megatron_rl.engines.protocol import Completion, EngineError, Sampling
from megatron_rl.environments.engine_answers import EngineAnswers
from megatron_rl.lib.loop_thread import LoopThread
from megatron_rl.training.iteration import RolloutContext
from megatron_rl.training.rollouts import from_completion
from megatron_rl.types import Prompt, Rollout, Stop

MODELS, GENERATE, SESSION = "/v1/models", "/inference/v1/generate", "X-Session-ID"
MOST_BYTES = 64 << 20  # maximum size of a request's body
MOST_STOPS = 64  # maximum number of stop tokens in a request
MOST_STRANGERS = 64  # maximum number of open connections that have not sent the server's access token yet
CLOSE_S = 10.0  # timeout for closing the server's connections, in seconds
TokenId = Annotated[int, pydantic.Field(strict=True, ge=0, lt=1 << 31)]
REASONS = {Stop.EOS: "stop", Stop.STOP: "stop", Stop.LENGTH: "length", Stop.ABORTED: "abort"}


class RouteRefusal(ValueError):
    """Raised when the server rejects a request, and sent as the HTTP error response.

    `status`: the HTTP status. `code`: an error code that client libraries know, or None."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class _SamplingParams(pydantic.BaseModel, strict=True):
    """The sampling parameters that the server uses. All other sampling parameters of a request are ignored."""

    max_tokens: pydantic.PositiveInt | None = None
    stop_token_ids: Annotated[list[TokenId], pydantic.Field(max_length=MOST_STOPS)] | None = None


class _Request(pydantic.BaseModel, strict=True):
    """The body of a request for tokens."""

    model: str  # the role
    token_ids: Annotated[list[TokenId], pydantic.Field(min_length=1)]  # the prompt
    sampling_params: _SamplingParams
    features: Any = None  # inputs other than text; a request with such inputs is refused
    content_parts: Any = None


class TokenRoute:
    """The token route: an HTTP server on the loopback address that forwards requests to the roles' engines while
    episodes are played.

    In every request, `model` is the role, the header X-Session-ID identifies the agent (`RoutedPlay.session_id`), and
    the bearer token is `token`. The server listens from the construction of the object until `close`.
    """

    def __init__(self) -> None:
        self.token = secrets.token_hex(32)
        self._plays: dict[str, RoutedPlay] = {}
        self._names = map(str, itertools.count())
        # Connections that have not sent a valid access token yet, oldest first. Their number is limited, because any
        # user of this machine can open connections. A legitimate client sends the token at once.
        self._strangers: dict[web.RequestHandler, None] = {}
        self._thread = LoopThread("token route")
        self.url = f"http://127.0.0.1:{self._thread.run(self._open())}"

    def close(self) -> None:
        if not self._thread.loop.is_closed():
            self._thread.run(self._close())
            self._thread.close()

    @contextlib.contextmanager
    def serving(
        self, context: RolloutContext, samplings: Mapping[str, Sampling], seeds: Sequence[int],
        numbers: Sequence[int] | None = None,
    ) -> Iterator[RoutedPlay]:  # fmt: skip
        """Context manager. Inside its block, the server answers requests. Yields a RoutedPlay, which records the
        answers.

        `context`: contains the engines of the roles. `samplings`: {role: sampling parameters}; the server accepts
        requests for these roles only. `seeds`, `numbers`: seed and index of each of the E episodes that are played
        inside the block. If `numbers` is None, the indices are 0 to E - 1.
        """
        play = RoutedPlay(next(self._names), context, samplings, seeds, numbers)
        self._plays[play.name] = play
        try:
            with play.reading():
                yield play
        finally:
            del self._plays[play.name]

    def models(self) -> dict[str, Any]:
        """Returns the response to GET /v1/models: the roles for which requests are accepted at present, each with
        `max_model_len`, the maximum number of prompt tokens."""
        longest = {role: most for play in list(self._plays.values()) for role, most in play.longest.items()}
        return {"object": "list", "data": [{"id": role, "max_model_len": most} for role, most in longest.items()]}

    async def generate(self, session: str, body: bytes) -> dict[str, Any]:
        """Forwards a request to the engine of its role and returns the response. Raises RouteRefusal if the request is
        invalid or the engine fails.

        `session`: value of the header X-Session-ID, of the form play.episode.agent. `body`: the JSON body.
        """
        name, _, rest = session.partition(".")
        place, _, agent = rest.partition(".")
        play = self._plays.get(name)
        if play is None:
            raise RouteRefusal(409, f"{SESSION} = {session!r}: its episode is over")
        if not agent or not place.isdecimal() or int(place) >= play.episodes:
            raise RouteRefusal(400, f"{SESSION} = {session!r}: it has the form play.episode.agent")
        try:
            request = _Request.model_validate_json(body)
        except pydantic.ValidationError as error:
            wrong = error.errors()[0]
            place, shown = ".".join(map(str, wrong["loc"])) or "the body", repr(wrong["input"])[:80]
            raise RouteRefusal(400, f"{place} = {shown}: {wrong['msg']}") from None
        return await play.generate(int(place), agent, request)

    async def _open(self) -> int:
        """Starts the server. Returns its port."""
        self._server = web.Server(self._answer, access_log=None)
        loop = asyncio.get_running_loop()
        self._listening = await loop.create_server(self._admitted, "127.0.0.1", 0, backlog=1024)
        return self._listening.sockets[0].getsockname()[1]

    async def _close(self) -> None:
        self._listening.close()
        await self._server.shutdown(CLOSE_S)

    def _admitted(self) -> web.RequestHandler:
        """Returns the protocol object of a new connection. If there are more than MOST_STRANGERS connections without a
        valid token, the oldest such connection is closed."""
        if len(self._strangers) >= MOST_STRANGERS:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            # call_soon closes the connection later, because it may not be open yet
            asyncio.get_running_loop().call_soon(oldest.force_close)
        connection = self._server()
        self._strangers[connection] = None
        return connection

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Returns the response to a request. Converts a RouteRefusal to an error response in the client's format."""
        try:
            header, expected = request.headers.get("Authorization", ""), f"Bearer {self.token}"
            if not hmac.compare_digest(header.encode(errors="surrogateescape"), expected.encode()):
                raise RouteRefusal(401, "the token is not this run's")
            self._strangers.pop(request.protocol, None)
            return web.json_response(await self._said(request))
        except RouteRefusal as refusal:
            error = {"message": str(refusal), "type": "invalid_request_error", "code": refusal.code}
            return web.json_response({"error": error}, status=refusal.status)

    async def _said(self, request: web.BaseRequest) -> dict[str, Any]:
        route, length = f"{request.method} {request.path}", request.content_length
        if route == f"GET {MODELS}":
            return self.models()
        if route != f"POST {GENERATE}":
            raise RouteRefusal(404, f"{route}: there is GET {MODELS} and POST {GENERATE}")
        if length is None:
            raise RouteRefusal(411, "give a Content-Length")
        if length > MOST_BYTES:
            raise RouteRefusal(413, f"a body of {length} bytes: at most {MOST_BYTES} are read")
        return await self.generate(request.headers.get(SESSION, ""), await request.content.read())


class RoutedPlay(EngineAnswers):
    """The requests that arrive during one call of `EpisodeMaker.play`, and the recorded answers of the engines."""

    def __init__(
        self, name: str, context: RolloutContext, samplings: Mapping[str, Sampling], seeds: Sequence[int],
        numbers: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(context, samplings)
        self.name, self.episodes = name, len(seeds)
        self.numbers = range(len(seeds)) if numbers is None else numbers
        self.longest = {role: context.max_prompt_tokens[role] for role in samplings}
        self._samplings, self._seeds = samplings, seeds
        # {(episode, agent, hash of the prompt): number of requests so far}
        self._asked: Counter[tuple[int, str, bytes]] = Counter()
        self._last: dict[tuple[int, str], int] = {}  # {(episode, agent): key of the latest request}
        self._answers: dict[tuple[int, str], list[Rollout]] = {}  # {(episode, agent): recorded answers}

    def session_id(self, place: int, agent: str) -> str:
        """Returns the value of the header X-Session-ID for an agent of the episode with index `place`."""
        return f"{self.name}.{place}.{agent}"

    def answer(self, place: int, agent: str, tokens: np.ndarray, start: int) -> Rollout | None:
        """Finds the recorded answer of an agent that has exactly these tokens. Returns it as a rollout with prompt and
        answer, or None if no engine sampled this answer to this prompt.

        `place`: index of the episode. `tokens` [T] int32: prompt and answer. `start`: index of the answer's first
        token.
        """
        answers = list(self._answers.get((place, agent), ()))
        return next((a for a in answers if a.start == start and np.array_equal(a.tokens, tokens)), None)

    async def generate(self, place: int, agent: str, request: _Request) -> dict[str, Any]:
        """Forwards a request to the engine of its role, and returns the answer in the client's format.

        The seed of the answer is a function of the role's seed, the seed and index of the episode, the agent, the
        prompt, and the number of earlier requests of the agent with this prompt. Several programs of one agent may send
        requests at the same time. Raises RouteRefusal if the request is invalid or the engine fails.
        """
        role, tokens = request.model, np.array(request.token_ids, np.int32)
        if role not in self._samplings:
            raise RouteRefusal(404, f"model = {role!r}: the roles are {', '.join(self._samplings)}")
        if request.features is not None or request.content_parts is not None:
            raise RouteRefusal(400, "features, content_parts: the roles' models read tokens of text alone")
        if len(tokens) > (longest := self.longest[role]):
            message = (
                f"This model's maximum context length is {longest} tokens, and the prompt has {len(tokens)}: raise "
                f"roles.{role}.max_prompt_tokens where it shall be taken"
            )
            raise RouteRefusal(400, message, "context_length_exceeded")
        completion = await self._completion(place, agent, role, tokens, _forced(self._samplings[role], request))
        version = self._context.engines[role].version
        weight = self._context.partner_weights.get(role, 0.0)
        prompt = Prompt(id=agent, tokens=tokens)
        answer = from_completion(prompt, completion, role=role, group=agent, version=version, partner_weight=weight)
        self._answers.setdefault((place, agent), []).append(answer)
        return {"choices": [_choice(completion)]}

    async def _completion(
        self, place: int, agent: str, role: str, tokens: np.ndarray, sampling: Sampling
    ) -> Completion:  # fmt: skip
        prompt = hashlib.blake2b(tokens.tobytes(), digest_size=8).digest()
        times = self._asked[place, agent, prompt]
        self._asked[place, agent, prompt] += 1
        number = self.numbers[place]
        key = self._context.seed_for("token route", self._seeds[place], number, agent, prompt.hex(), times)
        previous, self._last[place, agent] = self._last.get((place, agent)), key
        try:
            return await asyncio.wrap_future(self.ask(role, key, tokens, sampling, after=previous))
        except asyncio.CancelledError:
            raise RouteRefusal(503, "the engine failed, or the play is over") from None
        except EngineError as error:
            raise RouteRefusal(503, str(error)) from error
        except ValueError as error:
            raise RouteRefusal(400, str(error)) from error


def _forced(sampling: Sampling, request: _Request) -> Sampling:
    """Returns the role's sampling parameters, with the request's `max_tokens` if it is lower, and with the request's
    stop tokens.

    The request's stop tokens are added to the role's, because the client's chat template may end a turn with a token
    that is not among the role's stop tokens.
    """
    most, stops = request.sampling_params.max_tokens, request.sampling_params.stop_token_ids or ()
    stop_tokens = tuple(dict.fromkeys([*sampling.stop_tokens, *stops]))
    return replace(
        sampling, max_tokens=min(sampling.max_tokens, most or sampling.max_tokens), stop_tokens=stop_tokens, n=1
    )


def _choice(completion: Completion) -> dict[str, Any]:
    """Returns a completion in the client's format.

    Log-probs that are not finite, for example because they were not requested, are sent as 0, because the client
    rejects non-finite values. The recorded answer keeps the engine's values.
    """
    pairs = zip(completion.tokens.tolist(), completion.logprobs.tolist(), strict=True)
    content = [{"token": f"token_id:{t}", "logprob": p if math.isfinite(p) else 0.0} for t, p in pairs]
    return {
        "index": 0,
        "token_ids": completion.tokens.tolist(),
        "finish_reason": REASONS[completion.stop],
        "logprobs": {"content": content},
    }
