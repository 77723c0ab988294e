"""TRL's side of step.py: a GRPOTrainer that runs one step for every line on standard input.

step.py starts this file with the Python of .venv-trl and a JSON job file; you do not need to call
it directly. It prints one line of JSON when it is ready and one per step. It does not import
segcredit.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

VERSION = "1.16.0"
"""The version of TRL in the comparison."""


def worth(text: str) -> float:
    """Return the reward of both sides: cheap, and different between responses."""
    return text.count("=") / (1 + len(text))


def score(completions: list[Any], **_: Any) -> list[float]:
    """Return the same rewards, with TRL's interface."""
    return [worth(completion[0]["content"]) for completion in completions]


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    answers, sys.stdout = sys.stdout, sys.stderr  # keep the output of libraries out of the answers
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

    import torch

    torch.set_num_threads(job["threads"])

    import transformers
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback

    transformers.utils.logging.set_verbosity_error()
    rows, samples, steps = job["prompts"], job["samples"], job["steps"]

    class Timed(trl.GRPOTrainer):
        """Trainer that records time and tokens of the last rollout phase."""

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            begin = time.perf_counter()
            found = super()._generate_and_score_completions(inputs)
            self.collected = {
                "collect": time.perf_counter() - begin,
                "tokens": int(found["completion_mask"].sum()),
                "prompt_tokens": int(found["prompt_mask"].sum()),
                "responses": len(found["completion_mask"]),
            }
            return found

    class Turns(TrainerCallback):
        """Callback that waits for a line before each step and times the step from there."""

        def _wait(self) -> None:
            if not sys.stdin.readline():
                sys.exit()
            self.begin, self.cpu = time.perf_counter(), time.process_time()

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            versions = {x.__name__: x.__version__ for x in (trl, transformers, torch)}
            say({"versions": versions})
            self._wait()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            seconds, cpu = time.perf_counter() - self.begin, time.process_time() - self.cpu
            say({"seconds": seconds, "cpu": cpu, **trainer.collected})
            if state.global_step < state.max_steps:
                self._wait()

    def say(answer: dict[str, Any]) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    config = trl.GRPOConfig(
        output_dir=job["output"],
        per_device_train_batch_size=job["prompts_per_step"] * samples,
        gradient_accumulation_steps=1,  # one generation, one gradient step
        num_generations=samples,
        num_iterations=1,
        max_completion_length=job["max_tokens"],
        max_steps=steps,
        temperature=1.0,
        learning_rate=job["lr"],
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        beta=0.0,  # no reference model
        loss_type="grpo",
        scale_rewards="group",
        shuffle_dataset=False,
        bf16=False,
        gradient_checkpointing=False,  # TRL's default is True, which computes each forward twice
        use_cpu=True,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = Timed(
        model=AutoModelForCausalLM.from_pretrained(
            job["model"], dtype=torch.float32, attn_implementation="sdpa"
        ),
        # AutoTokenizer would replace the saved splitting rules by those of the architecture
        processing_class=PreTrainedTokenizerFast.from_pretrained(job["model"]),
        reward_funcs=score,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": messages} for messages in rows]),
        callbacks=[Turns()],
    )
    trainer.train()


if __name__ == "__main__":
    main()
