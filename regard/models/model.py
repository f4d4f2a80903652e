"""What every model has: where it came from, its checks of input, its result, its way back to a directory.

Its verbs are in verbs/text_verbs.py and verbs/picture_verbs.py. It does not know whether a model has one tower or two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils import _pytree

from regard.models.config import Config
from regard.tasks.image_verbs import PictureVerbs
from regard.tasks.text_verbs import TextVerbs

if TYPE_CHECKING:
    from regard.data.image_processing import Preprocessor
    from regard.data.tokenizer import Tokenizer
    from regard.models.family import Family
    from regard.nn.blocks import Tower

__all__ = ["Model", "Result"]


@dataclass(frozen=True, eq=False, repr=False)
class Result:
    """What a model makes of ids or pixels. What the model does not have is None.

    >>> Result(hidden=torch.zeros(1, 4, 8), logits=torch.zeros(1, 4, 13))
    Result(hidden (1, 4, 8), logits (1, 4, 13))

    hidden: (B, N, d), the last vectors; of the decoder in an encoder–decoder, of the text where there is one beside
      a picture.
    logits: by task: (B, N, V) words, (B, N, labels) tags, (B, N, 2) where an answer starts and ends, (B, labels),
      (B, C, H, W) rebuilt pixels, (pictures, texts) how well they match.
    pooled: (B, d), the family's own summary of a text.
    next_sentence: (B, 2), whether the second text follows the first (0) or not (1), beside the words.
    layers: what stood after the embedding and after each block, if every_layer was asked for.
    memory, memory_layers: of the encoder in an encoder–decoder; of the picture beside a text.
    text, picture: (B, e), one vector of length 1 for each, to be compared (CLIP, BLIP).
    """

    hidden: Tensor
    logits: Tensor | None = None
    pooled: Tensor | None = None
    next_sentence: Tensor | None = None
    layers: tuple[Tensor, ...] | None = None
    memory: Tensor | None = None
    memory_layers: tuple[Tensor, ...] | None = None
    text: Tensor | None = None
    picture: Tensor | None = None

    def __repr__(self) -> str:
        shapes = {name: tuple(t.shape) for name, t in vars(self).items() if isinstance(t, Tensor)}
        layers = {name: f"{len(ts)} layers" for name, ts in vars(self).items() if isinstance(ts, tuple)}
        return f"Result({', '.join(f'{name} {said}' for name, said in (shapes | layers).items())})"


_pytree.register_dataclass(Result, serialized_type_name="regard.models.model.Result")  # torch.export hands it on


class Model(TextVerbs, PictureVerbs):
    """A model of some family with one task: what `regard.load` gives, a `torch.nn.Module`.

    >>> from regard.models.families.transformer import transformer
    >>> tiny = transformer(13, start=1, end=2, pad=0, d_model=8, heads=2, layers=1, d_ff=16)
    >>> tiny.family.title, tiny.task, tiny.dtype
    ('Transformer', 'text2text-generation', torch.float32)

    config: of config.json.  task: a key of the family's tasks.
    directory: what it was loaded from.  ignored: keys of its files that the user says change nothing.
    """

    family: Family
    task: str
    directory: Path | None = None
    ignored: tuple[str, ...] = ()

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """What the weights are."""
        return next(self.parameters()).dtype

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer, opened on first use. Raises as `Tokenizer.open` does."""
        from regard.data.tokenizer import Tokenizer

        if self.directory is None:
            raise ValueError("this model was not loaded from a directory, so it has no tokenizer: set model.tokenizer")
        return Tokenizer.open(self.directory)

    @cached_property
    def preprocessor(self) -> Preprocessor:
        """How the checkpoint wants its pictures, opened on first use; or set it. Raises as `Preprocessor.open` does."""
        from regard.data.image_processing import Preprocessor

        remedy = 'set model.preprocessor = Preprocessor.of("ViT", {"size": 224}), or as it was trained'
        if self.directory is None:
            raise ValueError(
                "this model was not loaded from a directory, so nothing says how it wants its pictures: " + remedy
            )
        try:
            return Preprocessor.open(self.directory, ignore=self.ignored)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{error}. Then {remedy}") from None

    def save(self, directory: str | Path) -> None:
        """Write a directory that `regard.load` and `transformers` open: config.json, weights, tokenizer, preprocessor.

        >>> import tempfile, regard
        >>> from regard.models.families.transformer import transformer
        >>> tiny = transformer(13, start=1, end=2, pad=0, d_model=8, heads=2, layers=1, d_ff=16)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     tiny.save(folder)
        ...     sorted(path.name for path in Path(folder).iterdir())
        ['config.json', 'model.safetensors']

        Args:
            directory: made if it does not exist; a model that is there is replaced in one step.

        Raises:
            NotADirectoryError: there is a file of that name.
            ValueError: the weights are not those that `regard.load` would expect; nothing is written.
            OSError: writing failed; what was there is untouched.
        """
        from regard.models.saving import save

        save(self, directory)

    def tokens(self, ids: Sequence[int] | Tensor) -> list[str] | list[list[str]]:
        """Labels of ids (N,) or (B, N), for people and for the lens: `regard.watch(model, tokens=model.tokens(ids))`.

        Raises as `Tokenizer.tokens` does.
        """
        if isinstance(ids, Tensor) and ids.ndim == 2:
            return [self.tokenizer.tokens(row) for row in ids]
        return self.tokenizer.tokens(ids)

    def extra_repr(self) -> str:
        """What `print(model)` says before its parts."""
        return f"{self.family.title}, task={self.task!r}"

    def check_device(self, name: str, given: Tensor) -> None:
        """Raise ValueError unless a tensor is where the model is: torch would say so from deep inside a layer."""
        if given.device != self.device:
            raise ValueError(
                f"the model is on {self.device}, and {name} came on {given.device}: {name}.to(model.device)"
            )

    def check(self, ids: Tensor, mask: Tensor | None, vocabulary: int, most: int | None) -> Tensor | None:
        """Check ids and mask before anything runs; the mask, or None where it hides nothing.

        Raises TypeError or ValueError naming what came, what was expected and what to do.
        """
        if not isinstance(ids, Tensor) or ids.dtype not in (torch.int64, torch.int32):
            got = str(ids.dtype) if isinstance(ids, Tensor) else type(ids).__name__
            raise TypeError(
                f"ids must be a torch tensor of int64 or int32, (B, N), got {got}; "
                "model.tokenizer.batch([…]).ids makes them"
            )
        if ids.ndim != 2 or 0 in ids.shape:
            raise ValueError(f"ids must be (B, N) with at least one text and one token, got {tuple(ids.shape)}")
        self.check_device("ids", ids)
        n = ids.shape[1]
        if most is not None and n > most:
            raise ValueError(
                f"the text has {n} tokens, and the model has {most} positions: shorten it, or ask the tokenizer to "
                f"(tokenizer.batch(…, length={most}, truncate=True))"
            )
        if mask is not None and (
            not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != (len(ids), n)
        ):
            got = f"{mask.dtype} {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
            raise ValueError(f"mask must be booleans ({len(ids)}, {n}), True = token, got {got}")
        if mask is not None:
            self.check_device("mask", mask)
        if torch.compiler.is_compiling():
            return mask
        low, high = torch.aminmax(ids)
        facts = torch.stack([low, high, mask.all().to(ids.dtype) if mask is not None else low])
        first, last, whole = facts.tolist()  # one wait for the device
        if not 0 <= first <= last < vocabulary:
            wrong = first if first < 0 else last
            raise ValueError(
                f"token id {wrong} is outside the vocabulary of {vocabulary}: ids are 0 to {vocabulary - 1}"
            )
        return None if mask is not None and whole else mask

    def check_positions(self, ids: Tensor, positions: Tensor | None, tower: Tower) -> None:
        """Check positions that were given for ids (B, N), which a tower reads.

        Raises TypeError or ValueError naming what came, what was expected and what to do.
        """
        if positions is None:
            return
        if tower.embed.positions is None and tower.rotary is None:
            raise ValueError(f"{self.family.title} knows distances, no positions: leave out positions")
        if not isinstance(positions, Tensor) or positions.dtype not in (torch.int64, torch.int32):
            got = str(positions.dtype) if isinstance(positions, Tensor) else type(positions).__name__
            raise TypeError(f"positions must be a torch tensor of int64 or int32, (N,) or (B, N), got {got}")
        batch, n = ids.shape
        if positions.shape not in ((n,), (1, n), (batch, n)):
            raise ValueError(f"positions must be ({n},) or ({batch}, {n}) as ids, got {tuple(positions.shape)}")
        if torch.compiler.is_compiling():
            return
        first, last = torch.stack(torch.aminmax(positions)).tolist()
        most = tower.embed.max_positions
        if first < 0 or (most is not None and last >= most):
            limit = "0 or more" if most is None else f"0 to {most - 1}"
            raise ValueError(f"positions must be {limit}, got {first} to {last}")
