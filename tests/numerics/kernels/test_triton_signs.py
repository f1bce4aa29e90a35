"""The sign kernel draws the twin's signs."""

import pytest
import torch

from mxfp4.numerics.philox import random_signs
from tests.fakes import triton_kernels as kernels


@pytest.mark.parametrize("size", [16, 32, 64, 128])
@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 123456789012345])
def test_the_kernel_draws_the_twins_signs(seed, size):
    module = kernels.load("signs")
    on_device = torch.tensor(seed, device=kernels.DEVICE)
    for stream in (0, 2, 2**31 + 5):
        assert torch.equal(
            module.random_signs(on_device, size, stream).cpu(), random_signs(on_device.cpu(), size, stream)
        )
