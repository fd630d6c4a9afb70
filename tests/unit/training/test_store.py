"""The store of iterations: what is read is what was written, to the last bit; damage is noticed; what need not stay
goes."""

from __future__ import annotations

import json
import logging
import math
import random
import struct
from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.texts.text import Decoded
from megatron_rl.training import store as store_module
from megatron_rl.training.iteration import Collected, Iteration
from megatron_rl.training.store import (
    ROLLOUTS,
    IterationStore,
    StoreError,
    Waiting,
    fingerprint,
    iteration_files,
    iteration_number,
    open_replay,
    read_rows,
)
from megatron_rl.types import STEP, Annotations, Author, Rollout, Stop, spans_of

WORDS = ["<pad>", "Q", "?", "<step>a</step>", "<step>b", "</step>", "!", "é<>&"]
ITERATION = Iteration(cycle=3, index=1, roles=("generator",), number=12, updates={"generator": 9})


def decode(role, tokens):
    words = [WORDS[token].encode() for token in tokens]
    return Decoded(b"".join(words).decode(), b"".join(words), np.cumsum([*map(len, words)], dtype=np.int64))


def rollout(**changes) -> Rollout:
    values = {
        "role": "generator",
        "group": "p1",
        "tokens": [1, 2, 3, 4, 5, 6],
        "logprobs": [0.0, 0.0, -1.0, -1.0, -1.0, -1.0],
        "spans": spans_of((2, Author.ENVIRONMENT, -1), (4, Author.POLICY, 4)),
        "payload": {"question": "Q?", "answer": 42, "correct": True, "verdicts": [True, None], "review": "fine"},
        "annotations": {STEP: Annotations(np.array([(2, 3), (3, 5)]), np.array([0.5, -0.5]))},
        "rewards": {"outcome": 1.0, "format": 0.25},
        "advantages": [0.0, 0.0, 1.5, 2.5, 3.5, 4.5],
    }
    return Rollout(**{**values, **changes})


def bare(**changes) -> Rollout:
    """Nothing but tokens."""
    spans = spans_of((1, Author.ENVIRONMENT, -1), (1, Author.POLICY, 0))
    values = {"role": "generator", "group": "0", "tokens": [1, 7], "logprobs": [0.0, -1.0], "spans": spans}
    return Rollout(**{**values, **changes})


def bits(value):
    """Returns what two values must share to be the same to the last bit."""
    if isinstance(value, Rollout):
        return [(name, bits(getattr(value, name))) for name in Rollout.__dataclass_fields__]
    if isinstance(value, Annotations):
        return bits(value.ranges), bits(value.scores)
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, Mapping):
        return [(name, bits(inner)) for name, inner in value.items()]  # in order
    if isinstance(value, (list, tuple)):
        return [bits(inner) for inner in value]
    return struct.pack("<d", value) if isinstance(value, float) else value


def collected(*rollouts: Rollout, **more: list[Rollout]) -> Collected:
    by_role = {"generator": list(rollouts), **more} if rollouts or not more else more
    return Collected(rollouts=by_role, metrics={"generator": {"loss": 0.1, "seconds/rollout": 2.0}})


def put_and_get(store: IterationStore, what: Collected, iteration: Iteration = ITERATION) -> Collected:
    store.put(iteration, what, {"data": {"position": 7}})
    found = store.get(iteration)
    assert found is not None and found[1] == {"data": {"position": 7}}
    return found[0]


