"""Devices: what the machine has is found, what it lacks is no fault, and a worker sees its share and no more."""

import asyncio
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from trn.core.causes import QUEUED
from trn.core.errors import InvalidRequestError
from trn.core.runs import RunRecord, RunState
from trn.core.settings import DeviceSetting, InventorySettings
from trn.core.snapshot_manifest import GitState, Manifest
from trn.core.snapshots import SnapshotStore
from trn.daemon.machine.devices import Devices, Inventory, parse_memory_bank, read_rocm
from trn.daemon.machine.environment_report import EnvironmentReports, relevant_variables, write_report
from trn.daemon.machine.process_limits import Limits, read_cpus, read_limits, read_memory_mb

NO_GPUS = InventorySettings(devices=[])


class Gpu:
    def __init__(self, name: str, uuid: str, memory_gb: int = 80) -> None:
        self.name, self.uuid, self.memory_gb = name, uuid, memory_gb
        self.compute: list[int] = []
        self.graphics: dict[int, int | None] = {}
        self.mig: list[Gpu] = []
        self.fault: int = 0


class Nvml:
    """A driver with the GPUs that a test gives it. This machine has none; everything else is the real pynvml."""

    def __init__(self, *gpus: Gpu, fault: int = 0) -> None:
        self.gpus, self.fault = gpus, fault

    def __getattr__(self, name: str) -> Any:
        return getattr(pynvml, name)

    def nvmlInit(self) -> None:
        if self.fault:
            raise pynvml.NVMLError(self.fault)

    def nvmlShutdown(self) -> None:
        pass

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Gpu:
        if self.gpus[index].fault:
            raise pynvml.NVMLError(self.gpus[index].fault)
        return self.gpus[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Gpu:
        return next(gpu for gpu in self.gpus if gpu.uuid == uuid)

    def nvmlDeviceGetName(self, gpu: Gpu) -> str:
        return gpu.name

    def nvmlDeviceGetUUID(self, gpu: Gpu) -> str:
        return gpu.uuid

    def nvmlDeviceGetMemoryInfo(self, gpu: Gpu) -> Any:
        return SimpleNamespace(total=gpu.memory_gb << 30)

    def nvmlDeviceGetMigMode(self, gpu: Gpu) -> list[int]:
        if not gpu.mig:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return [1, 1]

    def nvmlDeviceGetMaxMigDeviceCount(self, gpu: Gpu) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, gpu: Gpu, number: int) -> Gpu:
        if number >= len(gpu.mig):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return gpu.mig[number]

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: Gpu) -> list[Any]:
        if gpu.fault:
            raise pynvml.NVMLError(gpu.fault)
        return [SimpleNamespace(pid=pid, usedGpuMemory=1 << 30) for pid in gpu.compute]

    def nvmlDeviceGetMPSComputeRunningProcesses(self, gpu: Gpu) -> list[Any]:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    @property
    def nvmlDeviceGetGraphicsRunningProcesses(self) -> Callable[[Gpu], list[Any]]:
        return self._graphics

    @staticmethod
    def _graphics(gpu: Gpu) -> list[Any]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in gpu.graphics.items()]


def two_gpus() -> tuple[Gpu, Gpu]:
    return Gpu("NVIDIA H100 80GB HBM3", "GPU-aaaa"), Gpu("NVIDIA H100 80GB HBM3", "GPU-bbbb")


def detect(nvml: Any, tmp_path: Path, environ: dict[str, str] | None = None) -> Devices:
    return Devices(InventorySettings(), nvml=nvml, kfd=tmp_path / "no-kfd", environ=environ or {})


def test_the_settings_stand_in_for_the_machine() -> None:
    settings = InventorySettings(
        devices=[DeviceSetting(id=f"cuda:{index}") for index in range(8)], cpus=64, memory_mb=1 << 20
    )
    devices = Devices(settings, nvml=Nvml(*two_gpus()))
    assert [device.device_id for device in devices.inventory.devices] == [f"cuda:{n}" for n in range(8)]
    assert (devices.inventory.cpus, devices.inventory.memory_mb) == (64, 1 << 20)
    assert devices.worker_env(["cuda:3", "cuda:1"])["CUDA_VISIBLE_DEVICES"] == "3,1"
    assert asyncio.run(devices.foreign_processes("cuda:3", set())) == []


