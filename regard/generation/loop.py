"""The generation loop: over token ids (`generate`, `stream`) and from prompts to text (`generate_text`, `stream_text`).

A step is: the model's logits, `LogitsFilters`, and `Sampler`, or `beam_search` in place of the last. With prompt
look-up, one pass of the model gives the logits of several steps (`DraftReader`).

Rows that have ended go on being computed and are cut at their end afterwards: a batch keeps its shape, which a captured
CUDA step needs, and no step waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor

from regard import checks
from regard.data.images import Source, is_batch, numbered
from regard.formats import read_optional_json
from regard.generation.beam_search import beam_search
from regard.generation.config import GenerationConfig, LogitsFilters, Sampler
from regard.generation.prompt_lookup import NGRAM, DraftReader
from regard.generation.streaming import Decode, Reason, RowText, Stream
from regard.models.family import GENERATION_TASKS
from regard.op import observed, tell_rows
from regard.tasks.inputs import ImagePromptModel, Several, expand_prompt, read_images, without_special

if TYPE_CHECKING:
    from regard.models.encoder_decoder import EncoderDecoder
    from regard.models.model import Model
    from regard.models.text import TextModel

CONTEXT = 8  # tokens of the prompt among which a whole character ends: two of at most 4 bytes each
STEPS_PER_LOOK = 16  # on a GPU, steps between two looks at whether all rows have ended: each look waits for the device


class Decoder(Protocol):
    """A model that continues sequences; an encoder-decoder is one once its encoder has run.

    Its state has `keep(rows)`: row i becomes what row rows[i] was; rows may repeat, be left out, and change in number.
    Prompt look-up needs what `DraftReader` says.
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
        passes: how often the model ran for all rows, the prompt's pass included; fewer than tokens with prompt look-up.
        scores: (R,) of beam search, else None.
        texts: if `decode` was given, each row's text without end token and stop string. A row ended by a stop string
            keeps, in ids, the token that completed it.
    """

    ids: Tensor
    lengths: tuple[int, ...]
    reasons: tuple[Reason, ...]
    passes: int
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
        TypeError, ValueError: an empty prompt, padding that is not on the left, options out of range, beam search with
            sampling, stop strings or prompt look-up, or look-up with a model that cannot read several tokens at once.
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
            tell_ends(lengths, loop.passes)
            ids, scores = loop.cut(lengths), None
    reasons: list[Reason] = ["eos" if yes else "length" for yes in ended]
    texts = None
    if decode is not None:
        cut = [row[: n - yes] for row, n, yes in zip(ids.tolist(), lengths, ended, strict=True)]  # without end tokens
        texts = tuple(decode(row) if row else "" for row in cut)
    return GeneratedTokens(ids, tuple(lengths), tuple(reasons), loop.passes, scores, texts)


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


def tell_ends(lengths: Sequence[int], passes: int) -> None:
    """Tell who watches after how many passes each row had ended: what the batch computes for it then belongs to nobody.

    Args:
        lengths: new tokens of each row.
        passes: of the model.
    """
    if observed() and min(lengths) < passes:
        tell_rows([[row] * n + [-1] * (passes - n) for row, n in enumerate(lengths)], passes)


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
        self.passes = 0

    def begin(self, width: int = 1) -> tuple[Tensor, Any, Tensor, LogitsFilters]:
        """Read the prompt once, for `width` beams: logits (B, V), the state, the tokens (B, N), padding as token V."""
        # Room for all tokens that will be read, which the last one is not.
        length = self.input_ids.shape[1] + self.max_new_tokens - 1
        logits, state = self.decoder.begin(self.input_ids, self.attention_mask, length=length)
        self.passes = 1
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
        drafts = None
        if most := self.config.prompt_lookup_num_tokens:
            drafts = DraftReader(self.decoder, state, history, most, self.config.max_matching_ngram_size or NGRAM)
        # 2. Decode: choose a token from the logits, let the model read it.
        for step, row in enumerate(rows):
            if step and drafts is not None:
                logits, self.passes = drafts.step(start + step, self.is_eos(rows[step - 1])), drafts.passes
            elif step:
                logits, self.passes = self.decoder.step(state, rows[step - 1]), step + 1
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
        tell_ends(lengths, self.passes)
        return GeneratedTokens(self.cut(lengths), tuple(lengths), tuple(reasons), self.passes, texts=texts)

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


# --------------------------------------------------------------------------------------------------- prompts and text


@dataclass(frozen=True, eq=False)
class GenerationOutput:
    """The text that a model generated after one prompt; printing it prints the text.

    >>> import torch
    >>> print(GenerationOutput("The cat", " sat.", torch.tensor([332, 13]), "eos"))
     sat.

    Attributes:
        prompt: the prompt.
        text: the new text, without end token and stop string.
        ids: (n,) new tokens, on the CPU, an end token included.
        reason: why it ended: "eos", "stop" or "length".
        score: of beam search: summed log probability by length, else None.
        passes: how often the model ran for this prompt and those beside it; with prompt look-up less than len(ids).
    """

    prompt: str
    text: str
    ids: Tensor
    reason: Reason
    score: float | None = None
    passes: int | None = None

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"GenerationOutput({self.text!r}, {len(self.ids)} tokens, reason={self.reason!r})"


@dataclass(frozen=True, eq=False)
class PromptBatch:
    """Prompts as a decoder begins with them."""

    decoder: Decoder
    input_ids: Tensor  # (B, N), padded on the left
    attention_mask: Tensor | None  # (B, N), True = token
    max_positions: int | None  # of the decoder
    vocabulary: int
    context: Tensor | None  # ids after which the new ones read as text; None where a text begins
    eos: tuple[int, ...] = ()  # end tokens and padding token that the model itself sets
    pad: int | None = None


class StepCounter:
    """Counts the steps of several runs one after another, and reports them to `on_token`."""

    def __init__(self, on_token: Callable[[int], None] | None) -> None:
        self._on_token, self._before, self._now = on_token, 0, 0

    def __call__(self, count: int) -> None:
        """Report that the run has made `count` steps."""
        self._now = self._before + count
        if self._on_token is not None:
            self._on_token(self._now)

    def next_run(self) -> None:
        """Begin another run."""
        self._before = self._now


def generate_text(
    model: Model,
    prompts: str | Sequence[str],
    config: GenerationConfig,
    images: Source | Several | None = None,
    on_token: Callable[[int], None] | None = None,
) -> GenerationOutput | list[GenerationOutput]:
    """The continuation of a prompt, or of each; see `Model.generate`."""
    texts = [prompts] if isinstance(prompts, str) else prompts
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise TypeError(f"a prompt is a str, several are a list of them, got {type(prompts).__name__}: {prompts!r:.60}")
    if not texts:
        raise ValueError("there must be at least one prompt, got an empty list")
    model.check_task("generate", *GENERATION_TASKS)
    config = merged_config(model, config)
    pixels = _pixels(model, images, len(texts), isinstance(prompts, str))

    def begin(some: Sequence[int]) -> PromptBatch:
        return begin_prompts(model, [texts[n] for n in some], config, [pixels[n] for n in some])

    outputs = continue_prompts(model, begin, texts, config, range(len(texts)), StepCounter(on_token))
    return outputs[0] if isinstance(prompts, str) else outputs


def stream_text(
    model: Model, prompt: str, config: GenerationConfig, images: Source | Several | None = None
) -> Iterator[str]:
    """The continuation of a prompt, piece by piece; see `Model.stream`."""
    if not isinstance(prompt, str):
        raise TypeError(f"stream takes one prompt, a str, got {type(prompt).__name__}")
    model.check_task("generate", *GENERATION_TASKS)
    config = merged_config(model, config)
    if (config.num_beams or 1) != 1:
        raise ValueError(
            f"the text of num_beams={config.num_beams} is not known before the end, so it cannot be streamed: use "
            "model.generate(…), or model.stream(…, num_beams=1)"
        )
    batch = begin_prompts(model, [prompt], config, _pixels(model, images, 1, True))
    config = replace(_with_special_tokens(model, batch, config), max_new_tokens=token_limits(batch, config)[0])
    decode = _decoder_after(model, batch.context)
    pieces = stream(batch.decoder, batch.input_ids, batch.attention_mask, config, decode=decode).text()
    return model.iterate_in_eval_mode(pieces)


def merged_config(model: Model, config: GenerationConfig) -> GenerationConfig:
    """The options of a call over those of the checkpoint; a text_config's own special tokens count, too."""
    generation = read_optional_json(model.directory, "generation_config.json", dict)
    settings = {**model.config.sub_config("text_config").values, **model.config.values}
    merged = config.over(GenerationConfig.from_files(generation, settings, ignore=config.ignore))
    if (merged.num_return_sequences or 1) != 1:
        raise ValueError(
            f"each prompt gives one text, and num_return_sequences is {merged.num_return_sequences}: leave it out"
        )
    return merged


