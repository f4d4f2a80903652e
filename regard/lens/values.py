"""Values of a call and the projection behind them: norms of weighted values, and what they add to a direction.

With W_h (Dv, d_model) the rows of the output projection that belong to head h, query i gets p_ij · v_j W_h from key j.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard import tables
from regard.lens.measures.weights import grouped_scores

__all__ = ["Attribution", "OutputProjection", "StoredValues", "find_projection"]

PROJECTIONS = (
    *("w_o", "out_proj", "o_proj", "c_proj", "wo", "to_out", "dense", "proj", "out_lin", "linear_out", "out_linear"),
    *("proj_out", "output_proj", "output_projection", "o", "out", "output", "projection", "fc_out"),
)
"""Attributes under which attention modules have their output projection, the surest first."""

ATTENTION = re.compile(r"attention|attn|mha", re.IGNORECASE)
LISTED = 10  # strongest tokens that a result prints


class StoredValues:
    """The values of a call: a tensor, or what reads it from one that calls share."""

    def __init__(self, source: Tensor | Callable[[], Tensor]) -> None:
        self._source = source.detach() if isinstance(source, Tensor) else source

    @property
    def tensor(self) -> Tensor:
        """(B, Hkv, Nk, Dv)."""
        return self._source if isinstance(self._source, Tensor) else self._source()


# ---------------------------------------------------------------------------------------------------- output projection


@dataclass(frozen=True, eq=False)
class OutputProjection:
    """The output projection of a module, as it was when the module ran: a reference to its weight, not a copy."""

    path: str
    weight: Tensor | None = None  # (H·Dv, d_model), or transposed; None in a capture from a file
    transposed: bool = False
    version: int = 0  # of the weight, which an optimizer's step counts up

    def per_head(self, heads: int, width: int) -> Tensor:
        """(H, Dv, d_model). Raises LookupError if the weight is not at hand or was changed since."""
        if self.weight is None:
            raise LookupError(
                f"a capture file does not hold the weights of the model: pass w_o=model.get_submodule({self.path!r})"
            )
        if not self.weight.is_inference() and self.weight._version != self.version:
            raise LookupError(
                f"{self.path!r} was changed after the model ran, so it is no longer the projection of these values: "
                "call norms before the optimizer's step, or pass w_o= with a copy"
            )
        weight = self.weight.detach()
        return (weight.mT if self.transposed else weight).reshape(heads, width, -1)


def find_projection(model: nn.Module, path: str, inputs: int) -> OutputProjection | None:
    """The output projection of the module at `path`, by its usual names; it must take `inputs` = H·Dv numbers.

    Looked for in the module itself, then beside it if the module around it is named like attention: BERT's is
    `attention.output.dense`, next to `attention.self`. None if there is none, or something else than a plain layer.
    """
    try:
        module = model.get_submodule(path)
    except AttributeError:
        return None
    places = [(module, path)]
    above = path.rpartition(".")[0]
    if path and ATTENTION.search(type(around := model.get_submodule(above)).__name__):
        places.append((around, above))
    for holder, prefix in places:
        for name, layer in _layers(holder):
            weight = getattr(layer, "weight", None)
            transposed = isinstance(layer, nn.Linear)
            if not isinstance(weight, Tensor) or weight.ndim != 2 or weight.shape[1 if transposed else 0] != inputs:
                continue
            version = 0 if weight.is_inference() else weight._version
            return OutputProjection(f"{prefix}.{name}".lstrip("."), weight, transposed, version)
    return None


def _layers(holder: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Name → linear layer (or GPT-2's Conv1D, whose weight is transposed) under each usual name of a module."""
    for name in PROJECTIONS:
        inner = getattr(holder, name, None)
        # diffusers has [projection, dropout]
        first = inner[0] if isinstance(inner, (nn.ModuleList, nn.Sequential)) and len(inner) else None
        for suffix, layer in (("", inner), (".dense", getattr(inner, "dense", None)), (".0", first)):
            if isinstance(layer, nn.Linear) or (isinstance(layer, nn.Module) and type(layer).__name__ == "Conv1D"):
                yield name + suffix, layer


def read_projection(w_o: object, heads: int, width: int) -> Tensor:
    """An output projection that a user gives, as (H, Dv, d_model). Raises TypeError or ValueError."""
    layer = w_o
    if isinstance(w_o, nn.Module):  # GPT-2's Conv1D has its weight transposed
        w_o = w_o.weight.mT if isinstance(w_o, nn.Linear) else getattr(w_o, "weight", None)
    if not isinstance(w_o, Tensor):
        raise TypeError(
            f"w_o must be the output projection, an nn.Linear or a tensor (H·Dv, d_model), or False for none; got "
            f"{type(layer).__name__}"
        )
    weight: Tensor = w_o.detach()
    if weight.ndim == 3 and weight.shape[:2] == (heads, width):
        return weight
    if weight.ndim != 2 or weight.shape[0] != heads * width:
        turned = " Is it transposed?" if weight.ndim == 2 and weight.shape[1] == heads * width else ""
        raise ValueError(
            f"w_o must take {heads} heads × {width} = {heads * width} numbers, as (H·Dv, d_model); its shape is "
            f"{tuple(weight.shape)}.{turned}"
        )
    return weight.reshape(heads, width, -1)


# ------------------------------------------------------------------------------------------------- values times weights


