# ruff: noqa: F811  (fixtures are imported by name)

import gzip
import hashlib
import json
import signal
import subprocess
import sys
import threading
import traceback

import pytest
from object_servers import Reply, closed_port, http_server, s3_endpoint, s3_server  # noqa: F401

from gen_worker.contract.redaction import SecretRedactor
from gen_worker.errors import AuthError, InputError, TrainingCanceled
from gen_worker.trainer.authz import authorize_start
from gen_worker.trainer.inputs import fetch, materialize_inputs
from gen_worker.trainer.transfer.input_cache import InputCache
from gen_worker.trainer.transfer.policy import ObjectStoreOptions, RetryPolicy, TransferOptions

TOKEN = "opaque-capability-0123456789abcdef"
DATA = bytes(range(256)) * 20_000  # about 5 MB


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def bearer():
    return authorize_start(orchestrated=True, token=TOKEN, public_key_pem=None, run_id="run-1", owner=None)


@pytest.fixture
def cache(tmp_path) -> InputCache:
    return InputCache(tmp_path / "cache", sync_every_bytes=1 << 20)


@pytest.fixture
def naps() -> list[float]:
    return []


@pytest.fixture
def options(naps) -> TransferOptions:
    return TransferOptions(
        retry=RetryPolicy(max_attempts=4, base_s=1, cap_s=8, max_elapsed_s=100),
        sleep=naps.append,
        draw=lambda: 1.0,
    )


def s3_options(server, **changes) -> TransferOptions:
    return TransferOptions(object_store=ObjectStoreOptions(s3_endpoint=server.endpoint), **changes)


# Local refs


def test_a_local_file_is_used_in_place(tmp_path, cache):
    (tmp_path / "a.bin").write_bytes(b"abc")
    found = fetch("a.bin", cache=cache, base_dir=tmp_path)
    assert (found.path, found.size_bytes, found.digest, found.from_cache) == (
        tmp_path / "a.bin",
        3,
        None,
        False,
    )
    assert not cache.root.exists()


def test_a_local_file_is_held_to_its_digest(tmp_path, cache):
    (tmp_path / "a.bin").write_bytes(b"abc")
    right = fetch(f"a.bin#sha256={digest_of(b'abc')}", cache=cache, base_dir=tmp_path)
    assert right.digest == f"sha256:{digest_of(b'abc')}"
    with pytest.raises(InputError, match="has the digest"):
        fetch(f"a.bin#sha256={digest_of(b'other')}", cache=cache, base_dir=tmp_path)


def test_a_missing_local_file_is_named(tmp_path, cache):
    with pytest.raises(InputError, match=r"nowhere\.bin does not exist"):
        fetch("nowhere.bin", cache=cache, base_dir=tmp_path)


# HTTP


def test_a_download_lands_under_its_name_with_its_digest(http_server, cache, options):
    http_server.files["/models/w.safetensors"] = DATA
    seen: list[tuple[str, int, int | None]] = []
    found = fetch(
        f"{http_server.url}/models/w.safetensors?sig=hidden",
        cache=cache,
        options=options,
        on_progress=lambda *args: seen.append(args),
    )
    assert found.path.name == "w.safetensors"
    assert found.path.read_bytes() == DATA
    assert found.digest == f"sha256:{digest_of(DATA)}"
    assert not found.from_cache
    assert seen[-1][1:] == (len(DATA), len(DATA))
    assert "hidden" not in seen[-1][0]
    digits = digest_of(DATA)
    blob = cache.root / "sha256" / digits[:2] / digits
    assert blob.read_bytes() == DATA
    assert blob.stat().st_mode & 0o222 == 0


def test_a_second_fetch_is_answered_from_the_cache_without_a_body(http_server, cache, options):
    http_server.files["/a"] = DATA
    fetch(f"{http_server.url}/a", cache=cache, options=options)
    again = fetch(f"{http_server.url}/a", cache=cache, options=options)
    assert again.from_cache
    assert again.path.read_bytes() == DATA
    assert http_server.seen("/a")[1].headers["if-none-match"]


def test_a_known_digest_needs_no_server_at_all(http_server, cache, options):
    http_server.files["/a"] = DATA
    fetch(f"{http_server.url}/a", cache=cache, options=options)
    found = fetch(
        f"http://127.0.0.1:{closed_port()}/mirror#sha256={digest_of(DATA)}", cache=cache, options=options
    )
    assert found.from_cache
    assert found.path.read_bytes() == DATA


