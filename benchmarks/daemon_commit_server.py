"""The limit for durable submits: a server of the same kind that judges nothing and commits one row for each call.

    python daemon_commit_server.py SOCKET DATABASE

It has our message types and our group commit, and nothing else of the daemon. It ends when its input does.
"""

import asyncio
import sys
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from trn.proto import trainer_pb2 as pb
from trn.proto.methods import METHODS, SERVICE
from trn.registry.connection import open_writer
from trn.registry.writer import RegistryWriter, committed


async def serve(socket: str, database: str) -> None:
    connection = open_writer(Path(database))
    connection.execute("CREATE TABLE rows (number INTEGER PRIMARY KEY, config BLOB)")
    writer = RegistryWriter(connection)
    loop = asyncio.get_running_loop()
    writer.settle_in(loop.call_soon_threadsafe)

    async def submit(request: pb.Submission, _context: Any) -> pb.SubmitRunResponse:
        def change(rows: Any) -> int:
            return int(rows.execute("INSERT INTO rows (config) VALUES (?)", (request.config_json,)).lastrowid)

        number = await committed(writer.submit(change))
        return pb.SubmitRunResponse(run=pb.Run(run_id=f"run-{number}", state=pb.RUN_STATE_PENDING))

    method = METHODS["SubmitRun"]
    handler = grpc.unary_unary_rpc_method_handler(
        submit, method.request.FromString, method.response.SerializeToString
    )
    server = grpc.aio.server()
    handlers = grpc.method_handlers_generic_handler(SERVICE.full_name, {method.name: handler})
    server.add_generic_rpc_handlers((handlers,))
    server.add_insecure_port(f"unix:{socket}")
    await server.start()
    print("serving", flush=True)
    await loop.run_in_executor(None, sys.stdin.read)
    await server.stop(grace=None)
    writer.close()


if __name__ == "__main__":
    asyncio.run(serve(*sys.argv[1:]))
