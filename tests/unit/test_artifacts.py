"""The loop's view: a save blocks for one copy and is frozen at its step; samples appear whole or not at all."""

import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch

from gen_worker.errors import CheckpointError, TrainStepError
from gen_worker.trainer import artifacts
from gen_worker.trainer.artifacts import ArtifactWriter, CheckpointContent
from gen_worker.trainer.checkpoints.store import CheckpointStore

DEADLINE_S = 60.0


def content(step, state=None, *, final=False, **more):
    fields = {"epoch": 0, "loop": {}, "cursor": None, "rng": {}, "identity": {}} | more
    return CheckpointContent(step=step, final=final, state=state or {"w": torch.ones(4) * step}, **fields)


@pytest.fixture(params=[False, True], ids=["own-process", "in-process"])
def writer(tmp_path, request):
    folders = tmp_path / "checkpoints", tmp_path / "samples"
    with ArtifactWriter(*folders, run_id="run", keep_last=0, is_writer_in_process=request.param) as made:
        yield made


def load(writer, step):
    return CheckpointStore(writer.checkpoints_dir).load(writer.checkpoints_dir / f"step-{step:08d}.meta.json")


def test_the_state_is_frozen_when_save_returns(writer):
    weight = torch.zeros(500_000)
    array = np.zeros(500_000)
    for step in range(1, 6):
        weight.fill_(step)
        array.fill(step)
        writer.save_checkpoint(content(step, {"w": weight, "n": array}, loop={"step": step}))
        weight.fill_(-1)  # the loop goes on at once
        array.fill(-1)
    writer.wait(DEADLINE_S)
    for step in range(1, 6):
        checkpoint = load(writer, step)
        assert checkpoint.loop == {"step": step}
        assert set(checkpoint.state["w"].tolist()) == {float(step)} == set(checkpoint.state["n"].tolist())


def test_model_and_optimizer_come_back_to_the_bit(writer):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)

    def step():
        optimizer.zero_grad()
        model(torch.randn(16, 8)).square().mean().backward()
        optimizer.step()
        scheduler.step()

    for _ in range(3):
        step()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
    }
    rng = torch.get_rng_state()
    writer.save_checkpoint(content(3, state, rng={"torch": rng}))
    step()
    expected = [parameter.detach().clone() for parameter in model.parameters()]
    writer.wait(DEADLINE_S)

    checkpoint = load(writer, 3)
    model.load_state_dict(checkpoint.state["model"])
    optimizer.load_state_dict(checkpoint.state["optimizer"])
    scheduler.load_state_dict(checkpoint.state["scheduler"])
    torch.set_rng_state(checkpoint.rng["torch"])
    step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected, strict=True))
    flat = torch.load(checkpoint.path, weights_only=True)
    assert torch.equal(flat["model.0.weight"], checkpoint.state["model"]["0.weight"])
    assert torch.equal(flat["rng.torch"], rng)


def test_the_layout_is_computed_once_per_structure(writer, monkeypatch):
    built = []
    real = artifacts.build_layout
    monkeypatch.setattr(artifacts, "build_layout", lambda *args: built.append(1) or real(*args))
    for step, size in enumerate([4, 4, 4, 9, 9, 4], start=1):
        writer.save_checkpoint(content(step, {"w": torch.full((size,), float(step))}))
    writer.wait(DEADLINE_S)
    assert len(built) == 3
    assert load(writer, 3).state["w"].tolist() == [3.0] * 4
    assert load(writer, 5).state["w"].tolist() == [5.0] * 9
    assert load(writer, 6).state["w"].tolist() == [6.0] * 4


def test_poll_gives_each_checkpoint_once_and_asks_nobody_while_idle(writer, monkeypatch):
    writer.save_checkpoint(content(1))
    (saved,) = writer.wait(DEADLINE_S)
    assert (saved.step, saved.final, saved.verified, saved.removed) == (1, False, True, [])
    assert saved.path == writer.checkpoints_dir / "step-00000001.pt"
    assert saved.meta_path == writer.checkpoints_dir / "step-00000001.meta.json"
    assert saved.size_bytes == saved.path.stat().st_size
    monkeypatch.setattr(writer, "_client", None)  # anything asked of it would fail
    assert writer.poll() == []
    assert writer.wait() == []
    monkeypatch.undo()


def test_a_state_that_cannot_be_saved_is_refused_with_its_path_and_the_writer_goes_on(writer):
    with pytest.raises(CheckpointError, match=r'^state\["opt"\]\[0\] is of type object'):
        writer.save_checkpoint(content(1, {"opt": [object()]}))
    with pytest.raises(CheckpointError, match=r'^state\["s"\] is a sparse tensor'):
        writer.save_checkpoint(content(1, {"s": torch.eye(2).to_sparse()}))
    with pytest.raises(CheckpointError, match=r'^loop\["x"\]'):
        writer.save_checkpoint(content(1, loop={"x": {1}}))
    writer.save_checkpoint(content(1))
    assert writer.wait(DEADLINE_S)[0].verified


