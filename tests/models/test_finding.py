"""From a name to a directory: local ones as they are, hub ids through a cache made here; no network is needed."""

import os
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants, errors

from regard.models.loading import UNWANTED, WANTED, Checkpoint, CheckpointError, find
from regard.models.saving import INDEX, SINGLE, write_checkpoint

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OLDER = "89abcdef0123456789abcdef0123456789abcdef"


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, no way out, and a working directory of one's own."""
    cache = tmp_path / "cache"
    cache.mkdir()
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return cache


def cached(
    cache: Path, name: str = "owner/name", commit: str = COMMIT, ref: str = "main", *, shards: bool = False
) -> Path:
    """A model as huggingface_hub keeps it: blobs, links to them in a snapshot, and what the branch points at."""
    repo = cache / f"models--{name.replace('/', '--')}"
    snapshot = repo / "snapshots" / commit
    for folder in (repo / "refs", repo / "blobs", snapshot):
        folder.mkdir(parents=True, exist_ok=True)
    (repo / "refs" / ref).write_text(commit)
    made = repo / "made"
    write_checkpoint(made, {"a": torch.ones(3), "b": torch.ones(5)}, shard_bytes=20 if shards else 1000)
    (made / "config.json").write_text("{}")
    for i, file in enumerate(sorted(made.iterdir())):
        blob = repo / "blobs" / f"{commit[:8]}{i}"
        file.rename(blob)
        (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))
    made.rmdir()
    return snapshot


def answering(monkeypatch: pytest.MonkeyPatch, result: object) -> list[dict[str, object]]:
    """Stand in for the hub: give a path or raise; the calls it got."""
    calls: list[dict[str, object]] = []

    def snapshot_download(repo_id: str, **options: object) -> str:
        calls.append({"repo_id": repo_id, **options})
        if isinstance(result, Exception):
            raise result
        return str(result)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    return calls


def failure(kind: type[errors.HfHubHTTPError], status: int, words: str = "") -> errors.HfHubHTTPError:
    client = sys.modules[errors.Response.__module__.partition(".")[0]]  # httpx or httpx2, by the library's version
    return kind(words, response=client.Response(status, request=client.Request("GET", "https://hub.example")))


# ------------------------------------------------------------------------------------------------------- directories


def test_a_directory_is_taken_as_it_is(tmp_path):
    assert find(tmp_path) == tmp_path
    assert find(str(tmp_path)) == tmp_path
    assert find(".") == Path(".")


def test_a_tilde_is_the_home_directory(tmp_path):
    (tmp_path / "home" / "models").mkdir(parents=True)
    assert find("~/models") == tmp_path / "home" / "models"
    assert find(Path("~/models")) == tmp_path / "home" / "models"


@pytest.mark.parametrize("name", ["name", "owner/name"])
def test_a_directory_wins_over_a_hub_id(offline, name):
    cached(offline, name)
    Path(name).mkdir(parents=True)
    assert find(name) == Path(name)


def test_a_directory_has_no_revision(tmp_path):
    with pytest.raises(ValueError, match=r"revision.*'main'"):
        find(tmp_path, revision="main")


@pytest.mark.parametrize("kind", [str, Path])
def test_a_file_is_answered_with_its_directory(tmp_path, kind):
    write_checkpoint(tmp_path / "model", {"a": torch.ones(3)})
    with pytest.raises(NotADirectoryError) as caught:
        find(kind(tmp_path / "model" / SINGLE))
    for named in (tmp_path / "model" / SINGLE, tmp_path / "model"):
        assert repr(str(named)) in str(caught.value)


@pytest.mark.parametrize(
    "name",
    ["./owner/name", "../name", "/owner", "~/name", "~nobody-of-that-name/x", "a/b/c", "name/", ".hidden", "a\\b",
     Path("owner/name"), Path("name")],
)  # fmt: skip
def test_a_path_that_does_not_exist_is_never_looked_up_on_the_hub(offline, monkeypatch, name):
    cached(offline)
    cached(offline, "name")
    calls = answering(monkeypatch, "never")
    with pytest.raises(FileNotFoundError) as caught:
        find(name)
    assert repr(str(name)) in str(caught.value)
    assert "'owner/name'" in str(caught.value)
    assert calls == []


