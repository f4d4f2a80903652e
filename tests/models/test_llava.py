"""LLaVA against transformers: two unlike configurations, several pictures in a text, answers, and what is refused."""

import json
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from speaking_twins import pieces
from torch import Tensor
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration
from twins import Twin, assert_same, assert_saved, change, of_theirs, pictures, widened

import regard
from regard.data.images import open_image
from regard.generation.loop import generate
from regard.layouts import Frame, Layout
from regard.models.families.llava import FAMILY, placeholder
from regard.models.family import Config, empty, places
from regard.models.loading import load
from regard.testing import assert_rule

PLACEHOLDER, PAD = 5, 0

# 5 × 5 patches; the language model has groups of heads and shares its table of words.
VISION = {"hidden_size": 20, "num_hidden_layers": 3, "num_attention_heads": 5, "intermediate_size": 29}
VISION |= {"image_size": 20, "patch_size": 4}
TEXT = {"vocab_size": 47, "hidden_size": 30, "num_hidden_layers": 2, "num_attention_heads": 6, "head_dim": 10}
TEXT |= {"num_key_value_heads": 2, "intermediate_size": 37, "max_position_embeddings": 89, "tie_word_embeddings": True}
USUAL = {"vision_config": VISION, "text_config": TEXT}

# 3 × 3 patches and cls, with a pixel left over at the edges, seen after two of the blocks.
OTHER_VISION = {"hidden_size": 12, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 17}
OTHER_VISION |= {"image_size": 16, "patch_size": 5, "num_channels": 1, "hidden_act": "gelu", "layer_norm_eps": 1e-3}
OTHER_TEXT = {"vocab_size": 31, "hidden_size": 21, "num_hidden_layers": 3, "num_attention_heads": 3, "head_dim": 8}
OTHER_TEXT |= {"num_key_value_heads": 3, "intermediate_size": 19, "max_position_embeddings": 61, "rope_theta": 97.0}
OTHER_TEXT |= {"attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-3, "hidden_act": "gelu_new"}
OTHER = {"vision_config": OTHER_VISION, "text_config": OTHER_TEXT, "vision_feature_layer": [-2, 1]}
OTHER |= {"vision_feature_select_strategy": "full", "multimodal_projector_bias": False, "projector_hidden_act": "relu"}

CONFIGS = {"patches after the last block but one": USUAL, "cls too, after two blocks": OTHER}
USUAL_NAME, OTHER_NAME = CONFIGS
EACH = {"patches after the last block but one": 25, "cls too, after two blocks": 10}
SIZES = {"patches after the last block but one": (20, 20, 3), "cls too, after two blocks": (16, 16, 1)}
HEADS = ["Model", "ForConditionalGeneration"]

STORED = {
    r"(?<= of )model\.": "",
    r"(?<= of )lm_head": "language_model.lm_head",
    r"language_model\.(?!model\.|lm_head\.)": "language_model.model.",
    r"vision_tower\.(vision_model\.)?": "vision_tower.vision_model.",
}


def both_towers(model: Any, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """What transformers makes, and what stood after each block of its tower of pictures, which it keeps to itself."""
    seen = []
    tower = getattr(model, "model", model).vision_tower
    # From 5.23 on, transformers asks its tower for the layers alone that it projects.
    hooks = [
        tower.register_forward_pre_hook(
            lambda module, args, given: (args, given | {"output_hidden_states": True}), with_kwargs=True
        ),
        tower.register_forward_hook(lambda module, args, made: seen.append(made.hidden_states)),
    ]
    made = of_theirs(model, inputs)
    for hook in hooks:
        hook.remove()
    return made | {f"memory layer {i}": layer for layers in seen for i, layer in enumerate(layers)}


def twin_of(head: str, config: str, directory: Path) -> Twin:
    values = CONFIGS[config] | {"image_token_index": PLACEHOLDER, "image_seq_length": EACH[config]}
    vision, text = CLIPVisionConfig(**values["vision_config"]), LlamaConfig(**values["text_config"], pad_token_id=PAD)
    made = LlavaConfig(**{**values, "vision_config": vision, "text_config": text})
    return Twin("Llava" + head, made, directory, stored=STORED, read=both_towers)


def asked(config: str, side: str = "none", *, texts: int = 13, most: int = 3) -> dict[str, Tensor]:
    """Texts with no picture, one, two, and so on below `most`, each after words; and the pictures of all, in order.

    side: where shorter texts are padded; "none" fills them with words.
    """
    random = torch.Generator().manual_seed(3)

    def words(count: int) -> list[int]:
        return torch.randint(7, 31, (count,), generator=random).tolist()

    def text(number: int) -> list[int]:
        row = []
        for _ in range(number % most):
            row += [*words(1 + number % 4), *[PLACEHOLDER] * EACH[config]]
        return row + words(2 + number % 5)

    rows = [text(number) for number in range(texts)]
    longest = max(map(len, rows))
    ids, mask = torch.full((texts, longest), PAD), torch.zeros(texts, longest, dtype=torch.bool)
    for number, row in enumerate(rows):
        full = row + words(longest - len(row)) if side == "none" else row
        at = slice(longest - len(full), None) if side == "left" else slice(len(full))
        ids[number, at], mask[number, at] = torch.tensor(full), True
    height, width, channels = SIZES[config]
    count = sum(number % most for number in range(texts))
    given = {"input_ids": ids} | (pictures(height, width, count, channels) if count else {})
    return (
        given if side == "none" else given | {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    )


def inputs(head: str, config: str, side: str) -> dict[str, Tensor]:
    """What a head is asked: all are asked the same."""
    return asked(config, side)


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("head", HEADS)
def test_every_head_computes_what_transformers_computes(head, config, dtype, tmp_path):
    twin = twin_of(head, config, tmp_path)
    for side in ("none", "right", "left"):
        assert_same(twin, dtype, asked(config, side))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_texts_without_a_picture_are_read_as_transformers_reads_them(dtype, tmp_path):
    twin = twin_of("ForConditionalGeneration", USUAL_NAME, tmp_path)
    given = asked(USUAL_NAME, "left", most=1)
    assert "pixel_values" not in given
    assert_same(twin, dtype, given)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("head", HEADS)
def test_what_we_save_transformers_opens(head, config, tmp_path):
    given = asked(config, "right")
    assert_saved(twin_of(head, config, tmp_path / "theirs"), tmp_path / "ours", given)


@pytest.mark.parametrize("size", [(29, 13), (8, 23)])
def test_pictures_that_are_not_square_are_read_at_their_own_size(size, tmp_path):
    """transformers' LLaVA takes squares of one size alone; its parts, put together here, take others."""
    twin = twin_of("ForConditionalGeneration", USUAL_NAME, tmp_path)
    pixels = pictures(*size, 2)["pixel_values"]
    each = (size[0] // 4) * (size[1] // 4)
    ids = torch.tensor([[7, *[PLACEHOLDER] * each, 9], [*[PLACEHOLDER] * each, 8, 7]])
    with torch.no_grad(), widened():
        body, theirs = twin.truth.model, twin.truth
        seen = body.vision_tower(pixels, interpolate_pos_encoding=True, output_hidden_states=True)
        vectors = body.multi_modal_projector(seen.hidden_states[-2][:, 1:])
        words = body.get_input_embeddings()(ids)
        words[ids == PLACEHOLDER] = vectors.flatten(0, 1)
        expected = theirs(inputs_embeds=words).logits
    model = twin.ours(torch.float64)
    made = model(ids, pixel_values=pixels)
    torch.testing.assert_close(made.logits, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(model.encode(pixels), vectors, rtol=0, atol=1e-12)
    assert torch.equal(model.encode(pixels), made.encoder_last_hidden_state)


def test_blocks_above_the_last_layer_taken_do_not_run(tmp_path):
    model = twin_of("ForConditionalGeneration", USUAL_NAME, tmp_path).ours(torch.float32)
    ran = []
    for number, block in enumerate(model.vision.blocks):
        block.register_forward_hook(lambda *_, n=number: ran.append(n))
    given = asked(USUAL_NAME, texts=2)
    short = model(**given)
    assert ran == [0, 1]
    assert short.encoder_hidden_states is None
    full = model(**given, output_hidden_states=True)
    assert ran == [0, 1, 0, 1, 2]
    assert len(full.encoder_hidden_states) == 4
    assert torch.equal(full.logits, short.logits)


# ----------------------------------------------------------------------------------------------------- writing answers


def chosen(config: str, which: str) -> dict[str, Tensor]:
    """A text with one picture, one with two, or a batch of texts with none, one and two, padded on the left."""
    given = asked(config, "left", texts=4)
    row = {"one picture": slice(1, 2), "two pictures": slice(2, 3), "a batch": slice(None)}[which]
    picture = {"one picture": slice(0, 1), "two pictures": slice(1, 3), "a batch": slice(None)}[which]
    mask = given["attention_mask"][row]
    start = int(mask.any(0).int().argmax())  # a text alone is not padded
    return {
        "input_ids": given["input_ids"][row, start:],
        "attention_mask": mask[:, start:],
        "pixel_values": given["pixel_values"][picture],
    }


def merged(theirs: Any, given: dict[str, Tensor]) -> Tensor:
    """The sequence that transformers' language model reads."""
    read = []
    hook = theirs.model.language_model.register_forward_pre_hook(
        lambda module, args, more: read.append(more["inputs_embeds"]), with_kwargs=True
    )
    theirs(given["input_ids"], pixel_values=given["pixel_values"], attention_mask=given["attention_mask"].long())
    hook.remove()
    return read[0]


@pytest.fixture(scope="module", params=CONFIGS)
def writers(request: Any, tmp_path_factory: Any) -> tuple[str, Any, Any]:
    """Ours and transformers' in fp64; the latter with sdpa, since its eager gives NaN for padding there."""
    directory = tmp_path_factory.mktemp("llava")
    twin = twin_of("ForConditionalGeneration", request.param, directory)
    theirs = LlavaForConditionalGeneration.from_pretrained(
        directory, dtype=torch.float64, attn_implementation="sdpa"
    ).eval()
    return request.param, twin.ours(torch.float64), theirs


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("which", ["one picture", "two pictures", "a batch"])
def test_written_ids_are_those_of_transformers(writers, which, beams):
    config, model, theirs = writers
    given = chosen(config, which)
    ids, mask, pixels = given["input_ids"], given["attention_mask"], given["pixel_values"]
    # Of several pictures in one text, some versions of transformers give beams the wrong ones: beams get them as words.
    told = {"inputs_embeds": merged(theirs, given)} if beams > 1 else {"input_ids": ids, "pixel_values": pixels}
    asks = {"max_new_tokens": 19, "num_beams": beams, "do_sample": False, "pad_token_id": PAD}
    free = theirs.generate(**told, attention_mask=mask.long(), eos_token_id=None, **asks)[:, -19:]
    made = generate(model.read_image(pixels), ids, mask, max_new_tokens=19, pad_token_id=PAD, num_beams=beams)
    assert torch.equal(made.ids, free)
    end = int(free[0, 4])  # a token that comes: now it ends a text
    wanted = theirs.generate(**told, attention_mask=mask.long(), eos_token_id=end, **asks)
    wanted = wanted[:, 0 if beams > 1 else ids.shape[1] :]
    ended = generate(
        model.read_image(pixels), ids, mask, max_new_tokens=19, eos_token_ids=end, pad_token_id=PAD, num_beams=beams
    )
    for ours, row, length in zip(ended.ids, wanted, ended.lengths, strict=True):
        assert torch.equal(ours[:length], row[:length])
        assert set(row[length:].tolist()) <= {PAD, end}  # with these transformers fills rows up


def test_other_pictures_give_other_words(writers):
    """Else the test above would hold for pictures that are not looked at, or in another order."""
    config, model, _ = writers
    given = chosen(config, "two pictures")
    logits = [
        model.read_image(pixels).begin(given["input_ids"], given["attention_mask"], length=len(given["input_ids"][0]))[
            0
        ]
        for pixels in (given["pixel_values"], given["pixel_values"].flip(0), given["pixel_values"] * 0)
    ]
    for one, other in ((0, 1), (0, 2)):
        assert float((logits[one] - logits[other]).abs().max()) > 0.01


def continued(model: Any, given: dict[str, Tensor], more: Tensor) -> Tensor:
    """Logits after each of the tokens `more` (B, steps), all at once: (steps, B, V)."""
    mask = torch.cat([given["attention_mask"], torch.ones_like(more, dtype=torch.bool)], 1)
    whole = torch.cat([given["input_ids"], more], 1)
    return model(whole, mask, pixel_values=given["pixel_values"]).logits[:, -more.shape[1] :].transpose(0, 1)


def test_steps_read_one_token_and_compute_what_the_whole_computes(writers):
    config, model, _ = writers
    given = chosen(config, "a batch")
    more = torch.randint(7, 31, (4, 5), generator=torch.Generator().manual_seed(11))
    reading, n = model.read_image(given["pixel_values"]), given["input_ids"].shape[1]
    first, state = reading.begin(given["input_ids"], given["attention_mask"], length=n + 5)
    whole = model(given["input_ids"], given["attention_mask"], pixel_values=given["pixel_values"]).logits
    torch.testing.assert_close(first, whole[:, -1], rtol=0, atol=1e-12)
    expected = continued(model, given, more)
    ran = []
    hooks = [model.text.tower.embed.register_forward_pre_hook(lambda module, args: ran.append(args[0].shape))]
    hooks += [model.vision.embed.register_forward_hook(lambda *_: ran.append("a picture"))]
    made = torch.stack([reading.step(state, column) for column in more.T])
    for hook in hooks:
        hook.remove()
    torch.testing.assert_close(made, expected, rtol=0, atol=1e-12)
    assert ran == [(4, 1)] * 5
    assert len(state) == n + 5


@torch.no_grad()
def test_steps_under_autocast_are_one_pass(tmp_path):
    model = twin_of("ForConditionalGeneration", USUAL_NAME, tmp_path).ours(torch.float32)
    given = chosen(USUAL_NAME, "a batch")
    more = torch.randint(7, 31, (4, 5), generator=torch.Generator().manual_seed(11))
    with torch.autocast("cpu", torch.bfloat16):
        baseline, reading = continued(model, given, more), model.read_image(given["pixel_values"])
        _, state = reading.begin(given["input_ids"], given["attention_mask"], length=given["input_ids"].shape[1] + 5)
        made = torch.stack([reading.step(state, column) for column in more.T])
    assert_rule(made, baseline, continued(model.double(), given, more))


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")  # the interpreter's NumPy reports −∞ − −∞
def test_steps_after_pictures_are_those_of_the_kernels_for_one_row(tmp_path):
    """Which a GPU captures and replays; interpreted where there is none."""
    pytest.importorskip("triton", reason="needs triton: pip install 'regard[gpu]'")
    from interpreting import interpreted

    from regard.generation import cuda_kernels, cuda_step

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = twin_of("ForConditionalGeneration", USUAL_NAME, tmp_path).ours(torch.float32, device=device)
    given = {name: tensor.to(device) for name, tensor in chosen(USUAL_NAME, "a batch").items()}
    more = torch.randint(7, 31, (4, 3), generator=torch.Generator().manual_seed(11)).to(device)
    length = given["input_ids"].shape[1] + 3
    _, state = model.read_image(given["pixel_values"]).begin(given["input_ids"], given["attention_mask"], length=length)
    assert cuda_step.unsupported_reason(model.text.tower, model.text.head, torch.float32) is None
    assert state.padded_left
    steady, made = cuda_step.StepBuffers.of(state, model.text.tower.rotary), []
    with nullcontext() if device == "cuda" else interpreted(cuda_kernels):
        for column in more.T:
            steady.tokens.copy_(column)
            made.append(cuda_step.step(model.text.tower, model.text.head, steady))
    baseline = continued(model, given, more)
    assert_rule(torch.stack(made), baseline, continued(model.double(), given, more))


@pytest.mark.gpu
@torch.no_grad()
def test_steps_after_pictures_are_captured_on_a_gpu(tmp_path):
    model = twin_of("ForConditionalGeneration", USUAL_NAME, tmp_path).ours(torch.float32, device="cuda")
    given = {name: tensor.cuda() for name, tensor in chosen(USUAL_NAME, "a batch").items()}
    more = torch.randint(7, 31, (4, 3), generator=torch.Generator().manual_seed(11)).cuda()
    reading = model.read_image(given["pixel_values"])
    _, state = reading.begin(given["input_ids"], given["attention_mask"], length=given["input_ids"].shape[1] + 3)
    made = [reading.step(state, column).clone() for column in more.T]
    assert state.captured is not None
    baseline = continued(model, given, more)
    assert_rule(torch.stack(made), baseline, continued(model.double(), given, more))


def test_a_text_without_a_picture_is_continued_too(writers):
    config, model, theirs = writers
    ids = asked(config, texts=3, most=1)["input_ids"]
    wanted = theirs.generate(ids, max_new_tokens=7, do_sample=False, eos_token_id=None, pad_token_id=PAD)
    made = generate(model.read_image(None), ids, max_new_tokens=7, pad_token_id=PAD)
    assert torch.equal(made.ids, wanted[:, ids.shape[1] :])


def test_a_body_writes_no_text(tmp_path):
    model = twin_of("Model", USUAL_NAME, tmp_path).ours(torch.float32)
    with pytest.raises(ValueError, match=r"'feature-extraction'.*task='image-text-to-text'"):
        model.read_image(None)


# --------------------------------------------------------------------------------------------------------- bad input


@pytest.fixture(scope="module")
def model(tmp_path_factory: Any) -> Any:
    return twin_of("ForConditionalGeneration", USUAL_NAME, tmp_path_factory.mktemp("llava")).ours(torch.float32)


def ids_with(*image_tokens: int) -> Tensor:
    """Texts of one length, each with so many image tokens."""
    longest = max(image_tokens) + 2
    return torch.tensor([[*[PLACEHOLDER] * count, *[7] * (longest - count)] for count in image_tokens])


@pytest.mark.parametrize(
    ("held", "count", "message"),
    [
        ((25, 25), 3, r"\[25, 25\].*id 5.*3 images of 25"),
        ((50, 0), 1, r"\[50, 0\].*id 5.*1 images of 25"),
        ((25,), 2, r"\[25\].*id 5.*2 images of 25"),
        ((0,), 1, r"\[0\].*id 5.*1 images of 25"),
        ((25, 1), 1, r"\[25, 1\].*id 5.*1 images of 25"),
        ((26, 24), 2, r"\[26, 24\].*id 5.*model\.expand\(text, pixel_values\)"),
        ((25,), None, r"\[25\].*id 5.*0 images"),
    ],
)
def test_more_or_fewer_pictures_than_placeholders_are_refused_before_anything_runs(model, held, count, message):
    pixels = None if count is None else pictures(20, 20, count)["pixel_values"]
    ran = []
    hooks = [part.register_forward_hook(lambda *_: ran.append(1)) for part in (model.vision.embed, model.text.tower)]
    with pytest.raises(ValueError, match=message):
        model(ids_with(*held), pixel_values=pixels)
    assert not ran
    with pytest.raises(ValueError, match=message):
        model.read_image(pixels).begin(ids_with(*held), None, length=60)
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"input_ids": [[7]]}, TypeError, r"ids.*int64"),
        ({"input_ids": torch.full((1, 90), 7)}, ValueError, r"90.*89.*positions"),
        ({"input_ids": torch.tensor([[47]])}, ValueError, r"id.*47"),
        ({"input_ids": torch.tensor([[7]]), "attention_mask": torch.tensor([[2]])}, ValueError, "attention_mask"),
        ({"input_ids": ids_with(25), "pixel_values": torch.ones(1, 3, 20, 20).int()}, TypeError, "pixel_values"),
        (
            {"input_ids": ids_with(25), "pixel_values": torch.ones(1, 1, 20, 20)},
            ValueError,
            r"pixel_values.*\(B, 3, H, W\)",
        ),
        ({"input_ids": ids_with(25), "pixel_values": torch.ones(1, 3, 3, 20)}, ValueError, "4 × 4"),
        ({"input_ids": torch.tensor([[7]]), "position_ids": torch.tensor([[-1]])}, ValueError, r"position_ids.*0"),
    ],
)
def test_input_that_does_not_fit_is_refused(model, given, error, message):
    with pytest.raises(error, match=message):
        model(**given)


def test_a_prompt_padded_on_the_right_and_too_much_room_are_refused(model):
    ids, mask = torch.tensor([[7, 8], [9, PAD]]), torch.tensor([[True, True], [True, False]])
    with pytest.raises(ValueError, match="padding"):
        model.read_image(None).begin(ids, mask, length=5)
    with pytest.raises(ValueError, match=r"90.*89"):
        model.read_image(None).begin(ids, None, length=90)


# ---------------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("part", "values", "message"),
    [
        ("text_config", {"model_type": "mistral"}, r"text_config.*model_type.*'mistral'.*'llama'"),
        ("text_config", {"rope_interleaved": True}, r"text_config.*rope_interleaved.*True.*False"),
        ("text_config", {"sliding_window": 5}, r"text_config.*LLaVA.*sliding_window.*5"),
        ("vision_config", {"model_type": "siglip_vision_model"}, "'clip_vision_model'"),
        ("vision_config", {"hidden_act": "mish"}, "'mish'"),
        ("vision_config", {"use_registers": 4}, r"vision_config.*LLaVA.*use_registers.*4"),
        ("", {"vision_feature_select_strategy": "cls"}, r"'cls'.*'default'.*'full'"),
        ("", {"vision_feature_layer": 4}, r"\[4\].*3.*0.*3.*-4.*-1"),
        ("", {"vision_feature_layer": [-2, -5]}, r"\[-2, -5\].*3"),
        ("", {"vision_feature_layer": []}, r"vision_feature_layer.*\[\]"),
        ("", {"vision_feature_layer": "last"}, r"list.*'last'"),
        ("", {"vision_feature_layer": [True]}, r"list.*\[True\]"),
        ("", {"projector_hidden_act": "quick"}, "'quick'"),
        ("", {"multimodal_projector_bias": False}, r"2.*multi_modal_projector\.linear_1\.bias"),
        ("", {"image_token_index": 47}, r"image_token_index.*0.*46.*47"),
        ("", {"image_token_index": None}, "image_token_index"),
        (
            "",
            {"image_token_index": None, "image_token_id": 47},
            r"image_token_id.*0.*46",
        ),
        ("", {"image_token_id": 6}, r"image_token_id.*6.*5"),
        ("", {"image_grid_pinpoints": [[336, 672]]}, r"LLaVA.*image_grid_pinpoints"),
    ],
)
def test_settings_that_would_change_the_maths_are_refused(part, values, message, tmp_path):
    twin_of("ForConditionalGeneration", USUAL_NAME, tmp_path)
    known = json.loads((tmp_path / "config.json").read_text())
    change(tmp_path, **({part: known[part] | values} if part else values))
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


