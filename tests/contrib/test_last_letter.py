"""The last-letter task: its vocabulary, its tiny model, its teachers and its files."""

import json
import random
import sys
from pathlib import Path

import pytest
from teachers import (
    MAX_STEPS,
    ProblemSizes,
    make_problem,
    solution_text,
    teacher_solution,
    verification_text,
)
from transformers import AutoConfig, Qwen2ForCausalLM

from megatron_rl.contrib.last_letter import grade, step_labels
from megatron_rl.rewards.verdicts import review
from megatron_rl.texts.tags import generator_format, step_texts
from megatron_rl.texts.text import decode, fill, load_tokenizer, read_template

EXAMPLE = Path(__file__).parents[2] / "examples/miniatures/last_letter"
sys.path.append(str(EXAMPLE))
import task  # noqa: E402

SIZES = ProblemSizes((2, 5), (2, 4))
PROMPTS = {name: str(EXAMPLE / "prompts" / f"{name}.txt") for name in ("generator", "verifier")}
YES, NO = "\\boxed{CORRECT}", "\\boxed{INCORRECT}"


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    task.write_model(directory, seed=0)
    return directory


def verification(*steps, final):
    blocks = "".join(f"<step> {step} </step> " for step in steps)
    return f"<step_verification> {blocks}</step_verification> <final_verification> {final} </final_verification>"


def verified(words, solution, misread=0.0):
    return verification_text(random.Random(0), words, solution, misread)


