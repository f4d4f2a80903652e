import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DeiTConfig, Dinov2Config, Dinov2WithRegistersConfig, ViTConfig
from twins import Twin, assert_same, assert_saved, build, change, pictures

import regard
from regard.layouts import Frame
from regard.models.loading import load
from regard.nn.blocks import DropPath
from regard.nn.vision import PatchGrid, interpolate_positions
from regard.testing import largest_error

DINOV2 = os.environ.get("REGARD_DINOV2")

# 5 × 3 patches of a picture that is not square; 7 × 7 with pixels left over at the edges.
SMALL = {"hidden_size": 20, "num_hidden_layers": 3, "num_attention_heads": 5, "num_labels": 7}
SMALL |= {"image_size": [20, 12], "patch_size": [4, 4]}
OTHER = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "num_labels": 3}
OTHER |= {"image_size": 37, "patch_size": 5, "num_channels": 1, "qkv_bias": False, "hidden_act": "gelu_new"}
SIZES = {"not square": (20, 12, 3, 3), "one channel": (37, 37, 3, 1)}
LIKE_VIT = {
    "not square": SMALL | {"intermediate_size": 29, "encoder_stride": 4, "pooler_output_size": 11},
    "one channel": OTHER | {"intermediate_size": 17, "encoder_stride": 5, "pooler_act": "relu", "layer_norm_eps": 1e-5},
}
LIKE_DINO = {
    "not square": SMALL | {"mlp_ratio": 3, "drop_path_rate": 0.25, "layerscale_value": 0.5},
    "one channel": OTHER | {"mlp_ratio": 2, "use_swiglu_ffn": True, "layer_norm_eps": 1e-5},
}
FAMILIES = {
    "ViT": (ViTConfig, LIKE_VIT, ["Model", "ForImageClassification", "ForMaskedImageModeling"]),
    "DeiT": (
        DeiTConfig,
        LIKE_VIT,
        ["Model", "ForImageClassification", "ForImageClassificationWithTeacher", "ForMaskedImageModeling"],
    ),
    "Dinov2": (Dinov2Config, LIKE_DINO, ["Model", "ForImageClassification"]),
    "Dinov2WithRegisters": (Dinov2WithRegistersConfig, LIKE_DINO, ["Model", "ForImageClassification"]),
}
EVERY = [(family, head, config) for family, (_, _, heads) in FAMILIES.items() for head in heads for config in SIZES]

ATTENTION = {"q_proj": "attention.query", "k_proj": "attention.key", "v_proj": "attention.value"}
ATTENTION |= {"o_proj": "output.dense"}
STORED = {rf"attention\.{ours}": f"attention.{theirs}" for ours, theirs in ATTENTION.items()}
STORED |= {r"mlp\.(gate|up)_proj": "mlp.weights_in", r"mlp\.down_proj": "mlp.weights_out"}
IN_VIT = {r"mlp\.fc1": "intermediate.dense", r"mlp\.fc2": "output.dense", r"(?<!\w)layers\.": "encoder.layer."}


def twin_of(family: str, head: str, config: str, directory: Path, **more: object) -> Twin:
    kind, configs, _ = FAMILIES[family]
    values = {**configs[config], **more}
    if family == "Dinov2WithRegisters":
        values["num_register_tokens"] = 3
    stored = STORED | (IN_VIT if "intermediate_size" in values else {})
    return Twin(family + head, kind(**values), directory, stored=stored)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(("family", "head", "config"), EVERY)
