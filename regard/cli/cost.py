"""`regard cost` and `regard backends`."""

from __future__ import annotations

import platform
from textwrap import wrap
from typing import TYPE_CHECKING

from regard import tables
from regard.cli.commands import BackendsOptions, CostOptions
from regard.cli.files import FIGURE_SUFFIXES, check_output, write_figure
from regard.cli.terminal import Terminal, bar, print_json
from regard.tables import width

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from regard.costs import Cost, CostSizes
    from regard.growth import Growth, Measured
    from regard.masks import Mask

SECONDS = 5.0  # the longest pass that is measured unless --seconds says otherwise
OF_COMPARE = ("measure", "figure", "window", "global_tokens", "slots", "features", "device", "seconds")
LARGEST = 2**20  # each size of a call
MOST_TILES = 2**25  # of a mask: they are listed, at some ten bytes each
MOST_NUMBERS = 2**62  # of q: what torch can count


def cost(options: CostOptions) -> None:
    """Count the operations and bytes of attention, or compare four kinds of it."""
    from regard import costs

    alone = {name: getattr(options, name) for name in ("kernel", "layers") if getattr(options, name) is not None}
    if options.compare and alone:
        raise ValueError(f"--compare counts neither a CNN nor a cache: leave out {_typed(alone)}")
    counted = costs.cost(
        options.n,
        options.d_model,
        options.num_heads,
        num_kv_heads=options.num_kv_heads,
        head_dim=options.head_dim,
        batch=options.batch,
        dtype=options.dtype,
        **alone,
    )
    given = [name for name in OF_COMPARE if getattr(options, name) not in (None, False)]
    if options.compare:
        _compare(counted.sizes, options)
    elif given:
        raise ValueError(f"{_typed(given)} {'needs' if len(given) == 1 else 'need'} --compare")
    elif options.json:
        print_json(counted.as_dict())
    else:
        _print_cost(counted, Terminal(options.lang))


def _typed(names: list[str] | dict[str, object]) -> str:
    return ", ".join(f"--{name.replace('_', '-')}" for name in names)


def _print_cost(counted: Cost, out: Terminal) -> None:
    """The table of `Cost.text`, without its formulas where they do not fit."""
    sizes, *table, note = counted.text(out.lang).split("\n")
    widest = max(map(width, table))
    narrow = out.room is not None and out.room < widest
    out.print((sizes, "bold"))
    out.print()
    if narrow:
        orders = {"attention": counted.attention.order, "rnn": counted.rnn.order, "cnn": counted.cnn.order}
        out.print(out.say("order of time: attention {attention}, RNN {rnn}, CNN {cnn}", **orders))
        out.print()
    out.print("\n".join(_numbers_only(table) if narrow else table))
    out.print()
    out.print((note, "dim"))
    if narrow:
        more = out.say("The formulas need {widest} columns; a pipe and --json have them too.", widest=widest)
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


# ------------------------------------------------------------------------------------------------------------- compare


def _compare(sizes: CostSizes, options: CostOptions) -> None:
    """Count at lengths that double up to N, measure and draw if asked, and print."""
    from regard.growth import WAYS, GrowthSizes, as_dicts, growth, lengths_up_to, measure, measured_text

    check_output(options.figure, "--figure", FIGURE_SUFFIXES)
    idle = [name for name in ("device", "seconds") if getattr(options, name) is not None and not options.measure]
    if idle:
        raise ValueError(f"{_typed(idle)} {'need' if idle[1:] else 'needs'} --measure")
    chosen = {name: getattr(options, name) for name in ("window", "global_tokens", "slots", "features")}
    growth_sizes = GrowthSizes(
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        batch=sizes.batch,
        dtype=sizes.dtype,
        **{name: value for name, value in chosen.items() if value is not None},
    )
    counted = growth(lengths_up_to(sizes.n), growth_sizes)
    results: list[Measured] = []
    if options.measure:
        seconds = SECONDS if options.seconds is None else options.seconds
        with bar(options.say("measuring")) as tick:
            for result in measure(counted, device=options.device or "cpu", seconds=seconds):
                results.append(result)
                tick(len(results), len(counted.lengths) * len(WAYS))
    if options.figure is not None:
        write_figure(_curves(counted, results, options), options.figure)
    if options.json:
        print_json(counted.as_dict() | ({"measured": as_dicts(results)} if options.measure else {}))
        return
    out = Terminal(options.lang)
    *table, note = counted.text(options.lang).split("\n")
    out.titled("\n".join(table))
    out.print()
    if results:
        out.print(measured_text(counted.lengths, results, options.lang))
        out.print()
    out.print((note, "dim"))
    if options.figure is not None:
        out.print(out.say("Figure: {path}", path=options.figure))


