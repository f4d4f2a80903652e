"""What a call of FlexAttention, of Hugging Face's function around it, or of flash_attn computes, read as a `Sighting`.

Each reader gets the arguments by name, what came back, and what a kernel inside lent. It does not know how the call was
caught, nor by whom it was made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from regard.backends.call import Call
from regard.lens.taps.flex_masks import flex_mask
from regard.lens.taps.reading import read_call, trusted_lse
from regard.lens.taps.sightings import Lent, Sighting, Source
from regard.masks import Mask, causal, window

__all__ = ["Made", "Reader", "flex_lse", "read_flash", "read_flex", "read_hugging_face", "reader_of_flash"]

FOREVER = 1 << 29
"""A window as wide as any sequence."""


@dataclass(frozen=True, eq=False)
class Made:
    """One call of a function: arguments it declares, those beyond, what came back, and what a kernel inside lent."""

    given: dict[str, Any]
    extra: dict[str, Any]
    out: Any
    lent: Lent | None


Reader = Callable[[Made], Sighting]


def read_flex(made: Made, *, compiled: bool) -> Sighting:
    """`flex_attention(query, key, value, score_mod, block_mask, scale, …)`.

    compiled: it ran as a fused kernel, which goes by blocks.

    >>> q = torch.zeros(1, 2, 3, 16)
    >>> given = {"query": q, "key": q, "value": q, "score_mod": lambda score, b, h, i, j: score * 2}
    >>> read_flex(Made(given, {}, q, None), compiled=False).trouble[:42]
    'score_mod is a function of the score, and '
    """
    given = made.given | made.extra
    output = _first(made.out)
    if given.get("score_mod") is not None:
        trouble = (
            "score_mod is a function of the score, and cannot be taken apart into scale, softcap and bias; "
            "what block_mask can say, and a scale, are read"
        )
        return Sighting(source="flex", kernel="flex_attention", output=output, lse=flex_lse(made.out), trouble=trouble)
    batch, heads = given["query"].shape[:2]
    mask = flex_mask(given.get("block_mask"), batch, heads, compiled=compiled)
    make = partial(read_call, given["query"], given["key"], given["value"], mask=mask, scale=given.get("scale"))
    return _sighting("flex", "flex_attention", make, output, flex_lse(made.out))


def read_hugging_face(made: Made) -> Sighting:
    """`flex_attention_forward(module, query, key, value, attention_mask, scaling, softcap, s_aux, position_bias)`.

    What it adds to the scores is known here by name, where FlexAttention itself is given a function of them.
    """
    given = made.given
    q, k, v, sinks = given["query"], given["key"], given["value"], given.get("s_aux")

    def make() -> Call:
        mask, cells = None, given.get("attention_mask")
        if isinstance(cells, Tensor):
            cells = cells[:, :1, :, : k.shape[-2]].to(q.dtype)  # the first head's, added: booleans too
        elif cells is not None:
            mask, cells = flex_mask(cells, *q.shape[:2], compiled=True), None
        return read_call(
            q,
            k,
            v,
            cells=cells,
            bias=given.get("position_bias"),
            mask=mask,
            scale=given.get("scaling"),
            softcap=given.get("softcap"),
            sinks=None if sinks is None else sinks.reshape(-1),
        )

    # The lse inside is from before the sinks joined, and the one that is returned has lost digits.
    lse = made.lent.lse if made.lent is not None and sinks is None else None
    return _sighting("flex", "flex_attention", make, _first(made.out).transpose(1, 2), lse)


def read_flash(made: Made) -> Sighting:
    """`flash_attn_func(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, …)`.

    Its layout is (B, N, H, D); causal and window are lower-right.
    """
    given = made.given | made.extra
    q, k, v = (given[name].transpose(1, 2) for name in ("q", "k", "v"))
    output = _first(made.out).transpose(1, 2)
    if given.get("alibi_slopes") is not None:
        trouble = "alibi_slopes of flash_attn are not read yet"
        return Sighting(source="flash_attn", kernel="flash_attn_func", output=output, trouble=trouble)
    before, after = given.get("window_size", (-1, -1))
    make = partial(
        read_call,
        q,
        k,
        v,
        mask=_flash_mask(bool(given.get("causal")), before, after),
        scale=given.get("softmax_scale"),
        softcap=given.get("softcap") or None,
        dropout=given.get("dropout_p", 0.0),
    )
    lse = made.out[1] if isinstance(made.out, tuple) else None
    return _sighting("flash_attn", "flash_attn_func", make, output, lse)


def reader_of_flash(name: str) -> Reader:
    """The reader for a function of flash_attn.

    >>> reader_of_flash("flash_attn_varlen_func")(Made({}, {}, None, None)).trouble
    'flash_attn_varlen_func: packed sequences are not taken apart yet'
    """
    if name == "flash_attn_func":
        return read_flash
    why = "packed sequences are not taken apart yet" if "varlen" in name else "only flash_attn_func is read yet"
    return lambda made: Sighting(source="flash_attn", kernel=name, trouble=f"{name}: {why}")


def flex_lse(out: Any) -> Tensor | None:
    """The lse that FlexAttention returns when asked for it, or None."""
    lse = getattr(out[1], "lse", out[1]) if isinstance(out, tuple) else None
    return lse.detach() if isinstance(lse, Tensor) else None


# --------------------------------------------------------------------------------------------------------------- pieces


def _sighting(
    source: Source, kernel: str, make: Callable[[], Call], output: Tensor | None, lse: Tensor | None
) -> Sighting:
    try:
        call = make()
    except Exception as problem:
        return Sighting(source=source, kernel=kernel, output=output, trouble=str(problem))
    wide = lse is not None and lse.shape == call.sizes[:3] and lse.dtype in (torch.float32, torch.float64)
    if source == "flash_attn":
        lse = trusted_lse(lse if wide else None, call)
    return Sighting(source=source, kernel=kernel, call=call, lse=lse if wide else None, output=output)


def _first(out: Any) -> Tensor:
    """The output of a function that may return more."""
    first: Tensor = out[0] if isinstance(out, tuple) else out
    return first.detach()


def _flash_mask(is_causal: bool, before: int, after: int) -> Mask | None:
    """−1 is no limit; causal lets nothing after through, whatever the window says."""
    if before < 0 and (is_causal or after < 0):
        return causal() if is_causal else None
    return window(before if before >= 0 else FOREVER, 0 if is_causal else after if after >= 0 else FOREVER)
