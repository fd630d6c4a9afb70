"""The commands and settings that README.md and docs/ show are those that the program takes."""

from __future__ import annotations

import dataclasses
import difflib
import re
from pathlib import Path

import pytest
import yaml
from docs_pages import ENDS, FENCE, PAGES, ROOT, TUTORIALS, blocks, commands, prose

from megatron_rl.commands.parser import build_parser
from megatron_rl.commands.settings import SCHEMAS
from megatron_rl.config import files
from megatron_rl.config.describe import settings_of as listed
from megatron_rl.main import main

SHELL = [block for block in blocks("bash") if block.mark or block.page not in TUTORIALS]
CONFIGS = [block for block in blocks("yaml") if block.mark != "not a config"]
OTHERS = {"git", "cd", "cp", "pip", "export", ".", "pre-commit", "vllm"}  # programs that are not this project's
RUN = ("check", "plan")  # commands that need neither a model nor a data set
MAKE = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
PARSER = build_parser()
TOP = {path.name for path in ROOT.iterdir()}  # a path that begins with one of these is one of the checkout
BASE = {
    "train": "roles: {generator: {model: {path: org/model}}}\ndata: {path: problems.jsonl}\n"
    "recipe: {target: 'megatron_rl.recipes.grpo:Grpo', args: {updates: 3}}\n",
    "sft": "model: {path: org/model}\ndata: {train: pairs.jsonl}\n",
    "generate": "model: {path: org/model}\ndata: {path: problems.jsonl}\noutput: out\n",
    "eval": "model: {path: org/model}\nsets: [gsm8k]\n",
}


def settings_of(command):
    """Returns {setting: whether it is a free mapping} as the command's help lists them."""
    found = [text.partition(" = ") for text, _ in listed(SCHEMAS[command])]
    return {name: default.startswith("{") for name, _, default in found}


SETTINGS = {command: settings_of(command) for command in SCHEMAS}


def is_setting(command, key):
    """Returns whether a key names a setting, a section, or something within a setting that is a free mapping."""
    parts = key.split(".")
    for name, free in SETTINGS[command].items():
        own = name.split(".")
        if all(a in (b, "NAME") for a, b in zip(own, parts, strict=False)) and (len(parts) <= len(own) or free):
            return True
    return False


def check_path(word):
    if word.split("/")[0] in TOP - {"runs", "data", "build"} and "/" in word:
        assert any(ROOT.glob(word)) if "*" in word else (ROOT / word).exists(), f"{word} is not in the checkout"


def check_program(words):
    """Parses the arguments of `megatron-rl`, and looks up the settings and files among them."""
    try:
        args, rest = PARSER.parse_known_args(words)
    except SystemExit as end:
        assert end.code == 0, f"megatron-rl {' '.join(words)}: the parser refuses it"
        return
    assert not rest or (hasattr(args, "settings") and not any(word.startswith("-") for word in rest)), rest
    given = [*getattr(args, "settings", getattr(args, "what", [])), *rest]
    command = args.command if args.command in SCHEMAS else "train"
    named = [word for word in given if "=" not in word]
    for word in named:
        check_path(word)
        if (ROOT / word).is_file():
            command = next(c for c, s in SCHEMAS.items() if files.read_top([ROOT / word]).keys() <= field_names(s))
    for word in (word for word in given if "=" in word):
        assert is_setting(command, word.split("=")[0]), f"{command} has no setting {word.split('=')[0]}"


def field_names(schema):
    return {field.name for field in dataclasses.fields(schema)}


def check_python(words):
    """Looks up the script or module, and compiles code that is given in the command."""
    match words:
        case ["-c", code, *_]:
            compile(code, "command", "exec")
        case ["-m", "megatron_rl.main", *rest]:
            check_program(rest)
        case ["-m", "pytest", *rest]:
            check_pytest(rest)
        case ["-m", module, *_]:
            assert (ROOT / f"{module.replace('.', '/')}.py").is_file(), module
        case [script, *rest]:
            assert (ROOT / script).is_file(), f"{script} is not in the checkout"
            source = (ROOT / script).read_text()
            if "import common" in source:  # benchmarks share some options
                source += (ROOT / "benchmarks/common.py").read_text()
            for option in (word.split("=")[0] for word in rest if word.startswith("--")):
                assert f'"{option}"' in source, f"{script} has no option {option}"


def check_pytest(words):
    for word in words:
        if word.startswith("tests"):
            check_path(word.split("::")[0])