def test_non_finite_state_is_saved_but_not_verified(writer):
    writer.save_checkpoint(content(1))
    writer.save_checkpoint(content(2, {"w": torch.tensor([1.0, float("nan")])}))
    good, bad = writer.wait(DEADLINE_S)
    assert good.verified
    assert not bad.verified
    assert bad.reason == "non-finite values in w"
    checkpoint, passed_over = CheckpointStore(writer.checkpoints_dir).newest_verified()
    assert checkpoint.step == 1
    assert passed_over[0].reason == "not verified: non-finite values in w"
    assert load(writer, 2).state["w"][0] == 1.0


def test_non_finite_numbers_outside_the_tensors_of_the_state_are_no_fault(writer):
    writer.save_checkpoint(content(1, {"best": float("inf")}, loop={"t": torch.tensor(float("nan"))}))
    assert writer.wait(DEADLINE_S)[0].verified


def test_retention_keeps_the_last_and_the_best(tmp_path):
    losses = {1: 5.0, 2: 1.0, 3: 4.0, 4: 3.0, 5: float("nan")}
    removed = []
    with ArtifactWriter(tmp_path, tmp_path / "samples", run_id="run", keep_last=2, keep_best=1) as writer:
        for step, loss in losses.items():
            writer.save_checkpoint(content(step, metric=("val/loss", loss, "min")))
            removed += writer.wait(DEADLINE_S)[0].removed
        writer.save_checkpoint(content(6, final=True))
        writer.wait(DEADLINE_S)
    assert removed == ["step-00000001", "step-00000003"]
    assert {path.name for path in tmp_path.glob("*.pt")} == {
        "step-00000002.pt",
        "step-00000004.pt",
        "step-00000005.pt",
        "final.pt",
    }
    assert CheckpointStore(tmp_path).load(tmp_path / "step-00000002.pt").metric == ("val/loss", 1.0, "min")


def test_a_checkpoint_that_cannot_fit_is_refused_before_writing_with_numbers(writer, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    with pytest.raises(
        CheckpointError, match=r"no space left for step-00000001: it needs 1\.0 MB, 0\.0 MB free"
    ):
        writer.save_checkpoint(content(1))
    assert not list(writer.checkpoints_dir.iterdir())


def test_the_files_of_the_authors_hook_are_committed_and_hashed_with_the_checkpoint(writer):
    folder = writer.author_dir(1, False)
    (folder / "adapter").mkdir()
    (folder / "adapter" / "weights.bin").write_bytes(b"abc")
    (folder / "empty.txt").write_bytes(b"")
    writer.save_checkpoint(content(1, author_files=folder, author_payload={"kind": "lora", "rank": 4}))
    (saved,) = writer.wait(DEADLINE_S)
    assert [file.name for file in saved.files] == [
        "step-00000001.pt",
        "step-00000001.files/adapter/weights.bin",
        "step-00000001.files/empty.txt",
    ]
    checkpoint = load(writer, 1)
    assert checkpoint.author_files == writer.checkpoints_dir / "step-00000001.files"
    assert checkpoint.author_payload == {"kind": "lora", "rank": 4}
    assert not folder.exists()
    (checkpoint.author_files / "adapter" / "weights.bin").write_bytes(b"abd")
    with pytest.raises(CheckpointError, match=r"hash mismatch: step-00000001\.files/adapter/weights\.bin"):
        load(writer, 1)


def test_a_hook_that_wrote_nothing_leaves_no_folder(writer):
    writer.save_checkpoint(content(1, author_files=writer.author_dir(1, False)))
    writer.wait(DEADLINE_S)
    assert load(writer, 1).author_files is None
    assert sorted(path.name for path in writer.checkpoints_dir.iterdir()) == [
        "step-00000001.meta.json",
        "step-00000001.pt",
    ]


def test_a_link_among_the_authors_files_is_refused(writer, tmp_path):
    folder = writer.author_dir(1, False)
    (folder / "link").symlink_to(tmp_path)
    writer.save_checkpoint(content(1, author_files=folder))
    with pytest.raises(CheckpointError, match="link, which is neither a file nor a folder"):
        writer.wait(DEADLINE_S)
    assert not list(writer.checkpoints_dir.iterdir())


def test_retention_removes_the_authors_files_too(tmp_path):
    with ArtifactWriter(tmp_path, tmp_path / "samples", run_id="run", keep_last=1, keep_best=0) as writer:
        for step in (1, 2):
            folder = writer.author_dir(step, False)
            (folder / "x").write_text("x")
            writer.save_checkpoint(content(step, author_files=folder))
        writer.wait(DEADLINE_S)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-00000002.files",
        "step-00000002.meta.json",
        "step-00000002.pt",
    ]


