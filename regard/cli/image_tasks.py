"""`regard answer`, `caption`, `match` and `features`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard import tables
from regard.cli.files import as_numpy_has_it, check_npy, check_pictures, finite, read_pictures, require_sight, write_npy
from regard.cli.models import gather, open_model
from regard.cli.options import Lang, Say, known, options_in, refuse_idle_seed, speaker, writing_options_in
from regard.cli.terminal import Terminal

if TYPE_CHECKING:
    from regard.generation.text import Written
    from regard.models.model import Model
    from regard.tasks.matching import Features, Matched

# No `from __future__ import annotations`: typer reads the annotations, and their texts are chosen while this runs.


def add_answer(app: typer.Typer, lang: Lang) -> None:
    """Add the command to the app, with help in a language.

    >>> app = typer.Typer()
    >>> add_answer(app, "en")
    >>> app.registered_commands[0].name
    'answer'
    """
    say, options, writing = speaker(lang), options_in(lang), writing_options_in(lang)

    @app.command(
        "answer",
        help=say(
            "Answers to questions about a picture: BLIP, LLaVA, Idefics. A line for each.\n\n"
            "LLaVA and Idefics: a QUESTION that holds <image> is the whole prompt. PICTURE '-' is standard input. "
            "Options left out are as the checkpoint says, else greedy, 50 tokens.",
            "이미지에 대한 질문에 답합니다: BLIP, LLaVA, Idefics. 질문마다 한 줄.\n\n"
            "LLaVA와 Idefics에서 <image>가 든 QUESTION은 프롬프트 전체입니다. "
            "PICTURE가 '-'이면 표준 입력을 읽습니다. "
            "생략한 옵션은 체크포인트의 설정을, 없으면 그리디와 50토큰을 씁니다.",
        ),
    )
    def answer(
        picture: Annotated[str, typer.Argument(metavar="PICTURE", help=say("A path.", "경로."))],
        question: Annotated[
            list[str], typer.Argument(metavar="QUESTION", help=say("One, or several.", "하나 또는 여럿."))
        ],
        model: Annotated[str, options.model],
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
        (given,) = read_pictures([picture])
        check_pictures([given])
        tasks = ["answer", "generate"]
        opened = open_model(model, "answer", tasks, dtype=dtype, device=device, ignore=ignore or ())
        require_sight(opened, "answer")
        from regard.generation.config import Wishes
        from regard.tasks.captioning import answer_parts

        wishes = Wishes(
            new_tokens=new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            beams=beams,
            seed=seed,
            stop=stop or (),
            ignore=ignore or (),
        )
        refuse_idle_seed(opened, wishes)
        made = gather(
            "answer",
            lambda tell: answer_parts(opened, given, question, wishes, on_token=tell),
            None if json_ else lambda one: " ".join(one.text.split()),
        )
        if json_:
            print(_answers_json(model, picture, question, made))


def _answers_json(model: str, picture: str, questions: list[str], made: "list[Written]") -> str:
    answers = [
        {
            "question": question,
            "prompt": one.prompt,
            "text": one.text,
            "ids": one.ids.tolist(),
            "reason": one.reason,
            "score": one.score,
        }
        for question, one in zip(questions, made, strict=True)
    ]
    return json.dumps({"model": model, "picture": picture, "answers": answers}, ensure_ascii=False, allow_nan=False)


# No `from __future__ import annotations`: typer reads the annotations, and their texts are chosen while this runs.


def add_caption(app: typer.Typer, lang: Lang) -> None:
    """Add the command to the app, with help in a language.

    >>> app = typer.Typer()
    >>> add_caption(app, "en")
    >>> app.registered_commands[0].name
    'caption'
    """
    say, options, writing = speaker(lang), options_in(lang), writing_options_in(lang)

    @app.command(
        "caption",
        help=say(
            "What is to be seen in pictures, in words: BLIP, LLaVA, Idefics. A line for each.\n\n"
            "PICTURE '-' is standard input. Options left out are as the checkpoint says, else greedy, 50 tokens.",
            "이미지에 보이는 것을 텍스트로 씁니다: BLIP, LLaVA, Idefics. 이미지마다 한 줄.\n\n"
            "PICTURE가 '-'이면 표준 입력을 읽습니다. "
            "생략한 옵션은 체크포인트의 설정을, 없으면 그리디와 50토큰을 씁니다.",
        ),
    )
    def caption(
        model: Annotated[str, options.model],
        picture: Annotated[
            list[str] | None, typer.Argument(metavar="PICTURE", help=say("One, or several.", "하나 또는 여럿."))
        ] = None,
        file: Annotated[
            Path | None, typer.Option(metavar="FILE", help=say("A path per line.", "한 줄에 경로 하나."))
        ] = None,
        prompt: Annotated[
            str | None, typer.Option(metavar="TEXT", help=say("How captions begin.", "설명의 첫머리."))
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
        pictures = read_pictures(picture or [], file)
        check_pictures(pictures)
        tasks = ["caption", "generate"]
        opened = open_model(model, "caption", tasks, dtype=dtype, device=device, ignore=ignore or ())
        require_sight(opened, "caption")
        from regard.generation.config import Wishes
        from regard.tasks.captioning import caption_parts

        wishes = Wishes(
            new_tokens=new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            beams=beams,
            seed=seed,
            stop=stop or (),
            ignore=ignore or (),
        )
        refuse_idle_seed(opened, wishes)
        begun = _begun(opened, prompt)
        made = gather(
            "caption",
            lambda tell: caption_parts(opened, pictures, prompt, wishes, on_token=tell),
            None if json_ else lambda one: " ".join((begun + one.text).split()),
        )
        if json_:
            print(_captions_json(model, [path if isinstance(path, str) else "-" for path in pictures], made))


def _begun(model: "Model", prompt: str | None) -> str:
    """How the captions begin, as it is printed before them: a prompt that is the whole of what the model was told, and
    where the picture stands in it, is no part of a caption. To BLIP it is a text like any other.
    """
    from regard.models.flamingo import FlamingoModel
    from regard.models.vision_language import VisionLanguageModel
    from regard.tasks.images import placeholder

    if isinstance(model, (VisionLanguageModel, FlamingoModel)) and placeholder(model) in (prompt or ""):
        return ""
    return prompt or ""


def _captions_json(model: str, names: list[str], made: "list[Written]") -> str:
    captions = [
        {
            "picture": name,
            "prompt": one.prompt,
            "text": one.text,
            "ids": one.ids.tolist(),
            "reason": one.reason,
            "score": one.score,
        }
        for name, one in zip(names, made, strict=True)
    ]
    return json.dumps({"model": model, "captions": captions}, ensure_ascii=False, allow_nan=False)


# No `from __future__ import annotations`: typer reads the annotations, and their texts are chosen while this runs.


def add_match(app: typer.Typer, lang: Lang) -> None:
    """Add the command to the app, with help in a language.

    >>> app = typer.Typer()
    >>> add_match(app, "en")
    >>> app.registered_commands[0].name
    'match'
    """
    say, options = speaker(lang), options_in(lang)

    @app.command(
        "match",
        help=say(
            "How well texts go with a picture, the best first.\n\n"
            "CLIP and BLIP compare vectors: a cosine, -1 to 1. BLIP trained for retrieval says how likely the two "
            "belong together. PICTURE '-' is standard input.",
            "텍스트가 이미지와 얼마나 잘 맞는지, 잘 맞는 것부터 보여 줍니다.\n\n"
            "CLIP과 BLIP은 벡터를 비교합니다: 코사인, -1에서 1까지. 검색용 BLIP은 둘이 짝일 확률을 냅니다. "
            "PICTURE가 '-'이면 표준 입력을 읽습니다.",
        ),
    )
    def match(
        picture: Annotated[str, typer.Argument(metavar="PICTURE", help=say("A path.", "경로."))],
        text: Annotated[list[str], typer.Argument(metavar="TEXT", help=say("One, or several.", "하나 또는 여럿."))],
        model: Annotated[str, options.model],
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
        (given,) = read_pictures([picture])
        opened = open_model(model, "match", ["match", "none"], dtype=dtype, device=device, ignore=ignore or ())
        require_sight(opened, "match")
        found = opened.match(given, text, truncate=truncate)
        if json_:
            print(_matches_json(model, picture, found))
        else:
            _print_matches(found, spoken)


def _print_matches(found: "Matched", say: Say) -> None:
    from regard.tasks.inputs import shortened

    measure = say(found.measure, {"cosine": "코사인", "probability": "확률"}[found.measure])
    ranked = sorted(zip(found.values[0].tolist(), found.texts, strict=True), key=lambda pair: -pair[0])
    rows = [[shortened(text), f"{value:.4f}"] for value, text in ranked]
    Terminal().print(tables.text([say("text", "텍스트"), measure], rows))


def _matches_json(model: str, picture: str, found: "Matched") -> str:
    texts = [
        {"text": text, found.measure: value} for text, value in zip(found.texts, found.values[0].tolist(), strict=True)
    ]
    said = {"model": model, "picture": picture, "measure": found.measure, "best": found.best[0], "texts": texts}
    return json.dumps(finite(said), ensure_ascii=False)


# No `from __future__ import annotations`: typer reads the annotations, and their texts are chosen while this runs.


# The head that a checkpoint has does not matter: the tower is asked.
TASKS = ["none", "encode", "classify", "classify-cls", "rebuild", "caption", "answer", "match", "generate"]


def add_features(app: typer.Typer, lang: Lang) -> None:
    """Add the command to the app, with help in a language.

    >>> app = typer.Typer()
    >>> add_features(app, "en")
    >>> app.registered_commands[0].name
    'features'
    """
    say, options = speaker(lang), options_in(lang)

    @app.command(
        "features",
        help=say(
            "The vectors of a picture's patches as a map, for detection, segmentation, search.\n\n"
            "--out writes the map, (numbers, rows, columns). PICTURE '-' is standard input.",
            "이미지 패치들의 벡터를 맵으로 만듭니다. 탐지, 분할, 검색용.\n\n"
            "--out은 (벡터 크기, 행, 열) 맵을 저장합니다. "
            "PICTURE가 '-'이면 표준 입력을 읽습니다.",
        ),
    )
    def features(
        picture: Annotated[str, typer.Argument(metavar="PICTURE", help=say("A path.", "경로."))],
        model: Annotated[str, options.model],
        layer: Annotated[
            int | None,
            typer.Option(metavar="N", help=say("After N blocks; -1 is the last.", "N번째 블록 뒤. -1은 마지막.")),
        ] = None,
        out: Annotated[
            Path | None, typer.Option(metavar="FILE", help=say("Write the map, .npy.", "맵을 저장, .npy."))
        ] = None,
        ignore: Annotated[list[str] | None, options.ignore] = None,
        device: Annotated[str, options.device] = "cpu",
        dtype: Annotated[str | None, options.dtype] = None,
        json_: Annotated[bool, options.json] = False,
        lang: Annotated[str, options.lang] = lang,
    ) -> None:
        spoken = speaker(known(lang))
        check_npy(out)
        (given,) = read_pictures([picture])
        opened = open_model(model, "features", TASKS, dtype=dtype, device=device, ignore=ignore or ())
        require_sight(opened, "features")
        found = opened.features(given, layer=layer)
        if out is not None:
            write_npy(found.map, out)
        if json_:
            print(_features_json(model, picture, layer, found, out))
        else:
            _print_features(found, out, spoken)


def _print_features(found: "Features", out: Path | None, say: Say) -> None:
    terminal = Terminal()
    (high, wide), (rows, columns) = found.frame.picture, found.grid
    pixels, tokens = " × ".join(map(str, found.frame.pixels)), len(found.vectors)
    terminal.print(
        say(
            f"{found.name}: {high} × {wide}, seen as {pixels} pixels",
            f"{found.name}: {high} × {wide}, 모델 입력 {pixels}픽셀",
        )
    )
    d = found.vectors.shape[1]
    terminal.print(
        say(f"tokens: {tokens}, numbers in each vector: {d}", f"토큰 {tokens}개, 벡터 크기 {d}"),
    )
    terminal.print(say(f"map: {rows} rows, {columns} columns", f"맵: {rows}행 {columns}열"))
    if out is not None:
        terminal.print(say(f"Map: {out}", f"맵 파일: {out}"))


def _features_json(model: str, picture: str, layer: int | None, found: "Features", out: Path | None) -> str:
    """Every number; of the map only the place where it was written, if it was."""
    frame = found.frame
    said: dict[str, Any] = {
        "model": model,
        "picture": picture,
        "layer": layer,
        "size": list(frame.picture),
        "pixels": list(frame.pixels),
        "scale": list(frame.scale),
        "corner": list(frame.corner),
        "grid": list(found.grid),
        "cls": None if found.cls is None else as_numpy_has_it(found.cls).tolist(),
        "pooled": None if found.pooled is None else as_numpy_has_it(found.pooled).tolist(),
        "map": as_numpy_has_it(found.map).tolist() if out is None else str(out),
    }
    return json.dumps(finite(said), ensure_ascii=False)
