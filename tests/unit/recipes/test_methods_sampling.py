"""Dynamic sampling, curricula, hints and rewards by length: collected with scripted engines, against plain loops."""

import dataclasses
import itertools
import json
import random
from statistics import fmean

import numpy as np
import pytest
from loops import Log, train
from loops import make as make_loop
from scripted_rollouts import GROUP, by_row, context_of, lucky, reader_of, roll_out, rows_of
from toys import graded

from megatron_rl.config.plugins import build
from megatron_rl.config.schema import ConfigError, Use
from megatron_rl.data.rows import DataError
from megatron_rl.recipes.curriculum import Curriculum, Record, success_rates
from megatron_rl.recipes.dapo import Dapo
from megatron_rl.recipes.dynamic_sampling import DynamicSampling, Group, draw_groups, merged
from megatron_rl.recipes.hints import Hints
from megatron_rl.recipes.length_rewards import Brevity, Overlong
from megatron_rl.training import loop
from megatron_rl.training.collector import Collector, ReaderSource, RolloutMaker, upcoming
from megatron_rl.training.credit import CreditStage
from megatron_rl.training.rollouts import without_signal
from megatron_rl.training.store import IterationStore
from megatron_rl.types import Outcome, Prompt

START = {"cycle": 0, "index": 0, "number": 0, "iterations": {}}


@pytest.fixture
def template(tmp_path):
    (tmp_path / "q.txt").write_text("Q{question}:")
    return str(tmp_path / "q.txt")


def test_grpo_without_options_is_what_it_was(template):
    """Samples of prompts_per_iteration problems, in order, each compared with its group."""
    rates = [0, 1, 4, 2]
    recipe = Dapo(updates=1, group_size=GROUP, template=template)
    context = context_of(by_row(rates))
    rollouts, m = roll_out(recipe, reader_of(4), context, per_step=4)
    assert [r.group for r in rollouts] == [f"{i}:0/{i}" for i in range(4) for _ in range(GROUP)]
    for i, rate in enumerate(rates):
        own = np.array([1.0] * rate + [0.0] * (GROUP - rate))
        expected = (own - own.mean()) / (own.std(ddof=1) + 1e-6)
        assert [r.advantages for r in rollouts[i * GROUP : (i + 1) * GROUP]] == pytest.approx(expected.tolist())
    assert context.engines["generator"].asked[0][1].seed == context.seed_for(0, "generator")
    assert (m["prompts_taken"], m["rounds"], m["alike"], m["outcome_of_all"]) == (4, 1, 0.5, 7 / 16)
    assert recipe.state_dict() == {}


@pytest.mark.parametrize(("rounds", "oversampling"), [(1, 1), (2, 1), (10, 1), (2, 3), (10, 2)])
@pytest.mark.parametrize("seed", range(3))
def test_dynamic_sampling_takes_problems_until_enough_groups_have_signal(template, seed, rounds, oversampling):
    """Against a loop over the rows: a round takes wanted * oversampling of them, and groups of 0 or all are let go."""
    draw, count, wanted = random.Random(seed), 200, 5
    rates = [draw.choice((0, 0, 0, 0, 1, 3, 4, 4, 4)) for _ in range(count)]
    kept, place, used = [], 0, 0
    while len(kept) < wanted and used < rounds:
        own = range(place, place + wanted * oversampling)
        kept += [row for row in own if 0 < rates[row] < GROUP]
        place, used = place + wanted * oversampling, used + 1
    dynamic = DynamicSampling(rounds=rounds, oversampling=oversampling)
    recipe = Dapo(updates=1, group_size=GROUP, template=template, dynamic_sampling=dynamic)
    reader = reader_of(count)
    rollouts, m = roll_out(recipe, reader, context_of(by_row(rates)), per_step=wanted)
    assert rows_of(rollouts) == kept[:wanted] and len(rollouts) == GROUP * len(kept[:wanted])
    assert len({r.group for r in rollouts}) == len(kept[:wanted])
    assert (m["prompts_taken"], m["rounds"]) == (place, used) and reader.state_dict()["position"] == place
    assert m["alike"] == fmean(float(rates[row] in (0, GROUP)) for row in range(place))
    assert m["outcome_of_all"] == pytest.approx(fmean(rates[row] / GROUP for row in range(place)))
    assert all(abs(r.advantages) > 0.1 for r in rollouts)