@pytest.mark.parametrize("which", ["of the whole", "of the text"])
def test_words_are_shared_where_either_part_says_so(which, tmp_path):
    twin = twin_of("ForConditionalGeneration", USUAL_NAME, tmp_path)
    known, given = json.loads((tmp_path / "config.json").read_text()), asked(USUAL_NAME, texts=2)
    wanted = twin.ours(torch.float32)(**given).logits
    shared = which == "of the text"
    text = known["text_config"] | {"tie_word_embeddings": shared}
    change(tmp_path, text_config=text, tie_word_embeddings=not shared)
    assert torch.equal(load(tmp_path)(**given).logits, wanted)
    change(tmp_path, text_config=text | {"tie_word_embeddings": False}, tie_word_embeddings=False)
    with pytest.raises(ValueError, match=r"language_model\.lm_head\.weight"):
        load(tmp_path)


def test_a_second_table_of_words_must_be_the_shared_one(tmp_path):
    twin = twin_of("ForConditionalGeneration", USUAL_NAME, tmp_path)
    file, given = tmp_path / "model.safetensors", asked(USUAL_NAME, texts=2)
    wanted, tensors = twin.ours(torch.float32)(**given).logits, load_file(file)
    words = tensors["language_model.model.embed_tokens.weight"]
    save_file(tensors | {"language_model.lm_head.weight": words.clone()}, file, metadata={"format": "pt"})
    assert torch.equal(load(tmp_path)(**given).logits, wanted)
    save_file(tensors | {"language_model.lm_head.weight": words + 1}, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"language_model\.lm_head\.weight.*language_model"):
        load(tmp_path)


