"""What a server answers with changes only by a promotion that passed its gate, and never half."""

import http.client
import json
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from model_server import JSON, LIVE, WANTED, Reply, Server, train_versions, wait_until, with_settings

from gen_worker.contract.checkpoints.meta import encode_meta, parse_meta
from gen_worker.contract.job.model_version import ModelVersion
from gen_worker.contract.job.spec import GateSpec
from gen_worker.contract.process_identity import list_pids, read_process
from gen_worker.contract.serving import WantedModel, write_document

ROW = [1.0, 2.0, 3.0, 4.0]
STEPS = (
    "promotion.loaded",
    "promotion.gated",
    "promotion.commit",
    "promotion.committed",
    "promotion.switched",
    "promotion.told",
)


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> dict[int, ModelVersion]:
    return train_versions(tmp_path_factory.mktemp("trained"), steps=4)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, versions: dict[int, ModelVersion]) -> Iterator[Server]:
    """A server whose version 3 was promoted after 2, for what is refused."""
    server = Server(tmp_path_factory.mktemp("shared"), versions[2]).start()
    assert server.ask("promote", versions[3])["event"] == "promoted"
    yield server
    server.stop()


@pytest.fixture
def server(tmp_path: Path, versions: dict[int, ModelVersion]) -> Iterator[Server]:
    server = Server(tmp_path / "run", versions[1])
    yield server
    server.stop(signal.SIGKILL)


def replace(version: ModelVersion, **fields: Any) -> ModelVersion:
    return msgspec.structs.replace(version, **fields)


def copy_checkpoint(version: ModelVersion, folder: Path) -> Path:
    meta = Path(version.checkpoint)
    folder.mkdir()
    for path in meta.parent.glob(meta.name.removesuffix(".meta.json") + ".*"):
        shutil.copy(path, folder)
    return folder / meta.name


def test_a_version_is_promoted_and_rolled_back_and_the_documents_say_so(
    server: Server, versions: dict[int, ModelVersion]
) -> None:
    server.start()
    before = server.predict(ROW)
    event = server.ask("promote", versions[2], by="ada")
    assert (event["event"], event["number"], event["by"]) == ("promoted", 1, "ada")
    assert (event["version"]["step"], event["previous"]["step"]) == (2, 1)
    assert server.predict(ROW).version == ("trained", 2, versions[2].weights_hash)
    assert server.predict(ROW).data != before.data
    wait_until(lambda: server.live.outcome is None, "the outcome is still open")
    assert (server.live.number, server.live.version.step) == (1, 2)
    event = server.ask("rollback")
    assert (event["event"], event["version"]["step"], event["previous"]["step"]) == ("promoted", 1, 2)
    assert server.predict(ROW).data == before.data
    assert (
        server.ask("promote", versions[1])["event"] == "promoted"
    )  # what answers already: nothing is loaded
    assert server.predict(ROW).version[1] == 1


def refusals(versions: dict[int, ModelVersion], folder: Path) -> dict[str, tuple[dict[str, Any], str]]:
    """By name: what is wanted, and the cause of the refusal."""
    version = versions[4]
    damaged = copy_checkpoint(version, folder / "damaged")
    data = damaged.with_name(damaged.name.replace(".meta.json", ".pt"))
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    huge = copy_checkpoint(version, folder / "huge")
    meta = parse_meta(huge.read_bytes(), "huge")
    files = (msgspec.structs.replace(meta.files[0], size_bytes=1 << 50), *meta.files[1:])
    huge.write_bytes(encode_meta(msgspec.structs.replace(meta, files=files)))
    odd = copy_checkpoint(version, folder / "odd")
    odd.write_bytes(encode_meta(msgspec.structs.replace(meta, verified=False, reason="the loss is NaN")))
    fault = folder / "fault"
    fault.write_text("raise")
    exits = folder / "exits"
    exits.write_text("exit")
    return {
        "a checkpoint that is gone": (
            {"version": replace(version, checkpoint="/none.meta.json")},
            "checkpoint",
        ),
        "another checkpoint than was asked for": (
            {"version": replace(version, weights_hash="sha256:0")},
            "checkpoint",
        ),
        "a state that is not finite": ({"version": replace(version, checkpoint=str(odd))}, "checkpoint"),
        "damaged bytes": ({"version": replace(version, checkpoint=str(damaged))}, "input"),
        "more than fits": ({"version": replace(version, checkpoint=str(huge))}, "memory"),
        "a class that is not there": ({"version": replace(version, trainer="served:Nobody")}, "startup"),
        "a state that does not fit": ({"version": with_settings(version, ballast=8)}, "model-load"),
        "a predict that raises": ({"version": with_settings(version, fault_file=str(fault))}, "model-load"),
        "a predict that kills": ({"version": with_settings(version, fault_file=str(exits))}, "model-load"),
        "other answers": ({"version": with_settings(version, answer="z")}, "columns"),
        "a bound on latency": ({"version": version, "gate": GateSpec(max_latency_ms=1e-6)}, "latency"),
        "a worse metric": ({"version": versions[1], "gate": GateSpec(metric="val/loss")}, "metric"),
        "a metric that is not there": ({"version": version, "gate": GateSpec(metric="val/f1")}, "metric"),
        "no version": ({}, "request"),
    }


