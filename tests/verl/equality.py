"""A worker of the equality test: the same batch at home and in verl's FSDP engines."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from tensordict import TensorDict

from segcredit.algorithms.objective import ResponseMean, RewardKL, TokenMean
from segcredit.core.segments import Segments
from segcredit.integrations.verl.credit import ENDS, RATIO_ENDS, VALUE_MASK, assign
from segcredit.integrations.verl.critic import MODEL_TYPE
from segcredit.integrations.verl.losses import PolicyLoss, ValueLoss
from segcredit.integrations.verl.settings import ACTOR, make_method, parse_settings
from segcredit.models import Critic, Policy
from segcredit.types import Outputs, Prompt, Rollouts

KL, TEMPERATURE, MICRO = 0.05, 0.7, 2
ROWS, EMPTY = 8, 1
"""Responses, and which of them is verl's padding: without a valid token."""


def make_rollouts(policy, critic):
    """Ragged responses with a hole each, as π_old, V and π_ref see them."""
    random = torch.Generator().manual_seed(3)
    lengths = torch.randint(4, 21, (ROWS,), generator=random)
    width = int(lengths.max())
    mask = torch.arange(width) < lengths[:, None]
    mask[torch.arange(ROWS), lengths - 3] = False  # as tool output would be
    prompts = [
        Prompt(str(i), ({"role": "user", "content": "say " + "x" * i},)) for i in range(ROWS)
    ]
    tokens = torch.randint(0, 255, (ROWS, width), generator=random)
    tokens[:, ::4] = policy.codec.tokenizer.encode("\n")[0]
    rollouts = Rollouts(
        tokens=tokens,
        mask=mask,
        logp_old=torch.zeros(ROWS, width),
        reward=torch.rand(ROWS, generator=random),
        group=torch.arange(ROWS),
        truncated=torch.zeros(ROWS, dtype=torch.bool),
        prompts=[policy.encode(x) for x in prompts],
        pieces=[policy.codec.pieces(row) for row in tokens.tolist()],
    )
    # holes are read by the models too, only not scored
    whole = rollouts.replace(mask=torch.arange(width) < lengths[:, None])
    with torch.no_grad():
        logp, entropy = policy.score(whole, TEMPERATURE, with_entropy=True)
        value = critic(whole)
    noise = torch.randn(logp.shape, generator=random)
    keep = mask.float()
    return (
        lengths,
        whole,
        rollouts.replace(
            logp_old=(logp - 0.3 * noise) * keep,
            entropy=entropy * keep,
            value=(value + 0.2 * noise.roll(1, 1)) * keep,
            logp_ref=(logp + 0.1 * noise.roll(2, 1)) * keep,
        ),
    )


def native(case, keys, rollouts, whole, policy, critic):
    """Segments, credit, both losses and all gradients by the parts of the native trainer."""
    settings = parse_settings({k: v for k, v in case.items() if k in ("algorithm", "partition")})
    reduce = ResponseMean() if case["mode"] == "seq-mean-token-mean" else TokenMean()
    algorithm = make_method(settings, keys)
    algorithm = replace(
        algorithm,
        reduce=reduce,
        critic=replace(algorithm.critic, reduce=reduce),
        kl=RewardKL(KL),
    )
    rows = torch.tensor([i for i in range(ROWS) if i != EMPTY])
    batch = algorithm.prepare(rollouts.select(rows))
    batch = algorithm.minibatch(batch)
    # verl counts padding rows among the responses of a mini-batch
    if case["mode"] == "seq-mean-token-mean":
        shares = {name: x * len(rows) / ROWS for name, x in batch.shares.items()}
        batch = replace(batch, shares=shares)
    some = whole.select(rows)
    logp, _ = policy.score(some, TEMPERATURE)
    loss = algorithm.loss(Outputs(logp, critic(some)), batch)
    for model in (policy.model, critic):
        model.zero_grad()
    loss.policy.backward()
    loss.value.backward()
    actor = {name: x.grad for name, x in policy.model.named_parameters() if x.grad is not None}
    value = {
        name.replace("trunk.", "model.").replace("head.", "lm_head."): x.grad
        for name, x in critic.named_parameters()
        if x.grad is not None
    }
    return rows, batch, loss, {"actor": actor, "critic": value}


def verl_columns(lengths, rollouts):
    """The batch as verl's queue would hold it, padded."""
    from verl import DataProto
    from verl.trainer.ppo.core_algos import FixedKLController
    from verl.trainer.ppo.ray_trainer import apply_kl_penalty

    mask = rollouts.mask.clone()
    mask[EMPTY] = False
    scores = torch.zeros(mask.shape)
    last = (mask * torch.arange(mask.shape[1])).argmax(1)
    scores[torch.arange(ROWS), last] = rollouts.reward * mask.any(1)
    columns = {
        "responses": rollouts.tokens,
        "response_mask": mask.long(),
        "old_log_probs": rollouts.logp_old,
        "ref_log_prob": rollouts.logp_ref,
        "entropy": rollouts.entropy,
        "values": rollouts.value,
        "rm_scores": scores,
        "token_level_scores": scores,
    }
    data = DataProto(batch=TensorDict(columns, batch_size=ROWS))
    data, _ = apply_kl_penalty(data, FixedKLController(KL))
    return {name: data.batch[name] for name in [*columns, "token_level_rewards"]}


