"""Lift by a value probe: a ridge regression of the reward on the policy's hidden states."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from safetensors import SafetensorError

from segcredit.models import Policy
from segcredit.models.policy import response_outputs
from segcredit.runlog import Run
from segcredit.runlog.folder import file_inside
from segcredit.runlog.untrusted import FLAG, require_trust
from segcredit.types import Encoded, Prompt, Rollouts
from segcredit_lab.analysis.lift import READING, lift_analysis, stage_slices
from segcredit_lab.analysis.reading import Analysis, AnalysisSettings, CannotAnalyzeError, Step

TOKENS_AT_ONCE = 16_384
"""Maximum number of padded tokens of a forward pass."""
MOST_BYTES = 2**32
"""Maximum bytes of hidden states; above that, fewer responses of every step are read."""
PENALTIES = tuple(10.0**n for n in range(-5, 2))
"""Ridge penalties, for standardized features."""
STRONG = 4
"""Index of the penalty used with two folds, which leave no third to choose by."""
FOLDS = 5
NOTE = (
    "V is a ridge regression of the outcome reward on the last hidden states of the frozen policy "
    "of {} at every token; each response's V comes from a fit on other prompts. Out of fold it "
    "explains {} of the reward's variance{}. The intervals treat the probe as fixed."
)
NO_FIT = ", which is nothing: this V, and so this Lift, has no meaning"
OLDER = "its rollouts have no messages: an older version wrote them, which did not store prompts."


def last_complete_checkpoint(run: Run) -> Path:
    """Return the last complete checkpoint, whose policy the probe reads."""
    path = run.last_complete_checkpoint()
    if path is None:
        raise CannotAnalyzeError("it has no complete checkpoint yet.")
    return path


def load_policy(run: Run, checkpoint: Path, trust_run: bool = False) -> Policy:
    """Load a checkpoint's policy as config.yaml defines it; run its code only if trusted."""
    parts = (run.config.get(name) for name in ("model", "data"))
    settings, data = (x if isinstance(x, dict) else {} for x in parts)
    if not trust_run:
        command = f"segcredit analyze {shlex.quote(str(run.path))} --probe {FLAG}"
        try:
            require_trust({"model": settings}, run.path, command)
        except ValueError as error:
            raise CannotAnalyzeError(str(error)) from None
    dtype = torch.bfloat16 if settings.get("dtype") == "bfloat16" else torch.float32
    try:
        trusted = settings.get("trust_remote_code") is True
        template = data.get("template")
        family = settings.get("family")
        policy = Policy.from_pretrained(checkpoint / "policy", dtype, trusted, template, family)
    except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
        first = " ".join(str(error).split())[:300]
        raise CannotAnalyzeError(
            f"its checkpoint {checkpoint.name} does not load: {first}"
        ) from None
    if torch.cuda.is_available():
        policy.model.to("cuda")
    return policy


def prompt_of(row: Mapping[str, Any], folder: Path) -> Prompt:
    """Return the prompt of a recorded response, with its images from the run directory."""
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        raise CannotAnalyzeError(OLDER)
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise CannotAnalyzeError("a recorded message is not an object with role and content.")
    images = []
    listed = row.get("images")
    for name in listed if isinstance(listed, list) else ():
        path = file_inside(folder, str(name))
        if path is None:
            raise CannotAnalyzeError(f"the image {str(name)[:80]!r} is not in the run directory.")
        images.append(path)
    made = tuple({"role": str(x.get("role", "user")), "content": x["content"]} for x in messages)
    return Prompt(str(row.get("prompt_id", "")), made, tuple(images))


def hidden_states(
    policy: Policy,
    prompts: Sequence[Encoded],
    responses: Sequence[Int[np.ndarray, "_"]],
) -> Iterator[Float[np.ndarray, "_ F"]]:
    """Yield the last hidden states before every token of each response, in batches."""
    width = policy.model.get_input_embeddings().weight.shape[0]
    trunk = policy.model.base_model
    for part in _parts([len(x.tokens) for x in prompts], [len(x) for x in responses]):
        lengths = [len(x) for x in responses[part]]
        tokens = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
        for row, ids in enumerate(responses[part]):
            tokens[row, : len(ids)] = torch.from_numpy(ids.clip(0, width - 1))
        mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        zeros = torch.zeros(len(lengths), device=policy.device)
        rollouts = Rollouts(
            tokens=tokens.to(policy.device),
            mask=mask.to(policy.device),
            logp_old=torch.zeros(mask.shape, device=policy.device),
            reward=zeros,
            group=zeros.long(),
            truncated=zeros.bool(),
            prompts=prompts[part],
        )
        with torch.inference_mode():
            found = response_outputs(trunk, rollouts, head=False, family=policy.family)
            states = found.float().cpu().numpy()
        yield from np.split(states, np.cumsum(lengths)[:-1])


