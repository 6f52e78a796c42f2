"""Processes of engines, for compare.py: start them, ask them, end them."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compare_engine import ANSWER

PROGRAM = str(Path(__file__).with_name("compare_engine.py"))

ENGINES: dict[str, dict[str, str]] = {
    "stock": {"DSV4_VLLM": "off"},
    "parts": {"DSV4_VLLM": "all"},
    "model": {"DSV4_VLLM": "model"},
    "drafts": {"DSV4_VLLM": "all"},
    "parts-checked": {"DSV4_VLLM": "all", "DSV4_VLLM_CHECK": "1"},
    "model-checked": {"DSV4_VLLM": "model", "DSV4_VLLM_CHECK": "1"},
}
DRAFTING = {"drafts"}


class EngineError(RuntimeError):
    """An engine that failed, ended, or did not answer in time."""


@dataclass
class Engine:
    """An engine in a process of its own.

    Attributes:
        name: Key of ``ENGINES``.
        failed: Why it is not used any more; empty: it is.
    """

    name: str
    process: subprocess.Popen[str]
    log: Path
    failed: str = ""
    _answers: queue.Queue[str | None] = field(default_factory=queue.Queue)

    @classmethod
    def launch(
        cls, name: str, request: dict[str, Any], log: Path, program: str = PROGRAM
    ) -> Engine:
        """Start the process; ``answer`` waits until the engine is ready.

        Args:
            name: Key of ``ENGINES``.
            request: Argument of ``serve``.
            log: File for what the engine prints.
            program: Program that calls ``compare_engine.serve``.
        """
        usual = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine steps when this program says so
            "VLLM_DEEP_GEMM_WARMUP": "skip",  # of sizes that are not timed
            "VLLM_PLUGINS": "dsv4",
        }
        environment = {**usual, **os.environ, **ENGINES[name]}
        log.write_text("")
        with log.open("a") as output:  # where ``_listen`` appends, too
            process = subprocess.Popen(
                [sys.executable, program, json.dumps(request)],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
            )
        engine = cls(name, process, log)
        threading.Thread(target=engine._listen, daemon=True).start()
        return engine

    def _listen(self) -> None:
        assert self.process.stdout is not None
        with self.log.open("a") as output:
            for line in self.process.stdout:
                if line.startswith(ANSWER):
                    self._answers.put(line.removeprefix(ANSWER))
                else:
                    output.write(line)
        self._answers.put(None)

    def ask(self, call: str, seconds: float, **arguments: Any) -> dict[str, Any]:
        """Let the engine do something; see ``answer``."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"call": call, "arguments": arguments}) + "\n")
            self.process.stdin.flush()
        except OSError as error:
            raise EngineError(f"{self.name}: {error}: {self._last_lines()}") from error
        return self.answer(call, seconds)

    def answer(self, call: str, seconds: float) -> dict[str, Any]:
        """Wait for an answer.

        Raises:
            EngineError: if it does not come in time, or the process has ended.
        """
        try:
            line = self._answers.get(timeout=max(0.0, seconds))
        except queue.Empty:
            raise EngineError(f"{self.name}: {call} took more than {seconds:.0f} s") from None
        if line is None:
            raise EngineError(f"{self.name} ended in {call}: {self._last_lines()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _last_lines(self) -> str:
        lines = self.log.read_text().splitlines()
        errors = [line for line in lines if "Error" in line and "WARNING" not in line]
        return " | ".join(errors[-3:])[-800:] or f"see {self.log}"

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()
