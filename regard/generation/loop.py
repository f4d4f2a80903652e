"""The generation loop over token ids: `generate` returns all new tokens, `stream` yields text as it becomes certain.

A step is: the model's logits, `LogitsFilters`, and `Sampler`, or `beam_search` in place of the last.

Rows that have ended go on being computed and are cut at their end afterwards: a batch keeps its shape, which a captured
CUDA step needs, and no step waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from math import inf
from typing import Any, Protocol

import torch
from torch import Tensor

from regard import checks
from regard.generation.beam_search import beam_search
from regard.generation.config import GenerationConfig, random_seed
from regard.generation.streaming import Decode, Reason, RowText, Stream

BLOCK = 256  # steps whose random numbers are drawn at once
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
            ids, counts, scores = beam_search(loop, on_token)
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

    def begin(self, width: int = 1) -> tuple[Tensor, Any, Tensor, LogitsFilters]:
        """Read the prompt once, for `width` beams: logits (B, V), the state, the tokens (B, N), padding as token V."""
        # Room for all tokens that will be read, which the last one is not.
        length = self.input_ids.shape[1] + self.max_new_tokens - 1
        logits, state = self.decoder.begin(self.input_ids, self.attention_mask, length=length)
        vocabulary, mask = logits.shape[1], self.attention_mask
        lengths = [n for n in self.prompt_lengths for _ in range(width)]
        filters = LogitsFilters(self.config, vocabulary=vocabulary, lengths=lengths, device=logits.device)
        tokens = self.input_ids if mask is None else torch.where(mask, self.input_ids, vocabulary)
        return logits, state, tokens.to(logits.device), filters

    def steps(self) -> Iterator[Tensor]:
        """Yield the tokens (B,) of each step, also of rows that have ended; the caller stops when it has enough."""
        # 1. Prefill.
        logits, state, prompt, filters = self.begin()
        self.sampler = Sampler(filters, self.row_numbers)
        # A row for each step: tokens are written where the model reads them, without a copy.
        batch, start = prompt.shape
        history = torch.empty(start + self.max_new_tokens, batch, dtype=torch.long, device=logits.device)
        history[:start] = prompt.T
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


# ------------------------------------------------------------------------------------------------------ choosing tokens


class LogitsFilters:
    """What a `GenerationConfig` rules out, prepared for one run.

    lengths: number of tokens of each row's prompt, padding left out. Raises ValueError for a token beyond V.
    """

    def __init__(
        self, config: GenerationConfig, *, vocabulary: int, lengths: Sequence[int], device: torch.device
    ) -> None:
        config.check_tokens(vocabulary)
        assert config.max_new_tokens is not None
        self.config, self.batch, self.last_step = config, len(lengths), config.max_new_tokens - 1
        self.reads_tokens = config.repetition_penalty not in (None, 1) or bool(config.no_repeat_ngram_size)
        eos = config.eos_token_ids or ()
        self.eos = torch.tensor(eos, dtype=torch.long, device=device)
        self._suppressed = torch.tensor(config.suppress_tokens or (), dtype=torch.long, device=device)
        least, total = config.min_new_tokens or 0, config.min_length or 0
        shortest = [max(least, total - n) if eos else 0 for n in lengths]
        self._shortest, self._any_shortest = torch.tensor(shortest, device=device), max(shortest)  # (B,)
        starts = [config.forced_bos_token_id is not None and n == 1 for n in lengths]
        self._starts, self._any_starts = torch.tensor(starts, device=device), any(starts)  # (B,)

    def __call__(self, logits: Tensor, tokens: Tensor, step: int) -> Tensor:
        """Filter the logits (B, V) of the token after tokens (B, n); returned untouched if nothing applies.

        Filtered logits are fp32, as in `transformers`.
        """
        config = self.config
        if config.repetition_penalty is not None and config.repetition_penalty != 1:
            logits = penalise_repeats(logits.float(), tokens, config.repetition_penalty)
        if config.no_repeat_ngram_size:
            logits = prevent_ngrams(logits.float(), tokens, config.no_repeat_ngram_size)
        if config.suppress_tokens:
            logits = ban(logits.float(), self._suppressed)
        if step < self._any_shortest:
            logits = withhold(logits.float(), self.eos, step < self._shortest)
        if step == 0 and self._any_starts and config.forced_bos_token_id is not None:
            logits = force(logits.float(), config.forced_bos_token_id, self._starts)
        if step == self.last_step and config.forced_eos_token_id is not None:
            logits = force(logits.float(), config.forced_eos_token_id, torch.ones_like(self._starts))
        return logits


class Sampler:
    """Chooses the tokens of one run, step by step, on the device of the logits. row_numbers: as of `generate`."""

    def __init__(self, filters: LogitsFilters, row_numbers: Sequence[int] | None = None) -> None:
        self.filters, self.row_numbers = filters, range(filters.batch) if row_numbers is None else row_numbers
        if len(self.row_numbers) != filters.batch:
            raise ValueError(f"got {len(self.row_numbers)} row_numbers for {filters.batch} rows")
        config = filters.config
        self._draws = UniformDraws(config.seed, self.row_numbers) if config.samples else None
        self._totals: list[Tensor] = []  # (B,) for each step, when sampling
        self._logits: Tensor | None = None
        self._steps = 0

    def __call__(self, logits: Tensor, tokens: Tensor, step: int, out: Tensor) -> None:
        """Write the token (B,) after tokens (B, n) to `out`."""
        logits = self._logits = self.filters(logits, tokens, step)
        self._steps = step + 1
        if self._draws is None:
            torch.argmax(logits, -1, out=out)  # the smallest id among equals
        else:
            token, total = draw(warp(logits.float(), self.filters.config), self._draws(step, logits))
            self._totals.append(total)
            out.copy_(token)

    def check(self, lengths: Sequence[int]) -> None:
        """Raise ValueError if a row's token was chosen from NaN; `lengths`: the tokens each row has up to its end.

        Without sampling only the last logits are looked at, where a cache would have carried the NaN: one look a run.
        """
        assert self._logits is not None, "nothing has been chosen"
        if self._draws is None:
            bad = self._logits.isnan().any(-1).tolist()
            rows = [row for row, n in enumerate(lengths) if bad[row] and n == self._steps]
        else:
            steps = torch.stack(self._totals).isnan().int()  # (steps, B)
            first = torch.where(steps.any(0), steps.argmax(0), len(steps)).tolist()
            rows = [row for row, n in enumerate(lengths) if first[row] < n]
        if rows:
            raise ValueError(
                f"no token can be chosen in row {self.row_numbers[rows[0]]}: the model's logits hold NaN, or every "
                "token is ruled out. Look at the weights and the dtype (float16 overflows where bfloat16 does not), "
                "or suppress fewer tokens"
            )


def warp(logits: Tensor, config: GenerationConfig) -> Tensor:
    """Apply temperature, top-k, top-p and min-p, in this order."""
    if config.temperature is not None and config.temperature != 1:
        logits = logits / config.temperature
    if config.top_k:
        logits = keep_top(logits, config.top_k)
    if config.top_p is not None and config.top_p < 1:
        logits = keep_nucleus(logits, config.top_p)
    if config.min_p is not None:
        logits = keep_likely(logits, config.min_p)
    return logits


def draw(logits: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """The token (B,) at which the summed probabilities pass u (B,) in [0, 1), and their sum (B,), which may be NaN."""
    # In fp64: a sum over the vocabulary in fp32 is off by more than a rare token's probability.
    sums = logits.softmax(-1).cumsum(-1, dtype=torch.float64)  # (B, V)
    total = sums[:, -1].clone()
    token = torch.searchsorted(sums, (u * total)[:, None], right=True)[:, 0]  # never a token of probability 0
    return token.clamp_(max=logits.shape[-1] - 1), total  # NaN finds no place: stay inside until it is reported


class UniformDraws:
    """Uniform numbers in [0, 1), one for each row and step, that depend on nothing but seed, row and step."""

    def __init__(self, seed: int | None, rows: Sequence[int]) -> None:
        self._seed, self._rows = random_seed() if seed is None else seed, rows
        self._block: Tensor | None = None  # (BLOCK, B)

    def __call__(self, step: int, like: Tensor) -> Tensor:
        """The numbers (B,) of a step, on the device of `like`; steps come in order from 0."""
        if self._block is None or step % BLOCK == 0:
            self._block = self._drawn(step // BLOCK, like)
        return self._block[step % BLOCK]

    def _drawn(self, block: int, like: Tensor) -> Tensor:
        generator = torch.Generator(device=like.device)
        rows = []
        for row in self._rows:
            key = blake2b(f"{self._seed} {row} {block}".encode(), digest_size=8).digest()
            generator.manual_seed(int.from_bytes(key, "little"))
            rows.append(torch.rand(BLOCK, dtype=torch.float64, generator=generator, device=like.device))
        return torch.stack(rows, -1)


def penalise_repeats(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Divide the logits of tokens in `seen` by the penalty, or multiply the negative ones (CTRL, section 4.1)."""
    less = torch.where(logits < 0, logits * penalty, logits / penalty)
    return torch.where(_marked(seen, logits), less, logits)


