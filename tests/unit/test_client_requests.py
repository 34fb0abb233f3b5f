"""The options of submit and resume are one definition: each reaches the message under its own name."""

import inspect
import sys
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from trn import AsyncClient, Client
from trn.client.wire_requests import ResumeOptions, SubmitOptions, make_resume_request, make_submit_request
from trn.core.errors import InvalidRequestError
from trn.proto import trainer_pb2 as pb

OWN = {"code_dir", "env"}  # become a snapshot, and part of the job
OF_A_RESUME = {"checkpoint_path", "overrides", "config", "is_forced", "is_exact"}


def test_every_option_has_its_field_and_a_resume_takes_those_of_a_submit() -> None:
    fields = set(pb.Submission.DESCRIPTOR.fields_by_name)
    assert set(get_type_hints(SubmitOptions)) - OWN <= fields
    assert set(get_type_hints(ResumeOptions)) - set(get_type_hints(SubmitOptions)) == OF_A_RESUME


def test_options_reach_the_message_by_their_names_and_paths_become_absolute(tmp_path: Path) -> None:
    options: SubmitOptions = {
        "priority": 3,
        "force_new": True,
        "is_import_tried": True,
        "snapshot": "sha256:1",
        "frozen_from": tmp_path,
        "log_dir": "logs",
        "submission_id": "mine",
    }
    submit = make_submit_request({"max_steps": 1}, options)
    resume = make_resume_request("run", {**options, "is_forced": True}, passed={})
    for sent in (submit, resume.submission):
        assert (sent.priority, sent.force_new, sent.is_import_tried) == (3, True, True)
        assert (sent.snapshot, sent.frozen_from) == ("sha256:1", str(tmp_path))
        assert (sent.log_dir, sent.submission_id) == (str(Path.cwd() / "logs"), "mine")
        assert sent.takes_refusal
    assert (submit.base_dir, submit.interpreter) == (str(Path.cwd()), sys.executable)
    assert (resume.submission.base_dir, resume.submission.interpreter) == ("", ""), "those of the run"
    assert (resume.run_id, resume.is_forced, resume.submission.config_json) == ("run", True, b"")


def test_a_resume_of_a_checkpoint_has_its_job_and_that_of_a_run_the_changes() -> None:
    of_run = make_resume_request("run", {"overrides": {"max_steps": 2}, "env": {"A": "1"}}, passed={"B": "2"})
    assert of_run.overrides_json == b'{"max_steps":2,"env":{"B":"2","A":"1"}}'
    config: Any = {"max_steps": 2}
    of_checkpoint = make_resume_request("", {"checkpoint_path": "c.meta.json", "config": config}, passed={})
    assert of_checkpoint.submission.config_json == b'{"max_steps":2}'
    assert of_checkpoint.submission.base_dir == str(Path.cwd())
    assert make_submit_request({}, {}).config_json == b"{}", "the daemon names what is missing"
    assert of_checkpoint.checkpoint_path == str(Path.cwd() / "c.meta.json")


def test_an_unknown_option_and_a_priority_out_of_range_are_refused() -> None:
    with pytest.raises(TypeError, match="no option prioritty: there are"):
        make_submit_request({}, {"prioritty": 1})  # type: ignore[typeddict-unknown-key]
    with pytest.raises(TypeError, match="no option is_forced"):
        make_submit_request({}, {"is_forced": True})  # type: ignore[typeddict-unknown-key]
    with pytest.raises(InvalidRequestError, match="expected a number of 32 bits"):
        make_resume_request("run", {"priority": 1 << 40}, passed={})


def test_the_blocking_client_has_the_calls_of_the_other_with_their_options_and_docstrings() -> None:
    names = {name for name in dir(AsyncClient) if not name.startswith("_")}
    assert names == {name for name in dir(Client) if not name.startswith("_")}
    for name in names - {"patience_s", "wait", "close"}:
        ours, other = getattr(Client, name), getattr(AsyncClient, name)
        assert inspect.signature(ours).parameters == inspect.signature(other).parameters, name
        assert ours.__doc__ == other.__doc__, name
