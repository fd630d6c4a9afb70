"""Each refusal of a section of the config is seen: for every message a section that gets it, and the section beside it,
on the other side of the boundary, that does not."""

import ast
import re
from pathlib import Path

import pytest

from megatron_rl.config.data_sources import Source, Sources
from megatron_rl.config.episodes import EpisodeEstimate
from megatron_rl.config.evaluation import (
    REWARD_FUNCTIONS,
    Best,
    EarlyStop,
    EvalConfig,
    Evaluation,
    EvaluationSet,
    Reward,
)
from megatron_rl.config.model import (
    CorrectionConfig,
    Layout,
    Lora,
    LossConfig,
    Model,
    Optimizer,
    RoleConfig,
    TandemConfig,
)
from megatron_rl.config.other_names import RecipeUse
from megatron_rl.config.run import Profile, Run
from megatron_rl.config.schema import ConfigError, GenerateConfig, PromptSet, RefitConfig, Stage, TrainConfig
from megatron_rl.engines.vllm.settings import Vllm

CONFIG = Path(__file__).parents[3] / "megatron_rl/config"
# Messages of functions that other tests hold whole: files and their keys, modules, descriptions, names of TRL and verl.
ELSEWHERE = ("refusing", "_rows", "_harmful", "_explain_error", "named_elsewhere", "_texts", "_files", "_modules")


def train(**parts):
    parts = {"roles": {}, "data": PromptSet(path="p"), "recipe": RecipeUse(target="grpo")} | parts
    return TrainConfig(**parts)


def evaluated(**settings):
    return EvalConfig(model=Model(path="m"), **settings)


def roles(**settings):
    made = {name: RoleConfig(model=Model(path="m"), **own) for name, own in settings.items()}
    return train(roles={name: role for name, role in made.items()})


def conflicts(**settings):
    """The conflicts of an evaluation, as a whole config reports them."""
    return "\n".join(Evaluation(**settings).conflicts())


def generated(**settings):
    return GenerateConfig(model=Model(path="m"), data=PromptSet(path="p"), output="o", **settings)


def ranks_of(layout, ranks):
    return "\n".join(Layout(**layout).rank_problems(ranks))


def profiled(profile, ranks=2, iterations=9):
    return "\n".join(Profile(**profile).rank_problems(ranks, iterations))


def stage(until):
    return Stage(until=until, overrides={"recipe.args.group_size": 4})


