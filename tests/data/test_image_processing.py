"""Pixels bit for bit those of transformers' processors, and frames by following a bright block through the steps."""

import io
import json
import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from seeing_twins import picture
from torch import Tensor
from transformers.models.bit.image_processing_pil_bit import BitImageProcessorPil
from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.deit.image_processing_pil_deit import DeiTImageProcessorPil
from transformers.models.idefics.image_processing_pil_idefics import IdeficsImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from regard.data.image_processing import (
    KINDS,
    MODELS,
    MOST_MADE,
    Crop,
    ImageProcessor,
    ImageTransforms,
    Normalize,
    Pad,
    Resize,
    Square,
    known_values,
)
from regard.data.images import open_image
from regard.layouts import Frame

THEIRS = {
    "ViT": ViTImageProcessorPil,
    "DeiT": DeiTImageProcessorPil,
    "Bit": BitImageProcessorPil,
    "CLIP": CLIPImageProcessorPil,
    "Blip": BlipImageProcessorPil,
    "Idefics": IdeficsImageProcessorPil,
    "Llava": LlavaImageProcessorPil,
}


def noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def theirs(kind: str, options: dict, images: list[Image.Image]) -> Tensor:
    made = THEIRS[kind](**options)(images=images, return_tensors="pt")
    return (made if isinstance(made, Tensor) else made["pixel_values"]).float()


def check_equal(kind: str, options: dict, *arrays: np.ndarray) -> None:
    """The same bits as theirs for pictures (H, W, 3)."""
    ours = ImageProcessor.of(kind, options)(list(arrays)).pixel_values
    expected = theirs(kind, options, [Image.fromarray(array) for array in arrays])
    assert ours.dtype == torch.float32
    assert ours.shape == expected.shape
    assert torch.equal(ours, expected)


def refuses(call: Callable[[], object]) -> bool:
    try:
        call()
    except ValueError:
        return True
    return False


def stored(folder, values: object, name: str = "preprocessor_config.json"):
    (folder / name).write_text(json.dumps(values), encoding="utf-8")
    return folder


# ------------------------------------------------------------------------------------------------ equal to transformers


def test_every_kind_is_compared():
    assert THEIRS.keys() == KINDS.keys()


@pytest.mark.parametrize("kind", KINDS)
def test_pixels_of_photographs_are_those_of_transformers(kind, data):
    """Colour, grey, portrait, landscape, and smaller than the crop."""
    for name in ("rocket.jpg", "coins.png", "flower.jpg", "horse.png", "page.png"):
        picture = open_image(data / "sample_photos" / name)
        ours = ImageProcessor.of(kind)(picture)
        assert torch.equal(ours.pixel_values, theirs(kind, {}, [picture.image])), name
        assert ours.frames[0].image_size == picture.size


MODES = ["1", "L", "LA", "P", "RGBA", "CMYK", "YCbCr", "I;16"]


@pytest.mark.parametrize("mode", MODES)
def test_pixels_of_a_photograph_in_any_mode_are_those_of_the_opened_picture(mode, data):
    """What each mode becomes as RGB is checked where pictures are opened: here, that nothing is lost on the way."""
    image = Image.open(data / "sample_photos" / "chelsea.png")
    image = (
        Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) << 8)
        if mode == "I;16"
        else image.convert(mode)
    )
    rgb = open_image(image).image
    assert torch.equal(ImageProcessor.of("CLIP")(image).pixel_values, theirs("CLIP", {}, [rgb]))
    assert rgb.convert("L").getextrema() > (0, 128)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (31, 29), (61, 37), (13, 127)])
def test_pixels_of_odd_and_tiny_pictures_are_those_of_transformers(kind, shape):
    check_equal(kind, {}, noise(*shape, 3))


@pytest.mark.parametrize("kind", KINDS)
def test_batch_is_each_picture_alone(kind):
    arrays = [noise(31, 29, 3), noise(31, 53, 3), noise(97, 11, 3)]
    preprocessor = ImageProcessor.of(kind)
    together = preprocessor(arrays)
    alone = [preprocessor(array) for array in arrays]
    assert torch.equal(together.pixel_values, torch.cat([one.pixel_values for one in alone]))
    assert together.frames == tuple(one.frames[0] for one in alone)


