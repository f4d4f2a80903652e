"""`regard classify`, `embed`, `fill` and `generate`."""

import json
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from regard import tables
from regard.cli.file_names import refuse_missing, refuse_pictures
from regard.cli.files import as_numpy_has_it, check_npy, check_pictures, finite, read_pictures, read_texts, write_npy
from regard.cli.models import bar, family_and_task, open_model
from regard.cli.options import Lang, Say, known, options_in, refuse_idle_seed, speaker, writing_options_in
from regard.cli.terminal import Terminal, print_matrix

if TYPE_CHECKING:
    from torch import Tensor

    from regard.generation.config import GenerationConfig
    from regard.generation.text import GenerationOutput
    from regard.models.model import Model
    from regard.tasks.text import Classified, Filled

# No `from __future__ import annotations`: typer reads the annotations, and their texts are chosen while this runs.


NEEDED = "--labels needs CLIP, or BLIP without a head, and this is {}{}"


def add_classify(app: typer.Typer, lang: Lang) -> None:
    """Add the command to the app, with help in a language.

    >>> app = typer.Typer()
    >>> add_classify(app, "en")
    >>> app.registered_commands[0].name
    'classify'
    """
    say, options = speaker(lang), options_in(lang)

    @app.command(
        "classify",
        help=say(
            "The labels of texts or pictures with their probabilities.\n\n"
            "TEXT is a path where the model looks at pictures; '-' is standard input. The labels are the checkpoint's "
            "own; to CLIP, and to BLIP without a head, they are given.",
            "텍스트나 이미지의 레이블과 확률을 보여 줍니다.\n\n"
            "이미지 모델에서 TEXT는 경로입니다. '-'이면 표준 입력을 읽습니다. "
            "레이블은 체크포인트의 것이고, CLIP과 헤드 없는 BLIP에는 직접 줍니다.",
        ),
    )
    def classify(
        model: Annotated[str, options.model],
        text: Annotated[
            list[str] | None, typer.Argument(metavar="TEXT", help=say("One, or several.", "하나 또는 여럿."))
        ] = None,
        file: Annotated[
            Path | None,
            typer.Option(metavar="FILE", help=say("A text or path per line.", "한 줄에 텍스트나 경로 하나.")),
        ] = None,
        labels: Annotated[
            str | None,
            typer.Option(metavar="A,B,…", help=say("To choose among (CLIP, BLIP).", "고를 레이블 (CLIP, BLIP).")),
        ] = None,
        prompt: Annotated[
            str | None,
            typer.Option(metavar="TEXT", help=say("A label put, {} for it.", "레이블을 넣을 문장, {} 자리에.")),
        ] = None,
        truncate: Annotated[
            bool, typer.Option("--truncate", help=say("Cut texts that are too long.", "긴 텍스트를 자릅니다."))
        ] = False,
        ignore: Annotated[list[str] | None, options.ignore] = None,
        device: Annotated[str, options.device] = "cpu",
        dtype: Annotated[str | None, options.dtype] = None,
        json_: Annotated[bool, options.json] = False,
        lang: Annotated[str, options.lang] = lang,
    ) -> None:
        spoken = speaker(known(lang))
        given = text or []
        if not given and file is None:
            read_texts(given, file)  # which says what is missing before the model is opened
        refuse_missing(given)
        named = _labels(labels)
        if named is not None:
            _require_headless(model)
        # A model that compares has no labels: it is opened as it is, and says so itself.
        tasks = ["classify", "classify-cls", "none"] if named is None else ["none"]
        opened = open_model(model, "classify", tasks, dtype=dtype, device=device, ignore=ignore or ())
        from regard.models.dual_encoder import DualModel
        from regard.tasks.images import has_vision

        if named is not None and not isinstance(opened, DualModel):
            raise ValueError(NEEDED.format(opened.family.title, ", which does not compare pictures with texts"))
        if not has_vision(opened):
            refuse_pictures(given, opened.family.title)
        things = read_pictures(given, file) if has_vision(opened) else read_texts(given, file)
        found = opened.classify(things, labels=named, prompt=prompt, truncate=truncate)
        if json_:
            print(_classes_json(model, [one if isinstance(one, str) else "-" for one in things], found))
        else:
            _print_classes(found, spoken)


