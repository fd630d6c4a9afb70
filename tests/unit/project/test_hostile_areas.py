"""Some inputs of every area of `make fuzz`, with the same seed each time."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

SPEC = importlib.util.spec_from_file_location("fuzz_run", Path(__file__).parents[2] / "fuzz/run.py")
assert SPEC is not None and SPEC.loader is not None
FUZZ = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(FUZZ)
COUNT = 40
FEWER = {"json_files": 10, "engine_messages": 20}  # areas whose inputs take long


@pytest.mark.parametrize("area", FUZZ.areas())
def test_hostile_inputs_lead_to_no_defect(area):
    count = FEWER.get(area, COUNT)
    found = FUZZ.run(area, 7, count)
    assert found.inputs == count and not found.defects, "\n".join(found.shown)
