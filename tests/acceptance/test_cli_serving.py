"""A trained run is served, promoted, refused, rolled back, followed, and learns from feedback, as people and programs do
it: with the real `trn`, a real daemon and a real server."""

import contextlib
import http.client
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from command_line import TRN, environ, read_lines, trn
from daemon_process import DaemonProcess, end_everything
from served_world import ask, make_home, run_trn, serve, status_of, until, write_project

from trn import Client
from trn.core.errors import UnavailableError

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))

pytestmark = pytest.mark.usefixtures("warm_launchers")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """With the run `line`, which saved line@50, line@100 and line@150."""
    folder = tmp_path_factory.mktemp("serving")
    home = make_home(folder)
    try:
        job = write_project(folder / "project")
        assert run_trn(home, "run", job)[-1]["event"] == "job_completed"
        yield home
    finally:
        end_everything(home)


def test_a_run_is_served_asked_promoted_refused_and_rolled_back(home: Path) -> None:
    serving = serve(home, "line@100")
    assert (serving["name"], serving["run_id"], serving["version"]["step"]) == ("line", "serve-line", 100)
    first = ask(serving)
    assert (first.status, first.label) == (200, "line@100")
    assert first.headers["x-trn-weights"] == serving["version"]["weights_hash"]

    (done,) = run_trn(home, "promote", "line", "@150")
    assert (done["event"], done["version"]["step"], done["previous"]["step"]) == ("promotion_done", 150, 100)
    assert ask(serving).label == "line@150"
    refused = trn(home, "promote", "line", "@50", "--set", "metric=val/loss", "--json")
    assert refused.returncode == 1
    assert json.loads(refused.stdout)["cause"] == "metric"
    assert "nothing changed: the model before it answers" in refused.stderr
    assert ask(serving).label == "line@150"
    assert run_trn(home, "rollback", "line")[0]["version"]["step"] == 100
    again = ask(serving)
    assert (again.label, again.body) == ("line@100", first.body)

    status = status_of(home, "serve-line")
    for other, hint in (("lin", "did you mean 'line'?"), ("other", "`trn serve RUN --name other`")):
        assert hint in trn(home, "promote", other, "line@50").stderr
    assert [item["state"] for item in status["promotions"]] == ["done", "refused", "done"]
    assert status["served"]["live"]["step"] == 100
    (row,) = [row for row in run_trn(home, "list") if row["run_id"] == "serve-line"]
    assert (row["kind"], row["live"]["step"], row["url"]) == ("server", 100, serving["url"])
    assert row["reason"] == f"serves line@100 at {serving['url']}"
    assert trn(home, "why", "serve-line", "--format", "table").stdout.startswith(
        "serve-line has been running for"
    )


def test_an_equal_serve_is_answered_by_the_server_that_lives_and_another_is_refused(home: Path) -> None:
    serving = serve(home, "line@100", "--name", "equal")
    again = trn(home, "serve", "line@100", "--name", "equal", "--cpu-only", "--detach", "--json")
    assert json.loads(again.stdout) == serving
    assert "trn: already served: serve-equal serves line@100 at http://127.0.0.1:" in again.stderr
    other = trn(home, "serve", "line@50", "--name", "equal", "--cpu-only", "--detach", "--json")
    assert other.returncode == 6
    assert "`trn promote equal line@50` changes the model" in other.stderr
    assert trn(home, "rm", "serve-equal").returncode == 6
    assert trn(home, "resume", "serve-equal").returncode == 3

    run_trn(home, "cancel", "serve-equal")
    assert (
        trn(home, "wait", "serve-equal", "--json").returncode == 8
    )  # cancelled: it has answered what was asked
    assert status_of(home, "serve-equal")["state"] == "CANCELLED"
    shown = trn(home, "status", "serve-equal", "--format", "table").stdout
    assert ("\nserved as equal\n" in shown, "goes back" in shown) == (True, False)
    anew = serve(home, "line@50", "--name", "equal")
    assert (anew["run_id"], ask(anew).label) == ("serve-equal.2", "line@50")


def test_what_cannot_be_served_is_said_before_anything_starts(home: Path) -> None:
    for words, code, text in (
        (("line@75",), 4, "run line has no checkpoint of step 75: it has 50, 100, 150"),
        (("nothing",), 4, "there is no run 'nothing'"),
        (("line@best@",), 3, "names no checkpoint"),
        (("line", "--address", "0.0.0.0:80"), 3, "requests would travel in the clear"),
        (("line", "--name", "a b"), 3, "expected letters, digits"),
        (("line", "--set", "serving.replica=2"), 3, "replicas"),
        (("line", "--set", "max_steps=2"), 3, "does not train"),
        (("line", "--set", "trainer=line:Other"), 3, "found 'line:Other', but line@"),
        (
            ("line", "--set", 'serving.feedback={"rows": 4, "train": {"max_stpes": 2}}'),
            3,
            "serving.feedback.train: the run that feedback would train: unknown field `max_stpes`: did you mean `max_steps`?",
        ),
        (("line", "--replicas", "1", "--set", "serving.replicas=2"), 3, "is given by --replicas, too"),
    ):
        done = trn(home, "serve", *words, "--cpu-only", "--detach", "--json")
        assert (done.returncode, text in done.stderr) == (code, True), (words, done.stderr)
    for words, code in ((("nowhere", "@1"), 4), (("nowhere",), 2), (("line", "@1", "--token"), 2)):
        assert trn(home, "promote", *words).returncode == code
    assert trn(home, "rollback", "nowhere").returncode == 4


