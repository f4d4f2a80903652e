"""The base class of all models: checkpoint, tokenizer, checks of inputs, and what training libraries ask of a model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from regard.models.config import Settings
from regard.models.losses import Targets, classification_loss, span_loss, token_loss
from regard.models.outputs import ModelOutput
from regard.nn.blocks import Tower
from regard.nn.heads import LanguageHead
from regard.tasks.image_verbs import PictureVerbs
from regard.tasks.text_verbs import TextVerbs

if TYPE_CHECKING:
    from regard.data.image_processing import Preprocessor
    from regard.data.tokenizer import Tokenizer
    from regard.models.family import Family

__all__ = ["ConfigValues", "Model", "ModelOutput"]


KEPT_OUT_OF_PREDICTIONS = ("last_hidden_state", "pooler_output", "encoder_last_hidden_state")
"""Fields that transformers.Trainer does not gather as predictions."""


class ConfigValues(SimpleNamespace):
    """config.json as attributes, for libraries that read `model.config`: transformers.Trainer, accelerate, PEFT."""

    def to_dict(self) -> dict[str, Any]:
        """All values by key."""
        return dict(vars(self))

    def to_json_string(self, use_diff: bool = True) -> str:
        """All values as JSON. `use_diff` is there for callers of transformers' method."""
        return json.dumps(vars(self), indent=2, sort_keys=True, default=str)

    def get_text_config(self, decoder: bool = False) -> ConfigValues:
        """The values themselves: a model has one config here."""
        return self


