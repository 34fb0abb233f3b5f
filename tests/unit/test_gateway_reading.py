"""Claims about what the gateway reads by itself: log search, ranges, forecasts, credentials."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from trn.core.causes import QUEUED
from trn.core.errors import InvalidRequestError
from trn.core.home import Home
from trn.core.runs import PREDICTION, SERVER, AttemptRecord, RunRecord, RunState
from trn.core.snapshot_manifest import FileEntry, Manifest
from trn.core.snapshots import SnapshotStore
from trn.gateway.app import name_hosts
from trn.gateway.endpoints import read_asked
from trn.gateway.file_answer import read_range
from trn.gateway.gate.credentials import BEARER, LOGIN_TOKEN_S, MAX_LOGIN_TOKENS, SESSION_S, Credentials
from trn.gateway.reading import log_search
from trn.gateway.reading.exactness import ExactnessReader
from trn.gateway.reading.forecast import forecast
from trn.gateway.reading.log_search import search_log
from trn.gateway.reading.run_files import list_documents
from trn.gateway.routes import commands


def search_all(path: Path, text: str, *, limit: int = 10, **options: Any) -> list[tuple[int, str]]:
    fd = os.open(path, os.O_RDONLY)
    try:
        found: list[tuple[int, str]] = []
        at = 0
        for _ in range(10_000):
            page = search_log(fd, text.encode(), begin=at, limit=limit, is_case_ignored=True, **options)
            found += [(match.offset, match.line) for match in page.matches]
            assert page.next_offset > at or page.is_end
            at = page.next_offset
            if page.is_end:
                return found
        raise AssertionError("it does not end")
    finally:
        os.close(fd)


@pytest.mark.parametrize("read_bytes", [64, 100, 1 << 20])
@pytest.mark.parametrize("limit", [1, 3, 1000])
def test_every_line_that_has_the_text_is_found_once_wherever_a_piece_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_bytes: int, limit: int
) -> None:
    monkeypatch.setattr(log_search, "READ_BYTES", read_bytes)
    lines = [
        f"{number} {'needle' if number % 3 == 0 else 'hay'} {'é' * (number % 9)}" for number in range(100)
    ]
    path = tmp_path / "log"
    path.write_text("\n".join(lines))
    found = search_all(path, "NEEDLE", limit=limit)
    assert [line for _, line in found] == [line for line in lines if "needle" in line]
    whole = path.read_bytes()
    assert all(whole[offset:].startswith(line.encode()) for offset, line in found)


def test_a_line_that_is_longer_than_all_that_is_read_at_once_is_searched_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_search, "READ_BYTES", 1000)
    path = tmp_path / "log"
    for place in (0, 990, 995, 999, 1000, 3000):
        path.write_bytes(b"x" * place + b"needle" + b"y" * 5000)
        found = search_all(path, "needle")
        assert any("needle" in line for _, line in found), place
        assert all(len(line) <= log_search.MAX_LINE for _, line in found)


def test_a_search_does_a_bounded_piece_of_work_and_says_where_to_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_search, "READ_BYTES", 100)
    monkeypatch.setattr(log_search, "MAX_SEARCHED", 500)
    path = tmp_path / "log"
    path.write_bytes(b"nothing here\n" * 1000 + b"needle\n")
    fd = os.open(path, os.O_RDONLY)
    first = search_log(fd, b"needle", begin=0, limit=10, is_case_ignored=False)
    os.close(fd)
    assert first.matches == []
    assert not first.is_end
    assert 500 < first.next_offset <= 700
    assert [line for _, line in search_all(path, "needle")] == ["needle"]


@pytest.mark.parametrize(
    ("header", "found"),
    [
        ("", None),
        ("bytes=0-", (0, 10)),
        ("bytes=0-3", (0, 4)),
        ("bytes=4-100", (4, 10)),
        ("bytes=-3", (7, 10)),
        ("bytes=-30", (0, 10)),
        ("bytes=10-", (0, 0)),
        ("bytes=5-4", (0, 0)),
        ("bytes=-0", (0, 0)),
        ("bytes=0-1,3-4", None),
        ("lines=1-2", None),
        ("bytes=-", None),
        ("bytes=1e3-", None),
    ],
)
def test_a_range_is_served_refused_or_ignored(header: str, found: tuple[int, int] | None) -> None:
    assert read_range(header, 10) == found


def run_at(step: int, *, end_step: int | None = 1000, state: RunState = RunState.RUNNING) -> RunRecord:
    return RunRecord(
        run_id="a", digest="d", state=state, cause=QUEUED, config={}, step=step, end_step=end_step
    )


def attempt(step: int, *, launched_ms: int = 0) -> AttemptRecord:
    return AttemptRecord(run_id="a", number=1, launched_ms=launched_ms, step=step)


def test_a_forecast_is_by_the_runs_own_speed_with_the_spread_of_past_runs() -> None:
    past = [0.08, 0.09, 0.1, 0.11, 0.2]
    found = forecast(run_at(500), [attempt(500)], past, 100_000, "m:T").forecast
    assert found is not None
    assert found.finish_ms == 200_000  # 0.2 s a step, as until now
    assert found.low_ms < found.finish_ms < found.high_ms
    assert "5 completed runs of m:T" in found.basis
    alone = forecast(run_at(500), [attempt(500)], [], 100_000, "m:T").forecast
    assert alone is not None
    assert (alone.finish_ms, alone.basis) == (200_000, "the speed of this run")
    begun = forecast(run_at(5), [attempt(5)], past, 1_000, "m:T")
    assert begun.forecast is None, "not by past runs alone: they may have had other data"
    assert "too few steps" in begun.reason


def test_a_run_that_has_not_begun_is_forecast_by_past_runs_and_without_any_it_is_said_why() -> None:
    waiting = run_at(0, state=RunState.PENDING)
    found = forecast(waiting, [], [0.1, 0.1, 0.1], 50_000, "m:T").forecast
    assert found is not None
    assert found.finish_ms == 150_000
    unknown = forecast(waiting, [], [], 50_000, "m:T")
    assert unknown.forecast is None
    assert "no completed run of m:T" in unknown.reason
    assert "ended" in forecast(run_at(5, state=RunState.FAILED), [], [0.1], 1, "").reason
    assert "steps" in forecast(run_at(5, end_step=None), [], [0.1], 1, "").reason


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_tokens_and_sessions_end_in_time_and_there_are_never_too_many() -> None:
    clock = Clock()
    credentials = Credentials(8080, clock=clock)
    old = credentials.draw_login_token()
    clock.now += LOGIN_TOKEN_S + 1
    assert credentials.log_in(old) is None
    first = credentials.draw_login_token()
    for _ in range(MAX_LOGIN_TOKENS):
        credentials.draw_login_token()
    assert credentials.log_in(first) is None  # the oldest of too many
    session = credentials.log_in(credentials.draw_login_token())
    cookie = f"{credentials.cookie_name}={session}"
    holder = credentials.holder_of_cookie(cookie)
    assert holder is not None
    clock.now += SESSION_S - 1
    assert credentials.holder_of_cookie(f"other=1; {cookie}") == holder  # used: it lives on
    assert credentials.holder_of_cookie(f'bad={{"a":1}}; also bad; "x"=y;{cookie};z') == holder
    clock.now += SESSION_S + 1
    assert credentials.holder_of_cookie(cookie) is None
    assert credentials.holder_of_bearer(f"Bearer {credentials.bearer}") == BEARER
    assert credentials.holder_of_bearer(f"bearer  {credentials.bearer} ") == BEARER
    assert credentials.holder_of_bearer(f"Bearer {credentials.bearer}x") is None
    assert credentials.holder_of_bearer("Bearer ä") is None


def test_the_header_host_may_be_our_names_with_our_port_and_nothing_else() -> None:
    assert name_hosts("127.0.0.1", 8080, []) == ["127.0.0.1:8080", "localhost:8080", "[::1]:8080"]
    assert name_hosts("10.0.0.5", 8443, ["GPU-box.lan"], "https") == ["gpu-box.lan:8443", "10.0.0.5:8443"]
    assert name_hosts("10.0.0.5", 443, ["gpu"], "https") == ["gpu:443", "gpu", "10.0.0.5:443", "10.0.0.5"]
    assert name_hosts("0.0.0.0", 9000, ["gpu:443"], "https")[0] == "gpu:443"
    assert "0.0.0.0:9000" not in name_hosts("0.0.0.0", 9000, [], "https")
    assert name_hosts("::1", 9000, [])[0] == "[::1]:9000"


def snapshot_of(home: Home, **sources: bytes) -> str:
    store = SnapshotStore(home.snapshots)
    with store.adding():
        put = {name: store.put_bytes(source) for name, source in sources.items()}
        files = tuple(
            FileEntry(path=f"{name}.py", sha256=one.sha256, mode=0o644, size_bytes=one.size_bytes)
            for name, one in put.items()
        )
        return store.put_manifest(Manifest(files=files))


def certify(
    home: Home, name: str, *, is_sound: bool = True, trainer: str = "mine:Mine", **sources: bytes
) -> None:
    folder = home.checks / name
    folder.mkdir(parents=True)
    code = {f"/at/{name}.py": hashlib.sha256(source).hexdigest() for name, source in sources.items()}
    document = {"trainer": trainer, "is_sound": is_sound, "code": code}
    (folder / "certificate.json").write_text(json.dumps(document))


def test_a_certificate_is_about_the_code_that_was_tested_and_about_trainings_alone(tmp_path: Path) -> None:
    home = Home(tmp_path)
    run = run_at(10)
    tested, changed, other, copied = (
        msgspec.structs.replace(run, snapshot=snapshot_of(home, **sources))
        for sources in (
            {"mine": b"one", "part": b"part"},
            {"mine": b"two", "part": b"part"},
            {"mine": b"one", "part": b"another"},
            {"mine": b"two", "part": b"part", "before": b"one"},
        )
    )
    exactness = ExactnessReader(home)

    def state(run: RunRecord, trainer: str = "mine:Mine") -> str:
        return exactness.read(run, trainer, None).state

    assert state(tested) == "unknown"
    certify(home, "1", mine=b"one", part=b"part")
    assert state(tested) == "certified"
    assert "certificate" in list_documents(home, tested, "mine:Mine")
    for untested in (changed, other, copied, run):
        assert state(untested) == "unknown", "its code is another one, or unknown"
        assert "certificate" not in list_documents(home, untested, "mine:Mine")
    assert state(tested, "mine:Other") == "unknown"
    for kind in (SERVER, PREDICTION):
        assert state(msgspec.structs.replace(tested, kind=kind)) == "unknown"
    certify(home, "2", mine=b"two", is_sound=False)
    assert state(tested) == "certified"
    assert state(changed) == "unknown"
    certify(home, "3", mine=b"one", is_sound=False)
    os.utime(home.checks / "3" / "certificate.json", (2**31, 2**31))
    assert state(tested) == "unknown", "the newest about this code counts"
    certify(home, "4", trainer="old:Old")
    assert state(tested, "old:Old") == "unknown", "it does not say what it tested"


def test_every_fault_of_a_body_is_named_as_those_of_a_job() -> None:
    (endpoint,) = [each for each in commands.ENDPOINTS if each.path == "/runs" and each.method == "POST"]

    def faults(body: object) -> list[str]:
        with pytest.raises(InvalidRequestError) as refused:
            read_asked(endpoint, {}, b"", body if isinstance(body, bytes) else json.dumps(body).encode())
        return [str(fault) for fault in refused.value.faults]

    found = faults({"confg": {}, "priority": "high", "env": {"A": 1}})
    assert found[0] == "unknown field `confg`: did you mean `config`?"
    assert 'priority: found "high", expected a whole number' in found[1]
    assert "env.A: found 1, expected text" in found
    assert len(found) == 4, "and that there is no config"
    assert faults(b"{")
    assert faults(b"[]")
    assert faults(b'{"a": "\xff"}')
