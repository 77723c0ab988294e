"""Save a run's state as a checkpoint, and restore it when the run is resumed."""

import shlex
import shutil
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from segcredit.config import (
    GIVEN_IN_PYTHON,
    VERSION,
    Recipe,
    RecipeError,
    parse_recipe,
)
from segcredit.models import Critic, Policy
from segcredit.models.codec import Codec
from segcredit.models.lora import Lora
from segcredit.registry import resolve_files
from segcredit.runlog import MetricsWriter, RunFolder, read_run
from segcredit.runlog.card import model_card, write_card
from segcredit.runlog.files import read_lines, sync_folder, write_bytes_atomically
from segcredit.runlog.folder import (
    CRITIC,
    POLICY,
    REFERENCE,
    by_step,
    later_than,
    new_rollback,
    resume_command,
    step_name,
)
from segcredit.runlog.records import lines_after
from segcredit.runlog.untrusted import requests_of
from segcredit.train import ahead, best, checkpoint
from segcredit.train.columns import ADAPTERS, restore_columns
from segcredit.train.curriculum import Curriculum
from segcredit.train.distributed import CollectiveWrite, whole_model
from segcredit.train.optim import PolicyLearner, ShardedOptimizer, load_moments, save_part
from segcredit.train.provider import SavedRun, trained_policy
from segcredit.train.source import training_prompts
from segcredit.train.stages import stage_of
from segcredit.train.state import State

ROLLBACKS = 3
"""Number of folders in rolled_back/ that are kept; older ones are deleted."""
CPU = torch.device("cpu")


def save(state: State, folder: RunFolder, metrics: MetricsWriter) -> Path:
    """Write a checkpoint of this step atomically; called on rank 0.

    If the models are sharded, all other ranks must call :func:`save_shards` at the same time.
    """
    for name, model in _fixed_models(state).items():
        new = not (folder.checkpoints / name).exists()
        if state.parallel.share(new) if state.shards else new:
            write = partial(_write_model, state, model)
            checkpoint.save_checkpoint(folder.checkpoints, name, write)
    metrics.sync()
    position = metrics.position()
    name = step_name(state.step)

    def write_all(place: Path) -> None:
        card = _card(state, read_lines(metrics.path))  # here, so that a disk error is reported
        _write(state, place, position, card)

    protect = best.protected(state, folder)
    keep = state.recipe.save.keep
    place = checkpoint.save_checkpoint(folder.checkpoints, name, write_all, keep, protect)
    best.record(state, folder)
    return place


def _card(state: State, rows: list[dict[str, Any]]) -> str:
    """Describe the policy for users who have only its folder."""
    has_images = state.policy.codec.image_processor is not None
    config = state.config or state.recipe.as_dict()
    return model_card(config, repr(state.algorithm), rows, state.step, has_images)


def save_shards(state: State) -> None:
    """Participate in saving sharded models, on all ranks except 0."""
    for model in _fixed_models(state).values():
        if state.parallel.share(False):
            _write_model(state, model, None)
    _write(state, None, 0)


def _fixed_models(state: State) -> dict[str, Policy]:
    """Return models that are saved once per run; LoRA adapters are saved with the policy's."""
    if state.policy.lora is not None:
        return {}
    return {name: x for provider in state.prepared for name, x in provider.fixed_models().items()}


def _models(state: State) -> dict[str, Policy | Critic]:
    """Return the models of columns that every checkpoint holds."""
    return {name: x for provider in state.prepared for name, x in provider.models().items()}


def _write_model(state: State, model: Policy, place: Path | None) -> None:
    if not state.shards:
        assert place is not None
        model.save(place)
        return
    with CollectiveWrite(state.parallel, place) as together:
        whole = whole_model(model, CPU, keep=state.parallel.first)
        together.write(lambda: _save(whole, together.place))


