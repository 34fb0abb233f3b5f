"""What the command line says: charts, times, blame, sentences. Pure parts only."""

import math
from typing import Any

import msgspec
import pytest

from gen_worker.contract.job.model_version import VersionFacts
from gen_worker.launcher.process_family import PROCESS_MARK
from trn.cli import exit_codes
from trn.cli.durations import parse_since, say_ago, say_duration
from trn.cli.reading.explanation import Checkpoint, Surroundings, explain
from trn.cli.reading.remedies import REMEDIES, find_remedy
from trn.client.screen.terminal_chart import draw_chart, draw_sparkline
from trn.core import errors
from trn.core.cause_words import say_cause
from trn.core.causes import FAILURES, STAGES, WAITS, Cause, failure
from trn.core.runs import PREDICTION, SERVER, AttemptRecord, RunRecord, RunState
from trn.core.serving.records import ServedModel
from trn.core.terminal_text import plain
from trn.core.variables import WORKER_NAMES, without_workers_variables

AT_MS = 10_000_000


def run(state: RunState, **more: Any) -> RunRecord:
    fields: dict[str, Any] = {
        "cause": Cause(id="queued"),
        "submitted_ms": AT_MS - 60_000,
        "updated_ms": AT_MS,
        **more,
    }
    return RunRecord(run_id="r-1", digest="", state=state, **{"config": {}, **fields})


def attempt(cause: str = "", **more: Any) -> AttemptRecord:
    fields = {"launched_ms": AT_MS - 50_000, "ended_ms": AT_MS - 1000, **more}
    return AttemptRecord(run_id="r-1", number=1, **({"cause": failure(cause)} if cause else {}), **fields)


@pytest.mark.parametrize("cause_id", sorted(WAITS | STAGES))
def test_every_cause_has_words_of_its_own(cause_id: str) -> None:
    values = {
        "attempt": 1,
        "pid": 7,
        "step": 3,
        "memory_mb": 5,
        "python": "/p",
        "detail": "d",
        "message": "m",
        "pool": "lab",
    }
    more = {"path": "/d", "free": "1 MB", "min_free": "2 MB"}
    words = say_cause(Cause(id=cause_id, waits_for=("gpu",), values={**values, **more}))
    assert words
    assert "None" not in words
    assert cause_id in ("queued", "cancelled") or words != cause_id


def test_every_failure_has_a_remedy_and_no_other_has() -> None:
    assert set(REMEDIES) == set(FAILURES)
    for template in (*REMEDIES.values(), find_remedy("killed", "SIGKILL"), find_remedy("of a newer release")):
        words = template.format(run_id="r-1", resumes="continues", code="", secrets="--env A")
        assert "{" not in words


def test_what_is_a_workers_own_is_not_handed_on_to_a_daemon_or_launcher() -> None:
    assert PROCESS_MARK in WORKER_NAMES
    assert without_workers_variables({"TRAINER_RUN_ID": "x", "RANK": "0", "PATH": "/bin"}) == {"PATH": "/bin"}


def test_every_error_of_the_tree_has_an_exit_code_of_its_own_meaning() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    codes = {kind.__name__: exit_codes.exit_code_of(kind("x")) for kind in kinds}
    assert codes.pop("TrnError") == exit_codes.ExitCode.INTERNAL
    assert exit_codes.ExitCode.INTERNAL not in codes.values()
    assert (codes["InfeasibleError"], codes["NotFoundError"], codes["UnavailableError"]) == (3, 4, 5)
    assert exit_codes.exit_code_of_state("CANCELLED") == exit_codes.ExitCode.CANCELLED_RUN


WAITS_FOR_GPU = Cause(id="waits-for-gpu", waits_for=("gpu",), values={"gpus": 1})
LOST = {"outlook": "backoff", "delay_s": 5.0, "next_attempt": 2}


