"""Linformer or Performer in the place of a model's self-attention: the same projections, another way between them.

    >>> import torch
    >>> from regard.nn.blocks import encoder_block
    >>> block = encoder_block(6, 2, 10, "gelu", eps=1e-12, dropout=0.0, attention_dropout=0.0)
    >>> print(replace_attention(block, Performer(features=32)))
    1 layer has a Performer now: attention
    >>> block(torch.zeros(1, 5, 6)).shape
    torch.Size([1, 5, 6])

A model that was trained with softmax is another model afterwards, close to it only as far as the estimate is: it wants
training. This file knows blocks and towers, and no family.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from torch import nn

from regard.nn.attention import AttentionLayer, MultiHeadAttention
from regard.nn.blocks import Block, Tower
from regard.nn.linformer import LinformerAttention, SlotProjection
from regard.nn.performer import PerformerAttention

__all__ = ["Linformer", "Performer", "Replaced", "Sharing", "replace_attention"]

Sharing = Literal["none", "headwise", "key-value", "layerwise"]
"""What shares E and F, in the words of Linformer's paper: nothing, a layer's heads, also its keys and values, and also
all layers."""


@dataclass(frozen=True)
class Performer:
    """Attention by random features, in encoders and decoders.

    >>> Performer(features=256, seed=0)
    Performer(features=256, seed=0)

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

    positions: the longest text, in tokens.  slots: how many keys remain.  sharing: what shares the matrices E and F,
    which are drawn anew and have to be learnt.
    Raises ValueError for another sharing; sizes are checked when a layer is built.
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
    """What `replace_attention` did.

    way: what took the place.  layers: the names of the layers that were replaced.
    kept: name → reason, for attention that is as it was.
    dropout: on attention's weights in training, which the replaced layers had and the new ones do not; 0.0 for none.
    """

    way: Performer | Linformer
    layers: tuple[str, ...]
    kept: Mapping[str, str] = field(default_factory=dict)
    dropout: float = 0.0

    def __str__(self) -> str:
        count, kind = len(self.layers), type(self.way).__name__
        said = [f"{count} layer{' has' if count == 1 else 's have'} a {kind} now: {_named(self.layers)}"]
        said += [f"as before: {line}" for line in _by_reason(self.kept)]
        if self.dropout:
            said.append(f"gone: dropout {self.dropout} on attention's weights; a {kind} makes none")
        return "\n".join(said)


def replace_attention(model: nn.Module, way: Performer | Linformer) -> Replaced:
    """Replace the self-attention of every block in a model, which is changed; the parameters of its projections stay.

    >>> from regard.nn.blocks import encoder_block
    >>> block = encoder_block(6, 2, 10, "gelu", eps=1e-12, dropout=0.0, attention_dropout=0.1)
    >>> replace_attention(block, Linformer(positions=100, slots=4)).layers
    ('attention',)

    model: a model, a tower of it (`model.encoder`), or a block. `copy.deepcopy(model)` first keeps the old one.
    way: `Performer(…)`, or for encoders `Linformer(…)`.

    Attention to a memory stays as it is: its keys are made once, however long the text grows. What stays is in `kept`.
    Raises TypeError for another way, ValueError where there is nothing to replace, or with all reasons where a layer
    cannot be; then nothing is changed.
    """
    if not isinstance(way, (Performer, Linformer)):
        raise TypeError(f"way must be a Performer(…) or a Linformer(…), got {type(way).__name__}")
    blocks = {name: module for name, module in model.named_modules() if isinstance(module, Block)}
    kept = _kept(model, blocks)
    if not blocks:
        others = "; ".join(_by_reason(kept)) or "it has no attention of regard's"
        raise ValueError(f"there is no self-attention of a Block in this {type(model).__name__}: {others}")
    layers = _replaceable(blocks, way, _causal(model))
    built = way.build(list(layers.values()))
    for block, new in zip(blocks.values(), built, strict=True):
        block.attention = new
    lost = 0.0 if isinstance(way, Linformer) else max(layer.dropout for layer in layers.values())
    return Replaced(way, tuple(layers), kept, lost)


def _replaceable(
    blocks: Mapping[str, Block], way: Performer | Linformer, causal: set[int]
) -> dict[str, MultiHeadAttention]:
    """The attention of each block, by name. Raises ValueError with the reasons where some cannot be replaced."""
    found: dict[str, MultiHeadAttention] = {}
    refused: dict[str, str] = {}
    for path, block in blocks.items():
        layer, name = block.attention, _joined(path, "attention")
        if type(layer) is not MultiHeadAttention:
            refused[name] = f"it is a {type(layer).__name__}, which attends in a way of its own"
            continue
        found[name], why = layer, way.unsupported_reason(layer, causal=id(block) in causal)
        if why is not None:
            refused[name] = why
    if refused:
        raise ValueError(
            f"{type(way).__name__} cannot take the place of {len(refused)} of {len(blocks)} layers. A part of a model "
            "can be replaced alone, as replace_attention(model.encoder, …). The reasons:\n  "
            + "\n  ".join(_by_reason(refused))
        )
    return found


def _causal(model: nn.Module) -> set[int]:
    """The ids of the blocks whose tower is a decoder."""
    towers = [module for module in model.modules() if isinstance(module, Tower) and module.causal]
    return {id(block) for tower in towers for block in tower.depth}


def _kept(model: nn.Module, blocks: Mapping[str, Block]) -> dict[str, str]:
    """Attention that is not the self-attention of a block, and why it stays."""
    own = {id(block.attention) for block in blocks.values()}
    memory = {id(block.cross) for block in blocks.values() if block.cross is not None}
    return {
        name: MEMORY if id(module) in memory else ELSEWHERE
        for name, module in model.named_modules()
        if isinstance(module, MultiHeadAttention) and id(module) not in own
    }


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


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
