"""Text generation: prompts in, text out, at once or streamed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from regard.data.images import Source, are_several, numbered
from regard.data.tokenizer import Tokenizer
from regard.generation.beam_search import Beams
from regard.generation.config import Defaults, Wishes
from regard.generation.loop import Stream, generate
from regard.generation.sampling import Choice
from regard.generation.state import Decoder
from regard.generation.stopping import Decode, Reason, read_stop
from regard.models.checkpoint import read_side
from regard.models.encoder_decoder import EncoderDecoder
from regard.models.flamingo import FlamingoModel
from regard.models.model import Model
from regard.models.text import TextModel
from regard.models.vision_language import VisionLanguageModel
from regard.tasks.eval_mode import one_by_one
from regard.tasks.images import Several, read_pictures, spoken, without_special
from regard.tasks.inputs import positions, require

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


def write(
    model: Model,
    prompts: str | Sequence[str],
    wishes: Wishes,
    on_token: Callable[[int], None] | None = None,
    pictures: Source | Several | None = None,
) -> Written | list[Written]:
    """The continuation of a prompt, or of each; see `Model.generate`."""
    texts = _prompts(prompts)
    require(model, "generate", "generate")
    said = defaults_of(model, wishes)
    pixels = _pixels(model, pictures, len(texts), isinstance(prompts, str))

    def begun(some: Sequence[int]) -> Begun:
        return begin(model, [texts[n] for n in some], said, [pixels[n] for n in some])

    written = continued(model, begun, texts, wishes, said, range(len(texts)), Steps(on_token))
    return written[0] if isinstance(prompts, str) else written


def stream(model: Model, prompt: str, wishes: Wishes, pictures: Source | Several | None = None) -> Iterator[str]:
    """The continuation of a prompt, piece by piece; see `Model.stream`."""
    if not isinstance(prompt, str):
        raise TypeError(f"stream writes one text: prompt must be a str, got {type(prompt).__name__}")
    require(model, "generate", "generate")
    said = defaults_of(model, wishes)
    begun = begin(model, [prompt], said, _pixels(model, pictures, 1, True))
    ready = make_ready(model, begun, wishes, said, rooms(begun, wishes, said)[0])
    if ready.beams.width != 1:
        raise ValueError(
            f"the text of {ready.beams.width} beams is not known before the end, so it cannot be streamed: "
            "model.generate(…) gives it, and model.stream(…, beams=1) does without beams"
        )
    pieces = Stream(
        ready.decoder,
        ready.ids,
        ready.mask,
        decode=ready.decode,
        new_tokens=ready.new_tokens,
        eos=ready.eos,
        pad=ready.pad,
        choice=ready.choice,
        stop=ready.stop,
    ).text()
    return one_by_one(model, pieces)


def beams_of(model: Model, wishes: Wishes) -> int:
    """How many beams a generation will have, by the caller's wish or the checkpoint's."""
    return wishes.searched(defaults_of(model, wishes)).width


# ---------------------------------------------------------------------------------------------------------- made ready


def begin(model: Model, texts: list[str], said: Defaults, pixels: Sequence[Tensor | None]) -> Begun:
    """Prompts as a model begins with them. pixels: of the pictures of each, (P, 3, H, W), None for none."""
    ids, mask = (each.to(model.device) for each in _read(model, _as_read(model, texts, pixels), said))
    if isinstance(model, (VisionLanguageModel, FlamingoModel)):
        return Begun(read_pictures(model, pixels), ids, mask, model.most, model.vocabulary, ids)
    if isinstance(model, EncoderDecoder):
        start = model.start if said.start is None else said.start
        starts = torch.full((len(texts), 1), start, device=model.device)
        return Begun(model.read(ids, mask), starts, None, model.decoder.embed.most, model.vocabulary, None)
    assert isinstance(model, TextModel)
    return Begun(model, ids, mask, model.most, model.vocabulary, ids)


def check_prompt(model: Model, text: str, pixels: Tensor, wishes: Wishes, said: Defaults) -> None:
    """Raise what writing after this prompt would raise of its pictures and its length, without writing.

    pixels: (P, 3, H, W), of which the shape alone is read.
    """
    ids, _ = _read(model, _as_read(model, [text], [pixels]), said)
    wishes.count(said, ids.shape[1], positions(model))


def defaults_of(model: Model, wishes: Wishes) -> Defaults:
    """What the checkpoint says of generating; of a text's part, too, where that has settings of its own."""
    generation = read_side(model.directory, "generation_config.json", dict)
    config = {**model.settings.inner("text_config").values, **model.settings.values}
    return Defaults.read(generation, config, ignore=wishes.ignore)


