"""Processes that run at their own pace stop at one step, whoever is asked; of several failures the first is told."""

import random
import signal
import threading
import time
from pathlib import Path

import pytest

from gen_worker.errors import Category
from gen_worker.trainer.attempt.runtime_env import RankEnvironment
from gen_worker.trainer.contracts import Progress, StopSignal
from gen_worker.trainer.processes.distributed import TorchProcesses, own_seed
from gen_worker.trainer.processes.outcome import (
    AgentFailure,
    Outcome,
    choose_root,
    leave_agent_failures,
    leave_outcome,
    read_agent_failures,
    read_outcomes,
)
from gen_worker.trainer.processes.torchrun import build_command

torch_distributed = pytest.importorskip("torch.distributed")


class Member:
    """A rank's loop and watcher, as threads; several steps pass between two looks of the watcher."""

    def __init__(self, rank: int, world_size: int, store: object, pace: float) -> None:
        self.processes = TorchProcesses(rank=rank, world_size=world_size, _store=store, _group=None)
        self.stop, self.progress = StopSignal(), Progress()
        self.pace = pace
        self.stopped_at: int | None = None
        self.ended = threading.Event()
        self.threads = [threading.Thread(target=part, daemon=True) for part in (self.loop, self.watch)]

    def loop(self) -> None:
        stop_step = None
        step = 0
        while stop_step is None or step < stop_step:
            if self.stop.reason is not None and stop_step is None:
                stop_step = self.processes.stop_step(self.stop, self.progress)
                continue
            time.sleep(self.pace)  # the length of a step
            step += 1
            self.progress.step = step
        self.stopped_at = step
        self.ended.set()

    def watch(self) -> None:
        while not self.ended.is_set():
            self.processes.watch(self.stop, self.progress)
            self.ended.wait(0.002)


@pytest.mark.parametrize("seed", range(6))
def test_all_processes_stop_at_the_same_step_without_waiting_for_each_other_before(seed: int) -> None:
    chance = random.Random(seed)
    store = torch_distributed.HashStore()
    members = [Member(rank, 4, store, pace=chance.choice([0.0002, 0.0005, 0.001])) for rank in range(4)]
    for member in members:
        for thread in member.threads:
            thread.start()
    asked = chance.choice(members)
    while asked.progress.step < 5:
        time.sleep(0.001)
    asked.stop.request("cancelled by SIGTERM")
    if chance.random() < 0.5:  # two at once, with different reasons
        chance.choice(members).stop.request("the time limit was reached", "timeout")
    for member in members:
        for thread in member.threads:
            thread.join(60)
            assert not thread.is_alive()
    assert len({member.stopped_at for member in members}) == 1
    assert {member.stop.reason is not None for member in members} == {True}


def outcome(rank: int, error: str, at_ns: int, cause: str = "") -> Outcome:
    return Outcome(rank=rank, category=Category.TRAIN_STEP, error=error, cause=cause, at_ns=at_ns)


def test_the_root_of_a_failure_is_the_first_that_does_not_complain_of_another() -> None:
    lost = outcome(0, "RuntimeError: Connection closed by peer", 5, "connection")
    raised = outcome(3, "ValueError: no", 9)
    later = outcome(2, "KeyError: 'x'", 12)
    root = choose_root({0: lost, 3: raised, 2: later}, [])
    assert root is not None
    assert (root.rank, root.error) == (3, "ValueError: no")
    alone = choose_root({0: lost}, [])
    assert alone is not None
    assert (alone.rank, alone.cause) == (0, "connection")


def test_a_process_that_was_killed_is_the_root_though_it_left_no_word() -> None:
    lost = outcome(0, "RuntimeError: Connection reset", 5, "connection")
    ended = [
        AgentFailure(rank=2, exit_code=-signal.SIGTERM, at_s=3.0),  # by the launcher, after the fact
        AgentFailure(rank=1, exit_code=-signal.SIGKILL, at_s=4.0),
    ]
    root = choose_root({0: lost}, ended)
    assert root is not None
    assert (root.rank, root.error) == (1, "was killed by SIGKILL: out of memory?")
    assert root.cause == "SIGKILL"
    assert choose_root({}, []) is None
    unknown = choose_root({}, [AgentFailure(rank=1, exit_code=3)])
    assert unknown is not None
    assert unknown.error == "exited with code 3"


def test_outcomes_are_read_back_as_they_were_left(tmp_path: Path) -> None:
    process = RankEnvironment(rank=1, local_rank=1, world_size=2, outcome_dir=tmp_path)
    leave_outcome(process, Category.INPUT, "no data")
    leave_outcome(None, Category.INPUT, "nobody asked")
    found = read_outcomes(tmp_path)
    assert (found[1].category, found[1].error) == (Category.INPUT, "no data")
    assert read_agent_failures(tmp_path) == []
    leave_agent_failures(tmp_path, [AgentFailure(rank=0, exit_code=1)])
    assert read_agent_failures(tmp_path) == [AgentFailure(rank=0, exit_code=1)]


def test_each_process_has_random_numbers_of_its_own_and_the_first_those_of_the_run() -> None:
    assert own_seed(7, 0) == 7
    assert len({own_seed(7, rank, step) for rank in range(8) for step in (0, 10)}) == 16


def test_the_command_is_torchs_own_launcher_without_restarts() -> None:
    command = build_command(4)
    assert "--nproc-per-node=4" in command
    assert "--max-restarts=0" in command
    assert command[-2:] == ["--module", "gen_worker.entrypoint"]


def test_layers_that_share_weights_are_sharded_with_the_whole_and_not_alone() -> None:
    import torch

    from gen_worker.trainer.processes.distributed import _layers

    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(4, 2)
            self.blocks = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])
            self.head = torch.nn.Linear(2, 4, bias=False)
            self.head.weight = self.embed.weight

    model = Tied()
    assert list(_layers(model)) == list(model.blocks)
