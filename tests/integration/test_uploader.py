# ruff: noqa: F811  (fixtures are imported by name)

import hashlib
import json
import math
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from object_servers import (  # noqa: F401
    Reply,
    closed_port,
    gcs_endpoint,
    http_server,
    s3_endpoint,
    s3_server,
    wait_until,
)

from gen_worker.errors import InputError, StartupError, UploadError
from gen_worker.trainer.authz import authorize_start
from gen_worker.trainer.inputs import fetch, materialize_inputs
from gen_worker.trainer.transfer.input_cache import InputCache
from gen_worker.trainer.transfer.policy import ObjectStoreOptions, RetryPolicy, TransferOptions
from gen_worker.trainer.transfer.upload_lane import PointBacklog
from gen_worker.trainer.transfer.upload_parcels import Sender
from gen_worker.trainer.uploader import ArtifactUploader, UploadFailure, UploadLimits, UploadTargets

TOKEN = "opaque-capability-0123456789abcdef"
WAIT_S = 60.0
EAGER = RetryPolicy(max_attempts=4, base_s=0.0, cap_s=0.0)


def all_targets(base: str) -> UploadTargets:
    return UploadTargets(
        metrics_url=f"{base}/metrics",
        checkpoint_url=f"{base}/checkpoint",
        sample_url=f"{base}/sample",
        terminal_url=f"{base}/terminal",
    )


@pytest.fixture
def failures() -> list[UploadFailure]:
    return []


@pytest.fixture
def make(failures):
    made: list[ArtifactUploader] = []

    def build(targets: UploadTargets, **changes) -> ArtifactUploader:
        wanted = {
            "run_id": "run 1/ä",
            "owner": "ada",
            "attempt": 2,
            "limits": UploadLimits(linger_s=0.0),
            "options": TransferOptions(retry=EAGER),
            "on_failure": failures.append,
        }
        made.append(ArtifactUploader(targets=targets, **(wanted | changes)))
        return made[-1]

    yield build
    for uploader in made:
        uploader.close()


def write_checkpoint(folder: Path, step: int, data: bytes = b"weights") -> tuple[Path, Path]:
    path, meta = folder / f"step-{step:08d}.pt", folder / f"step-{step:08d}.meta.json"
    path.write_bytes(data)
    meta.write_text(json.dumps({"step": step}))
    return path, meta


def upload(uploader: ArtifactUploader, files: tuple[Path, Path], **more: Any) -> None:
    uploader.upload_checkpoint_files(local_path=files[0], meta_path=files[1], **more)


def bearer():
    return authorize_start(orchestrated=True, token=TOKEN, public_key_pem=None, run_id="run-1", owner=None)


# What a receiver sees


def test_a_checkpoint_arrives_whole_with_its_meta_last(http_server, tmp_path, make, failures):
    data = os.urandom(3_000_000)
    path, meta = write_checkpoint(tmp_path, 7, data)
    uploader = make(all_targets(http_server.url), auth=bearer())
    upload(uploader, (path, meta), step=7, final=True)
    assert uploader.drain(WAIT_S) == []
    first, second = http_server.seen("/checkpoint")
    assert (first.body, second.body) == (data, meta.read_bytes())
    assert first.has_valid_digest
    assert second.has_valid_digest
    assert first.method == "POST"
    assert first.headers["authorization"] == f"Bearer {TOKEN}"
    assert first.headers["content-length"] == str(len(data))
    assert "transfer-encoding" not in first.headers
    assert first.headers["x-trn-run-id"] == "run%201/%C3%A4"
    assert (first.headers["x-trn-step"], first.headers["x-trn-attempt"]) == ("7", "2")
    assert first.headers["x-trn-final"] == "1"
    assert first.headers["x-trn-file-name"] == "step-00000007.pt"
    assert second.headers["x-trn-file-name"] == "step-00000007.meta.json"
    assert first.headers["idempotency-key"] != second.headers["idempotency-key"]
    assert path.read_bytes() == data
    assert failures == []


