"""The metrics of tools/house.py, on sources whose metrics are known."""

import ast
import importlib.util
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[3] / "tools" / "house.py"


@pytest.fixture(scope="module")
def house():
    spec = importlib.util.spec_from_file_location("house", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sources(house, **texts):
    paths = {name: f"megatron_rl/{name.replace('__', '/')}.py" for name in texts}
    return [house.Source(paths[name], text, list(ast.walk(ast.parse(text)))) for name, text in texts.items()]


def test_blank_lines_comments_and_docstrings_are_no_code(house):
    text = '"""One\n\ntwo"""\n\n# why\ndef f():\n    """Says."""\n    return """a\n\n    b"""  # 3 lines\n'
    assert house.code_lines(*sources(house, a=text)) == 4


def test_a_module_that_creates_engines_is_found_outside_of_the_package_of_engines(house):
    text = "engine = Pool(1)\ndef given(): Pooled(2)\n"
    found = house.openers_of_engines(sources(house, run__a=text, engines__b=text, run__c="Pool\nself.given()"))
    assert found == ["megatron_rl/run/a.py"]


def test_a_config_is_found_by_its_class_and_by_its_name(house):
    text = (
        "def a(config): ...\ndef b(x: 'list[TrainConfig]'): ...\ndef c(config: Any): ...\ndef d(config: Model): ...\n"
    )
    found = house.whole_configs(sources(house, run__x=text, megatron__x=text))
    assert [place.split()[1] for place in found] == ["a", "b", "c", "b"]


def test_a_helper_that_another_file_uses_too_is_not_single_use(house):
    first = "def _a(): ...\ndef _b(): ...\n_a()\n_b()\n"
    assert [p.split()[1] for p in house.single_use_helpers(sources(house, x=first, y="_b()"))] == ["_a"]


def test_two_way_imports_are_found_inside_functions_too(house):
    one_way = sources(house, run__a="from megatron_rl.data import x", data__a="import megatron_rl.types")
    assert not house.two_way_imports(one_way)
    back = sources(house, data__b="def f():\n    from megatron_rl import run")
    assert house.two_way_imports([*one_way, *back]) == ["data <-> run"]
