"""Run the push kernels of several ranks that share a GPU, for NVIDIA's compute-sanitizer.

    python -m tests._tools.sanitize_ranks --ranks 2
    python -m tests._tools.sanitize_ranks --ranks 2 --under \
        "compute-sanitizer --tool memcheck --error-exitcode 9"
    python -m tests._tools.sanitize_ranks --ranks 4 --virtual --under ...

Each process is a rank whose mailboxes the others open by IPC handles. All sum partial results,
exchange tokens with the ranks of their experts, and compare with what the step's number says, with
sizes that do not fill a chunk among them. PyTorch shares only memory of its allocator, in whose
blocks a step past a mailbox's end is not seen. So ``--virtual`` has all ranks in one process, where
each tensor and each mailbox is an allocation of its own.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from dsv4 import ops
from dsv4.ops.moe_exchange import MoeSendArgs
from dsv4.parallel import mailboxes
from dsv4.parallel.token_rows import RowLayout
from dsv4.reference.all_reduce import rank_ordered_sum
from dsv4.testing.assertions import assert_bitwise

SIZES = ((1, 4096), (3, 1000), (5, 7168))  # tokens and hidden size
STEPS = 7  # all generations of slots, twice


def rank_program(ranks: int) -> None:
    """Do the work of one rank; the environment says which."""
    from tests.parallel.test_all_reduce import between_sublayers
    from tests.parallel.test_exchange_gpu import CHOICES, EXPERTS, tokens_of, wrong_rows, wrong_sums
    from tests.parallel.test_push_gpu import counted

    rank = int(os.environ["RANK"])
    device = torch.device("cuda", 0)
    dist.init_process_group("gloo")
    group = _group_name()
    assert dist.get_world_size() == ranks
    step = torch.zeros((), dtype=torch.int64, device=device)
    wrong = torch.zeros((), dtype=torch.int64, device=device)

    def sums(tokens: int, hidden: int) -> None:
        shape = (tokens, hidden)
        parts = [counted(step, source, tokens * hidden).view(shape) for source in range(ranks)]
        own, expected = parts[rank], rank_ordered_sum(parts)
        wrong.add_((ops.all_reduce(own, group, backend="push") != expected).sum())
        args = between_sublayers(tokens, hidden, device, 1)._asdict()
        del args["y"]
        fused = ops.hc_reduce_post_pre_norm(own, group=group, backend="push", **args)
        plain = ops.hc_post_pre_norm(expected, **args)
        for ours, right in zip(fused, plain, strict=True):
            wrong.add_((ours != right).sum())

    def tokens_to_experts(tokens: int, hidden: int) -> None:
        sent: MoeSendArgs = tokens_of(step, rank, tokens, hidden)
        received = ops.moe_send(sent.x, sent.ids, sent.weights, EXPERTS, group, backend="push")
        wrong.add_(wrong_rows(step, rank, ranks, received, tokens))
        total = ops.moe_return(received[0], received[1], sent.ids, EXPERTS, group, backend="push")
        wrong.add_(wrong_sums(sent, ranks, total))

    for tokens, hidden in SIZES:
        for work, nbytes in (
            (sums, 2 * tokens * hidden),
            (tokens_to_experts, RowLayout(CHOICES, hidden).nbytes(tokens)),
        ):
            box = mailboxes.ipc(group, nbytes, device)
            for _ in range(STEPS):
                step.add_(1)
                work(tokens, hidden)
            torch.cuda.synchronize()
            dist.barrier()
            del box
    assert int(wrong) == 0, f"{int(wrong)} numbers are wrong"
    print(f"rank {rank}: {int(step)} steps, all numbers right", flush=True)
    dist.barrier()


def virtual_program(ranks: int) -> None:
    """Do the work of all ranks in turn, in this process."""
    from dsv4.ops._library import as_record
    from dsv4.ops.hyper_connection import HcPostPreNormArgs
    from dsv4.triton import all_reduce, hyper_connection
    from tests.parallel.exchange_cases import exchange
    from tests.parallel.test_all_reduce import between_sublayers, partial_sums
    from tests.parallel.test_exchange_gpu import CHOICES
    from tests.parallel.test_moe_exchange import check_push

    device = torch.device("cuda", 0)
    for tokens, hidden in SIZES:
        # Ranks count the calls of their mailboxes: sums and fused sums have some of their own.
        flat, fused = (mailboxes.virtual(ranks, 2 * tokens * hidden, device) for _ in range(2))
        sent = mailboxes.virtual(ranks, RowLayout(CHOICES, hidden).nbytes(tokens), device)
        for seed in range(STEPS):
            parts = partial_sums(ranks, (tokens, hidden), device, seed)
            total = rank_ordered_sum(parts)
            for box, part in zip(flat, parts, strict=True):
                all_reduce.push_flat(box, part)
            for box, part in zip(flat, parts, strict=True):
                assert_bitwise(all_reduce.sum_pushed(box, part), total)
            args = between_sublayers(tokens, hidden, device, seed)
            expected = hyper_connection.hc_post_pre_norm(
                as_record(HcPostPreNormArgs, args, y=total)
            )
            pushed = [all_reduce.push(box, part) for box, part in zip(fused, parts, strict=True)]
            for one_rank in pushed:
                results = hyper_connection.reduced_post_pre_norm(args, one_rank)
                for result, right in zip(results, expected, strict=True):
                    assert_bitwise(result, right)
            check_push(sent, exchange(ranks, tokens, hidden, CHOICES, 4, seed, device))
    torch.cuda.synchronize()
    print(f"{ranks} ranks in one process: all bits right", flush=True)


def _group_name() -> str:
    assert dist.group.WORLD is not None, "the process group is initialised"
    return dist.group.WORLD.group_name


def run(ranks: int, under: str, virtual: bool, seconds: float) -> int:
    """Start the processes; return the first status that is not 0.

    Args:
        ranks: Number of ranks.
        under: Command that each process is run under, or an empty string.
        virtual: Whether all ranks are in one process.
        seconds: Limit for all together.
    """
    environment = os.environ | {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    environment["MASTER_PORT"] = str(29500 + os.getpid() % 2000)
    if virtual:
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    command = [*shlex.split(under), sys.executable, "-m", "tests._tools.sanitize_ranks"]
    command += ["--ranks", str(ranks), "--program", *["--virtual"] * virtual]
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / f"{rank}" for rank in range(1 if virtual else ranks)]
        processes = []
        for rank, log in enumerate(logs):
            with log.open("w") as output:
                own = environment | {"RANK": str(rank)}
                processes.append(
                    subprocess.Popen(command, env=own, stdout=output, stderr=subprocess.STDOUT)
                )
        try:
            statuses = [process.wait(seconds) for process in processes]
        except subprocess.TimeoutExpired:
            statuses = [124]
        finally:
            for process in processes:
                process.kill()
        for rank, log in enumerate(logs):
            print(f"--- rank {rank}", log.read_text()[-2500:], sep="\n", flush=True)
    return next((status for status in statuses if status), 0)


def main() -> int:
    """Run it as a program."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--under", default="", help="command that each process is run under")
    parser.add_argument("--virtual", action="store_true", help="all ranks in one process")
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--program", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.program:
        (virtual_program if options.virtual else rank_program)(options.ranks)
        return 0
    return run(options.ranks, options.under, options.virtual, options.seconds)


if __name__ == "__main__":
    sys.exit(main())
