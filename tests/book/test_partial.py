"""Every chapter rendered from a run that is half done: it draws what there is and says that it is partial.

Chapters are executed in this process, without kernels and pictures, at a scale that trains nothing by itself.
"""

from __future__ import annotations

import ast
from dataclasses import replace

import jupytext
import pytest

from mxfp4.analysis.effect import last_losses
from mxfp4.analysis.study import studies
from mxfp4.pages import charts, frames
from mxfp4.publish.notebook import chapter_sources
from mxfp4.studies.plans import plan, plans_of
from mxfp4.studies.scales import CPU, SCALES
from mxfp4.studies.store import Store
from tests.fakes.runs import put_arms

NO_RUNS = ("families", "format", "gemms", "hadamard", "kernels", "mlperf", "statistics")
"""Chapters that show no run of ours."""
PROBED = ("bf16", "fp8", "mxfp4", "mxfp4+sr", "mxfp4+rht16", "mxfp4+h16", "ti2d")
CHAPTERS = [p for p in chapter_sources() if p.stem not in NO_RUNS]


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    """A store of scale gpu, made small, with the first half of each plan's arms: what interrupted runs leave."""
    root = tmp_path_factory.mktemp("half")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MXFP4_RUNS", str(root))
        patch.setitem(SCALES, "gpu", replace(CPU, name="gpu", seeds={"": (0,)}))
        plans = [plan(name, "gpu").arms for name in plans_of(SCALES["gpu"])]
        put_arms(Store(root), list(dict.fromkeys(a for arms in plans for a in arms[: len(arms) // 2])), PROBED)
        yield patch


def shown(path, patch, scale: str = "gpu") -> list:
    """What the chapter displays at `scale`, charts left out, in order."""
    values: list = []
    patch.setattr(charts, "show", lambda chart, *, caption: chart.to_dict())
    patch.setattr("IPython.display.display", lambda *objects, **kw: values.extend(objects))
    patch.setattr("builtins.display", lambda *objects, **kw: values.extend(objects), raising=False)
    scope: dict = {}
    for cell in jupytext.read(path, fmt="md:myst").cells:
        if cell.cell_type != "code":
            continue
        body = ast.parse(cell.source).body
        last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
        exec(compile(ast.Module(body, []), path.name, "exec"), scope)
        if last is not None:
            values.append(eval(compile(ast.Expression(last.value), path.name, "eval"), scope))
        if "parameters" in cell.metadata.get("tags", []) and "scale" in scope:
            scope["scale"] = scale
    return values


@pytest.fixture(scope="module")
def stopping(half, tmp_path_factory):
    """Beside those runs all of scale mi355x, made small: they stop at a target, reached within half of the budget, and
    are not probed."""
    small = replace(
        CPU, name="mi355x", seeds={"": (0,)}, settings={}, probe_steps=(), target_loss=3.7, stop_at_target=True
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SCALES, "mi355x", small)
        put_arms(Store(), list(plan("all", "mi355x").arms))
        yield patch


@pytest.mark.parametrize("path", CHAPTERS, ids=[p.stem for p in CHAPTERS])
def test_a_half_done_run_is_shown_and_called_partial(path, half):
    pages = [v._repr_html_() for v in shown(path, half) if hasattr(v, "_repr_html_")]
    notes = [page for page in pages if "Partial page" in page]
    assert notes, f"{path.stem} does not say that it is partial"
    assert all("mxfp4 train --plan" in note and "runs are missing" in note for note in notes)


@pytest.mark.parametrize("path", CHAPTERS, ids=[p.stem for p in CHAPTERS])
def test_runs_that_stop_at_a_target_and_are_not_probed_make_a_page(path, stopping):
    values = shown(path, stopping, "mi355x")
    pages = [v._repr_html_() for v in values if hasattr(v, "_repr_html_")]
    stand_in = any("Runs of scale mi355x are not probed" in page and "those of scale gpu" in page for page in pages)
    assert stand_in == (path.stem in ("stability", "transposition", "disagreement"))


def test_arms_that_stop_are_compared_at_equal_tokens_and_at_their_one_target(stopping):
    (study,) = [s for s in studies(Store().load("mi355x"))]
    assert study.config.stop_at_target and frames.span(study) < 0.5 * study.tokens
    frame = frames.table1_frame(study, ats=[0.5, 0.7])
    assert [c for c in frame.columns if c.startswith("at ")] == ["at 3.7 nats"]
    late = frames.mean_curves(study, ["fp8", "mxfp4"], after=0.6)
    assert set(late["arm"]) == {"fp8", "mxfp4"} and late["tokens"].min() >= 0.6 * frames.span(study)
    losses = last_losses(study, ["fp8", "mxfp4"])
    ends = {arm: study.curves(arm)[0].dropna(subset="eval_loss") for arm in losses}
    shared = min(e["tokens"].iloc[-1] for e in ends.values())
    for arm, end in ends.items():
        assert losses[arm][0] == end.set_index("tokens")["eval_loss"][shared]
    assert losses["mxfp4"][0] > losses["fp8"][0]
