"""Settings and environment for verl in a benchmark: one GPU without a network, or a CPU.

On a CPU the benchmark uses the test platform of the plugin (tests/verl, with rollouts by
transformers), so that a GPU run differs only in vLLM and the device.
"""

import os
import sys
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests" / "verl"
PLUGIN = "segcredit.integrations.verl.plugin"
ACTOR, ROLLOUT, REF = (f"actor_rollout_ref.{x}" for x in ("actor", "rollout", "ref"))
ON_A_GPU = {
    "HF_HUB_OFFLINE": "1",
    "HYDRA_FULL_ERROR": "1",
    "NO_PROXY": "*",
    "PYTHONUNBUFFERED": "1",
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    # on some virtual machines Ray's monitor reports full memory from the start
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_worker_niceness": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    # without a network there may be no other interface
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
}

Settings = dict[str, object]


def python_path(*before: Path) -> str:
    """Return PYTHONPATH with absolute paths: Ray's workers have another working directory."""
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join(str(Path(x).absolute()) for x in (*before, *given) if str(x))


@dataclass(frozen=True)
class Place:
    """A machine, with the verl settings and the environment that it needs."""

    small: bool
    """Run on a CPU with reduced sizes."""
    workers: int = 8
    """Number of processes that prepare prompts, and of processes that compute rewards."""
    memory: float = 0.4
    """vLLM's fraction of the GPU memory."""
    store: int = 4 * 10**9
    """Ray's shared memory, in bytes; /dev/shm may be small."""

    @property
    def rollout(self) -> str:
        """Name of verl's rollout engine."""
        return "hf" if self.small else "vllm"

    def settings(self) -> Settings:
        """Return verl settings that do not depend on the model."""
        ray = "+ray_kwargs.ray_init"
        found: Settings = {
            "data.dataloader_num_workers": 0,
            f"{ROLLOUT}.agent.num_workers": 1 if self.small else self.workers,
            "reward.num_workers": 1 if self.small else self.workers,
            "trainer.save_freq": -1,
            "trainer.val_before_train": False,
            "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
            # verl reserves a core per role and helper process; most of them are idle
            "ray_kwargs.ray_init.num_cpus": 14 if self.small else 48,
            f"{ray}.num_gpus": 1,
            f"{ray}.object_store_memory": 200_000_000 if self.small else self.store,
            f"{ray}.include_dashboard": False,
            f"{ray}._node_ip_address": "127.0.0.1",
            f"{ray}.address": "local",  # do not join another Ray cluster
        }
        return found | (self._cpu() if self.small else self._gpu())

    def _uncompiled(self) -> Settings:
        engines = (f"{ACTOR}.fsdp_config", f"{REF}.fsdp_config", "critic.fsdp")
        return {f"{key}.use_torch_compile": False for key in (ACTOR, REF, *engines)}

    def _cpu(self) -> Settings:
        return {
            **self._uncompiled(),
            "reward.reward_model.rollout.name": "hf",
            "trainer.device": "cpu",
        }

    def _gpu(self) -> Settings:
        return {
            # verl compiles only the entropy, and recompiles it for every number of tokens
            **self._uncompiled(),
            f"{ROLLOUT}.gpu_memory_utilization": self.memory,
            f"{ROLLOUT}.max_num_seqs": 512,
            f"{REF}.fsdp_config.model_dtype": "bf16",  # frozen
            f"{ACTOR}.fsdp_config.entropy_from_logits_with_chunking": True,
        }

    def environment(self, folder: Path) -> dict[str, str]:
        """Return the environment of the command and of all processes that Ray starts."""
        if self.small:
            sys.path.insert(0, str(TESTS))
            from running import environment

            found: dict[str, str] = environment(folder)
            found["PYTHONPATH"] += os.pathsep + python_path()
        else:
            found = {**os.environ, **ON_A_GPU}
            # vLLM's sleep mode and PyTorch's expandable segments are incompatible; verl sets them
            found.pop("PYTORCH_CUDA_ALLOC_CONF", None)
            found.pop("PYTORCH_ALLOC_CONF", None)
            found["PYTHONPATH"] = python_path(ROOT)
        found.pop("VERL_FILE_LOGGER_PATH", None)  # the translated recipe sets it
        if not any(x.value == PLUGIN for x in entry_points(group="verl.plugins")):
            # the package is not installed, so verl does not find the plugin's entry point
            given = found.get("VERL_USE_EXTERNAL_MODULES")
            found["VERL_USE_EXTERNAL_MODULES"] = f"{given},{PLUGIN}" if given else PLUGIN
        return found