def test_what_the_settings_leave_out_is_still_detected() -> None:
    inventory = Devices(NO_GPUS).inventory
    assert inventory.devices == ()
    assert inventory.cpus == read_cpus() >= 1
    assert inventory.memory_mb == read_memory_mb() > 0


def test_this_machine_can_be_asked_whatever_it_has() -> None:
    first, second = (Devices(InventorySettings(), environ=os.environ) for _ in range(2))
    assert first.inventory == second.inventory


def test_a_machine_without_a_driver_has_no_gpus_and_that_is_no_warning(tmp_path: Path) -> None:
    for absent in (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED):
        devices = detect(Nvml(fault=absent), tmp_path)
        assert (devices.inventory.devices, devices.warnings) == ((), ())


def test_a_driver_that_fails_is_a_warning_in_words_and_not_the_end(tmp_path: Path) -> None:
    devices = detect(Nvml(fault=pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH), tmp_path)
    assert devices.inventory.devices == ()
    assert "NVIDIA GPUs cannot be used" in devices.warnings[0]
    assert "nvidia-smi" in devices.warnings[0]


def test_gpus_are_shown_by_uuid_so_that_a_renumbering_changes_nothing(tmp_path: Path) -> None:
    devices = detect(Nvml(*two_gpus()), tmp_path)
    assert [(device.device_id, device.memory_mb) for device in devices.inventory.devices] == [
        ("cuda:0", 81920),
        ("cuda:1", 81920),
    ]
    assert devices.worker_env(["cuda:1"]) == {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "GPU-bbbb",
        "ROCR_VISIBLE_DEVICES": "",
        "HIP_VISIBLE_DEVICES": "",
    }


def test_a_lost_gpu_leaves_the_numbers_of_the_others_alone(tmp_path: Path) -> None:
    first, second = two_gpus()
    first.fault = pynvml.NVML_ERROR_GPU_IS_LOST
    devices = detect(Nvml(first, second), tmp_path)
    assert [(device.device_id, device.uuid) for device in devices.inventory.devices] == [
        ("cuda:1", "GPU-bbbb")
    ]
    assert "GPU 0 cannot be used" in devices.warnings[0]


def test_a_split_gpu_is_its_parts(tmp_path: Path) -> None:
    whole = Gpu("NVIDIA A100", "GPU-cccc")
    whole.mig = [Gpu("NVIDIA A100 MIG 3g.20gb", f"MIG-{n}", 20) for n in range(2)]
    found = detect(Nvml(whole, Gpu("NVIDIA A100", "GPU-dddd")), tmp_path).inventory.devices
    assert [(device.device_id, device.uuid) for device in found] == [
        ("cuda:0", "MIG-0"),
        ("cuda:1", "MIG-1"),
        ("cuda:2", "GPU-dddd"),
    ]


@pytest.mark.parametrize(
    ("variable", "shown"),
    [
        (None, ["cuda:0", "cuda:1"]),
        ("1", ["cuda:1"]),
        ("GPU-b", ["cuda:1"]),
        ("1,0", ["cuda:1", "cuda:0"]),
        ("0,7,1", ["cuda:0"]),
        ("", []),
        ("-1", []),
    ],
)
def test_what_is_hidden_from_the_daemon_is_not_handed_out(
    variable: str | None, shown: list[str], tmp_path: Path
) -> None:
    environ = {} if variable is None else {"CUDA_VISIBLE_DEVICES": variable}
    inventory = detect(Nvml(*two_gpus()), tmp_path, environ).inventory
    assert [device.device_id for device in inventory.devices] == shown


def test_a_run_on_the_cpu_sees_no_gpu_of_any_make(tmp_path: Path) -> None:
    env = detect(Nvml(*two_gpus()), tmp_path).worker_env([])
    assert {
        env[name] for name in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
    } == {""}


def test_an_unknown_device_is_named_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"no device 'cuda:9'; it has cuda:0, cuda:1"):
        detect(Nvml(*two_gpus()), tmp_path).worker_env(["cuda:9"])


def test_a_foreign_process_is_found_even_if_its_pid_means_nothing_here(tmp_path: Path) -> None:
    first, second = two_gpus()
    nowhere = 2**22 + 12345  # above the kernel's largest pid
    first.compute = [os.getpid(), nowhere]
    first.graphics = {
        77: 4 << 30,
        78: 200 << 20,
        79: None,
    }  # one that renders, a desktop, one that does not tell
    devices = detect(Nvml(first, second), tmp_path)
    assert asyncio.run(devices.foreign_processes("cuda:0", {os.getpid()})) == [77, nowhere]
    assert asyncio.run(devices.foreign_processes("cuda:1", set())) == []


