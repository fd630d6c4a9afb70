"""A judge by rules, behind a URL, for miniatures: it stands where a large model behind a URL would stand.

With it a tiny random model of single characters, which needs no supervised start to have something to learn.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM


class RuleJudge:
    """A server with the routes of an OpenAI-compatible one that are asked for. It listens until the process ends."""

    def __init__(self, answer: Callable[[str], str]) -> None:
        """`answer`: from the text of a prompt to what the judge says. It is called by several threads."""
        self._server = _Server(("127.0.0.1", 0), _Routes)
        self._server.answer = answer
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()


class _Server(ThreadingHTTPServer):
    answer: Callable[[str], str]


class _Routes(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._send({"data": [{"id": "rules"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        said = self.server.answer(body["prompt"])
        self._send({"choices": [{"index": 0, "text": said, "finish_reason": "stop"}]})

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