def continue_prompts(
    model: Model,
    begin: Callable[[Sequence[int]], PromptBatch],
    prompts: Sequence[str],
    config: GenerationConfig,
    row_numbers: Sequence[int],
    steps: StepCounter,
) -> list[GenerationOutput]:
    """Continue each prompt as it would be alone, by as many tokens as it has room for, whatever room others have.

    Prompts of unlike room are continued together as long as the longest has room, and cut at their own limits; those
    that could go on are then generated again, with others of the same room. Beam search and a forced last token look
    ahead to the end, so there prompts of the same room are grouped from the first.

    begin: the batch of some of the prompts, by their places.  config: merged with the checkpoint's.
    row_numbers: the number of each prompt in the caller's list, by which its draws go.
    """
    config = config.seeded()  # one seed for all runs
    outputs: dict[int, GenerationOutput] = {}

    def run(some: Sequence[int], batch: PromptBatch, max_new_tokens: int) -> None:
        decode = _decoder_after(model, batch.context)
        tokens = generate(
            batch.decoder,
            batch.input_ids,
            batch.attention_mask,
            replace(_with_special_tokens(model, batch, config), max_new_tokens=max_new_tokens),
            decode=decode,
            row_numbers=[row_numbers[n] for n in some],
            on_token=steps,
        )
        assert tokens.texts is not None
        scores = [None] * len(some) if tokens.scores is None else tokens.scores.tolist()
        rows = zip(some, tokens.texts, tokens.ids.cpu(), tokens.lengths, tokens.reasons, scores, strict=True)
        if any(length > limits[n] for n, length in zip(some, tokens.lengths, strict=True)):
            tell_ends([min(length, limits[n]) for n, length in zip(some, tokens.lengths, strict=True)], tokens.passes)
        for n, text, ids, length, reason, score in rows:
            if length > limits[n]:
                length, reason = limits[n], "length"
                text = decode(ids[:length].tolist())
            if reason != "length" or length == limits[n]:
                outputs[n] = GenerationOutput(prompts[n], text, ids[:length], reason, score, tokens.passes)
        steps.next_run()

    everyone = range(len(prompts))
    batch = begin(everyone)
    limits = token_limits(batch, config)
    room = max(limits)
    if batch.max_positions is not None:
        room = min(room, batch.max_positions - batch.input_ids.shape[1] + 1)
    if len(set(limits)) == 1 or ((config.num_beams or 1) == 1 and config.forced_eos_token_id is None):
        run(everyone, batch, room)
    for limit in sorted({limits[n] for n in everyone if n not in outputs}):
        some = [n for n in everyone if n not in outputs and limits[n] == limit]
        run(some, begin(some), limit)
    return [outputs[n] for n in everyone]


