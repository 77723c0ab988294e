"""Our codec makes the tensors of transformers' stock processors, which need torchvision."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from tiny_policies import ask, fresh_policy, picture, pictures, policy

from segcredit.models import Codec, QwenVL
from segcredit.models.images import open_image
from segcredit.types import Prompt

pytest.importorskip("torchvision", reason="transformers' own processors need torchvision")


def stock(name: str) -> Any:
    """The processor that transformers has, around the same tokenizer and image processor."""
    import transformers

    codec = policy(name).codec
    kind, video = {
        "qwen2_5_vl": ("Qwen2_5_VLProcessor", "Qwen2VLVideoProcessor"),
        "qwen3_vl": ("Qwen3VLProcessor", "Qwen3VLVideoProcessor"),
    }[name]
    return getattr(transformers, kind)(
        image_processor=codec.image_processor,
        tokenizer=codec.tokenizer,
        video_processor=getattr(transformers, video)(),
        chat_template=codec.tokenizer.chat_template,
    )


def gray() -> bytes:
    file = io.BytesIO()
    Image.new("L", (90, 47), 77).save(file, "JPEG")
    return file.getvalue()


PROMPTS = [
    ask("<image>list ?", picture(84, 56)),  # in whole patches of Qwen2.5-VL
    ask("<image>list ?", picture(64, 96)),  # and of Qwen3-VL
    ask("<image>", picture(100, 71)),  # resized
    ask("<image>", picture(13, 300)),
    ask("<image>red ", gray()),
    ask("count <image>red circle plus <image><image> blue square ?", *pictures(3)),
    ask("red <image>blue <image>green ", picture(29, 55), picture(200, 31)),
    ask("list ?"),
]


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_the_same_tensors(name: str, prompt: Prompt) -> None:
    owner, theirs = policy(name), stock(name)
    tokens, vision = owner.codec.encode(prompt)
    images = [open_image(x) for x in prompt.images]
    made = theirs(text=[owner.codec.render(prompt)], images=images or None, return_tensors="pt")
    assert torch.equal(made["input_ids"][0], tokens)
    types = (tokens == owner.model.config.image_token_id).long()
    assert torch.equal(made["mm_token_type_ids"][0], types)
    assert set(vision) == {"pixel_values", "image_grid_thw"} & set(made)
    for key, x in vision.items():
        assert torch.equal(made[key], x), key


def test_a_chat_rendered_by_the_stock_processor() -> None:
    prompt = PROMPTS[5]
    codec = policy("qwen2_5_vl").codec
    parts: list[dict[str, str]] = []
    for n, text in enumerate(prompt.messages[0]["content"].split("<image>")):
        parts += [{"type": "image"}] * bool(n) + [{"type": "text", "text": text}] * bool(text)
    messages = [{"role": "user", "content": parts}]
    theirs = stock("qwen2_5_vl").apply_chat_template(messages, add_generation_prompt=True)
    assert codec.render(prompt) == theirs


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_the_same_tensors_from_a_folder(name: str, tmp_path: Path) -> None:
    """Both take the image processor that transformers thinks best here."""
    import transformers

    fresh_policy(name).save(tmp_path)
    codec = Codec.from_pretrained(tmp_path, QwenVL())
    kind = "Qwen2_5_VLProcessor" if name == "qwen2_5_vl" else "Qwen3VLProcessor"
    theirs = getattr(transformers, kind).from_pretrained(tmp_path)
    for prompt in PROMPTS:
        tokens, vision = codec.encode(prompt)
        images = [open_image(x) for x in prompt.images]
        made = theirs(text=[codec.render(prompt)], images=images or None, return_tensors="pt")
        assert torch.equal(made["input_ids"][0], tokens)
        for key, x in vision.items():
            assert torch.equal(made[key], x), key
