"""Tango over episodes: turns become steps, verdicts their credit; cuts, failures, class weights, evaluation, resume."""

from __future__ import annotations

import json
import math
import random
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from chats import CHATML, THINKING, chat_tokenizer
from fake_engines import ScriptedEngine
from stages import credited
from test_recipes import Problems, iteration, verification
from toys import EOS, characters, graded

from examples.miniatures.tango_agent import judge as mini_judge
from megatron_rl.algorithms.advantages import TRAINED
from megatron_rl.batches.units import joined, rejoined, with_credit
from megatron_rl.config.plugins import build
from megatron_rl.config.schema import ConfigError, Use
from megatron_rl.engines.protocol import Sampling
from megatron_rl.environments.environment import Environment, EpisodeMaker
from megatron_rl.environments.episode_runner import MOST_ANSWERS
from megatron_rl.environments.episode_types import EnvironmentFailure, EpisodeEnd, NextRequest, Said
from megatron_rl.recipes.tango_agents import TangoAgents
from megatron_rl.recipes.transcripts import TranscriptForm, annotate_turns, parted
from megatron_rl.rewards.grading_pool import RewardFailure
from megatron_rl.rewards.verdicts import review
from megatron_rl.texts.text import fill, read_template
from megatron_rl.training.iteration import RolloutContext
from megatron_rl.types import STEP, Annotations, Author, Outcome, Prompt, Rollout

TEXT = characters()
RULE = graded(lambda response, payload: Outcome.ERROR if response == "lost" else response == payload["answer"])
# What the generator writes, episode by episode, and the verdicts on that: one group of three.
WRITES = (("ab", "c", "=yes"), ("=no",), ("x", "=no"))
VERDICTS = ("+-+", "-", "+-")


@dataclass
class Asks(Environment):
    """Says back in brackets what it hears, until the agent writes `=` and an answer. `!` breaks it."""

    opening: str = "{question}:"
    agent: str = "generator"

    def begin(self, task: Mapping[str, Any], seed: int):
        self.heard = 0
        return self._move(fill(self.opening, question=str(task["question"])))

    def step(self, said: Said):
        self.heard += 1
        if "!" in said.text:
            raise EnvironmentFailure("the tool is away")
        text = said.text.rpartition("</think>")[2]
        if text.startswith("="):
            return EpisodeEnd(answers={self.agent: text[1:]}, rewards={self.agent: {"turns": float(self.heard)}})
        return self._move(f"[{text}]")

    def _move(self, text: str):
        return [NextRequest(agent=self.agent, role=self.agent, messages=[{"role": "user", "content": text}])]


@dataclass
class Silent(EpisodeMaker):
    """Plays like another, whose episodes do not tell what was said in them."""

    def play(self, context, tasks, seeds, samplings, settings, numbers=None):
        return [replace(x, observations={}) for x in Asks().play(context, tasks, seeds, samplings, settings, numbers)]


def labels(steps, payload):
    """A turn of one character is right, and so is a correct answer."""
    return [len(step) == 1 or step == f"={payload['answer']}" for step in steps]


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "v.txt").write_text("Q {question} S {solution} K {num_steps}.")

    def make(**args):
        usual = {
            "environment": Use(target=f"{__name__}:Asks"), "verifier_template": str(tmp_path / "v.txt"),
            "group_size": 3, "verifications": 3, "turn_form": "{number}) {text} ", "told_form": "tool: {text} ",
        }  # fmt: skip
        return TangoAgents(**(usual | args))

    return make


def writer(writes=WRITES, tokenizer=TEXT):
    """An engine that writes the k-th of an episode's texts as its k-th answer."""
    end = tokenizer.eos_token_id

    def answer(prompt, key, sample, sampling):
        number, k = divmod(key, MOST_ANSWERS)
        return [*tokenizer(writes[number % len(writes)][k], add_special_tokens=False)["input_ids"], end]

    return ScriptedEngine(answer, eos=end)


def judge(script):
    """An engine that writes what `script` says of a verification prompt's text and the sample's number."""
    return ScriptedEngine(lambda p, i, j, s: [*TEXT(script(TEXT.decode(p), j))["input_ids"], EOS], eos=EOS)


def by_verdicts(prompt, j):
    """Judges the three transcripts as VERDICTS says; the final verdict is about the answer."""
    [place] = [i for i, texts in enumerate(WRITES) if f"1) {texts[0]} " in prompt]
    return verification(VERDICTS[place], "+" if "=yes" in prompt else "-")


