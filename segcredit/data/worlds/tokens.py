"""Build a tokenizer for a small vocabulary; it is saved in the Hugging Face format."""

import re
from collections.abc import Callable, Iterable

from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from segcredit.data.formats import ROLES

UNKNOWN = "<unk>"
PAD = "<|endoftext|>"
END = "<|im_end|>"
VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
SPECIAL = (PAD, "<|im_start|>", END, *VISION, UNKNOWN)
"""Special tokens with Qwen's names, which its models and tools look up."""
BOX = ("\\boxed{", "}")

CHAT_TEMPLATE = """\
{%- set picture = '<|vision_start|><|image_pad|><|vision_end|>' -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['content'] is string -%}
{{- message['content'] | replace('<image>', picture) -}}
{%- else -%}
{%- for part in message['content'] -%}
{{- picture if part['type'] == 'image' else part['text'] -}}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""
"""Qwen's template without a default system message; an image is a part or an ``<image>``."""


def build_tokenizer(words: Iterable[str]) -> PreTrainedTokenizerFast:
    """Build a tokenizer with one token per word; a word may contain spaces.

    The longest matching word is used; unknown text becomes ``<unk>``. Tokens are joined without
    spaces, so decoding returns the encoded text.
    """
    vocabulary = list(dict.fromkeys([*SPECIAL, "\n", *ROLES, *BOX, *words]))
    plain = sorted(vocabulary[len(SPECIAL) :], key=len, reverse=True)
    tokenizer = Tokenizer(WordLevel({word: n for n, word in enumerate(vocabulary)}, UNKNOWN))
    tokenizer.pre_tokenizer = Split(Regex("|".join(map(re.escape, plain))), "isolated")
    tokenizer.decoder = Fuse()
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in SPECIAL])
    make: Callable[..., PreTrainedTokenizerFast] = PreTrainedTokenizerFast  # untyped there
    return make(
        tokenizer_object=tokenizer,
        unk_token=UNKNOWN,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=["<|im_start|>", *VISION],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )
