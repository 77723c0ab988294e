"""Callbacks: when hooks are called, how they stop a run, what becomes of one that fails."""

import math
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny_runs import assert_same_run, metrics, write_recipe

from segcredit import Callback
from segcredit.config import load_recipe
from segcredit.train.callbacks import CallbackError
from segcredit.train.checkpoint import find_latest
from segcredit.train.loop import StopTraining
from segcredit.train.trainer import Result, Trainer

SHORT: dict[str, Any] = {
    "stages": [
        {"kind": "warm_start", "steps": 2, "batch": 4},
        {"kind": "optimize", "steps": 4},
    ],
    "save__every": 2,
}


class Recorder(Callback):
    """Notes the events of a run."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.metrics: list[dict[str, float]] = []

    def on_train_begin(self, folder: Path, step: int) -> None:
        self.events.append(("begin", folder.name, step))

    def on_step_end(self, step: int, metrics: dict[str, float]) -> None:
        self.events.append(("step", step))
        self.metrics.append(dict(metrics))
        metrics.clear()  # which must not reach metrics.jsonl or other callbacks

    def on_evaluate(self, step: int, metrics: dict[str, float]) -> None:
        assert math.isfinite(metrics["reward"])
        self.events.append(("evaluate", step))

    def on_save(self, step: int, path: Path) -> None:
        assert (path / "policy" / "config.json").is_file()
        self.events.append(("save", step))

    def on_train_end(self, result: Result) -> None:
        self.events.append(("end", result.stopped))


def trainer(folder: Path, *callbacks: Callback, **changes: Any) -> Trainer:
    recipe = load_recipe(str(write_recipe(folder, **SHORT | changes)))
    return Trainer.from_recipe(recipe, callbacks=callbacks)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[Any, ...]]]:
    folder, seen = tmp_path_factory.mktemp("whole"), Recorder()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        trainer(folder, seen).train(folder / "run", progress=False)
    optimized = [x["nll"] for x in metrics(folder / "run") if x["stage"] == "warm_start"]
    assert [x["nll"] for x in seen.metrics if "nll" in x] == optimized
    return folder / "run", seen.events


def test_hooks_are_called_in_the_order_of_the_run(
    whole: tuple[Path, list[tuple[Any, ...]]],
) -> None:
    assert whole[1] == [
        ("begin", "run", 0),
        *[("step", 1), ("step", 2), ("save", 2)],
        *[("evaluate", 2), ("step", 3), ("step", 4), ("evaluate", 4), ("save", 4)],
        *[("step", 5), ("step", 6), ("evaluate", 6), ("save", 6), ("end", None)],
    ]


class StopsAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, step: int, metrics: dict[str, float]) -> None:
        if step == self.step:
            self.stop(f"step {step} is enough")


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 2, 5])
def test_a_stopped_run_returns_is_saved_and_resumes_to_the_same_run(
    tmp_path: Path,
    whole: tuple[Path, list[tuple[Any, ...]]],
    monkeypatch: pytest.MonkeyPatch,
    step: int,
) -> None:
    monkeypatch.chdir(tmp_path)
    seen, folder = Recorder(), tmp_path / "run"
    result = trainer(tmp_path, StopsAt(step), seen).train(folder, progress=False)
    assert result.stopped == f"step {step} is enough"
    assert result.model == folder / f"checkpoints/step-{step:06d}/policy"
    assert seen.events[-2:] == [("save", step), ("end", result.stopped)]
    assert result.after == {}
    again = trainer(tmp_path, StopsAt(step), seen).train(folder, resume=True, progress=False)
    assert again.stopped is None
    assert ("begin", "run", step) in seen.events
    ours, theirs = (find_latest(x / "checkpoints").path for x in (folder, whole[0]))
    assert ours is not None
    assert theirs is not None
    for place in (folder, whole[0]):  # other checkpoints were kept on the way
        keep_only_the_last(place)
    assert_same_run(folder, whole[0])


def keep_only_the_last(run: Path) -> None:
    for old in sorted((run / "checkpoints").glob("step-*"))[:-1]:
        shutil.rmtree(old)
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["reward"] = Path(config["reward"]).name  # resuming may find it in another folder
    (run / "config.yaml").write_text(yaml.safe_dump(config))


@pytest.mark.slow
def test_stopping_in_the_last_step_is_the_end_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = trainer(tmp_path, StopsAt(6)).train(tmp_path / "run", progress=False)
    assert result.stopped is None
    assert result.after


class Fails(Callback):
    def __init__(self, hook: str, step: int | None) -> None:
        self.hook, self.step = hook, step

    def _maybe(self, hook: str, step: int | None) -> None:
        if (hook, step) == (self.hook, self.step):
            raise KeyError("my_metric")

    def on_train_begin(self, folder: Path, step: int) -> None:
        self._maybe("on_train_begin", step)

    def on_step_end(self, step: int, metrics: dict[str, float]) -> None:
        self._maybe("on_step_end", step)

    def on_evaluate(self, step: int, metrics: dict[str, float]) -> None:
        self._maybe("on_evaluate", step)

    def on_save(self, step: int, path: Path) -> None:
        self._maybe("on_save", step)

    def on_train_end(self, result: Result) -> None:
        self._maybe("on_train_end", None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hook", "step", "saved", "message"),
    [
        ("on_train_begin", 0, None, "before the first step: KeyError: 'my_metric'. Nothing was"),
        ("on_step_end", 3, 3, "after step 3: KeyError: 'my_metric'. The run is saved; correct"),
        ("on_evaluate", 2, 3, "at step 2: KeyError: 'my_metric'. The run is saved; correct the"),
        ("on_save", 4, 4, "at step 4: KeyError: 'my_metric'. The run is saved; correct the cal"),
        ("on_evaluate", 6, 6, "at step 6: KeyError: 'my_metric'. The run is complete: "),
        ("on_train_end", None, 6, "after the run: KeyError: 'my_metric'. The run is complete: "),
    ],
)
def test_a_callback_that_fails_is_named_and_the_run_is_saved(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    hook: str,
    step: int | None,
    saved: int | None,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    seen = Recorder()
    with pytest.raises(CallbackError) as failed:
        trainer(tmp_path, Fails(hook, step), seen).train(tmp_path / "run", progress=False)
    assert str(failed.value).startswith(f"callback Fails failed in {hook} {message}")
    assert isinstance(failed.value.__cause__, KeyError)
    assert ("end", None) not in seen.events, "the hooks of the end are for runs that ended well"
    last = find_latest(tmp_path / "run" / "checkpoints").path
    assert (None if last is None else last.name) == (saved and f"step-{saved:06d}")
    result = trainer(tmp_path).train(tmp_path / "run", resume=True, progress=False)
    assert result.after
    steps = [x for x in metrics(tmp_path / "run") if x["stage"] not in ("evaluation", "warning")]
    assert [x["step"] for x in steps] == [*range(1, 7)]


def test_a_signal_is_stronger_than_a_callback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C still raises StopTraining, with the command that resumes the run."""

    class Presses(StopsAt):
        def on_step_end(self, step: int, metrics: dict[str, float]) -> None:
            super().on_step_end(step, metrics)
            if step == self.step:
                signal.raise_signal(signal.SIGINT)

    monkeypatch.chdir(tmp_path)
    with pytest.raises(StopTraining, match=r"^stopped after step 3, which is saved\. To resume:"):
        trainer(tmp_path, Presses(3)).train(tmp_path / "run", progress=False)