def _require_headless(model: str) -> None:
    """Raise ValueError for a checkpoint with a head, before it is read as if it had none."""
    family, task = family_and_task(model)
    if task not in (None, "none"):
        raise ValueError(NEEDED.format(family.title, f" with a head for the task {task!r}"))


def _labels(labels: str | None) -> list[str] | None:
    """Labels between commas, without the spaces around them; what is empty is none."""
    if labels is None:
        return None
    said = [label.strip() for label in labels.split(",")]
    if not all(said):
        raise ValueError(f"--labels must be texts with a comma between them, got {labels!r}")
    return said


def _print_classes(found: "Classified", say: Say) -> None:
    """Every label of one thing; the likeliest of several. Of a thousand labels of a picture, the likeliest ten."""
    from regard.tasks.text import MAX_LABELS, ranking

    of = say(found.of, {"text": "텍스트", "image": "이미지"}[found.of])
    measure = say(found.measure, {"probability": "확률", "value": "값"}[found.measure])
    headers, rows = ranking(found.probabilities, found.texts, found.labels, (of, say("label", "레이블"), measure))
    more = len(rows) - MAX_LABELS
    if found.of == "image" and len(found) == 1 and more > 0:
        rows = [*rows[:MAX_LABELS], [say(f"… {more} more; --json has all", f"… {more}개 더, 전체는 --json"), ""]]
    Terminal().print(tables.text(headers, rows))


def _classes_json(model: str, things: list[str], found: "Classified") -> str:
    each = [
        {found.of: thing, "label": best, found.measure: dict(zip(found.labels, values, strict=True))}
        for thing, best, values in zip(things, found.best, found.probabilities.tolist(), strict=True)
    ]
    said = {"model": model, "labels": list(found.labels), f"{found.of}s": each}
    return json.dumps(finite(said), ensure_ascii=False)


# No `from __future__ import annotations`: typer reads the annotations, and their texts are chosen while this runs.


SHOWN = 4  # numbers of a vector


def add_embed(app: typer.Typer, lang: Lang) -> None:
    """Add the command to the app, with help in a language.

    >>> app = typer.Typer()
    >>> add_embed(app, "en")
    >>> app.registered_commands[0].name
    'embed'
    """
    say, options = speaker(lang), options_in(lang)

    @app.command(
        "embed",
        help=say(
            "A vector for each text, pooled as the checkpoint says, else the mean of its tokens.\n\n"
            "Without --model it is all-MiniLM-L6-v2 of regard[demo]. TEXT '-' is standard input.",
            "텍스트마다 벡터 하나를 만듭니다. 풀링은 체크포인트를 따르고, 없으면 토큰의 평균입니다.\n\n"
            "--model이 없으면 regard[demo]의 all-MiniLM-L6-v2를 씁니다. "
            "TEXT가 '-'이면 표준 입력을 읽습니다.",
        ),
    )
    def embed(
        text: Annotated[
            list[str] | None, typer.Argument(metavar="TEXT", help=say("One, or several.", "하나 또는 여럿."))
        ] = None,
        model: Annotated[str | None, options.model] = None,
        file: Annotated[
            Path | None, typer.Option(metavar="FILE", help=say("A text per line.", "한 줄에 텍스트 하나."))
        ] = None,
        out: Annotated[
            Path | None, typer.Option(metavar="FILE", help=say("Write vectors, .npy.", "벡터를 저장, .npy."))
        ] = None,
        similarity: Annotated[
            bool, typer.Option("--similarity", help=say("Cosine of each pair.", "텍스트 사이의 코사인 유사도."))
        ] = False,
        pooling: Annotated[
            str | None,
            typer.Option(metavar="HOW", help=say("mean, cls, max or last.", "mean, cls, max, last 중 하나.")),
        ] = None,
        truncate: Annotated[
            bool, typer.Option("--truncate", help=say("Cut texts that are too long.", "긴 텍스트를 자릅니다."))
        ] = False,
        ignore: Annotated[list[str] | None, options.ignore] = None,
        device: Annotated[str, options.device] = "cpu",
        dtype: Annotated[str | None, options.dtype] = None,
        json_: Annotated[bool, options.json] = False,
        lang: Annotated[str, options.lang] = lang,
    ) -> None:
        spoken = speaker(known(lang))
        check_npy(out)
        refuse_pictures(text or [], "embed")
        texts = read_texts(text or [], file)
        from regard.session.session import default_model

        name = str(default_model()) if model is None else model
        opened = open_model(name, "embed", ["encode", "none"], dtype=dtype, device=device, ignore=ignore or ())
        # Another pooling than those there are is told by the model.
        vectors = opened.embed(texts, pooling=pooling, truncate=truncate)  # type: ignore[arg-type]
        vectors = as_numpy_has_it(vectors)
        if out is not None:
            write_npy(vectors, out)
        if json_:
            print(_embeddings_json(name, texts, vectors, similarity, out))
        else:
            _print_embeddings(texts, vectors, similarity, out, spoken)


