"""What torch can do on this machine: its build, the GPUs and their processes, collectives."""

import importlib
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gen_worker.contract.nvml import load_nvml
from gen_worker.contract.sizes import show_bytes
from gen_worker.tools.doctor.finding import Finding, Level

NO_DEVICES: Mapping[str, int] = MappingProxyType({})


def check_torch(expected: Mapping[str, int] = NO_DEVICES) -> Iterator[Finding]:
    """The build, the devices and their processes. `expected`: GPUs that the daemon found, such as {"cuda": 2}."""
    began = time.perf_counter()
    try:
        torch: Any = importlib.import_module("torch")
    except ModuleNotFoundError as error:
        if error.name == "torch":
            remedy = f"run `{sys.executable} -m pip install 'trn[torch]'` if your trainer class needs it"
            yield Finding(check="torch", level=Level.NOTE, message="torch is not installed", remedy=remedy)
            yield from check_devices(None)
            return
        yield _broken_torch(error)
        return
    except Exception as error:
        yield _broken_torch(error)
        return
    cuda, hip = torch.version.cuda, torch.version.hip
    build = f"CUDA {cuda}" if cuda else f"ROCm {hip}" if hip else "CPU only"
    import_s = round(time.perf_counter() - began, 2)
    facts = {"version": str(torch.__version__), "cuda": cuda, "hip": hip, "import_s": import_s}
    yield Finding(
        check="torch",
        message=f"torch {torch.__version__} ({build}), imported in {import_s} s",
        facts={**facts, "num_threads": torch.get_num_threads()},
    )
    yield from check_devices(torch)
    yield from check_expected(torch, expected)
    yield from check_collectives(torch)


def check_expected(torch: Any, expected: Mapping[str, int]) -> Iterator[Finding]:
    """Whether this torch can use the GPUs that the daemon found."""
    for kind, count in expected.items():
        word, version = ("ROCm", torch.version.hip) if kind == "rocm" else ("CUDA", torch.version.cuda)
        usable = torch.cuda.device_count() if version and torch.cuda.is_available() else 0
        gpus = f"{count} {word} GPU{'' if count == 1 else 's'}"
        if usable:
            yield Finding(check=kind, message=f"{gpus}, torch can use {usable}", facts={"num_usable": usable})
            continue
        why = f"cannot use {'it' if count == 1 else 'them'}" if version else f"is built without {word}"
        remedy = (
            f"check that the driver is new enough for {word} {version}, and that no variable hides the devices"
            if version
            else f"install a build of torch with {word} for {sys.executable}"
        )
        yield Finding(
            check=kind,
            level=Level.ERROR,
            message=f"this machine has {gpus}, but torch {torch.__version__} {why}",
            remedy=remedy,
            facts={"num_usable": 0},
        )


def _broken_torch(error: Exception) -> Finding:
    return Finding(
        check="torch",
        level=Level.ERROR,
        message=f"torch is installed but cannot be imported: {type(error).__name__}: {error}",
        remedy=f"install it again: `{sys.executable} -m pip install --force-reinstall 'trn[torch]'`",
    )


def check_devices(torch: Any, nvml: Any = None) -> Iterator[Finding]:
    """GPUs of the driver, against those that torch can use. `nvml` replaces pynvml in tests."""
    nvml = nvml or load_nvml()
    listed: list[dict[str, Any]] = []
    if nvml is not None:
        try:
            nvml.nvmlInit()
            listed = [_describe_nvidia(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
        except nvml.NVMLError as error:
            yield Finding(
                check="driver",
                level=Level.ERROR,
                message=f"the NVIDIA driver does not answer: {error}",
                remedy="run `nvidia-smi`; reload the driver, or restart the machine",
            )
            return
    elif Path("/dev/kfd").exists() and torch is not None and torch.version.hip:
        listed = [_describe_rocm(torch, index) for index in range(torch.cuda.device_count())]
    usable = 0 if torch is None or not torch.cuda.is_available() else torch.cuda.device_count()
    if not listed and not usable:
        is_built = torch is not None and bool(torch.version.cuda or torch.version.hip)
        yield Finding(
            check="devices",
            level=Level.NOTE,
            message="no GPU: runs train on the CPU",
            remedy=f"{'' if is_built else 'install a build of torch with CUDA or ROCm, and '}"
            f"{'install ' if is_built else ''}the GPU's driver, if this machine has one",
            facts={"devices": []},
        )
        return
    if listed and torch is not None and usable < len(listed):
        yield Finding(
            check="driver",
            level=Level.ERROR if not usable else Level.WARNING,
            message=f"the driver has {len(listed)} GPUs, torch {torch.__version__} can use {usable}",
            remedy="install a torch build for this driver, and check CUDA_VISIBLE_DEVICES",
            facts={"num_listed": len(listed), "num_usable": usable},
        )
    for device in listed:
        total, free, users = device["memory_bytes"], device["free_bytes"], device["processes"]
        words = f"{device['name']}: {show_bytes(free)} of {show_bytes(total)} free"
        pids = ", ".join(str(user["pid"]) for user in users)
        yield Finding(
            check=device["device_id"],
            level=Level.WARNING if users else Level.OK,
            message=f"{words}, used by process {pids}" if users else words,
            remedy=f"stop process {pids}, or do not use this device" if users else "",
            facts=device,
        )


def check_collectives(torch: Any) -> Iterator[Finding]:
    """How several processes of one run communicate."""
    if not torch.distributed.is_available():
        yield Finding(
            check="collectives",
            level=Level.WARNING,
            message="this torch has no torch.distributed: runs of several processes cannot start",
            remedy="install a build of torch with it",
        )
        return
    has_nccl = bool(torch.distributed.is_nccl_available())
    has_gloo = bool(torch.distributed.is_gloo_available())
    version = (
        ".".join(map(str, torch.cuda.nccl.version())) if has_nccl and torch.cuda.is_available() else None
    )
    is_wanting = torch.cuda.is_available() and torch.cuda.device_count() > 1 and not has_nccl
    names = [name for name, has in (("NCCL", has_nccl), ("gloo", has_gloo)) if has]
    yield Finding(
        check="collectives",
        level=Level.ERROR if is_wanting else Level.OK,
        message=f"{' and '.join(names) or 'none'} available{f', NCCL {version}' if version else ''}",
        remedy="install a build of torch with NCCL: several GPUs cannot train together" if is_wanting else "",
        facts={"nccl": has_nccl, "nccl_version": version, "gloo": has_gloo},
    )


def _describe_nvidia(nvml: Any, index: int) -> dict[str, Any]:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    name = nvml.nvmlDeviceGetName(handle)
    try:
        users = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except nvml.NVMLError:
        users = []  # not every GPU reports them
    return {
        "device_id": f"cuda:{index}",
        "name": name.decode(errors="replace") if isinstance(name, bytes) else name,
        "memory_bytes": int(memory.total),
        "free_bytes": int(memory.free),
        "processes": [{"pid": user.pid, "memory_bytes": user.usedGpuMemory or 0} for user in users],
    }


def _describe_rocm(torch: Any, index: int) -> dict[str, Any]:
    free, total = torch.cuda.mem_get_info(index)
    name = torch.cuda.get_device_name(index)
    return {
        "device_id": f"rocm:{index}",
        "name": name,
        "memory_bytes": total,
        "free_bytes": free,
        "processes": [],
    }
