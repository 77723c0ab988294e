"""Model card of a saved policy: README.md in Hugging Face's format, from the run's own records."""

import json
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from segcredit import __version__
from segcredit.printable import change_texts, number_text, printable, without_addresses
from segcredit.runlog.files import restore_nonfinite
from segcredit.runlog.folder import GIVEN_IN_PYTHON

CARD = "README.md"
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "peft", "vllm")
MEASURES = {
    "sampled": ("accuracy, sampled", True),
    "greedy": ("accuracy, greedy", True),
    "reward": ("reward, sampled", False),
    "greedy_reward": ("reward, greedy", False),
    "no_verdict": ("answers without a verdict", True),
    "truncated": ("truncated responses", True),
    "response_length": ("response length in tokens", False),
}
"""Measures of an evaluation, with their names and whether they are shares."""
CITATION = """\
@software{segcredit,
  title = {segcredit: reinforcement learning with credit per segment of a response},
  author = {{The segcredit authors}},
  version = {VERSION}
}
@article{gao2026sapo,
  title = {Segment-Aligned Policy Optimization for Multi-Modal Reasoning},
  author = {Gao, Lei and Li, Zhuoming and Jia, Mengxi and Yuan, Jiakang and Sun, Hongbo and
            Sun, Hao and Li, Xuelong},
  journal = {arXiv:2605.01327},
  year = {2026}
}"""


def model_card(
    config: Mapping[str, Any],
    method: str,
    rows: Sequence[Mapping[str, Any]],
    step: int,
    has_images: bool,
) -> str:
    """Return the text of a card. It has no times, so equal runs have equal cards.

    Args:
        config: Content of the run's config.yaml.
        method: ``repr`` of the algorithm, which records its parts.
        rows: Metrics of the run up to this step.
        step: Step of the checkpoint.
        has_images: Whether the model is a vision-language model.
    """
    model, data = _section(config, "model"), _section(config, "data")
    given = _section(config, GIVEN_IN_PYTHON)
    shown = {**config, **given}  # an object in Python replaces the setting of its name
    parts = [
        f"---\n{_metadata(shown.get('algorithm'), model, data, has_images)}---",
        f"# {_escaped(str(config.get('name', 'policy')))}",
        f"A policy trained with reinforcement learning by segcredit {__version__}, saved after "
        f"step {step}.",
        "## Method",
        _table(
            [
                ("base model", _base(model)),
                ("algorithm", _code(_short(shown.get("algorithm")))),
                ("reward", _code(_short(shown.get("reward")))),
                ("training data", _data(data, "train")),
                ("held-out data", _data(data, "test")),
                ("stages and their steps", _stages(config.get("stages"))),
            ],
            ("setting", "value"),
        ),
        "The algorithm with all its parts:",
        _fenced(method, "python"),
        "## Held-out results",
        _results(rows, _section(config, "evaluation")),
        "## Repeat this run",
        _repeat(config, given),
        "## Versions",
        _table(_versions(), ("package", "version")),
        "## License",
        _license(model),
        "## Citation",
        _fenced(CITATION.replace("VERSION", __version__), "bibtex"),
    ]
    return without_addresses("\n\n".join(parts)) + "\n"


def write_card(folder: Path, text: str) -> None:
    """Write the card into a policy's folder, which the caller then moves into place atomically."""
    (folder / CARD).write_bytes(text.encode())


def _metadata(
    algorithm: object, model: Mapping[str, Any], data: Mapping[str, Any], has_images: bool
) -> str:
    from huggingface_hub import ModelCardData

    name = str(algorithm.get("name") if isinstance(algorithm, Mapping) else algorithm)
    tags = ["segcredit", "reinforcement-learning"]
    tags += [name] if re.fullmatch(r"[\w-]+", name) else []
    found = ModelCardData(
        base_model=_hub_id(model),
        datasets=_hub_datasets(data) or None,
        library_name="transformers",
        pipeline_tag="image-text-to-text" if has_images else "text-generation",
        tags=tags,
    )
    return found.to_yaml().rstrip("\n") + "\n"


def _hub_id(model: Mapping[str, Any]) -> str | None:
    """Return the base model's id on the Hub; None if it is a folder or was made for the run."""
    path = model.get("path")
    if not isinstance(path, str) or not HUB_ID.fullmatch(path) or Path(path).exists():
        return None
    return path


def _hub_datasets(data: Mapping[str, Any]) -> list[str]:
    names = [x for key in ("train", "test") for x in data.get(key) or []]
    found = [re.match(f"hub:({HUB_ID.pattern})", str(x)) for x in names]
    return sorted({x[1] for x in found if x is not None})


