"""The window of `trn gui` on a real daemon, without a screen: what it shows, what it does, and that it never waits."""

import html
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("PySide6.QtWidgets", reason="Qt cannot be imported", exc_type=ImportError)

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))
from daemon_process import DEADLINE_S, DaemonProcess, end_everything
from page_world import EVIL, TRAINERS, Gate, make_film, make_job
from PIL import Image
from PySide6.QtCore import QEvent, QMimeData, QPoint, QPointF, QSettings, Qt, QUrl
from PySide6.QtGui import QDropEvent
from PySide6.QtWidgets import QLabel, QMessageBox, QPushButton

import trn
from trn.client.daemon_start import RunningDaemon
from trn.client.screen.figures import show_number
from trn.core.home import Home
from trn.proto.records import MetricSeries
from trn.qt import GarbageTimer
from trn.qt.theme import DARK, LIGHT, ThemeName
from trn.qt.views.chart_marks import LINES, MarkKind
from trn.qt.views.plot import Plot
from trn.qt.views.submit_dialog import SubmitDialog
from trn.qt.window import TrainerWindow

if TYPE_CHECKING:
    from pytestqt.logging import _QtLogCapture
    from pytestqt.qtbot import QtBot

DEADLINE_MS = DEADLINE_S * 1000
SETTINGS = """
min_free_bytes = 1000000
sweep_s = 0.2
[inventory]
cpus = 8
devices = []
"""
CHARTS, LOG, ATTEMPTS, MEDIA = range(4)
FILM_MS = 1000


class World:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home = Home(folder / "home")
        self.start_daemon()

    def start_daemon(self) -> None:
        self.daemon = DaemonProcess(self.home.root, settings=SETTINGS, is_bare=True)
        self.daemon.wait_ready()

    def submit(self, run_id: str, num_steps: int, **more: Any) -> None:
        with trn.Client(self.home.root) as client:
            client.submit(make_job(run_id, num_steps, **more), base_dir=TRAINERS, code_dir=TRAINERS)

    def wait(self, *run_ids: str) -> None:
        with trn.Client(self.home.root) as client:
            for run_id in run_ids:
                client.wait(run_id, DEADLINE_S)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """`straight` has a picture, a text and a film, `broken` has failed, `evil` has names of code."""
    folder = tmp_path_factory.mktemp("window")
    try:
        world = World(folder)
        Image.linear_gradient("L").save(folder / "picture.png")
        (folder / "note.txt").write_text("<b>a sample</b>")
        files = [str(make_film(folder / "film.mp4")), str(folder / "picture.png"), str(folder / "note.txt")]
        world.submit(
            "straight", 60, sample_every=60, hyperparams={"names": ["val/accuracy"], "samples": files}
        )
        world.submit("broken", 60, hyperparams={"fail_at": 30, "lines": ["a needle in the log"]})
        world.submit("evil", 5, name=EVIL, tags={EVIL: EVIL}, hyperparams={"names": [EVIL], "lines": [EVIL]})
        world.wait("straight", "broken", "evil")
        yield world
    finally:
        end_everything(folder / "home")


OpenWindow = Callable[..., TrainerWindow]


@pytest.fixture(scope="module", autouse=True)
def garbage(qapp: object) -> Iterator[None]:
    """As in the program."""
    timer = GarbageTimer()
    yield
    timer.stop()


@pytest.fixture
def open_window(world: World, qtbot: "QtBot", tmp_path: Path, qtlog: "_QtLogCapture") -> Iterator[OpenWindow]:
    """Windows that are closed at the end; none may leave a thread."""
    windows: list[TrainerWindow] = []

    def open_one(home: Home | None = None, settings: Path | None = None) -> TrainerWindow:
        file = settings or tmp_path / "window.ini"
        window = TrainerWindow(home or world.home, QSettings(str(file), QSettings.Format.IniFormat))
        windows.append(window)
        window.show()
        window.start()
        return window

    yield open_one
    for window in windows:
        window.close()
        for thread in (window.bridge, window.calls):
            assert thread.wait(DEADLINE_MS)
        window.deleteLater()
    # Qt says so where a widget was touched, or destroyed, in another thread.
    assert [each.message for each in qtlog.records if re.search(r"\bthreads?\b", each.message.lower())] == []