def check_command(words):
    head, *rest = words
    if head == "megatron-rl":
        check_program(rest)
    elif head == "make":
        targets = [word for word in rest if "=" not in word and not word.startswith("tests/")]
        check_pytest([word for word in rest if word.startswith("tests/")])
        assert set(targets) <= MAKE, f"no target {set(targets) - MAKE}: {difflib.get_close_matches(targets[0], MAKE)}"
    elif re.fullmatch(r"python[\d.]*", Path(head).name):
        check_python(rest)
    elif head == "torchrun":
        check_python(rest[rest.index("-m") :])
    elif head == "srun":
        check_command(rest[next(i for i, word in enumerate(rest) if "python" in word or word == "megatron-rl") :])
    elif (ROOT / head).is_file():
        assert (ROOT / head).stat().st_mode & 0o111, f"{head} cannot be run"
    elif head == "bash":
        check_path(rest[0])
    elif head in ("pytest", "sbatch"):
        check_pytest(rest) if head == "pytest" else check_path(rest[-1])
    else:
        assert head in OTHERS, f"{head}: add it to OTHERS, or mend the page"


@pytest.mark.parametrize("block", SHELL, ids=lambda block: block.name)
def test_every_command_is_one_that_is_there(block):
    for words in commands(block.text):
        check_command(words)


@pytest.mark.parametrize("block", [block for block in SHELL if block.mark != "not run"], ids=lambda block: block.name)
def test_a_block_without_a_reason_is_run(block, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    for words in commands(block.text):
        assert words[0] == "megatron-rl" and words[1] in RUN, f"{words}: put <!-- not run: REASON --> above the block"
        assert main(words[1:]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_stand_in_blocks_of_bash(page):
    heads = re.compile(r" {4,}(megatron-rl|make|python3?|torchrun|srun|sbatch|pytest|pip|git) [\w./-]")
    assert not [line for line in prose(page) if heads.match(line)], "put these into blocks of ```bash"
    for line in page.read_text().splitlines():
        fence = FENCE.match(line)
        assert not fence or fence[2] not in ("sh", "shell", "console"), "write ```bash"


@pytest.mark.parametrize("block", CONFIGS, ids=lambda block: block.name)
def test_every_snippet_of_a_config_can_be_loaded(block, tmp_path, monkeypatch):
    (tmp_path / "snippet.yaml").write_text(block.text)
    keys = files.read_top([tmp_path / "snippet.yaml"]).keys()
    fitting = [command for command in SCHEMAS if keys <= field_names(SCHEMAS[command])]
    assert fitting, f"no command takes {sorted(keys)}: put <!-- not a config: REASON --> above the block"
    command, schema = fitting[0], SCHEMAS[fitting[0]]
    if "families" in keys:  # a module of the reader's own
        return
    whole = {field.name for field in dataclasses.fields(schema) if field.default is dataclasses.MISSING
             and field.default_factory is dataclasses.MISSING} <= keys  # fmt: skip
    base = yaml.safe_load(BASE[command])
    if "sources" in yaml.safe_load(block.text).get("data", {}):  # each has a path of its own
        del base["data"]
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(base))
    monkeypatch.chdir(ROOT)
    files.load(schema, [*([] if whole else [tmp_path / "base.yaml"]), tmp_path / "snippet.yaml"])


@pytest.mark.parametrize(
    "text, says",
    [
        ("megatron-rl train my.yaml --no-such-option", "--no-such-option"),
        ("megatron-rl train my.yaml roles.generator.optimiser.lr=1", "no setting"),
        ("megatron-rl train examples/none.yaml", "not in the checkout"),
        ("megatron-rl trian my.yaml", "refuses"),
        ("make demoo", "no target"),
        ("python benchmarks/none.py", "not in the checkout"),
        ("python benchmarks/rollout.py --no-such-option", "no option"),
        ("conda activate x", "OTHERS"),
    ],
)
def test_a_wrong_command_is_found(text, says):
    with pytest.raises(AssertionError, match=says):
        for words in commands(text):
            check_command(words)


def test_commands_are_read_as_a_shell_reads_them():
    text = "A=b make test && cd x # it's a comment\npython -c \"print('a')\nprint(1)\" > out.txt\n"
    assert commands(text) == [["make", "test"], ["cd", "x"], ["python", "-c", "print('a')\nprint(1)"]]
    assert commands("serve a=$(hostname -I | cut -f1) \\\n  b=c\n") == [["serve", "a=VALUE", "b=c"]]
    assert set(ENDS) >= {"&&", "|"}
