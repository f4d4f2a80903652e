"""`regard steps`: attention in the four numbered steps of the textbooks, with every number.

It reads options and prints. What it prints is computed by `regard.op.steps`, checked by `regard.lens.validity`, drawn
by `regard.viz.figures`.
"""

# No `from __future__ import annotations`: typer reads the annotations, and their texts are chosen while this runs.
import json
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.cli import files
from regard.cli.files import finite
from regard.cli.options import Lang, Say, known, speaker
from regard.cli.terminal import INDENT, Terminal, print_matrix
from regard.tables import width

if TYPE_CHECKING:
    from regard.lens.validity import Report
    from regard.stages import Steps

__all__ = ["add"]

DEMO = [[0.1, 0.2, 0.3, 0.4], [0.5, 0.6, 0.7, 0.8], [0.9, 1.0, 1.1, 1.2]]
DEMO_WORDS = "The cat sat"
MOST_BYTES = 2**30  # of all intermediates together; steps are for small inputs
HEADINGS = {
    "scores": ("1", "Scores", "점수"),
    "scaled": ("2", "Divide by √d_k", "√d_k로 나누기"),
    "capped": ("·", "Softcap", "소프트캡"),
    "masked": ("·", "Mask", "마스크"),
    "weights": ("3", "Softmax", "softmax"),
    "output": ("4", "Weighted sum of V", "V의 가중합"),
}


def add(app: typer.Typer, lang: Lang) -> None:
    """Add the command to the app, with help in a language.

    >>> app = typer.Typer()
    >>> add(app, "en")
    >>> app.registered_commands[0].name
    'steps'
    """
    say = speaker(lang)

    @app.command(
        "steps",
        help=say(
            "Attention step by step, with every number.\n\n"
            "Without --input it is the worked example 'The cat sat'. An .npy file is one array: q, k and v at once.\n\n"
            "Exit code: 0, or 1 if the weights fail their check, as NaN does.",
            "어텐션을 단계별로, 모든 숫자와 함께 보여 줍니다.\n\n"
            "--input이 없으면 예제 'The cat sat'을 씁니다. "
            ".npy는 배열 하나를 q, k, v로 함께 씁니다.\n\n"
            "종료 코드: 0, 가중치가 확인을 통과하지 못하면(NaN 등) 1.",
        ),
    )
    def steps(
        demo: Annotated[bool, typer.Option("--demo", help=say("The worked example.", "예제를 실행합니다."))] = False,
        input_: Annotated[
            Path | None,
            typer.Option(
                "--input",
                metavar="FILE",
                help=say(
                    "q, k, v or x, w_q, w_k, w_v: .npz, .safetensors, .npy.",
                    "q, k, v 또는 x, w_q, w_k, w_v: .npz, .safetensors, .npy.",
                ),
            ),
        ] = None,
        words: Annotated[
            str | None,
            typer.Option(
                metavar="TEXT",
                help=say("A word per query, between spaces.", "쿼리마다 단어 하나, 공백으로 구분합니다."),
            ),
        ] = None,
        heads: Annotated[
            int,
            typer.Option(metavar="H", help=say("Heads in w_q, w_k and w_v.", "w_q, w_k, w_v에 든 헤드 수.")),
        ] = 1,
        mask: Annotated[
            str | None,
            typer.Option(metavar="SPEC", help=say("As in 'regard mask'.", "'regard mask'의 SPEC과 같습니다.")),
        ] = None,
        scale: Annotated[
            float | None, typer.Option(metavar="NUMBER", help=say("Instead of 1/√D.", "1/√D 대신 쓸 값."))
        ] = None,
        softcap: Annotated[
            float | None,
            typer.Option(metavar="CAP", help=say("Scores become CAP·tanh(score/CAP).", "점수를 CAP·tanh(점수/CAP)로.")),
        ] = None,
        batch: Annotated[
            int, typer.Option(metavar="B", help=say("Which batch row to show.", "보여 줄 배치 번호."))
        ] = 0,
        head: Annotated[int, typer.Option(metavar="H", help=say("Which head to show.", "보여 줄 헤드 번호."))] = 0,
        figure: Annotated[
            Path | None,
            typer.Option(metavar="FILE", help=say("Draw the steps: .png, .svg, .pdf.", "그림 저장: .png, .svg, .pdf.")),
        ] = None,
        json_: Annotated[
            bool,
            typer.Option("--json", help=say("Shapes and values as JSON.", "모양과 값을 JSON으로 출력합니다.")),
        ] = False,
        lang: Annotated[str, typer.Option(metavar="en|ko", help=say("Language of the text.", "출력 언어."))] = lang,
    ) -> None:
        if demo and input_ is not None:
            raise ValueError("--demo and --input exclude each other: the demo brings its own numbers")
        if json_ and (batch or head) and figure is None:
            raise ValueError("--batch and --head choose what is printed or drawn; --json holds all of them")
        files.check_place(figure)
        spoken = speaker(known(lang))
        arrays, origin = _arrays(input_, heads, spoken)
        if input_ is None and words is None:
            words = DEMO_WORDS
        made = _computed(arrays, heads, mask, scale, softcap, words)
        report = _finished(made, figure, batch, head)
        if json_:
            print(_as_json(made, report, figure))
        else:
            _print(made, origin, report, figure, (batch, head), known(lang))
        if not report:
            raise typer.Exit(1)


