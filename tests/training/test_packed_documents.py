"""Packed documents: each is read as if it were alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard import masks
from regard.backends import explain
from regard.models.losses import IGNORED
from regard.models.model import Model
from regard.training.recipes import CausalLM
from regard.training.recipes.clm import pack

V, LENGTH = 61, 23
POSITIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "learned": (
        "gpt2",
        {"vocab_size": V, "n_embd": 12, "n_layer": 2, "n_head": 3, "n_positions": LENGTH}
        | {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0},
    ),
    "rotary": (
        "llama",
        {
            "vocab_size": V,
            "hidden_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 17,
            "max_position_embeddings": LENGTH,
        },
    ),
}


def build(positions: str) -> Model:
    family, config = POSITIONS[positions]
    return regard.build(family, task="text-generation", seed=1, **config).double().train()


def documents(*lengths: int) -> list[Tensor]:
    torch.manual_seed(4)
    return [torch.randint(V, (length,)) for length in lengths]


def gradients(model: Model) -> dict[str, Tensor]:
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("training", [True, False])  # without logits, and with
def test_packed_documents_learn_as_each_alone(positions: str, training: bool) -> None:
    model = build(positions).train(training)
    texts = documents(7, 2, 13, 5, 11, 23, 3)
    recipe = CausalLM(length=LENGTH, pack=True)
    batch = recipe.batch(pack(texts, LENGTH), [])
    assert len(batch["input_ids"]) < len(texts)
    total, count = recipe.loss(model, batch)
    total.backward()
    packed = gradients(model)
    alone = [model(text[None], labels=text[None], num_items_in_batch=1).loss for text in texts]
    sum(alone).backward()
    torch.testing.assert_close(total, sum(alone), rtol=1e-13, atol=0)
    assert int(count) == sum(len(text) - 1 for text in texts)
    one_by_one = gradients(model)
    assert packed.keys() == one_by_one.keys()
    scale = max(float(gradient.abs().max()) for gradient in one_by_one.values())
    for name, gradient in packed.items():
        torch.testing.assert_close(gradient, one_by_one[name], rtol=0, atol=1e-14 * scale, msg=name)


@pytest.mark.parametrize("positions", POSITIONS)
def test_positions_restart_by_default(positions: str) -> None:
    model = build(positions).eval()
    batch = CausalLM(length=LENGTH, pack=True).batch(pack(documents(7, 5, 9), LENGTH), [])
    given = {name: batch[name] for name in ("input_ids", "document_ids")}
    with torch.no_grad():
        assert torch.equal(model(**given).logits, model(**given, position_ids=batch["position_ids"]).logits)
        assert not torch.equal(model(**given).logits, model(batch["input_ids"]).logits)


@pytest.mark.parametrize("positions", POSITIONS)
def test_an_id_that_comes_back_is_another_document(positions: str) -> None:
    model, (a, b, c) = build(positions).eval(), documents(7, 2, 5)
    ids, numbers = torch.cat([a, b, c])[None], torch.tensor([[4] * 7 + [9] * 2 + [4] * 5])
    with torch.no_grad():
        packed, alone = model(ids, document_ids=numbers).logits[:, 9:], model(c[None]).logits
    torch.testing.assert_close(packed, alone, rtol=1e-12, atol=1e-12)


def test_blocks_hold_whole_documents() -> None:
    texts = documents(*range(1, 60))
    blocks = pack(texts, LENGTH)
    assert all(sum(map(len, block)) <= LENGTH for block in blocks)
    tokens = sum(len(piece) for text in texts for piece in text.split(LENGTH) if len(piece) > 1)
    assert sum(len(piece) for block in blocks for piece in block) == tokens
    assert len(blocks) <= 1.1 * tokens / LENGTH
    whole = {tuple(text.tolist()) for text in texts if 1 < len(text) <= LENGTH}
    assert whole <= {tuple(piece.tolist()) for block in blocks for piece in block}
    with pytest.raises(ValueError, match="2 documents"):
        pack(documents(1, 1), LENGTH)


def test_nothing_is_predicted_across_a_border() -> None:
    batch = CausalLM(length=LENGTH, pack=True).batch(pack(documents(7, 5, 9, 4), LENGTH), [])
    first = batch["position_ids"] == 0
    assert (batch["labels"][first] == IGNORED).all()
    padding = batch["document_ids"] < 0
    assert padding.any()
    assert (batch["labels"][~first & ~padding] == batch["input_ids"][~first & ~padding]).all()


def test_long_blocks_need_no_dense_mask() -> None:
    ids = torch.arange(2048)[None] // 300
    q = torch.zeros(1, 2, 2048, 16)
    assert explain(q, q, q, mask=masks.causal() & masks.documents(ids)).chosen in ("sparse", "tiled", "flex")


def test_document_ids_that_do_not_fit() -> None:
    model, ids = build("learned"), documents(6)[0][None]
    with pytest.raises(ValueError, match=r"\(1, 6\).*\(1, 5\)"):
        model(ids, document_ids=torch.zeros(1, 5, dtype=torch.long))
    with pytest.raises(TypeError, match="float32"):
        model(ids, document_ids=torch.zeros(1, 6))
    config = {"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 17}
    long = regard.build("longformer", vocab_size=V, attention_window=[4], max_position_embeddings=30, **config)
    with pytest.raises(ValueError, match="document_ids"):
        long(ids, document_ids=torch.zeros(1, 6, dtype=torch.long))


@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
def test_a_packed_run(suffix: str, tmp_path: Path) -> None:
    texts = ["to be or not to be", "that is the question", "whether", "tis nobler", "in the mind to suffer"]
    data = tmp_path / f"data{suffix}"
    lines = [json.dumps({"text": text}) for text in texts] if suffix == ".jsonl" else ["\n\n".join(texts)]
    data.write_text("\n".join(lines), "utf-8")
    model = regard.build("gpt2", n_embd=8, n_head=2, n_layer=1, n_positions=32, vocab_size=256)
    recipe = CausalLM.for_model(model, pack=True)
    assert [len(block) for block in recipe.rows(data, model, training=True)] == [2, 2, 1]
    result = regard.train(
        model, recipe, data, eval_data=data, out=tmp_path / "run", steps=2, batch_size=2, progress=False
    )
    assert result.steps == 2
    assert result.eval_loss == pytest.approx(5.55, abs=0.5)
