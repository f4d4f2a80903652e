"""Prepared launches: calls like an earlier one skip their checks, and are never answered with what was true before."""

import gc
import weakref

import numpy as np
import pytest
import torch

import regard
from regard import backends, masks
from regard.op import add_editor, observe, remove_editor, unobserve

B, H, N, D = 2, 3, 7, 5
MASKS = {
    "none": lambda: None,
    "causal": masks.causal,
    "window": lambda: masks.window(2, 1),
    "prefix": lambda: masks.prefix(3),
    "documents": lambda: masks.documents([0, 0, 0, 1, 1, 2, 2]),
    "padding": lambda: masks.padding([3, 5]),
    "tokens": lambda: masks.padding(torch.arange(N) < torch.tensor([[3], [6]])),
    "dense": lambda: masks.dense(torch.ones(N, N).tril() > 0),
    "documents and causal": lambda: masks.documents([0, 0, 0, 1, 1, 2, 2]) & masks.causal(),
    "rows that see nothing": lambda: masks.window(2, 0) & ~masks.queries([0, 4]),
    "booleans": lambda: torch.ones(N, N).tril() > 0,
    "booleans of heads": lambda: torch.ones(H, N, N).tril() > 0,
    "booleans of keys": lambda: (torch.arange(N) < 4).view(1, 1, 1, N),
    "booleans with an empty row": lambda: torch.ones(N, N).tril(-1) > 0,
}


def tensors(dtype=torch.float32, seed=0, k_heads=H, dv=D):
    random = torch.Generator().manual_seed(seed)
    shapes = (B, H, N, D), (B, k_heads, N, D), (B, k_heads, N, dv)
    return [torch.randn(shape, generator=random).to(dtype) for shape in shapes]


def checked(*qkv, **options):
    """The same call with its arguments checked: somebody observes."""
    note = lambda *_: None  # noqa: E731
    observe(note)
    try:
        return regard.attention(*qkv, **options)
    finally:
        unobserve(note)


@pytest.fixture
def prepared(monkeypatch):
    """The calls that were checked, in order."""
    calls = []
    prepare = regard.op.prepare
    monkeypatch.setattr("regard.op.prepare", lambda *args, **more: calls.append(args) or prepare(*args, **more))
    return calls


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(("k_heads", "dv"), [(H, D), (1, D), (H, 2 * D)])
def test_second_call_is_not_checked_and_has_the_same_bits(name, dtype, k_heads, dv, prepared):
    mask = MASKS[name]()
    read_each_time = isinstance(mask, torch.Tensor) and dv != D
    for seed in range(3):
        qkv = tensors(dtype, seed, k_heads, dv)
        assert torch.equal(regard.attention(*qkv, mask=mask), checked(*qkv, mask=mask))
    assert len(prepared) == (6 if read_each_time else 4)


@pytest.mark.parametrize("name", ["causal", "window", "prefix"])
def test_equal_masks_share_a_launch(name, prepared):
    for _ in range(3):
        regard.attention(*tensors(), mask=MASKS[name]())
    assert len(prepared) == 1


def test_unlike_masks_do_not_share_one():
    qkv = tensors()
    for mask in (masks.window(1, 0), masks.window(2, 0), masks.window(2, 0, offset=1), masks.prefix(2), None):
        for _ in range(2):
            assert torch.equal(regard.attention(*qkv, mask=mask), checked(*qkv, mask=mask))


@pytest.mark.parametrize(
    ("make", "write"),
    [
        (lambda: masks.documents([0, 0, 0, 1, 1, 2, 2]), lambda m: m.ids.fill_(1)),
        (lambda: masks.dense(torch.ones(N, N).tril() > 0), lambda m: m.cells.logical_not_()),
        (lambda: masks.padding(torch.ones(B, N) > 0), lambda m: m.tokens[:, 3:].fill_(False)),
        (lambda: masks.padding([6, 7]), lambda m: m.lengths.fill_(2)),
        (lambda: masks.documents([0, 0, 0, 1, 1, 2, 2]) & masks.causal(), lambda m: m.left.ids.fill_(1)),
    ],
    ids=["documents", "dense", "tokens", "lengths", "inside a combination"],
)
def test_mask_written_to_is_read_again(make, write):
    mask, qkv = make(), tensors()
    before = [regard.attention(*qkv, mask=mask) for _ in range(2)][1]
    write(mask)
    after = regard.attention(*qkv, mask=mask)
    assert not torch.equal(before, after)
    assert torch.equal(after, checked(*qkv, mask=mask))


