"""`regard look`: what attention looked at, of q, k and v in a file or of a capture of a whole model.

It reads options and prints. What it prints is measured by `regard.lens`: `looking` for arrays, `capture` and `saving`
for captures, `describing` for what is said of a head.
"""

# No `from __future__ import annotations`: typer reads the annotations, and their texts are chosen while this runs.
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.cli import picture_files
from regard.cli.array_files import SUFFIXES, read_arrays
from regard.cli.capture_files import read_capture
from regard.cli.head_tables import LINKS, as_plain, print_call
from regard.cli.json_numbers import finite
from regard.cli.language import Lang, known, speaker
from regard.cli.terminal import Terminal

if TYPE_CHECKING:
    from regard.lens.capture import Capture
    from regard.lens.view import View

__all__ = ["Chosen", "add"]

LARGEST = 2**34  # bytes, 16 GiB: what q, k and v may take
TAKES = (
    f"look takes a file: q, k and v in {', '.join(SUFFIXES)}, or a capture that was saved, such as run.regard; "
    "a text or an image it does not take yet"
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
    say = speaker(lang)

    @app.command(
        "look",
        help=say(
            "What attention looked at: entropy, received mass, patterns and links of every head.\n\n"
            "FILE holds q, k and v (.npz, .safetensors; an .npy is all three at once), or is a capture of a model.\n\n"
            "A capture: with regard.watch(model) as seen: …; seen.save('run.regard')",
            "어텐션이 무엇을 보았는지 헤드별로 보여 줍니다.\n\n"
            "엔트로피, 받은 어텐션, 패턴, 가장 강한 연결을 출력합니다.\n\n"
            "FILE은 q, k, v(.npz, .safetensors, .npy) 또는 모델의 캡처입니다.\n\n"
            "캡처: with regard.watch(model) as seen: …; seen.save('run.regard')",
        ),
    )
    def look(
        file: Annotated[Path, typer.Argument(metavar="FILE", help=say("q, k, v or a capture.", "q, k, v 또는 캡처."))],
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
            typer.Option(metavar="N|PATH", help=say("Capture: which module.", "캡처: 모듈 번호 또는 경로.")),
        ] = None,
        call: Annotated[
            int | None, typer.Option(metavar="N", help=say("Capture: which of its calls.", "캡처: 몇 번째 호출."))
        ] = None,
        batch: Annotated[int | None, typer.Option(metavar="B", help=say("Which batch row.", "배치 번호."))] = None,
        head: Annotated[int | None, typer.Option(metavar="H", help=say("Which head.", "헤드 번호."))] = None,
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
        json_: Annotated[bool, typer.Option("--json", help=say("As JSON.", "JSON으로 출력합니다."))] = False,
        lang: Annotated[str, typer.Option(metavar="en|ko", help=say("Language of the text.", "출력 언어."))] = lang,
    ) -> None:
        picture_files.check_place(figure)
        spoken = known(lang)
        chosen = Chosen(batch=batch, head=head, row=row, size=size, top=top)
        _check_positive(("--top", top), ("--size", size))
        if size is not None and figure is None:
            raise ValueError("--size is of the map in the figure: give --figure as well")
        if not file.exists():
            raise ValueError(f"there is no file {str(file)!r}; {TAKES}")
        if file.suffix.lower() in SUFFIXES:
            _refuse("are of captures; q, k and v are one call", ("--layer", layer), ("--call", call))
            _show_call(_of_arrays(file, causal, mask, scale, chosen), chosen, figure, json_, spoken)
            return
        asked = (("--causal", causal or None), ("--mask", mask), ("--scale", scale))
        _refuse("are of q, k and v; a capture has its own", *asked)
        capture = read_capture(file)
        if layer is None:
            inner = (("--call", call), ("--batch", batch), ("--head", head), ("--row", row), ("--top", top))
            _refuse("need --layer: which module of the capture", *inner, ("--size", size))
            _show_capture(capture, file, figure, json_, spoken)
            return
        _show_call(_of_capture(file, capture, layer, call, size), chosen, figure, json_, spoken)


def _refuse(why: str, *options: tuple[str, object]) -> None:
    """No option is accepted and then ignored."""
    given = [name for name, value in options if value is not None]
    if given:
        raise ValueError(f"{', '.join(given)} {why}")


def _check_positive(*options: tuple[str, int | None]) -> None:
    for name, value in options:
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")


# ------------------------------------------------------------------------------------------------------------- reading


def _of_arrays(file: Path, causal: bool, mask: str | None, scale: float | None, chosen: Chosen) -> _Call:
    from regard.cli.mask_language import read_mask
    from regard.lens.describing import plain
    from regard.lens.looking import look
    from regard.lens.measuring.measures import MAP_SIZE, NAMES

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
    from regard.lens.describing import plain

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
        from regard.lens.showing import picture_of

        picture_files.write(picture_of(call.view, batch=b, head=h, tokens=said["tokens"]), figure)
    if json_:
        print(_json({**said, "figure": figure}))
        return
    print_call(said, chosen, lang)
    if figure is not None:
        Terminal().print(say("Figure: ", "그림: "), str(figure), (say(f"   head {h}", f"   헤드 {h}"), "dim"))


def _show_capture(capture: "Capture", file: Path, figure: Path | None, json_: bool, lang: Lang) -> None:
    if not capture.names:
        capture.summary(lang)  # which raises, and says what is known about why
    if figure is not None:
        from regard.lens.showing import atlas_of

        picture_files.write(atlas_of(capture), figure)
    if json_:
        print(_json({"title": str(file), **_plain_capture(capture), "figure": figure}))
        return
    out, say = Terminal(), speaker(lang)
    title, *rest = capture.summary(lang).split("\n")
    out.print((title, "bold"), (say("   written ", "   저장: ") + capture.origin["written"], "dim"))
    out.print("\n".join(rest))
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
