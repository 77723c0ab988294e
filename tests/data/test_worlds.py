"""What holds of every world: determinism, disjoint splits, round trips, clear errors."""

import hashlib
import json
import os
import random
import re
import subprocess
import sys
from dataclasses import FrozenInstanceError

import pytest
from each import each

from segcredit.data.worlds import WORLDS, Demonstration, World, make_world
from segcredit.data.worlds.base import draw, split_of
from segcredit.types import Prompt

TINY = {"given": 2, "derived": 3, "needed": (1, 2), "modulus": 7}
SMALL = {
    "shape_grid": {"size": 2, "colors": 1, "shapes": 2},
    "derived_variables": {
        "given": 2,
        "derived": 1,
        "needed": (1, 1),
        "modulus": 7,
        "operations": "+",
    },
    "ledger": {"booked": (1, 1), "foreign": (0, 0), "kinds": 4, "regions": 4, "most": 3},
    "tile_tour": {
        "size": 2,
        "visited": (1, 1),
        "colors": 2,
        "shapes": 1,
        "codes": 1,
        "most": 1,
        "pictures": 100,
    },
}
"""So few prompts that both splits would draw the same ones by chance."""
VARIED = [
    ("shape_grid", {}),
    ("shape_grid", {"size": 4, "colors": 6, "shapes": 6, "terms": 3, "cell": 32}),
    ("shape_grid", {"terms": 3, "operations": ("minus", "times", "plus"), "glance_error": 1.0}),
    ("shape_grid", {"operations": ("minus",), "twice": False, "careful": 0.0}),
    ("shape_grid", {"terms": 1, "colors": 1, "shapes": 1}),
    ("derived_variables", {}),
    ("derived_variables", TINY),
    ("derived_variables", {"derived": 40, "needed": (20, 28), "shuffled": True}),
    ("derived_variables", {"wrong": 0.5, "skipped": 0.5, "lazy": 0.5, "superfluous": 1.0}),
    ("ledger", {}),
    ("ledger", {"booked": (15, 20), "foreign": (0, 9), "kinds": 26, "regions": 26, "rules": 5}),
    ("ledger", {"wrong": 0.5, "stray": 0.5, "skipped": 0.5, "traps": 1.0, "openers": 1}),
    ("tile_tour", {}),
    ("tile_tour", {"size": 5, "visited": (20, 25), "colors": 6, "shapes": 6, "cell": 32}),
    ("tile_tour", {"misread": 0.5, "traps": 1.0, "trap_right": 0.0, "most": 9, "modulus": 97}),
]


def content(prompt: Prompt) -> tuple[str, tuple[object, ...]]:
    return prompt.messages[-1]["content"], prompt.images


def fingerprint() -> str:
    """Of many prompts and demonstrations of all worlds."""
    digest = hashlib.sha256()
    for name in WORLDS:
        world = make_world(name, seed=7)
        shown = [world.demonstration(n, phase) for n in range(20) for phase in world.phases]
        for prompt in [*world.prompts("test", 0, 20), *(x.prompt for x in shown)]:
            digest.update(repr(prompt).encode())
        digest.update(repr([x.response for x in shown]).encode())
    return digest.hexdigest()


@pytest.mark.slow
def test_another_process_makes_the_same() -> None:
    here = os.path.dirname(__file__)
    places = [here, os.path.dirname(here)]
    code = f"import sys; sys.path[:0] = {places}; import test_worlds as t; print(t.fingerprint())"
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}  # sets in another order than here
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert done.stdout.strip() == fingerprint(), done.stderr


