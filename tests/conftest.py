"""Shape checks for the whole package, one thread, and no GPU tests without a GPU."""

import importlib.util

import pytest
import torch
from jaxtyping import install_import_hook

if importlib.util.find_spec("beartype"):
    install_import_hook("segcredit", "shape_checks.check")

torch.set_num_threads(1)
if importlib.util.find_spec("hypothesis"):  # the GPU tests need none
    from hypothesis import settings

    settings.register_profile("segcredit", max_examples=60, deadline=None)
    settings.load_profile("segcredit")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(skip)
