"""A table stays a table whatever script its words are in."""

import pytest

from trn.client.screen.cells import cell_width, pad, shorten, wrap


@pytest.mark.parametrize(
    ("text", "width"),
    [
        ("", 0),
        ("loss", 4),
        ("損失", 4),
        ("val/損失", 8),
        ("e\u0301", 1),
        ("ﾊﾝ", 2),
        ("Ａ", 2),
        ("é", 1),
    ],
)
def test_text_is_as_wide_as_a_terminal_shows_it(text: str, width: int) -> None:
    from rich.cells import cell_len

    assert cell_width(text) == width == cell_len(text)


@pytest.mark.parametrize("text", ["損失の平均値", "a損b失c", "plain words", "e\u0301e\u0301e\u0301"])
def test_what_is_cut_and_padded_fills_exactly_its_column(text: str) -> None:
    for width in range(1, 14):
        cut = shorten(text, width)
        assert cell_width(cut) <= width
        assert cut == text or cut.endswith("…")
        assert cell_width(pad(cut, width)) == width
        assert pad(cut, width, to_the_right=True).endswith(cut)
    assert shorten(text, 40) == text
    assert pad(text, 1) == text


def test_text_is_cut_between_words_and_not_within_what_is_to_be_copied() -> None:
    assert wrap("  one  two three", 10, indent=4) == ["  one  two", "    three"]
    assert wrap("now `trn logs r` tells", 14) == ["now", "`trn logs r`", "tells"]
    assert wrap("an open ` is a word", 9) == ["an open `", "is a word"]
    assert wrap("損失の 平均値", 8) == ["損失の", "平均値"]
    assert wrap("log  /a/very/long/path and more", 10, indent=5) == [
        "log  /a/very/long/path",
        "     and",
        "     more",
    ]
    assert wrap("", 10) == [""]
