"""A whole run of the loop on a table of logits that really learns: the parts of it, its log, and where it stands."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fake_engines import TableEngine
from fake_policy import TablePolicy, without_speed
from one_process import OneProcess
from toys import EOS, characters, graded, streaming

from megatron_rl.algorithms.policy_loss import PolicyLoss
from megatron_rl.config.schema import LossConfig
from megatron_rl.engines.data_parallel_engine import DataParallelEngine
from megatron_rl.engines.protocol import Sampling
from megatron_rl.messages.commands import Commands
from megatron_rl.messages.world import World
from megatron_rl.recipes.grpo import Grpo
from megatron_rl.training import loop
from megatron_rl.training.collector import Collector, ReplayMaker, RolloutMaker, upcoming
from megatron_rl.training.credit import CreditStage
from megatron_rl.training.device_memory import ColocatedEngines, DeviceMemory, leaving
from megatron_rl.training.events import Event, Finished, Measured, Said
from megatron_rl.training.held_out_sets import Examiner, HeldOutSet
from megatron_rl.training.iteration import EvaluationDraws, Recipe, RolloutContext
from megatron_rl.training.lessons import CreditDesk
from megatron_rl.training.progress import Plan, Progress
from megatron_rl.training.rank_fleet import RankFleet
from megatron_rl.training.start import start
from megatron_rl.training.store import IterationStore
from megatron_rl.training.update import Trainee
from megatron_rl.types import Prompt

ALPHABET = "?12345abcde"  # the answer to 1 is a, to 2 is b, ...
VOCAB = len(ALPHABET) + 1
TOKENIZER = characters(ALPHABET)
right = graded(
    lambda response, payload: response.startswith(payload["answer"]) or f"{{{payload['answer']}}}" in response
)


class Questions:
    """An endless stream of prompts, by its place."""

    dropped = 0

    def __init__(self, place=0):
        self.place = place

    def take(self, count, fits=None, draw=None):
        self.place += count
        return [self.prompt(i) for i in range(self.place - count, self.place)]

    def beside(self, name, taken, state):
        return Questions(1000 + int(name.split()[1]))

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]

    @staticmethod
    def prompt(i):
        question, answer = "12345"[i % 5], "abcde"[i % 5]
        tokens = TOKENIZER("?" + question)["input_ids"]
        return Prompt(id=str(i), tokens=tokens, payload={"question": question, "answer": answer})


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The parts of a run of the loop, and callbacks for what a test looks at. Every rank calls `save`, `keep_best` and
    `around`; the driver calls the others.
    """

    world: World = field(default_factory=OneProcess)
    commands: Commands = field(default_factory=lambda: Commands(OneProcess()))
    memory: DeviceMemory
    refits: Mapping[str, Callable[[int], None]] = field(default_factory=dict)  # see RankFleet
    engines: ColocatedEngines | None = None  # in the trainer's devices
    policy_of: Mapping[str, str]
    recipe: Recipe
    context: RolloutContext
    iterations: Collector | None
    held_out: Sequence[HeldOutSet] = ()
    log: Callable[..., None]
    say: Callable[[str], None] = lambda text: None
    save: Callable[[int, Any], int | None] = lambda number, state: number  # gets the state on the driver
    keep_best: Callable[[int, Any], None] = lambda number, best: None
    remove_surpassed: Callable[[Any], None] = lambda best: None
    iteration_done: Callable[[int], None] = lambda number: None
    should_stop: Callable[[], bool] = lambda: False
    served: Callable[[], bool] = lambda: True
    around: Callable[[int], contextlib.AbstractContextManager[None]] = lambda number: contextlib.nullcontext()
    occupied_s: Callable[[], float | None] = lambda: None

    @property
    def trainees(self) -> dict[str, Trainee]:
        return self.memory.trainees

    def observe(self, event: Event) -> None:
        match event:
            case Said():
                self.say(event.text)
            case Measured():
                self.log(event.cycle, event.scope, event.metrics, iteration=event.iteration)
            case Finished():
                self.iteration_done(event.iterations)
            case _:
                pass


class CallbackCheckpoints:
    """The checkpoints of a Setup."""

    def __init__(self, setup: Setup, fleet: RankFleet) -> None:
        self._setup, self._fleet = setup, fleet
        fleet.serve("save", setup.save)
        fleet.serve("keep_best", setup.keep_best)

    def save(self, number, state):
        self._fleet.engines.clear()
        return self._fleet.everywhere("save", number, bulk=[state])

    def begin(self, number):
        return None

    def settle(self, *, wait):
        return None

    def keep_best(self, number, best):
        self._fleet.engines.clear()
        self._fleet.everywhere("keep_best", number, best)

    def remove_surpassed(self, best):
        self._setup.remove_surpassed(best)


