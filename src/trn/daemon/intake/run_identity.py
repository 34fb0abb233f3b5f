"""What makes two runs equal: config, code, the content of their data, the interpreter and its packages.

Whether the result of an equal run still stands is looked up on the disk:
- Modules that it imported from outside its frozen code: they are known only once it has run.
- Files that its hyperparams name, if they changed after its end (the class may write to them). Folders do not count.
- Its final checkpoint: a run whose files were deleted is trained again.
"""

import asyncio
import os
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from gen_worker.contract.checkpoints.choice import META_SUFFIX, checkpoint_stem
from gen_worker.contract.installed_packages import is_same_python, packages_stamp, real_python
from gen_worker.trainer.author.code_identity import find_changed_modules
from gen_worker.trainer.datasets.job_content import (
    ContentReader,
    JobContent,
    find_changed_hyperparams,
    names_files,
    section_of,
)
from trn.core.digest import run_digest
from trn.core.home import Home
from trn.core.runs import (
    ALREADY_SERVED,
    NOT_PREDICTED,
    NOT_TRAINED,
    PREDICTION,
    SERVER,
    RunRecord,
    RunState,
)
from trn.core.serving.records import ServedModel
from trn.daemon.intake.unfrozen_code import UnfrozenCode
from trn.daemon.serving.inference_job import find_missing_output, read_version
from trn.registry.base import NewRun

FINAL_MARKER = checkpoint_stem(0, final=True) + META_SUFFIX
MAX_NAMED = 3
_WITH_SOURCES = frozenset({"dataset", "validation", "test"})

T = TypeVar("T")


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """`by_name`: data that was compared by its name alone, for people."""

    digest: str
    by_name: tuple[str, ...] = ()


class TurnCache:
    """What was looked up in this turn of the event loop. Belongs to the loop's thread.

    Whatever runs before the cache is cleared was scheduled before the look, so its request had arrived by then: the look
    is as good as one of its own.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[Hashable, ...], Any] = {}

    def get(self, look: Callable[..., T], *args: Hashable) -> T:
        """`look(*args)`, once a turn."""
        key = (look, *args)
        if key not in self._found:
            if not self._found:
                asyncio.get_running_loop().call_soon(self._found.clear)
            self._found[key] = look(*args)
        found: T = self._found[key]
        return found


class RunIdentity:
    """Finds the digest of runs. Belongs to the loop's thread; what has to be read is read in another.

    Of many submits at once, those that are handled in one turn of the loop share the looks at files.
    """

    def __init__(self, python: str = sys.executable) -> None:
        """`python` is for runs that name no interpreter."""
        self._python = python
        self._contents = ContentReader()
        self._code = UnfrozenCode()
        self._turn = TurnCache()

    async def find(self, new: NewRun, *, code_identity: str, family: str) -> Identity:
        """`family` is the name that was asked for, empty where none was."""
        python = new.interpreter or self._python
        code: str | None = code_identity or new.snapshot
        if not code:
            refs = _code_refs(new.config)
            code = self._turn.get(self._code.known, new.base_dir, refs) if new.base_dir else ""
        content = None if names_files(new.config) else JobContent()
        if code is None or content is None or not is_same_python(python, sys.executable):
            return await asyncio.to_thread(self._read, new, python, code, content, family)
        return _identity(new, code, content, self._turn.get(_environment, python), family)

    def _read(
        self, new: NewRun, python: str, code: str | None, content: JobContent | None, family: str
    ) -> Identity:
        if code is None:
            code = self._code.read(new.base_dir, _code_refs(new.config))
        if content is None:
            content = self._contents.read(new.config, new.base_dir)
        return _identity(new, code, content, _environment(python), family)


def _identity(new: NewRun, code: str, content: JobContent, environment: str, family: str) -> Identity:
    digest = run_digest(
        new.config,
        code,
        new.base_dir,
        family=family,
        parent_run_id=new.parent_run_id,
        data=content.digest,
        environment=environment,
        secret_env=new.secret_env,
    )
    return Identity(digest=digest, by_name=content.by_name)


def _environment(python: str) -> str:
    """The interpreter of an environment and all that is installed there. `python3` beside `python` is the same one."""
    place = f"{os.path.dirname(python)} {real_python(python)}"  # noqa: PTH120
    try:
        return f"{place} {packages_stamp(python)}"
    except OSError:  # it cannot be asked; its worker will say what is wrong with it
        return place


def _code_refs(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Every `module:symbol` that a job names."""
    named = [config.get("trainer"), *(config.get("callbacks") or ())]
    if not _WITH_SOURCES.isdisjoint(config):
        for names in (("dataset",), ("validation", "dataset"), ("test", "dataset")):
            dataset = section_of(config, names)
            named.append(None if dataset is None else dataset.get("source"))
    return tuple([text for text in named if isinstance(text, str)])


