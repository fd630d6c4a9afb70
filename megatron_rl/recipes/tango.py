"""Tango (arXiv 2505.15034): a generator and a generative verifier, trained alternately on each other's
current outputs.
"""

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal

from megatron_rl.algorithms.advantages import EstimatorName, StepCredit, assign_advantages
from megatron_rl.algorithms.class_weights import ClassCounts, ClassWeights
from megatron_rl.algorithms.estimators import GAE, word_of
from megatron_rl.algorithms.gae import mix_steps
from megatron_rl.algorithms.schedules import WeightSchedule, step_weight
from megatron_rl.config.base import Count, CountOrZero, Decay, NotNegative, PositiveShare, Share, refuse
from megatron_rl.config.plugins import find_function
from megatron_rl.engines.protocol import Sampling
from megatron_rl.recipes import solutions as base
from megatron_rl.recipes.answers import accuracies, answer_metrics
from megatron_rl.recipes.critics import Critics, WithCritics
from megatron_rl.recipes.held_out import BalancedSet, measure_reviewer
from megatron_rl.recipes.review import Judged, Reviewed, Reviewer, Reviews, review_metrics, with_verdicts
from megatron_rl.recipes.reward_model import RewardModel
from megatron_rl.recipes.solutions import GENERATOR, VERIFIER, Solution, Then, pass_over, sampling_for
from megatron_rl.spec.run_spec import CheckedRun
from megatron_rl.texts.text import read_template
from megatron_rl.training.iteration import (
    CreditContext,
    Iteration,
    PromptSource,
    RecipeRole,
    RolloutContext,
    RolloutsByRole,
    Schedule,
    Score,
)
from megatron_rl.training.rollouts import mean_reward, without_signal
from megatron_rl.types import STEP, Outcome, Prompt, Rollout

SIGNAL_DECAY = 0.8  # decay factor of the moving average of the share of groups whose outcomes differ


