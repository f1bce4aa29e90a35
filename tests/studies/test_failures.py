"""What the queue makes of failures: which arms are tried again, whose fault they are, when a device stops it."""

import pytest
import torch
import torch.distributed as dist

from mxfp4.errors import UserError
from mxfp4.studies.failures import Failure, Failures, Tolerance, kind_of

GPU = ("cuda:3",)


def failure(arm="mxfp4-s0", step=5, kind="device", devices=GPU) -> Failure:
    return Failure(arm, step, "rank 3 ended with exit code -9", kind, devices)


@pytest.fixture
def failures(tmp_path):
    return Failures(Tolerance(), tmp_path / "logs" / "failures.log")


def test_an_arm_is_tried_again_so_often_and_each_failure_is_logged(failures):
    assert [failures.add(failure(step=s, kind="program")) for s in (5, 9)] == [None, None]
    assert failures.add(failure(step=12, kind="program")) == "rank 3 ended with exit code -9; attempt 3"
    assert failures.retried == {"mxfp4-s0": 2} and failures.stopped is None  # no fault of the device
    lines = failures.log.read_text().splitlines()
    assert [line.rpartition("; ")[2] for line in lines] == ["tried again from its last checkpoint"] * 2 + ["given up"]
    assert "Z failed: mxfp4-s0 at step 5 on cuda:3: rank 3 ended with exit code -9;" in lines[0]


def test_twice_at_one_step_is_the_arms_own_fault(failures):
    assert failures.add(failure()) is None
    assert failures.add(failure()).endswith("exit code -9; twice at step 5: the arm's own fault")
    assert failures.add(failure("fp8-s0", 5)) is None  # another arm has all of its tries


def test_a_users_mistake_is_not_tried_again(failures):
    assert failures.add(failure(kind="user")) == "rank 3 ended with exit code -9" and not failures.retried


def test_three_failures_of_one_gpu_stop_the_queue_and_name_it(failures):
    for step, devices in ((5, ("cuda:2", "cuda:3")), (8, GPU), (8, ("cuda:1",))):
        failures.add(failure(step=step, devices=devices))
        assert failures.stopped is None
    failures.add(failure("fp8-s0", 0))
    assert failures.stopped.startswith("cuda:3 of ")
    assert failures.stopped.endswith(" failed 3 times (fp8-s0 at step 0, mxfp4-s0 at step 5, mxfp4-s0 at step 8)")
    assert failures.stopped in failures.log.read_text()


@pytest.mark.parametrize("works", [True, False])
def test_faulty_arms_do_not_stop_a_device_on_which_another_arm_trains(works, failures):
    """A broken GPU fails every arm at its first step, as a faulty arm does: only another arm can tell them apart."""
    for arm in ("a", "b", "c"):
        failures.add(failure(arm, 0))
        failures.add(failure(arm, 0))
        if works:
            failures.worked(GPU)
    assert (failures.stopped is None) == works


def test_whose_fault_an_exception_is():
    assert kind_of(UserError("no")) == "user"
    assert kind_of(torch.AcceleratorError("ECC")) == kind_of(dist.DistBackendError("timeout")) == "device"
    assert kind_of(torch.OutOfMemoryError("full")) == kind_of(ValueError("shape")) == "program"


def test_tolerances_that_cannot_work_are_refused():
    with pytest.raises(UserError, match="retries=-1 must not be negative; 0 tries no arm again"):
        Tolerance(retries=-1)
    with pytest.raises(UserError, match="idle_minutes=0 must be positive"):
        Tolerance(idle_minutes=0)
