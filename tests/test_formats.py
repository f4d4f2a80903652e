"""One safetensors file: what is written comes back; what is not whole or contradicts itself is refused."""

import json
import re
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from regard.formats import CODES, DTYPES, Entry, TensorFile, TensorFileError, check_tensor, write_tensors
from regard.models.loading import CheckpointError, open_weights

LIBRARY = safetensors.torch._TYPES


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


def filled(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Every bit pattern once in a while, but for bool, which has two."""
    raw = torch.arange(torch.Size(shape).numel() * dtype.itemsize, dtype=torch.int64).mul(37).to(torch.uint8)
    return (raw % 2 == 0).reshape(shape) if dtype is torch.bool else raw.view(dtype).reshape(shape)


def same(a: Tensor, b: Tensor) -> bool:
    """Bit by bit: NaNs are equal to themselves, and fp8 needs no arithmetic."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return a.numel() == 0 or a.reshape(-1).view(torch.uint8).equal(b.reshape(-1).view(torch.uint8))


def forged(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: object = "F32", shape: object = (2, 3), offsets: object = (0, 24)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def refusal(path: Path, raw: bytes) -> str:
    path.write_bytes(raw)
    with pytest.raises(CheckpointError) as caught:
        open_weights(path)
    assert repr(str(path)) in str(caught.value)
    return str(caught.value)


# ------------------------------------------------------------------------------------------------------------ it opens


@pytest.mark.parametrize("shape", [(), (7,), (3, 5), (2, 3, 5), (0,), (3, 0, 5)])
@pytest.mark.parametrize("dtype", CODES)
def test_a_tensor_of_any_dtype_and_shape_comes_back_bit_by_bit(path, dtype, shape):
    tensor = filled(shape, dtype)
    write_tensors(path, {"t": tensor})
    assert same(TensorFile(path).view("t"), tensor)


@pytest.mark.parametrize("dtype", LIBRARY.values())
def test_the_safetensors_library_reads_what_we_write_and_we_read_what_it_writes(path, dtype):
    tensors = {"a": filled((3, 5), dtype), "b": filled((), dtype), "c": filled((0, 2), dtype), "d": torch.ones(7)}
    write_tensors(path, tensors)
    assert {name: same(tensor, tensors[name]) for name, tensor in load_file(path).items()} == dict.fromkeys(
        "abcd", True
    )
    save_file(tensors, path, {"format": "pt"})
    ours = TensorFile(path)
    assert {name: same(ours.view(name), tensor) for name, tensor in tensors.items()} == dict.fromkeys("abcd", True)


def test_the_codes_are_those_of_the_safetensors_library():
    assert LIBRARY.items() <= DTYPES.items()


def test_entries_say_where_each_tensor_is_before_it_is_read(path):
    write_tensors(path, {"b": torch.ones(5, dtype=torch.float16), "a": torch.ones(2, 3), "한": torch.tensor(True)})
    file = TensorFile(path)
    assert list(file.entries.values()) == [
        Entry("a", (2, 3), torch.float32, path),
        Entry("b", (5,), torch.float16, path),
        Entry("한", (), torch.bool, path),
    ]
    assert [e.nbytes for e in file.entries.values()] == [24, 10, 1]
    assert file.metadata == {"format": "pt"}


def test_every_tensor_is_aligned_whatever_the_order_it_came_in(path):
    write_tensors(
        path,
        {"a": torch.ones(3, dtype=torch.bool), "b": torch.ones(5, dtype=torch.float16), "c": torch.ones(1).double()},
    )
    file = TensorFile(path)
    assert [file.view(name).data_ptr() - file.view("c").data_ptr() for name in "cba"] == [0, 8, 18]
    assert file.view("c").data_ptr() % 8 == 0


def test_a_tensor_is_a_view_of_the_file_and_changing_it_leaves_the_file_alone(path):
    write_tensors(path, {"a": torch.zeros(3), "b": torch.ones(5)})
    before = path.read_bytes()
    file = TensorFile(path)
    a, b = file.view("a"), file.view("b")
    a += 7
    assert file.view("a").data_ptr() == a.data_ptr()
    assert b.data_ptr() - a.data_ptr() == 12
    assert file.view("a").tolist() == [7, 7, 7]
    assert path.read_bytes() == before
    assert TensorFile(path).view("a").tolist() == [0, 0, 0]


def test_a_view_has_a_storage_of_its_own_size_so_that_saving_it_does_not_save_the_whole_file(path):
    write_tensors(path, {"a": torch.zeros(3), "b": torch.ones(500)})
    assert TensorFile(path).view("a").untyped_storage().nbytes() == 12


def test_views_outlive_the_file_object_and_the_file_on_the_disk(path):
    write_tensors(path, {"a": torch.arange(7)})
    tensor = TensorFile(path).view("a")
    path.unlink()
    assert tensor.tolist() == [0, 1, 2, 3, 4, 5, 6]


def test_bytes_that_are_not_aligned_are_copied(path):
    values = torch.tensor([1.5, -2.0])
    raw = b"\x01" + values.numpy().tobytes()
    header = {"odd": entry("BOOL", [1], [0, 1]), "t": entry("F32", [2], [1, 9])}
    path.write_bytes(forged(header, raw))
    file = TensorFile(path)
    assert file.view("t").equal(values)
    assert file.view("t").data_ptr() % 4 == 0


def test_a_file_without_metadata_or_without_tensors_opens(path):
    path.write_bytes(forged({"t": entry("U8", [2], [0, 2])}, b"\x07\x09"))
    assert TensorFile(path).metadata == {}
    assert TensorFile(path).view("t").tolist() == [7, 9]
    path.write_bytes(forged({}))
    assert dict(TensorFile(path).entries) == {}


def test_strided_turned_and_conjugate_tensors_are_written_as_they_read(path):
    base = torch.arange(30, dtype=torch.float32).reshape(5, 6)
    complex_ = torch.complex(base, -base)
    tensors = {
        "turned": base.T,
        "stepped": base[::2, 1::3],
        "spread": torch.ones(1).expand(3),
        "conj": complex_.conj(),
        "neg": complex_.conj().imag,
        "grad": torch.nn.Parameter(base),
    }
    assert tensors["neg"].is_neg()
    assert tensors["conj"].is_conj()
    write_tensors(path, tensors)
    file = TensorFile(path)
    for name, tensor in tensors.items():
        assert file.view(name).equal(tensor.detach().clone()), name


def test_a_path_that_is_taken_is_not_overwritten(path):
    write_tensors(path, {"a": torch.ones(2)})
    with pytest.raises(FileExistsError):
        write_tensors(path, {"a": torch.zeros(2)})
    assert TensorFile(path).view("a").tolist() == [1, 1]


# ---------------------------------------------------------------------------------------------------------- it refuses


@pytest.mark.parametrize(
    ("header", "data", "words"),
    [
        ({"t": 7}, b"", "7"),
        ({"t": {"dtype": "F32", "shape": [1]}}, b"", "data_offsets"),
        ({"t": entry(offsets=[0, 24, 48])}, bytes(24), "3.*2"),
        ({"t": entry(dtype="F4", offsets=[0, 3])}, bytes(3), r"'t'.*'F4'.*BOOL.*U8"),
        ({"t": entry(dtype="F5")}, bytes(24), "F5"),
        ({"t": entry(shape=[2, -3])}, bytes(24), "-3"),
        ({"t": entry(shape=[2, 3.0])}, bytes(24), "3.0"),
        ({"t": entry("U8", [True], [0, 1])}, bytes(1), "true"),
        ({"t": entry("U8", [1], [0, True])}, bytes(1), "true"),
        ({"t": entry("U8", [0], [-1, -1])}, b"", "-1"),
        ({"t": entry(shape=[2**40, 2**40])}, bytes(24), "shape"),
        ({"t": entry(shape=[0, 2**30, 2**30], offsets=[0, 0])}, b"", r"'t'.*1073741824"),
        ({"t": entry("U8", [1] * 65, [0, 1])}, bytes(1), "'t'"),
        ({"t": entry(shape=[2, 5])}, bytes(24), "shape"),
        ({"t": entry(offsets=[24, 0])}, bytes(24), "`t`"),
        ({"t": entry(offsets=[3, 27])}, bytes(27), "`t`"),
        ({"a": entry(), "b": entry(offsets=[26, 50])}, bytes(50), "`b`"),
        ({"a": entry(), "b": entry(offsets=[20, 44])}, bytes(44), "`b`"),
        ({"a": entry(), "b": entry()}, bytes(24), "`[ab]`"),
        ({"a": entry()}, bytes(29), "not fully covered"),
        ({}, bytes(5), "not fully covered"),
        ({"__metadata__": ["pt"]}, b"", "map"),
        ({"__metadata__": {"n": 7}}, b"", "7"),
        (b"{nonsense}", b"", "JSON"),
        (b'{"\xff": 1}', b"", "utf-8"),
        (b'{"t": ' + b"9" * 5000 + b"}", b"", "JSON"),
        (b'{"t":' + b"[" * 200_000, b"", "JSON"),
        (b'{"__metadata__": {"a": "1", "a": "2"}}', b"", r"'a'.*'1'.*'2'"),
        (b"[1, 2]  ", b"", "safetensors"),
    ],
)
def test_a_header_that_contradicts_itself_or_its_file_is_refused(path, header, data, words):
    assert re.search(words, refusal(path, forged(header, data)))


def test_a_file_cut_short_says_how_much_it_should_hold(path):
    write_tensors(path, {"a": torch.arange(5), "b": torch.ones(3)})
    whole = path.read_bytes()
    base = 8 + int.from_bytes(whole[:8], "little")
    assert len(whole) == base + 52
    for size in range(len(whole)):
        expected = 8 if size < 8 else base if size < base else len(whole)
        assert re.search(rf"{expected}.*bytes.*{size}", refusal(path, whole[:size]))


def test_a_header_longer_than_any_is_refused_before_memory_is_taken(path):
    assert "too large" in refusal(path, (2**62).to_bytes(8, "little") + b"{}")
    assert "too large" in refusal(path, (100_000_001).to_bytes(8, "little") + b"{}")
    assert re.search(r"100,000,008.*bytes", refusal(path, (100_000_000).to_bytes(8, "little") + b"{}"))


def test_a_tensor_of_terabytes_is_refused_before_memory_is_taken(path):
    header = {"t": entry("F32", [2**20, 2**20], [0, 2**42])}
    raw = forged(header, bytes(24))
    assert re.search(rf"{len(raw) - 24 + 2**42:,}.*bytes.*{len(raw)}", refusal(path, raw))


def test_a_git_lfs_pointer_is_called_what_it_is(path):
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 90868376\n"
    assert re.search(r"Git.*LFS", refusal(path, pointer))


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_flipped_bytes_of_the_header_never_do_worse_than_an_error_of_the_file(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "flipped.safetensors"
    path.unlink(missing_ok=True)
    write_tensors(path, {"a": torch.arange(5), "b": torch.ones(3)})
    raw = bytearray(path.read_bytes())
    base = 8 + int.from_bytes(raw[:8], "little")
    for place in data.draw(st.lists(st.integers(0, base - 1), min_size=1, max_size=3)):
        raw[place] = data.draw(st.integers(0, 255))
    path.write_bytes(raw)
    try:
        file = TensorFile(path)
    except TensorFileError:
        return
    else:  # names and metadata can change unseen; sizes cannot grow past the file
        assert sum(e.nbytes for e in file.entries.values()) == 52
        for e in file.entries.values():
            assert file.view(e.name).nbytes == e.nbytes


@pytest.mark.parametrize(
    ("name", "tensor", "kind", "words"),
    [
        ("t", torch.ones(1, device="meta"), TypeError, "'t'.*meta"),
        ("t", torch.ones(1).to_sparse(), TypeError, r"'t'.*torch\.sparse_coo"),
        (
            "t",
            torch.ones(1, dtype=torch.complex128),
            TypeError,
            r"'t'.*torch\.complex128.*torch\.bool",
        ),
    ],
)
def test_what_a_file_cannot_hold_is_refused(name, tensor, kind, words):
    with pytest.raises(kind, match=words):
        check_tensor(name, tensor)


def test_file_that_shrinks_while_it_is_mapped_is_damaged(tmp_path, monkeypatch):
    def shrunk(*arguments, **options):
        raise RuntimeError("size <1> is smaller than the required mapping size <2>")

    path = tmp_path / "some.safetensors"
    write_tensors(path, {"a": torch.arange(3)})
    monkeypatch.setattr("regard.formats.safe_open", shrunk)
    with pytest.raises(TensorFileError, match="replaced"):
        TensorFile(path)
