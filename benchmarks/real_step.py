"""Measure a whole training step of a model of real size: memory and time of each phase.

    python benchmarks/real_step.py --data geo3k/train.jsonl             # Qwen2.5-VL-3B on a GPU
    python benchmarks/real_step.py --family gemma3 --prompts 64 --tokens 512   # Gemma-3-4B, by name
    python benchmarks/real_step.py --size small --prompts 8 --tokens 16 # smoke test on a CPU

The weights are random, with the real shapes; --family takes those of family_shapes.py. Rows with
images come from --data (as segcredit prepare writes them) or are generated. Utilization compares
the operations of the update (including the recomputed forward pass) with 990 TFLOP/s, the peak of
an H200 in bfloat16.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
import transformers
from family_shapes import SIZES, save_family
from peak import Peak
from real_shapes import config_for, policy_for, save_small_files, tokenizer_for

import segcredit.train.build
from segcredit.config import Recipe, parse_recipe
from segcredit.data import load_prompts
from segcredit.data.worlds import make_world
from segcredit.train.build import build, make_plan
from segcredit.train.stages import stage_of
from segcredit.types import Encoded, Prompt, Rollouts, Sampling

PEAK = 990e12
PHASES = ("sample", "score", "annotate", "credit", "update", "sync")


def recipe_of(given: argparse.Namespace, folder: Path, rows: Path) -> Recipe:
    """Make the recipe from the command-line options."""
    on_gpu = torch.cuda.is_available()
    return parse_recipe(
        {
            "name": "real-step",
            "model": {
                "path": str(folder),
                "dtype": given.dtype or ("bfloat16" if on_gpu else "float32"),
                "compile": given.compile,
                "lora": {"rank": given.lora, "alpha": given.lora} if given.lora else None,
            },
            "data": {"train": [str(rows)], "max_prompt_tokens": 1024},
            "reward": "geo3k",
            "algorithm": {"name": given.algorithm}
            | ({"kl": 0.0} if given.algorithm == "grpo" else {}),
            "stages": [{"kind": "optimize", "steps": given.steps}],
            "rollout": {
                "prompts": given.prompts,
                "samples": given.samples,
                "max_tokens": given.tokens,
                "rows": given.rows,
                "engine": given.engine,
                "vllm": {"memory": given.vllm_memory},
                "old_logp": "recompute" if given.no_sampling else "auto",
            },
            "update": {"minibatches": given.minibatches, "tokens_per_micro": given.micro},
            "memory": {
                "recompute_activations": not given.keep_activations,
                "offload_optimizer": given.offload,
            },
            "optimizer": {"lr": 1e-6, "critic_lr": 2e-6},
            "evaluation": {"every": 0},
        }
    )


def with_prompts(recipe: Recipe, prompts: int) -> Recipe:
    """Return the recipe with another number of prompts per step."""
    rollout = recipe.rollout.model_copy(update={"prompts": prompts})
    return recipe.model_copy(update={"rollout": rollout})


def operations(
    rollouts: Rollouts, size: str, vision: bool, recompute: bool, lora: int = 0
) -> tuple[float, float]:
    """Count floating-point operations of one epoch's update, of the policy and of the critic.

    With LoRA, neither the adapters' operations nor gradients of the frozen weights are counted.
    """
    config = config_for(size, vision)
    text = config.get_text_config()
    hidden, layers = text.hidden_size, text.num_hidden_layers
    wide = hidden // text.num_attention_heads * text.num_key_value_heads
    weights = layers * (
        2 * hidden * hidden + 2 * hidden * wide + 3 * hidden * text.intermediate_size
    )
    passes, again = (4 if recompute else 3), (1 if lora else 0)
    total = 0.0
    assert rollouts.prompts is not None
    written = rollouts.mask.sum(dim=1).tolist()
    for prompt, count in zip(rollouts.prompts, written, strict=True):
        length = len(prompt.tokens) + count - 1
        total += (passes - again) * 2 * weights * length
        total += passes * layers * 2 * hidden * length * length  # causal: half of 4
        if prompt.vision:
            tower = config.vision_config
            own = tower.depth * (
                4 * tower.hidden_size**2 + 3 * tower.hidden_size * tower.intermediate_size
            )
            total += (1 if lora else passes) * 2 * own * len(prompt.vision["pixel_values"])
    head = 2 * hidden * text.vocab_size * sum(written)
    return total + (4 - again) * head, total


def generated(count: int, folder: Path) -> Path:
    """Write generated rows with images, for use without --data."""
    import json

    world = make_world("shape_grid")
    lines = []
    for index in range(count):
        prompt: Prompt = world.prompt("train", index)
        (folder / f"{index}.png").write_bytes(prompt.images[0])  # type: ignore[arg-type]
        lines.append(
            json.dumps(
                {
                    "problem": prompt.messages[0]["content"],
                    "answer": prompt.answer,
                    "images": [f"{index}.png"],
                }
            )
        )
    path = folder / "rows.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


class RandomEngine:
    """Rollout engine that returns random tokens of full length, without a model."""

    def __init__(self, device: str) -> None:
        self.device = device

    def load_weights(self, policy: torch.nn.Module) -> None:
        """Do nothing: there is no model."""

    def sample(
        self, prompts: Sequence[Encoded], sampling: Sampling, generator: torch.Generator
    ) -> Rollouts:
        """Sample token ids below 8000, which are all plain text."""
        shape = (len(prompts), sampling.max_tokens)
        tokens = torch.randint(0, 8000, shape, generator=generator).to(self.device)
        zeros = torch.zeros(shape, device=self.device)
        return Rollouts(
            tokens=tokens,
            mask=torch.ones_like(tokens, dtype=torch.bool),
            logp_old=zeros,
            reward=zeros[:, 0],
            group=torch.arange(len(prompts), device=self.device),
            truncated=zeros[:, 0].bool(),
            entropy=zeros,
            prompts=list(prompts),
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", default="3b", help="0.5b, 3b, 7b or small")
    parser.add_argument("--family", choices=sorted(SIZES), help="another family than Qwen2.5-VL")
    parser.add_argument(
        "--model", type=Path, help="folder of --family's checkpoint; written if it does not exist"
    )
    parser.add_argument("--data", type=Path, help="rows with images (jsonl, parquet)")
    parser.add_argument("--dtype", help="default: bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument("--algorithm", default="sapo")
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--samples", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=256, help="responses sampled at once")
    parser.add_argument("--minibatches", type=int, default=4)
    parser.add_argument("--micro", type=int, default=32_768, help="tokens per micro-batch")
    parser.add_argument(
        "--steps", type=int, default=2, help="number of steps; the first is warm-up"
    )
    parser.add_argument("--warm", type=int, help="prompts of the warm-up step (default: all)")
    parser.add_argument(
        "--offload",
        nargs="?",
        default=False,
        const=True,
        choices=["stream"],
        help="offload optimizer state to CPU memory between updates, or always (stream)",
    )
    parser.add_argument("--keep-activations", action="store_true", help="no gradient checkpointing")
    parser.add_argument("--compile", action="store_true", help="compile layers with torch.compile")
    parser.add_argument(
        "--lora", type=int, default=0, help="rank of LoRA adapters; 0 trains all weights"
    )
    parser.add_argument("--engine", default="hf", help="hf or vllm")
    parser.add_argument(
        "--vllm-memory", type=float, default=0.3, help="vLLM's fraction of the GPU memory"
    )
    parser.add_argument("--no-sampling", action="store_true", help="random tokens as responses")
    parser.add_argument(
        "--profile", action="store_true", help="profile the kernels of the last step"
    )
    given = parser.parse_args()
    if not given.family and (given.model or given.dtype):
        parser.error("--model and --dtype need --family.")
    transformers.utils.logging.disable_progress_bar()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        rows = given.data or generated(given.prompts, folder)
        prompts = load_prompts([str(rows)], limit=given.prompts).prompts
        texts = [x["content"] for prompt in prompts for x in prompt.messages]
        begin = time.perf_counter()
        policy = None
        model = given.model or folder / "model"
        if given.family:
            if not model.exists():
                save_family(given.family, model, texts, given.size == "small", device)
        else:
            dtype = torch.bfloat16 if device == "cuda" else torch.float32
            policy = policy_for(given.size, True, tokenizer_for(texts), device, dtype)
            save_small_files(policy, model)
            segcredit.train.build.check_weight_files = lambda _: None  # there are no weight files
        plan = make_plan(recipe_of(given, model, rows))
        state = build(plan, policy)
        if given.no_sampling:
            state.engine = RandomEngine(device)  # type: ignore[assignment]
        stage_of(state, plan.recipe.stages[0]).enter()
        count = sum(x.numel() for x in state.policy.model.parameters())
        print(
            f"torch {torch.__version__}, transformers {transformers.__version__}, "
            f"{torch.cuda.get_device_name() if device == 'cuda' else 'CPU'}; "
            f"{given.family or 'qwen2_5_vl'} {given.size}: "
            f"{count / 1e9:.2f} B parameters; loaded in {time.perf_counter() - begin:.0f} s",
            flush=True,
        )
        found = []
        peak = Peak()
        for number in range(given.steps):
            if number == min(1, given.steps - 1):
                peak.__enter__()
            state.recipe = plan.recipe
            if not number and given.warm and given.steps > 1:
                state.recipe = with_prompts(plan.recipe, given.warm)
            begin = time.perf_counter()
            last = given.profile and len(found) == given.steps - 1
            with torch.profiler.profile() if last else nullcontext() as seen:
                metrics, stepped = stage_of(state, plan.recipe.stages[0]).step()
            state.step += 1
            state.stage_step += 1
            seconds = time.perf_counter() - begin
            assert stepped is not None
            found.append((metrics, seconds, stepped.batch.rollouts))
            shown = {
                k: round(v, 4)
                for k, v in metrics.items()
                if k.startswith(("time/", "memory/", "agreement/"))
            }
            print(f"step {len(found)}: {seconds:.1f} s {shown}", flush=True)
    peak.__exit__(None, None, None)
    report(found[1:] or found, given)
    print(f"peak GPU memory {peak.gib:.1f} GiB")
    if seen is not None:
        key = "self_cuda_time_total" if device == "cuda" else "self_cpu_time_total"
        table = seen.key_averages().table(sort_by=key, row_limit=30, max_name_column_width=70)
        lines = [f"{x[:72]}{x[-110:]}" for x in table.splitlines()]
        print("\n".join(lines))


def report(
    found: list[tuple[dict[str, float], float, Rollouts]], given: argparse.Namespace
) -> None:
    """Print medians over the steps after the first."""
    wall = statistics.median(x[1] for x in found)
    print(f"\n{'phase':<10}{'s':>9}{'share':>8}{'peak GiB':>10}")
    for phase in PHASES:
        if f"time/{phase}" in found[0][0]:
            seconds = statistics.median(x[0][f"time/{phase}"] for x in found)
            memory = max(x[0].get(f"memory/{phase}", 0.0) for x in found)
            print(f"{phase:<10}{seconds:>9.3f}{seconds / wall:>8.1%}{memory:>10.1f}")
    print(f"{'step':<10}{wall:>9.3f}")
    metrics, _, rollouts = found[-1]
    written = int(rollouts.mask.sum())
    assert rollouts.prompts is not None
    asked = sum(len(x.tokens) for x in rollouts.prompts)
    print(
        f"{len(rollouts)} responses, {written / len(rollouts):.0f} tokens each, "
        f"{asked / len(rollouts):.0f} tokens per prompt\n"
        f"sampling {written / metrics['time/sample']:,.0f} tokens/s, "
        f"whole step {written / wall:,.0f} tokens/s\n"
        f"credit {metrics['time/credit'] / wall:.3%} of the step; "
        f"ratio error {metrics.get('agreement/ratio_error', float('nan')):.3g}"
    )
    if given.family:
        return  # operations are counted for Qwen2.5-VL only
    work = operations(rollouts, given.size, True, not given.keep_activations, given.lora)
    done = work[0] + (work[1] if "value_loss" in metrics else 0.0)
    print(
        f"update: {done / 1e15:.2f} PFLOP, {done / metrics['time/update'] / PEAK:.1%} of "
        f"{PEAK / 1e12:.0f} TFLOP/s"
    )


if __name__ == "__main__":
    main()