def token_limits(batch: PromptBatch, config: GenerationConfig) -> list[int]:
    """How many new tokens each row may have; padding takes no room. Raises ValueError for a row without room."""
    ids, mask = batch.input_ids, batch.attention_mask
    lengths = [ids.shape[1]] * len(ids) if mask is None else mask.sum(1).tolist()
    if len(set(lengths)) == 1:
        return [config.token_limit(lengths[0], batch.max_positions)] * len(lengths)
    limits = []
    for number, length in enumerate(lengths):
        with numbered(number, len(lengths), "prompt"):
            limits.append(config.token_limit(length, batch.max_positions))
    return limits


def _with_special_tokens(model: Model, batch: PromptBatch, config: GenerationConfig) -> GenerationConfig:
    """The config with end and padding tokens: the model's own, else the checkpoint's, else the tokenizer's."""
    config.check_tokens(batch.vocabulary)
    special = model.tokenizer.ids_of
    eos = batch.eos or config.eos_token_ids or (() if special.eos is None else (special.eos,))
    pads = (batch.pad, config.pad_token_id, special.pad, *eos, 0)
    return replace(config, eos_token_ids=eos, pad_token_id=next(pad for pad in pads if pad is not None))


def _decoder_after(model: Model, context: Tensor | None) -> Decode:
    """Turn new tokens into text, as it reads after the context: sentencepiece drops the space of a first token.

    Ids beyond the tokenizer's vocabulary are no text.
    """
    tokenizer = model.tokenizer
    anchor: list[int] = []  # the fewest tokens at the end of a prompt that are whole characters; any prompt's will do
    rows = [] if context is None else context[:, -CONTEXT:].tolist()
    for tail in (row[-n:] for row in rows for n in range(1, len(row) + 1)):
        text = tokenizer.decode(tail)
        if text and "\ufffd" not in text:
            anchor = tail
            break
    before = len(tokenizer.decode(anchor)) if anchor else 0

    def decode(new: list[int]) -> str:
        return tokenizer.decode(anchor + [token for token in new if token < tokenizer.size])[before:]

    return decode


