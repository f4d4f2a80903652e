"""The operation: `attention` computes it and reports each call to the observers; `steps` keeps every intermediate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard import tables
from regard.backends import choose, place_of_launch, prepare_launch, reference
from regard.backends.call import Call, as_given, prepare
from regard.checks import check_dense, check_int
from regard.locale import Lang, translate

__all__ = [
    "Editor",
    "Observer",
    "RowObserver",
    "Steps",
    "add_editor",
    "attention",
    "observe",
    "observe_rows",
    "observed",
    "remove_editor",
    "steps",
    "tell_rows",
    "unobserve",
    "unobserve_rows",
]

Observer = Callable[[Call, str, Any], None]
"""Called with the checked call, the backend that ran it, and its output (B, H, Nq, Dv)."""

Editor = Callable[[Call, Any], tuple[Call, Any]]
"""Called with the checked call and its output before the observers; returns what stands in their place."""

RowObserver = Callable[[Sequence[Sequence[int]], int], None]
"""Called after a generation whose rows moved or ended early, see `observe_rows`."""

_observers: tuple[Observer, ...] = ()
_editors: tuple[Editor, ...] = ()
_row_observers: tuple[RowObserver, ...] = ()


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    mask: object = None,
    bias: object = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Any = None,
    dropout: float = 0.0,
    backend: str = "auto",
    chunk: int | None = None,
) -> Any:
    """softmax(q·kᵀ·scale)·v, by the fastest backend that computes exactly this call.

    >>> import numpy as np, regard
    >>> x = np.array([[1.0, 0.0], [0.0, 1.0]])
    >>> regard.attention(x, x, x, mask=regard.masks.causal()).round(3)
    array([[1.  , 0.  ],
           [0.33, 0.67]])

    Args:
        q: queries (…, H, Nq, D); also (N, D) and (B, N, D). NumPy in, NumPy out; torch in, torch out.
        k: keys (…, Hkv, Nk, D); query head h reads key head h // (H / Hkv).
        v: values (…, Hkv, Nk, Dv).
        mask: a regard.masks value, or booleans that broadcast to the weights (…, H, Nq, Nk); True = may look.
        bias: a regard.positions bias, or floats that broadcast to the weights; added after scale and softcap.
        scale: factor of the scores; default 1/√D.
        softcap: scores become softcap·tanh(scores/softcap); None for no cap.
        sinks: (H,), one logit per head that joins the softmax and has no value.
        dropout: probability of zeroing a weight, the others growing by 1/(1 − p); applied whenever above 0.
        backend: "auto", or one of "reference", "tiled", "sdpa", "flex", "sparse", "short".
        chunk: compute so many queries at a time, each against all keys, as textbooks do to save memory: B·H·chunk·Nk
            scores exist at once instead of B·H·Nq·Nk, and the backward pass computes them again. The result is the
            same. Runs on "tiled", which without chunk cuts the keys too and needs O(N).

    Returns:
        The output (…, H, Nq, Dv) in q's dtype. A row that sees nothing is 0, with gradient 0.

    Raises:
        TypeError: an argument of the wrong kind or dtype.
        ValueError: sizes that do not fit, or a named backend that cannot do the call.
    """
    # 1. A call like an earlier one goes straight to its kernel. Editors and observers get every call, checked.
    place = launch = None
    plain = backend == "auto" and softcap is None and sinks is None and chunk is None and dropout == 0.0
    if plain and not torch.compiler.is_compiling() and not (_observers or _editors):
        place = place_of_launch(q, k, v, mask, bias, scale)
        if place is not None and (launch := place[0].get(place[1])) is not None:
            return launch(q, k, v, mask, bias)
    # 2. Check the arguments and choose a backend.
    call = prepare(q, k, v, mask=mask, bias=bias, scale=scale, softcap=softcap, sinks=sinks, dropout=dropout)
    if chunk is not None:
        call = replace(call, chunk=check_int("chunk", chunk))
        if backend not in ("auto", "tiled"):
            raise ValueError(
                f"chunk={chunk} runs on the backend 'tiled', got backend={backend!r}: leave out one of them"
            )
        backend = "tiled"
    chosen = choose(call, backend)
    if place is not None and (launch := prepare_launch(call, chosen, place)) is not None:
        return launch(q, k, v, mask, bias)
    # 3. Compute, and call the editors and observers.
    with as_given(call.device):
        out = _empty(call) if 0 in call.sizes or 0 in v.shape else chosen.run(call)
    if call.numpy and isinstance(out, Tensor):
        out = out.detach().numpy()
    # In this order: a traced call must not depend on who observes, or torch.compile would compile it anew for them.
    if not torch.compiler.is_compiling() and (_observers or _editors):
        for editor in _editors:
            call, out = editor(call, out)
        for observer in _observers:
            observer(call, chosen.__name__.rpartition(".")[2], out)
    return out if q.ndim == 4 else out.reshape(*q.shape[:-1], v.shape[-1])


def _empty(call: Call) -> Any:
    """No queries: an empty result. No keys: zeros, still connected to the inputs for autograd."""
    group = call.q.shape[1] // max(1, call.k.shape[1])
    k, v = ((x.repeat(group, 1) if call.numpy else x.repeat_interleave(group, 1)) for x in (call.k, call.v))
    out = (call.q @ k.swapaxes(-1, -2)) @ v
    if call.wants_gradient:
        for extra in call.extras:
            out = out + extra.reshape(-1)[:0].sum()
    return out


# ------------------------------------------------------------------------------------------------------------ observers


def observe(observer: Observer) -> None:
    """Call `observer` after every later call of `attention`, in any thread.

    >>> import numpy as np, regard
    >>> from regard.op import observe, unobserve
    >>> seen = []
    >>> def note(call, backend, output):
    ...     seen.append((call.sizes, backend, output.shape))
    >>> observe(note)
    >>> _ = regard.attention(np.eye(3), np.eye(3), np.eye(3))
    >>> unobserve(note)
    >>> seen
    [((1, 1, 3, 3), 'sdpa', (1, 1, 3, 3))]

    Args:
        observer: called with the checked call, the backend's name and its output; what it raises, `attention` raises.
            Calls inside torch.compile are traced and not reported.
    """
    global _observers
    _observers = (*_observers, observer)


def observed() -> bool:
    """Whether anybody observes or edits. CUDA graphs report nothing, so generation then does not replay them."""
    return bool(_observers or _editors)


def unobserve(observer: Observer) -> None:
    """Remove an observer. Raises ValueError if it was not added.

    >>> unobserve(print)
    Traceback (most recent call last):
        ...
    ValueError: <built-in function print> does not observe; observe(…) comes first
    """
    global _observers
    if observer not in _observers:
        raise ValueError(f"{observer!r} does not observe; observe(…) comes first")
    index = _observers.index(observer)
    _observers = _observers[:index] + _observers[index + 1 :]


def add_editor(editor: Editor) -> None:
    """Let `editor` replace the output of every later call of `attention`, in any thread; `regard.edit` does."""
    global _editors
    _editors = (*_editors, editor)


def remove_editor(editor: Editor) -> None:
    """Remove an editor, if it was added."""
    global _editors
    _editors = tuple(other for other in _editors if other != editor)


def observe_rows(observer: RowObserver) -> None:
    """Call `observer` after a generation whose sequences moved between batch rows (beam search) or ended early.

    Args:
        observer: called, in the thread of the generation, with the rows (for each returned sequence its batch row in
            each pass of the model, −1 after its end) and the number of passes.
    """
    global _row_observers
    _row_observers = (*_row_observers, observer)


def unobserve_rows(observer: RowObserver) -> None:
    """Remove an observer of rows, if it was added."""
    global _row_observers
    _row_observers = tuple(other for other in _row_observers if other != observer)


def tell_rows(rows: Sequence[Sequence[int]] | Tensor, passes: int) -> None:
    """Report where the sequences of a generation were. A tensor is read, which waits, only if there is an observer."""
    if _row_observers:
        listed = rows.tolist() if isinstance(rows, Tensor) else rows
        for observer in _row_observers:
            observer(listed, passes)


# ---------------------------------------------------------------------------------------------------------------- steps


STEP_NAMES = ("scores", "scaled", "capped", "biased", "masked", "weights", "output")
MOST_SHOWN = 12  # rows and columns of a matrix that are printed

STEP_MEANINGS = {
    "x": "the input, one row per token",
    "q": "what each token asks for",
    "k": "what each token offers to be found by",
    "v": "what each token hands over",
    "scores": "how well each query fits each key",
    "scaled": "kept small, so that the softmax does not saturate",
    "capped": "bent so that no score passes the cap",
    "biased": "the position's or the user's term added",
    "masked": "what must not be seen set to −∞",
    "weights": "each row a share of attention: sums to 1",
    "output": "the values, averaged by those shares",
}


@dataclass(frozen=True, eq=False, repr=False)
class Steps:
    """Every intermediate of one attention. Arrays are of the input's kind and keep the input's leading axes.

    In torch each is computed from the ones before it as they stand here, so that gradients with respect to them exist:

    >>> import torch, regard
    >>> x = torch.eye(2, requires_grad=True)
    >>> s = regard.steps(x, x, x)
    >>> torch.autograd.grad(s.output.sum(), s.weights)[0]
    tensor([[1., 1.],
            [1., 1.]])

    Prints as a table in the terminal and in a notebook; `text(lang="ko")` prints it in Korean.
    """

    scores: Any  # (…, Nq, Nk)
    scaled: Any  # (…, Nq, Nk)
    capped: Any  # (…, Nq, Nk)
    biased: Any  # (…, Nq, Nk)
    masked: Any  # (…, Nq, Nk)
    weights: Any  # (…, Nq, Nk)
    output: Any  # (…, Nq, Dv)
    q: Any
    k: Any
    v: Any
    x: Any  # None unless the steps began at x
    labels: tuple[str, ...] | None
    key_labels: tuple[str, ...] | None
    formulas: dict[str, str]
    unchanged: frozenset[str]
    has_sinks: bool

    def __repr__(self) -> str:
        return self.text()

    def text(self, lang: Lang = "en", *, batch: int = 0, head: int = 0) -> str:
        """The steps as a text table, then Q, K, V and each matrix that changed something, with its labels.

        Args:
            lang: "en" or "ko".
            batch: batch row to print, where there are several.
            head: head to print, where there are several.
        """
        if lang not in ("en", "ko"):
            raise ValueError(f"lang must be 'en' or 'ko', got {lang!r}")
        parts = [self._title(lang), tables.text(*self._summary(lang))]
        for name in self._printed():
            parts.append(f"{name}{self._formula(name)}{self._which(lang, batch, head)}")
            headers, rows = self._matrix(name, lang, batch, head)
            parts.append(tables.text(headers, rows, right=range(1, len(headers))))
        return "\n\n".join(parts)

    def _repr_html_(self) -> str:
        parts = [f"<p>{escape(self._title('en'))}</p>", tables.html(*self._summary("en"))]
        for name in self._printed():
            headers, rows = self._matrix(name, "en", 0, 0)
            parts.append(f"<p><b>{name}</b>{escape(self._formula(name) + self._which('en', 0, 0))}</p>")
            parts.append(tables.html(headers, rows, right=range(1, len(headers))))
        return "\n".join(parts)

    def matrix(self, name: str, batch: int = 0, head: int = 0) -> np.ndarray[Any, Any]:
        """One batch row and head of x, q, k, v or a step, as NumPy floats: for k and v those that the head reads.

        >>> x = np.eye(2, 3)
        >>> steps(x, x, x).matrix("k").shape
        (2, 3)

        Raises:
            IndexError: a batch row or head out of range.
        """
        values = getattr(self, name)
        if name in ("k", "v") and self.q.ndim > 3:
            pick(self.q, batch, head)
            head //= self.q.shape[-3] // values.shape[-3]
        elif name == "x" and self.x.shape[:-2] != self.scores.shape[:-2]:  # heads were split off: all before N is batch
            values, head = values.reshape(-1, *values.shape[-2:]), 0
        return pick(values, batch, head)

    def _printed(self) -> list[str]:
        inputs = ("q", "k", "v") if self.x is None else ("x", "q", "k", "v")
        return [name for name in (*inputs, *STEP_NAMES) if name not in self.unchanged]

    def _formula(self, name: str) -> str:
        return "" if self.formulas[name] == name else f" = {self.formulas[name]}"

    def _title(self, lang: Lang) -> str:
        (nq, nk), d = self.scores.shape[-2:], self.q.shape[-1]
        return translate("Attention step by step: {nq} queries, {nk} keys, head size {d}", lang, nq=nq, nk=nk, d=d)

    def _summary(self, lang: Lang) -> tuple[list[str], list[list[str]]]:
        rows = []
        for name in (*(() if self.x is None else ("x",)), "q", "k", "v", *STEP_NAMES):
            if name in self.unchanged:
                reason = {"capped": "no softcap", "biased": "no bias", "masked": "no mask"}[name]
                meaning = translate("unchanged: {why}", lang, why=translate(reason, lang))
            elif name == "weights" and self.has_sinks:
                meaning = translate("each row a share of attention; the sink takes the rest", lang)
            else:
                meaning = translate(STEP_MEANINGS[name], lang)
            rows.append([name, self.formulas[name], str(tuple(getattr(self, name).shape)), meaning])
        return translate("step|formula|shape|meaning", lang).split("|"), rows

    def _which(self, lang: Lang, batch: int, head: int) -> str:
        lead = self.scores.shape[:-2]
        if not lead or all(n == 1 for n in lead):
            return ""
        values = {"batch": batch, "head": head, "shape": tuple(lead)}
        return f"   ({translate('shown: batch {batch}, head {head} of {shape}', lang, **values)})"

    def _matrix(self, name: str, lang: Lang, batch: int, head: int) -> tuple[list[str], list[list[str]]]:
        values = self.matrix(name, batch, head)
        n, m = (min(size, MOST_SHOWN) for size in values.shape)
        columns = None if name in ("x", "q", "k", "v", "output") else self.key_labels
        headers = ["", *(columns or [str(j) for j in range(values.shape[1])])[:m]]
        names = (self.key_labels if name in ("k", "v") else self.labels) or [str(i) for i in range(values.shape[0])]
        rows = [[names[i], *(tables.number(float(value)) for value in values[i, :m])] for i in range(n)]
        if values.shape != (n, m):
            rows.append([f"… {translate('the first {n} shown', lang, n=MOST_SHOWN)}", *("" for _ in range(m))])
        return headers, rows


def steps(
    q: Any = None,
    k: Any = None,
    v: Any = None,
    *,
    x: Any = None,
    w_q: Any = None,
    w_k: Any = None,
    w_v: Any = None,
    num_heads: int = 1,
    mask: object = None,
    bias: object = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Any = None,
    labels: Sequence[str] | None = None,
    key_labels: Sequence[str] | None = None,
) -> Steps:
    """The same operation with every intermediate kept and named: for small inputs, for teaching.

    >>> import numpy as np, regard
    >>> s = regard.steps(np.eye(2), np.eye(2), np.eye(2), labels=["The", "cat"])
    >>> s.weights.round(2)
    array([[0.67, 0.33],
           [0.33, 0.67]])

    Args:
        q: as in `attention`, like k, v, mask, bias, scale, softcap and sinks.
        k: keys.
        v: values.
        x: (…, N, d_model), instead of q, k and v, with the matrices w_q, w_k and w_v; q = x·w_q and so on.
        w_q: (d_model, num_heads·D), like w_k and w_v.
        w_k: of the keys.
        w_v: of the values.
        num_heads: heads in the columns of the matrices.
        mask: who may look at whom.
        bias: added to the scores.
        scale: default 1/√D.
        softcap: cap of the scores, or None.
        sinks: (H,), or None.
        labels: a word per query.
        key_labels: a word per key; default `labels` if there are as many.

    Returns:
        The intermediates, which print as tables.

    Raises:
        TypeError: as `attention`.
        ValueError: as `attention`, and if both or neither of q, k, v and x are given.
    """
    passed = [n for n, a in (("q", q), ("k", k), ("v", v)) if a is not None]
    source = [n for n, a in (("x", x), ("w_q", w_q), ("w_k", w_k), ("w_v", w_v)) if a is not None]
    if (len(passed), len(source)) not in ((3, 0), (0, 4)):
        raise ValueError(
            f"steps takes q, k and v, or x with w_q, w_k and w_v; got {', '.join(passed + source) or 'none'}"
        )
    if source:
        q, k, v = _project(x, w_q, w_k, w_v, num_heads)
    elif num_heads != 1:
        raise ValueError("num_heads= is for x, w_q, w_k and w_v; q, k and v already have an axis of heads")
    call = prepare(q, k, v, mask=mask, bias=bias, scale=scale, softcap=softcap, sinks=sinks)
    if not call.numpy:
        check_dense("q", call.q)
    if 0 in call.sizes:
        raise ValueError("nothing to show: {} batch rows, {} heads, {} queries, {} keys".format(*call.sizes))
    stages = reference.stages(call, lead=tuple(q.shape[:-2]))
    _, _, nq, nk = call.sizes
    if key_labels is None and labels is not None and len(labels) == nk:
        key_labels = labels
    optional = {"capped": call.softcap, "biased": call.bias, "masked": call.mask}
    return Steps(
        **{name: getattr(stages, name) for name in STEP_NAMES},
        q=q,
        k=k,
        v=v,
        x=x,
        labels=_labels("labels", labels, nq, "queries"),
        key_labels=_labels("key_labels", key_labels, nk, "keys"),
        formulas=_formulas(call, projected=bool(source)),
        unchanged=frozenset(name for name, argument in optional.items() if argument is None),
        has_sinks=call.sinks is not None,
    )


def _labels(name: str, labels: Sequence[str] | None, count: int, what: str) -> tuple[str, ...] | None:
    if labels is None:
        return None
    if isinstance(labels, str):
        raise TypeError(f"{name} must be a list of words, got one string: {labels!r}")
    if len(labels) != count:
        raise ValueError(f"{name} has {len(labels)} words for {count} {what}")
    return tuple(str(word) for word in labels)


def _project(x: Any, w_q: Any, w_k: Any, w_v: Any, num_heads: int) -> tuple[Any, Any, Any]:
    """q = x·W_Q, k = x·W_K, v = x·W_V, split into heads: (…, N, D) for one head, (B, H, N, D) for several."""
    arrays = {"x": x, "w_q": w_q, "w_k": w_k, "w_v": w_v}
    kinds = {type(a) if not isinstance(a, Tensor) else Tensor for a in arrays.values()}
    if kinds not in ({Tensor}, {np.ndarray}):
        raise TypeError("x, w_q, w_k and w_v must all be NumPy arrays or all torch tensors")
    dtypes = {name: str(a.dtype) for name, a in arrays.items()}
    if len(set(dtypes.values())) > 1:
        held = ", ".join(f"{name} is {dtype}" for name, dtype in dtypes.items())
        raise TypeError(f"x, w_q, w_k and w_v must have one dtype, but {held}")
    check_int("num_heads", num_heads)
    if x.ndim < 2:
        raise ValueError(f"x must be (…, N, d_model), got shape {tuple(x.shape)}")
    for name in ("w_q", "w_k", "w_v"):
        w = arrays[name]
        if w.ndim != 2 or w.shape[0] != x.shape[-1]:
            raise ValueError(f"{name} must be ({x.shape[-1]}, num_heads·D) to follow x, got shape {tuple(w.shape)}")
        if w.shape[1] % num_heads:
            raise ValueError(f"{name} has {w.shape[1]} columns, which {num_heads} heads do not divide")

    def split(y: Any) -> Any:  # (…, N, H·D) → (B, H, N, D)
        y = y.reshape(*y.shape[:-1], num_heads, y.shape[-1] // num_heads).swapaxes(-3, -2)
        return y[None] if y.ndim == 3 else y

    q, k, v = x @ w_q, x @ w_k, x @ w_v
    return (q, k, v) if num_heads == 1 else (split(q), split(k), split(v))


def _formulas(call: Call, *, projected: bool) -> dict[str, str]:
    """How each step follows from the last one before it that changed anything."""
    size = call.q.shape[-1]
    scaled = f"scores / √{size}" if call.scale == size**-0.5 else f"scores · {tables.number(call.scale)}"
    inputs = {"x": "x", "q": "x·W_Q", "k": "x·W_K", "v": "x·W_V"} if projected else {"q": "q", "k": "k", "v": "v"}
    formulas = {**inputs, "scores": "q·kᵀ", "scaled": scaled}
    cap = "" if call.softcap is None else tables.number(call.softcap)
    before = "scaled"
    for name, argument in (("capped", call.softcap), ("biased", call.bias), ("masked", call.mask)):
        formulas[name] = before
        if argument is not None:
            formulas[name] = {
                "capped": f"{cap}·tanh({before} / {cap})",
                "biased": f"{before} + {argument!r}",
                "masked": f"{before} where {argument!r}",
            }[name]
            before = name
    sink = "" if call.sinks is None else ", a sink joining each row"
    return {**formulas, "weights": f"softmax({before}){sink}", "output": "weights·v"}


def pick(array: Any, batch: int, head: int) -> np.ndarray[Any, Any]:
    """One matrix of (…, N, M) as NumPy floats: `head` counts the last leading axis, `batch` all before it.

    Raises IndexError naming the axis and its size.
    """
    if isinstance(array, Tensor):
        array = array.detach().cpu().double().numpy()
    lead = array.shape[:-2]
    batches, heads = (int(np.prod(lead[:-1])), lead[-1]) if len(lead) > 1 else (lead[0] if lead else 1, 1)
    for name, index, count in (("batch", batch, batches), ("head", head, heads)):
        if not 0 <= index < count:
            raise IndexError(f"{name} {index} is out of range: there are {count}")
    matrix: np.ndarray[Any, Any] = array.reshape(batches, heads, *array.shape[-2:])[batch, head]
    return matrix
