"""Rows between JSON, parts and answers: every type of column, every fault, slices and joins."""

import base64
import json
import math
import weakref
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gen_worker.contract.job.model_version import VersionFacts
from gen_worker.inference.front.formats.json_rows import MAX_FAULTS, RowReader, encode_answer
from gen_worker.inference.front.queries import Query, Queue
from gen_worker.inference.front.refusals import Refusal
from gen_worker.inference.front.rows import LETTERS, Answer, AnswerBlock, Rows, join_rows, rows_of_part
from gen_worker.inference.front.shadow import compare_values
from gen_worker.inference.messages import ColumnData, ColumnType, Part

FACTS = VersionFacts(run_id="run", step=1, weights_hash="sha256:0")


def read(rows: Any, *columns: ColumnType) -> Rows:
    return RowReader(columns).read(json.dumps({"rows": rows}).encode())


def faults_of(rows: Any, *columns: ColumnType) -> list[tuple[int | None, str | None, str, str]]:
    with pytest.raises(Refusal) as raised:
        read(rows, *columns)
    assert raised.value.kind == "input"
    return [(fault.row, fault.column, fault.found, fault.expected) for fault in raised.value.faults]


def decode(part: Part, payload: bytes) -> dict[str, list[Any]]:
    block = AnswerBlock(part, memoryview(payload))
    block.check()
    return block.columns


@pytest.mark.parametrize("dtype", LETTERS)
@pytest.mark.parametrize("dims", [(), (3,), (2, 3), (0,)])
def test_numbers_are_packed_as_numpy_has_them_and_come_back(dtype: str, dims: tuple[int, ...]) -> None:
    values = np.array([0, 1, 2, 1, 0, 1] * 4)[: 4 * math.prod(dims)].reshape(4, *dims).astype(dtype)
    rows = read([{"x": value} for value in values.tolist()], ColumnType(name="x", dtype=dtype, dims=dims))
    part, payload = join_rows([rows])
    assert b"".join(payload) == values.tobytes()
    assert part.columns[0].dims == dims
    assert decode(part, b"".join(payload)) == {"x": values.tolist()}


def test_float32_is_rounded_as_numpy_rounds_it() -> None:
    values = np.random.default_rng(0).standard_normal(200)
    rows = read([{"x": value} for value in values.tolist()], ColumnType(name="x", dtype="float32"))
    assert rows.columns[0] == values.astype(np.float32).tobytes()


def test_text_bytes_nulls_and_lists_of_any_length_are_values() -> None:
    columns = (
        ColumnType(name="text", dtype="string"),
        ColumnType(name="image", dtype="binary"),
        ColumnType(name="tags", dtype="string", dims=(None,)),
        ColumnType(name="size", dtype="float32", is_nullable=True),
        ColumnType(name="more", dtype="any"),
    )
    rows = [
        {
            "text": "ä",
            "image": base64.b64encode(b"\0\xff").decode(),
            "tags": ["a"],
            "size": 1.5,
            "more": {"a": [1]},
        },
        {"text": "", "image": "", "tags": [], "size": None, "more": None},
        {"text": "x", "image": "AA==", "tags": ["b", "c"], "more": 5},
    ]
    part, payload = join_rows([read(rows, *columns)])
    assert decode(part, b"".join(payload)) == {
        "text": ["ä", "", "x"],
        "image": [b"\0\xff", b"", b"\0"],
        "tags": [["a"], [], ["b", "c"]],
        "size": [1.5, None, None],
        "more": [{"a": [1]}, None, 5],
    }
    assert [column.encoding for column in part.columns] == ["values"] * 5
    whole, _ = join_rows([read([{**rows[0], "size": 2}], *columns)])
    assert whole.columns[3].encoding == "packed", "without nulls a nullable column is packed"


def test_a_column_may_have_any_name() -> None:
    names = ("class", "a b", "", "f0", "ü", "self", "rows")
    columns = [ColumnType(name=name, dtype="int64") for name in names]
    part, payload = join_rows([read([{name: number for number, name in enumerate(names)}], *columns)])
    assert decode(part, b"".join(payload)) == {name: [number] for number, name in enumerate(names)}


@pytest.mark.parametrize(
    ("dtype", "value", "found"),
    [
        ("float32", "1", '"1"'),
        ("float32", True, "true"),
        ("float32", None, "null"),
        ("float32", [1], "a list of 1"),
        ("float32", 1e39, "1e+39"),
        ("float16", 1e6, "1000000.0"),
        ("int8", 128, "128"),
        ("uint8", -1, "-1"),
        ("int64", 2**63, "9223372036854775808"),
        ("uint64", 2**64, "18446744073709551616"),
        ("int32", 1.5, "1.5"),
        ("bool", 1, "1"),
        ("string", 1, "1"),
        ("binary", "%", '"%"'),
        ("binary", {}, "an object"),
    ],
)
def test_a_value_of_another_type_is_named(dtype: str, value: Any, found: str) -> None:
    good = {"float32": 1, "float16": 1, "bool": True, "string": "a", "binary": "AA=="}.get(dtype, 1)
    column = ColumnType(name="x", dtype=dtype)
    faults = faults_of([{"x": good}, {"x": value}], column)
    assert [fault[:2] for fault in faults] == [(1, "x")]
    assert faults[0][2].lower().replace("1e39", "1e+39") in (found, "1e+39")


