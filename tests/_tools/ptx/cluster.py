"""Runs kernels of clusters on the CPU: the CTAs of a cluster step together, as ``grid`` runs one.

A shared-memory address is that in the memory of all CTAs, one after another. Copies by ``cp.async``
are done when a thread waits for them, or at once: a kernel that reads a slot too early fails in the
first way, one that fills a slot too early in the second. An mbarrier counts arrivals and bytes; a
thread that waits for one that is not complete is an error, because all threads of a cluster come to
an instruction together.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch

from tests._tools.ptx.arithmetic import kind_of, unsigned
from tests._tools.ptx.grid import Block, Memory
from tests._tools.ptx.program import Instruction, Program, parse


class Cluster(Block):
    """The CTAs of a cluster: registers of all their threads, and their shared memories."""

    def __init__(
        self,
        program: Program,
        shape: tuple[int, int, int],
        first_cta: int,
        memory: Memory,
        values: dict[str, int],
        is_eager: bool,
    ):
        self.ctas, self.of_cta, shared = shape
        self.window = -(-shared // 128) * 128  # as aligned as shared memory is
        super().__init__(program, self.ctas * self.of_cta, self.ctas * self.window, memory, values)
        self.cta = np.arange(self.threads) // self.of_cta
        self.first_cta, self.is_eager = first_cta, is_eager
        self.groups: list[list] = []
        self.open: list = []
        self.arrivals: Counter[int] = Counter()
        self.bytes: Counter[int] = Counter()

    def bits(self, operand) -> np.ndarray:
        if operand == "%tid.x":
            return (np.arange(self.threads) % self.of_cta).astype(np.uint64)
        if operand == "%ctaid.x":
            return (self.first_cta + self.cta).astype(np.uint64)
        if operand == "__dynamic_shmem__0":
            return (self.cta * self.window).astype(np.uint64)
        return super().bits(operand)

    def do_mapa(self, instruction: Instruction, mask: np.ndarray) -> None:
        target, address, rank = instruction.operands
        local = self.read(address, "u32") % np.uint32(self.window)
        self.write(target, local + self.read(rank, "u32") * np.uint32(self.window), mask)

    def do_mbarrier(self, instruction: Instruction, mask: np.ndarray) -> None:
        kind, operands = instruction.parts[1], instruction.operands
        if kind == "try_wait":
            for address in self._addresses(operands[1], mask):
                waiting = self.arrivals[address], self.bytes[address]
                if waiting != (0, 0):
                    raise RuntimeError(f"an mbarrier still waits for arrivals, bytes: {waiting}")
            self.write(operands[0], np.ones(self.threads, bool), mask)
        elif kind == "init":
            for address in self._addresses(operands[0], mask):
                self.arrivals[address] = int(operands[1])
        else:
            assert instruction.parts[1:3] == ["arrive", "expect_tx"]
            counts = self.read(operands[2], "u32")[mask]
            for address, count in zip(self._addresses(operands[1], mask), counts, strict=True):
                self.arrivals[address] -= 1
                self.bytes[address] += int(count)

    def _addresses(self, operand, mask: np.ndarray) -> list[int]:
        base, offset = operand
        return [int(a) + offset for a in self.bits(base)[mask]]

    def do_st(self, instruction: Instruction, mask: np.ndarray) -> None:
        if instruction.parts[1] != "async":
            super().do_st(instruction, mask)
            return
        (base, offset), values, (barrier, _) = instruction.operands
        words = [self.read(v, "f32").view(np.uint32) for v in values]
        raw = np.ascontiguousarray(np.stack(words, 1)).view(np.uint8)
        self.store("shared", base, offset, raw, mask)
        for address in self._addresses([barrier, 0], mask):
            self.bytes[address] -= 4 * len(values)

    def do_cp(self, instruction: Instruction, mask: np.ndarray) -> None:
        kind = instruction.parts[2]
        if kind == "bulk":
            self._bulk(instruction, mask)
        elif kind == "commit_group":
            assert mask.all(), "some threads close no group"
            self.groups.append(self.open)
            self.open = []
        elif kind == "wait_group":
            for group in self.groups[: len(self.groups) - int(instruction.operands[0])]:
                while group:
                    self._copied(*group.pop(0))
        else:
            (to, skip), (of, offset), size = instruction.operands
            copy = (self.bits(to) + np.uint64(skip), self.bits(of) + np.uint64(offset), mask.copy())
            if self.is_eager:
                self._copied(*copy, int(size))
            else:
                self.open.append((*copy, int(size)))

    def _copied(self, to: np.ndarray, of: np.ndarray, mask: np.ndarray, count: int) -> None:
        names = "%rd900000", "%rd900001"
        self.registers |= dict(zip(names, (to, of), strict=True))
        self.store("shared", names[0], 0, self.load("global", names[1], 0, count, mask), mask)

    def _bulk(self, instruction: Instruction, mask: np.ndarray) -> None:
        """Copy, or prefetch, many bytes, 16 at a time."""
        is_prefetch = instruction.parts[3] == "prefetch"
        to_of = instruction.operands[:1] if is_prefetch else instruction.operands[:2]
        count = int(self.read(instruction.operands[len(to_of)], "u32")[mask][0])
        assert count % 16 == 0
        (of, offset) = to_of[-1]
        for at in range(0, count, 16):
            raw = self.load("global", of, offset + at, 16, mask)
            if not is_prefetch:
                self.store("shared", to_of[0][0], to_of[0][1] + at, raw, mask)
        if not is_prefetch:
            for address in self._addresses(instruction.operands[3], mask):
                self.bytes[address] -= count


def launch(
    ptx: str,
    arguments: list[torch.Tensor | int | float],
    ctas: int,
    cluster: int,
    threads: int,
    shared: int,
    *,
    is_eager: bool,
) -> None:
    """Run a kernel's whole grid of ``ctas``; ``arguments`` are its parameters.

    ``is_eager`` says when ``cp.async`` copies: at once, or when a thread waits.
    """
    program = parse(ptx)
    memory = Memory(a for a in arguments if isinstance(a, torch.Tensor))
    values: dict[str, int] = {"%ntid.x": threads, "%nctaid.x": ctas}
    for (name, type_), argument in zip(program.parameters, arguments, strict=True):
        if isinstance(argument, torch.Tensor):
            values[name] = argument.data_ptr()
        elif type_[0] == "f":
            values[name] = int(np.array(argument, kind_of(type_)).view(unsigned(int(type_[1:]))))
        else:
            values[name] = int(argument) & (1 << int(type_[1:])) - 1
    for first in range(0, ctas, cluster):
        Cluster(program, (cluster, threads, shared), first, memory, values, is_eager).run()