def _parts(prompts: Sequence[int], responses: Sequence[int]) -> Iterator[slice]:
    """Split into batches of at most TOKENS_AT_ONCE padded tokens."""
    first, longest = 0, [0, 0]
    for number, lengths in enumerate(zip(prompts, responses, strict=True)):
        wider = [max(pair) for pair in zip(longest, lengths, strict=True)]
        if number > first and sum(wider) * (number + 1 - first) > TOKENS_AT_ONCE:
            yield slice(first, number)
            first, wider = number, list(lengths)
        longest = wider
    if first < len(prompts):
        yield slice(first, len(prompts))


@dataclass(frozen=True)
class Moments:
    """Sums over rows that least squares needs."""

    count: float
    x: Float[np.ndarray, " F"]
    y: float
    xx: Float[np.ndarray, "F F"]
    xy: Float[np.ndarray, " F"]
    yy: float

    @classmethod
    def of(cls, x: Float[np.ndarray, "N F"], y: Float[np.ndarray, " N"]) -> "Moments":
        """Compute the sums over rows."""
        x = x.astype(np.float64)
        return cls(float(len(y)), x.sum(0), float(y.sum()), x.T @ x, x.T @ y, float(y @ y))

    def __sub__(self, other: "Moments") -> "Moments":
        return Moments(
            self.count - other.count,
            self.x - other.x,
            self.y - other.y,
            self.xx - other.xx,
            self.xy - other.xy,
            self.yy - other.yy,
        )


@dataclass(frozen=True)
class Head:
    """Linear value head: V = w·x + b."""

    weight: Float[np.ndarray, " F"]
    bias: float

    def squared_error(self, rows: Moments) -> float:
        """Compute Σ (y − V)² over rows, from their sums."""
        w, b = self.weight, self.bias
        return float(
            rows.yy
            - 2 * (w @ rows.xy + b * rows.y)
            + w @ rows.xx @ w
            + 2 * b * (w @ rows.x)
            + b * b * rows.count
        )


def fit(rows: Moments, penalties: tuple[float, ...] = PENALTIES) -> list[Head]:
    """Fit one head per penalty, with standardized features and a free intercept."""
    mean, y_mean = rows.x / rows.count, rows.y / rows.count
    covariance = rows.xx / rows.count - np.outer(mean, mean)
    spread = np.sqrt(np.maximum(np.diag(covariance), 0.0))
    scale = np.where(spread > 1e-8 * max(spread.max(initial=0.0), 1e-300), spread, np.inf)
    values, vectors = np.linalg.eigh(covariance / np.outer(scale, scale))
    target = vectors.T @ ((rows.xy / rows.count - mean * y_mean) / scale)
    heads = []
    for penalty in penalties:
        weight = vectors @ (target / (np.maximum(values, 0.0) + penalty)) / scale
        heads.append(Head(weight, float(y_mean - weight @ mean)))
    return heads


def folds_by_group(
    group: Shaped[np.ndarray, " N"], num: int = FOLDS, seed: int = 0
) -> Int[np.ndarray, " N"]:
    """Assign a fold to every row, the same for all rows of a group."""
    groups, which = np.unique(group, return_inverse=True)
    if len(groups) < 2:
        raise ValueError(f"cross-validation needs at least 2 prompts; got {len(groups)}.")
    order = np.random.default_rng(seed).permutation(len(groups))
    return (order % min(num, len(groups)))[which]


def out_of_fold(
    x: Float[np.ndarray, "N F"], y: Float[np.ndarray, " N"], fold: Int[np.ndarray, " N"]
) -> tuple[Float[np.ndarray, " N"], list[float]]:
    """Predict V of each row by a head fitted without its fold; also return each fold's penalty.

    The penalty is also chosen without the fold, by cross-validation over the other folds.
    """
    num = int(fold.max()) + 1
    center = x.mean(axis=0, dtype=np.float64)
    x = x - center.astype(x.dtype)  # sums of squares about zero lose digits
    parts = [Moments.of(x[fold == n], y[fold == n]) for n in range(num)]
    whole = Moments.of(x, y)
    errors = np.zeros((num, len(PENALTIES)))
    for one, other in combinations(range(num), 2) if num > 2 else ():
        heads = fit(whole - parts[one] - parts[other])
        errors[one] += [head.squared_error(parts[other]) for head in heads]
        errors[other] += [head.squared_error(parts[one]) for head in heads]
    best = errors.argmin(axis=1) if num > 2 else np.full(num, STRONG)
    value = np.empty(len(y))
    for n in range(num):
        head = fit(whole - parts[n])[best[n]]
        here = fold == n
        value[here] = x[here] @ head.weight + head.bias
    return value, [PENALTIES[n] for n in best]


def r_squared(y: Float[np.ndarray, " N"], value: Float[np.ndarray, " N"]) -> float:
    """Compute R² = 1 − Σ (y − V)² / Σ (y − ȳ)²; below 0, V is worse than the mean of y."""
    off, spread = y - value, y - y.mean()
    return float(1.0 - (off @ off) / (spread @ spread)) if (spread @ spread) > 0 else float("nan")