def train(setup: Setup, plan: Plan, progress: Progress, checkpoints: Callable[[RankFleet], Any] | None = None) -> bool:
    """Starts a run and trains it, on every rank. `checkpoints`: makes the checkpoints, in place of those of `setup`."""
    fleet = RankFleet(
        setup.commands, setup.memory, setup.refits, world_of=lambda policy: setup.world,
        ranks=dict.fromkeys(setup.trainees, range(setup.world.size)), engines=setup.engines,
        rescore=plan.mixed == "rescore", around=setup.around, occupied_s=setup.occupied_s,
    )  # fmt: skip
    saved = CallbackCheckpoints(setup, fleet) if checkpoints is None else checkpoints(fleet)
    desk = CreditDesk(
        recipe=setup.recipe, policy_of=setup.policy_of, loss_of=lambda policy, number: setup.trainees[policy].loss,
        mixed=plan.mixed, train_without_signal=plan.train_without_signal,
    )  # fmt: skip

    def drive() -> bool:
        assert setup.iterations is not None
        examiner = Examiner(
            recipe=setup.recipe, sets=setup.held_out, context=setup.context, rollouts=setup.iterations,
            served=setup.served,
        )  # fmt: skip
        parts = loop.Parts(
            fleet=fleet, rollouts=setup.iterations, desk=desk, examiner=examiner if setup.held_out else None,
            checkpoints=saved, observe=setup.observe, leave=setup.should_stop, watch=setup.context.watch,
        )  # fmt: skip
        start(parts, setup.context, plan, progress)
        return loop.train(parts, plan, progress)

    return setup.commands.drive(drive)


class Log:
    """Lines as metrics.jsonl would have them, and the checkpoints, in memory."""

    def __init__(self):
        self.lines, self.saved = [], {}

    def __call__(self, cycle, scope, metrics, *, iteration):
        self.lines.append((iteration, cycle, scope, without_speed(metrics)))

    def series(self, name, scope="generator"):
        return [m[name] for _, _, s, m in self.lines if s == scope and name in m]


def _collector(recipe, context, progress, store, *, data, states, replay, max_staleness):
    """Returns the source of the loop's iterations; `data` and `states` are its state in a checkpoint, `replay` a
    directory of iterations."""
    readers = {"generator": Questions()}
    if data:
        readers["generator"].load_state_dict(data["generator"])
    if replay is None:
        maker = RolloutMaker(
            recipe=recipe, readers=readers, context=context, prompts_per_iteration=10, max_staleness=max_staleness
        )  # fmt: skip
    else:
        maker = ReplayMaker(readers=readers, recorded=IterationStore(replay))
    credit = CreditStage(recipe, lag=max_staleness)
    if states:
        credit.restore(states, progress.number)
    iterations = upcoming(recipe.schedule(), progress.state_dict())
    return Collector(maker, credit, iterations, store, max_staleness=max_staleness)


def make(template, log, directory, **changes):
    """The parts of a run; `directory` holds its store of iterations. `changes`: grade, policy, state (of a checkpoint),
    stop_after, world, recipe, replay (a directory), max_staleness, loss (its settings), and fields of Trainee.
    """
    parts = {"grade": right, "world": OneProcess(), "max_staleness": 0, "loss": LossConfig(kl_coef=0.0)}
    parts |= dict.fromkeys(("policy", "state", "stop_after", "recipe", "replay"))
    settings = {name: value for name, value in changes.items() if name not in parts}
    parts |= {name: value for name, value in changes.items() if name in parts}
    world, state = parts["world"], parts["state"] or {}
    commands = Commands(world)
    policy = parts["policy"] or TablePolicy(VOCAB, lr=0.3, seed=1)
    recipe = parts["recipe"] or Grpo(updates=25, group_size=8, template=template)
    engine = DataParallelEngine(commands, "generator", TableEngine(VOCAB, EOS))
    context = RolloutContext(
        engines={"generator": engine},
        tokenizers={"generator": TOKENIZER},
        samplings={"generator": Sampling(max_tokens=2)},
        max_prompt_tokens={"generator": 8},
        grade=parts["grade"],
        seed=3,
    )
    loss = PolicyLoss(parts["loss"])
    trainee = Trainee(policy=policy, loss=loss, **settings)
    load = streaming(policy, engine.local)

    def take(version):
        with leaving(policy.memory) if policy.away else contextlib.nullcontext():
            load(version)

    commands.serve("refit", take)

    def refit(version):
        commands.together("refit", version, version).result()
        engine.version = version

    progress = loop.Progress(**state.get("progress", {}))
    collector = None
    if world.rank == 0:
        collector = _collector(
            recipe, context, progress, IterationStore(directory), data=state.get("data"), states=state.get("recipe"),
            replay=parts["replay"],
            max_staleness=parts["max_staleness"],
        )  # fmt: skip

    def save(number, run_state):
        assert policy.asleep == settings.get("sleeps", False)
        log.saved[number] = {"table": policy.table.detach().clone()}
        if world.rank == 0:
            log.saved[number]["state"] = json.loads(json.dumps(run_state))
        return number

    stop = parts["stop_after"]
    setup = Setup(
        world=world,
        commands=commands,
        memory=DeviceMemory({"generator": trainee}),
        refits={"generator": refit},
        policy_of={"generator": "generator"},
        recipe=recipe,
        context=context,
        iterations=collector,
        held_out=[HeldOutSet(name="questions", prompts=Questions().take(5), draws=EvaluationDraws())],
        log=log,
        save=save,
        should_stop=lambda: stop is not None and len(log.series("skipped")) >= stop,
    )
    return setup, progress


def without_engine(setup):
    """The same run with nobody to ask: what a replay has."""
    context = RolloutContext(engines={}, tokenizers={}, samplings={}, max_prompt_tokens={}, grade=right)
    return replace(setup, context=context, refits={}, held_out=())
