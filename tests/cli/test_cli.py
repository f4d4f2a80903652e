import builtins
import io
import json
import os
import re
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import regard
import regard.lens.capture
from regard import masks
from regard.cli import inputs, main, preferred_language
from regard.cli import mask as draw_mask
from regard.cli import mask as mask_language
from regard.cli.mask import read_mask
from regard.tables import width

ROOT = Path(__file__).resolve().parents[2]
X = np.array([[0.1, 0.2, 0.3, 0.4], [0.5, 0.6, 0.7, 0.8], [0.9, 1.0, 1.1, 1.2]])
COST = ["cost", "--n", "1000", "--d-model", "512", "--num-heads", "8"]
ASKED = ["generate", "fill", "embed", "classify", "caption", "answer", "match", "features"]
COMMANDS = ["steps", "learn", "look", "effect", "serve", "fetch", "doctor", "diff", "survey", *ASKED]
COMMANDS += ["verify", "train", "mask", "cost", "backends"]


pytestmark = pytest.mark.usefixtures("plain")


def bare(text: str) -> str:
    """A text without colour codes."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def widest(text: str) -> int:
    return max(map(width, bare(text).splitlines()))


def process(*arguments: str, **options) -> subprocess.CompletedProcess:
    """The command line in a process of its own."""
    code = "import sys\nfrom regard.cli import main\nsys.exit(main())"
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | options.pop("env", {})
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=environment,
        capture_output=True,
        timeout=300,
        check=False,
        **options,
    )


def matrices(text: str) -> dict[str, tuple[list[str], list[str], list[list[str]]]]:
    """What `regard steps` printed: by name of the stage, the headers, the labels and the numbers as text."""
    found = {}
    for block in text.split("\n\n"):
        heading, *lines = block.splitlines()
        match = re.search(r"   (\w+) = |   (x)   ", heading)
        if match and lines:
            while not lines[0].startswith("    "):  # the meaning, where it found no room beside the formula
                lines.pop(0)
            cells = [line.split() for line in lines if "…" not in line]
            found[match[1] or match[2]] = (cells[0], [row[0] for row in cells[1:]], [row[1:] for row in cells[1:]])
    return found


# --------------------------------------------------------------------------------------------------------------- help


def test_help_lists_the_commands(run):
    assert re.findall(r"^  (\w+)  ", run("--help").split("Commands:")[1], re.MULTILINE) == COMMANDS


def test_list_of_commands_speaks_korean(run, monkeypatch):
    monkeypatch.setenv("LANG", "ko_KR.UTF-8")
    korean = run("--help")
    assert korean == run()
    assert korean.startswith("사용법: regard [OPTIONS] COMMAND [ARGS]...\n")
    assert re.findall(r"^  (\w+)  ", korean.split("명령:")[1], re.MULTILINE) == COMMANDS
    assert "이 도움말을 보여 줍니다." in korean.split("옵션:")[1]


def test_no_arguments_print_the_help(run):
    assert run() == run("--help")


def test_version_is_the_package_version(run):
    assert run("--version") == f"regard {regard.__version__}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_speaks_korean_where_the_locale_does(run, monkeypatch, command):
    english = run(command, "-h")
    monkeypatch.setenv("LANG", "ko_KR.UTF-8")
    korean = run(command, "--help")
    assert not re.search("[가-힣]", english)
    after = (english.split("Options:")[1], korean.split("옵션:")[1])
    options = [re.findall(r"^  (-.*?)  +(.+)", text, re.MULTILINE) for text in after]
    assert [name for name, _ in options[0]] == [name for name, _ in options[1]] != []
    untranslated = [name for name, said in options[1] if not re.search("[가-힣]", said)]
    assert set(untranslated) <= {"--dtype DTYPE"}  # a list of names
    assert not re.search("Usage|Options|Arguments|required|default:|Show this", korean)


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "cost"])
def test_one_korean_term_stands_for_one_thing(run, command):
    """텍스트, 이미지 (a figure that is drawn is a 그림), 맵, 레이어, 윈도, 글로벌, 셀프, 크로스, 그리디, 폴더."""
    said = run(command, "--help", "--lang", "ko")
    assert re.findall("글(?!로벌)|사진|지도|층|창|전역|교차|greedy|디렉터리", said) == []


@pytest.mark.parametrize("command", ["steps", "doctor", "diff", "verify"])
def test_help_says_when_the_answer_is_exit_code_1(run, command):
    assert re.search(r"Exit code: 0.* 1 if", run(command, "--help", "--lang", "en"))
    assert re.search(r"종료 코드: .*0.* 1\b|종료 코드: .*1", run(command, "--help", "--lang", "ko"))


@pytest.mark.parametrize(
    ("command", "english", "korean"),
    [("match", "best first", "잘 맞는 것부터"), ("serve", "the first one reads", "첫째가 읽음")],
)
def test_korean_help_says_what_the_english_says(run, command, english, korean):
    assert english in " ".join(run(command, "--help").split())
    assert korean in " ".join(run(command, "--help", "--lang", "ko").split())


@pytest.mark.parametrize("lang", ["en", "ko"])
@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)])
def test_help_fits_eighty_columns(run, command, lang, monkeypatch):
    monkeypatch.setenv("LC_ALL", lang)
    assert widest(run(*command, "--help")) <= 80


@pytest.mark.parametrize(
    ("arguments", "environment", "lang"),
    [
        ([], {}, "en"),
        ([], {"LANG": "ko"}, "ko"),
        ([], {"LANG": "ko_KR.UTF-8", "LC_MESSAGES": "en_US.UTF-8"}, "en"),
        ([], {"LC_MESSAGES": "ko_KR", "LANG": "en_US"}, "ko"),
        ([], {"LC_ALL": "C", "LC_MESSAGES": "ko_KR", "LANG": "ko_KR"}, "en"),
        ([], {"LC_ALL": "", "LANG": "ko_KR"}, "ko"),
        (["steps", "--lang", "ko"], {}, "ko"),
        (["steps", "--lang=en", "--help"], {"LANG": "ko_KR"}, "en"),
        (["steps", "--lang"], {"LANG": "ko_KR"}, "ko"),
        (["--lang=ko", "steps", "--lang", "en"], {}, "en"),
        (["--lang", "en", "steps", "--lang=ko"], {}, "ko"),
        ([], {"LANG": "kok_IN"}, "en"),
        ([], {"LANG": "KO"}, "ko"),
        ([], {"LANG": "ko@variant"}, "ko"),
        ([], {"LANG": "ko.eucKR"}, "ko"),
        ([], {"LANG": "en_US", "LANGUAGE": "ko"}, "ko"),
        ([], {"LANG": "en_US", "LANGUAGE": "de:ko_KR:en"}, "ko"),
        ([], {"LANG": "ko_KR", "LANGUAGE": "en:ko"}, "en"),
        ([], {"LANG": "ko_KR", "LANGUAGE": "de"}, "en"),
        ([], {"LANG": "ko_KR", "LANGUAGE": ""}, "ko"),
        ([], {"LANG": "C.UTF-8", "LANGUAGE": "ko"}, "en"),
        ([], {"LANGUAGE": "ko"}, "en"),
        (["--lang", "en"], {"LANG": "ko_KR", "LANGUAGE": "ko"}, "en"),
        (["--lang", "fr"], {"LANG": "ko_KR"}, "ko"),
    ],
)
def test_language_is_that_of_the_option_and_then_of_the_locale(arguments, environment, lang):
    assert preferred_language(arguments, environment) == lang


def test_help_imports_neither_torch_nor_numpy_nor_matplotlib():
    code = (
        "import sys\nfrom regard.cli import main\n"
        f"for command in {COMMANDS}: assert main([command, '--help']) == 0\n"
        "assert main([]) == 0\n"
        "print(sorted({'torch', 'numpy', 'matplotlib', 'safetensors', 'typer'} & sys.modules.keys()))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.splitlines()[-1] == "['typer']"


@pytest.mark.parametrize("library", ["typer", "rich"])
def test_missing_library_is_named_with_the_command_that_installs_it(fail, monkeypatch, library):
    monkeypatch.setitem(sys.modules, library, None)
    assert re.search(rf"import of {library} .*: pip install 'regard\[cli\]'$", fail("--help", code=1).rstrip())


def test_missing_matplotlib_is_named_with_the_command_that_installs_it(fail, monkeypatch):
    for name in ("matplotlib", "matplotlib.font_manager"):
        monkeypatch.setitem(sys.modules, name, None)
    assert "'regard[figures]'" in fail("steps", "--figure", "cat.png", code=1)


# ---------------------------------------------------------------------------------------------------- errors and exits


# torch is imported once, for a copy of the process for each command, which runs to the end of the interpreter.
COPIES = """
import os, sys
import regard.cli.app, regard.cli.attention, regard.op
from regard.cli import main
statuses = []
for arguments in sys.argv[2:]:
    child = os.fork()
    if not child:
        sys.exit(main(arguments.split()))
    statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
