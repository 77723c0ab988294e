"""A tiny text model, its tokenizer and a task that any policy gradient can learn. Tests only."""

import json
from pathlib import Path


def make_tokenizer():
    """One token per byte, and Qwen's special tokens: what ``AutoTokenizer`` makes of a Qwen2."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Tokenizer

    from segcredit.data.worlds.tokens import CHAT_TEMPLATE, END, PAD, VISION

    vocabulary = {x: n for n, x in enumerate(sorted(ByteLevel.alphabet()))}
    return Qwen2Tokenizer(
        vocab=vocabulary,
        merges=[],
        unk_token=None,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=["<|im_start|>", *VISION],
        chat_template=CHAT_TEMPLATE,
    )


def make_model(folder: Path) -> Path:
    """A Qwen2 of some 100,000 parameters with random weights, as a Hugging Face folder."""
    import torch
    from transformers import AutoModelForCausalLM

    from segcredit.models import tiny_config

    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    config = tiny_config("qwen2", tokenizer, hidden=64, layers=2, heads=4)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_value_model(folder: Path) -> Path:
    """The same with a head of one number, as verl's own critic loads it: nothing left to chance."""
    import torch
    from transformers import AutoModelForTokenClassification

    from segcredit.models import tiny_config

    torch.manual_seed(1)
    tokenizer = make_tokenizer()
    config = tiny_config("qwen2", tokenizer, hidden=64, layers=2, heads=4)
    config.num_labels = 1
    AutoModelForTokenClassification.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_rows(path: Path, number: int = 256) -> Path:
    rows = [
        {
            "data_source": "toy",
            "prompt": [{"role": "user", "content": f"say {i}"}],
            "ability": "toy",
            "reward_model": {"style": "rule", "ground_truth": "letters"},
            "extra_info": {"index": i},
        }
        for i in range(number)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def letters(completions, **columns):
    """The same for the native trainer's reward functions."""
    return [compute_score("toy", text, None) for text in completions]


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    """How many of twelve characters are small letters: a tenth of all bytes are."""
    return sum("a" <= x <= "z" for x in solution_str) / 12
