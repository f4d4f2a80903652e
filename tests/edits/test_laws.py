"""Laws of edits (DESIGN section 9) on causal attention of drawn sizes, in fp64."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

import regard
from regard import edits, masks

D, DV = 4, 3


class Attention(nn.Module):
    """Causal attention with fixed q, k and v, by our operation, by SDPA or by hand."""

    def __init__(self, how: str, batch: int, heads: int, shared: int, n: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.how, self.heads, self.n = how, heads * shared, n
        shapes = ((heads * shared, D), (heads, D), (heads, DV))
        self.q, self.k, self.v = (
            nn.Parameter(torch.randn(batch, h, n, d, generator=generator, dtype=torch.float64)) for h, d in shapes
        )

    @property
    def values(self) -> Tensor:
        """v by query head, (B, H, N, DV)."""
        return self.v.repeat_interleave(self.heads // self.v.shape[1], 1)

    @property
    def weights(self) -> Tensor:
        """(B, H, N, N) by the definition."""
        k = self.k.repeat_interleave(self.heads // self.k.shape[1], 1)
        hidden = torch.ones(self.n, self.n).triu(1).bool()
        return (self.q @ k.mT * D**-0.5).masked_fill(hidden, float("-inf")).softmax(-1)

    def forward(self) -> Tensor:
        if self.how == "regard":
            return regard.attention(self.q, self.k, self.v, mask=masks.causal())
        if self.how == "sdpa":
            return sdpa(self.q, self.k, self.v, is_causal=True, enable_gqa=True)
        return self.weights @ self.values


@dataclass
class Case:
    """A model, one head, one query after the first, and keys that it sees: some of them, never all."""

    model: Attention
    head: int
    query: int
    keys: list[int]
    plain: Tensor

    @property
    def others(self) -> list[int]:
        return [key for key in range(self.query + 1) if key not in self.keys]

    def run(self, *changes: edits.Edit | edits.Edits) -> Tensor:
        with torch.no_grad(), regard.edit(self.model, *changes):
            return self.model()

    def knock_out(self, keys: list[int] | slice, *, renormalise: bool = True) -> edits.KnockOut:
        return edits.knock_out(0, self.head, self.query, keys, renormalise=renormalise)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    how = draw(st.sampled_from(["regard", "sdpa", "by hand"]))
    batch, heads, shared, n = (draw(st.integers(low, high)) for low, high in ((1, 2), (1, 3), (1, 2), (2, 9)))
    model = Attention(how, batch, heads, shared, n, draw(st.integers(0, 99))).eval()
    head, query = draw(st.integers(0, model.heads - 1)), draw(st.integers(1, n - 1))
    keys = draw(st.lists(st.integers(0, query), min_size=1, max_size=query, unique=True))
    with torch.no_grad():
        return Case(model, head, query, keys, model())


laws = settings(max_examples=20)


def close(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=0, atol=1e-12)


@laws
@given(cases())
def test_only_the_edited_row_changes_and_nothing_stays(case: Case) -> None:
    edited = case.run(case.knock_out(case.keys))
    changed = (edited != case.plain).any(-1).any(0)  # (H, N)
    assert changed.nonzero().tolist() == [[case.head, case.query]]
    with torch.no_grad():
        assert torch.equal(case.model(), case.plain)


@laws
@given(cases())
def test_a_hidden_edge_keeps_every_bit(case: Case) -> None:
    with torch.no_grad(), pytest.raises(LookupError), regard.edit(case.model, edits.knock_out(0, case.head, 0, 1)):
        hidden = case.model()
    assert torch.equal(hidden, case.plain)


@laws
@given(cases(), st.data())
def test_the_one_key_that_is_left_hands_over_its_value(case: Case, data: st.DataObject) -> None:
    left = data.draw(st.integers(0, case.query))
    edited = case.run(case.knock_out([key for key in range(case.query + 1) if key != left]))
    assert close(edited[:, case.head, case.query], case.model.values[:, case.head, left])
    nothing = case.run(case.knock_out(slice(None)))
    assert not nothing[:, case.head, case.query].any()


@laws
@given(cases())
def test_renormalised_weights_grow_by_what_was_taken(case: Case) -> None:
    p, v = (x[:, case.head] for x in (case.model.weights[:, :, case.query], case.model.values))
    rest = p[:, case.others]
    expected = torch.einsum("bk,bkd->bd", rest / rest.sum(-1, keepdim=True), v[:, case.others])
    assert close(case.run(case.knock_out(case.keys))[:, case.head, case.query], expected)


@laws
@given(cases())
def test_without_renormalising_the_output_loses_weight_times_value(case: Case) -> None:
    w = case.model.weights[:, case.head][..., case.keys]  # (B, N, keys)
    lost = w @ case.model.values[:, case.head, case.keys]
    edited = case.run(case.knock_out(case.keys, renormalise=False))
    row = case.plain[:, case.head, case.query] - lost[:, case.query]
    assert close(edited[:, case.head, case.query], row)
    zeroed = case.run(edits.zero_values(0, case.head, case.keys))
    assert close(zeroed[:, case.head], case.plain[:, case.head] - lost)


@laws
@given(cases())
def test_edits_combine_in_any_order_and_once_is_enough(case: Case) -> None:
    parts = [case.knock_out([key]) for key in case.keys]
    together = case.run(case.knock_out(case.keys))
    assert torch.equal(case.run(*parts), together)
    assert torch.equal(case.run(*reversed(parts)), together)
    assert torch.equal(case.run(*parts, *parts), together)
    gone, both = edits.ablate(0, case.head), edits.knock_out(0, case.head, case.query, case.keys)
    assert torch.equal(case.run(gone + both), case.run(both + gone))
    assert torch.equal(case.run(gone + both), case.run(gone))


@laws
@given(cases())
def test_blocks_inside_each_other_add_up(case: Case) -> None:
    parts = [case.knock_out([key]) for key in case.keys]
    together = case.run(case.knock_out(case.keys))
    with torch.no_grad(), ExitStack() as stack:
        if case.model.how == "by hand" and len(parts) > 1:  # the inner block cannot see the outer one's weights
            stack.enter_context(pytest.raises(ValueError, match="one block"))
        for part in parts:
            stack.enter_context(regard.edit(case.model, part))
        assert close(case.model(), together)


@laws
@given(cases(), st.sampled_from(["q", "k", "v", "output"]))
def test_a_patch_from_the_same_run_changes_nothing(case: Case, part: str) -> None:
    part = "output" if case.model.how == "by hand" and part in "qk" else part
    with torch.no_grad(), regard.watch(case.model, keep=["qk", "v", "output"]) as seen:
        case.model()
    edited = case.run(edits.patch(0, case.head, part, seen))
    assert torch.equal(edited, case.plain) if part == "output" else close(edited, case.plain)


@laws
@given(cases())
def test_ablation_is_the_edit_of_all_keys_or_values(case: Case) -> None:
    gone = case.run(edits.ablate(0, case.head))
    assert torch.equal(gone, case.run(edits.zero_values(0, case.head)))
    assert torch.equal(gone, case.run(edits.knock_out(0, case.head, keys=slice(None))))
    mean = case.run(edits.ablate(0, case.head, by="mean"))
    assert close(mean[:, case.head], case.plain[:, case.head].mean(1, keepdim=True).expand(-1, case.model.n, -1))
    assert close(case.run(edits.ablate(0, case.head, by=mean)), mean)


@settings(max_examples=6)
@given(cases())
def test_the_gradient_is_the_difference_of_two_runs(case: Case) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(case.plain.shape, generator=generator, dtype=torch.float64)
    steps = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in case.model.parameters()]

    def moved(size: float) -> Tensor:
        for x, step in zip(case.model.parameters(), steps, strict=True):
            x.data += size * step
        with regard.edit(case.model, case.knock_out(case.keys)):
            value: Tensor = (case.model() * weights).sum()
        for x, step in zip(case.model.parameters(), steps, strict=True):
            x.data -= size * step
        return value

    with torch.no_grad():
        difference = float(moved(1e-6) - moved(-1e-6)) / 2e-6
    gradients = torch.autograd.grad(moved(0.0), list(case.model.parameters()))
    slope = sum(float((gradient * step).sum()) for gradient, step in zip(gradients, steps, strict=True))
    assert slope == pytest.approx(difference, rel=1e-6, abs=1e-6)
