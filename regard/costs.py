"""Operations and bytes of an attention layer beside a recurrent and a convolutional one, counted without torch.

Letters of the formulas: n positions, d d_model, H heads, Hkv key/value heads, D head size, k kernel, B batch,
L layers, s bytes per number. Not counted: what a fused kernel leaves unwritten, and what a mask skips.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from html import escape
from operator import index

from regard import tables
from regard.locale import check_lang, translate

__all__ = ["AttentionCost", "Cost", "CostSizes", "Count", "LayerCost", "cost"]

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of one number, by dtype name."""

_STEPS = {"FLOP": (1000, ("", "k", "M", "G", "T", "P", "E")), "B": (1024, ("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"))}


class Count(int):
    """An int with the formula that gave it and a unit: "FLOP", "B" (bytes), or "" for a bare count.

    >>> c = Count(8_000_000, "2·n", "B")
    >>> c, c + 1, c.formula, c.exact, c.readable
    (8000000, 8000001, '2·n', '8,000,000 B', '7.63 MiB')
    """

    formula: str
    unit: str

    def __new__(cls, value: int, formula: str = "", unit: str = "") -> Count:  # noqa: D102
        count = super().__new__(cls, value)
        count.formula, count.unit = formula, unit
        return count

    @property
    def exact(self) -> str:
        """All digits, with the unit."""
        return f"{int(self):,} {self.unit}".rstrip()

    @property
    def readable(self) -> str:
        """Two decimals with a prefix (powers of 1024 for bytes); empty where the exact number is short or bare."""
        if self.unit not in _STEPS or self < _STEPS[self.unit][0]:
            return ""
        step, prefixes = _STEPS[self.unit]

        def hundredths(power: int) -> int:
            unit: int = step**power
            return (int(self) * 100 + unit // 2) // unit

        power = 1
        # Whole-number arithmetic: no size is too large for it. 1,048,575 B rounds up to 1.00 MiB, not to 1024.00 KiB.
        while power + 1 < len(prefixes) and hundredths(power) >= step * 100:
            power += 1
        whole, rest = divmod(hundredths(power), 100)
        return f"{whole:,}.{rest:02d} {prefixes[power]}{self.unit}"


@dataclass(frozen=True, kw_only=True)
class CostSizes:
    """The sizes that were counted, with every default filled in."""

    n: int
    d_model: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    kernel: int
    batch: int
    layers: int
    dtype: str


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """A recurrent or convolutional layer. Each number is a `Count`: an int with its `.formula`."""

    order: str
    flops: Count
    cache_bytes: Count
    parameters: Count
    parameters_bytes: Count
    sequential_steps: Count
    longest_path: Count


@dataclass(frozen=True, kw_only=True)
class AttentionCost(LayerCost):
    """Multi-head attention with W_q, W_k, W_v and W_o. Each number is a `Count`."""

    projections_flops: Count
    scores_flops: Count
    weighted_sum_flops: Count
    one_head_flops: Count
    q_bytes: Count
    k_bytes: Count
    v_bytes: Count
    scores_bytes: Count
    weights_bytes: Count
    weights_shape: tuple[int, int, int, int]  # B, H, n, n


@dataclass(frozen=True, kw_only=True, repr=False)
class Cost:
    """What `cost` returns: `attention`, `rnn` and `cnn`, counted at the same `sizes`. Prints as a table."""

    sizes: CostSizes
    attention: AttentionCost
    rnn: LayerCost
    cnn: LayerCost

    def text(self, lang: str = "en", formulas: bool = True) -> str:
        """The table as text, in English ("en") or Korean ("ko"). Raises ValueError for another language."""
        words = _words(lang)
        headers, rows = words["columns"].split("|"), self._rows(words)
        if not formulas:
            headers, rows = headers[:-1], [row[:-1] for row in rows if row[2]]
        table = tables.text(headers, rows, right=(2, 3))
        return f"{self._sizes_line(words)}\n{table}\n{words['note']}"

    def as_dict(self) -> dict[str, dict[str, object]]:
        """Everything as plain values, ready for JSON.

        >>> cost(n=4, d_model=8).as_dict()["rnn"]["flops"], cost(n=4, d_model=8).as_dict()["rnn"]["formulas"]["flops"]
        (1024, '4·B·n·d²')
        """
        result: dict[str, dict[str, object]] = {"sizes": asdict(self.sizes)}
        for name, layer in self._layers().items():
            counts = _counts(layer)
            shape = {"weights_shape": list(layer.weights_shape)} if isinstance(layer, AttentionCost) else {}
            result[name] = {
                "order": layer.order,
                **{key: int(count) for key, count in counts.items()},
                **shape,
                "formulas": {key: count.formula for key, count in counts.items()},
            }
        return result

    def _layers(self) -> dict[str, LayerCost]:
        return {"attention": self.attention, "rnn": self.rnn, "cnn": self.cnn}

    def _rows(self, words: dict[str, str]) -> list[list[str]]:
        """Quantity by quantity, so that the three layers stand below each other."""
        layers = self._layers()
        rows = [["order", name, "", "", layer.order] for name, layer in layers.items()]
        for key in _counts(self.attention):
            for name, layer in layers.items():
                count = _counts(layer).get(key)
                if count is not None:
                    rows.append([key, name, count.exact, count.readable, count.formula])
            if key == "weights_bytes":
                rows.append(["weights_shape", "attention", str(self.attention.weights_shape), "", "(B, H, n, n)"])
        keys = [row[0] for row in rows]
        return [["" if row[0] in keys[:i] else words[row[0]], words[row[1]], *row[2:]] for i, row in enumerate(rows)]

    def _sizes_line(self, words: dict[str, str]) -> str:
        numbers = {key: f"{value:,}" if isinstance(value, int) else value for key, value in asdict(self.sizes).items()}
        return words["sizes"].format(**numbers, bytes=BYTES[self.sizes.dtype])

    def __repr__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        words = _words("en")
        table = tables.html(words["columns"].split("|"), self._rows(words), right=(2, 3))
        return f"<p>{escape(self._sizes_line(words))}</p>{table}<p>{escape(words['note'])}</p>"


def cost(
    n: int,
    d_model: int,
    num_heads: int = 1,
    *,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    kernel: int = 3,
    batch: int = 1,
    layers: int = 1,
    dtype: object = "float32",
) -> Cost:
    """Count the operations and bytes of attention, of a recurrent layer and of a convolution, at the same sizes.

    How much memory for d_model 512 and d_k 64? The parameters of 8 such heads, and of one alone:

    >>> cost(n=1000, d_model=512, num_heads=8).attention.parameters_bytes.exact     # 1,050,624 numbers
    '4,202,496 B'
    >>> cost(n=1000, d_model=512, num_heads=1, head_dim=64).attention.parameters_bytes.exact
    '527,104 B'

    How large is the weights matrix at 1000 positions? 1000 × 1000 numbers of 4 bytes, for each head:

    >>> cost(n=1000, d_model=512).attention.weights_bytes.exact
    '4,000,000 B'
    >>> cost(n=1000, d_model=512, num_heads=8).attention.weights_shape
    (1, 8, 1000, 1000)

    8 heads cost what one costs, because each is 8 times narrower:

    >>> cost(n=1000, d_model=512, num_heads=8).attention.flops == cost(n=1000, d_model=512, num_heads=1).attention.flops
    True

    |                    | attention                           | RNN        | CNN                       |
    |--------------------|-------------------------------------|------------|---------------------------|
    | order of time      | O(n²·d)                             | O(n·d²)    | O(k·n·d²)                 |
    | FLOPs: projections | 4·B·n·d·D·(H + Hkv)                 |            |                           |
    | FLOPs: scores      | 2·B·H·n²·D                          |            |                           |
    | FLOPs: sum of V    | 2·B·H·n²·D                          |            |                           |
    | FLOPs: all         | the three together                  | 4·B·n·d²   | 2·B·n·k·d²                |
    | Q, bytes           | B·H·n·D·s                           |            |                           |
    | K and V, each      | B·Hkv·n·D·s                         |            |                           |
    | scores, bytes      | B·H·n²·s                            |            |                           |
    | weights, bytes     | B·H·n²·s                            |            |                           |
    | cache, bytes       | 2·B·L·Hkv·n·D·s                     | B·L·d·s    | B·L·(k − 1)·d·s           |
    | parameters         | (d + 1)·D·(H + 2·Hkv) + (H·D + 1)·d | 2·d² + 2·d | k·d² + d                  |
    | sequential steps   | 1                                   | n          | 1                         |
    | longest path       | 1                                   | n          | max(1, ⌈(n − 1)/(k − 1)⌉) |

    A multiply-add is 2 FLOPs; only matrix products count, not biases, softmax or tanh. O(n²·d) is the order of scores
    and sum; the projections add O(n·d²). The RNN is h ← tanh(W·x + b + U·h + c) with d × d matrices; the convolution
    goes from d to d with a window that ends at its own position. Longest path: how many of these operations the first
    input passes through to reach the last output (a convolution has to be stacked; a centred window needs twice as
    many). Cache: what generation keeps between steps. FLOPs, weights and parameters are of one layer, the cache of all.

    Args:
        n: positions.
        d_model: size of a position's vector.
        num_heads: query heads.
        num_kv_heads: key/value heads; default num_heads.
        head_dim: size of one head; default d_model / num_heads.
        kernel: width of the convolution, at least 2 (a window of 1 never joins two positions).
        batch: sequences.
        layers: layers whose cache is counted.
        dtype: "float32", "float64", "bfloat16" or "float16", or the torch dtype of that name.

    Raises:
        TypeError: a size that is not an integer.
        ValueError: sizes too small, num_heads that do not divide d_model, num_kv_heads that do not divide num_heads,
            or an unknown dtype.
    """
    whole = {"n": n, "d_model": d_model, "num_heads": num_heads, "kernel": kernel, "batch": batch, "layers": layers}
    sizes = {name: _check_int(name, value, 2 if name == "kernel" else 1) for name, value in whole.items()}
    groups = sizes["num_heads"] if num_kv_heads is None else _check_int("num_kv_heads", num_kv_heads)
    if sizes["num_heads"] % groups:
        raise ValueError(
            f"num_kv_heads must divide num_heads, got num_kv_heads={groups} and num_heads={sizes['num_heads']}"
        )
    if head_dim is None and sizes["d_model"] % sizes["num_heads"]:
        raise ValueError(
            f"d_model must divide by num_heads, got d_model={sizes['d_model']} and num_heads={sizes['num_heads']}; "
            "give head_dim=… if the heads do not share d_model out evenly"
        )
    width = sizes["d_model"] // sizes["num_heads"] if head_dim is None else _check_int("head_dim", head_dim)
    dtype_name = str(dtype).removeprefix("torch.")
    if dtype_name not in BYTES:
        raise ValueError(f"dtype must be one of {', '.join(BYTES)}; got {dtype!r}")
    z = CostSizes(**sizes, num_kv_heads=groups, head_dim=width, dtype=dtype_name)
    return Cost(sizes=z, attention=_attention(z), rnn=_recurrent(z), cnn=_convolution(z))


def _attention(z: CostSizes) -> AttentionCost:
    pairs = z.batch * z.num_heads * z.n**2  # B·H·n²
    width = z.num_heads * z.head_dim  # H·D
    size = BYTES[z.dtype]
    projections = 4 * z.batch * z.n * z.d_model * z.head_dim * (z.num_heads + z.num_kv_heads)
    products = 2 * pairs * z.head_dim
    one_head = 8 * z.batch * z.n * z.d_model**2 + 4 * z.batch * z.n**2 * z.d_model
    keys = Count(z.batch * z.num_kv_heads * z.n * z.head_dim * size, "B·Hkv·n·D·s", "B")
    cache = 2 * z.batch * z.layers * z.num_kv_heads * z.n * z.head_dim * size
    parameters = (z.d_model + 1) * z.head_dim * (z.num_heads + 2 * z.num_kv_heads) + (width + 1) * z.d_model
    return AttentionCost(
        order="O(n²·d)",
        flops=Count(projections + 2 * products, "4·B·n·d·D·(H + Hkv) + 4·B·H·n²·D", "FLOP"),
        projections_flops=Count(projections, "4·B·n·d·D·(H + Hkv)", "FLOP"),
        scores_flops=Count(products, "2·B·H·n²·D", "FLOP"),
        weighted_sum_flops=Count(products, "2·B·H·n²·D", "FLOP"),
        one_head_flops=Count(one_head, "8·B·n·d² + 4·B·n²·d", "FLOP"),
        q_bytes=Count(z.batch * z.n * width * size, "B·H·n·D·s", "B"),
        k_bytes=keys,
        v_bytes=keys,
        scores_bytes=Count(pairs * size, "B·H·n²·s", "B"),
        weights_bytes=Count(pairs * size, "B·H·n²·s", "B"),
        weights_shape=(z.batch, z.num_heads, z.n, z.n),
        cache_bytes=Count(cache, "2·B·L·Hkv·n·D·s", "B"),
        parameters=Count(parameters, "(d + 1)·D·(H + 2·Hkv) + (H·D + 1)·d"),
        parameters_bytes=Count(parameters * size, "((d + 1)·D·(H + 2·Hkv) + (H·D + 1)·d)·s", "B"),
        sequential_steps=Count(1, "1"),
        longest_path=Count(1, "1"),
    )


def _recurrent(z: CostSizes) -> LayerCost:
    parameters = 2 * z.d_model**2 + 2 * z.d_model  # two biases, as torch.nn.RNN has
    size = BYTES[z.dtype]
    return LayerCost(
        order="O(n·d²)",
        flops=Count(4 * z.batch * z.n * z.d_model**2, "4·B·n·d²", "FLOP"),
        cache_bytes=Count(z.batch * z.layers * z.d_model * size, "B·L·d·s", "B"),
        parameters=Count(parameters, "2·d² + 2·d"),
        parameters_bytes=Count(parameters * size, "(2·d² + 2·d)·s", "B"),
        sequential_steps=Count(z.n, "n"),
        longest_path=Count(z.n, "n"),
    )


def _convolution(z: CostSizes) -> LayerCost:
    parameters = z.kernel * z.d_model**2 + z.d_model
    size = BYTES[z.dtype]
    reach = z.kernel - 1  # positions further back that one layer sees; m layers see 1 + m·(k − 1) positions
    return LayerCost(
        order="O(k·n·d²)",
        flops=Count(2 * z.batch * z.n * z.kernel * z.d_model**2, "2·B·n·k·d²", "FLOP"),
        cache_bytes=Count(z.batch * z.layers * reach * z.d_model * size, "B·L·(k − 1)·d·s", "B"),
        parameters=Count(parameters, "k·d² + d"),
        parameters_bytes=Count(parameters * size, "(k·d² + d)·s", "B"),
        sequential_steps=Count(1, "1"),
        longest_path=Count(max(1, -(-(z.n - 1) // reach)), "max(1, ⌈(n − 1)/(k − 1)⌉)"),
    )


def _counts(layer: LayerCost) -> dict[str, Count]:
    return {key: value for key in _WORDS if isinstance(value := getattr(layer, key, None), Count)}


def _check_int(name: str, value: object, least: int = 1) -> int:  # regard.checks has one, but imports torch
    try:
        result = index(value)  # type: ignore[arg-type]
    except TypeError:
        result = None
    if result is None or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got {type(value).__name__}: {value!r}")
    if result < least:
        raise ValueError(f"{name} must be at least {least}, got {result}")
    return result


def _words(lang: str) -> dict[str, str]:
    check_lang(lang)
    return {key: translate(text, lang) for key, text in _WORDS.items()}


_WORDS = {
    "sizes": "n = {n} positions, d = {d_model} (d_model), H = {num_heads} heads of D = {head_dim}, "
    "Hkv = {num_kv_heads} key/value heads, k = {kernel} (kernel), B = {batch} (batch), L = {layers} (layers), "
    "s = {bytes} bytes ({dtype})",
    "columns": "quantity|layer|exact|about|formula",
    "note": "A multiply-add is 2 FLOPs; only matrix products are counted. All numbers are of one layer, "
    "except the cache: of all L layers.",
    "attention": "attention",
    "rnn": "RNN",
    "cnn": "CNN",
    "order": "order of time",
    "flops": "FLOPs",
    "projections_flops": "· projections q, k, v, o",
    "scores_flops": "· scores QKᵀ",
    "weighted_sum_flops": "· weighted sum of V",
    "one_head_flops": "FLOPs with one head",
    "q_bytes": "Q in bytes",
    "k_bytes": "K in bytes",
    "v_bytes": "V in bytes",
    "scores_bytes": "scores QKᵀ in bytes",
    "weights_bytes": "weights matrix",
    "weights_shape": "· its shape",
    "cache_bytes": "KV cache or state",
    "parameters": "parameters",
    "parameters_bytes": "parameters in bytes",
    "sequential_steps": "sequential steps",
    "longest_path": "longest path",
}
