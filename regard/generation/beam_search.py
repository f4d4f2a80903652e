"""Beam search: the sequences of highest summed log probability, found by keeping the best few at each step.

    B rows, K beams, V tokens
    scores (B, K) + log probabilities (B, K, V) → the best 2K of K·V → those that end here compete with those that ended
                                                                     → the best K of the others go on

Token ids equal those of `transformers`, ties included: the numbers are added in the same order and the same −1e9 stands
for "not a candidate". A hypothesis's score is its summed log probability ÷ (number of new tokens) ** length_penalty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from regard.generation.config import GenerationConfig
from regard.generation.sampling import LogitsFilters
from regard.op import tell_beams

if TYPE_CHECKING:
    from regard.generation.loop import Decoder, S

__all__ = ["Hypotheses", "beam_search"]

NONE = -1e9  # added to the score of what is not a candidate


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

    def ended(self, width: int, length_penalty: float, made: int, full: Tensor, hopeful: Tensor) -> Hypotheses:
        """Those that end here, of the first K, in rows that are not full (B, 1) and still hopeful (B, 1)."""
        ends = self.ends.clone()
        ends[:, width:] = False  # the others are there to go on in their place
        scores = self.scores / float(made**length_penalty)
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
    input_ids: Tensor,
    attention_mask: Tensor | None,
    config: GenerationConfig,
    *,
    lengths: Sequence[int],
    on_token: Callable[[int], None] | None = None,
) -> Hypotheses:
    """The best `num_beams` hypotheses of each row of input_ids (B, N). The prompt is read once per row, not per beam.

    Args:
        decoder: reads the prompt and steps.
        input_ids: (B, N) prompts, checked by `generate`.
        attention_mask: (B, N), True = token, padding on the left; None if all are tokens.
        config: with max_new_tokens and pad_token_id set.
        lengths: number of tokens of each row's prompt, padding left out.
        on_token: called after each step with the number of steps made.
    """
    width, new_tokens, pad = config.num_beams or 1, config.max_new_tokens, config.pad_token_id
    assert new_tokens is not None
    assert pad is not None
    length_penalty = 1.0 if config.length_penalty is None else config.length_penalty
    # 1. Prefill: read each prompt once, then repeat its state for each beam.
    length = input_ids.shape[1] + new_tokens - 1  # the last token is not read
    logits, state = decoder.begin(input_ids, attention_mask, length=length)
    device, (batch, vocabulary) = logits.device, logits.shape
    each = torch.arange(batch, device=device).repeat_interleave(width)  # (B·K,)
    state.keep(each)
    logits = logits[each]  # (B·K, V)
    repeated = [n for n in lengths for _ in range(width)]
    filters = LogitsFilters(config, vocabulary=vocabulary, lengths=repeated, device=device)
    tokens = input_ids if attention_mask is None else torch.where(attention_mask, input_ids, vocabulary)
    prompt = tokens.to(device)[each]  # (B·K, N)
    ended = Hypotheses.none(batch, width, new_tokens, pad, device)
    live = _first(ended)
    hopeful = torch.ones(batch, 1, dtype=torch.bool, device=device)  # can a row still better its worst?
    # 2. Decode: score every continuation, keep those that end and the best that go on.
    for made in range(1, new_tokens + 1):
        scores = _scored(logits, filters, prompt, live, made - 1)
        found = _candidates(scores, live, filters.eos, made)
        full = ended.there.all(1, keepdim=True) & (config.early_stopping is True)  # (B, 1)
        ended = ended.best(found.ended(width, length_penalty, made, full, hopeful))
        live = found.running(width)
        # Could a row's best running beam still beat its worst ended hypothesis?
        final = new_tokens if config.early_stopping == "never" and length_penalty > 0 else made
        best = live.scores[:, :1] / float(final**length_penalty)
        worst = torch.where(ended.there, ended.scores.amin(1, keepdim=True), NONE)  # (B, K)
        hopeful = hopeful & (best > worst).any(1, keepdim=True)
        if on_token is not None:
            on_token(made)
        stopped = ~hopeful.any() | found.ends.all()
        if config.early_stopping is True:
            stopped = stopped | ended.there.all()
        if bool(stopped):  # waits for the device
            break
        state.keep((live.parents + width * torch.arange(batch, device=device)[:, None]).flatten())
        logits = decoder.step(state, live.tokens[:, :, made - 1].flatten())
    tell_beams(ended.rows[:, : config.num_return_sequences or 1].flatten(0, 1), made)
    return ended


def _first(empty: Hypotheses) -> Candidates:
    """K equal beams, of which only the first counts: else the first step would find each token K times."""
    scores = torch.full_like(empty.scores, NONE)
    scores[:, 0] = 0
    return Candidates(empty.tokens, scores, torch.zeros_like(empty.lengths), empty.there, empty.rows)


def _scored(logits: Tensor, filters: LogitsFilters, prompt: Tensor, live: Candidates, made: int) -> Tensor:
    """Summed log probabilities (B, K·V) of every continuation."""
    seen = prompt
    if filters.reads_tokens:
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


def _taken(tokens: Tensor, places: Tensor) -> Tensor:
    """(B, K, T) at places (B, C) → (B, C, T)."""
    return tokens.gather(1, places[:, :, None].expand(-1, -1, tokens.shape[2]))
