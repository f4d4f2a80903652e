"""A capture comes back from its file with all it had, to the bit; an overview is small; what cannot fit is refused."""

import json
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import nn

import regard
from regard import masks, positions
from regard.lens.assembly import StepLink
from regard.lens.capture import Capture, Record
from regard.lens.files import container, records
from regard.lens.files.container import CaptureFileError
from regard.lens.files.records import _form_of
from regard.lens.files.saving import make_overview
from regard.lens.measures.measures import NAMES
from regard.lens.measures.weights import ComputedWeights, StoredWeights
from regard.lens.patterns import NAMES as PATTERNS
from regard.lens.view import PER_QUERY, KnownVisibility, View
from regard.lens.visibility import Facts, RowCount

B, H, HKV, NQ, NK, D = 2, 6, 3, 7, 11, 5
ALL = slice(None)
TOKENS = [["나는", "cat", ".", "cat", "을", "본다", "[SEP]", "a", "b", "a", "c"], list("abcabcabcab")]


class Attend(nn.Module):
    def __init__(self, **options: object) -> None:
        super().__init__()
        self.options = options

    def forward(self, q, k, v):
        return regard.attention(q, k, v, **self.options)


class ByHand(nn.Module):
    def forward(self, q, k, v):
        groups = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
        return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v


class Model(nn.Module):
    """Attention of every kind, on heads that were split off by turning axes."""

    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            shaw = positions.Shaw(D, 2).bias(torch.randn(B, H, NQ, D), 0.4)
        self.layers = nn.ModuleList(
            [
                Attend(),
                Attend(mask=masks.causal(), softcap=2.0, sinks=torch.randn(H)),
                Attend(mask=masks.window(3, 0) & masks.padding([NK, 6]), scale=0.3),
                Attend(mask=torch.rand(B, H, NQ, NK) < 0.6, bias=torch.randn(1, H, NQ, NK)),
                Attend(bias=positions.alibi(H)),
                Attend(bias=shaw),
                ByHand(),
            ]
        )

    def forward(self, q, k, v):
        for layer in self.layers:
            q = q + layer(q, k, v)
        return q


def inputs(nq: int = NQ, nk: int = NK, heads: int = H) -> list[torch.Tensor]:
    sizes = ((nq, heads), (nk, min(heads, HKV)), (nk, min(heads, HKV)))
    return [torch.randn(B, n, h, D).transpose(1, 2) for n, h in sizes]


def watched(model: nn.Module | None = None, **options: object) -> Capture:
    model = Model() if model is None else model
    with torch.no_grad(), regard.watch(model, tokens=TOKENS, **options) as seen:
        model(*inputs())
    return seen


def there_and_back(capture: Capture, folder: Path, **options: object) -> Capture:
    capture.save(folder / "run.regard", **options)
    return regard.open(folder / "run.regard")


def assert_equal(a: object, b: object, where: str = "capture") -> None:
    """Equal in everything, to the bit, and of one kind."""
    if isinstance(a, (ComputedWeights, StoredWeights)):
        assert isinstance(b, ComputedWeights) == isinstance(a, ComputedWeights), where
        assert torch.equal(a.tile(ALL, ALL), b.tile(ALL, ALL)), where
        return
    if isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), where
        assert torch.equal(a.cpu().nan_to_num(9e9), b.nan_to_num(9e9)) if a.is_floating_point() else torch.equal(a, b)
    elif is_dataclass(a):
        assert type(a) is type(b), where
        for field in fields(a):
            assert_equal(getattr(a, field.name), getattr(b, field.name), f"{where}.{field.name}")
    elif isinstance(a, Mapping):
        assert list(a) == list(b), where
        for key in a:
            assert_equal(a[key], b[key], f"{where}[{key!r}]")
    elif isinstance(a, list):
        assert len(a) == len(b), where
        for n, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_equal(x, y, f"{where}[{n}]")
    else:
        assert (type(a), a) == (type(b), b), where


def assert_same_capture(a: Capture, b: Capture) -> None:
    for name in ("model", "tokens", "unseen", "records"):
        assert_equal(getattr(a, name), getattr(b, name), name)


# ----------------------------------------------------------------------------------------------------------- round trip


@pytest.mark.parametrize("keep", [None, "qk", ["qk", "output"]], ids=str)
def test_everything_of_a_capture_comes_back(tmp_path, keep):
    seen = watched(keep=keep, measures=[*NAMES, "patterns"], top=3)
    assert {record.source for record in seen.records} == {"regard", "softmax"}
    assert (seen.records[0].view.weights is None) == (keep is None)
    assert_same_capture(seen, there_and_back(seen, tmp_path))


