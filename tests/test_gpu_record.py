"""The record of gpu_check.py: GPU code is as it was when a GPU last ran it, or the record says what is pending."""

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def gpu_check():
    spec = importlib.util.spec_from_file_location("gpu_check", ROOT / "benchmarks" / "gpu_check.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def copy(gpu_check, tmp_path, monkeypatch):
    """A package of two files, one of them GPU code, with a record of its own."""
    package = tmp_path / "regard"
    package.mkdir()
    (package / "fast.py").write_text("import triton\n")
    (package / "plain.py").write_text("import json\n")
    monkeypatch.setattr(gpu_check, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_check, "RECORD", tmp_path / "record.json")
    monkeypatch.setattr(gpu_check, "ALSO", ())
    (tmp_path / "record.json").write_text(json.dumps({"files": gpu_check.gpu_files(), "pending": None}))
    return tmp_path


def unverified(gpu_check) -> list[str]:
    """GPU files that are neither as the record has them nor listed, as they are now, under `pending`."""
    record = json.loads(gpu_check.RECORD.read_text("utf-8"))
    pending, now = (record["pending"] or {}).get("files", {}), gpu_check.gpu_files()
    return [path for path in gpu_check.changed_files(record) if path not in pending or pending[path] != now.get(path)]


def test_gpu_code_is_verified_or_pending(gpu_check):
    changed = unverified(gpu_check)
    assert not changed, (
        f"changed since a GPU last ran them: {', '.join(changed)}. Run benchmarks/gpu_check.py on a GPU and commit the "
        'record, or without one: python benchmarks/gpu_check.py --pending "why it was not run"'
    )


def test_the_recorded_run_passed_every_check(gpu_check):
    record = json.loads(gpu_check.RECORD.read_text("utf-8"))
    assert {row["name"]: row["result"] for row in record["checks"]} == dict.fromkeys(gpu_check.CHECKS, "pass")
    assert record["result"] == "pass"
    assert {"python", "torch", "triton", "transformers"} <= record["versions"].keys()


def test_kernels_launchers_and_what_they_run_through_are_hashed(gpu_check):
    files = gpu_check.gpu_files()
    kernels = [path for path in (ROOT / "regard").rglob("*.py") if "import triton" in path.read_text("utf-8")]
    assert kernels
    assert {path.relative_to(ROOT).as_posix() for path in kernels} <= files.keys()
    assert {"regard/devices.py", "regard/op.py", "regard/nn/attention.py"} <= files.keys()
    assert "regard/tables.py" not in files


@pytest.mark.parametrize("change", ["changed", "new", "gone"])
def test_a_change_is_found_until_it_is_pending(gpu_check, copy, change):
    if change == "changed":
        (copy / "regard" / "fast.py").write_text("import triton  # faster\n")
    elif change == "new":
        (copy / "regard" / "faster.py").write_text("device = 'cuda'\n")
    else:
        (copy / "regard" / "fast.py").unlink()
    changed = "regard/faster.py" if change == "new" else "regard/fast.py"
    assert unverified(gpu_check) == [changed]
    gpu_check.mark_pending("no GPU at hand")
    assert unverified(gpu_check) == []
    assert json.loads((copy / "record.json").read_text())["pending"]["reason"] == "no GPU at hand"
    (copy / "regard" / changed.removeprefix("regard/")).write_text("import triton  # changed once more\n")
    assert unverified(gpu_check) == [changed]


def test_other_files_may_change(gpu_check, copy):
    (copy / "regard" / "plain.py").write_text("import math\n")
    assert unverified(gpu_check) == []
    gpu_check.mark_pending("for nothing")
    assert json.loads((copy / "record.json").read_text())["pending"] is None
