"""The checks before a run's first update (preflight), in whole runs of a policy that really learns."""

from dataclasses import replace

import pytest
from fake_policy import TablePolicy
from loops import VOCAB, Log, Questions, graded, make, train

from megatron_rl.config.schema import Preflight, Reward
from megatron_rl.training import loop, preflight
from megatron_rl.types import Outcome


@pytest.fixture
def template(tmp_path):
    path = tmp_path / "question.txt"
    path.write_text("?{question}\n")
    return str(path)


def gated(template, log, directory, *, reward=True, prompts=None, **settings):
    setup, progress = make(template, log, directory, **settings)
    tried = Questions().take(4) if prompts is None else prompts
    own = Preflight(num_prompts=4, reward=reward)
    chosen = preflight.PreflightPlan(settings=own, prompts=tried, reward=Reward(wrong_answer="z"))
    return setup, loop.Plan(iterations=1, preflight=chosen), progress


def test_the_preflight_passes_a_sound_run_and_reports_its_values(template, tmp_path):
    log = Log()
    train(*gated(template, log, tmp_path / "iterations"))
    assert log.series("preflight/reward_correct", "preflight") == [1.0] and log.series(
        "preflight/reward_wrong", "preflight"
    ) == [0.0]
    assert 0 <= log.series("preflight/logprob_gap_generator", "preflight")[0] < 1e-5


def test_the_preflight_without_its_reward_check_still_compares_log_probs(template, tmp_path):
    """Problems need no answer then; with the check, one without is a clear refusal."""
    unanswered = [replace(p, payload={"question": p.payload["question"]}) for p in Questions().take(4)]
    log = Log()
    train(*gated(template, log, tmp_path / "iterations", reward=False, prompts=unanswered))
    assert (
        not log.series("preflight/reward_correct", "preflight")
        and log.series("preflight/logprob_gap_generator", "preflight")[0] < 1e-5
    )
    with pytest.raises(
        preflight.PreflightFailure, match=r"no answer to try the reward with, only question: .*preflight.reward=false"
    ):
        train(*gated(template, log, tmp_path / "other", prompts=unanswered))


@pytest.mark.parametrize(
    "score, said", [(0.0, "0.00 on average to 4 known correct"), (1.0, "1.00 on average to 4 known wrong")]
)
def test_the_preflight_refuses_a_reward_that_cannot_tell_right_from_wrong(template, tmp_path, score, said):
    run = gated(template, Log(), tmp_path / "iterations", grade=graded(lambda response, payload: score))
    with pytest.raises(preflight.PreflightFailure, match=said):
        train(*run)


@pytest.mark.parametrize("outcome", [Outcome.ERROR, Outcome.TIMEOUT])
def test_the_preflight_takes_no_failed_grading_for_a_score(template, tmp_path, outcome):
    """A reward that returns 2.0 for correct answers or raises for wrong ones must not pass as 0.0."""

    def rule(response, payload):
        return 1.0 if f"{{{payload['answer']}}}" in response else outcome

    run = gated(template, Log(), tmp_path / "iterations", grade=graded(rule))
    with pytest.raises(preflight.PreflightFailure, match=r"no score to the known wrong answer .*: made to fail\. Mend"):
        train(*run)


def test_a_grading_that_times_out_at_the_preflight_counts_neither_way(template, tmp_path):
    late = Questions().take(1)[0].payload["answer"]

    def rule(response, payload):
        return (
            Outcome.TIMEOUT
            if payload["answer"] == late
            else response.removeprefix("<answer>\\boxed{")[:1] == payload["answer"]
        )

    log = Log()
    train(*gated(template, log, tmp_path / "iterations", grade=graded(rule)))
    assert log.series("preflight/reward_correct", "preflight") == [1.0]


class Drifted(TablePolicy):
    """Gives its engine other weights than it scores with."""

    def weights(self):
        yield "table", self.table.detach() * 8


def test_the_preflight_refuses_an_engine_that_disagrees_with_its_trainer(template, tmp_path):
    run = gated(template, Log(), tmp_path / "iterations", policy=Drifted(VOCAB))
    with pytest.raises(preflight.PreflightFailure, match=r"engine -.*, trainer -.*preflight.max_logprob_gap = 0.05"):
        train(*run)