def test_metrics_arrive_in_order_in_batches(http_server, make):
    uploader = make(all_targets(http_server.url), limits=UploadLimits(linger_s=0.0, max_batch_points=10))
    for step in range(95):
        uploader.upload_metrics(step=step, metrics={"train/loss": step / 2}, timestamp_ms=1000 + step)
    assert uploader.drain(WAIT_S) == []
    bodies = [json.loads(request.body) for request in http_server.seen("/metrics")]
    assert {(body["run_id"], body["attempt"]) for body in bodies} == {("run 1/ä", 2)}
    points = [point for body in bodies for point in body["points"]]
    assert [point["step"] for point in points] == list(range(95))
    assert points[3] == {"step": 3, "timestamp_ms": 1003, "values": {"train/loss": 1.5}}
    assert max(len(body["points"]) for body in bodies) <= 10


def test_points_wait_for_company_and_a_drain_does_not_wait_for_them(http_server, make):
    uploader = make(all_targets(http_server.url), limits=UploadLimits(linger_s=3600.0))
    for step in range(5):
        uploader.upload_metrics(step=step, metrics={"loss": 1.0})
    assert uploader.drain(WAIT_S) == []
    (request,) = http_server.seen("/metrics")
    assert len(json.loads(request.body)["points"]) == 5


def test_numbers_that_json_lacks_travel_as_words(http_server, make):
    import numpy

    uploader = make(all_targets(http_server.url))
    values = {"a": math.nan, "b": math.inf, "c": -math.inf, "d": numpy.float32(0.5), "e": 3}
    uploader.upload_metrics(step=1, metrics=values, timestamp_ms=1)
    assert uploader.drain(WAIT_S) == []
    (point,) = json.loads(http_server.seen("/metrics")[0].body)["points"]
    assert point["values"] == {"a": "NaN", "b": "Infinity", "c": "-Infinity", "d": 0.5, "e": 3}


def test_samples_and_the_end_arrive(http_server, tmp_path, make):
    sample = tmp_path / "ä b.png"
    sample.write_bytes(b"png")
    uploader = make(all_targets(http_server.url), auth=bearer())
    uploader.upload_sample(local_path=sample, step=3)
    uploader.terminal("failed", step=9, category="train-step", error=f"lost {TOKEN} at https://h/p?sig=1")
    assert uploader.drain(WAIT_S) == []
    (request,) = http_server.seen("/sample")
    assert (request.body, request.headers["x-trn-file-name"]) == (b"png", "%C3%A4%20b.png")
    assert json.loads(http_server.seen("/terminal")[0].body) == {
        "run_id": "run 1/ä",
        "attempt": 2,
        "status": "failed",
        "step": 9,
        "category": "train-step",
        "error": "lost *** at https://h/p?***",
        "final_checkpoint": None,
    }


def test_the_end_is_told_after_all_else(http_server, tmp_path, make):
    hold = threading.Event()
    http_server.script["/checkpoint"].append(Reply(status=201, hold=hold))
    uploader = make(all_targets(http_server.url))
    upload(uploader, write_checkpoint(tmp_path, 1), step=1)
    uploader.terminal("completed", step=1)
    http_server.wait_for_requests("/checkpoint", 1)
    uploader.upload_metrics(step=1, metrics={"loss": 1.0})
    http_server.wait_for_requests("/metrics", 1)  # lanes do not wait for each other
    assert http_server.seen("/terminal") == []
    hold.set()
    assert uploader.drain(WAIT_S) == []
    assert http_server.requests[-1].path == "/terminal"


def test_the_end_is_told_even_if_an_artifact_never_gets_through(http_server, tmp_path, make, monkeypatch):
    monkeypatch.setattr("gen_worker.trainer.uploader.TERMINAL_SHARE", 1.0)  # all of the drain is its time
    hold = threading.Event()
    http_server.script["/checkpoint"].append(Reply(status=201, hold=hold))
    uploader = make(all_targets(http_server.url))
    upload(uploader, write_checkpoint(tmp_path, 1), step=1)
    uploader.terminal("completed", step=1)
    drained: list[object] = []
    drain = threading.Thread(target=lambda: drained.append(uploader.drain(WAIT_S)))
    drain.start()
    http_server.wait_for_requests("/terminal", 1)
    assert drained == []
    hold.set()
    drain.join(WAIT_S)
    assert drained == [[]]


