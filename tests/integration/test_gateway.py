"""Claims about the gateway: it answers what the registry has, follows what happens, and holds no truth."""

import asyncio
import datetime
import gzip
import http.client
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from daemon_process import DEADLINE_S, DaemonProcess, end_everything
from gateway_process import SETTINGS, TRN, EventReader, GatewayWorld

import trn
from trn.client.gateway_start import find_gateway, stop_gateway
from trn.core.home import Home
from trn.daemon.upkeep.singleton import read_daemon_info
from trn.gateway.app import bind

NUM_STEPS = 200
TRAINERS = Path(__file__).parent / "trainers"


def job(run_id: str, num_steps: int = 5, *, step_ms: int = 0, folder: Path, **more: Any) -> dict[str, Any]:
    witness = folder / f"witness-{run_id}"
    witness.mkdir(exist_ok=True)
    return {
        "run_id": run_id,
        "trainer": "witnessed:Witnessed",
        "mock_batches": list(range(1, num_steps + 1)),
        "metric_every": 1,
        "resources": {"devices": ["cpu"]},
        "hyperparams": {"witness": str(witness), "step_ms": step_ms},
        **more,
    }


def wait_until(what: str, holds: Any) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayWorld]:
    """One home for the tests that only look; `one` has ended."""
    folder = tmp_path_factory.mktemp("world")
    with GatewayWorld(folder / "home") as world:
        with trn.Client(world.home.root) as client:
            config = job("one", NUM_STEPS, folder=folder, tags={"kind": "first"}, group="all")
            client.submit(config, base_dir=TRAINERS)
            assert client.wait("one", DEADLINE_S).state == "COMPLETED"
        yield world


@pytest.fixture
def own_world(tmp_path: Path) -> Iterator[GatewayWorld]:
    with GatewayWorld(tmp_path / "home") as world:
        yield world


def test_runs_are_listed_filtered_paged_and_unchanged_ones_cost_no_body(world: GatewayWorld) -> None:
    listed = world.get("/runs")
    (run,) = listed.data["runs"]
    assert (run["run_id"], run["state"], run["trainer"]) == ("one", "COMPLETED", "witnessed:Witnessed")
    assert run["config"] is None
    assert listed.data["change"] == run["change"]
    assert world.get("/runs", **{"If-None-Match": listed.headers["etag"]}).status == 304
    assert world.get("/runs?with_config=1").data["runs"][0]["config"]["metric_every"] == 1
    for query, num in (
        ("state=COMPLETED", 1),
        ("state=RUNNING&state=FAILED", 0),
        ("tag=kind:first", 1),
        ("tag=kind:other", 0),
        ("group=all", 1),
        ("group=none", 0),
    ):
        assert len(world.get(f"/runs?{query}").data["runs"]) == num, query
    page = world.get("/runs?limit=1").data
    assert world.get(f"/runs?limit=1&page_token={page['next_page_token']}").data["runs"] == []


def test_one_run_is_shown_with_its_config_attempts_and_relatives(world: GatewayWorld) -> None:
    found = world.get("/runs/one").data
    assert found["run"]["config"]["hyperparams"]["step_ms"] == 0
    assert [attempt["number"] for attempt in found["attempts"]] == [1]
    assert found["folder"] == str(world.home.run("one").root)
    assert (found["family"], found["parents"], found["children"]) == (["one"], [], [])


def test_metric_points_come_whole_in_ranges_and_thinned_out(world: GatewayWorld) -> None:
    (series,) = world.get("/runs/one/metrics?name=train/loss").data["series"]
    assert series["steps"] == list(range(1, NUM_STEPS + 1))
    assert series["num_points"] == NUM_STEPS
    (part,) = world.get("/runs/one/metrics?name=train/loss&from_step=5&to_step=7").data["series"]
    assert part["values"] == series["values"][4:7]
    (thin,) = world.get("/runs/one/metrics?name=train/loss&max_points=10").data["series"]
    assert len(thin["steps"]) <= 10
    assert len(thin["mins"]) == len(thin["maxs"]) == len(thin["steps"])
    overlaid = world.get("/metrics?run=one&name=train/loss").data["runs"]
    assert overlaid["one"]["series"] == [series]


