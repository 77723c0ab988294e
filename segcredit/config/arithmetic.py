"""What no single setting can say: whether they fit each other."""

from typing import TYPE_CHECKING

from segcredit.algorithms.asks import compares_responses

if TYPE_CHECKING:
    from segcredit.config.recipe import PretrainCritic, Recipe


def check_arithmetic(recipe: "Recipe") -> None:
    """What no single field can say: batch sizes, and what a method asks of a run."""
    problems = []
    rows = recipe.rollout.prompts * recipe.rollout.samples
    if recipe.rollout.tree is not None:
        rows *= recipe.rollout.tree.branching[0]
    if recipe.update.minibatches > rows:
        problems.append(
            f"update.minibatches is {recipe.update.minibatches}, but a step has only {rows} "
            f"responses (rollout.prompts × rollout.samples)"
        )
    for number, stage in enumerate(recipe.stages):
        if stage.kind == "warm_start" and stage.hold and stage.schedule == "constant":
            problems.append(
                f"stages.{number}.hold is {stage.hold:g}, but a constant rate does not fall: "
                f"remove it, or set stages.{number}.schedule to linear or cosine"
            )
        if stage.kind == "pretrain_critic":
            problems += _pretraining_problems(f"stages.{number}", stage, recipe)
    algorithm = recipe.make_algorithm()
    name = recipe.algorithm if isinstance(recipe.algorithm, str) else recipe.algorithm["name"]
    if compares_responses(algorithm) and recipe.rollout.samples < 2:
        problems.append(
            f"{name} compares the responses to one prompt, so rollout.samples must be at least 2; "
            f"got {recipe.rollout.samples}"
        )
    if any(stage.kind == "pretrain_critic" for stage in recipe.stages) and (
        "value" not in algorithm.needs
    ):
        problems.append(f"stages pretrain a critic, but {name} has none: remove pretrain_critic")
    if recipe.model.critic is not None and "value" not in algorithm.needs:
        problems.append(f"model.critic is given, but {name} has no critic: remove it")
    if recipe.model.critic is not None and recipe.model.lora is not None:
        problems.append(
            "model.critic is a whole critic, and with model.lora it is an adapter: remove one of "
            "the two"
        )
    if recipe.rollout.engine == "vllm" and not recipe.recomputes:
        problems.append(
            "rollout.old_logp is sampler, but vLLM gives no entropies: remove it, or set recompute"
        )
    if recipe.rollout.graphs is True and recipe.rollout.engine == "vllm":
        problems.append(
            "rollout.graphs is hf's: remove it; vLLM has its own unless rollout.vllm.eager is true"
        )
    if recipe.rollout.graphs is True and recipe.model.attention == "flash_attention_2":
        problems.append(
            "rollout.graphs needs attention with a mask: set model.attention=auto, or graphs=false"
        )
    if recipe.rollout.mismatch_cap is not None and not recipe.recomputes:
        problems.append(
            "rollout.mismatch_cap corrects the sampler's log-probabilities by recomputed ones: set "
            "rollout.old_logp=recompute, or remove it"
        )
    if recipe.memory.offload_optimizer == "stream" and recipe.model.dtype == "float32":
        problems.append(
            "memory.offload_optimizer=stream is for weights in half precision, whose float32 "
            "originals rest in main memory: set model.dtype=bfloat16, or offload_optimizer=true"
        )
    if recipe.memory.offload_optimizer == "stream" and recipe.memory.shard:
        problems.append(
            "memory.shard divides the optimizer among the processes; with offload_optimizer=true "
            "its moments rest in main memory, stream is for whole ones: set it to true or false"
        )
    if recipe.memory.shard and recipe.optimizer.kind != "adamw":
        problems.append(
            f"memory.shard divides the moments of adamw; got optimizer.kind "
            f"{recipe.optimizer.kind}: remove one of the two"
        )
    if recipe.memory.shard and recipe.model.lora is not None:
        problems.append(
            "memory.shard divides all weights, model.lora trains adapters on one copy: remove one "
            "of the two"
        )
    if recipe.model.tiny and recipe.data.world is None:
        problems.append(
            "model.tiny takes its vocabulary from a world: set data.world, or model.path"
        )
    if not any(stage.kind == "warm_start" for stage in recipe.stages) and recipe.model.tiny:
        problems.append("a tiny model starts from random weights: begin with a warm_start stage")
    if problems:
        raise ValueError("\n".join(problems))


def _pretraining_problems(place: str, stage: "PretrainCritic", recipe: "Recipe") -> list[str]:
    """Whether a batch of the critic's own has enough responses for its gradient steps."""
    if stage.prompts is None and stage.minibatches is None:
        return []  # as in any other step
    prompts, asked = f"{place}.prompts", stage.prompts
    if asked is None:
        prompts, asked = "rollout.prompts", recipe.rollout.prompts
    steps, count = f"{place}.minibatches", stage.minibatches
    if count is None:
        steps, count = "update.minibatches", recipe.update.minibatches
    samples = recipe.rollout.samples
    if asked * samples >= count:
        return []
    times = "" if samples == 1 else f" × rollout.samples {samples}"
    return [f"{prompts} {asked}{times} is too few for {steps} {count}"]
