"""`regard look`: what attention looked at, in a text or picture that a model reads, in a capture, or in q, k and v.

It reads options, and prints arrays and captures, which `regard.lens` measures. `look_text.py` reads and prints texts,
`look_picture.py` pictures.
"""

# No `from __future__ import annotations`: typer reads the annotations, and their texts are chosen while this runs.
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.cli import files, look_image, look_text
from regard.cli.captures import check_capture, read_session
from regard.cli.file_names import is_file
from regard.cli.files import SUFFIXES, as_text, check_output, finite, read_arrays, read_one, read_piped
from regard.cli.look_text import Asked
from regard.cli.options import Lang, known, options_in, speaker
from regard.cli.terminal import LINKS, Terminal, as_plain, print_call

if TYPE_CHECKING:
    from regard.lens.capture import Capture
    from regard.lens.view import View
    from regard.session.session import Session

__all__ = ["Chosen", "add"]

LARGEST = 2**34  # bytes, 16 GiB: what q, k and v may take
ALONE = {"are": "is", "need": "needs"}  # the verb of one option
TAKES = (
    f"look takes a text, q, k and v in {', '.join(SUFFIXES)}, a picture, or a capture that was saved, such as "
    "run.regard; --file reads a text from a file"
)


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """What of a view is wanted; None where nothing was said."""

    batch: int | None
    head: int | None
    row: int | None
    size: int | None
    top: int | None


@dataclass(frozen=True)
class _Call:
    """What is looked at: one call of attention, where it comes from, its mask in words and its labels per batch row."""

    view: "View"
    title: str
    mask: str
    tokens: list[list[str]] | None = None