SETS = (EvaluationSet(name="gsm8k"),)
UNSCALED, SCALED = Reward(target=REWARD_FUNCTIONS), Reward(target=REWARD_FUNCTIONS, range=(0.0, 2.0))
VALUED = LossConfig(value_coef=0.5)
HEAD = {"same_as": "a", "head": "value"}
LONGEST = "n" * 200
CASES = [  # what makes the section, the settings that are refused, the settings beside them, words of the message
    (Layout, {"sequence_parallel": True}, {"sequence_parallel": True, "tp": 2}, "sequence_parallel = true with"),
    (Layout, {"vpp": 1, "pp": 2, "overlap_p2p": True}, {"vpp": 2, "pp": 2, "overlap_p2p": True}, "both must be at"),
    (Layout, {"vpp": 2, "pp": 1, "overlap_p2p": True}, {"vpp": None, "pp": 1}, "both must be at least 2"),
    (Layout, {"vpp": 2, "pp": 2}, {"vpp": 2, "pp": 2, "overlap_p2p": True}, "gives wrong gradients"),
    (ranks_of, {"layout": {"tp": 2}, "ranks": 3}, {"layout": {"tp": 2}, "ranks": 4}, "= 2 does not divide 3 ranks"),
    (ranks_of, {"layout": {"ep": 4}, "ranks": 6}, {"layout": {"ep": 4}, "ranks": 8}, "ep 4 x pp 1 = 4 does not"),
    (Optimizer, {"decay": "linear"}, {"decay": "linear", "decay_steps": 1}, "needs optimizer.decay_steps"),
    (
        Optimizer, {"decay": "linear", "decay_steps": 3, "warmup_steps": 3},
        {"decay": "linear", "decay_steps": 4, "warmup_steps": 3}, "is within warmup_steps = 3",
    ),
    (
        Optimizer, {"decay": "exponential", "decay_steps": 3},
        {"decay": "exponential", "decay_steps": 3, "min_lr": 1e-9}, "a constant factor never reaches 0",
    ),
    (Optimizer, {"lr": 1e-3, "min_lr": 2e-3}, {"lr": 1e-3, "min_lr": 1e-3}, "is above optimizer.lr"),
    (CorrectionConfig, {"kind": "none", "high": 2.0}, {"kind": "none"}, "nothing is weighed"),
    (CorrectionConfig, {"kind": "none", "low": 0.5}, {"kind": "mask", "low": 0.5}, "nothing is weighed"),
    (CorrectionConfig, {"kind": "none", "level": "sequence"}, {"kind": "none", "level": "token"}, "nothing is weighed"),
    (CorrectionConfig, {"kind": "mask"}, {"kind": "mask", "low": 1.0}, "without bounds"),
    (CorrectionConfig, {"kind": "mask", "low": 1.1}, {"kind": "mask", "low": 1.0}, "must lie within the bounds"),
    (CorrectionConfig, {"kind": "mask", "high": 0.9}, {"kind": "mask", "high": 1.0}, "must lie within the bounds"),
    (LossConfig, {"kl_clamp": 9.0, "kl": "k2"}, {"kl_clamp": 9.0, "kl": "k3"}, "it clamps k3 alone"),
    (LossConfig, {"objective": "gspo", "clip_low": 0.1}, {"objective": "gspo"}, "read by clipped alone"),
    (LossConfig, {"objective": "gspo", "clip_high": 0.3}, {"clip_high": 0.3}, "read by clipped alone"),
    (
        TandemConfig, {"strategy": "chunk", "boundary_ids": "f"}, {"strategy": "sentence", "boundary_ids": "f"},
        "word and sentence alone read it",
    ),
    (Lora, {"targets": ()}, {"targets": ("q_proj",)}, "name at least one matrix"),
    (Lora, {"targets": ("q_proj", "q_proj")}, {"targets": ("q_proj", "k_proj")}, "each of them once"),
    (Sources, {"sources": {"a b": Source(path="p")}}, {"sources": {"a/b-c.d": Source(path="p")}}, "name a source by"),
    (Sources, {"sources": {"a": Source()}}, {"sources": {"a": Source()}, "path": "p"}, "has no path"),
    (
        Sources, {"sources": {"a": Source(path="p")}, "path": "q"},
        {"sources": {"a": Source(path="p"), "b": Source()}, "path": "q"}, "every source has a path of its own",
    ),
    (
        Sources, {"sources": {"a": Source(path="p", weight=0.0)}},
        {"sources": {"a": Source(path="p", weight=0.0), "b": Source(path="p", weight=0.1)}}, "a weight above 0",
    ),
    (Vllm, {"quantization": "nvfp4"}, {"quantization": "mxfp8"}, "a second scale for each weight"),
    (
        Vllm, {"quantization": "fp8", "adapters": "served"}, {"quantization": "fp8", "adapters": "merged"},
        "weight syncs quantise",
    ),
    (Vllm, {"args": ("--dp-size=2",)}, {"args": ("--dpo-size=2",)}, "reaches one copy of the model"),
    (Vllm, {"args": ("--data_parallel_size", "2")}, {"args": ("--seed", "2")}, "reaches one copy of the model"),
    (RefitConfig, {"transport": "disk"}, {"transport": "disk", "directory": "d"}, "set refit.directory"),
    (EpisodeEstimate, {"told": 1}, {"told": 1, "answers": 2}, "nothing follows the answer"),
    (EpisodeEstimate, {"tool_s": 0.1}, {"tool_s": 0.0}, "nothing follows the answer"),
    (Reward, {"args": {"a": [{"b": float("nan")}]}}, {"args": {"a": [{"b": 1.0}]}}, "reward.args.a.0.b = nan"),
    (Reward, {"range": (1.0, 1.0)}, {"range": (0.9, 1.0)}, "give the least score"),
    (Reward, {"answer_format": "answer"}, {"answer_format": "{answer}"}, "it needs {answer}"),
    (EvaluationSet, {}, {"path": "p"}, "neither name nor path"),
    (EvaluationSet, {"name": "a/b"}, {"name": "a.b_c-d"}, "give a name of letters"),
    (
        conflicts, {"best": Best(metric="m"), "every": 1}, {"best": Best(metric="m"), "every": 1, "sets": SETS},
        "set evaluation.sets",
    ),
    (
        conflicts, {"early_stop": EarlyStop(metric="m"), "sets": SETS},
        {"early_stop": EarlyStop(metric="m"), "sets": SETS, "every": 1}, "evaluation.early_stop with evaluation.every",
    ),
    (conflicts, {"sets": SETS * 2}, {"sets": (*SETS, EvaluationSet(name="svamp"))}, "gsm8k is there twice"),
    (conflicts, {"sets": SETS, "n": 3, "k": (4,)}, {"sets": SETS, "n": 4, "k": (4,)}, "pass@4 needs as many samples"),
    (conflicts, {"sets": SETS, "n": 2, "temperature": 0}, {"sets": SETS, "n": 1, "temperature": 0}, "equal samples"),
    (generated, {"reward": UNSCALED}, {"reward": SCALED}, "so that wrong answers can be set aside"),
    (evaluated, {}, {"sets": SETS}, "sets = []"),
    (evaluated, {"sets": SETS, "measures": ("handoff",)}, {"sets": SETS, "measures": ("solve",)}, "a second model"),
    (
        evaluated, {"sets": SETS, "measures": ("drift",), "junior": Model(path="j")},
        {"sets": SETS, "measures": ("solve", "drift"), "junior": Model(path="j")}, "that solve writes; add solve",
    ),
    (evaluated, {"sets": SETS, "output": "o.txt"}, {"sets": SETS, "output": "o.json"}, "give NAME.json"),
    (evaluated, {"sets": SETS, "output": "-o.json"}, {"sets": SETS, "output": "./-o.json"}, "looks like an option"),
    (Run, {"dir": " "}, {"dir": "a b"}, "without line breaks"),
    (Run, {"name": "a\nb"}, {"name": "a.b"}, "without line breaks"),
    (Run, {"name": LONGEST + "n"}, {"name": LONGEST}, "has 201 bytes"),
    (Run, {"name": "a/b"}, {"name": "..."}, "without / and neither"),
    (Run, {"name": ".."}, {"name": "..a"}, "without / and neither"),
    (
        profiled, {"profile": {"iterations": (1,), "ranks": ()}}, {"profile": {"iterations": (), "ranks": ()}},
        "run.profile.ranks is empty",
    ),
    (
        profiled, {"profile": {"iterations": (1,), "ranks": (2,)}},
        {"profile": {"iterations": (1,), "ranks": (2,)}, "ranks": 3}, "the trainer has 2 ranks",
    ),
    (
        profiled, {"profile": {"iterations": (9,)}}, {"profile": {"iterations": (9,)}, "iterations": 10},
        "the run has 9 iterations",
    ),
    (
        train, {"stages": (stage(5), stage(5))}, {"stages": (stage(5), stage(6))},
        "the stage before it ends at 5",
    ),
    (roles, {"a": {}, "b": {"same_as": "c"}}, {"a": {}, "b": {"same_as": "a"}}, "shares nobody's policy itself"),
    (roles, {"a": {}, "b": {"same_as": "a"}, "c": {"same_as": "b"}}, {"a": {}, "c": {"same_as": "a"}}, "nobody's"),
    (roles, {"a": {}, "b": HEAD}, {"a": {"loss": VALUED}, "b": HEAD}, "the weight of the value loss"),
    (
        roles, {"a": {"loss": VALUED}, "v": HEAD, "b": {"same_as": "a", "head": "score"}},
        {"a": {"loss": VALUED}, "v": HEAD, "b": {"same_as": "a"}}, "only a value head can share",
    ),
    (
        roles, {"a": {}, "b": {"same_as": "a", "tandem": TandemConfig()}},
        {"a": {"tandem": TandemConfig()}, "b": {"same_as": "a", "tandem": TandemConfig()}}, "engines hold no junior",
    ),
    (roles, {"a": {"loss": VALUED}}, {"a": {"loss": VALUED}, "b": HEAD}, "add such a critic"),
    (RecipeUse, {"target": "grop"}, {"target": "grpo"}, "is no recipe"),
]  # fmt: skip


