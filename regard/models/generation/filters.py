"""What changes logits before a token is chosen: small pure functions (B, V) → (B, V), each with the meaning
`transformers` gives it.

`seen` (B, n) holds each row's tokens so far, the prompt's among them. An id of V or more stands for "no token": this is
how padding is left out, and how ids that the model reads but cannot write are.

It does not know which filters a user asked for, nor in which order they run.
"""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor

__all__ = [
    "ban",
    "force",
    "keep_likely",
    "keep_nucleus",
    "keep_top",
    "penalise_repeats",
    "prevent_ngrams",
    "withhold",
]


def penalise_repeats(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Divide the logits of tokens in `seen` by the penalty, or multiply the negative ones (CTRL, section 4.1).

    >>> penalise_repeats(torch.tensor([[4.0, -4.0, 4.0]]), torch.tensor([[0, 1, 1]]), 2.0).tolist()
    [[2.0, -8.0, 4.0]]
    """
    less = torch.where(logits < 0, logits * penalty, logits / penalty)
    return torch.where(_marked(seen, logits), less, logits)


def prevent_ngrams(logits: Tensor, seen: Tensor, n: int) -> Tensor:
    """Rule out each token that would complete n tokens which the row already holds in that order.

    >>> prevent_ngrams(torch.zeros(1, 3), torch.tensor([[0, 1, 2, 0]]), 2).tolist()
    [[0.0, -inf, 0.0]]
    """
    if seen.shape[1] < n:
        return logits
    windows = seen.unfold(1, n, 1)  # (B, n_windows, n)
    tail = seen[:, None, seen.shape[1] + 1 - n :]  # (B, 1, n − 1)
    again = (windows[..., :-1] == tail).all(-1)  # (B, n_windows)
    ends = torch.where(again, windows[..., -1], logits.shape[-1])
    return logits.masked_fill(_marked(ends, logits), -inf)


def ban(logits: Tensor, tokens: Tensor) -> Tensor:
    """Rule out tokens (n,) in every row.

    >>> ban(torch.zeros(1, 3), torch.tensor([0, 2])).tolist()
    [[-inf, 0.0, -inf]]
    """
    return logits.index_fill(1, tokens, -inf)


def withhold(logits: Tensor, tokens: Tensor, rows: Tensor) -> Tensor:
    """Rule out tokens (n,) in those rows where rows (B,) is True: the ends of what is still too short.

    >>> withhold(torch.zeros(2, 3), torch.tensor([2]), torch.tensor([True, False])).tolist()
    [[0.0, 0.0, -inf], [0.0, 0.0, 0.0]]
    """
    return torch.where(rows[:, None], ban(logits, tokens), logits)


def force(logits: Tensor, token: int, rows: Tensor) -> Tensor:
    """Leave nothing but one token, at logit 0, in those rows where rows (B,) is True.

    >>> force(torch.ones(2, 3), 1, torch.tensor([True, False])).tolist()
    [[-inf, 0.0, -inf], [1.0, 1.0, 1.0]]
    """
    only = torch.full_like(logits, -inf)
    only[:, token] = 0
    return torch.where(rows[:, None], only, logits)


def keep_top(logits: Tensor, k: int) -> Tensor:
    """Rule out what is below the k-th largest; ties with it stay (Fan et al. 2018).

    >>> keep_top(torch.tensor([[3.0, 1.0, 2.0]]), 2).tolist()
    [[3.0, -inf, 2.0]]
    """
    least = logits.topk(min(k, logits.shape[-1])).values[:, -1:]  # (B, 1)
    return logits.masked_fill(logits < least, -inf)


def keep_nucleus(logits: Tensor, p: float) -> Tensor:
    """Rule out the least likely tokens whose probabilities together are at most 1 − p (Holtzman et al. 2020).

    >>> (keep_nucleus(torch.tensor([[0.5, 0.3, 0.2]]).log(), 0.6) > -inf).tolist()
    [[True, True, False]]
    """
    rising, order = logits.sort(-1)
    out = rising.softmax(-1).cumsum(-1) <= 1 - p  # (B, V), least likely first
    out[:, -1] = False  # the most likely stays, however small p is
    return logits.masked_fill(out.scatter(1, order, out), -inf)


def keep_likely(logits: Tensor, p: float) -> Tensor:
    """Rule out what is less than p times as likely as the most likely token (min-p, Nguyen et al. 2024).

    >>> keep_likely(torch.tensor([[0.5, 0.25, 0.2]]).log(), 0.5).exp().tolist()
    [[0.5, 0.25, 0.0]]
    """
    probs = logits.softmax(-1)
    return logits.masked_fill(probs < p * probs.amax(-1, keepdim=True), -inf)


def _marked(tokens: Tensor, logits: Tensor) -> Tensor:
    """(B, n) ids → (B, V), True where the row holds the id; ids of V or more fall off."""
    vocab = logits.shape[-1]
    marks = torch.zeros(logits.shape[0], vocab + 1, dtype=torch.bool, device=logits.device)
    return marks.scatter_(1, tokens.clamp(max=vocab), True)[:, :vocab]
