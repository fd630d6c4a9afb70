"""Rewards that a run of agents counts, and that its environment does not give; metrics of roles that learn nothing."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from fake_engines import ScriptedEngine
from stages import credited
from toys import EOS, characters, graded

from megatron_rl.config import plugins
from megatron_rl.config.schema import Use
from megatron_rl.engines.protocol import Sampling
from megatron_rl.environments.environment import Environment
from megatron_rl.environments.episode_types import EpisodeEnd, NextRequest
from megatron_rl.rewards.grading_pool import RewardFailure
from megatron_rl.training.iteration import Iteration, RolloutContext
from megatron_rl.types import Prompt

TEXT = characters()
AGENTS = ("player", "umpire")


@dataclass
class Game(Environment):
    """The player speaks, then the umpire. The player's reward is called `name`, and forgotten in the problems that
    `without` names."""

    name: str = "won"
    without: str = ""

    def begin(self, task, seed):
        self.forgets = str(task["question"]) in self.without.split()
        return [self._move("player", "go ")]

    def step(self, said):
        if said.agent == "player":
            return [self._move("umpire", said.text)]
        rewards = {"player": {} if self.forgets else {self.name: 1.0}}
        return EpisodeEnd(rewards=rewards, answers={"player": "ab"} if self.name == "answers" else {})

    def _move(self, agent, text):
        return NextRequest(agent=agent, role=agent, messages=[{"role": "user", "content": text}])


def agents(rewards=None, **args):
    given = {} if rewards is None else {"rewards": rewards}
    return plugins.build(
        Use(
            target="megatron_rl.recipes.agents:Agents",
            args={
                "updates": 1, "group_size": 2, "agents": dict.fromkeys(AGENTS, 1), "trained": ["player"], **given,
                "environment": {"target": f"{__name__}:Game", "args": args},
            },
        )
    )  # fmt: skip


def context_of(share):
    def engine():
        return ScriptedEngine(lambda *_: [*TEXT("ab", add_special_tokens=False)["input_ids"], EOS], eos=EOS)

    return RolloutContext(
        engines={agent: engine() for agent in AGENTS}, tokenizers=dict.fromkeys(AGENTS, TEXT),
        samplings=dict.fromkeys(AGENTS, Sampling(max_tokens=9)), max_prompt_tokens=dict.fromkeys(AGENTS, 99),
        grade=graded(lambda response, payload: response == "ab"), max_failure_share=share,
    )  # fmt: skip


def problems(count):
    return [Prompt(id=f"0/{i}", tokens=[1], payload={"question": f"q{i}", "answer": "a"}) for i in range(count)]


def played(recipe, context, count=3):
    class PromptSource:
        def take(self, _=None):
            return problems(count)

    return credited(recipe, Iteration(cycle=0, index=0, roles=("player",), number=0), PromptSource(), context)["player"]


def test_a_run_whose_environment_leaves_nothing_to_grade_is_told_what_to_return_or_to_name():
    with pytest.raises(RewardFailure) as error:
        played(agents(), context_of(0.05))
    assert "6 of 6 episodes failed (0 time-outs, 6 errors)" in str(error.value)
    assert (
        "agent 'player' has no reward 'outcome', only 'won': return a text for it in EpisodeEnd.answers, which becomes "
        "'outcome', or name others in recipe.args.rewards"
    ) in str(error.value)
    with pytest.raises(
        RewardFailure, match="no reward 'lost', only 'won': return it in EpisodeEnd.rewards, or name others"
    ):
        played(agents({"won": 1.0, "lost": 1.0}), context_of(0.05))


def test_an_episode_that_forgot_a_reward_is_no_sample_and_no_reward_of_0():
    context = context_of(1.0)
    found = played(agents({"won": 1.0}, without="q1"), context)
    assert [r.payload["question"] for r in found] == ["q0", "q0", "q2", "q2"]
    assert context.metrics["player"]["episodes/error"] == 2.0
    [known] = {r.rewards["won"] for r in played(agents({"won": 1.0}), context_of(0.0))}
    assert known == 1.0
    assert {r.rewards["outcome"] for r in played(agents(name="answers"), context_of(0.0))} == {1.0}


def test_evaluations_measure_roles_that_learn_and_pass_over_others_without_rewards():
    metrics = agents({"won": 1.0}).evaluate(problems(2), context_of(0.0))
    assert metrics == {
        "player/won": 1.0, "player/won_greedy": 1.0,
        "episodes/answers": 2.0, "episodes/answers_greedy": 2.0,
    }  # fmt: skip


def test_evaluations_count_agents_of_failed_episodes_as_ungraded_with_the_reward_0():
    metrics = agents({"won": 1.0}, without="q1").evaluate(problems(4), context_of(1.0))
    assert {name: value for name, value in metrics.items() if name.startswith("player/")} == {
        "player/won": 0.75, "player/won_greedy": 0.75,
        "player/ungraded": 1.0, "player/ungraded_greedy": 1.0,
    }  # fmt: skip
