"""Idefics (Flamingo) against transformers: three unlike configurations, who sees which picture, what it writes."""

import json
from pathlib import Path
from shutil import copytree
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from speaking_twins import pieces, speaking
from torch import Tensor, nn
from transformers import IdeficsConfig, IdeficsForVisionText2Text
from transformers.models.idefics import processing_idefics as theirs_processing
from twins import Twin, assert_same, assert_saved, change, of_theirs, pictures, texts, widened

import regard
from regard.generation.loop import generate
from regard.layouts import Frame
from regard.models.families.llava import IDEFICS as FAMILY
from regard.models.family import Config, empty
from regard.models.flamingo import last_image
from regard.models.loading import load
from regard.nn.attention import MultiHeadAttention
from regard.nn.blocks import FeedForward
from regard.nn.vision import GatedLook, ImageMask
from regard.testing import assert_rule

PLACEHOLDER, END, PAD = 5, 2, 0

# Nothing frozen, so that every weight has a gradient to compare.
TRAINED = {"freeze_text_layers": False, "freeze_vision_layers": False, "freeze_lm_head": False, "pad_token_id": PAD}

# Looks before every second block, at 3 latents of 3 × 3 patches; all heads normed; words were added. A gate for each
# number: the gradient of one for all is a single number, and the rule needs many (see the test of it).
VISION = {"embed_dim": 20, "image_size": 12, "patch_size": 4, "intermediate_size": 29, "num_hidden_layers": 3}
VISION |= {"num_attention_heads": 5}
GATHER = {"resampler_n_latents": 3, "resampler_depth": 2, "resampler_n_heads": 3, "resampler_head_dim": 8}
USUAL = TRAINED | {"vocab_size": 47, "additional_vocab_size": 3, "hidden_size": 30, "intermediate_size": 37}
USUAL |= {"num_hidden_layers": 4, "num_attention_heads": 5, "cross_layer_interval": 2, "max_position_embeddings": 43}
USUAL |= {"qk_layer_norms": True, "use_resampler": True, "vision_config": VISION, "alpha_type": "vector"}
USUAL |= {"perceiver_config": GATHER | {"qk_layer_norms_perceiver": True}}

# Looks at all patches, with a pixel left over at the edges, and at cls; no words added.
OTHER_VISION = {"embed_dim": 12, "image_size": 16, "patch_size": 5, "intermediate_size": 17, "num_hidden_layers": 2}
OTHER_VISION |= {"num_attention_heads": 2, "num_channels": 1, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-3}
OTHER = TRAINED | {"vocab_size": 50, "hidden_size": 24, "intermediate_size": 19, "num_hidden_layers": 3}
OTHER |= {"num_attention_heads": 3, "alpha_type": "vector", "rms_norm_eps": 1e-3, "hidden_act": "gelu_new"}
OTHER |= {"vision_config": OTHER_VISION, "tie_word_embeddings": True, "max_position_embeddings": 29}
OTHER |= {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 97.0}}

# Added words that are scored with the table that embeds them; latents whose heads are not normed.
SHARED = USUAL | {"tie_word_embeddings": True, "qk_layer_norms": False, "perceiver_config": GATHER}
SHARED |= {"num_hidden_layers": 2, "cross_layer_interval": 1}

USUAL_NAME, OTHER_NAME = "gathered, normed heads, added words", "all patches, scaled positions"
CONFIGS = {USUAL_NAME: USUAL, OTHER_NAME: OTHER, "gathered, added words shared": SHARED}
SIZES = {USUAL_NAME: (12, 12, 3), OTHER_NAME: (16, 16, 1), "gathered, added words shared": (12, 12, 3)}
HEADS = ["Model", "ForVisionText2Text"]


