"""ReMax: the outcome of the likeliest answer as the baseline, collected with scripted engines."""

import pytest
from scripted_rollouts import context_of, reader_of, roll_out, rows_of
from toys import graded

from megatron_rl.config.schema import ConfigError
from megatron_rl.contrib.remax import Remax
from megatron_rl.recipes.dynamic_sampling import DynamicSampling
from megatron_rl.types import Outcome


@pytest.fixture
def template(tmp_path):
    (tmp_path / "q.txt").write_text("Q{question}:")
    return str(tmp_path / "q.txt")


def greedy_or_not(text, j, sampling):
    """A script whose likeliest answer is right for even rows; of its samples the first two are."""
    row = int(text[1:].split(":")[0])
    return "yes" if (row % 2 == 0 if sampling.temperature == 0 else j < 2) else "no"


@pytest.mark.parametrize("group_size", [1, 3])
def test_remax_takes_the_outcome_of_the_likeliest_answer_off(template, group_size):
    recipe = Remax(updates=1, group_size=group_size, template=template)
    context = context_of(greedy_or_not)
    rollouts, m = roll_out(recipe, reader_of(4), context, per_step=4)
    expected = [float(j < 2) - float(row % 2 == 0) for row in range(4) for j in range(group_size)]
    assert [r.advantages for r in rollouts] == expected and m["prompts_taken"] == 4
    asked = [s for _, s in context.engines["generator"].asked]
    assert [s.n for s in asked] == [group_size] * 4 + [1] * 4 and [s.temperature for s in asked[4:]] == [0.0] * 4
    assert recipe.roles()["generator"].drawn == {"generator": group_size + 1}


def test_remax_leaves_out_a_problem_whose_likeliest_answer_has_no_score(template):
    def rule(response, payload):
        return Outcome.ERROR if response == "no" and payload["question"] == "1" else response == "yes"

    context = context_of(greedy_or_not, grade=graded(rule))
    rollouts, _ = roll_out(Remax(updates=1, group_size=2, template=template), reader_of(3), context)
    assert rows_of(rollouts) == [0, 2]


def test_remax_refuses_an_estimator_that_would_lose_its_baseline():
    with pytest.raises(ConfigError, match="'rloo': it has a baseline of its own"):
        Remax(updates=1, group_size=4, estimator="rloo")
    with pytest.raises(ConfigError, match="group_size = 1: dynamic_sampling leaves every group of one out"):
        Remax(updates=1, dynamic_sampling=DynamicSampling())