def odd_rollouts() -> list[Rollout]:
    """Every field in every form that it may have."""
    nan = np.frombuffer(struct.pack("<II", 0x7FC00001, 0xFFC12345), np.float32)  # two that are not the same NaN
    tool = spans_of((1, 2, -1), (1, 0, 3), (2, 2, -1), (1, 1, -1), (1, 0, 4))
    experts = np.arange(5 * 3 * 2, dtype=np.int16).reshape(5, 3, 2) - 1
    return [
        rollout(logprobs=[0.0, -0.0, *nan, -1e-45, -np.inf]),
        rollout(spans=tool, partner_weight=0.1 + 0.2, stop=Stop.LENGTH),
        rollout(advantages=0.1 + 0.2, rewards={"z": -0.0, "a": float("nan"), "m": 1e-300}),
        rollout(advantages=None, annotations={}, payload={}, rewards={}),
        rollout(advantages=math.nan, stop=Stop.ABORTED),
        rollout(
            annotations={
                "step": Annotations([]),
                "z": Annotations([], []),
                "a": Annotations([(0, 6)]),
                "b": Annotations([(1, 1)], [math.nan]),
            }
        ),
        rollout(values={"teacher": np.arange(6, dtype=np.float32) / 3, "a": np.full(6, nan[1])}, experts=experts),
        rollout(values={"a": np.zeros(6, np.float32)}, experts=np.empty((5, 0, 2), np.int16)),
        rollout(values={"ids": np.arange(18, dtype=np.int32).reshape(6, 3), "wide": np.full((6, 2), nan[0])}),
        rollout(
            values={"ids": np.arange(36, dtype=np.int32).reshape(6, 6)[:, ::3], "none": np.empty((6, 0), np.int32)}
        ),
        rollout(experts=np.asfortranarray(experts)),
        rollout(payload={"a": [1, 2.5, None, {"b": "é\ud800\x00"}], "big": 2**70, "nan": math.inf}, group="é/0:\t"),
        bare(tokens=[], logprobs=[], spans=[]),
        bare(spans=spans_of((2, Author.ENVIRONMENT, -1)), advantages=[1.0, 2.0]),
        bare(tokens=[2**31 - 1, 0]),
        rollout(values={"wide": np.full(6, 1e-300)}, experts=np.zeros((5, 1, 1), np.int64)),
    ]


@pytest.mark.parametrize("every", [0, 1])
def test_every_field_comes_back_to_the_last_bit(tmp_path, every):
    rollouts = [*odd_rollouts(), bare(), rollout()]
    text = Decoded("x" * 4, b"x" * 4, np.full(100, 4))
    store = IterationStore(tmp_path, keep_every=every, decode=lambda role, tokens: text)
    found = put_and_get(store, collected(*rollouts))
    for place, (before, after) in enumerate(zip(rollouts, found.rollouts["generator"], strict=True)):
        assert bits(after) == bits(before), place
        assert type(after.advantages) is type(before.advantages)
    assert found.metrics == {"generator": {"loss": 0.1, "seconds/rollout": 2.0}}


def test_what_was_read_may_be_written_to(tmp_path):
    found = put_and_get(IterationStore(tmp_path), collected(rollout())).rollouts["generator"][0]
    assert found.tokens.flags.writeable and found.logprobs.flags.writeable and found.advantages.flags.writeable


def test_roles_stay_in_their_order_and_one_may_have_no_rollouts(tmp_path):
    iteration = Iteration(cycle=0, index=0, roles=("z", "a", "m"), number=0)
    by_role = {"z": [rollout(role="z", group=str(i)) for i in range(3)], "a": [], "m": [bare(role="m")]}
    found = put_and_get(IterationStore(tmp_path), Collected(rollouts=by_role, metrics={}), iteration)
    assert list(found.rollouts) == ["z", "a", "m"] and bits(found.rollouts) == bits(by_role)


def test_an_iteration_without_rollouts_is_an_iteration(tmp_path):
    assert put_and_get(IterationStore(tmp_path), Collected(rollouts={"generator": []}, metrics={})).rollouts == {
        "generator": []
    }
    assert read_rows(tmp_path / "iteration_000012.parquet") == []


def test_many_rollouts_are_written_in_pieces_and_come_back_in_order(tmp_path, monkeypatch):
    monkeypatch.setattr(store_module, "CHUNK_BYTES", 256)
    rollouts = [rollout(group=str(i), tokens=[i] * 6) for i in range(50)]
    found = put_and_get(IterationStore(tmp_path), collected(*rollouts))
    assert pq.ParquetFile(tmp_path / "iteration_000012.parquet").num_row_groups > 10
    assert bits(found.rollouts["generator"]) == bits(rollouts)


def test_rollouts_of_one_problem_share_its_payload_again(tmp_path):
    payload = {"question": "Q?"}
    first, second, other = put_and_get(
        IterationStore(tmp_path),
        collected(bare(payload=payload), bare(payload=payload), bare(payload={"question": "!"})),
    ).rollouts["generator"]
    assert first.payload is second.payload and other.payload == {"question": "!"}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