def test_a_projector_with_biases_must_have_them(tmp_path):
    twin_of("ForConditionalGeneration", OTHER_NAME, tmp_path)
    change(tmp_path, multimodal_projector_bias=True)
    with pytest.raises(ValueError, match=r"2.*multi_modal_projector\.linear_1\.bias"):
        load(tmp_path)


def test_the_body_can_be_read_from_a_checkpoint_that_writes(tmp_path):
    whole = twin_of("ForConditionalGeneration", OTHER_NAME, tmp_path).ours(torch.float32)
    given = asked(OTHER_NAME, texts=2)
    body = load(tmp_path, task="feature-extraction")(**given)
    assert body.logits is None
    assert torch.equal(body.last_hidden_state, whole(**given).last_hidden_state)


# What config.json of llava-hf/llava-1.5-7b-hf says: of its LLaMA, little.
HUB = {
    "architectures": ["LlavaForConditionalGeneration"],
    "ignore_index": -100,
    "image_seq_length": 576,
    "image_token_index": 32000,
    "model_type": "llava",
    "pad_token_id": 32001,
    "projector_hidden_act": "gelu",
    "text_config": {
        "_name_or_path": "lmsys/vicuna-7b-v1.5",
        "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": 4096,
        "model_type": "llama",
        "rms_norm_eps": 1e-05,
        "torch_dtype": "float16",
        "vocab_size": 32064,
    },
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.36.0.dev0",
    "vision_config": {
        "hidden_size": 1024,
        "image_size": 336,
        "intermediate_size": 4096,
        "model_type": "clip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "patch_size": 14,
        "projection_dim": 768,
        "vocab_size": 32000,
    },
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
    "vocab_size": 32064,
}


