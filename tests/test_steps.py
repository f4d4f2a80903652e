"""`regard.steps`: every intermediate beside the formula written out in NumPy, and what is printed of it."""

import re

import numpy as np
import pytest
import torch

import regard
from regard import masks, op, positions
from regard.locale import catalogue

H, NQ, NK, D, DV = 3, 5, 11, 7, 13
NAMES = ("scores", "scaled", "capped", "biased", "masked", "weights", "output")

# "The cat sat", the source documents' example: one row per word.
X = np.array([[0.1, 0.2, 0.3, 0.4], [0.5, 0.6, 0.7, 0.8], [0.9, 1.0, 1.1, 1.2]])
WORDS = ["The", "cat", "sat"]


def arrays(*lead, nq=NQ, nk=NK, seed=0):
    random = np.random.default_rng(seed)
    return tuple(random.standard_normal((*lead, n, d)) for n, d in ((nq, D), (nk, D), (nk, DV)))


def projections(width=4, seed=0):
    random = np.random.default_rng(seed)
    return {name: random.standard_normal((4, width)) for name in ("w_q", "w_k", "w_v")}


def softmax(scores):
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def close(a, b):
    np.testing.assert_allclose(a, b, rtol=1e-13, atol=1e-15)


# ---------------------------------------------------------------------------------------------------------- the numbers


def test_the_cat_sat_by_hand():
    s = regard.steps(X, X, X, labels=WORDS)
    close(s.scores, [[0.30, 0.70, 1.10], [0.70, 1.74, 2.78], [1.10, 2.78, 4.46]])  # X·Xᵀ
    close(s.scaled, [[0.15, 0.35, 0.55], [0.35, 0.87, 1.39], [0.55, 1.39, 2.23]])  # divided by √4
    # e^0.15, e^0.35 and e^0.55 are 1.1618, 1.4191 and 1.7333, together 4.3142.
    assert s.weights[0].round(4).tolist() == [0.2693, 0.3289, 0.4018]
    # The words' rows lie 0.4 apart, so the first word's output is 0.1 + 0.4·(0.3289 + 2·0.4018) and 0.1 more each time.
    assert s.output[0].round(3).tolist() == [0.553, 0.653, 0.753, 0.853]


def test_steps_of_the_documents_sizes_have_the_documents_shapes():
    x = np.random.default_rng(0).standard_normal((4, 8))  # seq_len 4, d_model 8
    w = {name: np.random.default_rng(n).standard_normal((8, 4)) for n, name in enumerate(("w_q", "w_k", "w_v"))}
    s = regard.steps(x=x, **w)
    assert [a.shape for a in (s.q, s.k, s.v, s.scores, s.weights, s.output)] == [(4, 4)] * 6


def test_softmax_of_100_1_1_saturates_and_of_10_1_1_far_less():
    one = np.ones((1, 1))
    value = np.eye(3)
    large, small = (regard.steps(one, np.array([[top], [1.0], [1.0]]), value, scale=1.0) for top in (100.0, 10.0))
    assert large.scores.tolist() == [[100.0, 1.0, 1.0]]
    close(large.weights, [[1.0, np.exp(-99), np.exp(-99)]])
    close(small.weights, [np.array([1.0, np.exp(-9), np.exp(-9)]) / (1 + 2 * np.exp(-9))])
    # What saturation costs is the slope w·(1 − w) that training needs: nothing is left of one, 2.5e-4 of the other.
    slope_large, slope_small = (float(s.weights[0, 0] * (1 - s.weights[0, 0])) for s in (large, small))
    assert slope_large == 0
    assert round(slope_small, 6) == 0.000247


