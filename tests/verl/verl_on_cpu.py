"""verl on a machine without a GPU: a platform, its FSDP engine, and a rollout server. Tests only.

verl imports this module everywhere when ``VERL_USE_EXTERNAL_MODULES`` names it. It replaces
nothing but what a CPU cannot do: the device, the inference engine, pinned memory, a process
group's name for two backends on one device, a processor that wants torchvision, and the flash
attention of verl's own critic. And it looks
for finished responses ten times a second, where verl looks every two seconds: a step of a toy
takes less.
"""

import os
import time
import types
from contextlib import contextmanager
from pathlib import Path

import torch
from wrapt.importer import when_imported

torch.set_num_threads(1)


class _CPU(type(torch)):
    """``torch.cpu`` with the questions that verl asks of a GPU."""

    def __init__(self):
        super().__init__("torch.cpu")

    def __getattr__(self, name):
        if name.startswith(("max_memory_", "memory_")):
            return lambda *a, **k: 0
        if name == "get_device_name":
            return lambda *a, **k: "cpu"
        if name in ("get_rng_state", "set_rng_state"):
            return getattr(torch, name)
        if name == "mem_get_info":
            return lambda *a, **k: (1, 1)
        if name in ("empty_cache", "ipc_collect", "set_device", "reset_peak_memory_stats"):
            return lambda *a, **k: None
        return getattr(torch.cpu, name)


def _register_platform():
    from verl.plugin.platform import PlatformBase, PlatformRegistry

    @PlatformRegistry.register(platform="cpu")
    class PlatformCPU(PlatformBase):
        device_name = "cpu"
        vendor_name = "cpu"
        device_module = _CPU()

        def is_available(self):
            return True

        def current_device(self):
            return torch.device("cpu")  # what tensors are moved to

        def device_count(self):
            return 1

        def set_device(self, device_index):
            pass

        def synchronize(self, device_index=None):
            pass

        def manual_seed(self, seed):
            torch.manual_seed(seed)

        def manual_seed_all(self, seed):
            torch.manual_seed(seed)

        def set_allocator_settings(self, settings):
            pass

        def empty_cache(self):
            pass

        def get_device_capability(self, device_index=0):
            return (None, None)

        def communication_backend_name(self):
            return "gloo"

        def visible_devices_envvar(self):
            return "CUDA_VISIBLE_DEVICES"

        def ray_resource_name(self):
            return "GPU"  # as many as ray.init is told

        def ray_noset_envvars(self):
            return []

        def is_ipc_supported(self):
            return False

        def cudart(self):
            return None

        @contextmanager
        def nvtx_range(self, msg):
            yield

        def profiler_start(self):
            pass

        def profiler_stop(self):
            pass


def _one_backend_per_device():
    original = torch.distributed.init_process_group

    def init_process_group(backend=None, *args, **kwargs):
        if backend == "cpu:gloo,cpu:gloo":  # torch refuses to be told twice
            backend = "cpu:gloo"
        return original(backend, *args, **kwargs)

    torch.distributed.init_process_group = init_process_group


def _register_engines():
    from verl.workers.engine.base import EngineRegistry
    from verl.workers.engine.fsdp import transformer_impl
    from verl.workers.engine.fsdp.transformer_impl import (
        FSDPEngineWithLMHead,
        FSDPEngineWithValueHead,
    )

    offload = transformer_impl.CPUOffloadPolicy
    transformer_impl.CPUOffloadPolicy = lambda pin_memory: offload(pin_memory=False)
    backends = ["fsdp", "fsdp2"]
    EngineRegistry.register("language_model", backends, device="cpu")(FSDPEngineWithLMHead)
    EngineRegistry.register("value_model", backends, device="cpu")(FSDPEngineWithValueHead)


def _register_rollout():
    from verl.workers.rollout import base
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    base._ROLLOUT_REGISTRY[("hf", "async")] = "verl_on_cpu_rollout.Adapter"

    def load():
        from verl_on_cpu_rollout import Replica

        return Replica

    RolloutReplicaRegistry.register("hf", load)


def _processor_without_torchvision(model):
    original = model.hf_processor

    def hf_processor(folder, **kwargs):
        if (Path(folder) / "preprocessor_config.json").exists():
            from tiny_vision import TinyProcessor

            return TinyProcessor(folder)
        return original(folder, **kwargs)

    model.hf_processor = hf_processor


def _attention_of_a_cpu(_):
    """verl's own critic insists on flash attention."""
    from transformers import AutoModelForTokenClassification

    original = AutoModelForTokenClassification.from_pretrained

    def from_pretrained(*args, **kwargs):
        return original(*args, **kwargs | {"attn_implementation": "sdpa"})

    AutoModelForTokenClassification.from_pretrained = from_pretrained


def _look_more_often(replay_buffer):
    def sleep(seconds):
        time.sleep(min(seconds, 0.1))

    replay_buffer.time = types.SimpleNamespace(sleep=sleep, time=time.time)


if os.environ.get("VERL_PLATFORM") == "cpu":
    _register_platform()
    _one_backend_per_device()
    # what is heavy waits until verl itself imports it
    when_imported("verl.workers.engine.fsdp.transformer_impl")(lambda _: _register_engines())
    when_imported("verl.workers.rollout.base")(lambda _: _register_rollout())
    when_imported("verl.workers.config.model")(_processor_without_torchvision)
    when_imported("verl.utils.model")(_attention_of_a_cpu)
    when_imported("verl.trainer.ppo.v1.replay_buffer")(_look_more_often)