def test_block_lists_of_a_mask_written_to_are_made_again():
    mask, qkv = masks.documents([0] * N), tensors()
    regard.attention(*qkv, mask=mask, backend="sparse")
    mask.ids[..., 3:] = 1
    ours = regard.attention(*qkv, mask=mask, backend="sparse")
    torch.testing.assert_close(ours, regard.attention(*qkv, mask=mask, backend="reference"))


def test_mask_made_in_inference_mode_counts_no_writes_and_is_read_each_time():
    qkv = tensors()
    with torch.inference_mode():
        mask = masks.padding(torch.ones(B, N) > 0)
        regard.attention(*qkv, mask=mask)
        mask.tokens[:, 3:] = False
        assert torch.equal(regard.attention(*qkv, mask=mask), checked(*qkv, mask=mask))


@pytest.mark.parametrize("kind", ["mask", "bias"])
def test_memory_shared_with_numpy_is_read_each_time(kind):
    shared = np.ones((N, N), bool) if kind == "mask" else np.zeros((N, N), np.float32)
    qkv, given = tensors(), torch.from_numpy(shared)
    for _ in range(2):
        before = regard.attention(*qkv, **{kind: given})
    shared[:, 4:] = 0 if kind == "mask" else -np.inf  # which torch does not see
    after = regard.attention(*qkv, **{kind: given})
    assert not torch.equal(before, after)
    assert torch.equal(after, checked(*qkv, **{kind: given}))
    shared[2] = 0 if kind == "mask" else -np.inf
    assert torch.equal(regard.attention(*qkv, **{kind: given})[:, :, 2], torch.zeros(B, H, D))


def test_mask_with_tensors_is_freed_with_its_launches():
    def use():
        mask = masks.documents([0, 0, 0, 1, 1, 2, 2])
        for dv in (D, 2 * D):
            regard.attention(*tensors(dv=dv), mask=mask)
        assert len(mask.kept) == 2
        return weakref.ref(mask.ids)

    gc.disable()  # freed at once, not when somebody collects
    try:
        assert use()() is None
    finally:
        gc.enable()


def test_new_mask_at_the_address_of_a_freed_one_is_read():
    qkv = tensors()
    for seed in range(50):
        random = torch.Generator().manual_seed(seed)
        mask = masks.dense((torch.rand(N, N, generator=random) < 0.5) | torch.eye(N, dtype=torch.bool))
        assert torch.equal(regard.attention(*qkv, mask=mask), checked(*qkv, mask=mask))
        del mask


def test_launches_are_bounded():
    masked = masks.documents([0] * N)
    for n in range(2 * backends.MOST_LAUNCHES):
        regard.attention(*tensors(), mask=masks.window(n, 0))
        regard.attention(*tensors(), mask=masked, scale=1.0 + n)
    assert len(backends._LAUNCHES) == len(masked.kept) == backends.MOST_LAUNCHES


def test_gradient_follows_the_second_call():
    mask = masks.window(2, 0)
    with torch.inference_mode():
        regard.attention(*tensors(), mask=mask)  # prepares what a later call differentiates with
    for _ in range(2):
        ours, theirs = ([x.requires_grad_() for x in tensors()] for _ in range(2))
        regard.attention(*ours, mask=mask).square().sum().backward()
        checked(*theirs, mask=mask).square().sum().backward()
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(ours, theirs, strict=True))
        with torch.no_grad():
            assert not regard.attention(*ours, mask=mask).requires_grad


def test_gradient_reaches_a_bias_in_the_second_call():
    for _ in range(2):
        bias = torch.zeros(N, N, requires_grad=True)
        regard.attention(*tensors(), bias=bias).square().sum().backward()
        assert bias.grad.abs().sum() > 0


