"""Measure TRL's GRPO on a model of real size, for comparison with real_step.py --algorithm grpo.

    python benchmarks/real_step.py --algorithm grpo --engine vllm --prompts 32 --samples 8 \
        --minibatches 1 --data geo3k/train.jsonl --offload
    python benchmarks/real_trl.py --prompts 32 --samples 8 --data geo3k/train.jsonl
    python benchmarks/real_trl.py --family gemma3 --no-vllm --tokens 256 --data geo3k/train.jsonl
    python benchmarks/real_trl.py --prompts 4 --samples 2 --tokens 16 --micro 4 --size small \
        --no-vllm --data geo3k/train.jsonl                              # smoke test on a CPU

Requires trl, datasets and, unless --no-vllm is given, vLLM. Both scripts use the same random
weights, tokenizer, prompts in the same order (verified token by token), lengths, suppressed tokens
and vLLM: one generation, one gradient step, no KL, gradient checkpointing, vLLM in sleep mode
during the update. With --dtype float32 the master weights are float32 and the computation is
bfloat16, as in segcredit. With --dtype bfloat16 all weights are bfloat16, and small updates are
lost in rounding.

Two adaptations for TRL 1.16:
  - Prompts are padded on the left. TRL does this for a processor that it loads itself, but not for
    one that it is given; with right padding its mm_token_type_ids do not match its tokens.
  - vLLM gets one token per image. TRL passes the expanded image tokens, vLLM expands the first one
    again, and the prompt becomes nearly twice as long.
"gap" in the output, the mean difference between vLLM's and the trainer's log-probabilities, shows
whether both process the same prompt.

Remaining differences:
  - image resizing: torchvision (segcredit: Pillow), to the same sizes
  - reward: free (segcredit compares answers)
  - micro-batches: counted in responses (segcredit: in tokens)
  - optimizer state: on the GPU (segcredit: offloaded with --offload)
  - log-probabilities: include suppressed tokens (0.002 of the gap)
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from family_shapes import SIZES, save_family
from peak import Peak
from real_shapes import SPECIAL, policy_for, tokenizer_for

from segcredit.data import load_prompts
from segcredit.models import Codec, Policy
from segcredit.models.codec import MARK
from segcredit.models.images import open_image
from segcredit.train.source import PromptList
from segcredit.train.state import derive
from segcredit.types import Prompt

LONGEST = 1024
"""Maximum prompt length in tokens, as in real_step.py."""


def worth(completions: list[Any], **_: Any) -> list[float]:
    """Return cheap rewards that differ between responses."""
    return [len(x[0]["content"]) % 7 / 6 for x in completions]


def trl_settings(on_gpu: bool) -> dict[str, Any]:
    """Return the settings of GRPOConfig that small_trl.py has, too: one update, no KL, no logs."""
    return {
        "num_iterations": 1,
        "temperature": 1.0,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1.0,
        "beta": 0.0,
        "loss_type": "grpo",
        "shuffle_dataset": False,
        "bf16": on_gpu,
        "use_cpu": not on_gpu,
        "vllm_mode": "colocate",
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }


def rows_of(prompts: list[Prompt]) -> Any:
    """Convert prompts to TRL's rows: messages in parts, images in a separate column."""
    from datasets import Dataset

    return Dataset.from_list(
        [
            {
                "prompt": [{"role": x["role"], "content": parts_of(x)} for x in prompt.messages],
                "images": [open_image(x) for x in prompt.images],
            }
            for prompt in prompts
        ]
    )


def parts_of(message: Mapping[str, str]) -> list[dict[str, str]]:
    """Split a message into text and image parts."""
    pieces: list[dict[str, str]] = []
    for number, text in enumerate(message["content"].split(MARK)):
        pieces += [{"type": "image"}] if number else []
        pieces += [{"type": "text", "text": text}] if text else []
    return pieces


def once(tokens: list[int]) -> list[int]:
    """Collapse the tokens of each image to one."""
    image = SPECIAL["<|image_pad|>"]
    pairs = zip([None, *tokens], tokens, strict=False)
    return [token for before, token in pairs if not before == token == image]


