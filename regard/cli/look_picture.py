"""A picture in the terminal: what the model saw of it, where a token looks, drawn by patches, and every head.

It reads options and prints; `regard.explorer` reads the picture, `regard.lens` lays the weights over it. It does not
know arrays, nor texts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.cli import picture_files
from regard.cli.json_numbers import finite
from regard.cli.language import Lang, Say, speaker
from regard.cli.look_text import Asked, atlas, check_device, find_layer, plain_layer
from regard.cli.model_files import bar
from regard.cli.picture_words import kind_in_korean, plan_in_korean, title_in_korean
from regard.cli.session_files import print_written, write_session
from regard.cli.terminal import Terminal

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from regard.explorer.answer_types import Opening
    from regard.explorer.ranking import Layer
    from regard.explorer.seen_layers import SeenLayer
    from regard.explorer.sessions import Session
    from regard.lens.files.file_photos import Photo
    from regard.lens.overlays import Overlay
    from regard.lens.view import View

__all__ = ["SUFFIXES", "as_plain", "is_picture", "read_picture", "read_place", "show"]

VERSION = 1
INSIDE = (
    "The photo is inside what was written; --no-photo leaves it out.",
    "저장한 파일 안에 이미지가 들어 있습니다. --no-photo로 뺄 수 있습니다.",
)
SUFFIXES = (
    ".jpg", ".jpeg", ".png", ".gif", ".bmp", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".jp2", ".avif", ".heic"
)  # fmt: skip
# What pictures begin with; WebP and AVIF say so a few bytes later.
BEGINNINGS = (b"\xff\xd8\xff", b"\x89PNG", b"GIF8", b"II*\0", b"MM\0*")
LATER = {(8, b"WEBP"), (4, b"ftypavif")}


# ------------------------------------------------------------------------------------------------------------- reading


def is_picture(what: str | bytes) -> bool:
    """Is it the name of a file that is a picture, by its suffix or by its first bytes? Or the bytes of one?

    >>> is_picture("no such file.jpg"), is_picture(b"GIF89a")
    (False, True)
    """
    if isinstance(what, bytes):
        return _begins(what)
    path = Path(what)
    try:
        if not path.is_file():
            return False
    except (OSError, ValueError):  # a text that is longer than a name may be
        return False
    if path.suffix.lower() in SUFFIXES:
        return True
    try:
        with path.open("rb") as file:
            head = file.read(16)
    except OSError:
        return False
    return _begins(head)


def _begins(head: bytes) -> bool:
    return head.startswith(BEGINNINGS) or any(head.startswith(mark, at) for at, mark in LATER)


def read_place(at: str | None) -> tuple[float, float] | None:
    """A place in the picture: "120,300" is 120 pixels down and 300 across. Raises ValueError for anything else.

    >>> read_place("120,300.5")
    (120.0, 300.5)
    """
    if at is None:
        return None
    try:
        y, x = (float(part) for part in at.split(","))
    except ValueError:
        raise ValueError(f"--at must be Y,X: pixels down and across, as in --at 120,300; got {at!r}") from None
    return y, x


def read_picture(
    picture: str | bytes, model: str | None, *, text: str | None, device: str, ignore: Sequence[str] = ()
) -> Session:
    """Let a model look at a picture while a bar shows how far it is loaded.

    >>> read_picture("photo.jpg", None, text=None, device="cpu")
    Traceback (most recent call last):
        ...
    ValueError: a picture needs a model that looks at pictures: --model DIR, or a hub id such as \
