"""Text and images to tokens and back."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from each import each
from tiny_policies import (
    ARCHITECTURES,
    TEXT,
    VISION,
    ask,
    fresh_policy,
    picture,
    policy,
    text_prompts,
    vision_prompts,
    world,
)
from tokenizers import Tokenizer, decoders, models
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from segcredit.models.codec import Codec, load_tokenizer
from segcredit.models.images import image_size, open_image
from segcredit.models.template import check_questions, check_template
from segcredit.types import Prompt

QWEN_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}"
    "{{ message['content'] }}<|im_end|>\n{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Qwen2.5-VL's own, without video and numbered images: it knows parts, not marks."""


def prompts_for(name: str) -> list[Prompt]:
    return vision_prompts() if name in VISION else text_prompts()


def codec_with(name: str, template: str | None) -> Codec:
    made = fresh_policy(name).codec
    made.tokenizer.chat_template = template
    return made


# ── Prompts ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", VISION)
def test_a_mark_becomes_as_many_tokens_as_the_image_has_merged_patches(name: str) -> None:
    codec = policy(name).codec
    side = 28 if name == "qwen2_5_vl" else 32
    sizes = [(2, 3), (1, 1), (4, 2)]
    images = [picture(w * side, h * side, seed=n) for n, (w, h) in enumerate(sizes)]
    tokens, vision = codec.encode(ask("red <image>blue <image><image>?", *images))
    image = codec.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    runs = "".join("x" if token == image else " " for token in tokens.tolist()).split()
    assert [len(run) for run in runs] == [6, 1, 8]
    assert vision["image_grid_thw"].tolist() == [[1, 6, 4], [1, 2, 2], [1, 4, 8]]
    assert len(vision["pixel_values"]) == 24 + 4 + 32
    assert codec.decode(tokens).count("red ") == 1


def test_images_keep_their_order() -> None:
    codec = policy("qwen2_5_vl").codec
    red, blue = picture(56, 56, seed=1), picture(56, 56, seed=2)
    one, other = (
        codec.encode(ask("<image><image>", *pair))[1]["pixel_values"]
        for pair in ((red, blue), (blue, red))
    )
    assert torch.equal(one, other.roll(16, 0))
    assert not torch.equal(one, other)


def test_images_from_files(tmp_path: Path) -> None:
    codec = policy("qwen3_vl").codec
    (tmp_path / "a.png").write_bytes(picture(70, 90))
    asked = Prompt(
        id="file",
        messages=({"role": "user", "content": "<image>"},),
        images=(tmp_path / "a.png",),
    )
    by_path, by_bytes = codec.encode(asked)[1], codec.encode(ask("<image>", picture(70, 90)))[1]
    assert torch.equal(by_path["pixel_values"], by_bytes["pixel_values"])


@pytest.mark.parametrize("template", ["own", QWEN_TEMPLATE])
def test_marks_work_with_every_template(template: str) -> None:
    """Templates know parts or marks."""
    codec = fresh_policy("qwen2_5_vl").codec
    if template != "own":
        codec.tokenizer.chat_template = template
    text = codec.render(ask("red <image>blue <image>", picture(28, 28), picture(28, 56)))
    seen = "<|vision_start|><|image_pad|><|vision_end|>"
    assert f"red {seen}blue {seen}" in text
    assert text.endswith("<|im_start|>assistant\n")
    tokens, vision = codec.encode(ask("red <image>blue <image>", picture(28, 28), picture(28, 56)))
    assert (tokens == codec.tokenizer.convert_tokens_to_ids("<|image_pad|>")).sum() == 3
    assert len(vision["image_grid_thw"]) == 2


SIZES = [(84, 56), (28, 500), (1000, 7), (1, 1), (3, 3), (1, 40), (90, 3), (2, 9), (640, 480)]


