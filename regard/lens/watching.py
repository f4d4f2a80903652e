"""`watch`: every attention call of somebody else's model, measured while it runs, with the kernel it already uses.

The taps report each call; here it is measured at once, and only small arrays stay. Nothing is placed on the model.

It does not know how calls are caught: `taps.py` does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from threading import Lock
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from regard.backends.call import Call
from regard.lens import engines, facts, streaming
from regard.lens.capture import Capture, Record
from regard.lens.measures import DEFAULT, MAP_SIZE, NAMES, TOP, Wanted, read_wanted
from regard.lens.sight import Sight, see
from regard.lens.sightings import Sighting
from regard.lens.taps import Taps
from regard.lens.view import Told, Tokens, View
from regard.lens.weights import Given, Remembered, Weights

__all__ = ["watch"]

KEEP = ("qk", "output")
DELIMITERS = frozenset("[SEP] [CLS] </s> <s> <|endoftext|> <|im_end|> <eos> <bos> . , ; : ! ? 。 、 ， ？ ！ ： ；".split())
LOOKS_LIKE_ATTENTION = re.compile(r"attention|attn|mha", re.IGNORECASE)


def watch(
    model: nn.Module,
    *,
    layers: object = None,
    measures: object = None,
    keep: object = None,
    size: int = MAP_SIZE,
    top: int = TOP,
    tokens: object = None,
    device: str | torch.device | None = None,
) -> Watching:
    """See every attention call that a model makes inside the block; the model computes the same bits as without.

    >>> import torch, regard
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    >>> with regard.watch(layer, keep="qk") as seen:
    ...     _ = layer(torch.zeros(1, 3, 8))
    >>> seen.names, seen[0].entropy.shape, seen["self_attn"].row(0)[0, 0]
    (['self_attn'], torch.Size([1, 2, 3]), tensor([0.3333, 0.3333, 0.3333]))

    model: any nn.Module. Seen are torch's SDPA, FlexAttention, nn.MultiheadAttention, flash_attn, regard's own
        operation, and softmaxes written out by hand, also in torch.compile'd code as far as it calls kernels; what was
        not seen is named in `capture.unseen`.
    layers: which modules: path patterns such as "*.3.*", or numbers in the order of first calls; default all.
    measures: names as for `look`, and "patterns"; default those of `look` with "patterns".
    keep: "qk" keeps what exact rows, tiles, other maps and links need, "output" each call's result; both as a list.
    size, top: of the map, and how many links per row, as for `look`.
    tokens: the words (or token numbers) of the input, (N,) or one row per batch row: labels, and for patterns by token.
    device: where measures and what is kept go, for example "cpu"; default where the model computed them.

    Raises TypeError or ValueError for an argument that is none of these. Looking never makes the model raise: an error
    in measuring is named in `capture.unseen`.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"watch takes a torch.nn.Module, got {type(model).__name__}")
    plan = _Plan(
        layers=_read_layers(layers),
        wanted=_read_measures(measures, size, top),
        patterns=measures is None or "patterns" in _names(measures),
        keep=_read_keep(keep),
        device=None if device is None else torch.device(device),
        words=_read_tokens(tokens),
    )
    return Watching(model, plan)


@dataclass(frozen=True)
class _Plan:
    """What to do with each call."""

    layers: tuple[str | int, ...] | None
    wanted: Wanted
    patterns: bool
    keep: frozenset[str]
    device: torch.device | None
    words: list[list[str]] | None


class Watching:
    """What `watch` returns: enter it with `with`, once; it yields a `Capture` that fills while the model runs."""

    def __init__(self, model: nn.Module, plan: _Plan) -> None:
        self.model, self.plan = model, plan
        inner = getattr(model, "_orig_mod", model)
        self.capture = Capture(type(inner).__name__, plan.words)
        self._taps = Taps(model, self._record)
        self._lock = Lock()
        self._order: list[str] = []

    def __enter__(self) -> Capture:
        self._taps.__enter__()
        return self.capture

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, where: TracebackType | None
    ) -> None:
        self._taps.__exit__(kind, problem, where)
        _name_unseen(self.capture, self.model, self._taps)

    def _record(self, sighting: Sighting) -> None:
        with self._lock:
            if sighting.path not in self._order:
                self._order.append(sighting.path)
            place = self._order.index(sighting.path)
        if not _wanted(sighting.path, place, self.plan.layers):
            return
        record = _measured(sighting, self.plan)
        with self._lock:
            record.n = sum(r.path == record.path and r.view is not None for r in self.capture.records)
            self.capture.records.append(record)


# ---------------------------------------------------------------------------------------------------------- one call


