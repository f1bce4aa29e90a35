"""Settings for the whole suite: one thread, reproducible examples."""

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("mxfp4", derandomize=True, deadline=None, max_examples=50)
settings.load_profile("mxfp4")


def pytest_ignore_collect(collection_path, config):
    """With `-m gpu` only files that hold such tests are read: a GPU machine need not have what the book needs."""
    if config.option.markexpr == "gpu" and collection_path.suffix == ".py":
        return True if "mark.gpu" not in collection_path.read_text() else None
    return None