# ---------------------------------------------------------------------------------------------------------- computing


def _arrays(path: Path | None, heads: int, say: Say) -> tuple[dict[str, Any], str]:
    """The arrays, and a line on where they come from."""
    if path is None:
        import numpy as np

        x, same = np.array(DEMO), np.eye(4)
        line = say(
            "x has shape (3, 4); W_Q = W_K = W_V = the identity, so q = k = v = x",
            "x의 모양은 (3, 4), W_Q = W_K = W_V = 단위행렬이므로 q = k = v = x",
        )
        split = say(f", split into {heads} heads", f", 헤드 {heads}개로 나눔") if heads > 1 else ""
        return {"x": x, "w_q": same, "w_k": same, "w_v": same}, line + split
    from regard.cli.files import read_arrays

    arrays = read_arrays(path)
    if path.suffix.lower() == ".npy":
        return arrays, f"q = k = v = {path.name}"
    return arrays, f"{path.name}: " + ", ".join(f"{name} {tuple(a.shape)}" for name, a in arrays.items())


def _computed(
    arrays: dict[str, Any], heads: int, mask: str | None, scale: float | None, softcap: float | None, words: str | None
) -> "Steps":
    from regard.cli.mask import read_mask
    from regard.op import steps

    q, k = (arrays["q"], arrays["k"]) if "q" in arrays else (arrays["x"], arrays["x"])
    nq, nk = prod(q.shape[-2:-1]), prod(k.shape[-2:-1])
    needed = 7 * 8 * prod(q.shape[:-1]) * nk * max(1, heads)  # seven stages, in float64
    if needed > MOST_BYTES:
        raise ValueError(
            f"keeping every step of {nq:,} × {nk:,} positions takes about "
            f"{needed / 2**30:.1f} GiB; steps are for small inputs, at most 1 GiB: give fewer positions or heads"
        )
    return steps(
        **arrays,
        num_heads=heads,
        mask=None if mask is None else read_mask(mask),
        scale=scale,
        softcap=softcap,
        labels=None if words is None else words.split(),
    )


def _finished(steps: "Steps", figure: Path | None, batch: int, head: int) -> "Report":
    """The check of the weights; the figure, where one is asked for, is written."""
    from regard.lens.validity import check
    from regard.stages import pick
    from regard.viz import figures

    pick(steps.weights, batch, head)  # an index that is not there is told before anything is printed
    if figure is not None:
        files.write(figures.steps(steps, batch=batch, head=head), figure)
    return check(steps.weights)


# ------------------------------------------------------------------------------------------------------------ printing


