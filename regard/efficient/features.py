"""Performer's feature map: φ(q)·φ(k) estimates e^(scale·q·k) without bias, from m random directions.

With x̃ = x·√scale and directions w_1 … w_m, each a standard Gaussian vector, orthogonal to the others of its block of D:

    φ_i(x) = e^(w_i·x̃ − |x̃|²/2) / √m            E[φ(q)·φ(k)] = e^(q̃·k̃)            (Choromanski et al. 2020, lemma 1)

Features stay logarithms here: e^(w·x̃) overflows long before attention does, and whoever sums them knows what to divide
by. This file does not know what is summed.

Axis letters: B batch, H heads, N positions, D head size, m features.
"""

from __future__ import annotations

from math import log
from typing import NamedTuple

import torch
from torch import Tensor

from regard.whole_numbers import check_whole

__all__ = ["LogFeatures", "chunk_on", "largest_product", "log_features", "orthogonal_features", "usual_count"]

CHUNK = 2048  # positions whose features exist at once, where nothing else is made of them


def chunk_on(device: torch.device) -> int:
    """Positions whose features are made and summed at once: what a core's cache holds, or what keeps a GPU busy.

    >>> chunk_on(torch.device("cpu"))
    128
    """
    return 128 if device.type == "cpu" else 4096


def orthogonal_features(count: int, width: int, *, seed: int) -> Tensor:
    """Random directions (count, width), fp64: Gaussian each, orthogonal in blocks of `width`.

    >>> w = orthogonal_features(3, 3, seed=0)
    >>> bool(((w @ w.T).fill_diagonal_(0).abs() < 1e-12).all())
    True

    count: how many features.  width: head size.  seed: the same directions on every machine and device, to rounding.
    Raises TypeError for a size or a seed that is no whole number, ValueError for a size below 1.
    """
    check_whole("features", count)
    check_whole("head size", width)
    check_whole("seed", seed, least=None)
    random = torch.Generator("cpu").manual_seed(seed)
    blocks = -(-count // width)
    q, r = torch.linalg.qr(_gaussian(blocks, width, width, random=random))
    # LAPACK's signs are not random: uncorrected, the first entry of each first direction would always be negative.
    q = q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
    lengths = _gaussian(count, width, random=random).norm(dim=-1, keepdim=True)
    directions: Tensor = q.transpose(-1, -2).reshape(-1, width)[:count] * lengths
    return directions


def _gaussian(*shape: int, random: torch.Generator) -> Tensor:
    # On the CPU by name: a model may be built where the default device is another, or "meta".
    return torch.randn(*shape, generator=random, dtype=torch.float64, device="cpu")


def usual_count(width: int) -> int:
    """The usual number of features for a head size: D·ln D, at least 1.

    >>> usual_count(64)
    266
    """
    return max(1, int(width * log(width)))


class LogFeatures(NamedTuple):
    """ln φ(x) = logs + shift, up to ln √m. They stay apart: for a query the shift cancels, and would only round."""

    logs: Tensor  # (B, H, N, m), in fp32 or wider
    shift: Tensor  # (B, H, N, 1)

    @property
    def together(self) -> Tensor:
        """logs + shift, (B, H, N, m)."""
        return self.logs + self.shift


def log_features(
    x: Tensor, directions: Tensor, scale: float, *, epsilon: float = 0.0, top: Tensor | None = None
) -> LogFeatures:
    """The logarithms of the features of queries or keys x (B, H, N, D), in fp32 or wider.

    >>> w = orthogonal_features(20_000, 2, seed=0)
    >>> q, k = torch.tensor([[[[0.5, 0.2]]]]), torch.tensor([[[[0.1, 0.9]]]])
    >>> estimate = (log_features(q, w, 1.0).together + log_features(k, w, 1.0).together).exp().mean()
    >>> torch.allclose(estimate, (q * k).sum().exp(), rtol=0.02)
    True

    directions: (m, D).  scale: of the scores, above 0.
    epsilon: added to every feature after it is divided by e^top, as performer-pytorch does (1e-4); the estimate is then
      biased. 0 for none.
    top: (B, H, N or 1, 1), the largest w·x̃; for queries by default each row's own.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    x, directions = x.to(wide) * scale**0.5, directions.to(wide)
    logs = x @ directions.T  # (B, H, N, m)
    shift = -0.5 * x.square().sum(-1, keepdim=True)  # (B, H, N, 1)
    if epsilon == 0:
        return LogFeatures(logs, shift)
    top = logs.detach().amax(-1, keepdim=True) if top is None else top
    least = torch.tensor(log(epsilon), dtype=wide, device=x.device)
    return LogFeatures(torch.logaddexp(logs + shift - top, least), top.expand_as(shift))


def largest_product(k: Tensor, directions: Tensor, scale: float, real: Tensor | None) -> Tensor:
    """The largest w·k̃ of all features and real keys of k (B, H, N, D), (B, H, 1, 1): what epsilon is relative to.

    >>> largest_product(torch.tensor([[[[2.0], [-5.0]]]]), torch.tensor([[1.0]]), 1.0, None).item()
    2.0

    real: (B or 1, N), True where a key counts, or None for all. 0 where none does.
    """
    wide, tops = torch.promote_types(k.dtype, torch.float32), []
    with torch.no_grad():
        for start in range(0, k.shape[-2], CHUNK):
            part = slice(start, start + CHUNK)
            logs = (k[:, :, part].to(wide) * scale**0.5) @ directions.to(wide).T
            if real is not None:
                logs = logs.masked_fill(~real[:, None, part, None], -torch.inf)
            tops.append(logs.amax((-1, -2), keepdim=True))
        top = torch.stack(tops).amax(0)
    return torch.where(top == -torch.inf, 0.0, top)