def test_the_published_settings_make_the_published_model():
    settings = Config(HUB)
    made = empty(FAMILY, settings, "image-text-to-text")
    settings.check_unused(FAMILY.title, harmless=FAMILY.harmless)
    assert sum(weight.numel() for weight in made.parameters()) == 7_063_427_072
    assert made.num_image_tokens(336, 336) == 576
    assert (made.max_positions, made.vocabulary, made.layers) == (4096, 32064, (23,))
    theirs = {name for place in places(made, "") for name in place.theirs}
    assert len(theirs) == 686
    assert {
        "language_model.lm_head.weight",
        "language_model.model.layers.31.self_attn.q_proj.weight",
        "multi_modal_projector.linear_2.bias",
        "vision_tower.vision_model.embeddings.class_embedding",
        "vision_tower.vision_model.encoder.layers.23.mlp.fc2.bias",
        "vision_tower.vision_model.post_layernorm.weight",
        "vision_tower.vision_model.pre_layrnorm.bias",
    } < theirs


RENAMED = {  # as transformers 5.22 writes them → as they are called elsewhere
    "on the hub": {r"^vision_tower\.(?!vision_model\.)": "vision_tower.vision_model."},
    "in the memory of transformers 5": {
        r"^language_model\.model\.": "model.language_model.",
        r"^language_model\.lm_head\.": "lm_head.",
        r"^vision_tower\.(vision_model\.)?": "model.vision_tower.",
        r"^multi_modal_projector\.": "model.multi_modal_projector.",
    },
    "in the memory of its body": {r"^language_model\.model\.": "language_model."},
}


