"""The lens on long texts: a Longformer is watched in memory that grows with the text, and rows left empty are meant."""

import gc
from functools import cache

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LongformerConfig
from twins import Twin

import regard
from regard import growth, masks
from regard.lens.capture import Capture
from regard.models.families import roberta
from regard.models.family import Config

LENGTHS = (2048, 4096, 8192)
HEADS, SIZE, REACH = 3, 7, 32


@cache
def long_model(longest: int = max(LENGTHS), reach: int = REACH) -> torch.nn.Module:
    """A Longformer of two layers with random weights, that classifies: its first token is global."""
    values = {"model_type": "longformer", "vocab_size": 47, "num_hidden_layers": 2, "num_attention_heads": HEADS}
    values |= {
        "hidden_size": HEADS * SIZE,
        "intermediate_size": 29,
        "attention_window": 2 * reach,
        "hidden_act": "relu",
    }
    values |= {"max_position_embeddings": longest + 2, "type_vocab_size": 1}
    torch.manual_seed(31)
    return roberta.build_long(Config(values), "text-classification").eval()


def ids_of(n: int) -> Tensor:
    return torch.randint(3, 47, (1, n), generator=torch.Generator().manual_seed(n))


def watched(n: int) -> Capture:
    with torch.no_grad(), regard.watch(long_model(), measures=("received", "map", "top", "patterns"), top=8) as seen:
        long_model()(ids_of(n))
    return seen


# --------------------------------------------------------------------------------------------------------------- memory


def test_memory_of_watching_grows_with_the_text_and_not_its_square():
    watched(127)  # the first run makes what is kept for all
    peaks = []
    for n in LENGTHS[1:]:
        gc.collect()
        peaks.append(growth.peak_bytes(lambda: watched(n), torch.device("cpu")))  # noqa: B023
    assert peaks[1] <= 2.1 * peaks[0], peaks
    assert peaks[-1] < LENGTHS[-1] ** 2  # not a byte per cell, of any head


