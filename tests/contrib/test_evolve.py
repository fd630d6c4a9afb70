"""Multi-Agent Evolve: its rewards against the released formulas, by hand-made proposals, answers and judgements."""

from __future__ import annotations

import json
import random
import re
from fractions import Fraction

import pytest
import specs as checks
from fake_engines import ScriptedEngine
from stages import credited
from toys import EOS, characters, graded

from megatron_rl.config.files import load
from megatron_rl.config.plugins import build
from megatron_rl.config.schema import ConfigError, TrainConfig, Use
from megatron_rl.contrib.evolve import JUDGE, PROPOSER, SOLVER, Evolve
from megatron_rl.engines.protocol import Sampling
from megatron_rl.rewards.role_tags import judged_score, last_inside, proposal_form, tag_form
from megatron_rl.training.iteration import Iteration, RolloutContext
from megatron_rl.types import Prompt

TOKENIZER = characters()
ROLES = (PROPOSER, SOLVER, JUDGE)
# Where the released prompts (initial_prompt_templates/default.json) mention tags. Its counts include the prompt's.
RELEASED_PROPOSER = "<question>\n[Your generated question here]\n</question> ... INSIDE THE <question></question> TAGS!"
RELEASED_JUDGE = "a score from 1 to 10 between <score> and </score> consistent ...\n<score>X</score> (an integer)"
NUMBERS = r"\b\d+/\d+\b|\b\d+\.\d+\b|\b\d+\b"


def ids(text):
    return TOKENIZER(text)["input_ids"]


def released_form(text, kind):
    """calc_format_reward of absolute_zero_reasoner/rewards/reward_managers.py (d71c00b), line by line."""
    tag, correct = {"judge": ("score", 3), "pred": ("answer", 1), "gen": ("question", 3)}[kind]
    opened, closed = text.count(f"<{tag}>"), text.count(f"</{tag}>")
    if kind != "gen":
        if opened == correct and closed == correct:
            return 1.0
        return 0.5 if opened == closed and opened > correct else 0.0
    scores = [0.0]
    if opened == closed:
        scores = [1.0 if correct <= opened <= correct + 2 else 0.5 if opened > correct + 2 else 0.0]
    answers, answers_closed = text.count("<answer>"), text.count("</answer>")
    if answers != answers_closed:
        scores.append(0.0)
    elif answers:
        scores.append(1.0 if answers + 1 == opened else 0.0)
    types, types_closed = text.count("<type>"), text.count("</type>")
    if types != types_closed:
        scores.append(0.0)
    elif types:
        scores.append(1.0 if types == 1 else 0.5)
    return sum(scores) / len(scores)


def released_score(text):
    """extract_score_from_tags and the scale of _get_all_scores, as released. None where nothing is found."""

    def value(number):
        if "/" not in number:
            return float(number)
        above, below = map(int, number.split("/"))
        return float(Fraction(above, below)) if below else None

    found = []
    for inside in re.findall(r"<score>(.*?)</score>", text, re.IGNORECASE | re.DOTALL):
        match = re.search(r"\b\d+/\d+\b", inside) or re.search(r"\b\d+\.\d+\b", inside) or re.search(r"\b\d+\b", inside)
        if match and value(match[0]) is not None:
            found.append(value(match[0]))
    if not found:
        found = [v for number in re.findall(NUMBERS, text)[-1:] if (v := value(number)) is not None]
    return min(1.0, max(0.0, (found[0] - 1) / 9.0)) if found else None


def test_forms_and_scores_are_those_of_the_released_code():
    rng = random.Random(0)
    pieces = [f"<{slash}{tag}>" for tag in ("question", "answer", "score", "type") for slash in ("", "/")]
    pieces += ["7", "10", "3.5", "8/10", "4/0", "12", "1", " x "]
    pairs = [
        "<question>q</question>",
        "<answer>a</answer>",
        "<score>8</score>",
        "<score>none</score>",
        "<type>t</type>",
    ]
    seen = set()
    for _ in range(3000):
        text = " ".join(rng.choices(pieces if rng.random() < 0.3 else pairs, k=rng.randint(0, 6)))
        judge, solver = released_form(RELEASED_JUDGE + text, "judge"), released_form(text, "pred")
        proposer = released_form(RELEASED_PROPOSER + text, "gen")
        assert tag_form(text, "score") == judge and tag_form(text, "answer") == solver, text
        assert proposal_form(text) == pytest.approx(proposer, abs=1e-12), text
        assert judged_score(text) == pytest.approx(released_score(text)), text
        seen |= {("judge", judge), ("solver", solver), ("proposer", round(proposer, 3)), ("score", judged_score(text))}
    assert {("judge", f) for f in (0.0, 0.5, 1.0)} | {("proposer", 0.75), ("score", None)} <= seen


