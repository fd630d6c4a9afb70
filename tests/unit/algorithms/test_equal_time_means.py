"""Means that were tried to make Tango cheaper or better, each against what its description says."""

import random
import re

import numpy as np
import pytest
from stages import credited
from test_recipes import TOKENIZER, Problems, context_of, iteration, problems, roll_out, solution, texts, verification

from examples.miniatures.last_letter.teachers import solution_text, teacher_solution, verification_text
from examples.studies.equal_time.arms import LEAN
from examples.studies.equal_time.means import DynamicTango, ReusingTango, TrustedTango
from examples.studies.equal_time.own_verdicts import ScoredTango, approval_of
from examples.studies.equal_time.together import TogetherTango
from megatron_rl.algorithms.advantages import StepCredit
from megatron_rl.texts.tags import step_texts
from megatron_rl.types import STEP

__all__ = ["texts"]  # a fixture

LEAN_ARGS = LEAN | {"step_credit": StepCredit(**LEAN["step_credit"])}


class Counted(Problems):
    """A source of ever new problems, which counts them."""

    def __init__(self, first):
        self.first, self.taken, self.prompts_per_iteration = first, 0, first

    def take(self, count=None, fits=None):
        start, self.taken = self.taken, self.taken + (count or self.first)
        return problems(self.taken)[start:]


def test_problems_without_signal_are_replaced_once_nothing_is_verified(texts):
    """Every second problem has a correct solution and a wrong one; the others have none that is right."""

    def solve(prompt, i, j, sampling):
        number = int(re.search(r"Q (\d+)", prompt)[1])
        return solution(2, "yes" if number % 2 and j else "no")

    recipe = DynamicTango(group_size=2, **LEAN_ARGS | {"review_below": 0.1}, **texts)
    source, context = Counted(4), context_of(solve, lambda *_: verification("++", "-"))
    [rollouts] = credited(recipe, iteration("generator"), source, context).values()
    assert source.taken == 4 and len(rollouts) == 8, "all problems that nobody solved have verdicts"
    assert len(context.engines["verifier"].asked) == 4
    for _ in range(2):
        source, context = Counted(4), context_of(solve, lambda *_: verification("++", "-"))
        [rollouts] = credited(recipe, iteration("generator"), source, context).values()
    assert not context.engines["verifier"].asked and source.taken == 8
    assert len({r.group for r in rollouts}) == 4 and len(rollouts) == 8
    assert {r.rewards["outcome"] for r in rollouts[:2]} == {0.0, 1.0}
    [own] = credited(
        recipe, iteration("verifier"), Counted(4), context_of(solve, lambda *_: verification("++", "-"))
    ).values()
    assert own == [], "it rests"


def test_the_verifiers_iteration_is_about_solutions_that_were_judged_before(texts):
    def solve(prompt, i, j, sampling):
        return solution(2, "yes" if i == 0 else "no")

    recipe = ReusingTango(group_size=2, verifications=3, **LEAN_ARGS, **texts)
    first = context_of(solve, lambda *_: verification("++", "-"))
    credited(recipe, iteration("verifier"), Problems(3), first)
    assert first.engines["generator"].asked, "there is none yet: solutions are drawn"
    credited(recipe, iteration("generator"), Problems(3), context_of(solve, lambda *_: verification("++", "-")))
    source, context = Counted(3), context_of(solve, lambda prompt, i, j, s: verification("++", "+" if j else "-"))
    [rollouts] = credited(recipe, iteration("verifier", number=2), source, context).values()
    assert source.taken == 0 and not context.engines["generator"].asked
    assert len(rollouts) == 2 * 3, "of the two problems that nobody solved one solution each"
    assert [r.rewards["agrees"] for r in rollouts] == [1.0, 0.0, 0.0] * 2


def test_alpha_follows_how_often_the_verifier_was_right(texts):
    recipe = TrustedTango(group_size=2, verifications=4, **LEAN_ARGS, **texts)
    assert recipe.trust == 0.0
    context = context_of(lambda p, i, j, s: solution(2, "no"), lambda p, i, j, s: verification("+-", "-"))
    roll_out(recipe, "generator", 3, context)
    assert context.metrics["generator"]["trust"] == pytest.approx(7 / 8 + 1 / 2 - 1), "six wrong ones, all told"
    assert context.metrics["generator"]["alpha"] == pytest.approx(3 / 8)
    context = context_of(
        lambda p, i, j, s: solution(2, "yes"), lambda p, i, j, s: verification("++", "+" if j else "-")
    )
    roll_out(recipe, "verifier", 1, context)
    assert recipe.trust == pytest.approx(7 / 8 + 4 / 6 - 1)


def test_an_approval_is_the_text_of_a_teacher_who_finds_all_steps_right():
    class Never:
        def random(self):
            return 1.0

    words = ["abc", "de", "fgh"]
    written = verification_text(Never(), words, solution_text([word[-1] for word in words]), 0.0)
    approval = approval_of(step_texts(solution_text(["c", "e", "h"])))
    assert written.startswith(approval) and approval.count("</step>") == 3


