"""The files of a server's feedback: frames, answered requests, accepted rows, parquet."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gen_worker.contract.job.spec import FeedbackSpec
from gen_worker.errors import StartupError
from gen_worker.inference.feedback import requests, store
from gen_worker.inference.feedback.journal import JournalFile, list_numbers
from gen_worker.inference.feedback.metric import FeedbackMetric, MetricError
from gen_worker.inference.feedback.requests import AnsweredRecord, RequestJournal
from gen_worker.inference.feedback.rules import (
    MAX_ERRORS,
    FeedbackDue,
    find_reason,
    newest_errors,
    read_due,
    write_due,
)
from gen_worker.inference.feedback.store import AcceptedHead, FeedbackStore, row_key
from gen_worker.inference.messages import Part

SCHEMA = pa.schema([("x", pa.float32()), ("y", pa.int64())])


class TestFrames:
    @given(bodies=st.lists(st.binary(min_size=1, max_size=50), max_size=5), cut=st.integers(0, 400))
    def test_a_file_that_is_cut_anywhere_has_the_whole_frames_before_the_cut(
        self, bodies: list[bytes], cut: int, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        path = tmp_path_factory.mktemp("frames") / "00000001.log"
        file = JournalFile(path)
        ends = []
        for body in bodies:
            file.append([body[:3], body[3:]])
            ends.append(file.size)
        file.close()
        path.write_bytes(path.read_bytes()[:cut])
        file = JournalFile(path)
        file.cut_tail()
        whole = [body for body, end in zip(bodies, ends, strict=True) if end <= cut]
        assert [bytes(body) for _, body in file.frames()] == whole
        file.append([b"next"])
        assert [bytes(body) for _, body in file.frames()] == [*whole, b"next"]
        file.close()

    def test_a_changed_byte_is_no_frame(self, tmp_path: Path) -> None:
        file = JournalFile(tmp_path / "00000001.log")
        offset = file.append([b"rows"])
        file.close()
        content = bytearray(file.path.read_bytes())
        content[-1] ^= 1
        file.path.write_bytes(content)
        file = JournalFile(file.path)
        assert file.read(offset) is None
        file.close()

    def test_a_damaged_frame_costs_no_other_and_a_copy_of_it_is_kept(self, tmp_path: Path) -> None:
        file = JournalFile(tmp_path / "00000001.log")
        offsets = [file.append([body]) for body in (b"one", b"two", b"three")]
        file.close()
        damage(file.path, offsets[1] + 8)
        content = file.path.read_bytes()
        for _ in range(2):
            file = JournalFile(file.path)
            file.cut_tail(keeps=True)
            assert [bytes(body) for _, body in file.frames()] == [b"one", b"three"]
            file.close()
        (kept,) = tmp_path.glob("*.damaged*")
        assert kept.read_bytes() == content

    def test_zeros_that_a_power_cut_leaves_are_no_frames(self, tmp_path: Path) -> None:
        file = JournalFile(tmp_path / "00000001.log")
        file.append([b"rows"])
        file.close()
        with file.path.open("ab") as appended:
            appended.write(bytes(4096))
        file = JournalFile(file.path)
        file.cut_tail()
        assert [bytes(body) for _, body in file.frames()] == [b"rows"]
        file.close()

    def test_a_frame_may_have_more_pieces_than_one_call_of_the_system_takes(self, tmp_path: Path) -> None:
        file = JournalFile(tmp_path / "00000001.log")
        pieces = [b"%d" % number for number in range(3000)]
        file.append(pieces)
        assert [bytes(body) for _, body in file.frames()] == [b"".join(pieces)]
        file.close()

    def test_a_length_that_the_disk_changed_takes_no_memory(self, tmp_path: Path) -> None:
        file = JournalFile(tmp_path / "00000001.log")
        offset = file.append([b"rows"])
        file.close()
        damage(file.path, 3, 0x80)  # two gigabytes
        file = JournalFile(file.path)
        assert file.read(offset) is None
        file.close()


def damage(path: Path, place: int, bits: int = 1) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= bits
    path.write_bytes(content)


class TestRequests:
    def open(self, folder: Path, *, max_bytes: int = 1 << 30) -> RequestJournal:
        with ThreadPoolExecutor(1) as executor:
            return RequestJournal(folder, max_bytes=max_bytes, executor=executor)

    def record(self, request_id: str, size: int = 3) -> tuple[AnsweredRecord, list[bytes]]:
        part = Part(num_rows=1, encoding="ipc", size_bytes=size)
        record = AnsweredRecord(
            request_id=request_id, answered_ms=1, weights_hash="sha256:0", rows=part, answers=(part,)
        )
        return record, [b"r" * size, b"a" * size]

    def test_a_request_is_found_by_its_id_also_by_the_next_attempt(self, tmp_path: Path) -> None:
        journal = self.open(tmp_path)
        for name in ("one", "two", "one"):
            journal.append(*self.record(name))
        for _ in range(2):
            place = journal.locate("one")
            assert place is not None
            found = journal.read(place)
            assert found is not None
            assert (found[0].request_id, bytes(found[1])) == ("one", b"rrraaa")
            assert journal.locate("three") is None
            journal.close()
            journal = self.open(tmp_path)
        journal.close()

    def test_the_oldest_requests_are_forgotten_and_the_disk_is_bounded(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(requests, "MIN_FILE_BYTES", 1000)
        executor = ThreadPoolExecutor(1)
        journal = RequestJournal(tmp_path, max_bytes=4000, executor=executor)
        for number in range(200):
            journal.append(*self.record(f"id-{number}", size=50))
        executor.shutdown()
        assert journal.locate("id-0") is None
        newest = journal.locate("id-199")
        assert newest is not None
        assert sum(path.stat().st_size for path in tmp_path.glob("*.log")) <= 6000
        known = [f"id-{number}" for number in range(200) if journal.locate(f"id-{number}") is not None]
        assert known == [f"id-{number}" for number in range(200 - len(known), 200)]
        journal.close()
        again = self.open(tmp_path, max_bytes=4000)
        assert [name for name in known if again.locate(name) is None] == []
        assert again.read(newest) is not None
        assert again.oldest == journal.oldest
        again.close()

    def test_what_cannot_be_read_costs_its_own_requests_alone(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(requests, "MIN_FILE_BYTES", 1000)
        executor = ThreadPoolExecutor(1)
        journal = RequestJournal(tmp_path, max_bytes=64000, executor=executor)
        for number in range(100):
            journal.append(*self.record(f"id-{number}", size=50))
        executor.shutdown()
        journal.close()
        whole, folder, other = sorted(tmp_path.glob("*.log"))[:3]
        for index, content in ((whole, b"odd"), (other, bytes(range(255, 239, -1)) * 2)):
            index.with_suffix(".index").write_bytes(content)
        folder.unlink()
        folder.with_suffix(".index").unlink()
        folder.mkdir()
        again = self.open(tmp_path, max_bytes=64000)
        known = [number for number in range(100) if again.locate(f"id-{number}") is not None]
        lost = [number for number in range(100) if number not in known]
        assert {0, 99} <= set(known)
        assert 0 < len(lost) < 40
        assert lost == list(range(lost[0], lost[-1] + 1))
        assert folder.with_name(f"{folder.name}.damaged").is_dir()
        again.close()


def accept(rows: FeedbackStore, *labels: int, request: int = 1, schema: pa.Schema = SCHEMA) -> None:
    batch = pa.record_batch(
        [pa.array([float(y) for y in labels], schema.field(0).type), pa.array(labels)], schema=schema
    )
    keys = b"".join(row_key(f"id-{y}", 0) for y in labels)
    rows.accept(batch, AcceptedHead(keys=keys, received_ms=1000, newest_request=request))


def labels_in(folder: Path) -> list[int]:
    paths = sorted(folder.glob("*.parquet"))
    return [y for path in paths for y in pq.read_table(path)["y"].to_pylist()]


class TestStore:
    def test_rows_are_known_and_become_one_file(self, tmp_path: Path) -> None:
        rows = FeedbackStore(tmp_path)
        assert rows.seal() is None
        accept(rows, 1, 2)
        accept(rows, 3)
        assert rows.is_known(row_key("id-2", 0))
        assert not rows.is_known(row_key("id-2", 1))
        assert rows.seal() == 1
        accept(rows, 4)
        rows.close()
        rows = FeedbackStore(tmp_path)
        assert (rows.num_open_rows, rows.open_since_ms, rows.parts[1].num_rows) == (1, 1000, 3)
        assert all(rows.is_known(row_key(f"id-{y}", 0)) for y in (1, 2, 3, 4))
        assert rows.seal() == 2
        rows.close()
        assert labels_in(tmp_path) == [1, 2, 3, 4]
        assert pq.read_schema(tmp_path / "00000001.parquet").equals(SCHEMA)
        assert list_numbers(tmp_path) == [3]

    def test_rows_of_another_schema_are_in_another_file(self, tmp_path: Path) -> None:
        other = pa.schema([("x", pa.float64()), ("y", pa.int64())])
        rows = FeedbackStore(tmp_path)
        accept(rows, 1)
        accept(rows, 2, schema=other)
        table = rows.newest_rows(10)
        assert table is not None
        assert (table.schema, table["y"].to_pylist()) == (other, [2])
        rows.seal()
        rows.close()
        schemas = [pq.read_schema(tmp_path / f"0000000{number}.parquet") for number in (1, 2)]
        assert schemas == [SCHEMA, other]

    def test_the_newest_rows_come_from_the_log_and_the_files_before_it(self, tmp_path: Path) -> None:
        rows = FeedbackStore(tmp_path)
        assert rows.newest_rows(5) is None
        for first in (1, 4):
            accept(rows, *range(first, first + 3))
            rows.seal()
        accept(rows, 7)
        table = rows.newest_rows(5)
        assert table is not None
        assert table["y"].to_pylist() == [3, 4, 5, 6, 7]
        rows.close()

    def test_keys_are_forgotten_with_their_requests_and_no_number_is_used_again(self, tmp_path: Path) -> None:
        rows = FeedbackStore(tmp_path)
        for number in (1, 2, 3):
            accept(rows, number, request=number)
            rows.seal()
        rows.forget_keys(3, last_part=2)
        assert [rows.is_known(row_key(f"id-{y}", 0)) for y in (1, 2, 3)] == [False, False, True]
        rows.forget_keys(9, last_part=2)
        assert rows.is_known(row_key("id-3", 0))  # not in a run yet
        rows.close()
        for path in (*tmp_path.glob("*.keys"), *tmp_path.glob("*.log")):
            path.unlink()
        assert FeedbackStore(tmp_path).number == 4
        assert labels_in(tmp_path) == [1, 2, 3]

    def test_a_log_is_full_by_rows(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(store, "MAX_LOG_ROWS", 3)
        rows = FeedbackStore(tmp_path)
        accept(rows, 1, 2)
        assert not rows.is_full
        accept(rows, 3)
        assert rows.is_full
        rows.close()


class TestMetric:
    def batch(self, **columns: object) -> pa.RecordBatch:
        return pa.record_batch({name: pa.array(values) for name, values in columns.items()})

    @pytest.mark.parametrize(
        ("name", "answers", "labels", "expected"),
        [
            ("mse", [1.0, 2.0], [1.0, 4.0], 2.0),
            ("rmse", [1.0, 2.0], [1.0, 4.0], 2.0**0.5),
            ("mae", [1.0, 2.0], [1.0, 4.0], 1.0),
            ("error_rate", [1, 2, 3, 4], [1, 2, 3, 5], 0.25),
            ("error_rate", ["a", "b"], ["a", "c"], 0.5),
            ("error_rate", [[0.1, 0.9], [0.8, 0.2]], [1, 1], 0.5),
            ("mse", [[1.0, 2.0], [3.0, 4.0]], [[1.0, 2.0], [3.0, 6.0]], 1.0),
            ("mse", [[1.0], [2.0]], [1.0, 2.0], 0.0),
            ("mse", [float("nan"), 1.0], [1.0, 1.0], float("inf")),
        ],
    )
    def test_what_it_is_over_rows(self, name: str, answers: object, labels: object, expected: float) -> None:
        metric = FeedbackMetric.find(name, ["y"], ["y"])
        errors = metric.row_errors(self.batch(y=answers), self.batch(y=labels))
        assert metric.over(list(errors)) == pytest.approx(expected)

    def test_which_columns_are_compared(self) -> None:
        find = FeedbackMetric.find
        assert find("mse", ["y", "share"], ["y", "z"]).label == "y"
        assert find("mae", ["score"], ["y"]).answer == "score"
        named = find("error_rate:arm=label", ["arm", "share"], ["label", "y"])
        assert (named.kind, named.answer, named.label) == ("error_rate", "arm", "label")
        for name, answers, labels in (
            ("mse", ["a", "b"], ["y"]),
            ("mse:c=y", ["a", "b"], ["y"]),
            ("mse:a=z", ["a", "b"], ["y"]),
        ):
            with pytest.raises(MetricError, match="mse"):
                find(name, answers, labels)
        with pytest.raises(MetricError, match="2 values"):
            find("mse", ["y"], ["y"]).row_errors(self.batch(y=[[1.0, 2.0]]), self.batch(y=[1.0]))


class TestRules:
    def test_the_first_rule_that_applies_is_the_reason(self) -> None:
        spec = FeedbackSpec(rows=10, max_age_s=5.0, metric="mse", above=1.0)
        assert find_reason(spec, rows=0, age_s=99.0, metric=99.0) is None
        assert find_reason(spec, rows=9, age_s=4.9, metric=1.0) is None
        assert find_reason(spec, rows=10, age_s=0.0, metric=None) == ("rows", {"rows": 10.0})
        assert find_reason(spec, rows=1, age_s=5.0, metric=None) == ("max_age_s", {"age_s": 5.0})
        assert find_reason(spec, rows=1, age_s=0.0, metric=1.1) == ("metric", {"mse": 1.1, "above": 1.0})
        assert find_reason(FeedbackSpec(), rows=10**9, age_s=1e9, metric=None) is None

    def test_only_the_newest_answers_of_the_live_version_count(self) -> None:
        errors = [(1.0, "old"), *[(float(number), "live") for number in range(MAX_ERRORS + 5)]]
        found = newest_errors(errors, "live")
        assert (len(found), found[0]) == (MAX_ERRORS, 5.0)

    def test_what_was_due_last_survives(self, tmp_path: Path) -> None:
        assert read_due(tmp_path) == FeedbackDue()
        due = FeedbackDue(number=3, first_part=2, last_part=5, rows=7, reason="metric", is_told=False)
        write_due(tmp_path, due)
        assert read_due(tmp_path) == due
        (tmp_path / "due.json").write_bytes(msgspec.json.encode(due)[:20])
        with pytest.raises(StartupError, match=r"due\.json cannot be read"):
            read_due(tmp_path)


class TestDamage:
    """Of the disk, or by another program: it is said, it costs what was hit, and nothing that it hit is deleted."""

    def fill(self, folder: Path) -> None:
        """Two parts, and rows in the open log."""
        rows = FeedbackStore(folder)
        for label in (1, 2):
            accept(rows, label)
            rows.seal()
        for label in (3, 4, 5):
            accept(rows, label)
        rows.close()

    def newest(self, rows: FeedbackStore) -> list[int]:
        table = rows.newest_rows(100)
        return [] if table is None else table["y"].to_pylist()

    @pytest.mark.parametrize("how", ["cut", "empty", "flipped", "folder"])
    def test_of_keys_that_are_damaged_earlier_requests_are_unknown(self, tmp_path: Path, how: str) -> None:
        self.fill(tmp_path)
        keys = tmp_path / "00000001.keys"
        if how == "flipped":
            damage(keys, keys.read_bytes().index(row_key("id-1", 0)))
        elif how == "folder":
            keys.unlink()
            keys.mkdir()
        else:
            keys.write_bytes(keys.read_bytes()[:-3] if how == "cut" else b"")
        began_ms = store.now_ms()
        for _ in range(2):  # also for the attempts after it
            rows = FeedbackStore(tmp_path)
            assert rows.lost_ms >= began_ms
            assert rows.parts[1].num_rows == 1
            assert (rows.is_known(row_key("id-1", 0)), rows.is_known(row_key("id-2", 0))) == (False, True)
            rows.forget_keys(10**6, 1)
            rows.close()
        assert keys.with_name(f"{keys.name}.damaged").exists()
        assert labels_in(tmp_path) == [1, 2]

    def test_a_damaged_part_is_left_out_of_the_newest_rows(self, tmp_path: Path) -> None:
        self.fill(tmp_path)
        first, second = sorted(tmp_path.glob("*.parquet"))
        second.write_bytes(second.read_bytes()[:50])
        rows = FeedbackStore(tmp_path)
        assert self.newest(rows) == [1, 3, 4, 5]
        first.unlink()
        os.mkfifo(first)
        assert self.newest(rows) == [3, 4, 5]
        rows.close()

    def test_of_a_log_with_a_damaged_frame_the_others_count(self, tmp_path: Path) -> None:
        self.fill(tmp_path)
        log = tmp_path / "00000003.log"
        content = log.read_bytes()
        damage(log, content.index(row_key("id-4", 0)))
        rows = FeedbackStore(tmp_path)
        assert [rows.is_known(row_key(f"id-{label}", 0)) for label in (3, 4, 5)] == [True, False, True]
        rows.seal()
        rows.close()
        assert labels_in(tmp_path) == [1, 2, 3, 5]
        assert len((tmp_path / "00000003.log.damaged").read_bytes()) == len(content)

    @pytest.mark.parametrize("is_sealed", [False, True])
    def test_a_log_without_its_schema_is_set_aside(self, tmp_path: Path, is_sealed: bool) -> None:
        self.fill(tmp_path)
        log = tmp_path / "00000003.log"
        damage(log, 12)
        if is_sealed:
            (tmp_path / "00000004.log").touch()
        rows = FeedbackStore(tmp_path)
        accept(rows, 6)
        rows.seal()
        rows.close()
        assert labels_in(tmp_path) == [1, 2, 6]
        assert (tmp_path / "00000003.log.damaged").stat().st_size > 500

    def test_a_schema_that_cannot_be_read_is_written_again(self, tmp_path: Path) -> None:
        self.fill(tmp_path)
        (tmp_path / "schema.arrow").write_bytes(b"xx")
        rows = FeedbackStore(tmp_path)
        assert rows.schema is None
        rows.seal()
        accept(rows, 6)
        assert rows.schema == SCHEMA
        rows.close()

    def test_a_folder_in_the_place_of_a_part_is_set_aside(self, tmp_path: Path) -> None:
        self.fill(tmp_path)
        (tmp_path / "00000003.parquet").mkdir()
        rows = FeedbackStore(tmp_path)
        rows.seal()
        rows.close()
        assert labels_in(tmp_path) == [1, 2, 3, 4, 5]