def test_a_file_that_changed_on_the_server_is_fetched_again(http_server, cache, options):
    http_server.files["/a"] = b"old"
    fetch(f"{http_server.url}/a", cache=cache, options=options)
    http_server.files["/a"] = b"new!"
    found = fetch(f"{http_server.url}/a", cache=cache, options=options)
    assert found.path.read_bytes() == b"new!"
    assert not found.from_cache


def test_a_cut_connection_is_continued_not_restarted(http_server, cache, options, naps):
    http_server.files["/a"] = DATA
    http_server.script["/a"].extend([Reply(cut_after_bytes=2_000_000), Reply(cut_after_bytes=1_500_000)])
    found = fetch(f"{http_server.url}/a", cache=cache, options=options)
    assert found.path.read_bytes() == DATA
    first, second, third = http_server.seen("/a")
    assert "range" not in first.headers
    starts = [int(request.headers["range"].removeprefix("bytes=").rstrip("-")) for request in (second, third)]
    assert 0 < starts[0] <= 2_000_000
    assert starts[0] < starts[1] <= 3_500_000
    assert second.headers["if-range"].startswith('"')


def test_a_file_that_changed_between_two_attempts_is_never_mixed(http_server, cache, options):
    http_server.files["/a"] = DATA

    def replace(_seconds: float) -> None:
        http_server.files["/a"] = DATA[::-1]

    http_server.script["/a"].append(Reply(cut_after_bytes=2_000_000))
    changing = TransferOptions(retry=options.retry, sleep=replace, draw=lambda: 1.0)
    found = fetch(f"{http_server.url}/a", cache=cache, options=changing)
    assert found.path.read_bytes() == DATA[::-1]


def test_without_a_validator_nothing_is_continued_unless_a_digest_will_tell(http_server, cache, options):
    http_server.with_etag = False
    http_server.files["/a"] = DATA
    http_server.script["/a"].append(Reply(cut_after_bytes=2_000_000))
    assert fetch(f"{http_server.url}/a", cache=cache, options=options).path.read_bytes() == DATA
    assert "range" not in http_server.seen("/a")[1].headers

    http_server.files["/b"] = DATA[::-1]
    http_server.script["/b"].append(Reply(cut_after_bytes=2_000_000))
    ref = f"{http_server.url}/b#sha256={digest_of(DATA[::-1])}"
    assert fetch(ref, cache=cache, options=options).path.read_bytes() == DATA[::-1]
    assert "range" in http_server.seen("/b")[1].headers


def test_a_wrong_beginning_is_thrown_away_when_the_digest_does_not_fit(http_server, cache, options):
    http_server.with_etag = False
    http_server.files["/a"] = bytes(len(DATA))

    def replace(_seconds: float) -> None:
        http_server.files["/a"] = DATA

    http_server.script["/a"].append(Reply(cut_after_bytes=2_000_000))
    changing = TransferOptions(retry=options.retry, sleep=replace, draw=lambda: 1.0)
    found = fetch(f"{http_server.url}/a#sha256={digest_of(DATA)}", cache=cache, options=changing)
    assert found.path.read_bytes() == DATA
    assert "range" not in http_server.seen("/a")[-1].headers


def test_a_server_without_ranges_starts_over(http_server, cache, options):
    http_server.with_ranges = False
    http_server.files["/a"] = DATA
    http_server.script["/a"].append(Reply(cut_after_bytes=3_000_000))
    assert fetch(f"{http_server.url}/a", cache=cache, options=options).path.read_bytes() == DATA


def test_a_file_that_shrank_is_started_over(http_server, cache, options):
    http_server.files["/a"] = DATA
    small = DATA[:1_000_000]

    def shrink(_seconds: float) -> None:
        http_server.files["/a"] = small

    http_server.script["/a"].append(Reply(cut_after_bytes=3_000_000))
    changing = TransferOptions(retry=options.retry, sleep=shrink, draw=lambda: 1.0)
    ref = f"{http_server.url}/a#sha256={digest_of(small)}"
    assert fetch(ref, cache=cache, options=changing).path.read_bytes() == small


def test_many_cuts_with_progress_never_use_up_the_attempts(http_server, cache, options):
    http_server.files["/a"] = DATA * 4
    http_server.script["/a"].extend(Reply(cut_after_bytes=2_500_000) for _ in range(7))
    assert fetch(f"{http_server.url}/a", cache=cache, options=options).path.read_bytes() == DATA * 4


