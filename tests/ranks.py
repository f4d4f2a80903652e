"""Two processes of one run, with torchrun's variables, as forks of a process that has imported torch already."""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from pathlib import Path

# What they would each import anew, which takes longer than what most of them compute.
PRELOADED = ["torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.tensor.parallel"]


def run_ranks(target: Callable[[Path], object], folder: Path) -> None:
    """Call target(folder) in two processes to their end, and let none outlive this. What they print is in the folder.

    target: a function of a module that can be imported by its name.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    processes = []
    try:
        for rank in range(2):
            process = context.Process(target=_as_rank, args=(rank, port, target, folder))
            process.start()
            processes.append(process)
        for process in processes:
            process.join(300)
        codes = [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.join()
    logs = "\n".join((folder / f"log {rank}").read_text()[-4000:] for rank in range(2))
    assert codes == [0, 0], logs


def _as_rank(rank: int, port: int, target: Callable[[Path], object], folder: Path) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in place.items()} | {"CUDA_VISIBLE_DEVICES": ""}
    with open(folder / f"log {rank}", "w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        try:
            target(folder)
        except BaseException:
            traceback.print_exc(file=log)
            raise
