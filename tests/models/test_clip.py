import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import normalize
from transformers import CLIPConfig, CLIPTextConfig, CLIPVisionConfig
from twins import Twin, assert_same, assert_saved, change, of_theirs, pictures, texts

import regard
from regard.layouts import Frame
from regard.models.dual_encoder import SimilarityHead
from regard.models.family import Config, empty, family_of, places
from regard.models.loading import load
from regard.nn.blocks import EndPooler
from regard.op import observe, unobserve

# The end of a text: its largest id where eos_token_id is 2, else the first token with that id, which also pads.
SMALL_TEXT = {"vocab_size": 47, "hidden_size": 20, "num_hidden_layers": 3, "num_attention_heads": 5}
SMALL_TEXT |= {"intermediate_size": 29, "max_position_embeddings": 23, "eos_token_id": 2, "projection_dim": 11}
OTHER_TEXT = {"vocab_size": 31, "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2}
OTHER_TEXT |= {"intermediate_size": 17, "max_position_embeddings": 11, "eos_token_id": 5, "projection_dim": 7}
OTHER_TEXT |= {"hidden_act": "gelu", "layer_norm_eps": 1e-3}
# 3 × 3 patches; 7 × 7 with pixels left over at the edges.
SMALL = {"hidden_size": 28, "num_hidden_layers": 2, "num_attention_heads": 7, "intermediate_size": 19}
SMALL |= {"image_size": 12, "patch_size": 4, "projection_dim": 11}
OTHER = {"hidden_size": 15, "num_hidden_layers": 3, "num_attention_heads": 3, "intermediate_size": 23}
OTHER |= {"image_size": 37, "patch_size": 5, "num_channels": 1, "projection_dim": 7, "hidden_act": "gelu_new"}
OTHER |= {"layer_norm_eps": 1e-2}
CONFIGS = {"largest id": (SMALL_TEXT, SMALL, 47), "end token": (OTHER_TEXT, OTHER, 31)}
SIZES = {"largest id": (12, 12, 5, 3), "end token": (37, 37, 5, 1)}
HEADS = ["Model", "TextModel", "VisionModel", "TextModelWithProjection", "VisionModelWithProjection"]
HEADS += ["ForImageClassification"]
READERS = ["Model", "TextModel", "TextModelWithProjection"]


def read(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """What transformers makes; its vectors at length 1, as CLIPModel compares them and the towers alone do not."""
    if type(model).__name__ in ("CLIPTextModel", "CLIPVisionModel", "CLIPForImageClassification"):
        return of_theirs(model, inputs)
    out = model(**inputs, output_hidden_states=True)
    vectors = {"text": out.get("text_embeds"), "picture": out.get("image_embeds")}
    made = {n: normalize(t, dim=-1) for n, t in vectors.items() if t is not None}
    if "logits_per_image" not in out:
        layers = {f"layer {i}": t for i, t in enumerate(out.hidden_states)}
        return made | layers | {"hidden": out.last_hidden_state}
    read, seen = out.text_model_output.hidden_states, out.vision_model_output.hidden_states
    layers = {f"layer {i}": t for i, t in enumerate(read)} | {f"memory layer {i}": t for i, t in enumerate(seen)}
    return made | layers | {"logits": out.logits_per_image}


def twin_of(head: str, config: str, directory: Path) -> Twin:
    text, vision, _ = CONFIGS[config]
    whole = {"text_config": text, "vision_config": vision, "projection_dim": 13, "num_labels": 3}
    values = CLIPTextConfig(**text) if "Text" in head else CLIPVisionConfig(**vision)
    values = values if "Text" in head or "Vision" in head else CLIPConfig(**whole)
    part = {"TextModel": "text_model.", "VisionModel": "vision_model."}.get(head, "")
    return Twin("CLIP" + head, values, directory, stored={"^gradient of ": f"gradient of {part}"}, read=read)


def words(config: str, side: str) -> dict[str, Tensor]:
    """Texts, each with an end token, after which some are padded with it; before which, on the left."""
    given = texts(CONFIGS[config][2] - 1, side, first=7, pad=5)
    given.pop("position_ids", None)
    mask = given.get("attention_mask", torch.ones_like(given["input_ids"], dtype=torch.bool))
    end = 5 if config == "end token" else CONFIGS[config][2] - 1
    given["input_ids"][torch.arange(13), (mask * torch.arange(1, 12)).argmax(1)] = end
    return given


def inputs(head: str, config: str, side: str = "none") -> dict[str, Tensor]:
    """Thirteen texts and five pictures, or what of the two a head reads."""
    given = words(config, side) if head in READERS else {}
    return given if "Text" in head else given | pictures(*SIZES[config])


# -------------------------------------------------------------------------------------------------------------- parity


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("head", HEADS)
def test_every_head_computes_what_transformers_computes(head, config, dtype, tmp_path):
    twin = twin_of(head, config, tmp_path)
    # With padding on the left transformers counts it, and sums up a text in it: another test here.
    for side in ("none", "right") if head in READERS else ("none",):
        assert_same(twin, dtype, inputs(head, config, side))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("head", ["Model", "VisionModel", "VisionModelWithProjection", "ForImageClassification"])
def test_positions_are_interpolated_for_other_pictures(head, dtype, tmp_path):
    twin = twin_of(head, "end token", tmp_path)
    for size in ((21, 43), (50, 35), (5, 37)):  # 4 × 8, 10 × 7 and 1 × 7 patches, learnt for 7 × 7
        given = inputs(head, "end token") | pictures(*size, 5, 1)
        assert_same(twin, dtype, given, {"interpolate_pos_encoding": True})


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("head", HEADS)
def test_what_we_save_transformers_opens(head, config, tmp_path):
    assert_saved(twin_of(head, config, tmp_path / "theirs"), tmp_path / "ours", inputs(head, config, "right"))


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("head", READERS)
def test_the_side_of_padding_changes_nothing(head, config, tmp_path):
    model = twin_of(head, config, tmp_path).ours(torch.float64)
    right = words(config, "right")
    mask = texts(31, "left")["attention_mask"]
    ids = torch.full_like(right["input_ids"], 5).masked_scatter(mask, right["input_ids"][right["attention_mask"]])
    one, other = model(**right), model(ids, mask)
    torch.testing.assert_close(
        other.last_hidden_state[mask], one.last_hidden_state[right["attention_mask"]], rtol=0, atol=1e-13
    )
    torch.testing.assert_close(other.pooler_output, one.pooler_output, rtol=0, atol=1e-13)


@pytest.mark.parametrize("head", ["TextModel", "VisionModel"])
def test_a_tower_alone_is_read_with_and_without_what_older_files_put_before_its_names(head, tmp_path):
    part = {"TextModel": "text_model.", "VisionModel": "vision_model."}[head]
    twin = twin_of(head, "largest id", tmp_path / "theirs")
    ours = twin.ours(torch.float32)
    ours.save(tmp_path / "ours")
    bare, full = (load_file(tmp_path / side / "model.safetensors") for side in ("theirs", "ours"))
    assert {part + name for name in bare} == set(full)  # as transformers 4 has them, and 5 reads too
    given = inputs(head, "largest id")
    assert torch.equal(ours(**given).pooler_output, load(tmp_path / "ours")(**given).pooler_output)


# ---------------------------------------------------------------------------------------------------------- comparing


def test_texts_and_pictures_are_compared_each_with_each(tmp_path):
    model = twin_of("Model", "end token", tmp_path).ours(torch.float64)
    given = inputs("Model", "end token", "right")
    result = model(**given)
    texts, shown = (
        model.encode_text(given["input_ids"], given["attention_mask"]),
        model.encode_image(given["pixel_values"]),
    )
    assert texts.shape == (13, 13)
    assert shown.shape == (5, 13)
    for vectors in (texts, shown):
        torch.testing.assert_close(vectors.norm(dim=-1), torch.ones(len(vectors)).double(), rtol=0, atol=1e-14)
    assert torch.equal(texts, result.text_embeds)
    assert torch.equal(shown, result.image_embeds)
    scale = load_file(tmp_path / "model.safetensors")["logit_scale"].double().exp()
    each = torch.stack([torch.stack([scale * (p * t).sum() for t in texts]) for p in shown])  # (5, 13)
    torch.testing.assert_close(result.logits_per_image, each, rtol=0, atol=1e-13)


def test_one_of_the_two_may_be_asked_alone(tmp_path):
    model = twin_of("Model", "largest id", tmp_path).ours(torch.float32)
    given = inputs("Model", "largest id", "right")
    both = model(**given, output_hidden_states=True)
    text, shown = (
        model(given["input_ids"], given["attention_mask"], output_hidden_states=True),
        model(pixel_values=given["pixel_values"], output_hidden_states=True),
    )
    assert torch.equal(text.last_hidden_state, both.last_hidden_state)
    assert torch.equal(text.pooler_output, both.pooler_output)
    assert torch.equal(text.text_embeds, both.text_embeds)
    assert torch.equal(shown.last_hidden_state, both.encoder_last_hidden_state)
    assert torch.equal(shown.image_embeds, both.image_embeds)
    assert len(text.hidden_states) == len(both.hidden_states) == 4
    assert len(shown.hidden_states) == len(both.encoder_hidden_states) == 3
    for result in (text, shown):
        assert result.logits_per_image is result.encoder_last_hidden_state is result.encoder_hidden_states is None
    assert text.image_embeds is shown.text_embeds is None
    assert model(**given).hidden_states is model(**given).encoder_hidden_states is None


def test_a_text_ends_at_its_first_end_token_or_at_its_largest_id():
    hidden = torch.arange(10.0).reshape(2, 5, 1)
    ids, mask = (
        torch.tensor([[3, 9, 4, 9, 9], [9, 9, 3, 8, 9]]),
        torch.tensor([[True] * 5, [False, False] + [True] * 3]),
    )
    for end in (9, None):
        pooler = EndPooler(end)
        assert pooler(hidden, pooler.ends(ids, mask)).tolist() == [[1.0], [9.0]]
        assert pooler(hidden, pooler.ends(ids, None)).tolist() == [[1.0], [5.0]]


# ----------------------------------------------------------------------------------------------------------- geometry


@pytest.mark.parametrize("head", ["Model", "VisionModel", "VisionModelWithProjection", "ForImageClassification"])
def test_layouts_fit_what_is_watched(head, tmp_path):
    model = twin_of(head, "largest id", tmp_path).ours(torch.float32)
    frame = Frame.whole(60, 80).resized(17, 23).cropped(2, 1, 15, 21)
    layouts = model.layouts(frame)
    with regard.watch(model) as seen:
        model(pixel_values=pictures(15, 21)["pixel_values"].float())
    assert set(seen.names) == set(layouts) <= {name for name, _ in model.named_modules()}
    for name, sides in layouts.items():
        assert seen[name].lse.shape[-1] == sides.queries.shape[1] == sides.keys.shape[1] == 1 + 3 * 5
    assert sides.frames == (frame,)
    assert sides.keys.at(11.5, 19)[1] == 1 + 2 * 5 + 4


def test_layouts_leave_out_the_text(tmp_path):
    model = twin_of("Model", "largest id", tmp_path).ours(torch.float32)
    with regard.watch(model) as seen:
        model(**inputs("Model", "largest id"))
    assert set(seen.names) - set(model.layouts(Frame.whole(12, 12))) == {f"text.blocks.{n}.attention" for n in range(3)}


# --------------------------------------------------------------------------------------------------------- bad input


def refused(model: nn.Module, kind: type[Exception], said: str, **given: Any) -> None:
    """It is refused with these words, and no attention has run."""
    calls: list[Any] = []
    note = lambda call, backend, output: calls.append(call)  # noqa: E731
    observe(note)
    try:
        with pytest.raises(kind, match=said):
            model(**given)
    finally:
        unobserve(note)
    assert not calls


IDS, PIXELS = torch.full((2, 5), 5), torch.zeros(3, 1, 37, 37)
WRONG = [
    ({}, ValueError, r"ids.*\(B, N\).*pixel_values.*\(B, C, H, W\)"),
    ({"attention_mask": IDS > 0}, ValueError, r"ids.*pixel_values"),
    ({"attention_mask": IDS > 0, "pixel_values": PIXELS}, ValueError, "attention_mask"),
    ({"input_ids": IDS, "attention_mask": IDS}, ValueError, r"attention_mask.*torch.int64.*5"),
    ({"input_ids": IDS + 26}, ValueError, r"id.*31"),
    ({"input_ids": IDS.to("meta")}, ValueError, r"cpu.*ids.*meta.*ids.to\(model.device\)"),
    ({"input_ids": IDS, "attention_mask": (IDS > 0).to("meta")}, ValueError, r"cpu.*mask.*meta"),
    ({"input_ids": IDS.float()}, TypeError, r"ids.*int64.*int32"),
    ({"input_ids": torch.full((2, 12), 5)}, ValueError, r"12.*11"),
    ({"input_ids": torch.tensor([[5, 7], [7, 8]])}, ValueError, r"text.*1.*id.*5"),
    ({"input_ids": torch.tensor([[7, 5]]), "attention_mask": torch.tensor([[True, False]])}, ValueError, r"text.*0"),
    ({"input_ids": IDS, "pixel_values": PIXELS[:, :, :4]}, ValueError, r"4.*37.*5"),
    ({"input_ids": IDS, "pixel_values": PIXELS.expand(-1, 3, -1, -1)}, ValueError, r"pixel_values.*\(B, 1, H, W\)"),
    ({"input_ids": IDS, "pixel_values": PIXELS.byte()}, TypeError, "pixel_values"),
]


@pytest.mark.parametrize(("given", "kind", "said"), WRONG)
def test_what_does_not_fit_is_refused_before_anything_runs(given, kind, said, tmp_path):
    refused(twin_of("Model", "end token", tmp_path).ours(torch.float32), kind, said, **given)


def test_the_text_tower_alone_needs_an_end_token(tmp_path):
    model = twin_of("TextModel", "end token", tmp_path).ours(torch.float32)
    refused(model, ValueError, r"text.*0", input_ids=torch.tensor([[7, 8]]))


def test_a_tower_that_is_not_there_is_not_asked(tmp_path):
    text = twin_of("TextModelWithProjection", "end token", tmp_path / "text").ours(torch.float32)
    shown = twin_of("VisionModelWithProjection", "end token", tmp_path / "vision").ours(torch.float32)
    refused(text, ValueError, r"CLIP.*image tower.*ids", input_ids=IDS, pixel_values=PIXELS)
    refused(shown, ValueError, r"CLIP.*text tower.*pixel_values=", input_ids=IDS, pixel_values=PIXELS)
    with pytest.raises(ValueError, match="image tower"):
        text.layouts(Frame.whole(37, 37))
    with pytest.raises(ValueError, match="image tower"):
        text.encode_image(PIXELS)
    with pytest.raises(ValueError, match="text tower"):
        shown.encode_text(IDS)


# ----------------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize("head", HEADS)
def test_what_config_json_leaves_out_is_as_in_transformers(head):
    kind = getattr(transformers, "CLIP" + head)
    with torch.device("meta"):
        theirs = kind(
            kind.config_class(num_hidden_layers=1) if "Text" in head or "Vision" in head else kind.config_class()
        )
    part = {"TextModel": "text_model.", "VisionModel": "vision_model."}.get(head, "")
    wanted = {part + name: tuple(p.shape) for name, p in theirs.named_parameters()}
    values = {"model_type": theirs.config.model_type, "architectures": ["CLIP" + head]}
    values |= {"num_hidden_layers": 1} if part or "Projection" in head else {}
    settings = Config(values)
    family = family_of(settings)
    model = empty(family, settings, family.task_of(values["architectures"]))
    found: dict[str, tuple[int, ...]] = {}
    for place in places(model, ""):
        found |= dict(zip(place.theirs, place.source.shapes(place.shape, place.rows), strict=True))
    assert found == wanted
    assert {norm.eps for norm in model.modules() if isinstance(norm, nn.LayerNorm)} == {1e-5}
    assert {block.activation for block in model.modules() if hasattr(block, "activation")} == {"quick_gelu"}


def test_where_settings_stand_twice_the_older_ones_count_with_their_defaults(tmp_path):
    """Checkpoints of 2022 have both; what the older do not say is then not looked up in the newer."""
    text, vision, _ = CONFIGS["end token"]
    twin = twin_of("Model", "end token", tmp_path)
    older = {
        name: value for name, value in text.items() if name not in ("eos_token_id", "hidden_act", "layer_norm_eps")
    }
    values = {"text_config_dict": older, "vision_config_dict": vision | {"layer_norm_eps": 1e-4}}
    change(tmp_path, **values)
    config = CLIPConfig.from_pretrained(tmp_path)
    model = twin.ours(torch.float32)
    assert model.text_pooler.end == config.text_config.eos_token_id == 49407
    assert model.text.norm.eps == config.text_config.layer_norm_eps == 1e-5
    assert model.text.blocks[0].feed_forward.activation == config.text_config.hidden_act == "quick_gelu"
    assert model.vision_pooler.norm.eps == config.vision_config.layer_norm_eps == 1e-4


def test_settings_of_old_checkpoints_are_read(tmp_path):
    twin = twin_of("Model", "largest id", tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    old = {"dropout": 0.0, "gradient_checkpointing": False, "is_decoder": False, "pruned_heads": {}, "top_k": 50}
    old |= {"architectures": None, "torch_dtype": None, "id2label": {"0": "LABEL_0", "1": "LABEL_1"}}
    parts = {name: values[name] | old for name in ("text_config", "vision_config")}
    change(tmp_path, **parts, text_config_dict=None, vision_config_dict=None, torch_dtype="float32")
    assert twin.ours(torch.float32).text_pooler.end is None


REFUSED = [
    (
        "text_config",
        {"use_rotary": True},
        r"config.json.*text_config.*CLIP.*use_rotary.*True",
    ),
    ("vision_config", {"qkv_bias": False}, r"config.json.*vision_config.*qkv_bias.*False"),
    ("vision_config", {"hidden_act": "mish"}, r"'mish'.*quick_gelu"),
    ("text_config", {"eos_token_id": [5, 6]}, r"text_config.*eos_token_id.*\[5, 6\]"),
    ("text_config", {"is_decoder": True}, r"is_decoder.*True.*False.*None"),
    (
        "text_config",
        {"vocab_size": 32},
        r"text_model.embeddings.token_embedding.weight.*\(31, 12\).*\(32, 12\)",
    ),
    ("vision_config", {"num_hidden_layers": 2}, r"16.*vision_model.encoder.layers.2"),
]


@pytest.mark.parametrize(("part", "more", "said"), REFUSED)
def test_settings_that_change_the_maths_are_refused(part, more, said, tmp_path):
    twin = twin_of("Model", "end token", tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())[part]
    change(tmp_path, **{part: values | more})
    with pytest.raises(ValueError, match=said):
        twin.ours(torch.float32)


def test_a_tower_alone_has_no_scale():
    assert SimilarityHead(3, text=2).scale is SimilarityHead(3, image=5).scale is None


@pytest.mark.parametrize("config", CONFIGS)
def test_the_tower_of_pictures_compiles_as_one_graph(config, tmp_path):
    model = twin_of("VisionModel", config, tmp_path).ours(torch.float32)
    pixels = inputs("VisionModel", config)["pixel_values"].float()
    torch._dynamo.reset()
    with torch.inference_mode():
        found = torch.compile(model, backend="eager", fullgraph=True)(pixels)  # raises where a graph would break
        assert torch.equal(found.last_hidden_state, model(pixels).last_hidden_state)
