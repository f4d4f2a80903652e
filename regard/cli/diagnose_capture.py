"""`regard doctor`: what was wrong with the masks and the numbers of a run, read from its capture.

It reads options and prints what `Capture.doctor` finds.
"""

# No `from __future__ import annotations`: typer reads the annotations, and their texts are chosen while this runs.
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.cli.capture_files import read_capture
from regard.cli.language import Lang, known, speaker
from regard.cli.terminal import Terminal

if TYPE_CHECKING:
    from regard.lens.diagnosing.diagnosis import Diagnosis

__all__ = ["add"]


def add(app: typer.Typer, lang: Lang) -> None:
    """Add the command to the app, with help in a language.

    >>> app = typer.Typer()
    >>> add(app, "en")
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
            print(json.dumps(_plain(diagnosis, spoken), ensure_ascii=False, allow_nan=False))
        else:
            title, *rest = diagnosis.text(spoken).split("\n")
            out = Terminal()
            out.print((title, "bold"))
            out.print("\n".join(rest))
        if any(finding.severity == "error" for finding in diagnosis.findings):
            raise typer.Exit(1)


def _plain(diagnosis: "Diagnosis", lang: Lang) -> dict[str, Any]:
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