def value_norms(values: Tensor, projection: Tensor | None) -> Tensor:
    """‖v_j W_h‖ for each head and key, (B, H, Nk); without W, (B, Hkv, Nk).

    values (B, Hkv, Nk, Dv), W (H, Dv, d_model) or None. W_hᵀ = QR, so that ‖v W_h‖ = ‖v Rᵀ‖ with R (Dv, Dv): the
    d_model numbers of each key and head are never held.
    """
    wide = torch.promote_types(values.dtype, torch.float32)
    if projection is None:
        plain: Tensor = torch.linalg.vector_norm(values, dim=-1, dtype=wide)  # (B, Hkv, Nk)
        return plain
    heads, group = projection.shape[0], projection.shape[0] // values.shape[1]
    r = torch.linalg.qr(projection.to(values.device, wide).mT, mode="r").R  # (H, min(Dv, d_model), Dv)
    norms = [torch.linalg.vector_norm(values[:, h // group].to(wide) @ r[h].mT, dim=-1) for h in range(heads)]
    return torch.stack(norms, 1)


def along(values: Tensor, projection: Tensor, direction: Tensor) -> Tensor:
    """(v_j W_h) · direction for each head and key, (B, H, Nk); direction (d_model,) or (B or 1, d_model)."""
    wide = torch.promote_types(values.dtype, torch.float32)
    direction = direction.to(values.device, wide)
    direction = direction if direction.ndim == 2 else direction.unsqueeze(0)
    per_head = torch.einsum("hvd,bd->bhv", projection.to(values.device, wide), direction)  # (B or 1, H, Dv)
    per_head = per_head.expand(values.shape[0], -1, -1).unsqueeze(2)
    return grouped_scores(per_head, values.to(wide))[:, :, 0]


def through_norm(norm: nn.Module, residual: Tensor, direction: Tensor) -> Tensor:
    """The direction (B or 1, d_model) before a final norm whose scale is frozen at what it is for `residual`.

    LayerNorm(x) = (x − mean x) / σ · γ + β and RMSNorm(x) = x / σ · γ are linear in x once σ is fixed.

    Raises TypeError for a norm that is neither of the two.
    """
    x = residual.detach().reshape(-1, residual.shape[-1])
    wide = torch.promote_types(x.dtype, torch.float32)
    parameter = next(norm.parameters(), x)
    eps = getattr(norm, "eps", getattr(norm, "variance_epsilon", None))
    with torch.no_grad():
        result, at_zero, at_ones = (
            norm(y.to(parameter.device, parameter.dtype)).to(x.device, wide)
            for y in (x, torch.zeros_like(x[:1]), torch.ones_like(x[:1]))
        )
    x = x.to(wide)
    centred: bool = isinstance(norm, nn.LayerNorm)
    eps = float(torch.finfo(parameter.dtype).eps if eps is None and isinstance(norm, nn.RMSNorm) else eps or 0.0)
    moved = x - x.mean(-1, keepdim=True) if centred else x
    scale = (moved.square().mean(-1, keepdim=True) + eps).rsqrt()
    if centred:
        weight = norm.weight
        gain = weight.detach().to(x.device, wide) if isinstance(weight, Tensor) else torch.ones_like(x[:1])
    else:  # of any RMSNorm, also those whose weight is 1 + w
        gain = (at_ones - at_zero) * (1.0 + eps) ** 0.5
    expected = moved * scale * gain + at_zero
    coarse = max(torch.finfo(parameter.dtype).eps, torch.finfo(wide).eps)
    if not bool((expected - result).abs().max() <= 64 * coarse * max(1.0, float(result.abs().max()))):
        raise TypeError(
            "norm must be a LayerNorm or RMSNorm, so that it is linear once its scale is frozen; "
            f"{type(norm).__name__} is neither: fold it into direction"
        )
    before = direction.to(x.device, wide) * gain
    before = before - before.mean(-1, keepdim=True) if centred else before
    return before * scale


# -------------------------------------------------------------------------------------------------------------- results


@dataclass(repr=False, eq=False)
class Attribution:
    """Scores of tokens, which print as a table of the strongest: what `View.toward` returns.

    Attributes:
        scores: (…, N) one number per token.
        title: what the scores are.
        how: "exact", "first order" or "heuristic".
        words: the tokens as text, a row per batch entry or one for all, or None.
        rows: names of the rows, the axis before the tokens.
    """

    scores: Any
    title: str
    how: str
    words: Sequence[Sequence[str]] | None = None
    rows: tuple[str, ...] = ("",)

    def table(self, batch: int = 0, count: int = LISTED) -> str:
        """The strongest tokens of a batch entry as text, largest size first."""
        n = self.scores.shape[-1]
        flat = torch.as_tensor(self.scores).detach().reshape(-1, len(self.rows), n)[batch].cpu()  # (rows, N)
        words = None if not self.words else self.words[batch if batch < len(self.words) else 0]
        lines = []
        for at in flat.abs().nan_to_num(nan=torch.inf).flatten().topk(min(count, flat.numel())).indices.tolist():
            row, token = divmod(at, n)
            word = words[token].strip() or words[token] if words is not None and len(words) == n else ""
            lines.append([self.rows[row], str(token), word, tables.number(float(flat[row, token]))])
        shown = [c for c in range(4) if c == 3 or any(line[c] for line in lines)]
        headers = ["row", "token", "word", "score"]
        return tables.text(
            [headers[c] for c in shown],
            [[line[c] for c in shown] for line in lines],
            right=[place for place, c in enumerate(shown) if c in (1, 3)],
        )

    def __repr__(self) -> str:
        return f"{self.title} ({self.how})\n{self.table()}"
