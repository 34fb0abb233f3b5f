"""The machine and the processes that look after it."""

from starlette.responses import Response

from trn.gateway.answers import json_answer
from trn.gateway.daemon_link import GatewayHealth
from trn.gateway.endpoints import Call, Nothing, endpoint
from trn.gateway.parts import Parts
from trn.proto.records import Machine


@endpoint("GET", "/devices", Machine)
async def list_devices(parts: Parts, call: Call[Nothing]) -> Response:
    """Devices, CPUs and memory, and who holds them. Needs a daemon."""
    return json_answer(await parts.daemon.calls.devices(), call.accept_encoding)


@endpoint("GET", "/health", GatewayHealth)
async def get_health(parts: Parts, call: Call[Nothing]) -> Response:
    """The daemon and the gateway. Also answers while no daemon runs."""
    return json_answer(await parts.daemon.health(), call.accept_encoding)


ENDPOINTS = [list_devices, get_health]
