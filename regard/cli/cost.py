"""`regard cost` and `regard backends`."""

import json
import platform
from dataclasses import dataclass, fields
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated

import typer

from regard import tables
from regard.cli.options import Lang, Say, known, speaker
from regard.cli.terminal import Terminal
from regard.tables import width

if TYPE_CHECKING:
    import torch
    from matplotlib.figure import Figure

    from regard.backends import Explanation
    from regard.costs import Cost, Sizes
    from regard.growth import Growth, Measured
    from regard.masks import Mask

SECONDS = 5.0  # the longest pass that is measured unless something else is asked for


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The options that go with --compare; None or False where they were not given.

    >>> Asked(slots=7, measure=True).options
    ['--measure', '--slots']
    """

    measure: bool = False
    figure: Path | None = None
    window: int | None = None
    global_tokens: int | None = None
    slots: int | None = None
    features: int | None = None
    device: str | None = None
    seconds: float | None = None

    @property
    def options(self) -> list[str]:
        """The options that were given, as they are typed."""
        given = [f.name for f in fields(self) if getattr(self, f.name) not in (None, False)]
        return [f"--{name.replace('_', '-')}" for name in given]


def compare(sizes: "Sizes", asked: Asked, *, json_: bool, lang: Lang) -> None:
    """Count, and measure and draw where asked, and print it all as text or JSON.

    sizes: what `regard cost` was asked for; lengths double up to its n.

    Raises ValueError for a size too small, for a figure that cannot be written, and for --device or --seconds without
    --measure.
    """
    from regard.cli import files
    from regard.growth import growth, lengths_up_to

    files.check_place(asked.figure)
    idle = [name for name in ("device", "seconds") if getattr(asked, name) is not None and not asked.measure]
    if idle:
        raise ValueError(f"{' and '.join(f'--{name}' for name in idle)} {'go' if idle[1:] else 'goes'} with --measure")
    chosen = {name: getattr(asked, name) for name in ("window", "global_tokens", "slots", "features")}
    counted = growth(
        lengths_up_to(sizes.n),
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        batch=sizes.batch,
        dtype=sizes.dtype,
        **{name: value for name, value in chosen.items() if value is not None},
    )
    results = _measured(counted, asked, speaker(lang)) if asked.measure else []
    if asked.figure is not None:
        files.write(_figure(counted, results, lang), asked.figure)
    if json_:
        from regard.growth import as_dicts

        print(json.dumps(counted.as_dict() | ({"measured": as_dicts(results)} if asked.measure else {})))
    else:
        _print_growth(counted, results, asked, lang)


def _measured(counted: "Growth", asked: Asked, say: Say) -> "list[Measured]":
    """Every result, with a progress bar on a terminal. Ctrl-C leaves by the exception it is."""
    from regard.cli.models import bar
    from regard.growth import WAYS, measure

    seconds = SECONDS if asked.seconds is None else asked.seconds
    results: list[Measured] = []
    with bar(say("measuring", "측정 중")) as tick:
        for result in measure(counted, device=asked.device or "cpu", seconds=seconds):
            results.append(result)
            tick(len(results), len(counted.lengths) * len(WAYS))
    return results


def _figure(counted: "Growth", results: "list[Measured]", lang: Lang) -> "Figure":
    from regard.growth import WAYS, words_in
    from regard.viz.figures import Curves, growth_curves

    words, lengths = words_in(lang), counted.lengths
    flops = {words[w]: [float(counted.counts[w][n].flops) for n in lengths] for w in WAYS}
    held = {words[w]: [float(counted.counts[w][n].bytes) for n in lengths] for w in WAYS}
    panels = [Curves(words["flops"], "FLOP", flops), Curves(words["bytes_short"], "B", held)]
    if results:
        times = {words[w]: [m.seconds for m in results if m.way == w] for w in WAYS}
        memory = {words[w]: [None if m.bytes is None else float(m.bytes) for m in results if m.way == w] for w in WAYS}
        panels += [Curves(words["seconds"], "s", times), Curves(words["memory"], "B", memory)]
    return growth_curves(lengths, panels)


def _print_growth(counted: "Growth", results: "list[Measured]", asked: Asked, lang: Lang) -> None:
    say, out = speaker(lang), Terminal()
    sizes, *rest = counted.text(lang).split("\n")
    out.print((sizes, "bold"))
    out.print("\n".join(rest[:-1]))
    out.print()
    if results:
        from regard.growth import measured_text

        out.print(measured_text(counted.lengths, results, lang))
        out.print()
    out.print((rest[-1], "dim"))
    if asked.figure is not None:
        out.print(say(f"figure: {asked.figure}", f"그림: {asked.figure}"))


# No `from __future__ import annotations`: typer reads the annotations, and their texts are chosen while this runs.


def add_cost(app: typer.Typer, lang: Lang) -> None:
    """Add the command to the app, with help in a language.

    >>> app = typer.Typer()
    >>> add_cost(app, "en")
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
            _print_cost(counted, spoken)


