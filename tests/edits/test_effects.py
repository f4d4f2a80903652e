"""Effects and scans against the same numbers computed by hand on a tiny model in fp64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

import regard
from regard import edits, masks, metrics

B, H, N, D, WORDS = 2, 3, 7, 4, 11
QUERY = 5
Weights = Callable[[int, Tensor], Tensor]


class Layer(nn.Module):
    """Causal attention with a residual; given `edit`, written out by hand, with the weights through `edit`."""

    def __init__(self, how: str, sinks: bool) -> None:
        super().__init__()
        self.how, self.project = how, nn.Linear(H * D, 3 * H * D)
        self.out = nn.Linear(H * D, H * D)
        self.sinks = nn.Parameter(torch.linspace(-1, 1, H).double()) if sinks else None

    def forward(self, x: Tensor, edit: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        q, k, v = self.project(x).unflatten(-1, (3 * H, D)).transpose(1, 2).chunk(3, 1)
        if edit is not None:  # by hand
            s = (q @ k.mT * D**-0.5).masked_fill(~torch.ones(N, N).tril().bool(), float("-inf"))
            if self.sinks is not None:
                s = torch.cat([s, self.sinks.view(1, H, 1, 1).expand(len(x), H, N, 1)], -1)
            p = edit(s.softmax(-1))[..., :N]
            out = p @ v
        elif self.how == "regard":
            out = regard.attention(q, k, v, mask=masks.causal(), sinks=self.sinks)
        else:
            out = sdpa(q, k, v, is_causal=True)
        return x + self.out(out.transpose(1, 2).flatten(2)).tanh()


class Model(nn.Module):
    """Two layers and logits."""

    def __init__(self, how: str = "sdpa", *, sinks: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, H * D)
        self.layers = nn.ModuleList(Layer(how, sinks) for _ in range(2))
        self.logits = nn.Linear(H * D, WORDS)
        self.double().eval()

    def forward(self, ids: Tensor, edit: Callable[[int, Tensor], Tensor] | None = None) -> Tensor:
        x = self.embed(ids)
        for n, layer in enumerate(self.layers):
            x = layer(x, None if edit is None else lambda p, n=n: edit(n, p))
        return self.logits(x)


IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2], [2, 7, 1, 8, 2, 8, 1]])
METRIC = metrics.logit_diff(3, 8, position=QUERY)


def scaled(layer: int, head: int, query: int | None, key: int | None, left: float) -> Weights:
    """Weights of which a head keeps only the share `left`; or one edge, with the row renormalised."""

    def edit(n: int, p: Tensor) -> Tensor:
        if n != layer:
            return p
        p = p.clone()
        if key is None:
            p[:, head] *= left
            return p
        p[:, head, query, key] *= left
        p[:, head, query] /= p[:, head, query].sum(-1, keepdim=True)
        return p

    return edit


def by_hand(model: Model, edit: Weights, metric: Callable[[Tensor], Tensor]) -> float:
    with torch.no_grad():
        return float(metric(model(IDS, edit)) - metric(model(IDS, lambda n, p: p)))


def difference(logits: Tensor) -> Tensor:
    return logits[0, QUERY, 3] - logits[0, QUERY, 8]


def over_the_batch(logits: Tensor) -> Tensor:
    return (logits[:, QUERY, 3].square() - logits[:, QUERY, 8]).sum()


@pytest.mark.parametrize(("how", "sinks"), [("sdpa", False), ("regard", True)])
def test_an_effect_is_the_difference_of_two_runs(how: str, sinks: bool) -> None:
    model = Model(how, sinks=sinks)
    found = regard.effect(lambda: model(IDS), model, edits.knock_out(0, 1, QUERY, 2), METRIC, controls=3)
    with torch.no_grad():
        before, weights = difference(model(IDS)), []
        model(IDS, lambda n, p: weights.append(p) or p)
    assert found.before == pytest.approx(float(before), abs=1e-10)
    assert found.value == pytest.approx(by_hand(model, scaled(0, 1, QUERY, 2, 0.0), difference), abs=1e-10)
    assert found.weight == pytest.approx(float(weights[0][:, 1, QUERY, 2].mean()), abs=1e-6)
    assert abs(found.value) > 1e-4
    assert found.method == "exact"
    ablated = regard.effect(lambda: model(IDS), model, edits.ablate(1, 2), METRIC, controls=0)
    assert ablated.value == pytest.approx(by_hand(model, scaled(1, 2, None, None, 0.0), difference), abs=1e-10)
    assert (ablated.controls, ablated.p_value, ablated.weight) == ((), None, None)


def test_controls_are_the_other_keys_that_the_query_sees() -> None:
    model = Model()
    found = regard.effect(lambda: model(IDS), model, edits.knock_out(0, 1, QUERY, 2), METRIC)
    others = [by_hand(model, scaled(0, 1, QUERY, key, 0.0), difference) for key in (0, 1, 3, 4, 5)]  # not 6: causal
    assert sorted(found.controls) == pytest.approx(sorted(others), abs=1e-10)
    as_large = sum(abs(value) >= abs(found.value) for value in others)
    assert found.p_value == (1 + as_large) / 6
    negative = regard.effect(lambda: model(IDS), model, edits.knock_out("layers.0", 1, QUERY - N, 2 - N), METRIC)
    assert (negative.value, negative.controls, negative.weight) == (found.value, found.controls, found.weight)


def test_controls_of_two_keys_are_all_pairs_once() -> None:
    model = Model()
    found = regard.effect(lambda: model(IDS), model, edits.knock_out(0, 1, 4, [0, 1]), METRIC)
    assert len(found.controls) == len(set(found.controls)) == 3  # of 2, 3 and 4
    few = regard.effect(lambda: model(IDS), model, edits.knock_out(0, 1, 3, [0, 1]), METRIC)
    assert len(few.controls) == 1
    assert regard.effect(lambda: model(IDS), model, edits.knock_out(0, 1, 2, [0, 1]), METRIC).controls == ()


def test_controls_of_an_ablation_are_the_other_heads() -> None:
    model = Model()
    found = regard.effect(lambda: model(IDS), model, edits.ablate(0, 1), METRIC)
    heads = [(n, h) for n in range(2) for h in range(H) if (n, h) != (0, 1)]
    others = [by_hand(model, scaled(n, h, None, None, 0.0), difference) for n, h in heads]
    assert sorted(found.controls) == pytest.approx(sorted(others), abs=1e-10)


def test_controls_of_several_edits_are_as_many_places_and_never_the_edits_own() -> None:
    model = Model()
    pair = edits.ablate(0, 0) + edits.ablate("layers.0", 1)
    found = regard.effect(lambda: model(IDS), model, pair, METRIC)

    def both(places: list[tuple[int, int]]) -> Weights:
        def edit(n: int, p: Tensor) -> Tensor:
            for layer, head in places:
                p = scaled(layer, head, None, None, 0.0)(n, p)
            return p

        return edit

    heads = [(0, 2), (1, 0), (1, 1), (1, 2)]
    pairs = [by_hand(model, both([one, two]), difference) for one in heads for two in heads if one < two]
    assert found.controls
    for value in found.controls:
        assert min(abs(value - pair) for pair in pairs) < 1e-10
    edges = edits.knock_out(0, 1, QUERY, -2) + edits.knock_out(0, 1, QUERY, 4)  # −2 is the key 5
    found = regard.effect(lambda: model(IDS), model, edges, METRIC)
    assert found.controls
    assert all(abs(value - found.value) > 1e-12 for value in found.controls)


def test_controls_depend_on_the_seed_alone() -> None:
    model = Model()
    single, metric = edits.knock_out(0, 1, 6, [0, 3]), metrics.logit_diff(3, 8)
    one, two, other = (
        regard.effect(lambda: model(IDS), model, single, metric, controls=4, seed=seed).controls for seed in (1, 1, 2)
    )
    assert one == two != other
    assert len(one) == len(other) == 4
    steer = edits.add("layers.0", torch.ones(H * D).double())
    first, second = (regard.effect(lambda: model(IDS), model, steer, METRIC, controls=3, seed=0) for _ in range(2))
    assert first.controls == second.controls
    assert len(set(first.controls)) == 3


def counted(model: Model) -> tuple[Callable[[], Tensor], list[int]]:
    runs: list[int] = []

    def run() -> Tensor:
        runs.append(1)
        return model(IDS)

    return run, runs


@pytest.mark.parametrize(
    ("single", "error", "says"),
    [
        (edits.ablate(2, 0), LookupError, "2, 0 to 1"),
        (edits.ablate(-3, 0), LookupError, "-3"),
        (edits.ablate("logits", 0), LookupError, "logits"),
        (edits.ablate(1, H), IndexError, "3 heads"),
        (edits.ablate(1, 0, queries=N), IndexError, "7 positions"),
        (edits.ablate(1, 0, queries=slice(N, None)), IndexError, "7 positions"),
        (edits.knock_out(0, 0, QUERY, N), IndexError, "7 positions"),
        (edits.knock_out(0, 0, -N - 1, 0), IndexError, "7 positions"),
        (edits.zero_values(0, 0, N), IndexError, "7 positions"),
        (edits.patch(0, 0, "k", torch.zeros(1, 1, 1, D), positions=N), IndexError, "7 positions"),
        (edits.knock_out(0, 0, 2, 4), ValueError, "mask hides"),
        (edits.knock_out(None, 0, 2, [4, 5]), ValueError, "mask hides"),
    ],
)
def test_edits_that_cannot_change_anything_raise_before_an_edited_run(
    single: edits.Edit, error: type[Exception], says: str
) -> None:
    model = Model()
    run, runs = counted(model)
    with pytest.raises(error, match=says):
        regard.effect(run, model, single, METRIC)
    assert len(runs) <= 2  # without an edit


def test_metrics_that_are_no_number_raise_before_an_edited_run() -> None:
    model = Model()
    for metric, says in (
        (lambda logits: logits[0, 0], r"\(11,\)"),
        (lambda logits: logits.sum() * float("nan"), "nan"),
        (lambda logits: float("inf"), "inf"),
    ):
        run, runs = counted(model)
        with pytest.raises(ValueError, match=says):
            regard.effect(run, model, edits.ablate(0, 0), metric)
        with pytest.raises(ValueError, match=says):
            regard.scan(run, model, metric)
        assert len(runs) == 2
    with pytest.raises(ValueError, match="nowhere"):
        regard.effect(lambda: model(IDS), model, edits.ablate(0, 0), metrics.moved(0, path="nowhere"))


def test_runs_that_differ_without_an_edit_raise() -> None:
    model = Model()
    with pytest.raises(ValueError, match="training"):
        regard.effect(lambda: model(IDS), model.train(), edits.ablate(0, 0), METRIC)
    model.eval()
    with pytest.raises(ValueError, match="deterministic"):
        regard.effect(lambda: model(IDS) * torch.rand(()), model, edits.ablate(0, 0), METRIC)
    other = Model()
    with pytest.raises(LookupError, match="Model"):
        regard.effect(lambda: other(IDS), model, edits.ablate(0, 0), METRIC)


@pytest.mark.parametrize("over", ["heads", "layers", "edges"])
def test_an_exact_scan_is_the_effect_of_each_place(over: str) -> None:
    model = Model()
    query = QUERY if over == "edges" else None
    found = regard.scan(lambda: model(IDS), model, METRIC, over=over, query=query)
    assert tuple(found.values.shape) == {"heads": (2, H), "layers": (2, 1), "edges": (2, H, N)}[over]
    assert found.method == "exact"
    assert found.names == ["layers.0", "layers.1"]
    places = torch.cartesian_prod(*map(torch.arange, found.values.shape)).tolist()
    for place in places[:: 5 if over == "edges" else 1]:
        if over == "edges" and place[2] > QUERY:
            assert found.values[tuple(place)].isnan()  # hidden
            continue
        single = {
            "heads": lambda at: edits.ablate(*at),
            "layers": lambda at: edits.ablate(at[0]),
            "edges": lambda at: edits.knock_out(at[0], at[1], QUERY, at[2]),
        }[over](place)
        expected = regard.effect(lambda: model(IDS), model, single, METRIC, controls=0)
        assert float(found.values[tuple(place)]) == pytest.approx(expected.value, rel=1e-12)
        if found.weights is not None:
            assert float(found.weights[tuple(place)]) == pytest.approx(expected.weight, rel=1e-5)
    order = [abs(value) for _, value in found.top(5)]
    assert order == sorted(order, reverse=True)
    assert order[0] == float(found.values.nan_to_num(0.0).abs().max()) > 0
    places = len(found.top(found.values.numel()))
    assert places == {"heads": 2 * H, "layers": 2, "edges": 2 * H * (QUERY + 1)}[over]  # no edge that the mask hides
    assert METRIC.name in repr(found)


@pytest.mark.parametrize(("how", "sinks"), [("sdpa", False), ("regard", True)])
@pytest.mark.parametrize("metric", [difference, over_the_batch])
def test_first_order_is_the_slope_towards_the_edit(how: str, sinks: bool, metric: Callable[[Tensor], Tensor]) -> None:
    model = Model(how, sinks=sinks)
    step = 1e-5

    def slope(layer: int, head: int, query: int | None = None, key: int | None = None) -> float:
        edited = scaled(layer, head, query, key, 0.0)
        more, less = (by_hand(model, lambda n, p, e=e: p + e * (edited(n, p) - p), metric) for e in (step, -step))
        return (more - less) / (2 * step)

    heads = regard.scan(lambda: model(IDS), model, metric, method="gradient")
    layers = regard.scan(lambda: model(IDS), model, metric, over="layers", method="gradient")
    edges = regard.scan(lambda: model(IDS), model, metric, over="edges", query=QUERY - N, method="gradient")
    assert heads.method == edges.method == "first order"
    for n in range(2):
        slopes = [slope(n, h) for h in range(H)]
        assert heads.values[n].tolist() == pytest.approx(slopes, rel=1e-6, abs=1e-8)
        assert float(layers.values[n, 0]) == pytest.approx(sum(slopes), rel=1e-6, abs=1e-8)
        for h in range(H):
            expected = [slope(n, h, QUERY, key) for key in range(QUERY + 1)]
            assert edges.values[n, h, : QUERY + 1].tolist() == pytest.approx(expected, rel=1e-6, abs=1e-8)
            assert edges.values[n, h, QUERY + 1 :].isnan().all()  # hidden
    assert heads.values.abs().min() > 1e-4  # so that the comparison says something


@pytest.mark.parametrize("size", [1.0, 1e-2, 1e-4])
def test_first_order_is_exact_where_the_rest_of_the_model_is_linear(size: float) -> None:
    """The head's output is small beside the rest, so only the weights are not linear: also where one is near 1."""
    model = Model()
    with torch.no_grad():
        model.layers[1].out.weight.mul_(size)
        model.layers[1].out.bias.zero_()
        model.layers[1].project.weight[: 2 * H * D].mul_(3)
    options = {"over": "edges", "query": QUERY}
    first = regard.scan(lambda: model(IDS[:1]), model, METRIC, method="gradient", **options)
    exact = regard.scan(lambda: model(IDS[:1]), model, METRIC, **options)
    one, other = first.values[1, :, : QUERY + 1], exact.values[1, :, : QUERY + 1]
    assert 0.9 < float(first.weights[1, :, : QUERY + 1].max()) < 1
    error = float((one - other).abs().max() / other.abs().max())
    assert error < size**2  # tanh(x) = x − x³/3
    if size < 1:
        assert one.flatten().argsort().equal(other.flatten().argsort())


