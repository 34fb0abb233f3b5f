"""Small files of each kind of artifact, written by hand."""

import hashlib
from pathlib import Path

from gen_worker.contract.checkpoints.meta import CheckpointMeta, FileEntry, encode_meta


def make_mp4(payload: bytes = b"frames") -> bytes:
    """The boxes of an MP4, as an encoder lays them out; no player would show it."""
    boxes = [(b"ftyp", b"isom\0\0\2\0"), (b"mdat", payload), (b"moov", b"\0" * 32)]
    return b"".join((8 + len(body)).to_bytes(4, "big") + kind + body for kind, body in boxes)


def make_checkpoint(
    folder: Path, *, step: int, run_id: str, nonce: str = "", content: bytes = b"weights"
) -> tuple[Path, str]:
    """(its data file, the SHA-256 that its meta says)."""
    path = folder / f"step-{step:08d}.pt"
    path.write_bytes(content)
    sha256 = hashlib.sha256(content).hexdigest()
    entry = FileEntry(name=path.name, size_bytes=len(content), hash=f"sha256:{sha256}")
    meta = CheckpointMeta(
        run_id=run_id, nonce=nonce, attempt=1, step=step, epoch=0, final=False, verified=True, files=(entry,)
    )
    path.with_name(f"step-{step:08d}.meta.json").write_bytes(encode_meta(meta))
    return path, sha256
