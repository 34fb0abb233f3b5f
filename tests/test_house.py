"""The house rules as tests: who may import whom, what an import may cost, which names are public."""

import ast
import functools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from trn.cli.command_table import VERBS, group

SRC = Path(__file__).parent.parent / "src"
TRAINER = "gen_worker.trainer"

SHARED = ("gen_worker.contract", "gen_worker.errors")  # what both packages may import

# room -> what it may import of our own packages; the longest matching prefix decides
ROOMS: dict[str, tuple[str, ...]] = {
    "gen_worker.contract": SHARED,
    "gen_worker": ("gen_worker",),
    "trn.core": ("trn.core", *SHARED),
    "trn.proto": ("trn.core", "trn.proto", *SHARED),
    "trn.registry": ("trn.core", "trn.registry", *SHARED),
    "trn.executors": (
        "trn.core",
        "trn.executors",
        "gen_worker.launcher.attempt_records",
        "gen_worker.launcher.messages",
        "gen_worker.launcher.process_family",  # whose a process is, and the end of all that it started
        *SHARED,
    ),
    "trn.daemon": (
        "trn.core",
        "trn.proto",
        "trn.registry",
        "trn.executors",
        "trn.daemon",
        "gen_worker.frozen_imports",  # what tells a worker where its frozen code came from
        "gen_worker.trainer.author.code_identity",  # whether modules outside a snapshot have changed
        "gen_worker.trainer.datasets.job_content",  # what a run trains on is part of its digest
        "gen_worker.trainer.datasets.index",  # whether the data that a job names is there
        "gen_worker.trainer.datasets.parquet_paths",
        *SHARED,
    ),
    "trn.client": ("trn.core", "trn.proto", "trn.registry", "trn.client", *SHARED),
    "trn.cli": (
        "trn.core",
        "trn.proto",
        "trn.registry",
        "trn.client",
        "trn.cli",
        "trn.executors.local.liveness",  # whether a worker lives, while no daemon can be asked
        "trn.qt.application",  # the window, for `trn gui`
        *SHARED,
    ),
    "trn.gateway": (
        "trn.core",
        "trn.proto",
        "trn.registry",
        "trn.client",
        "trn.gateway",
        *SHARED,
    ),
    "trn.qt": ("trn.core", "trn.proto", "trn.registry", "trn.client", "trn.qt", *SHARED),
    "trn": ("trn",),
}
MAX_MODULES = 15  # side by side in one room

# modules that stand on their own, so that both sides of a process line can import them
IMPORTS_NO_SIBLING = ("gen_worker.trainer.contracts",)
ASSEMBLERS = (
    "gen_worker.trainer.runtime",
    "gen_worker.trainer.trainer",
    "gen_worker.trainer.attempt.attempt",
    "gen_worker.trainer.attempt.assembly",
)
MAY_IMPORT_ASSEMBLERS = ("gen_worker.entrypoint", "gen_worker.pytorch_runner", TRAINER)

