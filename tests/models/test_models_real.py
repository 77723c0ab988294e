"""Real pretrained models: SmolLM2-135M-Instruct and Gemma-3-270M, whose folders are not shipped.

SmolLM2 has pad = eos, a chat template, and digits that are split one by one. Gemma is a base model
with a tokenizer that adds a begin token, sliding windows, tied embeddings and 262,144 tokens.
"""

import json
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jaxtyping
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from segcredit.config import RecipeError, parse_recipe
from segcredit.models import Critic, Policy
from segcredit.rollout import make_engine
from segcredit.rollout.engines import EngineSettings
from segcredit.runlog import read_run
from segcredit.train.build import make_plan
from segcredit.train.health import begin_token_warning
from segcredit.train.trainer import Trainer
from segcredit.types import Prompt, Rollouts, Sampling

VARIABLE = "SEGCREDIT_REAL_MODELS"
FOLDER = Path(os.environ.get(VARIABLE, ""))
NAMES = {"smollm2": "smollm2-135m-instruct", "gemma": "gemma-3-270m"}
MISSING = [x for x in NAMES.values() if VARIABLE not in os.environ or not (FOLDER / x).is_dir()]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        bool(MISSING), reason=f"needs {VARIABLE}, a folder with the models {', '.join(MISSING)}"
    ),
]

TEMPLATE = "Question: {question}\nAnswer:"
QUESTIONS = [
    "Tom has 3 apples and eats 1. How many are left?",
    "There are 41 short trees and 44 tall trees in the park. Workers will plant 57 short trees "
    "today. How many short trees will the park have when they are finished?",
]
TEMPERATURE = 0.8


@pytest.fixture(scope="module", autouse=True)
def without_shape_checks() -> Iterator[None]:
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="module", params=NAMES)
def policy(request: pytest.FixtureRequest) -> Policy:
    return Policy.from_pretrained(FOLDER / NAMES[request.param], template=TEMPLATE)


def asked(*questions: str) -> list[Prompt]:
    return [
        Prompt(str(n), ({"role": "user", "content": text},), (), "1", {})
        for n, text in enumerate(questions)
    ]


def sampled(policy: Policy, prompts: list[Prompt], max_tokens: int = 12) -> Rollouts:
    settings = EngineSettings(rows=8, max_tokens=max_tokens, graphs=False)
    engine = make_engine("hf", policy, settings)
    sampling = Sampling(max_tokens, TEMPERATURE)
    encoded = [policy.encode(x) for x in prompts]
    return engine.sample(encoded, sampling, torch.Generator().manual_seed(0))


def plain_logp(policy: Policy, rollouts: Rollouts, row: int) -> torch.Tensor:
    """The log-probabilities of a response by a forward pass of transformers, without padding."""
    assert rollouts.prompts is not None
    response = rollouts.tokens[row][rollouts.mask[row]]
    tokens = torch.cat([rollouts.prompts[row].tokens, response])
    with torch.no_grad():
        logits = policy.model(input_ids=tokens[None]).logits[0].float() / TEMPERATURE
    before = logits[-len(response) - 1 : -1].log_softmax(-1)
    return before.gather(-1, response[:, None])[:, 0]


def test_sampler_trainer_and_transformers_agree(policy: Policy) -> None:
    """With padding although pad is eos, and beyond the sliding window of 512 tokens."""
    long = [" ".join([QUESTIONS[0]] * 40)] if "gemma" in policy.model.config.model_type else []
    rollouts = sampled(policy, asked(*QUESTIONS, *long), 8)
    assert rollouts.prompts is not None
    lengths = [len(x.tokens) for x in rollouts.prompts]
    assert len(set(lengths)) > 1
    if long:
        assert max(lengths) > policy.model.config.sliding_window + 8
    with torch.no_grad():
        logp, entropy = policy.score(rollouts, TEMPERATURE, with_entropy=True)
    assert entropy is not None
    assert rollouts.entropy is not None
    mask = rollouts.mask
    assert float((logp - rollouts.logp_old).abs()[mask].max()) < 1e-3
    assert float((entropy - rollouts.entropy).abs()[mask].max()) < 1e-3
    for row in range(len(lengths)):
        expected = plain_logp(policy, rollouts, row)
        assert float((logp[row][mask[row]] - expected).abs().max()) < 1e-3