def context_of(generator=None, verifier=by_verdicts, tokenizer=TEXT, grade=RULE, **settings):
    engines = {"generator": generator or writer(), "verifier": judge(verifier)}
    return RolloutContext(
        engines=engines,
        tokenizers={"generator": tokenizer, "verifier": TEXT},
        samplings={name: Sampling(max_tokens=4000, top_p=0.9) for name in engines},
        max_prompt_tokens=dict.fromkeys(engines, 4000),
        grade=grade,
        **settings,
    )


def problems(count):
    return [Prompt(id=f"p{i}", tokens=[1, 2], payload={"question": f"q{i}", "answer": "yes"}) for i in range(count)]


def roll_out(recipe, role, prompts, context, **at):
    rollouts = credited(recipe, iteration(role, **at), Problems(problems(prompts)), context)
    assert list(rollouts) == [role]
    return rollouts[role], context.metrics[role]


def asked(context, role="verifier"):
    return [TEXT.decode(tokens) for tokens, _ in context.engines[role].asked]


def credit_by_loops(outcomes, verdicts, alpha):
    """Re-derives the advantage of each turn of each transcript from the paper's equations 3 to 7, in float64."""
    rewards = [[(1.0 if v == "+" else -1.0) / len(own) for v in own] for own in verdicts]

    def z(value, values):
        return (value - np.mean(values)) / (np.std(values, ddof=1) + 1e-6)

    every = [value for own in rewards for value in own]
    return [
        [(1 - alpha) * z(outcome, outcomes) + alpha * sum(z(r, every) for r in own[k:]) for k in range(len(own))]
        for outcome, own in zip(outcomes, rewards, strict=True)
    ]


def turn_credit(rollout):
    """The one advantage that all tokens of a turn have, turn by turn."""
    found = []
    for start, end in rollout.annotations_of(STEP).ranges.tolist():
        [value] = set(rollout.advantages[start:end].tolist())
        found.append(value)
    return found


def test_turns_become_steps_and_the_verifier_reads_the_whole_conversation(recipe):
    context = context_of()
    rollouts, metrics = roll_out(recipe(), "generator", 1, context)
    turns = [[TEXT.decode(r.tokens[a:b]) for a, b in r.annotations_of(STEP).ranges] for r in rollouts]
    assert turns == [[f"{text}<eos>" for text in texts] for texts in WRITES]
    assert asked(context) == [
        "Q q0 S 1) ab tool: [ab] 2) c tool: [c] 3) =yes K 3.",
        "Q q0 S 1) =no K 1.",
        "Q q0 S 1) x tool: [x] 2) =no K 2.",
    ]
    assert (metrics["verdicts_match"], metrics["answers"], metrics["alpha"]) == (1.0, 2.0, 0.1)
    assert [r.payload["correct"] for r in rollouts] == [True, False, False]
    assert [r.rewards for r in rollouts] == [
        {"turns": float(len(texts)), "outcome": outcome, TRAINED: outcome}
        for texts, outcome in zip(WRITES, (1.0, 0.0, 0.0), strict=True)
    ]
    assert rollouts[0].payload["verdicts"] == [True, False, True]
    assert rollouts[0].payload["review"].startswith("<step_verification>")


@pytest.mark.parametrize("alpha", [0.1, 0.9])
def test_verdicts_land_on_the_tokens_of_their_turns(recipe, alpha):
    rollouts, _ = roll_out(recipe(alpha_start=alpha), "generator", 1, context_of())
    expected = credit_by_loops((1.0, 0.0, 0.0), VERDICTS, alpha)
    for rollout, values in zip(rollouts, expected, strict=True):
        assert turn_credit(rollout) == pytest.approx(values, abs=1e-6)
        assert not rollout.advantages[rollout.authors == Author.ENVIRONMENT].any()
    first, second, third = turn_credit(rollouts[0])
    assert second < min(first, third), "the turn that was judged wrong"
    assert rollouts[0].annotations_of(STEP).scores.tolist() == [1 / 3, -1 / 3, 1 / 3]


