"""Triton functions by its interpreter, where there is no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import pytest


@contextmanager
def interpreted(*kernels: ModuleType) -> Iterator[None]:
    """Run the Triton functions of these modules, and triton's own, by its interpreter, and undo that.

    TRITON_INTERPRET is read where a function is defined. triton's own are defined when somebody imports it, and
    torch._dynamo does: so whatever is compiled by now is replaced.
    """
    import triton.language as tl
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    # The interpreter also writes into these, and leaves it at that.
    language = (tl, tl.core, tl.math, tl.standard, tl.tensor, tl.dtype, tl.core.tensor_descriptor_base)
    places = (*language, *kernels)
    before = [dict(vars(place)) for place in places]
    made: dict[int, InterpretedFunction[Any]] = {}
    for place in places:
        for name, value in list(vars(place).items()):
            if isinstance(value, JITFunction):
                setattr(place, name, made.setdefault(id(value), InterpretedFunction(value.fn)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        # The interpreter adapts the language at every launch and at every call of a device function, a third of its
        # time. Once, for functions that see all of it, is enough.
        scope = interpreter._patch_lang(FunctionType((lambda: None).__code__, {"tl": tl, "core": tl.core}))
        patch.setattr(interpreter, "_patch_lang", lambda fn: type(scope)())
        # It also computes each sum and product of 32-bit integers again in 64 bits, a quarter of its time, and makes a
        # table of dtypes whenever it needs one. Integers here are too small to overflow.
        builder = interpreter.interpreter_builder
        patch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
        patch.setattr(builder, "create_dot", _dot)
        numpy_dtype, of_scalar = interpreter._get_np_dtype, cache(interpreter._get_np_dtype)
        patch.setattr(
            interpreter, "_get_np_dtype", lambda t: (numpy_dtype if t.scalar.is_ptr() else of_scalar)(t.scalar)
        )
        yield
    for place, names in zip(places, before, strict=True):
        if isinstance(place, type):
            for name in vars(place).keys() - names.keys():  # such as tensor.__bool__, which breaks the compiler
                delattr(place, name)
        for name, value in names.items():
            if vars(place)[name] is not value:
                setattr(place, name, value)


def _dot(a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    """a @ b + d, in which a row of a gives the same numbers wherever it stands, as on a GPU: in BLAS it need not."""
    from triton.runtime.interpreter import TensorHandle

    product = np.zeros_like(d.data)
    for n in range(a.data.shape[-1]):
        product += a.data[..., :, n, None].astype(product.dtype) * b.data[..., None, n, :].astype(product.dtype)
    return TensorHandle(product + d.data, d.dtype.scalar)