def test_a_gpu_that_does_not_answer_stops_nothing(tmp_path: Path) -> None:
    first, second = two_gpus()
    devices = detect(Nvml(first, second), tmp_path)
    first.fault = pynvml.NVML_ERROR_GPU_IS_LOST
    assert asyncio.run(devices.foreign_processes("cuda:0", set())) == []
    assert [device.device_id for device in detect(Nvml(first, second), tmp_path).inventory.devices] == [
        "cuda:1"
    ]


def kfd_tree(root: Path) -> Path:
    """The topology of a machine with one CPU and two MI250 dies, as the kernel writes it."""
    bank = "heap_type {}\nsize_in_bytes {}\nflags 0\nwidth 4096\nmem_clk_max 1600\n"
    for number, gpu_id in enumerate((0, 4321, 8765)):
        node = root / "topology" / "nodes" / str(number)
        (node / "mem_banks" / "0").mkdir(parents=True)
        simds = 440 if gpu_id else 0
        unique = 0x8D2E3F4A5B6C7D80 + number if number == 1 else 0
        (node / "properties").write_text(
            f"cpu_cores_count {0 if gpu_id else 64}\nsimd_count {simds}\ngfx_target_version 90010\nunique_id {unique}\n"
        )
        (node / "gpu_id").write_text(f"{gpu_id}\n")
        (node / "name").write_text("aldebaran\n" if gpu_id else "\n")
        (node / "mem_banks" / "0" / "properties").write_text(bank.format(1 if gpu_id else 0, 68702699520))
    return root


def test_rocm_gpus_are_those_of_the_kernels_topology(tmp_path: Path) -> None:
    devices = Devices(InventorySettings(), nvml=Nvml(), kfd=kfd_tree(tmp_path))
    assert [(gpu.device_id, gpu.name, gpu.memory_mb, gpu.uuid) for gpu in devices.inventory.devices] == [
        ("rocm:0", "aldebaran", 65520, "GPU-8d2e3f4a5b6c7d81"),
        ("rocm:1", "aldebaran", 65520, ""),
    ]
    env = devices.worker_env(["rocm:1"])
    # HIP counts within what ROCr shows: its only device is number 0.
    assert (env["ROCR_VISIBLE_DEVICES"], env["HIP_VISIBLE_DEVICES"]) == ("1", "0")
    assert env["CUDA_VISIBLE_DEVICES"] == ""


def test_who_holds_memory_of_a_rocm_gpu_is_foreign(tmp_path: Path) -> None:
    kfd = kfd_tree(tmp_path)
    for pid, used in ((500, 1 << 30), (501, 0), (502, 4096)):
        (kfd / "proc" / str(pid)).mkdir(parents=True)
        (kfd / "proc" / str(pid) / "vram_4321").write_text(f"{used}\n")
    devices = Devices(InventorySettings(), nvml=Nvml(), kfd=kfd)
    assert asyncio.run(devices.foreign_processes("rocm:0", {502})) == [500]
    assert asyncio.run(devices.foreign_processes("rocm:1", set())) == []


def test_a_damaged_node_is_a_warning_and_the_others_stay(tmp_path: Path) -> None:
    kfd = kfd_tree(tmp_path)
    (kfd / "topology" / "nodes" / "1" / "gpu_id").write_text("what\n")
    warnings: list[str] = []
    assert [gpu.kfd_id for gpu in read_rocm(kfd, warnings)] == [8765]
    assert "node 1 cannot be read" in warnings[0]
    assert parse_memory_bank("heap_type 0\nsize_in_bytes 1048576\n") == 0


def test_the_tightest_cgroup_above_counts(tmp_path: Path) -> None:
    own = tmp_path / "cgroup"
    own.write_text("0::/slice/unit\n")
    unit = tmp_path / "fs" / "slice" / "unit"
    unit.mkdir(parents=True)
    (unit / "cpu.max").write_text("max 100000\n")
    (unit / "memory.max").write_text(f"{8 << 30}\n")
    (unit.parent / "cpu.max").write_text("150000 100000\n")
    (unit.parent / "memory.max").write_text("max\n")
    assert read_limits(own, tmp_path / "fs") == Limits(cpus=1.5, memory_bytes=8 << 30)
    assert read_cpus(own, tmp_path / "fs") == 1
    (unit / "memory.max").write_text(f"{64 << 20}\n")
    assert read_memory_mb(own, tmp_path / "fs") == 64


