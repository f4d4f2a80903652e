"""Heads: what is put on a tower for a task. Each takes what the tower made (`Seen`) and gives logits.

They know no family and no checkpoint.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from regard.models.parts import activation

__all__ = ["FirstToken", "Labels", "LanguageHead", "LastToken", "Pooler", "PretrainingHead", "Seen", "Transform"]


class Seen(NamedTuple):
    """What a head may look at."""

    hidden: Tensor  # (B, N, d)
    pooled: Tensor | None  # (B, d)
    embedding: Tensor  # (V, e), the table of the tokens, for heads that share it
    mask: Tensor | None  # (B, N), True = token


class Pooler(nn.Module):
    """The first token's vector through one layer: BERT's and ALBERT's summary of a text."""

    def __init__(self, d: int, function: str = "tanh") -> None:
        super().__init__()
        self.dense, self.function = nn.Linear(d, d), activation(function)

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        """(B, N, d) → (B, d)."""
        return self.function(self.dense(first_token(hidden, mask)))


class Transform(nn.Module):
    """A layer, an activation and a norm before the words are scored (BERT's masked LM)."""

    def __init__(self, d: int, out: int, function: str, norm: nn.Module) -> None:
        super().__init__()
        self.dense, self.function, self.norm = nn.Linear(d, out), activation(function), norm

    def forward(self, x: Tensor) -> Tensor:
        """(…, d) → (…, out)."""
        return cast(Tensor, self.norm(self.function(self.dense(x))))


class LanguageHead(nn.Module):
    """A score for every word of the vocabulary at every position.

    vocabulary: V.  d: width of what is scored; None shares the embedding's table.  transform: before it.
    bias: one number per word.  scale: of the vectors before scoring (T5 with a shared table).
    """

    bias: Tensor | None

    def __init__(
        self,
        vocabulary: int,
        d: int | None,
        *,
        transform: nn.Module | None = None,
        bias: bool = False,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.transform, self.scale = transform, scale
        self.words = None if d is None else nn.Linear(d, vocabulary, bias)
        self.bias = nn.Parameter(torch.zeros(vocabulary)) if bias and d is None else None

    def forward(self, seen: Seen) -> Tensor:
        """→ (B, N, V)."""
        x = seen.hidden if self.transform is None else self.transform(seen.hidden)
        if self.scale != 1.0:
            x = x * self.scale
        return linear(x, seen.embedding, self.bias) if self.words is None else cast(Tensor, self.words(x))


class Labels(nn.Module):
    """A score for each label from each position's vector, or from the pooled one.

    labels: how many.  pooled: score the text (B, labels), else each token (B, N, labels).
    """

    def __init__(self, d: int, labels: int, *, pooled: bool, bias: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.score, self.pooled, self.dropout = nn.Linear(d, labels, bias), pooled, nn.Dropout(dropout)

    def forward(self, seen: Seen) -> Tensor:
        """→ (B, labels) or (B, N, labels)."""
        x = seen.pooled if self.pooled else seen.hidden
        assert x is not None
        return cast(Tensor, self.score(self.dropout(x)))


class FirstToken(nn.Module):
    """A score for each label from the first token, through a layer of its own (RoBERTa, DistilBERT)."""

    def __init__(self, d: int, labels: int, function: str, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.dense, self.function = nn.Linear(d, d), activation(function)
        self.score, self.dropout = nn.Linear(d, labels), nn.Dropout(dropout)

    def forward(self, seen: Seen) -> Tensor:
        """→ (B, labels)."""
        return cast(Tensor, self.score(self.dropout(self.function(self.dense(first_token(seen.hidden, seen.mask))))))


class LastToken(nn.Module):
    """A score for each label from the last token, which alone has seen all of a text (GPT-2, LLaMA)."""

    def __init__(self, d: int, labels: int) -> None:
        super().__init__()
        self.score = nn.Linear(d, labels, bias=False)

    def forward(self, seen: Seen) -> Tensor:
        """→ (B, labels)."""
        return cast(Tensor, self.score(last_token(seen.hidden, seen.mask)))


class PretrainingHead(nn.Module):
    """BERT's two tasks at once: masked words, and whether the second text follows the first."""

    def __init__(self, words: LanguageHead, relation: Labels) -> None:
        super().__init__()
        self.words, self.relation = words, relation

    def forward(self, seen: Seen) -> Tensor:
        """→ (B, N, V); `relation` is asked apart."""
        return cast(Tensor, self.words(seen))


def first_token(hidden: Tensor, mask: Tensor | None) -> Tensor:
    """The vector of each text's first token, (B, d); padding on the left is passed over.

    >>> first_token(torch.arange(3.0).reshape(1, 3, 1), torch.tensor([[False, True, True]]))
    tensor([[1.]])
    """
    if mask is None:
        return hidden[:, 0]
    return hidden[torch.arange(len(hidden), device=hidden.device), mask.int().argmax(1)]


def last_token(hidden: Tensor, mask: Tensor | None) -> Tensor:
    """The vector of each text's last token, (B, d).

    >>> last_token(torch.arange(3.0).reshape(1, 3, 1), torch.tensor([[True, True, False]]))
    tensor([[1.]])
    """
    if mask is None:
        return hidden[:, -1]
    last = (mask * torch.arange(mask.shape[1], device=mask.device)).argmax(1)  # (B,)
    return hidden[torch.arange(len(hidden), device=hidden.device), last]
