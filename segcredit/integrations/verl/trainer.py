"""verl's V1 trainers with segment credit: each step is verl's, three of its parts are ours."""

import logging
import os
from pathlib import Path
from typing import Any

import ray
from omegaconf import OmegaConf, open_dict
from verl.trainer.ppo.utils import Role, need_critic
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.config import omega_conf_to_dataclass

from segcredit.columns import PIECES, resolve
from segcredit.integrations.verl import store
from segcredit.integrations.verl.checks import check
from segcredit.integrations.verl.credit import NEEDED, VALUE_MASK, assign
from segcredit.integrations.verl.dumps import TOKENS, make_room, token_columns
from segcredit.integrations.verl.failures import died, explain
from segcredit.integrations.verl.settings import VerlKeys, departures, method, parse

logger = logging.getLogger(__name__)


class SegmentCredit(PPOTrainer):  # type: ignore[misc]
    """What is ours, to be put before one of verl's trainers."""

    mode: str
    """The trainer of verl that runs the step."""

    def __init__(self, config: Any) -> None:
        check(config, need_critic(config))
        section = config.get("segment")
        self.segment = parse(
            None if section is None else OmegaConf.to_container(section, resolve=True)
        )
        keys = VerlKeys.of(config)
        self.method = method(self.segment, keys)
        logger.warning("segment credit: %r", self.method)
        for line in departures(self.segment, keys):
            logger.warning("segment credit departs: %s", line)
        with open_dict(config):
            # verl takes any name but "sync" for an asynchronous trainer
            config.trainer.v1.trainer_mode = self.mode
            if self.pretraining_steps:
                # verl updates the policy from step ``critic_warmup`` on
                config.trainer.critic_warmup = self.pretraining_steps + 1
        self.pieces: dict[int, str] = {}
        self.recorded: dict[str, dict[str, Any]] = {}
        super().__init__(config)

    @property
    def pretraining_steps(self) -> int:
        """Steps in which the critic alone learns."""
        return self.segment.critic_pretraining_steps

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        from segcredit.integrations.verl.critic import SegmentCriticWorker

        self.role_worker_mapping[Role.Critic] = ray.remote(SegmentCriticWorker)

    def _setup(self) -> None:
        from segcredit.integrations.verl.losses import PolicyLoss, ValueLoss

        super()._setup()
        actor = omega_conf_to_dataclass(self.config.actor_rollout_ref.actor)
        self.actor_rollout_wg.set_loss_fn(PolicyLoss.of(self.method, actor))
        critic = omega_conf_to_dataclass(self.config.critic)
        self.critic_wg.set_loss_fn(ValueLoss.of(self.method, critic))

    def fit(self, agent_loop_manager: Any) -> None:
        """verl's loop; a worker's death becomes one message that says how to go on."""
        if log := os.environ.get("VERL_FILE_LOGGER_PATH"):
            make_room(Path(log))
        try:
            super().fit(agent_loop_manager)
        except Exception as error:
            if not died(error):
                raise
            settings = self.config.trainer
            message = explain(
                error, self.global_steps, settings.default_local_dir, settings.save_freq
            )
            logger.error(message)
            raise RuntimeError(message) from None

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """verl's own first, for KL in the reward and importance weights; then ours over it."""
        batch = super()._compute_advantage(batch, metrics)
        pretraining = self.global_steps <= self.pretraining_steps
        with_kl = self.config.algorithm.use_kl_in_reward and not pretraining
        reward = "token_level_rewards" if with_kl else "rm_scores"
        columns = store.read(batch, [*NEEDED, reward] if with_kl else NEEDED)
        chosen = self.method.returns_only() if pretraining else self.method
        assigned = assign(chosen, columns, reward, self._pieces(columns))
        metrics.update(assigned.metrics)
        metrics["segment/critic_pretraining"] = float(pretraining)
        self._record(batch, columns, assigned.columns)
        return store.write(batch, assigned.columns)

    def _record(self, batch: Any, columns: Any, assigned: Any) -> None:
        """Keep some responses of this step, token by token, for verl's dump of its rollouts."""
        self.recorded = {}
        due = self.global_steps == 1 or self.global_steps % self.segment.recorded_every == 0
        if due and self.config.trainer.get("rollout_data_dir"):
            count = self.segment.recorded_responses
            rows = token_columns({**columns, **assigned}, self._piece, count)
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
        """verl's dump; where a response was recorded, with its tokens and their credit."""
        if dump_path == self.config.trainer.get("rollout_data_dir") and self.recorded:
            found = [self.recorded.get(key) for key in reward_extra_infos_dict["uid"]]
            reward_extra_infos_dict = {**reward_extra_infos_dict, TOKENS: found}
        super()._dump_generations(inputs, outputs, gts, scores, reward_extra_infos_dict, dump_path)

    def _pieces(self, columns: dict[str, Any]) -> list[list[str]] | None:
        """Each token's own text, for partitions that read it."""
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
        """verl counts a loss's entries by ``loss_mask``: for the critic those are boundaries."""
        columns = store.read(batch, [VALUE_MASK, "loss_mask"])
        batch = store.write(batch, {"loss_mask": columns[VALUE_MASK]})
        batch = super()._update_critic(batch, metrics)
        return store.write(batch, {"loss_mask": columns["loss_mask"]})


class SegmentSync(SegmentCredit, PPOTrainerSync):  # type: ignore[misc]
    """Rollout, then update, on the same devices."""

    mode = "sync"


class SegmentColocateAsync(SegmentCredit, PPOTrainerColocateAsync):  # type: ignore[misc]
    """The same devices, and rollouts that outlast a step."""

    mode = "colocate_async"


class SegmentSeparateAsync(SegmentCredit, PPOTrainerSeparateAsync):  # type: ignore[misc]
    """Devices of their own for rollouts."""

    mode = "separate_async"


TRAINERS = {x.mode: x for x in (SegmentSync, SegmentColocateAsync, SegmentSeparateAsync)}
"""By verl's name of the trainer below."""