def _measured(sighting: Sighting, plan: _Plan) -> Record:
    """The record of one call: measured now, because its tensors are the model's and will not stay."""
    record = Record(sighting.path, 0, sighting.kind, sighting.source, sighting.kernel, sighting.compiled)
    if sighting.call is not None and sighting.trouble is None:
        _from_call(record, sighting, sighting.call, plan)
    elif sighting.weights is not None or sighting.scores is not None:
        _from_weights(record, sighting, plan)
    else:
        record.trouble = sighting.trouble or "the call could not be read"
    return record


def _from_call(record: Record, sighting: Sighting, call: Call, plan: _Plan) -> None:
    lse = streaming.lse_of(call) if sighting.lse is None else sighting.lse
    found, engine = engines.measure(call, lse, plan.wanted)
    sight = see(call, sighting.kind)
    record.facts = facts.read(call, sighting.output, lse, kind=sighting.kind, sight=sight)
    _finish(record, Remembered(call, lse), {"lse": lse, **found}, sight, sighting.output, plan, engine)
    if "qk" in plan.keep and record.view is not None:
        record.view.weights = Remembered(_kept_call(call, plan.device), _moved(lse, plan.device))


def _from_weights(record: Record, sighting: Sighting, plan: _Plan) -> None:
    scores, made = sighting.scores, sighting.weights
    if made is None:
        assert scores is not None
        made = scores.to(torch.promote_types(scores.dtype, torch.float32)).softmax(-1)
    weights = Given(made, scores)
    names = plan.wanted.names - ({"max_logit"} if scores is None else set())
    found = streaming.measure_given(weights, replace(plan.wanted, names=names))
    record.facts = facts.read_weights(scores, made, kind=sighting.kind)
    sight = Told(None, record.facts.padding, record.facts.offset)
    _finish(record, weights, found, sight, sighting.output, plan, "torch")
    if "qk" in plan.keep and record.view is not None:
        kept = None if scores is None else _moved(scores, plan.device)
        record.view.weights = Given(_moved(made, plan.device), kept)


def _finish(
    record: Record,
    weights: Weights,
    found: dict[str, Tensor],
    sight: Sight | Told,
    output: Tensor | None,
    plan: _Plan,
    engine: str,
) -> None:
    """Patterns, what the doctor wants to know, and the view."""
    place = Told(sight.visible, sight.padding, sight.offset)
    tokens = _tokens_for(plan.words, weights.sizes)
    view = View(weights.sizes, found, None, weights, record.kind, place, tokens, plan.wanted.size, engine=engine)
    if plan.patterns:
        view.held |= {f"pattern {name}": score for name, score in view.score_patterns().items()}
    record.heads = _heads(view, output)
    view.weights = None
    view.given_output = _moved(output, plan.device) if "output" in plan.keep and output is not None else None
    record.view = view if plan.device is None else view.moved(plan.device)


def _heads(view: View, output: Tensor | None) -> dict[str, Tensor]:
    """What the doctor wants to know of each head, (B, H)."""
    heads = {name: view.held[f"pattern {name}"] for name in ("uniform", "first") if f"pattern {name}" in view.held}
    if "received" in view.held and view.sizes[2] and view.sizes[3]:
        heads["one key"] = view.held["received"].amax(-1) / view.sizes[2]
    if output is not None and output.ndim == 4 and output.shape[:3] == view.sizes[:3] and view.sizes[2] > 1:
        wide = torch.promote_types(output.dtype, torch.float32)
        size = torch.linalg.vector_norm(output, dim=(2, 3), dtype=wide).square()
        common = output.sum(2, dtype=wide).square().sum(-1) / view.sizes[2]  # what is the same for all queries
        heads["spread"] = ((size - common).clamp(min=0) / size.clamp(min=torch.finfo(wide).tiny)).sqrt()
    return heads


def _kept_call(call: Call, device: torch.device | None) -> Call:
    """The call with q and k of its own: a slice of a larger tensor is copied, for a cache may be written over."""
    q, k = (_moved(_own(x), device) for x in (call.q, call.k))
    v = k.new_zeros(*k.shape[:3], 1)  # exact weights do not read the values
    sinks = None if call.sinks is None else _moved(call.sinks, device)
    return replace(call, q=q, k=k, v=v, sinks=sinks)


def _own(x: Tensor) -> Tensor:
    return x if x.untyped_storage().nbytes() <= x.numel() * x.element_size() else x.clone()


def _moved(x: Tensor, device: torch.device | None) -> Tensor:
    return x if device is None else x.to(device)


