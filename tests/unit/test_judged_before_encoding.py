"""A job is judged before it is encoded: what JSON cannot hold is refused, never sent as something else."""

import asyncio
import datetime
import decimal
import enum
import json
import math
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import pytest

from gen_worker.contract.documents import encode_document, parse_document, parse_value
from gen_worker.contract.job.spec import EarlyStoppingSpec
from gen_worker.errors import SpecError
from gen_worker.pytorch.job_file import apply_settings
from gen_worker.trainer import TrainerConfig
from trn.client.client import AsyncClient
from trn.client.job_file import Changes, read_assignments, read_job
from trn.client.wire_requests import make_submit_request
from trn.core.digest import run_digest
from trn.core.errors import InvalidRequestError
from trn.daemon.intake.submission import read_config


class Colour(enum.Enum):
    RED = "red"


NOT_JSON: list[tuple[Any, str]] = [
    (math.inf, "found inf, expected a finite number"),
    (-math.inf, "found -inf, expected a finite number"),
    (math.nan, "found nan, expected a finite number"),
    (np.float64("nan"), "found nan, expected a finite number"),
    (np.float32(0.5), "a float32, expected a value that JSON can hold: use .item()"),
    (np.ones(2), "a ndarray, expected a value that JSON can hold: use .item() or .tolist()"),
    (b"\x00\x01", "found bytes b'\\x00\\x01', expected a value that JSON can hold"),
    (bytearray(b"a"), "found bytearray bytearray(b'a')"),
    ({2}, "found set {2}, expected a value that JSON can hold: use a list"),
    (frozenset("a"), "found frozenset frozenset({'a'})"),
    (1j, "found complex 1j"),
    (datetime.date(2026, 1, 2), "a date, expected a value that JSON can hold: put it in quotes"),
    (decimal.Decimal("0.1"), "a Decimal"),
    (Path("/x"), "a PosixPath, expected a value that JSON can hold: use str(path)"),
    (Colour.RED, "a Colour, expected a value that JSON can hold: use .value"),
    (MappingProxyType({"a": 1}), "a mappingproxy, expected a value that JSON can hold: use dict(…)"),
    (msgspec.Raw(b"NaN"), "a Raw"),
    (EarlyStoppingSpec(), "a EarlyStoppingSpec"),
    ({1: "one"}, "found the key 1, expected text"),
    (1 << 70, "a whole number of 71 bits"),
]


def job_with(value: Any) -> dict[str, Any]:
    return {"trainer": "mine:Mine", "max_steps": 1, "hyperparams": {"deep": [0, {"x": value}]}}


