"""All evaluations of the recorded runs as one pandas table: `mxfp4.records()`.

The records' other tables are plain parquet, and every file names its rows' arm and seed (newer ones also the run id).
A folder of records holds several kinds of table beside record.json, so `pd.read_parquet(folder)` fails. One kind is
read by its file name, and files whose columns differ are put together:

    import glob
    import pandas as pd
    files = sorted(glob.glob("runs/records/gpu/*/probes.parquet"))   # or curve, branches, evaluations, windows
    table = pd.concat(map(pd.read_parquet, files), ignore_index=True)

`pd.read_parquet(files)` is quicker and does for tables of one version alone: it takes the columns of the first file and
drops what only later ones have.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

    from mxfp4.studies.store import Record

COLUMNS = (
    "run_id", "arm", "seed", "branch", "step", "tokens", "forward", "windows", "loss", "top1", "copy_top1",
    "scale", "corpus", "weights", "budget",
)  # fmt: skip


def records(scale: str | None = None) -> pd.DataFrame:
    """One row for each evaluation and forward of each whole record in runs/records (MXFP4_RUNS names another folder).

    Args:
        scale: Name of a folder of records, such as gpu, cpu or trial; None: all.

    Returns:
        A table with COLUMNS. arm is the recipe's name; branch is "" for the run itself, else the shorter budget in
        steps or the recipe that a decay was made in; tokens are those trained on by then; forward is "own" or a
        recipe's name; windows is how many were evaluated; loss is in nats a token; top1 and copy_top1 are shares of
        tokens, NaN where they were not measured; weights are those outside the embedding and the LM head; budget is
        the run's, in tokens. Recipes of one name and different content differ in run_id.
        Records from before evaluations were kept in several forwards give the losses of their curve.

    Raises:
        UserError: `scale` cannot be a folder's name.

    """
    import pandas as pd

    from mxfp4.studies.store import Store

    found = [_evaluations(record) for record in Store().load(scale)]
    frame = pd.concat(found, ignore_index=True) if found else pd.DataFrame(columns=list(COLUMNS))
    return frame[list(COLUMNS)]


def _evaluations(record: Record) -> pd.DataFrame:
    from mxfp4.layers.recipe import shown_name

    config, rows = record.config, record.evaluations
    if rows.empty:
        curve = record.curve.dropna(subset="eval_loss")
        rows = curve[["step", "tokens"]].assign(branch="", forward="own", windows=config.eval_sequences)
        rows = rows.assign(loss=curve["eval_loss"], top1=float("nan"), copy_top1=float("nan"))
    return rows.assign(
        run_id=record.run_id, arm=shown_name(config.recipe), seed=config.seed, scale=config.scale, corpus=config.corpus,
        weights=config.model.n_params_non_embedding(), budget=config.tokens,
    )  # fmt: skip
