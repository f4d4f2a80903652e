"""`regard look` for an image."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.cli import files
from regard.cli.files import finite
from regard.cli.look_text import Asked, atlas, check_device, find_layer, plain_layer, print_written, write_session
from regard.cli.models import bar
from regard.cli.options import Lang, Say, speaker
from regard.cli.terminal import Part, Terminal, light_paper

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from regard.data.image_processing import ImageTransforms
    from regard.data.image_steps import Normalize, Pad, Step, Target
    from regard.lens.files.saving import Photo
    from regard.lens.overlays import Overlay
    from regard.lens.view import View
    from regard.session.protocol import Opening
    from regard.session.ranking import Layer, SeenLayer
    from regard.session.session import Session

WIDEST, HIGHEST = 64, 24  # cells of the picture
PIPE = 100  # cells on a line where there is no terminal


def print_patches(grid: list[list[float]], lang: Lang, out: Terminal) -> None:
    """Print the weights of a grid of patches where they lie: 0 to 9 in tenths of the largest, or colours.

    >>> print_patches([[0.0, 0.03], [0.01, 0.2]], "en", Terminal())
    Patches by weight: 9 is 0.200, · is under a tenth of that
      · 1
      · 9

    grid: (rows, columns), from 0 up.
    """
    say, high = speaker(lang), max((weight for row in grid for weight in row), default=0.0)
    if not out.coloured:
        title = say("Patches by weight", "패치별 가중치")
        hint = say(f": 9 is {high:.3f}, · is under a tenth of that", f": 9는 {high:.3f}, ·는 그 1/10 미만")
        out.print((title, "bold"), hint)
        for row in grid:
            out.print("  " + " ".join(_digit(weight / high if high else 0.0) for weight in row))
        return
    out.print((say("Patches by weight", "패치별 가중치"), "bold"), say(f": up to {high:.3f}", f": 최대 {high:.3f}"))
    for line in _blocks(grid, high, (out.room or PIPE) - 2):
        out.print("  ", *line)


def _digit(place: float) -> str:
    return "·" if place < 0.1 else str(min(9, int(10 * place)))


def _blocks(grid: list[list[float]], high: float, room: int) -> list[list[Part]]:
    """Lines of half blocks: the upper half in the colour of its letter, the lower in that of its ground."""
    scale = max(1, min(room // len(grid[0]), WIDEST // len(grid[0]), 2 * HIGHEST // len(grid)))
    tall = [
        [weight / high if high else 0.0 for weight in row for _ in range(scale)] for row in grid for _ in range(scale)
    ]
    colours = [[_colour(place) for place in row[:room]] for row in tall]
    lines: list[list[Part]] = []
    for n in range(0, len(colours), 2):
        above = colours[n]
        below = colours[n + 1] if n + 1 < len(colours) else None
        pairs = zip(above, below, strict=True) if below else ((colour, None) for colour in above)
        lines.append([("▀", upper if lower is None else f"{upper} on {lower}") for upper, lower in pairs])
    return lines


def _colour(place: float) -> str:
    """A place from 0 to 1 in the house's colours for this terminal's paper, as #rrggbb."""
    import numpy as np

    from regard.viz.colors import DARK, LIGHT, Scale

    theme = LIGHT if light_paper(os.environ) else DARK
    cell = Scale("", theme.weight, 0.0, 1.0, hidden=-1.0).colours(np.array(min(max(place, 0.0), 1.0)))
    return "#" + "".join(f"{round(255 * channel):02x}" for channel in cell.tolist())


def print_strongest(patches: list[dict[str, Any]], lang: Lang, out: Terminal) -> None:
    """Print the strongest patches, one a line: row and column, weight, and where it lies in the picture.

    >>> print_strongest([{"row": 1, "column": 0, "box": [16.0, 0.0, 32.0, 16.5], "weight": 0.25}], "en", Terminal())
    Strongest patches
      (1, 0)  0.2500  rows 16 to 32, columns 0 to 16.5
    """
    say = speaker(lang)
    out.print((say("Strongest patches", "가중치가 큰 패치"), "bold"))
    names = [f"({patch['row']}, {patch['column']})" for patch in patches]
    wide = max(map(len, names), default=0)
    for name, patch in zip(names, patches, strict=True):
        top, left, bottom, right = patch["box"]
        place = say(
            f"rows {top:.4g} to {bottom:.4g}, columns {left:.4g} to {right:.4g}",
            f"세로 {top:.4g}~{bottom:.4g}, 가로 {left:.4g}~{right:.4g}",
        )
        out.print(f"  {name:<{wide}}  {patch['weight']:.4f}  ", (place, "dim"))
    if not patches:
        out.print("  ", say("none", "없음"))


