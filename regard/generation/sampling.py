"""Choosing the next token: logits filters, sampling and greedy choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from math import inf, isfinite

import torch
from torch import Tensor

from regard import checks


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


BLOCK = 256  # steps whose random numbers are drawn at once


@dataclass(frozen=True, kw_only=True)
class Choice:
    """How tokens are chosen; as it stands, greedily.

    >>> Choice().samples, Choice(top_p=0.9).samples, Choice(temperature=0.7, seed=11).samples
    (False, True, True)

    temperature: logits are divided by it; 0 is its limit, the most likely token, which no top-k, top-p or min-p takes
      away. None: 1 if one of those three is given, else 0.
    top_k, top_p, min_p: sample among the k most likely; among the most likely that together reach p; among those at
      least min_p times as likely as the most likely.
    repetition_penalty: divides the logits of tokens that have occurred, prompt included; 1 changes nothing.
    no_repeat_ngram: no n tokens occur twice in the same order, prompt included; 0 changes nothing.
    banned: tokens never chosen.  min_new, min_length: no end before so many new tokens, or tokens with the prompt's.
    forced_first: the token after a prompt of one token, as a decoder's start is; a longer prompt has its own.
    forced_last: the token at the last place there is, if a row gets there.
    seed: the same seed, the same draws. The draw of row i at step t depends on seed, i and t alone (and on the kind of
      device): not on the other rows, when they end, or how many there are. None: a seed drawn from torch's generator,
      so that torch.manual_seed reaches it.
    rows: the numbers i of the rows, where they are some of many that run in several batches. None: 0, 1 and so on.

    Prompt means tokens: padding is neither counted nor penalised, unlike in `transformers`, where it is both.
    Raises TypeError or ValueError for a number out of its range.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    no_repeat_ngram: int = 0
    banned: tuple[int, ...] = ()
    min_new: int = 0
    min_length: int = 0
    forced_first: int | None = None
    forced_last: int | None = None
    seed: int | None = None
    rows: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            _check_number(name, getattr(self, name))
        if self.temperature is not None and self.temperature < 0:
            raise ValueError(f"temperature must be 0 (greedy) or a positive number, got {self.temperature}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is a probability in (0, 1], got {self.top_p}")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p is a share of the largest probability, in [0, 1], got {self.min_p}")
        if self.repetition_penalty <= 0:
            raise ValueError(
                "repetition_penalty must be positive (1 changes nothing, above 1 discourages), "
                f"got {self.repetition_penalty}"
            )
        object.__setattr__(self, "banned", tuple(self.banned))
        object.__setattr__(self, "rows", None if self.rows is None else tuple(self.rows))
        for name, least in (("top_k", 1), ("no_repeat_ngram", 0), ("min_new", 0), ("min_length", 0)):
            check_whole(name, getattr(self, name), least)
        for name in ("forced_first", "forced_last", "seed"):
            check_whole(name, getattr(self, name), 0)
        for token in self.banned:
            check_whole("a token in banned", token, 0)
        for row in self.rows or ():
            check_whole("a number in rows", row, 0)

    @property
    def samples(self) -> bool:
        """Is there anything random in it?"""
        if self.temperature is not None:
            return self.temperature > 0
        return any(value is not None for value in (self.top_k, self.top_p, self.min_p))

    def seeded(self) -> Choice:
        """The same with a seed, drawn now where there is none and something is random: for several runs as for one.

        >>> Choice(temperature=1.0, seed=11).seeded().seed, Choice().seeded().seed
        (11, None)
        """
        return replace(self, seed=_drawn_seed()) if self.samples and self.seed is None else self


class Filters:
    """What a `Choice` rules out, made ready for one run.

    >>> filters = Filters(Choice(min_new=2), vocab=3, eos=(1,), new_tokens=7, lengths=[4], device=torch.device("cpu"))
    >>> filters(torch.zeros(1, 3), torch.zeros(1, 5, dtype=torch.long), made=1).tolist()
    [[0.0, -inf, 0.0]]

    vocab: V.  eos: tokens that end a row.  lengths: tokens in each row's prompt, padding left out.
    """

    def __init__(
        self,
        choice: Choice,
        *,
        vocab: int,
        eos: tuple[int, ...],
        new_tokens: int,
        lengths: Sequence[int],
        device: torch.device,
    ) -> None:
        _check_tokens(choice, vocab, eos)
        self.choice, self.last, self.rows = choice, new_tokens - 1, len(lengths)
        self.reads_seen = choice.repetition_penalty != 1 or choice.no_repeat_ngram > 0
        self.eos, self._banned = (torch.tensor(t, dtype=torch.long, device=device) for t in (eos, choice.banned))
        short = [max(choice.min_new, choice.min_length - n) if eos else 0 for n in lengths]
        self._short, self._shortest = torch.tensor(short, device=device), max(short)  # (B,): end after so many
        starts = [choice.forced_first is not None and n == 1 for n in lengths]
        self._starts, self._any_starts = torch.tensor(starts, device=device), any(starts)  # (B,)

    def __call__(self, logits: Tensor, seen: Tensor, made: int) -> Tensor:
        """Logits (B, V) of the token after seen (B, n), of which `made` are new; untouched where nothing is asked.

        What is touched is so in fp32, as in `transformers`.
        """
        choice = self.choice
        if choice.repetition_penalty != 1:
            logits = penalise_repeats(logits.float(), seen, choice.repetition_penalty)
        if choice.no_repeat_ngram:
            logits = prevent_ngrams(logits.float(), seen, choice.no_repeat_ngram)
        if choice.banned:
            logits = ban(logits.float(), self._banned)
        if made < self._shortest:
            logits = withhold(logits.float(), self.eos, made < self._short)
        if made == 0 and self._any_starts and choice.forced_first is not None:
            logits = force(logits.float(), choice.forced_first, self._starts)
        if made == self.last and choice.forced_last is not None:
            logits = force(logits.float(), choice.forced_last, torch.ones_like(self._starts))
        return logits