def test_a_killed_server_is_started_again_at_once_with_what_was_promoted(home: Path) -> None:
    serving = serve(home, "line@100", "--name", "killed")
    run_trn(home, "promote", "killed", "@150")
    before = status_of(home, "serve-killed")
    os.kill(before["attempts"][0]["pid"], signal.SIGKILL)

    def is_back() -> bool:
        served = status_of(home, "serve-killed")
        return len(served["attempts"]) == 2 and served["served"]["is_ready"]

    until(is_back, "the server is not back")
    assert ask(serving).label == "line@150"  # where it answered before
    after = status_of(home, "serve-killed")
    assert after["attempts"][0]["cause"]["values"]["outlook"] == "at-once"
    assert [item["state"] for item in after["promotions"]] == ["done"]


def test_a_better_checkpoint_of_a_followed_run_is_promoted_by_itself_and_not_again_after_a_rollback(
    home: Path,
) -> None:
    serving = serve(home, "line@50", "--name", "follower", "--follow")

    def promotions() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = status_of(home, "serve-follower")["promotions"]
        return found

    until(lambda: [item["state"] for item in promotions()] == ["done"], "it did not follow")
    assert (promotions()[0]["by"], ask(serving).label) == ("follow line", "line@150")
    run_trn(home, "rollback", "follower")
    assert ask(serving).label == "line@50"
    with Client(home) as client:  # the daemon has looked again since
        seen = client.health().last_change
        until(lambda: client.health().last_change > seen + 1, "nothing happens")
    assert [item["action"] for item in promotions()] == ["rollback", "promote"]


