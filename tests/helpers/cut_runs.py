"""Configs of small runs of every method, to be cut in the middle and resumed; and what a resumed run must equal.

Their models speak fifteen words, among them all that the methods look for, so that random ones are understood now and
then.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from ranks import run_ranks
from refitted_servers import RefittedVllm
from tiny_models import make_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatron_rl.cluster.host_address import free_port
from megatron_rl.run.checkpoint import Checkpoints
from megatron_rl.run.metrics import read_metrics
from megatron_rl.training.store import iteration_files, iteration_number

WORKER = Path(__file__).parent / "open_centre_worker.py"
AT_ONCE = 11  # runs by one start of the ranks
SMALL = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 64}
FULL = "<principles>a</principles><critique>a</critique>"  # with scores behind it: a comparison in form
WORDS = [
    *("<eos>", "a", "b", "<question>a</question>", "<question>b</question>", "<answer>a</answer>"),
    *("<score>9</score>", "<score>1</score>", "\\boxed{0}", "\\boxed{1}", "yes"),
    *(f"{form}<scores>{scores}</scores>" for form in ("", FULL) for scores in ("1,2", "2,1")),
]
CALLS = [
    "<eos>",
    "a",
    "<calculator>1+1</calculator>",
    "<calculator>2*3</calculator>",
    "<answer>a</answer>",
    "<answer>b</answer>",
]
FIELDS = ("question", "answer", "rubric", "solution", "rejected")
PLAYERS = ("player_a", "player_b", "player_c")  # directories of the models
VERIFIER, CALLER = "verifier_a", "caller_a"  # likewise: one speaks verdicts, the other calls of a calculator
TOKEN = "5ecret" * 8


def role(base: Path, *, model: str | None = "a", lr: float = 0.02, **settings: Any) -> dict[str, Any]:
    path = {"model": {"path": f"{base}/{model}"}} if model else {}
    loss = {} if "head" in settings else {"kl_coef": 0.0}
    parts = {"optimizer": {"lr": lr}, "loss": loss | settings.pop("loss", {})} if model else {}
    return {
        **path, **parts, "sampling": {"max_tokens": 6}, "max_prompt_tokens": 64, "micro_batch_tokens": 128, **settings,
    }  # fmt: skip


def config(
    base: Path, name: str, recipe: str, roles: Mapping[str, Any], *, args: Mapping[str, Any] | None = None,
    reward: str = "share_of_vowels", **run: Any,
) -> dict[str, Any]:  # fmt: skip
    return {
        "roles": roles,
        "recipe": {"target": recipe, "args": args or {}},
        "data": {"path": f"{base}/data.jsonl", "fields": {n: n for n in FIELDS}},
        "reward": {"target": f"open_centre_rewards:{reward}", "workers": 1, "timeout_s": 120.0},
        "preflight": {"enabled": False},
        "run": {"dir": f"{base}/runs", "name": name, "save_every": 1} | {"prompts_per_iteration": 4} | run,
        "launch": {"nproc": 2},
    }


def write_data(base: Path, rubric: Sequence[Mapping[str, Any]]) -> None:
    fields = {"rubric": rubric, "solution": "a b a b", "rejected": "b"}
    rows = [{"question": f"{c}?", "answer": c, **fields} for c in "abcdefghijklmnop"]
    (base / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_speakers(base: Path, names: Sequence[str], words: Sequence[str]) -> None:
    """Writes random models whose tokens are `words`. What is none of them is the second one."""
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[1]))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    for seed, name in enumerate(names):
        make_model(base / name, "qwen2", vocab_size=len(words), num_hidden_layers=1, seed=seed, **SMALL)
        PreTrainedTokenizerFast(tokenizer_object=core, eos_token=words[0]).save_pretrained(base / name)


def write_players(base: Path) -> None:
    """Writes what the runs of this file need besides the data."""
    write_speakers(base, PLAYERS, WORDS)
    write_speakers(base, [VERIFIER], _verifications())
    write_speakers(base, [CALLER], CALLS)
    (base / "turns.txt").write_text("{question} {solution} {num_steps} b")
    (base / "plain.txt").write_text("{question} a")
    judged = "{question} {answer} {response} {criterion} {first} {second} b"
    (base / "judged.txt").write_text(judged)
    (base / "referring.txt").write_text(judged.replace("question", "references"))
    (base / "token").write_text(TOKEN)


def start_servers() -> list[RefittedVllm]:
    return [RefittedVllm(TOKEN, vocab=len(WORDS)) for _ in PLAYERS]


def dapo(base: Path, name: str) -> dict[str, Any]:
    options = {"dynamic_sampling": {"rounds": 4}, "overlong": {"cache": 2, "penalty": 0.25}}
    return _single(base, name, "dapo:Dapo", options)


def brevity(base: Path, name: str) -> dict[str, Any]:
    options = {"brevity": {"share": 0.5}, "overlong": {"cache": 2, "penalty": 0.25}}
    return _single(base, name, "dapo:Dapo", options)


def three(base: Path, name: str) -> dict[str, Any]:
    roles = {n: _player(base, i) for i, n in enumerate(("proposer", "solver", "judge"))}
    return _evolve(base, name, roles)


def shared(base: Path, name: str) -> dict[str, Any]:
    others = {n: role(base, model=None, same_as="proposer") for n in ("solver", "judge")}
    return _evolve(base, name, {"proposer": _player(base, 0)} | others)


def rubric(base: Path, name: str) -> dict[str, Any]:
    args = {"updates": 3, "group_size": 4, "judgements": 4, "train_judge": True, "labels": "open_centre_rewards:gold"}
    return _judged(base, name, "megatron_rl.contrib.rubric:Rubric", args)


def pairwise(base: Path, name: str) -> dict[str, Any]:
    args = {"updates": 2, "group_size": 4, "judgements": 4, "judge_iterations": 1}
    return _judged(base, name, "megatron_rl.contrib.pairwise:Pairwise", args)


def self_play(base: Path, name: str) -> dict[str, Any]:
    templates = {f"{part}_template": f"{base}/plain.txt" for part in ("proposer", "solver")}
    args = {"updates": 3, "proposals": 2, "answers": 4, "proposer_estimator": "ema", **templates}
    roles = {"proposer": _player(base, 0), "solver": _player(base, 1)}
    target = "megatron_rl.contrib.self_play:SelfPlay"
    return config(base, name, target, roles, args=args, reward="begins_well", prompts_per_iteration=8)


def tango_agents(base: Path, name: str) -> dict[str, Any]:
    changes = {"environment": {"target": "open_centre:Counting"}, "rewards": {"letters": 0.7}}
    settings = judged_iterations(base, name, _player(base, 0), changes)
    for own in settings["roles"].values():
        own["loss"] |= {"centering": 3}
    return settings


def judged_iterations(base: Path, name: str, agent: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config of a run of TangoAgents in which both players have two iterations at least."""
    verifier = role(base, model=VERIFIER, lr=0.002, sampling={"max_tokens": 2})
    args = {
        "role": "agent", "generator_updates": 2, "warmup_updates": 1, "generator_iterations": 1, "group_size": 4,
        "verifications": 4, "alpha_start": 0.5, "verifier_template": f"{base}/turns.txt", **changes,
    }  # fmt: skip
    target, roles = "megatron_rl.recipes.tango_agents:TangoAgents", {"agent": agent, "verifier": verifier}
    return config(base, name, target, roles, args=args, reward="begins_well", prompts_per_iteration=8)


