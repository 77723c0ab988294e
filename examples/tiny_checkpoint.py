"""A tiny checkpoint for your own rows: try data and reward without a download or a GPU.

    python examples/tiny_checkpoint.py train.jsonl tiny
    segcredit train my.yaml model.path=tiny model.dtype=float32 rollout.max_tokens=32

The first command trains a small byte-level BPE on the rows' text and saves a tiny Qwen2 with random
weights, a chat template and this tokenizer as a Hugging Face folder; for rows with images it is a
Qwen2.5-VL. You should see: the folder and the number of parameters, after a few seconds. Its
weights are random, so it tries rows, reward and settings; do not expect it to learn.

Documentation: docs/get-started.md, docs/data.md.
"""

import argparse
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from segcredit.data import load_prompts
from segcredit.data.worlds.tokens import CHAT_TEMPLATE, END, PAD, SPECIAL
from segcredit.models import Policy


def train_tokenizer(texts, size=1024):
    """Train a byte-level BPE, which can encode any text, with Qwen's special tokens."""
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[*SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words.train_from_iterator(texts, trainer)
    names = {"eos_token": END, "pad_token": PAD, "chat_template": CHAT_TEMPLATE}
    return PreTrainedTokenizerFast(tokenizer_object=words, **names)


def save_tiny_checkpoint(data, folder, seed=0):
    """Save a tiny model with random weights for these rows; return its number of parameters."""
    prompts = load_prompts([str(data)]).prompts
    texts = [message["content"] for x in prompts for message in x.messages]
    texts += [str(x.answer) for x in prompts]
    name = "qwen2_5_vl" if any(x.images for x in prompts) else "qwen2"
    policy = Policy.tiny(name, train_tokenizer(texts), seed=seed, hidden=64, layers=2, heads=4)
    policy.save(Path(folder))
    return policy.model.num_parameters()


def main(argv=None):
    """Save the checkpoint and print its size."""
    parser = argparse.ArgumentParser(description="Save a tiny checkpoint for your own rows.")
    parser.add_argument("data", type=Path, help="rows, as in docs/data.md")
    parser.add_argument("folder", type=Path, help="folder for the checkpoint")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights")
    args = parser.parse_args(argv)
    number = save_tiny_checkpoint(args.data, args.folder, args.seed)
    print(f"{args.folder}: a Hugging Face folder with {number:,} parameters")


if __name__ == "__main__":
    main()