def read_jsonl(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_problem_states_its_words_and_its_answer():
    rng = random.Random(1)
    for _ in range(200):
        problem = make_problem(rng, SIZES)
        words = problem["words"]
        assert problem["question"] == " ".join(f"{' '.join(word)} #{j}" for j, word in enumerate(words, start=1))
        assert problem["answer"].split() == [word[-1] for word in words]
        assert 2 <= len(words) <= 5 and all(2 <= len(word) <= 4 and set(word) <= set("abcdefghij") for word in words)


def test_gold_labels_and_the_grader_agree_with_the_teacher():
    rng = random.Random(2)
    for _ in range(300):
        problem = make_problem(rng, SIZES)
        solution = teacher_solution(rng, problem["words"], misconception=0.35)
        labels = step_labels(step_texts(solution), problem)
        assert labels == [
            text == f"#{j} {word[-1]}"
            for j, (text, word) in enumerate(zip(step_texts(solution), problem["words"], strict=True), 1)
        ]
        assert grade(solution, problem) == float(all(labels))
        assert generator_format(solution) == (1.0 if len(labels) >= 3 else 0.6)


@pytest.mark.parametrize("misconception", [0.0, 0.35, 0.65, 1.0])
def test_the_teacher_errs_as_often_as_it_is_told(misconception):
    rng = random.Random(3)
    steps = claimed_first = 0
    for _ in range(2000):
        words = make_problem(rng, SIZES)["words"]
        telling = [word[0] != word[-1] for word in words]
        claims = [text.split()[1] for text in step_texts(teacher_solution(rng, words, misconception))]
        assert all(claim in (word[0], word[-1]) for claim, word in zip(claims, words, strict=True))
        steps += sum(telling)
        claimed_first += sum(
            claim == word[0] for claim, word, tells in zip(claims, words, telling, strict=True) if tells
        )
    assert claimed_first / steps == pytest.approx(misconception, abs=0.025)  # 4 standard errors at the most


CORRECT = solution_text(["b", "d"])
CASES = {
    "right": (CORRECT, ["#1 b b " + YES, "#2 d d " + YES], YES),
    "one step wrong": (solution_text(["b", "c"]), ["#1 b b " + YES, "#2 c d " + NO], NO),
    "answer differs": (CORRECT.replace("b d }", "b c }"), ["#1 b b " + YES, "#2 d d " + YES], NO),
    "no answer": (CORRECT[: CORRECT.index("<answer>")], ["#1 b b " + YES, "#2 d d " + YES], NO),
    "too few steps": (solution_text(["b"]), ["#1 b b " + YES], NO),
    "too many steps": (solution_text(["b", "d", "a"]), ["#1 b b " + YES, "#2 d d " + YES, "#3 a <q> " + NO], NO),
    "no steps": ("<think> </think> <answer> \\boxed{ b d } </answer>", [], NO),
    "empty step": (CORRECT.replace("#2 d </step>", "</step>"), ["#1 b b " + YES, "#2 <q> d " + NO], NO),
    "step without letter": (CORRECT.replace("#2 d </step>", "#2 </step>"), ["#1 b b " + YES, "#2 #2 d " + NO], NO),
    "step without number": (CORRECT.replace("#2 d </step>", "d </step>"), ["#1 b b " + YES, "#2 d d " + NO], NO),
    "step of two letters": (CORRECT.replace("#2 d </step>", "#2 c d </step>"), ["#1 b b " + YES, "#2 d d " + NO], NO),
    "stray closing tag": (CORRECT.replace("</think>", "</step> </think>"), ["#1 b b " + YES, "#2 d d " + YES], YES),
}


@pytest.mark.parametrize("name", CASES)
def test_verification_of_a_hand_made_solution(name):
    solution, steps, final = CASES[name]
    assert verified(["ab", "cd"], solution) == verification(*steps, final=final)


def test_a_misreading_verifier_expects_the_first_letter():
    assert verified(["ab", "cd"], CORRECT, misread=1.0) == verification("#1 b a " + NO, "#2 d c " + NO, final=NO)
    assert verified(["ab", "cd"], solution_text(["a", "c"]), misread=1.0) == verification(
        "#1 a a " + YES, "#2 c c " + YES, final=YES
    )


def test_the_verifier_misreads_as_often_as_it_is_told():
    rng, wrong = random.Random(4), 0
    for _ in range(2000):
        wrong += verification_text(rng, ["ab", "cd"], CORRECT, misread=0.25).count(f"{NO} </step>")
    assert wrong / 4000 == pytest.approx(0.25, abs=0.028)  # 4 standard errors


def test_without_misreading_the_verdicts_are_the_gold_labels_and_earn_full_reward():
    rng = random.Random(5)
    for _ in range(300):
        problem = make_problem(rng, SIZES)
        solution = teacher_solution(rng, problem["words"], misconception=0.35)
        correct = bool(grade(solution, problem))
        text = verified(problem["words"], solution)
        found = review(
            text, num_steps=len(problem["words"]), correct=correct, generator_format=generator_format(solution)
        )
        assert list(found.verdicts) == step_labels(step_texts(solution), problem)
        assert found.final is correct and found.reward == pytest.approx(1.8)


def test_every_word_of_every_text_is_one_token_and_comes_back(model_directory):
    tokenizer, rng = load_tokenizer(model_directory), random.Random(6)
    problem = make_problem(rng, ProblemSizes((MAX_STEPS, MAX_STEPS), (2, 4), alphabet=26))
    solution = teacher_solution(rng, problem["words"], 0.35)
    texts = [
        fill(read_template(PROMPTS["generator"]), question=problem["question"]),
        fill(read_template(PROMPTS["verifier"]), question=problem["question"], solution=solution, num_steps="13"),
        solution,
        verified(problem["words"], solution, 0.25),
    ]
    assert texts[0] == f"<bos> {problem['question']} <q>"
    assert texts[1] == f"<bos> {problem['question']} <q> <sol> {solution} #13 <ver>"
    for text in texts:
        tokens = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.convert_ids_to_tokens(tokens) == text.split() and tokenizer.pad_token_id not in tokens
        assert tokenizer.decode(tokens) == text
        assert decode(tokenizer, tokens).text == text.removeprefix("<bos> ")


def test_a_solution_of_more_steps_than_numbers_stays_in_the_vocabulary(model_directory):
    tokenizer = load_tokenizer(model_directory)
    solution = "<think> " + "<step> #13 a </step> " * (MAX_STEPS + 2) + "</think>"
    tokens = tokenizer.encode(verified(["ab"], solution), add_special_tokens=False)
    assert tokenizer.pad_token_id not in tokens


def test_the_model_has_the_size_and_the_spread_of_weights_it_should(model_directory):
    config = AutoConfig.from_pretrained(model_directory)
    tokenizer = load_tokenizer(model_directory)
    assert config.vocab_size == len(tokenizer) == 59
    assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (0, 1, 2)
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    assert config.rope_parameters["rope_theta"] == 10000.0 and not config.tie_word_embeddings
    model = Qwen2ForCausalLM.from_pretrained(model_directory)
    assert sum(p.numel() for p in model.parameters()) == 155_840
    layer, edge = model.model.layers[1], 64**-0.5
    spread = {  # name: (weight, standard deviation)
        "embedding": (model.model.embed_tokens.weight, 0.5 * edge),
        "head": (model.lm_head.weight, edge / 3**0.5),
        "bias": (layer.self_attn.q_proj.bias, edge / 3**0.5),
        "q": (layer.self_attn.q_proj.weight, edge),
        "o": (layer.self_attn.o_proj.weight, edge * 6**-0.5),
        "up": (layer.mlp.up_proj.weight, edge),
        "down": (layer.mlp.down_proj.weight, 192**-0.5 * 6**-0.5),
    }
    for name, (weight, std) in spread.items():
        assert weight.std().item() == pytest.approx(std, rel=0.25 if name == "bias" else 0.05), name
    assert layer.input_layernorm.weight.eq(1).all()


def test_the_model_depends_on_its_seed_alone(model_directory, tmp_path):
    task.write_model(tmp_path / "same", seed=0)
    task.write_model(tmp_path / "other", seed=1)
    same, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("same", "other"))
    assert same == (model_directory / "model.safetensors").read_bytes() != other


