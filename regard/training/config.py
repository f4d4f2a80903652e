"""`TrainConfig`: batch sizes, optimizer, schedule and parallelism of a run."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

from regard.checks import check_int

Schedule = Literal["cosine", "linear", "inverse-sqrt", "constant"]
Precision = Literal["fp32", "bf16"]

BOOKKEEPING = (
    "save_every", "eval_every", "log_every", "keep", "compile", "recompute", "num_workers", "monitor_every",
    "tensorboard",
)  # fmt: skip
"""Fields that may differ when a run is resumed: they change no number of it beyond rounding."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How to train. `batch_size` counts the rows of one optimizer step over all processes.

    >>> config = TrainConfig(steps=100, learning_rate=1e-3, warmup=10)
    >>> [round(config.learning_rate_at(step), 6) for step in (0, 9, 99)]
    [0.0001, 0.001, 0.0001]

    Args:
        steps: number of optimizer steps.
        batch_size: rows of one optimizer step, over all processes and micro-batches.
        accumulate: micro-batches of one step, one after another; needs less memory and changes nothing else.
        learning_rate: the highest one.
        schedule: after the warm-up: "cosine" or "linear" down to `final_ratio`, "inverse-sqrt" (2017), "constant".
        warmup: steps in which the learning rate rises linearly.
        final_ratio: last learning rate ÷ highest, of "cosine" and "linear".
        weight_decay: of matrices and embeddings; biases and norms have none.
        betas: of AdamW.
        eps: of AdamW.
        clip: largest norm of the gradient; 0 for no clipping.
        precision: "fp32", or "bf16" for autocast with fp32 weights.
        ema: decay of an exponential moving average of the weights, which is then what is saved; None for none.
        seed: of data order, masking and dropout.
        eval_every: steps between evaluations, and one at the end; 0 for the end only.
        save_every: steps between checkpoints, and one at the end; 0 for the end only.
        log_every: steps between lines of log.jsonl.
        keep: number of checkpoints to keep.
        shard: shard weights, gradients and optimizer state over the processes (FSDP2).
        tensor_parallel: number of processes that share each matrix.
        recompute: recompute each block's activations in the backward pass, for less memory.
        compile: torch.compile each block; "reduce-overhead" compiles the whole model into CUDA graphs, which is faster
            where a step is bound by its launches (small models, batches of one shape).
        num_workers: processes that make batches; 0 for a thread. Images with augmentation need some on a GPU.
        monitor_every: steps between looks at the attention of a held-out row (`regard.monitor`); 0 for none.
        tensorboard: also write TensorBoard files, to the run's tensorboard/.
    """

    steps: int = 1000
    batch_size: int = 16
    accumulate: int = 1
    learning_rate: float = 3e-4
    schedule: Schedule = "cosine"
    warmup: int = 0
    final_ratio: float = 0.1
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.99)
    eps: float = 1e-8
    clip: float = 1.0
    precision: Precision = "fp32"
    ema: float | None = None
    seed: int = 0
    eval_every: int = 0
    save_every: int = 0
    log_every: int = 10
    keep: int = 2
    shard: bool = False
    tensor_parallel: int = 1
    recompute: bool = False
    compile: bool | Literal["reduce-overhead"] = False
    num_workers: int = 0
    monitor_every: int = 0
    tensorboard: bool = False

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "accumulate", "log_every", "keep", "tensor_parallel"):
            check_int(name, getattr(self, name), 1)
        for name in ("warmup", "seed", "eval_every", "save_every", "num_workers", "monitor_every"):
            check_int(name, getattr(self, name), 0)
        for name in ("learning_rate", "eps"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)!r}")
        for name in ("weight_decay", "clip"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)!r}")
        for name in ("final_ratio", *(("ema",) if self.ema is not None else ())):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be in [0, 1], got {getattr(self, name)!r}")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be two numbers in [0, 1), got {self.betas!r}")
        for name, known in (("schedule", Schedule), ("precision", Precision)):
            if getattr(self, name) not in get_args(known):
                raise ValueError(f"{name} must be one of {', '.join(get_args(known))}; got {getattr(self, name)!r}")
        if self.compile not in (False, True, "reduce-overhead"):
            raise ValueError(f"compile must be True, False or 'reduce-overhead', got {self.compile!r}")
        if self.batch_size % self.accumulate:
            raise ValueError(f"batch_size {self.batch_size} cannot be split into {self.accumulate} equal micro-batches")
        if self.warmup > self.steps:
            raise ValueError(f"warmup of {self.warmup} steps is longer than the run of {self.steps}")
        if self.schedule == "inverse-sqrt" and not self.warmup:
            raise ValueError("schedule 'inverse-sqrt' needs warmup steps: it falls from the end of the warm-up")

    @classmethod
    def from_options(cls, config: TrainConfig | None, options: dict[str, Any]) -> TrainConfig:
        """`config`, or the default, with the options in place of its fields. Raises TypeError for an unknown one."""
        names = [field.name for field in dataclasses.fields(cls)]
        unknown = [name for name in options if name not in names]
        if unknown:
            raise TypeError(f"train() has no option {', '.join(unknown)}; options are {', '.join(names)}")
        return dataclasses.replace(config or cls(), **options)

    def learning_rate_at(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        if self.schedule == "inverse-sqrt":
            return self.learning_rate * math.sqrt(self.warmup / (step + 1))
        if self.schedule == "constant":
            return self.learning_rate
        progress = (step + 1 - self.warmup) / max(1, self.steps - self.warmup)  # 1 at the last step
        fall = (1 + math.cos(math.pi * progress)) / 2 if self.schedule == "cosine" else 1 - progress
        return self.learning_rate * (self.final_ratio + (1 - self.final_ratio) * fall)
