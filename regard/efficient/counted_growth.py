"""Operations and bytes of four ways to attend, counted as the sequence grows: full, sparse, low-rank, kernel.

    >>> g = growth([1024, 65536], heads=12, head_dim=64)
    >>> for way in ("full", "kernel"):
    ...     print(way, *(g.counts[way][n].flops.readable for n in g.lengths))
    full 3.22 GFLOP 13.19 TFLOP
    kernel 1.62 GFLOP 103.48 GFLOP

Letters of the formulas: n positions, H heads, Hkv key/value heads, D head size, B batch, s bytes per number, w window
on each side, g global positions, k slots, m features, links(n) visible pairs of one head.

W_Q, W_K, W_V and W_O are left out: they are the same for all four. This file counts from sizes alone and imports no
torch; `measured_growth.py` measures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from regard import tables
from regard.costs import BYTES, Count
from regard.whole_numbers import check_whole

__all__ = ["WAYS", "Growth", "GrowthSizes", "WayCount", "counted", "growth", "lengths_up_to", "visible_links"]

WAYS = ("full", "sparse", "low-rank", "kernel")
MOST_LENGTHS = 7  # 64 times from the first to the last, as from 1k to 64k


@dataclass(frozen=True, kw_only=True)
class GrowthSizes:
    """The sizes that were counted, with every default filled in.

    window: positions seen on each side.  global_tokens: how many first positions see all and are seen by all (sparse).
    slots: Linformer's (low-rank).  features: Performer's (kernel).
    """

    heads: int
    kv_heads: int
    head_dim: int
    batch: int
    dtype: str
    window: int
    global_tokens: int
    slots: int
    features: int


@dataclass(frozen=True, kw_only=True)
class WayCount:
    """One way at one length: its operations, and the bytes of all it makes between q, k, v and the output."""

    flops: Count
    bytes: Count


@dataclass(frozen=True, kw_only=True, repr=False)
class Growth:
    """What `growth` returns: way → length → `WayCount`. Prints as a table."""

    sizes: GrowthSizes
    lengths: tuple[int, ...]
    counts: dict[str, dict[int, WayCount]]

    def text(self, lang: str = "en") -> str:
        """The tables as text, in English ("en") or Korean ("ko"). Raises ValueError for another language."""
        words = words_in(lang)
        lines = [words["sizes"].format(**asdict(self.sizes), bytes=BYTES[self.sizes.dtype])]
        for kind in ("flops", "bytes"):
            cells = {(w, n): getattr(self.counts[w][n], kind) for w in WAYS for n in self.lengths}
            shown = {place: count.readable or count.exact for place, count in cells.items()}
            formulas = [f"{words[w]}: {cells[w, self.lengths[0]].formula}" for w in WAYS]
            lines += ["", words[kind], table_of(self.lengths, shown, words), *formulas]
        return "\n".join([*lines, "", words["note"]])

    def as_dict(self) -> dict[str, object]:
        """Everything as plain values, ready for JSON."""
        return {
            "sizes": asdict(self.sizes),
            "lengths": list(self.lengths),
            "counted": {
                way: {
                    kind: {
                        "values": [int(getattr(by_length[n], kind)) for n in self.lengths],
                        "formula": getattr(by_length[self.lengths[0]], kind).formula,
                    }
                    for kind in ("flops", "bytes")
                }
                for way, by_length in self.counts.items()
            },
        }

    def __repr__(self) -> str:
        return self.text()


def growth(
    lengths: Sequence[int],
    *,
    heads: int,
    head_dim: int,
    kv_heads: int | None = None,
    batch: int = 1,
    dtype: str = "float32",
    window: int = 256,
    global_tokens: int = 1,
    slots: int = 256,
    features: int = 256,
) -> Growth:
    """Count full, sparse, low-rank and kernel attention at several lengths.

    >>> g = growth([4096, 8192], heads=1, head_dim=64)
    >>> [g.counts["full"][n].bytes.readable for n in g.lengths]
    ['64.00 MiB', '256.00 MiB']

    |          | FLOPs                           | bytes                             |
    |----------|---------------------------------|-----------------------------------|
    | full     | 4·B·H·n²·D                      | B·H·n²·s                          |
    | sparse   | 4·B·H·links(n)·D                | B·H·links(n)·s                    |
    | low-rank | 4·B·(H + Hkv)·n·k·D             | B·(H·n + 2·Hkv·D)·k·s             |
    | kernel   | 4·B·(H + Hkv)·n·m·D + 2·B·H·n·m | B·((H + Hkv)·n + Hkv·(D + 1))·m·s |

    A multiply-add is 2 FLOPs; only matrix products count. Bytes: weights, slots, features and sums if all were written
    at once; a kernel that works in chunks keeps less. Sparse is window(w, w) | globals(first g), both ways.

    lengths: each at least 1.  heads, kv_heads, head_dim, batch, dtype: as in `regard.cost`.
    window, global_tokens, slots, features: of the three that are not full.

    Raises TypeError for a size that is no whole number, ValueError for one too small, no length, or an unknown dtype.
    """
    kv_heads = heads if kv_heads is None else kv_heads
    sizes = GrowthSizes(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        batch=batch,
        dtype=dtype,
        window=window,
        global_tokens=global_tokens,
        slots=slots,
        features=features,
    )
    _check(sizes, lengths)
    counts = {way: {n: counted(way, n, sizes) for n in lengths} for way in WAYS}
    return Growth(sizes=sizes, lengths=tuple(lengths), counts=counts)


def lengths_up_to(longest: int) -> list[int]:
    """Lengths that double up to the longest, at most seven.

    >>> lengths_up_to(65536)
    [1024, 2048, 4096, 8192, 16384, 32768, 65536]

    longest: where it cannot be halved often enough, the halves are rounded up.
    Raises TypeError for what is no whole number, ValueError below 1.
    """
    check_whole("n", longest)
    return sorted({-(-longest // 2**halvings) for halvings in range(MOST_LENGTHS)})


def visible_links(n: int, window: int, global_tokens: int) -> int:
    """How many of n² pairs are visible with a window on both sides and the first positions global.

    >>> visible_links(4, 1, 0), visible_links(4, 1, 1), visible_links(4, 9, 0)
    (10, 14, 16)
    """
    g = min(global_tokens, n)
    rows = sum(min(n - 1, i + window) + 1 - max(0, i - window) for i in range(g))  # of the band, in global rows
    outside = 2 * (g * n - rows) - (g * g - _band(g, window))  # rows and columns, the corner once
    return _band(n, window) + outside


def words_in(lang: str) -> dict[str, str]:
    """The words of the tables in a language. Raises ValueError for one that is not spoken."""
    if lang not in _WORDS:
        raise ValueError(f"lang must be one of {', '.join(map(repr, _WORDS))}; got {lang!r}")
    return _WORDS[lang]


def table_of(lengths: Sequence[int], shown: dict[tuple[str, int], str], words: dict[str, str]) -> str:
    """A row for each length, a column for each way."""
    rows = [[f"{n:,}", *(shown[way, n] for way in WAYS)] for n in lengths]
    return tables.text(["n", *(words[way] for way in WAYS)], rows, right=range(len(WAYS) + 1))


def _band(n: int, window: int) -> int:
    """Pairs at most `window` apart, of n²."""
    reach = min(window, max(0, n - 1))
    return n + 2 * reach * n - reach * (reach + 1)


def counted(way: str, n: int, z: GrowthSizes) -> WayCount:
    """One way at one length.

    >>> z = growth([1], heads=2, head_dim=3).sizes
    >>> counted("full", 5, z).flops.exact
    '600 FLOP'

    way: one of WAYS.  n: the length.  z: all other sizes.
    """
    size, both = BYTES[z.dtype], z.heads + z.kv_heads
    if way == "full":
        pairs = z.batch * z.heads * n**2
        return _way(4 * pairs * z.head_dim, "4·B·H·n²·D", pairs * size, "B·H·n²·s")
    if way == "sparse":
        pairs = z.batch * z.heads * visible_links(n, z.window, z.global_tokens)
        return _way(4 * pairs * z.head_dim, "4·B·H·links(n)·D", pairs * size, "B·H·links(n)·s")
    if way == "low-rank":
        flops = 4 * z.batch * both * n * z.slots * z.head_dim
        held = z.batch * (z.heads * n + 2 * z.kv_heads * z.head_dim) * z.slots
        return _way(flops, "4·B·(H + Hkv)·n·k·D", held * size, "B·(H·n + 2·Hkv·D)·k·s")
    flops = 4 * z.batch * both * n * z.features * z.head_dim + 2 * z.batch * z.heads * n * z.features
    held = z.batch * (both * n + z.kv_heads * (z.head_dim + 1)) * z.features
    return _way(flops, "4·B·(H + Hkv)·n·m·D + 2·B·H·n·m", held * size, "B·((H + Hkv)·n + Hkv·(D + 1))·m·s")


def _way(flops: int, flops_formula: str, held: int, held_formula: str) -> WayCount:
    return WayCount(flops=Count(flops, flops_formula, "FLOP"), bytes=Count(held, held_formula, "B"))


def _check(z: GrowthSizes, lengths: Sequence[int]) -> None:
    if not lengths:
        raise ValueError("growth needs at least one length")
    for name, value in (*asdict(z).items(), *(("n", n) for n in lengths)):
        least = 0 if name in ("window", "global_tokens") else 1
        if name != "dtype":
            check_whole(name, value, least)
    if z.heads % z.kv_heads:
        raise ValueError(f"kv_heads must divide heads, got kv_heads={z.kv_heads} and heads={z.heads}")
    if z.dtype not in BYTES:
        raise ValueError(f"dtype must be one of {', '.join(BYTES)}; got {z.dtype!r}")


_WORDS = {
    "en": {
        "sizes": "H = {heads} heads of D = {head_dim}, Hkv = {kv_heads} key/value heads, B = {batch} (batch), "
        "s = {bytes} bytes ({dtype}); sparse: w = {window} on each side and g = {global_tokens} global; "
        "low-rank: k = {slots} slots; kernel: m = {features} features",
        "flops": "Operations (a multiply-add is 2)",
        "bytes": "Bytes made between q, k, v and the output, if all were written",
        "bytes_short": "Bytes, if all were written",
        "seconds": "Measured time",
        "memory": "Measured peak memory",
        "full": "full",
        "sparse": "sparse",
        "low-rank": "low-rank",
        "kernel": "kernel",
        "skipped": "skipped",
        "note": "W_Q, W_K, W_V and W_O are left out: they are the same for all four.",
    },
    "ko": {
        "sizes": "헤드 H = {heads}개(헤드당 D = {head_dim}), 키/값 헤드 Hkv = {kv_heads}개, 배치 B = {batch}, "
        "값 하나당 s = {bytes}바이트({dtype}). 희소: 양쪽 윈도 w = {window}, 글로벌 위치 g = {global_tokens}개. "
        "저랭크: 슬롯 k = {slots}개. 커널: 특징 m = {features}개",
        "flops": "연산량(곱셈-덧셈 한 번은 2)",
        "bytes": "q, k, v와 출력 사이에서 만들어지는 값의 바이트 수(모두 저장할 경우)",
        "bytes_short": "바이트 수(모두 저장할 경우)",
        "seconds": "측정한 시간",
        "memory": "측정한 최대 메모리",
        "full": "전체",
        "sparse": "희소",
        "low-rank": "저랭크",
        "kernel": "커널",
        "skipped": "생략",
        "note": "W_Q, W_K, W_V, W_O는 네 방식이 모두 같으므로 제외했습니다.",
    },
}
