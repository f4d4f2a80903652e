"""The capture file: what is written comes back; what is not whole is refused; what fails leaves nothing behind."""

import errno
import json
import os
import resource
import stat
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from hashlib import blake2b
from math import inf, nan
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from safetensors import safe_open
from safetensors.torch import save_file

from regard.lens.files import container
from regard.lens.files.container import VERSION, CaptureFileError, read, write

HEADER = {"tokens": ["나는", "고양이", "을 본다 🙂", ""], "names": {"layers.0": [1, -2, 0.1, None, True]}, "n": 5}
TENSORS = {
    "층/lse": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "bits": torch.tensor([7, 255], dtype=torch.uint8),
    "top": torch.tensor([[-1, 2**40]]),
}
DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.regard"


def written(path: Path) -> bytes:
    write(path, HEADER, TENSORS)
    return path.read_bytes()


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal to the bit: shape, dtype, and bytes, so that NaN and −0 count."""
    if a.dtype != b.dtype or a.shape != b.shape or a.numel() == 0:
        return a.dtype == b.dtype and a.shape == b.shape
    return torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)))


def checksum(data: bytes) -> str:
    return blake2b(data, digest_size=32).hexdigest()


def forge(
    path: Path,
    entries: str = "",
    data: bytes = b"",
    header: str = "{}",
    more: str = "",
    version: str = "1",
) -> Path:
    """A file with right checksums and any content, written as the format's description says."""
    before = f'{{"__metadata__":{{"format":"regard capture","version":"{version}","header_blake2b":"'
    after = f'","data_blake2b":"{checksum(data)}","header":{json.dumps(header)}{more}}}{entries}}}'
    length = (len(before.encode()) + 64 + len(after.encode())).to_bytes(8, "little")
    seal = checksum(length + before.encode() + after.encode())
    path.write_bytes(length + (before + seal + after).encode() + data)
    return path


def entry(name: str, dtype: object, shape: object, offsets: object) -> str:
    return f',"{name}":' + json.dumps({"dtype": dtype, "shape": shape, "data_offsets": offsets})


# ----------------------------------------------------------------------------------------------------------- round trip


def test_header_and_tensors_come_back_as_they_were(path):
    write(path, HEADER, TENSORS)
    header, tensors = read(path)
    assert header == HEADER
    assert list(header) == ["n", "names", "tokens"]
    assert list(tensors) == ["bits", "top", "층/lse"]
    assert all(same(tensors[name], TENSORS[name]) for name in TENSORS)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (2, 3, 5), (0,), (3, 0, 5)], ids=str)
def test_every_dtype_and_shape_comes_back_to_the_bit(path, dtype, shape):
    tensor = (torch.randn(shape) * 100).to(dtype)
    write(path, {}, {"x": tensor, "odd": torch.ones(3, dtype=torch.bool)})
    assert same(read(path)[1]["x"], tensor)


def test_special_numbers_come_back_to_the_bit(path):
    special = torch.tensor([nan, inf, -inf, -0.0, 1e-45])
    write(path, {}, {"x": special})
    assert same(read(path)[1]["x"], special)


def test_views_and_parameters_are_written_by_their_values(path):
    x = torch.arange(210.0).reshape(2, 3, 5, 7)
    strange = {
        "turned": x.mT,
        "strided": x[:, :, ::2, 3:],
        "expanded": x[:1, :1].expand(2, 3, 5, 7),
        "same": x,
        "again": x,
        "parameter": torch.nn.Parameter(x * 2) * 3,
    }
    write(path, {}, strange)
    tensors = read(path)[1]
    assert all(same(tensors[name], value.detach()) for name, value in strange.items())
    assert not tensors["parameter"].requires_grad


@pytest.mark.gpu
def test_tensors_on_a_gpu_come_back_on_the_cpu(path):
    x = torch.arange(6.0).reshape(2, 3)
    write(path, {}, {"x": x.cuda().mT})
    assert same(read(path)[1]["x"], x.mT)