@pytest.mark.parametrize("resample", range(6))
def test_every_filter_of_pillow_is_theirs(resample):
    check_equal("ViT", {"size": {"height": 23, "width": 19}, "resample": resample}, noise(41, 31, 3))
    check_equal("CLIP", {"size": {"shortest_edge": 61}, "crop_size": 53, "resample": resample}, noise(41, 31, 3))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options",
    [
        {"do_resize": False, "do_center_crop": False},
        {"do_resize": False, "do_center_crop": True, "crop_size": {"height": 29, "width": 37}},
        {"do_rescale": False},
        {"do_normalize": False},
        {"do_rescale": False, "do_normalize": False},
        {"rescale_factor": 1 / 127.5},
        {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]},
        {"size": {"height": 17, "width": 23}, "do_center_crop": True, "crop_size": [19, 13]},
        {"size": {"shortest_edge": 17, "longest_edge": 19}, "do_center_crop": False},
        {"size": {"max_height": 17, "max_width": 23}, "do_center_crop": False},
        {"size": {"shortest_edge": 17, "longest_edge": None}},
        {"size": 29, "crop_size": 23},
        {"size": 29, "default_to_square": False, "do_center_crop": False},
        {"size": [29, 23], "do_center_crop": False},
        {"do_pad": True, "pad_size": {"height": 401, "width": 397}},
        {"do_convert_rgb": False, "data_format": "channels_first", "pad_size": None},
        {"do_resize": None, "do_center_crop": None, "resample": None, "crop_size": None},
        {"do_rescale": None, "rescale_factor": None},
        {"do_normalize": None, "image_mean": None, "image_std": None, "do_pad": None},
        {"size": 29, "default_to_square": None, "do_center_crop": False},
    ],
    ids=str,
)
def test_every_option_is_theirs(kind, options):
    check_equal(kind, options, noise(31, 43, 3))


def test_one_mean_for_all_colours_is_theirs():
    check_equal("ViT", {"image_mean": 0.25, "image_std": 2.0, "size": 7}, noise(3, 5, 3))


def test_idefics_takes_its_older_name_for_the_size_first():
    check_equal("Idefics", {"image_size": 29, "size": {"height": 11, "width": 13}}, noise(31, 43, 3))
    check_equal("Idefics", {"image_size": 29, "do_resize": False}, noise(31, 43, 3))


@pytest.mark.parametrize("shape", [(31, 43), (43, 31), (31, 31), (32, 43)])
def test_llava_pads_to_a_square_before_it_resizes(shape):
    options = {"do_pad": True, "size": {"shortest_edge": 29}, "crop_size": 29, "image_mean": [0.1, 0.5, 0.9]}
    check_equal("Llava", options, noise(*shape, 3))
    made = ImageProcessor.of("Llava", options | {"do_normalize": False, "do_rescale": False, "resample": 0})
    corner = made(noise(*shape, 3)).pixel_values[0, :, 0, 0].tolist()
    assert (corner == [25, 127, 229]) == (shape != (31, 31))


def test_pictures_of_several_sizes_are_padded_to_the_largest():
    options = {"do_resize": False, "do_pad": True}
    arrays = [noise(31, 29, 3), noise(11, 53, 3)]
    check_equal("ViT", options, *arrays)
    prepared = ImageProcessor.of("ViT", options)(arrays)
    assert prepared.pixel_values.shape == (2, 3, 31, 53)
    assert [frame.pixels for frame in prepared.frames] == [(31, 53), (31, 53)]
    assert [frame.corner for frame in prepared.frames] == [(0.0, 0.0), (0.0, 0.0)]