def test_kinds_without_a_target_are_not_uploaded(http_server, tmp_path, make):
    uploader = make(UploadTargets(terminal_url=f"{http_server.url}/terminal"))
    uploader.upload_metrics(step=1, metrics={"loss": 1.0})
    uploader.upload_sample(local_path=tmp_path / "none.png", step=1)
    upload(uploader, (tmp_path / "none.pt", tmp_path / "none.json"), step=1)
    uploader.terminal("completed", step=1)
    assert uploader.drain(WAIT_S) == []
    assert [request.path for request in http_server.requests] == ["/terminal"]


# When it fails


def test_a_retry_repeats_the_body_and_the_key(http_server, tmp_path, make):
    http_server.script["/checkpoint"].extend([Reply(status=500), Reply(drop=True), Reply(status=409)])
    uploader = make(all_targets(http_server.url))
    path, meta = write_checkpoint(tmp_path, 7, b"w" * 100_000)
    upload(uploader, (path, meta), step=7)
    assert uploader.drain(WAIT_S) == []
    requests = http_server.seen("/checkpoint")
    data_requests = [r for r in requests if r.headers["x-trn-file-name"].endswith(".pt")]
    assert len(data_requests) == 4
    assert {request.body for request in data_requests} == {b"w" * 100_000}
    assert len({request.headers["idempotency-key"] for request in data_requests}) == 1
    assert len(requests) == 5


def test_a_meta_file_that_fails_does_not_send_the_data_again(http_server, tmp_path, make):
    http_server.script["/checkpoint"].extend([Reply(status=201), Reply(status=503), Reply(status=201)])
    uploader = make(all_targets(http_server.url))
    upload(uploader, write_checkpoint(tmp_path, 7), step=7)
    assert uploader.drain(WAIT_S) == []
    names = [request.headers["x-trn-file-name"] for request in http_server.seen("/checkpoint")]
    assert names == ["step-00000007.pt", "step-00000007.meta.json", "step-00000007.meta.json"]


def test_a_digest_the_caller_knows_is_used(http_server, tmp_path, make):
    uploader = make(all_targets(http_server.url))
    path, meta = write_checkpoint(tmp_path, 7)
    upload(uploader, (path, meta), step=7, digest="sha256:" + "ab" * 32)
    assert uploader.drain(WAIT_S) == []
    assert http_server.seen("/checkpoint")[0].headers["idempotency-key"].endswith("ab" * 32)


@pytest.mark.parametrize("status", [400, 404, 413, 301])
def test_a_lasting_refusal_is_reported_after_one_attempt(http_server, tmp_path, make, failures, status):
    http_server.always["/checkpoint"] = Reply(status=status, body=b"no such thing")
    uploader = make(all_targets(http_server.url))
    path, meta = write_checkpoint(tmp_path, 7)
    upload(uploader, (path, meta), step=7)
    assert uploader.drain(WAIT_S) == failures
    (failure,) = failures
    assert (failure.kind, failure.path, failure.step) == ("checkpoint", str(path), 7)
    assert str(status) in failure.reason
    assert len(http_server.seen("/checkpoint")) == 1
    assert path.exists()


def test_a_dead_endpoint_is_reported_and_the_files_stay(tmp_path, make, failures):
    uploader = make(all_targets(f"http://127.0.0.1:{closed_port()}"))
    path, meta = write_checkpoint(tmp_path, 7)
    upload(uploader, (path, meta), step=7)
    uploader.upload_metrics(step=7, metrics={"loss": 1.0})
    uploader.terminal("completed", step=7)
    uploader.drain(WAIT_S)
    assert {failure.kind for failure in failures} == {"checkpoint", "metrics", "terminal"}
    assert all("after 4 attempts" in failure.reason for failure in failures)
    assert path.exists()
    assert meta.exists()


def test_a_refused_token_stops_that_target_and_no_other(http_server, tmp_path, make, failures):
    http_server.always["/checkpoint"] = Reply(status=403, body=TOKEN.encode())
    uploader = make(all_targets(http_server.url), auth=bearer())
    for step in (1, 2, 3):
        upload(uploader, write_checkpoint(tmp_path, step), step=step)
    uploader.upload_metrics(step=1, metrics={"loss": 1.0})
    uploader.drain(WAIT_S)
    assert len(http_server.seen("/checkpoint")) == 1
    assert len(http_server.seen("/metrics")) == 1
    assert [(failure.step, failure.is_auth) for failure in failures] == [(1, True), (2, True), (3, True)]
    assert TOKEN not in repr(failures)


