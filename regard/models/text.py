"""Text models with one stack: encoders (BERT), decoders (GPT-2, LLaMA) with their state, and long-text encoders."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from regard.checks import being_captured, may_read
from regard.models.family import Config
from regard.models.losses import Targets, language_head, linear_loss, text_loss
from regard.models.model import Model
from regard.models.outputs import ModelOutput, named_logits
from regard.nn.attention import FixedCache
from regard.nn.blocks import (
    EndPooler,
    FeedForward,
    HeadInput,
    Inserted,
    LanguageHead,
    Pooler,
    PretrainingHead,
    Tower,
    TowerOutput,
    count,
)
from regard.nn.projections import Cache, ContextKeys, Linear
from regard.nn.sparse_attention import Roles
from regard.rotary import DynamicNTK, LongRope

if TYPE_CHECKING:
    from regard.generation.cuda_graph import CapturedStep


@dataclass(eq=False)
class ModelState:
    """What a model keeps between steps; memory for all positions is allocated once.

    Attributes:
        caches: one for each layer, as its attention makes it.
        mask: (B, positions so far), True = token, or None if there is no padding.
        length: the number of positions allocated.
        padding: (B,) how much padding each row has, if no cache holds any: then only positions depend on it.
        memory: keys and values of the encoder's output for each layer.
        memory_mask: which of these are tokens.
        readers: (B,) which row of the encoder's output each row attends to; None: each to its own.
        one_by_one: why tokens must be read one at a time, for `extend` to raise; None if several can be.
        captured: the step as a CUDA graph, if there is one.
    """

    caches: list[Cache]
    mask: Tensor | None
    length: int
    padding: Tensor | None = None
    memory: list[ContextKeys] | None = None
    memory_mask: Tensor | None = None
    readers: Tensor | None = None
    one_by_one: str | None = None
    captured: CapturedStep | None = None

    @classmethod
    def room(
        cls, tower: Tower, batch: int, length: int, mask: Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> ModelState:
        """Allocate `length` positions of `batch` texts for the layers of a tower with weights of this dtype.

        Raises ValueError if there is not enough memory, or an attention cannot run step by step.
        """
        kind = device.type
        autocast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        if autocast and dtype != torch.float64:  # which autocast leaves alone
            dtype = torch.get_autocast_dtype(kind)

        def caches(device: torch.device | str) -> list[Cache]:
            return [block.attention.new_cache(batch, length, dtype=dtype, device=device) for block in tower.depth]

        try:
            state = cls(caches(device), mask, length)
        except RuntimeError as error:  # out of memory
            gib = sum(cache.nbytes for cache in caches("meta")) / 2**30
            raise ValueError(
                f"{batch} texts of {length} positions take {gib:,.1f} GiB for keys and values, and {device} does not "
                "have as much: ask for fewer new tokens, texts or beams"
            ) from error
        scaling = None if tower.rotary is None else tower.rotary.scaling
        if not all(isinstance(cache, FixedCache) for cache in state.caches):
            state.one_by_one = "its attention keeps sums, from which no token can be taken back"
        elif isinstance(scaling, DynamicNTK | LongRope) and length > scaling.original:
            state.one_by_one = f"its positions beyond {scaling.original} depend on how many tokens are read at once"
        return state

    def __len__(self) -> int:
        return len(self.caches[0])

    @property
    def nbytes(self) -> int:
        """Bytes of caches and masks, without the encoder's output."""
        held = [t.nbytes for t in (self.mask, self.padding) if t is not None]
        return sum(cache.nbytes for cache in self.caches) + sum(held)

    @property
    def positions(self) -> Tensor | None:
        """(B, 1) positions of the next tokens if the mask was dropped; else None."""
        return None if self.padding is None else (len(self) - self.padding).unsqueeze(1)

    @property
    def padded_left(self) -> bool:
        """True if all padding is on the left."""
        return self.mask is None or bool((self.mask.int().diff(dim=1) >= 0).all())

    def forget_mask(self) -> None:
        """After the prompt: if no cache holds padding, keep its amount instead of a mask that grows."""
        if self.mask is not None and not any(cache.holds_padding for cache in self.caches):
            self.padding, self.mask = (~self.mask).sum(1), None

    def see(self, batch: int, count: int = 1) -> None:
        """Add `count` tokens to every row. Raises ValueError, before anything changes, if there is no room for them."""
        if len(self) + count > self.length:
            raise ValueError(f"no room for {count} more: {len(self)} of {self.length} positions are used")
        if count > 1 and self.one_by_one is not None:
            raise ValueError(f"the model cannot read {count} tokens at once: {self.one_by_one}")
        if self.mask is not None:
            self.mask = torch.cat([self.mask, self.mask.new_ones(batch, count)], 1)

    def crop(self, length: int) -> None:
        """Forget all but the first `length` positions."""
        for cache in cast("list[FixedCache]", self.caches):  # others are read one by one
            cache.crop(length)
        self.mask = None if self.mask is None else self.mask[:, :length]

    def keep(self, rows: Tensor) -> None:
        """Row i becomes the old row rows[i]; the number of rows may change."""
        if self.captured is not None:
            self.captured.keep(rows)
        for cache in self.caches:
            cache.keep(rows)
        self.mask = None if self.mask is None else self.mask[rows]
        self.padding = None if self.padding is None else self.padding[rows]
        if self.memory is None:
            return
        # Beams of one text attend to the same encoder output, and one of 577 patches is most of what a step would copy:
        # compare first, but not on a GPU, which copies sooner than it answers.
        batch = len(self.memory[0].k)
        before = torch.arange(batch, device=rows.device) if self.readers is None else self.readers
        self.readers = before[rows]
        if not rows.is_cpu or not torch.equal(self.readers, before):
            self.memory = [ContextKeys(k[rows], v[rows]) for k, v in self.memory]
            self.memory_mask = None if self.memory_mask is None else self.memory_mask[rows]