def test_a_verification_with_another_number_of_verdicts_gives_no_step_rewards_and_is_out_of_form(recipe):
    def short(prompt, j):
        return verification("+" if "K 3" in prompt else VERDICTS[1 if "K 1" in prompt else 2], "-")

    rollouts, metrics = roll_out(recipe(), "generator", 1, context_of(verifier=short))
    assert rollouts[0].annotations_of(STEP).scores is None and rollouts[1].annotations_of(STEP).scores is not None
    assert metrics["verdicts_match"] == pytest.approx(2 / 3)
    judged, _ = roll_out(recipe(), "verifier", 1, context_of(verifier=short))
    assert [r.rewards["format"] for r in judged] == [0.2] * 3, "though the conversation has no form of Tango's"


def test_a_turn_stays_one_step_where_the_weights_change_in_it():
    parts = [[0, 2, 2, -1], [2, 4, 0, 3], [4, 5, 0, 4], [5, 6, 2, -1], [6, 8, 0, 4]]
    assert annotate_turns(plain(8, parts)).annotations_of(STEP).ranges.tolist() == [[2, 5], [6, 8]]
    assert len(annotate_turns(plain(2, [[0, 2, 2, -1]])).annotations_of(STEP)) == 0


def plain(length, spans):
    return Rollout(
        role="generator", group="0:p", tokens=np.arange(length), logprobs=np.zeros(length), spans=np.array(spans)
    )


def thinks(k, texts):
    """The last but one turn thinks before it writes: the template forgets that once another turn follows."""
    return f"hm</think>{texts[k]}" if k == len(texts) - 2 else texts[k]


@pytest.mark.parametrize("alpha", [0.1, 0.9])
def test_a_transcript_that_was_cut_is_judged_and_credited_as_a_whole(recipe, alpha):
    writes = tuple(tuple(thinks(k, texts) for k in range(len(texts))) for texts in WRITES)
    tokenizer = chat_tokenizer(THINKING)
    context = context_of(writer(writes, tokenizer), by_thought, tokenizer)
    rollouts, metrics = roll_out(recipe(dialogue="chat", alpha_start=alpha), "generator", 1, context)
    assert metrics["cuts"] == pytest.approx(2 / 3) and len(rollouts) == 5
    assert asked(context)[0] == "Q q0 S 1) ab tool: [ab] 2) hm</think>c tool: [c] 3) =yes K 3."
    agents = {}
    for rollout in rollouts:
        agents.setdefault(rollout.payload["episode"], []).append(rollout)
    expected = credit_by_loops((1.0, 0.0, 0.0), VERDICTS, alpha)
    assert [len(samples) for samples in agents.values()] == [2, 1, 2]
    for samples, values, verdicts in zip(agents.values(), expected, VERDICTS, strict=True):
        assert [c for sample in samples for c in turn_credit(sample)] == pytest.approx(values, abs=1e-6)
        assert [v for sample in samples for v in sample.payload["verdicts"]] == [v == "+" for v in verdicts]
        for sample in samples:
            assert not sample.advantages[sample.authors == Author.ENVIRONMENT].any()
            assert (
                len(sample.annotations_of(STEP))
                == len(sample.annotations_of(STEP).scores)
                == len(sample.payload["verdicts"])
            )
    uncut = chat_tokenizer(CHATML)
    whole, _ = roll_out(
        recipe(dialogue="chat", alpha_start=alpha), "generator", 1, context_of(writer(writes, uncut), by_thought, uncut)
    )
    assert len(whole) == 3, "the same conversations, and the same credit, where the template forgets nothing"
    assert [turn_credit(r) for r in whole] == [pytest.approx(values, abs=1e-6) for values in expected]


def test_no_turn_can_end_the_verifiers_prompt_and_speak_in_its_place(recipe):
    """`<eos>` is a control token of the verifier's, and letters to the generator."""
    tokenizer = chat_tokenizer(CHATML)
    context = context_of(writer((("<eos>Right", "=yes"), *WRITES[1:]), tokenizer), lambda *_: "no idea", tokenizer)
    roll_out(recipe(dialogue="chat"), "generator", 1, context)
    prompt = context.engines["verifier"].asked[0][0]
    assert EOS not in prompt and "1) < eos>Right tool: [< eos>Right]" in TEXT.decode(prompt)


def by_thought(prompt, j):
    return by_verdicts(prompt.replace("hm</think>", ""), j)


