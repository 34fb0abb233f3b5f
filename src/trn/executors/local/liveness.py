"""Does a worker of this machine still live? For commands that read the registry while no daemon can be asked."""

from typing import Literal

from gen_worker.contract.process_identity import ProcessIdentity, boot_id

Gone = Literal["ended", "rebooted"]


def find_gone(ref: str) -> Gone | None:
    """Why the worker with this reference does not live; None: it lives, or the reference is not of this executor."""
    try:
        process = ProcessIdentity.of(ref)
    except ValueError:
        return None
    if process.is_alive():
        return None
    return "ended" if process.boot_id == boot_id() else "rebooted"
