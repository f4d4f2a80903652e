"""Exact weights come back from a file the same to the bit, whatever mask and bias their scores were made with."""

import re

import pytest
import torch

from regard import masks, positions
from regard.backends.call import prepare
from regard.lens.files import records
from regard.lens.files.container import CaptureFileError, Incoming, Outgoing
from regard.lens.files.records import pack_weights, unpack_weights
from regard.lens.measures.engines import lse_of, measure_in_torch
from regard.lens.measures.measures import MeasureOptions
from regard.lens.measures.weights import ComputedWeights, StoredWeights
from regard.masks import Causal, DenseMask
from regard.masks.biases import DenseBias
from regard.positions import Relative

B, H, HKV, NQ, NK, D = 2, 6, 3, 7, 11, 5
ALL = slice(None)


def remembered(nq: int = NQ, nk: int = NK, dtype: torch.dtype = torch.float32, **options: object) -> ComputedWeights:
    """Weights of a call whose heads were split off by turning axes, as models do it."""
    q = torch.randn(B, nq, H, D).to(dtype).transpose(1, 2)
    k = torch.randn(B, nk, HKV, D).to(dtype).transpose(1, 2)
    call = prepare(q, k, k, **options)
    return ComputedWeights(call, lse_of(call))


def there_and_back(
    weights: ComputedWeights | StoredWeights,
) -> tuple[ComputedWeights | StoredWeights, dict[str, torch.Tensor]]:
    out = Outgoing()
    packed = pack_weights(weights, "0", out)
    stored = {name: tensor.cpu().clone(memory_format=torch.contiguous_format) for name, tensor in out.tensors.items()}
    tensors = Incoming(stored)
    back = unpack_weights(packed, weights.sizes, "record 0", tensors)
    tensors.finish()
    return back, stored


def assert_same(before: ComputedWeights, after: ComputedWeights) -> None:
    nq, nk = before.sizes[2:]
    assert torch.equal(before.tile(ALL, ALL), after.tile(ALL, ALL))
    for i in range(nq):
        assert torch.equal(before.tile(slice(i, i + 1), ALL), after.tile(slice(i, i + 1), ALL))
    for j in range(nk):
        assert torch.equal(before.tile(ALL, slice(j, j + 1)), after.tile(ALL, slice(j, j + 1)))
    keys = torch.randint(-1, nk, (B, H, nq))
    assert torch.equal(before.pairs(keys), after.pairs(keys))
    wanted = MeasureOptions(frozenset(["entropy", "received", "max_logit", "effective", "map", "top"]), size=3, top=2)
    found = [measure_in_torch(weights.call, weights.lse, wanted) for weights in (before, after)]
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


