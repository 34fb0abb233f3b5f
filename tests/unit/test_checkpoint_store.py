"""Resume takes the newest checkpoint that verifies, says what it passed over, and deletes nothing."""

import contextlib
import json

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sealed_meta import edit_meta, sealed

from gen_worker.contract.checkpoints.choice import read_info, scan, verify_files
from gen_worker.errors import CheckpointError
from gen_worker.trainer.artifacts import ArtifactWriter, CheckpointContent
from gen_worker.trainer.checkpoints.store import CheckpointStore

DEADLINE_S = 60.0


def content(step, *, final=False, **more):
    fields = {
        "epoch": step // 10,
        "state": {"w": torch.full((50,), float(step)), "n": np.arange(4)},
        "loop": {"due": step + 1},
        "cursor": {"epoch": 0, "batch": step},
        "rng": {"python": b"\x00\xff"},
        "identity": {"config_digest": "abc"},
    }
    return CheckpointContent(step=step, final=final, **(fields | more))


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """A folder with steps 1, 2, 3 and a final one at step 4."""
    folder = tmp_path_factory.mktemp("template")
    with ArtifactWriter(folder, folder / "samples", run_id="run", attempt=2, keep_last=0) as writer:
        for step in (1, 2, 3):
            writer.save_checkpoint(content(step))
        writer.save_checkpoint(content(4, final=True))
        assert len(writer.wait(DEADLINE_S)) == 4
    return folder


