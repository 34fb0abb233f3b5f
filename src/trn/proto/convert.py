"""Records <-> messages, nowhere else. An enum value that this release does not know is carried on as `UNKNOWN_<n>`."""

from collections.abc import Iterable

import msgspec

from trn.core.runs import AttemptRecord, LineagePart, Needs, RunRecord, RunState
from trn.proto import trainer_pb2 as pb
from trn.proto.records import (
    Attempt,
    Device,
    EnvDifference,
    Freed,
    Health,
    JobCheck,
    Lineage,
    LogChunk,
    Machine,
    MetricSeries,
    Run,
    RunDetails,
    Submission,
)

_PREFIX = "RUN_STATE_"
_NUMBERS: dict[str, int] = {
    name.removeprefix(_PREFIX): number for name, number in pb.RunState.items() if number != 0
}
_WORDS = {number: word for word, number in _NUMBERS.items()}


def state_number(state: str) -> int:
    """Its number on the wire; also of a word that `state_word` made for a number without a name."""
    known = _NUMBERS.get(state)
    if known is not None:
        return known
    head, _, number = state.partition("_")
    return int(number) if head == "UNKNOWN" and number.isdigit() and int(number) < 1 << 31 else 0


def state_word(number: int) -> str:
    """Its name; `UNSPECIFIED` where there is none to speak of, as for a dry run."""
    return _WORDS.get(number) or (f"UNKNOWN_{number}" if number else "UNSPECIFIED")


def known_states(numbers: Iterable[int]) -> list[RunState]:
    """Those of the states that this release has; no run can be in the others."""
    return [RunState(_WORDS[number]) for number in numbers if number in _WORDS]


def run_message(record: RunRecord, *, with_config: bool = False) -> pb.Run:
    needs = record.needs
    message = pb.Run(
        run_id=record.run_id,
        digest=record.digest,
        state=_NUMBERS[record.state],  # type: ignore[arg-type]
        reason=record.reason,
        name=record.name,
        priority=record.priority,
        parent_run_id=record.parent_run_id,
        snapshot=record.snapshot,
        frozen_from=record.frozen_from,
        secret_env=record.secret_env,
        stop_reason=record.stop_reason,
        base_dir=record.base_dir,
        interpreter=record.interpreter,
        is_cancel_wanted=record.is_cancel_wanted,
        cancel_reason=record.cancel_reason,
        submitted_ms=record.submitted_ms,
        updated_ms=record.updated_ms,
        ended_ms=record.ended_ms,
        not_before_ms=record.not_before_ms,
        attempt=record.attempt,
        max_attempts=record.max_attempts,
        step=record.step,
        end_step=record.end_step,
        last_seq=record.last_seq,
        metrics=record.metrics,
        devices=record.devices,
        needs=pb.Needs(devices=needs.devices, gpus=needs.gpus, cpus=needs.cpus, memory_mb=needs.memory_mb),
        tags=record.tags,
        change=record.change,
        log_dir=record.log_dir,
        event_log=record.event_log,
        family=record.family,
        submission_id=record.submission_id,
        start_step=record.start_step,
    )
    if with_config:
        message.config_json = msgspec.json.encode(record.config)
    return message


def attempt_message(record: AttemptRecord) -> pb.Attempt:
    return pb.Attempt(
        number=record.number,
        launched_ms=record.launched_ms,
        ended_ms=record.ended_ms,
        pid=record.pid,
        exit_code=record.exit_code,
        category=record.category,
        cause=record.cause,
        last_heartbeat_ms=record.last_heartbeat_ms,
        step=record.step,
        devices=record.devices,
    )


def read_run(message: pb.Run) -> Run:
    needs = message.needs
    return Run(
        run_id=message.run_id,
        digest=message.digest,
        state=state_word(message.state),
        reason=message.reason,
        config=msgspec.json.decode(message.config_json) if message.config_json else None,
        name=message.name,
        priority=message.priority,
        parent_run_id=message.parent_run_id,
        snapshot=message.snapshot,
        frozen_from=message.frozen_from,
        secret_env=tuple(message.secret_env),
        stop_reason=message.stop_reason,
        base_dir=message.base_dir,
        interpreter=message.interpreter,
        is_cancel_wanted=message.is_cancel_wanted,
        cancel_reason=message.cancel_reason,
        submitted_ms=message.submitted_ms,
        updated_ms=message.updated_ms,
        ended_ms=message.ended_ms if message.HasField("ended_ms") else None,
        not_before_ms=message.not_before_ms,
        attempt=message.attempt,
        max_attempts=message.max_attempts,
        step=message.step,
        end_step=message.end_step if message.HasField("end_step") else None,
        last_seq=message.last_seq,
        metrics=dict(message.metrics),
        devices=tuple(message.devices),
        needs=Needs(
            devices=tuple(needs.devices), gpus=needs.gpus, cpus=needs.cpus, memory_mb=needs.memory_mb
        ),
        tags=dict(message.tags),
        change=message.change,
        log_dir=message.log_dir,
        event_log=message.event_log,
        family=message.family,
        submission_id=message.submission_id,
        start_step=message.start_step,
    )


