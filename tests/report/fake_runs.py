"""Run directories without training: seeded random numbers, written by the package's writers."""

import io
import json
import os
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from segcredit.runlog import MetricsWriter, RunFolder, write_rollouts
from segcredit.runlog.files import write_json_atomically, write_yaml_atomically
from segcredit.runlog.folder import step_name
from segcredit.runlog.records import save_image

WORDS = ("red ", "blue ", "is ", "3", " + ", "4", " = ", "7", "\n", "so ", "Step 2: ", "\\boxed{")
HOSTILE = (
    "<script>window.pwned=1</script>",
    "</script><script>window.pwned=2</script>",
    "<!--<script>",
    "<img src=x onerror=window.pwned=3>",
    '" onmouseover="window.pwned=4" x="',
    "' autofocus onfocus='window.pwned=5",
    "<svg/onload=window.pwned=6>",
    "{{7*7}}",
    "${window.pwned=7}",
    "%%SCRIPT%%",
    "javascript:alert(1)",
    "</style><style>body{display:none}</style>",
    "&lt;b&gt;",
    "\u202eright to left\u202c",
    "\u2066\u200fשלום\u200e\u2069",
    "\ud800 lone \udfff",
    "\0 nothing",
    "\u2028 line \u2029",
    "\x1b[31m red",
    "\U000e0041 unseen",
    "constructor",
    "__proto__",
    "W" * 100_000,
)
"""Texts that must not run as code, disappear, or break the layout of the page."""


def make_run(
    path: Path,
    *,
    steps: Sequence[int] = (1, 2, 3),
    watched_steps: Sequence[int] = (),
    responses: int = 6,
    tokens: int = 12,
    samples: int = 1,
    seed: int = 0,
    value: bool = True,
    holes: bool = False,
    not_finite: bool = False,
    pictures: bool = False,
    texts: Sequence[str] = (),
    without: Sequence[str] = (),
    config: Mapping[str, Any] | None = None,
    optimize: int = 20,
    metric_names: Sequence[str] = (),
    begun: int = 0,
) -> Path:
    """A run of ``optimize`` steps that recorded responses at ``steps``.

    ``begun``: steps of earlier stages, of which there are no metrics.
    ``samples``: neighboring responses to one prompt. ``texts``: what every text is made of.
    ``without``: columns it did not record. ``holes``: tokens of no segment.
    """
    chance = random.Random(seed)
    with RunFolder.create(path) as folder:
        write_yaml_atomically(folder.config, {**CONFIG, "seed": seed, **(config or {})})
        write_json_atomically(folder.environment, ENVIRONMENT)
        write_metrics(folder.metrics, chance, optimize, value, not_finite, metric_names, begun)
        names = [save_image(folder.images, picture(n)) for n in range(3)] if pictures else []
        recorded = [(folder.rollouts, x) for x in steps] + [
            (folder.watched, x) for x in watched_steps
        ]
        for place, step in recorded:
            rows = []
            for number in range(responses):
                name = "held-out" if place == folder.watched else f"step-{step}"
                row = make_row(chance, f"{name}/{number // samples}", number, tokens, texts)
                if holes:
                    row["segment"][1] = row["segment"][-2] = -1
                if not_finite:
                    row["entropy"][0], row["value"][1] = float("nan"), float("inf")
                    row["advantage"][2], row["reward"] = float("-inf"), float("nan")
                if names:
                    row["images"] = [names[number % len(names)]]
                    row["messages"][0]["content"] = f"<image>{row['messages'][0]['content']}"
                if not value:
                    del row["value"]
                rows.append({key: x for key, x in row.items() if key not in without})
            write_rollouts(place, step, rows)
    return path


CONFIG: dict[str, Any] = {
    "name": "fake",
    "model": {"tiny": "qwen2"},
    "data": {"world": "shape_grid"},
    "reward": "exact",
    "algorithm": {"name": "sapo", "kl": 0.0},
}
ENVIRONMENT: dict[str, Any] = {
    "started": "2026-01-02T03:04:05+00:00",
    "command": ["segcredit", "train", "recipe.yaml"],
    "python": "3.11.7",
    "packages": {"segcredit": "0.1.0", "torch": "2.13.0", "numpy": "2.4"},
    "hardware": {"cpus": 2, "memory_gib": 23.5, "gpus": []},
    "git": {"commit": "0123456789abcdef", "dirty": False},
}


