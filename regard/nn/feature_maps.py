"""Random features and linear attention for the Performer."""

from __future__ import annotations

from math import inf, log
from typing import NamedTuple

import torch
from torch import Tensor

from regard.checks import check_int
from regard.nn.projections import KeyMask, read_key_mask

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
    check_int("features", count)
    check_int("head size", width)
    check_int("seed", seed, least=None)
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


# A row of a chunk is divided by what the whole chunk holds. Where that is more than e^30 times what the row sees, the
# chunk is halved. fp32 goes down to e^-87, so what is lost is below e^-57 of the row.
SAFE = 30.0


class FeatureSums(NamedTuple):
    """Sums over the keys so far."""

    top: Tensor  # (B, H, m), −∞ before any key; never differentiated
    mass: Tensor  # (B, H, m)
    values: Tensor  # (B, H, m, Dv)


class KernelOutput(NamedTuple):
    """What queries read: the outputs, and ln Σ_j e^(a·b_j) of each row, −∞ where it sees nothing."""

    output: Tensor  # (B, H, R, Dv)
    lse: Tensor  # (B, H, R)


def no_keys(batch: int, heads: int, features: int, width: int, like: Tensor) -> FeatureSums:
    """The sums over nothing.

    >>> no_keys(1, 2, 3, 5, torch.zeros(())).values.shape
    torch.Size([1, 2, 3, 5])

    width: of a value.  like: has the dtype and the device.
    """
    top = like.new_full((batch, heads, features), -torch.inf)
    return FeatureSums(top, like.new_zeros(batch, heads, features), like.new_zeros(batch, heads, features, width))


def add_keys(sums: FeatureSums, b: Tensor, v: Tensor) -> FeatureSums:
    """The sums with further keys.

    >>> sums = add_keys(no_keys(1, 1, 2, 1, torch.zeros(())), torch.zeros(1, 1, 3, 2), torch.ones(1, 1, 3, 1))
    >>> sums.mass.tolist()
    [[[3.0, 3.0]]]

    b: (B, H, n, m), −∞ for a key that does not count.  v: (B, H, n, Dv).
    """
    if b.shape[-2] == 0:
        return sums
    carried, features = _on_one_scale(sums, b, torch.maximum(sums.top, b.detach().amax(-2)))
    return _added(carried, features, v)


def read_rows(sums: FeatureSums, a: Tensor) -> KernelOutput:
    """What queries read from the sums.

    >>> sums = add_keys(no_keys(1, 1, 2, 1, torch.zeros(())), torch.zeros(1, 1, 3, 2), torch.full((1, 1, 3, 1), 7.0))
    >>> read_rows(sums, torch.zeros(1, 1, 1, 2)).output.item()
    7.0

    a: log-features (B, H, R, m). A row that sees nothing gives 0.
    """
    weights, peak = _weights(a, sums.top)
    return _divided(weights @ sums.values, (weights @ sums.mass.unsqueeze(-1)).squeeze(-1), peak)


def walk(sums: FeatureSums, a: Tensor, b: Tensor, v: Tensor) -> tuple[KernelOutput, FeatureSums]:
    """Queries and keys of a few positions in order: each query reads what is before it and its own; and the sums after.

    >>> zero = torch.zeros(1, 1, 2, 1)
    >>> rows, _ = walk(no_keys(1, 1, 1, 1, zero), zero.unsqueeze(2), zero, torch.tensor([2.0, 4.0]).view(1, 1, 2, 1))
    >>> rows.output.flatten().tolist()
    [2.0, 3.0]

    a: log-features of the queries (B, H, G, n, m), G query heads for each key head.
    b, v: of the keys, (B, H, n, m) and (B, H, n, Dv).
    """
    half, top = b.shape[-2] // 2, torch.maximum(sums.top, b.detach().amax(-2))
    if half and not _safe(sums, a, b, top):
        first, sums = walk(sums, a[..., :half, :], b[:, :, :half], v[:, :, :half])
        second, sums = walk(sums, a[..., half:, :], b[:, :, half:], v[:, :, half:])
        return _one_after_another(first, second, a.shape[2]), sums
    carried, features = _on_one_scale(sums, b, top)
    weights, peak = _weights(a.flatten(2, 3), top)  # (B, H, G·n, m)
    pairs = by_group(weights @ features.transpose(-1, -2), a.shape[2]).tril().flatten(2, 3)  # (B, H, G·n, n)
    mass = (weights @ carried.mass.unsqueeze(-1)).squeeze(-1) + pairs.sum(-1)
    return _divided(weights @ carried.values + pairs @ v, mass, peak), _added(carried, features, v)


