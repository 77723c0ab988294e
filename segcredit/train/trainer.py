"""The Python API: ``Trainer(model=…, algorithm=…, reward=…, data=…).train()``."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from segcredit import __version__
from segcredit.config import GIVEN_IN_PYTHON, VERSION, Recipe, RecipeError, parse_recipe
from segcredit.registry import keep_written
from segcredit.rewards import make_reward
from segcredit.runlog import (
    MetricsWriter,
    Run,
    RunFolder,
    describe_environment,
    new_run_path,
    open_trackers,
    read_run,
)
from segcredit.runlog.environment import environment_changes
from segcredit.runlog.files import write_json_atomically, write_yaml_atomically
from segcredit.runlog.folder import POLICY
from segcredit.runlog.records import lines_after
from segcredit.train import checkpoint
from segcredit.train.build import RunPlan, build, make_plan
from segcredit.train.distributed import Parallel
from segcredit.train.loop import Loop, Observer, Silent
from segcredit.train.models import load_saved_policy
from segcredit.train.progress import PythonProgress, result_table
from segcredit.train.saving import (
    changed_settings,
    find_resumable,
    require_checked_template,
    restore,
    roll_back,
)
from segcredit.train.state import State
from segcredit.types import Algorithm, RewardFn


@dataclass(frozen=True)
class Result:
    """Result of a finished run: its folder, the trained model and held-out scores."""

    folder: Path | None
    """The run directory."""
    model: Path | None
    """The trained policy, a plain Hugging Face folder."""
    before: dict[str, float]
    """Held-out ``reward`` and ``greedy_reward`` before reinforcement learning, and the accuracies
    ``sampled`` and ``greedy`` where the reward says what is correct."""
    after: dict[str, float]

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One dictionary per line of metrics.jsonl; ``pandas.DataFrame(result.metrics)`` works."""
        return self._run().metrics

    def history(self, name: str, stage: str | None = None) -> list[float]:
        """Return the values of one metric in the order of the steps, for one stage or all."""
        return self._run().series(name, stage)[1]

    def _run(self) -> Run:
        if self.folder is None:
            raise ValueError(
                "metrics: expected the result of rank 0, which writes the run directory; got the "
                "result of another rank. Read it there, or with segcredit.runlog.read_run(RUN)"
            )
        return read_run(self.folder)


