"""What a model that looks at pictures is given to be compared: pixels, and ids beside them, drawn so that they fit.

Pixels have the size that the checkpoint was made for, and are multiples of 1/64 from −2 to 2, which every dtype holds
exactly. It runs no model and compares nothing.

Axis letters: B texts, P pictures, N tokens, C channels, R sampled rows.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.frames import Frame
from regard.models.dual_model import DualModel
from regard.models.flamingo_model import FlamingoModel
from regard.models.heads import EndPooler
from regard.models.model import Model
from regard.models.picture_text_model import Answerer, Captioner, Matcher
from regard.models.picture_writer import PictureWriter
from regard.models.verbs.asking import positions
from regard.models.vision_model import VisionModel
from regard.models.vision_parts import VisionTower
from regard.models.window_parts import WindowTower

__all__ = ["DRAWN", "Seeing", "Shown", "draw_ids", "draw_shown", "sees_pictures", "special_ids"]

DRAWN = (19, 11, 5, 17, 7)  # lengths of texts where ids are drawn
PICTURES = 3
SIDE = 224  # of a picture, where config.json does not say, as in transformers

Seeing = VisionModel | DualModel | Captioner | Answerer | Matcher | PictureWriter | FlamingoModel


@dataclass(frozen=True, eq=False)
class Shown:
    """What both models get.

    inputs: arguments of our model, by name.
    looks: of each layer whose attention weights are looked at, which call of attention that is, and how many sequences
      of how many tokens it has; none where weights are not looked at.
    rows: (R, 2) numbers from 0 to below 1: which of the sequences, and which of its tokens, are looked at.
    """

    inputs: dict[str, Tensor]
    looks: tuple[tuple[int, int, int], ...]
    rows: Tensor

    @property
    def texts(self) -> int:
        """How many texts there are."""
        return len(self.inputs["ids"]) if "ids" in self.inputs else 0

    @property
    def tokens(self) -> int:
        """How many tokens they have, padding left out."""
        if "ids" not in self.inputs:
            return 0
        return int(self.inputs["mask"].sum()) if "mask" in self.inputs else self.inputs["ids"].numel()

    @property
    def pictures(self) -> int:
        """How many pictures there are, of all texts together."""
        return self.inputs["pixels"].shape[:-3].numel() if "pixels" in self.inputs else 0

    def chosen(self, sequences: int, tokens: int) -> tuple[Tensor, Tensor]:
        """Sequence (R,) and token (R,) of the sampled rows in an attention of so many."""
        return (self.rows[:, 0] * sequences).long(), (self.rows[:, 1] * tokens).long()


def sees_pictures(model: Model) -> bool:
    """Is it a model that is given what `draw_shown` draws? CLIP's tower of texts with its projection is, too."""
    return isinstance(model, Seeing)


def draw_shown(ours: Model, rows: int, seed: int) -> Shown:
    """Inputs for a model, drawn from a seed.

    Raises ValueError for a kind of model that nothing is drawn for, and for pictures that transformers cannot rebuild.
    """
    random = torch.Generator().manual_seed(seed)
    looks: tuple[tuple[int, int, int], ...] = ()
    if isinstance(ours, VisionModel):
        inputs, looks = _to_vision(ours, random), _looks(ours)
    elif isinstance(ours, DualModel):
        inputs = _to_dual(ours, random)
    elif isinstance(ours, (Captioner, Answerer, Matcher)):
        inputs = _to_both(ours, random)
    elif isinstance(ours, PictureWriter):
        inputs = _to_writer(ours, random)
    elif isinstance(ours, FlamingoModel):
        inputs = _to_flamingo(ours, random)
    else:
        raise ValueError(f"verify does not compare {type(ours).__name__} yet")
    chosen = torch.rand(rows, 2, generator=random, dtype=torch.float64)  # times a count it stays below it
    return Shown({name: t.to(ours.device) for name, t in inputs.items()}, looks, chosen.to(ours.device))


# ------------------------------------------------------------------------------------------------------ kinds of models


def _to_vision(ours: VisionModel, random: torch.Generator) -> dict[str, Tensor]:
    size = _size(ours, ours.tower)
    inputs = {"pixels": _pixels(ours.tower, (PICTURES,), size, random)}
    if ours.task != "rebuild":
        return inputs
    grid = ours.tower.embed.patches.grid(*size)
    if grid.rows != grid.columns:
        raise ValueError(
            f"this {ours.family.title} rebuilds {grid.rows} × {grid.columns} patches, and transformers takes every "
            "picture for a square: there is nothing to compare with; load it with task='none'"
        )
    return inputs | {"hidden": torch.rand(PICTURES, grid.rows * grid.columns, generator=random) < 0.5}


def _to_dual(ours: DualModel, random: torch.Generator) -> dict[str, Tensor]:
    inputs = {}
    if ours.text is not None:
        end = ours.text_pooler.end if isinstance(ours.text_pooler, EndPooler) else None
        ids, mask = draw_ids(ours.vocabulary, special_ids(ours), _lengths(DRAWN, ours.most), random)
        if end is not None:
            ids = ids.scatter(1, mask.sum(1, keepdim=True) - 1, end)
        inputs = {"ids": ids, "mask": mask}
    if ours.vision is not None:
        inputs["pixels"] = _pixels(ours.vision, (PICTURES,), _size(ours, ours.vision), random)
    return inputs