def test_what_was_made_once_is_made_for_ever() -> None:
    """A warm start and a baseline can be compared with last year's only if these stay."""
    grid, chains = make_world("shape_grid"), make_world("derived_variables", **TINY)
    assert grid.demonstration(2).prompt.messages[0]["content"] == (
        "<image>count red square plus twice blue circle ?"
    )
    assert grid.demonstration(2).response == (
        "check red square 1 1 1 = 3\nglance twice blue circle = 6\ntotal = 9\n\\boxed{9}"
    )
    assert chains.demonstration(3).prompt.messages[0]["content"] == (
        "d = 6 ; a = 2 ; e = d - a ; c = a * d ; b = d + c ; b ?"
    )
    assert chains.demonstration(3).response == (
        "c = a * d = 2 * 6 > c 5 ;\nb = d + c = 6 + 5 > b 4 ;\n\\boxed{4}"
    )
    ledger = make_world("ledger", booked=(1, 1), foreign=(1, 1)).demonstration(2)
    assert ledger.prompt.messages[0]["content"] == "1 f H 2 ann ; 2 l J 3 cleo ; total cleo ?"
    assert ledger.response == (
        "now 1 : f H 2 ann , pass ;\n"
        "now 2 : l J 3 cleo , keep , sure : 3 counts 3 ; 0 + 3 = 3 ;\n\\boxed{3}"
    )
    tour = make_world("tile_tour", visited=(2, 2)).demonstration(2)
    assert tour.prompt.messages[0]["content"] == "<image>1 h 3 F ; 2 c 2 N ; total ?"
    assert tour.response == (
        "now 1 : h 3 F yellow square , back , sure : 3 counts 16 ; 0 + 16 = 16 ;\n"
        "next 2 : c 2 N blue triangle , twice , sure : 2 counts 4 ; 16 + 4 = 1 ;\n\\boxed{1}"
    )


@pytest.mark.parametrize("name", WORLDS)
def test_order_of_asking_does_not_matter(name: str) -> None:
    world, later = make_world(name), make_world(name)
    first = world.prompts("train", 3, 4)
    assert [later.prompt("train", n) for n in (6, 5, 4, 3)] == first[::-1]
    assert world.prompts("train", 3, 0) == []
    assert len({x.id for split in ("train", "test") for x in world.prompts(split, 0, 9)}) == 18


@pytest.mark.parametrize("name", WORLDS)
def test_another_seed_makes_another_world(name: str) -> None:
    prompts = [make_world(name, seed=seed).prompts("train", 0, 5) for seed in (0, 1, -1)]
    assert len({content(x) for made in prompts for x in made}) == 15
    assert len({x.id for made in prompts for x in made}) == 15


many = pytest.mark.usefixtures("as_users_run_it")
"""Thousands of prompts, for which checks, made elsewhere, would take longer than making them."""


@pytest.mark.slow
@many
@pytest.mark.parametrize("name", WORLDS)
def test_splits_are_disjoint(name: str) -> None:
    """Across seeds too, and where by chance they could not be."""
    for settings, count in ((SMALL[name], 300), ({}, 200)):
        train, test = set(), set()
        for seed in (0, 1):
            world = make_world(name, seed=seed, **settings)
            train |= {content(x) for x in world.prompts("train", 0, count)}
            test |= {content(x) for x in world.prompts("test", 0, count)}
            train |= {
                content(world.demonstration(n, phase).prompt)
                for n in range(count, count + 100)
                for phase in world.phases
            }
        assert not train & test
        assert len(test) > 5


@many
def test_small_worlds_repeat_themselves() -> None:
    """So the test above would fail without the hash."""
    for name, settings in SMALL.items():
        made = make_world(name, **settings).prompts("train", 0, 1000)
        kinds = {_without_names(content(x)) for x in made}
        assert len(kinds) < 600


def _without_names(x: tuple[str, tuple[object, ...]]) -> tuple[str, tuple[object, ...]]:
    text, images = x
    order = list(dict.fromkeys(re.findall(r"\b[a-z]\b", text)))
    return re.sub(r"\b[a-z]\b", lambda m: str(order.index(m[0])), text), images


@many
def test_splits_are_disjoint_whatever_the_names() -> None:
    world = make_world("derived_variables", **SMALL["derived_variables"])
    train, test = (
        {_without_names(content(x)) for x in world.prompts(split, 0, 2000)}
        for split in ("train", "test")
    )
    assert not train & test


def test_contents_that_cannot_be_split() -> None:
    other = "train" if split_of("always this") == "test" else "test"
    with pytest.raises(ValueError, match="Choose a larger world"):
        draw(random.Random(0), other, lambda rng: "always this", str)


