"""TensorBoard as a logger's back end: event files, written by the logger's own thread. Needs no torch."""

import io
import itertools
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gen_worker.trainer.callbacks.background_logger import Ending, Entry, import_extra, now_ms
from gen_worker.trainer.callbacks.loggers import AppendedFile

_file_numbers = itertools.count()


class TensorBoardParts:
    """The parts of the tensorboard package that we use: records and their framing, not its writer thread."""

    def __init__(self) -> None:
        names = ("event", "summary", "tensor", "tensor_shape", "types")
        modules = [import_extra(f"tensorboard.compat.proto.{name}_pb2", "tensorboard") for name in names]
        self.event, self.summary, self.tensor, self.shape, self.types = modules
        writing = import_extra("tensorboard.summary.writer.record_writer", "tensorboard")
        self.record_writer = writing.RecordWriter

    def framed(self, events: Sequence[Any]) -> bytes:
        buffer = io.BytesIO()
        writer = self.record_writer(buffer)
        for event in events:
            writer.write(event.SerializeToString())
        return buffer.getvalue()

    def text(self, tag: str, text: str) -> Any:
        metadata = self.summary.SummaryMetadata(
            plugin_data=self.summary.SummaryMetadata.PluginData(plugin_name="text")
        )
        tensor = self.tensor.TensorProto(
            dtype=self.types.DT_STRING,
            string_val=[text.encode("utf-8", "backslashreplace")],
            tensor_shape=self.shape.TensorShapeProto(dim=[self.shape.TensorShapeProto.Dim(size=1)]),
        )
        return self.summary.Summary.Value(tag=tag, metadata=metadata, tensor=tensor)


class TensorBoardSink:
    def __init__(
        self, parts: TensorBoardParts, folder: Path, step: int, parameters: Mapping[str, Any]
    ) -> None:
        self.name = f"the TensorBoard folder {folder}"
        self._parts = parts
        self._folder = folder
        self._step = step
        self._parameters = parameters
        self._time_ms = now_ms()
        self._file: AppendedFile | None = None

    def open(self) -> None:
        parts = self._parts
        if self._file is None:
            # TensorBoard reads the files of a folder in the order of their names.
            name = f"events.out.tfevents.{self._time_ms / 1000:.3f}.{socket.gethostname()}.{os.getpid()}"
            self._file = AppendedFile(self._folder / f"{name}.{next(_file_numbers)}")
        version = parts.event.Event(wall_time=self._time_ms / 1000, file_version="brain.Event:2")
        # TensorBoard drops everything that was logged from the start step of a session on.
        session = parts.event.SessionLog(status=parts.event.SessionLog.START)
        start = parts.event.Event(wall_time=self._time_ms / 1000, step=self._step + 1, session_log=session)
        events = [version, start]
        if self._step == 0:
            rows = [f"|{name}|{_cell(value)}|" for name, value in self._parameters.items()]
            table = "\n".join(["|parameter|value|", "|---|---|", *rows])
            events.append(self._event(self._time_ms, 0, [parts.text("parameters", table)]))
        self._file.append(parts.framed(events))

    def send(self, entries: Sequence[Entry]) -> int:
        assert self._file is not None
        self._file.append(self._parts.framed([event for entry in entries for event in self._events(entry)]))
        return len(entries)

    def close(self, ending: Ending) -> None:
        assert self._file is not None
        text = ending.status if ending.reason is None else f"{ending.status}: {ending.reason}"
        event = self._event(ending.time_ms, ending.step, [self._parts.text("end", text)])
        self._file.append(self._parts.framed([event]))
        self._file.close()

    def _events(self, entry: Entry) -> list[Any]:
        if entry.kind == "validation":
            return []  # its values come as metrics
        if entry.kind == "checkpoint":
            text = entry.values["path"] + ("" if entry.values["verified"] else " (not verified)")
            return [self._event(entry.time_ms, entry.step, [self._parts.text("checkpoint", text)])]
        scalar = self._parts.summary.Summary.Value
        values = [scalar(tag=name, simple_value=value) for name, value in entry.values.items()]
        return [self._event(entry.time_ms, entry.step, values)]

    def _event(self, time_ms: int, step: int, values: list[Any]) -> Any:
        summary = self._parts.summary.Summary(value=values)
        return self._parts.event.Event(wall_time=time_ms / 1000, step=step, summary=summary)


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")
