from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gen_worker.errors import InputError
from gen_worker.trainer.resolve import RefKind, resolve
from gen_worker.trainer.transfer.object_store import matches_glob
from gen_worker.trainer.transfer.policy import Backoff, RetryPolicy, parse_retry_after_s

HEX = "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("ref", "scheme", "location"),
    [
        ("data/a.parquet", "file", "{base}/data/a.parquet"),
        ("/abs/a.parquet", "file", "/abs/a.parquet"),
        ("file:///abs/with%20space", "file", "/abs/with space"),
        ("file://localhost/abs", "file", "/abs"),
        ("file:/abs", "file", "/abs"),
        ("file:rel/a", "file", "{base}/rel/a"),
        ("FILE:///abs", "file", "/abs"),
        ("./a:b", "file", "{base}/a:b"),
        ("https://host/a?x=1#part", "https", "https://host/a?x=1"),
        ("HTTP://host:81/a", "http", "http://host:81/a"),
        ("s3://bucket/deep/key", "s3", "bucket/deep/key"),
        ("gs://bucket/key", "gs", "bucket/key"),
    ],
)
def test_each_scheme_finds_its_place(tmp_path, ref, scheme, location):
    found = resolve(ref, base_dir=tmp_path)
    assert (found.scheme, found.location) == (scheme, location.format(base=tmp_path))
    assert found.kind is RefKind.FILE
    assert found.digest is None


@pytest.mark.parametrize("ref", ["~/model.pt", "file:~/model.pt"])
def test_the_home_folder_is_expanded(tmp_path, monkeypatch, ref):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve(ref, base_dir=Path("/elsewhere")).location == str(tmp_path / "model.pt")


@pytest.mark.parametrize("mark", ["#sha256=", "@sha256:"])
@pytest.mark.parametrize("body", ["model.pt", "https://h/m?x=1", "s3://b/k", "file:///m"])
def test_both_spellings_of_a_digest_are_read(tmp_path, body, mark):
    found = resolve(f"{body}{mark}{HEX.upper()}", base_dir=tmp_path)
    assert found.digest == f"sha256:{HEX}"
    assert "sha256" not in found.location


@pytest.mark.parametrize(
    ("ref", "message"),
    [
        ("", "is empty"),
        ("   ", "is empty"),
        ("ftp://h/x", r"unknown scheme 'ftp'; known are file:, http:, https:, s3:, gs:"),
        ("a\0b", "NUL"),
        ("file:///a%00b", "NUL"),
        ("file://other/abs", "names the host 'other'"),
        ("file:", "has no path"),
        ("https:///x", "names no host"),
        ("https://h:port/x", "not a valid URL"),
        ("http://[::1/x", "not a valid URL"),
        ("s3://bucket", "names no object"),
        ("s3:key", "names no object"),
        ("s3://id:secret@bucket/k", "contains credentials"),
        ("m.pt#sha256=abc", "64 hex digits"),
        (f"m.pt#sha256={HEX}@sha256:{HEX}", "two digests"),
        (f"#sha256={HEX}", "has a digest only"),
        (f"s3://b/*.parquet#sha256={HEX}", "only one file can have one"),
    ],
)
def test_a_ref_that_cannot_be_is_refused_with_the_reason(tmp_path, ref, message):
    with pytest.raises(InputError, match=message) as caught:
        resolve(ref, base_dir=tmp_path)
    assert "secret" not in str(caught.value)


def test_local_folders_and_globs_are_told_apart(tmp_path):
    (tmp_path / "odd[1]").mkdir()
    (tmp_path / "literal*.parquet").touch()
    assert resolve("odd[1]", base_dir=tmp_path).kind is RefKind.FOLDER
    assert resolve("odd[1]/*.parquet", base_dir=tmp_path).kind is RefKind.GLOB
    assert resolve("literal*.parquet", base_dir=tmp_path).kind is RefKind.FILE
    assert resolve("x" * 5000, base_dir=tmp_path).kind is RefKind.FILE
    with pytest.raises(InputError, match="is a folder"):
        resolve(f"odd[1]#sha256={HEX}", base_dir=tmp_path)