@pytest.mark.parametrize("where", RENAMED)
def test_the_names_of_other_versions_of_transformers_are_read(where, tmp_path):
    twin = twin_of("ForConditionalGeneration", OTHER_NAME, tmp_path)
    given, file = asked(OTHER_NAME, texts=2), tmp_path / "model.safetensors"
    wanted, tensors = twin.ours(torch.float32)(**given).logits, load_file(file)
    for old, new in RENAMED[where].items():
        tensors = {re.sub(old, new, name): tensor for name, tensor in tensors.items()}
    file.unlink()
    save_file(tensors, file, metadata={"format": "pt"})
    assert torch.equal(load(tmp_path)(**given).logits, wanted)


# ------------------------------------------------------------------------------------------------- the lens, and text


def framed(config: str, count: int) -> list[Frame]:
    height, width, _ = SIZES[config]
    return [Frame.whole(90 + n, 70).resized(height, width) for n in range(count)]


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("count", [0, 1, 2])
def test_layouts_say_of_every_attention_what_its_tokens_are(config, count, tmp_path):
    model = twin_of("ForConditionalGeneration", config, tmp_path).ours(torch.float32)
    given = asked(config, texts=3)
    ids, pixels = given["input_ids"][count], given["pixel_values"][1 : 1 + count] if count else None
    layouts = model.layouts(ids, framed(config, count))
    with regard.watch(model) as seen:
        model(ids[None], pixel_values=pixels, output_hidden_states=True)
    assert set(layouts) == set(seen.names)
    for path, sides in layouts.items():
        batch, _, nq, nk = seen[path].sizes
        assert sides.queries.shape == (batch, nq)
        assert sides.keys.shape == (batch, nk)
        assert len(sides.frames) == count


