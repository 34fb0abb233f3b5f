"""The digest of a run: equal where the same thing was asked for, with the same code, data and packages."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

# Says who and where, not what: two submits that differ in these ask for the same run.
NOT_PART = ("run_id", "tags", "group", "profiles")

_refuse_other = json.JSONEncoder(allow_nan=False).encode  # ValueError or TypeError


def run_digest(
    config: Mapping[str, Any],
    code_identity: str = "",
    base_dir: str = "",
    *,
    family: str = "",
    parent_run_id: str = "",
    data: str = "",
    environment: str = "",
    secret_env: Sequence[str] = (),
) -> str:
    """`sha256:…` over the canonical config, the identity of the code, where relative paths begin, what the files hold
    that it names, and what it runs with.

    `family` is the name that was asked for, if any: another name is another run. A resumed run is not the run that it
    continues, though it asks for the same: so its parent is part of it. Of secret variables only the names are part of it.
    ValueError or TypeError for a config that is no plain data: two that differ only there would have one digest.
    """
    asked = {name: value for name, value in config.items() if name not in NOT_PART}
    whole: dict[str, Any] = {
        "config": asked,
        "code": code_identity,
        "base_dir": base_dir,
        "family": family,
        "parent_run_id": parent_run_id,
        "data": data,
        "environment": environment,
    }
    if secret_env:
        whole["secret_env"] = sorted(secret_env)
    _refuse_other(asked)  # what the encoder would write as null, text or a list
    canonical = msgspec.json.encode(whole, order="deterministic")
    return f"sha256:{hashlib.sha256(canonical).hexdigest()}"
