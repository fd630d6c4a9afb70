"""A run's first iterations: the schedule is cut by iterations, also within a cycle."""

import pytest

from megatron_rl.spec.run_spec import first_iterations

WARM, CYCLE = [("v",)], [("g",), ("g",), ("v",)]


@pytest.mark.parametrize(
    ("count", "cut"),
    [
        (None, ((("v",),), (("g",), ("g",), ("v",)), (("g",), ("g",), ("v",)))),
        (0, ()),
        (1, ((("v",),),)),
        (3, ((("v",),), (("g",), ("g",)))),
        (4, ((("v",),), (("g",), ("g",), ("v",)))),
        (5, ((("v",),), (("g",), ("g",), ("v",)), (("g",),))),
        (99, ((("v",),), (("g",), ("g",), ("v",)), (("g",), ("g",), ("v",)))),
    ],
)
def test_a_schedule_is_cut_after_a_number_of_iterations(count, cut):
    assert first_iterations([WARM, CYCLE, CYCLE], count) == cut
