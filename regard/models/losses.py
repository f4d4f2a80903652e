"""Training losses, as transformers computes them. A label of -100 is ignored."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, l1_loss, mse_loss, pad

__all__ = [
    "IGNORED",
    "Targets",
    "classification_loss",
    "contrastive_loss",
    "reconstruction_loss",
    "span_loss",
    "token_loss",
]

IGNORED = -100


class Targets(NamedTuple):
    """What a text model learns from in one call."""

    labels: Tensor | None  # (B, N) or (B,)
    start_positions: Tensor | None = None  # (B,)
    end_positions: Tensor | None = None  # (B,)
    items: Tensor | int | None = None  # labels of all accumulated batches

    def __bool__(self) -> bool:
        return any(target is not None for target in self[:3])


def token_loss(
    logits: Tensor, labels: Tensor, *, shift: bool = False, smoothing: float = 0.0, items: Tensor | int | None = None
) -> Tensor:
    """Cross-entropy of each position's label.

    >>> logits = torch.tensor([[[0.0, 9.0], [9.0, 0.0], [0.0, 0.0]]])
    >>> round(float(token_loss(logits, torch.tensor([[0, 1, 0]]), shift=True)), 4)
    0.0001

    Args:
        logits: (B, N, V).
        labels: (B, N).
        shift: position i predicts label i + 1 (a causal language model).
        smoothing: label smoothing.
        items: divide the sum by this number instead of the number of labels, as with gradient accumulation.
    """
    _check(labels, logits.shape[:-1], "labels")
    if shift:
        labels = pad(labels, (0, 1), value=IGNORED)[..., 1:]
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2)
    labels = labels.to(logits.device, torch.long).flatten()
    if items is None:
        return cross_entropy(wide, labels, ignore_index=IGNORED, label_smoothing=smoothing)
    total = cross_entropy(wide, labels, ignore_index=IGNORED, label_smoothing=smoothing, reduction="sum")
    return total / (items.to(total.device) if isinstance(items, Tensor) else items)


def classification_loss(logits: Tensor, labels: Tensor, problem_type: str | None = None) -> Tensor:
    """The loss of one score per label and input.

    >>> classification_loss(torch.tensor([[0.0, 0.0]]), torch.tensor([1]))
    tensor(0.6931)

    Args:
        logits: (B, labels).
        labels: (B,) label numbers or, of one output, targets; (B, labels) for several targets or labels at once.
        problem_type: "regression", "single_label_classification" or "multi_label_classification"; None decides by the
            number of outputs and the dtype of the labels.

    Raises:
        ValueError: if problem_type is another.
    """
    count, labels = logits.shape[-1], labels.to(logits.device)
    if problem_type is None:
        whole = not labels.is_floating_point() and labels.dtype != torch.bool
        several = "single_label_classification" if whole else "multi_label_classification"
        problem_type = "regression" if count == 1 else several
    match problem_type:
        case "regression":
            return mse_loss(logits.squeeze(), labels.squeeze().to(logits.dtype))
        case "single_label_classification":
            return cross_entropy(logits.reshape(-1, count), labels.reshape(-1).long(), ignore_index=IGNORED)
        case "multi_label_classification":
            return binary_cross_entropy_with_logits(logits, labels.to(logits.dtype))
    raise ValueError(f"unknown problem_type {problem_type!r:.80}")


def span_loss(start_logits: Tensor, end_logits: Tensor, start_positions: Tensor, end_positions: Tensor) -> Tensor:
    """Mean of two cross-entropies: where an answer starts and where it ends. Positions beyond the text are ignored.

    >>> zeros = torch.zeros(1, 4)
    >>> span_loss(zeros, zeros, torch.tensor([1]), torch.tensor([2]))
    tensor(1.3863)

    Args:
        start_logits: (B, N).
        end_logits: (B, N).
        start_positions: (B,).
        end_positions: (B,).
    """
    n = start_logits.shape[1]
    losses = [
        cross_entropy(logits, positions.to(logits.device).reshape(-1).clamp(0, n), ignore_index=n)
        for logits, positions in ((start_logits, start_positions), (end_logits, end_positions))
    ]
    return (losses[0] + losses[1]) / 2


def contrastive_loss(logits_per_text: Tensor) -> Tensor:
    """CLIP's loss of similarities (B, B): text i belongs to image i.

    >>> contrastive_loss(torch.zeros(2, 2))
    tensor(0.6931)
    """
    own = torch.arange(len(logits_per_text), device=logits_per_text.device)
    return (cross_entropy(logits_per_text, own) + cross_entropy(logits_per_text.t(), own)) / 2


def reconstruction_loss(pixels: Tensor, pixel_values: Tensor, masked: Tensor) -> Tensor:
    """Mean absolute error of reconstructed pixels (B, C, H, W) in the masked patches (B, rows, columns)."""
    high, wide = (pixels.shape[2] // masked.shape[1], pixels.shape[3] // masked.shape[2])
    mask = masked.repeat_interleave(high, 1).repeat_interleave(wide, 2).unsqueeze(1)  # (B, 1, H, W)
    error = l1_loss(pixel_values, pixels, reduction="none")
    return (error * mask).sum() / (mask.sum() + 1e-5) / pixels.shape[1]


def _check(labels: Tensor, shape: torch.Size, name: str) -> None:
    if labels.shape != shape:
        raise ValueError(f"{name} must be {tuple(shape)} as the logits, got {tuple(labels.shape)}")
