"""Run the stages of a recipe: steps, evaluations, checkpoints, and stopping on signals."""

import signal
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, runtime_checkable

from segcredit.config import Optimize, PretrainCritic, Recipe, WarmStart
from segcredit.evaluate import Evaluation, evaluate
from segcredit.evaluate.measure import truncation_warning
from segcredit.rewards.checks import no_verdict_warning
from segcredit.rollout.sampling import NotFiniteLogits
from segcredit.runlog import MetricsWriter, RunFolder, resume_command, write_rollouts
from segcredit.runlog.files import read_lines
from segcredit.runlog.folder import by_step, step_name
from segcredit.train.best import (
    after_evaluation,
    is_best,
    metric_of,
    stop_message,
    stops_early,
    tracks_best,
)
from segcredit.train.health import READ, Health, begin_token_warning, top_p_warning
from segcredit.train.metrics import StepResult, rollout_rows
from segcredit.train.optim import NotFinite
from segcredit.train.saving import save, save_shards
from segcredit.train.stages import AnyStage, stage_of
from segcredit.train.state import State, derive
from segcredit.train.step import held_out_step


@runtime_checkable
class Observer(Protocol):
    """Shows the progress of a run."""

    def begin(self, recipe: Recipe, step: int, facts: dict[str, str]) -> None:
        """Called when the run starts, or resumes after ``step`` steps."""
        ...

    def stage(self, number: int, name: str, steps: int, done: int) -> None:
        """Called when a stage starts, or resumes after ``done`` steps."""
        ...

    def stepped(self, step: int, stage: str, metrics: dict[str, float]) -> None:
        """Called after each step."""
        ...

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        """Called after each evaluation on held-out prompts."""
        ...

    def saved(self, step: int, path: Path) -> None:
        """Called after each checkpoint."""
        ...

    def stop_reason(self) -> str | None:
        """Return why training should stop after this step; None to continue."""
        ...

    def note(self, text: str) -> None:
        """Show a message."""
        ...

    def end(self) -> None:
        """Called when the run has ended."""
        ...


def warn_caller(message: str) -> None:
    """Emit a Python warning at the line of the user's own code that called segcredit."""
    frames = traceback.walk_stack(sys._getframe(1))  # the nearest first; decorators are between
    own = [
        level
        for level, (frame, _) in enumerate(frames, start=2)
        if frame.f_globals.get("__name__", "").startswith("segcredit")
    ]
    warnings.warn(message, stacklevel=max(own) + 1)


class Silent:
    """Observer without output; notes become Python warnings."""

    def begin(self, recipe: Recipe, step: int, facts: dict[str, str]) -> None: ...

    def stage(self, number: int, name: str, steps: int, done: int) -> None: ...

    def stepped(self, step: int, stage: str, metrics: dict[str, float]) -> None: ...

    def evaluated(self, step: int, evaluation: Evaluation) -> None: ...

    def saved(self, step: int, path: Path) -> None: ...

    def stop_reason(self) -> str | None:
        return None

    def note(self, text: str) -> None:
        warn_caller(text)

    def end(self) -> None: ...


_HANGUP: signal.Signals | None = getattr(signal, "SIGHUP", None)
"""Signal sent when the terminal closes; None on Windows."""


class StopTraining(RuntimeError):  # noqa: N818
    """The user asked to stop; the state is saved."""