@pytest.mark.parametrize(
    ("dtype", "dims", "expected"),
    [
        ("uint8", (784,), "a list of 784 whole numbers from 0 to 255"),
        ("float32", (3, 224, None), "lists of 3 × 224 × any numbers (float32)"),
        ("int64", (None,), "a list of whole numbers (int64)"),
        ("string", (), "text"),
    ],
)
def test_what_was_expected_is_said_as_a_person_would(
    dtype: str, dims: tuple[int | None, ...], expected: str
) -> None:
    (fault,) = faults_of([{"x": {}}], ColumnType(name="x", dtype=dtype, dims=dims))
    assert fault[3] == expected


def test_the_first_fault_is_the_message_and_the_others_are_counted() -> None:
    reader = RowReader((ColumnType(name="x", dtype="int8"),))
    for num_more, counted in ((0, ""), (1, " (and 1 more fault)"), (2, " (and 2 more faults)")):
        with pytest.raises(Refusal) as raised:
            reader.convert([{"x": "a"}] * (1 + num_more))
        first = 'row 0, column x: found "a", expected a whole number from -128 to 127'
        assert raised.value.message == f"{first}{counted}"


@pytest.mark.parametrize("columns", [(), (ColumnType(name="x", dtype="int8"),)])
def test_more_rows_than_can_wait_are_refused_before_each_is_looked_at(
    columns: tuple[ColumnType, ...],
) -> None:
    reader = RowReader(columns, max_rows=10)
    assert reader.read(json.dumps({"rows": [{"x": 1}] * 10}).encode()).num_rows == 10
    for rows in ([{"x": 1}] * 11, [{"x": "much"}] * 11):
        with pytest.raises(Refusal) as raised:
            reader.read(json.dumps({"rows": rows}).encode())
        assert raised.value.kind == "too_large"


def test_faults_are_bounded_and_long_values_are_cut() -> None:
    column = ColumnType(name="x", dtype="int8")
    assert len(faults_of([{"x": "a" * 10_000}] * 1000, column)) == MAX_FAULTS
    assert all(len(fault[2]) < 100 for fault in faults_of([{"x": "a" * 10_000}], column))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"1",
        b'{"rows":[]}',
        b'{"rows":{}}',
        b'{"rows":[{"x":1}],"more":1}',
        b"\xff",
        b"[" * 100_000,
        b'{"rows":' * 5000,
        b'{"rows":[{"x":NaN}]}',
        b'{"rows":[{"x":1e999}]}',
        b'{"rows":[{"x":1,}]}',
    ],
)
def test_a_body_that_is_no_list_of_rows_is_refused(body: bytes) -> None:
    for columns in ((ColumnType(name="x", dtype="float64"),), ()):
        with pytest.raises(Refusal) as raised:
            RowReader(columns).read(body)
        assert raised.value.kind == "input"


ANY_COLUMNS = (
    ColumnType(name="a", dtype="float32", dims=(2,)),
    ColumnType(name="b", dtype="string"),
    ColumnType(name="c", dtype="int16", is_nullable=True),
)
ANY_ROW = st.fixed_dictionaries(
    {
        "a": st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=2, max_size=2),
        "b": st.text(st.characters(codec="utf-8"), max_size=5),
        "c": st.none() | st.integers(-(2**15), 2**15 - 1),
    }
)


@given(st.lists(ANY_ROW, min_size=1, max_size=40), st.data())
def test_slices_of_rows_joined_again_are_the_same_rows(
    rows: list[dict[str, Any]], data: st.DataObject
) -> None:
    reader = RowReader(ANY_COLUMNS)
    whole = reader.read(json.dumps({"rows": rows}).encode())
    cuts = sorted({0, len(rows), *data.draw(st.lists(st.integers(0, len(rows)), max_size=4))})
    pieces = [whole.slice(start, stop) for start, stop in pairwise(cuts)]
    part, payload = join_rows(pieces)
    block = AnswerBlock(part, memoryview(b"".join(payload)))
    assert Answer([(block, 0, len(rows))], facts=FACTS, shape=1, compute_ms=0).rows() == rows
    again = rows_of_part(part, payload)
    assert join_rows([again]) == (part, [bytes(each) for each in payload])
    for start, stop in pairwise(cuts):
        cut, content = block.slice(start, stop)
        assert AnswerBlock(cut, memoryview(content)).columns == {
            name: [row[name] for row in rows[start:stop]] for name in ("a", "b", "c")
        }


