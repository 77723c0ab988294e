"""Checks before a verl benchmark starts: packages, GPU and memory."""

import os
import shutil
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

NEEDED = ("verl", "ray", "tensordict", "transfer_queue", "hydra", "fastapi", "uvicorn", "datasets")


def problems(small: bool, vision: bool, gib: float) -> Iterator[str]:
    """Print what is installed; yield an error message for each missing requirement."""
    for name in (*NEEDED, *(() if small else ("vllm", *(("qwen_vl_utils",) if vision else ())))):
        found = find_spec(name)
        if found is None:
            yield f"{name} is not installed. Install it, or add its directory to PYTHONPATH."
        else:
            print(f"{name}: {found.origin}", flush=True)
    if find_spec("trl") is not None:
        yield (
            "trl is installed, and verl 0.9.1 imports a class from it that newer releases lack. "
            "Remove it from PYTHONPATH."
        )
    installed = [x.value for x in entry_points(group="verl.plugins")]
    shown = ", ".join(installed) or "none; using VERL_USE_EXTERNAL_MODULES"
    print(f"installed verl plugins: {shown}")
    if small:
        return
    import torch

    if not torch.cuda.is_available():
        yield "expected a GPU, found none. Add --small to run on a CPU."
        return
    free, total = (x / 2**30 for x in torch.cuda.mem_get_info())
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    shared = shutil.disk_usage("/dev/shm").free / 2**30
    print(
        f"{torch.cuda.get_device_name()}: {free:.0f} of {total:.0f} GiB free; CPU memory "
        f"{memory:.0f} GiB, /dev/shm {shared:.1f} GiB free, {os.cpu_count()} cores",
        flush=True,
    )
    if free < gib:
        yield f"expected about {gib:.0f} GiB of free GPU memory, found {free:.0f} GiB."


def read_by_verl(model: Path) -> str | None:
    """Return why verl cannot load the processor, or None; verl itself would ignore the error."""
    import warnings

    from verl.utils.tokenizer import hf_processor

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        processor = hf_processor(str(model))
    if processor is not None:
        return None
    reasons = [str(x.message) for x in caught if "processor" in str(x.message)]
    return f"verl cannot load the processor of {model}: {' '.join(reasons)[:500]}"


def require(found: Callable[[], Iterator[str]]) -> None:
    """Exit with all error messages, if there are any."""
    if missing := list(found()):
        raise SystemExit("\n".join(f"error: {x}" for x in missing))