def make_row(
    chance: random.Random, prompt: str, number: int, tokens: int, texts: Sequence[str] = ()
) -> dict[str, Any]:
    """One response; six digits, as a run writes them. The second segment's credit is exactly 0."""
    count = max(4, tokens + chance.randint(-3, 3))
    words = texts or WORDS
    pieces = [words[(number + i) % len(words)] for i in range(count - 1)] + [""]
    segment = [0]
    for i in range(1, count):
        segment.append(segment[-1] + (i < 3 or chance.random() < 0.4))
    credit = [six(chance.gauss(0, 1)) for _ in range(segment[-1] + 1)]
    credit[1] = 0.0
    ratio = [six(chance.lognormvariate(0, 0.1)) for _ in credit]
    reward = six(chance.random())
    return {
        "prompt_id": f"{prompt}{some(texts, number)}",
        "prompt": f"user: question {number}",
        "messages": [{"role": "user", "content": f"question {number} {some(texts, number + 1)}"}],
        "images": [],
        "response": "".join(pieces),
        "tokens": [chance.randrange(50_000) for _ in pieces],
        "pieces": pieces,
        "entropy": [six(chance.expovariate(1.0)) for _ in pieces],
        "logp_old": [six(-chance.expovariate(1.0)) for _ in pieces],
        "value": [six(chance.random()) for _ in pieces],
        "advantage": [credit[m] for m in segment],
        "segment": segment,
        "ratio": [ratio[m] for m in segment],
        "reward": reward,
        "reason": f"compared {some(texts, number + 2)}",
        "correct": reward >= 0.5,
        "truncated": number % 5 == 4,
        "answer": f"7{some(texts, number + 3)}",
    }


def some(texts: Sequence[str], number: int) -> str:
    return texts[number % len(texts)] if texts else ""


def six(x: float) -> float:
    return float(f"{x:.6g}")


def write_metrics(
    path: Path,
    chance: random.Random,
    optimize: int,
    value: bool,
    not_finite: bool,
    names: Sequence[str],
    begun: int = 0,
) -> None:
    with MetricsWriter(path) as writer:
        for step in range(1, optimize + 1):
            numbers = {
                "reward": step / (step + 5) + chance.gauss(0, 0.05),
                "entropy": 1 / step,
                "response_length": 20 + chance.random(),
                "time/sample": 0.5 + chance.random() / 10,
                "time/update": 1.5,
                "odd metric": chance.random(),
                **dict.fromkeys(names, chance.random()),
            }
            if value:
                numbers |= {
                    "value_loss": chance.random() / step,
                    "explained_variance": 1 - 1 / step,
                }
            if not_finite and step % 3 == 0:
                numbers |= {"reward": float("nan"), "entropy": float("inf")}
            writer.write(begun + step, "optimize", numbers)
            if step in (1, optimize):
                sampled = 0.4 if step == 1 else 0.9
                bounds = {"sampled_low": sampled - 0.05, "sampled_high": sampled + 0.05}
                evaluated = {"sampled": sampled, **bounds, "greedy": sampled + 0.03}
                writer.write(
                    begun + step,
                    "evaluation",
                    {**evaluated, "response_length": 21.5, "truncated": 0.0},
                )