def ppo(base: Path, name: str) -> dict[str, Any]:
    """A critic that warms up for an iteration, and a coefficient of the KL divergence that changes."""
    penalty = {"kl_coef": 0.1, "kl_target": 1e-3, "kl_horizon": 16}
    estimator = {"target": "gae", "args": {"gamma": 0.97, "lam": 0.9, "critic_warmup": 1, **penalty}}
    args = {"updates": 4, "group_size": 2, "estimator": estimator, "template": f"{base}/plain.txt"}
    roles = {"generator": _player(base, 0), "critic": role(base, model=PLAYERS[1], head="value", lr=0.01)}
    return config(base, name, "megatron_rl.recipes.ppo:Ppo", roles, args=args, reward="begins_well")


def ppo_shared(base: Path, name: str) -> dict[str, Any]:
    """A critic that shares the policy, and a coefficient of the KL divergence that changes."""
    settings = ppo(base, name)
    del settings["recipe"]["args"]["estimator"]["args"]["critic_warmup"]
    generator = _player(base, 0, loss={"value_coef": 0.5, "centering": 4}, samples_per_optimizer_step=4)
    generator["sampling"] |= {"top_p": 0.9}
    return settings | {"roles": {"generator": generator, "critic": {"same_as": "generator", "head": "value"}}}


