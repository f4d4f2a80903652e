"""Tasks on images: captions, answers to questions, matching with texts, zero-shot classification, patch features."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from regard.checks import check_int
from regard.data.images import Source, is_batch, numbered, open_image
from regard.data.tokenizer import BatchEncoding
from regard.generation.config import GenerationConfig
from regard.generation.loop import (
    GenerationOutput,
    PromptBatch,
    StepCounter,
    begin_prompts,
    continue_prompts,
    merged_config,
    read_prompts,
)
from regard.layouts import Frame, Layout
from regard.nn.vision import PatchGrid, VisionTower
from regard.nn.windows import WindowTower
from regard.tasks.inputs import (
    ImageGroup,
    ImagePromptModel,
    Several,
    as_list,
    batches,
    caption_prompt,
    image_batches,
    probabilities,
    question_prompt,
    read_headers,
    score_images,
    score_texts,
    shortened,
    vision_tower,
)
from regard.tasks.text import Classified, TableResult, ranking

if TYPE_CHECKING:
    from regard.models.dual_encoder import DualEncoder
    from regard.models.image_text import Answerer, Captioner, Matcher
    from regard.models.model import Model

OnToken = Callable[[int], None]


def caption(
    model: Model, images: Source | Several, prompt: str | None, config: GenerationConfig, **options: Any
) -> GenerationOutput | list[GenerationOutput]:
    """A caption for an image, or for each of a list; see `Model.caption`."""
    outputs = list(chain.from_iterable(caption_parts(model, images, prompt, config, **options)))
    return outputs if is_batch(images) else outputs[0]


def caption_parts(
    model: Model,
    images: Source | Several,
    prompt: str | None,
    config: GenerationConfig,
    *,
    batch: int = 8,
    on_token: OnToken | None = None,
) -> Iterator[list[GenerationOutput]]:
    """The captions in their order, some at a time, each as soon as it is complete. Raises as `Model.caption`."""
    if not isinstance(prompt, str | None):
        raise TypeError(f"prompt must be a str, how every caption begins, got {type(prompt).__name__}: {prompt!r:.60}")
    sources = as_list(images)
    if model.reads_image_prompts:
        model.check_task("caption", "image-text-to-text")
        prompt = caption_prompt(cast(ImagePromptModel, model), prompt)
    else:
        model.check_task("caption", "image-to-text")
    prompts = [prompt or ""] * len(sources)
    outputs = _outputs(model, sources, prompts, config, batch, StepCounter(on_token), "image")
    return model.iterate_in_eval_mode(outputs)


def answer_about(
    model: Model, images: Source | Several, question: str | Sequence[str], config: GenerationConfig, **options: Any
) -> GenerationOutput | list[GenerationOutput]:
    """The answer to a question about an image, or about each of a list, or to each question; see `Model.answer`."""
    outputs = list(chain.from_iterable(answer_parts(model, images, question, config, **options)))
    return outputs if is_batch(images) or not isinstance(question, str) else outputs[0]


def answer_parts(
    model: Model,
    images: Source | Several,
    question: str | Sequence[str],
    config: GenerationConfig,
    *,
    batch: int = 8,
    on_token: OnToken | None = None,
) -> Iterator[list[GenerationOutput]]:
    """The answers in their order, some at a time, each as soon as it is complete. Raises as `Model.answer`."""
    sources, questions = _pairs(images, question)
    if model.reads_image_prompts:
        model.check_task("answer", "image-text-to-text")
        prompts = []
        for number, one in enumerate(questions):
            with numbered(number, len(questions), "question"):
                prompts.append(question_prompt(cast(ImagePromptModel, model), one))
        questions = prompts
    else:
        model.check_task("answer", "visual-question-answering")
    outputs = _outputs(model, sources, questions, config, batch, StepCounter(on_token), "question")
    return model.iterate_in_eval_mode(outputs)


def _pairs(images: Source | Several, question: str | Sequence[str]) -> tuple[list[Source], list[str]]:
    """Images, and a question for each: a single one is for all images, and a single image for all questions."""
    sources = as_list(images)
    questions = [question] * len(sources) if isinstance(question, str) else question
    if not isinstance(questions, (list, tuple)) or not all(isinstance(one, str) for one in questions):
        got = f"{type(question).__name__}: {question!r:.60}"
        raise TypeError(f"a question is a str, several are a list of them, got {got}")
    if not questions:
        raise ValueError("there must be at least one question, got an empty list")
    if len(questions) > 1 and not is_batch(images):
        return [open_image(sources[0])] * len(questions), list(questions)
    if len(sources) != len(questions):
        raise ValueError(
            f"there are {len(sources)} images and {len(questions)} questions: give as many of either, or one question "
            "for all images, or one image, in no list, for all questions"
        )
    return sources, list(questions)


def _outputs(
    model: Model,
    images: list[Source],
    prompts: list[str],
    config: GenerationConfig,
    batch: int,
    steps: StepCounter,
    part: str,
) -> Iterator[list[GenerationOutput]]:
    """The text about each image, in their order. part: what errors number, "image" or "question"."""
    check_int("batch", batch)
    config = merged_config(model, config).seeded()  # one seed for all batches
    # 1. Check all images and prompts. What is wrong with a single one is raised before anything is generated anyway.
    if len(images) > 1:
        images, sizes = read_headers(model, images)
        _check_prompts(model, prompts, sizes, config, part)
    # 2. Generate batch by batch, and yield what is complete up to here.
    outputs: dict[int, GenerationOutput] = {}
    next_number = 0
    for group in image_batches(model, images, batch, checked=True):
        numbers, pixels = group.numbers, group.pixels
        texts = [prompts[number] for number in numbers]

        def begin(some: Sequence[int], texts: list[str] = texts, pixels: Tensor = pixels) -> PromptBatch:
            return _begin(model, [texts[n] for n in some], config, pixels[list(some)])

        outputs |= dict(zip(numbers, continue_prompts(model, begin, texts, config, numbers, steps), strict=True))
        done = []
        while next_number in outputs:
            done.append(outputs.pop(next_number))
            next_number += 1
        if done:
            yield done


def _check_prompts(
    model: Model, prompts: list[str], sizes: list[tuple[int, int]], config: GenerationConfig, part: str
) -> None:
    """Raise what generating after one of the prompts would raise, with its number, before the first is read."""
    checked: set[tuple[str, tuple[int, int]]] = set()
    for number, (text, size) in enumerate(zip(prompts, sizes, strict=True)):
        if (text, size) in checked:
            continue
        with numbered(number, len(prompts), part):
            if model.reads_image_prompts:
                pixels = torch.empty(1, 3, *size, device="meta")  # a shape, and no memory
                ids, _ = read_prompts(model, [text], config, [pixels])
                config.token_limit(ids.shape[1], model.max_text_positions)
            elif model.kind == "image-question":
                _check_length(model, len(model.tokenizer.encode(text).ids))
        checked.add((text, size))


def _begin(model: Model, texts: list[str], config: GenerationConfig, pixels: Tensor) -> PromptBatch:
    """pixels: (B, 3, H, W), an image for each text."""
    if model.reads_image_prompts:
        return begin_prompts(model, texts, config, list(pixels.unsqueeze(1)))
    reader = cast("Answerer | Captioner", model)
    ids, mask, context = torch.full((len(texts), 1), reader.start, device=model.device), None, None
    if model.kind == "image-question":
        batch = model.tokenizer.batch(texts).to(model.device)
        _check_length(model, batch.input_ids.shape[1])
        decoder = cast("Answerer", model).read_image(pixels, batch.input_ids, batch.attention_mask)
    else:
        captioner = cast("Captioner", model)
        if any(texts):
            batch = model.tokenizer.batch(texts).to(model.device)
            _check_length(model, batch.input_ids.shape[1] - 1)  # without the token at the end
            ids, mask = captioner.prompt(batch.input_ids, batch.attention_mask)
        context = ids[:, 1:]  # `start` is no text, and the tokenizer may not know it
        decoder = captioner.read_image(pixels)
    embed = reader.decoder.embed
    vocabulary = embed.tokens.num_embeddings
    return PromptBatch(decoder, ids, mask, embed.max_positions, vocabulary, context, (reader.end,), reader.pad)


def _check_length(model: Model, count: int) -> None:
    limit = model.max_text_positions
    if limit is not None and count > limit:
        raise ValueError(f"the text has {count} tokens, and the model has {limit} positions: shorten it")


@dataclass(frozen=True, eq=False, repr=False)
class Features:
    """The vectors of one image.

    >>> layout, frame = Layout.grid(2, 3, size=(4, 4)), Frame.whole(8, 12)
    >>> found = Features("photo.jpg", torch.arange(7.0).reshape(7, 1), PatchGrid(2, 3), layout, frame)
    >>> found
    Features(photo.jpg: 1 cls, 6 patches; vectors (7, 1), map (1, 2, 3))
    >>> found.map[0]
    tensor([[1., 2., 3.],
            [4., 5., 6.]])

    Attributes:
        name: of its file.
        vectors: (N, d).
        grid: rows and columns of the patches.
        layout: what each token is, and the box of each patch in the model's pixels.
        frame: where these lie in the image.
        pooled: (d,) or another width, the tower's own summary; None if it has none, or another layer was asked for. It
            is not the vector that CLIP and BLIP compare with texts: `model.encode_image` gives that.
    """

    name: str
    vectors: Tensor
    grid: PatchGrid
    layout: Layout
    frame: Frame
    pooled: Tensor | None = None

    @property
    def cls(self) -> Tensor | None:
        """The vector of the token that sums up the image, (d,); None where there is none (Swin)."""
        at = self.layout.indices("cls")
        return self.vectors[int(at[0, 1])] if len(at) else None

    @property
    def map(self) -> Tensor:
        """The patches' vectors where they lie: (d, rows, columns)."""
        patches = self.vectors[len(self.vectors) - self.grid.rows * self.grid.columns :]
        return patches.T.reshape(-1, *self.grid)

    def __repr__(self) -> str:
        tokens = str(self.layout).removeprefix("Layout(").partition(" of ")[0]  # "1 cls, 6 patches"
        shapes = f"vectors {tuple(self.vectors.shape)}, map {tuple(self.map.shape)}"
        pooled = "" if self.pooled is None else f", pooled {tuple(self.pooled.shape)}"
        return f"Features({self.name}: {tokens}; {shapes}{pooled})"