SIDE = st.integers(1, 47)
TARGET = st.one_of(
    SIDE,
    st.fixed_dictionaries({"height": SIDE, "width": SIDE}),
    st.fixed_dictionaries({"shortest_edge": SIDE}),
    st.fixed_dictionaries({"shortest_edge": SIDE, "longest_edge": SIDE}),
    st.fixed_dictionaries({"max_height": SIDE, "max_width": SIDE}),
)
OPTIONS = st.fixed_dictionaries(
    {"size": TARGET, "resample": st.integers(0, 5), "crop_size": SIDE, "do_center_crop": st.booleans()},
    optional={
        "do_resize": st.booleans(),
        "do_rescale": st.booleans(),
        "do_normalize": st.booleans(),
        "do_pad": st.booleans(),
        "rescale_factor": st.sampled_from([1 / 255, 1 / 127.5, 0.3]),
    },
)


@given(st.sampled_from(sorted(KINDS)), OPTIONS, SIDE, SIDE)
@settings(max_examples=300)
def test_any_options_and_any_size_are_theirs(kind, options, height, width):
    """A side may round to nothing: then both refuse."""
    picture = noise(height, width, 3)
    refused = refuses(lambda: ImageProcessor.of(kind, options)(picture))
    assert refused == refuses(lambda: theirs(kind, options, [Image.fromarray(picture)]))
    if not refused:
        check_equal(kind, options, picture)


# -------------------------------------------------------------------------------------------------------------- frames


def middle_of_light(pixels: Tensor) -> tuple[float, float]:
    """The centre of mass, down and across; pixel n reaches from n to n + 1."""
    light = pixels[0].sum(0).double()  # (H, W)
    down = (light.sum(1) * (torch.arange(light.shape[0]) + 0.5)).sum() / light.sum()
    across = (light.sum(0) * (torch.arange(light.shape[1]) + 0.5)).sum() / light.sum()
    return float(down), float(across)


WAYS = {
    "ViT, squeezed": ("ViT", {"size": {"height": 53, "width": 97}}),
    "CLIP, cropped": ("CLIP", {"size": {"shortest_edge": 71}, "crop_size": {"height": 67, "width": 61}}),
    "CLIP, smaller than its crop": ("CLIP", {"size": {"shortest_edge": 61}, "crop_size": 191}),
    "DeiT, enlarged": ("DeiT", {"size": 251, "crop_size": 223}),
    "Llava, made square": ("Llava", {"do_pad": True, "size": {"shortest_edge": 71}, "crop_size": 71}),
    "Bit, as it is": ("Bit", {"do_resize": False, "crop_size": {"height": 47, "width": 101}}),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("height", "width"), [(83, 109), (113, 79)])
