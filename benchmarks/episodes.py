"""Measures what episodes cost the driver, whether tools run while others generate, and what faults of tools do.

The engine is a stand-in that has its answers ready, or needs a set time for each with so many at once, as a server
does: what is measured is everything around it. The tools of the faults' part are real Python processes. Where there is
an environment with vLLM, the overlap is measured with a real server of a tiny model besides: generation alone and, in
turn with it, generation with tools that wait as long in all as generation takes; means are compared.

    driver_ms_text, driver_ms_chat   CPU-milliseconds of the driver per answer, 256 episodes under way, by dialogue
    overlap                          max(time of the tools alone, time of generation alone) over the wall time of both
    server_overlap                   the same with the real server
    unaccounted, zeros               of 1,000 episodes with 5 % of the tools hanging or dying: those without an outcome,
                                     and those that failed and are samples all the same
    left                             processes of tools that are there afterwards
"""

from __future__ import annotations

import argparse
import contextlib
import heapq
import itertools
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import common
import numpy as np
import psutil
import served
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from megatron_rl.engines.protocol import Completion, Engine, SampleLog, Sampling, Tokens, TopScores
from megatron_rl.engines.vllm.settings import Vllm
from megatron_rl.environments.environment import Environment, EpisodeSettings
from megatron_rl.environments.episode_types import EnvironmentFailure, Episode, EpisodeEnd, NextRequest, Said
from megatron_rl.environments.python_tool import PythonTool
from megatron_rl.training.iteration import RolloutContext
from megatron_rl.types import Outcome, Prompt, Stop

BARS = {"overlap": 0.9, "server_overlap": 0.9}
LIMITS = {"driver_ms_text": 2.0, "driver_ms_chat": 2.0, "unaccounted": 0, "zeros": 0, "left": 0}
CHARACTERS = "".join(map(chr, range(32, 127))) + "\n"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOL_S, ANSWER_S = 0.4, 0.1  # of one call, of one answer
AT_ONCE = 32  # answers that the engine writes at the same time
TOOLS_AT_ONCE = 128
SERVED_TOOLS_AT_ONCE = 64  # a call takes less of the whole time than with more: the last ones have nothing beside them
SERVED_PAIRS = 4  # plays with tools, each between two without
VLLM_PYTHON = Path(__file__).parent.parent / ".venv-vllm/bin/python"


class StandIn:
    """An engine whose answers take a set time, so many at once."""

    version = 0

    def __init__(self, answer: Sequence[int], seconds: float = 0.0, at_once: int = AT_ONCE) -> None:
        self.answer, self.seconds, self.at_once = np.array(answer, np.int32), seconds, at_once

    def session(self, priority: int = 0, log: SampleLog | None = None) -> StandInSession:
        return StandInSession(self)

    def score(self, sequences: Sequence[Tokens]) -> list[np.ndarray]:
        raise NotImplementedError("nothing is scored here")

    def score_top(self, sequences: Sequence[Tokens], k: int) -> list[TopScores]:
        raise NotImplementedError("nothing is scored here")

    def tend(self) -> None: ...


class StandInSession:
    """Its session. An answer begins when one of the engine's places is free."""

    def __init__(self, engine: StandIn) -> None:
        self._engine, self._ready = engine, SimpleQueue[tuple[float, int] | None]()
        self._free = [0.0] * engine.at_once  # when each place is free again: a heap
        self._lock, self._outstanding, self._askers, self._closed = threading.Condition(), 0, 0, False

    def ask(self, key: int, tokens: Tokens, sampling: Sampling, *, after: int | None = None) -> None:
        with self._lock:
            start = max(time.perf_counter(), heapq.heappop(self._free))
            heapq.heappush(self._free, start + self._engine.seconds)
            self._outstanding += 1
            self._ready.put((start + self._engine.seconds, key))

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        self._askers += 1
        try:
            yield
        finally:
            with self._lock:
                self._askers -= 1
            self._ready.put(None)

    def answers(self) -> Iterator[tuple[int, list[Completion]]]:
        logprobs = np.full(len(self._engine.answer), -1.0, np.float32)
        while not self._closed and (self._outstanding or self._askers):
            due = self._ready.get()
            if due is None:
                continue
            time.sleep(max(0.0, due[0] - time.perf_counter()))
            with self._lock:
                self._outstanding -= 1
            yield due[1], [Completion(tokens=self._engine.answer, logprobs=logprobs, stop=Stop.EOS)]

    def close(self) -> None:
        self._closed = True
        self._ready.put(None)


