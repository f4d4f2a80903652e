"""Training losses, as transformers computes them. A label of -100 is ignored."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import (
    binary_cross_entropy_with_logits,
    cross_entropy,
    l1_loss,
    linear,
    log_softmax,
    mse_loss,
    pad,
)

from regard.checks import may_read
from regard.nn.blocks import HeadInput, LanguageHead, PretrainingHead

if TYPE_CHECKING:
    from regard.models.model import Model
    from regard.models.outputs import ModelOutput

IGNORED = -100
CELLS = 1 << 28  # logits at a time: 1 GiB in fp32; smaller products would not fill a large GPU


class Targets(NamedTuple):
    """The labels of one call of a text model."""

    labels: Tensor | None  # (B, N) or (B,)
    start_positions: Tensor | None = None  # (B,)
    end_positions: Tensor | None = None  # (B,)
    items: Tensor | int | None = None  # labels of all accumulated batches
    smoothing: float = 0.0  # label smoothing, of token labels
    most: int | None = None  # labels that there are at most


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
    _check(labels, logits.shape[:-1])
    if shift:
        labels = next_labels(labels)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2)
    labels = labels.to(logits.device, torch.long).flatten()
    if items is None:
        return cross_entropy(wide, labels, ignore_index=IGNORED, label_smoothing=smoothing)
    total = cross_entropy(wide, labels, ignore_index=IGNORED, label_smoothing=smoothing, reduction="sum")
    return total / (items.to(total.device) if isinstance(items, Tensor) else items)


def next_labels(labels: Tensor) -> Tensor:
    """Labels (B, N) moved one position to the left, so that position i has label i + 1; the last one has none."""
    return pad(labels, (0, 1), value=IGNORED)[..., 1:]


def linear_token_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    *,
    smoothing: float = 0.0,
    items: Tensor | int | None = None,
) -> Tensor:
    """`token_loss` of the logits `hidden @ weight.T + bias`, which are never built as a whole.

    >>> hidden, weight, labels = torch.randn(2, 5, 3), torch.randn(7, 3), torch.randint(7, (2, 5))
    >>> torch.allclose(linear_token_loss(hidden, weight, None, labels), token_loss(hidden @ weight.T, labels))
    True

    A few rows of logits exist at a time; their gradients are computed in the same pass, so that nothing is computed
    twice. torch.nn.functional.linear_cross_entropy (2.13) has no label smoothing and is not compiled.

    hidden: (…, d).  weight: (V, d).  bias: (V,), or None.  labels: (…).  smoothing, items: as in `token_loss`.
    """
    _check(labels, hidden.shape[:-1])
    device = hidden.device.type
    dtype = hidden.dtype
    if dtype != torch.float64 and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    labels = labels.to(hidden.device, torch.long).flatten()
    arguments = (hidden.flatten(0, -2), weight, bias, labels, smoothing, dtype, torch.is_grad_enabled())
    total = cast(Tensor, LinearCrossEntropy.apply(*arguments))  # type: ignore[no-untyped-call]
    if items is None:
        return total / (labels != IGNORED).sum()
    return total / (items.to(total.device) if isinstance(items, Tensor) else items)


class LinearCrossEntropy(torch.autograd.Function):
    """The sum of the cross-entropies of hidden (R, d) times weight (V, d), for labels (R,)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        smoothing: float,
        dtype: torch.dtype,
        differentiate: bool,
    ) -> Tensor:
        """dtype: of the products.  differentiate: compute the gradients, too."""
        needed = [differentiate and need for need in ctx.needs_input_grad[:3]]
        wide = torch.promote_types(dtype, torch.float32)
        rows, vocabulary = len(hidden), len(weight)
        matrix, offsets = weight.to(dtype), None if bias is None else bias.to(dtype)
        grad_hidden = torch.empty_like(hidden) if needed[0] else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if needed[1] else None
        grad_bias = torch.zeros(vocabulary, dtype=wide, device=weight.device) if needed[2] else None
        total = torch.zeros((), dtype=wide, device=hidden.device)
        pieces = max(1, -(-rows * vocabulary // CELLS))
        size = max(1, -(-rows // pieces))
        for start in range(0, rows, size):
            x, label = hidden[start : start + size].to(dtype), labels[start : start + size, None]  # (r, d), (r, 1)
            valid = label != IGNORED
            losses, grad = _losses_and_gradient(
                x, matrix, offsets, label.masked_fill(~valid, 0), smoothing, any(needed)
            )
            total = total + losses.masked_fill(~valid, 0).sum()
            # Rows without a label are left out on the narrow side of each product.
            if grad is not None and grad_hidden is not None:
                grad_hidden[start : start + size] = (grad @ matrix).masked_fill(~valid, 0)
            if grad is not None and grad_weight is not None:
                grad_weight += grad.t() @ x.masked_fill(~valid, 0)
            if grad is not None and grad_bias is not None:
                grad_bias += (grad.t() @ valid.to(dtype))[:, 0]
            del grad  # before the next one is made
        ctx.save_for_backward(
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if bias is None or grad_bias is None else grad_bias.to(bias.dtype),
        )
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Scale what the forward pass computed; the factor is not rounded to a narrow dtype."""
        grads = (None if kept is None else (kept.to(grad.dtype) * grad).to(kept.dtype) for kept in ctx.saved_tensors)
        return (*grads, None, None, None, None)


def _losses_and_gradient(
    x: Tensor, matrix: Tensor, bias: Tensor | None, label: Tensor, smoothing: float, differentiate: bool
) -> tuple[Tensor, Tensor | None]:
    """The losses (r, 1) of a few rows x (r, d), and the gradient of their sum with respect to the logits (r, V)."""
    logp = log_softmax(linear(x, matrix, bias), -1, dtype=torch.promote_types(x.dtype, torch.float32))  # (r, V)
    picked = logp.gather(1, label)
    losses = -picked if not smoothing else (smoothing - 1) * picked - smoothing * logp.mean(1, keepdim=True)
    if not differentiate:
        return losses, None
    # Softmax minus target; the label's own term is rounded after the subtraction, not before.
    grad, uniform = logp.exp_(), smoothing / len(matrix)
    if smoothing:
        grad -= uniform
    grad = grad.to(x.dtype)
    return losses, grad.scatter_(1, label, (picked.exp() - uniform - (1 - smoothing)).to(x.dtype))


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
        ValueError: if problem_type is another, or there are not as many labels as inputs.
    """
    if labels.shape[:1] != logits.shape[:1]:
        raise ValueError(f"labels must be of {len(logits)} inputs, got {tuple(labels.shape)}")
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

    Logits are (B, N), positions (B,).
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


# ------------------------------------------------------------------------------------------- losses of a model's output


def text_loss(model: Model, output: ModelOutput, targets: Targets, *, shift: bool = False) -> Tensor:
    """The loss of a text head's output, as transformers computes it for the task. shift: as in `token_loss`.

    Raises ValueError if the targets are not those of the task, or do not fit the logits.
    """
    if output.start_logits is not None and output.end_logits is not None:
        if targets.start_positions is None or targets.end_positions is None:
            raise ValueError("question answering learns from start_positions and end_positions (B,): give both")
        return span_loss(output.start_logits, output.end_logits, targets.start_positions, targets.end_positions)
    logits, labels = output.logits, targets.labels
    if logits is None or labels is None:
        raise ValueError(f"{model.family.title} with task {model.task!r} has no loss of these labels")
    if logits.ndim == 2:
        return classification_loss(logits, labels, model.config.get("problem_type"))
    return token_loss(logits, labels, shift=shift, smoothing=targets.smoothing, items=targets.items)


def language_head(model: Model) -> LanguageHead | None:
    """The language-model head of a text model, whose loss `linear_loss` computes without its logits."""
    head = getattr(model, "head", None)
    head = head.words if isinstance(head, PretrainingHead) else head
    return head if isinstance(head, LanguageHead) else None


def linear_loss(head: LanguageHead, inputs: HeadInput, targets: Targets, *, shift: bool = False) -> Tensor:
    """`text_loss` of a language-model head, without its logits."""
    hidden, labels = inputs.last_hidden_state, targets.labels
    assert labels is not None
    matrix = head.matrix(inputs.embedding)
    if matrix is None:
        return token_loss(head(inputs), labels, shift=shift, smoothing=targets.smoothing, items=targets.items)
    if labels.shape != hidden.shape[:2]:
        raise ValueError(f"labels must be {tuple(hidden.shape[:2])} as input_ids, got {tuple(labels.shape)}")
    labels = (next_labels(labels) if shift else labels).to(hidden.device)
    labelled = (labels != IGNORED).flatten()  # (B·N,)
    most = targets.most
    if may_read(hidden, training=True):  # elsewhere the number of labels is not known without waiting
        hidden, labels = hidden.flatten(0, 1)[labelled], labels.flatten()[labelled]  # (L, d), (L,)
    elif most is not None and most < len(labelled):
        first = torch.argsort(~labelled, stable=True)[:most]  # those with a label, then others
        hidden, labels = hidden.flatten(0, 1).index_select(0, first), labels.flatten()[first]
    loss = linear_token_loss(head.vectors(hidden), *matrix, labels, smoothing=targets.smoothing, items=targets.items)
    return loss if most is None else torch.where(labelled.sum() <= most, loss, torch.nan)


def _check(labels: Tensor, shape: torch.Size) -> None:
    if labels.shape != shape:
        raise ValueError(f"labels must be {tuple(shape)} as the logits, got {tuple(labels.shape)}")
