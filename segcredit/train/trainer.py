"""The Python API: ``Trainer(model=…, algorithm=…, reward=…, data=…).train()``."""

import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from segcredit import __version__
from segcredit.config import GIVEN_IN_PYTHON, VERSION, Recipe, RecipeError, parse_recipe
from segcredit.models.loading import without_progress_bars
from segcredit.printable import change_texts, stage_title_and_key, without_addresses
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
from segcredit.runlog.folder import INITIAL, POLICY, exists, resume_call, step_name
from segcredit.runlog.reader import read_best, within_noise
from segcredit.runlog.records import lines_after
from segcredit.train import best, checkpoint
from segcredit.train.arguments import (
    LoadedModel,
    check_algorithm,
    check_folder,
    check_plain,
    check_reward,
    check_switch,
    data_settings,
    model_settings,
    stages_of_steps,
)
from segcredit.train.build import RunPlan, build, make_plan
from segcredit.train.callbacks import Callback, CallbackObserver, check_callbacks
from segcredit.train.distributed import Parallel
from segcredit.train.loop import Loop, Observer, Silent, StoppedByObserver
from segcredit.train.models import load_saved_policy
from segcredit.train.progress import (
    MetricsTable,
    PythonProgress,
    python_progress,
    result_page,
)
from segcredit.train.saving import (
    changed_settings,
    find_resumable,
    require_checked_template,
    restore,
    roll_back,
)
from segcredit.train.state import State
from segcredit.types import Algorithm, RewardFn

Kind = TypeVar("Kind", bound="Trainer")

FEW_PARAMETERS = 5_000_000
"""Below this number of parameters, more than one CPU thread is usually slower."""

