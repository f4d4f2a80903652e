"""The generation loop over token ids: `generate` returns all new tokens, `stream` yields text as it becomes certain.

Rows that have ended go on being computed and are cut at their end afterwards: a batch keeps its shape, which a captured
CUDA step needs, and no step waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from regard import checks
from regard.generation.beam_search import beam_search
from regard.generation.config import GenerationConfig
from regard.generation.sampling import LogitsFilters, Sampler
from regard.generation.streaming import Decode, Reason, RowText, Stream
from regard.nn.attention import ContextKeys
from regard.nn.blocks import Tower
from regard.nn.cache import Cache

if TYPE_CHECKING:
    from regard.generation.cuda_graph import CapturedStep

STEPS_PER_LOOK = 16  # on a GPU, steps between two looks at whether all rows have ended: each look waits for the device


class Decoder(Protocol):
    """A model that continues sequences; an encoder-decoder is one once its encoder has run.

    Its state has `keep(rows)`: row i becomes what row rows[i] was; rows may repeat, be left out, and change in number.
    """

    def begin(self, ids: Tensor, mask: Tensor | None, *, length: int) -> tuple[Tensor, Any]:
        """Read a prompt: logits (B, V) after its last position, and the state that `step` continues.

        ids: (B, N) tokens.  mask: (B, N), True = token, padding on the left; None: all are tokens.
        length: positions to make room for, the prompt's and those of the new tokens that a `step` will read.
        """

    def step(self, state: Any, tokens: Tensor) -> Tensor:
        """One more token (B,) for each row: logits (B, V) of the position after it; the state advances in place."""


@dataclass(frozen=True, eq=False)
class GeneratedTokens:
    """New tokens of R rows: one for each prompt, or num_return_sequences for each, best first.

    Attributes:
        ids: (R, n) new tokens, an end token included; pad_token_id after a row's end.
        lengths: number of new tokens of each row.
        reasons: why each row ended: "eos", "stop" or "length".
        scores: (R,) of beam search, else None.
        texts: if `decode` was given, each row's text without end token and stop string. A row ended by a stop string
            keeps, in ids, the token that completed it.
    """

    ids: Tensor
    lengths: tuple[int, ...]
    reasons: tuple[Reason, ...]
    scores: Tensor | None = None
    texts: tuple[str, ...] | None = None


def generate(
    decoder: Decoder,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    config: GenerationConfig | None = None,
    *,
    decode: Decode | None = None,
    row_numbers: Sequence[int] | None = None,
    on_token: Callable[[int], None] | None = None,
    **options: Any,
) -> GeneratedTokens:
    """Continue each row of input_ids (B, N).

    >>> class Counting:  # a model of 7 tokens, after each of which comes the next
    ...     def begin(self, ids, mask, *, length):
    ...         return self.step(None, ids[:, -1]), None
    ...     def step(self, state, tokens):
    ...         return torch.nn.functional.one_hot((tokens + 1) % 7, 7).float()
    >>> output = generate(Counting(), torch.tensor([[0, 1], [3, 4]]), max_new_tokens=4, eos_token_ids=6)
    >>> output.ids.tolist(), output.lengths, output.reasons
    ([[2, 3, 4, 5], [5, 6, 0, 0]], (4, 2), ('length', 'eos'))

    Without stop strings the loop waits for a GPU only now and then, to see whether all rows have ended.

    Args:
        decoder: a model that can `begin` and `step`.
        input_ids: (B, N) prompts.
        attention_mask: (B, N) booleans, True = token, padding on the left; None if all are tokens.
        config: the options; see `GenerationConfig`.
        decode: turns token ids into text, for `texts` and for stop strings.
        row_numbers: the number of each row, by which its draws go, if the rows are some of many; None: 0, 1, …
        on_token: called after each step with the number of steps made.
        **options: fields of `GenerationConfig`, over those of `config`.

    Raises:
        TypeError, ValueError: an empty prompt, padding that is not on the left, options out of range, or beam search
            with sampling or stop strings.
    """
    loop = TokenLoop(decoder, input_ids, attention_mask, GenerationConfig.from_options(config, options), row_numbers)
    config = loop.config
    if config.stop_strings:
        if decode is None:
            raise ValueError("stop strings are found in text: pass decode=, which turns token ids into text")
        pieces = Stream(loop, decode, on_token)
        for _ in pieces:
            pass
        return pieces.result
    with torch.no_grad():
        if (config.num_beams or 1) > 1:
            ids, counts, scores = beam_search(
                decoder, input_ids, attention_mask, config, lengths=loop.prompt_lengths, on_token=on_token
            )
            last = ids.gather(1, (counts - 1).clamp(min=0)[:, None])[:, 0]  # (R,)
            lengths, ended = counts.tolist(), loop.is_eos(last).tolist()
        else:
            lengths, ended = loop.run(on_token)
            ids, scores = loop.cut(lengths), None
    reasons: list[Reason] = ["eos" if yes else "length" for yes in ended]
    texts = None
    if decode is not None:
        cut = [row[: n - yes] for row, n, yes in zip(ids.tolist(), lengths, ended, strict=True)]  # without end tokens
        texts = tuple(decode(row) if row else "" for row in cut)
    return GeneratedTokens(ids, tuple(lengths), tuple(reasons), scores, texts)


def stream(
    decoder: Decoder,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    config: GenerationConfig | None = None,
    *,
    decode: Decode,
    **options: Any,
) -> Stream:
    """Continue each row of input_ids (B, N), piece by piece.

    >>> class Counting:
    ...     def begin(self, ids, mask, *, length):
    ...         return self.step(None, ids[:, -1]), None
    ...     def step(self, state, tokens):
    ...         return torch.nn.functional.one_hot((tokens + 1) % 7, 7).float()
    >>> letters = lambda ids: "".join("abcdefg"[i] for i in ids)
    >>> options = {"max_new_tokens": 4, "eos_token_ids": 6, "stop_strings": "de"}
    >>> pieces = stream(Counting(), torch.tensor([[0], [3]]), decode=letters, **options)
    >>> list(pieces)
    [('b', 'e'), ('c', 'f')]
    >>> pieces.result.texts, pieces.result.reasons
    (('bc', 'ef'), ('stop', 'eos'))

    Arguments and errors as in `generate`. Beam search is left out: its text is not known before the end.
    """
    config = GenerationConfig.from_options(config, options)
    return Stream(TokenLoop(decoder, input_ids, attention_mask, config), decode)


class TokenLoop:
    """One batch of prompts and the tokens chosen so far. Arguments as in `generate`."""

    def __init__(
        self,
        decoder: Decoder,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        config: GenerationConfig,
        row_numbers: Sequence[int] | None = None,
    ) -> None:
        self.prompt_lengths = _prompt_lengths(input_ids, attention_mask)
        config.check_beams()
        self.max_new_tokens = config.max_new_tokens or config.token_limit(input_ids.shape[1], None)
        self.pad = 0 if config.pad_token_id is None else checks.check_int("pad_token_id", config.pad_token_id, 0)
        self.config = replace(config, max_new_tokens=self.max_new_tokens, pad_token_id=self.pad)
        self.decoder, self.input_ids, self.attention_mask = decoder, input_ids, attention_mask
        self.row_numbers = row_numbers
        self.sampler: Sampler | None = None
        self.tokens = input_ids.new_empty(0, len(input_ids))  # (max_new_tokens, B) once begun

    def steps(self) -> Iterator[Tensor]:
        """Yield the tokens (B,) of each step, also of rows that have ended; the caller stops when it has enough."""
        batch, start = self.input_ids.shape
        # 1. Prefill: read the prompt and make room for all tokens that will be read, which the last one is not.
        length = start + self.max_new_tokens - 1
        logits, state = self.decoder.begin(self.input_ids, self.attention_mask, length=length)
        vocabulary, device = logits.shape[1], logits.device
        filters = LogitsFilters(self.config, vocabulary=vocabulary, lengths=self.prompt_lengths, device=device)
        self.sampler = Sampler(filters, self.row_numbers)
        # A row for each step: tokens are written where the model reads them, without a copy.
        history = torch.empty(start + self.max_new_tokens, batch, dtype=torch.long, device=device)
        mask = self.attention_mask
        history[:start] = (self.input_ids if mask is None else torch.where(mask, self.input_ids, vocabulary)).T
        self.tokens = history[start:]
        seen, rows = history[:start].T, self.tokens.unbind()  # (B, N); (B,) for each step
        # 2. Decode: choose a token from the logits, let the model read it.
        for step, row in enumerate(rows):
            if step:
                logits = self.decoder.step(state, rows[step - 1])
            if filters.reads_tokens:
                seen = history[: start + step].T
            self.sampler(logits, seen, step, row)
            yield row

    def run(self, on_token: Callable[[int], None] | None) -> tuple[list[int], list[bool]]:
        """Step until all rows have ended: the length of each, and whether an end token ended it."""
        steps, ended = 0, torch.tensor(False)
        for steps, row in enumerate(self.steps(), 1):
            if on_token is not None:
                on_token(steps)
            every = 1 if row.is_cpu else STEPS_PER_LOOK
            if self.config.eos_token_ids and steps % every == 0:
                ended = self.is_eos(self.tokens[steps - every : steps]).any(0) | ended  # (B,)
                if bool(ended.all()):
                    break
        ends = self.is_eos(self.tokens[:steps]).int()  # (steps, B)
        return torch.where(ends.any(0), ends.argmax(0) + 1, steps).tolist(), ends.any(0).tolist()

    def cut(self, lengths: Sequence[int]) -> Tensor:
        """The new tokens (B, n), padded after each row's length. Raises ValueError if one was chosen from NaN."""
        assert self.sampler is not None, "a result comes after tokens"
        self.sampler.check(lengths)
        ids = self.tokens[: max(lengths)].T.clone(memory_format=torch.contiguous_format)  # (B, n)
        place = torch.arange(ids.shape[1], device=ids.device)
        return ids.masked_fill_(place >= torch.tensor(lengths, device=ids.device)[:, None], self.pad)

    def result(self, rows: Sequence[RowText]) -> GeneratedTokens:
        """What a stream has generated, once all its rows have ended."""
        lengths, reasons = [row.length for row in rows], [row.reason for row in rows if row.reason is not None]
        texts = tuple(row.text for row in rows)
        return GeneratedTokens(self.cut(lengths), tuple(lengths), tuple(reasons), texts=texts)

    def is_eos(self, tokens: Tensor) -> Tensor:
        """Where tokens are end tokens."""
        return torch.isin(tokens, torch.tensor(self.config.eos_token_ids or (), dtype=torch.long, device=tokens.device))