def test_block_of_light_lands_where_its_frame_says(way, height, width):
    """A filter spreads light evenly, so that its middle stays; but to whole numbers, so within a 20th of a pixel.

    The block is lighter than what is around it by less than a filter needs to pass 0 or 255, and near the middle, so
    that no crop cuts it.
    """
    preprocessor = ImageProcessor.of(WAYS[way][0], WAYS[way][1] | {"do_normalize": False})
    for top, left in ((height // 2 - 9, width // 2 - 13), (height // 2 + 3, width // 2 + 5)):
        dark, light = np.full((2, height, width, 3), 60, np.uint8)
        light[top : top + 7, left : left + 7] = 200
        before, prepared = preprocessor(dark), preprocessor(light)
        expected = prepared.frames[0].pixel(top + 3.5, left + 3.5)
        assert middle_of_light(prepared.pixel_values - before.pixel_values) == pytest.approx(expected, abs=0.05)
        assert prepared.frames[0].pixels == tuple(prepared.pixel_values.shape[2:])
        assert prepared.frames[0].image_size == (height, width)


def test_every_pixel_of_an_exact_resize_shows_the_box_its_frame_names():
    """Each 3 × 2 pixels of one colour become one (box filter), then a crop with a black border: pixel by pixel."""
    picture = noise(10, 17, 3).repeat(3, 0).repeat(2, 1)
    size, crop = {"height": 10, "width": 17}, {"height": 13, "width": 11}
    options = {"size": size, "resample": 4, "do_center_crop": True, "crop_size": crop}
    prepared = ImageProcessor.of("ViT", options | {"do_rescale": False, "do_normalize": False})(picture)
    rows, columns = np.mgrid[0:13, 0:11]
    boxes = prepared.frames[0].boxes(np.stack([rows, columns, rows + 1, columns + 1], -1))
    for row, column in np.ndindex(13, 11):
        top, left, bottom, right = boxes[row, column].tolist()
        assert (bottom - top, right - left) == (3, 2)
        seen = picture[int(top) : int(bottom), int(left) : int(right)] if 0 <= top < 30 else np.zeros((3, 2, 3))
        assert np.array_equal(seen, np.broadcast_to(prepared.pixel_values[0, :, row, column].numpy(), (3, 2, 3)))


def test_frame_of_a_turned_photograph_is_of_the_upright_one():
    exif = Image.Exif()
    exif[0x0112] = 6
    file = io.BytesIO()
    Image.fromarray(noise(31, 43, 3)).save(file, "PNG", exif=exif)
    assert ImageProcessor.of("ViT")(file.getvalue()).frames == (Frame.whole(43, 31).resized(224, 224),)


# ---------------------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ViTImageProcessor", "ViT"),
        ("ViTFeatureExtractor", "ViT"),
        ("CLIPFeatureExtractor", "CLIP"),
        ("CLIPImageProcessorFast", "CLIP"),
        ("BitImageProcessorPil", "Bit"),
        ("LlavaImageProcessorFast", "Llava"),
    ],
)
@pytest.mark.parametrize("key", ["image_processor_type", "feature_extractor_type"])
def test_file_names_its_kind_in_old_and_new_ways(name, kind, key, tmp_path):
    preprocessor = ImageProcessor.open(stored(tmp_path, {key: name, "processor_class": "SomeProcessor"}))
    assert preprocessor == ImageProcessor.of(kind)


@pytest.mark.parametrize("model", MODELS)
def test_file_without_a_kind_takes_that_of_the_model(model, tmp_path):
    stored(tmp_path, {"model_type": model}, "config.json")
    assert ImageProcessor.open(str(stored(tmp_path, {}))) == ImageProcessor.of(MODELS[model])


def test_kinds_of_models_are_those_that_transformers_takes():
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES

    assert {model: f"{kind}ImageProcessorPil" for model, kind in MODELS.items()} == {
        model: IMAGE_PROCESSOR_MAPPING_NAMES[model]["pil"] for model in MODELS
    }


def test_newer_file_with_the_values_inside_goes_first(tmp_path):
    stored(tmp_path, {"image_processor_type": "ViTImageProcessor"})
    nested = {"image_processor": {"image_processor_type": "BlipImageProcessor"}, "processor_class": "BlipProcessor"}
    assert ImageProcessor.open(stored(tmp_path, nested, "processor_config.json")) == ImageProcessor.of("Blip")
    stored(tmp_path, {"processor_class": "LlavaProcessor", "patch_size": 14}, "processor_config.json")
    assert ImageProcessor.open(tmp_path) == ImageProcessor.of("ViT")


@pytest.mark.parametrize("kind", KINDS)
def test_file_that_transformers_saves_is_understood(kind, tmp_path):
    options = {"size": {"height": 31, "width": 29}, "resample": 1, "image_mean": [0.1, 0.2, 0.3]}
    THEIRS[kind](**options).save_pretrained(tmp_path)
    values = json.loads((tmp_path / "preprocessor_config.json").read_text())
    preprocessor = ImageProcessor.open(tmp_path)
    assert preprocessor.values == values
    assert preprocessor.kind == kind
    image = Image.fromarray(noise(41, 53, 3))
    assert torch.equal(preprocessor(image).pixel_values, theirs(kind, values, [image]))


@pytest.mark.parametrize("kind", KINDS)
def test_values_written_again_mean_the_same_here_and_there(kind, tmp_path):
    preprocessor = ImageProcessor.of(kind, {"size": 31, "resample": 1})
    assert ImageProcessor.open(stored(tmp_path, preprocessor.values)) == preprocessor
    image = Image.fromarray(noise(41, 53, 3))
    assert torch.equal(preprocessor(image).pixel_values, theirs(kind, preprocessor.values, [image]))


