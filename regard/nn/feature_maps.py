"""Linear attention by random features (Performer), and the masks that linear attention can take."""

from __future__ import annotations

from math import inf, log
from typing import NamedTuple

import torch
from torch import Tensor

from regard.checks import check_int
from regard.masks.mask import And, Mask, as_mask, indices
from regard.masks.patterns import Causal

CHUNK = 2048  # positions whose features exist at once, where nothing else is computed from them
STEP = 128  # positions of a causal chunk: their pairs are computed, 128·m each, beside m·D for the sums

# A row of a chunk is divided by what the whole chunk holds. Where that is more than e^30 times what the row sees, the
# chunk is halved. fp32 goes down to e^-87, so what is lost is below e^-57 of the row.
SAFE = 30.0


def chunk_on(device: torch.device) -> int:
    """Positions whose features are computed and summed at once: what a core's cache holds, or what keeps a GPU busy."""
    return 128 if device.type == "cpu" else 4096


class KeyMask(NamedTuple):
    """Which keys are seen: `real` (B or 1, Nk) booleans or None for all; `causal`: none that lies ahead."""

    real: Tensor | None
    causal: bool


def read_key_mask(mask: object, batch: int, num_heads: int, nq: int, nk: int, device: torch.device) -> KeyMask:
    """Read a mask as padding, causal, or both: all that linear attention can do.

    >>> from regard.masks import causal, padding
    >>> read_key_mask(causal() & padding([2]), 1, 1, 3, 3, torch.device("cpu"))
    KeyMask(real=tensor([[ True,  True, False]]), causal=True)

    mask: a mask, booleans that broadcast to (B, H, Nq, Nk), or None.
    Raises ValueError for a mask that hides different keys from different queries otherwise than causally.
    """
    mask = as_mask(mask, (batch, num_heads, nq, nk))
    if mask is None:
        return KeyMask(None, False)
    mask.fit(batch, num_heads, nq, nk)
    is_causal, real, parts = False, None, [mask]
    while parts:
        part = parts.pop()
        if isinstance(part, And):
            parts += [part.left, part.right]
        elif isinstance(part, Causal):
            last = part.offset is None or part.offset == nk - nq  # a tensor for offsets (B, 1 or H)
            if not (bool(last.all()) if isinstance(last, Tensor) else last):
                raise ValueError(
                    f"{part!r} is not for linear attention: its queries are always the last {nq} of {nk} positions. "
                    "Use masks.causal() without an offset"
                )
            is_causal = True
        else:
            row = _one_row(part, nq, nk, device)  # (B or 1, Nk)
            real = row if real is None else real & row
    return KeyMask(real, is_causal)


def _one_row(mask: Mask, nq: int, nk: int, device: torch.device) -> Tensor:
    """(B or 1, Nk): the keys of a mask that is the same for every query and head."""
    if nq == 0 or nk == 0:
        return torch.ones(1, nk, dtype=torch.bool, device=device)
    # The first query, twice: a rule that reads the query's index answers with two rows, any other with one.
    twice, keys = torch.zeros(2, dtype=torch.long, device=device), torch.arange(nk, device=device)
    cells: Tensor = mask.bind(nq, nk, device, torch.float32)(*indices(*mask.leading, twice, keys, device))
    cells = cells[(None,) * (4 - cells.ndim)]  # (B or 1, H or 1, 1 or 2, Nk or 1)
    if cells.shape[2] != 1 or cells.shape[1] != 1:
        raise ValueError(
            f"{mask!r} hides different keys from different queries or heads, which linear attention cannot: it sums "
            "over the keys before it meets a query. It takes masks.padding(…), and Performer masks.causal() as well"
        )
    return cells[:, 0, 0].expand(-1, nk)


# ------------------------------------------------------------------------------------------------------------- features


