"""Measures on real tiny models: solving and resume, hand-off, legibility and drift, verifiers, hostile texts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from fake_engines import ScriptedEngine
from specs import spec_of
from tiny_models import make_model
from toys import EOS, characters, graded
from transformers import AutoModelForCausalLM

from megatron_rl.commands import evaluate
from megatron_rl.config import files as config_files
from megatron_rl.config.schema import EvalConfig
from megatron_rl.data.problems import Problem
from megatron_rl.engines.embedded.embedded_engine import EmbeddedEngine
from megatron_rl.engines.protocol import Sampling, complete
from megatron_rl.evaluation import text_scores
from megatron_rl.evaluation.draw import ProblemSet, draw_within, limit
from megatron_rl.evaluation.handoff import SWITCH, Chain, write
from megatron_rl.evaluation.judge import judged, reading, step_counts, verifier_values, vote
from megatron_rl.evaluation.samples import Samples, read_samples
from megatron_rl.evaluation.sets import read_sets
from megatron_rl.evaluation.solve import Solver
from megatron_rl.evaluation.text_scores import Texts
from megatron_rl.evaluation.votes import Weigher
from megatron_rl.main import main
from megatron_rl.run.input_digests import read_files
from megatron_rl.session.launch_ranks import Place
from megatron_rl.texts.vocabulary import check_vocabularies
from megatron_rl.types import Stop

SIZES = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "vocab_size": 97, "eos_token_id": EOS}
HERE = Place(0, 1, 0, "127.0.0.1", 0)
TOKENIZER = characters()
PAGE_ATTACK = "<script>alert(1)</script><img src=x onerror=alert(2)>"


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> list[Path]:
    """Two models of one vocabulary."""
    base = tmp_path_factory.mktemp("models")
    made = [make_model(base / name, seed=seed, max_position_embeddings=1024, **SIZES) for seed, name in enumerate("ab")]
    for model in made:
        TOKENIZER.save_pretrained(model)
    return made


@pytest.fixture(scope="module")
def engines(models):
    made = [EmbeddedEngine(model, tokenizer=TOKENIZER) for model in models]
    for engine in made:
        engine.load_pretrained()
    return made


@pytest.fixture
def data(tmp_path) -> Path:
    """Writes gsm8k and amc23 in the form of their files, and solutions with known errors."""
    base = tmp_path / "data"
    files = {
        "gsm8k/test": [
            {"question": f"What is {i}+1? {PAGE_ATTACK}", "answer": f"think\n#### 1,{i:03d}"} for i in range(7)
        ],
        "amc23/test": [{"question": f"How many {i}?", "problem": "x", "answer": float(i)} for i in range(5)],
        "processbench/gsm8k": [
            {
                "id": f"g{i}",
                "problem": f"p{i}",
                "steps": ["a", "b", "c"],
                "label": i % 4 - 1,
                "final_answer_correct": i % 4 == 0,
            }
            for i in range(8)
        ],
    }
    for name, rows in files.items():
        path = base / f"{name}.jsonl"
        path.parent.mkdir(parents=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (base / "short.txt").write_text("{question}\n")
    (base / "judge.txt").write_text("{question} {solution} {num_steps}\n")
    return base


def run(config):
    return evaluate.run(spec_of(config), HERE)


def config_of(models, folder, **changes) -> EvalConfig:
    settings = {
        "model": {"path": str(models[0])},
        "sets": ["gsm8k", "amc23"],
        "data_dir": str(folder),
        "template": str(folder / "short.txt"),
        "sampling": {"max_tokens": 24, "temperature": 1.0},
        "n": 2,
        "k": [1, 2],
        "reward": {"workers": 1, "timeout_s": 120.0},
        "output": str(folder.parent / "out/eval.json"),
    } | changes
    return config_files.load(EvalConfig, [], [f"{name}={json.dumps(value)}" for name, value in settings.items()])


def test_two_benchmarks_end_with_a_table_samples_and_a_page(models, data, capsys):
    config = config_of(models, data)
    assert run(config) == 0
    said = capsys.readouterr().out
    assert "GSM8K" in said and "AMC 2023" in said and "mean over sets" in said and "pass@2" in said and "maj@2" in said
    out = data.parent / "out"
    metrics, rows = json.loads((out / "eval.json").read_text()), read_samples(out / "eval.jsonl")
    assert len(rows) == 24 and [r["sample"] for r in rows[:4]] == [0, 1, 0, 1] and rows[0]["answer"] == "1000"
    assert metrics["sets"]["gsm8k"]["solve"]["problems"] == 7 and metrics["metrics"]["accuracy"] == pytest.approx(
        sum(
            sum(r["score"] for r in rows if r["set"] == name) / (2 * count)
            for name, count in (("gsm8k", 7), ("amc23", 5))
        )
        / 2
    )
    page = (out / "eval.html").read_text()
    assert PAGE_ATTACK not in page and "&lt;script&gt;" in page and "http" not in page.replace("http-equiv", "")
    assert not (out / "eval.jsonl.partial").exists()


def test_what_was_killed_goes_on_and_ends_the_same(models, data, capsys, monkeypatch):
    monkeypatch.setattr(evaluate, "CHUNK", 3)
    config = config_of(models, data)
    run(config)
    out = data.parent / "out"
    whole, metrics = (out / "eval.jsonl").read_bytes(), json.loads((out / "eval.json").read_text())
    # A kill leaves some problems behind, and a last line that was cut in half.
    tasks = [
        evaluate.Evaluation(config, evaluate.OpenModels({}, {}, {config.model: TOKENIZER})).problems(source)
        for source in read_sets(spec_of(config).evaluated)
    ]
    digest = evaluate._digest(spec_of(config).settings, tasks, read_files(spec_of(config).settings))
    partial = Samples(out / "eval.jsonl", digest)
    rows = read_samples(out / "eval.jsonl")
    partial.add([rows[i : i + 2] for i in range(0, 14, 2)])
    text = (out / "eval.jsonl.partial").read_bytes()
    (out / "eval.jsonl.partial").write_bytes(text[: len(text) // 2])
    (out / "eval.json").unlink()
    capsys.readouterr()
    run(config)
    assert "problems were done before" in capsys.readouterr().err
    assert (out / "eval.jsonl").read_bytes() == whole
    again = json.loads((out / "eval.json").read_text())
    assert again | {"seconds": 0} == metrics | {"seconds": 0}


def test_samples_of_another_evaluation_are_not_gone_on_with(tmp_path):
    row = {"set": "a", "measure": "solve", "id": 0, "sample": 0}
    Samples(tmp_path / "x.jsonl", "one").add([[row]])
    assert Samples(tmp_path / "x.jsonl", "two").resumed == 0
    Samples(tmp_path / "x.jsonl", "two").add([[row], [row | {"id": 1}, row | {"id": 1, "sample": 1}]])
    again = Samples(tmp_path / "x.jsonl", "two")
    assert again.resumed == 2 and again.missing("a", "solve", range(3)) == [2] and len(again.rows("a", "solve")[1]) == 2


@pytest.mark.parametrize("context", [None, 40])
def test_a_problems_draws_do_not_depend_on_the_others(engines, context):
    """Resuming is exact because of this."""
    prompts = {i: TOKENIZER(f"problem {i} " + "x" * i)["input_ids"] for i in range(4)}
    sampling = Sampling(max_tokens=20, n=2, seed=3)
    together = draw_within(engines[0], prompts, sampling, context)
    for i, prompt in prompts.items():
        [alone] = draw_within(engines[0], {i: prompt}, sampling, context).values()
        assert [c.tokens.tolist() for c in alone] == [c.tokens.tolist() for c in together[i]]
        assert context is None or all(len(c.tokens) <= limit(len(prompt), 20, context) for c in together[i])


def test_the_budget_is_what_the_context_leaves():
    assert (limit(100, 3000, 4096), limit(2000, 3000, 4096), limit(5000, 3000, 4096), limit(10, 7, None)) == (
        3000,
        2088,
        0,
        7,
    )


def test_hand_off_between_equal_models_is_the_solo_text(engines):
    """The senior is the junior, and both are greedy: their common text is that of one model alone."""
    prompts = [TOKENIZER(text)["input_ids"] for text in ("first", "a second prompt", "3?")]
    greedy = Sampling(max_tokens=60, temperature=0.0)
    solo = [c[0] for c in complete(engines[0], prompts, greedy)]
    for switch in ("\n\n", None):
        # The tiny model seldom writes two newlines: a switch at a character that it does write takes many turns.
        mark = TOKENIZER.decode([solo[0].tokens[5]]) if switch is None else switch
        chains = [Chain(np.array(p), i * 1000, 60) for i, p in enumerate(prompts)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("megatron_rl.evaluation.handoff.SWITCH", mark)
            write(chains, [engines[0], engines[0]], TOKENIZER, greedy)
        assert [c.tokens.tolist() for c in chains] == [s.tokens.tolist() for s in solo]
        assert switch is not None or max(len(c.turns) for c in chains) > 2


def scripted(turns):
    """Makes engines that share a list of `turns`: whichever is asked says the next one, and remembers the question."""
    left = iter(turns)

    class Turn(ScriptedEngine):
        def one(self, prompt, key, sample, sampling):
            found = super().one(prompt, key, sample, sampling)
            text = TOKENIZER.decode(found.tokens)[: sampling.max_tokens]  # its tokens are single characters
            cut = replace(found, tokens=found.tokens[: len(text)], logprobs=found.logprobs[: len(text)])
            stop = (
                Stop.STOP
                if text.endswith(SWITCH)
                else found.stop
                if len(cut.tokens) == len(found.tokens)
                else Stop.LENGTH
            )
            return replace(cut, stop=stop)

    def answer(prompt, i, j, sampling):
        text = next(left)
        return [EOS if c == "$" else TOKENIZER(c)["input_ids"][0] for c in text]

    return [Turn(answer, eos=EOS), Turn(answer, eos=EOS)]


@pytest.mark.parametrize(
    ("turns", "budget", "text", "stop", "sizes"),
    [
        (["ab\n\n", "c\n\n", "d$"], 50, "ab\n\nc\n\nd", Stop.EOS, [4, 3, 2]),
        (["ab\n\n", "cdefgh\n\n"], 9, "ab\n\ncdefg", Stop.LENGTH, [4, 5]),
        (["ab\n\n", "cd"], 50, "ab\n\ncd", Stop.LENGTH, [4, 2]),
        (["ab\n\n"], 4, "ab\n\n", Stop.LENGTH, [4]),
    ],
)
def test_turns_share_a_budget_and_end_as_the_protocol_says(turns, budget, text, stop, sizes):
    both = scripted(turns)
    chain = Chain(np.array([1, 2]), 7005, budget)
    write([chain], both, TOKENIZER, Sampling(max_tokens=budget))
    assert (
        TOKENIZER.decode(chain.tokens, skip_special_tokens=True) == text and chain.stop is stop and chain.turns == sizes
    )
    asked = [call for engine in both for call in engine.asked]
    assert all(sampling.n == 1 and SWITCH in sampling.stop_strings for _, sampling in asked)
    assert len(both[0].asked) == (len(sizes) + 1) // 2 and len(both[1].asked) == len(sizes) // 2, (
        "they take turns, the first begins"
    )
    if len(sizes) > 1:
        second_prompt, sampling = both[1].asked[0]
        assert second_prompt[:2] == [1, 2] and len(second_prompt) == 2 + sizes[0]
        assert sampling.max_tokens == budget - sizes[0]
    assert both[0].keys[0] == 7005 and [k for e in both[1:] for k in e.keys][:1] == [7005 + sizes[0]] * (len(sizes) > 1)


def test_rounds_are_limited():
    """The release's run_all_rounds (CSSLab/Tandem-RLVR, eval/handoff.py), given this script and MAX_ROUNDS = 4, writes
    8 turns: a round is a turn of each model."""
    both = scripted(["a\n\n"] * 10)
    chain = Chain(np.array([1]), 0, 1000)
    write([chain], both, TOKENIZER, Sampling(max_tokens=1000), max_rounds=4)
    assert len(chain.turns) == 8 and chain.stop is Stop.LENGTH


def test_two_chains_with_the_same_index_are_both_written(engines):
    chains = [Chain(np.array([5, 6]), 3, 10), Chain(np.array([7, 8, 9]), 3, 10)]
    write(chains, [engines[0], engines[1]], TOKENIZER, Sampling(max_tokens=10, seed=1))
    assert all(chain.stop is not None and 0 < len(chain.tokens) <= 10 for chain in chains)


def test_models_of_two_vocabularies_are_refused():
    with pytest.raises(ValueError, match="vocabularies differ in"):
        check_vocabularies(TOKENIZER, characters("abc"), "ids pass")


def reference_logprobs(model, sequence):
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(model).double()(torch.tensor([sequence])).logits[0].log_softmax(-1)


def test_legibility_and_drift_are_those_of_transformers(models, engines):
    prompt, text = TOKENIZER("What is it?")["input_ids"], TOKENIZER("It is \\boxed{4}.")["input_ids"]
    row = {"set": "s", "id": 0, "row": 0, "sample": 0, "token_ids": text}
    p, q = (reference_logprobs(model, prompt + text)[len(prompt) - 1 : -1] for model in models)
    labels = torch.tensor(text)[:, None]
    [[legible]] = text_scores.legibility(engines[1], [Texts(prompt, [row])], 1000)
    assert legible["cross_entropy"] == pytest.approx(-q.gather(1, labels).mean().item(), abs=1e-5)
    [[drifted]] = text_scores.drift(engines[0], {"b": engines[1], "a": engines[0]}, [Texts(prompt, [row])], 1000)
    assert drifted["kl_b"] == pytest.approx((p.exp() * (p - q)).sum(-1).mean().item(), abs=1e-5)
    assert drifted["gap_b"] == pytest.approx((p - q).gather(1, labels).mean().item(), abs=1e-5)
    assert drifted["kl_b_a"] == pytest.approx((q.exp() * (q - p)).sum(-1).mean().item(), abs=1e-5)
    assert drifted["kl_a"] == 0.0 == drifted["gap_a"]


def test_texts_that_do_not_fit_are_left_out(models, engines):
    rows = [
        {"set": "s", "id": 0, "row": 0, "sample": j, "token_ids": tokens} for j, tokens in enumerate(([], [5] * 20))
    ]
    fits = {"set": "s", "id": 1, "row": 1, "sample": 0, "token_ids": [5] * 18}
    texts = [Texts([3, 4], rows), Texts([3, 4], [fits])]
    [none, [some]] = text_scores.legibility(engines[0], texts, 20)
    wanted = -reference_logprobs(models[0], [3, 4] + [5] * 18)[1:-1, 5].mean().item()
    assert [r["cross_entropy"] for r in none] == [None, None] and some["cross_entropy"] == pytest.approx(
        wanted, abs=1e-5
    )
    [none, [some]] = text_scores.drift(engines[0], {"b": engines[1]}, texts, 20)
    assert [r["kl_b"] for r in none] == [None, None] and some["kl_b"] > 0


def test_long_texts_are_scored_in_parts(engines, monkeypatch):
    sequence = [1 + i % 90 for i in range(50)]
    whole = text_scores._compared({"": engines[0], "b": engines[1]}, sequence, 7)
    scores = engines[0].score([sequence])
    monkeypatch.setattr("megatron_rl.engines.embedded.embedded_engine.SCORE_TOKENS", 4)
    assert text_scores._compared({"": engines[0], "b": engines[1]}, sequence, 7) == pytest.approx(whole, abs=1e-6)
    assert engines[0].score([sequence])[0] == pytest.approx(scores[0], abs=1e-5)


def test_all_measures_of_two_models_in_one_run(models, data):
    changes = {
        "measures": ["solve", "handoff", "legibility", "drift"],
        "junior": {"path": str(models[1])},
        "base": {"path": str(models[1])},
    }
    config = config_of(models, data, sets=["amc23"], **changes)
    run(config)
    metrics = json.loads((data.parent / "out/eval.json").read_text())
    found = metrics["metrics"]
    assert (
        found["legibility/cross_entropy"] > 0 and found["drift/kl_junior"] > 0 and found["drift/kl_junior_base"] == 0.0
    )
    assert (
        found["drift/kl_base"] == found["drift/kl_junior"]
        and "handoff/pass@2" in found
        and "handoff/first_share" in found
    )
    assert set(metrics["sets"]["amc23"]) == {"title", "solve", "handoff", "legibility", "drift"}


def problem_set(answers):
    problems = [Problem(i, {"question": f"q{i}", "answer": answer}) for i, answer in enumerate(answers)]
    return ProblemSet(
        name="s", title="S", problems=problems, prompts=[TOKENIZER(f"q{i}")["input_ids"] for i in range(len(answers))]
    )


def says(text):
    return [*(TOKENIZER(c)["input_ids"][0] for c in text), EOS]


def test_a_verifiers_votes_weigh_samples():
    generator = ScriptedEngine(lambda prompt, i, j, s: says(str(j)), eos=EOS)
    verdict = "<final_verification>\\boxed{{{}}}</final_verification>"
    verifier = ScriptedEngine(
        lambda prompt, i, j, s: says(
            verdict.format("CORRECT" if TOKENIZER.decode(prompt).endswith("=1") else "INCORRECT")
        ),
        eos=EOS,
    )
    weigher = Weigher(
        engine=verifier, tokenizer=TOKENIZER, template="{question}={solution}", sampling=Sampling(max_tokens=99, n=3)
    )
    solver = Solver(
        engine=generator, tokenizer=TOKENIZER, sampling=Sampling(max_tokens=9, n=3), weigher=weigher,
        grade=graded(lambda response, payload: response == payload["answer"]),
    )  # fmt: skip
    rows = solver(problem_set(["1", "2"]), [0, 1])
    assert [[r["confidence"] for r in group] for group in rows] == [[0.0, 1.0, 0.0]] * 2
    assert [[r["score"] for r in group] for group in rows] == [[0, 1, 0], [0, 0, 1]] and rows[1][0]["id"] == 1


VERDICTS = "<step_verification>{}</step_verification><final_verification>\\boxed{{{}}}</final_verification>"


def verification(steps, final):
    return VERDICTS.format(
        "".join(f"<step>x \\boxed{{{'CORRECT' if s else 'INCORRECT'}}}</step>" for s in steps), final
    )


@pytest.mark.parametrize(
    ("text", "predicted", "final"),
    [
        (verification([1, 1, 1], "CORRECT"), -1, True),
        (verification([1, 0, 0], "INCORRECT"), 1, False),
        (verification([1, 0], "INCORRECT"), 1, False),
        (verification([1, 1], "CORRECT"), None, True),
        ("nonsense", None, None),
    ],
)
def test_the_first_wrong_step_is_read(text, predicted, final):
    found = reading(text, 3)
    assert (found["predicted"], found["final"]) == (predicted, final)


def test_votes_on_steps():
    assert vote([1, 1, -1, None]) == 1 and vote([2, 1]) == 1 and vote([None]) is None


def judged_sample(label, correct, text, sample=0, steps=3):
    return {
        "label": label,
        "correct": correct,
        "steps": ["s"] * steps,
        "step_labels": None,
        "finished": True,
        "sample": sample,
    } | reading(text, steps)


def test_processbench_metrics_on_a_worked_example():
    groups = [
        [judged_sample(-1, True, verification([1, 1, 1], "CORRECT"))],
        [judged_sample(-1, True, verification([0, 1, 1], "CORRECT"))],
        [judged_sample(1, False, verification([1, 0, 1], "INCORRECT"))],
        [judged_sample(2, False, verification([0, 1, 1], "INCORRECT"))],  # rightly rejected, at the wrong place
        [judged_sample(0, False, "unreadable")],
    ]
    metrics, sure = judged(groups)
    value = {name: interval.value for name, interval in metrics.items()}
    assert value["correct_accuracy"] == 0.5 and value["error_accuracy"] == pytest.approx(1 / 3)
    assert value["processbench_f1"] == pytest.approx(2 * 0.5 / 3 / (0.5 + 1 / 3))
    assert value["outcome_accuracy"] == 1.0 and value["outcome_wrong_accuracy"] == 1.0
    assert value["located_when_rejected"] == 0.5
    assert step_counts([row for group in groups for row in group]).total == 3 + 3 + 2 + 3, (
        "steps after the first error are not labelled"
    )
    assert value["aligned"] == 0.8 and sure is not None and sure.ece == 0.0


def test_votes_make_a_confidence():
    right = [judged_sample(-1, True, verification([1, 1, 1], "CORRECT" if j < 3 else "INCORRECT"), j) for j in range(4)]
    metrics, sure = judged([right, right])
    assert sure is not None and sure.bins[0].confidence == 0.75 and sure.ece == 0.25
    assert metrics["correct_accuracy_vote"].value == 1.0 and "processbench_f1" not in metrics, "one class is empty"


def test_a_verifier_sees_steps_in_tags():
    values = verifier_values({"question": "q", "steps": ["a", "b"]})
    assert values["solution"] == "<think>\n<step>a</step>\n<step>b</step>\n</think>" and values["num_steps"] == "2"


def test_a_verifier_on_processbench_and_on_a_set_of_ones_own(models, data):
    own = data / "own.jsonl"
    own.write_text(json.dumps({"q": "1+1?", "parts": ["2"], "first_wrong": -1, "ok": True}) + "\n")
    fields = {"question": "q", "answer": "first_wrong", "label": "first_wrong", "steps": "parts", "correct": "ok"}
    changes = {
        "sets": ["processbench_gsm8k", {"path": str(own), "fields": fields}],
        "template": str(data / "judge.txt"),
    }
    run(config_of(models, data, **changes))
    metrics = json.loads((data.parent / "out/eval.json").read_text())
    assert (
        metrics["sets"]["processbench_gsm8k"]["judge"]["problems"] == 8
        and metrics["sets"]["own"]["judge"]["problems"] == 1
    )
    assert metrics["sets"]["processbench_gsm8k"]["judge"]["metrics"]["processbench_f1"] == 0.0
    assert metrics["sets"]["processbench_gsm8k"]["judge"]["counts"]["unreadable"] == 16


def test_checkpoints_are_compared_problem_by_problem(models, data, tmp_path, capsys):
    out = data.parent / "out"
    for name, model in zip("ab", models, strict=True):
        run(config_of(models, data, model={"path": str(model)}, output=str(out / f"{name}.json")))
    capsys.readouterr()
    assert main(["eval", "--compare", str(out / "a.json"), str(out / "b.json"), "--out", str(tmp_path / "c")]) == 0
    assert (
        "paired differences" in capsys.readouterr().out
        and "Paired differences" in (tmp_path / "c/comparison.html").read_text()
    )
    rows = json.loads((tmp_path / "c/comparison.json").read_text())
    assert [r["name"] for r in rows] == ["gsm8k", "amc23", "all"] and rows[2]["test"]["problems"] == 12
    assert main(["eval", "--compare", str(out / "a.json"), str(out / "none.json"), "--out", str(tmp_path / "c")]) == 2
    assert "is no result" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("sets=[gsm9k]", "'gsm9k' is unknown; known are math500"),
        ("sets=[amc25]", "amc25 is not on the hub"),
        ("sets=[gsm8k,{path: gsm8k.jsonl}]", "gsm8k is there twice"),
        ("sets=[{n: 2}]", "a set has neither name nor path"),
        ("sets=[{name: gsm8k, k: [9]}]", "pass@9 needs as many samples"),
        ("sets=[]", "sets = []"),
        ("k=[3]", "needs as many samples"),
        ("measures=[handoff]", "needs a second model"),
        ("output=x.txt", "give NAME.json"),
    ],
)
def test_settings_that_cannot_work_are_refused(change, says, capsys):
    words = ["eval", "model.path=m", "sets=[gsm8k]", "n=2", change]
    assert main(words) == 2 and says in capsys.readouterr().err
