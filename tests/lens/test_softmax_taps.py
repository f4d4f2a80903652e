"""Attention written out by hand: in which forms it is recognised, and what is not taken for it."""

import gc
import weakref
from math import inf

import pytest
import torch
from torch import nn
from torch.nn.functional import dropout, log_softmax, softmax

from regard.lens.taps import softmax as softmax_taps
from regard.lens.taps.installation import Taps

B, H, NQ, NK, D = 2, 3, 5, 11, 7


class Heads(nn.Module):
    """Attention by a function of q, k and v, which keeps its weights for the test to compare with."""

    def __init__(self, function, **attributes):
        super().__init__()
        self.function = function
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, *args):
        out, self.kept = self.function(*args)
        return out


def qkv(batch=B, heads=H, nq=NQ, nk=NK, kv_heads=None, dtype=torch.float32):
    kv = heads if kv_heads is None else kv_heads
    shapes = (batch, heads, nq, D), (batch, kv, nk, D), (batch, kv, nk, D)
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


def watched(model, *args):
    """What was seen of a call, its result being the same bits as without, and what was not confirmed."""
    torch.manual_seed(1)
    before = model(*args)
    seen = []
    torch.manual_seed(1)
    with Taps(model, seen.append) as taps:
        during = model(*args)
    assert torch.equal(before, during)
    assert taps.errors == []
    assert softmax_taps._pending == {}
    return seen, taps.unconfirmed


def by_matmul(q, k, v):
    weights = softmax(q @ k.mT * D**-0.5, -1)
    return weights @ v, weights


def by_bmm(q, k, v):
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    weights = softmax(torch.bmm(q, k.mT), -1)  # (B·H, Nq, Nk)
    return torch.bmm(weights, v), weights


def by_baddbmm(q, k, v):
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    scores = torch.baddbmm(torch.randn(len(q), q.shape[1], k.shape[1]), q, k.mT, beta=0.5)
    weights = softmax(scores.view(-1, H, *scores.shape[1:]), -1)
    return torch.bmm(weights.flatten(0, 1), v), weights


def by_einsum(q, k, v):
    weights = softmax(torch.einsum("bhid,bhjd->bhij", q, k), -1)
    return torch.einsum("bhij,bhjd->bhid", weights, v), weights


def by_einsum_turned(q, k, v):
    """The keys' product comes out as (…, Nk, Nq), and the weights are the second operand, summed over their rows."""
    scores = torch.einsum("bhjd,bhid->bhji", k, q).mT
    weights = softmax(scores, -1)
    return torch.einsum("bhdj,bhij->bhdi", v.mT, weights).mT, weights


