"""Measure TRL's GRPO on a small pretrained model, for comparison with small_model.py.

    python benchmarks/small_model.py MODEL DATA --algorithm grpo --prompts 64 --length 0 \
        --micro 65536
    python benchmarks/small_trl.py MODEL DATA
    python benchmarks/small_model.py MODEL DATA --algorithm grpo --prompts 64 --length 0 \
        --micro 65536 --set rollout.engine=vllm
    python benchmarks/small_trl.py MODEL DATA --vllm

    python benchmarks/small_trl.py MODEL DATA --prompts 2 --tokens 8 --micro 2   # on a CPU

Requires trl and datasets. Both scripts use the same model, questions, template, temperature, length
limit and end token. A step is one generation, then four gradient steps. On a GPU the weights are
float32 and the computation is bfloat16, as in segcredit; with --dtype bfloat16 all weights are
bfloat16, and small updates are lost in rounding. The reward costs nothing on TRL's side. TRL counts
micro-batches in padded responses, and stores activations, as segcredit does here.
"""

import argparse
import itertools
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from real_trl import trl_settings

from segcredit.config import load_recipe
from segcredit.data import load_prompts

GRADIENT_STEPS = 4
"""Gradient steps per generation, as in the recipes real/smollm2-135m/…"""


def worth(completions: list[str], **_: Any) -> list[float]:
    """Return cheap rewards that differ between responses."""
    return [len(x) % 7 / 6 for x in completions]


def questions(data: Path, template: str, count: int) -> list[str]:
    """Return the prompts as text, each question in the recipe's template."""
    prompts = load_prompts([str(data)], limit=count).prompts
    return [template.replace("{question}", x.messages[-1]["content"]) for x in prompts]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="folder of a model")
    parser.add_argument("data", type=Path, help="rows with questions")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256, help="maximum length of a response")
    parser.add_argument("--micro", type=int, default=128, help="responses per micro-batch")
    parser.add_argument("--repeat", type=int, default=3, help="measured steps, after one warm-up")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--vllm", action="store_true", help="sample with vLLM, in the same process")
    parser.add_argument("--vllm-memory", type=float, default=0.4)
    given = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    wait = torch.cuda.synchronize if on_gpu else lambda: None
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

    import trl
    from datasets import Dataset

    transformers.utils.logging.disable_progress_bar()
    template = load_recipe("real/smollm2-135m/grpo").data.template
    assert template is not None
    steps, total = given.repeat + 1, given.prompts * given.samples
    rows = questions(given.data, template, given.prompts * steps)
    begins: list[float] = []
    collected: list[dict[str, float]] = []

    class Timed(trl.GRPOTrainer):
        """Trainer that notes when each generation begins and ends."""

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            wait()
            begins.append(time.perf_counter())
            made = super()._generate_and_score_completions(inputs)
            wait()
            collected.append(
                {
                    "sample, reward, π_old": time.perf_counter() - begins[-1],
                    "response tokens": float(made["completion_mask"].sum()),
                    "prompt tokens": float(made["prompt_mask"].sum()),
                }
            )
            return made

    with tempfile.TemporaryDirectory() as place:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            given.model, dtype=getattr(torch, given.dtype), attn_implementation="sdpa"
        )
        each = total // GRADIENT_STEPS
        config = trl.GRPOConfig(
            output_dir=place,
            per_device_train_batch_size=given.micro,
            gradient_accumulation_steps=each // given.micro,
            steps_per_generation=total // given.micro,
            num_generations=given.samples,
            max_completion_length=given.tokens,
            max_steps=steps * GRADIENT_STEPS,
            learning_rate=1e-9,
            gradient_checkpointing=False,
            use_vllm=given.vllm,
            vllm_gpu_memory_utilization=given.vllm_memory,
            vllm_max_model_length=256 + given.tokens,
            **trl_settings(on_gpu),
        )
        trainer = Timed(
            model=model,
            processing_class=transformers.AutoTokenizer.from_pretrained(given.model),
            reward_funcs=worth,
            args=config,
            train_dataset=Dataset.from_list([{"prompt": x} for x in rows]),
        )
        trainer.train()
        wait()
        begins.append(time.perf_counter())
    device = torch.cuda.get_device_name() if on_gpu else "CPU"
    print(f"{device}, torch {torch.__version__}, transformers {transformers.__version__}")
    print(f"TRL {trl.__version__}, weights in {given.dtype}, {total} responses a step")
    whole = [end - begin for begin, end in itertools.pairwise(begins)]
    found = [x | {"step": y} for x, y in zip(collected, whole, strict=True)]
    for x in found:
        x["update"] = x["step"] - x["sample, reward, π_old"]
    for name in found[0]:
        value = statistics.median(x[name] for x in found[1:])
        text = f"{value:,.0f}" if "tokens" in name else f"{value:.3f}"
        print(f"{name:24s} {text:>10s}")


if __name__ == "__main__":
    main()
