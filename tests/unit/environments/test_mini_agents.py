"""The miniatures of agents: their questions and answers, what their corpora say, and what their starts train on."""

from __future__ import annotations

import functools
import importlib
import random
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron_rl.environments.dialogue import Exchange, TextDialogue
from megatron_rl.environments.search_tool import SearchTool
from megatron_rl.texts.chat_template import USER, conversation_tokens
from megatron_rl.texts.text import decode, load_tokenizer

MINIATURES = Path(__file__).parents[3] / "examples/miniatures"
NAMES = ("mini_runs", "mini_agents", "task", "rule", "corpus", "run")
ERRORS = {"prin({question})": "NameError: name 'prin' is not defined", "print({question}": "SyntaxError: '(' was"}


@functools.cache
def load(name):
    """Returns the script of a miniature. Its neighbours have short names, which other examples have too."""
    path, others = [*sys.path], {each: sys.modules.pop(each) for each in NAMES if each in sys.modules}
    sys.path[:0] = [str(MINIATURES / name), str(MINIATURES), str(MINIATURES / "evolve")]
    try:
        return importlib.import_module("run")
    finally:
        sys.path[:] = path
        for each in NAMES:
            sys.modules.pop(each, None)
        sys.modules.update(others)


@pytest.fixture
def search():
    return load("search")


@pytest.fixture
def python():
    return load("python")


@pytest.fixture
def persons(search):
    """Held-out, taught and other persons, as the script draws them."""
    return search.corpus.draw_persons(random.Random(search.mini_agents.TASK_SEED + 1))


def tool(search, tmp_path, group):
    pytest.importorskip("bm25s")
    search.task.write_jsonl(tmp_path / "corpus.jsonl", map(search.corpus.document, group))
    return SearchTool(corpus=str(tmp_path / "corpus.jsonl"), top_k=2)


def test_a_search_finds_every_person_first_and_speaks_as_in_the_supervised_start(search, persons, tmp_path):
    held_out, taught, _ = persons
    asked = [*held_out, *taught]
    by_name, found = {person.name: person for person in asked}, tool(search, tmp_path, asked)
    for person in asked:
        said = found.run({"query": person.name})
        names = re.findall(r"Doc \d\(Title: (\w+ \w+) \)", said)
        assert names[0] == person.name and len(names) == 2
        assert said == search.corpus.told(*(by_name[name] for name in names))
        second = by_name[names[1]]
        shares = set(second.name.split()) & set(person.name.split())
        assert shares or second.boss == person.name, "so `neighbour` draws the second one"


def test_no_question_is_about_a_person_of_another_group(search, persons, tmp_path):
    names = [{person.name for person in group} for group in persons]
    assert [len(own) for own in names] == [64, 256, 80] and len(set.union(*names)) == 400
    for own, group in zip(names, persons, strict=True):
        assert {person.boss for person in group} <= own and all(person.boss != person.name for person in group)
    others = tool(search, tmp_path, persons[2])
    assert not any(f"Title: {name} )" in others.run({"query": name}) for name in names[0])


def test_the_answers_are_those_that_the_documents_give(search, persons):
    documents = {row["title"].strip(): row["text"].split() for row in map(search.corpus.document, persons[0])}
    rows = search.corpus.questions(persons[0])
    assert len(rows) == len({row["question"] for row in rows}) == 4 * 64
    for row in rows:
        words = row["question"].split()
        name, hops = " ".join(words[-3:-1]), search.corpus.hops_of(row["question"])
        for _ in range(hops - 1):
            name = " ".join(documents[name][documents[name].index("boss") + 1 :])
        kind = {"where": "home", "what": "job"}[words[0]]
        assert row["answer"] == documents[name][documents[name].index(kind) + 1]
        assert hops == (2 if "boss" in words else 1) and set(words) <= {*search.corpus.WORDS}


def test_every_word_of_the_search_has_a_token(search):
    rng = random.Random(5)
    assert len(set(search.KNOWN)) == len(search.KNOWN)
    for share in (1.0, 0.2):
        for _ in range(100):
            texts = [message["content"] for message in search._talk(rng, share)["messages"]]
            assert set(" ".join(texts).split()) <= {"<bos>", *search.KNOWN}