class Trainer:
    """Trains one model with one method.

    All settings are validated when the trainer is created, before any model is loaded.

    Args:
        model: Folder or hub id of the model, or settings such as ``{"path": …, "dtype": …}``.
        data: Training data: files, rows, a ``datasets.Dataset``, a data frame, or settings such as
            ``{"train": …, "suffix": …}``.
        algorithm: Name of a method, a name with settings, or an ``Algorithm`` object.
        reward: Name of a reward, a name with settings, a function, a ``RewardFn``, or a list of
            these, which is a weighted sum.
        reward_weights: Weight of each reward of a list. None: the ``weight`` of its settings, or 1.
        test: Held-out data: files or rows.
        steps: Number of optimization steps.
        settings: Other sections of a recipe, such as ``rollout={"prompts": 64}``.
    """

    def __init__(
        self,
        model: str | Path | dict[str, Any],
        data: str | Path | Iterable[Any] | dict[str, Any],
        algorithm: str | dict[str, Any] | Algorithm = "sapo",
        reward: str | dict[str, Any] | list[Any] | Callable[..., Any] | RewardFn = "math",
        test: str | Path | Iterable[Any] | None = None,
        steps: int = 100,
        reward_weights: Sequence[float] | None = None,
        **settings: Any,
    ) -> None:
        found: dict[str, Any] = {"stages": [{"kind": "optimize", "steps": steps}], **settings}
        objects: dict[str, Any] = {}
        found["model"] = _model(model)
        found["data"] = _data(data, test, objects)
        if isinstance(algorithm, str | dict):
            found["algorithm"] = algorithm
        else:
            objects["algorithm"] = algorithm
        try:
            reward = _with_weights(reward, reward_weights)
        except (TypeError, ValueError) as error:
            raise RecipeError(f"reward: {error}") from None
        if isinstance(reward, str | dict) or _all_named(reward):
            found["reward"] = reward
        else:
            objects["reward"] = reward
        self._objects = objects
        self.plan = make_plan(parse_recipe(found, "Trainer", objects.get("algorithm")), **objects)

    @classmethod
    def from_recipe(
        cls, recipe: Recipe, progress: Callable[[int], None] | None = None
    ) -> "Trainer":
        """Make a trainer from a recipe; ``progress`` is called with the number of checked rows."""
        trainer = cls.__new__(cls)
        trainer._objects = {}
        trainer.plan = make_plan(recipe, progress=progress)
        return trainer

    @property
    def recipe(self) -> Recipe:
        return self.plan.recipe

    def train(
        self,
        folder: str | Path | None = None,
        resume: bool = False,
        watch: Observer | None = None,
        progress: bool = True,
    ) -> Result:
        """Run all stages; with ``resume``, continue the run in ``folder``.

        Args:
            folder: Run directory; by default a new one under runs/.
            resume: Continue from the last checkpoint in ``folder``.
            watch: Receives progress, such as a progress bar; by default progress and metrics
                are printed.
            progress: False prints nothing; ignored if ``watch`` is given.
        """
        parallel = Parallel.start()
        shown = progress and watch is None and parallel.first
        if watch is None:
            watch = PythonProgress() if shown else Silent()
        try:
            result = self._train(folder, resume, watch, parallel)
        finally:
            watch.end()
            self.plan.reward.close()
            parallel.close()
        if isinstance(watch, PythonProgress):
            if (table := result_table(result)) is not None:
                watch.console.print(table)
            for name, path in (("run", result.folder), ("model", result.model)):
                watch.console.print(f"{name:<6}  {path}", markup=False, highlight=False)
        return result

    def _train(
        self, folder: str | Path | None, resume: bool, watch: Observer, parallel: Parallel
    ) -> Result:
        if resume and folder is None:
            raise ValueError("resume needs the run's directory: train(folder=…, resume=True)")
        if not parallel.first:
            earlier = RunFolder(folder) if resume and folder is not None else None
            state, _ = self._state(earlier, parallel, Silent())
            parallel.wait()
            return self._loop(None, None, state, Silent())
        path = Path(folder) if folder is not None else new_run_path(self.recipe.name)
        with RunFolder.open(path) if resume else RunFolder.create(path) as run:
            if not resume:  # first, because a run can be resumed only if it has a config.yaml
                write_yaml_atomically(run.config, self._record())
                write_json_atomically(run.environment, describe_environment())
                checkpoint.mark_unsaved(run.checkpoints)
            state, position = self._state(run if resume else None, parallel, watch)
            parallel.wait()  # change nothing on disk before all ranks have read it
            aside = self._roll_back(run, state, position, watch) if resume else None
            names = ["tensorboard", *self.recipe.save.trackers]
            first = state.step + 1 if resume else None
            trackers = open_trackers(names, run, self.recipe.as_dict(), first)
            with MetricsWriter(run.metrics, trackers) as metrics:
                if resume:
                    metrics.truncate(position)
                watch.begin(self.recipe, state.step, _facts(self.plan, run, state, aside))
                return self._loop(run, metrics, state, watch)

    def _state(
        self, run: RunFolder | None, parallel: Parallel, watch: Observer
    ) -> tuple[State, int]:
        """Build a new state, or restore the last complete checkpoint and its metrics position."""
        if run is None:
            return build(self.plan, parallel=parallel), 0
        # verifying hashes takes time, and all ranks must resume from the same checkpoint
        found = checkpoint.LatestCheckpoint(None, [])
        problem = None
        if parallel.first:
            try:
                found = find_resumable(run)
            except checkpoint.CheckpointError as error:
                problem = str(error)
        found, problem = parallel.share((found, problem))
        if problem is not None:
            raise checkpoint.CheckpointError(problem)
        if parallel.first:
            for message in found.refused:
                watch.note(message)
        if found.path is None:
            return build(self.plan, parallel=parallel), 0
        # LoRA resumes from the base weights and the adapters, not from the merged policy
        with_lora = self.recipe.model.lora is not None
        policy = None if with_lora else load_saved_policy(self.recipe, found.path / POLICY)
        if policy is not None and self.recipe.data.template is None:
            require_checked_template(policy.codec, self.plan.codec, found.path / POLICY)
        state = build(self.plan, policy, parallel)
        return state, restore(state, run, found.path)

    def _loop(
        self, run: RunFolder | None, metrics: MetricsWriter | None, state: State, watch: Observer
    ) -> Result:
        try:
            Loop(state, run, metrics, watch).run()
        finally:
            state.engine.close()
        kept = checkpoint.find_latest(run.checkpoints).path if run is not None else None
        return Result(
            folder=None if run is None else run.path,
            model=None if kept is None else kept / POLICY,
            before=_held_out_results(state, "before"),
            after=_held_out_results(state, "after"),
        )

    def _record(self) -> dict[str, Any]:
        """Return the content of config.yaml."""
        return {VERSION: __version__} | self.recipe.as_dict() | self._given()

    def _roll_back(
        self, run: RunFolder, state: State, position: int, watch: Observer
    ) -> Path | None:
        """Bring the run directory to the resumed step; call only after all checks have passed."""
        lines_after(run.metrics, position)
        if not state.step:
            checkpoint.mark_unsaved(run.checkpoints)
        changed = changed_settings(run, self.recipe)
        if changed:
            watch.note(f"Settings changed from this step on: {', '.join(changed)}")
            written = read_run(run.path).config
            write_yaml_atomically(run.config, keep_written(self._record(), written, run.path))
        self._note_environment(run, state, watch)
        return roll_back(state, run, position)

    def _note_environment(self, run: RunFolder, state: State, watch: Observer) -> None:
        """Report and record changes of the environment since the run was last started."""
        known, now = read_run(run.path).environment, describe_environment()
        earlier = known.get("resumed", [])
        changes = environment_changes(earlier[-1] if earlier else known, now)
        if changes:
            watch.note(
                f"This run is resumed in another environment: {', '.join(changes)}. Numbers may "
                f"differ from those of an uninterrupted run; environment.json has both."
            )
        if changes or not known:
            resumed = {"resumed": [*earlier, {"step": state.step, **now}]} if known else now
            write_json_atomically(run.environment, known | resumed)

    def _given(self) -> dict[str, Any]:
        """Describe the settings that were passed as Python objects instead of by name."""
        shown = {
            name: "rows" if name in {"train", "test"} else getattr(x, "__qualname__", repr(x)[:500])
            for name, x in self._objects.items()
        }
        return {GIVEN_IN_PYTHON: shown} if shown else {}