def both_towers(model: Any, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """What transformers makes, and what it keeps to itself: its words before the first look, and its tower of pictures.

    Its first hidden state is what enters the first block, after a look.
    """
    body, seen = getattr(model, "model", model), []
    places = [body.embed_tokens, body.vision_model.pre_layrnorm, *body.vision_model.encoder.layers]
    hooks = [place.register_forward_hook(lambda module, args, made: seen.append(made)) for place in places]
    made = of_theirs(model, inputs)
    for hook in hooks:
        hook.remove()
    layers = [layer.unflatten(0, inputs["pixel_values"].shape[:2]) for layer in seen[1:]]
    return made | {"layer 0": seen[0]} | {f"memory layer {i}": layer for i, layer in enumerate(layers)}


def twin_of(head: str, config: str, directory: Path) -> Twin:
    return Twin("Idefics" + head, IdeficsConfig(**CONFIGS[config]), directory, read=both_towers)


def inputs(head: str, config: str, side: str = "none", count: int = 3, size: tuple[int, int] | None = None) -> Any:
    """Thirteen texts with `count` pictures each, of which each token sees none, some or all; one text sees none."""
    height, width, channels = SIZES[config]
    height, width = (height, width) if size is None else size
    given = texts(50, side)
    sees = torch.rand(*given["input_ids"].shape, count, generator=torch.Generator().manual_seed(5)) < 0.4
    sees[4] = False
    assert not sees.any(-1)[:, -1].all(), "among them some that see nothing"
    pixels = pictures(height, width, 13 * count, channels)["pixel_values"].unflatten(0, (13, count))
    return given | {"pixel_values": pixels, "image_attention_mask": sees}


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("head", HEADS)
def test_every_head_computes_what_transformers_computes(head, config, dtype, tmp_path):
    twin = twin_of(head, config, tmp_path)
    for side in ("none", "right", "left") if head != "Model" else ("left",):
        assert_same(twin, dtype, inputs(head, config, side))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_gate_may_be_one_number(dtype, tmp_path):
    """Its gradient is judged in fp64 alone: of a single number the baseline's error may be next to nothing by luck."""
    twin = Twin("IdeficsModel", IdeficsConfig(**USUAL | {"alpha_type": "float"}), tmp_path, read=both_towers)
    given = inputs("", USUAL_NAME)
    assert_same(twin, dtype, given, gradients=False)
    if dtype == torch.float32:
        return
    ours = twin.ours(dtype)
    ours(**given).last_hidden_state.sin().sum().backward()
    with widened():
        made = twin.truth(
            given["input_ids"],
            pixel_values=given["pixel_values"],
            image_attention_mask=given["image_attention_mask"].long(),
        )
        made.last_hidden_state.sin().sum().backward()
    for mine, theirs in zip(ours.looks, twin.truth.gated_cross_attn_layers, strict=True):
        torch.testing.assert_close(mine.attention_gate.grad, theirs.alpha_cross_attn.grad, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(mine.feed_forward_gate.grad, theirs.alpha_dense.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("config", CONFIGS)
def test_what_we_save_transformers_opens(config, head, tmp_path):
    given = inputs(head, config, "right")
    assert_saved(twin_of(head, config, tmp_path / "theirs"), tmp_path / "ours", given)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("size", [(29, 13), (4, 36)], ids=["7 × 3 patches", "1 × 9 patches, as many as learnt"])
def test_pictures_of_another_size_are_read_as_transformers_reads_them(size, dtype, tmp_path):
    """It draws positions out by a tenth of a patch more than there is, as the first DINO did."""
    twin = twin_of("ForVisionText2Text", USUAL_NAME, tmp_path)
    given = inputs("ForVisionText2Text", USUAL_NAME, count=1, size=size)
    assert_same(twin, dtype, given, {"interpolate_pos_encoding": True})


def test_pixels_left_over_move_no_positions(tmp_path):
    """transformers draws positions out wherever a picture is not square, though its patches be those learnt."""
    model = twin_of("Model", USUAL_NAME, tmp_path).ours(torch.float32)
    pixels = pictures(15, 12, 2)["pixel_values"].unsqueeze(0)
    assert torch.equal(model.encode(pixels), model.encode(pixels[..., :12, :]))


# -------------------------------------------------------------------------------------------------------------- sight


@pytest.fixture(scope="module")
def saved(tmp_path_factory: Any) -> Path:
    directory = tmp_path_factory.mktemp("idefics")
    twin_of("ForVisionText2Text", USUAL_NAME, directory)
    return directory


@pytest.fixture(scope="module")
def model(saved: Path) -> Any:
    made = load(saved, dtype=torch.float64)
    made.placeholder = PLACEHOLDER
    return made


def test_each_token_sees_the_picture_that_transformers_processor_says():
    random = torch.Generator().manual_seed(19)
    ids = torch.randint(0, 7, (23, 17), generator=random)  # placeholders and ends among few others
    knows = SimpleNamespace(convert_tokens_to_ids=lambda word: PLACEHOLDER, eos_token_id=END)
    numbers, _ = theirs_processing.image_attention_mask_for_packed_input_ids(ids, knows, "pt")
    most = int((ids == PLACEHOLDER).sum(1).max())
    wanted = theirs_processing.incremental_to_binary_attention_mask(numbers, "pt", num_classes=most)
    made = last_image(ids, most, placeholder=PLACEHOLDER, ends=[END])
    assert torch.equal(made, wanted.bool())
    assert most > 2
    assert not torch.equal(made, last_image(ids, most, placeholder=PLACEHOLDER)), "ends count"


def test_several_tokens_may_end_a_text():
    ids = torch.tensor([[5, 7, 3, 7, 5, 2, 7]])
    seen = last_image(ids, 2, placeholder=5, ends=[2, 3])[0]
    assert seen.int().argmax(-1).where(seen.any(-1), -1).tolist() == [0, 0, 0, -1, 1, 1, -1]


def test_sight_is_made_of_placeholders_where_it_is_not_given(model):
    ids = torch.tensor([[7, PLACEHOLDER, 8, END, 9], [PLACEHOLDER, 7, PLACEHOLDER, 8, 9]])
    pixels = inputs("", USUAL_NAME, count=2)["pixel_values"][:2]
    sees = last_image(ids, 2, placeholder=PLACEHOLDER, ends=[END])
    assert sees.any(-1).int().tolist() == [[0, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert torch.equal(
        model(ids, pixel_values=pixels).logits, model(ids, pixel_values=pixels, image_attention_mask=sees).logits
    )


def test_pictures_that_a_token_does_not_see_cannot_change_it(model):
    """Nor what comes before it: but later words read earlier ones, which may have seen them."""
    given = inputs("", USUAL_NAME)
    given["image_attention_mask"][:, :, 1] = False
    given["image_attention_mask"][:, :7, 2] = False
    before = model(**given)
    given["pixel_values"][:, 1:] = 1e3
    after = model(**given)
    assert torch.equal(after.logits[:, :7], before.logits[:, :7])
    assert not torch.equal(after.logits, before.logits)
    given["image_attention_mask"][:, :, 2] = False
    assert torch.equal(model(**given).logits[:, :7], before.logits[:, :7])


def test_texts_that_see_no_picture_are_read_as_if_there_were_none(model, tmp_path):
    """transformers wants pictures always, and shuts a gate."""
    twin = twin_of("ForVisionText2Text", USUAL_NAME, tmp_path)
    given = inputs("", USUAL_NAME, "left")
    given["input_ids"] = given["input_ids"].masked_fill(given["input_ids"] == PLACEHOLDER, 6)
    blind = model(given["input_ids"], given["attention_mask"])
    assert blind.encoder_last_hidden_state is None
    given["image_attention_mask"][:] = False
    made = model(**given)
    assert torch.equal(made.logits, blind.logits)
    assert bool(made.logits.isfinite().all())
    with torch.no_grad(), widened():
        theirs = twin.truth(
            given["input_ids"],
            given["attention_mask"].long(),
            pixel_values=given["pixel_values"] * 0,
            image_attention_mask=given["image_attention_mask"].long(),
        )
    torch.testing.assert_close(
        blind.logits[given["attention_mask"]], theirs.logits[given["attention_mask"]], rtol=0, atol=1e-11
    )


def test_a_look_that_sees_nothing_has_no_gradient_and_no_nan(model):
    given = inputs("", USUAL_NAME)
    given["image_attention_mask"][:] = False
    model.zero_grad()
    model(**given).logits.sum().backward()
    for part in (model.looks[0].attention, model.vision, model.resampler):
        gradients = [p.grad for p in part.parameters() if p.grad is not None]
        assert gradients
        assert all(bool((gradient == 0).all()) for gradient in gradients)
    assert bool((model.looks[0].feed_forward_gate.grad != 0).any())


def test_what_words_look_at_is_what_transformers_hands_out(tmp_path):
    twin = twin_of("Model", USUAL_NAME, tmp_path)
    given = inputs("", USUAL_NAME)
    with torch.no_grad(), widened():
        ids, pixels, sees = given["input_ids"], given["pixel_values"], given["image_attention_mask"].long()
        wanted = twin.truth(ids, pixel_values=pixels, image_attention_mask=sees).image_hidden_states
    model = twin.ours(torch.float64)
    made = model(**given).encoder_last_hidden_state
    assert made.shape == (13, 3, 3, 20)
    torch.testing.assert_close(made, wanted, rtol=0, atol=1e-12)
    assert torch.equal(model.encode(given["pixel_values"]), made)


B, N, P, EACH = 2, 7, 3, 5


def sight(batch: int = B) -> tuple[ImageMask, Tensor]:
    """A sight, and its cells written out: (B, N, P · 5)."""
    sees = torch.rand(batch, N, P, generator=torch.Generator().manual_seed(1)) < 0.5
    sees[0, 2:5] = False
    sees[-1, 4:] = True
    return ImageMask(sees, EACH), sees.repeat_interleave(EACH, 2)


def test_a_sight_opens_all_vectors_of_a_picture():
    mask, cells = sight()
    assert torch.equal(mask.dense(N, P * EACH), cells.unsqueeze(1))
    one, alone = sight(1)
    assert torch.equal(one.dense(N, P * EACH), alone[0])


@pytest.mark.parametrize("size", [(1, 1), (2, 3), (3, 5), (4, 7), (7, 15), (5, 10)], ids=str)
def test_a_sight_knows_which_tiles_are_empty_and_full(size):
    mask, cells = sight()
    rows, columns = (range(0, n, step) for n, step in zip((N, P * EACH), size, strict=True))
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            tile = cells[:, row : row + size[0], column : column + size[1]].flatten(1)
            wanted = tile.any(1).int() + tile.all(1).int()
            assert torch.equal(mask.tiles(N, P * EACH, size)[:, 0, i, j].int(), wanted), (i, j)


@pytest.mark.parametrize("backend", ["reference", "tiled", "sdpa", "flex"])
def test_every_backend_sees_the_same_pictures(backend):
    mask, cells = sight()
    q, k, v = (torch.randn(B, 3, n, 4, dtype=torch.float64) for n in (N, P * EACH, P * EACH))
    made = regard.attention(q, k, v, mask=mask, backend=backend)
    wanted = regard.attention(q, k, v, mask=cells.unsqueeze(1), backend="reference")
    torch.testing.assert_close(made, wanted, rtol=0, atol=1e-14)
    assert bool((made[0, :, 2:5] == 0).all())


def test_a_sight_says_what_it_is_and_what_it_does_not_fit():
    mask, _ = sight()
    assert repr(mask).startswith("ImageMask(<2×7×3 booleans, ")
    assert repr(mask).endswith(" True>, each=5)")
    for nq, nk in ((N - 1, P * EACH), (N, P * EACH - 1)):
        with pytest.raises(ValueError, match=rf"7.*3.*5.*{nq}.*{nk}"):
            mask.dense(nq, nk)
    with pytest.raises(ValueError, match=r"2.*3"):
        mask.fit(3, 1, N, P * EACH)


def test_gates_scale_what_each_part_of_a_look_adds():
    look = GatedLook(MultiHeadAttention(6, 2, d_context=5), FeedForward(6, 10, "relu"), [nn.LayerNorm(6)] * 2, gates=6)
    x, pictures = torch.randn(B, N, 6), torch.randn(B, 4, 5)
    look.attention_gate.data = torch.linspace(-2, 2, 6)
    seen = x + look.attention_gate.tanh() * look.attention(look.attention_norm(x), pictures)
    assert torch.equal(look(x, pictures, None), seen)
    look.feed_forward_gate.data = torch.linspace(3, -1, 6)
    added = look.feed_forward_gate.tanh() * look.feed_forward(look.feed_forward_norm(seen))
    assert torch.equal(look(x, pictures, None), seen + added)


# ------------------------------------------------------------------------------------------------------ writing texts


def prompts(config: str) -> dict[str, Tensor]:
    """Four texts padded on the left: with two pictures, with one, with none, and with two and an end between them."""
    rows = [[7, 5, 9, 5, 8], [5, 11, 12], [9, 7], [5, 7, END, 5, 9, 10]]
    longest = max(map(len, rows))
    ids = torch.tensor([[PAD] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[False] * (longest - len(row)) + [True] * len(row) for row in rows])
    return {"input_ids": ids, "attention_mask": mask, "pixel_values": inputs("", config, count=2)["pixel_values"][:4]}


@pytest.fixture(scope="module", params=CONFIGS)
def writers(request: Any, tmp_path_factory: Any) -> tuple[str, Any, Any]:
    """Ours and transformers' in fp64; the latter with sdpa, since its eager gives NaN for padding there."""
    directory = tmp_path_factory.mktemp("idefics")
    ours = twin_of("ForVisionText2Text", request.param, directory).ours(torch.float64)
    ours.placeholder = PLACEHOLDER
    kind = IdeficsForVisionText2Text
    return request.param, ours, kind.from_pretrained(directory, dtype=torch.float64, attn_implementation="sdpa").eval()


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("rows", [slice(0, 1), slice(None)], ids=["one text", "a batch"])
def test_written_ids_are_those_of_transformers(writers, rows, beams):
    config, model, theirs = writers
    given = {name: value[rows] for name, value in prompts(config).items()}
    start = int(given["attention_mask"].any(0).int().argmax())  # a text alone is not padded
    ids, mask, pixels = given["input_ids"][:, start:], given["attention_mask"][:, start:], given["pixel_values"]
    sees = last_image(ids, 2, placeholder=PLACEHOLDER, ends=[END])
    told = {"attention_mask": mask.long(), "pixel_values": pixels, "image_attention_mask": sees.long()}
    asks = {"max_new_tokens": 19, "num_beams": beams, "do_sample": False, "pad_token_id": PAD}
    free = theirs.generate(ids, **told, eos_token_id=None, **asks)[:, ids.shape[1] :]
    made = generate(model.read_image(pixels), ids, mask, max_new_tokens=19, pad_token_id=PAD, num_beams=beams)
    assert torch.equal(made.ids, free)
    end = int(free[0, 4])  # a token that comes: now it ends a text
    wanted = theirs.generate(ids, **told, eos_token_id=end, **asks)[:, ids.shape[1] :]
    ended = generate(
        model.read_image(pixels, image_attention_mask=sees),
        ids,
        mask,
        max_new_tokens=19,
        eos_token_ids=end,
        pad_token_id=PAD,
        num_beams=beams,
    )
    for mine, row, n in zip(ended.ids, wanted, ended.lengths, strict=True):
        assert torch.equal(mine[:n], row[:n])
        assert set(row[n:].tolist()) <= {PAD, end}  # its beams fill up with the end token where padding is token 0


def test_other_pictures_give_other_words(writers):
    """Else the test above would hold for pictures that are not looked at, or in another order."""
    config, model, _ = writers
    given = prompts(config)
    ids, mask, pixels = given["input_ids"][:1], given["attention_mask"][:1], given["pixel_values"][:1]
    logits = [model.read_image(p).begin(ids, mask, length=6)[0] for p in (pixels, pixels.flip(1), pixels * 0)]
    for one, other in ((0, 1), (0, 2)):
        assert float((logits[one] - logits[other]).abs().max()) > 1e-3


def test_steps_read_one_token_and_compute_what_the_whole_computes(writers):
    """A new token sees what the last one of its prompt saw, whatever it is."""
    config, model, _ = writers
    given = prompts(config)
    ids, mask, pixels = given["input_ids"], given["attention_mask"], given["pixel_values"]
    more = torch.randint(7, 31, (4, 5), generator=torch.Generator().manual_seed(11))
    more[:, 2] = torch.tensor([PLACEHOLDER, 9, PLACEHOLDER, END])
    sees = last_image(ids, 2, placeholder=PLACEHOLDER, ends=[END])
    n, whole = (
        ids.shape[1],
        {"image_attention_mask": torch.cat([sees, sees[:, -1:].expand(-1, 5, -1)], 1), "pixel_values": pixels},
    )
    longer = torch.cat([mask, torch.ones(4, 5, dtype=torch.bool)], 1)
    expected = model(torch.cat([ids, more], 1), longer, **whole).logits
    read, looked, reading = [], [], model.read_image(pixels)
    logits, state = reading.begin(ids, mask, length=n + 5)
    hooks = [model.tower.embed.register_forward_pre_hook(lambda module, args: read.append(args[0].shape[1]))]
    hooks += [model.vision.embed.register_forward_hook(lambda *_: looked.append(1))]
    hooks += [model.looks[0].attention.w_k.register_forward_hook(lambda *_: looked.append(1))]
    for place in range(6):
        torch.testing.assert_close(logits, expected[:, n - 1 + place], rtol=0, atol=1e-11)
        logits = reading.step(state, more[:, place]) if place < 5 else logits
    for hook in hooks:
        hook.remove()
    assert (read, looked) == ([1] * 5, []), "pictures and their keys are made once"
    assert len(state) == n + 5
    with pytest.raises(ValueError, match=r"11.*positions"):
        reading.step(state, more[:, 0])


@torch.no_grad()
def test_steps_under_autocast_are_one_pass(tmp_path):
    config = "gathered, added words shared"
    model, given = twin_of("ForVisionText2Text", config, tmp_path).ours(torch.float32), prompts(config)
    model.placeholder = PLACEHOLDER
    given["pixel_values"] = given["pixel_values"].float()
    more = torch.randint(7, 31, (4, 5), generator=torch.Generator().manual_seed(11))
    sees = last_image(given["input_ids"], 2, placeholder=PLACEHOLDER, ends=[END])
    whole = {"input_ids": torch.cat([given["input_ids"], more], 1), "pixel_values": given["pixel_values"]}
    whole["attention_mask"] = torch.cat([given["attention_mask"], torch.ones(4, 5, dtype=torch.bool)], 1)
    whole["image_attention_mask"] = torch.cat([sees, sees[:, -1:].expand(-1, 5, -1)], 1)
    with torch.autocast("cpu", torch.bfloat16):
        baseline, reading = model(**whole).logits[:, -5:], model.read_image(given["pixel_values"])
        _, state = reading.begin(given["input_ids"], given["attention_mask"], length=given["input_ids"].shape[1] + 5)
        made = torch.stack([reading.step(state, column) for column in more.T], 1)
    assert_rule(made, baseline, model.double()(**whole).logits[:, -5:])


def test_rows_that_are_kept_keep_their_pictures(writers):
    config, model, _ = writers
    given, rows = prompts(config), torch.tensor([3, 0, 0])
    reading = model.read_image(given["pixel_values"])
    _, state = reading.begin(given["input_ids"], given["attention_mask"], length=9)
    state.keep(rows)
    again = model.read_image(given["pixel_values"][rows])
    _, wanted = again.begin(given["input_ids"][rows], given["attention_mask"][rows], length=9)
    tokens = torch.tensor([7, 8, 9])
    torch.testing.assert_close(reading.step(state, tokens), again.step(wanted, tokens), rtol=0, atol=1e-12)


def test_a_text_without_a_picture_is_continued_too(writers):
    config, model, theirs = writers
    ids, blank = texts(31)["input_ids"][:3, :6], inputs("", config, count=1)["pixel_values"][:3] * 0
    ids = ids.masked_fill(ids == PLACEHOLDER, 6)
    blind = {"pixel_values": blank, "image_attention_mask": torch.zeros(3, 6, 1, dtype=torch.long)}
    wanted = theirs.generate(ids, **blind, max_new_tokens=7, do_sample=False, eos_token_id=None, pad_token_id=PAD)
    made = generate(model.read_image(None), ids, max_new_tokens=7, pad_token_id=PAD)
    assert torch.equal(made.ids, wanted[:, 6:])


def test_a_body_writes_no_text(tmp_path):
    model = twin_of("Model", USUAL_NAME, tmp_path).ours(torch.float32)
    with pytest.raises(ValueError, match=r"'feature-extraction'.*task='image-text-to-text'"):
        model.read_image(None)


# ---------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("held", "count", "most"),
    [((1, 2), 3, 2), ((3, 1), 2, 3), ((0, 0), 1, 0)],
    ids=["a picture too many", "a placeholder too many", "no placeholder"],
)
def test_more_or_fewer_pictures_than_placeholders_are_refused_before_anything_runs(model, held, count, most):
    ids = torch.tensor([[*[PLACEHOLDER] * number, *[7] * (5 - number)] for number in held])
    pixels, ran = inputs("", USUAL_NAME, count=count)["pixel_values"][:2], []
    hooks = [part.register_forward_hook(lambda *_: ran.append(1)) for part in (model.vision.embed, model.tower.embed)]
    text = held.index(most)
    message = rf"pixel_values.*{count}.*{most}.*id.*5.*text.*{text}.*image_attention_mask="
    with pytest.raises(ValueError, match=message):
        model(ids, pixel_values=pixels)
    assert not ran
    with pytest.raises(ValueError, match=message):
        model.read_image(pixels).begin(ids, None, length=6)
    for hook in hooks:
        hook.remove()


def test_a_model_without_a_tokenizer_reads_texts_alone(tmp_path):
    model = twin_of("ForVisionText2Text", USUAL_NAME, tmp_path).ours(torch.float32)
    assert "placeholder" not in vars(model)
    with pytest.raises(ValueError, match="tokenizer"):
        model.placeholder  # noqa: B018
    assert model(torch.tensor([[7, PLACEHOLDER, 8]])).logits.shape == (1, 3, 50)


IDS, PIXELS = torch.tensor([[7, PLACEHOLDER, 8]]), torch.ones(1, 1, 3, 12, 12)
SEES = torch.ones(1, 3, 1, dtype=torch.bool)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"input_ids": [[7]]}, TypeError, r"ids.*int64"),
        ({"input_ids": torch.full((1, 44), 7)}, ValueError, r"44.*43.*positions"),
        ({"input_ids": torch.tensor([[50]])}, ValueError, r"id.*50"),
        ({"attention_mask": torch.tensor([[1, 2, 1]])}, ValueError, "attention_mask"),
        ({"position_ids": torch.tensor([[-1, 0, 1]])}, ValueError, r"position_ids.*0"),
        ({"pixel_values": [[1.0]]}, ValueError, r"\(B, P, C, H, W\).*list"),
        ({"pixel_values": PIXELS.int()}, TypeError, r"pixel_values.*torch.int32"),
        ({"pixel_values": PIXELS[0]}, ValueError, r"\(B, P, C, H, W\).*P.*\(1, 3, 12, 12\)"),
        ({"pixel_values": PIXELS[:, :0]}, ValueError, r"pixel_values.*\(0, 3, 12, 12\)"),
        ({"pixel_values": PIXELS[:, :, :1]}, ValueError, r"\(B, 3, H, W\).*\(1, 1, 12, 12\)"),
        ({"pixel_values": PIXELS[..., :3]}, ValueError, "4 × 4"),
        ({"pixel_values": PIXELS.repeat(2, 1, 1, 1, 1)}, ValueError, r"1.*pixel_values.*2"),
        ({"image_attention_mask": SEES}, ValueError, r"image_attention_mask.*pixel_values"),
        (
            {"pixel_values": PIXELS, "image_attention_mask": SEES.float()},
            ValueError,
            r"\(1, 3, 1\).*torch.float32.*\(1, 3, 1\)",
        ),
        (
            {"pixel_values": PIXELS, "image_attention_mask": SEES[:, 1:]},
            ValueError,
            r"image_attention_mask.*\(1, 2, 1\)",
        ),
        (
            {"pixel_values": PIXELS, "image_attention_mask": [[[True]]]},
            ValueError,
            r"image_attention_mask.*\(1, 3, 1\).*list",
        ),
    ],
)
def test_input_that_does_not_fit_is_refused(model, given, error, message):
    with pytest.raises(error, match=message):
        model(**{"input_ids": IDS} | given)