class TextModel(Model):
    """A text encoder or decoder: one tower, with a pooler and a task head if the task has them.

    max_positions: the longest text; by default as many as the table of positions has.
    """

    kind = "text"

    def __init__(
        self,
        config: Config,
        tower: Tower,
        *,
        pooler: Pooler | EndPooler | None = None,
        head: nn.Module | None = None,
        max_positions: int | None = None,
    ) -> None:
        super().__init__(config)
        self.tower, self.pooler, self.head = tower, pooler, head
        self.max_positions = tower.embed.max_positions if max_positions is None else max_positions

    @property
    def vocabulary(self) -> int:
        """How many tokens there are."""
        return self.tower.embed.tokens.num_embeddings

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        labels: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        global_attention_mask: Tensor | Roles | None = None,
        inserted: Inserted | None = None,
        output_hidden_states: bool | None = False,
        skip_logits: bool = False,
        **options: Any,
    ) -> ModelOutput:
        """Read texts.

        Args:
            input_ids: (B, N).
            attention_mask: (B, N), 1 or True = token; None if all are.
            token_type_ids: (B, N), the segment of each token (BERT, ALBERT).
            position_ids: (N,) or (B, N); by default tokens are counted and padding is not.
            document_ids: (B, N), the document of each token where several are packed in a row: a token sees only its
                own, and positions are counted in each. An id that comes back is another document. Negative for padding.
                Labels are taken as they are: set those that are not to be predicted from the token before to -100.
            labels: (B, N) token ids or labels, -100 = ignored, shifted by a causal language model; (B,) to classify.
            start_positions: (B,), question answering.
            end_positions: (B,), question answering.
            global_attention_mask: (B, N), 1 or True = token that sees all and is seen by all (Longformer); default by
                task. Padding is never global. Or the `Roles.of(attention_mask, global_attention_mask)` that the model
                would make of it: to make them once for many calls, or to capture calls in a CUDA graph.
            inserted: vectors that replace those of some tokens, as an image's do.
            output_hidden_states: return the output of every block.
            skip_logits: with labels, compute a language model's loss without its logits, which need much memory; they
                are None in the output.
            options: as `Model.read_options`; `label_smoothing` of the loss of token labels; with skip_logits
                `max_labels`, how many positions have a label at most (masked language models): only as many are scored,
                and with more the loss is NaN; for pretraining `next_sentence_label` (B,), or `sentence_order_label`
                (B,) of ALBERT.
        """
        relation = options.pop("next_sentence_label", options.pop("sentence_order_label", None))
        # Not in the signature: transformers.Trainer takes every argument with "label" in its name for labels.
        smoothing, most = options.pop("label_smoothing", 0.0), options.pop("max_labels", None)
        targets = Targets(labels, start_positions, end_positions, self.read_options(options), smoothing, most)
        attention_mask = self.check(input_ids, attention_mask, self.tower, position_ids)
        self.check_segments(input_ids, token_type_ids)
        self.check_documents(input_ids, document_ids)
        # (B, N): the vector of each row's first True is pooled.
        pooled = self.pooler.ends(input_ids, attention_mask) if isinstance(self.pooler, EndPooler) else attention_mask
        tower = self._read(
            input_ids,
            attention_mask,
            global_attention_mask,
            position_ids=position_ids,
            token_type_ids=token_type_ids,
            inserted=inserted,
            document_ids=document_ids,
            output_hidden_states=bool(output_hidden_states),
        )
        x = tower.last_hidden_state
        pooler_output = None if self.pooler is None else self.pooler(x, pooled)
        inputs = HeadInput(x, pooler_output, self.tower.embed.tokens.weight, attention_mask)
        loss_head = language_head(self) if skip_logits and labels is not None else None
        output = ModelOutput(
            **named_logits(self, None if self.head is None or loss_head is not None else self.head(inputs)),
            seq_relationship_logits=self.head.relation(inputs) if isinstance(self.head, PretrainingHead) else None,
            last_hidden_state=x,
            pooler_output=pooler_output,
            hidden_states=tower.hidden_states,
        )
        if labels is None and start_positions is None and end_positions is None:
            return output
        head_loss: Any = getattr(self.head, "loss", None)  # of a head with a loss of its own (ELECTRA)
        if head_loss is not None:
            return ModelOutput(output, loss=head_loss(output.logits, labels, attention_mask))
        shift = self.loss_type is not None
        if loss_head is not None:
            loss = linear_loss(loss_head, inputs, targets, shift=shift)
        else:
            loss = text_loss(self, output, targets, shift=shift)
        if relation is not None and output.seq_relationship_logits is not None:
            loss = loss + cross_entropy(output.seq_relationship_logits, relation.reshape(-1))
        return ModelOutput(output, loss=loss)

    def _read(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        global_attention_mask: Tensor | Roles | None,
        **inputs: Any,
    ) -> TowerOutput:
        if global_attention_mask is not None:
            raise ValueError(f"{self.family.title} has no global tokens: leave out global_attention_mask=")
        return cast(TowerOutput, self.tower(input_ids, attention_mask=attention_mask, **inputs))

    def check_segments(self, input_ids: Tensor, token_type_ids: Tensor | None) -> None:
        """Raise TypeError or ValueError for token_type_ids that do not fit the model or input_ids."""
        if token_type_ids is None:
            return
        if self.tower.embed.types is None:
            raise ValueError(f"{self.family.title} has no segments: leave out token_type_ids=")
        self.check_integers("token_type_ids", token_type_ids, "(B, N)")
        if token_type_ids.shape != input_ids.shape:
            raise ValueError(
                f"token_type_ids must be {tuple(input_ids.shape)} as input_ids, got {tuple(token_type_ids.shape)}"
            )
        segments = self.tower.embed.types.num_embeddings
        if not may_read(token_type_ids, training=self.training):
            return
        if bool(((token_type_ids >= 0) & (token_type_ids < segments)).all()):
            return
        low, high = int(token_type_ids.min()), int(token_type_ids.max())
        raise ValueError(f"token_type_ids must be 0 to {segments - 1}, the model's segments; got {low} to {high}")

    def check_documents(self, input_ids: Tensor, document_ids: Tensor | None) -> None:
        """Raise TypeError or ValueError for document_ids that do not fit input_ids."""
        if document_ids is None:
            return
        self.check_integers("document_ids", document_ids, "(B, N)")
        self.check_device("document_ids", document_ids)
        if document_ids.shape != input_ids.shape:
            raise ValueError(
                f"document_ids must be {tuple(input_ids.shape)} as input_ids, got {tuple(document_ids.shape)}"
            )

    # ---------------------------------------------------------------------------------------- one token after another

    @torch.no_grad()
    def begin(
        self, input_ids: Tensor, attention_mask: Tensor | None, *, length: int, inserted: Inserted | None = None
    ) -> tuple[Tensor, ModelState]:
        """Read a prompt (B, N) and make room for `length` positions in all: logits (B, V) after it, and the state.

        attention_mask: (B, N), True = token, padded on the left.  inserted: as in `forward`. Raises ValueError for a
        model without a language-model head, for padding on the right, and if length exceeds the positions.
        """
        if not isinstance(self.head, LanguageHead):
            raise ValueError(
                f"a model with task {self.task!r} has no language-model head: load it with task='text-generation'"
            )
        attention_mask = self.check_prompt(input_ids, attention_mask, self.tower, length)
        state = ModelState.room(self.tower, len(input_ids), length, attention_mask, self.dtype, self.device)
        logits = self._advance(state, input_ids, 1, inserted)[:, 0]
        state.forget_mask()
        return logits, state

    @torch.no_grad()
    def step(self, state: ModelState, tokens: Tensor) -> Tensor:
        """tokens (B,) → logits (B, V) of the next position; the state moves on by one. The next step may reuse them.

        On a GPU the step is captured and replayed where it can be; see regard/generation/cuda_graph.py.
        """
        state.see(len(tokens))
        captured = self._captured(state)
        if captured is None:
            return self._advance(state, tokens.unsqueeze(1), 1)[:, 0]
        for cache in cast("list[FixedCache]", state.caches):  # nothing else is captured
            cache.advance(1)
        return captured.step(tokens, len(state) - 1)

    @torch.no_grad()
    def extend(self, state: ModelState, tokens: Tensor) -> Tensor:
        """tokens (B, n) → logits (B, n, V) after each of them; `state.crop` takes back those that were read too early.

        Raises ValueError, before anything changes, if `state.one_by_one` says that the model cannot.
        """
        state.see(*tokens.shape)
        return self._advance(state, tokens, tokens.shape[1])

    def _captured(self, state: ModelState) -> CapturedStep | None:
        """The captured step of this state, made now if there is none; None where it cannot be captured."""
        if self.device.type != "cuda":
            return None
        from regard.generation.cuda_graph import CapturedStep, can_capture, needs_eager_step

        if needs_eager_step() or (state.captured is not None and not state.captured.fits(state)):
            state.captured = None  # and a later step may capture anew
        if state.captured is None and can_capture(self.tower, self.head, state, self.dtype):
            assert isinstance(self.head, LanguageHead)
            state.captured = CapturedStep(self.tower, self.head, state)
        return state.captured

    def _advance(self, state: ModelState, input_ids: Tensor, count: int, inserted: Inserted | None = None) -> Tensor:
        """Read input_ids (B, N): logits (B, count, V) after the last of them."""
        tower = self.tower(
            input_ids,
            attention_mask=state.mask,
            position_ids=state.positions,
            caches=state.caches,
            inserted=inserted,
        )
        last = tower.last_hidden_state[:, -count:]  # (B, count, d)
        assert self.head is not None
        return cast(Tensor, self.head(HeadInput(last, None, self.tower.embed.tokens.weight, None)))


