"""Beam search: the sequences of highest summed log probability, found by keeping the best few at each step.

    B rows, K beams, V tokens
    scores (B, K) + log probabilities (B, K, V) → the best 2K of K·V → those that end here compete with those that ended
                                                                     → the best K of the others go on

Token ids equal those of `transformers`, ties included: the numbers are added in the same order and the same −1e9 stands
for "not a candidate". A hypothesis's score is its summed log probability ÷ (number of new tokens) ** length_penalty.

It does not know where logits come from, nor which filters run on them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from regard.generation.sampling import Choice, Filters, check_whole
from regard.generation.state import Decoder, S
from regard.op import tell_beams

__all__ = ["Beams", "Hypotheses", "beam_search"]

NONE = -1e9  # added to the score of what is not a candidate


@dataclass(frozen=True)
class Beams:
    """How beams are kept and compared.

    >>> Beams(4, length_penalty=2.0, early_stopping=True)
    Beams(width=4, length_penalty=2.0, early_stopping=True, returned=1)

    width: beams for each row.  length_penalty: the power of a hypothesis's length that divides its score; above 0
    favours long ones, below 0 short ones.  returned: hypotheses given for each row, best first.
    early_stopping: True: end a row with its `width`-th ended hypothesis.  False: end when the best running beam, at its
    present length, no longer beats the worst that ended.  "never": the same at the most favourable length to come.
    """

    width: int
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    returned: int = 1

    def __post_init__(self) -> None:
        check_whole("beams", self.width, 1)
        check_whole("the number of returned hypotheses", self.returned, 1)
        if self.returned > self.width:
            raise ValueError(f"{self.width} beams give at most {self.width} hypotheses, {self.returned} were asked for")
        if self.early_stopping not in (True, False, "never"):
            raise ValueError(f"early_stopping is True, False or 'never', got {self.early_stopping!r}")


@dataclass(frozen=True, eq=False)
class Hypotheses:
    """Ended sequences of each row, best first; until there are K, places are held by ones of score −1e9."""

    tokens: Tensor  # (B, K, T)
    lengths: Tensor  # (B, K)
    scores: Tensor  # (B, K)
    there: Tensor  # (B, K) is it a sequence, or does it hold a place?
    rows: Tensor  # (B, K, T) the batch row of the pass that gave each token; −1 after the end

    @classmethod
    def none(cls, batch: int, width: int, room: int, pad: int, device: torch.device) -> Hypotheses:
        """No hypothesis yet."""
        tokens = torch.full((batch, width, room), pad, dtype=torch.long, device=device)
        lengths = torch.zeros(batch, width, dtype=torch.long, device=device)
        none = torch.full_like(lengths, NONE, dtype=torch.float)
        return cls(tokens, lengths, none, lengths.bool(), torch.full_like(tokens, -1))

    def best(self, other: Hypotheses) -> Hypotheses:
        """The best K of these and the other's."""
        scores = torch.cat([self.scores, other.scores], 1)
        scores, places = scores.topk(self.scores.shape[1])  # (B, K)
        tokens = _taken(torch.cat([self.tokens, other.tokens], 1), places)
        lengths = torch.cat([self.lengths, other.lengths], 1).gather(1, places)
        there = torch.cat([self.there, other.there], 1).gather(1, places)
        return Hypotheses(tokens, lengths, scores, there, _taken(torch.cat([self.rows, other.rows], 1), places))


@dataclass(frozen=True, eq=False)
class Candidates:
    """The best continuations of each row, best first, and where each comes from; C of them."""

    tokens: Tensor  # (B, C, T)
    scores: Tensor  # (B, C) summed log probabilities
    parents: Tensor  # (B, C) the beam continued
    ends: Tensor  # (B, C)
    rows: Tensor  # (B, C, T) as of Hypotheses

    def ended(self, beams: Beams, made: int, full: Tensor, hopeful: Tensor) -> Hypotheses:
        """Those that end here, of the first K, in rows that are not full (B, 1) and still hopeful (B, 1)."""
        ends = self.ends.clone()
        ends[:, beams.width :] = False  # the others are there to go on in their place
        scores = self.scores / float(made**beams.length_penalty)
        for barred in (full, ~hopeful, ~ends):
            scores = scores + barred.float() * NONE
        return Hypotheses(self.tokens, torch.full_like(self.parents, made), scores, ends, self.rows)

    def running(self, width: int) -> Candidates:
        """The best K of those that do not end."""
        scores, places = (self.scores + self.ends.float() * NONE).topk(width)  # (B, K)
        parents, ends = self.parents.gather(1, places), self.ends.gather(1, places)
        return Candidates(_taken(self.tokens, places), scores, parents, ends, _taken(self.rows, places))


