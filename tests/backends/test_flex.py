"""FlexAttention's block masks and compiled kernels: what is listed, and which calls share a kernel.

That it computes what the others compute is in test_conformance.py; what it refuses, in test_backends.py.
"""

import pytest
import torch
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import BlockMask

import regard
from regard import backends, masks
from regard.backends import flex, short
from regard.backends.call import Call
from regard.masks import EMPTY, FULL, PARTIAL
from regard.masks import mask as rules
from regard.testing import assert_rule

CPU = torch.device("cpu")
B, H, NQ, NK, D = 2, 3, 37, 53, 5
TOKENS = torch.rand(B, NK, generator=torch.Generator().manual_seed(1)) < 0.3
LAYOUT = torch.rand(1, H, 11, 11, generator=torch.Generator().manual_seed(2)) < 0.4
MASKS = {
    "window": masks.window(9, 2),
    "window and tokens of each text": masks.window(9, 2) | masks.padding(TOKENS),
    "blocks of each head": masks.blocks(LAYOUT, 5),
    "both": masks.blocks(LAYOUT, 5) & masks.padding([31, 53]),
    "nothing": ~masks.prefix(NK),
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of 8 positions, so that a short text has several."""
    monkeypatch.setattr(flex, "BLOCK", 8)
    monkeypatch.setattr(rules, "_KEPT", {})


@pytest.fixture(autouse=True)
def fresh_compiler(monkeypatch):
    """No kernel known or compiled yet, and none of this test's left to another."""
    monkeypatch.setattr(flex, "_KNOWN", {})
    flex._compiled.cache_clear()
    torch._dynamo.reset()
    yield
    flex._compiled.cache_clear()
    torch._dynamo.reset()


@pytest.mark.parametrize("name", MASKS)
def test_block_mask_lists_the_tiles_by_row_as_they_are_classed(name):
    mask = MASKS[name]
    made, kinds = flex._block_mask(mask, NQ, NK, CPU), mask.tiles(NQ, NK, 8)
    assert made.shape == (*mask.leading, NQ, NK)
    for kind, counts, columns in (
        (PARTIAL, made.kv_num_blocks, made.kv_indices),
        (FULL, made.full_kv_num_blocks, made.full_kv_indices),
    ):
        for at in torch.cartesian_prod(*(torch.arange(n) for n in kinds.shape[:3])).tolist():
            row = tuple(at)
            assert columns[row][: counts[row]].tolist() == (kinds[row] == kind).nonzero().flatten().tolist()
    assert torch.equal(made.to_dense().bool(), kinds != EMPTY)


@pytest.mark.parametrize("name", MASKS)
def test_block_mask_lists_by_column_what_torch_would_make_of_its_rows(name):
    made = flex._block_mask(MASKS[name], NQ, NK, CPU)
    rows = (made.kv_num_blocks, made.kv_indices, made.full_kv_num_blocks, made.full_kv_indices)
    theirs = BlockMask.from_kv_blocks(*rows, BLOCK_SIZE=8, mask_mod=made.mask_mod, seq_lengths=(NQ, NK))
    for ours, their in zip(made.as_tuple()[:-1], theirs.as_tuple()[:-1], strict=True):
        if isinstance(their, torch.Tensor):
            assert ours.dtype == their.dtype
            assert torch.equal(ours, their)
            assert ours.is_contiguous()
        else:
            assert ours == their


# -------------------------------------------------------------------------------------------------- kernels are shared


def graphs_for(*calls):
    """How many graphs each of these masks, or masks and numbers of positions, compiles; all results are checked."""
    made = []
    for mask, n in calls:
        random = torch.Generator().manual_seed(n)
        q, k, v = (torch.randn(B, H, n, D, generator=random) for _ in range(3))
        before = counters["stats"]["unique_graphs"]
        out = regard.attention(q, k, v, mask=mask, backend="flex")
        made.append(counters["stats"]["unique_graphs"] - before)
        truth = regard.attention(*(x.double() for x in (q, k, v)), mask=mask, backend="reference")
        assert_rule(out, regard.attention(q, k, v, mask=mask, backend="reference"), truth)
    return made


def marked(seed, n=NK):
    return torch.rand(B, n, generator=torch.Generator().manual_seed(seed)) < 0.2


def test_text_with_other_global_tokens_and_padding_runs_through_the_same_kernel():
    texts = [(masks.window(9, 2) | masks.padding(marked(s))) & masks.padding(~marked(s + 7)) for s in range(3)]
    assert graphs_for(*((mask, NK) for mask in texts)) == [1, 0, 0]


def test_other_blocks_run_through_the_same_kernel():
    drawn = [masks.random_blocks(NK, 5, count=2, seed=s, num_heads=H) for s in range(3)]
    assert graphs_for(*((mask, NK) for mask in drawn)) == [1, 0, 0]


def test_window_of_another_width_gets_a_kernel_of_its_own():
    near, far = masks.window(9, 2), masks.window(3, 11)
    assert graphs_for((near, NK), (far, NK), (near, NK), (far, NK)) == [1, 1, 0, 0]


def test_marks_that_all_texts_share_are_read_differently_from_marks_of_each():
    each, shared = (masks.padding(marks) for marks in (marked(3), marked(3)[:1]))
    assert graphs_for((each, NK), (shared, NK), (each, NK)) == [1, 1, 0]


def test_further_lengths_share_one_kernel(monkeypatch):
    monkeypatch.setattr(flex, "OWN_KERNELS", 1)
    lengths = (NK, 59, 67, 73, 83)  # its own; then one that fits, one for all lengths, and no more
    texts = [(masks.window(9, 2) | masks.padding(marked(1, n)), n) for n in lengths]
    assert graphs_for(*texts) == [1, 1, 1, 0, 0]


def test_explain_says_that_the_first_call_compiles(monkeypatch):
    monkeypatch.setattr(Call, "device", torch.device("cuda"))
    monkeypatch.setattr(short, "_major", lambda device: 9)
    q = torch.zeros(1, 1, 600, 16)
    (said,) = [why for name, _, why in backends.explain(q, q, q, mask=masks.window(3, 0)).rows if name == "flex"]
    assert said == "FlexAttention, compiled at the first call (up to half a minute); blocks of 128, skips hidden blocks"
