# ruff: noqa: F811  (fixtures are imported by name)
"""A whole worker with inputs from, and uploads to, other machines."""

import json
from pathlib import Path

import pytest
from object_servers import closed_port, http_server, s3_endpoint, s3_server  # noqa: F401
from worker_process import Run, write_rows

TOKEN = "capability-0123456789abcdef"


def uploads_to(base: str) -> dict[str, str]:
    return {
        f"TRAINER_UPLOAD_{kind.upper()}_URL": f"{base}/{kind}"
        for kind in ("metrics", "checkpoint", "sample", "terminal")
    }


def test_an_orchestrated_run_fetches_resumes_and_delivers_everything(tmp_path: Path, http_server) -> None:
    rows = write_rows(tmp_path / "rows.parquet", num_rows=40)
    http_server.files["/in/rows.parquet"] = rows.read_bytes()
    http_server.files["/in/resume.json"] = json.dumps({"state": {"sum": 1000.0}}).encode()
    run = Run(
        tmp_path / "run",
        trainer="counting:OwnFiles",
        max_steps=4,
        metric_every=1,
        checkpoint_every=2,
        dataset={"batch_size": 10},
        inputs={
            "dataset_parquet_refs": [f"{http_server.url}/in/rows.parquet"],
            "resume_checkpoint_ref": f"{http_server.url}/in/resume.json",
        },
    )
    # The state file has no own files to load: only new checkpoints do.
    run.job["trainer"] = "counting:Counting"
    done = run.work(TRAINER_ORCHESTRATED="1", TRAINER_CAPABILITY_TOKEN=TOKEN, **uploads_to(http_server.url))
    assert done.returncode == 0, done.stderr
    assert run.losses()[4] == 1040.0
    assert all(
        request.headers["authorization"] == f"Bearer {TOKEN}"
        for path in ("/in/rows.parquet", "/metrics", "/checkpoint", "/terminal")
        for request in http_server.seen(path)
    )
    names = [request.headers["x-trn-file-name"] for request in http_server.seen("/checkpoint")]
    assert names[-2:] == ["final.pt", "final.meta.json"]
    (terminal,) = http_server.seen("/terminal")
    assert json.loads(terminal.body)["status"] == "completed"
    points = [
        point for request in http_server.seen("/metrics") for point in json.loads(request.body)["points"]
    ]
    assert {point["step"] for point in points} == {1, 2, 3, 4}
    assert TOKEN not in run.events_path.read_text() + done.stderr + done.stdout


def test_a_dead_endpoint_ends_the_run_as_upload_with_everything_kept_for_the_next_attempt(
    tmp_path: Path, http_server
) -> None:
    run = Run(tmp_path / "run", trainer="counting:OwnFiles", mock_batches=[1, 2, 3], metric_every=1)
    done = run.work(TRAINER_UPLOAD_CHECKPOINT_URL=f"http://127.0.0.1:{closed_port()}/checkpoint")
    assert done.returncode == 15, done.stderr
    failed = run.events()[-1]
    assert (failed["event"], failed["category"], failed["step"]) == ("failed", "upload", 3)
    assert (run.checkpoints / "final.pt").exists()
    again = run.work(TRAINER_UPLOAD_CHECKPOINT_URL=f"{http_server.url}/checkpoint")
    assert again.returncode == 0, again.stderr
    names = [request.headers["x-trn-file-name"] for request in http_server.seen("/checkpoint")]
    assert names == ["final.pt", "final.files/own.txt", "final.meta.json"]
    run.check_invariants()


def test_points_that_were_not_delivered_are_sent_by_the_next_attempt_of_a_finished_run(
    tmp_path: Path, http_server
) -> None:
    run = Run(tmp_path / "run", mock_batches=[1, 2, 3], metric_every=1)
    done = run.work(TRAINER_UPLOAD_METRICS_URL=f"http://127.0.0.1:{closed_port()}/metrics")
    assert done.returncode == 15, done.stderr
    again = run.work(TRAINER_UPLOAD_METRICS_URL=f"{http_server.url}/metrics")
    assert again.returncode == 0, again.stderr

    def sent() -> dict[int, float]:
        batches = [json.loads(request.body)["points"] for request in http_server.seen("/metrics")]
        return {point["step"]: point["values"]["train/loss"] for batch in batches for point in batch}

    assert sent() == run.losses()
    num_requests = len(http_server.seen("/metrics"))
    assert run.work(TRAINER_UPLOAD_METRICS_URL=f"{http_server.url}/metrics").returncode == 0
    assert len(http_server.seen("/metrics")) == num_requests, "everything is delivered"
    run.check_invariants()


def test_data_and_checkpoints_may_live_in_an_object_store(tmp_path: Path, s3_server) -> None:
    rows = write_rows(tmp_path / "rows.parquet", num_rows=40)
    s3_server.client.put_object(Bucket=s3_server.bucket, Key="in/rows.parquet", Body=rows.read_bytes())
    first = Run(
        tmp_path / "first",
        max_steps=2,
        dataset={"batch_size": 10},
        inputs={"dataset_parquet_refs": [f"s3://{s3_server.bucket}/in/*.parquet"]},
        uploads={"checkpoint_url": f"s3://{s3_server.bucket}/out"},
    )
    credentials = {
        "AWS_ENDPOINT_URL": s3_server.endpoint,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_REGION": "us-east-1",
    }
    done = first.work(**credentials)
    assert done.returncode == 0, done.stderr
    second = Run(tmp_path / "second", **{**first.job, "max_steps": 4, "uploads": {}})
    second.job["inputs"] = {
        **first.job["inputs"],
        "resume_checkpoint_ref": f"s3://{s3_server.bucket}/out/final.meta.json",
    }
    done = second.work(**credentials)
    assert done.returncode == 0, done.stderr
    assert any("resumed at step 2" in event["message"] for event in second.events("log"))


@pytest.mark.parametrize("how", ["alone", "isolated", "two processes"])
def test_a_token_is_in_no_file_no_child_and_no_command_line(tmp_path: Path, http_server, how: str) -> None:
    run = Run(
        tmp_path / "run",
        trainer="counting:Spying",
        mock_batches=[1, 2, 3, 4],
        metric_every=1,
        checkpoint_every=2,
    )
    more = {"TRAINER_ISOLATED": "1"} if how == "isolated" else {}
    if how == "two processes":
        run.job["resources"] = {"processes": 2}
    done = run.work(
        TRAINER_ORCHESTRATED="1", TRAINER_CAPABILITY_TOKEN=TOKEN, **more, **uploads_to(http_server.url)
    )
    assert done.returncode == 0, done.stderr
    assert len([*run.folder.glob("spied-*.txt")]) == (2 if how == "two processes" else 1)
    assert http_server.seen("/terminal")[0].headers["authorization"] == f"Bearer {TOKEN}"
    told = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert len(told) > 5
    assert [path for path, data in told.items() if TOKEN.encode() in data] == []
