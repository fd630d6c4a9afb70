"""Several sources of problems in one run: shares of the draws, exact positions, graders and metrics by source."""

import itertools
import json
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
from scripted_rollouts import GROUP, TOKENIZER, context_of, ids, lucky
from toys import graded

from megatron_rl.config.data_sources import Source
from megatron_rl.config.datasets import PromptSet
from megatron_rl.data.mixed_sources import MixedReader
from megatron_rl.data.problems import Draw, Problem, PromptReader, place_of, source_of
from megatron_rl.recipes.curriculum import Curriculum, Rates
from megatron_rl.recipes.dapo import Dapo
from megatron_rl.recipes.dynamic_sampling import DynamicSampling
from megatron_rl.rewards.source_grading import by_source
from megatron_rl.training.collector import Collector, RolloutMaker, upcoming
from megatron_rl.training.credit import CreditStage
from megatron_rl.training.prompts import readers_of
from megatron_rl.training.rollouts import measure
from megatron_rl.training.store import IterationStore
from megatron_rl.types import SOURCE

WEIGHTS = {"math": 5.0, "code": 3.0, "openai/gsm8k": 2.0}
START = {"cycle": 0, "index": 0, "number": 0, "iterations": {}}


def reader_of(*, seed=0, rows=(40, 7, 23), weights=WEIGHTS):
    readers = {
        name: PromptReader(
            [Problem(i, {"question": f"{i}", "answer": "yes", SOURCE: name}) for i in range(count)],
            lambda values: ids(f"Q{values['question']}:"),
            seed=f"{seed}/{name}",
            shuffle=True,
            max_prompt_tokens=100,
            source=name,
        )
        for name, count in zip(weights, rows, strict=True)
    }
    return MixedReader(readers, weights, seed=seed)


def sources(prompts):
    return [source_of(prompt) for prompt in prompts]


@pytest.mark.parametrize("seed", range(5))
def test_shares_of_1000_draws_are_those_of_the_weights(seed):
    drawn = sources(reader_of(seed=seed).take(1000))
    for name, share in {"math": 500, "code": 300, "openai/gsm8k": 200}.items():
        assert abs(Counter(drawn)[name] - share) <= 3
    for first in range(0, 900, 50):  # in every stretch of 100 draws too
        assert abs(Counter(drawn[first : first + 100])["code"] - 30) <= 3


def test_draws_depend_on_the_seed_alone():
    whole = [p.id for p in reader_of(seed=1).take(200)]
    assert whole == [p.id for p in reader_of(seed=1).take(200)]
    cut = reader_of(seed=1)
    assert whole == [p.id for count in (1, 50, 149) for p in cut.take(count)], "however they are cut"
    assert whole != [p.id for p in reader_of(seed=2).take(200)]


def test_a_source_has_epochs_and_an_order_of_its_own():
    code = [p for p in reader_of().take(100) if source_of(p) == "code"]
    places = [place_of(p) for p in code]
    assert [epoch for epoch, _ in places[:21]] == [0] * 7 + [1] * 7 + [2] * 7
    assert all(len({row for _, row in places[first : first + 7]}) == 7 for first in (0, 7, 14))
    assert places[0][1].startswith("code/") and [row for _, row in places[:7]] != [row for _, row in places[7:14]]
    gsm8k = next(p for p in reader_of().take(20) if source_of(p) == "openai/gsm8k")
    assert gsm8k.id.startswith("openai/gsm8k/0/") and place_of(gsm8k)[1].startswith("openai/gsm8k/")


def test_prompts_name_the_source_that_they_come_from():
    """Two sources have problems of the same row, whose ids must differ."""
    problems = {name: [Problem(0, {"question": "1"})] for name in ("data.sources.a", "data.sources.b", "mine")}
    sets = {"data.sources.a": Source(path="a"), "data.sources.b": Source(path="b"), "mine": PromptSet(path="m")}
    recipe = SimpleNamespace(prompt=lambda values: f"Q{values['question']}")
    limits = {"roles.generator.max_prompt_tokens": 100}
    readers = readers_of(recipe, TOKENIZER, sets, problems, limits=limits, seed=3)
    assert [reader.take(1)[0].id for reader in readers.values()] == ["a/0/0", "b/0/0", "0/0"]


@pytest.mark.parametrize("before", [0, 1, 9, 10, 333])
def test_a_saved_position_goes_on_exactly(before):
    whole, again = reader_of(), reader_of()
    whole.take(before)
    again.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    assert again.take(300) == whole.take(300) and again.state_dict() == whole.state_dict()


