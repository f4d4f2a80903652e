"""What commands write: only files are replaced, they keep their permissions, and a full disk keeps the old ones."""

import os
import resource
import stat
from pathlib import Path

import numpy as np
import pytest
import torch
from speaking_twins import bert

import regard
from regard.cli import main
from regard.cli.outputs import write_npy
from regard.explorer.export import write_html
from regard.session.session import Session
from regard.viz.figures import heatmap, save

pytestmark = pytest.mark.usefixtures("plain")


@pytest.fixture(scope="module")
def session() -> Session:
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    with regard.watch(layer, keep="qk") as seen:
        layer(torch.zeros(1, 3, 8))
    return Session("toy", seen, ("a", "b", "c"))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(bert(tmp_path_factory.mktemp("bert"), "Model"))


WRITERS = {
    "page.html": write_html,
    "figure.svg": lambda session, path: save(heatmap(np.eye(2)), path),
    "vectors.npy": lambda session, path: write_npy(torch.zeros(2, 3), path),
    "run.regard": lambda session, path: session.capture.save(path),
}


@pytest.mark.parametrize("name", WRITERS)
def test_pipe_is_refused_and_stays(session, name):
    os.mkfifo(name)
    with pytest.raises(OSError, match="device"):
        WRITERS[name](session, Path(name))
    assert stat.S_ISFIFO(os.stat(name).st_mode)
    assert os.listdir() == [name]


@pytest.mark.parametrize("name", WRITERS)
def test_permissions_are_kept_and_a_link_stays(session, name):
    Path("real").touch(mode=0o600)
    Path(name).symlink_to("real")
    WRITERS[name](session, Path(name))
    assert stat.S_IMODE(os.stat("real").st_mode) == 0o600
    assert os.stat("real").st_size > 0
    assert sorted(os.listdir()) == sorted([name, "real"])
    assert Path(name).is_symlink()


@pytest.mark.parametrize("name", WRITERS)
def test_full_disk_keeps_the_old_file_and_says_so(session, name):
    Path(name).write_bytes(b"old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            WRITERS[name](session, Path(name))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert Path(name).read_bytes() == b"old"
    assert os.listdir() == [name]


@pytest.mark.parametrize("name", WRITERS)
def test_what_killed_writers_left_is_swept(session, name):
    for end in ("lock", "part"):
        Path(f".{name}.{'a' * 32}.{end}").touch()
    WRITERS[name](session, Path(name))
    assert os.listdir() == [name]


@pytest.mark.parametrize(
    "command",
    [
        ["look", "a text", "--model", "no-such-model", "--html"],
        ["look", "a text", "--model", "no-such-model", "--save"],
        ["look", "a text", "--model", "no-such-model", "--figure"],
        ["embed", "a text", "--model", "no-such-model", "--out"],
        ["mask", "causal", "--figure"],
    ],
    ids=" ".join,
)
def test_command_refuses_a_pipe_before_it_computes_anything(fail, command):
    name = {"--html": "a.html", "--save": "a.regard", "--figure": "a.png", "--out": "a.npy"}[command[-1]]
    os.mkfifo(name)
    said = fail(*command, name)
    assert f"'{name}'" in said
    assert stat.S_ISFIFO(os.stat(name).st_mode)


def test_embed_on_a_full_disk_keeps_the_old_vectors(fail, model):
    assert main(["embed", "the cat", "--model", model, "--out", "out.npy"]) == 0
    before = Path("out.npy").read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        code = main(["embed", "a dog", "--model", model, "--out", "out.npy"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert code == 2
    assert Path("out.npy").read_bytes() == before
    assert os.listdir() == ["out.npy"]


@pytest.mark.parametrize("shape", [(2, 3), (0, 3), (3,), ()])
@pytest.mark.parametrize("turned", [False, True])
def test_npy_is_what_numpy_writes(shape, turned):
    vectors = torch.arange(6.0)[: torch.Size(shape).numel()].reshape(shape)
    vectors = vectors.mT if turned and len(shape) == 2 else vectors
    write_npy(vectors, Path("ours.npy"))
    np.save("theirs.npy", vectors.contiguous().numpy())
    assert Path("ours.npy").read_bytes() == Path("theirs.npy").read_bytes()
