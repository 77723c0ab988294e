"""verl's V1 trainers with segment credit: verl runs the step with our credit and losses."""

import logging
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
import torch
import transfer_queue as queue
from omegaconf import OmegaConf, open_dict
from ray.exceptions import ActorDiedError, RayActorError, RayTaskError
from tensordict import TensorDict
from torch import Tensor
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.utils import Role, need_critic
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.config import omega_conf_to_dataclass

from segcredit.columns import PIECES, resolve
from segcredit.integrations.verl.credit import NEEDED, VALUE_MASK, assign
from segcredit.integrations.verl.dumps import TOKENS, rotate_log, token_columns
from segcredit.integrations.verl.settings import (
    check_config,
    departures,
    make_method,
    parse_settings,
    read_keys,
)
from segcredit.registry import USER_MODULES

logger = logging.getLogger(__name__)


class SegmentCredit(PPOTrainer):  # type: ignore[misc]
    """Segment credit as a mixin in front of one of verl's trainers."""

    mode: str
    """Name of the verl trainer that runs the step."""

    def __init__(self, config: Any) -> None:
        check_config(config, need_critic(config))
        section = config.get("segment")
        self.segment = parse_settings(
            None if section is None else OmegaConf.to_container(section, resolve=True)
        )
        keys = read_keys(config)
        self.method = make_method(self.segment, keys)
        logger.warning("segment credit: %r", self.method)
        for line in departures(self.segment, keys):
            logger.warning("segment credit departs from the published method: %s", line)
        with open_dict(config):
            # verl treats any other name than "sync" as an asynchronous trainer
            config.trainer.v1.trainer_mode = self.mode
            if self.pretraining_steps:
                # verl updates the policy from step ``critic_warmup`` on
                config.trainer.critic_warmup = self.pretraining_steps + 1
        self.pieces: dict[int, str] = {}
        self.recorded: dict[str, dict[str, Any]] = {}
        super().__init__(config)

    @property
    def pretraining_steps(self) -> int:
        """Number of first steps that train only the critic."""
        return self.segment.critic_pretraining_steps

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        from segcredit.integrations.verl.critic import SegmentCriticWorker

        self.role_worker_mapping[Role.Critic] = ray.remote(SegmentCriticWorker)

    def _setup(self) -> None:
        from segcredit.integrations.verl.losses import PolicyLoss, ValueLoss

        super()._setup()
        _pickle_user_code_by_value()
        actor = omega_conf_to_dataclass(self.config.actor_rollout_ref.actor)
        self.actor_rollout_wg.set_loss_fn(PolicyLoss.of(self.method, actor))
        critic = omega_conf_to_dataclass(self.config.critic)
        self.critic_wg.set_loss_fn(ValueLoss.of(self.method, critic))

    def fit(self, agent_loop_manager: Any) -> None:
        """Run verl's loop; explain a worker's death in one message with how to resume."""
        if log := os.environ.get("VERL_FILE_LOGGER_PATH"):
            rotate_log(Path(log))
        try:
            super().fit(agent_loop_manager)
        except Exception as error:
            if not is_worker_death(error):
                raise
            settings = self.config.trainer
            message = explain(
                error, self.global_steps, settings.default_local_dir, settings.save_freq
            )
            logger.error(message)
            raise RuntimeError(message) from None

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """Replace verl's advantages, after it added KL to the reward and importance weights."""
        batch = super()._compute_advantage(batch, metrics)
        pretraining = self.global_steps <= self.pretraining_steps
        with_kl = self.config.algorithm.use_kl_in_reward and not pretraining
        reward = "token_level_rewards" if with_kl else "rm_scores"
        columns = read_columns(batch, [*NEEDED, reward] if with_kl else NEEDED)
        chosen = self.method.returns_only() if pretraining else self.method
        new_columns, new_metrics = assign(chosen, columns, reward, self._pieces(columns))
        metrics.update(new_metrics)
        metrics["segment/critic_pretraining"] = float(pretraining)
        self._record(batch, {**columns, **new_columns})
        return write_columns(batch, new_columns)

    def _record(self, batch: Any, columns: dict[str, Tensor]) -> None:
        """Keep some responses of this step, token by token, for verl's rollout dump."""
        self.recorded = {}
        due = self.global_steps == 1 or self.global_steps % self.segment.recorded_every == 0
        if due and self.config.trainer.get("rollout_data_dir"):
            count = self.segment.recorded_responses
            rows = token_columns(columns, self._piece, count)
            self.recorded = dict(zip(batch.keys, rows, strict=False))

    def _dump_generations(
        self,
        inputs: Any,
        outputs: Any,
        gts: Any,
        scores: Any,
        reward_extra_infos_dict: dict[str, Any],
        dump_path: str,
    ) -> None:
        """Add tokens and credit of the recorded responses to verl's dump."""
        if dump_path == self.config.trainer.get("rollout_data_dir") and self.recorded:
            tokens = [self.recorded.get(key) for key in reward_extra_infos_dict["uid"]]
            reward_extra_infos_dict = {**reward_extra_infos_dict, TOKENS: tokens}
        super()._dump_generations(inputs, outputs, gts, scores, reward_extra_infos_dict, dump_path)

    def _pieces(self, columns: dict[str, Any]) -> list[list[str]] | None:
        """Return the text of each token, for partitions that read it."""
        needs = resolve(self.method.credit.over.needs | self.method.ratio.over.needs)
        if PIECES not in needs:
            return None
        return [[self._piece(token) for token in row] for row in columns["responses"].tolist()]

    def _piece(self, token: int) -> str:
        if token not in self.pieces:
            self.pieces[token] = self.tokenizer.decode(
                [token], skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        return self.pieces[token]

    def _update_critic(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """Set ``loss_mask``, by which verl counts a loss's entries, to the segment boundaries."""
        columns = read_columns(batch, [VALUE_MASK, "loss_mask"])
        batch = write_columns(batch, {"loss_mask": columns[VALUE_MASK]})
        batch = super()._update_critic(batch, metrics)
        return write_columns(batch, {"loss_mask": columns["loss_mask"]})


class SegmentSync(SegmentCredit, PPOTrainerSync):  # type: ignore[misc]
    """Rollout, then update, on the same GPUs."""

    mode = "sync"


class SegmentColocateAsync(SegmentCredit, PPOTrainerColocateAsync):  # type: ignore[misc]
    """The same GPUs; rollouts may continue over several steps."""

    mode = "colocate_async"


class SegmentSeparateAsync(SegmentCredit, PPOTrainerSeparateAsync):  # type: ignore[misc]
    """Separate GPUs for rollouts."""

    mode = "separate_async"


TRAINERS = {x.mode: x for x in (SegmentSync, SegmentColocateAsync, SegmentSeparateAsync)}
"""Our trainers, by the name of the verl trainer they extend."""


def _pickle_user_code_by_value() -> None:
    """Pickle objects from a user's file.py by value: workers cannot import the file."""
    for name, module in list(sys.modules.items()):
        if name.startswith(USER_MODULES):
            ray.cloudpickle.register_pickle_by_value(module)


# The three functions below are the only code that uses verl's TransferQueue, which verl intends
# to replace (its RFC 6988).


def read_columns(batch: KVBatchMeta, names: Sequence[str]) -> dict[str, Tensor]:
    """Read columns as right-padded tensors; columns that the queue does not hold are left out."""
    columns = queue.kv_batch_get(
        keys=batch.keys, partition_id=batch.partition_id, select_fields=list(names)
    )
    return {name: _padded(columns[name]) for name in names if name in columns.keys()}  # noqa: SIM118


def _lengths(batch: KVBatchMeta) -> list[int]:
    """Return the number of tokens of each response, masked ones included."""
    columns = queue.kv_batch_get(
        keys=batch.keys, partition_id=batch.partition_id, select_fields=["response_mask"]
    )
    return columns["response_mask"].offsets().diff().tolist()


def write_columns(batch: KVBatchMeta, columns: Mapping[str, Tensor]) -> KVBatchMeta:
    """Write columns of width T into the queue, each row cut to the length of its response.

    Workers see only the columns that a batch names, so use the returned batch from here on.
    """
    rows = _lengths(batch)
    nested = {
        name: torch.nested.as_nested_tensor(
            [x[row, :length].contiguous() for row, length in enumerate(rows)], layout=torch.jagged
        )
        for name, x in columns.items()
    }
    put = queue.kv_batch_put(
        keys=batch.keys,
        partition_id=batch.partition_id,
        fields=TensorDict(nested, batch_size=len(rows)),
    )
    put.extra_info.update(batch.extra_info)
    return put


def _padded(x: Tensor) -> Tensor:
    return x.to_padded_tensor(padding=0) if x.is_nested else x


FACTS = {
    "name": re.compile(r"class_name: (\S+)"),
    "pid": re.compile(r"pid: (\d+)"),
    "ip": re.compile(r"ip: (\S+)"),
    "why": re.compile(r"Worker exit detail: (.{1,200}?)\. Some common causes", re.DOTALL),
}
"""Patterns in Ray's message about an actor's death."""
MARK = "segcredit: the run stopped"
"""Start of our message, to find it among Ray's lines."""


def is_worker_death(error: BaseException) -> bool:
    """Whether a worker process died, or another one lost its connection to it."""
    if isinstance(error, RayActorError):
        return True
    text = str(error)
    return isinstance(error, RayTaskError) and any(
        x in text
        for x in ("ActorDiedError", "Connection closed by peer", "Connection reset", "NCCL")
    )


def last_checkpoint(folder: str | Path) -> int | None:
    """Step of the last complete checkpoint, from verl's own file."""
    note = Path(folder) / "latest_checkpointed_iteration.txt"
    try:
        return int(note.read_text())
    except (OSError, ValueError):
        return None


def explain(error: BaseException, step: int, folder: str | Path, save_freq: int) -> str:
    """Explain a worker's death in one message: which worker, why, and how to resume."""
    saved = last_checkpoint(folder)
    if saved is not None:
        hint = (
            f"Checkpoint {saved} is complete: run the same command again to resume from it "
            f"(trainer.resume_mode=auto, trainer.default_local_dir={folder})."
        )
    else:
        hint = (
            f"There is no checkpoint in {folder}, so the same command starts over; "
            f"set trainer.save_freq (now {save_freq}) to save checkpoints."
        )
    return f"{MARK} in step {step}, because {_reason(error)} {hint}"


def _reason(error: BaseException) -> str:
    if isinstance(error, ActorDiedError):
        text = str(error)
        facts = {key: match[1] for key, x in FACTS.items() if (match := x.search(text))}
        who = facts.get("name", "a worker").rpartition(".")[2]
        place = f"process {facts.get('pid', '?')} on {facts.get('ip', '?')}"
        why = facts.get("why", text.strip().splitlines()[-1][:200].rstrip("."))
        return (
            f"a worker died ({who}, {place}): {why}. "
            f"A common cause is memory: look for the process in that node's dmesg."
        )
    if isinstance(error, RayTaskError):
        return (
            "a worker lost its connection to another one, which most likely died (memory, node, "
            f"signal): {str(error.cause).strip().splitlines()[-1][:200].rstrip('.')}."
        )
    return f"a worker died: {str(error).strip().splitlines()[0].rstrip('.')}."
