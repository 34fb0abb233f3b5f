"""The machine's report: each fault is told with its level and a remedy, and one that cannot be asked hides no other."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gen_worker.tools.doctor import report as machine_report
from gen_worker.tools.doctor.finding import Finding, Level
from gen_worker.tools.doctor.report import (
    check_disk,
    check_limits,
    check_packages,
    check_shared_memory,
    make_report,
)
from gen_worker.tools.doctor.torch_tests import check_collectives, check_devices, check_expected

GIB = 1 << 30


class NvmlError(Exception):
    pass


class StandInNvml:
    """What the driver's library answers; this machine has no such GPU."""

    NVMLError = NvmlError

    def __init__(self, *, users: int = 0, is_dead: bool = False) -> None:
        self._users, self._is_dead = users, is_dead

    def nvmlInit(self) -> None:
        if self._is_dead:
            raise NvmlError("Driver/library version mismatch")

    def nvmlDeviceGetCount(self) -> int:
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(total=24 * GIB, free=20 * GIB)

    def nvmlDeviceGetName(self, handle: int) -> bytes:
        return b"GPU of a test"

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:
        return [SimpleNamespace(pid=4000 + number, usedGpuMemory=GIB) for number in range(self._users)]


def stand_in_torch(*, num_devices: int, has_nccl: bool = True) -> Any:
    cuda = SimpleNamespace(
        is_available=lambda: num_devices > 0,
        device_count=lambda: num_devices,
        nccl=SimpleNamespace(version=lambda: (2, 30, 1)),
    )
    distributed = SimpleNamespace(
        is_available=lambda: True, is_nccl_available=lambda: has_nccl, is_gloo_available=lambda: True
    )
    version = SimpleNamespace(cuda="13.0", hip=None)
    return SimpleNamespace(cuda=cuda, distributed=distributed, version=version, __version__="2.13.0")


def test_a_gpu_is_listed_with_its_memory_and_with_who_is_on_it() -> None:
    (free,) = check_devices(stand_in_torch(num_devices=1), StandInNvml())
    assert (free.check, free.level, free.remedy) == ("cuda:0", Level.OK, "")
    assert "21.5 GB of 25.8 GB free" in free.message
    (busy,) = check_devices(stand_in_torch(num_devices=1), StandInNvml(users=2))
    assert busy.level is Level.WARNING
    assert "4000, 4001" in busy.message
    assert "stop process 4000, 4001" in busy.remedy
    assert [user["pid"] for user in busy.facts["processes"]] == [4000, 4001]


def test_a_gpu_that_torch_cannot_use_is_an_error() -> None:
    driver, device = check_devices(stand_in_torch(num_devices=0), StandInNvml())
    assert (driver.check, driver.level) == ("driver", Level.ERROR)
    assert "install a torch build" in driver.remedy
    assert device.check == "cuda:0"


def test_a_driver_that_does_not_answer_is_an_error() -> None:
    (driver,) = check_devices(stand_in_torch(num_devices=0), StandInNvml(is_dead=True))
    assert driver.level is Level.ERROR
    assert "version mismatch" in driver.message
    assert "nvidia-smi" in driver.remedy


def test_several_gpus_without_nccl_are_an_error() -> None:
    (finding,) = check_collectives(stand_in_torch(num_devices=2, has_nccl=False))
    assert finding.level is Level.ERROR
    (finding,) = check_collectives(stand_in_torch(num_devices=2))
    assert (finding.level, finding.facts["nccl_version"]) == (Level.OK, "2.30.1")


def test_a_home_that_is_not_there_yet_is_measured_at_its_parent_and_not_made(tmp_path: Path) -> None:
    space, speed = check_disk(tmp_path / "a" / "b")
    assert space.facts["path"] == str(tmp_path)
    assert speed.facts["bytes_per_s"] > 0
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_an_error_with_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        machine_report.shutil, "disk_usage", lambda _: SimpleNamespace(total=GIB, free=1 << 20)
    )
    (space,) = check_disk(tmp_path)
    assert space.level is Level.ERROR
    assert "TRN_HOME" in space.remedy


