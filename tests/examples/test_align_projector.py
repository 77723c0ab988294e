"""examples/align_projector.yaml on a tiny FastVLM whose tokenizer is not the world's."""

from pathlib import Path
from typing import Any

import pytest
import tiny_families
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from segcredit.config import apply_overrides, parse_recipe, recipe_settings
from segcredit.runlog import read_run
from segcredit.train.trainer import Trainer

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "align_projector.yaml"
SHORT = (
    "stages=[{kind: warm_start, phase: look, steps: 25, batch: 8, lr: 3.0e-3, schedule: constant},"
    " {kind: warm_start, phase: solve, steps: 2, batch: 4, lr: 1.0e-3, warmup_steps: 0},"
    " {kind: pretrain_critic, steps: 1}, {kind: optimize, steps: 1}]",
    *("rollout={prompts: 4, max_tokens: 12}", "update.minibatches=1"),
    *("evaluation={every: 0, prompts: 4}", "model.attention=eager"),
)


def ordinary_tokenizer(kind: Any, image: str = "") -> PreTrainedTokenizerFast:
    """Byte pairs of English text, as a pretrained language model has them."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", *kind.others, *kind.tokens.values()]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator((ROOT / "README.md").read_text().splitlines(), trainer)
    words = PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token=special[0], pad_token=special[0]
    )
    words.chat_template = tiny_families.TEMPLATE % kind.image
    return words


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:no model family here describes")
def test_a_model_with_its_own_tokenizer_learns_captions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_families.require("fast_vlm")
    monkeypatch.setattr(tiny_families, "tokenizer", ordinary_tokenizer)
    model = tiny_families.save_vision("fast_vlm", tmp_path / "model")
    settings = recipe_settings(str(EXAMPLE))
    recipe = parse_recipe(apply_overrides(settings, [f"model.path={model}", *SHORT]))
    Trainer.from_recipe(recipe).train(tmp_path / "run")
    log = read_run(tmp_path / "run")
    captions = [x["nll"] for x in log.metrics if "nll" in x][:25]
    assert captions[-1] < 0.7 * captions[0]
    policy = max((tmp_path / "run" / "checkpoints").glob("*/policy"))
    before, after = (load_file(x / "model.safetensors") for x in (model, policy))
    changed = {name for name, x in before.items() if not torch.equal(x, after[name])}
    assert any("projector" in name for name in changed)
    assert any("language_model" in name for name in changed)
    assert not any("vision_tower" in name for name in changed)


def test_the_documents_show_the_command() -> None:
    line = "segcredit train examples/align_projector.yaml model.path=FOLDER"
    assert line in EXAMPLE.read_text()
    assert line in (ROOT / "docs" / "models.md").read_text()
    assert f"[{EXAMPLE.name}]({EXAMPLE.name})" in (EXAMPLE.parent / "README.md").read_text()
