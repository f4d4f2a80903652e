"""A model saved over what is in a directory: the old model goes as a whole, and what is not of a model stays."""

import json
import os
import resource
import stat
from pathlib import Path

import pytest
import torch
from speaking_twins import bert, gpt2

from regard.models import saving
from regard.models.families.transformer import TransformerSize, transformer
from regard.models.loading import load

TEXTS = ["The animal was tired", "a cat sat on the mat"]
NORMALISED = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
]


@pytest.fixture(scope="module")
def plain_model(tmp_path_factory):
    return load(bert(tmp_path_factory.mktemp("bert"), "Model"))


@pytest.fixture
def taken(tmp_path) -> Path:
    """A directory with another model that has every side file, and files that are of no model."""
    folder = gpt2(tmp_path / "out")
    (folder / "modules.json").write_text(json.dumps(NORMALISED))
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 5}')
    for module in ("1_Pooling", "2_Normalize"):
        (folder / module).mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_cls_token": true}')
    for name in ("generation_config.json", "preprocessor_config.json", "adapter_config.json", "chat_template.jinja"):
        (folder / name).write_text("{}")
    for name in (
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "pytorch_model.bin",
        "spiece.model",
    ):
        (folder / name).write_text("stale")
    for name in KEPT:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("mine")
    return folder


KEPT = {"README.md", ".git/HEAD", "logs/events", "notes.txt", "training_args.bin", "embeddings.safetensors"}


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_no_file_of_the_old_model_outlives_it_and_all_others_do(plain_model, taken, tmp_path):
    plain_model.save(tmp_path / "fresh")
    plain_model.save(taken)
    assert files(taken) == files(tmp_path / "fresh") | dict.fromkeys(KEPT, b"mine")
    assert sorted(os.listdir(tmp_path)) == ["fresh", "out"]
    again = load(taken)
    assert torch.equal(again.embed(TEXTS), plain_model.embed(TEXTS))  # a left-over modules.json would normalise


def test_model_saved_over_its_own_directory_keeps_what_describes_it(taken):
    for name in ("model-00001-of-00002.safetensors", "model.safetensors.index.json", "preprocessor_config.json"):
        (taken / name).unlink()
    (taken / "config_sentence_transformers.json").write_text('{"prompts": {}}')
    before = files(taken)
    model = load(taken)
    with torch.no_grad():
        next(model.parameters()).add_(1)
    model.save(taken)
    after = files(taken)
    assert before.keys() - after.keys() == {"pytorch_model.bin"}
    assert after.keys() <= before.keys()
    changed = {name for name in after if after[name] != before[name]}
    assert changed <= {"model.safetensors", "config.json"}
    assert torch.equal(next(load(taken).parameters()), next(model.parameters()))


def test_tokenizer_that_goes_without_another_in_its_place_is_told(taken, tmp_path):
    made = transformer(13, TransformerSize(d_model=8, num_heads=2, layers=1, d_ff=16), start=1, end=2, pad=0)
    with pytest.warns(UserWarning, match=r"tokenizer\.json.*model\.tokenizer"):
        made.save(taken)
    assert not {"tokenizer.json", "tokenizer_config.json"} & files(taken).keys()


def test_tokenizer_that_was_there_before_any_model_stays(tmp_path):
    (tmp_path / "tokenizer.json").write_text("mine")
    made = transformer(13, TransformerSize(d_model=8, num_heads=2, layers=1, d_ff=16), start=1, end=2, pad=0)
    made.save(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert (tmp_path / "tokenizer.json").read_text() == "mine"


def test_permissions_of_directory_and_files_are_kept(plain_model, taken):
    taken.chmod(0o700)
    for name in ("model.safetensors", "config.json"):
        (taken / name).chmod(0o600)
    plain_model.save(taken)
    modes = [stat.S_IMODE((taken / name).stat().st_mode) for name in ("", "model.safetensors", "config.json")]
    assert modes == [0o700, 0o600, 0o600]


def test_full_disk_keeps_the_old_model(plain_model, taken):
    before = files(taken)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            plain_model.save(taken)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert files(taken) == before
    assert os.listdir(taken.parent) == ["out"]


def test_current_directory_with_a_model_is_refused_and_without_one_is_written_into(plain_model, taken, monkeypatch):
    before = files(taken)
    monkeypatch.chdir(taken)
    with pytest.raises(OSError, match="current directory"):
        plain_model.save(".")
    assert files(taken) == before
    (taken / "new").mkdir()
    monkeypatch.chdir(taken / "new")
    plain_model.save(".")
    assert Path("config.json").exists()


def test_model_that_a_killed_save_renamed_away_is_loaded(plain_model, tmp_path, monkeypatch):
    plain_model.save(tmp_path / "out")
    os.rename(tmp_path / "out", tmp_path / f".out.{'a' * 32}.old")  # where directories cannot be exchanged
    assert torch.equal(load(tmp_path / "out").embed(TEXTS), plain_model.embed(TEXTS))


def test_hub_cache_is_not_written_into_through_its_links(plain_model, taken, tmp_path):
    (tmp_path / "snapshot").mkdir()
    for path in taken.iterdir():
        (tmp_path / "snapshot" / path.name).symlink_to(path)
    before = files(taken)
    plain_model.save(tmp_path / "snapshot")
    assert files(taken) == before
    assert torch.equal(load(tmp_path / "snapshot").embed(TEXTS), plain_model.embed(TEXTS))


def test_names_that_only_look_like_those_of_a_model_stay():
    names = ["config.json", "my_config.json", "model.safetensors", "models.safetensors", "1_Pooling", "1_Pool", "vocab"]
    assert saving._replaced(names, own=False) == {"config.json", "model.safetensors", "1_Pooling"}
    assert saving._replaced(names, own=True) == {"model.safetensors"}
    assert saving._replaced(["vocab.txt", "modules.json"], own=False) == set()
