"""What a person does with the table of runs: open it, find runs, watch them, choose some; also by keyboard alone."""

import json
from typing import TYPE_CHECKING

from page_browser import ARGUMENTS, Visitor, find_barriers, need_chromium
from page_world import EVIL, PageWorld, run_trn
from playwright.sync_api import Locator, Page, expect

if TYPE_CHECKING:
    from conftest import Visit


def row(page: Page, run_id: str) -> Locator:
    return page.get_by_role("row").filter(has=page.get_by_role("link", name=run_id, exact=True))


def names(page: Page) -> list[str]:
    return page.locator("tbody .run-name a").all_inner_texts()


def expect_names(page: Page, *run_ids: str) -> None:
    """These rows, in any order, and no others."""
    expect(page.locator("tbody .run-name a")).to_have_count(len(run_ids))
    assert set(names(page)) == set(run_ids)


def test_the_link_of_trn_ui_opens_the_page_once(world: PageWorld, visit: "Visit") -> None:
    answer = json.loads(run_trn(world, "ui", "--json"))
    visitor = visit()
    visitor.page.goto(answer["url"])
    expect(row(visitor.page, "straight")).to_contain_text("Completed")
    assert visitor.page.url == f"{world.gateway.url}/", "the token does not stay in the address"
    visitor.page.reload()
    expect(row(visitor.page, "straight")).to_be_visible()

    late = visit()
    late.complaints.expect("status of 401")
    late.page.goto(answer["url"])
    expect(late.page.get_by_role("heading", name="Not signed in")).to_be_visible()
    expect(late.page.get_by_role("main")).to_contain_text(
        "Run trn ui in a terminal and open the link that it prints."
    )


def test_pages_that_were_left_do_not_block_the_next_one(world: PageWorld, visit: "Visit") -> None:
    """A person's browser keeps left pages for the way back. It has six connections to a server, for all of them."""
    own = visit().context.browser
    assert own is not None
    browser = own.browser_type.launch(
        executable_path=need_chromium(),
        args=list(ARGUMENTS),
        ignore_default_args=["--disable-back-forward-cache"],
    )
    try:
        page = Visitor(browser).log_in(world)
        for path in ("/", "/machine") * 5:
            page.goto(world.gateway.url + path, timeout=20_000)
            expect(page.get_by_role("img", name="Connection: Live")).to_be_visible()
    finally:
        browser.close()


def test_filters_find_runs_and_stay_in_the_link(world: PageWorld, visit: "Visit") -> None:
    page = visit().log_in(world)
    filter_box = page.get_by_role("searchbox", name="Filter runs")
    filter_box.fill("/^(straight|other)$/ loss<0.3")
    expect_names(page, "straight")
    filter_box.fill("-evil -live")
    page.get_by_role("search").get_by_role("button", name="State").click()
    page.get_by_role("checkbox", name="Failed").check()
    page.keyboard.press("Escape")
    expect_names(page, "broken")

    link = page.url
    page.get_by_role("button", name="Clear filters").click()
    expect(row(page, "straight")).to_be_visible()
    page.goto(link)
    expect_names(page, "broken")
    expect(page.get_by_role("searchbox", name="Filter runs")).to_have_value("-evil -live")

    filter_box.fill("no such run")
    expect(page.get_by_role("heading", name="No runs match these filters")).to_be_visible()


def test_a_run_that_is_submitted_elsewhere_appears_and_moves_on_by_itself(
    world: PageWorld, visit: "Visit"
) -> None:
    page = visit().log_in(world)
    expect(row(page, "straight")).to_be_visible()
    gate = world.gate("arriving")
    gate.open_to(7)
    world.start("arriving", 20, hyperparams={"gate": str(gate.path)})
    expect(row(page, "arriving")).to_contain_text("Running")
    expect(row(page, "arriving")).to_contain_text("7 / 20")
    gate.open_to(20)
    expect(row(page, "arriving")).to_contain_text("Completed")
    expect(row(page, "arriving")).to_contain_text("20 / 20")


def test_the_table_works_without_a_mouse(world: PageWorld, visit: "Visit") -> None:
    page = visit().log_in(world, "/?sort=run&q=-arriving")
    expect(row(page, "broken")).to_be_visible()
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to content")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_role("main")).to_be_focused()
    page.keyboard.press("/")
    expect(page.get_by_role("searchbox", name="Filter runs")).to_be_focused()
    page.keyboard.type(" /^(other|straight)$/")
    expect_names(page, "other", "straight")
    page.keyboard.press("Escape")
    for key in ("j", "x", "j", "x"):
        page.keyboard.press(key)
    expect(page.get_by_role("region", name="Selected runs")).to_contain_text("2 runs selected")
    page.keyboard.press("c")
    expect(page.get_by_role("heading", name="Compare 2 runs")).to_be_visible()
    expect(page.get_by_role("main")).to_be_focused()
    page.go_back()
    expect_names(page, "other", "straight")
    page.keyboard.press("j")
    page.keyboard.press("o")
    expect(page.get_by_role("heading", name="other", exact=True)).to_be_visible()
    page.keyboard.press("g")
    page.keyboard.press("r")
    expect(page.get_by_role("heading", name="Runs", exact=True)).to_be_visible()
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_contain_text("Compare selected runs")
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)