def test_the_log_comes_in_pieces_with_its_size(world: GatewayWorld) -> None:
    whole = world.home.run("one").log.read_bytes()
    found = world.get("/runs/one/log?limit=4000000")
    assert found.body == whole
    assert found.headers["x-log-size"] == str(len(whole))
    assert found.headers["content-type"].startswith("text/plain")
    assert world.get("/runs/one/logs?limit=4000000").body == whole
    tail = world.get("/runs/one/log?tail=10")
    assert tail.body == whole[-10:]
    assert world.get("/runs/one/log?offset=3&limit=4").body == whole[3:7]


def test_a_large_answer_is_compressed_where_the_client_takes_it(world: GatewayWorld) -> None:
    plain = world.get("/runs/one/metrics")
    packed = world.get("/runs/one/metrics", **{"Accept-Encoding": "br, gzip;q=0.8"})
    assert packed.headers["content-encoding"] == "gzip"
    assert gzip.decompress(packed.body) == plain.body
    refused = world.get("/runs/one/metrics", **{"Accept-Encoding": "gzip;q=0"})
    assert "content-encoding" not in refused.headers


def test_an_answer_on_a_kept_connection_does_not_wait_for_an_acknowledgement() -> None:
    async def read_option() -> int:
        found: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def accept(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            accepted = writer.get_extra_info("socket")
            found.set_result(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        with bind("127.0.0.1", 0) as listener:
            async with await asyncio.start_server(accept, sock=listener):
                _, writer = await asyncio.open_connection(*listener.getsockname())
                writer.close()
                return await found

    assert asyncio.run(read_option()) == 1


def test_a_wrong_request_names_every_fault_and_nothing_is_ignored(world: GatewayWorld) -> None:
    answer = world.get("/runs?limit=many&nonsense=1&name=a&name=b")
    assert answer.status == 400
    faults = {fault["path"] for fault in answer.data["error"]["faults"]}
    assert faults == {"limit", "nonsense", "name"}
    for path in ("/runs?limit=0", "/runs?state=LOST", "/runs?page_token=!", "/runs/one/metrics?from_step=-1"):
        assert world.get(path).status == 400, path
    assert world.get("/runs/none").status == 404
    assert world.get("/nothing").status == 404
    wrong = world.send("POST", "/runs/one")
    assert (wrong.status, wrong.data["error"]["code"]) == (405, "method")
    assert wrong.headers["allow"] == "DELETE, GET, HEAD, PATCH"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"config": {"run_id": "one", "run_id": "two"}}', "run_id"),
        (b'{"config": {"hyperparams": {"a": 1, "b": {"c": 1, "c": 2}}}}', "c"),
        (b'{"config": {}, "config": {"run_id": "two"}}', "config"),
    ],
)
def test_a_name_that_is_given_twice_is_refused_as_in_a_file(
    world: GatewayWorld, body: bytes, words: str
) -> None:
    answer = world.send("POST", "/runs?dry_run=1", body)
    assert answer.status == 400
    (fault,) = answer.data["error"]["faults"]
    assert words in fault["text"]


