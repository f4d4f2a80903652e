"""Tensors go into a capture file once and come back laid out as they were; JSON values are what they must be."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.lens.files.container import (
    CaptureFileError,
    Incoming,
    Outgoing,
    fields,
    is_list_of,
    pack_bits,
)

ANY4 = (None, None, None, None)


def there_and_back(*tensors: torch.Tensor) -> tuple[list[torch.Tensor], Outgoing]:
    out = Outgoing()
    references = [out.put(str(n), tensor) for n, tensor in enumerate(tensors)]
    stored = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in out.tensors.items()}
    incoming = Incoming(stored)
    return [incoming.take(ref, "x", None, kind_of(t)) for ref, t in zip(references, tensors, strict=True)], out


def kind_of(tensor: torch.Tensor) -> str:
    return {torch.bool: "booleans", torch.uint8: "bytes", torch.int64: "integers"}.get(tensor.dtype, "floats")


@settings(max_examples=60)
@given(st.permutations(range(4)), st.lists(st.sampled_from([1, 2, 3, 5]), min_size=4, max_size=4))
def test_turned_tensor_comes_back_with_its_strides(order, shape):
    tensor = torch.randn(shape).permute(order)
    (back,), _ = there_and_back(tensor)
    assert torch.equal(back, tensor)
    wide = [axis for axis, n in enumerate(tensor.shape) if n > 1]
    assert [back.stride(axis) for axis in wide] == [tensor.stride(axis) for axis in wide]


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(), (0,), (7,), (2, 0, 3), (2, 3, 5)], ids=str)
def test_every_dtype_and_shape_comes_back(dtype, shape):
    tensor = (torch.randn(shape) * 9).to(dtype)
    (back,), _ = there_and_back(tensor)
    assert back.dtype == dtype
    assert torch.equal(back, tensor)


def test_repeated_axes_come_back_by_their_values():
    tensor = torch.randn(1, 3, 5, 2).expand(7, 3, 5, 2)
    (back,), _ = there_and_back(tensor)
    assert torch.equal(back, tensor)


def test_equal_tensors_are_written_once():
    x = torch.randn(3, 5)
    back, out = there_and_back(x, x, x.clone(), x.T, x.double(), x.view(5, 3))
    assert list(out.tensors) == ["0", "4", "5"]
    assert [tuple(t.shape) for t in back] == [(3, 5)] * 3 + [(5, 3), (3, 5), (5, 3)]
    assert torch.equal(back[3], x.T)


def test_minus_zero_is_not_zero():
    _, out = there_and_back(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert len(out.tensors) == 2


def test_beginning_of_a_tensor_is_not_written_again():
    keys = torch.randn(2, 7, 3, 5).transpose(1, 2)  # (B, H, N, D), turned in memory as models do
    back, out = there_and_back(keys, keys[:, :, :4], keys[:, :, :1], keys)
    assert list(out.tensors) == ["0"]
    for found, meant in zip(back, (keys, keys[:, :, :4], keys[:, :, :1], keys), strict=True):
        assert torch.equal(found, meant)
        assert found.stride() == meant.stride()


def test_other_parts_of_the_same_memory_are_written_for_themselves():
    keys = torch.randn(2, 3, 7, 5)
    parts = (keys, keys[:, :, 1:4], keys[:, :2, :4], keys[..., :3], keys[:1])
    back, out = there_and_back(*parts)
    assert list(out.tensors) == ["0", "1", "2", "3", "4"]
    assert all(torch.equal(found, meant) for found, meant in zip(back, parts, strict=True))


def test_longer_tensor_after_its_beginning_is_written_too():
    keys = torch.randn(2, 3, 7, 5)
    back, out = there_and_back(keys[:, :, :4], keys)
    assert list(out.tensors) == ["0", "1"]
    assert torch.equal(back[1], keys)


def test_address_of_freed_memory_is_not_mistaken_for_its_tensor():
    out = Outgoing()
    for n in range(20):
        out.put("same", torch.zeros(1, 1, 5, 2) + 3)  # the second and later ones are freed at once
        reference = out.put(f"other {n}", torch.full((1, 1, 5, 2), float(n)))
        found = Incoming(out.tensors).take(reference, "x", ANY4)
        assert (found == n).all()


def test_gradients_do_not_come_along():
    (back,), _ = there_and_back(torch.nn.Parameter(torch.randn(3)) * 2)
    assert not back.requires_grad


@pytest.mark.gpu
def test_tensors_on_a_gpu_are_taken_in():
    x = torch.randn(2, 3, 5, 7)
    out = Outgoing()
    assert out.put("cpu", x) == out.put("gpu", x.cuda()) == "cpu"


# ------------------------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("y", r"lse.*3.*'y'"),
        (7, r"tensor.*7"),
        (None, "None"),
        ({"order": [0]}, "None"),
        ({"name": ["x"]}, r"\['x'\]"),
        ({"name": "x", "scale": 2}, r"'x'.*lse.*3.*'scale'"),
        ({"name": "x", "order": [0, 1]}, r"'x'.*lse.*3"),
        ({"name": "x", "order": "abc"}, "shape"),
        ({"name": "x", "order": {}}, "laid"),
        ({"name": "x", "order": 5}, "laid"),
        ({"name": "x", "first": 6}, "laid"),
        ({"name": "x", "first": -1}, "laid"),
        ("x", r"'x'.*lse.*3.*\(2, 3, 5\).*2.*1.*7"),
    ],
)
def test_reference_that_cannot_be_followed_is_refused(reference, message):
    with pytest.raises(CaptureFileError, match=message):
        Incoming({"x": torch.zeros(2, 3, 5)}).take(reference, "lse of record 3", (2, (1, 7), None))


def test_bits_are_unpacked_once():
    cells = torch.rand(3, 5, 7) < 0.5
    tensors = Incoming({"bits": pack_bits(cells), "x": torch.zeros(2)})
    found = tensors.take_bits("bits", "mask of record 0", [3, 5, 7])
    assert torch.equal(found, cells)
    assert tensors.take_bits("bits", "mask of record 1", [3, 5, 7]) is found
    assert torch.equal(tensors.take_bits("bits", "mask of record 2", [5, 21]), cells.reshape(5, 21))


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("bits", [3, 5, 8], r"'bits'.*\(3, 5, 8\).*15.*bytes.*\(14,\)"),
        ("bits", ["3", 35], "'bits'"),
        ("bits", [-15, -7], "'bits'"),
        ("x", [3, 5, 7], r"'x'.*torch\.float32.*bytes"),
        ("y", [3, 5, 7], "'y'"),
    ],
)
def test_bits_that_do_not_fit_are_refused(name, shape, message):
    tensors = Incoming({"bits": pack_bits(torch.ones(3, 5, 7, dtype=torch.bool)), "x": torch.zeros(2)})
    with pytest.raises(CaptureFileError, match=message):
        tensors.take_bits(name, "the mask", shape)


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [(torch.int64, "floats"), (torch.float32, "integers"), (torch.bool, "integers"), (torch.uint8, "booleans")],
    ids=str,
)
def test_tensor_of_another_kind_is_refused(dtype, kind):
    with pytest.raises(CaptureFileError, match=rf"'x'.*{dtype}.*{kind}"):
        Incoming({"x": torch.zeros(2, dtype=dtype)}).take("x", "y", (2,), kind)


def test_tensors_that_nobody_asks_for_are_refused():
    tensors = Incoming({name: torch.zeros(1) for name in "abc"})
    tensors.take("b", "y", (1,))
    with pytest.raises(CaptureFileError, match=r"'a'.*2"):
        tensors.finish()
    tensors.take("a", "y", (1,))
    tensors.take("c", "y", (1,))
    tensors.finish()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], r"0.*JSON.*list"),
        ({"n": 1}, r"0.*'path'"),
        ({"n": 1, "path": "a", "z": 1}, r"0.*'z'"),
        ({"n": "1", "path": "a"}, r"0.*n.*int.*str"),
        ({"n": True, "path": "a"}, r"0.*n.*int.*bool"),
        ({"n": 1, "path": 3}, r"0.*path.*str.*None.*int"),
    ],
)
def test_values_that_are_not_as_they_must_be_are_refused(value, message):
    with pytest.raises(CaptureFileError, match=message):
        fields(value, "record 0", {"path": str | None, "n": int})


def test_list_of_one_kind_takes_no_other():
    assert is_list_of([], str)
    assert not is_list_of([1, 1.0], int)
    assert not is_list_of({"a": 1}, str)
