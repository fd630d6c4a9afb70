"""Recipes, environments and tools that do not fit together: refused before the run, or at its first episode."""

from dataclasses import dataclass

import pytest
from short_episodes import WON, context_of, request
from stages import credited

from megatron_rl.config import plugins
from megatron_rl.config.schema import ConfigError, Use
from megatron_rl.environments.environment import Environment
from megatron_rl.environments.episode_types import EpisodeEnd, Tool
from megatron_rl.rewards.grading_pool import RewardFailure
from megatron_rl.training.iteration import Iteration
from megatron_rl.types import Prompt

AGENTS, ONCE = "megatron_rl.recipes.agents:Agents", "short_episodes:Once"


def agents(target=ONCE, *, env=None, **args):
    environment = {"target": target, "args": env or {}}
    given = {"updates": 1, "group_size": 2, "environment": environment, "rewards": {"won": 1.0}, **args}
    return plugins.build(Use(target=AGENTS, args=given))


def played(recipe, context):
    class PromptSource:
        def take(self, _=None):
            return [Prompt(id="0/0", tokens=[1], payload={"question": "q", "answer": "a"})]

    return credited(
        recipe, Iteration(cycle=0, index=0, roles=tuple(context.engines), number=0), PromptSource(), context
    )


@dataclass
class Pair(Environment):
    """Two agents of two roles, which it does not name before."""

    left: str = "red"
    right: str = "blue"

    def begin(self, task, seed):
        return [request(agent="l", role=self.left), request(agent="r", role=self.right)]

    def step(self, said):
        return [] if said.agent == "l" else EpisodeEnd(rewards={"l": {"won": 1.0}, "r": {"won": 0.0}})


@dataclass
class NamedPair(Pair):
    def speaking_roles(self):
        return (self.left, self.right)


KUHN, GYM = "megatron_rl.contrib.kuhn_poker:KuhnPoker", "megatron_rl.contrib.gymnasium_text:GymnasiumText"
TASK = "megatron_rl.environments.tool_task:ToolTask"
CALCULATOR = {"tools": [{"target": "megatron_rl.contrib.calculator:Calculator"}], "template": "calculator_tags"}
TANGO = "megatron_rl.recipes.tango_agents:TangoAgents"


@pytest.mark.parametrize(
    ("target", "env", "named", "says"),
    [
        (KUHN, {}, {"alice": 1, "bob": 1}, "recipe.args.agents names alice, bob, and KuhnPoker (recipe.args.environ"),
        (KUHN, {"first": "alice", "second": "bob"}, {"alice": 1}, "asks alice, bob: name the same roles in both"),
        (TASK, CALCULATOR, {"solver": 1}, "recipe.args.agents names solver, and ToolTask"),
        (TASK, CALCULATOR, {"agent": 1, "judge": 1}, "recipe.args.agents names agent, judge, and ToolTask"),
        (f"{__name__}:NamedPair", {}, {"red": 2}, "names red, and NamedPair (recipe.args.environment) asks red, blue"),
        (ONCE, {}, {"agent": 0}, "agents.agent = 0: give a value greater than or equal to 1"),
    ],
)
def test_agents_that_are_not_the_environments_are_refused_before_the_run(target, env, named, says):
    with pytest.raises(ConfigError) as error:
        agents(target, env=env, agents=named)
    assert says in str(error.value)


def test_the_generators_role_is_compared_too():
    environment = {"target": TASK, "args": CALCULATOR}
    with pytest.raises(ConfigError, match="recipe.args.role names generator, and ToolTask .* asks agent"):
        plugins.build(Use(target=TANGO, args={"environment": environment}))


def test_a_role_without_a_agents_stops_the_run_at_the_first_episode():
    with pytest.raises(ConfigError) as error:
        played(agents(f"{__name__}:Pair", agents={"red": 1}), context_of(roles=["red"], share=1.0))
    assert (
        "recipe.args.agents names red, and the environment lets agent 'r' speak with the role 'blue': name that role"
    ) in str(error.value)


def test_more_agents_than_the_recipe_says_stop_the_run_at_the_first_episode():
    pair = {"target": f"{__name__}:Pair", "env": {"right": "red"}}
    with pytest.raises(ConfigError, match="gives the role 'red' 1 in an episode, and one of .* had 2, l, r: write 2"):
        played(agents(**pair, agents={"red": 1}), context_of(roles=["red"]))
    assert len(played(agents(**pair, agents={"red": 2}), context_of(roles=["red"]))["red"]) == 4


def test_a_dialogue_that_the_tokenizer_cannot_have_stops_the_run_with_its_key():
    with pytest.raises(ConfigError, match="has no chat template"):
        played(agents(dialogue="chat"), context_of(share=1.0))


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"compared": "episode"}, "recipe.args.compared = 'episode' compares the agents of one role, and no role that"),
        ({"step_timeout_s": 0.0}, "step_timeout_s = 0.0: give a value greater than 0"),
        ({"episode_timeout_s": float("nan")}, "args.episode_timeout_s = nan: give a finite number"),
        ({"rewards": {"won": float("nan")}}, "args.rewards.won = nan: give a finite number"),
        ({"target": TASK, "env": {**CALCULATOR, "calls": "template"}, "dialogue": "chat"}, "reads no calls of tools"),
        ({"target": f"{__name__}:Bare"}, "is no environment: name a class that inherits from"),
        ({"target": TASK, "env": {**CALCULATOR, "tools": [{"target": f"{__name__}:Nameless"}]}},
         "Nameless has no name and no parameters: write them into the class"),
    ],
)  # fmt: skip
def test_arguments_that_cannot_be_played_with_are_refused(args, says):
    with pytest.raises(ConfigError) as error:
        agents(**args)
    assert says in str(error.value)


class Bare(Environment):
    """Lacks @dataclass."""

    def begin(self, task, seed):
        return [request()]

    def step(self, said):
        return WON


@dataclass
class Nameless(Tool):
    description = "It lacks a name."

    def run(self, arguments):
        return ""


def test_a_tool_that_returns_no_text_is_named(tmp_path):
    tools = [{"target": "short_episodes:Prints", "args": {"printed": 42}}]
    recipe = agents(TASK, env={**CALCULATOR, "tools": tools}, rewards={"outcome": 1.0})
    with pytest.raises(RewardFailure, match="the tool 'prints' returned 42, which is no text: return one"):
        played(recipe, context_of("<prints>x</prints>", room=5000))
