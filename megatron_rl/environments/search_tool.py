"""A search tool over a local corpus, ranked by BM25 (the library bm25s, arXiv 2407.03618)."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import NonNegativeFloat, PositiveInt

from megatron_rl.config.base import ConfigError, Share
from megatron_rl.environments.episode_types import EnvironmentFailure, Tool
from megatron_rl.run.atomic_files import push_tree

KEPT = 4  # maximum number of search indices that a process keeps in memory
INDEX = ".bm25"  # suffix of the index directory, which is appended to the name of the corpus
_LOADING = threading.Lock()  # only one index is loaded at a time
_STARTS, _STAMP = "starts.npy", "stamp.json"


@dataclass(kw_only=True)
class SearchTool(Tool):
    """A tool that finds the documents of a corpus that match a query best.

    The corpus is a JSONL file with one document per line. The search index is built once per process; with `keep`, the
    index is saved next to the corpus. The tool's answer has the format of Search-R1 (arXiv 2503.09516):
    `Doc 1(Title: ...) text`.
    """

    corpus: str  # JSONL file
    # Key of a document's title; null: the title is the first line of the text, as in the corpora of Search-R1.
    title: str | None = "title"
    text: str = "text"  # key of a document's text
    top_k: PositiveInt = 3  # maximum number of documents in an answer
    max_characters: PositiveInt = 4000  # maximum length of an answer; longer answers are truncated
    k1: NonNegativeFloat = 1.5  # BM25's k1: how fast the weight of a repeated word saturates
    b: Share = 0.75  # BM25's b: strength of the length normalization, from 0 to 1
    stopwords: str | None = "en"  # language whose stop words are ignored, in bm25s's notation; null: ignore no words
    keep: bool = False  # save the index next to the corpus, and load it from there while the corpus is unchanged
    name: str = "search"

    description = "Searches a collection of documents, and returns those that fit a query best."
    parameters = {
        "type": "object",
        "properties": {"query": {"type": "string", "description": "a few words to look for"}},
        "required": ["query"],
    }

    def __post_init__(self) -> None:
        _library()
        self._loaded: CorpusIndex | None = None

    def files(self) -> Mapping[str, str]:
        return {"corpus": self.corpus}

    def load(self) -> None:
        """Builds the index, or loads a saved index. Raises ConfigError if the corpus is missing or malformed."""
        path = Path(self.corpus).absolute()
        with _LOADING:
            if self._loaded is not None:
                return
            if not path.is_file():
                raise ConfigError(f"args.corpus = {self.corpus!r} is no file: give a JSONL file with a document a line")
            stat = path.stat()
            stamp = Stamp(
                bytes=stat.st_size, changed_ns=stat.st_mtime_ns, title=self.title, text=self.text, k1=self.k1, b=self.b,
                stopwords=self.stopwords,
            )  # fmt: skip
            self._loaded = _index(path, stamp, self.keep)

    def run(self, arguments: Mapping[str, Any]) -> str:
        query = arguments.get("query")
        if not isinstance(query, str) or not query.strip():
            return "error: give a query as text"
        self.load()
        assert self._loaded is not None
        documents = [self._loaded.document(number) for number in self._loaded.best(query, self.top_k)]
        if not documents:
            return "No document has a word of this query."
        lines = (f"Doc {place}(Title: {title}) {text}" for place, (title, text) in enumerate(documents, start=1))
        return "\n".join(lines)[: self.max_characters]


@dataclass(frozen=True, kw_only=True)
class Stamp:
    """The settings and the properties of the corpus file that determine the search index. If the stamp that was saved
    with an index differs from the current stamp, a new index is built."""

    bytes: int  # size of the corpus
    changed_ns: int  # modification time of the corpus
    title: str | None
    text: str
    k1: float
    b: float
    stopwords: str | None


class CorpusIndex:
    """A search index: the BM25 score of each word in each document, and the documents' byte offsets in the corpus file.

    The text of a document is read from the corpus file each time it is requested. A CorpusIndex is thread-safe.
    """

    def __init__(self, path: Path, stamp: Stamp, scores: Any, starts: np.ndarray) -> None:
        """`starts`: [documents + 1] int64, byte offset of the start of each line, and of the end of the file."""
        self._path, self._stamp, self._scores, self._starts = path, stamp, scores, starts
        self._file = path.open("rb")

    def scores(self, query: str) -> np.ndarray:
        """Returns the score of every document for a query, [documents] float32."""
        [words] = _words([query], self._stamp.stopwords, ids=False)
        indexed = [word for word in words if word in self._scores.vocab_dict]
        if not indexed:
            return np.zeros(len(self._starts) - 1, np.float32)
        return self._scores.get_scores(indexed)

    def best(self, query: str, count: int) -> list[int]:
        """Returns the indices of the `count` documents with the highest scores, best first.

        Documents with equal scores are in the order of the file. Documents that score 0 are left out.
        """
        scores = self.scores(query)
        count = min(count, int((scores > 0).sum()))
        if not count:
            return []
        least = np.partition(scores, len(scores) - count)[len(scores) - count]
        above, equal = np.flatnonzero(scores > least), np.flatnonzero(scores == least)
        chosen = np.concatenate([above, equal[: count - len(above)]])
        return chosen[np.argsort(-scores[chosen], kind="stable")].tolist()

    def document(self, number: int) -> tuple[str, str]:
        """Returns (title, text) of the document with index `number`. Raises EnvironmentFailure if the document cannot
        be read because the corpus file has changed."""
        start, end = int(self._starts[number]), int(self._starts[number + 1])
        try:
            return _document(os.pread(self._file.fileno(), end - start, start), self._stamp)
        except (OSError, ValueError) as error:
            raise EnvironmentFailure(f"document {number} of {self._path} cannot be read any more: {error}") from error


@functools.lru_cache(maxsize=KEPT)
def _index(path: Path, stamp: Stamp, keep: bool) -> CorpusIndex:
    """Returns the search index of a corpus. If `keep` is set, loads the saved index if it was built with the same
    settings from the same corpus file (`stamp`), and otherwise builds and saves a new index. If `keep` is not set,
    builds a new index and does not save it."""
    library = _library()
    place = path.with_name(path.name + INDEX)
    full_stamp = {**vars(stamp), "library": library.__version__}
    if keep:
        with contextlib.suppress(OSError, ValueError, RecursionError):  # there is no saved index
            if json.loads((place / _STAMP).read_text()) == full_stamp:
                return CorpusIndex(path, stamp, library.BM25.load(str(place), mmap=True), np.load(place / _STARTS))
    texts, starts = _read(path, stamp)
    scores = library.BM25(k1=stamp.k1, b=stamp.b, method="lucene")
    scores.index(_words(texts, stamp.stopwords, ids=True), show_progress=False)
    if keep:
        _write(place, scores, starts, full_stamp)
    return CorpusIndex(path, stamp, scores, starts)


def _read(path: Path, stamp: Stamp) -> tuple[list[str], np.ndarray]:
    """Returns (texts to index, byte offsets of the lines and of the file's end). A text to index is a document's title
    and text.

    Raises ConfigError if a line is malformed or the file is empty.
    """
    texts, starts, place = [], [0], 0
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            place += len(line)
            try:
                texts.append("\n".join(_document(line, stamp)))
            except ValueError as error:
                raise ConfigError(f"args.corpus: {path}:{number}: {error}") from None
            starts.append(place)
    if not texts:
        raise ConfigError(f"args.corpus: {path} is empty: give a JSONL file with a document a line")
    return texts, np.array(starts, np.int64)


def _document(line: bytes, stamp: Stamp) -> tuple[str, str]:
    """Parses a line of the corpus. Returns the document's (title, text). Raises ValueError if the line is malformed."""
    try:
        row = json.loads(line)
        json.dumps(row, ensure_ascii=False).encode()  # raises UnicodeEncodeError for lone surrogates such as \\ud800
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from None
    if not isinstance(row, dict):
        raise ValueError("not a JSON object")
    for name, key in (("text", stamp.text), ("title", stamp.title)):
        if key is not None and not isinstance(row.get(key), str):
            raise ValueError(f"no text under {key!r}; the row has {', '.join(row)}: name the key by args.{name}")
    if stamp.title is None:
        title, _, text = row[stamp.text].partition("\n")
        return title, text
    return row[stamp.title], row[stamp.text]


def _words(texts: Sequence[str], stopwords: str | None, *, ids: bool) -> Any:
    """Tokenizes texts with bm25s. Returns token ids with a vocabulary if `ids` is set, otherwise lists of words."""
    try:
        return _library().tokenize(list(texts), stopwords=stopwords or [], return_ids=ids, show_progress=False)
    except ValueError as error:
        raise ConfigError(f"args.stopwords = {stopwords!r}: {error}") from error


def _write(place: Path, scores: Any, starts: np.ndarray, stamp: Mapping[str, Any]) -> None:
    """Saves a search index atomically and durably. Replaces an older index of the corpus."""
    partial = place.with_name(f".{place.name}.{os.getpid()}")
    scores.save(str(partial))
    np.save(partial / _STARTS, starts)
    (partial / _STAMP).write_text(json.dumps(stamp))
    push_tree(partial)
    shutil.rmtree(place, ignore_errors=True)
    try:
        partial.rename(place)
    except OSError:  # another process has saved the index
        shutil.rmtree(partial)


def _library() -> Any:
    try:
        import bm25s
    except ImportError as error:
        raise ConfigError(
            f"the search needs bm25s, which cannot be imported ({error}): run `pip install bm25s`"
        ) from error
    return bm25s
