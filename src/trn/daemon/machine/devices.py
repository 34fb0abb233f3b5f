"""The GPUs, CPUs and memory of this machine, and the environment variables that give a worker its GPUs."""

import asyncio
import logging
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gen_worker.contract.nvml import load_nvml
from trn.core.errors import InvalidRequestError
from trn.core.settings import InventorySettings
from trn.daemon.machine.process_limits import read_cpus, read_memory_mb

logger = logging.getLogger(__name__)

CUDA, ROCM = "cuda", "rocm"
KFD = Path("/sys/class/kfd/kfd")
# A desktop may use this much of a GPU; a process that uses more makes the GPU busy.
DISPLAY_MB = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A GPU. Its index is the driver's, in PCI bus order."""

    device_id: str  # "cuda:0"
    kind: str  # CUDA or ROCM
    index: int
    name: str = ""
    memory_mb: int = 0
    uuid: str = ""  # for CUDA_VISIBLE_DEVICES; empty if it is not known
    kfd_id: int = 0  # ROCm's number
    is_declared: bool = False  # by the settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    devices: tuple[Device, ...]
    cpus: int
    memory_mb: int


class Devices:
    """The inventory: declared in the settings, else detected once."""

    def __init__(
        self,
        settings: InventorySettings,
        *,
        environ: Mapping[str, str] = MappingProxyType({}),
        nvml: Any = None,
        kfd: Path = KFD,
    ) -> None:
        """GPUs that `environ`, the daemon's own, hides are not used. `nvml` replaces pynvml in tests."""
        self._kfd = kfd
        self._nvml: Any = None  # once it is initialised
        self._lock = threading.Lock()  # of NVML's handles: one call at a time
        warnings: list[str] = []
        if settings.devices is not None:
            devices = [
                Device(
                    device_id=device.id,
                    kind=device.id.partition(":")[0],
                    index=int(device.id.partition(":")[2]),
                    name=device.name,
                    memory_mb=device.memory_mb,
                    is_declared=True,
                )
                for device in settings.devices
            ]
        else:
            cuda = self._detect_nvidia(nvml or load_nvml(), warnings)
            devices = visible(cuda, environ.get("CUDA_VISIBLE_DEVICES"))
            devices += visible(read_rocm(kfd, warnings), environ.get("ROCR_VISIBLE_DEVICES"))
        self.inventory = Inventory(
            devices=tuple(devices),
            cpus=settings.cpus if settings.cpus is not None else read_cpus(),
            memory_mb=settings.memory_mb if settings.memory_mb is not None else read_memory_mb(),
        )
        self.warnings = tuple(warnings)
        for warning in warnings:
            logger.warning("%s", warning)

    def worker_env(self, device_ids: Iterable[str]) -> dict[str, str]:
        """The variables that show a worker these GPUs and no others."""
        wanted = [self._device(device_id) for device_id in device_ids]
        rocm = [device for device in wanted if device.kind == ROCM]
        return {
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "CUDA_VISIBLE_DEVICES": _list(device for device in wanted if device.kind == CUDA),
            # HIP counts the GPUs that ROCr shows.
            "ROCR_VISIBLE_DEVICES": _list(rocm),
            "HIP_VISIBLE_DEVICES": ",".join(str(place) for place in range(len(rocm))),
        }

    async def foreign_processes(self, device_id: str, own_pids: set[int]) -> list[int]:
        """Other processes that use the GPU. A pid may be from another namespace."""
        device = self._device(device_id)
        if device.is_declared:
            return []
        ask = self._nvidia_pids if device.kind == CUDA else self._rocm_pids
        return sorted(await asyncio.to_thread(ask, device) - own_pids)

    def _device(self, device_id: str) -> Device:
        for device in self.inventory.devices:
            if device.device_id == device_id:
                return device
        has = ", ".join(device.device_id for device in self.inventory.devices) or "none"
        raise InvalidRequestError(f"this machine has no device {device_id!r}; it has {has}")

    def _detect_nvidia(self, nvml: Any, warnings: list[str]) -> list[Device]:
        if nvml is None:
            return []
        try:
            nvml.nvmlInit()
        except (nvml.NVMLError_LibraryNotFound, nvml.NVMLError_DriverNotLoaded):
            return []
        except nvml.NVMLError as fault:
            warnings.append(f"NVIDIA GPUs cannot be used: {fault}; check with nvidia-smi")
            return []
        self._nvml = nvml
        return read_nvidia(nvml, warnings)

    def _nvidia_pids(self, device: Device) -> set[int]:
        with self._lock:
            if self._nvml is None:
                return set()
            try:
                return _nvidia_users(self._nvml, device)
            except self._nvml.NVMLError as fault:
                logger.warning("processes on %s cannot be listed: %s", device.device_id, fault)
                return set()

    def _rocm_pids(self, device: Device) -> set[int]:
        users = set()
        for path in self._kfd.glob(f"proc/*/vram_{device.kfd_id}"):
            try:
                if int(path.read_text()) > 0:
                    users.add(int(path.parent.name))
            except (OSError, ValueError):
                continue  # the process exited
        return users


