"""A worker keeps the memory that a step frees, unless somebody decided otherwise."""

import os
import subprocess
import sys

import pytest

from gen_worker.trainer.compute.heap import keep_freed_memory

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or "CS_GNU_LIBC_VERSION" not in os.confstr_names, reason="glibc only"
)

# Blocks as large as a small model's gradients, all freed at the end of a step.
STEPS = """
import resource, sys
import numpy as np
from gen_worker.trainer.compute.heap import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory({})
def step():
    blocks = [np.ones(1 << 19) for _ in range(8)]
for _ in range(5):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def num_page_faults(word: str) -> int:
    environ = {
        name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))
    }
    done = subprocess.run(
        [sys.executable, "-c", STEPS, word], env=environ, capture_output=True, text=True, check=True
    )
    return int(done.stdout)


def test_a_step_finds_the_memory_that_the_step_before_freed() -> None:
    assert num_page_faults("keep") < num_page_faults("return") / 10


@pytest.mark.parametrize(
    "environ",
    [{"MALLOC_TRIM_THRESHOLD_": "65536"}, {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=65536"}],
)
def test_settings_of_the_user_are_left_alone(environ: dict[str, str]) -> None:
    assert not keep_freed_memory(environ)
