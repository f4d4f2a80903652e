"""Every text that the code translates has its entry in each catalogue, with the same fields."""

import ast
import json
from pathlib import Path
from string import Formatter

import regard

PACKAGE = Path(regard.__file__).parent
KOREAN = {
    key: value
    for file in sorted((PACKAGE / "locale" / "ko").glob("*.json"))
    for key, value in json.loads(file.read_text(encoding="utf-8")).items()
}


def translated_texts() -> set[str]:
    """The literal first arguments of `translate(...)`."""
    texts = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "translate":
                texts |= {arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant)}
    return texts


def fields(text: str) -> set[str]:
    return {name for _, name, _, _ in Formatter().parse(text) if name}


def test_every_translated_text_is_in_the_korean_catalogue():
    assert sorted(translated_texts() - set(KOREAN)) == []


def test_translations_have_the_fields_of_the_english_text():
    assert [key for key, value in KOREAN.items() if fields(key) != fields(value)] == []
