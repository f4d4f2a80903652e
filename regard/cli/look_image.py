"""`regard look` for an image: where attention goes, as a drawing of the patches, and how the model saw the image."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from regard.cli.commands import LookOptions
from regard.cli.inputs import chosen_layer, load_model
from regard.cli.outputs import (
    LINKS,
    PIPE,
    Part,
    Terminal,
    colour_of,
    describe_atlas,
    print_atlas,
    print_json,
    write_figure,
    write_session,
)
from regard.locale import catalogue, translate

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from regard.lens.files.saving import Photo
    from regard.lens.overlays import Overlay
    from regard.lens.view import View
    from regard.session.heads import Layer
    from regard.session.session import Session

VERSION = 1
WIDEST, HIGHEST = 64, 24  # cells of the drawing


# ------------------------------------------------------------------------------------------------------------- reading


def read_place(at: str | None) -> tuple[float, float] | None:
    """A place in the image: "120,300" is 120 pixels down and 300 across. Raises ValueError for anything else."""
    if at is None:
        return None
    try:
        y, x = (float(part) for part in at.split(","))
    except ValueError:
        raise ValueError(f"--at must be Y,X: pixels down and across, as in --at 120,300; got {at!r}") from None
    return y, x


def read_image(image: str | bytes, options: LookOptions) -> Session:
    """Let a model look at an image, a path or a file's bytes."""
    from regard.data.images import peek_image
    from regard.session.session import look_at_image

    if options.model is None:
        raise ValueError(
            "an image needs a model that reads images: --model DIR, or a hub id such as --model facebook/dinov2-small"
        )
    source, _ = peek_image(image)  # refuses other files before a model is loaded, which takes long
    return look_at_image(source, load_model(options.model, options.device, options.ignore), text=options.text)


@dataclass(frozen=True)
class _ImageFocus:
    """Where to look: a layer, what a token of it looks at, and the layers whose heads are shown.

    token: as the overlay takes it.  number: of the token, counted through the windows; None for all queries.
    """

    layer: Layer
    view: View
    token: int | str | tuple[int, int] | None
    number: int | None
    overlay: Overlay
    layers: list[Layer]


def _focus(session: Session, options: LookOptions, at: tuple[float, float] | None) -> _ImageFocus:
    from regard.lens.overlays import ImagePatches, find_token
    from regard.session.ranking import last_that_looks

    chosen = chosen_layer(session, options)
    if options.token is not None and at is not None:
        raise ValueError(f"--token {options.token} and --at exclude each other")
    index = last_that_looks(session) if chosen is None else chosen.index
    if index is None:
        raise LookupError("no layer of this session looks at an image")
    seen = session.layers[index]
    view = session.capture[seen.path] if seen.call is None else session.capture[seen.path, seen.call]
    view = replace(view, placed=replace(view.placed, model=session.model_name, layer=index))

    # The token: as typed; else cls, or the last word, or all queries where there is neither.
    token: int | str | tuple[int, int] | None = options.token
    if at is None:
        assert seen.sides is not None
        queries = seen.sides.queries
        if options.token is None and len(queries.indices("cls")) == 1:
            token = "cls"
        elif options.token is None:
            words_at = queries.indices("text")
            token = (int(words_at[-1][0]), int(words_at[-1][1])) if len(words_at) else None
        elif options.token.isascii() and options.token.isdigit():
            if int(options.token) >= (count := queries.kind.size):
                raise IndexError(
                    f"--token {options.token} is out of range: there are {count:,} queries, counted from 0"
                )
            token = divmod(int(options.token), queries.shape[1])
    overlay = view.overlay(token=token, at=at, head=options.head)

    # Its number among all queries.
    number = None
    sides, words = view.placed.entry(0)
    if at is not None or token is not None:
        if at is not None:
            window, place = ImagePatches(sides.queries, sides.frames[0], 0).at(*at)
        else:
            assert token is not None
            window, place = find_token(sides.queries, token, words, "query")
        number = window * sides.queries.shape[1] + place
    return _ImageFocus(seen, view, token, number, overlay, list(session.layers) if chosen is None else [chosen])


# -------------------------------------------------------------------------------------------------------------- values