def test_a_later_round_draws_with_a_seed_of_its_own(template):
    recipe = Dapo(updates=1, group_size=GROUP, template=template, dynamic_sampling=DynamicSampling(rounds=3))
    context = context_of(by_row([0] * 9))
    rollouts, m = roll_out(recipe, reader_of(9), context)
    seeds = [sampling.seed for _, sampling in context.engines["generator"].asked]
    assert len(set(seeds)) == 3 and m["rounds"] == 3 and rollouts == []


@pytest.mark.parametrize(("low", "kept"), [(0.3, []), (0.2999, [0])])
@pytest.mark.parametrize("estimator", ["grpo", "rloo"])
def test_twins_dynamic_sampling_keeps_groups_whose_advantages_teach(template, estimator, low, kept):
    """0.1 + 0.2 and 0.3 differ by a rounding error, which makes every advantage 0 and once kept the group."""
    dynamic = DynamicSampling(rounds=1)
    recipe = Dapo(updates=1, group_size=2, template=template, estimator=estimator, dynamic_sampling=dynamic)
    rewards = {"yes": 0.1 + 0.2, "no": low}
    context = context_of(by_row([1]), grade=graded(lambda response, payload: rewards[response]))
    rollouts, _ = roll_out(recipe, reader_of(1), context, per_step=1)
    every, _ = roll_out(dataclasses.replace(recipe, dynamic_sampling=None), reader_of(1), context, per_step=1)
    assert [*dict.fromkeys(rows_of(rollouts))] == kept and without_signal(every) == without_signal(every, "outcome")
    assert without_signal(every) == float(not kept)


def test_samples_that_could_not_be_graded_give_a_group_no_signal(template):
    def rule(response, payload):
        return Outcome.TIMEOUT if payload["question"] == "1" and response == "no" else response == "yes"

    dynamic = DynamicSampling(rounds=1)
    recipe = Dapo(updates=1, group_size=GROUP, template=template, dynamic_sampling=dynamic)
    script = by_row([1, 1, 2])
    context = context_of(lambda text, j, s: script(text, j, s) if s.n > 1 else "no", grade=graded(rule))
    rollouts, m = roll_out(recipe, reader_of(3), context)
    assert rows_of(rollouts) == [0, 2] and m["graded/timeout"] == 3


@pytest.mark.parametrize(("dynamic", "rounds"), [(None, 1), (DynamicSampling(), 10), (DynamicSampling(rounds=1), 1)])
def test_groups_that_a_recipe_leaves_out_are_replaced_by_dynamic_sampling_alone(dynamic, rounds):
    reader = reader_of(100)
    kept, m = draw_groups(ReaderSource(reader, 3), lambda number, prompts: ([], {}), dynamic)
    assert kept == [] and m["rounds"] == rounds and reader.state_dict()["position"] == 3 * rounds


def test_metrics_of_rounds_are_those_of_one_draw(template):
    """Gradings are counted over the rounds, and other metrics are means."""
    steps = "<think><step>a</step><step>b</step></think>"

    def script(text, j, sampling):
        return f"yes{steps}" if text == "Q3:" and j == 0 and sampling.n > 1 else "no"

    def rule(response, payload):
        return Outcome.ERROR if response == "no" and payload["question"] in ("0", "3") else response.startswith("yes")

    recipe = Dapo(updates=1, group_size=2, template=template, dynamic_sampling=DynamicSampling(rounds=2))
    _, m = roll_out(recipe, reader_of(4), context_of(script, grade=graded(rule)), per_step=2)
    assert m["graded/error"] == 3 and m["graded/timeout"] == 0 and m["steps_per_solution"] == 2 / 8


