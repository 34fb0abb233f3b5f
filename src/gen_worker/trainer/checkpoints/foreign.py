"""Files that torch.save wrote, by anyone: read without running code, and refused in words whatever is in them.

They carry no hash, so damage in their numbers cannot be found here.
"""

import zipfile
from pathlib import Path
from typing import IO, Any

from gen_worker.errors import CheckpointError


def load_pickle(file: IO[bytes], path: Path) -> Any:
    """What `file` holds, on the CPU. CheckpointError, naming `path`, for what is no such file."""
    import torch

    try:
        _refuse_compressed(file, path)
        file.seek(0)
        return torch.load(file, map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except Exception as error:  # an unpickler that is fed with anything may raise anything
        reason = str(error).partition("\n")[0]
        raise CheckpointError(
            f"{path} cannot be read as a file of tensors: {type(error).__name__}: {reason}"
        ) from error


def _refuse_compressed(file: IO[bytes], path: Path) -> None:
    """torch.save stores what it writes as it is. A small file that unpacks to a large one was made to do harm."""
    if not zipfile.is_zipfile(file):
        return  # the format of old releases of torch
    with zipfile.ZipFile(file) as archive:
        packed = [item.filename for item in archive.infolist() if item.compress_type != zipfile.ZIP_STORED]
    if packed:
        raise CheckpointError(
            f"{path} has compressed records ({', '.join(packed[:3])}), which torch.save does not write: it is not read"
        )
