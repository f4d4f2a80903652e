"""`regard cost`: the operations and bytes of attention, of a recurrent layer and of a convolution, counted.

With `--compare`, those of full, sparse, low-rank and kernel attention as the sequence grows. It reads options and
prints what `regard.costs.cost` counts; `compare_growth.py` does the comparing.
"""

# No `from __future__ import annotations`: typer reads the annotations, and their texts are chosen while this runs.
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from regard.cli.compare_growth import Asked, compare
from regard.cli.language import Lang, known, speaker
from regard.cli.terminal import Terminal
from regard.tables import width

if TYPE_CHECKING:
    from regard.costs import Cost

__all__ = ["add"]


def add(app: typer.Typer, lang: Lang) -> None:
    """Add the command to the app, with help in a language.

    >>> app = typer.Typer()
    >>> add(app, "en")
    >>> app.registered_commands[0].name
    'cost'
    """
    say = speaker(lang)

    @app.command(
        "cost",
        help=say(
            "Count the operations and bytes of attention, beside an RNN and a CNN.\n\n"
            "With --compare: full, sparse, low-rank and kernel attention as the sequence grows to N.",
            "어텐션의 연산량과 메모리를 RNN, CNN과 나란히 셉니다.\n\n"
            "--compare: 길이 N까지 전체, 희소, 저랭크, 커널 어텐션을 비교합니다.",
        ),
    )
    def cost(
        n: Annotated[int, typer.Option("--n", metavar="N", help=say("Positions.", "시퀀스 길이."))],
        d_model: Annotated[
            int, typer.Option(metavar="D", help=say("Size of a position's vector.", "위치마다 갖는 벡터의 크기."))
        ],
        heads: Annotated[int, typer.Option(metavar="H", help=say("Query heads.", "쿼리 헤드 수."))] = 1,
        kv_heads: Annotated[
            int | None, typer.Option(metavar="H", help=say("Key/value heads; as heads.", "키/값 헤드 수. 기본은 H."))
        ] = None,
        head_dim: Annotated[
            int | None, typer.Option(metavar="D", help=say("Head size; d_model/heads.", "헤드 크기. 기본은 d_model/H."))
        ] = None,
        kernel: Annotated[
            int | None, typer.Option(metavar="K", help=say("Width of the CNN; 3.", "CNN 커널의 너비. 기본 3."))
        ] = None,
        batch: Annotated[int, typer.Option(metavar="B", help=say("Sequences.", "배치 크기."))] = 1,
        layers: Annotated[
            int | None,
            typer.Option(metavar="L", help=say("Layers that keep a cache; 1.", "캐시를 두는 레이어 수. 기본 1.")),
        ] = None,
        dtype: Annotated[
            str,
            typer.Option(metavar="DTYPE", help="float32, float64, bfloat16, float16."),
        ] = "float32",
        compare_: Annotated[
            bool,
            typer.Option("--compare", help=say("Four ways to attend, up to N.", "길이 N까지 네 방식을 비교합니다.")),
        ] = False,
        measure: Annotated[
            bool, typer.Option("--measure", help=say("Measure them here, too.", "이 컴퓨터에서 직접 측정합니다."))
        ] = False,
        figure: Annotated[
            Path | None, typer.Option(metavar="FILE", help=say("Draw the curves.", "곡선을 그림으로 저장합니다."))
        ] = None,
        window: Annotated[
            int | None, typer.Option(metavar="W", help=say("Sparse: each side; 256.", "희소: 양쪽 윈도. 기본 256."))
        ] = None,
        global_tokens: Annotated[
            int | None, typer.Option(metavar="G", help=say("Sparse: global; 1.", "희소: 글로벌 위치 수. 기본 1."))
        ] = None,
        slots: Annotated[
            int | None, typer.Option(metavar="K", help=say("Low-rank; 256.", "저랭크: 슬롯 수. 기본 256."))
        ] = None,
        features: Annotated[
            int | None, typer.Option(metavar="M", help=say("Kernel; 256.", "커널: 특징 수. 기본 256."))
        ] = None,
        device: Annotated[
            str | None, typer.Option(metavar="DEVICE", help=say("Where to measure; cpu.", "측정할 장치. 기본 cpu."))
        ] = None,
        seconds: Annotated[
            float | None,
            typer.Option(metavar="S", help=say("Longest pass to measure; 5.", "한 번 실행의 최대 시간(초). 기본 5.")),
        ] = None,
        json_: Annotated[bool, typer.Option("--json", help=say("As JSON.", "JSON으로 출력합니다."))] = False,
        lang: Annotated[str, typer.Option(metavar="en|ko", help=say("Language of the text.", "출력 언어."))] = lang,
    ) -> None:
        from regard import costs

        spoken = known(lang)
        alone = {name: value for name, value in (("kernel", kernel), ("layers", layers)) if value is not None}
        if compare_ and alone:
            given = " and ".join(f"--{name}" for name in alone)
            raise ValueError(f"--compare counts neither a CNN nor a cache: leave out {given}")
        counted = costs.cost(
            n,
            d_model,
            heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            batch=batch,
            dtype=dtype,
            **alone,
        )
        asked = Asked(
            measure=measure,
            figure=figure,
            window=window,
            global_tokens=global_tokens,
            slots=slots,
            features=features,
            device=device,
            seconds=seconds,
        )
        if compare_:
            compare(counted.sizes, asked, json_=json_, lang=spoken)
        elif asked != Asked():
            raise ValueError(f"{', '.join(asked.options)} {'goes' if len(asked.options) == 1 else 'go'} with --compare")
        elif json_:
            print(json.dumps(counted.as_dict(), ensure_ascii=False))
        else:
            _print(counted, spoken)


def _print(counted: "Cost", lang: Lang) -> None:
    """The table of `Cost.text`, without its formulas where they do not fit."""
    say, out = speaker(lang), Terminal()
    sizes, *table, note = counted.text(lang).split("\n")
    widest = max(map(width, table))
    narrow = out.room is not None and out.room < widest
    out.print((sizes, "bold"))
    out.print()
    if narrow:
        attention, rnn, cnn = counted.attention.order, counted.rnn.order, counted.cnn.order
        out.print(
            say("order of time", "시간 복잡도") + f": {say('attention', '어텐션')} {attention}, RNN {rnn}, CNN {cnn}"
        )
        out.print()
    out.print("\n".join(_numbers_only(table) if narrow else table))
    out.print()
    out.print((note, "dim"))
    if narrow:
        more = say(
            f"The formulas need {widest} columns; a pipe and --json have them too.",
            f"계산식은 화면 너비가 {widest}칸 이상일 때 표시됩니다. 파이프나 --json으로도 볼 수 있습니다.",
        )
        out.print((more, "dim"))


def _numbers_only(table: list[str]) -> list[str]:
    """A text table without its last column, the formulas, and without the rows that hold nothing but a formula.

    >>> _numbers_only(["몫  of  n  how", "──  ──  ─  ───", "a   x      b·c", "d   x   1  e·f"])
    ['몫  of  n', '──  ──  ─', 'd   x   1']
    """
    rule = table[1]  # the line under the headers shows where the columns stand
    numbers, formulas = rule.index("─", rule.index(" ─", rule.index(" ─") + 2)), rule.rindex("  ")
    kept = []
    for line in table:
        while width(line) > formulas:
            line = line[:-1]
        kept.append(line.rstrip())
    return [line for line in kept if width(line) > numbers]