def by_einsum_of_sequences(q, k, v):
    """Heads behind the sequence, as much of Flax's code has them."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    weights = softmax(torch.einsum("bihd,bjhd->bhij", q, k), -1)
    return torch.einsum("bhij,bjhd->bihd", weights, v), weights


def by_wide_softmax(q, k, v):
    weights = softmax((q @ k.mT).bfloat16(), -1, dtype=torch.float32)
    return weights.bfloat16() @ v.bfloat16(), weights


def with_dropout(q, k, v):
    weights = softmax(q @ k.mT, -1)
    return dropout(weights, 0.5, training=True) @ v, weights


FORMS = [
    by_matmul,
    by_baddbmm,
    by_einsum,
    by_einsum_turned,
    by_einsum_of_sequences,
    by_wide_softmax,
    with_dropout,
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("grad", [False, True])
def test_form_is_recognised(form, grad):
    model = Heads(form)
    with torch.set_grad_enabled(grad):
        seen, unconfirmed = watched(model, *(x.requires_grad_(grad) for x in qkv()))
    (only,) = seen
    assert (only.path, only.source, only.kernel, only.call, only.lse) == ("", "softmax", "softmax", None, None)
    assert (only.trouble, unconfirmed) == (None, [])
    assert torch.equal(only.weights, model.kept)
    assert torch.equal(softmax(only.scores, -1, dtype=only.weights.dtype), model.kept)
    assert only.weights.shape == only.scores.shape == (B, H, NQ, NK)
    assert not only.weights.requires_grad
    assert not only.scores.requires_grad


@pytest.mark.parametrize("form", [by_matmul, by_einsum, by_einsum_of_sequences])
@pytest.mark.parametrize(("batch", "heads", "nq"), [(1, 1, NQ), (1, H, NQ), (B, 1, NQ), (1, 1, 1), (B, H, 1)])
def test_single_batch_rows_heads_and_queries_are_recognised(form, batch, heads, nq):
    model = Heads(form)
    ((only,), unconfirmed) = watched(model, *qkv(batch, heads, nq))
    assert torch.equal(only.weights, model.kept)
    assert unconfirmed == []


def test_output_is_reported_where_its_rows_are_in_order():
    model = Heads(by_matmul)
    q, k, v = qkv()
    ((only,), _) = watched(model, q, k, v)
    assert torch.equal(only.output, model(q, k, v))
    for form in (by_einsum_turned, with_dropout):
        ((other,), _) = watched(Heads(form), q, k, v)
        assert other.output is None


def test_weights_are_not_copied():
    model = Heads(by_matmul)
    ((only,), _) = watched(model, *qkv())
    seen = []
    with Taps(model, seen.append):
        model(*qkv())
    assert seen[0].weights.data_ptr() == model.kept.data_ptr()
    assert only.weights.data_ptr() != model.kept.data_ptr()


@pytest.mark.parametrize("name", softmax_taps.HEADS)
def test_three_axes_are_split_by_the_modules_own_number_of_heads(name):
    model = Heads(by_bmm, **{name: H})
    ((only,), _) = watched(model, *qkv())
    assert only.weights.shape == only.scores.shape == (B, H, NQ, NK)
    assert torch.equal(only.weights.flatten(0, 1), model.kept)
    assert only.output.shape == (B, H, NQ, D)


@pytest.mark.parametrize("attributes", [{}, {"num_heads": 4}, {"num_heads": "many"}])
def test_three_axes_without_a_number_that_divides_are_split_by_the_batch_that_came_in(attributes):
    ((only,), _) = watched(Heads(by_bmm, **attributes), *qkv())
    assert only.weights.shape == (B, H, NQ, NK)


def of_one_head(x):
    weights = softmax(x @ x.mT, -1)
    return weights @ x, weights


def test_scores_of_one_head_are_batch_rows_of_one_head():
    ((only,), _) = watched(Heads(of_one_head), torch.randn(3, NQ, D))
    assert only.weights.shape == (3, 1, NQ, NQ)


def test_batch_stands_second_where_the_sequence_is_first():
    def turned(x):  # (N, B, D)
        return of_one_head(x.transpose(0, 1))

    ((only,), _) = watched(Heads(turned), torch.randn(NQ, 3, D))
    assert only.weights.shape == (3, 1, NQ, NQ)


def test_token_numbers_say_how_many_batch_rows_there_are():
    def embedded(ids):  # (B, N)
        return of_one_head(torch.nn.functional.one_hot(ids, D).float())

    ((only,), _) = watched(Heads(embedded), torch.randint(0, D, (3, NQ)))
    assert only.weights.shape == (3, 1, NQ, NQ)


def test_three_axes_are_all_heads_where_one_sequence_came_in_or_batch_rows_that_do_not_divide():
    def split(x):  # (N, H·D)
        return of_one_head(x.view(NQ, 3, D).transpose(0, 1))

    ((only,), _) = watched(Heads(split), torch.randn(NQ, 3 * D))
    assert only.weights.shape == (1, 3, NQ, NQ)
    ((other,), _) = watched(Heads(lambda x: of_one_head(x[:3])), torch.randn(4, NQ, D))
    assert other.weights.shape == (1, 3, NQ, NQ)


def test_part_of_an_attention_that_gets_heads_as_batch_rows_is_split_by_the_attentions_number():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.num_heads, self.inner = H, Heads(of_one_head)

        def forward(self, x):  # (B, N, H·D)
            heads = x.unflatten(-1, (H, D)).transpose(1, 2).flatten(0, 1)  # (B·H, N, D)
            return self.inner(heads)

    ((only,), _) = watched(Attention(), torch.randn(B, NQ, H * D))
    assert (only.path, only.weights.shape) == ("inner", (B, H, NQ, NQ))


def grouped(q, k, v):
    """(B, Hkv, group, Nq, Nk): three queries' heads share a key's."""
    q = q.unflatten(1, (2, 3))
    weights = softmax(torch.einsum("bgrid,bgjd->bgrij", q, k), -1)
    return torch.einsum("bgrij,bgjd->bgrid", weights, v), weights


def test_grouped_heads_are_put_side_by_side_where_the_module_counts_them_so():
    ((only,), _) = watched(Heads(grouped, num_heads=6), *qkv(heads=6, kv_heads=2))
    assert only.weights.shape == (B, 6, NQ, NK)
    ((other,), _) = watched(Heads(grouped), *qkv(heads=6, kv_heads=2))
    assert other.weights.shape == (B * 2, 3, NQ, NK)


def with_sink(q, k, v):
    scores = q @ k.mT
    sink = torch.tensor([0.5, 1.5, -0.5]).view(1, H, 1, 1).expand(*scores.shape[:3], 1)
    weights = softmax(torch.cat([scores, sink], -1), -1)[..., :-1]
    return weights @ v, weights


def test_column_of_a_sink_is_dropped_from_the_weights_and_last_in_the_scores():
    model = Heads(with_sink)
    ((only,), _) = watched(model, *qkv())
    assert torch.equal(only.weights, model.kept)
    assert only.scores.shape == (B, H, NQ, NK + 1)
    assert torch.equal(only.scores[..., -1], torch.tensor([0.5, 1.5, -0.5]).view(1, H, 1).expand(B, H, NQ))


def test_mask_inside_the_scores_is_seen_as_minus_infinity():
    def masked(q, k, v):
        scores = (q @ k.mT).masked_fill(torch.ones(NQ, NK).triu(1).bool(), -inf)
        weights = softmax(scores, -1)
        return weights @ v, weights

    ((only,), _) = watched(Heads(masked), *qkv())
    assert torch.equal(only.scores == -inf, torch.ones(B, H, NQ, NK).triu(1).bool())


# --------------------------------------------------------------------------------------------- what is not attention


class Router(nn.Module):
    """A mixture of experts: each token has values of its own, so that its softmax is no attention."""

    def __init__(self, einsum=False):
        super().__init__()
        self.gate, self.experts, self.einsum = nn.Linear(D, 4), nn.Linear(D, 4 * D), einsum

    def forward(self, x):  # (B, N, D)
        logits = torch.einsum("bnd,ed->bne", x, self.gate.weight) if self.einsum else self.gate(x)
        outputs = self.experts(x).unflatten(-1, (4, D))
        return torch.einsum("bne,bned->bnd", softmax(logits, -1), outputs)


@pytest.mark.parametrize("einsum", [False, True])
def test_router_is_not_attention(einsum):
    seen, unconfirmed = watched(nn.Sequential(Router(einsum)), torch.randn(B, NQ, D))
    assert seen == []
    assert unconfirmed == [("0", (B, NQ, 4))]


def test_classifier_is_not_attention():
    model = nn.Sequential(nn.Linear(D, 4), nn.Softmax(-1))
    seen, unconfirmed = watched(model, torch.randn(B, NQ, D))
    assert (seen, unconfirmed) == ([], [("", (B, NQ, 4))])


def linear(q, k, v):
    """Efficient attention: softmax over a query's features, times one matrix for all queries."""
    return softmax(q, -1) @ (softmax(k, -2).mT @ v), None