def test_errors_of_the_server_are_tried_again_with_growing_waits(http_server, cache, options, naps):
    http_server.files["/a"] = b"abc"
    http_server.script["/a"].extend([Reply(status=500), Reply(drop=True), Reply(status=429)])
    assert fetch(f"{http_server.url}/a", cache=cache, options=options).path.read_bytes() == b"abc"
    assert naps == [1, 2, 4]


def test_retry_after_is_honoured_and_bounded(http_server, cache, options, naps):
    http_server.files["/a"] = b"abc"
    http_server.script["/a"].append(Reply(status=503, headers={"Retry-After": "17"}))
    fetch(f"{http_server.url}/a", cache=cache, options=options)
    assert naps == [17]
    http_server.script["/b"].append(Reply(status=503, headers={"Retry-After": "86400"}))
    with pytest.raises(InputError, match="answered 503"):
        fetch(f"{http_server.url}/b", cache=cache, options=options)
    assert naps == [17]


@pytest.mark.parametrize(
    ("status", "error"), [(400, InputError), (404, InputError), (401, AuthError), (403, AuthError)]
)
def test_a_refusal_is_not_tried_again(http_server, cache, options, naps, status, error):
    http_server.always["/a"] = Reply(status=status)
    with pytest.raises(error, match=f"answered {status}"):
        fetch(f"{http_server.url}/a?sig=hidden", cache=cache, options=options)
    assert len(http_server.seen("/a")) == 1
    assert naps == []


def test_a_dead_server_ends_in_an_error_that_says_what_to_do(cache, options, naps):
    with pytest.raises(InputError, match=r"after 4 attempts.*ConnectError.*start the run again"):
        fetch(f"http://127.0.0.1:{closed_port()}/a", cache=cache, options=options)
    assert naps == [1, 2, 4]


def test_a_server_that_stalls_is_given_up(http_server, cache, naps):
    hold = threading.Event()
    http_server.always["/a"] = Reply(hold=hold)
    impatient = TransferOptions(
        retry=RetryPolicy(max_attempts=2), stall_timeout_s=0.1, sleep=naps.append, draw=lambda: 0.0
    )
    with pytest.raises(InputError, match="ReadTimeout"):
        fetch(f"{http_server.url}/a", cache=cache, options=impatient)
    hold.set()


def test_a_wrong_digest_is_refused_and_leaves_nothing_in_the_cache(http_server, cache, options):
    http_server.files["/a"] = b"abc"
    with pytest.raises(InputError, match="expected sha256:"):
        fetch(f"{http_server.url}/a#sha256={digest_of(b'abd')}", cache=cache, options=options)
    assert not list((cache.root).glob("sha256/*/*"))


def test_a_compressed_answer_is_decoded(http_server, cache, options):
    http_server.always["/a"] = Reply(
        status=200, headers={"Content-Encoding": "gzip"}, body=gzip.compress(DATA)
    )
    assert fetch(f"{http_server.url}/a", cache=cache, options=options).path.read_bytes() == DATA


def test_an_empty_file_is_a_file(http_server, cache, options):
    http_server.files["/a"] = b""
    assert fetch(f"{http_server.url}/a", cache=cache, options=options).size_bytes == 0


# The token


def test_the_token_goes_to_the_origin_of_the_ref_only(http_server, cache, options):
    other = type(http_server)()
    other.files["/b"] = b"abc"
    http_server.always["/a"] = Reply(status=302, headers={"Location": f"{other.url}/b"})
    fetch(f"{http_server.url}/a", cache=cache, auth=bearer(), options=options)
    assert http_server.seen("/a")[0].headers["authorization"] == f"Bearer {TOKEN}"
    assert "authorization" not in other.seen("/b")[0].headers
    other.close()


def test_a_redirect_at_home_keeps_the_token(http_server, cache, options):
    http_server.files["/b"] = b"abc"
    http_server.always["/a"] = Reply(status=307, headers={"Location": "/b"})
    fetch(f"{http_server.url}/a", cache=cache, auth=bearer(), options=options)
    assert http_server.seen("/b")[0].headers["authorization"] == f"Bearer {TOKEN}"


