"""The model card of a saved policy: valid metadata, what was measured, and no text that escapes."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard

from segcredit.config import load_recipe, parse_recipe
from segcredit.runlog.card import CITATION, model_card, write_card

ROOT = Path(__file__).resolve().parents[2]
EVALUATIONS = [
    {"step": 0, "stage": "evaluation", "sampled": 0.25, "reward": "NaN"},
    {"step": 1, "stage": "optimize", "sampled": 0.99, "time/step": 3.25},
    {"step": 2, "stage": "evaluation", "sampled": 0.5, "sampled_low": 0.4, "sampled_high": 0.6},
]


def card(rows: Any = (), images: bool = False, **config: Any) -> str:
    return model_card(config, "SAPO(x=1)", rows, 2, images)


def rows_of(text: str) -> dict[str, list[str]]:
    """The tables' rows by their first cell."""
    lines = [x.strip("| ").split(" | ") for x in text.splitlines() if x.startswith("| ")]
    return {first: rest for first, *rest in lines}


def test_metadata_that_the_hub_reads() -> None:
    data = {"train": ["hub:openai/gsm8k/main:train@abc", "mine.jsonl"], "test": []}
    text = card(images=True, model={"path": "Qwen/Qwen2.5-VL-3B"}, data=data, algorithm="ppo")
    found = ModelCard(text).data
    assert found.base_model == "Qwen/Qwen2.5-VL-3B"
    assert found.datasets == ["openai/gsm8k"]
    assert found.library_name == "transformers"
    assert found.pipeline_tag == "image-text-to-text"
    assert found.tags == ["segcredit", "reinforcement-learning", "ppo"]


@pytest.mark.parametrize("path", ["/models/qwen", "../a/b/c", "qwen", None])
def test_a_model_that_is_not_on_the_hub_is_no_base_model(path: str | None) -> None:
    text = card(model={"path": path, "tiny": "qwen2"}, algorithm={"name": "file.py:Own"})
    found = ModelCard(text).data
    assert found.base_model is None
    assert found.tags == ["segcredit", "reinforcement-learning"]
    assert found.pipeline_tag == "text-generation"
    assert (str(path) if path else "random weights") in rows_of(text)["base model"][0]
    assert ("initialized at random" in text) == (path is None)


def test_results_before_and_at_that_step() -> None:
    rows = rows_of(card(EVALUATIONS))
    assert rows["measure"] == ["step 0", "step 2", "change"]
    assert rows["accuracy, sampled"] == ["25.0 %", "50.0 % (40.0 to 60.0)", "+25.0 points"]
    assert "reward, sampled" not in rows
    assert rows_of(card(EVALUATIONS[:1]))["reward, sampled"] == ["–"]
    assert "has not evaluated" in card(EVALUATIONS[1:2])


def test_equal_runs_have_equal_cards() -> None:
    later = [{**row, "time/step": 7.5} for row in EVALUATIONS]
    assert card(EVALUATIONS) == card(later)
    one, other = (f"<A object at 0x7f0{n}>" for n in (1, 2))
    assert model_card({"given_in_python": {"reward": one}}, one, [], 1, False) == model_card(
        {"given_in_python": {"reward": other}}, other, [], 1, False
    )


def test_texts_of_users_stay_texts() -> None:
    bad = "a`b``c|d\n```\n# heading\n<script>"
    text = card(
        name=f"{bad}---",
        model={"path": bad},
        data={"train": [bad], "suffix": bad},
        reward={"name": bad},
        algorithm={"name": bad},
        given_in_python=None,
    )
    front, body = re.fullmatch(r"---\n(.*?\n)---\n(.*)", text, re.DOTALL).groups()  # type: ignore[union-attr]
    assert set(yaml.safe_load(front)) == {"library_name", "pipeline_tag", "tags"}
    found = markdown(body)
    assert "<script>" not in found
    assert found.count("<h1>") == 1
    assert len(re.findall("<h2>", found)) == 6
    assert all(x.count("<td>") == 2 for x in re.findall(r"<tr>.*?</tr>", found, re.DOTALL)[1:7])


def markdown(text: str) -> str:
    """Render as the Hub does: CommonMark with tables."""
    library = pytest.importorskip("markdown_it")
    return library.MarkdownIt("commonmark").enable("table").render(text)


def test_the_settings_repeat_the_run() -> None:
    recipe = parse_recipe(load_recipe("demo", ["data.suffix='```'"]).as_dict())
    text = card(**recipe.as_dict())
    (code,) = re.findall(r"^(`{3,})yaml\n(.*?)^\1$", text, re.MULTILINE | re.DOTALL)
    assert code[0] == "````"
    assert parse_recipe(yaml.safe_load(code[1])) == recipe
    assert "segcredit train recipe.yaml" in text


def test_objects_of_python_cannot_be_repeated_by_a_command() -> None:
    text = card(given_in_python={"reward": "right"})
    assert "`reward: right`" in text
    assert "segcredit train" not in text


def test_objects_of_python_replace_the_settings_of_their_names() -> None:
    """config.yaml still holds the defaults, which such a run did not use."""
    given = {"algorithm": "PolicyGradient(credit=GroupZScore())", "reward": "right"}
    text = card(algorithm="sapo", reward="math", given_in_python=given)
    rows = rows_of(text)
    assert rows["algorithm"] == ["`PolicyGradient(credit=GroupZScore())`"]
    assert rows["reward"] == ["`right`"]
    assert ModelCard(text).data.tags == ["segcredit", "reinforcement-learning"]


def test_the_citation_is_that_of_the_project(tmp_path: Path) -> None:
    told = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    paper = told["references"][0]
    for name in (told["title"], paper["title"], paper["notes"], str(paper["year"])):
        assert name in CITATION
    for author in paper["authors"]:
        assert author["family-names"] in CITATION
    write_card(tmp_path, "ä\n")
    assert (tmp_path / "README.md").read_bytes() == "ä\n".encode()