Choice = Callable[[Tensor, Tensor | None], Tensor]
"""input_ids (B, N) and attention_mask → (B, N) booleans, which tokens are global."""


def first_tokens(input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    """The first token of each text is global; padding on the left is skipped.

    >>> first_tokens(torch.zeros(1, 3, dtype=torch.int64), torch.tensor([[False, True, True]])).tolist()
    [[False, True, False]]
    """
    tokens = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask
    return tokens & (tokens.cumsum(1) == 1)


@dataclass(frozen=True)
class TokensBefore:
    """All tokens before the first `separator` are global: a question before the text that answers it.

    >>> TokensBefore(2)(torch.tensor([[0, 7, 8, 2, 2, 9, 2]]), None).int().tolist()
    [[1, 1, 1, 0, 0, 0, 0]]

    A dataclass and not a closure, so that models that hold it can be pickled.
    """

    separator: int

    def __call__(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        """(B, N) booleans. Raises ValueError for a text without a separator."""
        ends = input_ids == self.separator
        if attention_mask is not None:
            ends = ends & attention_mask
        if not torch.compiler.is_compiling() and not bool(ends.any(1).all()):
            raise ValueError(
                f"text {int(ends.any(1).int().argmin())} has no separator (id {self.separator}) after its question: "
                "say which tokens are global, as global_attention_mask= (B, N)"
            )
        before = ends.cumsum(1) == 0
        return before if attention_mask is None else before & attention_mask


class LongTextModel(TextModel):
    """`TextModel` with global tokens. Its blocks hold `SlidingAttention`.

    choice: which tokens are global if the call does not say; None for none.
    """

    def __init__(
        self,
        config: Config,
        tower: Tower,
        *,
        pooler: Pooler | None = None,
        head: nn.Module | None = None,
        choice: Choice | None = None,
    ) -> None:
        super().__init__(config, tower, pooler=pooler, head=head)
        self.choice = choice

    def _read(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        global_attention_mask: Tensor | Roles | None,
        **inputs: Any,
    ) -> TowerOutput:
        if inputs["document_ids"] is not None:
            raise ValueError(f"{self.family.title} cannot read packed documents: leave out document_ids=")
        roles = self._roles(input_ids, attention_mask, global_attention_mask)
        position_ids, every = inputs["position_ids"], inputs["output_hidden_states"]
        if position_ids is None:
            position_ids = count(input_ids, attention_mask)
        x = self.tower.embed(input_ids, position_ids, inputs["token_type_ids"], inputs["inserted"])  # (B, N, d)
        hidden_states = [x]
        for block in self.tower.depth:
            x = block(x, mask=roles)
            hidden_states += [x] if every else []
        return TowerOutput(x, tuple(hidden_states) if every else None)

    def _roles(self, input_ids: Tensor, attention_mask: Tensor | None, chosen: Tensor | Roles | None) -> Roles | None:
        """The roles of the tokens; None where all tokens have the same, without global ones and padding."""
        if isinstance(chosen, Roles):
            self._check_roles(input_ids, attention_mask, chosen)
            return chosen
        if being_captured(input_ids) and any(x is not None for x in (chosen, attention_mask, self.choice)):
            raise ValueError(
                "which tokens are global or padding is read on the host, and would not change with the CUDA graph's "
                "inputs: make roles = Roles.of(attention_mask, global_attention_mask) once, from "
                "regard.nn.sparse_attention, and give global_attention_mask=roles"
            )
        if chosen is not None:
            chosen = self.booleans("global_attention_mask", chosen, input_ids.shape)
        elif self.choice is not None:
            chosen = self.choice(input_ids, attention_mask)
        elif attention_mask is not None:
            chosen = torch.zeros_like(attention_mask)
        return None if chosen is None else Roles.of(attention_mask, chosen)

    def _check_roles(self, input_ids: Tensor, attention_mask: Tensor | None, roles: Roles) -> None:
        """Raise ValueError unless the roles were made of this attention mask."""
        batch, n = input_ids.shape
        roles.fit(batch, 1, n, n)
        self.check_device("global_attention_mask", roles.tokens)
        if attention_mask is None:
            wrong = roles.padded
        else:
            readable = may_read(attention_mask, training=self.training)
            wrong = readable and not bool((attention_mask == roles.tokens).all())
        if wrong:
            raise ValueError(
                "the roles were made of another attention_mask: give both, Roles.of(attention_mask, …) and the "
                "attention_mask itself, or neither"
            )


class AnswerHead(nn.Module):
    """Where an answer starts and ends, after one more feed-forward.

    d: width of the model.  eps: of the norm.  dropout: before the feed-forward and after it, in training only.
    """

    def __init__(self, feed_forward: FeedForward, d: int, eps: float, dropout: float) -> None:
        super().__init__()
        self.feed_forward, self.norm = feed_forward, nn.LayerNorm(d, eps)
        self.score, self.dropout = Linear(d, 2), nn.Dropout(dropout)

    def forward(self, inputs: HeadInput) -> Tensor:
        """→ (B, N, 2)."""
        x = inputs.last_hidden_state
        added = self.dropout(self.feed_forward(self.dropout(x)))
        return cast(Tensor, self.score(self.norm(x + added)))


class AnsweringModel(TextModel):
    """`TextModel` that looks for an answer behind the question, never in it (BigBird).

    The question is everything up to the first `separator`, including it; without one it is the first token. By default
    it is segment 0, the rest 1. Its tokens cannot begin or end an answer: their scores are a million less, except for
    the first token's, which stands for "no answer".
    """

    FAR = 1e6  # as in transformers

    def __init__(self, config: Config, tower: Tower, *, head: nn.Module, separator: int) -> None:
        super().__init__(config, tower, head=head)
        self.separator = separator

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        token_type_ids: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        **inputs: Any,
    ) -> ModelOutput:
        """Read questions and texts; arguments and errors as in `TextModel.forward`."""
        attention_mask = self.check(input_ids, attention_mask, self.tower)
        first = first_tokens(input_ids, attention_mask)
        ends = input_ids == self.separator
        if attention_mask is not None:
            ends = ends & attention_mask
        question = ends.cumsum(1) - ends.long() == 0  # up to the first separator
        question = question.where(ends.any(1, keepdim=True), first)
        token_type_ids = (~question).long() if token_type_ids is None else token_type_ids
        output = super().forward(input_ids, attention_mask, token_type_ids=token_type_ids, **inputs)
        assert output.start_logits is not None
        assert output.end_logits is not None
        far = self.FAR * (question & ~first).to(output.start_logits.dtype)
        output = ModelOutput(output, start_logits=output.start_logits - far, end_logits=output.end_logits - far)
        if start_positions is None and end_positions is None:
            return output
        return ModelOutput(output, loss=text_loss(self, output, Targets(None, start_positions, end_positions)))