def test_redirects_in_a_circle_and_out_of_the_web_end(http_server, cache, options):
    http_server.always["/a"] = Reply(status=302, headers={"Location": "/a"})
    with pytest.raises(InputError, match="more than 10 redirects"):
        fetch(f"{http_server.url}/a", cache=cache, options=options)
    http_server.always["/b"] = Reply(status=302, headers={"Location": "file:///etc/passwd"})
    with pytest.raises(InputError, match="not allowed"):
        fetch(f"{http_server.url}/b", cache=cache, options=options)


def test_hosts_that_are_not_named_never_see_the_token(http_server, cache):
    http_server.files["/a"] = b"abc"
    careful = TransferOptions(token_hosts=frozenset({"inputs.example"}))
    fetch(f"{http_server.url}/a", cache=cache, auth=bearer(), options=careful)
    assert "authorization" not in http_server.seen("/a")[0].headers


def test_a_refused_token_is_in_no_message_log_or_traceback(http_server, cache, options, caplog):
    caplog.set_level("DEBUG")
    caplog.handler.addFilter(redactor := SecretRedactor([TOKEN]))  # as the runtime does with its handlers
    http_server.always["/a"] = Reply(status=401, body=TOKEN.encode())
    with pytest.raises(AuthError, match="token was rejected") as caught:
        fetch(f"{http_server.url}/a?key={TOKEN}", cache=cache, auth=bearer(), options=options)
    http_server.always["/b"] = Reply(status=302, headers={"Location": f"http://[{TOKEN}/"})
    with pytest.raises(InputError) as misled:
        fetch(f"{http_server.url}/b", cache=cache, auth=bearer(), options=options)
    with pytest.raises(InputError) as unreachable:
        fetch(
            f"http://127.0.0.1:{closed_port()}/{'a'}?t={TOKEN}", cache=cache, auth=bearer(), options=options
        )
    for error in (caught.value, misled.value, unreachable.value):
        assert TOKEN not in "".join(traceback.format_exception(error))
        chain: BaseException | None = error
        while chain is not None:
            assert TOKEN not in repr(chain)
            chain = chain.__cause__ or chain.__context__
    caplog.handler.removeFilter(redactor)
    assert "httpcore" in caplog.text
    assert TOKEN not in caplog.text
    index = "".join(path.read_text() for path in cache.root.glob("index/*"))
    assert TOKEN not in index


def test_the_query_of_a_url_is_in_no_log_even_without_a_filter(http_server, cache, options, caplog):
    caplog.set_level("INFO")
    http_server.files["/a"] = b"abc"
    fetch(f"{http_server.url}/a?sig=hidden", cache=cache, options=options)
    assert "/a?***" in caplog.text
    assert "hidden" not in caplog.text


# The cache


def test_a_damaged_blob_is_noticed_and_fetched_again(http_server, cache, options):
    http_server.files["/a"] = DATA
    ref = f"{http_server.url}/a"
    with_digest = f"{ref}#sha256={digest_of(DATA)}"
    blob = fetch(ref, cache=cache, options=options).path.resolve()

    blob.chmod(0o644)
    blob.write_bytes(DATA[:-1])  # noticed by its size
    assert not fetch(ref, cache=cache, options=options).from_cache
    assert blob.read_bytes() == DATA

    blob.chmod(0o644)
    blob.write_bytes(DATA[:-1] + b"x")  # noticed by its hash
    assert not fetch(with_digest, cache=cache, options=options).from_cache
    assert blob.read_bytes() == DATA


def test_two_workers_download_a_file_once(http_server, cache):
    hold = threading.Event()
    http_server.files["/a"] = DATA
    http_server.script["/a"].append(Reply(hold=hold))
    waiting = threading.Event()
    ref = f"{http_server.url}/a#sha256={digest_of(DATA)}"
    results = []
    first = threading.Thread(target=lambda: results.append(fetch(ref, cache=cache)))
    first.start()
    http_server.wait_for_requests("/a", 1)
    second = threading.Thread(
        target=lambda: results.append(fetch(ref, cache=cache, on_progress=lambda *_: waiting.set()))
    )
    second.start()
    assert waiting.wait(30)
    hold.set()
    first.join(30)
    second.join(30)
    assert sorted(result.from_cache for result in results) == [False, True]
    assert len(http_server.seen("/a")) == 1