def add_benchmark(
    run: Path, checkpoint: str, texts: Sequence[str] = ("",), name: str = "logicvista"
) -> Path:
    """Answers of a checkpoint to three questions, as ``segcredit benchmark`` records them.

    The first is wrong, the second is right, the third has no answer.
    """
    folder = run / "benchmarks"
    (folder / "images").mkdir(parents=True, exist_ok=True)
    (folder / checkpoint).mkdir(exist_ok=True)
    image = f"benchmarks/{save_image(folder / 'images', picture(1))}"
    questions = [
        {
            "id": f"q{n}{some(texts, n)}",
            "text": f"question {n} {some(texts, n + 1)}",
            "expected": f"A{some(texts, n + 2)}",
            "images": [image, *(some(texts, n + 3) and texts)],
            "answers": [
                {
                    "response": f"{checkpoint} to {n} {text}",
                    "answer": (f"B{text}", f"A{text}", None)[n],
                    "correct": n == 1,
                    "reason": f"compared {text}",
                    "tokens": 7,
                    "truncated": False,
                    "judged": False,
                }
                for text in (some(texts, n + 4),)
            ],
        }
        for n in range(3)
    ]
    score = {"value": 100 / 3, "low": 0.8, "high": 90.6, "count": 3}
    content = {
        "title": f"LogicVista{some(texts, 5)}",
        "total": 447,
        "settings": f"temperature 0.6{some(texts, 6)}",
        "scores": {f"accuracy{some(texts, 7)}": score, **dict.fromkeys(texts, score)},
        "questions": questions,
    }
    path = folder / checkpoint / f"{name}.json"
    write_json_atomically(path, content)
    return path


def picture(number: int, side: int = 24) -> bytes:
    """A plain PNG; each number has a color of its own."""
    file = io.BytesIO()
    Image.new("RGB", (side, side), (40 * number % 256, 90, 200)).save(file, "PNG")
    return file.getvalue()


def line(**columns: Any) -> bytes:
    return json.dumps(columns).encode() + b"\n"


ODD_ROWS = [
    line(pieces="abc", tokens={}, entropy=3, segment="x", reward=[1], correct="yes"),
    line(pieces=[1, None, {"a": 2}], tokens=[1.5, None, "x"], entropy=[10**400, True, 1]),
    line(pieces=["a", "b"], entropy=[1e300, 1], logp_old=[-1, -1e308], segment=[0, "1"]),
    line(pieces=["a", "b"], entropy=[-1, True], logp_old=[5, -(10**25)], segment=[5, -7]),
    line(pieces=["a", "b"], entropy=[1], value=[1, 2, 3], segment=[0, 1, 2], ratio=[0, -1]),
    line(pieces=["a"], value=["NaN", "x", [1]], advantage=[None], reason=[1], answer={"x": 1}),
    line(messages="x", images="x", prompt_id=None, truncated="", correct={"a": 1}),
    line(messages=[{"role": 1, "content": [1]}, 3, None, {}], prompt_id=["a"], images=[[], 1]),
    line(pieces=[], response="", new_column={"deep": [1, {"x": None}]}),
    line(response="only text", prompt="of an older version", correct=None),
    b'{"tokens": [NaN, 1e999], "pieces": ["a", "b"], "segment": [NaN, 1], "correct": NaN, '
    b'"reward": -Infinity, "value": [NaN, Infinity]}\n',
    b"{}\n",
]
ODD_METRICS = [
    line(step="x", stage="optimize", reward=1),
    line(step=None, stage=["a"]),
    line(step=1.5, stage="optimize", reward={"a": [1]}),
    line(step=10**400, stage="optimize", reward=2),
    line(step=3, stage="optimize", reward=10**400, entropy="high", new=[1, "x", None]),
    line(step=4, stage="evaluation", sampled="x", sampled_low=None, greedy=[]),
    line(step=True, stage={}),
    line(stage="optimize"),
    b'{"step": NaN, "stage": "optimize", "reward": NaN}\n',
    b'{"step": 9, "stage": "evaluation", "sampled": Infinity}\n',
]
"""Columns of other versions, programs and types, which must not break the reader."""


def make_big_run(path: Path, steps: int = 200, responses: int = 512, tokens: int = 500) -> Path:
    """A run with as many tokens as a real one; every step links to the same file."""
    make_run(path, steps=(), optimize=steps)
    chance = random.Random(1)
    samples = [make_row(chance, "x", n, tokens) for n in range(8)]
    ready = [{key: json.dumps(x) for key, x in row.items()} for row in samples]
    first = path / "rollouts" / f"{step_name(1)}.jsonl"
    with first.open("w") as file:
        for number in range(responses):
            row = {**ready[number % len(ready)], "prompt_id": json.dumps(f"prompt/{number}")}
            file.write("{" + ", ".join(f'"{key}": {x}' for key, x in row.items()) + "}\n")
    for step in range(2, steps + 1):
        os.link(first, first.with_name(f"{step_name(step)}.jsonl"))
    return path
