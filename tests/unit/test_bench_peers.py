"""Peers of the benchmarks: their environments, and the rows that they stand in. No timings."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """A module of the benchmarks, which are scripts beside the package."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return import_module


def _environment(load: Any, folder: Path, pins: str, *, ours: tuple[str, ...] = ()) -> Any:
    requirements = folder / "requirements.txt"
    requirements.write_text(pins)
    python = folder / "environment" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    return load("environments").Environment(
        folder=folder / "environment", requirements=requirements, ours=ours
    )


def test_a_peer_that_cannot_be_installed_costs_no_other(
    load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pins = "# why\ntorch==1\ngood==2  # a note\nbad==3\nlast==4\n"
    environment = _environment(load, tmp_path, pins, ours=("-e", "."))
    asked: list[tuple[str, ...]] = []

    def install(_self: object, *what: str) -> bool:
        asked.append(what)
        return "-r" not in what and "bad==3" not in what

    monkeypatch.setattr(type(environment), "_install", install)
    environment.make()
    assert asked[1:] == [
        ("torch==1", "-e", "."),
        *(("torch==1", peer) for peer in ("good==2", "bad==3", "last==4")),
    ]
    assert "bad==3 could not be installed: it will be shown as not measured" in capsys.readouterr().out


def test_an_environment_is_installed_again_only_when_a_pin_changes(
    load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = _environment(load, tmp_path, "peer==1\n")
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(type(environment), "_install", lambda _self, *what: asked.append(what) or True)
    for pins, num_installs in (("peer==1\n", 1), ("peer==1\n", 1), ("peer==2\n", 2)):
        environment.requirements.write_text(pins)
        environment.make()
        assert len(asked) == num_installs


def test_the_command_line_is_shown_beside_every_peer_and_judged_without_them(load: Any) -> None:
    bench = load("cli_bench")
    sides = {bench.LIST: 80.0, bench.HELP: 70.0, bench.COMPLETION: 90.0, bench.PASS: 20.0, bench.RUN: 300.0}
    samples = {name: [{"ms": value}] for name, value in sides.items()}
    rows = bench.build_rows(load("harness").Measurements(samples=samples))
    shown = {row.what: [side.name for side in row.beside] for row in rows}
    helps = ["python -c pass", "ray --help", "mlflow --help", "accelerate --help"]
    assert [shown[bench.HELP], shown[bench.COMPLETION]] == [helps, helps]
    assert shown["trn list with 1,000 runs, cold"] == [
        "python -c pass",
        "import click",
        "import msgspec",
        "torchx list -s local_cwd, until it refuses",
        "ray job list",
    ]
    assert shown["trn run of a one-step job on a running daemon"] == [bench.RAY_SUBMIT]
    assert [row.verdict for row in rows[:4]] == ["pass"] * 4


def test_a_refusal_is_timed_only_if_it_is_the_one_that_is_known(load: Any) -> None:
    command = load("cli_peers").command
    words = ["python", "-c", "raise SystemExit('it keeps no list')"]
    assert command({"command": words, "refusal": "keeps no list"})()["ms"] > 0
    with pytest.raises(RuntimeError, match="fails for another reason: it keeps no list"):
        command({"command": words, "refusal": "not this"})


def test_a_command_that_is_not_installed_is_named_without_its_place(load: Any) -> None:
    with pytest.raises(RuntimeError, match=r"^there is no such-a-peer here$"):
        load("cli_peers").command({"command": ["such-a-peer", "--help"]})