def test_values_are_a_copy():
    size = {"height": 31, "width": 29}
    preprocessor = ImageProcessor.of("ViT", {"size": size})
    size["height"] = 7
    assert preprocessor.values["size"] == {"height": 31, "width": 29}
    preprocessor.values["image_mean"][0] = 9.0
    assert ImageProcessor.of("ViT").values["image_mean"] == [0.5, 0.5, 0.5]


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ("ViT", {}, "ViT: resize to 224 × 224 (bilinear), ÷ 255, normalise"),
        (
            "DeiT",
            {"do_normalize": False},
            "DeiT: resize to 256 × 256 (bicubic), crop the middle 224 × 224, ÷ 255",
        ),
        (
            "Llava",
            {"do_pad": True, "rescale_factor": 0.5, "resample": 1},
            "Llava: pad to a square (colour 122, 116, 104), resize the shorter side to 224 (Lanczos), "
            "crop the middle 224 × 224, × 0.5, normalise",
        ),
        (
            "CLIP",
            {
                "size": {"shortest_edge": 7, "longest_edge": 9},
                "do_center_crop": False,
                "do_rescale": False,
                "do_pad": True,
            },
            "CLIP: resize the shorter side to 7 (the longer one to 9 at most) (bicubic), normalise, "
            "pad with 0 to the largest",
        ),
        (
            "Blip",
            {"size": {"max_height": 7, "max_width": 9}, "do_pad": True, "pad_size": 11},
            "Blip: resize to fit into 7 × 9 (bicubic), ÷ 255, normalise, pad with 0 to 11 × 11",
        ),
        ("ViT", {"do_resize": False, "do_rescale": False, "do_normalize": False}, "ViT: as they are, 0 to 255"),
    ],
)
def test_preprocessor_says_its_steps_in_words(kind, options, said):
    assert repr(ImageProcessor.of(kind, options)) == f"ImageProcessor({said})"


@pytest.mark.parametrize(
    ("plan", "korean"),
    [
        (ImageTransforms((), Normalize(None, None, None), None), "0~255 그대로"),
        (
            ImageTransforms(
                (Square((1, 2, 3)), Resize({"height": 5, "width": 7}, 2)), Normalize(0.5, None, None), Pad(None)
            ),
            "정사각형으로 채우기 (색 1, 2, 3), 5 × 7에 맞춰 크기 조정 (bilinear), × 0.5, 가장 큰 크기까지 0으로 채우기",
        ),
        (
            ImageTransforms(
                (Resize({"shortest_edge": 5, "longest_edge": 11}, 0), Crop(3, 7)),
                Normalize(1 / 255, None, None),
                Pad((13, 17)),
            ),
            "짧은 변을 5에 맞추되 긴 변은 최대 11로 크기 조정 (nearest), 가운데 3 × 7 자르기, ÷ 255, "
            "13 × 17까지 0으로 채우기",
        ),
        (
            ImageTransforms(
                (Resize({"max_height": 5, "max_width": 7}, 1),), Normalize(None, (0, 0, 0), (1, 1, 1)), None
            ),
            "5 × 7 안에 들어가게 크기 조정 (Lanczos), 정규화",
        ),
    ],
)
def test_preparation_is_said_in_korean(plan, korean):
    assert plan.text("ko") == korean


# ------------------------------------------------------------------------------------------------------ what is refused


def test_pictures_that_become_different_sizes_are_refused():
    preprocessor = ImageProcessor.of("Bit", {"do_center_crop": False, "size": {"shortest_edge": 11}})
    said = r"\(11 × 22, 11 × 11\).*do_center_crop.*size"
    with pytest.raises(ValueError, match=said):
        preprocessor([noise(3, 6, 3), noise(5, 5, 3)])


def test_no_picture_is_refused():
    with pytest.raises(ValueError, match="list"):
        ImageProcessor.of("ViT")([])


