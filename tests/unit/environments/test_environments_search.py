"""The search in a corpus: its scores against plain loops and the library's own, the form of its answers, refusals."""

import json
import math
import random
import re
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from megatron_rl.config import plugins
from megatron_rl.config.base import ConfigError, Use
from megatron_rl.environments.episode_types import EnvironmentFailure
from megatron_rl.recipes.agents import Agents

TARGET = "megatron_rl.environments.search_tool:SearchTool"
ROWS = [
    {"title": "Beijing", "text": "Beijing is the capital of China."},
    {"title": "Paris", "text": "Paris is the capital of France, on the river Seine."},
    {"title": "Seine", "text": "A river in France."},
]


def corpus(tmp_path, rows=ROWS, name="docs.jsonl"):
    path = tmp_path / name
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def tool(path, **args):
    pytest.importorskip("bm25s")
    made = plugins.build(Use(target=TARGET, args={"corpus": path, **args}))
    made.load()
    return made


def random_rows(count):
    rng = random.Random(3)
    words = [f"word{i}" for i in range(40)]
    texts = [" ".join(rng.choices(words, weights=range(1, 41), k=rng.randint(1, 30))) for _ in range(count)]
    return [{"title": rng.choice(words), "text": text} for text in texts]


def plain_bm25(texts, query, k1, b):
    """The variant of Lucene (Kamphuis et al., ECIR 2020): idf = ln(1 + (N - df + 1/2) / (df + 1/2)), and tf / (tf + k1
    (1 - b + b length / mean length))."""
    split = [re.findall(r"\b\w\w+\b", text.lower()) for text in texts]
    mean = sum(map(len, split)) / len(split)
    scores = []
    for words in split:
        total = 0.0
        for word in re.findall(r"\b\w\w+\b", query.lower()):
            containing = sum(word in other for other in split)
            if containing:
                idf = math.log(1 + (len(split) - containing + 0.5) / (containing + 0.5))
                tf = words.count(word)
                total += idf * tf / (tf + k1 * (1 - b + b * len(words) / mean))
        scores.append(total)
    return scores


@pytest.mark.parametrize("k1, b", [(1.5, 0.75), (0.9, 0.4)])
def test_scores_and_order_are_those_of_plain_loops(tmp_path, k1, b):
    rows = random_rows(60)
    search = tool(corpus(tmp_path, rows), stopwords=None, k1=k1, b=b)
    texts = [f"{row['title']}\n{row['text']}" for row in rows]
    for query in ("word1 word5 word39", "Word7, unknown", "word3 word3 word30", "word0"):
        known = plain_bm25(texts, query, k1, b)
        np.testing.assert_allclose(search._loaded.scores(query), known, rtol=1e-5, atol=1e-6)
        order = sorted((i for i in range(60) if known[i] > 0), key=lambda i: (-np.float32(known[i]), i))
        found = search._loaded.best(query, 10)
        np.testing.assert_allclose([known[i] for i in found], [known[i] for i in order[:10]], rtol=1e-5)


def test_scores_are_the_librarys_own(tmp_path):
    bm25s = pytest.importorskip("bm25s")
    rows = random_rows(50)
    library = bm25s.BM25()
    library.index(bm25s.tokenize([f"{row['title']}\n{row['text']}" for row in rows], show_progress=False),
                  show_progress=False)  # fmt: skip
    query = "word2 word17 the word38"
    documents, scores = library.retrieve(bm25s.tokenize(query, show_progress=False), k=5, show_progress=False)
    search = tool(corpus(tmp_path, rows))
    found = search._loaded.best(query, 5)
    np.testing.assert_allclose(search._loaded.scores(query)[found], scores[0], rtol=1e-6)
    assert len(set(scores[0].tolist())) < 5 or found == documents[0].tolist()


def test_equal_documents_come_in_the_files_order(tmp_path):
    rows = [{"title": "other", "text": "nothing"}] + [{"title": str(i), "text": "same words"} for i in range(9)]
    search = tool(corpus(tmp_path, rows))
    assert search._loaded.best("same", 4) == [1, 2, 3, 4]


def test_the_answer_has_the_form_of_search_r1(tmp_path):
    search = tool(corpus(tmp_path), top_k=2)
    assert search.run({"query": "capital of China"}) == (
        "Doc 1(Title: Beijing) Beijing is the capital of China.\n"
        "Doc 2(Title: Paris) Paris is the capital of France, on the river Seine."
    )
    assert search.run({"query": "the river"}).startswith("Doc 1(Title: Seine) A river in France.\nDoc 2(Title: Paris)")
    assert (search.name, search.parameters["required"]) == ("search", ["query"])


def test_a_corpus_of_search_r1_has_the_title_in_the_first_line(tmp_path):
    rows = [{"id": "0", "contents": '"Beijing"\nThe capital\nof China'}, {"id": "1", "contents": '"Paris"\nIn France'}]
    search = tool(corpus(tmp_path, rows), title=None, text="contents", top_k=1)
    assert search.run({"query": "beijing"}) == 'Doc 1(Title: "Beijing") The capital\nof China'


