"""Who decides that a run may start on a GPU: what is not ready waits with the reason, and holds up nobody else."""

import asyncio
import json
import os
import stat
import sys
import sysconfig
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from daemon_process import DEADLINE_S, DaemonProcess, end_everything
from dispatcher_world import World, in_world
from launched_run import wait_until

import trn
from gen_worker.contract.process_identity import is_process_alive
from trn.cli.reading.explanation import explain
from trn.core.causes import Cause
from trn.core.home import Home
from trn.core.runs import RunState
from trn.daemon.dispatch.readiness import DoctorReadiness
from trn.daemon.machine.devices import CUDA, ROCM, Inventory
from trn.daemon.machine.doctor_reports import DoctorReport, DoctorReports, Finding
from trn.daemon.machine.environment_report import EnvironmentReports
from trn.registry.reader import RegistryReader

OURS = sys.executable
BAD = Cause(
    id="gpu-not-usable",
    fault="machine",
    waits_for=("doctor",),
    values={"check": "torch", "message": "torch is built without CUDA", "remedy": "install another"},
)


def test_a_run_on_a_gpu_that_is_not_ready_waits_with_the_reason_and_starts_once_it_is(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        world.readiness.obstacles[OURS] = BAD
        async with world.daemon():
            world.submit("gpu", resources={"gpus": 1})
            world.submit("cpu", resources={"devices": ["cpu"]})
            [cpu] = await world.until_ended("cpu")
            assert cpu.state is RunState.COMPLETED
            await world.until(lambda: world.registry.get("gpu").cause == BAD)
            assert world.registry.get("gpu").attempt == 0
            world.readiness.obstacles.clear()  # the sweep asks again
            [gpu] = await world.until_ended("gpu")
        assert gpu.state is RunState.COMPLETED
        assert (OURS, CUDA, 1) in world.readiness.questions
        world.check_nothing_is_held()

    in_world(tmp_path, story, is_detected=True)


def test_runs_of_an_interpreter_that_is_not_ready_do_not_hide_those_of_another(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        for bad in ("a", "b", "c"):
            world.readiness.obstacles[f"/bad/{bad}"] = BAD
            for number in range(70):  # more than a round reads of one kind
                world.submit(f"{bad}-{number:02}", resources={"gpus": 1}, interpreter=f"/bad/{bad}")
        world.submit("good", resources={"gpus": 1}, interpreter=OURS)
        async with world.daemon():
            [good] = await world.until_ended("good")
            assert good.state is RunState.COMPLETED
            await world.until(lambda: world.registry.get("a-00").cause == BAD)
            assert world.registry.get("a-69").attempt == 0
        world.check_nothing_is_held()

    in_world(tmp_path, story, is_detected=True)


def test_a_round_asks_once_for_each_question_however_many_runs_wait(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        world.readiness.obstacles[OURS] = BAD
        for number in range(40):
            world.submit(f"run-{number:02}", resources={"gpus": 1})
        async with world.daemon():
            await world.until(lambda: world.registry.get("run-39").cause == BAD)
        num_rounds = len(world.readiness.questions)
        assert set(world.readiness.questions) == {(OURS, CUDA, 1)}
        assert num_rounds < 40 * 2  # each run would have asked in each round

    in_world(tmp_path, story, is_detected=True)


def test_devices_that_the_operator_names_are_trusted(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        world.readiness.obstacles[OURS] = BAD
        async with world.daemon():
            world.submit("one", resources={"gpus": 2})
            [run] = await world.until_ended("one")
        assert run.state is RunState.COMPLETED
        assert world.readiness.questions == []

    in_world(tmp_path, story)


def test_a_kind_of_gpu_that_is_not_ready_leaves_the_other_kind(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        devices = list(world.devices.inventory.devices)
        devices[1] = replace(devices[1], device_id="rocm:0", kind=ROCM, index=0)
        world.devices.inventory = replace(world.devices.inventory, devices=tuple(devices))
        world.registry.set_slots(["cuda:0", "rocm:0"]).result()
        world.readiness.obstacles[OURS, CUDA] = BAD
        async with world.daemon():
            world.submit("any", resources={"gpus": 1})
            world.submit("named", resources={"devices": ["cuda:0"]})
            [run] = await world.until_ended("any")
            assert run.devices == ("rocm:0",)
            await world.until(lambda: world.registry.get("named").cause == BAD)

    in_world(tmp_path, story, is_detected=True)


def reports_with(tmp_path: Path, *findings: Finding, error: str = "") -> DoctorReports:
    reports = DoctorReports(home=Home(tmp_path), expected={"cuda": 2}, environ={})
    now_ms = reports._now_ms()
    reports._known[OURS] = DoctorReport(
        python=OURS, boot_id=reports._boot_id, asked_ms=now_ms, findings=list(findings), error=error
    )
    return reports


def test_only_errors_about_torch_and_gpus_keep_a_run_from_a_gpu(tmp_path: Path) -> None:
    def obstacle(*findings: Finding, kind: str = CUDA, num_gpus: int = 1, error: str = "") -> str:
        ready = DoctorReadiness(reports_with(tmp_path, *findings, error=error))
        found = ready.obstacle(OURS, kind=kind, num_gpus=num_gpus)
        return "" if found is None else f"{found.id}: {found.values['message']}: {found.values['remedy']}"

    def finding(check: str, level: str = "error") -> Finding:
        return Finding(check=check, level=level, message=f"{check} is broken", remedy="mend it")

    assert obstacle() == ""
    assert obstacle(finding("disk"), finding("limits", "warning"), finding("torch", "note")) == ""
    assert obstacle(finding("driver"), finding("cuda")) == "gpu-not-usable: cuda is broken: mend it"
    assert obstacle(finding("torch"), kind=ROCM) == "gpu-not-usable: torch is broken: mend it"
    assert obstacle(finding("cuda"), kind=ROCM) == ""
    assert obstacle(finding("collectives")) == ""
    assert "collectives is broken" in obstacle(finding("collectives"), num_gpus=2)
    assert obstacle(error="did not answer") == ""  # its worker will say what is wrong


async def answer(reports: DoctorReports) -> int:
    """Until nobody is being asked; how many reports came."""
    came: list[DoctorReport] = []
    reports.on_news.append(came.append)
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(reports.run())
        async with asyncio.timeout(120):
            while reports._requests:  # noqa: ASYNC110 - the last is told before it is done
                await asyncio.sleep(0.005)
        asking.cancel()
    reports.on_news.remove(came.append)
    return len(came)


def test_the_doctor_is_asked_once_and_again_when_packages_change_and_the_next_daemon_knows(
    tmp_path: Path,
) -> None:
    home = Home(tmp_path)

    async def main() -> None:
        reports = DoctorReports(home=home, expected={"cuda": 1}, environ=dict(os.environ), delay_s=0)
        ready = DoctorReadiness(reports)
        asked = ready.obstacle(OURS, kind=CUDA, num_gpus=1)
        assert asked is not None
        assert asked.id == "waits-for-doctor"
        assert await answer(reports) == 1
        found = ready.obstacle(OURS, kind=CUDA, num_gpus=1)
        assert found is not None
        assert found.values["message"].startswith("this machine has 1 CUDA GPU, but torch ")
        assert "install a build of torch with CUDA" in found.values["remedy"]
        report = reports.newest(OURS)
        assert report is not None
        assert report.document["schema_version"] == "machine_report.v1"
        assert report.packages_dir == sysconfig.get_paths()["purelib"]

        reports._look_again_at.clear()
        assert reports.newest(OURS) is report
        assert await answer(reports) == 0  # its packages are as they were

        again = DoctorReports(home=home, expected={"cuda": 1}, environ={})
        assert again.newest(OURS) == report
        others = DoctorReports(home=home, expected={}, environ={})
        assert others.newest(OURS) is None  # it was asked about other GPUs

        reports._known[OURS] = changed = msgspec.structs.replace(report, packages_mark=1)
        reports._look_again_at.clear()
        assert reports.newest(OURS) is changed  # it holds until there is another
        assert await answer(reports) == 1
        assert reports._known[OURS].packages_mark == report.packages_mark

    asyncio.run(main())


def test_an_interpreter_that_gives_no_report_is_said_so_and_stops_nobody(tmp_path: Path) -> None:
    mute = tmp_path / "python"
    mute.write_text("#!/bin/sh\nexit 3\n")
    mute.chmod(stat.S_IRWXU)

    async def main() -> None:
        reports = DoctorReports(home=Home(tmp_path), expected={}, environ={}, delay_s=0)
        environments = EnvironmentReports(Inventory(devices=(), cpus=1, memory_mb=1), doctor=reports)
        path = tmp_path / "environment.json"
        path.write_text('{"doctor": null, "run_id": "one"}')
        environments._without_doctor[str(mute)] = {path: {}}
        assert reports.newest(str(mute)) is None
        assert await answer(reports) == 1
        environments._writer.shutdown(wait=True)
        document = json.loads(path.read_text())
        assert document["run_id"] == "one"
        assert "did not answer" in document["doctor"]["error"]
        assert DoctorReadiness(reports).obstacle(str(mute), kind=CUDA, num_gpus=1) is None

    asyncio.run(main())


def test_what_a_daemon_did_not_get_to_write_of_its_runs_the_next_one_completes_and_says_that_it_is_late(
    tmp_path: Path,
) -> None:
    names = ("without", "lost", "whole", "own")

    async def story(world: World) -> None:
        async with world.daemon():  # one without a doctor
            for name in names:
                world.submit(name, resources={"gpus": 0})
            await world.until_ended("without", "lost", "whole", "own")
            # Written in a thread: what is under way when the daemon ends would come after ours.
            await world.until(lambda: all(world.home.run(run_id).report.exists() for run_id in names))
        paths = {name: world.home.run(name).report for name in ("without", "lost", "whole", "own")}
        for name, path in paths.items():
            doctor = {"error": "old"} if name == "whole" else None
            path.write_text(json.dumps({"run_id": name, "doctor": doctor}))
        paths["lost"].unlink()
        reports = reports_with(tmp_path, Finding(check="torch"), error="a stand-in")
        environments = EnvironmentReports(world.devices.inventory, doctor=reports)
        environments._own = {paths["own"]}  # it is being written here
        await environments.complete(world.home, world.registry.reader, python=OURS, after_s=0)
        environments._writer.shutdown(wait=True)
        kept = {name: json.loads(path.read_text()) for name, path in paths.items()}
        assert kept["without"] == {"run_id": "without", "doctor": {"error": "a stand-in"}, "is_late": True}
        assert (kept["lost"]["run_id"], kept["lost"]["is_late"]) == ("lost", True)
        assert (kept["lost"]["doctor"], bool(kept["lost"]["packages"])) == ({"error": "a stand-in"}, True)
        assert kept["whole"] == {"run_id": "whole", "doctor": {"error": "old"}}
        assert kept["own"]["doctor"] is None

    in_world(tmp_path, story)


def test_an_interpreter_that_hangs_behind_a_wrapper_keeps_neither_the_daemon_nor_its_children(
    tmp_path: Path,
) -> None:
    wrapper, born = tmp_path / "python", tmp_path / "born"
    wrapper.write_text(f"#!/bin/sh\nsleep 1000 &\necho $! > {born}.part\nmv {born}.part {born}\nwait\n")
    wrapper.chmod(0o755)

    async def story() -> None:
        reports = DoctorReports(home=Home(tmp_path), expected={"cuda": 1}, environ=os.environ, delay_s=0)
        asking = asyncio.create_task(reports.run())
        reports.newest(str(wrapper), is_urgent=True)
        await asyncio.to_thread(wait_until, born.exists, "the child of the wrapper")
        asking.cancel()
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.wait([asking])

    asyncio.run(story())
    pid = int(born.read_text())
    wait_until(lambda: not is_process_alive(pid, None), "its end")


def test_a_doctor_that_is_cancelled_while_it_is_started_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrapper, born = tmp_path / "python", tmp_path / "born"
    wrapper.write_text(f"#!/bin/sh\nsleep 1000 &\necho $! > {born}.part\nmv {born}.part {born}\nwait\n")
    wrapper.chmod(0o755)
    start = asyncio.create_subprocess_exec

    async def story() -> None:
        is_born, is_let_go = asyncio.Event(), asyncio.Event()

        async def start_slowly(*words: Any, **more: Any) -> Any:
            process = await start(*words, **more)
            await asyncio.to_thread(wait_until, born.exists, "the child of the wrapper")
            is_born.set()
            await is_let_go.wait()
            return process

        monkeypatch.setattr(asyncio, "create_subprocess_exec", start_slowly)
        reports = DoctorReports(home=Home(tmp_path), expected={}, environ=os.environ, delay_s=0)
        asking = asyncio.create_task(reports.run())
        reports.newest(str(wrapper), is_urgent=True)
        async with asyncio.timeout(DEADLINE_S):
            await is_born.wait()
            asking.cancel()
            is_let_go.set()
            await asyncio.wait([asking])

    asyncio.run(story())
    pid = int(born.read_text())
    wait_until(lambda: not is_process_alive(pid, None), "its end")


FAKE_NVML = '''
"""A driver with one GPU."""
from types import SimpleNamespace
class NVMLError(Exception): pass
class NVMLError_LibraryNotFound(NVMLError): pass
class NVMLError_DriverNotLoaded(NVMLError): pass
class NVMLError_NotFound(NVMLError): pass
def nvmlInit(): pass
def nvmlShutdown(): pass
def nvmlDeviceGetCount(): return 1
def nvmlDeviceGetHandleByIndex(index): return index
def nvmlDeviceGetHandleByUUID(uuid): return 0
def nvmlDeviceGetName(handle): return "GPU of a test"
def nvmlDeviceGetUUID(handle): return "GPU-0"
def nvmlDeviceGetMemoryInfo(handle): return SimpleNamespace(total=24 << 30, free=24 << 30)
def nvmlDeviceGetMigMode(handle): raise NVMLError("no")
def nvmlDeviceGetComputeRunningProcesses(handle): return []
nvmlDeviceGetMPSComputeRunningProcesses = nvmlDeviceGetComputeRunningProcesses
nvmlDeviceGetGraphicsRunningProcesses = nvmlDeviceGetComputeRunningProcesses
'''


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this machine had an NVIDIA GPU: its driver's library can be loaded, and pynvml tells of one."""
    folder = tmp_path / "driver"
    folder.mkdir()
    (folder / "pynvml.py").write_text(FAKE_NVML)
    library = next(Path("/").glob("lib/*-linux-gnu/libm.so.6"), None) or next(
        Path("/").glob("lib*/libm.so.6")
    )
    (folder / "libnvidia-ml.so.1").symlink_to(library)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(folder))


@pytest.mark.usefixtures("driver")
def test_a_daemon_that_finds_a_gpu_asks_the_doctor_and_a_torch_without_cuda_keeps_the_run_waiting(
    tmp_path: Path,
) -> None:
    home = tmp_path / "home"
    daemon = DaemonProcess(home, is_bare=True)  # the doctor has a process of its own
    try:
        daemon.wait_ready()
        config: dict[str, Any] = {"trainer": "a:B", "mock_batches": [1], "resources": {"gpus": 1}}
        with trn.Client(home) as client:
            cpu = client.submit({**config, "resources": {"devices": ["cpu"]}}, base_dir=tmp_path).run
            client.wait(cpu.run_id, timeout_s=DEADLINE_S)  # nothing of it waits for the doctor
            run = client.submit(config, base_dir=tmp_path).run
            for change in client.watch(run_ids=[run.run_id]):
                if "torch" in change.reason:
                    break
        assert change.state == "PENDING"
        assert change.cause.id == "gpu-not-usable"
        assert "is built without CUDA" in change.reason
        reader = RegistryReader(Home(home).registry)
        record = reader.get(run.run_id)
        reader.close()
        said = explain(record, [], at_ms=record.submitted_ms + 1000, is_daemon_up=True)
        assert said.fault == "machine"
        assert "install a build of torch with CUDA" in said.record()["sentence"]
        assert "checked again" in said.next
        kept = Home(home).run(cpu.run_id).report
        deadline = time.monotonic() + DEADLINE_S
        while (doctor := json.loads(kept.read_text())["doctor"]) is None:  # what came before is completed
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert doctor["schema_version"] == "machine_report.v1"
    finally:
        end_everything(home)
