"""One vector for each text: pooling, the checkpoint's own recipe, order, padding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from speaking_twins import bart, bert, gpt2

from regard.models.loading import load
from regard.tasks.text import pool, read_pooling

TEXTS = ["The animal was tired", "고양이", "it", "a cat sat on the mat because it was too small", "Seoul"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    return bert(tmp_path_factory.mktemp("bert"), "Model")


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return load(folder, dtype=torch.float64)


def alone(model: Any, text: str, pooling: str) -> torch.Tensor:
    hidden = model(torch.tensor([model.tokenizer.encode(text).ids])).last_hidden_state[0]  # (N, d)
    return {"mean": hidden.mean(0), "cls": hidden[0], "max": hidden.amax(0), "last": hidden[-1]}[pooling]


@pytest.mark.parametrize("pooling", ["mean", "cls", "max", "last"])
@pytest.mark.parametrize("size", [1, 2, 7])
def test_each_text_has_the_vector_it_has_alone(model: Any, pooling: Any, size: int) -> None:
    found = model.embed(TEXTS, pooling=pooling, batch=size)
    assert found.shape == (5, 20)
    assert not found.requires_grad
    for row, text in zip(found, TEXTS, strict=True):
        torch.testing.assert_close(row, alone(model, text, pooling), rtol=0, atol=1e-13)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("pooling", ["mean", "cls", "max", "last"])
def test_padding_is_left_out_on_either_side(side: str, pooling: Any) -> None:
    hidden = torch.randint(-9, 10, (1, 3, 5)).float()  # whose sums are exact in any order
    mask = torch.tensor([[True, True, True, False, False]])
    padded = torch.cat([hidden, torch.full((1, 2, 5), 1e9)], 1)
    if side == "left":
        padded, mask = padded.flip(1), mask.flip(1)
        hidden = hidden.flip(1)
    assert torch.equal(pool(padded, mask, pooling), pool(hidden, torch.ones(1, 3, dtype=torch.bool), pooling))


def test_mean_in_bfloat16_is_summed_in_fp32() -> None:
    hidden = torch.ones(1, 1000, 1, dtype=torch.bfloat16)  # in bf16 alone, 256 + 1 = 256
    found = pool(hidden, torch.ones(1, 1000, dtype=torch.bool), "mean")
    assert found.item() == 1.0
    assert found.dtype == torch.bfloat16


def test_normalize_brings_vectors_to_length_one(model: Any) -> None:
    torch.testing.assert_close(model.embed(TEXTS, normalize=True).norm(dim=1), torch.ones(5, dtype=torch.float64))
    assert not torch.allclose(model.embed(TEXTS).norm(dim=1), torch.ones(5, dtype=torch.float64))


def test_empty_text_has_the_vector_of_its_frame(model: Any) -> None:
    torch.testing.assert_close(model.embed([""])[0], alone(model, "", "mean"), rtol=0, atol=1e-14)


def test_encoder_decoder_gives_its_encoders_vectors(tmp_path: Path) -> None:
    model = load(bart(tmp_path), dtype=torch.float64)
    text = "a cat sat"
    hidden = model.encode(torch.tensor([model.tokenizer.encode(text).ids]))[0]
    torch.testing.assert_close(model.embed([text, "a cat sat on the mat"])[0], hidden.mean(0), rtol=0, atol=1e-13)


def test_decoder_gives_its_vectors(tmp_path: Path) -> None:
    model = load(gpt2(tmp_path), dtype=torch.float64)
    torch.testing.assert_close(model.embed(["한국", "a cat"], pooling="last")[1], alone(model, "a cat", "last"))


def test_unknown_pooling_is_refused(model: Any) -> None:
    with pytest.raises(ValueError, match=r"pooling.*mean.*cls.*max.*last.*'sum'"):
        model.embed(TEXTS, pooling="sum")


# -------------------------------------------------------------------------------------------- what the checkpoint says


def written(folder: Path, kinds: list[str], pooling: dict[str, Any] | None = None) -> Path:
    paths = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize", "Dense": "3_Dense"}
    modules = [
        {"idx": n, "name": str(n), "path": paths[kind], "type": f"sentence_transformers.models.{kind}"}
        for n, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    if pooling is not None:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


def modes(**on: bool) -> dict[str, Any]:
    names = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "lasttoken")
    return {"word_embedding_dimension": 20} | {f"pooling_mode_{name}": on.get(name, False) for name in names}


@pytest.mark.parametrize(
    ("kinds", "pooling", "said"),
    [
        (["Transformer", "Pooling"], modes(mean_tokens=True), ("mean", False)),
        (["Transformer", "Pooling", "Normalize"], modes(cls_token=True), ("cls", True)),
        (["Transformer", "Pooling"], modes(max_tokens=True), ("max", False)),
        (["Transformer", "Pooling"], modes(lasttoken=True), ("last", False)),
        (["Transformer", "Pooling"], {"embedding_dimension": 20, "pooling_mode": "cls"}, ("cls", False)),
        (["Transformer", "Normalize"], None, ("mean", True)),
    ],
)
def test_recipe_is_that_of_modules_json(tmp_path: Path, kinds: Any, pooling: Any, said: Any) -> None:
    assert read_pooling(written(tmp_path, kinds, pooling)) == said


def test_without_files_it_is_the_mean(tmp_path: Path) -> None:
    assert read_pooling(tmp_path) == read_pooling(None) == ("mean", False)


def test_embed_follows_the_recipe_and_the_caller_wins(tmp_path: Path) -> None:
    model = load(written(bert(tmp_path, "Model"), ["Transformer", "Pooling", "Normalize"], modes(cls_token=True)))
    assert torch.equal(model.embed(TEXTS), model.embed(TEXTS, pooling="cls", normalize=True))
    assert torch.equal(model.embed(TEXTS, pooling="max"), model.embed(TEXTS, pooling="max", normalize=True))
    assert not torch.equal(model.embed(TEXTS, normalize=False), model.embed(TEXTS))


@pytest.mark.parametrize(
    ("kinds", "pooling", "message"),
    [
        (["Transformer", "Pooling", "Dense"], modes(mean_tokens=True), r"Transformer.*Pooling.*Dense"),
        (["Transformer", "Pooling", "Pooling"], modes(mean_tokens=True), r"Transformer.*Pooling"),
        (
            ["Transformer", "Pooling"],
            modes(mean_sqrt_len_tokens=True),
            "mean_sqrt_len_tokens",
        ),
        (["Transformer", "Pooling"], modes(mean_tokens=True, cls_token=True), r"cls_token.*mean_tokens"),
        (["Transformer", "Pooling"], modes(), "mean.*cls.*max.*last"),
    ],
)
def test_what_sentence_transformers_would_do_and_embed_does_not_is_refused(
    tmp_path: Path, kinds: Any, pooling: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read_pooling(written(tmp_path, kinds, pooling))


def test_both_given_no_file_is_asked(tmp_path: Path) -> None:
    model = load(written(bert(tmp_path, "Model"), ["Transformer", "Dense"]))
    with pytest.raises(ValueError, match=r"pooling=.*normalize="):
        model.embed(TEXTS, pooling="cls")
    assert model.embed(TEXTS, pooling="cls", normalize=False).shape == (5, 20)


def test_missing_pooling_file_and_paths_elsewhere_are_refused(tmp_path: Path) -> None:
    written(tmp_path, ["Transformer", "Pooling"])
    with pytest.raises(FileNotFoundError, match=r"Pooling.*1_Pooling/config.json"):
        read_pooling(tmp_path)
    (tmp_path / "modules.json").write_text('[{"type": "a.Pooling", "path": "../elsewhere"}]')
    with pytest.raises(ValueError, match=r"Pooling.*'\.\./elsewhere'"):
        read_pooling(tmp_path)
    (tmp_path / "modules.json").write_text("[7]")
    with pytest.raises(ValueError, match=r"list.*7"):
        read_pooling(tmp_path)


def test_capitals_are_made_small_where_the_checkpoint_says_so(tmp_path: Path) -> None:
    folder = gpt2(tmp_path)
    plain = load(folder).embed(["THE CAT", "the cat"])
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 11, "do_lower_case": true}')
    model = load(folder)
    small = model.embed(["THE CAT", "the cat"])
    assert not torch.equal(plain[0], plain[1])
    assert torch.equal(small[0], small[1])
    with pytest.raises(ValueError, match=r"text.*0.*\d+.*11"):
        model.embed(["a cat sat on a mat " * 9])
    with pytest.raises(TypeError, match=r"texts.*str.*'THE CAT'"):  # not its letters
        model.embed("THE CAT")
