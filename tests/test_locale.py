"""Every text and every error of the code has its entry in each catalogue, with the same fields."""

import ast
import errno
import json
import os
import re
import warnings
from dataclasses import fields
from pathlib import Path
from string import Formatter
from typing import NamedTuple

import pytest
from error_templates import Message, Package, missing, reachable, template
from speaking_twins import bert

import regard
from regard.cli import main
from regard.cli.commands import COMMANDS
from regard.locale import FIELD, particle, translate, translate_error

PACKAGE = Path(regard.__file__).parent
ALL = {
    file.name: json.loads(file.read_text(encoding="utf-8"))
    for file in sorted((PACKAGE / "locale" / "ko").glob("*.json"))
}
FILES = {name: file for name, file in ALL.items() if not name.startswith("errors_")}
ERROR_FILES = {name: file for name, file in ALL.items() if name.startswith("errors_")}
CALL = r"""\b(?:translate\w*|message)\(\s*("(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')"""
KOREAN = {key: value for catalogue in FILES.values() for key, value in catalogue.items()}
ERRORS = {key: value for catalogue in ERROR_FILES.values() for key, value in catalogue.items()}
HANGUL = re.compile("[가-힣]")
PARTICLES = ("을/를", "이/가", "은/는", "와/과", "으로/로", "이나/나", "이어야/여야", "이라/라", "이라는/라는")


def translated_texts() -> set[str]:
    """The literal first arguments of `translate(...)` and of a `say(...)`, which passes its language on."""
    texts = set()
    sources = [path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")]
    for source in (source for source in sources if "translate(" in source or "say(" in source):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call) and not (len(node.args) == 2 and called(node) == "say"):
                first = node.args[:1] if called(node) in ("translate", "say") else []
                texts |= {text.value for text in first if isinstance(text, ast.Constant)}
    return texts


def page_texts() -> set[str]:
    """The literal first arguments of `translate…(...)` and `message(...)` in the page's JavaScript."""
    code = [path.read_text(encoding="utf-8") for path in (PACKAGE / "explorer" / "page").rglob("*.js")]
    found = re.findall(CALL, re.sub(r"^\s*(?://|\*|/\*).*$", "", "\n".join(code), flags=re.MULTILINE))
    return {ast.literal_eval(text) for text in found}


def called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def names(text: str) -> set[str]:
    """The fields of a text; {count|key|keys}, which the page has, is the field count."""
    return {name.split("|")[0] for _, name, _, _ in Formatter().parse(text) if name}


def test_every_translated_text_is_in_the_korean_catalogue():
    assert sorted(translated_texts() - set(KOREAN)) == []


def test_texts_of_the_page_are_its_korean_catalogue():
    assert len(page_texts()) > 200, "texts are found"
    assert sorted(page_texts() - set(FILES["page.json"])) == []
    assert sorted(set(FILES["page.json"]) - page_texts()) == []


def test_every_text_that_the_page_translates_can_be_found():
    """A text that is made of parts, or by a template, would be looked up and not be found."""
    for path in (PACKAGE / "explorer" / "page").rglob("*.js"):
        code = re.sub(CALL, "", path.read_text(encoding="utf-8"))
        assert re.findall(r"\b(?:translate\w*|message)\(\s*[`\"'].*", code) == [], path.name


def test_help_of_every_command_is_in_the_korean_catalogue():
    options = {field.metadata["help"] for command in COMMANDS for field in fields(command.options)}
    texts = {text for command in COMMANDS for text in (command.line, *command.help)} | options
    assert sorted(texts - set(KOREAN)) == []


def test_translations_have_the_fields_of_the_english_text():
    assert [key for key, value in KOREAN.items() if names(key) != names(value)] == []


def test_text_has_one_translation_whichever_file_it_is_in():
    assert [(name, key) for name, file in FILES.items() for key, value in file.items() if KOREAN[key] != value] == []


def test_values_are_filled_in_after_translation():
    assert translate("layer {layer}, head {head}", "ko", layer=3, head=1) == "레이어 3, 헤드 1"
    assert translate("text: {text}", "en", text="{braces}") == "text: {braces}"


# ---------------------------------------------------------------------------------------------- the catalogue of errors


