"""The column image_kl: how much each token depends on the prompt's images."""

from dataclasses import replace
from io import BytesIO
from math import isnan
from pathlib import Path
from typing import Any

import pytest
import torch
from each import each
from PIL import Image, ImageChops
from tiny_policies import picture
from train.small import SMALL, recipe

from segcredit.columns import IMAGE_KL, LOGP_OLD, ImageKL
from segcredit.config import RecipeError
from segcredit.core.losses import k3
from segcredit.models import Policy
from segcredit.models.families import GeneralVision
from segcredit.models.images import blacken, open_image
from segcredit.runlog.records import read_rollouts, write_rollouts
from segcredit.train.build import build, make_plan
from segcredit.train.collect import Context, collect
from segcredit.train.columns import ImageKLProvider, prepare_columns
from segcredit.train.metrics import Metrics, StepResult, rollout_rows
from segcredit.train.state import State
from segcredit.types import Batch, Prompt, Rollouts


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_patches_are_black_or_unchanged() -> None:
    """57 × 43 pixels in patches of 14: five columns and four rows, the last ones smaller."""
    before = picture(57, 43)
    image, black = open_image(before), Image.new("RGB", (14, 14))
    counts = []
    for seed in range(8):
        after = open_image(blacken(before, 14, 0.5, seeded(seed)))
        assert after.size == image.size
        hidden = 0
        for x in range(0, 57, 14):
            for y in range(0, 43, 14):
                box = (x, y, min(x + 14, 57), min(y + 14, 43))
                one, other = image.crop(box), after.crop(box)
                unchanged = ImageChops.difference(one, other).getbbox() is None
                assert unchanged or other.tobytes() == black.resize(other.size).tobytes()
                hidden += not unchanged
        counts.append(hidden)
    assert 5 < sum(counts) / len(counts) < 15  # of 20
    assert len(set(counts)) > 1
    assert blacken(before, 14, 0.5, seeded(3)) == blacken(before, 14, 0.5, seeded(3))
    whole = open_image(blacken(before, 14, 1.0, seeded()))
    assert whole.getextrema() == ((0, 0),) * 3


def state_of(column: ImageKL = IMAGE_KL, policy: Policy | None = None, **changes: Any) -> State:
    method = {"name": "vppo", "patch": column.patch, "probability": column.probability}
    state = build(make_plan(recipe(SMALL["grid"], method, samples=2, **changes)), policy)
    prepare_columns(state, [LOGP_OLD, column])
    return state


def sampled(state: State, prompts: list[Prompt]) -> Rollouts:
    return collect(context(state), prompts, (LOGP_OLD,)).rollouts


def context(state: State) -> Context:
    return Context(state, Metrics(), ("optimize", 5))


def filled(state: State, rollouts: Rollouts, column: ImageKL = IMAGE_KL) -> torch.Tensor:
    with torch.no_grad():
        image_kl = ImageKLProvider(column).fill(context(state), rollouts).image_kl
    assert image_kl is not None
    return image_kl


def prompts_of(state: State) -> list[Prompt]:
    """Three with a picture and one without."""
    text = Prompt("text", ({"role": "user", "content": "list ?"},), answer="1")
    return [*state.train.take(0, 2), text, *state.train.take(2, 1)]


def test_it_is_the_kl_of_responses_to_blackened_images() -> None:
    """All patches black, so that nothing is random: scored again, one response at a time."""
    column = ImageKL(probability=1.0)
    state = state_of(column)
    rollouts = sampled(state, prompts_of(state))
    got = filled(state, rollouts, column)
    assert rollouts.prompts is not None
    for row, encoded in enumerate(rollouts.prompts):
        mask = rollouts.mask[row]
        if not encoded.prompt.images:
            assert got[row].isnan().all()
            continue
        written = BytesIO()
        Image.new("RGB", open_image(encoded.prompt.images[0]).size).save(written, "PNG")
        hidden = state.policy.encode(replace(encoded.prompt, images=(written.getvalue(),)))
        assert torch.equal(hidden.tokens, encoded.tokens)
        one = rollouts.select(torch.tensor([row])).replace(prompts=[hidden])
        with torch.no_grad():
            logp, _ = state.policy.score(one, state.recipe.rollout.temperature)
        expected = k3(rollouts.logp_old[row : row + 1], logp, 10.0, 20.0)[0]
        assert torch.allclose(got[row][mask], expected[mask], atol=1e-6)
        assert (got[row][~mask] == 0).all()
        assert got[row][mask].max() > 1e-6  # the images were read


