"""What every model has: where it came from, its checks of input, its result, its way back to a directory.

It does not know whether a model has one tower or two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, overload

import torch
from torch import Tensor, nn

from regard.models.settings import Settings

if TYPE_CHECKING:
    from regard.models.family import Family
    from regard.models.generation.beams import Beams
    from regard.models.images.preprocessing import Preprocessor
    from regard.models.parts import Tower
    from regard.models.tokenizers.tokenizing import Tokenizer
    from regard.models.verbs.answering import Answer
    from regard.models.verbs.asking import Texts
    from regard.models.verbs.embedding import Pooling
    from regard.models.verbs.filling import Filled
    from regard.models.verbs.labelling import Classified, Tagged
    from regard.models.verbs.writing import Written

__all__ = ["Model", "Result"]


@dataclass(frozen=True, eq=False, repr=False)
class Result:
    """What a model makes of ids or pixels. What the model does not have is None.

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


class Model(nn.Module):
    """A model of some family with one task.

    settings: of config.json.  task: a key of the family's tasks.
    """

    family: Family
    task: str
    directory: Path | None = None

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
        from regard.models.tokenizers.tokenizing import Tokenizer

        if self.directory is None:
            raise ValueError("this model was not loaded from a directory, so it has no tokenizer: set model.tokenizer")
        return Tokenizer.open(self.directory)

    @cached_property
    def preprocessor(self) -> Preprocessor:
        """How the checkpoint wants its pictures, opened on first use. Raises as `Preprocessor.open` does."""
        from regard.models.images.preprocessing import Preprocessor

        if self.directory is None:
            raise ValueError(
                "this model was not loaded from a directory, so nothing says how it wants its pictures: "
                "set model.preprocessor"
            )
        return Preprocessor.open(self.directory)

    def save(self, directory: str | Path) -> None:
        """Write a directory that `regard.load` and `transformers` open: config.json, weights, tokenizer.

        Raises as `regard.models.loading.save`.
        """
        from regard.models.loading import save

        save(self, directory)

    # ------------------------------------------------------------------------------------------------ asked with text

    def tokens(self, ids: Sequence[int] | Tensor) -> list[str] | list[list[str]]:
        """Labels of ids (N,) or (B, N), for people and for the lens: `regard.watch(model, tokens=model.tokens(ids))`.

        Raises as `Tokenizer.tokens` does.
        """
        if isinstance(ids, Tensor) and ids.ndim == 2:
            return [self.tokenizer.tokens(row) for row in ids]
        return self.tokenizer.tokens(ids)

    def embed(
        self,
        texts: Texts,
        *,
        pooling: Pooling | None = None,
        normalize: bool | None = None,
        batch: int = 32,
        truncate: bool = False,
    ) -> Tensor:
        """One vector for each text: (len(texts), d), in their order, of the encoder where there are two towers.

        >>> regard.load("sentence-transformers/all-MiniLM-L6-v2").embed(["하나", "둘"]).shape     # doctest: +SKIP
        torch.Size([2, 384])

        pooling: "mean" over the tokens, "cls" the first, "max" in each place, "last"; padding never counts. By default
          what modules.json and 1_Pooling/config.json of the checkpoint say, else "mean".
        normalize: bring vectors to length 1; by default what modules.json says, else not.
        batch: texts that go through the model at once, taken by length.
        truncate: cut texts that are longer than the model; a sentence encoder's own max_seq_length counts.

        Raises ValueError for a text that is longer, or has no token, and for a checkpoint that asks for more than this.
        """
        from regard.models.verbs.embedding import embed

        return embed(self, texts, pooling=pooling, normalize=normalize, batch=batch, truncate=truncate)

    def fill(self, text: str, top: int = 5) -> Filled:
        """The `top` likeliest tokens at each mask token of a text; prints as a table.

        >>> regard.load("google-bert/bert-base-uncased").fill("Paris is the [MASK] of France.")     # doctest: +SKIP

        Raises ValueError without task "fill" (or "pretrain"), for a text without a mask, and for one that is too long.
        """
        from regard.models.verbs.filling import fill

        return fill(self, text, top)

    def classify(self, texts: str | Texts, *, batch: int = 32, truncate: bool = False) -> Classified:
        """The probability of each of config.json's labels for a text, a list of texts, or of pairs; prints as a table.

        >>> regard.load("distilbert-base-uncased-finetuned-sst-2-english").classify("Fine!").best     # doctest: +SKIP
        ('POSITIVE',)

        batch, truncate: as in `embed`. Raises ValueError without task "classify", for a text that is too long or empty.
        """
        from regard.models.verbs.labelling import classify

        return classify(self, texts, batch=batch, truncate=truncate)

    def tag(self, text: str) -> Tagged:
        """The likeliest label of each token of a text, and of spans of them (`.spans`); prints as a table.

        Raises ValueError without task "tag", and for a text that is too long.
        """
        from regard.models.verbs.labelling import tag

        return tag(self, text)

    def answer(self, question: str, context: str, *, longest: int = 30) -> Answer:
        """The piece of a context that answers a question, with its place and its probability.

        A context longer than the model is read in windows that overlap by half.  longest: tokens of an answer.

        Raises ValueError without task "answer", for an empty context, and a question that leaves no room for one.
        """
        from regard.models.verbs.answering import answer

        return answer(self, question, context, longest=longest)

    def follows(self, first: str, second: str) -> float:
        """How likely it is that the second text follows the first.

        Raises ValueError without task "next" (or "pretrain"), and for texts that are too long together.
        """
        from regard.models.verbs.labelling import follows

        return follows(self, first, second)

    @overload
    def generate(
        self,
        prompt: str,
        *,
        new_tokens: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        beams: int | Beams | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
        ignore: Sequence[str] = (),
        on_token: Callable[[int], None] | None = None,
    ) -> Written: ...

    @overload
    def generate(
        self,
        prompt: list[str] | tuple[str, ...],
        *,
        new_tokens: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        beams: int | Beams | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
        ignore: Sequence[str] = (),
        on_token: Callable[[int], None] | None = None,
    ) -> list[Written]: ...

    def generate(
        self,
        prompt: str | list[str] | tuple[str, ...],
        *,
        new_tokens: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        beams: int | Beams | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
        ignore: Sequence[str] = (),
        on_token: Callable[[int], None] | None = None,
    ) -> Written | list[Written]:
        """What comes after a prompt, or after each of a list; of an encoder–decoder, what it makes of the prompt.

        >>> print(regard.load("openai-community/gpt2").generate("The cat", new_tokens=3))     # doctest: +SKIP

        What is None is as generation_config.json says, or an older config.json; where they say nothing, the choice is
        greedy, and there are 50 tokens, or fewer if the model has no room for them.

        new_tokens: at most so many.  temperature: 0 takes the likeliest token, above 0 draws one.
        top_k, top_p, min_p: draw among the likeliest; 0, 1 and 0 switch them off.
        repetition_penalty: above 1 discourages tokens that have occurred.
        beams: 1 is none; a number keeps so many, compared as the checkpoint says; a `Beams` says how.
        seed: the same seed, the same draws, whatever the other rows are.  stop: strings that end a text.
        ignore: keys of generation_config.json to go on without.  on_token: called after each step with their number.

        Raises ValueError without task "generate", for a prompt that leaves no room, numbers out of range, beams with
        sampling or stop strings, and settings of the checkpoint that would change the text and are not offered.
        """
        from regard.models.verbs.writing import Wishes, write

        wishes = Wishes(
            new_tokens=new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            beams=beams,
            seed=seed,
            stop=stop,
            ignore=ignore,
        )
        return write(self, prompt, wishes, on_token)

    def stream(
        self,
        prompt: str,
        *,
        new_tokens: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        beams: int | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
        ignore: Sequence[str] = (),
    ) -> Iterator[str]:
        """The text of `generate` piece by piece, each as soon as it is certain: whole characters, no part of a stop.

        >>> for piece in model.stream("The cat"): print(piece, end="", flush=True)     # doctest: +SKIP

        Arguments as in `generate`; beams: 1, said where the checkpoint itself asks for more. Nothing is computed before
        the first piece is asked for, but for an encoder's part. Raises as `generate` does.
        """
        from regard.models.verbs.writing import Wishes, stream

        wishes = Wishes(
            new_tokens=new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            beams=beams,
            seed=seed,
            stop=stop,
            ignore=ignore,
        )
        return stream(self, prompt, wishes)

    def extra_repr(self) -> str:
        """What `print(model)` says before its parts."""
        return f"{self.family.title}, task={self.task!r}"

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
        most = tower.embed.most
        if first < 0 or (most is not None and last >= most):
            limit = "0 or more" if most is None else f"0 to {most - 1}"
            raise ValueError(f"positions must be {limit}, got {first} to {last}")