@pytest.mark.parametrize(("value", "words"), NOT_JSON, ids=lambda item: str(item)[:20])
def test_a_submit_is_refused_with_path_and_value(value: Any, words: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        make_submit_request(job_with(value), {})
    (fault,) = refused.value.faults
    assert fault.startswith("hyperparams.deep[1].x: ")
    assert words in fault


@pytest.mark.parametrize(("value", "words"), NOT_JSON, ids=lambda item: str(item)[:20])
def test_what_a_resume_lays_over_is_refused_alike(value: Any, words: str, tmp_path: Path) -> None:
    client = AsyncClient(tmp_path, patience_s=0)
    for given in ({"overrides": {"hyperparams": {"x": value}}}, {"config": job_with(value)}):
        with pytest.raises(InvalidRequestError, match="cannot be sent") as refused:
            asyncio.run(client.resume("a", checkpoint_path=tmp_path / "a", **given))
        assert words in refused.value.faults[0]


@pytest.mark.parametrize(("value", "words"), NOT_JSON, ids=lambda item: str(item)[:20])
def test_a_notebook_is_refused_alike(value: Any, words: str) -> None:
    with pytest.raises(SpecError) as refused:
        TrainerConfig(max_steps=1, hyperparams={"x": value})
    assert words in refused.value.faults[0]


def test_records_in_a_notebooks_settings_are_judged_before_they_are_converted() -> None:
    for value, words in ((b"val/loss", "bytes b'val/loss'"), ({"val/loss"}, "set {'val/loss'}")):
        with pytest.raises(SpecError) as refused:
            TrainerConfig(max_steps=1, early_stopping=EarlyStoppingSpec(metric=value))  # type: ignore[arg-type]
        assert words in str(refused.value)
    with pytest.raises(SpecError, match="found nan"):
        TrainerConfig(max_steps=1, early_stopping=EarlyStoppingSpec(min_delta=math.nan))


def test_every_fault_is_told_at_once() -> None:
    with pytest.raises(InvalidRequestError) as refused:
        make_submit_request({"seed": math.nan, "hyperparams": {"a": b"x", "b": {1}}}, {})
    assert [fault.partition(":")[0] for fault in refused.value.faults] == [
        "seed",
        "hyperparams.a",
        "hyperparams.b",
    ]


def test_what_is_equal_to_plain_data_is_sent_as_it_is() -> None:
    class Choice(enum.StrEnum):
        SGD = "sgd"

    given = {
        "lr": np.float64(0.1),
        "betas": (0.9, 0.999),
        "optimizer": Choice.SGD,
        "none": None,
        "zero": -0.0,
    }
    assert json.loads(encode_document(given, source="the config")) == {
        "lr": 0.1,
        "betas": [0.9, 0.999],
        "optimizer": "sgd",
        "none": None,
        "zero": -0.0,
    }


def test_secret_variables_are_text() -> None:
    with pytest.raises(InvalidRequestError, match="TOKEN: found a bytes, expected text") as refused:
        make_submit_request(job_with(1), {"secret_env": {"TOKEN": b"hidden"}})  # type: ignore[dict-item]
    assert "hidden" not in str(refused.value)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, b"x", {1}, datetime.date(2026, 1, 2)])
def test_no_two_jobs_share_a_digest(value: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        run_digest(job_with(value))


@pytest.mark.parametrize(
    "text", ["NaN", "nan", "inf", "-inf", "Infinity", "-Infinity", ".nan", "-.inf", "1e999", "[1, NaN]"]
)
def test_no_number_on_a_command_line_becomes_text_or_null(text: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        read_assignments([f"hyperparams.lr={text}"])
    assert "expected a finite number" in refused.value.faults[0]
    job = read_job(tmp_path / "mine:Mine", Changes(assignments=[f"hyperparams.lr={text}"]))
    assert any("expected a finite number" in fault for fault in job.faults)


def test_text_that_spells_no_number_is_written_in_quotes() -> None:
    assert read_assignments(['hyperparams.lr="inf"', "tags.why=inf"]) == {
        "hyperparams": {"lr": "inf"},
        "tags": {"why": "inf"},
    }
    assert parse_value("banana", source="x") == "banana"
    assert parse_value("", source="x") == ""
    assert parse_value("1e-4", source="x") == 1e-4
    with pytest.raises(SpecError, match='the key "a" is given more than once'):
        parse_value('{"a": 1, "a": 2}', source="x")


@pytest.mark.parametrize(
    "text", [".nan", ".inf", "-.inf", "!!binary aGk=", "!!set {a}", "{1: 2}", "? [1]\n: 2"]
)
def test_a_yaml_value_is_refused_that_json_cannot_hold(text: str) -> None:
    with pytest.raises(SpecError):
        parse_document(f"x: {text}", format_="yaml", source="job.yaml")
    with pytest.raises(SpecError):
        apply_settings({}, [f"hyperparams.x={text}"])


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "2026-01-02", "12:30:00"])
def test_a_toml_value_is_refused_that_json_cannot_hold(text: str) -> None:
    with pytest.raises(SpecError, match=r"^job\.toml"):
        parse_document(f"x = {text}", format_="toml", source="job.toml")


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e999", '{"a": 1, "a": 2}'])
def test_what_comes_by_the_bus_or_from_another_client_is_judged_by_the_daemon(text: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        read_config(b'{"hyperparams": {"x": %s}}' % text.encode(), max_config_bytes=1000)
    assert refused.value.faults[0].startswith("hyperparams.x")


def test_a_date_in_yaml_is_text() -> None:
    assert parse_document("x: 2026-01-02", format_="yaml", source="job.yaml") == {"x": "2026-01-02"}