@pytest.mark.parametrize(
    ("known", "lines"),
    [
        (
            (run(RunState.PENDING, cause=WAITS_FOR_GPU), [], {"other": ["cuda:0"]}),
            [
                "r-1 has been pending for 1m00s.",
                "Why: waits for 1 GPU, held by other (cuda:0).",
                "Next: it starts by itself; `trn cancel other` would free resources now.",
            ],
        ),
        (
            (
                run(
                    RunState.PENDING,
                    cause=failure("lost", **LOST),
                    not_before_ms=AT_MS + 5000,
                    attempt=1,
                ),
                [attempt("lost")],
                {},
            ),
            [
                "r-1 has been pending for 1m00s.",
                "Why: process exited; exit status unknown (fault: machine).",
                "Next: attempt 2 starts in 5s.",
            ],
        ),
        (
            (run(RunState.RUNNING, step=5, end_step=10, attempt=1), [attempt(ended_ms=None)], {}),
            ["r-1 has been running for 50s: attempt 1, step 5 of 10."],
        ),
        (
            (run(RunState.RUNNING, attempt=1, is_cancel_wanted=True, cancel_reason="enough"), [], {}),
            [
                "r-1 is stopping at step 0.",
                "Why: enough.",
                "Next: it saves and exits within its grace period, else it is killed.",
            ],
        ),
        (
            (run(RunState.COMPLETED, step=7, ended_ms=AT_MS), [attempt()], {}),
            ["r-1 completed at step 7 after 1m00s."],
        ),
        (
            (
                run(
                    RunState.CANCELLED,
                    cause=Cause(id="cancelled", values={"asked": "enough"}),
                    ended_ms=AT_MS,
                ),
                [],
                {},
            ),
            [
                "r-1 was cancelled at step 0 after 1m00s.",
                "Why: enough.",
                "Next: submit it again to train it.",
            ],
        ),
        (
            (
                run(
                    RunState.FAILED, cause=failure("train-step", step=3, error="X"), attempt=1, ended_ms=AT_MS
                ),
                [attempt("train-step")],
                {},
            ),
            [
                "r-1 failed at step 0 after 1m00s (1 attempt).",
                "Why: training failed at step 3: X (fault: job).",
                "Next: fix the code, then `trn resume r-1` starts at step 0: it saved no checkpoint.",
            ],
        ),
        (
            (
                run(RunState.FAILED, cause=failure("trn-fault", detail="X"), attempt=1, ended_ms=AT_MS),
                [attempt("trn-fault")],
                {},
            ),
            [
                "r-1 failed at step 0 after 1m00s (1 attempt).",
                "Why: internal error of trn, please report it: X (fault: trn).",
                "Next: report it with `daemon.log`; `trn resume r-1` tries again.",
            ],
        ),
    ],
)
def test_three_lines_say_what_why_and_what_next(
    known: tuple[RunRecord, list[AttemptRecord], dict[str, list[str]]], lines: list[str]
) -> None:
    about, attempts, holders = known
    told = explain(about, attempts, at_ms=AT_MS, is_daemon_up=True, around=Surroundings(devices=holders))
    assert told.lines == lines
    assert told.record()["cause"]["id"] == about.cause.id


@pytest.mark.parametrize("state", [RunState.PENDING, RunState.DISPATCHING, RunState.RUNNING])
def test_without_a_daemon_an_unfinished_run_is_told_to_need_one(state: RunState) -> None:
    told = explain(run(state, attempt=1), [], at_ms=AT_MS, is_daemon_up=False)
    assert "`trn daemon start`" in told.remedy


def test_fixed_code_is_taken_by_a_resume_only_where_it_is_told_to() -> None:
    cause = failure("train-step", step=3, error="X")
    frozen = run(RunState.FAILED, cause=cause, attempt=1, snapshot="sha256:1", base_dir="/my job")
    told = explain(frozen, [], at_ms=AT_MS, is_daemon_up=True)
    assert "`trn resume r-1 --code '/my job'` starts at step 0" in told.remedy
    elsewhere = msgspec.structs.replace(frozen, frozen_from="/my code")
    assert "--code '/my code'" in explain(elsewhere, [], at_ms=AT_MS, is_daemon_up=True).remedy
    live = run(RunState.FAILED, cause=cause, attempt=1, base_dir="/my job")
    assert "`trn resume r-1` starts" in explain(live, [], at_ms=AT_MS, is_daemon_up=True).remedy


