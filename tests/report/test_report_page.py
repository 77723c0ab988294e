"""The report as a file and as a server: correct numbers, no external resources, hostile input."""

import base64
import hashlib
import http.client
import io
import json
import math
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from fake_runs import HOSTILE, ODD_METRICS, ODD_ROWS, add_benchmark, line, make_run, picture
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner, Result

from segcredit.cli import app
from segcredit.report import benchmarks, serve
from segcredit.report.data import Limits, Rows
from segcredit.report.explain import HEALTHY
from segcredit.report.page import Figure, Figures, write_report
from segcredit.report.serve import Server, list_rows
from segcredit.runlog import MetricsWriter, Run, read_run, write_rollouts
from segcredit.runlog.records import read_rollouts
from segcredit.train.progress import Terminal, result_table
from segcredit.train.trainer import Result as TrainResult


class Page(HTMLParser):
    """The parts of a page that a browser reads: data, code, policy, elements."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.data: dict[str, Any] = {}
        self.sizes: dict[str, int] = {}
        self.code: list[str] = []
        self.tags: list[str] = []
        self.policy = ""
        self.title = ""
        self._inside: tuple[str, str | None] | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        self.tags.append(tag)
        self._inside = (tag, given.get("id"))
        if given.get("http-equiv") == "Content-Security-Policy":
            self.policy = given["content"] or ""

    def handle_data(self, text: str) -> None:
        match self._inside:
            case ("script", None):
                self.code.append(text)
            case ("script", str(name)):
                self.data[name] = json.loads(text, parse_constant=no_constant)
                self.sizes[name] = len(text)
            case ("title", _):
                self.title += text

    def handle_endtag(self, tag: str) -> None:
        self._inside = None


def no_constant(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


def report_of(*runs: Path, limits: Limits | None = None, to: Path | None = None) -> Page:
    path = to or runs[0] / "report.html"
    write_report([read_run(run) for run in runs], path, limits or Limits())
    return Page(path.read_text(encoding="utf-8"))


def segcredit(*arguments: object) -> Result:
    runner = CliRunner(env={"FORCE_COLOR": None, "TTY_COMPATIBLE": None, "COLUMNS": "80"})
    return runner.invoke(app, ["report", *(str(x) for x in arguments)])


def error_of(result: Result) -> str:
    """One message on stderr, exit code 2, nothing else."""
    assert result.exit_code == 2, (result.output, result.exception)
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.stderr
    return result.stderr.removeprefix("error: ")


def assert_same(shown: Any, real: Any) -> None:
    """Equal to four significant digits, and no more of them than four."""
    if isinstance(real, float) and not math.isfinite(real):
        assert shown == ("NaN" if math.isnan(real) else "∞" if real > 0 else "−∞")
    else:
        assert math.isclose(shown, real, rel_tol=5.0001e-4), (shown, real)
        digits = re.sub(r"e.*|[-.]", "", repr(shown)).strip("0")
        assert len(digits) <= 4 or isinstance(real, int)


# ── Numbers ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("not_finite", [False, True])
def test_the_page_holds_the_numbers_of_the_run(tmp_path: Path, not_finite: bool) -> None:
    run = make_run(tmp_path / "a", watched_steps=(2, 4), samples=2, not_finite=not_finite)
    page = report_of(run)
    compared = 0
    for file in page.data["overview"]["files"]:
        found = page.data[f"rows-0-{file['kind']}-{file['step']}"]
        rows = read_rollouts(run / file["kind"] / f"step-{file['step']:06d}.jsonl")
        assert (file["shown"], file["total"]) == (len(rows), len(rows)) == (6, 6)
        for shown, real in zip(found["rows"], rows, strict=True):
            assert [found["texts"][i] for i in shown["pieces"]] == real["pieces"]
            assert shown["messages"] == [[x["role"], x["content"]] for x in real["messages"]]
            for key in ("tokens", "segment", "correct", "truncated", "reason", "answer"):
                assert shown[key] == real[key], key
            assert shown["id"] == real["prompt_id"]
            assert shown["length"] == len(real["tokens"])
            assert_same(shown["reward"], real["reward"])
            for key in ("entropy", "value", "advantage", "ratio", "logp_old"):
                assert len(shown[key]) == len(real["tokens"])
                for one, other in zip(shown[key], real[key], strict=True):
                    assert_same(one, other)
                    compared += 1
    assert compared > 1000


def test_curves_and_results_are_those_of_the_metrics(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", not_finite=True)
    shown = report_of(run).data["overview"]["runs"][0]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for stage in ("optimize", "evaluation"):
        real = [x for x in lines if x["stage"] == stage]
        for key in real[0].keys() - {"step", "stage"}:
            steps, values = shown["curves"][stage][key]
            assert steps == [x["step"] for x in real]
            for one, row in zip(values, real, strict=True):
                other = row[key]
                assert_same(one, float(other) if isinstance(other, str) else other)
    sampled = next(x for x in shown["results"] if x["label"] == "sampled accuracy")
    assert sampled["before"] == pytest.approx([0.4, 0.35, 0.45])
    assert sampled["after"] == pytest.approx([0.9, 0.85, 0.95])
    facts = dict(shown["facts"])
    assert (facts["method"], facts["seed"], facts["source"]) == ("sapo", "0", "0123456789ab")
    assert "seed: 0" in shown["config"]
    assert {"credit", "ratio"} <= {name for name, _ in shown["method"]}


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (14 / 256, 73 / 256, ["5.5 %", "28.5 %", "+23.0 points"]),  # of rounded percentages: +23.1
        (1 / 16, 3 / 16, ["6.2 %", "18.8 %", "+12.5 points"]),  # a browser rounds 6.25 to 6.3
        (0.9, 0.25, ["90.0 %", "25.0 %", "−65.0 points"]),
        (0.5, math.nan, ["50.0 %", "–", "–"]),
    ],
)
@pytest.mark.parametrize("share", [True, False])
def test_page_and_terminal_round_alike(
    tmp_path: Path, before: float, after: float, said: list[str], share: bool
) -> None:
    name = "sampled" if share else "reward"
    run = make_run(tmp_path / "a")
    shares = iter((before, after))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines = [x for x in lines if x["stage"] != "evaluation"]
    lines += [{"step": n, "stage": "evaluation", name: x} for n, x in enumerate(shares)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    (row,) = report_of(run).data["overview"]["runs"][0]["results"]
    table = result_table(TrainResult(None, None, {name: before}, {name: after}))
    assert table is not None
    assert [next(iter(x.cells)) for x in table.columns][1:] == row["texts"]
    assert row["share"] == share
    assert row["texts"] == said or not share


@pytest.mark.parametrize(
    ("before", "after", "unclear"),
    [
        ((0.5, 0.2, 0.8), (0.1, 0.0, 0.3), False),
        ((0.5, 0.2, 0.8), (0.3, 0.1, 0.6), True),
        ((0.3, 0.1, 0.6), (0.5, 0.2, 0.8), True),
        ((0.3, 0.29, 0.31), (0.5, 0.49, 0.51), False),
        ((0.5, 0.2, 0.8), (0.5, 0.2, 0.8), False),
        ((0.5, None, None), (0.4, None, None), False),
    ],
)
def test_changes_within_noise_are_marked_and_prompts_are_counted(
    tmp_path: Path, before: tuple[Any, ...], after: tuple[Any, ...], unclear: bool
) -> None:
    run = make_run(tmp_path / "a")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines = [x for x in lines if x["stage"] != "evaluation"]
    names = ("sampled", "sampled_low", "sampled_high")
    for step, row in enumerate((before, after)):
        known = {name: x for name, x in zip(names, row, strict=True) if x is not None}
        lines.append({"step": step, "stage": "evaluation", **known})
    (run / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    rows = [{"how": how, "sample": n} for how in ("sampled", "greedy") for n in (0, 0, 1, 1)]
    write_rollouts(run / "evaluations", 1, rows)
    found = report_of(run).data["overview"]["runs"][0]
    assert found["prompts"] == 2
    assert [x["noise"] for x in found["results"]] == [unclear]
    noise = ("sampled",) if unclear else ()
    ends = {"sampled": before[0]}, {"sampled": after[0]}
    table = result_table(TrainResult(None, None, *ends, prompts=2, noise=noise))
    assert table is not None
    assert table.title == "Held-out accuracy, 2 prompts"
    assert next(iter(table.columns[3].cells)).endswith("(within noise)") == unclear


def test_a_long_curve_is_thinned_and_keeps_its_end(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", steps=(), optimize=2001)
    steps, values = report_of(run).data["overview"]["runs"][0]["curves"]["optimize"]["entropy"]
    assert 1000 < len(steps) == len(values) <= 1500
    assert steps[-1] == 2001
    assert len({b - a for a, b in pairwise(steps)}) == 1


def test_a_method_without_a_critic_and_with_holes(tmp_path: Path) -> None:
    settings = {"algorithm": "grpo"}
    run = make_run(tmp_path / "a", value=False, holes=True, without=["ratio"], config=settings)
    page = report_of(run)
    for row in page.data["rows-0-rollouts-1"]["rows"]:
        assert "value" not in row
        assert "ratio" not in row
        assert row["entropy"]
        assert row["segment"].count(-1) == 2
    assert "value_loss" not in page.data["overview"]["runs"][0]["curves"]["optimize"]


@pytest.mark.parametrize("missing", ["pieces", "entropy", "logp_old", "segment", "tokens"])
def test_a_column_that_was_not_recorded(tmp_path: Path, missing: str) -> None:
    run = make_run(tmp_path / "a", without=[missing])
    found = report_of(run).data["rows-0-rollouts-1"]
    row = found["rows"][0]
    response = read_run(run).rollouts(1)[0]["response"]
    assert "".join(found["texts"][i] for i in row["pieces"]) == response
    whole = missing in ("segment", "tokens")
    assert any(row["cuts"]) == whole, "cuts need text, entropies and probabilities"
    if missing == "pieces":
        assert "entropy" not in row, "numbers of tokens say nothing about the whole text"


# ── How much of it ───────────────────────────────────────────────────────────────────────────────


def test_sampling_says_what_it_left_out(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", steps=range(10, 41), responses=11)
    data = report_of(run, limits=Limits(steps=5, responses=4)).data
    files = data["overview"]["files"]
    assert [x["step"] for x in files] == [10, 18, 25, 32, 40], "first, last, evenly between"
    assert [(x["shown"], x["total"]) for x in files] == [(4, 11)] * 5
    assert data["overview"]["recorded"] == [{"rollouts": 31, "watched": 0}]
    for file in files:
        rows = data[f"rows-0-rollouts-{file['step']}"]["rows"]
        assert [x["id"] for x in rows] == file["ids"]
        assert [x["id"] for x in rows] == [f"step-{file['step']}/{n}" for n in (0, 2, 5, 8)]


def test_one_step_is_the_last_one(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    data = report_of(run, limits=Limits(steps=1)).data
    assert [x["step"] for x in data["overview"]["files"]] == [3]


@pytest.mark.slow
@pytest.mark.parametrize("megabytes", [0.015, 0.05, 0.15])
def test_responses_take_no_more_room_than_they_may(tmp_path: Path, megabytes: float) -> None:
    run = make_run(tmp_path / "a", steps=range(1, 9), responses=8, tokens=60)
    page = report_of(run, limits=Limits(megabytes=megabytes))
    sizes = [size for name, size in page.sizes.items() if name.startswith("rows-")]
    assert 0.4 * megabytes * 1e6 < sum(sizes) <= megabytes * 1e6
    files = page.data["overview"]["files"]
    assert all(0 < x["shown"] < x["total"] == 8 for x in files)
    assert len(files) == len(sizes)
    if megabytes == 0.015:  # not one response of each step
        assert 1 < len(files) < 8
        assert page.data["overview"]["recorded"][0]["rollouts"] == 8


def test_not_even_one_response_fits(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", tokens=300, responses=3)
    page = report_of(run, limits=Limits(megabytes=0.01))
    assert page.data["overview"]["files"] == []
    assert page.data["overview"]["recorded"] == [{"rollouts": 3, "watched": 0}]


def test_pictures_take_no_more_room_than_they_may(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", steps=range(1, 9), pictures=True)
    noise = photograph(150, 150)
    for step, path in read_run(run).rollout_files.items():
        rows = read_rollouts(path)
        for number, row in enumerate(rows):
            row["images"] = [f"images/{step}-{number}.png"]
            noise.putpixel((0, 0), (step, number, 0))
            noise.save(run / row["images"][0])
        write_rollouts(run / "rollouts", step, rows)
    everything = report_of(run).data["images"]
    assert len(everything) == 48
    whole = sum(map(len, everything.values())) / 1e6
    page = report_of(run, limits=Limits(picture_megabytes=whole / 3))
    assert whole / 6 < sum(map(len, page.data["images"].values())) / 1e6 <= whole / 3
    steps = {int(name.split("/")[-1].split("-")[0]) for name in page.data["images"]}
    assert len(steps) == 8, "some of every step"


def test_long_texts_say_how_long_they_are(tmp_path: Path) -> None:
    long = "x" * 100_000
    page = report_of(make_run(tmp_path / "a", texts=[long]))
    found = page.data["rows-0-rollouts-1"]
    row = found["rows"][0]
    left = "… [98,000 more characters]"
    assert [x for x in found["texts"] if x] == [f"{'x' * 2000}{left}"]
    assert row["reason"].endswith("more characters]")
    assert row["answer"].endswith("more characters]")
    assert row["messages"][0][1].startswith("question 0 xxx")
    assert len(row["id"]) < 300
    assert page.data["overview"]["files"][0]["ids"][0] == row["id"], "cut alike everywhere"
    assert sum(page.sizes.values()) < 1e6


# ── Pictures ─────────────────────────────────────────────────────────────────────────────────────


def test_pictures_of_the_run_folder_alone(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", steps=(1,), responses=1, pictures=True)
    outside = tmp_path / "secret.png"
    outside.write_bytes(picture(9))
    images = run / "images"
    (images / "link.png").symlink_to(outside)
    (images / "circle.png").symlink_to("circle.png")
    (images / "gone.png").symlink_to("nothing.png")
    (images / "broken.png").write_bytes(picture(5)[:60])
    (images / "text.png").write_text("no picture")
    (images / "empty.png").touch()
    (images / "folder.png").mkdir()
    (images / "mine.png").write_bytes(picture(6))
    (images / "inside.png").symlink_to("mine.png")
    names = ["images/mine.png", "images/../images/mine.png", "images/inside.png"]
    wrong = [
        *("../secret.png", str(outside), "../../etc/passwd", "/etc/passwd", "images/link.png"),
        *("images/circle.png", "images/gone.png", "images/broken.png", "images/text.png"),
        *("images/empty.png", "images/folder.png", "", ".", "..", "\0", "images/\0.png", "\ud800"),
        *("x" * 5000, "images/none.png", "file:///etc/passwd", "https://example.com/x.png"),
        *("images/mine.png/x", "config.yaml", "~", 3, None, ["images/mine.png"], {}),
    ]
    rows = read_rollouts(run / "rollouts" / "step-000001.jsonl")
    rows[0]["images"] = [*wrong, *names]
    write_rollouts(run / "rollouts", 1, rows)
    found = report_of(run).data["images"]
    assert sorted(found) == sorted(f"0/{name}" for name in names)
    for uri in found.values():
        kind, _, data = uri.partition(";base64,")
        assert kind == "data:image/png"
        with Image.open(io.BytesIO(base64.b64decode(data))) as shown:
            assert shown.size == (24, 24)
            assert shown.convert("RGB").getpixel((3, 3)) == (240, 90, 200)


def photograph(width: int, height: int) -> Image.Image:
    """Many colors, nothing repeated."""
    return Image.merge("RGB", [Image.effect_noise((width, height), 60) for _ in range(3)])


def test_large_pictures_become_small_and_lose_their_metadata(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", steps=(1,), responses=1, pictures=True)
    large = photograph(1500, 700)
    exif = Image.Exif()
    exif[0x010E] = "secret place"
    large.save(run / "images" / "large.jpg", exif=exif)
    rows = read_rollouts(run / "rollouts" / "step-000001.jsonl")
    rows[0]["images"] = ["images/large.jpg"]
    write_rollouts(run / "rollouts", 1, rows)
    (uri,) = report_of(run).data["images"].values()
    data = base64.b64decode(uri.partition(",")[2])
    assert b"secret" not in data
    with Image.open(io.BytesIO(data)) as shown:
        assert shown.format == "JPEG"
        assert shown.size == (360, 168)


@pytest.mark.parametrize(("mode", "kind"), [("RGB", "png"), ("L", "jpeg")])
def test_drawings_stay_exact_and_photographs_stay_small(
    tmp_path: Path, mode: str, kind: str
) -> None:
    """A gray photograph has few colors too."""
    run = make_run(tmp_path / "a", steps=(1,), responses=1, pictures=True)
    if mode == "L":
        Image.effect_noise((300, 300), 60).save(run / "images" / "x.png")
        rows = read_rollouts(run / "rollouts" / "step-000001.jsonl")
        rows[0]["images"] = ["images/x.png"]
        write_rollouts(run / "rollouts", 1, rows)
    (uri,) = report_of(run).data["images"].values()
    assert uri.startswith(f"data:image/{kind};base64,")


# ── One file that runs nothing but its own code ──────────────────────────────────────────────────


def hostile_run(folder: Path, name: str = "a") -> Path:
    config = {text[:60]: text for text in HOSTILE}
    run = make_run(
        folder / name, texts=HOSTILE, config=config, metric_names=HOSTILE, watched_steps=(1,)
    )
    add_benchmark(run, HOSTILE[3], HOSTILE)
    return run


def test_texts_cannot_leave_their_script_element(tmp_path: Path) -> None:
    run = hostile_run(tmp_path, 'r"><script>window.pwned=8<')
    page = report_of(run)
    text = (run / "report.html").read_text(encoding="utf-8")
    blocks = [
        "overview",
        "benchmarks",
        *(f"rows-0-rollouts-{x}" for x in (1, 2, 3)),
        "rows-0-watched-1",
        "images",
        "benchmark-images",
    ]
    assert list(page.data) == blocks
    assert len(page.code) == 1
    assert page.tags.count("script") == text.lower().count("<script") == len(blocks) + 1
    assert text.lower().count("</script") == len(blocks) + 1
    assert not {"img", "svg", "object", "iframe", "link", "base"} & set(page.tags)
    for forbidden in ("<!--", "pwned=1</", "<img src", "\u2028", "\u202e", "\0", "</style><style"):
        assert forbidden not in text
    assert page.title.startswith('r"><script>window.pwned=8<'), "shown, not run"
    rows = read_run(run).rollouts(1)
    shown = page.data["rows-0-rollouts-1"]
    pieces = [shown["texts"][i] for i in shown["rows"][0]["pieces"]]
    assert pieces == rows[0]["pieces"]


def test_the_policy_allows_this_script_and_no_other(tmp_path: Path) -> None:
    page = report_of(make_run(tmp_path / "a"))
    (code,) = page.code
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    rules = dict(x.strip().split(" ", 1) for x in page.policy.split(";"))
    assert rules["script-src"] == f"'sha256-{digest}'"
    assert rules["default-src"] == rules["connect-src"] == rules["base-uri"] == "'none'"
    assert rules["form-action"] == "'none'"
    assert rules["img-src"] == "data:"
    assert not re.search(r"\b(eval|innerHTML|outerHTML|insertAdjacentHTML|document\.write)\b", code)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", code), "needs no network"


def test_the_page_does_not_say_where_the_run_lay(tmp_path: Path) -> None:
    """Pages are shared, and paths contain names of users."""
    run = make_run(tmp_path / "a-person" / "a")
    report_of(run)
    assert "a-person" not in (run / "report.html").read_text()


def test_a_name_that_is_no_text(tmp_path: Path) -> None:
    """The name of a directory can be any bytes."""
    page = report_of(make_run(tmp_path / "r\udcff\x1b\u202e"), to=tmp_path / "page.html")
    assert page.title.startswith("r")
    assert page.title.isprintable()


def test_figures_have_their_place(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    figure = Figure("Lift <b>", "x & y", "<svg viewBox='0 0 1 1'></svg>")
    figures = Figures((figure,), (f"no within for {HOSTILE[0]}: it needs value",))
    path = write_report([read_run(run)], tmp_path / "new" / "page.html", Limits(), figures)
    text = path.read_text()
    assert "<h3>Lift &lt;b&gt;</h3><p>x &amp; y</p>" in text
    assert "<h3>Not drawn</h3>" in text
    assert "<li>no within for &lt;script&gt;" in text
    assert HOSTILE[0] not in text


def test_analyses_without_a_meaning_are_listed_with_the_reason(tmp_path: Path) -> None:
    run = make_run(tmp_path / "grpo", value=False, config={"algorithm": "grpo"})
    assert segcredit(run).exit_code == 0
    text = (run / "report.html").read_text()
    assert "no lift for grpo: it needs entropy and value; the rollouts have no value" in text
    assert "no jumps for grpo" not in text, "never in a report"
    assert "<h3>Lift" not in text
    assert "<h3>Segments: grpo</h3>" in text


def test_steps_are_those_of_the_progress_bar(tmp_path: Path) -> None:
    stages = [{"kind": "warm_start", "steps": 300}, {"kind": "optimize", "steps": 20}]
    run = make_run(tmp_path / "a", config={"stages": stages}, begun=300)
    shown = report_of(run).data["overview"]["runs"][0]
    assert shown["stages"] == [[1, "imitate", 1, 300], [2, "reinforce", 301, 320]]
    assert shown["curves"]["optimize"]["reward"][0][-1] == 320, "as in metrics.jsonl"
    found = make_run(tmp_path / "b")
    assert report_of(found).data["overview"]["runs"][0]["stages"] == [[1, "reinforce", 1, 20]]
    odd = {"stages": [3, {}, {"kind": HOSTILE[0], "steps": 2}, {"steps": -1}, {"steps": 10**30}]}
    run = make_run(tmp_path / "c", config=odd)
    assert report_of(run).data["overview"]["runs"][0]["stages"] == [[1, HOSTILE[0], 1, 2]]


def test_curves_are_rounded_as_in_the_terminal(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", not_finite=True)
    with MetricsWriter(run / "metrics.jsonl") as writer:
        writer.write(21, "optimize", {"accuracy": 1 / 16, "reward": 0.0625, "entropy": 0.28449})
    shown = report_of(run).data["overview"]["runs"][0]
    written = io.StringIO()
    terminal = Terminal(Console(file=written, width=200))
    terminal.stage(0, "optimize", 21, 20)
    terminal.stepped(21, "optimize", read_run(run).metrics[-1])
    texts = {key: x[-1] for key, x in shown["texts"]["optimize"].items()}
    assert f"reward {texts['reward']}  entropy {texts['entropy']}" in written.getvalue()
    assert f"accuracy {texts['accuracy'].replace(' ', '')}" in written.getvalue()
    assert texts["accuracy"] == "6.2 %", "a browser would round to 6.3"
    for stage, found in shown["texts"].items():
        for key, column in found.items():
            assert len(column) == len(shown["curves"][stage][key][0])


def test_writing_twice_gives_the_same_page(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", pictures=True)
    report_of(run, to=tmp_path / "one.html")
    report_of(run, to=tmp_path / "two.html")
    assert (tmp_path / "one.html").read_bytes() == (tmp_path / "two.html").read_bytes()
    assert not list(tmp_path.glob(".*tmp*"))


# ── Several runs ─────────────────────────────────────────────────────────────────────────────────


def test_runs_that_differ_in_their_seed_belong_together(tmp_path: Path) -> None:
    seeds = [
        make_run(tmp_path / f"s{n}", seed=n, config={"name": f"n{n}", "version": f"0.{n}.0"})
        for n in range(2)
    ]
    other = make_run(tmp_path / "other", seed=2, config={"algorithm": {"name": "ppo"}})
    data = report_of(*seeds, other, to=tmp_path / "x.html").data
    groups = [run["group"] for run in data["overview"]["runs"]]
    assert groups[0] == groups[1] != groups[2]
    assert [x["run"] for x in data["overview"]["files"]] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    rows = [data[f"rows-{n}-rollouts-1"]["rows"][0]["reward"] for n in range(3)]
    assert len(set(rows)) == 3
    assert data["rows-1-rollouts-1"]["rows"][0]["reward"] == pytest.approx(
        read_run(seeds[1]).rollouts(1)[0]["reward"], rel=1e-3
    )


# ── Whatever lies there: a page, or one sentence ─────────────────────────────────────────────────


ODD_CONFIGS = [
    b"name: x\nalgorithm: {name: sapo_3000, depth: 7}\nfuture: {a: [1, 2]}\n",
    b"algorithm: [1, 2]\nmodel: x\ndata: 3\nreward: {1: 2}\nseed: .nan\n",
    b"1: a\nb: c\nnull: 3\n2020-01-01: x\nalgorithm: {1: 2, a: b}\ndata: {train: 5}\n",
    b"c: 12:30:45\nd: 1e999\n",
    b'name: "\\ud800\\0\\u202e"\nalgorithm: sapo\nmodel: {tiny: "\\ud800"}\n',
    b"{}\n",
]
ODD_ENVIRONMENTS = [
    b"[1]",
    b'{"packages": 3, "hardware": "x", "git": [1], "command": "a b"}',
    b'{"packages": {"torch": {"a": 1}}, "hardware": {"gpus": 3, "cpus": [1]}, '
    b'"git": {"commit": 12345, "dirty": "x"}, "command": 5, "started": {"a": 1}, "python": NaN}',
]
ODD = [
    *(("rollouts/step-000001.jsonl", x) for x in [*ODD_ROWS, b"".join(ODD_ROWS), b"", b"\n\n"]),
    *(("watched/step-000001.jsonl", x) for x in [b"".join(ODD_ROWS)]),
    *(("metrics.jsonl", x) for x in [*ODD_METRICS, b"".join(ODD_METRICS), b""]),
    *(("config.yaml", x) for x in ODD_CONFIGS),
    *(("environment.json", x) for x in ODD_ENVIRONMENTS),
    ("rollouts/step-99999999999999999999.jsonl", b"{}\n"),
    ("rollouts/step-12.txt", b"{"),
    ("metrics.jsonl", line(step=1, stage="optimize", reward=0.5) + b'{"step": 2, "st'),
    ("rollouts/step-000001.jsonl", line(pieces=["a"], reward=1.0) + b'{"pieces": ["b'),
]


@pytest.mark.usefixtures("as_users_run_it")
def test_odd_content_gives_a_page(tmp_path: Path) -> None:
    """Columns of other versions, programs and types give a page with valid JSON."""
    for number, (name, content) in enumerate(ODD):
        run = tmp_path / f"run-{number}"
        (run / "rollouts").mkdir(parents=True)
        (run / "watched").mkdir()
        (run / "config.yaml").write_text("name: x\n")
        (run / name).write_bytes(content)
        result = segcredit(run)
        assert result.exit_code == 0, (name, content[:200], result.stderr, result.exception)
        page = Page((run / "report.html").read_text(encoding="utf-8"))
        for file in page.data["overview"]["files"]:
            rows = page.data[f"rows-0-{file['kind']}-{file['step']}"]["rows"]
            assert len(rows) == file["shown"] == file["total"]


@pytest.mark.usefixtures("as_users_run_it")
def test_odd_columns_become_what_the_page_can_draw(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", steps=())
    (run / "rollouts" / "step-000001.jsonl").write_bytes(b"".join(ODD_ROWS))
    (run / "metrics.jsonl").write_bytes(b"".join(ODD_METRICS))
    data = report_of(run).data
    found = data["rows-0-rollouts-1"]
    for row in found["rows"]:
        assert row["correct"] in (True, False, None)
        assert isinstance(row["truncated"], bool)
        for key in ("segment", "entropy", "value", "advantage", "ratio", "logp_old"):
            column = row.get(key, [])
            assert len(column) in (0, len(row["pieces"]))
            assert all(x is None or isinstance(x, int | float | str) for x in column)
        assert all(isinstance(m, int) and m >= -1 for m in row["segment"])
    curves = data["overview"]["runs"][0]["curves"]["optimize"]
    assert curves["reward"] == [[3], ["∞"]], "only where the step is a number"


@pytest.mark.usefixtures("as_users_run_it")
def test_dependence_on_images_is_shown_where_it_is_recorded(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", steps=(1,), responses=3)
    path = run / "rollouts" / "step-000001.jsonl"
    first, second, third = read_rollouts(path)
    image_kl = [n / 8 for n, _ in enumerate(first["pieces"])]
    no_image = [math.nan] * len(second["pieces"])
    write_rollouts(
        path.parent, 1, [first | {"image_kl": image_kl}, second | {"image_kl": no_image}, third]
    )
    rows = report_of(run).data["rows-0-rollouts-1"]["rows"]
    assert rows[0]["image_kl"] == pytest.approx(image_kl, rel=1e-3)
    assert not any(isinstance(x, int | float) for x in rows[1]["image_kl"])
    assert "image_kl" not in rows[2]


def test_answers_to_benchmarks_are_on_the_page(tmp_path: Path) -> None:
    run, other = make_run(tmp_path / "a"), make_run(tmp_path / "b")
    for checkpoint in ("step-000002", "step-000003"):
        add_benchmark(run, checkpoint)
    found = report_of(run).data["benchmarks"]
    assert found["models"] == ["step-000002", "step-000003"]
    (shown,) = found["sets"]
    assert (shown["title"], shown["total"], len(shown["questions"])) == ("LogicVista", 447, 3)
    question = shown["questions"][1]
    assert {name: x[0]["response"] for name, x in question["answers"].items()} == {
        name: f"{name} to 1 " for name in found["models"]
    }
    assert shown["scores"]["step-000003"]["accuracy"]["value"] == 33.33
    assert question["images"][0] in report_of(run).data["benchmark-images"]
    add_benchmark(other, "step-000003")
    both = report_of(run, other, to=tmp_path / "x.html").data["benchmarks"]
    assert both["models"] == ["a step-000002", "a step-000003", "b step-000003"]
    assert len(both["sets"][0]["questions"]) == 3
    with serving(run) as server:
        assert Page(ask(server, "/")[2]).data["benchmarks"] == found


def test_answers_take_no_more_room_than_they_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "a")
    for name in ("logicvista", "wemath"):
        add_benchmark(run, "step-000003", ["x" * 5000], name)
    monkeypatch.setattr(benchmarks, "MEGABYTES", 0.11)
    monkeypatch.setattr(benchmarks, "PICTURE_MEGABYTES", 0.00001)
    page = report_of(run)
    counts = [len(x["questions"]) for x in page.data["benchmarks"]["sets"]]
    assert counts[0] == counts[1] in (1, 2), "some of every set"
    assert page.data["benchmark-images"] == {}


ODD_BENCHMARKS = [
    {},
    {"title": [1], "total": "x", "scores": 3, "questions": {"a": 1}, "settings": [2]},
    {"scores": {"accuracy": 3, "x": {"value": "y", "low": None}}, "questions": [3, None, {}]},
    {
        "questions": [
            {"id": ["q"], "text": {}, "expected": None, "images": "x", "answers": [4, {}]},
            {"id": "q", "images": [["a"], "../../secret.png"], "answers": {"correct": "yes"}},
            {"id": "r", "answers": [{"correct": "yes", "answer": [1], "tokens": 10**400}]},
        ]
    },
]


@pytest.mark.usefixtures("as_users_run_it")
def test_odd_benchmarks_become_what_the_page_can_draw(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    (tmp_path / "secret.png").write_bytes(picture(9))
    for number, content in enumerate(ODD_BENCHMARKS):
        add_benchmark(run, f"step-{number}").write_text(json.dumps(content))
    page = report_of(run)
    assert len(page.data["benchmarks"]["models"]) == len(ODD_BENCHMARKS)
    assert page.data["benchmark-images"] == {}
    for question in page.data["benchmarks"]["sets"][0]["questions"]:
        for answers in question["answers"].values():
            assert all(x["correct"] is False for x in answers)
            assert all(isinstance(x["answer"], str | None) for x in answers)


DAMAGED = [
    ("benchmarks/step-000003/logicvista.json", b'{"title": ', "must be JSON"),
    ("benchmarks/step-000003/logicvista.json", b"[1]", "must contain an object"),
    ("benchmarks/step-000003/logicvista.json", b"[" * 100_000, "nested hundreds deep"),
    ("config.yaml", b"- a list\n", "must contain a mapping"),
    ("config.yaml", b"", "must contain a mapping"),
    ("config.yaml", b"a: [\n", "must be YAML"),
    ("config.yaml", b"a: \xff\n", "must be YAML"),
    ("config.yaml", b"a: !!python/object/apply:os.system [ls]\n", "must be YAML"),
    ("config.yaml", b"a: !!binary aGVsbG8=\n", "one with the tag binary"),
    ("config.yaml", b"a: !!set {x, y}\n", "one with the tag set"),
    ("config.yaml", b"a: &a [*a]\nalgorithm: *a\nseed: {x: *a}\n", "contains it"),
    ("config.yaml", b"a: " + b"[" * 350 + b"]" * 350, "nested"),
    ("environment.json", b"{", "must be JSON"),
    ("environment.json", b'{"started": "\xff"}', "must be JSON"),
    ("metrics.jsonl", b'{"step": 1\n{}\n', "line 1 of"),
    ("metrics.jsonl", b'{}\n{"a": "\xff"}\n{}\n', "line 2 of"),
    ("metrics.jsonl", line(step=1, stage="optimize", x=1)[:-2] + b"[" * 600, None),
    ("rollouts/step-000001.jsonl", b'{}\n{"pieces": [\n{}\n', "line 2 of"),
    ("rollouts/step-000001.jsonl", b'{"pieces": ["\xff\xfe"]}\n{}\n', "line 1 of"),
    ("rollouts/step-000001.jsonl", b"[1]\n", "line 1 of"),
    ("rollouts/step-000001.jsonl", b"\x00\x01\x02\n", "line 1 of"),
    (
        "rollouts/step-000001.jsonl",
        b'{"entropy": ' + b"[" * 600 + b"]" * 600 + b"}\n",
        "nested hundreds deep",
    ),
]


@pytest.mark.slow
@pytest.mark.usefixtures("as_users_run_it")
def test_damage_gives_one_sentence(tmp_path: Path) -> None:
    for number, (name, content, expected) in enumerate(DAMAGED):
        run = make_run(tmp_path / f"run-{number}", steps=(1,), responses=1)
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_bytes(content)
        result = segcredit(run)
        if expected is None:  # an incomplete last line
            assert result.exit_code == 0
            continue
        assert expected in error_of(result)
        assert str(run) in result.stderr
        assert not (run / "report.html").exists()


def test_no_run_at_all(tmp_path: Path) -> None:
    assert "is not a run" in error_of(segcredit(tmp_path))
    assert "there is no such folder" in error_of(segcredit(tmp_path / "nowhere"))
    run = make_run(tmp_path / "a")
    assert "Runs nearby" in error_of(segcredit(run, tmp_path / "b"))


def test_a_run_that_has_just_begun(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", steps=(), optimize=0)
    for name in ("metrics.jsonl", "environment.json"):
        (run / name).unlink()
    (run / "rollouts").rmdir()
    page = report_of(run)
    assert page.data["overview"]["files"] == []
    shown = page.data["overview"]["runs"][0]
    assert (shown["results"], shown["curves"]) == ([], {})


@pytest.mark.slow
def test_the_command_says_where_the_page_is(tmp_path: Path, monkeypatch: Any) -> None:
    run = make_run(tmp_path / "a")
    result = segcredit(run, "--responses", 2, "--steps", 2)
    assert result.exit_code == 0
    assert str(run / "report.html") in result.stdout
    page = Page((run / "report.html").read_text())
    assert [(x["step"], x["shown"]) for x in page.data["overview"]["files"]] == [(1, 2), (3, 2)]
    monkeypatch.chdir(tmp_path)
    other = make_run(tmp_path / "b")
    assert segcredit(run, other, "--no-analyses").exit_code == 0
    assert (tmp_path / "report.html").is_file()
    (tmp_path / "file").touch()
    assert "file" in error_of(segcredit(run, "--no-analyses", "-o", tmp_path / "file" / "x.html"))


# ── The server ───────────────────────────────────────────────────────────────────────────────────


@contextmanager
def serving(*runs: Path) -> Iterator[Server]:
    server = Server(runs)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def ask(
    server: Server,
    path: str,
    host: str | None = "localhost",
    method: str = "GET",
    token: str | None = None,
) -> tuple[int, Any, str]:
    """Send a request with an unchanged path, after a token; return status, headers and body."""
    if path.startswith("/"):
        path = f"/{server.token if token is None else token}{path}" if token != "" else path
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=20)
    connection.putrequest(method, path, skip_host=True)
    if host is not None:
        connection.putheader("Host", host)
    connection.endheaders()
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer.status, answer.headers, body


def test_the_server_gives_page_numbers_and_responses(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", pictures=True, watched_steps=(2,))
    with serving(run) as server:
        status, headers, body = ask(server, "/")
        assert status == 200
        page = Page(body)
        assert page.data["overview"]["live"] is True
        assert headers["Content-Security-Policy"] == page.policy
        assert "connect-src 'self'" in page.policy
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Cache-Control"] == "no-store"
        assert "Access-Control-Allow-Origin" not in headers
        overview = json.loads(ask(server, "/overview.json")[2])
        assert overview == page.data["overview"]
        assert len(overview["files"]) == 4
        rows = json.loads(ask(server, "/rows/0-watched-2")[2])
        whole = report_of(run).data
        assert rows["rows"] == whole["rows-0-watched-2"]["rows"]
        assert rows["texts"] == whole["rows-0-watched-2"]["texts"]
        assert rows["images"] == whole["images"]
        assert rows["listed"]["total"] == 6


def test_the_server_is_for_this_machine_alone(tmp_path: Path) -> None:
    with serving(make_run(tmp_path / "a")) as server:
        assert server.server_address[0] == "127.0.0.1"
        port = server.server_address[1]
        assert server.address == f"http://localhost:{port}/{server.token}/"
        assert re.fullmatch(r"[\w-]{20,}", server.token)
        with pytest.raises(OSError, match="refused"):  # another address of the same machine
            socket.create_connection(("127.0.0.2", port), timeout=5)


@pytest.mark.parametrize("path", ["/", "/overview.json", "/rows/0-rollouts-1", "/nothing"])
def test_a_foreign_name_is_refused(tmp_path: Path, path: str) -> None:
    """DNS rebinding: another site could point its name here and read the run."""
    with serving(make_run(tmp_path / "a")) as server:
        port = server.server_address[1]
        foreign = [
            "evil.example",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "",
            "0.0.0.0",
        ]
        for host in [*foreign, *(f"{x}:{port}" for x in foreign), None, f"user@evil:{port}"]:
            status, _, body = ask(server, path, host)
            assert status == 403, host
            assert "fake" not in body
        for host in ("localhost", f"localhost:{port}", f"127.0.0.1:{port}"):
            assert ask(server, path, host)[0] == (404 if path == "/nothing" else 200)


def test_without_its_token_the_server_says_nothing(tmp_path: Path) -> None:
    """Other users of the machine can also reach the port."""
    with serving(make_run(tmp_path / "a")) as server, serving(tmp_path / "a") as other:
        assert other.token != server.token
        wrong = ("", "x", server.token[:-1], server.token + "x", other.token, "é", "%00", "..")
        for token in wrong:
            for path in ("/", "/overview.json", "/rows/0-rollouts-1", "/nothing"):
                sent = "%C3%A9" if token == "é" else token
                status, _, body = ask(server, path, token=sent)
                assert status == 403, (token, path)
                assert "fake" not in body
                assert server.token not in body
        assert ask(server, f"/?token={server.token}", token="")[0] == 403
        assert ask(server, "http://localhost/config.yaml")[0] == 403
        assert ask(server, "/")[0] == 200


def test_nothing_else_is_there(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    with serving(run) as server:
        for path in (
            *("/config.yaml", "/metrics.jsonl", "/favicon.ico", "/rows", "/rows/"),
            *(
                "/../config.yaml",
                "/rows/../config.yaml",
                "/rows/..%2f..%2fetc%2fpasswd",
                "/%2e%2e/",
            ),
            *("/rows/0-rollouts-1/../../config.yaml", "/rows/0-rollouts-1%00", "/rows/0-rollouts-"),
            *(
                "/rows/1-rollouts-1",
                "/rows/0-rollouts-4",
                "/rows/0-watched-1",
                "/rows/-1-rollouts-1",
            ),
            *("/rows/0-rollouts-1.jsonl", "/rows/0-rollouts-99999999999999999999", "/rows/0-x-1"),
            *("/rows/0-rollouts-1?x", "/overview.json/", "/\\"),
        ):
            status, _, body = ask(server, path)
            assert status == 404, path
            assert "fake" not in body
        for method in ("POST", "PUT", "DELETE", "HEAD", "OPTIONS"):
            assert ask(server, "/", method=method)[0] == 501


def test_the_server_follows_a_run_that_grows(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", steps=(1,))
    with serving(run) as server:
        assert len(json.loads(ask(server, "/overview.json")[2])["files"]) == 1
        assert ask(server, "/rows/0-rollouts-7")[0] == 404
        write_rollouts(run / "rollouts", 7, read_run(run).rollouts(1))
        with MetricsWriter(run / "metrics.jsonl") as writer:
            writer.write(21, "optimize", {"reward": 0.75})
        overview = json.loads(ask(server, "/overview.json")[2])
        assert [x["step"] for x in overview["files"]] == [1, 7]
        steps, values = overview["runs"][0]["curves"]["optimize"]["reward"]
        assert (steps[-1], values[-1]) == (21, 0.75)
        assert ask(server, "/rows/0-rollouts-7")[0] == 200


def test_a_run_that_was_moved_away_or_is_damaged(tmp_path: Path, capfd: Any) -> None:
    run = make_run(tmp_path / "a")
    with serving(run) as server:
        run.rename(tmp_path / "b")
        for path in ("/", "/overview.json", "/rows/0-rollouts-1"):
            status, headers, body = ask(server, path)
            assert status == 503
            assert headers["Content-Type"].startswith("application/json")
            assert "is not a run" in json.loads(body)["error"]
        (tmp_path / "b").rename(run)
        assert ask(server, "/")[0] == 200
        (run / "rollouts" / "step-000002.jsonl").write_text('{"x":\n{}\n')
        status, _, body = ask(server, "/rows/0-rollouts-2")
        assert (status, "line 1 of" in json.loads(body)["error"]) == (503, True)
        assert ask(server, "/")[0] == 200, "the rest is still there"
    assert capfd.readouterr().err == ""


def test_a_run_that_is_moved_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "a")

    def move_and_list(runs: Sequence[Run]) -> list[Rows]:
        run.rename(tmp_path / "b")
        return list_rows(runs)

    with serving(run) as server:
        monkeypatch.setattr(serve, "list_rows", move_and_list)
        status, _, body = ask(server, "/overview.json")
        assert (status, "is not a run" in json.loads(body)["error"]) == (503, True)


def test_a_browser_that_goes_away_costs_nothing(tmp_path: Path, capfd: Any) -> None:
    run = make_run(tmp_path / "a", steps=(1,), responses=20, tokens=100)
    with serving(run) as server:
        threads = threading.active_count()
        for number in range(4):
            connection = socket.create_connection(server.server_address, timeout=5)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            if number:
                path = f"/{server.token}/rows/0-rollouts-1"
                connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            connection.close()  # at once: a reset
        assert ask(server, "/")[0] == 200
        until = time.monotonic() + 20
        while threading.active_count() > threads:  # every request has ended
            assert time.monotonic() < until
            time.sleep(0.01)
    assert capfd.readouterr().err == ""


@pytest.mark.slow
def test_the_command_serves_until_it_is_stopped(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    command = [sys.executable, "-c", "from segcredit.cli import main; main()", "report", "--serve"]
    process = subprocess.Popen(
        [*command, str(run)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        match = re.match(r"Open http://localhost:(\d+)(/[\w-]+/) in a browser", said)
        assert match, said
        port = int(match[1])
        with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
            connection.sendall(f"GET {match[2]} HTTP/1.0\r\nHost: localhost\r\n\r\n".encode())
            assert b"200 OK" in connection.recv(100)
        taken = segcredit("--serve", "--port", port, run)
        assert f"port {port} cannot be used" in error_of(taken)
    finally:
        process.send_signal(signal.SIGINT)
        said, complained = process.communicate(timeout=20)
    assert (process.returncode, said, complained) == (0, "Stopped.\n", "")


def test_healthy_notes_are_those_of_the_documentation() -> None:
    """Every metric with a healthy range in docs/metrics.md has the same range on the page."""
    text = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
    section = text.split("## optimize")[1].split("\n## ")[0]
    rows = [re.split(r"(?<!\\)\|", x)[1:-1] for x in section.splitlines() if x.startswith("| `")]
    defined = {name for names, *_ in rows for name in re.findall(r"`([^`]+)`", names)}
    assert set(HEALTHY) - {"nll"} <= defined
    documented = {
        name
        for names, _, healthy in rows
        for name in re.findall(r"`([^`]+)`", names)
        if healthy.strip() and (names.count("`") == 2 or f"`{name}`: " in healthy)
    }
    alike = {name for name in HEALTHY if name.endswith("/refused")}  # one text for both
    assert documented | alike == set(HEALTHY)
