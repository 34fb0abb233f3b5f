"""What others wrote does not steer a terminal: no control sequences, no turned directions, nothing invisible."""

import json
import unicodedata

import pytest

from trn.cli.output import Output, say
from trn.core.terminal_text import LogShield, clean, keep_lines, plain, shield, shield_json

EVIL = [
    "\x1b[2J",
    "\x1b]0;title\x07",
    "\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\",
    "\x1bPq#0\x1b\\",
    "\x9b31m",
    "\x9d0;title\x9c",
    "\x07",
    "\x08\x08",
    "\x7f",
    "\u202etxt.exe",  # right-to-left override
    "\u2066a\u2069",
    "\u200f",
    "\u061c",
    "\u2028",
    "\u200b",
    "\U000e0041",
    "\ufeff",
]
HARMLESS = "naïve 名 עברית ⇒ 👩\u200d💻 ✓"


def is_harmful(char: str) -> bool:
    if char in "\n\t\u200c\u200d":
        return False
    return unicodedata.category(char) in ("Cc", "Cf", "Zl", "Zp")


@pytest.mark.parametrize("evil", EVIL, ids=ascii)
def test_nothing_that_a_terminal_obeys_passes(evil: str) -> None:
    text = f"before {evil} after"
    for made in (plain(text), clean(text), keep_lines(text), shield(text)):
        assert not any(map(is_harmful, made)), ascii(made)
        assert made.startswith("before ")
        assert made.endswith(" after")
    shown: list[bytes] = []
    log = LogShield(shown.append)
    for at in range(len(text.encode())):  # in the smallest pieces
        log(text.encode()[at : at + 1])
    log.end()
    assert not any(map(is_harmful, b"".join(shown).decode()))


@pytest.mark.parametrize("evil", EVIL, ids=ascii)
def test_commands_shield_what_they_forgot_to_make_plain(
    evil: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Output(is_json=False).show(f"a {evil}")
    Output(is_json=False).say(f"a {evil}")
    say(f"a {evil}")
    Output(is_json=True).record({"error": evil})
    out, err = capsys.readouterr()
    assert not any(map(is_harmful, out + err)), ascii(out + err)
    assert json.loads(out.splitlines()[-1]) == {"error": evil}  # programs get what it is


def test_text_in_any_language_stays_as_it_is() -> None:
    for made in (
        plain(HARMLESS),
        clean(HARMLESS),
        shield(HARMLESS),
        keep_lines(HARMLESS),
        shield_json(HARMLESS),
    ):
        assert made == HARMLESS


def test_our_own_colours_pass_and_nothing_beside_them() -> None:
    painted = "\x1b[31mFAILED\x1b[0m"
    assert shield(painted) == painted
    assert shield(f"{painted}\x1b[1A\u202e") == f"{painted}�[1A�"


def test_a_log_keeps_its_lines_and_progress_bars() -> None:
    shown: list[bytes] = []
    log = LogShield(shown.append)
    for piece in (b"1%\r2%\r", b"3%\n\tn\xc3", b"\xa4chste \x1b[3", b"2mgreen\x1b[0m\n", b"cut \xff \x1b[1"):
        log(piece)
    log.end()
    assert b"".join(shown).decode() == "1%\r2%\r3%\n\tnächste green\ncut � [1"


def test_a_sequence_that_never_ends_holds_back_no_more_than_a_few_characters() -> None:
    shown: list[bytes] = []
    log = LogShield(shown.append)
    log(b"\x1b]0;" + b"x" * 5000 + b"\nnext\n")
    assert b"next" in b"".join(shown)