--model facebook/dinov2-small

    picture: its path, or a file's bytes.  ignore: keys of the model's files to go on without.
    Raises ValueError without a model, for a device that is none, and as `look_at_picture` does.
    """
    from regard.explorer.picture_reading import look_at_picture
    from regard.models.images.pictures import glance
    from regard.models.loading import load

    if model is None:
        raise ValueError(
            "a picture needs a model that looks at pictures: --model DIR, or a hub id such as "
            "--model facebook/dinov2-small"
        )
    check_device(device)
    source, _ = glance(picture)  # what is none is refused before a model is loaded, which takes long
    with bar("/".join(Path(model).parts[-2:])) as tick:
        loaded = load(model, device=device, ignore=ignore, progress=tick)
    return look_at_picture(source, loaded, text=text)


# --------------------------------------------------------------------------------------------------------- plain values


@dataclass(frozen=True)
class _Focus:
    """Where to look: a layer by its number, what a token of it looks at, and the layers whose heads are shown.

    token: counted through the windows; None for all queries.
    """

    layer: SeenLayer
    index: int
    token: int | None
    overlay: Overlay
    layers: list[Layer]


def as_plain(session: Session, asked: Asked, at: tuple[float, float] | None, lang: Lang) -> dict[str, Any]:
    """What is said of a picture, in values that JSON holds.

    at: a place in the picture, y and x, instead of a token.
    Raises ValueError, IndexError or LookupError for a layer, head, token, place or measure that is not there.
    """
    return _said(session, asked, _focus(session, asked, at), lang)


def _focus(session: Session, asked: Asked, at: tuple[float, float] | None) -> _Focus:
    from regard.explorer.ranking import last_that_looks, layers_of

    layers = layers_of(session)
    if asked.head is not None and asked.layer is None:
        raise ValueError(f"--head {asked.head} needs --layer: each layer has heads of its own")
    if asked.token is not None and at is not None:
        raise ValueError(f"--token {asked.token} and --at exclude each other")
    if asked.layer is not None:
        chosen = find_layer(layers, asked.layer)
        index, layers = chosen.index, [chosen]
    else:
        last = last_that_looks(session)
        if last is None:
            raise LookupError("no layer of this session looks at a picture")
        index = last
    seen = session.layers[index]
    heads = seen.view.sizes[1]
    if asked.head is not None and not 0 <= asked.head < heads:
        raise IndexError(f"--head {asked.head} is out of range: there are {heads}, counted from 0")
    view = session.capture[seen.path] if seen.call is None else session.capture[seen.path, seen.call]
    token = None if at is not None else _token(seen, asked.token)
    overlay = view.overlay(token=token, at=at, head=asked.head)
    return _Focus(seen, index, _number(view, token, at), overlay, layers)


def _number(view: View, token: int | str | tuple[int, int] | None, at: tuple[float, float] | None) -> int | None:
    """Which of the queries of all windows a token is, or the patch at a place; None for neither."""
    from regard.lens.placed_patches import Patches, find_token

    sides, words = view.placed.entry(0)
    if at is not None:
        window, index = Patches(sides.queries, sides.frames[0], 0).at(*at)
    elif token is not None:
        window, index = find_token(sides.queries, token, words, "query")
    else:
        return None
    return window * sides.queries.shape[1] + index


def _token(seen: SeenLayer, wanted: str | None) -> int | str | tuple[int, int] | None:
    """--token as the overlay takes it; without one cls, or the last word, or all queries where there is neither."""
    assert seen.sides is not None
    queries = seen.sides.queries
    if wanted is None:
        if len(queries.indices("cls")) == 1:
            return "cls"
        text = queries.indices("text")
        return (int(text[-1][0]), int(text[-1][1])) if len(text) else None
    if not (wanted.isascii() and wanted.isdigit()):
        return wanted
    if int(wanted) >= queries.kind.size:
        raise IndexError(f"--token {wanted} is out of range: there are {queries.kind.size:,} queries, counted from 0")
    return divmod(int(wanted), queries.shape[1])


def _said(session: Session, asked: Asked, focus: _Focus, lang: Lang) -> dict[str, Any]:
    from regard.explorer.sentences import WARNING

    overlay, seen = focus.overlay, focus.layer
    frame = session.frames[0]
    model = session.model
    order = sorted(range(len(overlay.mass)), key=lambda n: (-overlay.mass[n], n))[: asked.top]
    return {
        "version": VERSION,
        "name": session.name,
        "text": session.text,
        "picture": {"name": _picture_name(session), "height": frame.picture[0], "width": frame.picture[1]},
        "prepared": None if model is None else str(model.preprocessor.plan),
        "pixels": list(frame.pixels),
        "seen": frame.boxes([0, 0, *frame.pixels]).round(2).tolist(),
        "layer": {"index": focus.index, "path": seen.path, "windows": seen.windows},
        "head": asked.head,
        "of": overlay.title.partition(": ")[2],
        "shares": overlay.shares,
        "grid": _grid(overlay),
        "strongest": [
            {
                "row": int(overlay.cells[n, 0]),
                "column": int(overlay.cells[n, 1]),
                "box": overlay.boxes[n].round(2).tolist(),
                "weight": float(overlay.mass[n]),
            }
            for n in order
            if overlay.mass[n] > 0
        ],
        "layers": [plain_layer(layer) for layer in focus.layers],
        "measure": asked.measure,
        "atlas": atlas(session, focus.layers, asked.measure),
        "patterns": [[list(names) for names in session.numbers[layer.index].names] for layer in focus.layers],
        "rest": [list(session.numbers[layer.index].rest) for layer in focus.layers],
        "sentence": _sentence(session, focus.index, asked.head, lang),
        "warning": WARNING[lang],
    }


def _picture_name(session: Session) -> str | None:
    """Of the picture's file; None for a capture that does not have it."""
    return session.pictures[0].name if session.pictures else None