@pytest.mark.parametrize("name", VISION)
def test_tokens_are_counted_by_the_size_of_an_image(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The count equals the encoded length, and both refuse the same prompts."""
    codec = policy(name).codec
    asked = [ask("red <image>blue ?", picture(*size)) for size in SIZES]

    def told(count: Callable[[Prompt], int], prompt: Prompt) -> int | str:
        try:
            return count(prompt)
        except ValueError as error:
            return str(error)

    expected = [told(lambda x: len(codec.encode(x)[0]), prompt) for prompt in asked]
    assert sum(isinstance(x, int) for x in expected) >= 6

    def refuse(source: bytes | Path) -> None:
        assert min(image_size(source)) < 4, "pixels were decoded"

    monkeypatch.setattr("segcredit.models.codec.open_image", lambda x: refuse(x) or open_image(x))
    assert [told(codec.count_tokens, prompt) for prompt in asked] == expected


@pytest.mark.parametrize("size", [(2000, 8), (8, 2000)])
def test_an_image_that_is_too_wide_or_tall_is_refused_with_its_size(size: tuple[int, int]) -> None:
    codec, prompt = policy("qwen2_5_vl").codec, ask("<image>?", picture(*size))
    for read in (codec.encode, codec.count_tokens):
        with pytest.raises(ValueError, match=rf"an image of {size[0]}×{size[1]} pixels"):
            read(prompt)


@pytest.mark.parametrize("name", VISION)
def test_a_vision_model_reads_text_alone(name: str) -> None:
    owner = policy(name)
    made = owner.encode(ask("list ?"))
    assert made.vision == {}
    assert owner.codec.decode(made.tokens) == "user\nlist ?\nassistant\n"
    assert owner.codec.count_tokens(ask("list ?")) == len(made.tokens)


def test_several_messages() -> None:
    asked = Prompt(
        id="talk",
        messages=(
            {"role": "system", "content": "list "},
            {"role": "user", "content": "<image>red "},
            {"role": "assistant", "content": "blue "},
            {"role": "user", "content": "green <image>"},
        ),
        images=(picture(28, 28), picture(28, 28)),
    )
    codec = policy("qwen2_5_vl").codec
    tokens, _ = codec.encode(asked)
    assert codec.decode(tokens) == (
        "system\nlist \nuser\nred \nassistant\nblue \nuser\ngreen \nassistant\n"
    )


IMAGE = picture(28, 28)


@each(
    ("text", "images"),
    [
        ("list ?", 1),
        ("<image>list ?", 0),
        ("<image><image>list ?", 1),
        ("<image>list ?", 2),
        ("list <|image_pad|> ?", 0),  # what a careless or hostile row may say
        ("<image>list <|image_pad|> ?", 1),
        ("list <|image_pad|> ?", 1),
        ("<|vision_start|><|image_pad|><|vision_end|>list ?", 1),
        ("<image>list <|image_pad|> ?", 2),
    ],
)
@each("template", ["own", QWEN_TEMPLATE])
def test_marks_and_images_must_agree(text: str, images: int, template: str) -> None:
    codec = policy("qwen2_5_vl").codec
    if template != "own":
        codec = codec_with("qwen2_5_vl", template)
    with pytest.raises(ValueError, match=r"prompt 'row 7' has .* Write <image> once per image"):
        codec.encode(ask(text, *[IMAGE] * images, id="row 7"))


@pytest.mark.parametrize("name", TEXT)
def test_a_text_model_refuses_images(name: str) -> None:
    with pytest.raises(ValueError, match=r"prompt 'row 8' has 1 image.*reads text only"):
        policy(name).encode(ask("<image>?", IMAGE, id="row 8"))


def test_a_template_takes_the_place_of_the_chat_template() -> None:
    """With the tokenizer's own special tokens, which a chat template writes itself."""
    made = fresh_policy("llama").codec
    codec = replace(made, template="a = 5 ;\n{question}\n")
    asked = ask("a ?")
    assert codec.render(asked) == "a = 5 ;\na ?\n"
    plain = codec.encode(asked)[0].tolist()
    assert made.tokenizer.decode(plain) == "a = 5 ;\na ?\n"
    start = codec.tokenizer.convert_tokens_to_ids("<|im_start|>")
    codec.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", start)]
    )
    assert codec.encode(asked)[0].tolist() == [start, *plain]
    assert made.encode(asked)[0].tolist().count(start) == 2, "user and assistant: none added"


@each("question", ["{question}", "{question.__class__}", "{0}", "%s $x {", "{{question}}"])
def test_questions_are_text_whatever_they_hold(question: str) -> None:
    codec = replace(policy("llama").codec, template="P: {x} {question} %s {}")
    assert codec.render(ask(question)) == "P: {x} " + question + " %s {}"


@pytest.mark.parametrize("template", ["no place", "{question} {question}", "", "{ question }"])
def test_a_template_has_one_place_for_the_question(template: str) -> None:
    with pytest.raises(ValueError, match=r"holds \{question\} exactly once.*; got it \d times"):
        check_template(template)


def test_a_template_is_for_one_message_of_text() -> None:
    text = replace(policy("llama").codec, template="{question}")
    talk = Prompt("talk", ({"role": "system", "content": "a"}, {"role": "user", "content": "b"}))
    with pytest.raises(ValueError, match=r"it holds more: prompt 'talk' has 2 messages\. Remove"):
        text.encode(talk)
    vision = replace(policy("qwen2_5_vl").codec, template="{question}")
    with pytest.raises(ValueError, match="it holds more: prompt 'p' has images"):
        vision.encode(ask("<image>?", IMAGE, id="p"))
    assert vision.render(ask("list ?")) == "list ?"
    with pytest.raises(ValueError, match="2 of 3 prompts hold more: prompt 'talk' has 2 messages"):
        check_questions([ask("a ?"), talk, ask("<image>", IMAGE)])