def read_attempt(message: pb.Attempt) -> Attempt:
    return Attempt(
        number=message.number,
        launched_ms=message.launched_ms,
        ended_ms=message.ended_ms if message.HasField("ended_ms") else None,
        pid=message.pid,
        exit_code=message.exit_code if message.HasField("exit_code") else None,
        category=message.category,
        cause=message.cause,
        last_heartbeat_ms=message.last_heartbeat_ms,
        step=message.step,
        devices=tuple(message.devices),
    )


def read_details(message: pb.GetRunResponse) -> RunDetails:
    return RunDetails(
        run=read_run(message.run),
        attempts=tuple(read_attempt(attempt) for attempt in message.attempts),
        folder=message.folder,
    )


def read_submission(message: pb.SubmitRunResponse) -> Submission:
    return Submission(
        run=read_run(message.run),
        existed=message.existed,
        run_token=message.run_token,
        plan=msgspec.json.decode(message.plan_json) if message.plan_json else None,
        notes=tuple(message.notes),
        env_differences=_read_differences(message.env_differences),
    )


def _read_differences(messages: Iterable[pb.EnvDifference]) -> tuple[EnvDifference, ...]:
    return tuple(
        EnvDifference(
            name=message.name,
            is_in_caller=message.is_in_caller,
            is_in_worker=message.is_in_worker,
            worker_value=message.worker_value,
        )
        for message in messages
    )


def read_check(message: pb.CheckRunResponse) -> JobCheck:
    return JobCheck(
        faults=tuple(message.faults),
        code=message.code,
        reason=message.reason,
        notes=tuple(message.notes),
        env_differences=_read_differences(message.env_differences),
        run=read_run(message.run) if message.HasField("run") else None,
        plan=msgspec.json.decode(message.plan_json) if message.plan_json else None,
    )


def read_log_chunk(message: pb.StreamLogsResponse) -> LogChunk:
    return LogChunk(offset=message.offset, data=message.data, is_end=message.is_end)


def read_series(message: pb.MetricSeries) -> MetricSeries:
    return MetricSeries(
        name=message.name,
        steps=tuple(message.steps),
        values=tuple(message.values),
        timestamps_ms=tuple(message.timestamps_ms),
        num_points=message.num_points,
        lows=tuple(message.lows),
        highs=tuple(message.highs),
    )


def read_lineage(message: pb.GetMetricsResponse) -> Lineage:
    return Lineage(
        parts=tuple(
            LineagePart(
                run_id=part.run_id,
                from_step=part.from_step,
                to_step=part.to_step if part.HasField("to_step") else None,
            )
            for part in message.lineage
        ),
        metrics={series.name: read_series(series) for series in message.series},
    )


def read_freed(items: Iterable[pb.Freed]) -> tuple[Freed, ...]:
    return tuple(Freed(kind=item.kind, name=item.name, size_bytes=item.size_bytes) for item in items)


def read_machine(message: pb.ListDevicesResponse) -> Machine:
    return Machine(
        devices=tuple(
            Device(
                device_id=device.device_id,
                kind=device.kind,
                name=device.name,
                memory_mb=device.memory_mb,
                run_id=device.run_id,
                attempt=device.attempt,
                quarantine_reason=device.quarantine_reason,
            )
            for device in message.devices
        ),
        cpus=message.cpus,
        cpus_held=message.cpus_held,
        memory_mb=message.memory_mb,
        memory_mb_held=message.memory_mb_held,
    )


def read_health(message: pb.GetHealthResponse) -> Health:
    return Health(
        version=message.version,
        pid=message.pid,
        started_ms=message.started_ms,
        home=message.home,
        address=message.address,
        runs_by_state=dict(message.runs_by_state),
        launcher=message.launcher,
        num_watchers=message.num_watchers,
        warnings=tuple(message.warnings),
        last_change=message.last_change,
    )