@pytest.fixture
def window(open_window: OpenWindow, qtbot: "QtBot") -> TrainerWindow:
    """With all runs of the world in it."""
    window = open_window()
    wait(qtbot, lambda: {"straight", "broken", "evil"} <= window.table.runs.runs.keys())
    return window


def wait(qtbot: "QtBot", is_so: Callable[[], bool]) -> None:
    qtbot.waitUntil(is_so, timeout=DEADLINE_MS)


def cell(window: TrainerWindow, run_id: str, column: int) -> str:
    row = window.table.runs.row_of(run_id)
    assert row is not None
    text: str = window.table.runs.index(row, column).data()
    return text


def choose(window: TrainerWindow, *run_ids: str, tab: int = CHARTS) -> None:
    window.tabs.setCurrentIndex(tab)
    window.table.choose(run_ids)


def answer_box(window: TrainerWindow, qtbot: "QtBot", button: str) -> QMessageBox:
    """Press a button of the question that is open."""
    wait(qtbot, lambda: bool(window.findChildren(QMessageBox)))
    (box,) = window.findChildren(QMessageBox)
    assert box.isVisible()
    (found,) = [each for each in box.findChildren(QPushButton) if each.text() == button]
    qtbot.mouseClick(found, Qt.MouseButton.LeftButton)
    return box


def shown_texts(box: QMessageBox) -> list[str]:
    """As a person reads them: no markup is in them, and none would be obeyed."""
    labels = [label for label in box.findChildren(QLabel) if label.text()]
    assert {label.textFormat() for label in labels} == {Qt.TextFormat.PlainText}
    return [label.text() for label in labels]


# --- what it shows -------------------------------------------------------------------------------------------------


def test_the_table_shows_state_step_and_why(window: TrainerWindow) -> None:
    assert [cell(window, "straight", column) for column in (0, 1, 2)] == ["straight", "completed", "60 / 60"]
    assert "train/loss" in cell(window, "straight", 4)
    assert cell(window, "broken", 1) == "failed"
    assert "this step always fails" in cell(window, "broken", 4)


def test_a_running_run_is_live_and_has_time_left(
    world: World, window: TrainerWindow, qtbot: "QtBot", tmp_path: Path
) -> None:
    gate = Gate(tmp_path / "gate")
    world.submit("live", 400, hyperparams={"gate": str(gate.path)})
    wait(qtbot, lambda: "live" in window.table.runs.runs)
    choose(window, "live")
    for step in (40, 80, 120):
        gate.open_to(step)
        wait(qtbot, lambda step=step: window.table.runs.runs["live"].step >= step)
    wait(qtbot, lambda: window.charts.curves.get(("train/loss", "live")) == 120)
    assert [cell(window, "live", column) for column in (1, 2)] == ["running", "120 / 400"]
    left = cell(window, "live", 3)
    assert re.fullmatch(r"(\d+:)?\d+:\d\d", left), left
    gate.open_to(400)
    wait(qtbot, lambda: window.table.runs.runs["live"].is_terminal)
    assert [cell(window, "live", column) for column in (1, 2, 3)] == ["completed", "400 / 400", ""]
    wait(qtbot, lambda: window.charts.curves[("train/loss", "live")] >= 400)
    assert window.charts.curves[("train/loss", "live")] == 400


def test_the_filter_finds_runs_by_words_and_keeps_the_selection(
    window: TrainerWindow, qtbot: "QtBot"
) -> None:
    choose(window, "broken")
    qtbot.keyClick(window, Qt.Key.Key_F, Qt.KeyboardModifier.ControlModifier)
    qtbot.keyClicks(window.filter, "broken fails -completed")
    assert [window.table.runs.run_at(row).run_id for row in range(window.table.runs.rowCount())] == ["broken"]
    assert window.table.chosen() == ["broken"]
    window.filter.clear()
    assert window.table.chosen() == ["broken"]
    assert window.table.runs.rowCount() == len(window.table.runs.runs)


def test_a_click_on_a_title_sorts(window: TrainerWindow) -> None:
    window.table.sortByColumn(0, Qt.SortOrder.AscendingOrder)
    ids = [window.table.runs.run_at(row).run_id for row in range(window.table.runs.rowCount())]
    assert ids == sorted(ids)