def add(app: typer.Typer, lang: Lang) -> None:
    """Add the command to the app, with help in a language.

    >>> app = typer.Typer()
    >>> add(app, "en")
    >>> app.registered_commands[0].name
    'look'
    """
    say, options = speaker(lang), options_in(lang)

    @app.command(
        "look",
        help=say(
            "What attention looks at: in a text or a picture that a model reads, or in a file.\n\n"
            "WHAT is a text, a picture, '-' for either on standard input, a capture (.regard), or q, k and v (.npz, "
            ".safetensors; an .npy is all three at once).\n\n"
            "A picture needs --model. Without --token or --at it is what cls looks at, in the last layer.\n\n"
            "Links are ranked by (weight - what their key gets from a query on the mean) x (1 - 1/distance), so far "
            "ones stand first and neighbours nowhere; special tokens, punctuation, the own position and pieces of one "
            "word are left out. --all ranks every token by weight alone.\n\n"
            "A capture: --save run.regard, or with regard.watch(model) as seen: …; seen.save('run.regard')",
            "모델이 읽는 텍스트나 이미지, 또는 파일에서 어텐션을 살펴봅니다.\n\n"
            "WHAT은 텍스트, 이미지, 표준 입력의 텍스트나 이미지('-'), 캡처(.regard), "
            "또는 q, k, v 파일(.npz, .safetensors, .npy)입니다.\n\n"
            "이미지에는 --model이 필요합니다. --token이나 --at이 없으면 마지막 레이어의 cls를 봅니다.\n\n"
            "연결의 순위: (가중치 - 그 키가 평균적으로 받는 값) x (1 - 1/거리). "
            "그래서 먼 연결이 앞에 오고 이웃은 빠집니다. "
            "특수 토큰, 문장 부호, 자기 위치, 한 단어의 조각은 뺍니다. --all은 모든 토큰을 가중치 순으로만 봅니다.\n\n"
            "캡처: --save run.regard, 또는 파이썬의 regard.watch(model)",
        ),
    )
    def look(
        what: Annotated[
            str | None,
            typer.Argument(metavar="WHAT", help=say("A text, '-', or a file.", "텍스트, '-', 또는 파일.")),
        ] = None,
        text_file: Annotated[
            Path | None, typer.Option("--file", metavar="FILE", help=say("The text, in a file.", "텍스트가 든 파일."))
        ] = None,
        model: Annotated[
            str | None,
            typer.Option(
                metavar="DIR|ID",
                help=say("Who reads; of texts all-MiniLM-L6-v2.", "읽을 모델. 텍스트의 기본은 all-MiniLM-L6-v2."),
            ),
        ] = None,
        token: Annotated[
            str | None,
            typer.Option(metavar="N|WORD", help=say("What this token looks at.", "이 토큰이 무엇을 보는지.")),
        ] = None,
        at: Annotated[
            str | None,
            typer.Option(
                metavar="Y,X",
                help=say("Picture: what the patch there looks at.", "이미지: 그 위치의 패치가 무엇을 보는지."),
            ),
        ] = None,
        beside: Annotated[
            str | None,
            typer.Option(
                "--text",
                metavar="TEXT",
                help=say("Picture: a question or caption read with it.", "이미지: 함께 읽을 질문이나 설명."),
            ),
        ] = None,
        measure: Annotated[
            str | None,
            typer.Option(
                metavar="NAME",
                help=say(
                    "Of the heads: entropy, effective (keys, 1/Σw²), received_max, or a pattern such as first.",
                    "헤드의 값: entropy, effective(1/Σw²), received_max, 패턴.",
                ),
            ),
        ] = None,
        every: Annotated[
            bool, typer.Option("--all", help=say("Links of all tokens, by weight.", "모든 토큰의 연결, 가중치순."))
        ] = False,
        truncate: Annotated[
            bool, typer.Option("--truncate", help=say("Cut a text that is too long.", "너무 긴 텍스트는 자릅니다."))
        ] = False,
        ignore: Annotated[list[str] | None, options.ignore] = None,
        device: Annotated[str | None, options.device] = None,
        html: Annotated[
            Path | None,
            typer.Option(metavar="FILE", help=say("Write one page that needs nothing.", "단일 HTML 페이지로 저장.")),
        ] = None,
        save: Annotated[
            Path | None, typer.Option(metavar="FILE", help=say("Write a capture (.regard).", "캡처(.regard)로 저장."))
        ] = None,
        no_photo: Annotated[
            bool,
            typer.Option(
                "--no-photo",
                help=say("Picture: not inside what is written.", "이미지: 저장하는 파일에 넣지 않습니다."),
            ),
        ] = False,
        causal: Annotated[
            bool, typer.Option("--causal", help=say("q, k, v: hide the future.", "q, k, v: 미래를 가립니다."))
        ] = False,
        mask: Annotated[
            str | None,
            typer.Option(metavar="SPEC", help=say("q, k, v: as in 'regard mask'.", "q, k, v: 'regard mask'의 SPEC.")),
        ] = None,
        scale: Annotated[
            float | None,
            typer.Option(metavar="NUMBER", help=say("q, k, v: instead of 1/√D.", "q, k, v: 1/√D 대신 쓸 값.")),
        ] = None,
        layer: Annotated[
            str | None,
            typer.Option(metavar="N|PATH", help=say("Which layer, or its module.", "레이어 번호 또는 모듈 경로.")),
        ] = None,
        call: Annotated[
            int | None, typer.Option(metavar="N", help=say("Capture: which of its calls.", "캡처: 몇 번째 호출."))
        ] = None,
        batch: Annotated[int | None, typer.Option(metavar="B", help=say("Which batch row.", "배치 번호."))] = None,
        head: Annotated[
            int | None, typer.Option(metavar="H", help=say("Which head of it.", "그 레이어의 헤드 번호."))
        ] = None,
        row: Annotated[
            int | None,
            typer.Option(metavar="I", help=say("Exact weights of query I.", "쿼리 I의 정확한 가중치.")),
        ] = None,
        top: Annotated[
            int | None, typer.Option(metavar="K", help=say("How many links; 8.", "연결 개수. 기본은 8."))
        ] = None,
        size: Annotated[
            int | None,
            typer.Option(metavar="CELLS", help=say("Of the map in the figure; 64.", "그림 속 맵의 크기. 기본은 64.")),
        ] = None,
        figure: Annotated[
            Path | None,
            typer.Option(
                metavar="FILE",
                help=say("Draw a head, or the atlas: .png, .svg, .pdf.", "헤드 또는 전체를 그림: .png, .svg, .pdf."),
            ),
        ] = None,
        json_: Annotated[bool, options.json] = False,
        lang: Annotated[str, options.lang] = lang,
    ) -> None:
        files.check_place(figure)
        check_capture(save)
        check_output(html)
        spoken = known(lang)
        chosen = Chosen(batch=batch, head=head, row=row, size=size, top=top)
        _check_positive(("--top", top), ("--size", size))
        if size is not None and figure is None:
            raise ValueError("--size is of the map in the figure: give --figure as well")
        if no_photo and html is None and save is None and figure is None:
            raise ValueError("--no-photo is of what is written: give --save, --html or --figure as well")
        asked = Asked(
            layer=layer, head=head, token=token, measure=measure or "entropy", top=top or LINKS, every=every,
            html=html, save=save, figure=figure, photo=not no_photo,
        )  # fmt: skip
        of_arrays = (("--causal", causal or None), ("--mask", mask), ("--scale", scale))
        of_files = (("--call", call), ("--batch", batch), ("--row", row), ("--size", size))
        of_texts = (
            ("--model", model), ("--ignore", ignore), ("--device", device), ("--truncate", truncate or None)
        )  # fmt: skip
        of_words = (
            ("--token", token), ("--measure", measure), ("--all", every or None), ("--html", html), ("--save", save)
        )  # fmt: skip
        piped = read_piped(what, text_file)
        seen = what if piped is None else piped
        if text_file is None and seen is not None and look_image.is_picture(seen):
            _refuse("are of files; of a picture there are --layer, --head, --token and --at", *of_arrays, *of_files)
            _refuse("are of texts; this is a picture", ("--all", every or None), ("--truncate", truncate or None))
            place = look_image.read_place(at)
            session = look_image.read_picture(seen, model, text=beside, device=device or "cpu", ignore=ignore or ())
            look_image.show(session, asked, place, seen, json_=json_, lang=spoken)
            return
        _refuse("are of pictures; this is none", ("--text", beside))
        of_pictures = (("--at", at), ("--no-photo", no_photo or None))
        if text_file is not None or what is None or not is_file(what, TAKES):
            _refuse("are of pictures; this is none", *of_pictures)
            _refuse("are of files; of a text there are --layer, --head and --token", *of_arrays, *of_files)
            text = read_one(what, text_file) if piped is None else as_text(piped)
            session, length = look_text.read_text(
                text, model, device=device or "cpu", truncate=truncate, ignore=ignore or ()
            )
            look_text.show(session, asked, json_=json_, lang=spoken, length=length)
            return
        file = Path(what)
        _refuse("are of a text; this is a file", *of_texts)
        if file.suffix.lower() in SUFFIXES:
            _refuse("are of pictures; this is none", *of_pictures)
            _refuse("are of captures; q, k and v are one call", ("--layer", layer), ("--call", call))
            _refuse("are of texts and captures; q, k and v have no words", *of_words)
            _show_call(_of_arrays(file, causal, mask, scale, chosen), chosen, figure, json_, spoken)
            return
        _refuse("are of q, k and v; a capture has its own", *of_arrays)
        session = read_session(file)
        if session.frames and any(value is not None for value in (at, token, html, save, no_photo or None)):
            _refuse("are of the tables of one call; leave out --at, --token and the like", *of_files)
            look_image.show(session, asked, look_image.read_place(at), None, json_=json_, lang=spoken)
            return
        _refuse("are of captures of a picture; this one does not say where its tokens lie", *of_pictures)
        if any(value is not None for _, value in of_words):
            _refuse("are of the tables of one call; leave out --token and the like", *of_files)
            look_text.show(session, asked, json_=json_, lang=spoken)
            return
        if layer is None:
            _refuse("need --layer: which module of the capture", ("--head", head), ("--top", top), *of_files)
            _show_capture(session, file, figure, json_, spoken)
            return
        _show_call(_of_capture(file, session.capture, layer, call, size), chosen, figure, json_, spoken)