def _write(state: State, place: Path | None, metrics_position: int, card: str = "") -> None:
    lora = state.policy.lora
    rest = {
        "stage": state.stage,
        "stage_step": state.stage_step,
        "step": state.step,
        "position": state.position,
        "noted": dict(state.noted),
        "metrics_position": metrics_position,
        "rates": {x.name: x.lr for x in state.optimizers()},
        "tracker": None,  # replaced by the tracker's own, if there is one
        "base": None if lora is None else lora.fingerprint(),
        **best.as_saved(state.best),
        **({} if state.curriculum is None else {"curriculum": state.curriculum.state_dict()}),
        **_micro_batches(state),
        **ahead.as_saved(state),
        **_column_states(state),
    }
    if state.shards:
        _write_sharded(state, place, rest, card)
        return
    assert place is not None
    state.policy.save(place / POLICY)
    write_card(place / POLICY, card)
    if lora is not None:
        _write_adapters(state, lora, place / ADAPTERS)
    else:
        for name, model in _models(state).items():
            model.save(place / name)
    optimizers = {x.name: x.state() for x in state.optimizers()}
    checkpoint.save_state(place, rest | {"optimizers": optimizers})


def _micro_batches(state: State) -> dict[str, Any]:
    """Return the size of micro-batches if memory did not suffice for the size in the recipe.

    The results of a method that averages within micro-batches (``sapo_authors``) depend on it.
    """
    if not state.micro_batches_halved:
        return {}
    setting, halved = state.recipe.update.tokens_per_micro, state.micro_batches_halved
    return {"micro_batches": {"tokens_per_micro": setting, "halved": halved}}


def _column_states(state: State) -> dict[str, Any]:
    """Collect the columns' states by their keys in the state file."""
    found = {}
    for column, provider in state.providers.items():
        if kept := provider.state_dict():
            found[provider.state_key or f"column/{column.name}"] = kept
    return found


def _write_sharded(state: State, place: Path | None, rest: dict[str, Any], card: str) -> None:
    """Write a sharded state: every rank its optimizer shards, rank 0 everything else."""
    first, rank, size = state.parallel.first, state.parallel.rank, state.parallel.size
    optimizers: dict[str, Any] = {}
    with CollectiveWrite(state.parallel, place) as together:
        policy = whole_model(state.policy, CPU, keep=first)
        together.write(lambda: _save(policy, together.place / POLICY))
        if first:
            together.write(lambda: write_card(together.place / POLICY, card))
        del policy
        for name, model in _models(state).items():
            whole = whole_model(model, CPU, keep=first)
            together.write(partial(_save, whole, together.place / name))
            del whole
        for optimizer in state.optimizers():
            assert isinstance(optimizer, ShardedOptimizer)

            def write(optimizer: ShardedOptimizer = optimizer) -> None:
                optimizers[optimizer.name] = save_part(optimizer, together.place, rank, size)

            together.write(write)
        if first:
            together.write(
                lambda: checkpoint.save_state(together.place, rest | {"optimizers": optimizers})
            )


def _save(model: Policy | Critic | None, folder: Path) -> None:
    """Save a model on the rank that keeps it."""
    if model is not None:
        model.save(folder)


def _write_adapters(state: State, lora: Lora, place: Path) -> None:
    """Write the adapters of the policy, of the critic with its head, and of π_ref if it has one."""
    lora.save(POLICY, place / POLICY)
    for name, model in _models(state).items():
        model.save(place / name)
    if REFERENCE in lora.names:
        lora.save(REFERENCE, place / REFERENCE)


def require_checked_template(saved: Codec, checked: Codec, place: Path) -> None:
    """Refuse a checkpoint whose chat template is not the one that all rows were checked with.

    Rows are rendered under limits before training and without limits during it, so a template that
    comes with a checkpoint must not replace the checked one.
    """
    templates = (str(x.tokenizer.chat_template) for x in (saved, checked))
    if len({x.replace("\r\n", "\n") for x in templates}) > 1:  # files are read with \n alone
        raise checkpoint.CheckpointError(
            f"expected the chat template of the model that the run started from; got another one "
            f"in {place}. Nothing was changed. If the model's template was changed since, put the "
            f"older one back into the model's folder; if you trust the checkpoint's, copy its "
            f"chat_template.jinja there. Then resume."
        )


