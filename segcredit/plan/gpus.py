"""Table of GPUs: memory, compute and bandwidth."""

import re
from dataclasses import dataclass
from difflib import get_close_matches

from segcredit.printable import shown


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU; peak numbers from the vendor's data sheet, without sparsity."""

    name: str
    memory: float
    """GiB as torch reports it."""
    bfloat16: float
    """TFLOP/s of the tensor cores, accumulating in float32."""
    float32: float
    """TFLOP/s without tensor cores, torch's default for float32."""
    bandwidth: float
    """Memory bandwidth, GB/s."""
    host: float
    """Bandwidth to CPU memory, GB/s in one direction."""


PCIE4, PCIE5 = 32.0, 64.0

GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("B200", 178.0, 2250, 75.0, 8000, PCIE5),
        Gpu("H200", 139.8, 989, 67.0, 4800, PCIE5),
        Gpu("H100-80G", 79.1, 989, 67.0, 3350, PCIE5),
        Gpu("H100-PCIe", 79.1, 756, 51.0, 2000, PCIE5),
        Gpu("A100-80G", 79.1, 312, 19.5, 2039, PCIE4),
        Gpu("A100-40G", 39.4, 312, 19.5, 1555, PCIE4),
        Gpu("L40S", 44.4, 362, 91.6, 864, PCIE4),
        Gpu("L4", 22.0, 121, 30.3, 300, PCIE4),
        Gpu("A10G", 22.0, 70, 31.2, 600, PCIE4),
        Gpu("RTX-A6000", 47.4, 155, 38.7, 768, PCIE4),
        Gpu("RTX-6000-Ada", 47.4, 364, 91.1, 960, PCIE4),
        Gpu("RTX-5090", 31.4, 210, 104.8, 1792, PCIE5),
        Gpu("RTX-4090", 23.5, 165, 82.6, 1008, PCIE4),
        Gpu("RTX-3090", 23.5, 71, 35.6, 936, PCIE4),
    )
}
_KEYS = {re.sub(r"[^a-z0-9]", "", name.lower()): name for name in GPUS}
_MAX_GPUS = 1024


def parse_gpus(text: str) -> tuple[int, Gpu]:
    """Parse a count and a name: ``8xA100-80G``, or ``H200`` for one."""
    match = re.fullmatch(r"\s*(?:(\d{1,9})\s*[x×*]\s*)?(\S(?:.*\S)?)\s*", text, re.IGNORECASE)
    if match is None:
        raise ValueError(
            f"--gpus: expected a count and a name, such as 8xA100-80G; got {shown(text)}."
        )
    count = int(match[1] or 1)
    if not 1 <= count <= _MAX_GPUS:
        raise ValueError(f"--gpus: expected 1 to {_MAX_GPUS} GPUs; got {count}.")
    return count, gpu_named(match[2])


def gpu_named(name: str) -> Gpu:
    """Look a GPU up; case, spaces and hyphens are ignored."""
    key = re.sub(r"[^a-z0-9]", "", name.lower().replace("gb", "g"))
    if key in _KEYS:
        return GPUS[_KEYS[key]]
    raise ValueError(
        f"--gpus: unknown GPU {shown(name)}.{_nearest(key)} The GPUs are: {', '.join(GPUS)}."
    )


def _nearest(key: str) -> str:
    """Suggest GPUs whose names start or end with the key, else the most similar one."""
    key = key.removeprefix("nvidia").removeprefix("geforce")
    near = [known for known in _KEYS if key and (known.startswith(key) or known.endswith(key))]
    near = near or get_close_matches(key, _KEYS, n=1, cutoff=0.4)
    names = " or ".join(_KEYS[known] for known in near)
    return f" Did you mean {names}?" if names else ""


def present_gpus() -> tuple[int, Gpu]:
    """Count and identify the GPUs of this machine."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        raise ValueError(
            "torch finds no GPU here; name those to plan for: --gpus 1xH200 or --gpus 8xA100-80G."
        )
    here = torch.cuda.get_device_properties(0)
    gib = here.total_memory / 2**30
    words = re.sub(r"[^a-z0-9 ]", " ", here.name.lower()).split()
    named = {gpu.name: set(gpu.name.lower().split("-")) - {"80g", "40g"} for gpu in GPUS.values()}
    matches = [
        gpu
        for gpu in GPUS.values()
        if named[gpu.name] <= set(words) and abs(gpu.memory - gib) < 0.2 * gpu.memory
    ]
    if not matches:
        raise ValueError(
            f"this machine's GPU, {shown(here.name)} with {gib:.0f} GiB, is not in the table: name "
            f"the most similar one, such as --gpus {count}xA100-80G. The GPUs are: "
            f"{', '.join(GPUS)}."
        )
    return count, max(matches, key=lambda gpu: len(named[gpu.name]))
