"""Swin against transformers; and by brute force where it goes further: small grids, pictures that are not square."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import SwinConfig
from twins import Twin, assert_same, assert_saved, build, change, pictures

import regard
from regard.layouts import Frame, Layout, Sides
from regard.lens.view import View
from regard.models.families.swin import FAMILY
from regard.models.family import Config
from regard.models.loading import load
from regard.nn.vision import PatchGrid
from regard.nn.windows import Merging, WindowBlock, Windows, WindowTable

# 11 × 18 patches of 2 × 3 pixels, the last column padded; 12 × 18, 6 × 9 and 3 × 6 with padding in windows of 3.
ODD = {"embed_dim": 10, "depths": [2, 3, 1], "num_heads": [2, 5, 4], "window_size": 3, "mlp_ratio": 2.5}
ODD |= {"image_size": [22, 53], "patch_size": [2, 3], "num_labels": 7, "encoder_stride": 8}
# 16 × 16 and 8 × 8 patches, whole windows of 4; learnt positions.
EVEN = {"embed_dim": 12, "depths": [1, 2], "num_heads": [3, 2], "window_size": 4, "mlp_ratio": 3, "num_channels": 1}
EVEN |= {"image_size": 48, "patch_size": 3, "num_labels": 3, "encoder_stride": 6, "use_absolute_embeddings": True}
EVEN |= {"qkv_bias": False, "hidden_act": "gelu_new", "layer_norm_eps": 1e-3}
CONFIGS = {"odd": ODD, "even": EVEN}
SIZES = {"odd": (22, 53, 3, 3), "even": (48, 48, 3, 1)}
HEADS = ["Model", "ForImageClassification", "ForMaskedImageModeling"]

ATTENTION = {"q_proj": "self.query", "k_proj": "self.key", "v_proj": "self.value", "o_proj": "output.dense"}
ATTENTION |= {r"relative_position_bias\.": "self."}
STORED = {rf"attention\.{memory}": f"attention.{file}" for memory, file in ATTENTION.items()}
STORED |= {r"mlp\.fc1": "intermediate.dense", r"mlp\.fc2": "output.dense"}


def twin_of(head: str, config: str, directory: Path, **more: object) -> Twin:
    return Twin("Swin" + head, SwinConfig(**{**CONFIGS[config], **more}), directory, stored=STORED)


def given(config: str) -> dict[str, Tensor]:
    return pictures(*SIZES[config])


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("head", HEADS)
def test_every_head_computes_what_transformers_computes(head, config, dtype, tmp_path):
    inputs = given(config)
    if head == "ForMaskedImageModeling" and config == "odd":
        inputs = pictures(24, 36)  # 12 × 12 patches: there every picture is taken for a square
    assert_same(twin_of(head, config, tmp_path), dtype, inputs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("size", [(17, 25), (31, 40), (52, 26)])
def test_pictures_of_other_sizes_are_read_as_transformers_does(size, dtype, tmp_path):
    assert_same(twin_of("Model", "odd", tmp_path), dtype, pictures(*size))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("size", [(36, 36), (36, 57), (60, 48)])
def test_positions_are_interpolated_for_other_pictures(size, dtype, tmp_path):
    twin = twin_of("Model", "even", tmp_path)
    assert_same(twin, dtype, pictures(*size, channels=1), theirs={"interpolate_pos_encoding": True})


def test_pixels_left_over_are_padded_before_positions_are_interpolated(tmp_path):
    """transformers counts whole patches only when it interpolates, and fails."""
    model = twin_of("ForImageClassification", "even", tmp_path).ours(torch.float64)
    pixels = pictures(37, 50, channels=1)["pixel_values"]
    padded = torch.zeros(3, 1, 39, 51, dtype=torch.float64)
    padded[:, :, :37, :50] = pixels
    assert torch.equal(model(pixels).logits, model(padded).logits)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_hidden_patches_are_rebuilt_as_transformers_does(dtype, tmp_path):
    hidden = torch.rand(3, 256, generator=torch.Generator().manual_seed(2)) < 0.5
    assert_same(twin_of("ForMaskedImageModeling", "even", tmp_path), dtype, given("even") | {"bool_masked_pos": hidden})


def test_pictures_that_are_not_square_are_rebuilt_in_place(tmp_path):
    model = twin_of("ForMaskedImageModeling", "odd", tmp_path).ours(torch.float64)
    made = model(**given("odd"))
    assert made.logits.shape == (3, 3, 3 * 8, 5 * 8)  # 11 × 18 patches, merged twice
    score = model.head.score
    for row, column in ((0, 0), (2, 4), (1, 3)):
        vector = (
            made.last_hidden_state[1, row * 5 + column] @ score.weight.flatten(1).T + score.bias
        )  # (channels · 8 · 8)
        there = made.logits[1, :, 8 * row : 8 * row + 8, 8 * column : 8 * column + 8]
        torch.testing.assert_close(there, vector.reshape(3, 8, 8), rtol=0, atol=1e-12)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("head", HEADS)
def test_what_we_save_transformers_opens(head, config, tmp_path):
    inputs = pictures(24, 36) if config == "odd" else given(config)
    assert_saved(twin_of(head, config, tmp_path / "theirs"), tmp_path / "ours", inputs)


def test_parts_are_left_out_in_training_as_transformers_does(tmp_path):
    """Both draw one number for each picture and block: with one seed, the same pictures go without attention."""
    twin = twin_of("Model", "odd", tmp_path, drop_path_rate=0.75)
    pixels = given("odd")["pixel_values"].float()
    made = []
    for model in (twin.ours(torch.float32), twin.baseline(torch.float32)):
        torch.manual_seed(5)
        made.append(model.train()(pixels).last_hidden_state)
    torch.testing.assert_close(*made)
    assert not torch.allclose(made[0], twin.ours(torch.float32)(pixels).last_hidden_state)


def test_a_body_is_read_from_a_checkpoint_with_a_head(tmp_path):
    twin = twin_of("ForMaskedImageModeling", "even", tmp_path)
    body = twin.ours(torch.float32, task="feature-extraction")(**given("even"))
    assert body.logits is None
    assert torch.equal(body.last_hidden_state, twin.ours(torch.float32)(**given("even")).last_hidden_state)
    assert torch.equal(body.pooler_output, body.last_hidden_state.mean(1))


def test_indices_of_the_table_in_older_files_are_passed_over(tmp_path):
    twin = twin_of("Model", "even", tmp_path)
    before = twin.ours(torch.float32)(**given("even")).last_hidden_state
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["encoder.layers.1.blocks.0.attention.self.relative_position_index"] = torch.zeros(16, 16).long()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert torch.equal(twin.ours(torch.float32)(**given("even")).last_hidden_state, before)


# ------------------------------------------------------------------------------------------------------------ windows


def by_hand(block: WindowBlock, x: Tensor, grid: PatchGrid, window: int, shifted: bool) -> Tensor:
    """The weights (B, H, rows, columns, R, C) of every patch towards the padded grid, without rolling or cutting.

    The edges of shifted windows lie at shift, shift + side, …; what lies before the first is a window, too.
    """
    side, shift = min(window, *grid), window // 2 if shifted and min(grid) > window else 0
    padded = [n + -n % side for n in grid]
    normed = torch.zeros(len(x), *padded, x.shape[-1], dtype=x.dtype)
    normed[:, : grid.rows, : grid.columns] = block.attention_norm(x).reshape(len(x), *grid, -1)
    layer = block.attention
    rows = layer.w_qkv(normed).split(layer.w_qkv.rows, -1)[:2]
    q, k = (part.unflatten(-1, (layer.num_heads, -1)).movedim(-2, 1) for part in rows)
    scores = torch.einsum("bhrcd,bhyxd->bhrcyx", q, k) * layer.head_dim**-0.5
    table = layer.position.table.reshape(2 * window - 1, 2 * window - 1, -1)
    down, across = (torch.arange(n)[:, None] - torch.arange(n) for n in padded)  # of the query from the key
    near = [(n.abs() < side) for n in (down, across)]
    down, across = ((n + window - 1).clamp(0, 2 * window - 2) for n in (down, across))
    scores += table[down[:, None, :, None], across[None, :, None, :]].movedim(-1, 0)
    rows, columns = ((torch.arange(n) - shift).div(side, rounding_mode="floor") for n in padded)
    same = (rows[:, None] == rows)[:, None, :, None] & (columns[:, None] == columns)[None, :, None, :]
    assert not (same & ~(near[0][:, None, :, None] & near[1][None, :, None, :])).any()
    weights = scores.where(same, -torch.inf).flatten(-2).softmax(-1).unflatten(-1, padded)
    return weights[:, :, : grid.rows, : grid.columns]


CASES = {
    "shifted": ({}, (22, 53), 0, 1, (11, 18)),
    "shifted, merged": ({}, (22, 53), 1, 1, (6, 9)),
    "not shifted": ({}, (22, 53), 1, 2, (6, 9)),
    "as large as a window": ({}, (22, 53), 2, 0, (3, 5)),
    "smaller than a window": ({"window_size": 4}, (22, 53), 2, 0, (3, 5)),
    "much smaller, in a block that would be shifted": ({"window_size": 9}, (9, 40), 1, 1, (3, 7)),
    "an even window": ({"window_size": 4}, (22, 53), 1, 1, (6, 9)),
    "one row": ({}, (1, 53), 0, 1, (1, 18)),
}


def looked_at(name: str, directory: Path) -> tuple[View, Sides, Tensor]:
    """The attention of a case on two pictures, with its layout; and its weights by hand."""
    settings, size, stage, number, grid = CASES[name]
    model = twin_of("Model", "odd", directory, **settings).ours(torch.float64)
    path, taken = f"tower.stages.{stage}.blocks.{number}", []
    block = model.get_submodule(path)
    block.register_forward_pre_hook(lambda module, given: taken.append(given[0]))
    sides = model.layouts(Frame.whole(*size))[f"{path}.attention"]
    at = {f"{path}.attention": sides}
    with torch.no_grad():
        with regard.watch(model, layers=list(at), keep="qk", layouts=at) as seen:
            model(**pictures(*size, count=2))
        expected = by_hand(block, taken[0], PatchGrid(*grid), model.tower.stages[stage].window, number % 2 == 1)
    return seen[f"{path}.attention"], sides, expected


def places(size: tuple[int, int]) -> list[tuple[int, int]]:
    """Pixels at the corners, at the lower edge and in the middle."""
    last = size[0] - 1, size[1] - 1
    return [(0, 0), (0, last[1]), (last[0], 5), last, (size[0] // 2, size[1] // 2)]


@pytest.mark.parametrize("name", CASES)
def test_weights_on_the_pixels_equal_brute_force(name, tmp_path):
    """The row of a patch in its window, put where its layout says, against all patches of the picture at once."""
    view, sides, expected = looked_at(name, tmp_path)
    _, size, stage, *_ = CASES[name]
    w, n = sides.queries.shape
    assert view.lse.shape == (2 * w, expected.shape[1], n)
    high, wide = 2 << stage, 3 << stage  # of a merged patch
    patch = np.arange(size[0])[:, None] // high, np.arange(size[1]) // wide  # row and column of each pixel's
    for y, x in places(size):
        window, index = sides.queries.at(y, x)
        row = view.row(index).reshape(2, w, -1, n)[:, window].numpy()  # (B, H, N)
        painted = np.zeros((*row.shape[:2], *size))
        for token in np.flatnonzero(sides.keys.kind[window] == "patch"):
            top, left, bottom, right = sides.keys.box[window, token].astype(int)
            painted[:, :, top:bottom, left:right] += row[:, :, token, None, None]
        truth = expected[:, :, y // high, x // wide].numpy()[:, :, *patch]  # (B, H, height, width)
        np.testing.assert_allclose(painted, truth, rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", ["shifted, merged", "smaller than a window"])
def test_an_overlay_shows_what_a_patch_looks_at(name, tmp_path):
    view, _, expected = looked_at(name, tmp_path)
    _, size, stage, *_ = CASES[name]
    for y, x in places(size):
        seen = view.overlay(at=(y + 0.5, x + 0.5), head=1, batch=1)
        truth = expected[1, 1, y // (2 << stage), x // (3 << stage)].numpy()  # (R, C)
        np.testing.assert_allclose(seen.mass, truth[tuple(seen.cells.T)], rtol=0, atol=1e-14)


def test_every_attention_has_its_layout(tmp_path):
    model = twin_of("Model", "odd", tmp_path).ours(torch.float32)
    layouts = model.layouts(Frame.whole(60, 80).resized(22, 53))
    with regard.watch(model) as seen:
        model(**given("odd"))
    assert seen.names == list(layouts)
    for name, sides in layouts.items():
        batch, _, n = seen[name].lse.shape
        assert (batch, n) == (3 * sides.queries.shape[0], sides.queries.shape[1])
        assert sides.queries == sides.keys
    patches = [len(sides.keys.indices("patch")) for sides in layouts.values()]
    assert patches == [11 * 18] * 2 + [6 * 9] * 3 + [3 * 5]


GRIDS = [((8, 12), 4, 2), ((5, 7), 3, 1), ((11, 18), 7, 3), ((4, 4), 4, 0), ((3, 10), 5, 0), ((1, 1), 3, 0)]


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize(("grid", "window", "shift"), GRIDS)
def test_tokens_are_cut_as_layouts_say_and_put_back(grid, window, shift, shifted):
    windows = Windows.of(PatchGrid(*grid), window, shifted=shifted, batch=2, device=torch.device("cpu"))
    x = torch.arange(1.0, 2 * 5 * grid[0] * grid[1] + 1).reshape(2, grid[0] * grid[1], 5)
    cut = windows.cut(x)
    assert torch.equal(windows.put_back(cut), x)
    side, shift = min(window, *grid), shift if shifted else 0
    layout = Layout.windows(*grid, size=(1, 1), window=(side, side), shift=(shift, shift))
    assert cut.shape == (2 * layout.shape[0], layout.shape[1], 5)
    for picture, part in zip(x, cut.split(layout.shape[0]), strict=True):
        for w, n in np.ndindex(*layout.shape):
            real = layout.kind[w, n] == "patch"
            place = int(layout.box[w, n, 0]) * grid[1] + int(layout.box[w, n, 1]) if real else None
            assert torch.equal(part[w, n], torch.zeros(5) if place is None else picture[place])
    assert (windows.mask is None) == (shift == 0)


def test_tokens_of_opposite_edges_do_not_see_each_other():
    windows = Windows.of(PatchGrid(4, 6), 3, shifted=True, batch=2, device=torch.device("cpu"))  # padded to 6 × 6
    assert windows.mask.leading == (8, 1)
    last = torch.tensor([0, 0, 1, 0, 0, 1, 2, 2, 3])  # two thirds of the last rows and columns came from the first
    seen = windows.mask.dense(9)[:, 0]  # (8, 9, 9)
    assert torch.equal(seen[3], last[:, None] == last)
    assert torch.equal(seen[7], seen[3])
    assert seen[0].all()
    assert not seen[1].all()


def test_a_small_window_uses_the_middle_of_the_table():
    table = WindowTable(4, num_heads=3)
    q = torch.zeros(1, 3, 4, 5)
    whole = table.bias(torch.zeros(1, 3, 16, 5), 1.0).dense(16)
    corner = torch.tensor([0, 1, 4, 5])  # the tokens of a 2 × 2 window in a 4 × 4 one
    assert torch.equal(table.bias(q, 1.0).dense(4), whole[:, :, corner[:, None], corner])


def test_neighbours_are_merged_column_by_column():
    merging = Merging(1).double()
    with torch.no_grad():
        merging.w.weight.copy_(torch.eye(4)[1:3])
    x = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0], [64.0, 128.0, 256.0]], dtype=torch.float64).reshape(1, 9, 1)
    fours = torch.tensor([[1, 8, 2, 16], [4, 32, 0, 0], [64, 0, 128, 0], [256, 0, 0, 0]], dtype=torch.float64)
    assert torch.equal(merging(x, PatchGrid(3, 3))[0], merging.norm(fours)[:, 1:3])


# ------------------------------------------------------------------------------------------------------------- shapes


def test_shapes_of_swin_t():
    settings = Config({"depths": [1, 1, 1, 1], "num_labels": 1000})
    model = FAMILY.build(settings, "image-classification").eval()
    with regard.watch(model) as seen, torch.no_grad():
        made = model(torch.zeros(1, 3, 224, 224), output_hidden_states=True)
    assert [tuple(x.shape[1:]) for x in made.hidden_states] == [
        (3136, 96),
        (784, 192),
        (196, 384),
        (49, 768),
        (49, 768),
    ]
    sizes = [tuple(seen[name].lse.shape) for name in seen.names]
    assert sizes == [(64, 3, 49), (16, 6, 49), (4, 12, 49), (1, 24, 49)]
    assert made.logits.shape == (1, 1000)
    assert made.pooler_output.shape == (1, 768)


def test_the_last_patches_lie_where_they_were_merged(tmp_path):
    model = twin_of("Model", "odd", tmp_path).ours(torch.float32)
    pixels = given("odd")["pixel_values"]
    assert model.grid(pixels) == (3, 5)
    assert model(pixels).last_hidden_state.shape == (3, 3 * 5, 40)


def test_one_pixel_is_a_picture(tmp_path):
    result = twin_of("ForImageClassification", "odd", tmp_path).ours(torch.float32)(torch.ones(2, 3, 1, 1))
    assert result.last_hidden_state.shape == (2, 1, 40)
    assert result.logits.isfinite().all()


def test_a_picture_does_not_depend_on_the_others(tmp_path):
    model = twin_of("Model", "odd", tmp_path).ours(torch.float64)
    pixels = given("odd")["pixel_values"]
    torch.testing.assert_close(
        model(pixels).last_hidden_state[1:2], model(pixels[1:2]).last_hidden_state, rtol=0, atol=1e-12
    )


# ------------------------------------------------------------------------------------------------------------- errors

WRONG = [
    (torch.zeros(1, 3, 22, 53, dtype=torch.uint8), TypeError, r"torch.uint8"),
    (torch.zeros(3, 22, 53), ValueError, r"\(B, 3, H, W\).*\(3, 22, 53\)"),
    (torch.zeros(1, 1, 22, 53), ValueError, r"\(1, 1, 22, 53\)"),
    (torch.zeros(1, 3, 0, 53), ValueError, r"0.*53.*1"),
]


@pytest.mark.parametrize(("pixels", "kind", "said"), WRONG)
def test_wrong_pixels_are_refused(pixels, kind, said, tmp_path):
    model = twin_of("Model", "odd", tmp_path).ours(torch.float32)
    with pytest.raises(kind, match=said):
        model(pixels)


def test_hidden_patches_need_a_token_and_a_place(tmp_path):
    pixels = given("odd")["pixel_values"]
    model = twin_of("Model", "odd", tmp_path / "body").ours(torch.float32)
    with pytest.raises(ValueError, match=r"'feature-extraction'.*task='masked-image-modeling'"):
        model(pixels, bool_masked_pos=torch.zeros(3, 198, dtype=torch.bool))
    model = twin_of("ForMaskedImageModeling", "odd", tmp_path / "rebuild").ours(torch.float32)
    with pytest.raises(ValueError, match=r"bool_masked_pos.*\(3, 198\).*torch.bool.*3.*15"):
        model(pixels, bool_masked_pos=torch.zeros(3, 15, dtype=torch.bool))  # as many as are left after merging


SETTINGS = [
    ({"depths": [2, 2]}, r"depths.*\[2, 2\].*2.*num_heads.*\[2, 5, 4\].*3"),
    ({"depths": 6}, r"depths.*1.*6"),
    ({"num_heads": []}, r"num_heads.*1.*\[\]"),
    ({"num_heads": [2, True, 4]}, r"num_heads.*1.*\[2, True, 4\]"),
    ({"depths": [2, 0, 1]}, r"depths.*1.*\[2, 0, 1\]"),
    ({"depths": [2, 1999, 1]}, r"depths.*2002.*2000"),
    ({"depths": [1] * 99, "num_heads": [1] * 99}, "tensor"),
    ({"num_heads": [3, 5, 4]}, r"d_model.*10.*3"),
    (
        {"window_size": 5},
        r"6.*relative_position_bias_table.*\(25, 2\).*\(81, 2\)",
    ),
    ({"patch_norm": False}, r"patch_norm.*False.*True"),
    ({"path_norm": False}, r"path_norm.*False.*True"),
    ({"hidden_act": "mish"}, "'mish'"),
    ({"drop_path_rate": 1.0}, r"0.*1"),
    ({"use_absolute_embeddings": True, "image_size": [1, 53]}, r"1.*53"),
    ({"pretrained_window_sizes": [0, 0, 0]}, r"Swin.*pretrained_window_sizes"),
]


@pytest.mark.parametrize(("values", "said"), SETTINGS)
def test_settings_that_do_not_fit_are_refused(values, said, tmp_path):
    build("SwinModel", SwinConfig(**ODD), torch.float32).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=said):
        load(change(tmp_path, **values))


def test_settings_of_the_published_files_are_read(tmp_path):
    build("SwinModel", SwinConfig(**ODD), torch.float32).save_pretrained(tmp_path)
    assert load(change(tmp_path, path_norm=True, encoder_stride=32)).family.title == "Swin"


def test_masks_and_indices_that_old_files_keep_are_passed_over(tmp_path):
    build("SwinModel", SwinConfig(**ODD), torch.float32).save_pretrained(tmp_path)
    expected = load(tmp_path).state_dict()
    tensors = load_file(tmp_path / "model.safetensors")
    block = "encoder.layers.0.blocks.1"
    extra = {
        f"{block}.attn_mask": torch.zeros(4, 9, 9),
        f"{block}.attention.self.relative_position_index": torch.ones(3),
    }
    save_file(tensors | extra, tmp_path / "model.safetensors", {"format": "pt"})
    found = load(tmp_path).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize("config", CONFIGS)
def test_a_model_compiles_as_one_graph(config, tmp_path):
    model, pixels = twin_of("Model", config, tmp_path).ours(torch.float32), given(config)["pixel_values"].float()
    torch._dynamo.reset()
    with torch.inference_mode():
        found = torch.compile(model, backend="eager", fullgraph=True)(pixels)  # raises where a graph would break
        torch.testing.assert_close(found.last_hidden_state, model(pixels).last_hidden_state, rtol=0, atol=0)