@given(st.lists(st.lists(ANY_ROW, min_size=1, max_size=4), min_size=1, max_size=8))
def test_each_of_joined_requests_gets_its_own_rows_back(requests: list[list[dict[str, Any]]]) -> None:
    reader = RowReader(ANY_COLUMNS)
    read = [reader.read(json.dumps({"rows": rows}).encode()) for rows in requests]
    same = [(rows, each) for rows, each in zip(requests, read, strict=True) if each.layout is read[0].layout]
    part, payload = join_rows([each for _, each in same])
    block = AnswerBlock(part, memoryview(b"".join(payload)))
    start = 0
    for rows, each in same:
        answer = Answer([(block, start, start + each.num_rows)], facts=FACTS, shape=1, compute_ms=0)
        assert msgspec.json.decode(encode_answer(answer)) == {"rows": rows}
        start += each.num_rows


def test_an_answer_whose_sizes_do_not_fit_is_refused() -> None:
    column = ColumnData(name="y", encoding="packed", size_bytes=8, dtype="float32")
    for part, payload in (
        (Part(num_rows=2, columns=(column,)), b"\0" * 7),
        (Part(num_rows=3, columns=(column,)), b"\0" * 8),
        (Part(num_rows=2, columns=(msgspec.structs.replace(column, dims=(2,)),)), b"\0" * 8),
        (Part(num_rows=2, columns=(msgspec.structs.replace(column, dtype="complex64"),)), b"\0" * 8),
        (
            Part(num_rows=2, columns=(msgspec.structs.replace(column, encoding="values"),)),
            b"\x91" + b"\0" * 7,
        ),
        (
            Part(num_rows=7, columns=(msgspec.structs.replace(column, encoding="values"),)),
            b"\x97" + b"\xc1" * 7,
        ),
    ):
        with pytest.raises(ValueError, match=r"says that it has|cannot be read|has the type|another number"):
            decode(part, payload)


def test_the_queue_is_first_in_first_out_and_counts_rows_also_of_those_that_leave() -> None:
    queue = Queue()
    column = ColumnType(name="x", dtype="int8")
    queries = [Query(read([{"x": 1}] * size, column), lambda outcome: None) for size in (3, 4, 2, 5, 1)]
    for query in queries:
        queue.push(query)
    assert queue.num_rows == 15
    queries[1].leave()
    assert queue.num_rows == 11
    assert queue.take(8) == [queries[0], queries[2]]
    queue.push_front([queries[2], queries[0]])
    assert queue.take(1) == [queries[2]]
    assert queue.take(8) == [queries[0], queries[3]]
    assert queue.num_rows == 1
    assert queue.take(8) == [queries[4]]
    assert not queue


def test_a_query_is_answered_once_and_its_parts_together() -> None:
    outcomes: list[Any] = []
    query = Query(read([{"x": 1}] * 5, ColumnType(name="x", dtype="int8")), outcomes.append)
    parts = query.divide(2)
    assert [part.num_rows for part in parts] == [2, 2, 1]
    parts[2].answer(Refusal("error", "three"))
    halves = parts[0].divide(1)
    halves[0].answer(Refusal("error", "one"))
    halves[1].answer(Refusal("deadline", "two"))
    assert outcomes == []
    parts[1].answer(Refusal("error", "four"))
    (outcome,) = outcomes
    assert (outcome.kind, outcome.message) == ("error", "one")
    assert [fault.row for fault in outcome.faults] == [0, 4]
    query.answer(Refusal("error", "again"))
    assert len(outcomes) == 1
    left = Query(read([{"x": 1}] * 5, ColumnType(name="x", dtype="int8")), outcomes.append)
    below = left.divide(2)
    left.leave()
    assert all(part.is_closed for part in below)
    below[0].answer(Refusal("error", "late"))
    assert len(outcomes) == 1


def test_what_was_answered_or_left_is_freed_at_once() -> None:
    class Waiting:
        def receive(self, outcome: Any) -> None:
            pass

    for end in (lambda query: query.answer(Refusal("error", "one")), Query.leave):
        waiting = Waiting()
        waiting.query = query = Query(  # type: ignore[attr-defined]
            read([{"x": 1}] * 5, ColumnType(name="x", dtype="int8")), waiting.receive
        )
        query.divide(2)
        freed = weakref.ref(waiting)
        end(query)
        del waiting, query
        assert freed() is None


def test_answers_are_compared_in_the_same_places() -> None:
    one = {"y": [1.0, math.nan], "z": "a"}
    assert compare_values(one, {"y": [1.0, math.nan], "z": "a"}) == 0
    assert compare_values(one, {"y": [1.25, math.nan], "z": "a"}) == 0.25
    assert compare_values(one, {"y": [1.0], "z": "a"}) == math.inf
    assert compare_values(one, {"y": [1.0, 2.0], "z": "a"}) == math.inf
    assert compare_values(one, {"y": [1.0, math.nan], "z": "b"}) == math.inf
    assert compare_values(one, {"y": [1.0, math.nan]}) == math.inf