class Strings(NamedTuple):
    """The templates of all strings of the package, and its messages."""

    literals: set[str]
    messages: list[Message]


@pytest.fixture(scope="module")
def strings() -> Strings:
    package = Package()
    return Strings(package.literals(), [message for _, message in package.messages()])


@pytest.fixture(scope="module")
def errors(strings: Strings) -> list[Message]:
    return strings.messages


def test_every_error_of_the_package_is_in_the_korean_catalogue(errors):
    assert len(errors) > 1000
    assert [lack for message in errors for lack in missing(message, ERRORS)] == []


def test_every_entry_is_an_error_of_the_package(strings):
    """Those of Python, typer and the operating system are in a file of their own."""
    used = strings.literals.union(*map(reachable, strings.messages))
    others = [name for name in ERROR_FILES if name != "errors_system.json"]
    assert [(name, key) for name in others for key in ERROR_FILES[name] if key not in used] == []


def test_an_error_is_in_one_file():
    assert sum(map(len, ERROR_FILES.values())) == len(ERRORS)


def test_templates_are_read_from_the_source(errors):
    found = {one for message in errors for one in reachable(message)}
    assert found.issuperset(
        [
            "there is no session {}: there are {}; unused ones go when new ones come",  # an f-string
            "a CUDA graph was being captured, in which nothing can be measured; watch the model without CUDA graphs",
            "nothing to show: {} batch rows, {} heads, {} queries, {} keys",  # str.format
            "rows must be integers, int64 or int32, the old row of each new one; got {}",  # a + and a condition
            "torch's SDPA has no softcap",  # returned as a reason
            "checkpoint {} is skipped: {}",  # a warning
            "cannot write {}: it is a folder; name a file",  # a local phrase, written out
            "a pipe or socket",  # a local phrase
            "the vectors",  # an argument, two calls away
        ]
    )


def test_a_message_needs_its_template_or_those_with_its_phrases_written_out(tmp_path):
    (tmp_path / "module.py").write_text(
        "def check(n):\n"
        "    why = 'it is small' if n else 'it is large'\n"
        "    raise ValueError(f'cannot read {n!r}: {why}; go on')\n"
    )
    ((_, message),) = Package(tmp_path).messages()
    assert template(message) == "cannot read {}: {}; go on"
    assert missing(message, {}) == ["cannot read {}: {}; go on"]
    own = {"cannot read {}: {}; go on": "{0}: {1}"}
    assert missing(message, own) == ["it is small", "it is large"]
    assert missing(message, {"cannot read {}: {}; go on": "{0}"}) == []
    written = {f"cannot read {{}}: it is {size}; go on": "{0}" for size in ("small", "large")}
    assert missing(message, written) == []
    assert missing(message, {next(iter(written)): "{0}"}) == ["cannot read {}: it is large; go on"]


def test_korean_errors_use_fields_that_there_are_and_particles_that_fit():
    for key, value in ERRORS.items():
        used = list(FIELD.finditer(value))
        assert all(int(field[1]) < key.count("{}") for field in used), key
        assert all(field[2] is None or field[2] in PARTICLES for field in used), key
        assert "{}" not in value or "{}" in key, key
        assert not re.search(r"[이가을를은는와과]\([이가을를은는와과]\)|\(으\)로", value), key


def test_each_template_is_the_one_that_its_own_message_finds():
    """No template swallows the messages of another."""
    for key, value in ERRORS.items():
        values = [f"'v{n}'" for n in range(key.count("{}"))]
        message = "".join(part for pair in zip(key.split("{}"), [*values, ""], strict=True) for part in pair)
        filled = FIELD.sub(lambda field, own=values: own[int(field[1])] + particle(own[int(field[1])], field[2]), value)
        if "{}{}" not in key:
            assert translate_error(message, "ko") == filled


# -------------------------------------------------------------------------------------------------------- translation


def test_english_is_unchanged_and_an_unknown_message_too():
    message = "there is no file 'a.txt'"
    assert translate_error(message) == translate_error(message, "en") == message
    assert translate_error("segfault in module foo: bar", "ko") == "segfault in module foo: bar"


