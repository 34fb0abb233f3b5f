"""TrainerService: the calls of `proto/trainer.proto`. It reads the registry, hands changes to it, and wakes who acts.

Each call is a coroutine that takes (request, context) and returns its message; streams write bytes, see `run_streams`.
Who may call is decided before, errors are made statuses after: in `server`.
"""

import asyncio
import base64
import binascii
import contextlib
import secrets as random_values
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from gen_worker.trainer.datasets.job_content import find_changed_hyperparams
from trn.core.errors import ConflictError, InfeasibleError, InvalidRequestError, NotFoundError, TrnError
from trn.core.home import Home
from trn.core.runs import LineagePart, RunRecord, RunState
from trn.core.settings import Settings
from trn.daemon.api.commits import committed
from trn.daemon.api.run_streams import Broadcaster, RunStreams
from trn.daemon.api.secret_values import SecretValues
from trn.daemon.api.server import Context, add_ports, build_server
from trn.daemon.api.tokens import ApiTokens
from trn.daemon.dispatch.worker_plan import WorkerFiles, encode_files
from trn.daemon.intake.import_trials import ImportTrials
from trn.daemon.intake.resumption import Resumption
from trn.daemon.intake.run_identity import say_kept, say_not_trained
from trn.daemon.intake.run_judge import DeviceInventory, RunJudge, with_id
from trn.daemon.intake.standing_results import find_stale, say_trained_anew
from trn.daemon.intake.submission import Submission
from trn.daemon.machine.unknown_workers import Held
from trn.daemon.upkeep.removal import Freed, PruneRule, Removal
from trn.daemon.upkeep.singleton import DaemonInfo
from trn.proto import trainer_pb2 as pb
from trn.proto.convert import from_message, read_flat, run_message, state_word, to_message
from trn.registry.metrics import MetricReader, line_of_descent
from trn.registry.sqlite import NewRun, RunRegistry

__all__ = ["TrainerService", "add_ports", "build_server"]

DEFAULT_PAGE, MAX_PAGE = 100, 1000
PAGE_BYTES = 2 << 20  # a page ends early rather than outgrow a message
MAX_POINTS = 500_000
MAX_REASON = 1000


class Dispatcher(Protocol):
    def submitted(self) -> None: ...

    def cancel_wanted(self, run_id: str) -> None: ...

    def plan(self, new: NewRun) -> WorkerFiles: ...

    def worker_environ(self) -> Mapping[str, str]: ...


class Launcher(Protocol):
    def state(self) -> str: ...


