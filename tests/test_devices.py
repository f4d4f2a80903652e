"""Launches of Triton kernels are found again by what Triton compiles for; a stand-in kernel counts its looks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from regard import devices


class Kernel:
    """Notes its launches through Triton, `looked`, and those of what was compiled, `ran`."""

    arg_names, constexprs = ("X", "Y", "n", "scale", "SIZE", "FLAG"), (4, 5)

    def __init__(self) -> None:
        self.looked: list[tuple[Any, ...]] = []
        self.ran: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        def run(*given: Any, **named: Any) -> Compiled:
            self.looked.append((grid, given, named))
            return Compiled(self)

        return run


class Compiled:
    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return lambda *given: self.kernel.ran.append((grid, given))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(devices, "_LAUNCHED", {})
    return Kernel()


def launched(kernel: Kernel, x: torch.Tensor, n: int = 32, size: int = 8, warps: int = 4) -> bool:
    """Whether Triton looked at a launch."""
    before = len(kernel.looked)
    devices.launch(kernel, (2, 1, 1), (x, x), (n, 0.5), SIZE=size, FLAG=True, num_warps=warps)
    return len(kernel.looked) > before


def test_the_second_launch_of_a_kind_does_without_triton(kernel: Kernel) -> None:
    x = torch.zeros(8)
    assert launched(kernel, x)
    assert not launched(kernel, x)
    ((grid, given),) = kernel.ran
    assert grid == (2, 1, 1)
    assert given == (x, x, 32, 0.5, 8, True)


@pytest.mark.parametrize("change", [{"n": 1}, {"n": 33}, {"n": 1 << 31}, {"size": 16}, {"warps": 8}], ids=str)
def test_what_triton_compiles_for_is_told_apart(change: dict[str, int], kernel: Kernel) -> None:
    x = torch.zeros(8)
    assert launched(kernel, x)
    assert launched(kernel, x, **change)
    assert not launched(kernel, x, n=64)  # as 32, a multiple of 16
    assert launched(kernel, x.half())
    assert not launched(kernel, x)


def test_tensors_that_begin_anywhere_go_through_triton(kernel: Kernel) -> None:
    x = torch.zeros(8)
    launched(kernel, x)
    assert launched(kernel, x[1:])
    assert launched(kernel, x[1:])
    assert not launched(kernel, x[4:])


def test_constants_come_in_the_order_of_the_arguments(kernel: Kernel) -> None:
    x = torch.zeros(8)
    with pytest.raises(AssertionError, match="FLAG"):
        devices.launch(kernel, (1, 1, 1), (x, x), (2, 0.5), FLAG=True, SIZE=8)
