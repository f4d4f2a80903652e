"""The measuring kernel for Hopper: how calls are cut, that it compiles, and, on a GPU, dense fp64 measures."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan
from typing import Any

import pytest
import torch
from dense_measures import assert_measures, measures_from_lse, measures_of

import regard
from regard import masks
from regard.backends.call import Call, prepare
from regard.lens.measures.measures import read_measures
from regard.positions import alibi

triton = pytest.importorskip("triton", reason="needs triton: pip install 'regard[gpu]'")
hopper = pytest.importorskip("regard.lens.measures.hopper", reason="needs a triton with Gluon")

BF16, FP16 = torch.bfloat16, torch.float16
EVERY = ("entropy", "received", "map")


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(triton, "__version__", hopper.TESTED[0] + "0")


def called(nq: int, nk: int, width: int = 64, dtype: torch.dtype = BF16, heads: int = 1, **extra: Any) -> Call:
    q, k = torch.zeros(1, heads, nq, width, dtype=dtype), torch.zeros(1, 1, nk, width, dtype=dtype)
    return prepare(q, k, k, **extra)


# ------------------------------------------------------------------------------------------------------------ CPU only


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("mask", [None, masks.causal()])
@pytest.mark.parametrize(
    ("nq", "nk", "size"), [(8192, 8192, 64), (8192, 16384, 64), (4096, 4096, 64), (1001, 1003, 4), (1270, 2545, 5)]
)
def test_tiles_cover_each_map_cell(on_hopper: None, width: int, mask: Any, nq: int, nk: int, size: int) -> None:
    cut = hopper.cut_for(called(nq, nk, width, mask=mask), read_measures(EVERY, size))
    assert cut.cells == (size, size)
    longest = [max((c + 1) * n // size - c * n // size for c in range(size)) for n in (nq, nk)]
    keys = cut.keys // 2 if cut.paired else cut.keys
    for cell, tiles, tile in zip(longest, cut.tiles, (64, keys), strict=True):
        assert (tiles - 1) * tile < cell <= tiles * tile
    if cut.paired:
        assert nk == size * keys
        assert size % 2 == 0


REFUSED = {
    "another GPU": {"capability": (8, 0)},
    "another triton": {"version": "3.5.1"},
    "fp32": {"dtype": torch.float32},
    "wide heads": {"width": 256},
    "a window": {"mask": masks.window(300, 0)},
    "padding": {"mask": masks.padding([4096])},
    "a bias": {"bias": alibi(1)},
    "a softcap": {"softcap": 5.0},
    "a negative scale": {"scale": -1.0},
    "the maximum": {"names": ("entropy", "max_logit")},
    "cells that tiles do not fit": {"nq": 5000},
    "rows that do not begin on 16 bytes": {"width": 68},
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_calls_are_left_to_the_kernel_for_all_gpus(
    on_hopper: None, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(capability: Any = (9, 0), version: str = "3.6.0", names: Any = EVERY, nq: int = 4096, **extra: Any) -> Any:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(triton, "__version__", version)
        return hopper.cut_for(called(nq, 4096, **extra), read_measures(names, 32))

    assert cut() is not None
    assert cut(**REFUSED[case]) is None


@pytest.mark.parametrize("way", ["as it lies", "heads inside tokens", "rows of a larger tensor", "one head for all"])
def test_layouts_that_can_be_copied(on_hopper: None, way: str) -> None:
    call = called(4096, 4096, heads=4)
    q, k = call.q, call.k
    if way == "heads inside tokens":
        q = torch.zeros(1, 4096, 4, 64, dtype=BF16).transpose(1, 2)
    elif way == "rows of a larger tensor":
        q = torch.zeros(1, 4, 4096, 68, dtype=BF16)[..., :64]  # rows of 136 bytes
    elif way == "one head for all":
        k = k.expand(1, 4, 4096, 64)  # no step from head to head
    cut = hopper.cut_for(replace(call, q=q, k=k), read_measures(EVERY))
    assert (cut is not None) == (way in ("as it lies", "heads inside tokens"))


@pytest.mark.parametrize(
    ("keys", "width", "causal", "even", "paired"),
    [(128, 64, False, True, False), (128, 64, True, False, False), (256, 128, False, True, True)],
)
def test_compiles_with_tensor_cores_and_bulk_copies(
    keys: int, width: int, causal: bool, even: bool, paired: bool
) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    constants = {
        "CELLS_Q": 64, "CELLS_K": 64, "BLOCK_K": keys, "WIDTH": width, "STAGES": 3, "CAUSAL": causal, "EVEN_Q": even,
        "EVEN_K": even, "PAIRED": paired, "WANT_RECEIVED": True, "WANT_ENTROPY": True, "WANT_MAP": True,
    }  # fmt: skip

    def kind(name: str) -> str:
        if name in constants:
            return "constexpr"
        if name in ("q", "k"):
            block = [1, 1, 64 if name == "q" else keys, width]
            return f"tensordesc<bf16{block},{gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)!r}>"
        return "*i32" if name == "LARGE" else "*fp32" if name.isupper() else "fp32" if name == "scale" else "i32"

    names = hopper.measure.arg_names
    places = {(names.index(name),): value for name, value in constants.items()}
    source = GluonASTSource(hopper.measure, {name: kind(name) for name in names}, constexprs=places)
    options = {"num_warps": 4, "enable_fp_fusion": True}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    assert made.count("wgmma.mma_async.sync") == width // 16 * (2 if causal or not even else 1)
    assert "cp.async.bulk.tensor.4d.shared" in made
    assert made.count("ex2.approx.ftz.f32") == 64 * keys // 128 * (2 if causal or not even else 1)


# ------------------------------------------------------------------------------------------------------ on a GPU only

ON_GPU: dict[str, dict[str, Any]] = {
    "whole tiles": {"shape": (2, 3, 3, 1024, 1024, 64), "size": 8},
    "whole tiles, causal": {"shape": (2, 3, 3, 1024, 1024, 64), "size": 8, "mask": masks.causal()},
    "two cells in a tile": {"shape": (1, 3, 3, 256, 256, 128), "size": 2},
    "wide tiles": {"shape": (1, 2, 1, 512, 2048, 128), "size": 4},
    "wide, causal": {"shape": (1, 3, 3, 1024, 1024, 128), "size": 4, "mask": masks.causal()},
    "uneven cells": {"shape": (1, 4, 2, 1001, 1003, 64), "size": 4},
    "uneven cells, causal": {"shape": (2, 4, 2, 1001, 1003, 128), "size": 4, "mask": masks.causal()},
    "fewer queries": {"shape": (1, 3, 1, 509, 1019, 64), "names": ("entropy", "received"), "mask": masks.causal()},
    "rows that see nothing": {"shape": (1, 2, 2, 1019, 509, 64), "names": EVERY[:2], "mask": masks.causal()},
    "an offset": {"shape": (1, 2, 2, 1019, 1021, 64), "names": EVERY[:2], "mask": masks.causal(-70)},
    "narrow heads, half precision": {"shape": (1, 3, 3, 1024, 1024, 40), "size": 4, "dtype": FP16},
    "heads of 80": {"shape": (1, 3, 3, 1021, 1019, 80), "size": 4, "mask": masks.causal()},
    "tokens before heads": {"shape": (2, 4, 2, 1024, 1024, 64), "size": 4, "mask": masks.causal(), "turned": True},
    "sinks": {"shape": (1, 4, 4, 1024, 1024, 64), "size": 4, "sinks": True},
    "the map alone": {"shape": (1, 2, 2, 1024, 1024, 64), "size": 4, "names": ("map",)},
    "a head of NaN": {"shape": (1, 3, 3, 1021, 1023, 64), "size": 4, "spoilt": nan, "mask": masks.causal()},
    "a head of infinity": {"shape": (1, 3, 3, 1021, 1023, 64), "size": 4, "spoilt": inf},
    "a head of large logits": {"shape": (1, 3, 3, 1024, 1024, 64), "size": 4, "spoilt": 1e3},
}


def check(
    name: str,
    shape: tuple[int, ...],
    size: int = 64,
    mask: Any = None,
    names: Any = EVERY,
    dtype: torch.dtype = BF16,
    turned: bool = False,
    sinks: bool = False,
    spoilt: float | None = None,
) -> None:
    """`regard.look` of a call that this kernel measures, by the numeric rule; head 1 may have a row of its own kind."""
    batch, heads, kv_heads, nq, nk, width = shape
    random = torch.Generator().manual_seed(len(name))

    def draw(h: int, n: int) -> torch.Tensor:
        x = torch.randn(batch, h, n, width, generator=random)
        return (x.transpose(1, 2).contiguous().transpose(1, 2) if turned else x).to(dtype)

    q, k, v = draw(heads, nq), draw(kv_heads, nk), draw(kv_heads, nk)
    if spoilt is not None:
        q[:, 1, 5 : 6 if spoilt != spoilt or spoilt == inf else nq] *= spoilt
    sink = torch.randn(heads, generator=random) if sinks else None
    places = [x if x is None else x.to("cuda") for x in (q, k, v, sink)]
    call = prepare(*places[:3], mask=mask, sinks=places[3])
    assert hopper.cut_for(call, read_measures(names, size)) is not None, f"{name}: another kernel would measure"
    view = regard.look(*places[:3], mask=mask, sinks=places[3], measures=names, size=size)
    assert view.engine == "triton"
    found = {what: x.cpu() for what, x in view.held.items()}
    wide = None if sink is None else sink.double()
    truth = measures_of(prepare(q.double(), k.double(), v.double(), mask=mask, sinks=wide), size)
    baseline = measures_from_lse(prepare(q, k, v, mask=mask, sinks=sink), size, backwards=False)
    good = [0, *range(2, heads)] if spoilt is not None else list(range(heads))
    parts = [{what: x[:, good] for what, x in table.items()} for table in (found, baseline, truth)]
    assert_measures(*parts, name)
    if spoilt == 1e3:
        exact = measures_of(prepare(q, k, v, mask=mask), size)
        parts = [{what: x[:, 1:2] for what, x in table.items()} for table in (found, exact, truth)]
        assert_measures(*parts, f"{name}: it", 1.0)
    elif spoilt is not None:
        assert bool(found["received"][:, 1].isnan().any()), f"{name}: it shows nothing"


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_GPU)
def test_measures_on_a_gpu_are_those_of_dense_weights(name: str) -> None:
    check(name, **ON_GPU[name])
