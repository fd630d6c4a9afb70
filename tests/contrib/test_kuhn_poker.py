"""Kuhn poker: its rules against a tree written here, how it is played by models, and what policies of it are worth."""

import copy
import itertools
import json
import random
from pathlib import Path

import numpy as np
import pytest
from fake_engines import ScriptedEngine
from toys import EOS, characters, graded

from examples.miniatures.poker.equilibria import (
    average_policy,
    best_response,
    equilibrium,
    exploitability,
    hand_value,
    information_sets,
)
from megatron_rl.config import plugins
from megatron_rl.config.base import ConfigError, Use
from megatron_rl.contrib.kuhn_poker import deal
from megatron_rl.engines.protocol import Sampling
from megatron_rl.environments.environment import EpisodeSettings
from megatron_rl.environments.episode_types import EpisodeEnd, Said
from megatron_rl.training.iteration import RolloutContext
from megatron_rl.types import Outcome, Prompt, Stop

ROOT = Path(__file__).parents[2]
TARGET = "megatron_rl.contrib.kuhn_poker:KuhnPoker"
TEXT = characters()
RANK = {"J": 1, "Q": 2, "K": 3}
DEALS = [a + b for a in RANK for b in RANK if a != b]
SEEDS = {"".join(deal(seed)): seed for seed in range(100)}
ENDS = {  # all that may be said in a hand -> who wins, and how many chips
    ("check", "check"): ("higher", 1),
    ("bet", "call"): ("higher", 2),
    ("bet", "fold"): ("first", 1),
    ("check", "bet", "call"): ("higher", 2),
    ("check", "bet", "fold"): ("second", 1),
}
EVERY = [*information_sets("first"), *information_sets("second")]
PLAIN = {"tag": None, "template": "plain.txt", "answered": "{said};{actions}>"}


def game(tmp_path=None, **args):
    if "template" in args:
        args["template"] = str(tmp_path / args["template"])
        Path(args["template"]).write_text("{agent},{card},{said};{actions}>\n")
    return plugins.build(Use(target=TARGET, args=args))


def texts(requests):
    [request] = requests
    return request.agent, request.role, request.messages[0]["content"]


def said(text, stop=Stop.EOS):
    return Said(agent="whoever", text=text, stop=stop)


@pytest.mark.parametrize("cards", DEALS)
@pytest.mark.parametrize("actions", ENDS)
def test_every_hand_goes_and_pays_by_the_rules(tmp_path, cards, actions):
    own = copy.copy(game(tmp_path, **PLAIN, first="a", second="b"))
    requests = own.begin({"question": "?"}, SEEDS[cards])
    for place, action in enumerate(actions):
        choice = "fold, call" if place and actions[place - 1] == "bet" else "check, bet"
        last = actions[place - 1] if place else "nothing"
        agent, card = ("first", "second")[place % 2], cards[place % 2]
        wanted = f"{last};{choice}>" if place == 2 else f"{agent},{card},{last};{choice}>"
        assert texts(requests) == (agent, "ab"[place % 2], wanted)
        requests = own.step(said(action))
    winner, stake = ENDS[actions]
    if winner == "higher":
        winner = "first" if RANK[cards[0]] > RANK[cards[1]] else "second"
    assert isinstance(requests, EpisodeEnd) and requests.outcome is Outcome.SCORE and not requests.answers
    chips = {agent: own["chips"] for agent, own in requests.rewards.items()}
    assert chips[winner] == stake and sum(chips.values()) == 0 and set(chips) == {"first", "second"}
    assert all(own["legal"] == 1.0 for own in requests.rewards.values())
    hand = {"hand": {"first": cards[0], "second": cards[1], "actions": list(actions)}}
    assert requests.payload == json.loads(json.dumps(requests.payload)) == hand


def test_cards_are_dealt_evenly_and_by_the_seed():
    drawn = ["".join(deal(seed)) for seed in range(6000)]
    assert set(drawn) == set(DEALS) and all(880 < drawn.count(cards) < 1120 for cards in DEALS)
    assert drawn[:50] == ["".join(deal(seed)) for seed in range(50)]
    one = game()
    assert one.begin({}, 7)[0].messages == copy.copy(one).begin({"question": "other"}, 7)[0].messages


