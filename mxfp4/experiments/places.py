"""Where the arms of a plan train. A place is a device, or several, one for each rank of an arm."""

from __future__ import annotations

from collections import Counter

import torch

from mxfp4.errors import UserError

Place = tuple[torch.device, ...]


def places(device: torch.device, jobs: int, ranks: int = 1) -> list[Place]:
    """Where each arm that runs at a time trains, `ranks` devices an arm: `jobs` arms on every GPU or group of GPUs,
    neighbours on different ones. On the CPU ranks are processes. Raises UserError where there are fewer GPUs."""
    if device.type == "cpu" or device.index is not None:
        if device.index is not None and ranks > 1:
            raise UserError(f"{ranks} ranks an arm need {ranks} GPUs, not {device} alone")
        return [(device,) * ranks] * jobs
    count = torch.cuda.device_count()
    if ranks > count:
        raise UserError(f"{ranks} ranks an arm need {ranks} GPUs, there are {count}")
    if count == 1:
        return [(device,)] * jobs
    gpus = [torch.device("cuda", i) for i in range(count)]
    return [tuple(gpus[i : i + ranks]) for i in range(0, count - ranks + 1, ranks)] * jobs


def emptiest(free: list[Place], taken: list[Place]) -> Place:
    """The free place on whose devices the fewest arms train: the first of equals."""
    load = Counter(device for place in taken for device in place)
    return min(free, key=lambda place: sum(load[device] for device in place))
