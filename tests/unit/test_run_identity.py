"""Equal is: config, code, data, interpreter and packages. Each of them alone makes another run."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from trn.core.causes import QUEUED
from trn.core.runs import RunRecord, RunState
from trn.daemon.intake import run_identity, unfrozen_code
from trn.daemon.intake.run_identity import RunIdentity, TurnCache, say_not_trained
from trn.daemon.intake.unfrozen_code import UnfrozenCode
from trn.registry.base import NewRun

JOB = {"trainer": "mine:Trainer", "mock_batches": [1]}


def digest(
    base: Path | str = "", *, identity: RunIdentity | None = None, family: str = "", **fields: Any
) -> str:
    code = fields.pop("code_identity", "")
    new = NewRun(run_id="x", digest="", base_dir=str(base), **{"config": JOB, **fields})
    found = asyncio.run((identity or RunIdentity()).find(new, code_identity=code, family=family))
    return found.digest


def test_another_name_parent_interpreter_or_code_is_another_run(tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.symlink_to(sys.executable)  # a venv's
    seen = [
        digest(),
        digest(family="mine"),
        digest(parent_run_id="parent"),
        digest(interpreter=str(python)),
        digest(code_identity="c"),
        digest(snapshot="sha256:1"),
        digest(tmp_path),
    ]
    assert len(set(seen)) == len(seen)
    assert digest(interpreter=sys.executable) == digest(), "the daemon's own, said or not"


def test_what_was_installed_meanwhile_makes_another_run(monkeypatch: pytest.MonkeyPatch) -> None:
    before = digest()
    monkeypatch.setattr(run_identity, "packages_stamp", lambda _python: "another")
    assert digest() != before


def test_an_interpreter_that_cannot_be_asked_is_no_error(tmp_path: Path) -> None:
    assert digest(interpreter=str(tmp_path / "gone")) == digest(interpreter=str(tmp_path / "gone"))


def test_other_rows_below_the_same_path_make_another_run(tmp_path: Path) -> None:
    config = {"trainer": "mine:Trainer", "dataset": {"parquet_paths": ["a.parquet"]}}
    identity = RunIdentity()
    (tmp_path / "a.parquet").write_bytes(b"old")
    before = digest(tmp_path, identity=identity, config=config)
    assert digest(tmp_path, identity=identity, config=config) == before
    (tmp_path / "a.parquet").write_bytes(b"new")
    assert digest(tmp_path, identity=identity, config=config) != before


def test_unfrozen_code_counts_with_all_modules_of_its_folder_that_it_imports(tmp_path: Path) -> None:
    files = {
        "mine.py": "import json, torch\nfrom pkg.models import Net\nimport helper as h\n",
        "helper.py": "X = 1\n",
        "pkg/__init__.py": "",
        "pkg/models.py": "from . import layers\nfrom .deep.more import y\n",
        "pkg/layers.py": "",
        "pkg/deep/__init__.py": "",
        "pkg/deep/more.py": "from ..layers import z\nbroken syntax here",
        "unrelated.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    identity = RunIdentity()
    before = digest(tmp_path, identity=identity)
    assert digest(tmp_path, identity=identity) == before
    (tmp_path / "unrelated.py").write_text("changed = 1\n")
    assert digest(tmp_path, identity=identity) == before
    for name in files.keys() - {"unrelated.py"}:
        text = (tmp_path / name).read_text()
        (tmp_path / name).write_text(f"{text}# changed\n")
        assert digest(tmp_path, identity=identity) != before, name
        (tmp_path / name).write_text(text)
    assert digest(tmp_path, identity=identity) == before
    assert digest(tmp_path, snapshot="s") == digest(tmp_path, snapshot="s")


def test_unfrozen_code_is_read_once_while_it_does_not_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text("import other\n")
    (tmp_path / "other.py").write_text("")
    code = UnfrozenCode()
    assert code.known(str(tmp_path), ["mine:Trainer"]) is None
    code.read(str(tmp_path), ["mine:Trainer"])
    assert code.known(str(tmp_path), ["mine:Trainer"]) is None, "it may still change within one clock tick"
    monkeypatch.setattr(unfrozen_code, "SETTLE_NS", -1)
    found = code.read(str(tmp_path), ["mine:Trainer"])
    assert code.known(str(tmp_path), ["mine:Trainer"]) == found
    (tmp_path / "other.py").write_text("x = 1\n")
    assert code.known(str(tmp_path), ["mine:Trainer"]) is None
    assert code.read(str(tmp_path), ["numpy:Trainer"]) == "", "installed: not of this folder"
    assert code.known(str(tmp_path), ["numpy:Trainer"]) == ""
    (tmp_path / "numpy").mkdir()
    assert code.known(str(tmp_path), ["numpy:Trainer"]) is None, "a module of that name may be there now"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"state": RunState.COMPLETED, "ended_ms": 1_700_000_000_000, "step": 300},
            "and completed at 2023-11-14 22:13:20 UTC, at step 300. To train anew: --another",
        ),
        ({"state": RunState.RUNNING, "step": 4, "end_step": 10}, "and is running now, at step 4 of 10."),
        ({"state": RunState.PENDING}, "and waits to start since 2023-11-14"),
    ],
)
def test_it_is_said_since_when_the_result_stands_and_how_to_train_anew(
    fields: dict[str, Any], words: str
) -> None:
    record = RunRecord(
        run_id="shapes",
        digest="d",
        cause=QUEUED,
        config={},
        submitted_ms=1_700_000_000_000,
        updated_ms=0,
        **fields,
    )
    said = say_not_trained(record)
    assert said.startswith("not trained again: shapes has the same config, code, data and packages, ")
    assert words in said
    assert said.endswith("--another (API: force_new)")
    by_name = say_not_trained(record, ["s3://a", "b", "c", "d"])
    assert by_name.endswith(". Compared by name, not by content: s3://a, b, c and 1 more")


def test_one_look_serves_what_was_there_before_it_and_nothing_that_came_after() -> None:
    looks: list[int] = []
    cache = TurnCache()

    def look(_name: str) -> int:
        looks.append(len(looks))
        return looks[-1]

    async def ask() -> int:
        return cache.get(look, "file")

    async def main() -> None:
        assert await asyncio.gather(ask(), ask(), ask()) == [0, 0, 0]
        assert await asyncio.create_task(ask()) == 1, "it came after the look"
        assert cache.get(look, "other") == 2

    asyncio.run(main())