def check_same(prompts: list[Prompt], codec: Codec, processor: Any) -> None:
    """Raise an error if TRL's processor gives other tokens than our codec."""
    for prompt in prompts:
        images = iter([open_image(x) for x in prompt.images])
        messages = [
            {
                "role": x["role"],
                "content": [
                    {**part, "image": next(images)} if part["type"] == "image" else part
                    for part in parts_of(x)
                ],
            }
            for x in prompt.messages
        ]
        read = processor.apply_chat_template(
            [messages], add_generation_prompt=True, tokenize=True, return_dict=True
        )
        if read["input_ids"][0] != codec.encode(prompt)[0].tolist():
            raise RuntimeError(
                f"TRL's processor and ours tokenize prompt {prompt.id!r} differently."
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", default="3b", help="0.5b, 3b, 7b or small")
    parser.add_argument("--family", choices=sorted(SIZES), help="needs --no-vllm")
    parser.add_argument(
        "--model", type=Path, help="folder of --family's checkpoint; written if it does not exist"
    )
    parser.add_argument("--data", type=Path, required=True, help="rows with images")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--micro", type=int, default=8, help="responses per micro-batch")
    parser.add_argument(
        "--steps", type=int, default=2, help="number of steps; the first is warm-up"
    )
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--vllm-memory", type=float, default=0.3)
    parser.add_argument("--no-vllm", action="store_true", help="sample with transformers' generate")
    given = parser.parse_args()
    if given.model and not given.family:
        parser.error("--model needs --family.")
    on_gpu = torch.cuda.is_available()
    if not (on_gpu or given.no_vllm):
        parser.error("TRL's vLLM needs a GPU; none was found. Add --no-vllm.")
    if given.family and not given.no_vllm:
        parser.error("one token per image for vLLM is written for Qwen2.5-VL. Add --no-vllm.")
    wait = torch.cuda.synchronize if on_gpu else lambda: None
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

    import trl
    from transformers import TrainerCallback

    transformers.utils.logging.disable_progress_bar()
    prompts = load_prompts([str(given.data)], limit=given.prompts).prompts
    texts = [x["content"] for prompt in prompts for x in prompt.messages]
    found: list[dict[str, float]] = []
    peak = Peak()

    class Timed(trl.GRPOTrainer):
        """Trainer that times the rollout phase and passes vLLM one token per image."""

        def _generate_single_turn(self, prompt_ids: Any, *rest: Any, **named: Any) -> Any:
            if self.use_vllm:
                prompt_ids = [once(x) for x in prompt_ids]
            return super()._generate_single_turn(prompt_ids, *rest, **named)

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            wait()
            begin = time.perf_counter()
            made = super()._generate_and_score_completions(inputs)
            wait()
            found.append(
                {
                    "collect": time.perf_counter() - begin,
                    "written": float(made["completion_mask"].sum()),
                    "asked": float(made["prompt_mask"].sum()),
                }
            )
            gap = self._metrics["train"].get("sampling/sampling_logp_difference/mean")
            if gap:  # between vLLM's and the trainer's log-probabilities; should be rounding only
                found[-1]["gap"] = gap[-1]
            return made

    class Watch(TrainerCallback):
        """Callback that times whole steps."""

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            if len(found) == min(1, given.steps - 1):
                peak.__enter__()
            wait()
            self.begin = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            wait()
            found[-1]["step"] = time.perf_counter() - self.begin
            print(f"step {len(found)}: {found[-1]}, peak {peak.gib:.1f} GiB", flush=True)

    with tempfile.TemporaryDirectory() as place:
        device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
        folder = given.model or Path(place, "model")
        if given.family:
            if not folder.exists():
                save_family(given.family, folder, texts, given.size == "small", device)
            policy = Policy.from_pretrained(folder)
        else:
            policy = policy_for(given.size, True, tokenizer_for(texts), device, dtype)
            policy.save(folder)
        assert policy.banned is not None
        codec, banned = policy.codec, policy.banned.nonzero().flatten().tolist()
        del policy
        torch.cuda.empty_cache()
        rows = load_prompts(
            [str(given.data)], max_prompt_tokens=LONGEST, count_tokens=codec.count_tokens
        ).prompts
        prompts = PromptList(rows, derive(0, "data")).take(0, given.prompts * given.steps)
        processor = transformers.AutoProcessor.from_pretrained(folder)
        processor.tokenizer.padding_side = "left"
        check_same(prompts, codec, processor)
        kind = transformers.AutoModelForImageTextToText
        model = kind.from_pretrained(
            folder, dtype=getattr(torch, given.dtype), attn_implementation="sdpa"
        )
        total = given.prompts * given.samples
        config = trl.GRPOConfig(
            output_dir=str(Path(place, "out")),
            per_device_train_batch_size=given.micro,
            gradient_accumulation_steps=total // given.micro,
            num_generations=given.samples,
            max_completion_length=given.tokens,
            max_steps=given.steps,
            learning_rate=1e-6,
            gradient_checkpointing=True,
            use_vllm=not given.no_vllm,
            vllm_enable_sleep_mode=on_gpu,
            vllm_gpu_memory_utilization=given.vllm_memory,
            vllm_max_model_length=LONGEST + given.tokens,
            # random weights would sample image tokens and unused ids
            generation_kwargs={"suppress_tokens": banned}
            if given.no_vllm
            else {"logit_bias": dict.fromkeys(banned, -100.0)},
            **trl_settings(on_gpu),
        )
        trainer = Timed(
            model=model,
            processing_class=processor,
            reward_funcs=worth,
            args=config,
            train_dataset=rows_of(prompts),
            callbacks=[Watch()],
        )
        trainer.train()
        peak.__exit__(None, None, None)
    allocated = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0
    kept = found[1:] or found
    step, collect = (statistics.median(x[k] for x in kept) for k in ("step", "collect"))
    print(
        f"\nTRL {trl.__version__}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}, {given.family or 'qwen2_5_vl'} {given.size}, "
        f"weights in {given.dtype}\n"
        f"{total} responses, {kept[-1]['written'] / total:.0f} tokens each, "
        f"{kept[-1]['asked'] / total:.0f} tokens per prompt\n"
        f"step {step:.1f} s: sampling, rewards and π_old {collect:.1f}, update {step - collect:.1f}"
        f"\npeak GPU memory {peak.gib:.1f} GiB, {allocated:.1f} of it tensors of this process"
    )


if __name__ == "__main__":
    main()