def test_a_score_is_read_where_it_can_be():
    assert judged_score("<score> 10 </score>") == 1.0 and judged_score("<score>1</score>") == 0.0
    assert judged_score("<score>a</score> <score>8 of 10</score>") == pytest.approx(7 / 9)
    assert judged_score("I give it a 4") == pytest.approx(3 / 9) and judged_score("no idea") is None
    assert judged_score(f"<score>{'9' * 5000}</score>") == 1.0, "a number of any length is read"
    assert last_inside("<question> a </question> <question>b\n</question>", "question") == "b"
    assert last_inside("<question>a", "question") is None and last_inside("<question> </question>", "question") is None


# Two votes on each question, two answers to each accepted one, two votes on each answer.
PROPOSALS = ["<question>one</question>", "nothing", "<question>bad</question>", "<question>dim</question>",
             "<question>two</question> <answer>2</answer>"]  # fmt: skip
VOTES = {
    "Q one": ["<score>10</score>", "<score>8</score>"],
    "Q bad": ["<score>5</score>", "<score>7</score>"],
    "Q dim": ["hm", "well"],
    "Q two": ["<score>10</score>", "<score>x</score>"],
    "A one | <answer>1</answer>": ["<score>10</score>", "hm"],
    "A one | 1": ["<score>1</score>", "<score>4</score> <score>9</score>"],
    "A two | <answer>2</answer>": ["hm", "hm"],
    "A two | 2": ["<score>10</score>", "<score>10</score>"],
}
ANSWERS = {"S one": ["<answer>1</answer>", "1"], "S two": ["<answer>2</answer>", "2"]}


@pytest.fixture
def texts(tmp_path):
    own = {"proposer": "P", "reference": "R {references}", "solver": "S {question}", "question": "Q {question}",
           "answer": "A {question} | {answer}"}  # fmt: skip
    for name, text in own.items():
        (tmp_path / name).write_text(text)
    return {f"{name}_template": str(tmp_path / name) for name in own}


def says(script):
    return ScriptedEngine(lambda p, i, j, sampling: [*ids(script(TOKENIZER.decode(p), i, j)), EOS], eos=EOS)


def context_of(proposer=None, solver=None, judge=None, *, limit=10_000, **settings):
    scripts = {
        PROPOSER: proposer or (lambda prompt, i, j: PROPOSALS[i]),
        SOLVER: solver or (lambda prompt, i, j: ANSWERS.get(prompt, ["?"])[j]),
        JUDGE: judge or (lambda prompt, i, j: VOTES.get(prompt, ["<score>1</score>"])[j]),
    }
    return RolloutContext(
        engines={role: says(script) for role, script in scripts.items()},
        tokenizers=dict.fromkeys(ROLES, TOKENIZER),
        samplings=dict.fromkeys(ROLES, Sampling(max_tokens=4000)),
        max_prompt_tokens=dict.fromkeys(ROLES, limit),
        grade=graded(lambda response, payload: response == payload["answer"]),
        **settings,
    )


class Seeds:
    def __init__(self, count, start=0):
        self.prompts = [
            Prompt(id=f"s{i}", tokens=[1], payload={"question": f"seed{i}", "answer": str(i)})
            for i in range(start, start + count)
        ]

    def take(self, count=None):
        return self.prompts


def roll_out(recipe, context, count=5, number=0, start=0):
    rollouts = credited(recipe, Iteration(cycle=0, index=0, roles=ROLES, number=number), Seeds(count, start), context)
    assert list(rollouts) == list(ROLES)
    assert all(r.role == r.group == role for role, own in rollouts.items() for r in own)
    return rollouts


def rewards(rollouts, *names):
    return [tuple(r.rewards[name] for name in names) for r in rollouts]


def whitened(rollouts, reward):
    """REINFORCE++ over one role's batch by plain loops: every token has its rollout's reward as return."""
    values = [r.rewards[reward] for r in rollouts for _ in range(r.num_trainable)]
    mean = sum(values) / len(values)
    std = (sum((v - mean) ** 2 for v in values) / (len(values) - 1)) ** 0.5
    return [(r.rewards[reward] - mean) / (std + 1e-6) for r in rollouts]


