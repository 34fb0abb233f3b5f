"""Where the next page of a list begins: a number that orders it, and an id."""

import base64
import binascii

from trn.core.errors import InvalidRequestError


def make_page_token(number: int, last_id: str) -> str:
    return base64.urlsafe_b64encode(f"{number}/{last_id}".encode()).decode().rstrip("=")


def read_page_token(token: str) -> tuple[int, str] | None:
    if not token:
        return None
    try:
        text = base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)).decode()
        number, slash, last_id = text.partition("/")
        if not slash or not number.isascii() or not number.isdigit() or len(number) > 18:
            raise ValueError(text)
    except (binascii.Error, UnicodeError, ValueError) as fault:
        raise InvalidRequestError(
            f"page_token is {token[:60]!r}, expected one from an earlier answer: start with an empty one"
        ) from fault
    return int(number), last_id
