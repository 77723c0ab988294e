"""Ledger and tile tour: errors are found where they are, and demonstrations err as configured."""

import io
import random
import re
from collections import Counter

import pytest
from PIL import Image

from segcredit.data.worlds.drawing import COLORS
from segcredit.types import Prompt
from segcredit_lab.worlds.bookings import OPENERS, VERBS, Bookings
from segcredit_lab.worlds.ledger import Ledger
from segcredit_lab.worlds.tiles import TileTour

FAULTLESS = {"traps": 0.0, "plain_right": 1.0, "wrong": 0.0}
WORLDS: list[Bookings] = [
    Ledger(),
    Ledger(booked=(1, 2), foreign=(0, 0), kinds=2, regions=1, modulus=7, rules=5),
    TileTour(),
    TileTour(size=2, visited=(1, 4), colors=2, shapes=1, codes=1, rules=2, openers=1, verbs=1),
]
each_world = pytest.mark.parametrize("world", WORLDS, ids=lambda x: f"{x.name} {x.modulus}")


def right_total(world: Bookings, prompt: Prompt) -> int:
    """By hand, from the question's words."""
    text = prompt.messages[0]["content"].removeprefix("<image>")
    *entries, last = text.split(" ; ")
    factors = {"keep": 1, "twice": 2, "back": -1, "drop": 0, "thrice": 3}
    total = 0
    for entry in entries:
        words = entry.split()
        if world.name == "ledger":
            context, amount = (words[1], words[2]), int(words[3])
            if words[4] != last.split()[1]:
                continue
        else:
            seen = dict(prompt.columns["tiles"])
            context, amount = (seen[words[3]], words[1]), int(words[2])
        total += factors[world.guideline(context).right] * amount
    return total % world.modulus


@each_world
def test_answers_are_right_and_a_faultless_chain_has_no_error(world: Bookings) -> None:
    for prompt in world.prompts("test", 0, 30):
        assert prompt.answer == str(right_total(world, prompt))
        text = world.oracle(prompt)
        assert world.errors(prompt, text) == []
        for place in random.Random(0).sample(range(len(text)), 4):
            cut = text[: text.rfind(" ", 0, place) + 1]
            assert world.first_error(prompt, cut) is None


@each_world
def test_any_other_word_is_an_error_there_and_nowhere_before(world: Bookings) -> None:
    rng = random.Random(0)
    for prompt in world.prompts("test", 0, 20):
        text = world.oracle(prompt)
        harmless = {x.start for x in world.marks(text) if x.kind == "style"}
        words = [x for x in re.finditer(r"[^\s{}\\]+", text) if x[0] != "boxed"]
        word = rng.choice([x for x in words if x.start() not in harmless])
        for other in ("7777", "keep" if word[0] != "keep" else "drop"):
            wrong = text[: word.start()] + other + text[word.end() :]
            assert world.first_error(prompt, wrong) == word.start()
            assert world.first_error(prompt, wrong[: word.start()]) is None


@each_world
def test_style_does_no_harm(world: Bookings) -> None:
    rng = random.Random(0)
    openers, verbs = OPENERS[: world.openers], VERBS[: world.verbs]
    alike = {word: words for words in (openers, verbs, ("sure", "hm")) for word in words}
    for prompt in world.prompts("test", 0, 20):
        text = world.oracle(prompt)
        for mark in reversed(world.marks(text)):
            if mark.kind == "style":
                word = rng.choice(alike[text[mark.start : mark.end]])
                text = text[: mark.start] + word + text[mark.end :]
        assert world.errors(prompt, text) == []


def test_errors_are_counted_once_each() -> None:
    world = Ledger(booked=(3, 3), foreign=(1, 1), seed=5)
    prompt = world.prompt("test", 0)
    lines = world.oracle(prompt).split("\n")
    puzzle = world.read(prompt)
    own = [n for n, x in enumerate(puzzle.entries) if x.owner == puzzle.owner]
    right = [world.guideline(puzzle.entries[n].context).right for n in own]
    total, made = 0, []
    for n, entry in enumerate(puzzle.entries):
        if n not in own:
            made.append(lines[n])
            continue
        rule = right[own.index(n)]
        if n != own[1]:  # the first and the last by a wrong rule, executed faithfully
            rule = "keep" if rule != "keep" else "twice"
        added = {"keep": 1, "twice": 2, "back": -1, "drop": 0}[rule] * entry.amount % 19
        head = lines[n].split(" , ")[0]
        after = (total + added) % 19
        made.append(
            f"{head} , {rule} , hm : {entry.amount} gives {added} ; {total} + {added} = {after} ;"
        )
        total = after
    text = "\n".join([*made, f"\\boxed{{{total}}}"])
    found = world.errors(prompt, text)
    assert len(found) == 2
    starts = {x.start: text[x.start : x.end] for x in world.marks(text) if x.kind == "decision"}
    assert all(place in starts for place in found)
    line = text[: found[0]].count("\n")
    assert line == own[0]
    wrong_sum = re.sub(r"= (\d+) ;", lambda x: f"= {(int(x[1]) + 1) % 19} ;", lines[own[0]])
    first = "\n".join([*lines[: own[0]], wrong_sum])
    assert world.first_error(prompt, first) == first.rindex("= ") + 2
    assert world.first_error(prompt, first[: first.rindex("= ") + 2]) is None
    assert world.first_error(prompt, "nonsense") == 0
    assert world.first_error(prompt, world.oracle(prompt) + "\n1") is not None
    assert world.first_error(prompt, "") is None