@dataclass
class Rounds(Environment):
    """Answers each answer with a text, after a wait, so many times."""

    turns: int
    wait_s: float = 0.0
    text: str = "and so on, for about as many characters as a search result of some length has. " * 4

    def begin(self, task: Mapping[str, Any], seed: int) -> list[NextRequest]:
        self.left = self.turns
        return [NextRequest(agent="agent", role="agent", messages=[{"role": "user", "content": "Begin."}])]

    def step(self, said: Said) -> list[NextRequest] | EpisodeEnd:
        time.sleep(self.wait_s)
        self.left -= 1
        if not self.left:
            return EpisodeEnd(rewards={"agent": {"done": 1.0}})
        return [NextRequest(agent="agent", role="agent", messages=[{"role": "user", "content": self.text}])]


@dataclass
class Faults(Environment):
    """Runs a program for each episode; of 40 episodes one hangs with a process of its own, and in one it dies."""

    def __post_init__(self) -> None:
        self._tool = PythonTool()

    def begin(self, task: Mapping[str, Any], seed: int) -> list[NextRequest]:
        self.way, self.child = {0: "hangs", 1: "dies"}.get(seed % 40, ""), None
        return [NextRequest(agent="agent", role="agent", messages=[{"role": "user", "content": "Begin."}])]

    def step(self, said: Said) -> EpisodeEnd:
        if self.way == "dies":
            raise EnvironmentFailure("its process was killed")
        if self.way == "hangs":
            self.child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            self.child.wait()
            raise EnvironmentFailure("its process hung")
        return EpisodeEnd(rewards={"agent": {"right": float(self._tool.run({"code": "print(6 * 7)"}).strip() == "42")}})

    def close(self) -> None:
        if self.child is not None:
            self.child.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=256, help="under way at the same time")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--faulty", type=int, default=1000, help="episodes of the part with faults")
    parser.add_argument(
        "--python", type=Path, default=VLLM_PYTHON, help="interpreter that has vLLM; without it: no part with a server"
    )
    common.add_arguments(parser)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the server is ended on the way out
    metrics = {}
    for dialogue in ("text", "chat"):
        metrics[f"driver_ms_{dialogue}"] = driver_ms(args.episodes, args.turns, dialogue)
    metrics |= overlap(args.episodes, args.turns)
    metrics |= faults(args.faulty)
    if args.python.exists():
        metrics |= served_overlap(args.python, args.episodes, args.turns)
    else:
        print(f"no part with a server: there is no {args.python} (make engines)")
    bars = {name: bar for name, bar in BARS.items() if name in metrics}
    common.finish(metrics, bars, args, limits=LIMITS)


def driver_ms(episodes: int, turns: int, dialogue: str) -> float:
    """Returns CPU-milliseconds of this process per answer."""
    environment, context = Rounds(turns=turns), context_of(StandIn(words("I am writing an answer. " * 10)))
    play(environment, context, 8, EpisodeSettings(dialogue=dialogue))  # imports, threads
    start = time.process_time()
    played = play(environment, context, episodes, EpisodeSettings(dialogue=dialogue))
    return 1000 * (time.process_time() - start) / sum(episode.turns for episode in played)


def overlap(episodes: int, turns: int) -> dict[str, float]:
    """Returns the wall time of generation alone, of the tools alone, of both, and what they share."""
    answers = episodes * turns
    generation, tools = answers * ANSWER_S / AT_ONCE, answers * TOOL_S / TOOLS_AT_ONCE
    engine = StandIn(words("An answer."), ANSWER_S)
    start = time.perf_counter()
    play(Rounds(turns=turns, wait_s=TOOL_S), context_of(engine), episodes, EpisodeSettings(workers=TOOLS_AT_ONCE))
    wall = time.perf_counter() - start
    return {"generation_s": generation, "tools_s": tools, "wall_s": wall, "overlap": max(generation, tools) / wall}