def test_a_metric_that_some_draws_lack_is_the_mean_of_the_others():
    rounds = [{"a": 1.0, "graded/error": 1.0}, {"graded/error": 2.0, "b": 4.0}, {"a": 3.0}]
    assert merged(rounds) == {"a": 2.0, "graded/error": 3.0, "b": 4.0} and merged([]) == {}


RECIPES = {
    "dynamic": {"dynamic_sampling": DynamicSampling(rounds=3)},
    "curriculum": {"curriculum": Curriculum(retire_at=0.75, rest_at=0.0)},
    "rests": {"curriculum": Curriculum(retire_at=None, rest_at=0.0)},
    "brevity": {"curriculum": Curriculum(retire_at=0.75, rest_at=0.0), "brevity": Brevity(share=0.5)},
    "all": {
        "dynamic_sampling": DynamicSampling(rounds=3, oversampling=2),
        "curriculum": Curriculum(retire_at=0.75, rest_at=0.0, rest_epochs=2),
        "hints": Hints(shares=(0.5,)),
        "overlong": Overlong(cache=10),
    },
}


def run(template, options, directory, *, staleness, iterations, state=None, rows=13):
    """Collects iterations. -> [(iteration, its rollouts, its metrics, the state after it)]"""
    recipe = Dapo(updates=8, group_size=GROUP, template=template, **RECIPES[options])
    reader = reader_of(rows, shuffle=True, solution="because")
    progress = dict(START)
    maker = RolloutMaker(
        recipe=recipe, readers={"generator": reader}, context=context_of(lucky), prompts_per_iteration=3,
        max_staleness=staleness,
    )  # fmt: skip
    credit = CreditStage(Dapo(updates=8, group_size=GROUP, template=template, **RECIPES[options]), lag=staleness)
    if state is not None:
        kept = json.loads(json.dumps(state["collector"]))
        maker.restore(kept["data"])
        credit.restore(kept["recipe"], state["cycle"])
        progress = {
            "cycle": state["cycle"],
            "index": 0,
            "number": state["cycle"],
            "iterations": {"generator": state["cycle"]},
        }
    schedule = upcoming(recipe.schedule(), progress)
    collector = Collector(maker, credit, schedule, IterationStore(directory), max_staleness=staleness)
    out = []
    for due in itertools.islice(upcoming(recipe.schedule(), progress), iterations - progress["cycle"]):
        collected = collector.take(due)
        collector.trained()
        rows = [(r.group, r.tokens.tolist(), r.advantages, dict(r.payload)) for r in collected.rollouts["generator"]]
        metrics = {k: v for k, v in collected.metrics["generator"].items() if not k.startswith("seconds")}
        out.append((due.number, rows, metrics, collector.state()))
    collector.close()
    return out


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("options", RECIPES)
def test_a_run_that_was_cut_collects_the_same_iterations(template, tmp_path, options, staleness):
    """Also with iterations collected ahead of the checkpoint, and without the store that has them."""
    whole = run(template, options, tmp_path / "whole", staleness=staleness, iterations=8)
    first = run(template, options, tmp_path / "first", staleness=staleness, iterations=4)
    state = {"collector": first[-1][3], "cycle": 4}
    rest = run(template, options, tmp_path / "rest", staleness=staleness, iterations=8, state=state)
    assert first + rest == whole
    again = run(template, options, tmp_path / "first", staleness=staleness, iterations=8, state=state)
    assert again == rest, "iterations that were collected ahead are read from the store"
    if options == "all":
        assert any(metrics["hinted"] for _, _, metrics, _ in whole)
    if options not in ("dynamic", "rests"):
        assert whole[-1][2]["retired"] > 0 and whole[-1][2]["resting"] > 0


