"""Names that other trainers use lead to keys that exist."""

import inspect
from pathlib import Path

import pytest

from segcredit.algorithms.methods import ALGORITHMS
from segcredit.config import RecipeError, load_recipe
from segcredit.config.read import _known_keys
from segcredit.config.synonyms import SYNONYMS


def test_every_synonym_names_a_key_of_a_recipe() -> None:
    method = inspect.signature(ALGORITHMS["ppo"]).parameters
    for name, key in SYNONYMS.items():
        *path, last = key.split(".")
        if path == ["algorithm"]:
            assert last in method, name
        else:
            place = ["optimize" if x == "0" else x for x in path]
            assert last in _known_keys(place), f"{name} → {key}"
        assert name not in _known_keys([]), f"{name} is a key"


@pytest.mark.parametrize("typed", ["own.yml", "own", "owm.yaml"])
def test_a_file_with_a_similar_name_is_suggested(tmp_path: Path, typed: str) -> None:
    (tmp_path / "own.yaml").write_text("base: demo")
    place = str(tmp_path / typed)
    with pytest.raises(RecipeError) as caught:
        load_recipe(place)
    assert f"Did you mean '{tmp_path / 'own.yaml'}'?" in str(caught.value)
