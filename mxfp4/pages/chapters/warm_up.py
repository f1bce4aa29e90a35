"""The warm-up pilot of scale gpu: what the length of the warm-up does to the gap between FP8 and BF16.

Source: runs/pilot/gpu-warm-up.json. A setting is a learning rate and a warm-up (steps); the runs of a setting and seed
start alike and see the same batches, so a gap, in nats a token, is taken within a seed. Runs differ in length, so they
are compared at the last step at which all of them were evaluated. They are older than scale gpu's fixed order of sums
and its products on FP8 units, so they cannot be repeated to the bit. `largest_grad_norm` is over the steps from 10 on,
as the first ones are large in every run.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import altair as alt
import pandas as pd

from mxfp4.directories import pilot_dir
from mxfp4.errors import UserError
from mxfp4.pages.charts import PALETTE

ARM, REFERENCE = "fp8", "bf16"
_RUN = ("recipe", "seed", "lr", "warmup", "steps", "largest_grad_norm", "at_step")


@dataclass(frozen=True)
class Pilot:
    """The recorded runs. A setting is named "lr 0.002, warm-up 60"."""

    machine: str
    runs: pd.DataFrame
    """A row a run: recipe, seed, lr, warmup, steps, largest_grad_norm, at_step, setting."""
    losses: pd.DataFrame
    """A row a run and evaluation: recipe, seed, lr, warmup, setting, step, eval_loss (nats a token)."""

    @property
    def last(self) -> int:
        """The last step at which every run was evaluated."""
        return max(set.intersection(*(set(g["step"]) for _, g in self.losses.groupby(["setting", "recipe", "seed"]))))

    @property
    def first_study(self) -> str:
        """The setting that has the most recipes: that of the whole study which the others were run to understand."""
        return self.runs.groupby("setting", sort=False)["recipe"].nunique().idxmax()

    @property
    def settings(self) -> list[str]:
        """The first study's setting, then the others by warm-up and learning rate."""
        others = self.runs.sort_values(["warmup", "lr"])["setting"].unique()
        return [self.first_study, *(s for s in others if s != self.first_study)]

    def recipes(self) -> list[str]:
        """Recipes of the first study with quantized products, in the record's order."""
        rows = self.runs[self.runs["setting"] == self.first_study]
        return [r for r in rows["recipe"].unique() if r != REFERENCE]

    def about(self) -> str:
        """A sentence: what was run, where, and that it is of scale gpu whatever scale a page is of."""
        first = self.runs["setting"] == self.first_study
        steps = [f"{'/'.join(map(str, sorted(set(self.runs.loc[rows, 'steps']))))} steps" for rows in (first, ~first)]
        return (
            f"Whatever scale this page is of, this section is of scale gpu: {len(self.runs)} runs on {self.machine}. "
            f"{first.sum()} of them are a first study of all recipes ({self.first_study}, {steps[0]}), the rest a "
            f"pilot of {ARM} and {REFERENCE} alone at other settings ({steps[1]}). They lie in "
            "runs/pilot/gpu-warm-up.json. All are older than this scale's fixed order of sums, and emulated FP8: part of a "
            "gap may be what such a run differs from its own repetition by."
        )


def load(path: Path | str | None = None) -> Pilot:
    """The pilot of a file (default: the committed one). UserError where it is missing, no JSON, or lacks a field."""
    path = Path(path) if path is not None else pilot_dir() / "gpu-warm-up.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        runs = pd.DataFrame([{name: run[name] for name in _RUN} for run in data["runs"]])
        runs["setting"] = [f"lr {run['lr']:g}, warm-up {run['warmup']}" for run in data["runs"]]
        whose = runs[["recipe", "seed", "lr", "warmup", "setting"]]
        parts = [
            pd.DataFrame(run["curve"])[["step", "eval_loss"]].assign(**row)
            for run, row in zip(data["runs"], whose.to_dict("records"), strict=True)
        ]
        return Pilot(data["machine"], runs, pd.concat(parts, ignore_index=True))
    except OSError as error:
        raise UserError(f"cannot read the pilot {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not a pilot's record: {type(error).__name__}: {error}") from None