def test_message_that_repeats_itself_too_often_is_unchanged():
    assert translate_error("cannot read 'x': " * 1500, "ko") == "cannot read 'x': " * 1500


def test_reason_inside_an_error_is_translated_and_quoted_text_is_not():
    said = translate_error("cannot read 'a.npz': No such file or directory", "ko")
    assert said.startswith("'a.npz'를 읽을 수 없습니다: ")
    assert "No such" not in said
    assert "'Is a directory'" in translate_error("there is no file 'Is a directory'", "ko")


def test_joined_messages_are_translated_one_by_one():
    first, second = (translate_error(f"there is no file '{name}'", "ko") for name in "ab")
    assert translate_error("there is no file 'a'\nthere is no file 'b'\nxyz: 3", "ko") == f"{first}\n{second}\nxyz: 3"


@pytest.mark.parametrize(
    ("value", "object_", "with_", "towards"),
    [
        ("토큰", "을", "과", "으로"),
        ("레이어", "를", "와", "로"),
        ("모델", "을", "과", "로"),
        ("3", "을", "과", "으로"),
        ("1,024", "를", "와", "로"),
        ("1", "을", "과", "로"),
        ("10", "을", "과", "으로"),
        ("model", "을", "과", "로"),
        ("'mask'", "를", "와", "로"),
        ("(token)", "을", "과", "으로"),
        ("--layer", "를", "와", "로"),
        ("num_heads", "를", "와", "로"),
        ("scale", "을", "과", "로"),
        ("dtype", "을", "과", "으로"),
        ("top", "을", "과", "으로"),
        ("LLM", "을", "과", "으로"),
        ("URL", "을", "과", "로"),
        ("png", "를", "와", "로"),
        ("50%", "를", "와", "로"),
        ("", "를", "와", "로"),
    ],
)
def test_particle_fits_the_last_sound(value, object_, with_, towards):
    assert [particle(value, pair) for pair in ("을/를", "와/과", "으로/로")] == [object_, with_, towards]


@pytest.mark.parametrize(
    "code", [errno.ENOENT, errno.EACCES, errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENOSPC, errno.EROFS]
)
def test_reasons_of_the_operating_system_are_translated(code):
    assert HANGUL.search(ERRORS[os.strerror(code)])
    said = translate_error(str(OSError(code, os.strerror(code), "a.txt")), "ko")
    assert said == f"{ERRORS[os.strerror(code)]}: 'a.txt'"


# ------------------------------------------------------------------------------------------------------- command lines


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> str:
    """BERT's twin: 2 layers of 5 heads."""
    return str(bert(tmp_path_factory.mktemp("bert"), "Model"))


@pytest.fixture
def mistakes(plain: None) -> None:
    """Files that are not what commands expect, in the current folder."""
    Path("damaged.regard").write_bytes(b"not a capture at all")
    Path("folder").mkdir()
    Path("model").mkdir()
    Path("model/config.json").write_text('{"model_type": "bert",')
    Path("other").mkdir()
    Path("other/config.json").write_text('{"model_type": "nosuch"}')
    Path("latin.txt").write_bytes(b"\xff\xfe\x00")