def beam_search(
    decoder: Decoder[S],
    ids: Tensor,
    mask: Tensor | None,
    *,
    beams: Beams,
    choice: Choice,
    new_tokens: int,
    eos: tuple[int, ...],
    pad: int,
    lengths: Sequence[int],
    on_token: Callable[[int], None] | None = None,
) -> Hypotheses:
    """The best `beams.width` hypotheses of each row of ids (B, N); arguments as in `generate`, which checks them.

    lengths: tokens in each row's prompt, padding left out.  The prompt is read once per row, not once per beam.
    """
    logits, state = decoder.begin(ids, mask, length=ids.shape[1] + new_tokens - 1)  # nobody reads the last token
    device, (batch, vocab), width = logits.device, logits.shape, beams.width
    each = torch.arange(batch, device=device).repeat_interleave(width)  # (B·K,)
    state.keep(each)
    logits = logits[each]  # (B·K, V)
    repeated = [n for n in lengths for _ in range(width)]
    filters = Filters(choice, vocab=vocab, eos=eos, new_tokens=new_tokens, lengths=repeated, device=device)
    prompt = (ids if mask is None else torch.where(mask, ids, vocab)).to(device)[each]  # (B·K, N)
    ended = Hypotheses.none(batch, width, new_tokens, pad, device)
    live = _first(ended)
    hopeful = torch.ones(batch, 1, dtype=torch.bool, device=device)  # can a row still better its worst?
    for made in range(1, new_tokens + 1):
        scores = _scored(logits, filters, prompt, live, made - 1)
        found = _candidates(scores, live, filters.eos, made)
        full = ended.there.all(1, keepdim=True) & (beams.early_stopping is True)  # (B, 1)
        ended, live = ended.best(found.ended(beams, made, full, hopeful)), found.running(width)
        hopeful = hopeful & _can_improve(live.scores, ended, beams, made, new_tokens)
        if on_token is not None:
            on_token(made)
        if not _goes_on(hopeful, ended, found.ends, beams):
            break
        state.keep((live.parents + width * torch.arange(batch, device=device)[:, None]).flatten())
        logits = decoder.step(state, live.tokens[:, :, made - 1].flatten())
    tell_beams(ended.rows[:, : beams.returned].flatten(0, 1), made)
    return ended


def _first(empty: Hypotheses) -> Candidates:
    """K equal beams, of which only the first counts: else the first step would find each token K times."""
    scores = torch.full_like(empty.scores, NONE)
    scores[:, 0] = 0
    return Candidates(empty.tokens, scores, torch.zeros_like(empty.lengths), empty.there, empty.rows)


def _scored(logits: Tensor, filters: Filters, prompt: Tensor, live: Candidates, made: int) -> Tensor:
    """Summed log probabilities (B, K·V) of every continuation."""
    seen = prompt
    if filters.reads_seen:
        seen = torch.cat([prompt, live.tokens[:, :, :made].flatten(0, 1)], 1)  # (B·K, N + made)
    steps = filters(logits.float().log_softmax(-1), seen, made)  # (B·K, V)
    return (steps.view(*live.scores.shape, -1) + live.scores[:, :, None]).flatten(1)


def _candidates(scores: Tensor, live: Candidates, eos: Tensor, made: int) -> Candidates:
    """The best of (B, K·V): so many that K go on even if every end token of every beam is among them."""
    _, width, room = live.tokens.shape
    best, places = scores.topk(max(2, 1 + len(eos)) * width)  # (B, C)
    vocab = scores.shape[1] // width
    parents, chosen = places // vocab, places % vocab
    tokens = _taken(live.tokens, parents)  # (B, C, T)
    tokens[:, :, made - 1] = chosen
    rows = _taken(live.rows, parents)
    each = torch.arange(len(rows), device=rows.device)[:, None]
    rows[:, :, made - 1] = each if made == 1 else each * width + parents  # the prompt is read once for all beams
    ends = torch.isin(chosen, eos)
    return Candidates(tokens, best, parents, ends if made < room else torch.ones_like(ends), rows)


def _can_improve(scores: Tensor, ended: Hypotheses, beams: Beams, made: int, room: int) -> Tensor:
    """Could a row's best running beam still beat its worst ended hypothesis? (B, 1)"""
    length = room if beams.early_stopping == "never" and beams.length_penalty > 0 else made
    best = scores[:, :1] / float(length**beams.length_penalty)
    worst = torch.where(ended.there, ended.scores.amin(1, keepdim=True), NONE)  # (B, K)
    return (best > worst).any(1, keepdim=True)


def _goes_on(hopeful: Tensor, ended: Hypotheses, ends: Tensor, beams: Beams) -> bool:
    """Has any row something to gain, and a beam to gain it with? Waits for the device."""
    stopped = ~hopeful.any() | ends.all()
    if beams.early_stopping is True:
        stopped = stopped | ended.there.all()
    return not bool(stopped)


def _taken(tokens: Tensor, places: Tensor) -> Tensor:
    """(B, K, T) at places (B, C) → (B, C, T)."""
    return tokens.gather(1, places[:, :, None].expand(-1, -1, tokens.shape[2]))