def _cosines(vectors: "Tensor") -> list[list[float]]:
    from torch.nn.functional import normalize

    unit = normalize(vectors, dim=-1)
    found: list[list[float]] = (unit @ unit.mT).tolist()  # (B, B)
    return found


def _print_embeddings(texts: list[str], vectors: "Tensor", similarity: bool, path: Path | None, say: Say) -> None:
    from regard.tasks.inputs import shortened

    out = Terminal()
    count, size = vectors.shape
    title = say(f"texts: {count}, numbers in each vector: {size}", f"텍스트 {count}개, 벡터 크기 {size}")
    out.print((title, "bold"))
    out.print()
    if similarity:
        numbers = [str(n) for n in range(count)]
        labels = [f"{n}  {shortened(text, 24)}" for n, text in zip(numbers, texts, strict=True)]
        print_matrix(_cosines(vectors), labels, numbers, heat=True, say=say, out=out)
    else:
        rows = [
            [shortened(text), "  ".join(f"{x:.4f}" for x in vector[:SHOWN]) + "  …"]
            for text, vector in zip(texts, vectors.tolist(), strict=True)
        ]
        out.print(tables.text([say("text", "텍스트"), say("vector", "벡터")], rows))
    if path is not None:
        out.print()
        out.print(say("Vectors: ", "벡터: "), str(path))


def _embeddings_json(name: str, texts: list[str], vectors: "Tensor", similarity: bool, path: Path | None) -> str:
    said = {"model": name, "texts": texts, "vectors": vectors.tolist(), "out": None if path is None else str(path)}
    if similarity:
        said["similarity"] = _cosines(vectors)
    return json.dumps(finite(said), ensure_ascii=False, allow_nan=False)


# No `from __future__ import annotations`: typer reads the annotations, and their texts are chosen while this runs.