def test_softmax_over_features_is_not_attention():
    assert watched(Heads(linear), *qkv()) == ([], [("", (B, H, NQ, D))])


def test_softmax_over_features_beside_attention_is_not_taken_for_it():
    """The output of the attention before it is a product of its very shape, and no product of its own."""

    def both(q, k, v):
        out, weights = by_matmul(q, k, v)
        return linear(out, k, v)[0], weights

    model = Heads(lambda *qkv: (inner[1](inner[0](*qkv), *qkv[1:]), None))
    inner = model.inner = nn.ModuleList([Heads(by_matmul), Heads(linear)])
    for one, paths in ((Heads(both), ("", "")), (model, ("inner.0", "inner.1"))):
        seen, unconfirmed = watched(one, *qkv())
        assert [s.path for s in seen] == [paths[0]]
        assert unconfirmed == [(paths[1], (B, H, NQ, D))]


def test_softmax_that_is_a_module_belongs_to_the_attention_around_it():
    model = nn.ModuleDict({"attn": Heads(lambda q, k, v: (model["attn"].attend(q @ k.mT) @ v, None))})
    model["attn"].attend = nn.Softmax(-1)
    seen = []
    with Taps(model, seen.append):
        model["attn"](*qkv())
    assert [s.path for s in seen] == ["attn"]


