"""What is kept of calls: copies, shared by the steps of a run and by layers with one mask, and exact."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor

from regard.backends.call import Call, prepare
from regard.lens.assembly import CallStore, StepLink
from regard.lens.measures.engines import lse_of
from regard.lens.measures.weights import ComputedWeights
from regard.masks import causal

B, H, N, D = 2, 3, 7, 5
ALL = slice(None)


def whole() -> tuple[Tensor, Tensor]:
    return torch.randn(B, H, N, D), torch.randn(B, 1, N, D)


def call(q: Tensor, k: Tensor, **given: object) -> Call:
    return prepare(q, k, k, **given)


def kept(
    keeper: CallStore, given: Call, link: StepLink | None = None, path: str = "attn", hidden: bool = True
) -> ComputedWeights:
    return keeper.keep(path, given, lse_of(given), StepLink() if link is None else link, hidden)


def rows(given: Call) -> Tensor:
    return ComputedWeights(given, lse_of(given)).tile(ALL, ALL)


def test_weights_are_those_of_the_call_after_everything_was_written_over() -> None:
    q, k = whole()
    mask, bias = torch.rand(N, N) > 0.4, torch.randn(N, N)
    given = call(q, k, mask=mask, bias=bias, softcap=2.0, sinks=(sinks := torch.randn(H)), scale=0.7)
    truth = rows(given)
    weights = kept(CallStore(), given)
    for x in (q, k, bias, sinks):
        x.fill_(9.0)
    mask.fill_(True)
    assert torch.equal(weights.tile(ALL, ALL), truth)
    index = torch.arange(N).flip(0)
    assert torch.equal(weights.pairs(index), ComputedWeights(weights.call, weights.lse).pairs(index))


def test_steps_share_the_keys_of_the_latest() -> None:
    q, k = whole()
    keeper, ends = CallStore(), (4, 5, 6)
    calls = [call(q[:, :, :end], k[:, :, :end], mask=causal()) for end in ends]
    truths = [rows(c) for c in calls]
    links = [StepLink(), StepLink(0, 0, 4), StepLink(1, 0, 5)]
    steps = [kept(keeper, c, link) for c, link in zip(calls, links, strict=True)]
    assert {w.call.k.untyped_storage().data_ptr() for w in steps} == {steps[-1].call.k.untyped_storage().data_ptr()}
    assert steps[0].call.k.untyped_storage().nbytes() == B * 6 * D * 4
    for step, truth, end in zip(steps, truths, ends, strict=True):
        assert step.call.k.shape == (B, 1, end, D)
        assert torch.equal(step.tile(ALL, ALL), truth)


def test_steps_let_the_keys_of_earlier_steps_go() -> None:
    q, k = whole()
    keeper = CallStore()
    first = kept(keeper, call(q[:, :, :4], k[:, :, :4]))
    alive = weakref.ref(first.call.k.untyped_storage())
    assert alive() is not None
    second = kept(keeper, call(q[:, :, 4:5], k[:, :, :5]), StepLink(0, 0, 4))
    assert first.call.k.data_ptr() == second.call.k.data_ptr()
    assert alive() is None


@pytest.mark.parametrize("repeated", [(True, False, True), (False, True, True)], ids=str)
def test_keys_that_some_steps_repeat_for_each_head_are_kept_once_without_repeats(repeated: tuple[bool, ...]) -> None:
    q, k = torch.randn(B, 6, N, D), torch.randn(B, 2, N, D)
    keeper, steps, truths = CallStore(), [], []
    for n, (end, repeat) in enumerate(zip((4, 5, 6), repeated, strict=True)):
        keys = (k.repeat_interleave(3, 1) if repeat else k)[:, :, :end]
        given = call(q[:, :, end - 1 : end], keys)
        truths.append(rows(given))
        steps.append(kept(keeper, given, StepLink(n - 1, 0, end - 1) if n else None))
    assert {step.call.k.untyped_storage().nbytes() for step in steps} == {B * 2 * 6 * D * 4}
    assert len({step.call.k.data_ptr() for step in steps}) == 1
    for step, truth in zip(steps, truths, strict=True):
        torch.testing.assert_close(step.tile(ALL, ALL), truth, rtol=0, atol=1e-6)


def test_cache_of_fixed_size_is_kept_once_if_its_rest_is_hidden() -> None:
    q, k = whole()
    for hidden in (True, False):
        keeper, cache, steps, truths = CallStore(), torch.zeros_like(k), [], []
        for end in (4, 5):
            cache[:, :, :end] = k[:, :, :end]
            mask = torch.arange(N) < (end if hidden else N)
            given = call(q[:, :, end - 1 : end], cache, mask=mask.view(1, N))
            truths.append(rows(given))
            link = StepLink() if end == 4 else StepLink(0, 0, 4)
            steps.append(kept(keeper, given, link, hidden=hidden))
        assert (steps[0].call.k.data_ptr() == steps[1].call.k.data_ptr()) == hidden
        for step, truth in zip(steps, truths, strict=True):
            assert torch.equal(step.tile(ALL, ALL), truth)


@pytest.mark.parametrize(
    ("link", "change"),
    [(StepLink(), 0.0), (StepLink(0, 0, 4), 1.0), (StepLink(0, 1, 4), 0.0)],
    ids=["a run of its own", "other keys", "keys that begin later"],
)
def test_keys_that_are_not_the_same_are_kept_apart(link: StepLink, change: float) -> None:
    q, k = whole()
    keeper = CallStore()
    before = kept(keeper, first := call(q[:, :, :4], k[:, :, :4]))
    after = kept(keeper, call(q[:, :, 4:5], k[:, :, :5] + change), link)
    assert before.call.k.data_ptr() != after.call.k.data_ptr()
    assert torch.equal(before.tile(ALL, ALL), rows(first))


def test_modules_do_not_share_keys() -> None:
    q, k = whole()
    keeper = CallStore()
    one = kept(keeper, call(q[:, :, :4], k[:, :, :4]))
    two = kept(keeper, call(q[:, :, :1], k[:, :, :5]), StepLink(0, 0, 4), path="other")
    assert one.call.k.data_ptr() != two.call.k.data_ptr()


def test_layers_share_the_copy_of_their_mask_until_it_is_written_to() -> None:
    q, k = whole()
    keeper, mask = CallStore(), torch.rand(N, N) > 0.4
    one, two = (kept(keeper, call(q, k, mask=mask), path=path) for path in "ab")
    truth = mask.clone()
    mask.fill_(True)
    three = kept(keeper, call(q, k, mask=mask), path="c")
    assert one.call.mask.cells is two.call.mask.cells
    assert torch.equal(one.call.mask.cells[0, 0], truth)
    assert three.call.mask.cells.all()


def test_part_of_a_larger_tensor_does_not_keep_it() -> None:
    packed = torch.randn(B, H, N, 3 * D)
    weights = kept(CallStore(), call(packed[..., :D], packed[..., D : 2 * D]))
    assert weights.call.q.untyped_storage().nbytes() == weights.call.k.untyped_storage().nbytes() == B * H * N * D * 4


def test_repeated_keys_are_kept_as_they_are_seen() -> None:
    q, k = whole()
    given = call(q, k[:1].expand(B, H, N, D))
    assert torch.equal(kept(CallStore(), given).tile(ALL, ALL), rows(given))


def test_everything_goes_to_the_device() -> None:
    """The meta device holds no numbers, but says where a tensor is."""
    q, k = whole()
    given = call(q, k, mask=torch.rand(N, N) > 0.4, bias=torch.randn(N, N), sinks=torch.randn(H))
    weights = kept(CallStore(torch.device("meta")), given)
    made = weights.call
    everything = [made.q, made.k, made.v, made.sinks, made.mask.cells, made.bias.cells, weights.lse]
    assert {x.device.type for x in everything} == {"meta"}
