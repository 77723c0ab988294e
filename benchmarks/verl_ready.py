"""What a run on a GPU machine needs, looked at before anything starts: one line each."""

import os
import shutil
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

NEEDED = ("verl", "ray", "tensordict", "transfer_queue", "hydra", "fastapi", "uvicorn", "datasets")


def problems(small: bool, vision: bool, gib: float) -> Iterator[str]:
    """Print what was found; yield what is missing, with what to do."""
    for name in (*NEEDED, *(() if small else ("vllm", *(("qwen_vl_utils",) if vision else ())))):
        found = find_spec(name)
        if found is None:
            yield f"{name} is not there. Install it, or put its folder on PYTHONPATH."
        else:
            print(f"{name}: {found.origin}", flush=True)
    if find_spec("trl") is not None:
        yield (
            "trl is there, and verl 0.9.1 imports a class from it that newer releases lack. "
            "Take it off PYTHONPATH."
        )
    installed = [x.value for x in entry_points(group="verl.plugins")]
    print(f"plugins that verl finds: {', '.join(installed) or 'none, so it is told by hand'}")
    if small:
        return
    import torch

    if not torch.cuda.is_available():
        yield "there is no GPU here. Add --small for a CPU."
        return
    free, total = (x / 2**30 for x in torch.cuda.mem_get_info())
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    shared = shutil.disk_usage("/dev/shm").free / 2**30
    print(
        f"{torch.cuda.get_device_name()}: {free:.0f} of {total:.0f} GiB free; main memory "
        f"{memory:.0f} GiB, /dev/shm {shared:.1f} GiB free, {os.cpu_count()} cores",
        flush=True,
    )
    if free < gib:
        yield f"{free:.0f} GiB of the GPU are free, and about {gib:.0f} are needed."


def read_by_verl(model: Path) -> str | None:
    """verl goes on without a processor that it cannot load; better to hear why now."""
    import warnings

    from verl.utils.tokenizer import hf_processor

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        processor = hf_processor(str(model))
    if processor is not None:
        return None
    reasons = [str(x.message) for x in said if "processor" in str(x.message)]
    return f"verl cannot load the processor of {model}: {' '.join(reasons)[:500]}"


def require(found: Callable[[], Iterator[str]]) -> None:
    """Stop with all of them at once."""
    if missing := list(found()):
        raise SystemExit("\n".join(f"error: {x}" for x in missing))