def test_every_head_computes_what_transformers_computes(family, head, config, dtype, tmp_path):
    square = config == "one channel"
    more = {}
    if head == "ForMaskedImageModeling" and not square:
        more = {"image_size": 12}  # there every picture is taken for a square: the test after the next is of others
    if family.startswith("Dinov2") and not square:
        more = {"image_size": 12}  # so are learnt positions
    height, width, count, channels = SIZES[config]
    height, width = (12, 12) if more else (height, width)
    assert_same(twin_of(family, head, config, tmp_path, **more), dtype, pictures(height, width, count, channels))


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("size", [(20, 24), (41, 38), (4, 31)])
@pytest.mark.parametrize("family", FAMILIES)
def test_positions_are_interpolated_for_other_pictures(family, size, dtype, tmp_path):
    twin = twin_of(family, "Model", "not square", tmp_path, image_size=12, patch_size=4)
    asked = {} if family.startswith("Dinov2") else {"interpolate_pos_encoding": True}
    assert_same(twin, dtype, pictures(*size), theirs=asked)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("family", ["ViT", "DeiT"])
def test_hidden_patches_are_rebuilt_as_transformers_does(family, dtype, tmp_path):
    twin = twin_of(family, "ForMaskedImageModeling", "not square", tmp_path, image_size=12, patch_size=4)
    hidden = torch.rand(3, 9, generator=torch.Generator().manual_seed(2)) < 0.5
    assert_same(twin, dtype, pictures(12, 12) | {"bool_masked_pos": hidden})


@pytest.mark.parametrize("family", ["Dinov2", "Dinov2WithRegisters"])
def test_hidden_patches_of_dinov2(family, tmp_path):
    twin = twin_of(family, "Model", "one channel", tmp_path)
    hidden = torch.rand(3, 49, generator=torch.Generator().manual_seed(2)) < 0.5
    assert_same(twin, torch.float32, pictures(*SIZES["one channel"]) | {"bool_masked_pos": hidden})


def test_pictures_that_are_not_square_are_rebuilt_in_place(tmp_path):
    model = twin_of("ViT", "ForMaskedImageModeling", "not square", tmp_path).ours(torch.float64)
    given = pictures(20, 12)["pixel_values"]
    made = model(given)
    score = model.head.score
    for row, column in ((0, 0), (4, 2), (1, 2)):
        vector = (
            made.last_hidden_state[1, 1 + row * 3 + column] @ score.weight.flatten(1).T + score.bias
        )  # (channels · 4 · 4)
        there = made.logits[1, :, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4]
        torch.testing.assert_close(there, vector.reshape(3, 4, 4), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("family", "head"), [(f, h) for f, (_, _, heads) in FAMILIES.items() for h in heads])
def test_what_we_save_transformers_opens(family, head, tmp_path):
    twin = twin_of(family, head, "one channel", tmp_path / "theirs")
    assert_saved(twin, tmp_path / "ours", pictures(*SIZES["one channel"]))


def test_a_body_is_read_from_a_checkpoint_with_a_head(tmp_path):
    twin = twin_of("ViT", "ForImageClassification", "one channel", tmp_path)
    given = pictures(*SIZES["one channel"])
    body = twin.ours(torch.float32, task="feature-extraction")(**given)
    assert body.pooler_output is None
    assert body.logits is None
    assert torch.equal(body.last_hidden_state, twin.ours(torch.float32)(**given).last_hidden_state)


@pytest.mark.parametrize("mean", [False, True])
def test_images_are_classified_from_cls_or_from_the_mean_of_the_patches(mean, tmp_path):
    sizes = LIKE_VIT["not square"] | {"num_labels": 7, "model_type": "vit", "use_mean_pooling": mean}
    model = regard.build(sizes, task="image-classification").eval()
    given = pictures(20, 12)["pixel_values"].float()
    result = model(given)
    vectors = result.last_hidden_state  # cls and 5 × 3 patches
    pooled = vectors[:, 1:].mean(1) if mean else vectors[:, 0]
    assert torch.equal(result.logits, model.head.score(pooled))
    model.save(tmp_path)
    assert torch.equal(load(tmp_path)(given).logits, result.logits)
    assert load(tmp_path, task="feature-extraction")(given).last_hidden_state.shape == vectors.shape


def test_mean_of_patches_is_refused_where_two_tokens_are_averaged():
    with pytest.raises(ValueError, match="use_mean_pooling"):
        regard.build(LIKE_VIT["not square"] | {"model_type": "deit", "use_mean_pooling": True})