def _describe(session: Session, options: LookOptions, focus: _ImageFocus) -> dict[str, Any]:
    from regard.explorer.answers import head as head_answer
    from regard.session.labels import WARNING

    overlay, seen, frame, head = focus.overlay, focus.layer, session.frames[0], options.head
    order = sorted(range(len(overlay.mass)), key=lambda n: (-overlay.mass[n], n))[: options.top or LINKS]
    rows, columns = (int(n) + 1 for n in overlay.cells.max(0))
    grid = [[0.0] * columns for _ in range(rows)]
    for (row, column), mass in zip(overlay.cells.tolist(), overlay.mass.tolist(), strict=True):
        grid[row][column] = mass
    return {
        "version": VERSION,
        "name": session.name,
        "text": session.text,
        "image": {
            "name": session.images[0].name if session.images else None,  # a capture may lack it
            "height": frame.image_size[0],
            "width": frame.image_size[1],
        },
        "prepared": None if session.model is None else str(session.model.preprocessor.transforms),
        "pixels": list(frame.pixels),
        "seen": frame.boxes([0, 0, *frame.pixels]).round(2).tolist(),
        "layer": {"index": focus.layer.index, "path": seen.path, "windows": seen.windows},
        "head": head,
        "of": overlay.title.partition(": ")[2],
        "shares": overlay.shares,
        "grid": grid,
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
        **describe_atlas(session, focus.layers, options.measure),
        "sentence": None if head is None else head_answer(session, focus.layer.index, head, options.lang)["sentence"],
        "warning": translate(WARNING, options.lang),
    }


# ------------------------------------------------------------------------------------------------------------ printing


def show_image(session: Session, options: LookOptions, photo: str | bytes | None) -> None:
    """Print what a model looks at in an image, or its JSON, and write the files that were asked for.

    photo: the image's path or bytes, for the figure; None for a capture, whose own copy is drawn if it has one.
    """
    at = read_place(options.at)
    focus = _focus(session, options, at)
    description = _describe(session, options, focus)
    kept = replace(session, images=()) if options.no_photo else session
    if options.html is not None:
        from regard.session.ranking import head_for

        # The page opens on the layer, token and head that are printed; of all heads, on the one that stands out.
        head, token = head_for(focus.layer, focus.number, options.head) or (options.head or 0, focus.number)
        kept = replace(kept, opening={"layer": focus.layer.index, "head": head, "token": token, "key": None})
    if options.figure is not None:
        from regard.data.images import open_image

        # The file is opened again if it is there: a session keeps a smaller copy.
        image: object = None
        if photo is not None and not options.no_photo:
            image = open_image(photo).image
        elif kept.images:
            image = _enlarged(kept.images[0])
        overlay = focus.view.overlay(image, token=focus.token, at=at, head=options.head)
        write_figure(overlay.figure(lang=options.lang), options.figure)
    written = write_session(kept, options)
    inside = bool(kept.images) and any(written.values())
    if options.json:
        print_json({**description, **written, "photo": inside})
        return
    out = Terminal(options.lang)
    _print(session, focus.overlay, description, out)
    out.name_files(**written)
    if inside:
        out.print((out.say("The photo is inside the written files; --no-photo leaves it out."), "dim"))


def _enlarged(photo: Photo) -> NDArray[np.uint8]:
    """The copy of a photograph in grey, as large as the photograph was: (height, width)."""
    import numpy as np

    from regard.data.images import open_image

    try:
        image = open_image(photo.data).image
    except ValueError as error:
        message = str(error).replace("the data", f"the photo {photo.name!r} in the capture", 1)
        raise ValueError(f"{message}; --no-photo draws without it") from None
    high, wide = photo.size
    return np.asarray(image.convert("L").resize((wide, high)))