@pytest.mark.parametrize("before", [(), ("check",), ("bet",), ("check", "bet")])
@pytest.mark.parametrize("answer", ["", "raise", "check bet", "I bet", "<action>bet</action>", "illegal here"])
def test_an_answer_that_is_no_legal_action_pays_the_other_agent(tmp_path, before, answer):
    if answer == "illegal here":
        answer = "bet" if before[-1:] == ("bet",) else "fold"
    own = copy.copy(game(tmp_path, **PLAIN, illegal=1.5))
    own.begin({}, 3)
    for action in before:
        own.step(said(action))
    over = own.step(said(answer))
    erred, other = ("first", "second") if len(before) % 2 == 0 else ("second", "first")
    wanted = {erred: {"chips": -1.5, "legal": 0.0}, other: {"chips": 1.5, "legal": 1.0}}
    if not before:
        del wanted["second"]  # it has not spoken, and has no sample
    assert over.rewards == wanted and over.outcome is Outcome.SCORE and over.payload["hand"]["actions"] == [*before]


def test_the_last_action_between_tags_counts_in_any_letters():
    own = copy.copy(game())
    [request] = own.begin({}, SEEDS["KJ"])
    assert list(request.stop) == ["</action>"]
    told = request.messages[0]["content"]
    assert "your card is K" in told and "last action: nothing" in told and "actions are: check, bet." in told
    [request] = own.step(said("If I <action>bet</action> they fold. So <action> Check\n</action>"))
    assert "your card is J" in request.messages[0]["content"] and "last action: check" in request.messages[0]["content"]
    assert own.step(said("bet")).rewards["second"] == {"chips": -2.0, "legal": 0.0}


def test_a_conversation_without_room_is_no_lost_hand():
    own = copy.copy(game())
    own.begin({}, 0)
    over = own.step(said("", stop=None))
    assert over.outcome is Outcome.ERROR and "raise max_prompt_tokens" in over.why and not over.rewards


@pytest.mark.parametrize(
    ("args", "match"),
    [
        ({"illegal": 0.5}, r"args.illegal = 0.5: give at least 1"),
        ({"illegal": float("nan")}, r"illegal"),
        ({"tag": "<action>"}, r"args.tag = '<action>': give a word"),
        ({"template": "nowhere"}, r"args.template: no prompt template 'nowhere'"),
        ({"template": "calculator_tags"}, r"args.template = 'calculator_tags': it needs \{card\}"),
        ({"answered": "go on"}, r"args.answered = 'go on': it needs \{said\}"),
        ({"cards": 4}, r"cards"),
    ],
)
def test_wrong_settings_are_refused(args, match):
    with pytest.raises(ConfigError, match=match):
        plugins.build(Use(target=TARGET, args=args))


def play(environment, engines, seeds):
    context = RolloutContext(
        engines=engines, tokenizers=dict.fromkeys(engines, TEXT), samplings={},
        max_prompt_tokens=dict.fromkeys(engines, 400), grade=graded(lambda *_: 0.0),
    )  # fmt: skip
    prompts = [Prompt(id=f"0/{i}", tokens=[1], payload={"question": "?"}) for i in range(len(seeds))]
    samplings = dict.fromkeys(engines, Sampling(max_tokens=9))
    return environment.play(context, prompts, seeds, samplings, EpisodeSettings())


def ids(text):
    return TEXT(text, add_special_tokens=False)["input_ids"]


def player(style):
    """An engine that reads its card and what was said, and plays `style` there, a word by the name of the information
    set."""

    def answer(prompt, *_):
        text = "".join("," if token == EOS else TEXT.decode([token]) for token in prompt)
        card, last = text.split(",")[1], text[: text.rindex(";")].replace(">", ",").split(",")[-1]
        before = {"nothing": (), "check": ("check",), "bet": ("check", "bet") if text.startswith("first") else ("bet",)}
        return [*ids(style(" ".join((card, *before[last])))), EOS]

    return ScriptedEngine(answer, eos=EOS)


def test_two_models_play_hands_and_each_has_a_sample_of_its_own_agent(tmp_path):
    """A first agent that bets with the K alone and calls with all, a second agent that bets with all and folds the
    J."""
    first = player(lambda name: {"K": "bet", "J": "check", "Q": "check"}.get(name, "call"))
    second = player(lambda name: "fold" if name == "J bet" else "call" if name.endswith("bet") else "bet")
    world = game(tmp_path, **PLAIN, first="red", second="blue")
    episodes = play(world, {"red": first, "blue": second}, [SEEDS[cards] for cards in ("KJ", "KQ", "JQ", "QJ")])
    found = [[(r.role, r.payload["agent"], r.rewards["chips"]) for r in one.rollouts] for one in episodes]
    assert found == [[("red", "first", won), ("blue", "second", -won)] for won in (1.0, 2.0, -2.0, 2.0)]
    assert [one.payload["hand"]["actions"] for one in episodes[3].rollouts] == [["check", "bet", "call"]] * 2
    red, blue = (one.tokens.tolist() for one in episodes[3].rollouts)
    assert red == [*ids("first,Q,nothing;check, bet>check"), EOS, *ids("bet;fold, call>call"), EOS]
    assert blue == [*ids("second,J,check;check, bet>bet"), EOS]
    assert [one.turns for one in episodes] == [2, 2, 3, 3]


