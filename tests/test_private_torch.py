"""Private functions of torch that regard uses: each is known here, and regard works without it."""

import ast
import ctypes
import importlib
from math import inf
from pathlib import Path

import pytest
import torch
from torch.autograd import forward_ad

import regard
from regard import devices, masks
from regard.checks import is_tracing, untraced
from regard.testing import assert_rule
from regard.training.loop import multiply

PACKAGE = Path(regard.__file__).parent

# Private names that are used as attributes → the test of what happens without them. All others go through getattr.
KNOWN = {
    "_C.DispatchKey": "an enumeration, used beside _C._dispatch_keys: tests/lens/test_taps.py",
    "_C._dynamo": "test_untraced_functions_stay_untraced",
    "_C._functorch": "tests/lens/test_taps.py",
    "ops.aten._scaled_dot_product_flash_attention_for_cpu": "test_sparse_calls_without_the_cpu_kernel",
    "ops.aten._scaled_dot_product_flash_attention_for_cpu_backward": "test_sparse_calls_without_the_cpu_kernel",
}


def private_names() -> set[str]:
    """Dotted names below `torch` that begin with an underscore somewhere, up to the first private part and the next."""
    names = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            parts, inner = [], node
            while isinstance(inner, ast.Attribute):
                parts.insert(0, inner.attr)
                inner = inner.value
            if isinstance(inner, ast.Name) and inner.id == "torch" and any(p.startswith("_") for p in parts):
                parts = [p for p in parts if not p.startswith("__")]
                first = next((n for n, p in enumerate(parts) if p.startswith("_")), None)
                if first is not None and parts != ["_C"]:
                    names.add(".".join(parts[: first + (2 if parts[first] == "_C" else 1)]))
    return names


def test_every_private_name_is_known():
    assert private_names() == KNOWN.keys()


def test_gradients_are_scaled_without_the_foreach_kernel(monkeypatch):
    tensors = [torch.arange(3.0), torch.ones(2, 2)]
    multiply(tensors, torch.tensor(2.0))
    monkeypatch.delattr(torch, "_foreach_mul_")
    multiply(tensors, torch.tensor(2.0))
    assert tensors[0].tolist() == [0, 4, 8]
    assert tensors[1].tolist() == [[4, 4], [4, 4]]


class Without:
    """A namespace of torch in which some names are missing."""

    def __init__(self, inner, *missing):
        self.inner, self.missing = inner, missing

    def __getattr__(self, name):
        if name in self.missing:
            raise AttributeError(name)
        return getattr(self.inner, name)


def test_driver_version_is_read_from_the_driver(monkeypatch):
    class Library:
        @staticmethod
        def cuDriverGetVersion(pointer):  # as the driver's header declares it
            pointer._obj.value = 12080
            return 0

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library)
    assert devices.driver_version() == 12080


def test_no_driver_is_version_0(monkeypatch):
    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert devices.driver_version() == 0


@pytest.mark.parametrize(("driver", "major", "expected"), [(12030, 9, True), (12020, 9, False), (13000, 8, False)])
def test_kernels_overlap_on_hopper_with_a_driver_that_captures_it(driver, major, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    monkeypatch.setattr(devices, "driver_version", lambda: driver)
    assert devices.overlapping.__wrapped__(torch.device("cuda", 0)) is expected


def test_untraced_functions_stay_untraced(monkeypatch, compiler):
    importlib.import_module("torch._dynamo")  # which needs what is taken away next
    monkeypatch.setattr(torch._C, "_dynamo", Without(torch._C._dynamo, "eval_frame"))
    asked = untraced("it asks for numbers")(lambda x: int(x.sum()))
    monkeypatch.undo()
    compiled = torch.compile(lambda x: x + asked(x * 2), backend="eager")
    assert compiled(torch.ones(3)).tolist() == [7.0, 7.0, 7.0]


def test_unknown_dispatch_modes_keep_nothing(monkeypatch):
    assert not is_tracing()
    monkeypatch.delattr(torch._C, "_len_torch_dispatch_stack")
    assert is_tracing()


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # torch's own, of its CPU kernel
def test_transforms_still_work(monkeypatch):
    monkeypatch.delattr(torch._C, "_are_functorch_transforms_active")
    q, k, v = (torch.randn(2, 3, 5, 7, dtype=torch.float64) for _ in range(3))
    together = torch.func.vmap(lambda *x: regard.attention(*x, mask=masks.causal()))(q, k, v)
    torch.testing.assert_close(together, regard.attention(q, k, v, mask=masks.causal()))


def test_forward_mode_still_works(monkeypatch):
    q, k, v, tangent = (torch.randn(1, 2, 5, 7, dtype=torch.float64) for _ in range(4))
    _, expected = torch.func.jvp(lambda q: regard.steps(q, k, v).output, (q,), (tangent,))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, tangent)
        monkeypatch.delattr(forward_ad, "_current_level")
        try:
            found = forward_ad.unpack_dual(regard.attention(dual, k, v, backend="reference"), level=0).tangent
        finally:
            monkeypatch.undo()
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("missing", ["choice", "kernel"])
@pytest.mark.parametrize("mask", [None, masks.causal(), masks.padding(torch.tensor([9, 4]))], ids=repr)
def test_lse_without_the_kernels_that_hand_it_over(missing, mask, monkeypatch):
    q, k, v = (torch.randn(2, 3, 11, 16) for _ in range(3))
    truth = regard.steps(q.double(), k.double(), v.double(), mask=mask)
    baseline = regard.steps(q, k, v, mask=mask)
    if missing == "choice":
        monkeypatch.delattr(torch, "_fused_sdp_choice")
    else:
        monkeypatch.setattr(torch.ops, "aten", Without(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu"))
    view = regard.look(q, k, v, mask=mask, backend="sdpa")
    assert_rule(view.output, baseline.output, truth.output)
    lse = [s.masked.logsumexp(-1) for s in (baseline, truth)]
    assert torch.equal(view.lse == -inf, lse[1] == -inf)
    assert_rule(view.lse, *lse)


def test_sparse_calls_without_the_cpu_kernel(monkeypatch):
    q, k, v = (torch.randn(1, 2, 300, 16, requires_grad=True) for _ in range(3))
    mask = masks.window(20, 0)
    expected = regard.attention(q, k, v, mask=mask, backend="sparse")
    gradients = torch.autograd.grad(expected.square().sum(), (q, k, v))
    kernels = [name for name in KNOWN if "for_cpu" in name]
    monkeypatch.setattr(torch.ops, "aten", Without(torch.ops.aten, *(name.split(".")[-1] for name in kernels)))
    found = regard.attention(q, k, v, mask=mask, backend="sparse")
    torch.testing.assert_close(found, expected)
    for ours, theirs in zip(torch.autograd.grad(found.square().sum(), (q, k, v)), gradients, strict=True):
        torch.testing.assert_close(ours, theirs)
