"""The parts of models: activations, feed-forward, embedding, block, tower of blocks, and the heads on top of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from operator import and_
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear, pad, relu, silu

from regard import masks
from regard.checks import is_distributed, may_read
from regard.masks import Mask
from regard.nn.attention import MultiHeadAttention
from regard.nn.projections import AttentionLayer, Cache, ContextKeys, Joined, Linear, separate, untouched, whole_output
from regard.rotary import Angles, Rotary


def quick_gelu(x: Tensor) -> Tensor:
    """x · σ(1.702 x), an approximation of GELU (Hendrycks and Gimpel 2016, section 2) that CLIP was trained with."""
    return x * torch.sigmoid(1.702 * x)


gelu_tanh = partial(gelu, approximate="tanh")
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": gelu,
    "gelu_fast": gelu_tanh,
    "gelu_new": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "quick_gelu": quick_gelu,
    "relu": relu,
    "silu": silu,
    "swish": silu,
    "tanh": torch.tanh,
}
"""By the names that checkpoints use."""

gelu_ = torch.ops.aten.gelu_.default
OVERWRITING: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": gelu_,
    "gelu_fast": partial(gelu_, approximate="tanh"),
    "gelu_new": partial(gelu_, approximate="tanh"),
    "gelu_pytorch_tanh": partial(gelu_, approximate="tanh"),
    "relu": torch.relu_,
    "silu": partial(silu, inplace=True),
    "swish": partial(silu, inplace=True),
    "tanh": torch.tanh_,
}
"""The same numbers, bit by bit, in place, for those that torch has."""


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """The function of that name. Raises ValueError with the known names."""
    if name not in ACTIVATIONS:
        raise ValueError(f"unknown activation {name!r:.80}; there are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


INNER = {"cpu": 1 << 22}  # numbers after w_in at once without gradients: on the CPU up to 1.2 times as fast
INNER_ELSEWHERE = 1 << 27  # for memory alone: of 65,536 tokens of LLaMA-7B they would take 8 GiB in bf16


class FeedForward(nn.Module):
    """Two layers applied to each position: w_out(f(w_in(x))), or gated, w_out(f(gate) · up) (LLaMA, T5 v1.1).

    >>> FeedForward(6, 10, "gelu")(torch.zeros(2, 5, 6)).shape
    torch.Size([2, 5, 6])

    function: a name of `ACTIVATIONS`.  gated: w_in computes gate and up at once.  dropout: before w_out.
    """

    def __init__(
        self, d_model: int, d_ff: int, function: str, *, gated: bool = False, bias: bool = True, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.w_in = Joined(d_model, (d_ff, d_ff), bias=bias) if gated else Linear(d_model, d_ff, bias)
        self.w_out = Linear(d_ff, d_model, bias)
        self.dropout = nn.Dropout(dropout)
        self.function, self.activation, self.gated = activation(function), function, gated
        self.d_ff, self.separated = d_ff, False

    def forward(self, x: Tensor) -> Tensor:
        """x (…, d_model) → (…, d_model)."""
        rows = max(1, INNER.get(x.device.type, INNER_ELSEWHERE) // (self.d_ff * (2 if self.gated else 1)))
        whole = x.numel() <= rows * x.shape[-1] or self.training or torch.is_grad_enabled() or self.separated
        if whole or torch.compiler.is_compiling() or not (untouched(self.w_in) and untouched(self.w_out)):
            return self._at_once(x)
        return torch.cat([self._at_once(part) for part in torch.split(x.flatten(0, -2), rows)]).view(x.shape)

    def _at_once(self, x: Tensor) -> Tensor:
        if self.separated:
            y = self.function(self.w_gate(x)) * self.w_up(x)  # (…, d_ff)
        elif self.gated:
            gate, up = whole_output(self.w_in, x, 2 * self.d_ff).chunk(2, -1)
            y = self.function(gate) * up
        else:
            # In place where nothing else can hold the output of w_in: a new buffer of this size costs the CPU as much
            # in page faults as the function itself.
            in_place = None if torch.is_grad_enabled() or not untouched(self.w_in) else OVERWRITING.get(self.activation)
            y = (in_place or self.function)(self.w_in(x))
        return cast(Tensor, self.w_out(self.dropout(y)))

    def separate(self) -> None:
        """Turn the w_in of a gated feed-forward into w_gate and w_up, so that each can be split over processes.

        Parameters are new: make the optimizer afterwards. Raises ValueError if an adapter or a hook is on w_in.
        """
        if self.gated and not self.separated:
            self.w_gate, self.w_up = separate(self.w_in, (self.d_ff, self.d_ff))
            del self.w_in
            self.separated = True


class Waves(nn.Module):
    """The sines and cosines of the 2017 paper at any positions, without a table or a limit.

    halves: all sines, then all cosines (Marian, tensor2tensor), instead of alternating (the paper).
    """

    def __init__(self, d: int, *, halves: bool = False) -> None:
        super().__init__()
        if d < 2 or d % 2:
            raise ValueError(f"sines and cosines need an even width, got {d}")
        self.d, self.halves = d, halves

    def forward(self, positions: Tensor) -> Tensor:
        """Integers (…) → (…, d) in fp32, computed in fp64."""
        pairs = torch.arange(0, self.d, 2, dtype=torch.float64, device=positions.device)
        angles = positions.double().unsqueeze(-1) * 10000.0 ** -(pairs / self.d)  # (…, d/2)
        both = (angles.sin(), angles.cos())
        return (torch.cat(both, -1) if self.halves else torch.stack(both, -1).flatten(-2)).float()


class Inserted(NamedTuple):
    """Vectors in place of some of a text's tokens: an image's patches among the text.

    The caller must give as many vectors as places: counting them here would wait for the device.
    """

    places: Tensor  # (B, N) booleans, True at the place of the next vector
    vectors: Tensor  # (number of places, d), text after text


class Embedding(nn.Module):
    """Token ids to vectors: token + position + segment, then norm, dropout and a wider projection.

    >>> embed = Embedding(11, 6, positions=nn.Embedding(7, 6))
    >>> embed(torch.tensor([[3, 1, 2]]), torch.arange(3)).shape
    torch.Size([1, 3, 6])

    offset: added to the positions before they are looked up.  types: number of segments.  norm: of the sum.
    widen: width of the model if it is not d (ALBERT).  scale: of the token vectors.
    """

    def __init__(
        self,
        vocabulary: int,
        d: int,
        *,
        positions: nn.Embedding | Waves | None = None,
        offset: int = 0,
        types: int = 0,
        norm: nn.Module | None = None,
        widen: int | None = None,
        scale: float = 1.0,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, d)
        self.positions, self.offset, self.scale = positions, offset, scale
        self.types = nn.Embedding(types, d) if types else None
        self.norm = norm
        self.dropout = nn.Dropout(dropout)
        self.widen = None if widen is None else Linear(d, widen)

    @property
    def max_positions(self) -> int | None:
        """The number of positions, or None without a limit."""
        return self.positions.num_embeddings - self.offset if isinstance(self.positions, nn.Embedding) else None

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        token_type_ids: Tensor | None = None,
        inserted: Inserted | None = None,
    ) -> Tensor:
        """input_ids (B, N), position_ids (N,) or (B, N), token_type_ids (B, N) or None for segment 0 → (B, N, d)."""
        x = self.tokens(input_ids)  # (B, N, d)
        if self.scale != 1.0:
            x = x * self.scale
        if inserted is not None:
            x = x.masked_scatter(inserted.places.unsqueeze(-1), inserted.vectors.to(x.dtype))
        if self.types is not None:
            x = x + (self.types.weight[0] if token_type_ids is None else self.types(token_type_ids))
        if self.positions is not None:
            x = x + self.positions(position_ids + self.offset).to(x.dtype)
        if self.norm is not None:
            x = self.norm(x)
        x = self.dropout(x)
        return x if self.widen is None else cast(Tensor, self.widen(x))


class DropPath(nn.Module):
    """Stochastic depth: in training, a branch is dropped with probability p for whole batch entries, and scaled for the
    others.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise ValueError(f"a drop-path probability must be in [0, 1), got {p}")
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """(B, …) → (B, …)."""
        if not self.training or self.p == 0:
            return x
        stays = torch.rand(len(x), *(1,) * (x.ndim - 1), device=x.device) >= self.p
        return torch.where(stays, x / (1 - self.p), torch.zeros((), dtype=x.dtype, device=x.device))