def _sentence(session: Session, layer: int, head: int | None, lang: Lang) -> str | None:
    if head is None:
        return None
    from regard.explorer.answers import head as card

    return card(session, layer, head, lang)["sentence"]


def _grid(overlay: Overlay) -> list[list[float]]:
    """(rows, columns) the weight of each patch."""
    rows, columns = (int(n) + 1 for n in overlay.cells.max(0))
    grid = [[0.0] * columns for _ in range(rows)]
    for (row, column), mass in zip(overlay.cells.tolist(), overlay.mass.tolist(), strict=True):
        grid[row][column] = mass
    return grid


# ------------------------------------------------------------------------------------------------------------- showing


def show(
    session: Session,
    asked: Asked,
    at: tuple[float, float] | None,
    photo: str | bytes | None,
    *,
    json_: bool,
    lang: Lang,
) -> None:
    """Print what a model looks at in a picture, or what JSON holds of it, and write the files that were asked for.

    photo: the picture's path, or its file's bytes, for the figure; None for a capture, whose own copy is drawn, or else
      patches on bare paper.
    Raises as `as_plain`, and ValueError for a capture's picture that cannot be decoded.
    """
    focus = _focus(session, asked, at)
    said = _said(session, asked, focus, lang)
    kept = session if asked.photo else replace(session, pictures=())
    if asked.html is not None:
        kept = replace(kept, opening=_opening(asked, focus))
    if asked.figure is not None:
        _draw(kept, asked, focus, at, photo if asked.photo else None)
    written = write_session(kept, asked.html, asked.save, lang) | _named(asked.figure)
    inside = bool(kept.pictures) and any(written.values())
    if json_:
        print(json.dumps(finite({**said, **written, "photo": inside}), ensure_ascii=False, allow_nan=False))
        return
    out = Terminal()
    _print(session, said, asked, lang, out)
    print_written(written, lang, out)
    if inside:
        out.print((speaker(lang)(*INSIDE), "dim"))


def _opening(asked: Asked, focus: _Focus) -> Opening:
    """Where the page opens: on the layer, token and head that are printed; of all heads, on the one that stands out."""
    from regard.explorer.ranking import head_for

    head, token = head_for(focus.layer, focus.token, asked.head) or (asked.head or 0, focus.token)
    return {"layer": focus.index, "head": head, "token": token, "key": None}


def _named(figure: Path | None) -> dict[str, str | None]:
    return {"figure": None if figure is None else str(figure)}


def _draw(
    session: Session, asked: Asked, focus: _Focus, at: tuple[float, float] | None, photo: str | bytes | None
) -> None:
    """The overlay on the photograph, which is opened again where its file is there: a session keeps a smaller copy."""
    from regard.models.images.pictures import open_picture

    assert asked.figure is not None
    seen = focus.layer
    view = session.capture[seen.path] if seen.call is None else session.capture[seen.path, seen.call]
    token = None if at is not None else _token(seen, asked.token)
    image: object = None
    if photo is not None:
        image = open_picture(photo).image
    elif session.pictures:
        image = _enlarged(session.pictures[0])
    drawn = view.overlay(image, token=token, at=at, head=asked.head)
    picture_files.write(drawn.figure(), asked.figure)


