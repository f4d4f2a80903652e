"""Checkpoints of a run: written beside and renamed, verified before they are read, the newest few kept."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

from regard.files import atomic_directory
from regard.formats import read_json

MANIFEST = "manifest.json"
NAME = re.compile(r"step-(\d{8})$")


class Checkpoints:
    """The checkpoints in one directory, each a directory step-00000120 with a manifest of its files.

    Args:
        directory: made at the first save.
        keep: how many of the newest stay.
    """

    def __init__(self, directory: Path, keep: int) -> None:
        self.directory, self.keep = directory, keep

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Write the state after `step` steps, from all processes, then delete the oldest ones.

        Raises OSError if writing failed; then the checkpoints that were there are untouched.
        """
        target = self.directory / f"step-{step:08d}"
        with ExitStack() as stack:
            part = None
            if _rank() == 0:
                writer = atomic_directory(target, "the checkpoint", replaces=set, last=MANIFEST)
                part = stack.enter_context(writer)
            part = _broadcast(part)
            try:
                with warnings.catch_warnings():  # that a single process is single
                    warnings.filterwarnings("ignore", "torch.distributed is disabled")
                    save_distributed(state, checkpoint_id=part, no_dist=not dist.is_initialized())
            except CheckpointException as error:
                causes = [cause for cause, _ in error.failures.values()] or [error]
                raise OSError(f"cannot write the checkpoint of step {step} to {target}: {causes[0]}") from causes[0]
            if _rank() == 0:
                files = {path.name: _digest(path) for path in sorted(Path(part).iterdir())}
                Path(part, MANIFEST).write_text(json.dumps({"step": step, "files": files}, indent=1), "utf-8")
        if _rank() == 0:
            # Later ones are left from before a resume: damaged, or they would have been resumed from.
            for old in sorted(other for other in self.steps() if other <= step)[: -self.keep]:
                shutil.rmtree(self.directory / f"step-{old:08d}", ignore_errors=True)
        if dist.is_initialized():
            dist.barrier()

    def load(self, state: dict[str, Any]) -> int:
        """Read the newest intact checkpoint into `state`, in place; warns of damaged ones. Its step, or 0 for none."""
        step = _broadcast(self.newest_intact() if _rank() == 0 else None)
        if step:
            folder = self.directory / f"step-{step:08d}"
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled")
                load_distributed(state, checkpoint_id=folder, no_dist=not dist.is_initialized())
        return int(step)

    def newest_intact(self) -> int:
        """The step of the newest checkpoint whose files are all as they were written, or 0."""
        for step in sorted(self.steps(), reverse=True):
            folder = self.directory / f"step-{step:08d}"
            problem = damage(folder)
            if problem is None:
                return step
            warnings.warn(f"checkpoint {folder} is skipped: {problem}", stacklevel=2)
        return 0

    def steps(self) -> list[int]:
        """The steps of all checkpoints in the directory, damaged ones too."""
        names = os.listdir(self.directory) if self.directory.is_dir() else []
        return [int(match[1]) for name in names if (match := NAME.match(name))]


def damage(folder: Path) -> str | None:
    """What is wrong with the files of a checkpoint, or None."""
    try:
        files = read_json(folder / MANIFEST)["files"]
        if not isinstance(files, dict) or not files:
            return f"{MANIFEST} lists no files"
        for name, digest in files.items():
            if not (folder / name).is_file():
                return f"{name} is missing"
            if _digest(folder / name) != digest:
                return f"{name} is not as it was written"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{MANIFEST} cannot be read: {error}"
    return None


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _broadcast(value: Any) -> Any:
    if not dist.is_initialized():
        return value
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]