def test_a_step_is_right_where_its_approval_is_likely(texts):
    """Likely are the tokens of the blocks whose number is odd; each block's log-probs are added up."""

    def score(sequences):
        found = []
        for tokens in sequences:
            text, own = "", np.full(len(tokens), -1e-4, np.float32)
            for place, token in enumerate(tokens):
                done = text.rpartition("<step_verification>")[2].count("</step>")  # blocks before this token
                own[place] = -1e-4 if done % 2 == 0 else -0.1
                text += TOKENIZER.decode([token])
            found.append(own)
        return found

    recipe = ScoredTango(group_size=2, **LEAN_ARGS, **texts)
    context = context_of(lambda p, i, j, s: solution(3, "yes" if i else "no"), lambda *_: "")
    context.engines["verifier"].score = score
    recipe._labels = lambda steps, payload: [True, False, False]
    rollouts, metrics = roll_out(recipe, "generator", 2, context)
    assert not context.engines["verifier"].asked, "nothing is written"
    assert [r.annotations_of(STEP).scores.tolist() for r in rollouts[:2]] == [[1.0, -1.0, 1.0]] * 2
    assert all(r.annotations_of(STEP).scores is None for r in rollouts[2:]), "that problem is solved"
    assert metrics["step_agreement"] == pytest.approx(2 / 3)
    short = context_of(lambda p, i, j, s: solution(3, "no"), lambda *_: "", verifier_limit=3)
    rollouts, _ = roll_out(ScoredTango(group_size=2, **LEAN_ARGS, **texts), "generator", 1, short)
    assert all(r.annotations_of(STEP).scores is None for r in rollouts), "its prompt is too long"


def test_two_solutions_are_verified_in_one_text(texts):
    """Three solutions of each problem: a pair, and one alone. The verdicts of a text go to their own solutions."""

    def solve(prompt, i, j, sampling):
        return solution(j + 1, "no")

    def verify(prompt, i, j, sampling):
        counts = [len(step_texts(part)) for part in prompt.split("<sol>")[1:]]
        return " ".join(verification("+" * (count - 1) + "-", "-") for count in counts)

    recipe = TogetherTango(group_size=3, verifications=2, **LEAN_ARGS, **texts)
    context = context_of(solve, verify)
    rollouts, metrics = roll_out(recipe, "generator", 2, context)
    asked = [TOKENIZER.decode(tokens).count("<sol>") for tokens, _ in context.engines["verifier"].asked]
    assert sorted(asked) == [1, 1, 2, 2]
    assert {sampling.max_tokens for _, sampling in context.engines["verifier"].asked} == {8000}
    found = [r.annotations_of(STEP).scores.tolist() for r in rollouts]
    assert found == [[-1.0], [1.0, -1.0], [1.0, 1.0, -1.0]] * 2
    assert metrics["verdicts_match"] == 1.0 and metrics["reviews_dropped"] == 0
    cut = context_of(solve, lambda *_: verification("-", "-"))
    rollouts, _ = roll_out(recipe, "generator", 1, cut)
    assert rollouts[0].annotations_of(STEP).scores.tolist() == [-1.0]
    assert rollouts[1].annotations_of(STEP).scores is None, "the answer ends after the first"
    alone = context_of(solve, lambda *_: verification("-", "-"))
    own, _ = roll_out(recipe, "verifier", 2, alone)
    assert len(own) == 4, "the verifier's own iteration is about one solution at a time"


def test_texts_of_pairs_are_made_of_two_verifications(monkeypatch, tmp_path):
    import json
    import sys
    from pathlib import Path

    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    from examples.studies.equal_time import verifiers

    monkeypatch.setattr(verifiers, "PAIR_STEPS", 4)
    pool = [{"question": "a b #1", "words": ["ab"], "response": solution_text(["b"])}]
    verifiers.write_pairs(Path(tmp_path) / "pairs.jsonl", pool, 1)
    rows = [json.loads(line) for line in (tmp_path / "pairs.jsonl").read_text().splitlines()]
    assert len(rows) == 4 * 32
    for row in rows:
        assert row["prompt"].count("<sol>") == row["response"].count("</final_verification>")
    share = np.mean([row["prompt"].count("<sol>") == 2 for row in rows])
    assert 0.5 < share < 0.9 and any("a b #1 <q>" in row["prompt"] for row in rows)
    for name in {"run", "task"} & (set(sys.modules) - before):
        del sys.modules[name]


def test_a_drifted_generator_takes_the_letter_before_the_last():
    """Its errors are not those that the verifier's teacher makes, where a word has more than two letters."""
    words = ["abc", "de", "fghi"]
    wrong = teacher_solution(random.Random(0), words, 1.0, place=-2)
    assert wrong == solution_text(["b", "d", "h"])
    assert teacher_solution(random.Random(0), words, 1.0) == solution_text(["a", "d", "f"])
    assert teacher_solution(random.Random(0), words, 0.0, place=-2) == solution_text(["c", "e", "i"])
