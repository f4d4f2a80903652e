"""Processes of a run: data parallel (DDP), sharded (FSDP2) and tensor parallel, as torchrun starts them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from regard.models.family import empty
from regard.models.model import Model
from regard.models.tensor_parallel import gather, parallelize
from regard.nn.blocks import Block
from regard.training.config import TrainConfig


@dataclass(frozen=True)
class Processes:
    """The place of this process among those of the run.

    Args:
        rank: its number.
        size: how many there are.
        device: of this process.
        mesh: (data, tensor), or None for a single process.
    """

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh | None

    @classmethod
    def start(cls, config: TrainConfig, device: torch.device) -> Processes:
        """Join the processes that torchrun started; a single process without it.

        Raises ValueError for batches or sizes that do not divide.
        """
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1 and not dist.is_initialized():
            if config.shard or config.tensor_parallel > 1:
                raise ValueError(
                    "shard and tensor_parallel need several processes: torchrun --nproc-per-node 2 -m regard …"
                )
            return cls(0, 1, device, None)
        if torch.cuda.is_available():
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(device)
        if not dist.is_initialized():
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        size, tensor = dist.get_world_size(), config.tensor_parallel
        if size % tensor:
            raise ValueError(f"{size} processes cannot be split into groups of tensor_parallel={tensor}")
        if (config.batch_size // config.accumulate) % (size // tensor):
            raise ValueError(
                f"a micro-batch of {config.batch_size // config.accumulate} rows cannot be split over "
                f"{size // tensor} processes: choose batch_size as a multiple of accumulate × processes"
            )
        mesh = init_device_mesh(device.type, (size // tensor, tensor), mesh_dim_names=("data", "tensor"))
        return cls(dist.get_rank(), size, device, mesh)

    @property
    def main(self) -> bool:
        """Does this process write the files?"""
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        """Which share of each batch is this process's."""
        return 0 if self.mesh is None else self.mesh.get_local_rank("data")

    @property
    def data_size(self) -> int:
        """Into how many shares a batch is split."""
        return 1 if self.mesh is None else self.mesh.size(0)

    def sum(self, values: Tensor) -> None:
        """Add up over the shares of a batch, in place."""
        if self.mesh is not None:
            dist.all_reduce(values, group=self.mesh.get_group("data"))

    def barrier(self) -> None:
        """Wait for all processes."""
        if self.size > 1:
            dist.barrier()

    def check_same(self, value: Any, what: str) -> None:
        """Raise ValueError on every process if they do not all have the same value."""
        if self.size > 1:
            values: list[Any] = [None] * self.size
            dist.all_gather_object(values, value)
            if any(other != values[0] for other in values):
                raise ValueError(f"{what} differ between the processes: {values!r:.500}")

    def synchronize(self, model: nn.Module, *, last: bool) -> None:
        """Exchange gradients in the backward pass of the last micro-batch only."""
        if isinstance(model, DistributedDataParallel):
            model.require_backward_grad_sync = last
        elif isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(last)


def wrap(model: Model, config: TrainConfig, processes: Processes) -> nn.Module:
    """The model as the run's processes train it. Raises ValueError where tensor parallelism does not fit."""
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    if processes.mesh is not None and config.tensor_parallel > 1:
        parallelize(model, processes.mesh["tensor"])
    if config.recompute:
        for block in blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]
    if config.compile == "reduce-overhead":
        if processes.size > 1:
            raise ValueError("compile='reduce-overhead' trains on one process; compile=True on several")
        model.compile(mode="reduce-overhead", dynamic=False)
    elif config.compile:
        for block in blocks:
            block.compile()
    if processes.mesh is None or processes.data_size == 1:
        return model
    if config.shard:
        for block in blocks:
            fully_shard(block, mesh=processes.mesh["data"])
        fully_shard(model, mesh=processes.mesh["data"])
        return model
    ids = [processes.device.index] if processes.device.type == "cuda" else None
    return DistributedDataParallel(
        model, device_ids=ids, process_group=processes.mesh.get_group("data"), gradient_as_bucket_view=True
    )


def full_model(model: Model, processes: Processes) -> Model:
    """The model with whole weights, ready to be saved by the main process; the model itself where they are whole."""
    split = any(hasattr(parameter, "full_tensor") for parameter in model.parameters())
    if not split:
        return model
    if processes.mesh is not None and processes.mesh.size(1) > 1:
        weights: dict[str, Any] = gather(model)
    else:
        weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if not processes.main:
        return model
    whole = empty(model.family, model.config, model.task)
    whole.load_state_dict(weights, assign=True)
    whole.directory, whole.ignored = model.directory, model.ignored
    for name in ("tokenizer", "preprocessor"):
        if name in vars(model):
            setattr(whole, name, vars(model)[name])
    return whole
