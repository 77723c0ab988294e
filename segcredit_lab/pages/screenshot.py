"""Take the screenshot of a report for the documentation: one prompt before and after training.

    python -m segcredit_lab.pages.screenshot RUN/report.html

Needs playwright and chromium.
"""

import json
import re
import shutil
import sys
from importlib import import_module
from pathlib import Path

OUTPUT = Path(__file__).resolve().parents[2] / "docs" / "img" / "report.png"


def main() -> None:
    """Run the command."""
    sync_playwright = import_module("playwright.sync_api").sync_playwright
    report = Path(sys.argv[1]).absolute()
    page_text = report.read_text(encoding="utf-8")
    found = re.search(r'id="overview">(.*?)</script>', page_text)
    assert found is not None
    files = json.loads(found[1])["files"]
    watched = [f"{x['run']}-{x['kind']}-{x['step']}" for x in files if x["kind"] == "watched"]
    view = f"trajectories?file={watched[-1]}&beside={watched[0]}&color=value"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        page = browser.new_page(viewport={"width": 1400, "height": 900}, color_scheme="light")
        page.goto(f"{report.as_uri()}#{view}")
        page.locator(".response").nth(1).wait_for()
        for _ in range(2):
            page.keyboard.press("ArrowRight")
        page.screenshot(path=OUTPUT, clip={"x": 0, "y": 0, "width": 1400, "height": 880})
        browser.close()


if __name__ == "__main__":
    main()
