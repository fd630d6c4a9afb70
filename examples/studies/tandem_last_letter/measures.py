"""Measures a trained model on held-out problems: alone, in turns with the junior, and as the junior reads it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from megatron_rl.contrib.last_letter import grade
from megatron_rl.engines.embedded.embedded_engine import EmbeddedEngine
from megatron_rl.engines.protocol import Sampling, complete
from megatron_rl.texts.chat_template import tokenize
from megatron_rl.texts.text import fill, load_tokenizer
from megatron_rl.types import Stop

TEMPLATE = Path(__file__).parents[2] / "miniatures/last_letter/prompts/generator.txt"
TURN_END = "</step>"  # a hand-off changes the author here, as these texts have no blank lines
MAX_TOKENS = 48
SEED = 17
Metrics = dict[str, float]


def measure(senior: Path, junior: Path, test: Path, *, samples: int) -> Metrics:
    """Returns accuracies and the junior's cross-entropy, all on the same problems, sampled at temperature 1."""
    tokenizer: Any = load_tokenizer(senior)
    problems = [json.loads(line) for line in test.read_text().splitlines()]
    prompts = [tokenize(tokenizer, fill(TEMPLATE.read_text().strip(), question=p["question"])) for p in problems]
    pair = [loaded(model, tokenizer) for model in (senior, junior)]
    sampling = Sampling(max_tokens=MAX_TOKENS, n=samples, seed=SEED)

    def accuracy(texts: Sequence[Sequence[list[int]]]) -> float:
        read = [[tokenizer.decode(t, skip_special_tokens=True) for t in group] for group in texts]
        return fmean(grade(text, problem) for problem, group in zip(problems, read, strict=True) for text in group)

    solo = [[c.tokens.tolist() for c in group] for group in complete(pair[0], prompts, sampling)]
    greedy = complete(pair[0], prompts, replace(sampling, temperature=0.0, n=1))
    chains = handed_over(pair, [prompt for prompt in prompts for _ in range(samples)], sampling, tokenizer)
    texts = [(prompt, tokens) for prompt, group in zip(prompts, solo, strict=True) for tokens in group if tokens]
    scores = pair[1].score([[*prompt, *tokens] for prompt, tokens in texts])
    return {
        "solo_sampled": accuracy(solo),
        "solo_greedy": accuracy([[c.tokens.tolist() for c in group] for group in greedy]),
        "handoff": accuracy([chains[i * samples : (i + 1) * samples] for i in range(len(prompts))]),
        "cross_entropy": fmean(
            -float(row[len(prompt) :].mean()) for row, (prompt, _) in zip(scores, texts, strict=True)
        ),
        "length": fmean(len(tokens) for _, tokens in texts),
    }


def handed_over(
    pair: Sequence[EmbeddedEngine], prompts: Sequence[list[int]], sampling: Sampling, tokenizer: Any
) -> list[list[int]]:
    """Writes one text for each prompt. The senior begins; the author changes after every reasoning step."""
    out: list[list[int]] = [[] for _ in prompts]
    going, rounds = list(range(len(prompts))), 0
    [end] = tokenizer.convert_tokens_to_ids([TURN_END])
    while going:
        turn = replace(sampling, n=1, stop_tokens=(end,), seed=sampling.seed + rounds)
        written = complete(pair[rounds % 2], [prompts[i] + out[i] for i in going], turn)
        again = []
        for i, [c] in zip(going, written, strict=True):
            out[i] = (out[i] + c.tokens.tolist())[:MAX_TOKENS]
            if c.stop is Stop.STOP and len(out[i]) < MAX_TOKENS:
                again.append(i)
        going, rounds = again, rounds + 1
    return out


def loaded(model: Path, tokenizer: Any) -> EmbeddedEngine:
    engine = EmbeddedEngine(model, tokenizer=tokenizer)
    engine.load_pretrained()
    return engine
