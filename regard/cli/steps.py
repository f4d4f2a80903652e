"""`regard steps`: attention in the four numbered steps of the textbooks, with every number."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from regard.cli.commands import StepsOptions
from regard.cli.files import FIGURE_SUFFIXES, check_output, read_arrays, write_figure
from regard.cli.terminal import INDENT, Terminal, print_json, print_matrix
from regard.locale import translate
from regard.tables import width

if TYPE_CHECKING:
    from regard.lens.validity import Report
    from regard.op import Steps

DEMO = [[0.1, 0.2, 0.3, 0.4], [0.5, 0.6, 0.7, 0.8], [0.9, 1.0, 1.1, 1.2]]
DEMO_WORDS = "The cat sat"
MOST_BYTES = 2**30  # of all intermediates together; steps are for small inputs
HEADINGS = {
    "scores": ("1", "Scores"),
    "scaled": ("2", "Divide by √d_k"),
    "capped": ("·", "Softcap"),
    "masked": ("·", "Mask"),
    "weights": ("3", "Softmax"),
    "output": ("4", "Weighted sum of V"),
}


def steps(options: StepsOptions) -> int:
    """Print attention step by step; 1 if the weights fail their check."""
    from regard.lens.validity import check
    from regard.op import pick
    from regard.viz import figures

    if options.demo and options.input is not None:
        raise ValueError("--demo and --input exclude each other: the demo has its own numbers")
    if options.json and (options.batch or options.head) and options.figure is None:
        raise ValueError("--batch and --head choose what is printed or drawn; --json holds all of them")
    check_output(options.figure, "--figure", FIGURE_SUFFIXES)
    arrays, origin = _read(options)
    computed = _compute(arrays, options)
    pick(computed.weights, options.batch, options.head)  # an index out of range is told before anything is printed
    if options.figure is not None:
        write_figure(figures.steps(computed, batch=options.batch, head=options.head), options.figure)
    report = check(computed.weights)
    if options.json:
        _print_json(computed, report, options)
    else:
        _print(computed, origin, report, options)
    return 0 if report else 1


def _read(options: StepsOptions) -> tuple[dict[str, Any], str]:
    """The arrays, and a line on where they come from."""
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


def _compute(arrays: dict[str, Any], options: StepsOptions) -> Steps:
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


def _print(steps: Steps, origin: str, report: Report, options: StepsOptions) -> None:
    from regard.op import pick

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

    if steps.x is not None:
        _print_heading("", out.say("Input"), "x", "x", out)
        # Where heads were split off, x has none, and all before N is batch.
        split = steps.x.shape[:-2] != steps.scores.shape[:-2]
        rows = pick(steps.x.reshape(-1, *steps.x.shape[-2:]), which[0], 0) if split else pick(steps.x, *which)
        print_matrix(rows.tolist(), steps.labels, None, out, heat=False)
    for name, (number, heading) in HEADINGS.items():
        if name in steps.unchanged:
            continue
        formula = steps.formulas[name]
        usual = name != "scaled" or "√" in formula
        _print_heading(number, out.say(heading if usual else "Scale"), name, f"{name} = {formula}", out)
        keys = None if name == "output" else steps.key_labels
        values = pick(getattr(steps, name), *which).tolist()
        print_matrix(values, steps.labels, keys, out, heat=name == "weights")

    out.print()
    if report:
        none = out.say("; {count} see nothing and are 0", count=report.empty_rows) if report.empty_rows else ""
        values = {"rows": f"{report.rows:,}", "within": f"{report.tolerance:.2g}", "none": none}
        out.print(out.say("Check: the rows of weights sum to 1 ({rows} rows, within {within}{none})", **values))
    else:
        out.print(str(report))
    if options.figure is not None:
        out.print(out.say("Figure: {path}", path=options.figure))


def _print_heading(number: str, title: str, name: str, formula: str, out: Terminal) -> None:
    """What is done, the formula, and what it means: on one line where there is room."""
    from regard.op import STEP_MEANINGS

    first, second, meaning = (
        f"{number:<{len(INDENT)}}{title}",
        f"   {formula}   ",
        translate(STEP_MEANINGS[name], out.lang),
    )
    crowded = out.room is not None and width(first + second + meaning) > out.room
    out.print()
    out.print((first, "bold"), second.rstrip() if crowded else second, *(() if crowded else ((meaning, "dim"),)))
    if crowded:
        out.print((INDENT + meaning, "dim"))


def _print_json(steps: Steps, report: Report, options: StepsOptions) -> None:
    from regard.op import STEP_NAMES

    names = [*(() if steps.x is None else ("x",)), "q", "k", "v", *STEP_NAMES]
    print_json(
        {
            "labels": steps.labels,
            "key_labels": steps.key_labels,
            "shapes": {name: getattr(steps, name).shape for name in names},
            "formulas": steps.formulas,
            "values": {name: getattr(steps, name).tolist() for name in names},
            "check": {"ok": report.ok, "rows": report.rows, "empty_rows": report.empty_rows, "report": str(report)},
            "figure": options.figure,
        }
    )