def _print_cost(counted: "Cost", lang: Lang) -> None:
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


# No `from __future__ import annotations`: typer reads the annotations, and their texts are chosen while this runs.


LARGEST = 2**20  # each size of a call
MOST_TILES = 2**25  # of a mask: they are listed, at some ten bytes each
MOST_NUMBERS = 2**62  # of q: what torch can count


def add_backends(app: typer.Typer, lang: Lang) -> None:
    """Add the command to the app, with help in a language.

    >>> app = typer.Typer()
    >>> add_backends(app, "en")
    >>> app.registered_commands[0].name
    'backends'
    """
    say = speaker(lang)

    @app.command(
        "backends",
        help=say(
            "Which backends can do a call, how, or why not, and which one 'auto' takes.",
            "각 백엔드가 호출을 처리할 수 있는지와 'auto'의 선택을 보여 줍니다.",
        ),
    )
    def backends(
        shape: Annotated[
            str, typer.Option(metavar="B,H,N,D", help=say("Shape of the queries.", "쿼리의 모양."))
        ] = "1,8,1024,64",
        kv_heads: Annotated[
            int | None, typer.Option(metavar="H", help=say("Key/value heads; as H.", "키/값 헤드 수. 기본은 H."))
        ] = None,
        keys: Annotated[
            int | None, typer.Option(metavar="M", help=say("How many keys; as N.", "키 수. 기본은 N."))
        ] = None,
        mask: Annotated[
            str | None,
            typer.Option(metavar="SPEC", help=say("As in 'regard mask'.", "'regard mask'의 SPEC과 같습니다.")),
        ] = None,
        softcap: Annotated[
            float | None,
            typer.Option(metavar="CAP", help=say("Scores become CAP·tanh(score/CAP).", "점수를 CAP·tanh(점수/CAP)로.")),
        ] = None,
        dropout: Annotated[float, typer.Option(metavar="P", help=say("Of the weights.", "가중치의 드롭아웃."))] = 0.0,
        dtype: Annotated[
            str,
            typer.Option(metavar="DTYPE", help="float32, float64, bfloat16, float16."),
        ] = "float32",
        device: Annotated[
            str, typer.Option(metavar="DEVICE", help=say("cpu, cuda, cuda:1, …", "cpu, cuda, cuda:1 등."))
        ] = "cpu",
        gradient: Annotated[
            bool, typer.Option("--gradient", help=say("Backward will follow.", "역전파까지 할 때."))
        ] = False,
        lang: Annotated[str, typer.Option(metavar="en|ko", help=say("Language of the text.", "출력 언어."))] = lang,
    ) -> None:
        from regard.backends import explain
        from regard.cli.mask import read_mask

        spoken = speaker(known(lang))
        sizes = _sizes(shape, kv_heads, keys)
        one = _one_number(dtype, device).requires_grad_(gradient)
        batch, heads, nq, size, groups, nk = sizes
        # One number seen from everywhere: the shapes of a call, whatever its size, in four bytes.
        q, k = one.expand(batch, heads, nq, size), one.expand(batch, groups, nk, size)
        rule = None if mask is None else read_mask(mask)
        if rule is not None:
            _check_tiles(rule, batch, heads, nq, nk)
        said = explain(q, k, k, mask=rule, softcap=softcap, dropout=dropout)
        _print_backends(said, tuple(q.shape), tuple(k.shape), dtype, one.device, spoken)


