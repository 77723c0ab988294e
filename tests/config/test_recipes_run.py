"""The recipes in the documents: commands name them, code does what it says, and small they run."""

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml
from each import each

from segcredit.config import load_recipe, shipped_recipes
from segcredit.data import load_prompts
from segcredit.data.prepare import prepare
from segcredit.data.worlds import make_world
from segcredit.evaluate.checkpoint import evaluate_checkpoint
from segcredit.models import Policy
from segcredit.models.template import fill_template
from segcredit.partition import PARTITIONS, make_partition
from segcredit.runlog import read_run
from segcredit.train.trainer import Trainer

DOCS = Path(__file__).resolve().parents[2] / "docs"
NAMES = ("recipes", "paper", "partitions", "scale", "studies", "appendix/recipes")
PAGES = {name: (DOCS / f"{name}.md").read_text() for name in NAMES}
TEXT = PAGES["recipes"]
COMMANDS = [
    command
    for page in PAGES.values()
    for command in re.findall(r"^segcredit train (.*?)(?:  +#.*)?$", page, re.MULTILINE)
]
SMALL = (
    "model.path=model",
    "threads=1",
    "rollout.max_tokens=6",
    "update.minibatches=2",
    "evaluation.prompts=2",
    "evaluation.every=0",
    "evaluation.watch=1",
)


@each("command", sorted(set(COMMANDS)))
def test_every_command_names_a_recipe_with_settings_that_exist(command: str) -> None:
    name, *overrides = [x for x in shlex.split(command) if not x.startswith("--")]
    load_recipe(name, overrides)


def test_the_documented_recipes_on_bases_load(tmp_path: Path) -> None:
    blocks = [x for x in re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL) if x.startswith("base:")]
    assert len(blocks) == 2
    for block in blocks:
        (tmp_path / "mine.yaml").write_text(block)
        recipe = load_recipe(str(tmp_path / "mine.yaml"))
        assert recipe.name == yaml.safe_load(block)["name"]