def test_products_that_are_modules_belong_to_the_attention_around_them():
    class Product(nn.Module):
        def forward(self, a, b):
            return a @ b

    model = Heads(lambda q, k, v: (model.second(softmax(model.first(q, k.mT), -1), v), None))
    model.first, model.second = Product(), Product()
    ((only,), unconfirmed) = watched(model, *qkv())
    assert (only.path, unconfirmed) == ("", [])


def logarithms(q, k, v):
    return log_softmax(q @ k.mT, -1).exp() @ v, None


def over_rows(q, k, v):
    return softmax(k @ q.mT, -2).mT @ v, None


@pytest.mark.parametrize(("form", "shape"), [(over_rows, (B, H, NK, NQ)), (logarithms, (B, H, NQ, NK))])
def test_softmax_of_another_form_is_listed_where_a_product_made_its_scores(form, shape):
    model = Heads(form)
    with Taps(model, print) as taps:
        model(*qkv())
    assert taps.suspected == taps.unconfirmed == [("", shape)]
    flat = [x[0, 0] for x in qkv()]
    with Taps(model, print) as taps:
        model(*flat)
    assert (taps.unconfirmed, taps.suspected) == ([("", shape[2:])], [])  # a linear layer's scores look the same
    assert watched(Heads(lambda x: (log_softmax(x, -1) + softmax(x, -2), None)), torch.randn(B, NQ, D)) == ([], [])


def by_exponentials(q, k, v):
    powers = (q @ k.mT).exp()
    return powers / powers.sum(-1, keepdim=True) @ v, None


def test_products_that_meet_without_a_softmax_are_listed():
    for args, matrices in ((qkv(), (B * H, NQ, NK)), ([x[0, 0] for x in qkv()], (1, NQ, NK))):
        model = Heads(by_exponentials)
        with Taps(model, print) as taps:
            model(*args)
        assert (taps.chained, taps.unconfirmed) == ([("", matrices)], [])
    with Taps(model := Heads(by_matmul), print) as taps:
        model(*qkv())
    assert taps.chained == []


# ------------------------------------------------------------------------------------------------------ plain matrices


@pytest.mark.parametrize("form", [by_matmul, by_wide_softmax, with_dropout])
def test_two_axes_are_one_head(form):
    model = Heads(form)
    ((only,), unconfirmed) = watched(model, *(x[0, 0] for x in qkv()))
    assert only.weights.shape == only.scores.shape == (1, 1, NQ, NK)
    assert torch.equal(only.weights[0, 0], model.kept)
    assert (only.trouble, unconfirmed) == (None, [])


def test_einsum_of_two_axes_is_one_head():
    def einsum(q, k, v):
        weights = softmax(torch.einsum("id,jd->ij", q, k), -1)
        return torch.einsum("ij,jd->id", weights, v), weights

    ((only,), _) = watched(model := Heads(einsum), *(x[0, 0] for x in qkv()))
    assert torch.equal(only.weights[0, 0], model.kept)


@pytest.mark.parametrize("bias", [False, True])
def test_classifier_of_two_axes_with_layers_after_it_is_not_attention(bias):
    model = nn.Sequential(nn.Linear(D, 4, bias=bias), nn.Softmax(-1), nn.Linear(4, 3, bias=bias))
    with Taps(model, print) as taps:
        model(torch.randn(NQ, D))
    assert watched(model, torch.randn(NQ, D)) == ([], [("", (NQ, 4))])
    assert (taps.suspected, taps.chained) == ([], [])


