"""The table of deviations: what it says of the scale follows the scale, what it names exists."""

from __future__ import annotations

import argparse
import re
from dataclasses import astuple, replace

from mxfp4.analysis import deviations as module
from mxfp4.analysis.deviations import deviations
from mxfp4.cli.commands import train
from mxfp4.data.corpora import check_name
from mxfp4.training.config import TrainConfig


def test_here_is_read_from_the_defaults(monkeypatch):
    before = {row.point: row.here for row in deviations()}
    assert before["end of document"] == "no token between documents" and before["RoPE"] == "none"
    model = replace(module.MI355X.model, rope_scaling_factor=8.0)
    monkeypatch.setattr(module, "MI355X", replace(module.MI355X, append_eod=True, warmup=64, model=model))
    monkeypatch.setattr(module, "DEFAULT_SHARDS", (768, 895))
    changed = {row.point: row.here for row in deviations() if row.here != before[row.point]}
    assert changed == {
        "end of document": "a token after each document",
        "RoPE": "factor 8",
        "shards of C4": "768-895",
        "warm-up": "64 steps",
    }


def test_parameters_exist():
    parser = argparse.ArgumentParser()
    train.add_plan_arguments(parser)
    known = set(parser.format_help().replace("|", " ").replace(",", " ").split())
    for row in deviations():
        assert all(astuple(row))
        assert set(re.findall(r"--[a-z-]+", row.parameter)) <= known, row.parameter
        for corpus in re.findall(r"--corpus (\S+)", row.parameter):
            check_name(corpus)
        for name in re.findall(r"TrainConfig\.(\w+)", row.parameter):
            assert name in TrainConfig.__dataclass_fields__
