"""Attention without a model: `regard steps`, `regard cost` and `regard backends`."""

from __future__ import annotations

import platform
from dataclasses import asdict
from math import prod
from typing import TYPE_CHECKING, Any

from regard import tables
from regard.cli.commands import BackendsOptions, CostOptions, StepsOptions
from regard.cli.inputs import check_device, read_arrays, refuse, torch_dtype
from regard.cli.outputs import (
    FIGURE_SUFFIXES,
    INDENT,
    Terminal,
    bar,
    check_output,
    print_json,
    print_matrix,
    write_figure,
)
from regard.locale import translate, translate_error
from regard.tables import width

if TYPE_CHECKING:
    from regard.costs import Cost, CostSizes
    from regard.growth import Growth, Measured
    from regard.lens.validity import Report
    from regard.masks import Mask
    from regard.op import Steps

DEMO = [[0.1, 0.2, 0.3, 0.4], [0.5, 0.6, 0.7, 0.8], [0.9, 1.0, 1.1, 1.2]]
DEMO_WORDS = "The cat sat"
MOST_BYTES = 2**30  # of all intermediates of steps together, which are for small inputs
HEADINGS = {
    "x": ("", "Input"),
    "q": ("", "Queries Q"),
    "k": ("", "Keys K"),
    "v": ("", "Values V"),
    "scores": ("1", "Scores"),
    "scaled": ("2", "Divide by √d_k"),
    "capped": ("·", "Softcap"),
    "masked": ("·", "Mask"),
    "weights": ("3", "Softmax"),
    "output": ("4", "Weighted sum of V"),
}
SECONDS = 5.0  # the longest pass that cost measures unless --seconds says otherwise
OF_COMPARE = ("measure", "figure", "window", "global_tokens", "slots", "features", "device", "seconds")
LARGEST = 2**20  # each size of a call
MOST_TILES = 2**25  # of a mask: they are listed, at some ten bytes each
MOST_NUMBERS = 2**62  # of q: what torch can count


# --------------------------------------------------------------------------------------------------------------- steps


def steps(options: StepsOptions) -> int:
    """Print attention step by step; 1 if the weights fail their check."""
    from regard.lens.validity import check
    from regard.op import STEP_NAMES, pick
    from regard.viz import figures

    if options.demo and options.input is not None:
        raise ValueError("--demo and --input exclude each other: the demo has its own numbers")
    if options.json and (options.batch or options.head) and options.figure is None:
        raise ValueError("--batch and --head choose what is printed or drawn; --json holds all of them")
    check_output(options.figure, "--figure", FIGURE_SUFFIXES)
    arrays, origin = _step_arrays(options)
    computed = _compute_steps(arrays, options)
    pick(computed.weights, options.batch, options.head)  # an index out of range is reported before anything is printed
    if options.figure is not None:
        write_figure(figures.steps(computed, batch=options.batch, head=options.head), options.figure)
    report = check(computed.weights)
    if options.json:
        names = [*(() if computed.x is None else ("x",)), "q", "k", "v", *STEP_NAMES]
        print_json(
            {
                "labels": computed.labels,
                "key_labels": computed.key_labels,
                "shapes": {name: getattr(computed, name).shape for name in names},
                "formulas": computed.formulas,
                "values": {name: getattr(computed, name).tolist() for name in names},
                "check": {"ok": report.ok, "rows": report.rows, "empty_rows": report.empty_rows, "report": str(report)},
                "figure": options.figure,
            }
        )
    else:
        _print_steps(computed, origin, report, options)
    return 0 if report else 1


def _step_arrays(options: StepsOptions) -> tuple[dict[str, Any], str]:
    path, heads = options.input, options.num_heads
    if path is None:
        import numpy as np

        x, same = np.array(DEMO), np.eye(4)
        line = options.say("x has shape (3, 4); W_Q = W_K = W_V = the identity, so q = k = v = x")
        split = options.say(", split into {heads} heads", heads=heads) if heads > 1 else ""
        return {"x": x, "w_q": same, "w_k": same, "w_v": same}, line + split
    arrays = read_arrays(path)
    if path.suffix.lower() == ".npy":
        return arrays, f"q = k = v = {path.name}"
    return arrays, f"{path.name}: " + ", ".join(f"{name} {tuple(a.shape)}" for name, a in arrays.items())