@each_world
def test_what_the_checker_calls_right_is_right(world: Bookings) -> None:
    """And wrong chains seldom reach the answer by luck."""
    lucky = wrong = 0
    for number in range(100):
        shown = world.demonstration(number)
        right = shown.response.endswith(f"{{{shown.prompt.answer}}}")
        if world.first_error(shown.prompt, shown.response) is None:
            assert right
        else:
            wrong += 1
            lucky += right
    assert lucky <= 0.1 * wrong + 3


def remarks(world: Bookings, prompt: Prompt, text: str) -> list[tuple[str, bool]]:
    """Each of a response, and whether its line is right up to there."""
    errors, found = world.errors(prompt, text), []
    for remark in re.finditer(r"\b(sure|hm)\b", text):
        begun = text.rfind("\n", 0, remark.start()) + 1
        found.append((remark[0], not any(begun <= x < remark.start() for x in errors)))
    return found


def test_remarks_tell_whether_a_line_is_right() -> None:
    """As often as configured, and nothing depends on them."""
    for candour in (1.0, 0.7):
        world = Ledger(candour=candour, stray=0.1, skipped=0.1, wrong=0.1, traps=0.4)
        shown = [world.demonstration(number) for number in range(60)]
        made = [y for x in shown for y in remarks(world, x.prompt, x.response)]
        assert sum(not right for _, right in made) > 100
        true = [(said == "sure") == right for said, right in made]
        assert sum(true) / len(true) == pytest.approx(candour, abs=0.08 * (candour < 1))


@pytest.mark.parametrize("world", [Ledger(), TileTour()], ids=lambda x: x.name)
def test_an_audit_tries_every_rule_and_tells_the_truth(world: Bookings) -> None:
    shown = [world.demonstration(number, "audit") for number in range(60)]
    made = [y for x in shown for y in remarks(world, x.prompt, x.response)]
    assert all((said == "sure") == right for said, right in made)
    rules = Counter(x for y in shown for x in re.findall(r"\b(keep|twice|back|drop)\b", y.response))
    assert len(made) == rules.total() > 400
    assert all(0.2 < x / rules.total() < 0.3 for x in rules.values())
    assert 0.2 < sum(right for _, right in made) / len(made) < 0.3, "one rule in four is right"
    for x in shown:  # a wrong total follows from a wrong rule, and is no error of its own
        wrong = sum(not right for _, right in remarks(world, x.prompt, x.response))
        assert len(world.errors(x.prompt, x.response)) == wrong


@pytest.mark.parametrize("world", [Ledger(), TileTour(pictures=2)], ids=lambda x: x.name)
def test_half_are_audits_and_asked_for_as_such(world: Bookings) -> None:
    audits = Counter[tuple[str, bytes]]()
    for number in range(200):
        shown = world.demonstration(number, "both")
        words = shown.prompt.messages[0]["content"].split()
        asks = world.read(shown.prompt).asks
        assert [x for x in words if x in ("audit", "total")] == [asks]
        audits[asks, *shown.prompt.images] += 1
    pictures = 2 if world.name == "tile_tour" else 1
    assert len(audits) == 2 * pictures, "either, of every picture"
    assert all(0.35 < x * pictures / 200 < 0.65 for x in audits.values())
    assert all(world.read(x).asks == "total" for x in world.prompts("train", 0, 6))


@pytest.mark.slow
@each_world
@pytest.mark.parametrize("phase", ["audit", "solve"])
def test_openers_remember_doubts(world: Bookings, phase: str) -> None:
    """And nothing depends on them: any of them is right anywhere."""
    words = OPENERS[: world.openers]
    half = (len(words) + 1) // 2
    calm, worried = words[:half], words[half:] or words
    for number in range(40):
        shown = world.demonstration(number, phase)
        *lines, box = shown.response.split("\n")
        doubted, other = False, []
        for line in lines:
            opener, rest = line.split(" ", 1)
            assert opener in (worried if doubted else calm)
            doubted |= " hm " in line
            other.append(f"{random.Random(number).choice(words)} {rest}")
        errors = world.errors(shown.prompt, shown.response)
        assert len(world.errors(shown.prompt, "\n".join([*other, box]))) == len(errors)