def test_every_intermediate_is_its_formula():
    q, k, v = arrays(2, H)
    bias, mask = np.random.default_rng(1).standard_normal((H, NQ, NK)), np.random.default_rng(2).random((NQ, NK)) < 0.6
    mask[0] = False  # a row that sees nothing
    sinks = np.array([-1.0, 0.0, 2.0])
    s = regard.steps(q, k, v, mask=mask, bias=bias, scale=0.3, softcap=1.5, sinks=sinks)
    scores = q @ k.swapaxes(-1, -2)
    scaled = scores * 0.3
    capped = 1.5 * np.tanh(scaled / 1.5)
    biased = capped + bias
    masked = np.where(mask, biased, -np.inf)
    column = np.broadcast_to(sinks[:, None, None], (2, H, NQ, 1))
    weights = softmax(np.concatenate([masked, column], -1))[..., :-1]
    expected = dict(zip(NAMES, (scores, scaled, capped, biased, masked, weights, weights @ v), strict=True))
    for name in NAMES:
        close(getattr(s, name), expected[name])
    assert not s.weights[:, :, 0].any()


def test_steps_without_options_leave_the_scaled_scores_as_they_are():
    s = regard.steps(*arrays())
    close(s.scaled, s.scores / np.sqrt(D))
    assert all(np.array_equal(getattr(s, name), s.scaled) for name in ("capped", "biased", "masked"))
    close(s.weights, softmax(s.scaled))
    assert s.unchanged == {"capped", "biased", "masked"}


@pytest.mark.parametrize(
    "extra", [{}, {"mask": masks.causal()}, {"softcap": 2.0, "bias": positions.alibi(H), "sinks": np.ones(H)}], ids=str
)
def test_output_is_what_attention_returns(extra):
    q, k, v = arrays(2, H)
    assert np.array_equal(
        regard.steps(q, k, v, **extra).output, regard.attention(q, k, v, **extra, backend="reference")
    )


def test_grouped_heads_show_a_matrix_per_query_head():
    q, k, v = arrays(2, 6)
    s = regard.steps(q, k[:, :2], v[:, :2])
    assert s.weights.shape == (2, 6, NQ, NK)
    close(s.scores[1, 4], q[1, 4] @ k[1, 1].T)


@pytest.mark.parametrize("lead", [(), (2,), (2, 3), (2, 5, 3)])
def test_arrays_keep_the_leading_axes(lead):
    s = regard.steps(*arrays(*lead))
    assert s.masked.shape == (*lead, NQ, NK)
    assert s.output.shape == (*lead, NQ, DV)
    assert s.q.shape == (*lead, NQ, D)


# --------------------------------------------------------------------------------------------------------------- from x


def test_steps_from_x_project_first():
    w = projections()
    s = regard.steps(x=X, **w, mask=masks.causal())
    for name in ("q", "k", "v"):
        assert np.array_equal(getattr(s, name), X @ w[f"w_{name}"])
    assert np.array_equal(s.x, X)
    assert np.array_equal(s.output, regard.attention(s.q, s.k, s.v, mask=masks.causal(), backend="reference"))


def test_heads_are_the_columns_in_order():
    x, w = np.random.default_rng(1).standard_normal((2, 3, 4)), projections(6)
    s = regard.steps(x=x, **w, num_heads=2)
    assert s.weights.shape == (2, 2, 3, 3)
    for h in range(2):
        columns = slice(3 * h, 3 * h + 3)
        close(s.q[:, h], x @ w["w_q"][:, columns])
        close(s.output[:, h], softmax(s.scaled[:, h]) @ (x @ w["w_v"][:, columns]))


def test_heads_from_x_keep_the_leading_axes():
    x, w = np.random.default_rng(1).standard_normal((2, 5, 3, 4)), projections(6)
    assert regard.steps(x=x, **w).output.shape == (2, 5, 3, 6)
    assert regard.steps(x=x, **w, num_heads=2).output.shape == (2, 5, 2, 3, 3)


def test_values_may_have_another_width():
    w = projections(6) | {"w_v": np.ones((4, 10))}
    assert regard.steps(x=X, **w, num_heads=2).output.shape == (1, 2, 3, 5)


# ------------------------------------------------------------------------------------------------------ NumPy and torch