def _compute_steps(arrays: dict[str, Any], options: StepsOptions) -> Steps:
    from regard.cli.mask import read_mask
    from regard.op import steps

    q, k = (arrays["q"], arrays["k"]) if "q" in arrays else (arrays["x"], arrays["x"])
    nq, nk = prod(q.shape[-2:-1]), prod(k.shape[-2:-1])
    needed = 7 * 8 * prod(q.shape[:-1]) * nk * max(1, options.num_heads)  # seven stages, in float64
    if needed > MOST_BYTES:
        raise ValueError(
            f"keeping every step of {nq:,} × {nk:,} positions takes about "
            f"{needed / 2**30:.1f} GiB; steps are for small inputs, at most 1 GiB: give fewer positions or heads"
        )
    words = DEMO_WORDS if options.input is None and options.words is None else options.words
    return steps(
        **arrays,
        num_heads=options.num_heads,
        mask=None if options.mask is None else read_mask(options.mask),
        scale=options.scale,
        softcap=options.softcap,
        labels=None if words is None else words.split(),
    )


def _print_steps(steps: Steps, origin: str, report: Report, options: StepsOptions) -> None:
    from regard.op import STEP_MEANINGS

    out, which = Terminal(options.lang), (options.batch, options.head)
    (nq, nk), size, lead = steps.scores.shape[-2:], steps.q.shape[-1], tuple(steps.scores.shape[:-2])
    title = out.say(
        "Attention step by step: {queries} queries, {keys} keys, head size {size}", queries=nq, keys=nk, size=size
    )
    out.print((title, "bold"))
    out.print(origin)
    if prod(lead) > 1:
        batch, head = which
        out.print(out.say("shown: batch {batch}, head {head} of {shape}", batch=batch, head=head, shape=lead))

    for name, (number, heading) in HEADINGS.items():
        if name in steps.unchanged or getattr(steps, name) is None:
            continue
        # What is done, the formula, and what it means: on one line where there is room.
        formula, meaning = steps.formulas[name], translate(STEP_MEANINGS[name], out.lang)
        usual = name != "scaled" or "√" in formula
        first = f"{number:<{len(INDENT)}}{out.say(heading if usual else 'Scale')}"
        second = f"   {formula if formula == name else f'{name} = {formula}'}   "
        out.print()
        if out.room is None or width(first + second + meaning) <= out.room:
            out.print((first, "bold"), second, (meaning, "dim"))
        else:
            out.print((first, "bold"), second.rstrip())
            out.print((INDENT + meaning, "dim"))
        rows = steps.key_labels if name in ("k", "v") else steps.labels
        columns = None if name in ("x", "q", "k", "v", "output") else steps.key_labels
        print_matrix(steps.matrix(name, *which).tolist(), rows, columns, out, heat=name == "weights")

    out.print()
    if report:
        none = out.say("; {count} see nothing and are 0", count=report.empty_rows) if report.empty_rows else ""
        values = {"rows": f"{report.rows:,}", "within": f"{report.tolerance:.2g}", "none": none}
        out.print(out.say("Check: the rows of weights sum to 1 ({rows} rows, within {within}{none})", **values))
    else:
        out.print(str(report))
    out.name_files(figure=options.figure)


# ---------------------------------------------------------------------------------------------------------------- cost


def cost(options: CostOptions) -> None:
    """Count the operations and bytes of attention, or compare four kinds of it."""
    from regard import costs

    alone = {name: getattr(options, name) for name in ("kernel", "layers") if getattr(options, name) is not None}
    if options.compare and alone:
        only = ", ".join(f"--{name}" for name in alone)
        raise ValueError(f"--compare counts neither a CNN nor a cache: leave out {only}")
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

    if not options.compare:
        refuse(options, OF_COMPARE, "for --compare")
    elif not options.measure:
        refuse(options, ("device", "seconds"), "for --measure")
    if options.compare:
        _compare(counted.sizes, options)
    elif options.json:
        print_json(counted.as_dict())
    else:
        _print_cost(counted, Terminal(options.lang))


