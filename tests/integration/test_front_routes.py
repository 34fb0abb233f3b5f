"""The routes of the front: Arrow IPC, streams, feedback, the Open Inference Protocol, what describes the server."""

import asyncio
import json
import struct
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from frame_workers import CRASHES, HANGS, RAISES, make_version
from served_front import Reply, Served, serving, until

from gen_worker.inference.front.event_loop import run
from gen_worker.inference.front.formats import arrow_rows, oip
from gen_worker.inference.front.formats.json_rows import RowReader
from gen_worker.inference.front.refusals import Refusal
from gen_worker.inference.front.rows import join_rows
from gen_worker.inference.messages import ColumnType

ARROW = "application/vnd.apache.arrow.stream"


def make_stream(rows: list[list[float]], name: str = "x", **options: Any) -> bytes:
    values = pa.array(rows, pa.list_(pa.float32(), 4))
    return write_stream(pa.record_batch({name: values}), **options)


def write_stream(batch: pa.RecordBatch, **options: Any) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_batch(batch)
    data: bytes = sink.getvalue().to_pybytes()
    return data


async def ask_arrow(served: Served, body: bytes) -> Reply:
    return await served.ask("POST", "/v1/predict", body, content_type=ARROW)


def read_values(reply: Reply) -> list[float]:
    assert reply.status == 200, reply.body
    assert reply.headers["content-type"] == ARROW
    with pa.ipc.open_stream(reply.body) as reader:
        values: list[float] = reader.read_all().column("y").to_pylist()
    return values


def test_arrow_streams_are_answered_with_arrow_streams_also_beside_json(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, version=make_version(delay_s=0.01)) as served:
            rows = [[number, 1, 0, 0] for number in range(5)]
            expected = [number + 1.0 for number in range(5)]
            assert read_values(await ask_arrow(served, make_stream(rows))) == expected
            replies = await asyncio.gather(
                *(ask_arrow(served, make_stream([[number, 0, 0, 0]])) for number in range(6)),
                *(served.predict([number, 0, 0, 0]) for number in range(6)),
            )
            assert [read_values(reply) for reply in replies[:6]] == [[float(number)] for number in range(6)]
            assert [reply.values for reply in replies[6:]] == [[float(number)] for number in range(6)]
            large = await ask_arrow(served, make_stream([[number, 0, 0, 0] for number in range(50)]))
            assert read_values(large) == [float(number) for number in range(50)]
            assert large.headers["x-trn-batch-shape"] == "8"

    run(main())