def _sizes(shape: str, kv_heads: int | None, keys: int | None) -> tuple[int, ...]:
    """B, H, N, D, Hkv, M."""
    parts = shape.replace("×", ",").split(",")
    if len(parts) != 4 or not all(part.strip().isdecimal() for part in parts):
        raise ValueError(f"--shape must be four numbers B,H,N,D such as 1,8,1024,64; got {shape!r}")
    batch, heads, n, size = map(int, parts)
    sizes = (batch, heads, n, size, heads if kv_heads is None else kv_heads, n if keys is None else keys)
    for name, number in zip(("B", "H", "N", "D", "--kv-heads", "--keys"), sizes, strict=True):
        if not 1 <= number <= LARGEST:
            raise ValueError(f"{name} must be from 1 to {LARGEST:,}, got {number}")
    if batch * max(sizes[1], sizes[4]) * max(n, sizes[5]) * size > MOST_NUMBERS:
        raise ValueError(f"--shape {shape} with {sizes[5]:,} keys is more than a tensor can hold")
    return sizes


def _check_tiles(mask: "Mask", batch: int, heads: int, nq: int, nk: int) -> None:
    """Refuse a mask whose tiles, which `explain` counts, are too many to list."""
    from regard.backends.tiled import tile_size

    rows, cols = tile_size(batch, heads, nq, nk)
    tiles = mask.leading[0] * mask.leading[1] * -(-nq // rows) * -(-nk // cols)
    if tiles > MOST_TILES:
        raise ValueError(
            f"{mask!r} has {tiles:,} tiles of {rows} × {cols} in this call; at most {MOST_TILES:,} are looked at: "
            "give fewer positions, heads or batch rows"
        )


def _one_number(dtype: str, device: str) -> "torch.Tensor":
    """A single number of a dtype on a device."""
    import torch

    from regard.costs import BYTES

    if dtype not in BYTES:
        raise ValueError(f"--dtype must be one of {', '.join(BYTES)}; got {dtype!r}")
    try:
        return torch.zeros((), dtype=getattr(torch, dtype), device=device)
    # torch says by RuntimeError that a name is unknown, by AssertionError that it was built without CUDA, and by
    # NotImplementedError, a RuntimeError, that a device is not for this.
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {device!r} cannot be used here: {str(error).splitlines()[0]}") from None


def _print_backends(
    said: "Explanation", q: tuple[int, ...], k: tuple[int, ...], dtype: str, device: "torch.device", say: Say
) -> None:
    out = Terminal()
    out.print((f"q {q}, k {k}, v {k}, {dtype}, {device}", "bold"))
    out.print()
    mark = {said.chosen: "  ← auto"}
    yes, no = say("yes", "가능"), say("no", "불가")
    rows = [[name, yes if can else no, why + mark.get(name, "")] for name, can, why in said.rows]
    headers = [say("backend", "백엔드"), say("can", "가능"), say("how, or why not", "방법 또는 안 되는 이유")]
    out.print(tables.text(headers, rows if out.room is None else _folded(rows, out.room)))
    out.print()
    out.print((f"{_versions()}, {_device_name(device)}", "dim"))


def _folded(rows: list[list[str]], room: int) -> list[list[str]]:
    """Rows whose last cell goes on in the row below where it is longer than the room."""
    before = sum(max(tables.width(row[c]) for row in rows) + 2 for c in (0, 1))
    folded = []
    for name, can, why in rows:
        first, *rest = wrap(why, max(20, room - before))
        folded += [[name, can, first], *(["", "", line] for line in rest)]
    return folded


def _versions() -> str:
    import torch

    return f"python {platform.python_version()}, torch {torch.__version__}"


def _device_name(device: "torch.device") -> str:
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device} ({platform.machine()}, threads: {torch.get_num_threads()})"