def test_long_answers_are_cut(tmp_path):
    assert tool(corpus(tmp_path), max_characters=13).run({"query": "Seine"}) == "Doc 1(Title: "


@pytest.mark.parametrize(
    "arguments, says",
    [
        ({"query": "Berlin"}, "No document"),
        ({"query": "the of"}, "No document"),
        ({"query": "?!"}, "No document"),
        ({"query": "  "}, "error: give a query"),
        ({"query": ["Paris"]}, "error: give a query"),
        ({}, "error: give a query"),
    ],
)
def test_queries_that_find_nothing_are_told_so(tmp_path, arguments, says):
    assert tool(corpus(tmp_path)).run(arguments).startswith(says)


def test_a_document_without_a_word_is_no_obstacle(tmp_path):
    search = tool(corpus(tmp_path, [{"title": "", "text": "."}, *ROWS]))
    assert search._loaded.best("Beijing", 3) == [1]


def test_threads_share_a_tool(tmp_path):
    search = tool(corpus(tmp_path, random_rows(40)))
    queries = [{"query": f"word{i}"} for i in range(40)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(search.run, queries)) == [search.run(query) for query in queries]


def test_one_index_serves_all_tools_of_a_corpus(tmp_path):
    path = corpus(tmp_path)
    assert tool(path)._loaded is tool(path, top_k=1)._loaded is not tool(path, k1=1.0)._loaded


def test_a_kept_index_is_read_again_until_the_corpus_changes(tmp_path, monkeypatch):
    path = corpus(tmp_path)
    module = sys.modules[type(tool(path, keep=True)).__module__]
    answer = tool(path, keep=True).run({"query": "Seine"})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["docs.jsonl", "docs.jsonl.bm25"]
    made = []
    monkeypatch.setattr(module, "_read", lambda *args, read=module._read: made.append(args) or read(*args))
    module._index.cache_clear()
    assert tool(path, keep=True).run({"query": "Seine"}) == answer and not made
    corpus(tmp_path, [{"title": "Seine", "text": "Another text."}])
    assert tool(path, keep=True).run({"query": "Seine"}) == "Doc 1(Title: Seine) Another text." and len(made) == 1
    module._index.cache_clear()
    assert tool(path, keep=True).run({"query": "another"}).startswith("Doc 1") and len(made) == 1


def test_a_corpus_that_is_cut_under_the_tool_is_a_failure_of_the_tool(tmp_path):
    search = tool(corpus(tmp_path))
    corpus(tmp_path, [])
    with pytest.raises(EnvironmentFailure, match="cannot be read any more"):
        search.run({"query": "Seine"})


@pytest.mark.parametrize(
    "rows, args, says",
    [
        ([ROWS[0], "{"], {}, "docs.jsonl:2: not JSON"),
        ([ROWS[0], "[1]"], {}, "docs.jsonl:2: not a JSON object"),
        ([ROWS[0], {"title": "x"}], {}, "docs.jsonl:2: no text under 'text'; the row has title: name the key by"),
        ([{"text": "x", "name": "y"}], {}, "docs.jsonl:1: no text under 'title'"),
        ([{"title": "x", "text": 7}], {}, "docs.jsonl:1: no text under 'text'"),
        ([], {}, "docs.jsonl is empty"),
        (ROWS, {"top_k": 0}, "top_k = 0"),
        (ROWS, {"max_characters": 0}, "max_characters = 0"),
        (ROWS, {"b": 1.5}, "b = 1.5"),
        (ROWS, {"k1": -1.0}, "k1 = -1.0"),
        (ROWS, {"stopwords": "klingon"}, "args.stopwords = 'klingon'"),
    ],
)  # fmt: skip
def test_a_search_that_cannot_be_is_refused(tmp_path, rows, args, says):
    path = corpus(tmp_path, rows)
    with pytest.raises(ConfigError) as caught:
        tool(path, **args)
    assert says in str(caught.value)


def test_a_corpus_that_is_not_there_is_refused_by_a_run_and_not_by_a_plan(tmp_path):
    missing = str(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match=r"args\.corpus = .*none\.jsonl' is no file"):
        tool(missing)
    tools = [{"target": TARGET, "args": {"corpus": missing}}]
    world = Use(target="megatron_rl.environments.tool_task:ToolTask", args={"tools": tools, "template": "search_r1"})
    recipe = Agents(updates=1, environment=world)
    assert recipe.roles()["agent"].episode.answers == 5
    assert recipe.files() == {"recipe.args.environment.args.tools.search.corpus": missing}


def test_without_the_library_the_cure_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "bm25s", None)
    with pytest.raises(ConfigError, match="pip install bm25s"):
        plugins.build(Use(target=TARGET, args={"corpus": corpus(tmp_path)}))
