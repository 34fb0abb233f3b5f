"""The pools of the settings and the executor of each. A run's workers are started, found and read through its own pool's.

`local` is this machine and always there. A kind of executor is a row of KINDS: a module with `Options`, what a pool of this
kind may set, and `load(site, options)`, which builds the executor. It is imported if a pool is of this kind.
"""

import logging
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import msgspec

from trn.core.errors import SettingsError, UnavailableError
from trn.core.runs import LOCAL_POOL
from trn.core.settings import EXECUTOR
from trn.executors.base import Executor, Site

logger = logging.getLogger("trn.executors")

LOCAL = "local"
KINDS = {LOCAL: "trn.executors.local.executor"}


class Pools:
    """Gives the executor of a pool. `of` is for any thread, the rest for the loop's."""

    def __init__(self, executors: Mapping[str, Executor]) -> None:
        self._executors = dict(executors)
        self._missing: dict[str, None] = {}  # pools that were asked for, in this order

    def __contains__(self, pool: str) -> bool:
        return pool in self._executors

    @property
    def names(self) -> list[str]:
        return sorted(self._executors)

    @property
    def has_others(self) -> bool:
        """Whether there are others than this machine."""
        return len(self._executors) > 1

    @property
    def warnings(self) -> list[str]:
        """Of pools that the settings do not name any more, though runs are in them."""
        return [
            f"runs are in the pool {pool!r}, which is not in settings.toml. Nothing is known of their workers until"
            f" [pools.{pool}] is there again and the daemon is restarted"
            for pool in self._missing
        ]

    def of(self, pool: str) -> Executor:
        """UnavailableError if it is not in the settings any more: what its workers do is not known then."""
        try:
            return self._executors[pool]
        except KeyError:
            self._missing[pool] = None
            raise UnavailableError(
                f"the pool {pool!r} is not in settings.toml: add [pools.{pool}] again, and restart the daemon"
            ) from None

    async def start(self) -> None:
        for executor in self._executors.values():
            await executor.start()
        if self.has_others:
            logger.info("pools: %s", ", ".join(self.names))

    async def aclose(self) -> None:
        for executor in self._executors.values():
            await executor.aclose()


def load_pools(settings: Mapping[str, Mapping[str, Any]], site: Site) -> Pools:
    """The pools of the settings, and `local`. SettingsError where a pool's kind or option is not known."""
    executors = {LOCAL_POOL: _load(LOCAL, {}, msgspec.structs.replace(site, pool=LOCAL_POOL))}
    for pool, options in settings.items():
        kind = options[EXECUTOR]
        if kind == LOCAL or kind not in KINDS:
            raise _refuse(site, f"pools.{pool}.{EXECUTOR}: found {kind!r}, {_say_kinds()}")
        given = {name: value for name, value in options.items() if name != EXECUTOR}
        executors[pool] = _load(kind, given, msgspec.structs.replace(site, pool=pool))
    return Pools(executors)


def _load(kind: str, given: Mapping[str, Any], site: Site) -> Executor:
    module = import_module(KINDS[kind])
    try:
        options = msgspec.convert(given, module.Options)
    except msgspec.ValidationError as fault:
        raise _refuse(site, f"pools.{site.pool}: {fault}") from fault
    executor: Executor = module.load(site, options)
    return executor


def _refuse(site: Site, problem: str) -> SettingsError:
    return SettingsError(f"the settings {site.home.settings} are not valid: {problem}")


def _say_kinds() -> str:
    others = ", ".join(kind for kind in KINDS if kind != LOCAL)
    if not others:
        return f"but this release has only {LOCAL!r}, this machine, which is always there: remove the pool"
    return f"expected one of {others} ({LOCAL!r} is this machine, which is always there)"
