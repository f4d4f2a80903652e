"""Choosing the next token: logits filters, sampling and greedy choice."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from math import inf

import torch
from torch import Tensor

from regard.generation.config import GenerationConfig, random_seed


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


BLOCK = 256  # steps whose random numbers are drawn at once


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
