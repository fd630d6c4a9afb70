"""Reward functions of every signature: one response or a batch, waiting, several by weight, with metrics."""

from __future__ import annotations

import asyncio
import functools
import math
import re
import time
from pathlib import Path

import numpy as np
import pytest

from megatron_rl.api.data_files import reward_settings
from megatron_rl.config.base import ConfigError, Use
from megatron_rl.config.plugins import build
from megatron_rl.config.schema import Reward
from megatron_rl.rewards.grading_pool import GradePool, Outcome
from megatron_rl.rewards.reward_functions import CalledFunction, Grader, read_result

ROOT = Path(__file__).parents[3]


def grade(items, *functions, bounds=None):
    """Grades with (function, weight) pairs, in this process."""
    called = [CalledFunction.of(f, weight=w) for f, w in functions]
    return list(Grader(called, bounds=bounds).grade(items))


def texts(*responses, **payload):
    return [(response, {"question": "q", **payload}) for response in responses]


def test_functions_of_trls_documentation_give_what_it_says():
    """TRL, docs/source/grpo_trainer.md: examples 1.1, 2 and 3 with their inputs and outputs."""

    def lengths(completions, **kwargs):
        return [float(len(completion)) for completion in completions]

    def form(completions, **kwargs):
        contents = [completion[0]["content"] for completion in completions]
        return [1.0 if re.match(r"^<think>.*?</think><answer>.*?</answer>$", c) else 0.0 for c in contents]

    def known(completions, ground_truth, **kwargs):
        matches = [re.search(r"\\boxed\{(.*?)\}", completion) for completion in completions]
        contents = [match.group(1) if match else "" for match in matches]
        return [1.0 if c == gt else 0.0 for c, gt in zip(contents, ground_truth, strict=True)]

    assert [r.score for r in grade(texts(" blue.", " in the sky."), (lengths, 1.0))] == [6.0, 12.0]
    said = [
        "<think>The sum of 1 and 2 is 3, which we multiply by 4 to get 12.</think><answer>(1 + 2) * 4 = 12</answer>",
        "The sum of 3 and 1 is 4, which we multiply by 2 to get 8. So (3 + 1) * 2 = 8.",
    ]
    asked = [{"role": "user", "content": "What is the result of (1 + 2) * 4?"}]
    chats = [(text, {"question": asked[0]["content"], "messages": asked}) for text in said]
    assert [r.score for r in grade(chats, (form, 1.0))] == [1.0, 0.0]
    solutions = [(r" The solution is \boxed{2}.", {"ground_truth": "2"}), (r" It is \boxed{6}.", {"ground_truth": "5"})]
    assert [r.score for r in grade(solutions, (known, 1.0))] == [1.0, 0.0]


def test_a_batch_gets_prompts_completions_and_the_columns_that_it_names():
    seen = []

    def named(prompts, completions, words, other="none"):
        seen.append((prompts, completions, words, other))
        return [0.0] * len(prompts)

    def all_of_them(completions, **columns):
        seen.append(columns)
        return [0.0] * len(completions)

    items = [("a", {"question": "one", "words": [1], "answer": "x"}), ("b", {"question": "two", "words": [2]})]
    grade(items, (named, 1.0), (all_of_them, 1.0))
    assert seen[0] == (["one", "two"], ["a", "b"], [[1], [2]], "none")
    assert seen[1] == {
        "prompts": ["one", "two"],
        "question": ["one", "two"],
        "words": [[1], [2]],
        "answer": ["x", None],
    }
    messages = [{"role": "user", "content": "one"}]
    grade([("a", {"question": "one", "messages": messages, "words": []})], (named, 1.0))
    assert seen[2][:2] == ([messages], [[{"role": "assistant", "content": "a"}]])
    [failed] = grade([("a", {"question": "one"})], (named, 1.0))
    assert failed.score is None and "no column 'words'" in failed.why and "question" in failed.why


