"""A run that learns nothing says so once: on the terminal and in its record."""

import io
import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from tiny_runs import changed

import segcredit
from segcredit.algorithms import make_algorithm
from segcredit.config import parse_recipe
from segcredit.report.overview import overview
from segcredit.runlog import read_run
from segcredit.train.health import STEPS, Health, begin_token_warning
from segcredit.train.loop import Silent
from segcredit.train.metrics import describe_rewards
from segcredit.train.progress import Terminal
from segcredit.train.trainer import Trainer
from segcredit.types import Prompt

HEALTHY = {"reward": 0.4, "reward_std": 0.5, "truncated": 0.1, "groups/zero_std": 0.3}
SICK: list[tuple[str, dict[str, float], list[str]]] = [
    ("constant_reward", {"reward": 0.0, "reward_std": 0.0}, ["every response got the reward 0,"]),
    (
        "constant_reward",
        {"reward": 0.1, "reward_std": 7e-9, "groups/zero_std": 1.0, "selected/items": 0.0},
        ["got the same reward, 0.1,", "returns a constant"],
    ),
    ("truncated", {"truncated": 0.99}, ["rollout.max_tokens=12 (now 99%)", "eos_token_id"]),
    ("truncated", {"truncated": 0.5}, ["at least 50% of the responses were cut off"]),
    ("nothing_selected", {"selected/items": 0.0}, ["selected/items is 0", "rollout.samples"]),
    ("groups_without_spread", {"groups/zero_std": 0.95}, ["(now 95%)", "rollout.samples"]),
]


def health(algorithm: str = "grpo") -> Health:
    return Health(parse_recipe(changed()), make_algorithm(algorithm))


@pytest.mark.parametrize(("name", "sign", "said"), SICK)
def test_a_sign_that_lasts_is_reported_once(
    name: str, sign: dict[str, float], said: list[str]
) -> None:
    watched, step = health(), HEALTHY | sign
    for _ in range(STEPS - 1):
        assert watched.warnings("optimize", step) == []
    ((found, message),) = watched.warnings("optimize", step)
    assert found == name
    for part in (f"In the last {STEPS} steps", *said):
        assert part in message
    assert watched.warnings("optimize", step) == []


@pytest.mark.parametrize(("name", "sign", "said"), SICK)
def test_a_sign_that_passes_is_none(name: str, sign: dict[str, float], said: list[str]) -> None:
    watched = health()
    for _ in range(3):
        for _ in range(STEPS - 1):
            assert watched.warnings("optimize", HEALTHY | sign) == []
        assert watched.warnings("optimize", HEALTHY) == []


@pytest.mark.parametrize(("name", "sign", "said"), SICK)
def test_a_short_stage_reports_at_its_end_what_all_its_steps_showed(
    name: str, sign: dict[str, float], said: list[str]
) -> None:
    for steps in range(1, STEPS):
        watched, resumed = health(), health()
        for _ in range(steps):
            assert watched.warnings("optimize", HEALTHY | sign) == []
        ((found, message),) = watched.final_warnings(steps)
        assert found == name
        where = f"In all {steps} steps" if steps > 1 else "In the only step"
        for part in (f"{where} of this stage", *said):
            assert part in message
        assert watched.final_warnings(steps) == [], "said already"
        lines = [{"stage": "optimize", **HEALTHY, **sign}] * steps
        resumed.replay(lines)
        assert resumed.final_warnings(steps) == [(name, message)]
        resumed = health()
        resumed.replay([*lines, {"stage": "warning", "name": name}])
        assert resumed.final_warnings(steps) == []


def test_the_end_of_a_stage_reports_no_sign_that_a_step_lacked() -> None:
    step = HEALTHY | {"truncated": 1.0}
    watched = health()
    for metrics in (HEALTHY, step, step):
        assert watched.warnings("optimize", metrics) == []
    assert watched.final_warnings(3) == []
    for metrics in (HEALTHY, *[step] * (STEPS - 1)):
        assert watched.warnings("optimize", metrics) == []
    assert watched.final_warnings(STEPS + 9) == [], "a longer stage needs as many steps in a row"
    assert health().final_warnings(0) == []


def test_imitation_and_evaluations_are_not_counted() -> None:
    watched, step = health(), HEALTHY | {"truncated": 1.0}
    for stage in ("warm_start", "evaluation") * 9:
        assert watched.warnings(stage, step) == []
    for _ in range(STEPS - 1):
        assert watched.warnings("pretrain_critic", step) == []
    assert [name for name, _ in watched.warnings("optimize", step)] == ["truncated"]