def test_a_server_in_front_of_a_program_prints_its_events_and_ctrl_c_drains_it(home: Path) -> None:
    import subprocess

    process = subprocess.Popen(
        [TRN, "serve", "line", "--name", "front", "--cpu-only", "--json"],
        env=environ(home),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    events = []
    with process.stdout as lines:
        for line in lines:
            events.append(json.loads(line))
            if events[-1]["event"] == "ready":
                process.send_signal(signal.SIGINT)
    assert process.wait(60) == 8
    assert [events[0]["event"], events[-1]["event"]] == ["job_submitted", "job_cancelled"]
    assert events[0]["notes"][0].startswith("model: line@150, the best by val/loss")


def test_a_promotion_is_done_once_wherever_the_daemon_dies(tmp_path: Path) -> None:
    home = make_home(tmp_path)
    try:
        assert run_trn(home, "run", write_project(tmp_path / "project"))[-1]["event"] == "job_completed"
        serving = serve(home, "line@50")
        end_daemon(home)
        steps = {"promotion.recorded": 100, "promotion.written": 150, "promotion.signalled": 100}
        for number, (point, step) in enumerate(steps.items(), 1):
            daemon = DaemonProcess(home, failpoints=f"{point}=kill")
            daemon.wait_ready()
            with Client(home, patience_s=0) as client, contextlib.suppress(UnavailableError):
                client.promote("line", f"@{step}", promotion_id=f"p{number}")
            daemon.process.wait(60)
            following = DaemonProcess(home)
            following.wait_ready()
            with Client(home) as client:
                made = client.promote("line", f"@{step}", promotion_id=f"p{number}")  # the reply may be lost
                ended = client.wait_promotion(made)
                assert (made.number, ended.state) == (number, "done"), point
                assert ask(serving).label == f"line@{step}"
            following.kill()
        events = (home / "runs" / "serve-line" / "metrics" / "events.jsonl").read_text().splitlines()
        done = [event["number"] for event in map(json.loads, events) if event["event"] == "promoted"]
        assert done == [1, 2, 3]
    finally:
        end_everything(home)


def end_daemon(home: Path) -> None:
    pid = json.loads((home / "daemon.json").read_text())["pid"]
    process = psutil.Process(pid)
    process.kill()
    process.wait(60)


def test_a_prediction_has_the_bits_of_the_server_and_an_equal_one_is_not_predicted_again(
    home: Path, tmp_path: Path
) -> None:
    import numpy
    import pyarrow.parquet

    data, out = home.parent / "project" / "train.parquet", tmp_path / "out"
    words = ("predict", "line@150", "--data", data, "--out", out, "--copy", "x", "--cpu-only")
    assert run_trn(home, *words)[-1]["event"] == "job_completed"
    parts = json.loads((out / "predictions.json").read_text())["parts"]
    assert f" {out}\n" in trn(home, "status", "predict-line", "--format", "table").stdout
    first = pyarrow.parquet.read_table(out / parts[0]["name"])
    serving = serve(home, "line@150", "--name", "bits")
    answer = ask(serving, rows=[{"x": x} for x in first["x"].to_pylist()[:32]])
    assert answer.headers["x-trn-batch-shape"] == "32"
    answered = numpy.array([row["y"] for row in answer.body["rows"]], "float32")
    assert answered.tobytes() == first["y"].to_numpy()[:32].astype("float32").tobytes()

    again = trn(home, *words, "--json")
    assert again.stderr.startswith("not predicted again: predict-line has the same input")
    told = trn(home, *words, "--format", "table").stdout
    assert told.endswith(f"  predictions.json in {out} lists the files\n")
    (out / parts[1]["name"]).unlink()
    alone = run_trn(home, "predict", "line@150", "--data", data, "--out", tmp_path / "alone", "--cpu-only")
    assert alone[-1]["event"] == "job_completed", "without columns of the data"
    anew = run_trn(home, *words)
    assert "predicted anew: predict-line is equal, but" in anew[0]["notes"][0]
    assert anew[-1]["event"] == "job_completed"
    assert (out / parts[1]["name"]).exists()


def test_what_cannot_be_predicted_is_refused_before_it_is_queued(home: Path, tmp_path: Path) -> None:
    data = home.parent / "project" / "train.parquet"
    (tmp_path / "no.parquet").write_bytes(b"PAR1 and no more")
    words = ("predict", "line@150", "--out", tmp_path / "out", "--cpu-only", "--json")
    for more, text in (
        (("--data", tmp_path / "no.parquet"), "no.parquet: not a complete parquet file"),
        (("--data", data, "--copy", "idd"), "no column 'idd'"),
    ):
        done = trn(home, *words, *more)
        assert (done.returncode, text in done.stderr) == (3, True), done.stderr
        assert read_lines(done)[-1]["event"] == "job_rejected"
    run_trn(home, "run", write_project(tmp_path / "mute", run_id="mute", trainer="served:Mute"))
    done = trn(home, "predict", "mute", "--data", data, *words[2:])
    assert (done.returncode, "has no `predict`" in done.stderr) == (3, True), done.stderr


def test_the_http_api_shows_a_served_name_and_promotes_it(home: Path) -> None:
    serving = serve(home, "line@100", "--name", "web")
    gate = run_trn(home, "ui", "--no-browser")[0]

    def call(method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
        connection = http.client.HTTPConnection(gate["address"].removeprefix("http://"), timeout=60)
        headers = {"Authorization": f"Bearer {gate['bearer']}", "Content-Type": "application/json"}
        try:
            connection.request(method, f"/api/v1{path}", None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    status, made = call("POST", "/served/web/promote", {"model": "@150", "promotion_id": "one"})
    assert (status, made["by"], made["version"]["step"]) == (201, "http", 150)
    assert call("POST", "/served/web/promote", {"model": "@150", "promotion_id": "one"})[1]["number"] == 1
    until(lambda: call("GET", "/served/web")[1]["promotions"][0]["state"] == "done", "not promoted")
    assert ask(serving).label == "line@150"
    assert call("POST", "/served/web/promote", {"model": "@75"})[0] == 404
    assert call("POST", "/served/web/promote", {"model": "@50", "action": "load"})[0] == 400
    assert call("GET", "/served/nothing")[0] == 404
    details = call("GET", "/runs/serve-web")[1]
    assert (details["run"]["kind"], details["run"]["serves"]) == ("server", "line@150")
    assert (details["served"]["previous"]["step"], len(details["promotions"])) == (100, 1)
    (listed,) = [run for run in call("GET", "/runs")[1]["runs"] if run["run_id"] == "serve-web"]
    assert (listed["serves"], listed["url"]) == ("line@150", serving["url"])
    marks = call("GET", "/runs/serve-web/markers")[1]["markers"]
    assert [mark["text"] for mark in marks if mark["kind"] == "promotion"] == ["promote line@150 by http"]
    assert "web" in [item["name"] for item in call("GET", "/served")[1]["served"]]


def test_feedback_trains_the_next_model_from_the_live_one_and_serves_it(home: Path) -> None:
    train = json.dumps({"max_steps": 100, "checkpoint_every": 100})
    rule = ("--set", "serving.feedback.rows=8", "--set", f"serving.feedback.train={train}")
    serving = serve(home, "line@50", "--name", "loop", *rule)
    for number in range(8):
        asked = ask(serving, rows=[{"x": [number, 1, 1, 1]}])
        row = {"request_id": asked.headers["x-request-id"], "row": 0, "y": number + 9.0}
        assert ask(serving, "/v1/feedback", rows=[row]).body["accepted"] == 1
    until(lambda: ask(serving).label != "line@50", "the next model is not served")
    status = status_of(home, "serve-loop")
    (promotion,) = status["promotions"]
    child = status_of(home, promotion["version"]["run_id"])
    assert (promotion["by"], child["parent_run_id"], child["state"]) == ("feedback 1", "line", "COMPLETED")
    assert child["config"]["weights"] == status["config"]["serving"]["version"]["checkpoint"]
    own, fed = child["config"]["dataset"]["parquet_paths"]
    assert (own, Path(fed).is_relative_to(home / "runs" / "serve-loop")) == ("train.parquet", True)
