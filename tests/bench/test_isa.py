"""What the kernels compile to for chips that are not here: FP4 matrix units and conversions, no memory for registers."""

import json
from pathlib import Path

import pytest

pytest.importorskip("triton.backends.amd")

from mxfp4.bench import isa
from mxfp4.cli import main


@pytest.mark.parametrize("kernel", isa.GEMMS)
def test_gfx950_multiplies_fp4_and_fp8_blocks_with_their_scales(kernel):
    report = isa.report(kernel, "gfx950")
    assert set(report.matrix) <= {"v_mfma_scale_f32_32x32x64_f8f6f4", "v_mfma_scale_f32_16x16x128_f8f6f4"}
    assert report.matrix and not report.conversions
    assert report.spills == report.scratch == 0
    assert report.shared <= 160 * 1024


@pytest.mark.parametrize("kernel", isa.GEMMS)
def test_sm_100_multiplies_blocks_with_their_scales(kernel):
    report = isa.report(kernel, "sm_100")
    kind = "mxf8f6f4" if "mxfp8" in kernel else "mxf4"
    assert report.matrix and all(
        m.startswith("tcgen05.mma") and f"kind::{kind}.block_scale" in m for m in report.matrix
    )
    assert report.spills == report.scratch == 0


@pytest.mark.parametrize(
    "arch, conversion",
    [("gfx950", "v_cvt_scalef32_pk_fp4_f32"), ("sm_100", "cvt.rn.satfinite.e2m1x2.f32"), ("sm_90", None)],
)
def test_both_orientations_stay_in_registers(arch, conversion):
    report = isa.report("quantize h16, both", arch)
    assert report.spills == report.scratch == report.shared == 0
    assert not report.matrix
    assert set(report.conversions) == ({conversion} if conversion else set())


@pytest.mark.parametrize("kernel", ["quantize h16 sr, both", "fake quantize h16, both"])
def test_no_scratch_with_random_rounding_or_values(kernel):
    for arch in ("gfx950", "sm_90"):
        report = isa.report(kernel, arch)
        assert report.spills == report.scratch == 0


@pytest.mark.parametrize("arch, native", [("sm_90", True), ("sm_100", True), ("gfx950", False)])
@pytest.mark.parametrize("along, turned", [(True, True), (True, False), (False, True)])
def test_fp8_codes_compile_without_contraction_or_scratch(arch, native, along, turned):
    """Of a multiply and an add that were contracted, a tie could round the other way."""
    import torch

    from mxfp4.numerics.kernels.triton import fp8 as k

    x = torch.empty((4096, 1024), dtype=torch.bfloat16, device="meta")
    out = torch.empty((4096, 1024), dtype=torch.uint8, device="meta") if along else None
    out_turned = torch.empty((1024, 4096), dtype=torch.uint8, device="meta") if turned else None
    amax, factor = torch.empty((), dtype=torch.int32, device="meta"), torch.empty((), device="meta")
    _, sizes, arguments, options = k.launch(x, out, out_turned, amax, factor, "e5m2", native)
    target = isa.ARCHS[arch]
    compiled = isa.compile_for(target, k._codes_kernel, {**arguments, **sizes}, options)
    count = (isa._count_amd if target.backend == "hip" else isa._count_nvidia)(compiled)
    assert count["spills"] == count["scratch"] == 0
    if native:
        assert set(count["conversions"]) == {"cvt.rn.satfinite.e5m2x2.f32"} and "fma" not in compiled.asm["ptx"]
    amax_only = {"x_ptr": x, "amax_ptr": amax, **sizes}
    found = isa.compile_for(target, k._amax_kernel, amax_only, {"SIDE": k.SIDE, "num_warps": 8})
    asm, largest = ("amdgcn", "global_atomic_smax") if target.backend == "hip" else ("ptx", ".max.s32")
    assert largest in found.asm[asm]


def test_counts_of_work_come_from_the_shapes():
    gemm = isa.report("gemm mxfp4", "gfx950")
    m, n, k = isa.ROWS, isa.COLUMNS, isa.INNER
    assert gemm.flops == 2 * m * n * k
    assert gemm.bytes == (m + n) * (k // 2 + k // 32) + 2 * m * n
    quantize = isa.report("quantize h16, both", "gfx950")
    assert quantize.bytes == m * k * 2 + 2 * m * (k // 2 + k // 32)
    assert isa.flops_an_element(isa.orientation(32)) == isa.flops_an_element(isa.orientation(16)) + 1


def test_the_command_prints_and_writes_json(capsys, monkeypatch):
    monkeypatch.setattr(isa, "kernels_of", lambda arch: ["quantize"])
    assert main(["isa", "--arch", "gfx950"]) == 0
    assert "v_cvt_scalef32_pk_fp4_f32" in capsys.readouterr().out
    assert main(["isa", "--arch", "gfx950", "--arch", "sm_90", "--json"]) == 0
    reports = json.loads(capsys.readouterr().out)
    assert [r["arch"] for r in reports] == ["gfx950", "sm_90"]
    assert reports[0]["conversions"] == {"v_cvt_scalef32_pk_fp4_f32": 32}


def test_without_triton_the_command_says_what_to_install(capsys, monkeypatch):
    from mxfp4.cli.commands import isa as command

    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    assert main(["isa"]) == 1
    said = capsys.readouterr().err
    assert "-r requirements-interpreter.txt" in said and said.count("\n") == 1
    assert (Path(__file__).parents[2] / "requirements-interpreter.txt").is_file()


@pytest.mark.parametrize("rows, columns", [(2**23, 32), (32, 2**23)])
def test_sizes_and_strides_of_one_compile_with_64_bit_offsets(rows, columns):
    """Triton passes an argument of 1 as a Python integer, which a kernel must not take for a number of its own."""
    import torch

    from mxfp4.numerics.kernels.triton import block_kernel
    from mxfp4.numerics.kernels.triton import quantize as k

    x = torch.empty((1, rows, columns), dtype=torch.bfloat16, device="meta")
    how = isa.orientation(16)
    outputs = k.outputs(x, (1, rows, columns), how), k.outputs(x, (1, columns, rows), how)
    _, arguments, options = k.launch(x, how, how, None, *outputs, 90, 32)
    assert options["WIDE"]
    assert isa.compile_for(isa.ARCHS["sm_90"], block_kernel.quantize_kernel, arguments, options).asm["cubin"]


def test_a_single_row_unpacks():
    import torch

    from mxfp4.numerics.kernels.triton import gemm as k

    packed = isa._operand(1, 32, "e2m1", "1d")
    _, arguments, options = k.launch_unpack(packed, torch.empty((1, 32), dtype=torch.bfloat16, device="meta"))
    assert isa.compile_for(isa.ARCHS["sm_90"], k._unpack_kernel, arguments, options).asm["cubin"]
