"""torch.export and torch.compile with sizes that vary: the bytes of an eager run at every number of tokens."""

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.export import Dim, export

from mxfp4 import MXFP4Linear, set_step
from mxfp4.errors import UserError

TOKENS = (1, 31, 32, 33, 64, 128, 4096)
RECIPES = ("mxfp4+h16", "ti2d", "fp8", "quartet", "nvfp4", "mxfp4+rht16")


def model(*recipes, **options) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(MXFP4Linear(64, 64, recipe=r, fqn=f"{i}", **options) for i, r in enumerate(recipes)))


def same(program, eager, shapes) -> bool:
    return all(torch.equal(program(x), eager(x)) for x in map(torch.randn, shapes))


@pytest.mark.parametrize(
    "recipes, like, dims, shapes",
    [
        (RECIPES, (40, 64), {0: Dim("tokens", min=1, max=4096)}, [(t, 64) for t in TOKENS]),
        (RECIPES[:1], (40, 64), {0: Dim.AUTO}, [(t, 64) for t in TOKENS]),
        (
            RECIPES[1:3],
            (3, 40, 64),
            {0: Dim("batch", min=1, max=64), 1: Dim("sequence", min=1, max=512)},
            [(1, 1, 64), (1, 31, 64), (2, 32, 64), (7, 33, 64)],
        ),
    ],
    ids=["tokens", "auto", "batch and sequence"],
)
def test_an_exported_program_gives_the_bytes_at_other_sizes(recipes, like, dims, shapes):
    eager = model(*recipes).eval()
    program = export(eager, (torch.randn(like),), dynamic_shapes=(dims,))
    assert same(program.module(), eager, shapes)


def test_a_saved_program_loads_in_a_new_process_whichever_import_comes_first(tmp_path):
    eager, x, file = model("ti2d", "quartet").eval(), torch.randn(33, 64), tmp_path / "program.pt2"
    torch.export.save(export(eager, (x,), dynamic_shapes=({0: Dim.AUTO},)), file)
    assert same(torch.export.load(file).module(), eager, [(33, 64), (64, 64)])
    torch.save((x, eager(x)), tmp_path / "data.pt")
    code = (
        "import mxfp4, torch, sys; x, y = torch.load(sys.argv[1] + '/data.pt')\n"
        "program = torch.export.load(sys.argv[1] + '/program.pt2').module()\n"
        "assert torch.equal(program(x), y) and program(x[:1]).shape == (1, 64)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)


def test_an_export_that_would_draw_is_refused():
    with pytest.raises(UserError, match=r"layer '0' draws random numbers .* Call model.eval\(\) before torch.export"):
        export(model("mxfp4+sr"), (torch.randn(32, 64),))


def test_compiled_code_serves_every_number_of_tokens():
    """One graph for sizes above 1, which Dynamo takes apart; forward and both gradients."""
    torch._dynamo.reset()
    eager = model("mxfp4+h16", "fp8", "mxfp4+sr", save="packed")
    calls = []

    def backend(graph, inputs):
        calls.append(graph)
        return torch._dynamo.backends.debugging.aot_eager(graph, inputs)

    compiled = torch.compile(eager, dynamic=True, fullgraph=True, backend=backend)
    for step, tokens in enumerate((40, 31, 32, 33, 64, 128)):
        x, grad, found = torch.randn(2, tokens, 64), torch.randn(2, tokens, 64), []
        for each in (eager, compiled):
            set_step(eager, step)
            eager.zero_grad()
            given = x.clone().requires_grad_()
            y = each(given)
            y.backward(grad)
            found.append([y.detach(), given.grad, *(p.grad for p in eager.parameters())])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)), tokens
    assert len(calls) == 1
