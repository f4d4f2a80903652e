"""Build the gallery: an exported page and a small picture for each phenomenon of docs/gallery/index.md.

    python docs/build_gallery.py                                     # what `make gallery` runs
    python docs/build_gallery.py --models DIR --photo cat.png        # with more than the demo's model

Pages go to docs/gallery/NAME.html, which git ignores and `make docs` takes into the site; pictures to NAME.png. A page
whose model or photo is not at hand is skipped, and a line says so.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # this checkout's regard, whichever is installed

from regard.explorer import Session, look_at, look_at_image, write_html  # noqa: E402
from regard.lens.display import view_figure  # noqa: E402
from regard.models.loading import load  # noqa: E402
from regard.session.session import START  # noqa: E402
from regard.viz import figures  # noqa: E402

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH = 620  # of a picture: at most 300 KB each
SENTENCE = "The animal didn't cross the street because it was too tired."


@dataclass(frozen=True)
class Entry:
    """One page of the gallery.

    name: of its files.  text: that is read; beside an image, or None.  model: a folder of --models, or None for the
    model of regard[demo].  layer, head, token, key: where the page opens; key None for a whole row.
    """

    name: str
    text: str | None
    layer: int
    head: int
    token: int
    key: int | None
    model: str | None = None


ENTRIES = (
    Entry("coreference", SENTENCE, 3, 1, 10, 2),
    Entry("repetition", "one two three four five six one two three four five six", 2, 9, 9, 3),
    Entry("previous_token", SENTENCE, 0, 2, 8, 7),
    Entry("delimiter_sink", SENTENCE, 4, 5, 6, 0),
    Entry("cross_attention", "summarize: A small dog saved a child from the river.", 15, 1, 0, 11, "flan-t5-small"),
    Entry("image", None, 8, 2, 104, None, "dinov2-small"),
)


def session_of(entry: Entry, models: Path | None, photo: Path | None) -> Session:
    """What an entry shows. Raises LookupError if its model or photo is not at hand."""
    model = None
    if entry.model is not None:
        if models is None or not (models / entry.model / "config.json").is_file():
            raise LookupError(f"no {entry.model} in --models")
        model = load(models / entry.model)
    if entry.text is None:
        if photo is None:
            raise LookupError("no --photo")
        assert model is not None
        session = look_at_image(photo, model)
    else:
        session = look_at(entry.text, model)
    opening = {"layer": entry.layer, "head": entry.head, "token": entry.token, "key": entry.key}
    return replace(session, opening=opening)  # type: ignore[arg-type]


def weight(session: Session, entry: Entry) -> float:
    """The weight of the entry's link, or the largest of its row."""
    row = session.layers[entry.layer].view.row(entry.token)[0, entry.head]  # (Nk,)
    return float(row.max() if entry.key is None else row[entry.key])


def figure(session: Session, entry: Entry, photo: Path | None) -> Figure:
    """The picture of an entry: its head's map with the row marked, or the heat over the photo."""
    layer = session.layers[entry.layer]
    if entry.text is None:
        from regard.data.images import open_image

        view = session.capture[layer.path]
        view = replace(view, placed=replace(view.placed, model=session.name))
        assert photo is not None
        return view.overlay(open_image(photo).image, token=(0, entry.token), head=entry.head).figure()
    subject = f"{session.name}, layer {entry.layer}, head {entry.head}: {session.text}"
    words = list(session.tokens)
    if layer.view.sizes[2] != len(words):  # cross-attention
        row = layer.view.row(entry.token)[0, entry.head][None]  # (1, Nk)
        return figures.heatmap(row, [START], words, title=subject)
    return view_figure(layer.view, head=entry.head, tokens=words, subject=subject, query=entry.token)


def write_picture(drawn: Figure, path: Path) -> None:
    """Write a small PNG."""
    from PIL import Image

    buffer = BytesIO()
    drawn.savefig(buffer, format="png", facecolor=drawn.get_facecolor())
    with Image.open(buffer) as image:
        size = (min(WIDTH, image.width), round(image.height * min(WIDTH, image.width) / image.width))
        image.convert("RGB").resize(size, Image.Resampling.LANCZOS).save(path, optimize=True)


def build(folder: Path, models: Path | None = None, photo: Path | None = None) -> list[str]:
    """Write the pages and pictures that can be made; returns their names."""
    made = []
    for entry in ENTRIES:
        try:
            session = session_of(entry, models, photo)
        except (LookupError, ImportError) as error:
            print(f"{entry.name}: skipped, {error}")
            continue
        write_html(session, folder / f"{entry.name}.html")
        write_picture(figure(session, entry, photo), folder / f"{entry.name}.png")
        print(
            f"{entry.name}: {session.name}, layer {entry.layer}, head {entry.head}, weight {weight(session, entry):.2f}"
        )
        made.append(entry.name)
    return made


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", type=Path, help="directory with flan-t5-small and dinov2-small")
    parser.add_argument("--photo", type=Path, help="image for the last page")
    given = parser.parse_args()
    build(ROOT / "docs" / "gallery", given.models, given.photo)
