"""Additive attention against a loop over queries and keys, with masks, and learning to reverse a sequence."""

from copy import deepcopy

import pytest
import torch
from torch import nn

import regard
from regard import masks
from regard.nn import AdditiveAttention
from regard.testing import assert_rule

B, N, M = 2, 3, 7
D_QUERY, D_CONTEXT, D_HIDDEN = 6, 8, 5


def inputs():
    random = torch.Generator().manual_seed(0)
    return torch.randn(B, N, D_QUERY, generator=random), torch.randn(B, M, D_CONTEXT, generator=random)


def layer_of(**options):
    torch.manual_seed(0)
    return AdditiveAttention(D_QUERY, D_CONTEXT, D_HIDDEN, **options)


def by_loop(layer, query, context, visible=None):
    """Each score from its own pair, as the paper has it; visible (B, N, M)."""
    output, weights = query.new_zeros(B, N, D_CONTEXT), query.new_zeros(B, N, M)
    for b in range(B):
        for i in range(N):
            seen = [j for j in range(M) if visible is None or visible[b, i, j]]
            if seen:
                pairs = [layer.w_q(query[b, i]) + layer.w_k.weight @ context[b, j] for j in seen]
                scores = torch.stack([layer.v.weight[0] @ torch.tanh(pair) for pair in pairs])
                weights[b, i, seen] = scores.softmax(0)
                output[b, i] = sum(w * context[b, j] for w, j in zip(weights[b, i, seen], seen, strict=True))
    return output, weights


def booleans():
    visible = torch.rand(B, N, M, generator=torch.Generator().manual_seed(1)) < 0.5
    visible[1, 2] = False  # a query that sees nothing
    return visible


MASKS = {"none": None, "padding": masks.padding([M, 4]), "booleans": booleans()}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("mask", MASKS)
def test_output_and_weights_are_those_of_a_loop(mask, bias):
    layer, (query, context) = layer_of(bias=bias), inputs()
    visible = {"none": None, "padding": masks.padding([M, 4]).dense(N, M).expand(B, 1, N, M)[:, 0]}.get(
        mask, booleans()
    )
    ours = layer(query, context, mask=MASKS[mask])
    baseline = by_loop(layer, query, context, visible)
    truth = by_loop(deepcopy(layer).double(), query.double(), context.double(), visible)
    for results in zip(ours, baseline, truth, strict=True):
        assert_rule(*(x.detach() for x in results))
    assert regard.check(ours[1].detach()).empty_rows == (1 if mask == "booleans" else 0)


def test_gradients_are_those_of_a_loop():
    def gradients(layer, query, context, function):
        query, context = query.requires_grad_(), context.requires_grad_()
        output, weights = function(query, context)
        total = output.square().sum() + weights[..., 0].sum()
        return torch.autograd.grad(total, (query, context, *layer.parameters()))

    layer, (query, context) = layer_of(), inputs()
    twin = deepcopy(layer).double()
    ours = gradients(layer, query, context, lambda q, c: layer(q, c, mask=booleans()))
    baseline = gradients(layer, query, context, lambda q, c: by_loop(layer, q, c, booleans()))
    truth = gradients(
        twin, query.double().detach(), context.double().detach(), lambda q, c: by_loop(twin, q, c, booleans())
    )
    for results in zip(ours, baseline, truth, strict=True):
        assert_rule(*results, gradient=True)


def test_hidden_keys_change_nothing():
    layer, (query, context) = layer_of(), inputs()
    other = context.clone()
    other[1, 4:] = 1e4
    first, second = (layer(query, c, mask=masks.padding([M, 4])) for c in (context, other))
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


def test_watch_sees_its_weights():
    layer, (query, context) = layer_of(), inputs()
    with regard.watch(layer, keep="qk") as seen:
        _, weights = layer(query, context)
    _, truth = deepcopy(layer).double()(query.double(), context.double())
    assert_rule(seen[0].tile(slice(None), slice(None))[:, 0], weights.detach(), truth.detach())


@pytest.mark.parametrize(
    ("query", "context", "message"),
    [
        ((B, N, 5), (B, M, D_CONTEXT), r"query.*6.*\(2, 3, 5\)"),
        ((N, D_QUERY), (B, M, D_CONTEXT), r"query.*\(3, 6\)"),
        ((B, N, D_QUERY), (1, M, D_CONTEXT), r"context.*2.*\(1, 7, 8\)"),
        ((B, N, D_QUERY), (B, M, 7), r"context.*8.*\(2, 7, 7\)"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(query, context, message):
    with pytest.raises(ValueError, match=message):
        layer_of()(torch.zeros(query), torch.zeros(context))
    with pytest.raises(ValueError, match=r"d_hidden.*0"):
        AdditiveAttention(D_QUERY, D_CONTEXT, 0)


def test_layer_learns_to_read_a_sequence_backwards():
    """Output i is the token at M − 1 − i: the layer has to find it by position, as an alignment does."""
    torch.manual_seed(0)
    length, vocabulary, width = 6, 11, 24
    tokens, places, asked = nn.Embedding(vocabulary, width), nn.Embedding(length, width), nn.Embedding(length, width)
    layer, score = AdditiveAttention(width, width, 32), nn.Linear(width, vocabulary)
    parts = nn.ModuleList([tokens, places, asked, layer, score])
    optimizer = torch.optim.Adam(parts.parameters(), lr=0.02)
    losses = []
    for _ in range(120):
        ids = torch.randint(vocabulary, (32, length))
        output, weights = layer(asked.weight.expand(32, -1, -1), tokens(ids) + places.weight)
        loss = nn.functional.cross_entropy(score(output).flatten(0, 1), ids.flip(1).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.1 * losses[0]
    alignment = weights.mean(0).detach()
    assert alignment.argmax(-1).tolist() == [5, 4, 3, 2, 1, 0]
    assert float(alignment.flip(1).diagonal().min()) > 0.7
    figure = regard.figures.heatmap(
        alignment, [f"출력 {i}" for i in range(length)], [f"입력 {j}" for j in range(length)]
    )
    assert "출력 5" in [text.get_text() for text in figure.texts]