def _safe(sums: FeatureSums, a: Tensor, b: Tensor, top: Tensor) -> bool:
    """Does no row see so little of what the chunk holds that its own part would vanish beside it?"""
    with torch.no_grad():
        first = torch.maximum(sums.top, b[:, :, 0])  # what every row sees at least
        if bool((top - first <= SAFE).all()):  # then no row's gap can be larger; this is cheap, what follows is not
            return True
        tops = torch.maximum(sums.top.unsqueeze(-2), b.cummax(-2).values).unsqueeze(2)  # (B, H, 1, n, m)
        own = (a + _finite(tops)).amax(-1)  # (B, H, G, n)
        gap = (a + _finite(top)[:, :, None, None]).amax(-1) - own
        blind = (tops == -torch.inf).all(-1)  # a row that sees nothing has nothing to lose
        return not bool((gap.masked_fill(blind, 0.0) > SAFE).any())


def _on_one_scale(sums: FeatureSums, b: Tensor, top: Tensor) -> tuple[FeatureSums, Tensor]:
    """The sums so far and the features of new keys (B, H, n, m), both divided by e^top."""
    base = _finite(top)
    factor = torch.exp(sums.top - base)  # (B, H, m); e^−∞ = 0 where there was nothing
    carried = FeatureSums(top, sums.mass * factor, sums.values * factor.unsqueeze(-1))
    return carried, torch.exp(b - base.unsqueeze(-2))


def _added(carried: FeatureSums, features: Tensor, v: Tensor) -> FeatureSums:
    values = carried.values + features.transpose(-1, -2) @ v
    return FeatureSums(carried.top, carried.mass + features.sum(-2), values)


def _weights(a: Tensor, top: Tensor) -> tuple[Tensor, Tensor]:
    """e^(a + top − the row's largest), (B, H, R, m), and the row's largest (B, H, R)."""
    a = a + _finite(top).unsqueeze(-2)
    peak = a.detach().amax(-1, keepdim=True)
    return torch.exp(a - peak), peak.squeeze(-1)


def _divided(values: Tensor, mass: Tensor, peak: Tensor) -> KernelOutput:
    some = mass > 0
    mass = torch.where(some, mass, 1.0)
    lse = torch.where(some, peak + mass.log(), -torch.inf)
    return KernelOutput(torch.where(some.unsqueeze(-1), values / mass.unsqueeze(-1), 0.0), lse)


def _one_after_another(first: KernelOutput, second: KernelOutput, groups: int) -> KernelOutput:
    """Join two runs of positions whose rows are (G·n): position follows position within each group."""
    pairs = zip(first, second, strict=True)
    return KernelOutput(*(torch.cat([by_group(x, groups) for x in both], 3).flatten(2, 3) for both in pairs))


def by_group(x: Tensor, groups: int) -> Tensor:
    """(B, H, G·n, …) → (B, H, G, n, …): the rows of each query head apart.

    >>> by_group(torch.zeros(1, 2, 6, 5), 3).shape
    torch.Size([1, 2, 3, 2, 5])
    """
    return x.reshape(*x.shape[:2], groups, -1, *x.shape[3:])


def _finite(top: Tensor) -> Tensor:
    return torch.where(top == -torch.inf, 0.0, top)


