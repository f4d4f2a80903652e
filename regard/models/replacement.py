"""Replace a model's self-attention by Linformer or Performer attention with the same projections.

    >>> import torch
    >>> from regard.nn.blocks import encoder_block
    >>> block = encoder_block(6, 2, 10, "gelu", eps=1e-12, dropout=0.0, attention_dropout=0.0)
    >>> print(replace_attention(block, Performer(features=32)))
    1 layer has a Performer now: attention
    >>> block(torch.zeros(1, 5, 6)).shape
    torch.Size([1, 5, 6])

A model that was trained with softmax is another model afterwards, as close as the estimate is: it needs training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from torch import nn

from regard.nn.attention import MultiHeadAttention
from regard.nn.blocks import Block, Tower
from regard.nn.linformer import LinformerAttention, SlotProjection
from regard.nn.performer import PerformerAttention
from regard.nn.projections import AttentionLayer

Sharing = Literal["none", "headwise", "key-value", "layerwise"]
"""What shares E and F, in the words of Linformer's paper: nothing, a layer's heads, also its keys and values, and also
all layers."""


@dataclass(frozen=True)
class Performer:
    """Attention by random features, in encoders and decoders.

    >>> Performer(features=256, seed=0)
    Performer(features=256, seed=0)

    Args:
        features: of each layer; None for D·ln D of its head size D.
        seed: of the first layer's random directions; the next layer has the next seed, and so on.
    """

    features: int | None = None
    seed: int = 0

    def unsupported_reason(self, layer: MultiHeadAttention, *, causal: bool) -> str | None:
        """Why a layer cannot be replaced, or None."""
        return PerformerAttention.unsupported_reason(layer)

    def build(self, layers: list[MultiHeadAttention]) -> list[AttentionLayer]:
        """What takes the place of each layer."""
        return [
            PerformerAttention.in_place_of(layer, features=self.features, seed=self.seed + number)
            for number, layer in enumerate(layers)
        ]


@dataclass(frozen=True)
class Linformer:
    """Attention over slots that mix all positions, in encoders.

    >>> Linformer(positions=512, slots=64)
    Linformer(positions=512, slots=64, sharing='headwise')

    Args:
        positions: the longest text, in tokens.
        slots: how many keys remain.
        sharing: what shares the matrices E and F, which are drawn anew and have to be learnt.

    Raises:
        ValueError: another sharing; sizes are checked when a layer is built.
    """

    positions: int
    slots: int
    sharing: Sharing = "headwise"

    def __post_init__(self) -> None:
        if self.sharing not in get_args(Sharing):
            raise ValueError(f"sharing is one of {', '.join(get_args(Sharing))}, got {self.sharing!r}")

    def unsupported_reason(self, layer: MultiHeadAttention, *, causal: bool) -> str | None:
        """Why a layer cannot be replaced, or None."""
        if causal:
            return "it is a decoder's, and a slot mixes all positions, later ones too"
        return LinformerAttention.unsupported_reason(layer)

    def build(self, layers: list[MultiHeadAttention]) -> list[AttentionLayer]:
        """What takes the place of each layer."""
        shared = self._projection(layers[0]) if self.sharing == "layerwise" else None
        return [LinformerAttention.in_place_of(layer, projection=shared or self._projection(layer)) for layer in layers]

    def _projection(self, layer: MultiHeadAttention) -> SlotProjection:
        heads = layer.num_kv_heads if self.sharing == "none" else 1
        both = self.sharing in ("key-value", "layerwise")
        return SlotProjection(self.positions, self.slots, num_heads=heads, key_value=both).to(layer.w_o.weight)


@dataclass(frozen=True, eq=False)
class Replaced:
    """What `replace_attention` did; prints as a report."""

    way: Performer | Linformer
    layers: tuple[str, ...]  # names of the layers that were replaced
    kept: Mapping[str, str] = field(default_factory=dict)  # name → reason, of attention that is as it was
    dropout: float = 0.0  # on attention's weights in training, which the replaced layers had and the new ones do not

    def __str__(self) -> str:
        count, kind = len(self.layers), type(self.way).__name__
        lines = [f"{count} layer{' has' if count == 1 else 's have'} a {kind} now: {_named(self.layers)}"]
        lines += [f"as before: {line}" for line in _by_reason(self.kept)]
        if self.dropout:
            lines.append(f"gone: dropout {self.dropout} on attention's weights; a {kind} makes none")
        return "\n".join(lines)


def replace_attention(model: nn.Module, way: Performer | Linformer) -> Replaced:
    """Replace the self-attention of every block in a model, which is changed; the parameters of its projections stay.

    >>> from regard.nn.blocks import encoder_block
    >>> block = encoder_block(6, 2, 10, "gelu", eps=1e-12, dropout=0.0, attention_dropout=0.1)
    >>> replace_attention(block, Linformer(positions=100, slots=4)).layers
    ('attention',)

    Cross-attention stays as it is: its keys are made once, however long the text grows. What stays is in `kept`.

    Args:
        model: a model, a tower of it (`model.encoder`), or a block. `copy.deepcopy(model)` first keeps the old one.
        way: `Performer(…)`, or for encoders `Linformer(…)`.

    Raises:
        TypeError: another way.
        ValueError: nothing to replace, or all reasons why layers cannot be replaced; then nothing is changed.
    """
    if not isinstance(way, (Performer, Linformer)):
        raise TypeError(f"way must be a Performer(…) or a Linformer(…), got {type(way).__name__}")
    modules = dict(model.named_modules())
    # 1. Attention that stays: what is not the self-attention of a block.
    blocks = {path: module for path, module in modules.items() if isinstance(module, Block)}
    own = {id(block.attention) for block in blocks.values()}
    cross = {id(block.cross) for block in blocks.values() if block.cross is not None}
    kept = {
        path: MEMORY if id(module) in cross else ELSEWHERE
        for path, module in modules.items()
        if isinstance(module, MultiHeadAttention) and id(module) not in own
    }
    if not blocks:
        others = "; ".join(_by_reason(kept)) or "it has no attention of regard's"
        raise ValueError(f"there is no self-attention of a Block in this {type(model).__name__}: {others}")
    # 2. Attention that is replaced, or reasons why some of it cannot be.
    decoders = [module for module in modules.values() if isinstance(module, Tower) and module.causal]
    causal = {id(block) for tower in decoders for block in tower.depth}
    layers: dict[str, MultiHeadAttention] = {}
    refused: dict[str, str | None] = {}
    for path, block in blocks.items():
        layer, name = block.attention, f"{path}.attention" if path else "attention"
        if type(layer) is MultiHeadAttention:
            layers[name] = layer
            refused[name] = way.unsupported_reason(layer, causal=id(block) in causal)
        else:
            refused[name] = f"it is a {type(layer).__name__}, which attends in a way of its own"
    reasons = {name: why for name, why in refused.items() if why is not None}
    if reasons:
        raise ValueError(
            f"{type(way).__name__} cannot take the place of {len(reasons)} of {len(blocks)} layers. A part of a model "
            "can be replaced alone, as replace_attention(model.encoder, …). The reasons:\n  "
            + "\n  ".join(_by_reason(reasons))
        )
    # 3. Replace.
    for block, new in zip(blocks.values(), way.build(list(layers.values())), strict=True):
        block.attention = new
    lost = 0.0 if isinstance(way, Linformer) else max(layer.dropout for layer in layers.values())
    return Replaced(way, tuple(layers), kept, lost)


MEMORY = "it looks at a memory, whose keys are made once"
ELSEWHERE = "it is not the self-attention of a Block: windows, or looks at pictures"


def _by_reason(reasons: Mapping[str, str]) -> list[str]:
    """A line for each reason, with the names of those it is true of."""
    names: dict[str, list[str]] = {}
    for name, why in reasons.items():
        names.setdefault(why, []).append(name)
    return [f"{_named(those)}: {why}" for why, those in names.items()]


def _named(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) < 4 else f"{names[0]}, {names[1]} … {names[-1]}"