def add_fill(app: typer.Typer, lang: Lang) -> None:
    """Add the command to the app, with help in a language.

    >>> app = typer.Typer()
    >>> add_fill(app, "en")
    >>> app.registered_commands[0].name
    'fill'
    """
    say, options = speaker(lang), options_in(lang)

    @app.command(
        "fill",
        help=say(
            "Words that could stand at the mask tokens of a text, and how likely.\n\n"
            "TEXT holds the model's own mask token, such as [MASK] or <mask>; '-' is standard input.",
            "텍스트의 마스크 자리에 올 수 있는 단어와 확률을 보여 줍니다.\n\n"
            "TEXT에는 [MASK], <mask> 같은 모델의 마스크 토큰을 씁니다. '-'이면 표준 입력을 읽습니다.",
        ),
    )
    def fill(
        text: Annotated[
            str, typer.Argument(metavar="TEXT", help=say("With a mask token.", "마스크 토큰이 든 텍스트."))
        ],
        model: Annotated[str, options.model],
        top: Annotated[int, typer.Option(metavar="K", help=say("How many words.", "후보의 개수."))] = 5,
        ignore: Annotated[list[str] | None, options.ignore] = None,
        device: Annotated[str, options.device] = "cpu",
        dtype: Annotated[str | None, options.dtype] = None,
        json_: Annotated[bool, options.json] = False,
        lang: Annotated[str, options.lang] = lang,
    ) -> None:
        spoken = speaker(known(lang))
        (given,) = read_texts([text], None)
        tasks = ["fill", "pretrain"]
        found = open_model(model, "fill", tasks, dtype=dtype, device=device, ignore=ignore or ()).fill(given, top)
        if json_:
            print(_fills_json(model, found))
        else:
            _print_fills(found, spoken)


def _print_fills(found: "Filled", say: Say) -> None:
    out = Terminal()
    headers = [say("mask", "마스크"), say("word", "단어"), say("probability", "확률")]
    rows = [
        ["" if rank else str(n), guess.token, f"{guess.probability:.4f}"]
        for n, guesses in enumerate(found.blanks)
        for rank, guess in enumerate(guesses)
    ]
    out.print(tables.text(headers, rows))
    out.print()
    out.print((say("likeliest: ", "가장 그럴듯한 텍스트: "), "dim"), found.best)


def _fills_json(model: str, found: "Filled") -> str:
    masks = [
        [{"token": guess.token, "id": guess.id, "probability": guess.probability} for guess in guesses]
        for guesses in found.blanks
    ]
    return json.dumps(
        {"model": model, "text": found.text, "best": found.best, "masks": masks}, ensure_ascii=False, allow_nan=False
    )


# No `from __future__ import annotations`: typer reads the annotations, and their texts are chosen while this runs.


def add_generate(app: typer.Typer, lang: Lang) -> None:
    """Add the command to the app, with help in a language.

    >>> app = typer.Typer()
    >>> add_generate(app, "en")
    >>> app.registered_commands[0].name
    'generate'
    """
    say, options, writing = speaker(lang), options_in(lang), writing_options_in(lang)

    @app.command(
        "generate",
        help=say(
            "Write what comes after a prompt; an encoder-decoder writes what it makes of it.\n\n"
            "LLaVA and Idefics: a --picture for each <image> in PROMPT, which is one then. "
            "PROMPT '-' is standard input. Options left out are as the checkpoint says, else greedy, 50 tokens.",
            "프롬프트에 이어지는 텍스트를 씁니다. 인코더-디코더는 입력을 변환합니다.\n\n"
            "LLaVA와 Idefics: PROMPT 하나에 든 <image>마다 --picture 하나. "
            "PROMPT가 '-'이면 표준 입력을 읽습니다. "
            "생략한 옵션은 체크포인트의 설정을, 없으면 그리디와 50토큰을 씁니다.",
        ),
    )
    def generate(
        model: Annotated[str, options.model],
        prompt: Annotated[
            list[str] | None, typer.Argument(metavar="PROMPT", help=say("One, or several.", "하나 또는 여럿."))
        ] = None,
        file: Annotated[
            Path | None, typer.Option(metavar="FILE", help=say("A prompt per line.", "한 줄에 프롬프트 하나."))
        ] = None,
        picture: Annotated[
            list[str] | None,
            typer.Option(
                metavar="PATH",
                help=say(
                    "For <image> in the prompt; may be given again.", "프롬프트의 <image>에 넣을 이미지(여러 번 가능)."
                ),
            ),
        ] = None,
        new_tokens: Annotated[int | None, writing.new_tokens] = None,
        temperature: Annotated[float | None, writing.temperature] = None,
        top_k: Annotated[int | None, writing.top_k] = None,
        top_p: Annotated[float | None, writing.top_p] = None,
        min_p: Annotated[float | None, writing.min_p] = None,
        repetition_penalty: Annotated[float | None, writing.repetition_penalty] = None,
        beams: Annotated[int | None, writing.beams] = None,
        seed: Annotated[int | None, writing.seed] = None,
        stop: Annotated[list[str] | None, writing.stop] = None,
        ignore: Annotated[list[str] | None, options.ignore] = None,
        device: Annotated[str, options.device] = "cpu",
        dtype: Annotated[str | None, options.dtype] = None,
        json_: Annotated[bool, options.json] = False,
        lang: Annotated[str, options.lang] = lang,
    ) -> None:
        known(lang)
        pictures = _pictures(picture, prompt or [])
        prompts = read_texts(prompt or [], file)
        if pictures and len(prompts) > 1:
            raise ValueError(f"--picture is of one prompt, and there are {len(prompts)}: ask one at a time")
        opened = open_model(model, "generate", ["generate"], dtype=dtype, device=device, ignore=ignore or ())
        _check_sight(opened, pictures)
        from regard.generation.config import GenerationConfig
        from regard.generation.text import merged_config

        config = GenerationConfig(
            max_new_tokens=new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            num_beams=beams,
            seed=seed,
            stop_strings=tuple(stop or ()),
            ignore=tuple(ignore or ()),
        )
        refuse_idle_seed(opened, config)
        if json_:
            print(_generated_json(model, _written(opened, prompts, config, pictures)))
        elif len(prompts) == 1 and (merged_config(opened, config).num_beams or 1) == 1:
            _stream(opened, prompts[0], config, pictures)
        else:
            for written in _written(opened, prompts, config, pictures):
                print(written.text)


