"""`regard.monitor`: the attention of one held-out batch while a model trains, in any training loop."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from math import inf, log
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from regard.backends.call import Call, cells_of_bias, cells_of_mask
from regard.lens.capture import Capture
from regard.lens.measures import engines
from regard.lens.measures.measures import MeasureOptions
from regard.lens.measures.weights import LARGE, ComputedWeights, grouped_scores
from regard.lens.patterns import Positions
from regard.lens.taps.calls import ObservedCall, measuring, original_path, raise_rows
from regard.lens.taps.functions import names_left_alone
from regard.lens.taps.installation import Taps
from regard.lens.visibility import summarise_mask
from regard.lens.watch import COMPILED_CALL, watch
from regard.masks import DenseMask, Mask
from regard.masks.biases import DenseBias
from regard.masks.mask import And
from regard.op import observe, unobserve

MEASURES = ("entropy", "first_token", "max_logit", "output_norm")
ENTROPY_FLOOR = 0.05
LOGIT_CEILING = 50.0
AT_ONCE = 1 << 24  # scores of one call that are computed as a whole, 64 MiB in fp32; more go through the tiled engines
MONITOR_LOG, TENSORBOARD = "monitor.jsonl", "tensorboard"


@dataclass(frozen=True)
class Alarm:
    """A head whose attention collapsed: nearly all weight of each query is on one key, and the logits are large.

    Args:
        step: when it was seen.
        layer: the module's path.
        head: its number.
        entropy: mean entropy ÷ log(number of visible keys): 1 is uniform, 0 is one key.
        max_logit: the largest score.
        capture: file of the capture, which `regard.open` and `regard look` open; None if nothing is written.
    """

    step: int
    layer: str
    head: int
    entropy: float
    max_logit: float
    capture: str | None = None


def monitor(
    model: nn.Module,
    batch: Mapping[str, Any],
    *,
    every: int,
    out: str | Path | None = None,
    tokens: object = None,
    entropy_floor: float = ENTROPY_FLOOR,
    logit_ceiling: float = LOGIT_CEILING,
    tensorboard: bool = False,
) -> Monitor:
    """Watch the attention of one fixed batch every so many steps of a training loop, without changing a bit of it.

    >>> import regard, torch
    >>> model = regard.build("gpt2", n_embd=8, n_head=2, n_layer=1, n_positions=16, vocab_size=13)
    >>> watching = regard.monitor(model, {"input_ids": torch.arange(8)[None]}, every=2)
    >>> for step in range(1, 5):
    ...     _ = watching.step(step)          # after optimizer.step()
    >>> [record["step"] for record in watching.records], watching.alarms
    ([2, 4], [])

    Per head: entropy ÷ log(visible keys), share of the first token, largest logit and mean norm of the output. A head
    raises an alarm where its entropy is below `entropy_floor` and its largest logit above `logit_ceiling`. A sharp
    head, such as one that looks at the previous token, has low entropy with moderate logits; in a run that is about to
    diverge the logits grow without limit (Zhai et al. 2023).

    Args:
        model: any PyTorch model that `regard.watch` sees; inside DDP, its module.
        batch: keyword arguments of the model, on its device: a held-out batch, best of one row.
        every: steps between two looks.
        out: directory for monitor.jsonl and the captures of alarms; None writes nothing.
        tokens: labels of the batch's tokens, as for `watch`; the captures show them.
        entropy_floor: see above, in [0, 1].
        logit_ceiling: see above.
        tensorboard: also write TensorBoard files, to tensorboard/attention in `out`.

    Returns:
        A `Monitor`: call its `step` after each optimizer step.

    Raises:
        ValueError: an option is out of range.
        TypeError: the model or the tokens have the wrong type.
        ImportError: tensorboard is asked for and not installed.
    """
    if every < 1 or not 0 <= entropy_floor <= 1 or (tensorboard and out is None):
        raise ValueError(
            f"every must be 1 or more, entropy_floor in [0, 1], and tensorboard needs out=; got every={every}, "
            f"entropy_floor={entropy_floor}, out={out}"
        )
    watch(model, tokens=tokens)  # raises for what `watch` does not take; nothing is installed before it is entered
    watching = Monitor(model, batch, every, None if out is None else Path(out), (entropy_floor, logit_ceiling))
    watching.tokens = tokens
    if tensorboard:
        watching.writer = import_tensorboard()(str(Path(str(out), TENSORBOARD, "attention")))
    return watching


class Monitor:
    """What `regard.monitor` returns.

    records: one dict per look: step, layers, and per measure a list (layers) of lists (heads).
    alarms: those raised so far, each head once until it recovers.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Mapping[str, Any],
        every: int,
        out: Path | None,
        limits: tuple[float, float],
    ) -> None:
        self.model, self.batch, self.every, self.out = model, dict(batch), every, out
        self.entropy_floor, self.logit_ceiling = limits
        self.tokens: object = None
        self.records: list[dict[str, Any]] = []
        self.alarms: list[Alarm] = []
        self._alarmed: set[tuple[str, int]] = set()
        self.writer: Any = None  # of TensorBoard
        self._known: KnownCalls | None = None  # of the last look that had to search for them
        self._double = False  # logits were so large in the last look that they need fp64

    def step(self, step: int) -> list[Alarm]:
        """Call after each optimizer step: looks if it is time, and returns new alarms, which also warn."""
        return self.look(step) if step % self.every == 0 else []

    def look(self, step: int) -> list[Alarm]:
        """Look now: record the measures, and raise alarms."""
        layers, values = self._measure()
        record: dict[str, Any] = {"step": step, "layers": layers}
        for measure, per_layer in zip(MEASURES, values, strict=True):
            record[measure] = [[round(value, 6) for value in heads] for heads in per_layer]
        self.records.append(record)
        alarms = self._raise_alarms(step, record)
        if self.out is not None:
            self.out.mkdir(parents=True, exist_ok=True)
            with (self.out / MONITOR_LOG).open("a", encoding="utf-8") as file:
                file.write(json.dumps(record | {"alarms": [asdict(alarm) for alarm in alarms]}) + "\n")
        if self.writer is not None:
            for measure in MEASURES:
                for layer, values in zip(record["layers"], record[measure], strict=True):
                    for head, value in enumerate(values):
                        self.writer.add_scalar(f"{measure}/{layer}/{head}", value, step)
            self.writer.flush()
        return alarms

    def _measure(self) -> tuple[list[str], list[list[list[float]]]]:
        """The layers, and of each measure a list (layers) of lists (heads)."""
        modules, known = list(self.model.modules()), self._known
        with unchanged(self.model, modules):
            # 1. The way that the last look found to be enough, as long as it sees the same calls.
            seen = None
            if known is not None and known.modules == modules:
                seen = self._run(known)
                seen = seen if seen is not None and seen.calls == known.calls else None
            # 2. Otherwise every way there is, and remember the calls.
            if seen is None:
                seen = self._run(None)
                self._known = None if seen is None else KnownCalls.of(seen, self.model, modules)
        # 3. Weights that the model makes by hand, modules that are called several times: as `watch` reads them.
        if seen is None:
            capture = self._watched()
            per_layer = [torch.stack([*head_measures(capture, name).values()]).tolist() for name in capture.names]
            return capture.names, [[layer[n] for layer in per_layer] for n in range(len(MEASURES))]
        return seen.names, seen.values

    def _run(self, known: KnownCalls | None) -> CallMeasures | None:
        """One pass of the model, in fp64 if the logits are large; None if it makes calls that only `watch` reads."""
        seen = self._run_once(known, self._double)
        if seen.unusual:
            return None
        large = seen.read()
        if large and not self._double:  # in fp32 their weights would err by more than rounding: once more
            seen = self._run_once(known, True)
            seen.read()
        self._double = large
        return None if seen.unusual else seen

    def _run_once(self, known: KnownCalls | None, double: bool) -> CallMeasures:
        seen = CallMeasures(double)
        if known is not None and known.only_ours:

            def report(call: Call, backend: str, output: Any) -> None:
                path = innermost(sys._getframe(1), known.paths)
                if path is not None:
                    with measuring():
                        observed = ObservedCall(path=path, source="regard", kernel=backend, call=call, output=output)
                        seen.try_add(replace(observed, kind=known.kinds.get(path, "self")))

            observe(report)
            try:
                self.model(**self.batch)
            finally:
                unobserve(report)
            return seen
        named = known is None or known.by_name
        with nullcontext() if named else names_left_alone(), Taps(self.model, seen.try_add) as taps:
            self.model(**self.batch)
        seen.unusual = seen.unusual or bool(taps.errors)
        return seen

    def _watched(self) -> Capture:
        with unchanged(self.model), watch(self.model, keep="output", tokens=self.tokens) as seen:
            self.model(**self.batch)
        return seen

    def _raise_alarms(self, step: int, record: dict[str, Any]) -> list[Alarm]:
        collapsed = {
            (layer, head): (entropy, record["max_logit"][number][head])
            for number, layer in enumerate(record["layers"])
            for head, entropy in enumerate(record["entropy"][number])
            if not (entropy >= self.entropy_floor) and not (record["max_logit"][number][head] <= self.logit_ceiling)
        }
        new = [key for key in collapsed if key not in self._alarmed]
        self._alarmed = set(collapsed)
        if not new:
            return []
        path = None
        if self.out is not None:
            path = self.out / f"alarm-step-{step:08d}.regard"
            self.out.mkdir(parents=True, exist_ok=True)
            self._watched().save(path)
        alarms = [Alarm(step, *key, *collapsed[key], None if path is None else str(path)) for key in new]
        self.alarms += alarms
        first = alarms[0]
        more = f" and {len(alarms) - 1} more heads" if len(alarms) > 1 else ""
        warnings.warn(
            f"attention collapsed at step {step}: {first.layer} head {first.head}{more} (entropy {first.entropy:.3f} "
            f"of uniform, largest logit {first.max_logit:.0f}). Lower the learning rate or warm up longer"
            + (f". Capture: {path}" if path is not None else ""),
            stacklevel=4,
        )
        return alarms


