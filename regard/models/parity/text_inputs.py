"""What a model of texts is given to be compared: sentences as its tokenizer reads them, or ids that are drawn.

Ids are drawn where there is no tokenizer, and for models of long texts, whose attention is only sparse in texts longer
than a few sentences, or which want a question in them. It runs no model and compares nothing.

Axis letters: B texts, N positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from regard.models.block_attention import BlockAttention
from regard.models.encoder_decoder import EncoderDecoder, shift_right
from regard.models.heads import EndPooler
from regard.models.long_attention import SlidingAttention
from regard.models.long_text_model import AnsweringModel, LongTextModel
from regard.models.model import Model
from regard.models.parity.passes import Given
from regard.models.parity.picture_inputs import DRAWN, draw_ids, special_ids
from regard.models.text_model import TextModel
from regard.models.tokenizers.tokenizer_building import FILE_SETS
from regard.models.verbs.asking import positions

__all__ = ["draws", "has_tokenizer", "pad_of", "padded_left", "text_inputs"]


def has_tokenizer(directory: Path) -> bool:
    """Does a directory hold files of a tokenizer?"""
    names = {name for files in FILE_SETS for name in files.split(" + ")}
    return any((directory / name).is_file() for name in names)


def draws(ours: Model, texts: Sequence[str] | None) -> bool:
    """Are ids drawn for this model, though it may have a tokenizer? texts: the user's.

    Raises ValueError for texts where only ids that are drawn can be compared.
    """
    if texts is not None and _wants_question(ours):
        raise ValueError(
            f"{ours.family.title} with task 'answer' reads a question before each text: leave out texts, and ids are "
            "drawn"
        )
    return texts is None and _whole(ours) > 0


def text_inputs(ours: Model, sentences: Sequence[str] | None, cut: bool, rows: int, seed: int) -> Given:
    """What both get. sentences: None draws ids.  cut: texts that are longer than the model are cut, else refused."""
    random = torch.Generator().manual_seed(seed)
    most = positions(ours)
    if sentences is None:
        ids, mask = _drawn(ours, most, random)
    else:
        batch = ours.tokenizer.batch(sentences, pad="right", length=most, truncate=cut and most is not None)
        mask = batch.mask
        ids = batch.ids.where(mask, pad_of(ours))  # by this id transformers finds the last token
    for n, count in enumerate(mask.sum(1).tolist()):
        if count == 0:
            raise ValueError(f"text {n} has no token: an empty text says nothing to this model")
    text, position = mask.nonzero(as_tuple=True)
    chosen = torch.randperm(len(text), generator=random)[:rows]
    ids, mask, text, position = (t.to(ours.device) for t in (ids, mask, text[chosen], position[chosen]))
    target = shift_right(ids, ours.start, mask) if isinstance(ours, EncoderDecoder) else None
    return Given(ids, mask, target, (text, position), weights=_handed_out(ours))


def padded_left(given: Given, pad: int) -> tuple[Tensor, Tensor]:
    """The same texts padded on the left, as generation has them: (B, N) ids and mask."""
    mask = given.mask.flip(1)  # as many tokens in each row, at its end
    return torch.full_like(given.ids, pad).masked_scatter(mask, given.ids[given.mask]), mask


def pad_of(ours: Model) -> int:
    """The id that texts are padded with: config.json's, else the tokenizer's, else 0."""
    pad = ours.settings.values.get("pad_token_id")
    if isinstance(pad, int) and pad >= 0:
        return pad
    said = None if ours.directory is None or not has_tokenizer(ours.directory) else ours.tokenizer.ids_of
    return next((n for n in (said.pad, said.eos) if n is not None), 0) if said is not None else 0


def _drawn(ours: Model, most: int | None, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Texts of random ids, no special ones among them but for those that some models look for."""
    if not isinstance(ours, (TextModel, EncoderDecoder)):
        raise ValueError(f"verify does not compare {type(ours).__name__} yet")
    block = max((m.size for m in ours.modules() if isinstance(m, BlockAttention)), default=1)
    room = None if most is None else most - most % block  # transformers fills up a block, and needs positions for it
    lengths = [n if room is None else min(n, room) for n in _lengths(ours)]
    ids, mask = draw_ids(ours.vocabulary, special_ids(ours), lengths, random)
    ends = torch.tensor(lengths)[:, None] - 1
    end = ours.settings.values.get("eos_token_id") if isinstance(ours, EncoderDecoder) else None
    if isinstance(ours, TextModel) and isinstance(ours.pooler, EndPooler):
        end = ours.pooler.end
    if isinstance(end, int):
        ids = ids.scatter(1, ends, end)
    if isinstance(ours, LongTextModel) and _wants_question(ours):  # transformers wants three separators, two as one
        separator = ours.settings.whole("sep_token_id", 2, least=0)
        ids = ids.scatter(1, torch.cat([ends - ends + 1, ends - ends + 2, ends], 1), separator)
    return ids.where(mask, pad_of(ours)), mask


def _lengths(ours: Model) -> tuple[int, ...]:
    """Of texts that are drawn: where attention may be sparse, one text that it is sparse in, and a shorter one."""
    whole = _whole(ours)
    return (whole + DRAWN[0], whole // 2 + DRAWN[1]) if whole else DRAWN


def _whole(ours: Model) -> int:
    """The longest text that attention looks at as a whole; 0 where it looks at every text so."""
    sliding = [2 * m.reach * m.dilation for m in ours.modules() if isinstance(m, SlidingAttention)]
    blocks = [(5 + 2 * m.random) * m.size for m in ours.modules() if isinstance(m, BlockAttention)]
    return max([*sliding, *blocks], default=0)


def _handed_out(ours: Model) -> bool:
    """Does transformers hand out weights as (B, H, N, N)?

    Longformer's are by windows. BigBird's leave out what a block counts more than once, and in short texts, where it
    changes to full attention on the way, there are none.
    """
    return not any(isinstance(m, (SlidingAttention, BlockAttention)) for m in ours.modules())


def _wants_question(ours: Model) -> bool:
    return isinstance(ours, (LongTextModel, AnsweringModel)) and ours.task == "answer"
