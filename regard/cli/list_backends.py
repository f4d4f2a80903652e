"""`regard backends`: which backends can do a call of given sizes, how, or why not, and which one "auto" takes.

It reads options and prints what `regard.backends.explain` says. It runs no attention and takes no memory for one.
"""

# No `from __future__ import annotations`: typer reads the annotations, and their texts are chosen while this runs.
import platform
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated

import typer

from regard import tables
from regard.cli.language import Lang, Say, known, speaker
from regard.cli.terminal import Terminal

if TYPE_CHECKING:
    import torch

    from regard.backends import Explanation
    from regard.masks import Mask

__all__ = ["add"]

LARGEST = 2**20  # each size of a call
MOST_TILES = 2**25  # of a mask: they are listed, at some ten bytes each
MOST_NUMBERS = 2**62  # of q: what torch can count


def add(app: typer.Typer, lang: Lang) -> None:
    """Add the command to the app, with help in a language.

    >>> app = typer.Typer()
    >>> add(app, "en")
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
        from regard.cli.mask_language import read_mask

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
        _print(said, tuple(q.shape), tuple(k.shape), dtype, one.device, spoken)


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


def _print(
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