def served_overlap(python: Path, episodes: int, turns: int) -> dict[str, float]:
    """Returns what `overlap` does, of a pool over one vLLM server. The same seeds give the same answers in both
    plays."""
    settings, answers = EpisodeSettings(workers=SERVED_TOOLS_AT_ONCE), episodes * turns

    def seconds(wait_s: float) -> float:
        start = time.perf_counter()
        play(Rounds(turns=turns, wait_s=wait_s, text="[an answer of a tool]"), context, episodes, settings)
        return time.perf_counter() - start

    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "model")
        server = Vllm(python=str(python), max_batch=AT_ONCE, wait_s=60.0)
        with served.open_pool(Path(folder), model, server, TOKENIZER.eos_token_id) as (pool, _):
            context = context_of(pool, max_tokens=16)
            seconds(0.0)  # the first answers take longer, and leave the same in the prefix cache for both
            generations, walls = [seconds(0.0)], []
            for _ in range(SERVED_PAIRS):  # one pair alone differs by 0.05 from the next
                walls.append(seconds(float(np.mean(generations)) * SERVED_TOOLS_AT_ONCE / answers))
                generations.append(seconds(0.0))
    generation, wall = float(np.mean(generations)), float(np.mean(walls))
    return {"server_generation_s": generation, "server_wall_s": wall, "server_overlap": generation / wall}


def write_model(directory: Path) -> Path:
    """Writes a random model that vLLM serves on a CPU, where it wants heads of 32 at least, and its tokenizer."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 128}
    tokens = {"vocab_size": len(TOKENIZER), "eos_token_id": TOKENIZER.eos_token_id, "max_position_embeddings": 2048}
    Qwen2ForCausalLM(Qwen2Config(num_hidden_layers=2, **sizes, **tokens)).save_pretrained(directory)
    TOKENIZER.save_pretrained(directory)
    return directory


def faults(episodes: int) -> dict[str, float]:
    """Returns what became of episodes whose tools hang or die."""
    children_before = {child.pid for child in psutil.Process().children(recursive=True)}
    settings = EpisodeSettings(step_timeout_s=20.0, workers=64)
    start = time.perf_counter()
    played = play(Faults(), context_of(StandIn(words("An answer."))), episodes, settings)
    seconds = time.perf_counter() - start
    time.sleep(1.0)
    expected = [{0: Outcome.TIMEOUT, 1: Outcome.ERROR}.get(seed % 40, Outcome.SCORE) for seed in range(episodes)]
    right = sum(episode.outcome is want for episode, want in zip(played, expected, strict=True))
    failed = [episode for episode in played if episode.outcome is not Outcome.SCORE]
    wrong = [r for episode in played for r in episode.rollouts if r.rewards != {"right": 1.0}]
    survivors = {child.pid for child in psutil.Process().children(recursive=True)} - children_before
    return {
        "faulty_s": seconds,
        "timeouts": sum(episode.outcome is Outcome.TIMEOUT for episode in played),
        "errors": sum(episode.outcome is Outcome.ERROR for episode in played),
        "unaccounted": episodes - right,
        "zeros": len(wrong) + sum(len(episode.rollouts) for episode in failed),
        "left": len(survivors),
    }


def play(environment: Environment, context: RolloutContext, episodes: int, settings: EpisodeSettings) -> list[Episode]:
    tasks = [Prompt(id=f"0/{i}", tokens=[0]) for i in range(episodes)]
    return environment.play(context, tasks, range(episodes), dict(context.samplings), settings)


def context_of(engine: Engine, max_tokens: int = 512) -> RolloutContext:
    return RolloutContext(
        engines={"agent": engine},
        tokenizers={"agent": TOKENIZER},
        samplings={"agent": Sampling(max_tokens=max_tokens)},
        max_prompt_tokens={"agent": 1 << 20},
        grade=lambda responses, payloads: [],
    )


def words(text: str) -> list[int]:
    return [*TOKENIZER(text, add_special_tokens=False)["input_ids"], TOKENIZER.eos_token_id]


def _tokenizer() -> PreTrainedTokenizerFast:
    special = ["<|im_start|>", "<|im_end|>"]
    vocabulary = {piece: i for i, piece in enumerate(itertools.chain(special, CHARACTERS))}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<|im_start|>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens(special)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


TOKENIZER = _tokenizer()

if __name__ == "__main__":
    main()