def find_resumable(folder: RunFolder) -> checkpoint.LatestCheckpoint:
    """Find the checkpoint to resume from; None if the run may start over.

    It may if nothing would be lost: no checkpoint was ever saved, or the folder is empty.
    Otherwise checkpoints are missing, damaged or unreadable, and CheckpointError says what to do.
    """
    try:
        found = checkpoint.find_latest(folder.checkpoints)
        unsaved = checkpoint.never_saved(folder.checkpoints)
        held = _held(folder)
    except OSError as error:
        raise checkpoint.CheckpointError(
            f"a checkpoint of {folder.path} cannot be read: {error}. It may be complete, so "
            f"nothing was changed or deleted. Make it readable (permissions, disk), or, to resume "
            f"from an earlier checkpoint, move it out of {folder.checkpoints}; then run: "
            f"{resume_command(folder.path)}"
        ) from error
    if found.path is not None or unsaved or not held:
        return found
    reasons = "".join(f"\n  {reason}" for reason in found.refused)
    what = f"none is complete:{reasons}\n" if reasons else "there is none. "
    raise checkpoint.CheckpointError(
        f"expected a checkpoint in {folder.checkpoints} to resume from; {what}"
        f"The run holds {', '.join(held)}, so nothing was changed or deleted. If checkpoints were "
        f"moved, put them back and run: {resume_command(folder.path)}. To start again, use a new "
        f"folder: segcredit train {shlex.quote(str(folder.config))}"
    )


def _held(folder: RunFolder) -> list[str]:
    """Return the names of files and folders that a run would lose if it started over."""
    places = (folder.checkpoints, folder.rollouts, folder.watched, folder.evaluations)
    held = [place.name for place in places if any(by_step(place))]
    if folder.metrics.exists() and folder.metrics.stat().st_size:
        held.insert(0, folder.metrics.name)
    return held


def restore(state: State, folder: RunFolder, place: Path) -> int:
    """Restore the state from a checkpoint; return the length of metrics.jsonl at that step."""
    found: dict[str, Any] = checkpoint.load_state(place)
    _check_same_kind(state, place, found)
    _check_changes(state, folder, place, found)
    if state.policy.lora is not None:
        state.policy.lora.load(POLICY, place / ADAPTERS / POLICY)
    state.stage, state.stage_step = found["stage"], found["stage_step"]
    state.step, state.position = found["step"], found["position"]
    state.noted = dict(found["noted"])
    state.best = best.restored(state, folder, found.get("best"))
    _restore_micro_batches(state, found.get("micro_batches"))
    _reopen_longer_stage(state)
    saved = SavedRun(folder, place, found)
    restore_columns(state, saved)
    _restore_curriculum(state, saved)
    state.pending = ahead.restored(state, found.get("pending"))
    for name, kept in found["optimizers"].items():
        lr = found["rates"][name]
        if name == PolicyLearner.name:
            optimizer = state.new_policy_optimizer(lr, state.recipe.optimizer)
        else:
            optimizer = state.learners[name].optimizer
            optimizer.lr = lr
        load_moments(optimizer, kept, place)
    if state.stage_step:  # at step 0 the stage sets them itself
        stage_of(state).adopt_settings()
    _check_vocabulary(state, place)
    return int(found["metrics_position"])


def _restore_micro_batches(state: State, kept: dict[str, int] | None) -> None:
    """Halve micro-batches as often as before, unless the user has set another size since."""
    if kept is not None and kept["tokens_per_micro"] == state.recipe.update.tokens_per_micro:
        state.micro_batches_halved = kept["halved"]


