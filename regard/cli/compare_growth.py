"""`regard cost --compare`: full, sparse, low-rank and kernel attention as the sequence grows: counted, measured, drawn.

It reads what was asked, calls and prints. It does not count or measure by itself.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from regard.cli.language import Lang, Say, speaker
from regard.cli.terminal import Terminal

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from regard.costs import Sizes
    from regard.efficient.counted_growth import Growth
    from regard.efficient.measured_growth import Measured

__all__ = ["Asked", "compare"]

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


def compare(sizes: Sizes, asked: Asked, *, json_: bool, lang: Lang) -> None:
    """Count, and measure and draw where asked, and print it all as text or JSON.

    sizes: what `regard cost` was asked for; lengths double up to its n.

    Raises ValueError for a size too small, for a figure that cannot be written, and for --device or --seconds without
    --measure.
    """
    from regard.cli import picture_files
    from regard.efficient.counted_growth import growth, lengths_up_to

    picture_files.check_place(asked.figure)
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
        picture_files.write(_figure(counted, results, lang), asked.figure)
    if json_:
        from regard.efficient.measured_growth import as_dicts

        print(json.dumps(counted.as_dict() | ({"measured": as_dicts(results)} if asked.measure else {})))
    else:
        _print(counted, results, asked, lang)


def _measured(counted: Growth, asked: Asked, say: Say) -> list[Measured]:
    """Every result, with a progress bar on a terminal. Ctrl-C leaves by the exception it is."""
    from regard.cli.model_files import bar
    from regard.efficient.counted_growth import WAYS
    from regard.efficient.measured_growth import measure

    seconds = SECONDS if asked.seconds is None else asked.seconds
    results: list[Measured] = []
    with bar(say("measuring", "측정 중")) as tick:
        for result in measure(counted, device=asked.device or "cpu", seconds=seconds):
            results.append(result)
            tick(len(results), len(counted.lengths) * len(WAYS))
    return results


def _figure(counted: Growth, results: list[Measured], lang: Lang) -> Figure:
    from regard.efficient.counted_growth import WAYS, words_in
    from regard.lens.pictures.growth_curves import Curves, growth_curves

    words, lengths = words_in(lang), counted.lengths
    flops = {words[w]: [float(counted.counts[w][n].flops) for n in lengths] for w in WAYS}
    held = {words[w]: [float(counted.counts[w][n].bytes) for n in lengths] for w in WAYS}
    panels = [Curves(words["flops"], "FLOP", flops), Curves(words["bytes_short"], "B", held)]
    if results:
        times = {words[w]: [m.seconds for m in results if m.way == w] for w in WAYS}
        memory = {words[w]: [None if m.bytes is None else float(m.bytes) for m in results if m.way == w] for w in WAYS}
        panels += [Curves(words["seconds"], "s", times), Curves(words["memory"], "B", memory)]
    return growth_curves(lengths, panels)


def _print(counted: Growth, results: list[Measured], asked: Asked, lang: Lang) -> None:
    say, out = speaker(lang), Terminal()
    sizes, *rest = counted.text(lang).split("\n")
    out.print((sizes, "bold"))
    out.print("\n".join(rest[:-1]))
    out.print()
    if results:
        from regard.efficient.measured_growth import measured_text

        out.print(measured_text(counted.lengths, results, lang))
        out.print()
    out.print((rest[-1], "dim"))
    if asked.figure is not None:
        out.print(say(f"figure: {asked.figure}", f"그림: {asked.figure}"))