def test_torch_in_gives_torch_out_connected_for_autograd():
    q, k, v = (torch.from_numpy(x).requires_grad_() for x in arrays(2, H))
    s = regard.steps(q, k, v, mask=masks.causal())
    assert all(isinstance(getattr(s, name), torch.Tensor) for name in NAMES)
    grads = torch.autograd.grad(s.weights.square().sum(), (q, k))
    assert all(g.any() for g in grads)
    assert "weights = softmax(masked)" in str(s)


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 1, 3)])
def test_gradients_reach_every_step(lead):
    q, k, v = (torch.randn(*lead, n, d, dtype=torch.float64, requires_grad=True) for n, d in ((5, 7), (11, 7), (11, 3)))
    made = regard.steps(q, k, v, mask=masks.causal(), softcap=9.0)
    upstream = torch.randn_like(made.output)
    names = ("scores", "scaled", "capped", "biased", "masked", "weights")
    *_, by_weights = torch.autograd.grad(made.output, [getattr(made, n) for n in names], upstream, retain_graph=True)
    torch.testing.assert_close(by_weights, upstream @ v.mT)
    by_scores, by_masked = torch.autograd.grad(made.output, [made.scores, made.masked], upstream)
    inner = made.weights * (by_weights - (made.weights * by_weights).sum(-1, keepdim=True))
    torch.testing.assert_close(by_masked, inner)
    torch.testing.assert_close(by_scores, inner * (1 - (made.scaled / 9.0).tanh() ** 2) * 7**-0.5)


def test_half_precision_shows_scores_and_weights_in_fp32():
    q, k, v = (torch.from_numpy(x).bfloat16().requires_grad_() for x in arrays())
    s = regard.steps(q, k, v)
    assert s.output.dtype == torch.bfloat16
    assert {getattr(s, name).dtype for name in NAMES[:-1]} == {torch.float32}
    assert len(s.text()) > 0
    assert "<table>" in s._repr_html_()


def test_steps_from_x_in_torch():
    w = {name: torch.from_numpy(a) for name, a in projections().items()}
    ours, numpy = regard.steps(x=torch.from_numpy(X), **w), regard.steps(x=X, **projections())
    close(ours.output.numpy(), numpy.output)


# --------------------------------------------------------------------------------------------------------- the printing


def test_text_in_english():
    w = {name: np.eye(4) for name in ("w_q", "w_k", "w_v")}
    text = regard.steps(x=X, **w, labels=WORDS, mask=masks.causal()).text()
    assert text.startswith("Attention step by step: 3 queries, 3 keys, head size 4\n")
    rows = [re.split(r" {2,}", line) for line in text.splitlines()]
    assert ["step", "formula", "shape", "meaning"] in rows
    assert ["q", "x·W_Q", "(3, 4)", "what each token asks for"] in rows
    assert ["scaled", "scores / √4", "(3, 3)", "kept small, so that the softmax does not saturate"] in rows
    assert ["capped", "scaled", "(3, 3)", "unchanged: no softcap"] in rows
    assert ["biased", "scaled", "(3, 3)", "unchanged: no bias"] in rows
    assert ["masked", "scaled where causal()", "(3, 3)", "what must not be seen set to −∞"] in rows
    assert "\n\nscores = q·kᵀ\n\n" in text
    assert "\n\nmasked = scaled where causal()\n\n" in text
    assert "\n\ncapped = " not in text
    assert ["", "The", "cat", "sat"] in rows
    assert ["The", "0.15", "-inf", "-inf"] in rows
    assert ["The", "1", "0", "0"] in rows
    assert "unchanged: no mask" not in text


def test_queries_keys_and_values_are_printed():
    w = projections()
    s = regard.steps(x=X, **w, labels=WORDS)
    for text in (s.text(), s._repr_html_()):
        assert all(f"{value:.4g}" in text for a in (s.q, s.k, s.v) for value in a.flat)
    assert "\n\nx\n\n" in s.text()
    assert "\n\nk = x·W_K\n\n" in s.text()
    assert ["sat", *(f"{value:.4g}" for value in s.v[2])] in [re.split(r" {2,}", x) for x in s.text().splitlines()]
    given = regard.steps(s.q, s.k, s.v)
    assert {name: given.formulas[name] for name in "qkv"} == {"q": "q", "k": "k", "v": "v"}
    assert "\n\nv\n\n" in given.text()
    assert "W_V" not in given.text()


