"""Runs verl as a user does, in a process of its own, on two CPU workers. Tests only."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
FP32 = "{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}"


def base(folder: Path, model: Path, rows: Path, steps: int) -> dict[str, object]:
    """Settings of a small run: Ray, FSDP2 actor and critic, two data-parallel workers."""
    actor, rollout, ref = (f"actor_rollout_ref.{x}" for x in ("actor", "rollout", "ref"))
    found: dict[str, object] = {
        "data.train_files": rows,
        "data.val_files": rows,
        "data.train_batch_size": 32,
        "data.max_prompt_length": 32,
        "data.max_response_length": 12,
        "data.dataloader_num_workers": 0,
        "data.seed": 1,
        "actor_rollout_ref.model.path": model,
        "+actor_rollout_ref.model.override_config.attn_implementation": "sdpa",
        "actor_rollout_ref.model.use_remove_padding": False,
        "actor_rollout_ref.model.enable_gradient_checkpointing": False,
        f"{actor}.strategy": "fsdp2",
        f"{actor}.ppo_mini_batch_size": 16,
        f"{actor}.ppo_micro_batch_size_per_gpu": 8,
        f"{actor}.optim.lr": 4e-3,
        f"{actor}.use_torch_compile": False,
        f"{actor}.fsdp_config.use_torch_compile": False,
        f"+{actor}.fsdp_config.mixed_precision": FP32,
        f"{ref}.log_prob_micro_batch_size_per_gpu": 16,
        f"{ref}.fsdp_config.use_torch_compile": False,
        f"{ref}.use_torch_compile": False,
        f"{ref}.fsdp_config.model_dtype": "fp32",
        f"+{ref}.fsdp_config.mixed_precision": FP32,
        f"{rollout}.name": "hf",
        f"{rollout}.tensor_model_parallel_size": 2,
        f"{rollout}.log_prob_micro_batch_size_per_gpu": 16,
        f"{rollout}.calculate_log_probs": False,
        f"{rollout}.agent.num_workers": 1,
        f"{rollout}.val_kwargs.do_sample": False,
        "critic.strategy": "fsdp2",
        "critic.model.path": model,
        "critic.model.tokenizer_path": model,
        "+critic.model.override_config.attn_implementation": "sdpa",
        "critic.model.use_remove_padding": False,
        "critic.model.enable_gradient_checkpointing": False,
        "critic.ppo_micro_batch_size_per_gpu": 8,
        "critic.optim.lr": 1e-3,
        "critic.fsdp.use_torch_compile": False,
        "+critic.fsdp.mixed_precision": FP32,
        "reward.num_workers": 1,
        "reward.custom_reward_function.path": HERE / "toy.py",
        "reward.reward_model.rollout.name": "hf",
        "trainer.device": "cpu",
        "trainer.n_gpus_per_node": 2,
        "trainer.nnodes": 1,
        "trainer.logger": "[console,file]",
        "trainer.project_name": "toy",
        "trainer.experiment_name": "run",
        "trainer.default_local_dir": folder / "checkpoints",
        "trainer.total_training_steps": steps,
        "trainer.total_epochs": 100,
        "trainer.val_before_train": False,
        "trainer.test_freq": -1,
        "trainer.save_freq": -1,
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
        "+ray_kwargs.ray_init.address": "local",  # whatever else runs on this machine
        "ray_kwargs.ray_init.num_cpus": 14,
        "+ray_kwargs.ray_init.num_gpus": 2,
        "+ray_kwargs.ray_init.object_store_memory": 200_000_000,
        "+ray_kwargs.ray_init.include_dashboard": False,
        "hydra.run.dir": folder / "hydra",
    }
    return found


def environment(folder: Path, **extra: str) -> dict[str, str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "PYTEST"))}
    return {
        **inherited,
        "PYTHONPATH": f"{HERE}:{ROOT}",
        "VERL_PLATFORM": "cpu",
        "VERL_USE_EXTERNAL_MODULES": "verl_on_cpu",
        "VERL_FILE_LOGGER_PATH": str(folder / "metrics.jsonl"),
        "OMP_NUM_THREADS": "1",
        "HYDRA_FULL_ERROR": "1",
        "RAY_DISABLE_MEMORY_MONITOR": "1",
        "RAY_memory_monitor_refresh_ms": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",  # else its workers wait for everybody else
        "RAY_prestart_worker_first_driver": "0",  # nor start one per CPU, whether needed or not
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "NO_PROXY": "*",
        **extra,
    }


@dataclass
class Ran:
    """What a run left behind."""

    code: int
    output: str
    folder: Path
    log: str = "metrics.jsonl"

    @property
    def metrics(self) -> list[dict[str, float]]:
        path = self.folder / self.log
        lines = path.read_text().splitlines() if path.exists() else []
        return [row["data"] for row in map(json.loads, lines)]

    def column(self, name: str) -> list[float]:
        return [row[name] for row in self.metrics if name in row]


def arguments(settings: dict[str, object]) -> list[str]:
    return [f"{key}={value}" for key, value in settings.items()]


MAIN = ["-m", "verl.trainer.main_ppo"]


def start(
    folder: Path, settings: dict[str, object], program: list[str] = MAIN, **env: str
) -> subprocess.Popen[str]:
    """verl's own entry point; its output goes to a file."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "output.txt").open("a") as output:
        return subprocess.Popen(
            [sys.executable, str(HERE / "fork_server.py"), *program, *arguments(settings)],
            env=environment(folder, **env),
            cwd=folder,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )


def finish(process: subprocess.Popen[str], folder: Path, seconds: float = 600) -> Ran:
    """Wait for it, and leave nothing of it behind."""
    try:
        code = process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        code = -1
    stop(process)
    return Ran(code, (folder / "output.txt").read_text(errors="replace"), folder)


def stop(process: subprocess.Popen[str]) -> None:
    """End the run's whole session: Ray's processes belong to it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def run(
    folder: Path,
    settings: dict[str, object],
    seconds: float = 600,
    program: list[str] = MAIN,
    **env: str,
) -> Ran:
    return finish(start(folder, settings, program, **env), folder, seconds)