def test_brackets_in_the_base_folder_are_no_pattern(tmp_path):
    base = tmp_path / "run[1]"
    base.mkdir()
    assert resolve("a.parquet", base_dir=base).kind is RefKind.FILE
    assert resolve("*.parquet", base_dir=base).location == str(tmp_path / "run[[]1]" / "*.parquet")


def test_object_prefixes_and_globs_are_told_apart(tmp_path):
    assert resolve("s3://b/data/", base_dir=tmp_path).kind is RefKind.FOLDER
    assert resolve("s3://b/data/*.parquet", base_dir=tmp_path).kind is RefKind.GLOB


@pytest.mark.parametrize(
    ("ref", "sibling"),
    [
        ("https://h/run/final.meta.json?sig=s", "https://h/run/a%20b.pt?sig=s"),
        ("s3://b/run/final.meta.json", "b/run/a b.pt"),
    ],
)
def test_a_sibling_is_in_the_same_folder(tmp_path, ref, sibling):
    assert resolve(ref, base_dir=tmp_path).sibling("a b.pt", None).location == sibling


@given(st.text())
def test_any_text_resolves_or_is_refused_as_input(text):
    try:
        found = resolve(text, base_dir=Path("/base"))
    except InputError:
        return
    assert found.location
    assert "/" not in found.name
    assert found.name not in ("", ".", "..")


@given(
    user=st.from_regex(r"[a-z0-9]{6,12}", fullmatch=True),
    query=st.from_regex(r"[a-z0-9]{6,12}", fullmatch=True),
)
def test_what_is_shown_of_a_url_holds_no_credential(user, query):
    found = resolve(f"https://u:PW{user}@host/path?sig=SIG{query}", base_dir=Path("/base"))
    assert f"PW{user}" not in found.display
    assert f"SIG{query}" not in found.display
    assert f"SIG{query}" in found.location


@pytest.mark.parametrize(
    ("pattern", "matching", "other"),
    [
        ("b/*.parquet", "b/x.parquet", "b/sub/x.parquet"),
        ("b/**/*.parquet", "b/p/q/x.parquet", "c/x.parquet"),
        ("b/**/*.parquet", "b/x.parquet", "b/x.csv"),
        ("b/part-?.p", "b/part-1.p", "b/part-10.p"),
        ("b/[ab]+.p", "b/a+.p", "b/aa.p"),
        ("b/[!a].p", "b/c.p", "b/a.p"),
        ("b/**", "b/p/q", "c/p"),
    ],
)
def test_globs_over_keys_stay_within_their_folder(pattern, matching, other):
    assert matches_glob(pattern.split("/"), matching.split("/"))
    assert not matches_glob(pattern.split("/"), other.split("/"))


@given(failures=st.integers(1, 2000), draw=st.floats(0, 1, exclude_max=True))
def test_a_backoff_is_never_negative_and_never_above_its_cap(failures, draw):
    assert 0 <= RetryPolicy(base_s=0.5, cap_s=30).jittered_s(failures, draw) <= 30


def test_waits_double_until_the_cap_and_attempts_are_bounded():
    policy = RetryPolicy(max_attempts=6, base_s=1, cap_s=5, max_elapsed_s=1000)
    backoff = Backoff(policy, draw=lambda: 1.0, clock=lambda: 0.0)
    assert [backoff.next_delay_s() for _ in range(6)] == [1, 2, 4, 5, 5, None]


def test_a_wait_that_would_end_after_the_time_is_not_begun():
    clock = iter([0.0, 1.0, 2.0])
    policy = RetryPolicy(max_attempts=100, base_s=1, cap_s=1, max_elapsed_s=10)
    backoff = Backoff(policy, draw=lambda: 0.0, clock=lambda: next(clock))
    assert backoff.next_delay_s(retry_after_s=5) == 5
    assert backoff.next_delay_s(retry_after_s=9) is None


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        ("7", 7.0),
        ("Thu, 01 Jan 1970 00:01:40 GMT", 90.0),
        ("Thu, 01 Jan 1970 00:00:00 GMT", 0.0),
        ("soon", None),
        ("²", None),
        ("9" * 400, None),
    ],
)
def test_retry_after_is_read_as_seconds_or_as_a_date(value, expected):
    assert parse_retry_after_s(value, now=10.0) == expected
