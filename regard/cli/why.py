"""What links do: their effects, measured by knocking them out, as `regard look` and `regard effect` print them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Literal

from regard.cli.outputs import bar
from regard.session.labels import shown

if TYPE_CHECKING:
    from torch import Tensor

    from regard.edits.metrics import Metric
    from regard.models.outputs import ModelOutput
    from regard.session.heads import RankedLink
    from regard.session.session import Session

# A run of the model takes about 2 operations for each parameter and token, and a link one run. On two cores of a CPU
# 2·10¹¹ operations take about 2 s: 8 links of 500 tokens in MiniLM, or of 90 tokens in GPT-2.
OPERATIONS = 2 * 10**11
LONGEST = 1024  # tokens; beyond them the scores, which the estimate leaves out, weigh in too

Why = Literal["measured", "off", "cost", "capture", "links", "model"]
"""Whether effects were measured, or why not: --no-why; it would take long; a capture has no model to run; there are no
links; this model's attention cannot be edited."""


@dataclass(frozen=True)
class LinkEffects:
    """The effects of links: None where they were not measured, or are not finite.

    reason: why this model's attention cannot be edited.
    """

    why: Why
    values: list[float | None]
    reason: str = ""


def read_session_ids(session: Session) -> Tensor:
    """The token ids of a session's text, (1, N), cut where the session was."""
    assert session.model is not None
    tokenizer, text, count = session.model.tokenizer, session.text or "", len(session.tokens)
    ids = tokenizer.batch([text]).input_ids
    return ids if ids.shape[1] == count else tokenizer.batch([text], length=count, truncate=True).input_ids


def moved_metric(name: str, at: Sequence[int]) -> Metric:
    """How far the vectors of tokens move in the last hidden state, of the encoder where there is one."""
    from regard.edits import metrics

    distance = metrics.moved(0)

    def vector(output: ModelOutput) -> Tensor:
        hidden = output.encoder_last_hidden_state
        hidden = output.last_hidden_state if hidden is None else hidden
        return hidden[:, list(at)].flatten(1)[:, None]  # (1, 1, pieces · d)

    return metrics.Metric(name, lambda new, old: distance.function(vector(new), vector(old)), relative=True)


def check_single_runs(session: Session) -> None:
    """Raise ValueError if a module runs several times in one pass, as in ALBERT: an edit would change every run."""
    assert session.model is not None
    repeated = [layer.path for layer in session.layers if layer.call is not None]
    if repeated:
        raise ValueError(
            f"{session.model.family.title} runs {repeated[0]!r} several times in one pass, and an edit would change "
            "every run: effects need a model whose layers run once"
        )


def operations(session: Session, links: int) -> int:
    """About how many operations the effects of so many links take; see OPERATIONS."""
    assert session.model is not None
    parameters = sum(parameter.numel() for parameter in session.model.parameters())
    return 2 * parameters * len(session.tokens) * (links + 1)


def measure_links(session: Session, links: Sequence[RankedLink], wanted: bool | None) -> LinkEffects:
    """Knock out each link in its head, and measure how far the vector of its query moves, as a share of its length.

    The capture of the session keeps the effects, and one from a file gives back those that it has.

    Args:
        session: with the model that read the text.
        links: of the session.
        wanted: True measures, however long it takes; False does not; None does where it is quick.

    Raises:
        ValueError, LookupError: if they are wanted, and the model's attention cannot be edited.
    """
    nothing: list[float | None] = [None] * len(links)
    if wanted is False:
        return LinkEffects("off", nothing)
    if session.model is None:
        kept = session.effects.links
        stored = [kept[at]["effect"] if (at := _place(link)) in kept else None for link in links]
        return LinkEffects("capture" if stored == nothing else "measured", stored)
    if not links:
        return LinkEffects("links", nothing)
    if wanted is None and (len(session.tokens) > LONGEST or operations(session, len(links)) > OPERATIONS):
        return LinkEffects("cost", nothing)
    try:
        return LinkEffects("measured", _measure(session, links))
    except (LookupError, ValueError) as problem:
        if wanted:
            raise
        return LinkEffects("model", nothing, str(problem))


def _place(link: RankedLink) -> tuple[int, int, int, int]:
    return link.layer, link.head, link.query, link.key


def _measure(session: Session, links: Sequence[RankedLink]) -> list[float | None]:
    import torch

    from regard.edits.editing import edit
    from regard.edits.values import knock_out
    from regard.lens.edit_records import Effect
    from regard.session.session import MOVED, read_ids

    model, values = session.model, list[float | None]()
    assert model is not None
    check_single_runs(session)
    ids = read_session_ids(session)
    with torch.no_grad(), bar(session.name) as tick:
        plain = read_ids(model, ids)
        for n, link in enumerate(links):
            single = knock_out(*_place(link))
            metric = moved_metric(f"{MOVED}“{shown(session.tokens[link.query])}”", [link.query])  # a capture's English
            with edit(model, single):
                value = float(metric.function(read_ids(model, ids), plain))
            values.append(value if isfinite(value) else None)
            if isfinite(value):
                found = Effect(single, metric.name, 0.0, value, link.weight)
                session.effects.add(_place(link), found)
                session.capture.add_effect(found)
            tick(n + 1, len(links))
    return values