@pytest.mark.parametrize("rows", [1, 2])
def test_an_update_larger_than_the_data_is_cut_and_resumed_like_any_other(template, tmp_path, rows):
    """A problem is then in an update more than once, in groups of its own."""
    whole = run(template, "rests", tmp_path / "whole", staleness=2, iterations=6, rows=rows)
    first = run(template, "rests", tmp_path / "first", staleness=2, iterations=3, rows=rows)
    state = {"collector": first[-1][3], "cycle": 3}
    rest = run(template, "rests", tmp_path / "rest", staleness=2, iterations=6, state=state, rows=rows)
    assert first + rest == whole
    assert all(len({name for name, *_ in own}) == 3 and len(own) == 3 * GROUP for _, own, _, _ in whole)


def test_a_problem_that_was_solved_once_in_an_update_is_retired_and_does_not_rest():
    record = Record(Curriculum(rest_at=0.0))
    groups = [group(0, 1.0), group(0, 0.0, epoch=1), group(1, 0.0), group(1, 1.0, epoch=1)]
    record.learn(success_rates(groups))
    assert record.metrics() == {"retired": 2.0, "resting": 0.0}


def test_with_iterations_ahead_those_before_the_last_problem_was_retired_are_trained_on(template, tmp_path):
    """The iterations that were collected come first, and then the reason why there are no more."""
    recipe = Dapo(updates=8, group_size=GROUP, template=template, curriculum=Curriculum())
    maker = RolloutMaker(
        recipe=recipe, readers={"generator": reader_of(4)}, context=context_of(by_row([4] * 4)),
        prompts_per_iteration=3, max_staleness=3,
    )  # fmt: skip
    credit = CreditStage(dataclasses.replace(recipe), lag=3)
    iterations = upcoming(recipe.schedule(), START)
    collector = Collector(maker, credit, iterations, IterationStore(tmp_path), max_staleness=3)
    taken = []
    with pytest.raises(DataError, match="no problem is left: 4 are retired"):
        for due in upcoming(recipe.schedule(), START):
            taken.append(rows_of(collector.take(due).rollouts["generator"]))
            collector.trained()
    collector.close()
    # an iteration sees the problems that were retired four iterations before
    assert taken == [[0, 1, 2], [3, 0, 1], [2, 3, 0], [1, 2, 3], [3]]


@pytest.mark.parametrize("options", [*RECIPES, "none"])
@pytest.mark.parametrize("failing", [{"0"}, {"0", "1", "2", "3"}])
def test_problems_that_cannot_be_graded_leave_an_iteration_and_no_mark_on_the_curriculum(template, options, failing):
    """Also where nothing at all can be graded: there is nothing to train on then, and no endless search for it."""

    def rule(response, payload):
        return Outcome.ERROR if payload["question"] in failing else response == "yes"

    recipe = Dapo(updates=1, group_size=GROUP, template=template, **RECIPES.get(options, {}))
    context = context_of(by_row([4, 2, 1, 0]), grade=graded(rule), max_failure_share=1.0)
    rollouts, m = roll_out(recipe, reader_of(4, solution="because"), context, per_step=4)
    assert failing.isdisjoint({str(row) for row in rows_of(rollouts)}) and bool(rollouts) is (len(failing) == 1)
    assert all(np.isfinite(r.advantages) for r in rollouts)
    known = {str(row) for row in recipe.state_dict().get("rows", ())}
    assert known.isdisjoint(failing) and m["graded/error"] >= GROUP * len(failing) and m["rounds"] <= 3


def test_rounds_that_run_out_leave_an_iteration_without_rollouts_and_a_run_of_such_iterations_says_where_to_look(
    tmp_path,
):
    (tmp_path / "q.txt").write_text("?{question}")
    recipe = Dapo(
        updates=2, group_size=2, template=str(tmp_path / "q.txt"), dynamic_sampling=DynamicSampling(rounds=3)
    )  # fmt: skip
    log, nothing = Log(), graded(lambda response, payload: 0.0)
    setup, progress = make_loop(recipe.template, log, tmp_path / "iterations", recipe=recipe, grade=nothing)
    with pytest.raises(loop.NothingTrained, match="2 iterations and no update.*alike = 1, outcome_of_all = 0"):
        train(setup, loop.Plan(iterations=2, evaluate_at_start=False), progress)
    assert log.series("rounds") == [3.0, 3.0] and log.series("samples") == [0.0, 0.0]
    assert log.series("skipped") == [1.0, 1.0] and log.series("alike") == [1.0, 1.0]