SHOWN_STAGES = 8
"""Maximum number of stages that are listed when a run starts."""


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
    stopped: str | None = None
    """Why a callback stopped the run before its last step; None: it did not."""
    report: Path | None = None
    """The report page, if it was written."""
    best: Path | None = None
    """The policy with the best held-out result, if ``save.best`` is set."""
    prompts: int | None = None
    """Number of held-out prompts of the last evaluation, if known."""
    noise: tuple[str, ...] = ()
    """Results whose change is within noise: its 95 % interval contains 0."""

    def __repr__(self) -> str:
        parts = [] if self.folder is None else [f"folder={str(self.folder)!r}"]
        for key in ("sampled", "greedy", "reward", "greedy_reward"):
            if key in self.before and key in self.after:
                share = key in ("sampled", "greedy")
                before, after, _ = change_texts(self.before[key], self.after[key], share)
                parts.append(f"{key}: {before} → {after}")
        parts += [] if self.stopped is None else [f"stopped={self.stopped!r}"]
        return f"Result({', '.join(parts)})"

    def _repr_html_(self) -> str:
        return result_page(self)

    def paths(self) -> dict[str, Path]:
        """Return the run directory, the report and the policies, those that exist."""
        found = {
            "run": self.folder,
            "report": self.report,
            "model": self.model,
            "best": self.best,
        }
        return {name: path for name, path in found.items() if path is not None}

    @property
    def metrics(self) -> MetricsTable:
        """One dictionary per line of metrics.jsonl, which a notebook shows as a table.

        ``pandas.DataFrame(result.metrics)`` makes a data frame.
        """
        return MetricsTable(self._run().metrics)

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
    """Trains one model with one method; ``segcredit.Trainer`` also writes the report.

    The arguments are those of ``segcredit.Trainer``.
    """

    _loaded: LoadedModel | None = None
    _callbacks: Sequence[Callback] = ()

    def __init__(
        self,
        model: str | Path | PreTrainedModel | dict[str, Any],
        data: str | Path | Iterable[Any] | dict[str, Any],
        algorithm: str | dict[str, Any] | Algorithm = "sapo",
        reward: str | dict[str, Any] | list[Any] | Callable[..., Any] | RewardFn = "math",
        test: str | Path | Iterable[Any] | None = None,
        steps: int | None = None,
        tokenizer: Any = None,
        callbacks: Sequence[Callback] = (),
        reward_weights: Sequence[float] | None = None,
        **settings: Any,
    ) -> None:
        check_algorithm(algorithm)
        check_reward(reward)
        self._callbacks = check_callbacks(callbacks)
        found: dict[str, Any] = {"stages": stages_of_steps(steps, settings), **settings}
        objects: dict[str, Any] = {}
        found["model"], self._loaded = model_settings(model, tokenizer)
        found["data"] = data_settings(data, test, objects)
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
        for name in ("algorithm", "reward"):
            check_plain(name, found.get(name))
        self._objects = objects
        recipe = parse_recipe(found, "Trainer", objects.get("algorithm"))
        self.plan = _plan_with(self._loaded, recipe, objects)

    @classmethod
    def from_recipe(
        cls: type[Kind],
        recipe: Recipe,
        progress: Callable[[int], None] | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> Kind:
        """Make a trainer from a recipe; ``progress`` is called with the number of checked rows."""
        trainer = cls.__new__(cls)
        trainer._objects = {}
        trainer._callbacks = check_callbacks(callbacks)
        trainer.plan = make_plan(recipe, progress=progress)
        return trainer

    def __repr__(self) -> str:
        settings, plan = self.recipe.model, self.plan
        model = settings.path or f"tiny {settings.tiny}"
        if self._loaded is not None:
            model = type(self._loaded.model).__name__
        size = "generated" if plan.train.size is None else f"{plan.train.size:,}"
        method = self.recipe.algorithm
        name = method if isinstance(method, str) else method.get("name", method)
        if "algorithm" in self._objects:
            name = type(self._objects["algorithm"]).__name__
        return (
            f"Trainer(model={model!r}, algorithm={name!r}, prompts={size}, "
            f"steps={self.recipe.total_steps:,})"
        )

    @property
    def recipe(self) -> Recipe:
        """The complete recipe of the run, with all defaults filled in."""
        return self.plan.recipe

    def train(
        self,
        folder: str | Path | None = None,
        resume: bool = False,
        watch: Observer | None = None,
        progress: bool = True,
        finish: Callable[[Result], Result] | None = None,
    ) -> Result:
        """Run all stages; with ``resume``, continue the run in ``folder``.

        Args:
            folder: Run directory; by default a new one under runs/.
            resume: Continue from the last checkpoint in ``folder``.
            watch: Receives progress, such as a progress bar; by default progress and metrics
                are printed.
            progress: False prints nothing; ignored if ``watch`` is given.
            finish: Called with the result on rank 0 before it is printed; returns the result.
        """
        check_folder(folder)
        check_switch("resume", resume)
        check_switch("progress", progress)
        if watch is not None and not isinstance(watch, Observer):
            raise TypeError(
                f"watch: expected an Observer of segcredit.train.loop; got {type(watch).__name__}. "
                f"For your own code at each step, type Trainer(…, callbacks=[…])"
            )
        parallel = Parallel.start()
        shown = progress and watch is None and parallel.first
        if watch is None:
            watch = python_progress() if shown else Silent()
        hooks = CallbackObserver(watch, self._callbacks) if parallel.first else None
        try:
            with without_progress_bars():
                result = self._train(folder, resume, hooks or watch, parallel)
        finally:
            watch.end()
            self.plan.reward.close()
            parallel.close()
        if hooks is None:
            return result
        if hooks.failed is None:
            result = result if finish is None else finish(result)
            if isinstance(watch, PythonProgress):
                watch.show_result(result)
            hooks.ended(result)
        assert result.folder is not None  # rank 0
        again = resume_call(result.folder)
        hooks.raise_failure(
            f"The run is complete: {result.folder}"
            if result.stopped is None
            else f"The run is saved; correct the callback, then resume: {again}"
        )
        return result

    def _train(
        self, folder: str | Path | None, resume: bool, watch: Observer, parallel: Parallel
    ) -> Result:
        if resume and folder is None:
            raise ValueError("resume needs the run's directory: train(folder=…, resume=True)")
        if not parallel.first:
            earlier = RunFolder(folder) if resume and folder is not None else None
            if self._loaded is not None:
                self._train_from(parallel.share(""))
            state, _ = self._state(earlier, parallel, Silent())
            parallel.wait()
            return self._loop(None, None, state, Silent())
        path = Path(folder) if folder is not None else new_run_path(self.recipe.name)
        with RunFolder.open(path) if resume else RunFolder.create(path) as run:
            initial = run.checkpoints / INITIAL
            if self._loaded is not None:
                if resume:
                    _require_initial(run)
                self._train_from(str(initial))
            if not resume:  # first, because a run can be resumed only if it has a config.yaml
                write_yaml_atomically(run.config, self._record())
                write_json_atomically(run.environment, describe_environment())
                checkpoint.mark_unsaved(run.checkpoints)
            if self._loaded is not None:
                if not exists(initial):
                    checkpoint.save_checkpoint(run.checkpoints, INITIAL, self._loaded.save)
                parallel.share(str(initial))
            state, position = self._state(run if resume else None, parallel, watch)
            parallel.wait()  # change nothing on disk before all ranks have read it
            aside = self._roll_back(run, state, position, watch) if resume else None
            state.config = read_run(run.path).config
            names = ["tensorboard", *self.recipe.save.trackers]
            first = state.step + 1 if resume else None
            trackers = open_trackers(names, run, self._record(), first)
            with MetricsWriter(run.metrics, trackers) as metrics:
                if resume:
                    metrics.truncate(position)
                facts = _facts(self.plan, run, state, aside)
                if "algorithm" in self._objects:
                    facts["method"] = repr(self._objects["algorithm"])
                watch.begin(self.recipe, state.step, facts)
                return self._loop(run, metrics, state, watch)

    def _train_from(self, path: str) -> None:
        """Set the run's model to the folder in which a model from memory was saved."""
        recipe = self.recipe
        model = recipe.model.model_copy(update={"path": path})
        self.plan = replace(self.plan, recipe=recipe.model_copy(update={"model": model}))

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
        stopped = None
        try:
            Loop(state, run, metrics, watch).run()
        except StoppedByObserver as stop:
            stopped = stop.reason
        finally:
            state.engine.close()
            if state.lookahead is not None:
                state.lookahead.close()
        before, after = (_held_out_results(state, when) for when in ("before", "after"))
        if run is None:
            return Result(None, None, before, after, stopped)
        kept, found = checkpoint.find_latest(run.checkpoints).path, read_best(run)
        read = read_run(run.path)
        rows = read.evaluations
        return Result(
            folder=run.path,
            model=None if kept is None else kept / POLICY,
            before=before,
            after=after,
            stopped=stopped,
            best=None if found is None else run.checkpoints / step_name(found["step"]) / POLICY,
            prompts=read.held_out_prompts,
            noise=tuple(x for x in after if rows and within_noise(rows[0], rows[-1], x)),
        )

    def _record(self) -> dict[str, Any]:
        """Return the content of config.yaml."""
        return {VERSION: __version__} | self.recipe.as_dict() | self._given()

    def _roll_back(
        self, run: RunFolder, state: State, position: int, watch: Observer
    ) -> Path | None:
        """Roll the run directory back to the resumed step; call only after all checks."""
        lines_after(run.metrics, position)
        read_best(run)
        environment = _compared_environment(run)
        if not state.step:
            checkpoint.mark_unsaved(run.checkpoints)
        changed = {*changed_settings(run, self.recipe), *self._changed_objects(run)}
        if changed:
            watch.note(f"Settings changed from this step on: {', '.join(sorted(changed))}")
            written = read_run(run.path).config
            write_yaml_atomically(run.config, keep_written(self._record(), written, run.path))
        _note_environment(run, state, watch, *environment)
        aside = roll_back(state, run, position)
        best.record(state, run)
        return aside

    def _given(self) -> dict[str, Any]:
        """Describe the settings that were passed as Python objects instead of by name."""
        shown = {
            name: "rows"
            if name in {"train", "test"}
            else getattr(x, "__qualname__", without_addresses(repr(x))[:500])
            for name, x in self._objects.items()
        }
        return {GIVEN_IN_PYTHON: shown} if shown else {}

    def _changed_objects(self, run: RunFolder) -> set[str]:
        """List the settings whose Python object has changed or replaces a name."""
        then = read_run(run.path).config.get(GIVEN_IN_PYTHON)
        then, now = then if isinstance(then, dict) else {}, self._given().get(GIVEN_IN_PYTHON, {})
        names = {x for x in then.keys() | now.keys() if then.get(x) != now.get(x)}
        return {f"data.{x}" if x in {"train", "test"} else x for x in names}


def _compared_environment(run: RunFolder) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Return the recorded environment, the current one, and what changed since the last start."""
    known, now = read_run(run.path).environment, describe_environment()
    try:
        changes = environment_changes([known, *known.get("resumed", [])][-1], now)
    except (AttributeError, KeyError, TypeError):
        raise ValueError(
            f"expected versions of packages in {run.environment}; the file was damaged. Nothing "
            f"was changed. Move it away, then resume; a new one is written."
        ) from None
    return known, now, changes


def _note_environment(
    run: RunFolder,
    state: State,
    watch: Observer,
    known: dict[str, Any],
    now: dict[str, Any],
    changes: Sequence[str],
) -> None:
    """Report and record changes of the environment since the run was last started."""
    if changes:
        watch.note(
            f"This run is resumed in another environment: {', '.join(changes)}. Numbers may "
            f"differ from those of an uninterrupted run; environment.json has both."
        )
    if changes or not known:
        again = {"resumed": [*known.get("resumed", []), {"step": state.step, **now}]}
        write_json_atomically(run.environment, known | again if known else now)


def _all_named(reward: object) -> bool:
    """Whether a list of rewards has no Python object, so that config.yaml can hold it."""
    named = isinstance(reward, list) and all(isinstance(x, str | dict) for x in reward)
    return named and bool(reward)


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


def _plan_with(loaded: LoadedModel | None, recipe: Recipe, objects: dict[str, Any]) -> RunPlan:
    """Run all checks; a model in memory is checked by its configuration and tokenizer."""
    if loaded is None:
        return make_plan(recipe, **objects)
    with tempfile.TemporaryDirectory(prefix="segcredit-") as place:
        loaded.save_without_weights(Path(place))
        model = recipe.model.model_copy(update={"path": place})
        checked = recipe.model_copy(update={"model": model})
        try:
            plan = make_plan(checked, **objects, in_memory=True)
        except RecipeError as error:
            if place not in str(error):
                raise
            text = str(error).replace(place, "FOLDER")
            raise RecipeError(
                f"{text}\nThe model was given as an object: save it and its tokenizer with "
                f"save_pretrained('FOLDER'), change the file there, and type model='FOLDER'"
            ) from None
    # the plan's recipe names the commits of datasets on the Hub
    return replace(plan, recipe=plan.recipe.model_copy(update={"model": recipe.model}))


def _require_initial(run: RunFolder) -> None:
    """Raise RecipeError if the run to resume did not start from a model given in Python."""
    written = read_run(run.path).config.get("model")
    path = written.get("path") if isinstance(written, dict) else None
    if exists(run.checkpoints / INITIAL) or path == str(run.checkpoints / INITIAL):
        return
    raise RecipeError(
        f"model: expected the model that the run in {run.path} started from, {path!r}; got a model "
        f"in memory. Type Trainer(model={path!r}, …) without tokenizer"
    )


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
        "method": method_fact(plan.recipe.algorithm),
        "stages": stages_fact(plan.recipe),
        **_ahead_fact(plan.recipe),
        **_threads_fact(plan.recipe, state, count),
        **({} if aside is None else {"moved": f"everything after step {state.step} to {aside}"}),
    }


def method_fact(algorithm: str | dict[str, Any]) -> str:
    """Return the name of the method and its settings, as they are typed on the command line."""
    if isinstance(algorithm, str):
        return algorithm
    settings = ", ".join(f"{key}={x}" for key, x in algorithm.items() if key != "name")
    return f"{algorithm['name']} ({settings})" if settings else str(algorithm["name"])


def stages_fact(recipe: Recipe) -> str:
    """Return each stage as progress and report name it, with the key of its settings."""
    named = [
        f"{stage_title_and_key(n, x.kind)} {x.steps} step{'s' * (x.steps != 1)}"
        for n, x in enumerate(recipe.stages)
    ]
    if len(named) > SHOWN_STAGES:
        named[SHOWN_STAGES - 1 : -1] = ["…"]
    return ", ".join(named)


def _ahead_fact(recipe: Recipe) -> dict[str, str]:
    """Return the fact that responses are sampled during the update."""
    if not recipe.rollout.ahead:
        return {}
    device = recipe.rollout.device
    place = "" if device is None else f" on {device}"
    return {
        "ahead": f"the next step's responses are sampled{place} during the update (rollout.ahead=1)"
    }


def _threads_fact(recipe: Recipe, state: State, parameters: int) -> dict[str, str]:
    """Return a hint if a small model runs on a CPU with more threads than one by default."""
    threads = torch.get_num_threads()
    on_cpu = state.policy.device.type == "cpu"
    if recipe.threads is not None or threads == 1 or not on_cpu or parameters >= FEW_PARAMETERS:
        return {}
    return {
        "threads": f"{threads}, PyTorch's default; for so small a model threads=1 is usually "
        f"faster, above all on a shared machine"
    }


def _where(state: State) -> str:
    sharded = f", sharded over {state.parallel.size} processes" if state.shards else ""
    return f"{state.policy.device}{sharded}"
