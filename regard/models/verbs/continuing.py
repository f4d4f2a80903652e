"""Prompts that were read, continued: each as it would be alone, whatever room its neighbours have.

Where a model begins is given (`Begun`); what comes is text (`Written`). It does not know how prompts become tokens, nor
how tokens are chosen: writing.py and captioning.py do the one, generation/ the other.

Axis letters: B prompts, N tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from regard.models.generation.beams import Beams
from regard.models.generation.checkpoint_defaults import Defaults
from regard.models.generation.choosing import Choice
from regard.models.generation.decoder import Decoder
from regard.models.generation.generating import generate
from regard.models.generation.pieces import Decode
from regard.models.generation.stopping import Reason, read_stop
from regard.models.images.pictures import numbered
from regard.models.model import Model
from regard.models.tokenizers.tokenizing import Tokenizer
from regard.models.verbs.wishes import Wishes

__all__ = ["Begun", "Ready", "Steps", "Written", "continued", "finish", "make_ready", "rooms"]

ANCHOR = 8  # tokens of the prompt among which a whole character ends: two of at most 4 bytes each


@dataclass(frozen=True, eq=False)
class Written:
    """What a model wrote; printing it prints the text.

    >>> import torch
    >>> print(Written("The cat", " sat.", torch.tensor([332, 13]), "eos"))
     sat.

    text: the new text, without end token and stop string.  ids: (n,) new tokens, on the CPU, an end token included.
    reason: why it ended: "eos", "stop" or "length".  score: of beams: summed log probability by length, else None.
    """

    prompt: str
    text: str
    ids: Tensor
    reason: Reason
    score: float | None = None

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"Written({self.text!r}, {len(self.ids)} tokens, reason={self.reason!r})"


@dataclass(frozen=True, eq=False)
class Begun:
    """Where a model begins to write.

    ids, mask: (B, N), padded on the left.  most: positions of who decodes, None without a limit.
    vocabulary: how many tokens there are to choose from.
    after: the ids after which the new ones read as text; None where a text begins.
    eos, pad: where the model itself says them.
    """

    decoder: Decoder[Any]
    ids: Tensor
    mask: Tensor | None
    most: int | None
    vocabulary: int
    after: Tensor | None
    eos: tuple[int, ...] = ()
    pad: int | None = None


@dataclass(frozen=True, eq=False)
class Ready:
    """A generation made ready: who decodes, from which tokens, and how many more at most."""

    decoder: Decoder[Any]
    ids: Tensor  # (B, N)
    mask: Tensor | None  # (B, N)
    decode: Decode
    new_tokens: int
    eos: tuple[int, ...]
    pad: int
    choice: Choice
    beams: Beams
    stop: tuple[str, ...]


class Steps:
    """Counts the steps of several runs one after another, and tells them.

    >>> steps = Steps(print)
    >>> steps(1), steps(2), steps.next_run(), steps(1)
    1
    2
    3
    (None, None, None, None)
    """

    def __init__(self, tell: Callable[[int], None] | None) -> None:
        self._tell, self._before, self._now = tell, 0, 0

    def __call__(self, count: int) -> None:
        """So many steps of this run are made."""
        self._now = self._before + count
        if self._tell is not None:
            self._tell(self._now)

    def next_run(self) -> None:
        """What comes is another run's."""
        self._before = self._now


def continued(
    model: Model,
    begun: Callable[[Sequence[int]], Begun],
    texts: Sequence[str],
    wishes: Wishes,
    said: Defaults,
    rows: Sequence[int],
    steps: Steps,
) -> list[Written]:
    """Each prompt continued as it would be alone, by as many tokens as it has room for, whatever room others have.

    begun: where some of the prompts begin, by their places in texts.
    rows: the number of each in the caller's list, by which its draws go.

    Of unlike room, all are written together as long as the longest has room, and cut at their own limits; who could
    go on then is written again, among those of the same room. Beams, and a last token that is forced, look ahead to
    the end, so they are written that way from the first.
    """
    wishes = replace(wishes, seed=wishes.choice(said).seeded().seed)  # one for all runs
    found: dict[int, Written] = {}

    def run(some: Sequence[int], start: Begun, new_tokens: int) -> None:
        own = [texts[n] for n in some]
        ready = make_ready(model, start, wishes, said, new_tokens, tuple(rows[n] for n in some))
        for n, one in zip(some, finish(ready, own, steps), strict=True):
            kept = _cut(one, counts[n], ready.decode)
            if kept.reason != "length" or len(kept.ids) == counts[n]:
                found[n] = kept
        steps.next_run()

    everyone = range(len(texts))
    start = begun(everyone)
    counts = rooms(start, wishes, said)
    room = max(counts) if start.most is None else min(max(counts), start.most - start.ids.shape[1] + 1)
    if len(set(counts)) == 1 or (wishes.searched(said).width == 1 and said.forced_last is None):
        run(everyone, start, room)
    for count in sorted({counts[n] for n in everyone if n not in found}):
        some = [n for n in everyone if n not in found and counts[n] == count]
        run(some, begun(some), count)
    return [found[n] for n in everyone]


