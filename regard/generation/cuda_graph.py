"""A decoding step as a CUDA graph: captured at the first step of a generation, replayed at every other.

Launching some two hundred kernels from Python takes longer than a GPU needs to run them; a graph launches them at once.
Nothing is captured on other devices, without triton, for models that the kernels do not support, with padding that is
not on the left, under autocast, which the kernels do not follow, or under `watch`, since a replay calls no observer.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from regard.devices import current, no_triton
from regard.generation import cuda_step
from regard.nn.attention import FixedCache
from regard.nn.blocks import LanguageHead, Tower
from regard.op import observed

if TYPE_CHECKING:
    from regard.models.text import ModelState


def can_capture(tower: Tower, head: object, state: ModelState, dtype: torch.dtype) -> bool:
    """True if the next steps of this state can be captured."""
    place = tower.embed.tokens.weight.device
    if place.type != "cuda" or no_triton() is not None:
        return False
    if needs_eager_step() or torch.is_grad_enabled() or state.memory is not None:
        return False
    if not isinstance(head, LanguageHead) or cuda_step.unsupported_reason(tower, head, dtype) is not None:
        return False
    keys, _ = cast(FixedCache, state.caches[0]).room  # of another dtype where autocast was on for the prompt alone
    return keys.dtype == dtype and state.padded_left


def needs_eager_step() -> bool:
    """True if a replay would miss something: an observer, or autocast."""
    return observed() or torch.is_autocast_enabled("cuda")


_RAN: WeakKeyDictionary[Tower, WeakKeyDictionary[LanguageHead, set[object]]] = WeakKeyDictionary()
"""The forms of step that each tower and head have run: their kernels are compiled and loaded, which must not happen
during a capture."""

_THREAD = threading.local()


class GraphMemory:
    """Memory for the temporaries of captured steps that run on one stream, one after another.

    A graph that is captured here uses again what the ones before it used, so that generating does not take more memory
    each time. The latest graph is kept: without any graph, torch would give its memory up.
    """

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.latest: torch.cuda.CUDAGraph | None = None

    @classmethod
    def of(cls, tower: Tower) -> GraphMemory:
        """That of this model, this thread and the current stream."""
        models: WeakKeyDictionary[Tower, dict[torch.cuda.Stream, GraphMemory]]
        models = vars(_THREAD).setdefault("models", WeakKeyDictionary())
        streams = models.setdefault(tower, {})
        current_stream = torch.cuda.current_stream()
        if current_stream not in streams:
            streams[current_stream] = cls()
        return streams[current_stream]

    def capture(
        self, tower: Tower, head: LanguageHead, buffers: cuda_step.StepBuffers
    ) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """The graph of a step, and the logits that it fills. `stream` must be the current one.

        torch's own context, `torch.cuda.graph`, first waits for the device and gives back all memory that is kept. Here
        the prompt may still be on its way, and the next prompt wants that memory again.
        """
        graph = torch.cuda.CUDAGraph()
        pool = None if self.latest is None else self.latest.pool()
        graph.capture_begin(pool, capture_error_mode="thread_local")  # other threads may use the GPU
        try:
            logits = cuda_step.step(tower, head, buffers)
        finally:
            graph.capture_end()
        self.latest = graph
        return graph, logits


class CapturedStep:
    """The captured step of one state."""

    def __init__(self, tower: Tower, head: LanguageHead, state: ModelState) -> None:
        self.buffers = cuda_step.StepBuffers.of(state, tower.rotary)
        self.device, self.at = self.buffers.at.device, len(state)
        with current(self.device):
            self.stream, self.thread = torch.cuda.current_stream(), threading.get_ident()
            self.graph, self.logits = self._captured(tower, head)

    def _captured(self, tower: Tower, head: LanguageHead) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        at, form = self.buffers.at.clone(), self.buffers.form
        ran = _RAN.setdefault(tower, WeakKeyDictionary()).setdefault(head, set())
        memory = GraphMemory.of(tower)
        memory.stream.wait_stream(self.stream)
        with torch.cuda.stream(memory.stream):
            if form not in ran:  # what it writes is written again by the first replay
                cuda_step.step(tower, head, self.buffers)
                ran.add(form)
            graph, logits = memory.capture(tower, head, self.buffers)
        self.stream.wait_stream(memory.stream)
        self.buffers.at.copy_(at)
        return graph, logits

    def fits(self, state: ModelState) -> bool:
        """True if the state's caches are where they were captured, and stream and thread are those of the capture."""
        # Temporaries are shared with other graphs of this stream and thread.
        if torch.cuda.current_stream(self.device) != self.stream or threading.get_ident() != self.thread:
            return False
        cache = cast(FixedCache, state.caches[0])  # what `cuda_step` supports keeps keys and values
        return self.buffers.keys[0].data_ptr() == cache.room[0].data_ptr()

    def keep(self, rows: Tensor) -> None:
        """Row i becomes the old row rows[i]; with another number of rows the graph no longer fits."""
        if len(rows) == len(self.buffers.start):
            self.buffers.start.copy_(self.buffers.start[rows])

    def step(self, tokens: Tensor, at: int) -> Tensor:
        """tokens (B,) at this position → logits (B, V), which the next step overwrites."""
        self.buffers.tokens.copy_(tokens)
        if at != self.at:  # others were read uncaptured in between, or taken back
            self.buffers.at.fill_(at)
        self.at = at + 1
        with current(self.device):
            self.graph.replay()
        return self.logits