class Largest(TorchDispatchMode):
    """Remembers how many cells the largest memory has that any operation made; an expanded tensor has only its own."""

    cells = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        made = [x for x in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(x, Tensor)]
        self.cells = max([self.cells, *(x.untyped_storage().nbytes() // x.itemsize for x in made)])
        return out


def test_no_tensor_of_a_watched_run_has_a_cell_for_every_pair():
    n = LENGTHS[-1]
    with Largest() as made:
        seen = watched(n)
    assert len(seen) == 4
    assert made.cells <= n * n // 16
    with Largest() as made:
        torch.ones(n, 1) * torch.ones(n)
    assert made.cells == n * n  # the watch for N×N sees it


def test_capture_of_a_long_text_holds_numbers_per_token():
    seen = watched(LENGTHS[0])
    local, whole = seen[0], seen[1]
    assert local.sizes == (1, HEADS, LENGTHS[0], LENGTHS[0])
    assert whole.sizes == (1, HEADS, 1, LENGTHS[0])
    assert local.top(8).index.shape == (1, HEADS, LENGTHS[0], 8)
    assert max(x.numel() for view in seen for x in view.held.values()) == HEADS * LENGTHS[0] * 8
    assert seen.unseen == {}


# ------------------------------------------------------------------------------------------------------- exact weights


def dense_weights(layer: torch.nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """(1, H, N, N) weights of the local call and (1, H, 1, N) of the global token, from the layer's input."""
    n = x.shape[1]
    i, j = torch.arange(n)[:, None], torch.arange(n)
    local = (((i - j).abs() <= layer.reach) | (j == 0)) & (i > 0)
    whole = torch.ones(1, n, dtype=torch.bool)
    made = []
    width = HEADS * SIZE
    q, k, _ = layer.w_qkv(x).split(width, -1)
    whole_q, whole_k = layer.whole.w_q(x[:, :1]), layer.whole.w_kv(x)[..., :width]
    for asking, asked, seen in ((q, k, local), (whole_q, whole_k, whole)):
        q, k = (y.unflatten(-1, (HEADS, SIZE)).transpose(1, 2) for y in (asking, asked))
        scores = (q @ k.mT / SIZE**0.5).masked_fill(~seen, -torch.inf)
        made.append(scores.softmax(-1).nan_to_num(0.0))  # the global token's local row
    return made[0], made[1]


def test_watched_weights_of_many_tiles_are_the_dense_ones_with_zeros_elsewhere():
    """1,289 tokens are three stretches of 512 for the lens, and six of 256 for the backend."""
    n = 1289
    model = long_model(n, 61).double()
    with torch.no_grad(), regard.watch(model, keep="qk", measures=("received", "map", "top"), size=37) as seen:
        inputs = model(ids_of(n), output_hidden_states=True).hidden_states
    edges = torch.arange(38) * n // 37
    member = ((torch.arange(n) >= edges[:-1, None]) & (torch.arange(n) < edges[1:, None])).double()  # (cells, N)
    for layer, x in enumerate(inputs[:2]):
        with torch.no_grad():
            dense, whole = dense_weights(model.tower.depth[layer].attention, x)
        view, rows = seen[2 * layer], seen[2 * layer + 1]
        every = view.tile(slice(None), slice(None))
        torch.testing.assert_close(every, dense, rtol=0, atol=1e-13)
        assert torch.equal(every == 0, dense == 0)
        torch.testing.assert_close(rows.row(0), whole[:, :, 0], rtol=0, atol=1e-13)
        torch.testing.assert_close(view.received, dense.sum(2), rtol=0, atol=1e-12)
        best = view.top(8)
        torch.testing.assert_close(best.weight, dense.topk(8).values, rtol=0, atol=1e-13)
        found = dense.gather(-1, best.index.clamp(min=0))
        torch.testing.assert_close(best.weight, found.where(best.index >= 0, 0), rtol=0, atol=1e-13)
        assert bool((best.index[:, :, 0] == -1).all())  # the global token looks with others
        pooled = member @ dense @ member.T / member.sum(1, keepdim=True)
        torch.testing.assert_close(view.map(37), pooled, rtol=0, atol=1e-12)


# ------------------------------------------------------------------------------------------------------ what is healthy


SMALL = {"vocab_size": 47, "hidden_size": 20, "num_hidden_layers": 3, "num_attention_heads": 5, "intermediate_size": 29}
SMALL |= {"max_position_embeddings": 31, "attention_window": [4, 12, 6], "pad_token_id": 1}


@pytest.fixture(scope="module")
def small_model(tmp_path_factory) -> torch.nn.Module:
    """A random Longformer of transformers, opened by regard."""
    folder = tmp_path_factory.mktemp("longformer")
    twin = Twin("LongformerForSequenceClassification", LongformerConfig(**SMALL), folder)
    return twin.ours(torch.float32)


CHOSEN = torch.zeros(3, 17, dtype=torch.bool)
CHOSEN[0, [0, 5, 16]] = CHOSEN[1, 3] = True  # and none in the last text
TOKENS = torch.arange(17) < torch.tensor([[17], [11], [13]])


@pytest.mark.parametrize("mask", [None, TOKENS], ids=["whole", "padded"])
@pytest.mark.parametrize("chosen", [None, CHOSEN], ids=["first", "some"])
def test_empty_rows_of_global_tokens_are_no_error(small_model, mask, chosen):
    ids = torch.randint(3, 47, (3, 17), generator=torch.Generator().manual_seed(5))
    with torch.no_grad(), regard.watch(small_model) as seen:
        small_model(ids if mask is None else ids.where(mask, 1), mask, global_attention_mask=chosen)
    diagnosis = seen.doctor()
    assert diagnosis.ok, str(diagnosis)
    assert not {"empty rows", "nan born"} & {finding.code for finding in diagnosis.findings}
    assert all(use.facts.empty_rows.tokens == 0 for use in diagnosis.masks)
    assert diagnosis.masks[0].facts.empty_rows.count > 0
    assert "queries(" in diagnosis.masks[0].facts.mask


def test_empty_rows_are_excused_in_a_saved_capture_too(small_model, tmp_path):
    with torch.no_grad(), regard.watch(small_model, keep="qk") as seen:
        small_model(torch.full((1, 17), 3))
    seen.save(tmp_path / "run.regard")
    again = regard.open(tmp_path / "run.regard")
    assert again.doctor().ok
    assert again.doctor().masks[0].facts.empty_rows == seen.doctor().masks[0].facts.empty_rows
    assert torch.equal(again[0].tile(slice(None), slice(None)), seen[0].tile(slice(None), slice(None)))


class Blind(torch.nn.Module):
    """A layer whose mask leaves the first query nothing to see, though it looks; query 2 does not look."""

    def forward(self, x: Tensor) -> Tensor:
        return regard.attention(x, x, x, mask=masks.causal(offset=-1) & ~masks.queries([2]))


def test_row_that_looks_and_sees_nothing_is_an_error_beside_one_that_does_not_look():
    model = torch.nn.Sequential(Blind())
    with regard.watch(model) as seen:
        model(torch.randn(1, 3, 5, 7))
    diagnosis = seen.doctor()
    finding = next(finding for finding in diagnosis.findings if finding.code == "empty rows")
    assert not diagnosis.ok
    assert dict(finding.values) == {"tokens": 3, "total": 15, "example": (0, 0, 0)}
