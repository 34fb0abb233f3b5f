"""Logging in and out."""

import msgspec
from starlette.responses import Response

from trn.core.errors import UnauthenticatedError
from trn.gateway.answers import json_answer
from trn.gateway.endpoints import Call, Nothing, endpoint
from trn.gateway.parts import Parts


class LoginToken(msgspec.Struct, frozen=True, kw_only=True):
    """For one login within five minutes."""

    token: str
    url: str  # the page, with the token in its fragment: that part is sent to no server


class LoginBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    token: str


class Login(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    body: LoginBody


@endpoint("POST", "/login-tokens", LoginToken, status=201)
async def draw_login_token(parts: Parts, call: Call[Nothing]) -> Response:  # noqa: ARG001
    """Draw a single-use token that logs a browser in."""
    token = parts.credentials.draw_login_token()
    return json_answer(LoginToken(token=token, url=f"{parts.url}/#token={token}"), status=201)


@endpoint("POST", "/login", status=204)
async def log_in(parts: Parts, call: Call[Login]) -> Response:
    """Exchange a login token for a session cookie. Needs no other credential."""
    session = parts.credentials.log_in(call.asked.body.token)
    if session is None:
        raise UnauthenticatedError("this link was used before or is too old: `trn ui` makes a new one")
    answer = Response(status_code=204)
    _set_cookie(parts, answer, session)
    return answer


@endpoint("POST", "/logout", status=204)
async def log_out(parts: Parts, call: Call[Nothing]) -> Response:
    """End the session of this cookie."""
    parts.credentials.log_out(call.holder)
    answer = Response(status_code=204)
    _set_cookie(parts, answer, "", max_age=0)
    return answer


def _set_cookie(parts: Parts, answer: Response, value: str, *, max_age: int | None = None) -> None:
    answer.set_cookie(
        parts.credentials.cookie_name,
        value,
        max_age=max_age,
        path="/",
        secure=parts.url.startswith("https:"),
        httponly=True,
        samesite="strict",
    )


ENDPOINTS = [draw_login_token, log_in, log_out]
