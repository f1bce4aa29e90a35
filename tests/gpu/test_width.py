"""The demonstration at full width, small and on the CPU: killed where a checkpoint is whole, else it says so."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("width.py")
SAVE, KILL, STEPS = 25, 30, 50


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """mxfp4+h16 as it should be; of bf16 a file stands where its checkpoint would be."""
    folder = tmp_path_factory.mktemp("width")
    (folder / "bf16").mkdir()
    (folder / "bf16" / f"step-{SAVE:08d}").touch()
    command = [sys.executable, "-W", "ignore", SCRIPT, "--tiny", "--ranks", "2", "--then", "1", "--seq", "32"]
    command += ["--save", SAVE, "--kill", KILL, "--steps", STEPS, "--recipes", "mxfp4+h16", "bf16", "--folder", folder]
    words = [str(word) for word in [*command, "--json", folder / "width.json"]]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    ended.rows = json.loads((folder / "width.json").read_text())["rows"]
    return ended


def test_a_run_is_killed_where_its_checkpoint_is_whole_and_goes_on_from_it(done):
    said = re.search(r"killed at step (\d+), where the checkpoint of step (\d+) is whole", done.stdout)
    killed, saved = said.groups()
    assert KILL <= int(killed) <= STEPS and int(saved) == SAVE
    assert f"from step {SAVE} to {STEPS}, finished" in done.stdout


def test_it_says_where_its_time_went(done):
    first, second, *_ = re.findall("seconds: .*", done.stdout)
    laps = "start", "meeting", "other", "model", "load", "first step", "warm-up", "steps"
    number = r"\d+\.\d"
    whole = f"seconds: {', '.join(f'{name} {number}' for name in laps)}"
    assert re.fullmatch(f"{whole}; checkpoint: a step waited {number}, written after {number}", first)
    assert re.fullmatch(whole, second)


def test_without_a_whole_checkpoint_it_runs_to_its_end_and_fails(done):
    assert done.returncode == 1
    assert f"bf16: no checkpoint was whole before the last step, {STEPS}" in done.stderr
    assert "bf16         1 ranks" not in done.stdout


def test_the_file_holds_what_was_printed_of_runs_that_ended_as_meant(done):
    before, after = done.rows
    assert (before["recipe"], before["ranks"], before["saved"]) == ("mxfp4+h16", 2, SAVE) and before["killed"] >= KILL
    assert (after["recipe"], after["ranks"], after["from"], after["status"]) == ("mxfp4+h16", 1, SAVE, "finished")
    assert f"{before['tokens_per_second']:.0f} tokens/s" in done.stdout and len(before["peak_bytes"]) == 2
    assert f"evaluation {after['loss']:.3f}" in done.stdout and before["estimated_bytes"] > after["estimated_bytes"] / 2
