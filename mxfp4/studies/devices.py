"""Where the arms of a plan train. A place is a device, or several, one for each rank of an arm."""

from __future__ import annotations

from collections import Counter

import torch

from mxfp4.errors import UserError
from mxfp4.studies.scales import Scale

Place = tuple[torch.device, ...]


def places(device: torch.device, jobs: int, ranks: int = 1, gpus: int | None = None) -> list[Place]:
    """Where each arm that runs at a time trains, `ranks` devices an arm: `jobs` arms on every GPU or group of GPUs,
    neighbours on different ones. gpus: on so many of them (None: on all). On the CPU ranks are processes. Raises
    UserError where there are fewer GPUs."""
    if device.type == "cpu" or device.index is not None:
        if device.index is not None and ranks > 1:
            raise UserError(f"{ranks} ranks an arm need {ranks} GPUs, not {device} alone")
        return [(device,) * ranks] * jobs
    count = torch.cuda.device_count() if gpus is None else gpus
    check(ranks, count)
    if count == 1:
        return [(device,)] * jobs
    gpus = [torch.device("cuda", i) for i in range(count)]
    return [tuple(gpus[i : i + ranks]) for i in range(0, count - ranks + 1, ranks)] * jobs


def check(ranks: int, gpus: int) -> None:
    """Raises UserError where an arm needs more GPUs than there are."""
    if ranks > gpus:
        raise UserError(f"{ranks} ranks an arm need {ranks} GPUs, there are {gpus}")


def no_gpu(scale: Scale, device: str) -> str:
    """One line: that `scale` cannot be trained on a device of type `device`."""
    return (
        f"scale {scale.name!r} trains on a GPU, and device {device!r} is none: see `mxfp4 doctor --scale {scale.name}`"
    )


def chosen_gpus(gpus: int | None, device: torch.device) -> int:
    """How many GPUs are trained on: `gpus` of this machine's (None: all); 0 on the CPU. UserError for more than there
    are."""
    there = torch.cuda.device_count() if device.type == "cuda" else 0
    if gpus is None:
        return there if device.index is None else 1
    if device.type == "cuda" and not 0 < gpus <= there:
        raise UserError(f"gpus={gpus}: allowed here are 1 to {there}")
    if device.type != "cuda" and gpus:
        raise UserError(f"gpus={gpus}: this machine has none to train on; allowed here is 0")
    return gpus


def idle(scale: Scale, gpus: int) -> str | None:
    """One line about the GPUs that no arm of `scale` would use, with the numbers that leave none; None where all are
    used. The same for training and for its dry run."""
    ranks = scale.ranks_on(gpus)
    unused = gpus % ranks
    if not unused:
        return None
    if scale.ranks_per_arm:
        return f"{unused} of {gpus} GPUs idle: an arm takes {ranks}; none idles with a multiple of {ranks}"
    parts = scale.micro_batches
    even = ", ".join(str(n) for n in range(1, parts + 1) if parts % n == 0)
    why = f"an arm takes {ranks}, as {gpus} do not share its {parts} micro-batches evenly"
    return f"{unused} of {gpus} GPUs idle: {why}; none idles with {even}, or a multiple of {parts}"


def emptiest(free: list[Place], taken: list[Place]) -> Place:
    """The free place on whose devices the fewest arms train: the first of equals."""
    load = Counter(device for place in taken for device in place)
    return min(free, key=lambda place: sum(load[device] for device in place))