@pytest.mark.parametrize(("name", "settings"), VARIED)
def test_oracle_is_right_and_every_text_is_known(name: str, settings: dict[str, object]) -> None:
    world = make_world(name, **settings)
    tokenizer = world.tokenizer()
    for number in range(25):
        prompt = world.prompt("test", number)
        texts = [world.oracle(prompt), prompt.messages[0]["content"].removeprefix("<image>")]
        assert texts[0].endswith(f"\n\\boxed{{{prompt.answer}}}")
        texts += [world.demonstration(number, phase).response for phase in world.phases]
        for text in texts:
            ids = tokenizer(text)["input_ids"]
            assert tokenizer.unk_token_id not in ids
            assert tokenizer.decode(ids) == text
            assert "".join(tokenizer.decode([x]) for x in ids) == text
            assert not set(ids) & set(tokenizer.all_special_ids)


@pytest.mark.parametrize(("name", "settings"), VARIED)
def test_a_demonstration_ends_in_one_box(name: str, settings: dict[str, object]) -> None:
    world = make_world(name, **settings)
    for number in range(25):
        shown = world.demonstration(number)
        assert re.fullmatch(r"[^\\]*\n\\boxed\{\d+\}", shown.response)
        assert shown.prompt == world.prompt("train", number)


@pytest.mark.parametrize("name", WORLDS)
def test_a_world_is_its_settings(name: str) -> None:
    world = make_world(name)
    assert isinstance(world, World)
    assert world.name == name
    assert world.phases[-1] == "solve"
    assert world == make_world(name, seed=0)
    assert "seed=0" in repr(world)
    with pytest.raises(FrozenInstanceError):
        world.seed = 1
    with pytest.raises(FrozenInstanceError):
        Demonstration(world.prompt("train", 0), "").response = "x"


@pytest.mark.parametrize("name", WORLDS)
def test_a_row_can_be_written_down(name: str) -> None:
    prompt = make_world(name).prompt("test", 3)
    assert json.loads(json.dumps(prompt.columns))["data_source"] == name
    assert prompt.columns["split"] == "test"
    assert prompt.columns["index"] == 3


def test_lists_serve_as_tuples() -> None:
    made = make_world("shape_grid", operations=["plus", "minus"])
    assert made == make_world("shape_grid", operations=("plus", "minus"))
    made = make_world("derived_variables", needed=[2, 3])
    assert made == make_world("derived_variables", needed=(2, 3))