class Block(nn.Module):
    """Self-attention, cross-attention if the block has it, and feed-forward, each added to x and normalised.

    >>> norms = [nn.LayerNorm(6) for _ in range(2)]
    >>> block = Block(MultiHeadAttention(6, 2), FeedForward(6, 10, "relu"), norms, norm_first=False)
    >>> block(torch.zeros(2, 5, 6)).shape
    torch.Size([2, 5, 6])

    norms: one for each part, in order.  norm_first: x + f(norm(x)) (GPT-2, LLaMA), else norm(x + f(x)) (2017, BERT).
    cross: attention to an encoder's output.  dropout: on the output of each part.  scales: a learnt scale per feature
    for the outputs of attention and feed-forward (DINOv2).
    """

    def __init__(
        self,
        attention: AttentionLayer,
        feed_forward: FeedForward,
        norms: Sequence[nn.Module],
        *,
        norm_first: bool,
        cross: AttentionLayer | None = None,
        dropout: float | DropPath = 0.0,
        scales: bool = False,
    ) -> None:
        super().__init__()
        self.attention, self.cross, self.feed_forward = attention, cross, feed_forward
        d = attention.d_model
        self.attention_scale = nn.Parameter(torch.ones(d)) if scales else None
        self.feed_forward_scale = nn.Parameter(torch.ones(d)) if scales else None
        assert len(norms) == (2 if cross is None else 3), len(norms)
        self.attention_norm, self.feed_forward_norm = norms[0], norms[-1]
        self.cross_norm = None if cross is None else norms[1]
        self.norm_first = norm_first
        self.dropout = dropout if isinstance(dropout, DropPath) else nn.Dropout(dropout)

    def forward(
        self,
        x: Tensor,
        *,
        mask: Mask | None = None,
        cache: Cache | None = None,
        positions: Tensor | Angles | None = None,
        encoder_hidden_states: Tensor | ContextKeys | None = None,
        encoder_mask: Mask | None = None,
    ) -> Tensor:
        """x (B, N, d) → (B, N, d). Without encoder_hidden_states `cross` is skipped: BLIP reads a text alone."""
        attend = partial(self.attention, mask=mask, cache=cache, positions=positions)
        x = self._add(x, self.attention_norm, attend, self.attention_scale)
        if self.cross is not None and encoder_hidden_states is not None:
            assert self.cross_norm is not None
            cross = partial(self.cross, context=encoder_hidden_states, mask=encoder_mask)
            x = self._add(x, self.cross_norm, cross)
        return self._add(x, self.feed_forward_norm, self.feed_forward, self.feed_forward_scale)

    def _add(self, x: Tensor, norm: nn.Module, part: Callable[[Tensor], Tensor], scale: Tensor | None = None) -> Tensor:
        added = part(norm(x) if self.norm_first else x)
        added = self.dropout(added if scale is None else added * scale)
        return x + added if self.norm_first else cast(Tensor, norm(x + added))


