"""The tokenizers: ordinary Hugging Face files that mean the same when read again."""

from pathlib import Path

import pytest
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3VLConfig,
)

from segcredit.data.worlds import WORLDS, make_world
from segcredit.data.worlds.tokens import SPECIAL, build_tokenizer


@pytest.fixture(params=WORLDS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def test_every_token_is_its_own_text(name: str) -> None:
    tokenizer = make_world(name).tokenizer()
    vocabulary = tokenizer.get_vocab()
    assert sorted(vocabulary.values()) == list(range(len(tokenizer)))
    for text, number in vocabulary.items():
        assert tokenizer.decode([number]) == text
        assert tokenizer(text)["input_ids"] == [number]
    assert "\n" in vocabulary
    assert "\\boxed{" in vocabulary
    assert {tokenizer.decode([vocabulary[x]], skip_special_tokens=True) for x in SPECIAL} == {""}


def test_names_that_models_look_for(name: str) -> None:
    tokenizer = make_world(name).tokenizer()
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token == "<|endoftext|>"
    assert len({tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}) == 3
    assert set(tokenizer.all_special_tokens) == set(SPECIAL)
    assert set(tokenizer("\n")) == {"input_ids", "attention_mask"}


@pytest.mark.parametrize(
    ("config", "reader"),
    [
        (None, AutoTokenizer),
        (LlamaConfig, AutoTokenizer),
        (Qwen3Config, AutoTokenizer),
        (Qwen2_5_VLConfig, AutoTokenizer),
        (Qwen3VLConfig, AutoTokenizer),
        (Qwen2Config, PreTrainedTokenizerFast),  # AutoTokenizer insists on Qwen2's own there
    ],
)
def test_saved_and_read_again(name: str, config: type | None, reader: type, tmp_path: Path) -> None:
    """Also beside a model whose own tokenizer is of another kind."""
    world = make_world(name)
    tokenizer = world.tokenizer()
    tokenizer.save_pretrained(tmp_path)
    if config is not None:
        config().save_pretrained(tmp_path)
    again = reader.from_pretrained(tmp_path)
    assert again.get_vocab() == tokenizer.get_vocab()
    assert again.chat_template == tokenizer.chat_template
    for special in ("eos_token_id", "pad_token_id", "unk_token_id", "all_special_ids"):
        assert getattr(again, special) == getattr(tokenizer, special)
    for number in range(5):
        text = world.demonstration(number).response
        ids = tokenizer(text)["input_ids"]
        assert again(text)["input_ids"] == ids
        assert again.decode(ids) == text
        messages = list(world.prompt("test", number).messages)
        assert again.apply_chat_template(messages) == tokenizer.apply_chat_template(messages)


def test_chat_template() -> None:
    tokenizer = make_world("shape_grid").tokenizer()
    expected = (
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>list ?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    marked = [{"role": "user", "content": "<image>list ?"}]
    parts = [{"type": "image"}, {"type": "text", "text": "list ?"}]
    for messages in (marked, [{"role": "user", "content": parts}]):
        made = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert made == expected
        ids = tokenizer(made)["input_ids"]
        assert tokenizer.decode(ids) == expected
        assert len(ids) == 13
    answered = [*marked, {"role": "assistant", "content": "none"}]
    made = tokenizer.apply_chat_template(answered, tokenize=False)
    assert made == f"{expected}none<|im_end|>\n"


def test_prompts_have_no_unknown_word(name: str) -> None:
    world = make_world(name)
    tokenizer = world.tokenizer()
    for prompt in world.prompts("test", 0, 50):
        messages = [{"role": "system", "content": ""}, *prompt.messages]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids) == text
        pictures = ids.count(tokenizer.convert_tokens_to_ids("<|image_pad|>"))
        assert pictures == len(prompt.images)


@pytest.mark.parametrize("text", ["ü", "été", "🙂", "\x00", "\\boxed", "  ", "\r\t"])
def test_unknown_characters(name: str, text: str) -> None:
    tokenizer = make_world(name).tokenizer()
    assert tokenizer(text)["input_ids"] == [tokenizer.unk_token_id]
    ids = tokenizer(f"\n{text}\n")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["\n", "<unk>", "\n"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "\n\n"
    assert tokenizer("")["input_ids"] == []


def test_the_longest_word_wins() -> None:
    tokenizer = build_tokenizer(["1", "12", "1 ", "(+", "(", "+"])
    assert tokenizer.tokenize("1212 (+(1 ") == ["12", "12", "<unk>", "(+", "(", "1 "]