class PerformerState:
    """The sums over a decoder's positions so far, as `PerformerAttention` leaves and reads them.

    >>> import regard, torch
    >>> from regard.nn.performer import PerformerAttention, PerformerState
    >>> layer, state, x = PerformerAttention(6, 2), PerformerState(), torch.randn(1, 5, 6)
    >>> steps = [layer(x[:, i : i + 1], mask=regard.masks.causal(), cache=state) for i in range(5)]
    >>> torch.allclose(torch.cat(steps, 1), layer(x, mask=regard.masks.causal()), atol=1e-5)
    True
    """

    holds_padding = False  # a key that is hidden does not enter the sums

    def __init__(self) -> None:
        self._sums: FeatureSums | None = None
        self._drawn: _Drawn | None = None
        self._length = 0

    def __len__(self) -> int:
        return self._length

    @property
    def nbytes(self) -> int:
        """Bytes taken: by the sums, and by the copy of the directions."""
        kept = [] if self._drawn is None else [self._drawn.copy]
        return sum(t.nbytes for t in (*(self._sums or ()), *kept))

    def sums(self, batch: int, heads: int, width: int, directions: Tensor, like: Tensor) -> FeatureSums:
        """The sums so far: of nothing, in the first call.

        batch, heads, width: of the values that come next.  directions: what features are made with.
        like: has the dtype and the device.  Raises ValueError where they do not continue what is kept.
        """
        if self._sums is None or self._drawn is None:
            return no_keys(batch, heads, len(directions), width, like)
        kept = self._sums.values
        for name, old, new in (("batch", kept.shape[0], batch), ("heads", kept.shape[1], heads)):
            if old != new:
                raise ValueError(f"keys have {name} {new}, but the state has {old}")
        if kept.dtype != like.dtype or kept.device != like.device:
            raise ValueError(f"keys are {like.dtype} on {like.device}, but the state is {kept.dtype} on {kept.device}")
        if not self._drawn.same(directions):
            raise ValueError(
                "this state was summed with other features: after a redraw, or in another layer, begin with a new "
                "PerformerState"
            )
        return self._sums

    def store(self, sums: FeatureSums, count: int, directions: Tensor) -> None:
        """Keep the sums after `count` more positions, made with the directions that `sums` was asked for."""
        if self._drawn is None:
            self._drawn = _Drawn(directions)
        self._sums, self._length = sums, self._length + count

    def crop(self, length: int) -> None:
        """Forget everything (0), or nothing. Raises ValueError for anything between: a sum cannot be taken apart."""
        if length == 0:
            self._sums, self._drawn, self._length = None, None, 0
        elif length != self._length:
            raise ValueError(
                f"cannot keep the first {length} of {self._length} positions: they are summed, and a sum cannot be "
                "taken apart"
            )

    def keep(self, rows: Tensor) -> None:
        """Row i becomes the old row rows[i]: beams that branch, finished texts that leave."""
        if self._sums is not None:
            self._sums = FeatureSums(*(t[rows] for t in self._sums))

    def clear(self) -> None:
        """Forget everything."""
        self.crop(0)

    def __repr__(self) -> str:
        return f"PerformerState({self._length} positions, {self.nbytes} bytes)"


class _Drawn:
    """The directions that sums were made with, known again by their numbers.

    Numbers are compared where they may have changed: that waits for a GPU. In a decoder's step the tensor is the one it
    was, at the version it had, and nothing is compared. A compiled step cannot read versions, and trusts the tensor.
    """

    def __init__(self, directions: Tensor) -> None:
        self.copy = directions.detach().clone()  # (m, D)
        self._met: tuple[Tensor, int | None] | None = directions, _version(directions)

    def same(self, directions: Tensor) -> bool:
        """Are these the directions? They are then known at once the next time."""
        if self._met is not None and self._met[0] is directions:
            version = self._met[1]
            if torch.compiler.is_compiling() or (version is not None and version == _version(directions)):
                return True
        kept = self.copy
        if (kept.shape, kept.dtype, kept.device) != (directions.shape, directions.dtype, directions.device):
            return False
        equal = torch.equal(kept, directions)
        self._met = (directions, _version(directions)) if equal else None
        return equal

    def __getstate__(self) -> dict[str, object]:
        return {"copy": self.copy, "_met": None}  # another process, or a copy, meets another tensor


def _version(tensor: Tensor) -> int | None:
    """How often a tensor was changed in place; None where torch does not count, as for tensors of inference mode."""
    return None if torch.compiler.is_compiling() or tensor.is_inference() else tensor._version


