"""The rows of the daemon's topic: what is asked, and what was measured beside it."""

from bars import Bar, Row, build_row
from harness import Measurements

START = "ours, warm launcher"
COLD = "the same worker, cold"
FORK = "fork of a warm process"
IMPORT = "import torch"
RAY = "Ray Jobs"
SUBMITIT = "submitit"
RECOVERY = "ours, killed"
TORCHRUN = "torchrun --max-restarts"
BURST = "ours, burst"
CALLS = "ours, submits"
EVENTS = "ours, events"
FAN_OUT = "ours, fan-out"
SINGLE = "grpc.aio, one event a message"
QUEUE = "ours, queue"
SERVING = "ours, serving"
IDLE = "ours, idle"
POINTS = "ours, metric points"
EMPTY = "empty call"
CLIENT = "ours, through AsyncClient"
COMMIT = "SQLite, a synced commit each"
FLOOR = "limit: the same call that only commits a row"
LAUNCHER = "its launcher"
SHORT = "ours, 100 pending"
BEFORE = "ours, before"


def build_rows(measured: Measurements) -> list[Row]:
    _split_samples(measured)
    return [
        *_start_rows(measured),
        *_recovery_rows(measured),
        *_submit_rows(measured),
        *_stream_rows(measured),
        *_queue_rows(measured),
        *_idle_rows(measured),
        *_point_rows(measured),
    ]


def _split_samples(measured: Measurements) -> None:
    """Sides that measured several things in one round: each thing gets a name, so that it can stand beside."""

    def split(side: str, name: str, keys: dict[str, str]) -> None:
        if side in measured.failures and not measured.samples.get(side):
            measured.failures[name] = measured.failures[side]
        measured.samples[name] = [
            {new: sample[old] for old, new in keys.items()} for sample in measured.samples.get(side, ())
        ]

    for name, prefix in ((EMPTY, "empty"), (CLIENT, "client"), (FLOOR, "floor")):
        split(CALLS, name, {f"{prefix}_{number}_per_s": f"submit_{number}_per_s" for number in (1, 32)})
    split(CALLS, COMMIT, {"commit_per_s": "submit_1_per_s"})
    split(QUEUE, SHORT, {f"{what}_short_ms": f"{what}_long_ms" for what in ("submit", "page", "decide")})
    split(IDLE, LAUNCHER, {"launcher_resident_mb": "resident_mb"})
    split(POINTS, BEFORE, {"submit_before_ms": "submit_during_ms"})


def _start_rows(measured: Measurements) -> list[Row]:
    what = "submit → first train_step of a torch trainer"
    return [
        build_row(
            measured,
            what=what,
            unit="ms",
            key="ms",
            ours=START,
            beside=(FORK, IMPORT, RAY, SUBMITIT),
            bar=Bar(limit=40),
            note=(
                "one at a time on an idle daemon, from the call of AsyncClient.submit to the step's own clock; the fork"
                " makes the model and begins a step, without queue, record or events; Ray Jobs and submitit: submit →"
                " the first line of user code, before any import, in rounds of their own"
            ),
        ),
        build_row(
            measured,
            what=f"{what}, against a cold start",
            unit="ms",
            key="ms",
            ours=START,
            beside=(COLD,),
            bar=Bar(limit=0.1, against=(COLD,)),
            note="cold: `python -m gen_worker.entrypoint` from its spawn, page cache warm, in the same rounds",
        ),
        build_row(
            measured,
            what="burst of 100 trivial runs, submitted → all completed",
            unit="runs/s",
            key="runs_per_s",
            ours=BURST,
            beside=(RAY, SUBMITIT),
            bar=Bar(limit=40, at_least=True),
            note=(
                "all 100 submitted at once, one step each, as many at a time as the machine has CPUs; the end is the last"
                " COMPLETED seen by a watcher; Ray Jobs a burst of 10 (quick: 5), submitit of 20, in rounds of their own"
            ),
        ),
    ]


def _recovery_rows(measured: Measurements) -> list[Row]:
    what = "kill -9 of the worker → its next committed step"
    return [
        build_row(
            measured,
            what=what,
            unit="ms",
            key="ms",
            ours=RECOVERY,
            beside=(TORCHRUN,),
            bar=Bar(limit=350),
            note=(
                "one run and one process, killed again and again, each time after a checkpoint that is newer than the last;"
                " the same small torch model and cadence (10 steps of 5 ms); torchrun with one gloo process and its"
                " default settings, resumed from a checkpoint by torch.load"
            ),
        ),
        build_row(
            measured,
            what=f"{what}, against torchrun",
            unit="ms",
            key="ms",
            ours=RECOVERY,
            beside=(TORCHRUN,),
            bar=Bar(limit=0.15, against=(TORCHRUN,)),
            note="in the same rounds, in turn",
        ),
    ]