def import_tensorboard() -> type[Any]:
    """TensorBoard's SummaryWriter. Raises ImportError if it is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError("TensorBoard files need tensorboard: pip install tensorboard") from error
    return SummaryWriter


def head_measures(seen: Capture, name: str) -> dict[str, Tensor]:
    """Each measure of one layer, (heads,), over batch rows and queries."""
    view = seen[name]
    output = view.output  # (B, H, N, D)
    return {
        "entropy": view.per_head("uniform").mean(0),
        "first_token": view.per_head("first").mean(0),
        "max_logit": view.max_logit.amax((0, 2)),
        "output_norm": output.float().norm(dim=-1).mean((0, 2)),
    }


# ------------------------------------------------------------------------------------------------- the calls of a look


@dataclass(frozen=True, eq=False)
class KnownCalls:
    """The calls seen with every tap installed, by which later looks take a cheaper way and check that it suffices."""

    modules: list[nn.Module]  # of the model then
    paths: dict[int, str]  # by the identity of those modules
    calls: list[tuple[str, int | None, str]]  # path, number in compiled code and source, in the order of the calls
    kinds: dict[str, Any]  # path → "self" or "cross"
    only_ours: bool  # every call is one of `regard.attention`, whose observers are enough
    by_name: bool  # some are of functions that are only seen by binding their names anew

    @classmethod
    def of(cls, seen: CallMeasures, model: nn.Module, modules: list[nn.Module]) -> KnownCalls:
        """Of a look with every tap."""
        sources = {source for _, _, source in seen.calls}
        paths = {id(module): original_path(name) for name, module in model.named_modules()}
        # A kernel's own lse, which only the taps give, is worth having where a call is measured by tiles.
        only_ours = sources == {"regard"} and not seen.tiled and all(order is None for _, order, _ in seen.calls)
        by_name = bool(sources & {"flex", "flash_attn"})
        return cls(modules, paths, seen.calls, seen.kinds, only_ours, by_name)


def innermost(frame: FrameType | None, paths: Mapping[int, str]) -> str | None:
    """The path of the innermost of some modules whose method runs; None if there is none."""
    while frame is not None:
        code = frame.f_code
        if code.co_argcount and code.co_varnames[0] == "self":
            path = paths.get(id(frame.f_locals.get("self")))
            if path is not None:
                return path
        frame = frame.f_back
    return None


@dataclass(frozen=True, eq=False)
class VisibleKeys:
    """The keys that the mask of a call leaves visible. Layers with the same mask share it."""

    holds: tuple[object, ...]  # what it was made from: while that lives, its memory is not given to others
    hidden: Tensor | None  # (B or 1, H or 1, Nq or 1, Nk or 1) True for a hidden key; None if no key is, or by tiles
    largest: Tensor  # (B or 1, H or 1, Nq) the largest possible entropy
    counts: Tensor  # likewise, whether a query counts for the entropy: it is no padding, and sees two keys or more
    first: Tensor  # (B or 1, 1, Nq) the first key that is no padding; −1 where there is none
    looks: Tensor  # (B or 1, H or 1, Nq) whether a query counts for the share of that key

    @classmethod
    def of(cls, call: Call, kind: str, *, tiled: bool) -> VisibleKeys:
        """Read the mask of a call, and what its bias hides."""
        place, device = summarise_mask(call, kind), call.device
        at = Positions(ComputedWeights(call, call.q[..., 0]), place, kind)  # only its sizes are read
        real, first = at.real.to(device), at.first().to(device)
        visible = place.visible if call.sinks is None else place.visible + 1  # a sink takes part in the entropy
        cells = None if tiled else cells_of_mask(call)
        return cls(
            (call.mask, call.bias),
            None if cells is None else ~cells,
            visible.clamp(min=2).to(call.wide).log(),
            real & (visible >= 2),
            first,
            real & (first >= 0),
        )


class CallMeasures:
    """The measures of one pass of a model, taken call by call, and read back from the device together."""

    def __init__(self, double: bool) -> None:
        self.double = double  # compute scores in fp64
        self.calls: list[tuple[str, int | None, str]] = []
        self.kinds: dict[str, Any] = {}
        self.names: list[str] = []
        self.values: list[list[list[float]]] = []  # measures, layers, heads
        self.unusual = False  # a call came that only `watch` reads
        self.tiled = False  # a call was too large to be computed as a whole
        self._rows: list[tuple[Tensor, VisibleKeys]] = []  # of each call: (4, B, H, Nq)
        self._limits: list[float] = []  # of each call: the largest |score| for which fp32 is enough
        self._visible: dict[object, VisibleKeys] = {}

    def try_add(self, observed: ObservedCall) -> None:
        """Measure a call now, because its tensors are the model's. The model never sees what goes wrong in it."""
        try:
            self._add(observed)
        except Exception:  # `watch` comes across the same, and says what it is
            self.unusual = True

    def _add(self, observed: ObservedCall) -> None:
        call, output = observed.call, observed.output
        if call is None or observed.trouble is not None:
            self.unusual = self.unusual or observed.weights is not None or observed.scores is not None
            return
        named = (observed.path, observed.order, observed.source)
        if output is None or output.shape[:3] != call.sizes[:3] or 0 in call.sizes or named in self.calls:
            self.unusual = True
            return
        batch, heads, nq, nk = call.sizes
        tiled = batch * heads * nq * nk > AT_ONCE
        key = (
            observed.kind,
            call.sizes,
            call.device,
            call.sinks is None,
            tiled,
            _mask_key(call.mask, nq, nk),
            _bias_key(call),
        )
        visible = self._visible.get(key)
        if visible is None:
            visible = self._visible[key] = VisibleKeys.of(call, observed.kind, tiled=tiled)
        raised, taken = raise_rows(call)
        if tiled:
            entropy, first, largest = _by_tiles(raised, observed.lse if taken is None else None, visible)
        else:
            entropy, first, largest = _as_a_whole(raised, visible, self.double)
        if taken is not None:
            largest = largest + taken
        norm = torch.linalg.vector_norm(output.detach(), dim=-1, dtype=torch.promote_types(output.dtype, torch.float32))
        self._rows.append((torch.stack([x.to(call.wide) for x in (entropy, first, largest, norm)]), visible))
        self.calls.append(named)
        self.kinds[observed.path] = observed.kind
        self.tiled = self.tiled or tiled
        self._limits.append(inf if tiled or call.wide == torch.float64 else LARGE - log(nk))

    def read(self) -> bool:
        """Set `names` and `values`, with one transfer from each device; return whether logits need fp64."""
        # 1. Means over queries and batch rows, of all layers with one mask at once: (layers, 5, H).
        groups: dict[object, list[int]] = {}
        for n, (rows, visible) in enumerate(self._rows):
            groups.setdefault((id(visible), rows.dtype), []).append(n)
        devices: dict[torch.device, list[tuple[list[int], Tensor]]] = {}
        for numbers in groups.values():
            visible = self._rows[numbers[0]][1]
            entropy, first, largest, norm = torch.stack([self._rows[n][0] for n in numbers], 1)  # (layers, B, H, Nq)
            size = torch.where(largest.isinf(), 0.0, largest.abs())
            table = torch.stack(
                [
                    _mean_over((entropy / visible.largest).clamp(max=1), visible.counts),
                    _mean_over(first, visible.looks),
                    largest.amax((1, 3)),
                    norm.mean((1, 3)),
                    size.amax((1, 3)),
                ],
                1,
            )
            devices.setdefault(table.device, []).append((numbers, table))
        # 2. To the host.
        layers: dict[int, list[list[float]]] = {}
        for tables in devices.values():
            flat = iter(torch.cat([table.reshape(-1) for _, table in tables]).tolist())
            for numbers, table in tables:
                for n in numbers:
                    layers[n] = [[next(flat) for _ in range(table.shape[2])] for _ in range(table.shape[1])]
        # 3. Names as `watch` gives them: calls of compiled code are numbered if there are several.
        several = {path for path, order, _ in self.calls if order}
        for path, order, _ in self.calls:
            self.names.append(f"{path}.{COMPILED_CALL}.{order}".removeprefix(".") if path in several else path)
        self.unusual = self.unusual or len(set(self.names)) < len(self.names)
        self.values = [[layers[n][m] for n in range(len(self.calls))] for m in range(len(MEASURES))]
        # As `ComputedWeights` does for a large |lse|, which is at most the largest |score| plus ln Nk.
        return any(size > limit for n, limit in enumerate(self._limits) for size in layers[n][4])