def encoder_block(
    d: int, heads: int, d_ff: int, function: str, *, eps: float, dropout: float, attention_dropout: float
) -> Block:
    """A block of the 2017 encoder: BERT's, ALBERT's and DistilBERT's. function: a name of `ACTIVATIONS`."""
    # Query, key and value stay separate as they are stored: joined they would be copied at loading, and be no faster.
    attention = MultiHeadAttention(d, heads, dropout=attention_dropout)
    norms = [nn.LayerNorm(d, eps), nn.LayerNorm(d, eps)]
    return Block(attention, FeedForward(d, d_ff, function), norms, norm_first=False, dropout=dropout)


class TowerOutput(NamedTuple):
    """The output of a tower."""

    last_hidden_state: Tensor  # (B, N, d)
    # The embedding, then each block's output, the last one normed unless the tower says otherwise.
    hidden_states: tuple[Tensor, ...] | None


class Tower(nn.Module):
    """An embedding and blocks: an encoder, or with `causal` a decoder.

    order: index of the block at each depth, if blocks are used more than once (ALBERT).
    norm, dropout: after the last block.
    last_is_normed: whether the last of `hidden_states` is normed, as in most text models, unlike in CLIP.
    """

    def __init__(
        self,
        embed: Embedding,
        blocks: Sequence[Block],
        *,
        causal: bool,
        order: Sequence[int] | None = None,
        norm: nn.Module | None = None,
        dropout: float = 0.0,
        last_is_normed: bool = True,
    ) -> None:
        super().__init__()
        self.embed, self.blocks, self.norm = embed, nn.ModuleList(blocks), norm
        self.last_is_normed = last_is_normed
        self.order = tuple(range(len(blocks))) if order is None else tuple(order)
        self.causal, self.dropout = causal, nn.Dropout(dropout)
        positions = (getattr(block.attention, "position", None) for block in blocks)
        rotaries = [position for position in positions if isinstance(position, Rotary)]
        assert all(rotary == rotaries[0] for rotary in rotaries)
        self.rotary = rotaries[0] if rotaries else None  # its angles are computed once for all blocks

    @property
    def depth(self) -> list[Block]:
        """The block at each depth."""
        return [cast(Block, self.blocks[i]) for i in self.order]

    def forward(
        self,
        input_ids: Tensor,
        *,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        caches: Sequence[Cache] | None = None,
        encoder_hidden_states: Tensor | Sequence[ContextKeys] | None = None,
        encoder_attention_mask: Tensor | None = None,
        inserted: Inserted | None = None,
        document_ids: Tensor | None = None,
        output_hidden_states: bool = False,
    ) -> TowerOutput:
        """input_ids (B, N) → vectors.

        attention_mask: (B, Nk), True = token, over what the caches hold and input_ids.
        document_ids: (B, N) of packed documents: a token sees only its own; negative for padding.
        position_ids: (N,) or (B, N); by default tokens are counted and padding is not.
        encoder_hidden_states: (B, M, d), or its keys and values for each depth; encoder_attention_mask: (B, M).
        """
        if position_ids is None and document_ids is not None:
            position_ids = count_in_documents(document_ids)
        elif position_ids is None:
            position_ids = count(input_ids, attention_mask, len(caches[0]) if caches else 0)
        x = self.embed(input_ids, position_ids, token_type_ids, inserted)  # (B, N, d)
        angles = None
        if self.rotary is not None:
            angles = self.rotary.angles(position_ids, torch.promote_types(x.dtype, torch.float32))
        mask = visible(attention_mask, causal=self.causal, document_ids=document_ids)
        encoder_mask = visible(encoder_attention_mask, causal=False)
        hidden_states = [x] if output_hidden_states else []
        for number, block in enumerate(self.depth):
            encoded = encoder_hidden_states
            x = block(
                x,
                mask=mask,
                cache=caches[number] if caches else None,
                positions=angles,
                encoder_hidden_states=encoded if encoded is None or isinstance(encoded, Tensor) else encoded[number],
                encoder_mask=encoder_mask,
            )
            hidden_states += [x] if output_hidden_states else []
        if self.norm is not None:
            x = self.norm(x)
        x = self.dropout(x)
        if output_hidden_states and self.last_is_normed:
            hidden_states[-1] = x
        return TowerOutput(x, tuple(hidden_states) if output_hidden_states else None)

    def keys(self, encoder_hidden_states: Tensor) -> list[ContextKeys]:
        """Keys and values of an encoder's output for each depth, computed once for all steps of a decoder."""
        return [block.cross.keys(encoder_hidden_states) for block in self.depth if block.cross is not None]


