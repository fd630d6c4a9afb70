"""Problems of reasoning-gym: rows against the library's own data sets, splits, resume, refusals, and its scores."""

import dataclasses
import importlib.util
import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import specs as checks

from megatron_rl.config import plugins
from megatron_rl.config.base import ConfigError
from megatron_rl.config.data_settings import generated_name, generated_names, resolve
from megatron_rl.config.files import load
from megatron_rl.config.schema import Generated, PromptSet, Reward, TrainConfig
from megatron_rl.data.problems import PromptReader, fields_of, read_problems
from megatron_rl.data.rows import DataError
from megatron_rl.rewards.grading_pool import GradePool
from megatron_rl.spec.missing_files import absent_files
from megatron_rl.types import Outcome

ROOT = Path(__file__).parents[3]
SCORE = "megatron_rl.rewards.reasoning_gym:score"
BASE = (
    "roles: {generator: {model: {path: org/model}}}\n"
    "recipe: {target: 'megatron_rl.recipes.grpo:Grpo', args: {updates: 3}}\n"
)
NAMES = ["chain_sum", "spell_backward", "number_sorting", "countdown", "propositional_logic", "rearc", "gsm_symbolic"]


@pytest.fixture(scope="module")
def library():
    return pytest.importorskip("reasoning_gym")


def with_reasoning_gym(monkeypatch):
    """Has the checks find the package reasoning-gym, installed or not."""
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name == "reasoning_gym" else found(name))


def source(name, split="train", size=20, seed=3, args=None, **settings):
    generated = Generated(size=size, seed=seed, args=args or {})
    return PromptSet(path=f"reasoning_gym:{name}", generated=generated, split=split, **settings)


def questions(*args, **settings):
    return [problem.values["question"] for problem in read_problems(source(*args, **settings))]


def test_all_problems_are_those_of_the_library(library):
    args = {"min_terms": 3, "max_terms": 4, "allow_negation": True}
    own = library.create_dataset("chain_sum", size=20, seed=3, **args)
    problems = read_problems(source("chain_sum", "all", args=args))
    assert [(p.values["question"], p.values["answer"]) for p in problems] == [
        (item["question"], item["answer"]) for item in own
    ]
    assert [p.values["entry"]["index"] for p in problems] == list(range(20))


def test_train_and_test_have_no_question_in_common(library):
    """Neither with one seed nor with several; the library's own data sets with neighbouring seeds do."""
    small = {"min_terms": 2, "max_terms": 2, "max_digits": 1}
    train, test = (
        {q for seed in (0, 1, 2) for q in questions("chain_sum", split, size, seed, small)}
        for split, size in (("train", 200), ("test", 50))
    )
    assert not train & test and len(train) > 100 and len(test) > 20
    assert questions("chain_sum", "all", 50, 0)[1:] == questions("chain_sum", "all", 50, 1)[:-1]


def test_the_splits_are_the_draws_of_one_data_set(library):
    train, test, every = (questions("spell_backward", split, 40) for split in ("train", "test", "all"))
    assert [q for q in every if q in set(train)] == train[: sum(q in set(train) for q in every)]
    assert set(every) <= set(train) | set(test)


def test_rows_are_a_function_of_the_config(library):
    first, again = (read_problems(source("number_sorting")) for _ in range(2))
    assert first == again and questions("number_sorting", seed=4) != [p.values["question"] for p in first]
    assert all(json.loads(json.dumps(p.values)) == p.values for p in first)
    assert [p.values for p in read_problems(source("number_sorting", limit=7))] == [p.values for p in first[:7]]