@dataclass(frozen=True)
class ProbeResult:
    """Steps with the probe's V instead of the critic's, and the quality of the fit."""

    steps: list[Step]
    r_squared: float
    by_stage: dict[str, float]
    penalties: list[float]
    responses: int
    width: int


def lift_of_probe(
    run: Run, name: str, steps: Sequence[Step], settings: AnalysisSettings
) -> Analysis:
    """Compute a run's Lift with values from a probe on the last checkpoint."""
    _check_rows(steps)
    checkpoint = last_complete_checkpoint(run)
    found = probe(run, steps, settings, load_policy(run, checkpoint, settings.trust_run))
    no_fit = not found.r_squared > 0
    note = NOTE.format(checkpoint.name, f"{found.r_squared:.1%}", NO_FIT if no_fit else "")
    more: dict[str, Any] = {
        "probe": {
            "checkpoint": checkpoint.name,
            "r_squared": found.r_squared,
            "r_squared_by_stage": found.by_stage,
            "penalties": found.penalties,
            "folds": FOLDS,
            "responses": found.responses,
            "hidden_size": found.width,
        }
    }
    title = f"Lift by a value probe (R² = {found.r_squared:.2f})"
    cut = [step.without_holes() for step in found.steps]
    return lift_analysis("lift_probe", title, run, name, cut, settings, f"{note} {READING}", more)


def _check_rows(steps: Sequence[Step]) -> None:
    """Check the rollouts before a model is loaded."""
    if not any(row.get("messages") for step in steps for row in step.rows):
        raise CannotAnalyzeError(OLDER)
    if not any((step.token >= 0).any() for step in steps):
        raise CannotAnalyzeError("its rollouts have no token ids.")
    rewards = np.concatenate([step.reward for step in steps])
    rewards = rewards[np.isfinite(rewards)]
    if not len(rewards) or (rewards == rewards[0]).all():
        raise CannotAnalyzeError("all recorded rewards are equal, so there is nothing to predict.")


def probe(run: Run, steps: Sequence[Step], settings: AnalysisSettings, policy: Any) -> ProbeResult:
    """Fit the probe and predict V over all recorded steps."""
    width = int(policy.model.config.get_text_config().hidden_size)
    size = sum(len(step.owner) for step in steps) * width * 4
    chosen = [_chosen(step, min(1.0, MOST_BYTES / size)) for step in steps]
    states, prompts, encoded = [], [], {}
    for step, used in zip(steps, chosen, strict=True):
        rows = np.flatnonzero(used)
        asked = [prompt_of(step.rows[row], run.path) for row in rows]
        for prompt in asked:
            if repr(prompt) not in encoded:
                encoded[repr(prompt)] = policy.encode(prompt)
        tokens = [step.token[step.owner == row] for row in rows]
        inputs = [encoded[repr(prompt)] for prompt in asked]
        states += list(hidden_states(policy, inputs, tokens))
        prompts += [prompt.id for prompt, ids in zip(asked, tokens, strict=True) for _ in ids]
    if len({*prompts}) < 2:
        raise CannotAnalyzeError("its usable responses belong to fewer than 2 different prompts.")
    x = np.concatenate(states)
    if not np.isfinite(x).all():
        raise CannotAnalyzeError("the policy's hidden states are not all finite.")
    y = np.concatenate(
        [
            step.reward[step.owner][used[step.owner]]
            for step, used in zip(steps, chosen, strict=True)
        ]
    )
    folds = folds_by_group(np.array(prompts), seed=settings.seed)
    value, penalties = out_of_fold(x, y, folds)
    made, by_stage = _put_back(steps, chosen, value)
    responses = int(sum(used.sum() for used in chosen))
    return ProbeResult(made, r_squared(y, value), by_stage, penalties, responses, width)


def _chosen(step: Step, share: float) -> Bool[np.ndarray, " R"]:
    """Select responses with a reward and all token ids; only this share if not all fit."""
    whole = np.ones(step.num_responses, dtype=bool)
    whole[step.owner[step.token < 0]] = False
    good = whole & np.isfinite(step.reward)
    most = max(1, int(share * step.num_responses)) if share < 1.0 else step.num_responses
    return good & (np.cumsum(good) <= most)


def _put_back(
    steps: Sequence[Step],
    chosen: Sequence[Bool[np.ndarray, " _"]],
    value: Float[np.ndarray, " N"],
) -> tuple[list[Step], dict[str, float]]:
    """Put the probe's V into the steps, NaN for unread responses; R² of each stage."""
    made, first = [], 0
    for step, used in zip(steps, chosen, strict=True):
        here = used[step.owner]
        column = np.full(len(step.owner), np.nan)
        column[here] = value[first : first + int(here.sum())]
        first += int(here.sum())
        made.append(replace(step, value=column))
    by_stage = {}
    for stage, part in stage_slices(len(made)).items():
        y = np.concatenate([step.reward[step.owner] for step in made[part]])
        v = np.concatenate([step.value for step in made[part]])
        by_stage[stage] = r_squared(y[np.isfinite(v)], v[np.isfinite(v)])
    return made, by_stage