class TrainerService:
    """All calls. `info` and `warnings` are what GetHealth tells; the assembler sets them when it knows them."""

    def __init__(
        self,
        *,
        registry: RunRegistry,
        metrics: MetricReader,
        broadcaster: Broadcaster,
        dispatcher: Dispatcher,
        executor: Launcher,
        trials: ImportTrials,
        secrets: SecretValues,
        removal: Removal,
        devices: DeviceInventory,
        home: Home,
        settings: Settings,
        info: DaemonInfo,
    ) -> None:
        self._registry = registry
        self._metrics = metrics
        self._dispatcher = dispatcher
        self._executor = executor
        self._secrets = secrets
        self._resumption = Resumption(
            registry, home, secrets=secrets, max_config_bytes=settings.max_config_bytes
        )
        self._judge = RunJudge(
            registry=registry,
            dispatcher=dispatcher,
            trials=trials,
            devices=devices,
            home=home,
            settings=settings,
        )
        self._removal = removal
        self._devices = devices
        self._home = home
        self._settings = settings
        self.info = info
        self.warnings: Callable[[], Sequence[str]] = lambda: ()
        self.unknown_held: Callable[[], Held] = Held  # what workers hold that the registry does not know
        self.tokens = ApiTokens(home.token)
        self.streams = RunStreams(registry=registry, broadcaster=broadcaster, home=home)
        self.num_calls = 0
        self._num_calls_seen = 0
        self.WatchRuns = self.streams.watch_runs
        self.StreamEvents = self.streams.stream_events
        self.StreamLogs = self.streams.stream_logs

    def is_in_use(self) -> bool:
        """Whether somebody watches, or has asked for anything since this was last asked."""
        has_news, self._num_calls_seen = self.num_calls != self._num_calls_seen, self.num_calls
        return has_news or self.streams.num_open > 0

    def end_streams(self) -> None:
        """The daemon stops: watchers are told to come again, instead of being waited for."""
        self.streams.end_all()

    async def SubmitRun(self, request: pb.Submission, _context: Context) -> pb.SubmitRunResponse:  # noqa: N802
        return await self._submit(from_message(request, Submission))

    async def CheckRun(self, request: pb.Submission, _context: Context) -> pb.CheckRunResponse:  # noqa: N802
        try:
            submission = msgspec.structs.replace(from_message(request, Submission), is_dry_run=True)
            found = await self._submit(submission)
        except InvalidRequestError as fault:
            reason = str(fault).partition("\n")[0]
            code = "infeasible" if isinstance(fault, InfeasibleError) else "invalid"
            return pb.CheckRunResponse(faults=fault.faults or [reason], code=code, reason=reason)
        return pb.CheckRunResponse(
            run=found.run,
            plan_json=found.plan_json,
            notes=found.notes,
            env_differences=found.env_differences,
        )

    async def ResumeRun(self, request: pb.ResumeRunRequest, _context: Context) -> pb.SubmitRunResponse:  # noqa: N802
        if not request.HasField("submission"):
            request.submission.CopyFrom(read_flat(request))
        submission = from_message(request.submission, Submission)
        made = self._registry.submission(submission.submission_id)
        if made is not None:  # since then its parent may have moved on, and its checkpoints may be gone
            return self._answer(made)
        try:
            resumed, notes = await self._resumption.read(request)
        except (ConflictError, InvalidRequestError):
            answer = None if submission.force_new else await self._find_resumed(request)
            if answer is None:
                raise
            return answer
        return await self._submit(resumed, notes=notes)

    async def _find_resumed(self, request: pb.ResumeRunRequest) -> pb.SubmitRunResponse | None:
        """The newest run of the family, if this very resume made it: it is alive, or has done all that was asked for."""
        with contextlib.suppress(TrnError):  # the refusal is told, not this
            newest = self.find(request.run_id, is_exact=request.is_exact)
            if not newest.parent_run_id:
                return None
            once_more = pb.ResumeRunRequest()
            once_more.CopyFrom(request)
            once_more.run_id, once_more.is_exact = newest.parent_run_id, True
            resumed, _ = await self._resumption.read(once_more)
            judged = await self._judge.judge(resumed, is_new=_is_never_new)
            equals = self._registry.answers_to(judged.run.digest)
            stale = await asyncio.to_thread(find_stale, equals, self._home)
            if len(stale) < len(equals):
                equal = equals[len(stale)]
                return self._answer(equal, existed=True, notes=[await self._say_equal(equal, judged.by_name)])
        return None

    async def CancelRun(self, request: pb.CancelRunRequest, _context: Context) -> pb.CancelRunResponse:  # noqa: N802
        run_id = self.find(request.run_id, is_exact=request.is_exact).run_id
        reason = request.reason[:MAX_REASON] or "by request"
        record, was_live = await committed(self._registry.want_cancel(run_id, reason))
        if was_live:
            self._dispatcher.cancel_wanted(run_id)
        return pb.CancelRunResponse(run=run_message(record), was_live=was_live)

    async def GetRun(self, request: pb.GetRunRequest, _context: Context) -> pb.GetRunResponse:  # noqa: N802
        record = self.find(request.run_id, is_exact=request.is_exact)
        return pb.GetRunResponse(
            run=run_message(record, with_config=True),
            attempts=[to_message(attempt, pb.Attempt) for attempt in self._registry.attempts(record.run_id)],
            folder=str(self._home.run(record.run_id).root),
        )

    async def ListRuns(self, request: pb.ListRunsRequest, _context: Context) -> pb.ListRunsResponse:  # noqa: N802
        states = [RunState(word) for word in map(state_word, request.states) if word in RunState.__members__]
        before = _read_page_token(request.page_token)
        size = min(request.page_size or DEFAULT_PAGE, MAX_PAGE)
        answer = pb.ListRunsResponse()
        if request.states and not states:
            return answer  # no run of ours can be in a state that we do not know
        records = self._registry.page(
            states=states,
            name=request.name_contains,
            before=before,
            limit=size,
            with_config=request.with_config,
        )
        size_bytes = 0
        for record in records:
            message = run_message(record, with_config=request.with_config)
            size_bytes += message.ByteSize()
            if answer.runs and size_bytes > PAGE_BYTES:
                break
            answer.runs.append(message)
        if answer.runs and (len(records) == size or len(answer.runs) < len(records)):
            last = answer.runs[-1]
            answer.next_page_token = _make_page_token(last.submitted_ms, last.run_id)
        return answer

    async def GetMetrics(self, request: pb.GetMetricsRequest, _context: Context) -> pb.GetMetricsResponse:  # noqa: N802
        record = self.find(request.run_id, is_exact=request.is_exact)
        lineage = self._registry.lineage(record) if request.with_ancestors else []
        stretches = line_of_descent(
            lineage or [LineagePart(run_id=record.run_id)],
            request.from_step if request.HasField("from_step") else None,
            request.to_step if request.HasField("to_step") else None,
        )
        found = await asyncio.to_thread(
            self._metrics.query_line, stretches, list(request.names), request.max_points, MAX_POINTS
        )
        return pb.GetMetricsResponse(
            series=[to_message(series, pb.MetricSeries) for series in found],
            lineage=[to_message(part, pb.LineagePart) for part in lineage],
        )

    async def RemoveRuns(self, request: pb.RemoveRunsRequest, _context: Context) -> pb.RemoveRunsResponse:  # noqa: N802
        run_ids, gone = [], []
        for run_id in request.run_ids:
            try:
                run_ids.append(self.find(run_id, is_exact=request.is_exact).run_id)
            except NotFoundError:
                if not self._registry.was_removed(run_id):
                    raise
                gone.append(Freed("gone", run_id, 0))  # perhaps by this very request, whose reply was lost
        freed = [*await self._removal.remove(run_ids, is_dry_run=request.is_dry_run), *gone]
        return pb.RemoveRunsResponse(freed=[pb.Freed(**item._asdict()) for item in freed])

    async def Prune(self, request: pb.PruneRequest, _context: Context) -> pb.PruneResponse:  # noqa: N802
        rule = PruneRule(
            ended_before_ms=request.ended_before_ms,
            keep_best=request.keep_best,
            metric=request.metric,
            is_max_best=request.is_max_best,
        )
        pruned = await self._removal.prune(rule, is_dry_run=request.is_dry_run)
        return pb.PruneResponse(freed=[pb.Freed(**item._asdict()) for item in pruned.freed], kept=pruned.kept)

    async def ListDevices(self, _request: pb.ListDevicesRequest, _context: Context) -> pb.ListDevicesResponse:  # noqa: N802
        inventory = self._devices.inventory
        slots = {slot["device_id"]: slot for slot in self._registry.slots()}
        cpus_held, memory_mb_held = self._registry.held()
        unknown = self.unknown_held()
        answer = pb.ListDevicesResponse(
            cpus=inventory.cpus,
            cpus_held=cpus_held + unknown.cpus,
            memory_mb=inventory.memory_mb,
            memory_mb_held=memory_mb_held + unknown.memory_mb,
        )
        for device in inventory.devices:
            slot: dict[str, Any] = slots.get(device.device_id, {})
            answer.devices.add(
                device_id=device.device_id,
                kind=device.kind,
                name=device.name,
                memory_mb=device.memory_mb,
                run_id=slot.get("run_id") or "",
                attempt=slot.get("attempt") or 0,
                quarantine_reason=slot.get("quarantine_reason") or unknown.reason_of(device.device_id),
            )
        return answer

    async def GetHealth(self, _request: pb.GetHealthRequest, _context: Context) -> pb.GetHealthResponse:  # noqa: N802
        return pb.GetHealthResponse(
            version=self.info.version,
            pid=self.info.pid,
            started_ms=self.info.started_ms,
            home=str(self._home.root),
            address=", ".join(self.info.addresses),
            runs_by_state=self._registry.counts(),
            launcher=self._executor.state(),
            num_watchers=self.streams.num_open,
            warnings=self.warnings(),
            last_change=self._registry.last_change(),
        )

    def find(self, run_id: str, *, is_exact: bool = False) -> RunRecord:
        """The run that is meant. What could be no id is refused before anything is looked up."""
        self._home.run(run_id)
        return self._registry.find(run_id, is_exact=is_exact)

    def nonce_of(self, run_id: str) -> str | None:
        """Of the submission that has this id; None where there is none."""
        with contextlib.suppress(NotFoundError):
            return self._registry.get(run_id).nonce
        return None

    async def _submit(
        self,
        submission: Submission,
        notes: Sequence[str] = (),
    ) -> pb.SubmitRunResponse:
        stale: dict[str, str] = {}

        async def is_new(digest: str) -> bool:
            if submission.force_new or submission.is_dry_run:
                return True
            equals = self._registry.answers_to(digest)
            if equals:
                stale.update(await asyncio.to_thread(find_stale, equals, self._home))
            return len(stale) == len(equals)

        if submission.secret_env and not submission.submission_id:
            submission = msgspec.structs.replace(submission, submission_id=random_values.token_hex(16))
        judged = await self._judge.judge(submission, is_new=is_new)
        new, notes = judged.run, [*notes, *judged.notes]
        differences = self._judge.find_differences(new, submission)
        if submission.is_dry_run:
            new = with_id(new, self._registry.next_id(new.run_id))
            run = pb.Run(run_id=new.run_id, digest=new.digest, name=new.name, priority=new.priority)
            plan = encode_files(self._dispatcher.plan(new))
            equals = [] if submission.force_new else self._registry.answers_to(new.digest)
            gone = await asyncio.to_thread(find_stale, equals, self._home) if equals else {}
            standing = [run for run in equals if run.run_id not in gone]
            if standing:
                notes = [await self._say_equal(standing[0], judged.by_name), *notes]
            return pb.SubmitRunResponse(run=run, plan_json=plan, notes=notes, env_differences=differences)
        self._secrets.keep(new.submission_id, submission.secret_env)  # before anybody can start it
        submitting = self._registry.submit(new, force_new=submission.force_new, stale=stale)
        record, existed = await committed(submitting)
        if existed:
            # It may wait for a value that was forgotten. Of what would have been, nothing is told.
            self._secrets.keep(record.submission_id, submission.secret_env)
            notes = [await self._say_equal(record, judged.by_name), *say_kept(record, new)]
        else:
            notes = [*say_trained_anew(stale), *notes]
            self._dispatcher.submitted()
        return self._answer(record, existed=existed, notes=notes, differences=() if existed else differences)

    def _answer(
        self,
        record: RunRecord,
        *,
        existed: bool = False,
        notes: Sequence[str] = (),
        differences: Sequence[pb.EnvDifference] = (),
    ) -> pb.SubmitRunResponse:
        return pb.SubmitRunResponse(
            run=run_message(record),
            existed=existed,
            run_token=self.tokens.make_run_token(record.run_id, record.nonce),
            notes=notes,
            env_differences=differences,
        )

    async def _say_equal(self, record: RunRecord, by_name: Sequence[str]) -> str:
        changed = await asyncio.to_thread(
            find_changed_hyperparams, record.config, record.base_dir, record.submitted_ms
        )
        return say_not_trained(record, [*by_name, *(f"{text} of the hyperparams" for text in changed)])


async def _is_never_new(_digest: str) -> bool:
    return False


def _make_page_token(submitted_ms: int, run_id: str) -> str:
    return base64.urlsafe_b64encode(f"{submitted_ms}/{run_id}".encode()).decode().rstrip("=")


def _read_page_token(token: str) -> tuple[int, str] | None:
    if not token:
        return None
    try:
        text = base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)).decode()
        submitted, slash, run_id = text.partition("/")
        if not slash or not submitted.isascii() or not submitted.isdigit() or len(submitted) > 18:
            raise ValueError(text)
    except (binascii.Error, UnicodeError, ValueError) as fault:
        raise InvalidRequestError(
            f"page_token is {token[:60]!r}, which no answer ever gave: start with an empty one"
        ) from fault
    return int(submitted), run_id