def test_chosen_metrics_are_drawn_over_the_selected_runs(window: TrainerWindow, qtbot: "QtBot") -> None:
    choose(window, "straight", "broken")
    window.charts.choose_metrics(["train/loss", "val/accuracy"])
    places = [(name, run_id) for name in ("train/loss", "val/accuracy") for run_id in ("straight", "broken")]
    wait(qtbot, lambda: window.charts.curves.keys() == set(places))
    num_points = [window.charts.curves[place] for place in places]
    assert num_points == [60, 29, 60, 0]  # `broken` failed at step 30, and has no other metric
    choose(window, "straight")
    wait(qtbot, lambda: len(window.charts.curves) == 2)
    assert window.charts.curves == {("train/loss", "straight"): 60, ("val/accuracy", "straight"): 60}


def test_a_curve_has_as_many_points_as_the_screen_and_a_zoom_its_own(
    world: World, window: TrainerWindow, qtbot: "QtBot"
) -> None:
    """2,500 points: the API merges them, so a million cost no more."""
    world.submit("many", 2500, checkpoint_every=0)
    wait(qtbot, lambda: "many" in window.table.runs.runs)
    choose(window, "many")
    place = ("train/loss", "many")
    wait(qtbot, lambda: window.table.runs.runs["many"].is_terminal)
    wait(qtbot, lambda: drawn_steps(window, *place)[-1:] == [2500])
    assert drawn_steps(window, *place)[0] == 1
    assert 500 < window.charts.curves[place] <= 1000
    window.charts.zoom(101, 300)
    wait(qtbot, lambda: drawn_steps(window, *place)[-1] < 2500)
    steps = drawn_steps(window, *place)
    assert steps == list(range(steps[0], steps[-1] + 1))  # each of them, none merged
    assert 95 <= steps[0] <= 101
    assert 300 <= steps[-1] <= 306


def test_the_log_is_followed_until_the_reader_scrolls(
    world: World, window: TrainerWindow, qtbot: "QtBot", tmp_path: Path
) -> None:
    gate = Gate(tmp_path / "gate")
    gate.open_to(50)
    world.submit("printing", 400, hyperparams={"gate": str(gate.path), "num_lines": 2})
    wait(qtbot, lambda: "printing" in window.table.runs.runs)
    choose(window, "printing", tab=LOG)
    bar = window.log.text.verticalScrollBar()
    wait(qtbot, lambda: "step 50, line 1" in window.log.text.toPlainText())
    assert window.log.is_followed.isChecked()
    assert bar.value() == bar.maximum() > 0
    bar.setValue(0)
    assert not window.log.is_followed.isChecked()
    gate.open_to(400)
    wait(qtbot, lambda: "step 400, line 1" in window.log.text.toPlainText())
    assert bar.value() == 0
    window.log.is_followed.setChecked(True)
    assert bar.value() == bar.maximum()


def test_the_log_is_searched(window: TrainerWindow, qtbot: "QtBot") -> None:
    choose(window, "broken", tab=LOG)
    wait(qtbot, lambda: "this step always fails" in window.log.text.toPlainText())
    qtbot.keyClicks(window.log.finder, "needle")
    qtbot.keyClick(window.log.finder, Qt.Key.Key_Return)
    assert window.log.text.textCursor().selectedText() == "needle"


def test_attempts_say_why_they_ended(window: TrainerWindow, qtbot: "QtBot") -> None:
    choose(window, "broken", tab=ATTEMPTS)
    wait(qtbot, lambda: window.attempts.table.rowCount() == 1)
    cells = [window.attempts.table.item(0, column).text() for column in range(8)]
    assert cells[0] == "1"
    assert "this step always fails" in cells[6]
    assert cells[7] == "the job"
    assert "this step always fails" in window.attempts.why.text()


