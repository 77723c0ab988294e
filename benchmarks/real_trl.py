"""TRL's GRPO on a model of real size, to be put beside real_step.py --algorithm grpo.

    python benchmarks/real_step.py --algorithm grpo --engine vllm --prompts 32 --samples 8 \
        --minibatches 1 --data geo3k/train.jsonl --offload
    python benchmarks/real_trl.py --prompts 32 --samples 8 --data geo3k/train.jsonl

Needs trl, datasets and vLLM. The same random weights, rows, pictures, lengths and vLLM; one
generation, one gradient step, no KL, activations recomputed, vLLM asleep during the update. Weights
are kept in float32 and computed with in bfloat16 (--dtype float32), as ours are, or kept in
bfloat16 alone (--dtype bfloat16), where a small learning rate is lost in rounding.
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from peak import Peak
from real_shapes import policy_for, tokenizer_for

from segcredit.data import load_prompts
from segcredit.images import open_image

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Qwen's, for content in parts."""


def worth(completions: list[Any], **_: Any) -> list[float]:
    """Something that differs between responses and costs nothing."""
    return [len(x[0]["content"]) % 7 / 6 for x in completions]


def rows_of(prompts: list[Any]) -> Any:
    """As TRL reads them: messages, and pictures in a column of their own."""
    from datasets import Dataset

    made = []
    for prompt in prompts:
        messages = [
            {"role": x["role"], "content": x["content"].replace("<image>", "").strip()}
            for x in prompt.messages
        ]
        made.append({"prompt": messages, "images": [open_image(x) for x in prompt.images]})
    return Dataset.from_list(made)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", default="3b", help="0.5b, 3b or 7b")
    parser.add_argument("--data", type=Path, required=True, help="rows with pictures")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--micro", type=int, default=8, help="responses of a micro-batch")
    parser.add_argument("--steps", type=int, default=2, help="the first one warms up")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--vllm-memory", type=float, default=0.3)
    given = parser.parse_args()
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

    import trl
    from transformers import TrainerCallback

    transformers.utils.logging.disable_progress_bar()
    prompts = load_prompts([str(given.data)], limit=given.prompts * given.steps).prompts
    tokenizer = tokenizer_for(x["content"] for prompt in prompts for x in prompt.messages)
    found: list[dict[str, float]] = []
    peak = Peak()

    class Timed(trl.GRPOTrainer):
        """Notes when a step's responses are there."""

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            torch.cuda.synchronize()
            begin = time.perf_counter()
            made = super()._generate_and_score_completions(inputs)
            torch.cuda.synchronize()
            found.append(
                {
                    "collect": time.perf_counter() - begin,
                    "written": float(made["completion_mask"].sum()),
                    "asked": float(made["prompt_mask"].sum()),
                }
            )
            return made

    class Watch(TrainerCallback):
        """Times whole steps."""

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            torch.cuda.synchronize()
            self.begin = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            torch.cuda.synchronize()
            found[-1]["step"] = time.perf_counter() - self.begin
            print(f"step {len(found)}: {found[-1]}, peak {peak.gib:.1f} GiB", flush=True)

    with tempfile.TemporaryDirectory() as place:
        policy = policy_for(given.size, True, tokenizer, "cuda", torch.bfloat16)
        policy.save(Path(place, "model"))
        del policy
        torch.cuda.empty_cache()
        kind = transformers.AutoModelForImageTextToText
        model = kind.from_pretrained(
            Path(place, "model"), dtype=getattr(torch, given.dtype), attn_implementation="sdpa"
        )
        total = given.prompts * given.samples
        config = trl.GRPOConfig(
            output_dir=str(Path(place, "out")),
            per_device_train_batch_size=given.micro,
            gradient_accumulation_steps=total // given.micro,
            num_generations=given.samples,
            num_iterations=1,
            max_completion_length=given.tokens,
            max_steps=given.steps,
            temperature=1.0,
            learning_rate=1e-6,
            lr_scheduler_type="constant",
            max_grad_norm=1.0,
            beta=0.0,
            loss_type="grpo",
            shuffle_dataset=False,
            bf16=True,
            gradient_checkpointing=True,
            use_vllm=True,
            vllm_mode="colocate",
            vllm_enable_sleep_mode=True,
            vllm_gpu_memory_utilization=given.vllm_memory,
            vllm_max_model_length=1024 + given.tokens,
            # random weights would write tokens that stand for pictures, which only prompts may hold
            generation_kwargs={"logit_bias": dict.fromkeys(range(151652, 151657), -100.0)},
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        processor = transformers.AutoProcessor.from_pretrained(Path(place, "model"))
        processor.chat_template = processor.tokenizer.chat_template = TEMPLATE
        trainer = Timed(
            model=model,
            processing_class=processor,
            reward_funcs=worth,
            args=config,
            train_dataset=rows_of(prompts),
            callbacks=[Watch()],
        )
        with peak:
            trainer.train()
    kept = found[1:] or found
    step, collect = (statistics.median(x[k] for x in kept) for k in ("step", "collect"))
    print(
        f"\nTRL {trl.__version__}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}, {given.size}, weights in {given.dtype}\n"
        f"{total} responses, {kept[-1]['written'] / total:.0f} tokens each after "
        f"{kept[-1]['asked'] / total:.0f} of the prompt\n"
        f"step {step:.1f} s: sampling, rewards and π_old {collect:.1f}, update {step - collect:.1f}"
        f"\npeak of the device {peak.gib:.1f} GiB"
    )


if __name__ == "__main__":
    main()