def _refuse(why: str, *options: tuple[str, object]) -> None:
    """No option is accepted and then ignored. why: begins with its verb, "are" or "need", as of several options."""
    given = [name for name, value in options if value is not None]
    verb, _, rest = why.partition(" ")
    if given:
        raise ValueError(f"{', '.join(given)} {verb if len(given) > 1 else ALONE[verb]} {rest}")


def _check_positive(*options: tuple[str, int | None]) -> None:
    for name, value in options:
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")


# ------------------------------------------------------------------------------------------------------------- reading


def _of_arrays(file: Path, causal: bool, mask: str | None, scale: float | None, chosen: Chosen) -> _Call:
    from regard.cli.mask import read_mask
    from regard.lens.display import plain
    from regard.lens.look import look
    from regard.lens.measures.measures import MAP_SIZE, NAMES

    if causal and mask is not None:
        raise ValueError(f"--causal and --mask exclude each other; write --mask 'causal & ({mask})'")
    arrays = read_arrays(file, (("q", "k", "v"),), LARGEST)
    spec = "causal" if causal else mask
    rule = None if spec is None else read_mask(spec)
    size, top = chosen.size or MAP_SIZE, chosen.top or LINKS
    view = look(**arrays, mask=rule, scale=scale, measures=NAMES, size=size, top=top)
    return _Call(plain(view), str(file), "none" if rule is None else repr(rule))