def test_a_gateway_that_cannot_say_where_it_is_says_why(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.make()
    home.gateway_info.mkdir()
    started = subprocess.run(
        [sys.executable, "-m", "trn.gateway", "--home", str(home.root)],
        check=False,
        capture_output=True,
        text=True,
    )
    assert started.returncode != 0
    assert "gateway.json" in started.stderr.splitlines()[-1]


def test_a_stream_replays_follows_and_continues_where_it_was_left(
    own_world: GatewayWorld, tmp_path: Path
) -> None:
    with (
        trn.Client(own_world.home.root) as client,
        EventReader(own_world, "watch=runs&after_change=0") as runs,
    ):
        assert runs.next("health")[1]["daemon"] == "up"
        client.submit(job("two", 200, step_ms=20, folder=tmp_path), base_dir=TRAINERS)
        assert runs.next("run")[1]["run_id"] == "two"
        with EventReader(own_world, "events=two:0&log=two:0") as events:
            seqs = [event["seq"] for event in events.next("events")[1]["events"]]
            while len(seqs) < 20:
                seqs += [event["seq"] for event in events.next("events")[1]["events"]]
            left = events.last_id
        with EventReader(own_world, "events=two", **{"Last-Event-ID": left}) as events:
            while len(seqs) < 60:
                seqs += [event["seq"] for event in events.next("events")[1]["events"]]
            assert seqs == list(range(1, len(seqs) + 1))
            client.cancel("two")
            assert events.next("end")[1] == {"run_id": "two"}
        client.wait("two", DEADLINE_S)
        while runs.next("run")[1]["state"] != "CANCELLED":
            pass
        client.remove(["two"])
        assert runs.next("removed")[1] == {"run_id": "two"}


def test_a_stream_of_a_run_that_is_not_there_says_so_and_shows_the_rest(world: GatewayWorld) -> None:
    with EventReader(world, "watch=runs&after_change=0&events=none&log=none&events=one:0") as stream:
        assert stream.answer.status == 200
        missing = {"fault", "run", "events"}
        while missing:
            missing.discard(stream.next()[0])


def test_the_page_outlives_a_killed_daemon_and_its_stream_continues_with_the_next(
    own_world: GatewayWorld, tmp_path: Path
) -> None:
    with EventReader(own_world, "watch=runs") as stream:
        assert stream.next("health")[1]["daemon"] == "up"
        own_world.daemon.kill()
        assert stream.next("health")[1]["daemon"] == "down"
        assert own_world.get("/runs").status == 200
        assert own_world.get("/health").data["daemon"] == "down"
        refused = own_world.get("/devices")
        assert (refused.status, refused.data["error"]["code"]) == (503, "unavailable")
        own_world.daemon = DaemonProcess(own_world.home.root, is_bare=True)
        own_world.daemon.wait_ready()
        assert stream.next("health")[1]["daemon"] == "up"
        with trn.Client(own_world.home.root) as client:
            client.submit(job("three", 2, folder=tmp_path), base_dir=TRAINERS)
        assert stream.next("run")[1]["run_id"] == "three"


def test_the_gateway_ends_with_a_daemon_that_is_stopped_and_not_with_one_that_is_killed(
    own_world: GatewayWorld,
) -> None:
    own_world.daemon.kill()
    own_world.daemon = DaemonProcess(own_world.home.root, is_bare=True)
    own_world.daemon.wait_ready()
    assert own_world.is_gateway_running()
    with EventReader(own_world, "watch=runs") as stream:
        stream.next("health")
        own_world.daemon.stop()
        process = own_world.gateway.process
        wait_until("the gateway still runs", lambda: not process.is_alive())
        assert stream.answer.read() is not None  # the stream was ended, not left hanging
    assert not own_world.home.gateway_info.exists()


@pytest.mark.usefixtures("without_torch")
def test_ten_starts_at_once_make_one_gateway_and_one_daemon(tmp_path: Path) -> None:
    home = tmp_path / "home"
    Home(home).make()
    (home / "settings.toml").write_text(SETTINGS)
    environ = {**os.environ, "TRN_HOME": str(home), "DISPLAY": ""}
    try:
        started = [
            subprocess.Popen([TRN, "ui", "--json"], env=environ, stdout=subprocess.PIPE, text=True)
            for _ in range(10)
        ]
        said = [json.loads(process.communicate(timeout=DEADLINE_S)[0]) for process in started]
        assert {process.returncode for process in started} == {0}
        assert len({record["pid"] for record in said}) == 1
        assert len({record["bearer"] for record in said}) == 1
        assert len({record["url"] for record in said}) == 10  # each logs one browser in
        stopped = subprocess.run(
            [TRN, "ui", "--stop", "--json"], env=environ, capture_output=True, check=True
        )
        assert json.loads(stopped.stdout)["pid"] == said[0]["pid"]
        assert find_gateway(Home(home)) is None
    finally:
        end_everything(home)


def test_a_killed_gateway_harms_nothing_and_the_next_has_other_secrets(own_world: GatewayWorld) -> None:
    before = own_world.gateway
    os.kill(before.pid, signal.SIGKILL)
    wait_until("it lives", lambda: not before.process.is_alive())
    after = own_world.start_gateway()
    assert after.pid != before.pid
    assert after.bearer != before.bearer
    assert (
        own_world.ask("GET", "/api/v1/runs", headers={"Authorization": f"Bearer {before.bearer}"}).status
        == 401
    )
    assert own_world.get("/runs").status == 200


def test_the_next_gateway_has_the_address_of_the_last_one_unless_that_is_taken(
    own_world: GatewayWorld,
) -> None:
    before = own_world.gateway
    stop_gateway(before, own_world.home)
    after = own_world.start_gateway()
    assert after.url == before.url, "links and open pages lead to it"
    stop_gateway(after, own_world.home)
    host, _, port = after.address.rpartition(":")
    with socket.create_server((host, int(port))):
        third = own_world.start_gateway()
    assert third.url != after.url
    stop_gateway(third, own_world.home)
    own_world.home.gateway_port.write_text("no port")
    assert own_world.start_gateway().url


def test_another_address_than_loopback_needs_tls(tmp_path: Path) -> None:
    home = tmp_path / "home"
    environ = {**os.environ, "TRN_HOME": str(home)}
    Home(home).make()
    (home / "settings.toml").write_text(SETTINGS)
    try:
        for words in (["daemon", "start", "--http"], ["ui", "--address"]):
            command = [TRN, *words, "0.0.0.0:0", "--json"]
            done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
            assert done.returncode != 0
            assert "TLS" in json.loads(done.stdout)["message"]
            if words[0] == "daemon":
                assert read_daemon_info(Home(home)) is None, "none is left that tries again and again"
    finally:
        end_everything(home)


def test_a_run_is_submitted_checked_cancelled_resumed_repeated_and_removed(
    own_world: GatewayWorld, tmp_path: Path
) -> None:
    config = job("four", 500, step_ms=20, folder=tmp_path, checkpoint_every=5)
    body = {"config": config, "base_dir": str(TRAINERS)}
    checked = own_world.send("POST", "/runs?dry_run=1", body)
    assert (checked.status, checked.data["faults"], checked.data["run"]["run_id"]) == (200, [], "four")
    assert own_world.get("/runs").data["runs"] == []
    wrong = own_world.send("POST", "/runs", {"config": {**config, "max_step": 3}, "base_dir": str(TRAINERS)})
    assert (wrong.status, wrong.data["error"]["code"]) == (422, "invalid")
    assert wrong.data["error"]["faults"][0]["path"] == "max_step"
    said = own_world.send("POST", "/runs?dry_run=1", {"config": {**config, "max_step": 3}}).data["faults"]
    assert said[0]["path"] == "max_step"
    typo = {"config": {**config, "trainer": "witnessed:Witnesed"}, "base_dir": str(TRAINERS)}
    assert own_world.send("POST", "/runs", typo).data["error"]["faults"][0]["path"] == "trainer"
    assert own_world.send("POST", "/runs?dry_run=1", typo).data["faults"][0]["path"] == "trainer"
    made = own_world.send("POST", "/runs", body)
    assert (made.status, made.data["existed"]) == (201, False)
    assert made.data["run"]["trainer"] == "witnessed:Witnessed"
    again = own_world.send("POST", "/runs", body)
    assert (again.status, again.data["existed"], again.data["run"]["run_id"]) == (200, True, "four")
    wait_until("no checkpoint", lambda: own_world.get("/runs/four").data["run"]["step"] > 10)
    assert own_world.send("POST", "/runs/four/cancel", {"reason": "enough"}).data["is_cancel_wanted"]
    wait_until("not ended", lambda: own_world.get("/runs/four").data["run"]["state"] == "CANCELLED")
    resumed = own_world.send("POST", "/runs/four/resume", {"overrides": {"tags": {"a": "b"}}})
    assert (resumed.status, resumed.data["run"]["run_id"], resumed.data["run"]["parent_run_id"]) == (
        201,
        "four.2",
        "four",
    )
    assert own_world.get("/runs/four").data["children"] == ["four.2"]
    assert own_world.get("/runs/four.2").data["parents"] == ["four"]
    assert own_world.get("/runs/four.2").data["family"] == ["four", "four.2"]
    refused = own_world.send("DELETE", "/runs/four")
    assert (refused.status, refused.data["error"]["code"]) == (409, "conflict")
    own_world.send("POST", "/runs/four.2/cancel", {})
    repeated = own_world.send(
        "POST", "/runs/four/again", {"overrides": {"hyperparams": {"step_ms": 1}}}
    ).data["run"]
    assert repeated["run_id"] == "four.3"
    assert own_world.get("/runs/four.3").data["run"]["config"]["hyperparams"]["step_ms"] == 1
    own_world.send("POST", "/runs/four.3/cancel", {})
    wait_until("not ended", lambda: own_world.get("/runs/four.3").data["run"]["ended_ms"] is not None)
    freed = own_world.send("DELETE", "/runs/four.3?dry_run=1").data["freed"]
    assert freed[0]["name"] == "four.3"
    assert own_world.get("/runs/four.3").status == 200
    assert own_world.send("DELETE", "/runs/four.3").status == 200
    assert own_world.get("/runs/four.3").status == 404
    wait_until("not ended", lambda: own_world.get("/runs/four.2").data["run"]["ended_ms"] is not None)
    assert own_world.send("DELETE", "/runs/four?also=four.2&also=gone").status == 404
    assert own_world.get("/runs/four.2").status == 200, "all or none"
    freed = own_world.send("DELETE", "/runs/four?also=four.2").data["freed"]
    assert {"four", "four.2"} <= {each["name"] for each in freed}
    assert own_world.get("/runs/four").status == own_world.get("/runs/four.2").status == 404


def test_runs_are_compared_and_lanes_show_who_held_the_machine(
    own_world: GatewayWorld, tmp_path: Path
) -> None:
    with trn.Client(own_world.home.root) as client:
        for name, more in (("five", {}), ("six", {"hyperparams_seed": 1})):
            config = job(name, 5, folder=tmp_path)
            config["hyperparams"] |= more
            client.submit(config, base_dir=TRAINERS)
            client.wait(name, DEADLINE_S)
    found = own_world.get("/compare?run=five&run=six").data
    assert found["config"]["hyperparams.hyperparams_seed"] == [None, 1]
    assert found["divergences"] == []
    assert found["metrics"]["train/loss"][0] == found["metrics"]["train/loss"][1]
    assert own_world.get("/compare?run=five").status == 400
    assert own_world.get("/compare?run=five&run=five").status == 400
    assert own_world.get("/compare?run=five&run=none").status == 404
    machine = own_world.get("/machine/lanes").data
    assert 0 < machine["disk"]["free_bytes"] <= machine["disk"]["total_bytes"]
    (lane,) = machine["lanes"]
    assert lane["lane"] == "cpu"
    assert [bar["run_id"] for bar in lane["bars"]] == ["five", "six"]
    assert all(bar["to_ms"] >= bar["from_ms"] for bar in lane["bars"])


def test_the_schema_of_a_job_says_what_each_field_means(world: GatewayWorld) -> None:
    records = world.get("/schemas/job").data["$defs"]
    for name, record in records.items():
        for field, schema in record["properties"].items():
            assert schema["description"].endswith((".", ")")), f"{name}.{field}"
            assert "](" not in schema["description"], f"{name}.{field}"
    assert records["HeldOutSpec"]["properties"]["dataset"]["description"] == "As `dataset`; never shuffled."


def test_the_text_of_a_job_file_is_read_by_the_rules_of_trn_run(world: GatewayWorld) -> None:
    def read(text: str, **more: str) -> Any:
        return world.send("POST", "/parse-job", {"text": text, **more})

    as_yaml = (
        "trainer: a:B\nmax_steps: 5\nhyperparams: {lr: 1e-4, name: no}\nprofiles: {big: {max_steps: 9}}\n"
    )
    expected = {"trainer": "a:B", "max_steps": 5, "hyperparams": {"lr": 1e-4, "name": "no"}}
    assert read(as_yaml).data == {"config": expected}
    assert read(json.dumps(expected)).data == {"config": expected}
    assert read("trainer = 'a:B'", format="toml").data == {"config": {"trainer": "a:B"}}
    for text in ("", "[1, 2]", "a: [", "a: 1\na: 2", "a: .nan"):
        refused = read(text)
        assert (refused.status, refused.data["error"]["code"]) == (400, "invalid"), text
        assert refused.data["error"]["faults"], text
    assert read("a: 1", format="xml").status == 400


def test_the_log_is_searched_in_pieces_and_downloaded_in_ranges(world: GatewayWorld) -> None:
    path = world.home.run("one").log
    before = path.read_bytes()
    lines = [b"line %d %s" % (number, b"x" * (number % 50)) for number in range(50_000)]
    path.write_bytes(b"\n".join(lines) + b"\nlast Needle")
    try:
        found, offset = [], 0
        while True:
            answer = world.get(f"/runs/one/log/search?q=LINE%2049&limit=500&from_offset={offset}").data
            found += answer["matches"]
            offset = answer["next_offset"]
            if answer["is_end"]:
                break
        wanted = [line.decode() for line in lines if line.startswith(b"line 49")]
        assert [match["line"] for match in found] == wanted
        whole = path.read_bytes()
        assert all(whole[match["offset"] :].startswith(match["line"].encode()) for match in found)
        assert world.get("/runs/one/log/search?q=needle&ignore_case=0").data["matches"] == []
        assert world.get("/runs/one/log/search?q=Needle").data["matches"][0]["line"] == "last Needle"
        assert world.get("/runs/one/log/download").body == whole
        part = world.get("/runs/one/log/download", Range="bytes=5-9")
        assert (part.status, part.body) == (206, whole[5:10])
        assert part.headers["content-range"] == f"bytes 5-9/{len(whole)}"
        assert world.get("/runs/one/log/download", Range="bytes=-4").body == whole[-4:]
        for all_of_it in ("bytes=0-", f"bytes=0-{len(whole) - 1}"):
            answer = world.get("/runs/one/log/download", Range=all_of_it)
            assert (answer.status, answer.body) == (206, whole), "Safari plays no video whose ranges get 200"
            assert answer.headers["content-range"] == f"bytes 0-{len(whole) - 1}/{len(whole)}"
        beyond = world.get("/runs/one/log/download", Range=f"bytes={len(whole)}-")
        assert (beyond.status, beyond.data["error"]["code"]) == (416, "range")
        assert beyond.headers["content-range"] == f"bytes */{len(whole)}"
        assert part.headers["content-disposition"].startswith("attachment")
    finally:
        path.write_bytes(before)


def test_events_come_in_pages_from_the_file(world: GatewayWorld) -> None:
    seqs: list[int] = []
    while True:
        page = world.get(f"/runs/one/events?after_seq={len(seqs)}&limit=50").data
        seqs += [event["seq"] for event in page["events"]]
        if page["is_end"]:
            break
    assert seqs == list(range(1, world.get("/runs/one").data["run"]["last_seq"] + 1))


@pytest.mark.usefixtures("without_torch")
def test_the_daemon_keeps_the_page_where_it_is_told_to(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.make()
    home.settings.write_text(SETTINGS)
    environ = {**os.environ, "TRN_HOME": str(home.root)}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([TRN, *words], env=environ, capture_output=True, text=True, check=False)

    try:
        assert run("daemon", "start", "--http", "nonsense").returncode != 0
        assert run("daemon", "start", "--http", "127.0.0.1:0", "--json").returncode == 0
        first = find_gateway(home)
        assert first is not None
        assert json.loads(run("daemon", "status", "--json").stdout)["page"] == first.url
        os.kill(first.pid, signal.SIGKILL)
        wait_until(
            "it was not started again", lambda: (found := find_gateway(home)) and found.pid != first.pid
        )
        assert run("ui", "--stop").returncode == 0
        wait_until("it does not obey", lambda: "the gateway was stopped" in home.daemon_log.read_text())
        assert find_gateway(home) is None
        assert run("ui", "--json").returncode == 0
        third = find_gateway(home)
        assert third is not None
        assert run("daemon", "stop").returncode == 0
        assert not third.process.is_alive()
    finally:
        end_everything(home.root)


def test_markers_artifacts_code_and_documents_of_a_run(own_world: GatewayWorld, tmp_path: Path) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "witnessed.py").write_bytes((TRAINERS / "witnessed.py").read_bytes())
    keep_all = {"keep_last": 50}  # the chosen one is read after the end
    config = job("seven", 400, step_ms=10, folder=tmp_path, checkpoint_every=10, checkpoints=keep_all)
    body = {"config": config, "base_dir": str(code), "code_dir": str(code)}
    assert own_world.send("POST", "/runs", body).status == 201

    def checkpoints() -> list[dict[str, Any]]:
        found = own_world.get("/runs/seven/artifacts?kind=checkpoint&state=present").data["artifacts"]
        assert isinstance(found, list)
        return found

    wait_until("no checkpoint", checkpoints)
    own_world.get("/runs/seven").data["forecast_reason"]
    chosen = checkpoints()[0]
    forked = own_world.send("POST", "/runs/seven/resume", {"checkpoint": chosen["artifact_id"]})
    assert (forked.status, forked.data["run"]["parent_run_id"]) == (201, "seven"), forked
    assert forked.data["run"]["start_step"] == chosen["step"]
    fork = forked.data["run"]["run_id"]
    own_world.send("POST", f"/runs/{fork}/cancel", {})
    own_world.send("POST", "/runs/seven/cancel", {})
    wait_until("not ended", lambda: own_world.get("/runs/seven").data["run"]["ended_ms"])
    markers = own_world.get("/runs/seven/markers").data["markers"]
    assert [marker["step"] for marker in markers] == sorted(marker["step"] for marker in markers)
    assert {"attempt", "checkpoint", "end", "best"} <= {marker["kind"] for marker in markers}
    assert own_world.get(f"/runs/{fork}/code/diff").data == {"against": "seven", "files": []}

    content = own_world.get(f"/artifacts/{chosen['artifact_id']}")
    assert len(content.body) == chosen["size_bytes"]
    assert content.headers["content-disposition"].startswith("attachment")
    assert content.headers["etag"] == f'"{chosen["sha256"]}"'
    part = own_world.get(f"/artifacts/{chosen['artifact_id']}", Range="bytes=3-8")
    assert (part.status, part.body) == (206, content.body[3:9])
    known = {"If-None-Match": content.headers["etag"]}
    assert own_world.get(f"/artifacts/{chosen['artifact_id']}", **known).status == 304
    assert own_world.get("/artifacts/a0000").status == 404
    other = own_world.send("POST", f"/runs/{fork}/resume", {"checkpoint": chosen["artifact_id"]})
    assert other.status == 404  # of another run

    files = own_world.get("/runs/seven/code").data["files"]
    (module,) = [file for file in files if file["path"] == "witnessed.py"]
    assert (
        own_world.get(f"/runs/seven/code/files/{module['sha256']}").body
        == (code / "witnessed.py").read_bytes()
    )
    assert own_world.get(f"/runs/seven/code/files/{'0' * 64}").status == 404
    (code / "witnessed.py").write_text((TRAINERS / "witnessed.py").read_text() + "\nMORE = 1\n")
    (code / "new.py").write_text("x = 1\n")
    again = {"config": {**config, "run_id": "eight"}, "base_dir": str(code), "code_dir": str(code)}
    assert own_world.send("POST", "/runs", again).status == 201
    own_world.send("POST", "/runs/eight/cancel", {})
    diff = {file["path"]: file for file in own_world.get("/runs/eight/code/diff?against=seven").data["files"]}
    assert diff["new.py"]["status"] == "added"
    assert "+MORE = 1" in diff["witnessed.py"]["diff"].splitlines()
    assert own_world.get("/runs/eight/code/diff").status == 404  # it continues no other

    documents = own_world.get("/runs/seven/documents").data["documents"]
    assert {"job", "environment"} <= set(documents)
    assert own_world.get("/runs/seven/documents/job").data["run_id"] == "seven"
    assert own_world.get("/runs/seven/documents/environment").data["run_id"] == "seven"
    assert own_world.get("/runs/seven/documents/token").status == 400


def test_a_killed_run_shows_what_was_taken_back_and_that_it_resumed_exactly(
    own_world: GatewayWorld, tmp_path: Path
) -> None:
    body = {
        "config": job("nine", 60, step_ms=30, folder=tmp_path, checkpoint_every=10),
        "base_dir": str(TRAINERS),
    }
    assert own_world.send("POST", "/runs", body).status == 201

    def details() -> Any:
        return own_world.get("/runs/nine").data

    wait_until("no step beyond a checkpoint", lambda: details()["run"]["step"] >= 25)
    os.kill(details()["attempts"][0]["pid"], signal.SIGKILL)
    wait_until("not ended", lambda: details()["run"]["ended_ms"])
    found = details()
    assert (found["run"]["state"], found["run"]["attempt"]) == ("COMPLETED", 2)
    assert found["exactness"]["state"] == found["run"]["exactness"]["state"] == "exact"
    answer = own_world.get("/runs/nine/metrics?name=train/loss&with_discarded=1").data
    assert answer["series"][0]["steps"] == list(range(1, 61))
    (discarded,) = answer["discarded"]
    assert discarded["attempt"] == 1
    kinds = [marker["kind"] for marker in own_world.get("/runs/nine/markers").data["markers"]]
    assert {"attempt", "kill", "resume", "end"} <= set(kinds)
    (kill,) = [each for each in own_world.get("/runs/nine/markers").data["markers"] if each["kind"] == "kill"]
    assert "kill" in kill["text"]


def test_with_a_certificate_it_speaks_tls_alone_and_its_cookie_is_secure(tmp_path: Path) -> None:
    certificate, private_key = make_certificate(tmp_path)
    settings = SETTINGS.replace(
        "[inventory]",
        f'[http]\ncertificate = "{certificate}"\nprivate_key = "{private_key}"\nnames = ["gpu.example"]\n[inventory]',
    )
    with GatewayWorld(tmp_path / "home", settings=settings) as world:
        url = world.gateway.draw_login()
        assert url.startswith("https://gpu.example:")
        context = ssl.create_default_context(cafile=str(certificate))
        context.check_hostname = False
        host, port = world.gateway.address.split(":")
        link = http.client.HTTPSConnection(host, int(port), timeout=DEADLINE_S, context=context)
        own = {"Host": f"gpu.example:{port}", "Content-Type": "application/json"}
        token = json.dumps({"token": url.partition("#token=")[2]})
        link.request("POST", "/api/v1/login", token, own)
        answer = link.getresponse()
        assert answer.status == 204
        assert "Secure" in (answer.getheader("set-cookie") or "")
        answer.read()
        link.close()
        plain = http.client.HTTPConnection(host, int(port), timeout=DEADLINE_S)
        plain.request("GET", "/")
        with pytest.raises((http.client.HTTPException, ConnectionError)):
            plain.getresponse()
        plain.close()


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """Signed by itself."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "gpu.example")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=2))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    certificate, private_key = folder / "cert.pem", folder / "key.pem"
    certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    private_key.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    return certificate, private_key
