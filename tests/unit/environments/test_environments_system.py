"""System messages of agents, by Qwen2.5's own chat template (tests/golden/qwen2_5.jinja, as its tokenizer has it)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from chats import chat_tokenizer, said
from fake_engines import ScriptedEngine
from stages import credited
from toys import graded

from megatron_rl.config import plugins
from megatron_rl.config.schema import ConfigError, PromptSet, Use
from megatron_rl.data.problems import read_problems
from megatron_rl.engines.protocol import Sampling
from megatron_rl.environments.environment import Environment, EpisodeSettings
from megatron_rl.environments.episode_types import EpisodeEnd, NextRequest
from megatron_rl.training.iteration import Iteration, RolloutContext
from megatron_rl.training.prompts import read_sets
from megatron_rl.types import Prompt

TEMPLATE = (Path(__file__).parents[2] / "golden/qwen2_5.jinja").read_text()
QWEN = chat_tokenizer(TEMPLATE)
QWEN.add_special_tokens(  # as Qwen3 has them
    {
        "additional_special_tokens": [
            "<|endoftext|>",
            *(f"<{s}{n}>" for n in ("think", "tool_call", "tool_response") for s in ("", "/")),
        ]
    }
)
END = QWEN.convert_tokens_to_ids("<|im_end|>")
AGENTS, CALCULATOR = "megatron_rl.recipes.agents:Agents", "megatron_rl.contrib.calculator:Calculator"
DEFAULT = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."  # the template's own system message


class Duel(Environment):
    """Two agents hear a greeting, answer, and hear each other once. `system`: sent to the left agent."""

    system: str | None = None

    def begin(self, task, seed):
        self.said = []
        own = [] if self.system is None else [said("system", self.system)]
        return [self._move("left", *own, said("user", "go")), self._move("right", said("user", "go"))]

    def step(self, answer):
        self.said.append(answer)
        if len(self.said) == 2:
            return [self._move(each.agent, said("user", "on")) for each in self.said]
        return EpisodeEnd(rewards={agent: {"won": 1.0} for agent in ("left", "right")}) if len(self.said) == 4 else []

    def _move(self, agent, *messages):
        return NextRequest(agent=agent, role={"left": "red", "right": "blue"}[agent], messages=messages)


def context_of(*roles, says="ab"):
    def engine():
        return ScriptedEngine(lambda *_: [*QWEN(says, add_special_tokens=False)["input_ids"], END], eos=END)

    return RolloutContext(
        engines={role: engine() for role in roles}, tokenizers=dict.fromkeys(roles, QWEN),
        samplings=dict.fromkeys(roles, Sampling(max_tokens=200)), max_prompt_tokens=dict.fromkeys(roles, 5000),
        grade=graded(lambda response, payload: payload["answer"] in response),
    )  # fmt: skip


def duel(settings, payload, environment=None, *, cuts=0):
    """The texts of both agents' samples, `cuts` of which were cut."""
    context = context_of("red", "blue")
    task = Prompt(id="0/0", tokens=[1], payload={"question": "q", **payload})
    [one] = (environment or Duel()).play(context, [task], [0], context.samplings, settings)
    assert one.why == "" and one.cuts == cuts
    return [QWEN.decode(rollout.tokens) for rollout in one.rollouts]


def whole(system, *turns):
    """The template's own rendering of a conversation, up to the last turn's end."""
    messages = [said("system", system)] if system else []
    messages += [said("user" if place % 2 == 0 else "assistant", text) for place, text in enumerate(turns)]
    return QWEN.apply_chat_template(messages, tokenize=False).rstrip("\n")


def test_every_agents_of_a_role_opens_with_its_system_message():
    left, right = duel(EpisodeSettings(dialogue="chat", system={"red": "Be red.", "blue": "Be blue."}), {})
    assert left == whole("Be red.", "go", "ab", "on", "ab") and right == whole("Be blue.", "go", "ab", "on", "ab")
    assert DEFAULT not in left + right
    left, right = duel(EpisodeSettings(dialogue="chat", system={"blue": "Be blue."}), {})
    assert left == whole(DEFAULT, "go", "ab", "on", "ab") and "Be blue." in right


def test_an_environments_own_system_message_stays_and_a_problems_comes_before_the_roles():
    settings = EpisodeSettings(dialogue="chat", system={"red": "Be red.", "blue": "Be blue."})
    own = Duel()
    own.system = "Mine."
    messages = [said("developer", "The problem's."), said("user", "q")]
    for environment, first in ((own, "Mine."), (Duel(), "The problem's.")):
        left, right = duel(settings, {"messages": messages}, environment)
        assert left == whole(first, "go", "ab", "on", "ab") and right == whole("Be blue.", "go", "ab", "on", "ab")
    left, _ = duel(settings, {"messages": messages[1:]})
    assert left.startswith("<|im_start|>system\nBe red.<|im_end|>"), "the problem has a conversation without one"