def _print_cost(counted: Cost, out: Terminal) -> None:
    """The table of `Cost.text`, without its formulas where they do not fit."""
    sizes, *table, note = counted.text(out.lang).split("\n")
    widest = max(map(width, table))
    narrow = out.room is not None and out.room < widest
    if narrow:
        _, *table, _ = counted.text(out.lang, formulas=False).split("\n")
    out.print((sizes, "bold"))
    out.print()
    if narrow:
        orders = {"attention": counted.attention.order, "rnn": counted.rnn.order, "cnn": counted.cnn.order}
        out.print(out.say("order of time: attention {attention}, RNN {rnn}, CNN {cnn}", **orders))
        out.print()
    out.print("\n".join(table))
    out.print()
    out.print((note, "dim"))
    if narrow:
        more = out.say("The formulas need {widest} columns; a pipe and --json have them too.", widest=widest)
        out.print((more, "dim"))


def _compare(sizes: CostSizes, options: CostOptions) -> None:
    """Count at lengths that double up to N, measure and draw if asked, and print."""
    from regard.growth import WAYS, GrowthSizes, growth, lengths_up_to, measure, measured_text

    check_output(options.figure, "--figure", FIGURE_SUFFIXES)
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
        _draw_growth(counted, results, options)
    if options.json:
        print_json(
            counted.as_dict() | ({"measured": [asdict(result) for result in results]} if options.measure else {})
        )
        return
    out = Terminal(options.lang)
    *table, note = counted.text(options.lang).split("\n")
    out.titled("\n".join(table))
    out.print()
    if results:
        out.print(measured_text(counted.lengths, results, options.lang))
        out.print()
    out.print((note, "dim"))
    out.name_files(figure=options.figure)


def _draw_growth(counted: Growth, results: list[Measured], options: CostOptions) -> None:
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
    assert options.figure is not None
    write_figure(growth_curves(lengths, panels), options.figure)


# ------------------------------------------------------------------------------------------------------------ backends


def backends(options: BackendsOptions) -> None:
    """Print which backends can run a call."""
    import torch

    from regard.backends import explain
    from regard.cli.mask import read_mask

    # 1. The shapes of a call, whatever its size, in four bytes: one number seen from everywhere.
    batch, heads, nq, size, groups, nk = _call_sizes(options)
    dtype = torch_dtype(options.dtype)
    check_device(options.device)
    one = torch.zeros((), dtype=dtype, device=options.device).requires_grad_(options.gradient)
    q, k = one.expand(batch, heads, nq, size), one.expand(batch, groups, nk, size)
    mask = None if options.mask is None else read_mask(options.mask)
    if mask is not None:
        _check_tiles(mask, batch, heads, nq, nk)
    explanation = explain(q, k, k, mask=mask, softcap=options.softcap, dropout=options.dropout)

    # 2. A row for each backend; a long reason goes on in the row below.
    out = Terminal(options.lang)
    key_shape = tuple(k.shape)
    out.print((f"q {tuple(q.shape)}, k {key_shape}, v {key_shape}, {options.dtype}, {one.device}", "bold"))
    out.print()
    yes, no = out.say("yes"), out.say("no")
    marks = {explanation.chosen: "  ← auto"}
    rows = [
        [name, yes if can else no, translate_error(why, options.lang) + marks.get(name, "")]
        for name, can, why in explanation.rows
    ]
    if out.room is not None:
        before = sum(max(width(row[c]) for row in rows) + 2 for c in (0, 1))
        folded = [(name, can, out.fold(why, max(20, out.room - before))) for name, can, why in rows]
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


def _call_sizes(options: BackendsOptions) -> tuple[int, ...]:
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
    """Raise for a mask whose tiles, which `explain` counts, are too many to list."""
    from regard.backends.tiled import tile_size

    rows, cols = tile_size(batch, heads, nq, nk)
    tiles = mask.leading[0] * mask.leading[1] * -(-nq // rows) * -(-nk // cols)
    if tiles > MOST_TILES:
        raise ValueError(
            f"{mask!r} has {tiles:,} tiles of {rows} × {cols} in this call; the limit is {MOST_TILES:,}: "
            "give fewer positions, heads or batch rows"
        )
