"""Sessions, and a way to run the page's modules, that several test files of the page share."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard.explorer.export import bundle, modules
from regard.lens.capture import Capture, Record
from regard.lens.view import View
from regard.session.session import Session, session_of

LONG = 16_384
node = pytest.mark.skipif(shutil.which("node") is None, reason="needs node to run the page's modules")


def long_session(length: int = LONG) -> tuple[Session, Tensor, Tensor]:
    """A text of 1,000 words again and again, causal: one head looks at the same word, one near by."""
    made = torch.Generator().manual_seed(7)
    words = torch.randint(0, 997, (1000,), generator=made).repeat(17)[:length]
    table = torch.nn.functional.normalize(torch.randn(997, 16, generator=made), dim=-1)
    angle = torch.arange(length)[:, None] * torch.tensor([0.4, 0.11, 0.03, 0.007, 0.0017, 0.0004, 0.0001, 0.00003])
    near = torch.cat([angle.cos(), angle.sin()], -1)
    k = torch.stack([table[words], near])[None]  # (1, 2, N, 16)
    q = k * torch.tensor([44.0, 12.0])[:, None, None]
    measures = ["entropy", "effective", "received", "max_logit", "map"]
    view = regard.look(q, k, k, mask=regard.masks.causal(), measures=measures)
    capture = Capture("Toy", [[f"w{word}" for word in words.tolist()]])
    capture.records.append(Record("layers.0", 0, "self", "test", "test", view=view))
    return session_of(capture, "a long document"), q[0], k[0]


def large_session() -> Session:
    """16 layers of 32 heads that saw 131,072 tokens; measures only, as a capture's file holds them."""
    n, heads = 131_072, 32
    line = torch.linspace(0, 2, n).expand(1, heads, n)
    capture = Capture("Large", [[f"token{i}" for i in range(n)]])
    for layer in range(16):
        held = {"entropy": line, "received": line + layer, "map": torch.rand(1, heads, 64, 64)}
        held |= {f"pattern {name}": torch.rand(1, heads) for name in ("own", "first", "induction")}
        record = Record(f"layers.{layer}", 0, "self", "test", "test", view=View((1, heads, n, n), held))
        capture.records.append(record)
    return session_of(capture, "large")


def ran(entry: str, what: str) -> Any:
    """The value of an expression over what a module of the page exports, called `page` in it."""
    script, name = bundle(modules(), entry)
    source = f"{script}\nconst page = {name};\nconst all = async () => {what};\n"
    source += "const plain = (_, one) => (ArrayBuffer.isView(one) ? Array.from(one) : one);\n"
    source += "console.log(JSON.stringify(await all(), plain));"
    done = subprocess.run(["node", "--input-type=module"], input=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