def test_the_rewards_of_the_three_roles_by_hand(texts):
    recipe = Evolve(updates=1, answers=2, judgements=2, practice="proposed", **texts)
    context = context_of()
    found = roll_out(recipe, context)
    q, d = 8 / 9, 1 - (1 + 0 + 3 / 9) / 3  # of the first question: the mean over all readable votes on its answers
    assert rewards(found[PROPOSER], "quality", "difficulty", "form", "total") == [
        pytest.approx(row)
        for row in (
            (q, d, 1, (q + d + 1) / 3),
            (0, 0, 0, 0),  # no question
            (5 / 9, 0, 1, (5 / 9 + 1) / 3),  # not good enough: its difficulty is 0, and it is not answered
            (1, 0, 0.5, 1.5 / 3),  # solved: no difficulty; an answer in a proposal costs form
        )
    ]  # the fourth question, which nobody could mark, is not compared with the others
    assert rewards(found[SOLVER], "score", "form", "total") == [
        pytest.approx(row) for row in ((1, 1, 1), (1 / 6, 0, 1 / 12), (1, 0, 0.5))
    ]  # the first answer to the second question has no score: it leaves
    assert rewards(found[JUDGE], "form") == [(f,) for f in (1, 0, 1, 0.5, 0, 0, 1, 1)]
    for role, reward in zip(ROLES, ("total", "total", "form"), strict=True):
        assert [r.advantages for r in found[role]] == pytest.approx(whitened(found[role], reward), abs=1e-9)
    assert context.metrics[PROPOSER] == {"questions": 4, "accepted": 2, "unjudged": 1, "pool": 7}
    assert context.metrics[SOLVER] == {"unjudged": 1}
    assert {TOKENIZER.decode(p) for p, _ in context.engines[SOLVER].asked} == {"S one", "S two"}


def test_the_solver_and_the_judge_practise_on_the_pool_as_released(texts):
    recipe = Evolve(updates=1, answers=2, judgements=2, **texts)
    context = context_of()
    found = roll_out(recipe, context)
    assert [(n.samples, dict(n.drawn)) for n in recipe.roles().values()] == [
        (1, {PROPOSER: 1, SOLVER: 3, JUDGE: 7})
    ] * 3
    practised = {TOKENIZER.decode(r.tokens[: r.start]) for r in found[SOLVER]}
    assert practised == {f"S seed{i}" for i in range(5)}, "the pool as it was before this iteration's questions"
    assert {TOKENIZER.decode(r.tokens[: r.start]) for r in found[JUDGE]} == {f"A seed{i} | ?" for i in range(5)}
    assert rewards(found[SOLVER], "total") == [(0.0,)] * 5 and rewards(found[JUDGE], "form") == [(1.0,)] * 5
    logprobs = {TOKENIZER.decode(p): s.logprobs for p, s in context.engines[SOLVER].asked}
    assert not logprobs["S one"] and logprobs["S seed0"], "log-probs of what is trained on alone"
    seeds = {s.seed for role in ROLES for _, s in context.engines[role].asked}
    assert len(seeds) == 6, "every purpose of every role has draws of its own"


def test_the_pool_is_bounded_has_no_question_twice_and_forgets_the_oldest(texts):
    recipe = Evolve(updates=1, answers=2, judgements=2, pool_size=4, **texts)
    roll_out(recipe, context_of())
    assert recipe.state_dict() == {"pool": ["seed3", "seed4", "one", "two"]}
    roll_out(recipe, context_of(), start=4, count=1)
    assert recipe.state_dict() == {"pool": ["seed3", "seed4", "one", "two"]}


def test_a_resumed_recipe_asks_what_the_undisturbed_one_asks(texts):
    def asked(recipe, number):
        context = context_of(seed=3)
        roll_out(recipe, context, number=number, start=number)
        return [(TOKENIZER.decode(p), s.seed) for role in ROLES for p, s in context.engines[role].asked]

    def fresh():
        return Evolve(updates=9, answers=2, judgements=2, **texts)

    whole = fresh()
    asked(whole, 0)
    again = fresh()
    again.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    iterations = [asked(whole, 1), asked(again, 1)]
    assert iterations[0] == iterations[1] and whole.state_dict() == again.state_dict()
    assert asked(fresh(), 1) != iterations[0], "what is asked hangs on the pool"


