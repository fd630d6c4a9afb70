"""Finds signs that a run went wrong, which a report shows first."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from megatron_rl.config.evaluation import NO_SCALE
from megatron_rl.report.curves import class_accuracies
from megatron_rl.report.reading import Curve, RunMetrics
from megatron_rl.report.run_sections import Gain, evaluation_gains, main_gains, reward_gain
from megatron_rl.report.shown_rollouts import Picked
from megatron_rl.run.metrics import EVAL, REPLACED
from megatron_rl.types import CUT_OFF

# The sentences of `signs` call a share above NEARLY_ALL "nearly all".
# An entropy below FEW times its first value counts as collapsed.
NEARLY_ALL, FEW = 0.9, 0.1
# A text is suspicious if it was graded correct for problems with at least SAME_ANSWERS different correct answers.
# Suspicious texts are reported if they are more than a share SAME_SHARE of the answers that were graded correct.
SAME_ANSWERS, SAME_SHARE = 3, 0.02
# Failed gradings and episodes are reported if their number is above FAILED times the number of the role's samples.
FAILED = 0.02
LONG = 16  # no warning about cut samples if the maximum length is below this number of tokens
MOST_BROKEN = 3  # maximum number of metrics with NaN or infinite values that are named


def signs(run: RunMetrics, picked: Picked) -> list[str]:
    """Returns a sentence for each sign that the run went wrong; a sentence also says what to look at. "First" and
    "last" iterations are the first and the last fifth of the run. `picked`: rollouts of this run."""
    broken = [f"{role}: of {name}, {curve.trouble}." for (role, name), curve in run.curves.items() if curve.trouble]
    sentences = [*broken[:MOST_BROKEN], *_blind_reward(picked)]
    gains = evaluation_gains(run)
    held_out = main_gains(gains, run.settings)
    rising = {gain.role for gain in gains if gain.name.endswith("/reward") and gain.rose}
    for role in run.updates:
        reward = reward_gain(run, role)
        role_gains = [gain for gain in held_out if gain.role == role]
        sentences += [*_verifier(run, role), *_hacked(role, reward, role_gains, graded=role in rising)]
        if reward is None or reward.end < NEARLY_ALL:  # equal samples are expected once the task is solved
            sentences += [*_collapsed(run, role), *_unfinished(run, role)]
        sentences += _ungraded(run, role)
    evaluated = {name.rpartition("/") for scope, name in run.curves if scope == EVAL}
    measured = {role: {last for prefix, _, last in evaluated if prefix == role} for role, *_ in evaluated}
    unscaled = any("reward" in metrics and "accuracy" not in metrics for metrics in measured.values())
    if unscaled and run.record.threshold() is None:
        sentences.append(f"Evaluations have no accuracy: {NO_SCALE}.")
    return sentences


def _blind_reward(picked: Picked) -> Iterator[str]:
    """Yields a sentence if the grader seems to accept a text for any problem: the same text was graded correct for
    problems with different correct answers."""
    totals, texts = Counter[str](), defaultdict[tuple[str, str], Counter[str]](Counter)
    for (role, text, answer), count in picked.correct.items():
        totals[role] += count
        texts[role, text][answer] += count
    for role, total in totals.items():
        blind = {text: counts for (name, text), counts in texts.items() if name == role and len(counts) >= SAME_ANSWERS}
        share = sum(counts.total() for counts in blind.values()) / total
        if share > SAME_SHARE:
            text = max(blind, key=lambda text: blind[text].total())
            yield (
                f"{role}: of the answers that were graded correct in the last iterations, {share:.0%} are texts that "
                f"were correct for any problem, such as {text[:80]!r} for {len(blind[text])} different known answers: "
                "the reward can be had without solving the problem."
            )


def _hacked(role: str, reward: Gain | None, held_out: list[Gain], *, graded: bool) -> Iterator[str]:
    """Yields a sentence if the reward rose in training, but the role's main held-out metric got worse or stayed low.

    The metric counts as low only if it is an accuracy, the reward is between 0 and 1, the accuracy is below half of the
    reward, and the accuracy rose by less than a quarter of the reward's rise, even at the upper end of the 95 %
    interval of its rise.

    `graded`: whether the reward on held-out problems rose too. In this case, no accuracy counts as low, because a low
    accuracy only shows that incorrect solutions get partial credit.
    """
    for gain in held_out if reward is not None and reward.rose else ():
        assert reward is not None
        low = (
            not graded
            and "accuracy" in gain.name
            and reward.start >= 0
            and reward.end <= 1
            and gain.end < reward.end / 2
        )
        most = gain.end - gain.start + (gain.error or 0.0)
        if gain.better is False or low and most < (reward.end - reward.start) / 4:
            yield (
                f"{role}: the reward in training went from {reward.start:.3g} to {reward.end:.3g}, and the held-out "
                f"{gain.metric} from {gain.start:.3g} to {gain.end:.3g}: the reward may be exploited. Read the last "
                "rollouts with the largest rewards."
            )


def _collapsed(run: RunMetrics, role: str) -> Iterator[str]:
    """Yields sentences if the entropy collapsed, or if most groups are without signal, before the task was solved."""
    entropy, alike = (run.curves.get((role, name), Curve()) for name in ("entropy", "groups_without_signal"))
    start, end = entropy.ends
    if start > 0 and end < FEW * start:
        yield (
            f"{role}: the entropy fell from {start:.3g} to {end:.2g} nats: its samples of a prompt are nearly all "
            "alike, so that nothing new is tried. Lower the learning rate, or raise loss.entropy_coef or "
            "loss.clip_high."
        )
    if (share := alike.ends[1]) > NEARLY_ALL:
        yield (
            f"{role}: in the last iterations {share:.0%} of the groups have equal rewards, from which nothing is "
            "learned: the problems are too hard or too easy, or the samples of a prompt are alike."
        )


def _unfinished(run: RunMetrics, role: str) -> Iterator[str]:
    """Yields a sentence if nearly all samples were cut at the role's maximum length. Yields nothing if this maximum is
    below LONG tokens."""
    finished = run.curves.get((role, "finished"), Curve())
    max_tokens = run.settings.get(f"roles.{role}.sampling.max_tokens", LONG)
    if finished.values and (cut := 1 - finished.ends[1]) > NEARLY_ALL and max_tokens not in range(LONG):
        yield (
            f"{role}: in the last iterations {cut:.0%} of the samples were cut before their end: raise "
            "sampling.max_tokens, or ask for shorter answers."
        )


def _ungraded(run: RunMetrics, role: str) -> Iterator[str]:
    """Yields a sentence if many gradings or episodes failed, whose samples were replaced or left out, and a sentence if
    any grading was cut off, which may have become the lowest score."""
    counts = Counter[str]()
    for (scope, name), curve in run.curves.items():
        start, _, reason = name.partition("/")
        if scope == role and f"{start}/" in (REPLACED, "graded/") and reason not in ("repeated", CUT_OFF):
            counts[reason] += round(sum(curve.values))
    samples = sum(run.curves.get((role, "samples"), Curve()).values)
    if counts.total() > FAILED * samples:
        reasons = ", ".join(f"{count} {reason}" for reason, count in counts.most_common() if count)
        yield (
            f"{role}: {counts.total()} gradings or episodes failed beside {samples:.0f} samples ({reasons}); failed "
            "samples were replaced or left out. Look for the warnings of the reward in the run's log."
        )
    if cut_off := round(sum(run.curves.get((role, f"graded/{CUT_OFF}"), Curve()).values)):
        yield (
            f"{role}: {cut_off} gradings were cut off by a limit or a crash beside {samples:.0f} samples, although "
            "their problems' known answers were graded in time; reward.cut_off says what became of them. Make sure "
            "that the reward's service does not hang."
        )


def _verifier(run: RunMetrics, role: str) -> Iterator[str]:
    """Yields a sentence if the verifier gives the same verdict on nearly all correct and nearly all wrong solutions."""
    accuracies = class_accuracies(run, role).values()
    if accuracies and all(curve.values for curve in accuracies):
        (_, right), (_, wrong) = (curve.ends for curve in accuracies)
        for word, share, wrong_share in (("correct", right, 1 - wrong), ("wrong", 1 - right, wrong)):
            if min(share, wrong_share) > NEARLY_ALL:
                yield (
                    f"{role}: in the last iterations the verifier calls nearly every solution {word}: {share:.0%} of "
                    f"the correct and {wrong_share:.0%} of the wrong ones. Its verdicts say nothing about the truth."
                )
