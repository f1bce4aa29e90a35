"""Settings for the whole suite: one thread, reproducible examples."""

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("mxfp4", derandomize=True, deadline=None, max_examples=50)
settings.load_profile("mxfp4")
