"""What a person does with one run: watch it, look closer, read its log, play its videos, cancel it, fork it."""

import re
import time
from typing import TYPE_CHECKING

from page_browser import DEADLINE_MS, find_barriers, read_picture, wait_for_other_picture
from page_world import EVIL, EVIL_LINES, PageWorld
from playwright.sync_api import Locator, Page, expect

if TYPE_CHECKING:
    from conftest import Visit

LOSS = "train/loss"


def chart(page: Page, name: str = LOSS) -> Locator:
    return page.get_by_role("figure", name=name, exact=True)


def point_at(page: Page, part: float, name: str = LOSS) -> tuple[float, float]:
    """The place on the screen that is at a part of a chart's width."""
    box = chart(page, name).locator(".over").bounding_box()
    assert box is not None
    return box["x"] + box["width"] * part, box["y"] + box["height"] / 2


def read_at(page: Page, part: float, pattern: str) -> None:
    """Moves the pointer to a part of the chart's width until it reads that there: the chart may still be laid out."""
    readout = chart(page).locator(".readout")
    deadline = time.monotonic() + DEADLINE_MS / 1000
    while not re.search(pattern, readout.inner_text()):
        assert time.monotonic() < deadline, f"no {pattern} in {readout.inner_text()}"
        x, y = point_at(page, part)
        page.mouse.move(x - 2, y)
        page.mouse.move(x, y)


def drag(page: Page, start: float, end: float) -> None:
    page.mouse.move(*point_at(page, start))
    page.mouse.down()
    page.mouse.move(*point_at(page, end), steps=5)
    page.mouse.up()


def test_a_live_run_moves_on_by_itself(world: PageWorld, visit: "Visit") -> None:
    gate = world.gate("live")
    gate.open_to(10)
    world.start("live", 50, hyperparams={"gate": str(gate.path), "num_lines": 1})
    page = visit().log_in(world, "/runs/live")
    main = page.get_by_role("main")
    expect(main).to_contain_text("Running")
    expect(main).to_contain_text("step 10 of 50")
    expect(chart(page).locator(".readout")).not_to_be_empty()
    before, value = read_picture(page, LOSS), chart(page).locator(".readout").inner_text()
    gate.open_to(30)
    expect(main).to_contain_text("step 30 of 50")
    expect(chart(page).locator(".readout")).not_to_have_text(value)
    wait_for_other_picture(page, LOSS, before)

    page.get_by_role("link", name="Log", exact=True).click()
    expect(page.get_by_role("log")).to_contain_text("step 30, line 0")
    gate.open_to(50)
    expect(page.get_by_role("log")).to_contain_text("step 50, line 0")
    expect(main).to_contain_text("Completed")
    expect(main).to_contain_text("step 50 of 50")


def test_a_zoom_shows_a_part_in_all_charts_and_is_a_link(world: PageWorld, visit: "Visit") -> None:
    page = visit().log_in(world, "/runs/straight")
    expect(chart(page).locator(".readout")).not_to_be_empty()
    expect(chart(page, "train/lr").locator(".readout")).not_to_be_empty()
    whole, whole_lr = read_picture(page, LOSS), read_picture(page, "train/lr")
    drag(page, 0.3, 0.6)
    wait_for_other_picture(page, LOSS, whole)
    wait_for_other_picture(page, "train/lr", whole_lr)
    expect(page.get_by_role("button", name="Reset zoom")).to_be_visible()
    expect(page).to_have_url(re.compile(r"\?.*zoom="))

    page.reload()
    expect(page.get_by_role("button", name="Reset zoom")).to_be_visible()
    read_at(page, 0.5, r"step (2[0-9]|3[0-9])")
    page.mouse.move(0, 0)
    page.get_by_role("button", name="Reset zoom").click()
    expect(page.get_by_role("button", name="Reset zoom")).to_have_count(0)
    read_at(page, 0.999, r"step (5[89]|60)")


