"""Rotary positions (RoPE): the columns of q and k are rotated in pairs, by an angle that grows with the position.

Pair p of a vector at position m is turned by m·w_p, with w_p = base^(−2p/R) for R turned columns (Su et al. 2021,
eq. 15), so that the product of a turned q and a turned k depends on the distance between them alone.

A scaling changes the frequencies w so that a model trained on `original` positions works on more of them. Each one
here gives the numbers that `transformers` gives for the rope_type named in its docstring.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from regard.checks import are_integers, check_int

CPU = torch.device("cpu")
TURNED = {"cpu": 1 << 19}  # numbers turned at once without gradients: on the CPU 2 to 6 times as fast, near the cores
TURNED_ELSEWHERE = 1 << 27  # for memory alone: turning makes five temporaries of x's size, in fp32


class Scaling(ABC):
    """How the frequencies of a `Rotary` are changed for long texts: a frozen value."""

    @abstractmethod
    def frequencies(self, base: float, exponents: Tensor, length: Tensor) -> Tensor:
        """The angles per position, (R/2,), from the exponents 2p/R (R/2,) and the length (), one number."""

    @property
    def magnitude(self) -> float:
        """What the turned columns are multiplied by, in q and in k ("attention scaling" in transformers)."""
        return 1.0

    @property
    def reads_length(self) -> bool:
        """Whether the frequencies depend on the length of the text."""
        return True

    def fit(self, rotated: int) -> None:  # noqa: B027  most scalings fit any number of columns
        """Raise ValueError if the scaling cannot apply to `rotated` turned columns."""


@dataclass(frozen=True)
class LinearScaling(Scaling):
    """Every position divided by `factor` (rope_type "linear").

    >>> Rotary(4, scaling=LinearScaling(2.0)).frequencies().tolist()
    [0.5, 0.004999999888241291]

    Raises ValueError if the factor is not above 0.
    """

    factor: float

    def __post_init__(self) -> None:
        above_zero("factor", self.factor)

    @property
    def reads_length(self) -> bool:  # noqa: D102
        return False

    def frequencies(self, base: float, exponents: Tensor, length: Tensor) -> Tensor:  # noqa: D102
        return 1.0 / base**exponents / self.factor


@dataclass(frozen=True)
class DynamicNTK(Scaling):
    """A base that grows with the text once it is longer than `original` (rope_type "dynamic").

    The length is the largest position of the call + 1. Nothing is remembered between calls, so this equals a fresh
    transformers module; a used one keeps the frequencies of the longest text it has seen until a short one comes.

    >>> rotary = Rotary(4, scaling=DynamicNTK(2.0, original=8))
    >>> rotary.frequencies(8).tolist() == Rotary(4).frequencies().tolist()
    True
    >>> rotary.frequencies(16)[1] < rotary.frequencies(8)[1]
    tensor(True)

    Raises ValueError if the factor is not above 0, original is below 1, or fewer than 4 columns turn.
    """

    factor: float
    original: int

    def __post_init__(self) -> None:
        above_zero("factor", self.factor)
        check_int("original", self.original, 1)

    def fit(self, rotated: int) -> None:  # noqa: D102
        if rotated < 4:  # the exponent R/(R − 2) has no value for 2
            raise ValueError(f"DynamicNTK needs at least 4 turned columns, got {rotated}")

    def frequencies(self, base: float, exponents: Tensor, length: Tensor) -> Tensor:  # noqa: D102
        pairs = exponents.shape[0]
        # The usual factor·length/original − (factor − 1), arranged so that it is exactly 1 at length = original.
        growth = 1 + self.factor * (length.clamp(min=self.original) / self.original - 1)
        return 1.0 / (base * growth ** (pairs / (pairs - 1))) ** exponents


@dataclass(frozen=True)
class Yarn(Scaling):
    """Fast pairs kept, slow pairs divided by `factor`, a ramp between (Peng et al. 2023; rope_type "yarn").

    >>> Yarn(4.0, original=32).magnitude
    1.138629436111989

    Args:
        factor: how many times longer the text may become.
        original: the length trained on.
        beta_fast: turns over `original` positions above which a pair is kept.
        beta_slow: turns below which it is divided.
        attention_factor: the magnitude; default 0.1·ln(factor) + 1, or the ratio of that formula with `mscale` and
            with `mscale_all_dim` before the logarithm (DeepSeek).
        mscale: given with mscale_all_dim and without attention_factor, or not at all.
        mscale_all_dim: likewise.
        truncate: whether the ends of the ramp are rounded outwards to whole pairs.

    Raises:
        ValueError: numbers not above 0, beta_slow ≥ beta_fast, or arguments that exclude each other.
    """

    factor: float
    original: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        check_int("original", self.original, 1)
        for name in ("factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"):
            if getattr(self, name) is not None:
                above_zero(name, getattr(self, name))
        if self.beta_slow >= self.beta_fast:
            raise ValueError(f"beta_slow must be below beta_fast, got {self.beta_slow} and {self.beta_fast}")
        # transformers drops superfluous arguments silently; here each counts or raises.
        if (self.mscale is None) != (self.mscale_all_dim is None):
            raise ValueError(
                f"mscale and mscale_all_dim go together, got {self.mscale} and {self.mscale_all_dim}: give both or none"
            )
        if self.mscale is not None and self.attention_factor is not None:
            raise ValueError("attention_factor already is the magnitude: leave out mscale and mscale_all_dim")

    @property
    def magnitude(self) -> float:  # noqa: D102
        if self.attention_factor is not None:
            return self.attention_factor
        growth = math.log(max(self.factor, 1.0))
        if self.mscale is None or self.mscale_all_dim is None:
            return 0.1 * growth + 1.0
        return (0.1 * self.mscale * growth + 1.0) / (0.1 * self.mscale_all_dim * growth + 1.0)

    @property
    def reads_length(self) -> bool:  # noqa: D102
        return False

    def frequencies(self, base: float, exponents: Tensor, length: Tensor) -> Tensor:  # noqa: D102
        plain = 1.0 / base**exponents
        rotated = 2 * exponents.shape[0]

        def pair_with(turns: float) -> float:  # the pair that turns so many times over `original` positions
            return rotated * math.log(self.original / (turns * 2 * math.pi)) / (2 * math.log(base))

        first, last = pair_with(self.beta_fast), pair_with(self.beta_slow)  # where the ramp begins and ends
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, rotated - 1)
        last = last + 0.001 if first == last else last  # transformers' guard against 0/0
        pair = torch.arange(exponents.shape[0], dtype=plain.dtype, device=plain.device)
        slow = ((pair - first) / (last - first)).clamp(0, 1)  # 0 for fast pairs, 1 for slow pairs
        return plain / self.factor * slow + plain * (1 - slow)


@dataclass(frozen=True)
class Llama3(Scaling):
    """Fast pairs kept, slow pairs divided by `factor`, a ramp in the number of turns between (rope_type "llama3").

    >>> Rotary(4, scaling=Llama3(8.0, low=1.0, high=4.0, original=64)).frequencies().tolist()
    [1.0, 0.0012499999720603228]

    low, high: turns over `original` positions below which a pair is divided, above which it is kept
    (low_freq_factor, high_freq_factor in a config). Raises ValueError if low ≥ high, or a number is not above 0.
    """

    factor: float
    low: float
    high: float
    original: int

    def __post_init__(self) -> None:
        for name in ("factor", "low", "high"):
            above_zero(name, getattr(self, name))
        check_int("original", self.original, 1)
        if self.low >= self.high:
            raise ValueError(f"low must be below high, got low={self.low}, high={self.high}")

    @property
    def reads_length(self) -> bool:  # noqa: D102
        return False

    def frequencies(self, base: float, exponents: Tensor, length: Tensor) -> Tensor:  # noqa: D102
        plain = 1.0 / base**exponents
        turns = self.original * plain / (2 * math.pi)
        fast = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
        return plain / self.factor * (1 - fast) + plain * fast


@dataclass(frozen=True)
class LongRope(Scaling):
    """Each pair divided by its own searched factor, one set for short texts and one for long (rope_type "longrope").

    The long set is used when the largest position of the call + 1 is more than `original`, as in transformers.

    >>> scaling = LongRope(short=[1.0, 1.0], long=[1.0, 4.0], original=8, factor=2.0)
    >>> Rotary(4, scaling=scaling).frequencies(8).tolist(), Rotary(4, scaling=scaling).frequencies(9).tolist()
    ([1.0, 0.009999999776482582], [1.0, 0.0024999999441206455])

    short, long: R/2 numbers each. factor: longest text ÷ original, from which the magnitude follows;
    attention_factor: the magnitude itself. Raises ValueError unless exactly one of these two is given, if a set has
    another length than R/2, or for numbers not above 0.
    """

    short: Sequence[float]
    long: Sequence[float]
    original: int
    factor: float | None = None
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        check_int("original", self.original, 2)  # its logarithm is divided by
        for name in ("short", "long"):
            numbers = tuple(float(n) for n in getattr(self, name))  # a tuple, so that the value can be hashed
            object.__setattr__(self, name, numbers)
            for n in numbers:
                above_zero(f"every number of {name}", n)
        if (self.factor is None) == (self.attention_factor is None):
            raise ValueError(
                f"give factor (longest text ÷ original) or attention_factor (the magnitude itself), exactly one; "
                f"got factor={self.factor}, attention_factor={self.attention_factor}"
            )
        above_zero("factor or attention_factor", self.attention_factor if self.factor is None else self.factor)

    @property
    def magnitude(self) -> float:  # noqa: D102
        if self.factor is None:
            assert self.attention_factor is not None
            return self.attention_factor
        return math.sqrt(1 + math.log(max(self.factor, 1.0)) / math.log(self.original))

    def fit(self, rotated: int) -> None:  # noqa: D102
        if not len(self.short) == len(self.long) == rotated // 2:
            raise ValueError(
                f"LongRope needs {rotated // 2} numbers in short and in long for {rotated} turned columns, "
                f"got {len(self.short)} and {len(self.long)}"
            )

    def frequencies(self, base: float, exponents: Tensor, length: Tensor) -> Tensor:  # noqa: D102
        short, long = (torch.tensor(s, dtype=exponents.dtype, device=exponents.device) for s in (self.short, self.long))
        return 1.0 / (torch.where(length > self.original, long, short) * base**exponents)


class Angles(NamedTuple):
    """Cosines and sines for `Rotary.turn`: (N, R/2) each, or (B, N, R/2)."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True)