@pytest.mark.parametrize("share, low, high", [(0.0, 0, 0), (0.5, 60, 140), (1.0, 200, 200)])
def test_a_share_of_the_proposals_sees_references_of_the_pool(texts, share, low, high):
    recipe = Evolve(updates=1, answers=1, judgements=1, reference_share=share, references=2, **texts)
    context = context_of(proposer=lambda *_: "nothing")
    roll_out(recipe, context, count=200)
    prompts = [TOKENIZER.decode(p) for p, _ in context.engines[PROPOSER].asked]
    with_references = [p for p in prompts if p.startswith("R ")]
    assert low <= len(with_references) <= high and prompts.count("P") == 200 - len(with_references)
    assert all(len(set(p[2:].split("\n\n"))) == 2 and "seed" in p for p in with_references)
    assert recipe.prompt({"question": "why?"}) == "R why?"


def test_what_is_too_long_is_left_out_and_never_cut(texts):
    long = f"<question>{'x' * 30}</question>"
    recipe = Evolve(updates=1, answers=1, judgements=1, reference_share=1.0, references=3, **texts)
    context = context_of(proposer=lambda *_: long, judge=lambda *_: "<score>10</score>", limit=14)
    found = roll_out(recipe, context, count=3)
    assert {TOKENIZER.decode(p) for p, _ in context.engines[PROPOSER].asked} == {"P"}, "three references do not fit"
    assert found[PROPOSER] == [] and context.metrics[PROPOSER]["unjudged"] == 3
    assert max(len(p) for role in ROLES for p, _ in context.engines[role].asked) <= 14
    with pytest.raises(ConfigError, match="max_prompt_tokens = 0"):
        roll_out(recipe, context_of(limit=0))


def test_nothing_to_judge_is_no_error(texts):
    recipe = Evolve(updates=1, answers=2, judgements=2, practice="proposed", **texts)
    found = roll_out(recipe, context_of(proposer=lambda *_: "nothing"))
    assert rewards(found[PROPOSER], "total") == [(0.0,)] * 5 and found[SOLVER] == found[JUDGE] == []
    assert {r.advantages for r in found[PROPOSER]} == {0.0}


def test_evaluation_measures_the_solver_on_held_out_problems(texts):
    recipe = Evolve(updates=1, **texts)
    context = context_of(solver=lambda prompt, i, j: prompt.removeprefix("S seed").replace("3", "4"))
    metrics = recipe.evaluate(Seeds(4).prompts, context)
    kinds = {f"solver/{name}{kind}": 0.75 for name in ("accuracy", "reward") for kind in ("", "_greedy")}
    written = {"solver/finished": 1.0, "solver/tokens": metrics["solver/tokens"]}
    assert metrics == {**kinds, **written, "solver/num_problems": 4.0}


@pytest.mark.parametrize(
    "args, message",
    [
        ({"answers": 0}, "answers = 0: give a value greater than or equal to 1"),
        ({"reference_share": 1.5}, "reference_share = 1.5: give a value less"),
        ({"pool_size": 0}, "pool_size = 0"),
        ({"practice": "all"}, 'practice = "all"'),
        ({"solver_template": "none_such"}, "solver_template: no prompt template 'none_such'"),
        ({"estimator": "best"}, "estimator 'best'"),
    ],
)
def test_wrong_arguments_are_refused_with_their_name(args, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        build(Use(target="megatron_rl.contrib.evolve:Evolve", args={"updates": 1, **args}))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"max_prompt_tokens": 9}, "roles.proposer.max_prompt_tokens = 9: recipe.args.proposer_template has 10 tokens"),
        ({"max_prompt_tokens": 10}, None),
        ({"max_prompt_tokens": 9, "model": {"path": "org/on_the_hub"}}, None),  # nothing is fetched for a check
        ({"max_prompt_tokens": 10, "chat": True}, "recipe.args.proposer_template has 12 tokens"),
    ],
)
def test_a_proposer_that_could_never_be_asked_is_refused_before_anything_starts(tmp_path, changes, says):
    tokenizer = characters()
    tokenizer.chat_template = "<{% for m in messages %}{{ m.content }}{% endfor %}>"
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "proposer.txt").write_text("Ask, now: ")
    (tmp_path / "run.yaml").write_text(
        f"roles: {{proposer: {{model: {{path: {tmp_path}/model}}}}, solver: {{same_as: proposer}}, "
        "judge: {same_as: proposer}}\ndata: {path: p.jsonl}\nrecipe: {target: megatron_rl.contrib.evolve:Evolve, "
        f"args: {{updates: 1, proposer_template: {tmp_path}/proposer.txt}}}}\n"
    )
    config = load(TrainConfig, [tmp_path / "run.yaml"], [f"roles.proposer={json.dumps(changes)}"])
    if says is None:
        checks.check_recipe(config, build(config.recipe))
        return
    with pytest.raises(ConfigError, match=re.escape(says)):
        checks.check_recipe(config, build(config.recipe))
