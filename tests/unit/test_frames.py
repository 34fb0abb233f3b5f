"""Frames on a socket: whole, in order, however the bytes come."""

import asyncio
import logging
import os
import socket
import threading
from typing import Any

import pytest

from gen_worker.errors import ModelLoadError
from gen_worker.inference.frames import (
    MAX_PIECES,
    FrameError,
    FrameReader,
    encode_frame,
    receive_frame,
    send_frame,
    to_worker_decoder,
)
from gen_worker.inference.front.workers.model_processes import ModelProcesses
from gen_worker.inference.messages import CloseStream
from gen_worker.inference.model.orders import KillWorker, OrderReader, WorkerEnd, end_decoder, send_order


@pytest.mark.parametrize("sizes", [(), (0,), (1, 0, 5), (3,) * (2 * MAX_PIECES), (1 << 22, 7, 1 << 22)])
def test_a_frame_arrives_as_it_was_sent_also_where_it_is_larger_than_the_sockets_buffer(
    sizes: tuple[int, ...],
) -> None:
    payload = [os.urandom(size) for size in sizes]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender = threading.Thread(target=send_frame, args=(ours, CloseStream(stream=7), payload))
        sender.start()
        received = receive_frame(theirs, to_worker_decoder)
        sender.join()
        assert received is not None
        assert received[0] == CloseStream(stream=7)
        assert bytes(received[1]) == b"".join(payload)
        send_frame(ours, CloseStream(stream=8))
        following = receive_frame(theirs, to_worker_decoder)
        assert following is not None
        assert following[0] == CloseStream(stream=8), "bytes of the frame before it were sent twice"
        ours.close()
        assert receive_frame(theirs, to_worker_decoder) is None


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_a_reader_finds_frames_in_any_pieces(step: int) -> None:
    stream = b"".join(
        bytes(piece)
        for number in range(5)
        for piece in encode_frame(CloseStream(stream=number), [b"x" * number, memoryview(b"yz")])
    )
    reader = FrameReader(to_worker_decoder)
    found = [
        (message, bytes(payload))
        for start in range(0, len(stream), step)
        for message, payload in reader.feed(stream[start : start + step])
    ]
    assert found == [(CloseStream(stream=number), b"x" * number + b"yz") for number in range(5)]


@pytest.mark.parametrize("sent", [b"\xff" * 12, b"\x01" + b"\0" * 11 + b"\xff", b"\x05"])
def test_what_is_no_frame_is_an_error(sent: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(sent)
        ours.close()
        with pytest.raises(FrameError):
            receive_frame(theirs, to_worker_decoder)


def test_a_process_that_was_killed_before_it_read_all_has_ended_as_any_other() -> None:
    """The system calls it a reset."""
    ours, theirs = socket.socketpair()
    orders: OrderReader[WorkerEnd] = OrderReader(ours, end_decoder)
    end = WorkerEnd(worker_id=1, words="it ended")
    send_order(theirs, end)
    send_order(ours, KillWorker(worker_id=1))
    theirs.close()
    assert orders.receive() == [end]
    assert orders.receive() is None
    assert orders.receive() is None
    ours.close()


def test_a_launch_that_finds_no_parent_says_that_it_is_gone() -> None:
    class Dead:
        def __init__(self, link: socket.socket) -> None:
            self.fileno = link.fileno

        def launch(self, version: Any, options: Any) -> Any:
            raise ModelLoadError("the parent ended")

        kill = read_ends = launch

    async def main() -> None:
        ours, theirs = socket.socketpair()
        told: list[ModelLoadError] = []
        dead: Any = Dead(ours)
        processes = ModelProcesses(dead, log=logging.getLogger("test"), gone=told.append)
        nothing: Any = None
        for _ in range(2):
            with pytest.raises(ModelLoadError):
                processes.launch(nothing, nothing)
        assert [str(fault) for fault in told] == ["the parent ended"]
        processes.close()
        ours.close()
        theirs.close()

    asyncio.run(main())
