"""Plant one-line faults across the packages and check that the tests find each of them.

    python tests/tools/plant_faults.py                # all faults, some five minutes
    python tests/tools/plant_faults.py --only mask    # those whose name contains "mask"
    python tests/tools/plant_faults.py --without      # the same tests without a fault, which must pass

Each fault is planted in a copy of the working tree, and only the tests named beside it run there. Exits with 1 if a
fault is not found, or if a text to replace is no longer in its file.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest
import torch.distributed.checkpoint  # noqa: F401

ROOT = Path(__file__).resolve().parents[2]


class Fault(NamedTuple):
    """`old` becomes `new` in `file`; `tests` are the arguments of pytest that must then fail."""

    name: str
    file: str
    old: str
    new: str
    tests: str


FAULTS = [
    Fault(
        "scale left out",
        "backends/reference.py",
        'stage("scaled", scores * scale)',
        'stage("scaled", scores * 1.0)',
        "tests/test_op.py",
    ),
    Fault(
        "empty row is NaN",
        "backends/reference.py",
        "xp.exp(masked - peak) / xp.where(total == 0, 1.0, total)",
        "xp.exp(masked - peak) / total",
        "tests/test_op.py",
    ),
    Fault(
        "running maximum not rescaled",
        "backends/tiled.py",
        "shrink = torch.exp(peak - floor)",
        "shrink = torch.ones_like(peak)",
        "tests/test_conformance.py -k tiled",
    ),
    Fault(
        "causal flag dropped",
        "backends/sdpa.py",
        'is_causal=shape == "causal")',
        "is_causal=False)",
        "tests/test_conformance.py -k sdpa",
    ),
    Fault(
        "window off by one",
        "masks/patterns.py",
        "return (distance >= -before(b, h)) & (distance <= after(b, h))",
        "return (distance > -before(b, h)) & (distance <= after(b, h))",
        "tests/masks/test_masks.py",
    ),
    Fault(
        "rotary scaling ignored",
        "rotary.py",
        "return 1.0 / base**exponents / self.factor",
        "return 1.0 / base**exponents",
        "tests/test_positions.py tests/models/test_rotary_config.py",
    ),
    Fault(
        "alibi slopes halved",
        "positions.py",
        "return 2.0 ** (-8 * torch.arange",
        "return 2.0 ** (-4 * torch.arange",
        "tests/test_positions.py",
    ),
    Fault(
        "cache appends in front",
        "nn/attention.py",
        "torch.cat([self._kv[0], k], -2)",
        "torch.cat([k, self._kv[0]], -2)",
        "tests/nn/test_cache.py",
    ),
    Fault(
        "norm after instead of before",
        "nn/blocks.py",
        "added = part(norm(x) if self.norm_first else x)",
        "added = part(x)",
        "tests/models/test_gpt2.py",
    ),
    Fault(
        "labels not shifted",
        "models/losses.py",
        "return pad(labels, (0, 1), value=IGNORED)[..., 1:]",
        "return labels + 0",
        "tests/test_ecosystem.py",
    ),
    Fault(
        "weights not transposed",
        "models/family.py",
        "return parts[0].mT.contiguous() if parts[0].ndim == 2 else parts[0]",
        "return parts[0]",
        "tests/models/test_gpt2.py",
    ),
    Fault(
        "vectors not normalised",
        "models/dual_encoder.py",
        "embeds = normalize(self.head.text(pooled), dim=-1)",
        "embeds = self.head.text(pooled)",
        "tests/models/test_clip.py",
    ),
    Fault(
        "nucleus keeps too much",
        "generation/config.py",
        "cumsum(-1) <= 1 - p",
        "cumsum(-1) <= 1 - 2 * p",
        "tests/generation/test_sampling.py",
    ),
    Fault(
        "length penalty dropped",
        "generation/beam_search.py",
        "self.scores / float(made**length_penalty)",
        "self.scores / 1.0",
        "tests/generation/test_beam_search.py",
    ),
    Fault(
        "image mean not subtracted",
        "data/image_processing.py",
        "(table - mean[:, None]) / std[:, None]",
        "table / std[:, None]",
        "tests/data/test_image_processing.py",
    ),
    Fault(
        "received summed over keys",
        "lens/measures/measures.py",
        "(tile.p if tile.row_pool is None else tile.by_cell).sum(-2)",
        "(tile.p if tile.row_pool is None else tile.by_cell).amax(-2)",
        "tests/lens/test_measures.py tests/lens/test_look.py",
    ),
    Fault(
        "previous token is the one before it",
        "lens/patterns.py",
        "for step in (-2, -1, 0, 1, 2))",
        "for step in (-1, -2, 0, 1, 2))",
        "tests/lens/test_patterns.py",
    ),
    Fault(
        "negative weights pass",
        "lens/validity.py",
        '"negative": (low < 0, low)',
        '"negative": (low < -1, low)',
        "tests/lens/test_checking.py",
    ),
    Fault(
        "findings in any order",
        "lens/doctor.py",
        "findings.sort(key=lambda finding: get_args(Severity).index(finding.severity))",
        "findings.sort(key=lambda finding: -get_args(Severity).index(finding.severity))",
        "tests/lens/test_doctor.py",
    ),
    Fault(
        "changes below tolerance reported",
        "lens/comparison.py",
        "if not c.largest <= tolerance)",
        "if not c.largest <= 0)",
        "tests/lens/test_comparing.py",
    ),
    Fault(
        "weakest links first",
        "session/ranking.py",
        "key=lambda one: (-one[0], one[1]))\n    return [link for _, link in ranked[:count]]\n",
        "key=lambda one: (one[0], one[1]))\n    return [link for _, link in ranked[:count]]\n",
        "tests/session/test_ranking.py",
    ),
    Fault(
        "any host may ask",
        "explorer/security.py",
        'LOOPBACK = ("localhost", "127.0.0.1", "[::1]")',
        'LOOPBACK = ("localhost", "127.0.0.1", "[::1]", "evil.example")',
        "tests/explorer/test_server.py -k loopback",
    ),
    Fault(
        "atomic file is not atomic",
        "files.py",
        "        os.replace(part, target)",
        "        os.replace(part, target) if not os.path.exists(target) else None",
        "tests/test_files.py",
    ),
    Fault(
        "wrong input exits with 0",
        "cli/__init__.py",
        "return _complain(_usage_message(error, typed), WRONG_INPUT, lang)",
        "return _complain(_usage_message(error, typed), 0, lang)",
        "tests/test_golden.py -k error",
    ),
    Fault(
        "errors stay English",
        "locale/__init__.py",
        'return message if lang == "en" else _translated(message, lang)[0]',
        "return message",
        "tests/test_locale.py -k mistake",
    ),
    Fault(
        "catalogue ignored",
        "locale/__init__.py",
        'message = text if lang == "en" else catalogue(lang)[text]',
        "message = text",
        "tests/test_golden.py -k steps-ko",
    ),
    Fault(
        "capture version not checked",
        "lens/files/container.py",
        "VERSION = 1\n",
        "VERSION = 2\n",
        "tests/test_stored_captures.py",
    ),
    Fault(
        "first row skipped",
        "training/data.py",
        "np.arange(step * batch_size, (step + 1) * batch_size,",
        "np.arange(step * batch_size + 1, (step + 1) * batch_size + 1,",
        "tests/training/test_order.py",
    ),
    Fault(
        "checkpoint digest not compared",
        "training/checkpoints.py",
        "if _digest(folder / name) != digest:",
        'if _digest(folder / name) == "":',
        "tests/training/test_loop.py -k checkpoint",
    ),
    Fault(
        "no chosen token stays",
        "training/recipes/mlm.py",
        "chosen & (fate >= 0.8) & (fate < 0.9), drawn",
        "chosen & (fate >= 0.8), drawn",
        "tests/training/test_recipes.py",
    ),
    Fault(
        "sentinels in reverse",
        "training/recipes/text_to_text.py",
        "sentinel = self.sentinel_ids[number]",
        "sentinel = self.sentinel_ids[-1 - number]",
        "tests/training/test_recipes.py",
    ),
    Fault(
        "loss not divided by the count",
        "training/loop.py",
        "count = sums[1].clamp(min=1)",
        "count = torch.ones_like(sums[1])",
        "tests/training/test_update.py",
    ),
    Fault(
        "average takes the new weights",
        "training/loop.py",
        "0.0 if first else self.decay)",
        "0.0 if first else 1 - self.decay)",
        "tests/training/test_update.py",
    ),
    Fault(
        "residual weights start too large",
        "models/initialization.py",
        ' / math.sqrt(2 * int(values["n_layer"]))',
        "",
        "tests/models/test_initialization.py -k gpt2",
    ),
    Fault(
        "fresh head replaces the body",
        "models/loading.py",
        "manual_seed(0), only={place.name for place in fresh})",
        "manual_seed(0))",
        "tests/models/test_loading.py -k fresh",
    ),
]


def plant(fault: Fault, folder: Path) -> str:
    """Run the tests with the fault planted: "found", "passed", or why it could not be planted or tested."""
    file = folder / "regard" / fault.file
    source = file.read_text(encoding="utf-8") if file.exists() else ""
    if source.count(fault.old) != 1:
        return f"STALE: {source.count(fault.old)} times in {fault.file}: {fault.old!r}"
    file.write_text(source.replace(fault.old, fault.new), encoding="utf-8")
    try:
        # A fork has torch imported already, which takes longer than most of the tests, but not regard.
        process = multiprocessing.get_context("fork").Process(target=run_tests, args=(fault.tests, folder))
        process.start()
        process.join()
    finally:
        file.write_text(source, encoding="utf-8")
    # A collection that fails (2) or selects nothing (5) is no better than a missing file, so it does not count.
    results = {0: "passed", 1: "found"}
    return results.get(process.exitcode or 0, f"NOT RUN (pytest exit {process.exitcode})")


def run_tests(tests: str, folder: Path) -> None:
    """Leave the process with pytest's status, or with 70 if it was not pytest that failed."""
    status = 70
    try:
        os.chdir(folder)
        sys.path.insert(0, str(folder))
        os.environ |= {"PYTHONPATH": str(folder), "CI": "1"}
        with open(folder / "pytest.log", "w", encoding="utf-8") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        code = pytest.main(["-x", "-q", "-p", "no:randomly", "-p", "no:cacheprovider", *tests.split()])
        imported = Path(sys.modules["regard"].__file__ or "")
        assert imported.is_relative_to(folder), f"the tests have imported {imported}"
        status = int(code)
    finally:
        os._exit(status)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="faults whose name contains this")
    parser.add_argument("--without", action="store_true", help="plant nothing, and check that the tests pass")
    arguments = parser.parse_args()
    faults = [fault for fault in FAULTS if arguments.only in fault.name]
    missed = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "regard"
        shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".git", ".venv", "__pycache__", "out", ".*_cache"))
        for number, fault in enumerate(faults, 1):
            result = plant(fault._replace(new=fault.old) if arguments.without else fault, folder)
            missed += result != ("passed" if arguments.without else "found")
            print(f"{number:2}/{len(faults)}  {fault.name:40} {result}", flush=True)
    print(f"{len(faults) - missed} of {len(faults)} {'pass without a fault' if arguments.without else 'faults found'}")
    sys.exit(missed > 0)


if __name__ == "__main__":
    main()