def test_cgroups_of_version_1_count_too(tmp_path: Path) -> None:
    own = tmp_path / "cgroup"
    own.write_text("4:memory:/docker/abc\n1:cpu,cpuacct:/docker/abc\n0::/\n")
    root = tmp_path / "fs"  # in a container the path is the host's, and only the root is there
    for controller in ("cpu", "memory"):
        (root / controller).mkdir(parents=True)
    (root / "cpu" / "cpu.cfs_quota_us").write_text("400000\n")
    (root / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    (root / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert read_limits(own, root) == Limits(cpus=4.0, memory_bytes=None)
    (root / "cpu" / "cpu.cfs_quota_us").write_text("-1\n")
    assert read_limits(own, root) == Limits()
    assert read_limits(tmp_path / "none", root) == Limits()


INVENTORY = Inventory(devices=(), cpus=2, memory_mb=1000)


def test_the_report_names_the_packages_of_the_workers_own_interpreter() -> None:
    report = EnvironmentReports(INVENTORY, environ={"OMP_NUM_THREADS": "4", "HOME": "/root"})
    found = report.environment(sys.executable)
    assert f"pytest=={pytest.__version__}" in found["packages"]
    assert found["python"]["version"] == sys.version.split()[0]
    assert found["variables"] == {"OMP_NUM_THREADS": "4"}
    assert found["cpus"] == 2


def test_an_interpreter_is_asked_once_and_again_when_its_packages_change(tmp_path: Path) -> None:
    count, site = tmp_path / "count", tmp_path / "site"
    site.mkdir()
    python = tmp_path / "python"
    answer = json.dumps({"packages": ["a==1"], "paths": [str(site)]})
    python.write_text(f"#!/bin/sh\necho x >> {count}\necho '{answer}'\n")
    python.chmod(0o755)
    reports = EnvironmentReports(INVENTORY)
    assert reports.environment(str(python)) == reports.environment(str(python))
    assert count.read_text() == "x\n"
    os.utime(site, (1, 1))
    reports.environment(str(python))
    assert count.read_text() == "x\nx\n"


def test_an_interpreter_that_is_gone_is_told_in_the_report() -> None:
    found = EnvironmentReports(INVENTORY).environment("/nowhere/python")
    assert "did not answer" in found["python"]["error"]
    assert found["packages"] == []


def test_no_secret_gets_into_a_report() -> None:
    environ = {
        "TORCH_HUB_TOKEN": "t",
        "NVIDIA_API_KEY": "k",
        "CUDA_HOME": "/cuda",
        "AWS_SECRET_ACCESS_KEY": "a",
    }
    assert relevant_variables(environ) == {"CUDA_HOME": "/cuda"}


def test_the_report_says_where_the_code_came_from_and_keeps_the_patch(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path / "snapshots")
    with store.adding():
        diff = store.put_bytes(b"--- a/x\n+++ b/x\n").sha256
        git = GitState(commit="c" * 40, branch="main", is_dirty=True, diff=diff)
        digest = store.put_manifest(Manifest(git=git))
    run = RunRecord(
        run_id="r",
        digest="d",
        state=RunState.PENDING,
        cause=QUEUED,
        config={},
        submitted_ms=0,
        updated_ms=0,
        snapshot=digest,
    )
    report = tmp_path / "run" / "environment.json"
    for _ in range(2):
        write_report(run, report, environment={"packages": []}, store=store.root)
    document = json.loads(report.read_text())
    assert document["code"]["git"]["commit"] == "c" * 40
    assert (report.parent / "code.patch").read_bytes() == b"--- a/x\n+++ b/x\n"
    assert sorted(path.name for path in report.parent.iterdir()) == ["code.patch", "environment.json"]


def test_a_lost_snapshot_is_told_in_the_report(tmp_path: Path) -> None:
    run = RunRecord(
        run_id="r",
        digest="d",
        state=RunState.PENDING,
        cause=QUEUED,
        config={},
        submitted_ms=0,
        updated_ms=0,
        snapshot="0" * 64,
    )
    write_report(run, tmp_path / "environment.json", environment={}, store=tmp_path / "none")
    assert "no snapshot" in json.loads((tmp_path / "environment.json").read_text())["code"]["error"]
