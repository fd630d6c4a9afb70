"""The adapter of gymnasium's environments, against the environments themselves."""

import copy
import random
import sys

import pytest

from megatron_rl.config import plugins
from megatron_rl.config.base import ConfigError, Use
from megatron_rl.environments.episode_types import EpisodeEnd, Said
from megatron_rl.types import Stop

TARGET = "megatron_rl.contrib.gymnasium_text:GymnasiumText"


def adapter(id, **args):
    pytest.importorskip("gymnasium")
    return plugins.build(Use(target=TARGET, args={"id": id, **args}))


@pytest.fixture
def guessing():
    """Registers a world of the test's own: the agent says words, and the world repeats them until one is `stop`."""
    gymnasium = pytest.importorskip("gymnasium")

    class Repeating(gymnasium.Env):
        def __init__(self, render_mode=None, worth=1.0):
            self.action_space = gymnasium.spaces.Text(10)
            self.observation_space = gymnasium.spaces.Text(99)
            self.worth, self.closed = worth, False

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return f"seed {seed}, options {options}", {}

        def step(self, action):
            return f"you said {action}", self.worth, action == "stop", action == "late", {}

    gymnasium.register("Repeating-v0", entry_point=Repeating)
    yield "Repeating-v0"
    del gymnasium.registry["Repeating-v0"]


def content(requests):
    [request] = requests
    assert (request.agent, request.role) == ("agent", "agent") and request.messages[0]["role"] == "user"
    return request.messages[0]["content"]


def said(text, stop=Stop.EOS):
    return Said(agent="agent", text=text, stop=stop)


def begun(environment, task=None, seed=5):
    own = copy.copy(environment)
    return own, content(own.begin(task or {"question": "?"}, seed))


def test_a_world_of_texts_is_played_to_its_end(guessing):
    own, first = begun(adapter(guessing, args={"worth": 0.5}))
    assert "You see:\nseed 5, options None" in first and "any text" in first
    assert content(own.step(said(" hello \n"))) == "you said hello"
    assert "names no action" in content(own.step(said("far too long for this")))
    assert own.step(said("stop")) == EpisodeEnd(rewards={"agent": {"return": 1.0}})
    own.close()


def test_a_truncated_episode_keeps_its_return(guessing):
    own, _ = begun(adapter(guessing))
    assert own.step(said("late")) == EpisodeEnd(rewards={"agent": {"return": 1.0}})


def test_a_task_names_the_seed_and_the_options(guessing):
    assert "seed 11, options {'level': 2}" in begun(adapter(guessing), {"seed": 11, "options": {"level": 2}})[1]


def test_no_more_than_turns_answers_are_taken(guessing):
    own, _ = begun(adapter(guessing, turns=2))
    assert content(own.step(said("a"))) == "you said a"
    assert own.step(said("b")) == EpisodeEnd(rewards={"agent": {"return": 2.0}})
    own, _ = begun(adapter(guessing, turns=1))
    assert own.step(said("this is no action")) == EpisodeEnd(rewards={"agent": {"return": 0.0}})


def test_a_agents_without_room_ends_the_episode(guessing):
    own, _ = begun(adapter(guessing))
    own.step(said("a"))
    assert own.step(said("", stop=None)) == EpisodeEnd(rewards={"agent": {"return": 1.0}})


def test_an_action_between_tags(guessing):
    own, _ = begun(adapter(guessing, tag="do", observation="> {observation} <"))
    assert content(own.step(said("first <do>no</do>, rather <do> yes </do>"))) == "> you said yes <"
    assert "names no action" in content(own.step(said("yes")))


def test_the_episodes_of_one_environment_do_not_mix(guessing):
    environment = adapter(guessing)
    (first, _), (second, _) = begun(environment), begun(environment)
    first.step(said("a"))
    assert second.step(said("stop")) == EpisodeEnd(rewards={"agent": {"return": 1.0}})


