"""The loop with a policy that really learns: order of turns, versions, resume, recorded rollouts, and its refusals."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from toys import EOS, characters, graded, streaming

from megatron_rl.algorithms.losses import PolicyLoss
from megatron_rl.config.schema import Gate, LossConfig
from megatron_rl.engines.base import Sampling
from megatron_rl.engines.fake import TableEngine, TablePolicy
from megatron_rl.engines.spread import SpreadEngine, deal
from megatron_rl.recipes.grpo import Grpo
from megatron_rl.training import gate, loop
from megatron_rl.training.rollouts import trajectories_from_jsonl, trajectories_to_jsonl
from megatron_rl.training.turns import Players
from megatron_rl.types import Prompt
from megatron_rl.world import OneProcess

ALPHABET = "?12345abcde"  # the answer to 1 is a, to 2 is b, ...
VOCAB = len(ALPHABET) + 1
TOKENIZER = characters(ALPHABET)
right = graded(
    lambda response, payload: response.startswith(payload["answer"]) or f"{{{payload['answer']}}}" in response
)


class Questions:
    """An endless stream, by its place."""

    def __init__(self, place=0):
        self.place = place

    def take(self, count):
        self.place += count
        return [self.prompt(i) for i in range(self.place - count, self.place)]

    @staticmethod
    def prompt(i):
        question, answer = "12345"[i % 5], "abcde"[i % 5]
        return Prompt(
            id=str(i), tokens=TOKENIZER("?" + question)["input_ids"], payload={"question": question, "answer": answer}
        )


class Log:
    """Lines as metrics.jsonl would have them, and the checkpoints, in memory."""

    def __init__(self):
        self.lines, self.saved = [], {}

    def __call__(self, step, scope, metrics, *, turn):
        self.lines.append((turn, step, scope, dict(metrics)))

    def series(self, name, scope="generator"):
        return [m[name] for _, _, s, m in self.lines if s == scope and name in m]


@pytest.fixture
def template(tmp_path):
    path = tmp_path / "question.txt"
    path.write_text("?{question}\n")
    return str(path)


def make(template, log, *, grade=right, policy=None, data=None, stop_after=None, world=None, **settings):
    """The parts of a run."""
    policy, data, world = policy or TablePolicy(VOCAB, lr=0.3, seed=1), data or Questions(), world or OneProcess()
    players = Players(
        engines={"generator": SpreadEngine(world, "generator", TableEngine(VOCAB, EOS))},
        tokenizers={"generator": TOKENIZER},
        samplings={"generator": Sampling(max_tokens=2)},
        max_prompt_tokens={"generator": 8},
        grade=grade,
        seed=3,
    )
    loss = LossConfig(kl_coef=0.0)
    role = loop.Role(
        policy=policy, loss=PolicyLoss(loss), refit=streaming(policy, players.engines["generator"]), **settings
    )

    def save(number):
        assert policy.asleep == settings.get("sleeps", False)
        log.saved[number] = {
            "table": policy.table.detach().clone(),
            "optimizer": json.dumps(str(policy._optimizer.state_dict())),
        }

    hooks = loop.Hooks(
        log=log, save=save, should_stop=lambda: stop_after is not None and len(log.series("loss")) >= stop_after
    )
    held_out = Questions().take(5)
    recipe = Grpo(updates=25, group_size=8, template=template)
    return loop.Setup(
        world=world,
        roles={"generator": role},
        recipe=recipe,
        players=players,
        data={"generator": data},
        held_out=held_out,
        hooks=hooks,
    )


def test_grpo_learns_the_table(template):
    log = Log()
    progress = loop.Progress()
    assert loop.train(make(template, log), loop.Plan(steps=25, prompts_per_step=10, evaluate_every=10), progress)
    rewards = log.series("reward/outcome")
    assert sum(rewards[:3]) / 3 < 0.2 and sum(rewards[-3:]) / 3 > 0.9, rewards
    assert [(t, s) for t, s, scope, _ in log.lines if scope == "eval"] == [(0, 0), (10, 10), (20, 20), (25, 25)]
    assert (
        progress.first_evaluation["generator/accuracy_sampled"]
        < 0.5
        < progress.last_evaluation["generator/accuracy_sampled"]
    )
    assert progress.updates == {"generator": 25 - int(sum(log.series("skipped")))} and progress.number == 25
    assert set(log.series("version_lag")) == {0.0} and max(log.series("engine_gap")) < 1e-5


def test_several_optimizer_steps_keep_the_first_ones_log_probs(template):
    log = Log()
    setup = make(template, log, samples_per_optimizer_step=32)
    loop.train(setup, loop.Plan(steps=2, prompts_per_step=10), loop.Progress())
    assert log.series("optimizer_steps") == [3.0, 3.0]
    assert all(abs(r - 1.0) > 1e-4 for r in log.series("ratio"))  # the later steps left the start
    assert max(log.series("engine_gap")) < 1e-5  # but the gap is measured at it


def test_split_is_even_and_complete():
    assert [len(p) for p in loop.split(80, 32)] == [26, 27, 27] and loop.split(4, None) == [range(4)]
    assert [i for p in loop.split(7, 3) for i in p] == list(range(7))


def lines_without_times(log):
    return json.dumps([(turn, step, scope, m) for turn, step, scope, m in log.lines])


@pytest.mark.parametrize("stop_after", [3, 4])  # an evaluation is due after 4
def test_a_run_stopped_and_resumed_writes_the_lines_of_the_whole_one(template, tmp_path, stop_after):
    whole, first, second = Log(), Log(), Log()
    plan = loop.Plan(steps=8, prompts_per_step=10, evaluate_every=4, save_every=3)
    loop.train(make(template, whole), plan, loop.Progress())

    policy, data, progress = TablePolicy(VOCAB, lr=0.3, seed=1), Questions(), loop.Progress()
    assert not loop.train(make(template, first, policy=policy, data=data, stop_after=stop_after), plan, progress)
    assert progress.number == stop_after and stop_after in first.saved
    policy.save(tmp_path)
    state = json.loads(json.dumps(progress.state_dict()))
    again = TablePolicy(VOCAB, lr=0.3, seed=1)
    again.load(tmp_path)
    resumed = make(template, second, policy=again, data=Questions(data.place))
    assert loop.train(resumed, plan, loop.Progress(**state))
    second.lines = first.lines + second.lines
    assert lines_without_times(second) == lines_without_times(whole)
    assert torch.equal(again.table, whole.saved[8]["table"])


@pytest.mark.multi
def test_three_ranks_generate_and_learn_exactly_what_one_does(template, tmp_path):
    log = Log()
    setup = make(template, log)
    loop.train(setup, loop.Plan(steps=4, prompts_per_step=7, evaluate_every=2), loop.Progress())
    alone = json.loads(json.dumps({"lines": log.lines, "table": setup.roles["generator"].policy.table.tolist()}))
    ranks = run_ranks(
        Path(__file__).parents[1] / "helpers" / "loop_worker.py", 3, tmp_path / "ranks", template, timeout_s=120
    )
    assert ranks == [alone] * 3


def test_a_role_that_sleeps_is_awake_only_for_its_updates(template):
    log = Log()
    setup = make(template, log, sleeps=True)
    loop.train(setup, loop.Plan(steps=2, prompts_per_step=5, save_every=1), loop.Progress())
    assert setup.roles["generator"].policy.asleep and sorted(log.saved) == [1, 2]


def test_a_turn_without_signal_is_skipped_and_a_run_of_such_turns_is_no_success(template):
    log = Log()
    setup = make(template, log, grade=graded(lambda response, payload: 0.0))
    with pytest.raises(loop.NothingTrained, match="2 turns and no update"):
        loop.train(setup, loop.Plan(steps=2, prompts_per_step=5), loop.Progress())
    assert (
        log.series("skipped") == [1.0, 1.0]
        and log.series("loss") == []
        and log.series("groups_without_signal") == [1.0, 1.0]
    )
    with pytest.raises(loop.NothingTrained, match="0 steps"):
        loop.train(setup, loop.Plan(steps=0, prompts_per_step=5), loop.Progress())


def test_equal_rewards_that_are_no_round_numbers_are_no_signal(template):
    log = Log()
    recipe = Grpo(
        updates=1, group_size=8, estimator="rloo", template=template
    )  # its advantages here are 5.6e-17 and not 0
    setup = replace(make(template, log, grade=graded(lambda response, payload: 0.1 + 0.2)), recipe=recipe)
    with pytest.raises(loop.NothingTrained):
        loop.train(setup, loop.Plan(steps=1, prompts_per_step=5), loop.Progress())
    assert log.series("skipped") == [1.0]


def test_recorded_turns_train_the_same_model_without_an_engine(template, tmp_path):
    played, replayed = Log(), Log()
    loop.train(make(template, played), loop.Plan(steps=3, prompts_per_step=5, record=tmp_path), loop.Progress())
    setup = make(template, replayed)
    dumb = Players(engines={}, tokenizers={}, samplings={}, max_prompt_tokens={}, grade=right)
    setup = replace(setup, players=dumb, held_out=())
    loop.train(setup, loop.Plan(steps=3, prompts_per_step=5, replay=tmp_path), loop.Progress())
    assert torch.equal(played.saved[3]["table"], replayed.saved[3]["table"])
    assert replayed.series("reward/outcome") == played.series("reward/outcome")
    with pytest.raises(FileNotFoundError, match="turn 3"):
        loop.train(setup, loop.Plan(steps=4, prompts_per_step=5, replay=tmp_path), loop.Progress())


def test_trajectories_survive_json_to_the_last_bit(template):
    setup = make(template, Log())
    setup.players.engines["generator"].load(setup.roles["generator"].policy.weights(), version=4)
    recipe, progress = setup.recipe, loop.Progress()
    played = recipe.play(progress.next_turn("generator"), Questions().take(3), setup.players)
    assert trajectories_from_jsonl(trajectories_to_jsonl(played.trajectories)) == played.trajectories
    with pytest.raises(ValueError, match="line 1 is not a trajectory"):
        trajectories_from_jsonl("{}\n")


def gated(template, log, **settings):
    setup = make(template, log, **settings)
    chosen = gate.GatePlan(settings=Gate(num_prompts=4), prompts=Questions().take(4), wrong_answer="z")
    return setup, loop.Plan(steps=1, prompts_per_step=5, gate=chosen)


def test_the_gate_passes_a_sound_run_and_reports_its_values(template):
    log = Log()
    setup, plan = gated(template, log)
    loop.train(setup, plan, loop.Progress())
    assert log.series("gate/reward_right", "gate") == [1.0] and log.series("gate/reward_wrong", "gate") == [0.0]
    assert 0 <= log.series("gate/logprob_gap_generator", "gate")[0] < 1e-5


@pytest.mark.parametrize(
    "score, said", [(0.0, "0.00 on average to 4 known right"), (1.0, "1.00 on average to 4 known wrong")]
)
def test_the_gate_refuses_a_reward_that_cannot_tell_right_from_wrong(template, score, said):
    setup, plan = gated(template, Log(), grade=graded(lambda response, payload: score))
    with pytest.raises(gate.GateFailure, match=said):
        loop.train(setup, plan, loop.Progress())


class Drifted(TablePolicy):
    """Gives its engine other weights than it scores with."""

    def weights(self):
        yield "table", self.table.detach() * 8


def test_the_gate_refuses_an_engine_that_disagrees_with_its_trainer(template):
    setup, plan = gated(template, Log(), policy=Drifted(VOCAB))
    with pytest.raises(
        gate.GateFailure, match=r"generator: .* differ .* \(engine -.*, trainer -.*gate.max_logprob_gap = 0.05"
    ):
        loop.train(setup, plan, loop.Progress())


@pytest.mark.parametrize("prompts, n, ranks", [(8, 5, 2), (7, 5, 3), (1, 5, 2), (2, 1, 3), (0, 4, 2)])
def test_rows_are_dealt_evenly_and_prompts_stay_whole(prompts, n, ranks):
    shares = deal(prompts, n, ranks)
    assert sorted(row for share in shares for row in share) == [(i, j) for i in range(prompts) for j in range(n)]
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    divided = [i for i in range(prompts) if sum(any(p == i for p, _ in share) for share in shares) > 1]
    assert len(divided) <= prompts % ranks
