"""Opens a page in headless Chromium with every host blocked; what it drew and what it asked for. No driver needed."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next((path for name in NAMES if (path := shutil.which(name))), None)
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-dev-shm-usage", "--host-resolver-rules=MAP * ~NOTFOUND",
)  # fmt: skip
_SHAPES = {"path", "rect", "text", "line", "circle", "image"}


class Page(HTMLParser):
    """A page's DOM after its scripts have run."""

    def __init__(self, dom: str, requests: list[str]):
        super().__init__()
        self.dom = dom
        self.requests = requests
        """Addresses on other hosts that the page itself asked for."""
        self.charts: list[Chart] = []
        self.formulas = 0
        """Pieces of mathematics that MathJax has set."""
        self._stack: list[tuple[str, str]] = []
        self.feed(dom)

    def handle_starttag(self, tag, attrs):
        values = {name: value or "" for name, value in attrs}
        classes = values.get("class", "").split()
        if tag == "figure" and "mx-figure" in classes:
            self.charts.append(Chart(values.get("aria-label", "")))
        if tag == "mjx-container":
            self.formulas += 1
        if tag == "img" and "mx-still" in classes:
            self.charts[-1].still_shown = "hidden" not in values
        if tag in _SHAPES and any("role-mark" in c for _, c in self._stack):
            self.charts[-1].marks += 1
        if tag not in ("img", "input", "br", "meta", "link", "hr"):
            self._stack.append((tag, values.get("class", "")))

    def handle_endtag(self, tag):
        while self._stack and self._stack.pop()[0] != tag:
            pass


@dataclass
class Chart:
    label: str
    marks: int = 0
    still_shown: bool = False


def open_page(page: Path, folder: Path, *, query: str = "", dark: bool = False, width: int = 1300) -> Page:
    """Open the file `page`; `folder` takes the browser's profile and log."""
    log = folder / "net.json"
    colours = ["--blink-settings=preferredColorScheme=0"] if dark else []
    done = subprocess.run(
        [BROWSER, *_FLAGS, *colours, f"--user-data-dir={folder / 'profile'}", f"--window-size={width},1200",
         f"--log-net-log={log}", "--virtual-time-budget=15000", "--dump-dom", page.as_uri() + query],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.stdout, done.stderr[-2000:]
    return Page(done.stdout, _requests(log.read_text()))


def _requests(log: str) -> list[str]:
    """What pages asked the network for. The browser's own calls home have no page as their initiator."""
    found = []
    for line in log.splitlines():  # an event a line; the browser may end before it closes the list around them
        if '"initiator"' not in line:
            continue
        event = json.loads(line.strip().rstrip(",").removesuffix("]"))["params"]
        if event["initiator"] != "not an origin" and event["url"].startswith(("http", "ws")):
            found.append(event["url"])
    return found
