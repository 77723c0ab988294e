"""The report in a browser: what it shows, pointer and keys, and that no code of a run is run."""

import math
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_runs import HOSTILE, ODD_METRICS, ODD_ROWS, add_benchmark, make_big_run, make_run

from segcredit.partition import (
    FixedLength,
    Newline,
    ProbabilityCutpoints,
    Response,
    StepMarkers,
    Token,
    TopEntropy,
)
from segcredit.report.data import Limits
from segcredit.report.explain import HEALTHY, NO_RANGE
from segcredit.report.page import Figure, Figures, write_report
from segcredit.report.serve import Server
from segcredit.runlog import MetricsWriter, read_run, write_rollouts
from segcredit.runlog.records import read_rollouts
from segcredit.types import Rollouts

playwright = pytest.importorskip(
    "playwright.sync_api", reason="needs playwright: pip install playwright"
)
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        CHROMIUM is None, reason="needs chromium, chromium-browser or google-chrome on the PATH"
    ),
]
QUIET = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
)
SCREENSHOTS = os.environ.get("SEGCREDIT_SCREENSHOTS")
"""Directory for screenshots of every view; none are taken if it is not set."""
VIEWS = ("overview", "trajectories", "partitions", "analyses")
HURRY = "const wait = setTimeout; setTimeout = (then, ms) => wait(then, ms / 20)"
"""Script that makes the timers of the page twenty times faster."""
COLUMNS = ("entropy", "advantage", "value", "ratio", "logp_old")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as tool:
        browser = tool.chromium.launch(executable_path=CHROMIUM, args=list(QUIET))
        yield browser
        browser.close()


Opener = Callable[..., Any]


@pytest.fixture
def open_page(browser: Any) -> Iterator[Opener]:
    """Open pages; afterwards check that none logged an error, made a request or opened a dialog."""
    contexts: list[Any] = []
    wrong: list[str] = []
    forgiven: list[str] = []

    def opened(where: Path | str, view: str = "", width: int = 1400, **settings: Any) -> Any:
        context = browser.new_context(viewport={"width": width, "height": 900}, **settings)
        context.set_default_timeout(10_000)
        contexts.append(context)
        context.add_init_script(HURRY)
        page = context.new_page()
        address, _, there = str(where if isinstance(where, str) else where.as_uri()).partition("#")

        def requested(request: Any) -> None:
            mine = request.url.split("#")[0] == address or request.url.startswith("data:image/")
            served = address.startswith("http") and request.url.startswith(address)
            if not mine and not served:
                wrong.append(f"asked for {request.url}")

        def said(message: Any) -> None:
            if message.type in ("error", "warning"):
                wrong.append(f"{message.type}: {message.text}")

        def dialog(found: Any) -> None:
            wrong.append(f"dialog: {found.message}")
            found.dismiss()

        page.on("request", requested)
        page.on("console", said)
        page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
        page.on("dialog", dialog)
        page.goto(f"{address}#{view or there}")
        page.forgive = forgiven.append
        return page

    yield opened
    for context in contexts:
        context.close()
    assert [x for x in wrong if not any(y in x for y in forgiven)] == []


def show(page: Any, view: str) -> None:
    """Click on a view and wait until it is drawn, since the address changes asynchronously."""
    page.click(f'nav a[data-view="{view}"]')
    page.locator(f'nav a[data-view="{view}"][aria-current="page"]').wait_for()
    page.locator('#main[aria-busy="false"]').wait_for(state="attached")


