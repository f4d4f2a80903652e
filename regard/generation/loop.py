"""Generation, from a prompt to tokens or text: `generate` gives all at once, `Stream` as it becomes certain.

Rows that have ended go on being computed, and what comes after their end is cut off: a batch keeps its shape, which a
captured step needs, and no step waits for the device. Nothing global is set: an interrupt leaves nothing behind.

It does not know any model: it is given one that can begin, step and keep rows (decoder.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic

import torch
from torch import Tensor

from regard.generation.beam_search import Beams, beam_search
from regard.generation.sampling import Choice, Chooser, Filters, check_whole
from regard.generation.state import Decoder, S
from regard.generation.stopping import Decode, Pieces, Reason, StopStrings, read_eos, read_stop

__all__ = ["Generated", "Stream", "generate"]

GREEDY = Choice()
STEPS_PER_LOOK = 16  # on a GPU, steps between two looks at whether all rows have ended: each look waits for the device


@dataclass(frozen=True, eq=False)
class Generated:
    """What came of a prompt: R rows, one for each row of the prompt, or `returned` for each, best first, of beams.

    ids: (R, n) new tokens, an end token included; `pad` after a row's end.  lengths: new tokens of each row.
    reasons: why each ended: "eos", "stop" or "length".  scores: (R,) of beams, else None.
    texts: with `decode`, each row's text without end token and without stop string, else None. A row ended by a stop
      string keeps, in ids, the token that completed it.
    """

    ids: Tensor
    lengths: tuple[int, ...]
    reasons: tuple[Reason, ...]
    scores: Tensor | None = None
    texts: tuple[str, ...] | None = None


def generate(
    decoder: Decoder[S],
    ids: Tensor,
    mask: Tensor | None = None,
    *,
    new_tokens: int,
    eos: int | Sequence[int] | None,
    pad: int,
    choice: Choice = GREEDY,
    beams: int | Beams = 1,
    decode: Decode | None = None,
    stop: str | Sequence[str] = (),
    on_token: Callable[[int], None] | None = None,
) -> Generated:
    """Continue each row of ids (B, N) by at most `new_tokens` tokens.

    >>> class Counting:  # a model of 7 tokens, after each of which comes the next
    ...     def begin(self, ids, mask, *, length):
    ...         return self.step(None, ids[:, -1]), None
    ...     def step(self, state, tokens):
    ...         return torch.nn.functional.one_hot((tokens + 1) % 7, 7).float()
    >>> made = generate(Counting(), torch.tensor([[0, 1], [3, 4]]), new_tokens=4, eos=6, pad=0)
    >>> made.ids.tolist(), made.lengths, made.reasons
    ([[2, 3, 4, 5], [5, 6, 0, 0]], (4, 2), ('length', 'eos'))

    mask: (B, N), True = token, padding on the left; None: all are tokens.
    eos: token or tokens that end a row, or None.  pad: the token written after a row's end.
    choice: how tokens are chosen; default greedily.  beams: a number, or a `Beams`; 1 is no beam search.
    decode: turns ids into text, for `texts` and for `stop`.  stop: strings that end a row, wherever tokens split them.
    on_token: called after each step with the number of steps made, for a progress bar.

    A run without `stop` waits for a GPU only now and then, to see whether all rows have ended.
    Raises ValueError or TypeError for an empty prompt, padding that is not on the left, or numbers out of range, and
    for what is not offered: beams with sampling or with stop strings.
    """
    beams = Beams(beams) if not isinstance(beams, Beams) else beams
    run = _Run(decoder, ids, mask, new_tokens=new_tokens, eos=read_eos(eos), pad=pad, choice=choice)
    strings = read_stop(stop)
    with torch.no_grad():
        if beams.width > 1:
            _check_beams(choice, strings)
            return run.searched(beams, decode, on_token)
        if not strings:
            return run.finished(decode, on_token)
        texts = _Texts(run, _needed(decode), strings)
        for _ in texts.steps(on_token):
            pass
        return texts.result()


class Stream:
    """Text as it becomes certain: iterate, and each item has one piece for each row ("" where there is nothing new).

    >>> class Counting:
    ...     def begin(self, ids, mask, *, length):
    ...         return self.step(None, ids[:, -1]), None
    ...     def step(self, state, tokens):
    ...         return torch.nn.functional.one_hot((tokens + 1) % 7, 7).float()
    >>> letters = lambda ids: "".join("abcdefg"[i] for i in ids)
    >>> stream = Stream(Counting(), torch.tensor([[0], [3]]), decode=letters, new_tokens=4, eos=6, pad=0, stop="de")
    >>> list(stream)
    [('b', 'e'), ('c', 'f')]
    >>> stream.result.texts, stream.result.reasons
    (('bc', 'ef'), ('stop', 'eos'))

    Arguments as in `generate`, without beams, whose text is not known before the end. Pieces are whole characters and
    never part of a stop string. Nothing runs until it is iterated, and leaving the loop early leaves nothing behind.
    """

    def __init__(
        self,
        decoder: Decoder[S],
        ids: Tensor,
        mask: Tensor | None = None,
        *,
        decode: Decode,
        new_tokens: int,
        eos: int | Sequence[int] | None,
        pad: int,
        choice: Choice = GREEDY,
        stop: str | Sequence[str] = (),
    ) -> None:
        run = _Run(decoder, ids, mask, new_tokens=new_tokens, eos=read_eos(eos), pad=pad, choice=choice)
        self._texts = _Texts(run, decode, read_stop(stop))
        self._steps = self._texts.steps()
        self._result: Generated | None = None

    def __iter__(self) -> Iterator[tuple[str, ...]]:
        return self

    def __next__(self) -> tuple[str, ...]:
        with torch.no_grad():  # here and not around a yield, where it would reach the reader's own code
            for pieces in self._steps:
                if any(pieces):
                    return pieces
            self._result = self._result or self._texts.result()
        raise StopIteration

    def text(self) -> Iterator[str]:
        """The pieces of the only row; ValueError if there are more rows."""
        if self._texts.run.batch != 1:
            raise ValueError(f"text() is for one row, this stream has {self._texts.run.batch}: iterate over it instead")
        return (pieces[0] for pieces in self)

    @property
    def result(self) -> Generated:
        """All that was generated, once the stream has been read to its end; RuntimeError before."""
        if self._result is None:
            raise RuntimeError("the stream has not been read to its end: iterate over it first")
        return self._result


class _Run(Generic[S]):
    """One prompt on its way: checked arguments, and the tokens chosen so far."""

    def __init__(
        self,
        decoder: Decoder[S],
        ids: Tensor,
        mask: Tensor | None,
        *,
        new_tokens: int,
        eos: tuple[int, ...],
        pad: int,
        choice: Choice,
    ) -> None:
        self.lengths = _check_prompt(ids, mask)
        for name, value, least in (("new_tokens", new_tokens, 1), ("pad", pad, 0)):
            if value is None:
                raise TypeError(f"{name} must be a whole number, got None")
            check_whole(name, value, least)
        self.decoder, self.ids, self.mask, self.batch = decoder, ids, mask, ids.shape[0]
        self.new_tokens, self.eos, self.pad, self.choice = new_tokens, eos, pad, choice
        self.chooser: Chooser | None = None
        self.made = ids.new_empty(0, self.batch)  # (new_tokens, B) once begun

    def tokens(self) -> Iterator[Tensor]:
        """The tokens (B,) of each step, past the end of rows that have ended; the reader says when it is enough."""
        length = self.ids.shape[1] + self.new_tokens - 1  # the last token is read by nobody
        logits, state = self.decoder.begin(self.ids, self.mask, length=length)
        vocab, device, start = logits.shape[1], logits.device, self.ids.shape[1]
        filters = Filters(
            self.choice, vocab=vocab, eos=self.eos, new_tokens=self.new_tokens, lengths=self.lengths, device=device
        )
        self.chooser = Chooser(filters)
        # One row a step: tokens are written where the model reads them, without a copy.
        seen = torch.empty(start + self.new_tokens, self.batch, dtype=torch.long, device=device)  # (N + new, B)
        seen[:start] = (self.ids if self.mask is None else torch.where(self.mask, self.ids, vocab)).T
        self.made = seen[start:]
        history, rows = seen[:start].T, self.made.unbind()  # (B, N); (B,) for each step
        for step, row in enumerate(rows):
            if step:
                logits = self.decoder.step(state, rows[step - 1])
            if filters.reads_seen:
                history = seen[: start + step].T
            self.chooser(logits, history, step, row)
            yield row

    def finished(self, decode: Decode | None, on_token: Callable[[int], None] | None) -> Generated:
        """Run until all rows have ended, looking seldom where looking means waiting."""
        steps, ended = 0, torch.tensor(False)
        for steps, row in enumerate(self.tokens(), 1):
            if on_token is not None:
                on_token(steps)
            every = 1 if row.is_cpu else STEPS_PER_LOOK
            if self.eos and steps % every == 0:
                ended = self._is_eos(self.made[steps - every : steps]).any(0) | ended  # (B,)
                if bool(ended.all()):
                    break
        ends = self._is_eos(self.made[:steps]).int()  # (steps, B)
        lengths = torch.where(ends.any(0), ends.argmax(0) + 1, steps).tolist()
        reasons: list[Reason] = ["eos" if yes else "length" for yes in ends.any(0).tolist()]
        return self.result(lengths, reasons, decode=decode)

    def result(
        self,
        lengths: Sequence[int],
        reasons: Sequence[Reason],
        *,
        decode: Decode | None = None,
        texts: Sequence[str] | None = None,
    ) -> Generated:
        """Cut each row at its length; texts as given, or decoded, or none."""
        assert self.chooser is not None, "a result comes after tokens"
        self.chooser.check(lengths)
        ids = self.made[: max(lengths)].T.clone(memory_format=torch.contiguous_format)  # (B, n)
        place = torch.arange(ids.shape[1], device=ids.device)
        ids.masked_fill_(place >= torch.tensor(lengths, device=ids.device)[:, None], self.pad)
        if decode is not None:
            texts = _decoded(decode, ids, lengths, reasons)
        return Generated(ids, tuple(lengths), tuple(reasons), texts=None if texts is None else tuple(texts))

    def searched(self, beams: Beams, decode: Decode | None, on_token: Callable[[int], None] | None) -> Generated:
        """The best hypotheses of a beam search."""
        found = beam_search(
            self.decoder,
            self.ids,
            self.mask,
            beams=beams,
            choice=self.choice,
            new_tokens=self.new_tokens,
            eos=self.eos,
            pad=self.pad,
            lengths=self.lengths,
            on_token=on_token,
        )
        tokens, lengths, scores = (
            x[:, : beams.returned].flatten(0, 1) for x in (found.tokens, found.lengths, found.scores)
        )
        if bool(scores.isnan().any()):
            raise ValueError(
                "the scores of the beams are NaN: so are the model's logits; look at its weights and dtype"
            )
        last = tokens.gather(1, (lengths - 1).clamp(min=0)[:, None])[:, 0]  # (R,)
        reasons: list[Reason] = ["eos" if yes else "length" for yes in self._is_eos(last).tolist()]
        ids, whole = tokens[:, : int(lengths.max())], lengths.tolist()
        texts = None if decode is None else _decoded(decode, ids, whole, reasons)
        return Generated(ids.clone(), tuple(whole), tuple(reasons), scores, texts)

    def _is_eos(self, tokens: Tensor) -> Tensor:
        return torch.isin(tokens, torch.tensor(self.eos, dtype=torch.long, device=tokens.device))


class _Texts(Generic[S]):
    """The rows of a run as text; every step waits for its tokens."""

    def __init__(self, run: _Run[S], decode: Decode, strings: tuple[str, ...]) -> None:
        self.run = run
        self._rows = [_Row(decode, run.eos, strings) for _ in range(run.batch)]

    def steps(self, on_token: Callable[[int], None] | None = None) -> Iterator[tuple[str, ...]]:
        """The new text of each row after each step, and at last what was held back."""
        for steps, tokens in enumerate(self.run.tokens(), 1):
            pieces = tuple(row.take(token) for row, token in zip(self._rows, tokens.tolist(), strict=True))
            if on_token is not None:
                on_token(steps)
            yield pieces
            if all(row.reason is not None for row in self._rows):
                return
        yield tuple(row.end("length") for row in self._rows)

    def result(self) -> Generated:
        """All that was generated, after the last step."""
        reasons: list[Reason] = [row.reason for row in self._rows if row.reason is not None]
        return self.run.result(
            [row.count for row in self._rows], reasons, texts=["".join(row.texts) for row in self._rows]
        )


class _Row:
    """One row as text: what has been shown, and why it ended."""

    def __init__(self, decode: Decode, eos: tuple[int, ...], strings: tuple[str, ...]) -> None:
        self._pieces, self._stops, self._eos = Pieces(decode), StopStrings(strings), eos
        self.count = 0
        self.texts: list[str] = []
        self.reason: Reason | None = None

    def take(self, token: int) -> str:
        """One more token: the text to show now."""
        if self.reason is not None:
            return ""
        self.count += 1
        if token in self._eos:
            return self.end("eos")
        text, stopped = self._stops.push(self._pieces.push(token))
        self.reason = "stop" if stopped else None
        self.texts.append(text)
        return text

    def end(self, reason: Reason) -> str:
        """No more tokens: the text that was held back, unless a stop string is in it after all."""
        if self.reason is not None:
            return ""
        text, stopped = self._stops.push(self._pieces.close())
        self.reason = "stop" if stopped else reason
        text += self._stops.close()
        self.texts.append(text)
        return text


def _decoded(decode: Decode, ids: Tensor, lengths: Sequence[int], reasons: Sequence[Reason]) -> tuple[str, ...]:
    """Each row's text up to its end; an end token is no text."""
    cut = [row[: n - (why == "eos")] for row, n, why in zip(ids.tolist(), lengths, reasons, strict=True)]
    return tuple(decode(row) if row else "" for row in cut)