def test_whatever_fails_leaves_the_old_one_serving_and_says_why(
    shared: Server, versions: dict[int, ModelVersion], tmp_path: Path
) -> None:
    expected = shared.predict(ROW).data
    for name, (wanted, cause) in refusals(versions, tmp_path).items():
        event = shared.ask("promote", **wanted)
        assert (event["event"], event["cause"]) == ("promotion_refused", cause), (name, event)
        assert event["words"], name
        reply = shared.predict(ROW)
        assert (reply.version[1], reply.data) == (3, expected), name
        wait_until(lambda: shared.live.outcome is None, name)
        assert (shared.live.number, shared.live.version.step) == (event["number"], 3), name
    assert shared.ask("split", versions[4])["cause"] == "request"


def test_the_gates_figures_are_in_the_event_and_the_tolerance_is_obeyed(
    shared: Server, versions: dict[int, ModelVersion]
) -> None:
    event = shared.ask("promote", versions[1], gate=GateSpec(metric="val/loss"))
    metric = event["gate"]["metric"]
    assert metric["value"] > metric["live"]
    assert event["version"]["step"] == 1
    gap = metric["value"] - metric["live"]
    assert (
        shared.ask("promote", versions[1], gate=GateSpec(metric="val/loss", tolerance=2 * gap))["event"]
        == "promoted"
    )
    assert (
        shared.ask("promote", versions[3], gate=GateSpec(metric="val/loss", max_latency_ms=60_000))["event"]
        == "promoted"
    )
    assert (
        shared.ask("promote", versions[1], gate=GateSpec(metric="val/loss", mode="max"))["event"]
        == "promoted"
    )
    assert (
        shared.ask("rollback", gate=GateSpec(metric="val/loss", mode="max"))["event"] == "promoted"
    )  # not measured


def test_the_jobs_gate_applies_where_none_is_wanted(
    tmp_path: Path, versions: dict[int, ModelVersion]
) -> None:
    server = Server(tmp_path, versions[3], gate={"metric": "val/loss"}).start()
    try:
        assert server.ask("promote", versions[1])["cause"] == "metric"
        assert server.ask("promote", versions[4])["event"] == "promoted"
    finally:
        server.stop()


def test_a_first_version_that_is_too_slow_is_not_served(
    tmp_path: Path, versions: dict[int, ModelVersion]
) -> None:
    server = Server(tmp_path, versions[1], gate={"max_latency_ms": 1e-6})
    server.launch()
    assert server.wait() == 13
    assert "probe rows took" in server.events("failed")[0]["error"]
    assert server.events("ready") == []


def test_a_full_disk_at_the_commit_is_a_refusal(server: Server, versions: dict[int, ModelVersion]) -> None:
    server.start(GEN_WORKER_FAILPOINTS="promotion.commit=enospc")
    assert server.ask("promote", versions[2])["cause"] == "disk"
    assert server.predict(ROW).version[1] == 1
    assert server.ask("promote", versions[2])["event"] == "promoted"