any_float = st.floats(allow_nan=False) | st.just(math.nan)
names = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)


@st.composite
def any_rollout(draw):
    length = draw(st.integers(0, 40))
    floats = np.frombuffer(draw(st.binary(min_size=4 * length, max_size=4 * length)), np.float32)
    numbers = np.frombuffer(draw(st.binary(min_size=4 * length, max_size=4 * length)), np.int32)
    cuts = sorted(draw(st.sets(st.integers(1, length - 1), max_size=4))) if length > 1 else []
    ends = [*cuts, length] if length else []
    spans = [(a, b, draw(st.integers(0, 2)), draw(st.integers(-1, 9))) for a, b in zip([0, *cuts], ends, strict=False)]
    ranges = st.lists(st.tuples(st.integers(0, length), st.integers(0, length)), max_size=3)
    annotations = {}
    for label in draw(st.lists(names, max_size=2, unique=True)):
        found = draw(ranges)
        scores = draw(st.none() | st.just(np.frombuffer(random.Random(length).randbytes(8 * len(found)), np.float64)))
        annotations[label] = Annotations(np.array(found, np.int32).reshape(-1, 2), scores)
    experts = np.arange(max(length - 1, 0) * 6, dtype=np.int16).reshape(-1, 3, 2)
    return Rollout(
        role=draw(st.sampled_from(["a", "b"])), group=draw(names), tokens=numbers, logprobs=floats, spans=spans,
        stop=draw(st.sampled_from(list(Stop))),
        payload=draw(st.dictionaries(st.text(max_size=4), json_values, max_size=3)),
        rewards=draw(st.dictionaries(names, st.floats(allow_nan=False), max_size=2)), annotations=annotations,
        advantages=draw(st.sampled_from([None, floats[::-1].copy()]) | any_float), partner_weight=draw(any_float),
        values=draw(st.dictionaries(names, st.sampled_from([floats, numbers, floats.reshape(-1, 1)]), max_size=2)),
        experts=draw(st.sampled_from([None, experts])),
    )  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(rollouts=st.lists(any_rollout(), max_size=6))
def test_any_rollouts_come_back_to_the_last_bit(tmp_path_factory, rollouts):
    directory = tmp_path_factory.mktemp("any")
    iteration = Iteration(cycle=0, index=0, roles=("a", "b"), number=0)
    by_role = {role: [r for r in rollouts if r.role == role] for role in iteration.roles}
    found = put_and_get(IterationStore(directory), Collected(rollouts=by_role, metrics={}), iteration)
    assert bits(found.rollouts) == bits(by_role)


def test_a_payload_that_is_not_json_is_named_and_nothing_is_left(tmp_path):
    store = IterationStore(tmp_path)
    with pytest.raises(TypeError, match="group 'p1': its payload is not JSON .*set"):
        store.put(ITERATION, collected(rollout(), rollout(payload={"a": {1, 2}})), {})
    assert list(tmp_path.iterdir()) == []


def test_an_iteration_whose_writing_fails_leaves_the_one_before_as_it_was(tmp_path):
    IterationStore(tmp_path).put(ITERATION, collected(rollout()), {"before": 1})

    def fail(role, tokens):
        raise RuntimeError("no tokenizer")

    with pytest.raises(RuntimeError, match="no tokenizer"):
        IterationStore(tmp_path, decode=fail).put(ITERATION, collected(bare()), {"before": 2})
    found = IterationStore(tmp_path).get(ITERATION)
    assert (
        found is not None
        and found[1] == {"before": 1}
        and [p.name for p in tmp_path.iterdir()] == ["iteration_000012.parquet"]
    )


def test_iterations_of_other_settings_or_roles_are_passed_over(tmp_path):
    assert fingerprint("a: 1") == fingerprint("a: 1") != fingerprint("a: 2")
    IterationStore(tmp_path, "one").put(ITERATION, collected(rollout()), {})
    assert IterationStore(tmp_path, "one").get(ITERATION) is not None
    assert IterationStore(tmp_path, "two").get(ITERATION) is None
    assert (
        IterationStore(tmp_path, "one").get(Iteration(cycle=3, index=1, roles=("generator", "verifier"), number=12))
        is None
    )
    assert IterationStore(tmp_path, "one").get(Iteration(cycle=3, index=2, roles=("generator",), number=13)) is None


