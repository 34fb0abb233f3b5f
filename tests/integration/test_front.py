"""The front of a model server over HTTP, with real processes behind it."""

import asyncio
from pathlib import Path

import pytest
from frame_workers import CRASHES, RAISES, make_version
from served_front import serving

from gen_worker.inference.front.event_loop import run


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("f")  # short: the path of a Unix socket has at most 107 bytes


def test_each_request_gets_the_answer_to_its_own_rows_and_what_made_it(folder: Path) -> None:
    async def main() -> None:
        async with serving(folder) as served:
            reply = await served.predict([1, 2, 3, 4], [0.5, 0, 0, 0], x_request_id="mine-1")
            assert reply.values == [10.0, 0.5]
            assert reply.headers["x-request-id"] == "mine-1"
            assert reply.headers["x-trn-run"] == "run"
            assert reply.headers["x-trn-step"] == "1"
            assert reply.headers["x-trn-weights"] == f"sha256:{1:064x}"
            assert reply.headers["x-trn-code"] == "sha256:c0de"
            assert reply.headers["x-trn-batch-shape"] == "8"
            assert (await served.predict([1, 2, 3, 4])).headers["x-trn-batch-shape"] == "1"

    run(main())


def test_requests_that_come_together_share_batches_and_a_large_one_is_split_and_joined(folder: Path) -> None:
    async def main() -> None:
        async with serving(folder) as served:
            replies = await asyncio.gather(*(served.predict([number, 1, 0, 0]) for number in range(40)))
            assert [reply.values for reply in replies] == [[number + 1.0] for number in range(40)]
            assert sum(served.pool.counters.batches.values()) < 40
            large = await served.predict(*([number, 0, 0, 0] for number in range(100)))
            assert large.values == [float(number) for number in range(100)]
            assert large.headers["x-trn-batch-shape"] == "8"

    run(main())


def test_all_faults_of_a_request_are_named_with_row_and_column(folder: Path) -> None:
    async def main() -> None:
        async with serving(folder) as served:
            reply = await served.ask(
                "POST",
                "/v1/predict",
                {"rows": [{"x": [1, 2, 3, 4]}, {"x": [1]}, {"z": 1}, {"x": ["a", 1, 2, 3]}, 5]},
            )
            assert reply.status == 400
            assert reply.error["kind"] == "input"
            found = {(fault["row"], fault.get("column"), fault["found"]) for fault in reply.error["faults"]}
            assert found == {
                (1, "x", "a list of 1"),
                (2, "x", "nothing"),
                (2, "z", "an unknown column"),
                (3, "x", '"a"'),
                (4, None, "5"),
            }

    run(main())


def test_a_row_that_raises_is_named_and_its_neighbours_are_answered(folder: Path) -> None:
    async def main() -> None:
        async with serving(folder, version=make_version(delay_s=0.01)) as served:
            rows = [[float(number), 0, 0, 0] for number in range(20)]
            rows[7][0] = RAISES
            replies = await asyncio.gather(*(served.predict(row) for row in rows))
            for number, reply in enumerate(replies):
                if number == 7:
                    assert (reply.status, reply.error["kind"], reply.error["id"]) == (500, "error", "e1")
                else:
                    assert reply.values == [float(number)]
            several = await served.predict([1, 0, 0, 0], [RAISES, 0, 0, 0], [2, 0, 0, 0], [RAISES, 1, 0, 0])
            assert several.status == 500
            assert [fault["row"] for fault in several.error["faults"]] == [1, 3]
            assert b"secret" not in several.body

    run(main())


def test_a_row_that_ends_its_worker_is_quarantined_and_its_neighbours_are_answered(folder: Path) -> None:
    async def main() -> None:
        async with serving(folder, version=make_version(delay_s=0.01)) as served:
            rows = [[float(number), 0, 0, 0] for number in range(6)]
            rows[2][0] = CRASHES
            replies = await asyncio.gather(*(served.predict(row) for row in rows))
            assert [reply.status for reply in replies] == [200, 200, 500, 200, 200, 200]
            assert replies[2].error["kind"] == "poison"
            ends = served.pool.counters.worker_ends
            again = await served.predict([1, 0, 0, 0], rows[2])
            assert (again.status, again.error["kind"]) == (500, "poison")
            assert [fault["row"] for fault in again.error["faults"]] == [1]
            assert served.pool.counters.worker_ends == ends, "the row was computed again"

    run(main())
