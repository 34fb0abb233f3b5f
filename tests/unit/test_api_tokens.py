"""Tokens: who may do what, and what nobody may."""

import threading
from pathlib import Path

import pytest

from trn.core.errors import ForbiddenError, UnauthenticatedError, UnavailableError
from trn.daemon.api.tokens import RUN_TOKEN_LIFE_S, ApiTokens, RunGrant, read_or_make_token, require_allowed
from trn.proto import trainer_pb2 as pb
from trn.proto.methods import METHODS


def no_nonce(_run_id: str) -> str:
    return ""


@pytest.fixture
def tokens(tmp_path: Path) -> ApiTokens:
    return ApiTokens(tmp_path / "token", clock_s=lambda: 1000.0)


def test_the_operators_token_is_made_once_and_is_the_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "token"
    made = read_or_make_token(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_or_make_token(path) == made
    assert [item.name for item in tmp_path.iterdir()] == ["token"]


def test_two_that_make_the_token_at_once_get_the_same(tmp_path: Path) -> None:
    found: list[str] = []
    start = threading.Barrier(8)

    def make() -> None:
        start.wait()
        found.append(read_or_make_token(tmp_path / "token"))

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1


def test_a_token_that_others_can_read_or_that_is_short_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "token"
    read_or_make_token(path)
    path.chmod(0o644)
    with pytest.raises(UnavailableError, match="can be read by others"):
        read_or_make_token(path)
    path.chmod(0o600)
    path.write_text("short\n")
    with pytest.raises(UnavailableError, match="holds 5 characters"):
        read_or_make_token(path)


def test_the_operators_token_is_the_operator_and_a_runs_token_is_its_run(
    tokens: ApiTokens, tmp_path: Path
) -> None:
    run_token = tokens.make_run_token("a.b-1")
    operator = (tmp_path / "token").read_text().strip()
    assert tokens.authenticate([f"Bearer {operator}"]) is None
    assert tokens.authenticate([f"bearer {run_token}"]) == RunGrant("a.b-1")


@pytest.mark.parametrize(
    "values",
    [
        [],
        ["Bearer"],
        ["Bearer "],
        ["Basic abc"],
        ["Bearer x"],
        ["Bearer ä.ö"],
        [b"Bearer \xff\xfe"],
        ["Bearer trnrun1.99999999999.a."],
        ["Bearer trnrun1.nonsense"],
        ["Bearer ...."],
    ],
)
def test_what_is_no_token_is_not_let_in(tokens: ApiTokens, values: list[str | bytes]) -> None:
    with pytest.raises(UnauthenticatedError):
        tokens.authenticate(values)


def test_two_tokens_at_once_are_none(tokens: ApiTokens) -> None:
    good = f"Bearer {tokens.make_run_token('a')}"
    with pytest.raises(UnauthenticatedError):
        tokens.authenticate([good, good])


def test_a_runs_token_cannot_be_changed_in_any_part(tokens: ApiTokens) -> None:
    token = tokens.make_run_token("mine")
    for changed in (
        token.replace("mine", "yours"),
        token.replace(str(1000 + RUN_TOKEN_LIFE_S), str(1001 + RUN_TOKEN_LIFE_S)),
        token[:-1],
        token + "0",
    ):
        assert changed != token
        with pytest.raises(UnauthenticatedError):
            tokens.authenticate([f"Bearer {changed}"])


def test_a_runs_token_ends_on_its_day(tmp_path: Path) -> None:
    now_s = 1000.0
    tokens = ApiTokens(tmp_path / "token", clock_s=lambda: now_s)
    value = f"Bearer {tokens.make_run_token('a')}"
    now_s += RUN_TOKEN_LIFE_S - 1
    assert tokens.authenticate([value]) == RunGrant("a")
    now_s += 1
    with pytest.raises(UnauthenticatedError, match="token of run a has ended"):
        tokens.authenticate([value])


def test_another_operators_token_ends_every_runs_token(tmp_path: Path) -> None:
    path = tmp_path / "token"
    value = f"Bearer {ApiTokens(path).make_run_token('a')}"
    assert ApiTokens(path).authenticate([value]) == RunGrant("a")
    path.unlink()
    with pytest.raises(UnauthenticatedError):
        ApiTokens(path).authenticate([value])


MAY = {
    "GetRun": pb.GetRunRequest(run_id="mine"),
    "StreamEvents": pb.StreamEventsRequest(run_id="mine"),
    "StreamLogs": pb.StreamLogsRequest(run_id="mine"),
    "GetMetrics": pb.GetMetricsRequest(run_id="mine"),
    "CancelRun": pb.CancelRunRequest(run_id="mine"),
    "WatchRuns": pb.WatchRunsRequest(run_ids=["mine"]),
    "ListArtifacts": pb.ListArtifactsRequest(run_id="mine"),
    "ReadArtifact": pb.ReadArtifactRequest(artifact_id="a1"),
}


def run_of(artifact_id: str) -> str | None:
    return "mine" if artifact_id == "a1" else None


@pytest.mark.parametrize("name", METHODS)
def test_a_runs_token_is_good_for_its_run_and_for_nothing_else(name: str) -> None:
    method = METHODS[name]
    require_allowed(None, name, method.request(), no_nonce, run_of)
    if name in MAY:
        require_allowed(RunGrant("mine"), name, MAY[name], no_nonce, run_of)
        with pytest.raises(ForbiddenError):
            require_allowed(RunGrant("yours"), name, MAY[name], no_nonce, run_of)
        with pytest.raises(ForbiddenError):
            require_allowed(RunGrant("min"), name, MAY[name], no_nonce, run_of)
    with pytest.raises(ForbiddenError):
        require_allowed(RunGrant("mine"), name, method.request(), no_nonce, run_of)


def test_a_runs_token_does_not_change_its_notes_and_tags() -> None:
    request = pb.UpdateRunRequest(run_id="mine", notes="mine alone", is_exact=True)
    with pytest.raises(ForbiddenError, match="a run's token is not good for UpdateRun"):
        require_allowed(RunGrant("mine"), "UpdateRun", request, no_nonce, run_of)


def test_a_watch_of_two_runs_is_not_for_the_token_of_one() -> None:
    with pytest.raises(ForbiddenError):
        require_allowed(
            RunGrant("mine"), "WatchRuns", pb.WatchRunsRequest(run_ids=["mine", "yours"]), no_nonce
        )


@pytest.mark.parametrize("name", ["Check", "Watch", "List", "ServerReflectionInfo", "Anything"])
def test_a_runs_token_does_not_open_other_services(name: str) -> None:
    with pytest.raises(ForbiddenError):
        require_allowed(RunGrant("mine"), name, object(), no_nonce)


def test_a_token_is_for_one_submission_and_not_for_a_later_run_of_the_same_id(tokens: ApiTokens) -> None:
    grant = tokens.authenticate([f"Bearer {tokens.make_run_token('a.b', '0123')}"])
    assert grant == RunGrant("a.b", "0123")
    require_allowed(grant, "GetRun", pb.GetRunRequest(run_id="a.b"), lambda _run_id: "0123")
    require_allowed(
        grant, "GetRun", pb.GetRunRequest(run_id="a.b"), lambda _run_id: None
    )  # not found, it says then
    for other in ("4567", ""):
        with pytest.raises(ForbiddenError, match="another has its id by now"):
            require_allowed(
                grant, "GetRun", pb.GetRunRequest(run_id="a.b"), lambda _run_id, other=other: other
            )


def test_tokens_of_runs_from_before_there_were_nonces_work_for_those_alone(tokens: ApiTokens) -> None:
    token = tokens.make_run_token("mine")
    assert token.startswith("trnrun1.")
    grant = tokens.authenticate([f"Bearer {token}"])
    require_allowed(grant, "GetRun", pb.GetRunRequest(run_id="mine"), no_nonce)
    with pytest.raises(ForbiddenError, match="another has its id by now"):
        require_allowed(grant, "GetRun", pb.GetRunRequest(run_id="mine"), lambda _run_id: "0123")