def test_weighted_sums_leave_out_functions_with_nothing_to_say():
    """TRL: the sum of weight times reward over the functions that returned one, here by plain loops in float64."""
    rng = np.random.default_rng(0)
    values = rng.normal(size=(3, 40))
    absent = rng.random(size=(3, 40)) < 0.3
    absent[:, 7] = True
    weights = [0.5, -2.0, 3.25]

    def column(k):
        def batch(prompts, number):
            return [None if absent[k, n] else values[k, n] for n in number]

        return batch

    async def single(response, payload):
        await asyncio.sleep(0)
        n = payload["number"]
        return None if absent[2, n] else float(values[2, n])

    items = [("r", {"question": "q", "number": n}) for n in range(40)]
    found = grade(items, (column(0), weights[0]), (column(1), weights[1]), (single, weights[2]))
    for n, result in enumerate(found):
        expected, used = 0.0, 0
        for k in range(3):
            if not absent[k, n]:
                expected, used = expected + weights[k] * values[k, n], used + 1
        if used:
            assert math.isclose(result.score, expected, rel_tol=1e-12, abs_tol=1e-12)
        else:
            assert result.score is None and "no reward function" in result.why
    assert any(r.score is None for r in found) and any(r.score is not None for r in found)


def test_what_waits_waits_together():
    most = now = 0

    async def slow(response, payload):
        nonlocal most, now
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.01)
        now -= 1
        return len(response)

    async def batch(completions, **columns):
        return [await slow(text, {}) for text in completions]

    results = grade(texts("a", "bb", "ccc"), (slow, 1.0), (batch, 10.0))
    assert [r.score for r in results] == [11.0, 22.0, 33.0] and most == 4


def test_metrics_are_told_beside_rewards():
    def one(response, payload):
        return 0.25, {"length": len(response)}

    def batch(completions, **columns):
        return [{"reward": 1.0, "first": text == "a"} for text in completions]

    [alone] = grade(texts("abc"), (one, 2.0))
    assert (alone.score, alone.metrics) == (0.5, {"length": 3.0})
    both = grade(texts("a", "b"), (one, 2.0), (batch, 1.0))
    assert both[1].metrics == {"one": 0.25, "one/length": 1.0, "batch": 1.0, "batch/first": 0.0}
    assert both[1].score == 1.5


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("yes", "returned 'yes': a reward returns a finite number"),
        (math.nan, "returned nan"),
        (1e39, "returned 1e+39: a reward returns a finite number of at most 1e+15"),
        (10**400, "a finite number"),
        ([1.0], "returned [1.0]"),
        (np.zeros(2), "a finite number"),
        ({"value": 1.0}, "a mapping with value: it needs 'reward'"),
        ((1.0, {"length": "long"}), "the metric 'length' = 'long'"),
        ((1.0, {"outcome": 1.0}), "none of them called outcome or trained"),
    ],
)
def test_what_is_no_reward_is_refused(value, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        read_result(value)
    [result] = grade(texts("a"), (lambda response, payload: value, 1.0))
    assert result.score is None and words in result.why


def test_numbers_of_all_kinds_are_rewards():
    import torch

    for value in (1, True, np.float32(1), np.int64(1), np.array([1.0]), torch.tensor(1.0)):
        assert read_result(value) == (1.0, {})
    assert read_result(0.5, bounds=(0.0, 1.0)) == (0.5, {}) and read_result(None) == (None, {})
    for value in (None, 1.5, -0.1):
        with pytest.raises(ValueError, match=r"a number in reward.range = \[0, 1\]"):
            read_result(value, bounds=(0.0, 1.0))


def batch_of_one(completions):
    return [1.0]


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (batch_of_one, "batch_of_one returned 1 values for 2 completions"),
        (lambda completions, **columns: 3, "returned a int for 2 completions"),
        (lambda completions, **columns: "no", "returned a str for 2 completions"),
        (lambda response, payload: payload["gold"], "KeyError: 'gold'"),
    ],
)
def test_a_function_that_fails_says_how(function, words):
    found = grade(texts("a", "b"), (function, 1.0))
    assert all(r.score is None and words in r.why for r in found) and len(found) == 2


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda text: 1.0, "cannot be called with (response, payload)"),
        (lambda completions, completion_ids: 1.0, "has the parameter 'completion_ids'"),
        (lambda completions, trainer_state: 1.0, "has the parameter 'trainer_state'"),
    ],
)
def test_a_signature_that_cannot_be_called_is_refused_when_it_is_given(function, words, tmp_path):
    with pytest.raises(ConfigError, match=re.escape(words)):
        reward_settings(function, tmp_path)


