"""Served names: what they answer with, and how it is changed."""

from typing import Annotated, Any

import msgspec
from starlette.responses import Response

from trn.core.serving.records import Promotion, ServedModel
from trn.gateway.answers import json_answer
from trn.gateway.endpoints import Call, endpoint
from trn.gateway.parts import Parts
from trn.proto.records import ServedDetails
from trn.registry.reader import RegistryReader

Text = Annotated[str, msgspec.Meta(max_length=4096)]
ServedName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
Percent = Annotated[float, msgspec.Meta(ge=0, lt=100)]


class ServedQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class ServedPath(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: ServedName  # or the id of its server's run
    limit: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 100  # of the promotions


class PromoteBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: Text  # RUN[@best|@latest|@STEP], or @… of the run that is served
    action: Annotated[str, msgspec.Meta(pattern="^(promote|shadow|split)$")] = "promote"
    percent: Percent = 0.0  # of the requests, with split
    gate: dict[str, Any] = {}  # laid over the gate of the server's job
    promotion_id: Text = ""  # a repeat with the same one returns the same promotion


class RollbackBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    promotion_id: Text = ""


class PromoteRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: ServedName
    body: PromoteBody


class RollbackRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: ServedName
    body: RollbackBody


class ServedList(msgspec.Struct, frozen=True, kw_only=True):
    served: list[ServedModel]


@endpoint("GET", "/served", ServedList)
async def list_served(parts: Parts, call: Call[ServedQuery]) -> Response:
    """The served names, with what they answer with now; also of servers that have ended."""
    found = await parts.stores.read(lambda reader: reader.all_served())
    return json_answer(ServedList(served=found), call.accept_encoding)


@endpoint("GET", "/served/{name}", ServedDetails)
async def get_served(parts: Parts, call: Call[ServedPath]) -> Response:
    """A served name and its promotions, the newest first."""

    def read(reader: RegistryReader) -> ServedDetails:
        served = reader.served(call.asked.name)
        return ServedDetails(
            served=served, promotions=tuple(reader.promotions(served.name, call.asked.limit))
        )

    return json_answer(await parts.stores.read(read), call.accept_encoding)


@endpoint("POST", "/served/{name}/promote", Promotion, status=201)
async def promote(parts: Parts, call: Call[PromoteRequest]) -> Response:
    """Change the model that a name answers with: recorded when it answers. What became of it is in `GET /served/{name}`."""
    body = call.asked.body
    made = await parts.daemon.calls.promote(
        call.asked.name,
        body.model,
        action=body.action,
        percent=body.percent,
        gate=body.gate,
        by="http",
        promotion_id=body.promotion_id,
    )
    return json_answer(made, call.accept_encoding, status=201)


@endpoint("POST", "/served/{name}/rollback", Promotion, status=201)
async def rollback(parts: Parts, call: Call[RollbackRequest]) -> Response:
    """End a shadow or a split, else go back to the model that answered before. As `promote`."""
    body = call.asked.body
    made = await parts.daemon.calls.rollback(call.asked.name, by="http", promotion_id=body.promotion_id)
    return json_answer(made, call.accept_encoding, status=201)


ENDPOINTS = [list_served, get_served, promote, rollback]