def test_a_file_under_the_number_of_another_iteration_is_passed_over(tmp_path):
    store = IterationStore(tmp_path)
    store.put(ITERATION, collected(rollout()), {}).rename(store.path(13))
    assert store.get(Iteration(cycle=3, index=2, roles=("generator",), number=13)) is None


def test_a_cut_file_is_collected_again_with_a_warning(tmp_path, caplog):
    store = IterationStore(tmp_path)
    path = store.put(ITERATION, collected(*odd_rollouts()), {})
    whole = path.read_bytes()
    for size in [*range(0, 64), *range(64, len(whole), 97), len(whole) - 1]:
        path.write_bytes(whole[:size])
        caplog.clear()
        assert store.get(ITERATION) is None
        assert (
            "iteration_000012.parquet cannot be read" in caplog.text
            and "iteration 12 is collected again" in caplog.text
        )
    with pytest.raises(StoreError, match="cannot be read .*: bring a whole copy"):
        store.read(ITERATION)
    with pytest.raises(StoreError, match="remove it"):
        read_rows(path)


def test_a_changed_byte_never_makes_another_iteration_of_it(tmp_path, caplog):
    """Pages carry checksums, the footer has our digest; a page's header that is wrong cannot be followed."""
    caplog.set_level(logging.CRITICAL)
    store = IterationStore(tmp_path)
    before = collected(*odd_rollouts())
    path = store.put(ITERATION, before, {"position": 1})
    whole, draw = path.read_bytes(), random.Random(0)
    for _ in range(400):
        changed = bytearray(whole)
        changed[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
        path.write_bytes(changed)
        found = store.get(ITERATION)
        assert found is None or (bits(found[0].rollouts) == bits(before.rollouts) and found[1] == {"position": 1})


def test_files_of_others_and_of_another_format_are_not_read(tmp_path, caplog):
    store = IterationStore(tmp_path)
    pq.write_table(pa.table({"a": [1]}), store.path(12))
    assert store.get(ITERATION) is None and "is no iteration of a run" in caplog.text
    store.path(12).unlink()
    store.path(12).mkdir()
    assert store.get(ITERATION) is None
    store.path(12).rmdir()
    path = store.put(ITERATION, collected(rollout()), {})
    table = pq.read_table(path)
    head = {**json.loads(table.schema.metadata[b"megatron_rl"]), "format": 99}
    pq.write_table(table.replace_schema_metadata({b"megatron_rl": json.dumps(head)}), path)
    store_module._seal(path)
    assert (
        store.get(ITERATION) is None
        and f"its format is 99, and this version reads {store_module.FORMAT}" in caplog.text
    )


@pytest.mark.parametrize("rows", [{"generator": 1, "verifier": 2}, {"generator": 3, "verifier": 0}, {"judge": 3}])
def test_a_file_whose_rows_are_of_other_roles_than_it_says_is_not_read(tmp_path, caplog, rows):
    store = IterationStore(tmp_path)
    path = store.put(ITERATION, collected(rollout(), rollout(), verifier=[bare(role="verifier")]), {})
    assert store.get(ITERATION) is not None
    table = pq.read_table(path)
    head = {**json.loads(table.schema.metadata[b"megatron_rl"]), "rows": rows}
    pq.write_table(table.replace_schema_metadata({b"megatron_rl": json.dumps(head)}), path)
    store_module._seal(path)
    assert store.get(ITERATION) is None and "is collected again" in caplog.text


def put_iterations(store: IterationStore, count: int, first: int = 0) -> None:
    for number in range(first, count):
        store.put(
            Iteration(cycle=number, index=0, roles=("generator",), number=number), collected(rollout()), {"n": number}
        )


def numbers(directory) -> list[int]:
    return [iteration_number(path) for path in iteration_files(directory)]


def test_an_iteration_stays_until_a_checkpoint_holds_it_and_afterwards_if_it_is_kept(tmp_path):
    store = IterationStore(tmp_path, keep_every=3, decode=decode)
    put_iterations(store, 8)
    assert numbers(tmp_path) == list(range(8))
    store.drop(5)
    assert numbers(tmp_path) == [0, 3, 5, 6, 7]
    store.drop(8)
    assert numbers(tmp_path) == [0, 3, 6]
    texts = [[row["text"] is not None for row in read_rows(path)] for path in iteration_files(tmp_path)]
    assert texts == [[True]] * 3


@pytest.mark.parametrize(("every", "left"), [(0, []), (1, [0, 1, 2, 3])])
def test_no_iteration_or_every_iteration_is_kept(tmp_path, every, left):
    store = IterationStore(tmp_path, keep_every=every, decode=decode)
    put_iterations(store, 4)
    store.drop(4)
    assert numbers(tmp_path) == left


def test_what_was_kept_stays_when_the_run_goes_on_keeping_fewer(tmp_path):
    put_iterations(IterationStore(tmp_path, keep_every=1, decode=decode), 3)
    store = IterationStore(tmp_path, keep_every=10, decode=decode)
    put_iterations(store, 6, first=3)
    store.drop(6)
    assert numbers(tmp_path) == [0, 1, 2]


def test_texts_are_decoded_for_kept_iterations_alone(tmp_path):
    asked = []

    def count(role, tokens):
        asked.append(tokens.tolist())
        return decode(role, tokens)

    store = IterationStore(tmp_path, keep_every=2, decode=count)
    put_iterations(store, 3)
    assert asked == [[1, 2], [3, 4, 5, 6]] * 2, "prompt and answer of the two kept iterations"
    with_text, without = (read_rows(store.path(number))[0] for number in (0, 1))
    assert with_text["text"] == "<step>a</step><step>b</step>!" and with_text["question"] == "Q?"
    hidden = ("prompt", "text", "steps", "question", "answer", "review")
    assert [without[name] for name in hidden] == [None] * 6
    assert without["num_tokens"] == 4 and without["rewards"] == with_text["rewards"]


def test_a_run_that_goes_on_removes_what_it_will_not_read(tmp_path, caplog):
    put_iterations(IterationStore(tmp_path, "old"), 6)
    put_iterations(IterationStore(tmp_path, "new"), 5, first=4)
    (tmp_path / ".iteration_000009.parquet.tmp").write_bytes(b"half")
    (tmp_path / "iteration_000007.parquet").write_bytes(b"half")
    assert IterationStore(tmp_path, "new").clean(3) == Waiting(kept=1, dropped=3)  # iteration 4 is trained on as it is
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"iteration_00000{n}.parquet" for n in (0, 1, 2, 4)]
    assert IterationStore(tmp_path / "nothing here", "new").clean(0) == Waiting(0, 0)