class StoppedByObserver(StopTraining):
    """The observer, such as a callback, asked to stop; the state is saved."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass
class Loop:
    """Runs the remaining stages of a run, with evaluations and checkpoints."""

    state: State
    folder: RunFolder | None
    metrics: MetricsWriter | None
    watch: Observer
    saved_step: int | None = None
    _begun_at: int = 0
    """Step at which this process started: 0, or the checkpoint's step on resume."""
    _save_is_due: bool = False

    def __post_init__(self) -> None:
        self._health = Health(self.state.recipe, self.state.algorithm)
        if self.metrics is not None:
            self._health.replay(read_lines(self.metrics.path))

    def run(self) -> None:
        """Run all remaining stages."""
        self._begun_at = self.state.step
        try:
            self._run()
        except (NotFinite, NotFiniteLogits) as error:
            raise type(error)(f"{error}{self._recovery_advice(error)}") from None

    def _run(self) -> None:
        state = self.state
        stages = state.recipe.stages
        if state.step == 0:
            some = state.train.take(0, READ)
            self._warn_once("begin_token", begin_token_warning(state.whole_policy(), some))
        self._warn_once("top_p", top_p_warning(state.recipe))
        with interrupts() as interrupted:
            while state.stage < len(stages):
                stage = stages[state.stage]
                self.watch.stage(state.stage, stage.kind, stage.steps, state.stage_step)
                if state.stage_step == 0:
                    stage_of(state, stage).enter()
                    if isinstance(stage, Optimize) and not self._has_results("before"):
                        self._evaluate("before")
                while state.stage_step < stage.steps:
                    if stops_early(state):
                        return self._stop_early()
                    self._step(stage)
                    self._stop_if_asked(interrupted())
                state.stage += 1
                state.stage_step = 0
                if state.stage == len(stages):
                    self._evaluate("after")
                self._save()

    def _stop_if_asked(self, interrupted: bool) -> None:
        """Save and stop if a signal or the observer of any rank asks for it."""
        state = self.state
        asked = state.parallel.gather([(interrupted, self.watch.stop_reason())])
        reason = next((reason for _, reason in asked if reason is not None), None)
        if any(pressed for pressed, _ in asked):
            self._save()
            raise StopTraining(self._resume_advice())
        if reason is not None and state.step < state.recipe.total_steps:
            self._save()
            raise StoppedByObserver(reason)

    def _step(self, stage: AnyStage) -> None:
        state = self.state
        for key in [x for x in state.noted if x.endswith("_after")]:
            del state.noted[key]  # the run had ended before this step, and was resumed
        measured, result = stage_of(state, stage).step()
        state.stage_step += 1
        state.step += 1
        if self.metrics is not None:
            self.metrics.write(state.step, stage.kind, measured)
        self.watch.stepped(state.step, stage.kind, measured)
        for name, message in self._health.warnings(stage.kind, measured):
            self._warn(name, message)
        last = state.stage_step == stage.steps
        if last and isinstance(stage, Optimize):
            self._warn_of_short_stage()
        if result is not None:
            found = no_verdict_warning(result.sampled.rewards, f"step {state.step}")
            self._warn_once("no_verdict", found)
        if isinstance(stage, Optimize) and result is not None:
            self._record(result)
            every = state.recipe.evaluation.every
            if every and state.stage_step % every == 0 and not last:
                self._evaluate(None)
        self._save_is_due |= state.step % state.recipe.save.every == 0
        # do not overwrite good checkpoints with weights whose gradients are not finite
        due = self._save_is_due and not any(x.refused for x in state.optimizers())
        if not last and (due or is_best(state)):
            self._save()

    def _warn_of_short_stage(self) -> None:
        """Show the warnings for which the stage that ends here had too few steps."""
        for name, message in self._health.final_warnings(self.state.stage_step):
            self._warn(name, message)

    def _stop_early(self) -> None:
        """End the run; a resumed run ends again unless ``evaluation.patience`` was raised."""
        message = stop_message(self.state)
        if self.folder is not None:
            command = resume_command(self.folder.path, "evaluation.patience=null")
            message += f" To train on, run: {command}"
        if not self._has_results("after"):  # evaluation.patience was reduced on resume
            self._evaluate("after")
        elif self._begun_at == self.state.step:
            self.watch.note(message)
            return
        self._warn_of_short_stage()
        self._warn("early_stop", message)
        if self.saved_step != self.state.step:
            self._save()

    def _has_results(self, when: str) -> bool:
        """Whether this or an earlier process evaluated before or after optimization."""
        return not {f"sampled_{when}", f"reward_{when}"}.isdisjoint(self.state.noted)

    def _warn(self, name: str, message: str) -> None:
        """Show a warning and record it in metrics.jsonl for the report."""
        if self.metrics is not None:
            self.metrics.warn(self.state.step, name, message)
        if type(self.watch) is not Silent:
            self.watch.note(message)
        elif self.state.parallel.first:  # called from Python, without terminal output
            warn_caller(message)

    def _warn_once(self, name: str, message: str | None) -> None:
        """Show a warning, unless there is none or the run has already shown one with that name."""
        if message is not None and self._health.is_new(name):
            self._warn(name, message)

    def _record(self, result: StepResult) -> None:
        settings, state = self.state.recipe.save, self.state
        if self.folder is None or not settings.rollouts_every or not state.parallel.first:
            return
        if (state.stage_step - 1) % settings.rollouts_every == 0:
            self._write(self.folder.rollouts, result, settings.rollouts)

    def _write(self, place: Path, result: StepResult, count: int) -> None:
        """Write the first responses of a batch token by token, with their images."""
        assert self.folder is not None
        algorithm, codec = self.state.algorithm, self.state.policy.codec
        rows = rollout_rows(result, algorithm, codec, count, self.folder.images)
        with add_resume_command(place):
            write_rollouts(place, self.state.step, rows)

    def _evaluate(self, name: str | None) -> None:
        found = evaluate_state(self.state)
        if found is None:
            return
        state, measured = self.state, found.metrics()
        if tracks_best(state.recipe):
            metric_of(state, measured)  # before optimization: report a wrong setting at once
        if name != "before":
            state.best = after_evaluation(state, measured)
            name = "after" if stops_early(state) else name
        if name is not None:
            for key in ("sampled", "greedy", "reward", "greedy_reward"):
                if key in measured:
                    state.noted[f"{key}_{name}"] = measured[key]
        if self.metrics is not None:
            self.metrics.write(state.step, "evaluation", measured)
        if self.folder is not None and state.parallel.first:
            with add_resume_command(self.folder.evaluations):
                write_rollouts(self.folder.evaluations, state.step, found.rows)
        self.watch.evaluated(state.step, found)
        self._warn_once("no_verdict", found.warning)
        if isinstance(state.recipe.stages[-1], WarmStart):  # no step samples responses
            limit = f"rollout.max_tokens={state.recipe.rollout.max_tokens}"
            self._warn_once("truncated", truncation_warning(found.truncated, limit))
        watched = held_out_step(state)  # every process takes part
        if self.folder is not None and state.parallel.first and watched is not None:
            self._write(self.folder.watched, watched, len(watched.sampled.responses))

    def _save(self) -> None:
        state = self.state
        if self.folder is not None and self.metrics is not None and state.parallel.first:
            self.watch.saved(state.step, save(state, self.folder, self.metrics))
        elif state.shards:
            save_shards(state)
        self.saved_step = state.step
        self._save_is_due = False
        state.parallel.wait()

    def _recovery_advice(self, error: NotFinite | NotFiniteLogits) -> str:
        """Suggest how to recover from overflowing weights: earlier weights, lower learning rate."""
        state, folder = self.state, self.folder
        if folder is None:
            return ""
        broken: int | None = state.step
        name = None
        if isinstance(error, NotFinite) and error.optimizer is not None:
            name = error.optimizer.name
            broken = None if error.optimizer.taken else self._begun_at
        change = _lower_rate(state, name)
        saved = [step for step, _ in by_step(folder.checkpoints)]
        if broken not in saved:
            return (
                f" To resume from the last checkpoint, run: {resume_command(folder.path, change)}"
            )
        place = folder.checkpoints / step_name(broken)
        if broken == saved[0]:
            return (
                f" {place} was saved with these weights, and there is no earlier one. To start "
                f"again in a new folder, run: segcredit train {folder.config} {change}"
            )
        return (
            f" {place} was saved with these weights: move it out of the run directory, so that the "
            f"one before it is used. Then run: {resume_command(folder.path, change)}"
        )

    def _resume_advice(self) -> str:
        if self.folder is None:
            return f"stopped after step {self.state.step}; rank 0 saves it."
        return (
            f"stopped after step {self.state.step}, which is saved. "
            f"To resume: {resume_command(self.folder.path)}"
        )


