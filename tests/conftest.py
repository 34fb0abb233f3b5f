"""What every test process starts with."""

import itertools
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


# Modules that take long, or stay together, with about how many seconds of a core that is. They come first, the longest of
# all before the others: what is left for the end is short.
LONG_MODULES: tuple[tuple[int, *tuple[str, ...]], ...] = (
    (
        110,
        "test_page_actions.py",
        "test_page_run.py",
        "test_page_runs.py",
        "test_page_views.py",
    ),  # with one world
    (110, "test_docs.py"),
    (45, "test_many_processes.py"),
    (45, "test_nothing_lost.py"),
    (35, "test_pytorch_runner.py"),
    (30, "test_cli_run.py"),
    (30, "test_promotion.py"),
    (28, "test_cli_serving.py"),
    (27, "test_serving_soak.py"),
    (27, "test_feedback.py"),
    (25, "test_daemon.py"),
    (25, "test_model_server.py"),
    (23, "test_examples.py"),
    (23, "test_local_executor.py"),
    (22, "test_own_data_runs.py"),
    (22, "test_window.py"),
    (20, "test_demo.py"),
    (20, "test_dispatcher.py"),
    (18, "test_gateway.py"),
    (18, "test_interrupted_steps.py"),
    (15, "test_offline_prediction.py"),
    (14, "test_sharded_saves.py"),
    (13, "test_own_data.py"),
    (13, "test_cli_registry.py"),
    (12, "test_qt_bridge.py"),
    (12, "test_gateway_openapi.py"),
    (12, "test_trainer_resume.py"),
    (11, "test_daemon_bus.py"),
    (11, "test_crash_harness.py"),
    (11, "test_rude_servers.py"),
    (10, "test_drift_example.py"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Deal the long modules to the processes of pytest-xdist, and fill up with short ones.

    Each process begins with an equal part of `items`, from its start; who is done first steals from the end of another's.
    """
    parts: list[list[pytest.Item]] = [
        [] for _ in range(int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
    ]
    loads_s = [0] * len(parts)
    by_module: dict[str, list[pytest.Item]] = {}
    for item in items:
        by_module.setdefault(item.path.name, []).append(item)
    for duration_s, *names in LONG_MODULES:
        index = loads_s.index(min(loads_s))
        loads_s[index] += duration_s
        for name in names:
            parts[index] += by_module.pop(name, [])
    rest = list(itertools.chain(*by_module.values()))
    for index, part in enumerate(parts):
        size = (len(rest) + sum(map(len, parts[index:]))) // (len(parts) - index)
        num_more = max(0, size - len(part))
        part.extend(rest[:num_more])
        del rest[:num_more]
    items[:] = itertools.chain(*parts)


def pytest_unconfigure(config: pytest.Config) -> None:
    del config
    if _MADE_HERE:
        shutil.rmtree(os.environ["TRN_TESTS_TMP"], ignore_errors=True)
