"""The kernels of decoding, of sparse masks and of large logits compile for a GPU that is not here: the interpreter, by
which the other tests run them, knows no types."""

from __future__ import annotations

from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="needs triton: pip install 'regard[gpu]'")

FLOATS, WHOLE = (
    ("scale", "scale_rest", "cap", "limit", "plain_scale", "eps"),
    (
        "LARGE",
        "KINDS",
        "MAXIMUM",
        "CUT",
        "LISTS",
        "LENGTHS",
        "COUNTS",
        "KEYS",
        "START",
        "AT",
        "FINISHED",
        "ORDER",
        "FULL_AT",
        "FULL",
        "MIXED_AT",
        "MIXED",
        "NUMBERS",
    ),
)
SINGLE = ("COS", "SIN", "SUMS", "MOST", "TOTAL", "LSE", "DELTA", "FULL_ADDED", "MIXED_ADDED", "SHIFT", "RECEIVED",
          "ENTROPY", "SQUARES", "HIGHEST", "MAXIMA", "MAP_AT", "THRESHOLD", "SCORES")  # fmt: skip
SMALL = {"D": 24, "DV": 16, "WIDTH": 32, "WIDTH_V": 16, "BLOCK_Q": 64, "BLOCK_K": 64, "EVEN_Q": False, "STAGES": 2}
# Without tensor cores every multiplication of a tile is an instruction, so the compiler's time goes with its cells.
UNROLLED = {"BLOCK_Q": 16, "BLOCK_K": 32}