SCRIPT = """
import os, sys
sys.path[:0] = {paths!r}
from tiny_policies import fresh_policy, world
from segcredit import Callback, Trainer

rank = int(os.environ["RANK"])


class Watches(Callback):
    def on_step_end(self, step, metrics):
        assert rank == 0, "callbacks run on rank 0"
        if step == 2:
            self.stop("two are enough")
        if step == 3:
            raise ValueError("three are too many")


policy = fresh_policy("qwen2")
rows = [{{"problem": x.messages[0]["content"], "answer": x.answer}}
        for x in world("qwen2").prompts("train", 0, 6)]


trainer = Trainer(policy.model, rows, reward="exact", steps=5, tokenizer=policy.codec.tokenizer,
    rollout={{"prompts": 4, "max_tokens": 6}}, update={{"minibatches": 1}}, threads=1,
    memory={{"shard": True}}, callbacks=[Watches()])
result = trainer.train("run", progress=False, resume="resume" in sys.argv)
print(rank, result.stopped, result.folder is None, result.report is None, flush=True)
"""


def two_ranks(folder: Path, *arguments: str) -> list[tuple[str, str]]:
    """What each of two processes, started as torchrun starts them, prints and complains of."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(
            [sys.executable, "script.py", *arguments],
            cwd=folder,
            env={**os.environ, **shared, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        return [x.communicate(timeout=100) for x in ranks]
    finally:
        for x in ranks:
            x.kill()


@pytest.mark.slow
def test_all_ranks_stop_together_and_one_model_is_saved(tmp_path: Path) -> None:
    paths = [str(Path(__file__).parents[1])]
    (tmp_path / "script.py").write_text(SCRIPT.format(paths=paths))
    (out, err), (other, other_err) = two_ranks(tmp_path)
    assert out == "0 two are enough False False\n", err
    assert other == "1 two are enough True True\n", other_err
    assert (tmp_path / "run" / "checkpoints" / "initial" / "model.safetensors").is_file()
    (out, err), (other, other_err) = two_ranks(tmp_path, "resume")
    failure = "callback Watches failed in on_step_end after step 3: ValueError: three are too many"
    assert out == ""
    assert (
        f"segcredit.train.callbacks.CallbackError: {failure}. The run is saved; correct the"
        in err.splitlines()[-1]
    )
    assert other == f"1 {failure} True True\n", other_err
    last = find_latest(tmp_path / "run" / "checkpoints").path
    assert last is not None
    assert last.name == "step-000003"
