"""The command line: every sub-command is there, errors are one line, defects keep their traceback."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

import pytest

import mxfp4
from mxfp4 import cli
from mxfp4.cli import commands
from mxfp4.errors import UserError

COMMANDS = {"book", "claims", "doctor", "export", "plan", "prepare", "run", "scale", "status", "train"}


def test_help_names_every_command(capsys):
    assert cli.main([]) == 2
    text = capsys.readouterr().out
    assert all(f"    {name} " in text for name in COMMANDS)


def test_every_command_has_help_and_a_handler():
    parser = cli.build_parser()
    (subparsers,) = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    assert set(subparsers.choices) >= COMMANDS
    for name, sub in subparsers.choices.items():
        assert sub.get_default("handler"), name
        assert sub.description and all(a.help for a in sub._actions), name


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"mxfp4 {mxfp4.__version__}\n"


def _fake(monkeypatch, handler):
    class Module:
        @staticmethod
        def add_parser(subparsers):
            subparsers.add_parser("fake").set_defaults(handler=handler)

    monkeypatch.setattr(commands, "modules", lambda: iter([Module]))


@pytest.mark.parametrize(
    ("raised", "code", "said"), [(UserError("no x"), 1, "error: no x\n"), (KeyboardInterrupt(), 130, "interrupted\n")]
)
def test_user_errors_are_one_line(monkeypatch, capsys, raised, code, said):
    def handler(args):
        raise raised

    _fake(monkeypatch, handler)
    assert cli.main(["fake"]) == code
    assert capsys.readouterr().err == said


def test_defects_keep_their_traceback(monkeypatch):
    _fake(monkeypatch, lambda args: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        cli.main(["fake"])


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["run"], "error: say which notebook, or --all"),
        (["run", "--all", "-p", "a=1"], "error: -p belongs to one notebook, not to --all"),
        (["run", "nothing-like-it"], "error: nothing-like-it is no notebook"),
        (["plan", "--arm", "mxfp5"], "error: recipe 'mxfp5' is not known"),
        (["train", "--dry-run", "--arm", "mxfp4+sr+x"], "error: modifier 'x' of recipe 'mxfp4+sr+x' is not known"),
        (["plan", "--corpus", "bogus"], "error: unknown corpus 'bogus'; known: prose"),
        (["plan", "--corpus", ""], "error: unknown corpus ''"),
        (["plan", "--corpus", "c4:9-3"], "error: shards 9-3: the range must lie within"),
        (["plan", "--corpus", "c4:0768-0895"], "error: corpus 'c4:0768-0895': shards are named once, as in c4:768-895"),
        (["plan", "--plan", "synthetic", "--corpus", "prose"], "error: plan 'synthetic' is about corpus 'synthetic'"),
        (["train", "--dry-run", "--jobs", "0"], "error: jobs=0 must be at least 1"),
        (["train", "--dry-run", "--gpu-memory", "-5"], "error: gpu_memory=-5 must be a positive number of GB"),
        (["train", "--dry-run", "--gpu-memory", "nan"], "error: gpu_memory=nan must be a positive number of GB"),
        (["train", "--dry-run", "--gpus", "0", "--gpu-memory", "0"], "error: gpu_memory=0 must be"),
        (["train", "--dry-run", "--recompute-every", "-2"], "error: recompute_every=-2 must be 0 (no block) or more"),
        (["book", "--scale", "huge"], "error: scale 'huge' is not known; allowed: cpu, gpu, mi355x"),
    ],
)
def test_messages(argv, said, capsys):
    assert cli.main(argv) == 1
    out = capsys.readouterr()
    assert out.err.startswith(said) and out.err.count("\n") == 1


def test_parameters_of_a_chapter_are_listed(capsys):
    assert cli.main(["run", "format", "--list"]) == 0
    assert "scale_rule: str = 'even'" in capsys.readouterr().out


def test_as_a_module_with_a_reader_that_leaves():
    code = "import sys; sys.argv = ['mxfp4', '--help']; from mxfp4.cli import main; sys.exit(main())"
    done = subprocess.run(f'{sys.executable} -c "{code}" | head -c 1', shell=True, capture_output=True, text=True)
    assert done.stdout == "u" and "Traceback" not in done.stderr


@pytest.mark.parametrize("scale, device", [("gpu", "cuda"), ("cpu", None)])
def test_the_plan_of_a_gpu_scale_is_of_gpu_records_wherever_it_is_read(scale, device, monkeypatch, capsys, tmp_path):
    from mxfp4.studies.store import Store

    asked = set()
    monkeypatch.setenv("MXFP4_RUNS", str(tmp_path))
    monkeypatch.setattr(Store, "get", lambda self, config, device=None: asked.add(device))
    assert cli.main(["plan", "--scale", scale, "--plan", "p2"]) == 0
    assert asked == {device}
    assert "0 of" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["trian"], "error: 'trian' is no command: did you mean trial or train?"),
        (["zzz"], "error: 'zzz' is no command: known: bench, book, claims"),
        (["plan", "--sclae", "gpu"], "error: unrecognized arguments: --sclae gpu: did you mean --scale or --seed?"),
        (["status", "--xyz"], "error: unrecognized arguments: --xyz\n"),
    ],
)
def test_misspelt_words_get_a_hint(argv, said, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == 2 and said in capsys.readouterr().err


def test_status_plan_and_dry_run_as_json(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("MXFP4_RUNS", str(tmp_path))

    def answer(*argv):
        assert cli.main([*argv, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    assert answer("status") == {"runs": str(tmp_path), "records": {}, "begun": [], "packings": []}
    planned = answer("plan", "--plan", "table1")
    assert planned["command"] == "mxfp4 train --scale cpu --plan table1"
    assert {arm["status"] for arm in planned["arms"]} == {"missing"}
    dry = answer("train", "--dry-run", "--plan", "table1")
    assert len(dry["arms"]) == len(planned["arms"]) and dry["problems"] == [] and dry["machine"]["gpus"] == 0
    assert cli.main(["train", "--json"]) == 1 and "--json goes with --dry-run" in capsys.readouterr().err