def test_safetensors_instead_of_pt(tmp_path):
    from safetensors.torch import load_file

    with ArtifactWriter(tmp_path, tmp_path / "samples", run_id="run", format="safetensors") as writer:
        writer.save_checkpoint(content(1, {"model": {"w": torch.ones(3, dtype=torch.bfloat16)}}))
        (saved,) = writer.wait(DEADLINE_S)
    assert saved.path.name == "step-00000001.safetensors"
    assert torch.equal(load_file(saved.path)["model.w"], torch.ones(3, dtype=torch.bfloat16))
    assert CheckpointStore(tmp_path).newest_verified()[0].state["model"]["w"].dtype == torch.bfloat16


def test_a_numpy_trainer_needs_no_torch(tmp_path):
    code = f"""
import sys; sys.modules["torch"] = None
from pathlib import Path
import numpy as np
from gen_worker.trainer.artifacts import ArtifactWriter, CheckpointContent
from gen_worker.trainer.checkpoints.store import CheckpointStore
folder = Path({str(tmp_path)!r})
with ArtifactWriter(folder, folder / "samples", run_id="run") as writer:
    writer.save_checkpoint(CheckpointContent(step=1, epoch=0, final=True, state={{"w": np.arange(3)}},
        loop={{}}, cursor=None, rng={{}}, identity={{}}))
    writer.wait(60)
checkpoint, _ = CheckpointStore(folder).newest_verified()
assert checkpoint.state["w"].tolist() == [0, 1, 2]
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    assert torch.load(tmp_path / "final.pt", weights_only=True)["w"].tolist() == [0, 1, 2]


def test_samples_appear_under_their_step_with_all_their_files(writer, tmp_path):
    folder = writer.sample_dir(7)
    (folder / "a.png").write_bytes(b"png")
    (folder / "clips").mkdir()
    (folder / "clips" / "b.mp4").write_bytes(b"video")
    assert [path.name for path in (tmp_path / "samples").iterdir() if "tmp" not in path.name] == []
    samples = writer.write_sample(7, folder)
    assert [
        (sample.path.relative_to(tmp_path).as_posix(), sample.step, sample.size_bytes) for sample in samples
    ] == [
        ("samples/step-00000007/a.png", 7, 3),
        ("samples/step-00000007/clips/b.mp4", 7, 5),
    ]
    assert [path.name for path in (tmp_path / "samples").iterdir()] == ["step-00000007"]


def test_an_empty_sample_file_is_an_error_and_leaves_nothing(writer, tmp_path):
    folder = writer.sample_dir(7)
    (folder / "a.png").write_bytes(b"png")
    (folder / "b.mp4").touch()
    with pytest.raises(TrainStepError, match=r"empty file at step 7: b\.mp4"):
        writer.write_sample(7, folder)
    assert list((tmp_path / "samples").iterdir()) == []


def test_a_hook_that_made_no_sample_gives_an_empty_list(writer, tmp_path):
    assert writer.write_sample(7, writer.sample_dir(7)) == []
    assert list((tmp_path / "samples").iterdir()) == []


def test_a_resumed_run_replaces_the_samples_of_a_step_it_passes_again(writer, tmp_path):
    for text in ("old", "new"):
        folder = writer.sample_dir(7)
        (folder / f"{text}.txt").write_text(text)
        writer.write_sample(7, folder)
    assert [path.name for path in (tmp_path / "samples" / "step-00000007").iterdir()] == ["new.txt"]
    assert [path.name for path in (tmp_path / "samples").iterdir()] == ["step-00000007"]


def test_half_written_samples_of_a_crashed_attempt_go_at_start(writer, tmp_path):
    left = tmp_path / "samples" / "step-00000003.tmp-0badcafe-1"
    left.mkdir(parents=True)
    (tmp_path / "samples" / "mine").mkdir()
    mine = writer.sample_dir(4)
    writer.start()
    assert not left.exists()
    assert mine.exists()
    assert (tmp_path / "samples" / "mine").exists()


def test_what_a_resume_passed_over_neither_counts_nor_pushes_out_what_is_saved_now(tmp_path):
    """A newer checkpoint that says it is verified, but is torn: saves of earlier steps must stay all the same."""
    with ArtifactWriter(tmp_path / "c", tmp_path / "s", run_id="r", keep_last=1, keep_best=0) as writer:
        for step in (10, 20):
            writer.save_checkpoint(content(step=step))
            writer.wait()
    torn = tmp_path / "c" / "step-00000020.pt"
    torn.write_bytes(torn.read_bytes()[:-1])
    with ArtifactWriter(tmp_path / "c", tmp_path / "s", run_id="r", keep_last=1, keep_best=0) as writer:
        writer.save_checkpoint(content(step=15))
        (saved,) = writer.wait()
    assert "step-00000015" not in saved.removed
    newest, _ = CheckpointStore(tmp_path / "c").newest_verified()
    assert newest is not None
    assert newest.step == 15
