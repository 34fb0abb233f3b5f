"""The window of `trn gui`: assembles the table, the views of the chosen run, and the commands."""

import asyncio
from collections.abc import Callable
from pathlib import Path

from PySide6.QtCore import QSettings, Qt, QTimer, Slot
from PySide6.QtGui import (
    QAction,
    QActionGroup,
    QCloseEvent,
    QDragEnterEvent,
    QDropEvent,
    QGuiApplication,
    QKeySequence,
)
from PySide6.QtWidgets import (
    QFileDialog,
    QHBoxLayout,
    QLineEdit,
    QMainWindow,
    QMenu,
    QMessageBox,
    QPushButton,
    QSplitter,
    QTabWidget,
    QVBoxLayout,
    QWidget,
)

from trn.client.client import AsyncClient
from trn.core.home import Home
from trn.core.terminal_text import plain
from trn.proto.records import Health, Run, SubmitResult
from trn.qt import theme as themes
from trn.qt.bridge_thread import TrainerQBridgeThread
from trn.qt.call_thread import CallThread
from trn.qt.run_commands import RunCommands
from trn.qt.run_stream import ConnectionState
from trn.qt.views.attempts_view import AttemptsView
from trn.qt.views.chart_view import ChartView
from trn.qt.views.daemon_bar import Banner, DaemonBar
from trn.qt.views.log_view import LogView
from trn.qt.views.media_view import MediaView
from trn.qt.views.run_table import RunTable
from trn.qt.views.submit_dialog import JOB_SUFFIXES, SubmitDialog

HEALTH_EVERY_MS = 5000
PAINT_EVERY_MS = 100
NOTE_MS = 8000
IDLE_EXIT_S = 600.0  # of a daemon that is started here, as by `trn run`
TABS = ("Charts", "Log", "Attempts", "Samples and videos")
KEYS = """Ctrl+O  submit a job file
Ctrl+F  find runs: words that must all match, -word must not
Ctrl+1 … Ctrl+4  charts, log, attempts, samples and videos
Ctrl+K  cancel the selected runs
Ctrl+R  resume the selected run
Ctrl+C  copy the ids of the selected runs (in the table)
← →  move the line in a chart;  + -  zoom;  0  whole range
Ctrl+Shift+T  light, dark, as the system
F1  this list
Ctrl+Q  quit"""