def _curves(counted: Growth, results: list[Measured], options: CostOptions) -> Figure:
    from regard.growth import WAYS, words_in
    from regard.viz.figures import Curves, growth_curves

    words, lengths = words_in(options.lang), counted.lengths
    flops = {words[w]: [float(counted.counts[w][n].flops) for n in lengths] for w in WAYS}
    held = {words[w]: [float(counted.counts[w][n].bytes) for n in lengths] for w in WAYS}
    panels = [Curves(words["flops"], "FLOP", flops), Curves(words["bytes_short"], "B", held)]
    if results:
        times = {words[w]: [m.seconds for m in results if m.way == w] for w in WAYS}
        memory = {words[w]: [None if m.bytes is None else float(m.bytes) for m in results if m.way == w] for w in WAYS}
        panels += [Curves(words["seconds"], "s", times), Curves(words["memory"], "B", memory)]
    return growth_curves(lengths, panels)


# ------------------------------------------------------------------------------------------------------------ backends


def backends(options: BackendsOptions) -> None:
    """Print which backends can run a call."""
    import torch

    from regard.backends import explain
    from regard.cli.mask import read_mask
    from regard.cli.models import check_device, torch_dtype

    batch, heads, nq, size, groups, nk = _sizes(options)
    dtype = torch_dtype(options.dtype)
    check_device(options.device)
    # One number seen from everywhere: the shapes of a call, whatever its size, in four bytes.
    one = torch.zeros((), dtype=dtype, device=options.device).requires_grad_(options.gradient)
    q, k = one.expand(batch, heads, nq, size), one.expand(batch, groups, nk, size)
    mask = None if options.mask is None else read_mask(options.mask)
    if mask is not None:
        _check_tiles(mask, batch, heads, nq, nk)
    said = explain(q, k, k, mask=mask, softcap=options.softcap, dropout=options.dropout)

    out = Terminal(options.lang)
    key_shape = tuple(k.shape)
    out.print((f"q {tuple(q.shape)}, k {key_shape}, v {key_shape}, {options.dtype}, {one.device}", "bold"))
    out.print()
    yes, no = out.say("yes"), out.say("no")
    rows = [
        [name, yes if can else no, why + ("  ← auto" if name == said.chosen else "")] for name, can, why in said.rows
    ]
    if out.room is not None:  # a long reason goes on in the row below
        before = sum(max(width(row[c]) for row in rows) + 2 for c in (0, 1))
        folded = [(name, can, wrap(why, max(20, out.room - before))) for name, can, why in rows]
        rows = [
            ["" if n else name, "" if n else can, line] for name, can, lines in folded for n, line in enumerate(lines)
        ]
    out.print(tables.text([out.say("backend"), out.say("can"), out.say("how, or why not")], rows))
    out.print()
    machine = (
        torch.cuda.get_device_name(one.device)
        if one.device.type == "cuda"
        else f"{one.device} ({platform.machine()}, threads: {torch.get_num_threads()})"
    )
    out.print((f"python {platform.python_version()}, torch {torch.__version__}, {machine}", "dim"))


def _sizes(options: BackendsOptions) -> tuple[int, ...]:
    """B, H, N, D, Hkv, M."""
    parts = options.shape.replace("×", ",").split(",")
    if len(parts) != 4 or not all(part.strip().isdecimal() for part in parts):
        raise ValueError(f"--shape must be four numbers B,H,N,D such as 1,8,1024,64; got {options.shape!r}")
    batch, heads, n, size = map(int, parts)
    groups = heads if options.num_kv_heads is None else options.num_kv_heads
    sizes = (batch, heads, n, size, groups, n if options.keys is None else options.keys)
    for name, number in zip(("B", "H", "N", "D", "--num-kv-heads", "--keys"), sizes, strict=True):
        if not 1 <= number <= LARGEST:
            raise ValueError(f"{name} must be from 1 to {LARGEST:,}, got {number}")
    if batch * max(heads, groups) * max(n, sizes[5]) * size > MOST_NUMBERS:
        raise ValueError(f"--shape {options.shape} with {sizes[5]:,} keys is more than a tensor can hold")
    return sizes


def _check_tiles(mask: Mask, batch: int, heads: int, nq: int, nk: int) -> None:
    """Refuse a mask whose tiles, which `explain` counts, are too many to list."""
    from regard.backends.tiled import tile_size

    rows, cols = tile_size(batch, heads, nq, nk)
    tiles = mask.leading[0] * mask.leading[1] * -(-nq // rows) * -(-nk // cols)
    if tiles > MOST_TILES:
        raise ValueError(
            f"{mask!r} has {tiles:,} tiles of {rows} × {cols} in this call; the limit is {MOST_TILES:,}: "
            "give fewer positions, heads or batch rows"
        )