def test_first_order_of_a_row_with_one_key_takes_all_of_it_away() -> None:
    model = Model()
    first = regard.scan(lambda: model(IDS), model, metrics.logit_diff(3, 8, position=0), over="edges", query=0,
                        method="gradient")  # fmt: skip
    heads = regard.scan(lambda: model(IDS[:, :1]), model, metrics.logit_diff(3, 8, position=0), method="gradient")
    assert first.values[1, :, 0].tolist() == pytest.approx(heads.values[1].tolist(), rel=1e-9)


def test_negative_layers_count_from_the_end() -> None:
    model = Model()
    for single, same in (
        (edits.ablate(-1, 0), edits.ablate(1, 0)),
        (edits.knock_out(-2, 1, QUERY, 2), edits.knock_out(0, 1, QUERY, 2)),
    ):
        one, other = (regard.effect(lambda: model(IDS), model, e, METRIC) for e in (single, same))
        assert (one.value, one.controls, one.weight) == (other.value, other.controls, other.weight)
    with pytest.raises(ValueError, match="-1"):
        regard.edit(model, edits.ablate(-1, 0))


def test_the_weight_of_the_controls_is_told() -> None:
    model = Model()
    weights: list[Tensor] = []
    with torch.no_grad():
        model(IDS, lambda n, p: weights.append(p) or p)
    found = regard.effect(lambda: model(IDS), model, edits.knock_out(0, 1, QUERY, 2), METRIC)
    others = weights[0][:, 1, QUERY, [0, 1, 3, 4, 5]]
    assert found.control_weight == pytest.approx(float(others.mean()), rel=1e-5)
    assert f"{found.control_weight:.3f}" in repr(found)
    pair = regard.effect(lambda: model(IDS), model, edits.knock_out(0, None, [4, 5], [0, 1]), METRIC)
    expected = [weights[0][:, :, [4, 5]][..., [a, b]].sum(-1).mean() for a in (2, 3, 4) for b in (3, 4) if a < b]
    assert pair.control_weight == pytest.approx(float(sum(expected)) / len(expected), rel=1e-5)
    assert regard.effect(lambda: model(IDS), model, edits.ablate(0, 1), METRIC).control_weight is None