@contextmanager
def add_resume_command(place: Path) -> Iterator[None]:
    """Add the resume command to disk errors on files of a run directory."""
    try:
        yield
    except OSError as error:
        raise OSError(
            error.errno,
            f"{error.strerror} at {place}. Free disk space or fix the disk, then run: "
            f"{resume_command(place.parent)}",
        ) from error


def _lower_rate(state: State, name: str | None) -> str:
    """Suggest an override that divides this model's learning rate by 10.

    ``name=None``: the policy, in the stage that trained it last.
    """
    stages, settings = state.recipe.stages, state.recipe.optimizer
    number = min(state.stage, len(stages) - 1)
    if name is None:
        number -= number == state.stage and not state.stage_step and number > 0
        while number and isinstance(stages[number], PretrainCritic):
            number -= 1
    stage = stages[number]
    if isinstance(stage, WarmStart):
        return f"stages.{number}.lr={stage.lr / 10:g}"
    if isinstance(stage, PretrainCritic):
        return f"stages.{number}.lr={(stage.lr or settings.critic_lr) / 10:g}"
    if name == "critic":
        return f"optimizer.critic_lr={settings.critic_lr / 10:g}"
    return f"optimizer.lr={settings.lr / 10:g}"


def evaluate_state(state: State) -> Evaluation | None:
    """Evaluate the policy on held-out prompts: always the same ones, with a seed per step.

    The seed depends on the number of optimization steps only, so that runs with and without critic
    pretraining use the same random seed at every evaluation.
    """
    settings = state.recipe.evaluation
    if state.test is None:
        return None
    count = settings.prompts if state.test.size is None else min(settings.prompts, state.test.size)
    return evaluate(
        state.test.take(0, count),
        state.engine,
        state.reward,
        state.policy.encode,
        state.policy.codec.decode,
        state.recipe.evaluation_sampling,
        settings.samples,
        settings.greedy,
        derive(state.seed, "evaluate", _optimization_steps(state)) % 2**31,
        peers=state.parallel,
    )


