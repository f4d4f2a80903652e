"""Heads in numbers: which queries count, against sums written out."""

import pytest
import torch
from torch import Tensor

import regard
from regard.layouts import Layout
from regard.lens.files.saving import make_overview
from regard.lens.view import View
from regard.session import heads
from regard.session.heads import head_numbers

H, D = 3, 5
PADDED = Layout.windows(5, 7, size=(2, 2), window=(3, 3), shift=(1, 1))  # 35 patches in 6 windows of 9
REAL = torch.from_numpy(PADDED.kind == "patch")  # (W, N)
WINDOWS, N = PADDED.shape


def looked(batch: int = WINDOWS + 2) -> View:
    torch.manual_seed(0)
    return regard.look(*torch.randn(3, batch, H, N, D, dtype=torch.float64))


def rows_of(view: View) -> Tensor:
    """(W, H, N, N) the windows of the first batch entry."""
    return view.tile(slice(None), slice(None))[:WINDOWS]


def test_queries_that_are_padding_have_no_part_in_the_means():
    view, rows = looked(), rows_of(looked())
    found = head_numbers(view, WINDOWS, PADDED)
    entropy = -(rows * rows.log()).sum(-1).transpose(1, 2)[REAL]  # (35, H)
    effective = (1 / rows.square().sum(-1)).transpose(1, 2)[REAL]
    torch.testing.assert_close(found.entropy, entropy.mean(0).float())
    torch.testing.assert_close(found.effective, effective.mean(0).float())
    assert not torch.allclose(found.entropy, head_numbers(view, WINDOWS).entropy, rtol=1e-4)


def test_what_a_key_receives_is_of_the_queries_that_are_no_padding():
    rows = rows_of(looked())
    found = head_numbers(looked(), WINDOWS, PADDED)
    received = (rows * REAL[:, None, :, None]).sum(2).transpose(0, 1)  # (H, W, N)
    for head in range(H):
        best = int(received[head].argmax())
        assert found.keys[head] == (best, best)
        assert float(found.share[head]) == pytest.approx(float(received[head].max() / REAL[best // N].sum()), rel=1e-6)


def test_a_query_that_sees_nothing_has_no_part_either():
    q, k, v = torch.randn(3, 1, H, 7, D)
    hidden = torch.ones(7, 7, dtype=torch.bool)
    hidden[2] = False
    view = regard.look(q, k, v, mask=regard.masks.dense(hidden))
    found = head_numbers(view, 1, Layout.text(5) + Layout.of(["padding"] * 2))
    torch.testing.assert_close(found.entropy, view.entropy[0, :, [0, 1, 3, 4]].mean(-1))


def test_a_layout_without_padding_changes_nothing():
    view, layout = looked(), Layout.windows(6, 9, size=(2, 2), window=(3, 3), shift=(0, 0))
    told, plain = head_numbers(view, WINDOWS, layout), head_numbers(view, WINDOWS)
    assert all(torch.equal(getattr(told, name), getattr(plain, name)) for name in ("entropy", "effective", "share"))
    assert told.keys == plain.keys


def test_a_large_call_keeps_what_was_measured_of_keys(monkeypatch):
    view = looked()
    monkeypatch.setattr(heads, "LITTLE", 1)
    found = head_numbers(view, WINDOWS, PADDED)
    assert torch.equal(found.share, head_numbers(view, WINDOWS).share)
    torch.testing.assert_close(found.entropy, view.entropy[:WINDOWS].transpose(1, 2)[REAL].mean(0).float())


def test_an_overview_keeps_its_means():
    small = make_overview(regard.look(*torch.randn(3, 1, H, 131, D)))  # so long that it is pooled
    assert "entropy" in small.pooled
    told, plain = head_numbers(small, 1, Layout.text(100) + Layout.of(["padding"] * 31)), head_numbers(small)
    assert torch.equal(told.entropy, plain.entropy)
    assert torch.equal(told.share, plain.share)
