"""Write docs/cli.md from the command line, docs/settings.md from the settings and methods.

Also fill the column "healthy" of docs/metrics.md from the texts of the report page.

python -m segcredit_lab.pages.references
"""

import re
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

import typer
import yaml
from pydantic.fields import FieldInfo

from segcredit.cli import app
from segcredit.config.files import FOLDER
from segcredit.config.recipe import Optimize, Recipe, Settings
from segcredit.partition import Partition
from segcredit.report.explain import HEALTHY
from segcredit_lab.pages.methods import MEANINGS, settings_of_methods

DOCS = Path(__file__).resolve().parents[2] / "docs"
NOTICE = "<!-- Generated: run python -m segcredit_lab.pages.references -->"
PAPER = "geo3k/qwen2.5-vl-3b-sapo"
PAPER_PARTS = ("qwen2.5-vl-3b", "sapo")
NAMES = {"str": "text", "int": "integer", "float": "number", "bool": "true, false", "Path": "path"}


class Row(NamedTuple):
    """One setting of a recipe."""

    path: str
    kind: str
    default: str
    text: str


def cell(text: str) -> str:
    """Make a text fit in a table's cell."""
    plain = " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
    return re.sub(r"([*_])", r"\\\1", plain)


def shown(value: Any) -> str:
    """Return a value as a recipe has it."""
    if value is None:
        return "None"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(shown, value))}]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def kind_of(kind: Any) -> str:
    """Name a type in a user's words."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return kind_of(parts[0])
    if origin is Literal:
        return ", ".join(shown(x) for x in parts)
    if origin in (Union, UnionType):
        return " or ".join(kind_of(x) for x in parts if x is not NoneType)
    if origin in (list, tuple):
        return f"list of {kind_of(parts[0])}"
    if origin is dict or kind is dict:
        return "mapping"
    if kind is Partition:
        return "text or mapping"
    return NAMES.get(getattr(kind, "__name__", ""), getattr(kind, "__name__", str(kind)))


def nested(kind: Any) -> list[type[Settings]]:
    """Return the classes of settings inside a type."""
    if isinstance(kind, type) and issubclass(kind, Settings):
        return [kind]
    return [found for part in get_args(kind) for found in nested(part)]


def limits(field: FieldInfo) -> str:
    """Return a number's limits, such as ", ≥ 1"."""
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "&lt;"}
    return "".join(
        f", {sign} {shown(getattr(x, name))}"
        for x in field.metadata
        for name, sign in signs.items()
        if getattr(x, name, None) is not None
    )


def default_of(field: FieldInfo) -> str:
    """Return a field's default in a table's cell."""
    if field.is_required():
        return "required"
    return f"`{shown(field.get_default(call_default_factory=True))}`"


def rows_of(settings: type[Settings], path: str) -> Iterator[Row]:
    """Yield a class's settings; nested classes follow under their own path."""
    for name, field in settings.model_fields.items():
        inner = nested(field.annotation)
        text = cell(field.description or "")
        if not inner:
            kind = kind_of(field.annotation) + limits(field)
            yield Row(f"{path}{name}", kind, default_of(field), text)
        elif path or len(inner) > 1:
            kind = "list of stages" if len(inner) > 1 else "mapping"
            optional = field.is_required() or field.get_default() is None
            yield Row(f"{path}{name}", kind, default_of(field) if optional else "", text)
            if len(inner) == 1:
                yield from rows_of(inner[0], f"{path}{name}.")


def leaves(node: yaml.Node, path: str = "") -> Iterator[tuple[str, yaml.Node]]:
    """Yield the values of a YAML mapping with their paths; a stage's path is ``stages.N``."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield from leaves(value, f"{path}.{key.value}" if path else key.value)
    elif isinstance(node, yaml.SequenceNode) and path == "stages":
        for item in node.value:
            yield from leaves(item, "stages.N")
    else:
        yield path, node


def paper_values() -> dict[str, str]:
    """Return the numbers of the paper's SAPO recipe whose comment names the paper, by their path.

    Those of the method are one value, ``algorithm``.
    """
    text = (FOLDER / f"{PAPER.partition('/')[0]}.yaml").read_text(encoding="utf-8")
    lines = text.splitlines()
    collection = dict_of(yaml.compose(text))
    parts = dict_of(collection["parts"])
    cited = {
        path: yaml.safe_load(yaml.serialize(node))
        for part in (collection["shared"], *(parts[x] for x in PAPER_PARTS))
        for path, node in leaves(part)
        if "# paper," in lines[node.start_mark.line]
    }
    values = {path: shown(x) for path, x in cited.items() if isinstance(x, int | float)}
    method = [f"{k.partition('.')[2]}: {x}" for k, x in values.items() if k.startswith("algorithm")]
    return values | {"algorithm": ", ".join(method)}


def dict_of(node: yaml.Node) -> dict[str, yaml.Node]:
    """Return the values of a YAML mapping by their keys."""
    return {key.value: value for key, value in node.value}


def table(rows: list[Row], paper: dict[str, str]) -> str:
    """Return a table of settings; descriptions end with the paper's values."""
    lines = ["| setting | type | default | description |", "|---|---|---|---|"]
    for x in rows:
        value = f" **Paper:** `{paper[x.path]}`." if x.path in paper else ""
        lines.append(f"| `{x.path}` | {x.kind} | {x.default} | {x.text}{value} |")
    return "\n".join(lines)