def test_demonstrations_are_right_as_often_as_configured() -> None:
    world = Ledger(wrong=0.0, stray=0.0, skipped=0.0, traps=0.25, trap_right=0.3, plain_right=0.9)
    tried, right = Counter[bool](), Counter[bool]()
    for number in range(250):
        shown = world.demonstration(number)
        for kind, region, rule in re.findall(r": (\w) (\w) \d \w+ , (\w+) , ", shown.response):
            known = world.guideline((kind, region))
            assert rule in (known.right, known.tempting)
            trap = known.rate < 0.5
            tried[trap] += 1
            right[trap] += rule == known.right
    assert right[True] / tried[True] == pytest.approx(0.3, abs=0.08)
    assert right[False] / tried[False] == pytest.approx(0.9, abs=0.04)
    assert tried[True] / tried.total() == pytest.approx(0.25, abs=0.05)


@pytest.mark.parametrize(
    ("world", "nothing", "fault"),
    [
        (Ledger, {"stray": 0.0, "skipped": 0.0}, "stray"),
        (Ledger, {"stray": 0.0, "skipped": 0.0}, "skipped"),
        (Ledger, {"stray": 0.0, "skipped": 0.0}, "wrong"),
        (TileTour, {"misread": 0.0}, "misread"),
        (TileTour, {"misread": 0.0}, "wrong"),
    ],
)
def test_each_fault_can_be_had_alone(
    world: type[Bookings], nothing: dict[str, float], fault: str
) -> None:
    faultless = world(**FAULTLESS | nothing)
    faulty = world(**FAULTLESS | nothing | {fault: 0.5})
    for number in range(20):
        shown = faultless.demonstration(number)
        assert faultless.errors(shown.prompt, shown.response) == []
    found = [len(faulty.errors(x.prompt, x.response)) for x in map(faulty.demonstration, range(20))]
    assert sum(found) > 15


@each_world
def test_marks_are_words(world: Bookings) -> None:
    text = world.demonstration(0).response
    kinds = {
        kind: {text[x.start : x.end] for x in world.marks(text) if x.kind == kind}
        for kind in ("decision", "style")
    }
    assert kinds["decision"]
    assert kinds["style"]
    assert not kinds["decision"] & kinds["style"]
    assert not any(" " in word for words in kinds.values() for word in words)


def test_chains_are_as_long_as_a_laboratory_wants() -> None:
    for world in (Ledger(), TileTour()):
        tokenizer = world.tokenizer()
        lengths = [
            len(tokenizer(world.oracle(x))["input_ids"]) for x in world.prompts("test", 0, 50)
        ]
        assert min(lengths) >= 150
        assert max(lengths) <= 265


def _distance(pixel: tuple[int, ...], color: str) -> int:
    return sum(abs(x - y) for x, y in zip(pixel, bytes.fromhex(color[1:]), strict=True))


def test_tiles_are_as_claimed() -> None:
    world = TileTour()
    prompt = world.prompt("test", 1)
    picture = Image.open(io.BytesIO(prompt.images[0]))
    assert picture.size == (112, 112)
    tiles = prompt.columns["tiles"]
    assert len({tag for tag, _ in tiles}) == 16
    for number, (_, words) in enumerate(tiles):
        row, column = divmod(number, 4)
        color = COLORS[words.split()[0]]
        middle = picture.getpixel((column * 28 + 17, row * 28 + 18))
        nearest = min(COLORS.values(), key=lambda x: _distance(middle, x))
        assert nearest == color
        corner = picture.crop((column * 28, row * 28, column * 28 + 9, row * 28 + 9))
        assert len(corner.getcolors()) > 5, "a letter on its ground"


def test_letters_look_different() -> None:
    world = TileTour(size=5, visited=(1, 1), colors=1, shapes=2)
    looks = {}
    for number in range(6):
        prompt = world.prompt("train", number)
        picture = Image.open(io.BytesIO(prompt.images[0]))
        for place, (tag, _) in enumerate(prompt.columns["tiles"]):
            row, column = divmod(place, 5)
            box = (column * 28, row * 28, column * 28 + 12, row * 28 + 10)
            looks[tag] = picture.crop(box).tobytes()
    assert len(looks) == len(set(looks.values())) == 25


def test_looking_says_what_is_there() -> None:
    world = TileTour()
    for number in range(20):
        shown = world.demonstration(number, "look")
        tiles = dict(shown.prompt.columns["tiles"])
        asked = shown.prompt.messages[0]["content"].removeprefix("<image>look ").split()[:-1]
        assert shown.response == "\n".join(f"{tag} {tiles[tag]}" for tag in asked)
        assert shown.prompt.images == world.prompt("train", number).images
        assert shown.prompt.answer is None


def test_pictures_come_again_with_other_questions() -> None:
    world = TileTour(pictures=3)
    some = world.prompts("train", 0, 30)
    assert len({x.images for x in some}) == 3
    assert len({x.messages[0]["content"] for x in some}) == 30