def _print(
    steps: "Steps", origin: str, report: "Report", figure: Path | None, which: tuple[int, int], lang: Lang
) -> None:
    say, out = speaker(lang), Terminal()
    (nq, nk), size = steps.scores.shape[-2:], steps.q.shape[-1]
    title = say(
        f"Attention step by step: {nq} queries, {nk} keys, head size {size}",
        f"어텐션 단계별 보기: 쿼리 {nq}개, 키 {nk}개, 헤드 크기 {size}",
    )
    out.print((title, "bold"))
    out.print(origin)
    lead = tuple(steps.scores.shape[:-2])
    if prod(lead) > 1:
        batch, head = which
        out.print(say(f"shown: batch {batch}, head {head} of {lead}", f"{lead} 가운데 배치 {batch}, 헤드 {head}"))
    _print_stages(steps, which, lang, out)
    out.print()
    out.print(_check_line(report, say))
    if figure is not None:
        out.print(say("Figure: ", "그림: "), str(figure))


def _print_stages(steps: "Steps", which: tuple[int, int], lang: Lang, out: Terminal) -> None:
    from regard.stages import pick

    say = speaker(lang)
    if steps.x is not None:
        _print_heading("", say("Input", "입력"), "x", "x", lang, out)
        print_matrix(_of_x(steps, which).tolist(), steps.labels, None, heat=False, say=say, out=out)
    for name, (number, english, korean) in HEADINGS.items():
        if name in steps.unchanged:
            continue
        formula = steps.formulas[name]
        usual = name != "scaled" or "√" in formula
        title = say(english, korean) if usual else say("Scale", "스케일 조정")
        _print_heading(number, title, name, f"{name} = {formula}", lang, out)
        keys = None if name == "output" else steps.key_labels
        values = pick(getattr(steps, name), *which).tolist()
        print_matrix(values, steps.labels, keys, heat=name == "weights", say=say, out=out)


def _of_x(steps: "Steps", which: tuple[int, int]) -> Any:
    """The rows of x behind what is shown. Where heads were split off, x has none, and all before N is batch."""
    from regard.stages import pick

    if steps.x.shape[:-2] == steps.scores.shape[:-2]:
        return pick(steps.x, *which)
    return pick(steps.x.reshape(-1, *steps.x.shape[-2:]), which[0], 0)


def _print_heading(number: str, title: str, name: str, formula: str, lang: Lang, out: Terminal) -> None:
    """What is done, the formula, and what it means: on one line where there is room."""
    from regard.locale import translate
    from regard.stages import MEANING

    first, second, meaning = f"{number:<{len(INDENT)}}{title}", f"   {formula}   ", translate(MEANING[name], lang)
    crowded = out.room is not None and width(first + second + meaning) > out.room
    out.print()
    out.print((first, "bold"), second.rstrip() if crowded else second, *(() if crowded else ((meaning, "dim"),)))
    if crowded:
        out.print((INDENT + meaning, "dim"))


def _check_line(report: "Report", say: Say) -> str:
    if not report:
        return str(report)
    empty = report.empty_rows
    none = say(f"; {empty} see nothing and are 0", f", 볼 것이 없어 0인 행 {empty}개") if empty else ""
    rows, within = f"{report.rows:,}", f"{report.tolerance:.2g}"
    return say(
        f"Check: the rows of weights sum to 1 ({rows} rows, within {within}{none})",
        f"확인: 가중치의 각 행의 합은 1입니다 ({rows}행, 허용 오차 {within}{none})",
    )


def _as_json(steps: "Steps", report: "Report", figure: Path | None) -> str:
    """Shapes, formulas and values; what JSON has no number for is the text "-inf", "inf" or "nan"."""
    from regard.stages import NAMES

    names = [*(() if steps.x is None else ("x",)), "q", "k", "v", *NAMES]
    return json.dumps(
        {
            "labels": steps.labels,
            "key_labels": steps.key_labels,
            "shapes": {name: list(getattr(steps, name).shape) for name in names},
            "formulas": steps.formulas,
            "values": {name: finite(getattr(steps, name).tolist()) for name in names},
            "check": {"ok": report.ok, "rows": report.rows, "empty_rows": report.empty_rows, "report": str(report)},
            "figure": None if figure is None else str(figure),
        },
        ensure_ascii=False,
        allow_nan=False,
    )
