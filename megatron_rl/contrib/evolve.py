"""Multi-Agent Evolve (arXiv 2510.23595): a proposer, a solver and a judge learn from questions that the proposer
invents.
"""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Literal

from megatron_rl.algorithms.advantages import EstimatorName
from megatron_rl.config.base import Count, Share
from megatron_rl.config.schema import ConfigError
from megatron_rl.contrib.judged import JudgedAnswer, Speaker, judged_answers, marks, put, put_filled
from megatron_rl.recipes.answers import accuracies_of_fitting
from megatron_rl.recipes.solutions import check_arguments, check_length, sampling_for
from megatron_rl.rewards.role_tags import last_inside, proposal_form, tag_form
from megatron_rl.spec.run_spec import CheckedRun
from megatron_rl.texts.tags import boxed
from megatron_rl.texts.text import decode_all, fill, read_template
from megatron_rl.training.iteration import (
    CreditContext,
    Iteration,
    PromptSource,
    Recipe,
    RecipeRole,
    RolloutContext,
    RolloutsByRole,
    Schedule,
)
from megatron_rl.training.rollouts import sample
from megatron_rl.types import Prompt, Rollout

PROPOSER, SOLVER, JUDGE = "proposer", "solver", "judge"


@dataclass(kw_only=True)
class Evolve(Recipe):
    """A recipe in which every iteration trains three roles, with separate models or a shared one (`roles.X.same_as`).

    The proposer generates questions, some with reference questions from a pool in its prompt. The judge scores the
    questions. Accepted questions are added to the pool, as are the questions of the problems that an iteration takes
    from the data set. The difficulty of a question is 1 - the mean score of the solver's answers.

    The setting `practice` determines what the solver trains on. With "pool" (as in the released code), as many
    questions as there are proposals are drawn from the pool, and the solver trains on one answer to each of them. With
    "proposed", the solver trains on its answers to the accepted questions. In both cases, the judge trains on its
    judgements of the answers that the solver trains on.
    """

    updates: Count  # number of updates in the run
    proposals: Count = 1  # number of proposals per problem that an iteration takes from the data set
    answers: Count = 5  # number of solver answers per accepted question, to measure its difficulty
    judgements: Count = 5  # number of judgements of each proposed question, and of each of the solver's `answers`
    practice: Literal["pool", "proposed"] = "pool"  # questions on which the solver and the judge are trained
    reference_share: Share = 0.5  # share of proposals with reference questions in the prompt
    references: Count = 1  # number of reference questions in a prompt that has reference questions
    least_quality: Share = 0.7  # minimum mean score from the judge for a question to be accepted
    pool_size: Count = 4096  # maximum number of questions in the pool; the oldest are removed first
    estimator: EstimatorName = (
        "reinforce_pp"  # a name in algorithms.estimators, or module:name; applied to each role's batch
    )
    proposer_template: str = "evolve_proposer"  # a text file or the name of a packaged prompt, as for all templates
    reference_template: str = "evolve_proposer_reference"  # template with {references}
    solver_template: str = "evolve_solver"  # template with {question}
    question_template: str = "evolve_judge_question"  # template with {question}
    answer_template: str = "evolve_judge_answer"  # template with {question}, {answer}

    def __post_init__(self) -> None:
        templates = {"proposer_template": [], "reference_template": ["references"], "solver_template": ["question"]}
        templates |= {"question_template": ["question"], "answer_template": ["question", "answer"]}
        check_arguments(self, templates=templates)
        self._templates = {name: read_template(vars(self)[name]) for name in templates}
        self._pool: list[str] = []  # the pool: distinct questions, oldest first

    def roles(self) -> Mapping[str, RecipeRole]:
        n, tried, pooled = self.proposals, self.proposals * self.answers, self.proposals * (self.practice == "pool")
        samples = {PROPOSER: n, SOLVER: pooled or tried, JUDGE: pooled or tried * self.judgements}
        drawn = {PROPOSER: n, SOLVER: tried + pooled, JUDGE: (n + tried) * self.judgements + pooled}
        return {role: RecipeRole(samples=count, drawn=drawn) for role, count in samples.items()}

    def schedule(self) -> Schedule:
        return [[(PROPOSER, SOLVER, JUDGE)]] * self.updates

    def prompt(self, payload: Mapping[str, Any]) -> str:
        return fill(self._templates["reference_template"], references=str(payload["question"]))

    def check(self, run: CheckedRun) -> None:
        check_length(run, PROPOSER, "proposer_template", self._templates["proposer_template"])

    def reads_answers(self) -> Mapping[str, str]:
        return dict.fromkeys((SOLVER,), "the judge reads answers without thoughts")

    def rollout(self, iteration: Iteration, source: PromptSource, context: RolloutContext) -> RolloutsByRole:
        seeds, rng = source.take(), random.Random(context.seed_for(iteration.number, "pool"))
        known_questions = self._pool_with(new := [str(seed.payload["question"]) for seed in seeds])
        count = len(seeds) * self.proposals
        pool = dict(enumerate(rng.sample(known_questions, min(count, len(known_questions)))))
        prompts = [self._proposer_prompt(context, known_questions, rng) for _ in range(count)]
        speaker = self._speaker(iteration, context, PROPOSER, "proposed", 1)
        proposed = sample(context, PROPOSER, prompts, speaker.sampling)
        texts = decode_all(context.tokenizers[PROPOSER], [rollout.response for rollout in proposed])
        questions = {i: question for i, text in enumerate(texts) if (question := last_inside(text, "question"))}
        quality = marks(context, self._speaker(iteration, context, JUDGE, "questions", self.judgements), questions)
        accepted = {i: questions[i] for i, mark in quality.items() if mark >= self.least_quality}
        tried = self._answers(iteration, context, "tried", accepted)
        practised = tried if self.practice == "proposed" else self._answers(iteration, context, "pool", pool)
        context.handed_over["questions"] = [*new, *accepted.values()]
        difficulty = {i: 1.0 - fmean(scores) for i in accepted if (scores := _scores(tried, i))}
        proposals = [
            self._proposal(rollout, text, quality.get(i), difficulty.get(i))
            for i, (rollout, text) in enumerate(zip(proposed, texts, strict=True))
            # a proposal is left out if its question, or all answers to its question, could not be judged
            if i not in questions or i in difficulty or (i in quality and i not in accepted)
        ]
        metrics = {"questions": len(questions), "accepted": len(accepted)}
        metrics["unjudged"] = len(proposed) - len(proposals)
        context.add_metrics(PROPOSER, {name: float(number) for name, number in metrics.items()})
        solutions = [_solution(answer) for answer in practised if answer.scores]
        context.add_metrics(SOLVER, {"unjudged": float(len(practised) - len(solutions))})
        judgements = [_judgement(context, rollout) for answer in practised for rollout in answer.judgements]
        parts = {PROPOSER: proposals, SOLVER: solutions, JUDGE: judgements}
        # all rollouts of a role form one group
        return {role: [replace(rollout, group=role) for rollout in rollouts] for role, rollouts in parts.items()}

    def credit(self, iteration: Iteration, rollouts: RolloutsByRole, context: CreditContext) -> RolloutsByRole:
        self._pool = self._pool_with(context.handed_over["questions"])
        context.add_metrics(PROPOSER, {"pool": float(len(self._pool))})
        return super().credit(iteration, rollouts, context)

    def reward(self, role: str) -> str:
        return "form" if role == JUDGE else "total"

    def evaluate(self, prompts: Sequence[Prompt], context: RolloutContext) -> dict[str, float]:
        """Evaluates the solver on the problems whose prompt is not too long. The metric solver/too_long is the number
        of problems whose prompt is too long.
        """
        texts = [fill(self._templates["solver_template"], question=str(p.payload["question"])) for p in prompts]
        solver_prompts = [put(context, SOLVER, text) for text in texts]
        return accuracies_of_fitting(context, SOLVER, prompts, solver_prompts)

    def state_dict(self) -> dict[str, Any]:
        return {"pool": list(self._pool)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._pool = list(state["pool"])[-self.pool_size :]

    def _pool_with(self, questions: Iterable[str]) -> list[str]:
        """Returns the pool after adding questions. If the pool is full, the oldest questions are left out."""
        return list(dict.fromkeys([*self._pool, *questions]))[-self.pool_size :]

    def _speaker(self, iteration: Iteration, context: RolloutContext, role: str, purpose: str, n: int) -> Speaker:
        """Returns the Speaker of a role (prompt and sampling settings) for one purpose in an iteration. Each purpose
        has a separate random seed. Log-probs are requested only for samples that are trained on.
        """
        name = "solver" if role == SOLVER else "question" if purpose == "questions" else "answer"
        seed = context.seed_for(iteration.number, role, purpose)
        base = replace(sampling_for(context, iteration, role, n), seed=seed)
        sampling = replace(base, logprobs=purpose in ("proposed", "pool" if self.practice == "pool" else "tried"))

        def ask(question: str, text: str = "") -> Prompt | None:
            template = self._templates[f"{name}_template"]
            return put_filled(context, role, template, question=question, answer=boxed(text) or text)

        return Speaker(role=role, sampling=sampling, ask=ask)

    def _answers(
        self, iteration: Iteration, context: RolloutContext, purpose: str, questions: Mapping[int, str]
    ) -> list[JudgedAnswer]:
        n, votes = (self.answers, self.judgements) if purpose == "tried" else (1, 1)
        solver, judge = (
            self._speaker(iteration, context, role, purpose, k) for role, k in ((SOLVER, n), (JUDGE, votes))
        )
        return judged_answers(context, solver, judge, questions)

    def _proposer_prompt(self, context: RolloutContext, pool: Sequence[str], rng: random.Random) -> Prompt:
        """Returns a prompt for the proposer. Whether the prompt contains reference questions, and which ones, is a
        random choice. If the prompt with reference questions is too long, returns the prompt without them.
        """
        shown = rng.sample(pool, min(self.references, len(pool)))
        text = fill(self._templates["reference_template"], references="\n\n".join(shown))
        prompt = put(context, PROPOSER, text) if rng.random() < self.reference_share else None
        prompt = prompt or put(context, PROPOSER, self._templates["proposer_template"])
        if prompt is None:
            limit = context.max_prompt_tokens[PROPOSER]
            raise ConfigError(f"roles.{PROPOSER}.max_prompt_tokens = {limit}: recipe.args.proposer_template is longer")
        return prompt

    @staticmethod
    def _proposal(rollout: Rollout, text: str, quality: float | None, difficulty: float | None) -> Rollout:
        """Assigns a proposal the mean of quality, difficulty and format score as reward. A question that was not
        accepted has difficulty 0, and a proposal without a question has the reward 0.
        """
        parts = (quality, difficulty or 0.0, proposal_form(text)) if quality is not None else (0.0, 0.0, 0.0)
        rewards = dict(zip(("quality", "difficulty", "form"), parts, strict=True))
        return rollout.with_rewards(total=sum(parts) / 3, **rewards)


def _scores(answers: Sequence[JudgedAnswer], question: int) -> list[float]:
    return [score for answer in answers if answer.question == question for score in answer.scores]


def _solution(answer: JudgedAnswer) -> Rollout:
    score, form = fmean(answer.scores), tag_form(answer.text, "answer")
    return answer.rollout.with_rewards(total=0.5 * score + 0.5 * form, score=score, form=form)


def _judgement(context: RolloutContext, rollout: Rollout) -> Rollout:
    [text] = decode_all(context.tokenizers[JUDGE], [rollout.response])
    return rollout.with_rewards(form=tag_form(text, "score"))
