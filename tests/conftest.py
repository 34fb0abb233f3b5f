"""What every test process starts with."""

import os
import shutil
import signal
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings

# The same examples in every run: a landing must not hang on a draw. To search for new ones, run with
# `--hypothesis-profile=search`.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("search", deadline=None, max_examples=1000)
settings.load_profile("repeatable")

# torch makes this folder, by default in the temporary folder of the machine, and leaves it there.
os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(__file__).parent.parent / ".pytest_cache" / "torch")

# Windows of tests have no screen. Where Qt's system libraries are missing, pytest-qt would end the whole session: then it is
# not loaded, and the tests that need it are skipped.
os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")
try:
    import PySide6.QtWidgets  # noqa: F401
except ImportError:
    pytest_plugins: list[str] = []
else:
    pytest_plugins = ["pytestqt.plugin"]

# A shell's background job ignores SIGINT, and so would every process that a test starts and then interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Sockets with short names, torch's launcher and wandb leave files in the temporary folder. Theirs is removed at the end;
# what tests make by `tmp_path` stays where pytest keeps it. A worker of pytest-xdist inherits the folder.
_MADE_HERE = "TRN_TESTS_TMP" not in os.environ
if _MADE_HERE:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    os.environ["TRN_TESTS_TMP"] = os.environ["TMPDIR"] = tempfile.mkdtemp(prefix="trn-tests-")
    tempfile.tempdir = None  # it is looked up again


@pytest.fixture
def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test starts is as where torch is not installed: a launcher would import it in advance, which takes seconds."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "integration" / "without_torch"))


# They come first: one that began last would leave the other process without work for half a minute.
LONG_MODULES = {
    "test_demo.py",
    "test_docs.py",
    "test_examples.py",
    "test_interrupted_steps.py",
    "test_many_processes.py",
    "test_nothing_lost.py",
    "test_own_data_runs.py",
    "test_pytorch_runner.py",
    "test_sharded_saves.py",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONG_MODULES)


def pytest_unconfigure(config: pytest.Config) -> None:
    del config
    if _MADE_HERE:
        shutil.rmtree(os.environ["TRN_TESTS_TMP"], ignore_errors=True)
