"""Beam search: the sequences of highest summed log probability, found by keeping the best few at each step.

    B rows, K beams, V tokens
    scores (B, K) + log probabilities (B, K, V) → the best 2K of K·V → those that end here compete with those that ended
                                                                     → the best K of the others go on

Token ids equal those of `transformers`, ties included: the numbers are added in the same order and the same −1e9 stands
for "not a candidate". A hypothesis's score is its summed log probability ÷ (number of new tokens) ** length_penalty.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from regard.op import tell_rows

if TYPE_CHECKING:
    from regard.generation.loop import TokenLoop

__all__ = ["beam_search"]

NONE = -1e9  # added to the score of what is not a candidate


@dataclass(frozen=True, eq=False)
class Hypotheses:
    """Ended sequences of each row, best first; until there are K, places are held by ones of score −1e9."""

    tokens: Tensor  # (B, K, T)
    lengths: Tensor  # (B, K)
    scores: Tensor  # (B, K)
    there: Tensor  # (B, K) is it a sequence, or does it hold a place?
    rows: Tensor  # (B, K, T) the batch row of the pass that gave each token; −1 after the end

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

    def continued(self, scores: Tensor, eos: Tensor, made: int) -> Candidates:
        """The best of scores (B, K·V): so many that K go on even if every end token of every beam is among them."""
        _, width, room = self.tokens.shape
        best, places = scores.topk(max(2, 1 + len(eos)) * width)  # (B, C)
        vocab = scores.shape[1] // width
        parents, chosen = places // vocab, places % vocab
        tokens, rows = _taken(self.tokens, parents), _taken(self.rows, parents)  # (B, C, T)
        tokens[:, :, made - 1] = chosen
        each = torch.arange(len(rows), device=rows.device)[:, None]
        rows[:, :, made - 1] = each if made == 1 else each * width + parents  # the prompt is read once for all beams
        ends = torch.isin(chosen, eos) if made < room else torch.ones_like(chosen, dtype=torch.bool)
        return Candidates(tokens, best, parents, ends, rows)

    def ended(self, width: int, length_penalty: float, made: int, barred: Tensor) -> Hypotheses:
        """Those that end here, of the first K, in rows that are not barred (B, 1) from more."""
        ends = self.ends.clone()
        ends[:, width:] = False  # the others are there to go on in their place
        scores = self.scores / float(made**length_penalty) + barred.float() * NONE + (~ends).float() * NONE
        return Hypotheses(self.tokens, torch.full_like(self.parents, made), scores, ends, self.rows)

    def running(self, width: int) -> Candidates:
        """The best K of those that do not end."""
        scores, places = (self.scores + self.ends.float() * NONE).topk(width)  # (B, K)
        parents, ends = self.parents.gather(1, places), self.ends.gather(1, places)
        return Candidates(_taken(self.tokens, places), scores, parents, ends, _taken(self.rows, places))


def beam_search(loop: TokenLoop, on_token: Callable[[int], None] | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """The best num_return_sequences hypotheses of each row: tokens (R, n), lengths (R,) and scores (R,).

    The prompt is read once per row, not per beam. Raises ValueError if scores are NaN.
    """
    config, new_tokens = loop.config, loop.max_new_tokens
    width, length_penalty = config.num_beams or 1, 1.0 if config.length_penalty is None else config.length_penalty
    # 1. Prefill: read each prompt once, then repeat its state for each beam.
    logits, state, prompt, filters = loop.begin(width)
    device, batch = logits.device, len(logits)
    each = torch.arange(batch, device=device).repeat_interleave(width)  # (B·K,)
    state.keep(each)
    logits, prompt = logits[each], prompt[each]  # (B·K, V), (B·K, N)
    # No hypothesis yet, and K equal beams, of which only the first counts: else the first step would find each token K
    # times.
    tokens = torch.full((batch, width, new_tokens), loop.pad, dtype=torch.long, device=device)
    zeros, rows = torch.zeros(batch, width, dtype=torch.long, device=device), torch.full_like(tokens, -1)
    ended = Hypotheses(tokens, zeros, torch.full_like(zeros, NONE, dtype=torch.float), zeros.bool(), rows)
    live = Candidates(tokens, ended.scores.clone(), zeros, zeros.bool(), rows)
    live.scores[:, 0] = 0
    hopeful = torch.ones(batch, 1, dtype=torch.bool, device=device)  # can a row still better its worst?
    # 2. Decode: score every continuation, keep those that end and the best that go on.
    for made in range(1, new_tokens + 1):
        seen = prompt
        if filters.reads_tokens:
            seen = torch.cat([prompt, live.tokens[:, :, : made - 1].flatten(0, 1)], 1)  # (B·K, N + made − 1)
        steps = filters(logits.float().log_softmax(-1), seen, made - 1)  # (B·K, V)
        scores = (steps.view(batch, width, -1) + live.scores[:, :, None]).flatten(1)  # (B, K·V)
        candidates = live.continued(scores, filters.eos, made)
        full = ended.there.all(1, keepdim=True) & (config.early_stopping is True)  # (B, 1)
        ended = ended.best(candidates.ended(width, length_penalty, made, full | ~hopeful))
        live = candidates.running(width)
        # Could a row's best running beam still beat its worst ended hypothesis?
        final = new_tokens if config.early_stopping == "never" and length_penalty > 0 else made
        best = live.scores[:, :1] / float(final**length_penalty)
        worst = torch.where(ended.there, ended.scores.amin(1, keepdim=True), NONE)  # (B, K)
        hopeful = hopeful & (best > worst).any(1, keepdim=True)
        if on_token is not None:
            on_token(made)
        stopped = ~hopeful.any() | candidates.ends.all()
        if config.early_stopping is True:
            stopped = stopped | ended.there.all()
        if bool(stopped):  # waits for the device
            break
        state.keep((live.parents + width * torch.arange(batch, device=device)[:, None]).flatten())
        logits, loop.passes = loop.decoder.step(state, live.tokens[:, :, made - 1].flatten()), made + 1
    # 3. The best of each row.
    returned = config.num_return_sequences or 1
    tell_rows(ended.rows[:, :returned].flatten(0, 1), made)
    tokens, counts, scores = (x[:, :returned].flatten(0, 1) for x in (ended.tokens, ended.lengths, ended.scores))
    if bool(scores.isnan().any()):
        raise ValueError("the scores of the beams are NaN: look at the model's logits, its weights and dtype")
    return tokens[:, : int(counts.max())].clone(), counts, scores


def _taken(tokens: Tensor, places: Tensor) -> Tensor:
    """(B, K, T) at places (B, C) → (B, C, T)."""
    return tokens.gather(1, places[:, :, None].expand(-1, -1, tokens.shape[2]))
