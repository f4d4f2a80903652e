"""`regard.monitor`: the attention of one held-out batch while a model trains, in any training loop."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard.lens.capture import Capture
from regard.lens.watch import watch

__all__ = ["Alarm", "Monitor", "monitor"]

MEASURES = ("entropy", "first_token", "max_logit", "output_norm")
ENTROPY_FLOOR = 0.05
LOGIT_CEILING = 50.0
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
        ImportError: tensorboard is asked for and not installed.
    """
    if every < 1 or not 0 <= entropy_floor <= 1 or (tensorboard and out is None):
        raise ValueError(
            f"every must be 1 or more, entropy_floor in [0, 1], and tensorboard needs out=; got every={every}, "
            f"entropy_floor={entropy_floor}, out={out}"
        )
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

    def step(self, step: int) -> list[Alarm]:
        """Call after each optimizer step: looks if it is time, and returns new alarms, which also warn."""
        return self.look(step) if step % self.every == 0 else []

    def look(self, step: int) -> list[Alarm]:
        """Look now: record the measures, and raise alarms."""
        with unchanged(self.model), watch(self.model, keep="output", tokens=self.tokens) as seen:
            self.model(**self.batch)
        record: dict[str, Any] = {"step": step, "layers": list(seen.names)} | {name: [] for name in MEASURES}
        for name in seen.names:
            for measure, values in head_measures(seen, name).items():
                record[measure].append([round(float(value), 6) for value in values])
        self.records.append(record)
        alarms = self._raise_alarms(step, record, seen)
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

    def _raise_alarms(self, step: int, record: dict[str, Any], seen: Capture) -> list[Alarm]:
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
            seen.save(path)
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


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients, in eager mode; afterwards modes and random generators are as before."""
    modes = {module: module.training for module in model.modules()}
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices), torch.no_grad(), torch.compiler.set_stance("force_eager"):
        model.eval()
        try:
            yield
        finally:
            for module, training in modes.items():
                module.training = training