def _prompt_lengths(input_ids: Tensor, attention_mask: Tensor | None) -> list[int]:
    """Check the prompt; the number of tokens of each row."""
    if not isinstance(input_ids, Tensor) or input_ids.dtype.is_floating_point or input_ids.dtype == torch.bool:
        got = str(input_ids.dtype) if isinstance(input_ids, Tensor) else type(input_ids).__name__
        raise TypeError(f"input_ids must be a tensor of token ids, got {got}")
    if input_ids.ndim != 2 or input_ids.shape[0] == 0:
        raise ValueError(f"input_ids must have the shape (B, N), one row or more, got {tuple(input_ids.shape)}")
    if input_ids.shape[1] == 0:
        raise ValueError("the prompt is empty: pass at least one token, such as the start token")
    mask, shape = attention_mask, tuple(input_ids.shape)
    if mask is None:
        return [shape[1]] * shape[0]
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != shape:
        got = f"{mask.dtype} {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"attention_mask must be boolean (True = token) of the prompt's shape {shape}, got {got}")
    wrong = (~mask[:, -1] | (mask[:, :-1] & ~mask[:, 1:]).any(1)).nonzero().flatten().tolist()
    if wrong:
        raise ValueError(f"row {wrong[0]} has padding after a token: pad the prompt on the left")
    lengths: list[int] = mask.sum(1).tolist()
    return lengths


# ------------------------------------------------------------------------------------------------------ decoder state


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
        captured: the step as a CUDA graph, if there is one.
    """

    caches: list[Cache]
    mask: Tensor | None
    length: int
    padding: Tensor | None = None
    memory: list[ContextKeys] | None = None
    memory_mask: Tensor | None = None
    readers: Tensor | None = None
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
            return cls(caches(device), mask, length)
        except RuntimeError as error:  # out of memory
            gib = sum(cache.nbytes for cache in caches("meta")) / 2**30
            raise ValueError(
                f"{batch} texts of {length} positions take {gib:,.1f} GiB for keys and values, and {device} does not "
                "have as much: ask for fewer new tokens, texts or beams"
            ) from error

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

    def see(self, batch: int) -> None:
        """Add a token to every row. Raises ValueError, before anything changes, if all positions are used."""
        if len(self) == self.length:
            raise ValueError(f"no room: all {len(self)} positions are used")
        if self.mask is not None:
            self.mask = torch.cat([self.mask, self.mask.new_ones(batch, 1)], 1)

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
