"""Writes how TRL's GOLD trainer aligns the tokens of two tokenizers, and its log-probs of the aligned parts, to a JSON
file.

    .venv-oracles/bin/python tests/oracles/trl_gold.py OUT.json

Offsets, groups and merged probabilities are those of TRL's own functions, in float64. What two models would compute,
the probabilities of the vocabularies at every place, are random tables here. Of a merged distribution the entry of the
token that stands there is kept: the probability of the group's text.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from trl.experimental.gold import GOLDConfig
from trl.experimental.gold.gold_trainer import ULDLoss, build_teacher_inputs_from_texts
from trl.experimental.utils import piece_byte_len
from trl_losses import written

CORPORA = {  # what the two tokenizers learn their merges from
    "student": "the cat sat on the mat and the other cat sat there " * 4,
    "teacher": "a theatre of cats: 123 + 456 = 579, caf\u00e9 \u4e2d\u6587 mathematics " * 4,
}
MERGES = {"student": 24, "teacher": 60}
TEXTS = {
    "words": "the cat sat on the mat",
    "numbers": "123 + 456 = 579, and 12345",
    "characters of several bytes": "caf\u00e9 \u4e2d\u6587 \u20ac \U0001f600 na\u00efve",
    "spaces": "  the   theatre\n\nof cats ",
    "one token": "the",
}
SPLIT = "words"  # the student writes this text also in single bytes, as no tokenizer would split it


def make_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """Trains a small byte-level BPE tokenizer."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=257 + MERGES[name], special_tokens=["<eos>"], show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )  # fmt: skip
    core.train_from_iterator([CORPORA[name]], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<eos>")


def student_offsets(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> list[tuple[int, int]]:
    """The byte offsets of sampled tokens as GOLDTrainer counts them; EOS has no bytes, as in its data sets."""
    out, place = [], 0
    for token in ids:
        size = 0 if token == tokenizer.eos_token_id else piece_byte_len(tokenizer.convert_ids_to_tokens([token])[0])
        out.append((place, place + size))
        place += size
    return out


def log_merged(loss: ULDLoss, probs: Tensor, groups: list[list[int]], ids: list[int]) -> list[float]:
    """The log of the merged probability of each group's last token, which is that of the group's text."""
    merged = loss._merge_probabilities_with_alignment_groups(probs, groups, ids)
    return [merged[place, ids[group[-1]]].log().item() for place, group in enumerate(groups)]


def align(loss: ULDLoss, tokenizers: dict[str, PreTrainedTokenizerFast], text: str, ids: list[int]) -> dict[str, Any]:
    """Aligns a text that the student wrote as the tokens `ids`."""
    student, teacher = tokenizers["student"], tokenizers["teacher"]
    inputs, labels, _, offsets = build_teacher_inputs_from_texts(teacher, ["the"], [text])
    answer = labels[0] != -100
    own = {"student": ids, "teacher": inputs[0][answer].tolist()}
    groups = dict(
        zip(
            own,
            loss._align_by_byte_offsets(student_offsets(student, ids), offsets[0][answer].tolist()),
            strict=True,
        )
    )
    out: dict[str, Any] = {"text": text, "tokens": own, "groups": groups, "logprobs": {}, "sums": {}}
    for name, tokens in own.items():
        probs = (0.5 * torch.randn(len(tokens), len(tokenizers[name]))).softmax(-1)
        out["logprobs"][name] = [probs[i, token].log().item() for i, token in enumerate(tokens)]
        out["sums"][name] = log_merged(loss, probs, groups[name], tokens)
    return out


def main() -> None:
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        print(__doc__)
        sys.exit(2)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(5)
    tokenizers = {name: make_tokenizer(name) for name in CORPORA}
    config = GOLDConfig(output_dir="unused", use_cpu=True, bf16=False, report_to="none")
    config.uld_token_merge_strategy = "bayesian"
    loss = ULDLoss(config)
    eos = tokenizers["student"].eos_token_id
    rows = {name: align(loss, tokenizers, text, [*tokenizers["student"](text)["input_ids"], eos])
            for name, text in TEXTS.items()}  # fmt: skip
    single = [tokenizers["student"](character)["input_ids"][0] for character in TEXTS[SPLIT]]
    rows["split otherwise"] = align(loss, tokenizers, TEXTS[SPLIT], [*single, eos])
    answer = {
        "versions": {"trl": trl.__version__, "torch": torch.__version__, "transformers": transformers.__version__},
        "tokenizers": {name: own.backend_tokenizer.to_str() for name, own in tokenizers.items()},
        "rows": rows,
    }
    Path(sys.argv[1]).write_text(written(answer))


if __name__ == "__main__":
    main()