class Model(TextVerbs, PictureVerbs):
    """A model of some family with one task: what `regard.load` gives, a `torch.nn.Module`.

    >>> from regard.models.families.transformer import transformer
    >>> tiny = transformer(13, start=1, end=2, pad=0, d_model=8, heads=2, layers=1, d_ff=16)
    >>> tiny.family.title, tiny.task, tiny.dtype
    ('Transformer', 'generate', torch.float32)

    settings: of config.json.  task: a key of the family's tasks.
    directory: what it was loaded from.  ignored: keys of its files that the user says change nothing.
    """

    family: Family
    task: str
    directory: Path | None = None
    ignored: tuple[str, ...] = ()

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.settings = settings

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

        directory: made where it is not there.
        Raises as `regard.models.saving.save`.
        """
        from regard.models.saving import save

        save(self, directory)

    def tokens(self, input_ids: Sequence[int] | Tensor) -> list[str] | list[list[str]]:
        """Labels of input_ids (N,) or (B, N): `regard.watch(model, tokens=model.tokens(input_ids))`.

        Raises as `Tokenizer.tokens` does.
        """
        if isinstance(input_ids, Tensor) and input_ids.ndim == 2:
            return [self.tokenizer.tokens(row) for row in input_ids]
        return self.tokenizer.tokens(input_ids)

    def extra_repr(self) -> str:
        """What `print(model)` says before its parts."""
        return f"{self.family.title}, task={self.task!r}"

    # ------------------------------------------------------------------------------------ what training libraries ask

    @cached_property
    def config(self) -> ConfigValues:
        """The values of config.json as attributes."""
        values = {"model_type": self.family.model_type, "is_encoder_decoder": False, "problem_type": None}
        if getattr(self, "head", None) is not None:
            values["keys_to_ignore_at_inference"] = list(KEPT_OUT_OF_PREDICTIONS)
        return ConfigValues(**values | self.settings.values)

    @property
    def accepts_loss_kwargs(self) -> bool:
        """Does a call take `num_items_in_batch`, the labels of all accumulated batches? Language models do."""
        return isinstance(getattr(self, "head", None), LanguageHead)

    @property
    def loss_type(self) -> str | None:
        """The name of the loss in transformers, where labels are shifted by the model."""
        return None

    def get_input_embeddings(self) -> nn.Embedding:
        """The token embedding."""
        for name in ("tower", "encoder", "decoder", "text"):
            part = getattr(self, name, None)
            if isinstance(part, Model):
                return part.get_input_embeddings()
            if isinstance(part, Tower):
                return part.embed.tokens
        raise NotImplementedError(f"{self.family.title} with task {self.task!r} has no token embedding")

    def prepare_inputs_for_generation(self, input_ids: Tensor, **inputs: Any) -> dict[str, Any]:
        """The arguments of a call with these tokens. PEFT replaces this method; `generate` does not use it."""
        return {"input_ids": input_ids, **inputs}

    def save_pretrained(self, directory: str | Path, **options: Any) -> None:
        """`save`, under the name that training libraries call. Options of transformers' method are not read."""
        self.save(directory)

    def read_options(self, options: dict[str, Any]) -> Tensor | int | None:
        """Check the further arguments of a call that transformers' models take: `num_items_in_batch`, or None.

        Raises:
            TypeError: for an argument that no model takes.
            ValueError: for a value that asks for something a regard model does not return.
        """
        for name, value in options.items():
            if name not in OPTIONS:
                raise TypeError(f"{type(self).__name__}.forward() got an unexpected keyword argument {name!r}")
            if name in REFUSED and value is not None and value != REFUSED[name][0]:
                raise ValueError(f"{name}={value!r:.80} is not supported: {REFUSED[name][1]}")
        return options.get("num_items_in_batch")

    def name_logits(self, logits: Tensor | None) -> dict[str, Tensor | None]:
        """A text head's logits by field: start_logits and end_logits where it answers questions."""
        if logits is None or getattr(self, "task", None) not in QUESTION_ANSWERING:  # built by hand, it has no task
            return {"logits": logits}
        start, end = logits.unbind(-1)  # (B, N) each
        return {"start_logits": start, "end_logits": end}

    def text_loss(self, output: ModelOutput, targets: Targets, *, shift: bool = False) -> Tensor:
        """The loss of a text head's output, as transformers computes it for the task.

        Args:
            output: logits, as `name_logits` names them.
            targets: the labels of the call.
            shift: position i predicts label i + 1.

        Raises:
            ValueError: if the targets are not those of the task, or do not fit the logits.
        """
        if output.start_logits is not None and output.end_logits is not None:
            if targets.start_positions is None or targets.end_positions is None:
                raise ValueError("question answering learns from start_positions and end_positions (B,): give both")
            return span_loss(output.start_logits, output.end_logits, targets.start_positions, targets.end_positions)
        logits, labels = output.logits, targets.labels
        if logits is None or labels is None:
            raise ValueError(f"{self.family.title} with task {self.task!r} has no loss of these labels")
        if logits.ndim == 2:
            return self.classification_loss(logits, labels)
        return token_loss(logits, labels, shift=shift, items=targets.items)

    def classification_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss of scores (B, labels), by config.json's problem_type."""
        if labels.shape[:1] != logits.shape[:1]:
            raise ValueError(f"labels must be of {len(logits)} inputs, got {tuple(labels.shape)}")
        return classification_loss(logits, labels, self.config.problem_type)

    # ----------------------------------------------------------------------------------------------- checks of inputs

    def check_device(self, name: str, given: Tensor) -> None:
        """Raise ValueError unless a tensor is where the model is: torch would say so from deep inside a layer."""
        if given.device != self.device:
            raise ValueError(
                f"the model is on {self.device}, and {name} came on {given.device}: {name}.to(model.device)"
            )

    def check(
        self, input_ids: Tensor, attention_mask: Tensor | None, vocabulary: int, most: int | None
    ) -> Tensor | None:
        """Check input_ids and attention_mask before anything runs; the mask as booleans, or None if it hides nothing.

        Raises TypeError or ValueError naming what came, what was expected and what to do.
        """
        if not isinstance(input_ids, Tensor) or input_ids.dtype not in (torch.int64, torch.int32):
            got = str(input_ids.dtype) if isinstance(input_ids, Tensor) else type(input_ids).__name__
            raise TypeError(
                f"input_ids must be a torch tensor of int64 or int32, (B, N), got {got}; "
                "model.tokenizer.batch([…]).ids makes them"
            )
        if input_ids.ndim != 2 or 0 in input_ids.shape:
            raise ValueError(
                f"input_ids must be (B, N) with at least one text and one token, got {tuple(input_ids.shape)}"
            )
        self.check_device("input_ids", input_ids)
        n = input_ids.shape[1]
        if most is not None and n > most:
            raise ValueError(
                f"the text has {n} tokens, and the model has {most} positions: shorten it, or ask the tokenizer to "
                f"(tokenizer.batch(…, length={most}, truncate=True))"
            )
        mask = None
        if attention_mask is not None:
            mask = self.booleans("attention_mask", attention_mask, input_ids.shape)
        if torch.compiler.is_compiling():
            return mask
        low, high = torch.aminmax(input_ids)
        facts = torch.stack([low, high, low if mask is None else mask.all().to(input_ids.dtype)])
        first, last, whole = facts.tolist()  # one wait for the device
        if not 0 <= first <= last < vocabulary:
            wrong = first if first < 0 else last
            raise ValueError(
                f"token id {wrong} is outside the vocabulary of {vocabulary}: ids are 0 to {vocabulary - 1}"
            )
        return None if whole else mask

    def booleans(self, name: str, given: Tensor, shape: Sequence[int]) -> Tensor:
        """A mask of 1/0 or booleans as booleans. Raises ValueError for another dtype or shape."""
        if not isinstance(given, Tensor) or given.is_floating_point() or given.shape != tuple(shape):
            got = f"{given.dtype} {tuple(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
            raise ValueError(f"{name} must be 1/0 or booleans {tuple(shape)}, got {got}")
        self.check_device(name, given)
        if given.dtype == torch.bool:
            return given
        if not torch.compiler.is_compiling() and not bool(((given == 0) | (given == 1)).all()):
            raise ValueError(
                f"{name} must be 1/0 or booleans, got {given.dtype} {int(given.min())} to {int(given.max())}"
            )
        return given == 1

    def check_positions(self, input_ids: Tensor, position_ids: Tensor | None, tower: Tower) -> None:
        """Check position_ids that were given for input_ids (B, N), which a tower reads.

        Raises TypeError or ValueError naming what came, what was expected and what to do.
        """
        if position_ids is None:
            return
        if tower.embed.positions is None and tower.rotary is None:
            raise ValueError(f"{self.family.title} has relative positions alone: leave out position_ids")
        if not isinstance(position_ids, Tensor) or position_ids.dtype not in (torch.int64, torch.int32):
            got = str(position_ids.dtype) if isinstance(position_ids, Tensor) else type(position_ids).__name__
            raise TypeError(f"position_ids must be a torch tensor of int64 or int32, (N,) or (B, N), got {got}")
        batch, n = input_ids.shape
        if position_ids.shape not in ((n,), (1, n), (batch, n)):
            raise ValueError(
                f"position_ids must be ({n},) or ({batch}, {n}) as input_ids, got {tuple(position_ids.shape)}"
            )
        if torch.compiler.is_compiling():
            return
        first, last = torch.stack(torch.aminmax(position_ids)).tolist()
        most = tower.embed.most
        if first < 0 or (most is not None and last >= most):
            limit = "0 or more" if most is None else f"0 to {most - 1}"
            raise ValueError(f"position_ids must be {limit}, got {first} to {last}")


QUESTION_ANSWERING = ("question-answering", "answer")

# Arguments that callers written for transformers pass along: value that changes nothing, and what to do instead.
REFUSED: dict[str, tuple[Any, str]] = {
    "inputs_embeds": (None, "give input_ids"),
    "output_attentions": (False, "regard.watch(model) gives the attention weights"),
    "past_key_values": (None, "model.generate keeps its own cache"),
    "return_dict": (True, "the output is a ModelOutput; out.to_tuple() is the tuple"),
}
OPTIONS = {*REFUSED, "use_cache", "num_items_in_batch"}