def group(row, rate, *, epoch=0, outcomes=None):
    """A group of one problem; nothing was graded where the rate is None."""

    class Solved:
        def __init__(self, correct):
            self.correct = correct

    count = 0 if rate is None else 8
    solutions = [Solved(j < round((rate or 0) * 8)) for j in range(count)]
    return Group(prompt=Prompt(id=f"{epoch}/{row}", tokens=[1], payload={}), solutions=solutions, drawn=len(solutions))


def taken(record, reader, count):
    return [tuple(map(int, p.id.split("/"))) for p in record.over(ReaderSource(reader, 1)).take(count)]


def test_a_solved_problem_never_comes_again():
    record, reader = Record(Curriculum()), reader_of(5)
    assert taken(record, reader, 5) == [(0, row) for row in range(5)]
    record.learn(success_rates([group(0, 1.0), group(1, 0.875), group(2, 0.9), group(3, 0.0), group(4, None)]))
    assert taken(record, reader, 7) == [(1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (2, 2), (2, 3)]
    record.learn(success_rates([group(1, 1.0, epoch=1)]))
    assert taken(record, reader, 3) == [(2, 4), (3, 2), (3, 3)]
    assert record.metrics() == {"retired": 2.0, "resting": 0.0}


def test_a_problem_that_is_too_hard_rests():
    record, reader = Record(Curriculum(retire_at=None, rest_at=0.125, rest_epochs=2)), reader_of(3)
    taken(record, reader, 3)
    record.learn(success_rates([group(0, 1.0), group(1, 0.125), group(2, 0.25)]))
    assert taken(record, reader, 7) == [(1, 0), (1, 2), (2, 0), (2, 2), (3, 0), (3, 1), (3, 2)]
    record.learn(success_rates([group(1, 0.5, epoch=3)]))
    assert record.metrics()["resting"] == 0 and taken(record, reader, 3) == [(4, 0), (4, 1), (4, 2)]


def test_rest_ends_where_nothing_else_is_left():
    record, reader = Record(Curriculum(rest_at=0.0, rest_epochs=3)), reader_of(2)
    taken(record, reader, 2)
    record.learn(success_rates([group(0, 1.0), group(1, 0.0)]))
    assert taken(record, reader, 1) == [(4, 1)]


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_run_without_problems_left_says_so_and_does_not_turn_for_ever(shuffle):
    record, reader = Record(Curriculum()), reader_of(4, shuffle=shuffle)
    taken(record, reader, 6)
    record.learn(success_rates([group(row, 1.0) for row in range(4)]))
    with pytest.raises(DataError, match="4 are retired.*retire_at"):
        taken(record, reader, 1)


@pytest.mark.parametrize(("rest_at", "epochs"), [(None, 3), (0.0, 6)])
def test_a_run_without_problems_left_ends_after_a_whole_epoch_and_the_longest_rest(rest_at, epochs):
    """What rests may come again; without `rest_at` nothing rests, whatever rest_epochs is."""
    record, reader = Record(Curriculum(rest_at=rest_at, rest_epochs=3)), reader_of(4)
    taken(record, reader, 4)
    record.learn(success_rates([group(row, 1.0) for row in range(4)]))
    with pytest.raises(DataError, match="no problem is left"):
        taken(record, reader, 1)
    assert reader.state_dict()["epoch"] == epochs


def test_a_curriculum_wants_problems_of_a_data_set():
    with pytest.raises(DataError, match=r"'x' .*epoch/row"):
        Record(Curriculum()).admits(Prompt(id="x", tokens=[1], payload={}))


def test_a_record_survives_a_checkpoint():
    record = Record(Curriculum(rest_at=0.0))
    record.learn(success_rates([group(7, 1.0), group(2, 1.0), group(5, 0.0, epoch=3)]))
    again = Record(Curriculum(rest_at=0.0))
    again.load_state_dict(json.loads(json.dumps(record.state_dict())))
    assert again == record and again.metrics() == {"retired": 2.0, "resting": 1.0} and again.rests_until(5) == 5


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"dynamic_sampling": {"rounds": 0}}, "dynamic_sampling.rounds = 0: give a value greater than or equal to 1"),
        ({"dynamic_sampling": {"oversampling": 0}}, "oversampling = 0"),
        ({"dynamic_sampling": {"round": 2}}, "dynamic_sampling.round: unknown key"),
        ({"curriculum": {"retire_at": 1.5}}, "curriculum.retire_at = 1.5: give a value less"),
        ({"curriculum": {"rest_at": 0.9}}, "rest_at = 0.9 is not below retire_at = 0.9"),
        (
            {"curriculum": {"rest_at": 0.0, "rest_epochs": 0}},
            "rest_epochs = 0: give a value greater",
        ),
        ({"hints": {"shares": []}}, r"hints.shares = \[\]: give at least one"),
        ({"hints": {"shares": [0.5, 0.25]}}, "rising order"),
        ({"overlong": {}}, "overlong does nothing: give cache"),
        ({"overlong": {"cache": -1}}, "cache = -1"),
        ({"brevity": {"share": 0.0}}, "brevity.share = 0.0: give a value greater than 0"),
        ({"brevity": {}, "dynamic_sampling": {}}, "take one of the two"),
    ],
)
def test_options_that_cannot_be_are_refused_where_the_recipe_is_built(args, message):
    with pytest.raises(ConfigError, match=message):
        build(Use(target="megatron_rl.recipes.dapo:Dapo", args={"updates": 1, **args}))


