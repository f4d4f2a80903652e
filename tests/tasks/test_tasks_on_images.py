"""What a model is asked with pictures: each verb gives what transformers' own processor and model give."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from seeing_twins import NAMES, blip, clip, dinov2, idefics, llava, picture, put, swin, vit
from speaking_twins import bert, gpt2
from torch import Tensor
from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.deit.image_processing_pil_deit import DeiTImageProcessorPil
from transformers.models.idefics.image_processing_pil_idefics import IdeficsImageProcessorPil
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil
from twins import widened

import regard
from regard.data.image_processing import ImageProcessor
from regard.data.images import open_image
from regard.generation.loop import GenerationOutput
from regard.layouts import Frame, Layout
from regard.models.loading import load
from regard.tasks.text import Classified
from regard.tasks.vision import Features, Matched

PICTURES = [picture(0), picture(1, 71, 31), picture(2), picture(3, 30, 30), picture(4, 41, 59)]
IMAGES = [Image.fromarray(array) for array in PICTURES]
TEXTS = ["a cat sat", "the street was too wide", "서울"]


@pytest.fixture(scope="module")
def twin(tmp_path_factory: Any) -> Any:
    """A function that makes a twin once, and gives its directory and our model in fp64."""
    made: dict[Any, tuple[Path, Any]] = {}

    def twin(make: Any, *arguments: Any) -> tuple[Path, Any]:
        key = make, *arguments
        if key not in made:
            folder = make(tmp_path_factory.mktemp(make.__name__), *arguments)
            made[key] = folder, load(folder, dtype=torch.float64)
        return made[key]

    return twin


def theirs_of(architecture: str, folder: Path) -> Any:
    return getattr(transformers, architecture).from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager"
    ).eval()  # fmt: skip


def their_pixels(processor: Any, folder: Path, images: list[Image.Image] = IMAGES) -> Tensor:
    return processor.from_pretrained(folder)(images=images, return_tensors="pt")["pixel_values"].double()


@torch.no_grad()
def their(model: Any, **given: Any) -> Any:
    with widened():
        return model(**given)


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


# ------------------------------------------------------------------------------------------------------------ classify


@pytest.mark.parametrize(
    ("make", "arguments", "architecture", "processor"),
    [
        (vit, (), "ViTForImageClassification", ViTImageProcessorPil),
        (swin, ("ForImageClassification",), "SwinForImageClassification", ViTImageProcessorPil),
        (clip, ("ForImageClassification",), "CLIPForImageClassification", CLIPImageProcessorPil),
    ],
)
def test_labels_of_pictures_are_those_of_transformers(twin, make, arguments, architecture, processor) -> None:
    folder, model = twin(make, *arguments)
    logits = their(theirs_of(architecture, folder), pixel_values=their_pixels(processor, folder)).logits
    found = model.classify(PICTURES, batch=2)
    assert isinstance(found, Classified)
    assert (found.labels, found.of) == (tuple(NAMES.values()), "image")
    close(found.probabilities, logits.softmax(-1))
    assert found.best == tuple(NAMES[n] for n in logits.argmax(-1).tolist())


@pytest.mark.parametrize("head", ["", "WithTeacher"])
def test_both_heads_of_deit_classify(head, tmp_path) -> None:
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 5, "hidden_size": 20, "intermediate_size": 29}
    config = transformers.DeiTConfig(**sizes, image_size=30, patch_size=6, id2label=NAMES)
    square = {"height": 30, "width": 30}
    name = f"DeiTForImageClassification{head}"
    put(tmp_path, name, config, DeiTImageProcessorPil(size={"height": 36, "width": 36}, crop_size=square))
    logits = their(theirs_of(name, tmp_path), pixel_values=their_pixels(DeiTImageProcessorPil, tmp_path)).logits
    close(load(tmp_path, dtype=torch.float64).classify(PICTURES).probabilities, logits.softmax(-1))


def test_a_picture_may_come_as_a_path_bytes_an_image_an_array_or_opened(twin, tmp_path) -> None:
    _, model = twin(vit)
    path = tmp_path / "photo.png"
    IMAGES[0].save(path)
    given = [str(path), path, path.read_bytes(), IMAGES[0], PICTURES[0], open_image(path)]
    found = [model.classify(one) for one in given]
    assert all(torch.equal(one.probabilities, found[0].probabilities) for one in found)
    assert [one.texts for one in found] == [
        (name,) for name in ("photo.png", "photo.png", "bytes", "image", "array")
    ] + [("photo.png",)]
    close(model.classify(tuple(given)).probabilities, found[0].probabilities.expand(6, -1))


def test_pictures_may_come_one_after_another(twin, tmp_path) -> None:
    for name, image in zip("ab", IMAGES, strict=False):
        image.save(tmp_path / f"{name}.png")
    every = sorted(tmp_path.glob("*.png"))
    seeing, captioning = twin(vit)[1], twin(blip, "ForConditionalGeneration")[1]
    assert seeing.classify(path for path in every).texts == ("a.png", "b.png")
    assert [one.name for one in seeing.features(iter(every))] == ["a.png", "b.png"]
    assert len(captioning.caption(iter(every[:1]), max_new_tokens=2)) == 1
    assert seeing.preprocessor(iter(every)).pixel_values.shape == (2, 3, 30, 30)
    written = twin(llava)[1].generate(["<image>"] * 2, images=(path for path in every), max_new_tokens=2)
    assert len(written) == 2
    with every[0].open("rb") as file:  # which gives lines one after another, and is one picture
        assert seeing.classify(file).texts == ("a.png",)
    with pytest.raises(ValueError, match=r"(?:picture|image)"):
        seeing.classify(tmp_path.glob("*.jpg"))


def test_one_picture_prints_its_labels_and_several_their_best(twin) -> None:
    _, model = twin(vit)
    one, several = model.classify(PICTURES[0]), model.classify(PICTURES)
    best = f"{float(one.probabilities.max()):.4f}"
    assert [line.split() for line in repr(one).splitlines()[:3:2]] == [["label", "probability"], [one.best[0], best]]
    assert len(repr(one).splitlines()) == 2 + 3
    assert repr(several).splitlines()[0].split() == ["image", "label", "probability"]
    assert repr(several).splitlines()[2].split() == ["array", one.best[0], best]
    assert several._repr_html_().count("<tr>") == 1 + 5


def test_of_many_labels_the_likeliest_are_printed_and_the_others_counted(tmp_path) -> None:
    model = load(vit(tmp_path, "ForImageClassification", id2label={n: f"thing {n}" for n in range(37)}))
    found = model.classify(PICTURES[0])
    lines = repr(found).splitlines()
    assert len(lines) == 2 + 10 + 1
    assert lines[-1] == "… 27 more"
    listed = [line.rsplit("  ", 1)[0].strip() for line in lines[2:-1]]
    assert listed == [found.labels[n] for n in found.probabilities[0].argsort(descending=True)[:10].tolist()]


@pytest.mark.parametrize(("make", "arguments"), [(clip, ()), (blip, ("Model",))])
def test_labels_that_are_given_are_compared_as_texts(twin, make, arguments) -> None:
    folder, model = twin(make, *arguments)
    kind, processor = ("CLIP", CLIPImageProcessorPil) if make is clip else ("Blip", BlipImageProcessorPil)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    labels = ["cat", "wide street", "고양이"]
    for prompt, said in ((None, "a photo of {}"), ("a {} it was, {}!", "a {} it was, {}!")):
        # Each text alone: transformers takes padding's place for the end of a BLIP's text, and sees it in others.
        rows = []
        for label in labels:
            read = tokenizer(said.replace("{}", label), return_tensors="pt", return_token_type_ids=False)
            given = {"pixel_values": their_pixels(processor, folder), **read}
            rows.append(their(theirs_of(f"{kind}Model", folder), **given).logits_per_image[:, 0])
        found = model.classify(PICTURES, labels=labels, prompt=prompt, batch=2)
        assert (found.labels, found.of, found.measure) == (tuple(labels), "image", "probability")
        close(found.probabilities, torch.stack(rows, 1).softmax(-1))
    assert found.best[0] == labels[int(found.probabilities[0].argmax())]


def test_labels_prompts_and_texts_where_they_mean_nothing_are_refused(twin, tmp_path) -> None:
    seeing, comparing = twin(vit)[1], twin(clip)[1]
    reading = load(bert(tmp_path, "ForSequenceClassification"))
    photo = PICTURES[0]
    refused = [
        (
            lambda: comparing.classify(photo),
            ValueError,
            r"CLIP.*labels=.*'a",
        ),
        (
            lambda: seeing.classify(photo, labels=["a"]),
            ValueError,
            r"labels=.*ViT.*'image-classification'",
        ),
        (
            lambda: comparing.classify(photo, labels="a cat"),
            ValueError,
            r"labels.*list",
        ),
        (
            lambda: comparing.classify(photo, labels=[]),
            ValueError,
            r"labels.*list",
        ),
        (
            lambda: comparing.classify(photo, labels=["a", 5]),
            TypeError,
            r"1.*str.*int.*5",
        ),
        (
            lambda: comparing.classify(photo, labels=[("a", "b")]),
            TypeError,
            r"0.*str.*tuple.*'a'.*'b'",
        ),
        (
            lambda: comparing.classify(photo, labels=["a"], prompt="a photo"),
            ValueError,
            r"prompt.*'a photo of \{\}'.*'a photo'",
        ),
        (
            lambda: comparing.classify(photo, labels=["cat " * 40]),
            ValueError,
            r"text.*0.*31.*truncate=True",
        ),
        (lambda: seeing.classify(photo, prompt="{}"), TypeError, r"ViT.*prompt"),
        (lambda: seeing.classify(photo, truncate=True), TypeError, r"ViT.*truncate"),
        (lambda: seeing.classify(texts="a"), TypeError, r"ViT.*texts"),
        (
            lambda: seeing.classify(photo, images=photo),
            TypeError,
            r"ViT.*images",
        ),
        (lambda: seeing.classify(), TypeError, r"ViT.*images"),
        (lambda: seeing.classify(photo, 5), TypeError, r"ViT.*5"),
        (
            lambda: reading.classify("a", labels=["b"]),
            TypeError,
            r"BERT.*labels",
        ),
        (lambda: reading.classify(images="a"), TypeError, r"BERT.*images"),
        (lambda: seeing.classify([]), ValueError, "list"),
        (lambda: seeing.classify(photo, batch=0), ValueError, r"batch.*1.*0"),
    ]
    for call, error, message in refused:
        with pytest.raises(error, match=message):
            call()
    assert comparing.classify(photo, labels=["cat " * 40], truncate=True).probabilities.tolist() == [[1.0]]


def test_texts_of_a_model_of_texts_may_still_be_named(tmp_path) -> None:
    model = load(bert(tmp_path, "ForSequenceClassification"))
    found = model.classify(texts=["a cat", "it"], batch=1)
    assert torch.equal(found.probabilities, model.classify(["a cat", "it"], batch=1).probabilities)
    assert found.of == "text"


# --------------------------------------------------------------------------------------------------------------- match


@pytest.mark.parametrize(("make", "arguments"), [(clip, ()), (blip, ("Model",))])
def test_match_of_two_towers_is_the_cosine_of_their_vectors(twin, make, arguments) -> None:
    folder, model = twin(make, *arguments)
    kind, processor = ("CLIP", CLIPImageProcessorPil) if make is clip else ("Blip", BlipImageProcessorPil)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    rows = []
    for text in TEXTS:
        read = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
        made = their(theirs_of(f"{kind}Model", folder), pixel_values=their_pixels(processor, folder), **read)
        rows.append((made.image_embeds @ made.text_embeds.T)[:, 0])
    found = model.match(PICTURES, TEXTS, batch=2)
    assert isinstance(found, Matched)
    assert (found.measure, found.texts, len(found)) == ("cosine", tuple(TEXTS), 5)
    close(found.values, torch.stack(rows, 1))
    assert found.best == tuple(TEXTS[n] for n in found.values.argmax(1).tolist())


def test_match_of_one_that_reads_while_looking_is_a_probability(twin) -> None:
    folder, model = twin(blip, "ForImageTextRetrieval")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    theirs, pixels = theirs_of("BlipForImageTextRetrieval", folder), their_pixels(BlipImageProcessorPil, folder)
    rows = []
    for text in TEXTS:
        read = tokenizer([text] * 5, return_tensors="pt", return_token_type_ids=False)
        rows.append(their(theirs, pixel_values=pixels, **read).itm_score.softmax(-1)[:, 1])
    found = model.match(PICTURES, TEXTS, batch=2)
    assert found.measure == "probability"
    close(found.values, torch.stack(rows, 1))


def test_a_picture_is_looked_at_once_for_all_texts_that_are_judged(twin) -> None:
    _, model = twin(blip, "ForImageTextRetrieval")
    seen = []
    hook = model.vision.register_forward_hook(lambda *_: seen.append(1))
    model.match(PICTURES[0], TEXTS * 4, batch=5)
    model.match(PICTURES[:4], TEXTS[0])
    hook.remove()
    assert len(seen) == 2  # once for 12 texts in three batches, once for four pictures


def test_texts_are_judged_beside_one_picture(twin) -> None:
    _, model = twin(blip, "ForImageTextRetrieval")
    seen = model.look(model.preprocessor(PICTURES[:2]).pixel_values)
    ids = model.tokenizer.batch(TEXTS).input_ids
    assert model.judge(seen[1:], ids).shape == (3, 2)


def test_matches_print_as_a_table(twin) -> None:
    _, model = twin(clip)
    one, several = model.match(PICTURES[0], [*TEXTS, "cat " * 7]), model.match(PICTURES, "a cat")
    ranked = [f"{value:.4f}" for value in sorted(one.values[0].tolist(), reverse=True)]
    assert repr(one).splitlines()[0].split() == ["text", "cosine"]
    assert [line.split()[-1] for line in repr(one).splitlines()[2:]] == ranked
    assert several.texts == ("a cat",)
    assert repr(several).splitlines()[0].split() == ["image", "text", "cosine"]
    assert several._repr_html_().count("<tr>") == 6


def test_match_refuses_models_that_do_not_compare_and_texts_that_are_none(twin) -> None:
    with pytest.raises(ValueError, match=r"ViT.*'image-classification'"):
        twin(vit)[1].match(PICTURES[0], "a")
    _, model = twin(clip)
    with pytest.raises(ValueError, match="list"):
        model.match(PICTURES[0], [])
    with pytest.raises(ValueError, match=r"text.*1.*31.*truncate=True"):
        model.match(PICTURES[0], ["a", "cat " * 40])
    for compares in (model, twin(blip, "ForImageTextRetrieval")[1]):
        with pytest.raises(TypeError, match=r"text.*1.*str.*tuple.*'a'.*'b'"):
            compares.match(PICTURES[0], ["a", ("a", "b")])
    with pytest.raises(TypeError, match=r"texts.*int.*5"):
        model.match(PICTURES[0], 5)
    assert model.match(PICTURES[0], "cat " * 40, truncate=True).values.shape == (1, 1)


def test_half_precision_gives_cosines_in_fp32(twin) -> None:
    folder, model = twin(clip)
    found = load(folder, dtype=torch.bfloat16).match(PICTURES, TEXTS)
    assert found.values.dtype == torch.float32
    torch.testing.assert_close(found.values.double(), model.match(PICTURES, TEXTS).values, rtol=0, atol=0.05)


# ------------------------------------------------------------------------------------------------------------ features


def test_features_are_the_vectors_of_transformers_where_the_patches_lie(twin) -> None:
    folder, model = twin(vit, "Model")
    theirs = their(
        theirs_of("ViTModel", folder),
        pixel_values=their_pixels(ViTImageProcessorPil, folder),
        output_hidden_states=True,
    )
    found = model.features(PICTURES, batch=2)
    assert [isinstance(one, Features) for one in found] == [True] * 5
    for one, hidden, pooled, array in zip(found, theirs.last_hidden_state, theirs.pooler_output, PICTURES, strict=True):
        close(one.vectors, hidden)
        close(one.cls, hidden[0])
        close(one.pooled, pooled)
        close(one.map, hidden[1:].T.reshape(20, 5, 5))
        assert one.layout == Layout.grid(5, 5, size=(6, 6))
        assert one.frame == Frame.whole(*array.shape[:2]).resized(30, 30)
    assert repr(found[0]) == "Features(array: 1 cls, 25 patches; vectors (26, 20), map (20, 5, 5), pooled (20,))"
    for layer in (0, 1, 3, -1, -4):
        for one, hidden in zip(model.features(PICTURES, layer=layer), theirs.hidden_states[layer], strict=True):
            close(one.vectors, hidden)
            assert one.pooled is None


def test_each_cell_of_the_map_is_the_patch_of_its_box(twin) -> None:
    _, model = twin(vit, "Model")
    one = model.features(PICTURES[0])
    for row, column in ((0, 0), (1, 3), (4, 2)):
        _, token = one.layout.at(6 * row + 1, 6 * column + 1)
        assert torch.equal(one.map[:, row, column], one.vectors[token])


def test_pictures_of_unlike_shapes_keep_their_own_grids(twin) -> None:
    """The shorter side becomes 30 and nothing is cropped; registers and cls are no part of the map."""
    _, model = twin(dinov2)
    found = model.features(PICTURES)
    assert [one.grid for one in found] == [(5, 7), (11, 5), (5, 7), (5, 5), (5, 7)]
    for one, array in zip(found, PICTURES, strict=True):
        alone = model.features(array)
        torch.testing.assert_close(one.vectors, alone.vectors, rtol=0, atol=1e-13)
        assert one.layout == alone.layout == Layout.grid(*one.grid, size=(6, 6), before=("cls", "register", "register"))
        assert torch.equal(one.map.flatten(1).T, one.vectors[3:])
        assert torch.equal(one.cls, one.pooled)


def test_stages_of_a_swin_have_larger_patches_and_no_cls(twin) -> None:
    folder, model = twin(swin)
    theirs = their(
        theirs_of("SwinModel", folder),
        pixel_values=their_pixels(ViTImageProcessorPil, folder, IMAGES[:2]),
        output_hidden_states=True,
    )
    last = model.features(PICTURES[:2])
    for one, hidden, pooled in zip(last, theirs.last_hidden_state, theirs.pooler_output, strict=True):
        close(one.vectors, hidden)
        close(one.pooled, pooled)
        assert (one.cls, one.grid) == (None, (3, 4))
        assert one.layout == Layout.grid(3, 4, size=(16, 16), before=(), pixels=(47, 57))
    for layer, grid in enumerate([(12, 15), (6, 8), (3, 4), (3, 4)]):
        for one, hidden in zip(model.features(PICTURES[:2], layer=layer), theirs.hidden_states[layer], strict=True):
            close(one.vectors, hidden)
            size = (4 * 2 ** min(layer, 2),) * 2
            assert (one.grid, one.layout) == (grid, Layout.grid(*grid, size=size, before=(), pixels=(47, 57)))


@pytest.mark.parametrize(
    ("make", "arguments"),
    [
        (clip, ()),
        (blip, ("ForConditionalGeneration",)),
        (blip, ("ForQuestionAnswering",)),
        (blip, ("ForImageTextRetrieval",)),
        (llava, ()),
        (idefics, ()),
    ],
)
def test_towers_beside_a_text_have_features_too(twin, make, arguments) -> None:
    _, model = twin(make, *arguments)
    with torch.no_grad():
        pixels = model.preprocessor(PICTURES[0]).pixel_values.double()
        hidden, layers = model.vision(pixels, output_hidden_states=True)
    one = model.features(PICTURES[0])
    assert torch.equal(one.vectors, hidden[0])
    assert (one.pooled is not None) == (make is clip)
    assert torch.equal(model.features(PICTURES[0], layer=2).vectors, layers[2][0])


def test_features_refuse_layers_that_are_none_and_models_of_texts(twin, tmp_path) -> None:
    _, model = twin(vit)
    for layer in (4, -5, True, 1.0, "last"):
        with pytest.raises(ValueError, match=r"layer.*0.*3.*-4.*-1.*None"):
            model.features(PICTURES[0], layer=layer)
    with pytest.raises(ValueError, match=r"BERT.*model\.embed"):
        load(bert(tmp_path, "Model")).features(PICTURES[0])


# ------------------------------------------------------------------------------------------------------------ captions


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("prompt", [None, "the street was"])
def test_captions_are_those_of_transformers(twin, prompt, beams) -> None:
    folder, model = twin(blip, "ForConditionalGeneration")
    theirs = theirs_of("BlipForConditionalGeneration", folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    given: dict[str, Any] = {"pixel_values": their_pixels(BlipImageProcessorPil, folder)}
    start = 1
    if prompt is not None:
        given |= tokenizer([prompt] * 5, return_tensors="pt", return_token_type_ids=False)
        start = given["input_ids"].shape[1] - 1
    with widened():
        wanted = theirs.generate(**given, max_new_tokens=9, num_beams=beams, do_sample=False)[:, start:]
    found = model.caption(PICTURES, prompt, max_new_tokens=9, num_beams=beams)
    check_written(found, wanted, end=3)
    for one, row in zip(found, wanted, strict=True):
        assert one.prompt == (prompt or "")
        text = tokenizer.decode(row, skip_special_tokens=True)
        whole = tokenizer.decode([*given["input_ids"][0, 1:-1], *row], skip_special_tokens=True) if prompt else text
        assert one.prompt + one.text == whole


def check_written(found: list[GenerationOutput], wanted: Tensor, end: int) -> None:
    """The same ids up to the end of each text."""
    assert [isinstance(one, GenerationOutput) for one in found] == [True] * len(wanted)
    for one, row in zip(found, wanted, strict=True):
        ids = row.tolist()
        n = ids.index(end) + 1 if end in ids else len(ids)
        assert one.ids.tolist() == ids[:n]
        assert one.reason == ("eos" if end in ids else "length")
    assert len({tuple(one.ids.tolist()) for one in found}) > 1, "the pictures make no difference"


def test_one_picture_gives_one_caption_and_a_batch_changes_none(twin) -> None:
    _, model = twin(blip, "ForConditionalGeneration")
    together = model.caption(PICTURES, max_new_tokens=7)
    counted: list[int] = []
    pieces = model.caption(PICTURES, max_new_tokens=7, batch=2, on_token=counted.append)
    alone = [model.caption(array, max_new_tokens=7) for array in PICTURES]
    assert [one.ids.tolist() for one in together] == [one.ids.tolist() for one in pieces]
    assert [one.ids.tolist() for one in together] == [one.ids.tolist() for one in alone]
    longest = [max(len(one.ids) for one in pieces[at : at + 2]) for at in (0, 2, 4)]
    assert counted == list(range(1, sum(longest) + 1))


@pytest.mark.parametrize(
    ("make", "arguments", "asked"),
    [
        (blip, ("ForConditionalGeneration",), ()),
        (blip, ("ForQuestionAnswering",), ("was it tired?",)),
        (llava, (), ()),
        (idefics, (), ("what is it?",)),
    ],
)
def test_drawn_texts_go_by_place_in_the_list_and_not_by_batch(twin, make, arguments, asked) -> None:
    _, model = twin(make, *arguments)

    def drawn(batch: int, seed: int | None = 1) -> list[list[int]]:
        verb = model.answer if asked else model.caption
        how = {"max_new_tokens": 5, "temperature": 9.0, "seed": seed}
        return [one.ids.tolist() for one in verb([IMAGES[0]] * 5, *asked, **how, batch=batch)]

    whole = drawn(5)
    assert drawn(2) == whole
    assert len({*map(tuple, whole)}) == 5  # the same picture, another draw
    torch.manual_seed(7)
    unsaid = drawn(5, None)
    torch.manual_seed(7)
    assert drawn(2, None) == unsaid != whole


def test_what_a_checkpoint_says_of_captions_counts(tmp_path) -> None:
    folder = blip(tmp_path, "ForConditionalGeneration")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= {"max_length": 5, "num_beams": 2}
    (folder / "config.json").write_text(json.dumps(config))
    one = load(folder).caption(PICTURES[3])
    assert len(one.ids) <= 4  # and a token to begin with
    assert one.score is not None
    (folder / "generation_config.json").write_text(json.dumps({"max_new_tokens": 2}))
    again = load(folder).caption(PICTURES[3])
    assert (len(again.ids), again.score) == (2, None)
    assert len(load(folder).caption(PICTURES[3], max_new_tokens=3).ids) == 3


def test_captions_that_cannot_be_written_are_refused(twin, tmp_path) -> None:
    _, model = twin(blip, "ForConditionalGeneration")
    with pytest.raises(ValueError, match=r"'image-to-text'.*ViT.*'image-classification'.*ViT"):
        twin(vit)[1].caption(PICTURES[0])
    with pytest.raises(ValueError, match=r"'image-to-text'.*GPT-2.*'text-generation'"):
        load(gpt2(tmp_path)).caption(PICTURES[0])
    with pytest.raises(ValueError, match=r"41.*37"):
        model.caption(PICTURES[0], "cat " * 40)
    with pytest.raises(ValueError, match=r"39.*37"):
        model.caption(PICTURES[0], max_new_tokens=39)
    with pytest.raises(TypeError, match=r"prompt.*str.*'a'"):
        model.caption(PICTURES[:2], ["a", "b"])
    with pytest.raises(ValueError, match="beams"):
        model.caption(PICTURES[0], num_beams=2, temperature=1.0)


def test_a_prompt_of_words_that_the_tokenizer_does_not_know_is_taken(twin) -> None:
    _, model = twin(blip, "ForConditionalGeneration")
    assert model.caption(PICTURES[0], "🦋", max_new_tokens=3).prompt == "🦋"


# ------------------------------------------------------------------------------------------------------------- answers


QUESTIONS = ["was it tired?", "what sat on the mat?", "서울?", "is the cat small", "it"]


@pytest.mark.parametrize("beams", [1, 3])
def test_answers_are_those_of_transformers(twin, beams) -> None:
    folder, model = twin(blip, "ForQuestionAnswering")
    theirs = theirs_of("BlipForQuestionAnswering", folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    pixels = their_pixels(BlipImageProcessorPil, folder)
    found = model.answer(PICTURES, QUESTIONS, max_new_tokens=9, num_beams=beams)
    rows = []
    for question, own in zip(QUESTIONS, pixels.split(1), strict=True):  # transformers' answers look at padding
        read = tokenizer(question, return_tensors="pt", return_token_type_ids=False)
        with widened():
            made = theirs.generate(pixel_values=own, **read, max_new_tokens=9, num_beams=beams, do_sample=False)[0, 1:]
        rows.append(torch.nn.functional.pad(made, (0, 9 - len(made)), value=3))
    check_written(found, torch.stack(rows), end=3)
    assert [one.prompt for one in found] == QUESTIONS
    alone = model.answer(PICTURES[1], QUESTIONS[1], max_new_tokens=9, num_beams=beams)
    assert isinstance(alone, GenerationOutput)
    assert alone.ids.tolist() == found[1].ids.tolist()
    assert model.answer(images=PICTURES[1], question=QUESTIONS[1], max_new_tokens=9, num_beams=beams).text == alone.text


def test_one_question_is_for_all_pictures(twin) -> None:
    _, model = twin(blip, "ForQuestionAnswering")
    found = model.answer(PICTURES, "was it?", max_new_tokens=5, batch=3)
    each = model.answer(PICTURES, ["was it?"] * 5, max_new_tokens=5)
    assert [one.ids.tolist() for one in found] == [one.ids.tolist() for one in each]


@pytest.mark.parametrize(("make", "arguments"), [(blip, ("ForQuestionAnswering",)), (llava, ()), (idefics, ())])
def test_one_picture_is_for_all_questions(twin, make, arguments) -> None:
    _, model = twin(make, *arguments)
    with io.BytesIO(png(PICTURES[1])) as file:  # which is read once
        found = model.answer(file, QUESTIONS, max_new_tokens=5, batch=2)
    each = [model.answer(PICTURES[1], question, max_new_tokens=5) for question in QUESTIONS]
    assert [one.ids.tolist() for one in found] == [one.ids.tolist() for one in each]
    (alone,) = model.answer(PICTURES[1], QUESTIONS[:1], max_new_tokens=5)
    assert alone.ids.tolist() == each[0].ids.tolist()


def test_answers_of_the_wrong_kind_are_refused(twin, tmp_path) -> None:
    _, model = twin(blip, "ForQuestionAnswering")
    photo, reading = PICTURES[0], load(bert(tmp_path, "ForQuestionAnswering"))
    refused = [
        (
            lambda: model.answer(PICTURES[:3], ["a", "b"]),
            ValueError,
            r"3.*2",
        ),
        (
            lambda: model.answer([photo], ["a", "b"]),
            ValueError,
            r"1.*2.*list",
        ),
        (lambda: model.answer(photo, []), ValueError, "list"),
        (lambda: model.answer(photo, 5), TypeError, r"str.*int.*5"),
        (lambda: model.answer("no such.jpg", "a"), FileNotFoundError, r"'no such.jpg'"),
        (lambda: model.answer(photo), TypeError, r"BLIP.*question"),
        (lambda: model.answer(photo, "a", context="b"), TypeError, "context"),
        (lambda: model.answer(photo, "a", longest=3), TypeError, "longest"),
        (
            lambda: model.answer(photo, "cat " * 40),
            ValueError,
            r"42.*37",
        ),
        (
            lambda: reading.answer(question="a", images=photo),
            TypeError,
            r"BERT.*question.*images",
        ),
        (
            lambda: reading.answer("a", "b", max_new_tokens=3, stop_strings="c", batch=2),
            TypeError,
            r"BERT.*batch.*max_new_tokens.*stop_strings",
        ),
        (
            lambda: twin(vit)[1].answer(photo, "a"),
            ValueError,
            r"'visual-question-answering'.*ViT.*'image-class",
        ),
    ]
    for call, error, message in refused:
        with pytest.raises(error, match=message):
            call()


def test_answers_from_a_text_are_as_they_were(tmp_path) -> None:
    model = load(bert(tmp_path, "ForQuestionAnswering"))
    question, context = "what was tired?", "The animal was tired."
    found = model.answer(question, context)
    assert (
        found == model.answer(question=question, context=context, longest=30) == model.answer(question, context=context)
    )
    assert found.text == context[found.start : found.end]
    assert model.answer(question, context, longest=1).text in context.replace(".", " . ").split()


# --------------------------------------------------------------------------------------------- pictures among the words


def llava_processor(folder: Path) -> Any:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    images = CLIPImageProcessorPil.from_pretrained(folder)
    more = {"patch_size": 6, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return transformers.LlavaProcessor(images, tokenizer, **more)


def written_by_llava(folder: Path, prompt: str, images: list[Image.Image], beams: int) -> Tensor:
    read = llava_processor(folder)(text=prompt, images=images or None, return_tensors="pt")
    if images:
        read["pixel_values"] = read["pixel_values"].double()
    theirs = theirs_of("LlavaForConditionalGeneration", folder)
    with widened():
        made = theirs.generate(
            **read, max_new_tokens=9, num_beams=beams, do_sample=False, eos_token_id=2, pad_token_id=0
        )
    return made[0, read["input_ids"].shape[1] :]


def written_by_idefics(folder: Path, items: list[Any], beams: int) -> Tensor:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    made = transformers.IdeficsProcessor(IdeficsImageProcessorPil.from_pretrained(folder), tokenizer)
    read = made(text=[items], return_tensors="pt")
    read["pixel_values"] = read["pixel_values"].double()
    theirs = theirs_of("IdeficsForVisionText2Text", folder)
    with widened():
        made = theirs.generate(
            **read, max_new_tokens=9, num_beams=beams, do_sample=False, eos_token_id=2, pad_token_id=0
        )
    return made[0, read["input_ids"].shape[1] :]


def same(one: GenerationOutput, row: Tensor) -> None:
    n = row.tolist().index(2) + 1 if 2 in row.tolist() else len(row)
    assert one.ids.tolist() == row[:n].tolist()


@pytest.mark.parametrize("beams", [1, 3])
def test_llava_writes_what_transformers_writes(twin, beams) -> None:
    folder, model = twin(llava)
    how = {"max_new_tokens": 9, "num_beams": beams}
    described = "USER: <image>\nWhat's the content of the image? ASSISTANT:"
    for n in (0, 1):
        asked = f"USER: <image>\n{QUESTIONS[n]} ASSISTANT:"
        one = model.answer(PICTURES[n], QUESTIONS[n], **how)
        same(one, written_by_llava(folder, asked, IMAGES[n : n + 1], beams))
        assert one.prompt == asked
        same(
            model.answer(PICTURES[n], "<image> or not?", **how),
            written_by_llava(folder, "<image> or not?", IMAGES[n : n + 1], beams),
        )
        same(model.caption(PICTURES[n], **how), written_by_llava(folder, described, IMAGES[n : n + 1], beams))
        begun = written_by_llava(folder, described + " The cat", IMAGES[n : n + 1], beams)
        same(model.caption(PICTURES[n], "The cat", **how), begun)
    prompt = "<image> is wide, <image>서울"
    same(model.generate(prompt, images=PICTURES[:2], **how), written_by_llava(folder, prompt, IMAGES[:2], beams))
    same(model.generate("The cat sat", **how), written_by_llava(folder, "The cat sat", [], beams))


@pytest.mark.parametrize("beams", [1, 3])
def test_idefics_writes_what_transformers_writes(twin, beams) -> None:
    folder, model = twin(idefics)
    how = {"max_new_tokens": 9, "num_beams": beams}
    told = "Instruction: Provide an answer to the question. Use the image to answer.\n"
    for n in (0, 1):
        items = [told, IMAGES[n], f"Question: {QUESTIONS[n]} Answer:"]
        one = model.answer(PICTURES[n], QUESTIONS[n], **how)
        same(one, written_by_idefics(folder, items, beams))
        assert one.prompt == f"{told}<image>Question: {QUESTIONS[n]} Answer:"
        same(model.caption(PICTURES[n], **how), written_by_idefics(folder, [IMAGES[n]], beams))
        same(model.caption(PICTURES[n], "a cat", **how), written_by_idefics(folder, [IMAGES[n], "a cat"], beams))
    items = ["User:", IMAGES[0], IMAGES[1], "Which? ", IMAGES[2]]
    several = model.generate("User: <image><image> Which? <image>", images=PICTURES[:3], **how)
    same(several, written_by_idefics(folder, items, beams))
    spelt = "<s>User:<fake_token_around_image><image><fake_token_around_image>Which?"
    same(
        model.generate(spelt, images=PICTURES[0], **how),
        written_by_idefics(folder, ["User:", IMAGES[0], "Which?"], beams),
    )


@pytest.mark.parametrize("make", [llava, idefics])
def test_prompts_with_unlike_pictures_are_written_together(twin, make) -> None:
    _, model = twin(make)
    prompts = ["<image> a cat <image>", "no picture", "it was <image>"]
    given = [PICTURES[:2], None, PICTURES[3]]
    together = model.generate(prompts, images=given, max_new_tokens=6)
    alone = [model.generate(p, images=own, max_new_tokens=6) for p, own in zip(prompts, given, strict=True)]
    assert [one.ids.tolist() for one in together] == [one.ids.tolist() for one in alone]
    assert [one.prompt for one in together] == prompts
    streamed = "".join(model.stream(prompts[0], images=given[0], max_new_tokens=6))
    assert streamed == alone[0].text
    answers = model.answer(PICTURES[:3], "was it?", max_new_tokens=4, batch=2)
    assert [one.ids.tolist() for one in answers] == [
        model.answer(one, "was it?", max_new_tokens=4).ids.tolist() for one in PICTURES[:3]
    ]


@pytest.mark.parametrize("make", [llava, idefics])
@pytest.mark.parametrize(
    ("prompt", "pictures", "message"),
    [
        (
            "<image> a",
            PICTURES[:2],
            r"1.*'<image>'.*2.*images",
        ),
        (
            "<image> a",
            [],
            r"1.*'<image>'.*images=.*0",
        ),
        ("a", PICTURES[0], r"'<image>'.*1"),
        (
            ["<image>", "<image><image>"],
            [PICTURES[:2], PICTURES[0]],
            r"0.*1.*'<image>'.*2",
        ),
        (["<image>", "b"], PICTURES[0], r"2.*images.*list"),
        (["<image>", "b"], [PICTURES[0]], r"2.*images.*list"),
        ("<image>" * 4 + "cat " * 140, PICTURES[:4], r"\d+.*131"),
    ],
)
def test_more_or_fewer_pictures_than_placeholders_are_refused(twin, make, prompt, pictures, message) -> None:
    with pytest.raises(ValueError, match=message):
        twin(make)[1].generate(prompt, images=pictures)


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("make", [llava, idefics])
def test_a_long_question_leaves_the_answers_to_others_as_they_are_alone(twin, make, beams) -> None:
    _, model = twin(make)
    questions = ["<image> cat", "<image> " + "cat " * 85, "<image> mat"]
    alone = [model.answer(PICTURES[0], asked, num_beams=beams) for asked in questions]
    assert [len(one.ids) < 50 and one.reason == "length" for one in alone] == [False, True, False]
    for batch in (1, 3):
        together = model.answer(PICTURES[0], questions, num_beams=beams, batch=batch)
        assert [(one.ids.tolist(), one.text, one.reason) for one in together] == [
            (one.ids.tolist(), one.text, one.reason) for one in alone
        ]
    with pytest.raises(ValueError, match=r"1.*\d+.*131"):
        model.answer(PICTURES[0], questions, max_new_tokens=60)
    with pytest.raises(ValueError, match=r"new_tokens.*1.*0"):
        model.answer(PICTURES[0], questions, max_new_tokens=0)


def read_nothing(model: Any, monkeypatch: Any) -> None:
    """Make the model raise as soon as it looks at a picture."""

    def forward(*given: Any, **named: Any) -> None:
        raise AssertionError("a picture was looked at")

    monkeypatch.setattr(model.vision.embed, "forward", forward)


@pytest.mark.parametrize("make", [llava, idefics])
def test_what_is_wrong_with_the_last_is_told_before_the_first_is_looked_at(twin, make, monkeypatch, tmp_path) -> None:
    _, model = twin(make)
    read_nothing(model, monkeypatch)
    (tmp_path / "photo.jpg").write_text("no")
    asked = ["what?"] * 9
    refused = [
        (lambda: model.caption([PICTURES[0]] * 9 + [b"no"]), ValueError, r"image.*9"),
        (
            lambda: model.caption([PICTURES[0]] * 9 + [tmp_path / "none.jpg"]),
            FileNotFoundError,
            r"image.*9",
        ),
        (
            lambda: model.answer([PICTURES[0]] * 9 + [tmp_path / "photo.jpg"], "a"),
            ValueError,
            r"image.*9",
        ),
        (
            lambda: model.answer(PICTURES[0], [*asked, "cat " * 140]),
            ValueError,
            r"9.*\d+.*131",
        ),
        (lambda: model.answer(PICTURES[0], [*asked, "<image><image>"]), ValueError, r"question.*9"),
        (
            lambda: model.features([PICTURES[0]] * 2 + [animation()], batch=1),
            ValueError,
            r"image.*2",
        ),
    ]
    for call, error, message in refused:
        with pytest.raises(error, match=message):
            call()


def test_questions_that_are_too_long_are_told_before_the_first_is_answered(twin, monkeypatch) -> None:
    _, model = twin(blip, "ForQuestionAnswering")
    read_nothing(model, monkeypatch)
    with pytest.raises(ValueError, match=r"9.*42.*37"):
        model.answer(PICTURES[0], ["what?"] * 9 + ["cat " * 40])


def test_a_picture_that_cannot_be_prepared_is_told_before_the_first_is_looked_at(twin, monkeypatch) -> None:
    model = load(twin(clip)[0])
    model.preprocessor = ImageProcessor.of("CLIP", {"size": 700, "crop_size": 30})
    read_nothing(model, monkeypatch)
    with pytest.raises(ValueError, match=r"(?:picture|image).*2.*1.*16,777,216"):
        model.match([*PICTURES[:2], np.zeros((10, 20_000, 3), np.uint8)], "a", batch=1)


def test_open_files_are_read_once_and_keep_their_names(twin, tmp_path) -> None:
    _, model = twin(vit)
    path = tmp_path / "cat.png"
    path.write_bytes(png(PICTURES[0]))
    with path.open("rb") as one, path.open("rb") as two:
        found = model.classify([one, two], batch=1)
    assert found.texts == ("cat.png", "cat.png")
    close(found.probabilities, model.classify([PICTURES[0]] * 2).probabilities)
    with path.open("rb") as file, pytest.raises(ValueError, match=r"(?:picture|image).*1"):
        model.classify([file, file])


@pytest.mark.parametrize("make", [llava, idefics])
def test_a_picture_among_prompts_is_named_by_its_number(twin, make) -> None:
    _, model = twin(make)
    for prompts, given in (
        (["<image> a"] * 3, [*PICTURES[:2], b"no"]),
        (["<image><image> a", "<image>"], [PICTURES[:2], b"no"]),
        ("<image><image><image>", [*PICTURES[:2], b"no"]),
    ):
        with pytest.raises(ValueError, match=r"(?:picture|image).*2"):
            model.generate(prompts, images=given)
    with pytest.raises(ValueError, match=r"prompt.*1"):
        model.generate(["<image> a", "<image><image>"], images=PICTURES[:2])


def test_a_model_of_texts_is_given_no_pictures(tmp_path) -> None:
    model = load(gpt2(tmp_path))
    with pytest.raises(ValueError, match=r"GPT-2.*'text-generation'.*images.*images="):
        model.generate("a", images=PICTURES[0])
    with pytest.raises(ValueError, match=r"GPT-2.*'text-generation'.*images.*images="):
        model.stream("a", images=[])


def test_embed_of_models_of_pictures_says_what_to_do_instead(twin) -> None:
    for make, *arguments in ((clip,), (blip, "ForImageTextRetrieval")):
        with pytest.raises(ValueError, match=r"model\.match\(images, texts\).*model\.encode_text.*encode_image"):
            twin(make, *arguments)[1].embed(["a"])
    for head in ("ForConditionalGeneration", "ForQuestionAnswering"):
        with pytest.raises(ValueError, match="BLIP") as raised:
            twin(blip, head)[1].embed(["a"])
        assert "encode_text" not in str(raised.value)  # which it does not have
    with pytest.raises(ValueError, match="ViT"):
        twin(vit)[1].embed(["a"])


# --------------------------------------------------------------------------------------------------- preprocessor, save


def test_a_checkpoint_that_does_not_say_how_pictures_are_prepared_can_be_told(twin, tmp_path) -> None:
    _, complete = twin(vit)
    shown = complete.classify(PICTURES[0]).probabilities
    bare = tmp_path / "bare"
    complete.save(bare)
    (bare / "preprocessor_config.json").unlink()
    model = load(bare)
    message = r"preprocessor_config\.json.*processor_config\.json.*model\.preprocessor.*ImageProcessor\.of\(.ViT"
    for ask in (lambda: model.classify(PICTURES[0]), lambda: model.features(PICTURES)):
        with pytest.raises(FileNotFoundError, match=message):
            ask()
    model.preprocessor = ImageProcessor.of("ViT", {"size": {"height": 30, "width": 30}})
    close(model.classify(PICTURES[0]).probabilities, shown)
    model.save(tmp_path / "whole")
    close(load(tmp_path / "whole").classify(PICTURES[0]).probabilities, shown)
    theirs = ViTImageProcessorPil.from_pretrained(tmp_path / "whole")(images=IMAGES, return_tensors="pt")[
        "pixel_values"
    ]
    assert torch.equal(theirs, model.preprocessor(PICTURES).pixel_values)


def test_a_model_that_was_not_loaded_says_so() -> None:
    from regard.models.families.vit import FAMILY
    from regard.models.family import Config

    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 6, "intermediate_size": 7}
    model = FAMILY.build(Config(sizes | {"image_size": 8, "patch_size": 4}), "feature-extraction")
    with pytest.raises(ValueError, match=r"model\.preprocessor"):
        model.features(PICTURES[0])


@pytest.mark.parametrize("nested", [False, True])
def test_a_preprocessor_that_was_set_is_saved_instead_of_the_old_one(nested, tmp_path) -> None:
    folder = vit(tmp_path / "vit")
    file = folder / "preprocessor_config.json"
    if nested:
        values = {"image_processor": json.loads(file.read_text()), "processor_class": "ViTProcessor", "more": 3}
        file.unlink()
        (folder / "processor_config.json").write_text(json.dumps(values))
    model = load(folder)
    before = (folder / ("processor_config.json" if nested else file.name)).read_bytes()
    assert model.preprocessor(PICTURES[0]).pixel_values.shape == (1, 3, 30, 30)
    model.save(tmp_path / "same")  # what was opened and is as the file says stays the file
    assert (tmp_path / "same" / ("processor_config.json" if nested else file.name)).read_bytes() == before
    model.preprocessor = ImageProcessor.of("ViT", {"size": {"height": 36, "width": 42}})
    model.save(tmp_path / "other")
    again = load(tmp_path / "other")
    assert again.preprocessor == model.preprocessor
    assert again.features(PICTURES[0]).grid == (6, 7)
    assert (tmp_path / "other" / "preprocessor_config.json").is_file() != nested
    if nested:
        assert json.loads((tmp_path / "other" / "processor_config.json").read_text())["more"] == 3


def test_keys_to_ignore_reach_the_preprocessor(tmp_path) -> None:
    folder = vit(tmp_path)
    file = folder / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"do_sharpen": True}))
    with pytest.raises(ValueError, match=r'do_sharpen.*True.*regard\.load\(…, ignore=\["do_sharpen"\]\)'):
        load(folder).classify(PICTURES[0])
    model = load(folder, ignore=(key for key in ["do_sharpen"]))
    assert model.ignored == ("do_sharpen",)
    assert len(model.classify(PICTURES[0])) == 1


# ----------------------------------------------------------------------------------------------------------- bad input


def png(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    Image.fromarray(array).save(out, "PNG")
    return out.getvalue()


def bomb() -> bytes:
    """A PNG whose header claims 60,000 × 60,000 pixels."""
    import struct
    import zlib

    whole = bytearray(png(np.zeros((2, 2, 3), np.uint8)))
    whole[16:24] = struct.pack(">II", 60_000, 60_000)
    whole[29:33] = struct.pack(">I", zlib.crc32(whole[12:29]))
    return bytes(whole)


def animation() -> bytes:
    out = io.BytesIO()
    IMAGES[0].save(out, "GIF", save_all=True, append_images=IMAGES[2:3])
    return out.getvalue()


def jpeg() -> bytes:
    out = io.BytesIO()
    IMAGES[0].save(out, "JPEG")
    return out.getvalue()


BAD = {
    "truncated": (jpeg()[:700], r"cannot be decoded, it is broken or cut off: "),
    "decompression bomb": (bomb(), r"is 60000 high and 60000 wide, and at most 60,000,000 pixels|too many pixels"),
    "animation": (animation(), r"has 2 frames: name one, open_image\(…, frame=0\) to frame=1"),
    "text": (b"This is no picture.\n", r"is no image that can be opened \(JPEG, PNG"),
    "empty": (b"", r"is no image that can be opened \(JPEG, PNG"),
}
VERBS = {
    "classify": (vit, (), lambda model, one: model.classify(one)),
    "features": (vit, (), lambda model, one: model.features(one)),
    "match": (clip, (), lambda model, one: model.match(one, "a cat")),
    "caption": (blip, ("ForConditionalGeneration",), lambda model, one: model.caption(one)),
    "answer": (blip, ("ForQuestionAnswering",), lambda model, one: model.answer(one, "what?")),
    "generate": (llava, (), lambda model, one: model.generate("<image>", images=[one])),
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("kind", BAD)
def test_what_is_no_picture_is_refused_by_every_verb(twin, verb, kind, tmp_path) -> None:
    content, message = BAD[kind]
    path = tmp_path / "photo.jpg"
    path.write_bytes(content)
    make, arguments, ask = VERBS[verb]
    _, model = twin(make, *arguments)
    with pytest.raises(ValueError, match=rf"{re.escape(str(path))}.*({message})"):
        ask(model, path)
    with pytest.raises(ValueError, match=rf"({message})"):
        ask(model, content)


def test_the_broken_one_of_a_list_is_named_by_its_number(twin, tmp_path) -> None:
    _, model = twin(vit)
    (tmp_path / "photo.jpg").write_text("no")
    with pytest.raises(ValueError, match=r"(?:picture|image).*2"):
        model.classify([PICTURES[0], PICTURES[1], b"no"])
    with pytest.raises(FileNotFoundError, match=r"(?:picture|image).*1.*'nowhere\.jpg'"):
        model.features([PICTURES[0], "nowhere.jpg"])
    with pytest.raises(IsADirectoryError, match=r"(?:picture|image).*1"):
        model.features([PICTURES[0], tmp_path])
    with pytest.raises(TypeError, match=r"(?:picture|image).*0.*bytes.*int"):
        model.features([5, PICTURES[0]])


@pytest.mark.parametrize(("height", "width"), [(1, 1), (10, 20_000), (20_000, 10)])
def test_tiny_and_long_pictures_are_answered_or_refused(twin, height, width) -> None:
    array = np.zeros((height, width, 3), np.uint8)
    assert twin(vit)[1].classify(array).probabilities.shape == (1, 3)  # resized to a square, whatever it was
    assert twin(swin)[1].features(array).grid == (3, 4)
    _, cropping = twin(clip)
    if height == width == 1:
        assert cropping.match(array, "a").values.shape == (1, 1)
        return
    # The shorter side becomes 30: 60,000 pixels long before the middle is cropped.
    found = cropping.features(array)
    assert found.frame.pixels == (30, 30)
    assert max(found.frame.corner) == pytest.approx(9_995, abs=1)


def test_a_picture_that_would_be_enlarged_beyond_all_bounds_is_refused(twin) -> None:
    model = load(twin(clip)[0])
    model.preprocessor = ImageProcessor.of(
        "CLIP", {"size": {"shortest_edge": 700}, "crop_size": {"height": 30, "width": 30}}
    )
    with pytest.raises(ValueError, match=r"700.*1400000.*1.*16,777,216"):
        model.match(np.zeros((10, 20_000, 3), np.uint8), "a")


def test_a_picture_smaller_than_a_patch_is_refused(tmp_path) -> None:
    for make, arguments in ((vit, ()), (blip, ("ForConditionalGeneration",))):
        model = load(make(tmp_path / make.__name__, *arguments))
        model.preprocessor = ImageProcessor.of("ViT", {"do_resize": False})
        with pytest.raises(ValueError, match=r"5.*7.*6"):
            model.features(np.zeros((5, 7, 3), np.uint8))


def test_missing_pillow_is_named_with_the_command_that_installs_it(twin, monkeypatch) -> None:
    _, model = twin(vit)
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    with pytest.raises(ImportError, match=r"Pillow.*'regard\[models\]'"):
        model.classify("photo.jpg")


# --------------------------------------------------------------------------------------------------------- photographs


def test_photographs_of_every_kind_are_classified_as_transformers_classifies_them(twin, data) -> None:
    folder, model = twin(vit)
    files = [data / "sample_photos" / name for name in ("rocket.jpg", "coins.png", "chelsea.png", "horse.png")]
    pixels = their_pixels(ViTImageProcessorPil, folder, [open_image(file).image for file in files])
    logits = their(theirs_of("ViTForImageClassification", folder), pixel_values=pixels).logits
    found = model.classify(files)
    close(found.probabilities, logits.softmax(-1))
    assert found.texts == ("rocket.jpg", "coins.png", "chelsea.png", "horse.png")


def test_features_lie_where_the_lens_says_they_lie(twin) -> None:
    """The boxes of the features are those of the attentions that made them."""
    _, model = twin(dinov2)
    one = model.features(PICTURES[1])
    sides = model.layouts(one.frame)["tower.blocks.2.attention"]
    assert sides.keys == one.layout
    with regard.watch(model) as seen:
        model.features(PICTURES[1])
    assert seen["tower.blocks.2.attention"].received.shape[-1] == len(one.vectors)
