"""The same checkpoint in `transformers`: its model with eager attention, and its tokenizer, to compare with.

transformers is optional: it is imported here and nowhere else in regard's models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from regard.models.parity.passes import Made

__all__ = ["Peer", "library", "token_ids"]


def library() -> ModuleType:
    """The library transformers. Raises ImportError that says how to get it."""
    try:
        import transformers
    except ImportError as error:
        raise ImportError("verify compares with transformers, which is not here: pip install transformers") from error
    assert isinstance(transformers, ModuleType)
    return transformers


def token_ids(directory: Path, texts: Sequence[str]) -> list[list[int]]:
    """Each text as the ids that transformers' tokenizer gives it."""
    with _quiet(library()) as transformers:
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
        return [list(tokenizer(one)["input_ids"]) for one in texts]


class Peer:
    """A checkpoint as a model of transformers.

    architecture: its class there.  dtype: of its weights, all of them.  pad: id of padding, where config.json has none.

    Raises ValueError if transformers has no such class.
    """

    def __init__(
        self, directory: Path, architecture: str, *, dtype: torch.dtype, device: torch.device, pad: int
    ) -> None:
        with _quiet(library()) as transformers:
            kind = getattr(transformers, architecture, None)
            if kind is None:
                raise ValueError(
                    f"transformers {transformers.__version__} has no {architecture}: there is nothing to compare with"
                )
            model = kind.from_pretrained(directory, dtype=dtype, attn_implementation="eager").to(device).eval()
            self._plain = transformers.GenerationConfig
        for p in model.parameters():  # some are kept in fp32 (T5's in fp16): another function than all of them rounded
            p.data = p.data.to(dtype)
        if getattr(model.config, "pad_token_id", pad) is None:  # models of pictures have none to set
            model.config.pad_token_id = pad  # without one transformers classifies one text at a time
        self.model: Any = model
        self.narrow = False

    def widen(self) -> None:
        """From now on in fp64, with the weights as they were rounded: the same function, exactly."""
        self.model.double()

    def run(self, read: Callable[[Any], Made]) -> Made:
        """One pass; `read` runs the model and says what it made.

        In fp64 `narrow` says afterwards whether parts of it were computed in fp32.
        """
        with _Watching() as watching:  # type: ignore[no-untyped-call]
            made = read(self.model)
        self.narrow = watching.narrowed
        return made

    def greedy(self, ids: Tensor, mask: Tensor, *, new_tokens: int, pad: int, start: int | None) -> Tensor:
        """The tokens (B, new_tokens) it goes on with, whatever config files say of ending or sampling.

        Each text alone: some models of transformers count padding as positions, or fill it with NaN in fp64.
        start: what a decoder beside an encoder begins with, None without one.
        """
        plain = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False, "num_beams": 1}
        self.model.generation_config = self._plain(**plain, pad_token_id=pad, decoder_start_token_id=start)
        with torch.inference_mode(), _quiet(library()):
            texts = [one[tokens].unsqueeze(0) for one, tokens in zip(ids, mask, strict=True)]
            made = [self.model.generate(input_ids=x, attention_mask=torch.ones_like(x)) for x in texts]
        return torch.cat([x[:, -new_tokens:] for x in made])


class _Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes whether an operation on fp64 gave fp32: transformers' own casts of norms, softmax and rotary angles."""

    narrowed = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.dtype == torch.float32:
            wide = (a for a in args if isinstance(a, Tensor) and a.dtype == torch.float64)
            self.narrowed = self.narrowed or next(wide, None) is not None
        return out


@contextmanager
def _quiet(transformers: ModuleType) -> Iterator[Any]:
    """Without transformers' progress bars and warnings inside; as before afterwards."""
    logging = transformers.utils.logging
    bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield transformers
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
