"""Any request that the OpenAPI document allows, and many that it does not, get an answer that the document describes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from daemon_process import DEADLINE_S
from gateway_process import GatewayWorld
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

import trn
from trn.gateway.app import ENDPOINTS
from trn.gateway.openapi import build_document

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
TRAINERS = Path(__file__).parent / "trainers"
ENDLESS = f"/api/v1{next(each.path for each in ENDPOINTS if each.is_stream)}"
# Paths of the machine that the test runs on: nothing is read or written there for a draw.
OF_THE_MACHINE = ("code_dir", "log_dir", "event_log", "base_dir", "interpreter")

schema = schemathesis.openapi.from_dict(build_document(ENDPOINTS)).exclude(path=ENDLESS)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayWorld]:
    """With a run that is often drawn: `0`."""
    folder = tmp_path_factory.mktemp("drawn")
    with GatewayWorld(folder / "home") as world:
        config = {
            "run_id": "0",
            "trainer": "witnessed:Witnessed",
            "mock_batches": [1, 2, 3],
            "metric_every": 1,
            "resources": {"devices": ["cpu"]},
            "hyperparams": {"witness": str(folder), "step_ms": 0},
        }
        with trn.Client(world.home.root) as client:
            client.submit(config, base_dir=TRAINERS)
            client.wait("0", DEADLINE_S)
        yield world


@schema.parametrize()
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_request_makes_an_error_of_the_server(case: Any, world: GatewayWorld) -> None:
    if isinstance(case.body, dict):
        for name in OF_THE_MACHINE:
            case.body.pop(name, None)
    answer = case.call(base_url=world.gateway.url, headers=world.bearer, timeout=DEADLINE_S)
    case.validate_response(answer, checks=CHECKS, headers=world.bearer)