def message_of(make, settings):
    """The messages that a section is refused with; "" for a section that is accepted."""
    try:
        made = make(**settings)
    except ConfigError as error:
        return str(error)
    return made if isinstance(made, str) else ""


@pytest.mark.parametrize(("make", "refused", "accepted", "words"), CASES)
def test_pairs_of_settings_that_exclude_each_other_are_refused_and_their_neighbours_are_not(
    make, refused, accepted, words
):
    assert words in message_of(make, refused)
    assert message_of(make, accepted) == ""


def test_pairs_of_settings_cover_every_message_of_a_section():
    messages = "\n".join(message_of(make, refused) for make, refused, _, _ in CASES)
    unseen = []
    for path in sorted(CONFIG.glob("*.py")):
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(function, ast.FunctionDef) and function.name not in ELSEWHERE:
                for node in ast.walk(function):
                    if isinstance(node, ast.Yield) and isinstance(node.value, ast.JoinedStr | ast.Constant):
                        parts = node.value.values if isinstance(node.value, ast.JoinedStr) else [node.value]
                        texts = [re.escape(p.value) if isinstance(p, ast.Constant) else ".*" for p in parts]
                        if not re.search("".join(texts), messages, re.DOTALL):
                            unseen.append(f"{path.name}:{node.lineno}: {ast.unparse(node.value)}")
    assert not unseen, "add a case for: " + "\n".join(unseen)