def test_an_empty_name_is_refused():
    with pytest.raises(ValueError, match="name"):
        find("")


@pytest.mark.parametrize(
    "name",
    ["owner/my model", "모델", "na--me", "na..me", "-name", "name-", "name.", "name.git", "owner./name", "owner-/name",
     "https://huggingface.co/owner/name", "owner/name@main", "a\0b", "x" * 97, "owner/" + "x" * 5000, "a\n"],
)  # fmt: skip
def test_what_can_be_no_id_is_refused_before_anything_is_looked_up(monkeypatch, name):
    calls = answering(monkeypatch, "never")
    with pytest.raises(ValueError, match=r"'name'.*'owner/name'") as e:
        find(name)
    assert len(str(e.value)) < 250
    assert calls == []


@pytest.mark.parametrize(
    "name", ["gpt2", "owner/name", "sentence-transformers/all-MiniLM-L6-v2", "a_b/c.d", "1/2", "owner/" + "x" * 90]
)
def test_ids_are_those_the_hub_itself_allows(offline, name):
    from huggingface_hub.utils import validate_repo_id

    validate_repo_id(name)
    snapshot = cached(offline, name)
    assert find(name) == snapshot


# ------------------------------------------------------------------------------------------------------------ the cache


@pytest.mark.parametrize("shards", [False, True])
def test_a_model_in_the_cache_is_found_without_a_network(offline, shards):
    snapshot = cached(offline, shards=shards)
    assert find("owner/name") == snapshot
    assert set(Checkpoint.open(find("owner/name")).entries) == {"a", "b"}


def test_a_revision_is_a_branch_a_tag_or_a_commit(offline):
    new, old = cached(offline), cached(offline, commit=OLDER, ref="v1")
    assert find("owner/name") == new
    assert find("owner/name", revision="main") == new
    assert find("owner/name", revision="v1") == old
    assert find("owner/name", revision=OLDER) == old


def test_what_is_neither_a_directory_nor_in_the_cache_says_both(offline):
    words = r"'owner/name'.*HF_HUB"
    with pytest.raises(FileNotFoundError, match=words):
        find("owner/name")
    cached(offline)
    with pytest.raises(FileNotFoundError, match=r"'owner/name'.*revision.*'v9'"):
        find("owner/name", revision="v9")


def test_a_model_in_the_cache_without_its_config_is_not_complete(offline):
    snapshot = cached(offline)
    (snapshot / "config.json").unlink()
    words = r"'owner/name'.*config.json"
    with pytest.raises(FileNotFoundError, match=words):
        find("owner/name")


def test_a_model_in_the_cache_without_its_weights_is_not_complete(offline):
    snapshot = cached(offline)
    (snapshot / SINGLE).resolve().unlink()  # the link stays, and leads nowhere
    words = r"'owner/name'.*model.safetensors"
    with pytest.raises(FileNotFoundError, match=words):
        find("owner/name")


def test_a_model_in_the_cache_without_one_of_its_shards_is_not_complete(offline):
    snapshot = cached(offline, shards=True)
    (snapshot / "model-00002-of-00002.safetensors").unlink()
    words = r"'owner/name'.*1.*2.*model-00002-"
    with pytest.raises(FileNotFoundError, match=words):
        find("owner/name")


def test_an_index_that_is_damaged_is_refused(offline):
    snapshot = cached(offline, shards=True)
    (snapshot / INDEX).resolve().write_text("{")
    with pytest.raises(CheckpointError, match=r"index.json.*JSON"):
        find("owner/name")


