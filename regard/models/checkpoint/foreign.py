"""Checkpoints that look like those of `transformers` and are not: what they are, and what to take instead.

It looks at config.json alone, and knows no family of models.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

__all__ = ["refuse_foreign"]

# Of https://github.com/haotian-liu/LLaVA, which names the language model; transformers' own classes do not.
ORIGINAL_LLAVA = re.compile(r"Llava[A-Z]\w*ForCausalLM")


def refuse_foreign(values: Mapping[str, Any], where: str) -> None:
    """Refuse a config.json that another library wrote, in words that say which.

    >>> refuse_foreign({"architecture": "vit_tiny_patch16_224", "pretrained_cfg": {}}, "config.json")
    Traceback (most recent call last):
        ...
    ValueError: config.json is of timm (architecture 'vit_tiny_patch16_224'), whose weights have other names: take a \
checkpoint in the format of transformers, such as google/vit-base-patch16-224; regard.watch looks into timm's own \
model as it is

    values: what config.json holds.  where: the file, for the error.
    """
    match values.get("architectures"):
        case [str(name), *_] if ORIGINAL_LLAVA.fullmatch(name):
            raise ValueError(
                f"{where} is of the original LLaVA code ({name}), whose weights have other names: take a checkpoint in "
                "the format of transformers, such as llava-hf/llava-1.5-7b-hf"
            )
    architecture = values.get("architecture")
    if isinstance(architecture, str) and "model_type" not in values and "pretrained_cfg" in values:
        raise ValueError(
            f"{where} is of timm (architecture {architecture!r:.80}), whose weights have other names: take a "
            "checkpoint in the format of transformers, such as google/vit-base-patch16-224; regard.watch looks into "
            "timm's own model as it is"
        )