def test_the_table_lists_every_recipe() -> None:
    rows = re.findall(r"^\|[^|]*\| (`\w+/`[^|]*)\|([^|]*)\|([^|]*)\|$", TEXT, re.MULTILINE)
    listed = set()
    for row in rows:
        data, models, methods = (re.findall(r"`([^`]+)`", cell) for cell in row)
        joined = [y if y.endswith("/") else f"{y}-" for y in models]
        listed |= {f"{x}{y}{z}" for x in data for y in joined for z in methods}
    listed |= {command.split()[0] for command in COMMANDS}
    assert listed == {name for name in shipped_recipes() if "/" in name}
    sweep = re.search(r"^for k in (.*); do$", PAGES["paper"], re.MULTILINE)
    assert sweep is not None
    assert [float(k) for k in sweep[1].split()] == [k / 10 for k in range(1, 11)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a recipe finds what it names: rows as prepared, and a model that is tiny instead."""
    monkeypatch.chdir(tmp_path)
    world = make_world("shape_grid", size=2, colors=1, shapes=1, terms=1, twice=False)
    Policy.tiny("qwen2_5_vl", world.tokenizer(), hidden=32, layers=1, heads=2).save(Path("model"))
    for split in ("train", "test"):
        rows = []
        for number, prompt in enumerate(world.prompts(split, 0, 6)):
            picture = Path(f"{split}-{number}.png")
            picture.write_bytes(prompt.images[0])
            asked = prompt.messages[0]["content"]
            rows.append({"problem": asked, "answer": prompt.answer, "images": [str(picture)]})
        Path(f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepare(["train.jsonl", "test.jsonl"], "data/geo3k")
    return tmp_path


@pytest.mark.parametrize(
    ("model", "method"),
    [
        ("qwen2.5-vl-3b", "vc-ppo"),
        pytest.param("qwen2.5-vl-7b-lora", "sapo", marks=pytest.mark.slow),
        ("qwen2.5-vl-3b-lora", "sapo"),
        *(
            pytest.param("qwen2.5-vl-3b", x, marks=pytest.mark.slow)
            for x in ("sapo", "ppo", "grpo")
        ),
        *(
            pytest.param("qwen2.5-vl-7b-lora", x, marks=pytest.mark.slow)
            for x in ("vc-ppo", "grpo")
        ),
    ],
)
def test_with_a_tiny_model_the_recipes_of_geo3k_run(folder: Path, model: str, method: str) -> None:
    samples = 2 if method == "grpo" else 1
    small = [*SMALL, "rollout.prompts=4", f"rollout.samples={samples}", "stages.0.steps=1"]
    if method == "vc-ppo":
        small.append("stages.1.steps=1")
    trainer = Trainer.from_recipe(load_recipe(f"geo3k/{model}-{method}", small))
    result = trainer.train(folder / "run")
    assert result.model is not None
    assert load_recipe(str(folder / "run" / "config.yaml")) == trainer.recipe


FURTHER = {
    "vineppo": ["algorithm.samples=2"],
    "spo-tree": ["rollout.samples=1", "rollout.tree={branching: [2, 2], tokens: 3}"],
    "restem": ["algorithm.threshold=0.0"],
    "dpo-positive": ["rollout.engine=hf"],
}
"""What makes them small, too."""


@pytest.mark.parametrize("method", ["sapo", "rloo", *FURTHER])
def test_with_a_tiny_model_the_recipes_of_text_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """A model without a chat template, as VinePPO's are."""
    monkeypatch.chdir(tmp_path)
    world = make_world("derived_variables", given=2, derived=3, needed=[1, 2], modulus=7)
    tokenizer = world.tokenizer()
    tokenizer.chat_template = None
    Policy.tiny("llama", tokenizer, hidden=32, layers=1, heads=4).save(Path("model"))
    for split in ("train", "test"):
        rows = [
            {"question": x.messages[0]["content"], "answer": x.answer}
            for x in world.prompts(split, 0, 6)
        ]
        Path(f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepare(["train.jsonl", "test.jsonl"], "data/gsm8k-plain")
    small = [*SMALL, "rollout.prompts=4", "rollout.samples=2", "stages.0.steps=1"]
    more = ["save.rollouts_every=1", *FURTHER.get(method, [])]
    recipe = load_recipe(f"gsm8k/rhomath-1.1b-{method}", [*small, *more])
    result = Trainer.from_recipe(recipe).train(tmp_path / "run")
    assert result.model is not None
    questions = {x.messages[0]["content"] for x in world.prompts("train", 0, 6)}
    recorded = read_run(tmp_path / "run").rollouts(1)
    asked = {f"[MATH_TASK] Problem:\n{x}\n\nSolution:" for x in questions}
    assert recorded
    assert {row["prompt"] for row in recorded} <= asked
    measured = evaluate_checkpoint(str(tmp_path / "run"), prompts=2, samples=1, max_tokens=3)
    assert measured.prompts == 2, "the run's template is the evaluation's"
    model = str(tmp_path / "model")
    given = {"data": ["test.jsonl"], "reward": "exact", "prompts": 2, "samples": 1}
    with pytest.raises(ValueError, match=r"Set data\.template \(segcredit evaluate: --template\)"):
        evaluate_checkpoint(model, **given, max_tokens=3)
    assert evaluate_checkpoint(model, **given, max_tokens=3, template="{question}").prompts == 2


OWN = [x for x in shipped_recipes() if x.startswith(("real/", "gsm8k/qwen2.5"))]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:100% of the responses were cut off")
@pytest.mark.parametrize("name", OWN)
def test_with_a_tiny_model_the_recipes_that_are_not_the_papers_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """All stages, from a folder in place of the hub id, on rows as the page prepares them."""
    monkeypatch.chdir(tmp_path)
    world = make_world("derived_variables", given=2, derived=3, needed=[1, 2], modulus=7)
    tokenizer = world.tokenizer()
    if name.startswith("real/"):
        tokenizer.chat_template = None
    Policy.tiny("llama", tokenizer, hidden=32, layers=1, heads=4).save(Path("model"))
    rows = [
        {"question": x.messages[0]["content"], "answer": f"1\n#### {number}"}
        for number, x in enumerate(world.prompts("train", 0, 12))
    ]
    equation = {"Numbers": "1 2", "Equation": "+ number0 number1", "Answer": 3}
    problem = {"Question": "number0 + number1 ?", **equation}
    for file, some in (
        ("train", rows[:6]),
        ("test", rows[6:]),
        ("words", [problem]),
        ("svamp", [{"Body": "a b", "Question": "?", "Answer": 1}]),
    ):
        Path(f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    prepare("gsm8k", "data/gsm8k-plain", source=["train.jsonl", "test.jsonl"], suffix="")
    prepare("gsm8k", "data/gsm8k", source=["train.jsonl", "test.jsonl"], suffix="")
    prepare("words", "data/words-plain", source=["words.jsonl", "svamp.jsonl"], suffix="")
    recipe = load_recipe(name)
    small = [*SMALL, "rollout.prompts=4", f"rollout.samples={min(recipe.rollout.samples, 2)}"]
    small += [f"stages.{number}.steps=1" for number in range(len(recipe.stages))]
    small += ["stages.0.batch=4"] if name.startswith("real/") else []
    trainer = Trainer.from_recipe(load_recipe(name, [*small, *FURTHER.get(Path(name).name, [])]))
    assert trainer.plan.train.size == len(recipe.data.train) + 5
    assert trainer.train(tmp_path / "run").model is not None
    assert load_recipe(str(tmp_path / "run" / "config.yaml")) == trainer.recipe


@pytest.mark.slow
@pytest.mark.parametrize("row", ["newline", "step", "probability"])
def test_with_a_tiny_model_the_rows_of_table_3_run(folder: Path, row: str) -> None:
    small = [*SMALL, "rollout.prompts=4", "stages.0.steps=1"]
    trainer = Trainer.from_recipe(load_recipe(f"geo3k/qwen2.5-vl-7b-sapo-{row}", small))
    assert trainer.train(folder / "run").model is not None
    assert load_recipe(str(folder / "run" / "config.yaml")) == trainer.recipe


def test_the_names_of_partitions_are_listed_with_their_settings() -> None:
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| ([^|]*)\|$", PAGES["partitions"], re.MULTILINE)
    listed = {name: re.findall(r"`(\w+)`(?:: ([\d.]+))?", settings) for name, settings in rows}
    assert list(listed) == list(PARTITIONS)
    for name, settings in listed.items():
        assert [key for key, _ in settings] == list(PARTITIONS[name].setting_fields())
        numbers = {key: yaml.safe_load(x) for key, x in settings if x}
        missing = {key: 16 for key, x in settings if not x}
        assert make_partition(name, **missing) == make_partition(name, **missing | numbers)


def test_questions_in_the_prompt_that_the_checkpoints_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page's command writes bare questions where the recipe looks for them."""
    monkeypatch.chdir(tmp_path)
    rows = [{"question": "How many\neggs?", "answer": "2 + 2 = 4\n#### 1,004"}]
    for split in ("train", "test"):
        Path(f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = re.search(r"^segcredit prepare (gsm8k .*)$", TEXT, re.MULTILINE)
    assert command is not None
    name, _, suffix, _, output = shlex.split(command[1])
    prepare(name, output, source=["train.jsonl", "test.jsonl"], suffix=suffix)
    recipe = load_recipe("gsm8k/rhomath-1.1b-sapo")
    assert recipe.data.template is not None
    for files in (recipe.data.train, recipe.data.test):
        (prompt,) = load_prompts(files).prompts
        asked = "[MATH_TASK] Problem:\nHow many\neggs?\n\nSolution:"
        assert fill_template(recipe.data.template, prompt) == asked
        assert prompt.answer == "1004"


def test_maths_two_files_make_openais_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both files are for training, less what the held-out one has."""
    monkeypatch.chdir(tmp_path)
    command = re.search(r"^segcredit prepare math (.*?\\\n.*?)$", TEXT, re.MULTILINE)
    assert command is not None
    words = shlex.split(command[1].replace("\\\n", " "))
    places = [words[i + 1] for i, word in enumerate(words) if word == "--from"]
    assert "--drop-duplicates" in words
    assert words[words.index("--output") + 1] == "data/math-plain"
    assert [place.partition("=")[0] for place in places] == ["test", "train", "train"]

    def write(name: str, problems: list[str]) -> str:
        rows = [{"problem": x, "solution": r"\boxed{1}"} for x in problems]
        Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return name

    mine = [
        f"test={write('five-hundred.jsonl', ['c'])}",
        f"train={write('train-0.jsonl', ['a', 'b'])}",
        f"train={write('test-0.jsonl', ['c', 'd'])}",
    ]
    report = prepare("math", "data/math", source=mine, drop_duplicates=True)
    assert {x.name: x.written for x in report.splits} == {"train": 3, "test": 1}
