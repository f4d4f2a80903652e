"""One step of a decoder, one query per text, on the kernels made for it.

    normed x ─ W_QKV → attend (turn, write into the caches), combine → W_O + x → feed-forward + x

The numbers are those of `Tower`, but for rounding; tests hold both to the numeric rule. Everything that changes from
step to step is in tensors at fixed addresses (`StepBuffers`), so that a step can be captured by a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from regard.devices import ROUNDED_ONCE, launch, overlapping, power_of_two
from regard.nn.attention import FixedCache, MultiHeadAttention
from regard.nn.blocks import Block, LanguageHead, Tower
from regard.nn.projections import untouched
from regard.rotary import Angles, Rotary

if TYPE_CHECKING:
    from regard.models.text import ModelState

ACTS = {"relu": 1, "silu": 2, "swish": 2, "gelu": 3, "gelu_new": 4, "gelu_fast": 4, "gelu_pytorch_tanh": 4}
TILE = 64  # keys of one turn of `attend`'s loop; this and the next were fastest on an H200
CHUNKS = (128, 256, 512, 1024, 2048)  # keys of one program of `attend`
PROGRAMS = 512  # of `attend`: with more of them, each takes more keys
STAGES = 4  # tiles of a program that are on their way, if it takes more than the fewest keys
ROWS, INPUTS = 4, 1024  # of a matrix, in one tile of `project`
MANY_ROWS = 4096  # from which twice as many rows in a tile are no slower, or faster
FEW = 16  # chunks of a text that `attend` combines by itself, and heads of one key head
SOME = 64  # chunks that `combine` takes at once, at most


@dataclass(frozen=True, eq=False)
class StepBuffers:
    """What a step reads and writes, always at the same addresses.

    tokens: (B,), the new ones.  at: (1,), the position they are written to.  start: (B,), each text's first token.
    finished: (B·Hkv,) zeros, by which `attend` counts its programs.  frequencies: of fixed angles, (R/2,).
    """

    tokens: Tensor
    at: Tensor
    start: Tensor
    finished: Tensor
    keys: tuple[Tensor, ...]  # (B, Hkv, room, D) for each depth
    values: tuple[Tensor, ...]
    frequencies: Tensor | None

    @classmethod
    def of(cls, state: ModelState, rotary: Rotary | None) -> StepBuffers:
        """The buffers of a state that has read its prompt."""
        rooms = [cast(FixedCache, cache).room for cache in state.caches]
        k = rooms[0][0]
        tokens = torch.zeros(len(k), dtype=torch.int64, device=k.device)
        at = torch.full((1,), len(state), dtype=torch.int32, device=k.device)
        start = at.new_zeros(len(k)) if state.mask is None else state.mask.int().argmax(1).int()
        finished = at.new_zeros(k.shape[0] * k.shape[1])
        frequencies = None if rotary is None else rotary.fixed_frequencies(k.device)
        return cls(tokens, at, start, finished, tuple(k for k, _ in rooms), tuple(v for _, v in rooms), frequencies)

    @property
    def form(self) -> tuple[object, ...]:
        """Steps of one form run through the same compiled kernels: what these are made for, beside the model."""
        k = self.keys[0]
        chunk, pieces = _split(k)
        some = min(SOME, power_of_two(pieces))
        return len(k), k.dtype, k.device, chunk, some, *((n == 1, n % 16 == 0) for n in (k.shape[2], pieces))


def unsupported_reason(tower: Tower, head: nn.Module | None, dtype: torch.dtype) -> str | None:
    """Why these kernels cannot run a model's step, or None if they can."""
    if not isinstance(head, LanguageHead) or head.transform is not None:
        return "its head does more than score words"
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"the kernels compute in fp32, and the weights are {dtype}"
    if tower.norm is not None and not _has_kernel(tower.norm):
        return "its last norm is no RMS norm and no LayerNorm with a bias"
    for block in tower.depth:
        attention = block.attention
        if not block.norm_first or block.cross is not None:
            return "its blocks norm after adding, or look at a memory"
        if type(attention) is not MultiHeadAttention:
            return f"its attention is a {type(attention).__name__}, and the kernels are softmax attention's"
        if not (attention.position is None or isinstance(attention.position, Rotary)) or not attention.fused:
            return "its attention has a position bias, or separate projections"
        if attention.backend != "auto":
            return f"its attention asks for the backend {attention.backend!r}"
        if attention.softcap is not None or attention.num_heads // attention.num_kv_heads > 128:
            return "its attention has a softcap, or more than 128 heads on one key head"
        if attention.q_norm is not None or attention.k_norm is not None:
            return "its attention norms each head"
        if not all(_has_kernel(norm) for norm in (block.attention_norm, block.feed_forward_norm)):
            return "its norms are no RMS norm and no LayerNorm with a bias"
        if block.feed_forward.separated:
            return "its feed-forward has separate projections"
        if block.feed_forward.activation not in ACTS:
            return f"the kernels do not have {block.feed_forward.activation}"
    if not all(_as_made(module) for part in (tower, head) for module in part.modules()):
        return "somebody hooks into its layers, or has put others in their place, and the kernels call no layer"
    if not all(weight.is_contiguous() for part in (tower, head) for weight in part.parameters()):
        return "the kernels read weights row after row, and some lie otherwise in memory"
    return None