def _of_capture(file: Path, capture: "Capture", layer: str, call: int | None, size: int | None) -> _Call:
    """One module, by its number or its path; LookupError for a map of a size that cannot be made any more."""
    from regard.lens.display import plain

    path, names = layer, capture.names
    if layer not in capture and layer.isascii() and layer.isdigit():
        if not int(layer) < len(names):
            raise ValueError(f"--layer {layer} is out of range: the capture has {len(names)} modules, counted from 0")
        path = names[int(layer)]
    view = plain(capture[path] if call is None else capture[path, call])
    if size is not None:
        view = replace(view, size=size, held=view.held | {"map": view.map(size)})
    calls = capture.calls(path)
    used = calls if call is None else [calls[call]]
    masks = dict.fromkeys(record.facts.mask for record in used if record.facts is not None)
    number = "" if call is None else f"[{call}]"
    return _Call(view, f"{file}: {path or '(model)'}{number}", "; ".join(masks) or "–", capture.tokens)


# ------------------------------------------------------------------------------------------------------------- showing


def _show_call(call: _Call, chosen: Chosen, figure: Path | None, json_: bool, lang: Lang) -> None:
    said = {"title": call.title, "mask": call.mask} | as_plain(call.view, chosen, call.tokens)
    b, h, say = chosen.batch or 0, chosen.head or 0, speaker(lang)
    if figure is not None:
        from regard.lens.display import view_figure

        files.write(view_figure(call.view, batch=b, head=h, tokens=said["tokens"]), figure)
    if json_:
        print(_json({**said, "figure": figure}))
        return
    print_call(said, chosen, lang)
    if figure is not None:
        Terminal().print(say("Figure: ", "그림: "), str(figure), (say(f"   head {h}", f"   헤드 {h}"), "dim"))


def _show_capture(session: "Session", file: Path, figure: Path | None, json_: bool, lang: Lang) -> None:
    capture = session.capture
    if not capture.names:
        capture.summary(lang)  # which raises, and says what is known about why
    if figure is not None:
        from regard.lens.display import atlas_figure

        files.write(atlas_figure(capture), figure)
    if json_:
        print(_json({"title": str(file), **_plain_capture(capture), "figure": figure}))
        return
    out, say = Terminal(), speaker(lang)
    title, *rest = capture.summary(lang).split("\n")
    out.print((title, "bold"), (say("   written ", "   저장: ") + capture.origin["written"], "dim"))
    out.print("\n".join(rest))
    out.print()
    look_text.print_sections(look_text.as_plain(session, Asked(), lang), Asked(), lang, out)
    out.print()
    out.print((say("--layer N shows the heads of one module", "--layer N으로 모듈 하나의 헤드를 봅니다"), "dim"))
    if figure is not None:
        out.print(say("Figure: ", "그림: "), str(figure))


def _plain_capture(capture: "Capture") -> dict[str, Any]:
    modules = []
    for number, name in enumerate(capture.names):
        calls = capture.calls(name)
        views = [record.view for record in calls if record.view is not None]
        modules.append(
            {
                "number": number,
                "path": name,
                "kind": calls[0].kind,
                "source": calls[0].source,
                "kernel": calls[0].kernel,
                "calls": len(calls),
                "heads": views[0].sizes[1],
                "queries": sum(view.sizes[2] for view in views),
                "keys": views[-1].sizes[3],
                "exact": all(view.weights is not None for view in views),
            }
        )
    origin = {name: capture.origin[name] for name in ("regard", "torch", "written")}
    return {"model": capture.model, **origin, "modules": modules, "unseen": capture.unseen, "tokens": capture.tokens}


def _json(values: dict[str, Any]) -> str:
    plain = {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}
    return json.dumps(finite(plain), ensure_ascii=False, allow_nan=False)
