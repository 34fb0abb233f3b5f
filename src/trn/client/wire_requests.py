"""What a client asks for -> requests, as they cross the wire. Pure, but for the job's file."""

import os
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from trn.client.caller_environment import find_passed, set_apart, tell_environment
from trn.core.errors import InvalidRequestError
from trn.proto import trainer_pb2 as pb

_LAST_PRIORITY = (1 << 31) - 1


class SubmitOptions(TypedDict, total=False):
    """What may be given with a job.

    Its relative paths are taken from `base_dir` (default: its file's folder, else the current one). `code_dir` is
    frozen now: the run trains this code, whatever becomes of the folder. Without it (or a `snapshot` that was taken
    before, of the folder `frozen_from`) the code is found in `base_dir` when the run starts. `interpreter` is by default
    the Python that runs this. With `is_import_tried` the trainer class and the callbacks are loaded first, in a process
    of their own, and what cannot be loaded is refused. `log_dir` and `event_log` are where the daemon writes the run's
    lines as well, besides its home's logs; an equal run that exists keeps its own. `submission_id` (drawn where none is
    given) makes a submit safe to repeat: with the same one, a repeat returns the run that the first one made, also if
    that has failed meanwhile.
    `env` is laid over the job's own; names that look like secrets (HF_TOKEN) and all of `secret_env` reach the worker,
    and no record, digest or file.
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


def make_submit_request(
    config: Mapping[str, Any] | Path | str,
    options: SubmitOptions,
    *,
    pass_env: Sequence[str] = (),
) -> pb.Submission:
    """`code_dir` is the caller's to freeze; `pass_env` is of the settings."""
    unknown = sorted(set(options) - set(SubmitOptions.__annotations__))
    if unknown:
        raise TypeError(
            f"no option {', '.join(unknown)}: there are {', '.join(SubmitOptions.__annotations__)}"
        )
    document, folder = read_config(config)
    base_dir, interpreter = options.get("base_dir"), options.get("interpreter")
    passed = find_passed(pass_env)
    secret_env = lay_variables(document, passed, options.get("env", {}), options.get("secret_env", {}))
    caller_env, caller_salt = tell_environment()
    return pb.Submission(
        config_json=encode(document, "config"),
        code_identity=options.get("code_identity", ""),
        snapshot=options.get("snapshot", ""),
        frozen_from=absolute(options.get("frozen_from", "")),
        base_dir=absolute(folder if base_dir is None else base_dir),
        interpreter=sys.executable if interpreter is None else interpreter,
        priority=priority_of(options.get("priority", 0)),
        force_new=options.get("force_new", False),
        is_dry_run=options.get("is_dry_run", False),
        is_import_tried=options.get("is_import_tried", False),
        log_dir=absolute(options.get("log_dir", "")),
        event_log=absolute(options.get("event_log", "")),
        submission_id=options.get("submission_id", "") or draw_submission_id(),
        secret_env=secret_env,
        caller_env=caller_env,
        caller_salt=caller_salt,
        takes_refusal=True,
    )


def lay_variables(
    document: dict[str, Any],
    passed: Mapping[str, str],
    env: Mapping[str, str],
    secret_env: Mapping[str, str],
) -> dict[str, str]:
    """Put variables into the document's `env`: `env` over its own, its own over `passed`. Returns the secret ones.

    What is given by name and looks like a secret is one; what the job itself holds stays where it is.
    """
    own = document.get("env")
    if own is not None and not isinstance(own, Mapping):
        return dict(secret_env)  # the daemon says what is wrong with it
    own = own or {}
    below = set_apart({name: value for name, value in passed.items() if name not in own})
    over = set_apart(env)
    secret = {**below.secret_env, **over.secret_env, **secret_env}
    not_text = sorted(name for name, value in secret.items() if not isinstance(value, str))
    if not_text:  # bytes would be taken as text, and no message may show what they are
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
    """Later ones are greater, so that the registry's index of them grows at its end."""
    return f"{time.time_ns():016x}-{secrets.token_hex(8)}"


def absolute(path: Path | str) -> str:
    """Empty stays so."""
    return os.path.abspath(path) if str(path) else ""  # noqa: PTH100


def priority_of(priority: int) -> int:
    if abs(priority) > _LAST_PRIORITY:
        raise InvalidRequestError(f"priority is {priority}, expected a number of 32 bits")
    return priority


def encode(document: Mapping[str, Any], what: str) -> bytes:
    """As JSON. InvalidRequestError with everything that JSON cannot hold: nothing else is sent in its place."""
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
