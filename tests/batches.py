"""Rollouts for tests: the golden two responses, and random ones with every column filled."""

import random
from dataclasses import dataclass

import torch
from golden_batch import A, B, Response
from ragged import Layout, layout
from torch import Tensor

from segcredit.core.segments import Segments
from segcredit.types import Outputs, Rollouts


def rollouts_of(
    responses: list[Response],
    place: Layout | None = None,
    dtype: torch.dtype = torch.float64,
    group: list[int] | None = None,
) -> tuple[Rollouts, Outputs]:
    """Padded rollouts of the responses, and what the models say during the update."""
    place = place or layout([r.length for r in responses], holes=False)
    put = lambda rows: place.put(rows, dtype)  # noqa: E731
    rollouts = Rollouts(
        tokens=place.mask.long(),
        mask=place.mask,
        logp_old=put([r.logp_old for r in responses]),
        reward=torch.tensor([r.reward for r in responses], dtype=dtype),
        group=torch.tensor(group or [0] * len(responses)),
        truncated=torch.zeros(len(responses), dtype=torch.bool),
        entropy=put([r.entropy for r in responses]),
        value=put([r.value for r in responses]),
        logp_ref=put([r.logp_ref for r in responses]),
    )
    logp = put([r.logp for r in responses]).requires_grad_()
    value = put([r.value_now for r in responses]).requires_grad_()
    return rollouts, Outputs(logp=logp, value=value)


def golden_rollouts(dtype: torch.dtype = torch.float64) -> tuple[Rollouts, Outputs]:
    """The golden batch {a, b}, one group, padded beyond its longest response."""
    return rollouts_of([A, B], dtype=dtype)


@dataclass(frozen=True)
class Story:
    """Random responses as lists, so that one content can be laid out in many ways."""

    rows: list[dict[str, list[float]]]
    texts: list[list[str]]
    reward: list[float]
    group: list[int]
    parent: list[int]
    baseline: list[float]

    def lay_out(
        self, seed: int, holes: bool, dtype: torch.dtype = torch.float64, extra: int = 5
    ) -> tuple[Rollouts, Outputs]:
        """The same content in a padded batch of some shape."""
        place = layout([len(row["entropy"]) for row in self.rows], seed, holes, extra)
        column = lambda name: place.put([row[name] for row in self.rows], dtype)  # noqa: E731
        rollouts = Rollouts(
            tokens=place.mask.long(),
            mask=place.mask,
            logp_old=column("logp_old"),
            reward=torch.tensor(self.reward, dtype=dtype),
            group=torch.tensor(self.group),
            truncated=torch.zeros(len(self.rows), dtype=torch.bool),
            entropy=column("entropy"),
            value=column("value"),
            logp_ref=column("logp_ref"),
            image_kl=column("image_kl"),
            pieces=place.texts(self.texts),
            baseline=torch.tensor(self.baseline, dtype=dtype),
            parent=torch.tensor(self.parent),
        )
        logp, value = column("logp"), column("value_now")
        return rollouts, Outputs(logp.requires_grad_(), value.requires_grad_())


def story(num_groups: int = 3, per_group: int = 4, longest: int = 24, seed: int = 0) -> Story:
    """A random batch in which every method has something to do."""
    chooser = random.Random(seed)
    num = num_groups * per_group
    rows, texts = [], []
    for _ in range(num):
        length = chooser.randint(1, longest)
        old = [-abs(chooser.gauss(0.2, 0.5)) for _ in range(length)]
        rows.append(
            {
                "entropy": [round(chooser.random() * 2, 1) for _ in range(length)],
                "image_kl": [(7 * place + 3 * length) % 11 / 8 for place in range(length)],
                "value": [chooser.gauss(0.4, 0.3) for _ in range(length)],
                "value_now": [chooser.gauss(0.4, 0.6) for _ in range(length)],
                "logp_old": old,
                "logp": [x + chooser.gauss(0.0, 0.3) for x in old],
                "logp_ref": [x + chooser.gauss(0.0, 0.2) for x in old],
            }
        )
        texts.append(
            [chooser.choice(("a ", "b", "\n", "c\n", "Step 1", "")) for _ in range(length)]
        )
    # within each group the first row is the parent of the second and third
    parent = [-1 if i % per_group in (0, 3) else i - i % per_group for i in range(num)]
    reward = [float(i % per_group in (0, 2) or chooser.random() < 0.3) for i in range(num)]
    reward = [0.0 if i % per_group == 1 else r for i, r in enumerate(reward)]
    return Story(
        rows=rows,
        texts=texts,
        reward=reward,
        group=[7 * (i // per_group) + 3 for i in range(num)],
        parent=parent,
        baseline=[chooser.random() for _ in range(num)],
    )


def fake_monte_carlo(
    rollouts: Rollouts, segments: Segments, estimated: Tensor, samples: int
) -> Tensor:
    """Values that depend on the segment's content alone, so that any layout gives the same."""
    return segments.mean(rollouts.logp_old).exp() * (0.5 + 0.05 * samples)