def test_no_tensors_and_no_header_are_fine(path):
    write(path, {}, {})
    assert read(path) == ({}, {})


def test_numbers_in_the_header_come_back_exactly(path):
    numbers = [2**63, -(2**80), 0.1, 5e-324, 1.7976931348623157e308, -0.0, True, 1, 1.0]
    write(path, {"n": numbers}, {})
    back = read(path)[0]["n"]
    assert [repr(number) for number in back] == [repr(number) for number in numbers]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(), inner, max_size=5),
    max_leaves=20,
)
dtypes = st.sampled_from(["?", "u1", "i1", "<i2", "<i4", "<i8", "<f2", "<f4", "<f8"]).map(np.dtype)
any_array = arrays.arrays(dtypes, arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))
names = st.text(max_size=9).filter(lambda name: name != "__metadata__")


@settings(max_examples=60)
@given(st.dictionaries(st.text(), json_values, max_size=4), st.dictionaries(names, any_array, max_size=4))
def test_any_header_and_any_arrays_come_back(tmp_path_factory, header, given_arrays):
    path = tmp_path_factory.mktemp("any") / "run.regard"
    given_tensors = {name: torch.from_numpy(array) for name, array in given_arrays.items()}
    write(path, header, given_tensors)
    back, tensors = read(path)
    assert back == header
    assert tensors.keys() == given_tensors.keys()
    assert all(same(tensors[name], tensor) for name, tensor in given_tensors.items())


def test_equal_content_gives_equal_bytes_in_any_order_and_in_any_process(path, tmp_path):
    content = written(path)
    write(path, dict(reversed(HEADER.items())), {name: TENSORS[name].clone() for name in reversed(TENSORS)})
    assert path.read_bytes() == content
    code = "import sys; from regard.lens.files.container import read, write\nwrite(sys.argv[2], *read(sys.argv[1]))"
    other = tmp_path / "other.regard"
    env = os.environ | {"PYTHONHASHSEED": "7", "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    subprocess.run([sys.executable, "-c", code, str(path), str(other)], check=True, env=env, timeout=300)
    assert other.read_bytes() == content


def test_the_bytes_are_these(path):
    """A version-1 file, byte by byte: code that writes or reads it otherwise breaks the files that people have."""
    expected = (
        b"\x48\x01\0\0\0\0\0\0"
        b'{"__metadata__":{"format":"regard capture","version":"1",'
        b'"header_blake2b":"3affedd40dbf8efd6afa1180317953e05a9246973119e85fcc8f8103b22c4779",'
        b'"data_blake2b":"92e2b30ad1f43769891e459e3605ca1b4ed3e8115f57f9d5dace7fc3e54372df",'
        b'"header":"{\\"n\\":1,\\"tokens\\":[\\"\xec\x99\x9c\\",null]}"},'
        b'"x":{"dtype":"I16","shape":[2],"data_offsets":[0,4]}}    '
        b"\1\0\2\0"
    )
    write(path, {"tokens": ["왜", None], "n": 1}, {"x": torch.tensor([1, 2], dtype=torch.int16)})
    assert path.read_bytes() == expected
    path.write_bytes(expected)
    assert read(path)[0] == {"n": 1, "tokens": ["왜", None]}


def test_any_safetensors_reader_opens_it(path):
    write(path, HEADER, TENSORS)
    with safe_open(path, framework="np") as file:
        assert sorted(file.keys()) == sorted(TENSORS)
        assert json.loads(file.metadata()["header"]) == HEADER
        assert file.metadata()["version"] == str(VERSION)


def test_every_tensor_is_aligned_in_the_file(path):
    write(path, {}, {str(dtype): torch.ones(3, dtype=dtype) for dtype in DTYPES})
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    for name, place in json.loads(content[8 : 8 + length]).items():
        if name != "__metadata__":
            assert (8 + length + place["data_offsets"][0]) % read(path)[1][name].element_size() == 0


# --------------------------------------------------------------------------------------------------- what the disk does


def test_file_cut_at_any_byte_is_refused(path):
    content = written(path)
    assert len(content) < 4000
    for size in range(len(content) - 1, -1, -1):
        os.truncate(path, size)
        with pytest.raises(CaptureFileError, match="cut"):
            read(path)


def test_every_changed_byte_is_found(path):
    content = written(path)
    with path.open("r+b", buffering=0) as file:
        for at, byte in enumerate(content):
            for change in (1, 2, 4, 8, 16, 32, 64, 128):
                os.pwrite(file.fileno(), bytes([byte ^ change]), at)
                with pytest.raises(CaptureFileError):
                    read(path)
            os.pwrite(file.fileno(), bytes([byte]), at)
    assert read(path)[0] == HEADER


def test_blank_of_the_padding_cannot_become_another_blank(path):
    content = written(path)
    length = int.from_bytes(content[:8], "little")
    at = 8 + length - 1
    assert content[at : at + 1] == b" "
    path.write_bytes(content[:at] + b"\n" + content[at + 1 :])
    with pytest.raises(CaptureFileError, match="header"):
        read(path)


def test_damage_says_where_it_is_and_what_to_do(path):
    content = written(path)
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CaptureFileError) as caught:
        read(path)
    for named in (repr(str(path)), "checksum"):
        assert named in str(caught.value)


