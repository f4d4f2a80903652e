"""The verbs that a model is asked with text: embed, fill, tag, follows, generate, stream.

What each takes and raises; how it is done, the other files of this folder say. Each answers in eval mode and leaves the
model in the mode that it was in. It does not know any family.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Unpack, cast, overload

from torch import Tensor, nn

from regard.tasks.eval_mode import in_eval_mode

if TYPE_CHECKING:
    from regard.data.images import Source
    from regard.generation.beam_search import Beams
    from regard.generation.config import Wished
    from regard.generation.text import Written
    from regard.models.model import Model
    from regard.tasks.embedding import Pooling
    from regard.tasks.images import Several
    from regard.tasks.inputs import Texts
    from regard.tasks.text import Filled, Tagged

__all__ = ["TextVerbs"]


class TextVerbs(nn.Module):
    """A part of `Model`, and nothing by itself."""

    @in_eval_mode
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
        from regard.tasks.embedding import embed

        return embed(cast("Model", self), texts, pooling=pooling, normalize=normalize, batch=batch, truncate=truncate)

    @in_eval_mode
    def fill(self, text: str, top: int = 5) -> Filled:
        """The `top` likeliest tokens at each mask token of a text; prints as a table.

        >>> regard.load("google-bert/bert-base-uncased").fill("Paris is the [MASK] of France.")     # doctest: +SKIP

        Raises ValueError without task "fill-mask" (or "pretraining"), for a text without a mask or too long.
        """
        from regard.tasks.text import fill

        return fill(cast("Model", self), text, top)

    @in_eval_mode
    def tag(self, text: str) -> Tagged:
        """The likeliest label of each token of a text, and of spans of them (`.spans`); prints as a table.

        >>> print(regard.load("dslim/bert-base-NER").tag("Paris is in France."))     # doctest: +SKIP

        text: as it is written.
        Raises ValueError without task "token-classification", and for a text that is too long.
        """
        from regard.tasks.text import tag

        return tag(cast("Model", self), text)

    @in_eval_mode
    def follows(self, first: str, second: str) -> float:
        """How likely it is that the second text follows the first, from 0 to 1.

        >>> bert = regard.load("google-bert/bert-base-uncased", task="next-sentence-prediction")     # doctest: +SKIP
        >>> bert.follows("He was tired.", "So he slept.")     # doctest: +SKIP

        Raises ValueError without task "next-sentence-prediction" (or "pretraining"), and for texts too long together.
        """
        from regard.tasks.text import follows

        return follows(cast("Model", self), first, second)

    @overload
    def generate(
        self,
        prompt: str,
        *,
        pictures: Source | Several | None = None,
        **how: Unpack[Wished],
    ) -> Written: ...

    @overload
    def generate(
        self,
        prompt: list[str] | tuple[str, ...],
        *,
        pictures: Several | None = None,
        **how: Unpack[Wished],
    ) -> list[Written]: ...

    @in_eval_mode
    def generate(
        self,
        prompt: str | list[str] | tuple[str, ...],
        *,
        pictures: Source | Several | None = None,
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

        pictures: for a model that reads them among its words (LLaVA, Idefics), one for each "<image>" of the prompt,
          in their order; for several prompts a list of such lists.
        new_tokens: at most so many.  temperature: 0 takes the likeliest token, above 0 draws one.
        top_k, top_p, min_p: draw among the likeliest; 0, 1 and 0 switch them off.
        repetition_penalty: above 1 discourages tokens that have occurred.
        beams: 1 is none; a number keeps so many, compared as the checkpoint says; a `Beams` says how.
        seed: the same seed, the same draws, whatever the other rows are.  stop: strings that end a text.
        ignore: keys of generation_config.json to go on without.  on_token: called after each step with their number.

        Raises ValueError without a task that generates, for a prompt that leaves no room, another number of pictures
        than placeholders, numbers out of range, beams with sampling or stop strings, and keys of the checkpoint that
        would change the text and are not offered.
        """
        from regard.generation.config import Wishes
        from regard.generation.text import write

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
        return write(cast("Model", self), prompt, wishes, on_token, pictures)

    @in_eval_mode
    def stream(
        self,
        prompt: str,
        *,
        pictures: Source | Several | None = None,
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
        from regard.generation.config import Wishes
        from regard.generation.text import stream

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
        return stream(cast("Model", self), prompt, wishes, pictures)
