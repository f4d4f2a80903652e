"""`regard.patterns`: the shares of a matrix of weights against plain sums, and against what `look` measures."""

import re

import numpy as np
import pytest
import torch

import regard
from regard.testing import assert_rule

H, N = 3, 7
NAMES = ["own", "previous", "next", "first", "neighbours", "uniform"]


def weights(*shape, causal=False):
    scores = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    if causal:
        scores = scores.masked_fill(~torch.ones(shape[-2:], dtype=torch.bool).tril(shape[-1] - shape[-2]), -torch.inf)
    return scores.softmax(-1)


def by_sums(matrix: np.ndarray, visible: np.ndarray) -> dict[str, float]:
    """Each share written out: the sum of the weights on the pattern's cells, over the number of queries."""
    n, m = matrix.shape
    i, j = np.arange(n)[:, None] + m - n, np.arange(m)
    near = (abs(i - j) <= 2) & (i != j)
    cells = {
        "own": i == j,
        "previous": i - 1 == j,
        "next": i + 1 == j,
        "first": (j == 0) & (i >= 0),
        "neighbours": near,
    }
    shares = {name: float((matrix * where).sum() / n) for name, where in cells.items()}
    pairs = zip(matrix, visible, strict=True)
    evenness = [-(p[p > 0] * np.log(p[p > 0])).sum() / np.log(count) for p, count in pairs if count > 1]
    return shares | {"uniform": float(np.mean(evenness)) if evenness else 0.0}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", [(N, N), (4, N)])
def test_shares_are_sums_of_weights(sizes, causal):
    matrix = weights(*sizes, causal=causal).numpy()
    found = regard.patterns(matrix, mask=regard.masks.causal() if causal else None)
    expected = by_sums(matrix, np.arange(sizes[1] - sizes[0], sizes[1]) + 1 if causal else np.full(sizes[0], sizes[1]))
    assert list(found.shares) == NAMES
    assert {name: round(share, 12) for name, share in found.shares.items()} == {
        name: round(expected[name], 12) for name in NAMES
    }


def test_four_patterns_of_the_documents_are_told_apart():
    near = (torch.eye(N).roll(1, 1) + torch.eye(N).roll(-1, 1)) / 2
    first = torch.zeros(N, N)
    first[:, 0] = 1
    found = regard.patterns(torch.stack([torch.eye(N), torch.full((N, N), 1 / N), first, near]))
    assert [names[0] for names in found.labels] == ["own", "uniform", "first", "neighbours"]
    assert found["own"].tolist() == pytest.approx([1, 1 / N, 1 / N, 0])


def test_shares_are_those_that_look_measures():
    q, k = (torch.randn(1, H, N, 5, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    shares = regard.look(q, k, k, mask=regard.masks.causal()).head_patterns().shares
    truth = regard.steps(q.double(), k.double(), k.double(), mask=regard.masks.causal()).weights[0]
    found, exact = (regard.patterns(x, mask=regard.masks.causal()) for x in (truth.float(), truth))
    assert list(found.shares) == list(shares)
    for name in NAMES:
        assert_rule(found[name], shares[name][0], exact[name])


def test_array_in_gives_arrays_out():
    heads = weights(H, N, N)
    assert isinstance(regard.patterns(heads.numpy())["own"], np.ndarray)
    assert regard.patterns(heads.bfloat16().float().softmax(-1).bfloat16())["own"].shape == (H,)
    assert isinstance(regard.patterns(heads[0])["own"], float)
    assert regard.patterns(heads.requires_grad_())["own"].requires_grad is False


def test_mask_may_be_booleans_for_each_head():
    visible = torch.ones(2, 4, 4, dtype=torch.bool)
    visible[1] = visible[1].tril()
    found = regard.patterns(visible / visible.sum(-1, keepdim=True), mask=visible)
    assert found["uniform"].tolist() == pytest.approx([1, 1])
    assert float(regard.patterns(visible[1] / visible[1].sum(-1, keepdim=True))["uniform"]) < 0.6


def test_cross_attention_has_only_patterns_without_positions():
    assert list(regard.patterns(weights(9, 4), kind="cross").shares) == ["first", "uniform"]


def test_rows_that_see_nothing_count_as_queries():
    matrix = torch.eye(4)
    matrix[3] = 0
    assert regard.patterns(matrix)["own"] == 0.75


def test_result_prints_as_a_table():
    rows = [re.split(r" {2,}", line) for line in str(regard.patterns(np.eye(3))).splitlines()]
    assert rows[0] == ["pattern", "share", "meaning"]
    assert ["own", "1.000", "looks at its own position"] in rows
    several = regard.patterns(weights(H, N, N))
    assert len(str(several).splitlines()) == 2 + H
    assert several._repr_html_().count("<tr>") == 1 + H
    korean = regard.patterns(np.eye(3)).text("ko") + several.text("ko")
    assert "자기 위치를 봄" in korean
    assert not re.search("[a-z]{3}", korean.replace("CLS", ""))
    with pytest.raises(ValueError, match=r"'fr'"):
        several.text("fr")


@pytest.mark.parametrize(
    ("given", "options", "error", "message"),
    [
        ([[1.0]], {}, TypeError, r"weights.*list"),
        (np.eye(3, dtype=int), {}, TypeError, r"weights.*int64"),
        (np.ones(3), {}, ValueError, r"weights.*\(3,\)"),
        (weights(2, 3, 5, 5), {}, ValueError, r"\(2, 3, 5, 5\).*weights\[b\]"),
        (np.ones((0, 3)), {}, ValueError, r"\(0, 3\)"),
        (np.array([[2.0, -1.0], [0.5, 0.5]]), {}, ValueError, r"row 0.*-1"),
        (np.full((2, 2), 0.25), {}, ValueError, r"row 0.*0\.5"),
        (weights(9, 4), {}, ValueError, r"9 × 4.*kind='cross'"),
        (np.eye(3), {"kind": "causal"}, ValueError, r"kind.*'causal'"),
        (weights(3, 3), {"mask": regard.masks.causal()}, ValueError, r"causal\(\)"),
        (np.eye(3), {"mask": np.ones((3, 4), bool)}, ValueError, r"mask.*\(3, 4\)"),
        (np.eye(3), {"mask": np.ones((3, 3))}, TypeError, r"mask.*float64"),
    ],
)
def test_what_is_no_matrix_of_weights_is_refused(given, options, error, message):
    with pytest.raises(error, match=message):
        regard.patterns(given, **options)
