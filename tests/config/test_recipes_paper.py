"""The recipes hold the paper's numbers, which are written down here a second time, from the paper.

Source: arXiv 2605.01327, Table 7 (Appendix F), §5.1 and Appendix A; for the baselines on text, the
configs of McGill-NLP/VinePPO.
"""

from collections.abc import Callable
from typing import Any

import pytest
from each import each

from segcredit.algorithms import ALGORITHMS, PolicyGradient, sapo
from segcredit.algorithms.credit import GAE, GroupZScore, LeaveOneOut
from segcredit.algorithms.objective import K3, Clipped, GeometricMean, LossKL, RewardKL, TokenRatio
from segcredit.config import (
    Optimize,
    PretrainCritic,
    Recipe,
    load_recipe,
    parse_recipe,
    shipped_recipes,
)
from segcredit.core.losses import k3
from segcredit.partition import Newline, ProbabilityAccumulate, StepMarkers, Token, TopEntropy

OTHERS = ("mini/", "real/", "gsm8k/qwen2.5", "geo3k/qwen2.5-vl-3b-lora")
"""Not in the paper, with settings of our own."""
ALL = [name for name in shipped_recipes() if "/" in name and not name.startswith(OTHERS)]
VISION = {
    "qwen2.5-vl-3b": "Qwen/Qwen2.5-VL-3B-Instruct",
    "qwen2.5-vl-7b": "Qwen/Qwen2.5-VL-7B-Instruct",
    "qwen3-vl-4b-thinking": "Qwen/Qwen3-VL-4B-Thinking",
}
LORA = "qwen2.5-vl-7b-lora"
"""Not in the paper: so that a 7B model fits one GPU."""
TEXT = {
    ("gsm8k", "rhomath-1.1b"): "realtreetune/rho-1b-sft-GSM8K",
    ("gsm8k", "deepseekmath-7b"): "realtreetune/deepseekmath-7b-sft-GSM8K",
    ("math", "rhomath-1.1b"): "realtreetune/rho-1b-sft-MATH",
    ("math", "deepseekmath-7b"): "realtreetune/deepseekmath-7b-sft-MATH-v2",
}

SHARED = {
    "Total training steps": 200,
    "Train batch size": 512,
    "Mini batch size": 128,
    "Max prompt length": 1024,
    "Max response length": 2048,
    "Actor LR": 1e-6,
    "Eval. temperature": 0.6,
    "Eval. top-p": 0.95,
}
WITH_CRITIC = {"Gamma": 1.0, "Critic LR": 2e-6, "KL penalty in reward": "K1", "KL coef": 0.001}
TABLE_7: dict[str, dict[str, Any]] = {
    "sapo": {**SHARED, **WITH_CRITIC, "Lambda": 0.99},
    "grpo": {**SHARED, "KL loss type": "K3", "KL coef": 0.01, "Rollout": 8},
    "vc-ppo": {**SHARED, **WITH_CRITIC, "Lambda": 0.99, "Lambda (Critic)": 1.0},
    "ppo": {**SHARED, **WITH_CRITIC, "Lambda": 0.95},
}
FURTHER: dict[str, dict[str, Any]] = {
    "vineppo": {"samples": 9, "clip": (0.2, 0.2), "kl": 1e-4},
    "spo-chain": {"threshold": 0.9, "every": 5, "samples": 9, "clip": (0.2, 0.2), "kl": 1e-4},
    "spo-tree": {"threshold": 0.9, "normalize": False, "clip": (0.2, 0.2), "kl": 1e-4},
    "restem": {"per_prompt": 10},
    "dpo-positive": {"penalty": 50.0, "pairs_per_prompt": 64},
}
"""The rest of Figure 4, which the paper quotes: VinePPO's configs, SPO's (arXiv 2505.23564)."""
TABLE_3 = {"newline": Newline(), "step": StepMarkers(), "probability": ProbabilityAccumulate()}
"""The rows beside "Entropy-based"."""


def credit_of(recipe: Recipe) -> Any:
    return algorithm_of(recipe).credit


def algorithm_of(recipe: Recipe) -> PolicyGradient:
    algorithm = recipe.make_algorithm()
    assert isinstance(algorithm, PolicyGradient)
    return algorithm


