"""Task heads: each takes a tower's output (`HeadInput`) and returns logits. And the poolers before them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from regard.nn.blocks import activation
from regard.nn.linear import Linear

__all__ = [
    "EndPooler",
    "EndToken",
    "FirstToken",
    "HeadInput",
    "Labels",
    "LanguageHead",
    "LastToken",
    "Pooler",
    "PretrainingHead",
    "Transform",
    "decoder_head",
    "label_names",
]


class HeadInput(NamedTuple):
    """What a head may read."""

    last_hidden_state: Tensor  # (B, N, d)
    pooler_output: Tensor | None  # (B, d)
    embedding: Tensor  # (V, e), the token embedding, for heads that share it
    attention_mask: Tensor | None  # (B, N), True = token
    input_ids: Tensor | None = None  # (B, N), for heads that look for a token in the text


class Pooler(nn.Module):
    """The first token's vector through one layer: BERT's and ALBERT's summary of a text, ViT's of an image.

    out: width of the summary, default d.
    """

    def __init__(self, d: int, function: str = "tanh", *, out: int | None = None) -> None:
        super().__init__()
        self.dense, self.function = Linear(d, d if out is None else out), activation(function)

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        """(B, N, d) → (B, out)."""
        return self.function(self.dense(first_token(hidden, mask)))


class EndPooler(nn.Module):
    """The vector of each text's end token, of the first where there are several: CLIP's summary of a text.

    >>> pooler, input_ids = EndPooler(9), torch.tensor([[5, 9, 9]])
    >>> pooler(torch.arange(3.0).reshape(1, 3, 1), pooler.ends(input_ids, None))
    tensor([[1.]])

    end: id of that token; None takes the largest id of each text for it.
    """

    def __init__(self, end: int | None) -> None:
        super().__init__()
        self.end = end

    def ends(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        """(B, N) booleans, True at ends. Raises ValueError for a text without one."""
        # Padding may be the end token, too.
        shown = input_ids if attention_mask is None else input_ids.masked_fill(~attention_mask, -1)
        ends = shown == (shown.amax(1, keepdim=True) if self.end is None else self.end)
        if not torch.compiler.is_compiling() and not ends.any(1).all():
            raise ValueError(f"text {int(ends.any(1).int().argmin())} has no end token (id {self.end}) to sum it up")
        return ends

    def forward(self, hidden: Tensor, ends: Tensor) -> Tensor:
        """(B, N, d), ends (B, N) → (B, d)."""
        return first_token(hidden, ends)


class Transform(nn.Module):
    """A layer, an activation and a norm before the words are scored (BERT's masked LM)."""

    def __init__(self, d: int, out: int, function: str, norm: nn.Module) -> None:
        super().__init__()
        self.dense, self.function, self.norm = Linear(d, out), activation(function), norm

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
        self.words = None if d is None else Linear(d, vocabulary, bias)
        self.bias = nn.Parameter(torch.zeros(vocabulary)) if bias and d is None else None

    def forward(self, x: HeadInput) -> Tensor:
        """→ (B, N, V)."""
        h = x.last_hidden_state if self.transform is None else self.transform(x.last_hidden_state)
        if self.scale != 1.0:
            h = h * self.scale
        return linear(h, x.embedding, self.bias) if self.words is None else cast(Tensor, self.words(h))


class Labels(nn.Module):
    """A score for each label from each position's vector, or from the pooled one.

    labels: how many.  pooled: score the text (B, labels), else each token (B, N, labels).
    """

    def __init__(self, d: int, labels: int, *, pooled: bool, bias: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.score, self.pooled, self.dropout = Linear(d, labels, bias), pooled, nn.Dropout(dropout)

    def forward(self, x: HeadInput) -> Tensor:
        """→ (B, labels) or (B, N, labels)."""
        h = x.pooler_output if self.pooled else x.last_hidden_state
        assert h is not None
        return cast(Tensor, self.score(self.dropout(h)))


class FirstToken(nn.Module):
    """A score for each label from the first token, through a layer of its own (RoBERTa, DistilBERT).

    function: after that layer.  before, dropout: dropout before the layer and after it, in training only.
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
    """A score for each label from the last token, which alone has seen all of a text (GPT-2, LLaMA)."""

    def __init__(self, d: int, labels: int) -> None:
        super().__init__()
        self.score = Linear(d, labels, bias=False)

    def forward(self, x: HeadInput) -> Tensor:
        """→ (B, labels)."""
        return cast(Tensor, self.score(last_token(x.last_hidden_state, x.attention_mask)))


def decoder_head(task: str, d: int, *, vocabulary: int, labels: int, tied: bool, dropout: float) -> nn.Module | None:
    """What a decoder has for a task: generate, classify, tag, answer, none.

    >>> decoder_head("text-classification", 6, vocabulary=11, labels=3, tied=True, dropout=0.0)
    LastToken(
      (score): Linear(in_features=6, out_features=3, bias=False)
    )

    d: width of the model.  tied: are words scored with the table that embeds them.  dropout: before tags are scored.
    """
    makers: dict[str, Callable[[], nn.Module | None]] = {
        "text-generation": lambda: LanguageHead(vocabulary, None if tied else d),
        "text-classification": lambda: LastToken(d, labels),
        "token-classification": lambda: Labels(d, labels, pooled=False, dropout=dropout),
        "question-answering": lambda: Labels(d, 2, pooled=False),
        "feature-extraction": lambda: None,
    }
    return makers[task]()


class EndToken(nn.Module):
    """A score for each label from where the text's last end token stands, through a layer of its own (BART, T5).

    end: id of that token.
    """

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
        if not torch.compiler.is_compiling() and not ends.any(1).all():
            raise ValueError(f"text {int(ends.any(1).int().argmin())} has no end token (id {self.end}) to classify by")
        h = last_token(x.last_hidden_state, ends)  # (B, d)
        return cast(Tensor, self.score(self.dropout(torch.tanh(self.dense(self.dropout(h))))))


class PretrainingHead(nn.Module):
    """BERT's two tasks at once: masked words, and whether the second text follows the first."""

    def __init__(self, words: LanguageHead, relation: Labels) -> None:
        super().__init__()
        self.words, self.relation = words, relation

    def forward(self, x: HeadInput) -> Tensor:
        """→ (B, N, V); `relation` is asked apart."""
        return cast(Tensor, self.words(x))


def label_names(named: Sequence[str], count: int) -> tuple[str, ...]:
    """What a head's labels are called: as config.json names them, LABEL_0 and so on where it names another number.

    >>> label_names(("cat", "dog"), 2), label_names(("cat", "dog"), 3)
    (('cat', 'dog'), ('LABEL_0', 'LABEL_1', 'LABEL_2'))
    """
    return tuple(named) if len(named) == count else tuple(f"LABEL_{n}" for n in range(count))


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
