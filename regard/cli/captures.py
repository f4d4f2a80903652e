"""`regard diff` and `regard doctor`, on capture files."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.cli.files import check_output, finite
from regard.cli.options import Lang, Say, known, speaker
from regard.cli.terminal import Terminal

if TYPE_CHECKING:
    from regard.lens.capture import Capture
    from regard.lens.comparison import Comparison
    from regard.lens.doctor.report import Diagnosis
    from regard.session.session import Session


def check_capture(path: Path | None) -> None:
    """Refuse a path that no capture can be written to, with a ValueError, before anything is computed.

    >>> check_capture(Path("out/run.regard"))

    path: None asks for no file.
    """
    if path is not None and (path.suffix.lower() != ".regard" or path.is_dir()):
        raise ValueError(f"--save {str(path)!r} must be a file that ends in .regard")
    check_output(path)


def read_capture(path: Path) -> "Capture":
    """The capture that a file holds.

    >>> import tempfile
    >>> from regard.lens.capture import Capture
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     Capture("GPT2").save(f"{folder}/run.regard")
    ...     read_capture(Path(folder, "run.regard")).model
    'GPT2'

    Raises ValueError for what is no capture, OSError that names what cannot be read.
    """
    from regard.lens.capture import open

    try:
        return open(path)
    except OSError as error:
        if error.strerror is None:  # ours, which names the path already
            raise
        raise OSError(f"cannot read {str(path)!r}: {error.strerror}") from None


def read_session(path: Path) -> "Session":
    """The capture that a file of `regard look` holds, with its words and pictures.

    >>> import tempfile
    >>> from regard.lens.capture import Capture
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     Capture("GPT2", [["a", "b"]]).save(f"{folder}/run.regard")
    ...     read_session(Path(folder, "run.regard")).tokens
    ('a', 'b')

    Raises as `read_capture`, with how a text is read where the file may be one.
    """
    from regard.lens.files.container import CaptureFileError
    from regard.session.session import session_of

    try:
        return session_of(read_capture(path), path.name)
    except CaptureFileError as error:
        hint = f"; if it is a text: --file {path}" if "not a regard capture" in str(error) else ""
        raise ValueError(f"{error}{hint}") from None


# No `from __future__ import annotations`: typer reads the annotations, and their texts are chosen while this runs.


def add_diff(app: typer.Typer, lang: Lang) -> None:
    """Add the command to the app, with help in a language.

    >>> app = typer.Typer()
    >>> add_diff(app, "en")
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
        from regard.lens.comparison import compare

        spoken = known(lang)
        captures = read_capture(a), read_capture(b)
        found = compare(*captures, tolerance=tolerance)
        if json_:
            print(json.dumps(finite(_plain_diff(found, (a, b))), ensure_ascii=False, allow_nan=False))
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


def _plain_diff(found: "Comparison", paths: tuple[Path, Path]) -> dict[str, Any]:
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


# No `from __future__ import annotations`: typer reads the annotations, and their texts are chosen while this runs.


def add_doctor(app: typer.Typer, lang: Lang) -> None:
    """Add the command to the app, with help in a language.

    >>> app = typer.Typer()
    >>> add_doctor(app, "en")
    >>> app.registered_commands[0].name
    'doctor'
    """
    say = speaker(lang)

    @app.command(
        "doctor",
        help=say(
            "What was wrong with the masks and numbers of a run.\n\n"
            "A capture: with regard.watch(model) as seen: …; seen.save('run.regard')\n\n"
            "Exit code: 0, or 1 if there are errors; warnings and notes are none.",
            "모델 실행에서 마스크와 숫자의 문제를 찾습니다.\n\n"
            "캡처: with regard.watch(model) as seen: …; seen.save('run.regard')\n\n"
            "종료 코드: 0, 오류가 있으면 1. 경고와 참고는 오류가 아닙니다.",
        ),
    )
    def doctor(
        file: Annotated[Path, typer.Argument(metavar="FILE", help=say("A capture, .regard.", "캡처 파일, .regard."))],
        json_: Annotated[bool, typer.Option("--json", help=say("As JSON.", "JSON으로 출력합니다."))] = False,
        lang: Annotated[str, typer.Option(metavar="en|ko", help=say("Language of the text.", "출력 언어."))] = lang,
    ) -> None:
        spoken = known(lang)
        diagnosis = read_capture(file).doctor()
        if json_:
            print(json.dumps(_plain_doctor(diagnosis, spoken), ensure_ascii=False, allow_nan=False))
        else:
            title, *rest = diagnosis.text(spoken).split("\n")
            out = Terminal()
            out.print((title, "bold"))
            out.print("\n".join(rest))
        if any(finding.severity == "error" for finding in diagnosis.findings):
            raise typer.Exit(1)


def _plain_doctor(diagnosis: "Diagnosis", lang: Lang) -> dict[str, Any]:
    return {
        "ok": diagnosis.ok,
        "calls": diagnosis.calls,
        "modules": diagnosis.modules,
        "unread": diagnosis.unread,
        "findings": [
            {
                "severity": finding.severity,
                "code": finding.code,
                "paths": list(finding.paths),
                "text": finding.text(lang),
                "advice": finding.advice(lang),
            }
            for finding in diagnosis.findings
        ],
        "masks": [
            {
                "paths": list(use.paths),
                "kind": use.kind,
                "mask": use.facts.mask,
                "causal": use.facts.causal,
                "bias": use.facts.bias_kind,
                "queries": use.facts.sizes[2],
                "keys": list(use.keys),
                "calls": use.calls,
            }
            for use in diagnosis.masks
        ],
    }