def gaps(pilot: Pilot, arm: str = ARM, reference: str = REFERENCE) -> pd.DataFrame:
    """setting, lr, warmup, seed, step, gap: loss of `arm` less that of `reference`, nats, where a seed has both."""
    keys = ["setting", "lr", "warmup", "seed", "step"]
    losses = pilot.losses.set_index(keys)
    ours, theirs = (losses.loc[losses["recipe"] == name, "eval_loss"] for name in (arm, reference))
    return (ours - theirs).dropna().rename("gap").reset_index()


def _at(pilot: Pilot, step: int, arm: str, reference: str, setting: str) -> pd.Series:
    """Gaps at a step, a seed each."""
    frame = gaps(pilot, arm, reference)
    return frame[(frame["step"] == step) & (frame["setting"] == setting)].set_index("seed")["gap"]


def _span(values: pd.Series) -> str:
    low, high = values.min(), values.max()
    return f"{low:+.3f}" if low == high else f"{low:+.3f} to {high:+.3f}"


def gap_text(pilot: Pilot) -> str:
    """A sentence: the gap of fp8 to bf16 at the end, its range over seeds, setting after setting."""
    parts = [f"{_span(_at(pilot, pilot.last, ARM, REFERENCE, s))} ({s})" for s in pilot.settings]
    seeds = gaps(pilot)["seed"].nunique()
    return f"At step {pilot.last} {ARM} lies from {REFERENCE}, over {seeds} seeds, in nats: {', '.join(parts)}."


def moved_text(pilot: Pilot) -> str:
    """Which of the two arms a longer warm-up moves: the change of each one's mean loss, rate after rate."""
    end = pilot.losses[pilot.losses["step"] == pilot.last]
    short, long = end["warmup"].min(), end["warmup"].max()
    paired = gaps(pilot)[["setting", "seed"]].drop_duplicates()
    means = end.merge(paired).groupby(["lr", "recipe", "warmup"])["eval_loss"].mean().unstack("warmup")
    change = (means[long] - means[short]).dropna().unstack("recipe").dropna()
    if short == long or change.empty:
        return "No learning rate was run with two lengths of warm-up."
    moves = [
        f"at lr {lr:g} {REFERENCE} by {row[REFERENCE]:+.3f} and {ARM} by {row[ARM]:+.3f} nats"
        for lr, row in change.iterrows()
    ]
    text = f"From {short} to {long} steps of warm-up the mean loss at step {pilot.last} moves {', '.join(moves)}."
    if (change[REFERENCE] > 0).all() and (change[ARM].abs() < change[REFERENCE] / 2).all():
        text += (
            f" So the gap closes because {REFERENCE} gives up what the short warm-up had gained it, not because {ARM} "
            "gains."
        )
    return text


def recipes_frame(pilot: Pilot) -> pd.DataFrame:
    """The first study at the last shared step, a row a recipe with quantized products, by its gap to bf16: over_bf16
    and over_fp8 (mean over seeds, nats), and of each seed, as text."""
    rows = []
    for recipe in pilot.recipes():
        row: dict = {"recipe": recipe}
        for name, reference in (("over_bf16", REFERENCE), ("over_fp8", ARM)):
            values = _at(pilot, pilot.last, recipe, reference, pilot.first_study)
            each = [f"{v:+.3f}".replace("-", "\u2212") for v in values]
            row |= {name: values.mean(), f"{name}_seeds": ",\u00a0".join(each)}
        rows.append(row)
    return pd.DataFrame(rows).sort_values("over_bf16", ignore_index=True)


def recipes_text(pilot: Pilot) -> str:
    """How many recipes end above bf16; how many with MXFP4 a comparison with fp8 finds no worse, and which worst."""
    above = [(_at(pilot, pilot.last, r, REFERENCE, pilot.first_study) > 0).all() for r in pilot.recipes()]
    four = recipes_frame(pilot).query("recipe != @ARM").sort_values("over_fp8")
    free = list(four.loc[four["over_fp8"] <= 0, "recipe"])
    worst = four.tail(3).iloc[::-1]
    far = ", ".join(f"{r.recipe} ({r.over_fp8:+.3f})" for r in worst.itertuples())
    return (
        f"{sum(above)} of {len(above)} recipes with quantized products end above {REFERENCE} in every seed. Read "
        f"against {ARM} instead, {len(free)} of {len(four)} recipes with MXFP4 end level or below on average"
        f"{': ' + ', '.join(free) if free else ''}. Farthest above {ARM} are {far}."
    )