@pytest.mark.parametrize(
    ("metric", "values"),
    [
        (metrics.log_prob(WORDS), (WORDS, WORDS - 1)),
        (metrics.logit_diff(0, -WORDS - 1), (-WORDS - 1, WORDS - 1)),
        (metrics.log_prob(0, position=N), (N, N - 1)),
        (metrics.kl(batch=B), (B, B - 1)),
        (metrics.moved(N), (N, N - 1)),
        (metrics.moved(0, batch=5), (5, B - 1)),
    ],
)
def test_metrics_of_what_is_not_there_give_the_numbers(metric: metrics.Metric, values: tuple[int, int]) -> None:
    model = Model()
    with pytest.raises(IndexError) as caught:
        regard.effect(lambda: model(IDS), model, edits.ablate(0, 0), metric)
    assert all(str(value) in str(caught.value) for value in values)


def test_the_largest_are_confirmed_exactly() -> None:
    model = Model()
    quick = regard.scan(lambda: model(IDS), model, METRIC, method="gradient")
    exact = regard.scan(lambda: model(IDS), model, METRIC)
    confirmed = quick.confirm(4)
    assert [(place, value) for place, value, _ in confirmed] == quick.top(4)
    for place, value, measured in confirmed:
        assert measured == pytest.approx(float(exact.values[place]), rel=1e-12)
        assert measured != value