def test_a_prompt_that_does_not_fit_is_refused(model):
    ids, mask = torch.tensor([[7, 8], [9, PAD]]), torch.tensor([[True, True], [True, False]])
    with pytest.raises(ValueError, match="padding"):
        model.read_image(None).begin(ids, mask, length=5)
    with pytest.raises(ValueError, match=r"44.*43"):
        model.read_image(None).begin(ids, None, length=44)
    with pytest.raises(ValueError, match=r"2.*1"):
        model.read_image(PIXELS).begin(ids, None, length=5)


# ----------------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("part", "values", "message"),
    [
        ("", {"alpha_type": "matrix"}, r"alpha_type.*'matrix'.*'float'.*'vector'"),
        ("", {"cross_layer_interval": 3}, r"4.*cross_layer_interval.*3"),
        ("", {"attention_bias": True}, r"attention_bias.*True.*False"),
        ("", {"mlp_bias": True}, r"mlp_bias.*True.*False"),
        ("", {"head_dim": 8}, r"head_dim.*8.*None"),
        ("", {"num_key_value_heads": 1}, r"num_key_value_heads.*1.*None"),
        ("", {"rope_interleaved": True}, r"rope_interleaved.*True.*False"),
        ("", {"sliding_window": 5}, r"Idefics.*sliding_window.*5"),
        ("", {"use_resampler": False}, r"model\.perceiver_resampler\.blocks\.0"),
        ("", {"qk_layer_norms": False}, r"cross_attn\.k_layer_norm\.weight"),
        ("", {"additional_vocab_size": 2}, r"lm_head\.additional_fc\.weight.*\(3, 30\).*\(2, 30\)"),
        ("", {"alpha_type": "float"}, r"alpha_cross_attn.*\(1, 1, 30\).*\(1,\)"),
        ("vision_config", {"hidden_act": "mish"}, "'mish'"),
        ("vision_config", {"hidden_size": 20}, r"vision_config.*Idefics.*hidden_size.*20"),
        ("perceiver_config", {"resampler_kind": 1}, r"perceiver_config.*Idefics.*resampler_kind"),
        ("perceiver_config", {"resampler_n_latents": 4}, r"\(3, 20\).*\(4, 20\)"),
    ],
)
def test_settings_that_would_change_the_maths_are_refused(part, values, message, saved, tmp_path):
    copytree(saved, tmp_path, dirs_exist_ok=True)
    known = json.loads((tmp_path / "config.json").read_text())
    change(tmp_path, **({part: known[part] | values} if part else values))
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


