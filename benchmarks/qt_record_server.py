"""Stands in for a daemon whose runs change all the time: answers WatchRuns at a given rate, and GetHealth.

`qt_record_server.py SOCKET RATE NUM_RUNS`; prints a line when it serves.
"""

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from trn.proto import trainer_pb2 as pb
from trn.proto.convert import state_number
from trn.proto.methods import METHODS, OPEN_KEY, SERVICE

TICK_S = 0.01


class Flood:
    def __init__(self, rate: int, num_runs: int) -> None:
        self.rate, self.num_runs = rate, num_runs

    async def health(self, _request: Any, _context: Any) -> Any:
        return METHODS["GetHealth"].response(version="flood", last_change=1)

    async def watch(self, _request: Any, context: Any) -> AsyncIterator[Any]:
        await context.send_initial_metadata(((OPEN_KEY, "1"),))
        begun, number = time.monotonic(), 0
        while True:
            due = int((time.monotonic() - begun) * self.rate)
            runs = [self.record(number) for number in range(number, due)]
            number = due
            if runs:
                yield pb.WatchRunsResponse(runs=runs, change=number)
            await asyncio.sleep(TICK_S)

    def record(self, number: int) -> pb.Run:
        now_ms = int(time.time() * 1000)
        return pb.Run(
            run_id=f"flooded-{number % self.num_runs}",
            state=state_number("RUNNING"),  # type: ignore[arg-type]
            step=number // self.num_runs,
            end_step=1_000_000,
            attempt=1,
            change=number + 1,
            last_seq=number + 1,
            submitted_ms=1_700_000_000_000 + number % self.num_runs,
            updated_ms=now_ms,
            metrics={"train/loss": 1 / (number + 1), "train/lr": 1e-3},
        )


async def main(path: str, rate: int, num_runs: int) -> None:
    flood = Flood(rate, num_runs)
    calls = {"GetHealth": flood.health, "WatchRuns": flood.watch}
    handlers = {}
    for name, call in calls.items():
        method = METHODS[name]
        make = (
            grpc.unary_stream_rpc_method_handler if method.is_stream else grpc.unary_unary_rpc_method_handler
        )
        handlers[name] = make(
            call,
            request_deserializer=method.request.FromString,
            response_serializer=method.response.SerializeToString,
        )
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE.full_name, handlers),))
    server.add_insecure_port(f"unix:{path}")
    await server.start()
    print("serves", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