def test_metrics_refused_for_hours_are_one_report(http_server, make, failures):
    http_server.always["/metrics"] = Reply(status=401)
    uploader = make(all_targets(http_server.url))
    uploader.upload_metrics(step=0, metrics={"loss": 1.0})
    wait_until(lambda: failures)
    for step in range(1, 500):
        uploader.upload_metrics(step=step, metrics={"loss": 1.0})
    uploader.drain(WAIT_S)
    assert len(http_server.seen("/metrics")) == 1
    assert [failure.num_lost for failure in failures] == [1, 499]


def test_a_slow_endpoint_holds_up_no_caller_and_thins_with_a_count(http_server, make, failures):
    hold = threading.Event()
    http_server.script["/metrics"].append(Reply(status=201, hold=hold))
    uploader = make(all_targets(http_server.url), limits=UploadLimits(linger_s=0.0, max_points=100))
    uploader.upload_metrics(step=0, metrics={"loss": 0.0})
    http_server.wait_for_requests("/metrics", 1)
    for step in range(1, 10_001):
        uploader.upload_metrics(step=step, metrics={"loss": float(step)})  # returns although nothing moves
    hold.set()
    uploader.drain(WAIT_S)
    points = [p for request in http_server.seen("/metrics") for p in json.loads(request.body)["points"]]
    steps = [point["step"] for point in points]
    assert steps == sorted(set(steps))
    assert steps[-1] == 10_000
    assert len(steps) + sum(failure.num_lost for failure in failures) == 10_001
    assert all("dropped" in failure.reason and failure.is_skipped for failure in failures)


@pytest.mark.parametrize("max_points", range(2, 9))
def test_thinning_keeps_the_newest_point_and_counts_the_rest(max_points):
    sender = Sender(run_id="r", owner=None, attempt=1)
    backlog = PointBacklog(UploadLimits(max_points=max_points), sender)
    for step in range(max_points + 1):
        backlog.add(step, 0, {"loss": 1.0})
    (loss,) = backlog.take_losses()
    job = backlog.take()
    assert job.step == max_points
    assert job.num_points + loss.num_lost == max_points + 1


def test_wide_points_are_bounded_too(http_server, make, failures):
    hold = threading.Event()
    http_server.script["/metrics"].append(Reply(status=201, hold=hold))
    uploader = make(all_targets(http_server.url), limits=UploadLimits(linger_s=0.0, max_point_values=1000))
    uploader.upload_metrics(step=0, metrics={"loss": 0.0})
    http_server.wait_for_requests("/metrics", 1)
    wide = {f"m{index}": 1.0 for index in range(300)}
    for step in range(1, 11):
        uploader.upload_metrics(step=step, metrics=wide)
    hold.set()
    uploader.drain(WAIT_S)
    sent = [p for request in http_server.seen("/metrics")[1:] for p in json.loads(request.body)["points"]]
    assert 1 <= len(sent) <= 3
    assert sum(failure.num_lost for failure in failures) == 10 - len(sent)


@pytest.mark.parametrize("limits", [{"max_files": 2}, {"max_file_bytes": 50}])
def test_when_full_the_newest_checkpoints_go_and_the_others_are_reported(
    http_server, tmp_path, make, failures, limits
):
    hold = threading.Event()
    http_server.script["/checkpoint"].append(Reply(status=201, hold=hold))
    uploader = make(all_targets(http_server.url), limits=UploadLimits(linger_s=0.0, **limits))
    paths = [write_checkpoint(tmp_path, step) for step in range(1, 7)]
    upload(uploader, paths[0], step=1)
    http_server.wait_for_requests("/checkpoint", 1)
    for step in range(2, 7):
        upload(uploader, paths[step - 1], step=step)
    hold.set()
    uploader.drain(WAIT_S)
    sent = [int(request.headers["x-trn-step"]) for request in http_server.seen("/checkpoint")[::2]]
    assert sent == [1, 5, 6]
    assert [failure.step for failure in failures] == [2, 3, 4]
    assert all("skipped" in failure.reason and failure.is_skipped for failure in failures)
    assert all(path.exists() for pair in paths for path in pair)