KINDS = {  # as the page calls them
    "text": "텍스트",
    "patch": "패치",
    "distillation": "증류 토큰",
    "register": "레지스터",
    "latent": "잠재 토큰",
    "padding": "패딩",
    "other images": "다른 이미지",
    "beyond the image": "이미지 밖",
    "sink": "싱크",
}
# What an overlay's title is made of; a word in “…” stays as it was read.
TITLES = (
    (r"^all queries(?= → | \()|(?<= → )all queries$", "모든 쿼리"),
    (r"\(padding included\)", "(패딩 포함)"),
    (r"^the image(?= → )|(?<= → )the image$", "이미지"),
    (r"^image (\d+)(?= → )|(?<= → )image (\d+)$", r"이미지 \1\2"),
    (r"^(patch \(\d+, \d+\)|[a-z]+(?: \d+)?) of image (\d+)", r"이미지 \2의 \1"),
)


def kind_in_korean(kind: str) -> str:
    """A kind of token; what has no other name stays.

    >>> kind_in_korean("patch"), kind_in_korean("cls")
    ('패치', 'cls')
    """
    return KINDS.get(kind, kind)


def title_in_korean(title: str) -> str:
    """Whose attention an overlay shows, and of what.

    >>> title_in_korean("cls → the image"), title_in_korean("patch (1, 0) → image 2")
    ('cls → 이미지', '패치 (1, 0) → 이미지 2')
    >>> title_in_korean("latent 0 of image 1 → image 1"), title_in_korean("all queries (padding included) → text")
    ('이미지 1의 잠재 토큰 0 → 이미지 1', '모든 쿼리 (패딩 포함) → 텍스트')
    """
    for english, korean in TITLES:
        title = re.sub(english, korean, title)
    return re.sub(r"(?<!“)\b(text|patch|distillation|register|latent|padding)\b(?= \(| \d| →|$)", _kind, title, count=1)


def plan_in_korean(plan: ImageTransforms) -> str:
    """Everything that is done to a picture, in order.

    >>> from regard.data.image_processing import ImageTransforms
    >>> from regard.data.image_steps import Crop, Normalize, Resize
    >>> from regard.data.image_steps import ShorterSide
    >>> numbers = Normalize(1 / 255, (0, 0, 0), (1, 1, 1))
    >>> plan_in_korean(ImageTransforms((Resize(ShorterSide(256), 3), Crop(224, 224)), numbers, None))
    '짧은 변을 256으로 크기 조정 (bicubic), 가운데 224 × 224 자르기, ÷ 255, 정규화'
    """
    parts = [*map(_step, plan.steps), _numbers(plan.normalize), *([] if plan.pad is None else [_pad(plan.pad)])]
    return ", ".join(parts)


def _kind(found: re.Match[str]) -> str:
    return KINDS[found[1]]


def _step(step: Step) -> str:
    from regard.data.image_steps import FILTERS, Crop, Square

    if isinstance(step, Square):
        return f"정사각형으로 채우기 (색 {', '.join(map(str, step.colour))})"
    if isinstance(step, Crop):
        return f"가운데 {step.height} × {step.width} 자르기"
    return f"{_target(step.target)} 크기 조정 ({FILTERS[step.resample]})"


def _target(target: Target) -> str:
    from regard.data.image_steps import ShorterSide, Within

    if isinstance(target, ShorterSide):
        bound = "" if target.longest is None else f"(긴 변은 최대 {target.longest}) "
        return f"{bound}짧은 변을 {_to(target.side)}"
    into = f"{target.width} 안에 들어가게" if isinstance(target, Within) else _to(target.width)
    return f"{target.height} × {into}"


def _to(number: int) -> str:
    """A whole number with 로, or 으로 after a consonant other than ㄹ: 영, 삼, 육, and 십, 백, 천, 만.

    >>> _to(224), _to(256), _to(30), _to(1)
    ('224로', '256으로', '30으로', '1로')
    """
    return f"{number}{'으로' if number % 10 in (0, 3, 6) else '로'}"