def test_rows_of_keys_and_values_have_the_keys_labels():
    q, k, v = arrays(nq=2, nk=3)
    text = regard.steps(q, k, v[..., :2], labels=["I", "see"], key_labels=["나는", "너를", "본다"]).text()
    assert text.count("\nsee  ") == 5  # a row of q, of three steps and of the output
    assert text.count("\n본다  ") == 2  # of k and of v


def test_matrix_of_a_grouped_head_is_the_one_that_it_reads():
    q, k, v = arrays(2, 6)
    s = regard.steps(q, k[:, :2], v[:, :2])
    assert np.array_equal(s.matrix("k", 1, 4), k[1, 1])
    assert np.array_equal(s.matrix("v", 1, 2), v[1, 0])
    assert f"{k[1, 1, 0, 0]:.4g}" in s.text(batch=1, head=4)
    with pytest.raises(IndexError, match=r"head 6.*6"):
        s.matrix("k", 0, 6)
    from_x = regard.steps(x=np.stack([X, X + 1]), **projections(6), num_heads=2)
    assert np.array_equal(from_x.matrix("x", 1, 1), X + 1)


def test_text_in_korean():
    s = regard.steps(X, X, X, labels=["그", "고양이", "앉았다"])
    text = s.text("ko")
    assert text.startswith("어텐션 단계별 보기: 쿼리 3개, 키 3개, 헤드 크기 4\n")
    rows = [re.split(r" {2,}", line) for line in text.splitlines()]
    assert ["단계", "식", "모양", "의미"] in rows
    assert ["masked", "scaled", "(3, 3)", "그대로: 마스크 없음"] in rows
    assert ["고양이", "0.7", "1.74", "2.78"] in rows
    assert not re.search(r"unchanged|queries|shown|no mask", text)


def test_every_step_has_a_meaning_in_both_languages():
    assert op.STEP_MEANINGS.keys() == {"x", "q", "k", "v", *NAMES}
    assert catalogue("ko").keys() >= set(op.STEP_MEANINGS.values())


def test_repr_is_the_english_text():
    s = regard.steps(X, X, X)
    assert repr(s) == str(s) == s.text()


def test_unknown_language_is_an_error():
    with pytest.raises(ValueError, match=r"lang.*'en'.*'ko'.*'fr'"):
        regard.steps(X, X, X).text("fr")


def test_formulas_name_what_was_given():
    s = regard.steps(X, X, X, scale=0.25, softcap=30.0, bias=positions.alibi(1), sinks=np.zeros(1))
    assert s.formulas["scaled"] == "scores · 0.25"
    assert s.formulas["capped"] == "30·tanh(scaled / 30)"
    assert s.formulas["biased"] == f"capped + {positions.alibi(1)!r}"
    assert s.formulas["weights"] == "softmax(biased), a sink joining each row"
    assert s.unchanged == {"masked"}


def test_rows_are_said_to_sum_to_1_only_where_they_do():
    claim = op.STEP_MEANINGS["weights"]
    assert claim in regard.steps(X, X, X).text()
    sunk = regard.steps(X, X, X, sinks=np.zeros(1))
    assert sunk.weights.sum(-1).max() < 0.94
    assert claim not in sunk.text()


# --------------------------------------------------------------------------------------------------------------- labels


def test_labels_name_keys_too_where_there_are_as_many():
    s = regard.steps(X, X, X, labels=WORDS)
    assert s.labels == s.key_labels == ("The", "cat", "sat")


def test_labels_do_not_name_keys_where_there_are_more():
    q, k, v = arrays(nq=3)
    s = regard.steps(q, k, v, labels=WORDS)
    assert s.key_labels is None
    header = ["", *(str(n) for n in range(NK))]
    assert header in [re.split(r" +", line) for line in s.text().splitlines()]


