"""Text embeddings: the vectors of a text's tokens, pooled as the checkpoint's sentence-transformers files say.

modules.json lists what follows the model, 1_Pooling/config.json how it is pooled, sentence_bert_config.json how many
tokens it reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import torch
from torch import Tensor

from regard.models.checkpoint import read_side
from regard.nn.heads import first_token, last_token
from regard.tasks.inputs import Texts, batches, max_text_positions, run_model

if TYPE_CHECKING:
    from regard.models.dual_encoder import DualEncoder
    from regard.models.encoder_decoder import EncoderDecoder
    from regard.models.model import Model

Pooling = Literal["mean", "cls", "max", "last"]
KNOWN: dict[str, Pooling] = {
    "mean_tokens": "mean",
    "cls_token": "cls",
    "max_tokens": "max",
    "lasttoken": "last",
    "mean": "mean",
    "cls": "cls",
    "max": "max",
}
"""What 1_Pooling/config.json calls it, after "pooling_mode_" or, of late, as the value of "pooling_mode"."""


def embed(
    model: Model,
    texts: Texts,
    *,
    pooling: Pooling | None = None,
    normalize: bool | None = None,
    batch: int = 32,
    truncate: bool = False,
) -> Tensor:
    """One vector for each text, (len(texts), d), in their order; see `Model.embed`."""
    if model.kind in ("image-question", "image-caption", "dual-encoder", "image-text-matching"):
        raise ValueError(
            f"embed pools the tokens of a model that reads texts alone, and {model.family.title} joins or compares "
            f"them with images: {_instead(model)}"
        )
    if pooling is None or normalize is None:
        said = said_by(model.directory)
        pooling, normalize = said[0] if pooling is None else pooling, said[1] if normalize is None else normalize
    if pooling not in get_args(Pooling):
        raise ValueError(f"pooling must be one of {', '.join(get_args(Pooling))}, got {pooling!r}")
    values = read_side(model.directory, "sentence_bert_config.json", dict) or {}
    lengths = [n for n in (values.get("max_seq_length"), max_text_positions(model)) if isinstance(n, int)]
    if (
        values.get("do_lower_case") is True and isinstance(texts, Sequence) and not isinstance(texts, str)
    ):  # what is no list is told below
        texts = [_lowered(text) for text in texts]
    rows: dict[int, Tensor] = {}
    for numbers, part in batches(model, texts, batch, length=min(lengths, default=None), truncate=truncate):
        if model.kind == "encoder-decoder":
            with torch.no_grad():
                hidden = cast("EncoderDecoder", model).encode(part.ids, part.mask)
        else:
            hidden = run_model(model, part).last_hidden_state
        vectors = pool(hidden, part.mask, pooling)  # (b, d)
        if normalize:
            vectors = torch.nn.functional.normalize(vectors, dim=-1)
        rows |= dict(zip(numbers, vectors, strict=True))
    return torch.stack([rows[n] for n in range(len(rows))])


def _instead(model: Model) -> str:
    """What a model of texts and images has instead of `embed`."""
    if model.kind in ("image-question", "image-caption"):
        return "it makes no vector of a text alone"
    texts = "words = model.tokenizer.batch(texts); model.encode_text(words.ids, words.mask) gives vectors of texts"
    images = "model.encode_image(model.preprocessor(images).pixel_values) gives vectors of images"
    if model.kind == "dual-encoder":
        dual = cast("DualEncoder", model)
        if dual.text is None or dual.vision is None:
            return images if dual.text is None else texts
    return f"{texts}, {images}, and model.match(images, texts) compares both"


def pool(hidden: Tensor, mask: Tensor, pooling: Pooling) -> Tensor:
    """Vectors (B, N, d) of tokens to one for each text, (B, d); padding is left out.

    >>> hidden = torch.tensor([[[2.0], [4.0], [9.0]]])
    >>> mask = torch.tensor([[True, True, False]])
    >>> [pool(hidden, mask, how).item() for how in ("mean", "cls", "max", "last")]
    [3.0, 2.0, 4.0, 4.0]

    mask: (B, N), True = token, at least one in each row.
    """
    if pooling == "cls":
        return first_token(hidden, mask)
    if pooling == "last":
        return last_token(hidden, mask)
    shown = mask.unsqueeze(-1)  # (B, N, 1)
    if pooling == "max":
        return hidden.masked_fill(~shown, -torch.inf).amax(1)
    wide = torch.promote_types(hidden.dtype, torch.float32)  # a sum of hundreds in bf16 would lose most of its digits
    return (hidden.masked_fill(~shown, 0).sum(1, dtype=wide) / shown.sum(1)).to(hidden.dtype)


def said_by(directory: Path | None) -> tuple[Pooling, bool]:
    """The pooling that a checkpoint asks for, and whether vectors are brought to length 1; else "mean" and False.

    Raises ValueError for what sentence-transformers would do with it and `embed` does not.
    """
    modules = read_side(directory, "modules.json", list)
    if modules is None:
        return "mean", False
    assert directory is not None
    where = directory / "modules.json"
    kinds = []
    for module in modules:
        kind = module.get("type") if isinstance(module, dict) else None
        if not isinstance(kind, str):
            raise ValueError(f"{where} must list modules with a type, got {module!r:.80}")
        kinds.append(kind.rpartition(".")[2])
    unknown = [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")]
    if unknown or kinds.count("Pooling") > 1:
        raise ValueError(
            f"{where} lists {', '.join(kinds)}, and only Transformer, one Pooling and Normalize are known: give "
            "pooling= and normalize= to embed without the others"
        )
    pooled = [str(module.get("path")) for module, kind in zip(modules, kinds, strict=True) if kind == "Pooling"]
    return _pooling(directory, pooled[0]) if pooled else "mean", "Normalize" in kinds


def _pooling(directory: Path, folder: str) -> Pooling:
    if Path(folder).name != folder:
        raise ValueError(
            f"{directory / 'modules.json'}: the path of Pooling must be a folder beside it, got {folder!r}"
        )
    name = f"{folder}/config.json"
    values = read_side(directory, name, dict)
    if values is None:
        raise FileNotFoundError(f"modules.json asks for a Pooling, and {directory / name} is missing: give pooling=")
    asked = [key.removeprefix("pooling_mode_") for key, on in values.items() if key.startswith("pooling_mode_") and on]
    asked = [str(values["pooling_mode"])] if "pooling_mode" in values else asked
    if len(asked) != 1 or asked[0] not in KNOWN:
        found = " and ".join(asked) or "nothing"
        raise ValueError(
            f"{directory / name} asks for {found}, and one of {', '.join(get_args(Pooling))} is known: give pooling="
        )
    return KNOWN[asked[0]]


def _lowered(text: Any) -> Any:
    if isinstance(text, tuple):
        return tuple(map(_lowered, text))
    return text.lower() if isinstance(text, str) else text
