"""Task heads, which turn the output of a tower (`HeadInput`) into logits, and the poolers before them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from regard.checks import is_distributed, may_read
from regard.nn.blocks import activation
from regard.nn.linear import Linear, untouched


class HeadInput(NamedTuple):
    """The input of a head."""

    last_hidden_state: Tensor  # (B, N, d)
    pooler_output: Tensor | None  # (B, d)
    embedding: Tensor  # (V, e), the token embedding, for heads that share it
    attention_mask: Tensor | None  # (B, N), True = token
    input_ids: Tensor | None = None  # (B, N), for heads that look for a token in the text


class Pooler(nn.Module):
    """The first token's vector through one layer, to width `out` (default d): BERT, ALBERT, ViT."""

    def __init__(self, d: int, function: str = "tanh", *, out: int | None = None) -> None:
        super().__init__()
        self.dense, self.function = Linear(d, d if out is None else out), activation(function)

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        """(B, N, d) → (B, out)."""
        return self.function(self.dense(first_token(hidden, mask)))


class EndPooler(nn.Module):
    """The vector of each text's first end token (CLIP). end: its id; None takes the largest id of each text."""

    def __init__(self, end: int | None) -> None:
        super().__init__()
        self.end = end

    def ends(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        """(B, N) booleans, True at end tokens. Raises ValueError for a text without one."""
        # The padding token may be the end token, too.
        shown = input_ids if attention_mask is None else input_ids.masked_fill(~attention_mask, -1)
        ends = shown == (shown.amax(1, keepdim=True) if self.end is None else self.end)
        if may_read(ends, training=self.training) and not ends.any(1).all():
            raise ValueError(f"text {int(ends.any(1).int().argmin())} has no end token (id {self.end}) to sum it up")
        return ends

    def forward(self, hidden: Tensor, ends: Tensor) -> Tensor:
        """(B, N, d), ends (B, N) → (B, d)."""
        return first_token(hidden, ends)


class Transform(nn.Module):
    """A layer, an activation and a norm before the language-model head (BERT)."""

    def __init__(self, d: int, out: int, function: str, norm: nn.Module) -> None:
        super().__init__()
        self.dense, self.function, self.norm = Linear(d, out), activation(function), norm

    def forward(self, x: Tensor) -> Tensor:
        """(…, d) → (…, out)."""
        return cast(Tensor, self.norm(self.function(self.dense(x))))


class LanguageHead(nn.Module):
    """Logits over the vocabulary at every position.

    d: input width; None shares the embedding's table.  scale: of the vectors (T5 with a shared table).
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
        self.words = None if d is None else Linear(d, vocabulary, bias)
        self.bias = nn.Parameter(torch.zeros(vocabulary)) if bias and d is None else None

    def forward(self, x: HeadInput) -> Tensor:
        """→ (B, N, V)."""
        h = self.vectors(x.last_hidden_state)
        return linear(h, x.embedding, self.bias) if self.words is None else cast(Tensor, self.words(h))

    def vectors(self, hidden: Tensor) -> Tensor:
        """(…, d) → (…, e), what the output matrix is multiplied with."""
        h = hidden if self.transform is None else self.transform(hidden)
        return h if self.scale == 1.0 else h * self.scale

    def matrix(self, embedding: Tensor) -> tuple[Tensor, Tensor | None] | None:
        """The output matrix (V, e) and its bias; None if the layer must be called, as one with an adapter or split."""
        if self.words is None:
            return None if is_distributed(embedding) else (embedding, self.bias)
        if not untouched(self.words) or is_distributed(self.words.weight):
            return None
        return self.words.weight, self.words.bias


class Labels(nn.Module):
    """Logits over labels, of the text if `pooled` (B, labels), else of each token (B, N, labels)."""

    def __init__(self, d: int, labels: int, *, pooled: bool, bias: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.score, self.pooled, self.dropout = Linear(d, labels, bias), pooled, nn.Dropout(dropout)

    def forward(self, x: HeadInput) -> Tensor:
        """→ (B, labels) or (B, N, labels)."""
        h = x.pooler_output if self.pooled else x.last_hidden_state
        assert h is not None
        return cast(Tensor, self.score(self.dropout(h)))


class FirstToken(nn.Module):
    """Logits over labels from the first token, through a layer of its own (RoBERTa, DistilBERT).

    before, dropout: dropout before that layer and after it.
    """

    def __init__(self, d: int, labels: int, function: str, *, before: float = 0.0, dropout: float = 0.0) -> None:
        super().__init__()
        self.dense, self.function = Linear(d, d), activation(function)
        self.before, self.score, self.dropout = nn.Dropout(before), Linear(d, labels), nn.Dropout(dropout)

    def forward(self, x: HeadInput) -> Tensor:
        """→ (B, labels)."""
        h = self.before(first_token(x.last_hidden_state, x.attention_mask))  # (B, d)
        return cast(Tensor, self.score(self.dropout(self.function(self.dense(h)))))


class LastToken(nn.Module):
    """Logits over labels from the last token, which alone has seen all of a text (GPT-2, LLaMA)."""

    def __init__(self, d: int, labels: int) -> None:
        super().__init__()
        self.score = Linear(d, labels, bias=False)

    def forward(self, x: HeadInput) -> Tensor:
        """→ (B, labels)."""
        return cast(Tensor, self.score(last_token(x.last_hidden_state, x.attention_mask)))


def decoder_head(task: str, d: int, *, vocabulary: int, labels: int, tied: bool, dropout: float) -> nn.Module | None:
    """The head of a decoder for a task. tied: the head shares the embedding's table.  dropout: before token labels."""
    makers: dict[str, Callable[[], nn.Module | None]] = {
        "text-generation": lambda: LanguageHead(vocabulary, None if tied else d),
        "text-classification": lambda: LastToken(d, labels),
        "token-classification": lambda: Labels(d, labels, pooled=False, dropout=dropout),
        "question-answering": lambda: Labels(d, 2, pooled=False),
        "feature-extraction": lambda: None,
    }
    return makers[task]()


class EndToken(nn.Module):
    """Logits over labels from each text's last end token (id `end`), through a layer of its own (BART, T5)."""

    def __init__(self, d: int, labels: int, end: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.dense, self.score, self.end = Linear(d, d), Linear(d, labels), end
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: HeadInput) -> Tensor:
        """→ (B, labels). Raises ValueError for a text without an end token, or read in another length."""
        assert x.input_ids is not None
        if x.input_ids.shape != x.last_hidden_state.shape[:2]:
            raise ValueError(
                f"to classify, decoder_input_ids must have the shape of input_ids, {tuple(x.input_ids.shape)}: leave "
                "out decoder_input_ids="
            )
        ends = x.input_ids == self.end  # (B, N)
        if may_read(ends, training=self.training) and not ends.any(1).all():
            raise ValueError(f"text {int(ends.any(1).int().argmin())} has no end token (id {self.end}) to classify by")
        h = last_token(x.last_hidden_state, ends)  # (B, d)
        return cast(Tensor, self.score(self.dropout(torch.tanh(self.dense(self.dropout(h))))))


class PretrainingHead(nn.Module):
    """BERT's two tasks at once: masked language model, and whether the second text follows the first."""

    def __init__(self, words: LanguageHead, relation: Labels) -> None:
        super().__init__()
        self.words, self.relation = words, relation

    def forward(self, x: HeadInput) -> Tensor:
        """→ (B, N, V); `relation` is called separately."""
        return cast(Tensor, self.words(x))


def label_names(named: Sequence[str], count: int) -> tuple[str, ...]:
    """Names of a head's labels: those of config.json, or LABEL_0, … if it names another number of them.

    >>> label_names(("cat", "dog"), 2), label_names(("cat", "dog"), 3)
    (('cat', 'dog'), ('LABEL_0', 'LABEL_1', 'LABEL_2'))
    """
    return tuple(named) if len(named) == count else tuple(f"LABEL_{n}" for n in range(count))


def first_token(hidden: Tensor, mask: Tensor | None) -> Tensor:
    """The vector of each text's first token, (B, d), after any padding on the left."""
    if mask is None:
        return hidden[:, 0]
    return hidden[torch.arange(len(hidden), device=hidden.device), mask.int().argmax(1)]


def last_token(hidden: Tensor, mask: Tensor | None) -> Tensor:
    """The vector of each text's last token, (B, d)."""
    if mask is None:
        return hidden[:, -1]
    last = (mask * torch.arange(mask.shape[1], device=mask.device)).argmax(1)  # (B,)
    return hidden[torch.arange(len(hidden), device=hidden.device), last]
