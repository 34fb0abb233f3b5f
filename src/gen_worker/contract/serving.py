"""The documents by which a daemon and a model server agree on what is served. Both are in the folder `serving` of the run.

`wanted.json` is written by the daemon, then the server gets SIGUSR1. `live.json` is written by the server when it has
switched: a server that is started again begins with it. Each is whole or absent (write, sync, rename).
"""

from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from gen_worker.contract.files.durable import replace_file
from gen_worker.contract.files.regular import read_regular
from gen_worker.contract.job.spec import GateSpec
from gen_worker.errors import StartupError

D = TypeVar("D", "WantedModel", "LiveModel")

FOLDER = "serving"
WANTED, LIVE = "wanted.json", "live.json"


class ModelVersion(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint, and all that is needed to answer with it."""

    run_id: str  # that saved it
    step: int
    checkpoint: str  # path of its .meta.json
    weights_hash: str  # of its data file, as the meta says it
    trainer: str  # module:symbol
    config: dict[str, Any]  # the job of the run that saved it
    code_hash: str = ""  # of the snapshot; empty: the code was not frozen
    code_dir: str = ""  # first on the import path of its workers; empty: none
    frozen_from: str = ""
    base_dir: str = ""

    @property
    def label(self) -> str:
        return f"{self.run_id}@{self.step}"


class WantedModel(msgspec.Struct, frozen=True, kw_only=True):
    """What the server is to do. A higher number replaces a lower one; one that was done is not done again.

    `promote` and `rollback` switch to the version. `shadow`: it answers too, nobody sees it, answers are compared.
    `split`: it answers `percent` of the requests. `single`: only the live version answers from now on.
    """

    number: int
    action: Literal["promote", "rollback", "shadow", "split", "single"]
    version: ModelVersion | None = None
    percent: float = 0.0
    gate: GateSpec = GateSpec()
    by: str = ""  # who asked


class LiveModel(msgspec.Struct, frozen=True, kw_only=True):
    """What the server answers with, and the number of the last `WantedModel` that it finished, done or refused."""

    number: int
    version: ModelVersion
    previous: ModelVersion | None = None


def write_document(path: Path, document: WantedModel | LiveModel) -> None:
    """Durably. Blocks."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")


def read_wanted(folder: Path) -> WantedModel | None:
    """None where nothing was asked for yet; StartupError where it cannot be read."""
    return _read(folder / WANTED, WantedModel)


def read_live(folder: Path) -> LiveModel | None:
    """None where nothing was served yet; StartupError where it cannot be read."""
    return _read(folder / LIVE, LiveModel)


def _read(path: Path, kind: type[D]) -> D | None:
    try:
        return msgspec.json.decode(read_regular(path), type=kind)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as fault:
        raise StartupError(f"{path} cannot be read: {fault}") from fault