def test_router_of_two_axes_with_weights_of_another_kind_is_not_suspected():
    """As autocast casts them: the product is then not known for a linear layer's."""
    gate = nn.Linear(D, 4, bias=False)

    def route(x):
        best = softmax(x @ gate.weight.detach().clone().t(), -1).topk(2)
        return best.values, None

    with Taps(model := Heads(route, gate=gate), print) as taps:
        model(torch.randn(NQ, D))
    assert (taps.unconfirmed, taps.suspected) == ([("", (NQ, 4))], [])


def test_linear_layer_over_scores_of_three_axes_is_not_taken_for_the_product_that_made_them():
    cast = torch.randn(D, 4)  # no parameter, as under autocast
    model = Heads(lambda x: (softmax(x @ cast, -1).topk(2).values, None))
    with Taps(model, print) as taps:
        model(torch.randn(B, NQ, D))
    assert (taps.unconfirmed, taps.suspected) == ([("", (B, NQ, 4))], [])


def test_scores_that_never_meet_values_are_listed_once():
    def pooled(q, k, v):
        weights = softmax(q @ k.mT, -1)
        return weights.sum(-2), weights

    model, seen = Heads(pooled), []
    with Taps(model, seen.append) as taps:
        for _ in range(3):
            model(*qkv())
        assert taps.unconfirmed == [("", (B, H, NQ, NK))]
    assert seen == []
    assert taps.unconfirmed == [("", (B, H, NQ, NK))]


def test_softmax_in_between_belongs_to_its_own_module():
    """A classifier runs before the softmax of an attention, and another before the product with its values."""
    model = Heads(lambda q, k, v: interrupted(q, k, v))
    model.inner = Heads(lambda x: (softmax(x, -1), None))

    def interrupted(q, k, v):
        scores = q @ k.mT
        model.inner(q)
        weights = softmax(scores, -1)
        model.inner(v)
        return weights @ v, weights

    ((only,), unconfirmed) = watched(model, *qkv())
    assert torch.equal(only.weights, model.kept)
    assert unconfirmed == [("inner", (B, H, NQ, D)), ("inner", (B, H, NK, D))]


def test_two_attentions_in_one_module_are_both_seen():
    def twice(q, k, v):
        first, weights = by_matmul(q, k, v)
        return by_matmul(first, k, v)[0], weights

    seen, unconfirmed = watched(Heads(twice), *qkv())
    assert (len(seen), unconfirmed) == (2, [])


def test_unwatched_softmax_is_left_alone():
    model, other, seen = Heads(by_matmul), Heads(by_matmul), []
    with Taps(model, seen.append) as taps:
        other(*qkv())
    assert (seen, taps.unconfirmed) == ([], [])


# ------------------------------------------------------------------------------------------------- memory that changes


@pytest.mark.parametrize("forget_scores", [False, True])
def test_weights_that_are_written_over_are_reported_as_they_were_applied(forget_scores):
    def inplace(q, k, v):
        scores = q @ k.mT
        weights = softmax(scores, -1)
        if forget_scores:
            scores.zero_()
        return weights.mul_(2) @ v, weights.clone()

    model = Heads(inplace)
    ((only,), _) = watched(model, *qkv())
    assert torch.equal(only.weights, model.kept)
    assert (only.edited, only.trouble) == (True, None)
    assert (only.scores is None) == forget_scores


def test_scores_that_only_a_copy_could_bring_to_four_axes_are_left_out():
    def turned(q, k, v):
        scores = (q @ k.mT).transpose(0, 1)  # (3, 2, H, Nq, Nk), and not in that order in memory
        weights = softmax(scores, -1)
        return weights @ v.transpose(0, 1), weights

    model = Heads(turned)
    q, k, v = (torch.randn(2, 3, H, n, D) for n in (NQ, NK, NK))
    ((only,), _) = watched(model, q, k, v)
    assert (only.scores, only.trouble) == (None, None)
    assert torch.equal(only.weights, model.kept.flatten(0, 1))


def test_nothing_is_kept_alive():
    def pooled(q, k, v):
        weights = softmax(q @ k.mT, -1)
        references.append(weakref.ref(weights))
        return weights.sum(-2), None

    references, model = [], Heads(pooled)
    with torch.no_grad(), Taps(model, print):
        model(*qkv())
        model(*qkv())
        gc.collect()
        assert [r() is None for r in references] == [True, False]  # the last still waits for its product
    gc.collect()
    assert [r() is None for r in references] == [True, True]