PUBLIC_NAMES = {
    "ArtifactUploader",
    "ArtifactWriter",
    "Callback",
    "DatasetIndex",
    "EarlyStopping",
    "EpisodeRecorder",
    "JsonlLogger",
    "LearningRateMonitor",
    "MLflowLogger",
    "MetricsRecord",
    "ModelCheckpoint",
    "NonFiniteGuard",
    "ProgressBar",
    "RunArtifacts",
    "RunHandle",
    "SampleRequest",
    "ShardLoader",
    "StepContext",
    "StepControlHints",
    "StepResult",
    "TensorBoardLogger",
    "ThroughputMonitor",
    "Trainer",
    "TrainerAuthContext",
    "TrainerConfig",
    "TrainerInterface",
    "TrainerPlugin",
    "TrainerState",
    "TrainerSubprocessContractV1",
    "TrainingCanceled",
    "TrainingJobSpec",
    "TrainingReporter",
    "WandbLogger",
    "batch_to_torch",
    "build_default_adamw_bundle",
    "distribute_module",
    "export_checkpoint",
    "global_rows",
    "load_checkpoint",
    "load_trainable_module_checkpoint",
    "load_trainer_plugin",
    "read_subprocess_contract",
    "run_training_loop",
    "save_trainable_module_checkpoint",
    "seed_everything",
    "to_float_scalar",
    "write_subprocess_contract",
}
CLI_OPTIONS: dict[str, list[str]] = {
    "run": [
        "[JOB]",
        "--another",
        "--code",
        "--config",
        "--cpu-only",
        "--detach",
        "--device-count",
        "--devices",
        "--dry-run",
        "--env",
        "--env-file",
        "--event-log",
        "--format",
        "--json",
        "--log-dir",
        "--name",
        "--no-snapshot",
        "--priority",
        "--profile",
        "--secret-env",
        "--set",
        "--weights",
        "-c",
        "-d",
    ],
    "resume": [
        "[RUN[@STEP]]",
        "--another",
        "--checkpoint",
        "--code",
        "--config",
        "--detach",
        "--env",
        "--env-file",
        "--event-log",
        "--force",
        "--format",
        "--json",
        "--log-dir",
        "--priority",
        "--secret-env",
        "--set",
        "-c",
        "-d",
    ],
    "serve": [
        "RUN[@WHICH]",
        "--address",
        "--cpu-only",
        "--detach",
        "--device-count",
        "--devices",
        "--env",
        "--env-file",
        "--event-log",
        "--follow",
        "--format",
        "--json",
        "--log-dir",
        "--name",
        "--priority",
        "--replicas",
        "--secret-env",
        "--set",
        "-d",
    ],
    "promote": [
        "NAME",
        "[RUN@WHICH]",
        "--format",
        "--json",
        "--no-wait",
        "--percent",
        "--set",
        "--shadow",
        "--token",
    ],
    "rollback": ["NAME", "--format", "--json", "--no-wait"],
    "predict": [
        "RUN[@WHICH]",
        "--another",
        "--batch-rows",
        "--copy",
        "--cpu-only",
        "--data",
        "--detach",
        "--device-count",
        "--devices",
        "--env",
        "--env-file",
        "--event-log",
        "--format",
        "--json",
        "--log-dir",
        "--out",
        "--priority",
        "--secret-env",
        "--set",
        "-d",
    ],
    "list": [
        "--columns",
        "--families",
        "--format",
        "--json",
        "--limit",
        "--name",
        "--reverse",
        "--since",
        "--sort",
        "--state",
        "--tag",
        "--watch",
    ],
    "status": ["RUN", "--format", "--json", "--lineage", "--metric", "--no-lineage"],
    "why": ["RUN", "--format", "--json"],
    "compare": ["RUN RUN…", "--format", "--json"],
    "artifacts": ["RUN", "--format", "--json", "--kind", "--limit", "--out", "--save"],
    "tag": ["RUN", "[KEY=VALUE…]", "--format", "--json", "--remove"],
    "note": ["RUN", "[TEXT|-]", "--format", "--json", "--name"],
    "watch": ["[RUN]", "--format", "--json"],
    "logs": ["RUN", "--follow", "--format", "--json", "--tail", "-f"],
    "cancel": ["RUN…", "--format", "--json", "--reason"],
    "wait": ["RUN", "--format", "--json", "--timeout"],
    "rm": ["RUN…", "--dry-run", "--format", "--json"],
    "prune": [
        "--dry-run",
        "--format",
        "--json",
        "--keep-best",
        "--metric",
        "--mode",
        "--older-than",
        "--yes",
        "-y",
    ],
    "ui": ["--address", "--format", "--json", "--no-browser", "--stop"],
    "open": ["RUN", "--format", "--json", "--no-browser"],
    "gui": [],
    "check": ["MODULE:SYMBOL", "--config", "--format", "--json", "--output", "--seed", "--steps"],
    "doctor": ["--format", "--json"],
    "dataset": [],
    "dataset index": ["DIR", "--format", "--json", "--workers"],
    "dataset verify": ["DIR", "--format", "--json", "--workers"],
    "daemon": ["--event-bus"],
    "daemon start": ["--event-bus", "--format", "--http", "--idle-exit-s", "--json"],
    "daemon stop": ["--format", "--json"],
    "daemon status": ["--format", "--json"],
}
SEED_MODULES = (
    "job_lifecycle",
    "authz",
    "resolve",
    "inputs",
    "arrow_feed",
    "model_runtime",
    "loop",
    "artifacts",
    "uploader",
    "reporting",
    "runtime",
    "api",
    "subprocess_contract",
)