def begin_prompts(
    model: Model, texts: list[str], config: GenerationConfig, pixels: Sequence[Tensor | None]
) -> PromptBatch:
    """Prompts as a model begins with them. pixels: of the images of each, (P, 3, H, W), or None."""
    ids, mask = (each.to(model.device) for each in read_prompts(model, texts, config, pixels))
    if model.reads_image_prompts:
        reader = cast(ImagePromptModel, model)
        return PromptBatch(read_images(reader, pixels), ids, mask, reader.max_positions, reader.vocabulary, ids)
    if model.kind == "encoder-decoder":
        two = cast("EncoderDecoder", model)
        start = two.start if config.decoder_start_token_id is None else config.decoder_start_token_id
        starts = torch.full((len(texts), 1), start, device=model.device)
        return PromptBatch(two.read(ids, mask), starts, None, two.decoder.embed.max_positions, two.vocabulary, None)
    decoder = cast("TextModel", model)
    return PromptBatch(decoder, ids, mask, decoder.max_positions, decoder.vocabulary, ids)


def read_prompts(
    model: Model, texts: list[str], config: GenerationConfig, pixels: Sequence[Tensor | None]
) -> tuple[Tensor, Tensor]:
    """Prompts as ids and mask (B, N), padded on the left, on the CPU; an empty one is the start token.

    Of the pixels, (P, 3, H, W) for each prompt or None, only the shape is read. Raises ValueError for a prompt with
    more or fewer placeholders than images, without a token, or too long.
    """

    def name(number: int) -> str:
        return "the prompt" if len(texts) == 1 else f"prompt {number}"

    if model.reads_image_prompts:
        expanded = []
        for number, (text, own) in enumerate(zip(texts, pixels, strict=True)):
            with numbered(number, len(texts), "prompt"):
                expanded.append(expand_prompt(cast(ImagePromptModel, model), text, own))
        texts = expanded
    if model.kind == "flamingo":
        ids, mask = without_special(model, texts)
    else:
        batch = model.tokenizer.batch(texts, pad="left")
        ids, mask = batch.input_ids, batch.attention_mask
    empty = ~mask.any(1)
    if bool(empty.any()):
        bos = config.bos_token_id if config.bos_token_id is not None else model.tokenizer.ids_of.bos
        if bos is None:
            number = int(empty.nonzero()[0])
            raise ValueError(f"{name(number)} is empty, and the checkpoint has no start token: give a prompt")
        if not ids.shape[1]:
            ids, mask = ids.new_zeros(len(texts), 1), mask.new_zeros(len(texts), 1)
        ids[empty, -1], mask[empty, -1] = bos, True
    limit = model.max_text_positions
    for number, count in enumerate(mask.sum(1).tolist()):
        if limit is not None and count > limit:
            raise ValueError(f"{name(number)} has {count} tokens, and the model has {limit} positions: shorten it")
    return ids, mask


def _pixels(model: Model, images: Any, prompts: int, single: bool) -> list[Tensor | None]:
    """The pixels (P, 3, H, W) of each prompt's images, None where it has none. single: the prompt is in no list."""
    if images is None:
        return [None] * prompts
    if not model.reads_image_prompts:
        raise ValueError(f"{model.family.title} with task {model.task!r} takes no images: leave out images=")
    each = [images] if single else list(images) if is_batch(images) else images
    if not isinstance(each, list) or len(each) != prompts:
        raise ValueError(f"there are {prompts} prompts: images must be a list of as many, each an image or a list")
    lists = [list(own) if is_batch(own) else [] if own is None else [own] for own in each]
    flat = [image for own in lists for image in own]
    if not flat:
        return [None] * prompts
    rows = iter(model.preprocessor(flat).pixel_values.to(model.device))
    return [torch.stack([next(rows) for _ in own]) if own else None for own in lists]