def test_a_gradient_scan_leaves_the_parameters_as_they_are() -> None:
    model = Model()
    expected = regard.scan(lambda: model(IDS), model, METRIC, method="gradient").values
    assert all(parameter.grad is None for parameter in model.parameters())
    model(IDS).sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    regard.scan(lambda: model(IDS), model, METRIC, method="gradient")
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))
    model.requires_grad_(False)
    frozen = regard.scan(lambda: model(IDS), model, METRIC, method="gradient").values
    assert torch.equal(frozen, expected)
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_scans_that_cannot_be_done_say_so() -> None:
    model = Model()

    def scan(metric: Any = METRIC, run: Callable[[], Any] = lambda: model(IDS), **options: Any) -> regard.Scan:
        return regard.scan(run, model, metric, **options)

    for options, says in (
        ({"over": "tokens"}, "tokens"),
        ({"method": "fast"}, "fast"),
        ({"over": "edges"}, "query"),
        ({"query": 3}, "query"),
        ({"metric": metrics.moved(2), "method": "gradient"}, "exact"),
        ({"metric": metrics.kl(), "method": "gradient"}, "exact"),
        ({"metric": lambda logits: difference(logits).item(), "method": "gradient"}, "gradient"),
        ({"run": torch.no_grad()(lambda: model(IDS)), "method": "gradient"}, "no_grad"),
    ):
        with pytest.raises(ValueError, match=says):
            scan(**options)
    with pytest.raises(IndexError, match="7 queries"):
        scan(over="edges", query=N)


