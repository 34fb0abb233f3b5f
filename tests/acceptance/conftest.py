"""Fixtures of the acceptance tests; `world`, `browser` and `visit` are for the page in a browser (test_page_*.py)."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))
from warm_python import launchers_folder

if TYPE_CHECKING:
    from page_browser import Visitor
    from page_world import PageWorld
    from playwright.sync_api import Browser

    Visit = Callable[..., Visitor]


@pytest.fixture(scope="module")
def warm_launchers() -> Iterator[None]:
    """Launchers that are started in the module are forked from a process that has torch imported: seconds saved for each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", launchers_folder())
        yield


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator["PageWorld"]:
    """Tests only add runs of their own to it."""
    from page_browser import need_chromium
    from page_world import PageWorld

    need_chromium()
    with PageWorld(tmp_path_factory.mktemp("page")) as world:
        world.add_runs()
        yield world


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    """Of one module: while it is open no test of this process can start an event loop."""
    from page_browser import open_browser

    with open_browser() as browser:
        yield browser


@pytest.fixture
def visit(browser: "Browser") -> Iterator["Visit"]:
    """Open browsers of persons, with `Visitor`'s options. At the end none of them may have complained."""
    from page_browser import Visitor

    visitors: list[Visitor] = []

    def open_one(**options: bool) -> Visitor:
        visitors.append(Visitor(browser, **options))
        return visitors[-1]

    yield open_one
    for visitor in visitors:
        visitor.close()
    for visitor in visitors:
        visitor.complaints.check()