@pytest.fixture
def folder(template, tmp_path):
    for path in template.glob("*.*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_newest_is_the_final_one_and_comes_back_whole(folder):
    checkpoint, passed_over = CheckpointStore(folder).newest_verified()
    assert passed_over == []
    assert (checkpoint.step, checkpoint.epoch, checkpoint.final) == (4, 0, True)
    assert checkpoint.path == folder / "final.pt"
    assert torch.equal(checkpoint.state["w"], torch.full((50,), 4.0))
    assert checkpoint.state["n"].tolist() == [0, 1, 2, 3]
    assert checkpoint.loop == {"due": 5}
    assert checkpoint.cursor == {"epoch": 0, "batch": 4}
    assert checkpoint.rng == {"python": b"\x00\xff"}
    assert checkpoint.identity == {"config_digest": "abc"}
    assert checkpoint.metric is None
    assert (checkpoint.meta.run_id, checkpoint.meta.attempt) == ("run", 2)


def test_listing_is_newest_first_and_counts_the_final_one_as_its_step(folder):
    assert [info.stem for info in scan(folder)[0]] == [
        "final",
        "step-00000003",
        "step-00000002",
        "step-00000001",
    ]


def test_loaded_tensors_are_writable_and_do_not_touch_the_file(folder):
    before = contents(folder)
    checkpoint = CheckpointStore(folder).load(folder / "final.pt")
    checkpoint.state["w"].fill_(9)
    checkpoint.state["n"][:] = 9
    assert contents(folder) == before


def truncate(folder, stem):
    path = folder / f"{stem}.pt"
    path.write_bytes(path.read_bytes()[:-10])


def flip(folder, stem):
    path = folder / f"{stem}.pt"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


DAMAGES = {
    "is truncated": truncate,
    "hash mismatch": flip,
    "cannot be read": lambda folder, stem: (folder / f"{stem}.pt").unlink(),
    "it was never committed": lambda folder, stem: (folder / f"{stem}.meta.json").unlink(),
    "cannot be read as a checkpoint's meta": lambda folder, stem: (folder / f"{stem}.meta.json").write_text(
        "{"
    ),
    "has schema_version 'trainer_checkpoint.v2'": lambda folder, stem: edit_meta(
        folder, stem, schema_version="trainer_checkpoint.v2"
    ),
    "not verified: non-finite values in w": lambda folder, stem: edit_meta(
        folder, stem, verified=False, reason="non-finite values in w"
    ),
    "leaves the checkpoint's folder": lambda folder, stem: edit_meta(
        folder, stem, files=[{"name": "../secret", "size_bytes": 1, "hash": "sha256:00"}]
    ),
    "big-endian": lambda folder, stem: edit_meta(folder, stem, byteorder="big"),
    "names no data file": lambda folder, stem: edit_meta(folder, stem, files=[]),
}


@pytest.mark.parametrize("reason", DAMAGES)
def test_a_damaged_newest_is_passed_over_with_the_reason_and_left_where_it_is(folder, reason):
    DAMAGES[reason](folder, "final")
    before = contents(folder)
    checkpoint, passed_over = CheckpointStore(folder).newest_verified()
    assert checkpoint.step == 3
    (item,) = passed_over
    assert item.path.name.startswith("final.")
    assert reason in item.reason
    assert contents(folder) == before


def test_older_damage_is_not_reported_as_passed_over(folder):
    (folder / "step-00000001.meta.json").unlink()
    checkpoint, passed_over = CheckpointStore(folder).newest_verified()
    assert checkpoint.step == 4
    assert passed_over == []


def test_with_nothing_sound_there_is_none_and_every_reason(folder):
    for stem in ("step-00000001", "step-00000002", "step-00000003", "final"):
        truncate(folder, stem)
    checkpoint, passed_over = CheckpointStore(folder).newest_verified()
    assert checkpoint is None
    assert len(passed_over) == 4


def test_an_empty_or_missing_folder_has_no_checkpoint(tmp_path):
    assert CheckpointStore(tmp_path).newest_verified() == (None, [])
    assert CheckpointStore(tmp_path / "absent").newest_verified() == (None, [])
    assert scan(tmp_path / "absent")[0] == []


def test_load_takes_the_meta_or_the_data_path(folder):
    store = CheckpointStore(folder)
    assert store.load(folder / "step-00000002.pt").step == 2
    assert store.load(folder / "step-00000002.meta.json").step == 2


def test_verify_compares_every_file(folder):
    assert verify_files(read_info(folder, "final")).step == 4
    flip(folder, "final")
    with pytest.raises(CheckpointError, match="hash mismatch"):
        verify_files(read_info(folder, "final"))


def test_load_of_one_that_does_not_verify_raises(folder):
    flip(folder, "step-00000002")
    with pytest.raises(CheckpointError, match="hash mismatch"):
        CheckpointStore(folder).load(folder / "step-00000002.pt")
    with pytest.raises(CheckpointError, match="never committed"):
        CheckpointStore(folder).load(folder / "step-00000009.pt")
    with pytest.raises(CheckpointError, match="cannot be read"):
        CheckpointStore(folder).load(folder / "step-00000009.meta.json")


def test_a_plain_state_file_is_a_resume_source_at_step_0(tmp_path):
    path = tmp_path / "start.json"
    path.write_text('{"state": {"w": [1.5, 2], "name": "x"}}')
    checkpoint = CheckpointStore(tmp_path).load(path)
    assert checkpoint.state == {"w": [1.5, 2], "name": "x"}
    assert (checkpoint.step, checkpoint.cursor, checkpoint.rng, checkpoint.meta) == (0, None, {}, None)


@pytest.mark.parametrize("text", ["[]", "{}", '{"state": 3}', "x", ""])
def test_any_other_json_is_refused(tmp_path, text):
    path = tmp_path / "start.json"
    path.write_text(text)
    with pytest.raises(CheckpointError):
        CheckpointStore(tmp_path).load(path)


def test_new_fields_of_the_same_version_are_ignored(folder):
    edit_meta(folder, "final", a_field_of_tomorrow={"x": 1})
    assert CheckpointStore(folder).newest_verified()[0].step == 4


junk = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    max_examples=150,
    deadline=None,
)
@given(data=st.data())
def test_no_meta_however_mangled_gives_anything_but_a_checkpoint_or_a_checkpoint_error(
    template, tmp_path, data
):
    document = json.loads((template / "step-00000001.meta.json").read_text())
    for _ in range(data.draw(st.integers(1, 3))):
        place = document
        while isinstance(place, (dict, list)) and place:
            keys = sorted(place) if isinstance(place, dict) else list(range(len(place)))
            key = data.draw(st.sampled_from(keys))
            if not isinstance(place[key], (dict, list)) or data.draw(st.integers(0, 3)) == 0:
                place[key] = data.draw(junk | st.integers(-5, 2**40))
                break
            place = place[key]
    (tmp_path / "step-00000001.meta.json").write_bytes(sealed(document))
    (tmp_path / "step-00000001.pt").write_bytes((template / "step-00000001.pt").read_bytes())
    store = CheckpointStore(tmp_path)
    scan(tmp_path)
    store.newest_verified()
    with contextlib.suppress(CheckpointError):
        store.load(tmp_path / "step-00000001.meta.json")


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    max_examples=60,
    deadline=None,
)
@given(position=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_any_flipped_bit_of_the_data_is_noticed(template, tmp_path, position, bit):
    data = bytearray((template / "step-00000001.pt").read_bytes())
    data[int(position * len(data))] ^= 1 << bit
    (tmp_path / "step-00000001.pt").write_bytes(data)
    (tmp_path / "step-00000001.meta.json").write_bytes((template / "step-00000001.meta.json").read_bytes())
    assert CheckpointStore(tmp_path).newest_verified()[0] is None


def test_a_tensor_entry_that_reaches_outside_its_storage_is_refused(folder):
    meta = msgspec.json.decode((folder / "final.meta.json").read_bytes())
    meta["tensors"][0]["shape"] = [51]
    edit_meta(folder, "final", tensors=meta["tensors"])
    with pytest.raises(CheckpointError, match="outside its storage"):
        CheckpointStore(folder).load(folder / "final.pt")