def test_long_and_narrow_picture_that_would_be_enlarged_beyond_bounds_is_refused():
    said = rf"image.*20000.*10.*224.*448000.*224.*1.*{MOST_MADE:,}"
    with pytest.raises(ValueError, match=said):
        ImageProcessor.of("CLIP")(noise(20000, 10))
    assert ImageProcessor.of("ViT")(noise(20000, 10)).pixel_values.shape == (1, 3, 224, 224)


def test_picture_that_would_have_no_pixels_left_is_refused():
    preprocessor = ImageProcessor.of("CLIP", {"size": {"shortest_edge": 7, "longest_edge": 9}})
    with pytest.raises(ValueError, match=r"0.*9.*1.*16,777,216"):
        preprocessor(noise(1, 1000))


def test_picture_too_long_for_a_square_is_refused():
    said = r"image.*20000.*10.*60,000,000"
    with pytest.raises(ValueError, match=said):
        ImageProcessor.of("Llava", {"do_pad": True})(noise(20000, 10))


def test_padding_to_less_than_the_pictures_is_refused():
    said = r"31.*29.*37.*23.*pad_size"
    with pytest.raises(ValueError, match=said):
        ImageProcessor.of("ViT", {"size": [31, 29], "do_pad": True, "pad_size": [37, 23]})(noise(3, 5))


def test_folder_without_a_file_is_refused(tmp_path):
    said = rf"{re.escape(str(tmp_path))}.*preprocessor_config\.json.*processor_config\.json.*image_processor"
    with pytest.raises(FileNotFoundError, match=said):
        ImageProcessor.open(tmp_path)


def test_kind_that_is_not_known_is_refused(tmp_path):
    stored(tmp_path, {"image_processor_type": "DonutImageProcessor"})
    said = r"preprocessor_config.json.*DonutImageProcessor.*ViTImageProcessor"
    with pytest.raises(ValueError, match=said):
        ImageProcessor.open(tmp_path)
    with pytest.raises(ValueError, match=r"'vit'.*ViT.*DeiT.*Bit.*CLIP.*Blip"):
        ImageProcessor.of("vit")


@pytest.mark.parametrize("config", [None, {}, {"model_type": "bert"}, {"model_type": ["vit"]}])
def test_file_that_leaves_its_kind_open_is_refused(config, tmp_path):
    if config is not None:
        stored(tmp_path, config, "config.json")
    with pytest.raises(ValueError, match=r"image_processor_type.*config\.json.*model_type"):
        ImageProcessor.open(stored(tmp_path, {"size": 224}))


def test_nested_values_that_are_no_object_are_refused(tmp_path):
    stored(tmp_path, {"image_processor": 3}, "processor_config.json")
    with pytest.raises(ValueError, match=r"processor_config\.json.*image_processor.*3"):
        ImageProcessor.open(tmp_path)