def test_programs_of_the_supervised_start_say_what_they_would(python):
    """Read by plain means: a right program is told its product, a wrong one its error, and only then is it mended."""
    rng, seen = random.Random(7), set()
    for share in (1.0, 0.15):
        for _ in range(400):
            a, b = rng.randint(10, 99), rng.randint(10, 99)
            prompt, *said = [message["content"] for message in python._talk(rng, a, b, share, ERRORS)["messages"]]
            assert prompt == f"<bos>{a}*{b}<ask>" and len(said) in (1, 3, 5)
            for call, result in zip(said[:-1:2], said[1::2], strict=True):
                program = call.removeprefix("<python>").removesuffix("</python>")
                told = {form.format(question=f"{a}*{b}"): error for form, error in ERRORS.items()}
                told[f"print({a}*{b})"] = str(a * b)
                assert result == f"<result>{told[program]}</result>"
            mended = said[-2:-1] == [f"<result>{a * b}</result>"]
            assert not mended or said[-1] == f"<answer>{a * b}</answer>"
            assert mended or share < 1.0, "the first stage never guesses"
            seen.add((len(said), mended))
    assert seen == {(1, False), (3, True), (3, False), (5, True)}


def talks_of_search(search, path):
    """Writes the model and its tokenizer. -> conversations of the first stage"""
    search.task.write_model(path, 1, search.KNOWN)
    return [search._talk(random.Random(seed), 1.0)["messages"] for seed in range(20)]


def talks_of_python(python, path):
    texts = [*ERRORS.values(), *(program.format(question="") for program in (python.CORRECT, *python.WRONG))]
    words = [piece for text in texts for piece in re.findall(python.PIECES, text)]
    known = dict.fromkeys([*python.TAGS, "<ask>", "*", *map(str, range(10)), *words])
    python.task.write_model(path, 1, [*known], pieces=python.PIECES)
    return [python._talk(random.Random(seed), 12, 34, 1.0, ERRORS)["messages"] for seed in range(20)]


@pytest.mark.parametrize("name, talks_of", [("search", talks_of_search), ("python", talks_of_python)])
def test_the_supervised_start_trains_the_models_words_as_the_dialogue_has_them(name, talks_of, tmp_path):
    """A conversation of the start has the runs' prompt and the tokens that the environment's dialogue makes of it; only
    the answers are trained on."""
    talks, tokenizer = talks_of(load(name), tmp_path), load_tokenizer(tmp_path)
    tokenizer.chat_template = (MINIATURES / "turns.jinja").read_text()
    dialogue = TextDialogue(tokenizer)
    before, behind = (MINIATURES / name / "prompt.txt").read_text().strip().split("{question}")
    for prompt, *said in talks:
        text = prompt["content"].strip()
        assert text.startswith(before) and text.endswith(behind) and len(text) > len(before + behind)
        tokens = dialogue.open([prompt], ())
        trained = [False] * len(tokens)
        for message in said:
            own = message["role"] == "assistant"
            past = Exchange(prompt=tokens, answer=tokens[:0], history=(), tools=())
            new = dialogue.bridge(past, [{"role": USER, "content": message["content"]}])
            tokens, trained = np.concatenate([tokens, new]), trained + [own] * len(new)
            shown, meant = decode(tokenizer, new).text, message["content"]
            assert "".join(shown.split()) == "".join(meant.split()), "nothing of it is unknown"
        found, written = conversation_tokens(tokenizer, [prompt, *said])
        assert found.tolist() == tokens.tolist() and written.tolist() == trained


def test_metrics_of_samples_are_means_over_the_iterations_that_have_them(search):
    agents = search.mini_agents
    iterations = [[{"x": 1.0}, {"x": None}], [{"x": 3.0}], [{"x": None}], [{"x": 8.0}, {"x": 4.0}, {"x": 0.0}]]
    assert [agents._mean(own, lambda row: row["x"]) for own in agents.windows(iterations, width=2)] == [2.0, 3.0, 4.0]
    assert np.isnan(agents._mean(iterations[2:3], lambda row: row["x"]))
    assert agents.start_middle_end([1.0, 2.0, 3.0, 4.0, 9.0], width=3) == [2.0, 3.0, 16 / 3]
