"""The verbs that a model is asked with pictures: classify, answer, caption, match, features.

classify and answer are verbs of texts, too: what they take is decided by the kind of model, never by guessing whether a
str is a path. What each takes and raises; how it is done, the other files of this folder say. It knows no family.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Unpack, cast, overload

from torch import nn

from regard.tasks.eval_mode import in_eval_mode

if TYPE_CHECKING:
    from regard.data.images import Source
    from regard.generation.beam_search import Beams
    from regard.generation.config import Wished
    from regard.generation.text import Written
    from regard.models.model import Model
    from regard.tasks.images import Several
    from regard.tasks.inputs import Texts
    from regard.tasks.matching import Features, Matched
    from regard.tasks.text import Answer, Classified

__all__ = ["PictureVerbs"]


class PictureVerbs(nn.Module):
    """A part of `Model`, and nothing by itself.

    A picture is a path, a file's bytes, an open file, a Pillow image, a uint8 array (H, W) or (H, W, 1, 3 or 4), or an
    opened `Picture`. A list of them, or what gives one after another (`Path("photos").glob("*.jpg")`), gives an answer
    for each, the same that it gets alone; drawn texts (temperature above 0) go by its place in the list, too.

    Each answers in eval mode, and leaves the model in the mode that it was in.
    """

    @overload
    def classify(self, texts: str | Texts, *, batch: int = 32, truncate: bool = False) -> Classified: ...

    @overload
    def classify(
        self,
        pictures: Source | Several,
        *,
        labels: Sequence[str] | None = None,
        prompt: str | None = None,
        batch: int = 32,
        truncate: bool = False,
    ) -> Classified: ...

    @in_eval_mode
    def classify(
        self,
        *asked: Any,
        texts: Any = None,
        pictures: Any = None,
        labels: Sequence[str] | None = None,
        prompt: str | None = None,
        batch: int = 32,
        truncate: bool = False,
    ) -> Classified:
        """The probability of each label for a text, a list of texts, or of pairs; or for pictures; prints as a table.

        >>> regard.load("distilbert-base-uncased-finetuned-sst-2-english").classify("Fine!").best     # doctest: +SKIP
        ('POSITIVE',)
        >>> regard.load("google/vit-base-patch16-224").classify("photo.jpg").best                     # doctest: +SKIP
        ('Egyptian cat',)
        >>> clip = regard.load("openai/clip-vit-base-patch32")                                        # doctest: +SKIP
        >>> clip.classify("photo.jpg", labels=["a cat", "a dog"]).best                                # doctest: +SKIP
        ('a cat',)

        The labels are config.json's; to a model that compares pictures with texts (CLIP) they are given.

        labels: texts, one of which a picture is to be.  prompt: how a label is put, {} standing for it; by default
          "a photo of {}".  batch, truncate: as in `embed`; truncate is of texts and labels.

        Raises ValueError without task "classify", for a text that is too long or empty, and for a picture that cannot
        be opened; TypeError for arguments of another kind of model.
        """
        from regard.tasks.images import looks
        from regard.tasks.inputs import taken
        from regard.tasks.matching import classify_by
        from regard.tasks.text import classify, classify_pictures

        model = cast("Model", self)
        named = {"texts": texts, "pictures": pictures, "labels": labels, "prompt": prompt, "truncate": truncate or None}
        if not looks(model):
            (given,) = taken(model, "classify", ["texts"], asked, named, ["truncate"])
            return classify(model, given, batch=batch, truncate=truncate)
        if labels is None:
            (given,) = taken(model, "classify", ["pictures"], asked, named)
            return classify_pictures(model, given, batch=batch)
        given, _ = taken(model, "classify", ["pictures", "labels"], asked, named, ["prompt", "truncate"])
        return classify_by(model, given, labels, prompt=prompt, batch=batch, truncate=truncate)

    @overload  # a path given as a str reads as a question here: as a Path it is a picture to a type checker, too
    def answer(self, question: str, context: str, *, longest: int = 30) -> Answer: ...

    @overload
    def answer(
        self,
        pictures: Source,
        question: str,
        *,
        batch: int = 8,
        **how: Unpack[Wished],
    ) -> Written: ...

    @overload
    def answer(
        self,
        pictures: Source,
        question: list[str] | tuple[str, ...],
        *,
        batch: int = 8,
        **how: Unpack[Wished],
    ) -> list[Written]: ...

    @overload
    def answer(
        self,
        pictures: Several,
        question: str | list[str] | tuple[str, ...],
        *,
        batch: int = 8,
        **how: Unpack[Wished],
    ) -> list[Written]: ...

    @in_eval_mode
    def answer(
        self,
        *asked: Any,
        question: Any = None,
        context: Any = None,
        pictures: Any = None,
        longest: int | None = None,
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
        batch: int | None = None,
        on_token: Callable[[int], None] | None = None,
    ) -> Answer | Written | list[Written]:
        r"""The answer to a question: a piece of a context, or what is written about a picture.

        >>> print(regard.load("Salesforce/blip-vqa-base").answer("photo.jpg", "How many cats?"))     # doctest: +SKIP
        2

        Of a model of texts, answer(question, context): the piece of the context, its place and its probability. A
        context longer than the model is read in windows that overlap by half.  longest: tokens of an answer.

        Of a model of pictures, answer(pictures, question): one question for all pictures, a list with one for each, or
        several about one picture.
        LLaVA is asked as "USER: <image>\n{question} ASSISTANT:", Idefics as transformers' guide does; a question that
        holds "<image>" is the whole prompt.  batch: pictures at once.  The others: as in `generate`.

        Raises ValueError without task "answer", or "generate" and a tower of pictures, for an empty context, a question
        that leaves no room, a picture that cannot be opened, and as `generate`; TypeError for arguments of another
        kind of model.
        """
        from regard.generation.config import Wishes
        from regard.tasks.captioning import answer_about
        from regard.tasks.images import looks
        from regard.tasks.inputs import taken
        from regard.tasks.text import answer

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
        model = cast("Model", self)
        named = {"question": question, "context": context, "pictures": pictures, "longest": longest}
        if looks(model):
            given, what = taken(model, "answer", ["pictures", "question"], asked, named)
            return answer_about(model, given, what, wishes, batch=8 if batch is None else batch, on_token=on_token)
        named |= {"batch": batch, "on_token": on_token, **wishes.said()}
        what, given = taken(model, "answer", ["question", "context"], asked, named, ["longest"])
        return answer(model, what, given, longest=30 if longest is None else longest)

    @overload
    def caption(
        self,
        pictures: Source,
        prompt: str | None = None,
        *,
        batch: int = 8,
        **how: Unpack[Wished],
    ) -> Written: ...

    @overload
    def caption(
        self,
        pictures: Several,
        prompt: str | None = None,
        *,
        batch: int = 8,
        **how: Unpack[Wished],
    ) -> list[Written]: ...

    @in_eval_mode
    def caption(
        self,
        pictures: Source | Several,
        prompt: str | None = None,
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
        batch: int = 8,
        on_token: Callable[[int], None] | None = None,
    ) -> Written | list[Written]:
        """What is to be seen in a picture, or in each of a list, in words.

        >>> print(regard.load("Salesforce/blip-image-captioning-base").caption("photo.jpg"))     # doctest: +SKIP
        two cats sleeping on a couch

        prompt: how the captions begin; `.text` is what comes after. To a model that reads pictures among its words
          (LLaVA, Idefics) one that holds "<image>" is the whole prompt.
        batch: pictures at once.  The others: as in `generate`.

        Raises ValueError without task "caption", or "generate" and a tower of pictures, for a picture that cannot be
        opened, a prompt that leaves no room, and as `generate`.
        """
        from regard.generation.config import Wishes
        from regard.tasks.captioning import caption

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
        return caption(cast("Model", self), pictures, prompt, wishes, batch=batch, on_token=on_token)

    @in_eval_mode
    def match(
        self, pictures: Source | Several, texts: str | Sequence[str], *, batch: int = 32, truncate: bool = False
    ) -> Matched:
        """How well each picture goes with each text; prints as a table.

        >>> regard.load("openai/clip-vit-base-patch32").match("photo.jpg", ["a cat", "a dog"])     # doctest: +SKIP

        `.values` (pictures, texts) are what `.measure` says: "cosine" of two vectors where texts and pictures are read
        apart (CLIP, BLIP with task "none"); the "probability" that the two belong together where the text is read
        while looking at the picture (BLIP with task "match").

        batch, truncate: as in `embed`.

        Raises ValueError for a model that does neither, a text that is too long or empty, and a picture that cannot be
        opened; TypeError for a text that is no str.
        """
        from regard.tasks.matching import match

        return match(cast("Model", self), pictures, texts, batch=batch, truncate=truncate)

    @overload
    def features(self, pictures: Source, *, layer: int | None = None, batch: int = 32) -> Features: ...

    @overload
    def features(self, pictures: Several, *, layer: int | None = None, batch: int = 32) -> list[Features]: ...

    @in_eval_mode
    def features(
        self, pictures: Source | Several, *, layer: int | None = None, batch: int = 32
    ) -> Features | list[Features]:
        """The vectors of a picture's patches, for detection and segmentation heads, and for looking.

        >>> regard.load("facebook/dinov2-base").features("photo.jpg").map.shape     # doctest: +SKIP
        torch.Size([768, 16, 16])

        `.map` (d, rows, columns), `.vectors` (N, d), `.cls` and `.pooled` where the model has them, `.layout` what each
        token is and where it lies in the model's pixels, `.frame` where these lie in the picture. `.pooled` is the
        tower's summary; to search with CLIP or BLIP, `model.encode_image(pixels)` and `model.encode_text(ids, mask)`
        give the vectors that are compared.

        layer: after how many blocks (Swin: stages), 0 before the first, below 0 from the end; without the norm that the
          last vectors have. None: the last, normed, and with `.pooled`.
        batch: pictures at once.

        Raises ValueError for a model that looks at no pictures, a layer that it does not have, and a picture that
        cannot be opened.
        """
        from regard.tasks.matching import features

        return features(cast("Model", self), pictures, layer=layer, batch=batch)