LAKE = {"is_slippery": False}
NAMES = ["left", "down", "right", "up"]


def test_frozen_lake_by_names_and_numbers():
    own, first = begun(adapter("FrozenLake-v1", args=LAKE, actions=NAMES))
    assert "left, down, right, up" in first and first.endswith("You see:\n0")
    answers = ["I go down", "1", "not up, Right", "take 2.", "down, as planned: DOWN"]
    assert [content(own.step(said(text))) for text in answers] == ["4", "8", "9", "10", "14"]
    assert own.step(said("right")) == EpisodeEnd(rewards={"agent": {"return": 1.0}})


@pytest.mark.parametrize(
    "text, action",
    [
        ("3 steps, then 2", 2),
        ("go to 1, not 9", None),
        ("3.5 or so", None),
        ("nothing", None),
        ("upright", None),
        ("up; right!", 2),
        ("action_2", None),
        ("-1", None),
        ("first 0.\nThen 1.", 1),
    ],
)
def test_the_last_number_or_name_is_the_action(text, action):
    assert adapter("FrozenLake-v1", actions=NAMES)._action(text) == action


def test_the_picture_of_the_lake_shows_colours_as_brackets():
    own, first = begun(adapter("FrozenLake-v1", args=LAKE, actions=NAMES, render=True))
    assert first.endswith("[S]FFF\nFHFH\nFFFH\nHFFG") and "\x1b" not in first
    assert content(own.step(said("down"))) == "  (Down)\nSFFF\n[F]HFH\nFFFH\nHFFG"


@pytest.mark.parametrize("name, turns", [("Taxi", 12), ("Blackjack", 8), ("FrozenLake", 15)])
def test_observations_and_returns_are_those_of_the_world_itself(name, turns):
    gymnasium = pytest.importorskip("gymnasium")
    id = max(each for each in gymnasium.registry if each.startswith(f"{name}-v"))  # the newest version
    environment = adapter(id, turns=turns)
    for seed in range(6):
        world, rng = gymnasium.make(id), random.Random(seed)
        observation, _ = world.reset(seed=seed)
        own, text = begun(environment, seed=seed)
        total, over = 0.0, False
        for turn in range(turns):
            assert text.endswith(plain(observation))
            action = rng.randrange(int(world.action_space.n))
            observation, reward, terminated, truncated, _ = world.step(action)
            total += float(reward)
            outcome = own.step(said(f"My action: {action}"))
            over = terminated or truncated or turn == turns - 1
            if over:
                assert outcome == EpisodeEnd(rewards={"agent": {"return": total}})
                break
            text = content(outcome)
        assert over


def plain(observation):
    parts = observation if isinstance(observation, tuple) else (observation,)
    texts = [str(int(part)) for part in parts]
    return f"({', '.join(texts)})" if isinstance(observation, tuple) else texts[0]


@pytest.mark.parametrize(
    "args, says",
    [
        ({"id": "FrozenLake-v1", "turns": 0}, "args.turns = 0"),
        ({"id": "FrozenLake-v1", "template": "no_such_prompt"}, "args.template: no prompt template"),
        ({"id": "FrozenLike-v1"}, "args.id = 'FrozenLike-v1'"),
        ({"id": "no_such_module:FrozenLake-v1"}, "cannot be made"),
        ({"id": "FrozenLake-v1", "args": {"colour": "blue"}}, "colour"),
        ({"id": "FrozenLake-v1", "actions": ["left", "right"]}, "names 2 actions, and 'FrozenLake-v1' has 4"),
        ({"id": "MountainCarContinuous-v0"}, "only Text, and Discrete"),
    ],
)
def test_a_world_that_cannot_be_played_is_refused(args, says):
    with pytest.raises(ConfigError) as caught:
        adapter(**args)
    assert says in str(caught.value)


def test_without_the_library_the_cure_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(ConfigError, match="pip install gymnasium"):
        plugins.build(Use(target=TARGET, args={"id": "FrozenLake-v1"}))