def norm_text(pilot: Pilot) -> str:
    """Whether a spike of the gradient's norm goes with the gap: where the largest was, and the rank correlation."""
    top = pilot.runs.loc[pilot.runs["largest_grad_norm"].idxmax()]
    first = pilot.runs[(pilot.runs["setting"] == pilot.first_study) & (pilot.runs["recipe"] != REFERENCE)]
    ranks = []
    for seed, rows in first.groupby("seed"):
        gap = [_at(pilot, pilot.last, r, REFERENCE, pilot.first_study).get(seed) for r in rows["recipe"]]
        rank = rows["largest_grad_norm"].rank().corr(pd.Series(gap, index=rows.index).rank())
        ranks.append(f"{rank:+.2f} in seed {seed}")
    return (
        f"The largest norm of all, {top['largest_grad_norm']:.1f}, is of {top['recipe']} (seed {top['seed']}, "
        f"{top['setting']}, step {top['at_step']}). In the first study the rank correlation of a recipe's largest norm "
        f"with its gap to {REFERENCE} is {' and '.join(ranks)}; were the spike the cause, it would be well above zero."
    )


def early_text(pilot: Pilot, step: int = 256) -> str:
    """How much of the first study's gaps to bf16 is there early: their means, and their correlation over runs."""
    early, end = (
        pd.concat({r: _at(pilot, at, r, REFERENCE, pilot.first_study) for r in pilot.recipes()})
        for at in (step, pilot.last)
    )
    return (
        f"At step {step} the first study's gaps to {REFERENCE} are {early.mean():+.3f} nats on average, at step "
        f"{pilot.last} {end.mean():+.3f}, and over its {len(end)} quantized runs the two correlate by "
        f"{early.corr(end):.2f}."
    )


def _colour(pilot: Pilot) -> alt.Color:
    colours = alt.Scale(domain=pilot.settings, range=[PALETTE[1], PALETTE[0], *PALETTE[2:]])
    return alt.Color("setting:N", title=None, sort=pilot.settings, scale=colours, legend=alt.Legend(columns=3))


def gap_chart(pilot: Pilot, *, title: str, after: int = 0) -> alt.LayerChart:
    """The gap of fp8 to bf16 at each evaluation from step `after` on: a colour a setting, a line a seed."""
    frame = gaps(pilot)
    shown = frame[frame["step"] >= after].assign(seed=lambda f: f["seed"].astype(str))
    seeds = sorted(shown["seed"].unique())
    dashes = alt.Scale(domain=seeds, range=[[6, 3 * i] if i else [1, 0] for i in range(len(seeds))])
    line = alt.Chart(shown).mark_line(point=alt.OverlayMarkDef(size=22)).encode(
        x=alt.X("step:Q", title="step", scale=alt.Scale(nice=False)),
        y=alt.Y("gap:Q", title=f"{ARM} - {REFERENCE}, nats a token"),
        color=_colour(pilot), strokeDash=alt.StrokeDash("seed:N", sort=seeds, legend=None, scale=dashes),
        tooltip=["setting", "seed", "step", alt.Tooltip("gap:Q", format="+.4f")],
    )  # fmt: skip
    zero = alt.Chart(pd.DataFrame({"zero": [0]})).mark_rule(strokeDash=[3, 3]).encode(y="zero:Q")
    heading = alt.TitleParams(title, subtitle=f"solid: seed {seeds[0]}; with gaps: seed {', '.join(seeds[1:])}")
    return alt.layer(zero, line).properties(title=heading)


def norm_chart(pilot: Pilot, *, title: str) -> alt.Chart:
    """The largest norm of the gradient of every run: a row a recipe, a colour a setting."""
    order = list(dict.fromkeys(pilot.runs["recipe"]))
    columns = ["recipe", "seed", "setting", "largest_grad_norm", "at_step"]
    return alt.Chart(pilot.runs[columns]).mark_point(size=60, opacity=0.8).encode(
        x=alt.X("largest_grad_norm:Q", title="largest norm of the gradient from step 10 on (log axis)",
                scale=alt.Scale(type="log", nice=False, padding=12)),
        y=alt.Y("recipe:N", sort=order, title=None, axis=alt.Axis(labelLimit=200, grid=True)),
        color=_colour(pilot),
        tooltip=["recipe", "setting", "seed", alt.Tooltip("largest_grad_norm:Q", format=".2f"), "at_step"],
    ).properties(title=title, height=alt.Step(20))  # fmt: skip