def assembly(kernel: Any, number: str, constants: dict[str, Any], aligned: tuple[str, ...] = ()) -> str:
    """What Hopper would run. number: the dtype of q, weights and the like. aligned: arguments divisible by 16."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    def kind(name: str) -> str:
        if name in constants:
            return "constexpr"
        if not name.isupper():
            return "fp32" if name in FLOATS else "i32"
        if name == "EXACT":
            return "*fp64"
        return "*i32" if name in WHOLE else "*fp32" if name in SINGLE else "*u8" if name == "CELLS" else f"*{number}"

    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    attrs = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(kernel, {name: kind(name) for name in kernel.arg_names}, constexprs=places, attrs=attrs)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "enable_fp_fusion": True})
    return str(made.asm["ptx"])


def before_waiting(found: str) -> dict[str, int]:
    """What a program does before it waits for the kernels ahead of it. A thread loads one number at a time here."""
    first = found[found.index("{") : found.index("griddepcontrol.wait")]
    return {what: first.count(what) for what in ("ld.global", "st.global", "bra", "ret;")}


@pytest.mark.parametrize("overlap", [False, True], ids=["one by one", "overlapping"])
@pytest.mark.parametrize(("norm", "gated"), [(0, False), (1, True), (2, True)])
def test_a_matrix_times_a_vector_compiles(norm: int, gated: bool, overlap: bool) -> None:
    from regard.generation import cuda_kernels

    cut = {"WHOLE": 4096, "BLOCK_ROWS": 4, "BLOCK_INPUTS": 1024, "OVERLAP": overlap}
    found = assembly(cuda_kernels.project, "bf16", {
        "NORM": norm, "ACT": norm + 2, "GATED": gated, "HAS_BIAS": gated, "HAS_RESIDUAL": not gated, **cut,
    })  # fmt: skip
    assert ("griddepcontrol.wait" in found) == overlap
    assert ("griddepcontrol.launch_dependents" in found) == overlap
    if overlap:  # its first weights, of 4 × 1024 for 128 threads, and nothing of what the kernels ahead write
        loads = 4 * 1024 // 128 * (1 + gated)
        assert before_waiting(found) == {"ld.global": loads, "st.global": 0, "bra": 0, "ret;": 0}


@pytest.mark.parametrize(
    ("number", "turn", "interleaved"), [("bf16", True, False), ("fp32", True, True), ("fp16", False, False)]
)
def test_attention_of_one_token_compiles(number: str, turn: bool, interleaved: bool) -> None:
    from regard.generation import cuda_kernels

    form = {
        "TURN": turn,
        "INTERLEAVED": interleaved,
        "GROUP": 4,
        "PADDED": 16,
        "TILE": 64,
        "BLOCK": 64,
        "FEW": 4,
        "OVERLAP": True,
    }
    found = assembly(cuda_kernels.attend, number, {**form, "CHUNK": 128, "STAGES": 1})
    loads = 2 + 2 * 64 * 64 // 128  # where the text begins and ends; its first tile of keys and of values
    assert before_waiting(found) == {"ld.global": loads, "st.global": 0, "bra": 0, "ret;": 0}
    found = assembly(cuda_kernels.combine, number, {"CHUNK": 128, "SOME": 8, "BLOCK": 64, "OVERLAP": True})
    assert before_waiting(found) == {"ld.global": 0, "st.global": 0, "bra": 0, "ret;": 0}


def test_long_caches_are_read_several_tiles_ahead() -> None:
    from regard.generation import cuda_kernels

    form = {"TURN": True, "INTERLEAVED": False, "GROUP": 4, "PADDED": 16, "TILE": 64, "BLOCK": 64, "FEW": 0}
    form["OVERLAP"] = True
    found = assembly(cuda_kernels.attend, "bf16", {**form, "CHUNK": 1024, "STAGES": 4}, ("K", "V", "room", "head_dim"))
    assert "cp.async" in found


@pytest.mark.parametrize(("number", "extras"), [("bf16", True), ("fp16", False), ("fp32", True)])
def test_attention_of_short_sequences_compiles(number: str, extras: bool) -> None:
    from regard.backends import short_kernels

    form = {"D": 32, "DV": 24, "WIDTH": 32, "WIDTH_V": 32, "IEEE": number == "fp32"}
    form |= {"BLOCK_Q": 64, "BLOCK_K": 64} if number != "fp32" else UNROLLED
    form |= {"HAS_BIAS": extras, "HAS_MASK": extras, "WANT_LSE": extras}
    found = assembly(short_kernels.attend, number, form)
    assert ("mma.sync" in found or "wgmma" in found) == (number != "fp32")


@pytest.mark.parametrize("name", ["attend", "differentiate_queries", "differentiate_keys"])
@pytest.mark.parametrize(("number", "band", "added"), [("bf16", True, False), ("fp32", False, True)])
def test_attention_over_listed_tiles_compiles(name: str, number: str, band: bool, added: bool) -> None:
    from regard.backends import sparse_kernels

    form = {"BAND": band, "ADDED": added, "IEEE": number == "fp32", "EVEN_K": band}
    form |= {} if number == "bf16" else UNROLLED
    found = assembly(getattr(sparse_kernels, name), number, {**SMALL, **form})
    assert ("mma" in found) == (number == "bf16")  # tensor cores, which would round fp32's inputs


@pytest.mark.parametrize(("number", "mask", "extras"), [("bf16", 1, False), ("fp32", 2, True)])
def test_measuring_in_fp64_multiplies_in_fp64(number: str, mask: int, extras: bool) -> None:
    from regard.lens.measures import kernels as large_kernels
    from regard.lens.measures import top_kernels

    assembly(large_kernels.read_lse, number, {"BLOCK": 1024})
    form = {
        "D": 24, "WIDTH": 32, **UNROLLED, "EVEN_K": False, "IEEE": number == "fp32",
        "MASK": mask, "PACKED": mask == 2, "BIAS": mask if extras else 0, "SOFTCAP": extras,
    }  # fmt: skip
    wants = ("RECEIVED", "ENTROPY", "SQUARES", "MAXIMUM", "HIGHEST", "MAXIMA")
    measures = {"MAP": mask, "GROUP": 32, "HAS_SINKS": extras} | {f"WANT_{name}": True for name in wants}
    links = {"ROOM": 96, "PER_TILE": 1, "IN_DOUBLE": True}
    for kernel, more in ((large_kernels.measure_large, measures), (top_kernels.collect, links)):
        assert "fma.rn.f64" in assembly(kernel, number, form | more)