def test_exact_weights_and_new_measures_are_the_same_to_the_bit(tmp_path):
    seen = watched(keep="qk")
    opened = there_and_back(seen, tmp_path)
    assert seen.names == opened.names
    for name in seen.names:
        a, b = seen[name], opened[name]
        for i in range(NQ):
            assert torch.equal(a.row(i), b.row(i))
        for j in range(NK):
            assert torch.equal(a.column(j), b.column(j))
        assert torch.equal(a.tile(range(1, 6, 2), [3, 0, 10]), b.tile(range(1, 6, 2), [3, 0, 10]))
        for size in (3, 5, 64):
            assert torch.equal(a.map(size), b.map(size))
        for k in (1, 4, 13):
            assert torch.equal(a.top(k).weight, b.top(k).weight)
            assert torch.equal(a.top(k).index, b.top(k).index)
        assert torch.equal(a.effective, b.effective)
        assert all(
            torch.equal(x[n], y[n]) for x, y in zip(a.score_patterns(), b.score_patterns(), strict=True) for n in x
        )
        assert str(a.check()) == str(b.check())


class Decoder(nn.Module):
    """Two layers that keep their keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Attend(mask=masks.causal()), Attend(mask=masks.window(3, 0))])
        self.cache = [inputs(0, 0, HKV)[1:] for _ in self.layers]

    def forward(self, q, k, v):
        for n, layer in enumerate(self.layers):
            self.cache[n] = [torch.cat(pair, 2) for pair in zip(self.cache[n], (k + n, v), strict=True)]
            q = layer(q, *self.cache[n])
        return q


def test_generation_comes_back_put_together(tmp_path):
    model = Decoder()
    with torch.no_grad(), regard.watch(model, keep="qk") as seen:
        for n in (5, 1, 1, 1):
            model(*inputs(n, n, HKV))
    opened = there_and_back(seen, tmp_path)
    assert_same_capture(seen, opened)
    assert opened[1].sizes == (B, HKV, 8, 8)
    for i in range(8):
        assert torch.equal(seen[1].row(i), opened[1].row(i))
    assert torch.equal(seen[1].map(), opened[1].map())
    assert opened.summary() == seen.summary()
    assert str(opened.doctor()) == str(seen.doctor())
    with safe_open(tmp_path / "run.regard", "pt") as file:
        assert [name for name in file.keys() if name.endswith("/k")] == ["6/k", "7/k"]  # noqa: SIM118


def test_capture_with_nothing_in_it_comes_back(tmp_path):
    opened = there_and_back(Capture("Empty"), tmp_path)
    assert (opened.model, opened.records, opened.tokens, opened.unseen) == ("Empty", [], None, {})
    with pytest.raises(LookupError, match="Empty"):
        opened.summary()


def test_calls_that_could_not_be_read_and_reasons_come_back_in_order(tmp_path):
    capture = Capture("Odd", [["나"], ["b"]])
    trouble = "the kernel keeps its scores to itself"
    capture.records.append(Record("z.attn", 0, "cross", "flash_attn", "flash", compiled=True, trouble=trouble))
    capture.unseen |= {"z.attn": trouble, "a": "it did not run"}
    opened = there_and_back(capture, tmp_path)
    assert_same_capture(capture, opened)
    assert list(opened.unseen) == ["z.attn", "a"]


def test_facts_with_everything_come_back(tmp_path):
    facts = Facts(
        sizes=(B, H, NQ, NK),
        mask="causal, offset 3",
        unrestricted=False,
        causal="both",
        offset=3,
        bias_kind="large negative",
        bias_from=-1e9,
        empty_rows=RowCount(4, 2, (1, 0, 3)),
        unhidden_rows=RowCount(),
        sides=("left", None),
        bad={"v": (3, 0), "k": (1, 5)},
        softcap=30.0,
        bands=torch.randint(0, 256, (2, 1, 7, 11)).to(torch.uint8),
        padding=torch.rand(B, NK) < 0.5,
    )
    capture = Capture("M")
    capture.records.append(Record("attn", 0, "self", "sdpa", "flash", facts=facts))
    assert_same_capture(capture, there_and_back(capture, tmp_path))


def test_place_with_an_offset_per_row_comes_back(tmp_path):
    seen = watched()
    view = seen.records[0].view
    view.place = KnownVisibility(
        torch.ones(1, H, NQ, dtype=torch.int64), torch.rand(1, NK) < 0.5, torch.tensor([[2], [4]])
    )
    assert_same_capture(seen, there_and_back(seen, tmp_path))


def test_view_of_look_comes_back_as_numpy_with_its_axes(tmp_path):
    x = np.random.default_rng(0).normal(size=(3, 5))
    capture = Capture("look")
    capture.records.append(Record("", 0, "self", "regard", "tiled", view=regard.look(x, x, x, mask=masks.causal())))
    view, before = there_and_back(capture, tmp_path)[0], capture[0]
    for name in ("output", "lse", "entropy", "received"):
        np.testing.assert_array_equal(getattr(view, name), getattr(before, name))
    np.testing.assert_array_equal(view.row(2), before.row(2))
    assert isinstance(view.output, np.ndarray)
    assert view.place.visible.tolist() == [[[1, 2, 3]]]


def test_origin_says_which_file_versions_and_when(tmp_path):
    before = datetime.now(UTC).replace(microsecond=0)
    opened = there_and_back(watched(), tmp_path)
    assert opened.origin["path"] == str(tmp_path / "run.regard")
    assert (opened.origin["regard"], opened.origin["torch"]) == (regard.__version__, str(torch.__version__))
    assert before <= datetime.fromisoformat(opened.origin["written"]) <= datetime.now(UTC)
    assert watched().origin == {}


def test_opened_capture_can_be_saved_again_and_over_itself(tmp_path):
    seen = watched(keep="qk")
    path = tmp_path / "run.regard"
    seen.save(path)
    regard.open(path).save(path)
    assert_same_capture(seen, regard.open(path))


def test_opened_capture_does_not_need_its_file(tmp_path):
    seen = watched(keep="qk")
    opened = there_and_back(seen, tmp_path)
    (tmp_path / "run.regard").write_bytes(b"")
    assert_same_capture(seen, opened)


def test_records_without_gradient_are_left_as_they_were(tmp_path):
    seen = watched(keep="qk")
    before = [id(record.view) for record in seen.records]
    seen.save(tmp_path / "a.regard")
    seen.save(tmp_path / "b.regard", overview=True)
    assert [id(record.view) for record in seen.records] == before
    assert seen.records[0].view.weights is not None


def test_what_layers_share_is_written_once(tmp_path):
    cells = torch.rand(B, 1, NQ, NK) < 0.6
    model = nn.Sequential()
    model.layers = nn.ModuleList([Attend(mask=cells.clone()) for _ in range(3)])
    model.forward = lambda q, k, v: [layer(q, k, v) for layer in model.layers]
    watched(model, keep="qk").save(tmp_path / "run.regard")
    with safe_open(tmp_path / "run.regard", "pt") as file:
        names = [name.partition("/")[2] for name in file.keys()]  # noqa: SIM118
    assert [names.count(name) for name in ("q", "k", "mask", "visible", "lse", "map")] == [1] * 6


def test_keys_that_are_the_beginning_of_later_ones_are_written_once(tmp_path):
    q, k, v = (x.contiguous() for x in inputs(NK, NK, HKV))
    capture = Capture("generation")
    for n in range(3):
        view = regard.look(q[:, :, : n + 5], k[:, :, : n + 5], v[:, :, : n + 5], mask=masks.causal())
        capture.records.append(Record("attn", n, "self", "regard", "tiled", view=view))
    opened = there_and_back(capture, tmp_path)
    with safe_open(tmp_path / "run.regard", "pt") as file:
        assert [name for name in file.keys() if name.endswith(("/k", "/q"))] == ["2/k", "2/q"]  # noqa: SIM118
    for n in range(3):
        assert torch.equal(opened["attn", n].row(3), capture["attn", n].row(3))


@pytest.mark.gpu
def test_capture_on_a_gpu_is_opened_on_the_cpu(tmp_path):
    model = Attend(mask=masks.causal())
    with torch.no_grad(), regard.watch(model, keep="qk") as seen:
        model(*(x.cuda() for x in inputs()))
    opened = there_and_back(seen, tmp_path)
    for name, values in seen[0].held.items():
        assert torch.equal(opened[0].held[name], values.cpu())
    assert opened[0].row(3).device.type == "cpu"
    torch.testing.assert_close(opened[0].row(3), seen[0].row(3).cpu(), rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------------------------------------------------- overview


def long_view(n: int, heads: int, **more: torch.Tensor) -> View:
    """A view such as `watch` makes of n positions, without computing any."""
    held = {name: torch.rand(1, heads, n) for name in (*PER_QUERY, "received")}
    held["map"] = torch.rand(1, heads, 64, 64).softmax(-1)
    held |= {f"pattern {name}": torch.rand(1, heads) for name in PATTERNS}
    return View(
        (1, heads, n, n), held | more, place=KnownVisibility(torch.arange(1, n + 1).view(1, 1, n)), engine="triton"
    )


def long_capture(layers: int, heads: int, n: int) -> Capture:
    capture = Capture("LlamaForCausalLM", [["word"] * n])
    for layer in range(layers):
        facts = Facts(
            sizes=(1, heads, n, n),
            mask="causal",
            unrestricted=False,
            causal="flag",
            offset=0,
            bias_kind=None,
            bias_from=None,
            empty_rows=RowCount(),
            unhidden_rows=RowCount(),
            sides=(None,),
            bad={},
            softcap=None,
            bands=torch.full((1, 1, 32, 32), layer, dtype=torch.uint8),
            padding=torch.zeros(1, n, dtype=torch.bool),
        )
        numbers = {name: torch.rand(1, heads) for name in ("uniform", "first", "one key", "spread")}
        path = f"model.layers.{layer}.self_attn"
        kernel = "_scaled_dot_product_cudnn_attention"
        record = Record(path, 0, "self", "sdpa", kernel, view=long_view(n, heads), facts=facts, heads=numbers)
        capture.records.append(record)
    return capture


def test_overview_of_a_long_run_is_at_most_five_megabytes(tmp_path):
    n = 131_072
    capture = long_capture(layers=16, heads=32, n=64)
    for record in capture.records:  # a number per head and measure: all unlike, so that nothing is written once for two
        by_position = {name: torch.rand(1, 32, 1).expand(1, 32, n) for name in (*PER_QUERY, "received")}
        record.view = replace(
            long_view(64, 32), sizes=(1, 32, n, n), place=KnownVisibility(torch.ones(1, 1, n, dtype=torch.int64))
        )
        record.view.held |= by_position
        record.facts = replace(record.facts, sizes=(1, 32, n, n), padding=torch.rand(1, n) < 0.5)
    capture.tokens = [["word"] * n]
    capture.save(tmp_path / "run.regard", overview=True)
    assert (tmp_path / "run.regard").stat().st_size <= 5_000_000
    opened = regard.open(tmp_path / "run.regard")
    assert (len(opened), opened.tokens) == (16, None)
    view = opened[15]
    assert view.sizes == (1, 32, 131_072, 131_072)
    assert (view.place.visible, opened.records[15].facts.padding) == (None, None)
    assert "16 attention modules, 16 calls" in opened.summary()
    assert opened.doctor().calls == 16


def test_overview_pools_positions_and_says_so(tmp_path):
    capture = long_capture(layers=2, heads=3, n=197)
    whole = capture[1]
    view = there_and_back(capture, tmp_path, overview=True)[1]
    for name in (*PER_QUERY, "received"):
        edges = [i * 197 // 64 for i in range(65)]
        means = [whole.held[name][..., a:b].double().mean(-1) for a, b in pairwise(edges)]
        torch.testing.assert_close(getattr(view, name), torch.stack(means, -1).float(), rtol=1e-6, atol=0)
        assert view.how(name) == "pooled"
    assert set(view.pooled) == {*PER_QUERY, "received"}
    assert torch.equal(view.map(), whole.map().half().float())
    assert view.how("map") == "pooled"
    assert all(torch.equal(view.patterns()[name], whole.patterns()[name]) for name in PATTERNS)
    assert torch.equal(view.place.visible, whole.place.visible)


def test_overview_of_few_positions_is_exact(tmp_path):
    seen = watched(keep=["qk", "output"], measures=[*NAMES, "patterns"])
    opened = there_and_back(seen, tmp_path, overview=True)
    assert opened.tokens == TOKENS
    for a, b in zip(seen.records, opened.records, strict=True):
        held = {name: values for name, values in a.view.held.items() if not name.startswith("top_")}
        view = replace(a.view, held=held, weights=None, given_output=None, overview=True)
        assert_equal(replace(a, view=view), b)
        assert b.view.pooled == ()
        assert b.view.how("map") == b.view.how("entropy") == "exact"


def test_overview_file_says_that_it_is_one_and_how_to_save_a_whole_one(tmp_path):
    opened = there_and_back(watched(keep=["qk", "output"], top=3), tmp_path, overview=True)
    view = opened[0]
    for ask in (lambda: view.row(0), lambda: view.top(1), lambda: view.output):
        with pytest.raises(LookupError, match="overview=True") as raised:
            ask()
        assert "not kept" not in str(raised.value)
    assert "overview" in repr(view)
    again = there_and_back(opened, tmp_path)  # a copy of an overview is one, however it is saved
    with pytest.raises(LookupError, match="overview=True"):
        again[0].row(0)
    whole = there_and_back(watched(keep="qk"), tmp_path)
    assert whole[0].row(0).shape[-1] == whole[0].sizes[3]


def test_means_of_an_overview_leave_padding_out_as_before(tmp_path):
    capture = long_capture(layers=1, heads=3, n=197)
    view = capture.records[0].view
    padding = torch.zeros(1, 197, dtype=torch.bool)
    padding[:, :90] = True
    view.place = KnownVisibility(view.place.visible, padding)
    opened = there_and_back(capture, tmp_path, overview=True)
    for name in PER_QUERY:
        assert torch.equal(opened.atlas(name), capture.atlas(name))
    assert torch.equal(opened[0].held["mean entropy"], view.mean("entropy"))


def test_overview_of_an_overview_changes_nothing(tmp_path):
    capture = long_capture(layers=1, heads=3, n=197)
    once = there_and_back(capture, tmp_path, overview=True)
    assert_same_capture(once, there_and_back(once, tmp_path, overview=True))
    assert_same_capture(once, there_and_back(once, tmp_path))


def test_overview_of_a_generation_is_taken_call_by_call(tmp_path):
    capture = Capture("generation")
    views = [long_view(70, 2), replace(long_view(71, 2), sizes=(1, 2, 1, 71))]
    views[1].held = {"entropy": torch.rand(1, 2, 1), "received": torch.rand(1, 2, 71)}
    views[1].place = KnownVisibility(torch.tensor([[[71]]]))
    for n, view in enumerate(views):
        capture.records.append(Record("attn", n, "self", "sdpa", "flash", view=view))
    assert capture[0].sizes == (1, 2, 71, 71)
    opened = there_and_back(capture, tmp_path, overview=True)
    with pytest.raises(KeyError, match=r"2.*'attn'.*overview"):
        opened["attn"]
    assert opened["attn", 0].entropy.shape == (1, 2, 64)
    assert opened["attn", 1].entropy.shape == (1, 2, 1)
    assert torch.equal(opened.atlas("entropy"), torch.cat([v.mean("entropy") for v in views]))
    assert opened.row_names == ["attn, call 0", "attn, call 1"]


def test_overview_of_numpy_views_keeps_their_kind():
    x = np.random.default_rng(0).normal(size=(3, 70, 5))
    view = make_overview(regard.look(x, x, x))
    assert isinstance(view.entropy, np.ndarray)
    assert view.entropy.shape == (3, 64)


# -------------------------------------------------------------------------------------------------------------- refused


def test_mask_with_too_many_cells_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    seen = watched(keep="qk")
    monkeypatch.setattr(records, "MOST_CELLS", 10)
    with pytest.raises(ValueError, match=r"save\(path, overview=True\).*q.*k"):
        seen.save(tmp_path / "run.regard")
    assert list(tmp_path.iterdir()) == []
    seen.save(tmp_path / "run.regard", overview=True)


def test_too_many_calls_are_refused_with_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(container, "MAX_HEADER", 5000)
    with pytest.raises(ValueError, match=r"\d+,\d+.*bytes.*5,000"):
        watched().save(tmp_path / "run.regard")
    assert list(tmp_path.iterdir()) == []


def test_measure_that_is_not_ours_is_refused(tmp_path):
    seen = watched()
    seen.records[0].view.held["mood"] = torch.zeros(B, H)
    with pytest.raises(ValueError, match="'mood'"):
        seen.save(tmp_path / "run.regard")


def test_every_measure_and_pattern_has_a_form():
    held = watched(measures=[*NAMES, "patterns"]).records[0].view.held
    assert all(_form_of(name, (B, H, NQ, NK), 64, ()) for name in held)
    assert {"lse", "top_key", "map", "received", "pattern same token", "pattern delimiter"} <= held.keys()


def test_capture_that_could_not_be_opened_again_is_not_written(tmp_path):
    seen = watched()
    seen.records[3].view.held["entropy"] = torch.zeros(B, H, NQ + 1)
    message = r"'3/entropy'.*entropy.*3.*\(2, 6, 8\).*\(2, 6, 7\)"
    with pytest.raises(ValueError, match=message) as caught:
        seen.save(tmp_path / "run.regard")
    assert str(caught.value).endswith("(2, 6, 7)")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", ["missing/run.regard", "."])
def test_place_where_no_file_can_be_is_refused(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OSError, match="write"):
        watched().save(path)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"run\.regard"):
        regard.open(tmp_path / "run.regard")


def test_truncated_and_changed_files_are_refused(tmp_path):
    path = tmp_path / "run.regard"
    watched(keep="qk").save(path)
    content = path.read_bytes()
    for size in (0, 7, 100, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:size])
        with pytest.raises(CaptureFileError, match=f"'{path}'"):
            regard.open(path)
    for at in (3, 60, 200, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:at] + bytes([content[at] ^ 64]) + content[at + 1 :])
        with pytest.raises(CaptureFileError, match=f"'{path}'"):
            regard.open(path)


def test_newer_version_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "run.regard"
    monkeypatch.setattr(container, "VERSION", 2)
    watched().save(path)
    monkeypatch.undo()
    with pytest.raises(CaptureFileError, match=r"format.*2.*1"):
        regard.open(path)


# --------------------------------------------------------------------------------------------------------------- forged


@pytest.fixture(scope="module")
def genuine(tmp_path_factory) -> tuple[str, dict[str, torch.Tensor]]:
    """The header of a file, as text, and its tensors."""
    path = tmp_path_factory.mktemp("genuine") / "run.regard"
    watched(keep="qk", measures=[*NAMES, "patterns"]).save(path)
    with safe_open(path, "pt") as file:
        return file.metadata()["header"], {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


@pytest.fixture
def forged(genuine, tmp_path):
    """Make a file with right checksums whose header and tensors were changed."""

    def forged(change) -> Path:
        header, tensors = json.loads(genuine[0]), dict(genuine[1])
        change(header, header["records"], tensors)
        container.write(tmp_path / "run.regard", header, tensors)
        return tmp_path / "run.regard"

    return forged


def test_what_is_forged_below_was_right_before(forged):
    assert len(regard.open(forged(lambda header, records, tensors: None))) == 7


def held_at(record: dict, name: str) -> list:
    return next(pair for pair in record["view"]["held"] if pair[0] == name)


def setting(where: str, value: object):
    """Set header[…] by a path such as "records.0.view.sizes"."""

    def change(header, records, tensors):
        *steps, last = where.split(".")
        for step in steps:
            header = header[int(step) if step.isdigit() else step]
        header[int(last) if last.isdigit() else last] = value

    return change


def reshaping(name: str, tensor: torch.Tensor):
    def change(header, records, tensors):
        assert name in tensors
        tensors[name] = tensor

    return change


def measuring(name: str, tensor: torch.Tensor):
    """Put another tensor in the place of a measure of record 0."""

    def change(header, records, tensors):
        tensors["forged"] = tensor
        held_at(records[0], name)[1] = "forged"

    return change


FORGERIES = {
    "unknown key": (setting("mood", 1), "'mood'"),
    "missing key": (lambda h, r, t: h.pop("unseen"), "'unseen'"),
    "model no text": (setting("model", 3), r"model.*str.*int"),
    "tokens no words": (setting("tokens", [[1]]), "tokens"),
    "tokens no lists": (setting("tokens", ["word"]), "tokens"),
    "unseen no pairs": (setting("unseen", [["a"]]), "unseen"),
    "record no object": (setting("records.1", 7), r"1.*JSON.*int"),
    "record without kernel": (lambda h, r, t: r[0].pop("kernel"), r"0.*'kernel'"),
    "record with more": (setting("records.0.mood", 1), r"0.*'mood'"),
    "kind unknown": (setting("records.0.kind", "inner"), r"0.*kind.*'inner'"),
    "n no integer": (setting("records.0.n", True), r"0.*n.*int.*bool"),
    "heads no pairs": (setting("records.0.heads", ["first"]), r"0.*tensors"),
    "heads of another shape": (reshaping("6/heads/one key", torch.zeros(B, H + 1)), "'6/heads/one key'"),
    "view without map size": (lambda h, r, t: r[0]["view"].pop("size"), r"0.*'size'"),
    "sizes negative": (setting("records.0.view.sizes", [2, 6, 7, -1]), r"0.*sizes.*B.*H.*Nq.*Nk"),
    "sizes three": (setting("records.0.view.sizes", [2, 6, 7]), r"0.*sizes.*B.*H.*Nq.*Nk"),
    "sizes that disagree": (
        setting("records.0.facts.sizes", [2, 6, 7, 12]),
        "'padding'|view",
    ),
    "lead no sizes": (setting("records.0.view.lead", ["2"]), r"0.*\['2'\].*2.*6"),
    "pooled no names": (
        setting("records.0.view.pooled", [2]),
        r"0.*pooled.*\[2\]",
    ),
    "measure unknown": (setting("records.0.view.held.0.0", "mood"), r"0.*'mood'"),
    "measure laid out otherwise": (
        setting("records.0.view.held.1.1", {"name": "0/map", "order": [0]}),
        r"'0/map'.*0",
    ),
    "tensor missing": (setting("records.0.view.held.1.1", "0/moods"), r"0.*'0/moods'"),
    "link unknown": (setting("records.0.link", {"mood": 1}), r"0.*'mood'"),
    "link to a later call": (setting("records.0.link.after", 0), r"link.*0"),
    "link to other rows": (setting("records.0.link.rows", [0, 2]), r"link.*0"),
    "link to fewer rows": (setting("records.0.link.rows", [0]), r"link.*0"),
    "link before the start": (setting("records.0.link.first", -1), r"link.*0"),
    "tensor left over": (lambda h, r, t: t.update(more=torch.zeros(1)), r"'more'.*1"),
    "visible negative": (setting("records.0.view.visible", "0/map"), r"'0/map'.*visible.*0"),
    "offset text": (setting("records.0.view.offset", "0/map"), r"'0/map'.*offset.*0"),
    "facts unknown": (setting("records.0.facts.mood", 1), r"0.*'mood'"),
    "facts causal": (setting("records.0.facts.causal", "maybe"), r"0.*causal"),
    "facts sides": (setting("records.0.facts.sides", ["left"]), r"0.*sides"),
    "facts rows": (setting("records.0.facts.empty_rows", {"count": 1}), r"0.*empty_rows"),
    "facts rows with more": (
        setting("records.0.facts.empty_rows", {"count": 1, "tokens": 1, "example": None, "mood": 1}),
        r"0.*empty_rows",
    ),
    "facts example": (
        setting("records.0.facts.empty_rows", {"count": 1, "tokens": 1, "example": [1]}),
        r"0.*empty_rows",
    ),
    "facts bad": (setting("records.0.facts.bad", [["q", "many", 1]]), r"0.*bad"),
    "facts without bands": (setting("records.0.facts.tensors", {}), r"0.*bands"),
    "facts tensors": (setting("records.0.facts.tensors.mood", "0/map"), r"0.*'mood'"),
    # Once these opened, and what was asked for later raised AssertionError, RuntimeError or OverflowError.
    "lead of other heads": (setting("records.0.view.lead", []), r"0.*\[\].*2.*6"),
    "kind of view unknown": (setting("records.0.view.kind", "inner"), r"0.*'inner'"),
    "map of no size": (setting("records.0.view.links", 0), r"0.*'links'.*0"),
    "sizes of nobody": (setting("records.0.view.sizes", [1, 1, 1, 10**9]), r"0.*1000000000"),
    "offset beyond": (setting("records.0.view.offset", 10**30), r"0.*offset.*1000"),
    "links of no key": (
        measuring("top_key", torch.full((B, H, NQ, 8), NK)),
        rf"top_key.*0.*{NK}.*{NK}",
    ),
    "links without weights": (lambda h, r, t: r[0]["view"]["held"].remove(held_at(r[0], "top_weight")), "top_weight"),
    "weights with another k": (
        measuring("top_weight", torch.zeros(B, H, NQ, 5)),
        r"top_key.*top_weight.*top_tied",
    ),
    "visible beyond": (
        lambda h, r, t: (t.update(seen=torch.full((1, 1, NQ), NK + 1)), r[0]["view"].update(visible="seen")),
        rf"visible.*0.*{NK + 1}.*{NK + 1}.*0.*{NK}",
    ),
    "k of another dtype": (
        lambda h, r, t: (t.update(wide=t["0/q"].transpose(1, 2).double()), r[0]["view"]["weights"].update(q="wide")),
        r"q.*0.*torch.float64.*k.*torch.float32",
    ),
    "scale beyond": (setting("records.0.view.weights.scale", 10**400), r"0.*'scale'.*1000"),
    "softcap of 0": (setting("records.0.view.weights.softcap", 0), r"0.*'softcap'.*0"),
    "empty rows of none": (
        setting("records.0.facts.empty_rows", {"count": 3, "tokens": 1, "example": None}),
        r"0.*empty_rows",
    ),
    "example outside": (
        setting("records.0.facts.unhidden_rows", {"count": 1, "tokens": 1, "example": [0, H, 0]}),
        r"0.*unhidden_rows",
    ),
    "weights kind": (setting("records.0.view.weights.kind", "x"), r"0.*'x'"),
}


@pytest.mark.parametrize(("change", "message"), FORGERIES.values(), ids=FORGERIES.keys())
def test_forged_file_is_refused_and_says_what_is_wrong(forged, change, message):
    path = forged(change)
    with pytest.raises(CaptureFileError, match=message) as caught:
        regard.open(path)
    assert f"'{path}'" in str(caught.value)


SHAPES = {
    "lse": (B, H, NQ),
    "entropy": (B, H, NQ),
    "max_logit": (B, H, NQ),
    "effective": (B, H, NQ),
    "received": (B, H, NK),
    "map": (B, H, NQ, NK),
    "top_key": (B, H, NQ, 8),
    "top_weight": (B, H, NQ, 8),
    "top_tied": (B, H, NQ),
    "pattern own": (B, H),
}
DTYPES = {"top_key": torch.int64, "top_tied": torch.bool}


FREE = {("top_key", 3), ("top_weight", 3)}  # as many links as were asked for


@pytest.mark.parametrize(
    ("name", "axis"),
    [(name, axis) for name, shape in SHAPES.items() for axis in range(len(shape)) if (name, axis) not in FREE],
)
def test_measure_of_a_wrong_shape_is_refused_by_name(forged, name, axis):
    shape = list(SHAPES[name])
    shape[axis] += 1

    def change(header, records, tensors):
        tensors["forged"] = torch.zeros(shape, dtype=DTYPES.get(name, torch.float32))
        held_at(records[0], name)[1] = "forged"

    said = rf"'forged'.*{re.escape(str(name))}.*0.*{re.escape(str(tuple(shape)))}"
    with pytest.raises(CaptureFileError, match=said):
        regard.open(forged(change))


@pytest.mark.parametrize("name", SHAPES)
def test_measure_of_a_wrong_kind_is_refused_by_name(forged, name):
    def change(header, records, tensors):
        tensors["forged"] = torch.zeros(SHAPES[name], dtype=torch.float32 if name in DTYPES else torch.int64)
        held_at(records[0], name)[1] = "forged"

    with pytest.raises(CaptureFileError, match=rf"'forged'.*{name}.*0"):
        regard.open(forged(change))


@pytest.mark.parametrize("offset", [10**9, -(10**9)])
def test_mask_that_counts_from_far_away_is_saved(tmp_path, offset):
    class Far(torch.nn.Module):
        def forward(self, x):
            return regard.attention(x, x, x, mask=masks.causal(offset=offset))

    far, x = Far(), torch.ones(1, 1, 5, 4)
    with regard.watch(far, keep="qk") as seen:
        far(x)
    seen.save(tmp_path / "run.regard")
    assert torch.equal(regard.open(tmp_path / "run.regard")[0].row(2), seen[0].row(2))


def test_steps_after_a_call_that_could_not_be_read_are_put_together_and_saved(tmp_path):
    """Links count all calls of a module, those that could not be read among them."""
    keys = torch.ones(1, 1, 3, 4)
    views = [regard.look(keys[:, :, :2], keys[:, :, :2], keys[:, :, :2]), regard.look(keys[:, :, 2:], keys, keys)]
    capture = Capture("toy")
    capture.records.append(Record("attn", 0, "self", "sdpa", "sdpa", trouble="no kernel"))
    for n, view in enumerate(views, 1):
        link = StepLink(None if n == 1 else 1, known=0 if n == 1 else 2)
        capture.records.append(Record("attn", n, "self", "sdpa", "sdpa", view=view, link=link))
    capture.save(tmp_path / "run.regard")
    for one in (capture, regard.open(tmp_path / "run.regard")):
        assert one["attn"].sizes == (1, 1, 3, 3)