def test_layouts_put_the_patches_of_each_picture_in_its_place(model):
    ids = torch.tensor([PAD, 7, *[PLACEHOLDER] * 25, 8, 9, *[PLACEHOLDER] * 25, 7])
    mask = torch.arange(55) > 0
    layouts = model.layouts(ids, framed(USUAL_NAME, 2), attention_mask=mask)
    words, towers = layouts["text.tower.blocks.0.attention"].keys, layouts["vision.blocks.2.attention"].keys
    said = "Layout(1 padding, 1 text, 25 patches of image 0, 2 text, 25 patches of image 1, 1 text)"
    assert repr(words) == said
    assert words.box[0, 2 + 6].tolist() == [4.0, 4.0, 8.0, 8.0]  # second row, second column
    assert words.box[0, 29 + 24].tolist() == [16.0, 16.0, 20.0, 20.0]
    assert towers.shape == (2, 26)
    assert [set(row) for row in towers.image.tolist()] == [{0}, {1}]
    assert towers.kind[:, 0].tolist() == ["cls", "cls"]
    assert np.array_equal(towers.box[1, 1:], words.box[0, 29:54])


def test_where_cls_is_kept_it_stands_before_the_patches(tmp_path):
    model = twin_of("Model", OTHER_NAME, tmp_path).ours(torch.float32)
    layouts = model.layouts(ids_with(10)[0], framed(OTHER_NAME, 1))
    assert layouts["text.tower.blocks.1.attention"].queries == (
        Layout.grid(3, 3, size=(5, 5), before=("cls",)) + Layout.text(2)
    )