def test_every_row_and_its_menu_can_be_reached_with_tab(world: PageWorld, visit: "Visit") -> None:
    page = visit().log_in(world, "/?q=/^other$/")
    expect(row(page, "other")).to_be_visible()
    reached = []
    for _ in range(40):
        page.keyboard.press("Tab")
        name = page.evaluate("document.activeElement.ariaLabel || document.activeElement.innerText || ''")
        reached.append(name)
        if name == "Actions of other":
            break
    wanted = [
        "trn: all runs",
        "Machine",
        "Submit",
        "Filter runs",
        "Columns",
        "Select other",
        "other",
        "Actions of other",
    ]
    assert [name for name in reached if name in wanted] == wanted, reached
    page.keyboard.press("Enter")
    expect(page.get_by_role("menuitem", name="Name, notes and tags…")).to_be_focused()
    page.keyboard.press("ArrowDown")
    expect(page.get_by_role("menuitem", name="Resume…")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="Actions of other")).to_be_focused()


def test_names_and_tags_that_are_code_are_shown_as_text(world: PageWorld, visit: "Visit") -> None:
    page = visit().log_in(world)
    expect(row(page, "evil")).to_contain_text(EVIL)
    expect(row(page, "evil").get_by_role("button", name=f"{EVIL}: {EVIL}")).to_be_visible()
    for choice in ("By group", f"By tag {EVIL}"):
        page.get_by_role("combobox", name="Group by").select_option(choice)
        expect(page.get_by_role("button", name=f"{EVIL} 1 1 completed")).to_be_visible()
    page.get_by_role("search").get_by_role("button", name="Columns").click()
    expect(page.get_by_role("checkbox", name=EVIL, exact=True)).to_be_visible()
    assert page.locator("img").count() == 0


def test_name_notes_and_tags_are_written_and_shown(world: PageWorld, visit: "Visit") -> None:
    world.submit("noted", 3)
    page = visit().log_in(world, "/?q=/^noted$/")
    row(page, "noted").get_by_role("button", name="Actions of noted").click()
    page.get_by_role("menuitem", name="Name, notes and tags…").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("textbox", name="Name", exact=True).fill("Baseline, 3 layers")
    dialog.get_by_role("textbox", name="Notes").fill("kept for the paper")
    dialog.get_by_role("button", name="Save").click()
    expect(page.get_by_role("dialog")).to_have_count(0)
    expect(row(page, "noted")).to_contain_text("Baseline, 3 layers")
    page.goto(f"{world.gateway.url}/runs/noted")
    expect(page.locator(".run-head")).to_contain_text("Baseline, 3 layers")
    expect(page.get_by_role("main")).to_contain_text("kept for the paper")


def test_a_person_is_alerted_of_a_failed_run_and_of_a_metric_that_passes_a_limit(
    world: PageWorld, visit: "Visit"
) -> None:
    page = visit().log_in(world)
    expect(row(page, "straight")).to_be_visible()
    page.keyboard.press("a")
    dialog = page.get_by_role("dialog", name="Alerts")
    dialog.get_by_role("checkbox", name="A run fails").check()
    limits = dialog.get_by_role("textbox", name="A metric passes a limit")
    limits.fill("loss")
    expect(limits).to_have_attribute("aria-invalid", "true")
    expect(dialog.get_by_role("button", name="Save")).to_be_disabled()
    limits.fill("loss<0.9")
    assert find_barriers(page) == []
    dialog.get_by_role("button", name="Save").click()
    page.reload()
    expect(page.get_by_role("button", name="Alerts: on")).to_be_visible()
    expect(page.get_by_role("main")).to_contain_text("straight")
    gate = world.gate("alerting")
    gate.open_to(2)
    world.start("alerting", 9, hyperparams={"gate": str(gate.path), "fail_at": 8})
    expect(row(page, "alerting")).to_contain_text("2 / 9")
    toasts = page.locator(".toasts")
    assert "alerting" not in toasts.inner_text(), "nothing has happened yet"
    gate.open_to(9)
    expect(toasts).to_contain_text("alerting: loss<0.9 holds at step")
    expect(toasts).to_contain_text("alerting: failed at step 7")
    toasts.get_by_role("link", name="alerting: failed").click()
    expect(page.get_by_role("heading", name="alerting", exact=True)).to_be_visible()
    expect(toasts).not_to_contain_text("failed at step 7")