def _to_both(ours: Captioner | Answerer | Matcher, random: torch.Generator) -> dict[str, Tensor]:
    """A picture for each text. Questions are of one length: transformers lets answers look at the padding of others."""
    reading = ours.decoder if isinstance(ours, Captioner) else ours.encoder
    words, special = reading.embed.tokens.num_embeddings, special_ids(ours)
    lengths = _lengths(DRAWN, positions(ours))
    asked = [max(lengths)] * len(lengths) if isinstance(ours, Answerer) else lengths
    ids, mask = draw_ids(words, special, asked, random)
    inputs = {"ids": ids, "mask": mask}
    if isinstance(ours, Answerer):
        written = ours.decoder.embed
        target, its_mask = draw_ids(written.tokens.num_embeddings, special, _lengths(DRAWN[::-1], written.most), random)
        inputs = {"ids": ids, "target": target, "target_mask": its_mask}
    return inputs | {"pixels": _pixels(ours.vision, (len(ids),), _size(ours, ours.vision), random)}


def _to_writer(ours: PictureWriter, random: torch.Generator) -> dict[str, Tensor]:
    """Three texts: one with a picture after its first word, one without any, one with a picture before its words."""
    size = _size(ours, ours.vision)
    each = ours.picture_tokens(*size)
    special = special_ids(ours) | {ours.placeholder}
    words, _ = draw_ids(ours.vocabulary, special, [max(DRAWN)] * 3, random)
    room = None if ours.most is None else ours.most - each
    rows = []
    for text, (length, before) in enumerate(zip(_lengths(DRAWN[:3], room), (1, None, 0), strict=True)):
        own = words[text, :length]
        picture = torch.full((0 if before is None else each,), ours.placeholder)
        rows.append(torch.cat([own[: before or 0], picture, own[before or 0 :]]))
    mask = torch.arange(max(map(len, rows))) < torch.tensor([[len(row)] for row in rows])
    ids = torch.full(mask.shape, int(words[0, 0])).masked_scatter(mask, torch.cat(rows))
    return {"ids": ids, "mask": mask, "pixels": _pixels(ours.vision, (2,), size, random)}


def _to_flamingo(ours: FlamingoModel, random: torch.Generator) -> dict[str, Tensor]:
    """Two pictures for each of three texts; each token sees none, one or both."""
    ids, mask = draw_ids(ours.vocabulary, special_ids(ours), _lengths(DRAWN[:3], ours.most), random)
    sees = torch.rand(*ids.shape, 2, generator=random) < 0.4
    pixels = _pixels(ours.vision, (len(ids), 2), _size(ours, ours.vision), random)
    return {"ids": ids, "mask": mask, "pixels": pixels, "sees": sees}


# --------------------------------------------------------------------------------------------------------------- pieces


def draw_ids(
    vocabulary: int, special: Collection[int], lengths: Sequence[int], random: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Texts of ids that are not special, padded on the right with such an id, and their mask: (B, N) each.

    >>> ids, mask = draw_ids(9, {0, 1, 8}, [3, 2], torch.Generator().manual_seed(0))
    >>> mask.int().tolist(), bool(((ids > 1) & (ids < 8)).all())
    ([[1, 1, 1], [1, 1, 0]], True)
    """
    plain = torch.tensor([n for n in range(vocabulary) if n not in special])
    ids = plain[torch.randint(len(plain), (len(lengths), max(lengths)), generator=random)]
    mask = torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, None]
    return ids.where(mask, int(plain[0])), mask


def special_ids(ours: Model) -> set[int]:
    """The ids that config.json names for a purpose, for the whole and for its text."""
    values: dict[str, Any] = ours.settings.values
    both = [*values.items(), *(values.get("text_config") or {}).items()]
    named = [value for key, value in both if key.endswith("_token_id")]
    return {n for value in named for n in (value if isinstance(value, list) else [value]) if isinstance(n, int)}


def _lengths(wanted: Sequence[int], most: int | None) -> list[int]:
    return [n if most is None else max(1, min(n, most)) for n in wanted]


def _size(ours: Model, tower: VisionTower | WindowTower) -> tuple[int, int]:
    """Height and width that the checkpoint was made for."""
    return ours.settings.pair("image_size", SIDE) if isinstance(tower, WindowTower) else tower.embed.pixels


def _pixels(
    tower: VisionTower | WindowTower, count: tuple[int, ...], size: tuple[int, int], random: torch.Generator
) -> Tensor:
    """(*count, C, H, W)."""
    return torch.randint(-128, 129, (*count, tower.embed.patches.channels, *size), generator=random) / 64


def _looks(ours: VisionModel) -> tuple[tuple[int, int, int], ...]:
    """As `Shown.looks`: every block, or of each stage the last one, whose weights transformers hands out."""
    sides = list(ours.layouts(Frame.whole(*_size(ours, ours.tower))).values())
    calls = list(range(len(sides)))
    if isinstance(ours.tower, WindowTower):
        blocks = torch.tensor([len(stage.blocks) for stage in ours.tower.stages])  # type: ignore[arg-type]
        calls = (blocks.cumsum(0) - 1).tolist()
    return tuple((call, PICTURES * sides[call].queries.shape[0], sides[call].queries.shape[1]) for call in calls)