def orthogonal_features(count: int, width: int, *, seed: int) -> Tensor:
    """Random directions (count, width), fp64: Gaussian each, orthogonal in blocks of `width`.

    >>> w = orthogonal_features(3, 3, seed=0)
    >>> bool(((w @ w.T).fill_diagonal_(0).abs() < 1e-12).all())
    True

    The seed gives the same directions on every machine and device, to rounding.
    """
    check_int("features", count)
    check_int("head size", width)
    check_int("seed", seed, least=None)
    random = torch.Generator("cpu").manual_seed(seed)

    def gaussian(*shape: int) -> Tensor:
        # On the CPU by name: a model may be built where the default device is another, or "meta".
        return torch.randn(*shape, generator=random, dtype=torch.float64, device="cpu")

    q, r = torch.linalg.qr(gaussian(-(-count // width), width, width))
    # LAPACK's signs are not random: uncorrected, the first entry of each first direction would always be negative.
    q = q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
    lengths = gaussian(count, width).norm(dim=-1, keepdim=True)
    directions: Tensor = q.transpose(-1, -2).reshape(-1, width)[:count] * lengths
    return directions


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

    directions: (m, D).
    epsilon: added to every feature after division by e^top, as in performer-pytorch (1e-4); it biases the estimate.
    top: (B, H, N or 1, 1), the largest w·x̃; default each row's own.
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
    """The largest w·k̃ of all features and real keys of k (B, H, N, D), (B, H, 1, 1), or 0: the reference of epsilon."""
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


# ----------------------------------------------------------------------------------------------------------------- sums


class FeatureSums(NamedTuple):
    """Sums over the keys so far."""

    top: Tensor  # (B, H, m), −∞ before any key; never differentiated
    mass: Tensor  # (B, H, m)
    values: Tensor  # (B, H, m, Dv)


class KernelOutput(NamedTuple):
    """The outputs of queries, and ln Σ_j e^(a·b_j) of each row, −∞ where it sees nothing."""

    output: Tensor  # (B, H, R, Dv)
    lse: Tensor  # (B, H, R)


def no_keys(batch: int, heads: int, features: int, width: int, like: Tensor) -> FeatureSums:
    """The sums over nothing; width: of a value."""
    top = like.new_full((batch, heads, features), -torch.inf)
    return FeatureSums(top, like.new_zeros(batch, heads, features), like.new_zeros(batch, heads, features, width))


def add_keys(sums: FeatureSums, b: Tensor, v: Tensor) -> FeatureSums:
    """The sums with further keys: log-features b (B, H, n, m), −∞ for a hidden key, and values v (B, H, n, Dv)."""
    if b.shape[-2] == 0:
        return sums
    carried, features = _on_one_scale(sums, b, torch.maximum(sums.top, b.detach().amax(-2)))
    return _added(carried, features, v)


def read_rows(sums: FeatureSums, a: Tensor) -> KernelOutput:
    """The rows of queries with log-features a (B, H, R, m). A row that sees nothing is 0."""
    weights, peak = _weights(a, sums.top)
    return _divided(weights @ sums.values, (weights @ sums.mass.unsqueeze(-1)).squeeze(-1), peak)


def walk(sums: FeatureSums, a: Tensor, b: Tensor, v: Tensor) -> tuple[KernelOutput, FeatureSums]:
    """A few positions in order, each query seeing what is before it and its own key; and the sums after them.

    a: log-features of the queries (B, H, G, n, m), G query heads for each key head.
    b, v: log-features and values of the keys, (B, H, n, m) and (B, H, n, Dv).
    """
    half, top = b.shape[-2] // 2, torch.maximum(sums.top, b.detach().amax(-2))
    if half and not _safe(sums, a, b, top):
        first, sums = walk(sums, a[..., :half, :], b[:, :, :half], v[:, :, :half])
        second, sums = walk(sums, a[..., half:, :], b[:, :, half:], v[:, :, half:])
        return _joined([first, second], a.shape[2]), sums
    carried, features = _on_one_scale(sums, b, top)
    weights, peak = _weights(a.flatten(2, 3), top)  # (B, H, G·n, m)
    pairs = by_group(weights @ features.transpose(-1, -2), a.shape[2]).tril().flatten(2, 3)  # (B, H, G·n, n)
    mass = (weights @ carried.mass.unsqueeze(-1)).squeeze(-1) + pairs.sum(-1)
    return _divided(weights @ carried.values + pairs @ v, mass, peak), _added(carried, features, v)


def _safe(sums: FeatureSums, a: Tensor, b: Tensor, top: Tensor) -> bool:
    """Whether no row sees so little of what the chunk holds that its own part would vanish beside it."""
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


def _joined(parts: list[KernelOutput], groups: int) -> KernelOutput:
    """Join runs of positions whose rows are (G·n): position follows position within each group."""
    pairs = zip(*parts, strict=True)
    return KernelOutput(*(torch.cat([by_group(x, groups) for x in pair], 3).flatten(2, 3) for pair in pairs))


def by_group(x: Tensor, groups: int) -> Tensor:
    """(B, H, G·n, …) → (B, H, G, n, …): the rows of each query head apart."""
    return x.reshape(*x.shape[:2], groups, -1, *x.shape[3:])


def _finite(top: Tensor) -> Tensor:
    return torch.where(top == -torch.inf, 0.0, top)


class PerformerState:
    """The sums over a decoder's positions so far: the cache of `PerformerAttention`. After a redraw begin a new one.

    >>> import regard, torch
    >>> from regard.nn.performer import PerformerAttention
    >>> layer, state, x = PerformerAttention(6, 2), PerformerState(), torch.randn(1, 5, 6)
    >>> steps = [layer(x[:, i : i + 1], mask=regard.masks.causal(), cache=state) for i in range(5)]
    >>> torch.allclose(torch.cat(steps, 1), layer(x, mask=regard.masks.causal()), atol=1e-5)
    True

    sums: over the keys so far, None before any.  length: how many positions there were.
    """

    holds_padding = False  # a key that is hidden does not enter the sums

    def __init__(self, sums: FeatureSums | None = None) -> None:
        self.sums, self.length = sums, 0

    def __len__(self) -> int:
        return self.length

    @property
    def nbytes(self) -> int:
        """Bytes taken."""
        return sum(t.nbytes for t in self.sums or ())

    def keep(self, rows: Tensor) -> None:
        """Row i becomes the old row rows[i], as beams branch and finished texts leave."""
        if self.sums is not None:
            self.sums = FeatureSums(*(t[rows] for t in self.sums))

    def __repr__(self) -> str:
        return f"PerformerState({self.length} positions, {self.nbytes} bytes)"


# ------------------------------------------------------------------------------------------------------------ attention


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

    A row that sees nothing gives 0, with lse −∞ and gradient 0. Features are computed chunk by chunk, and freed unless
    a gradient needs them.

    Args:
        q: (B, H, Nq, D).
        k: (B, Hkv, Nk, D).
        v: (B, Hkv, Nk, Dv).
        directions: (m, D), as `orthogonal_features` draws.
        mask: masks.padding(…), masks.causal(), or both; over what the state holds as well.
        scale: of the scores, above 0; default 1/√D.
        epsilon: added to every feature, as performer-pytorch does with 1e-4; it biases the estimate. Default 0.
        state: earlier keys and values, which these continue; this call's are added to it.

    Raises:
        ValueError: sizes that do not fit, another mask, a scale that is not finite and positive, or epsilon with a
            state: it is relative to the largest feature of the whole sequence, which a decoder does not know.
    """
    _check(q, k, v, directions, scale, epsilon, state)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    before = 0 if state is None else len(state)
    (batch, heads, nq, _), (kv_heads, nk) = q.shape, k.shape[1:3]
    real, causal = read_key_mask(mask, batch, heads, nq, before + nk, q.device)
    real = None if real is None else real[:, before:]

    with torch.autocast(q.device.type, enabled=False):
        groups, dtype = heads // kv_heads, q.dtype
        q = q.reshape(batch, kv_heads, groups, *q.shape[2:])  # (B, Hkv, G, Nq, D)
        v = v.to(torch.promote_types(dtype, torch.float32))
        top = largest_product(k, directions, scale, real) if epsilon and nk else None

        def keys(start: int, end: int) -> Tensor:
            """Log-features (B, Hkv, n, m), −∞ where a key is hidden."""
            b = log_features(k[:, :, start:end], directions, scale, epsilon=epsilon, top=top).together
            return b if real is None else b.masked_fill(~real[:, None, start:end, None], -torch.inf)

        def queries(start: int, end: int) -> LogFeatures:
            return log_features(q[:, :, :, start:end], directions, scale, epsilon=epsilon)

        def read(sums: FeatureSums, start: int, end: int) -> KernelOutput:
            a, shift = queries(start, end)
            rows = read_rows(sums, a.flatten(2, 3))
            return KernelOutput(rows.output, rows.lse + shift.flatten(2))

        sums = None if state is None else state.sums
        sums = no_keys(batch, kv_heads, len(directions), v.shape[-1], v) if sums is None else sums
        # 1. Keys that every query sees: all, or causally those before the first query.
        shared, step = nk - nq if causal else nk, chunk_on(k.device)
        for start in range(0, shared, step):
            end = min(start + step, shared)
            sums = add_keys(sums, keys(start, end), v[:, :, start:end])
        # 2. The queries, in order.
        if causal:
            # The queries are the last positions: those before all keys see nothing.
            parts = [read(sums, 0, nq - nk)] if nq > nk else []
            for start in range(max(0, shared), nk, STEP):
                end = min(start + STEP, nk)
                a, shift = queries(start + nq - nk, end + nq - nk)
                rows, sums = walk(sums, a, keys(start, end), v[:, :, start:end])
                parts.append(KernelOutput(rows.output, rows.lse + shift.flatten(2)))
        else:
            parts = [read(sums, start, min(start + step, nq)) for start in range(0, nq, step)]
        if state is not None:
            state.sums, state.length = sums, before + nk
        # 3. All rows together, (B, H, Nq, ·), the output as wide as the queries.
        if not parts:  # no queries
            output = v.new_zeros(batch, heads, 0, v.shape[-1])
            return KernelOutput(output.to(dtype), output.sum(-1))
        output, lse = (by_group(x, groups).flatten(1, 2) for x in _joined(parts, groups))
        return KernelOutput(output.to(dtype), lse - log(len(directions)))


def check_numbers(scale: float | None, epsilon: float) -> None:
    """Raise ValueError for a scale that is not finite and above 0, and an epsilon outside [0, 1)."""
    if scale is not None and not 0 < scale < inf:
        raise ValueError(f"features estimate e^(scale·q·k) for a finite scale above 0, got {scale}")
    if not 0 <= epsilon < 1:
        raise ValueError(f"epsilon must be in [0, 1), got {epsilon}")


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    directions: Tensor,
    scale: float | None,
    epsilon: float,
    state: PerformerState | None,
) -> None:
    check_numbers(scale, epsilon)
    shapes = [tuple(x.shape) for x in (q, k, v, directions)]
    fit = q.ndim == k.ndim == v.ndim == 4 and k.shape[:3] == v.shape[:3] and len(q) == len(k)
    if not fit or not q.shape[-1] == k.shape[-1] == directions.shape[-1] or q.shape[1] % max(1, k.shape[1]):
        raise ValueError(
            "q, k, v and directions must be (B, H, Nq, D), (B, Hkv, Nk, D), (B, Hkv, Nk, Dv) and (features, D), H a "
            f"multiple of Hkv; got {', '.join(map(str, shapes))}"
        )
    if state is not None and q.shape[2] > k.shape[2]:
        raise ValueError(
            f"{q.shape[2]} queries continue a state with {k.shape[2]} keys: a query needs a key of its own"
        )
    sums = None if state is None else state.sums
    if sums is not None and sums.values.shape[:2] != k.shape[:2]:
        raise ValueError(
            f"the state has (batch, key heads) {tuple(sums.values.shape[:2])}, and k {tuple(k.shape[:2])}: a state "
            "continues the texts and heads that it began with"
        )
    if epsilon and state is not None:
        raise ValueError(
            "epsilon cannot go with a state: it is relative to the largest feature of the whole sequence, which is not "
            "known while decoding. Use epsilon=0"
        )
