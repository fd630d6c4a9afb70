"""Every benchmark and every tool runs in its smallest form. A new one without a form fails a test here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, environment
from limits import RUN_S
from smallest_forms import BENCHMARKS, EQUIPMENT, TOOLS

pytestmark = pytest.mark.multi
FORMS = {f"benchmarks/{name}": form for name, form in BENCHMARKS.items()}
FORMS |= {f"tools/{name}": form for name, form in TOOLS.items()}
FORMS |= {f"tests/{name}": form for name, form in EQUIPMENT.items()}
FOLDERS = ("benchmarks", "tools", "tests/golden", "tests/mutants", "tests/oracles")


def programs() -> list[str]:
    """Returns the Python files of benchmarks, tools and the tests' equipment by their paths in the repository."""
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    return [str(path.relative_to(ROOT)) for path in files]


@pytest.mark.parametrize("program", programs())
def test_smallest_form_of_every_program_is_known(program):
    """`python benchmarks/tail.py` had ended with a TypeError for weeks, and no test had seen it."""
    form = FORMS.get(program) or FORMS.get(str(Path(program).parent))
    assert form is not None, f"tests/helpers/smallest_forms.py: say how {program} runs in a test"
    assert (form.words is not None) + bool(form.test) + bool(form.part_of) + bool(form.skip) == 1, program
    named = form.test or form.part_of
    if named:
        place = named if program in FORMS else program
        assert Path(place).exists() or (ROOT / place).exists(), f"{program}: there is no {place}"
        names = {Path(program).stem, Path(program).parent.name}
        assert any(name in (ROOT / named).read_text() for name in names), f"{named} does not name {program}"


@pytest.mark.parametrize("program", [name for name, form in FORMS.items() if form.words is not None or form.skip])
def test_smallest_form_runs(program, tmp_path, request):
    """A benchmark must measure something."""
    form = FORMS[program]
    python = ROOT / form.python if form.python else Path(sys.executable)
    if form.skip or not python.exists():
        pytest.skip(form.skip or f"there is no {form.python}")
    named = [name for name in ("rows", "models") if any(f"{{{name}}}" in word for word in form.words or ())]
    places = {name: request.getfixturevalue(name) for name in named}
    words = [word.format(out=tmp_path, **places) for word in form.words or ()]
    words += ["--json", str(tmp_path / "metrics.json")] if program.startswith("benchmarks/") else []
    helpers = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests/helpers")])}
    done = subprocess.run(
        [str(python), program, *words], cwd=ROOT, env=environment() | helpers, capture_output=True, text=True,
        timeout=RUN_S, check=False,
    )  # fmt: skip
    assert form.status in (None, done.returncode), done.stdout[-3000:] + done.stderr[-3000:]
    assert form.prints in done.stdout
    if program.startswith("benchmarks/"):
        assert json.loads((tmp_path / "metrics.json").read_text())["metrics"]


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> str:
    """A folder with a data set for the grader."""
    folder = tmp_path_factory.mktemp("rows")
    (folder / "gsm8k").mkdir()
    problems = [{"question": f"{n} + {n}?", "answer": f"We add.\n#### {2 * n}"} for n in range(1, 4)]
    (folder / "gsm8k/test.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    return str(folder)


@pytest.fixture(scope="module")
def models(last_letter, tmp_path_factory) -> str:
    """The folder of a regime of the last-letter task, as its example makes it. Its models are trained: where all
    rewards are equal there is no update, and a run without updates ends with status 1."""
    folder = tmp_path_factory.mktemp("last_letter_models") / "a"
    folder.mkdir()
    for name in ("task", "generator", "verifier"):
        (folder / name).symlink_to(last_letter / name)
    (folder / "ready").touch()
    return str(folder)