def test_a_worker_that_waits_for_another_can_be_cancelled(http_server, cache):
    hold = threading.Event()
    http_server.files["/a"] = b"abc"
    http_server.script["/a"].append(Reply(hold=hold))
    first = threading.Thread(target=lambda: fetch(f"{http_server.url}/a", cache=cache))
    first.start()
    http_server.wait_for_requests("/a", 1)

    def cancel(*_: object) -> None:
        raise TrainingCanceled("asked to stop")

    with pytest.raises(TrainingCanceled):
        fetch(f"{http_server.url}/a", cache=cache, on_progress=cancel)
    hold.set()
    first.join(30)


def test_a_cancelled_download_is_continued_by_the_next_one(http_server, tmp_path, options):
    cache = InputCache(tmp_path / "cache", sync_every_bytes=1 << 40)  # so only the cancel syncs
    http_server.files["/a"] = DATA

    def cancel(_ref: str, done: int, _total: int | None) -> None:
        if done >= 2_000_000:
            raise TrainingCanceled("asked to stop")

    with pytest.raises(TrainingCanceled):
        fetch(f"{http_server.url}/a", cache=cache, options=options, on_progress=cancel)
    assert fetch(f"{http_server.url}/a", cache=cache, options=options).path.read_bytes() == DATA
    assert int(http_server.seen("/a")[1].headers["range"].removeprefix("bytes=").rstrip("-")) >= 2_000_000


DOWNLOADER = """
import sys
from pathlib import Path
from gen_worker.contract import failpoints
from gen_worker.trainer.transfer.input_cache import InputCache
from gen_worker.trainer.inputs import fetch
failpoints.arm(sys.argv[3])
fetch(sys.argv[1], cache=InputCache(Path(sys.argv[2]), sync_every_bytes=1 << 20))
"""


@pytest.mark.parametrize("place", ["inputs.partial_synced", "inputs.blob_synced", "inputs.blob_renamed"])
def test_what_a_killed_downloader_left_is_taken_up(http_server, cache, options, place):
    http_server.files["/a"] = DATA
    ref = f"{http_server.url}/a#sha256={digest_of(DATA)}"
    killed = subprocess.run(
        [sys.executable, "-c", DOWNLOADER, ref, str(cache.root), f"{place}=kill"], check=False, timeout=60
    )
    assert killed.returncode == -signal.SIGKILL
    found = fetch(ref, cache=cache, options=options)
    assert found.path.read_bytes() == DATA
    again = http_server.seen("/a")[1:]
    if place == "inputs.blob_renamed":
        assert again == []
    else:
        assert int(again[0].headers["range"].removeprefix("bytes=").rstrip("-")) >= 1 << 20


def test_bytes_that_were_never_synced_are_not_trusted(http_server, cache, options):
    http_server.files["/a"] = DATA
    http_server.script["/a"].extend(Reply(cut_after_bytes=1_200_000) for _ in range(1))
    http_server.script["/a"].extend(Reply(status=500) for _ in range(3))
    with pytest.raises(InputError):
        fetch(f"{http_server.url}/a", cache=cache, options=options)
    (partial,) = [path for path in cache.root.glob("partial/*") if path.suffix != ".json"]
    with partial.open("ab") as stream:
        stream.write(bytes(500_000))  # as after a power cut: length without content
    assert fetch(f"{http_server.url}/a", cache=cache, options=options).path.read_bytes() == DATA


def test_a_full_disk_is_an_input_error_that_names_the_place(http_server, tmp_path, options):
    http_server.files["/a"] = b"abc"
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(InputError, match="could not be read or stored at"):
        fetch(f"{http_server.url}/a", cache=InputCache(tmp_path / "cache"), options=options)


# Object stores


def test_an_object_is_fetched_once_and_then_known_by_its_validator(s3_server, cache):
    s3_server.client.put_object(Bucket=s3_server.bucket, Key="w.bin", Body=DATA)
    ref = f"s3://{s3_server.bucket}/w.bin"
    first = fetch(ref, cache=cache, options=s3_options(s3_server))
    second = fetch(ref, cache=cache, options=s3_options(s3_server))
    assert first.path.read_bytes() == DATA
    assert (first.from_cache, second.from_cache) == (False, True)
    s3_server.client.put_object(Bucket=s3_server.bucket, Key="w.bin", Body=DATA[::-1])
    third = fetch(ref, cache=cache, options=s3_options(s3_server))
    assert third.path.read_bytes() == DATA[::-1]


