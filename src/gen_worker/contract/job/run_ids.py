"""What a run may be called, and names made of other names."""

import re

MAX_RUN_ID = 128
RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z")
MAX_SLUG = 40


def run_id_from(text: str) -> str:
    """The name of a file or folder, changed where it could not name a run."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")[:MAX_RUN_ID] or "run"


def slug_from(name: str) -> str:
    """How the id of a run of that name begins: lower case, digits and hyphens. May be empty."""
    return re.sub(r"[^a-z0-9]+", "-", name[:4096].lower()).strip("-")[:MAX_SLUG].strip("-")