@pytest.mark.usefixtures("mistakes")
@pytest.mark.parametrize(
    ("arguments", "values"),
    [
        (["look", "missing.txt"], ["'missing.txt'", ".npz"]),
        (["look", "--file", "missing.txt"], ["'missing.txt'"]),
        (["look", "--file", "folder"], ["'folder'"]),
        (["look", "--file", "latin.txt"], ["'latin.txt'", "UTF-8", "0"]),
        (["look", ""], []),
        (["look", "damaged.regard"], ["'damaged.regard'"]),
        (["look", "cat", "--at", "3,4"], ["--at"]),
        (["look", "cat", "--model", "READER", "--layer", "99"], ["99", "2"]),
        (["look", "cat", "--model", "READER", "--layer", "1", "--head", "77"], ["77", "5"]),
        (["look", "cat", "--model", "READER", "--token", "dog"], ["'dog'", "--token"]),
        (["look", "cat", "--top", "0"], ["--top", "0"]),
        (["generate", "hi", "--model", "./nowhere"], ["'./nowhere'"]),
        (["generate", "hi", "--model", "folder"], ["config.json"]),
        (["generate", "hi", "--model", "model"], ["config.json", "JSON", "1"]),
        (["generate", "hi", "--model", "other"], ["'nosuch'", "gpt2"]),
        (["generate", "hi", "--model", "READER"], ["BERT"]),
        (["mask", "causl"], ["'causl'", "window"]),
        (["mask", "window(1"], ["'window(1'", "("]),
        (["mask", "window(1)"], ["'after'"]),
        (["mask", "window(-1, 0)"], ["before", "-1"]),
        (["mask", "causal", "--queries", "0"], ["--queries", "0"]),
        (["mask"], ["'SPEC'", "'regard mask --help'"]),
        (["mask", "causal", "&", "causal"], ["causal", "'regard mask --help'"]),
        (["attend"], ["'attend'", "'regard --help'"]),
        (["cost", "--nn", "3"], ["--nn", "'regard cost --help'"]),
        (["cost", "--d-model", "3"], ["'--n'", "'regard cost --help'"]),
        (["cost", "--d-model", "3", "--n", "few"], ["'--n'", "'few'"]),
        (["cost", "--n", "7", "--d-model", "5", "--num-heads", "3"], ["d_model=5", "num_heads=3"]),
        (["backends", "--shape", "1,8,64,0"], ["D", "1,048,576"]),
        (["backends", "--device", "nosuch"], ["'nosuch'"]),
        (["steps", "--input", "missing.npz"], ["'missing.npz'"]),
        (["steps", "--figure", "x.gif"], ["'x.gif'", ".png"]),
        (["steps", "--figure", "folder/a/../../x.png", "--input", "latin.txt"], ["'latin.txt'", ".npz"]),
        (["effect", "the cat", "--token", "cat"], ["--to", "--scan heads"]),
        (["effect", "the cat", "--metric", "bad"], ["'bad'", "'log-prob: A'"]),
        (["survey", "missing.txt"], ["'missing.txt'"]),
        (["train", "none", "--model", "a", "--data", "b", "--out", "c"], ["'none'", "clm"]),
        (["train", "clm", "--model", "a", "--data", "missing", "--out", "c"], ["'missing'"]),
        (["learn", "99"], ["99"]),
        (["serve", "--port", "99999"], ["65535", "99999"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_mistake_is_told_in_korean_with_its_values(fail, reader, arguments, values):
    said = fail(*(reader if one == "READER" else one for one in arguments), "--lang", "ko")
    assert HANGUL.search(said)
    for value in values:
        assert value in said
    assert not re.search(r"\b(is|are|must|there|cannot|give|needs?)\b", said.replace(reader, ""))


@pytest.mark.usefixtures("plain")
def test_language_that_there_is_not_is_told_in_that_of_the_locale(fail, monkeypatch):
    monkeypatch.setenv("LANG", "ko_KR.UTF-8")
    said = fail("mask", "causal", "--lang", "fr")
    assert HANGUL.search(said)
    assert "'fr'" in said


@pytest.mark.usefixtures("plain")
def test_advice_to_ignore_keys_is_an_option_in_korean_too(fail, tmp_path):
    folder = bert(tmp_path / "bert", "Model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"window_of_attention": 3}))
    said = fail("look", "cat", "--model", str(folder), "--lang", "ko")
    assert HANGUL.search(said)
    assert "--ignore window_of_attention" in said


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("lang", ["en", "ko"])
def test_warning_is_shown_in_the_language_of_the_command(monkeypatch, lang):
    def warn(options):
        warnings.warn("checkpoint step-3 is skipped: it has no pieces", stacklevel=2)

    monkeypatch.setattr("regard.cli.attention.steps", warn)
    with pytest.warns(UserWarning, match="step-3") as shown:
        assert main(["steps", "--lang", lang]) == 0
    assert bool(HANGUL.search(str(shown[0].message))) == (lang == "ko")


@pytest.mark.usefixtures("plain")
def test_json_is_the_same_in_both_languages(capsys):
    answers = []
    for lang in ("en", "ko"):
        assert main(["steps", "--json", "--lang", lang]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1]
