"""Secrets that are not printed by accident, and their removal from text."""

import hmac
import logging
import re
import traceback
from collections.abc import Iterable, Mapping
from typing import NoReturn, Self
from urllib.parse import quote

MASK = "***"

# Everything from `?` or `#` on and `user:password@` may be a credential (presigned URLs, SAS tokens).
_URL = re.compile(r"(?P<scheme>\b[A-Za-z][A-Za-z0-9+.\-]*://)(?P<rest>[^\s'\"<>]+)")


# Parts of a name, as `_` divides it; TOKENIZERS_PARALLELISM and MAX_TOKENS are none.
_SECRET_PARTS = frozenset(
    {
        "TOKEN",
        "KEY",
        "SECRET",
        "SECRETS",
        "PASSWORD",
        "PASSWD",
        "PASSPHRASE",
        "CREDENTIAL",
        "CREDENTIALS",
        "PAT",
    }
)
_SECRET_ENDS = ("TOKEN", "APIKEY", "SECRET", "PASSWORD", "PASSWD", "CREDENTIALS")
MIN_MASKED = 6  # characters; a shorter one would be found everywhere


def looks_secret(name: str) -> bool:
    """Whether a variable of that name is likely to hold a secret: HF_TOKEN, WANDB_API_KEY, DB_PASSWORD."""
    first, *others = re.split(r"[^A-Z0-9]+", name.upper())
    parts = [first, *others]
    if any(part in _SECRET_PARTS or part.endswith(_SECRET_ENDS) for part in parts):
        return True
    return "PWD" in others  # PWD alone is the current folder


class Secret:
    """A string that only `reveal()` returns: not repr, str, format, vars, copies or pickle."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def reveal(self) -> str:
        return self._value

    def __repr__(self) -> str:
        return f"Secret({MASK})"

    def __str__(self) -> str:
        return MASK

    def __format__(self, spec: str) -> str:
        return format(MASK, spec)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Secret):
            return NotImplemented
        return hmac.compare_digest(self._value.encode(), other._value.encode())

    def __hash__(self) -> int:
        return hash((Secret, self._value))

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Secret cannot be pickled: pass the token through the environment")


def strip_url_secrets(text: str) -> str:
    """`text` with the user info, query and fragment of every URL in it replaced by `***`."""
    return _URL.sub(_strip_one_url, text)


def _strip_one_url(match: re.Match[str]) -> str:
    rest = match["rest"]
    path_end = min((rest.find(mark) for mark in "?#" if mark in rest), default=len(rest))
    head, tail = rest[:path_end], rest[path_end:]
    # An unencoded password may contain `?` or `#`: then the host comes after them.
    authority, slash, path = head.partition("/")
    if "@" in authority:
        authority = f"{MASK}@{authority.rpartition('@')[2]}"
    elif not slash and "@" in tail:
        return f"{match['scheme']}{MASK}"
    return f"{match['scheme']}{authority}{slash}{path}{tail[0] + MASK if tail else ''}"


class SecretRedactor(logging.Filter):
    """Removes known secrets and URL credentials from text.

    As a logging filter it belongs on handlers: a filter on a logger does not see the records of its children.
    """

    def __init__(self, secrets: Iterable[Secret | str | None] = ()) -> None:
        super().__init__()
        self._needles: tuple[Secret, ...] = ()
        for secret in secrets:
            self.add(secret)

    def add(self, secret: Secret | str | None) -> None:
        value = secret.reveal() if isinstance(secret, Secret) else secret
        if not value:
            return
        needles = {needle.reveal() for needle in self._needles} | {value, quote(value, safe="")}
        # Longest first, so that a secret which contains another one leaves no rest of itself.
        self._needles = tuple(Secret(needle) for needle in sorted(needles, key=len, reverse=True))

    def add_variables(self, environ: Mapping[str, str], names: Iterable[str]) -> None:
        """The values of these, unless they are so short that they occur in ordinary text."""
        for name in names:
            if len(environ.get(name, "")) >= MIN_MASKED:
                self.add(environ[name])

    def redact(self, text: str) -> str:
        for needle in self._needles:
            text = text.replace(needle.reveal(), MASK)
        return strip_url_secrets(text)

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        redacted = self.redact(message)
        if redacted != message:
            record.msg, record.args = redacted, None
        if record.exc_info and record.exc_info[1] is not None:
            lines = "".join(traceback.format_exception(record.exc_info[1])).rstrip("\n")
            clean = self.redact(lines)
            if clean != lines:
                # A formatter prefers `exc_text`; without `exc_info` no other handler formats it again.
                record.exc_text, record.exc_info = clean, None
        if record.exc_text:
            record.exc_text = self.redact(record.exc_text)
        if record.stack_info:
            record.stack_info = self.redact(record.stack_info)
        return True