def kl_of(recipe: Recipe) -> tuple[str, float]:
    """Where it acts and by which estimator, and its coefficient."""
    algorithm = algorithm_of(recipe)
    parts = [x for x in (algorithm.kl, *algorithm.terms) if x is not None]
    (kl,) = parts
    if isinstance(kl, RewardKL):
        return "reward K1", kl.coef
    assert isinstance(kl, LossKL)
    assert kl.estimator is k3 or isinstance(kl.estimator, K3)
    return "loss K3", kl.coef


LOOK_UP: dict[str, Callable[[Recipe], Any]] = {
    "Total training steps": lambda recipe: recipe.stages[-1].steps,
    "Train batch size": lambda recipe: recipe.rollout.prompts,
    "Mini batch size": lambda recipe: recipe.rollout.prompts / recipe.update.minibatches,
    "Max prompt length": lambda recipe: recipe.data.max_prompt_tokens,
    "Max response length": lambda recipe: recipe.rollout.max_tokens,
    "Lambda": lambda recipe: credit_of(recipe).lam,
    "Lambda (Critic)": lambda recipe: credit_of(recipe).lam_critic,
    "Gamma": lambda recipe: credit_of(recipe).gamma,
    "Actor LR": lambda recipe: recipe.optimizer.lr,
    "Critic LR": lambda recipe: recipe.optimizer.critic_lr,
    "KL penalty in reward": lambda recipe: kl_of(recipe)[0].removeprefix("reward "),
    "KL loss type": lambda recipe: kl_of(recipe)[0].removeprefix("loss "),
    "KL coef": lambda recipe: kl_of(recipe)[1],
    "Rollout": lambda recipe: recipe.rollout.samples,
    "Eval. temperature": lambda recipe: recipe.evaluation.temperature,
    "Eval. top-p": lambda recipe: recipe.evaluation.top_p,
}


def test_there_is_a_recipe_for_every_run() -> None:
    vision = {f"geo3k/{model}-{method}" for model in VISION for method in TABLE_7}
    methods = ("sapo", "ppo", "grpo", "rloo", *FURTHER)
    text = {f"{data}/{model}-{method}" for data, model in TEXT for method in methods}
    units = {f"geo3k/qwen2.5-vl-7b-sapo-{row}" for row in TABLE_3}
    adapted = {f"geo3k/{LORA}-{method}" for method in TABLE_7}
    assert set(ALL) == vision | text | units | adapted


@each("name", ALL)
def test_every_recipe_is_valid_complete_and_of_its_name(name: str) -> None:
    recipe = load_recipe(name)
    assert parse_recipe(recipe.as_dict()) == recipe
    assert recipe.name == name.replace("/", "-")
    rows = recipe.rollout.prompts * recipe.rollout.samples
    assert rows % recipe.update.minibatches == 0, "mini-batches of one size"
    assert isinstance(recipe.stages[-1], Optimize)
    assert recipe.model.dtype == "bfloat16"
    assert recipe.memory.recompute_activations
    assert recipe.data.train
    assert recipe.data.test


@each("model", VISION)
@each("method", TABLE_7)
def test_geo3k_is_table_7(method: str, model: str) -> None:
    recipe = load_recipe(f"geo3k/{model}-{method}")
    found = {row: LOOK_UP[row](recipe) for row in TABLE_7[method]}
    assert found == TABLE_7[method]
    assert recipe.model.path == VISION[model]
    assert recipe.rollout.samples == TABLE_7[method].get("Rollout", 1)
    name = {"grpo": "grpo_verl"}.get(method, method.replace("-", "_"))  # the authors' code is verl
    assert recipe.make_algorithm() == ALGORITHMS[name](), "the methods' defaults are Table 7's, too"


@pytest.mark.parametrize("row", TABLE_3)
def test_table_3_changes_the_units_alone(row: str) -> None:
    recipe = load_recipe(f"geo3k/qwen2.5-vl-7b-sapo-{row}")
    assert recipe.make_algorithm() == sapo(partition=TABLE_3[row])
    base = load_recipe("geo3k/qwen2.5-vl-7b-sapo")
    assert (recipe.data.suffix is not None) == (row == "step"), "steps must be asked for"
    same = {"name": base.name, "algorithm": base.algorithm}
    data = recipe.data.model_copy(update={"suffix": None})
    assert recipe.model_copy(update={**same, "data": data}) == base


