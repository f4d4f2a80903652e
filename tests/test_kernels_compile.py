"""Every Triton kernel compiles for a GPU that is not here: the interpreter of the other tests knows no types."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton", reason="needs triton: pip install 'regard[gpu]'")

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from triton.runtime.jit import JITFunction

from regard.backends import sparse_kernels
from regard.lens import kernels as lens_kernels
from regard.models.decoding import kernels as decoding

HOPPER = GPUTarget("cuda", 90, 32)


def compiled(kernel: JITFunction, constants: dict[str, Any], **types: str) -> str:
    """The kernel's PTX. types: of arguments that are no constants; of others by how they are written."""
    signature = {name: "constexpr" if name in constants else types.get(name) or usual(name) for name in kernel.arg_names}
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, constexprs=places)
    return compile(source, target=HOPPER, options={"num_warps": 4}).asm["ptx"]


def usual(name: str) -> str:
    """Tensors are named in capitals, and most are of half precision; sizes and steps are whole numbers."""
    return "*bf16" if name.isupper() else "fp32" if name in ("scale", "plain_scale", "eps") else "i32"
