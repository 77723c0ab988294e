"""GPUs by name: how much they hold, how fast they compute, read and talk to each other."""

import re
from dataclasses import dataclass
from difflib import get_close_matches

from segcredit.printable import shown


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU; peak numbers from its maker's data sheet, without sparsity."""

    name: str
    memory: float
    """GiB that torch sees."""
    bfloat16: float
    """TFLOP/s of tensor cores, sums in float32."""
    float32: float
    """TFLOP/s without tensor cores, as torch multiplies float32 unless told otherwise."""
    bandwidth: float
    """Of its memory, GB/s."""
    link: float
    """To the other GPUs, GB/s in one direction."""
    host: float
    """To main memory, GB/s in one direction."""


PCIE4, PCIE5 = 32.0, 64.0

GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("B200", 178.0, 2250, 75.0, 8000, 900, PCIE5),
        Gpu("H200", 139.8, 989, 67.0, 4800, 450, PCIE5),
        Gpu("H100-80G", 79.1, 989, 67.0, 3350, 450, PCIE5),
        Gpu("H100-PCIe", 79.1, 756, 51.0, 2000, PCIE5, PCIE5),
        Gpu("A100-80G", 79.1, 312, 19.5, 2039, 300, PCIE4),
        Gpu("A100-40G", 39.4, 312, 19.5, 1555, 300, PCIE4),
        Gpu("L40S", 44.4, 362, 91.6, 864, PCIE4, PCIE4),
        Gpu("L4", 22.0, 121, 30.3, 300, PCIE4, PCIE4),
        Gpu("A10G", 22.0, 70, 31.2, 600, PCIE4, PCIE4),
        Gpu("RTX-A6000", 47.4, 155, 38.7, 768, PCIE4, PCIE4),
        Gpu("RTX-6000-Ada", 47.4, 364, 91.1, 960, PCIE4, PCIE4),
        Gpu("RTX-5090", 31.4, 210, 104.8, 1792, PCIE5, PCIE5),
        Gpu("RTX-4090", 23.5, 165, 82.6, 1008, PCIE4, PCIE4),
        Gpu("RTX-3090", 23.5, 71, 35.6, 936, PCIE4, PCIE4),
    )
}
_KEYS = {re.sub(r"[^a-z0-9]", "", name.lower()): name for name in GPUS}
_MOST = 1024


def parse_gpus(text: str) -> tuple[int, Gpu]:
    """How many, and which: ``8xA100-80G``, or ``H200`` for one."""
    found = re.fullmatch(r"\s*(?:(\d{1,9})\s*[x×*]\s*)?(\S(?:.*\S)?)\s*", text, re.IGNORECASE)
    if found is None:
        raise ValueError(f"--gpus: expected a number and a name, as 8xA100-80G; got {shown(text)}.")
    count = int(found[1] or 1)
    if not 1 <= count <= _MOST:
        raise ValueError(f"--gpus: expected 1 to {_MOST} GPUs; got {count}.")
    return count, gpu_named(found[2])


def gpu_named(name: str) -> Gpu:
    """By its name in the table, capitals and hyphens as one likes."""
    key = re.sub(r"[^a-z0-9]", "", name.lower().replace("gb", "g"))
    if key in _KEYS:
        return GPUS[_KEYS[key]]
    raise ValueError(
        f"--gpus: no GPU {shown(name)} in the table.{_nearest(key)} There are: {', '.join(GPUS)}."
    )


def _nearest(key: str) -> str:
    """Those that begin so, else those spelled most alike."""
    key = key.removeprefix("nvidia").removeprefix("geforce")
    near = [known for known in _KEYS if key and (known.startswith(key) or known.endswith(key))]
    near = near or get_close_matches(key, _KEYS, n=1, cutoff=0.4)
    names = " or ".join(_KEYS[known] for known in near)
    return f" Did you mean {names}?" if names else ""


def present_gpus() -> tuple[int, Gpu]:
    """Those of this machine."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        raise ValueError(
            "torch sees no GPU here, so name those to plan for: --gpus 1xH200 or --gpus 8xA100-80G."
        )
    here = torch.cuda.get_device_properties(0)
    gib = here.total_memory / 2**30
    words = re.sub(r"[^a-z0-9 ]", " ", here.name.lower()).split()
    named = {gpu.name: set(gpu.name.lower().split("-")) - {"80g", "40g"} for gpu in GPUS.values()}
    fitting = [
        gpu
        for gpu in GPUS.values()
        if named[gpu.name] <= set(words) and abs(gpu.memory - gib) < 0.2 * gpu.memory
    ]
    if not fitting:
        raise ValueError(
            f"this machine's GPU, {shown(here.name)} with {gib:.0f} GiB, is not in the table: name "
            f"the one most like it, as in --gpus {count}xA100-80G. There are: {', '.join(GPUS)}."
        )
    return count, max(fitting, key=lambda gpu: len(named[gpu.name]))