@pytest.mark.usefixtures("as_users_run_it")
@each(
    ("name", "settings", "says"),
    [
        ("shapegrid", {}, "unknown world 'shapegrid'. Did you mean 'shape_grid'?"),
        ("Derived-Variables", {}, "Did you mean 'derived_variables'?"),
        ("moon", {}, "The worlds are: shape_grid, derived_variables, ledger, tile_tour."),
        (None, {}, "unknown world None"),
        ("shape_grid", {"color": 3}, "shape_grid has no setting 'color'. Did you mean 'colors'?"),
        ("shape_grid", {"phases": ()}, "has no setting 'phases'"),
        ("shape_grid", {"size": 1}, "size must be a whole number, between 2 and 8; got 1."),
        ("shape_grid", {"size": "3"}, "got '3'"),
        ("shape_grid", {"size": True}, "got True"),
        ("shape_grid", {"size": 3.0}, "got 3.0"),
        ("shape_grid", {"colors": 7}, "between 1 and 6; got 7"),
        ("shape_grid", {"shapes": 0}, "between 1 and 6; got 0"),
        ("shape_grid", {"terms": 4}, "between 1 and 3; got 4"),
        ("shape_grid", {"cell": 4}, "28 pixels per token"),
        ("shape_grid", {"twice": "yes"}, "twice must be true or false; got 'yes'"),
        ("shape_grid", {"glance_error": 50}, "between 0 and 1; got 50. For 4 % pass 0.04."),
        ("shape_grid", {"careful": float("nan")}, "got nan"),
        ("shape_grid", {"careful": "half"}, "got 'half'"),
        ("shape_grid", {"seed": 0.5}, "seed must be a whole number; got 0.5"),
        ("shape_grid", {"operations": "plus"}, "as a tuple; got 'plus'"),
        ("shape_grid", {"operations": ()}, "one or more of 'plus', 'minus', 'times'"),
        ("shape_grid", {"operations": ("plus", "plus")}, "each once"),
        ("shape_grid", {"operations": ("divided by",)}, "got ('divided by',)"),
        ("shape_grid", {"operations": (1, [])}, "got (1, [])"),
        ("shape_grid", {"colors": 1, "shapes": 1}, "2 terms need at least 2 kinds"),
        ("shape_grid", {"size": 2, "terms": 3, "twice": False}, "leave 4 possible answers"),
        ("derived_variables", {"give": 3}, "Did you mean 'given'?"),
        ("derived_variables", {"given": 1}, "given must be a whole number, between 2 and 26"),
        ("derived_variables", {"derived": 49}, "between 1 and 48; got 49"),
        ("derived_variables", {"needed": 3}, "For exactly 3 pass (3, 3)."),
        ("derived_variables", {"needed": (1, 2, 3)}, "a pair of whole numbers"),
        ("derived_variables", {"needed": (1.0, 2)}, "a pair of whole numbers"),
        ("derived_variables", {"needed": (12, 8)}, "1 ≤ minimum ≤ maximum ≤ derived (16)"),
        ("derived_variables", {"needed": (0, 8)}, "got (0, 8)"),
        ("derived_variables", {"needed": (8, 17)}, "got (8, 17)"),
        ("derived_variables", {"modulus": 1}, "modulus must be a whole number, between 2"),
        ("derived_variables", {"operations": "/"}, "signs +-*"),
        ("derived_variables", {"operations": ""}, "got ''"),
        ("derived_variables", {"operations": "++"}, "each once"),
        ("derived_variables", {"operations": ("+",)}, "got ('+',)"),
        ("derived_variables", {"wrong": -0.1}, "wrong must be a share between 0 and 1; got -0.1"),
        ("derived_variables", {"lazy": True}, "got True"),
        ("derived_variables", {"shuffled": 1}, "true or false"),
        ("ledgr", {}, "Did you mean 'ledger'?"),
        ("ledger", {"owner": 2}, "ledger has no setting 'owner'"),
        ("ledger", {"rules": 6}, "rules must be a whole number, between 2 and 5; got 6"),
        ("ledger", {"modulus": 9}, "'twice' and 'back' give the same result for 3"),
        ("ledger", {"modulus": 8}, "Choose a prime modulus above most (5)."),
        (
            "ledger",
            {"booked": (0, 2)},
            "booked must satisfy 1 ≤ minimum ≤ maximum ≤ 40; got (0, 2)",
        ),
        ("ledger", {"booked": 3}, "booked must be a pair of whole numbers"),
        ("ledger", {"foreign": (3, 2)}, "foreign must satisfy 0 ≤"),
        ("ledger", {"candour": 2}, "candour must be a share between 0 and 1; got 2"),
        ("ledger", {"traps": -1}, "traps must be a share"),
        ("tile_tour", {"visited": (1, 17)}, "at most once, and there are 16; got visited=(1, 17)"),
        ("tile_tour", {"size": 6}, "between 2 and 5; got 6. Each tile has a letter of its own."),
        ("tile_tour", {"colors": 1, "shapes": 1}, "all tiles look the same"),
        ("tile_tour", {"misread": 5}, "For 4 % pass 0.04."),
    ],
)
def test_settings_that_cannot_be(name: str, settings: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        make_world(name, **settings)


@pytest.mark.usefixtures("as_users_run_it")
@pytest.mark.parametrize("name", WORLDS)
def test_prompts_that_cannot_be(name: str) -> None:
    world = make_world(name)
    with pytest.raises(ValueError, match="split must be 'train' or 'test'; got 'validation'"):
        world.prompt("validation", 0)
    with pytest.raises(ValueError, match="index must be a whole number, at least 0; got -1"):
        world.prompt("train", -1)
    with pytest.raises(ValueError, match=r"got 1\.5"):
        world.prompt("train", 1.5)
    with pytest.raises(ValueError, match="count must be a whole number, at least 0; got -2"):
        world.prompts("train", 0, -2)
    with pytest.raises(ValueError, match=r"phase must be one of .*'solve'; got 'dream'"):
        world.demonstration(0, "dream")
    for text in ("", "why ?", "a = 5 ; b = ? ; b ?", "count", "<image>count ?"):
        with pytest.raises(ValueError, match="expected a prompt of this world"):
            world.oracle(Prompt("mine", ({"role": "user", "content": text},)))
