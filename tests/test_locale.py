"""Every text that the code translates has its entry in each catalogue, with the same fields."""

import ast
import json
import re
from dataclasses import fields
from pathlib import Path
from string import Formatter

import regard
from regard.cli.commands import COMMANDS
from regard.locale import translate

PACKAGE = Path(regard.__file__).parent
FILES = {
    file.name: json.loads(file.read_text(encoding="utf-8"))
    for file in sorted((PACKAGE / "locale" / "ko").glob("*.json"))
}
CALL = r"""\b(?:translate\w*|message)\(\s*("(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')"""
KOREAN = {key: value for catalogue in FILES.values() for key, value in catalogue.items()}


def translated_texts() -> set[str]:
    """The literal first arguments of `translate(...)` and of a `say(...)`, which passes its language on."""
    texts = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
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