@pytest.mark.parametrize(
    ("cause_id", "command"),
    [
        ("input", "correct the job, then `trn resume r-0 --set …`"),
        ("startup", "correct the job or its code, then `trn resume r-0 --code /code --set …`"),
        ("model-load", "correct the job or its code, then `trn resume r-0 --code /code --set …`"),
    ],
)
def test_a_resume_that_could_not_begin_is_repeated_from_the_run_that_it_started_from(
    cause_id: str, command: str
) -> None:
    failed = run(
        RunState.FAILED,
        cause=failure(cause_id, error="X"),
        attempt=1,
        snapshot="sha256:1",
        base_dir="/code",
        parent_run_id="r-00",
        config={"resume_checkpoint_path": "/home/runs/r-0/checkpoints/final.meta.json"},
    )
    told = explain(failed, [], at_ms=AT_MS, is_daemon_up=True)
    assert told.remedy == f"{command}; `trn resume r-1` would repeat what this run was started with"
    saved = Surroundings(checkpoint=Checkpoint("/home/runs/r-1/checkpoints/step-1.meta.json", 1))
    assert "r-0" not in explain(failed, [], at_ms=AT_MS, is_daemon_up=True, around=saved).remedy
    for other in ({}, {"resume_checkpoint_path": "/elsewhere/final.meta.json"}):
        elsewhere = msgspec.structs.replace(failed, config=other)
        assert "submit it again" in explain(elsewhere, [], at_ms=AT_MS, is_daemon_up=True).remedy


def test_a_completed_run_whose_loss_is_not_finite_is_not_called_fine() -> None:
    done = run(RunState.COMPLETED, attempt=1, metrics={"train/loss": math.nan, "accuracy": math.nan})
    told = explain(done, [], at_ms=AT_MS, is_daemon_up=True)
    assert told.why == "its last train/loss is nan"
    assert "NonFiniteGuard" in told.remedy
    early = explain(msgspec.structs.replace(done, stop_reason="patience"), [], at_ms=AT_MS, is_daemon_up=True)
    assert early.why == "stopped early: patience; its last train/loss is nan"
    fine = msgspec.structs.replace(done, metrics={"train/loss": 1.0, "accuracy": math.nan})
    silent = explain(
        fine,
        [],
        at_ms=AT_MS,
        is_daemon_up=True,
        around=Surroundings(unsound="non-finite values in model.0.weight"),
    )
    assert silent.why == "its newest checkpoint has non-finite values in model.0.weight"
    assert "NonFiniteGuard" in silent.remedy
    assert explain(fine, [], at_ms=AT_MS, is_daemon_up=True).why == ""


def test_a_run_that_waits_for_the_disk_says_how_to_make_room() -> None:
    cause = Cause(id="waits-for-disk", fault="machine", waits_for=("disk",), values={"path": "/home"})
    told = explain(run(RunState.PENDING, cause=cause), [], at_ms=AT_MS, is_daemon_up=True)
    assert "trn prune" in told.remedy
    assert "min_free_bytes" in told.remedy


def test_a_server_whose_class_cannot_be_loaded_is_not_said_to_serve_again() -> None:
    config = {"serving": {"version": {"run_id": "mnist", "step": 5}}}
    cause = Cause(id="model-load", values={"detail": "mine:Mine has no `predict`"})
    failed = run(
        RunState.FAILED, kind=SERVER, name="mnist", cause=cause, config=config, frozen_from="/my code"
    )
    told = explain(failed, [], at_ms=AT_MS, is_daemon_up=True)
    assert "serves it again" not in told.remedy
    assert "`trn resume mnist --code '/my code' --set max_steps=…` saves a checkpoint with it" in told.remedy