def method_rows() -> Iterator[Row]:
    """Yield the settings of the built-in methods, with the default of each method."""
    methods = settings_of_methods()
    for name, meaning in MEANINGS.items():
        defaults: dict[str, list[str]] = {}
        for method, parameter in methods[name].items():
            defaults.setdefault(shown(parameter.default), []).append(method)
        kind = kind_of(next(iter(methods[name].values())).annotation)
        yield Row(
            f"algorithm.{name}",
            "".join([kind, *(f", {x}" for x in meaning.limits)]),
            "; ".join(f"`{value}`: {', '.join(x)}" for value, x in defaults.items()),
            cell(meaning.text),
        )


def settings_page() -> str:
    """Return docs/settings.md."""
    paper = paper_values()
    method = yaml.safe_load(f"{{{paper['algorithm']}}}")
    method_paper = {f"algorithm.{name}": shown(value) for name, value in method.items()}
    parts = [
        "# Settings of a recipe",
        NOTICE,
        "A recipe is a YAML file with these settings; unknown keys are errors. Any setting can be "
        "overridden on the command line:",
        "```bash\nsegcredit train my.yaml optimizer.lr=1e-6 rollout.samples=8\n```",
        "`None` as default means that the setting is not set.",
        "**Paper:** marks the numbers of the paper's SAPO (Table 7 and §5.1), as in the recipe "
        f"`{PAPER}`. [Recipes in detail](appendix/recipes.md#hyperparameters) has those of the "
        "other methods, and where the recipes depart from the paper.",
        "## Top level",
        table(list(rows_of(Recipe, "")), paper),
        "## algorithm",
        "Settings of the built-in [methods](algorithms.md). A method has those that name it in the "
        "column default: `algorithm.lam=0.95`, or `algorithm: {name: sapo, lam: 0.95}`.",
        table(list(method_rows()), method_paper),
    ]
    for name, field in Recipe.model_fields.items():
        inner = nested(field.annotation)
        for settings in inner:
            own = f"{name}.N." if len(inner) > 1 else f"{name}."
            title = f"{name}: {settings.model_fields['kind'].default}" if len(inner) > 1 else name
            of_paper = settings is Optimize or len(inner) == 1  # its SAPO has no other stage
            rows = table(list(rows_of(settings, own)), paper if of_paper else {})
            parts += [f"## {title}", " ".join((settings.__doc__ or "").split()), rows]
    return "\n\n".join(parts) + "\n"


def plain(markup: str) -> str:
    """Remove rich's markup, such as [bold]."""
    return re.sub(r"\[/?(?:bold|dim|cyan|green|italic)\]", "", markup)


def parameter_row(parameter: Any) -> str:
    """Return an argument's or option's row."""
    if parameter.param_type_name == "argument":
        name = f"`{parameter.metavar or parameter.name.upper()}`"
    else:
        name = ", ".join(f"`{x}`" for x in [*parameter.opts, *parameter.secondary_opts])
    value = parameter.default
    empty = value is None or value is False or value in ("", [], ())
    default = "required" if parameter.required else "" if empty else f"`{shown(value)}`"
    kind = kind_of(parameter.type_descriptor.annotation)
    kind = "flag" if kind == NAMES["bool"] else kind
    return f"| {name} | {kind} | {default} | {cell(plain(parameter.help or ''))} |"


def cli_page() -> str:
    """Return docs/cli.md."""
    commands: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    parts = [
        "# Command line",
        NOTICE,
        "`segcredit COMMAND --help` shows the same in a terminal.",
        "\n".join(
            ["| command | purpose |", "|---|---|"]
            + [
                f"| [`{name}`](#segcredit-{name}) | {cell(command.help.split(chr(10) * 2)[0])} |"
                for name, command in commands.items()
            ]
        ),
    ]
    for name, command in commands.items():
        rows = [parameter_row(x) for x in command.params if not x.hidden and x.name != "help"]
        head = ["| argument or option | type | default | description |", "|---|---|---|---|"]
        examples = [x for x in plain(command.epilog or "").splitlines() if x and x != "Examples"]
        parts += [f"## segcredit {name}", plain(command.help), "\n".join([*head, *rows])]
        parts += ["```bash\n" + "\n".join(examples) + "\n```"] if examples else []
    return "\n\n".join(parts) + "\n"


def healthy_cell(names: list[str]) -> str:
    """Return the cell "healthy" of a row that defines these metrics."""
    texts = [HEALTHY.get(name, "") for name in names]
    if len(set(texts)) == 1:
        return texts[0]
    return "; ".join(f"`{name}`: {text}" for name, text in zip(names, texts, strict=True) if text)


def metrics_page() -> str:
    """Return docs/metrics.md with healthy ranges beside the metrics of the optimize stage."""
    before, title, rest = (DOCS / "metrics.md").read_text().partition("\n## optimize\n")
    section, end, after = rest.partition("\n## ")
    lines = section.split("\n")
    for number, line in enumerate(lines):
        if line.startswith("| `"):
            names, definition, _ = re.split(r"(?<!\\)\|", line)[1:-1]
            text = healthy_cell(re.findall(r"`([^`]+)`", names))
            lines[number] = f"|{names}|{definition}|{f' {text} ' if text else ' '}|"
    return before + title + "\n".join(lines) + end + after


PAGES = {"cli.md": cli_page, "metrics.md": metrics_page, "settings.md": settings_page}


def main() -> None:
    """Write the pages."""
    for name, page in PAGES.items():
        (DOCS / name).write_text(page())
        print(DOCS / name)


if __name__ == "__main__":
    main()