def test_weights_change_after_any_draw_and_a_source_without_weight_is_not_drawn():
    reader = reader_of()
    first = reader.take(300, draw=Draw(weights={"math": 1.0, "code": 0.0, "openai/gsm8k": 0.0}))
    assert set(sources(first)) == {"math"}
    counts = Counter(sources(reader.take(300, draw=Draw(weights={"math": 1.0, "code": 1.0, "openai/gsm8k": 0.0}))))
    assert abs(counts["code"] - 150) <= 3 and counts["openai/gsm8k"] == 0


def test_a_prompt_that_does_not_fit_is_replaced_by_one_of_its_source():
    fits = lambda prompt: source_of(prompt) != "math" or int(place_of(prompt)[1].split("/")[1]) < 4  # noqa: E731
    drawn = reader_of().take(1000, fits)
    assert abs(Counter(sources(drawn))["math"] - 500) <= 3 and all(map(fits, drawn))


def test_an_order_beside_has_the_shares_and_none_of_the_problems_that_were_taken():
    reader = reader_of()
    taken = reader.take(20)
    before = reader.state_dict()
    beside = reader.beside("iteration 3", taken, before)
    others = beside.take(20)
    assert not {p.id for p in others} & {p.id for p in taken} and reader.state_dict() == before
    assert [p.id for p in others] == [p.id for p in reader.beside("iteration 3", taken, before).take(20)]
    assert [p.id for p in others] != [p.id for p in reader.beside("iteration 4", taken, before).take(20)]
    assert abs(Counter(sources(beside.take(1000)))["math"] - 500) <= 3


def test_an_order_beside_of_a_source_that_was_not_drawn_from_begins_in_its_present_epoch():
    """It began in the first epoch, so that a curriculum's rests were counted from there."""
    reader = reader_of(rows=(1000, 3, 3), weights={"math": 0.98, "code": 0.01, "puzzles": 0.01})
    reader.take(1000)
    taken = reader.take(20)
    assert not any(source_of(prompt) == "code" for prompt in taken)
    state = reader.state_dict()
    others = [prompt.id for prompt in reader.beside("x", taken, state).take(400) if prompt.id.startswith("code/")]
    assert state["sources"]["code"]["epoch"] >= 2 and others[0].startswith(f"code/{state['sources']['code']['epoch']}/")


def test_a_position_of_other_sources_or_of_one_set_begins_anew():
    reader = reader_of()
    fresh = [p.id for p in reader.take(30)]
    other = reader_of()
    other.load_state_dict({"epoch": 3, "position": 2, "dropped": 0, "order": "x"})
    assert [p.id for p in other.take(30)] == fresh


CURRICULUM = Curriculum(retire_at=0.75, rest_at=0.0, sources={"code": Rates(retire_at=None)})
RECIPES = {
    "plain": {},
    "rounds": {"dynamic_sampling": DynamicSampling(rounds=3, oversampling=2)},
    "both": {"dynamic_sampling": DynamicSampling(rounds=3), "curriculum": CURRICULUM},
}


def run(template, options, directory, *, staleness, first=0, last=6, state=None):
    """Collects iterations. -> [(ids of the groups, metrics, the state after it)]"""
    made = lambda: Dapo(updates=8, group_size=GROUP, template=template, **RECIPES[options])  # noqa: E731
    maker = RolloutMaker(
        recipe=made(), readers={"generator": reader_of(rows=(5, 4, 6))}, context=context_of(lucky),
        prompts_per_iteration=4, max_staleness=staleness,
    )  # fmt: skip
    credit, progress = CreditStage(made(), lag=staleness), START
    if state is not None:
        kept = json.loads(json.dumps(state))
        maker.restore(kept["data"])
        credit.restore(kept["recipe"], first)
        progress = {"cycle": first, "index": 0, "number": first, "iterations": {"generator": first}}
    schedule = made().schedule()
    collector = Collector(
        maker, credit, upcoming(schedule, progress), IterationStore(directory), max_staleness=staleness
    )
    out = []
    for due in itertools.islice(upcoming(schedule, progress), last - first):
        collected = collector.take(due)
        collector.trained()
        rows = [(r.group, r.tokens.tolist(), r.advantages) for r in collected.rollouts["generator"]]
        metrics = {k: v for k, v in collected.metrics["generator"].items() if not k.startswith("seconds")}
        out.append((rows, metrics, collector.state()))
    collector.close()
    return out


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("options", RECIPES)
def test_a_run_that_was_cut_after_any_iteration_draws_the_same(template, tmp_path, options, staleness):
    """Also with later rounds of dynamic sampling, which have an order of their own with max_staleness above 0."""
    whole = run(template, options, tmp_path / "whole", staleness=staleness)
    for cut in range(1, 6):
        state = whole[cut - 1][2]
        rest = run(template, options, tmp_path / f"rest{cut}", staleness=staleness, first=cut, state=state)
        assert rest == whole[cut:], f"cut after {cut}"
    assert run(template, options, tmp_path / "again", staleness=staleness) == whole, "whatever the timing"
    if options == "both":
        last = whole[-1][1]
        assert last["retired"] == sum(value for name, value in last.items() if name.startswith("retired/")) > 0
        assert "retired/code" not in last, "no problem of this source is retired"


