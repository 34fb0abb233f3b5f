"""What a client sees when rows raise, when model workers end, hang or say nonsense, and when clients leave."""

import asyncio
import os
import random
import signal
from pathlib import Path

import pytest
from frame_workers import (
    CRASHES,
    FEWER_ROWS,
    GARBAGE,
    HANGS,
    KILLED,
    LEAVES_CHILD,
    RAISES,
    RAISES_ONCE,
    SLOW,
    WRONG_COUNT,
    make_version,
)
from served_front import Client, Reply, Served, serving, until

from gen_worker.inference.front.event_loop import run
from gen_worker.inference.front.front import FrontOptions
from gen_worker.inference.front.pool import NotReadyError
from gen_worker.inference.front.queries import QueueLimits


async def predict_one(served: Served, first: float) -> Reply:
    return await served.predict([first, 0, 0, 0])


def test_a_row_that_raises_is_named_and_its_neighbours_are_answered(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, version=make_version(delay_s=0.01)) as served:
            wanted = [float(number) for number in range(20)]
            wanted[7] = RAISES
            replies = await asyncio.gather(*(predict_one(served, first) for first in wanted))
            for first, reply in zip(wanted, replies, strict=True):
                if first == RAISES:
                    assert (reply.status, reply.error["kind"], reply.error["id"]) == (500, "error", "e1")
                else:
                    assert reply.values == [first]
            several = await served.predict([1, 0, 0, 0], [RAISES, 0, 0, 0], [2, 0, 0, 0], [RAISES, 1, 0, 0])
            assert several.status == 500
            assert [fault["row"] for fault in several.error["faults"]] == [1, 3]
            assert b"secret" not in several.body, "the author's words went to a client"

    run(main())


def test_rows_that_are_computed_again_have_the_shape_of_their_first_batch(tmp_path: Path) -> None:
    """An answer names one shape, and its bits are those of that shape."""

    async def main() -> None:
        async with serving(tmp_path) as served:
            reply = await served.predict([1, 0, 0, 0], [RAISES_ONCE, 0, 0, 0], [2, 0, 0, 0])
            assert reply.values == [1, RAISES_ONCE, 2]
            assert reply.headers["x-trn-batch-shape"] == "8"
            assert served.pool.counters.batches == {8: 2}

            killer = asyncio.create_task(served.predict([3, 0, 0, 0], [SLOW, 0, 0, 0], [4, 0, 0, 0]))
            await until(lambda: not served.pool.is_idle)
            os.kill(served.parent.pids[0], signal.SIGKILL)
            assert (await killer).headers["x-trn-batch-shape"] == "8"
            assert served.pool.counters.batches == {8: 5}

    run(main())


def test_one_version_answers_all_parts_of_a_request_also_at_a_switch(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, version=make_version(1), max_batch_rows=2) as served:
            second = await served.open_pool(make_version(2, bias=100.0), max_batch_rows=2)
            rows = [[SLOW, 0, 0, 0], *([float(number), 0, 0, 0] for number in range(5))]
            split = asyncio.create_task(served.predict(*rows))
            await until(lambda: served.pool.queued_rows == 4)
            whole = asyncio.create_task(served.predict([7, 0, 0, 0]))
            await until(lambda: served.pool.queued_rows == 5)
            served.front.switch(second)
            reply = await split
            assert reply.headers["x-trn-step"] == "1"
            assert reply.values == [row[0] for row in rows]
            assert (await whole).values == [107.0]

    run(main())


@pytest.mark.parametrize("bad", [WRONG_COUNT, FEWER_ROWS])
def test_a_wrong_number_of_answers_is_an_error_of_the_batch_and_never_somebody_elses_answer(
    tmp_path: Path, bad: float
) -> None:
    async def main() -> None:
        async with serving(tmp_path, version=make_version(delay_s=0.01)) as served:
            firsts = [float(number) for number in range(30)]
            firsts[11] = bad
            replies = await asyncio.gather(*(predict_one(served, first) for first in firsts))
            assert replies[11].status == 500
            assert replies[11].error["kind"] == "row_count"
            for first, reply in zip(firsts, replies, strict=True):
                assert reply.status == 500 or reply.values == [first]
            assert (await predict_one(served, 5.0)).values == [5.0]

    run(main())