def _tokens_for(words: list[list[str]] | None, sizes: Sequence[int]) -> Tokens:
    """The tokens as the patterns read them, where there are as many as keys."""
    batch, _, _, nk = sizes
    if words is None or len(words) not in (1, batch) or any(len(row) != nk for row in words):
        return Tokens()
    number = {word: n for n, word in enumerate(sorted({w for row in words for w in row}))}
    ids = torch.tensor([[number[w] for w in row] for row in words])
    marks = torch.tensor([[w.lstrip("Ġ▁ ") in DELIMITERS for w in row] for row in words])
    return Tokens(ids, marks if bool(marks.any()) else None)


# ------------------------------------------------------------------------------------------------------ what was unseen


def _name_unseen(capture: Capture, model: nn.Module, taps: Taps) -> None:
    """Name what looks like attention and was not seen, with the reason as far as it is known."""
    for record in capture.records:
        if record.view is None:
            capture.unseen[record.path] = record.trouble or "the call could not be read"
    for path, problem in taps.errors:
        capture.unseen[path] = f"measuring it failed: {type(problem).__name__}: {problem}"
    for path, shape in taps.unconfirmed:
        capture.unseen.setdefault(path, f"a softmax of shape {tuple(shape)} that was not multiplied with values")
    seen = capture.names
    compiled = {r.path for r in capture.records if r.compiled}
    for path in _candidates(getattr(model, "_orig_mod", model)):
        inside = any(path == s or path.startswith(f"{s}.") or s.startswith(f"{path}.") for s in seen if s)
        if inside or "" in compiled or path in capture.unseen:
            continue
        if not any(_wanted(path, -1, (p,)) for p in [path]):
            continue
        capture.unseen[path] = "it did not run in the block, or makes its weights in a way that is not known here"


def _candidates(model: nn.Module) -> list[str]:
    """The innermost modules whose class is named like attention."""
    named = [path for path, m in model.named_modules() if LOOKS_LIKE_ATTENTION.search(type(m).__name__)]
    return [path for path in named if not any(other.startswith(f"{path}.") for other in named if path)]


def _wanted(path: str, place: int, layers: tuple[str | int, ...] | None) -> bool:
    if layers is None:
        return True
    return any(place == want if isinstance(want, int) else fnmatchcase(path, want) for want in layers)


# ------------------------------------------------------------------------------------------------------------ arguments


def _names(measures: object) -> list[Any]:
    if isinstance(measures, str):
        return [measures]
    if not isinstance(measures, Iterable):
        raise TypeError(f"measures must be names such as {', '.join(NAMES)}; got {type(measures).__name__}")
    return list(measures)


def _read_measures(measures: object, size: int, top: int) -> Wanted:
    names = DEFAULT if measures is None else [name for name in _names(measures) if name != "patterns"]
    wanted = read_wanted(names, size, top)
    if measures is not None and "patterns" in _names(measures):
        wanted = replace(wanted, names=wanted.names | {"entropy", "received"})  # patterns are read from these
    return wanted


def _read_layers(layers: object) -> tuple[str | int, ...] | None:
    if layers is None:
        return None
    given = (layers,) if isinstance(layers, (str, int)) else layers
    if not isinstance(given, Iterable):
        raise TypeError(f"layers must be path patterns or numbers, got {type(layers).__name__}")
    found = tuple(given)
    for want in found:
        if isinstance(want, bool) or not isinstance(want, (str, int)) or (isinstance(want, int) and want < 0):
            raise TypeError(f"layers must be path patterns such as '*.3.*' or numbers from 0, got {want!r}")
    if not found:
        raise ValueError("layers is empty: nothing would be seen; leave it out to see every layer")
    return found


def _read_keep(keep: object) -> frozenset[str]:
    given = () if keep is None else (keep,) if isinstance(keep, str) else keep
    if not isinstance(given, Iterable):
        raise TypeError(f"keep must be 'qk', 'output' or both in a list, got {type(keep).__name__}")
    found = frozenset(given)
    unknown = sorted(str(name) for name in found - set(KEEP))
    if unknown:
        raise ValueError(f"keep must be 'qk', 'output' or both in a list, got {unknown[0]!r}")
    return found


def _read_tokens(tokens: object) -> list[list[str]] | None:
    if tokens is None:
        return None
    if isinstance(tokens, Tensor):
        tokens = tokens.tolist()
    if isinstance(tokens, str) or not isinstance(tokens, Sequence) or len(tokens) == 0:
        raise TypeError("tokens must be words or token numbers: a list of them, or a list per batch row")
    nested = not isinstance(tokens[0], (str, int))
    rows = tokens if nested else [tokens]
    if not all(isinstance(row, Sequence) and all(isinstance(t, (str, int)) for t in row) for row in rows):
        raise TypeError("tokens must be words or token numbers: a list of them, or a list per batch row")
    return [[str(t) for t in row] for row in rows]