@pytest.mark.slow
def test_layout_does_not_matter() -> None:
    """Row order, micro-batches and a second call; the responses to a prompt share the patches."""
    state = state_of()
    rollouts = sampled(state, prompts_of(state))
    want = filled(state, rollouts)
    assert torch.equal(filled(state, rollouts).nan_to_num(-1), want.nan_to_num(-1))
    order = torch.tensor([5, 2, 7, 0, 4, 1, 6, 3])
    moved = filled(state, rollouts.select(order))
    assert torch.allclose(moved, want[order], atol=1e-6, equal_nan=True)
    small = state_of(update={"minibatches": 2, "tokens_per_micro": 30})
    small.policy = state.policy
    assert torch.allclose(filled(small, rollouts), want, atol=1e-6, equal_nan=True)
    alone = rollouts.select(torch.tensor([0, 1]))
    assert torch.allclose(filled(state, alone), want[:2], atol=1e-6)
    later = replace(context(state), purpose=("optimize", 6))
    other = ImageKLProvider(IMAGE_KL).fill(later, rollouts).image_kl
    assert other is not None
    assert not torch.allclose(other.nan_to_num(-1), want.nan_to_num(-1), atol=1e-6)


def test_hidden_images_are_not_cached() -> None:
    state = state_of()
    rollouts = sampled(state, prompts_of(state))
    codec = state.policy.codec
    before = set(codec._image_cache)
    filled(state, rollouts)
    assert set(codec._image_cache) == before
    assert len(before) == 3


@pytest.mark.filterwarnings("ignore:no model family")
def test_models_without_a_family(tmp_path: Path) -> None:
    """The general path fills the numbers of the family's."""
    owner = state_of()
    owner.policy.save(tmp_path)
    policy = Policy.from_pretrained(tmp_path, family="general")
    assert isinstance(policy.family, GeneralVision)
    general = state_of(policy=policy)
    rollouts = sampled(general, prompts_of(general))
    got = filled(general, rollouts)
    same = [owner.policy.encode(x.prompt) for x in rollouts.prompts or ()]
    want = filled(owner, rollouts.replace(prompts=same))
    assert torch.allclose(got, want, atol=1e-5, equal_nan=True)
    assert got[~got.isnan()].max() > 1e-6


def test_metrics() -> None:
    state = state_of()
    rollouts = sampled(state, prompts_of(state))
    found = ImageKLProvider(IMAGE_KL).fill(context(state), rollouts)
    described = ImageKLProvider(IMAGE_KL).describe(found)
    seen = found.mask & ~found.image_kl.isnan()
    assert described == {
        "image/responses": 0.75,
        "image/kl": pytest.approx(float(found.image_kl[seen].mean())),
    }
    text = filled(state, rollouts.select(torch.tensor([4, 5])))
    assert text.isnan().all()
    only = rollouts.select(torch.tensor([4, 5])).replace(image_kl=text)
    assert ImageKLProvider(IMAGE_KL).describe(only) == {"image/responses": 0.0}


def test_recorded_responses_have_it(tmp_path: Path) -> None:
    """Each recorded response has one number per token; without an image they are NaN."""
    state = state_of()
    found = collect(context(state), prompts_of(state), (LOGP_OLD, IMAGE_KL))
    result = StepResult(
        found, Batch(found.rollouts, found.rollouts.mask), found.rollouts.logp_old, {}
    )
    rows = rollout_rows(result, state.algorithm, state.policy.codec, 64, tmp_path)
    path = write_rollouts(tmp_path, 1, rows)
    image_kl = found.rollouts.image_kl
    for number, row in enumerate(read_rollouts(path)):
        expected = image_kl[number][found.rollouts.mask[number]]
        assert torch.allclose(torch.tensor(row["image_kl"]), expected, rtol=1e-5, equal_nan=True)
        assert all(isnan(x) != bool(row["images"]) for x in row["image_kl"])


def test_data_without_images_is_refused() -> None:
    message = "got no training prompt with an image. Use data with images, or dapo"
    with pytest.raises(RecipeError, match=message):
        make_plan(recipe(SMALL["chains"], "vppo", samples=4))


@each(("size", "count"), [((28, 28), 4), ((27, 29), 6), ((5, 5), 1)])
def test_number_of_patches(size: tuple[int, int], count: int) -> None:
    """Patches that an edge cuts are drawn too."""
    generator = seeded()
    blacken(picture(*size), 14, 0.5, generator)
    other = seeded()
    torch.rand(count, generator=other)
    assert torch.equal(generator.get_state(), other.get_state())