def visible(devices: list[Device], variable: str | None) -> list[Device]:
    """The GPUs in CUDA_VISIBLE_DEVICES or ROCR_VISIBLE_DEVICES, up to the first invalid entry."""
    if variable is None:
        return devices
    shown: list[Device] = []
    for word in variable.split(","):
        name = word.strip()
        found = [
            device
            for device in devices
            if name == str(device.index) or (not name.isdigit() and name and device.uuid.startswith(name))
        ]
        if len(found) != 1:
            break
        if found[0] not in shown:
            shown.append(found[0])
    return shown


def read_nvidia(nvml: Any, warnings: list[str]) -> list[Device]:
    """Every GPU that NVML lists; of a GPU in MIG mode, its MIG devices."""
    devices: list[Device] = []
    number = 0
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            for part in _mig_parts(nvml, handle) or [handle]:
                devices.append(
                    Device(
                        device_id=f"{CUDA}:{number}",
                        kind=CUDA,
                        index=number,
                        name=_text(nvml.nvmlDeviceGetName(part)),
                        memory_mb=nvml.nvmlDeviceGetMemoryInfo(part).total >> 20,
                        uuid=_text(nvml.nvmlDeviceGetUUID(part)),
                    )
                )
                number += 1
        except nvml.NVMLError as fault:
            number += 1  # the others keep their numbers
            warnings.append(f"NVIDIA GPU {index} cannot be used: {fault}; check with nvidia-smi")
    return devices


def _mig_parts(nvml: Any, handle: Any) -> list[Any]:
    try:
        if nvml.nvmlDeviceGetMigMode(handle)[0] != 1:
            return []
    except nvml.NVMLError:
        return []  # no MIG
    parts = []
    for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            parts.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number))
        except nvml.NVMLError_NotFound:
            continue
    return parts


def _nvidia_users(nvml: Any, device: Device) -> set[int]:
    handle = nvml.nvmlDeviceGetHandleByUUID(device.uuid)
    users = {process.pid for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)}
    for ask in (nvml.nvmlDeviceGetMPSComputeRunningProcesses, nvml.nvmlDeviceGetGraphicsRunningProcesses):
        is_drawing = ask is nvml.nvmlDeviceGetGraphicsRunningProcesses
        try:
            found = ask(handle)
        except nvml.NVMLError:
            continue  # not supported by this GPU
        users |= {
            process.pid
            for process in found
            if not is_drawing or (process.usedGpuMemory or 0) >> 20 > DISPLAY_MB
        }
    return users


def read_rocm(kfd: Path, warnings: list[str]) -> list[Device]:
    """The GPUs of the kernel's compute topology, in its order, which is also the runtime's."""
    devices: list[Device] = []
    nodes = (node for node in kfd.glob("topology/nodes/*") if node.name.isdigit())
    for node in sorted(nodes, key=lambda node: int(node.name)):
        try:
            text = (node / "properties").read_text()
            kfd_id = int((node / "gpu_id").read_text())
            name = (node / "name").read_text().strip()
            memory_mb = sum(
                parse_memory_bank(path.read_text()) for path in (node / "mem_banks").glob("*/properties")
            )
        except PermissionError:
            continue  # not given to this container
        except (OSError, ValueError) as fault:
            warnings.append(f"ROCm node {node.name} cannot be read: {fault}")
            continue
        values = parse_kfd_properties(text)
        if not kfd_id or not values.get("simd_count"):
            continue  # a CPU
        unique_id = values.get("unique_id", 0)
        devices.append(
            Device(
                device_id=f"{ROCM}:{len(devices)}",
                kind=ROCM,
                index=len(devices),
                name=name or f"gfx target {values.get('gfx_target_version', 0)}",
                memory_mb=memory_mb,
                uuid=f"GPU-{unique_id:016x}" if unique_id else "",
                kfd_id=kfd_id,
            )
        )
    return devices


def parse_kfd_properties(text: str) -> dict[str, int]:
    """Lines `name value`; values that are not numbers are skipped."""
    words = (line.split() for line in text.splitlines())
    return {pair[0]: int(pair[1]) for pair in words if len(pair) == 2 and pair[1].isdigit()}


def parse_memory_bank(text: str) -> int:
    """The size of a memory bank on the GPU (heap type 1 or 2) in MB; 0 for others."""
    values = parse_kfd_properties(text)
    return values.get("size_in_bytes", 0) >> 20 if values.get("heap_type") in (1, 2) else 0


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _list(devices: Iterable[Device]) -> str:
    return ",".join(device.uuid or str(device.index) for device in devices)