# As HuggingFaceM4/tiny-random-idefics has it: keys of old, and a second use_resampler that nobody reads.
OLD = {"cross_layer_activation_function": "swiglu", "ffn_dim": 64, "max_new_tokens": 128, "word_embed_proj_dim": 16}


def test_what_old_checkpoints_say_and_hold_besides_is_let_pass(saved, tmp_path):
    copytree(saved, tmp_path, dirs_exist_ok=True)
    given = inputs("", USUAL_NAME)
    wanted = load(saved)(**given).logits
    known = json.loads((tmp_path / "config.json").read_text())
    assert known["perceiver_config"]["use_resampler"] is False
    vision = known["vision_config"] | {"vision_model_name": "hf-internal-testing/tiny-random-clip"}
    change(tmp_path, vision_config=vision, rope_parameters=None, freeze_text_layers=True, **OLD)
    file, more = tmp_path / "model.safetensors", {"model.vision_model.embeddings.position_ids": torch.arange(10)[None]}
    for part in ("layers.0.self_attn", "gated_cross_attn_layers.1.cross_attn"):
        more[f"model.{part}.rotary_emb.inv_freq"] = torch.ones(3)
    save_file(load_file(file) | more, file, metadata={"format": "pt"})
    model = load(tmp_path)
    assert torch.equal(model(**given).logits, wanted)
    assert all(p.requires_grad for p in model.parameters()), "what to freeze is for whoever trains to say"


