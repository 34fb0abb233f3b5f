"""Options of a client -> requests. Reads no file but the job's."""

import os
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, get_type_hints

from trn.client.caller_environment import find_passed, set_apart, tell_environment
from trn.core.errors import InvalidRequestError
from trn.proto import trainer_pb2 as pb

_LAST_PRIORITY = (1 << 31) - 1


class SubmitOptions(TypedDict, total=False):
    """Options of a submit, under the names of the message `Submission`. A new one is a field there and here.

    - `base_dir`: where relative paths of the job start (default: its file's folder, else the current one).
    - `code_dir`: the folder to take a code snapshot of. `snapshot` and `frozen_from`: one that was taken before, and of
      which folder. Without either, the code is read from `base_dir` when the run starts.
    - `interpreter`: default: the Python that runs this.
    - `is_import_tried`: first check data, disk and code. The trainer class and the callbacks are imported in a process
      of their own.
    - `log_dir`, `event_log`: the daemon also writes the run's lines there. An equal run that exists keeps its own.
    - `submission_id`: makes a submit safe to repeat (default: a new one). A repeat returns the run that the first one
      made, even if it has failed since.
    - `env`: variables for the worker, merged over the job's own. Names that look like secrets (HF_TOKEN) and all of
      `secret_env` reach the worker, and no record, digest or file.
    """

    base_dir: Path | str | None
    code_dir: Path | str | None
    snapshot: str
    frozen_from: Path | str
    code_identity: str
    priority: int
    force_new: bool
    interpreter: str | None
    is_dry_run: bool
    is_import_tried: bool
    log_dir: Path | str
    event_log: Path | str
    submission_id: str
    env: Mapping[str, str]
    secret_env: Mapping[str, str]


class ResumeOptions(SubmitOptions, total=False):
    """Options of a resume: those of a submit, and where it starts.

    - `checkpoint_path`: default: the run's newest checkpoint that is complete and finite.
    - `config`: the job, for a checkpoint without a run. `overrides`: changes to the run's own job.
    - `is_forced`: also take a checkpoint with NaN or infinite weights.
    - `is_exact`: the id means this very run, not the newest of its family.
    """

    checkpoint_path: Path | str
    overrides: Mapping[str, Any] | None
    config: Mapping[str, Any] | Path | str | None
    is_forced: bool
    is_exact: bool


PATHS = ("base_dir", "frozen_from", "log_dir", "event_log")


def make_submit_request(
    config: Mapping[str, Any] | Path | str,
    options: SubmitOptions,
    *,
    pass_env: Sequence[str] = (),
) -> pb.Submission:
    """`code_dir` is the caller's to freeze; `pass_env` is of the settings."""
    _require_known(options, SubmitOptions)
    document, folder = read_config(config)
    secrets = lay_variables(
        document, find_passed(pass_env), options.get("env", {}), options.get("secret_env", {})
    )
    return _make_submission(document, {"base_dir": folder, "interpreter": sys.executable}, options, secrets)


def make_resume_request(
    run_id: str, options: ResumeOptions, *, passed: Mapping[str, str]
) -> pb.ResumeRunRequest:
    """`passed` are variables of this process that the settings always pass on."""
    _require_known(options, ResumeOptions)
    overrides, config = dict(options.get("overrides") or {}), options.get("config")
    document, folder = (None, None) if config is None else read_config(config)
    changed = overrides if document is None else document
    secrets = lay_variables(changed, passed, options.get("env", {}), options.get("secret_env", {}))
    return pb.ResumeRunRequest(
        run_id=run_id,
        checkpoint_path=absolute(options.get("checkpoint_path", "")),
        overrides_json=encode(overrides, "overrides") if overrides else b"",
        is_forced=options.get("is_forced", False),
        is_exact=options.get("is_exact", False),
        submission=_make_submission(
            document, {} if folder is None else {"base_dir": folder}, options, secrets
        ),
    )


def _make_submission(
    document: Mapping[str, Any] | None,
    defaults: Mapping[str, Any],
    options: SubmitOptions,
    secret_env: Mapping[str, str],
) -> pb.Submission:
    """Every option that the message has a field for, by its name. None stands for the default."""
    given = {
        **defaults,
        **{
            name: value
            for name, value in options.items()
            if value is not None and name in pb.Submission.DESCRIPTOR.fields_by_name
        },
        "secret_env": secret_env,
    }
    for name in PATHS:
        if name in given:
            given[name] = absolute(given[name])
    priority = given.get("priority", 0)
    if abs(priority) > _LAST_PRIORITY:
        raise InvalidRequestError(f"priority is {priority}, expected a number of 32 bits")
    given["submission_id"] = given.get("submission_id") or draw_submission_id()
    caller_env, caller_salt = tell_environment()
    return pb.Submission(
        config_json=b"" if document is None else encode(document, "config"),
        caller_env=caller_env,
        caller_salt=caller_salt,
        takes_refusal=True,
        **given,
    )


def _require_known(options: Mapping[str, Any], kind: type) -> None:
    known = get_type_hints(kind)
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise TypeError(f"no option {', '.join(unknown)}: there are {', '.join(known)}")


def lay_variables(
    document: dict[str, Any],
    passed: Mapping[str, str],
    env: Mapping[str, str],
    secret_env: Mapping[str, str],
) -> dict[str, str]:
    """Merge variables into the document's `env`: `env` over its own, its own over `passed`. Returns the secret ones.

    A given variable whose name looks like a secret is one; variables of the job itself stay in the job.
    """
    own = document.get("env")
    if own is not None and not isinstance(own, Mapping):
        return dict(secret_env)  # the daemon reports it
    own = own or {}
    below = set_apart({name: value for name, value in passed.items() if name not in own})
    over = set_apart(env)
    secret = {**below.secret_env, **over.secret_env, **secret_env}
    not_text = sorted(name for name, value in secret.items() if not isinstance(value, str))
    if not_text:  # the message must not show the value
        raise InvalidRequestError(
            "the variables for the worker are not valid",
            [f"{name}: found a {type(secret[name]).__name__}, expected text" for name in not_text],
        )
    laid = {**below.env, **own, **over.env}
    laid = {name: value for name, value in laid.items() if name not in secret}
    if laid or own:
        document["env"] = laid
    return secret


def draw_submission_id() -> str:
    """Ordered by time, so that the registry's index grows at its end."""
    return f"{time.time_ns():016x}-{secrets.token_hex(8)}"


def absolute(path: Path | str) -> str:
    """An empty path stays empty."""
    return os.path.abspath(path) if str(path) else ""  # noqa: PTH100


def encode(document: Mapping[str, Any], what: str) -> bytes:
    """As JSON. InvalidRequestError with every value that JSON cannot hold."""
    from gen_worker.contract.documents import encode_document
    from gen_worker.errors import SpecError

    try:
        return encode_document(document, source=f"the {what}")
    except SpecError as fault:
        raise InvalidRequestError(f"the {what} cannot be sent", fault.faults) from fault


def read_config(config: Mapping[str, Any] | Path | str) -> tuple[dict[str, Any], Path]:
    """(the document, the folder that its relative paths start from)."""
    if isinstance(config, Mapping):
        return dict(config), Path.cwd()
    path = Path(config).expanduser().absolute()
    from gen_worker.contract.documents import read_document
    from gen_worker.errors import SpecError

    try:
        document = read_document(path)  # as the worker would read it
    except SpecError as fault:
        raise InvalidRequestError(f"the config {path} is not valid", fault.faults) from fault
    if not isinstance(document, dict):
        raise InvalidRequestError(f"the config {path} holds no object")
    return document, path.parent