METHODS: dict[str, Callable[[Path, str], dict[str, Any]]] = {
    "dapo": dapo, "brevity": brevity, "three": three, "shared": shared, "rubric": rubric, "pairwise": pairwise,
    "self_play": self_play, "tango_agents": tango_agents, "ppo": ppo, "ppo_shared": ppo_shared,
}  # fmt: skip

# METHOD_STALENESS: (how many iterations may be collected ahead, after how many iterations the run is cut)
EVERY = {
    "dapo_0": (0, 2), "dapo_1": (1, 2), "dapo_2": (2, 2), "brevity_0": (0, 2), "brevity_2": (2, 2), "three_0": (0, 2),
    "three_1": (1, 1), "shared_0": (0, 1), "shared_1": (1, 1), "rubric_0": (0, 2), "rubric_1": (1, 1),
    "pairwise_0": (0, 3), "pairwise_1": (1, 3), "pairwise_2": (2, 1), "self_play_0": (0, 2), "self_play_1": (1, 1),
    "tango_agents_0": (0, 2), "tango_agents_2": (2, 3), "ppo_0": (0, 2), "ppo_2": (2, 2),
    "ppo_shared_0": (0, 2), "ppo_shared_2": (2, 2),
}  # fmt: skip
QUICK = ("dapo_2", "tango_agents_2", "ppo_2")  # the others: make test-more ONLY=resume
FEW = {case: EVERY[case] for case in QUICK}
TELLING = {  # metrics that are above 0 before and after the cut
    "dapo": ("retired", "resting", "hinted"),
    "brevity": ("retired", "resting", "hinted"),
    "three": ("accepted", "pool"),
    "shared": ("accepted", "pool"),
    "rubric": ("reward/agrees",),
    "pairwise": ("first_wins",),
    "self_play": ("played",),
    "tango_agents": ("verdicts_match", "head_mass", "drift_mass"),
    "ppo": ("kl_coef",),
    "ppo_shared": ("kl_coef", "head_mass", "drift_mass"),
}


def ahead(settings: dict[str, Any], base: Path, staleness: int, servers: Sequence[RefittedVllm]) -> dict[str, Any]:
    """The same run with iterations collected ahead of training, by servers."""
    names = [name for name, part in settings["roles"].items() if not {"same_as", "head"} & part.keys()]
    urls = {name: [server.url] for name, server in zip(names, servers, strict=False)}
    engine = {"kind": "vllm", "urls": urls, "start": False, "token_file": f"{base}/token"}
    return settings | {"engine": engine, "rollouts": {"max_staleness": staleness}}


def cases(
    base: Path,
    chosen: Mapping[str, tuple[int, int]],
    servers: Sequence[RefittedVllm],
    method: Callable[[Path, str], dict[str, Any]] | None = None,
) -> list[tuple[dict[str, Any], int | None]]:
    """Returns for each chosen {method_staleness: (staleness, iterations until it is cut)} three runs, each with the
    number of iterations after which it leaves: a whole one, one that is cut, and its resumption. `method`: makes the
    configs, if none of METHODS does."""
    settings_of_cases: list[tuple[dict[str, Any], int | None]] = []
    for case, (staleness, iterations) in chosen.items():
        make = method or METHODS[case.rpartition("_")[0]]
        for name, leave_after in ((case, None), (f"{case}_cut", iterations), (f"{case}_cut", None)):
            settings = make(base, name)
            settings_of_cases.append(
                (ahead(settings, base, staleness, servers) if staleness else settings, leave_after)
            )
    return settings_of_cases


def assert_same(uncut: Path, cut: Path) -> None:
    """Fails unless the two runs are the same but for times: metrics, iterations to the last bit, states and weights."""
    first, second = ([(r.iteration, r.cycle, r.scope, r.metrics) for r in read_metrics(run)] for run in (uncut, cut))
    assert first == second
    files = [iteration_files(run / "rollouts") for run in (uncut, cut)]
    assert [p.name for p in files[0]] == [p.name for p in files[1]] and files[0]
    for ours, theirs in zip(*files, strict=True):
        assert pq.read_table(ours).equals(pq.read_table(theirs)), ours.name
    states = [Checkpoints(run / "checkpoints").newest() for run in (uncut, cut)]
    assert all(states) and states[0].number == states[1].number
    assert states[0].read_state() == states[1].read_state()
    names = [sorted(p.name for p in (run / "models").iterdir()) for run in (uncut, cut)]
    assert names[0] == names[1] and names[0]
    for name in names[0]:
        model = f"models/{name}/model.safetensors"
        assert (uncut / model).read_bytes() == (cut / model).read_bytes(), name