def test_a_replay_reads_a_run_or_its_rollouts_whatever_its_settings(tmp_path):
    run, own = tmp_path / "run", tmp_path / "own"
    put_iterations(IterationStore(run / ROLLOUTS, "its own"), 2)
    iteration = Iteration(cycle=1, index=0, roles=("generator",), number=1)
    for place in (run, run / ROLLOUTS):
        found, state = open_replay(place, own=own).read(iteration)
        assert state == {"n": 1} and bits(found.rollouts["generator"]) == bits([rollout()])
    with pytest.raises(
        FileNotFoundError, match=r"iteration 5 \(generator\) was not kept there.*run.save_rollouts_every=1"
    ):
        open_replay(run, own=own).read(Iteration(cycle=5, index=0, roles=("generator",), number=5))
    with pytest.raises(StoreError, match="trained generator; iteration 1 of this run trains judge, generator"):
        open_replay(run, own=own).read(Iteration(cycle=1, index=0, roles=("judge", "generator"), number=1))


def test_a_replay_of_nothing_or_of_itself_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="run.save_rollouts_every=1"):
        open_replay(tmp_path / "nowhere", own=tmp_path)
    put_iterations(IterationStore(tmp_path / ROLLOUTS), 1)
    for place in (tmp_path, tmp_path / ROLLOUTS):
        with pytest.raises(StoreError, match="is this run itself"):
            open_replay(place, own=tmp_path)