def count(input_ids: Tensor, attention_mask: Tensor | None, before: int = 0) -> Tensor:
    """The positions of input_ids (B, N) that follow `before` others: tokens are counted, padding is not.

    >>> count(torch.zeros(1, 4), torch.tensor([[False, False, True, True]])).tolist()
    [[0, 0, 0, 1]]
    """
    n = input_ids.shape[1]
    if attention_mask is None:
        return torch.arange(before, before + n, device=input_ids.device)
    return (attention_mask.cumsum(1) - 1).clamp(min=0)[:, -n:]


def count_in_documents(document_ids: Tensor) -> Tensor:
    """Positions (B, N) that start again at 0 where the document id changes.

    >>> count_in_documents(torch.tensor([[0, 0, 0, 1, 1, -1]])).tolist()
    [[0, 1, 2, 0, 1, 0]]
    """
    places = torch.arange(document_ids.shape[1], device=document_ids.device)
    starts = pad(document_ids.diff(dim=1) != 0, (1, 0), value=True)
    return places - torch.where(starts, places, 0).cummax(1).values


def number_documents(document_ids: Tensor) -> Tensor:
    """Documents (B, N) numbered in their order, so that an id that comes back is another one; padding stays negative.

    >>> number_documents(torch.tensor([[7, 7, 4, 7, -1]])).tolist()
    [[0, 0, 1, 2, -1]]
    """
    number = pad(document_ids.diff(dim=1) != 0, (1, 0)).cumsum(1)
    return torch.where(document_ids < 0, document_ids, number)


CAUSAL = masks.causal()  # one for all steps of all decoders: its hash and its form are computed once


def visible(attention_mask: Tensor | None, *, causal: bool, document_ids: Tensor | None = None) -> Mask | None:
    """The mask of a tower: padding and other documents are hidden, and for a decoder also later positions."""
    parts = [
        CAUSAL if causal else None,
        None if attention_mask is None else masks.padding(attention_mask),
        None if document_ids is None else masks.documents(number_documents(document_ids)),
    ]
    given = [part for part in parts if part is not None]
    return reduce(and_, given) if given else None


# --------------------------------------------------------------------------------------------------------------- heads


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