def test_prompts_without_differences_matter_to_methods_that_compare_them() -> None:
    step = HEALTHY | {"groups/zero_std": 1.0}
    for algorithm, warned in (("grpo", 1), ("rloo", 1), ("gspo", 1), ("ppo", 0), ("sapo", 0)):
        watched = health(algorithm)
        assert sum(len(watched.warnings("optimize", step)) for _ in range(9)) == warned


@pytest.mark.usefixtures("as_users_run_it")
@pytest.mark.parametrize(
    ("rewards", "groups", "share"),
    [
        ([0.0, 1.0, 0.0], [0, 1, 2], None),
        ([0.0, 1.0, 0.1, 0.1], [0, 0, 1, 1], 0.5),
        ([0.0, 0.1, 0.0, 0.1, -1.0], [4, 7, 4, 7, 9], 1.0),
    ],
)
def test_the_share_of_prompts_without_differences(
    rewards: list[float], groups: list[int], share: float | None
) -> None:
    count = len(rewards)
    rollouts = SimpleNamespace(
        mask=torch.ones(count, 2, dtype=torch.bool),
        reward=torch.tensor(rewards),
        group=torch.tensor(groups),
        truncated=torch.zeros(count, dtype=torch.bool),
    )
    graded = [SimpleNamespace(correct=None, complete=True, verdict=True, each={}) for _ in rewards]
    collected: Any = SimpleNamespace(rollouts=rollouts, rewards=graded, weight=None)
    assert describe_rewards(collected).get("groups/zero_std") == share


RUN: dict[str, Any] = {
    "reward": "exact",  # nothing that an untrained model writes is right
    "algorithm": "grpo",
    "rollout": {"prompts": 4, "samples": 2, "max_tokens": 99},  # long enough to end by chance
    "stages": [
        {"kind": "warm_start", "steps": 1, "batch": 2},
        {"kind": "optimize", "steps": STEPS + 2},
    ],
    "evaluation": {"every": 0, "prompts": 2},
    "save": {"every": 99},
}


def warnings_of(folder: Path) -> list[tuple[int, str]]:
    return [(row["step"], row["name"]) for row in read_run(folder).warnings]


class Notes(Silent):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def train(folder: Path, steps: int, resume: bool = False) -> list[str]:
    """A run of so many steps; what it says of rewards."""
    stages = [RUN["stages"][0], {"kind": "optimize", "steps": steps}]
    notes = Notes()
    trainer = Trainer.from_recipe(parse_recipe(changed(**RUN | {"stages": stages})))
    trainer.train(folder, resume=resume, watch=notes)
    return [x for x in notes.notes if "every response got the reward 0," in x]


@pytest.mark.slow
def test_warnings_are_shown_recorded_and_survive_a_resume(tmp_path: Path) -> None:
    assert len(train(tmp_path / "whole", STEPS + 1)) == 1
    expected = [(STEPS + 1, "constant_reward")]
    assert warnings_of(tmp_path / "whole") == expected
    found = read_run(tmp_path / "whole")
    assert all("name" not in row for row in found.metrics), "numbers alone"
    ((step, message),) = overview(found)["warnings"]
    assert step == STEPS + 1
    assert "got the reward 0" in message

    (found_early,) = train(tmp_path / "short", 2)
    assert found_early.startswith("In all 2 steps of this stage every response got the reward 0,")
    assert warnings_of(tmp_path / "short") == [(3, "constant_reward")]
    assert train(tmp_path / "short", STEPS + 1, resume=True) == [], "said already"
    assert warnings_of(tmp_path / "short") == [(3, "constant_reward")]


@pytest.mark.slow
def test_a_run_that_stops_early_reports_what_its_few_steps_showed(tmp_path: Path) -> None:
    evaluation = {"every": 1, "prompts": 2, "patience": 2}
    notes = Notes()
    trainer = Trainer.from_recipe(parse_recipe(changed(**RUN | {"evaluation": evaluation})))
    trainer.train(tmp_path / "run", watch=notes)
    assert [name for _, name in warnings_of(tmp_path / "run")] == ["constant_reward", "early_stop"]
    assert any("of this stage every response got the reward 0," in x for x in notes.notes)


@pytest.mark.slow
def test_in_python_they_are_warnings(tmp_path: Path) -> None:
    trainer = Trainer.from_recipe(parse_recipe(changed(**RUN)))
    with pytest.warns(UserWarning, match="every response got the reward 0,") as caught:
        trainer.train(tmp_path / "run")
    assert len(caught) == 1
    package = Path(segcredit.__file__).parent
    assert package not in Path(caught[0].filename).parents, "the caller's line"
    lines = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [x["name"] for x in lines if x["stage"] == "warning"] == ["constant_reward"]


