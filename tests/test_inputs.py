"""Prompts and responses laid side by side, by hand numbers."""

from dataclasses import replace

import pytest
import torch

from segcredit.models.inputs import full_inputs, prompt_inputs
from segcredit.types import Encoded, Prompt

ASKED = Prompt(id="asked", messages=())
PIXELS = torch.arange(24.0).view(12, 2)


def text(*tokens: int) -> Encoded:
    return Encoded(ASKED, torch.tensor(tokens), torch.arange(len(tokens))[None])


def seen(tokens: list[int], positions: list[list[int]], first: int, last: int) -> Encoded:
    """A prompt with images: rows first to last of the pixels."""
    pixels = {"pixel_values": PIXELS[first:last], "image_grid_thw": torch.tensor([[1, 2, last]])}
    return Encoded(ASKED, torch.tensor(tokens), torch.tensor(positions), pixels)


def test_prompts_end_together() -> None:
    made = prompt_inputs([text(5), text(6, 7, 8), text(9, 4)])
    assert made.tokens.tolist() == [[0, 0, 5], [6, 7, 8], [0, 9, 4]]
    assert made.attended.tolist() == [[False, False, True], [True] * 3, [False, True, True]]
    assert made.positions.tolist() == [[[0, 0, 0], [0, 1, 2], [0, 0, 1]]]
    assert made.vision == {}


def test_responses_begin_together_and_count_on_from_their_prompts() -> None:
    tokens = torch.tensor([[1, 2, 99, 99], [3, 99, 4, 99]])
    mask = torch.tensor([[True, True, False, False], [True, False, True, False]])
    made = full_inputs([text(5, 5, 5), text(6)], tokens, mask)
    assert made.tokens.tolist() == [[5, 5, 5, 1, 2, 0, 0], [0, 0, 6, 3, 99, 4, 0]]
    # the hole (a tool's answer) was read, so it is attended; what follows the last token was not
    assert made.attended.int().tolist() == [[1, 1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1, 0]]
    assert made.positions[0].tolist() == [[0, 1, 2, 3, 4, 5, 6], [0, 0, 0, 1, 2, 3, 4]]


def test_a_response_behind_an_image_begins_after_its_largest_position() -> None:
    # one token, an image of 1 × 3 merged patches, nothing behind it: heights 1, widths 1 to 3
    wide = seen([7, 8, 8, 8], [[0, 1, 1, 1], [0, 1, 1, 1], [0, 1, 2, 3]], 0, 4)
    plain = Encoded(ASKED, torch.tensor([7]), torch.zeros(3, 1, dtype=torch.long))
    tall = seen([8, 8, 7], [[0, 0, 2], [0, 1, 2], [0, 0, 2]], 4, 12)
    tokens = torch.tensor([[1, 2], [3, 4], [5, 6]])
    made = full_inputs([wide, plain, tall], tokens, torch.ones(3, 2, dtype=torch.bool))
    assert made.positions[0].tolist() == [
        [0, 1, 1, 1, 4, 5],
        [0, 0, 0, 0, 1, 2],
        [0, 0, 0, 2, 3, 4],
    ]
    assert made.positions[2].tolist()[0] == [0, 1, 2, 3, 4, 5]
    assert torch.equal(made.vision["pixel_values"], PIXELS)
    assert made.vision["image_grid_thw"].tolist() == [[1, 2, 4], [1, 2, 12]]


def test_a_begun_response_is_part_of_the_prompt() -> None:
    wide = seen([7, 8, 8, 8], [[0, 1, 1, 1], [0, 1, 1, 1], [0, 1, 2, 3]], 0, 4)
    begun = wide.extended(torch.tensor([1, 2]))
    tokens, mask = torch.tensor([[1, 2, 3]]), torch.ones(1, 3, dtype=torch.bool)
    whole, split = (
        full_inputs([wide], tokens, mask),
        full_inputs([begun], tokens[:, 2:], mask[:, 2:]),
    )
    for name in ("tokens", "attended", "positions"):
        assert torch.equal(getattr(whole, name), getattr(split, name)), name
    assert split.vision.keys() == whole.vision.keys()
    nothing = wide.extended(torch.tensor([], dtype=torch.long))
    assert torch.equal(nothing.tokens, wide.tokens)
    assert torch.equal(nothing.positions, wide.positions)


def test_positions_are_always_given_to_the_model() -> None:
    """Left out, Qwen2.5-VL takes plain text positions, or those of an earlier generation."""
    one = prompt_inputs([text(5, 6)]).arguments()
    assert one["position_ids"].tolist() == [[0, 1]]
    three = prompt_inputs([seen([7, 8], [[0, 1], [0, 1], [0, 1]], 0, 2)]).arguments()
    assert three["position_ids"].shape == (3, 1, 2)
    assert sorted(three) == [
        *("attention_mask", "image_grid_thw", "input_ids", "pixel_values", "position_ids")
    ]
    assert three["attention_mask"].dtype == torch.long


def test_text_and_vision_do_not_mix() -> None:
    both = [text(5), seen([7], [[0], [0], [0]], 0, 1)]
    with pytest.raises(ValueError, match="cannot share a batch"):
        prompt_inputs(both)
    prompt_inputs([both[1], replace(both[1], vision={})])  # a vision model's, without a picture
