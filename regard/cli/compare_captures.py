"""`regard diff`: two captures side by side, what differs and by how much.

It reads options and prints what `regard.lens.files.comparing.compare` finds.
"""

# No `from __future__ import annotations`: typer reads the annotations, and their texts are chosen while this runs.
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.cli.capture_files import read_capture
from regard.cli.json_numbers import finite
from regard.cli.language import Lang, Say, known, speaker
from regard.cli.terminal import Terminal

if TYPE_CHECKING:
    from regard.lens.capture import Capture
    from regard.lens.files.comparing import Comparison

__all__ = ["add"]


def add(app: typer.Typer, lang: Lang) -> None:
    """Add the command to the app, with help in a language.

    >>> app = typer.Typer()
    >>> add(app, "en")
    >>> app.registered_commands[0].name
    'diff'
    """
    say = speaker(lang)

    @app.command(
        "diff",
        help=say(
            "Compare two captures: masks, kernels and the measures of every head.\n\n"
            "Exit code: 0 if attention was the same, 1 if it was not. A kernel of another name alone is no difference.",
            "두 캡처의 마스크, 커널, 헤드별 측정값을 비교합니다.\n\n"
            "종료 코드: 어텐션이 같으면 0, 다르면 1. 커널 이름만 다른 것은 차이로 보지 않습니다.",
        ),
    )
    def diff(
        a: Annotated[Path, typer.Argument(metavar="A", help=say("A capture, .regard.", "캡처 파일, .regard."))],
        b: Annotated[Path, typer.Argument(metavar="B", help=say("Another one.", "비교할 캡처."))],
        tolerance: Annotated[
            float,
            typer.Option(metavar="X", help=say("Differences up to X are none.", "X 이하의 차이는 같은 것으로 봅니다.")),
        ] = 0.0,
        json_: Annotated[bool, typer.Option("--json", help=say("As JSON.", "JSON으로 출력합니다."))] = False,
        lang: Annotated[str, typer.Option(metavar="en|ko", help=say("Language of the text.", "출력 언어."))] = lang,
    ) -> None:
        from regard.lens.files.comparing import compare

        spoken = known(lang)
        captures = read_capture(a), read_capture(b)
        found = compare(*captures, tolerance=tolerance)
        if json_:
            print(json.dumps(finite(_plain(found, (a, b))), ensure_ascii=False, allow_nan=False))
        else:
            out = Terminal()
            for name, path, capture in zip("AB", (a, b), captures, strict=True):
                out.print((f"{name}  ", "bold"), str(path), (_origin(capture, speaker(spoken)), "dim"))
            out.print()
            out.print(found.text(spoken))
        if not found.same:
            raise typer.Exit(1)


def _origin(capture: "Capture", say: Say) -> str:
    written = capture.origin["written"]
    return "   " + say(f"{capture.model}, written {written}", f"{capture.model}, {written}에 저장")


def _plain(found: "Comparison", paths: tuple[Path, Path]) -> dict[str, Any]:
    return {
        "a": str(paths[0]),
        "b": str(paths[1]),
        "same": found.same,
        "tolerance": found.tolerance,
        "modules": found.modules,
        "compared": found.compared,
        "only_a": list(found.only_a),
        "only_b": list(found.only_b),
        "unlike": [{"what": u.what, "path": u.path, "call": u.n, "a": u.a, "b": u.b} for u in found.unlike],
        "rows": found.rows,
    }
