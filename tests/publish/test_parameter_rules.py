"""What a chapter's parameters may be: refused in one line, with what is allowed, before anything runs."""

from __future__ import annotations

import shutil

import pytest

from mxfp4 import cli
from mxfp4.directories import bench_dir
from mxfp4.errors import UserError
from mxfp4.publish import notebook
from mxfp4.publish.notebook import chapter_sources, find_source, read_source, run_notebook
from mxfp4.publish.parameter_rules import check, rule_of
from mxfp4.publish.parameters import read_parameters
from mxfp4.studies.plans import plan
from mxfp4.studies.scales import SCALES
from mxfp4.studies.store import Store
from tests.fakes.studies import put

CHAPTERS = chapter_sources()


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Runs of this test's own, with the repository's benchmarks, and no kernel to be started."""
    there = bench_dir()
    monkeypatch.setenv("MXFP4_RUNS", str(tmp_path))
    shutil.copytree(there, tmp_path / "bench")

    def started(*args):
        raise AssertionError("a kernel was to be started")

    monkeypatch.setattr(notebook, "_execute", started)


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_every_parameter_of_every_chapter_has_a_rule_that_its_default_keeps(path):
    known = read_source(path).parameters
    assert [p.name for p in known.values() if rule_of(p) is None and p.type != "bool"] == []
    check(known, {p.name: p.default for p in known.values()})
    for p in known.values():
        items = p.default if isinstance(p.default, list) else [p.default]
        usual = [i for i in items if (p.name, i) not in {("steps", 0), ("bench", "")}]  # those say: the scale's own
        assert all(rule_of(p).allows(item, "gpu") for item in usual if p.type != "bool"), p.name


@pytest.mark.parametrize(
    ("chapter", "pair", "said"),
    [
        ("ablation", "scale=nonsense", "'nonsense': allowed: cpu, gpu, mi355x"),
        ("ablation", "seeds=[-1]", "parameter seeds=-1: allowed: from 0 to 2^63 - 1"),
        ("ablation", "steps=-1", "parameter steps=-1: allowed: at least 1"),
        ("ablation", "at=0", "parameter at=0.0: allowed: a share above 0 and up to 1"),
        ("ablation", "targets=0.5,5", "parameter targets=5.0: allowed: a share"),
        ("ablation", "targets=", "parameter targets: allowed is at least one item"),
        ("ablation", "late=1", "parameter late=1.0: allowed: a share from 0 to below 1"),
        ("ablation", "arms=bf16,nope", "parameter arms='nope': allowed: bf16, fp8, mxfp4-fprop,"),
        ("ablation", "arms=mxfp4+sr+prescale+frht16", "parameter arms='mxfp4+sr+prescale+frht16': allowed: bf16"),
        ("scaling", "reference=nope", "parameter reference='nope': allowed: bf16"),
        ("known_entropy", "after=2", "parameter after=2.0: allowed: a share from 0 to below 1"),
        ("disagreement", "rules=nope", "parameter rules='nope': allowed: floor, even, ceil, rceil"),
        ("disagreement", "draws=0", "parameter draws=0: allowed: at least 1"),
        ("format", "amax=0", "parameter amax=0.0: allowed: above 0 and up to 1e+30"),
        ("format", "scale_rule=nope", "parameter scale_rule='nope': allowed: floor, even, ceil, rceil ("),
        ("hadamard", "size=7", "parameter size=7: allowed: 16, 32, 64, 128"),
        ("hadamard", "steps=0", "parameter steps=0: allowed: at least 1"),
        ("hadamard", "outlier=-1", "parameter outlier=-1.0: allowed: from 0 to 1e+30"),
        ("kernels", "gpu=../cpu", "parameter gpu='../cpu': allowed: kernels-h200"),
        ("kernels", "cpu=kernels-h200", "parameter cpu='kernels-h200': allowed: cpu"),
        ("throughput", "bench=nope", "parameter bench='nope': allowed: step-h200"),
        ("mlperf", "target=0", "parameter target=0.0: allowed: above 0"),
        ("mlperf", "late=-1", "parameter late=-1.0: allowed: 0 or more"),
        ("recipes", "rotation=8", "parameter rotation=8: allowed: 16, 32, 64, 128"),
        ("stability", "recipe=nope", "parameter recipe='nope': recipe 'nope' is not known; named recipes: bf16"),
        ("stability", "arm=nope", "parameter arm='nope': allowed: bf16"),
        ("stability", "layers=zzz", "parameter layers='zzz': allowed: all, or a pattern that fits one of layers.0.att"),
        ("transposition", "variants=mxfp4+nope", "parameter variants='mxfp4+nope': modifier 'nope' of recipe"),
    ],
)
def test_what_would_fail_in_a_cell_is_refused_before(chapter, pair, said, capsys):
    assert cli.main(["run", chapter, "-p", pair]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert said in error or (pair.startswith("scale=") and "allowed: cpu, gpu, mi355x" in error)


def test_steps_that_no_run_has_are_refused_where_nothing_is_trained():
    with pytest.raises(UserError, match=r"steps=5: no run at scale gpu has so many \(it has no records\)"):
        run_notebook("ablation", {"scale": "gpu", "steps": 5})
    put(Store(), SCALES["gpu"].config("bf16", 0, steps=64, eval_every=64, warmup=1, probe_steps=[]))
    with pytest.raises(UserError, match=r"its records have 64\); train=true runs"):
        run_notebook("ablation", {"scale": "gpu", "steps": 5})
    for given in ({"scale": "gpu", "steps": 64}, {"scale": "cpu", "steps": 5}):
        with pytest.raises(AssertionError, match="a kernel was to be started"):
            run_notebook("ablation", given)


def test_seeds_that_no_run_has_are_refused_where_nothing_is_trained():
    put(Store(), SCALES["gpu"].config("bf16", 1, probe_steps=[]))
    with pytest.raises(UserError, match=r"seeds=9: no run at scale gpu has this one \(its records have 1\)"):
        run_notebook("ablation", {"scale": "gpu", "seeds": [1, 9]})
    for given in ({"scale": "gpu", "seeds": [1]}, {"scale": "gpu", "seeds": [9], "train": True}):
        with pytest.raises(AssertionError, match="a kernel was to be started"):
            run_notebook("ablation", given)


def test_an_arm_beyond_the_plans_is_allowed_where_it_has_a_record():
    known, arm = read_source(find_source("ablation")).parameters, "mxfp4+sr+prescale+frht16"
    values = {p.name: p.default for p in known.values()} | {"arms": [arm]}
    with pytest.raises(UserError, match="allowed: bf16"):
        check(known, values)
    put(Store(), plan("table1", "cpu", recipes=[arm], seeds=[0]).arms[0])
    check(known, values)


def test_the_same_name_of_another_type_is_something_else():
    known = read_parameters('size: str = "large"  # a word\nat: int = 3  # a number', "a")
    check(known, {"size": "small", "at": 7})