@torch.no_grad()
def features(
    model: Model, images: Source | Several, *, layer: int | None = None, batch: int = 32
) -> Features | list[Features]:
    """The vectors of an image, or of each of a list; see `Model.features`."""
    tower = vision_tower(model)
    if tower is None:
        raise ValueError(f"features are of images, and {model.family.title} looks at none: model.embed is for texts")
    depth = len(tower.stages if isinstance(tower, WindowTower) else tower.blocks)
    if layer is not None:
        if not isinstance(layer, int) or isinstance(layer, bool) or not -depth - 1 <= layer <= depth:
            raise ValueError(
                f"layer must be 0 (before the first block) to {depth}, or {-depth - 1} to -1 from the end, or None "
                f"for the model's last vectors; got {layer!r}"
            )
        layer %= depth + 1
    by_image: dict[int, Features] = {}
    for part in image_batches(model, as_list(images), batch):
        by_image |= dict(zip(part.numbers, _features_of(model, tower, part, layer), strict=True))
    several = [by_image[n] for n in range(len(by_image))]
    return several if is_batch(images) else several[0]


def _features_of(model: Model, tower: VisionTower | WindowTower, part: ImageGroup, layer: int | None) -> list[Features]:
    """Of images of one size. layer: None for the last."""
    pooled = None
    if model.kind in ("dual-encoder", "vision"):
        result = model(pixel_values=part.pixels, output_hidden_states=layer is not None)
        vectors, layers, pooled = result.last_hidden_state, result.hidden_states, result.pooler_output  # (B, N, d)
    else:
        patches, size = tower.embed.patches, tuple(part.pixels.shape[2:])
        if size[0] < patches.least[0] or size[1] < patches.least[1]:
            raise ValueError(f"the image has {size} pixels, and the model needs at least {tuple(patches.least)}")
        vectors, layers = tower(part.pixels.to(model.dtype), output_hidden_states=layer is not None)
    if layer is not None:
        assert layers is not None
        vectors, pooled = layers[layer], None
    grid, layout = _grid_of(tower, part.frames[0].pixels, layer)
    summaries = [None] * len(vectors) if pooled is None else list(pooled)
    rows = zip(part.names, vectors, summaries, part.frames, strict=True)
    return [Features(name, row, grid, layout, frame, summary) for name, row, summary, frame in rows]


