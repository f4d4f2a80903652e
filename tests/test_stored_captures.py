"""Captures written by an earlier version open, and hold what they held: names, sizes, measures, exact rows, findings.

The files are in tests/captures, with a README that says how they were made; they are never rewritten. What they hold is
in the .json beside each. `REGARD_WRITE_GOLDENS=1 pytest tests/test_stored_captures.py` rewrites the .json, for when
this test compares more; a number that changes means that old files are read differently.
"""

from __future__ import annotations

import json
from math import isfinite
from pathlib import Path
from typing import Any

import pytest
from stored_outputs import check
from torch import Tensor

import regard
from regard.lens.files.container import CaptureFileError

FOLDER = Path(__file__).resolve().parent / "captures"
NAMES = sorted(path.stem for path in FOLDER.glob("*.regard"))
WITHOUT_QK = {"overview"}

pytestmark = pytest.mark.usefixtures("plain")


def numbers(values: Tensor) -> Any:
    """Nested lists; NaN and infinities as text, which JSON has no sign for."""
    if values.ndim:
        return [numbers(one) for one in values]
    value = values.item()
    return value if isfinite(value) else str(value)


def contents(capture: Any, *, exact: bool) -> dict[str, Any]:
    runs = []
    for run in capture.runs():
        view = run.view
        query = view.sizes[2] // 2
        held = {
            "name": run.name,
            "calls": len(run.records),
            "kind": view.kind,
            "sizes": list(view.sizes),
            "entropy": numbers(view.entropy.mean(-1)),
            "received": numbers(view.received[0, 0]),
            "map": numbers(view.map()[0, -1, query]),
        }
        if exact:
            top = view.top(2)
            index = top.index.masked_fill(top.weight.isnan(), -1)  # which NaN is largest is the kernel's own choice
            held["top"] = {"index": numbers(index[0, :, query]), "weight": numbers(top.weight[0, :, query])}
            held["row"] = numbers(view.row(query)[0, 0])
        runs.append(held)
    return {
        "model": capture.model,
        "modules": capture.names,
        "tokens": capture.tokens,
        "photos": len(capture.photos),
        "unseen": len(capture.unseen),
        "findings": len(capture.doctor().findings),
        "runs": runs,
        **{name: list(map(repr, values)) for name in ("edits", "effects") if (values := getattr(capture, name))},
    }


def test_every_kind_of_capture_is_stored():
    assert len(NAMES) == 12
    assert sum(path.stat().st_size for path in FOLDER.glob("*.regard")) < 400_000


@pytest.mark.parametrize("name", NAMES)
def test_stored_capture_holds_what_it_held(name):
    capture = regard.open(FOLDER / f"{name}.regard")
    check(FOLDER / f"{name}.json", contents(capture, exact=name not in WITHOUT_QK))


def test_capture_of_a_newer_format_is_refused_with_both_versions(tmp_path):
    content = (FOLDER / f"{NAMES[0]}.regard").read_bytes()
    assert content.count(b'"version":"1"') == 1
    path = tmp_path / "newer.regard"
    path.write_bytes(content.replace(b'"version":"1"', b'"version":"2"'))
    with pytest.raises(CaptureFileError, match=r"newer\.regard.*format 2.* 1"):
        regard.open(path)


@pytest.mark.parametrize("name", sorted(WITHOUT_QK))
def test_capture_without_queries_and_keys_has_no_exact_rows(name):
    capture = regard.open(FOLDER / f"{name}.regard")
    with pytest.raises(LookupError):
        capture[0].row(0)
    with pytest.raises(LookupError):
        capture[0].top(2)


@pytest.mark.parametrize("name", NAMES)
def test_stored_capture_becomes_a_page(name, run, tmp_path):
    run("look", str(FOLDER / f"{name}.regard"), "--html", "page.html")
    page = (tmp_path / "page.html").read_text("utf-8")
    capture = regard.open(FOLDER / f"{name}.regard")
    for word in [*(capture.tokens or [[]])[0], *filter(None, capture.names)]:
        assert json.dumps(word, ensure_ascii=False)[1:-1] in page


@pytest.mark.parametrize("name", NAMES)
def test_stored_capture_is_the_same_when_it_is_saved_again(name, tmp_path):
    regard.open(FOLDER / f"{name}.regard").save(tmp_path / "again.regard")
    again = contents(regard.open(tmp_path / "again.regard"), exact=name not in WITHOUT_QK)
    assert again == contents(regard.open(FOLDER / f"{name}.regard"), exact=name not in WITHOUT_QK)