def _check_prompt(ids: Tensor, mask: Tensor | None) -> list[int]:
    """Raise unless ids and mask are a prompt; how many tokens each row has."""
    if not isinstance(ids, Tensor) or ids.dtype.is_floating_point or ids.dtype == torch.bool:
        kind = str(ids.dtype) if isinstance(ids, Tensor) else type(ids).__name__
        raise TypeError(f"the prompt must be a tensor of token ids, got {kind}")
    if ids.ndim != 2 or ids.shape[0] == 0:
        raise ValueError(f"the prompt must have the shape (B, N), one row or more, got {tuple(ids.shape)}")
    if ids.shape[1] == 0:
        raise ValueError(
            "the prompt is empty: there is nothing to continue. Give at least one token, such as the start token"
        )
    if mask is None:
        return [ids.shape[1]] * ids.shape[0]
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != ids.shape:
        got = f"{mask.dtype} {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"mask must be boolean (True = token) and of the prompt's shape {tuple(ids.shape)}, got {got}")
    wrong = (~mask[:, -1] | (mask[:, :-1] & ~mask[:, 1:]).any(1)).nonzero().flatten().tolist()
    if wrong:
        raise ValueError(
            f"row {wrong[0]} has padding after a token: pad the prompt on the left, where it does not get in between"
        )
    lengths: list[int] = mask.sum(1).tolist()
    return lengths


def _check_beams(choice: Choice, strings: tuple[str, ...]) -> None:
    if choice.samples:
        raise ValueError(
            "beams with sampling are not offered: take beams=1, or leave out temperature, top_k, top_p, min_p"
        )
    if strings:
        raise ValueError("beams with stop strings are not offered: take beams=1, or cut the texts")


def _needed(decode: Decode | None) -> Decode:
    if decode is None:
        raise ValueError("stop strings are found in text: give decode=, which turns token ids into text")
    return decode
