"""Layouts in capture files: what is written comes back equal and small; what was forged is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import regard
from regard.layouts import KINDS, Frame, Layout, Sides
from regard.lens.capture import Capture
from regard.lens.files.container import CaptureFileError, Incoming, Outgoing, read, write
from regard.lens.files.saving import HEADER, pack_layouts, unpack_layouts

FRAME = Frame.whole(31, 47).resized(20, 30).cropped(-1, 2, 21, 24)  # scales that no short decimal holds
SWIN = Sides.windows(FRAME, stage=1, shifted=True, patch=3, window=2)
WORDS = Sides(
    Layout.text(3) + Layout.latents(2, image=1),
    Layout.grid(2, 3, (5, 7), before=("cls", "distillation", "register"), image=1) + Layout.of(["padding"]),
    (FRAME, Frame.whole(10, 21)),
)
ODD = Sides(
    Layout([["patch"]], [[300]], [[[0.1, 0.0, 3000.3, 4097.0]]]), Layout.text(1), (Frame.whole(5000, 5000),) * 301
)


class Attend(nn.Module):
    def forward(self, x):
        return regard.attention(x, x, x)


def captured(sides: Sides | list[Sides] = SWIN, entries: int = 2) -> Capture:
    model, one = Attend(), sides[0] if isinstance(sides, list) else sides
    windows, n = one.queries.shape
    with regard.watch(model, keep="qk", layouts={"": sides}) as seen:
        model(torch.randn(entries * windows, 3, n, 4))
    return seen


# ------------------------------------------------------------------------------------------------------- they come back


def test_layouts_come_back_equal_and_each_is_written_once():
    layouts = {"a": (SWIN,), "b": (WORDS, WORDS), "c": (SWIN,), "d": (ODD,)}
    out = Outgoing()
    packed = pack_layouts(layouts, out)
    text = json.dumps(packed)
    incoming = Incoming(out.tensors)
    back = unpack_layouts(json.loads(text), incoming)
    incoming.finish()
    assert back == layouts
    assert list(back) == list(layouts)
    assert len(packed["tokens"]) == 5  # Swin's queries are its keys, and one tensor of text is as good as another
    assert len(packed["frames"]) == 3
    assert back["a"][0].frames[0].scale == FRAME.scale  # to the last bit


def test_a_grid_takes_the_narrowest_numbers_that_hold_it():
    out = Outgoing()
    pack_layouts({"vit": (Sides.patches(224),)}, out)
    assert {name: tensor.dtype for name, tensor in out.tensors.items()} == {
        "layouts/0/kind": torch.uint8,
        "layouts/0/image": torch.int8,
        "layouts/0/box": torch.float16,
    }
    out = Outgoing()
    pack_layouts({"odd": (ODD,)}, out)
    assert out.tensors["layouts/0/box"].dtype == torch.float64
    assert out.tensors["layouts/0/image"].dtype == torch.int16


@pytest.mark.parametrize("overview", [False, True])
def test_a_saved_capture_has_its_layouts_when_it_is_opened(tmp_path, overview):
    seen = captured()
    seen.save(tmp_path / "run.regard", overview)
    again = regard.open(tmp_path / "run.regard")
    assert again.layouts == seen.layouts == {"": (SWIN,)}
    if not overview:
        ours, theirs = (capture[0].overlay(at=(17, 20), batch=1, head=2) for capture in (seen, again))
        assert np.array_equal(ours.heat, theirs.heat, equal_nan=True)
        assert repr(ours) == repr(theirs)


def test_layouts_of_each_batch_entry_come_back(tmp_path):
    sides = [Sides.patches(Frame.whole(8, 12), patch=4), Sides.patches(Frame.whole(12, 8), patch=4)]
    captured(sides).save(tmp_path / "run.regard")
    assert regard.open(tmp_path / "run.regard").layouts == {"": tuple(sides)}


def test_a_capture_without_layouts_is_written_as_before(tmp_path):
    seen = captured()
    seen.layouts = None
    seen.save(tmp_path / "run.regard")
    header, tensors = read(tmp_path / "run.regard")  # what an older regard knows
    assert header.keys() == HEADER.keys()
    assert not [name for name in tensors if name.startswith("layouts")]
    assert regard.open(tmp_path / "run.regard").layouts == {}


def test_layouts_of_calls_that_were_taken_out_are_left_out(tmp_path):
    seen = captured()
    seen.records.clear()
    seen.save(tmp_path / "run.regard")
    assert regard.open(tmp_path / "run.regard").layouts == {}


def test_a_capture_changed_after_its_layouts_were_given_cannot_be_saved(tmp_path):
    seen = captured()
    other = captured(Sides.patches(8, patch=4))
    seen.records[:] = other.records
    with pytest.raises(ValueError, match=r"layouts.*''"):
        seen.save(tmp_path / "run.regard")
    assert not list(tmp_path.iterdir())


# --------------------------------------------------------------------------------------------------------------- forged


def forged(tmp_path: Path, change) -> Path:
    """A file with right checksums whose layouts were changed."""
    path = tmp_path / "run.regard"
    captured().save(path)
    header, tensors = read(path)
    change(header["layouts"], tensors)
    write(path, header, tensors)
    return path


def setting(*keys: object, to: object):
    """A change of what JSON says at a place."""

    def change(layouts, tensors):
        *before, last = keys
        for key in before:
            layouts = layouts[key]
        layouts[last] = to

    return change


def tensor(name: str, **to: object):
    """A change of a tensor: `add` to all of it, `put` a value first, or `take` a part."""

    def change(layouts, tensors):
        held = tensors[f"layouts/0/{name}"].clone()
        if "put" in to:
            held.view(-1)[0] = to["put"]
        tensors[f"layouts/0/{name}"] = held[:, : to["take"]] if "take" in to else held.to(to.get("dtype", held.dtype))

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda layouts, _: layouts.pop("kinds"), "'kinds'"),
        (setting("more", to=1), "'more'"),
        (setting("kinds", to=[3]), "kinds"),
        (setting("kinds", 0, to="sound"), "'sound'"),
        (setting("kinds", to=[]), r"0.*1.*0"),
        (setting("frames", 0, to=[1, 2, 3]), r"frame.*0.*\[1, 2, 3\]"),
        (setting("frames", 0, to="frame"), r"frame.*0.*'frame'"),
        (setting("frames", 0, 0, to=0), r"frame.*0"),
        (setting("frames", 0, 1, to=2.0), r"frame.*0"),
        (setting("frames", 0, 2, to=True), r"frame.*0"),
        (setting("frames", 0, 0, to=2**40), r"frame.*0"),
        (setting("frames", 0, 4, to=0.0), r"frame.*0"),
        (setting("frames", 0, 5, to=-1.5), r"frame.*0"),
        (setting("frames", 0, 6, to=1), r"frame.*0"),
        (setting("tokens", 0, to=["layouts/0/kind"]), r"layout.*0.*kind.*image.*box"),
        (
            setting("tokens", 0, 2, to="elsewhere"),
            r"0.*'elsewhere'",
        ),
        (setting("sides", 0, to=["path"]), r"sides.*layouts.*path"),
        (setting("sides", 0, 1, to=[]), r"sides.*layouts"),
        (setting("sides", 0, 1, 0, to=[0, 0]), r"layouts.*''"),
        (setting("sides", 0, 1, 0, to=[0, True, [0]]), r"layouts.*''"),
        (setting("sides", 0, 1, 0, 1, to=1), r"layouts.*''"),
        (setting("sides", 0, 1, 0, 0, to=-1), r"layouts.*''"),
        (setting("sides", 0, 1, 0, 2, to=[1]), r"layouts.*''"),
        (setting("sides", 0, 1, 0, 2, to=[]), r"''.*image.*0"),
        (setting("sides", 0, 0, to="else"), r"'else'.*''"),
        (
            lambda layouts, _: layouts["sides"].append(["else", layouts["sides"][0][1]]),
            "'else'",
        ),
        (lambda layouts, _: layouts["sides"].append(layouts["sides"][0]), "layouts"),
        (tensor("kind", put=len(KINDS)), r"0.*kind.*7"),
        (tensor("kind", put=0), r"layout.*0.*box"),
        (tensor("kind", dtype=torch.int16), r"kind.*0.*torch.int16.*bytes"),
        (tensor("image", put=-5), r"0.*image.*0"),
        (tensor("image", take=2), r"image.*0"),
        (tensor("box", put=float("inf")), r"0.*box"),
        (tensor("box", put=-9), r"image.*0"),
        (tensor("box", take=1), r"box.*0"),
        (setting("sides", 0, 1, to=[[0, 0, [0]]] * 3), r"''.*3"),
        (
            lambda layouts, tensors: tensors.update({"layouts/9/kind": torch.zeros(1, dtype=torch.uint8)}),
            "'layouts/9/kind'",
        ),
    ],
)
def test_a_forged_layout_is_refused(tmp_path, change, message):
    path = forged(tmp_path, change)
    with pytest.raises(CaptureFileError, match=message):
        regard.open(path)
