"""Samples and videos of a run, the newest first: pictures and text in the window, videos in it or in the system's player.

A job wrote these files and their names. So only pictures, plain text and videos are shown, by their media type and from a
private folder; every other file can be saved, and is never opened.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from PySide6.QtCore import QBuffer, QIODevice, QSize, Qt, QUrl, Slot
from PySide6.QtGui import QDesktopServices, QImageReader, QPixmap
from PySide6.QtWidgets import (
    QFileDialog,
    QHBoxLayout,
    QListWidget,
    QListWidgetItem,
    QPlainTextEdit,
    QPushButton,
    QSplitter,
    QStackedWidget,
    QVBoxLayout,
    QWidget,
)

from gen_worker.contract.sizes import show_bytes
from trn.client.client import AsyncClient
from trn.core.terminal_text import keep_lines, plain
from trn.proto.records import Artifact, Run
from trn.qt.call_thread import CallThread, Ticket
from trn.qt.theme import fixed_font
from trn.qt.views.labels import text_label, tip

PICTURES = frozenset({"image/png", "image/jpeg", "image/gif", "image/webp"})
TEXTS = frozenset({"text/plain", "text/markdown", "text/csv", "application/json"})
# The name of a private copy ends so, whatever the job called the file.
VIDEOS = {"video/mp4": ".mp4", "video/webm": ".webm", "video/x-matroska": ".mkv", "video/x-msvideo": ".avi"}
MAX_SHOWN_BYTES = 32 << 20
MAX_TEXT_BYTES = 1 << 20
MAX_LISTED = 500
KINDS = ("sample", "video", "file")
_part_numbers = count()


class MediaView(QWidget):
    """Of one run. The list is read again when the run has a newer sample or video."""

    def __init__(self, calls: CallThread, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._calls = calls
        self._shown: tuple[str, ...] = ()
        self._run_id = ""
        self._artifacts: dict[str, Artifact] = {}
        self._tickets: dict[str, Ticket] = {}
        self._folder: TemporaryDirectory[str] | None = None
        self._copied: set[str] = set()  # names in it
        self._player: Any = None
        self.list = QListWidget()
        self.list.setAccessibleName("Samples and videos")
        self.list.setTextElideMode(Qt.TextElideMode.ElideMiddle)
        self.list.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.list.currentItemChanged.connect(self._show_current)
        self.list.itemActivated.connect(self._open_item)
        self.picture = text_label()
        self.picture.setAlignment(Qt.AlignmentFlag.AlignCenter)
        self.picture.setMinimumSize(160, 120)
        self.words = QPlainTextEdit(readOnly=True)
        self.words.setFont(fixed_font())
        self.stage = QStackedWidget()
        self.stage.addWidget(self.picture)
        self.stage.addWidget(self.words)
        self.note = text_label(is_muted=True)
        self.opener = QPushButton("Open in the system's player")
        self.opener.clicked.connect(self._open)
        self.saver = QPushButton("Save as…")
        self.saver.clicked.connect(self._ask_where_to_save)
        self._whole: QPixmap | None = None
        self._build()
        self._update_buttons()

    def show_run(self, run: Run | None) -> None:
        """List what it has, if that may have changed; None: nothing."""
        shown = () if run is None else (run.run_id, run.newest_sample, run.newest_video, run.state)
        if shown == self._shown:
            return
        self._shown = shown
        run_id = "" if run is None else run.run_id
        if run_id != self._run_id:
            self._run_id = run_id
            self._clear()
        if run is None:
            return

        async def read(client: AsyncClient) -> list[Artifact]:
            found = []
            async for artifact in client.artifacts(run_id, is_exact=True):
                if artifact.kind in KINDS and artifact.is_present:
                    found.append(artifact)
                if len(found) == MAX_LISTED:
                    break
            posters = {artifact.poster_id for artifact in found}
            return [artifact for artifact in found if artifact.artifact_id not in posters]

        self._replace_ticket("list", self._calls.ask(read, self._take_list, self._say_fault))

    def release(self) -> None:
        """Stop the player and remove the private copies."""
        if self._player is not None:
            self._player.stop()
        if self._folder is not None:
            with contextlib.suppress(OSError):
                self._folder.cleanup()
            self._folder = None

    def resizeEvent(self, event: Any) -> None:  # noqa: N802
        super().resizeEvent(event)
        self._fit_picture()

    def _build(self) -> None:
        buttons = QHBoxLayout()
        buttons.addWidget(self.note, 1)
        buttons.addWidget(self.opener)
        buttons.addWidget(self.saver)
        right = QWidget()
        column = QVBoxLayout(right)
        column.setContentsMargins(8, 0, 0, 0)
        column.addWidget(self.stage, 1)
        column.addLayout(buttons)
        splitter = QSplitter()
        splitter.addWidget(self.list)
        splitter.addWidget(right)
        splitter.setSizes([260, 700])
        splitter.setStretchFactor(1, 1)
        whole = QHBoxLayout(self)
        whole.setContentsMargins(0, 8, 0, 0)
        whole.addWidget(splitter)
        self.setFocusProxy(self.list)

    def _clear(self) -> None:
        for ticket in self._tickets.values():
            ticket.cancel()
        self._tickets.clear()
        self._artifacts.clear()
        self.list.clear()
        self._show_nothing("")

    def _show_nothing(self, note: str) -> None:
        if self._player is not None:
            self._player.stop()
        self._whole = None
        self.picture.clear()
        self.words.clear()
        self.stage.setCurrentWidget(self.picture)
        self.note.setText(note)
        self._update_buttons()

    def _take_list(self, found: list[Artifact]) -> None:
        current = self._current()
        self._artifacts = {artifact.artifact_id: artifact for artifact in found}
        self.list.blockSignals(True)
        self.list.clear()
        for artifact in found:
            item = QListWidgetItem(f"step {artifact.step:,}   {plain(artifact.name)}")
            item.setData(Qt.ItemDataRole.UserRole, artifact.artifact_id)
            item.setToolTip(
                tip(f"{artifact.kind}, attempt {artifact.attempt}, {show_bytes(artifact.size_bytes)}")
            )
            self.list.addItem(item)
            if current is not None and artifact.artifact_id == current.artifact_id:
                self.list.setCurrentItem(item)
        self.list.blockSignals(False)
        if not found:
            self._show_nothing("This run has no samples and no videos.")
        elif self.list.currentRow() < 0:
            self.list.setCurrentRow(0)

    def _current(self) -> Artifact | None:
        item = self.list.currentItem()
        return None if item is None else self._artifacts.get(item.data(Qt.ItemDataRole.UserRole))

    def _update_buttons(self) -> None:
        artifact = self._current()
        self.saver.setEnabled(artifact is not None)
        self.opener.setVisible(artifact is not None and artifact.media_type in VIDEOS)

    @Slot(QListWidgetItem, QListWidgetItem)
    def _show_current(self, _item: QListWidgetItem | None, _before: QListWidgetItem | None) -> None:
        artifact = self._current()
        self._show_nothing("")
        if artifact is None:
            return
        self.note.setText(
            f"{plain(artifact.name)}: step {artifact.step:,}, attempt {artifact.attempt},"
            f" {artifact.media_type}, {show_bytes(artifact.size_bytes)}"
        )
        if artifact.media_type in VIDEOS:
            self._show_video(artifact)
        elif artifact.media_type in PICTURES and artifact.size_bytes <= MAX_SHOWN_BYTES:
            self._read(artifact, self._show_picture)
        elif artifact.media_type in TEXTS:
            self._read(artifact, self._show_text, length=MAX_TEXT_BYTES)
        else:
            self.picture.setText("This file is not shown. Save it to look at it.")

    def _show_picture(self, data: bytes) -> None:
        buffer = QBuffer()
        buffer.setData(data)
        buffer.open(QIODevice.OpenModeFlag.ReadOnly)
        reader = QImageReader(buffer)
        reader.setAutoTransform(True)
        image = reader.read()
        if image.isNull():
            self.picture.setText(f"This picture cannot be read: {reader.errorString()}")
            return
        self._whole = QPixmap.fromImage(image)
        self._fit_picture()

    def _fit_picture(self) -> None:
        if self._whole is None:
            return
        room = self.stage.size() - QSize(4, 4)
        is_small = self._whole.width() * 4 <= room.width() and self._whole.height() * 4 <= room.height()
        how = (
            Qt.TransformationMode.FastTransformation
            if is_small
            else Qt.TransformationMode.SmoothTransformation
        )
        self.picture.setPixmap(self._whole.scaled(room, Qt.AspectRatioMode.KeepAspectRatio, how))

    def _show_text(self, data: bytes) -> None:
        self.words.setPlainText(keep_lines(data.decode(errors="replace")))
        self.stage.setCurrentWidget(self.words)

    def _show_video(self, artifact: Artifact) -> None:
        """Plays it in the window where QtMultimedia is installed; else shows its poster."""
        from trn.qt.views.video_player import make_player

        if self._player is None:
            self._player = make_player(self.stage)
        if self._player is not None:
            self._copy(artifact, self._play)
            return
        if artifact.poster_id:
            poster = artifact.poster_id
            self._replace_ticket(
                "bytes",
                self._calls.ask(lambda client: _read(client, poster, MAX_SHOWN_BYTES), self._show_picture),
            )
        else:
            self.picture.setText("Press Enter to play this video.")

    def _play(self, path: Path) -> None:
        self.stage.setCurrentWidget(self._player.widget)
        self._player.play(QUrl.fromLocalFile(str(path)))

    @Slot(QListWidgetItem)
    def _open_item(self, _item: QListWidgetItem) -> None:
        self._open()

    @Slot()
    def _open(self) -> None:
        artifact = self._current()
        if artifact is not None and artifact.media_type in VIDEOS:
            self._copy(artifact, lambda path: self.open_file(QUrl.fromLocalFile(str(path))))

    def open_file(self, url: QUrl) -> None:
        """With the program that the system has for it."""
        if not QDesktopServices.openUrl(url):
            self.note.setText(f"No program of this system plays {url.fileName()}: save the file instead.")

    @Slot()
    def _ask_where_to_save(self) -> None:
        artifact = self._current()
        if artifact is None:
            return
        dialog = QFileDialog(self, "Save as", str(Path.home() / _safe_name(artifact.name)))
        dialog.setAcceptMode(QFileDialog.AcceptMode.AcceptSave)
        dialog.selectFile(_safe_name(artifact.name))
        dialog.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)

        def save(where: str) -> None:
            self.save(artifact, Path(where))

        dialog.fileSelected.connect(save)
        dialog.open()

    def save(self, artifact: Artifact, where: Path) -> None:
        """Write its bytes there. Returns at once."""

        async def write(client: AsyncClient) -> Path:
            await _write(client.read_artifact(artifact.artifact_id), where)
            return where

        self._replace_ticket(
            "save",
            self._calls.ask(write, lambda path: self.note.setText(f"saved as {path}"), self._say_fault),
        )

    def _copy(self, artifact: Artifact, then: Any) -> None:
        """A private copy of a video, made once."""
        if self._folder is None:
            self._folder = TemporaryDirectory(prefix="trn-window-", ignore_cleanup_errors=True)
        path = Path(self._folder.name, artifact.artifact_id + VIDEOS[artifact.media_type])

        async def write(client: AsyncClient) -> Path:
            if path.name not in self._copied:
                await _write(client.read_artifact(artifact.artifact_id), path)
                self._copied.add(path.name)
            return path

        self._replace_ticket("bytes", self._calls.ask(write, then, self._say_fault))

    def _read(self, artifact: Artifact, then: Any, length: int = 0) -> None:
        self._replace_ticket(
            "bytes",
            self._calls.ask(
                lambda client: _read(client, artifact.artifact_id, length), then, self._say_fault
            ),
        )

    def _replace_ticket(self, what: str, ticket: Ticket) -> None:
        if what in self._tickets:
            self._tickets[what].cancel()
        self._tickets[what] = ticket

    def _say_fault(self, fault: Exception) -> None:
        self.note.setText(plain(str(fault)))


async def _read(client: AsyncClient, artifact_id: str, length: int) -> bytes:
    return b"".join([piece async for piece in client.read_artifact(artifact_id, length=length)])


async def _write(pieces: AsyncGenerator[bytes, None], where: Path) -> None:
    """All of it, or the file stays as it was."""
    part = where.with_name(
        f"{where.name}.{next(_part_numbers)}.part"
    )  # a copy that was given up removes its own
    try:
        with await asyncio.to_thread(part.open, "wb") as file:
            async for piece in pieces:
                await asyncio.to_thread(file.write, piece)
        await asyncio.to_thread(part.replace, where)
    finally:
        await asyncio.to_thread(part.unlink, missing_ok=True)


def _safe_name(name: str) -> str:
    return plain(Path(name).name).replace("/", "_") or "file"
