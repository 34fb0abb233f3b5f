"""What an operator may set: `settings.toml` in the home. Everything has a default that suits one machine."""

import re
from pathlib import Path
from typing import Annotated, Any

import msgspec

from trn.core.errors import InvalidRequestError, SettingsError
from trn.core.runs import LOCAL_POOL

MAX_PORT = 65535
Seconds = Annotated[float, msgspec.Meta(gt=0)]
EXECUTOR = "executor"  # of a pool: its kind
_POOL_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")


class DeviceSetting(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A device as the operator says it is."""

    id: Annotated[str, msgspec.Meta(pattern=r"^(cuda|rocm):\d+$")]
    name: str = "a device of the settings"
    memory_mb: int = 0


class InventorySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Stands in for what the machine would say of itself; what is left out is still detected."""

    devices: list[DeviceSetting] | None = None
    cpus: int | None = None
    memory_mb: int | None = None


class ListenSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The daemon listens on its socket; on TCP only where this names an address."""

    address: str = ""  # host:port
    certificate: str = ""  # PEM files
    private_key: str = ""
    is_insecure: bool = False  # without TLS, on loopback only; the token is still asked for


class HttpSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the page and the HTTP API are. With an address, the daemon keeps them there."""

    address: str = ""  # host:port
    certificate: str = ""  # PEM files; another address than loopback needs them
    private_key: str = ""
    names: list[str] = []  # under which browsers reach it, besides the address: gpu-box.lan


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The daemon's settings."""

    listen: ListenSettings = ListenSettings()
    http: HttpSettings = HttpSettings()
    inventory: InventorySettings = InventorySettings()
    # Variables that a run always takes over from who submits it, where they are set there: names, or patterns (WANDB_*).
    pass_env: list[str] = []
    event_bus: str = ""  # a URL, to which every event is published; it may hold a password
    # By name, besides `local`: `executor` is the kind, the rest are options that this kind reads.
    pools: dict[str, dict[str, Any]] = {}

    heartbeat_timeout_s: Seconds = 60.0  # a worker that is silent for so long is ended
    start_timeout_s: Seconds = 600.0  # from its launch to a worker's first event
    kill_patience_s: Seconds = 15.0  # beyond a job's own grace, before SIGKILL
    backfill_patience_s: Seconds = 300.0  # a run that waited for so long is not overtaken any more
    sweep_s: Seconds = 10.0  # how often the dispatcher looks at the queue without a wake-up
    maintenance_s: Seconds = 60.0
    idle_exit_s: Seconds | None = None  # end the daemon when nothing ran and no client watched for so long
    max_config_bytes: int = 1 << 20
    max_snapshot_bytes: int = 256 << 20
    min_free_bytes: int = 64 << 20  # below it the daemon neither starts nor launches
    max_log_bytes: Annotated[int, msgspec.Meta(ge=4096)] = (
        64 << 20
    )  # then a log file is renamed, and another begun
    min_heartbeats_missed: int = 6  # a job's own `heartbeat_s` times this, where that is longer

    def __post_init__(self) -> None:
        for name, pool in self.pools.items():
            if name == LOCAL_POOL:
                raise ValueError(
                    f"pools.{LOCAL_POOL} is always there and cannot be changed: give the pool another name"
                )
            if not _POOL_NAME.fullmatch(name):
                raise ValueError(
                    f"pools: found the name {name[:60]!r}, expected at most 63 of a-z, 0-9, - and _"
                )
            if not isinstance(pool.get(EXECUTOR), str):
                raise TypeError(f"pools.{name}.{EXECUTOR}: expected the kind of executor as text")

    @property
    def pool_names(self) -> list[str]:
        """Where runs may start."""
        return sorted([LOCAL_POOL, *self.pools])


def read_address(text: str) -> tuple[str, int]:
    """(host, port) of `host:port`. InvalidRequestError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) > MAX_PORT:
        raise InvalidRequestError(f"the address is {text!r}, expected HOST:PORT as in 127.0.0.1:8080")
    return host.strip("[]"), int(port)


def refuse_open_http(address: str, settings: Path) -> InvalidRequestError:
    """For an address of the page that other machines can reach, where there is no TLS."""
    return InvalidRequestError(
        f"the address {address} can be reached from other machines, and there is no TLS: set certificate and"
        f" private_key under [http] in {settings}, or use 127.0.0.1 (`ssh -L` reaches it from elsewhere)"
    )


def read_settings(path: Path) -> Settings:
    """The settings in that file; the defaults where there is none."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return Settings()
    except OSError as fault:
        raise SettingsError(f"the settings {path} cannot be read: {fault.strerror}") from fault
    try:
        return msgspec.toml.decode(text, type=Settings)
    except msgspec.MsgspecError as fault:
        raise SettingsError(f"the settings {path} are not valid: {fault}") from fault
