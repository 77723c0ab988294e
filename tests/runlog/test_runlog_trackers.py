"""TensorBoard for real; wandb, trackio and mlflow through stand-ins of their interfaces."""

import json
import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from segcredit.runlog.folder import RunFolder
from segcredit.runlog.records import MetricsWriter
from segcredit.runlog.trackers import open_trackers


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    (tmp_path / "run").mkdir()
    return RunFolder(tmp_path / "run")


def curve(folder: RunFolder, tag: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(folder.tensorboard))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_tensorboard_curves_do_not_double_on_resume(folder: RunFolder) -> None:
    with MetricsWriter(folder.metrics, open_trackers(["tensorboard"], folder, {})) as writer:
        for step in range(6):
            writer.write(step, "train", {"reward": step})
            if step == 2:
                position = writer.position()
    resumed = open_trackers(["tensorboard"], folder, {}, first_step=3)
    with MetricsWriter(folder.metrics, resumed) as writer:
        writer.truncate(position)
        for step in range(3, 5):
            writer.write(step, "train", {"reward": 10 * step})
    assert curve(folder, "train/reward") == [(0, 0), (1, 1), (2, 2), (3, 30), (4, 40)]


def test_tensorboard_shows_steps_of_a_run_that_is_killed(folder: RunFolder) -> None:
    writer = MetricsWriter(folder.metrics, open_trackers(["tensorboard"], folder, {}))
    writer.write(0, "train", {"loss": 0.5, "odd": math.nan})
    assert curve(folder, "train/loss") == [(0, 0.5)]  # before anything was closed
    writer.close()


def test_unknown_names_are_answered_with_the_nearest(folder: RunFolder) -> None:
    with pytest.raises(ValueError, match=r"got 'tensorbord'. Did you mean 'tensorboard'\?"):
        open_trackers(["tensorbord"], folder, {})


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio", "mlflow"])
def test_what_is_not_installed_says_what_to_type(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match=f"Type: pip install {name}"):
        open_trackers([name], folder, {})
    assert not list(folder.path.iterdir()), "nothing was started"


class Fake(ModuleType):
    """Stands for wandb, trackio or mlflow: every call is written down."""

    def __init__(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(name)
        self.calls: list[tuple[str, tuple, dict]] = []
        monkeypatch.setitem(sys.modules, name, self)

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args, **kwargs):
            self.calls.append((name, args, kwargs))
            if name == "start_run":
                return SimpleNamespace(info=SimpleNamespace(run_id="mlflow-7"))
            return self

        return call

    def named(self, name: str) -> list[tuple[tuple, dict]]:
        return [(args, kwargs) for called, args, kwargs in self.calls if called == name]


def one_step(folder: RunFolder, name: str, step: int) -> None:
    opened = open_trackers([name], folder, {"seed": 1}, first_step=step or None)
    with MetricsWriter(folder.metrics, opened) as writer:
        writer.write(step, "train", {"x": 0.5})


def test_wandb_goes_on_with_the_same_run(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = Fake("wandb", monkeypatch)
    one_step(folder, "wandb", 0)
    one_step(folder, "wandb", 1)
    first, second = (kwargs for _, kwargs in wandb.named("init"))
    assert first == second
    assert first["resume"] == "allow"
    assert first["config"] == {"seed": 1}
    assert json.loads(folder.trackers.read_text()) == {"wandb": first["id"]}
    assert wandb.named("log")[1] == (({"train/x": 0.5},), {"step": 1})
    assert len(wandb.named("finish")) == 2


def test_trackio_goes_on_by_name(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    trackio = Fake("trackio", monkeypatch)
    one_step(folder, "trackio", 0)
    ((_, begun),) = trackio.named("init")
    assert (begun["name"], begun["resume"]) == ("run", "allow")
    assert trackio.named("log") == [(({"train/x": 0.5},), {"step": 0})]
    assert trackio.named("finish")


def test_mlflow_goes_on_with_the_run_it_named(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = Fake("mlflow", monkeypatch)
    one_step(folder, "mlflow", 0)
    one_step(folder, "mlflow", 1)
    assert [kwargs for _, kwargs in mlflow.named("start_run")] == [
        {"run_name": "run"},
        {"run_id": "mlflow-7"},
    ]
    assert mlflow.named("log_metrics")[1] == (({"train/x": 0.5},), {"step": 1})
    assert len(mlflow.named("log_dict")) == 1


def test_mlflow_is_told_names_that_it_takes(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Letters, digits, and _ - . : / and spaces; one other sign, and all of the step is lost."""
    mlflow = Fake("mlflow", monkeypatch)
    names = ["evaluation/pass@16", "time/a-b.c: d", "weight|λ"]
    with MetricsWriter(folder.metrics, open_trackers(["mlflow"], folder, {})) as writer:
        writer.write(0, "x", dict.fromkeys(names, 0.5))
    ((told,), _) = mlflow.named("log_metrics")[0]
    assert [*told] == ["x/evaluation/pass_at_16", "x/time/a-b.c: d", "x/weight__"]


def test_one_that_cannot_start_costs_a_warning(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init(**_: object) -> None:
        raise ConnectionError("not logged in")

    monkeypatch.setattr(Fake("wandb", monkeypatch), "init", init, raising=False)
    with pytest.warns(UserWarning, match="wandb did not start: ConnectionError: not logged in"):
        opened = open_trackers(["wandb", "tensorboard"], folder, {})
    assert len(opened) == 1
    opened[0].close()