def test_begin_and_end_tokens(policy: Policy) -> None:
    tokenizer = policy.codec.tokenizer
    tokens = policy.encode(asked(*QUESTIONS)[0]).tokens
    gemma = policy.model.config.model_type == "gemma3_text"
    assert (int(tokens[0]) == tokenizer.bos_token_id) == gemma
    assert policy.end_tokens == (tokenizer.eos_token_id,)
    assert (tokenizer.pad_token_id == tokenizer.eos_token_id) != gemma
    assert int(policy.codec.encode_response(" 2")[-1]) == tokenizer.eos_token_id
    embeddings = policy.model.get_input_embeddings().weight
    policy.model.get_input_embeddings()(torch.tensor([tokenizer.eos_token_id])).sum().backward()
    assert embeddings.grad is not None
    assert float(embeddings.grad[tokenizer.eos_token_id].sum()) != 0.0, "also if pad is eos"
    embeddings.grad = None
    if gemma:
        assert tokenizer.chat_template is None
    else:
        assert policy.codec.turn_end() == tokenizer.eos_token_id
    text = " Tom had 1234 apples:\n48/2 = 24 €\n#### 24"
    ids = policy.codec.encode_response(text)
    assert policy.codec.decode(ids) == text
    assert "".join(policy.codec.pieces(ids[:12].tolist())) == policy.codec.decode(ids[:12])