def _base(model: Mapping[str, Any]) -> str:
    if model.get("path") is None:
        return f"none: a tiny {_code(str(model.get('tiny')))} with random weights"
    lora = ", trained with LoRA, adapters merged" if model.get("lora") else ""
    return _code(str(model["path"])) + lora


def _data(data: Mapping[str, Any], key: str) -> str:
    if data.get("world") is not None:
        return f"generated by the world {_code(str(data['world']))}"
    names = data.get(key) or []
    return ", ".join(_code(str(x)) for x in names) or "none"


def _stages(stages: object) -> str:
    found = [x for x in stages if isinstance(x, Mapping)] if isinstance(stages, list) else []
    return ", ".join(_code(f"{x.get('kind')} × {x.get('steps')}") for x in found)


def _results(rows: Iterable[Mapping[str, Any]], settings: Mapping[str, Any]) -> str:
    measured = [
        {key: restore_nonfinite(x) for key, x in row.items()}
        for row in rows
        if row.get("stage") == "evaluation"
    ]
    if not measured:
        return "The run has not evaluated this policy."
    first, last = measured[0], measured[-1]
    both = first is not last
    table = []
    for key, (name, share) in MEASURES.items():
        if key not in last:
            continue
        old, new, change = change_texts(first.get(key, float("nan")), last[key], share)
        interval = _interval(last, key, share)
        table.append((name, old, new + interval, change) if both else (name, new + interval))
    heads = [f"step {x.get('step')}" for x in ((first, last) if both else (last,))]
    count = (
        f"{settings.get('prompts')} held-out prompts at most, {settings.get('samples')} sampled "
        f"responses each, temperature {settings.get('temperature')}, top-p "
        f"{settings.get('top_p')}. Ranges are 95 % confidence intervals."
    )
    return _table(table, ("measure", *heads, *(["change"] if both else []))) + f"\n\n{count}"


def _interval(row: Mapping[str, Any], key: str, share: bool) -> str:
    low, high = row.get(f"{key}_low"), row.get(f"{key}_high")
    if low is None or high is None:
        return ""
    scale, form = (100, ".1f") if share else (1, ".3f")
    return f" ({number_text(scale * low, form)} to {number_text(scale * high, form)})"


def _repeat(config: Mapping[str, Any], given: Mapping[str, Any]) -> str:
    text = yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True)
    settings = f"<details><summary>recipe.yaml</summary>\n\n{_fenced(text, 'yaml')}\n\n</details>"
    if given:
        names = ", ".join(_code(f"{key}: {x}") for key, x in given.items())
        return (
            f"These parts were Python objects, which no file contains: {names}. Pass them to "
            f"`segcredit.Trainer` with the other settings of this recipe:\n\n{settings}"
        )
    return f"Save the settings below as `recipe.yaml`, then type:\n\n{_COMMAND}\n\n{settings}"


_COMMAND = "```sh\nsegcredit train recipe.yaml\n```"


def _versions() -> list[tuple[str, str]]:
    found = [("Python", platform.python_version()), ("segcredit", __version__)]
    for name in PACKAGES:
        try:
            found.append((name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            continue
    return found


def _license(model: Mapping[str, Any]) -> str:
    if model.get("path") is None:
        return "The weights were initialized at random, so no base model's license applies."
    return (
        f"The weights are derived from {_code(str(model['path']))}. The license of that model "
        f"applies to them: read it before you use or publish them. The licenses of the training "
        f"data may apply, too. segcredit adds no terms."
    )


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = config.get(name)
    return found if isinstance(found, Mapping) else {}


def _short(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _escaped(text: str) -> str:
    """Escape a text, so that Markdown shows it as it is, on one line."""
    return re.sub(r"([!-/:-@\[-`{-~])", r"\\\1", printable(text, 200))


def _code(text: str) -> str:
    """Format a text as Markdown code on one line, with the table separator | escaped."""
    text = printable(text, 1000).replace("|", "\\|")
    fence = "`" * (_longest_run(text) + 1)
    edge = " " if len(fence) > 1 else ""
    return f"{fence}{edge}{text}{edge}{fence}"


def _fenced(text: str, language: str) -> str:
    fence = "`" * max(3, _longest_run(text) + 1)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def _longest_run(text: str) -> int:
    return max((len(x) for x in re.findall("`+", text)), default=0)


def _table(rows: Iterable[Sequence[str]], heads: Sequence[str]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