def _submit_rows(measured: Measurements) -> list[Row]:
    return [
        build_row(
            measured,
            what=f"durable submits, {number} in flight",
            unit="/s",
            key=f"submit_{number}_per_s",
            ours=CALLS,
            beside=(EMPTY, FLOOR, CLIENT, *([COMMIT] if number == 1 else [])),
            bar=Bar(limit=0.6, at_least=True, against=(EMPTY,)),
            note=(
                "SubmitRun and grpc.health Check, the cheapest unary call of the same server, by bare stubs from one other"
                " process, in turn; the only CPU is held by a run, so that runs stay pending, and the dispatcher looks at"
                " the queue after each as it always does"
            ),
        )
        for number in (1, 32)
    ]


def _stream_rows(measured: Measurements) -> list[Row]:
    return [
        build_row(
            measured,
            what="event of a worker → seen by a watcher",
            unit="ms",
            key="ms",
            ours=EVENTS,
            bar=Bar(limit=30),
            note=(
                "medians of a run each: the step's own clock, in its metric, against the watcher's when it has the event;"
                " up to 20 ms of it are the worker's, whose writer gathers that long"
            ),
        ),
        build_row(
            measured,
            what="live events to 100 watchers, in all",
            unit="events/s",
            key="events_per_s",
            ours=FAN_OUT,
            beside=(SINGLE,),
            bar=Bar(limit=200_000, at_least=True),
            note=(
                "one client process with 100 streams of a run whose worker writes as quickly as it can; from its start until"
                " all have every event; all are live before it, and none may miss one"
            ),
        ),
    ]


def _queue_rows(measured: Measurements) -> list[Row]:
    shown = {
        "submit": ("submit", "AsyncClient.submit, one in flight"),
        "decide": (
            "a dispatch decision",
            "what a round of the dispatcher reads (queue, slots, what is held) and decides, on the daemon's registry",
        ),
        "page": ("a list page", "100 pending runs through AsyncClient.list"),
    }
    return [
        build_row(
            measured,
            what=f"10,000 pending runs: {what}, against 100 pending",
            unit="ms",
            key=f"{key}_long_ms",
            ours=QUEUE,
            beside=(SHORT,),
            bar=Bar(limit=2, against=(SHORT,)),
            note=f"{note}; two daemons, asked in turn",
        )
        for key, (what, note) in shown.items()
    ]


def _idle_rows(measured: Measurements) -> list[Row]:
    return [
        build_row(
            measured,
            what="idle daemon: resident memory",
            unit="MB",
            key="resident_mb",
            ours=IDLE,
            beside=(LAUNCHER,),
            bar=Bar(limit=80),
            note="RSS, shared pages counted, after it carried some runs; the launcher, with torch imported, apart",
        ),
        build_row(
            measured,
            what="idle daemon: processor",
            unit="%",
            key="percent",
            ours=IDLE,
            bar=Bar(limit=0.5),
            note="user and system time over 30 s (quick: 10 s) without a client, counted in 10 ms",
        ),
        build_row(
            measured,
            what="daemon: spawn → serving",
            unit="s",
            key="s",
            ours=SERVING,
            bar=Bar(limit=0.5),
            note="a new home each time; until it has answered GetHealth; its launcher starts meanwhile",
        ),
    ]


def _point_rows(measured: Measurements) -> list[Row]:
    return [
        build_row(
            measured,
            what="one worker writes 50,000 metric points/s: points queryable per second of it",
            unit="points/s",
            key="ingested_per_s",
            ours=POINTS,
            bar=Bar(limit=45_000, at_least=True),
            note=(
                "10 names a step; from the first step until the last point is answered by GetMetrics, which must then have"
                " every one; a tenth is left for the way of the last"
            ),
        ),
        build_row(
            measured,
            what="one worker writes 50,000 metric points/s: the last point's way",
            unit="ms",
            key="lag_ms",
            ours=POINTS,
            bar=Bar(limit=1000),
            note="from the last step's own clock until its point is answered by GetMetrics; who falls behind is late here",
        ),
        build_row(
            measured,
            what="one worker writes 50,000 metric points/s: submits meanwhile, against before",
            unit="ms",
            key="submit_during_ms",
            ours=POINTS,
            beside=(BEFORE,),
            bar=Bar(limit=2, against=(BEFORE,)),
            note=(
                "medians of AsyncClient.submit every 20 ms; worker, daemon and client share the machine's CPUs, so part of"
                " it is the processor's, not the registry's"
            ),
        ),
    ]