def test_a_missing_begin_token_is_noticed(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma's perplexity is tens of times as large without it; SmolLM2 does not need it."""
    assert begin_token_warning(policy, asked(*QUESTIONS)) is None
    encode, begin = type(policy.codec).encode, policy.codec.tokenizer.bos_token_id

    def without(codec: Any, prompt: Prompt, *more: Any) -> Any:
        tokens, images = encode(codec, prompt, *more)
        return tokens[1:] if int(tokens[0]) == begin else tokens, images

    monkeypatch.setattr(type(policy.codec), "encode", without)
    found = begin_token_warning(policy, asked(*QUESTIONS))
    if policy.model.config.model_type == "gemma3_text":
        assert found is not None
        assert "Prompts do not begin with the model's begin token '<bos>'" in found
        assert "Begin data.template, or the model's chat template, with '<bos>'" in found
    else:
        assert found is None


def test_saved_with_its_tied_head_and_loaded_again(policy: Policy, tmp_path: Path) -> None:
    policy.save(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118
    again = Policy.from_pretrained(tmp_path, template=TEMPLATE)
    assert again.model.get_output_embeddings().weight is again.model.get_input_embeddings().weight
    assert again.end_tokens == policy.end_tokens
    prompt = asked(*QUESTIONS)[1]
    tokens = policy.encode(prompt).tokens
    assert torch.equal(again.encode(prompt).tokens, tokens)
    with torch.no_grad():
        before, after = (x.model(input_ids=tokens[None]).logits for x in (policy, again))
    assert torch.equal(before, after)


def test_critic_and_adapters(policy: Policy, tmp_path: Path) -> None:
    """A critic starts at V = 0 and learns; adapters change the policy and can be merged."""
    rollouts = sampled(policy, asked(*QUESTIONS), 4)
    critic = Critic.from_policy(policy)
    values = critic(rollouts)
    assert float(values.detach().abs().max()) == 0.0
    (values - 1.0).square()[rollouts.mask].mean().backward()
    assert float(critic.head.bias.grad.abs()) > 0.0  # type: ignore[union-attr]
    del critic
    fresh = Policy.from_pretrained(FOLDER / NAMES[_short(policy)], template=TEMPLATE)
    adapted = fresh.with_lora(4, 8.0, targets="language", vision=False, seed=0)
    with torch.no_grad():
        before, _ = adapted.score(rollouts, 1.0)
        for name, x in adapted.trained().items():
            assert "lm_head" not in name
            x += 0.01
        after, _ = adapted.score(rollouts, 1.0)
    assert float((before - after).abs().max()) > 1e-3
    adapted.save(tmp_path)
    merged = Policy.from_pretrained(tmp_path, template=TEMPLATE)
    with torch.no_grad():
        found, _ = merged.score(rollouts, 1.0)
    assert float((found - after).abs().max()) < 2e-3


def _short(policy: Policy) -> str:
    return "gemma" if policy.model.config.model_type == "gemma3_text" else "smollm2"


# ── Whole runs with SmolLM2 ──────────────────────────────────────────────────────────────────────


def write_rows(folder: Path) -> str:
    """Additions, whose answers the model often knows; demonstrations are short."""
    rows = [
        {"question": f"{a} + 1", "answer": f"#### {a + 1}", "response": f" #### {a + 1}"}
        for a in range(1, 9)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / "rows.jsonl")


def recipe_of(folder: Path, model: Path, **changes: Any) -> dict[str, Any]:
    rows = write_rows(folder)
    return {
        "threads": 1,
        "model": {"path": str(model), "device": "cpu"},
        "data": {"train": [rows], "test": [rows], "template": TEMPLATE},
        "reward": "gsm8k",
        "algorithm": {"name": "sapo", "kl": 0.0},
        "stages": [
            {"kind": "warm_start", "steps": 2, "batch": 4, "lr": 1e-4, "warmup_steps": 0},
            {"kind": "optimize", "steps": 3},
        ],
        "rollout": {"prompts": 4, "max_tokens": 16},
        "update": {"minibatches": 2},
        "optimizer": {"lr": 1e-6, "critic_lr": 1e-5},
        "evaluation": {"every": 0, "prompts": 1, "greedy": False, "watch": 0},
        "save": {"every": 4, "rollouts_every": 0},
    } | changes


def test_three_steps_of_sapo_and_an_exact_resume(tmp_path: Path) -> None:
    """Losses are finite, responses end, and the last step, repeated, gives the same weights."""
    file = tmp_path / "reward.py"
    code = "def length(completions, **columns):\n    return [len(x) / 10 for x in completions]\n"
    file.write_text(code)
    made = recipe_of(tmp_path, FOLDER / NAMES["smollm2"], reward=f"{file}:length")
    run = tmp_path / "run"
    model = Trainer.from_recipe(parse_recipe(made)).train(run).model
    assert model is not None
    trained = load_file(model / "model.safetensors")
    rows = optimized(run)
    assert len(rows) == 3
    for row in rows:
        assert all(math.isfinite(x) for x in row.values() if isinstance(x, float))
        assert row["value_loss"] > 0.0
        assert row["reward_std"] > 0.0
        assert row["truncated"] < 0.5, "responses end, as they were taught"
    shutil.rmtree(model.parent)
    assert Trainer.from_recipe(parse_recipe(made)).train(run, resume=True).model == model
    again = load_file(model / "model.safetensors")
    assert all(torch.equal(x, again[name]) for name, x in trained.items())
    for before, after in zip(rows, optimized(run), strict=True):
        names = [x for x in before if not x.startswith(("time", "memory", "tokens_per"))]
        assert {x: before[x] for x in names} == {x: after[x] for x in names}


def optimized(run: Path) -> list[dict[str, Any]]:
    return [dict(x) for x in read_run(run).metrics if x["stage"] == "optimize"]


def test_an_end_token_read_wrongly_is_refused(tmp_path: Path) -> None:
    """Some releases of transformers read SmolLM2's end token from a GGUF file as <|im_start|>."""
    copy = tmp_path / "model"
    shutil.copytree(FOLDER / NAMES["smollm2"], copy, ignore=shutil.ignore_patterns("*.gguf"))
    file = copy / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": 1}))
    with pytest.raises(RecipeError, match=r"is 1 \('<\|im_start\|>'\); the tokenizer's end token"):
        make_plan(parse_recipe(recipe_of(tmp_path, copy)))
    alone = [{"kind": "optimize", "steps": 1}]
    rows = write_rows(tmp_path)
    chat = recipe_of(tmp_path, copy, stages=alone, data={"train": [rows]})
    with pytest.raises(RecipeError, match=r"the chat template ends a turn with 2 \('<\|im_end\|>'"):
        make_plan(parse_recipe(chat))


def test_a_prompt_beyond_the_context_window_is_an_error(tmp_path: Path) -> None:
    made = recipe_of(tmp_path, FOLDER / NAMES["smollm2"])
    made["rollout"]["max_tokens"] = 8185
    with pytest.raises(ValueError, match=r"set rollout\.max_tokens to 81\d\d or less") as refused:
        make_plan(parse_recipe(made))
    assert "exceed the model's context window of 8192" in str(refused.value)