def prevent_ngrams(logits: Tensor, seen: Tensor, n: int) -> Tensor:
    """Rule out each token that would complete n tokens which the row already holds in that order."""
    if seen.shape[1] < n:
        return logits
    windows = seen.unfold(1, n, 1)  # (B, n_windows, n)
    tail = seen[:, None, seen.shape[1] + 1 - n :]  # (B, 1, n − 1)
    again = (windows[..., :-1] == tail).all(-1)  # (B, n_windows)
    ends = torch.where(again, windows[..., -1], logits.shape[-1])
    return logits.masked_fill(_marked(ends, logits), -inf)


def ban(logits: Tensor, tokens: Tensor) -> Tensor:
    """Rule out tokens (n,) in every row."""
    return logits.index_fill(1, tokens, -inf)


def withhold(logits: Tensor, tokens: Tensor, rows: Tensor) -> Tensor:
    """Rule out tokens (n,) in those rows where rows (B,) is True: the ends of what is still too short."""
    return torch.where(rows[:, None], ban(logits, tokens), logits)


def force(logits: Tensor, token: int, rows: Tensor) -> Tensor:
    """Leave nothing but one token, at logit 0, in those rows where rows (B,) is True."""
    only = torch.full_like(logits, -inf)
    only[:, token] = 0
    return torch.where(rows[:, None], only, logits)


