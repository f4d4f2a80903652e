"""What looks like attention in a model and was not seen, each with the reason as far as it is known.

It does not know how calls are caught, nor what is measured.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from torch import nn

from regard.lens.asking import Layers
from regard.lens.capture import Record
from regard.lens.diagnosing.layer_names import places
from regard.lens.taps.callers import original_path
from regard.lens.taps.installing import Taps

__all__ = ["name_unseen"]

LOOKS_LIKE_ATTENTION = re.compile(r"attention|attn|mha", re.IGNORECASE)

NO_REASON = (
    "it did not run in the block (a copy of it, as DataParallel makes, does not count), or it makes its weights in a "
    "way that is not known here"
)
COMPILED = "it is inside compiled code, of which only torch's fused kernels are seen; watch the model uncompiled"


def name_unseen(
    model: nn.Module,
    taps: Taps,
    seen: Mapping[str, bool],
    names: Sequence[str],
    records: Sequence[Record],
    layers: Layers,
) -> dict[str, str]:
    """Path → reason, for what was asked for and not seen.

    >>> layer = nn.MultiheadAttention(8, 2)
    >>> name_unseen(layer, Taps(layer, print), {}, [], [], Layers())[""][:23]
    'it did not run in the b'

    seen: path → was it in compiled code, for all modules whose attention was seen, also those not asked for.
    names: what each is called, in the order of first calls: its path, or numbers of the calls in compiled code.
    records: of those that were asked for.  layers: what was asked for.
    """
    classes = {original_path(path): type(module).__name__ for path, module in model.named_modules()}
    found = {r.path: r.trouble or "the call could not be read" for r in records if r.view is None}
    for path, problem in taps.errors:
        if path in seen or layers.may_have(path):
            found[path] = f"measuring it failed: {type(problem).__name__}: {problem}"
    for path, shape in taps.unconfirmed:
        suspected = (path, shape) in taps.suspected or not seen or LOOKS_LIKE_ATTENTION.search(classes.get(path, ""))
        if suspected and layers.may_have(path):
            found.setdefault(path, f"a softmax of shape {shape} that did not meet values in a way that is known here")
    compiled, said = _compiled(model), _said(model)
    for path in _candidates(classes):
        if path not in found and layers.may_have(path) and not _covered(path, seen):
            usual = COMPILED if any(_inside(path, whole) for whole in compiled) else NO_REASON
            found[path] = said.get(path, usual)
    for path, shape in () if seen else taps.chained:
        if layers.may_have(path):
            found.setdefault(path, f"a product of shape {shape} that met another without a softmax that is known here")
    for want in layers.unmet([*names, *(path for path in seen if path not in names)]):
        there = f"those that ran are {places(names)}" if names else "none ran"
        found[str(want)] = f"layers={want!r} fits no attention that was seen: {there}"
    return found


def _covered(path: str, seen: Mapping[str, bool]) -> bool:
    """Was attention seen in a module or in a part of it, or in the compiled code that it is a part of?"""
    if any(_inside(s, path) for s in seen):
        return True
    return any(_inside(path, s) for s, compiled in seen.items() if s or compiled)


def _candidates(classes: dict[str, str]) -> list[str]:
    """The innermost modules whose class is named like attention."""
    named = [path for path, name in classes.items() if LOOKS_LIKE_ATTENTION.search(name)]
    return [path for path in named if not any(other != path and _inside(other, path) for other in named)]


def _compiled(model: nn.Module) -> list[str]:
    """The modules that went through torch.compile, or whose forward did."""
    found = []
    for path, module in model.named_modules():
        whole = "_orig_mod" in module._modules or module._compiled_call_impl is not None
        if whole or hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable"):
            found.append(original_path(path))
    return found


def _said(model: nn.Module) -> dict[str, str]:
    """What classes say of their modules as `why_unseen`: of those that attend without making weights, ran or not."""
    own = {original_path(path): getattr(type(module), "why_unseen", None) for path, module in model.named_modules()}
    return {path: why for path, why in own.items() if isinstance(why, str)}


def _inside(path: str, whole: str) -> bool:
    """Is a module another, or a part of it?"""
    return not whole or path == whole or path.startswith(f"{whole}.")
