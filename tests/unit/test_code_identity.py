"""Whether the code changed: said when it did, and never when it did not."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from gen_worker.frozen_imports import frozen_variables
from gen_worker.trainer.author import code_identity
from gen_worker.trainer.author.code_identity import (
    OUTSIDE_NAME,
    OutsideCodeWatch,
    code_changes,
    describe_code,
)

SOURCE = "class Mine:\n    rate = 1\n"


def load(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def _no_module_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "modules", sys.modules.copy())


def identity(path: Path, source: str = SOURCE, *, module: str = "mine") -> dict[str, Any]:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(source.encode())
    return {"code": describe_code(load(path, module).Mine)}


def test_the_same_source_is_the_same_code_wherever_it_lies_and_however_it_is_imported(tmp_path: Path) -> None:
    was = identity(tmp_path / "project" / "mine.py")
    for now in (
        identity(tmp_path / "run" / "code" / "mine.py"),  # from a snapshot
        identity(tmp_path / "project" / "mine.py", module="__main__"),  # as a script
        identity(tmp_path / "project" / "mine.py", module="package.mine"),  # as a part of its package
        identity(tmp_path / "package" / "__init__.py"),  # its module became a package
        identity(tmp_path / "crlf" / "mine.py", SOURCE.replace("\n", "\r\n")),  # as git checks out elsewhere
        identity(tmp_path / "bom" / "mine.py", f"\ufeff{SOURCE}"),
    ):
        assert code_changes(was, now) == []
        assert code_changes(now, was) == []


def test_a_changed_source_and_another_class_are_said(tmp_path: Path) -> None:
    was = identity(tmp_path / "a" / "mine.py")
    now = identity(tmp_path / "b" / "mine.py", SOURCE.replace("1", "2"))
    assert code_changes(was, now) == ["the code of mine:Mine changed"]
    other = {"code": {**was["code"], "trainer": "mine:Other"}}
    assert code_changes(was, other) == ["the trainer class was mine:Mine, is now mine:Other"]


def test_a_class_without_a_file_is_not_taken_for_a_changed_one(tmp_path: Path) -> None:
    filed = identity(tmp_path / "mine.py")
    in_memory = {"code": {"trainer": "__main__:Mine", "file": None}}
    assert code_changes(filed, in_memory) == []
    assert code_changes(in_memory, filed) == []
    assert code_changes(in_memory, in_memory) == []


def test_a_checkpoint_from_before_the_source_digest_is_compared_by_its_bytes(tmp_path: Path) -> None:
    now = identity(tmp_path / "mine.py")
    old = {name: now["code"][name] for name in ("trainer", "file", "digest")}
    assert code_changes({"code": old}, now) == []
    assert code_changes({"code": {**old, "digest": "sha256:0"}}, now) == ["the code of mine:Mine changed"]
    assert code_changes({}, now) == []


class Outside:
    """A run with frozen code, in a process that has imported nothing else."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run, self.shared = root / "run", root / "shared.py"
        self.run.mkdir()
        for name, value in frozen_variables(str(root / "project"), str(self.run / "code")).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "modules", {})
        imports = {"shared": str(self.shared), "only_found": str(root / "only_found.py")}
        monkeypatch.setattr(code_identity, "outside_imports", imports.copy)

    def import_shared(self, source: str) -> None:
        self.shared.write_text(source)
        load(self.shared, "shared")

    def watch(self, **saved: Any) -> tuple[dict[str, Any], OutsideCodeWatch]:
        identity: dict[str, Any] = {}
        return identity, OutsideCodeWatch(identity, self.run, **saved)


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Outside:
    return Outside(tmp_path, monkeypatch)


def test_code_outside_the_snapshot_is_named_once_and_kept(outside: Outside) -> None:
    identity, watch = outside.watch()
    assert watch.look() == []
    assert not (outside.run / OUTSIDE_NAME).exists()
    outside.import_shared("A = 1\n")  # as a hook may, after the start
    (warning,) = watch.look()
    assert f"shared ({outside.shared})" in warning
    assert [watch.look() for _ in range(3)] == [[], [], []]
    kept = json.loads((outside.run / OUTSIDE_NAME).read_text())
    assert kept["modules"]["shared"]["digest"] == identity["outside_code"]["shared"]


def test_an_attempt_that_finds_other_code_outside_the_snapshot_says_so(outside: Outside) -> None:
    outside.import_shared("A = 1\n")
    first, watch = outside.watch()
    watch.look()
    assert len(outside.watch()[1].look()) == 1, "nothing changed"
    outside.import_shared("A = 2\n")
    _, retried = outside.watch()
    assert retried.look()[1:] == ["code outside the snapshot changed since the last attempt: shared"]
    _, resumed = outside.watch(saved=first)
    assert resumed.look()[1:] == ["code outside the snapshot changed since the checkpoint: shared"]


def test_what_an_attempt_has_not_imported_yet_stays_kept(outside: Outside) -> None:
    outside.import_shared("A = 1\n")
    outside.watch()[1].look()
    sys.modules.clear()
    _, retried = outside.watch()
    assert retried.look() == []
    outside.import_shared("A = 2\n")
    assert any("since the last attempt" in warning for warning in retried.look())


def test_a_process_without_frozen_code_has_none_outside(
    outside: Outside, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in frozen_variables("/a", "/b"):
        monkeypatch.delenv(name)
    monkeypatch.setattr(code_identity, "outside_imports", dict)
    identity, watch = outside.watch()
    assert (watch.look(), identity) == ([], {})
