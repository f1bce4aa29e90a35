"""Which records make a study."""

from dataclasses import dataclass, field, replace

from mxfp4.analysis.study import studies
from mxfp4.training.config import TrainConfig
from tests.fakes import tiny_config


@dataclass
class MadeUp:
    config: TrainConfig
    run_id: str = "run"
    paths: tuple = ("emulated", "emulated")
    gemm_backend: str | None = None
    machine: dict = field(default_factory=lambda: {"device_type": "cpu"})


def test_records_of_the_registered_study_and_of_trials_are_left_out():
    plain = tiny_config()
    fresh = replace(plain, eval_forwards=("bf16",))
    assert [s.records[0].config for s in studies([MadeUp(plain), MadeUp(fresh)])] == [plain]
    assert studies([MadeUp(fresh)]) == []


def test_runs_that_differ_in_branches_and_probes_are_of_one_study():
    plain = replace(tiny_config(), steps=20, warmup=2, cooldown_steps=4)
    others = [replace(plain, seed=1, short_budgets=(10,)), replace(plain, seed=2, decay_recipes=("bf16",))]
    others.append(replace(plain, seed=3, light_probe_steps=(5,)))
    found = studies([MadeUp(config) for config in (plain, *others)])
    assert len(found) == 1 and found[0].seeds == (0, 1, 2, 3)
    assert len(studies([MadeUp(plain), MadeUp(replace(plain, lr=plain.lr / 2))])) == 2
