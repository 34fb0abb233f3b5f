"""A real Chromium, without a screen: from the click on a link until a person sees what the link is for.

*Painted* is the end of the first frame in which the table's rows, or the pixels of a curve, are there. A script in the
page looks before each frame; the same for every side. Each cold open has a browser and a profile of its own, started
before the clock. Bytes are what the network carried, headers included, as the browser counts them.
"""

import atexit
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import psutil
from playwright.sync_api import Browser, CDPSession, Page, Playwright, sync_playwright

ARGUMENTS = (
    "--no-sandbox",
    "--headless=new",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
NAMES = ("chromium", "chromium-browser", "google-chrome")
WINDOW = {"width": 1440, "height": 900}
TIMEOUT_S = 90.0
AFTER_MS = 500  # what a page fetches right after it has painted counts as sent
LOOK_MS = 100
KB = 1e3
CODE = frozenset({"Document", "Script", "Stylesheet"})

# Whether a person sees it: elements in the window with a curve's pixels, or text.
TOOLS = """
const copy = document.createElement("canvas"); // also a canvas that a worker paints can be copied
const ink = copy.getContext("2d", { willReadFrequently: true });
const isInView = (element) => {
  const box = element.getBoundingClientRect();
  return box.width > 50 && box.bottom > 0 && box.top < innerHeight;
};
const hasCurve = (canvas, minColour = 40) => {
  if (!canvas || canvas.width < 50 || canvas.height < 50 || !isInView(canvas)) return false;
  Object.assign(copy, { width: canvas.width, height: canvas.height });
  ink.drawImage(canvas, 0, 0);
  const { data } = ink.getImageData(0, 0, copy.width, copy.height);
  let count = 0;
  for (let i = 0; i < data.length; i += 4) {
    const [r, g, b] = [data[i], data[i + 1], data[i + 2]];
    if (data[i + 3] > 60 && Math.max(r, g, b) - Math.min(r, g, b) >= minColour) count += 1;
  }
  return count > 200;
};
const hasPath = (paths) => [...paths].some((path) => (path.getAttribute("d") ?? "").length > 200 && isInView(path));
const hasRows = (rows) => [...rows].filter((row) => /run-\\d{5}/.test(row.textContent) && isInView(row)).length >= 5;
"""

WATCH = """(() => {
  %s
  const isPainted = () => { %s };
  const look = () => {
    let isThere = false;
    try { isThere = isPainted(); } catch {}
    if (isThere) setTimeout(() => { window.__paintedMs = performance.now(); }, 0);
    else requestAnimationFrame(look);
  };
  requestAnimationFrame(look);
})()"""


class Traffic:
    """What a page was sent, by the kind of resource."""

    def __init__(self, session: CDPSession) -> None:
        self._kinds: dict[str, tuple[str, str]] = {}  # by request: kind and URL
        self._bytes: dict[str, float] = {}
        session.on("Network.responseReceived", self._take_response)
        session.on("Network.dataReceived", self._take_data)
        session.on("Network.loadingFinished", self._take_end)
        session.send("Network.enable")

    def _take_response(self, message: dict[str, Any]) -> None:
        self._kinds[message["requestId"]] = message["type"], message["response"]["url"]

    def _take_data(self, message: dict[str, Any]) -> None:
        request = message["requestId"]
        self._bytes[request] = self._bytes.get(request, 0) + message["encodedDataLength"]

    def _take_end(self, message: dict[str, Any]) -> None:
        self._bytes[message["requestId"]] = message["encodedDataLength"]

    @property
    def sent_kb(self) -> float:
        return sum(self._bytes.values()) / KB

    @property
    def code_kb(self) -> float:
        """Documents, scripts and styles; each of them once, however often it was asked for."""
        sizes: dict[str, float] = {}
        for request, size in self._bytes.items():
            kind, url = self._kinds.get(request, ("", ""))
            if kind in CODE:
                sizes[url] = max(size, sizes.get(url, 0))
        return sum(sizes.values()) / KB


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    page: Page
    session: CDPSession
    traffic: Traffic


@cache
def _playwright() -> Playwright:
    playwright = sync_playwright().start()
    atexit.register(playwright.stop)
    return playwright


def find_chromium() -> str:
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        raise RuntimeError("there is no chromium here")
    return found


def launch() -> Browser:
    """With an empty profile."""
    return _playwright().chromium.launch(executable_path=find_chromium(), args=list(ARGUMENTS))


@contextmanager
def visit(is_painted: str) -> Iterator[Visit]:
    """A page in a browser of its own, which says when `is_painted` (JavaScript that returns a boolean) became true."""
    browser = launch()
    try:
        page = browser.new_context(viewport=WINDOW).new_page()  # type: ignore[arg-type]
        page.add_init_script(WATCH % (TOOLS, is_painted))
        session = page.context.new_cdp_session(page)
        yield Visit(page=page, session=session, traffic=Traffic(session))
    finally:
        browser.close()


def wait_painted(page: Page, timeout_s: float = TIMEOUT_S) -> float:
    """Milliseconds from the start of the navigation. RuntimeError."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:  # `wait_for_function` is refused by a page with a strict policy
        painted: float | None = page.evaluate("window.__paintedMs ?? null")
        if painted is not None:
            return painted
        page.wait_for_timeout(LOOK_MS)
    raise RuntimeError(f"nothing is painted within {timeout_s:g} s")


def open_cold(url: str, is_painted: str, *, timeout_s: float = TIMEOUT_S) -> dict[str, float]:
    """A sample: `ms` until it is painted, `sent_kb` in all, `code_kb` of it."""
    with visit(is_painted) as opened:
        opened.page.goto(url, wait_until="commit")
        painted_ms = wait_painted(opened.page, timeout_s)
        opened.page.wait_for_timeout(AFTER_MS)
        return {
            "ms": painted_ms,
            "sent_kb": opened.traffic.sent_kb,
            "code_kb": opened.traffic.code_kb,
        }


def browser_processes() -> list[psutil.Process]:
    """Those of the browsers that this process has open."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if any(name in process.name() for name in NAMES):
                found.append(process)
        except psutil.Error:
            continue
    return found
