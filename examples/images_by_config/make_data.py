"""Draws digits as PNG files into parquet shards: `python make_data.py [FOLDER]`."""

import io
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image, ImageDraw, ImageFont

SIDE = 20  # pixels
FONT = ImageFont.load_default(size=16)


def draw(digit: int, random: np.random.Generator) -> bytes:
    """A tilted, shifted, noisy digit as the bytes of a PNG file."""
    picture = Image.new("L", (SIDE, SIDE))
    x, y = random.uniform(3, 7), random.uniform(-1, 2)
    ImageDraw.Draw(picture).text((x, y), str(digit), fill=int(random.integers(120, 256)), font=FONT)
    picture = picture.rotate(random.uniform(-20, 20), resample=Image.Resampling.BILINEAR)
    noise = random.normal(0, 12, (SIDE, SIDE))
    noisy = np.clip(np.asarray(picture, np.float32) + noise, 0, 255).astype(np.uint8)
    content = io.BytesIO()
    Image.fromarray(noisy).save(content, format="PNG")
    return content.getvalue()


def write_shards(folder: Path, *, num_shards: int, rows_per_shard: int, seed: int) -> None:
    """Columns `image` (bytes of a PNG file) and `label` (0 to 9)."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    for number in range(num_shards):
        labels = random.integers(0, 10, rows_per_shard)
        images = [draw(int(label), random) for label in labels]
        table = pa.table({"image": pa.array(images, pa.binary()), "label": labels})
        pq.write_table(table, folder / f"part-{number}.parquet", row_group_size=256)


if __name__ == "__main__":
    root = Path(sys.argv[1] if len(sys.argv) > 1 else "data")
    write_shards(root / "train", num_shards=4, rows_per_shard=500, seed=0)
    write_shards(root / "val", num_shards=1, rows_per_shard=400, seed=1)