def test_samples_are_shown_and_a_video_opens_in_the_systems_player(
    world: World,
    window: TrainerWindow,
    qtbot: "QtBot",
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    opened: list[QUrl] = []
    monkeypatch.setattr("PySide6.QtGui.QDesktopServices.openUrl", lambda url: opened.append(url) or True)
    choose(window, "straight", tab=MEDIA)
    wait(qtbot, lambda: window.media.list.count() == 3)
    rows = {window.media.list.item(row).text().split()[-1]: row for row in range(3)}
    window.media.list.setCurrentRow(rows["picture.png"])
    wait(qtbot, lambda: not window.media.picture.pixmap().isNull())
    assert not window.media.opener.isVisible()
    window.media.list.setCurrentRow(rows["note.txt"])
    wait(qtbot, lambda: window.media.words.toPlainText() == "<b>a sample</b>")
    window.media.list.setCurrentRow(rows["film.mp4"])
    qtbot.mouseClick(window.media.opener, Qt.MouseButton.LeftButton)
    wait(qtbot, lambda: len(opened) == 1)
    film = Path(opened[0].toLocalFile())
    assert film.read_bytes() == (world.folder / "film.mp4").read_bytes()
    window.media.save(window.media._artifacts[_id_of(window, "film.mp4")], tmp_path / "saved.mp4")
    wait(qtbot, (tmp_path / "saved.mp4").exists)
    assert (tmp_path / "saved.mp4").read_bytes() == film.read_bytes()
    window.close()
    assert not film.exists()  # the private copy


def _id_of(window: TrainerWindow, name: str) -> str:
    (found,) = [each.artifact_id for each in window.media._artifacts.values() if each.name.endswith(name)]
    return found


def test_a_video_plays_in_the_window_where_qtmultimedia_is(window: TrainerWindow, qtbot: "QtBot") -> None:
    pytest.importorskip(
        "PySide6.QtMultimedia", reason="PySide6-Addons is not installed", exc_type=ImportError
    )
    choose(window, "straight", tab=MEDIA)
    wait(qtbot, lambda: window.media.list.count() == 3)
    row = next(row for row in range(3) if "film.mp4" in window.media.list.item(row).text())
    window.media.list.setCurrentRow(row)
    wait(qtbot, lambda: window.media.stage.currentWidget() is window.media._player)
    before = window.media._player.position_ms
    wait(qtbot, lambda: window.media._player.position_ms != before)
    assert 0 < window.media._player.position_ms <= FILM_MS


def test_text_of_a_job_is_never_markup(window: TrainerWindow, qtbot: "QtBot") -> None:
    choose(window, "evil", tab=ATTEMPTS)
    wait(qtbot, lambda: EVIL in window.attempts.facts.text())
    assert window.attempts.facts.textFormat() is Qt.TextFormat.PlainText
    row = window.table.runs.row_of("evil")
    assert row is not None
    assert "<img" not in window.table.runs.index(row, 0).data(Qt.ItemDataRole.ToolTipRole)
    choose(window, "evil", tab=CHARTS)
    window.charts.choose_metrics([EVIL])
    wait(qtbot, lambda: window.charts.curves.get((EVIL, "evil")) == 5)
    assert "<img" not in window.charts._legend.text()


def test_the_foot_of_the_window_shows_the_daemons_health(window: TrainerWindow, qtbot: "QtBot") -> None:
    wait(qtbot, lambda: "failed" in window.daemon.words.text())
    assert window.daemon.words.text().startswith("Connected to trn ")


def test_the_legend_has_each_runs_value_at_the_step_under_the_pointer(
    window: TrainerWindow, qtbot: "QtBot"
) -> None:
    choose(window, "straight", "broken")
    window.charts.choose_metrics(["train/loss"])
    wait(
        qtbot, lambda: window.charts.curves == {("train/loss", "straight"): 60, ("train/loss", "broken"): 29}
    )
    plot = window.charts._plots["train/loss"]
    assert plot.item.getAxis("bottom").labelText == "step"
    point_at(window, qtbot, 20)
    assert window.charts.reading.text() == "step 20   ·   train/loss"
    assert plot.cursor_step == 20
    loss = show_number(math.exp(-20 / 40) * (1 + 0.05 * math.sin(20 * 1.7)))
    assert legend_of(window) == {"straight": loss, "broken": loss}
    point_at(window, qtbot, 50)
    assert legend_of(window)["broken"] == ""  # it failed at step 30
    plot.leaveEvent(QEvent(QEvent.Type.Leave))
    wait(qtbot, lambda: plot.cursor_step is None)
    assert window.charts.reading.text().startswith("Newest values of train/loss")
    assert legend_of(window) == {
        run_id: show_number(window.table.runs.runs[run_id].metrics["train/loss"])
        for run_id in ("straight", "broken")
    }


def test_the_keyboard_moves_the_line_and_zooms(window: TrainerWindow, qtbot: "QtBot") -> None:
    choose(window, "straight")
    window.charts.choose_metrics(["train/loss"])
    wait(qtbot, lambda: window.charts.curves == {("train/loss", "straight"): 60})
    plot = window.charts._plots["train/loss"]
    point_at(window, qtbot, 30)
    qtbot.keyClick(plot, Qt.Key.Key_Right)
    wait(qtbot, lambda: plot.cursor_step == 31)
    qtbot.keyClick(plot, Qt.Key.Key_Plus)
    wait(qtbot, lambda: window.charts.curves[("train/loss", "straight")] < 60)
    qtbot.keyClick(plot, Qt.Key.Key_0)
    wait(qtbot, lambda: window.charts.curves[("train/loss", "straight")] == 60)


def test_a_single_run_has_marks_of_kills_resumes_and_checkpoints(
    world: World, window: TrainerWindow, qtbot: "QtBot", tmp_path: Path
) -> None:
    gate = Gate(tmp_path / "gate")
    gate.open_to(25)
    retry = {"max_attempts": 3, "backoff_s": 0}
    world.submit("killed", 40, checkpoint_every=10, retry=retry, hyperparams={"gate": str(gate.path)})
    wait(qtbot, lambda: "killed" in window.table.runs.runs and window.table.runs.runs["killed"].step == 25)
    attempt = world.home.run("killed").root / "attempts" / "1.json"
    os.kill(json.loads(attempt.read_bytes())["pid"], signal.SIGKILL)
    gate.open_to(40)
    wait(qtbot, lambda: window.table.runs.runs["killed"].is_terminal)
    choose(window, "killed")
    window.charts.choose_metrics(["train/loss"])
    wait(qtbot, lambda: bool(window.charts._plots["train/loss"].marks))
    marks = window.charts._plots["train/loss"].marks
    with trn.Client(world.home.root) as client:
        saved = {artifact.step for artifact in client.artifacts("killed", kind="checkpoint")}
        from_step = client.details("killed").attempts[0].cause.values["from_step"]
    assert from_step in (10, 20)  # as far as the checkpoint writer had come
    assert [(mark.step, mark.kind) for mark in marks if mark.kind in LINES] == [
        (from_step, MarkKind.RESUME),
        (25, MarkKind.FAILURE),
    ]
    assert {10, 30, 40} <= saved <= {10, 20, 30, 40}
    checkpoints = {MarkKind.CHECKPOINT, MarkKind.REMOVED}
    assert [mark.step for mark in marks if mark.kind in checkpoints] == sorted(saved)
    point_at(window, qtbot, 25)
    assert "attempt 1: killed by SIGKILL" in window.charts.reading.text()
    window.table.choose(["killed", "straight"])
    assert window.charts._plots["train/loss"].marks == []


def test_a_value_that_is_no_number_has_a_cross_and_the_curve_a_gap(
    world: World, window: TrainerWindow, qtbot: "QtBot"
) -> None:
    plot = Plot(pytest.importorskip("pyqtgraph"), "train/loss", LIGHT, is_log=False)
    qtbot.addWidget(plot)
    values = (1.0, math.nan, 0.5, math.inf, 0.25)
    series = MetricSeries(
        name="train/loss", steps=(1, 2, 3, 4, 5), values=values, timestamps_ms=(0,) * 5, num_points=5, width=1
    )
    plot.draw("run", series, "#000000")
    line = plot._parts["run"][0]
    assert [math.isnan(value) for value in line.getData()[1]] == [False, True, False, True, False]
    assert plot._signs.faults["run"] == ("#000000", [2, 4])
    assert plot.item.vb.viewRange()[1][1] < 2


def test_a_long_name_does_not_widen_the_window(world: World, window: TrainerWindow, qtbot: "QtBot") -> None:
    world.submit("x" * 100, 3, tags={"k" * 50: "v" * 200})
    wait(qtbot, lambda: "x" * 100 in window.table.runs.runs)
    window.resize(900, 600)
    for tab in (CHARTS, LOG, ATTEMPTS, MEDIA):
        choose(window, "x" * 100, tab=tab)
        if tab == ATTEMPTS:
            wait(qtbot, lambda: "v" * 200 in window.attempts.facts.text())
        assert window.minimumSizeHint().width() < 900
    assert (window.width(), window.height()) == (900, 600)


def test_many_metrics_are_found_by_words(world: World, window: TrainerWindow, qtbot: "QtBot") -> None:
    names = [f"group/metric_{number:03d}" for number in range(200)]
    world.submit("wide", 3, hyperparams={"names": names})
    wait(qtbot, lambda: "wide" in window.table.runs.runs and window.table.runs.runs["wide"].is_terminal)
    choose(window, "straight")
    assert not window.charts.finder.isVisible()
    choose(window, "wide")
    assert window.charts.finder.isVisible()
    qtbot.keyClicks(window.charts.finder, "METRIC 123")
    shown = [item.text() for item in window.charts._items() if not item.isHidden()]
    assert shown == ["train/loss", "group/metric_123"]  # the first is drawn


def test_a_daemon_of_another_version_is_named_until_it_is_restarted(
    open_window: OpenWindow, qtbot: "QtBot", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunningDaemon, "version_warning", "the daemon runs trn 0.0.1")
    window = open_window()
    wait(qtbot, window.banner.isVisible)
    assert window.banner.words.text() == "the daemon runs trn 0.0.1"
    assert not window.banner.button.isVisible()


def legend_of(window: TrainerWindow) -> dict[str, str]:
    """The value beside the name of each run."""
    text = html.unescape(window.charts._legend.text()).replace("\xa0", " ")
    return {name: value.strip() for name, value in re.findall(r"</span> (\S+) <b>([^<]*)</b>", text)}


def point_at(window: TrainerWindow, qtbot: "QtBot", step: int) -> None:
    """Move the pointer there, again until the chart has its range."""
    plot = next(iter(window.charts._plots.values()))
    number = count()

    def is_there() -> bool:
        view = plot.item.vb
        low, high = view.viewRange()[1]
        place = view.mapViewToScene(QPointF(step, (low + high) / 2))
        up = QPoint(0, next(number) % 2)  # a pointer that stays is no event
        qtbot.mouseMove(plot._chart.viewport(), plot._chart.mapFromScene(place) + up)
        return plot.cursor_step == step

    wait(qtbot, is_there)


def drawn_steps(window: TrainerWindow, name: str, run_id: str) -> list[int]:
    plot = window.charts._plots.get(name)
    return list(plot._curves[run_id].steps) if plot is not None and run_id in plot._curves else []


# --- what it does --------------------------------------------------------------------------------------------------


def test_cancel_asks_first(world: World, window: TrainerWindow, qtbot: "QtBot", tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")
    gate.open_to(20)
    world.submit("cancelled", 100, hyperparams={"gate": str(gate.path)})
    wait(
        qtbot,
        lambda: "cancelled" in window.table.runs.runs and window.table.runs.runs["cancelled"].step >= 20,
    )
    choose(window, "cancelled")
    qtbot.keyClick(window, Qt.Key.Key_K, Qt.KeyboardModifier.ControlModifier)
    box = answer_box(window, qtbot, "Back")
    assert shown_texts(box) == ["Cancel cancelled?", "It saves a checkpoint if it can."]
    wait(qtbot, lambda: not window.findChildren(QMessageBox))
    assert not window.table.runs.runs["cancelled"].is_cancel_wanted
    window.cancel_button.click()
    answer_box(window, qtbot, "Cancel the run")
    wait(qtbot, lambda: window.table.runs.runs["cancelled"].state == "CANCELLED")
    assert not window.cancel_button.isEnabled()


def test_resume_asks_first_and_shows_the_new_run(world: World, window: TrainerWindow, qtbot: "QtBot") -> None:
    world.submit("again", 60, hyperparams={"fail_at": 50})
    wait(qtbot, lambda: "again" in window.table.runs.runs and window.table.runs.runs["again"].is_terminal)
    choose(window, "again")
    qtbot.keyClick(window, Qt.Key.Key_R, Qt.KeyboardModifier.ControlModifier)
    answer_box(window, qtbot, "Resume")
    wait(qtbot, lambda: "again.2" in window.table.runs.runs)
    wait(qtbot, lambda: window.table.chosen() == ["again.2"])
    assert window.table.runs.runs["again.2"].parent_run_id == "again"


def test_a_dropped_job_is_checked_and_submitted(
    window: TrainerWindow, qtbot: "QtBot", tmp_path: Path
) -> None:
    for name in ("shown.py",):
        (tmp_path / name).write_text((TRAINERS / name).read_text())
    job = tmp_path / "job.json"
    job.write_text(json.dumps(make_job("dropped", 10)))
    drop(window, job)
    wait(qtbot, lambda: bool(window.findChildren(SubmitDialog)))
    (dialog,) = window.findChildren(SubmitDialog)
    wait(qtbot, dialog.submit.isEnabled)
    assert "code: 3 files" in dialog.details.toPlainText()
    qtbot.mouseClick(dialog.submit, Qt.MouseButton.LeftButton)
    wait(qtbot, lambda: window.table.chosen() == ["dropped"])
    wait(qtbot, lambda: window.table.runs.runs["dropped"].state == "COMPLETED")
    assert window.table.runs.runs["dropped"].snapshot


def test_every_fault_of_a_dropped_job_is_shown(window: TrainerWindow, qtbot: "QtBot", tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("trainer: nowhere:Trainer\nmax_stepz: 5\nbatch: x\n")
    drop(window, job)
    wait(qtbot, lambda: bool(window.findChildren(SubmitDialog)))
    (dialog,) = window.findChildren(SubmitDialog)
    wait(qtbot, lambda: "not valid" in dialog.verdict.text())
    assert "max_stepz" in dialog.details.toPlainText()
    assert "batch" in dialog.details.toPlainText()
    assert not dialog.submit.isEnabled()
    dialog.reject()


def test_other_files_are_not_taken(window: TrainerWindow, tmp_path: Path) -> None:
    file = tmp_path / "picture.png"
    file.write_bytes(b"")
    drop(window, file)
    assert window.findChildren(SubmitDialog) == []


def drop(window: TrainerWindow, path: Path) -> None:
    data = QMimeData()
    data.setUrls([QUrl.fromLocalFile(str(path))])
    event = QDropEvent(
        QPointF(QPoint(100, 100)),
        Qt.DropAction.CopyAction,
        data,
        Qt.MouseButton.LeftButton,
        Qt.KeyboardModifier.NoModifier,
    )
    window.dropEvent(event)


# --- the daemon, the layout, the end -------------------------------------------------------------------------------


def test_it_starts_a_daemon_where_none_runs(open_window: OpenWindow, qtbot: "QtBot", tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.make()
    home.settings.write_text(SETTINGS)
    try:
        window = open_window(home)
        wait(qtbot, lambda: window.daemon.words.text().startswith("Connected to trn "))
        assert not window.banner.isVisible()
    finally:
        end_everything(home.root)


def test_it_says_that_the_daemon_is_gone_and_continues_with_the_next(
    world: World, window: TrainerWindow, qtbot: "QtBot"
) -> None:
    wait(qtbot, lambda: window.daemon.is_connected)
    world.daemon.kill()
    wait(qtbot, window.banner.isVisible)
    assert window.banner.button.isVisible()
    qtbot.mouseClick(window.banner.button, Qt.MouseButton.LeftButton)
    wait(qtbot, lambda: window.daemon.is_connected)
    assert not window.banner.isVisible()
    world.submit("after", 5)
    wait(qtbot, lambda: "after" in window.table.runs.runs and window.table.runs.runs["after"].is_terminal)


def test_the_layout_is_remembered(open_window: OpenWindow, qtbot: "QtBot", tmp_path: Path) -> None:
    file = tmp_path / "layout.ini"
    first = open_window(settings=file)
    wait(qtbot, lambda: "straight" in first.table.runs.runs)
    first.resize(740, 640)
    qtbot.keyClick(first, Qt.Key.Key_3, Qt.KeyboardModifier.ControlModifier)
    first.table.setColumnWidth(0, 222)
    first.set_theme(ThemeName.DARK)
    choose(first, "straight", tab=CHARTS)
    row = next(
        row
        for row in range(first.charts._names.count())
        if first.charts._names.item(row).text() == "train/lr"
    )
    first.charts._names.item(row).setCheckState(Qt.CheckState.Checked)
    first.tabs.setCurrentIndex(ATTEMPTS)
    first.close()
    second = open_window(settings=file)
    assert (second.width(), second.height()) == (740, 640)
    assert second.tabs.currentIndex() == ATTEMPTS
    assert second.table.columnWidth(0) == 222
    assert second.table.runs.theme is DARK
    wait(qtbot, lambda: "straight" in second.table.runs.runs)
    choose(second, "straight", tab=CHARTS)
    wait(qtbot, lambda: {name for name, _ in second.charts.curves} == {"train/loss", "train/lr"})
    second.set_theme(ThemeName.LIGHT)
    assert second.table.runs.theme is LIGHT


def test_trn_gui_opens_a_window_and_ends_with_it(world: World) -> None:
    """The program itself. A signal ends it; runs and daemon stay."""
    command = [str(Path(sys.executable).with_name("trn")), "--home", str(world.home.root), "gui"]
    environ = {**os.environ, "QT_QPA_PLATFORM": "offscreen"}
    process = subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + DEADLINE_S
        with trn.Client(world.home.root) as client:
            before = client.health().num_watchers
            while client.health().num_watchers <= before:
                assert time.monotonic() < deadline
                assert process.poll() is None
                time.sleep(0.05)
        process.terminate()
        _, said = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0, said
    finally:
        process.kill()
        process.wait(DEADLINE_S)


NO_PACKAGE = """
import sys
from importlib.machinery import PathFinder
find = PathFinder.find_spec
PathFinder.find_spec = staticmethod(lambda name, *more: None if name == {name!r} else find(name, *more))
"""
NO_LIBRARY = """
import sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "PySide6.QtWidgets":
            raise ImportError("libEGL.so.1: cannot open shared object file")
sys.meta_path.insert(0, Finder())
"""
MISSING = {
    "a screen": ("", {}, "there is no screen"),
    "an X server": ("", {"DISPLAY": ":65000"}, "no screen answers at DISPLAY=:65000"),
    "a platform of Qt": ("", {"QT_QPA_PLATFORM": "nowhere"}, 'the Qt platform plugin "nowhere"'),
    "PySide6": (NO_PACKAGE.format(name="PySide6"), {}, "needs PySide6, which is not installed: `pip install"),
    "pyqtgraph": (NO_PACKAGE.format(name="pyqtgraph"), {}, "needs pyqtgraph, which is not installed"),
    "a library of the system": (NO_LIBRARY, {}, "libEGL.so.1: cannot open shared object file; it needs"),
}


@pytest.mark.parametrize("what", MISSING)
def test_trn_gui_says_in_one_line_what_is_missing(tmp_path: Path, what: str) -> None:
    program, more, expected = MISSING[what]
    environ = {
        name: value
        for name, value in os.environ.items()
        if name not in ("DISPLAY", "WAYLAND_DISPLAY", "QT_QPA_PLATFORM")
    }
    if program:
        more = {"QT_QPA_PLATFORM": "offscreen"}
    done = run_gui(tmp_path / "home", program, {**environ, **more})
    assert done.returncode == 5
    (line,) = done.stderr.splitlines()
    assert line.startswith("trn: ")
    assert expected in line
    assert json.loads(done.stdout)["code"] == "unavailable"
    assert not (tmp_path / "home").exists()


SIGNALLED = """
import os, signal
from trn.qt.window import TrainerWindow
start = TrainerWindow.start
def start_and_signal(window):
    start(window)
    os.kill(os.getpid(), signal.{name})
TrainerWindow.start = start_and_signal
"""
SIGNALLED_IN_IMPORT = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "PySide6.QtWidgets":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_before_the_event_loop_ends_trn_gui(world: World, name: str) -> None:
    done = run_gui(
        world.home.root, SIGNALLED.format(name=name), {**os.environ, "QT_QPA_PLATFORM": "offscreen"}
    )
    assert done.returncode == 0, done.stderr


def test_ctrl_c_while_qt_is_imported_ends_trn_gui(tmp_path: Path) -> None:
    environ = {**os.environ, "QT_QPA_PLATFORM": "offscreen"}
    done = run_gui(tmp_path / "home", SIGNALLED_IN_IMPORT, environ)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


def run_gui(home: Path, before: str, environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """`trn gui` in a process in which something else was done before."""
    program = f"import sys\n{before}\nfrom trn.cli.main import main\nsys.argv = ['trn', '--home', {str(home)!r}, 'gui']\nmain()"
    return subprocess.run(
        [sys.executable, "-c", program],
        env=environ,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