def say_not_trained(run: RunRecord, by_name: Sequence[str] = ()) -> str:
    """What to say where an equal run answers: since when its result stands, and how to train anew."""
    if run.kind == PREDICTION:
        return _say_not_predicted(run)
    if run.state is RunState.COMPLETED:
        stands = f"completed at {_say_time(run.ended_ms or run.updated_ms)}, at step {run.step}"
    elif run.state is RunState.PENDING:
        stands = f"waits to start since {_say_time(run.submitted_ms)}"
    else:
        of = f" of {run.end_step}" if run.end_step else ""
        stands = f"is running now, at step {run.step}{of}"
    words = (
        f"{NOT_TRAINED} {run.run_id} has the same config, code, data and packages, and {stands}. To train anew:"
        " --another (API: force_new)"
    )
    if by_name:
        words += f". Compared by name, not by content: {_listed(by_name)}"
    if run.secret_env:
        words += f". The values of secret variables are not compared: {', '.join(run.secret_env)}"
    return words


def _say_not_predicted(run: RunRecord) -> str:
    stands = "is under way"
    if run.state is RunState.COMPLETED:
        stands = f"completed at {_say_time(run.ended_ms or run.updated_ms)}, and its output still stands"
    return (
        f"{NOT_PREDICTED} {run.run_id} has the same input, checkpoint, code and packages, and {stands}. To predict anew:"
        " --another (API: force_new)"
    )


def say_already_served(run: RunRecord, served: ServedModel) -> str:
    """What to say where a server that lives answers."""
    version = served.live or read_version(run.config)
    what = "" if version is None else f" serves {version.label}"
    where = f" at {served.url}" if served.is_ready else " and is starting" if what else " is starting"
    return f"{ALREADY_SERVED} {run.run_id}{what}{where}"


def say_kept(run: RunRecord, new: NewRun) -> list[str]:
    """What was asked for with a submit and an equal run does not take over: it has no part in what is trained."""
    kept = []
    if run.state is RunState.PENDING and new.priority != run.priority:
        kept.append(f"priority {run.priority}, not {new.priority}")
    if new.tags != run.tags and new.tags:
        kept.append(f"tags {_say_tags(run.tags)}, not {_say_tags(new.tags)}")
    return [f"{run.run_id} keeps what it was submitted with: {'; '.join(kept)}"] if kept else []


def _say_tags(tags: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in sorted(tags.items())) or "none"


def _say_time(at_ms: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at_ms // 1000))


def find_stale(equals: Iterable[RunRecord], home: Home) -> dict[str, str]:
    """Of equal runs, the newest first, those before the first whose result stands: id -> why it does not. Blocks."""
    stale: dict[str, str] = {}
    for run in equals:
        why = find_why_stale(run, home)
        if not why:
            break
        stale[run.run_id] = why
    return stale


def find_why_stale(run: RunRecord, home: Home) -> str:
    """In words; empty where its result stands. Blocks."""
    folder = home.run(run.run_id)
    changed = find_changed_modules(folder.root)
    if changed:
        return f"code outside its snapshot has changed since: {_listed(changed)}"
    if run.state is not RunState.COMPLETED:
        return ""
    if run.kind == SERVER:
        return "it has ended"
    if run.kind == PREDICTION:
        return find_missing_output(run)
    ended_ms = run.ended_ms or run.updated_ms
    changed = find_changed_hyperparams(run.config, run.base_dir, ended_ms, is_file_meant=True)
    if changed:
        return f"files that its hyperparams name have changed since it ended: {_listed(changed)}"
    if not (folder.checkpoints / FINAL_MARKER).exists():
        return f"its final checkpoint is gone from {folder.checkpoints}"
    return ""


def say_done_anew(stale: Mapping[str, str], kind: str) -> list[str]:
    """Why the newest of the equal runs does not answer."""
    done = "predicted" if kind == PREDICTION else "trained"
    return [f"{done} anew: {run_id} is equal, but {why}" for run_id, why in list(stale.items())[:1]]


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more