def test_a_document_that_cannot_be_read_changes_nothing_until_a_whole_one_comes(
    server: Server, versions: dict[int, ModelVersion]
) -> None:
    server.start()
    whole = msgspec.json.encode(WantedModel(number=5, action="promote", version=versions[2]))
    (server.serving / WANTED).write_bytes(whole[: len(whole) // 2])
    wait_until(lambda: "wanted.json cannot be read" in server.log, "nobody says so")
    assert server.predict(ROW).version[1] == 1
    server.want(WantedModel(number=5, action="promote", version=versions[2]))
    assert server.wait_event("promoted")["number"] == 5
    assert server.log.count("wanted.json cannot be read") == 1


def test_a_lost_signal_only_delays_it(server: Server, versions: dict[int, ModelVersion]) -> None:
    server.start()
    write_document(server.serving / WANTED, WantedModel(number=1, action="promote", version=versions[2]))
    assert server.wait_event("promoted")["version"]["step"] == 2


def test_a_server_does_not_begin_with_a_damaged_document(server: Server) -> None:
    server.start()
    server.stop()
    path = server.serving / LIVE
    path.write_bytes(path.read_bytes()[:40])
    server.launch()
    assert server.wait() == 10
    assert "live.json cannot be read" in server.events("failed")[-1]["error"]


def test_a_kill_at_any_step_leaves_one_of_the_two_versions_and_the_promotion_is_finished_once(
    server: Server, versions: dict[int, ModelVersion]
) -> None:
    """Once the new version may have answered, no later attempt begins with the old one."""
    old, new = 1, 2
    for number, step in enumerate(STEPS, start=1):
        server.start(GEN_WORKER_FAILPOINTS=f"{step}=kill")
        assert server.predict(ROW).version[1] == old
        server.want(WantedModel(number=number, action="promote", version=versions[new]))
        assert server.wait() == -signal.SIGKILL, step
        is_committed = step in STEPS[3:]
        assert server.live.version.step == (new if is_committed else old), step
        assert server.live.number == (number if is_committed else number - 1), step
        server.start()
        first = server.predict(ROW).version[1]
        assert first == new if is_committed else first in (old, new), step
        server.wait_told(number)
        wait_until(lambda: server.live.outcome is None, step)
        assert server.predict(ROW).version[1] == new, step
        told = promoted(server, number)
        assert len(told) == (2 if step == "promotion.told" else 1), step
        assert all(event == told[0] for event in told), step
        server.stop()
        old, new = new, old
    events = server.events()
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))


def promoted(server: Server, number: int) -> list[dict[str, Any]]:
    own = ("seq", "attempt", "timestamp_ms")
    found = [event for event in server.events("promoted") if event["number"] == number]
    return [{name: value for name, value in event.items() if name not in own} for event in found]


def test_a_kill_while_a_refusal_is_written_refuses_it_again_and_serves_the_old_one(
    server: Server, versions: dict[int, ModelVersion]
) -> None:
    server.start(GEN_WORKER_FAILPOINTS="promotion.refused=kill")
    bad = replace(versions[2], checkpoint="/none.meta.json")
    server.want(WantedModel(number=1, action="promote", version=bad))
    assert server.wait() == -signal.SIGKILL
    assert (server.live.number, server.live.version.step) == (1, 1)
    server.start()
    assert server.wait_event("promotion_refused")["number"] == 1
    assert server.predict(ROW).version[1] == 1


class Clients:
    """Ask without a pause, each on a connection of its own, and keep what they got."""

    def __init__(self, server: Server, number: int) -> None:
        self._server = server
        self._is_over = threading.Event()
        self.replies: list[Reply] = []
        self.faults: list[str] = []
        self._threads = [threading.Thread(target=self._ask) for _ in range(number)]

    def __enter__(self) -> "Clients":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _ask(self) -> None:
        connection = self._server.connect()
        body, headers = json.dumps({"rows": [{"x": ROW}]}), {**JSON, **self._server.bearer}
        while not self._is_over.is_set():
            try:
                connection.request("POST", "/v1/predict", body, headers)
                self.replies.append(Reply(connection.getresponse()))
            except (OSError, http.client.HTTPException) as fault:
                self.faults.append(repr(fault))
                connection.close()
        connection.close()