def _restore_curriculum(state: State, saved: SavedRun) -> None:
    """Restore the prompts' success rates; without saved ones, keep the initial rates."""
    kept = saved.state.get("curriculum")
    if kept is None or not state.recipe.data.curriculum:
        return
    curriculum = Curriculum(training_prompts(state))
    curriculum.load_state_dict(kept)
    if len(curriculum.alpha) != state.train.size:
        count = len(curriculum.alpha)
        raise saved.missing_error(
            f"data.curriculum tracks success rates of {count} prompts", state.recipe
        )
    state.curriculum = curriculum


def _check_same_kind(state: State, place: Path, found: dict[str, Any]) -> None:
    """Refuse to resume with LoRA if it was not used before, or on another base model."""
    lora = state.policy.lora
    then = (place / ADAPTERS).exists()
    if then != (lora is not None):
        raise checkpoint.CheckpointError(
            f"{place} was written {'with' if then else 'without'} model.lora, so the run cannot be "
            f"resumed {'without' if then else 'with'} it. Leave model.lora as it was, or start a "
            f"new run on the trained policy: {trained_policy(state.recipe, place)}"
        )
    if lora is not None and found["base"] != lora.fingerprint():
        raise checkpoint.CheckpointError(
            f"{place} holds adapters for other base weights than those of "
            f"{state.recipe.model.path or state.recipe.model.tiny}: it is another model, or was "
            f"changed since. Restore the old one, or start a new run on the trained policy: "
            f"{trained_policy(state.recipe, place)}"
        )


def changed_settings(folder: RunFolder, recipe: Recipe) -> dict[str, tuple[Any, Any]]:
    """Compare a recipe with the run's config.yaml: changed settings with old and new values."""
    config = read_run(folder.path).config
    then = {k: x for k, x in config.items() if k not in (GIVEN_IN_PYTHON, VERSION)}
    then, now = (resolve_files(x, folder.path) for x in (then, recipe.as_dict()))
    if requests_of(then).items() <= requests_of(now).items():  # all code in it is in use anyway
        with suppress(RecipeError):  # fill in defaults that an earlier version did not have
            then = parse_recipe(resolve_files(config, folder.path)).as_dict()
    return dict(sorted(_different(then, now)))


def _different(old: Any, new: Any, path: str = "") -> Iterator[tuple[str, tuple[Any, Any]]]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in old.keys() | new.keys():
            yield from _different(old.get(key), new.get(key), f"{path}.{key}" if path else key)
    elif old != new:
        yield path, (old, new)


SHAPES = {
    *("model.tiny", "model.hidden", "model.layers", "model.heads", "model.kv_heads"),
    *("model.vision_layers", "model.freeze_vision", "model.lora.alpha", "optimizer.kind"),
}
"""Settings that determine a checkpoint's weights and optimizer state."""


def _check_changes(state: State, folder: RunFolder, place: Path, found: dict[str, Any]) -> None:
    """Raise RecipeError if a setting was changed that the checkpoint determines."""
    changed = changed_settings(folder, state.recipe)
    problems = []
    for key, (old, new) in changed.items():
        if key in SHAPES:
            reason = f"weights and optimizer state in {place.name} were made with {old}"
        elif key in ("data.world", "data.settings") and state.recipe.model.tiny is not None:
            continue  # checked below: only the tokenizer matters
        elif key == "model.path" and state.policy.lora is None and not _same_name(old, new):
            reason = f"the weights come from {place.name}, not from there"
        elif key == "model.critic" and (place / CRITIC).exists() and _is_there(old):
            reason = f"the critic comes from {place.name}, not from there"
        else:
            continue
        problems.append(f"{key} was {old}, and is {new}: {reason}")
    if "stages" in changed:
        problems += _stage_problems(*changed["stages"], found["stage"], found["stage_step"])
    if _is_finished(found, state.recipe) and changed and not problems:
        number = len(state.recipe.stages) - 1
        problems.append(
            f"{', '.join(changed)}: all {found['step']} steps are done. To train on, also set "
            f"stages.{number}.steps to more than {state.recipe.stages[number].steps}"
        )
    if problems:
        lines = "".join(f"\n  {problem}" for problem in problems)
        raise RecipeError(
            f"these changes would have no effect on the resumed run:{lines}\n"
            f"Leave them out, or start a new run with them on the trained policy: segcredit train "
            f"{shlex.quote(str(folder.config))} {trained_policy(state.recipe, place)} …"
        )