def _print(session: Session, overlay: Overlay, description: dict[str, Any], out: Terminal) -> None:
    # 1. What the model saw: the image, how it was prepared, the part of it that is left, the patches.
    image, (high, wide), (top, left, bottom, right) = description["image"], description["pixels"], description["seen"]
    family = "" if session.model is None else f" ({session.model.family.title})"
    out.print((session.name + family, "bold"))
    name = image["name"] or out.say("an image that is not in the capture")
    size = {"height": image["height"], "width": image["width"]}
    out.print(out.say("{name}: {height} × {width} pixels, high and wide", name=name, **size))
    if session.model is not None:
        prepared = session.model.preprocessor.transforms.text(out.lang)
        out.print((out.say("prepared: {plan}", plan=prepared), "dim"))
    box = {"top": top, "bottom": bottom, "left": left, "right": right}
    seen = out.say(
        "seen: rows {top:g} to {bottom:g}, columns {left:g} to {right:g}, as {high} × {wide} pixels in "
        "{rows} × {columns} patches",
        high=high, wide=wide, rows=len(description["grid"]), columns=len(description["grid"][0]), **box,
    )  # fmt: skip
    windows = description["layer"]["windows"]
    out.print(seen + (out.say("; {windows} windows here", windows=windows) if windows > 1 else ""))
    if description["text"]:
        out.print(out.say("text: {text}", text=description["text"]))
    out.print()

    # 2. What it looks at.
    layer, head = description["layer"]["index"], description["head"]
    if head is None:
        heads = session.layers[layer].view.sizes[1]
        whose = out.say("layer {layer}, mean of {heads} heads", layer=layer, heads=heads)
    else:
        whose = out.say("layer {layer}, head {head}", layer=layer, head=head)
    out.print((overlay.titles[out.lang].partition(": ")[2], "bold"), (f"   {whose}", "dim"))
    shares = sorted(description["shares"].items(), key=lambda item: -item[1])
    named = ", ".join(f"{catalogue(out.lang).get(kind, kind)} {share:.3f}" for kind, share in shares)
    out.print((out.say("total weight: {named}", named=named), "dim"))
    out.print()
    print_patches(description["grid"], out)
    out.print()
    print_strongest(description["strongest"], out)
    out.print()
    if description["sentence"] is not None:
        out.print(description["sentence"])
    else:
        print_atlas(description, out)
    out.print()
    out.print((description["warning"], "italic"))


def print_patches(grid: list[list[float]], out: Terminal) -> None:
    """Print the weights of a grid of patches where they lie: 0 to 9 in tenths of the largest, or colours."""
    high = max((weight for row in grid for weight in row), default=0.0)
    places = [[weight / high if high else 0.0 for weight in row] for row in grid]
    title = (out.say("Patches by weight"), "bold")
    if not out.coloured:
        out.print(title, out.say(": 9 is {high:.3f}, · is under a tenth of that", high=high))
        for row in places:
            out.print("  " + " ".join("·" if place < 0.1 else str(min(9, int(10 * place))) for place in row))
        return
    out.print(title, out.say(": up to {high:.3f}", high=high))
    # Half blocks: the upper half in the colour of its letter, the lower in that of its ground.
    room = (out.room or PIPE) - 2
    scale = max(1, min(room // len(places[0]), WIDEST // len(places[0]), 2 * HIGHEST // len(places)))
    colours = [
        [colour_of(place)[0] for place in row for _ in range(scale)][:room] for row in places for _ in range(scale)
    ]
    for n in range(0, len(colours), 2):
        below = colours[n + 1] if n + 1 < len(colours) else [None] * len(colours[n])
        line: list[Part] = [
            ("▀", upper if lower is None else f"{upper} on {lower}")
            for upper, lower in zip(colours[n], below, strict=True)
        ]
        out.print("  ", *line)


def print_strongest(patches: list[dict[str, Any]], out: Terminal) -> None:
    """Print the strongest patches, one a line: row and column, weight, and where it lies in the image."""
    out.print((out.say("Strongest patches"), "bold"))
    names = [f"({patch['row']}, {patch['column']})" for patch in patches]
    wide = max(map(len, names), default=0)
    for name, patch in zip(names, patches, strict=True):
        box = dict(zip(("top", "left", "bottom", "right"), patch["box"], strict=True))
        place = out.say("rows {top:.4g} to {bottom:.4g}, columns {left:.4g} to {right:.4g}", **box)
        out.print(f"  {name:<{wide}}  {patch['weight']:.4f}  ", (place, "dim"))
    if not patches:
        out.print("  ", out.say("none"))