class TrainerWindow(QMainWindow):
    """All runs of one home. Nothing in here waits: the bridge and the call thread do."""

    def __init__(self, home: Home, settings: QSettings) -> None:
        super().__init__()
        self.home = home
        self._settings = settings
        self._came: dict[str, Run] = {}
        self._is_starting = False
        self._version_warning = ""  # of a daemon that runs other code than this window
        self.calls = CallThread(home.root)
        self.bridge = TrainerQBridgeThread(home.root)
        self.commands = RunCommands(self.calls, self)
        self.table = RunTable()
        self.charts = ChartView(self.calls)
        self.log = LogView(self.calls)
        self.attempts = AttemptsView(self.calls)
        self.media = MediaView(self.calls)
        self.daemon = DaemonBar()
        self.banner = Banner()
        self.filter = QLineEdit(placeholderText="Find runs: name, state, reason, device or tag")
        self.filter.setClearButtonEnabled(True)
        self.cancel_button = QPushButton("Cancel…")
        self.resume_button = QPushButton("Resume…")
        self.submit_button = QPushButton("Submit a job…")
        self.tabs = QTabWidget()
        self.tabs.setDocumentMode(True)
        self.tabs.tabBar().setDrawBase(False)
        for title, view in zip(TABS, (self.charts, self.log, self.attempts, self.media), strict=True):
            self.tabs.addTab(view, title)
        self.splitter = QSplitter(Qt.Orientation.Vertical)
        self._paint = QTimer(self, interval=PAINT_EVERY_MS, singleShot=True)
        self._ask_health = QTimer(self, interval=HEALTH_EVERY_MS)
        self.setWindowTitle(f"trn: {home.root}")
        self.setAcceptDrops(True)
        self._build()
        self._add_actions()
        self._connect()
        self._restore()

    def start(self) -> None:
        """Connect, with a daemon that is started if none runs."""
        self.calls.start()
        self.bridge.start()
        self.table.setFocus()
        self._start_daemon()

    def chosen_runs(self) -> list[Run]:
        return [self.table.runs.runs[run_id] for run_id in self.table.chosen()]

    # What is built once

    def _build(self) -> None:
        bar = QHBoxLayout()
        bar.addWidget(self.filter, 1)
        for button in (self.cancel_button, self.resume_button, self.submit_button):
            bar.addWidget(button)
        above = QWidget()
        column = QVBoxLayout(above)
        column.setContentsMargins(0, 0, 0, 0)
        column.addWidget(self.banner)
        column.addLayout(bar)
        column.addWidget(self.table, 1)
        self.splitter.addWidget(above)
        self.splitter.addWidget(self.tabs)
        self.splitter.setSizes([320, 480])
        self.splitter.setChildrenCollapsible(False)
        middle = QWidget()
        whole = QVBoxLayout(middle)
        whole.setContentsMargins(12, 10, 12, 6)
        whole.addWidget(self.splitter)
        self.setCentralWidget(middle)
        self.statusBar().addPermanentWidget(self.daemon)
        self.resize(1280, 840)

    def _add_actions(self) -> None:
        menu = self.menuBar()
        job, run, view, help_menu = (menu.addMenu(name) for name in ("&Job", "&Run", "&View", "&Help"))
        self._add_action(job, "&Submit a job file…", "Ctrl+O", self.ask_for_job)
        self._add_action(job, "&Quit", "Ctrl+Q", self.close)
        self._add_action(run, "&Cancel…", "Ctrl+K", self.ask_cancel)
        self._add_action(run, "&Resume…", "Ctrl+R", self.ask_resume)
        self._add_action(run, "Copy &id", "", self._copy_ids)
        self._add_action(view, "&Find runs", "Ctrl+F", self._focus_filter)
        for number, title in enumerate(TABS):
            self._add_action(view, title, f"Ctrl+{number + 1}", self._show_tab).setData(number)
        self._themes = QActionGroup(self)
        names = view.addMenu("&Theme")
        for name in themes.ThemeName:
            action = names.addAction(name.value.capitalize())
            action.setCheckable(True)
            action.setData(name.value)
            self._themes.addAction(action)
        self._add_action(view, "Next theme", "Ctrl+Shift+T", self._next_theme)
        self._add_action(help_menu, "&Keyboard", "F1", self._show_keys)
        copy = QAction("Copy ids", self.table)
        copy.setShortcut(QKeySequence(QKeySequence.StandardKey.Copy))
        copy.setShortcutContext(Qt.ShortcutContext.WidgetShortcut)
        copy.triggered.connect(self._copy_ids)
        self.table.addAction(copy)

    def _add_action(self, menu: QMenu, title: str, keys: str, slot: Callable[[], object]) -> QAction:
        action = QAction(title, self)
        if keys:
            action.setShortcut(QKeySequence(keys))
        action.triggered.connect(slot)
        menu.addAction(action)
        return action

    def _connect(self) -> None:
        self.bridge.runUpdated.connect(self._take_run)
        self.bridge.connectionChanged.connect(self._take_connection)
        self.calls.failed.connect(self._note)
        self.commands.done.connect(self._note)
        self.commands.submitted.connect(self._take_submitted)
        self._paint.timeout.connect(self._paint_runs)
        self._ask_health.timeout.connect(self._read_health)
        self._ask_health.start()
        self.table.selected.connect(self._show_chosen)
        self.tabs.currentChanged.connect(self._show_chosen)
        self.filter.textChanged.connect(self.table.runs.set_filter)
        self.cancel_button.clicked.connect(self.ask_cancel)
        self.resume_button.clicked.connect(self.ask_resume)
        self.submit_button.clicked.connect(self.ask_for_job)
        self.banner.startWanted.connect(self._start_daemon)
        self._themes.triggered.connect(self._choose_theme)
        self.charts.metricsChosen.connect(self._keep_metrics)
        QGuiApplication.styleHints().colorSchemeChanged.connect(self._take_scheme)
        application = QGuiApplication.instance()
        assert application is not None
        application.aboutToQuit.connect(self._stop)

    # What comes from the daemon

    @Slot(object)
    def _take_run(self, run: Run) -> None:
        self._came[run.run_id] = run
        if not self._paint.isActive():
            self._paint.start()

    @Slot()
    def _paint_runs(self) -> None:
        came, self._came = self._came, {}
        was_empty = not self.table.runs.runs
        self.table.runs.update(came.values())
        if was_empty and self.table.runs.rowCount():
            self.table.selectRow(0)
            return
        chosen = self.chosen_runs()
        for run in chosen:
            if run.run_id in came:
                self.charts.update_run(run)
        if chosen and chosen[0].run_id in came:
            self._show_current(chosen[0])
        self._update_buttons(chosen)

    @Slot(str)
    def _take_connection(self, word: str) -> None:
        state = ConnectionState(word)
        self.daemon.show_connection(state)
        if state is ConnectionState.CONNECTED:
            self._is_starting = False
            self.banner.say(self._version_warning, can_start=False)
            self._read_health()
        elif state in (ConnectionState.DISCONNECTED, ConnectionState.REFUSED) and not self._is_starting:
            self.banner.say(f"{self.bridge.reason}. Runs continue meanwhile.", can_start=True)

    @Slot()
    def _start_daemon(self) -> None:
        """As `trn run` does, if none runs."""
        from trn.client.daemon_start import ensure_daemon

        self._is_starting = True
        self.banner.say("", can_start=False)

        async def start(_client: AsyncClient) -> tuple[str, str]:
            daemon, is_new = await asyncio.to_thread(ensure_daemon, self.home, idle_exit_s=IDLE_EXIT_S)
            return "The daemon was started." if is_new else "", daemon.version_warning

        self.calls.ask(start, self._take_start, self._take_start_fault)

    def _take_start(self, said: tuple[str, str]) -> None:
        note, self._version_warning = said
        self._note(note)
        if self.daemon.is_connected:
            self.banner.say(self._version_warning, can_start=False)

    def _take_start_fault(self, fault: Exception) -> None:
        self._is_starting = False
        self.banner.say(str(fault), can_start=True)

    @Slot()
    def _read_health(self) -> None:
        async def read(client: AsyncClient) -> Health:
            return await client.health()

        if self.daemon.is_connected:
            self.calls.ask(read, self.daemon.show_health, lambda _fault: None)

    # The chosen runs

    @Slot()
    def _show_chosen(self) -> None:
        chosen = self.chosen_runs()
        self.charts.show_runs(chosen)
        self._show_current(chosen[0] if chosen else None)
        self._update_buttons(chosen)

    def _show_current(self, run: Run | None) -> None:
        """Only the view that can be seen reads anything."""
        view = self.tabs.currentWidget()
        if view is self.log:
            self.log.show_run("" if run is None else run.run_id)
        elif view is self.attempts:
            self.attempts.show_run(run)
        elif view is self.media:
            self.media.show_run(run)

    def _update_buttons(self, chosen: list[Run]) -> None:
        self.cancel_button.setEnabled(any(not run.is_terminal for run in chosen))
        self.resume_button.setEnabled(len(chosen) == 1 and chosen[0].is_terminal)

    @Slot()
    def ask_cancel(self) -> None:
        self.commands.ask_cancel(self.chosen_runs())

    @Slot()
    def ask_resume(self) -> None:
        self.commands.ask_resume(self.chosen_runs())

    # Submit

    @Slot()
    def ask_for_job(self) -> None:
        dialog = QFileDialog(self, "Submit a job file", filter="Jobs (*.yaml *.yml *.toml *.json)")
        dialog.setFileMode(QFileDialog.FileMode.ExistingFile)
        dialog.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        dialog.fileSelected.connect(self._take_file)
        dialog.open()

    @Slot(str)
    def _take_file(self, path: str) -> None:
        self.check_job(Path(path))

    def check_job(self, path: Path) -> SubmitDialog:
        """Check it and ask whether to submit it."""
        dialog = SubmitDialog(self.calls, self.home, path, self)
        dialog.submitted.connect(self._take_submitted)
        dialog.open()
        return dialog

    def dragEnterEvent(self, event: QDragEnterEvent) -> None:  # noqa: N802
        if _job_files(event):
            event.acceptProposedAction()

    def dropEvent(self, event: QDropEvent) -> None:  # noqa: N802
        for path in _job_files(event):
            self.check_job(path)
        event.acceptProposedAction()

    @Slot(object)
    def _take_submitted(self, result: SubmitResult) -> None:
        run = result.run
        self._note(result.notes[0] if result.existed and result.notes else f"{run.run_id} is queued")
        self.table.runs.update([run])
        self.table.choose([run.run_id])

    # The window itself

    @Slot(str)
    def _note(self, words: str) -> None:
        if words:
            self.statusBar().showMessage(plain(words), NOTE_MS)

    @Slot()
    def _show_tab(self) -> None:
        action = self.sender()
        assert isinstance(action, QAction)
        self.tabs.setCurrentIndex(action.data())
        self.tabs.currentWidget().setFocus()

    @Slot()
    def _focus_filter(self) -> None:
        self.filter.setFocus()
        self.filter.selectAll()

    @Slot()
    def _copy_ids(self) -> None:
        QGuiApplication.clipboard().setText("\n".join(self.table.chosen()))

    @Slot()
    def _show_keys(self) -> None:
        box = QMessageBox(QMessageBox.Icon.NoIcon, "Keyboard", "Keyboard", parent=self)
        box.setInformativeText(KEYS)
        box.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        box.open()

    @Slot()
    def _next_theme(self) -> None:
        actions = self._themes.actions()
        checked = self._themes.checkedAction()
        actions[(actions.index(checked) + 1) % len(actions)].trigger()

    @Slot(QAction)
    def _choose_theme(self, action: QAction) -> None:
        self.set_theme(themes.ThemeName(action.data()))

    @Slot()
    def _take_scheme(self) -> None:
        self.set_theme(themes.ThemeName(self._themes.checkedAction().data()))

    def set_theme(self, name: themes.ThemeName) -> None:
        self._settings.setValue("theme", name.value)
        next(action for action in self._themes.actions() if action.data() == name.value).setChecked(True)
        theme = themes.apply(name)
        self.table.runs.theme = theme
        self.table.runs.repaint_all()
        self.charts.set_theme(theme)
        self.daemon.set_theme(theme)

    @Slot(object)
    def _keep_metrics(self, names: list[str]) -> None:
        self._settings.setValue("metrics", list(names))

    def _restore(self) -> None:
        settings = self._settings
        for name, restore in (
            ("geometry", self.restoreGeometry),
            ("splitter", self.splitter.restoreState),
            ("columns", self.table.horizontalHeader().restoreState),
        ):
            if settings.contains(name):
                restore(settings.value(name))
        self.tabs.setCurrentIndex(int(str(settings.value("tab", 0))))
        if settings.contains("metrics"):
            names = settings.value("metrics")
            self.charts.choose_metrics([names] if isinstance(names, str) else list(names or []))
        try:
            self.set_theme(themes.ThemeName(str(settings.value("theme", "system"))))
        except ValueError:  # of another release
            self.set_theme(themes.ThemeName.SYSTEM)
        self._update_buttons([])

    def closeEvent(self, event: QCloseEvent) -> None:  # noqa: N802
        self._settings.setValue("geometry", self.saveGeometry())
        self._settings.setValue("splitter", self.splitter.saveState())
        self._settings.setValue("columns", self.table.horizontalHeader().saveState())
        self._settings.setValue("tab", self.tabs.currentIndex())
        self._settings.sync()
        self._stop()
        super().closeEvent(event)

    @Slot()
    def _stop(self) -> None:
        self._ask_health.stop()
        self.media.release()
        self.bridge.stop()
        self.calls.stop()


def _job_files(event: QDropEvent) -> list[Path]:
    urls = event.mimeData().urls()
    paths = [Path(url.toLocalFile()) for url in urls if url.isLocalFile()]
    return [path for path in paths if path.suffix.lower() in JOB_SUFFIXES]
