"""Files of torch.save from other programs, read without running code. They carry no hash: damage may go unnoticed."""

import zipfile
from pathlib import Path
from typing import IO, Any

from gen_worker.errors import CheckpointError


def load_pickle(file: IO[bytes], path: Path) -> Any:
    """The content on the CPU; CheckpointError, naming `path`, for any other file."""
    import torch

    try:
        _refuse_compressed(file, path)
        file.seek(0)
        return torch.load(file, map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except Exception as error:  # an unpickler may raise anything
        reason = str(error).partition("\n")[0]
        raise CheckpointError(
            f"{path} cannot be read as a file of tensors: {type(error).__name__}: {reason}"
        ) from error


def _refuse_compressed(file: IO[bytes], path: Path) -> None:
    """torch.save does not compress. A compressed file may be a decompression bomb."""
    if not zipfile.is_zipfile(file):
        return  # of old releases of torch
    with zipfile.ZipFile(file) as archive:
        packed = [item.filename for item in archive.infolist() if item.compress_type != zipfile.ZIP_STORED]
    if packed:
        raise CheckpointError(
            f"{path} has compressed records ({', '.join(packed[:3])}): refused, because torch.save never compresses"
        )