def test_key_labels_name_the_columns_of_the_weights_but_not_of_the_output():
    keys = [f"key{n}" for n in range(NK)]
    s = regard.steps(*arrays(nq=3), labels=WORDS, key_labels=keys)
    text = s.text()
    weights, output = text[text.index("weights = ") :].split("output = ")
    assert weights.splitlines()[2].split() == keys
    assert [line.split()[0] for line in weights.splitlines()[4:7]] == WORDS
    assert output.splitlines()[2].split() == [str(n) for n in range(12)]


def test_html_escapes_labels_and_formulas():
    s = regard.steps(X, X, X, labels=["<b>", "&", '"x"'], mask=np.tril(np.ones((3, 3), bool)))
    html = s._repr_html_()
    assert "<td>&lt;b&gt;</td>" in html
    assert '<th style="text-align:right">&lt;b&gt;</th>' in html
    assert "<td>&amp;</td>" in html
    assert "scaled where dense(&lt;3×3 booleans, 6 True&gt;)" in html
    assert html.count("<b>") == html.count("</b>") == 3 + len(NAMES) - len(s.unchanged)  # the names of the matrices


# ----------------------------------------------------------------------------------------- several matrices, large ones


def test_one_head_of_one_batch_row_is_printed_and_named():
    q, k, v = arrays(2, H)
    s = regard.steps(q, k, v)
    alone = regard.steps(q[1, 2], k[1, 2], v[1, 2])
    text = s.text(batch=1, head=2)
    assert "\n\nweights = softmax(scaled)   (shown: batch 1, head 2 of (2, 3))\n\n" in text
    assert "\n\nweights = softmax(scaled)   ((2, 3) 가운데 배치 1, 헤드 2)\n\n" in s.text("ko", batch=1, head=2)
    matrix = alone.text()[alone.text().index("weights = ") :].split("\n\n")[1]
    assert matrix in text
    assert matrix not in s.text()


def test_one_matrix_alone_is_not_numbered():
    assert "shown" not in regard.steps(X, X, X).text()
    assert "shown" not in regard.steps(*(X[None, None],) * 3).text()


@pytest.mark.parametrize("lead", [(), (2,), (2, 3), (2, 5, 3)])
def test_batches_and_heads_are_counted_as_the_axes_say(lead):
    array = np.random.default_rng(0).standard_normal((*lead, NQ, NK))
    heads = lead[-1] if len(lead) > 1 else 1
    flat = array.reshape(-1, heads, NQ, NK)
    for batch in range(flat.shape[0]):
        for head in range(heads):
            assert np.array_equal(op.pick(array, batch, head), flat[batch, head])


@pytest.mark.parametrize(
    ("which", "message"),
    [
        ({"batch": 2}, r"batch.*2"),
        ({"batch": -1}, r"batch.*-1.*2"),
        ({"head": 3}, r"head.*3"),
    ],
    ids=str,
)
def test_batch_or_head_out_of_range_is_an_error(which, message):
    with pytest.raises(IndexError, match=message):
        regard.steps(*arrays(2, H)).text(**which)


def test_more_than_twelve_rows_and_columns_are_cut_and_said_to_be():
    q, k, v = arrays(nq=17, nk=19)
    text = regard.steps(q, k, v).text()
    weights = text[text.index("weights = ") : text.index("\n\noutput = ")].splitlines()
    assert weights[2].split() == [str(n) for n in range(12)]
    assert [line.split()[0] for line in weights[4:]] == [*(str(n) for n in range(12)), "…"]
    assert weights[-1] == "… the first 12 shown"
    assert "… 앞의 12개만 표시" in regard.steps(q, k, v).text("ko")
    assert "the first 12 shown" in regard.steps(q, k, v)._repr_html_()


