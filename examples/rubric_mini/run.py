"""Shows rubrics at work within two minutes on two CPU cores: a tiny random model learns to fulfil one, twice.

    python examples/rubric_mini/run.py

The responses have eight characters. Three criteria earn something, and the fourth earns nothing: that there is no
digit. In the first run that is a veto, and digits go; in the second it is none, and they stay until something else
drives them out. The judge is a server of this file that knows the criteria by rules. It stands where a large model
behind a URL would stand.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

HERE, BASE = Path(__file__).parent, Path("runs/rubric_mini")
LETTERS = ["fewer than two", "two to four", "five or more"]
RUBRIC: list[dict[str, Any]] = [
    {"criterion": "It has a vowel.", "weight": 1.0},
    {"criterion": "It has a full stop.", "weight": 1.0},
    {"criterion": "It has many letters.", "weight": 1.0, "saturation": 0.5, "tiers": LETTERS},
    {"criterion": "It has no digit.", "weight": 0.0, "veto": True},
]


def main() -> None:
    BASE.mkdir(parents=True, exist_ok=True)
    write_model(BASE / "model")
    server = Rules(("127.0.0.1", 0), Judge)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for name in ("veto", "without_veto"):
        rubric = [{**row, "veto": row.get("veto", False) and name == "veto"} for row in RUBRIC]
        rows = [{"question": f"{letter}:", "answer": "-", "rubric": rubric} for letter in "abcdefghijklmnop"]
        (BASE / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        url = f"roles.judge.endpoint.url=http://127.0.0.1:{server.server_port}"
        data = f"data.path={BASE}/{name}.jsonl"
        command = [sys.executable, "-m", "megatron_rl.main", "train", f"{HERE}/rubric.yaml", f"run.name={name}"]
        server.digits.clear()
        subprocess.run([*command, url, data, "run.resume=never"], check=True)
        table(name, server.digits)


def table(name: str, digits: list[bool]) -> None:
    """Prints what the first and the last five updates saw on average. `digits`: whether each response had one."""
    lines = [json.loads(line) for line in (BASE / name / "metrics.jsonl").read_text().splitlines()]
    rows = [line["metrics"] for line in lines if line["scope"] == "generator" and "reward/outcome" in line["metrics"]]
    few = 5 * len(digits) // len(rows)  # responses of five updates
    for when, part, seen in (("first", rows[:5], digits[:few]), ("last", rows[-5:], digits[-few:])):
        mean = {
            key: sum(row[f"reward/{key}"] for row in part) / len(part) for key in ("outcome", "fulfilled", "vetoed")
        }
        figures = {**mean, "with a digit": sum(seen) / len(seen)}
        print(
            f"{name:>12}, {when:>5} five updates: {', '.join(f'{key} {value:.2f}' for key, value in figures.items())}"
        )


def score(criterion: str, response: str) -> int:
    """Returns the tier that a response reaches."""
    if criterion == "It has many letters.":
        letters = sum(c.isalpha() for c in response)
        return (letters > 1) + (letters > 4)
    return {
        "It has a vowel.": any(c in "aeiouAEIOU" for c in response),
        "It has a full stop.": "." in response,
        "It has no digit.": not any(c.isdigit() for c in response),
    }[criterion] * 1


class Rules(ThreadingHTTPServer):
    """A server that remembers which responses had a digit."""

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(address, handler)
        self.digits: list[bool] = []


class Judge(BaseHTTPRequestHandler):
    """The routes of an OpenAI-compatible server that are asked for."""

    server: Rules
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._send({"data": [{"id": "rules"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        head, _, response = body["prompt"].partition("\n\n")
        found = score(head.splitlines()[0], response)
        if head.startswith("It has no digit."):
            self.server.digits.append(not found)
        self._send({"choices": [{"index": 0, "text": f"\\boxed{{{found}}}", "finish_reason": "stop"}]})

    def _send(self, answer: dict[str, Any]) -> None:
        content = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None: ...


def write_model(directory: Path) -> None:
    """Writes a random Qwen2 of one layer, and a tokenizer of single characters."""
    characters = ["<eos>", "\n", *map(chr, range(32, 127))]
    core = Tokenizer(models.WordLevel({c: i for i, c in enumerate(characters)}, unk_token="<eos>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>").save_pretrained(directory)
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = Qwen2Config(
        vocab_size=len(characters), num_hidden_layers=1, max_position_embeddings=512, eos_token_id=0, bos_token_id=None,
        tie_word_embeddings=False, **sizes,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(directory)


if __name__ == "__main__":
    main()