def test_an_object_download_is_continued_but_a_replaced_object_is_not_mixed(s3_server, cache):
    ref = f"s3://{s3_server.bucket}/w.bin"
    large = DATA * 4

    def cancel(_ref: str, done: int, _total: int | None) -> None:
        if done:
            raise TrainingCanceled("asked to stop")

    def put(body: bytes) -> None:
        s3_server.client.put_object(Bucket=s3_server.bucket, Key="w.bin", Body=body)

    def fetch_all() -> list[int]:
        progress: list[int] = []
        found = fetch(
            ref,
            cache=cache,
            options=s3_options(s3_server),
            on_progress=lambda _ref, done, _total: progress.append(done),
        )
        assert found.path.read_bytes() == current
        return progress

    for replacement in (None, large[::-1]):
        put(current := large)
        with pytest.raises(TrainingCanceled):
            fetch(ref, cache=cache, options=s3_options(s3_server), on_progress=cancel)
        if replacement is not None:
            put(current := replacement)
        assert fetch_all()[0] == (0 if replacement else 8 << 20)
        large += b"+"  # another object, so that the next round starts from nothing


def test_an_object_replaced_while_it_is_read_is_read_again(s3_server, cache):
    body = DATA * 4
    s3_server.client.put_object(Bucket=s3_server.bucket, Key="w.bin", Body=body)
    replaced: list[int] = []

    def replace_once(_ref: str, done: int, _total: int | None) -> None:
        if done and not replaced:
            replaced.append(done)
            s3_server.client.put_object(Bucket=s3_server.bucket, Key="w.bin", Body=body[::-1])

    found = fetch(
        f"s3://{s3_server.bucket}/w.bin",
        cache=cache,
        options=s3_options(s3_server, retry=RetryPolicy(base_s=0.0)),
        on_progress=replace_once,
    )
    assert replaced
    assert found.path.read_bytes() == body[::-1]


def test_a_missing_object_and_a_dead_store_are_input_errors(s3_server, cache, options):
    with pytest.raises(InputError, match="it does not exist"):
        fetch(f"s3://{s3_server.bucket}/none", cache=cache, options=s3_options(s3_server))
    dead = TransferOptions(
        retry=RetryPolicy(max_attempts=2, base_s=0),
        object_store=ObjectStoreOptions(s3_endpoint=f"http://127.0.0.1:{closed_port()}"),
    )
    with pytest.raises(InputError, match="after 2 attempts"):
        fetch(f"s3://{s3_server.bucket}/none", cache=cache, options=dead)


# Whole jobs


def materialize(cache, base_dir, options=None, **refs):
    wanted = {"base_model_ref": None, "dataset_parquet_refs": [], "resume_checkpoint_ref": None} | refs
    return materialize_inputs(cache=cache, base_dir=base_dir, options=options, **wanted)


