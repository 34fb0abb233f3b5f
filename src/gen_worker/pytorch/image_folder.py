"""`ImageFolder`: a dataset of images in one folder per class. Needs no torch.

In a job: `dataset: {source: "gen_worker.pytorch.image_folder:ImageFolder", args: {root: data/train}}`.
"""

import hashlib
import io
import logging
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from gen_worker.errors import InputError, StartupError

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger("gen_worker.data")

SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"})
_MAX_LISTED = 5

Mode = Literal["L", "RGB"]
NUM_CHANNELS: dict[Mode, int] = {"L": 1, "RGB": 3}


class ImageFolder:
    """Rows with `image` and `label`. `label` is an index into `classes`, the sorted names of the folders.

    Batches are Arrow record batches. Without `size` they hold the bytes of the files, which the runner's `image`
    decodes. With `size` (height, width) they hold pixels, uint8 in (channels, height, width).
    """

    def __init__(
        self, root: str, *, size: Sequence[int] | None = None, mode: Mode = "RGB", threads: int = 4
    ) -> None:
        if mode not in NUM_CHANNELS:
            raise InputError(f"mode: found {mode!r}, expected {' or '.join(NUM_CHANNELS)}")
        if size is not None and (len(size) != 2 or not all(type(part) is int and part > 0 for part in size)):
            raise InputError(f"size: found {size!r}, expected height and width, such as [32, 32]")
        if type(threads) is not int or threads < 1:
            raise InputError(f"threads: found {threads!r}, expected an integer of at least 1")
        self._root = Path(root).absolute()
        self._size = None if size is None else (size[0], size[1])
        self._mode: Mode = mode
        if size is not None:
            require_pillow(f"decoding the images of {root}")
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="read") if threads > 1 else None
        self.classes = _find_classes(self._root)
        self.paths: list[str] = []  # of all rows, below the root
        labels: list[int] = []
        digest = hashlib.sha256()
        others: list[str] = []
        for label, name in enumerate(self.classes):
            num_before = len(self.paths)
            for path, num_bytes in _find_files(self._root / name, others):
                self.paths.append(os.path.relpath(path, self._root))
                labels.append(label)
                digest.update(f"{self.paths[-1]}\0{num_bytes}\0".encode(errors="surrogateescape"))
            if len(self.paths) == num_before:
                raise InputError(
                    f"the class folder {self._root / name} has no images: remove it, or add images"
                    f" ({', '.join(sorted(SUFFIXES))})"
                )
        self.labels = np.asarray(labels, dtype=np.int64)
        self._digest = digest.hexdigest()
        if others:
            more = f" and {len(others) - _MAX_LISTED} more" if len(others) > _MAX_LISTED else ""
            logger.warning(
                "%d files in %s are ignored, because their suffix is not that of an image: %s%s",
                len(others),
                self._root,
                ", ".join(others[:_MAX_LISTED]),
                more,
            )

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        path = self._root / self.paths[index]
        try:
            content = path.read_bytes()
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror or error}") from error
        image: Any = {"bytes": content, "path": str(path)}
        if self._size is not None:
            pixels = decode_image(content, size=self._size, mode=self._mode, where=str(path))
            image = pixels[None] if self._mode == "L" else pixels.transpose(2, 0, 1)
        return {"image": image, "label": int(self.labels[index])}

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """The rows of one batch, read by several threads."""
        return list(
            map(self.__getitem__, indices)
            if self._pool is None
            else self._pool.map(self.__getitem__, indices)
        )

    @property
    def schema(self) -> "pa.Schema":
        """The schema of the batches."""
        import pyarrow as pa

        if self._size is None:
            image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        else:
            image = pa.fixed_shape_tensor(pa.uint8(), (NUM_CHANNELS[self._mode], *self._size))
        return pa.schema([("image", image), ("label", pa.int64())])

    def collate_fn(self, rows: Sequence[dict[str, Any]]) -> "pa.RecordBatch":
        """Rows as one batch."""
        import pyarrow as pa

        schema = self.schema
        labels = pa.array([row["label"] for row in rows], pa.int64())
        images = [row["image"] for row in rows]
        if self._size is None:
            return pa.record_batch([pa.array(images, schema.field("image").type), labels], schema=schema)
        pixels = np.ascontiguousarray(np.stack(images))
        storage = pa.FixedSizeListArray.from_arrays(pa.array(pixels.reshape(-1)), pixels[0].size)
        column = pa.ExtensionArray.from_storage(schema.field("image").type, storage)
        return pa.record_batch([column, labels], schema=schema)

    def fingerprint(self) -> str:
        """Changes with the names and sizes of the files, so that a resume on other images is rejected."""
        return self._digest

    def __repr__(self) -> str:
        return f"ImageFolder({str(self._root)!r}, {len(self)} images of {len(self.classes)} classes)"


def _find_classes(root: Path) -> list[str]:
    try:
        names = sorted(
            entry.name for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith(".")
        )
    except OSError as error:
        raise InputError(f"{root} cannot be read: {error.strerror or error}") from error
    if not names:
        raise InputError(f"{root} has no folders: expected one folder with images for each class")
    return names


def _find_files(folder: Path, others: list[str]) -> Iterator[tuple[str, int]]:
    """(path, size) of all images below a folder, sorted by name; other files are added to `others`."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                yield from _find_files(Path(entry.path), others)
            elif os.path.splitext(entry.name)[1].lower() in SUFFIXES:  # noqa: PTH122  (one of many files)
                yield entry.path, entry.stat().st_size
            else:
                others.append(entry.path)
    except OSError as error:
        raise InputError(f"{folder} cannot be read: {error.strerror or error}") from error


def require_pillow(purpose: str) -> None:
    """StartupError if Pillow is not installed."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise StartupError(
            f"{purpose} needs Pillow, which is not installed: pip install 'trn[images]'"
        ) from error


def decode_image(content: bytes, *, size: tuple[int, int], mode: Mode, where: str) -> npt.NDArray[np.uint8]:
    """(height, width) or (height, width, 3), resized to `size`. `where` names the image in an InputError."""
    from PIL import Image, UnidentifiedImageError

    height, width = size
    try:
        with Image.open(io.BytesIO(content)) as image:
            converted = image.convert(mode)
    except (UnidentifiedImageError, Image.DecompressionBombError, OSError, ValueError, SyntaxError) as error:
        raise InputError(f"{where} cannot be decoded as an image ({len(content)} bytes): {error}") from error
    if converted.size != (width, height):
        converted = converted.resize((width, height), Image.Resampling.BILINEAR)
    return np.asarray(converted)