def test_a_renderer_writes_the_same_beginning():
    pytest.importorskip("renderers")
    settings = EpisodeSettings(dialogue="renderers:qwen3", system={"red": "Be red."})
    *left, right, _ = duel(settings, {}, cuts=2)  # Qwen3 leaves out what was thought before
    for sample in left:  # the second one opens with the whole conversation
        assert sample.startswith(whole("Be red.", "go") + "\n<|im_start|>assistant\n")
    assert right.startswith("<|im_start|>user\ngo<|im_end|>\n"), "Qwen3 has no system message of its own"


def agents(tmp_path, **args):
    (tmp_path / "ask.txt").write_text("Q: {question}")
    task = {"tools": [{"target": CALCULATOR}], "template": str(tmp_path / "ask.txt")}
    environment = {"target": "megatron_rl.environments.tool_task:ToolTask", "args": task}
    return plugins.build(
        Use(target=AGENTS, args={"updates": 1, "group_size": 2, "dialogue": "chat", "environment": environment, **args})
    )


@pytest.mark.parametrize(
    ("data", "args", "opening"),
    [
        ({}, {"system": {"agent": "Use tools."}}, [said("system", "Use tools."), said("user", "Q: 1 + 1?")]),
        # without the text template, as in other recipes
        ({"chat": True, "system": "Be brief."}, {}, [said("system", "Be brief."), said("user", "1 + 1?")]),
        ({"chat": True, "system": "Be brief."}, {"system": {"agent": "Use tools."}},
         [said("system", "Be brief."), said("user", "1 + 1?")]),
    ],
)  # fmt: skip
def test_a_run_of_agents_puts_the_system_message_of_its_data_or_its_role(tmp_path, data, args, opening):
    (tmp_path / "data.jsonl").write_text(json.dumps({"question": "1 + 1?", "answer": "2"}) + "\n")
    recipe = agents(tmp_path, **args)
    problems = read_sets({"data": PromptSet(path=str(tmp_path / "data.jsonl"), **data)}, recipe, QWEN)["data"]
    context = context_of("agent", says="<answer>2</answer>")

    class PromptSource:
        def take(self, count=None):
            return [Prompt(id="0/0", tokens=[1], payload=problem.values) for problem in problems]

    played = credited(recipe, Iteration(cycle=0, index=0, roles=("agent",), number=0), PromptSource(), context)
    for rollout in played["agent"]:
        assert QWEN.decode(rollout.tokens[: rollout.start]) == QWEN.apply_chat_template(
            opening, tokenize=False, add_generation_prompt=True
        )
        assert rollout.rewards["outcome"] == 1.0


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"dialogue": "text"}, "recipe.args.dialogue = 'text' has no system messages: set it to chat, or write"),
        ({"agents": {"solver": 1}}, "recipe.args.system.agent = 'Be brief.': the roles of recipe.args.agents are"),
        ({"environment": {"target": "megatron_rl.environments.verifiers:Verifiers", "args": {
            "python": "python3", "environment": {"taskset": {"id": "x"}}, "agents": {"agent": "agent"}}}},
         "Verifiers makes its own conversations"),
    ],
)  # fmt: skip
def test_system_messages_that_no_agents_would_have_are_refused(tmp_path, args, says):
    with pytest.raises(ConfigError) as error:
        agents(tmp_path, system={"agent": "Be brief."}, **args)
    assert says in str(error.value)


def test_conversations_of_the_data_need_a_dialogue_that_can_put_them(tmp_path):
    (tmp_path / "data.jsonl").write_text(json.dumps({"prompt": [said("user", "1 + 1?")], "answer": "2"}) + "\n")
    sets = {"data": PromptSet(path=str(tmp_path / "data.jsonl"))}
    with pytest.raises(ConfigError, match="set it to chat, or data.chat to false"):
        read_sets(sets, agents(tmp_path, dialogue="text"), QWEN)
    assert read_sets(sets, agents(tmp_path), QWEN)["data"][0].values["messages"] == [said("user", "1 + 1?")]
    texts = {"data": PromptSet(path=str(tmp_path / "data.jsonl"), chat=False)}
    assert (
        read_problems(texts["data"])[0].values
        == read_sets(texts, agents(tmp_path, dialogue="text"), QWEN)["data"][0].values
    )
