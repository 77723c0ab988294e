"""Curves are drawn from a run directory alone, for any set of metrics."""

import json
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from PIL import Image

from segcredit.report.curves import PANELS, _smooth, draw_curves
from segcredit.runlog import read_run


def write_run(folder: Path, *lines: dict[str, Any], name: str = "a-run") -> Path:
    run = folder / name
    run.mkdir()
    (run / "config.yaml").write_text("name: x\n")
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def everything(steps: int = 12) -> list[dict[str, Any]]:
    """A run with a number for every line of every panel."""
    lines: list[dict[str, Any]] = []
    for stage in ("warm_start", "pretrain_critic", "optimize"):
        keys = [key for _, panel in PANELS for at, key, _ in panel if at == stage]
        for _ in range(steps):
            step = len(lines) + 1
            lines.append({"step": step, "stage": stage, **dict.fromkeys(keys, 1 / step)})
    for n, step in enumerate((2 * steps, 3 * steps)):
        numbers = {"sampled": 0.3 + n / 5, "greedy": 0.4 + n / 5}
        numbers |= {"reward": 0.5 + n / 5, "greedy_reward": 0.6 + n / 5}
        ends = {f"{key}_{end}": x + d for key, x in numbers.items() for end, d in ENDS}
        lines.append({"step": step, "stage": "evaluation", **numbers, **ends})
    return lines


ENDS = (("low", -0.1), ("high", 0.1))


def drawn(run: Path, path: Path | None = None) -> Image.Image:
    made = draw_curves(read_run(run), path or run / "plots" / "curves.png")
    assert made is not None
    with Image.open(made) as picture:
        assert picture.format == "PNG"
        return picture.convert("RGB")


def colors(picture: Image.Image) -> dict[tuple[int, int, int], int]:
    found = picture.getcolors(picture.width * picture.height)
    assert found is not None
    return {color: count for count, color in found if isinstance(color, tuple)}


BLUE, ORANGE = (59, 111, 212), (224, 123, 57)


@pytest.fixture
def panels(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The titles of the panels of each image."""
    seen: list[list[str]] = []
    save = Figure.savefig

    def savefig(figure: Figure, *arguments: Any, **options: Any) -> None:
        seen.append([axis.get_title(loc="left") for axis in figure.axes])
        save(figure, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", savefig)
    return seen


@pytest.mark.slow
def test_a_whole_run(tmp_path: Path, panels: list[list[str]]) -> None:
    picture = drawn(write_run(tmp_path, *everything()))
    assert panels == [[title for title, _ in PANELS]]
    assert min(picture.size) > 800
    found = colors(picture)
    assert found[BLUE] > 1000, "the lines"
    assert found[ORANGE] > 300, "second lines"
    assert (found[(255, 255, 255)] / (picture.width * picture.height)) < 0.97


def test_a_run_with_some_of_it(tmp_path: Path, panels: list[list[str]]) -> None:
    lines = [{"step": n, "stage": "warm_start", "nll": 3.0 / n, "other": 1} for n in range(1, 5)]
    picture = drawn(write_run(tmp_path, *lines))
    assert panels == [["Imitation: −log π per token"]]
    assert colors(picture)[BLUE] > 100
    lines += [{"step": 5, "stage": "optimize", "reward": 0.1}]
    lines += [{"step": 5, "stage": "evaluation", "sampled": 0.5, "sampled_low": 0.4}]
    lines += [{"step": 6, "stage": "optimize", "reward": 0.2, "entropy": 1.0}]
    drawn(write_run(tmp_path, *lines, name="more"))
    assert panels[-1] == [
        "Held-out accuracy",
        "Training reward",
        "Entropy (nats per token)",
        "Imitation: −log π per token",
    ]


def test_numbers_that_are_not_finite(tmp_path: Path) -> None:
    lines = [
        {"step": n, "stage": "optimize", "reward": x, "entropy": "NaN", "clip_fraction": None}
        for n, x in enumerate([0.1, "NaN", 0.3, "Infinity", 0.2, "-Infinity", 0.4])
    ]
    assert colors(drawn(write_run(tmp_path, *lines)))[BLUE] > 10


def test_numbers_that_are_huge(tmp_path: Path) -> None:
    huge = [10**400, -(10**400), 1e308, -1e308, 2**63, 0.5]
    lines: list[dict[str, Any]] = [
        {"step": n, "stage": stage, "reward": x, "sampled": x, "sampled_low": x, "sampled_high": x}
        for n, x in enumerate(huge)
        for stage in ("optimize", "evaluation")
    ]
    lines += [{"stage": "optimize", "entropy": 1.0}, {"step": 10**400, "stage": "optimize"}]
    assert colors(drawn(write_run(tmp_path, *lines)))[BLUE] > 10


def test_a_single_step_is_seen(tmp_path: Path) -> None:
    run = write_run(tmp_path, {"step": 1, "stage": "optimize", "reward": 0.5})
    assert colors(drawn(run))[BLUE] > 3


@pytest.mark.parametrize("lines", [[], [{"step": 1, "stage": "optimize", "unknown": 1.0}]])
def test_nothing_to_draw(tmp_path: Path, lines: list[dict[str, Any]]) -> None:
    run = write_run(tmp_path, *lines)
    assert draw_curves(read_run(run), run / "plots" / "curves.png") is None
    assert not (run / "plots").exists()


def test_a_run_that_has_written_nothing_yet(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    (run / "metrics.jsonl").unlink()
    assert draw_curves(read_run(run), tmp_path / "curves.png") is None


def test_a_line_still_being_written_is_left_out(tmp_path: Path) -> None:
    run = write_run(tmp_path, {"step": 1, "stage": "optimize", "reward": 0.5})
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 99, "stage": "opti')
    drawn(run, tmp_path / "elsewhere" / "curves.png")


def test_long_curves_are_smoothed_from_their_first_value_on() -> None:
    assert _smooth([2.0] * 5) == pytest.approx([2.0] * 5), "no pull to zero at the start"
    smooth = _smooth([0.0, 1.0] * 50)
    assert smooth[0] == 0.0
    assert all(0.3 < x < 0.7 for x in smooth[20:])


def test_a_name_is_text_and_not_mathematics(tmp_path: Path) -> None:
    """matplotlib parses text between dollar signs as a formula."""
    line = {"step": 1, "stage": "optimize", "reward": 0.5}
    drawn(write_run(tmp_path, line, name="a $run$ of $\\frac$ _x_"))
