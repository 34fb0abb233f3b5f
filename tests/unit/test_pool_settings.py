"""Which pools there are, and which executor each has: from the settings, strictly."""

import asyncio
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from trn.core.errors import SettingsError, UnavailableError
from trn.core.home import Home
from trn.core.runs import LOCAL_POOL
from trn.core.settings import Settings, read_settings
from trn.executors import pools as pools_module
from trn.executors.base import Executor, Site
from trn.executors.fake import FakeExecutor
from trn.executors.local.executor import LocalExecutor
from trn.executors.pools import KINDS, Pools, load_pools


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    partition: str
    num_nodes: int = 1


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(pool=LOCAL_POOL, home=Home(tmp_path), start_timeout_s=60.0)


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[Site, Options]]:
    """A kind `fake`, as another row of the table; what its module was asked to load, by pool."""
    found: dict[str, tuple[Site, Options]] = {}

    def load(site: Site, options: Options) -> FakeExecutor:
        found[site.pool] = site, options
        return FakeExecutor()

    module = ModuleType("fake_kind")
    module.Options, module.load = Options, load  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fake_kind", module)
    monkeypatch.setitem(pools_module.KINDS, "fake", "fake_kind")
    return found


def test_without_settings_there_is_this_machine_alone(site: Site) -> None:
    pools = load_pools(Settings().pools, site)
    assert (pools.names, pools.has_others, pools.warnings) == ([LOCAL_POOL], False, [])
    assert isinstance(pools.of(LOCAL_POOL), LocalExecutor)
    assert Settings().pool_names == [LOCAL_POOL]


def test_every_kind_reads_its_options_strictly() -> None:
    for kind, name in KINDS.items():
        module = __import__(name, fromlist=["load"])
        assert callable(module.load), kind
        assert module.Options.__struct_config__.forbid_unknown_fields, kind


def test_a_pool_of_the_settings_gets_its_options_and_its_name(
    tmp_path: Path, site: Site, loaded: dict[str, Any]
) -> None:
    path = tmp_path / "settings.toml"
    path.write_text(
        '[pools.lab]\nexecutor = "fake"\npartition = "gpu"\n[pools.big]\nexecutor = "fake"\npartition = "b"\nnum_nodes = 2\n'
    )
    settings = read_settings(path)
    pools = load_pools(settings.pools, site)
    assert pools.names == settings.pool_names == ["big", "lab", LOCAL_POOL]
    assert {pool: options for pool, (_, options) in loaded.items()} == {
        "lab": Options(partition="gpu"),
        "big": Options(partition="b", num_nodes=2),
    }
    assert loaded["lab"][0] == msgspec.structs.replace(site, pool="lab")
    assert pools.of("lab") is not pools.of("big")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[pools.local]\nexecutor = "local"', "pools.local is always there and cannot be changed"),
        ('[pools."My Lab"]\nexecutor = "fake"', "found the name 'My Lab', expected at most 63 of a-z"),
        ('[pools.lab]\npartition = "gpu"', "pools.lab.executor: expected the kind of executor as text"),
        ("[pools.lab]\nexecutor = 3", "pools.lab.executor: expected the kind of executor as text"),
        ("pools = 3", "pools"),
    ],
)
def test_settings_of_a_pool_that_are_wrong_are_refused_with_their_place(
    text: str, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "settings.toml"
    path.write_text(text)
    with pytest.raises(SettingsError) as caught:
        read_settings(path)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("pool", "words"),
    [
        ({"executor": "slurm"}, "pools.lab.executor: found 'slurm', expected one of fake"),
        ({"executor": "local"}, "'local' is this machine, which is always there"),
        ({"executor": "fake"}, "missing required field `partition`"),
        ({"executor": "fake", "partition": 3}, "Expected `str`, got `int` - at `$.partition`"),
        ({"executor": "fake", "partition": "gpu", "accuont": "a"}, "unknown field `accuont`"),
    ],
)
def test_a_kind_or_an_option_that_is_not_known_is_refused(
    pool: dict[str, Any], words: str, site: Site, loaded: dict[str, Any]
) -> None:
    with pytest.raises(SettingsError) as caught:
        load_pools({"lab": pool}, site)
    assert "pools.lab" in str(caught.value)
    assert words in str(caught.value)


def test_where_there_is_no_other_kind_yet_it_is_said_so(site: Site) -> None:
    for kind in ("slurm", "local"):
        with pytest.raises(SettingsError) as caught:
            load_pools({"lab": {"executor": kind}}, site)
        assert f"pools.lab.executor: found {kind!r}, but this release has only 'local'" in str(caught.value)
        assert str(site.home.settings) in str(caught.value)


def test_a_pool_that_is_not_there_is_an_error_and_a_warning() -> None:
    pools = Pools({LOCAL_POOL: FakeExecutor()})
    with pytest.raises(UnavailableError, match=r"add \[pools\.lab\] again, and restart the daemon"):
        pools.of("lab")
    (warning,) = pools.warnings
    assert "'lab'" in warning


def test_all_executors_are_started_and_closed() -> None:
    calls: list[str] = []

    class Noting(FakeExecutor):
        async def start(self) -> None:
            calls.append("start")

        async def aclose(self) -> None:
            calls.append("close")

    executors: dict[str, Executor] = {LOCAL_POOL: Noting(), "lab": Noting()}
    pools = Pools(executors)

    async def live() -> None:
        await pools.start()
        await pools.aclose()

    asyncio.run(live())
    assert calls == ["start", "start", "close", "close"]