def finish(ready: Ready, texts: Sequence[str], on_token: Callable[[int], None] | None = None) -> list[Written]:
    """Write all that was made ready. texts: the prompts, as the result shall name them."""
    made = generate(
        ready.decoder,
        ready.ids,
        ready.mask,
        new_tokens=ready.new_tokens,
        eos=ready.eos,
        pad=ready.pad,
        choice=ready.choice,
        beams=ready.beams,
        decode=ready.decode,
        stop=ready.stop,
        on_token=on_token,
    )
    assert made.texts is not None
    ids = made.ids.cpu()
    scores = [None] * len(texts) if made.scores is None else made.scores.tolist()
    rows = zip(texts, made.texts, ids, made.lengths, made.reasons, scores, strict=True)
    return [Written(prompt, text, row[:n], why, score) for prompt, text, row, n, why, score in rows]


def rooms(begun: Begun, wishes: Wishes, said: Defaults) -> list[int]:
    """How many new tokens at most for each row; padding takes no room.

    Raises ValueError for a row without room, with its number where others have more or less.
    """
    wishes.check_count()
    lengths = [begun.ids.shape[1]] * len(begun.ids) if begun.mask is None else begun.mask.sum(1).tolist()
    counts = []
    for number, length in enumerate(lengths):
        with numbered(number, len(set(lengths)), "prompt"):
            counts.append(wishes.count(said, length, begun.most))
    return counts


def make_ready(
    model: Model, begun: Begun, wishes: Wishes, said: Defaults, new_tokens: int, rows: tuple[int, ...] | None = None
) -> Ready:
    """All that a generation needs, by the caller's wishes and the checkpoint's. Raises as `Model.generate`.

    new_tokens: at most so many, for which every row has room (`rooms`).
    rows: the number of each row, where they are some of many; None: 0, 1 and so on.
    """
    said.check_tokens(begun.vocabulary)
    special = model.tokenizer.ids_of
    eos = begun.eos or said.eos or (() if special.eos is None else (special.eos,))
    pads = (begun.pad, said.pad, special.pad, *eos, 0)
    wishes.check_beams(said)
    return Ready(
        begun.decoder,
        begun.ids,
        begun.mask,
        _text_after(model, begun.after),
        new_tokens,
        eos,
        next(pad for pad in pads if pad is not None),
        replace(wishes.choice(said), rows=rows),
        wishes.searched(said),
        (*read_stop(wishes.stop), *said.stop),
    )


def _cut(one: Written, count: int, decode: Decode) -> Written:
    """A text that ends after so many tokens."""
    if len(one.ids) <= count:
        return one
    ids = one.ids[:count]
    return Written(one.prompt, decode(ids.tolist()), ids, "length", one.score)


def _text_after(model: Model, ids: Tensor | None) -> Decode:
    """Turns new tokens into text, as it reads after the prompt's ids: sentencepiece drops the space of a first token.

    Rows of the table beyond the tokenizer's vocabulary are no text.
    """
    tokenizer = model.tokenizer
    anchor = [] if ids is None else _anchor(tokenizer, ids[:, -ANCHOR:].tolist())
    before = len(tokenizer.decode(anchor)) if anchor else 0

    def decode(new: list[int]) -> str:
        return tokenizer.decode(anchor + [token for token in new if token < tokenizer.size])[before:]

    return decode


def _anchor(tokenizer: Tokenizer, rows: list[list[int]]) -> list[int]:
    """The fewest tokens at the end of a prompt that are whole characters; any prompt's will do. None: no tokens."""
    for row in rows:
        for n in range(1, len(row) + 1):
            text = tokenizer.decode(row[-n:])
            if text and "\ufffd" not in text:
                return row[-n:]
    return []