def test_any_metric_can_be_the_x_axis_and_that_is_a_link(world: PageWorld, visit: "Visit") -> None:
    page = visit().log_in(world, "/runs/straight")
    expect(chart(page).locator(".readout")).not_to_be_empty()
    before = read_picture(page, LOSS)
    page.get_by_role("combobox", name="Metric as x axis").select_option("train/lr")
    wait_for_other_picture(page, LOSS, before)
    expect(page).to_have_url(re.compile(r"x=m%3Atrain%2Flr"))
    read_at(page, 0.001, r"step 60, train/lr 0\.00094")  # it falls: the last step is at the left
    page.reload()
    read_at(page, 0.999, r"step 1, train/lr 0\.000999")
    drag(page, 0.6, 0.9)
    expect(page.get_by_role("button", name="Reset zoom")).to_be_visible()
    read_at(page, 0.5, r"step 1[3-8], ")
    page.get_by_role("button", name="step", exact=True).click()
    read_at(page, 0.999, r"step (5[89]|60)")


def test_a_chart_can_be_read_and_zoomed_by_keys(world: PageWorld, visit: "Visit") -> None:
    page = visit().log_in(world, "/runs/straight")
    expect(chart(page).locator(".readout")).not_to_be_empty()
    chart(page).get_by_label(f"Chart of {LOSS}").first.focus()
    page.keyboard.press("ArrowRight")
    expect(chart(page).locator(".readout")).to_contain_text("step 31")
    page.keyboard.press("+")
    expect(page.get_by_role("button", name="Reset zoom")).to_be_visible()
    page.keyboard.press("0")
    expect(page.get_by_role("button", name="Reset zoom")).to_have_count(0)
    page.keyboard.press("Enter")
    expect(chart(page)).to_contain_text("Fork from step 20")


def test_the_values_of_a_chart_are_a_table_too(world: PageWorld, visit: "Visit") -> None:
    page = visit().log_in(world, "/runs/straight")
    chart(page).get_by_role("button", name=f"Menu of {LOSS}").click()
    page.get_by_role("menuitem", name="Show as table").click()
    expect(page.get_by_role("dialog").get_by_role("row")).to_have_count(61)
    with page.expect_download() as download:
        page.get_by_role("dialog").get_by_role("button", name="Save as CSV").click()
    lines = download.value.path().read_text().splitlines()
    assert len(lines) == 61
    assert lines[1].startswith("1,")


def test_a_new_run_is_forked_from_a_point_of_the_curve(world: PageWorld, visit: "Visit") -> None:
    page = visit().log_in(world, "/runs/straight")
    expect(chart(page).locator(".readout")).not_to_be_empty()
    page.mouse.click(*point_at(page, 0.5))
    chart(page).get_by_role("button", name="Fork from step 20").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("Fork straight from step 20")
    dialog.get_by_role("textbox", name="checkpoint_every").fill("30")
    expect(dialog).to_contain_text("1 changed")
    dialog.get_by_role("button", name="Start new run").click()
    expect(page.get_by_role("heading", name=re.compile(r"^straight\.\d"))).to_be_visible()
    main = page.get_by_role("main")
    expect(main).to_contain_text("Completed")
    expect(main).to_contain_text(re.compile(r"straight.*at step 20"))
    page.get_by_role("link", name="Attempts and family").click()
    expect(main.get_by_role("link", name="straight", exact=True).first).to_be_visible()
    page.get_by_role("button", name="More actions").click()
    page.get_by_role("menuitem", name="Compare with parent").click()
    expect(page.get_by_role("region", name="Differences")).to_contain_text("checkpoint_every")


def test_a_point_of_a_parents_part_of_the_curve_is_forked_from_the_parent(
    world: PageWorld, visit: "Visit"
) -> None:
    saved = world.get("/runs/straight/artifacts?kind=checkpoint").data["artifacts"]
    checkpoint = next(one["artifact_id"] for one in saved if one["step"] == 20)
    asked = {"checkpoint": checkpoint, "overrides": {"checkpoint_every": 40}}
    child = world.send("POST", "/runs/straight/resume", asked)
    assert child.status < 300, child.data
    run_id = child.data["run"]["run_id"]
    world.wait_end(run_id)
    page = visit().log_in(world, f"/runs/{run_id}")
    page.get_by_role("checkbox", name="with parents").check()
    expect(page.locator(".mark-legend")).to_contain_text("attempt")
    expect(page).to_have_url(re.compile("parents=1"))
    page.get_by_role("link", name="Log", exact=True).click()
    page.get_by_role("link", name="Charts", exact=True).click()
    expect(page.get_by_role("checkbox", name="with parents")).to_be_checked()
    expect(chart(page).locator(".readout")).not_to_be_empty()
    page.mouse.click(*point_at(page, 0.5))
    chart(page).get_by_role("button", name="Fork from step 20").click()
    expect(page.get_by_role("dialog")).to_contain_text("Run straight stays as it is")


