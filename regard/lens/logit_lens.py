"""`logit_lens`: what the language-model head would say of the residual stream after each block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from regard import tables
from regard.checks import index_among, part_of_axis
from regard.lens.measures.measures import at_least_one

__all__ = ["LogitLens", "logit_lens"]

NO_HEAD = "logit_lens needs a language-model head: load with task='text-generation', 'fill-mask' or the like"


@dataclass(repr=False, eq=False)
class LogitLens:
    """The most likely tokens after each block: what `logit_lens` returns. Prints as a table of the first batch row.

    Attributes:
        tokens: (layers, B, positions, k) token ids, most likely first.
        probabilities: (layers, B, positions, k) their probabilities.
        layers: names of the blocks, first to last.
        positions: the positions that were asked for, from 0.
        through: the modules between the last block and the logits, such as the final norm and the head.
        how: "heuristic": the head was trained on the last block alone, whose rows are the model's own prediction.
        words: token id → text, or None.
    """

    tokens: Tensor
    probabilities: Tensor
    layers: tuple[str, ...]
    positions: tuple[int, ...]
    through: tuple[str, ...]
    how: str = "heuristic"
    words: Callable[[int], str] | None = None

    def table(self, batch: int = 0) -> str:
        """The tokens of a batch row as text, a line for each layer and position."""
        index_among("batch", batch, self.tokens.shape[1], "batch rows")
        lines = []
        for at, layer in enumerate(self.layers):
            for p, position in enumerate(self.positions):
                ids, shares = (x[at, batch, p].tolist() for x in (self.tokens, self.probabilities))
                words = [str(i) if self.words is None else repr(self.words(i)) for i in ids]
                lines.append([layer, str(position), *(f"{w} {s:.2f}" for w, s in zip(words, shares, strict=True))])
        headers = ["layer", "position", "most likely", *[""] * (self.tokens.shape[-1] - 1)]
        return tables.text(headers, lines, right=[1])

    def __repr__(self) -> str:
        return f"logit lens through {' and '.join(self.through)} ({self.how})\n{self.table()}"


def logit_lens(
    run: Callable[[], Any],
    model: nn.Module,
    *,
    positions: int | slice | Sequence[int] = -1,
    k: int = 5,
    layers: str | Sequence[str] | None = None,
    words: Callable[[int], str] | None = None,
) -> LogitLens:
    """The residual stream after each block, read as tokens by the model's own norm and head.

    The state after a block takes the place of the last block's output, and the model itself goes on from there: final
    norm, head, and whatever else it does to its logits. So the last layer shows the model's own prediction. The model
    runs once, and once more for every N states (layers × positions).

    >>> import torch, regard
    >>> model = regard.build("gpt2", n_embd=12, n_head=3, n_layer=2, n_positions=8, vocab_size=19).eval()
    >>> ids = torch.tensor([[3, 5, 7]])
    >>> lens = regard.logit_lens(lambda: model(ids), model, k=4)
    >>> lens.tokens.shape, lens.layers, lens.through
    (torch.Size([2, 1, 1, 4]), ('tower.blocks.0', 'tower.blocks.1'), ('tower.norm', 'head'))

    Args:
        run: one forward pass of the model; it returns the model's output, with logits (B, N, V).
        model: any nn.Module with a language-model head: regard's, Hugging Face's, your own.
        positions: where to look: an int, a slice or several; of the decoder, in an encoder–decoder.
        k: tokens for each layer and position.
        layers: path patterns of the blocks, such as "model.layers.*"; default the modules of the last nn.ModuleList
            that runs.
        words: token id → text for the table, such as a tokenizer's decode.

    Raises:
        LookupError: no language-model head, or no blocks were found.
        ValueError: no position is named, the run is no single forward pass, or what follows the blocks mixes positions.
        IndexError, TypeError: as for `View.tile`.
    """
    k = at_least_one("k", k)
    blocks, wanted = _blocks(model, layers), [positions] if isinstance(positions, int) else positions
    # 1. Run the model as it is: the states after each block, and its own logits.
    with torch.no_grad(), _recording(model, blocks, wanted) as passed:
        logits = _logits(run())
    stack = _last_stack(passed, logits, layers)
    if stack[0].problem is not None:
        raise stack[0].problem
    if not stack[0].positions:
        raise ValueError(f"positions={positions!r} names none of the {stack[0].shape[1]} positions")
    _require_vocabulary(model, logits)
    states = torch.cat([block.states for block in stack], 1)  # (B, layers · positions, d)
    # 2. Run it again with those states as the output of the last block, N at a time.
    parts = []
    last = passed.index(stack[-1])
    for part in torch.split(states, stack[-1].shape[1], 1):
        with torch.no_grad(), _replacing(blocks, last, part):
            parts.append(_logits(run())[:, : part.shape[1]])
    scores = torch.cat(parts, 1)  # (B, layers · positions, V)
    scores = scores.reshape(len(scores), len(stack), -1, scores.shape[-1]).transpose(0, 1)  # (layers, B, positions, V)
    wide = torch.promote_types(scores.dtype, torch.float32)
    own = logits[:, list(stack[-1].positions)]
    allowed = torch.finfo(scores.dtype).eps ** 0.5 * max(1.0, float(own.abs().max()))
    if not bool((scores[-1] - own).abs().max() <= allowed):
        raise ValueError(
            "the logits of a state depend on more than the state: the model has dropout (call model.eval()), or what "
            f"follows {stack[-1].name!r} mixes positions"
        )
    # 3. The most likely tokens, and the names of what led to them.
    top = scores.to(wide).softmax(-1).topk(min(k, scores.shape[-1]))
    names = tuple(block.name for block in stack)
    return LogitLens(top.indices, top.values, names, stack[-1].positions, tuple(stack[-1].after), words=words)


# -------------------------------------------------------------------------------------------------------------- blocks


@dataclass(eq=False)
class _Passed:
    """One call of a block: the states that it returned at the positions asked for."""

    stack: str  # the list that the block is in
    name: str
    shape: tuple[int, ...]  # (B, N, d)
    states: Tensor  # (B, positions, d)
    positions: tuple[int, ...]
    problem: Exception | None  # with the positions
    after: list[str] = field(default_factory=list)  # modules that ran next, over as many positions


Blocks = dict[str, tuple[str, nn.Module]]
"""Path → the list that it is in, and the module."""


def _blocks(model: nn.Module, layers: object) -> Blocks:
    """The modules whose outputs are looked at: those that `layers` names, or those of the outermost module lists."""
    if layers is not None:
        patterns = [layers] if isinstance(layers, str) else list(layers)  # type: ignore[call-overload]
        named = {p: ("", m) for p, m in model.named_modules() if any(fnmatchcase(p, one) for one in patterns)}
        inner = [p for p in named if any(p.startswith(f"{other}.") for other in named)]  # "*" fits dots, too
        blocks = {p: block for p, block in named.items() if p not in inner}
        if not blocks:
            raise LookupError(f"layers={layers!r} fits no module of the model")
        return blocks
    lists: list[str] = []
    blocks = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(path.startswith(f"{outer}.") for outer in lists):
            lists.append(path)
            blocks |= {f"{path}.{n}": (path, block) for n, block in enumerate(module)}
    return blocks


@contextmanager
def _recording(model: nn.Module, blocks: Blocks, wanted: object) -> Iterator[list[_Passed]]:
    """The calls of the blocks inside the `with`, in order."""
    passed: list[_Passed] = []
    inside: list[str] = []  # modules that began after the latest block and have not returned

    def block_hook(stack: str, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            hidden = _hidden(out)
            if hidden is None:
                return
            problem, n, at = None, hidden.shape[1], list[int]()
            try:
                at = torch.arange(n)[part_of_axis("positions", wanted, n, "positions")].tolist()
            except (IndexError, TypeError) as wrong:  # raised if these blocks are meant, and not those of an encoder
                problem = wrong
            inside.clear()
            passed.append(_Passed(stack, name, tuple(hidden.shape), hidden[:, at].detach(), tuple(at), problem))

        return hook

    def began(name: str) -> Callable[..., None]:
        return lambda module, args: inside.append(name)

    def returned(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            if name in inside:
                del inside[inside.index(name) :]
                whole = isinstance(out, Tensor) and passed and out.shape[:2] == passed[-1].shape[:2]
                if not inside and whole and not isinstance(module, (nn.Dropout, nn.Identity)):
                    passed[-1].after.append(name)

        return hook

    hooks = []
    for path, module in model.named_modules():
        if path not in blocks:
            hooks += [module.register_forward_pre_hook(began(path)), module.register_forward_hook(returned(path))]
    hooks += [block.register_forward_hook(block_hook(stack, path)) for path, (stack, block) in blocks.items()]
    try:
        yield passed
    finally:
        for handle in hooks:
            handle.remove()


def _hidden(out: Any) -> Tensor | None:
    """The hidden states (B, N, d) of what a block returned, if it returned some."""
    first = out[0] if isinstance(out, (tuple, list)) and out else out
    return first if isinstance(first, Tensor) and first.ndim == 3 else None


def _last_stack(passed: list[_Passed], logits: Tensor, layers: object) -> list[_Passed]:
    """The calls of the blocks that lead to the logits (B, N, V)."""
    if not passed:
        hint = "run() called none of these" if layers is not None else "name them, as layers='model.layers.*'"
        raise LookupError(f"no blocks that return (B, N, d) were found; {hint}")
    stack = [block for block in passed if block.stack == passed[-1].stack]
    shapes = sorted({block.shape for block in stack})
    if len(shapes) > 1:
        raise ValueError(f"the blocks returned {shapes[0]} and {shapes[-1]}: run must be one forward pass of the model")
    if tuple(logits.shape[:2]) != stack[-1].shape[:2]:
        raise ValueError(
            f"the logits are {tuple(logits.shape)} and the last block returned {stack[-1].shape}: run must return the "
            "logits of all positions; " + NO_HEAD
        )
    return stack


@contextmanager
def _replacing(blocks: Blocks, last: int, states: Tensor) -> Iterator[None]:
    """Put states (B, n, d) into the first places of what the call `last` of all blocks returns."""
    calls = 0

    def hook(module: nn.Module, args: Any, out: Any) -> Any:
        nonlocal calls
        hidden = _hidden(out)
        if hidden is None:
            return out
        calls += 1
        if calls <= last:
            return out
        new = hidden.clone()
        new[:, : states.shape[1]] = states
        return new if isinstance(out, Tensor) else type(out)((new, *out[1:]))

    hooks = [block.register_forward_hook(hook) for _, block in blocks.values()]
    try:
        yield
    finally:
        for handle in hooks:
            handle.remove()


# -------------------------------------------------------------------------------------------------------------- logits


def _logits(output: Any) -> Tensor:
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(logits, Tensor) or logits.ndim != 3:
        got = type(output).__name__ if logits is None else f"logits {tuple(logits.shape)}"
        raise LookupError(f"run must return the model's output with logits (B, N, V), got {got}; {NO_HEAD}")
    return logits


def _require_vocabulary(model: nn.Module, logits: Tensor) -> None:
    """Raise LookupError if the logits are over something else than tokens, such as labels."""
    sizes = set[int]()
    for name, size in (("get_input_embeddings", "num_embeddings"), ("get_output_embeddings", "out_features")):
        part = getattr(model, name, lambda: None)()
        sizes |= {getattr(part, size)} if hasattr(part, size) else set()
    sizes = sizes or {m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)}
    if logits.shape[-1] not in sizes:
        tokens = " or ".join(str(size) for size in sorted(sizes)) or "no"
        raise LookupError(f"the logits are over {logits.shape[-1]} things, the model has {tokens} tokens; {NO_HEAD}")
