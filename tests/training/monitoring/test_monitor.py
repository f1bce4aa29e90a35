"""What a run leaves for whoever watches it: lines, curves elsewhere, a trace; also when it resumes or a sink fails."""

from __future__ import annotations

import gzip
import io
import json
import math
import re
import sys
import types
import warnings

import pytest

from mxfp4.errors import Notice, UserError
from mxfp4.training.loop import train
from mxfp4.training.monitoring import line_log, writers
from mxfp4.training.monitoring.monitor import Monitor, Monitoring
from mxfp4.training.monitoring.profile_window import Window, window
from tests.fakes import FakeCorpus, tiny_config


def watched(folder, monitoring, *, until=99, **changes):
    """Train the tiny run, from its checkpoint, up to a step."""
    config = tiny_config(**changes)
    steps = []
    monitor = monitoring.monitor("bf16-s0", config.steps, folder / "log", config.to_dict())
    result = train(
        config, corpus=FakeCorpus(), device="cpu", checkpoint_dir=folder, progress=False, monitor=monitor,
        on_step=steps.append, stop=lambda: bool(steps) and steps[-1] >= until,
    )  # fmt: skip
    return monitor, result


class FakeWriter:
    """SummaryWriter's and wandb's public calls, into one list."""

    sent: list

    def __init__(self, log_dir=None, purge_step=None, **options):
        self.sent.append(("open", purge_step, options))

    def add_scalar(self, name, value, step):
        assert math.isfinite(value)
        self.sent.append((step, name, value))

    def log(self, values, step):
        self.sent += [(step, name, value) for name, value in values.items()]

    def flush(self):
        pass

    def close(self):
        self.sent.append(("close",))

    def finish(self, exit_code):
        self.sent.append(("finish", exit_code))


@pytest.fixture
def sent(monkeypatch):
    """Both libraries as stand-ins; what they were told."""
    FakeWriter.sent = []
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=FakeWriter))
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=lambda **o: FakeWriter(**o)))
    return FakeWriter.sent


def test_a_line_every_few_steps_in_the_file_and_where_stderr_is_no_terminal(tmp_path, monkeypatch):
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    watched(tmp_path, Monitoring(stderr=True, log_every=5), until=6)
    assert stderr.getvalue() == ""  # a run of seconds
    monkeypatch.setattr(line_log, "QUIET_SECONDS", 0.0)
    watched(tmp_path, Monitoring(stderr=True, log_every=5))
    text = (tmp_path / "log" / "train.log").read_text()
    lines = [re.sub(r"^\S+Z bf16-s0 ", "", line) for line in text.splitlines()]
    kept = [re.match(r"(step \d+/12|\w+ at step \d+/12)", line)[1] for line in lines]
    assert kept == [
        "started at step 0/12", "step 0/12", "step 4/12", "step 5/12", "paused at step 6/12",
        "resumed at step 6/12", "step 8/12", "step 10/12", "step 12/12", "finished at step 12/12",
    ]  # fmt: skip
    assert re.fullmatch(
        r"step 10/12 loss \d\.\d{4} lr 0\.00\d+ grad [\d.]+, [\d.]+( k| M)? tokens/s, \d+ s left", lines[7]
    )
    assert re.search(r"evaluation own \d\.\d{4}", lines[6])
    said = stderr.getvalue().splitlines()
    assert said[0] == f"bf16-s0: log in {tmp_path / 'log' / 'train.log'}"
    assert said[1:] == text.splitlines()[6:]


