"""What the benchmark of the page stands on: the same data for every side, pages that are seen to be painted. No timings."""

import struct
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """A module of the benchmarks, which are scripts beside the package."""
    pytest.importorskip("playwright")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return import_module


def test_every_view_of_every_side_is_seen_to_be_painted(load: Any) -> None:
    rows, peers, sides = load("faces_rows"), load("faces_peers"), load("faces_sides")
    assert set(rows.PEERS.values()) == set(peers.PEERS) == set(load("faces_peer_data").WRITERS)
    for view in rows.VIEWS:
        assert view in sides.IS_PAINTED
        assert all(view in peer.is_painted for peer in peers.PEERS.values())


def test_ours_is_judged_beside_a_peer_that_could_not_be_measured(load: Any) -> None:
    rows = load("faces_rows")
    table = rows.VIEWS["table"]
    seconds = {rows.PAGE: 250.0, rows.TENSORBOARD: 1500.0, rows.TRACKIO: 700.0}
    measured = load("harness").Measurements(
        samples={table[name]: [{"ms": value}] for name, value in seconds.items()},
        failures={table[rows.MLFLOW]: "nothing is painted within 60 s"},
    )
    found = {row.what: row for row in rows.build_rows(measured)}
    against = found["page, cold open of a home with 1,000 runs → table painted, against the fastest peer"]
    assert against.reference.name == table[rows.TRACKIO]
    assert against.verdict == "FAIL"
    assert "not measured: nothing is painted within 60 s" in "\n".join(
        load("report").table_lines([*found.values()])
    )


def test_every_bar_of_the_page_has_a_row(load: Any) -> None:
    rows = load("faces_rows").build_rows(load("harness").Measurements())
    assert [row.bar.describe(row.unit) for row in rows if row.bar is not None] == [
        "≤ 90 kB",
        "≤ 500 ms",
        "≤ 0.333 × the fastest peer",
        "≤ 400 ms",
        "≤ 200 kB",
        "≤ 1500 ms",
        "≤ 1500 kB",
        "≤ 250 ms",
        "≤ 25 % of a core",
        "≤ 1.05 ×",
        "≤ 2 MB",
        "≤ 0",
        "≤ 0.6 s",
        "≤ 70 MB",
        *["≤ 1.1 × without"] * 3,
        "≥ 500 /s",
    ]


def test_a_home_has_the_runs_and_points_that_the_peers_get(load: Any, tmp_path: Path) -> None:
    from trn.core.home import Home
    from trn.registry.metrics import MetricReader
    from trn.registry.reader import RegistryReader

    data, peer_data = load("faces_data"), load("faces_peer_data")
    data.write_home(tmp_path, peer_data.View(num_runs=3, num_points=40, has_second=True))
    home = Home(tmp_path)
    runs, metrics = RegistryReader(home.registry), MetricReader(home.metrics)
    try:
        assert [(run.run_id, run.state, run.step) for run in runs.page(limit=9)] == [
            (peer_data.name_run(number), "COMPLETED", 40) for number in (2, 1, 0)
        ]
        for series in metrics.query(peer_data.name_run(1)):
            assert series.values == peer_data.read_curve(1, 40, series.name)
            assert runs.get(peer_data.name_run(1)).metrics[series.name] == series.values[-1]
    finally:
        metrics.close()
        runs.close()


def test_data_is_written_once_for_a_size(load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = load("faces_data")
    monkeypatch.setattr(data, "DATA", tmp_path)
    small, smaller = data.Sizes(num_runs=3), data.Sizes(num_runs=2)
    folder = data.prepare(data.OURS, "table", small)
    assert data.prepare(data.OURS, "table", small) == folder
    assert data.prepare(data.OURS, "table", smaller) != folder
    monkeypatch.setattr(data, "FORMAT", data.FORMAT + 1)
    assert data.prepare(data.OURS, "table", small) != folder
    assert not folder.exists()


def test_records_for_tensorboard_carry_their_checksums(load: Any, tmp_path: Path) -> None:
    data = load("faces_peer_data")
    data.write_tensorboard(tmp_path, data.View(num_runs=1, num_points=300))
    (path,) = tmp_path.glob("*/events.out.tfevents.*")
    rest, steps = path.read_bytes(), []
    while rest:
        (size,) = struct.unpack("<Q", rest[:8])
        event = rest[12 : 12 + size]
        assert rest[8:12] == _mask(rest[:8])
        assert rest[12 + size : 16 + size] == _mask(event)
        steps.append(sum((byte & 0x7F) << (7 * place) for place, byte in enumerate(event[10:14])))
        rest = rest[16 + size :]
    assert steps[1:] == list(range(300))  # the first record is the version


def _mask(data: bytes) -> bytes:
    """As TFRecords have it: CRC-32C, turned, plus a constant."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def test_a_change_of_the_picture_belongs_to_the_point_before_it(load: Any) -> None:
    match = load("faces_sides").match_changes
    written, changes = [100, 800, 1500, 2200, 2900], [750, 840, 1540, 1600, 2990]
    assert match(written, changes) == [40, 40]  # the third has none, and the last no successor