def _enlarged(photo: Photo) -> NDArray[np.uint8]:
    """The copy of a photograph in grey, as large as the photograph was: (height, width)."""
    import numpy as np

    from regard.models.images.pictures import open_picture

    try:
        image = open_picture(photo.data).image
    except ValueError as error:
        said = str(error).replace("the data", f"the photo {photo.name!r} in the capture", 1)
        raise ValueError(f"{said}; --no-photo draws without it") from None
    high, wide = photo.size
    return np.asarray(image.convert("L").resize((wide, high)))


def _print(session: Session, said: dict[str, Any], asked: Asked, lang: Lang, out: Terminal) -> None:
    from regard.cli.terminal_atlas import print_atlas
    from regard.cli.terminal_patches import print_patches, print_strongest

    say = speaker(lang)
    _print_seen(session, said, say, out)
    out.print()
    heads = session.layers[said["layer"]["index"]].view.sizes[1]
    whose = _whose(said, heads, say)
    out.print((say(said["of"], title_in_korean(said["of"])), "bold"), (f"   {whose}", "dim"))
    _print_shares(said, say, out)
    out.print()
    print_patches(said["grid"], lang, out)
    out.print()
    print_strongest(said["strongest"], lang, out)
    out.print()
    if said["sentence"] is not None:
        out.print(said["sentence"])
    else:
        print_atlas(said, lang, out)
    out.print()
    out.print((said["warning"], "italic"))


def _whose(said: dict[str, Any], heads: int, say: Say) -> str:
    layer, head = said["layer"]["index"], said["head"]
    if head is not None:
        return say(f"layer {layer}, head {head}", f"레이어 {layer}, 헤드 {head}")
    return say(f"layer {layer}, mean of {heads} heads", f"레이어 {layer}, 헤드 {heads}개의 평균")


def _print_shares(said: dict[str, Any], say: Say, out: Terminal) -> None:
    order = sorted(said["shares"].items(), key=lambda item: -item[1])
    named = ", ".join(f"{say(name, kind_in_korean(name))} {share:.3f}" for name, share in order)
    out.print((say(f"weight in all: {named}", f"가중치 합: {named}"), "dim"))


def _print_seen(session: Session, said: dict[str, Any], say: Say, out: Terminal) -> None:
    """What the model saw: the picture, how it was prepared, the part of it that is left, the patches."""
    picture, (high, wide) = said["picture"], said["pixels"]
    family = "" if session.model is None else f" ({session.model.family.title})"
    out.print((session.name + family, "bold"))
    name = picture["name"] or say("a picture, which is not in the capture", "이미지 (캡처에 들어 있지 않음)")
    out.print(
        say(
            f"{name}: {picture['height']} × {picture['width']} pixels, high and wide",
            f"{name}: {picture['height']} × {picture['width']} 픽셀 (세로 × 가로)",
        )
    )
    if session.model is not None:
        plan = session.model.preprocessor.plan
        out.print((say(f"prepared: {plan}", f"전처리: {plan_in_korean(plan)}"), "dim"))
    top, left, bottom, right = said["seen"]
    rows, columns = len(said["grid"]), len(said["grid"][0])
    seen = say(
        f"seen: rows {top:g} to {bottom:g}, columns {left:g} to {right:g}, as {high} × {wide} pixels "
        f"in {rows} × {columns} patches",
        f"모델이 본 부분: 세로 {top:g}~{bottom:g}, 가로 {left:g}~{right:g}. "
        f"{high} × {wide} 픽셀, 패치 {rows} × {columns}",
    )
    windows = said["layer"]["windows"]
    more = say(f"; {windows} windows here", f", 윈도 {windows}개") if windows > 1 else ""
    out.print(seen + more)
    if said["text"]:
        out.print(say(f"text: {said['text']}", f"텍스트: {said['text']}"))
