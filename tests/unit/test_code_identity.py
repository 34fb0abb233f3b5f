"""Whether the code changed: said when it did, and never when it did not."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from gen_worker.frozen_imports import frozen_variables
from gen_worker.trainer.code_identity import OUTSIDE_NAME, code_changes, describe_code, note_outside_code

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


def test_code_outside_the_snapshot_is_named_kept_and_said_when_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, copy, run = tmp_path / "project", tmp_path / "run" / "code", tmp_path / "run"
    for name, value in frozen_variables(str(original), str(copy)).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "modules", {})
    frozen, shared = copy / "mine.py", tmp_path / "shared.py"
    first = identity(frozen)
    assert note_outside_code(first, run, is_fresh=True) == []
    assert not (run / OUTSIDE_NAME).exists()
    shared.write_text("A = 1\n")
    load(shared, "shared")
    (warning,) = note_outside_code(first, run, is_fresh=True)
    assert f"shared ({shared})" in warning
    kept = json.loads((run / OUTSIDE_NAME).read_text())
    assert kept["modules"]["shared"]["digest"] == first["outside_code"]["shared"]

    assert len(note_outside_code(first, run, is_fresh=True)) == 1, "nothing changed"
    shared.write_text("A = 2\n")
    again = identity(frozen)
    told = note_outside_code(again, run, is_fresh=True)
    assert told[1:] == ["since the last attempt code outside its snapshot changed: shared"]
    assert code_changes(first, again) == ["code outside its snapshot changed: shared"]
    shared.write_text("A = 3\n")
    assert len(note_outside_code(identity(frozen), run, is_fresh=False)) == 1, "its checkpoint says it"