def keep_top(logits: Tensor, k: int) -> Tensor:
    """Rule out what is below the k-th largest; ties with it stay (Fan et al. 2018)."""
    least = logits.topk(min(k, logits.shape[-1])).values[:, -1:]  # (B, 1)
    return logits.masked_fill(logits < least, -inf)


def keep_nucleus(logits: Tensor, p: float) -> Tensor:
    """Rule out the least likely tokens whose probabilities together are at most 1 − p (Holtzman et al. 2020)."""
    rising, order = logits.sort(-1)
    out = rising.softmax(-1).cumsum(-1) <= 1 - p  # (B, V), least likely first
    out[:, -1] = False  # the most likely stays, however small p is
    return logits.masked_fill(out.scatter(1, order, out), -inf)


def keep_likely(logits: Tensor, p: float) -> Tensor:
    """Rule out what is less than p times as likely as the most likely token (min-p, Nguyen et al. 2024)."""
    probs = logits.softmax(-1)
    return logits.masked_fill(probs < p * probs.amax(-1, keepdim=True), -inf)


def _marked(tokens: Tensor, logits: Tensor) -> Tensor:
    """(B, n) ids → (B, V), True where the row holds the id; ids of V or more fall off."""
    vocab = logits.shape[-1]
    marks = torch.zeros(logits.shape[0], vocab + 1, dtype=torch.bool, device=logits.device)
    return marks.scatter_(1, tokens.clamp(max=vocab), True)[:, :vocab]