def test_shapes_of_the_documents(tmp_path):
    """224 × 224 × 3 → 196 patches and cls; 768 → 2304 → three of (B, 12, N, 64)."""
    model = build("ViTModel", ViTConfig(num_hidden_layers=1), torch.float32)
    model.save_pretrained(tmp_path)
    model = load(tmp_path)
    assert model.tower.embed.patches(torch.zeros(2, 3, 224, 224)).shape == (2, 196, 768)
    seen = model.tower.embed(torch.zeros(2, 3, 224, 224))
    assert seen.shape == (2, 197, 768)
    attention = model.tower.blocks[0].attention
    assert attention.w_qkv.weight.shape == (2304, 768)
    assert [tuple(part.shape) for part in attention.project(seen)] == [(2, 12, 197, 64)] * 3
    assert model(torch.zeros(1, 3, 224, 224)).last_hidden_state.shape == (1, 197, 768)


class Kernels(TorchDispatchMode):
    """The operations that were run and that touch memory: all but views."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: Counter[str] = Counter()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not operation.is_view:
            self.ran[operation.name().partition("::")[2].partition(".")[0]] += 1
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", ["ViT", "DeiT"])
def test_a_block_copies_nothing_and_has_one_product_for_queries_keys_and_values(family, tmp_path):
    model = twin_of(family, "Model", "not square", tmp_path).ours(torch.float32)
    x = torch.randn(2, 17, 20)
    with torch.no_grad(), Kernels() as kernels:
        model.tower.blocks[1](x)
    ran = {
        name.removeprefix("_").partition("_flash")[0]: n for name, n in kernels.ran.items() if name != "_unsafe_view"
    }
    assert ran == {"native_layer_norm": 2, "addmm": 4, "scaled_dot_product": 1, "gelu_": 1, "add": 2}


@pytest.mark.parametrize(("family", "config"), [(family, config) for family in FAMILIES for config in SIZES])
def test_a_model_compiles_as_one_graph(family, config, tmp_path):
    model, given = twin_of(family, "Model", config, tmp_path).ours(torch.float32), pictures(*SIZES[config])
    torch._dynamo.reset()
    with torch.inference_mode():
        pixels = given["pixel_values"].float()
        found = torch.compile(model, backend="eager", fullgraph=True)(pixels)  # raises where a graph would break
        assert torch.equal(found.last_hidden_state, model(pixels).last_hidden_state)


def test_patches_lie_where_they_were_cut(tmp_path):
    model = twin_of("ViT", "Model", "not square", tmp_path).ours(torch.float32)
    given = pictures(20, 12)["pixel_values"].float()
    assert model.grid(given) == (5, 3)
    assert model(given).last_hidden_state.shape == (3, 1 + 5 * 3, 20)


@pytest.mark.parametrize("family", FAMILIES)
def test_layouts_fit_what_is_watched(family, tmp_path):
    model = twin_of(family, "Model", "not square", tmp_path, image_size=12, patch_size=4).ours(torch.float32)
    frame = Frame.whole(60, 80).resized(20, 27)
    layouts = model.layouts(frame)
    with regard.watch(model) as seen:
        model(pictures(20, 27)["pixel_values"].float())
    assert set(seen.names) == set(layouts)
    for name, sides in layouts.items():
        assert seen[name].lse.shape[-1] == sides.queries.shape[1] == sides.keys.shape[1]
    patches = len(sides.keys.indices("patch"))
    assert patches == 5 * 6
    assert sides.keys.shape[1] - patches == len(model.tower.embed.before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_positions_in_half_precision_are_interpolated_in_single(dtype):
    learnt = torch.randn(7 * 5, 6, generator=torch.Generator().manual_seed(3)).to(dtype)
    found = interpolate_positions(learnt, PatchGrid(7, 5), PatchGrid(11, 13))
    assert found.dtype == dtype
    assert torch.equal(found, interpolate_positions(learnt.float(), PatchGrid(7, 5), PatchGrid(11, 13)).to(dtype))


WRONG = [
    (torch.zeros(1, 3, 20, 12, dtype=torch.uint8), TypeError, r"torch.uint8"),
    ([[1.0]], TypeError, r"list.*model.preprocessor"),
    (torch.zeros(3, 20, 12), ValueError, r"\(B, 3, H, W\).*\(3, 20, 12\)"),
    (torch.zeros(1, 4, 20, 12), ValueError, r"\(1, 4, 20, 12\)"),
    (torch.zeros(0, 3, 20, 12), ValueError, r"\(0, 3, 20, 12\)"),
    (torch.zeros(1, 3, 20, 12, device="meta"), ValueError, r"cpu.*meta.*pixel_values.to"),
    (torch.zeros(1, 3, 3, 12), ValueError, r"3.*12.*4"),
]


@pytest.mark.parametrize(("pixels", "kind", "said"), WRONG)
def test_wrong_pixels_are_refused(pixels, kind, said, tmp_path):
    model = twin_of("ViT", "Model", "not square", tmp_path).ours(torch.float32)
    with pytest.raises(kind, match=said):
        model(pixels)


def test_hidden_patches_need_a_token_and_a_place(tmp_path):
    given = pictures(20, 12)["pixel_values"].float()
    body = twin_of("ViT", "Model", "not square", tmp_path / "a").ours(torch.float32)
    with pytest.raises(ValueError, match=r"ViT.*'feature-extraction'.*task='masked-image-modeling'"):
        body(given, bool_masked_pos=torch.zeros(3, 15, dtype=torch.bool))
    model = twin_of("ViT", "ForMaskedImageModeling", "not square", tmp_path / "b").ours(torch.float32)
    for hidden in (torch.zeros(3, 15), torch.zeros(3, 14, dtype=torch.bool)):
        with pytest.raises(ValueError, match=r"bool_masked_pos.*\(3, 15\)"):
            model(given, bool_masked_pos=hidden)


@pytest.mark.parametrize("value", [0, [4], [4, 4, 4], "16", 1.5, True, [3, 0]])
def test_sizes_that_are_none_are_refused(value, tmp_path):
    twin = twin_of("ViT", "Model", "not square", tmp_path)
    change(tmp_path, patch_size=value)
    with pytest.raises(ValueError, match=r"patch_size.*1"):
        twin.ours(torch.float32)


def test_a_picture_smaller_than_a_patch_is_refused(tmp_path):
    twin = twin_of("ViT", "Model", "not square", tmp_path)
    change(tmp_path, patch_size=32)
    with pytest.raises(ValueError, match=r"20.*12.*\(32, 32\)"):
        twin.ours(torch.float32)


@pytest.mark.skipif(DINOV2 is None, reason="needs REGARD_DINOV2, a directory of real weights (see the data's README)")
def test_a_real_dinov2_computes_what_transformers_computes():
    given = pictures(70, 98)["pixel_values"].float()
    theirs = transformers.Dinov2Model.from_pretrained(DINOV2, attn_implementation="eager").eval()
    with torch.no_grad():
        ours, truth = load(DINOV2)(given).last_hidden_state, theirs.double()(given.double()).last_hidden_state
        base = theirs.float()(given).last_hidden_state
    assert largest_error(ours, truth)[0] <= 2 * (largest_error(base, truth)[0] + 2**-23 * float(truth.abs().max()))


def test_parts_left_out_in_training_weigh_as_much_on_average():
    x = torch.ones(4000, 2, 3)
    dropped = DropPath(0.25).train()(x)
    assert set(dropped.unique().tolist()) <= {0.0, float(torch.tensor(1 / 0.75))}
    assert bool((dropped.flatten(1).std(1) == 0).all())  # a whole entry, or nothing of it
    assert abs(float(dropped.mean()) - 1) < 0.05
    with pytest.raises(ValueError, match=r"0.*1.*1.0"):
        DropPath(1.0)
