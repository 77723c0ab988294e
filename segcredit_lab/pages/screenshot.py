"""Take the screenshot of a report for the documentation: the first view of a run's page.

    python -m segcredit_lab.pages.screenshot RUN/report.html

Needs playwright and chromium.
"""

import shutil
import sys
from importlib import import_module
from pathlib import Path

OUTPUT = Path(__file__).resolve().parents[2] / "docs" / "img" / "report.png"


def main() -> None:
    """Run the command."""
    sync_playwright = import_module("playwright.sync_api").sync_playwright
    report = Path(sys.argv[1]).absolute()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        size = {"width": 1280, "height": 860}
        page = browser.new_page(viewport=size, color_scheme="light")
        page.goto(report.as_uri())
        page.locator(".pair .response").nth(1).locator(".token").nth(4).hover()
        page.screenshot(path=OUTPUT)
        browser.close()


if __name__ == "__main__":
    main()