def assert_telling(run: Path, case: str, staleness: int, cut: int) -> None:
    """Fails where a run does not show what it is for: iterations as old as is allowed, and a state that changes."""
    rows = [row for row in read_metrics(run) if "staleness" in row.metrics]
    trained = [row for row in rows if not row.metrics["skipped"]]
    assert len(trained) > cut and {row.iteration for row in rows} == set(range(num_iterations(run))), (
        "some have no signal"
    )
    ages = staleness // 2 if case.startswith(("pairwise", "tango_agents")) else staleness  # its roles take turns
    assert max(row.metrics["staleness"] for row in rows) == ages
    metrics = {name: [row.metrics[name] for row in rows if name in row.metrics] for row in rows for name in row.metrics}
    for name in TELLING[case.rpartition("_")[0]]:
        assert sum(metrics[name][:cut]) and sum(metrics[name][cut:]), (name, metrics[name])


def run_all(base: Path, every: Sequence[tuple[Mapping[str, Any], int | None]], ranks: int = 2) -> None:
    """Runs all configs on some ranks, each with the number of iterations after which it is asked to leave.

    Some by one start: gloo leaves threads of every process group behind, which wake up again and again.
    """
    files: list[Any] = []
    for i, (settings, leave_after) in enumerate(every):
        (base / f"{i}_{ranks}.yaml").write_text(json.dumps(settings))
        files.append([str(base / f"{i}_{ranks}.yaml"), free_port("127.0.0.1"), leave_after])
    for first in range(0, len(files), AT_ONCE):
        some = files[first : first + AT_ONCE]
        statuses = run_ranks(WORKER, ranks, base / f"ranks{ranks}_{first}", json.dumps(some))
        assert statuses == [[0 if leave_after is None else 130 for _, _, leave_after in some]] * ranks


def num_iterations(run: Path) -> int:
    return 1 + iteration_number(iteration_files(run / "rollouts")[-1])


def _verifications() -> list[str]:
    """Returns as many words as WORDS has, as the servers take: verifications of one iteration and of two."""
    word = {"+": "\\boxed{CORRECT}", "-": "\\boxed{INCORRECT}"}
    words = [
        f"<step_verification>{''.join(f'<step>{word[v]}</step>' for v in verdicts)}</step_verification>"
        f"<final_verification>{word[final]}</final_verification>"
        for verdicts in ("+", "-", "++", "+-", "-+", "--")
        for final in "+-"
    ]
    return ["<eos>", "a", "b", *words]


def _player(base: Path, number: int, **settings: Any) -> dict[str, Any]:
    return role(base, model=PLAYERS[number], lr=0.002, **settings)


def _single(base: Path, name: str, target: str, options: Mapping[str, Any]) -> dict[str, Any]:
    every = {"curriculum": {"retire_at": 0.5, "rest_at": 0.0}, "hints": {"shares": [0.5], "introduction": " "}}
    args = {"updates": 4, "group_size": 4, "template": f"{base}/plain.txt", **every, **options}
    roles = {"generator": _player(base, 0)}
    return config(base, name, f"megatron_rl.recipes.{target}", roles, args=args, reward="begins_well")


def _evolve(base: Path, name: str, roles: Mapping[str, Any]) -> dict[str, Any]:
    parts = ("proposer", "reference", "solver", "question", "answer")
    templates = {f"{part}_template": f"{base}/judged.txt" for part in parts}
    templates["reference_template"] = f"{base}/referring.txt"
    args = {"updates": 3, "proposals": 2, "answers": 2, "judgements": 1, **templates}
    return config(base, name, "megatron_rl.contrib.evolve:Evolve", roles, args=args, prompts_per_iteration=8)


def _judged(base: Path, name: str, target: str, own_args: Mapping[str, Any]) -> dict[str, Any]:
    roles = {"generator": _player(base, 0), "judge": _player(base, 1, sampling={"max_tokens": 2})}
    args = {**own_args, "generator_template": f"{base}/plain.txt", "judge_template": f"{base}/judged.txt"}
    return config(base, name, target, roles, args=args, prompts_per_iteration=8)
