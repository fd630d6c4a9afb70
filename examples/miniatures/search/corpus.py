"""Draws the persons of the miniature of search, and writes their documents and the questions about them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

_NAMES = """
anna boris clara david elena felix greta hugo irene jonas karla leon maria nils olga peter rosa simon tessa viktor

adler brandt cohen dahl engel fischer gruber haas ivanov jansen keller lorenz moreau novak olsen petrov quinn rossi
sauer tanaka

athens bergen cairo dublin essen faro geneva havana izmir jena kyoto lima milan nice oslo porto quito riga sofia turin
utrecht vienna warsaw zagreb

actor baker chemist dancer editor farmer gardener hunter janitor judge lawyer miner nurse optician painter pilot ranger
sailor tailor teacher usher welder writer zoologist
"""
FIRST, LAST, HOMES, JOBS = (names.split() for names in _NAMES.split("\n\n"))
VALUES = {"home": HOMES, "job": JOBS}
ASKED = {"home": "where does {who} live", "job": "what does {who} do"}  # the words of a question are in no document
BOSS = "the boss of"
FORM = ["Doc", "1(Title:", "2(Title:", ")", *VALUES, "boss"]
WORDS = [*FORM, "where", "what", "does", "live", "do", "the", "of", *FIRST, *LAST, *HOMES, *JOBS]
PERSONS, HELD_OUT = 320, 64


@dataclass(frozen=True, kw_only=True)
class Person:
    """All that a document says."""

    name: str
    home: str
    job: str
    boss: str  # a name


def draw_persons(rng: random.Random) -> tuple[list[Person], list[Person], list[Person]]:
    """Returns the persons of the held-out questions, those of the questions of the training, and others whom no
    question is about. The bosses of each group belong to it."""
    names = [f"{first} {last}" for first in FIRST for last in LAST]
    rng.shuffle(names)
    held_out, taught, others = (
        [invent(rng, name=name, boss=rng.choice([other for other in group if other != name])) for name in group]
        for group in (names[:HELD_OUT], names[HELD_OUT:PERSONS], names[PERSONS:])
    )
    return held_out, taught, others


def invent(rng: random.Random, *, name: str | None = None, boss: str | None = None) -> Person:
    """Draws a person, whose name and boss may be given."""
    return Person(
        name=name or f"{rng.choice(FIRST)} {rng.choice(LAST)}",
        home=rng.choice(HOMES),
        job=rng.choice(JOBS),
        boss=boss or f"{rng.choice(FIRST)} {rng.choice(LAST)}",
    )


def neighbour(rng: random.Random, found: Person) -> Person:
    """Draws what a search finds in the second place: a person with the first or the last name of another, or one whose
    boss the other is."""
    first, last = found.name.split()
    name = rng.choice([f"{first} {rng.choice(LAST)}", f"{rng.choice(FIRST)} {last}", None])
    return invent(rng, name=name, boss=found.name if name is None else None)


def document(person: Person) -> dict[str, str]:
    """Returns a line of the corpus. The name stands in the text, too, so that BM25 finds a person's own document before
    those of which the person is the boss; and the title ends with a space, so that the bracket that the search puts
    behind it is a word by itself."""
    text = f"{person.name} home {person.home} job {person.job} boss {person.boss}"
    return {"title": f"{person.name} ", "text": text}


def told(*found: Person) -> str:
    """Returns what the search says of the documents that it finds."""
    documents = map(document, found)
    return "\n".join(
        f"Doc {place}(Title: {own['title']}) {own['text']}" for place, own in enumerate(documents, start=1)
    )


def question(asked: str, name: str, hops: int) -> str:
    """Returns a question for the home or the job of a person, or, with two hops, of the person's boss."""
    return ASKED[asked].format(who=name if hops == 1 else f"{BOSS} {name}")


def hops_of(text: str) -> int:
    """Returns how many searches a question takes."""
    return 2 if BOSS in text else 1


def questions(persons: Sequence[Person]) -> list[dict[str, str]]:
    """Returns all questions about some persons, whose bosses are among them, with their answers."""
    by_name = {person.name: person for person in persons}
    rows = []
    for person in persons:
        for hops, about in ((1, person), (2, by_name[person.boss])):
            rows += [
                {"question": question(asked, person.name, hops), "answer": getattr(about, asked)} for asked in ASKED
            ]
    return rows
