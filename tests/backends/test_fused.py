"""The forward pass with lse: the output of `regard.attention` to the bit, whichever backend makes it, and its lse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from dense_measures import assert_measures, truth_and_baseline
from torch import Tensor

import regard
from regard import backends, masks
from regard.backends import reference
from regard.backends.call import prepare
from regard.lens.measures import engines
from regard.testing import cases

NAMES = ("auto", *(name for name in backends.NAMES if name != "short"))  # which needs a GPU
SAMPLED = list(cases())[::23]


@pytest.mark.parametrize("backend", NAMES)
def test_output_is_that_of_attention_to_the_bit_and_lse_obeys_the_rule(backend):
    done = 0
    for case in SAMPLED[:: 5 if backend == "flex" else 1]:  # which is traced anew for each
        q, k, v, extra = case.build(torch.float32)
        call, truth, baseline = truth_and_baseline(case, torch.float32, 2)
        if backend != "auto" and backends.load(backend).unsupported_reason(call) is not None:
            continue
        output, lse = engines.forward(call, backend)
        assert torch.equal(output, regard.attention(q, k, v, **extra, backend=backend)), f"{case}"
        assert_measures({"lse": lse}, baseline, truth, f"{case}, {backend}")
        done += 1
    assert done > (5 if backend == "flex" else 15)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_have_an_lse_in_fp32_or_wider(dtype):
    for case in SAMPLED[::3]:
        q, k, v, extra = case.build(dtype)
        call, truth, baseline = truth_and_baseline(case, dtype, 2)
        output, lse = engines.forward(call)
        assert torch.equal(output, regard.attention(q, k, v, **extra))
        assert_measures({"lse": lse}, baseline, truth, f"{case}, {dtype}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", NAMES)
def test_half_precision_does_not_make_lse_rough(backend, dtype):
    # Enough keys for the vectors in which torch's kernel takes its quick exponential.
    q, k, v = (torch.randn(1, 2, 131, 16).to(dtype) for _ in range(3))
    truth, baseline = (
        {"lse": reference.stages(prepare(x, y, z)).lse} for x, y, z in ((q.double(), k.double(), v.double()), (q, k, v))
    )
    assert_measures({"lse": engines.forward(prepare(q, k, v), backend)[1]}, baseline, truth, f"{backend}, {dtype}")


def arrays(kind: str = "torch", **more: Any) -> tuple[Any, Any, Any]:
    q, k, v = torch.randn(2, 6, 7, 5), torch.randn(2, 3, 11, 5), torch.randn(2, 3, 11, 4)
    return (q.numpy(), k.numpy(), v.numpy()) if kind == "numpy" else (q, k, v)


@pytest.mark.parametrize("backend", NAMES)
def test_arrays_of_numpy_go_where_attention_takes_them(backend):
    q, k, v = arrays("numpy")
    output, lse = engines.forward(prepare(q, k, v, mask=masks.causal()), backend)
    expected = regard.attention(q, k, v, mask=masks.causal(), backend=backend)
    assert isinstance(output, Tensor)
    assert isinstance(lse, Tensor)
    assert np.array_equal(output.numpy(), expected)


def test_a_backend_that_cannot_says_so_as_attention_does():
    q, k, v = arrays()
    with pytest.raises(ValueError, match=r"'sdpa'.*SDPA.*softcap"):
        engines.forward(prepare(q, k, v, softcap=2.0), "sdpa")
    with pytest.raises(ValueError, match=r"'fast'.*reference.*tiled.*sdpa.*flex"):
        engines.forward(prepare(q, k, v), "fast")


@pytest.mark.parametrize("backend", ["auto", "reference", "tiled", "sdpa"])
def test_dropout_falls_as_in_attention_and_leaves_lse_alone(backend):
    q, k, v = arrays()
    torch.manual_seed(3)
    output, lse = engines.forward(prepare(q, k, v, dropout=0.4), backend)
    torch.manual_seed(3)
    assert torch.equal(output, regard.attention(q, k, v, dropout=0.4, backend=backend))
    whole = engines.forward(prepare(q, k, v), "reference")[1]
    assert torch.allclose(lse, whole, rtol=0, atol=4 * torch.finfo(torch.float32).eps * float(whole.abs().max()))


@pytest.mark.parametrize("backend", ["auto", "reference", "tiled", "sdpa"])
def test_gradients_are_those_of_attention_and_lse_has_none(backend):
    mask, bias = masks.causal(), torch.randn(6, 7, 11)
    towards = torch.randn(2, 6, 7, 4)

    def gradients(function: Any) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in (*tensors, bias)]
        function(*leaves).backward(towards)
        return [leaf.grad for leaf in leaves]

    tensors = arrays()
    ours = gradients(lambda q, k, v, b: _checked(*engines.forward(prepare(q, k, v, mask=mask, bias=b), backend)))
    theirs = gradients(lambda q, k, v, b: regard.attention(q, k, v, mask=mask, bias=b, backend=backend))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def _checked(output: Tensor, lse: Tensor) -> Tensor:
    assert output.requires_grad
    assert not lse.requires_grad
    return output


def test_autocast_does_not_reach_the_forward_pass():
    q, k, v = arrays()
    call = prepare(q, k, v, softcap=3.0)
    output, lse = engines.forward(call)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        again, lse_again = engines.forward(call)
    assert torch.equal(output, again)
    assert torch.equal(lse, lse_again)


def test_lse_costs_a_pass_of_its_own_only_where_the_kernel_keeps_it(monkeypatch):
    passes = []
    own = engines.lse_of
    monkeypatch.setattr(engines, "lse_of", lambda call: passes.append(call) or own(call))
    q, k, v = arrays()
    for extra in (
        {},
        {"mask": masks.causal()},
        {"mask": masks.window(2, 0)},
        {"softcap": 2.0},
        {"bias": torch.randn(7, 11)},
    ):
        engines.forward(prepare(q, k, v, **extra))
        assert not passes, extra
    engines.forward(prepare(q, k, v, dropout=0.5))  # torch's unfused path
    assert len(passes) == 1
    engines.forward(prepare(q.half(), k.half(), v.half()))  # too rough
    assert len(passes) == 2