def _optimization_steps(state: State) -> int:
    """Count the optimization steps so far."""
    done = state.recipe.stages[: state.stage]
    return state.step - sum(x.steps for x in done if not isinstance(x, Optimize))


class StopSignals:
    """Handler of stop signals: the first one finishes the step, the second one stops at once.

    The second signal is passed to the previous handler; for Ctrl-C that is Python's, which raises
    KeyboardInterrupt, or the command line's.
    """

    def __init__(self) -> None:
        self.pressed = False
        self.before: dict[int, Any] = {}
        """Previous handler of each signal."""
        self._raised = False

    def __call__(self) -> bool:
        return self.pressed

    def handle(self, number: int, frame: FrameType | None) -> None:
        if self.pressed:
            if number == _HANGUP or self._raised:  # a closing terminal may send it twice
                return
            if callable(before := self.before.get(number)):
                before(number, frame)
                return
            self._raised = True
            raise KeyboardInterrupt
        self.pressed = True
        with suppress(RuntimeError, OSError):  # it may come in the middle of another print
            print(
                "\nFinishing this step, then saving. Press Ctrl-C again to stop at once.",
                flush=True,
            )


@contextmanager
def interrupts() -> Iterator[StopSignals]:
    """Catch Ctrl-C, SIGTERM and SIGHUP; works only in the main thread.

    SIGHUP stays ignored if it was ignored before (nohup).
    """
    noticed = StopSignals()
    numbers = [signal.SIGINT, signal.SIGTERM]
    if _HANGUP is not None and signal.getsignal(_HANGUP) != signal.SIG_IGN:
        numbers.append(_HANGUP)
    try:
        for number in numbers:
            noticed.before[number] = signal.signal(number, noticed.handle)
    except ValueError:  # not the main thread
        yield noticed
        return
    try:
        yield noticed
    finally:
        for handled, handler in noticed.before.items():
            signal.signal(handled, handler)