def test_of_a_hundred_swaps_under_load_no_request_fails_and_each_is_answered_by_the_version_it_names(
    server: Server, versions: dict[int, ModelVersion], tmp_path: Path
) -> None:
    server.start()
    bits = {1: server.predict(ROW).data}
    server.ask("promote", versions[2])
    bits[2] = server.predict(ROW).data
    bad = with_settings(versions[4], answer="z")  # loads, answers its probe rows, and is refused by the gate
    with Clients(server, 2) as clients:
        for number in range(100):
            assert server.ask("promote", versions[1 + number % 2])["event"] == "promoted"
            if number % 20 == 0:
                assert server.ask("promote", bad)["event"] == "promotion_refused"
    assert clients.faults == []
    assert {reply.status for reply in clients.replies} == {200}
    assert len(clients.replies) > 100
    assert {reply.version[1] for reply in clients.replies} == {1, 2}
    assert all(reply.data == bits[reply.version[1]] for reply in clients.replies)


def test_a_split_answers_its_share_by_request_id_and_a_restart_keeps_it(
    server: Server, versions: dict[int, ModelVersion]
) -> None:
    server.start()
    event = server.ask("split", versions[2], percent=50.0)
    assert (event["event"], event["version"]["step"], event["second"]["step"]) == ("promoted", 1, 2)
    ids = [f"client-{number}" for number in range(40)]

    def ask() -> dict[str, int]:
        return {each: server.predict(ROW, X_Request_Id=each).version[1] for each in ids}

    first = ask()
    assert set(first.values()) == {1, 2}
    assert ask() == first
    server.stop(signal.SIGKILL)
    server.start()
    assert ask() == first
    assert server.ask("split", versions[2], percent=100.0)["event"] == "promoted"
    assert set(ask().values()) == {2}
    assert server.ask("single")["event"] == "promoted"
    assert set(ask().values()) == {1}
    server.ask("split", versions[2], percent=50.0)
    assert server.ask("promote", versions[2])["event"] == "promoted"  # of what is loaded already
    assert set(ask().values()) == {2}
    assert server.live.second is None


def test_a_split_to_a_version_that_fails_its_gate_answers_nobody(
    shared: Server, versions: dict[int, ModelVersion]
) -> None:
    gate = GateSpec(metric="val/loss")
    assert shared.ask("split", versions[1], percent=50.0, gate=gate)["cause"] == "metric"
    assert {shared.predict(ROW, X_Request_Id=f"c{number}").version[1] for number in range(20)} == {3}


def test_a_shadow_is_compared_and_answers_nobody(server: Server, versions: dict[int, ModelVersion]) -> None:
    server.start()
    assert server.ask("shadow", versions[2])["second"]["step"] == 2
    for _ in range(20):
        assert server.predict(ROW).version[1] == 1
    wait_until(lambda: shadowed(server, "different") == 20, "the shadow was not compared")
    assert shadowed(server, "equal") == 0
    server.ask("shadow", versions[1])
    for _ in range(5):
        server.predict(ROW)
    wait_until(lambda: shadowed(server, "equal") == 5, "the shadow was not compared")
    server.ask("single")
    assert server.live.second is None


def shadowed(server: Server, outcome: str) -> int:
    connection = server.connect()
    connection.request("GET", "/metrics", headers=server.bearer)
    text = connection.getresponse().read().decode()
    connection.close()
    lines = [
        line for line in text.splitlines() if line.startswith("trn_shadow_rows_total{") and outcome in line
    ]
    return int(float(lines[0].split()[-1])) if lines else 0


def test_a_version_that_hangs_while_it_is_loaded_is_replaced_by_the_next_one_that_is_wanted(
    server: Server, versions: dict[int, ModelVersion], tmp_path: Path
) -> None:
    server.start()
    wait_until(lambda: len(children_of(server.pid)) == 3, "no model parent, worker and template")
    known = set(children_of(server.pid))
    fault = tmp_path / "fault"
    fault.write_text("hang")
    number = server.live.number + 1
    server.want(
        WantedModel(
            number=number, action="promote", version=with_settings(versions[3], fault_file=str(fault))
        )
    )
    wait_until(lambda: set(children_of(server.pid)) - known != set(), "it is not loaded")
    (hanging,) = set(children_of(server.pid)) - known
    event = server.ask("promote", versions[2])
    assert (event["event"], event["number"], event["version"]["step"]) == ("promoted", number + 1, 2)
    assert server.predict(ROW).version[1] == 2
    assert server.ask("rollback")["version"]["step"] == 1
    wait_until(lambda: hanging not in children_of(server.pid), "the hanging process is left")