class Chooser:
    """Chooses the tokens of one run, step by step, on the device of the logits.

    >>> filters = Filters(Choice(), vocab=3, eos=(), new_tokens=7, lengths=[1], device=torch.device("cpu"))
    >>> token = torch.empty(1, dtype=torch.long)
    >>> Chooser(filters)(torch.tensor([[0.0, 2.0, 1.0]]), torch.tensor([[0]]), 0, token)
    >>> token
    tensor([1])
    """

    def __init__(self, filters: Filters) -> None:
        choice = filters.choice
        self.filters, self.numbers = filters, range(filters.rows) if choice.rows is None else choice.rows
        if len(self.numbers) != filters.rows:
            raise ValueError(f"rows has {len(self.numbers)} numbers, and there are {filters.rows} rows: one for each")
        self._draws = Draws(choice.seed, self.numbers) if choice.samples else None
        self._totals: list[Tensor] = []  # one (B,) a step, when sampling
        self._logits: Tensor | None = None
        self._steps = 0

    def __call__(self, logits: Tensor, seen: Tensor, made: int, out: Tensor) -> None:
        """Write the token (B,) after seen (B, n), of which `made` are new, to `out`."""
        logits = self._logits = self.filters(logits, seen, made)
        self._steps = made + 1
        if self._draws is None:
            torch.argmax(logits, -1, out=out)  # the smallest id among equals
        else:
            token, total = draw(warp(logits.float(), self.filters.choice), self._draws(made, logits))
            self._totals.append(total)
            out.copy_(token)

    def check(self, lengths: Sequence[int]) -> None:
        """Raise ValueError if a row's token was chosen from NaN; `lengths`: the tokens each row has up to its end.

        Greedily, only the last logits are looked at, where a cache would have carried the NaN: one look a run.
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
            row = self.numbers[rows[0]]
            raise ValueError(
                f"no token can be chosen in row {row}: the model's logits hold NaN, or every token is ruled out. "
                "Look at the weights and the dtype (float16 overflows where bfloat16 does not), or ban less"
            )


def warp(logits: Tensor, choice: Choice) -> Tensor:
    """What makes sampling bolder or more careful: temperature, top-k, top-p, min-p, in this order.

    >>> warp(torch.tensor([[2.0, 4.0, 6.0]]), Choice(temperature=2.0, top_k=2)).tolist()
    [[-inf, 2.0, 3.0]]
    """
    if choice.temperature is not None and choice.temperature != 1:
        logits = logits / choice.temperature
    if choice.top_k is not None:
        logits = keep_top(logits, choice.top_k)
    if choice.top_p is not None and choice.top_p < 1:
        logits = keep_nucleus(logits, choice.top_p)
    if choice.min_p is not None:
        logits = keep_likely(logits, choice.min_p)
    return logits


def draw(logits: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """The token (B,) at which the summed probabilities pass u (B,) in [0, 1), and their sum (B,), NaN if there is none.

    >>> draw(torch.tensor([[0.5, 0.0, 0.5]]).log().repeat(2, 1), torch.tensor([0.1, 0.6]))[0]
    tensor([0, 2])
    """
    # In fp64: a sum over the vocabulary in fp32 is off by more than a rare token's probability.
    sums = logits.softmax(-1).cumsum(-1, dtype=torch.float64)  # (B, V)
    total = sums[:, -1].clone()
    token = torch.searchsorted(sums, (u * total)[:, None], right=True)[:, 0]  # never a token of probability 0
    return token.clamp_(max=logits.shape[-1] - 1), total  # NaN finds no place: stay inside until it is reported


class Draws:
    """Uniform numbers in [0, 1), one for each row and step, that depend on nothing but seed, row and step.

    >>> five, two = (Draws(11, rows)(3, torch.zeros(1)) for rows in (range(5), (4, 1)))
    >>> bool((five[[4, 1]] == two).all())
    True

    seed: None draws one from torch's generator.  rows: the number of each row.
    """

    def __init__(self, seed: int | None, rows: Sequence[int]) -> None:
        self._seed, self._rows = _drawn_seed() if seed is None else seed, rows
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


def _drawn_seed() -> int:
    return int(torch.randint(2**62, ()))


def check_whole(name: str, value: object, least: int) -> None:
    """Raise unless value is None or a whole number of at least `least`.

    >>> check_whole("top_k", 0, 1)
    Traceback (most recent call last):
    ValueError: top_k must be at least 1, got 0
    """
    if value is not None:
        checks.check_int(name, value, least)


def _check_number(name: str, value: object) -> None:
    if value is None and name != "repetition_penalty":
        return
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}: {value!r:.80}")
    if not isfinite(value):
        raise ValueError(f"{name} must be a finite number, got {value}")


def _check_tokens(choice: Choice, vocab: int, eos: tuple[int, ...]) -> None:
    forced = [token for token in (choice.forced_first, choice.forced_last) if token is not None]
    outside = sorted({token for token in (*choice.banned, *forced, *eos) if token >= vocab})
    if outside:
        raise ValueError(f"banned, forced and eos tokens must be below the vocabulary's {vocab}, got {outside}")
    endless = sorted(set(choice.banned) & set(eos))
    if endless:
        raise ValueError(f"banned holds the eos token {endless[0]}: leave it out, or put off the end with min_new")
