"""What crosses the process line is whole, versioned and strict."""

import json
from pathlib import Path
from typing import Any

import pytest

from gen_worker.errors import StartupError
from gen_worker.trainer import (
    TrainerSubprocessContractV1,
    read_subprocess_contract,
    write_subprocess_contract,
)

CONTRACT = TrainerSubprocessContractV1(
    trainer_plugin="m:T",
    job_spec_path="/j.json",
    arrow_ipc_path="/b.arrow",
    checkpoints_dir="/c",
    samples_dir="/s",
    events_path="/e.jsonl",
    extra_env={"A": "b"},
)


def test_it_survives_the_way_through_a_file_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = write_subprocess_contract(tmp_path / "deep" / "contract.json", CONTRACT)
    assert read_subprocess_contract(path) == CONTRACT
    assert list(path.parent.iterdir()) == [path]


def test_the_file_and_the_contract_may_come_in_either_order(tmp_path: Path) -> None:
    path = write_subprocess_contract(CONTRACT, tmp_path / "contract.json")
    assert read_subprocess_contract(path) == CONTRACT


def test_the_v1_file_that_was_shipped_still_reads() -> None:
    shipped = Path(__file__).parent.parent / "compat" / "subprocess_contract_v1.json"
    assert read_subprocess_contract(shipped) == CONTRACT


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"contract_version": "v2"}, "'v2'"),
        ({"contract_version": None}, "None"),
        ({"surprise": 1}, "surprise"),
        ({"events_path": 3}, "events_path"),
    ],
)
def test_what_it_does_not_know_it_refuses(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = write_subprocess_contract(CONTRACT, tmp_path / "contract.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(StartupError, match=message):
        read_subprocess_contract(path)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"contract_version": "v1"}'])
def test_a_damaged_file_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "contract.json"
    path.write_text(text)
    with pytest.raises(StartupError, match=r"contract\.json"):
        read_subprocess_contract(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="cannot be read"):
        read_subprocess_contract(tmp_path / "none.json")