def test_a_file_removed_while_it_waits_is_still_sent(http_server, tmp_path, make):
    hold = threading.Event()
    http_server.script["/checkpoint"].append(Reply(status=201, hold=hold))
    uploader = make(all_targets(http_server.url))
    first, second = write_checkpoint(tmp_path, 1), write_checkpoint(tmp_path, 2, b"second")
    upload(uploader, first, step=1)
    http_server.wait_for_requests("/checkpoint", 1)
    upload(uploader, second, step=2)
    for path in (*first, *second):
        path.unlink()
    hold.set()
    assert uploader.drain(WAIT_S) == []
    assert http_server.seen("/checkpoint")[2].body == b"second"


def test_a_file_that_was_gone_before_is_reported_as_skipped(http_server, tmp_path, make, failures):
    uploader = make(all_targets(http_server.url))
    uploader.upload_sample(local_path=tmp_path / "gone.png", step=1)
    uploader.upload_sample(local_path=tmp_path, step=2)
    uploader.drain(WAIT_S)
    assert "skipped" in failures[0].reason
    assert [failure.is_skipped for failure in failures] == [True, False]
    assert "is not a file" in failures[1].reason
    assert http_server.requests == []


def test_no_descriptor_is_left_open(http_server, tmp_path, make):
    def held() -> list[str]:
        links = [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
        return [link for link in links if str(tmp_path) in link]

    http_server.script["/checkpoint"].extend([Reply(status=201), Reply(status=201), Reply(status=400)])
    uploader = make(all_targets(http_server.url), limits=UploadLimits(max_files=2))
    for step in range(1, 8):
        upload(uploader, write_checkpoint(tmp_path, step), step=step)
    uploader.drain(WAIT_S)
    uploader.close()
    assert held() == []


def test_a_failing_listener_does_not_end_the_uploads(http_server, tmp_path, make):
    def explode(failure: UploadFailure) -> None:
        raise RuntimeError("listener")

    uploader = make(all_targets(http_server.url), on_failure=explode)
    uploader.upload_sample(local_path=tmp_path / "gone.png", step=1)
    (tmp_path / "here.png").write_bytes(b"x")
    uploader.upload_sample(local_path=tmp_path / "here.png", step=2)
    assert [failure.step for failure in uploader.drain(WAIT_S)] == [1]
    assert len(http_server.seen("/sample")) == 1


def test_a_value_that_is_no_number_costs_its_batch_and_nothing_more(http_server, make, failures):
    uploader = make(all_targets(http_server.url))
    uploader.upload_metrics(step=1, metrics={"loss": object()})
    wait_until(lambda: failures)
    uploader.upload_metrics(step=2, metrics={"loss": 1.0})
    uploader.drain(WAIT_S)
    assert "unexpected TypeError" in failures[0].reason
    assert len(http_server.seen("/metrics")) == 1


def test_an_uploader_goes_on_after_a_drain_that_gave_up(http_server, tmp_path, make, failures):
    hold = threading.Event()
    http_server.script["/checkpoint"].append(Reply(status=201, hold=hold))
    uploader = make(all_targets(http_server.url))
    upload(uploader, write_checkpoint(tmp_path, 1), step=1)
    http_server.wait_for_requests("/checkpoint", 1)
    uploader.drain(0.05)
    assert [failure.step for failure in failures] == [1]
    hold.set()
    upload(uploader, write_checkpoint(tmp_path, 2), step=2)
    uploader.terminal("completed", step=2)
    assert len(uploader.drain(WAIT_S)) == 1
    assert http_server.seen("/checkpoint")[-1].headers["x-trn-step"] == "2"
    assert len(http_server.seen("/terminal")) == 1


def test_close_reports_what_it_leaves_and_may_be_called_twice(http_server, tmp_path, make, failures):
    hold = threading.Event()
    http_server.always["/checkpoint"] = Reply(status=201, hold=hold)
    uploader = make(all_targets(http_server.url))
    for step in (1, 2):
        upload(uploader, write_checkpoint(tmp_path, step), step=step)
    http_server.wait_for_requests("/checkpoint", 1)
    uploader.close(timeout_s=0.0)
    uploader.close(timeout_s=0.0)
    hold.set()
    assert sorted(failure.step for failure in failures) == [1, 2]
    with pytest.raises(UploadError, match="after close"):
        uploader.upload_metrics(step=1, metrics={})


@pytest.mark.parametrize("url", ["ftp://h/x", "nonsense", "http:///x", "s3:bucket", "https://u:PW@[/"])
def test_a_target_that_cannot_work_is_refused_at_the_start(url):
    with pytest.raises(StartupError, match="upload target checkpoint_url") as caught:
        ArtifactUploader(targets=UploadTargets(checkpoint_url=url), run_id="r")
    assert "PW" not in str(caught.value)


def test_the_token_is_in_no_report_and_no_log(http_server, make, failures, caplog):
    caplog.set_level("INFO")
    uploader = make(UploadTargets(metrics_url=f"{http_server.url}/metrics?key={TOKEN}"), auth=bearer())
    answers = [
        Reply(status=302, headers={"Location": f"https://h/?{TOKEN}"}),
        Reply(status=400, body=f"bad token {TOKEN}".encode()),
        Reply(status=401, body=TOKEN.encode()),
    ]
    for step, answer in enumerate(answers):
        http_server.script["/metrics"].append(answer)
        uploader.upload_metrics(step=step, metrics={"loss": 1.0})
        uploader.drain(WAIT_S)
    assert [failure.step for failure in failures] == [0, 1, 2]
    assert TOKEN not in repr(failures)
    assert "bad token ***" in repr(failures)
    assert TOKEN not in caplog.text


def test_a_child_process_cannot_use_the_parents_uploader(http_server, make):
    uploader = make(all_targets(http_server.url))
    uploader._process_id = os.getpid() + 1
    with pytest.raises(UploadError, match="make one there"):
        uploader.upload_metrics(step=1, metrics={})
    assert uploader.drain(0.0) == []
    uploader.close()
    uploader._process_id = os.getpid()


def test_a_dead_endpoint_does_not_keep_the_process_from_ending(http_server):
    hold = threading.Event()
    http_server.always["/metrics"] = Reply(hold=hold)
    code = f"""
from gen_worker.trainer.transfer.upload_lane import PointBacklog
from gen_worker.trainer.transfer.upload_parcels import Sender
from gen_worker.trainer.uploader import *
u = ArtifactUploader(targets=UploadTargets(metrics_url="{http_server.url}/metrics"), run_id="r")
u.upload_metrics(step=1, metrics={{"loss": 1.0}})
print(len(u.drain(0.2)))
u.close()
"""
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=False
    )
    hold.set()
    assert (run.returncode, run.stdout.strip()) == (0, "1"), run.stderr