def test_local_datasets_expand_in_order(tmp_path, cache):
    for name in (
        "d/b.parquet",
        "d/sub/a.parquet",
        "d/_tmp/x.parquet",
        "d/.hidden.parquet",
        "d/readme.txt",
        "e/1.pq",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    found = materialize(cache, tmp_path, dataset_parquet_refs=["d", "e/*", "d/b.parquet"])
    assert [path.relative_to(tmp_path).as_posix() for path in found.parquet_paths] == [
        "d/b.parquet",
        "d/sub/a.parquet",
        "e/1.pq",
        "d/b.parquet",
    ]
    with pytest.raises(InputError, match="no file that matches"):
        materialize(cache, tmp_path, dataset_parquet_refs=["d/*.csv"])


def test_every_ref_is_read_before_the_first_is_fetched(http_server, tmp_path, cache):
    http_server.files["/a"] = b"abc"
    with pytest.raises(InputError, match="unknown scheme"):
        materialize(
            cache, tmp_path, base_model_ref=f"{http_server.url}/a", dataset_parquet_refs=["ftp://h/x"]
        )
    assert http_server.seen("/a") == []


def test_a_store_gives_globs_prefixes_and_model_folders(s3_server, tmp_path, cache):
    for key in (
        "d/b.parquet",
        "d/a.parquet",
        "d/sub/c.parquet",
        "d/_tmp/x.parquet",
        "m/config.json",
        "m/sub/w.bin",
    ):
        s3_server.client.put_object(Bucket=s3_server.bucket, Key=key, Body=key.encode())
    base = f"s3://{s3_server.bucket}"
    found = materialize(
        cache,
        tmp_path,
        s3_options(s3_server),
        base_model_ref=f"{base}/m/",
        dataset_parquet_refs=[f"{base}/d/*.parquet", f"{base}/d/"],
    )
    assert [path.read_text() for path in found.parquet_paths] == [
        "d/a.parquet",
        "d/b.parquet",
        "d/a.parquet",
        "d/b.parquet",
        "d/sub/c.parquet",
    ]
    assert all(path.suffix == ".parquet" for path in found.parquet_paths)
    assert (found.base_model_path / "sub" / "w.bin").read_text() == "m/sub/w.bin"
    assert (found.base_model_path / "config.json").read_text() == "m/config.json"
    with pytest.raises(InputError, match="no parquet file below it"):
        materialize(cache, tmp_path, s3_options(s3_server), dataset_parquet_refs=[f"{base}/none/"])


def put_checkpoint(server, **changes) -> None:
    server.files["/r/step-00000010.pt"] = DATA
    entry = {"name": "step-00000010.pt", "size_bytes": len(DATA), "hash": f"sha256:{digest_of(DATA)}"}
    fields = {"run_id": "r", "attempt": 1, "step": 10, "epoch": 0, "final": False}
    meta = {"schema_version": "trainer_checkpoint.v1", **fields, "files": [entry | changes]}
    server.files["/r/step-00000010.meta.json"] = json.dumps(meta).encode()


@pytest.mark.parametrize("name", ["step-00000010.meta.json", "step-00000010.pt"])
def test_a_checkpoint_comes_with_its_files_in_one_folder(http_server, tmp_path, cache, name):
    put_checkpoint(http_server)
    found = materialize(
        cache, tmp_path, resume_checkpoint_ref=f"{http_server.url}/r/{name}"
    ).resume_checkpoint_path
    assert found.name == name
    assert (found.parent / "step-00000010.pt").read_bytes() == DATA
    assert json.loads((found.parent / "step-00000010.meta.json").read_text())["files"]
    assert sorted(path.name for path in found.parent.iterdir()) == [
        "step-00000010.meta.json",
        "step-00000010.pt",
    ]


@pytest.mark.parametrize(
    "name", ["../x.pt", "/etc/passwd", "a/../../x", "", ".", "a//b", "a\\b", "./x", "x\ny", "a/"]
)
def test_a_meta_file_cannot_reach_out_of_its_folder(http_server, tmp_path, cache, name):
    put_checkpoint(http_server, name=name)
    with pytest.raises(InputError, match="folder"):
        materialize(cache, tmp_path, resume_checkpoint_ref=f"{http_server.url}/r/step-00000010.meta.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hash": "sha256:" + "0" * 64}, "expected sha256:0000"),
        ({"size_bytes": 1}, "has 5120000 bytes, expected at most 1"),
        ({"size_bytes": 1, "hash": "crc:1"}, "has size 1 and hash 'crc:1'"),
        ({"size_bytes": "1"}, r"Expected `int`, got `str` - at `\$.files\[0\].size_bytes`"),
        ({"size_bytes": 6_000_000}, "its meta file says 6000000"),
    ],
)
def test_a_checkpoint_that_does_not_match_its_meta_is_refused(http_server, tmp_path, cache, changes, message):
    put_checkpoint(http_server, **changes)
    with pytest.raises(InputError, match=message):
        materialize(cache, tmp_path, resume_checkpoint_ref=f"{http_server.url}/r/step-00000010.meta.json")


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"files": 3}', b"[" * 100_000])
def test_a_meta_file_that_is_none_is_refused(http_server, tmp_path, cache, body):
    http_server.files["/r/final.meta.json"] = body
    with pytest.raises(InputError, match="meta file"):
        materialize(cache, tmp_path, resume_checkpoint_ref=f"{http_server.url}/r/final.meta.json")


def test_a_plain_state_document_is_a_resume_source(http_server, tmp_path, cache):
    http_server.files["/state.json"] = b'{"state": {}}'
    found = materialize(cache, tmp_path, resume_checkpoint_ref=f"{http_server.url}/state.json")
    assert found.resume_checkpoint_path.read_bytes() == b'{"state": {}}'


def test_the_modules_load_nothing_heavy():
    code = (
        "import sys, gen_worker.trainer.inputs, gen_worker.trainer.uploader, gen_worker.trainer.authz;"
        "print([m for m in ('httpx', 'pyarrow', 'jwt', 'cryptography', 'torch', 'numpy') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert run.stdout.strip() == "[]"