def module_name(path: Path) -> str:
    parts = path.relative_to(SRC).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def imported(path: Path) -> frozenset[str]:
    """Every module of ours that the file names in an import, wherever the import stands."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            names |= {node.module}
            names |= {
                f"{node.module}.{alias.name}"
                for alias in node.names
                if is_module(f"{node.module}.{alias.name}")
            }
    return frozenset(name for name in names if name.split(".")[0] in ("gen_worker", "trn"))


def is_module(name: str) -> bool:
    path = SRC.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def is_below(name: str, room: str) -> bool:
    return name == room or name.startswith(room + ".")


MODULES = {module_name(path): path for path in sorted(SRC.rglob("*.py"))}


@pytest.mark.parametrize("name", MODULES)
def test_a_module_imports_only_what_its_room_may(name: str) -> None:
    room = max((room for room in ROOMS if is_below(name, room)), key=len)
    strangers = {
        other for other in imported(MODULES[name]) if not any(is_below(other, may) for may in ROOMS[room])
    }
    assert strangers == set()


def test_only_the_room_of_qt_imports_qt() -> None:
    """It is an extra: all else works without it."""
    imports_qt = re.compile(r"^\s*(from|import) (PySide6|pyqtgraph|shiboken6|trn\.qt)\b", re.MULTILINE)
    importers = {
        name for name, path in MODULES.items() if imports_qt.search(path.read_text(encoding="utf-8"))
    }
    assert {name for name in importers if not is_below(name, "trn.qt")} == {"trn.cli.verbs.gui"}


@pytest.mark.parametrize(
    ("seam", "users"),
    [
        # Another transport of the API needs an adapter beside this one, and nothing else.
        ("trn.proto.trainer_pb2", {"trn.daemon.api.server"}),
        # What identifies a worker, and where its files are, is known to its executor alone.
        ("trn.executors.local", set()),
        # All others program against the Protocol.
        ("trn.registry.sqlite", {"trn.daemon.app"}),
    ],
)
def test_a_seam_of_the_daemon_has_one_user(seam: str, users: set[str]) -> None:
    found = {
        name
        for name, path in MODULES.items()
        if is_below(name, "trn.daemon") and any(is_below(other, seam) for other in imported(path))
    }
    assert found == users


# Who knows processes, besides the executors: it is about this machine or about trn's own processes, not about workers.
KNOWS_PROCESSES = {
    "trn.cli.verbs.daemon": "waits for the end of the daemon",
    "trn.client.daemon_start": "whether a daemon lives that does not answer",
    "trn.client.gateway_start": "whether a gateway lives",
    "trn.core.snapshots": "whether a client that was adding files still lives",
    "trn.daemon.machine.doctor_reports": "a report is of this boot of the machine",
    "trn.daemon.machine.process_limits": "the daemon's own control group",
    "trn.gateway.app": "says which process the gateway is",
}


def test_nothing_outside_the_executors_knows_processes_of_workers() -> None:
    """A worker is known by its executor's reference: pids, boot ids and /proc are that executor's alone."""
    found = {
        name
        for name, path in MODULES.items()
        if is_below(name, "trn")
        and not is_below(name, "trn.executors")
        and (
            any(is_below(other, "gen_worker.contract.process_identity") for other in imported(path))
            or "/proc" in path.read_text(encoding="utf-8")
        )
    }
    assert found == set(KNOWS_PROCESSES)


def test_a_registry_is_received_or_opened_by_one_function() -> None:
    found = {
        name
        for name, path in MODULES.items()
        if not is_below(name, "trn.registry")
        and not is_below(name, "trn.gateway")  # a process of its own, as a command is
        and "trn.registry.reader" in imported(path)
    }
    assert found == {"trn.cli.reading.run_lookup"}


def test_no_room_has_too_many_modules() -> None:
    rooms: dict[str, int] = {}
    for path in SRC.rglob("*.py"):
        rooms[module_name(path.parent)] = rooms.get(module_name(path.parent), 0) + (
            path.name != "__init__.py"
        )
    crowded = {
        room: number for room, number in rooms.items() if number > MAX_MODULES and room != "trn.cli.verbs"
    }
    assert crowded == {}


@pytest.mark.parametrize("name", IMPORTS_NO_SIBLING)
def test_what_both_sides_share_imports_no_sibling(name: str) -> None:
    assert {other for other in imported(MODULES[name]) if is_below(other, TRAINER)} == set()


def test_only_entry_points_import_the_assemblers() -> None:
    importers = {
        name for name, path in MODULES.items() if any(other in ASSEMBLERS for other in imported(path))
    }
    assert importers <= {*MAY_IMPORT_ASSEMBLERS, *ASSEMBLERS}


def test_the_environment_is_read_in_few_known_places() -> None:
    readers = {name for name, path in MODULES.items() if "os.environ" in path.read_text(encoding="utf-8")}
    assert readers == {
        "gen_worker.tools.certificate.probe_runs",  # hands it on to the workers that it compares
        "gen_worker.entrypoint",  # WORKER_MODE
        "gen_worker.inference.model.loading",  # makes that of the run that trained the model process's own
        "gen_worker.inference.model.parent_process",  # how many threads the libraries of model processes start
        "gen_worker.contract.failpoints",  # for tests
        "gen_worker.frozen_imports",  # which folder is a frozen copy of which
        "gen_worker.inference.runtime",  # the default of `environ`; sets the job's `env`
        "gen_worker.launcher.server",  # hands it on to its workers
        "gen_worker.launcher.worker",  # makes it the worker's
        "gen_worker.pytorch_runner",  # sets up the worker that it runs
        "gen_worker.trainer.attempt.assembly",  # sets the job's `env`
        "gen_worker.trainer.processes.distributed",  # where torch's launcher keeps its store
        "gen_worker.launcher.import_check",  # sets the job's `env`
        "gen_worker.trainer.attempt.isolation",  # hands it on to the child
        "gen_worker.trainer.model_runtime",  # sets what CUDA's deterministic mode asks for
        "gen_worker.trainer.author.plugin_import",  # PYTHONPATH, to say where it looked
        "gen_worker.trainer.processes.agent",  # where the launcher leaves its word
        "gen_worker.trainer.processes.torchrun",  # hands it on to the processes
        "gen_worker.trainer.runtime",  # the default of `environ`
        "gen_worker.trainer.attempt.runtime_env",  # everything else
        "trn.client.caller_environment",  # what a run is given of it, and what is said that it is not
        "trn.cli.main",  # keeps gRPC's own log off the terminal
        "trn.cli.output",  # NO_COLOR, TERM
        "trn.cli.verbs.gui",  # whether there is a screen
        "trn.cli.verbs.ui",  # whether there is a screen for a browser
        "trn.client.background_start",  # what a daemon must not inherit
        "trn.core.home",  # TRN_HOME
        "trn.daemon.__main__",  # switches gRPC's fork handlers off
        "trn.daemon.app",  # what workers inherit
        "trn.executors.local.launcher_link",  # what a launcher must not inherit
    }


# What has one home, and who else may do it by hand. Everyone else calls the shared module.
BY_HAND: dict[str, dict[str, str]] = {
    "os.fsync(": {
        "gen_worker.contract.files.durable": "",
        "gen_worker.tools.doctor.report": "measures the disk",
        "gen_worker.trainer.checkpoints.writing.commit": "a crash is tested between its steps",
        "gen_worker.trainer.events.event_log": "one descriptor, open for the whole attempt",
        "gen_worker.trainer.transfer.input_cache": "one descriptor, open for the whole download",
        "trn.core.snapshots": "the name is known only once the content was hashed",
        "trn.daemon.outlets.closed_days": "what was written is read back before the rename",
        "trn.daemon.outlets.log_file": "appends",
    },
    "os.replace(": {},
    "hashlib.file_digest(": {
        "gen_worker.trainer.datasets.job_content": "compares the file's times before and after",
        "trn.core.snapshots": "of a descriptor",
        "trn.daemon.outlets.closed_days": "of a compressed file",
    },
    '".meta.json"': {"gen_worker.contract.checkpoints.choice": ""},
    "libnvidia-ml": {"gen_worker.contract.nvml": ""},
    "[^A-Za-z0-9._-]+": {
        "gen_worker.contract.job.run_ids": "",
        "trn.cli.verbs.check": "a file name, not a run",
    },
    "min(2 * ": {
        "gen_worker.contract.doubling_delay": "",
        "gen_worker.tools.certificate.probe_runs": "steps",
        "trn.daemon.outlets.log_copier": "a record per file",
    },
    "/proc": {
        "gen_worker.contract.process_identity": "",
        "gen_worker.inference.model.process": "its own memory",
        "gen_worker.inference.memory": "what the machine has available, its own control group",
        "gen_worker.launcher.children": "the kernel's count of out-of-memory kills",
        "gen_worker.launcher.process_family": "environment and limits of other processes",
        "gen_worker.launcher.server": "its own mapped libraries",
        "gen_worker.launcher.worker": "its own descriptors",
        "gen_worker.tools.certificate.trace": "its own memory",
        "gen_worker.tools.doctor.report": "the machine's memory",
        "trn.daemon.machine.process_limits": "its own control group",
    },
}


@pytest.mark.parametrize("text", BY_HAND)
def test_what_has_one_home_is_not_done_elsewhere(text: str) -> None:
    found = {name for name, path in MODULES.items() if text in path.read_text(encoding="utf-8")}
    assert found == set(BY_HAND[text])


# Private names of other packages: no public one does it. Each has a test that fails where it changes.
PRIVATE = {
    ("gen_worker.launcher.worker", "_run_exitfuncs"): "unit/test_worker_exit",
    ("gen_worker.launcher.worker", "_shutdown"): "unit/test_worker_exit",
    ("gen_worker.launcher.worker", "_registry"): "unit/test_worker_exit",
    ("gen_worker.pytorch.model.optimizers", "_foreach_copy_"): "unit/test_pytorch_step",
    ("gen_worker.pytorch.model.optimizers", "_foreach_lerp_"): "unit/test_pytorch_step",
    ("gen_worker.trainer.processes.distributed", "_get_default_store"): "integration/test_many_processes",
    ("gen_worker.trainer.restore.optimizer_options", "_step_count"): "unit/test_pytorch_resumed_options",
    (
        "gen_worker.trainer.restore.optimizer_options",
        "_wrapped_by_lr_sched",
    ): "unit/test_pytorch_resumed_options",
    ("gen_worker.trainer.transfer.pacing", "_mounts"): "integration/test_rude_servers",
    ("gen_worker.trainer.transfer.pacing", "_network_backend"): "integration/test_rude_servers",
    ("gen_worker.trainer.transfer.pacing", "_transport"): "integration/test_rude_servers",
}
PUBLIC_UNDERSCORES = {"_asdict", "_exit", "_replace"}  # documented, of NamedTuple and `os`


def find_private_names() -> set[tuple[str, str]]:
    """(module, name) of attributes that begin with one underscore and that no module of ours defines."""
    ours: set[str] = set()
    used: set[tuple[str, str]] = set()
    certain: set[tuple[str, str]] = set()
    for module, path in MODULES.items():
        if path.name.endswith("_pb2.py"):
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        imports = {
            (alias.asname or alias.name).split(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.Import)
            for alias in node.names
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                ours.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                ours.add(node.id)
            elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and node.attr[1] != "_":
                used.add((module, node.attr))
                root = node.value
                while isinstance(root, ast.Attribute):
                    root = root.value
                if isinstance(root, ast.Name) and root.id in imports:
                    certain.add((module, node.attr))
                elif isinstance(root, ast.Name) and root.id in ("self", "cls"):
                    ours.add(node.attr)
    foreign = certain | {(module, name) for module, name in used if name not in ours}
    return {(module, name) for module, name in foreign if name not in PUBLIC_UNDERSCORES}


def test_private_names_of_other_packages_are_few_and_each_is_tested() -> None:
    assert find_private_names() == set(PRIVATE)
    tests = Path(__file__).parent
    assert [name for name in PRIVATE.values() if not (tests / f"{name}.py").exists()] == []


def test_the_seeds_module_map_is_there() -> None:
    assert [name for name in SEED_MODULES if not is_module(f"{TRAINER}.{name}")] == []


def loaded_after(statement: str) -> set[str]:
    code = f"{statement}; import sys, json; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout))


def all_commands() -> Iterator[tuple[str, click.Command]]:
    """(words, command) of every verb, and of what is below it."""
    ctx = click.Context(group)
    for verb in VERBS:
        command = group.get_command(ctx, verb)
        assert command is not None, f"{verb} has no module"
        yield verb, command
        if isinstance(command, click.Group):
            yield from ((f"{verb} {name}", below) for name, below in command.commands.items())


def options_of(command: click.Command) -> list[str]:
    """Arguments by their metavar, then options by their names."""
    found = [parameter for parameter in command.params if isinstance(parameter, click.Option)]
    others = [parameter for parameter in command.params if not isinstance(parameter, click.Option)]
    arguments = [parameter.metavar or (parameter.name or "").upper() for parameter in others]
    return arguments + sorted(name for option in found for name in (*option.opts, *option.secondary_opts))


def test_importing_the_sdk_loads_nothing_heavy() -> None:
    heavy = {"torch", "pyarrow", "grpc", "numpy", "httpx", "jwt", "yaml", "rich", "gymnasium", "moviepy"}
    assert loaded_after(f"import {TRAINER}") & heavy == set()
    assert loaded_after(f"from {TRAINER} import StepContext, StepResult") & heavy == set()


def test_the_command_line_loads_one_verb_and_nothing_heavy() -> None:
    heavy = {
        "msgspec",
        "grpc",
        "google",
        "rich",
        "asyncio",
        "dataclasses",
        "hashlib",
        "tempfile",
        "subprocess",
    }
    words = {
        "list": "trn.cli.verbs.list_runs",
        "status -h": "trn.cli.verbs.status",
        "daemon -h": "trn.cli.verbs.daemon",
        "-h": "",
    }
    for line, verb in words.items():
        arguments = ["--home", "/nowhere", *line.split()]
        loaded = loaded_after(
            "import contextlib, io; from trn.cli.main import main\n"
            "with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()),"
            f" contextlib.redirect_stderr(io.StringIO()): main({arguments})\npass"
        )
        assert loaded & heavy == set(), line
        verbs = {f"trn.cli.verbs.{module}" for module, _ in VERBS.values()}
        assert loaded & verbs == ({verb} if verb else set()), line


def test_the_options_of_the_command_line_are_the_published_ones() -> None:
    """An option is a promise: take none away, and add to this table what is added."""
    assert {name: options_of(command) for name, command in all_commands()} == CLI_OPTIONS


def test_every_verb_shows_an_example_and_one_line_of_help() -> None:
    for name, command in all_commands():
        # Laid out alike, and kept as they are: an example that is wrapped cannot be pasted.
        assert (command.epilog or "").startswith("\b\nExamples:\n  trn "), name
        assert command.help, name
        if " " not in name and command.short_help:
            assert command.get_short_help_str(100) == VERBS[name][1]


def test_the_public_names_are_the_published_ones_and_all_of_them_load() -> None:
    import gen_worker.trainer

    assert set(gen_worker.trainer.__all__) == PUBLIC_NAMES
    assert all(getattr(gen_worker.trainer, name) is not None for name in PUBLIC_NAMES)
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        _ = gen_worker.trainer.Nonsense


def test_no_module_grows_beyond_what_a_reader_holds() -> None:
    long = {name: len(path.read_text().splitlines()) for name, path in MODULES.items()}
    assert {name: lines for name, lines in long.items() if lines > 450} == {}


@pytest.mark.parametrize("folder", ["migrations", "metrics_migrations"])
def test_migrations_are_numbered_without_gap_or_double(folder: str) -> None:
    names = sorted(path.name for path in (SRC / "trn" / "registry" / folder).glob("*.sql"))
    assert [int(name.partition("_")[0]) for name in names] == list(range(1, len(names) + 1)), names


# Attributes that hold text for people.
_TEXTS = frozenset(
    {"reason", "error", "detail", "message", "sentence", "what", "why", "remedy", "problem", "hint", "words"}
)
_SEARCHES = frozenset(
    {"startswith", "endswith", "find", "index", "split", "removeprefix", "removesuffix", "count"}
)
_MATCHES = frozenset({"match", "search", "fullmatch", "findall"})
# module -> whose text it is, where it is not ours and there is nothing better to go by
FOREIGN_TEXTS = {
    "gen_worker.pytorch.model.optimizers": "torch's, of a schedule that was stepped beyond its end",
    "gen_worker.trainer.author.plugin_import": "Python's, of a module that is not found",
    "gen_worker.trainer.transfer.object_store": "of a storage library; shortened, not decided by",
    "trn.cli.reading.registry_view": "SQLite's, of a table that is not there",
    "trn.daemon.outlets.redis_streams": "Redis's, of a group that exists",
    "trn.daemon.ingest.ingest": "its own, whether that was logged before",
    "trn.daemon.outlets.log_copier": "its own, whether that was logged before",
}


def _text_of(node: ast.AST, caught: set[str]) -> bool:
    """An attribute that holds text for people, or the text of a caught exception."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr in ("lower", "strip") and _text_of(node.func.value, caught)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "str":
        return bool(node.args) and isinstance(node.args[0], ast.Name) and node.args[0].id in caught
    return isinstance(node, ast.Attribute) and node.attr in _TEXTS