def test_one_model_plays_both_agents(tmp_path):
    engine = player(lambda name: "call" if name.endswith("bet") else "check")
    [one] = play(game(tmp_path, **PLAIN, first="me", second="me"), {"me": engine}, [SEEDS["QK"]])
    assert [(r.role, r.payload["agent"], r.rewards["chips"]) for r in one.rollouts] == [
        ("me", "first", -1.0),
        ("me", "second", 1.0),
    ]


def test_a_first_agents_that_errs_at_once_has_the_only_sample(tmp_path):
    engines = {"first": player(lambda name: "raise"), "second": player(lambda name: "check")}
    [one] = play(game(tmp_path, **PLAIN), engines, [0])
    assert one.outcome is Outcome.SCORE and [r.rewards for r in one.rollouts] == [{"chips": -2.0, "legal": 0.0}]
    assert not engines["second"].asked


def anything(rng):
    return {name: rng.random() for name in EVERY}


def best_of_first(q):
    """Returns what the best policy of the first agent wins against `q`: for each card, what each line of play wins."""
    total = 0.0
    for card, rank in RANK.items():
        others = [(other, 1 if rank > RANK[other] else -1) for other in RANK if other != card]
        bet = sum((1 - q[f"{o} bet"]) * 1 + q[f"{o} bet"] * 2 * sign for o, sign in others)
        back = sum((1 - q[f"{o} check"]) * sign for o, sign in others)
        fold = sum(q[f"{o} check"] * -1 for o, _ in others)
        call = sum(q[f"{o} check"] * 2 * sign for o, sign in others)
        total += max(bet, back + max(fold, call)) / 6
    return total


def best_of_second(p):
    total = 0.0
    for card, rank in RANK.items():
        others = [(other, 1 if rank > RANK[other] else -1) for other in RANK if other != card]
        back = sum((1 - p[o]) * sign for o, sign in others)
        bet = sum((1 - p[o]) * ((1 - p[f"{o} check bet"]) * 1 + p[f"{o} check bet"] * 2 * sign) for o, sign in others)
        fold, call = sum(-p[o] for o, _ in others), sum(p[o] * 2 * sign for o, sign in others)
        total += (max(back, bet) + max(fold, call)) / 6
    return total


def test_best_responses_are_those_of_backward_induction():
    rng = random.Random(1)
    for _ in range(20):
        policy = anything(rng)
        for agent, other in (("first", best_of_first), ("second", best_of_second)):
            won, response = best_response(agent, policy)
            assert won == pytest.approx(other(policy), abs=1e-12)
            hands = (response, policy) if agent == "first" else (policy, response)
            assert (hand_value(*hands) if agent == "first" else -hand_value(*hands)) == pytest.approx(won, abs=1e-12)
        assert exploitability(policy, policy) == pytest.approx((best_of_first(policy) + best_of_second(policy)) / 2)
        assert exploitability(policy, policy) > 0


def test_the_value_of_a_hand_is_the_mean_over_hands_that_are_played_out():
    rng, policy = random.Random(2), anything(random.Random(3))
    total, wins = 0.0, 20_000
    for _ in range(wins):
        cards, actions = rng.choice(DEALS), ()
        while actions not in ENDS:
            share = policy[" ".join((cards[len(actions) % 2], *actions))]
            legal = ("fold", "call") if actions[-1:] == ("bet",) else ("check", "bet")
            actions += (legal[rng.random() < share],)
        winner, stake = ENDS[actions]
        higher = "first" if RANK[cards[0]] > RANK[cards[1]] else "second"
        total += stake if (higher if winner == "higher" else winner) == "first" else -stake
    assert hand_value(policy, policy) == pytest.approx(total / wins, abs=4 * 1.5 / wins**0.5)


@pytest.mark.parametrize("alpha", [0.0, 0.1, 1 / 6, 0.25, 1 / 3])
def test_the_known_equilibria_cannot_be_exploited(alpha):
    both = equilibrium(alpha)
    assert hand_value(both, both) == pytest.approx(-1 / 18, abs=1e-12)
    assert exploitability(both, both) == pytest.approx(0.0, abs=1e-12)
    assert best_response("first", both)[0] == pytest.approx(-1 / 18, abs=1e-12)
    assert best_response("second", both)[0] == pytest.approx(1 / 18, abs=1e-12)
    for name in EVERY:  # other play at one of them alone can be exploited, where it is ever reached
        other = both | {name: both[name] + (0.05 if both[name] < 0.5 else -0.05)}
        reached = alpha < 1 / 3 or name != "K check bet"  # at 1/3 the K is always bet
        assert (exploitability(other, other) > 1e-4) == reached, name


