"""The base class of all models: checks of inputs, saving, the tasks as methods, and what training libraries ask."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, cast, overload

import torch
from torch import Tensor, nn

from regard.checks import may_read
from regard.data.image_processing import ImageProcessor
from regard.data.images import Source
from regard.data.tokenizer import Tokenizer
from regard.generation.config import GenerationConfig
from regard.generation.loop import GenerationOutput, generate_text, stream_text
from regard.models.family import Config
from regard.nn.blocks import LanguageHead, Tower
from regard.tasks import text as text_tasks
from regard.tasks import vision
from regard.tasks.inputs import Several, Texts, call_arguments, has_vision
from regard.tasks.text import Answer, Classified, Filled, Pooling, Tagged
from regard.tasks.vision import Features, Matched

if TYPE_CHECKING:
    from regard.models.family import Family

Kind = Literal[
    "text",
    "encoder-decoder",
    "vision",
    "dual-encoder",
    "image-caption",
    "image-question",
    "image-text-matching",
    "vision-language",
    "flamingo",
]
"""What a model reads and gives; the tasks choose by it."""
T = TypeVar("T")
Method = TypeVar("Method", bound=Callable[..., Any])


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """All modules in eval mode, and afterwards each in its own: a new head may train beside a body that does not."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def in_eval_mode(method: Method) -> Method:
    """Decorate a method of a module to run in eval mode."""

    @wraps(method)
    def wrapped(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with eval_mode(model):
            return method(model, *args, **kwargs)

    return cast(Method, wrapped)


class Model(nn.Module):
    """A model of some family with one task: what `regard.load` gives, a `torch.nn.Module`.

    >>> from regard.models.families.transformer import TransformerSize, transformer
    >>> tiny = transformer(13, TransformerSize(d_model=8, num_heads=2, layers=1, d_ff=16), start=1, end=2, pad=0)
    >>> tiny.family.title, tiny.task, tiny.dtype
    ('Transformer', 'text2text-generation', torch.float32)

    A call raises TypeError or ValueError if an argument does not fit the model, with its value, before anything runs.

    config: of config.json.  task: a key of the family's tasks.
    directory: what it was loaded from.  ignored: keys of its files that the user declared harmless.
    """

    kind: ClassVar[Kind]
    family: Family
    task: str
    directory: Path | None = None
    ignored: tuple[str, ...] = ()

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return next(self.parameters()).dtype

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer, opened on first use. Raises as `Tokenizer.open` does."""
        if self.directory is None:
            raise ValueError("this model was not loaded from a directory, so it has no tokenizer: set model.tokenizer")
        return Tokenizer.open(self.directory)

    @cached_property
    def preprocessor(self) -> ImageProcessor:
        """The checkpoint's image processor, opened on first use; or set it. Raises as `ImageProcessor.open`."""
        remedy = 'set model.preprocessor = ImageProcessor.of("ViT", {"size": 224}), or as it was trained'
        if self.directory is None:
            raise ValueError(f"this model was not loaded from a directory, so it has no image processor: {remedy}")
        try:
            return ImageProcessor.open(self.directory, ignore=self.ignored)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{error}. Then {remedy}") from None

    def save(self, directory: str | Path) -> None:
        """Write a directory that `regard.load` and `transformers` open: config.json, weights, tokenizer, preprocessor.

        >>> import tempfile, regard
        >>> from regard.models.families.transformer import TransformerSize, transformer
        >>> tiny = transformer(13, TransformerSize(d_model=8, num_heads=2, layers=1, d_ff=16), start=1, end=2, pad=0)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     tiny.save(folder)
        ...     sorted(path.name for path in Path(folder).iterdir())
        ['config.json', 'model.safetensors']

        Args:
            directory: created if it does not exist; a model that is there is replaced in one step.

        Raises:
            NotADirectoryError: there is a file of that name.
            ValueError: the weights are not those that `regard.load` would expect; nothing is written.
            OSError: writing failed; what was there is untouched.
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
        """The first line of `print(model)`."""
        return f"{self.family.title}, task={self.task!r}"

    # ----------------------------------------------------------------------------------------- for training libraries

    @property
    def accepts_loss_kwargs(self) -> bool:
        """Does a call take `num_items_in_batch`, the number of labels of all accumulated batches?"""
        return isinstance(getattr(self, "head", None), LanguageHead)

    @property
    def loss_type(self) -> str | None:
        """The name of the loss in transformers, if the model shifts the labels."""
        tower = getattr(self, "tower", None)
        causal = isinstance(tower, Tower) and tower.causal and isinstance(getattr(self, "head", None), LanguageHead)
        return "ForCausalLM" if causal else None

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

    # ----------------------------------------------------------------------------------------------- checks of inputs

    def check_device(self, name: str, value: Tensor) -> None:
        """Raise ValueError unless a tensor is where the model is: torch would say so from deep inside a layer."""
        if value.device != self.device:
            raise ValueError(
                f"the model is on {self.device}, and {name} came on {value.device}: {name}.to(model.device)"
            )

    def check_integers(self, name: str, value: Any, shape: str, hint: str = "") -> None:
        """Raise TypeError unless it is a tensor of integers."""
        if not isinstance(value, Tensor) or value.dtype not in (torch.int64, torch.int32):
            got = str(value.dtype) if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(f"{name} must be a torch tensor of int64 or int32, {shape}, got {got}{hint}")

    def check(
        self, input_ids: Tensor, attention_mask: Tensor | None, tower: Tower, position_ids: Tensor | None = None
    ) -> Tensor | None:
        """Check what a tower is to read, before anything runs; the mask as booleans, or None if it hides nothing.

        Values are not looked at in training on a GPU, which would wait for it, nor in a compiled graph.
        Raises TypeError or ValueError naming what came, what was expected and what to do.
        """
        most, vocabulary = self._limit(tower), tower.embed.tokens.num_embeddings
        self.check_integers("input_ids", input_ids, "(B, N)", "; model.tokenizer.batch([…]).input_ids makes them")
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
        if position_ids is not None:
            self._check_positions(input_ids, position_ids, tower)
        mask = None
        if attention_mask is not None:
            mask = self.booleans("attention_mask", attention_mask, input_ids.shape)
        if not may_read(input_ids, training=self.training):  # the embedding's kernel checks the ids
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

    def _limit(self, tower: Tower) -> int | None:
        """The longest text of a tower; with rotary positions, which have no table, the model's own limit."""
        return getattr(self, "max_positions", None) if tower.embed.max_positions is None else tower.embed.max_positions

    def check_prompt(
        self, input_ids: Tensor, attention_mask: Tensor | None, tower: Tower, length: int
    ) -> Tensor | None:
        """As `check`, of a prompt that is continued up to `length` positions; it is padded on the left."""
        mask, most = self.check(input_ids, attention_mask, tower), self._limit(tower)
        if mask is not None and not bool(mask[:, -1].all()):
            raise ValueError("prompts are padded on the left: here a row ends in padding")
        if most is not None and length > most:
            raise ValueError(f"{length} positions are asked for, and the model has {most}: ask for fewer new tokens")
        return mask

    def booleans(self, name: str, value: Tensor, shape: Sequence[int]) -> Tensor:
        """A mask of 1/0 or booleans as booleans. Raises ValueError for another dtype or shape."""
        if not isinstance(value, Tensor) or value.is_floating_point() or value.shape != tuple(shape):
            got = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"{name} must be 1/0 or booleans {tuple(shape)}, got {got}")
        self.check_device(name, value)
        if value.dtype == torch.bool:
            return value
        if may_read(value, training=self.training) and not bool(((value == 0) | (value == 1)).all()):
            raise ValueError(
                f"{name} must be 1/0 or booleans, got {value.dtype} {int(value.min())} to {int(value.max())}"
            )
        return value == 1

    def _check_positions(self, input_ids: Tensor, position_ids: Tensor, tower: Tower) -> None:
        if tower.embed.positions is None and tower.rotary is None:
            raise ValueError(f"{self.family.title} has relative positions alone: leave out position_ids")
        self.check_integers("position_ids", position_ids, "(N,) or (B, N)")
        batch, n = input_ids.shape
        if position_ids.shape not in ((n,), (1, n), (batch, n)):
            raise ValueError(
                f"position_ids must be ({n},) or ({batch}, {n}) as input_ids, got {tuple(position_ids.shape)}"
            )
        if not may_read(position_ids, training=self.training):
            return
        first, last = torch.stack(torch.aminmax(position_ids)).tolist()
        most = tower.embed.max_positions
        if first < 0 or (most is not None and last >= most):
            limit = "0 or more" if most is None else f"0 to {most - 1}"
            raise ValueError(f"position_ids must be {limit}, got {first} to {last}")

    # ---------------------------------------------------------------------------------------------- used by the tasks

    @property
    def reads_image_prompts(self) -> bool:
        """True if the model reads images among the tokens of a prompt (LLaVA, Idefics)."""
        return self.kind in ("vision-language", "flamingo")

    @property
    def max_text_positions(self) -> int | None:
        """How many tokens a text may have: positions of the tower that reads it; None without a limit."""
        reader: Any = self
        if self.kind in ("text", "dual-encoder", "vision-language", "flamingo"):
            return cast("int | None", reader.max_positions)
        if self.kind in ("encoder-decoder", "image-question", "image-text-matching"):
            return cast("int | None", reader.encoder.embed.max_positions)
        if self.kind == "image-caption":
            return cast("int | None", reader.decoder.embed.max_positions)
        raise ValueError(f"{self.family.title} reads no texts, only images")

    def check_task(self, verb: str, *tasks: str) -> None:
        """Raise ValueError for a model without one of these tasks, naming what it has and what it needs."""
        if self.task in tasks:
            return
        title, there = self.family.title, [task for task in tasks if task in self.family.tasks]
        if there:
            needed = f"regard.load(…, task={there[0]!r}) reads a checkpoint that has that head"
        else:
            needed = f"{title} has no such task, it has {', '.join(self.family.tasks)}"
        raise ValueError(
            f"{verb} needs the task {' or '.join(map(repr, tasks))}, and this {title} has {self.task!r}: {needed}"
        )

    def iterate_in_eval_mode(self, items: Iterator[T]) -> Iterator[T]:
        """Compute each item in eval mode; while the caller has it, the model is in the mode that it was in."""
        while True:
            with eval_mode(self):
                try:
                    item = next(items)
                except StopIteration:
                    return
            yield item

    # --------------------------------------------------------------------------------------------------------- tasks
    # Each runs in eval mode and leaves the model in the mode that it was in. An image is a path, a file's bytes, an
    # open file, a Pillow image, a uint8 array (H, W) or (H, W, 1, 3 or 4), or an opened one; a list or iterator of them
    # (`Path("photos").glob("*.jpg")`) gives an answer for each, the same that it gets alone.

    @overload
    def generate(self, prompt: str, **options: Any) -> GenerationOutput: ...

    @overload
    def generate(self, prompt: list[str] | tuple[str, ...], **options: Any) -> list[GenerationOutput]: ...

    @in_eval_mode
    def generate(
        self,
        prompt: str | list[str] | tuple[str, ...],
        *,
        images: Source | Several | None = None,
        config: GenerationConfig | None = None,
        on_token: Callable[[int], None] | None = None,
        **options: Any,
    ) -> GenerationOutput | list[GenerationOutput]:
        """Continue a prompt, or each of a list; an encoder-decoder writes what it makes of the prompt.

        >>> print(regard.load("openai-community/gpt2").generate("The cat", max_new_tokens=3))     # doctest: +SKIP

        Args:
            prompt: a text, or a list of texts.
            images: for a model that reads them in its prompt (LLaVA, Idefics): one for each "<image>" of the prompt, in
                their order; for several prompts a list of such lists.
            config: the options as an object.
            on_token: called after each step with the number of steps made.
            **options: max_new_tokens, num_beams, temperature, stop_strings, … (the fields of `GenerationConfig`), over
                those of `config`, over the checkpoint's generation_config.json. By default greedy, 50 tokens.

        Returns:
            A `GenerationOutput`, or a list of them for a list of prompts.

        Raises:
            TypeError: an option that does not exist or has the wrong type.
            ValueError: a model without a language-model head, a prompt that leaves no room, another number of images
                than of placeholders, options out of range, beam search with sampling or stop strings, or settings of
                the checkpoint that change the text and are not supported.
        """
        return generate_text(self, prompt, GenerationConfig.from_options(config, options), images, on_token)

    @in_eval_mode
    def stream(
        self,
        prompt: str,
        *,
        images: Source | Several | None = None,
        config: GenerationConfig | None = None,
        **options: Any,
    ) -> Iterator[str]:
        """The text of `generate` piece by piece, each as soon as it is certain: whole characters, no part of a stop.

        >>> for piece in model.stream("The cat"): print(piece, end="", flush=True)     # doctest: +SKIP

        Arguments and errors as in `generate`, without beam search (num_beams=1 if the checkpoint sets more). Nothing is
        computed before the first piece is asked for, except an encoder's part.
        """
        return stream_text(self, prompt, GenerationConfig.from_options(config, options), images)

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
        """One vector for each text: (len(texts), d), in their order; of the encoder in an encoder-decoder.

        >>> regard.load("sentence-transformers/all-MiniLM-L6-v2").embed(["하나", "둘"]).shape     # doctest: +SKIP
        torch.Size([2, 384])

        Args:
            texts: a list of texts or of pairs.
            pooling: "mean" over the tokens, "cls" the first, "max" in each place, "last"; padding never counts. By
                default what modules.json and 1_Pooling/config.json of the checkpoint say, else "mean".
            normalize: scale vectors to length 1; by default what modules.json says, else False.
            batch: number of texts that go through the model at once, grouped by length.
            truncate: cut texts that are longer than the model, or than a sentence encoder's max_seq_length.

        Raises:
            ValueError: a text that is too long or has no token, or a checkpoint that needs more than this.
        """
        return text_tasks.embed(self, texts, pooling=pooling, normalize=normalize, batch=batch, truncate=truncate)

    @in_eval_mode
    def fill(self, text: str, top: int = 5) -> Filled:
        """The `top` likeliest tokens at each mask token of a text; prints as a table.

        >>> regard.load("google-bert/bert-base-uncased").fill("Paris is the [MASK] of France.")     # doctest: +SKIP

        Raises:
            ValueError: a model without task "fill-mask" (or "pretraining"), a text without a mask, or a text that is
                too long.
        """
        return text_tasks.fill(self, text, top)

    @in_eval_mode
    def tag(self, text: str) -> Tagged:
        """The likeliest label of each token of a text, and of spans of them (`.spans`); prints as a table.

        >>> print(regard.load("dslim/bert-base-NER").tag("Paris is in France."))     # doctest: +SKIP

        Raises:
            ValueError: a model without task "token-classification", or a text that is too long.
        """
        return text_tasks.tag(self, text)

    @in_eval_mode
    def follows(self, first: str, second: str) -> float:
        """The probability that the second text follows the first.

        >>> bert = regard.load("google-bert/bert-base-uncased", task="next-sentence-prediction")     # doctest: +SKIP
        >>> bert.follows("He was tired.", "So he slept.")     # doctest: +SKIP

        Raises:
            ValueError: a model without task "next-sentence-prediction" (or "pretraining"), or texts that are too long
                together.
        """
        return text_tasks.follows(self, first, second)

    @overload
    def classify(self, texts: str | Texts, *, batch: int = 32, truncate: bool = False) -> Classified: ...

    @overload
    def classify(
        self,
        images: Source | Several,
        *,
        labels: Sequence[str] | None = None,
        prompt: str | None = None,
        batch: int = 32,
        truncate: bool = False,
    ) -> Classified: ...

    @in_eval_mode
    def classify(
        self,
        *inputs: Any,
        texts: Any = None,
        images: Any = None,
        labels: Sequence[str] | None = None,
        prompt: str | None = None,
        batch: int = 32,
        truncate: bool = False,
    ) -> Classified:
        """The probability of each label for texts, pairs of texts or images; prints as a table.

        >>> regard.load("distilbert-base-uncased-finetuned-sst-2-english").classify("Fine!").best     # doctest: +SKIP
        ('POSITIVE',)
        >>> regard.load("google/vit-base-patch16-224").classify("photo.jpg").best                     # doctest: +SKIP
        ('Egyptian cat',)
        >>> clip = regard.load("openai/clip-vit-base-patch32")                                        # doctest: +SKIP
        >>> clip.classify("photo.jpg", labels=["a cat", "a dog"]).best                                # doctest: +SKIP
        ('a cat',)

        The kind of model decides whether a str is a text or the path of an image.

        Args:
            *inputs: one text, a list of texts or of pairs; or one image, or several.
            texts: the same by name, for a model of texts.
            images: the same by name, for a model of images.
            labels: for a model that compares images with texts (CLIP): the labels. Others have config.json's.
            prompt: how a label is written, with {} in its place; by default "a photo of {}".
            batch: number of inputs at once.
            truncate: cut texts and labels that are too long.

        Raises:
            TypeError: arguments of another kind of model.
            ValueError: a model without such a task, a text that is too long or empty, an image that cannot be opened.
        """
        named = {"texts": texts, "images": images, "labels": labels, "prompt": prompt, "truncate": truncate or None}
        if not has_vision(self):
            (given,) = call_arguments(self, "classify", ["texts"], inputs, named, ["truncate"])
            return text_tasks.classify(self, given, batch=batch, truncate=truncate)
        if labels is None:
            (given,) = call_arguments(self, "classify", ["images"], inputs, named)
            return text_tasks.classify_images(self, given, batch=batch)
        given, _ = call_arguments(self, "classify", ["images", "labels"], inputs, named, ["prompt", "truncate"])
        return vision.classify_by(self, given, labels, prompt=prompt, batch=batch, truncate=truncate)

    @overload  # a path given as a str reads as a question here: as a Path it is an image to a type checker, too
    def answer(self, question: str, context: str, *, longest: int = 30) -> Answer: ...

    @overload
    def answer(self, images: Source, question: str, **options: Any) -> GenerationOutput: ...

    @overload
    def answer(
        self, images: Source | Several, question: str | list[str] | tuple[str, ...], **options: Any
    ) -> list[GenerationOutput]: ...

    @in_eval_mode
    def answer(
        self,
        *inputs: Any,
        question: Any = None,
        context: Any = None,
        images: Any = None,
        longest: int | None = None,
        batch: int | None = None,
        on_token: Callable[[int], None] | None = None,
        **options: Any,
    ) -> Answer | GenerationOutput | list[GenerationOutput]:
        r"""The answer to a question: a span of a context, or a text about an image.

        >>> print(regard.load("Salesforce/blip-vqa-base").answer("photo.jpg", "How many cats?"))     # doctest: +SKIP
        2

        A model of texts is called as answer(question, context): the answer is the likeliest span of the context, which
        is read in windows that overlap by half if it is longer than the model. A model of images is called as
        answer(images, question): one question for all images, a list with one for each, or several about one image.

        Args:
            *inputs: question and context, or images and question.
            question: the same by name.
            context: the same by name.
            images: the same by name.
            longest: limit on the tokens of a span; default 30.
            batch: number of images at once; default 8.
            on_token: as in `generate`.
            **options: as in `generate`; `config` too. LLaVA is prompted with "USER: <image>\n{question} ASSISTANT:",
                Idefics as in transformers' guide; a question that holds "<image>" is the whole prompt.

        Raises:
            TypeError: arguments of another kind of model.
            ValueError: a model without such a task, an empty context, a question that leaves no room, an image that
                cannot be opened, and as `generate`.
        """
        named = {"question": question, "context": context, "images": images, "longest": longest}
        if has_vision(self):
            given, asked = call_arguments(self, "answer", ["images", "question"], inputs, named)
            config = GenerationConfig.from_options(options.pop("config", None), options)
            size = 8 if batch is None else batch
            return vision.answer_about(self, given, asked, config, batch=size, on_token=on_token)
        named |= {"batch": batch, "on_token": on_token, **options}
        asked, given = call_arguments(self, "answer", ["question", "context"], inputs, named, ["longest"])
        return text_tasks.answer(self, asked, given, longest=30 if longest is None else longest)

    @overload
    def caption(self, images: Source, prompt: str | None = None, **options: Any) -> GenerationOutput: ...

    @overload
    def caption(self, images: Several, prompt: str | None = None, **options: Any) -> list[GenerationOutput]: ...

    @in_eval_mode
    def caption(
        self,
        images: Source | Several,
        prompt: str | None = None,
        *,
        config: GenerationConfig | None = None,
        batch: int = 8,
        on_token: Callable[[int], None] | None = None,
        **options: Any,
    ) -> GenerationOutput | list[GenerationOutput]:
        """A caption of an image, or of each of a list.

        >>> print(regard.load("Salesforce/blip-image-captioning-base").caption("photo.jpg"))     # doctest: +SKIP
        two cats sleeping on a couch

        Args:
            images: one image, or several.
            prompt: how the captions begin; `.text` is what comes after. To LLaVA and Idefics one that holds "<image>"
                is the whole prompt.
            config: as in `generate`.
            batch: number of images at once.
            on_token: as in `generate`.
            **options: as in `generate`.

        Raises:
            ValueError: a model without task "image-to-text" or "image-text-to-text", an image that cannot be
                opened, a prompt that leaves no room, and as `generate`.
        """
        config = GenerationConfig.from_options(config, options)
        return vision.caption(self, images, prompt, config, batch=batch, on_token=on_token)

    @in_eval_mode
    def match(
        self, images: Source | Several, texts: str | Sequence[str], *, batch: int = 32, truncate: bool = False
    ) -> Matched:
        """How well each image goes with each text; prints as a table.

        >>> regard.load("openai/clip-vit-base-patch32").match("photo.jpg", ["a cat", "a dog"])     # doctest: +SKIP

        `.values` (images, texts) are what `.measure` says: "cosine" of two vectors where texts and images are read
        apart (CLIP, BLIP without a head); the "probability" that the two belong together where the text is read
        with cross-attention to the image (BLIP with task "image-text-matching").

        Args:
            images: one image, or several.
            texts: one text, or several.
            batch: number of images or texts at once.
            truncate: cut texts that are too long.

        Raises:
            TypeError: a text that is not a str.
            ValueError: a model that does neither, a text that is too long or empty, or an image that cannot be opened.
        """
        return vision.match(self, images, texts, batch=batch, truncate=truncate)

    @overload
    def features(self, images: Source, *, layer: int | None = None, batch: int = 32) -> Features: ...

    @overload
    def features(self, images: Several, *, layer: int | None = None, batch: int = 32) -> list[Features]: ...

    @in_eval_mode
    def features(
        self, images: Source | Several, *, layer: int | None = None, batch: int = 32
    ) -> Features | list[Features]:
        """The vectors of an image's patches, for detection and segmentation heads.

        >>> regard.load("facebook/dinov2-base").features("photo.jpg").map.shape     # doctest: +SKIP
        torch.Size([768, 16, 16])

        `.map` (d, rows, columns), `.vectors` (N, d), `.cls` and `.pooled` where the model has them, `.layout` what each
        token is and where it lies in the model's pixels, `.frame` where these lie in the image. `.pooled` is the
        tower's summary; to search with CLIP or BLIP, `model.encode_image(pixels)` and `model.encode_text(ids, mask)`
        give the vectors that are compared.

        Args:
            images: one image, or several.
            layer: after how many blocks (Swin: stages), 0 before the first, below 0 from the end; without the final
                norm. None: the last, normed, and with `.pooled`.
            batch: number of images at once.

        Raises:
            ValueError: a model without a vision tower or without that layer, or an image that cannot be opened.
        """
        return vision.features(self, images, layer=layer, batch=batch)


# Arguments that callers written for transformers pass along: value that changes nothing, and what to do instead.
REFUSED: dict[str, tuple[Any, str]] = {
    "inputs_embeds": (None, "give input_ids"),
    "output_attentions": (False, "regard.watch(model) gives the attention weights"),
    "past_key_values": (None, "model.generate keeps its own cache"),
    "return_dict": (True, "the output is a ModelOutput; out.to_tuple() is the tuple"),
}
OPTIONS = {*REFUSED, "use_cache", "num_items_in_batch"}