def _as_made(module: nn.Module) -> bool:
    """Would calling the module do what it was made for, and nothing else? An adapter, a hook or a patch does more."""
    if isinstance(module, nn.Linear):
        return untouched(module)
    ours = type(module).__module__.split(".")[0] in ("regard", "torch") and "forward" not in vars(module)
    return ours and not module._forward_hooks and not module._forward_pre_hooks


def step(tower: Tower, head: LanguageHead, buffers: StepBuffers) -> Tensor:
    """Logits (B, V) after one more token in each text; keys and values go into the caches, `at` moves on."""
    positions = (buffers.at - buffers.start).unsqueeze(1)  # (B, 1)
    x = tower.embed(buffers.tokens.unsqueeze(1), positions).squeeze(1)  # (B, d)
    angles = None
    if tower.rotary is not None:
        angles = tower.rotary.angles(positions, frequencies=buffers.frequencies)
    for block, k, v in zip(tower.depth, buffers.keys, buffers.values, strict=True):
        x = _block(block, x, k, v, angles, buffers)
    weight = tower.embed.tokens.weight if head.words is None else head.words.weight
    bias = head.bias if head.words is None else head.words.bias
    if head.scale != 1.0:
        x = tower.norm(x) * head.scale if tower.norm is not None else x * head.scale
        logits = project(x, weight, bias)
    else:
        logits = project(x, weight, bias, norm=tower.norm)
    buffers.at.add_(1)
    return logits


def _block(block: Block, x: Tensor, k: Tensor, v: Tensor, angles: Angles | None, buffers: StepBuffers) -> Tensor:
    attention, feed = cast(MultiHeadAttention, block.attention), block.feed_forward
    qkv = project(x, attention.w_qkv.weight, attention.w_qkv.bias, norm=block.attention_norm)  # (B, (H + 2·Hkv)·D)
    mixed = attend(qkv, k, v, angles, buffers, attention)  # (B, H·D)
    x = project(mixed, attention.w_o.weight, attention.w_o.bias, residual=x)
    inner = project(
        x,
        feed.w_in.weight,
        feed.w_in.bias,
        norm=block.feed_forward_norm,
        activation=feed.activation,
        gated=feed.gated,
    )
    return project(inner, feed.w_out.weight, feed.w_out.bias, residual=x)


