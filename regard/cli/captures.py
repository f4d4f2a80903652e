"""Capture files: reading them, `regard diff` and `regard doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from regard.cli.commands import DiffOptions, DoctorOptions
from regard.cli.terminal import Terminal, print_json

if TYPE_CHECKING:
    from regard.lens.capture import Capture
    from regard.session.session import Session


def read_capture(path: Path) -> Capture:
    """The capture that a file holds.

    >>> import tempfile
    >>> from regard.lens.capture import Capture
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     Capture("GPT2").save(f"{folder}/run.regard")
    ...     read_capture(Path(folder, "run.regard")).model
    'GPT2'

    Raises:
        ValueError: for a file that is not a capture.
        OSError: for a file that cannot be read, with its name.
    """
    from regard.lens.capture import open

    try:
        return open(path)
    except OSError as error:
        if error.strerror is None:  # ours, which names the path already
            raise
        raise OSError(f"cannot read {str(path)!r}: {error.strerror}") from None


def read_session(path: Path) -> Session:
    """The capture that a file of `regard look` holds, with its words and images. Raises as `read_capture`."""
    from regard.lens.files.container import CaptureFileError
    from regard.session.session import session_of

    try:
        return session_of(read_capture(path), path.name)
    except CaptureFileError as error:
        hint = f"; if it is a text: --file {path}" if "not a regard capture" in str(error) else ""
        raise ValueError(f"{error}{hint}") from None


def diff(options: DiffOptions) -> int:
    """Compare two captures; 1 if they differ."""
    from regard.lens.comparison import compare

    paths = options.a, options.b
    captures = [read_capture(path) for path in paths]
    found = compare(*captures, tolerance=options.tolerance)
    if options.json:
        print_json(
            {
                "a": options.a,
                "b": options.b,
                "same": found.same,
                "tolerance": found.tolerance,
                "modules": found.modules,
                "compared": found.compared,
                "only_a": found.only_a,
                "only_b": found.only_b,
                "unlike": [{"what": u.what, "path": u.path, "call": u.n, "a": u.a, "b": u.b} for u in found.unlike],
                "rows": found.rows,
            }
        )
    else:
        out = Terminal(options.lang)
        for name, path, capture in zip("AB", paths, captures, strict=True):
            origin = out.say("{model}, written {written}", model=capture.model, written=capture.origin["written"])
            out.print((f"{name}  ", "bold"), str(path), (f"   {origin}", "dim"))
        out.print()
        out.print(found.text(options.lang))
    return 0 if found.same else 1


def doctor(options: DoctorOptions) -> int:
    """Print what is wrong with a run; 1 if there are errors."""
    diagnosis = read_capture(options.file).doctor()
    if options.json:
        findings = [
            {
                "severity": finding.severity,
                "code": finding.code,
                "paths": finding.paths,
                "text": finding.text(options.lang),
                "advice": finding.advice(options.lang),
            }
            for finding in diagnosis.findings
        ]
        masks = [
            {
                "paths": use.paths,
                "kind": use.kind,
                "mask": use.facts.mask,
                "causal": use.facts.causal,
                "bias": use.facts.bias_kind,
                "queries": use.facts.sizes[2],
                "keys": use.keys,
                "calls": use.calls,
            }
            for use in diagnosis.masks
        ]
        print_json(
            {
                "ok": diagnosis.ok,
                "calls": diagnosis.calls,
                "modules": diagnosis.modules,
                "unread": diagnosis.unread,
                "findings": findings,
                "masks": masks,
            }
        )
    else:
        Terminal(options.lang).titled(diagnosis.text(options.lang))
    return 1 if any(finding.severity == "error" for finding in diagnosis.findings) else 0
