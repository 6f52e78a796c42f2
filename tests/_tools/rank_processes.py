"""Start a program once per rank, all on this machine, and wait for all."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path


def run_rank_processes(
    program: str, ranks: int, *arguments: object, folder: Path, seconds: float
) -> None:
    """Run a Python program in one process per rank; fail with their output if one fails.

    Args:
        program: Text of the program. Its first argument is its rank, and its environment has what
            ``torch.distributed.init_process_group`` reads.
        ranks: Number of processes.
        *arguments: Further arguments, the same for all.
        folder: Empty folder for their output.
        seconds: Time limit of each.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(ranks):
        environment = os.environ | {
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        command = [sys.executable, "-c", program, str(rank), *map(str, arguments)]
        with (folder / str(rank)).open("w") as output:
            processes.append(
                subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
            )
    try:
        for process in processes:
            process.wait(seconds)
    finally:
        for process in processes:
            process.kill()
    said = "\n".join((folder / str(rank)).read_text()[-3000:] for rank in range(ranks))
    assert [process.returncode for process in processes] == [0] * ranks, said
