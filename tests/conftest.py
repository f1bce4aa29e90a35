"""Settings for the whole suite: one thread, reproducible examples."""

import os

import torch
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)
settings.register_profile("mxfp4", derandomize=True, deadline=None, max_examples=50)
settings.load_profile("mxfp4")
