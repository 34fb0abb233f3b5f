"""Bytes of PNG, JPEG and the like to pixels, through Pillow. Needs no torch."""

import io
from typing import Literal

import numpy as np
import numpy.typing as npt

from gen_worker.errors import InputError, StartupError

Mode = Literal["L", "RGB"]
NUM_CHANNELS: dict[Mode, int] = {"L": 1, "RGB": 3}


def require_pillow(what: str) -> None:
    """StartupError where `what` needs Pillow and it is not there."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise StartupError(
            f"{what}, and Pillow is not installed: pip install 'trn[images]', or pillow"
        ) from error


def decode_picture(content: bytes, *, size: tuple[int, int], mode: Mode, where: str) -> npt.NDArray[np.uint8]:
    """(height, width) or (height, width, 3); resized where it is not of this size. `where` names it in an InputError."""
    from PIL import Image, UnidentifiedImageError

    height, width = size
    try:
        with Image.open(io.BytesIO(content)) as picture:
            converted = picture.convert(mode)
    except (UnidentifiedImageError, Image.DecompressionBombError, OSError, ValueError, SyntaxError) as error:
        raise InputError(
            f"{where} is not a picture that can be read ({len(content)} bytes): {error}"
        ) from error
    if converted.size != (width, height):
        converted = converted.resize((width, height), Image.Resampling.BILINEAR)
    return np.asarray(converted)