def test_what_the_parts_leave_out_is_as_in_transformers(tmp_path):
    """Sizes without memory: of the tower of pictures and the resampler that no key describes."""
    config = IdeficsConfig(use_resampler=True, num_hidden_layers=1)
    config.save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    whole = empty(FAMILY, Config(values), "image-text-to-text")
    for part in ("vision_config", "perceiver_config"):
        values.pop(part)
    bare = empty(FAMILY, Config(values), "image-text-to-text")
    shapes = [{n: tuple(p.shape) for n, p in model.named_parameters()} for model in (whole, bare)]
    assert shapes[0] == shapes[1]
    assert (len(whole.vision.blocks), tuple(whole.vision.embed.positions.shape)) == (32, (257, 768))
    assert bare.vision.blocks[0].feed_forward.activation == "gelu"


def test_the_body_can_be_read_from_a_checkpoint_that_writes(tmp_path):
    for config in CONFIGS:
        whole = twin_of("ForVisionText2Text", config, tmp_path / config).ours(torch.float32)
        given = inputs("", config)
        body = load(tmp_path / config, task="feature-extraction")(**given)
        assert body.logits is None
        assert torch.equal(body.last_hidden_state, whole(**given).last_hidden_state)


def test_a_second_table_of_words_must_be_the_shared_one(tmp_path):
    shared = "gathered, added words shared"
    twin_of("ForVisionText2Text", shared, tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    assert not any(name.startswith("lm_head") for name in tensors)
    added = tensors["model.embed_tokens.additional_embedding.weight"]
    copy = tensors | {"lm_head.additional_fc.weight": added.clone()}
    save_file(copy, file, metadata={"format": "pt"})
    assert load(tmp_path).task == "image-text-to-text"
    save_file(copy | {"lm_head.additional_fc.weight": added + 1}, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lm_head\.additional_fc\.weight.*model\.embed_tok"):
        load(tmp_path)


# ------------------------------------------------------------------------------------------------------------- layouts


@pytest.mark.parametrize("config", [USUAL_NAME, OTHER_NAME])
@pytest.mark.parametrize("count", [1, 3])
def test_layouts_say_what_every_attention_sees(config, count, tmp_path):
    model = twin_of("ForVisionText2Text", config, tmp_path).ours(torch.float32)
    given = inputs("", config, count=count)
    height, width, _ = SIZES[config]
    frames = [Frame.whole(40 + number, 50).resized(height, width) for number in range(count)]
    layouts = model.layouts(frames, tokens=11)
    with regard.watch(model, layouts=layouts, keep="qk") as seen:
        model(**given)
    assert set(seen.names) == set(layouts)
    assert set(seen.layouts) == set(layouts), "each fits the calls of its module"
    for path, sides in layouts.items():
        sequences, queries = sides.queries.shape
        batch, _, nq, nk = (*seen[path].lse.shape, seen[path].row(0).shape[-1])
        assert (13 * sequences, queries, sides.keys.shape[1]) == (batch, nq, nk), path
        assert sides.keys.shape[0] == sequences


def test_words_that_see_no_picture_are_no_error_to_the_doctor(model):
    with torch.no_grad(), regard.watch(model) as seen:
        model(**inputs("", USUAL_NAME, count=2))
    diagnosis = seen.doctor()
    (looks,) = (use.facts for use in diagnosis.masks if use.paths[0].startswith("looks"))
    assert diagnosis.ok
    assert looks.empty_rows.count > 0
    assert looks.empty_rows.tokens == 0


def test_words_look_at_latents_of_each_picture_and_latents_at_its_patches(model):
    frames = [Frame.whole(12, 12), Frame.whole(24, 24).resized(12, 12)]
    layouts = model.layouts(frames, tokens=7)
    beside, gathering = layouts["looks.1.attention"], layouts["resampler.blocks.0.attention"]
    assert repr(beside.queries) == "Layout(7 text)"
    assert repr(beside.keys) == "Layout(3 latents of image 0, 3 latents of image 1)"
    assert beside.frames == tuple(frames)
    assert gathering.queries.image.tolist() == [[0] * 3, [1] * 3]
    assert gathering.keys.kind[1].tolist() == ["cls"] + ["patch"] * 9 + ["latent"] * 3
    assert gathering.keys.box[1, 5].tolist() == [4, 4, 8, 8]
    within, own = layouts["vision.blocks.2.attention"], layouts["tower.blocks.3.attention"]
    assert within.keys.image.tolist() == [[0] * 10, [1] * 10]
    assert repr(own.keys) == repr(own.queries) == "Layout(7 text)"


def test_latents_look_at_the_picture_first_and_then_at_each_other(model):
    """As the layouts say. No number tells the order of keys."""
    seen, block = [], model.resampler.blocks[0]
    hook = block.attention.register_forward_pre_hook(lambda module, args: seen.extend(args))
    pixels = inputs("", USUAL_NAME, count=1)["pixel_values"][:1]
    model.encode(pixels)
    hook.remove()
    patches = block.image_norm(model.vision(pixels[0]).last_hidden_state)
    assert torch.equal(seen[1], torch.cat([patches, block.attention_norm(model.resampler.latents)[None]], 1))


def test_words_look_at_all_patches_where_nothing_gathers_them(tmp_path):
    model = twin_of("Model", OTHER_NAME, tmp_path).ours(torch.float32)
    layouts = model.layouts([Frame.whole(16, 16)] * 2, tokens=5)
    said = "Layout(1 cls, 9 patches of image 0, 1 cls, 9 patches of image 1)"
    assert repr(layouts["looks.0.attention"].keys) == said
    assert not any(path.startswith("resampler") for path in layouts)


def test_a_text_without_pictures_has_layouts_of_its_own_attention_alone(model):
    layouts = model.layouts([], tokens=3)
    with regard.watch(model) as seen:
        model(torch.tensor([[7, 8, 9]]))
    assert set(layouts) == set(seen.names) == {f"tower.blocks.{i}.attention" for i in range(4)}


# ----------------------------------------------------------------------------------------------------------- tokenizer


def test_the_placeholder_is_the_tokenizers(tmp_path):
    """A LLaMA tokenizer with tokens added to it, as Idefics has one; the model embeds them in the second table."""
    rust, names = pieces("<unk>", "<s>", "</s>", frame="<s> $A")
    words = rust.get_vocab_size()
    rust.add_special_tokens(["<fake_token_around_image>", "<image>"])

    def config(vocab_size: int) -> IdeficsConfig:
        return IdeficsConfig(**USUAL | {"vocab_size": words, "additional_vocab_size": vocab_size - words})

    model = load(speaking(tmp_path, "IdeficsForVisionText2Text", config, (rust, names)))
    assert (model.placeholder, model.vocabulary) == (words + 1, words + 2)
    text = "A cat<fake_token_around_image><image><fake_token_around_image>sat"
    ids = model.tokenizer.batch([text]).input_ids
    assert model.tokenizer.tokens(ids[0]).count("<image>") == 1
    assert model.tokenizer.decode(ids[0], special=True).count("<fake_token_around_image>") == 2
    at = (ids[0] == model.placeholder).int().argmax()
    with regard.watch(model, keep="qk") as seen:
        model(ids, pixel_values=PIXELS)
    looked = seen["looks.0.attention"].tile(slice(None), slice(None)).sum(-1)[0, 0]  # (N,)
    assert torch.allclose(looked, (torch.arange(len(ids[0])) >= at).float())


def test_a_model_whose_tokenizer_has_no_placeholder_says_so(tmp_path):
    rust, names = pieces("<unk>", "<s>", "</s>", frame="<s> $A")
    path = speaking(
        tmp_path, "IdeficsForVisionText2Text", lambda vocab_size: IdeficsConfig(**USUAL | {"vocab_size": vocab_size}),
        (rust, names),
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"'<image>'.*model\.placeholder"):
        load(path)(IDS, pixel_values=PIXELS)
