"""`mxfp4 scale`: print the scale that fits this machine (cpu, gpu or mi355x)."""

from __future__ import annotations

import argparse

P1_GPUS = 8
P1_ARCH = "gfx950"


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Register the sub-command."""
    parser = subparsers.add_parser("scale", help="print the scale that fits this machine", description=__doc__)
    parser.set_defaults(handler=run)


def run(args: argparse.Namespace) -> int:
    """Always exit code 0."""
    print(fitting_scale())
    return 0


def fitting_scale() -> str:
    """Cpu without a GPU, mi355x with the papers' own machine (8 x gfx950), else gpu."""
    import torch

    if not torch.cuda.is_available():
        return "cpu"
    count = torch.cuda.device_count()
    archs = {getattr(torch.cuda.get_device_properties(i), "gcnArchName", "").split(":")[0] for i in range(count)}
    return "mi355x" if count >= P1_GPUS and archs == {P1_ARCH} else "gpu"