with open(sys.argv[1], "w") as report:
    print(*statuses, file=report)
os._exit(0)  # its own standard output is of no use either
"""


def run_copies(commands: list[str], stdout: int, folder: Path) -> tuple[list[int], bytes]:
    """The exit status of each command line with this standard output, and what all of them said."""
    python = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", COPIES]  # from Python 3.12 on os.fork warns
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [*python, str(folder / "report"), *commands],
        stdout=stdout,
        stderr=subprocess.PIPE,
        env=environment,
        timeout=300,
        check=True,
    )
    return [int(status) for status in (folder / "report").read_text().split()], ended.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_closed_pipe_ends_quietly_and_not_by_an_answer(tmp_path):
    reading, writing = os.pipe()
    os.close(reading)
    commands = ["steps", "steps --json", "--help", "mask causal --queries 999"]
    statuses, said = run_copies(commands, writing, tmp_path)
    os.close(writing)
    assert (statuses, said) == ([141] * 4, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_answer_that_cannot_be_written_is_told_once(tmp_path):
    with Path("/dev/full").open("w") as full:
        statuses, said = run_copies(["--help", "steps", "steps --json"], full.fileno(), tmp_path)
    assert statuses == [2] * 3
    assert re.fullmatch(rb"(regard: .*No space left on device\n){3}", said)


def test_interruption_while_the_command_line_is_imported_ends_quietly(monkeypatch, capsys):
    def interrupted(name, *rest):
        if name == "regard.cli.app":
            raise KeyboardInterrupt
        return real(name, *rest)

    real = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", interrupted)
    assert main(["--help"]) == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["attend"], r"'attend'.*'regard --help'"),
        (["--quiet"], r"--quiet.*'regard --help'"),
        (["cost", "--n", "3"], r"'--d-model'.*'regard cost --help'"),
        (["mask"], r"'SPEC'.*'regard mask --help'"),
        (["cost", "--n", "few", "--d-model", "4"], "'few'"),
        (["cost", "--n=1e3", "--d-model", "4"], "'1e3'"),
        (["cost", "--n=3", "--n", "1e3", "--d-model", "4"], "'1e3'"),
        (["cost", "--n", "3", "--n=1e3", "--d-model", "4"], "'1e3'"),
        (["backends", "--softcap", "x"], "'x'"),
        (["look", "나는", "고양이를"], r"고양이를.*'regard look --help'"),
        (["mask", "causal", "&", "causal"], r"causal.*'regard mask --help'"),
        (["doctor", "a.regard", "b.regard"], r"b\.regard.*'regard doctor --help'"),
        (["cost", "--n", "7", "--d-model", "5", "--num-heads", "3"], r"d_model.*d_model=5"),
        (["cost", "--n", "0", "--d-model", "5"], r"n.*1.*0"),
        (["cost", "--n", "7", "--d-model", "5", "--dtype", "int8"], "dtype"),
        *(([*words, "--lang", "fr"], "--lang.*'fr'") for words in (["steps"], COST, ["backends"])),
        (["mask", "causal", "--lang", "fr"], r"--lang.*'fr'"),
        (["mask", "causal", "--queries", "0"], r"--queries.*1.*0"),
        (["mask", "causal", "--keys", "-3"], r"--keys.*1.*-3"),
        (["mask", "causal", "--tiles", "0"], r"--tiles.*1.*0"),
        (["mask", "causal", "--head", "1"], r"--head.*1.*causal\(\).*1.*0"),
        (["mask", "padding([3, 5])", "--batch", "2"], r"--batch.*2.*padding\(\[3, 5\]\).*2"),
        (["mask", "padding([3, 5])", "--batch", "-1"], r"--batch.*-1"),
        (["mask", "causal", "--queries", "1000000"], r"1,000,000.*61,042,969"),
        (["mask", "documents([0, 0, 1])"], r"3.*8"),
        (["mask", "causal", "--figure", "m.gif"], r"--figure.*'m\.gif'.*\.png.*\.svg.*\.pdf"),
        (["backends", "--shape", "1,8,64"], r"--shape.*B,H,N,D.*1,8,1024,64.*'1,8,64'"),
        (["backends", "--shape", "1,-8,64,3"], "--shape"),
        (["backends", "--shape", "1,8,64,0"], r"D.*1.*1,048,576.*0"),
        (["backends", "--keys", "0"], r"--keys.*1.*1,048,576.*0"),
        (["backends", "--num-kv-heads", "3"], r"q.*k"),
        (["backends", "--shape", ",".join(["1048576"] * 4)], "tensor"),
        (["backends", "--dtype", "int8"], r"--dtype.*float64.*float32.*bfloat16.*float16.*'int8'"),
        (["backends", "--device", "abacus"], r"--device.*'abacus'"),
        (["backends", "--softcap", "-1"], r"softcap.*0.*-1"),
        (["backends", "--dropout", "1"], r"dropout.*0.*1"),
        (["backends", "--shape", "64,64,1048576,8", "--mask", "causal"], r"causal\(\).*4,294,967,296.*8.*32"),
        (["backends", "--mask", "padding([3, 5])"], r"padding\(\[3, 5\]\).*2.*1"),
        (["steps", "--mask", "sideways"], "'sideways'"),
        (["steps", "--words", "The cat"], r"2.*3"),
        (["steps", "--num-heads", "3"], r"w_q.*4.*3"),
        (["steps", "--head", "1"], r"head.*1"),
        (["steps", "--batch", "-1"], r"batch.*-1.*1"),
        (["steps", "--scale", "inf"], r"scale.*inf"),
        (["steps", "--json", "--head", "1", "--num-heads", "2"], "--json"),
        (["steps", "--demo", "--input", "x.npy"], r"--demo.*--input"),
        (["steps", "--input", "x.npz"], r"'x\.npz'"),
        (["steps", "--input", "x.safetensors"], r"'x\.safetensors'"),
        (["steps", "--input", "x.pt"], r"'x\.pt'.*\.npz.*\.npy.*\.safetensors"),
    ],
)
def test_wrong_input_is_told_in_one_line(fail, arguments, message):
    assert re.search(message, fail(*arguments))


def test_interrupt_ends_quietly(monkeypatch, capsys):
    def interrupted(*arguments, **named):
        raise KeyboardInterrupt

    monkeypatch.setattr("regard.costs.cost", interrupted)
    assert main(COST) == 130
    assert capsys.readouterr().err.strip() == ""


def test_reader_that_has_left_is_no_error():
    code = "import sys\nfrom regard.cli import main\nsys.exit(main())"
    command = [sys.executable, "-c", code, *COST]
    with subprocess.Popen(
        command, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as child:
        child.stdout.close()
        assert child.stderr.read() == b""


def test_exit_code_reaches_the_shell():
    result = process("cost", "--n", "0", "--d-model", "8")
    assert (result.returncode, result.stdout) == (2, b"")
    assert re.fullmatch(rb"regard: .*n.*1.*0\n", result.stderr)


def test_python_runs_the_package_as_the_command_line():
    def run(*arguments):
        command, env = [sys.executable, "-m", "regard", *arguments], os.environ | {"PYTHONPATH": str(ROOT)}
        return subprocess.run(command, env=env, capture_output=True, text=True, check=False)

    said = run("--version")
    assert (said.returncode, said.stdout, said.stderr) == (0, f"regard {regard.__version__}\n", "")
    refused = run("cost", "--n", "0", "--d-model", "8")
    assert refused.returncode == 2
    assert refused.stderr.startswith("regard: ")


def test_narrow_encoding_prints_question_marks_instead_of_failing():
    result = process(*COST, "--lang", "ko", env={"PYTHONIOENCODING": "cp949"})
    assert (result.returncode, result.stderr) == (0, b"")
    assert "· 점수 QK?" in result.stdout.decode("cp949")


# -------------------------------------------------------------------------------------------------------------- steps


@pytest.mark.parametrize("options", [[], ["--demo"], ["--mask", "causal", "--softcap", "2", "--scale", "0.3"]])
def test_steps_print_the_numbers_of_regard_steps(run, options):
    given = {"mask": masks.causal(), "softcap": 2.0, "scale": 0.3} if "--mask" in options else {}
    truth = regard.steps(X, X, X, **given)
    found = matrices(run("steps", *options))
    between = ["capped", "masked"] if given else []
    assert list(found) == ["x", "q", "k", "v", "scores", "scaled", *between, "weights", "output"]
    for name, (headers, labels, numbers) in found.items():
        values = X if name == "x" else getattr(truth, name)
        assert labels == ["The", "cat", "sat"]
        assert headers == (["0", "1", "2", "3"] if name in ("x", "q", "k", "v", "output") else labels)
        for row, texts in zip(values, numbers, strict=True):
            for value, text in zip(row, texts, strict=True):
                decimals = len(text.partition(".")[2])
                assert text == ("−∞" if np.isinf(value) else f"{value:.{decimals}f}")
                assert decimals == 4 or round(value, decimals) == pytest.approx(value, abs=1e-12) or np.isinf(value)


def test_demo_numbers_its_four_steps(run):
    headings = [line for line in run("steps").splitlines() if re.match(r"\d  ", line)]
    assert [line.split("   ")[:2] for line in headings] == [
        ["1  Scores", "scores = q·kᵀ"],
        ["2  Divide by √d_k", "scaled = scores / √4"],
        ["3  Softmax", "weights = softmax(scaled)"],
        ["4  Weighted sum of V", "output = weights·v"],
    ]


def test_demo_says_where_its_numbers_come_from_and_that_rows_sum_to_one(run):
    lines = run("steps").splitlines()
    assert lines[1] == "x has shape (3, 4); W_Q = W_K = W_V = the identity, so q = k = v = x"
    assert lines[-1] == "Check: the rows of weights sum to 1 (3 rows, within 8.9e-16)"


@pytest.mark.parametrize("lang", ["en", "ko"])
def test_demo_fits_one_screen(capsys, terminal, lang):
    terminal(80)
    assert main(["steps", "--lang", lang]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") <= 54  # x, Q, K and V, and the four steps
    assert widest(out) <= 80


def test_demo_speaks_korean(run):
    out = run("steps", "--lang", "ko")
    assert re.findall(r"^(\d  .+?)   ", out, re.MULTILINE) == [
        "1  점수",
        "2  √d_k로 나누기",
        "3  softmax",
        "4  V의 가중합",
    ]
    assert out.splitlines()[-1] == "확인: 가중치의 각 행의 합은 1입니다 (3행, 허용 오차 8.9e-16)"


def test_words_label_rows_and_columns_and_line_up_in_hangul(run):
    out = run("steps", "--words", "나는 고양이를 봤다")
    headers, labels, _ = matrices(out)["weights"]
    assert headers == labels == ["나는", "고양이를", "봤다"]
    lines = out.split("3  Softmax")[1].splitlines()[1:5]
    assert len({width(line) for line in lines}) == 1


def test_scale_of_ones_own_is_not_called_division_by_the_root(run):
    assert "2  Scale   scaled = scores · 0.3   " in run("steps", "--scale", "0.3")


def test_heads_split_the_demo_and_one_is_shown(run):
    out = run("steps", "--num-heads", "2", "--head", "1")
    truth = regard.steps(x=X, w_q=np.eye(4), w_k=np.eye(4), w_v=np.eye(4), num_heads=2).weights[0, 1]
    assert "shown: batch 0, head 1 of (1, 2)\n" in out
    assert "so q = k = v = x, split into 2 heads\n" in out
    np.testing.assert_allclose(np.array(matrices(out)["weights"][2], float), truth, atol=5.1e-5)


def test_row_that_sees_nothing_is_counted(run):
    out = run("steps", "--mask", "~prefix(3)")
    assert (
        out.splitlines()[-1] == "Check: the rows of weights sum to 1 (3 rows, within 8.9e-16; 3 see nothing and are 0)"
    )
    assert matrices(out)["weights"][2] == [["0", "0", "0"]] * 3


def test_weights_are_a_heat_map_on_a_terminal(capsys, terminal):
    terminal(120)
    main(["steps", "--mask", "causal"])
    rows = capsys.readouterr().out.split("softmax(masked)")[1].splitlines()[2:5]
    shades = [re.findall(r"\x1b\[[0-9;]*48;[0-9;]*m (\S+) ", row) for row in rows]
    assert shades == [["1.0000"], ["0.3729", "0.6271"], ["0.1152", "0.2668", "0.6180"]]


def test_columns_that_find_no_room_are_told(capsys, terminal, run):
    np.save("x.npy", np.random.default_rng(0).normal(size=(13, 17)))
    wide = run("steps", "--input", "x.npy")
    assert "   … 12 × 12 of 13 × 13; --json has all\n" in wide
    assert len(matrices(wide)["scores"][0]) == 12
    terminal(40)
    main(["steps", "--input", "x.npy"])
    narrow = bare(capsys.readouterr().out)
    assert widest(narrow) <= 40
    assert len(matrices(narrow)["weights"][0]) == 4
    assert "   … 12 × 4 of 13 × 13; --json has all" in narrow


# ------------------------------------------------------------------------------------------------------------- --input


def values_of(run, *arguments: str) -> dict[str, np.ndarray]:
    said = json.loads(run("steps", *arguments, "--json"), parse_constant=pytest.fail)
    arrays = {name: np.array(value, float) for name, value in said["values"].items()}
    assert {name: list(array.shape) for name, array in arrays.items()} == said["shapes"]
    return arrays


def qkv() -> dict[str, np.ndarray]:
    """B 2, H 4, Hkv 2, Nq 3, Nk 7, D 5, Dv 11."""
    random = np.random.default_rng(0)
    return {
        "q": random.normal(size=(2, 4, 3, 5)),
        "k": random.normal(size=(2, 2, 7, 5)),
        "v": random.normal(size=(2, 2, 7, 11)),
    }


def test_npz_with_q_k_v_gives_their_steps(run):
    np.savez("a.npz", **qkv())
    found, truth = values_of(run, "--input", "a.npz", "--mask", "causal"), regard.steps(**qkv(), mask=masks.causal())
    for name in ("q", "k", "v", "scores", "scaled", "capped", "biased", "masked", "weights", "output"):
        np.testing.assert_array_equal(found[name], getattr(truth, name))
    assert "a.npz: q (2, 4, 3, 5), k (2, 2, 7, 5), v (2, 2, 7, 11)\n" in run("steps", "--input", "a.npz")


def test_chosen_batch_row_and_head_are_printed(run):
    np.savez("a.npz", **qkv())
    found = matrices(run("steps", "--input", "a.npz", "--batch", "1", "--head", "3"))
    truth = regard.steps(**qkv()).output[1, 3]
    np.testing.assert_allclose(np.array(found["output"][2], float), truth, atol=5.1e-5)


def test_compressed_npz_with_x_and_matrices_gives_their_steps(run):
    random = np.random.default_rng(0)
    arrays = {
        "x": random.normal(size=(2, 3, 5)),
        **{name: random.normal(size=(5, 14)) for name in ("w_q", "w_k", "w_v")},
    }
    np.savez_compressed("a.npz", **arrays)
    truth = regard.steps(**arrays, num_heads=2)
    np.testing.assert_array_equal(values_of(run, "--input", "a.npz", "--num-heads", "2")["output"], truth.output)
    found = matrices(run("steps", "--input", "a.npz", "--num-heads", "2", "--batch", "1", "--head", "1"))
    np.testing.assert_allclose(np.array(found["x"][2], float), arrays["x"][1], atol=5.1e-5)
    np.testing.assert_allclose(np.array(found["weights"][2], float), truth.weights[1, 1], atol=5.1e-5)


def test_npy_is_q_k_and_v_at_once(run):
    x = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32)
    np.save("a.npy", np.asfortranarray(x))
    np.testing.assert_array_equal(values_of(run, "--input", "a.npy")["output"], regard.steps(x, x, x).output)
    assert "\nq = k = v = a.npy\n" in run("steps", "--input", "a.npy")


def test_safetensors_in_bfloat16_give_their_steps(run):
    arrays = {name: torch.from_numpy(array).bfloat16() for name, array in qkv().items()}
    save_file(arrays, "a.safetensors")
    truth = regard.steps(**arrays)
    np.testing.assert_array_equal(values_of(run, "--input", "a.safetensors")["output"], truth.output.double())


@pytest.mark.parametrize("kind", [".npz", ".npy", ".safetensors"])
def test_folder_is_not_read(fail, kind):
    Path(f"a{kind}").mkdir()
    assert f"'a{kind}'" in fail("steps", "--input", f"a{kind}")


@pytest.mark.parametrize("kind", [".npz", ".npy", ".safetensors"])
@pytest.mark.parametrize("content", [b"", b"hello, this is no array", b"\x93NUMPY\x01\x00", b"PK\x03\x04"])
def test_file_that_is_no_array_is_refused(fail, kind, content):
    Path(f"a{kind}").write_bytes(content)
    assert re.search(rf"'a{kind}'.*{kind}", fail("steps", "--input", f"a{kind}"))


def test_npy_that_claims_more_than_it_holds_is_refused(fail):
    np.save("a.npy", np.zeros((100, 7)))
    Path("a.npy").write_bytes(Path("a.npy").read_bytes()[:500])
    assert re.search(r"5,600.*bytes.*\(100, 7\).*372", fail("steps", "--input", "a.npy"))


def npy(shape: str, descr: str = "'<f8'", version: bytes = b"\1\0") -> bytes:
    """An .npy of 24 bytes of data, with any header."""
    header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}".encode()
    return b"\x93NUMPY" + version + len(header).to_bytes(2 if version == b"\1\0" else 4, "little") + header + bytes(24)


def zipped(name: str = "q.npy", content: bytes | None = None) -> bytearray:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as members:
        members.writestr(name, npy("(3,)") if content is None else content)
    return bytearray(out.getvalue())


def patched(at: int, value: int) -> bytes:
    """A zip whose entry in the directory at its end is changed: at 8 flags, at 10 compression, at 24 the size."""
    data = zipped()
    data[data.index(b"PK\1\2") + at] = value
    data[6 if at == 8 else 8 if at == 10 else 22] = value
    return bytes(data)


def with_a_broken_stream() -> bytes:
    data = zipped()
    data[38:44] = b"\xff" * 6
    return bytes(data)


BROKEN = {
    "TokenError": ("a.npy", npy("(3")),
    "a shape that overflows": ("a.npy", npy(f"({10**30},)")),
    "a negative shape": ("a.npy", npy("(-3,)")),
    "terabytes": ("a.npy", npy("(1000000, 1000000)")),
    "terabytes in a zip": ("a.npz", bytes(zipped(content=npy("(1000000, 1000000)")))),
    "objects": ("a.npy", npy("(3,)", "'|O'")),
    "another version": ("a.npy", npy("(3,)", version=b"\3\0")),
    "bytes after the end": ("a.npy", npy("(2,)")),
    "zlib.error": ("a.npz", with_a_broken_stream()),
    "an encrypted zip": ("a.npz", patched(8, 1)),
    "an unknown compression": ("a.npz", patched(10, 99)),
    "a size that is not true": ("a.npz", patched(24, 3)),
    "a text": ("a.npz", bytes(zipped("q.npy", b"no array"))),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_array_is_told_in_one_line(fail, kind):
    name, content = BROKEN[kind]
    Path(name).write_bytes(content)
    for arguments in (("steps", "--input", name), ("look", name)):
        assert re.search(rf"'{name}'.*{name[1:]}", fail(*arguments))


@pytest.mark.parametrize("kind", [".npz", ".npy"])
def test_pickled_objects_are_never_loaded(fail, kind):
    class Trap:
        def __reduce__(self):
            return Path("sprung").touch, ()

    array = np.array([Trap()], dtype=object)
    if kind == ".npz":
        np.savez("a.npz", q=array, k=array, v=array)
    else:
        np.save("a.npy", array)
    assert re.search(rf"'a{kind}'.*{kind}", fail("steps", "--input", f"a{kind}"))
    assert not Path("sprung").exists()


@pytest.mark.parametrize(("names", "held"), [("qk", "'q', 'k'"), ("qkvx", "'q', 'k', 'v', 'x'"), ("", "nothing")])
def test_names_that_are_unknown_or_missing_are_listed(fail, names, held):
    np.savez("a.npz", **dict.fromkeys(names, X))
    assert re.search(rf"'a\.npz'.*{held}.*q.*k.*v.*w_q.*w_k.*w_v", fail("steps", "--input", "a.npz"))


def test_large_file_is_refused_before_it_is_read(fail, monkeypatch):
    np.save("a.npy", np.zeros((100, 7)))
    monkeypatch.setattr(inputs, "MOST_STEPS", 5000)
    assert re.search(r"'a\.npy'.*5,728.*bytes.*5,000", fail("steps", "--input", "a.npy"))


def test_npz_that_unpacks_to_too_much_is_refused(fail, monkeypatch):
    np.savez_compressed("a.npz", **dict.fromkeys("qkv", np.zeros((100, 7))))
    monkeypatch.setattr(inputs, "MOST_STEPS", 5000)
    assert Path("a.npz").stat().st_size < 5000
    assert re.search(r"'a\.npz'.*17,184.*bytes", fail("steps", "--input", "a.npz"))


def test_steps_that_would_fill_the_memory_are_refused(fail):
    np.save("a.npy", np.zeros((5003, 2)))
    assert re.search(r"5,003.*1\.3.*GiB", fail("steps", "--input", "a.npy"))


def test_integers_are_refused_by_the_operation(fail):
    np.save("a.npy", np.eye(3, dtype=int))
    assert re.search(r"q.*int64", fail("steps", "--input", "a.npy"))


def test_weights_that_fail_their_check_end_with_code_1(capsys):
    np.save("a.npy", np.full((2, 3), np.nan))
    assert main(["steps", "--input", "a.npy"]) == 1
    out, err = capsys.readouterr()
    assert "2 of 2 rows are not attention weights" in out
    assert err == ""
    assert main(["steps", "--input", "a.npy", "--json"]) == 1
    said = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert said["check"]["ok"] is False
    assert said["values"]["weights"] == [["nan", "nan"], ["nan", "nan"]]


def test_json_of_the_demo_holds_labels_shapes_values_and_the_check(run):
    said = json.loads(run("steps", "--mask", "causal", "--json"), parse_constant=pytest.fail)
    assert said["labels"] == said["key_labels"] == ["The", "cat", "sat"]
    assert said["shapes"]["output"] == [3, 4]
    assert said["values"]["masked"][0][1:] == ["-inf", "-inf"]
    assert said["values"]["weights"] == regard.steps(X, X, X, mask=masks.causal()).weights.tolist()
    assert said["formulas"]["scaled"] == "scores / √4"
    assert (said["check"]["ok"], said["check"]["rows"], said["check"]["empty_rows"]) == (True, 3, 0)
    assert said["figure"] is None


# -------------------------------------------------------------------------------------------------------------- figures


@pytest.mark.parametrize("command", [["steps"], ["mask", "causal"]])
def test_figure_is_written_into_folders_that_are_made(run, command):
    out = run(*command, "--figure", "new/folder/a.png")
    assert out.splitlines()[-1] == "Figure: new/folder/a.png"
    assert Path("new/folder/a.png").read_bytes().startswith(b"\x89PNG")


def test_figure_of_json_is_named_in_it(run):
    said = json.loads(run("steps", "--json", "--num-heads", "2", "--head", "1", "--figure", "a.svg"))
    assert said["figure"] == "a.svg"
    assert Path("a.svg").read_text().lstrip().startswith("<?xml")


@pytest.mark.parametrize("command", [["steps"], ["mask", "causal"]])
def test_figure_that_cannot_be_written_is_told(fail, command):
    Path("folder.png").mkdir()
    Path("file").touch()
    said = fail(*command, "--figure", "folder.png")
    assert re.search(r"--figure.*'folder\.png'.*\.png.*\.svg.*\.pdf", said)
    assert re.search(r"'file'.*File", fail(*command, "--figure", "file/a.png"))
    said = fail(*command, "--figure", "/proc/a.png")
    assert "'/proc/a.png'" in said


def test_wrong_suffix_makes_no_folder(fail):
    assert re.search(r"--figure.*'new/a\.gif'.*\.png.*\.svg.*\.pdf", fail("steps", "--figure", "new/a.gif"))
    assert not Path("new").exists()


# ---------------------------------------------------------------------------------------------------------------- mask


@pytest.mark.parametrize(
    ("text", "mask"),
    [
        ("causal", masks.causal()),
        (" causal() ", masks.causal()),
        ("causal(offset=2)", masks.causal(offset=2)),
        ("causal(offset=-2)", masks.causal(offset=-2)),
        ("window(2,1)", masks.window(2, 1)),
        ("window(before=2, after=[1, 3])", masks.window(2, [1, 3])),
        ("dilated(2,0,2)", masks.dilated(2, 0, 2)),
        ("~prefix(3)", ~masks.prefix(3)),
        ("padding([3,5])", masks.padding([3, 5])),
        ("padding((3,5), side='left')", masks.padding([3, 5], side="left")),
        ("padding([[True, False]])", masks.padding([[True, False]])),
        ("documents([0,0,1])", masks.documents([0, 0, 1])),
        ("documents(lengths=[2,1], offset=None)", masks.documents(lengths=[2, 1])),
        ("globals([0])", masks.globals([0])),
        ("window(2,0) & ~queries([0])", masks.window(2, 0) & ~masks.queries([0])),
        ("queries([[True, False]])", masks.queries([[True, False]])),
        ("blocks([[True, False], [True, True]], size=2)", masks.blocks([[True, False], [True, True]], 2)),
        ("random_blocks(8, 2, count=1, seed=3)", masks.random_blocks(8, 2, count=1, seed=3)),
        ("dense([[True, False]])", masks.dense([[True, False]])),
        ("causal & padding([3,5])", masks.causal() & masks.padding([3, 5])),
        ("window(2,0) | globals([0])", masks.window(2, 0) | masks.globals([0])),
        ("causal & ~window(1,0) | globals([0])", (masks.causal() & ~masks.window(1, 0)) | masks.globals([0])),
        ("causal & (window(1,0) | globals([0]))", masks.causal() & (masks.window(1, 0) | masks.globals([0]))),
        (" & ".join(["causal"] * 30), None),
    ],
)
def test_mask_language_reads(text, mask):
    assert mask is None or read_mask(text) == mask
    assert read_mask(text).leading


def test_mask_language_knows_every_mask_of_the_module():
    makers = {name for name in masks.__all__ if name.islower() and name != "as_mask"}
    assert set(mask_language.KNOWN) == makers
    assert all(getattr(masks, name) is make for name, make in mask_language.KNOWN.items())


KNOWN = "causal.*window.*dilated.*prefix.*padding.*documents.*globals.*queries.*blocks.*random_blocks.*dense"
LITERALS = "True.*False.*None"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sideways", rf"'sideways'.*{KNOWN}"),
        ("sideways(1) & causal", rf"'sideways'.*'sideways\(1\) & causal'.*{KNOWN}"),
        ('__import__("os")', rf"'__import__'.*'__import__\(.os.\)'.*{KNOWN}"),
        ('__import__("os").system("touch sprung")', "__import__.*system"),
        ("causal.__class__", r"'causal\.__class__'"),
        ("causal().dense(3)", r"'causal\(\)\.dense'.*'causal\(\)\.dense\(3\)'"),
        ("as_mask(3)", r"'as_mask'.*'as_mask\(3\)'"),
        ("(lambda: 1)()", "lambda: 1"),
        ("[causal for _ in [1]]", "causal for _ in"),
        ("causal if True else causal", "causal if True else causal"),
        ("causal ^ causal", r"'causal \^ causal'"),
        ("causal + causal", r"'causal \+ causal'"),
        ("causal and window(1, 0)", r"&.*\|.*~"),
        ("not causal", r"&.*\|.*~"),
        ("-causal", "'-causal'"),
        ("3", "'3'"),
        ("'고양이' & causal", "'고양이'.*'고양이' & causal"),
        ("window(1 + 1, 0)", rf"'1 \+ 1'.*'window\(1 \+ 1, 0\)'.*{LITERALS}"),
        ("window(causal, 0)", rf"'causal'.*'window\(causal, 0\)'.*{LITERALS}"),
        ("window(*[1, 2])", rf"'\*\[1, 2\]'.*'window\(\*\[1, 2\]\)'.*{LITERALS}"),
        ("window(**{'before': 1})", r"\*\*"),
        ("window(b'1', 0)", LITERALS),
        ("window(-True, 0)", "minus"),
        ("padding([-'a'])", "minus"),
        ("window(16777217, 0)", r"'16777217'.*16,777,216"),
        ("window(1e999, 0)", r"'1e999'.*16,777,216"),
        ("window(-1,0)", r"'window\(-1,0\)'.*before.*0.*-1"),
        ("window(1)", r"1.*'after'.*window\(before, after, \*, offset=None\)"),
        ("window", r"'window'.*window\(\).*2"),
        ("causal(later=3)", r"'later'.*causal\(offset=None\)"),
        ("padding([[1], [1, 2]])", r"'padding\(\[\[1\], \[1, 2\]\]\)'"),
        ("padding(None)", r"'padding\(None\)'"),
        ("padding([3, 5]) & padding([3, 5, 7])", r"\[2, 3\]"),
        ("", "''"),
        ("causal &", r"'causal &'.*causal.*window\(2, 1\)"),
        ("causal; causal", "'causal; causal'"),
        ("causal\0", r"'causal\\x00'"),
        ("~" * 40 + "causal", "32"),
        (" & ".join(["causal"] * 40), "32"),
        ("~" * 19_000 + "causal", "'~~~~"),
        ("(" * 300 + "causal" + ")" * 300, r"'\(\(\(\(\("),
        ("[" * 9_000, r"'\[\[\[\["),
        ("causal" + " " * 20_000, r"20,006.*20,000"),
    ],
)
def test_mask_language_refuses_and_shows_the_part(text, message):
    with pytest.raises(ValueError, match=message) as caught:
        read_mask(text)
    assert "\n" not in str(caught.value)
    assert not Path("sprung").exists()


def test_deep_lists_inside_an_argument_do_not_overflow():
    with pytest.raises(ValueError, match="mask"):
        read_mask("padding(" + "[" * 150 + "1" + "]" * 150 + ")")


def test_mask_is_drawn_with_its_counts(run):
    assert run("mask", "window(2, 0) | globals([1])", "--queries", "3", "--keys", "5") == (
        "window(2, 0) | globals([1])   3 queries × 5 keys\n"
        "\n"
        "   0 1 2 3 4\n"
        "0  ■ ■ ■ · ·\n"
        "1  · ■ ■ ■ ·\n"
        "2  · ■ ■ ■ ■\n"
        "\n"
        "■ may look   · hidden\n"
        "visible: 10 of 15 cells (66.7%)\n"
        "tiles of 128 × 128: 0 empty, 1 partial, 0 full\n"
    )


def test_mask_of_one_batch_row_is_drawn(run):
    out = run("mask", "padding([3, 5])", "--batch", "1", "--queries", "1", "--keys", "7")
    assert "0  ■ ■ ■ ■ ■ · ·\n" in out
    assert "shown: batch, head 1, 0 of (2, 1)\n" in out
    assert "visible: 5 of 7 cells (71.4%)\n" in out


def test_tiles_are_drawn_and_counted(run):
    out = run("mask", "causal", "--queries", "11", "--tiles", "4")
    assert "   0 4 8\n0  ▒ · ·\n4  ■ ▒ ·\n8  ■ ■ ▒\n" in out
    assert "■ may look   ▒ partly   · hidden   one sign: 4 × 4 positions\n" in out
    assert "visible: 66 of 121 cells (54.5%)\n" in out
    assert out.endswith("tiles of 4 × 4: 3 empty, 3 partial, 3 full\n")


def test_mask_speaks_korean(run):
    out = run("mask", "causal", "--queries", "3", "--lang", "ko", "--figure", "a.svg")
    assert "쿼리 3개 × 키 3개\n" in out
    assert (
        "보이는 칸: 9칸 중 6칸 (66.7%)\n128 × 128 타일: 모두 가려짐 0개, 일부만 보임 1개, 모두 보임 0개\n그림: a.svg\n"
        in out
    )


@pytest.mark.parametrize(("queries", "keys"), [(37, 37), (131, 7), (5, 20011), (1009, 1013)])
@pytest.mark.parametrize("columns", [30, 80, 120])
def test_large_mask_is_drawn_within_the_terminal(capsys, terminal, queries, keys, columns):
    terminal(columns)
    assert main(["mask", "causal", "--queries", str(queries), "--keys", str(keys)]) == 0
    out = bare(capsys.readouterr().out)
    assert widest(out) <= columns
    drawn = [line for line in out.splitlines() if re.fullmatch(r" *\d*  [■▒·]( [■▒·])*", line)]
    size = int(found[1]) if (found := re.search(r"one sign:\s+(\d+)", out)) else 1
    assert len(drawn) == -(-queries // size)
    assert {line.count("■") + line.count("▒") + line.count("·") for line in drawn} == {-(-keys // size)}


@pytest.mark.parametrize(
    "mask",
    [
        masks.causal(),
        ~masks.window(40, 3),
        masks.dilated(5, 2, 3),
        masks.window([2, 150], 0) & masks.padding([100, 131]),
        masks.dense(torch.rand(3, 131, 263) > 0.5),
        masks.causal() & ~masks.causal(),
    ],
)
def test_visible_cells_are_those_of_the_dense_mask(mask):
    dense = mask.dense(131, 263).expand(*mask.leading, 131, 263)
    for batch, head in np.ndindex(*mask.leading):
        count = int(dense[batch, head].sum())
        assert draw_mask.visible(mask, 131, 263, batch, head) == (count, count)


def test_visible_cells_are_bounded_where_they_are_too_many_to_look_at(run, monkeypatch):
    monkeypatch.setattr(draw_mask, "MOST_CELLS", 128 * 128)
    assert draw_mask.visible(masks.causal(), 256, 256) == (128 * 128, 3 * 128 * 128)
    assert "visible: 16,384 – 49,152 of 65,536 cells (25.0% – 75.0%)\n" in run("mask", "causal", "--queries", "256")


# ------------------------------------------------------------------------------------------------------------ cost


@pytest.mark.parametrize("lang", ["en", "ko"])
def test_cost_in_a_pipe_is_the_whole_table(run, monkeypatch, lang):
    monkeypatch.setenv("COLUMNS", "20")
    sizes, *table, note = regard.cost(1000, 512, 8).text(lang).split("\n")
    assert run(*COST, "--lang", lang) == "\n".join([sizes, "", *table, "", note, ""])


def test_cost_takes_every_size(run):
    sizes = {"head_dim": 7, "kernel": 5, "batch": 3, "layers": 11, "dtype": "bfloat16"}
    options = [part for name, value in sizes.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    found = json.loads(run(*COST, *options, "--num-kv-heads", "2", "--json"))
    assert found == regard.cost(1000, 512, 8, num_kv_heads=2, **sizes).as_dict()


@pytest.mark.parametrize("lang", ["en", "ko"])
def test_cost_leaves_out_the_formulas_where_they_do_not_fit(capsys, terminal, lang):
    text = regard.cost(1000, 512, 8).text(lang)
    terminal(80)
    main([*COST, "--lang", lang])
    narrow = bare(capsys.readouterr().out)
    assert widest(narrow) <= 80
    assert "O(n²·d), RNN O(n·d²), CNN O(k·n·d²)\n" in narrow
    assert "4·B·n·d²" not in narrow
    assert [number for number in re.findall(r"[\d,.]+ (?:FLOP|GFLOP|B|MiB)", text) if number not in narrow] == []
    terminal(120)
    main([*COST, "--lang", lang])
    wide = bare(capsys.readouterr().out)
    assert widest(wide) <= 120
    assert [line for line in text.split("\n")[1:-1] if line not in wide.split("\n")] == []


# ------------------------------------------------------------------------------------------------------------ backends


def rows_of(out: str) -> list[list[str]]:
    return [re.split("  +", line, maxsplit=2) for line in out.split("─\n")[1].split("\n\n")[0].splitlines()]


@pytest.mark.parametrize(
    ("options", "given"),
    [
        ([], {}),
        (["--softcap", "30"], {"softcap": 30.0}),
        (["--mask", "window(5, 0)"], {"mask": masks.window(5, 0)}),
        (["--dropout", "0.1"], {"dropout": 0.1}),
        (["--gradient"], {}),
    ],
)
def test_backends_say_what_explain_says(run, options, given):
    q = torch.zeros(2, 6, 31, 8, requires_grad="--gradient" in options)
    k = torch.zeros(2, 3, 53, 8)
    said = regard.backends.explain(q, k, k, **given)
    out = run("backends", "--shape", "2,6,31,8", "--num-kv-heads", "3", "--keys", "53", *options)
    expected = [
        [n, "yes" if can else "no", why + ("  ← auto" if n == said.chosen else "")] for n, can, why in said.rows
    ]
    assert rows_of(out) == expected
    assert out.startswith("q (2, 6, 31, 8), k (2, 3, 53, 8), v (2, 3, 53, 8), float32, cpu\n")


def test_backends_name_the_versions(run):
    last = run("backends").splitlines()[-1]
    assert last.startswith(f"python {'.'.join(map(str, sys.version_info[:3]))}, torch {torch.__version__}, cpu (")


def test_backends_take_no_memory_for_a_huge_call(run):
    out = run("backends", "--shape", "64,64,1048576,1024", "--dtype", "bfloat16")
    assert "sdpa       yes  torch's fused kernel  ← auto" in out


def test_backends_speak_korean_and_fold_long_reasons(capsys, terminal):
    terminal(50)
    main(["backends", "--mask", "window(128, 0)", "--softcap", "30", "--lang", "ko"])
    out = bare(capsys.readouterr().out)
    assert widest(out) <= 50
    assert re.search(r"^백엔드 +가능 +방법 또는 안 되는 이유$", out, re.MULTILINE)
    row, rest = re.search(r"^(sdpa +아니요  .*softcap.*)\n(.*)$", out, re.MULTILINE).groups()
    assert rest.startswith(" " * width(row[: row.index("torch")]))
    assert rest.strip()


# ------------------------------------------------------------------------------------------------------------ terminal


@pytest.mark.parametrize("arguments", [["steps"], ["mask", "causal"], COST, ["backends"]])
def test_pipe_gets_neither_colours_nor_trailing_spaces(run, arguments):
    out = run(*arguments)
    assert "\x1b" not in out
    assert [line for line in out.splitlines() if line != line.rstrip()] == []


@pytest.mark.parametrize("arguments", [["steps"], ["mask", "causal"], COST, ["backends"]])
def test_terminal_gets_a_bold_title(capsys, terminal, arguments):
    terminal(80)
    main(arguments)
    assert capsys.readouterr().out.startswith("\x1b[1m")


# ------------------------------------------------------------------------------------------------ look, doctor and diff

TOKENS = [["나는", "cat", "을", "본다", "."], ["a", "b", "a", "b", "c"]]


class Heads(torch.nn.Module):
    """Layers of attention on what is given: B 2, H 4, N 5, D 3."""

    def __init__(self, *calls: dict) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Identity() for _ in calls])
        for layer, options in zip(self.layers, calls, strict=True):
            layer.forward = lambda x, options=options: regard.attention(x, x, x, **options)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def capture_file(path: str = "run.regard", *, seed: int = 0, times: int = 1, mask=None, **options) -> str:
    """A capture of two layers, saved."""
    mask = masks.causal() if mask is None else mask
    model = Heads({"mask": mask}, {"mask": masks.window(2, 0)})
    x = torch.randn(2, 4, 5, 3, generator=torch.Generator().manual_seed(seed)) * 3
    given = {"tokens": TOKENS, "keep": "qk"} | options
    with torch.no_grad(), regard.watch(model, **given) as seen:
        for _ in range(times):
            model(x)
    seen.save(path)
    return path


@pytest.fixture(scope="module")
def capture_bytes(tmp_path_factory) -> bytes:
    return Path(capture_file(str(tmp_path_factory.mktemp("capture") / "run.regard"))).read_bytes()


def parsed(text: str) -> dict:
    return json.loads(text, parse_constant=pytest.fail)


def table(out: str, first: str) -> list[list[str]]:
    """The cells of the table whose first header this is."""
    block = next(part for part in out.split("\n\n") if re.search(rf"^ *{first}  ", part, re.MULTILINE))
    lines = block.splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith("─"))
    return [re.split("  +", line.strip()) for line in lines[start + 1 :]]


def test_look_at_arrays_prints_the_numbers_of_regard_look(run):
    np.savez("a.npz", **qkv())
    out = run("look", "a.npz", "--mask", "window(3, 1)", "--scale", "0.5", "--batch", "1")
    view = regard.look(**qkv(), mask=masks.window(3, 1), scale=0.5)
    assert out.startswith("a.npz\n2 × 4 heads, 3 queries × 7 keys, mask: window(3, 1)\nshown: batch row 1\n\nhead  ")
    rows = table(out, "head")
    assert [row[0] for row in rows] == ["0", "1", "2", "3"]
    for h, (_, entropy, effective, key, share, _) in enumerate(rows):
        assert entropy == f"{view.mean('entropy')[1, h]:.3f}"
        assert effective == f"{view.mean('effective')[1, h]:.3f}"
        assert int(key) == view.received[1, h].argmax()
        assert share == f"{view.received[1, h].max() / 3:.3f}"
    weights = view.tile(slice(None), slice(None))[1]
    links = [(int(h), int(i), int(j)) for h, i, j, _ in table(out.split("Strongest links")[1], "head")]
    best = sorted(np.ndindex(weights.shape), key=lambda at: -weights[at])[:8]
    assert links == [tuple(map(int, at)) for at in best]


def test_look_leaves_out_links_that_have_no_choice(run):
    np.save("a.npy", np.random.default_rng(0).normal(size=(5, 3)))
    out = run("look", "a.npy", "--causal", "--top", "14")
    links = table(out.split("Strongest links")[1], "head")
    assert len(links) == 14  # 15 are visible, of which query 0 has one
    assert "0" not in [query for _, query, _, _ in links]


def test_look_at_arrays_takes_safetensors_and_json_holds_everything(run):
    arrays = {name: torch.from_numpy(array).bfloat16() for name, array in qkv().items()}
    save_file(arrays, "a.safetensors")
    said = parsed(run("look", "a.safetensors", "--causal", "--row", "-1", "--top", "3", "--json"))
    view = regard.look(**arrays, mask=masks.causal())
    assert said["sizes"] == {"batch": 2, "heads": 4, "queries": 3, "keys": 7}
    assert (said["title"], said["mask"], said["figure"]) == ("a.safetensors", "causal()", None)
    assert [(line["batch"], line["head"]) for line in said["heads"]] == [(b, h) for b in range(2) for h in range(4)]
    entropy = [line["entropy"] for line in said["heads"]]
    np.testing.assert_allclose(entropy, view.mean("entropy").flatten(), rtol=1e-6)
    assert said["heads"][0]["patterns"].keys() == view.patterns().keys()
    assert said["row"] == {"query": 2, "heads": [0, 1, 2, 3], "weights": view.row(2)[0].tolist()}
    assert len(said["links"]) == 3
    assert said["links"][0].keys() == {"head", "query", "key", "weight"}


def test_look_at_one_head_and_its_row(run):
    np.savez("a.npz", **qkv())
    out = run("look", "a.npz", "--head", "2", "--row", "1", "--top", "2")
    view = regard.look(**qkv())
    assert [row[0] for row in table(out, "head")] == ["2"]
    ((head, keys),) = table(out.split("Query 1, exact: its strongest keys")[1], "head")
    weights = view.row(1)[0, 2]
    first, second = np.argsort(-weights)[:2]
    assert (head, keys) == ("2", f"{first}: {weights[first]:.4g}, {second}: {weights[second]:.4g}")


def test_look_prints_nan_as_nan(run):
    np.save("a.npy", np.full((2, 3), np.nan))
    assert table(run("look", "a.npy"), "head")[0][1] == "nan"
    assert parsed(run("look", "a.npy", "--json"))["heads"][0]["entropy"] == "nan"


def test_look_at_nothing_prints_an_empty_table(run):
    np.savez("a.npz", q=np.zeros((0, 3)), k=np.zeros((5, 3)), v=np.zeros((5, 3)))
    out = run("look", "a.npz")
    assert "1 heads, 0 queries × 5 keys" in out
    assert out.endswith("Strongest links\nnone\n")


def test_look_at_a_capture_prints_its_summary(run):
    capture_file()
    out = run("look", "run.regard")
    assert out.startswith("Heads: 2 attention modules, 2 calls   written 20")
    assert "\n".join(regard.open("run.regard").summary().splitlines()[1:]) in out
    said = parsed(run("look", "run.regard", "--json"))
    assert [module["path"] for module in said["modules"]] == ["layers.0", "layers.1"]
    assert said["modules"][1] == {
        "number": 1,
        "path": "layers.1",
        "kind": "self",
        "source": "regard",
        "kernel": said["modules"][1]["kernel"],
        "calls": 1,
        "heads": 4,
        "queries": 5,
        "keys": 5,
        "exact": True,
    }
    assert (said["model"], said["regard"], said["tokens"]) == ("Heads", regard.__version__, TOKENS)


@pytest.mark.parametrize("layer", ["1", "layers.1"])
def test_look_at_a_layer_of_a_capture_prints_its_heads_and_words(run, layer):
    capture_file()
    view = regard.open("run.regard")["layers.1"]
    out = run("look", "run.regard", "--layer", layer, "--head", "3", "--row", "4", "--top", "1")
    assert out.startswith("run.regard: layers.1\n2 × 4 heads, 5 queries × 5 keys, mask: window(2, 0)\n")
    (row,) = table(out, "head")
    key = int(view.received[0, 3].argmax())
    assert row[1:4] == [
        f"{view.mean('entropy')[0, 3]:.3f}",
        f"{view.mean('effective')[0, 3]:.3f}",
        f"{key} {TOKENS[0][key]}",
    ]
    best = int(view.row(4)[0, 3].argmax())
    assert f"   3  {best} {TOKENS[0][best]}: {view.row(4)[0, 3, best]:.4g}\n" in out
    ((_, query, key, _),) = table(out.split("Strongest links")[1], "head")
    assert query.split()[1] == TOKENS[0][int(query.split()[0])]
    assert key.split()[1] == TOKENS[0][int(key.split()[0])]


def test_look_at_a_call_of_a_module_that_was_called_often(run, fail):
    capture_file(times=3)
    assert re.search(r"capture\['layers\.0', n\].*0.*2", fail("look", "run.regard", "--layer", "0"))
    out = run("look", "run.regard", "--layer", "0", "--call", "2")
    assert out.startswith("run.regard: layers.0[2]\n")
    said = fail("look", "run.regard", "--layer", "0", "--call", "3")
    assert re.search(r"'layers\.0'.*3.*times.*3", said)


def test_look_without_q_and_k_says_how_to_keep_them(run, fail):
    capture_file(keep=None)
    out = run("look", "run.regard", "--layer", "0")
    assert out.endswith("Links need q and k: watch(model, keep='qk')\n")
    assert [row[2] for row in table(out, "head")] == ["–"] * 4
    assert parsed(run("look", "run.regard", "--layer", "0", "--json"))["links"] is None
    for option in (["--row", "1"], ["--top", "3"], ["--size", "2", "--figure", "a.png"]):
        assert "keep='qk'" in fail("look", "run.regard", "--layer", "0", *option)


def test_look_at_an_overview_names_the_part_that_receives_most(run):
    x = np.random.default_rng(0).normal(size=(1, 1, 130, 3))
    capture = regard.lens.capture.Capture("long")
    record = regard.lens.capture.Record("attn", 0, "self", "regard", "tiled", view=regard.look(*[torch.tensor(x)] * 3))
    capture.records.append(record)
    capture.save("run.regard", overview=True)
    out = run("look", "run.regard", "--layer", "attn")
    part = int(regard.open("run.regard")[0].received.argmax())
    assert table(out, "head")[0][3] == f"{part * 130 // 64}–{(part + 1) * 130 // 64 - 1}"


def test_look_draws_a_head_or_the_atlas(run):
    capture_file()
    np.savez("a.npz", **qkv())
    calls = [["a.npz", "--size", "2"], ["run.regard", "--layer", "0", "--head", "2", "--size", "3"], ["run.regard"]]
    for n, call in enumerate(calls):
        out = run("look", *call, "--figure", f"new/{n}.png")
        assert out.splitlines()[-1].startswith(f"Figure: new/{n}.png")
        assert Path(f"new/{n}.png").read_bytes().startswith(b"\x89PNG")
    said = parsed(run("look", "run.regard", "--figure", "a.svg", "--json"))
    assert said["figure"] == "a.svg"


def test_look_doctor_and_diff_speak_korean(run):
    capture_file()
    np.savez("a.npz", **qkv())
    arrays = run("look", "a.npz", "--lang", "ko", "--row", "1")
    assert "2 × 헤드 4개, 쿼리 3개 × 키 7개, 마스크: 없음\n배치 0행\n" in arrays
    assert "가장 강한 연결\n헤드  쿼리  키  가중치\n" in arrays
    assert "쿼리 1의 정확한 가중치" in arrays
    assert "Heads: 어텐션 모듈 2개, 호출 2번   저장: 20" in run("look", "run.regard", "--lang", "ko")
    assert "모듈 2개의 어텐션 호출 2개: " in run("doctor", "run.regard", "--lang", "ko")
    assert "같음: 비교한 모듈 2개, 지표 " in run("diff", "run.regard", "run.regard", "--lang", "ko")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["look"], r"'-'.*--file"),
        (["look", "missing.npz"], r"'missing\.npz'.*look.*q.*k.*v.*\.npz.*\.npy"),
        (["look", "folder"], r"'folder'.*folder"),
        (["look", "folder.npz"], r"'folder\.npz'"),
        (["look", "text.txt"], r"--file.*text\.txt"),
        (["look", "x.npz"], r"'x\.npz'.*'x'.*'w_q'.*'w_k'.*'w_v'.*q.*k.*v"),
        (["look", "many.npz"], r"'a0'.*'a1'.*'a2'.*'a3'.*'a4'.*'a5'.*'a6'.*'a7'.*3.*q.*k.*v"),
        (["look", "integers.npy"], r"q.*int64"),
        (["look", "a.npz", "--causal", "--mask", "prefix(2)"], r"--mask.*'causal & \(prefix\(2\)\)'"),
        (["look", "a.npz", "--mask", "sideways"], "'sideways'"),
        (
            ["look", "a.npz", "--mask", "padding([3, 5, 7])"],
            r"padding\(\[3, 5, 7\]\).*3",
        ),
        (["look", "a.npz", "--scale", "inf"], r"scale.*inf"),
        (["look", "a.npz", "--layer", "0", "--call", "1"], r"--layer.*--call.*q.*k.*v"),
        (["look", "a.npz", "--row", "3"], r"row.*3"),
        (["look", "a.npz", "--row", "-4"], r"row.*-4.*3"),
        (["look", "a.npz", "--head", "4"], r"--head.*4.*0"),
        (["look", "a.npz", "--head", "-1"], r"--head.*-1.*4.*0"),
        (["look", "a.npz", "--batch", "2"], r"--batch.*2.*0"),
        (["look", "a.npz", "--top", "0"], r"--top.*1.*0"),
        (["look", "a.npz", "--size", "0"], r"--size.*1.*0"),
        (["look", "a.npz", "--size", "3"], r"--size.*--figure"),
        (["look", "a.npz", "--figure", "a.gif"], r"--figure.*'a\.gif'.*\.png.*\.svg.*\.pdf"),
        (["look", "a.npz", "--lang", "fr"], r"--lang.*'fr'"),
        (["look", "run.regard", "--causal"], r"--causal.*q.*k.*v"),
        (["look", "run.regard", "--mask", "causal", "--scale", "1"], r"--mask.*--scale.*q.*k.*v"),
        (["look", "run.regard", "--head", "1", "--row", "2"], r"--head.*--row.*--layer"),
        (["look", "run.regard", "--layer", "2"], r"--layer.*2"),
        (["look", "run.regard", "--layer", "layers.7"], r"'layers\.7'.*'layers\.0'"),
        (["look", "run.regard", "--layer", "0", "--head", "4"], r"--head.*4"),
        (["look", "run.regard", "--layer", "0", "--row", "5"], r"row.*5"),
        (["look", "empty.regard"], "Nothing"),
        (["look", "cut.regard"], r"'cut\.regard'"),
        (["look", "new.regard"], r"format.*2.*1"),
        (["doctor"], r"'FILE'.*'regard doctor --help'"),
        (["doctor", "missing.regard"], r"'missing\.regard'"),
        (["doctor", "folder"], r"'folder'.*folder"),
        (["doctor", "a.npz"], r"'a\.npz'"),
        (["doctor", "cut.regard"], r"'cut\.regard'"),
        (["doctor", "new.regard"], r"format.*2.*1"),
        (["doctor", "empty.regard"], "Nothing"),
        (["doctor", "run.regard", "--lang", "fr"], r"--lang.*'fr'"),
        (["diff", "run.regard"], r"'B'.*'regard diff --help'"),
        (["diff", "run.regard", "missing.regard"], r"'missing\.regard'"),
        (["diff", "cut.regard", "run.regard"], r"'cut\.regard'"),
        (["diff", "run.regard", "empty.regard"], "Nothing"),
        (["diff", "run.regard", "run.regard", "--tolerance", "-1"], r"tolerance.*0.*-1"),
        (["diff", "run.regard", "run.regard", "--lang", "fr"], r"--lang.*'fr'"),
    ],
)
def test_wrong_captures_and_arrays_are_told_in_one_line(fail, arguments, message, capture_bytes):
    np.savez("a.npz", **qkv())
    np.savez("x.npz", **dict.fromkeys(("x", "w_q", "w_k", "w_v"), X))
    np.savez("many.npz", **{f"a{n}": X for n in range(11)})
    np.save("integers.npy", np.eye(3, dtype=int))
    Path("text.txt").write_text("a text that is longer than the start of a capture, which is some seventy signs long")
    Path("folder").mkdir()
    Path("folder.npz").mkdir()
    Path("run.regard").write_bytes(capture_bytes)
    Path("cut.regard").write_bytes(capture_bytes[:-9])
    Path("new.regard").write_bytes(capture_bytes.replace(b'"version":"1"', b'"version":"2"', 1))
    regard.lens.capture.Capture("Nothing").save("empty.regard")
    assert re.search(message, fail(*arguments))


def test_arrays_for_look_may_be_larger_than_for_steps(run, fail, monkeypatch):
    np.save("a.npy", np.random.default_rng(0).normal(size=(100, 7)))
    monkeypatch.setattr(inputs, "MOST_STEPS", 5000)
    run("look", "a.npy")
    monkeypatch.setattr("regard.cli.captures.LARGEST", 5000)
    assert re.search(r"'a\.npy'.*5,728.*bytes.*5,000.*bytes", fail("look", "a.npy"))


def test_doctor_prints_the_diagnosis_and_ends_with_1_for_errors(run, capsys):
    capture_file()
    diagnosis = regard.open("run.regard").doctor()
    assert run("doctor", "run.regard") == f"{diagnosis.text()}\n"
    said = parsed(run("doctor", "run.regard", "--json"))
    assert (said["calls"], said["modules"], said["unread"]) == (2, 2, 0)
    assert [use["mask"] for use in said["masks"]] == [use.facts.mask for use in diagnosis.masks]
    capture_file("bad.regard", mask=masks.causal(offset=-2))
    assert main(["doctor", "bad.regard"]) == 1
    out, err = capsys.readouterr()
    assert err == ""
    assert "see no key at all" in out
    assert main(["doctor", "bad.regard", "--json"]) == 1
    said = parsed(capsys.readouterr().out)
    assert said["ok"] is False
    assert (said["findings"][0]["severity"], said["findings"][0]["code"]) == ("error", "empty rows")
    assert said["findings"][0]["paths"] == ["layers.0"]


def test_doctor_ends_with_0_for_warnings(run, monkeypatch):
    from regard.lens.doctor import Finding

    capture_file()
    warning = Finding("warning", "left padding", ("layers.0",), (("rows", 1), ("batch", 2)))
    monkeypatch.setattr("regard.lens.doctor.CHECKS", (lambda case: [warning],))
    said = parsed(run("doctor", "run.regard", "--json"))
    assert [finding["severity"] for finding in said["findings"]] == ["warning"]


def test_diff_says_whether_attention_was_the_same(run, capsys):
    capture_file("a.regard")
    capture_file("b.regard", seed=1, mask=masks.prefix(2))
    out = run("diff", "a.regard", "a.regard")
    assert re.match(r"A  a\.regard   Heads, written 20.*\nB  a\.regard   Heads, written 20.*\n\nthe same: modules", out)
    assert parsed(run("diff", "a.regard", "a.regard", "--json"))["same"] is True
    assert main(["diff", "a.regard", "b.regard"]) == 1
    out, err = capsys.readouterr()
    assert err == ""
    assert re.search(r"^mask +layers\.0 +causal +prefix\(2\)$", out, re.MULTILINE)
    assert main(["diff", "a.regard", "b.regard", "--json"]) == 1
    said = parsed(capsys.readouterr().out)
    assert (said["same"], said["modules"], said["only_a"], said["only_b"]) == (False, 2, [], [])
    assert said["rows"][0].keys() == {"path", "call", "measure", "head", "a", "b", "difference", "mean", "heads"}
    assert said["unlike"] == [{"what": "mask", "path": "layers.0", "call": 0, "a": "causal", "b": "prefix(2)"}]


def test_diff_takes_a_tolerance(run, capsys):
    capture_file("a.regard")
    capture_file("b.regard", seed=1)
    assert main(["diff", "a.regard", "b.regard"]) == 1
    capsys.readouterr()
    assert "(tolerance 100)" in run("diff", "a.regard", "b.regard", "--tolerance", "100")


def test_diff_of_numbers_that_json_lacks_is_text(capsys):
    capture_file("a.regard")
    seen = regard.open("a.regard")
    seen.records[0].view.held["entropy"][0, 1, 2] = float("nan")
    seen.save("b.regard")
    assert main(["diff", "a.regard", "b.regard", "--json"]) == 1
    said = parsed(capsys.readouterr().out)
    assert (said["rows"][0]["measure"], said["rows"][0]["head"], said["rows"][0]["difference"]) == ("entropy", 1, "inf")


@pytest.mark.parametrize("command", [["look", "a.npz"], ["look", "run.regard"], ["doctor", "run.regard"]])
def test_captures_and_arrays_print_bold_titles_on_a_terminal_and_plain_ones_in_a_pipe(run, capsys, terminal, command):
    np.savez("a.npz", **qkv())
    capture_file()
    out = run(*command)
    assert "\x1b" not in out
    assert [line for line in out.splitlines() if line != line.rstrip()] == []
    terminal(80)
    main(command)
    assert capsys.readouterr().out.startswith("\x1b[1m")


# What swallows Ctrl-C while it is imported, as extension modules do.
STUBBORN = """
import time
print("importing", flush=True)
try:
    time.sleep(60)
except KeyboardInterrupt:
    pass
"""
IMPORTING = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
import regard.cli
regard.cli._answer = lambda typed, lang: __import__("stubborn") and 0
sys.exit(regard.cli.main([]))
"""


def test_control_c_ends_a_process_that_imports(tmp_path):
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    with subprocess.Popen(
        [sys.executable, "-c", IMPORTING], env=os.environ | {"PYTHONPATH": paths}, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "importing\n"
        child.send_signal(signal.SIGINT)
        assert child.wait(120) == 130