def _grid_of(tower: VisionTower | WindowTower, pixels: tuple[int, int], layer: int | None) -> tuple[PatchGrid, Layout]:
    """The grid of a layer's patches, and what its tokens are: where patches are merged, a layer has larger ones."""
    patches, before = tower.embed.patches, tower.embed.before
    if isinstance(tower, VisionTower):
        grid = tower.grid(*pixels)
        return grid, Layout.grid(*grid, patches.size, before)
    last = len(tower.stages) - 1  # whose tokens are not merged
    merged = 2 ** (last if layer is None else min(layer, last))
    grid = PatchGrid(*(-(-n // merged) for n in patches.grid(*pixels)))
    return grid, Layout.grid(*grid, (patches.size[0] * merged, patches.size[1] * merged), before, pixels=pixels)


PROMPT = "a photo of {}"


@dataclass(frozen=True, eq=False, repr=False)
class Matched(TableResult):
    """Images with a value for each text; prints as a table.

    >>> Matched(("photo.jpg",), ("a cat", "a dog"), torch.tensor([[0.1, 0.3]]), "cosine")
    text   cosine
    ─────  ──────
    a dog  0.3000
    a cat  0.1000

    Attributes:
        images: names of their files.
        texts: the inputs.
        values: (P, T).
        measure: "cosine", −1 to 1, or "probability" that the two belong together.
    """

    images: tuple[str, ...]
    texts: tuple[str, ...]
    values: Tensor
    measure: str

    @property
    def best(self) -> tuple[str, ...]:
        """The text that goes best with each image."""
        return tuple(self.texts[n] for n in self.values.argmax(1).tolist())

    def __len__(self) -> int:
        return len(self.images)

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Headers and rows."""
        texts = tuple(map(shortened, self.texts))
        return ranking(self.values, self.images, texts, ("image", "text", self.measure))


def match(
    model: Model, images: Source | Several, texts: str | Sequence[str], *, batch: int = 32, truncate: bool = False
) -> Matched:
    """Images with a value for each text; see `Model.match`."""
    if model.kind not in ("dual-encoder", "image-text-matching"):
        raise ValueError(
            "match needs a model that compares images with texts (CLIP or BLIP, with task "
            f"'zero-shot-image-classification' or 'image-text-matching'), and this {model.family.title} has the task "
            f"{model.task!r}"
        )
    several = [texts] if isinstance(texts, str) else texts
    _check_strings(several, "text")
    if model.kind == "dual-encoder":
        dual = cast("DualEncoder", model)
        words = _text_vectors(dual, several, batch, truncate)  # (T, e)
        wide = torch.promote_types(words.dtype, torch.float32)
        words = words.to(wide)
        names, values = score_images(model, images, batch, lambda pixels: dual.encode_image(pixels).to(wide) @ words.T)
        return Matched(names, tuple(several), values.cpu(), "cosine")
    matcher = cast("Matcher", model)
    encoded = list(batches(model, several, batch, length=model.max_text_positions, truncate=truncate))

    def scores(pixels: Tensor) -> Tensor:  # (B, T): how likely each text belongs to each image
        rows = []
        for image in matcher.look(pixels).unsqueeze(1):  # (1, patches, d)
            row: dict[int, Tensor] = {}
            for numbers, part in encoded:
                chances = probabilities(matcher.judge(image, part.input_ids, part.attention_mask))[:, 1]
                row |= dict(zip(numbers, chances, strict=True))
            rows.append(torch.stack([row[n] for n in range(len(row))]))
        return torch.stack(rows)

    names, values = score_images(model, images, batch, scores)
    return Matched(names, tuple(several), values.cpu(), "probability")


def classify_by(
    model: Model,
    images: Source | Several,
    labels: Sequence[str],
    *,
    prompt: str | None = None,
    batch: int = 32,
    truncate: bool = False,
) -> Classified:
    """Images with the probability of each label, read as a text; see `Model.classify`."""
    if model.kind != "dual-encoder":
        raise ValueError(
            "labels= is for models that compare vectors of images and texts (CLIP, BLIP), with the task "
            f"'zero-shot-image-classification', and this {model.family.title} has the task {model.task!r}"
        )
    prompt = PROMPT if prompt is None else prompt
    if not isinstance(prompt, str) or "{}" not in prompt:
        raise ValueError(f"prompt must hold {{}} where the label goes, as {PROMPT!r} does, got {prompt!r}")
    if isinstance(labels, str) or not isinstance(labels, Sequence) or not labels:
        raise ValueError(f"labels must be a list of at least one text, got {labels!r:.60}")
    _check_strings(labels, "label")
    texts, dual = [prompt.replace("{}", label) for label in labels], cast("DualEncoder", model)
    words = _text_vectors(dual, texts, batch, truncate)  # (T, e)
    names, logits = score_images(model, images, batch, lambda pixels: dual.head(words, dual.encode_image(pixels)))
    return Classified(names, tuple(labels), probabilities(logits), of="image")


def _check_strings(texts: Sequence[str], name: str) -> None:
    """Raise TypeError for pairs, which are for models of texts alone. What is no list is refused by `batches`."""
    for number, text in enumerate(texts if isinstance(texts, Sequence) else ()):
        if not isinstance(text, str):
            raise TypeError(f"{name} {number} must be a str, got {type(text).__name__}: {text!r:.60}")


def _text_vectors(model: DualEncoder, texts: Sequence[str], batch: int, truncate: bool) -> Tensor:
    """Vectors (T, e) of length 1."""
    length = model.max_text_positions

    def vectors(part: BatchEncoding) -> Tensor:
        return model.encode_text(part.input_ids, part.attention_mask)

    return score_texts(model, texts, batch, vectors, length=length, truncate=truncate)
