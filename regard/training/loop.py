"""`regard.train`: the training loop, on one process or many."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast, get_args

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset

from regard.checks import local
from regard.data.rows import fingerprint
from regard.files import atomic_file, opened_run
from regard.locale import Lang, translate
from regard.models.model import Model
from regard.training.checkpoints import Checkpoints
from regard.training.config import BOOKKEEPING, TrainConfig
from regard.training.data import row_generator, row_numbers, step_seed
from regard.training.monitor import MONITOR_LOG, TENSORBOARD, import_tensorboard, monitor
from regard.training.parallel import Processes, full_model, wrap
from regard.training.recipes.recipe import Batch, Recipe

LOG, CHECKPOINTS, MODEL = "log.jsonl", "checkpoints", "model"
QUIET_SECONDS = 10  # between two lines where stderr is not a terminal


@dataclass(frozen=True)
class TrainResult:
    """The result of a run.

    Args:
        directory: of the run; its `model` opens with `regard.load`.
        steps: optimizer steps done, those before a resume included.
        loss: training loss of the last logged step, also of an earlier call.
        eval_loss: loss on the held-out data, or None without such data.
        metrics: what the model scores on the held-out data, by name; empty without such data.
        stopped: the run was interrupted before its last step; the same call resumes it.
    """

    directory: Path
    steps: int
    loss: float | None
    eval_loss: float | None
    metrics: dict[str, Any] = field(default_factory=dict)
    stopped: bool = False


def train(
    model: Model,
    recipe: Recipe,
    data: Any,
    *,
    out: str | Path,
    eval_data: Any = None,
    config: TrainConfig | None = None,
    progress: bool | Lang = True,
    **options: Any,
) -> TrainResult:
    """Train a model, with checkpoints; the same call resumes an interrupted run and ends in the same weights.

    >>> import tempfile, regard
    >>> model = regard.build("gpt2", n_embd=8, n_head=2, n_layer=1, n_positions=16, vocab_size=256)
    >>> recipe = regard.recipes.CausalLM(length=16)
    >>> with tempfile.TemporaryDirectory() as out:
    ...     result = regard.train(model, recipe, ["to be or not to be"], out=out, steps=2, batch_size=1, progress=False)
    ...     result.steps, regard.load(f"{out}/model").task
    (2, 'text-generation')

    The directory gets `run.json` (what the run is), `log.jsonl`, `checkpoints/` and, at the end, `model/`, a checkpoint
    that `regard.load` and `transformers` open. Under torchrun every process makes the same call.

    Args:
        model: from `regard.build` or `regard.load`; it is trained in place.
        recipe: the objective, of `regard.recipes`.
        data: what the recipe reads: a file, a directory or a list.
        out: directory of the run.
        eval_data: held-out data, as `data`.
        config: how to train; see `TrainConfig`.
        progress: print progress to stderr; "ko" in Korean.
        **options: fields of `TrainConfig`, over those of `config`.

    Returns:
        A `TrainResult`.

    Raises:
        FileExistsError: `out` holds another run, or files that are no run.
        FloatingPointError: the loss became NaN or infinite; the last good checkpoint stays.
        ValueError: data, recipe and model do not fit each other.
        BlockingIOError: another process trains in `out`.
        OSError: a checkpoint could not be written.
        ImportError: tensorboard is asked for and not installed.
    """
    # 1. Prepare: data, processes, the run's directory.
    if not isinstance(progress, bool) and progress not in get_args(Lang):
        raise ValueError(f"progress must be True, False, 'en' or 'ko', got {progress!r}")
    config = TrainConfig.from_options(config, options)
    out = Path(out)
    if config.tensorboard:
        import_tensorboard()  # before hours of training, not after
    processes = Processes.start(config, model.device)
    rows = recipe.rows(data, model, training=True)
    if not len(rows):
        raise ValueError("the data has no rows")
    eval_rows = None if eval_data is None else recipe.rows(eval_data, model, training=False)
    identity = run_identity(model, recipe, data, config)
    processes.check_same(identity, "the data or the options")
    with opened_run(out, identity) if processes.main else nullcontext():
        processes.barrier()
        return run_steps(model, recipe, rows, eval_rows, config, processes, out, progress)


def run_steps(
    model: Model,
    recipe: Recipe,
    rows: Sequence[Any],
    eval_rows: Sequence[Any] | None,
    config: TrainConfig,
    processes: Processes,
    out: Path,
    progress: bool | Lang,
) -> TrainResult:
    """Train on rows, in the directory of a run that is open."""
    # 2. Wrap the model and make the optimizer, then take up the newest checkpoint.
    model.to(processes.device).train()
    wrapped = wrap(model, config, processes)
    optimizer = make_optimizer(wrapped, config)
    average = Average(model, config.ema) if config.ema is not None else None
    checkpoints = Checkpoints(out / CHECKPOINTS, config.keep)
    start = load_checkpoint(checkpoints, wrapped, optimizer, average)
    if processes.main:
        for name in (LOG, MONITOR_LOG):
            cut_log(out / name, start)

    # 3. Train.
    writes = config.tensorboard and processes.main
    writer = import_tensorboard()(str(out / TENSORBOARD), purge_step=start + 1) if writes else None
    show = bool(progress) and processes.main
    lang = progress if isinstance(progress, str) else "en"
    log = Bookkeeper(out / LOG, writer, processes, steps=config.steps, start=start, show=show, lang=lang)
    run = Run(wrapped, recipe, optimizer, config, processes)
    watching = None
    if config.monitor_every:
        row = (rows if eval_rows is None else eval_rows)[0]
        batch = to_device(recipe.batch([row], [row_generator(config.seed, 0, 0)]), processes.device)
        main_out = out if processes.main else None
        watching = monitor(model, batch, every=config.monitor_every, out=main_out, tensorboard=writes)
    eval_loss, last_loss, step = None, None, start
    step_batches = StepBatches(rows, recipe, config, processes)
    with interruptible(processes, log) as stop, prefetched(step_batches, start, processes.device) as batches:
        for step in range(start + 1, config.steps + 1):
            run.step(step - 1, [to_device(batch, processes.device) for batch in next(batches)])
            if average is not None:
                average.update(first=step == 1)
            if watching is not None:
                watching.step(step)
            stopping = stop.asked  # read once: the signal may come in the middle of what follows
            ends = step == config.steps or stopping
            if ends or step % config.log_every == 0 or due(step, config.save_every) or due(step, config.eval_every):
                last_loss = log.log_step(step, run, rows)
            if ends or due(step, config.save_every):  # before the evaluation, which may take long
                checkpoints.save(step, training_state(wrapped, optimizer, average))
            if eval_rows is not None and (step == config.steps or due(step, config.eval_every)):
                with average.applied() if average is not None else nullcontext():
                    eval_loss = evaluate(wrapped, recipe, eval_rows, config, processes)
                log.log_eval(step, eval_loss)
            if stopping:
                break

    # 4. Write the model.
    log.close()
    if step < config.steps:
        return TrainResult(out, step, last_loss, eval_loss, stopped=True)
    metrics: dict[str, Any] = {}
    with average.applied() if average is not None else nullcontext():
        if eval_rows is not None and eval_loss is None:  # nothing was left to train
            eval_loss = evaluate(wrapped, recipe, eval_rows, config, processes)
        whole = full_model(model, processes)
        if processes.main:
            whole.save(out / MODEL)
            if eval_rows is not None and eval_loss is not None:
                metrics = recipe.metrics(whole.eval(), eval_rows, eval_loss)
        processes.barrier()
    model.eval()
    return TrainResult(out, step, logged_loss(out / LOG) if last_loss is None else last_loss, eval_loss, metrics)


def logged_loss(path: Path) -> float | None:
    """The last training loss in a log, or None if there is none."""
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []
    losses: list[float] = [line["loss"] for line in lines if "loss" in line]
    return losses[-1] if losses else None


def due(step: int, every: int) -> bool:
    """Is something that happens every so many steps (0: never) to happen now?"""
    return every > 0 and step % every == 0


# ----------------------------------------------------------------------------------------------------------- the steps


class Run:
    """One optimizer step after another; losses and the gradient's norm stay on the device until they are logged."""

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        optimizer: torch.optim.Optimizer,
        config: TrainConfig,
        processes: Processes,
    ) -> None:
        self.model, self.recipe, self.optimizer = model, recipe, optimizer
        self.config, self.processes = config, processes
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        zero = torch.zeros((), device=processes.device)
        self.loss, self.norm, self.rate = zero, zero, 0.0
        self.first_bad = torch.full((), -1, dtype=torch.long, device=processes.device)  # step of the first NaN
        self.tokens = 0

    def step(self, step: int, batches: Sequence[Batch]) -> None:
        """One optimizer step, counted from 0, on the micro-batches of this process."""
        config, processes = self.config, self.processes
        self.rate = config.learning_rate_at(step)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate
        # 1. Gradients of the sum of all losses.
        sums = torch.zeros(2, dtype=torch.float64, device=processes.device)  # loss, count
        for micro, batch in enumerate(batches):
            torch.manual_seed(step_seed(config.seed, step, processes.data_rank, micro))
            processes.synchronize(self.model, last=micro == len(batches) - 1)
            with torch.autocast(processes.device.type, torch.bfloat16, enabled=config.precision == "bf16"):
                total, count = self.recipe.loss(self.model, batch)
            torch.autograd.backward(total)
            sums += torch.stack([total.detach().double(), count.double()])
            self.tokens += batch_tokens(batch) * processes.data_size
        processes.sum(sums)
        count = sums[1].clamp(min=1)
        # 2. From a sum to a mean. Data parallelism has averaged the processes' sums.
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        parts = [local(gradient) for gradient in gradients]  # what this process holds of them
        multiply(parts, (processes.data_size / count).to(parts[0].dtype))
        norm = total_norm(gradients)
        if config.clip:
            multiply(parts, (config.clip / (norm + 1e-6)).clamp(max=1.0))
        # 3. Update.
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.loss, self.norm = sums[0] / count, norm
        bad = ~(torch.isfinite(self.loss) & torch.isfinite(norm)) & (self.first_bad < 0)
        self.first_bad = torch.where(bad, step, self.first_bad)


