"""The page in a real browser, without a screen. What the browser complains of fails the test that caused it."""

import contextlib
import re
import shutil
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from axe_playwright_python.base import AXE_SCRIPT
from page_world import PageWorld
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Dialog, Page, expect, sync_playwright

DEADLINE_MS = 60_000
ARGUMENTS = (
    "--no-sandbox",  # tests may run as root
    "--headless=new",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
expect.set_options(timeout=DEADLINE_MS)
DESKTOP = {"width": 1440, "height": 900}
PHONE = {"width": 390, "height": 844}


def need_chromium() -> str:
    """Its path. Where there is none the test is skipped."""
    found = filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome")))
    path = next(found, None)
    if path is None:
        pytest.skip("There is no chromium: tests of the page in a browser are skipped.")
    return path


@contextlib.contextmanager
def open_browser() -> Iterator[Browser]:
    """A browser with an empty profile. While it is open this thread has an event loop: close it before others need one."""
    path = need_chromium()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(ARGUMENTS), timeout=DEADLINE_MS)
        yield browser
        browser.close()


class Complaints:
    """What must not be: errors in the console, violations of the page's policy, exceptions, dialogs of scripts."""

    def __init__(self, page: Page) -> None:
        self.seen: list[str] = []
        self.expected: list[str] = []
        page.on("console", self._take_message)
        page.on("pageerror", lambda error: self.seen.append(f"exception: {error}"))
        page.on("dialog", self._take_dialog)

    def expect(self, pattern: str) -> None:
        """A test that causes an error on purpose says which: a regular expression over the text."""
        self.expected.append(pattern)

    def check(self) -> None:
        unexpected = [
            text for text in self.seen if not any(re.search(pattern, text) for pattern in self.expected)
        ]
        assert not unexpected, "\n".join(unexpected)

    def _take_message(self, message: ConsoleMessage) -> None:
        is_ours = "willReadFrequently" in message.text  # `read_picture` reads the canvas
        if message.type in ("error", "warning") and not is_ours:
            self.seen.append(f"{message.type}: {message.text} ({message.location.get('url', '')})")

    def _take_dialog(self, dialog: Dialog) -> None:
        self.seen.append(f"dialog: {dialog.message}")
        dialog.dismiss()


class Visitor:
    """A person at a browser of their own: a page, and what it complained of."""

    def __init__(self, browser: Browser, *, is_phone: bool = False) -> None:
        self.context: BrowserContext = browser.new_context(
            viewport=PHONE if is_phone else DESKTOP,
            has_touch=is_phone,
            is_mobile=is_phone,
            reduced_motion="reduce",
        )
        self.context.set_default_timeout(DEADLINE_MS)
        self.page = self.context.new_page()
        self.complaints = Complaints(self.page)

    def log_in(self, world: PageWorld, path: str = "/") -> Page:
        """Opens that path of the page, with a link of its own."""
        link, _, token = world.make_link().partition("/#")
        self.page.goto(f"{link}{path}#{token}")
        return self.page

    def close(self) -> None:
        self.context.close()


def count_hidden_px(page: Page) -> int:
    """By how many pixels the page is wider than the window: it would scroll sideways."""
    width: int = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    return width


def read_picture(page: Page, name: str) -> int:
    """A number that changes with the picture of a chart."""
    found: int = page.evaluate(PICTURE, name)
    return found


def wait_for_other_picture(page: Page, name: str, before: int) -> None:
    page.wait_for_function(f"([name, before]) => ({PICTURE})(name) !== before", arg=[name, before])


PICTURE = """(name) => {
  const canvas = document.querySelector(`figure[aria-label="${name}"] canvas`);
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  let sum = 0;
  for (let i = 0; i < data.length; i++) sum = (sum * 31 + data[i]) | 0;
  return sum;
}"""


def find_barriers(page: Page, rules: Sequence[str] = ()) -> list[str]:
    """What axe-core has against the page, by these rules or by all: rule, what it says, where."""
    options: dict[str, Any] = {"resultTypes": ["violations"]}
    if rules:
        options["runOnly"] = list(rules)
    if not page.evaluate("'axe' in window"):  # half a megabyte: once for each document
        page.evaluate(AXE_SCRIPT)
    violations = page.evaluate("options => axe.run(options).then(results => results.violations)", options)
    return [
        f"{rule['id']} ({rule['impact']}): {rule['help']}: {node['html'][:200]} {node['failureSummary']}"
        for rule in violations
        for node in rule["nodes"]
    ]
