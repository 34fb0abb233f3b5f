"""What a person starts from the page, until its end; and what an open page says when its run or its gateway is gone."""

import hashlib
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from page_browser import find_barriers
from page_world import TRAINERS, PageWorld
from playwright.sync_api import Locator, Page, expect

from trn.client.gateway_start import stop_gateway

if TYPE_CHECKING:
    from conftest import Visit


def act(page: Page, label: str) -> Locator:
    """The dialog of an action of the run that is shown, which has ended."""
    head = page.locator(".run-head")
    expect(head).to_contain_text("Completed")
    if head.get_by_role("button", name=label).count() == 0:
        head.get_by_role("button", name="More actions").click()
        page.get_by_role("menuitem", name=label).click()
    else:
        head.get_by_role("button", name=label).click()
    return page.get_by_role("dialog")


def test_a_run_that_trained_all_its_steps_is_resumed_with_more_of_them(
    world: PageWorld, visit: "Visit"
) -> None:
    world.submit("longer", None, dataset={"generated": True}, max_steps=20)
    page = visit().log_in(world, "/runs/longer")
    dialog = act(page, "Resume…")
    steps = dialog.get_by_role("textbox", name="max_steps")
    expect(steps).to_have_value("20")
    expect(dialog.get_by_role("button", name="Resume")).to_be_disabled()
    assert find_barriers(page) == []
    steps.press("Enter")
    expect(dialog).to_be_visible()
    steps.fill("30")
    steps.press("Enter")
    expect(page.get_by_role("heading", name="longer.2", exact=True)).to_be_visible()
    head = page.locator(".run-head")
    expect(head).to_contain_text("Completed")
    expect(head).to_contain_text("step 30 of 30")
    expect(head).to_contain_text("longer at step 20")


def test_a_run_is_removed_with_the_run_that_continues_it_and_an_open_page_of_it_says_so(
    world: PageWorld, visit: "Visit"
) -> None:
    visitor = visit()
    page = visitor.log_in(world, "/?q=/^kept$/")
    world.submit("parted", None, dataset={"generated": True}, max_steps=20)
    page.goto(f"{world.gateway.url}/runs/parted")
    dialog = act(page, "Run again…")
    dialog.get_by_role("button", name="Run again").click()
    expect(page.locator(".run-head")).to_contain_text("Completed")
    world.send("POST", "/runs/parted/resume", {"overrides": {"max_steps": 30}})
    world.wait_end("parted.3")

    other = visitor.context.new_page()
    other.goto(f"{world.gateway.url}/runs/parted.3?tab=log")
    expect(other.get_by_role("log")).to_contain_text("completed at step 30")
    page.goto(f"{world.gateway.url}/runs/parted")
    dialog = act(page, "Remove…")
    expect(dialog).to_contain_text("parted.3 continues parted, and is removed, too.")
    expect(dialog).to_contain_text("and frees")
    page.keyboard.press("Escape")
    page.goto(f"{world.gateway.url}/?q=/^parted/")
    for run_id in ("parted", "parted.2"):
        page.get_by_role("checkbox", name=f"Select {run_id}", exact=True).check()
    page.get_by_role("button", name="Remove…").click()
    dialog = page.get_by_role("dialog", name="Remove 3 runs?")
    expect(dialog).to_contain_text("and frees")
    dialog.get_by_role("button", name="Remove", exact=True).click()
    expect(page.get_by_role("heading", name="No runs match these filters")).to_be_visible()
    expect(other.get_by_role("heading", name="Run parted.3 was removed")).to_be_visible()
    for run_id in ("parted", "parted.2", "parted.3"):
        assert world.get(f"/runs/{run_id}").status == 404
        assert not world.home.run(run_id).root.exists()


def test_a_run_that_a_live_one_continues_is_not_removed(own_world: PageWorld, visit: "Visit") -> None:
    world = own_world
    gate = world.gate("begun")
    gate.open_to(20)
    world.submit(
        "begun", None, dataset={"generated": True}, max_steps=20, hyperparams={"gate": str(gate.path)}
    )
    assert world.send("POST", "/runs/begun/resume", {"overrides": {"max_steps": 40}}).status < 300
    page = visit().log_in(world, "/runs/begun")
    dialog = act(page, "Remove…")
    expect(dialog).to_contain_text("begun.2 continues begun and has not ended: cancel first.")
    expect(dialog.get_by_role("button", name="Remove", exact=True)).to_be_disabled()


def test_a_tag_of_a_run_opens_the_table_of_its_runs(world: PageWorld, visit: "Visit") -> None:
    page = visit().log_in(world, "/runs/straight")
    page.get_by_role("button", name="kind: good").click()
    expect(page.get_by_role("heading", name="Runs", exact=True)).to_be_visible()
    expect(page.locator("tbody .run-name a")).to_have_count(1)


@pytest.fixture
def own_world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageWorld]:
    with PageWorld(tmp_path_factory.mktemp("restarted")) as world:
        yield world


def test_a_run_has_the_badge_of_a_check_of_its_own_code(own_world: PageWorld, visit: "Visit") -> None:
    world = own_world
    world.submit("checked", 20)
    page = visit().log_in(world, "/runs/checked")
    badge = page.locator(".run-head").get_by_text("certified")
    expect(page.locator(".run-head")).to_contain_text("Completed")
    assert badge.count() == 0
    for name, text in (("other", b"class Shown: ..."), ("own", (TRAINERS / "shown.py").read_bytes())):
        folder = world.home.checks / name
        folder.mkdir(parents=True)
        code = {"/elsewhere/shown.py": hashlib.sha256(text).hexdigest()}
        said = {"event": "certificate", "trainer": "shown:Shown", "is_sound": True, "code": code}
        (folder / "certificate.json").write_text(json.dumps(said))
        page.reload()
        expect(page.locator(".run-head")).to_contain_text("Completed")
        assert badge.count() == (1 if name == "own" else 0)
    page.get_by_role("link", name="Environment and data").click()
    page.get_by_role("button", name="Certificate").click()
    expect(page.get_by_role("region", name="Documents")).to_contain_text("is_sound true")
    page.goto(world.gateway.url)
    expect(page.get_by_role("row", name="checked").get_by_role("img", name="certified")).to_be_visible()


def test_an_open_page_goes_on_when_its_gateway_was_restarted_and_its_browser_has_signed_in_again(
    own_world: PageWorld, visit: "Visit"
) -> None:
    world = own_world
    world.submit("stays", 20)
    visitor = visit()
    visitor.complaints.expect("net::ERR_|status of 401")
    page = visitor.log_in(world, "/submit")
    page.get_by_role("textbox", name="trainer").fill("mine:Typed")
    other = visitor.context.new_page()
    other.goto(f"{world.gateway.url}/runs/stays")
    expect(other.locator(".run-head")).to_contain_text("Completed")

    stop_gateway(world.gateway, world.home)
    expect(other.get_by_role("alert")).to_contain_text("Nothing answers at this address.")
    assert find_barriers(other) == []
    world.start_gateway()
    expect(other.get_by_role("heading", name="Not signed in")).to_be_visible()
    assert find_barriers(other) == []
    visitor.context.new_page().goto(world.make_link())
    for each in (other, page):
        each.bring_to_front()
        expect(each.get_by_role("img", name="Connection: Live")).to_be_visible()
    expect(other.locator(".run-head")).to_contain_text("Completed")
    expect(page.get_by_role("textbox", name="trainer")).to_have_value("mine:Typed")
    world.submit("newer", 5)
    other.get_by_role("link", name="trn: all runs").click()
    expect(other.get_by_role("link", name="newer", exact=True)).to_be_visible()
