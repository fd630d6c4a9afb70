"""Writes verdicts of IFEval's public checkers on texts made here to a JSON file, and, where the published prompts and
responses are given, the verdicts on them.

    NLTK_DATA=FOLDER .venv-oracles/bin/python tests/oracles/ifeval.py OUT.json [DATA]

The checkers are those of google-research/instruction_following_eval, in the package if-verifiable. The folder NLTK_DATA
has tokenizers/punkt_tab. The folder DATA is instruction_following_eval/data of that repository, with input_data.jsonl
and input_response_data_gpt4_20231107_145030.jsonl; its verdicts are written to published.json beside OUT.json.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from if_verifiable.common import get_loose_transformations
from if_verifiable.ifeval.instructions_registry import INSTRUCTION_DICT
from langdetect import DetectorFactory

TEXTS = 90
MOST = {"relation": "less than"}
LEAST = {"relation": "at least"}
VALUES: Mapping[str, Sequence[Mapping[str, Any]]] = {  # kind -> values of its instruction
    "keywords:existence": [{"keywords": ["river", "stone"]}, {"keywords": ["r.ver"]}],
    "keywords:frequency": [
        {"keyword": "river", "frequency": 2, **MOST}, {"keyword": " stone", "frequency": 1, **LEAST}
    ],
    "keywords:forbidden_words": [{"forbidden_words": ["river", "stone"]}, {"forbidden_words": ["riv"]}],
    "keywords:letter_frequency": [
        {"letter": "R", "let_frequency": 9, "let_relation": "less than"},
        {"letter": "#", "let_frequency": 1, "let_relation": "at least"},
    ],
    "language:response_language": [{"language": "en"}, {"language": "de"}],
    "length_constraints:number_sentences": [{"num_sentences": 4, **MOST}, {"num_sentences": 5, **LEAST}],
    "length_constraints:number_paragraphs": [{"num_paragraphs": 1}, {"num_paragraphs": 2}, {"num_paragraphs": 3}],
    "length_constraints:number_words": [{"num_words": 12, **MOST}, {"num_words": 20, **LEAST}],
    "length_constraints:nth_paragraph_first_word": [
        {"num_paragraphs": n, "nth_paragraph": i, "first_word": word}
        for n, i, word in ((2, 1, "The"), (3, 2, "dr"), (3, 3, "THE"), (2, 2, "it"))
    ],
    "detectable_content:number_placeholders": [{"num_placeholders": 1}, {"num_placeholders": 2}],
    "detectable_content:postscript": [{"postscript_marker": m} for m in ("P.S.", "P.P.S", "Note")],
    "detectable_format:number_bullet_lists": [{"num_bullets": n} for n in (0, 1, 2, 3)],
    "detectable_format:constrained_response": [{}],
    "detectable_format:number_highlighted_sections": [{"num_highlights": n} for n in (1, 2, 3)],
    "detectable_format:multiple_sections": [
        {"section_spliter": "Section", "num_sections": 1}, {"section_spliter": "SECTION", "num_sections": 2}
    ],
    "detectable_format:json_format": [{}],
    "detectable_format:title": [{}],
    "combination:two_responses": [{}],
    "combination:repeat_prompt": [{"prompt_to_repeat": " THE river is wide."}],
    "startend:end_checker": [{"end_phrase": "Is there anything else?"}, {"end_phrase": " wide. "}],
    "startend:quotation": [{}],
    "change_case:capital_word_frequency": [
        {"capital_frequency": n, "capital_relation": relation} for n, relation in ((3, "less than"), (2, "at least"))
    ],
    "change_case:english_capital": [{}],
    "change_case:english_lowercase": [{}],
    "punctuation:no_comma": [{}],
}  # fmt: skip
PIECES = (
    "The river is wide.", "Dr. Stone went home, and e.g. nobody saw him!", "It's 3.5 km from the U.S. border?",
    "DON'T go to NASA",
    "Der Fluss ist sehr breit und der Stein liegt im Wasser.", "my answer is no.", "My answer is yes.",
    "'\"the stone' was old", "A *river* and a **stone**", "** **", "[name] of [ ]", "<<Title>>", "<< >>", "#tag",
    "rivers",
    "Section 1", "SECTION 2: more", "Is there anything else?", "P.S. Call me", "p. p.s again", "note that it is so",
)  # fmt: skip
JOINTS = (" ", " ", " ", "\n", "\n", "\n\n", "\n\n", "\n* ", "\n- ", "***", "\n******\n", "\n***\n")
WRAPS = ("{}", "{}", "{}", '"{}"', "* {}\n", "```json\n{}\n```", "Sure:\n{}", "***{}", "\n\n{}", '{}"')
WHOLE: Sequence[str] = (
    "The river.\n\nIt is so.", "'the' river\n\nIt's.\n\n", "A.\n\nDr. No.\n\n\"The, end",
    "the.\n\n\n\nDR, b.\n\nThe",
    " the RIVER is wide. So it is.", "One. Two! Three? " * 9, "", " ", "\n", "{}", '{"a": 1}',
    '```JSON\n["river"]\n```',
    "```\n1\n```", '"', "12 34", "river stone river", ",", "\n12\n",
)  # fmt: skip


def texts() -> list[str]:
    draw, out = random.Random(0), list(WHOLE)
    while len(out) < TEXTS:
        parts = draw.choices(PIECES, k=draw.randint(1, 7))
        text = "".join(part + draw.choice(JOINTS) for part in parts[:-1]) + parts[-1]
        text = draw.choice(WRAPS).replace("{}", draw.choice((str, str, str, str.upper, str.lower))(text))
        out.append(text)
    return out


def checker_of(kind: str, values: Mapping[str, Any]) -> Any:
    """Returns the public checker. The package has the code's earlier rule that a letter is one of a to z, and draws
    another letter otherwise; the code has since taken any character."""
    found = INSTRUCTION_DICT[kind](kind)
    found.build_description(**values)
    if "letter" in values:
        found._letter = values["letter"].strip().lower()
    return found


def followed(checker: Any, variants: Sequence[str]) -> str:
    return "01"[any(bool(text.strip()) and bool(checker.check_following(text)) for text in variants)]


def published(folder: Path) -> Iterator[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "input_data.jsonl").read_text().splitlines()]
    file = folder / "input_response_data_gpt4_20231107_145030.jsonl"
    for row, line in zip(rows, file.read_text().splitlines(), strict=True):
        response = json.loads(line)["response"]
        own = [checker_of(*each) for each in zip(row["instruction_id_list"], row["kwargs"], strict=True)]
        modes = {"strict": [response], "loose": get_loose_transformations(response)}
        told = {mode: "".join(followed(each, variants) for each in own) for mode, variants in modes.items()}
        yield {**row, "response": response, **told}


def main() -> None:
    if len(sys.argv) not in (2, 3):
        print(__doc__)
        sys.exit(2)
    DetectorFactory.seed = 0
    assert VALUES.keys() == INSTRUCTION_DICT.keys()
    made, rows = texts(), []
    for kind, each in VALUES.items():
        for values in each:
            checker = checker_of(kind, values)
            strict = "".join(followed(checker, [text]) for text in made)
            loose = "".join(followed(checker, get_loose_transformations(text)) for text in made)
            rows.append({"kind": kind, "values": values, "strict": strict, "loose": loose})
    packages = ("if-verifiable", "langdetect", "nltk")
    found = {"versions": {name: version(name) for name in packages}, "texts": made, "rows": rows}
    Path(sys.argv[1]).write_text(json.dumps(found, indent=1) + "\n")
    if len(sys.argv) == 3:
        out = list(published(Path(sys.argv[2])))
        Path(sys.argv[1]).with_name("published.json").write_text(json.dumps(out))


if __name__ == "__main__":
    main()