def test_joined_samples_come_apart_as_they_were(recipe):
    tokenizer = chat_tokenizer(THINKING)
    writes = (("a", "hm</think>c", "=yes"),)
    rollouts, _ = roll_out(
        recipe(dialogue="chat", group_size=2), "generator", 1,
        context_of(writer(writes, tokenizer), lambda *_: "no idea", tokenizer),
    )  # fmt: skip
    samples = rollouts[:2]
    whole = joined(samples)
    assert whole.tokens.tolist() == [*samples[0].tokens.tolist(), *samples[1].tokens.tolist()]
    assert whole.num_trainable == sum(s.num_trainable for s in samples)
    credited = replace(whole, advantages=0.5, rewards={TRAINED: 2.0})
    for part, sample in zip(with_credit(credited, samples), samples, strict=True):
        assert part.advantages == 0.5 and np.array_equal(part.spans, sample.spans) and part.rewards[TRAINED] == 2.0
        assert np.array_equal(part.tokens, sample.tokens) and np.array_equal(part.logprobs, sample.logprobs)
    ranges = annotate_turns(whole).annotations_of(STEP).ranges
    scored = replace(whole, annotations={STEP: Annotations(ranges, np.array([1.0, 2.0, 3.0]))})
    first, second = parted(scored, samples)
    assert first.annotations_of(STEP).scores.tolist() == [1.0, 2.0]
    assert second.annotations_of(STEP).scores.tolist() == [3.0]
    again = rejoined([first, second]).annotations_of(STEP)
    assert np.array_equal(again.ranges, ranges) and again.scores.tolist() == [1.0, 2.0, 3.0]
    assert rejoined(parted(annotate_turns(whole), samples)).annotations_of(STEP).scores is None
    each = replace(credited, advantages=np.arange(len(whole.tokens), dtype=np.float32))
    assert with_credit(each, samples)[1].advantages[0] == len(first.tokens)


def test_a_reward_that_fails_too_often_for_answers_of_episodes_ends_the_run(recipe):
    writes = (("=lost",), ("=lost",), *WRITES[1:])
    with pytest.raises(RewardFailure, match="2 of 4 gradings failed"):
        roll_out(recipe(group_size=4), "generator", 1, context_of(writer(writes), max_failure_share=0.25))
    roll_out(recipe(group_size=4), "generator", 1, context_of(writer(writes), max_failure_share=0.5))


@pytest.mark.parametrize("text", ["!", "=lost"])
@pytest.mark.parametrize("role", ["generator", "verifier"])
def test_an_episode_that_failed_or_could_not_be_graded_is_no_sample_and_is_not_judged(recipe, text, role):
    writes = ((text,), *WRITES[1:], WRITES[0])
    context = context_of(writer(writes))
    rollouts, metrics = roll_out(recipe(group_size=4), role, 1, context)
    if role == "verifier":  # its one episode failed
        assert rollouts == [] and not context.engines["verifier"].asked and metrics["reward/outcome"] == 0.0
        return
    assert [r.rewards["outcome"] for r in rollouts] == [0.0, 0.0, 1.0] and len(context.engines["verifier"].asked) == 3
    assert len({r.group for r in rollouts}) == 1 and metrics["episodes/error"] == float(text == "!")
    expected = credit_by_loops((0.0, 0.0, 1.0), (VERDICTS[1], VERDICTS[2], VERDICTS[0]), 0.1)
    assert [turn_credit(r) for r in rollouts] == [pytest.approx(values, abs=1e-6) for values in expected]


def mixed(prompt, j):
    """Sample 0 agrees, sample 1 does not, sample 2 cannot be read."""
    right = "=yes" in prompt
    count = int(re.search(r"K (\d)", prompt)[1])
    return [verification("+" * count, "+" if right else "-"), verification("+" * count, "-" if right else "+"), ""][j]


def test_a_verifier_of_turns_rests_too(recipe):
    own = recipe(reviewed="failed", review_below=0.1, verifier_rests=True)
    roll_out(own, "generator", 1, context_of())  # one problem, whose outcomes differ: the moving share is 0.2
    context = context_of()
    rollouts, metrics = roll_out(own, "verifier", 3, context)
    assert rollouts == [] and metrics["rests"] == 1.0 and not asked(context) and not asked(context, "generator")


