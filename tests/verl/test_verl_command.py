"""Recipes in verl's words, accepted by verl itself."""

import json
import subprocess
import sys
from pathlib import Path

from running import HERE, environment

from segcredit.config import load_recipe
from segcredit.integrations.verl.mapping import arguments
from segcredit.integrations.verl.translate import translate

RECIPES = [
    "geo3k/qwen2.5-vl-3b-sapo",
    "geo3k/qwen2.5-vl-3b-ppo",
    "geo3k/qwen2.5-vl-3b-vc-ppo",
    "geo3k/qwen2.5-vl-3b-grpo",
    "geo3k/qwen3-vl-4b-thinking-sapo",
    "gsm8k/rhomath-1.1b-sapo",
    "math/deepseekmath-7b-sapo",
]
TEXT = ["data.template=null"]  # rows for verl hold the prompt as the model reads it
CHANGES = {"gsm8k/rhomath-1.1b-sapo": TEXT, "math/deepseekmath-7b-sapo": TEXT}


def test_verl_accepts_every_translated_recipe_and_no_line_departs(tmp_path: Path) -> None:
    """The whole configuration is composed and our trainers are made from it, as verl does."""
    cases = {
        name: arguments(translate(load_recipe(name, CHANGES.get(name, [])), tmp_path).settings)
        for name in RECIPES
    } | {
        "authors": arguments(
            translate(load_recipe(RECIPES[0], ["algorithm=sapo_authors"]), tmp_path).settings
        )
    }
    done = subprocess.run(
        [
            sys.executable,
            HERE / "construct.py",
            json.dumps({"cases": cases, "version": "", "taken": False}),
        ],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=200,
    )
    lines = [x for x in done.stdout.splitlines() if x.startswith("SAID ")]
    assert lines, done.stderr[-3000:]
    said = json.loads(lines[0].removeprefix("SAID "))
    assert said == dict.fromkeys(cases, "nothing")
    assert "segment credit: PolicyGradient(" in done.stderr
    assert "departs" not in done.stderr
