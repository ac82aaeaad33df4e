"""Opens an HTML file in headless Chromium and reads its console. From a shell: ``python browser.py page.html``."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

BINARIES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--enable-logging=stderr",
    "--v=0",
)
TIMEOUT_S = 90.0
DRAW_MS = 10_000  # virtual time given to the page's scripts
# [pid:tid:date/time:INFO:CONSOLE:12] "text", source: file:///… (12); older releases: CONSOLE(12).
# The level does not tell console.error from console.log, so that every line counts: a report has nothing to say.
_CONSOLE = re.compile(r"^\[[^\]]*:CONSOLE[^\]]*\] (.*)$", re.MULTILINE)


def find_browser() -> str | None:
    """Path of a Chromium, or None."""
    return next((path for name in BINARIES if (path := shutil.which(name))), None)


def open_in_browser(html: Path, *more: str) -> tuple[str, list[str]]:
    """Load the file and run its scripts.

    :param more: further flags, such as ``--window-size=1280,2400``.
    :return: the document after the scripts ran (with ``--dump-dom``), and the lines of the console.
    """
    browser = find_browser()
    if browser is None:
        raise FileNotFoundError(f"no browser: none of {', '.join(BINARIES)} is on the path")
    with tempfile.TemporaryDirectory() as profile:
        ran = subprocess.run(
            [
                browser,
                *FLAGS,
                f"--user-data-dir={profile}",
                f"--virtual-time-budget={DRAW_MS}",
                *(more or ("--dump-dom",)),
                html.resolve().as_uri(),
            ],
            capture_output=True,
            text=True,
            encoding="utf-8",
            errors="replace",
            timeout=TIMEOUT_S,
            check=False,
        )
    errors = _CONSOLE.findall(ran.stderr)
    if ran.returncode != 0:
        errors.append(f"the browser ended with {ran.returncode}: {ran.stderr[-500:]}")
    return ran.stdout, errors


def count_charts(document: str) -> int:
    """Charts that plotly has drawn into the document."""
    return len(re.findall(r'<div class="[^"]*\bsvg-container\b', document))


def open_in_browser_check(html: Path) -> list[str]:
    """What a report printed on the browser's console, and charts that stayed empty; empty when all is well."""
    document, errors = open_in_browser(html)
    # Charts in a closed <details> are drawn when opened; the script counts those drawn at once.
    drawn = re.search(r'<body[^>]* data-drawn="(\d+)"', document)
    if drawn is None:
        errors.append("the script of the report did not finish")
    elif (pictures := count_charts(document)) < int(drawn[1]):
        errors.append(f"{pictures} of {drawn[1]} charts were drawn")
    return errors


def main(arguments: Sequence[str]) -> int:
    """Print what is wrong with each file; 1 if there was any."""
    wrong = False
    for name in arguments:
        errors = open_in_browser_check(Path(name))
        wrong |= bool(errors)
        print(f"{name}: {f'{len(errors)} errors' if errors else 'no errors'}")
        for error in errors:
            print(f"  {error}")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
