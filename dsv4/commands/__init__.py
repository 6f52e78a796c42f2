"""Commands of ``python -m dsv4``, a file for each.

A module has ``add``, which adds options to a parser, and for each of its commands a function that
runs it and returns the exit status. Bad input is a ``ValueError`` or ``OSError``, said in one
sentence on stderr, and the status 2; a failure of anything else is a ``RuntimeError`` and the
status 1.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable

from dsv4.commands import checkpoints, convert, env, generate, vllm_report
from dsv4.parallel import processes

_INTERRUPTED = 130  # as a shell says of SIGINT
_MODULES = (generate, checkpoints, convert, env, vllm_report)
_RUN: dict[str, Callable[[argparse.Namespace], int]] = {
    "generate": generate.run,
    "inspect": checkpoints.run_inspect,
    "verify": checkpoints.run_verify,
    "convert": convert.run,
    "env": env.run,
    "vllm-report": vllm_report.run,
}
NAMES = tuple(_RUN)


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the options of all commands."""
    for module in _MODULES:
        module.add(commands)


def run(options: argparse.Namespace) -> int:
    """Run the command of parsed options; returns the exit status."""
    return guarded(options.command, lambda: _RUN[options.command](options))


def guarded(command: str, action: Callable[[], int]) -> int:
    """The status of an action, with an error as one sentence."""
    try:
        return action()
    except BrokenPipeError:
        # Whoever read has enough; Python would complain when it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return _INTERRUPTED
    except (OSError, ValueError, ImportError) as error:
        status = 2
        if processes.is_first():  # all processes have the same input
            print(f"python -m dsv4 {command}: {_sentence(error)}", file=sys.stderr)
    except RuntimeError as error:
        status = 1
        print(f"python -m dsv4 {command}: {_sentence(error)}", file=sys.stderr)
    return status


def _sentence(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
