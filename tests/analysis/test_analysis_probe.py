"""The value probe: it finds what is planted, leaks nothing, and reads real checkpoints."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recorded_runs import some_rollouts, write_run

from segcredit.runlog import read_run
from segcredit.types import Encoded
from segcredit_lab.analysis import AnalysisSettings, analyze_runs
from segcredit_lab.analysis.probe import (
    OLDER,
    PENALTIES,
    Moments,
    _parts,
    fit,
    folds_by_group,
    hidden_states,
    load_policy,
    out_of_fold,
    probe,
    prompt_of,
    r_squared,
)
from segcredit_lab.analysis.reading import CannotAnalyzeError, read_steps

# ── Ridge ────────────────────────────────────────────────────────────────────────────────────────


def test_a_planted_signal_is_found() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(600, 8)).astype(np.float32) * 10 + 100
    y = 0.3 * (x[:, 2] - 100) / 10 - 0.2 * (x[:, 5] - 100) / 10 + 0.5
    group = np.repeat(np.arange(60), 10)
    value, penalties = out_of_fold(x, y + 0.1 * rng.normal(size=600), folds_by_group(group))
    assert r_squared(y, value) > 0.99
    assert max(penalties) < 0.1, "little shrinkage where there is little noise"
    noise, strong = out_of_fold(x, rng.normal(size=600), folds_by_group(group))
    assert min(strong) >= 0.1
    assert noise.std() < 0.3


def test_prompts_do_not_leak_between_folds() -> None:
    """Each prompt has a reward and features of its own; known from others it cannot be."""
    rng = np.random.default_rng(0)
    group = np.repeat(np.arange(40), 10)
    x = (np.eye(40)[group] + 0.1 * rng.normal(size=(400, 40))).astype(np.float32)
    y = rng.normal(size=40)[group]
    honest, _ = out_of_fold(x, y, folds_by_group(group))
    assert r_squared(y, honest) < 0.05
    leaking, _ = out_of_fold(x, y, np.arange(400) % 5)
    assert r_squared(y, leaking) > 0.5, "what folds over tokens would have claimed"


def test_a_head_has_not_seen_its_fold() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(200, 5)).astype(np.float32), rng.normal(size=200)
    fold = folds_by_group(np.repeat(np.arange(20), 10))
    value, _ = out_of_fold(x, y, fold)
    changed = np.where(fold == 2, y + 100, y)
    other, _ = out_of_fold(x, changed, fold)
    np.testing.assert_allclose(value[fold == 2], other[fold == 2], atol=1e-8)
    assert (np.abs(value - other)[fold != 2] > 1).all()


def test_folds() -> None:
    group = np.array([3, 3, 7, 1, 7, 1, 9, 9, 9, 4, 5, 6])
    fold = folds_by_group(group)
    assert len({*zip(group, fold, strict=True)}) == len({*group})
    assert {*fold} == {0, 1, 2, 3, 4}
    assert {*folds_by_group(np.array([5, 5, 8]))} == {0, 1}
    with pytest.raises(ValueError, match="at least 2 prompts; got 1"):
        folds_by_group(np.array([5, 5]))


def test_ridge_is_the_textbooks() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(2.0, 3.0, size=(50, 4)), rng.normal(size=50)
    x[:, 3] = 7.0  # a constant feature has no weight
    rows = Moments.of(x, y)
    z = (x[:, :3] - x[:, :3].mean(0)) / x[:, :3].std(0)
    for penalty, head in zip(PENALTIES, fit(rows), strict=True):
        w = np.linalg.solve(z.T @ z / 50 + penalty * np.eye(3), z.T @ (y - y.mean()) / 50)
        expected = y.mean() + z @ w
        np.testing.assert_allclose(x @ head.weight + head.bias, expected, atol=1e-8)
        assert head.weight[3] == 0.0
        assert head.squared_error(rows) == pytest.approx(((y - expected) ** 2).sum())


# ── A real run ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_hidden_states_give_the_models_own_log_probs(trained: Path) -> None:
    """Pictures, prompts and tokens are read as the trainer read them: the head says log π_old."""
    run = read_run(trained)
    policy = load_policy(run, run.checkpoints[0])  # it drew the second recorded step's responses
    off = []
    for step in read_steps(run)[:2]:
        rows = range(step.num_responses)
        prompts = [policy.encode(prompt_of(step.rows[row], run.path)) for row in rows]
        assert all(x.vision for x in prompts)
        tokens = [step.token[step.owner == row] for row in rows]
        states = list(hidden_states(policy, prompts, tokens))
        assert [len(x) for x in states] == [len(x) for x in tokens]
        with torch.no_grad():
            logits = policy.model.get_output_embeddings()(torch.from_numpy(np.concatenate(states)))
        assert policy.banned is not None
        logp = logits.masked_fill(policy.banned, -torch.inf).log_softmax(-1)
        mine = logp.gather(1, torch.from_numpy(step.token)[:, None])[:, 0]
        off.append(np.abs(mine.numpy() - step.logp_old).max())
    assert off[1] < 1e-4 < 0.05 < off[0], "an update lies between the two"


def test_the_probe_of_a_run(trained: Path) -> None:
    found = analyze_runs(
        [read_run(trained)], AnalysisSettings(resamples=20, probe=True), ["lift_probe"]
    )
    assert not found.skipped
    (analysis,) = found.done
    told = analysis.numbers["probe"]
    assert told["checkpoint"] == "step-000005"
    assert told["responses"] == 32
    assert told["hidden_size"] == 32
    assert -1 < told["r_squared"] < 1
    assert {*told["r_squared_by_stage"]} == {"early", "middle", "late"}
    assert "other prompts" in analysis.note
    assert ("has no meaning" in analysis.note) == (told["r_squared"] <= 0)
    assert f"R² = {told['r_squared']:.2f}" in analysis.title


class PlantedPolicy:
    """A trunk whose first number is what the response will earn, and noise beside it."""

    class Model:
        class config:  # noqa: N801
            @staticmethod
            def get_text_config() -> Any:
                return type("Text", (), {"hidden_size": 6})

    model = Model()

    def encode(self, prompt: Any) -> Encoded:
        return Encoded(prompt, torch.zeros(3, dtype=torch.long), torch.zeros(1, 3).long())


def test_steps_get_the_probes_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """V is near the reward where the states say it, NaN where a response could not be read."""
    made = some_rollouts(4, responses=30)
    for rows in made.values():
        for number, row in enumerate(rows):
            row["messages"] = [{"role": "user", "content": "?"}]
            row["prompt_id"] = f"p{number}"
    made[12][3]["reward"] = float("nan")
    made[13][4]["tokens"][1] = -7
    run = read_run(write_run(tmp_path, rollouts=made))
    steps = read_steps(run)
    rewards = iter([r for x in steps for r in x.reward[np.isfinite(x.reward)].tolist()])
    bad = int(np.isfinite(steps[0].reward).sum() + np.isfinite(steps[1].reward).sum()) + 4
    order = [r for n, r in enumerate(rewards) if n != bad]
    left = iter(order)
    rng = np.random.default_rng(0)

    def planted(policy: Any, prompts: Any, responses: Any) -> Any:
        for tokens in responses:
            states = rng.normal(size=(len(tokens), 6)).astype(np.float32)
            states[:, 0] = next(left) + 0.1 * states[:, 1]
            yield states

    monkeypatch.setattr("segcredit_lab.analysis.probe.hidden_states", planted)
    found = probe(run, steps, AnalysisSettings(), PlantedPolicy())
    assert found.responses == 4 * 30 - 2
    assert found.r_squared > 0.95
    for number, step in enumerate(found.steps):
        known = np.isfinite(step.value)
        expected = np.ones(30, bool)
        expected[{1: [3], 2: [4]}.get(number, [])] = False
        assert (known == expected[step.owner]).all()
        assert np.abs(step.value - step.reward[step.owner])[known].max() < 0.3


def test_few_responses_of_every_step_if_not_all_fit(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("segcredit_lab.analysis.probe.MOST_BYTES", 32 * 4 * 110)
    run = read_run(trained)
    steps = read_steps(run)
    policy = load_policy(run, run.checkpoints[-1])
    found = probe(run, steps, AnalysisSettings(), policy)
    used = [len({*step.owner[np.isfinite(step.value)]}) for step in found.steps]
    assert len({*used}) == 1
    assert 1 <= used[0] < 8


def test_neighbors_go_through_the_model_together() -> None:
    parts = list(_parts([100] * 6, [10, 10, 4000, 10, 10, 20_000]))
    assert [range(6)[part] for part in parts] == [range(3), range(3, 5), range(5, 6)]
    assert list(_parts([], [])) == []


# ── Runs without what it takes ───────────────────────────────────────────────────────────────────


def without_messages(run: Path) -> None:
    change_rows(run, lambda row: row.pop("messages"))


def without_a_picture(run: Path) -> None:
    change_rows(run, lambda row: row.update(images=["images/gone.png"]))


def pictures_elsewhere(run: Path) -> None:
    shutil.copytree(run / "images", run.parent / "images")
    name = next((run / "images").iterdir()).name
    (run.parent / "images" / name).rename(run.parent / "outside.png")
    change_rows(run, lambda row: row.update(images=["../outside.png"]))


def equal_rewards(run: Path) -> None:
    change_rows(run, lambda row: row.update(reward=0.5))


def one_prompt(run: Path) -> None:
    change_rows(run, lambda row: row.update(prompt_id="p"))


def broken_messages(run: Path) -> None:
    change_rows(run, lambda row: row.update(messages=["?"]))


def without_checkpoints(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")


def change_rows(run: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    for path in (run / "rollouts").iterdir():
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for row in rows:
            change(row)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (without_messages, OLDER),
        (without_a_picture, "the image 'images/gone.png' is not in the run directory."),
        (pictures_elsewhere, "the image '../outside.png' is not in the run directory."),
        (equal_rewards, "all recorded rewards are equal, so there is nothing to predict."),
        (one_prompt, "its usable responses belong to fewer than 2 different prompts."),
        (broken_messages, "a recorded message is not an object with role and content."),
        (without_checkpoints, "it has no complete checkpoint yet."),
    ],
)
def test_one_sentence_says_what_is_missing(
    trained: Path, tmp_path: Path, damage: Callable[[Path], None], reason: str
) -> None:
    copy = shutil.copytree(trained, tmp_path / "run")
    damage(copy)
    found = analyze_runs(
        [read_run(copy)], AnalysisSettings(resamples=5, probe=True), ["lift_probe"]
    )
    assert not found.done
    assert found.skipped[0].reason == reason


def test_a_damaged_checkpoint_is_refused(trained: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(trained, tmp_path / "run")
    last = read_run(copy).checkpoints[-1]
    weights = last / "policy" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.warns(UserWarning, match=rf"checkpoint {last.name} is refused: .* is truncated"):
        (done,) = analyze_runs([read_run(copy)], AnalysisSettings(resamples=5), ["lift_probe"]).done
    assert done.numbers["probe"]["checkpoint"] != last.name


def test_a_checkpoint_without_a_model_does_not_load(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(CannotAnalyzeError, match="its checkpoint empty does not load: "):
        load_policy(read_run(trained), tmp_path / "empty")
