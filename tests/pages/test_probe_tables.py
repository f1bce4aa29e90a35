"""Tables, sentences and charts of the diagnostics chapters, on hand-made probe rows and fake studies."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from mxfp4.analysis.effect import NoProbe
from mxfp4.errors import UserError
from mxfp4.pages import probe_charts, probe_tables
from mxfp4.pages.chapters import probe_findings
from mxfp4.pages.charts import CUT, render

COLUMNS = ["arm", "seed", "recipe", "step", "layer", "gemm", "tensor", "metric", "value"]


def frame(*rows) -> pd.DataFrame:
    """Rows of (arm, recipe, layer, gemm, tensor, metric, value) at steps 5 and 6 of seed 0."""
    made = [(a, 0, r, step, layer, g, t, m, v) for a, r, layer, g, t, m, v in rows for step in (5, 6)]
    return pd.DataFrame(made, columns=COLUMNS)


def study(losses: dict[str, list[float]], probes: pd.DataFrame | None = None):
    """A study with the final losses of each arm by seed; None is a diverged seed."""

    def record(loss):
        status = "diverged" if loss is None else "finished"
        return SimpleNamespace(outcome={"status": status, "final_loss": loss})

    arms = {arm: {seed: record(loss) for seed, loss in enumerate(values)} for arm, values in losses.items()}
    return SimpleNamespace(arms=arms, probes=frame() if probes is None else probes)


def patterns(**kept: float) -> pd.DataFrame:
    names = {"plain": "mxfp4", "sr": "mxfp4+sr", "rht16": "mxfp4+rht16", "h16": "mxfp4+h16"}
    return frame(
        *(("bf16", names[n], layer, "fprop", "w", "pattern_next", v + d)
          for n, v in kept.items() for layer, d in (("layers.0.wq", 0.0), ("layers.1.wq", 0.02)))
    )  # fmt: skip


ROWS = frame(
    ("bf16", "mxfp4", "layers.0.wq", "fprop", "x", "error", 0.1),
    ("bf16", "mxfp4", "layers.1.wq", "fprop", "x", "error", 0.3),
    ("bf16", "mxfp4", "layers.0.wq", "wgrad", "g", "error", 0.4),
    ("bf16", "mxfp4", "all", "", "dw", "error", 9.0),
    ("mxfp4", "mxfp4", "layers.0.wq", "fprop", "x", "error", 0.5),
)


def test_select_keeps_what_was_asked_for_and_names_it():
    rows = probe_tables.select(ROWS, "error", arm="bf16", recipes=["mxfp4"], what=probe_tables.OPERANDS)
    assert list(dict.fromkeys(rows["what"])) == ["X in Fprop", "G in Wgrad"]
    assert "all" not in set(rows["layer"])
    assert set(probe_tables.select(ROWS, "error", arm="bf16", recipes=["mxfp4"], layers="all")["value"]) == {9.0}
    own = probe_tables.select(ROWS, "error")
    assert set(own["arm"]) == {"mxfp4"}
    assert set(probe_tables.select(ROWS, "error", arm="bf16", recipes=["mxfp4"], layers="layers.1.*")["value"]) == {0.3}


def test_select_says_what_there_is_when_nothing_fits():
    with pytest.raises(
        NoProbe, match=r"no probe of bias of bf16 in layers '\*'.*probed arms: bf16, mxfp4.*layers.0.wq"
    ):
        probe_tables.select(ROWS, "bias", arm="bf16")
    with pytest.raises(UserError, match="layers.9"):
        probe_tables.select(ROWS, "error", layers="layers.9.*")


def test_recipes_that_were_measured_on_an_arm():
    assert probe_tables.measured(ROWS, "bf16", ["mxfp4+h16", "mxfp4"]) == ["mxfp4"]
    assert probe_tables.measured(ROWS, "bf16", ["mxfp4+h16"]) == ["mxfp4"]
    assert probe_tables.measured(ROWS, "bf16", metric="kurtosis_before") == []
    with pytest.raises(NoProbe, match="arm 'mxfp5' was not probed in these records; probed arms: bf16, mxfp4"):
        probe_tables.measured(ROWS, "mxfp5")


def test_summary_counts_each_layer_once():
    rows = probe_tables.select(ROWS, "error", arm="bf16", recipes=["mxfp4"], what=probe_tables.OPERANDS)
    table = probe_tables.summary(rows, ["what"]).set_index("what")
    assert table.loc["X in Fprop", ["mean", "low", "high", "layers"]].tolist() == pytest.approx([0.2, 0.1, 0.3, 2])
    assert "G in Wgrad (40 %)" in probe_findings.largest(rows, "the error")


def test_a_diverged_arm_has_an_infinite_gap_and_gaps_are_paired():
    gaps = probe_tables.loss_gaps(
        study({"bf16": [3.0, 4.0], "mxfp4": [3.5, 4.7], "mxfp4+sr": [None, 4.1], "fp8": [3.0]})
    )
    assert gaps["mxfp4"] == pytest.approx(0.6)
    assert gaps["mxfp4+sr"] == float("inf")
    assert gaps["fp8"] == 0.0


def test_the_explanation_is_judged_by_layers_and_seeds():
    good = {
        "bf16": [3.0, 3.0],
        "mxfp4": [3.3, 3.4],
        "mxfp4+h16": [3.1, 3.1],
        "mxfp4+sr": [3.5, 3.2],
        "mxfp4+rht16": [3.3, 3.2],
    }
    kept = patterns(plain=0.9, sr=0.0, rht16=0.1, h16=0.8)
    text = probe_findings.error_pattern(study(good, kept)).text
    assert "premise holds" in text and "0.80 to 0.82" in text and "agrees over 2 seeds" in text
    assert "not what a rotation adds" in text
    bad = {**good, "mxfp4+h16": [3.6, 3.6]}
    text = probe_findings.error_pattern(study(bad, kept)).text
    assert "does not follow over 2 seeds" in text and "not what a rotation adds" not in text
    mixed = {**good, "mxfp4+h16": [3.1, 3.6]}
    assert "is not decided over 2 seeds" in probe_findings.error_pattern(study(mixed, kept)).text
    weak = patterns(sr=0.5, rht16=0.1, h16=0.51)
    assert "premise does not hold" in probe_findings.error_pattern(study(good, weak)).text
    assert "(it diverged)" in probe_findings.error_pattern(study({**good, "mxfp4+h16": [None, None]}, kept)).text


def test_the_explanation_is_not_tested_without_its_rows():
    assert probe_findings.error_pattern(study({"bf16": [3.0]})).text.startswith("Not tested: no probe of pattern_next")
    alone = probe_findings.error_pattern(study({"bf16": [3.0]}, patterns(sr=0.0, h16=0.8))).text
    assert "premise holds" in alone and "consequence is not tested" in alone
    half = probe_findings.error_pattern(study({"bf16": [3.0]}, patterns(h16=0.8)))
    assert half.text.startswith("Not tested") and list(half.numbers["recipe"]) == ["mxfp4+h16"]


def sizes(**errors: float) -> pd.DataFrame:
    names = {"plain": "mxfp4", "sr": "mxfp4+sr", "rht16": "mxfp4+rht16", "h16": "mxfp4+h16"}
    return frame(
        *(("bf16", names[n], layer, "wgrad", "dw", "error", v + d)
          for n, v in errors.items() for layer, d in (("layers.0.wq", 0.0), ("layers.1.wq", 0.02)))
    )  # fmt: skip


def test_p1s_explanation_is_judged_by_the_size_of_the_error():
    losses = {"bf16": [3.0, 3.0], "mxfp4": [3.3, 3.4]}
    split = probe_findings.error_size(study(losses, sizes(plain=0.15, sr=0.21, rht16=0.13, h16=0.14)))
    assert "22 % under stochastic rounding (larger in 2 of 2 layers)" in split.text
    assert (
        "holds for stochastic rounding and does not hold for a random Hadamard transform on these tensors" in split.text
    )
    assert list(split.numbers["recipe"]) == ["mxfp4", "mxfp4+sr", "mxfp4+rht16", "mxfp4+h16"]
    assert split.numbers["loss gap"].iloc[0] == pytest.approx(0.35)
    both = probe_findings.error_size(study(losses, sizes(plain=0.15, sr=0.21, rht16=0.2))).text
    assert "holds for stochastic rounding and a random Hadamard transform on" in both and "does not hold" not in both
    neither = probe_findings.error_size(study(losses, sizes(plain=0.3, sr=0.21, rht16=0.2))).text
    assert "stochastic methods, does not hold for stochastic rounding and a random Hadamard transform on" in neither
    one = probe_findings.error_size(study(losses, sizes(plain=0.15, sr=0.21))).text
    assert one.endswith("holds for stochastic rounding on these tensors.")


def test_p1s_explanation_is_not_tested_without_its_rows():
    assert probe_findings.error_size(study({"bf16": [3.0]})).text.startswith("Not tested: no probe of error")
    half = probe_findings.error_size(study({"bf16": [3.0]}, sizes(plain=0.15, h16=0.1)))
    assert half.text.startswith("Not tested: bf16 was not probed under mxfp4 and a stochastic method")


def test_the_transposition_verdict_quotes_its_rows():
    rows = frame(
        *(("bf16", "mxfp4", "layers.0.wq", "", t, m, v) for t in "xwg"
          for m, v in (("changes", 0.25), ("mismatch", 0.1), ("mismatch_to_error", 0.5), ("mismatch_bias", -0.01))),
        ("bf16", "mxfp4", "layers.0.wq", "dgrad", "dx", "mismatch", 0.03),
        ("bf16", "mxfp4", "layers.0.wq", "dgrad", "dx", "reading_error", 0.06),
        ("bf16", "mxfp4+2d", "layers.0.wq", "", "w", "changes", 0.0),
    )  # fmt: skip
    text = probe_findings.transposition_verdict(rows, "bf16", "mxfp4").text
    assert "25 % of X, 25 % of W, 25 % of G" in text and "0.50 to 0.50" in text and "at most 1 %" in text
    assert "dX by 3 % (quantization itself: 6 %)" in text and text.endswith("With 32x32 blocks nothing changes.")
    assert probe_findings.transposition_verdict(rows, "fp8", "mxfp4").text.startswith("Not tested")
    assert "0.50 times" in probe_findings.beside(
        probe_tables.select(
            rows, ["mismatch", "reading_error"], arm="bf16", recipes=["mxfp4"], what=probe_tables.PRODUCTS
        )
    )


def tile_rows(by_row: float, by_col: float) -> pd.DataFrame:
    rows = [("row", i, j, by_row + (i == 0)) for i in range(64) for j in range(2)]
    rows += [("col", i, j, by_col) for i in range(2) for j in range(64)]
    return frame(*(("bf16", "", "layers.0.wq", "", "w", f"tile_{k}:{i}:{j}", v) for k, i, j, v in rows))


def test_a_tile_covers_64x64_values_three_times():
    scales = probe_tables.tile(tile_rows(-6, -6), "bf16")
    area = ((scales["bottom"] - scales["top"]) * (scales["right"] - scales["left"])).groupby(scales["blocks"]).sum()
    assert area.tolist() == [64 * 64] * 3
    square = scales[scales["blocks"] == "32x32"].set_index(["top", "left"])["log2_scale"]
    assert square.to_dict() == {(0, 0): -5, (0, 32): -5, (32, 0): -6, (32, 32): -6}
    assert "98 %" in probe_findings.tile_agreement(scales)  # all but the first of 64 rows
    with pytest.raises(UserError, match="no record of fp8"):
        probe_tables.tile(tile_rows(-6, -6), "fp8")


def test_a_rotation_is_said_to_lower_and_to_raise():
    rows = frame(
        ("bf16", "mxfp4+h16", "layers.0.wq", "fprop", "x", "kurtosis_before", 6.0),
        ("bf16", "mxfp4+h16", "layers.0.wq", "fprop", "x", "kurtosis", 3.0),
        ("bf16", "mxfp4+h16", "layers.0.wq", "wgrad", "x", "kurtosis_before", 3.0),
        ("bf16", "mxfp4+h16", "layers.0.wq", "wgrad", "x", "kurtosis", 9.0),
    )
    rows = probe_tables.select(
        rows, ["kurtosis", "kurtosis_before"], arm="bf16", recipes=["mxfp4+h16"], what=probe_tables.OPERANDS
    )
    text = probe_findings.rotation_effect(rows, "mxfp4+h16")
    assert (
        "lowers the kurtosis of blocks of X in Fprop (-50%)" in text
        and "raises the kurtosis of blocks of X in Wgrad (+200%)" in text
    )
    assert list(dict.fromkeys(probe_tables.before_and_after(rows)["rotation"])) == ["none", "h16"]
    assert "No record" in probe_findings.rotation_effect(rows, "mxfp4+h32")


def test_charts_draw():
    rows = probe_tables.select(ROWS, "error", arm="bf16", recipes=["mxfp4"], what=probe_tables.OPERANDS)
    table = pd.DataFrame({"arm": ["a", "b"], "mean": [0.1, 0.2], "low": 0.0, "high": 0.3, "gap": [0.1, float("inf")]})
    charts = (
        probe_charts.by_layer(rows, x="what", title="t", unit="u"),
        probe_charts.by_layer(rows, x="recipe", facet="what", title="t", unit="u", zero_line=True),
        probe_charts.layer_heat(rows, title="t", unit="u"),
        probe_charts.paired(rows, metrics={"error": "e"}, x="recipe", title="t", unit="u"),
        probe_charts.against_loss(table, x_title="x", title="t"),
        probe_charts.tile(probe_tables.tile(tile_rows(-6, -7), "bf16"), title="t"),
    )
    for chart in charts:
        bundle, _ = render(chart, "what to see")
        assert len(bundle["image/png"]) > 5000


def phased(*rows) -> pd.DataFrame:
    """Rows of (arm, layer, gemm, tensor, metric, step, value), each arm under its own recipe."""
    return pd.DataFrame([(a, 0, a, s, layer, g, t, m, v) for a, layer, g, t, m, s, v in rows], columns=COLUMNS)


def test_phases_are_steps_in_order_with_the_range_over_layers():
    rows = phased(
        *(("mxfp4", layer, "fprop", "w", "clipped", step, value + (layer == "b") * 0.02)
          for step, value in ((1200, 0.3), (200, 0.1)) for layer in "ab")
    )  # fmt: skip
    chosen = probe_tables.select(rows, "clipped", what=probe_tables.OPERANDS)
    table = probe_tables.by_phase(chosen, "arm")
    assert list(table["phase"]) == ["step 200", "step 1200"]
    assert table[["value", "low", "high"]].to_numpy().ravel() == pytest.approx([0.11, 0.1, 0.12, 0.31, 0.3, 0.32])
    assert "from 11 % at step 200 to 31 % at step 1200" in probe_findings.drift(chosen, "the clipped share")
    render(probe_charts.phase_lines(chosen, colour="layer", title="T", unit="u"), "a caption")


def test_patterns_of_arms_are_their_own_between_steps():
    rows = phased(
        ("mxfp4", "a", "fprop", "w", "pattern_next", 6, 0.9), ("mxfp4+sr", "a", "fprop", "w", "pattern_next", 6, 0.0),
        ("mxfp4", "a", "fprop", "w", "pattern_redraw", 5, 1.0), ("ti2d", "a", "fprop", "w", "pattern_next", 6, 0.5),
    )  # fmt: skip
    found = probe_tables.patterns_of_arms(rows, ["mxfp4+sr", "mxfp4", "mxfp4+h16"])
    assert list(found["arm"]) == ["mxfp4+sr", "mxfp4"] and set(found["metric"]) == {"pattern_next"}
    render(probe_charts.phase_lines(found, colour="arm", title="T", unit="u", columns=2, spread=True), "a caption")


def test_bias_by_rule_takes_each_arms_own_tensors():
    rows = phased(("mxfp4+sr", "a", "wgrad", "g", "bias", 5, -0.02), ("mxfp4", "a", "wgrad", "g", "bias", 5, -0.01))
    arms = {"mxfp4": ("even", "nearest"), "mxfp4+sr": ("even", "sr"), "mxfp4+rceil": ("rceil", "nearest")}
    table = probe_tables.bias_by_rule(rows, arms, {("wgrad", "g"): "G in Wgrad"})
    assert table.to_dict("list") == {"rule": ["even"] * 2, "rounding": ["nearest", "sr"], "value": [-0.01, -0.02]}


def test_whole_gradients_are_of_all_weights_step_by_step_with_the_loss_of_shared_seeds_beside():
    rows = frame(
        *((arm, arm, layer, "", "dw", m, v) for arm in ("mxfp4", "ti2d") for layer, at in (("all", 0.0), ("layers.0.wq", 9.0))
          for m, v in (("error", 0.3 + at), ("cosine", 0.95), ("bias", -0.1 + at))),
    )  # fmt: skip
    rows.loc[(rows["step"] == 6) & (rows["layer"] == "all") & (rows["metric"] == "error"), "value"] = 0.5
    made = study({"bf16": [3.0, 2.0], "mxfp4": [3.5, 3.5], "ti2d": [3.25]}, rows)
    table, seeds = probe_tables.whole_gradients(made, ["ti2d", "mxfp4"])
    assert seeds == 1 and list(table["arm"]) == ["ti2d", "mxfp4"]
    expected = {"error, step 5": 0.3, "error, step 6": 0.5, "gap": 0.5}
    expected |= {f"{name}, step {step}": v for name, v in (("cosine", 0.95), ("along", -0.1)) for step in (5, 6)}
    assert table.set_index("arm").loc["mxfp4"].to_dict() == pytest.approx(expected)


def test_arms_of_different_seeds_are_ranked_over_those_they_share():
    rows = frame(
        *(
            (arm, arm, "layers.0.wq", "wgrad", "dw", "error", v)
            for arm, v in (("mxfp4", 0.1), ("mxfp4+sr", 0.2), ("mxfp4+h16", 0.3))
        )
    )
    made = study({"bf16": [3.0, 1.0], "mxfp4": [3.3, 3.3], "mxfp4+sr": [3.2], "mxfp4+h16": [3.1, 3.1]}, rows)
    table = probe_tables.against_loss(made, "error", gemm="wgrad", tensor="dw").set_index("arm")
    assert table["gap"].to_dict() == pytest.approx({"mxfp4": 0.3, "mxfp4+sr": 0.2, "mxfp4+h16": 0.1})
    assert set(table["seeds"]) == {1} and probe_tables.loss_gaps(made)["mxfp4"] == pytest.approx(1.3)


def test_a_gap_far_beyond_the_others_is_cut_and_written_out():
    table = pd.DataFrame(
        {"arm": list("abcde"), "mean": np.arange(5) / 7, "low": 0.0, "high": 1.0, "gap": [0.01, 0.02, 0.03, 0.04, 1.7]}
    )
    spec = probe_charts.against_loss(table, x_title="x", title="T")
    (drawn,) = spec.to_dict()["datasets"].values()
    assert [(row["drawn"], row["label"]) for row in drawn] == [
        (0.01, ""),
        (0.02, ""),
        (0.03, ""),
        (0.04, ""),
        (0.04, "1.70"),
    ]
    assert spec.to_dict()["title"]["subtitle"] == CUT
    assert probe_charts.against_loss(table[:4], x_title="x", title="T").to_dict()["title"] == "T"
    render(spec, "a caption")


@pytest.mark.parametrize(("arms", "beyond"), [(4, 1.0), (9, 0.68), (60, 0.25)])
def test_a_correlation_is_printed_with_what_chance_gives(arms, beyond):
    table = pd.DataFrame(
        {"arm": [f"a{i}" for i in range(arms)], "mean": np.arange(arms) / 7, "gap": np.arange(arms)[::-1] * 0.01}
    )
    said = probe_findings.correlation(table, "the error")
    assert f"Over {arms} arms the rank correlation of the error with the final loss is -1.00" in said
    assert float(said.split("±")[1].rstrip(".")) == pytest.approx(beyond, abs=0.03)
    assert "too few arms" in probe_findings.correlation(table.assign(gap=0.1), "the error")


def test_extremes_of_signed_values_are_told_by_their_distance_from_zero():
    rows = frame(
        *(
            ("bf16", r, "l", "wgrad", "g", "bias", v)
            for r, v in (("mxfp4", -0.02), ("mxfp4+2d", 0.001), ("mxfp4+h16", -0.01))
        )
    )
    said = probe_findings.extremes(rows, "recipe", "the bias", "{:+.3f}")
    assert (
        said
        == "Over all tensors the bias is farthest from zero under mxfp4 (-0.020) and nearest to it under mxfp4+2d (+0.001)."
    )
    rows["value"] = rows["value"].abs()
    assert "is largest under mxfp4 (+0.020) and smallest under mxfp4+2d (+0.001)" in probe_findings.extremes(
        rows, "recipe", "it", "{:+.3f}"
    )


def test_error_parts_are_means_over_layers_and_steps():
    rows = frame(
        *(("bf16", "mxfp4", f"layers.{i}.wq", "fprop", "x", metric, value + i * 0.02)
          for i in (0, 1) for metric, value in (("split_scale", -0.01), ("split_dead", 0.1), ("split_grid", 0.2))),
    )  # fmt: skip
    table = probe_tables.error_parts(rows, "bf16", ["mxfp4"])
    assert dict(zip(table["part"], table["value"], strict=True)) == pytest.approx(
        {"scale": 0.0, "dead zone": 0.11, "grid": 0.21}
    )
    assert set(table["what"]) == {"X in Fprop"}


def test_gradient_to_noise_counts_the_layers_below_the_threshold():
    rows = frame(
        ("mxfp4", "mxfp4", "layers.0.wq", "", "dw", "gradient_to_noise", 1.7),
        ("mxfp4", "mxfp4", "layers.1.wq", "", "dw", "gradient_to_noise", 1.8),
        ("mxfp4", "mxfp4", "all", "", "dw", "gradient_to_noise", 1.75),
    )
    table = probe_tables.gradient_to_noise(rows, "mxfp4")
    assert table["step"].tolist() == [5, 6]
    assert table.iloc[0].to_dict() == pytest.approx(
        {"step": 5, "whole": 1.75, "lowest": 1.7, "highest": 1.8, "below": 0.5}
    )
    with pytest.raises(NoProbe):
        probe_tables.gradient_to_noise(rows, "mxfp4", "mxfp4+sr")