def test_layouts_refuse_pictures_that_are_not_in_the_text(model):
    with pytest.raises(ValueError, match=r"25.*id 5.*2 images of 25"):
        model.layouts(ids_with(25)[0], framed(USUAL_NAME, 2))


def test_a_placeholder_is_not_dropped_for_a_picture_that_is_none(model):
    with pytest.raises(ValueError, match=r"1.*4"):
        model.expand("<i> a", torch.zeros(1, 3, 1, 1), token="<i>")
    with pytest.raises(TypeError, match=r"pixel_values.*list"):
        model.expand("<i> a", [torch.zeros(3, 20, 20)], token="<i>")


def processor(directory: Path, size: int, **more: Any) -> Any:
    """A LlavaProcessor with a tokenizer like LLaMA's, and both in the directory."""
    rust, names = pieces("<pad>", "<s>", "</s>", "<unk>", frame="<s> $A")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=rust, **names)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    sized = {"size": {"shortest_edge": size}, "crop_size": {"height": size, "width": size}}
    images = transformers.CLIPImageProcessorPil(**sized)
    made = transformers.LlavaProcessor(images, tokenizer, num_additional_image_tokens=1, **more)
    made.save_pretrained(directory)
    return made


QUESTIONS = {
    "USER: <image>\nWhat is on the mat? ASSISTANT:": ["chelsea.png"],
    "<image> 서울? <image><image>the end": ["coffee.png", "camera.png", "astronaut.png"],
    "no picture": [],
}


