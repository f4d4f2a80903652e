"""A session of a picture: a model looks at it, and every head is seen while it does.

    >>> session = look_at_picture("cat.jpg", "models/dinov2-small")                           # doctest: +SKIP
    >>> session.capture[-1].overlay(token="cls", head=0)                                      # doctest: +SKIP
    Overlay(tower.blocks.11.attention, head 0: cls → the picture; patch 0.857, cls 0.143)

What each kind of model is given, `picture_inputs.py` says. It does not know how a session is shown.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from regard.explorer.picture_inputs import Given, check_sight, given_to
from regard.explorer.sessions import MEASURES, Session, name_of_model
from regard.explorer.shown_pictures import show_picture
from regard.lens.watching import watch
from regard.models.images.pictures import Source, glance, open_picture
from regard.models.loading import load
from regard.models.model import Model

__all__ = ["look_at_picture"]


def look_at_picture(
    picture: Source,
    model: Model | str | Path,
    *,
    text: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> Session:
    """Let a model look at a picture, and see every head while it does.

    >>> look_at_picture("cat.jpg", "models/blip", text="a cat").pictures[0].size              # doctest: +SKIP
    (300, 451)

    picture: a path, bytes, a Pillow image or an array, as `open_picture` opens it.
    model: one that `regard.load` gave and that looks at pictures, or what it takes.
    text: what is read beside it: a caption, a question, a text that may match. Models of pictures alone take none;
        those that write about a picture write without one, too.
    progress: told what is being done, in a word.

    What a model writes is read again, but for its last token: that was read by nobody. The model reads in eval mode,
    and is left in the mode that it was in.

    The session's capture has a copy of the picture, of at most 1,600 pixels, which goes into the file that it is saved
    to: session.capture.save(path, photos=False) leaves it out.

    Raises ValueError for a model that does not look at pictures, for a text that it does not take or a missing one that
    it needs; else as `open_picture`, the model's preprocessor and `regard.load` do.
    """
    source, _ = glance(picture)  # what is none is refused before a model is loaded, which takes long
    tell = progress or (lambda said: None)
    if not isinstance(model, Model):
        tell("loading")
        model = load(model)
    check_sight(model)
    opened = open_picture(source)  # decoded only for a model that looks at it
    given: Given = given_to(model, opened, text)
    tell("reading")
    with watch(model, measures=MEASURES, keep="qk", layouts=given.layouts, tokens=given.words) as seen:
        given.read()
    longest = max((sides.keys.kind.size for sides in given.layouts.values()), default=0)
    words = tuple(given.words[0]) if given.words else ("",) * longest
    seen.photos = shown = (show_picture(opened),)
    return Session(name_of_model(model), seen, words, text=given.text, model=model, again=given.read, pictures=shown)
