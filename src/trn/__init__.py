"""The operator side of trn: client, command line and daemon."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trn.client.client import AsyncClient
    from trn.client.sync_client import Client

__all__ = ["AsyncClient", "Client"]

_WHERE = {"AsyncClient": "trn.client.client", "Client": "trn.client.sync_client"}


def __getattr__(name: str) -> object:
    """The clients, loaded when they are first asked for: `import trn` stays cheap."""
    if name not in _WHERE:
        raise AttributeError(f"module 'trn' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_WHERE[name]), name)