def _same_name(old: str | None, new: str | None) -> bool:
    """Whether both paths have the same model name, possibly in another folder or on the hub."""
    return old is not None and new is not None and Path(old).name == Path(new).name


def _is_there(path: str | None) -> bool:
    return path is None or Path(path).expanduser().exists()


def _stage_problems(old: list[Any], new: list[Any], stage: int, stage_step: int) -> list[str]:
    """List changes that come too late: to finished stages, or to finished steps of this stage."""
    problems = []
    for number, then in enumerate(old[: stage + bool(stage_step)]):
        now = new[number] if number < len(new) else None
        if now is None or now["kind"] != then["kind"]:
            what = "has begun" if number == stage else "is finished"
            problems.append(f"stages.{number} is no longer {then['kind']}, but it {what}")
            continue
        differ = {key for key in then if then[key] != now.get(key)}
        longer = number == len(old) - 1 == len(new) - 1 and now["steps"] > then["steps"]
        if number < stage and differ and not longer:
            names = ", ".join(f"stages.{number}.{key}" for key in sorted(differ))
            problems.append(f"{names}: that stage is finished")
        if number == stage and now["steps"] < stage_step:
            problems.append(
                f"stages.{number}.steps: expected at least {stage_step}, the steps of the stage "
                f"that are done; got {now['steps']}"
            )
    return problems


def _is_finished(found: dict[str, Any], recipe: Recipe) -> bool:
    """Whether all stages of the recipe are finished in the checkpoint."""
    return found["stage"] == len(recipe.stages) and found["step"] >= recipe.total_steps


def _check_vocabulary(state: State, place: Path) -> None:
    """Refuse to resume with a changed vocabulary."""
    if state.recipe.model.tiny is not None and state.world is not None:
        known = state.policy.codec.tokenizer.get_vocab()
        if known != state.world.tokenizer().get_vocab():
            raise RecipeError(
                f"data.world and data.settings make another vocabulary than that of {place}, and "
                f"the vocabulary of a tiny model cannot change. Leave them as they were, or start "
                f"a new run."
            )


def _reopen_longer_stage(state: State) -> None:
    """Reopen the last stage of a finished run if the recipe now gives it more steps."""
    stages = state.recipe.stages
    left = state.recipe.total_steps - state.step
    if state.stage == len(stages) and 0 < left < stages[-1].steps:
        state.stage = len(stages) - 1
        state.stage_step = stages[-1].steps - left


def roll_back(state: State, folder: RunFolder, position: int) -> Path | None:
    """Move what an earlier process wrote after the resumed step to rolled_back/.

    Metrics, rollouts, evaluations and checkpoints of later steps go to a new folder in
    rolled_back/, of which the newest few are kept; None if there is nothing to move. The lines of
    metrics.jsonl are copied: :meth:`MetricsWriter.truncate` drops them.
    """
    lines = lines_after(folder.metrics, position)
    places = (folder.rollouts, folder.watched, folder.evaluations, folder.checkpoints)
    later = [path for place in places for path in later_than(place, state.step)]
    reference = folder.checkpoints / REFERENCE
    if reference.exists() and not state.has_begun("optimize"):
        later.append(reference)
    if not lines and not later:
        return None
    aside = new_rollback(folder, state.step)
    if lines:
        write_bytes_atomically(aside / folder.metrics.name, lines)
    for path in later:
        (aside / path.parent.name).mkdir(exist_ok=True)
        shutil.move(path, aside / path.parent.name / path.name)
    for place in {path.parent for path in later}:
        sync_folder(aside / place.name)
        sync_folder(place)
    sync_folder(aside)
    for old in sorted(folder.rolled_back.iterdir())[:-ROLLBACKS]:
        shutil.rmtree(old, ignore_errors=True)
    return aside