@pytest.mark.parametrize("method", TABLE_7)
def test_lora_departs_from_table_7_in_what_it_says(method: str) -> None:
    whole = load_recipe(f"geo3k/{LORA.removesuffix('-lora')}-{method}")
    adapted = load_recipe(f"geo3k/{LORA}-{method}")
    assert adapted.model.lora is not None
    assert adapted.model.lora.targets == "language"
    assert adapted.optimizer.lr == pytest.approx(10 * whole.optimizer.lr)
    assert adapted.optimizer.critic_lr == pytest.approx(10 * whole.optimizer.critic_lr)
    departs = {"model", "optimizer", "memory", "save", "name"}
    assert whole.model_dump(exclude=departs) == adapted.model_dump(exclude=departs)
    same = whole.model.model_copy(update={"lora": adapted.model.lora})
    assert adapted.model == same
    rates = {"lr": adapted.optimizer.lr, "critic_lr": adapted.optimizer.critic_lr}
    assert adapted.optimizer == whole.optimizer.model_copy(update=rates)


@pytest.mark.parametrize("model", VISION)
def test_the_units_of_the_methods(model: str) -> None:
    ours = algorithm_of(load_recipe(f"geo3k/{model}-sapo"))
    assert ours.credit.over == ours.ratio.over == TopEntropy(0.30)  # §5.1
    assert isinstance(ours.credit, GAE)
    assert ours.credit.value_at == "start"  # s_m is the prefix before the segment, §4.1
    assert isinstance(ours.ratio, GeometricMean)  # Eq. 8
    assert isinstance(ours.surrogate, Clipped)
    assert ours.surrogate.low == ours.surrogate.high  # Eq. 9 has one ε
    for method in ("ppo", "vc-ppo"):
        token = algorithm_of(load_recipe(f"geo3k/{model}-{method}"))
        assert token.credit.over == Token()
        assert isinstance(token.ratio, TokenRatio)
    grpo = algorithm_of(load_recipe(f"geo3k/{model}-grpo"))
    assert isinstance(grpo.credit, GroupZScore)
    assert grpo.critic is None


def test_only_vc_ppo_pretrains_its_critic() -> None:
    for name in ALL:
        kinds = [type(stage) for stage in load_recipe(name).stages]
        assert (PretrainCritic in kinds) == name.endswith("vc-ppo"), name


@pytest.mark.parametrize(("data", "model"), TEXT)
def test_sapo_on_text_is_table_7_where_it_can_be(data: str, model: str) -> None:
    recipe = load_recipe(f"{data}/{model}-sapo")
    expected = TABLE_7["sapo"] | {"Max response length": 1024}  # RhoMath reads 2048 in all
    assert {row: LOOK_UP[row](recipe) for row in expected} == expected
    assert recipe.make_algorithm() == ALGORITHMS["sapo"]()
    assert (recipe.update.epochs, recipe.rollout.samples) == (1, 1)
    assert (recipe.optimizer.schedule, recipe.optimizer.warmup_steps) == ("constant", 0)


@each("method", ["ppo", "grpo", "rloo"])
@each(("data", "model"), TEXT)
def test_baselines_on_text_are_vineppos(data: str, model: str, method: str) -> None:
    recipe = load_recipe(f"{data}/{model}-{method}")
    rollout, update, optimizer = recipe.rollout, recipe.update, recipe.optimizer
    assert rollout.prompts * rollout.samples == 512  # num_episodes_per_iteration
    assert rollout.samples == 8  # num_rollouts_per_sample
    assert (rollout.temperature, rollout.max_tokens) == (0.6, 1024)
    assert 512 / update.minibatches == 64  # target_train_batch_size
    assert update.epochs == 2  # num_epochs_per_iteration
    assert (optimizer.lr, optimizer.critic_lr) == (1e-6, 1e-6)
    assert (optimizer.weight_decay, optimizer.max_grad_norm) == (0.0, 1.0)
    steps = {"gsm8k": 650, "math": 1000}[data]  # total_num_iterations
    if method == "grpo":
        steps = 1000  # SPO's GRPO inherits its chain's total_num_iterations
    assert recipe.stages == [Optimize(steps=steps)]
    assert optimizer.schedule == "linear"  # WarmupDecayLR
    assert optimizer.warmup_steps == pytest.approx(0.03 * steps, abs=0.5)  # warmup_ratio
    assert (recipe.evaluation.temperature, recipe.evaluation.top_p) == (0.35, 0.9)
    algorithm = algorithm_of(recipe)
    assert isinstance(algorithm.surrogate, Clipped)
    assert (algorithm.surrogate.low, algorithm.surrogate.high) == (0.2, 0.2)  # cliprange
    expected: dict[str, Any] = {
        "ppo": (("reward K1", 1e-4), GAE, TokenRatio),  # refKl0.0001
        "grpo": (("loss K3", 1e-4), GroupZScore, TokenRatio),  # SPO's
        "rloo": (("loss K3", 1e-4), LeaveOneOut, TokenRatio),  # SPO's
    }
    kl, credit, ratio = expected[method]
    assert kl_of(recipe) == kl
    assert isinstance(algorithm.credit, credit)
    assert isinstance(algorithm.ratio, ratio)
    if method != "ppo":
        assert algorithm == ALGORITHMS[f"{method}_spo"]()
    if method == "ppo":
        assert (algorithm.credit.lam, algorithm.credit.gamma) == (1.0, 1.0)  # lam1