def _pixels(model: Model, pictures: Any, prompts: int, alone: bool) -> list[Tensor | None]:
    """The pixels (P, 3, H, W) of each prompt's pictures, None where it has none. alone: is there one, in no list.

    Raises ValueError for pictures that a model does not look at, or of which nobody can tell whose they are.
    """
    if pictures is None:
        return [None] * prompts
    if not isinstance(model, (VisionLanguageModel, FlamingoModel)):
        raise ValueError(f"{model.family.title} with task {model.task!r} looks at no pictures: leave out pictures=")
    each = [pictures] if alone else list(pictures) if are_several(pictures) else pictures
    if not isinstance(each, list) or len(each) != prompts:
        raise ValueError(
            f"there are {prompts} prompts: pictures must be a list of as many, each one's own, which is a picture or a "
            "list of them"
        )
    lists = [list(own) if are_several(own) else [] if own is None else [own] for own in each]
    every = [picture for own in lists for picture in own]
    if not every:
        return [None] * prompts
    found = iter(model.preprocessor(every).pixels.to(model.device))
    return [torch.stack([next(found) for _ in own]) if own else None for own in lists]


def _prompts(prompts: object) -> list[str]:
    texts = [prompts] if isinstance(prompts, str) else prompts
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise TypeError(f"a prompt is a str, several are a list of them, got {type(prompts).__name__}: {prompts!r:.60}")
    if not texts:
        raise ValueError("there must be at least one prompt, got an empty list")
    return list(texts)


def _as_read(model: Model, texts: list[str], pixels: Sequence[Tensor | None]) -> list[str]:
    """Prompts as the tokenizer reads them: with as many placeholders as the pictures of each need."""
    if not isinstance(model, (VisionLanguageModel, FlamingoModel)):
        return texts
    read = []
    for number, (text, own) in enumerate(zip(texts, pixels, strict=True)):
        with numbered(number, len(texts), "prompt"):
            read.append(spoken(model, text, own))
    return read


def _read(model: Model, texts: list[str], said: Defaults) -> tuple[Tensor, Tensor]:
    """Prompts as ids and mask (B, N), padded on the left, on the CPU; an empty one is the start token."""
    if isinstance(model, FlamingoModel):
        ids, mask = without_special(model, texts)
    else:
        batch = model.tokenizer.batch(texts, pad="left")
        ids, mask = batch.ids, batch.mask
    empty = ~mask.any(1)
    if bool(empty.any()):
        bos = said.bos if said.bos is not None else model.tokenizer.ids_of.bos
        if bos is None:
            name = _called(int(empty.nonzero()[0]), len(texts))
            raise ValueError(f"{name} is empty, and the checkpoint names no token to begin with: give a prompt")
        if not ids.shape[1]:
            ids, mask = ids.new_zeros(len(texts), 1), mask.new_zeros(len(texts), 1)
        ids[empty, -1], mask[empty, -1] = bos, True
    most = positions(model)
    for number, count in enumerate(mask.sum(1).tolist()):
        if most is not None and count > most:
            name = _called(number, len(texts))
            raise ValueError(f"{name} has {count} tokens, and the model has {most} positions: shorten it")
    return ids, mask


def _called(number: int, count: int) -> str:
    return "the prompt" if count == 1 else f"prompt {number}"
