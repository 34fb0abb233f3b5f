"""Rules of a job of `mode: inference`: it serves or it predicts, and fields that are about training mean nothing there."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from gen_worker.contract.documents import render_value
from gen_worker.contract.job.spec import JOB_DEFAULTS
from gen_worker.errors import Fault

SECTIONS = ("serving", "prediction")
FEEDBACK_METRIC = re.compile(r"(?P<kind>mse|rmse|mae|error_rate)(?::(?P<answer>[^=]+)=(?P<label>[^=]+))?")
_EITHER = "`serving` or `prediction`"

# What a job of this mode may say. All other fields are about training.
_READ = frozenset(
    {
        "trainer_api_version",
        "run_id",
        "name",
        "trainer",
        "owner",
        "release_ref",
        "mode",
        *SECTIONS,
        "resources",
        "retry",
        "time_limit_s",
        "grace_s",
        "heartbeat_s",
        "env",
        "tags",
        "group",
        "profiles",
    }
)
# Of those, what the run that saved the checkpoint has decided.
_OF_THE_CHECKPOINT = frozenset(
    {"hyperparams", "seed", "precision", "deterministic", "inputs", "weights", "strict"}
)


def inference_faults(document: Mapping[str, Any]) -> Iterator[Fault]:
    """Of a raw document whose `mode` is inference."""
    given = [name for name in SECTIONS if document.get(name) is not None]
    if len(given) != 1:
        found = "given together with `prediction`" if given else "neither it nor `prediction` is given"
        yield _fault("serving", f'{found}, but `mode: "inference"` needs exactly one of {_EITHER}')
    yield from _training_faults(document)
    for name in given:
        section = document[name]
        if isinstance(section, dict):
            yield from _model_faults(name, section)
            if name == "serving":
                yield from _serving_faults(section)
    resources = document.get("resources")
    yield from _process_faults(given, resources if isinstance(resources, dict) else {})


def _training_faults(document: Mapping[str, Any]) -> Iterator[Fault]:
    defaults = msgspec.to_builtins(JOB_DEFAULTS)
    for name, default in defaults.items():
        if name in _READ or document.get(name) in (default, None):
            continue
        if name in _OF_THE_CHECKPOINT:
            why = 'but `mode: "inference"` takes it from the run that saved the checkpoint'
        elif name == "dataset":
            why = 'but `mode: "inference"` does not train: name the data in `prediction.parquet_paths`'
        else:
            why = 'but `mode: "inference"` does not train'
        yield _fault(name, f"given, {why}: leave it out")


def _model_faults(name: str, section: Mapping[str, Any]) -> Iterator[Fault]:
    checkpoint, version = section.get("checkpoint"), section.get("version")
    if checkpoint is None and version is None:
        yield _fault(f"{name}.checkpoint", "not given, expected the path of a checkpoint's .meta.json")
    elif checkpoint is not None and version is not None:
        yield _fault(
            f"{name}.checkpoint", f"given together with `{name}.version`, expected only one of the two"
        )


def _serving_faults(serving: Mapping[str, Any]) -> Iterator[Fault]:
    address = serving.get("address")
    if isinstance(address, str) and not _is_address(address):
        yield Fault.of_value("serving.address", render_value(address), "HOST:PORT or unix:PATH")
    gate = serving.get("gate")
    if isinstance(gate, dict) and gate.get("metric") is None:
        for name, default in (("mode", "min"), ("tolerance", 0)):
            if gate.get(name, default) != default:
                yield _fault(f"serving.gate.{name}", "given without `serving.gate.metric`, which it is about")
    feedback = serving.get("feedback")
    if isinstance(feedback, dict):
        for one, other in (("metric", "above"), ("above", "metric")):
            if feedback.get(one) is not None and feedback.get(other) is None:
                yield _fault(
                    f"serving.feedback.{one}",
                    f"given without `serving.feedback.{other}`, expected both or none",
                )
        metric = feedback.get("metric")
        if isinstance(metric, str) and FEEDBACK_METRIC.fullmatch(metric) is None:
            yield Fault.of_value(
                "serving.feedback.metric",
                render_value(metric),
                "mse, rmse, mae or error_rate, perhaps with :ANSWER=LABEL",
            )


def _is_address(text: str) -> bool:
    if text.startswith("unix:"):
        return len(text) > len("unix:")
    host, _, port = text.rpartition(":")
    is_host = bool(host) and (":" not in host or (host[0], host[-1]) == ("[", "]"))
    return is_host and port.isascii() and port.isdecimal() and int(port) < 1 << 16


def _process_faults(given: list[str], resources: Mapping[str, Any]) -> Iterator[Fault]:
    processes, nodes = resources.get("processes"), resources.get("nodes")
    if given == ["serving"] and processes not in (None, 1):
        yield _fault(
            "resources.processes",
            f"found {render_value(processes)}, but a server has one: set `serving.replicas` instead",
        )
    if nodes not in (None, 1):
        yield _fault(
            "resources.nodes", f'found {render_value(nodes)}, but `mode: "inference"` runs on one machine'
        )


def _fault(path: str, message: str) -> Fault:
    return Fault(message, path=path, kind="rule")