def test_a_reward_of_a_notebook_goes_to_the_workers_by_value(tmp_path):
    """A local function with a global, a closure and a default that no module holds, by the pool's own processes."""
    factor = 3.0

    def scored(completions, word, extra=2.0):
        pairs = zip(completions, word, strict=True)
        return [(factor * text.count(own) + extra, {"seen": len(completions)}) for text, own in pairs]

    section, [called] = reward_settings([(scored, 0.5)], tmp_path)
    assert called.columns == ("word",) and list(tmp_path.glob("reward-scored-*.pkl"))
    reward = Reward(**section, workers=2)
    build(Use(target=reward.target, args=reward.args))
    with GradePool(reward) as pool:
        graded = pool.grade(["a" * n for n in range(40)], [{"question": "q", "word": "a"}] * 40)
    assert [g.score for g in graded] == [0.5 * (3.0 * n + 2.0) for n in range(40)]
    assert all(g.outcome is Outcome.SCORE and 1 <= g.metrics["seen"] <= 16 for g in graded)
    assert max(g.metrics["seen"] for g in graded) > 1
    again, _ = reward_settings([(scored, 0.5)], tmp_path)
    assert again == section and len(list(tmp_path.iterdir())) == 1, "the same function has the same file"


def test_what_hangs_a_batch_or_ends_its_process_costs_only_itself(tmp_path):
    def sometimes(completions, **columns):
        if "hang" in completions:
            time.sleep(60)
        if "end" in completions:
            raise SystemExit(3)
        if "raise" in completions:
            raise KeyError("of the whole batch")
        return [1.0] * len(completions)

    section, _ = reward_settings(sometimes, tmp_path)
    responses = ["a", "hang", "b", "c", "end", "d", "e"]
    with GradePool(Reward(**section, workers=1, timeout_s=0.6)) as pool:
        graded = pool.grade(responses, [{}] * len(responses))
        workers = [worker.process.pid for worker in pool._workers]
        raised = pool.grade(["a", "raise", "b"], [{}] * 3)
        assert [worker.process.pid for worker in pool._workers] == workers, "an error ends no worker"
    kinds = {"hang": Outcome.TIMEOUT, "end": Outcome.ERROR}
    assert [g.outcome for g in graded] == [kinds.get(r, Outcome.SCORE) for r in responses]
    assert [g.outcome for g in raised] == [Outcome.SCORE, Outcome.ERROR, Outcome.SCORE]
    assert "KeyError: 'of the whole batch'" in raised[1].detail


@pytest.mark.parametrize("waits", [False, True])
def test_a_batch_that_raises_costs_only_the_answer_that_makes_it_raise(waits, tmp_path):
    """Of 40 answers, in batches of up to 16 beside a function of single answers, one cannot be parsed."""

    def numbers(completions, **columns):
        return [float(text) for text in completions]

    async def later(completions, **columns):
        return [float(text) for text in completions]

    section, _ = reward_settings([later if waits else numbers, lambda response, payload: 0.5], tmp_path)
    responses = [str(n) if n != 20 else "twenty" for n in range(40)]
    with GradePool(Reward(**section, workers=2)) as pool:
        graded = pool.grade(responses, [{}] * 40)
    assert [g.outcome for g in graded] == [Outcome.ERROR if n == 20 else Outcome.SCORE for n in range(40)]
    assert [g.score for n, g in enumerate(graded) if n != 20] == [n + 0.5 for n in range(40) if n != 20]
    assert "could not convert string to float: 'twenty'" in graded[20].detail


def test_a_batch_has_the_time_of_each_of_its_answers(tmp_path):
    """Six answers of 0.25 s with reward.timeout_s = 0.6, as one call, which takes longer than that."""

    def slow(completions, **columns):
        time.sleep(0.25 * len(completions))
        return [float(len(completions))] * len(completions)

    section, _ = reward_settings(slow, tmp_path)
    with GradePool(Reward(**section, workers=1, timeout_s=0.6)) as pool:
        graded = pool.grade(["a"] * 6, [{}] * 6)
    assert [(g.outcome, g.score) for g in graded] == [(Outcome.SCORE, 6.0)] * 6, "one call had all six"