def nested(x, lengths):
    rows = [row[: int(n)].contiguous() for row, n in zip(x, lengths, strict=True)]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def engine(kind, path):
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine import EngineRegistry

    precision = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    model = HFModelConfig(
        path=str(path),
        use_remove_padding=False,
        enable_gradient_checkpointing=False,
        override_config={"attn_implementation": "sdpa"},
        model_type=kind,
    )
    settings = FSDPEngineConfig(
        strategy="fsdp2", mixed_precision=precision, use_torch_compile=False, model_dtype="fp32"
    )
    made = EngineRegistry.new(
        model_type=kind,
        backend="fsdp2",
        model_config=model,
        engine_config=settings,
        optimizer_config=FSDPOptimizerConfig(lr=1e-3, total_training_steps=1),
        checkpoint_config=CheckpointConfig(),
    )
    made.initialize()
    return made


def gradients(made, data, loss_function):
    """verl's forward and backward over this worker's part; gradients of the whole mini-batch."""
    from verl.utils import tensordict_utils as tu

    tu.assign_non_tensor(
        data,
        temperature=TEMPERATURE,
        use_remove_padding=False,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=MICRO,
        calculate_entropy=False,
        global_batch_size=ROWS,
        pad_token_id=0,
        use_fused_kernels=False,
    )
    with made.train_mode(zero_grad_on_exit=False):
        made.module.zero_grad()
        output = made.forward_backward_batch(data, loss_function=loss_function)
        loss = torch.tensor(sum(output["loss"])) / dist.get_world_size()
        dist.all_reduce(loss)
        found = {
            name: x.grad.full_tensor().clone()
            for name, x in made.module.named_parameters()
            if x.grad is not None
        }
        made.module.zero_grad()
    return float(loss), found


def distance(ours, theirs):
    """Largest difference of any entry."""
    names = ours.keys() ^ theirs.keys()
    assert not names, sorted(names)
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


def main(path, out, cases):
    import verl  # noqa: F401  (loads the platform)

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    policy = Policy.from_pretrained(path)
    critic = Critic.from_policy(policy)
    torch.nn.init.normal_(critic.head.weight, std=0.1, generator=torch.Generator().manual_seed(1))
    lengths, whole, rollouts = make_rollouts(policy, critic)
    actor_engine, critic_engine = engine("language_model", path), engine(MODEL_TYPE, path)
    state = {
        "lm_head.weight": critic.head.weight.detach(),
        "lm_head.bias": critic.head.bias.detach(),
    }
    with torch.no_grad():
        for name, x in critic_engine.module.named_parameters():
            if name in state:
                from torch.distributed.tensor import distribute_tensor

                x.copy_(distribute_tensor(state[name], x.device_mesh, x.placements))
    columns = verl_columns(lengths, rollouts)
    report = {}
    for name, case in cases.items():
        keys = {
            "algorithm.gamma": 1.0,
            "algorithm.lam": 0.9,
            f"{ACTOR}.clip_ratio_low": 0.2,
            f"{ACTOR}.clip_ratio_high": 0.28,
            f"{ACTOR}.clip_ratio_c": 3.0,
            "critic.cliprange_value": 0.1,
        }
        rows, batch, loss, expected = native(case, keys, rollouts, whole, policy, critic)
        settings = parse_settings(
            {k: v for k, v in case.items() if k in ("algorithm", "partition")}
        )
        chosen = make_method(settings, keys)
        assigned, _ = assign(chosen, columns, "token_level_rewards", rollouts.pieces)
        mask = columns["response_mask"].bool()[rows]
        segments = Segments.from_ends(assigned[ENDS][rows].bool(), mask)
        ratio = Segments.from_ends(assigned[RATIO_ENDS][rows].bool(), mask)
        report[name] = {
            "num_segments": int(batch.credit.segments.num.sum()),
            "segments": int((segments.index != batch.credit.segments.index).sum())
            + int((ratio.index != batch.ratio_segments.index).sum()),
            "advantages": float(
                (assigned["advantages"][rows] - batch.credit.advantage).abs().max()
            ),
            "returns": float((assigned["returns"][rows] - batch.credit.value_target).abs().max()),
        }
        prompts = torch.nested.as_nested_tensor(
            [x.tokens for x in whole.prompts], layout=torch.jagged
        )
        full = [
            torch.cat([x.tokens, row[: int(n)]])
            for x, row, n in zip(whole.prompts, whole.tokens, lengths, strict=True)
        ]
        everything = {
            "input_ids": torch.nested.as_nested_tensor(full, layout=torch.jagged),
            "position_ids": torch.nested.as_nested_tensor(
                [torch.arange(len(x)) for x in full], layout=torch.jagged
            ),
            "prompts": prompts,
            **{key: nested(x, lengths) for key, x in {**columns, **assigned}.items()},
        }
        data = TensorDict(everything, batch_size=ROWS)
        own = list(range(rank, ROWS, world))
        from verl.utils import tensordict_utils as tu

        def part(loss_mask, data=data, own=own):
            some = tu.index_select_tensor_dict(data, own)
            some["loss_mask"] = some[loss_mask]
            return some

        class Actor:
            loss_agg_mode, loss_scale_factor, entropy_coeff = case["mode"], None, 0.0
            use_kl_loss, kl_loss_coef, kl_loss_type = False, 0.0, "low_var_kl"

        got, found = gradients(actor_engine, part("response_mask"), PolicyLoss.of(chosen, Actor))
        report[name]["policy loss"] = abs(got - float(loss.policy))
        report[name]["policy gradient"] = distance(expected["actor"], found)
        report[name]["gradient_norm"] = max(float(x.norm()) for x in found.values())
        got, found = gradients(critic_engine, part(VALUE_MASK), ValueLoss.of(chosen, Actor))
        report[name]["value loss"] = abs(got - float(loss.value))
        report[name]["value gradient"] = distance(expected["critic"], found)
    if rank == 0:
        Path(out).write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3])["cases"])
