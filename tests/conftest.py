"""Shape checks for the whole package, one thread, and no GPU tests without a GPU."""

import gc
import importlib.util
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import jaxtyping
import pytest
import torch
from jaxtyping import install_import_hook

if importlib.util.find_spec("beartype"):
    from shape_checks import check_types

    package = Path(__file__).parent.parent / "segcredit"
    modules = [f"segcredit.core.{file.stem}" for file in (package / "core").glob("*.py")]
    for name in (
        "kernels",
        "head_kernels",
        "layer_kernels",
    ):  # Triton compiles the functions it finds there
        modules.remove(f"segcredit.core.{name}")
    rest = [
        *("algorithms", "data", "evaluate", "integrations", "models", "partition", "report"),
        "plan.model",  # names what only a type checker imports
        *("rewards", "rollout", "runlog", "train", "types"),
    ]
    rest = [*(f"segcredit.{name}" for name in rest), "segcredit_lab"]
    install_import_hook([*modules, *rest], "shape_checks.check")
    plan = {f"segcredit.plan.{file.stem}" for file in (package / "plan").glob("*.py")}
    check_types(plan - set(rest))

# What imports and collection make lives as long as the process. Without the garbage collector they
# take a fifth less time, and tests a sixth less where it skips these objects afterwards.
gc.disable()
torch.set_num_threads(1)
if threading.current_thread() is threading.main_thread():
    # a shell has what it starts in the background ignore Ctrl-C, and all children would, too
    signal.signal(signal.SIGINT, signal.default_int_handler)
if importlib.util.find_spec("hypothesis"):  # the GPU tests need none
    from hypothesis import settings

    settings.register_profile("segcredit", max_examples=60, deadline=None)
    settings.load_profile("segcredit")


@pytest.fixture
def as_users_run_it() -> Iterator[None]:
    """Without the test suite's shape checks, which would speak before our own messages."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(skip)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    gc.enable()
    gc.collect()
    gc.freeze()