def test_twelve_rows_and_columns_are_shown_whole():
    q, k, v = arrays(nq=12, nk=12)
    assert "the first 12 shown" not in regard.steps(q, k, v[..., :12]).text()
    text = regard.steps(q, k, v).text()  # 13 columns of values
    assert text.count("the first 12 shown") == 2  # in v and in the output
    assert text.rindex("the first 12 shown") > text.index("output = ")


def test_steps_never_change_the_input():
    given = {"x": X.copy(), **projections()}
    before = {name: a.copy() for name, a in given.items()}
    str(regard.steps(**given, softcap=2.0, mask=masks.causal()))
    assert all(np.array_equal(given[name], a) for name, a in before.items())


# ---------------------------------------------------------------------------------------------------------- wrong calls

QKV = dict(zip("qkv", arrays(), strict=True))
FROM_X = {"x": X, **projections()}
TAKES = "q.*k.*v.*x.*w_q.*w_k.*w_v.*"

WRONG = {
    "both": (QKV | {"x": X}, ValueError, TAKES + "q.*k.*v.*x"),
    "neither": ({}, ValueError, TAKES),
    "q and k only": ({"q": X, "k": X}, ValueError, TAKES + "q.*k"),
    "x only": ({"x": X}, ValueError, TAKES + "x"),
    "w without x": (projections(), ValueError, TAKES + "w_q.*w_k.*w_v"),
    "heads with q": (
        QKV | {"num_heads": 3},
        ValueError,
        r"heads=.*w_q.*w_k.*w_v.*q.*k.*v.*heads",
    ),
    "w of other rows": (FROM_X | {"w_k": np.ones((3, 4))}, ValueError, r"w_k.*4"),
    "w of three axes": (FROM_X | {"w_v": np.ones((1, 4, 4))}, ValueError, r"w_v.*4"),
    "heads that do not divide": (FROM_X | {"num_heads": 3}, ValueError, r"w_q.*4.*3.*heads"),
    "no heads": (FROM_X | {"num_heads": 0}, ValueError, r"heads.*1.*0"),
    "heads as text": (FROM_X | {"num_heads": "2"}, TypeError, "heads"),
    "heads as a float": (FROM_X | {"num_heads": 2.0}, TypeError, "heads"),
    "w_k of another width": (FROM_X | {"w_k": np.ones((4, 6))}, ValueError, r"q.*4.*k.*6"),
    "x of one axis": (FROM_X | {"x": X[0]}, ValueError, r"x.*N.*d_model.*shape.*\(4,\)"),
    "x as a list": (FROM_X | {"x": X.tolist()}, TypeError, "NumPy"),
    "torch with NumPy": (
        FROM_X | {"x": torch.from_numpy(X)},
        TypeError,
        r"x.*w_q.*w_k.*w_v.*NumPy",
    ),
    "mixed precision in torch": (
        {name: torch.from_numpy(a) for name, a in FROM_X.items()} | {"w_q": torch.ones(4, 4)},
        TypeError,
        "dtype",
    ),
    "too few labels": (QKV | {"labels": ["a"]}, ValueError, r"labels.*1.*5"),
    "too many key labels": (QKV | {"key_labels": ["a"] * 12}, ValueError, r"key_labels.*12.*11"),
    "no queries": (QKV | {"q": QKV["q"][:0]}, ValueError, r"0.*11"),
    "no keys": (QKV | {"k": QKV["k"][:0], "v": QKV["v"][:0]}, ValueError, r"5.*0"),
    "no batch rows": ({n: a[None][:0] for n, a in QKV.items()}, ValueError, "0.*batch"),
    "a wrong mask": (QKV | {"mask": np.ones((NQ, NK))}, TypeError, "mask"),
    "a wrong scale": (QKV | {"scale": float("nan")}, ValueError, r"scale.*nan"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_call_is_refused_by_name(name):
    given, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        regard.steps(**given)


def test_steps_takes_no_dropout():
    # What is shown must be what the numbers say: a random draw of it would not be.
    with pytest.raises(TypeError, match="'dropout'"):
        regard.steps(X, X, X, dropout=0.1)