def test_functions_that_ranks_can_import_are_named_and_names_stay_apart(tmp_path):
    from megatron_rl.rewards.exact_match import grade as first
    from megatron_rl.rewards.tiny_task import grade as second

    section, called = reward_settings([first, (second, 2), "megatron_rl.contrib.last_letter:grade"], tmp_path)
    targets = [one["target"] for one in section["args"]["functions"]]
    named = ("rewards.exact_match", "rewards.tiny_task", "contrib.last_letter")
    assert targets == [f"megatron_rl.{module}:grade" for module in named]
    assert [one.name for one in called] == ["grade", "grade_2", "grade_3"] and not list(tmp_path.iterdir())
    assert reward_settings("a.b:c", tmp_path)[0] == {"target": "a.b:c", "args": {}}


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        ([], "reward is an empty list"),
        ((lambda response, payload: 1.0, 0.5), "put the pair of function and weight into a list"),
        ([(lambda response, payload: 1.0, "much")], "a pair is (function, weight)"),
        ([(lambda response, payload: 1.0, math.inf)], "the weight inf"),
        (3, "is a int: give a function"),
        (["no_module_of_this_name:f"], "cannot import no_module_of_this_name"),
    ],
)
def test_what_is_no_reward_function_is_refused(reward, words, tmp_path):
    with pytest.raises(ConfigError, match=re.escape(words)):
        reward_settings(reward, tmp_path)


def test_a_function_that_holds_what_no_file_can_is_refused_with_the_cure(tmp_path):
    import threading

    lock = threading.Lock()

    def locked(response, payload):
        with lock:
            return 1.0

    with pytest.raises(ConfigError, match="reward locked cannot be handed .*when it is called"):
        reward_settings(locked, tmp_path)


class Longer:
    """A reward that is an object."""

    def __init__(self, most):
        self.most = most

    def __call__(self, response, payload):
        return min(len(response), self.most) / self.most


def test_objects_and_partials_are_rewards(tmp_path):
    def scaled(response, payload, by):
        return by * len(response)

    section, called = reward_settings([Longer(4), functools.partial(scaled, by=2.0)], tmp_path)
    assert [one.name for one in called] == ["Longer", "scaled"]
    with GradePool(Reward(**section, workers=1)) as pool:
        [graded] = pool.grade(["ab"], [{}])
    assert graded.score == 4.5 and graded.metrics == {"Longer": 0.5, "scaled": 4.0}


