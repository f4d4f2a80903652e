"""Commands that run a model: generate, fill, embed, classify, caption, answer, match, features, and verify."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import chain
from typing import TYPE_CHECKING, Any

from regard import tables
from regard.cli.commands import (
    AnswerOptions,
    CaptionOptions,
    ClassifyOptions,
    EmbedOptions,
    FeaturesOptions,
    FillOptions,
    GenerateOptions,
    GenerationOptions,
    MatchOptions,
    VerifyOptions,
)
from regard.cli.inputs import (
    check_images,
    check_stdin_once,
    family_and_task,
    open_model,
    read_images,
    read_lines,
    read_texts,
    refuse_images,
    torch_dtype,
)
from regard.cli.outputs import Terminal, Tick, bar, check_output, cpu_floats, print_json, print_matrix, write_npy

if TYPE_CHECKING:
    from regard.generation.config import GenerationConfig
    from regard.generation.loop import GenerationOutput
    from regard.models.model import Model

SHOWN = 4  # numbers of a vector
# The head that a checkpoint has does not matter: the features are those of its image encoder.
FEATURE_TASKS = [
    "feature-extraction",
    "zero-shot-image-classification",
    "image-encoding",
    "image-classification",
    "image-classification-cls",
    "masked-image-modeling",
    "image-to-text",
    "visual-question-answering",
    "image-text-matching",
    "image-text-to-text",
]
LABELLING = ["text-classification", "image-classification", "image-classification-cls"]
HEADLESS = ["feature-extraction", "zero-shot-image-classification"]
LABELS_NEED = "--labels needs CLIP, or BLIP without a head, and this is {}{}"


# ---------------------------------------------------------------------------------------------------------- generation


def generate(options: GenerateOptions) -> None:
    """Continue prompts: one is printed as it is generated, several one per line."""
    images: list[str | bytes] = []
    if options.image:
        check_stdin_once([*options.image, *options.prompt])
        images = read_images(options.image)
        check_images(images)
    prompts = read_texts(options.prompt, options.file)
    if images and len(prompts) > 1:
        raise ValueError(f"--image goes with one prompt, and there are {len(prompts)}: give one at a time")
    from regard.generation.loop import generate_text, merged_config
    from regard.models.family import GENERATION_TASKS
    from regard.tasks.inputs import has_vision

    model = open_model(options.model, "generate", GENERATION_TASKS, options)
    if images and not has_vision(model):
        raise ValueError(
            f"--image is for models that write about images (LLaVA, Idefics), and {model.family.title} "
            "reads texts only: leave it out"
        )
    config = _generation_config(options, model)
    if not options.json and len(prompts) == 1 and (merged_config(model, config).num_beams or 1) == 1:
        _stream(model, prompts[0], config, images)
        return
    with bar("generate") as tick:
        grouped = [images] if images else None  # of the only prompt
        outputs = generate_text(model, prompts, config, grouped, lambda steps: tick(steps, config.max_new_tokens))
    assert isinstance(outputs, list)
    if options.json:
        print_json({"model": options.model, "texts": [_as_dict(output) for output in outputs]})
    else:
        for output in outputs:
            print(output.text)


def caption(options: CaptionOptions) -> None:
    """Describe images, one line each."""
    images = read_images(options.image, options.file)
    check_images(images)
    from regard.models.flamingo import FlamingoModel
    from regard.models.vision_language import VisionLanguageModel
    from regard.tasks.inputs import placeholder
    from regard.tasks.vision import caption_parts

    model = open_model(options.model, "caption", ["image-to-text", "image-text-to-text"], options)
    config, prompt = _generation_config(options, model), options.prompt
    # A prompt that holds the image's placeholder is the whole prompt, and no part of the caption.
    whole = isinstance(model, (VisionLanguageModel, FlamingoModel)) and placeholder(model) in (prompt or "")
    begun = "" if whole or prompt is None else prompt
    outputs = _gather(
        "caption",
        lambda tell: caption_parts(model, images, prompt, config, on_token=tell),
        None if options.json else lambda output: " ".join((begun + output.text).split()),
    )
    if options.json:
        names = [path if isinstance(path, str) else "-" for path in images]
        captions = [{"image": name} | _as_dict(output) for name, output in zip(names, outputs, strict=True)]
        print_json({"model": options.model, "captions": captions})


def answer(options: AnswerOptions) -> None:
    """Answer questions about an image, one line each."""
    (image,) = read_images([options.image])
    check_images([image])
    from regard.tasks.vision import answer_parts

    model = open_model(options.model, "answer", ["visual-question-answering", "image-text-to-text"], options)
    config, questions = _generation_config(options, model), list(options.question)
    outputs = _gather(
        "answer",
        lambda tell: answer_parts(model, image, questions, config, on_token=tell),
        None if options.json else lambda output: " ".join(output.text.split()),
    )
    if options.json:
        answers = [{"question": text} | _as_dict(output) for text, output in zip(questions, outputs, strict=True)]
        print_json({"model": options.model, "image": options.image, "answers": answers})


def _generation_config(options: GenerationOptions, model: Model) -> GenerationConfig:
    """The options as generation takes them. Raises ValueError for a seed where nothing is sampled."""
    from regard.generation.config import GenerationConfig
    from regard.generation.loop import merged_config

    names = "max_new_tokens temperature top_k top_p min_p repetition_penalty num_beams prompt_lookup_num_tokens seed"
    values = {name: getattr(options, name) for name in [*names.split(), "ignore"]}
    config = GenerationConfig(**values, stop_strings=options.stop)
    if config.seed is not None and not merged_config(model, config).samples:
        raise ValueError(
            f"--seed {config.seed} has no effect without sampling: leave it out, or sample with --temperature, "
            "--top-k, --top-p or --min-p"
        )
    return config


def _stream(model: Model, prompt: str, config: GenerationConfig, images: list[str | bytes]) -> None:
    """Print pieces as they come, on a terminal after the prompt; the line is ended whatever happens."""
    from regard.generation.loop import stream_text
    from regard.models.encoder_decoder import EncoderDecoder

    pieces, out = stream_text(model, prompt, config, images or None), Terminal()
    first = next(pieces, "")  # errors come before anything is printed
    try:
        if out.room is not None and not isinstance(model, EncoderDecoder):
            out.write((prompt, "dim"))
        for piece in chain([first], pieces):
            print(piece, end="", flush=True)
    finally:
        print()


def _gather(
    title: str,
    begin: Callable[[Callable[[int], None]], Iterator[list[GenerationOutput]]],
    line: Callable[[GenerationOutput], str] | None,
) -> list[GenerationOutput]:
    """All outputs, each printed as a line as soon as it is there, with a progress bar between them.

    begin: starts the generation; its argument is called with the number of steps.
    line: how an output is printed, or None for not at all.
    """
    outputs: list[GenerationOutput] = []
    ticks: list[Tick] = []
    parts = begin(lambda steps: ticks[-1](steps, None))
    while True:
        with bar(title) as tick:  # which is gone while a line is printed: rich would take that for its own
            ticks[:] = [tick]
            part = next(parts, None)
        if part is None:
            return outputs
        if line is not None:
            for output in part:
                print(line(output), flush=True)
        outputs += part


def _as_dict(output: GenerationOutput) -> dict[str, Any]:
    plain = {name: getattr(output, name) for name in ("prompt", "text", "reason", "score", "passes")}
    return plain | {"ids": output.ids.tolist()}


# --------------------------------------------------------------------------------------------------------------- texts


def fill(options: FillOptions) -> None:
    """Predict the words at mask tokens."""
    (text,) = read_texts([options.text], None)
    result = open_model(options.model, "fill", ["fill-mask", "pretraining"], options).fill(text, options.top)
    if options.json:
        masks = [[asdict(guess) for guess in guesses] for guesses in result.blanks]
        print_json({"model": options.model, "text": result.text, "best": result.best, "masks": masks})
        return
    out = Terminal(options.lang)
    _, rows = result.table()
    out.print(tables.text([out.say("mask"), out.say("word"), out.say("probability")], rows))
    out.print()
    out.print((out.say("most likely: "), "dim"), result.best)


def embed(options: EmbedOptions) -> None:
    """Compute a vector for each text."""
    check_output(options.out, "--out", (".npy",))
    refuse_images(options.text, "embed")
    texts = read_texts(options.text, options.file)
    from torch.nn.functional import normalize

    from regard.session.default_models import default_model
    from regard.tasks.inputs import shortened

    name = str(default_model()) if options.model is None else options.model
    model = open_model(name, "embed", ["text-encoding", *HEADLESS], options)
    # An unknown pooling is refused by the model.
    vectors = cpu_floats(model.embed(texts, pooling=options.pooling, truncate=options.truncate))  # type: ignore[arg-type]
    cosines: list[list[float]] | None = None  # (B, B)
    if options.similarity:
        unit = normalize(vectors, dim=-1)
        cosines = (unit @ unit.mT).tolist()
    if options.out is not None:
        write_npy(vectors, options.out)
    if options.json:
        values = {"model": name, "texts": texts, "vectors": vectors.tolist(), "out": options.out}
        print_json(values if cosines is None else values | {"similarity": cosines})
        return
    out = Terminal(options.lang)
    count, size = vectors.shape
    out.print((out.say("texts: {count}, vector size: {size}", count=count, size=size), "bold"))
    out.print()
    if cosines is not None:
        numbers = [str(n) for n in range(count)]
        labels = [f"{n}  {shortened(text, 24)}" for n, text in zip(numbers, texts, strict=True)]
        print_matrix(cosines, labels, numbers, out, heat=True)
    else:
        rows = [
            [shortened(text), "  ".join(f"{x:.4f}" for x in vector[:SHOWN]) + "  …"]
            for text, vector in zip(texts, vectors.tolist(), strict=True)
        ]
        out.print(tables.text([out.say("text"), out.say("vector")], rows))
    if options.out is not None:
        out.print()
        out.print(out.say("Vectors: {path}", path=options.out))


def classify(options: ClassifyOptions) -> None:
    """Classify texts or images."""
    typed = list(options.text)
    if not typed and options.file is None:
        read_texts(typed, None)  # raises before the model is opened
    refuse_images(typed)  # those that are not there; which kind is read, the model says
    from regard.models.dual_encoder import DualEncoder
    from regard.tasks.inputs import has_vision
    from regard.tasks.text import MAX_LABELS, ranking

    labels = None
    if options.labels is not None:
        labels = [label.strip() for label in options.labels.split(",")]
        if not all(labels):
            raise ValueError(f"--labels must be texts separated by commas, got {options.labels!r}")
        family, task = family_and_task(options.model)
        if task not in (None, *HEADLESS):  # before it is read as if it had no head
            raise ValueError(LABELS_NEED.format(family.title, f" with a head for the task {task!r}"))
    # A model that compares has no labels: it is opened as it is, and raises itself.
    tasks = [*LABELLING, *HEADLESS] if labels is None else HEADLESS
    model = open_model(options.model, "classify", tasks, options)
    if labels is not None and not isinstance(model, DualEncoder):
        raise ValueError(LABELS_NEED.format(model.family.title, ", which does not compare images with texts"))
    if not has_vision(model):
        refuse_images(typed, model.family.title)
    things = read_images(typed, options.file) if has_vision(model) else read_texts(typed, options.file)
    result = model.classify(things, labels=labels, prompt=options.prompt, truncate=options.truncate)
    kind = result.of
    if options.json:
        names = [thing if isinstance(thing, str) else "-" for thing in things]
        each = [
            {kind: name, "label": best, result.measure: dict(zip(result.labels, values, strict=True))}
            for name, best, values in zip(names, result.best, result.probabilities.tolist(), strict=True)
        ]
        print_json({"model": options.model, "labels": result.labels, f"{kind}s": each})
        return
    # Every label of one text, the ten most likely of one image, the most likely of each of several.
    out = Terminal(options.lang)
    titles = (out.say(kind), out.say("label"), out.say(result.measure))
    headers, rows = ranking(result.probabilities, result.texts, result.labels, titles)
    more = len(rows) - MAX_LABELS
    if kind == "image" and len(result) == 1 and more > 0:
        rows = [*rows[:MAX_LABELS], [out.say("… {more} more; --json has all", more=more), ""]]
    out.print(tables.text(headers, rows))


# -------------------------------------------------------------------------------------------------------------- images


def match(options: MatchOptions) -> None:
    """Score how well texts match an image."""
    (image,) = read_images([options.image])
    model = open_model(options.model, "match", ["image-text-matching", "zero-shot-image-classification"], options)
    result = model.match(image, list(options.text), truncate=options.truncate)
    if options.json:
        values = zip(result.texts, result.values[0].tolist(), strict=True)
        texts = [{"text": text, result.measure: value} for text, value in values]
        best = result.best[0]
        print_json(
            {"model": options.model, "image": options.image, "measure": result.measure, "best": best, "texts": texts}
        )
        return
    out = Terminal(options.lang)
    _, rows = result.table()
    out.print(tables.text([out.say("text"), out.say(result.measure)], rows))


def features(options: FeaturesOptions) -> None:
    """Compute the patch vectors of an image as a map."""
    check_output(options.out, "--out", (".npy",))
    (image,) = read_images([options.image])
    model = open_model(options.model, "features", FEATURE_TASKS, options)
    result = model.features(image, layer=options.layer)
    frame = result.frame
    if options.out is not None:
        write_npy(result.map, options.out)
    if options.json:
        print_json(
            {
                "model": options.model,
                "image": options.image,
                "layer": options.layer,
                "size": frame.image_size,
                "pixels": frame.pixels,
                "scale": frame.scale,
                "corner": frame.corner,
                "grid": result.grid,
                "cls": None if result.cls is None else cpu_floats(result.cls).tolist(),
                "pooled": None if result.pooled is None else cpu_floats(result.pooled).tolist(),
                "map": cpu_floats(result.map).tolist() if options.out is None else options.out,
            }
        )
        return
    out = Terminal(options.lang)
    (high, wide), (rows, columns), (tokens, size) = frame.image_size, result.grid, result.vectors.shape
    pixels = " × ".join(map(str, frame.pixels))
    out.print(
        out.say("{name}: {high} × {wide}, resized to {pixels} pixels",
                name=result.name, high=high, wide=wide, pixels=pixels)
    )  # fmt: skip
    out.print(out.say("tokens: {tokens}, vector size: {size}", tokens=tokens, size=size))
    out.print(out.say("map: {rows} rows, {columns} columns", rows=rows, columns=columns))
    if options.out is not None:
        out.print(out.say("Map: {path}", path=options.out))


# -------------------------------------------------------------------------------------------------------------- verify


def verify(options: VerifyOptions) -> int:
    """Compare a model's results with transformers'; 1 if they differ by more than rounding."""
    dtype = torch_dtype(options.dtype)
    lines = None if options.texts is None else read_lines(options.texts)
    if lines == []:
        raise ValueError(f"{str(options.texts)!r} holds no text; expected one per line")
    from rich.console import Console

    from regard.parity.verification import verify

    say = options.say
    stages = {
        "load ours": say("loading with regard"),
        "load theirs": say("loading with transformers"),
        "run ours": say("computing with regard"),
        "run theirs": say("computing with transformers"),
        "run theirs in fp64": say("computing with transformers in fp64"),
        "run ours in fp64": say("a difference: computing with regard in fp64"),
    }
    with Console(stderr=True).status(stages["load ours"]) as status:
        certificate = verify(
            options.model,
            texts=lines,
            dtype=dtype,
            device=options.device,
            ignore=options.ignore,
            progress=lambda stage: status.update(stages[stage]),
        )
    if options.json:
        print_json(certificate.as_dict())
    else:
        Terminal(options.lang).titled(certificate.text(options.lang))
    return 0 if certificate.passed else 1