def test_a_small_shared_memory_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = SimpleNamespace(total=64 << 20, free=64 << 20)
    monkeypatch.setattr(machine_report.shutil, "disk_usage", lambda _: usage)
    (finding,) = check_shared_memory(tmp_path)
    assert finding.level is Level.WARNING
    assert "--shm-size" in finding.remedy


def test_a_low_limit_is_told_with_the_command_that_raises_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_report.resource, "getrlimit", lambda _: (64, 128))
    by_check = {finding.check: finding for finding in check_limits()}
    assert by_check["open-files"].level is Level.WARNING
    assert "ulimit -n 1024" in by_check["open-files"].remedy
    assert by_check["locked-memory"].level is Level.NOTE
    assert by_check["open-files"].message == "limit 64 files, expected 1024 files"
    assert by_check["locked-memory"].message == "limit 64 bytes, expected 67.1 MB"
    assert by_check["processes"].facts == {"soft": 64, "hard": 128}


def test_a_package_that_is_missing_or_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ["msgspec>=999", "no-such-package", "skipped; extra == 'other'", "click"]
    monkeypatch.setattr(machine_report.importlib.metadata, "requires", lambda _: wanted)
    (finding,) = check_packages()
    assert finding.level is Level.ERROR
    assert "no-such-package is missing" in finding.message
    assert "expected >=999" in finding.message
    assert "skipped" not in finding.message


def test_a_check_that_fails_does_not_hide_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def check_clock(_home: Path) -> Iterator[Finding]:
        raise RuntimeError("no clock")

    monkeypatch.setattr(machine_report, "check_clock", check_clock)
    monkeypatch.setattr(machine_report, "check_torch", lambda: iter(()))
    report = make_report(tmp_path)
    assert "no clock" in report.findings[-1].message
    assert {"interpreter", "disk", "open-files"} <= {finding.check for finding in report.findings}


def test_as_a_program_it_prints_one_object_and_every_warning_has_a_remedy(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gen_worker.tools.doctor", "--home", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    report = json.loads(done.stdout)
    levels = [finding["level"] for finding in report["findings"]]
    assert done.returncode == (1 if "error" in levels else 0)
    assert report["is_ready"] == ("error" not in levels)
    assert report["schema_version"] == "machine_report.v1"
    assert all(finding["remedy"] for finding in report["findings"] if finding["level"] != "ok")


def test_a_gpu_that_somebody_found_and_torch_cannot_use_is_an_error_with_its_cause() -> None:
    def torch_of(*, cuda: str | None, hip: str | None, num: int) -> Any:
        gpus = SimpleNamespace(is_available=lambda: num > 0, device_count=lambda: num)
        return SimpleNamespace(version=SimpleNamespace(cuda=cuda, hip=hip), cuda=gpus, __version__="9.9")

    def look(expected: dict[str, int], **build: Any) -> list[tuple[str, Level, str]]:
        found = check_expected(torch_of(**build), expected)
        return [(item.check, item.level, item.message + item.remedy) for item in found]

    assert look({}, cuda=None, hip=None, num=0) == []
    [(check, level, words)] = look({"cuda": 2}, cuda=None, hip=None, num=0)
    assert (check, level) == ("cuda", Level.ERROR)
    assert "2 CUDA GPUs, but torch 9.9 is built without CUDA" in words
    [(_, level, words)] = look({"cuda": 1}, cuda="13.0", hip=None, num=0)
    assert (level, "driver is new enough for CUDA 13.0" in words) == (Level.ERROR, True)
    [(check, level, _)] = look({"rocm": 1}, cuda="13.0", hip=None, num=1)
    assert (check, level) == ("rocm", Level.ERROR)
    [(check, level, _)] = look({"rocm": 1}, cuda=None, hip="7.0", num=1)
    assert (check, level) == ("rocm", Level.OK)