def test_a_source_of_which_no_problem_is_left_leaves_its_draws_to_the_others(template, tmp_path):
    recipe = Dapo(updates=8, group_size=GROUP, template=template, curriculum=Curriculum())
    solved = lambda text, j, sampling: "yes" if text in ("Q0:", "Q1:") else "no"  # noqa: E731
    reader = reader_of(rows=(9, 2, 9))
    context = context_of(solved)
    maker = RolloutMaker(recipe=recipe, readers={"generator": reader}, context=context, prompts_per_iteration=10)
    credit = CreditStage(recipe)
    schedule = upcoming(recipe.schedule(), START)
    collector = Collector(maker, credit, schedule, IterationStore(tmp_path), max_staleness=0)
    drawn = [
        Counter(r.payload[SOURCE] for r in collector.take(due).rollouts["generator"])
        for due in itertools.islice(upcoming(recipe.schedule(), START), 4)
    ]
    assert drawn[0]["code"] and not drawn[-1]["code"] and drawn[-1].total() == 10 * GROUP


def test_a_stage_may_leave_the_curriculum_out_and_take_it_in_again(template, tmp_path):
    plain, chosen = (
        Dapo(updates=8, group_size=GROUP, template=template, curriculum=own)
        for own in (None, Curriculum(retire_at=0.5))
    )
    at = lambda number: plain if number == 1 else chosen  # noqa: E731
    solved = lambda text, j, sampling: "yes" if text in ("Q0:", "Q1:") else "no"  # noqa: E731
    makers = {
        id(own): RolloutMaker(
            recipe=own, readers={"generator": reader_of(rows=(9, 9, 9))}, context=context_of(solved),
            prompts_per_iteration=10,
        )
        for own in (plain, chosen)
    }  # fmt: skip
    maker = replace(makers[id(chosen)], at=lambda number: makers[id(at(number))])
    credit, schedule = CreditStage(chosen, recipe_at=at), upcoming(chosen.schedule(), START)
    collector = Collector(maker, credit, schedule, IterationStore(tmp_path), max_staleness=0)
    found = [
        collector.take(due).metrics["generator"].get("retired")
        for due in itertools.islice(upcoming(chosen.schedule(), START), 3)
    ]
    assert found[0] > 0 and found[1] is None and found[2] is not None


@pytest.fixture
def template(tmp_path):
    (tmp_path / "t.txt").write_text("Q{question}:")
    return str(tmp_path / "t.txt")


def test_each_source_is_graded_by_its_own_function_and_measured_by_itself(template, tmp_path):
    seen = Counter()

    def grader(name, right):
        def rule(response, payload):
            seen[name, payload.get(SOURCE)] += 1
            return float(right in response)

        return graded(rule)

    grade = by_source({"math": grader("m", "yes"), "code": grader("c", "no")}, grader("default", "x"))
    context = context_of(lambda text, j, sampling: "yes", grade=grade)
    recipe = Dapo(updates=8, group_size=GROUP, template=template)
    maker = RolloutMaker(recipe=recipe, readers={"generator": reader_of()}, context=context, prompts_per_iteration=10)
    schedule = upcoming(recipe.schedule(), START)
    collector = Collector(maker, CreditStage(recipe), schedule, IterationStore(tmp_path), max_staleness=0)
    collected = collector.take(next(upcoming(recipe.schedule(), START)))
    assert set(seen) == {("m", "math"), ("c", "code"), ("default", "openai/gsm8k")}
    metrics = collected.metrics["generator"]
    assert [metrics[f"reward/outcome/{name}"] for name in WEIGHTS] == [1.0, 0.0, 0.0]
    assert [metrics[f"accuracy/{name}"] for name in WEIGHTS] == [1.0, 0.0, 0.0]
    assert metrics["samples"] == sum(metrics[f"samples/{name}"] for name in WEIGHTS) == 10 * GROUP
    assert metrics["reward/outcome"] == pytest.approx(metrics["samples/math"] / metrics["samples"])
    assert all(metrics[f"length/{name}"] > 0 for name in WEIGHTS)
    assert not [name for name in measure([]) if "/" in name]