# Object stores


def stored(server) -> dict[str, bytes]:
    listing = server.client.list_objects_v2(Bucket=server.bucket).get("Contents", [])
    return {
        item["Key"]: server.client.get_object(Bucket=server.bucket, Key=item["Key"])["Body"].read()
        for item in listing
    }


def test_everything_arrives_in_an_object_store(s3_server, tmp_path, make):
    data = os.urandom(6_000_000)
    prefix = f"s3://{s3_server.bucket}/runs/r1"
    uploader = make(
        all_targets(prefix),
        options=TransferOptions(retry=EAGER, object_store=ObjectStoreOptions(s3_endpoint=s3_server.endpoint)),
    )
    path, meta = write_checkpoint(tmp_path, 7, data)
    upload(uploader, (path, meta), step=7)
    uploader.upload_sample(local_path=meta, step=3)
    uploader.upload_metrics(step=1, metrics={"loss": 0.5}, timestamp_ms=5)
    uploader.terminal("completed", step=7, final_checkpoint="final.pt")
    assert uploader.drain(WAIT_S) == []
    found = stored(s3_server)
    assert found["runs/r1/checkpoint/step-00000007.pt"] == data
    assert found["runs/r1/checkpoint/step-00000007.meta.json"] == meta.read_bytes()
    assert found["runs/r1/sample/step-00000003/step-00000007.meta.json"] == meta.read_bytes()
    assert json.loads(found["runs/r1/metrics/metrics-0002-00000001.json"])["points"][0]["step"] == 1
    assert json.loads(found["runs/r1/terminal/terminal-0002.json"])["final_checkpoint"] == "final.pt"


