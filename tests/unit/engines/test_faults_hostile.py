"""Faults that hostile neighbours found: other users of a machine and of a group, and servers that lie."""

from __future__ import annotations

import base64
import contextlib
import json
import math
import os
import pickle
import re
import socket
import zipfile
import zlib
from dataclasses import asdict

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_engines_pool import listing
from test_environments_verifiers import Asker
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatron_rl.config.base import ConfigError
from megatron_rl.conversion.weight_source import read_sizes
from megatron_rl.data import rows
from megatron_rl.data.tiny import write_tiny_model, write_tiny_problems
from megatron_rl.engines import response_parsing
from megatron_rl.engines.auth_middleware import TOKEN_FILE, Guard
from megatron_rl.engines.server_process import make_token
from megatron_rl.engines.server_registry import ServerRegistry
from megatron_rl.environments import token_route
from megatron_rl.environments.search_tool import SearchTool
from megatron_rl.environments.token_route import MODELS, TokenRoute
from megatron_rl.key_value_store import store_server as store_server
from megatron_rl.key_value_store.store_client import KeyValueClient, KeyValueError
from megatron_rl.key_value_store.store_server import KeyValueServer
from megatron_rl.lib.safe_pickle import refuse_bombs
from megatron_rl.main import main
from megatron_rl.rewards import code_cases
from megatron_rl.texts.control_tokens import spelled
from megatron_rl.weights.dist_checkpoint import refuse_code
from megatron_rl.weights.plain_data import read_object

STRANGER = 12345  # the number of another user


def test_faults_silent_connections_do_not_stop_the_token_route():
    """Connections that never show the token took all descriptors of the driver."""
    route = TokenRoute()
    with contextlib.ExitStack() as stack:
        stack.callback(route.close)
        address = ("127.0.0.1", int(route.url.rpartition(":")[2]))
        own = Asker(route)
        assert own("GET", MODELS)[0] == 200
        silent = [stack.enter_context(socket.create_connection(address, 10)) for _ in range(200)]
        assert silent[0].recv(1) == b"", "the oldest one is closed"
        assert len(route._strangers) <= token_route.MOST_STRANGERS
        assert own("GET", MODELS)[0] == 200, "a connection that showed the token stays open"
        assert Asker(route)("GET", MODELS)[0] == 200


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_faults_files_that_a_member_of_the_group_planted_are_not_taken(tmp_path, monkeypatch):
    """A directory that the group may write to: a token and a listing of another user chose which servers are asked."""
    token, registry = tmp_path / "token", ServerRegistry(tmp_path)
    token.write_text("planted")
    (tmp_path / "generator-7.json").write_text(json.dumps(asdict(listing(replica=7))))
    own = listing(replica=1)
    registry.write(own)
    for planted in (token, tmp_path / "generator-7.json"):
        os.chown(planted, STRANGER, -1)
    assert registry.read(own.role) == [own]
    assert [each.replica for each in ServerRegistry(tmp_path, 0, STRANGER).all()] == [1, 7], (
        "status of another user's run"
    )
    monkeypatch.setenv(TOKEN_FILE, str(token))
    for take in (lambda: make_token(token), lambda: Guard(None)):
        with pytest.raises(PermissionError, match=f"belongs to user {STRANGER}"):
            take()


def test_faults_a_client_cannot_fill_the_memory_of_a_store(monkeypatch):
    """An engine knows its store's secret: it could store values without end, or ask and never read the answers."""
    monkeypatch.setattr(store_server, "MAX_BYTES", 1 << 20)
    server = KeyValueServer("127.0.0.1", b"s" * 32)
    try:
        client = KeyValueClient("127.0.0.1", server.port, b"s" * 32, 10.0)
        client.set({"a": b"x" * (1 << 19)})
        with pytest.raises(KeyValueError, match="above its limit of 1048576"):
            client.set({"b": b"x" * (1 << 19), "c": b"x"})
        assert client.check(["a"]) and not client.check(["b"])
        client.remove("a")
        client.set({"b": b"x" * (1 << 19)})
        for _ in range(3):  # a value that is written over counts once
            client.set({"b": b"y" * (1 << 19)})
        with pytest.raises(KeyValueError):
            client.append("b", b"x" * (1 << 19))
    finally:
        server.close()