def test_bytes_after_the_end_are_refused(path):
    path.write_bytes(written(path) + b"abc")
    with pytest.raises(CaptureFileError, match="safetensors"):
        read(path)


def test_cut_data_says_how_much_is_missing(path):
    content = written(path)
    path.write_bytes(content[:-5])
    expected = rf"{len(content):,}.*bytes.*{len(content) - 5:,}"
    with pytest.raises(CaptureFileError, match=expected):
        read(path)


# ------------------------------------------------------------------------------------------------------- what it is not


def png() -> bytes:
    return b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + bytes(300)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", r"0.*bytes"),
        (b"hello", "safetensors"),
        (
            b"a text that is somewhat longer\n" * 9,
            "capture",
        ),
        (png(), "capture"),
        (b"PK\3\4" + bytes(200), "capture"),
        (b"\x80\2}q\0." + bytes(200), "capture"),
        (bytes(4096), "capture"),
    ],
    ids=["empty", "short", "text", "png", "zip", "pickle", "zeros"],
)
def test_what_is_no_capture_is_refused_and_named(path, content, why):
    path.write_bytes(content)
    with pytest.raises(CaptureFileError, match=why):
        read(path)


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}, {"format": "regard capture"}], ids=str)
def test_other_safetensors_files_are_told_apart(path, metadata):
    save_file({"x": torch.ones(3)}, path, metadata=metadata)
    with pytest.raises(CaptureFileError, match="safetensors"):
        read(path)


def test_newer_version_asks_for_a_newer_regard(path):
    path.write_bytes(
        b'\xff\0\0\0\0\0\0\0{"__metadata__":{"format":"regard capture","version":"2","all":"else"' + bytes(300)
    )
    with pytest.raises(CaptureFileError, match=f"{path.name}.*format 2.*1"):
        read(path)


@pytest.mark.parametrize("version", ["0", "01", "-1", "x", "", "1.0", "9" * 30])
def test_version_that_is_no_number_is_damage(path, version):
    with pytest.raises(CaptureFileError, match="version"):
        read(forge(path, version=version))


# --------------------------------------------------------------------------------------- what somebody made with intent


def test_forged_file_with_right_content_is_read(path):
    """The forgeries below are refused for what they hold, not for how they are made."""
    forged = forge(path, entry("x", "F32", [3], [0, 12]) + entry("y", "U8", [2], [12, 14]), bytes(14), '{"n": 1}')
    header, tensors = read(forged)
    assert header == {"n": 1}
    assert [tensors[name].tolist() for name in "xy"] == [[0.0] * 3, [0, 0]]


