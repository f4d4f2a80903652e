"""The output of a model: named tensors with attribute, key and tuple access, as in transformers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any, cast

from torch import Tensor, nn
from torch.utils import _pytree


class ModelOutput(OrderedDict[str, Any]):
    """The output of a model. A field that the model does not have is None and is left out of keys and tuple.

    >>> import torch
    >>> out = ModelOutput(logits=torch.zeros(1, 4, 13), last_hidden_state=torch.zeros(1, 4, 8))
    >>> out
    ModelOutput(logits (1, 4, 13), last_hidden_state (1, 4, 8))
    >>> out.logits is out["logits"] is out[0], out.loss, len(out.to_tuple())
    (True, None, 2)

    Fields, in the order of the tuple:
        loss: scalar, if labels were given.
        logits: by task: (B, N, V) tokens, (B, N, labels), (B, labels), or (B, C, H, W) reconstructed pixels.
        start_logits, end_logits: (B, N), question answering.
        logits_per_image, logits_per_text: (images, texts) and (texts, images), CLIP.
        seq_relationship_logits: (B, 2), whether the second text follows the first (0) or not (1), BERT pretraining.
        text_embeds, image_embeds: (B, e), normalised vectors of each text and image, CLIP.
        last_hidden_state: (B, N, d); the decoder's in an encoder–decoder, the text's in an image-text model.
        pooler_output: (B, d).
        hidden_states: the embedding and every block's output, if output_hidden_states.
        encoder_last_hidden_state, encoder_hidden_states: of the encoder, which reads the image in an image-text model.
    """

    loss: Tensor | None
    logits: Tensor | None
    start_logits: Tensor | None
    end_logits: Tensor | None
    logits_per_image: Tensor | None
    logits_per_text: Tensor | None
    seq_relationship_logits: Tensor | None
    text_embeds: Tensor | None
    image_embeds: Tensor | None
    last_hidden_state: Tensor
    pooler_output: Tensor | None
    hidden_states: tuple[Tensor, ...] | None
    encoder_last_hidden_state: Tensor | None
    encoder_hidden_states: tuple[Tensor, ...] | None

    def __init__(self, fields: Mapping[str, Any] | Iterable[tuple[str, Any]] = (), /, **named: Any) -> None:
        values = dict(fields) | named
        unknown = values.keys() - ORDER.keys()
        if unknown:
            raise TypeError(f"ModelOutput has no field {', '.join(sorted(unknown))}; it has {', '.join(ORDER)}")
        # accelerate and torch rebuild an output from its items, which must keep their order.
        super().__init__((name, values[name]) for name in ORDER if values.get(name) is not None)

    def __getattr__(self, name: str) -> Any:
        if name in ORDER:
            return self.get(name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ORDER:
            self[name] = value
        else:
            super().__setattr__(name, value)

    def __getitem__(self, key: str | int | slice) -> Any:
        return super().__getitem__(key) if isinstance(key, str) else self.to_tuple()[key]

    def to_tuple(self) -> tuple[Any, ...]:
        """The values of the fields that are not None."""
        return tuple(self.values())

    def __repr__(self) -> str:
        shown = (
            f"{name} {len(value)} layers" if isinstance(value, tuple) else f"{name} {tuple(value.shape)}"
            for name, value in self.items()
        )
        return f"{type(self).__name__}({', '.join(shown)})"


ORDER = dict.fromkeys(name for name in ModelOutput.__annotations__)


def _flatten(output: ModelOutput) -> tuple[list[Any], list[str]]:
    return list(output.values()), list(output)


def _unflatten(values: Iterable[Any], names: Any) -> ModelOutput:
    return ModelOutput(zip(cast("list[str]", names), values, strict=True))


# torch.export, torch.compile and DistributedDataParallel look for tensors inside.
_pytree.register_pytree_node(
    ModelOutput,
    _flatten,
    _unflatten,
    serialized_type_name="regard.models.outputs.ModelOutput",
    flatten_with_keys_fn=lambda output: (
        [(_pytree.MappingKey(name), value) for name, value in output.items()],
        list(output),
    ),
)


def named_logits(model: nn.Module, logits: Tensor | None) -> dict[str, Tensor | None]:
    """A text head's logits by field: start_logits and end_logits in question answering."""
    if logits is None or getattr(model, "task", None) != "question-answering":  # built by hand, it has no task
        return {"logits": logits}
    start, end = logits.unbind(-1)  # (B, N) each
    return {"start_logits": start, "end_logits": end}
