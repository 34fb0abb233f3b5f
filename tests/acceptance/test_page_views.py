"""The other views, all views on a phone and for assistive programs, and the page while there is no daemon."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml
from page_browser import count_hidden_px, find_barriers
from page_world import EVIL_FILE, NUM_STEPS, TRAINERS, PageWorld, make_job
from playwright.sync_api import Page, expect

import trn

if TYPE_CHECKING:
    from conftest import Visit

# What each view shows once it is whole
VIEWS = {
    "/": "straight",
    "/?by=state&pick=straight&pick=other": "2 runs selected",
    "/?q=nothing": "No runs match these filters",
    "/nothing": "There is no such page",
    "/runs/straight": "train/loss",
    "/runs/other": "train/loss",
    "/runs/straight?logy=1&smooth=0.6&large=train/loss": "train/loss",
    "/runs/evil?tab=log": "completed at step 60",
    "/runs/straight?tab=media": "film.mp4",
    "/runs/straight?tab=config": "mock_batches",
    "/runs/straight?tab=code": "shown.py",
    "/runs/straight?tab=documents&document=environment": "python",
    "/runs/broken?tab=family": "this step always fails",
    "/runs/straight?tab=files": "final",
    "/runs/straight?tab=documents&document=certificate": "certificate",
    "/compare": "Choose runs to compare",
    "/compare?run=straight&run=other": "hyperparams.scale",
    "/compare?run=straight&run=other&run=broken&run=evil&part=metrics": "Last values",
    "/machine": "4 CPUs",
    "/submit": "trainer",
    "/submit?from=straight": "The job of straight",
}


def open_view(page: Page, world: PageWorld, path: str) -> None:
    page.goto(world.gateway.url + path)
    expect(page.get_by_role("main")).to_contain_text(VIEWS[path])


def test_two_runs_are_compared_and_the_page_says_where_they_part_and_why(
    world: PageWorld, visit: "Visit"
) -> None:
    page = visit().log_in(world, "/?q=/^(straight|other)$/")
    for run_id in ("straight", "other"):
        page.get_by_role("checkbox", name=f"Select {run_id}").check()
    page.get_by_role("button", name="Compare").click()
    parting = page.get_by_role("region", name="Where they part")
    expect(parting).to_contain_text("step 1")
    expect(parting).to_contain_text("hyperparams.scale")
    expect(page.get_by_role("region", name="Differences")).to_contain_text("1.5")
    figure = page.get_by_role("figure", name="train/loss", exact=True)
    expect(figure.locator(".readout b")).to_have_count(2)
    page.get_by_role("checkbox", name="Show other").uncheck()
    expect(figure.locator(".readout b")).to_have_count(1)

    page.goto(f"{world.gateway.url}/compare?run=straight&run=gone&run=other")
    expect(page.get_by_role("main")).to_contain_text("Not there, perhaps removed: gone")
    expect(parting).to_contain_text("hyperparams.scale")
    page.get_by_role("button", name="Leave out").click()
    expect(page.get_by_role("main")).not_to_contain_text("perhaps removed")


def test_a_wrong_job_shows_its_faults_at_the_fields_and_a_right_one_is_trained(
    world: PageWorld, visit: "Visit"
) -> None:
    visitor = visit()
    visitor.complaints.expect("status of 422")
    page = visitor.log_in(world, "/submit")
    page.get_by_role("textbox", name="Folder").fill(str(TRAINERS))
    job = yaml.safe_dump(make_job("by-hand", NUM_STEPS) | {"max_steps": -3})
    page.locator("input[type=file]").set_input_files(
        {"name": "job.yaml", "mimeType": "application/yaml", "buffer": job.encode()}
    )
    field = page.get_by_role("textbox", name="max_steps")
    expect(field).to_have_value("-3")
    expect(field).to_have_attribute("aria-invalid", "true")
    check = page.get_by_role("complementary", name="Check")
    expect(check).to_contain_text("1 fault")
    expect(check.get_by_role("button", name="Submit", exact=True)).to_be_disabled()
    check.get_by_role("button", name="max_steps").click()
    expect(field).to_be_focused()
    page.get_by_text("All other fields").click()
    rest = page.get_by_role("textbox", name="checkpoint_every")
    rest.fill("-1")
    page.get_by_text("All other fields").click()
    check.get_by_role("button", name="checkpoint_every").click()
    expect(rest).to_be_focused()
    rest.fill("20")
    field.fill("5")
    expect(check).to_contain_text("This job would be accepted.")
    check.get_by_role("button", name="Submit").click()
    expect(page.get_by_role("heading", name="by-hand")).to_be_visible()
    expect(page.get_by_role("main")).to_contain_text("step 5 of 5")
    expect(page.get_by_role("main")).to_contain_text("Completed")


def test_a_run_is_started_again_with_changes_from_its_frozen_code(
    world: PageWorld, visit: "Visit", tmp_path: Path
) -> None:
    (tmp_path / "jobs").mkdir()
    with trn.Client(world.home.root) as client:
        client.submit(make_job("frozen", 20), base_dir=tmp_path / "jobs", code_dir=TRAINERS)
    world.wait_end("frozen")
    page = visit().log_in(world, "/submit?from=frozen")
    check = page.get_by_role("complementary", name="Check")
    expect(check).to_contain_text("This job would be accepted.")
    page.get_by_role("textbox", name="hyperparams").fill("scale: 3")
    expect(check).to_contain_text("This job would be accepted.")
    check.get_by_role("button", name="Submit").click()
    expect(page.get_by_role("heading", name="frozen.2")).to_be_visible()
    expect(page.get_by_role("main")).to_contain_text("Completed")

    page.get_by_role("figure", name="train/loss", exact=True).get_by_label(
        "Chart of train/loss"
    ).first.focus()
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Fork from step 20").click()
    dialog = page.get_by_role("dialog")
    with page.expect_response(lambda answer: "dry_run=1" in answer.url) as checked:
        dialog.get_by_role("textbox", name="hyperparams.scale").fill("4")
    assert checked.value.json()["faults"] == []


def test_a_job_file_that_is_dropped_beside_its_field_fills_the_form_too(
    world: PageWorld, visit: "Visit"
) -> None:
    page = visit().log_in(world, "/submit")
    expect(page.get_by_role("textbox", name="trainer")).to_be_visible()
    file = page.evaluate_handle(
        "() => { const data = new DataTransfer(); data.items.add(new File(['trainer: a:Dropped'], 'job.yaml')); return data; }"
    )
    page.dispatch_event("main", "drop", {"dataTransfer": file})
    expect(page.get_by_role("textbox", name="trainer")).to_have_value("a:Dropped")


def test_the_machine_shows_who_runs_where_and_what_waits(world: PageWorld, visit: "Visit") -> None:
    gate = world.gate("busy")
    gate.open_to(1)
    world.start("busy", 9, hyperparams={"gate": str(gate.path)}, resources={"devices": ["cpu"], "cpus": 4})
    page = visit().log_in(world, "/machine")
    main = page.get_by_role("main")
    expect(main.get_by_role("link", name="busy, attempt 1, running")).to_be_visible()
    world.start("waiting", 9, resources={"devices": ["cpu"], "cpus": 4})
    expect(main.get_by_role("link", name="waiting", exact=True)).to_be_visible()
    gate.open_to(9)
    assert world.wait_end("busy") == world.wait_end("waiting") == "COMPLETED"


def test_assistive_programs_find_no_barrier_in_any_view(world: PageWorld, visit: "Visit") -> None:
    page = visit().log_in(world)
    barriers = {}
    for path in VIEWS:
        open_view(page, world, path)
        page.emulate_media(color_scheme="light")
        barriers[path, "light"] = find_barriers(page)
        page.emulate_media(color_scheme="dark")
        barriers[path, "dark"] = find_barriers(page, ["color-contrast"])  # dark differs in colours alone
    assert {key: found for key, found in barriers.items() if found} == {}


def test_assistive_programs_find_no_barrier_in_what_opens_over_a_view(
    world: PageWorld, visit: "Visit"
) -> None:
    """Menus, dialogs and what is below a chart: none of them is open in a view by itself."""
    visitor = visit()
    visitor.complaints.expect(
        "status of 409"
    )  # perhaps another test forked it: then it cannot be removed alone
    page = visitor.log_in(world, "/?q=/^straight$/")
    expect(page.get_by_role("link", name="straight", exact=True)).to_be_visible()
    barriers = {}

    def look(what: str) -> None:
        for scheme, rules in (("light", []), ("dark", ["color-contrast"])):
            page.emulate_media(color_scheme=scheme)
            barriers[what, scheme] = find_barriers(page, rules)
        page.keyboard.press("Escape")

    tools = page.get_by_role("search")
    for name in ("State", "Tags", "Columns"):
        tools.get_by_role("button", name=name, exact=True).click()
        look(f"menu {name}")
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_be_visible()
    look("help")
    page.goto(f"{world.gateway.url}/runs/straight")
    for name in ("Name, notes and tags…", "Run again…", "Remove…"):
        page.get_by_role("button", name="More actions").click()
        if name == "Name, notes and tags…":
            barriers["menu of a run", "light"] = find_barriers(page)
        page.get_by_role("menuitem", name=name).click()
        expect(page.get_by_role("dialog")).to_be_visible()
        expect(page.get_by_text("Reading what it frees…")).to_have_count(0)
        look(name)
    figure = page.get_by_role("figure", name="train/loss", exact=True)
    figure.get_by_role("button", name="Menu of train/loss").click()
    barriers["menu of a chart", "light"] = find_barriers(page)
    page.get_by_role("menuitem", name="Show as table").click()
    expect(page.get_by_role("dialog").get_by_role("row")).not_to_have_count(0)
    look("points of a chart")
    figure.get_by_label("Chart of train/loss").first.focus()
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Fork from step").click()
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_role("textbox", name="checkpoint_every")).to_be_visible()
    barriers["fork as a form", "light"] = find_barriers(page)
    dialog.get_by_role("button", name="JSON").click()
    look("fork as JSON")
    barriers["below a chart", "light"] = find_barriers(page)
    assert {key: found for key, found in barriers.items() if found} == {}


def test_no_view_runs_code_that_is_in_names_files_or_configs(world: PageWorld, visit: "Visit") -> None:
    page = visit().log_in(world)
    views = [f"/runs/evil?tab={tab}" for tab in ("charts", "media", "config", "documents", "family", "files")]
    for path in [*views, "/compare?run=evil&run=straight", "/submit?from=evil"]:
        page.goto(world.gateway.url + path)
        expect(page.get_by_role("main")).to_contain_text(
            EVIL_FILE if "media" in path or "files" in path else "evil"
        )
        expect(page.get_by_text("Loading")).to_have_count(0)
        assert page.locator("img[src=x], iframe, object, embed").count() == 0


def test_no_view_is_wider_than_a_phone(world: PageWorld, visit: "Visit") -> None:
    page = visit(is_phone=True).log_in(world)
    hidden = {}
    for path in VIEWS:
        open_view(page, world, path)
        hidden[path] = count_hidden_px(page)
    assert {path: width for path, width in hidden.items() if width > 0} == {}


def test_assistive_programs_find_no_barrier_on_a_phone(world: PageWorld, visit: "Visit") -> None:
    page = visit(is_phone=True).log_in(world)
    barriers = {}
    for path in (
        "/",
        "/?by=state&pick=straight&pick=other",
        "/runs/straight",
        "/machine",
        "/submit?from=straight",
    ):
        open_view(page, world, path)
        barriers[path] = find_barriers(page)
    page.goto(f"{world.gateway.url}/?q=/^straight$/")
    page.get_by_role("button", name="Actions of straight").tap()
    barriers["menu"] = find_barriers(page)
    assert {path: found for path, found in barriers.items() if found} == {}


def test_a_person_with_a_phone_finds_and_opens_a_run(world: PageWorld, visit: "Visit") -> None:
    page = visit(is_phone=True).log_in(world)
    page.get_by_role("searchbox", name="Filter runs").fill("/^straight$/")
    expect(page.locator(".run-card")).to_have_count(1)
    page.get_by_role("link", name="straight", exact=True).tap()
    figure = page.get_by_role("figure", name="train/loss", exact=True)
    expect(figure.locator("canvas")).to_be_visible()
    box = figure.bounding_box()
    assert box is not None
    assert 300 < box["width"] <= 390
    page.get_by_role("link", name="Log", exact=True).tap()
    expect(page.get_by_role("log")).to_contain_text("completed at step 60")


@pytest.fixture
def own_world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageWorld]:
    with PageWorld(tmp_path_factory.mktemp("killed")) as world:
        yield world


def test_the_page_outlives_a_killed_daemon_and_comes_back_with_the_next(
    own_world: PageWorld, visit: "Visit"
) -> None:
    world = own_world
    gate = world.gate("surviving")
    gate.open_to(5)
    world.start("surviving", 30, hyperparams={"gate": str(gate.path)})
    visitor = visit()
    visitor.complaints.expect("status of 503")
    page = visitor.log_in(world, "/runs/surviving")
    main = page.get_by_role("main")
    expect(main).to_contain_text("step 5 of 30")
    form = visitor.context.new_page()
    form.goto(f"{world.gateway.url}/submit")
    form.get_by_role("textbox", name="Folder").fill(str(TRAINERS))
    form.get_by_role("textbox", name="trainer").fill("shown:Shown")
    check = form.get_by_role("complementary", name="Check")
    expect(check).to_contain_text("2 faults")
    world.daemon.kill()
    form.get_by_role("textbox", name="max_steps").fill("5")
    expect(check).to_contain_text("no daemon answers")
    banner = page.get_by_text("The daemon is not running.")
    expect(banner).to_be_visible()
    page.get_by_role("link", name="Config", exact=True).click()
    expect(main).to_contain_text("mock_batches")
    page.get_by_role("button", name="Cancel…").click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel run").click()
    expect(page.get_by_role("dialog").get_by_role("alert")).to_contain_text("daemon")
    page.keyboard.press("Escape")

    world.start_daemon()
    expect(banner).to_have_count(0)
    expect(check).to_contain_text("1 fault")  # it is checked again by itself
    expect(form.get_by_role("textbox", name="max_steps")).to_have_value("5")
    gate.open_to(30)
    expect(main).to_contain_text("step 30 of 30")
    expect(main).to_contain_text("Completed")