def multiply(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply tensors in place, in one kernel where torch has one."""
    together = getattr(torch, "_foreach_mul_", None)
    if together is not None:
        together(tensors, factor)
    else:
        for tensor in tensors:
            tensor.mul_(factor)


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The norm of all gradients together, whole ones and those split over processes."""
    split = [gradient for gradient in gradients if isinstance(gradient, DTensor)]
    whole = [gradient for gradient in gradients if not isinstance(gradient, DTensor)]
    norms = [torch.nn.utils.get_total_norm(part, foreach=True) for part in (split, whole) if part]
    whole_norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    return cast(Tensor, torch.linalg.vector_norm(torch.stack(whole_norms)))


@torch.no_grad()
def evaluate(model: nn.Module, recipe: Recipe, rows: Sequence[Any], config: TrainConfig, processes: Processes) -> float:
    """Mean loss over all held-out rows. Their random numbers are the same at every evaluation."""
    training = model.training
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=processes.device)
    size = max(1, config.batch_size // config.accumulate // processes.data_size)
    count = -(-len(rows) // size)
    for number in range(
        processes.data_rank, -(-count // processes.data_size) * processes.data_size, processes.data_size
    ):
        # Every process makes as many calls: sharded weights are gathered in them.
        chosen = range(number * size, min(len(rows), (number + 1) * size)) or range(1)
        rng = [row_generator(config.seed, 0, row) for row in chosen]
        batch = to_device(recipe.batch([rows[row] for row in chosen], rng), processes.device)
        with torch.autocast(processes.device.type, torch.bfloat16, enabled=config.precision == "bf16"):
            total, many = recipe.loss(model, batch)
        if number < count:
            sums += torch.stack([total.double(), many.double()])
    processes.sum(sums)
    model.train(training)
    return float(sums[0] / sums[1].clamp(min=1))


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """AdamW; matrices and embeddings decay, biases, norms and scales do not."""
    members: dict[tuple[bool, bool], list[Tensor]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:  # the fused kernel takes whole or split tensors, not both at once
            members.setdefault((parameter.ndim >= 2, isinstance(parameter, DTensor)), []).append(parameter)
    groups = [
        {"params": parameters, "weight_decay": config.weight_decay if decays else 0.0}
        for (decays, _), parameters in members.items()
    ]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, eps=config.eps, fused=True)


class Average:
    """An exponential moving average of a model's weights, which begins with those after the first step.

    The same as `torch.optim.swa_utils.AveragedModel`, but for weights that are split over processes too.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.parameters, self.decay = dict(model.named_parameters()), decay
        self.weights = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}

    @torch.no_grad()
    def update(self, *, first: bool) -> None:
        """Take in the weights after a step."""
        current = [parameter.detach() for parameter in self.parameters.values()]
        average = get_ema_multi_avg_fn(0.0 if first else self.decay)  # type: ignore[no-untyped-call]
        average(list(self.weights.values()), current, None)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The model has the averaged weights inside the block."""
        kept = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        try:
            self._set(self.weights)
            yield
        finally:
            self._set(kept)

    @torch.no_grad()
    def _set(self, weights: dict[str, Tensor]) -> None:
        for name, parameter in self.parameters.items():
            parameter.copy_(weights[name])


# ------------------------------------------------------------------------------------------------------------- batches


class StepBatches(Dataset[list[Batch]]):
    """The micro-batches of each step for this process. Rows depend on seed and step, not on how many share them."""

    def __init__(self, rows: Sequence[Any], recipe: Recipe, config: TrainConfig, processes: Processes) -> None:
        self.rows, self.recipe, self.config = rows, recipe, config
        self.rank, self.size = processes.data_rank, processes.data_size

    def __getitem__(self, step: int) -> list[Batch]:
        numbers, epochs = row_numbers(step, self.config.batch_size, len(self.rows), self.config.seed)
        share = self.config.batch_size // self.config.accumulate  # rows of one micro-batch, over all processes
        batches = []
        for first in range(0, self.config.batch_size, share):
            own = slice(first + self.rank, first + share, self.size)
            rows = [self.rows[int(number)] for number in numbers[own]]
            pairs = zip(epochs[own], numbers[own], strict=True)
            rng = [row_generator(self.config.seed, int(epoch), int(number)) for epoch, number in pairs]
            batches.append(self.recipe.batch(rows, rng))
        return batches


@contextmanager
def prefetched(batches: StepBatches, start: int, device: torch.device) -> Iterator[Iterator[list[Batch]]]:
    """The batches of each step from `start` on, made ahead by worker processes, or by a thread without any."""
    steps, workers, pinned = range(start, batches.config.steps), batches.config.num_workers, device.type == "cuda"
    if workers:
        options: dict[str, Any] = {"num_workers": workers, "prefetch_factor": 4, "worker_init_fn": ignore_signals}
        yield iter(DataLoader(batches, batch_size=None, sampler=steps, pin_memory=pinned, **options))
        return
    with ThreadPoolExecutor(1) as thread:

        def one_step_ahead() -> Iterator[list[Batch]]:
            future = thread.submit(batches.__getitem__, start)
            for step in steps:
                micro_batches = future.result()
                future = thread.submit(batches.__getitem__, step + 1)
                yield [
                    {name: tensor.pin_memory() if pinned else tensor for name, tensor in b.items()}
                    for b in micro_batches
                ]

        yield one_step_ahead()


def ignore_signals(worker: int) -> None:
    """Ctrl-C reaches every process of the terminal; the main one decides when to stop."""
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch on a device, without waiting for the copy."""
    return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}


def batch_tokens(batch: Batch) -> int:
    """How many positions a batch has; images where it has no tokens."""
    return batch["input_ids"].numel() if "input_ids" in batch else len(next(iter(batch.values())))


# ----------------------------------------------------------------------------------------------- the run's directory


def run_identity(model: Model, recipe: Recipe, data: Any, config: TrainConfig) -> dict[str, Any]:
    """What makes two runs the same run, by name."""
    options = {name: value for name, value in asdict(config).items() if name not in BOOKKEEPING}
    described = {f"recipe {name}": value for name, value in asdict(recipe).items()}  # type: ignore[call-overload]
    shape = {
        name: value for name, value in model.config.values.items() if name not in ("transformers_version", "dtype")
    }
    identity = {"recipe": recipe.name, **described, "data": fingerprint(data), **options, "model": shape}
    return json.loads(json.dumps(identity, default=str))  # type: ignore[no-any-return]


def cut_log(path: Path, step: int) -> None:
    """Remove the log's lines after a step: the run goes on from there, and writes them again."""
    if not path.is_file():
        return
    lines = path.read_text("utf-8").splitlines()
    kept = [line for line in lines if _logged_step(line) <= step]
    if len(kept) < len(lines):
        with atomic_file(path, "the log") as file:
            file.write("".join(line + "\n" for line in kept).encode())


def _logged_step(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):  # torn by a kill
        return math.inf


def training_state(model: nn.Module, optimizer: torch.optim.Optimizer, average: Average | None) -> dict[str, Any]:
    """Everything that a checkpoint holds beside its step."""
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments} | ({} if average is None else {"ema": average.weights})


def load_checkpoint(
    checkpoints: Checkpoints, model: nn.Module, optimizer: torch.optim.Optimizer, average: Average | None
) -> int:
    """Load the newest checkpoint; returns its step, or 0 without one."""
    if not checkpoints.steps():
        return 0
    state = training_state(model, optimizer, average)
    step = checkpoints.load(state)
    if step:
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return step


# ------------------------------------------------------------------------------------------------- log and interruption


class Bookkeeper:
    """The log, TensorBoard, and progress on stderr. Reading a loss from the device happens here only.

    writer: of TensorBoard, or None.  steps: of the whole run.  start: steps done before.  show: print anything at all.
    """

    def __init__(
        self, path: Path, writer: Any, processes: Processes, *, steps: int, start: int, show: bool, lang: Lang = "en"
    ) -> None:
        self.path, self.writer, self.processes = path, writer, processes
        self.steps, self.start, self.show, self.lang = steps, start, show, lang
        self.terminal = show and sys.stderr.isatty()
        self.began = self.last = time.perf_counter()
        self.tokens, self.printed = 0, float("-inf")
        if show and start:
            print(translate("resumed after step {step}", lang, step=start), file=sys.stderr)

    def log_step(self, step: int, run: Run, rows: Sequence[Any]) -> float:
        """Log a step: its loss.

        Raises FloatingPointError if this step's loss or an earlier one was not finite.
        """
        bad = int(run.first_bad)
        if bad >= 0:
            numbers, _ = row_numbers(bad, run.config.batch_size, len(rows), run.config.seed)
            raise FloatingPointError(
                f"the loss or gradient of step {bad + 1} is not finite. Its rows: {numbers.tolist()}. Checkpoints made "
                f"before stay. Try a smaller learning rate ({run.config.learning_rate} now) or a longer warm-up, in "
                "another directory"
            )
        loss, norm = float(run.loss), float(run.norm)
        now = time.perf_counter()
        speed = (run.tokens - self.tokens) / max(now - self.last, 1e-9)
        self.last, self.tokens = now, run.tokens
        line = {"step": step, "loss": loss, "learning_rate": run.rate, "grad_norm": norm}
        self._write(line | {"tokens_per_second": round(speed)})
        self._show(step, loss, run.rate, speed)
        return loss

    def log_eval(self, step: int, loss: float) -> None:
        """Log an evaluation."""
        self._write({"step": step, "eval_loss": loss})
        if self.show:  # on a line of its own
            text = translate("step {step}  held-out loss {loss}", self.lang, step=step, loss=f"{loss:.4f}")
            print(f"\r{text}\x1b[K" if self.terminal else text, file=sys.stderr, flush=True)
        self.last = time.perf_counter()

    def say_stopping(self) -> None:
        """Say what the first Ctrl-C does. From a signal handler, where print may be in the middle of another line."""
        if self.show:
            text = translate("finishing the step and saving; Ctrl-C again stops at once, unsaved", self.lang)
            with suppress(OSError, ValueError):
                os.write(sys.stderr.fileno(), f"\n{text}\n".encode(errors="replace"))

    def _write(self, line: dict[str, Any]) -> None:
        if self.processes.main:
            try:
                with self.path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
            except OSError as error:  # whose text has no name when a disk is full
                raise OSError(error.errno, f"cannot write the log: {error.strerror}", str(self.path)) from error
        if self.writer is not None:
            for name, value in line.items():
                if name != "step":
                    self.writer.add_scalar(name, value, line["step"])

    def close(self) -> None:
        """End the progress line and the TensorBoard file."""
        if self.terminal:
            print(file=sys.stderr)
        if self.writer is not None:
            self.writer.close()

    def _show(self, step: int, loss: float, rate: float, speed: float) -> None:
        now = time.perf_counter()
        if not self.show or (not self.terminal and step < self.steps and now - self.printed < QUIET_SECONDS):
            return
        self.printed = now
        left = int((now - self.began) / max(step - self.start, 1) * (self.steps - step))
        hours, minutes = divmod(left // 60, 60)
        clock = f"{hours}:{minutes:02d}:{left % 60:02d}" if hours else f"{minutes}:{left % 60:02d}"
        thousands = f"{speed / 1e6:.1f}M" if speed >= 1e6 else f"{speed / 1e3:.1f}k"
        tokens = thousands if speed >= 1e3 else f"{speed:.0f}"
        text = translate(
            "step {step}/{steps}  loss {loss}  lr {rate}  {tokens} tok/s  {clock} left", self.lang,
            step=step, steps=self.steps, loss=f"{loss:.4f}", rate=f"{rate:.2e}", tokens=tokens, clock=clock,
        )  # fmt: skip
        if self.terminal:
            width = 20
            done = width * step // self.steps
            print(f"\r[{'━' * done}{' ' * (width - done)}] {text}\x1b[K", end="", file=sys.stderr, flush=True)
        else:
            print(text, file=sys.stderr, flush=True)


@contextmanager
def interruptible(processes: Processes, log: Bookkeeper) -> Iterator[SimpleNamespace]:
    """On the first Ctrl-C, `asked` is set, the step is finished and saved; the second interrupts at once."""
    stop = SimpleNamespace(asked=False)
    if processes.size > 1 or threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def ask(number: int, frame: object) -> None:
        if stop.asked:
            raise KeyboardInterrupt
        stop.asked = True
        log.say_stopping()

    before = {name: signal.signal(name, ask) for name in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)
