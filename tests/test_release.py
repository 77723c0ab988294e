"""The package's metadata, and the README as a package index shows it."""

import re
import sys
import tomllib
from pathlib import Path

import pytest

import segcredit

ROOT = Path(__file__).parent.parent
REPOSITORY = "https://host.test/segcredit"


def absolute_links(text: str, monkeypatch: pytest.MonkeyPatch) -> str:
    pytest.importorskip("hatchling")
    monkeypatch.syspath_prepend(str(ROOT))
    from hatch_build import absolute_links

    sys.modules.pop("hatch_build")
    return absolute_links(text, REPOSITORY, "1.2")


def test_relative_links_become_absolute(monkeypatch: pytest.MonkeyPatch) -> None:
    text = '[a](docs/a.md#x) ![b](b.png) <img src="c.svg"> [d](https://d.test) [e](#e)\n'
    code = "```md\n[f](f.md)\n```\n"
    assert absolute_links(text + code, monkeypatch) == (
        f"[a]({REPOSITORY}/blob/v1.2/docs/a.md#x) ![b]({REPOSITORY}/raw/v1.2/b.png) "
        f'<img src="{REPOSITORY}/raw/v1.2/c.svg"> [d](https://d.test) [e](#e)\n{code}'
    )


def test_placeholder_addresses_are_a_notice_and_stop_a_publication(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import release_check

    project = '[project.urls]\nIssues = "https://example.org/x/issues"\n'
    notice = release_check.check_addresses(project, publish=False)
    assert 'pyproject.toml:2: Issues = "https://example.org/x/issues"' in notice
    with pytest.raises(release_check.CheckError, match="not ready to publish"):
        release_check.check_addresses(project, publish=True)
    real = project.replace("https://example.org/x", REPOSITORY)
    assert release_check.check_addresses(real, publish=True) is None


def test_the_project_has_its_addresses() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert {"Repository", "Documentation", "Issues", "Changelog", "Paper"} == {*project["urls"]}
    own = project["urls"]["Repository"]
    assert all(x.startswith(own) for name, x in project["urls"].items() if name != "Paper")


def test_the_version_is_the_same_everywhere() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    released = re.findall(r"^## (\d\S*) \((\d{4}-\d\d-\d\d)\)$", changelog, re.MULTILINE)
    version, date = released[0]
    assert version == segcredit.__version__
    assert f"\nversion: {version}\ndate-released: {date}\n" in citation


def test_examples_are_in_the_source_distribution_only() -> None:
    sdist = pytest.importorskip("hatchling.builders.sdist").SdistBuilder(str(ROOT))
    wheel = pytest.importorskip("hatchling.builders.wheel").WheelBuilder(str(ROOT))
    included = {x.distribution_path for x in sdist.recurse_included_files()}
    examples = {f"examples/{x.name}" for x in (ROOT / "examples").glob("*.[pim]*")}
    assert {"examples/sapo_loop.py", "examples/segcredit.ipynb"} <= examples <= included
    assert not any("examples" in x.distribution_path for x in wheel.recurse_included_files())