def test_an_alpha_outside_the_family_is_refused():
    with pytest.raises(ValueError, match="alpha = 0.4"):
        equilibrium(0.4)


def test_policies_whose_exploitability_is_known():
    """Always to bet and to call: a best response folds the J, wins 2 chips with the K and breaks even with the Q, in
    either agent. At random over both actions: by hand (-0.5 + 0.5 + 1.5) / 3 and (-0.75 + 0.25 + 1.75) / 3, whose sum
    is OpenSpiel's NashConv of its uniform policy, 0.91666."""
    always, never, uniform = (dict.fromkeys(EVERY, share) for share in (1.0, 0.0, 0.5))
    assert best_response("first", always)[0] == pytest.approx((-1 + 0 + 2) / 3)
    assert exploitability(always, always) == pytest.approx(1 / 3)
    assert exploitability(never, never) == pytest.approx(1.0), "who always folds loses a chip to every bet"
    assert (best_of_first(uniform), best_of_second(uniform)) == pytest.approx((1.5 / 3, 1.25 / 3))
    assert exploitability(uniform, uniform) == pytest.approx(11 / 24)


def test_the_average_policy_wins_the_average():
    rng = random.Random(5)
    several = [anything(rng) for _ in range(7)]
    mean, plain = average_policy(several), dict.fromkeys(EVERY, 0.0)
    for name in EVERY:
        plain[name] = sum(one[name] for one in several) / 7
    for _ in range(5):
        other = anything(rng)
        assert hand_value(mean, other) == pytest.approx(np.mean([hand_value(one, other) for one in several]), abs=1e-12)
        assert hand_value(other, mean) == pytest.approx(np.mean([hand_value(other, one) for one in several]), abs=1e-12)
    assert abs(hand_value(plain, other) - hand_value(mean, other)) > 1e-6, "the mean of the context does not"


def test_the_miniature_reads_policies_in_the_contexts_that_are_played(tmp_path, monkeypatch):
    """It scores each legal answer after exactly what engines are asked with in play, and weighs the two."""
    monkeypatch.chdir(ROOT)
    read_policy = plugins.find("examples.miniatures.poker.measured:read_policy")
    world = game(tmp_path, **PLAIN)
    asked = {"first": set(), "second": set()}
    for style in ("check", "bet"):
        engines = {
            agent: player(lambda name, own=style: own if not name.endswith("bet") else "call") for agent in asked
        }
        play(world, engines, [SEEDS[cards] for cards in DEALS])
        for agent, engine in engines.items():
            asked[agent] |= {tuple(prompt) for prompt, _ in engine.asked}
    mixed = {"first": player(lambda name: "call" if " " in name else "check"), "second": player(lambda name: "bet")}
    play(world, mixed, [SEEDS[cards] for cards in DEALS])
    asked["first"] |= {tuple(prompt) for prompt, _ in mixed["first"].asked}

    class Scorer:
        """Gives the last answer of a sequence the log-prob -0.1 a token, or -0.7 where it is a bet or call."""

        def score(self, sequences):
            self.heard = [list(map(int, one)) for one in sequences]
            ends = [(*ids("bet"), EOS), (*ids("call"), EOS)]
            paid = [any(tuple(one[-len(end) :]) == end for end in ends) for one in self.heard]
            return [
                np.full(len(one), -0.7 if yes else -0.1, np.float32) for one, yes in zip(self.heard, paid, strict=True)
            ]

    for agent, names in (("first", information_sets("first")), ("second", information_sets("second"))):
        scorer = Scorer()
        policy, legal = read_policy(scorer, TEXT, world, agent)
        assert list(policy) == list(names)
        for name, one, two in zip(names, scorer.heard[::2], scorer.heard[1::2], strict=True):
            faced = name.endswith("bet")
            words = [[*ids(word), EOS] for word in (("fold", "call") if faced else ("check", "bet"))]
            contexts = {tuple(whole[: -len(word)]) for whole, word in zip((one, two), words, strict=True)}
            assert (
                len(contexts) == 1
                and contexts <= asked[agent]
                and [one[-len(words[0]) :], two[-len(words[1]) :]] == words
            )
            free, paid = np.exp(-0.1 * len(words[0])), np.exp(-0.7 * len(words[1]))
            assert policy[name] == pytest.approx(paid / (free + paid)) and legal <= free + paid + 1e-6
    assert len(set(itertools.chain(*asked.values()))) == 12
