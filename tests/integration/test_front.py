"""The front of a model server over HTTP, with real processes behind it."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
from served_front import serving, until

from gen_worker.inference.front.event_loop import run
from gen_worker.inference.front.formats.json_rows import RowReader
from gen_worker.inference.front.queries import Outcome, Query


def test_each_request_gets_the_answer_to_its_own_rows_and_what_made_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served:
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


def test_requests_that_come_together_share_batches_and_a_large_one_is_split_and_joined(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served:
            replies = await asyncio.gather(*(served.predict([number, 1, 0, 0]) for number in range(40)))
            assert [reply.values for reply in replies] == [[number + 1.0] for number in range(40)]
            assert sum(served.pool.counters.batches.values()) < 40
            large = await served.predict(*([number, 0, 0, 0] for number in range(100)))
            assert large.values == [float(number) for number in range(100)]
            assert large.headers["x-trn-batch-shape"] == "8"

    run(main())


def test_rows_that_follow_each_other_without_a_pause_share_a_batch_until_it_is_full(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served:
            rows = RowReader(served.pool.inputs).convert([{"x": [1, 2, 3, 4]}])
            outcomes: list[Outcome] = []

            def submit(num_more: int) -> None:
                served.pool.submit(Query(rows, outcomes.append))
                if num_more:
                    asyncio.get_running_loop().call_soon(submit, num_more - 1)

            submit(4)
            await until(lambda: len(outcomes) == 5)
            assert served.pool.counters.batches == {8: 1}
            submit(15)
            await until(lambda: len(outcomes) == 21)
            assert served.pool.counters.batches == {8: 3}

    run(main())


def test_a_full_batch_that_waits_is_computed_while_the_one_before_it_is_answered(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, max_batch_rows=2) as served:
            rows = RowReader(served.pool.inputs).convert([{"x": [1, 2, 3, 4]}] * 2)
            waiting: list[int] = []  # rows, whenever an answer comes
            for _ in range(3):
                served.pool.submit(Query(rows, lambda _: waiting.append(served.pool.queued_rows)))
            await until(lambda: len(waiting) == 3)
            assert waiting == [2, 0, 0]

    run(main())


def test_without_uvloop_the_loop_is_asyncios_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)

    async def main() -> None:
        assert type(asyncio.get_running_loop()).__module__.startswith("asyncio")
        async with serving(tmp_path) as served:
            replies = await asyncio.gather(*(served.predict([number, 1, 0, 0]) for number in range(40)))
            assert [reply.values for reply in replies] == [[number + 1.0] for number in range(40)]

    run(main())


def test_a_front_loads_neither_torch_nor_pyarrow() -> None:
    program = (
        "import sys, gen_worker.inference.front.front, gen_worker.inference.server;"
        "print([name for name in ('torch', 'pyarrow', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


def test_all_faults_of_a_request_are_named_with_row_and_column(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served:
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