def test_rows_are_the_same_in_another_process(library):
    """Resumed runs read the problems anew: no draw may depend on how Python hashes texts."""
    code = (
        "import hashlib, reasoning_gym\n"
        f"for name in {NAMES}:\n    for item in reasoning_gym.create_dataset(name, size=3, seed=3):\n"
        "        print(hashlib.sha256(item['question'].encode()).hexdigest()[:16])"
    )
    env = {"PYTHONHASHSEED": "12345", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    own = [p.values["entry"]["digest"] for name in NAMES for p in read_problems(source(name, "all", size=3))]
    assert done.stdout.split() == own


def test_a_reader_resumes_at_its_place(library):
    def reader(seed=3):
        problems = read_problems(source("chain_sum", seed=seed))
        return PromptReader(problems, lambda values: [1], seed=1, shuffle=True, max_prompt_tokens=9)

    whole, first, second = reader(), reader(), reader()
    first.take(13)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert [p.id for p in second.take(30)] == [p.id for p in whole.take(43)][13:]
    assert reader(seed=4).told["sha256"] != first.told["sha256"] == reader().told["sha256"]


def test_problems_whose_answer_the_library_does_not_know_have_none(library):
    [problem] = read_problems(source("propositional_logic", size=1))
    assert set(problem.values) == {"question", "entry"}
    assert "answer" not in fields_of(source("propositional_logic", size=1))
    assert fields_of(source("chain_sum", size=1))["answer"] == "answer"


MIX = {
    "datasets": [
        {"name": "chain_sum", "weight": 3, "config": {"min_terms": 2, "max_terms": 2}},
        {"name": "spell_backward"},
    ]
}


def test_several_data_sets_are_mixed_by_weight(library):
    from reasoning_gym.composite import DatasetSpec

    specs = [DatasetSpec(**{"weight": 1.0, "config": {}, **part}) for part in MIX["datasets"]]
    own = library.create_dataset("composite", size=200, seed=3, datasets=specs)
    problems = read_problems(source("composite", "all", 200, args=MIX))
    assert [p.values["question"] for p in problems] == [item["question"] for item in own]
    sums = sum("arithmetic" in p.values["question"] for p in problems)
    assert 0.65 < sums / 200 < 0.85
    assert plugins.find_function(SCORE)(f"<answer>{problems[0].values['answer']}</answer>", problems[0].values) == 1.0
    mixed = {"datasets": [*MIX["datasets"], {"name": "propositional_logic"}]}
    assert all("answer" not in p.values for p in read_problems(source("composite", size=9, args=mixed)))


@pytest.mark.parametrize("name", NAMES)
def test_scores_are_the_librarys_own(library, name):
    score, rng = plugins.find_function(SCORE), random.Random(0)
    own = library.create_dataset(name, size=4, seed=3)
    problems = read_problems(source(name, "all", size=4))
    for i in rng.sample(range(4), 4):  # in any order
        item, payload = own[i], json.loads(json.dumps(problems[i].values))
        texts = ["", "7", "A", str(item["answer"]), str(own[(i + 1) % 4]["answer"])]
        for text in texts:
            known = own.score_answer(answer=text, entry=own[i])
            assert score(f"I think. <answer>{text}</answer>", payload) == known, (text, item)
        if item["answer"] is not None:
            assert score(f"<answer>{item['answer']}</answer>", payload) == 1.0
        assert score("no answer at all", payload) == own.score_answer(answer=None, entry=own[i])


def test_the_answer_is_found_in_tags_or_a_box(library):
    from megatron_rl.rewards.reasoning_gym import stated

    assert stated("<answer>1</answer> or <answer>\n 2 </answer>") == "2"
    assert stated("\\boxed{3} <answer>4</answer>") == "4"
    assert stated("so \\boxed{\\frac{1}{2}}") == "\\frac{1}{2}"
    assert stated("<answer>\\boxed{5}</answer>") == "5"
    assert stated("<answer>\\boxed{5} or \\boxed{6}</answer>") == "\\boxed{5} or \\boxed{6}"
    assert stated("nothing") is None


def test_an_answer_that_the_scorer_cannot_read_counts_as_none(library):
    [problem] = read_problems(source("prime_factorization", "all", size=1))
    own = library.create_dataset("prime_factorization", size=1, seed=3)
    with pytest.raises(ValueError):
        own.score_answer(answer="seven", entry=own[0])
    score = plugins.find_function(SCORE)
    assert score("<answer>seven</answer>", problem.values) == own.score_answer(answer=None, entry=own[0]) == 0.0
    assert score(f"<answer>{problem.values['answer']}</answer>", problem.values) == 1.0


@pytest.mark.parametrize(
    "text, runs",
    [
        ("__import__('os').system('touch /tmp/x')", True),
        ("(3+4).__class__", True),
        ("open('x')", True),
        ("[].append(1)", True),
        ("(print)('x')", True),
        ("ｅｖａｌ('1')", True),
        ("sympify('1')", True),
        ("(8 - 4) * (7 - 1)", False),
        ("sin(x) + sqrt(2)*log(x) + C", False),
        ("[['0', '1'], ['1', '0']]", False),
        ("_ Q _ _\nQ _ _ _", False),
        ("3.5*x**2 + 1.", False),
        ("3*Integral(x**3*cos(3*x), x) + C", False),
    ],
)
def test_an_answer_that_could_run_code_is_told(library, text, runs):
    from megatron_rl.rewards import reasoning_gym

    assert bool(reasoning_gym._CODE.search(text)) == runs


def test_an_answer_that_runs_code_is_not_evaluated(library, tmp_path):
    """countdown's scorer evaluates an answer by sympy's parse_expr, n_queens's by eval."""
    for name in ("countdown", "n_queens"):
        [problem] = read_problems(source(name, "all", size=1))
        place = tmp_path / name
        text = f"<answer>open('{place}', 'w')</answer>"
        assert plugins.find_function(SCORE)(text, problem.values) <= 0.05 and not place.exists()


def test_the_data_sets_whose_scorer_evaluates_are_all_known(library):
    from reasoning_gym.factory import DATASETS

    from megatron_rl.rewards.reasoning_gym import EVALUATED

    found = set()
    for name, (kind, _) in DATASETS.items():
        text = Path(sys.modules[kind.__module__].__file__).read_text()
        scorer = text.partition("def score_answer")[2].partition("\n    def ")[0].partition("\nclass ")[0]
        if re.search(r"\b(eval|exec|parse_expr|sympify)\((?!entry|metadata)", scorer):
            found.add(name)
    assert found - {"propositional_logic"} == EVALUATED


def test_scores_in_worker_processes_pass_the_gate(library):
    problems = read_problems(source("chain_sum", size=3))
    payloads = [problem.values for problem in problems]
    with GradePool(Reward(target=SCORE, timeout_s=60.0, workers=1)) as pool:
        right = pool.grade([f"<answer>\\boxed{{{p['answer']}}}</answer>" for p in payloads], payloads)
        wrong = pool.grade(["<answer>\\boxed{-123456.789}</answer>"] * 3, payloads)
        other = {**payloads[0], "entry": {**payloads[0]["entry"], "digest": "0"}}
        [changed] = pool.grade(["<answer>1</answer>"], [other])
    assert [g.score for g in right] == [1.0] * 3 and [g.score for g in wrong] == [0.0] * 3
    assert changed.outcome is Outcome.ERROR and "install the version" in changed.detail


@pytest.mark.parametrize(
    "name, args, says",
    [
        ("chain_sun", {}, "reasoning_gym:chain_sun is no data set of reasoning-gym; did you mean 'chain_sum'"),
        ("chain_sum", {"min_term": 2}, "has no setting 'min_term'; did you mean 'min_terms'"),
        ("chain_sum", {"min_terms": 0}, "min_terms must be positive"),
        ("chain_sum", {"min_terms": "two"}, "TypeError"),
        ("chain_sum", {"seed": 2}, "set data.generated.seed instead"),
        ("composite", {}, "give a list of {name, weight, config}"),
        ("composite", {"datasets": [{"nam": "gcd"}]}, "each has a name"),
        ("composite", {"datasets": [{"name": "gdc"}]}, "did you mean 'gcd'"),
        ("composite", {"datasets": [{"name": "gcd", "config": {"colour": 1}}]}, "has no setting 'colour'"),
        ("composite", {"datasets": [{"name": "gcd", "weight": -1}]}, "refuses data.generated"),
    ],
)
def test_a_data_set_that_cannot_be_made_is_refused(library, name, args, says):
    with pytest.raises(ConfigError) as caught:
        read_problems(source(name, args=args))
    assert says in str(caught.value)


@pytest.mark.skipif(not sys.flags.hash_randomization, reason="texts are hashed alike in every process")
def test_a_data_set_that_depends_on_hashes_is_refused(library):
    with pytest.raises(ConfigError, match="PYTHONHASHSEED=0"):
        read_problems(source("ransom_note"))


def test_a_data_set_without_a_seed_is_refused(library):
    with pytest.raises(ConfigError, match="whatever its seed"):
        read_problems(source("composite", args={"datasets": [{"name": "knight_swap"}]}))


def test_a_data_set_with_too_few_questions_is_refused(library, monkeypatch):
    from megatron_rl.data import generated

    monkeypatch.setattr(generated, "digest", lambda question: "1")  # of the split `train`
    with pytest.raises(DataError, match="only 0 of 300 problems .* fewer than data.generated.size = 20: its questions"):
        read_problems(source("chain_sum", "test"))


def config(tmp_path, text):
    (tmp_path / "c.yaml").write_text(BASE + text)
    return load(TrainConfig, [tmp_path / "c.yaml"])


def refused(tmp_path, text, monkeypatch):
    with_reasoning_gym(monkeypatch)
    with pytest.raises(ConfigError) as caught:
        checks.check(config(tmp_path, text), 1)
    return str(caught.value)


@pytest.mark.parametrize(
    "text, says",
    [
        ("data: {path: 'reasoning_gym:gcd', split: eval}", "data.split = 'eval'"),
        ("data: {path: 'reasoning_gym:gcd', settings: gsm8k}", "data.settings = 'gsm8k'"),
        ("data: {path: p.jsonl, generated: {size: 3}}", "data.generated is set, but data.path = 'p.jsonl'"),
        (
            "data: {path: 'reasoning_gym:gcd'}\n"
            "evaluation: {sets: [{path: 'reasoning_gym:gcd', split: train, generated: {seed: 9}}]}",
            "evaluation.sets.reasoning_gym_gcd may have questions of data: both are of gcd; set data.split to train",
        ),
        (
            "data: {path: 'reasoning_gym:composite', generated: {args: {datasets: [{name: gcd}, {name: lcm}]}}}\n"
            "evaluation: {sets: [{path: 'reasoning_gym:lcm', split: all}]}",
            "both are of lcm",
        ),
    ],
)
def test_settings_that_cannot_be_are_refused_without_the_library(tmp_path, text, says, monkeypatch):
    assert says in refused(tmp_path, text, monkeypatch)


def test_the_two_splits_stand_beside_each_other(tmp_path, monkeypatch):
    with_reasoning_gym(monkeypatch)
    text = "data: {path: 'reasoning_gym:gcd'}\nevaluation: {sets: [{path: 'reasoning_gym:gcd'}]}"
    made = config(tmp_path, text)
    checks.check(made, 1)
    assert not [absent for absent in absent_files(checks.spec_of(made)) if "reasoning_gym" in absent.path]
    assert resolve(made.data).fields == {"question": "question", "entry": "entry"}
    with pytest.raises(ConfigError, match="seed"):
        config(tmp_path, "data: {path: 'reasoning_gym:gcd', generated: {seed: 2147483648}}")


def test_names_of_generated_problems():
    assert generated_name("reasoning_gym:gcd") == "gcd" and generated_name("data/reasoning_gym.jsonl") is None
    assert generated_names(PromptSet(path="reasoning_gym:gcd")) == {"gcd"}
    assert generated_names(dataclasses.replace(source("composite", args=MIX))) == {"chain_sum", "spell_backward"}
    assert generated_names(PromptSet(path="p.jsonl")) == set()


def test_without_the_library_the_cure_is_named(tmp_path, monkeypatch):
    for name in ("reasoning_gym", "reasoning_gym.composite"):
        monkeypatch.setitem(sys.modules, name, None)
    for name in ("megatron_rl.rewards.reasoning_gym", "megatron_rl.data.generated"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for call in (lambda: plugins.find(SCORE), lambda: read_problems(source("gcd"))):
        with pytest.raises(ConfigError, match="pip install reasoning-gym"):
            call()
    with pytest.raises(ConfigError, match="pip install reasoning-gym"):
        checks.check(config(tmp_path, "data: {path: 'reasoning_gym:gcd'}"), 1)


PAGE = (ROOT / "docs/how_to/task_sets.md").read_text()
SNIPPETS = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("number", [i for i, text in enumerate(SNIPPETS) if text.startswith("data:")])
def test_every_snippet_of_data_can_be_read(tmp_path, number, monkeypatch):
    with_reasoning_gym(monkeypatch)
    checks.check(config(tmp_path, SNIPPETS[number]), 1)