@pytest.mark.parametrize(
    "entries",
    [
        entry("x", "F32", [3], [0, 8]),
        entry("x", "F32", [-3], [0, -12]),
        entry("x", "F99", [3], [0, 12]),
        entry("x", "U8", [2**32, 2**32, 0], [0, 0]),
        entry("x", "U8", [1] * 65, [0, 1]),
        ',"x":{"dtype":"U8","shape":[12]}',
        ',"x":' + "[" * 300 + "]" * 300,
    ],
)
def test_impossible_tensor_is_refused_before_memory_is_taken(path, entries):
    with pytest.raises(CaptureFileError, match="safetensors"):
        read(forge(path, entries, bytes(12)))


@pytest.mark.parametrize(
    ("first", "second", "name"),
    [([0, 8], [4, 12], "y"), ([0, 8], [12, 20], "y"), ([4, 12], [12, 20], "x")],
)
def test_tensors_that_overlap_or_leave_gaps_are_refused(path, first, second, name):
    entries = entry("x", "U8", [8], first) + entry("y", "U8", [8], second)
    with pytest.raises(CaptureFileError, match=rf"tensor.*{name}"):
        read(forge(path, entries, bytes(20)))


def test_empty_tensor_inside_another_is_refused(path):
    entries = entry("x", "U8", [8], [0, 8]) + entry("y", "U8", [0], [4, 4])
    with pytest.raises(CaptureFileError, match="y"):
        read(forge(path, entries, bytes(8)))


def test_claim_of_more_data_than_the_file_holds_is_refused_before_memory_is_taken(path):
    with pytest.raises(CaptureFileError, match="1,099,511,6"):
        read(forge(path, entry("x", "U8", [2**40], [0, 2**40]), bytes(20)))


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 100_000_001])
def test_claim_of_a_huge_header_is_refused_before_it_is_read(path, length):
    content = written(path)
    path.write_bytes(length.to_bytes(8, "little") + content[8:])
    os.truncate(path, 2**28)  # a hole: the file is that long and takes no disk
    with pytest.raises(CaptureFileError, match="header"):
        read(path)


@pytest.mark.parametrize("length", [0, 1, 60, 75, 140])
def test_header_shorter_than_its_own_checksums_is_refused(path, length):
    content = written(path)
    path.write_bytes(length.to_bytes(8, "little") + content[8:])
    with pytest.raises(CaptureFileError, match="header"):
        read(path)


@pytest.mark.parametrize(
    ("made", "key"),
    [
        ({"more": ',"version":"2"'}, "version"),
        ({"header": '{"n":1,"n":2}'}, "n"),
        ({"header": '{"n":{"a":1,"b":2,"\\u0061":3}}'}, "a"),
    ],
)
def test_key_with_two_values_is_refused(path, made, key):
    with pytest.raises(CaptureFileError, match=rf"'{key}' has two values"):
        read(forge(path, **made))


@pytest.mark.parametrize(
    "made", [{"entries": ',"x":' + "[" * 100_000}, {"header": '{"n":' + "[" * 100_000}], ids=["text", "header"]
)
def test_deep_nesting_is_refused(path, made):
    with pytest.raises(CaptureFileError, match="header"):
        read(forge(path, **made))


@pytest.mark.parametrize(
    ("made", "why"),
    [
        ({"entries": ",,"}, "JSON"),
        ({"header": "not JSON"}, "JSON"),
        ({"header": ""}, "JSON"),
        ({"header": '{"n":' + "9" * 5000 + "}"}, "JSON"),
        ({"header": "[]"}, r"list.*JSON"),
        ({"header": "null"}, r"NoneType.*JSON"),
    ],
)
def test_header_that_is_no_json_object_is_refused(path, made, why):
    with pytest.raises(CaptureFileError, match=rf"header.*{why}"):
        read(forge(path, **made))


def test_other_metadata_are_refused(path):
    with pytest.raises(CaptureFileError, match=r"header_blake2b.*data_blake2b"):
        read(forge(path, more=',"more":"1"'))


def test_what_only_safetensors_refuses_is_refused_too(path):
    forged = forge(path, entry("\\ud800", "U8", [1], [0, 1]), b"1")
    with pytest.raises(CaptureFileError, match="safetensors"):
        read(forged)