def test_an_ended_server_is_served_again_with_what_it_served_last() -> None:
    config = {"serving": {"version": {"run_id": "mnist", "step": 100}}}
    cause = Cause(id="cancelled", values={"asked": "cancelled by ann"})
    ended = run(RunState.CANCELLED, kind=SERVER, name="mnist", cause=cause, config=config)
    live = VersionFacts(run_id="mnist.2", step=20, weights_hash="sha256:1", code_hash="")
    served = ServedModel(name="mnist", run_id="r-1", state="CANCELLED", live=live)
    another = msgspec.structs.replace(served, run_id="r-2")  # a newer server of this name
    for known, label in ((None, "mnist@100"), (served, "mnist.2@20"), (another, "mnist@100")):
        told = explain(ended, [], at_ms=AT_MS, is_daemon_up=True, around=Surroundings(served=known))
        assert told.remedy == f"`trn serve {label} --name mnist` serves it again"


def test_lost_secrets_are_passed_again_by_name() -> None:
    lost = run(RunState.FAILED, cause=failure("secret-missing", names=["A", "B"]), attempt=1)
    assert "`trn resume r-1 --env A --env B`" in explain(lost, [], at_ms=AT_MS, is_daemon_up=True).remedy


def test_a_silent_worker_is_named_before_it_is_ended() -> None:
    newest = attempt(ended_ms=None, last_heartbeat_ms=AT_MS - 45_000)
    told = explain(run(RunState.RUNNING, attempt=1), [newest], at_ms=AT_MS, is_daemon_up=True)
    assert told.why == "no heartbeat for 45s"


@pytest.mark.parametrize("is_daemon_up", [True, False])
def test_a_step_that_outlasts_the_time_limit_is_told_with_what_ends_it(is_daemon_up: bool) -> None:
    newest = attempt(ended_ms=None, launched_ms=AT_MS - 30_000, last_heartbeat_ms=AT_MS - 1000)
    about = run(RunState.RUNNING, attempt=1, config={"time_limit_s": 2, "grace_s": 20})
    told = explain(about, [newest], at_ms=AT_MS, is_daemon_up=is_daemon_up)
    assert told.why == "its time limit of 2 s ended 28s ago"
    assert "grace period of 20 s" in told.next
    assert ("trn daemon start" in told.remedy) is not is_daemon_up
    assert "--set time_limit_s=…" in told.remedy
    in_time = run(RunState.RUNNING, attempt=1, config={"time_limit_s": 31})
    assert not explain(in_time, [newest], at_ms=AT_MS, is_daemon_up=True).why


def test_what_ran_out_of_memory_and_what_was_killed_gets_advice_about_memory() -> None:
    for remedy in (find_remedy("out-of-memory"), find_remedy("killed", "SIGKILL")):
        assert "use a smaller batch or more memory_mb" in remedy


@pytest.mark.parametrize(
    ("duration_ms", "said"),
    [
        (0, "0ms"),
        (850, "850ms"),
        (42_000, "42s"),
        (185_000, "3m05s"),
        (7_800_000, "2h10m"),
        (273_600_000, "3d04h"),
    ],
)
def test_durations_are_said_with_two_units_at_most(duration_ms: int, said: str) -> None:
    assert say_duration(duration_ms) == said
    assert say_ago(AT_MS - duration_ms, AT_MS) == ("now" if duration_ms < 1000 else f"{said} ago")


def test_times_are_understood_as_ages_and_as_dates() -> None:
    assert parse_since("90s", AT_MS) == AT_MS - 90_000
    assert parse_since("1.5h", AT_MS) == AT_MS - 5_400_000
    assert parse_since("1970-01-02T00:00:00+00:00", AT_MS) == 86_400_000
    for text in ("", "soon", "5x", "h"):
        with pytest.raises(ValueError, match="Invalid isoformat"):
            parse_since(text, AT_MS)