STEP = 128  # positions of a causal chunk: their pairs are computed, 128·m each, beside m·D for the sums


def kernel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    directions: Tensor,
    *,
    mask: object = None,
    scale: float | None = None,
    epsilon: float = 0.0,
    state: PerformerState | None = None,
) -> KernelOutput:
    """Attention by random features: the outputs (B, H, Nq, Dv), and the estimate of each row's lse (B, H, Nq).

    >>> import regard
    >>> from regard.nn.feature_maps import orthogonal_features
    >>> q, k, v = (torch.randn(1, 2, 9, 4).clamp(-1, 1) for _ in range(3))
    >>> rows = kernel_attention(q, k, v, orthogonal_features(50_000, 4, seed=0))
    >>> torch.allclose(rows.output, regard.attention(q, k, v), atol=0.05)
    True

    q: (B, H, Nq, D).  k, v: (B, Hkv, Nk, D) and (B, Hkv, Nk, Dv).  directions: (m, D), as `orthogonal_features` draws.
    mask: masks.padding(…), masks.causal(), or both; over what the state holds as well.
    scale: of the scores, above 0; default 1/√D.
    epsilon: added to every feature, as performer-pytorch does with 1e-4; it biases the estimate. Default 0.
    state: earlier keys and values, which these continue; this call's are added to it.

    A row that sees nothing gives 0, with lse −∞ and gradient 0. Raises ValueError for sizes that do not fit, for
    another mask, for a scale that is not finite and positive, and for epsilon with a state: it is relative to the
    largest feature of the whole sequence, which a decoder does not know.
    """
    _check(q, k, v, directions, scale, epsilon, state)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    before = 0 if state is None else len(state)
    seen = read_key_mask(mask, len(q), q.shape[1], q.shape[2], before + k.shape[2], q.device)
    if seen.real is not None:
        seen = KeyMask(seen.real[:, before:], seen.causal)
    with torch.autocast(q.device.type, enabled=False):
        return _Estimate(q, k, v, directions, scale, epsilon, seen).run(state)


class _Estimate:
    """One call, its arguments checked; features are made chunk by chunk, and forgotten where no gradient needs them."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, directions: Tensor, scale: float, epsilon: float, seen: KeyMask
    ) -> None:
        self.dtype, self.wide = q.dtype, torch.promote_types(q.dtype, torch.float32)
        self.q = q.reshape(len(q), k.shape[1], q.shape[1] // k.shape[1], *q.shape[2:])  # (B, Hkv, G, Nq, D)
        self.k, self.v, self.seen = k, v.to(self.wide), seen
        self.directions, self.scale, self.epsilon = directions, scale, epsilon
        self.top = largest_product(k, directions, scale, seen.real) if epsilon and k.shape[2] else None

    def run(self, state: PerformerState | None) -> KernelOutput:
        """All rows in order, and the state brought up to date."""
        batch, heads, nk, _ = self.k.shape
        nq, width = self.q.shape[3], self.v.shape[-1]
        if state is None:
            sums = no_keys(batch, heads, len(self.directions), width, self.v)
        else:
            sums = state.sums(batch, heads, width, self.directions, self.v)
        parts: list[KernelOutput] = []
        if self.seen.causal:
            # The queries are the last positions: those before all keys see nothing, keys before them are seen by all.
            parts = [self._read(sums, 0, nq - nk)] if nq > nk else []
            sums = self._add(sums, 0, nk - nq)
            for start in range(max(0, nk - nq), nk, STEP):
                rows, sums = self._walk(sums, start, min(start + STEP, nk))
                parts.append(rows)
        else:
            sums = self._add(sums, 0, nk)
            step = chunk_on(self.q.device)
            parts = [self._read(sums, start, min(start + step, nq)) for start in range(0, nq, step)]
        if state is not None:
            state.store(sums, nk, self.directions)
        return self._joined(parts)

    def _add(self, sums: FeatureSums, start: int, end: int) -> FeatureSums:
        step = chunk_on(self.k.device)
        for first in range(start, end, step):
            last = min(first + step, end)
            sums = add_keys(sums, self._keys(first, last), self.v[:, :, first:last])
        return sums

    def _walk(self, sums: FeatureSums, start: int, end: int) -> tuple[KernelOutput, FeatureSums]:
        """The keys from start to end, and the queries that stand there."""
        shift = self.q.shape[3] - self.k.shape[2]
        a, added = self._queries(start + shift, end + shift)
        rows, sums = walk(sums, a, self._keys(start, end), self.v[:, :, start:end])
        return KernelOutput(rows.output, rows.lse + added), sums

    def _read(self, sums: FeatureSums, start: int, end: int) -> KernelOutput:
        a, added = self._queries(start, end)
        rows = read_rows(sums, a.flatten(2, 3))
        return KernelOutput(rows.output, rows.lse + added)

    def _queries(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Log-features (B, Hkv, G, n, m), and what is missing in each row's lse (B, Hkv, G·n)."""
        made = log_features(self.q[:, :, :, start:end], self.directions, self.scale, epsilon=self.epsilon)
        return made.logs, made.shift.flatten(2)

    def _keys(self, start: int, end: int) -> Tensor:
        """Log-features (B, Hkv, n, m), −∞ where a key is hidden."""
        k = self.k[:, :, start:end]
        b = log_features(k, self.directions, self.scale, epsilon=self.epsilon, top=self.top).together
        if self.seen.real is None:
            return b
        return b.masked_fill(~self.seen.real[:, None, start:end, None], -torch.inf)

    def _joined(self, parts: list[KernelOutput]) -> KernelOutput:
        """Chunks (B, Hkv, G·n, ·) → all rows (B, H, Nq, ·), output as wide as the queries came."""
        groups = self.q.shape[2]
        if not parts:  # no queries
            output = self.v.new_zeros(*self.q.shape[:4], self.v.shape[-1])
            return KernelOutput(output.flatten(1, 2).to(self.dtype), output.sum(-1).flatten(1, 2))
        output = torch.cat([by_group(rows.output, groups) for rows in parts], 3).flatten(1, 2)
        lse = torch.cat([by_group(rows.lse, groups) for rows in parts], 3).flatten(1, 2)
        return KernelOutput(output.to(self.dtype), lse - log(len(self.directions)))


