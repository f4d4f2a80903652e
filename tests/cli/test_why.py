"""`regard look --why`: what the strongest links do, measured, left out where it takes long, and kept in captures."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from speaking_twins import bert, gpt2, t5

import regard
from regard import edits, metrics
from regard.cli import main
from regard.session import effects
from regard.session.session import look_at
from regard.training.tokenizers import byte_tokenizer

pytestmark = pytest.mark.usefixtures("plain")

TEXT = "The animal did not cross the street because it was too tired."


def albert(path: Path) -> None:
    sizes = {"hidden_size": 12, "num_attention_heads": 3, "num_hidden_layers": 2, "intermediate_size": 16}
    model = regard.build("albert", **sizes, embedding_size=8, vocab_size=256, max_position_embeddings=64)
    model.tokenizer = byte_tokenizer()
    model.save(path)


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """A function that gives the directory of a tiny model, which it makes once."""
    folder = tmp_path_factory.mktemp("why")
    make = {"albert": albert, "bert": partial(bert, head="ForMaskedLM"), "gpt2": gpt2, "t5": t5}

    def twin(name: str) -> str:
        if not (folder / name).exists():
            make[name](folder / name)
        return str(folder / name)

    return twin


@pytest.fixture
def look(run: Callable[..., str], twin: Callable[[str], str]) -> Callable[..., dict[str, Any]]:
    """A function that looks at the text with a tiny model and gives the JSON."""

    def look(name: str, *typed: str) -> dict[str, Any]:
        values: dict[str, Any] = json.loads(run("look", TEXT, "--model", twin(name), "--json", *typed))
        return values

    return look


@pytest.mark.parametrize("name", ["bert", "gpt2", "t5"])
def test_effect_of_a_link_is_what_regard_effect_measures(look, twin, name):
    said = look(name, "--top", "3")
    assert said["why"] == "measured"
    model = regard.load(twin(name))
    ids = model.tokenizer.batch([TEXT]).input_ids
    decoder = {} if name in ("bert", "gpt2") else {"decoder_input_ids": torch.tensor([[model.start]])}

    def read() -> torch.Tensor:
        output = model(ids, **decoder)
        return output.last_hidden_state if not decoder else output.encoder_last_hidden_state

    for link in said["links"]:
        single = edits.knock_out(link["layer"], link["head"], link["query"], link["key"])
        found = regard.effect(torch.no_grad()(read), model, single, metrics.moved(link["query"]), controls=0)
        assert link["effect"] == pytest.approx(found.value, rel=1e-4)
        assert link["weight"] == pytest.approx(found.weight, rel=1e-4)
        assert link["effect"] > 0


def test_effects_can_be_left_out(look, run, twin):
    said = look("bert", "--no-why")
    assert (said["why"], {link["effect"] for link in said["links"]}) == ("off", {None})
    assert "moves" not in run("look", TEXT, "--model", twin("bert"), "--no-why")


@pytest.mark.parametrize("limit", ["OPERATIONS", "LONGEST"])
def test_effects_that_take_long_are_measured_on_request(look, run, twin, monkeypatch, limit):
    monkeypatch.setattr(effects, limit, 5)
    said = look("bert")
    assert (said["why"], {link["effect"] for link in said["links"]}) == ("cost", {None})
    tokens, runs = len(said["tokens"]), len(said["links"]) + 1
    for lang in ("en", "ko"):
        out = run("look", TEXT, "--model", twin("bert"), "--lang", lang)
        (line,) = [line for line in out.splitlines() if "--why" in line]
        assert {str(tokens), str(runs)} <= set(re.findall(r"\d+", line))
    asked = look("bert", "--why")
    assert asked["why"] == "measured"
    assert min(link["effect"] for link in asked["links"]) > 0


def test_estimate_grows_with_tokens_links_and_parameters(twin):
    short, long = (look_at(text, twin("bert")) for text in ("the cat", TEXT))
    assert effects.operations(short, 8) < effects.operations(short, 9) < effects.operations(long, 9)
    assert effects.operations(short, 0) == 2 * len(short.tokens) * sum(p.numel() for p in short.model.parameters())


def test_model_whose_layers_run_twice_is_shown_without_effects(look, run, twin, capsys):
    said = look("albert", "--all")
    assert said["why"] == "model"
    assert "ALBERT" in said["why_not"]
    assert "ALBERT" in run("look", TEXT, "--model", twin("albert"), "--all")
    capsys.readouterr()
    assert main(["look", TEXT, "--model", twin("albert"), "--all", "--why"]) == 2
    assert "several times" in capsys.readouterr().err


def test_saved_capture_keeps_the_effects_and_shows_them(look, run):
    said = look("bert", "--save", "run.regard", "--token", "it")
    kept = regard.open("run.regard").effects
    assert [effect.value for effect in kept] == [link["effect"] for link in said["links"]]
    out = run("look", "run.regard", "--token", "it")
    assert f"moves {100 * kept[0].value:.1f} %" in re.sub(" +", " ", out)
    shown = json.loads(run("look", "run.regard", "--json"))["effects"]
    assert [effect["effect"] for effect in shown] == [effect.value for effect in kept]
    assert shown[0]["edits"][0]["function"] == "knock_out"


def test_exported_page_carries_the_effects(look, tmp_path):
    page = tmp_path / "look.html"
    link = look("bert", "--html", str(page))["links"][0]
    measured = json.loads(re.search(r'"effects":(\{"\d.*?\]*?"heads":null\}\})', page.read_text("utf-8"))[1])
    (found,) = (
        one for one in measured[f"{link['query']}.{link['key']}"]["links"] if one["head"] == link["head"]
        and one["layer"] == link["layer"]
    )  # fmt: skip
    assert found["effect"] == pytest.approx(link["effect"], rel=1e-6)


def test_text_without_links_is_shown_as_before(run, twin):
    said = json.loads(run("look", "the", "--model", twin("bert"), "--json"))
    assert (said["why"], said["links"]) == ("links", [])


@pytest.mark.parametrize("file", ["a.png", "a.npz", "a.regard"])
def test_why_is_refused_for_what_is_no_text(twin, tmp_path, capsys, file):
    Image.new("RGB", (32, 32)).save(tmp_path / "a.png")
    np.savez(tmp_path / "a.npz", **dict.fromkeys("qkv", np.ones((2, 3, 4), "f4")))
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    with regard.watch(layer) as seen:
        layer(torch.zeros(1, 3, 8))
    seen.save(tmp_path / "a.regard")
    assert main(["look", str(tmp_path / file), "--why"]) == 2
    assert "--why" in capsys.readouterr().err
    assert main(["look", str(tmp_path / file), "--no-why"]) == (2 if file == "a.png" else 0)  # an image needs a model