MASKS = {
    "none": None,
    "causal": masks.causal(),
    "causal from the upper left": masks.causal(offset=0),
    "causal with an offset per row": masks.causal(offset=[0, 3]),
    "window": masks.window(2, 1),
    "window of no end": masks.window(1 << 40, 2, offset=1),
    "padding": masks.padding([NK, 6]),
    "causal and padding": masks.causal() & masks.padding([NK, 6]),
    "documents": masks.documents([0, 0, 0, 0, 1, 1, 1, 2, 2, 2, -1]),
    "dense": torch.arange(B * H * NQ * NK).view(B, H, NQ, NK) % 3 > 0,
    "dense for all": (torch.arange(NK) % 3 > 0).expand(NQ, NK),
    "repeated": (torch.arange(NQ * NK).view(1, 1, NQ, NK) % 3 > 0).expand(B, H, NQ, NK),
    "nothing visible": ~masks.window(1 << 20, 1 << 20),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
def test_weights_under_every_mask_come_back_to_the_bit(mask):
    before = remembered(mask=mask)
    after, _ = there_and_back(before)
    assert_same(before, after)


def windowed() -> positions.SwinBias:
    return positions.Swin((2, 3), H).bias(torch.zeros(1, H, 6, D), 1.0)


BIASES = {
    "dense": (lambda: torch.randn(B, H, NQ, NK), NQ, NK),
    "dense in bf16 for all heads": (lambda: torch.randn(1, 1, NQ, NK).bfloat16(), NQ, NK),
    "dense with minus infinity": (
        lambda: torch.zeros(NQ, NK).masked_fill(torch.rand(NQ, NK) < 0.4, -torch.inf),
        NQ,
        NK,
    ),
    "alibi": (lambda: positions.alibi(H), NQ, NK),
    "alibi with an offset per row": (lambda: positions.alibi(H, offset=[0, 3]), NQ, NK),
    "alibi, more queries than keys": (lambda: positions.alibi(H), NK, NQ),
    "T5": (lambda: positions.T5(H, buckets=8, max_distance=6).bias(None, 1.0), NQ, NK),
    "Shaw": (lambda: positions.Shaw(D, 2).bias(torch.randn(B, H, NQ, D), 0.5), NQ, NK),
    "Swin": (windowed, 6, 6),
}


@pytest.mark.parametrize(("make", "nq", "nk"), BIASES.values(), ids=BIASES.keys())
def test_weights_under_every_bias_come_back_to_the_bit(make, nq, nk):
    with torch.no_grad():
        before = remembered(nq, nk, bias=make(), mask=masks.causal(), softcap=3.0, sinks=torch.randn(H), scale=0.3)
    after, _ = there_and_back(before)
    assert_same(before, after)
    call = after.call
    assert (call.scale, call.softcap, call.dropout, call.sizes) == (0.3, 3.0, 0.0, (B, H, nq, nk))
    assert torch.equal(call.sinks, before.call.sinks)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_weights_of_every_dtype_come_back_to_the_bit(dtype):
    before = remembered(dtype=dtype, mask=masks.causal())
    after, _ = there_and_back(before)
    assert after.call.q.dtype == dtype
    assert_same(before, after)


@pytest.mark.parametrize(("nq", "nk"), [(0, 5), (3, 0), (1, 1)])
def test_weights_of_nothing_come_back(nq, nk):
    before = remembered(nq, nk, mask=masks.window(1, 1) | masks.padding([0, 0]), bias=positions.alibi(H))
    after, _ = there_and_back(before)
    assert after.sizes == before.sizes
    assert all(torch.equal(getattr(after.call, name), getattr(before.call, name)) for name in "qk")


def test_keys_that_all_batch_rows_share_are_written_once():
    k = torch.randn(1, HKV, NK, D)
    q = torch.randn(1, H, NQ, D)
    call = prepare(
        q.expand(B, -1, -1, -1), k.expand(B, -1, -1, -1), k.expand(B, -1, -1, -1), mask=masks.padding([NK, 3])
    )
    before = ComputedWeights(call, lse_of(call))
    after, stored = there_and_back(before)
    assert stored["0/q"].shape[0] == stored["0/k"].shape[0] == 1
    assert after.call.k.stride(0) == 0
    assert_same(before, after)


def test_masks_that_layers_share_are_shared_again():
    cells = torch.rand(B, 1, NQ, NK) < 0.5
    out = Outgoing()
    packed = [pack_weights(remembered(mask=cells), str(n), out) for n in range(2)]
    tensors = Incoming(out.tensors)
    one, other = (unpack_weights(value, (B, H, NQ, NK), "record", tensors) for value in packed)
    assert one.call.mask.cells is other.call.mask.cells


def test_band_is_three_numbers_and_causal_stays_causal():
    out = Outgoing()
    assert pack_weights(remembered(mask=masks.window(2, 1)), "0", out)["mask"] == {"band": [4, 2, 1]}
    assert "0/mask" not in out.tensors
    back, _ = there_and_back(remembered(mask=masks.causal()))
    assert back.call.mask == Causal(None)
    back, _ = there_and_back(remembered(mask=masks.causal(offset=2)))
    assert back.call.mask == Causal(2)
    back, _ = there_and_back(remembered(mask=masks.window(2, 1, offset=3)))
    assert back.call.mask == masks.window(2, 1, offset=3)


def test_cells_are_bits_and_keep_shared_axes():
    back, stored = there_and_back(remembered(mask=MASKS["repeated"]))
    assert (stored["0/mask"].dtype, stored["0/mask"].shape) == (torch.uint8, (-(-NQ * NK // 8),))
    assert isinstance(back.call.mask, DenseMask)
    assert back.call.mask.cells.shape == (1, 1, NQ, NK)


def test_bias_by_distance_is_a_table_of_distances():
    back, stored = there_and_back(remembered(bias=positions.alibi(H)))
    assert stored["0/bias"].shape == (1, H, 1, 2 * NK - 1)
    assert isinstance(back.call.bias, Relative)
    back, stored = there_and_back(remembered(bias=torch.zeros(NQ, NK)))
    assert isinstance(back.call.bias, DenseBias)


def test_rules_are_asked_a_few_rows_at_a_time(monkeypatch):
    monkeypatch.setattr(records, "AT_ONCE", 2 * B * NK)
    asked = []
    mask, bind = masks.causal(offset=[0, 3]), Causal.bind

    def watched(self, *sizes):
        see = bind(self, *sizes)
        return lambda b, h, i, j: asked.append(i.numel()) or see(b, h, i, j)

    monkeypatch.setattr(Causal, "bind", watched)
    pack_weights(remembered(mask=mask), "0", Outgoing())
    assert asked[-4:] == [2, 2, 2, 1]


@pytest.mark.parametrize(
    ("options", "limit", "message"),
    [
        ({"mask": masks.padding([3, 5])}, "MOST_CELLS", r"mask.*padding\(\[3, 5\]\)"),
        ({"bias": "shaw"}, "MOST_NUMBERS", r"bias.*Relative\(<2×6×7×5 torch\.float32>\)"),
    ],
)
def test_rule_with_too_many_cells_is_refused_with_what_to_do(monkeypatch, options, limit, message):
    if "bias" in options:
        with torch.no_grad():
            options = {"bias": positions.Shaw(D, 2).bias(torch.randn(B, H, NQ, D), 0.5)}
    weights = remembered(**options)
    cells = (H if "bias" in options else 1) * B * NQ * NK
    monkeypatch.setattr(records, limit, cells)
    pack_weights(weights, "0", Outgoing())
    monkeypatch.setattr(records, limit, cells - 1)
    with pytest.raises(ValueError, match=message) as caught:
        pack_weights(weights, "0", Outgoing())
    assert re.search(rf"{cells:,}.*{cells - 1:,}.*save\(path, overview=True\).*q.*k", str(caught.value))


def test_mask_that_came_as_cells_has_no_limit(monkeypatch):
    monkeypatch.setattr(records, "MOST_CELLS", 0)
    monkeypatch.setattr(records, "MOST_NUMBERS", 0)
    there_and_back(remembered(mask=torch.ones(NQ, NK, dtype=torch.bool), bias=torch.zeros(NQ, NK)))


@pytest.mark.parametrize("scores", [None, NK, NK + 1])
def test_weights_that_a_model_made_come_back_with_their_scores(scores):
    made = torch.rand(B, H, NQ, NK)
    came = None if scores is None else torch.randn(B, H, NQ, scores).mT.contiguous().mT
    back, _ = there_and_back(StoredWeights(made, came))
    assert torch.equal(back.weights, made)
    assert (back.scores is None) == (came is None)
    assert came is None or torch.equal(back.scores, came)


def test_weights_of_another_kind_are_refused():
    class Other:
        sizes = (B, H, NQ, NK)

    with pytest.raises(ValueError, match=r"Other.*view\.weights.*None"):
        pack_weights(Other(), "0", Outgoing())


# -------------------------------------------------------------------------------------------------------------- forged


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "guessed"}, r"0.*kind.*'guessed'"),
        ({"scale": None}, r"0.*scale.*float.*int.*NoneType"),
        (
            {"q": "four heads"},
            r"'four heads'.*q.*0.*shape.*\(2, 4, 11, 5\).*1.*2.*6.*7",
        ),
        ({"k": "0/q"}, r"'0/q'.*k.*0.*shape.*\(2, 7, 6, 5\).*1.*2.*11.*5"),
        ({"k": "four heads"}, r"k.*0.*4.*6.*q"),
        ({"lse": "0/q"}, r"lse.*0.*shape"),
        ({"sinks": "0/q"}, r"sinks.*0.*shape.*\(2, 7, 6, 5\).*\(6,\)"),
        ({"mask": {"band": [1, 2]}}, r"mask.*0"),
        (
            {"mask": {"band": [0, [1, 2], 0]}},
            r"mask.*0.*band.*1,099,511,627,776.*\[0, \[1, 2\], 0\]",
        ),
        ({"mask": {"band": [0, -1, 0]}}, r"mask.*0.*before.*0.*-1"),
        ({"mask": {"band": [0, 1, 0], "dilation": 2}}, r"mask.*0.*'dilation'"),
        ({"mask": {}}, r"mask.*0.*'bits'"),
        ({"mask": {"bits": "bits", "shape": [1, 1, NQ, NK + 8]}}, r"mask.*0.*\(1, 1, 7, 19\).*17"),
        ({"mask": {"bits": "bits", "shape": [1, 1, NK, NQ]}}, r"7.*11"),
        ({"mask": {"bits": "bits", "shape": [NQ, NK]}}, r"mask.*0.*shape.*\[7, 11\]"),
        ({"mask": {"bits": "bits", "shape": [1, 1, "7", NK]}}, r"mask.*0"),
        ({"mask": {"bits": "0/q", "shape": [1, 1, NQ, NK]}}, r"mask.*0.*shape"),
        ({"bias": {}}, r"bias.*0.*'cells'"),
        (
            {"bias": {"cells": "0/q"}},
            r"bias.*0.*shape.*\(2, 7, 6, 5\).*1.*2.*1.*6.*1.*7.*1.*11",
        ),
        ({"bias": {"by distance": "0/q"}}, r"1.*2.*1.*6.*1.*21"),
        ({"bias": {"by distance": "0/q", "cells": "0/q"}}, r"bias.*0.*'cells'"),
    ],
)
def test_forged_weights_are_refused_and_named(change, message):
    out = Outgoing()
    packed = pack_weights(remembered(mask=masks.causal()), "0", out)
    more = {"four heads": torch.zeros(B, 4, NK, D), "bits": torch.zeros(-(-NQ * NK // 8), dtype=torch.uint8)}
    with pytest.raises(CaptureFileError, match=message):
        unpack_weights(packed | change, (B, H, NQ, NK), "record 0", Incoming(out.tensors | more))


def test_forged_made_weights_are_refused():
    packed = {"kind": "given", "weights": "w", "scores": "s"}
    tensors = {"w": torch.zeros(B, H, NQ, NK), "s": torch.zeros(B, H, NQ, NK + 2)}
    with pytest.raises(CaptureFileError, match=r"'s'.*scores.*0.*11.*12"):
        unpack_weights(packed, (B, H, NQ, NK), "record 0", Incoming(tensors))
    with pytest.raises(CaptureFileError, match=r"'w'.*weights.*0"):
        unpack_weights(packed, (B, H, NK, NQ), "record 0", Incoming(tensors))