# -------------------------------------------------------------------------------------------------- what cannot be held


@pytest.mark.parametrize(
    ("header", "error", "why"),
    [
        ({"a": np.float32(1)}, TypeError, "float32"),
        ({"a": torch.ones(2)}, TypeError, "Tensor"),
        ({"a": [0.5, nan]}, ValueError, "JSON"),
        ({"a": -inf}, ValueError, "JSON"),
        ({"a": "x\udc80"}, ValueError, r"'\\udc80'.*text.encode"),
        ({"\ud800": 1}, ValueError, r"'\\ud800'"),
    ],
    ids=str,
)
def test_header_that_would_not_come_back_is_refused(path, header, error, why):
    with pytest.raises(error, match=why):
        write(path, header, {})
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize(
    ("tensors", "error", "why"),
    [
        ({"\ud800": torch.ones(1)}, ValueError, "surrogate"),
        ({"x": torch.ones(1, dtype=torch.complex128)}, TypeError, r"'x'.*complex128.*bool.*uint8"),
        ({"x": torch.ones(1, device="meta")}, TypeError, r"'x'.*meta.*device"),
        ({"x": torch.eye(2).to_sparse()}, TypeError, r"'x'.*torch.sparse_coo"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_tensor_that_the_file_cannot_hold_is_refused(path, tensors, error, why):
    with pytest.raises(error, match=why):
        write(path, {}, tensors)
    assert list(path.parent.iterdir()) == []


# ------------------------------------------------------------------------------------------------------ whole or absent


def interrupted(at: str, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise error

    monkeypatch.setattr(os, at, fail)


@pytest.mark.pairwise
@pytest.mark.parametrize("before", [None, b"the old file"])
@pytest.mark.parametrize("at", ["fsync", "replace"])
@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), OSError(errno.EIO, "Input/output error"), SystemExit(1)], ids=repr
)
def test_interrupted_write_leaves_the_old_file_or_none(path, monkeypatch, before, at, error):
    if before is not None:
        path.write_bytes(before)
    interrupted(at, error, monkeypatch)
    with pytest.raises(type(error)):
        write(path, HEADER, TENSORS)
    assert [file.name for file in path.parent.iterdir()] == ([path.name] if before else [])
    assert before is None or path.read_bytes() == before


def test_interrupt_while_the_data_are_written_leaves_the_old_file(path, monkeypatch):
    before = written(path)

    def fail(x: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt

    monkeypatch.setattr(torch.Tensor, "cpu", fail)
    with pytest.raises(KeyboardInterrupt):
        write(path, {}, TENSORS)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_disk_that_takes_no_more_leaves_the_old_file_and_says_so(path):
    before = written(path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, hard))
    try:
        with pytest.raises(OSError, match="File too large") as e:
            write(path, HEADER, {"x": torch.ones(2**16)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (e.value.errno, e.value.filename) == (errno.EFBIG, str(path))
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


@contextmanager
def as_stranger() -> Iterator[None]:
    """Root may read and write everywhere: act as nobody."""
    root = os.geteuid() == 0
    if root:
        os.setresuid(65534, 65534, 0)
    try:
        yield
    finally:
        if root:
            os.setresuid(0, 0, 0)


def test_permission_denied_says_so_and_names_the_path_that_was_asked_for():
    with TemporaryDirectory() as name:  # pytest's own folders are closed to others
        folder = Path(name)
        old, new = folder / "old.regard", folder / "new.regard"
        before = written(old)
        old.chmod(0o000)
        folder.chmod(0o555)
        with as_stranger():
            with pytest.raises(PermissionError, match="Permission denied") as caught:
                write(new, HEADER, TENSORS)
            assert caught.value.filename == str(new)
            with pytest.raises(PermissionError):
                write(old, HEADER, TENSORS)
            with pytest.raises(PermissionError, match=rf"Permission denied.*'{old}'"):
                read(old)
        folder.chmod(0o755)
        old.chmod(0o644)
        assert list(folder.iterdir()) == [old]
        assert old.read_bytes() == before


def test_replaced_file_keeps_its_permissions(path):
    written(path)
    path.chmod(0o640)
    write(path, {}, {})
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_folder_is_refused(tmp_path):
    for call in (lambda: write(tmp_path, {}, {}), lambda: read(tmp_path)):
        with pytest.raises(IsADirectoryError, match=f"'{tmp_path}'"):
            call()


def test_pipe_is_refused_and_does_not_hang(path):
    os.mkfifo(path)
    for call in (lambda: write(path, {}, {}), lambda: read(path)):
        with pytest.raises(OSError, match="pipe"):
            call()


def test_missing_folder_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"'{tmp_path}/없음'"):
        write(tmp_path / "없음" / "run.regard", {}, {})


def test_missing_file_raises_file_not_found(path):
    with pytest.raises(FileNotFoundError, match=str(path)):
        read(path)


@pytest.mark.parametrize("name", ["run", "실행 기록 🙂.regard", "a b.c.d", "-x", ".hidden"])
def test_name_is_used_as_it_is(tmp_path, name, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(name, HEADER, TENSORS)
    assert os.listdir() == [name]
    assert read(name)[0] == HEADER


@pytest.mark.parametrize("there", [True, False])
def test_link_stays_and_its_target_is_written(tmp_path, there):
    (tmp_path / "real").mkdir()
    target, link = tmp_path / "real" / "run.regard", tmp_path / "link.regard"
    link.symlink_to(target)
    if there:
        target.write_bytes(b"old")
    write(link, HEADER, TENSORS)
    assert link.is_symlink()
    assert read(link)[0] == read(target)[0] == HEADER
    assert sorted(file.name for file in tmp_path.rglob("*")) == ["link.regard", "real", "run.regard"]


# --------------------------------------------------------------------------------------------------- memory, and others


def test_tensors_in_memory_do_not_need_the_file(path):
    written(path)
    tensors = read(path)[1]
    path.write_bytes(bytes(path.stat().st_size))
    assert all(same(tensors[name], TENSORS[name]) for name in TENSORS)


def test_readers_and_writers_at_the_same_time_see_one_whole_file(path, monkeypatch):
    monkeypatch.setattr(container, "ATTEMPTS", 50)  # more than there are writings, however the threads take turns

    def content(n: int) -> tuple[dict[str, object], dict[str, torch.Tensor]]:
        return {"n": n, "tokens": ["x"] * n}, {"x": torch.full((50 + 700 * n,), float(n))}

    def writer(n: int) -> None:
        for _ in range(20):
            write(path, *content(n))

    def reader(_: int) -> None:
        for _ in range(25):
            header, tensors = read(path)
            expected = content(header["n"])
            assert header == expected[0]
            assert same(tensors["x"], expected[1]["x"])

    write(path, *content(0))
    with ThreadPoolExecutor(4) as threads:
        for future in [threads.submit(work, n) for n in (1, 2) for work in (writer, reader)]:
            future.result()
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("times", [1, container.ATTEMPTS - 1, container.ATTEMPTS])
@pytest.mark.parametrize("new", ["whole", "other"])
def test_file_that_is_replaced_while_it_is_read_is_read_again(path, monkeypatch, times, new):
    """Replaced between the check and safetensors' reading: by a capture, or by what safetensors does not read."""
    write(path, {"n": 0}, {"x": torch.tensor(0)})
    load, calls = container.TensorFile, []

    def late(place: Path) -> container.TensorFile:
        calls.append(place)
        if len(calls) > times:
            return load(place)
        write(path, {"n": len(calls)}, {"x": torch.tensor(len(calls))})
        if new == "whole":
            return load(place)
        raise container.TensorFileError("as if it were another file")

    monkeypatch.setattr(container, "TensorFile", late)
    if times == container.ATTEMPTS:
        with pytest.raises(CaptureFileError, match="written"):
            read(path)
    else:
        assert read(path) == ({"n": times}, {"x": torch.tensor(times)})