def test_a_terminal_has_its_bar_alone_and_a_long_run_a_bounded_file(tmp_path):
    terminal = types.SimpleNamespace(isatty=lambda: True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", terminal)
        assert line_log.LineLog("a", 10, tmp_path, stderr=True).stream is None
    assert line_log.LineLog("a", 1_200_000, tmp_path).every == 12_000


@pytest.mark.parametrize("name", writers.WRITERS)
def test_curves_elsewhere_have_each_step_once_also_after_a_stop(tmp_path, sent, name):
    watched(tmp_path, Monitoring(log_to=name), until=6, eval_forwards=("bf16",))
    watched(tmp_path, Monitoring(log_to=name), eval_forwards=("bf16",))
    scalars = [entry for entry in sent if isinstance(entry[0], int)]
    assert [step for step, what, _ in scalars if what == "train/loss"] == list(range(1, 13))
    assert [step for step, what, _ in scalars if what == "eval/loss_own"] == [0, 4, 8, 12]
    assert {what for _, what, _ in scalars} == {
        "train/loss", "train/lr", "train/grad_norm", "train/tokens_per_second", "eval/loss_own", "eval/loss_bf16",
    }  # fmt: skip
    opened = [entry for entry in sent if entry[0] == "open"]
    assert len(opened) == 2 and sent[-1] in (("close",), ("finish", 0))
    if name == "tensorboard":  # hides what a killed run wrote after its checkpoint
        assert [entry[1] for entry in opened] == [0, 7]
    else:
        assert all(entry[2]["id"] == "log" and entry[2]["resume"] == "allow" for entry in opened)


def test_a_sink_that_fails_is_named_once_and_the_run_goes_on(tmp_path, sent, monkeypatch):
    def full(self, name, value, step):
        raise OSError("No space left on device")

    monkeypatch.setattr(FakeWriter, "add_scalar", full)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        monitor, result = watched(tmp_path, Monitoring(log_to="tensorboard"))
    notices = [str(w.message) for w in caught if w.category is Notice]
    assert notices == [
        "TensorBoard failed and is left out, the run goes on: OSError: No space left on device"
    ] and len(monitor.sinks) == 1  # fmt: skip
    assert result.outcome["status"] == "finished"


def test_watching_changes_no_curve(tmp_path, sent):
    _, seen = watched(tmp_path, Monitoring(log_to="wandb", profile=Window(3, 2)))
    alone = train(tiny_config(), corpus=FakeCorpus(), device="cpu", progress=False)
    assert [str(row) for row in seen.curve] == [str(row) for row in alone.curve]
    trace = json.loads(gzip.decompress((tmp_path / "log" / "trace-3-4.json.gz").read_bytes()))
    names = [e["name"] for e in trace["traceEvents"] if e.get("name", "").startswith("ProfilerStep")]
    assert len(set(names)) == 2


def test_a_window_that_a_resumed_run_has_passed_is_said(tmp_path):
    watched(tmp_path, Monitoring(), until=6)
    with pytest.warns(Notice, match="the run goes on from step 6, no trace"):
        watched(tmp_path, Monitoring(profile=Window(3, 2)))


@pytest.mark.parametrize(
    ("monitoring", "said"),
    [
        (Monitoring(profile=Window(1, 3)), "covers steps 1 to 3: allowed are 2 to 12"),
        (Monitoring(profile=Window(10, 4)), "covers steps 10 to 13: allowed are 2 to 12"),
        (Monitoring(log_to="paper"), "log_to='paper' is not known; allowed: tensorboard, wandb"),
        (
            Monitoring(log_to="wandb"),
            "--log-to wandb needs the package wandb, which is not installed: pip install wandb",
        ),
    ],
)
def test_what_cannot_be_watched_is_refused(monitoring, said, monkeypatch):
    monkeypatch.setattr(writers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=re.escape(said)):
        monitoring.check(12)


@pytest.mark.parametrize("text", ["5", "5:0", "a:b", "-3:4"])
def test_no_window(text):
    with pytest.raises(UserError, match="write START:STEPS"):
        window(text)


def test_a_replay_shows_no_step_twice(tmp_path):
    def run(steps):
        return types.SimpleNamespace(step=steps, rows=[{"step": s} for s in range(steps + 1)])

    shown = []
    monitor = Monitor([types.SimpleNamespace(rows=lambda fresh, _: shown.extend(r["step"] for r in fresh))])
    for steps in (0, 3, 2, 3, 5):
        monitor.rows(run(steps))
    assert shown == [0, 1, 2, 3, 4, 5]