def _numbers(numbers: Normalize) -> str:
    if numbers.scale is None and numbers.mean is None:
        return "0~255 그대로"
    return str(numbers).replace("normalise", "정규화")


def _pad(pad: Pad) -> str:
    size = "가장 큰 크기" if pad.size is None else f"{pad.size[0]} × {pad.size[1]}"
    return f"{size}까지 0으로 채우기"


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
    Raises ValueError without a model, for a device that is none, and as `look_at_image` does.
    """
    from regard.data.images import peek_image
    from regard.models.loading import load
    from regard.session.image_session import look_at_image

    if model is None:
        raise ValueError(
            "a picture needs a model that looks at pictures: --model DIR, or a hub id such as "
            "--model facebook/dinov2-small"
        )
    check_device(device)
    source, _ = peek_image(picture)  # what is none is refused before a model is loaded, which takes long
    with bar("/".join(Path(model).parts[-2:])) as tick:
        loaded = load(model, device=device, ignore=ignore, progress=tick)
    return look_at_image(source, loaded, text=text)


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
    from regard.session.ranking import last_that_looks, layers_of

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
    from regard.lens.placement import ImagePatches, find_token

    sides, words = view.placed.entry(0)
    if at is not None:
        window, index = ImagePatches(sides.queries, sides.frames[0], 0).at(*at)
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
    from regard.locale import translate
    from regard.session.sentences import WARNING

    overlay, seen = focus.overlay, focus.layer
    frame = session.frames[0]
    model = session.model
    order = sorted(range(len(overlay.mass)), key=lambda n: (-overlay.mass[n], n))[: asked.top]
    return {
        "version": VERSION,
        "name": session.name,
        "text": session.text,
        "picture": {"name": _picture_name(session), "height": frame.picture[0], "width": frame.picture[1]},
        "prepared": None if model is None else str(model.preprocessor.transforms),
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
        "warning": translate(WARNING, lang),
    }


def _picture_name(session: Session) -> str | None:
    """Of the picture's file; None for a capture that does not have it."""
    return session.images[0].name if session.images else None


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
    kept = session if asked.photo else replace(session, images=())
    if asked.html is not None:
        kept = replace(kept, opening=_opening(asked, focus))
    if asked.figure is not None:
        _draw(kept, asked, focus, at, photo if asked.photo else None)
    written = write_session(kept, asked.html, asked.save, lang) | _named(asked.figure)
    inside = bool(kept.images) and any(written.values())
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
    from regard.session.ranking import head_for

    head, token = head_for(focus.layer, focus.token, asked.head) or (asked.head or 0, focus.token)
    return {"layer": focus.index, "head": head, "token": token, "key": None}


def _named(figure: Path | None) -> dict[str, str | None]:
    return {"figure": None if figure is None else str(figure)}


def _draw(
    session: Session, asked: Asked, focus: _Focus, at: tuple[float, float] | None, photo: str | bytes | None
) -> None:
    """The overlay on the photograph, which is opened again where its file is there: a session keeps a smaller copy."""
    from regard.data.images import open_image

    assert asked.figure is not None
    seen = focus.layer
    view = session.capture[seen.path] if seen.call is None else session.capture[seen.path, seen.call]
    token = None if at is not None else _token(seen, asked.token)
    image: object = None
    if photo is not None:
        image = open_image(photo).image
    elif session.images:
        image = _enlarged(session.images[0])
    drawn = view.overlay(image, token=token, at=at, head=asked.head)
    files.write(drawn.figure(), asked.figure)


def _enlarged(photo: Photo) -> NDArray[np.uint8]:
    """The copy of a photograph in grey, as large as the photograph was: (height, width)."""
    import numpy as np

    from regard.data.images import open_image

    try:
        image = open_image(photo.data).image
    except ValueError as error:
        said = str(error).replace("the data", f"the photo {photo.name!r} in the capture", 1)
        raise ValueError(f"{said}; --no-photo draws without it") from None
    high, wide = photo.size
    return np.asarray(image.convert("L").resize((wide, high)))


def _print(session: Session, said: dict[str, Any], asked: Asked, lang: Lang, out: Terminal) -> None:
    from regard.cli.terminal import print_atlas

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
        plan = session.model.preprocessor.transforms
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