def test_a_verifier_iteration_weighs_the_rarer_class_and_its_counts_survive_a_checkpoint(recipe):
    own, again = recipe(), recipe()
    rollouts, metrics = roll_out(own, "verifier", 3, context_of(verifier=mixed))
    assert [r.rewards["verifier"] for r in rollouts] == pytest.approx([1.8, 0.8, 0.0] * 3)
    rewards = np.array([1.8, 0.8, 0.0])
    z = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
    right, wrong = 1 / math.sqrt(3), 1 / math.sqrt(6)
    scale = 9 / (3 * right + 6 * wrong)
    expected = [*(z * right * scale), *(z * wrong * scale), *(z * wrong * scale)]
    assert [r.advantages for r in rollouts] == pytest.approx(expected, abs=1e-5)
    assert metrics["reward/outcome"] == pytest.approx(1 / 3)
    assert own.state_dict()["counts"] == {"correct": 3.0, "wrong": 6.0}
    again.load_state_dict(json.loads(json.dumps(own.state_dict())))
    later = [roll_out(each, "verifier", 1, context_of(verifier=mixed), number=1)[0] for each in (own, again)]
    assert [r.advantages for r in later[0]] == [r.advantages for r in later[1]]
    assert own.state_dict() == again.state_dict() and own.state_dict()["counts"]["wrong"] == pytest.approx(0.8 * 6)


def test_an_opening_without_the_question_is_shown_and_what_is_not_told_is_decoded(recipe):
    context = context_of()
    rules = Use(target=f"{__name__}:Asks", args={"opening": "Ask me. "})
    roll_out(recipe(environment=rules), "generator", 1, context)
    assert asked(context)[1] == "Q q0 S tool: Ask me. 1) =no K 1."
    told, silent = context_of(), context_of()
    roll_out(recipe(), "generator", 1, told)
    roll_out(recipe(environment=Use(target=f"{__name__}:Silent")), "generator", 1, silent)
    assert asked(silent) == asked(told)


def test_draws_depend_on_the_iteration_alone(recipe):
    def seeds(number, role="generator"):
        context = context_of()
        roll_out(recipe(), role, 1, context, number=number)
        return [context.engines[name].asked[0][1].seed for name in ("generator", "verifier")]

    assert seeds(5) == seeds(5) and not set(seeds(5)) & set(seeds(6))


def test_evaluation_measures_both_and_keeps_its_conversations(recipe):
    writes = (WRITES[0], WRITES[2])
    own = recipe(balanced_per_class=2, balanced_rounds=3, step_labels=f"{__name__}:labels")
    context = context_of(writer(writes), by_verdicts)
    metrics = own.evaluate(problems(3), context)
    wanted = {"generator/reward": 2 / 3, "generator/accuracy_greedy": 2 / 3, "episodes/answers": 8 / 3}
    assert {name: metrics[name] for name in wanted} == pytest.approx(wanted)
    assert (metrics["verifier/num_correct"], metrics["verifier/num_wrong"]) == (2.0, 2.0)
    assert metrics["verifier/outcome_f1"] == metrics["verifier/aligned"] == 1.0
    # A correct one has the labels - + + and the verdicts + - +, a wrong one + - and + -.
    assert metrics["verifier/step_f1"] == pytest.approx(2 * (2 / 3) * (1 / 2) / (2 / 3 + 1 / 2))
    kept = json.loads(json.dumps(context.kept))
    later = context_of(writer((("=yes",),)), by_verdicts)  # the generator has changed; the set has not
    later.kept.update(kept)
    again = own.evaluate(problems(3), later)
    assert asked(later) == asked(context) and len(asked(later)) == 8
    assert {n: v for n, v in again.items() if "verifier" in n} == {n: v for n, v in metrics.items() if "verifier" in n}


def test_a_kept_conversation_that_was_cut_has_all_its_turns(recipe):
    tokenizer = chat_tokenizer(THINKING)
    writes = (("ab", "hm</think>c", "=yes"), ("x", "=no"))
    own = recipe(dialogue="chat", balanced_per_class=1, step_labels=f"{__name__}:labels")
    context = context_of(writer(writes, tokenizer), by_thought, tokenizer)
    metrics = own.evaluate(problems(2), context)
    assert asked(context)[0] == "Q q0 S 1) ab tool: [ab] 2) hm</think>c tool: [c] 3) =yes K 3."
    assert metrics["verifier/aligned"] == 1.0 and len(context.kept["balanced_solutions"]["solutions"][0]["spans"]) == 5


def test_an_episode_that_failed_counts_with_0_in_an_evaluation_and_is_not_judged(recipe):
    context = context_of(writer((("=yes",), ("!",))), lambda *_: verification("+", "+"))
    metrics = recipe(balanced_per_class=1, balanced_rounds=1).evaluate(problems(2), context)
    assert metrics["generator/reward"] == 0.5
    assert (metrics["verifier/num_correct"], metrics["verifier/num_wrong"]) == (1.0, 0.0)