@pytest.mark.parametrize("bad", [CRASHES, KILLED, GARBAGE, HANGS, LEAVES_CHILD])
def test_a_row_that_ends_its_worker_is_quarantined_and_its_neighbours_are_answered(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, bad: float
) -> None:
    async def main() -> None:
        limits = QueueLimits(max_batch_s=1.0)
        async with serving(tmp_path, version=make_version(delay_s=0.01), limits=limits) as served:
            firsts = [0.0, 1.0, bad, 3.0, 4.0, 5.0]
            replies = await asyncio.gather(*(predict_one(served, first) for first in firsts))
            assert [reply.status for reply in replies] == [200, 200, 500, 200, 200, 200]
            assert replies[2].error["kind"] == "poison"
            assert f"{replies[2].error['id']}: a row of a request ends its model worker" in caplog.text
            ends = served.pool.counters.worker_ends
            again = await served.predict([1, 0, 0, 0], [bad, 0, 0, 0])
            assert (again.status, again.error["kind"]) == (500, "poison")
            assert [fault["row"] for fault in again.error["faults"]] == [1]
            assert served.pool.counters.worker_ends == ends, "the row was computed again"

    run(main())


def test_workers_that_are_killed_under_load_cost_no_request(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, version=make_version(delay_s=0.005), replicas=2) as served:
            answered = 0
            is_over = False

            async def ask_always(number: int) -> None:
                nonlocal answered
                client = await served.connect()
                while not is_over:
                    number += 1
                    reply = await client.ask("POST", "/v1/predict", {"rows": [{"x": [number, 0, 0, 0]}]})
                    assert reply.values == [float(number)]
                    answered += 1
                await client.close()

            clients = [asyncio.create_task(ask_always(100 * number)) for number in range(8)]
            for ends in range(1, 5):
                await until(lambda ends=ends: answered > 20 * ends and served.pool.num_ready == 2)
                os.kill(served.parent.pids[0], signal.SIGKILL)
                await until(lambda ends=ends: served.pool.counters.worker_ends == ends)
            is_over = True
            await asyncio.gather(*clients)
            assert served.pool.counters.quarantined_rows == 0

    run(main())


def test_the_other_worker_answers_while_one_is_being_replaced(tmp_path: Path) -> None:
    async def main() -> None:
        limits = QueueLimits(max_batch_s=60.0)
        async with serving(tmp_path, replicas=2, limits=limits) as served:
            stuck = asyncio.create_task(predict_one(served, HANGS))
            await until(lambda: not served.pool.is_idle)
            for number in range(5):
                assert (await predict_one(served, float(number))).values == [float(number)]
            stuck.cancel()

    run(main())


def test_a_client_that_leaves_the_queue_is_not_computed_and_keeps_nobody_waiting(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, version=make_version(delay_s=0.02), max_batch_rows=1) as served:
            first = asyncio.create_task(predict_one(served, SLOW))
            await until(lambda: not served.pool.is_idle)
            gone = [await served.connect() for _ in range(100)]
            for client in gone:
                client.send("POST", "/v1/predict", {"rows": [{"x": [1, 0, 0, 0]}]})
            await until(lambda: served.pool.queued_rows == 100)
            for client in gone:
                client.abort()
            await until(lambda: served.pool.queued_rows == 0)
            assert (await predict_one(served, 7.0)).values == [7.0]
            assert (await first).values == [SLOW]
            assert served.pool.counters.rows == 2

    run(main())


