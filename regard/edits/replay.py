"""Run a model from an edited block onwards: blocks that ended before it return what they returned in the plain run.

Whatever ended before the first edited call cannot depend on the edit. What a block returns is kept only if its call is
a function of its arguments alone, as far as can be seen: it is called once, is given tensors and plain values (no
cache), its modules have no hooks, and it returns no more than a few hidden states, so that O(L·N·d) numbers are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

__all__ = ["KeptBlocks"]

HIDDEN_STATES = 4  # how many times its first tensor a block may return


@dataclass
class _BlockCall:
    """The first call of one block."""

    start: int  # by a count of what begins and ends
    end: int = -1
    output: Any = None
    pure: bool = True


class KeptBlocks:
    """What the blocks of a model returned in one run.

    A block is a member of an nn.ModuleList that lies in no other block.
    """

    def __init__(self, model: nn.Module) -> None:
        paths = [
            f"{name}.{key}" if name else key
            for name, module in model.named_modules()
            if isinstance(module, nn.ModuleList)
            for key in module._modules
        ]
        inner = {path for path in paths if any(path.startswith(f"{other}.") for other in paths)}
        modules = dict(model.named_modules())  # a module that stands in several places comes once
        self.blocks = {path: modules[path] for path in paths if path in modules and path not in inner}
        self.checked = False  # whether a run that skips blocks was compared with one that does not
        self._calls: dict[str, _BlockCall] = {}
        self._time = 0

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Keep what the blocks return meanwhile."""
        with ExitStack() as stack:
            for path, block in self.blocks.items():
                before, after = self._hooks(path)
                stack.callback(block.register_forward_pre_hook(before, with_kwargs=True).remove)
                stack.callback(block.register_forward_hook(after).remove)
            yield

    def _hooks(self, path: str) -> tuple[Callable[..., None], Callable[..., None]]:
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._time += 1
            if path in self._calls:
                self._calls[path].pure = False
                return
            hooked = any(m._forward_hooks or m._forward_pre_hooks for m in module.modules() if m is not module)
            values = tree_flatten((args, kwargs))[0]
            self._calls[path] = _BlockCall(self._time, pure=not hooked and all(map(_is_value, values)))

        def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self._time += 1
            call, tensors = self._calls[path], [x for x in tree_flatten(output)[0] if isinstance(x, Tensor)]
            call.end = self._time
            call.pure &= bool(tensors) and sum(x.numel() for x in tensors) <= HIDDEN_STATES * tensors[0].numel()
            call.output = _copied(output) if call.pure else None

        return before, after

    def before(self, paths: Collection[str]) -> list[str]:
        """The blocks that can be skipped if these modules are edited: those that ended before the first of them."""
        starts = []
        for path in paths:
            around = [call for name, call in self._calls.items() if path == name or path.startswith(f"{name}.")]
            if not around:
                return []  # it may run at any time
            starts.append(around[0].start)
        return [name for name, call in self._calls.items() if call.pure and call.end < min(starts)]

    @contextmanager
    def skipping(self, names: Collection[str]) -> Iterator[None]:
        """These blocks return what was kept instead of computing it."""
        with ExitStack() as stack:
            for name in names:
                block, output = self.blocks[name], self._calls[name].output
                if "forward" in vars(block):
                    stack.callback(setattr, block, "forward", vars(block)["forward"])
                else:
                    stack.callback(vars(block).pop, "forward", None)
                block.forward = lambda *args, output=output, **kwargs: _copied(output)
            yield

    def clear(self) -> None:
        """Forget everything: no block is skipped any more."""
        self._calls.clear()


def _is_value(x: Any) -> bool:
    """Whether an argument is a tensor or cannot be changed: a cache can."""
    frozen = is_dataclass(x) and getattr(type(x), "__dataclass_params__").frozen  # noqa: B009
    return x is None or frozen or isinstance(x, (Tensor, int, float, str))


def _copied(output: Any) -> Any:
    """With tensors of its own: the model may write to those that it gets."""
    return tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, output)


def same_tensors(one: Any, other: Any) -> bool:
    """Whether two outputs have the same form and the same bits."""
    (ours, form), (theirs, other_form) = tree_flatten(one), tree_flatten(other)
    return form == other_form and all(
        torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else type(a) is type(b)
        for a, b in zip(ours, theirs, strict=True)
    )