def test_a_model_in_the_cache_that_is_only_pickled_is_refused_in_the_words_for_pickles(offline):
    snapshot = cached(offline)
    (snapshot / SINGLE).rename(snapshot / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin"):
        find("owner/name")


# -------------------------------------------------------------------------------------------------------------- the hub


def test_only_what_is_read_is_downloaded(offline, monkeypatch):
    from huggingface_hub.utils import filter_repo_objects

    snapshot = cached(offline)
    calls = answering(monkeypatch, snapshot)
    assert find("owner/name", revision="v1") == snapshot
    assert calls == [{"repo_id": "owner/name", "revision": "v1", "allow_patterns": WANTED, "ignore_patterns": UNWANTED}]
    wanted = [
        "config.json", "generation_config.json", SINGLE, INDEX, "model-00001-of-00002.safetensors", "tokenizer.json",
        "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.txt", "vocab.json",
        "merges.txt", "spiece.model", "tokenizer.model", "sentencepiece.bpe.model", "1_Pooling/config.json",
        "modules.json", "source.spm", "target.spm",
    ]  # fmt: skip
    unwanted = [
        "pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "model.pt", "model.pth", "modeling_x.py",
        "tf_model.h5", "flax_model.msgpack", "rust_model.ot", "onnx/model.onnx",
        "onnx/model-00001-of-00002.safetensors",
        "consolidated.safetensors", "consolidated-00001-of-00002.safetensors",
        "README.md", "model.fp16.safetensors",
        "training_args.bin", "vae/config.json",
    ]  # fmt: skip
    files = filter_repo_objects([*wanted, *unwanted], allow_patterns=WANTED, ignore_patterns=UNWANTED)
    assert list(files) == wanted


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (
            failure(errors.GatedRepoError, 403),
            PermissionError,
            r"'owner/name'.*https://huggingface\.co/owner/name",
        ),
        (
            failure(errors.RepositoryNotFoundError, 401),
            FileNotFoundError,
            "'owner/name'",
        ),
        (
            failure(errors.HfHubHTTPError, 500, "500 Server Error"),
            ConnectionError,
            r"'owner/name'.*500.*Server.*Error",
        ),
        (
            errors.HTTPError("timed out"),
            ConnectionError,
            "'owner/name'",
        ),
        (
            errors.LocalEntryNotFoundError("long words"),
            FileNotFoundError,
            r"'owner/name'.*HF_HUB_OFFLINE",
        ),
    ],
)
def test_what_the_hub_answers_is_said_plainly(monkeypatch, error, kind, words):
    answering(monkeypatch, error)
    with pytest.raises(kind, match=words):
        find("owner/name")


def test_a_revision_that_the_hub_does_not_have_is_named(monkeypatch):
    answering(monkeypatch, failure(errors.RevisionNotFoundError, 404))
    with pytest.raises(FileNotFoundError, match=r"'owner/name'.*revision.*'v9'"):
        find("owner/name", revision="v9")


def test_a_full_disk_is_passed_on(monkeypatch):
    answering(monkeypatch, OSError(28, "No space left on device"))
    with pytest.raises(OSError, match="No space left on device") as caught:
        find("owner/name")
    assert not isinstance(caught.value, ConnectionError)


def test_a_hub_model_without_safetensors_says_that_it_may_be_pickled(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    answering(monkeypatch, tmp_path)
    with pytest.raises(FileNotFoundError, match=r"transformers.*C\.from_pretrained\('owner/name'\)\.save_pretrained\("):
        find("owner/name")
    (tmp_path / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    with pytest.raises(
        FileNotFoundError, match=r"transformers.*GPT2LMHeadModel\.from_pretrained\('owner/name'\)\.save_pr"
    ):
        find("owner/name")


def test_without_huggingface_hub_directories_open_and_ids_name_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert find(tmp_path) == tmp_path
    with pytest.raises(ImportError) as caught:
        find("owner/name")
    for named in ("'owner/name'", "huggingface_hub", "'regard[models]'"):
        assert named in str(caught.value)
