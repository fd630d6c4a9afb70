"""What a run reads is remembered by digest: other content behind an unchanged path is refused or told."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from safetensors.torch import save_file
from specs import spec_of
from tiny_models import make_model
from toys import characters

from megatron_rl.api.data_files import reward_settings
from megatron_rl.commands import evaluate
from megatron_rl.config import schema as configs
from megatron_rl.config.sources import sources
from megatron_rl.run import file_checksums, input_digests
from megatron_rl.run.input_digests import InputRecord, read_files
from megatron_rl.run.run_directory import RunError
from megatron_rl.session import generation_progress


@pytest.fixture(autouse=True)
def no_modules_of_other_tests(monkeypatch):
    """A module that another test imported under the same name would be found in place of the file here."""
    for name in [name for name in sys.modules if name.partition(".")[0] in ("mine_rewards", "mine_helper", "space")]:
        monkeypatch.delitem(sys.modules, name)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A directory, in which the test stands, with a model and files of each kind that a run reads."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    make_model(tmp_path / "model", "qwen2")
    characters().save_pretrained(tmp_path / "model")
    for name in ("rows.jsonl", "held.jsonl", "own.jinja", "corpus.jsonl", "prompt.txt", "space/deep/helper.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"# {name}\n")
    (tmp_path / "mine_rewards.py").write_text("import mine_helper\nfrom space.deep import helper\n\ngrade = len\n")
    (tmp_path / "mine_helper.py").write_text("VALUE = 1\n")
    (tmp_path / "adapter").mkdir()
    save_file({"a": torch.zeros(3)}, tmp_path / "adapter/adapter_model.safetensors")
    return tmp_path


def config():
    role = configs.RoleConfig(
        model=configs.Model(path="model", chat_template="own.jinja"), lora=configs.Lora(path="adapter")
    )
    corpus = {"environment": {"target": "mine_rewards:grade", "args": {"corpus": "corpus.jsonl"}}}
    return configs.TrainConfig(
        roles={"solver": role},
        recipe=configs.Use(target="megatron_rl.recipes.grpo:Grpo", args={"template": "prompt.txt", **corpus}),
        reward=configs.Reward(target="mine_rewards:grade"),
        data=configs.PromptSet(path="rows.jsonl"),
        evaluation=configs.Evaluation(sets=(configs.EvaluationSet(path="held.jsonl"),)),
    )


def compared(done="3 iterations", accept=False):
    record = InputRecord(Path("run/inputs.json"), done=done, accept=accept)
    return record.compare(input_digests.FILES, read_files(spec_of(config()).settings))


NAMES = {
    "rows.jsonl": "data.path",
    "held.jsonl": "evaluation.sets.0.path",
    "own.jinja": "roles.solver.model.chat_template",
    "corpus.jsonl": "recipe.args.environment.args.corpus",
    "prompt.txt": "recipe.args.template",
    "model/config.json": "roles.solver.model.path/config.json",
    "model/tokenizer.json": "roles.solver.model.path/tokenizer.json",
    "adapter/adapter_model.safetensors": "roles.solver.lora.path/adapter_model.safetensors",
}


@pytest.mark.parametrize("file", NAMES)
def test_other_content_behind_an_unchanged_path(file, here):
    """A run that was stopped went on with other rows, another template or another model, and said nothing."""
    assert compared(done=None) == [] and compared() == []
    kept = (here / file).read_bytes()
    (here / file).write_bytes(kept + b" ")
    size = len(kept)
    with pytest.raises(RunError) as refused:
        compared()
    assert f"\n  {NAMES[file]} ({file}): bytes {size} -> {size + 1}, sha256 " in str(refused.value)
    assert "on other inputs for 3 iterations" in str(refused.value) and "run.resume=must" in str(refused.value)
    [told] = compared(accept=True)
    assert told.startswith(f"{NAMES[file]} ({file}): bytes") and compared() == [], "what was accepted is remembered"
    (here / file).write_bytes(kept)
    assert compared(done=None) == [], "nothing was trained, so that nothing can be mixed up"


def test_a_file_that_came_or_went_is_another_content(here):
    compared(done=None)
    (here / "model/chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(RunError, match=r"model.path/chat_template.jinja \(model/chat_template.jinja\): was not there"):
        compared()
    compared(accept=True)
    (here / "model/chat_template.jinja").unlink()
    with pytest.raises(RunError, match="is not there any more"):
        compared()


@pytest.mark.parametrize("module", ["mine_rewards", "mine_helper", "space.deep.helper"])
def test_code_that_was_mended_is_used_and_told(module, here):
    """A user mends a reward, or a helper beside it, and goes on: that is said, and kept in the record."""
    compared(done=None)
    file = Path(f"{module.replace('.', '/')}.py")
    file.write_text(file.read_text() + "# mended\n")
    [told] = compared()
    assert told.startswith(f"module {module} (") and compared() == []
    assert '"after": "3 iterations"' in Path("run/inputs.json").read_text()


def test_one_tensor_of_a_model(here):
    compared(done=None)
    from safetensors.torch import load_file

    tensors = load_file(here / "model/model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 3] += 1e-3
    save_file(tensors, here / "model/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RunError, match=r"roles.solver.model.path/model.safetensors \(.*\): sha256 \w+... -> \w+...\n"):
        compared()


def test_a_large_file_is_read_in_samples(tmp_path, monkeypatch):
    """Any change that is as long as the gap between samples is seen, wherever it is."""
    monkeypatch.setattr(file_checksums, "WHOLE_BYTES", 1 << 20)
    monkeypatch.setattr(file_checksums, "_SAMPLE_BYTES", 1 << 8)
    file = tmp_path / "large"
    file.write_bytes(bytes(4 << 20))
    gap, seen = -(-(4 << 20) // 255), {file_checksums.quick_digest(file)}
    for start in range(0, (4 << 20) - gap, 400_009):
        whole = bytearray(4 << 20)
        whole[start : start + gap] = b"x" * gap
        file.write_bytes(whole)
        seen.add(file_checksums.quick_digest(file))
    file.write_bytes(bytes((4 << 20) + 1))
    assert len({*seen, file_checksums.quick_digest(file)}) == 2 + len(range(0, (4 << 20) - gap, 400_009))


def test_packages_in_a_folder_with_another_name_than_site_packages(tmp_path, monkeypatch):
    """`pip install --target` of math-verify: every run ended with KeyError, as one of its packages has no __init__.py;
    and all of it counted as the user's own code."""
    monkeypatch.setattr(sys, "path", [str(tmp_path / "libraries"), *sys.path])
    monkeypatch.chdir(tmp_path)
    files = {
        "libraries/a_library/__init__.py": "from a_library.gen import parser\n",
        "libraries/a_library/gen/parser.py": "X = 1\n",
        "libraries/a_library-1.0.dist-info/RECORD": "a_library/__init__.py,sha256=x,1\nsingle_library.py,,\n",
        "libraries/single_library.py": "",
        "mine_rewards.py": "import a_library.gen.parser, single_library\nfrom mine_space.deep import helper\n",
        "mine_space/deep/helper.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert {*sources(["mine_rewards:grade"])} == {"module mine_rewards", "module mine_space.deep.helper"}
    of_library = {"module a_library", "module a_library.gen.parser"}
    assert {*sources(["a_library:grade"])} == of_library, "a plug-in's own package counts"


def test_math_verify_in_a_folder_with_another_name(tmp_path):
    """A run with the grader of mathematics ended with KeyError: 'latex2sympy2_extended.gen'."""
    for pattern in ("math_verify*", "latex2sympy2_extended*", "antlr4*"):
        for place in Path(sysconfig.get_path("purelib")).glob(pattern):
            (tmp_path / place.name).symlink_to(place)
    script = """
import math_verify
from megatron_rl.config.sources import sources
from megatron_rl.rewards.math_answer import grade

names = {*sources({"reward": "megatron_rl.rewards.math_answer:grade"}), *sources(["math_verify:verify"])}
print(math_verify.__file__, grade(r"\\boxed{2}", {"answer": "2"}), sorted({name.partition(".")[0] for name in names}))
"""
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    assert done.stdout == f"{tmp_path}/math_verify/__init__.py 1.0 ['module math_verify']\n"


def test_modules_that_a_pickled_function_uses(tmp_path, here, monkeypatch):
    monkeypatch.syspath_prepend(here)
    import mine_helper

    section, _ = reward_settings(lambda response, payload: mine_helper.VALUE, tmp_path / "inputs")
    assert "module mine_helper" in sources({"reward": section})
    del sys.modules["mine_helper"]


def test_a_text_of_a_pickled_function_that_is_no_name_is_not_taken_for_a_module(tmp_path, here, monkeypatch):
    (here / "two words.py").write_text("VALUE = 1\n")
    section, _ = reward_settings(lambda response, payload: response == "two words", tmp_path / "inputs")
    assert "module two words" not in sources({"reward": section})


def test_answers_of_another_model_or_reward_are_not_gone_on_with(here):
    """`generate` and `eval` knew their answers by settings and prompts: those of the former weights were kept."""
    reward = configs.Reward(target="mine_rewards:grade")
    data = configs.PromptSet(path="rows.jsonl")
    asked = configs.GenerateConfig(model=configs.Model(path="model"), data=data, output="out", reward=reward)
    measured = configs.EvalConfig(
        model=configs.Model(path="model"), sets=(configs.EvaluationSet(path=data.path),), reward=reward
    )

    def digests():
        read = read_files(spec_of(asked).settings)
        parts = generation_progress.parts_digest(spec_of(asked).settings, read, [[1, 2]], 8)
        whole = generation_progress.problems_digest(read, [{}], parts)
        return parts, whole, evaluate._digest(spec_of(measured).settings, [], read_files(spec_of(measured).settings))

    first = digests()
    (here / "mine_helper.py").write_text("VALUE = 2\n")
    mended = digests()
    assert mended[0] == first[0], "answers stay, and are graded again"
    assert mended[1] != first[1] and mended[2] != first[2]
    (here / "model/model.safetensors").write_bytes(b"another")
    assert not {*digests()} & {*mended}


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"[]", b"5", b"{}", b'{"files": 3}', b'{"files": {"a": 3}}', b'{"files": {"a": {}}}', b"[" * 9999),
        *(b"\xff", b'{"files": {"a": {"path": 1}}}', b'{"files": {}, "changes": 3}', b'{"files": {}, "later": [1]}'),
    ],
)
def test_faults_a_damaged_record_of_inputs_cannot_be_compared(here, content, caplog):
    """Of 25 damages 19 ended a resumed run by a traceback, also with run.resume=must."""
    compared(done=None)
    Path("run/inputs.json").write_bytes(content)
    with pytest.raises(RunError, match=r"inputs.json is damaged .* cannot be compared .* run.resume=must"):
        compared()
    assert compared(accept=True) == [] and "cannot be compared" in caplog.text
    assert compared() == [], "the record is whole again"