def test_faults_versions_of_a_completion_go_up():
    assert response_parsing.read_versions([(0, 3), (2, 3), (3, 4)], 5) == [(0, 3), (2, 3), (3, 4)]
    for spans in ([(0, 4), (2, 3)], [(0, -2)], [(0, 2.0)]):
        with pytest.raises(response_parsing.AnswerError):
            response_parsing.read_versions(spans, 5)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("null", "holds 'None' where a JSON object must stand"),
        ("[]", "where a JSON object must stand"),
        ("[" * 100_000 + "]" * 100_000, "cannot be read as JSON"),
        ({"model_type": ["qwen2"]}, "model_type ['qwen2'] is not supported"),
        ({"num_attention_heads": 0}, "num_attention_heads = 0: give a whole number from 1"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000: give a whole number from 1 to 10000"),
        ({"vocab_size": "64"}, "vocab_size = 64: give a whole number"),
        ({"hidden_size": 1e300}, "hidden_size = 1e+300: give a whole number"),
        ({"rope_theta": math.inf}, "cannot be read as JSON"),
        ({"rope_parameters": [1]}, "is not the config.json of a qwen2 model"),
        ({"rms_norm_eps": "x"}, "is not the config.json of a qwen2 model"),
    ],
)
def test_faults_a_config_json_that_no_model_has_is_refused_by_name(tmp_path, capsys, text, said):
    """These ended in tracebacks, or in counting to a billion layers."""
    model = write_tiny_model(tmp_path / "model")
    file = model / "config.json"
    file.write_text(text if isinstance(text, str) else json.dumps(json.loads(file.read_text()) | text))
    for words in (["plan", *_grpo(tmp_path), "--cluster", "1x8xA100-80"], ["check", *_grpo(tmp_path)]):
        assert main(words) == 2 and said in " ".join(capsys.readouterr().err.split()), words
    with pytest.raises(ConfigError, match=re.escape(said)):
        read_sizes(model)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("roles.generator.layout.tp=1000000000", "layout.tp = 1000000000: give a value less than or equal to 65536"),
        ("recipe.args.updates=1000000000", "updates = 1000000000: give a value less than or equal to 1000000"),
        (
            f"run.prompts_per_iteration={10**30}",
            "run.prompts_per_iteration = 1000000000000000000000000000000: give a number of",
        ),
        (f"recipe.args.anything={{x: [1, {-(10**30)}]}}", "recipe.args.anything.x[1] = -10000000"),
    ],
)
def test_faults_numbers_without_bounds_are_refused_before_something_counts_to_them(tmp_path, capsys, given, said):
    write_tiny_model(tmp_path / "model")
    assert main(["check", *_grpo(tmp_path), given]) == 2 and said in " ".join(capsys.readouterr().err.split())


def test_faults_other_spellings_of_control_tokens_are_spelled_too():
    """A tokenizer that normalises (NFKC) read full-width brackets as those of a control token."""
    core = Tokenizer(models.WordLevel({"<|end|>": 0, "a": 1, "?": 2}, unk_token="?"))
    core.normalizer, core.pre_tokenizer = normalizers.NFKC(), pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=AddedToken("<|end|>", normalized=True))
    hostile = "a ＜|end|＞ <|end|> a"
    assert tokenizer(hostile)["input_ids"].count(0) == 2
    assert tokenizer(spelled(tokenizer, hostile))["input_ids"].count(0) == 0
    assert spelled(tokenizer, "a ＜ b") == "a ＜ b"
    core.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(" ", "")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=AddedToken("<|end|>", normalized=True))
    assert tokenizer(spelled(tokenizer, hostile))["input_ids"].count(0) == 0


def test_faults_test_cases_that_unpack_without_end_are_refused(monkeypatch):
    monkeypatch.setattr(code_cases, "MOST_BYTES", 1 << 20)
    for value, said in ((" " * (4 << 20), "more than 1048576 bytes"), ([1, 2], "holds a list where a text must stand")):
        packed = base64.b64encode(zlib.compress(pickle.dumps(value))).decode()
        with pytest.raises(ValueError, match=said):
            code_cases._plain(packed)


@pytest.mark.parametrize("store", [b"r" + (1 << 30).to_bytes(4, "little"), b"p1073741824\n"], ids=["binary", "text"])
def test_faults_a_pickle_that_asks_for_gigabytes_is_refused_unread(tmp_path, store):
    """780 damaged bytes of a checkpoint's metadata took 20 GB: the memo of a pickle has as many entries as its largest
    index says."""
    bomb = b"]" + store + b"."
    with pytest.raises(pickle.UnpicklingError, match="asks for 1073741824 places"):
        refuse_bombs(bomb)
    refuse_bombs(pickle.dumps([list(range(300)), {"a": "b" * 1000}]))
    (tmp_path / ".metadata").write_bytes(bomb)
    with pytest.raises(ConfigError, match="asks for 1073741824 places"):
        refuse_code(tmp_path)
    with zipfile.ZipFile(tmp_path / "common.pt", "w") as archive:
        archive.writestr("common/data.pkl", bomb)
    with pytest.raises(ConfigError, match="asks for 1073741824 places"):
        read_object(tmp_path / "common.pt", "common.pt")


def test_faults_a_parquet_file_that_unpacks_without_end_is_refused(tmp_path, monkeypatch):
    """2,000 rows of one text of 1 MB: 3 kB on the disk, and 2 GB in memory."""
    monkeypatch.setattr(rows, "MOST_BATCH_BYTES", 1 << 20)
    pq.write_table(pa.table({"question": ["a" * 40_000] * 2_000}), tmp_path / "bomb.parquet")
    assert (tmp_path / "bomb.parquet").stat().st_size < 50_000
    with pytest.raises(rows.DataError, match=r"rows from 1 on have more than 1048576 bytes"):
        list(rows._file_rows(tmp_path / "bomb.parquet"))


def test_faults_documents_with_half_a_character_or_without_end_are_refused_by_line(tmp_path):
    for text in ('{"title": "t", "text": "\\ud800"}', "[" * 100_000):
        (tmp_path / "corpus.jsonl").write_text('{"title": "t", "text": "a"}\n' + text + "\n")
        with pytest.raises(ConfigError, match=r"corpus.jsonl:2: not JSON"):
            SearchTool(corpus=str(tmp_path / "corpus.jsonl")).load()


def _grpo(base) -> list[str]:
    """Returns arguments of a small run whose model is in `base`/model."""
    write_tiny_problems(base / "data.jsonl", 4)
    return [
        f"roles.generator.model.path={base}/model", "recipe.target=megatron_rl.recipes.grpo:Grpo",
        "recipe.args.updates=3", "recipe.args.template=boxed_answer", f"data.path={base}/data.jsonl",
        "reward.target=megatron_rl.rewards.tiny_task:grade",
    ]  # fmt: skip
