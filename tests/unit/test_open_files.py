"""The limit on open files is raised where that is allowed, and what it is then is known."""

import resource
import subprocess
import sys

import pytest

_PRINT = """
import resource, sys
from gen_worker.contract.files.open_files import raise_open_files
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))
print(*raise_open_files(500), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


@pytest.mark.parametrize(
    ("soft", "hard", "raised"), [(100, 1000, 500), (100, 200, 200), (100, 100, 100), (600, 1000, 600)]
)
def test_the_limit_is_raised_as_far_as_it_may_be_and_never_lowered(soft: int, hard: int, raised: int) -> None:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 1000:
        pytest.skip("the hard limit of this machine is lower")
    said = subprocess.run(
        [sys.executable, "-c", _PRINT, str(soft), str(hard)], capture_output=True, text=True, check=True
    )
    assert said.stdout.split() == [str(soft), str(raised), str(raised)]