def project(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    norm: nn.Module | None = None,
    activation: str | None = None,
    gated: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """residual + act(W · norm(x) + b) for x (B, inputs): one kernel for one text, torch's for several."""
    if len(x) != 1:
        return _project_many(x, weight, bias, norm, activation, gated, residual)
    from regard.generation import cuda_kernels

    rows, inputs = weight.shape[0] // (2 if gated else 1), weight.shape[1]
    out = x.new_empty(1, rows)
    gain: Any = x if norm is None else norm.weight
    tall = 2 * ROWS if rows >= MANY_ROWS and not gated else ROWS
    launch(
        cuda_kernels.project, ((rows + tall - 1) // tall, 1, 1),
        (x, weight, weight if bias is None else bias, gain, _shift(norm, x), x if residual is None else residual, out),
        (rows, inputs, 0.0 if norm is None else _eps(norm, x.dtype)),
        NORM=_kind(norm), ACT=0 if activation is None else ACTS[activation], GATED=gated, HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None, WHOLE=power_of_two(inputs), BLOCK_ROWS=tall,
        BLOCK_INPUTS=min(INPUTS, power_of_two(inputs)), **_options(x.device, 4),
    )  # fmt: skip
    return out


def _project_many(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: nn.Module | None,
    activation: str | None,
    gated: bool,
    residual: Tensor | None,
) -> Tensor:
    from regard.nn.blocks import ACTIVATIONS

    y = linear(x if norm is None else norm(x), weight, bias)
    if gated:
        gate, up = y.chunk(2, -1)
        y = ACTIVATIONS[activation or ""](gate) * up
    elif activation is not None:
        y = ACTIVATIONS[activation](y)
    return y if residual is None else y + residual


def attend(
    qkv: Tensor, k: Tensor, v: Tensor, angles: Angles | None, buffers: StepBuffers, attention: MultiHeadAttention
) -> Tensor:
    """Attention of one token per text over those before it and itself, (B, H·D); it goes into the caches k and v."""
    from regard.generation import cuda_kernels

    batch, kv_heads, room, head_dim = k.shape
    heads, rotary, (chunk, pieces) = attention.num_heads, attention.position, _split(k)
    turn = angles is not None and isinstance(rotary, Rotary)
    cos, sin = (angles.cos, angles.sin) if angles is not None else (qkv, qkv)
    sums = qkv.new_empty(batch * heads, pieces, head_dim, dtype=torch.float32)
    most, total = sums.new_empty(batch * heads, pieces), sums.new_empty(batch * heads, pieces)
    out = qkv.new_empty(batch, heads * head_dim)
    group, stages = heads // kv_heads, _stages(k, chunk)
    few = power_of_two(pieces) if max(pieces, group) <= FEW and torch.version.hip is None else 0
    launch(
        cuda_kernels.attend, (batch * kv_heads, pieces, 1),
        (qkv, cos, sin, k, v, buffers.start, buffers.at, sums, most, total, buffers.finished, out),
        (heads, kv_heads, head_dim, rotary.width if isinstance(rotary, Rotary) else 2, room, pieces, attention.scale),
        TURN=turn, INTERLEAVED=isinstance(rotary, Rotary) and rotary.layout == "interleaved", GROUP=group,
        PADDED=max(16, power_of_two(group)), CHUNK=chunk, TILE=TILE, STAGES=stages,
        BLOCK=max(16, power_of_two(head_dim)), FEW=few, **_options(qkv.device, 8 if stages == 1 else 4),
    )  # fmt: skip
    if not few:
        launch(
            cuda_kernels.combine, (batch * heads, 1, 1),
            (sums, most, total, buffers.start, buffers.at, out), (heads, head_dim, pieces),
            CHUNK=chunk, SOME=min(SOME, power_of_two(pieces)), BLOCK=power_of_two(head_dim), **_options(qkv.device, 4),
        )  # fmt: skip
    return out


def _split(k: Tensor) -> tuple[int, int]:
    """How many keys of a cache (B, Hkv, room, D) each program of `attend` takes, and how many programs a head has."""
    rows, room = k.shape[0] * k.shape[1], k.shape[2]
    chunk = next((keys for keys in CHUNKS if rows * -(-room // keys) <= PROGRAMS), CHUNKS[-1])
    return chunk, -(-room // chunk)


def _stages(k: Tensor, chunk: int) -> int:
    """How many tiles of keys and values `attend` has on their way: with many keys, as many as shared memory holds."""
    if chunk == CHUNKS[0]:
        return 1
    if not k.is_cuda:
        return STAGES
    properties = torch.cuda.get_device_properties(k.device)
    memory: int = getattr(properties, "shared_memory_per_block_optin", 1 << 16)  # AMD's do not say, and have 64 KiB
    tile = 2 * TILE * max(16, power_of_two(k.shape[-1])) * k.element_size()
    return max(1, min(STAGES, 4 * memory // (5 * tile)))  # a fifth is for the rest


def _options(device: torch.device, warps: int) -> dict[str, Any]:
    """The last constant and the options of a launch; it may begin before the one ahead has ended, where that works."""
    overlap = overlapping(device)
    return {"OVERLAP": overlap, "num_warps": warps, **({"launch_pdl": True} if overlap else {}), **ROUNDED_ONCE}


def _has_kernel(norm: nn.Module) -> bool:
    return isinstance(norm, nn.RMSNorm) or (isinstance(norm, nn.LayerNorm) and norm.bias is not None)


def _kind(norm: nn.Module | None) -> int:
    return 0 if norm is None else 1 if isinstance(norm, nn.RMSNorm) else 2


def _eps(norm: Any, dtype: torch.dtype) -> float:
    return float(torch.finfo(dtype).eps if norm.eps is None else norm.eps)


def _shift(norm: nn.Module | None, x: Tensor) -> Tensor:
    return norm.bias if isinstance(norm, nn.LayerNorm) else x