@dataclass(kw_only=True)
class BaseTango(WithCritics):
    """A recipe that first warms up the verifier, then cycles through generator iterations and verifier iterations.

    A role with train_generator or train_verifier false is frozen: it still generates, and the iterations of the other
    role stay the same. A frozen verifier has no warm-up. Subclasses define what the generator generates.
    """

    generator_updates: Count = 300  # number of generator updates after all warm-ups
    # Number of generator updates before the verifier's warm-up. In these updates, advantages come from outcomes only,
    # and no solution is verified.
    generator_warmup_updates: CountOrZero = 0
    warmup_updates: CountOrZero = 40  # verifier updates before the first cycle
    initial_mode: Literal["generator", "verifier"] = "generator"  # role that is trained first in each cycle
    generator_iterations: Count = 3  # generator iterations per cycle
    verifier_iterations: CountOrZero = 1  # verifier iterations per cycle; for the last cycle see `schedule`
    group_size: Count = 5  # solutions per problem in a generator iteration
    # number of verifications per solution in a verifier iteration, which samples one solution per problem
    verifications: Count = 5
    alpha_start: Share = 0.1  # alpha, the weight of the step advantages, at the first generator update
    alpha_min: Share = 1e-3
    # How alpha changes. none: alpha is not used, and an advantage is
    # outcome_weight * (outcome advantage) + process_weight * (step advantage).
    alpha_schedule: WeightSchedule | Literal["none"] = "exponential"
    # share of generator_updates after which alpha reaches alpha_min, with the exponential schedule
    exp_target_frac: PositiveShare = 1.0
    outcome_weight: NotNegative = 1.0  # weight of the outcome advantages; only for alpha_schedule = none
    process_weight: NotNegative = 1.0  # weight of the step advantages; only for alpha_schedule = none
    step_credit: StepCredit = StepCredit()  # which tokens get a step's reward, and what the reward is compared with
    reviewed: Reviewed = "all"  # which groups of a generator iteration are verified, see Reviews
    # Upper bound of the moving average of the share of groups whose outcomes differ; null: no bound.
    # Solutions of generator iterations are verified only while this moving average is below review_below.
    review_below: Share | None = None
    # if True, verifier iterations are skipped while solutions of generator iterations are not verified
    verifier_rests: bool = False
    greedy_verdicts: bool = False  # if True, the verifier decodes greedily in generator iterations
    # a name in algorithms.estimators or module:name, or {target, args}; gae: each trained role has a critic
    estimator: EstimatorName = "grpo"
    format_weight: float = 0.8  # gamma: weight of the format score in the verifier's reward
    correctness_weight: float = 1.0  # weight of the agreement with the outcome in the verifier's reward
    class_weight_decay: Decay = 0.8  # decay factor of the counts for class_weights
    # Weight of a verification in the verifier's update. sqrt_inverse: 1 / sqrt(count). inverse: 1 / count. off: equal
    # weights. count is the moving average of the number of solutions of the same class (correct or wrong) per batch.
    class_weights: ClassWeights = "sqrt_inverse"
    train_generator: bool = True
    train_verifier: bool = True
    verifier_template: str = "tango_verifier"  # template with {question}, {solution}, {num_steps}
    # module:name of a function (step texts, payload) -> gold labels; used only for metrics
    step_labels: str | None = None
    # Number of correct and of wrong solutions on which the verifier is evaluated, the same ones in every evaluation. 0:
    # the verifier is evaluated on the solutions that the generator writes in the same evaluation.
    balanced_per_class: CountOrZero = 128
    balanced_rounds: Count = 8  # maximum number of samples per held-out problem to find balanced_per_class solutions

    def __post_init__(self) -> None:
        templates = {"verifier_template": ["question", "solution"]}
        base.check_arguments(self, groups=["group_size", "verifications"], templates=templates, critics=True)
        refuse(*self.problems())
        trained = {self.solver: self.train_generator, VERIFIER: self.train_verifier}
        self._critics = Critics.of(self.estimator, {role: f"{role}_critic" for role in trained if trained[role]})
        if not self._critics.critic_of:  # test call: raises ConfigError for an invalid estimator or alpha
            assign_advantages([], reward="outcome", estimator=self.estimator, alpha=self._alpha(0))
        self._counts = ClassCounts()
        self._signal = 0.0  # moving average of the share of groups whose outcomes differ, in generator iterations
        self._labels = None if self.step_labels is None else find_function(self.step_labels)
        template = read_template(self.verifier_template)
        self._reviewer = Reviewer(VERIFIER, template, self.format_weight, self.correctness_weight)
        self._balanced = BalancedSet(self.solver, self.balanced_per_class, self.balanced_rounds, self.draw)

    def problems(self) -> Iterator[str]:
        """Yields an error message for each contradiction between the arguments."""
        if not (self.train_generator or self.train_verifier):
            yield "recipe.args: train_generator and train_verifier are both false; set one to true"
        if self.verifier_rests and not self.review_below:
            text = "the verifier rests by review_below, which is not above 0; give it, or verifier_rests: false"
            yield f"recipe.args.verifier_rests: {text}"
        mixed = self.alpha_schedule != "none"
        weights = f"recipe.args.outcome_weight = {self.outcome_weight}, process_weight = {self.process_weight}"
        if mixed and (self.outcome_weight, self.process_weight) != (1.0, 1.0):
            yield f"{weights} with alpha_schedule = {self.alpha_schedule!r}: set it to none, or leave the weights out"
        if not mixed and not self.outcome_weight + self.process_weight:
            yield f"{weights}: set one of them above 0"
        if not mixed and word_of(self.estimator) == GAE:
            yield "recipe.args.alpha_schedule = 'none' with the estimator gae, which mixes by alpha: name a schedule"

    @property
    def solver(self) -> str:
        """The name of the generator's role."""
        return GENERATOR

    @abstractmethod
    def draw(
        self, context: RolloutContext, prompts: Sequence[Prompt], sampling: Sampling, then: Then = pass_over
    ) -> tuple[Sequence[Solution], dict[str, float]]:
        """Samples `sampling.n` solutions of each problem and grades them. Returns the graded solutions in order, and
        metrics. `then`: callback, called with a solution's index and the solution as soon as the solution is graded.
        """
        ...

    @abstractmethod
    def measure(
        self, context: RolloutContext, prompts: Sequence[Prompt]
    ) -> tuple[dict[str, float], Sequence[Solution]]:
        """Evaluates the generator on held-out problems. Returns metrics, and the sampled solutions."""
        ...

    def needs_correct(self) -> str:
        return "Tango's verifier"

    def roles(self) -> Mapping[str, RecipeRole]:
        n, k = self.group_size, self.verifications
        generator = RecipeRole(
            trained=self.train_generator, samples=n, drawn={self.solver: n, VERIFIER: n},
            per_prompt={self.solver: n, VERIFIER: 1},
        )  # fmt: skip
        verifier = RecipeRole(
            trained=self.train_verifier, samples=k, drawn={self.solver: 1, VERIFIER: k}, per_prompt={VERIFIER: k}
        )
        return self._critics.roles({self.solver: generator, VERIFIER: verifier})

    def schedule(self) -> Schedule:
        """Returns the warm-up cycles and the training cycles. 300 generator updates with 3 per cycle are 100 cycles. A
        last cycle with fewer generator iterations has no verifier iteration, unless cycles begin with verifier
        iterations.
        """
        cycles = [[(self.solver,)]] * (self.generator_warmup_updates if self.train_generator else 0)
        cycles += [[(VERIFIER,)]] * (self.warmup_updates if self.train_verifier else 0)
        verifier_first = self.initial_mode == "verifier"
        for done in range(0, self.generator_updates, self.generator_iterations):
            updates = min(self.generator_iterations, self.generator_updates - done)
            others = self.verifier_iterations if updates == self.generator_iterations or verifier_first else 0
            halves = [(self.solver,)] * updates * self.train_generator, [(VERIFIER,)] * others * self.train_verifier
            cycles.append([*halves[verifier_first], *halves[not verifier_first]])
        return self._critics.schedule([cycle for cycle in cycles if cycle])

    def rollout(self, iteration: Iteration, source: PromptSource, context: RolloutContext) -> RolloutsByRole:
        """Samples, for each problem, a group of solutions with one verification each (generator iteration), or one
        solution with a group of verifications (verifier iteration). A verifier iteration that is skipped takes no
        problems from `source`.
        """
        if iteration.role != self.solver and self.verifier_rests:
            context.add_metrics(VERIFIER, {"rests": float(self._outcomes_suffice())})
            if self._outcomes_suffice():
                return {VERIFIER: []}
        n, verifications = (self.group_size, 1) if iteration.role == self.solver else (1, self.verifications)
        review = sampling_for(context, iteration, VERIFIER, verifications)
        if iteration.role == self.solver and self.greedy_verdicts:
            review = replace(review, temperature=0.0)
        sampling = sampling_for(context, iteration, self.solver, n)
        asking = Reviews(self._reviewer, context, review, reviewed=self._reviewed(iteration), size=n)
        solutions, metrics = self.draw(context, source.take(), sampling, asking.add)
        judged = asking.finish()
        written = metrics.get("tokens_drawn", float(sum(s.rollout.length for s in solutions)))
        answers = {id(v.completion): len(v.completion.tokens) for group in judged for v in group}
        metrics = {**metrics, "tokens_drawn": written + sum(answers.values())}
        context.add_metrics(iteration.role, metrics | review_metrics(judged, self._labels, asking.skipped))
        if iteration.role != self.solver:
            context.add_metrics(VERIFIER, {"reward/outcome": mean_reward([s.rollout for s in solutions], "outcome")})
            rows = [verification for group in judged for verification in group]
            context.handed_over["labels"] = [row.item.correct for row in rows]
            return {VERIFIER: [self._reviewer.rollout(context, row) for row in rows]}
        # Hand over, for each solution, whether it was verified. None means that all solutions can get step advantages.
        everywhere = self._reviewed(iteration) == "all"
        context.handed_over["reviewed"] = None if everywhere else [bool(verifications) for verifications in judged]
        verified = self.verified(context, solutions, judged)
        return {self.solver: [part for s, r in zip(solutions, verified, strict=True) for part in s.to_train(r)]}

    def verified(self, context: RolloutContext, solutions: Sequence[Solution], judged: Judged) -> list[Rollout]:
        """Returns the rollout of each solution of a generator iteration, with a reward on each verified step."""
        return [with_verdicts(s.rollout, group, self.step_credit) for s, group in zip(solutions, judged, strict=True)]

    def credit(self, iteration: Iteration, rollouts: RolloutsByRole, context: CreditContext) -> RolloutsByRole:
        if iteration.role == self.solver:
            return self._credit_solutions(iteration, rollouts, context)
        return self._credit_reviews(iteration, rollouts, context)

    def evaluate(self, prompts: Sequence[Prompt], context: RolloutContext) -> dict[str, float]:
        """Evaluates both roles. The verifier is evaluated on a fixed set with equal numbers of correct and wrong
        solutions. The first call creates the set, and checkpoints store it. With balanced_per_class 0, the verifier is
        evaluated on the solutions of this evaluation, and the metrics best_of_n and vote_of_n select among these
        solutions by the verifier's verdicts.
        """
        metrics, solutions = self.measure(context, prompts)
        if not self.balanced_per_class:
            metrics_of_verifier, opinions = measure_reviewer(context, self._reviewer, solutions, self._labels)
            answers = context.answers.get(self.solver, [])
            graded = [row for group in answers for row in group if row["outcome"] == Outcome.SCORE.value]
            sure = dict(zip(map(id, graded), opinions, strict=True)) if answers else {}
            for row in (row for group in answers for row in group):
                row["confidence"], row["verification"] = sure.get(id(row), (0.0, ""))
            answer_metrics_of_solver = answer_metrics(self.solver, answers, context.evaluation.k) if answers else {}
            return metrics | answer_metrics_of_solver | metrics_of_verifier
        return metrics | self._balanced.metrics(context, self._reviewer, prompts, solutions, self._labels)

    def state_dict(self) -> dict[str, Any]:
        return {"counts": asdict(self._counts), "signal": self._signal, **super().state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._counts, self._signal = ClassCounts(**state["counts"]), float(state["signal"])
        super().load_state_dict(state)

    def _reviewed(self, iteration: Iteration) -> Reviewed | None:
        """Returns which groups of solutions are verified in an iteration; None if no group is verified."""
        if iteration.role != self.solver:
            return "all"
        warm = iteration.update(self.solver) < self.generator_warmup_updates
        return None if warm or self._outcomes_suffice() else self.reviewed

    def _outcomes_suffice(self) -> bool:
        return self.review_below is not None and self._signal >= self.review_below

    def _credit_solutions(
        self, iteration: Iteration, rollouts: RolloutsByRole, context: CreditContext
    ) -> RolloutsByRole:
        """Assigns advantages to the solutions of a generator iteration. Outcome and step advantages are mixed with the
        weight alpha if a solution has one verdict per step. Groups that are not verified get outcome advantages only.
        With a critic, the outcome advantages are computed from the critic's values.
        """
        alpha = self._alpha(iteration.update(self.solver) - self.generator_warmup_updates)
        solutions = self.whole_solutions(rollouts[self.solver])
        context.add_metrics(self.solver, {"alpha": alpha, "signal": self._signal})
        reviewed = context.handed_over["reviewed"] or [True] * len(solutions)
        alphas = [alpha * counts for counts in reviewed]
        self._follow(solutions)
        if self._critics.critic_of:
            mix = partial(mix_steps, alpha=alphas, steps=self.step_credit)
            read = {self.solver: solutions}
            by_role = self._critics.credit(iteration, read, context, reward=self.reward(self.solver), finish=mix)
            # a role whose critic warms up has no rollouts to train on
            return {
                r: self.share_credit(credit, rollouts[self.solver]) if credit else [] for r, credit in by_role.items()
            }
        # With alpha_schedule none, alpha is process_weight / total. Mixed advantages are then multiplied by total.
        # Outcome advantages without step advantages are not multiplied, as in Tango's released code.
        total = self.outcome_weight + self.process_weight if self.alpha_schedule == "none" else 1.0
        scored = any(s.annotations_of(STEP).scores is not None for s in solutions)
        credited = assign_advantages(
            solutions,
            reward=self.reward(self.solver),
            estimator=self.estimator,
            alpha=alphas,
            steps=self.step_credit,
            weights=[total if scored and counts else 1.0 for counts in reviewed],
        )
        return {self.solver: self.share_credit(credited, rollouts[self.solver])}

    def whole_solutions(self, rollouts: Sequence[Rollout]) -> Sequence[Rollout]:
        """Returns one rollout per solution, for which advantages are computed. Differs from `rollouts` in a recipe that
        trains on several rollouts per solution.
        """
        return rollouts

    def share_credit(self, credited: Sequence[Rollout], rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Returns the rollouts to train on. Each rollout gets the advantages of its solution. `credited`: one rollout
        per solution with advantages (see `whole_solutions`). `rollouts`: the rollouts that need advantages.
        """
        return [*credited]

    def _follow(self, solutions: Sequence[Rollout]) -> None:
        """Updates the moving average of the share of problems whose solutions have different outcomes. Problems with
        only one graded solution are ignored.
        """
        sizes = Counter(solution.group for solution in solutions)
        compared = [solution for solution in solutions if sizes[solution.group] > 1]
        if compared:
            self._signal += (1 - SIGNAL_DECAY) * (self._share_with_signal(compared) - self._signal)

    def _share_with_signal(self, solutions: Sequence[Rollout]) -> float:
        """Returns the share of an iteration's problems whose solutions have different outcomes."""
        return 1 - without_signal(solutions, "outcome")

    def _alpha(self, update: int) -> float:
        """Returns the weight of the step advantages at the generator update with the index `update` after the warm-up,
        and 0 in the warm-up.
        """
        if update < 0:
            return 0.0
        if self.alpha_schedule == "none":
            return self.process_weight / (self.outcome_weight + self.process_weight)
        share = self.exp_target_frac if self.alpha_schedule == "exponential" else 1.0
        total = share * self.generator_updates
        return step_weight(self.alpha_schedule, update, start=self.alpha_start, floor=self.alpha_min, total=total)

    def _credit_reviews(self, iteration: Iteration, rollouts: RolloutsByRole, context: CreditContext) -> RolloutsByRole:
        """Assigns advantages to verifications: compares the verifications of the same solution, or uses the critic's
        values. Class weights increase the influence of solutions with the rarer outcome (arXiv 2505.15034, eq. 9).
        """
        labels = context.handed_over.get("labels", ())  # for each verification, whether its solution is correct
        self._counts = self._counts.updated(labels, self.class_weight_decay)
        weights = self._counts.weights(labels, self.class_weights)
        if self._critics.critic_of:
            return self._critics.credit(iteration, rollouts, context, reward="verifier", weights=weights)
        credited = assign_advantages(rollouts[VERIFIER], reward="verifier", estimator=self.estimator, weights=weights)
        return {VERIFIER: credited}


@dataclass(kw_only=True)
class Tango(BaseTango):
    """Tango with the paper's settings. A solution is one text with its steps between tags."""

    generator_template: str = "tango_generator"  # text file with {question}, or name of a packaged prompt
    reward_model: RewardModel = RewardModel()  # mix the score of a reward model with the outcome of solutions
    generator_format_weight: float = 0.0  # weight of the format score in the generator's reward, added to the outcome
    # Weight of the graded outcome; the verifier's final verdict has the weight 1 - ground_truth_weight. A verdict that
    # is missing or cannot be parsed is replaced by the graded outcome.
    ground_truth_weight: Share = 1.0

    def __post_init__(self) -> None:
        base.check_arguments(self, templates={"generator_template": ["question"]}, critics=True)
        super().__post_init__()

    def roles(self) -> Mapping[str, RecipeRole]:
        return self.reward_model.roles(super().roles())

    def check(self, run: CheckedRun) -> None:
        super().check(run)
        self.reward_model.check(self, run, GENERATOR)
        if self.reward_model.step_weight:
            refuse(
                f"recipe.args.reward_model.step_weight = {self.reward_model.step_weight}: Tango's verifier scores the "
                "steps already; set it to 0, or take the recipe Dapo or Ppo"
            )

    def rollout(self, iteration: Iteration, source: PromptSource, context: RolloutContext) -> RolloutsByRole:
        rollouts = super().rollout(iteration, source, context)
        return {**rollouts, **self.reward_model.texts(context, rollouts.get(GENERATOR, ()), self.prompt)}

    def scores(self, iteration: Iteration) -> Sequence[Score]:
        scores = self.reward_model.scores if iteration.role == GENERATOR else []
        return [*scores, *super().scores(iteration)]

    def credit(self, iteration: Iteration, rollouts: RolloutsByRole, context: CreditContext) -> RolloutsByRole:
        return super().credit(iteration, self.reward_model.scored(rollouts, GENERATOR), context)

    def reward(self, role: str) -> str | Mapping[str, float]:
        weights = dict(self.reward_model.weights)
        if self.ground_truth_weight < 1:
            weights["verdict"] = weights["outcome"] * (1 - self.ground_truth_weight)
            weights["outcome"] *= self.ground_truth_weight
        return weights | ({"format": self.generator_format_weight} if self.generator_format_weight else {})

    def verified(self, context: RolloutContext, solutions: Sequence[Solution], judged: Judged) -> list[Rollout]:
        rollouts = super().verified(context, solutions, judged)
        if not self.generator_format_weight and self.ground_truth_weight == 1:
            return rollouts
        verdicts = [verifications[0].opinion.final if verifications else None for verifications in judged]
        return [
            replace(r, rewards={
                **r.rewards, "format": s.form, "verdict": r.rewards["outcome"] if final is None else float(final),
            })
            for r, s, final in zip(rollouts, solutions, verdicts, strict=True)
        ]  # fmt: skip

    def prompt(self, payload: Mapping[str, Any]) -> str:
        return base.question_text(self.generator_template, payload)

    def draw(
        self, context: RolloutContext, prompts: Sequence[Prompt], sampling: Sampling, then: Then = pass_over
    ) -> tuple[Sequence[Solution], dict[str, float]]:
        return base.solve(context, GENERATOR, prompts, sampling, then)

    def measure(
        self, context: RolloutContext, prompts: Sequence[Prompt]
    ) -> tuple[dict[str, float], Sequence[Solution]]:
        return accuracies(context, GENERATOR, prompts)