def test_text_of_a_run_cannot_steer_the_terminal() -> None:
    assert plain("a\x1b[31mb\nc\td\x07\x9b") == "a�[31mb c d��"


def test_a_chart_shows_both_ends_and_fits_its_width() -> None:
    lines = draw_chart([1, 2, 3], [3.0, 2.0, 1.0], width=40, height=5)
    assert len(lines) == 6
    assert max(map(len, lines)) <= 40
    assert lines[0].startswith("3 │⠁") or lines[0].startswith("3 │⠉") or lines[0][3] != " "
    assert lines[4].rstrip()[-1] not in " │"
    assert lines[5].endswith("3")
    bare = draw_chart([1, 2, 3], [3.0, 2.0, 1.0], width=40, height=5, is_unicode=False)
    assert set("".join(bare)) <= set(" |+*0123456789.")


@pytest.mark.parametrize(
    "values",
    [[1.0, 1.0], [math.nan, 1.0], [-1.7e308, 1.7e308], [math.inf, 0.0, -math.inf], [0.0]],
)
def test_no_number_breaks_a_chart(values: list[float]) -> None:
    assert len(draw_chart(range(len(values)), values, width=30, height=4)) == 5


def test_a_seam_is_marked_where_it_is_and_hides_no_point() -> None:
    steps, values = list(range(101)), [float(100 - step) for step in range(101)]
    plain = draw_chart(steps, values, width=60, height=6)
    seamed = draw_chart(steps, values, width=60, height=6, seams=[50, 400])
    assert [line.replace("┊", " ").replace("┴", " ").rstrip() for line in seamed] == plain
    assert seamed[-1].count("┴") == 1
    column = seamed[-1].index("┴")
    assert all(line[column : column + 1] in ("┊", *map(chr, range(0x2801, 0x2900))) for line in seamed[:-1])
    bare = draw_chart(steps, values, width=60, height=6, seams=[50], is_unicode=False)
    assert (bare[-1].count("^"), any(":" in line for line in bare)) == (1, True)


def test_a_small_curve_has_its_seams_too() -> None:
    steps, values = list(range(1, 101)), [float(101 - step) for step in range(1, 101)]
    curve = draw_sparkline(steps, values, width=8, seams=[50])
    assert (curve[0], curve[-1], curve.index("┊"), len(curve)) == ("▇", "▁", 4, 9)
    assert draw_sparkline(steps, values, width=8, seams=[50], is_unicode=False).count("|") == 1
    assert draw_sparkline([1], [math.nan], width=8) == ""
    for odd in ([1.0, 1.0], [-1.7e308, 1.7e308], [math.inf, 0.0, -math.inf]):
        assert draw_sparkline(range(len(odd)), odd, width=8)


def test_nothing_to_draw_is_no_chart() -> None:
    assert draw_chart([], [], width=30) == []
    assert draw_chart([1], [math.nan], width=30) == []


@pytest.mark.parametrize("cause_id", sorted(FAILURES))
@pytest.mark.parametrize("kind", [SERVER, PREDICTION])
def test_nobody_is_told_to_resume_a_run_that_does_not_train(kind: str, cause_id: str) -> None:
    """`trn resume` refuses both."""
    config = {"serving": {"version": {"run_id": "r", "step": 5}}, "time_limit_s": 1}
    ended = run(RunState.FAILED, kind=kind, cause=failure(cause_id), config=config, attempt=1, ended_ms=AT_MS)
    told = explain(ended, [attempt(cause_id)], at_ms=AT_MS, is_daemon_up=True)
    assert told.remedy
    assert "trn resume" not in told.remedy.replace("`trn resume r ", "")  # the run that trained the model
    over = run(RunState.RUNNING, kind=kind, cause=Cause(id="running"), config=config, attempt=1)
    alive = attempt(ended_ms=None)
    assert "trn resume" not in explain(over, [alive], at_ms=AT_MS, is_daemon_up=True).remedy