@pytest.mark.parametrize("name", ["llama", "qwen2_5_vl"])
def test_without_any_template_nothing_is_guessed(name: str) -> None:
    with pytest.raises(ValueError, match=r"no chat template.*Set data\.template.*'\{question\}'"):
        codec_with(name, None).encode(ask("a ?"))


def test_an_empty_prompt_is_refused() -> None:
    codec = replace(policy("llama").codec, template="{question}")
    with pytest.raises(ValueError, match="prompt 'row 9' is empty"):
        codec.encode(ask("", id="row 9"))


# ── Responses ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_demonstrations_there_and_back(name: str) -> None:
    codec, shown = policy(name).codec, world(name).demonstration(3)
    tokens = codec.encode_response(shown.response)
    assert tokens[-1] == codec.tokenizer.eos_token_id
    assert codec.decode(tokens) == shown.response
    assert codec.decode(tokens.tolist()) == shown.response
    pieces = codec.pieces(tokens.tolist())
    assert len(pieces) == len(tokens)
    assert "".join(pieces) == shown.response
    assert pieces[-1] == ""
    assert all(pieces[:-1])


@pytest.mark.parametrize("name", VISION)
def test_special_tokens_have_no_text(name: str) -> None:
    codec = policy(name).codec
    special = codec.tokenizer.all_special_ids
    assert len(special) > 6
    assert codec.pieces(special) == [""] * len(special)
    word = codec.tokenizer.convert_tokens_to_ids("red ")
    assert codec.pieces([special[0], word, special[1], word]) == ["", "red ", "", "red "]
    assert codec.pieces([]) == []


def test_what_must_not_be_written() -> None:
    vocabulary = policy("qwen2_5_vl").codec.tokenizer.get_vocab()
    names = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    for name in VISION:
        assert policy(name).codec.banned == tuple(sorted(vocabulary[x] for x in names))
    for name in TEXT:
        assert policy(name).codec.banned == ()


# ── Saved and loaded ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_saved_and_loaded(name: str, tmp_path: Path) -> None:
    owner = fresh_policy(name)
    owner.save(tmp_path)
    loaded = Codec.from_pretrained(tmp_path, policy(name).family)
    assert loaded.tokenizer.get_vocab() == owner.codec.tokenizer.get_vocab()
    assert loaded.tokenizer.eos_token_id == owner.codec.tokenizer.eos_token_id
    for prompt in prompts_for(name):
        tokens, vision = owner.codec.encode(prompt)
        again, seen = loaded.encode(prompt)
        assert torch.equal(tokens, again)
        assert vision.keys() == seen.keys()
        if vision:
            assert torch.equal(vision["image_grid_thw"], seen["image_grid_thw"])
            # exactly so, unless torchvision is there, by which transformers resizes otherwise
            exact = type(loaded.image_processor) is type(owner.codec.image_processor)
            difference = (vision["pixel_values"] - seen["pixel_values"]).abs().max()
            assert difference <= (0.0 if exact else 0.1)
    shown = world(name).demonstration(0).response
    assert torch.equal(loaded.encode_response(shown), owner.codec.encode_response(shown))
    assert loaded.decode(loaded.encode_response(shown)) == shown


@pytest.mark.parametrize("stated", ["TokenizersBackend", "PreTrainedTokenizerFast"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_tokenizer_is_loaded_as_it_was_saved(name: str, stated: str, tmp_path: Path) -> None:
    """AutoTokenizer gives a saved Qwen2 tokenizer Qwen2's splitting rules, without a word."""
    owner = fresh_policy(name)
    owner.save(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    config = json.loads(file.read_text())
    assert config["tokenizer_class"] == "TokenizersBackend"
    file.write_text(json.dumps({**config, "tokenizer_class": stated}))
    shown = world(name).demonstration(0).response
    right = owner.codec.tokenizer(shown)["input_ids"]
    assert load_tokenizer(tmp_path)(shown)["input_ids"] == right
    assert load_tokenizer(str(tmp_path))(shown)["input_ids"] == right
    if name == "qwen2" and AutoTokenizer.from_pretrained(tmp_path)(shown)["input_ids"] == right:
        pytest.skip("this transformers has not the trap: the loader could be simplified")


def test_pieces_keep_the_spaces_that_llamas_decoder_removes() -> None:
    """Its decoder drops the space before the first word, also of a single token."""
    words = ["<unk>", "</s>", "\u2581Step", "\u2581one", "s", "\u2581"]
    model = models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>")
    backend = Tokenizer(model)
    steps = [decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    codec = Codec(tokenizer)
    assert codec.decode([2, 3, 4, 5, 3]) == "Step ones  one"
    assert codec.pieces([2, 3, 4, 3, 1]) == [" Step", " one", "s", " one", ""]
