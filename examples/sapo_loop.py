r"""The whole of SAPO in one file: torch, transformers and ``segcredit.core``, without a Trainer.

    python examples/sapo_loop.py              # python examples/sapo_loop.py --help

You should see: a table of the training's progress, then sampled accuracy before and after
reinforcement learning. examples/README.md has the measured time and numbers.

Notation (arXiv 2605.01327)

| symbol   | in the code    | shape  | meaning                                                    |
|----------|----------------|--------|------------------------------------------------------------|
| x, y     | tokens         | B, P+T | prompt of P tokens, then response of T tokens              |
|          | mask           | B, T   | True at the tokens that the policy sampled                 |
| π_θ      | policy         |        | the model that is trained                                  |
| π_old    | logp_old       | B, T   | log-probability when the response was sampled              |
| π_ref    | logp_ref       | B, T   | log-probability under the frozen reference model           |
| H_t      | entropy        | B, T   | entropy of π_old before token t                            |
| V_φ(s_t) | value          | B, T   | the critic's estimate of the return before token t         |
| r(x, y)  | reward         | B      | 1 for a right answer, else 0                               |
| z_m      | segments       |        | segment m: it ends after a token of high entropy           |
| Â_m      | advantage      | B, T   | credit of segment m (Eq. 6-7), the same for all its tokens |
| R̂_m      | value_target   | B, T   | the critic's target Â_m + V(s_m)                           |
| ρ_m      |                | B, T   | geometric mean of π_θ / π_old in the segment (Eq. 8)       |
| k        | fraction       |        | share of the tokens after which a response is cut          |
| γ, λ     | gamma, lam     |        | discount; reach of credit over segments                    |
| ε        | clip           |        | the ratio is clipped to 1 ± ε (Eq. 9)                      |
| β        | kl             |        | weight of the KL penalty in the reward                     |

The task: a prompt is four digits from 0 to 6; the response is their running maximum, and the last
one is the answer. "2 5 3 6" → "5 5 6". The warm start imitates demonstrations in which every third
digit is random, so the policy knows the task but makes mistakes; SAPO removes them.
"""

import argparse
import copy
import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from segcredit.core.advantages import Credit, kl_shaped_reward, segment_gae
from segcredit.core.logits import token_logp_and_entropy
from segcredit.core.losses import boundary_value_loss, segment_policy_loss
from segcredit.partition import top_entropy

DIGITS, P, T = 7, 4, 6  # digits are 0 … 6; tokens of a prompt, most tokens of a response
END = DIGITS  # the token that ends a response


@dataclass(frozen=True)
class Settings:
    """Settings of the method (the paper's) and of the optimizers (for this tiny model)."""

    fraction: float = 0.30
    lam: float = 0.99
    gamma: float = 1.0
    clip: float = 0.2
    kl: float = 0.001
    lr: float = 1e-3
    critic_lr: float = 2e-3
    max_grad_norm: float = 1.0
    minibatches: int = 4


# ── The task ─────────────────────────────────────────────────────────────────────────────────────


def make_prompts(count: int, generator: torch.Generator) -> Tensor:
    """Draw prompts of P digits."""
    return torch.randint(DIGITS, (count, P), generator=generator)


def demonstrate(prompts: Tensor, error: float, generator: torch.Generator) -> Tensor:
    """Write running maxima; each is replaced by a random digit with probability ``error``."""
    largest, shown = prompts[:, 0], []
    for digit in prompts[:, 1:].T:
        wrong = torch.rand(len(prompts), generator=generator) < error
        noise = torch.randint(DIGITS, largest.shape, generator=generator)
        largest = torch.where(wrong, noise, torch.maximum(largest, digit))
        shown.append(largest)
    return torch.stack([*shown, torch.full_like(largest, END)], dim=1)


def grade(prompts: Tensor, responses: Tensor, mask: Tensor) -> Tensor:
    """Return 1 where the last digit before END is the largest of the prompt, else 0."""
    last = mask.sum(dim=1, keepdim=True) - 1
    ended = responses.gather(1, last) == END
    answer = responses.gather(1, (last - 1).clamp(min=0))
    return (ended & (answer == prompts.amax(dim=1, keepdim=True))).float().squeeze(1)


