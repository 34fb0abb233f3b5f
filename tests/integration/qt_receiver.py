"""What receives the signals of a bridge in tests: notes what came, and in which thread."""

from PySide6.QtCore import QObject, QThread, Slot

from trn.proto.records import Run
from trn.qt import RunEvents, TrainerQBridgeThread


class Receiver(QObject):
    def __init__(self, bridge: TrainerQBridgeThread) -> None:
        super().__init__()
        self.runs: list[Run] = []
        self.events: dict[str, list[dict[str, object]]] = {}
        self.connections: list[str] = []
        self.threads: set[QThread] = set()
        bridge.runUpdated.connect(self.take_run)
        bridge.eventsReceived.connect(self.take_events)
        bridge.connectionChanged.connect(self.take_connection)

    def newest(self, run_id: str) -> Run | None:
        return next((run for run in reversed(self.runs) if run.run_id == run_id), None)

    def state(self, run_id: str) -> str:
        run = self.newest(run_id)
        return "" if run is None else run.state

    def seqs(self, run_id: str) -> list[object]:
        return [event["seq"] for event in self.events.get(run_id, [])]

    @Slot(object)
    def take_run(self, run: Run) -> None:
        self.runs.append(run)
        self.threads.add(QThread.currentThread())

    @Slot(object)
    def take_events(self, events: RunEvents) -> None:
        self.events.setdefault(events.run_id, []).extend(events.events)
        self.threads.add(QThread.currentThread())

    @Slot(str)
    def take_connection(self, state: str) -> None:
        self.connections.append(state)
        self.threads.add(QThread.currentThread())