def test_a_running_run_is_cancelled_with_a_reason(world: PageWorld, visit: "Visit") -> None:
    gate = world.gate("stopped")
    gate.open_to(3)
    world.start("stopped", 50, hyperparams={"gate": str(gate.path)})
    page = visit().log_in(world, "/runs/stopped")
    expect(page.get_by_role("main")).to_contain_text("step 3 of 50")
    page.get_by_role("button", name="Cancel…").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("textbox", name="Reason").fill("wrong data")
    dialog.get_by_role("button", name="Cancel run").click()
    expect(page.locator(".run-head")).to_contain_text("Cancelled")
    expect(page.locator(".run-head")).to_contain_text("wrong data")


def test_the_log_is_searched_and_its_code_is_text(world: PageWorld, visit: "Visit") -> None:
    page = visit().log_in(world, "/runs/evil?tab=log")
    log = page.get_by_role("log")
    expect(log).to_contain_text("completed at step 60")
    box = page.get_by_role("searchbox", name="Find in log")
    box.fill("needle")
    log.evaluate("(lines) => { lines.scrollTop = 0; }")
    expect(log).not_to_contain_text("completed at step 60")  # other lines are shown, and what was typed stays
    expect(box).to_have_value("needle")
    box.press("Enter")
    expect(page.get_by_role("main")).to_contain_text("1 of 1 line")
    expect(log.locator("mark")).to_have_text("needle")
    for line in EVIL_LINES:
        expect(log).to_contain_text(line)
    with page.expect_download() as download:
        page.get_by_role("link", name="Download").click()
    assert EVIL_LINES[0] in download.value.path().read_text()
    page.get_by_role("link", name="Charts", exact=True).click()
    expect(chart(page, EVIL).locator(".readout")).not_to_be_empty()
    assert page.locator("main img").count() == 0


def test_videos_play_and_web_pages_of_a_run_are_not_shown(world: PageWorld, visit: "Visit") -> None:
    page = visit().log_in(world, "/runs/straight?tab=media")
    video = page.get_by_label("film.mp4").first
    expect(page.get_by_role("main")).to_contain_text("step 60")
    expect(page.get_by_role("main")).to_contain_text("This kind of file is not shown here.")
    assert page.locator("iframe, object, embed").count() == 0
    video.evaluate("(video) => video.play()")
    page.wait_for_function("() => document.querySelector('video').currentTime > 0.3")
    page.get_by_role("button", name="Earlier step").click()
    expect(page.get_by_role("main")).to_contain_text("step 40")
    page.wait_for_function("() => document.querySelector('video').readyState >= 1")


def test_every_part_of_a_run_is_shown(world: PageWorld, visit: "Visit") -> None:
    page = visit().log_in(world, "/runs/broken")
    expect(page.locator(".run-head")).to_contain_text("this step always fails")
    wanted = {
        "Config": "hyperparams.fail_at",
        "Code": "shown.py",
        "Environment and data": "packages",
        "Attempts and family": "this step always fails",
        "Files": "step-00000020",
    }
    for tab, text in wanted.items():
        page.get_by_role("link", name=tab, exact=True).click()
        expect(page.get_by_role("main")).to_contain_text(text)


def test_a_file_of_the_code_is_read_as_it_was_submitted(world: PageWorld, visit: "Visit") -> None:
    page = visit().log_in(world, "/runs/broken?tab=code")
    page.get_by_role("link", name="shown.py", exact=True).click()
    source = page.get_by_role("region", name="shown.py")
    expect(source).to_contain_text("this step always fails")
    page.reload()
    expect(source).to_contain_text("this step always fails")
    assert find_barriers(page) == []
    source.get_by_role("button", name="Close shown.py").click()
    expect(source).to_have_count(0)


def test_a_link_to_a_run_that_is_gone_says_so(world: PageWorld, visit: "Visit") -> None:
    visitor = visit()
    visitor.complaints.expect("status of 404")
    page = visitor.log_in(world, "/runs/gone")
    expect(page.get_by_role("heading", name="There is no run gone")).to_be_visible()
    page.get_by_role("link", name="All runs", exact=True).click()
    expect(page.get_by_role("link", name="straight", exact=True)).to_be_visible()
