"""`regard survey`: what it prints, in both languages and as JSON, and how it ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import regard
from regard.cli import main
from regard.edits.survey import Survey
from regard.training.tokenizers import byte_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tiny model and a file of texts."""
    folder = tmp_path_factory.mktemp("survey")
    model = regard.build("gpt2", n_embd=12, n_head=3, n_layer=2, n_positions=32, vocab_size=256, seed=1)
    model.tokenizer = byte_tokenizer()
    model.save(folder / "model")
    (folder / "texts.txt").write_text("to be or not\n\nto bee\nabc\n")
    return folder


def survey(folder: Path, *typed: str) -> int:
    return main(["survey", str(folder / "texts.txt"), "--model", str(folder / "model"), "--lang", "en", *typed])


def test_table_has_the_strongest_heads_of_each_measure(folder, capsys):
    assert survey(folder, "--measure", "induction", "--measure", "first", "--top", "2") == 0
    printed = capsys.readouterr().out
    expected = regard.survey(regard.load(folder / "model"), folder / "texts.txt", ("induction", "first"))
    assert expected.text(count=2) in printed
    assert printed.startswith("model   3 texts, 2 layers")
    assert [line.split()[-2] for line in printed.splitlines() if "blocks" in line] == ["2", "2", "3", "3"]


def test_narrow_terminal_gets_no_names_of_modules(folder, capsys, terminal):
    terminal(60)
    assert survey(folder) == 0
    assert "blocks" not in capsys.readouterr().out
    terminal(200)
    assert survey(folder) == 0
    assert "blocks" in capsys.readouterr().out


def test_outputs_without_a_place_for_them_are_an_error(folder, tmp_path, capsys):
    assert survey(folder, "--measure", "output") == 2
    assert "--out" in capsys.readouterr().err
    assert survey(folder, "--measure", "output", "--out", str(tmp_path / "run")) == 0
    kept = Survey.open(tmp_path / "run")
    assert kept.outputs.keys() == set(kept.names)


def test_korean_table(folder, capsys):
    assert survey(folder, "--lang", "ko") == 0
    assert "텍스트 3개, 레이어 2개" in capsys.readouterr().out


def test_json_has_all_numbers(folder, capsys):
    assert survey(folder, "--json", "--limit", "2", "--length", "5", "--measure", "entropy", "--measure", "output") == 0
    printed = json.loads(capsys.readouterr().out)
    texts = ["to be", "to be"]
    expected = regard.survey(regard.load(folder / "model"), texts, ("entropy", "output"))
    assert (printed["texts"], printed["layers"]) == (2, list(expected.names))
    assert printed["measures"]["entropy"]["mean"] == expected["entropy"].mean.tolist()
    assert printed["measures"]["entropy"]["count"] == [[2] * 3] * 2
    outputs = {name: torch.tensor(mean).double() for name, mean in printed["outputs"].items()}
    torch.testing.assert_close(outputs, expected.outputs)


def test_interrupted_command_goes_on(folder, tmp_path, capsys, monkeypatch):
    from regard.models.text import TextModel

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(TextModel, "forward", interrupt)
        assert survey(folder, "--out", str(tmp_path / "run")) == 130
        assert "0 of 3" in capsys.readouterr().err
        assert survey(folder) == 130
        assert "--out" in capsys.readouterr().err
    assert survey(folder, "--out", str(tmp_path / "run")) == 0
    assert Survey.open(tmp_path / "run").texts == 3


@pytest.mark.parametrize(
    ("typed", "values"),
    [
        (["--measure", "depth"], ["depth", "induction"]),
        (["--top", "0"], ["--top", "0"]),
        (["--batch", "0"], ["batch_size", "0"]),
        (["--length", "33"], ["33", "32"]),
    ],
)
def test_bad_options_are_refused(folder, typed, values, capsys):
    assert survey(folder, *typed) == 2
    error = capsys.readouterr().err
    assert [value for value in values if value not in error] == []


def test_missing_and_empty_files_are_refused(folder, tmp_path, capsys):
    assert main(["survey", str(tmp_path / "gone.txt")]) == 2
    assert "gone.txt" in capsys.readouterr().err
    (tmp_path / "empty.txt").write_text("\n")
    assert main(["survey", str(tmp_path / "empty.txt"), "--model", str(folder / "model")]) == 2
    assert "empty.txt" in capsys.readouterr().err
