"""A reward function that gets the scores of a reward model from a vLLM server, so that the trainer does not load the
reward model.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import PositiveFloat

from megatron_rl.config.base import Count, config
from megatron_rl.network.retries import asked_pause_s, is_wrong_request, pause_s
from megatron_rl.texts.tags import after_thinking
from megatron_rl.texts.text import fill, read_template

Prompt = str | Sequence[Mapping[str, Any]]  # a text, or the messages of a conversation
_PAUSE_S = 0.5  # pause before the second attempt, unless the server asks for another one
_USER, _ASSISTANT = "user", "assistant"


@config
class ServedRewardModel:
    """A reward function for the setting `reward.target`, called with lists of prompts and completions.

    The server is started with `vllm serve MODEL --runner pooling --convert classify`. Conversations are rendered with
    the chat template of the server's model. If `chat` is True, texts are also sent as conversations. If it is False,
    the model reads the prompt, the response and `end` as one concatenated text.
    """

    url: str  # address of the server, such as http://node17:8000
    model: str | None = None  # name of the served model; null: the only model of the server
    # Template of the prompt: a text file with {question}, or the name of a packaged prompt. null: the question alone.
    # Problems that are conversations need no template.
    template: str | None = None
    chat: bool = False  # whether a text prompt is sent as a user message, and the response as an assistant message
    end: str = ""  # text appended to the response if `chat` is False, such as the EOS token of the reward model
    # Part of the response that the reward model reads. whole: all of it. answer: the text after the last </think>.
    # With `answer`, the reward model reads nothing of a response with a thought that is not closed.
    reads: Literal["whole", "answer"] = "whole"
    # sigmoid: the score is the sigmoid of the model's output, from 0 to 1. none: the score is the output itself, which
    # needs reward.range.
    scale: Literal["sigmoid", "none"] = "sigmoid"
    key_variable: str | None = None  # environment variable that holds the API key; null: requests have no key
    attempts: Count = 5  # maximum number of attempts of a request, if the server cannot be reached or is busy
    timeout_s: PositiveFloat = 60.0  # timeout of one attempt in seconds; see also reward.timeout_s

    async def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Prompt]) -> list[float]:
        """Returns the score of each completion. Raises RuntimeError if the server refuses the request, does not return
        exactly one number per text, or cannot be reached.
        """
        import aiohttp  # imported here because the import is slow and only worker processes need it

        pairs = [self._read(*pair) for pair in zip(prompts, completions, strict=True)]
        texts = [text for text in pairs if isinstance(text, str)]
        bodies = [{"messages": chat} for chat in pairs if not isinstance(chat, str)] + [{"input": texts}] * bool(texts)
        headers = {"Authorization": f"Bearer {os.environ[self.key_variable]}"} if self.key_variable else {}
        timeout = aiohttp.ClientTimeout(total=self.timeout_s)
        async with aiohttp.ClientSession(timeout=timeout, headers=headers) as session:
            scores = await asyncio.gather(*(self._scores(session, body) for body in bodies))
        of_texts = iter(scores.pop() if texts else [])
        of_chats = iter(scores)
        return [next(of_texts) if isinstance(pair, str) else next(of_chats)[0] for pair in pairs]

    def _read(self, prompt: Prompt, completion: Prompt) -> str | list[dict[str, Any]]:
        """Returns the reward model's input for a prompt and a response: a text, or messages of a conversation."""
        response = completion if isinstance(completion, str) else str(completion[-1]["content"])
        response = after_thinking(response) if self.reads == "answer" else response
        if isinstance(prompt, str):
            if self.template is not None:
                prompt = fill(read_template(self.template), question=prompt)
            if not self.chat:
                return f"{prompt}{response}{self.end}"
            prompt = [{"role": _USER, "content": prompt}]
        messages = [dict(message) for message in prompt]
        if messages[-1]["role"] == _ASSISTANT:  # the response continues the last message of the prompt
            response = f"{messages.pop()['content']}{response}"
        return [*messages, {"role": _ASSISTANT, "content": response}]

    async def _scores(self, session: Any, body: Mapping[str, Any]) -> list[float]:
        """Returns the scores of the texts in the body of a request, in order."""
        answer = await self._answer(session, {**body, "use_activation": False})
        rows = sorted(answer["data"], key=lambda row: row["index"])
        count = len(body.get("input", [None]))
        if len(rows) != count or any(len(row["probs"]) != 1 for row in rows):
            raise RuntimeError(
                f"{self.url} answered {[len(row['probs']) for row in rows]} numbers for {count} texts: serve a "
                "sequence classifier with one label, which `megatron-rl sft` writes for a reward model"
            )
        scores = [float(row["probs"][0]) for row in rows]
        return scores if self.scale == "none" else [0.5 + 0.5 * math.tanh(score / 2) for score in scores]

    async def _answer(self, session: Any, body: Mapping[str, Any]) -> Any:
        """Posts a request to the route /classify and returns the parsed response. Repeats the request, up to `attempts`
        times in all, while the server cannot be reached or is busy."""
        import aiohttp

        why, asked_s, address = "", 0.0, f"{self.url.rstrip('/')}/classify"
        named = body if self.model is None else {**body, "model": self.model}
        for attempt in range(self.attempts):
            if attempt:
                await asyncio.sleep(pause_s(asked_s, _PAUSE_S, attempt))
            try:
                async with session.post(address, json=named) as response:
                    if response.status == 200:
                        return await response.json(content_type=None)
                    why = f"answered {response.status}: {(await response.text())[:400]}"
                    asked_s = asked_pause_s(response.status, response.headers)
                    if is_wrong_request(response.status):
                        break
            except (aiohttp.ClientError, TimeoutError) as error:
                why, asked_s = f"cannot be reached: {error or type(error).__name__}", 0.0
        raise RuntimeError(f"{address} {why}")
