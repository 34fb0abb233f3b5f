"""The operator side of trn: client, command line and daemon."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trn.client.client import AsyncClient
    from trn.client.sync_client import Client
    from trn.core.errors import TrnError

__all__ = ["AsyncClient", "Client", "TrnError"]

_WHERE = {
    "AsyncClient": "trn.client.client",
    "Client": "trn.client.sync_client",
    "TrnError": "trn.core.errors",
}


def __getattr__(name: str) -> object:
    """The clients, loaded when they are first asked for: `import trn` stays cheap."""
    if name not in _WHERE:
        raise AttributeError(f"module 'trn' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_WHERE[name]), name)