def _all_named(reward: object) -> bool:
    """Whether a list of rewards has no Python object, so that config.yaml can hold it."""
    return isinstance(reward, list) and all(isinstance(x, str | dict) for x in reward)


def _with_weights(reward: Any, weights: Sequence[float] | None) -> Any:
    """Write the weights into a list of named rewards; a list with objects becomes a reward."""
    if not isinstance(reward, list | tuple):
        return reward if weights is None else make_reward(reward, weights)
    if not _all_named(list(reward)):
        return make_reward(reward, weights)
    if weights is None:
        return list(reward)
    make_reward(reward, weights)  # the checks of both together
    named = [x if isinstance(x, dict) else {"name": x} for x in reward]
    return [x | {"weight": weight} for x, weight in zip(named, weights, strict=True)]


def _model(model: str | Path | dict[str, Any]) -> dict[str, Any]:
    """Convert ``model`` to settings; refuse a loaded model, because resuming needs a folder."""
    if isinstance(model, dict):
        return model
    if isinstance(model, str | Path):
        return {"path": str(model)}
    raise TypeError(
        f"model: expected a folder, a hub id, or settings such as {{'path': …, 'dtype': …}}; got a "
        f"{type(model).__name__}. Save a loaded model with its tokenizer and pass the folder: "
        f"model.save_pretrained('my-model'); tokenizer.save_pretrained('my-model'); "
        f"Trainer(model='my-model', …)"
    )


def _data(
    data: str | Path | Iterable[Any] | dict[str, Any],
    test: str | Path | Iterable[Any] | None,
    objects: dict[str, Any],
) -> dict[str, Any]:
    """Convert ``data`` to settings; rows given in Python go to ``objects``."""
    if isinstance(data, dict) and test is not None:
        raise RecipeError("give test inside data, as data={'train': …, 'test': …}")
    found = dict(data) if isinstance(data, dict) else {"train": data, "test": test}
    for name in ("train", "test"):
        source = found.pop(name, None)
        if source is None:
            continue
        some = [source] if isinstance(source, str | Path) else _rows(name, source)
        if some and all(isinstance(x, str | Path) for x in some):
            found[name] = [str(x) for x in some]
        else:
            objects[name] = some
            found[name] = [f"{name}: rows given in Python"]
    return found


def _rows(name: str, source: Any) -> list[Any]:
    """Read rows or paths from a list, an iterable, a ``datasets.Dataset`` or a data frame."""
    if hasattr(source, "to_dict") and hasattr(source, "iloc"):  # iterating yields column names
        return list(source.to_dict("records"))
    if isinstance(source, dict | bytes) or not isinstance(source, Iterable):
        raise TypeError(
            f"{name}: expected files, a list of rows, a datasets.Dataset or a data frame; got "
            f"{type(source).__name__}. Type, for example, "
            f"{name}=[{{'problem': '1 + 1', 'answer': '2'}}]"
        )
    return list(source)


def _held_out_results(state: State, when: str) -> dict[str, float]:
    ends = f"_{when}"
    return {k.removesuffix(ends): x for k, x in state.noted.items() if k.endswith(ends)}


def _facts(plan: RunPlan, run: RunFolder, state: State, aside: Path | None) -> dict[str, str]:
    """Return the facts shown when a run starts."""
    model = state.policy.model if state.whole is None else state.whole
    count = sum(x.numel() for x in model.parameters())
    trained = sum(x.numel() for x in state.policy.trained().values())
    own = f", {trained:,} of them trained" if state.policy.lora else ""
    size = plan.train.size
    return {
        "run": str(run.path),
        "model": f"{type(model).__name__}, {count:,} parameters{own}, {_where(state)}",
        "data": f"{size:,} prompts"
        if size
        else f"{plan.world.name if plan.world else 'data'}, generated",
        "method": str(plan.recipe.algorithm),
        **({} if aside is None else {"moved": f"everything after step {state.step} to {aside}"}),
    }


def _where(state: State) -> str:
    sharded = f", sharded over {state.parallel.size} processes" if state.shards else ""
    return f"{state.policy.device}{sharded}"