def test_a_layer_that_runs_twice_is_edited_twice() -> None:
    model = Model()
    model.layers[1] = model.layers[0]

    def twice(left: float) -> float:
        return by_hand(model, lambda n, p: scaled(n, 1, None, None, left)(n, p), difference)

    found = regard.effect(lambda: model(IDS), model, edits.ablate(0, 1), METRIC)
    assert found.value == pytest.approx(twice(0.0), abs=1e-10)
    assert len(found.controls) == H - 1
    quick = regard.scan(lambda: model(IDS), model, METRIC, method="gradient")
    assert quick.values.shape == (1, H)
    slope = (twice(1 - 1e-5) - twice(1 + 1e-5)) / 2e-5
    assert float(quick.values[0, 1]) == pytest.approx(slope, rel=1e-5)


def test_controls_stay_among_layers_of_the_same_sizes() -> None:
    torch.manual_seed(0)
    model = nn.Transformer(12, 4, 1, 1, 16, batch_first=True).double().eval()
    source, target = torch.randn(1, 5, 12).double(), torch.randn(1, 8, 12).double()
    single = edits.ablate("decoder.layers.0.multihead_attn", 1, queries=7)  # the encoder has 5 positions
    found = regard.effect(lambda: model(source, target), model, single, metrics.moved(7))
    assert found.value > 0
    assert len(found.controls) == 3
