"""Which calls carry on which: by sizes, by the keys, across batch rows, and for each thread by itself."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from regard.lens.assembly import RunTracker, StepLink, by_sizes, key_marks, matrix_marks, runs_of

B, H, D = 3, 2, 5


def keys(n: int, seed: int = 0) -> Tensor:
    """The first n keys of one sequence per batch row."""
    return torch.randn(B, H, 11, D, generator=torch.Generator().manual_seed(seed))[:, :, :n]


def told(
    runs: RunTracker, n: int, nq: int, k: Tensor, path: str = "attn", kind: str = "self", **given: Any
) -> StepLink:
    return runs.link(path, n, (B, H, nq, k.shape[2]), kind, key_marks(k, H), **given)


# ------------------------------------------------------------------------------------------------------------- by sizes


@pytest.mark.parametrize(
    ("kind", "sizes", "runs"),
    [
        ("self", [(5, 5), (1, 6), (1, 7)], [[0, 1, 2]]),
        ("self", [(5, 5), (2, 7), (1, 8)], [[0, 1, 2]]),  # several tokens at once
        ("self", [(5, 5), (5, 5)], [[0], [1]]),
        ("self", [(5, 5), (6, 6), (7, 7)], [[0], [1], [2]]),  # no cache
        ("self", [(1, 1), (1, 2), (1, 3)], [[0, 1, 2]]),
        ("self", [(1, 1), (1, 1)], [[0], [1]]),
        ("self", [(1, 6), (1, 7)], [[0, 1]]),  # from the middle
        ("self", [(5, 5), (1, 3), (1, 3), (1, 3)], [[0, 1, 2, 3]]),  # a cache of the latest 3
        ("self", [(2, 2), (1, 3), (1, 3), (1, 3)], [[0, 1, 2, 3]]),
        ("self", [(5, 5), (1, 8)], [[0], [1]]),  # three keys from nowhere
        ("cross", [(1, 7), (1, 7), (1, 7)], [[0, 1, 2]]),
        ("cross", [(4, 7), (1, 7)], [[0, 1]]),
        ("cross", [(4, 7), (4, 7)], [[0], [1]]),
        ("cross", [(1, 7), (1, 8)], [[0], [1]]),
        ("cross", [(1, 1), (1, 1)], [[0], [1]]),
    ],
)
def test_sizes_say_what_may_be(kind: str, sizes: list[tuple[int, int]], runs: list[list[int]]) -> None:
    assert runs_of(by_sizes([(B, H, *size) for size in sizes], kind)) == runs


def test_cache_of_fixed_size_fills_until_it_is_full_and_then_slides() -> None:
    runs = RunTracker()
    links = [runs.link("attn", n, (B, H, nq, 7), "self", offset=lambda: 0) for n, nq in enumerate((5, 1, 1, 1, 1))]
    assert [(k.after, k.first, k.known) for k in links] == [
        (None, 0, 0), (0, 0, 5), (1, 0, 6), (2, 1, 6), (3, 2, 6)
    ]  # fmt: skip


@pytest.mark.parametrize("other", [(B + 1, H, 1, 6), (B, H + 1, 1, 6)])
def test_another_batch_or_number_of_heads_is_another_run(other: tuple[int, int, int, int]) -> None:
    assert runs_of(by_sizes([(B, H, 5, 5), other], "self")) == [[0], [1]]


# -------------------------------------------------------------------------------------------------------------- by keys


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_mark_of_a_key_does_not_depend_on_how_it_lies_in_memory(dtype: torch.dtype) -> None:
    k = keys(7).to(dtype)
    turned = k.permute(2, 0, 3, 1).contiguous().permute(1, 3, 0, 2)
    assert torch.equal(key_marks(k, H), key_marks(turned, H))
    assert torch.equal(key_marks(k, H)[:, :4], key_marks(k[:, :, :4], H))
    matrices = matrix_marks(k.flatten(0, 1).mT)
    assert matrices is not None
    assert torch.equal(matrices.view(B, H, 7).sum(1), key_marks(k, H))


def test_mark_tells_the_smallest_difference() -> None:
    k = keys(7)
    other = k.clone()
    other[1, 0, 3, 2] = torch.nextafter(k[1, 0, 3, 2], torch.tensor(9.0))
    assert (key_marks(k, H) != key_marks(other, H)).nonzero().tolist() == [[1, 3]]


def test_integers_have_no_marks() -> None:
    assert matrix_marks(torch.zeros(2, 3, 4, dtype=torch.int64)) is None


def test_nan_is_known_again() -> None:
    k = keys(7)
    k[0, 0, 2, 1] = torch.nan
    runs = RunTracker()
    told(runs, 0, 5, k[:, :, :5])
    assert told(runs, 1, 1, k[:, :, :6]).after == 0


def test_other_keys_of_fitting_size_begin_a_run() -> None:
    runs = RunTracker()
    told(runs, 0, 5, keys(5))
    assert told(runs, 1, 1, keys(6, seed=1)) == StepLink(known=5)
    assert told(runs, 2, 1, keys(7, seed=1)) == StepLink(1, 0, 6)


def test_cache_of_fixed_size_is_known_by_what_was_written() -> None:
    runs, cache = RunTracker(), torch.zeros(B, H, 11, D)
    cache[:, :, :5] = keys(5)
    told(runs, 0, 5, cache, offset=lambda: 0)
    cache = cache.clone()
    cache[:, :, 5] = keys(6)[:, :, 5]
    assert told(runs, 1, 1, cache) == StepLink(0, 0, 5)
    cache = cache.clone()
    cache[:, :, 2] = 1.0
    assert told(runs, 2, 1, cache).after is None


def test_cache_of_the_latest_keys_says_where_they_begin() -> None:
    runs = RunTracker()
    told(runs, 0, 5, keys(5))
    assert told(runs, 1, 1, keys(6)[:, :, 3:]) == StepLink(0, 3, 2)
    assert told(runs, 2, 1, keys(7)[:, :, 4:]) == StepLink(1, 4, 2)
    assert told(runs, 3, 1, keys(7)[:, :, 4:]).after is None  # nothing moved on


def test_offset_is_asked_only_where_it_can_matter() -> None:
    def refuse() -> object:
        raise AssertionError("asked")

    runs = RunTracker()
    assert told(runs, 0, 5, keys(5), offset=refuse) == StepLink()
    assert told(runs, 1, 1, keys(6), offset=refuse) == StepLink(0, 0, 5)
    assert told(runs, 2, 1, keys(4, seed=1), offset=lambda: None) == StepLink(known=3)
    assert told(runs, 3, 1, keys(4, seed=2), offset=lambda: torch.zeros(B)) == StepLink(known=3)


# ---------------------------------------------------------------------------------------- batch rows that change places


def moved(runs: RunTracker, rows: list[int], first: str = "attn") -> StepLink:
    """A prompt of three batch rows, and a step in which each carries on another."""
    k = keys(6)
    told(runs, 0, 5, k[:, :, :5], first)
    step = torch.cat([k[rows][:, :, :5], keys(6, seed=1)[:, :, 5:]], 2)
    return told(runs, 1, 1, step, first)


@pytest.mark.parametrize("rows", [[1, 0, 2], [0, 0, 0], [2, 2, 1]])
def test_beams_are_found_where_they_were(rows: list[int]) -> None:
    runs = RunTracker()
    link = moved(runs, rows)
    runs.close()
    assert link == StepLink(0, 0, 5, tuple(rows))


def test_rows_in_place_are_not_said_to_have_moved() -> None:
    runs = RunTracker()
    link = moved(runs, [0, 1, 2])
    runs.close()
    assert link == StepLink(0, 0, 5, None)


def test_row_that_was_nowhere_begins_a_run() -> None:
    runs, k = RunTracker(), keys(6)
    told(runs, 0, 5, k[:, :, :5])
    k = k.clone()
    k[2] = keys(6, seed=1)[0]
    assert told(runs, 1, 1, k).after is None


def test_rows_that_look_alike_in_one_layer_are_told_apart_by_the_next() -> None:
    """In the first layer equal tokens have equal keys, whatever came before them."""
    runs, alike, k = RunTracker(), keys(6)[:1].expand(B, -1, -1, -1), keys(6)
    for n, end in enumerate((5, 6)):
        rows = [0, 1, 2] if n == 0 else [0, 2, 1]
        links = [told(runs, n, 5 if n == 0 else 1, x[rows][:, :, :end], path) for path, x in (("a", alike), ("b", k))]
    runs.close()
    assert [link.rows for link in links] == [(0, 2, 1), (0, 2, 1)]


def test_cross_attention_learns_from_self_attention_where_its_rows_were() -> None:
    """All beams look at the same other sequence."""
    runs, memory = RunTracker(), keys(7)[:1].expand(B, -1, -1, -1)
    own = moved_with_cross(runs, memory, [1, 0, 2])
    assert [link.rows for link in own] == [(1, 0, 2), (1, 0, 2)]


def moved_with_cross(runs: RunTracker, memory: Tensor, rows: list[int]) -> list[StepLink]:
    k = keys(6)
    links = []
    for n, (nq, now) in enumerate(((1, k[:, :, :5]), (1, k[rows][:, :, :6]))):
        links = [told(runs, n, nq, now), told(runs, n, 1, memory, "cross", "cross")]
    runs.close()
    return links


def test_cross_attention_of_another_pass_over_the_same_memory_begins_a_run() -> None:
    """Self-attention has just begun one: two passes, not two steps."""
    runs, memory = RunTracker(), keys(7)
    for n in range(2):
        told(runs, n, 1, keys(1, seed=n))
        link = told(runs, n, 1, memory, "cross", "cross")
    assert link.after is None


def test_layers_that_contradict_each_other_begin_runs() -> None:
    runs, k, other = RunTracker(), keys(6), keys(6, seed=1)
    for n, end in enumerate((5, 6)):
        swapped = [0, 1, 2] if n == 0 else [1, 0, 2]
        links = [
            told(runs, n, 5 if n == 0 else 1, k[:, :, :end], "a"),
            told(runs, n, 5 if n == 0 else 1, other[swapped][:, :, :end], "b"),
        ]
    runs.close()
    assert [link.after for link in links] == [None, None]


# -------------------------------------------------------------------------------------------------------------- threads


def test_each_thread_has_runs_of_its_own() -> None:
    runs, found = RunTracker(), {}

    def generate(seed: int) -> None:
        found[seed] = [told(runs, n, 5 if n == 0 else 1, keys(5 + n, seed)).after for n in range(3)]

    threads = [threading.Thread(target=generate, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
        thread.join()
    assert found == {1: [None, 0, 1], 2: [None, 0, 1]}