def test_options_are_read_from_a_config_and_change_what_an_iteration_draws():
    args = {"updates": 1, "group_size": 16, "dynamic_sampling": {"oversampling": 3}, "curriculum": {}}
    recipe = build(Use(target="megatron_rl.recipes.dapo:Dapo", args=args))
    assert recipe.dynamic_sampling == DynamicSampling(rounds=10, oversampling=3) and recipe.curriculum == Curriculum()
    [part] = recipe.roles().values()
    assert (part.samples, part.drawn) == (16, {"generator": 48})


def test_a_whole_run_learns_from_groups_with_signal_and_goes_on_exactly(tmp_path):
    """Through the loop, on a context of logits that really learns."""
    (tmp_path / "q.txt").write_text("?{question}")
    options = {"dynamic_sampling": DynamicSampling(rounds=4), "overlong": Overlong(leave_out_truncated=True, cache=1)}
    recipe = Dapo(updates=8, group_size=6, template=str(tmp_path / "q.txt"), estimator="rloo", **options)
    logs, context = [], []
    for cut in (None, 4):
        log, state, policy = Log(), None, None
        for stop in (cut, None) if cut else (None,):
            directory = tmp_path / f"{cut}" / f"{stop}"
            setup, progress = make_loop(
                recipe.template, log, directory, recipe=recipe, stop_after=stop, state=state, policy=policy
            )
            train(setup, loop.Plan(iterations=8, evaluate_at_start=False), progress)
            state, policy = log.saved[max(log.saved)]["state"], setup.trainees["generator"].policy
        logs.append(log)
        context.append(policy.table.detach())
    assert (context[0] == context[1]).all()
    for name in ("prompts_taken", "rounds", "reward/outcome", "loss"):
        assert logs[0].series(name) == logs[1].series(name)
    assert max(logs[0].series("rounds")) > 1 and len(logs[0].series("loss")) == 8
    sampled = logs[0].series("outcome_of_all")
    assert fmean(sampled[-3:]) > 1.5 * fmean(sampled[:3]), sampled