def test_a_version_that_is_loaded_while_an_earlier_one_ends_is_promoted(
    tmp_path: Path, versions: dict[int, ModelVersion]
) -> None:
    answering, loading = tmp_path / "answering", tmp_path / "loading"
    answering.write_text("")
    loading.write_text("wait")
    server = Server(tmp_path / "run", with_settings(versions[1], fault_file=str(answering))).start()
    try:
        answering.write_text("wait")
        client = threading.Thread(target=server.predict, args=(ROW,))
        client.start()
        wait_until((tmp_path / "answering.reached").exists, "it is not computed")
        assert server.ask("promote", versions[2])["event"] == "promoted"
        waiting = with_settings(versions[3], fault_file=str(loading))
        wanted = WantedModel(number=server.live.number + 1, action="promote", version=waiting)
        server.want(wanted)
        wait_until((tmp_path / "loading.reached").exists, "it is not loaded")
        answering.write_text("")  # the first version has answered, and ends
        client.join()
        wait_until(lambda: "model worker 1 ended" in server.log, "the first version does not end")
        loading.write_text("")
        kinds = ("promoted", "promotion_refused")
        event = server.wait_event(*kinds, that=lambda event: event["number"] == wanted.number)
        assert event["event"] == "promoted", event["words"]
    finally:
        server.stop()


def children_of(pid: int) -> list[int]:
    """Of it, and of its children."""
    parents = {each: state.parent for each in list_pids() if (state := read_process(each)) is not None}
    found = [each for each, parent in parents.items() if parent == pid]
    for each in found:  # grows
        found += [child for child, parent in parents.items() if parent == each]
    return found


def damage(version: ModelVersion) -> None:
    data = Path(version.checkpoint.replace(".meta.json", ".pt"))
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)


def test_a_version_that_cannot_be_loaded_at_a_restart_is_left_by_the_rollback_that_waits(
    server: Server, versions: dict[int, ModelVersion], tmp_path: Path
) -> None:
    broken = replace(versions[2], checkpoint=str(copy_checkpoint(versions[2], tmp_path / "broken")))
    server.start()
    expected = server.predict(ROW).data
    assert server.ask("promote", broken)["event"] == "promoted"
    wait_until(lambda: server.live.outcome is None, "the outcome is still open")
    server.stop(signal.SIGKILL)
    damage(broken)
    server.launch()
    assert server.wait() != 0  # nothing else is wanted
    write_document(server.serving / WANTED, WantedModel(number=2, action="rollback"))
    server.start()
    reply = server.predict(ROW)
    assert (reply.version[1], reply.data) == (1, expected)
    (told,) = [event for event in server.events("promoted") if event["number"] == 2]
    assert (told["version"]["step"], told["previous"]["step"]) == (1, 2)
    assert server.ask("promote", versions[3])["event"] == "promoted"


def test_what_waits_at_a_restart_passes_the_gate_also_where_the_served_version_is_broken(
    server: Server, versions: dict[int, ModelVersion], tmp_path: Path
) -> None:
    broken = replace(versions[1], checkpoint=str(copy_checkpoint(versions[1], tmp_path / "broken")))
    server = Server(tmp_path / "other", broken).start()
    server.stop(signal.SIGKILL)
    damage(broken)
    wanted = WantedModel(number=1, action="promote", version=versions[2], gate=GateSpec(max_latency_ms=1e-6))
    write_document(server.serving / WANTED, wanted)
    server.launch()
    assert server.wait() != 0
    assert [event["cause"] for event in server.events("promotion_refused")] == ["latency"]
    write_document(server.serving / WANTED, replace(wanted, number=2, gate=GateSpec()))
    server.start()
    assert server.predict(ROW).version[1] == 2
    server.stop(signal.SIGKILL)
