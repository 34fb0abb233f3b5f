"""What every test process starts with."""

import os
from pathlib import Path

# torch makes this folder, by default in the temporary folder of the machine, and leaves it there.
os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(__file__).parent.parent / ".pytest_cache" / "torch")
