"""What the queries of a call see, asked one thing at a time."""

from math import inf

import pytest
import torch

from regard import masks
from regard.backends import reference
from regard.backends.call import Call, prepare
from regard.lens import visibility
from regard.lens.visibility import summarise_mask

B, H, N, D = 2, 3, 7, 5
BANDS = [None, masks.causal(), masks.causal(offset=-2), masks.window(2, 1), masks.window(0, 3, offset=1)]
OTHERS = [
    masks.causal(offset=[0, 2]),
    masks.causal() & masks.padding([4, 7]),
    masks.window(1, 0) | masks.globals([0]),
    torch.rand(B, 1, N, N, generator=torch.Generator().manual_seed(3)) < 0.6,
]


def call_of(nq: int = N, nk: int = N, **arguments: object) -> Call:
    q, k = torch.randn(B, H, nq, D), torch.randn(B, H, nk, D)
    return prepare(q, k, k, **arguments)


@pytest.mark.parametrize("mask", [*BANDS, *OTHERS])
@pytest.mark.parametrize("sizes", [(7, 7), (3, 7)])
def test_visible_keys_are_those_of_the_definition(mask, sizes):
    if isinstance(mask, torch.Tensor):
        mask = mask[:, :, : sizes[0]]
    call = call_of(*sizes, mask=mask)
    shown = reference.stages(call).masked > -inf
    assert torch.equal(summarise_mask(call).visible.expand(B, H, sizes[0]), shown.sum(-1))


@pytest.mark.parametrize("mask", BANDS)
def test_bands_are_answered_without_counting(mask, monkeypatch):
    """This stands on the way of every look."""
    monkeypatch.setattr(visibility, "survey", lambda *_: pytest.fail("counted"))
    seen = summarise_mask(call_of(mask=mask))
    assert seen.padding is None
    assert seen.visible.shape == (1, 1, N)
    assert seen.offset == (mask.offset if mask is not None else None)


def test_no_keys_are_seen_by_any_query():
    assert summarise_mask(call_of(3, 0)).visible.tolist() == [[[0, 0, 0]]]
    assert summarise_mask(call_of(0, 3)).visible.tolist() == [[[]]]


@pytest.mark.parametrize(
    ("mask", "padding"),
    [
        (masks.padding([4, 7]), [[0, 0, 0, 0, 1, 1, 1], [0] * 7]),
        (masks.padding([4, 7], side="left") & masks.causal(), [[1, 1, 1, 0, 0, 0, 0], [0] * 7]),
        (torch.tensor([1, 1, 0, 1, 1, 1, 0]).bool(), [[0, 0, 1, 0, 0, 0, 1]]),
    ],
)
def test_padding_is_what_nobody_sees(mask, padding):
    assert summarise_mask(call_of(mask=mask)).padding.int().tolist() == padding


def test_padding_that_is_not_there_is_none():
    assert summarise_mask(call_of(mask=masks.causal() & masks.padding([7, 7]))).padding is None


@pytest.mark.parametrize(
    ("mask", "offset"),
    [
        (masks.causal(offset=1) & masks.padding([4, 7]), 1),
        (masks.padding([4, 7]) & masks.window(2, 0, offset=2), 2),
        (masks.causal(offset=1).dense(3, 7), 1),
        (masks.causal().dense(3, 7), 4),
        (masks.window(1, 0).dense(3, 7), None),
        (masks.padding([4, 7]), None),
    ],
)
def test_offset_comes_from_the_mask(mask, offset):
    call = call_of(3, 7, mask=mask)
    assert summarise_mask(call).offset == offset
    assert summarise_mask(call, "cross").offset is None


def test_offsets_per_batch_row_are_handed_on():
    assert summarise_mask(call_of(mask=masks.causal(offset=[0, 2]))).offset.tolist() == [[0], [2]]


def test_rows_that_finite_numbers_hide_see_all_their_keys():
    bias = torch.full((N, N), -1e9).triu(1)
    bias[3] = -1e9
    assert summarise_mask(call_of(bias=bias)).visible.tolist() == [[[1, 2, 3, 7, 5, 6, 7]]]


def test_numpy_calls_can_be_seen():
    x = torch.zeros(N, D).numpy()
    assert summarise_mask(prepare(x, x, x, mask=masks.causal())).visible.tolist() == [[[1, 2, 3, 4, 5, 6, 7]]]