def _as_a_whole(call: Call, visible: VisibleKeys, double: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Entropy, weight of the first key and largest score of each query, (B, H, Nq), from all scores at once."""
    # Where torch rounds fp32 products to TF32, those in fp64 keep what fp32 has.
    coarse = call.q.is_cuda and call.wide == torch.float32 and torch.get_float32_matmul_precision() != "highest"
    wide = torch.float64 if double or (coarse and call.q.dtype == torch.float32) else call.wide
    s = grouped_scores(call.q.to(wide), call.k.to(wide)).mul_(call.scale)
    if call.softcap is not None:
        s = s.div_(call.softcap).tanh_().mul_(call.softcap)
    if (added := cells_of_bias(call)) is not None:
        s = s + added
    if visible.hidden is not None:
        s = s.masked_fill_(visible.hidden, -inf)
    largest, empty = s.amax(-1), None
    if (sinks := call.sinks) is not None:
        column = (sinks if sinks.ndim == 3 else sinks.view(-1, 1)).to(s).expand(s.shape[:3])
        s = torch.cat([s, column.unsqueeze(-1)], -1)
    else:
        empty = largest == -inf
    p = s.softmax(-1)
    keys = visible.first.clamp(min=0).expand(s.shape[:3]).unsqueeze(-1)
    first, entropy = p.gather(-1, keys).squeeze(-1), torch.special.entr(p).sum(-1)
    if empty is not None:  # a row that sees nothing
        entropy, first = entropy.masked_fill(empty, 0), first.masked_fill(empty, 0)
    return entropy, first, largest


def _by_tiles(call: Call, lse: Tensor | None, visible: VisibleKeys) -> tuple[Tensor, Tensor, Tensor]:
    """The same without N×N in memory."""
    measured, _ = engines.measure(
        call, engines.exact_lse(call, lse), MeasureOptions(frozenset(["entropy", "max_logit"]))
    )
    first = ComputedWeights(call, measured["lse"]).pairs(visible.first)
    return measured["entropy"], first, measured["max_logit"]


def _mean_over(values: Tensor, counted: Tensor) -> Tensor:
    """(layers, B, H, Nq) → (layers, H): over the queries that count, 0 where none does, and then over the batch."""
    total = torch.where(counted, values, 0).sum(-1) / counted.expand(values.shape[1:]).sum(-1).clamp(min=1)
    return total.clamp(0, 1).mean(1)


def _mask_key(mask: Mask | None, nq: int, nk: int) -> object:
    """Equal for masks of one pass that are certain to hide the same."""
    if isinstance(mask, And):
        return _mask_key(mask.left, nq, nk), _mask_key(mask.right, nq, nk)
    if isinstance(mask, DenseMask):
        return _tensor_key(mask.cells)
    return id(mask) if mask is None or (band := mask.band(nq, nk)) is None else band


def _bias_key(call: Call) -> object:
    return _tensor_key(call.bias.cells) if isinstance(call.bias, DenseBias) else call.bias is None


def _tensor_key(x: Tensor) -> object:
    if x.is_inference():  # does not tell whether it was written to
        return object()
    return x.data_ptr(), x.shape, x.stride(), x.dtype, x._version


@contextmanager
def unchanged(model: nn.Module, modules: list[nn.Module] | None = None) -> Iterator[None]:
    """Evaluation mode without gradients, in eager mode; afterwards modes and random generators are as before.

    modules: those of the model, if they are known already.
    """
    modules = list(model.modules()) if modules is None else modules
    modes = [module.training for module in modules]
    devices = sorted(
        {p.device.index or 0 for m in modules for p in m._parameters.values() if p is not None and p.is_cuda}
    )
    with torch.random.fork_rng(devices=devices), torch.no_grad(), torch.compiler.set_stance("force_eager"):
        try:
            if any(modes):
                model.eval()
            yield
        finally:
            for module, training in zip(modules, modes, strict=True):
                if module.training != training:
                    module.training = training
