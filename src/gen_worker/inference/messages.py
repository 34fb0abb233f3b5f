"""What the front and a model worker say to each other: each message is the header of a frame (`frames`), and the values
of its columns are the frame's payload, one column after the other.

A request's rows are a part. The front may join the parts of several requests into one, and the worker answers part by
part, in the same order and with the same number of rows.
"""

from typing import Literal

import msgspec


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag=str.lower):
    """Base of all messages."""


class ColumnType(msgspec.Struct, frozen=True, kw_only=True):
    """A column of requests or answers. `dims` of a value: () is one number or text, (64,) a list of 64, (None,) of any length."""

    name: str
    dtype: str  # numpy's name of a number's type ("float32", "bool"), "string", "binary" or "any"
    dims: tuple[int | None, ...] = ()
    is_nullable: bool = False


class ColumnData(msgspec.Struct, frozen=True, kw_only=True):
    """One column of a part, as `size_bytes` of the payload.

    `packed`: numbers, little-endian, in the order of the rows, `dims` a row. `values`: a msgpack list with a value for
    each row.
    """

    name: str
    encoding: Literal["packed", "values"]
    size_bytes: int
    dtype: str = ""
    dims: tuple[int, ...] = ()


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """Rows that belong together. `ipc`: they are an Arrow IPC stream of `size_bytes`, and `columns` is empty."""

    num_rows: int
    encoding: Literal["columns", "ipc"] = "columns"
    columns: tuple[ColumnData, ...] = ()
    size_bytes: int = 0  # of an IPC stream
    answer: Literal["columns", "ipc"] = "columns"  # how the answer to it is to be encoded

    @property
    def payload_bytes(self) -> int:
        return self.size_bytes + sum(column.size_bytes for column in self.columns)


# From the front to a model worker.


class Work(Message, frozen=True, kw_only=True):
    """Predict these rows, padded to `shape` rows. Answered with `Answers` or `Raised`."""

    batch: int
    shape: int
    parts: tuple[Part, ...]


class OpenStream(Message, frozen=True, kw_only=True):
    """Call `predict_stream` with this row. Answered with any number of `StreamItem`, then `StreamEnd`.

    The worker sends `credit` items and then waits for `MoreItems`: a reader that is slow must not fill memory. It takes
    other messages meanwhile, and between two items: a batch does not wait for the end of a stream.
    """

    stream: int
    part: Part
    credit: int = 16


class MoreItems(Message, frozen=True, kw_only=True):
    """So many further items may be sent. Of no meaning after the stream's end."""

    stream: int
    credit: int


class CloseStream(Message, frozen=True, kw_only=True):
    """Its reader has left. Answered with `StreamEnd`, unless that was sent already."""

    stream: int


class PredictGroup(Message, frozen=True, kw_only=True):
    """Predict a row group of a parquet file, and write the answers as one part. Without a front: `inference.offline`.

    Answered with any number of `GroupProgress`, then `GroupComputed` and `GroupDone`, or `Raised` in the place of either.
    """

    batch: int
    path: str
    group: int
    out: str  # a folder
    batch_rows: int
    columns: tuple[str, ...] = ()  # of the input, copied into the part
    made_by: str  # digest of all that decides the answers, but the rows


ToWorker = Work | OpenStream | MoreItems | CloseStream | PredictGroup


# From a model worker to the front.


class Ready(Message, frozen=True, kw_only=True):
    """The model is loaded and answered its probe rows in every shape. The first message of a worker that can serve."""

    pid: int
    inputs: tuple[ColumnType, ...]
    outputs: tuple[ColumnType, ...]
    can_stream: bool = False
    probe_ms: dict[int, float] = {}  # by shape: the second call
    load_ms: float = 0.0


class NotReady(Message, frozen=True, kw_only=True):
    """The only message of a worker that cannot serve: the category of a worker's error, and why, for people."""

    category: str
    words: str
    cause: str = ""  # a `Cause`, or the signal that killed it


class Answers(Message, frozen=True, kw_only=True):
    """One part for each part of the `Work`."""

    batch: int
    parts: tuple[Part, ...]
    compute_ms: float


class Raised(Message, frozen=True, kw_only=True):
    """The author's code raised, or did not return one value a row. The traceback is in the log, under `error_id`."""

    batch: int
    kind: Literal["error", "row_count", "output", "input"]
    error_id: str
    words: str  # for the log; a client sees it only for `input`


class GroupProgress(Message, frozen=True, kw_only=True):
    batch: int
    rows: int  # of the row group, so far


class GroupComputed(Message, frozen=True, kw_only=True):
    """All of its rows; the part is being written, and the worker may be given the next row group."""

    batch: int


class GroupDone(Message, frozen=True, kw_only=True):
    """The part is durable under its name."""

    batch: int
    name: str
    rows: int
    size_bytes: int
    hash: str
    was_there: bool  # an earlier attempt wrote it; it was verified


class StreamItem(Message, frozen=True, kw_only=True):
    """The payload is the item as JSON."""

    stream: int


class StreamEnd(Message, frozen=True, kw_only=True):
    stream: int
    kind: Literal["", "error", "output", "input"] = ""  # empty: it ended by itself or was closed
    error_id: str = ""
    words: str = ""


FromWorker = (
    Ready | NotReady | Answers | Raised | GroupProgress | GroupComputed | GroupDone | StreamItem | StreamEnd
)