def test_observers_and_editors_that_come_later_see_each_call():
    mask, qkv, seen = masks.window(2, 0), tensors(), []
    plain = regard.attention(*qkv, mask=mask)
    note, double = lambda call, name, out: seen.append((call.mask, name, out)), lambda call, out: (call, 2 * out)
    observe(note)
    add_editor(double)
    try:
        edited = regard.attention(*qkv, mask=mask)
    finally:
        unobserve(note)
        remove_editor(double)
    assert torch.equal(edited, 2 * plain)
    (saw,) = seen
    assert saw[:2] == (mask, "sdpa")
    assert torch.equal(saw[2], edited)
    assert torch.equal(regard.attention(*qkv, mask=mask), plain)
    assert len(seen) == 1


WRONG = [
    (lambda q, k, v, m: (q, k.double(), v), TypeError, "dtype"),
    (lambda q, k, v, m: (q.int(), k.int(), v.int()), TypeError, "floating"),
    (lambda q, k, v, m: (q, k[..., :3], v), ValueError, "head size"),
    (lambda q, k, v, m: (q, k, v[:, :, :4]), ValueError, "keys"),
    (lambda q, k, v, m: (q, k, v.to_sparse()), TypeError, "sparse"),
    (lambda q, k, v, m: (q, k.numpy(), v), TypeError, "ndarray|NumPy"),
    (lambda q, k, v, m: (q, k, v.to("meta")), ValueError, "meta"),
]


@pytest.mark.parametrize(("change", "error", "words"), WRONG, ids=[row[2] for row in WRONG])
def test_wrong_arguments_raise_after_a_right_call_and_again(change, error, words):
    mask, qkv = masks.padding([3, 5]), tensors()
    regard.attention(*qkv, mask=mask)
    for _ in range(2):
        with pytest.raises(error, match=words):
            regard.attention(*change(*qkv, mask), mask=mask)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"scale": True}, TypeError),
        ({"scale": float("nan")}, ValueError),
        ({"mask": masks.padding([3, 5, 2])}, ValueError),
        ({"mask": torch.ones(N, N)}, TypeError),
        ({"mask": torch.ones(N, N + 1) > 0}, ValueError),
        ({"bias": torch.ones(N, N) > 0}, TypeError),
        ({"backend": "fastest"}, ValueError),
        ({"dropout": 1.5}, ValueError),
    ],
    ids=str,
)
def test_wrong_options_raise_after_a_right_call_and_again(options, error):
    qkv = tensors()
    right = {"scale": 1.0, "mask": torch.ones(N, N) > 0, "bias": torch.ones(N, N)}
    for name in options:
        regard.attention(*qkv, **({name: right[name]} if name in right else {}))
    for _ in range(2):
        with pytest.raises(error):
            regard.attention(*qkv, **options)


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_transforms_of_torch_func_and_autocast_are_followed_after_a_plain_call():
    mask, (q, k, v) = masks.window(2, 0), tensors()
    plain = regard.attention(q, k, v, mask=mask)
    many = torch.func.vmap(lambda x: regard.attention(x, k, v, mask=mask))(torch.stack([q, q]))
    torch.testing.assert_close(many, torch.stack([plain, plain]))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(regard.attention(q, k, v, mask=mask), plain)


def test_compiles_into_one_graph_after_a_plain_call():
    torch._dynamo.reset()
    qkv, mask = tensors(), masks.documents([0, 0, 0, 1, 1, 2, 2])
    plain = regard.attention(*qkv, mask=mask)
    compiled = torch.compile(lambda *x: regard.attention(*x, mask=mask), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(*qkv), plain)
    torch._dynamo.reset()


def test_rule_from_elsewhere_that_is_no_key_is_checked_each_time(prepared):
    class Odd(masks.Mask):
        __hash__ = None

        def bind(self, nq, nk, device, dtype):
            return lambda b, h, i, j: j <= i

        def bounds(self, grid):
            raise NotImplementedError

        @property
        def leading(self):
            return 1, 1

    mask, qkv = Odd(), tensors()
    for _ in range(2):
        assert torch.equal(regard.attention(*qkv, mask=mask), regard.attention(*qkv, mask=masks.causal()))
    assert len(prepared) == 3