def test_key_that_is_not_known_is_refused_unless_it_is_to_be_ignored(tmp_path):
    stored(tmp_path, {"image_processor_type": "ViTImageProcessor", "do_flip": True, "nothing": None})
    said = r"ViT's.*do_flip.*True"
    with pytest.raises(ValueError, match=said):
        ImageProcessor.open(tmp_path)
    assert ImageProcessor.open(tmp_path, ignore=["do_flip"]) == ImageProcessor.of("ViT")
    with pytest.raises(ValueError, match=r"image_size.*224"):  # Idefics' word alone
        ImageProcessor.of("ViT", {"image_size": 224})


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        (
            "ViT",
            {"size": {"longest_edge": 5}},
            r"size.*height.*width.*shortest_edge.*longest_edge",
        ),
        ("ViT", {"size": "224"}, r"size.*height.*width"),
        ("ViT", {"size": [1, 2, 3]}, r"size.*height.*width"),
        ("ViT", {"size": True}, r"size.*height.*width"),
        ("ViT", {"size": {"height": 0, "width": 3}}, r"size.*height.*1"),
        ("ViT", {"size": {"height": 2.5, "width": 3}}, r"size.*height.*1"),
        ("ViT", {"resample": 6}, r"resample.*0.*5.*6"),
        ("ViT", {"do_resize": "yes"}, r"do_resize.*'yes'"),
        ("ViT", {"do_center_crop": True}, r"crop_size.*height.*width"),
        ("CLIP", {"crop_size": {"shortest_edge": 3}}, r"crop_size.*height.*width"),
        ("CLIP", {"crop_size": 9999}, r"crop_size.*9999.*16,777,216"),
        ("ViT", {"do_pad": True, "pad_size": 9999}, r"pad_size.*9999.*16,777,216"),
        ("ViT", {"image_mean": [0.5, 0.5]}, "image_mean"),
        ("ViT", {"image_mean": [0.5, 0.5, float("nan")]}, "image_mean"),
        ("ViT", {"image_std": ["a", "b", "c"]}, "image_std"),
        ("ViT", {"image_std": [0.5, 0, 0.5]}, r"image_std.*0.*\(0\.5, 0\.0, 0\.5\)"),
        ("ViT", {"rescale_factor": "a"}, r"rescale_factor.*'a'"),
        ("ViT", {"rescale_factor": float("inf")}, r"rescale_factor.*inf"),
        (
            "ViT",
            {"data_format": "channels_last"},
            r"data_format.*'channels_last'.*'channels_first'",
        ),
        ("Idefics", {"image_num_channels": 4}, r"image_num_channels.*4.*3"),
        ("Llava", {"do_pad": True, "image_mean": 1.5}, r"do_pad.*image_mean.*0.*1"),
    ],
)
def test_value_that_is_none_is_refused(kind, options, said):
    with pytest.raises(ValueError, match=said):
        ImageProcessor.of(kind, options)


def test_bad_picture_in_a_batch_is_refused_by_name(tmp_path):
    path = tmp_path / "photo.jpg"
    path.write_text("words")
    with pytest.raises(ValueError, match=r"image.*1.*photo\.jpg"):
        ImageProcessor.of("ViT")([noise(3, 5), path])
    with pytest.raises(ValueError, match=r"image.*1"):
        ImageProcessor.of("CLIP", {"size": 700})([noise(3, 5), np.zeros((1, 2000), np.uint8)])
    with pytest.raises(ValueError, match=r"photo\.jpg") as alone:
        ImageProcessor.of("ViT")([path])
    assert not str(alone.value).startswith("image")


def test_shape_of_a_picture_whose_shorter_side_fits_already_is_left_alone():
    """As theirs: at most 31 long, the shorter side would be 9.7, which rounds to the 10 that it is."""
    assert Resize({"shortest_edge": 10, "longest_edge": 31}, 0).new_size(10, 32) == (10, 32)


# ------------------------------------------------------------------------------------- keys that are not read


@pytest.mark.parametrize("kind", KINDS)
def test_size_divisor_changes_nothing(kind):
    assert ImageProcessor.of(kind, {"size_divisor": 32}) == ImageProcessor.of(kind)


def test_pixels_of_a_published_blip_are_those_of_transformers(tmp_path):
    """Salesforce's files say do_pad and size_divisor, and are neither padded nor divided."""
    values = {
        "do_normalize": True, "do_pad": True, "do_rescale": True, "do_resize": True, "resample": 3, "size_divisor": 32,
        "image_processor_type": "BlipImageProcessor", "processor_class": "BlipProcessor", "rescale_factor": 1 / 255,
        "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711],
        "size": {"height": 29, "width": 31},
    }  # fmt: skip
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(values))
    theirs = BlipImageProcessorPil.from_pretrained(tmp_path)(picture(), return_tensors="pt")["pixel_values"]
    ours = ImageProcessor.open(tmp_path)(picture()).pixel_values
    assert ours.shape == (1, 3, 29, 31)
    assert torch.equal(ours, theirs)


def test_only_keys_that_nobody_knows_are_left_out():
    values = {"size": 30, "do_thumbnail": True, "size_divisor": 32, "resample": 3, "crop_size": 7, "odd": None}
    assert known_values("ViT", values) == {key: value for key, value in values.items() if key != "do_thumbnail"}
    assert values["do_thumbnail"] is True
