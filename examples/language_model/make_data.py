"""Python's own help texts as bytes in parquet shards: `python make_data.py [FOLDER]`."""

import re
import sys
from pathlib import Path
from pydoc_data.topics import topics

import pyarrow as pa
import pyarrow.parquet as pq

ROWS_PER_SHARD = 400
MIN_BYTES, MAX_BYTES = 40, 65


def split_text(text: str) -> list[bytes]:
    """Sentences, split if they are long. Their lengths differ; the runner pads them."""
    lines = re.sub(r"[\s*]+", " ", text)
    found: list[bytes] = []
    for sentence in re.split(r"(?<=[.:;]) ", lines):
        content = sentence.encode("ascii", "ignore")
        found += [content[start : start + MAX_BYTES] for start in range(0, len(content), MAX_BYTES)]
    return [piece for piece in found if len(piece) >= MIN_BYTES]


def write_shards(folder: Path, pieces: list[bytes]) -> None:
    """Column `tokens`: the bytes of a piece as a list of numbers."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, start in enumerate(range(0, len(pieces), ROWS_PER_SHARD)):
        tokens = [list(piece) for piece in pieces[start : start + ROWS_PER_SHARD]]
        table = pa.table({"tokens": pa.array(tokens, pa.list_(pa.uint8()))})
        pq.write_table(table, folder / f"part-{number}.parquet", row_group_size=200)


if __name__ == "__main__":
    root = Path(sys.argv[1] if len(sys.argv) > 1 else "data")
    text = " ".join(topics[name] for name in sorted(topics))
    pieces = split_text(text)
    val = pieces[::20]
    train = [piece for number, piece in enumerate(pieces) if number % 20]
    write_shards(root / "train", train[:8000])
    write_shards(root / "val", val[:300])