def _searches_text(node: ast.AST, caught: set[str]) -> bool:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr in _MATCHES:
            return any(_text_of(argument, caught) for argument in node.args)
        return node.func.attr in _SEARCHES and _text_of(node.func.value, caught)
    if not isinstance(node, ast.Compare):
        return False
    for operator, left, right in zip(
        node.ops, [node.left, *node.comparators], node.comparators, strict=False
    ):
        if isinstance(operator, ast.In | ast.NotIn) and _text_of(right, caught):
            return True
        if isinstance(operator, ast.Eq | ast.NotEq) and _text_of(left, caught) != _text_of(right, caught):
            other = right if _text_of(left, caught) else left
            if not (isinstance(other, ast.Constant) and other.value in ("", None)):
                return True
    return False


def test_nothing_decides_by_text_that_was_written_for_people() -> None:
    """Causes, faults and errors carry ids and values; a changed word must change no decision."""
    found: dict[str, list[str]] = {}
    for name, path in MODULES.items():
        tree = ast.parse(path.read_text())
        caught = {node.name for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler) and node.name}
        lines = [ast.unparse(node) for node in ast.walk(tree) if _searches_text(node, caught)]
        if lines:
            found[name] = lines
    assert {name: lines for name, lines in found.items() if name not in FOREIGN_TEXTS} == {}
    assert set(FOREIGN_TEXTS) <= set(found), "these decide by no text any more"
