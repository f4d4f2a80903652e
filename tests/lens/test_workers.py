"""A pass shared out among threads: the same numbers, torch's own settings untouched, and errors that come through."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import regard
from regard import masks
from regard.lens.measures import engines
from regard.lens.measures.measures import NAMES
from regard.testing import assert_rule

NUMBERS = ("lse", "entropy", "received", "max_logit", "effective", "map", "top_weight")


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    random = torch.Generator().manual_seed(3)
    return tuple(torch.randn(1, 5, 512, 16, generator=random).to(dtype) for _ in range(3))


def fresh_default() -> int:
    """With how many threads a new thread begins."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(torch.get_num_threads).result()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_change_the_results_by_rounding_at_most(two_threads, dtype, monkeypatch):
    q, k, v = inputs(dtype)
    mask = masks.causal()
    several = regard.look(q, k, v, mask=mask, measures=NAMES).held
    assert engines._threads_for((1, 5, 512, 512)) == 2
    monkeypatch.setattr(engines, "available", lambda: 1)
    alone = regard.look(q, k, v, mask=mask, measures=NAMES).held
    truth = regard.look(*(x.double() for x in (q, k, v)), mask=mask, measures=NAMES).held
    assert torch.equal(several["top_key"], alone["top_key"])
    for name in NUMBERS:
        assert_rule(several[name], alone[name], truth[name], what=name)


def test_a_pass_leaves_the_numbers_of_threads_as_they_were(two_threads):
    before = torch.get_num_threads(), fresh_default()
    regard.look(*inputs())
    assert (torch.get_num_threads(), fresh_default()) == before


def test_several_threads_may_look_at_once_and_within_inference_mode(two_threads):
    q, k, v = inputs()
    expected = regard.look(q, k, v).entropy

    def look() -> torch.Tensor:
        with torch.inference_mode():
            return regard.look(q, k, v).entropy

    with ThreadPoolExecutor(3) as pool:
        for found in [pool.submit(look) for _ in range(3)]:
            assert torch.equal(found.result(), expected)


def test_each_unit_is_worked_off_once_by_operations_on_one_core(two_threads):
    done: list[tuple[int, int]] = []
    engines.share_out(range(50), lambda: lambda n: done.append((n, torch.get_num_threads())), threads=3)
    assert sorted(done) == [(n, 1) for n in range(50)]


def test_an_error_stops_the_others_and_comes_through():
    done: list[int] = []

    def step(n: int) -> None:
        if n == 0:
            raise ZeroDivisionError("of unit 0")
        time.sleep(1e-3)
        done.append(n)

    with pytest.raises(ZeroDivisionError, match="of unit 0"):
        engines.share_out(range(10_000), lambda: step, threads=2)
    count = len(done)
    assert count < 10_000
    engines.share_out([1], lambda: step, threads=2)
    assert len(done) == count + 1


def test_a_pass_with_few_cells_or_too_few_heads_is_left_to_torch(monkeypatch):
    monkeypatch.setattr(engines, "available", lambda: 16)
    assert engines._threads_for((1, 12, 128, 128)) == 1
    assert engines._threads_for((1, 7, 4096, 4096)) == 1
    assert engines._threads_for((1, 8, 4096, 4096)) == 16


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # that it has several threads
def test_a_forked_process_has_threads_of_its_own():
    engines.share_out([1], lambda: lambda n: None, threads=2)
    child = os.fork()
    if child == 0:
        done: list[int] = []
        threading.Timer(20, os._exit, [3]).start()  # rather than for ever
        engines.share_out(range(5), lambda: done.append, threads=2)
        os._exit(0 if sorted(done) == list(range(5)) else 2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
