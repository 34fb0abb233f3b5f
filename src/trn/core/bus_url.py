"""The URL of an event bus: which plug-in it names, and how it may be shown."""

import re
from typing import NamedTuple
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from trn.core.errors import InvalidRequestError

EVENT_BUS_VARIABLE = (
    "TRN_EVENT_BUS"  # by which `trn daemon start` hands it on: a command line is for all to read
)
# Ours, and so known to hold no secret; whatever else a URL says may be one.
MAX_PORT = 65535
OPTIONS = ("prefix", "maxlen", "commands")


class BusUrl(NamedTuple):
    """A URL, taken apart. `raw` may hold a password: it goes to the bus and nowhere else."""

    raw: str
    scheme: str
    shown: str  # for logs, errors and status: without user, password and options that are not ours
    options: dict[str, str]  # those that are ours

    def __repr__(self) -> str:
        return f"BusUrl({self.shown})"


def read_bus_url(url: str) -> BusUrl:
    """InvalidRequestError where it is none; its text shows nothing of what was given but the scheme."""
    scheme, mark, _ = url.partition("://")
    fault = InvalidRequestError(
        "the event bus is no URL: expected one like redis://[user:password@]host:port/db, with '%', '/', '?', '#' and"
        " '@' in a password written as %25, %2F, %3F, %23 and %40"
    )
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        # Its own text may have a piece of the password in it; digits alone at the end are a port.
        found = re.search(r"[@/]\[?[\w.:-]*\]?:(\d+)(/\d*)?\Z", url)
        if found is not None and int(found[1]) > MAX_PORT:
            raise InvalidRequestError(
                f"the event bus's port is out of range: expected 0 to {MAX_PORT}"
            ) from None
        raise fault from None
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    # A password with a '#' or '?' in it that was not written as %23 or %3F: its beginning would pass for host and port.
    is_cut = bool(parts.fragment) or any("@" in name or "@" in value for name, value in query.items())
    if not mark or not scheme or not (host or parts.path.strip("/")) or "@" in unquote(parts.path) or is_cut:
        raise fault
    options = {name: query[name] for name in OPTIONS if name in query}
    where = f"[{host}]" if ":" in host else host
    at = f"{where}:{port}" if port is not None else where
    asked = f"?{urlencode(options)}" if options else ""
    return BusUrl(
        raw=url, scheme=scheme.lower(), shown=f"{scheme.lower()}://{at}{parts.path}{asked}", options=options
    )
