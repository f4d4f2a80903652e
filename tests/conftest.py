"""Settings of every test run (seeds, one thread, no terminal, skips without a GPU) and the shared fixtures."""

import gc
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from shutil import which

# Sums split over more threads round differently, so a test near its bound would depend on the machine's cores; and
# most tensors here are so small that a second thread only costs. Before torch is imported: torch.set_num_threads holds
# for the calling thread only, and the server's jobs run in threads of their own.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch
from hypothesis import settings

pytest_plugins = ["commanding", "grids"]
torch.set_num_threads(1)

# The same examples and the same order in every run, so that a failure is the change's; `make explore`, which is
# `--hypothesis-profile=explore`, draws new ones.
SEED = 15
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.register_profile("explore", deadline=None, max_examples=1000, print_blob=True)
settings.load_profile("ci")


@pytest.hookimpl(tryfirst=True)  # before pytest-randomly draws a seed, which it hands to the processes of pytest-xdist
def pytest_configure(config: pytest.Config) -> None:
    if not exploring(config) and getattr(config.option, "randomly_seed", None) == "default":
        config.option.randomly_seed = SEED


def exploring(config: pytest.Config) -> bool:
    return config.getoption("--hypothesis-profile", None) == "explore"


@pytest.fixture(autouse=True)
def seed() -> None:
    """pytest-randomly seeds random and NumPy before each test, but not torch."""
    # Without a GPU, torch.manual_seed formats the stack three times, for devices that never come: 1 ms a test.
    (torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed)(0)


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The width and colours of whoever runs the tests are not the tests'."""
    for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def no_fetched_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models that whoever runs the tests has fetched are not the tests'."""
    monkeypatch.setenv("REGARD_HOME", os.devnull)


@pytest.fixture(autouse=True)
def no_prepared_launches() -> None:
    """What a test changes in the backends must not be kept for the next one."""
    if (backends := sys.modules.get("regard.backends")) is not None:
        backends._LAUNCHES.clear()


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder of real data and weights beside the checkout."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("needs the shared data, which is not at ../shared/data beside this checkout")
    return folder


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make standard output a terminal of so many columns, and of what more its environment says."""

    def terminal(columns: int, **more: str) -> None:
        # One number of colours for all: rich writes a style for good in the colours of the first terminal it meets.
        given = {"FORCE_COLOR": "1", "COLUMNS": str(columns), "TERM": "xterm-256color", "COLORTERM": "truecolor"}
        for name, value in (given | more).items():
            monkeypatch.setenv(name, value)

    return terminal


@pytest.fixture
def compiler() -> None:
    """What torch.compile builds C++ with; torch hands it the path of its own libraries unquoted."""
    if which("g++") is None:
        pytest.skip("needs a C++ compiler, g++, for torch.compile")
    if " " in torch.__file__:
        pytest.skip("torch.compile cannot link where torch's path has a space in it")


# The files that take longest, 30 to 5 s each. They start first, so that no process ends with one alone. Those that
# need a browser come one after the other, since a process closes it with the last of its files in explorer/.
LONGEST = [
    "explorer/test_page_opening.py",
    "explorer/test_image_page.py",
    "explorer/test_page.py",
    "explorer/test_page_corners.py",
    "explorer/test_page_swaps.py",
    "explorer/test_page_share.py",
    "explorer/test_page_atlas.py",
    "explorer/test_page_predictions.py",
    "explorer/test_server_page.py",
    "explorer/test_link_effects_served.py",
    "explorer/test_widget_page.py",
    "cli/test_train.py",
    "test_layout.py",
    "cli/test_cli.py",
    "test_learn.py",
    "test_op.py",
    "test_conformance.py",
    "models/test_fused_loss.py",
    "training/test_loop.py",
    "lens/test_gpu_engine.py",
    "viz/test_figures.py",
    "explorer/test_server.py",
    "test_golden.py",
    "lens/test_watch_long.py",
    "test_site.py",
    "edits/test_survey.py",
    "viz/test_lens_figures.py",
    "backends/test_kernels_compile.py",
    "training/test_trainer.py",
    "generation/test_beam_search.py",
    "tasks/test_tasks_on_images.py",
    "lens/test_function_taps.py",
    "lens/test_look.py",
    "lens/test_saving.py",
    "parity/test_verifying.py",
    "lens/test_watch_interrupted.py",
    "backends/test_sparse_kernels.py",
    "backends/test_sparse.py",
    "models/test_vit.py",
    "models/test_idefics.py",
    "backends/test_fused.py",
    "test_locale.py",
    "models/test_tensor_parallel.py",
    "models/test_blip.py",
    "training/test_parallel.py",
    "cli/test_look_text.py",
    "models/test_swin.py",
    "lens/test_watch_models.py",
    "backends/test_backends.py",
    "explorer/test_server_attacks.py",
    "lens/test_large_logits.py",
    "models/test_big_bird.py",
    "session/test_image_session.py",
    "cli/test_look_image.py",
    "generation/test_generation_loop.py",
    "models/test_llava.py",
    "data/test_tokenizer.py",
]


@pytest.hookimpl(trylast=True)  # after pytest-randomly has shuffled the files, and the tests in each
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first; skip tests marked gpu, which `pytest -m gpu` selects, without a CUDA device."""
    folder = Path(__file__).resolve().parent
    ranks = {folder / name: rank for rank, name in enumerate(LONGEST)}
    assert all(path.exists() for path in ranks), f"LONGEST in {__file__} names a file that is not there"
    items.sort(key=lambda item: ranks.get(item.path, len(ranks)))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and torch finds none"))


def pytest_collection_finish() -> None:
    """Leave what is imported out of every later collection of garbage, which takes half a second with it.

    And collect more rarely than after each 700 new objects: that took a tenth of the tests' time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def pytest_unconfigure() -> None:
    gc.unfreeze()  # else libraries complain at exit of what was never freed


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the seed of an exploring run, and the GPU code that has changed since its last run on a GPU."""
    if exploring(config) and hasattr(config.option, "randomly_seed"):
        terminalreporter.write_line(f"Random order: repeat it with --randomly-seed={config.option.randomly_seed}")
    record = Path(__file__).resolve().parent.parent / "benchmarks" / "results" / "gpu-check.json"
    pending = json.loads(record.read_text("utf-8"))["pending"] if record.exists() else None
    if pending:
        files = ", ".join(pending["files"]) if len(pending["files"]) < 6 else f"{len(pending['files'])} files"
        terminalreporter.write_line(f"GPU code not verified: {files}. Reason: {pending['reason']}", yellow=True)