@pytest.mark.parametrize("config", CONFIGS)
def test_questions_about_photographs_are_read_as_the_processor_reads_them(config, data, tmp_path):
    values = CONFIGS[config] | {"image_token_index": 363}
    values["vision_config"] = CLIPVisionConfig(**values["vision_config"] | {"num_channels": 3})
    values["text_config"] = LlamaConfig(**values["text_config"] | {"vocab_size": 364, "max_position_embeddings": 199})
    twin = Twin("LlavaForConditionalGeneration", LlavaConfig(**values), tmp_path)
    kept = values.get("vision_feature_select_strategy", "default")
    size, patch = values["vision_config"].image_size, values["vision_config"].patch_size
    made = processor(tmp_path, size, patch_size=patch, vision_feature_select_strategy=kept)
    model = twin.ours(torch.float32)
    for question, names in QUESTIONS.items():
        files = [data / "sample_photos" / name for name in names]
        photos = [open_image(file).image for file in files]
        theirs = made(text=question, images=photos or None, return_tensors="pt")
        seen = model.preprocessor(files) if files else None
        ids = model.tokenizer.batch([model.expand(question, None if seen is None else seen.pixel_values)]).input_ids
        assert torch.equal(ids, theirs["input_ids"])
        if seen is not None:
            assert torch.equal(seen.pixel_values, theirs["pixel_values"])
            assert model(ids, pixel_values=seen.pixel_values).logits.shape == (1, ids.shape[1], 364)


def test_the_placeholder_may_be_called_image_token_id(model, tmp_path):
    directory = twin_of("ForConditionalGeneration", USUAL_NAME, tmp_path).directory
    assert load(change(directory, image_token_index=None, image_token_id=PLACEHOLDER)).placeholder == PLACEHOLDER
    load(directory).save(tmp_path / "again")
    assert load(tmp_path / "again").placeholder == PLACEHOLDER
    assert load(change(directory, image_token_index=PLACEHOLDER)).placeholder == PLACEHOLDER, "both may be there"
    assert placeholder(Config({}), 32001) == 32000


def test_a_text_with_more_or_fewer_placeholders_than_pictures_is_refused(model):
    for text, pixels, message in (
        (
            "<image> and <image>",
            torch.zeros(1, 3, 20, 20),
            r"2.*'<image>'.*pixel_values=.*1",
        ),
        (
            "nothing",
            torch.zeros(3, 3, 20, 20),
            r"'<image>'.*3",
        ),
        ("<image>", None, r"1.*'<image>'.*pixel_values=.*0"),
        (
            "<image>" * 2,
            None,
            r"2.*'<image>'.*pixel_values=.*0",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            model.expand(text, pixels, token="<image>")


def test_the_placeholder_is_written_as_many_times_as_the_picture_has_patches(model):
    assert model.expand("a <image> b", torch.zeros(1, 3, 9, 12), token="<image>") == "a " + "<image>" * 6 + " b"