def test_a_missing_bucket_is_reported_and_a_dead_store_is_retried(s3_server, tmp_path, make, failures):
    path, meta = write_checkpoint(tmp_path, 7)
    for endpoint, bucket in (
        (s3_server.endpoint, "no-such-bucket"),
        (f"http://127.0.0.1:{closed_port()}", "bucket"),
    ):
        uploader = make(
            UploadTargets(checkpoint_url=f"s3://{bucket}/p"),
            options=TransferOptions(retry=EAGER, object_store=ObjectStoreOptions(s3_endpoint=endpoint)),
        )
        upload(uploader, (path, meta), step=7)
        uploader.drain(WAIT_S)
    assert [failure.path for failure in failures] == [str(path), str(path)]
    assert "after 4 attempts" not in failures[0].reason
    assert "after 4 attempts" in failures[1].reason


def test_an_object_cut_short_is_not_left_behind(s3_server, tmp_path, make, failures):
    path, meta = write_checkpoint(tmp_path, 7, bytes(3_000_000))
    uploader = make(
        UploadTargets(checkpoint_url=f"s3://{s3_server.bucket}/p"),
        options=TransferOptions(retry=EAGER, object_store=ObjectStoreOptions(s3_endpoint=s3_server.endpoint)),
    )
    with uploader._lock:  # the lane cannot take the job before the file is shorter
        upload(uploader, (path, meta), step=7, digest="sha256:" + "ab" * 32)
        os.truncate(path, 2_000_000)
    uploader.drain(WAIT_S)
    assert "became shorter" in failures[0].reason
    assert [key for key in stored(s3_server) if not key.endswith("/")] == []


def test_an_upload_that_is_given_up_half_way_leaves_the_object_of_before(s3_server, tmp_path, make, failures):
    path, meta = write_checkpoint(tmp_path, 7, b"new" * 1_000_000)
    key = f"p/{path.name}"
    s3_server.client.put_object(Bucket=s3_server.bucket, Key=key, Body=b"of an earlier attempt")
    uploader = make(
        UploadTargets(checkpoint_url=f"s3://{s3_server.bucket}/p"),
        options=TransferOptions(retry=EAGER, object_store=ObjectStoreOptions(s3_endpoint=s3_server.endpoint)),
    )
    with uploader._lock:  # the lane cannot take the job before the file is shorter
        upload(uploader, (path, meta), step=7, digest="sha256:" + "ab" * 32)
        os.truncate(path, 2_000_000)
    uploader.drain(WAIT_S)
    assert "became shorter" in failures[0].reason

    def objects() -> dict[str, bytes]:  # without the marker of the folder
        return {key: content for key, content in stored(s3_server).items() if not key.endswith("/")}

    assert objects() == {key: b"of an earlier attempt"}
    upload(uploader, (path, meta), step=7)
    uploader.drain(WAIT_S)
    assert len(failures) == 1
    assert objects() == {key: path.read_bytes(), f"p/{meta.name}": meta.read_bytes()}


def test_what_went_to_a_google_store_comes_back(gcs_endpoint, tmp_path, make):
    data = os.urandom(3_000_000)
    options = TransferOptions(
        retry=EAGER, object_store=ObjectStoreOptions(gcs_endpoint=gcs_endpoint, gcs_anonymous=True)
    )
    uploader = make(UploadTargets(checkpoint_url="gs://bucket/runs/r1"), options=options)
    path, meta = write_checkpoint(tmp_path, 7, data)
    entry = {"name": path.name, "size_bytes": len(data), "hash": f"sha256:{hashlib.sha256(data).hexdigest()}"}
    fields = {"run_id": "r1", "attempt": 1, "step": 7, "epoch": 0, "final": False}
    meta.write_text(json.dumps({"schema_version": "trainer_checkpoint.v1", **fields, "files": [entry]}))
    upload(uploader, (path, meta), step=7)
    assert uploader.drain(WAIT_S) == []
    found = materialize_inputs(
        base_model_ref=None,
        dataset_parquet_refs=[],
        resume_checkpoint_ref=f"gs://bucket/runs/r1/{meta.name}",
        cache=InputCache(tmp_path / "cache"),
        base_dir=tmp_path,
        options=options,
    ).resume_checkpoint_path
    assert (found.parent / path.name).read_bytes() == data
    with pytest.raises(InputError, match="it does not exist"):
        fetch("gs://bucket/none", cache=InputCache(tmp_path / "cache"), options=options)
