"""Text generation: prompts in, text out, at once or streamed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from regard.data.images import Source, is_batch, numbered
from regard.generation.config import GenerationConfig
from regard.generation.loop import Decoder, generate, stream
from regard.generation.streaming import Decode, Reason
from regard.models.checkpoint import read_side
from regard.models.family import GENERATION_TASKS
from regard.tasks.inputs import (
    ImagePromptModel,
    Several,
    expand_prompt,
    read_images,
    without_special,
)

if TYPE_CHECKING:
    from regard.models.encoder_decoder import EncoderDecoder
    from regard.models.model import Model
    from regard.models.text import TextModel

CONTEXT = 8  # tokens of the prompt among which a whole character ends: two of at most 4 bytes each


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
    """

    prompt: str
    text: str
    ids: Tensor
    reason: Reason
    score: float | None = None

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
    generation = read_side(model.directory, "generation_config.json", dict)
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
        for n, text, ids, length, reason, score in rows:
            if length > limits[n]:
                length, reason = limits[n], "length"
                text = decode(ids[:length].tolist())
            if reason != "length" or length == limits[n]:
                outputs[n] = GenerationOutput(prompts[n], text, ids[:length], reason, score)
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
