"""The digest of a run: equal where the same thing was asked for with the same code."""

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

# Says who and where, not what: two submits that differ in these ask for the same run.
NOT_PART = ("run_id", "tags", "group", "profiles")


def run_digest(config: Mapping[str, Any], code_identity: str = "", base_dir: str = "") -> str:
    """`sha256:…` over the canonical config, the identity of the code, and where relative paths begin."""
    asked = {name: value for name, value in config.items() if name not in NOT_PART}
    whole = {"config": asked, "code": code_identity, "base_dir": base_dir}
    canonical = msgspec.json.encode(whole, order="deterministic")
    return f"sha256:{hashlib.sha256(canonical).hexdigest()}"
