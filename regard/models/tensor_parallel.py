"""Tensor parallelism: the heads and the inner features of a model split over the processes of a device mesh.

Query, key and value projections and the first layer of a feed-forward are `ColwiseParallel`, what follows them is
`RowwiseParallel`, everything else is on every process as a whole.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from regard.checks import is_distributed, listed, local
from regard.masks.biases import Bias
from regard.nn.attention import MultiHeadAttention
from regard.nn.blocks import FeedForward
from regard.nn.projections import HeadProjections, untouched
from regard.positions import T5, Alibi, Rotary, Swin


def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
    """Split a model over the processes of a mesh, in place; every process of the mesh calls it.

    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)      # torchrun starts more
    >>> layer = MultiHeadAttention(6, 2, fused=True)
    >>> parallelize(layer, init_device_mesh("cpu", (1,)))
    >>> layer.w_q.weight.placements, gather(layer)["w_qkv.weight"].shape
    ((Shard(dim=0),), torch.Size([18, 6]))
    >>> dist.destroy_process_group()

    Weights are those of the mesh's first process. Parameters are new: make the optimizer afterwards. In training give
    every process the same seed, so that dropout drops the same of what each has as a whole.

    Args:
        model: a model of regard, a part of one, or one `MultiHeadAttention`; it is moved to the mesh's device.
        mesh: one axis; of a larger mesh, `mesh["tp"]`.

    Raises:
        ValueError: with every reason, before anything is changed: heads, key/value heads or inner features that do not
            divide by the processes, attention that cannot be split by heads, a model that is split already.
    """
    if mesh.ndim != 1:
        raise ValueError(f"tensor parallelism takes a mesh of one axis, got {mesh.ndim}: pass one of them, mesh['tp']")
    size, rank = mesh.size(), mesh.get_local_rank()
    problems = _problems(model, size)
    if problems:
        raise ValueError(f"the model cannot be split over {size} processes:\n  " + "\n  ".join(problems))
    columns, rows = ColwiseParallel(), RowwiseParallel()
    by_head = SequenceParallel(sequence_dim=2, use_local_output=True)  # norms of (B, N, H, D)
    for layer in list(model.modules()):
        if isinstance(layer, MultiHeadAttention):
            layer.separate()
            share = layer.num_heads // size
            layer.local_heads = range(rank * share, (rank + 1) * share)
            for projection in (layer.w_q, layer.w_k, layer.w_v):
                parallelize_module(projection, mesh, columns)
            parallelize_module(layer.w_o, mesh, rows)
            for norm in filter(None, dict.fromkeys((layer.q_norm, layer.k_norm))):
                trained = {name: p.requires_grad for name, p in norm.named_parameters()}
                parallelize_module(norm, mesh, by_head)
                for name, p in norm.named_parameters():  # which that style forgets
                    p.requires_grad_(trained[name])
            position, here = layer.position, layer.local_heads
            if isinstance(position, Alibi):
                layer.position = replace(position, slopes=position.slopes[here.start : here.stop])
            elif isinstance(position, (Swin, T5)) and not is_distributed(position.table):  # layers may share it
                table = distribute_tensor(position.table, mesh, [Shard(1)])  # (·, heads)
                position.table = nn.Parameter(table, position.table.requires_grad)
        elif isinstance(layer, FeedForward):
            layer.separate()
            for projection in (layer.w_gate, layer.w_up) if layer.gated else (layer.w_in,):
                parallelize_module(projection, mesh, columns)
            parallelize_module(layer.w_out, mesh, rows)
    # What each process has as a whole gets the first one's values: heads may be drawn anew on each.
    for x in (*model.parameters(), *model.buffers()):
        if not isinstance(x, DTensor):
            x.data = x.data.to(mesh.device_type)  # where the split weights are by now
        if not isinstance(x, DTensor) or x.placements[0].is_replicate():
            values = local(x.detach())
            sent = values.contiguous()
            dist.broadcast(sent, group=mesh.get_group(), group_src=0)
            if sent is not values:
                values.copy_(sent)


def gather(model: nn.Module) -> dict[str, Tensor]:
    """The state dict that the model had before `parallelize`, on the CPU; every process of the mesh calls it.

    One process can then save it: `whole = regard.load(…)`, `whole.load_state_dict(weights)`, `whole.save(…)`.
    """
    state = {name: (x.full_tensor() if isinstance(x, DTensor) else x).cpu() for name, x in model.state_dict().items()}
    for path, module in model.named_modules(remove_duplicate=False):
        if not getattr(module, "separated", False):
            continue
        joined, parts = ("w_qkv", "qkv") if isinstance(module, MultiHeadAttention) else ("w_in", ("gate", "up"))
        before = f"{path}." if path else ""
        for leaf in ("weight", "bias"):
            names = [f"{before}w_{part}.{leaf}" for part in parts]
            if names[0] in state:
                state[f"{before}{joined}.{leaf}"] = torch.cat([state.pop(name) for name in names])
    return state


def _problems(model: nn.Module, size: int) -> list[str]:
    """Why a model cannot be split over so many processes: each reason after the names of the layers that have it."""
    layers: dict[str, list[str]] = {}
    some = False
    for path, layer in model.named_modules():
        reasons = []
        if isinstance(layer, (HeadProjections, MultiHeadAttention)) and type(layer) is not MultiHeadAttention:
            reasons = [f"a {type(layer).__name__} cannot attend with some of its heads"]
        elif isinstance(layer, MultiHeadAttention):
            position = layer.position
            shared = position is None or (isinstance(position, Bias) and position.leading[1] == 1)
            if layer.num_heads % size or layer.num_kv_heads % size:
                reasons.append(
                    f"{layer.num_heads} heads with {layer.num_kv_heads} key/value heads do not divide by {size}"
                )
            if not (shared or isinstance(position, (Alibi, Rotary, Swin, T5))):
                reasons.append(f"its position, {type(position).__name__}, cannot be split by heads")
        elif isinstance(layer, FeedForward) and layer.d_ff % size:
            reasons = [f"{layer.d_ff} inner features do not divide by {size}"]
        if isinstance(layer, (FeedForward, MultiHeadAttention)):
            some = True
            projections = [module for part, module in layer.named_children() if part.startswith("w_")]
            if not all(untouched(projection) for projection in projections):
                reasons.append("its projections are split already, or an adapter or a hook is on them")
        for reason in reasons:
            layers.setdefault(reason, []).append(path or type(layer).__name__)
    if not (some or layers):
        return [f"a {type(model).__name__} without any attention or feed-forward of regard's"]
    return [f"{listed(names)}: {reason}" for reason, names in layers.items()]
