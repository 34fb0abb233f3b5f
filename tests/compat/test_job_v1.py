"""Job documents of v1 stay readable, with the same meaning and the same digest, in every later release."""

from pathlib import Path

import pytest

from gen_worker.contract.job.rules import read_job_spec, spec_digest
from gen_worker.contract.job.spec import TrainingJobSpec

FOLDER = Path(__file__).parent / "job_v1"
DIGESTS = {
    "full.yaml": "sha256:c8d04266f4524ee8fa4c819acfacfd5eea7559ca03884e604611fbb3a4184fac",  # its retry is the default now
    "mock.json": "sha256:7317caa18d45d5a9c0187a833f8ea11375c80226c8c1d8d2f5366d0615c82549",
    "refs.toml": "sha256:abc168c697ef8b80a074df8779ee3db31265e8cda67fe7830b97804193accdaf",
    "seed.json": "sha256:74da3085830d8dd06596f00e72c2c019fa8e12aef24da4b68fe650856490313c",
}


def test_every_v1_document_is_pinned() -> None:
    assert {path.name for path in FOLDER.iterdir()} == set(DIGESTS)


@pytest.mark.parametrize("name", sorted(DIGESTS))
def test_a_v1_document_keeps_its_digest(name: str) -> None:
    assert spec_digest(read_job_spec(FOLDER / name)) == DIGESTS[name]


def test_the_seed_document_keeps_its_meaning() -> None:
    spec = read_job_spec(FOLDER / "seed.json")
    assert spec.run_id == "run_123"
    assert spec.trainer == "my_pkg.train:MyTrainer"
    assert (spec.max_steps, spec.epochs) == (1000, None)
    assert (spec.metric_every, spec.checkpoint_every, spec.sample_every, spec.validate_every) == (
        10,
        200,
        200,
        0,
    )
    assert spec.hyperparams == {"learning_rate": 0.0001}
    assert spec.dataset is not None
    assert spec.dataset.parquet_paths == ["/data/train.parquet"]
    assert spec.dataset.columns == ["image_ref", "caption"]


def test_the_full_document_names_every_field_but_those_that_exclude_each_other() -> None:
    spec = read_job_spec(FOLDER / "full.yaml")
    at_default = {
        name
        for name in spec.__struct_fields__
        if getattr(spec, name) == getattr(TrainingJobSpec(run_id="x"), name)
    }
    # v1 names that this document cannot give, and fields that were added after it was written
    assert at_default <= {
        "trainer_api_version",
        "mock_batches",
        "resume_checkpoint_path",
        "resume_non_finite",
        "resume_older",
        "fast_dev_run",
        "mode",
        "artifacts",
        "group",
        "grace_s",
        "heartbeat_s",
        "overfit_batches",
        "prediction",
        "serving",
        "strict",
    }
    assert spec.hyperparams["second"] == {"shape": "cosine", "warmup_steps": 20}
    assert spec.hyperparams["learning_rate"] == 3e-4
    assert spec.hyperparams["country"] == "no"
    assert spec.early_stopping is not None
    assert spec.early_stopping.min_delta == 1e-3


def test_the_full_document_with_its_profile() -> None:
    spec = read_job_spec(FOLDER / "full.yaml", profile="small")
    assert spec.max_steps == 10
    assert spec.dataset is not None
    assert (spec.dataset.batch_size, spec.dataset.readahead) == (8, 4)
    assert spec.profiles == {}
