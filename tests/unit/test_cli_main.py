"""The door of the command line: every way to end has its exit code, its line for people and its object for programs."""

import asyncio
import errno
import json
from collections.abc import Callable
from typing import Any

import click
import pytest

from trn.cli import command_table as verbs
from trn.cli.exit_codes import ExitCode
from trn.cli.output import Output
from trn.cli.submitting.submission_report import submit_and_follow
from trn.client.code.frozen_code import FrozenCode
from trn.core.errors import ConflictError, InvalidRequestError


@pytest.fixture
def ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, Any, str]]:
    """A verb that does this -> (exit code, its object, what it said)."""

    def run(act: Callable[[], object]) -> tuple[int, Any, str]:
        monkeypatch.setattr(verbs.group, "get_command", lambda *_: click.Command("verb", callback=act))
        code = verbs.run(["verb"])
        out, err = capsys.readouterr()
        return code, json.loads(out) if out else None, err

    return run


def raises(fault: BaseException) -> Callable[[], object]:
    def act() -> object:
        raise fault

    return act


def test_what_a_verb_returns_is_the_exit_code(ends: Callable[..., tuple[int, Any, str]]) -> None:
    assert ends(lambda: None) == (0, None, "")
    assert ends(lambda: ExitCode.CANCELLED_RUN) == (8, None, "")


def test_an_error_of_ours_is_one_line_and_one_object(ends: Callable[..., tuple[int, Any, str]]) -> None:
    code, told, said = ends(raises(ConflictError("it \x1b[31mhas ended")))
    assert (code, said) == (6, "trn: it �[31mhas ended\n")
    assert told == {"event": "error", "code": "failed-precondition", "message": "it \x1b[31mhas ended"}
    code, told, said = ends(raises(InvalidRequestError("no job", ["a: bad", "b: worse"])))
    assert (code, told["faults"]) == (3, ["a: bad", "b: worse"])
    assert said == "trn: no job\n  - a: bad\n  - b: worse\n"


def test_a_full_disk_is_no_bug_and_a_bug_is_one(ends: Callable[..., tuple[int, Any, str]]) -> None:
    code, told, said = ends(raises(OSError(errno.ENOSPC, "No space left on device", "/x")))
    assert (code, told["code"], "Traceback" in said) == (5, "unavailable", False)
    for fault in (RuntimeError("oh"), OSError(errno.EBADF, "oh")):
        code, told, said = ends(raises(fault))
        assert (code, told["code"], "Traceback" in said) == (70, "internal", True)
        assert "this is a bug in trn" in said


def test_ctrl_c_and_wrong_words_have_codes_of_their_own(ends: Callable[..., tuple[int, Any, str]]) -> None:
    assert ends(raises(KeyboardInterrupt()))[0] == 130
    code, told, said = ends(raises(click.UsageError("not like that")))
    assert (code, told["code"]) == (2, "usage")
    assert "not like that" in said


def test_ctrl_c_before_the_answer_to_a_submit_says_that_a_run_may_be_there(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def interrupted() -> None:
        unanswered: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        nothing: Any = None
        options = {"is_detached": False, "is_json": True}
        submitting = asyncio.ensure_future(
            submit_and_follow(
                nothing, nothing, Output(is_json=True), unanswered, nothing, options, FrozenCode()
            )
        )
        await asyncio.sleep(0)
        submitting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await submitting

    asyncio.run(interrupted())
    assert "`trn list` shows whether a run was submitted" in capsys.readouterr().err


def test_a_verb_without_a_module_is_not_offered(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(verbs.VERBS, "ghost", ("no_such_module", "Boo."))
    for words, code in ((["-h"], 0), (["ghost"], 2)):
        assert verbs.run(words) == code
    out, err = capsys.readouterr()
    assert "Boo." not in out
    assert err == "trn: no such command 'ghost'\n  `trn -h` shows the usage\n"
