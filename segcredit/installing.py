"""Say how to install an optional part of segcredit, in the way this copy was installed."""

import json
import shlex
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

NAME = "segcredit"
_ROOT = Path(__file__).resolve().parents[1]


def install_command(extra: str, pip: str = "pip") -> str:
    """Return the command that installs an extra: from the index, a clone, a wheel or a repository.

    >>> from unittest.mock import patch
    >>> with patch("segcredit.installing._origin", lambda: {}):
    ...     install_command("lora")
    "pip install 'segcredit[lora]'"
    """
    return f"{pip} install {' '.join(_arguments(extra))}"


def _arguments(extra: str) -> list[str]:
    if (_ROOT / "pyproject.toml").is_file():  # a clone: editable, or only on PYTHONPATH
        place = "." if Path.cwd() == _ROOT else str(_ROOT)
        return ["-e", shlex.quote(f"{place}[{extra}]")]
    origin = _origin()
    url = str(origin.get("url", ""))
    if not url:
        return [shlex.quote(f"{NAME}[{extra}]")]
    if (version := origin.get("vcs_info")) is not None:
        address = f"{version['vcs']}+{url}@{version['commit_id']}"
        return [shlex.quote(f"{NAME}[{extra}] @ {address}")]
    if not url.startswith("file:"):
        return [shlex.quote(f"{NAME}[{extra}] @ {url}")]
    path = Path(unquote(urlsplit(url).path))
    if path.exists():
        return [shlex.quote(f"{path}[{extra}]")]
    return [shlex.quote(x) for x in _requirements(extra)]  # the wheel or the clone was deleted


def _origin() -> dict[str, Any]:
    """Return where pip got this package (PEP 610); empty if from an index, or not by pip."""
    try:
        text = metadata.distribution(NAME).read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return {}
    found = json.loads(text) if text else {}
    return found if isinstance(found, dict) else {}


def _requirements(extra: str) -> list[str]:
    """Return the packages of an extra."""
    found = [x.partition(";") for x in metadata.requires(NAME) or []]
    marks = (f"extra == '{extra}'", f'extra == "{extra}"')
    return [name.strip() for name, _, when in found if any(mark in when for mark in marks)]
