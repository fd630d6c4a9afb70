"""Writes the files of the miniature of Multi-Agent Evolve: a tiny model, problems, SFT pairs for the three roles."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from rule import LETTERS, MOST, letters_of, listed, row, solved
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from megatron_rl.texts.text import fill

PROMPTS = Path(__file__).parent / "prompts"
SPECIAL = ["<pad>", "<bos>", "<eos>"]
TAGS = [f"<{slash}{tag}>" for tag in ("question", "answer", "score", "think") for slash in ("", "/")]
WORDS = ["<propose>", "<reference>", "<solve>", "<mark>", "<check>", "yes", "no", "1", "10"]
KNOWN = [*TAGS, *WORDS, *(f"#{i}" for i in range(1, MOST + 1)), *LETTERS]
MISTAKE = 0.35  # probability that the solver's late teacher leaves a letter as it is
MALFORMED = 0.15  # of the proposals of SFT
UNTIDY = 0.15  # of the judgements of the late teacher


def write_model(directory: Path, seed: int, known: Sequence[str] = KNOWN, *, pieces: str | None = None) -> None:
    """Writes a Qwen2 of 0.16 M parameters with random weights, and its tokenizer of one token for each known word.

    Words are set apart by spaces; or they are what the regular expression `pieces` finds, and stand without a space.
    """
    words = [*SPECIAL, *known]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if pieces is not None:
        backend.pre_tokenizer, backend.decoder = pre_tokenizers.Split(Regex(pieces), "isolated"), decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )
    config = Qwen2Config(
        vocab_size=len(words), hidden_size=64, intermediate_size=192, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, rms_norm_eps=1e-6, tie_word_embeddings=False,
        use_sliding_window=False, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    torch.manual_seed(seed)
    with torch.no_grad():  # the usual 0.02 learns too slowly at this size
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, parameter.shape[1] ** -0.5 * (0.4 if name.endswith("_proj.weight") else 0.6))
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def write_problems(path: Path, lengths: tuple[int, int], count: int, seed: int) -> None:
    """Writes problems of so many letters, from the least to the most."""
    rng = random.Random(seed)
    drawn = [draw_letters(rng, rng.randint(*lengths)) for _ in range(count)]
    write_jsonl(path, [{"question": row(letters), "answer": listed(solved(letters))} for letters in drawn])


def write_pairs(path: Path, seed: int, *, batch: int, clean_steps: int, late_steps: int) -> None:
    """Writes SFT pairs for all three roles in training order. The late teacher of solver and judge is careless, so that
    reinforcement learning has something to mend."""
    rng, rows = random.Random(seed), []
    for i in range(batch * (clean_steps + late_steps)):
        late = i >= batch * clean_steps
        rows.append([_proposal, draw_solution, _check, _mark, _check][i % 5](rng, late))  # to check is the hardest
    write_jsonl(path, rows)


def _proposal(rng: random.Random, late: bool) -> dict[str, str]:
    """Short questions are frequent; one after a reference is about as long."""
    size = draw_length(rng)
    prompt = _template("proposer")
    if rng.random() < 0.5:
        before = rng.randint(1, MOST)
        prompt = fill(_template("reference"), references=row(draw_letters(rng, before)))
        size = min(MOST, max(1, before + rng.choice([-1, 0, 0, 1])))
    question = _broken(rng, size) if rng.random() < MALFORMED else row(draw_letters(rng, size))
    return {"prompt": prompt, "response": f"<question> {question} </question>"}


def draw_solution(rng: random.Random, late: bool) -> dict[str, str]:
    letters = draw_letters(rng, rng.randint(1, MOST))
    answer = draw_answer(rng, letters, MISTAKE if late else 0.0)
    return {"prompt": fill(_template("solver"), question=row(letters)), "response": answer}


def _mark(rng: random.Random, late: bool) -> dict[str, str]:
    size = rng.randint(1, MOST)
    question = _broken(rng, size) if rng.random() < 0.5 else row(draw_letters(rng, size))
    score = "1" if letters_of(question) is None else "10"
    return {"prompt": fill(_template("question"), question=question), "response": _score(rng, score, late)}


def _check(rng: random.Random, late: bool) -> dict[str, str]:
    """Recites every letter of the answer, the correct one, and whether they agree."""
    letters = draw_letters(rng, rng.randint(1, MOST))
    answer = draw_answer(rng, letters, rng.choice([0.0, 0.15, MISTAKE]))
    given, correct = answer.split()[2:-1:2], solved(letters)
    seen = [
        f"#{i} {own} {letter} {'yes' if letter == own else 'no'}"
        for i, (letter, own) in enumerate(zip(correct, given, strict=True), start=1)
    ]
    score = _score(rng, "10" if given == correct else "1", late)
    prompt = fill(_template("answer"), question=row(letters), answer=answer)
    return {"prompt": prompt, "response": f"<think> {' '.join(seen)} </think> {score}"}


def draw_answer(rng: random.Random, letters: list[str], mistake: float) -> str:
    given = [own if rng.random() < mistake else correct for own, correct in zip(letters, solved(letters), strict=True)]
    return f"<answer> {listed(given)} </answer>"


def _score(rng: random.Random, score: str, late: bool) -> str:
    block = f"<score> {score} </score>"
    return block if not late or rng.random() > UNTIDY else rng.choice([f"<score> {score}", f"{block} {block}"])


def draw_length(rng: random.Random) -> int:
    return rng.choices(range(1, MOST + 1), weights=[0.55**i for i in range(MOST)])[0]


def draw_letters(rng: random.Random, count: int) -> list[str]:
    return [rng.choice(LETTERS) for _ in range(count)]


def _broken(rng: random.Random, size: int) -> str:
    """Draws a text of this size that looks like a question and is none."""
    words = row(draw_letters(rng, size)).split()
    place = rng.randrange(len(words))
    match rng.randrange(3):
        case 0:
            words[place] = "#1" if words[place] in LETTERS else rng.choice(LETTERS)
        case 1:
            words.insert(place, words[place])
        case _:
            del words[place]
    return " ".join(words) if words else rng.choice(LETTERS)


def _template(name: str) -> str:
    return (PROMPTS / f"{name}.txt").read_text(encoding="utf-8").strip()


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")