def test_the_environments_own_rewards_say_what_is_right(recipe):
    own = recipe(rewards={"turns": 0.2}, environment=Use(target=f"{__name__}:Asks"))
    rollouts, _ = roll_out(own, "generator", 1, context_of())
    assert [r.payload["correct"] for r in rollouts] == [True, False, False]  # 0.6, 0.2 and 0.4
    assert [r.rewards[TRAINED] for r in rollouts] == pytest.approx([0.6, 0.2, 0.4])
    with pytest.raises(RewardFailure, match="has no reward 'points'"):
        roll_out(recipe(rewards={"points": 1.0}), "generator", 1, context_of(max_failure_share=0.1))


def test_schedule_and_parts_are_tangos(recipe):
    own = recipe(role="solver", agents=2, generator_updates=4, warmup_updates=1)
    iterations = [roles for cycle in own.schedule() for roles in cycle]
    assert iterations == [("verifier",), *[("solver",)] * 3, ("verifier",), ("solver",)]
    parts = own.roles()
    assert list(parts) == ["solver", "verifier"] and parts["solver"].samples == 6 and parts["verifier"].samples == 6
    assert parts["solver"].drawn == {"solver": 6, "verifier": 6}
    assert parts["verifier"].drawn == {"solver": 2, "verifier": 6}
    assert own.prompt({"question": "why?"}) == "why?"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"role": "verifier"}, "recipe.args.role = 'verifier'"),
        ({"agents": 0}, "agents = 0: give a value greater than or equal to 1"),
        ({"group_size": 1}, "group_size = 1: give at least 2"),
        ({"rewards": {}}, "rewards is empty"),
        ({"turn_form": "turn"}, "turn_form = 'turn': it needs {text}"),
        ({"dialogue": "talk"}, "dialogue = 'talk'"),
        ({"alpha_start": 2.0}, "alpha_start = 2.0: give a value less"),
        (
            {"environment": {"target": "megatron_rl.contrib.calculator:Calculator"}},
            "is no environment: name a class",
        ),
        ({"generator_template": "tango_generator"}, "generator_template"),
    ],
)
def test_settings_are_checked_by_name_value_and_cure(args, message):
    usual = {"environment": {"target": f"{__name__}:Asks"}}
    build(Use(target="megatron_rl.recipes.tango_agents:TangoAgents", args=usual))
    with pytest.raises(ConfigError, match=message):
        build(Use(target="megatron_rl.recipes.tango_agents:TangoAgents", args=usual | args))


def test_the_packaged_prompt_shows_a_perfect_verification():
    text = fill(read_template("tango_turns_verifier"), question="Why?", solution="SAID", num_steps="7")
    places = [
        text.index(part) for part in ("Task:\nWhy?", "Conversation:\nSAID", "has 7 turns", "Remember", "exactly 7")
    ]
    assert places == sorted(places) and text.endswith("Your Verification:\n")
    [example] = re.findall(r"good verification of it is:\n(<step_ver.*?</final_verification>)", text, re.DOTALL)
    read = review(example, num_steps=2, correct=False, generator_format=1.0)
    assert (read.verdicts, read.final, read.format, read.reward) == ((True, False), False, 1.0, 1.8)


def test_the_miniatures_teacher_tells_the_truth_and_writes_conversations_as_the_recipe_does():
    rng = random.Random(3)
    form = TranscriptForm(turn="#{number} {text} ", observation="{text} ")  # as in tango.yaml
    counts = Counter()
    for _ in range(300):
        a, b = rng.randint(10, 99), rng.randint(10, 99)
        question, product = f"{' '.join(str(a))} * {' '.join(str(b))}", " ".join(str(a * b))
        turns, told = mini_judge.draw_turns(rng, question, spoiled=0.3)
        assert mini_judge.write_down(turns, told) == form.write(question, [f"<bos> {question} <ask>", *told[1:]], turns)
        gold = mini_judge.labels(turns, {"question": question, "answer": product})
        read = review(
            mini_judge.verification(rng, question, turns, told, 0.0), num_steps=len(turns), correct=gold[-1],
            generator_format=1.0,
        )  # fmt: skip
        guess = turns[0].startswith("<answer>")
        assert list(read.verdicts) == ([False] if guess else gold) and read.format == 1.0 and (guess or read.agrees)
        counts[len(turns), read.final] += 1
    assert all(counts[key] > 5 for key in [(1, False), (2, True), (2, False), (3, True), (3, False)]), counts
