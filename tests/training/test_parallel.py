"""Training on two processes (gloo) gives what one process gives, in every way of splitting the work."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import parallel_worker
import pytest
import torch
from parallel_worker import OPTIONS, ROWS, model, train_way
from ranks import run_ranks
from safetensors.torch import load_file

import regard

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
    reason="needs torch.distributed with gloo",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where one process and two have trained the same model."""
    folder = tmp_path_factory.mktemp("parallel")
    run_ranks(parallel_worker.main, folder)
    train_way("data", folder / "one")
    return folder


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model" / "model.safetensors")


@pytest.mark.parametrize("way", ["data", "accumulated", "sharded", "tensor"])
def test_two_processes_give_what_one_gives(folder, way):
    one, two = weights(folder / "one" / "data"), weights(folder / way)
    assert one.keys() == two.keys()
    for name in one:
        torch.testing.assert_close(two[name], one[name], rtol=1e-9, atol=1e-11, msg=lambda m, name=name: f"{name}: {m}")
    losses = [
        [json.loads(line)["loss"] for line in (run / "log.jsonl").read_text().splitlines() if '"loss"' in line]
        for run in (folder / "one" / "data", folder / way)
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)  # accumulated in fp32


@pytest.mark.parametrize("way", ["data", "sharded", "tensor"])
def test_what_two_processes_save_opens_in_transformers(folder, way):
    import transformers

    directory = folder / way / "model"
    theirs = transformers.BertForSequenceClassification.from_pretrained(directory, dtype=torch.float64)
    ours = regard.load(directory)
    ids = torch.arange(5, 25)[None]
    torch.testing.assert_close(theirs(ids).logits, ours(ids).logits)


def test_a_checkpoint_of_two_processes_resumes_on_one(folder, tmp_path):
    shutil.copytree(folder / "half" / "data", tmp_path / "data")
    shutil.rmtree(tmp_path / "data" / "checkpoints" / "step-00000004")
    shutil.rmtree(tmp_path / "data" / "model")
    train_way("data", tmp_path)
    one, resumed = weights(folder / "one" / "data"), weights(tmp_path / "data")
    for name in one:
        torch.testing.assert_close(resumed[name], one[name], rtol=1e-9, atol=1e-11)


def test_unequal_data_is_refused_on_every_process(folder):
    assert not (folder / "unequal").exists()
    for rank in range(2):
        assert "data" in (folder / f"unequal-{rank}.txt").read_text()


@pytest.mark.parametrize("wrong", [{"shard": True}, {"tensor_parallel": 2}])
def test_a_single_process_cannot_be_split(tmp_path, wrong):
    recipe = regard.recipes.TextClassification(labels=("L0", "L1", "L2"), length=100)
    with pytest.raises(ValueError, match="torchrun"):
        regard.train(model(), recipe, ROWS, out=tmp_path / "run", **OPTIONS | wrong)
    assert not (tmp_path / "run").exists()