def test_rows_of_arrow_streams_that_raise_or_kill_are_named_as_those_of_json(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served:
            raised = await ask_arrow(served, make_stream([[1, 0, 0, 0], [RAISES, 0, 0, 0], [2, 0, 0, 0]]))
            assert raised.error["faults"] == [{"row": 1}]
            poison = await ask_arrow(served, make_stream([[1, 0, 0, 0], [2, 0, 0, 0], [CRASHES, 0, 0, 0]]))
            assert (poison.error["kind"], poison.error["faults"]) == ("poison", [{"row": 2}])
            again = await ask_arrow(served, make_stream([[CRASHES, 0, 0, 0], [1, 0, 0, 0]]))
            assert (again.error["kind"], again.error["faults"]) == ("poison", [{"row": 0}])

    run(main())


def test_a_stream_that_is_damaged_or_grows_when_it_is_read_is_refused(tmp_path: Path) -> None:
    plain = make_stream([[1, 2, 3, 4]] * 4)
    schema_bytes = len(pa.ipc.open_stream(plain).schema.serialize())
    words = pa.array(["a" * 1000] * 4).dictionary_encode()
    nested = pa.RunEndEncodedArray.from_arrays(pa.array([100_000], pa.int32()), pa.array([1.0]))
    refused = {
        b"": "does not begin with a schema",
        plain[-8:] + plain: "does not begin with a schema",
        plain[schema_bytes:]: "does not begin with a schema",
        plain[:schema_bytes] + plain: "among its record batches",
        b"x" * 100: "not an Arrow",
        plain[: len(plain) // 2]: "not an Arrow",
        make_stream([[1, 2, 3, 4]] * 400, compression="zstd"): "compressed",
        make_stream([[1, 2, 3, 4]] * 400, compression="lz4"): "compressed",
        write_stream(pa.record_batch({"x": words})): "dictionaries|dictionary",
        write_stream(pa.record_batch({"x": nested})): "run_end_encoded",
        write_stream(pa.record_batch({"x": pa.nulls(10**9)})): "found null",
        make_stream([[1, 2, 3, 4]], name="z"): "found nothing",
        make_stream([]): "no rows",
    }

    async def main() -> None:
        async with serving(tmp_path) as served:
            for body, expected in refused.items():
                reply = await ask_arrow(served, body)
                assert (reply.status, reply.error["kind"]) == (400, "input"), (expected, reply.body)
                assert any(word in reply.error["message"] for word in expected.split("|")), reply.body
            many = write_stream(
                pa.record_batch({"x": pa.array([[1.0] * 4] * 5000, pa.list_(pa.float32(), 4))})
            )
            assert (await ask_arrow(served, many)).status == 413
            assert read_values(await ask_arrow(served, plain)) == [10.0] * 4

    run(main())


def test_a_schema_is_checked_for_the_columns_of_each_model_also_after_it_was_read_once() -> None:
    inputs = (ColumnType(name="x", dtype="float32", dims=(4,)),)
    other = (ColumnType(name="z", dtype="float32", dims=(4,)),)
    body = make_stream([[1, 2, 3, 4]] * 3)
    for _ in range(2):
        assert arrow_rows.read_stream(body, inputs, 100).num_rows == 3
        assert arrow_rows.read_stream(body, (), 100).num_rows == 3
        for columns in (other, (*inputs, *other)):
            with pytest.raises(Refusal, match="found nothing"):
                arrow_rows.read_stream(body, columns, 100)
        with pytest.raises(Refusal, match="compressed"):
            arrow_rows.read_stream(make_stream([[1, 2, 3, 4]] * 400, compression="zstd"), inputs, 1000)


def test_offsets_that_point_out_of_a_stream_are_refused() -> None:
    values = pa.array([b"abc", b"de"], pa.binary())
    body = bytearray(write_stream(pa.record_batch({"x": values})))
    place = body.rindex(struct.pack("<3i", 0, 3, 5))
    body[place : place + 12] = struct.pack("<3i", 0, 3, 1 << 30)
    with pytest.raises(Refusal, match="not an Arrow IPC stream"):
        arrow_rows.read_stream(bytes(body), (), 100)


NOTHING = pa.struct([])
MANY = (1 << 31) - 2
OFFSETS = pa.py_buffer(struct.pack("<ii", 0, MANY))


@pytest.mark.parametrize(
    "column",
    [
        pa.Array.from_buffers(
            pa.list_(NOTHING), 1, [None, OFFSETS], children=[pa.Array.from_buffers(NOTHING, MANY, [None])]
        ),
        pa.Array.from_buffers(
            pa.list_(NOTHING, MANY), 1, [None], children=[pa.Array.from_buffers(NOTHING, MANY, [None])]
        ),
        pa.Array.from_buffers(
            pa.list_(pa.list_(pa.int8(), 0)),
            1,
            [None, OFFSETS],
            children=[
                pa.Array.from_buffers(
                    pa.list_(pa.int8(), 0), MANY, [None], children=[pa.array([], pa.int8())]
                )
            ],
        ),
    ],
    ids=["records", "fixed list of records", "empty lists"],
)
def test_values_that_take_no_bytes_are_refused(column: pa.Array) -> None:
    """One row of 300 bytes would have two billion values, and whoever reads it that many objects."""
    body = write_stream(pa.record_batch({"x": column}))
    assert len(body) < 1000
    with pytest.raises(Refusal, match="expected numbers, text, bytes or lists"):
        arrow_rows.read_stream(body, (), 100)


@pytest.mark.parametrize("rows", [[None, [1.0, 2.0]], [[1.0, None]]])
def test_a_null_in_a_column_that_has_none_is_named(rows: list[Any]) -> None:
    column = ColumnType(name="x", dtype="float32", dims=(2,))
    body = write_stream(pa.record_batch({"x": pa.array(rows, pa.list_(pa.float32(), 2))}))
    with pytest.raises(Refusal, match="column x: found null, expected float32"):
        arrow_rows.read_stream(body, (column,), 100)
    nullable = msgspec.structs.replace(column, is_nullable=True)
    if rows[0] is None:
        assert arrow_rows.read_stream(body, (nullable,), 100).num_rows == 2


@pytest.mark.parametrize("shape", [[10**9, 0], [1, 10**9, 0], [1 << 70, 0], [4, 0, 10**9]])
def test_a_shape_without_values_makes_no_rows(shape: list[int]) -> None:
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": shape, "data": []}]}
    reader = RowReader((ColumnType(name="x", dtype="float32", dims=(None,)),), max_rows=100)
    with pytest.raises(Refusal):
        oip.read_request(json.dumps(body).encode(), reader)


def test_rows_of_an_arrow_stream_can_be_sliced_and_are_the_same(tmp_path: Path) -> None:
    rows = arrow_rows.read_stream(make_stream([[number, 0, 0, 0] for number in range(9)]), (), 100)
    part, payload = join_rows([rows.slice(3, 5)])
    assert (part.num_rows, part.encoding, part.answer) == (2, "ipc", "ipc")
    with pa.ipc.open_stream(b"".join(payload)) as reader:
        assert reader.read_all().column("x").to_pylist() == [[3, 0, 0, 0], [4, 0, 0, 0]]


def events_of(body: bytes) -> list[tuple[str, Any]]:
    found = []
    for block in body.decode().split("\n\n")[:-1]:
        lines = dict(line.split(": ", 1) for line in block.split("\n"))
        found.append((lines.get("event", "message"), json.loads(lines["data"])))
    return found


def test_a_stream_is_events_or_lines_of_json_and_says_where_it_ends(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, version=make_version(can_stream=True)) as served:
            client = await served.connect()
            body = {"row": {"x": [0, 3, 0, 0]}}
            reply = await client.ask("POST", "/v1/stream", body)
            assert reply.headers["content-type"] == "text/event-stream"
            assert reply.headers["x-trn-step"] == "1"
            items = [("message", {"item": number, "text": "ä"}) for number in range(3)]
            assert events_of(reply.body) == [*items, ("end", {})]
            lines = await client.ask("POST", "/v1/stream", body, accept="application/x-ndjson")
            assert lines.headers["content-type"] == "application/x-ndjson"
            assert [json.loads(line) for line in lines.body.splitlines()] == [
                *({"item": item} for _, item in items),
                {"end": True},
            ]
            assert (await client.ask("GET", "/health")).status == 200, "the connection does not go on"

    run(main())


def test_an_error_before_the_first_item_is_a_status_and_a_later_one_is_the_last_event(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, version=make_version(can_stream=True)) as served:
            early = await served.ask("POST", "/v1/stream", {"row": {"x": [0, 0, RAISES, 0]}})
            assert (early.status, early.error["kind"], early.error["id"]) == (500, "error", "e1")
            late = await served.ask("POST", "/v1/stream", {"row": {"x": [0, 2, RAISES, 0]}})
            assert [name for name, _ in events_of(late.body)] == ["message", "message", "error"]
            assert b"secret" not in late.body
            killed = await served.ask("POST", "/v1/stream", {"row": {"x": [0, 2, CRASHES, 0]}})
            assert [name for name, _ in events_of(killed.body)][-1] == "error"
            await until(lambda: served.pool.num_ready == 1)
            assert (await served.ask("POST", "/v1/stream", {"row": {"x": [0]}})).status == 400
            assert (await served.ask("POST", "/v1/stream", {"rows": []})).status == 400

    run(main())


def test_a_model_without_streams_says_so(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served:
            reply = await served.ask("POST", "/v1/stream", {"row": {"x": [1, 2, 3, 4]}})
            assert (reply.status, reply.error["kind"]) == (404, "not_found")

    run(main())


def test_a_slow_reader_slows_its_stream_down_and_a_reader_that_leaves_ends_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, version=make_version(can_stream=True)) as served:
            sent = 0
            streams = served.pool._streams
            slow = await served.connect()
            slow.writer.transport.pause_reading()  # type: ignore[attr-defined]
            slow.send("POST", "/v1/stream", {"row": {"x": [0, 10_000_000, 0, 0]}})
            await until(lambda: bool(streams))
            (connection,) = served.front.reception.connections
            await until(lambda: connection._unread_since is not None)
            for number in range(20):  # batches do not wait for a stream
                assert (await served.predict([number, 0, 0, 0])).values == [float(number)]
            assert connection._peer is not None
            sent = connection._peer.get_write_buffer_size()
            assert sent < 1 << 20
            slow.abort()
            await until(lambda: not streams)
            assert (await served.predict([1, 0, 0, 0])).values == [1.0]

    run(main())


def test_the_deadline_of_a_stream_is_its_last_event(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, version=make_version(can_stream=True)) as served:
            reply = await served.ask(
                "POST", "/v1/stream", {"row": {"x": [0, 10_000_000, 0, 0]}}, x_deadline_ms="300"
            )
            name, last = events_of(reply.body)[-1]
            assert (name, last["error"]["kind"]) == ("error", "deadline")
            await until(lambda: served.pool.is_idle)

    run(main())


def test_feedback_is_handed_over_and_its_result_or_refusal_answered(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served:
            rows = [{"request_id": "a", "row": 0, "y": 1.5}]
            assert (await served.ask("POST", "/v1/feedback", {"rows": rows})).status == 404
            seen: list[Any] = []

            async def take(rows: list[dict[str, Any]]) -> dict[str, int]:
                seen.append(rows)
                if len(seen) == 2:
                    raise Refusal("input", "unknown request")
                if len(seen) == 3:
                    raise RuntimeError("secret words")
                return {"accepted": len(rows)}

            served.front.on_feedback = take
            assert (await served.ask("POST", "/v1/feedback", {"rows": rows})).json == {"accepted": 1}
            assert seen == [rows]
            assert (await served.ask("POST", "/v1/feedback", {"rows": rows})).status == 400
            failed = await served.ask("POST", "/v1/feedback", {"rows": rows})
            assert failed.status == 500
            assert b"secret" not in failed.body
            for wrong in ({"rows": 1}, {"rows": [1]}, {}, [], {"rows": [], "more": 1}):
                assert (await served.ask("POST", "/v1/feedback", wrong)).status == 400

    run(main())


def tensor(
    name: str = "x", shape: Any = (1, 4), data: Any = (1, 2, 3, 4), datatype: str = "FP32"
) -> dict[str, Any]:
    return {"name": name, "shape": list(shape), "datatype": datatype, "data": list(data)}


def test_the_open_inference_protocol_is_spoken(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served:
            path = "/v2/models/demo/infer"
            nested = [[1, 2, 3, 4], [5, 6, 7, 8]]
            for data in (nested, [1, 2, 3, 4, 5, 6, 7, 8]):
                request = {
                    "id": "mine",
                    "inputs": [tensor(shape=(2, 4), data=data)],
                    "outputs": [{"name": "y"}],
                }
                reply = await served.ask("POST", path, request)
                assert reply.json == {
                    "model_name": "demo",
                    "model_version": "run@1",
                    "id": "mine",
                    "outputs": [{"name": "y", "datatype": "FP32", "shape": [2], "data": [10.0, 26.0]}],
                }
            both = (await served.ask("POST", path, {"inputs": [tensor()]})).json["outputs"]
            assert [(each["name"], each["datatype"]) for each in both] == [("y", "FP32"), ("pid", "INT64")]
            refused: list[Any] = [
                {"inputs": []},
                {"inputs": [tensor(name="z")]},
                {"inputs": [tensor(shape=(2, 4))]},
                {"inputs": [tensor(shape=(4, 1))]},
                {"inputs": [tensor(shape=(-1, -4))]},
                {"inputs": [tensor(shape=(0, 4), data=())]},
                {"inputs": [tensor(shape=())]},
                {"inputs": [tensor(shape=(1 << 62, 1 << 62))]},
                {"inputs": [tensor(datatype="FP33")]},
                {"inputs": [tensor(datatype="FP64")]},
                {"inputs": [tensor(datatype="BYTES")]},
                {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32"}]},
                {"inputs": [{**tensor(), "parameters": {"binary_data_size": 16}}]},
                {"inputs": [tensor()], "outputs": [{"name": "y", "parameters": {"binary_data": True}}]},
                {"inputs": [tensor()], "parameters": {"binary_data_output": True}},
                {"inputs": [tensor(data=(1, 2, 3, "a"))]},
                {"inputs": [tensor(data=([1, 2], 3, [4]))]},
                {"inputs": [tensor(), tensor()]},
                {"inputs": [tensor()], "outputs": [{"name": "nothing"}]},
                {"inputs": 1},
                [],
            ]
            for body in refused:
                reply = await served.ask("POST", path, body)
                assert (reply.status, reply.error["kind"]) == (400, "input"), body
            wrong = await served.ask("POST", path, {"inputs": [tensor(datatype="FP64")]})
            assert wrong.error["faults"] == [
                {"column": "x", "found": "the datatype FP64", "expected": "FP32"}
            ]
            header = {"inference-header-content-length": "2"}
            for content_type in ("application/octet-stream", "application/json"):
                reply = await served.ask("POST", path, b"{}" + bytes(16), content_type=content_type, **header)
                assert "binary tensors are not supported" in reply.error["message"]
            plain = {"inputs": [tensor()], "outputs": [{"name": "y", "parameters": {"binary_data": False}}]}
            assert (await served.ask("POST", path, plain)).json["outputs"][0]["data"] == [10.0]
            assert (await served.ask("GET", "/v2")).json["name"] == "trn"
            assert (await served.ask("GET", "/v2/health/live")).json == {"live": True}
            assert (await served.ask("GET", "/v2/health/ready")).json == {"ready": True}
            assert (await served.ask("GET", "/v2/models/demo/ready")).json == {"name": "demo", "ready": True}
            assert (await served.ask("GET", "/v2/models/demo")).json == {
                "name": "demo",
                "versions": ["run@1"],
                "platform": "trn",
                "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}],
                "outputs": [
                    {"name": "y", "datatype": "FP32", "shape": [-1]},
                    {"name": "pid", "datatype": "INT64", "shape": [-1]},
                ],
            }

    run(main())


def test_health_is_bad_while_no_worker_is_ready_and_good_again_afterwards(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served:
            assert (await served.ask("GET", "/health")).json["status"] == "ok"
            served.parent.kill(1)
            await until(lambda: not served.pool.is_ready)
            for path in ("/health", "/v2/health/ready", "/v2/models/demo/ready"):
                reply = await served.ask("GET", path)
                assert reply.status in (200, 503)
            assert (await served.ask("GET", "/v2/health/live")).status == 200
            await until(lambda: served.pool.is_ready)
            assert (await served.ask("GET", "/v2/health/ready")).status == 200

    run(main())


def test_figures_are_what_prometheus_reads(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served:
            await served.predict([1, 2, 3, 4], [1, 2, 3, 4])
            await served.predict([1])
            await served.ask("GET", "/nothing")
            reply = await served.ask("GET", "/metrics")
            assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
            lines = dict(line.rsplit(" ", 1) for line in reply.body.decode().splitlines() if line[0] != "#")
            assert lines['trn_requests_total{path="/v1/predict",code="200"}'] == "1"
            assert lines['trn_requests_total{path="/v1/predict",code="400"}'] == "1"
            assert lines['trn_requests_total{path="other",code="404"}'] == "1"
            assert lines["trn_rows_total"] == "2"
            assert lines['trn_batches_total{role="live",version="run@1",shape="8"}'] == "1"
            assert lines['trn_request_seconds_bucket{le="+Inf"}'] == lines["trn_request_seconds_count"] == "1"
            assert lines['trn_workers_ready{role="live",version="run@1"}'] == "1"
            names = {line.partition("{")[0] for line in lines}
            described = {
                line.split(" ")[2] for line in reply.body.decode().splitlines() if line[:6] == "# TYPE"
            }
            assert {
                name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count") for name in names
            } <= (described)
            stats = served.front.stats()
            assert stats["serve/requests_per_s"] > 0
            assert 0 < stats["serve/p50_ms"] <= stats["serve/p99_ms"]
            assert served.front.stats()["serve/requests_per_s"] == 0, "the window was not begun anew"

    run(main())


def test_a_split_answers_a_stable_share_of_the_requests_by_their_id(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served:
            served.front.set_split(await served.open_pool(make_version(2, bias=100.0)), 25.0)

            async def step(request_id: str) -> str:
                reply = await served.predict([1, 0, 0, 0], x_request_id=request_id)
                assert reply.values == [101.0 if reply.headers["x-trn-step"] == "2" else 1.0]
                return reply.headers["x-trn-step"]

            steps = [await step(f"id-{number}") for number in range(200)]
            assert 20 < steps.count("2") < 80
            assert steps == [await step(f"id-{number}") for number in range(200)]
            assert served.front.set_split(None) is not None
            assert {await step(f"id-{number}") for number in range(50)} == {"1"}

    run(main())


def test_a_shadow_sees_the_same_rows_and_is_compared_and_never_seen(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served:
            shadow = await served.open_pool(make_version(2, bias=0.25))
            served.front.set_shadow(shadow)
            for number in range(5):
                reply = await served.predict([number, 0, 0, 0], [1, 0, 0, 0])
                assert reply.values == [float(number), 1.0]
                assert reply.headers["x-trn-step"] == "1"
            assert read_values(await ask_arrow(served, make_stream([[1, 2, 3, 4]]))) == [10.0]
            await until(lambda: shadow.is_idle)
            figures = served.front.figures
            assert (figures.shadow_equal, figures.shadow_different, figures.shadow_failed) == (0, 11, 0)
            assert (await served.predict([HANGS, 0, 0, 0], x_deadline_ms="100")).status == 504
            served.front.set_shadow(None)

    run(main())


def test_a_model_without_known_columns_takes_any_that_all_rows_have(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, version=make_version(any_columns=True, delay_s=0.01)) as served:
            bodies = [{"rows": [{"x": [number, 1.5], "note": "a" * number}]} for number in range(6)]
            bodies += [{"rows": [{"x": [number]}]} for number in range(6)]
            replies = await asyncio.gather(*(served.ask("POST", "/v1/predict", body) for body in bodies))
            assert [reply.values for reply in replies[:6]] == [[number + 1.5] for number in range(6)]
            assert [reply.values for reply in replies[6:]] == [[float(number)] for number in range(6)]
            path = "/v2/models/demo/infer"
            tensors = {"FP32": [1, 2, 3, 4], "UINT8": [1, 2, 3, 4]}
            for datatype, data in tensors.items():
                reply = await served.ask("POST", path, {"inputs": [tensor(datatype=datatype, data=data)]})
                assert reply.json["outputs"][0]["data"] == [10.0]
            for datatype, data in (
                ("UINT8", [1, 2, 3, -4]),
                ("FP32", [1, 2, 3, "a"]),
                ("INT64", [1, 2, 3, 4.5]),
            ):
                reply = await served.ask("POST", path, {"inputs": [tensor(datatype=datatype, data=data)]})
                assert reply.error["faults"][0]["expected"] == f"values of the datatype {datatype}"
            mixed = await served.ask("POST", "/v1/predict", {"rows": [{"x": [1]}, {"y": [1]}, 5]})
            assert [fault["row"] for fault in mixed.error["faults"]] == [1, 2]

    run(main())


def test_the_openapi_document_has_the_columns_and_every_path_is_answered(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, version=make_version(can_stream=True)) as served:

            async def take(rows: list[dict[str, Any]]) -> dict[str, int]:
                return {}

            served.front.on_feedback = take
            document = (await served.ask("GET", "/openapi.json")).json
            assert document["openapi"].startswith("3.1")
            assert document["components"]["schemas"]["Row"]["properties"] == {
                "x": {
                    "type": "array",
                    "items": {"type": "number", "format": "float32"},
                    "minItems": 4,
                    "maxItems": 4,
                }
            }
            assert {path.encode() for path in document["paths"]} == set(served.front.reception.routes)
            for path, methods in document["paths"].items():
                for method in methods:
                    reply = await served.ask(method.upper(), path, {} if method == "post" else None)
                    assert reply.status not in (404, 405), path

    run(main())