def written(*runs: Path, to: Path | None = None, **limits: Any) -> Path:
    path = to or runs[0].with_suffix(".html")
    figure = Figure(
        "A figure", "what it says", "<svg viewBox='0 0 10 5'><text y='4'>x</text></svg>"
    )
    return write_report([read_run(run) for run in runs], path, Limits(**limits), Figures((figure,)))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An ordinary run: images, several responses per prompt, held-out prompts at several steps."""
    folder = tmp_path_factory.mktemp("ordinary")
    return make_run(
        folder / "ordinary", steps=(5, 10, 15), watched_steps=(0, 10, 20), samples=2, responses=8,
        tokens=30, pictures=True, optimize=30,
    )  # fmt: skip


@pytest.fixture(scope="module")
def page_file(run: Path) -> Path:
    return written(run)


def recorded(run: Path, kind: str, step: int) -> list[dict[str, Any]]:
    return read_rollouts(run / kind / f"step-{step:06d}.jsonl")


def shown_number(text: str) -> float:
    return float(text.replace("−", "-").replace(" nats", "").replace("∞", "inf"))


def rewards(page: Any) -> list[str]:
    return [x.split(" · ")[0] for x in page.locator(".item-numbers").all_text_contents()]


def background(page: Any, token: int) -> str:
    return str(
        page.locator(f'.response .token[data-t="{token}"]').evaluate(
            "x => getComputedStyle(x).backgroundColor"
        )
    )


def readout(page: Any, title: str) -> str:
    """The readout of a chart at its last step."""
    chart = page.locator(f'.chart[data-title="{title}"]')
    chart.scroll_into_view_if_needed()
    box = chart.locator("svg").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 408 / 420, box["y"] + 50)
    return str(chart.locator(".readout").inner_text())


def bounds(node: Any) -> dict[str, float]:
    found: dict[str, float] = node.bounding_box()
    return found


def assert_no_overflow(page: Any, where: str) -> None:
    wide, room = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert wide <= room, f"{where}: {wide} pixels in {room}"


# ── Views ────────────────────────────────────────────────────────────────────────────────────────


def test_every_view_at_every_width(open_page: Opener, page_file: Path) -> None:
    for width in (1400, 390):
        page = open_page(page_file, width=width)
        for view in VIEWS:
            show(page, view)
            page.locator(f"#view-{view} .card").first.wait_for()
            visible = page.locator("main > section:visible")
            assert visible.evaluate_all("all => all.map(x => x.id)") == [f"view-{view}"]
            assert page.locator('nav a[aria-current="page"]').inner_text().lower() == view
            assert_no_overflow(page, f"{view} at {width}")
            if SCREENSHOTS:
                shoot(page, f"{view}-{width}")


def shoot(page: Any, name: str) -> None:
    Path(str(SCREENSHOTS)).mkdir(parents=True, exist_ok=True)
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        page.wait_for_timeout(150)
        page.screenshot(path=f"{SCREENSHOTS}/{name}-{scheme}.png", full_page=True)


def test_the_overview_says_what_ran_and_how_it_went(open_page: Opener, page_file: Path) -> None:
    page = open_page(page_file)
    card = page.locator(".run")
    assert card.locator("h2").inner_text() == "ordinary"
    assert "40.0 % (35.0–45.0)" in card.inner_text()
    assert "+50.0 points" in card.inner_text()
    shown = card.locator(".results tr", has_text="sampled").locator("td").all_inner_texts()
    assert shown == ["40.0 % (35.0–45.0)", "90.0 % (85.0–95.0)", "+50.0 points"]
    page.click("summary >> text=Full configuration")
    assert "world: shape_grid" in card.inner_text()
    titles = page.locator(".chart h3").all_inner_texts()
    assert {"Held-out accuracy", "Training reward", "Entropy", "Value loss"} <= set(titles)
    assert readout(page, "Entropy") == "step 30: entropy 0.033", "as in the progress bar"
    before = page.locator('.chart[data-title="Entropy"] .line').get_attribute("d")
    page.locator("#smooth").fill("0")
    assert page.locator('.chart[data-title="Entropy"] .line').get_attribute("d") != before
    page.select_option("#more", label="optimize odd metric")
    assert page.locator(".more .chart h3").all_inner_texts() == ["optimize: odd metric"]


def test_the_page_opens_on_a_held_out_prompt_before_and_after(
    open_page: Opener, page_file: Path, run: Path
) -> None:
    """By value, on one y-axis, with the terms beside it and curves above the fold."""
    page = open_page(page_file, width=1280)
    panels = page.locator("#view-overview .pair .response")
    panels.nth(1).wait_for()
    assert panels.locator("h3").all_inner_texts() == ["before: step 0", "after: step 20"]
    for place, step in enumerate((0, 20)):
        real = recorded(run, "watched", step)[0]
        shown = panels.nth(place).locator(".chip").first.inner_text()
        assert shown_number(shown.split()[-1]) == pytest.approx(real["reward"], rel=1e-3)
        assert panels.nth(place).locator(".scale").inner_text().startswith("V ")
    axes = panels.locator(".staircase").evaluate_all(
        "all => all.map(x => [...x.querySelectorAll('.grid')].map(y => y.getAttribute('y1')))"
    )
    assert axes[0] == axes[1] != []
    assert page.locator(".terms dt").all_inner_texts() == ["segment", "V", "Â", "H"]
    bottoms = [x["y"] + x["height"] for x in map(bounds, panels.locator(".staircase").all())]
    assert bottoms[0] == pytest.approx(bottoms[1], abs=1), "at one height"
    for what in (".terms", ".chart svg"):
        box = page.locator(what).first.bounding_box()
        assert box["y"] + box["height"] < 900, f"{what} is above the fold"
    assert page.locator(".headline").inner_text().split("\n")[-1] == "43.0 % → 93.0 % +50.0 points"
    second = recorded(run, "watched", 20)[1]["reward"]
    page.click("#pair-next")
    assert page.locator(".pair .steps").inner_text().strip().endswith("2 of 8")
    shown = panels.nth(1).locator(".chip").first.inner_text()
    assert shown_number(shown.split()[-1]) == pytest.approx(second, rel=1e-3)
    assert page.evaluate("document.activeElement.id") == "pair-next"
    page.set_viewport_size({"width": 390, "height": 844})
    assert_no_overflow(page, "the pair")


def test_without_two_evaluations_the_page_opens_on_one_response(
    open_page: Opener, tmp_path: Path
) -> None:
    page = open_page(written(make_run(tmp_path / "grpo", value=False)))
    page.locator(".pair .response").wait_for()
    assert page.locator(".pair h2").inner_text() == "One response"
    assert page.locator(".terms dt").all_inner_texts() == ["segment", "Â", "H"], "no critic"
    assert page.locator(".pair .staircase .walk").count() == 0
    page = open_page(written(make_run(tmp_path / "none", steps=())))
    assert page.locator(".chart").count() > 3
    assert page.locator(".pair").count() == 0


def test_steps_are_numbered_as_in_the_progress_bar(open_page: Opener, tmp_path: Path) -> None:
    stages = [{"kind": "warm_start", "steps": 300}, {"kind": "optimize", "steps": 20}]
    run = make_run(
        tmp_path / "a", config={"stages": stages}, begun=300, steps=(305,), watched_steps=(300, 320)
    )
    page = open_page(written(run))
    titles = page.locator(".pair h3")
    titles.nth(1).wait_for()
    assert titles.all_inner_texts() == ["before: step 0/20", "after: step 20/20"]
    assert page.locator(".headline").inner_text().startswith("2 reinforce, step 20/20")
    assert readout(page, "Entropy") == "step 20: entropy 0.050"
    last = page.locator('.chart[data-title="Entropy"] svg text')
    assert "2 reinforce, step" in last.all_text_contents()
    show(page, "trajectories")
    assert page.locator("#choose-file option").all_inner_texts() == [
        "2 reinforce, step 5/20",
        "held-out, 2 reinforce, step 0/20",
        "held-out, 2 reinforce, step 20/20",
    ]


def test_curves_without_a_meaning_are_not_drawn(open_page: Opener, tmp_path: Path) -> None:
    run = make_run(tmp_path / "grpo", steps=())
    with MetricsWriter(run / "metrics.jsonl") as writer:
        writer.write(21, "optimize", {"segments": 1.0, "segment_length": 30.0})
    titles = open_page(written(run)).locator(".chart h3").all_inner_texts()
    assert "Segment length" in titles
    assert "Segments per response" not in titles


def test_warnings_are_shown_as_text_whatever_they_hold(open_page: Opener, tmp_path: Path) -> None:
    run = make_run(tmp_path / "warned")
    with MetricsWriter(run / "metrics.jsonl") as metrics:
        metrics.warn(7, "truncated", "Set a larger rollout.max_tokens.")
        metrics.warn(8, "x", HOSTILE[0])
    page = open_page(written(run))
    shown = page.locator(".warnings li").all_text_contents()
    assert shown == ["Step 7: Set a larger rollout.max_tokens.", f"Step 8: {HOSTILE[0]}"]
    assert page.evaluate("window.pwned") is None


def test_seeds_are_drawn_as_one_line(open_page: Opener, tmp_path: Path) -> None:
    runs = [make_run(tmp_path / f"seed-{n}", seed=n) for n in range(3)]
    runs.append(make_run(tmp_path / "other", config={"algorithm": {"name": "ppo"}}))
    page = open_page(written(*runs, to=tmp_path / "page.html"))
    assert page.locator('.chart[data-title="Training reward"] .line').count() == 2
    last = [read_run(run).series("reward", "optimize")[1][-1] for run in runs]
    said = readout(page, "Training reward")
    match = re.fullmatch(r"step 20: seed-0 \(3 seeds\) (\S+) · other (\S+)", said)
    assert match, said
    assert shown_number(match[1]) == pytest.approx(sum(last[:3]) / 3, rel=1e-3)
    assert shown_number(match[2]) == pytest.approx(last[3], rel=1e-3)
    page.uncheck("#grouped")
    lines = page.locator('.chart[data-title="Training reward"] .line')
    color = "all => all.map(x => getComputedStyle(x).{})"
    drawn = lines.evaluate_all(color.format("stroke"))
    swatches = page.locator(".controls .swatch")
    assert drawn == swatches.evaluate_all(color.format("backgroundColor"))
    assert len(set(drawn)) == 4
    assert page.evaluate("document.activeElement.id") == "grouped"
    show(page, "trajectories")
    steps = page.locator("#choose-file option").all_inner_texts()
    assert steps[0] == "seed-0 · step 1"
    assert len(steps) == 12
    for width in (1400, 390):
        page.set_viewport_size({"width": width, "height": 900})
        assert_no_overflow(page, f"runs at {width}")


def test_several_runs_are_compared_before_their_facts(open_page: Opener, tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "one"), make_run(tmp_path / "two")]
    page = open_page(written(*runs, to=tmp_path / "page.html"))
    rows = page.locator(".comparison tbody tr")
    assert rows.locator("th").all_inner_texts() == ["one", "two"]
    assert rows.first.locator("td").first.inner_text() == "90.0 % (+50.0 points)"
    assert page.locator(".chart").first.bounding_box()["y"] < 900
    kinds = page.locator('.chart[data-title="Held-out accuracy"] .legend li')
    assert kinds.all_inner_texts() == ["── sampled", "╌╌ greedy"], "what is solid, what is dashed"
    assert page.locator('.chart[data-title="Training reward"] .legend').count() == 0
    assert page.locator(".run").first.bounding_box()["y"] > 900


def test_the_page_explains_symbols_and_curves(open_page: Opener, page_file: Path) -> None:
    page = open_page(page_file)
    meaning = page.locator(".glossary dd").first
    assert not meaning.is_visible()
    page.locator(".glossary summary").press("Enter")
    assert meaning.is_visible()
    terms = ["segment", "H", "V", "Â", "λ", "ratio", "clip fraction"]
    assert page.locator(".glossary dt").all_inner_texts() == terms
    beside = page.locator('.chart[data-title="Explained variance of the reward"] .healthy')
    assert beside.inner_text() == f"healthy: {HEALTHY['explained_variance']}"
    length = page.locator('.chart[data-title="Response length"] .healthy')
    assert length.inner_text() == NO_RANGE


def test_a_method_without_values(open_page: Opener, tmp_path: Path) -> None:
    run = make_run(tmp_path / "grpo", value=False, holes=True, not_finite=False)
    page = open_page(written(run), "trajectories")
    assert page.locator('[data-color="value"]').is_disabled()
    page.keyboard.press("3")
    assert page.locator('[data-color="entropy"]').get_attribute("aria-checked") == "true"
    page.locator('.response .token[data-t="1"]').hover()
    numbers = page.locator(".numbers").inner_text()
    assert "none: not written by the policy" in numbers
    assert "V(s_m)" not in numbers


def test_numbers_that_are_none(open_page: Opener, tmp_path: Path) -> None:
    page = open_page(written(make_run(tmp_path / "a", not_finite=True)), "trajectories")
    assert page.locator(".chip").inner_text() == "reward NaN"
    for token, key, said in ((0, "entropy", "NaN nats"), (1, "value", "∞"), (2, "advantage", "−∞")):
        page.locator(f'.response .token[data-t="{token}"]').hover()
        assert page.locator(f'.numbers [data-number="{key}"]').inner_text() == said
    page.select_option("#choose-sort", "reward")
    assert page.locator(".item").count() == 6
    show(page, "overview")
    assert page.locator('.chart[data-title="Training reward"]').is_visible()


def test_numbers_that_are_huge(open_page: Opener, tmp_path: Path) -> None:
    """Ticks of huge numbers: adding a small step has no effect, so counting up must not loop."""
    run = make_run(tmp_path / "a", steps=())
    most = 2**53 - 1
    huge = [(most - 1, most), (most, most - 1), (1, 10**400), (2, 1e308), (3, -1e308), (4, 0.5)]
    (run / "metrics.jsonl").write_text(
        "".join(
            f'{{"step": {step}, "stage": "optimize", "reward": {x}, "entropy": {most - step}}}\n'
            for step, x in huge
        )
        + "".join(
            f'{{"step": {most - n}, "stage": "optimize", "kl": {10**300 + n}}}\n' for n in range(2)
        )
    )
    page = open_page(written(run))
    chart = page.locator('.chart[data-title="Training reward"] svg')
    assert "ends at 0.5" in chart.get_attribute("aria-label")
    assert page.locator(".chart").count() > 1


def test_a_run_without_responses(open_page: Opener, tmp_path: Path) -> None:
    page = open_page(written(make_run(tmp_path / "a", steps=())), "trajectories")
    assert "recorded no responses" in page.locator("#view-trajectories").inner_text()
    page.keyboard.press("j")
    show(page, "partitions")
    assert "recorded no responses" in page.locator("#view-partitions").inner_text()
    long = make_run(tmp_path / "long", tokens=300, responses=2)
    page = open_page(written(long, megabytes=0.01), "trajectories")
    assert "--megabytes" in page.locator("#view-trajectories").inner_text()


@pytest.mark.usefixtures("as_users_run_it")
def test_columns_of_other_versions(open_page: Opener, tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", steps=(1,), watched_steps=(1,))
    (run / "rollouts" / "step-000001.jsonl").write_bytes(b"".join(ODD_ROWS))
    (run / "rollouts" / "step-99999999999999999999.jsonl").write_bytes(b"{}\n")
    (run / "watched" / "step-000001.jsonl").write_bytes(b"")
    (run / "metrics.jsonl").write_bytes(b"".join(ODD_METRICS))
    page = open_page(written(run))
    page.locator(".run").wait_for()
    show(page, "trajectories")
    for number in range(len(ODD_ROWS)):
        assert page.locator(".steps .quiet").inner_text() == f"{number + 1} of {len(ODD_ROWS)}"
        for key in ("1", "2", "3", "4", "5", "c", "ArrowRight", "Shift+ArrowRight", "ArrowLeft"):
            page.keyboard.press(key)
        page.keyboard.press("j")
    for sort in ("reward", "length", "credit"):
        page.select_option("#choose-sort", sort)
        assert page.locator(".item").count() == len(ODD_ROWS)
    show(page, "partitions")
    for _ in ODD_ROWS:
        page.keyboard.press("j")
    page.select_option("#cut-file", label="held-out, step 1")
    page.locator("#view-partitions", has_text="No response was recorded").wait_for()


def test_answers_of_checkpoints_to_benchmarks(open_page: Opener, tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    plain = open_page(written(run))
    assert not plain.locator('nav a[data-view="benchmarks"]').is_visible(), "none was run"
    for checkpoint in ("step-000002", "step-000003"):
        add_benchmark(run, checkpoint)
    page = open_page(written(run))
    show(page, "benchmarks")
    view = page.locator("#view-benchmarks")
    rows = view.locator(".results").first.locator("tbody tr")
    assert rows.first.inner_text().split("\t") == [
        "LogicVista: accuracy", *["33.33 (0.8 – 90.6, n = 3)"] * 2
    ]  # fmt: skip
    assert view.locator(".item").count() == 2, "wrong answers come first"
    view.locator("label:has-text('show') select").select_option(label="right")
    assert view.locator(".item").count() == 1
    detail = view.locator(".detail")
    for said in ("question 1", "step-000002 to 1", "step-000003 to 1", "answer: A", "expected: A"):
        assert said in detail.inner_text()
    assert detail.locator("img").evaluate("x => x.naturalWidth") == 24
    view.locator("label:has-text('show') select").select_option(label="all")
    page.keyboard.press("Escape")
    page.keyboard.press("j")
    assert "question 1" in detail.inner_text()
    assert view.locator(".quiet[role=status]").inner_text().startswith("3 answers; 3 of 447")
    for width in (1280, 390):
        page.set_viewport_size({"width": width, "height": 900})
        assert_no_overflow(page, f"benchmarks at {width}")


# ── Trajectories ─────────────────────────────────────────────────────────────────────────────────


def test_pointing_at_a_token_gives_its_recorded_numbers(
    open_page: Opener, page_file: Path, run: Path
) -> None:
    page = open_page(page_file, "trajectories?file=0-rollouts-10&row=2")
    real = recorded(run, "rollouts", 10)[2]
    assert page.locator(".response .token").count() == len(real["tokens"])
    for token in range(len(real["tokens"])):
        page.locator(f'.response .token[data-t="{token}"]').hover()
        shown = page.locator(".numbers dd").evaluate_all(
            "all => Object.fromEntries(all.map(x => [x.dataset.number, x.innerText]))"
        )
        for key in COLUMNS:
            assert math.isclose(shown_number(shown[key]), real[key][token], rel_tol=5.0001e-4)
        assert shown["token"].endswith(f"(id {real['tokens'][token]})")
        assert shown["place"] == f"{token + 1} of {len(real['tokens'])}"
        segments = max(real["segment"]) + 1
        assert shown["segment"].startswith(f"{real['segment'][token] + 1} of {segments}, ")
    reward = page.locator('[data-number="reward"]').inner_text()
    assert shown_number(reward.removeprefix("reward ")) == pytest.approx(real["reward"], rel=1e-3)
    assert page.locator(".reason").inner_text() == real["reason"].strip()
    assert page.locator(".prompt img").evaluate("x => x.naturalWidth") == 24
    assert "question 2" in page.locator(".prompt").inner_text()


def test_tapping_a_token(open_page: Opener, page_file: Path, run: Path) -> None:
    page = open_page(
        page_file, "trajectories?file=0-rollouts-15", width=390, has_touch=True, is_mobile=True
    )
    real = recorded(run, "rollouts", 15)[0]
    for token in (1, 4):
        page.locator(f'.response .token[data-t="{token}"]').tap()
        shown = page.locator('.numbers [data-number="entropy"]').inner_text()
        assert math.isclose(shown_number(shown), real["entropy"][token], rel_tol=5.0001e-4)
    page.locator(".staircase").tap()
    assert page.locator(".pointed").get_attribute("data-t") not in ("1", "4")


def test_trajectories_open_before_and_after(open_page: Opener, page_file: Path) -> None:
    """A held-out prompt at the first and the last evaluation, by value, on one y-axis."""
    page = open_page(page_file, "trajectories")
    page.locator(".response").nth(1).wait_for()
    assert page.input_value("#choose-file") == "0-watched-20"
    assert page.input_value("#beside") == "0-watched-0"
    assert page.locator('[data-color="value"]').get_attribute("aria-checked") == "true"
    axes = page.locator(".staircase").evaluate_all(
        "all => all.map(x => [...x.querySelectorAll('.grid')].map(y => y.getAttribute('y1')))"
    )
    assert len(axes) == 2
    assert axes[0] == axes[1]


def test_colors(open_page: Opener, page_file: Path, run: Path) -> None:
    page = open_page(page_file, "trajectories?file=0-rollouts-10")
    real = recorded(run, "rollouts", 10)[0]
    seen = {background(page, 0)}
    for key in COLUMNS[1:]:
        page.click(f'[data-color="{key}"]')
        assert page.locator(f'[data-color="{key}"]').get_attribute("aria-checked") == "true"
        seen.add(background(page, 0))
    assert len(seen) >= 4
    page.click('[data-color="advantage"]')
    nothing = real["advantage"].index(0.0)
    assert background(page, nothing) == "rgb(255, 255, 255)", "no credit, no color"
    for token, credit in enumerate(real["advantage"]):
        red, _, blue = map(int, re.findall(r"\d+", background(page, token)))
        assert (blue - red) * credit >= 0, "blue is credit, orange is blame"
    strongest = max(range(len(real["tokens"])), key=lambda t: abs(real["advantage"][t]))
    assert background(page, strongest) != "rgb(255, 255, 255)"
    page.keyboard.press("t")
    assert background(page, nothing) == "rgb(24, 28, 36)", "the card's own color when dark"


def test_sorting(open_page: Opener, page_file: Path, run: Path) -> None:
    page = open_page(page_file, "trajectories?file=0-rollouts-5")
    real = recorded(run, "rollouts", 5)
    keys: dict[str, Callable[[dict[str, Any]], float]] = {
        "reward": lambda x: -x["reward"],
        "reward_up": lambda x: x["reward"],
        "length": lambda x: -len(x["tokens"]),
        "length_up": lambda x: len(x["tokens"]),
        "credit": lambda x: -max(map(abs, x["advantage"])),
        "recorded": lambda x: 0,
    }
    orders = set()
    for name, key in keys.items():
        page.select_option("#choose-sort", name)
        expected = [f"{x['reward']:.4g}" for x in sorted(real, key=key)]
        assert [f"{shown_number(x):.4g}" for x in rewards(page)] == expected
        orders.add(tuple(expected))
    assert len(orders) == len(keys)


def test_responses_that_no_reward_calls_correct_are_neither_right_nor_wrong(
    open_page: Opener, tmp_path: Path
) -> None:
    made = make_run(tmp_path / "silent", steps=(5,), responses=4, tokens=10)
    file = made / "rollouts" / "step-000005.jsonl"
    file.write_text(re.sub('"correct": ?(true|false)', '"correct":null', file.read_text()))
    page = open_page(written(made), "trajectories?file=0-rollouts-5")
    assert page.locator(".item .mark").all_text_contents() == ["·"] * 4
    assert page.locator(".mark.right, .mark.wrong, .chip.right").count() == 0
    for show in ("right", "wrong"):
        page.select_option("#choose-show", show)
        assert "0 of 4 responses" in page.locator("aside .quiet").inner_text()


def test_filters_and_search(open_page: Opener, page_file: Path, run: Path) -> None:
    page = open_page(page_file, "trajectories?file=0-rollouts-5")
    real = recorded(run, "rollouts", 5)
    assert 0 < sum(x["correct"] for x in real) < len(real)
    for show, keep in (
        ("right", lambda x: x["correct"]),
        ("wrong", lambda x: not x["correct"]),
        ("truncated", lambda x: x["truncated"]),
        ("all", lambda x: True),
    ):
        page.select_option("#choose-show", show)
        assert len(rewards(page)) == sum(map(keep, real))
        assert f"{sum(map(keep, real))} of 8 responses" in page.locator("aside .quiet").inner_text()
    page.fill("#search", "QUESTION 3")
    assert page.locator(".item").count() == 1
    assert "question 3" in page.locator(".prompt").inner_text()
    page.fill("#search", "step-5/2")
    assert page.locator(".item").count() == 2, "both samples of the prompt"
    page.fill("#search", "nowhere to be found")
    assert "No response matches" in page.locator(".detail").inner_text()
    page.keyboard.press("Escape")
    page.keyboard.press("j")


def test_the_same_prompt_at_an_earlier_step(open_page: Opener, page_file: Path, run: Path) -> None:
    page = open_page(page_file, "trajectories?file=0-watched-20&row=3")
    page.select_option("#beside", label="held-out, step 0")
    panels = page.locator(".beside .response")
    assert panels.locator("h3").all_inner_texts() == ["held-out, step 0", "held-out, step 20"]
    for place, step in enumerate((0, 20)):
        real = recorded(run, "watched", step)[3]
        shown = panels.nth(place).locator(".chip").first.inner_text()
        assert shown_number(shown.split()[-1]) == pytest.approx(real["reward"], rel=1e-3)
        assert panels.nth(place).locator(".token").count() == len(real["tokens"])
    left, right = (panels.nth(n).bounding_box() for n in (0, 1))
    assert left["x"] + left["width"] <= right["x"]
    page.select_option("#choose-file", label="step 5")
    assert panels.count() == 1
    assert page.locator("#beside").is_disabled(), "asked once"
    page.set_viewport_size({"width": 390, "height": 900})
    assert_no_overflow(page, "one response")


def test_the_page_says_what_it_left_out(open_page: Opener, run: Path, tmp_path: Path) -> None:
    page = open_page(written(run, to=tmp_path / "x.html", steps=2, responses=3), "trajectories")
    said = page.locator("aside .quiet").inner_text()
    assert "3 of 3 responses; the page holds 3 of 8 recorded responses." in said
    assert "2 of 3 recorded steps are on the page." in said


# ── Keys, focus, address ─────────────────────────────────────────────────────────────────────────


def test_keys(open_page: Opener, page_file: Path, run: Path) -> None:
    page = open_page(page_file, "trajectories?file=0-rollouts-10")
    press = page.keyboard.press
    place = page.locator(".steps .quiet")
    press("j")
    press("j")
    press("k")
    assert place.inner_text() == "2 of 8"
    assert page.locator(".item[aria-current]").evaluate_all(
        "all => all.map(x => [...x.closest('ol').children].indexOf(x.parentElement))"
    ) == [1]
    for number, key in enumerate(COLUMNS, start=1):
        press(str(number))
        assert page.locator('[aria-checked="true"]').get_attribute("data-color") == key
    press("c")
    assert page.locator('[aria-checked="true"]').get_attribute("data-color") == COLUMNS[0]
    for key, token in (("ArrowRight", 0), ("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1)):
        press(key)
        assert page.locator(".pointed").get_attribute("data-t") == str(token)
    press("2")
    assert page.locator(".pointed").get_attribute("data-t") == "1", "kept in another color"
    segments = recorded(run, "rollouts", 10)[1]["segment"]
    press("Shift+ArrowRight")
    assert page.locator(".pointed").get_attribute("data-t") == str(segments.index(2))
    press("[")
    assert page.locator("#choose-file").input_value() == "0-rollouts-5"
    press("[")
    press("]")
    press("]")
    press("]")
    assert page.locator("#choose-file").input_value() == "0-rollouts-15"
    press("/")
    assert page.evaluate("document.activeElement.id") == "search"
    page.keyboard.type("jkc")
    assert page.locator("#search").input_value() == "jkc", "letters, not commands"
    press("Escape")
    theme = page.evaluate("getComputedStyle(document.body).backgroundColor")
    press("t")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != theme
    press("?")
    assert page.locator("dialog").is_visible()
    press("Escape")
    assert not page.locator("dialog").is_visible()
    show(page, "partitions")
    before = page.locator("#cut-row").input_value()
    press("j")
    assert page.locator("#cut-row").input_value() != before
    press("k")
    assert page.locator("#cut-row").input_value() == before


def test_what_is_in_use_stays_in_use(open_page: Opener, page_file: Path) -> None:
    page = open_page(page_file, "trajectories")
    page.focus("#next")
    for place in (2, 3):
        page.keyboard.press("Enter")
        assert page.locator(".steps .quiet").inner_text() == f"{place} of 8"
        assert page.evaluate("document.activeElement.id") == "next"
    page.focus('[data-color="value"]')
    page.keyboard.press("Space")
    assert page.evaluate("document.activeElement.dataset.color") == "value"
    page.locator(".item").nth(5).focus()
    page.keyboard.press("Enter")
    assert page.locator(".steps .quiet").inner_text() == "6 of 8"
    assert page.evaluate("document.activeElement.className") == "item"


def test_focus_is_seen(open_page: Opener, page_file: Path) -> None:
    page = open_page(page_file, "trajectories")
    seen = []
    for _ in range(30):
        page.keyboard.press("Tab")
        seen.append(
            page.evaluate(
                """() => {
                    const x = document.activeElement, style = getComputedStyle(x);
                    const name = x.id || x.dataset.view || x.className || x.tagName;
                    const width = parseFloat(style.outlineWidth);
                    return [name, x.matches(":focus-visible"), style.outlineStyle, width];
                }"""
            )
        )
    names = {str(name) for name, *_ in seen}
    assert {"skip", "overview", "theme", "choose-file", "search", "item", "next"} <= names
    for name, visible, style, width in seen:
        if name != "BODY":
            assert (visible, style) == (True, "solid"), name
            assert width >= 2, name


def test_skipping_to_the_content(open_page: Opener, page_file: Path) -> None:
    page = open_page(page_file, "trajectories")
    page.keyboard.press("Tab")
    box = page.locator(".skip").bounding_box()
    assert box["x"] >= 0
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.tagName") == "MAIN"
    assert page.locator("#view-trajectories").is_visible(), "the same view"


def test_the_address_restores_the_view(open_page: Opener, page_file: Path) -> None:
    page = open_page(page_file, "trajectories")
    page.select_option("#choose-file", "0-watched-10")
    page.select_option("#choose-sort", "credit")
    page.select_option("#choose-show", "wrong")
    page.fill("#search", "question")
    page.click('[data-color="ratio"]')
    page.select_option("#beside", label="held-out, step 20")
    page.click("#next")

    def state() -> list[Any]:
        chosen = [page.locator(f"#choose-{x}").input_value() for x in ("file", "sort", "show")]
        return [
            *chosen,
            page.locator("#search").input_value(),
            page.locator('[aria-checked="true"]').get_attribute("data-color"),
            page.locator(".steps .quiet").inner_text(),
            page.locator(".response h3").all_inner_texts(),
            page.locator(".response .tokens").all_inner_texts(),
        ]

    before = state()
    page.reload()
    page.locator(".response").first.wait_for()
    assert state() == before
    again = open_page(page.url)  # as another user opens it
    again.locator(".response").first.wait_for()
    assert again.locator(".response .tokens").all_inner_texts() == before[-1]
    show(page, "partitions")
    page.select_option("#cut-row", "3")
    page.reload()
    page.locator("#cut-row").wait_for()
    assert page.locator("#cut-row").input_value() == "3"


NOWHERE = (
    *("nonsense", "?", "overview?%E0%A4%A", "trajectories?row=-5&file=9-x-1"),
    *("trajectories?row=1e9&sort=x&show=x&color=x", "trajectories?row=0.5&beside=0-rollouts-999"),
    *("trajectories?__proto__=x&constructor=y", "trajectories?search=%00%FF&row=NaN"),
    *("partitions?row=1.5&file=__proto__", "partitions?row=1e9"),
)


def test_addresses_that_lead_nowhere(open_page: Opener, page_file: Path) -> None:
    page = open_page(page_file)
    for address in NOWHERE:
        page.goto(f"{page_file.as_uri()}#{address}")
        page.reload()
        page.locator("section:visible .card").first.wait_for()
        show(page, "trajectories")
        page.keyboard.press("j")


# ── Partitions ───────────────────────────────────────────────────────────────────────────────────


def test_partitions_cut_where_the_package_cuts(
    open_page: Opener, page_file: Path, run: Path
) -> None:
    page = open_page(page_file, "partitions?file=0-rollouts-15&row=4")
    real = recorded(run, "rollouts", 15)[4]
    page.locator(".cut").first.wait_for()
    found: dict[str, list[int]] = dict(
        page.locator(".cut").evaluate_all(
            """all => all.map(card => [card.querySelector("h3").textContent, [
                ...card.querySelectorAll(".segment")].map(x => +x.lastElementChild.dataset.t)])"""
        )
    )
    count = len(real["tokens"])
    rollouts = Rollouts.from_columns(
        torch.ones(1, count, dtype=torch.bool),
        logp_old=torch.tensor([real["logp_old"]]),
        entropy=torch.tensor([real["entropy"]]),
        pieces=[real["pieces"]],
    )
    last = [t for t in range(count) if real["segment"][t : t + 2] != [real["segment"][t]] * 2]
    assert found["As recorded: the segments that the run used"] == last
    shown = (TopEntropy(0.1), TopEntropy(0.3), ProbabilityCutpoints(), Newline(), StepMarkers())
    for partition in (*shown, FixedLength(16)):
        segments = partition(rollouts)
        assert found[partition.label()] == segments.end[0][segments.mask[0]].tolist()
    assert found[Token().label()] == list(range(count))
    assert found[Response().label()] == [count - 1]
    assert len({tuple(x) for x in found.values()}) >= 8


# ── Light, dark, paper ───────────────────────────────────────────────────────────────────────────

PAIRS = [
    *(("ink", "page"), ("ink", "card"), ("quiet", "page"), ("quiet", "card"), ("accent", "card")),
    *(("card", "accent"), ("right", "right-ground"), ("wrong", "wrong-ground"), ("right", "card")),
    *(("wrong", "card"), ("accent", "page")),
]


def contrast(one: str, other: str) -> float:
    """WCAG 2 contrast of two colors, written "#1d232c" or "rgb(29, 35, 44)"."""

    def luminance(color: str) -> float:
        if color.startswith("#"):
            color = color[1:] if len(color) == 7 else "".join(2 * x for x in color[1:])
            parts = [int(color[i : i + 2], 16) for i in (0, 2, 4)]
        else:
            parts = [int(x) for x in re.findall(r"\d+", color)[:3]]
        linear = [x / 12.92 if x <= 0.03928 else ((x + 0.055) / 1.055) ** 2.4
                  for x in (part / 255 for part in parts)]  # fmt: skip
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out(open_page: Opener, page_file: Path, scheme: str) -> None:
    page = open_page(page_file, "trajectories", color_scheme=scheme)
    variables = page.evaluate(
        """names => { const found = getComputedStyle(document.documentElement);
            return Object.fromEntries(names.map(x => [x, found.getPropertyValue(`--${x}`)])); }""",
        sorted({x for pair in PAIRS for x in pair}),
    )
    for one, other in PAIRS:
        assert contrast(variables[one], variables[other]) >= 4.5, (one, other)
    for key in COLUMNS:
        page.click(f'[data-color="{key}"]')
        painted = page.locator(".response .token").evaluate_all(
            "all => all.map(x => [getComputedStyle(x).color, getComputedStyle(x).backgroundColor])"
        )
        assert min(contrast(*x) for x in painted) >= 4.5, key


def test_light_and_dark(open_page: Opener, page_file: Path) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    light, dark = "rgb(245, 246, 248)", "rgb(15, 18, 23)"
    page = open_page(page_file, "trajectories", color_scheme="dark")
    assert page.evaluate(ground) == dark
    page.emulate_media(color_scheme="light")
    assert page.evaluate(ground) == light
    # not wait_for_function: it evaluates text while waiting, which the page forbids
    playwright.expect(page.locator(".token").first).to_have_css("color", "rgb(0, 0, 0)")
    page.click("#theme")
    assert page.evaluate(ground) == dark
    page.reload()
    assert page.evaluate(ground) == dark, "remembered"
    page.keyboard.press("t")
    assert page.evaluate(ground) == light


def test_paper(open_page: Opener, page_file: Path) -> None:
    page = open_page(page_file, "trajectories", color_scheme="dark")
    page.locator(".response").last.wait_for()
    page.emulate_media(media="print")
    for control in ("nav", ".tools", "aside", ".detail-bar", "#search", "#next", "select"):
        assert page.locator(control).locator("visible=true").count() == 0, control
    assert page.locator(".response .token").first.is_visible()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.evaluate("getComputedStyle(document.body).color") == "rgb(29, 35, 44)"
    assert len(page.pdf()) > 10_000
    assert page.locator("html").get_attribute("data-theme") is None, "the screen's again"
    page.emulate_media(media="screen")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(15, 18, 23)"


def test_everything_has_a_name(open_page: Opener, page_file: Path) -> None:
    page = open_page(page_file)
    for view in VIEWS:
        show(page, view)
        nameless = page.evaluate(
            """() => [...document.querySelectorAll("input, select, button, img, a, svg")]
                .filter(x => !x.closest("[hidden]"))
                .filter(x => !(x.labels?.length || x.getAttribute("aria-label") || x.alt
                    || x.textContent.trim()))
                .map(x => x.outerHTML.slice(0, 100))"""
        )
        assert nameless == [], view
    assert page.locator("html").get_attribute("lang") == "en"
    assert page.locator("h1").count() == 1


# ── A run that wants to harm ─────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    config = {text[:60]: text for text in HOSTILE}
    names = ['<img src=x onerror=window.pwned=8>"\u202e{{7*7}}', "second"]
    runs = [
        make_run(folder / names[0], texts=HOSTILE, config=config, metric_names=HOSTILE,
                 tokens=40, watched_steps=(1, 2), pictures=True),
        make_run(folder / names[1], steps=(1,)),
    ]  # fmt: skip
    add_benchmark(runs[0], HOSTILE[3].replace("/", ""), HOSTILE)
    add_benchmark(runs[0], "__proto__", HOSTILE[:-1])
    return written(*runs, to=folder / "page.html")


ELEMENTS = "document.querySelectorAll('script, style, iframe, object, embed, link, base').length"
"""Number of elements that could load or run something."""


def assert_harmless(page: Any, elements: int, where: str) -> None:
    """No script of the run ran, no element of its texts exists, and the layout holds."""
    assert page.evaluate("window.pwned") is None, where
    assert page.evaluate(ELEMENTS) == elements, where
    foreign = page.evaluate(
        """() => [...document.querySelectorAll("body *")].filter(x =>
            [...x.attributes].some(y => /^on|^autofocus$/i.test(y.name))
            || (x.tagName === "IMG" && !x.src.startsWith("data:image/"))
            || (x.tagName === "A" && !x.getAttribute("href").startsWith("#")))
            .map(x => x.outerHTML.slice(0, 80))"""
    )
    assert foreign == [], where
    assert_no_overflow(page, where)


@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_of_a_run_runs_where_the_page_opens(
    open_page: Opener, tmp_path: Path, width: int
) -> None:
    """The results, the pair and the names of the stages of one run."""
    stages = [{"kind": text, "steps": 2} for text in HOSTILE]
    settings = {"stages": stages, "algorithm": HOSTILE[0], "reward": HOSTILE[3]}
    run = make_run(
        tmp_path / "a", texts=HOSTILE, config=settings, watched_steps=(1, 2), pictures=True,
        metric_names=HOSTILE, tokens=40,
    )  # fmt: skip
    page = open_page(written(run), width=width)
    elements = page.evaluate(ELEMENTS)
    page.locator(".pair .response").nth(1).wait_for()
    assert_harmless(page, elements, "opened")
    assert HOSTILE[0] in page.locator(".headline").inner_text()
    for _ in range(3):
        page.click("#pair-next")
        page.locator(".pair .response .token").nth(3).hover()
        assert_harmless(page, elements, "the next prompt")
    assert HOSTILE[0] in page.locator(".pair").inner_text()
    assert re.fullmatch(r".*, step \d+: reward .*", readout(page, "Training reward"))
    assert_harmless(page, elements, "readout")


@pytest.mark.parametrize("width", [1400, 390])
def test_nothing_of_a_run_runs(open_page: Opener, hostile: Path, width: int) -> None:
    page = open_page(hostile, width=width)
    elements = page.evaluate(ELEMENTS)

    def nothing_happened(where: str) -> None:
        assert_harmless(page, elements, f"{where} at {width}")

    for card in page.locator(".run details summary").all():
        card.click()
    others = page.locator("#more option").count()
    assert others > len(HOSTILE)
    chosen = range(1, others, 1 if width == 1400 else 4)
    for number in chosen:
        page.select_option("#more", index=number)
    assert page.locator(".more .chart").count() == len(chosen)
    nothing_happened("overview")
    assert "<img src=x onerror=window.pwned=8>" in page.locator(".run h2").first.inner_text()
    assert "⟨202E⟩" in page.locator(".run h2").first.inner_text()
    assert "</script><script>window.pwned=2</script>" in page.locator("pre").first.inner_text()

    show(page, "trajectories")
    page.select_option("#choose-file", "0-rollouts-2")
    for row in range(6):
        page.locator(".item").nth(row).click()
        page.locator(".response .token").nth(3).hover()
        nothing_happened(f"response {row}")
    text = page.locator(".response .tokens").text_content()
    for seen in (
        *("<script>window.pwned=1</script>", "</script><script>window.pwned=2</script>"),
        *("<img src=x onerror=window.pwned=3>", '" onmouseover="window.pwned=4" x="', "{{7*7}}"),
        *("${window.pwned=7}", "%%SCRIPT%%", "&lt;b&gt;", "⟨202E⟩right to left⟨202C⟩", "␀ nothing"),
        *("⟨D800⟩ lone ⟨DFFF⟩", "⟨2028⟩ line ⟨2029⟩", "⟨001B⟩[31m red", "⟨E0041⟩ unseen"),
        *("⟨200F⟩שלום⟨200E⟩", "more characters]"),
    ):
        assert seen in text, seen
    for place in (".prompt", ".reason"):
        assert re.search(r"[<{$%&⟨W]", page.locator(place).inner_text())
    page.fill("#search", "<script>window.pwned=1")
    assert page.locator(".item").count() > 0
    page.fill("#search", "</script><img src=x onerror=window.pwned=9>")
    page.reload()
    assert page.locator("#search").input_value().startswith("</script>")
    page.fill("#search", "")
    page.select_option("#choose-file", "0-watched-2")
    page.select_option("#beside", "0-watched-1")
    assert page.locator(".response").count() == 2
    nothing_happened("beside")
    if SCREENSHOTS:
        shoot(page, f"hostile-{width}")

    show(page, "partitions")
    page.locator(".cut").first.wait_for()
    nothing_happened("partitions")

    show(page, "benchmarks")
    answers = page.locator("#view-benchmarks")
    answers.locator("summary").first.click()
    answers.locator("label:has-text('show') select").select_option(label="all")
    for row in range(answers.locator(".item").count()):
        answers.locator(".item").nth(row).click()
        nothing_happened(f"answer {row}")
    assert HOSTILE[3] in answers.locator(".detail").inner_text()
    page.keyboard.press("k")
    nothing_happened("benchmarks")


# ── A large run ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.usefixtures("as_users_run_it")
def test_a_large_run(open_page: Opener, tmp_path: Path) -> None:
    """200 steps of 512 responses of 500 tokens."""
    run = make_big_run(tmp_path / "big")
    begun = time.monotonic()
    path = written(run)
    assert time.monotonic() - begun < 60
    assert path.stat().st_size < 25e6
    page = open_page(path)
    paints = dict(
        page.evaluate("performance.getEntriesByType('paint').map(x => [x.name, x.startTime])")
    )
    assert paints["first-contentful-paint"] < 2000
    begun = time.monotonic()
    show(page, "trajectories")
    page.locator(".response .token").nth(400).wait_for(state="attached")
    assert time.monotonic() - begun < 3
    said = page.locator("aside .quiet").inner_text()
    assert "the page holds 24 of 512 recorded responses" in said
    assert "20 of 200 recorded steps" in said
    begun = time.monotonic()
    for key in ("[", "j", "j", "2", "k"):
        page.keyboard.press(key)
    page.locator(".steps .quiet", has_text="2 of 24").wait_for()
    assert time.monotonic() - begun < 4


@pytest.mark.usefixtures("as_users_run_it")
def test_a_very_long_response(open_page: Opener, tmp_path: Path) -> None:
    """More tokens than a JavaScript call can take arguments."""
    columns = ["segment", "value", "advantage", "logp_old", "entropy", "tokens"]
    run = make_run(tmp_path / "a", steps=(1,), responses=2, tokens=66_000, without=columns)
    page = open_page(written(run), "trajectories?color=ratio")
    page.locator(".response .token").nth(60_000).wait_for(state="attached")


# ── A run in progress ────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Path, Server]]:
    run = make_run(tmp_path / "live", steps=(1, 2), watched_steps=(1,), pictures=True)
    server = Server([run])
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield run, server
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_page_follows_a_run(served: tuple[Path, Server], open_page: Opener) -> None:
    run, server = served
    page = open_page(server.address)
    page.forgive("Failed to load resource")  # the browser logs every 503
    page.locator("#live", has_text="following").wait_for()
    page.click("summary >> text=Full configuration")
    chart = page.locator('.chart[data-title="Training reward"] svg')
    assert "ends at 0.75" not in chart.get_attribute("aria-label")
    with MetricsWriter(run / "metrics.jsonl") as writer:
        writer.write(21, "optimize", {"reward": 0.75})
    page.locator('.chart svg[aria-label*="ends at 0.75"]').wait_for()
    assert page.locator("details[open]").count() == 1, "what was opened stays open"

    show(page, "trajectories")
    assert page.locator("#choose-file").input_value() == "0-rollouts-2"
    page.locator("aside .quiet", has_text="6 of 6 responses").wait_for()
    picture = page.locator("#view-trajectories .prompt img")
    assert picture.evaluate("x => x.naturalWidth") == 24
    write_rollouts(run / "rollouts", 9, read_run(run).rollouts(1)[:4])
    page.locator('#choose-file option[value="0-rollouts-9"]').wait_for(state="attached")
    assert page.locator("#choose-file").input_value() == "0-rollouts-2", "what is read stays"
    page.keyboard.press("]")
    page.locator("aside .quiet", has_text="4 of 4 responses").wait_for()
    assert page.locator("#choose-file").input_value() == "0-rollouts-9"
    page.keyboard.press("[")
    page.locator("aside .quiet", has_text="6 of 6 responses").wait_for()
    assert page.locator("#choose-file").input_value() == "0-rollouts-2"

    run.rename(run.with_name("moved"))
    page.locator("#live", has_text="is not a run").wait_for()
    page.keyboard.press("[")
    page.locator(".detail", has_text="is not a run").wait_for()
    show(page, "overview")
    assert page.locator(".chart").count() > 3, "the last that was known"
    run.with_name("moved").rename(run)
    page.locator("#live", has_text="following").wait_for()
    show(page, "partitions")
    page.locator(".cut").first.wait_for()


def test_a_server_that_has_stopped(open_page: Opener, tmp_path: Path) -> None:
    run = make_run(tmp_path / "live", steps=())
    server = Server([run])
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    page = open_page(server.address)
    page.locator("#live", has_text="following").wait_for()
    server.shutdown()
    thread.join()
    server.server_close()
    page.locator("#live", has_text="the server has stopped").wait_for()
    assert page.locator(".chart").count() > 3
    page.forgive("Failed to load resource")