def _pictures(typed: list[str] | None, prompts: Sequence[str]) -> list[str | bytes]:
    """The pictures of --picture, each of them one by its header. Raises ValueError for what is none."""
    if not typed:
        return []
    if "-" in typed and "-" in prompts:
        raise ValueError("'-' is standard input, which can be read once")
    pictures = read_pictures(typed)
    check_pictures(pictures)
    return pictures


def _check_sight(model: "Model", pictures: Sequence[object]) -> None:
    from regard.tasks.images import has_vision

    if pictures and not has_vision(model):
        raise ValueError(
            f"--picture is for models that write about pictures (LLaVA, Idefics), and {model.family.title} reads texts "
            "alone: leave it out"
        )


def _written(
    model: "Model", prompts: list[str], config: "GenerationConfig", pictures: list[str | bytes]
) -> "list[GenerationOutput]":
    from regard.generation.text import generate_text

    with bar("generate") as tick:
        given = [pictures] if pictures else None  # of the one prompt that there is then
        made = generate_text(model, prompts, config, given, lambda steps: tick(steps, config.max_new_tokens))
    assert isinstance(made, list)
    return made


def _stream(model: "Model", prompt: str, config: "GenerationConfig", pictures: list[str | bytes]) -> None:
    """Print pieces as they come, after the prompt where a person reads along; a line begun is ended, come what may."""
    from regard.generation.text import stream_text
    from regard.models.encoder_decoder import EncoderDecoder

    pieces, out = stream_text(model, prompt, config, pictures or None), Terminal()
    first = next(pieces, "")  # what is wrong is told before anything is printed
    try:
        if out.room is not None and not isinstance(model, EncoderDecoder):
            out.write((prompt, "dim"))
        for piece in chain([first], pieces):
            print(piece, end="", flush=True)
    finally:
        print()


def _generated_json(model: str, made: "list[GenerationOutput]") -> str:
    texts = [
        {"prompt": one.prompt, "text": one.text, "ids": one.ids.tolist(), "reason": one.reason, "score": one.score}
        for one in made
    ]
    return json.dumps({"model": model, "texts": texts}, ensure_ascii=False, allow_nan=False)