@pytest.mark.parametrize(
    ("functions", "words"),
    [
        ([], "functions is empty"),
        ([{"weight": 1.0}], "needs either a target or a pickled file"),
        ([{"target": "megatron_rl.rewards.tiny_task:grad"}], "cannot be loaded: AttributeError"),
        ([{"pickled": "no/such/file.pkl"}], "FileNotFoundError"),
        ([{"target": "megatron_rl.rewards.tiny_task:grade"}] * 2, "the name 'grade' is taken twice"),
        ([{"target": "megatron_rl.rewards.tiny_task:grade", "wieght": 2.0}], "wieght"),
    ],
)
def test_functions_in_a_config_are_checked_when_it_is(functions, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        build(Use(target="megatron_rl.rewards.reward_functions:RewardFunctions", args={"functions": functions}))


def test_functions_in_a_config_are_added_up_by_their_weights():
    functions = [
        {"target": "megatron_rl.rewards.tiny_task:grade", "weight": 2.0},
        {"target": "bad_rewards:scaled", "name": "own", "args": {"scale": 5.0}},
    ]
    reward = Reward(
        target="megatron_rl.rewards.reward_functions:RewardFunctions", args={"functions": functions}, workers=1
    )
    with GradePool(reward) as pool:
        graded = pool.grade(["ab", "a"], [{"answer": "a"}] * 2)
    assert [g.score for g in graded] == [1.0, 7.0] and graded[1].metrics == {"grade": 1.0, "own": 5.0}


def test_memory_that_a_waiting_function_takes_is_told_as_of_one_that_does_not():
    """Its worker must go: an ordinary error would keep it."""

    async def hungry(response, payload):
        raise MemoryError("too much")

    with pytest.raises(MemoryError):
        grade(texts("a"), (hungry, 1.0))


def test_sums_outside_a_range_that_was_set_are_no_rewards():
    grader = Grader([CalledFunction.of(lambda response, payload: float(response))])
    grader.limits = (-1.0, 1.0)
    inside, outside = grader.grade(texts("-0.5", "7"))
    assert inside.score == -0.5
    assert outside.score is None and "7 is outside of reward.range = [-1, 1]" in outside.why


def test_an_answer_that_hangs_the_reward_is_never_worth_more_than_a_wrong_one(tmp_path):
    """Without a range it was worth 0, and a wrong one -1."""

    def stalls(response, payload):
        if "stall" in response:
            time.sleep(60)
        return 1.0 if response == payload["answer"] else -1.0

    section, _ = reward_settings(stalls, tmp_path)
    with GradePool(Reward(**section, workers=1, timeout_s=1.0, answer_format="{answer}")) as pool:
        right, wrong, hung = pool.grade(["2", "3", "stall"], [{"answer": "2"}] * 3)
    assert (right.score, wrong.score, hung.score) == (1.0, -1.0, -1.0)
    assert hung.outcome is Outcome.SCORE and hung.by_response and not hung.correct


def test_functions_of_verls_form_are_called_as_verl_calls_them():
    """verl 0.9.1, experimental/reward_loop/reward_manager/naive.py: four keyword arguments, and a number or a mapping
    with the key `score`."""
    seen = []

    def compute_score(data_source, solution_str, ground_truth, extra_info=None, sandbox_fusion_url=None, **kwargs):
        seen.append((data_source, solution_str, ground_truth, extra_info, sandbox_fusion_url, kwargs))
        return {"score": float(solution_str == ground_truth), "acc": solution_str == ground_truth, "pred": solution_str}

    async def waiting(data_source, solution_str, ground_truth, extra_info):
        return float(len(solution_str))

    row = {"data_source": "openai/gsm8k", "extra_info": {"index": 3}, "answer": "72"}
    found = grade(texts("72", "7", **row), (compute_score, 1.0))
    assert [(r.score, r.metrics) for r in found] == [(1.0, {"acc": 1.0}), (0.0, {"acc": 0.0})]
    assert seen[0] == ("openai/gsm8k", "72", "72", {"index": 3}, None, {})
    assert [r.score for r in grade(texts("72", **row), (waiting, 1.0), (compute_score, 2.0))] == [4.0]
    with pytest.raises(ValueError, match=r"compute has the parameter 'tokenizer', which verl does not pass"):

        def compute(solution_str, ground_truth, tokenizer): ...

        CalledFunction.of(compute)


# {file of the library: (its function, arguments, [(response, payload, reward)])}
RELEASED = {
    "verl/utils/reward_score/gsm8k.py": (
        "compute_score", {}, [("so #### 72", {"answer": "72"}, 1.0), ("so #### 7", {"answer": "72"}, 0.0)]
    ),
    "verl/utils/reward_score/math_dapo.py": (
        "compute_score", {}, [("Answer: 4", {"answer": "4"}, 1.0), ("Answer: 5", {"answer": "4"}, -1.0)]
    ),
    "trl/rewards/format_rewards.py": (
        "think_format_reward", {}, [("<think>a</think>b", {"messages": [{}]}, 1.0), ("b", {"messages": [{}]}, 0.0)]
    ),
}  # fmt: skip


@pytest.mark.parametrize("file", RELEASED)
def test_rewards_of_verl_and_trl_are_taken_as_they_are(file, tmp_path, monkeypatch):
    """The config names them as any other reward, and worker processes call them."""
    files = [*ROOT.glob(f".venv-oracles/lib/python3*/site-packages/{file}")]
    if not files:
        pytest.skip(f"no {file} of the released libraries: `make oracles` installs them")
    name, args, rows = RELEASED[file]
    module = f"released_{Path(file).stem}"
    (tmp_path / f"{module}.py").write_bytes(files[0].read_bytes())
    monkeypatch.syspath_prepend(tmp_path)
    use = Use(target=f"{module}:{name}", args=args)
    build(use)
    with GradePool(Reward(target=use.target, args=args, workers=1, range=(-1.0, 1.0))) as pool:
        found = pool.grade([text for text, _, _ in rows], [payload for _, payload, _ in rows])
    assert [graded.score for graded in found] == [reward for _, _, reward in rows]