# ── The models ───────────────────────────────────────────────────────────────────────────────────


class Critic(nn.Module):
    """V before each token: a copy of the policy's trunk with a linear head that starts at 0."""

    def __init__(self, policy: PreTrainedModel) -> None:
        super().__init__()
        self.trunk = copy.deepcopy(policy.model)
        self.head = nn.Linear(policy.config.hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.trunk(input_ids=tokens, use_cache=False).last_hidden_state
        return self.head(hidden[:, P - 1 : -1]).squeeze(-1)  # the state before each response token


def make_policy(hidden: int = 64, layers: int = 2) -> PreTrainedModel:
    """Make a tiny Qwen2 with random weights."""
    config = Qwen2Config(
        vocab_size=DIGITS + 1,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=P + T,
        eos_token_id=END,
        tie_word_embeddings=False,
    )
    return Qwen2ForCausalLM(config).eval()


def score(policy: PreTrainedModel, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Compute log π and H of the response tokens.

    Padding is on the right and attention is causal, so no attention mask is needed.
    """
    logits = policy(input_ids=tokens, use_cache=False).logits[:, P - 1 : -1]
    return token_logp_and_entropy(logits, tokens[:, P:])


@torch.no_grad()
def sample(
    policy: PreTrainedModel, prompts: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Sample responses at temperature 1; returns all tokens and the mask of the responses."""
    tokens, alive, mask = prompts, torch.ones(len(prompts), dtype=torch.bool), []
    for _ in range(T):
        probs = policy(input_ids=tokens, use_cache=False).logits[:, -1].softmax(dim=-1)
        drawn = torch.multinomial(probs, 1, generator=generator).squeeze(1)
        mask.append(alive)
        tokens = torch.cat([tokens, drawn.where(alive, END)[:, None]], dim=1)
        alive = alive & (drawn != END)
    return tokens, torch.stack(mask, dim=1)


# ── SAPO ─────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Batch:
    """Rollouts under π_old with their credit: all constants of the update."""

    tokens: Tensor
    mask: Tensor
    reward: Tensor
    logp_old: Tensor
    value: Tensor
    credit: Credit


@torch.no_grad()
def assign_credit(
    policy: PreTrainedModel,
    critic: Critic,
    reference: PreTrainedModel,
    tokens: Tensor,
    mask: Tensor,
    reward: Tensor,
    settings: Settings,
) -> Batch:
    """Cut the responses into segments and compute Â and R̂, once per rollout batch."""
    logp_old, entropy = score(policy, tokens)
    logp_ref, _ = score(reference, tokens)
    value = critic(tokens)
    segments = top_entropy(entropy, mask, settings.fraction)  # §4.2
    per_token = kl_shaped_reward(reward, logp_old, logp_ref, mask, settings.kl)
    credit = segment_gae(per_token, value, segments, settings.gamma, settings.lam)  # Eq. 6-7
    return Batch(tokens, mask, reward, logp_old, value, credit)


def policy_loss(policy: PreTrainedModel, batch: Batch, rows: Tensor, settings: Settings) -> Tensor:
    """Compute the clipped surrogate over segments (Eq. 8-9)."""
    logp, _ = score(policy, batch.tokens[rows])
    credit, old = batch.credit.select(rows), batch.logp_old[rows]
    clips = (settings.clip, settings.clip)
    return segment_policy_loss(logp, old, credit.advantage, credit.segments, *clips)[0]


def value_loss(critic: Critic, batch: Batch, rows: Tensor) -> Tensor:
    """Compute the squared error of V at the starts of the segments (Eq. 10)."""
    credit, value = batch.credit.select(rows), critic(batch.tokens[rows])
    assert credit.value_target is not None
    return boundary_value_loss(value, batch.value[rows], credit.value_target, credit.segments)


def gradient_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor, settings: Settings
) -> None:
    """Clip the gradient and take one step."""
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
    optimizer.step()


def adamw(model: nn.Module, lr: float, eps: float = 1e-8) -> torch.optim.Optimizer:
    """Make AdamW without weight decay."""
    return torch.optim.AdamW(model.parameters(), lr=lr, eps=eps, weight_decay=0.0)


def update(
    policy: PreTrainedModel,
    critic: Critic,
    optimizers: tuple[torch.optim.Optimizer, torch.optim.Optimizer],
    batch: Batch,
    order: Iterable[Tensor],
    settings: Settings,
) -> dict[str, float]:
    """Take one gradient step of both models per mini-batch; returns the mean losses."""
    losses: list[tuple[float, float]] = []
    for rows in order:
        actor = policy_loss(policy, batch, rows, settings)
        gradient_step(policy, optimizers[0], actor, settings)
        value = value_loss(critic, batch, rows)
        gradient_step(critic, optimizers[1], value, settings)
        losses.append((actor.item(), value.item()))
    actor_mean, value_mean = (sum(x) / len(losses) for x in zip(*losses, strict=True))
    return {"policy_loss": actor_mean, "value_loss": value_mean}


# ── The run ──────────────────────────────────────────────────────────────────────────────────────


def warm_start(policy: PreTrainedModel, steps: int, generator: torch.Generator) -> None:
    """Imitate demonstrations with errors."""
    optimizer = adamw(policy, 1e-3)
    for _ in range(steps):
        prompts = make_prompts(128, generator)
        tokens = torch.cat([prompts, demonstrate(prompts, 1 / 3, generator)], dim=1)
        loss = -score(policy, tokens)[0].mean()
        gradient_step(policy, optimizer, loss, Settings())


def accuracy(policy: PreTrainedModel, prompts: Tensor, seed: int) -> float:
    """Sample one response per prompt and return the share that is right."""
    tokens, mask = sample(policy, prompts, torch.Generator().manual_seed(seed))
    return grade(prompts, tokens[:, P:], mask).mean().item()


def main(argv: list[str] | None = None) -> tuple[float, float]:
    """Train and print the progress; returns the accuracy before and after."""
    parser = argparse.ArgumentParser(
        description="SAPO on running maxima, with a tiny Qwen2 on the CPU.",
        epilog="example: python examples/sapo_loop.py --steps 120 --seed 1",
    )
    parser.add_argument("--warm-steps", type=int, default=300, help="steps of imitation")
    parser.add_argument("--steps", type=int, default=80, help="steps of SAPO")
    parser.add_argument("--responses", type=int, default=256, help="responses per step")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    torch.manual_seed(args.seed)
    generator, settings = torch.Generator().manual_seed(args.seed), Settings()
    held_out, began = make_prompts(1024, torch.Generator().manual_seed(10**6)), time.time()

    policy = make_policy()
    warm_start(policy, args.warm_steps, generator)
    before = accuracy(policy, held_out, seed=1)
    print(f"warm start: accuracy {before:.1%} after {args.warm_steps} steps")

    critic, reference = Critic(policy), copy.deepcopy(policy)
    optimizers = adamw(policy, settings.lr), adamw(critic, settings.critic_lr)
    print(f"{'step':>4} {'reward':>7} {'segments':>8} {'policy loss':>11} {'value loss':>10}")
    for step in range(1, args.steps + 1):
        prompts = make_prompts(args.responses, generator)
        tokens, mask = sample(policy, prompts, generator)
        reward = grade(prompts, tokens[:, P:], mask)
        batch = assign_credit(policy, critic, reference, tokens, mask, reward, settings)
        order = torch.randperm(len(tokens), generator=generator).chunk(settings.minibatches)
        losses = update(policy, critic, optimizers, batch, order, settings)
        if step == 1 or step % 20 == 0:
            segments = batch.credit.segments.num.float().mean().item()
            print(f"{step:4} {reward.mean().item():7.3f} {segments:8.2f} ", end="")
            print(f"{losses['policy_loss']:11.4f} {losses['value_loss']:10.4f}")

    after = accuracy(policy, held_out, seed=1)
    print(f"accuracy: {before:.1%} before SAPO, {after:.1%} after; {time.time() - began:.0f} s")
    return before, after


if __name__ == "__main__":
    main()