def test_a_client_that_leaves_in_the_middle_of_a_batch_takes_no_answer_from_the_others(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with serving(tmp_path, version=make_version(delay_s=0.2)) as served:
            warm = asyncio.create_task(predict_one(served, 0.0))
            await until(lambda: not served.pool.is_idle)
            leaver = await served.connect()
            leaver.send("POST", "/v1/predict", {"rows": [{"x": [1, 0, 0, 0]}]})
            others = [asyncio.create_task(predict_one(served, float(number))) for number in range(2, 7)]
            await until(lambda: served.pool.queued_rows == 6)
            await until(lambda: served.pool.queued_rows == 0)  # all six are being computed
            leaver.abort()
            assert [(await other).values for other in others] == [[float(number)] for number in range(2, 7)]
            assert (await warm).values == [0.0]
            assert (await predict_one(served, 9.0)).values == [9.0]

    run(main())


def test_each_answered_request_is_answered_once_with_its_own_rows_under_delays_and_disconnects(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        rng = random.Random(7)
        answers: list[str] = []

        async with serving(tmp_path, version=make_version(delay_s=0.002), replicas=2) as served:
            served.front.on_answered = lambda answered: answers.append(answered.request_id)

            async def behave(number: int) -> set[str]:
                """Requests one after the other or ahead of their answers; sometimes the client is gone."""
                received: set[str] = set()
                client = await served.connect()
                for turn in range(12):
                    wanted = {}
                    for ahead in range(rng.choice((1, 1, 3))):
                        request_id = f"{number}.{turn}.{ahead}"
                        rows = [
                            [rng.randrange(900), number, turn, ahead] for _ in range(rng.choice((1, 2, 11)))
                        ]
                        wanted[request_id] = [float(sum(row)) for row in rows]
                        client.send(
                            "POST",
                            "/v1/predict",
                            {"rows": [{"x": row} for row in rows]},
                            x_request_id=request_id,
                        )
                    if rng.random() < 0.2:
                        await asyncio.sleep(rng.random() * 0.01)
                        client.abort()
                        client = await served.connect()
                        continue
                    for request_id, values in wanted.items():  # in the order in which they were sent
                        reply = await client.read()
                        assert reply.headers["x-request-id"] == request_id
                        assert reply.values == values
                        received.add(request_id)
                await client.close()
                return received

            received = set().union(*await asyncio.gather(*(behave(number) for number in range(24))))
            await until(lambda: served.pool.is_idle)
        assert len(answers) == len(set(answers)), "a request was answered twice"
        assert received <= set(answers)

    run(main())


def test_a_full_queue_is_said_at_once_and_a_request_that_could_never_wait_is_too_large(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        limits = QueueLimits(max_queue_rows=4)
        async with serving(tmp_path, max_batch_rows=2, limits=limits) as served:
            busy = asyncio.create_task(predict_one(served, SLOW))
            await until(lambda: not served.pool.is_idle)
            waiting = [asyncio.create_task(predict_one(served, float(number))) for number in range(4)]
            await until(lambda: served.pool.queued_rows == 4)
            refused = await predict_one(served, 5.0)
            assert (refused.status, refused.error["kind"]) == (429, "queue_full")
            assert int(refused.headers["retry-after"]) >= 1
            assert not busy.done(), "the refusal waited for the model"
            large = await served.predict(*([[0, 0, 0, 0]] * 5))
            assert (large.status, large.error["kind"]) == (413, "too_large")
            assert [(await each).values for each in waiting] == [[0.0], [1.0], [2.0], [3.0]]

    run(main())


def test_a_deadline_is_obeyed_in_the_queue_and_while_it_is_computed(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, max_batch_rows=1) as served:
            computed = asyncio.create_task(served.predict([SLOW, 0, 0, 0], x_deadline_ms="100"))
            await until(lambda: not served.pool.is_idle)
            queued = await served.predict([1, 0, 0, 0], x_deadline_ms="1")
            assert (queued.status, queued.error["kind"]) == (504, "deadline")
            late = await computed
            assert (late.status, late.error["kind"]) == (504, "deadline")
            assert (await served.predict([2, 0, 0, 0], x_deadline_ms="60000")).values == [2.0]
            assert served.pool.counters.rows == 2, "a request was computed after its deadline"
            for wrong in ("0", "-1", "x", "1e3", "9" * 30):
                assert (await served.predict([2, 0, 0, 0], x_deadline_ms=wrong)).status == 400

    run(main())


def test_requests_without_a_deadline_get_that_of_the_options(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, options=FrontOptions(deadline_ms=50)) as served:
            assert (await predict_one(served, SLOW)).status == 504
            assert (await served.predict([SLOW, 0, 0, 0], x_deadline_ms="60000")).values == [SLOW]

    run(main())


def test_a_drain_answers_what_was_asked_and_takes_no_more(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, max_batch_rows=1) as served:
            idle, busy = await served.connect(), await served.connect()
            assert (await idle.ask("GET", "/health")).status == 200
            busy.send("POST", "/v1/predict", {"rows": [{"x": [SLOW, 0, 0, 0]}]})
            await until(lambda: not served.pool.is_idle)
            drain = asyncio.create_task(served.front.drain(60))
            reply = await busy.read()
            assert reply.values == [SLOW]
            assert reply.headers["connection"] == "close"
            assert await busy.read_to_end() == b""
            assert await idle.read_to_end() == b""
            await drain
            with pytest.raises(OSError, match="No such file"):
                await served.connect()

    run(main())


def test_a_drain_closes_also_connections_whose_requests_were_sent_ahead(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, max_batch_rows=1) as served:
            client = await served.connect()
            client.send("POST", "/v1/predict", {"rows": [{"x": [SLOW, 0, 0, 0]}]})
            await until(lambda: not served.pool.is_idle)
            drain = asyncio.create_task(served.front.drain(60))
            await asyncio.sleep(0)
            client.send("GET", "/v2/health/live")
            reply = await client.read()
            assert (reply.values, reply.headers["connection"]) == ([SLOW], "close")
            assert await client.read_to_end() == b""
            await drain

    run(main())


def test_what_is_not_answered_at_the_end_of_a_drain_gets_503(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, max_batch_rows=1) as served:
            client = await served.connect()
            client.send("POST", "/v1/predict", {"rows": [{"x": [HANGS, 0, 0, 0]}]})
            await until(lambda: not served.pool.is_idle)
            await served.front.drain(0.05)
            reply = await client.read()
            assert (reply.status, reply.error["kind"]) == (503, "unavailable")
            assert await client.read_to_end() == b""

    run(main())


def test_a_pool_that_drains_finishes_its_queue_and_ends_its_workers(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, version=make_version(delay_s=0.02), max_batch_rows=1) as served:
            asked = [asyncio.create_task(predict_one(served, float(number))) for number in range(5)]
            await until(lambda: served.pool.queued_rows == 4)
            await served.pool.drain()
            assert [(await each).values for each in asked] == [[float(number)] for number in range(5)]
            await until(lambda: served.parent.pids == [])
            assert (await predict_one(served, 1.0)).status == 503

    run(main())


def test_a_switch_loses_no_request_and_each_answer_names_the_version_that_made_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, version=make_version(1, delay_s=0.002)) as served:
            is_over = False

            async def ask_always(client: Client) -> set[str]:
                seen = set()
                while not is_over:
                    reply = await client.ask("POST", "/v1/predict", {"rows": [{"x": [1, 0, 0, 0]}]})
                    step = reply.headers["x-trn-step"]
                    assert reply.values == [1.0 + (100.0 if step == "2" else 0.0)], (
                        "another version computed it"
                    )
                    seen.add(step)
                await client.close()
                return seen

            clients = [asyncio.create_task(ask_always(await served.connect())) for _ in range(8)]
            for step in (2, 1, 2):
                pool = await served.open_pool(
                    make_version(step, bias=100.0 if step == 2 else 0.0, delay_s=0.002)
                )
                before = served.front.switch(pool)
                assert before is not None
                await before.drain()
                await until(lambda pool=pool: pool.counters.rows > 50)
            is_over = True
            assert set().union(*await asyncio.gather(*clients)) == {"1", "2"}

    run(main())


def test_a_version_that_cannot_start_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served:
            with pytest.raises(NotReadyError, match="no such file") as raised:
                await served.open_pool(make_version(2, not_ready="no such file"), replicas=2)
            assert raised.value.category == "model-load"
            with pytest.raises(NotReadyError, match="exit code 3"):
                await served.open_pool(make_version(2, dies_at_start=True))
            await until(lambda: len(served.parent.pids) == 1)
            assert (await predict_one(served, 1.0)).values == [1.0]

    run(main())


def test_a_row_that_waits_for_others_goes_alone_after_its_delay_and_at_once_when_the_batch_is_full(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        limits = QueueLimits(max_delay_ms=200.0)
        async with serving(tmp_path, max_batch_rows=4, limits=limits) as served:
            assert (await predict_one(served, 1.0)).values == [1.0]
            replies = await asyncio.gather(*(predict_one(served, float(number)) for number in range(4)))
            assert [reply.values for reply in replies] == [[0.0], [1.0], [2.0], [3.0]]
            assert served.pool.counters.batches == {1: 1, 4: 1}

    run(main())


def test_an_exception_in_a_hook_is_an_error_of_its_request_alone(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served:

            def fail(answered: object) -> None:
                raise RuntimeError("secret words")

            served.front.on_answered = fail
            replies = await asyncio.gather(*(predict_one(served, float(number)) for number in range(4)))
            assert {reply.status for reply in replies} == {500}
            assert all(b"secret" not in reply.body for reply in replies)
            served.front.on_answered = None
            assert (await predict_one(served, 1.0)).values == [1.0]

    run(main())