def test_a_warm_start_whose_responses_do_not_end_is_reported(tmp_path: Path) -> None:
    """A run without reinforcement learning has no steps that would show it."""
    rollout = RUN["rollout"] | {"max_tokens": 2}
    settings = RUN | {"stages": RUN["stages"][:1], "rollout": rollout}
    notes = Notes()
    Trainer.from_recipe(parse_recipe(changed(**settings))).train(tmp_path / "run", watch=notes)
    (found,) = [x for x in notes.notes if "cut off" in x]
    assert found.startswith("100% of the responses were cut off at rollout.max_tokens=2. Set a ")
    assert warnings_of(tmp_path / "run") == [(1, "truncated")]


def test_a_terminal_of_80_columns_shows_bar_steps_and_metrics() -> None:
    metrics = {"accuracy": 0.5, "reward": 0.5, "entropy": 0.631, "response_length": 200.0}
    metrics |= {"explained_variance": -0.25, "tokens_per_second": 27310.0}
    console = Console(width=80, file=io.StringIO(), force_terminal=True, record=True)
    terminal = Terminal(console)
    terminal.stage(2, "pretrain_critic", 300, 0)
    terminal.stepped(1, "pretrain_critic", metrics)
    console.print(terminal.progress.get_renderable())
    bar, *below = [x.rstrip() for x in console.export_text().splitlines()]
    assert bar.startswith("3 train critic ━")
    assert "1/300" in bar
    assert " ".join(" ".join(below).split()) == (
        "accuracy 50.0% reward 0.500 entropy 0.631 length 200 critic -0.25 tok/s 27310"
    )


def start_of(folder: Path, resume: bool = False, **changes: Any) -> str:
    """What a terminal shows of a run with one step of reinforcement learning."""
    stages = [RUN["stages"][0], {"kind": "optimize", "steps": 1}]
    recipe = parse_recipe(changed(**RUN | {"stages": stages} | changes))
    console = Console(width=300, record=True, file=io.StringIO())
    Trainer.from_recipe(recipe).train(folder, resume=resume, watch=Terminal(console))
    return console.export_text()


@pytest.mark.slow
def test_the_terminal_says_what_is_special_about_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = start_of(tmp_path / "run")
    assert "ahead" not in shown
    assert "threads" not in shown
    shown = start_of(tmp_path / "run", resume=True)
    assert (
        f"This run is complete (2 of 2 steps). To train further, type: segcredit train --resume "
        f"{tmp_path / 'run'} stages.1.steps=2\n"
    ) in shown
    assert "Resuming" not in shown
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    rollout = RUN["rollout"] | {"ahead": 1}
    shown = start_of(tmp_path / "other", threads=None, rollout=rollout)
    assert "ahead   the next step's responses are sampled during the update (rollout.ahead=1)" in (
        shown
    )
    assert shown.count("threads=1 is usually faster") == 1


BEGIN = 1


def reader(begins: bool, helps: bool) -> Any:
    """A policy that predicts every token well, or only after the begin token."""

    def read(input_ids: torch.Tensor, use_cache: bool) -> Any:
        known = not helps or int(input_ids[0, 0]) == BEGIN
        one_hot = torch.nn.functional.one_hot(input_ids.roll(-1, dims=1), 50).float()
        return SimpleNamespace(logits=one_hot * (9.0 if known else 0.0))

    first = [BEGIN] if begins else []
    codec = SimpleNamespace(
        tokenizer=SimpleNamespace(bos_token_id=BEGIN, bos_token="<s>"),
        encode=lambda prompt: (torch.tensor([*first, 7, 8, 9]), {}),
    )
    cpu = torch.device("cpu")
    return SimpleNamespace(model=read, codec=codec, device=cpu, active=nullcontext)


@pytest.mark.usefixtures("as_users_run_it")
def test_a_missing_begin_token_is_reported() -> None:
    prompts = [Prompt("a", ({"role": "user", "content": "?"},), (), "1", {})]
    found = begin_token_warning(reader(begins=False, helps=True), prompts)
    assert found is not None
    assert "begin token '<s>'" in found
    assert "perplexity 50 instead of 1." in found
    assert "Begin data.template, or the model's chat template, with '<s>'" in found
    assert begin_token_warning(reader(begins=True, helps=True), prompts) is None
    assert begin_token_warning(reader(begins=False, helps=False), prompts) is None
    assert begin_token_warning(reader(begins=False, helps=True), []) is None
