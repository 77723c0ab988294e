"""The page with questions, images, responses and verdicts."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from tiny_policies import picture

from segcredit.benchmarks import ask, make_benchmark, score
from segcredit.benchmarks.page import PageLimits, write_page
from segcredit.benchmarks.run import Answer, SetResult
from segcredit.benchmarks.table import ModelScores, make_tables

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


def result(right: list[bool], size: int = 56) -> SetResult:
    benchmark = make_benchmark("logicvista")
    questions = [
        ask(f"q{n}", f"Question {n} {HOSTILE}", [picture(size, size, seed=n)], "A", skill="spatial")
        for n in range(len(right))
    ]
    answers = [
        Answer(x.id, 0, f"Response to {x.id} {HOSTILE}", 7, False, "A", "A", mark, "why", True)
        for x, mark in zip(questions, right, strict=True)
    ]
    answers[0] = Answer("q0", 0, "none", 7, True, None, "A", False, "no answer found", True)
    return SetResult(benchmark, questions, answers, score(benchmark, questions, [right]))


def page(folder: Path, limits: PageLimits | None = None, **marks: list[bool]) -> Path:
    results = {model: {"logicvista": result(x)} for model, x in marks.items()}
    tables = make_tables(
        [ModelScores(m, {"logicvista": x["logicvista"].scores}) for m, x in results.items()]
    )
    return write_page(folder / "report.html", results, tables, limits)


def embedded(path: Path, name: str) -> Any:
    found = re.search(
        rf'<script type="application/json" id="{name}">(.*?)</script>', path.read_text()
    )
    assert found is not None
    return json.loads(found[1])


def test_content(tmp_path: Path) -> None:
    path = page(tmp_path, one=[False, True, False], two=[False, False, True])
    data = embedded(path, "data")
    assert data["models"] == ["one", "two"]
    (found,) = data["sets"]
    assert (found["title"], found["total"]) == ("LogicVista", 3)
    question = found["questions"][1]
    assert question["text"] == f"Question 1 {HOSTILE}"
    assert question["answers"]["one"][0]["correct"] is True
    assert question["answers"]["two"][0]["answer"] == "A"
    assert found["scores"]["one"]["accuracy"]["value"] == pytest.approx(100 / 3)
    images = embedded(path, "images")
    assert len(images) == 3
    assert set(question["images"]) <= set(images)
    text = path.read_text()
    assert text.count("<script") == 3, "nothing of a response becomes a tag"
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")


def test_limits(tmp_path: Path) -> None:
    right = [False] + [n % 2 == 0 for n in range(1, 40)]
    few = PageLimits(questions=12, characters=40, picture_megabytes=0.01)
    path = page(tmp_path, few, one=right)
    (found,) = embedded(path, "data")["sets"]
    assert len(found["questions"]) == 12
    assert not any(x["answers"]["one"][0]["correct"] for x in found["questions"]), (
        "wrong ones first"
    )
    assert "characters …" in found["questions"][1]["answers"]["one"][0]["response"]
    images = embedded(path, "images")
    assert 0 < len(images) < 12
    assert sum(map(len, images.values())) <= 10_000
    tight = PageLimits(megabytes=0.002)
    (found,) = embedded(page(tmp_path, tight, one=right), "data")["sets"]
    assert 0 < len(found["questions"]) < 8


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium on the PATH")
def test_in_a_browser(tmp_path: Path) -> None:
    playwright = pytest.importorskip("playwright.sync_api")
    path = page(tmp_path, one=[False, True, False], two=[False, False, True])
    problems: list[str] = []
    with playwright.sync_playwright() as tool:
        browser = tool.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        tab = browser.new_page(viewport={"width": 1200, "height": 800})
        tab.on("pageerror", lambda error: problems.append(str(error)))
        tab.on("console", lambda message: problems.append(message.text))
        tab.on("dialog", lambda dialog: problems.append("a dialog"))
        tab.goto(path.as_uri())
        assert "paper: 7B +SAPO" in tab.inner_text("#view-tables")
        tab.click("text=Answers")
        assert tab.locator(".item").count() == 2, "wrong answers of the first model"
        tab.select_option("label:has-text('show') select", label="right")
        assert tab.locator(".item").count() == 1
        assert "Response to q1" in tab.inner_text(".detail")
        assert tab.locator(".detail img").evaluate("x => x.naturalWidth") == 56
        tab.select_option("label:has-text('show') select", label="no answer")
        assert "no answer found" in tab.inner_text(".detail")
        tab.select_option("label:has-text('model') select", label="two")
        tab.select_option("label:has-text('show') select", label="all")
        tab.locator(".detail h2").first.click()
        tab.keyboard.press("j")
        assert "Response to q1" in tab.inner_text(".detail")
        tab.fill("input[type=search]", "question 2")
        assert tab.locator(".item").count() == 1
        browser.close()
    assert not problems