@each("method", FURTHER)
@each(("data", "model"), TEXT)
def test_the_rest_of_figure_4_is_its_authors(data: str, model: str, method: str) -> None:
    recipe = load_recipe(f"{data}/{model}-{method}")
    own: dict[str, Any] = {
        ("gsm8k", "vineppo"): {"most": 25},
        ("gsm8k", "dpo-positive"): {"beta": 0.3},
        ("math", "dpo-positive"): {"beta": 0.1},
    }.get((data, method), {})
    expected = ALGORITHMS[method.replace("-", "_")](**FURTHER[method], **own)
    assert recipe.make_algorithm() == expected
    rollout, update = recipe.rollout, recipe.update
    assert (rollout.temperature, rollout.max_tokens) == (0.6, 1024)
    assert recipe.optimizer.lr == 1e-6
    all_questions = {"gsm8k": 7473, "math": 12_000}[data]
    (stage,) = recipe.stages
    steps = {"gsm8k": 650, "math": 1000}[data]
    drawn = (stage.steps, rollout.prompts, rollout.samples, update.epochs)
    assert (
        drawn
        == {
            "vineppo": (steps, 64, 8, 2),
            "spo-chain": (1000, 64, 8, 2),
            "spo-tree": (1000, 16, 1, 1),
            "restem": (10, all_questions, 8, 8),
            "dpo-positive": (1, all_questions, 64, 3),
        }[method]
    )
    if method == "spo-tree":
        assert rollout.tree is not None
        assert rollout.tree.branching == [6, 6, 6]
        assert rollout.tree.tokens == {"gsm8k": 30, "math": 100}[data]


@each("name", ALL)
def test_data_rewards_and_sizes(name: str) -> None:
    recipe, data = load_recipe(name), name.partition("/")[0]
    reward, size = {"geo3k": ("geo3k", 601), "gsm8k": ("gsm8k", 1319), "math": ("math", 500)}[data]
    assert recipe.reward == reward
    assert recipe.evaluation.prompts == size, "the whole test set"
    folder = "data/geo3k" if data == "geo3k" else f"data/{data}-plain"
    assert recipe.data.train == [f"{folder}/train.parquet"]
    assert recipe.data.test == [f"{folder}/test.parquet"]
    asked = None if data == "geo3k" else "[MATH_TASK] Problem:\n{question}\n\nSolution:"
    assert recipe.data.template == asked, "as VinePPO's checkpoints were taught"
    if data != "geo3k":
        (path,) = [path for (a, b), path in TEXT.items() if name.startswith(f"{a}/{b}-")]
        assert recipe.model.path == path
        assert recipe.data.max_prompt_tokens is not None
        assert recipe.data.max_prompt_tokens + recipe.rollout.max_tokens <= 2048


def test_ablations_are_overrides() -> None:
    """Table 2 and Figure 5."""
    recipe = "geo3k/qwen2.5-vl-7b-sapo"
    naive = load_recipe(recipe, ["algorithm.name=sapo_token_ratio"])
    assert naive.make_algorithm() == ALGORITHMS["sapo_token_ratio"]()
    for k in range(10, 101, 10):
        swept = algorithm_of(load_recipe(recipe, [f"algorithm.fraction={k / 100}"]))
        assert swept.credit.over == swept.ratio.over == TopEntropy(k / 100)
    theirs = load_recipe(recipe, ["algorithm=sapo_authors", "reward.length_penalty=authors"])
    assert theirs.make_algorithm() == ALGORITHMS["sapo_authors"]()
    assert theirs.reward == {"name": "geo3k", "length_penalty": "authors"}