def check_numbers(scale: float | None, epsilon: float) -> None:
    """Raise ValueError for a scale that is not finite and above 0 (None: the usual one), and an epsilon outside [0, 1).

    >>> check_numbers(None, 0.0)
    """
    if scale is not None and not 0 < scale < inf:
        raise ValueError(f"features estimate e^(scale·q·k) for a finite scale above 0, got {scale}")
    if not 0 <= epsilon < 1:
        raise ValueError(f"epsilon must be in [0, 1), got {epsilon}")


def _check(
    q: Tensor, k: Tensor, v: Tensor, directions: Tensor, scale: float | None, epsilon: float, state: object
) -> None:
    check_numbers(scale, epsilon)
    if not all(isinstance(x, Tensor) and x.ndim == 4 and x.is_floating_point() for x in (q, k, v)):
        raise ValueError("q, k and v must be floating-point tensors (B, H, N, D)")
    if k.shape[:3] != v.shape[:3] or len(q) != len(k) or q.shape[-1] != k.shape[-1]:
        raise ValueError(
            f"q, k and v do not fit each other: {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}; "
            "they are (B, H, Nq, D), (B, Hkv, Nk, D), (B, Hkv, Nk, Dv)"
        )
    if not k.shape[1] or q.shape[1] % k.shape[1]:
        raise ValueError(f"query heads must be a multiple of key heads: {q.shape[1]} and {k.shape[1]}")
    if directions.ndim != 2 or directions.shape[1] != q.shape[-1] or not len(directions):
        raise ValueError(f"directions must be (features, {q.shape[-1]}), got {tuple(directions.shape)}")
    if state is not None and q.shape[2] > k.shape[2]:
        raise ValueError(
            f"{q.shape[2]} queries continue a state with {k.shape[2]} keys: a query needs a key of its own"
        )
    if epsilon and state is not None:
        raise ValueError(
            "epsilon cannot go with a state: it is relative to the largest feature of the whole sequence, which is not "
            "known while decoding. Use epsilon=0"
        )