def test_held_out_problems_are_held_out(tmp_path):
    small = ProblemSizes((1, 1), (2, 2), alphabet=4)  # 16 problems in all
    test = task.write_problems(tmp_path / "test.jsonl", small, 6, seed=1)
    train = task.write_problems(tmp_path / "train.jsonl", small, 10, seed=2, without=[row["question"] for row in test])
    questions = [row["question"] for row in test + train]
    assert len(set(questions)) == 16
    assert read_jsonl(tmp_path / "train.jsonl") == train


@pytest.mark.parametrize("name", ["a", "b"])
def test_generator_pairs_are_clean_first_and_then_mistaken(name, tmp_path):
    regime = task.regimes()[name]
    task.write_generator_pairs(tmp_path / "pairs.jsonl", regime, seed=0, clean_steps=5, noisy_steps=20)
    rows = read_jsonl(tmp_path / "pairs.jsonl")
    labels = [step_labels(step_texts(row["response"]), {"words": _words(row["prompt"])}) for row in rows]
    clean, noisy = labels[: 5 * task.BATCH], labels[5 * task.BATCH :]
    assert len(noisy) == 20 * task.BATCH and all(all(label) for label in clean)
    wrong = [not right for label in noisy for right in label]
    assert sum(wrong) / len(wrong) == pytest.approx(
        0.9 * regime.misconception, abs=0.045
    )  # in 1 of 10 words first and last are the same


def test_verifier_pairs_judge_half_the_pool_and_half_a_noisy_teacher(tmp_path):
    pool = [
        {"question": "a b #1 c d #2", "words": ["ab", "cd"], "response": solution_text(["z", "z"])}
    ]  # z: no teacher writes it
    task.write_verifier_pairs(tmp_path / "pairs.jsonl", task.regimes()["a"], pool, seed=0, steps=40)
    rows = read_jsonl(tmp_path / "pairs.jsonl")
    taught = [row for row in rows if " z " not in row["prompt"]]
    assert len(rows) == 40 * task.BATCH and len(taught) / len(rows) == pytest.approx(0.5, abs=0.056)
    for row in rows:
        count = row["prompt"].split()[-2]
        assert count == f"#{row['prompt'].count('<step>')}" and row["response"].count("<step>") == int(count[1:])
    labels = [step_labels(step_texts(row["prompt"]), {"words": _words(row["prompt"])}) for row in taught]
    wrong = [not right for label in labels for right in label]
    assert sum(wrong) / len(wrong) == pytest.approx(0.9 * 0.6 * 0.35, abs=0.04)


def _words(prompt):
    """The words of a prompt: letters up to each number, between <bos> and <q>."""
    words, word = [], ""
    for token in prompt.split()[1 : prompt.split().index("<q>")]:
        if token.startswith("#"):
            words.append(word)
            word = ""
        else:
            word += token
    return words