class Rotary:
    """Rotary positions for heads of size `dim`: a frozen value that turns q and k.

    >>> rotary = Rotary(4)
    >>> x = torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]])
    >>> rotary.turn(x, torch.tensor([0, 1])).round(decimals=2).tolist()
    [[1.0, 0.0, 0.0, 0.0], [0.5400000214576721, 0.0, 0.8399999737739563, 0.0]]

    Args:
        dim: head size D.
        base: the slowest pair turns about 1/base per position.
        layout: which columns are a pair: "half" (p, p + R/2), as LLaMA and GPT-NeoX on Hugging Face; "interleaved"
            (2p, 2p + 1), as GPT-J and the paper.
        rotated: R, only the first R columns turn and the rest pass through; default all.
        scaling: `LinearScaling`, `DynamicNTK`, `Yarn`, `Llama3`, `LongRope`, or None.

    Raises:
        TypeError: another scaling.
        ValueError: odd or too large sizes, a base not above 1, or an unknown layout.
    """

    dim: int
    _: KW_ONLY
    base: float = 10000.0
    layout: Literal["half", "interleaved"] = "half"
    rotated: int | None = None
    scaling: Scaling | None = None

    def __post_init__(self) -> None:
        check_int("dim", self.dim, 2)
        if self.rotated is None and self.dim % 2:
            raise ValueError(f"dim must be even, for columns turn in pairs; got {self.dim}. Or turn part: rotated=…")
        if check_int("rotated", self.width, 2) % 2 or self.width > self.dim:
            raise ValueError(f"rotated must be even and at most dim = {self.dim}, got {self.width}")
        if not self.base > 1:
            raise ValueError(f"base must be above 1, got {self.base}")
        if self.layout not in ("half", "interleaved"):
            raise ValueError(f"layout must be 'half' or 'interleaved', got {self.layout!r}")
        if self.scaling is not None:
            if not isinstance(self.scaling, Scaling):
                raise TypeError(f"scaling must be a rotary scaling such as LinearScaling(2.0), got {self.scaling!r}")
            self.scaling.fit(self.width)

    @property
    def width(self) -> int:
        """R, the number of columns that turn."""
        return self.dim if self.rotated is None else self.rotated

    @property
    def magnitude(self) -> float:
        """What the turned columns are multiplied by; 1 without a scaling that says otherwise."""
        return 1.0 if self.scaling is None else self.scaling.magnitude

    def frequencies(
        self, length: int | Tensor = 1, *, dtype: torch.dtype = torch.float32, device: torch.device = CPU
    ) -> Tensor:
        """The angle per position of each pair, (R/2,), fastest first.

        >>> Rotary(4).frequencies().tolist()
        [1.0, 0.009999999776482582]

        length: of the text, largest position + 1; only `DynamicNTK` and `LongRope` look at it.
        """
        exponents = torch.arange(0, self.width, 2, dtype=dtype, device=device) / self.width  # (R/2,)
        # fp32 for fp32, not rounded from fp64: so the published models were trained, to the last bits.
        if self.scaling is None:
            return 1.0 / self.base**exponents
        return self.scaling.frequencies(self.base, exponents, torch.as_tensor(length, dtype=dtype, device=device))

    def turn(self, x: Tensor, positions: Tensor | Angles) -> Tensor:
        """The vectors x (…, N, D) turned to their positions; same shape and dtype.

        >>> q, k = torch.randn(2, 5, 8).unbind()
        >>> a = Rotary(8).turn(q, torch.arange(5)) @ Rotary(8).turn(k, torch.arange(5)).mT
        >>> b = Rotary(8).turn(q, torch.arange(5) + 7) @ Rotary(8).turn(k, torch.arange(5) + 7).mT
        >>> torch.allclose(a, b, atol=1e-4)                    # only distances count
        True

        Angles and turning are in fp32, for fp64 in fp64.

        Args:
            x: (…, N, D).
            positions: integers (N,), or (B, N) for x (B, N, D) or (B, H, N, D); or the `angles` of them, so that the
                layers of a model share one set.

        Raises:
            TypeError: x is not floating point, or positions are not integers.
            ValueError: shapes that do not fit.
        """
        if not isinstance(positions, Angles):
            self._check(x, positions)
            positions = self.angles(positions.to(x.device), torch.promote_types(x.dtype, torch.float32))
        cos, sin = positions.cos, positions.sin  # (…, N, R/2)
        assert cos.shape[-2:] == (x.shape[-2], self.width // 2), (cos.shape, x.shape)
        if cos.ndim == 3 and x.ndim == 4:
            cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # (B, 1, N, R/2)
        most = TURNED.get(x.device.type, TURNED_ELSEWHERE)
        if type(x) is not Tensor or x.numel() <= most or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self._turned(x, cos, sin)
        out, count = x.new_empty(x.shape), max(1, most * x.shape[-2] // x.numel())
        for parts in zip(*(torch.split(t, count, -2) for t in (out, x, cos, sin)), strict=True):
            parts[0].copy_(self._turned(*parts[1:]))
        return out

    def _turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        part, half = x[..., : self.width], self.layout == "half"
        if torch.is_grad_enabled():  # or the gradients of both products with a would be rounded before they are added
            part = part.to(cos.dtype)
        # Every pair (a, b) becomes (a·cos − b·sin, b·cos + a·sin), in the dtype of the angles.
        a, b = part.chunk(2, -1) if half else (part[..., 0::2], part[..., 1::2])  # (…, N, R/2) each
        pair = (a * cos - b * sin, b * cos + a * sin)
        turned = (torch.cat(pair, -1) if half else torch.stack(pair, -1).flatten(-2)).to(x.dtype)
        return turned if self.width == self.dim else torch.cat([turned, x[..., self.width :]], -1)

    def angles(
        self, positions: Tensor, dtype: torch.dtype = torch.float32, frequencies: Tensor | None = None
    ) -> Angles:
        """Cosine and sine of every angle at these positions, (N,) or (B, N), times the magnitude.

        >>> Rotary(4).angles(torch.arange(3)).cos.shape
        torch.Size([3, 2])

        frequencies: what `fixed_frequencies` gave, where one has it; computed otherwise.
        """
        if frequencies is None:
            scaled = self._reads_length and positions.numel() > 0
            length = positions.long().max() + 1 if scaled else 0  # widened: 255 + 1 is 0 in uint8
            frequencies = self.frequencies(length, dtype=dtype, device=positions.device)
        angles = positions.to(dtype).unsqueeze(-1) * frequencies  # (…, N, R/2)
        cos, sin = angles.cos(), angles.sin()
        return Angles(cos, sin) if self.magnitude == 1 else Angles(cos * self.magnitude, sin * self.magnitude)

    def fixed_frequencies(self, device: torch.device) -> Tensor | None:
        """The frequencies in fp32; None if they depend on the length of the text."""
        return None if self._reads_length else self.frequencies(device=device)

    @property
    def _reads_length(self) -> bool:
        return self.scaling is not None and self.scaling.reads_length

    def _check(self, x: Tensor, positions: Tensor) -> None:
        if not isinstance(x, Tensor) or not x.dtype.is_floating_point:
            raise TypeError(f"x must be a floating-point torch tensor, got {getattr(x, 'dtype', type(x).__name__)}")
        if x.ndim < 2 or x.shape[-1] != self.dim:
            raise ValueError(f"x must be (…, N, {self.dim}), for this Rotary has dim={self.dim}; got {tuple(x.shape)}")
        if not isinstance(positions, Tensor) or not are_integers(positions):
            got = positions.dtype if isinstance(positions, Tensor) else type(positions).__name__
            raise TypeError(f"positions must be a torch tensor of integers, such as torch.arange(N); got {got}")
        places = positions.shape
        fits = len(places) == 1 or (len(places) == 2 and x.ndim in (3, 4) and places[0] in (1, x.shape[0]))
        if not fits or places[-1] != x.shape[-2]:
            raise ValueError(
                f"positions of shape {tuple(places)} do not fit x of shape {tuple(x.shape)}: "
                "give (N,), or (B, N) with x (B, N, D) or (B, H, N, D)"
            )


def above_zero(name: str, value: float | None) -> None:
    """Raise ValueError unless the number is above 0 and finite."""
    if value is None or not 0 < value < math.inf:
        raise ValueError(f"{name} must be a finite number above 0, got {value}")
