"""Runs compiled kernels on the CPU: whole grids of threads, one PTX instruction after another.

What Triton's interpreter cannot show is what the compiler makes of a kernel: which thread has which
value, and instructions that are written out. Here the threads of a block step together, those whose
next instruction comes first in the program; memory is the tensors' own, and an access outside them
or outside shared memory is an error. Races are not seen: each instruction is done by all threads
before the next.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable

import numpy as np
import torch

from tests._tools.ptx.arithmetic import (
    BINARY,
    OF_PAIRS,
    ORDERS,
    UNARY,
    bit_field,
    fma,
    from_bfloat16,
    from_float16,
    halves_of,
    high_product,
    in_64_bits,
    kind_of,
    larger_or_nan,
    looked_up,
    paired,
    permuted,
    to_bfloat16,
    to_byte,
    to_e2m1,
    to_float16,
    unsigned,
)
from tests._tools.ptx.block_scaled import (
    BLOCK_SCALED,
    left_operand,
    left_scales,
    result_fragments,
    right_operand,
    right_scales,
)
from tests._tools.ptx.program import Instruction, Program, parse, space_of

_WIDTHS = {"rs": 16, "r": 32, "rd": 64, "f": 32, "fd": 64}
_SILENT = ("griddepcontrol", "bar", "barrier", "prefetch", "fence", "membar")
# Of products of 16 columns, by a warpgroup.
_SUMS = (["f32", "bf16", "bf16"], ["f32", "f16", "f16"])


class Memory:
    """The bytes of some tensors, by their addresses."""

    def __init__(self, tensors: Iterable[torch.Tensor]):
        self.spans = []
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes():
                array = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
                self.spans.append((storage.data_ptr(), storage.nbytes(), array))

    def at(
        self, addresses: np.ndarray, count: int
    ) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """For each tensor of which some are: its bytes, which threads', and the places."""
        result, left = [], np.ones(len(addresses), bool)
        for start, size, array in self.spans:
            inside = (addresses >= start) & (addresses + count <= start + size) & left
            if inside.any():
                result.append((array, inside, (addresses - start)[inside]))
                left &= ~inside
        if left.any():
            raise IndexError(f"{count} bytes at {int(addresses[left][0]):#x}, outside every tensor")
        return result


class Block:
    """A CTA: its registers, all threads' at once, and its shared memory."""

    def __init__(self, program: Program, threads: int, shared: int, memory: Memory, values: dict):
        self.program, self.threads, self.memory, self.values = program, threads, memory, values
        self.registers: dict[str, np.ndarray] = {}
        self.shared = np.full(shared, 0xA5, np.uint8)
        self.at = np.zeros(threads, np.int64)
        self.lanes = np.arange(threads) % 32

    def run(self) -> None:
        """Run until every thread has returned."""
        end = len(self.program.instructions)
        while True:
            now = int(self.at.min())
            if now >= end:
                return
            mask = self.at == now
            with np.errstate(all="ignore"):
                self.step(self.program.instructions[now], mask)
            self.at[mask & (self.at == now)] += 1

    def step(self, instruction: Instruction, mask: np.ndarray) -> None:
        if instruction.predicate:
            holds = self.predicate(instruction.predicate)
            mask = mask & (holds != instruction.negated)
        name = instruction.parts[0]
        if name == "bra":
            self.at[mask] = self.program.labels[instruction.operands[0]]
        elif name in ("ret", "exit"):
            self.at[mask] = len(self.program.instructions)
        elif name in ("bar", "barrier") and instruction.parts[1] != "warp":
            running = self.at < len(self.program.instructions)
            if not (mask == running).all():
                raise RuntimeError("some threads of the block do not come to its barrier")
        elif name not in _SILENT and mask.any():
            getattr(self, f"do_{name}", self.do_plain)(instruction, mask)

    # What operands say.

    def predicate(self, name: str) -> np.ndarray:
        if name in ("true", "false", "1", "0", "-1"):
            return np.full(self.threads, name in ("true", "1", "-1"))
        return self.registers.get(name, np.zeros(self.threads, bool))

    def bits(self, operand) -> np.ndarray:
        """Return the value of a register, a number or a special register, uint64."""
        if isinstance(operand, tuple):
            width = self.width(operand[0])
            parts = [self.bits(part) << np.uint64(i * width) for i, part in enumerate(operand)]
            return functools.reduce(np.bitwise_or, parts)
        if operand in self.registers:
            return self.registers[operand]
        if operand in self.values:
            return np.full(self.threads, self.values[operand], np.uint64)
        if operand == "%tid.x":
            return np.arange(self.threads, dtype=np.uint64)
        if operand == "%laneid":
            return self.lanes.astype(np.uint64)
        if operand == "global_smem":
            return np.zeros(self.threads, np.uint64)
        if re.match(r"0[fF]", operand):
            return np.full(self.threads, int(operand[2:], 16), np.uint64)
        if re.match(r"0[dD]", operand):
            return np.full(self.threads, int(operand[2:], 16), np.uint64)
        if re.match(r"-?\d", operand):
            number = int(operand.rstrip("U"), 0)
            return np.full(self.threads, number & 0xFFFFFFFFFFFFFFFF, np.uint64)
        # What nobody has written: the compiler reads it where no result depends on it.
        width = self.width(operand)
        return np.full(self.threads, 0x5A5A5A5A5A5A5A5A >> 64 - width, np.uint64)

    def read(self, operand, type_: str) -> np.ndarray:
        kind = kind_of(type_)
        return self.bits(operand).astype(unsigned(8 * np.dtype(kind).itemsize)).view(kind)

    def read_number(self, operand, type_: str) -> np.ndarray:
        """``read``, of 16 bits too as what they say."""
        bits = self.read(operand, type_)
        if type_ == "bf16":
            return from_bfloat16(bits)
        return from_float16(bits) if type_ == "f16" else bits

    def width(self, name: str) -> int:
        if name in self.program.widths:
            return self.program.widths[name]
        result = re.match(r"%([a-z]+)\d+$", name)
        assert result, f"{name} is no register"
        return _WIDTHS[result[1]]

    def write(self, name, value: np.ndarray, mask: np.ndarray) -> None:
        """``value`` by its type: signed ones get the sign in a wider register."""
        if name == "_":
            return
        if isinstance(name, tuple):
            size = self.width(next(part for part in name if part != "_"))
            bits = value.view(unsigned(8 * value.dtype.itemsize)).astype(np.uint64)
            for i, part in enumerate(name):
                self.write(part, bits >> np.uint64(i * size), mask)
            return
        if value.dtype == bool:
            old = self.predicate(name)
        else:
            old = self.registers.get(name, np.zeros(self.threads, np.uint64))
            if value.dtype.kind == "i":
                value = value.astype(np.int64)
            value = value.view(unsigned(8 * value.dtype.itemsize)).astype(np.uint64)
            width = self.width(name)
            if width < 64:
                value = value & np.uint64((1 << width) - 1)
        self.registers[name] = value if mask.all() else np.where(mask, value, old)

    # Instructions.

    def do_plain(self, instruction: Instruction, mask: np.ndarray) -> None:
        if not instruction.operands:
            raise NotImplementedError(instruction.name)
        target, *sources = instruction.operands
        parts = instruction.parts
        name, type_ = parts[0], parts[-1]
        whole = ".".join(parts)
        if type_ == "pred":
            operands = [self.predicate(s) for s in sources]
            result = ~operands[0] if name == "not" else (BINARY | UNARY)[name](*operands)
        elif whole in OF_PAIRS:
            result = OF_PAIRS[whole](*(self.read(s, type_) for s in sources))
        elif type_ == "f32x2":
            self.do_pairs(instruction, mask)
            return
        elif type_.endswith("x2") or type_ in ("f16", "bf16"):
            raise NotImplementedError(instruction.name)
        elif name in ("shl", "shr"):
            result = BINARY[name](self.read(sources[0], type_), self.read(sources[1], "u32"))
        elif name in ("min", "max"):
            # Of two, or of three on Blackwell.
            result = functools.reduce(self.extreme(parts), (self.read(s, type_) for s in sources))
        elif len(sources) == 1 and name in UNARY:
            result = UNARY[name](self.read(sources[0], type_))
        elif len(sources) == 2 and name in BINARY and "hi" not in parts and "wide" not in parts:
            result = BINARY[name](*(self.read(s, type_) for s in sources))
        else:
            raise NotImplementedError(instruction.name)
        self.write(target, result, mask)

    def do_pairs(self, instruction: Instruction, mask: np.ndarray) -> None:
        """Compute on two float32 in 64 bits."""
        target, *sources = instruction.operands
        functions: dict[str, Callable[..., np.ndarray]] = {"fma": fma, **BINARY, **UNARY}
        words = [self.bits(s) for s in sources]
        halves = [
            functions[instruction.parts[0]](
                *((w >> np.uint64(shift)).astype(np.uint32).view(np.float32) for w in words)
            )
            for shift in (0, 32)
        ]
        low, high = (h.view(np.uint32).astype(np.uint64) for h in halves)
        self.write(target, low | high << np.uint64(32), mask)

    def extreme(self, parts: list[str]) -> Callable[..., np.ndarray]:
        name, type_ = parts[0], parts[-1]
        if type_[0] != "f":
            return np.maximum if name == "max" else np.minimum
        if parts[1:-1] == ["NaN"]:
            assert name == "max"
            return larger_or_nan
        assert parts[1:-1] in ([], ["ftz"])
        return np.fmax if name == "max" else np.fmin

    def do_mul(self, instruction: Instruction, mask: np.ndarray) -> None:
        target, *sources = instruction.operands
        parts = instruction.parts
        if parts[-1] == "f32x2":
            self.do_pairs(instruction, mask)
            return
        if ".".join(parts) in OF_PAIRS or "16x2" in parts[-1] or parts[-1] in ("f16", "bf16"):
            self.do_plain(instruction, mask)
            return
        a, b = (self.read(s, parts[-1]) for s in sources)
        if parts[1] == "wide":
            result = in_64_bits(a) * in_64_bits(b)
        else:
            result = high_product(a, b) if parts[1] == "hi" else a * b
        self.write(target, result, mask)

    def do_mad(self, instruction: Instruction, mask: np.ndarray) -> None:
        target, *sources = instruction.operands
        parts = instruction.parts
        type_ = parts[-1]
        a, b = (self.read(s, type_) for s in sources[:2])
        wide = parts[1] == "wide"
        assert wide or parts[1] == "lo"
        c = self.read(sources[2], f"{type_[0]}{int(type_[1:]) * 2}" if wide else type_)
        product = (in_64_bits(a) * in_64_bits(b)).astype(c.dtype) if wide else a * b
        self.write(target, product + c, mask)

    def do_fma(self, instruction: Instruction, mask: np.ndarray) -> None:
        target, *sources = instruction.operands
        *_, result, type_ = instruction.parts
        name = f"fma.rn.{type_}"
        if type_ == "f32x2":
            self.do_pairs(instruction, mask)
            return
        values = [self.read(s, type_) for s in sources]
        if result == "f32":  # of two factors of 16 bits, on Blackwell
            factors = [self.read_number(s, type_) for s in sources[:2]]
            actual = fma(*factors, self.read(sources[2], "f32"))
        elif type_ == "f64":
            # Rounded twice: of the arguments of angles, of which float32 is taken.
            terms = ((float(a) * float(b), float(c)) for a, b, c in zip(*values, strict=True))
            actual = np.array([math.fsum(both) for both in terms])
        elif type_ == "f32":
            actual = fma(*values)
        elif name in OF_PAIRS:
            actual = OF_PAIRS[name](*values)
        else:
            raise NotImplementedError(instruction.name)
        self.write(target, actual, mask)

    def do_setp(self, instruction: Instruction, mask: np.ndarray) -> None:
        target, *sources = instruction.operands
        _, order, *joined, type_ = instruction.parts
        a, b = (self.read_number(s, type_) for s in sources[:2])
        unordered = np.isnan(a) | np.isnan(b) if a.dtype.kind == "f" else np.zeros(len(a), bool)
        if order in ("nan", "num"):
            result = unordered if order == "nan" else ~unordered
        elif order in ("lo", "ls", "hi", "hs"):
            result = ORDERS[{"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}[order]](a, b)
        elif order in ORDERS:
            result = ORDERS[order](a, b) & ~unordered
        else:
            assert order.endswith("u")
            result = ORDERS[order[:-1]](a, b) | unordered
        if joined and joined != ["ftz"]:
            result = BINARY[joined[0]](result, self.predicate(sources[2]))
        first, _, second = target.partition("|")
        self.write(first, result, mask)
        if second:
            self.write(second, ~result, mask)

    def do_selp(self, instruction: Instruction, mask: np.ndarray) -> None:
        target, a, b, which = instruction.operands
        a, b = (self.read(s, instruction.parts[-1]) for s in (a, b))
        self.write(target, np.where(self.predicate(which), a, b), mask)

    def parameter_at(self, register: str, mask: np.ndarray) -> np.ndarray:
        """Values of the parameters whose addresses a register holds, uint64."""
        numbers, result = self.bits(register), np.zeros(self.threads, np.uint64)
        for number in np.unique(numbers[mask]):
            name = self.program.parameters[int(number)][0]
            result = np.where(numbers == number, self.bits(name), result)
        return result

    def do_mov(self, instruction: Instruction, mask: np.ndarray) -> None:
        """A parameter's name stands for its address, here its number: the compiler chooses one."""
        target, source = instruction.operands
        names = [name for name, _ in self.program.parameters]
        if source in names:
            self.write(target, np.full(self.threads, names.index(source), np.uint64), mask)
        elif instruction.parts[-1] == "pred":
            self.write(target, self.predicate(source), mask)
        else:
            self.write(target, self.bits(source), mask)

    def do_cvt(self, instruction: Instruction, mask: np.ndarray) -> None:
        target, *sources = instruction.operands
        parts = instruction.parts
        to, of = parts[-2:]
        if to in ("e4m3x2", "e5m2x2"):
            kind, most = {
                "e4m3x2": (torch.float8_e4m3fn, 448.0),
                "e5m2x2": (torch.float8_e5m2, 57344.0),
            }[to]
            high, low = (to_byte(self.read(s, "f32"), kind, most) for s in sources)
            result = low | high << 8
        elif to == "e2m1x2":
            high, low = (to_e2m1(self.read(s, "f32")) for s in sources)
            result = (low | high << 4).astype(np.uint8)
        elif to in ("bf16x2", "f16x2") and of == "f32":
            narrow = to_bfloat16 if to == "bf16x2" else to_float16
            high, low = (narrow(self.read(s, "f32")) for s in sources)
            result = paired(low, high)
        elif of == "e4m3x2":
            pair = torch.from_numpy(self.read(sources[0], "u16").view(np.uint8).copy())
            result = pair.view(torch.float8_e4m3fn).half().numpy().view(np.uint32)
        else:
            result = self.read_number(sources[0], of)
            if "rzi" in parts or "rni" in parts:
                result = np.trunc(result) if "rzi" in parts else np.rint(result)
            narrow = {"bf16": to_bfloat16, "f16": to_float16}.get(to)
            result = narrow(result) if narrow else result.astype(kind_of(to))
        self.write(target, result, mask)

    def do_prmt(self, instruction: Instruction, mask: np.ndarray) -> None:
        target, *sources = instruction.operands
        self.write(target, permuted(*(self.read(s, "u32") for s in sources)), mask)

    def do_lop3(self, instruction: Instruction, mask: np.ndarray) -> None:
        target, *sources = instruction.operands
        self.write(target, looked_up(*(self.read(s, "u32") for s in sources)), mask)

    def do_shf(self, instruction: Instruction, mask: np.ndarray) -> None:
        target, low, high, by = instruction.operands
        assert instruction.parts[2:] == ["wrap", "b32"]
        both = self.read(low, "u64") & np.uint64(0xFFFFFFFF) | self.read(high, "u64") << np.uint64(
            32
        )
        by = self.read(by, "u64") & np.uint64(31)
        result = both << by >> np.uint64(32) if instruction.parts[1] == "l" else both >> by
        self.write(target, result.astype(np.uint32), mask)

    def do_bfe(self, instruction: Instruction, mask: np.ndarray) -> None:
        target, a, *where = instruction.operands
        values = self.read(a, instruction.parts[-1])
        self.write(target, bit_field(values, *(self.read(w, "u32") for w in where)), mask)

    def do_shfl(self, instruction: Instruction, mask: np.ndarray) -> None:
        target, a, by, limit, _ = instruction.operands
        mode = instruction.parts[2]
        values, by = self.read(a, "u32"), self.read(by, "u32").astype(np.int64)
        assert int(self.read(limit, "u32")[0]) == (0 if mode == "up" else 31)
        assert mask.reshape(-1, 32).all(1)[mask.reshape(-1, 32).any(1)].all(), "a part of a warp"
        lane = {"bfly": self.lanes ^ by, "idx": by & 31, "up": self.lanes - by}.get(mode)
        lane = self.lanes + by if lane is None else lane
        inside = (lane >= 0) & (lane < 32)
        source = np.arange(self.threads) - self.lanes + np.where(inside, lane, self.lanes)
        first, _, second = target.partition("|")
        self.write(first, values[source], mask)
        if second:
            self.write(second, inside, mask)

    def do_redux(self, instruction: Instruction, mask: np.ndarray) -> None:
        target, a, _ = instruction.operands
        how, *more, type_ = instruction.parts[2:]
        values = self.read(a, type_).reshape(-1, 32)
        if "abs" in more:
            values = np.abs(values)
        if type_ == "f32":
            function = self.extreme([how, *(m for m in more if m != "abs"), type_])
        else:
            function = {"add": np.add, "max": np.maximum, "min": np.minimum}[how]
        result = functools.reduce(function, values.T)
        self.write(target, np.repeat(result, 32), mask)

    def do_ld(self, instruction: Instruction, mask: np.ndarray) -> None:
        target, (base, offset) = instruction.operands
        type_ = instruction.parts[-1]
        space = space_of(instruction.parts)
        kind = kind_of(type_)
        if space == "param":
            named = base in self.values
            value = self.read(base, type_) if named else self.parameter_at(base, mask)
            self.write(target, value, mask)
            return
        targets = target if isinstance(target, tuple) else (target,)
        size = np.dtype(kind).itemsize
        raw = self.load(space, base, offset, size * len(targets), mask)
        for i, name in enumerate(targets):
            result = np.ascontiguousarray(raw[:, i * size : (i + 1) * size]).view(kind)[:, 0]
            self.write(name, result, mask)

    def do_st(self, instruction: Instruction, mask: np.ndarray) -> None:
        (base, offset), source = instruction.operands
        type_ = instruction.parts[-1]
        space = space_of(instruction.parts)
        sources = source if isinstance(source, tuple) else (source,)
        kind = kind_of(type_)
        words = [self.read(s, type_).view(unsigned(8 * np.dtype(kind).itemsize)) for s in sources]
        raw = np.ascontiguousarray(np.stack(words, 1)).view(np.uint8)
        self.store(space, base, offset, raw, mask)

    def do_cp(self, instruction: Instruction, mask: np.ndarray) -> None:
        """``cp.async``, done at once; bytes past those that are read become 0."""
        assert instruction.parts[1] == "async"
        if instruction.parts[2] in ("commit_group", "wait_group", "wait_all"):
            return
        (to, skip), (of, offset), size, *read = instruction.operands
        count = int(size, 0)
        expected_count = self.read(read[0], "u32") if read else np.full(self.threads, count)
        assert np.isin(expected_count[mask], (0, count)).all()
        raw = self.load("global", of, offset, count, mask & (expected_count > 0))
        self.store("shared", to, skip, raw, mask)

    def do_mma(self, instruction: Instruction, mask: np.ndarray) -> None:
        """16 x 8 sums of 16 products, of bfloat16 or float16 in float32: ``d = a @ b + c``."""
        parts = instruction.parts
        if parts[2:] == BLOCK_SCALED:
            self.do_block_scaled_mma(instruction, mask)
            return
        assert parts[2:5] == ["m16n8k16", "row", "col"]
        assert (parts[5], parts[8]) == ("f32", "f32")
        assert mask.all()
        d, *sources = instruction.operands
        a, b = (self.fragment(s, parts[6]) for s in sources[:2])
        c = np.stack([self.read(s, "f32").reshape(-1, 8, 4) for s in sources[2]], -1)
        left = np.zeros((len(a), 16, 16))
        for i in range(4):
            rows, columns = (
                slice(8 * (i % 2), 8 * (i % 2) + 8),
                slice(8 * (i // 2), 8 * (i // 2) + 8),
            )
            left[:, rows, columns] = a[:, i]
        right = np.concatenate([b[:, 0], b[:, 1]], 2)  # [W, column, 16]
        sums = result_fragments(left @ right.transpose(0, 2, 1))
        result = (sums + c).astype(np.float32).reshape(self.threads, 4)
        for i, name in enumerate(d):
            self.write(name, np.ascontiguousarray(result[:, i]), mask)

    def do_block_scaled_mma(self, instruction: Instruction, mask: np.ndarray) -> None:
        """16 x 8 sums over 64 columns of NVFP4, in float64 and rounded once to float32."""
        assert mask.all()
        d, a, b, c, a_scales, a_where, b_scales, b_where = instruction.operands
        words = [self.read(name, "u32") for name in (*a, *b)]
        left = left_operand(words[:4]) * left_scales(self.read(a_scales, "u32"), a_where)
        right = right_operand(words[4:]) * right_scales(self.read(b_scales, "u32"), b_where)
        sums = result_fragments(left @ right.transpose(0, 2, 1))
        for i, name in enumerate(d):
            total = sums[..., i].reshape(-1) + self.read(c[i], "f32")
            self.write(name, total.astype(np.float32), mask)

    def do_wgmma(self, instruction: Instruction, mask: np.ndarray) -> None:
        """64 x N sums of 16 products by a warpgroup; what it waits for is there already."""
        parts = instruction.parts
        if parts[1] in ("fence", "commit_group", "wait_group"):
            return
        shape = re.match(r"m64n(\d+)k16$", parts[3])
        if parts[1] != "mma_async" or not shape or parts[4:] not in _SUMS:
            raise NotImplementedError(instruction.name)
        assert mask.all()
        d, a, b, keeps, *flags = instruction.operands
        type_, columns = parts[-1], int(shape[1])
        assert flags[:2] == ["1", "1"]
        *left_transposed, right_transposed = (flag == "1" for flag in flags[2:])
        if isinstance(a, tuple):
            tiles = self.fragment(a, type_).reshape(-1, 2, 2, 8, 8)  # [W, halves of k, of rows]
            left = tiles.transpose(0, 2, 3, 1, 4).reshape(-1, 64, 16)
        else:
            left = self.described(a, 64, left_transposed[0], type_)
        sums = left @ self.described(b, columns, right_transposed, type_).transpose(0, 2, 1)
        lanes, rows = self.lanes, np.arange(self.threads) % 128 // 32 * 16
        for i, name in enumerate(d):
            row = rows + lanes // 4 + i % 4 // 2 * 8
            column = i // 4 * 8 + lanes % 4 * 2 + i % 2
            result = sums[np.arange(self.threads) // 128, row, column]
            before = np.where(self.predicate(keeps), self.read(name, "f32"), np.float32(0))
            self.write(name, (result + before).astype(np.float32), mask)

    def described(self, name: str, rows: int, transposed: bool, type_: str) -> np.ndarray:
        """A matrix in shared memory by each warpgroup's descriptor: ``[G, rows, 16]``.

        ``transposed``: its rows lie side by side. Pieces of 16 bytes are exchanged as the pattern
        that the descriptor names says, by the bits of their address.
        """
        words = [int(w) for w in self.bits(name)[::128]]
        row, column = np.arange(rows)[:, None], np.arange(16)[None, :]
        result = []
        for word in words:
            start, leading, stride = ((word >> at & 0x3FFF) << 4 for at in (0, 16, 32))
            wide = {0: 16, 1: 128, 2: 64, 3: 32}[word >> 62]
            across, along = (row, column) if transposed else (column, row)
            elements = wide // 2
            address = along % 8 * wide + across % elements * 2
            address += start + across // elements * leading + along // 8 * stride
            address ^= address >> 3 & (wide - 1) & 0x70
            if (address < 0).any() or (address + 2 > len(self.shared)).any():
                raise IndexError("a matrix outside shared memory")
            bits = self.shared[address].astype(np.uint16) | self.shared[address + 1].astype(
                np.uint16
            ) << np.uint16(8)
            number = from_bfloat16(bits) if type_ == "bf16" else from_float16(bits)
            result.append(number.astype(np.float64))
        return np.stack(result)

    def fragment(self, names: tuple, type_: str) -> np.ndarray:
        """Matrices of 8 x 8 whose rows four lanes have: ``[W, len(names), 8, 8]``."""
        result = []
        for name in names:
            halves = np.stack(halves_of(self.read(name, "u32")), -1).reshape(-1, 8, 8)
            number = from_bfloat16(halves) if type_ == "bf16" else halves.view(np.float16)
            result.append(number.astype(np.float64))
        return np.stack(result, 1)

    def do_atom(self, instruction: Instruction, mask: np.ndarray) -> None:
        """One thread after another, in their order."""
        target, (base, offset), source, *more = instruction.operands
        parts = instruction.parts
        type_ = parts[-1]
        kind = kind_of(type_)
        space = space_of(parts)
        how = next(p for p in parts if p in ("add", "max", "min", "or", "and", "exch", "cas"))
        operands = [self.read(s, type_) for s in (source, *more)]
        before = np.zeros(self.threads, kind)
        for thread in np.flatnonzero(mask):
            alone = np.arange(self.threads) == thread
            old = self.load(space, base, offset, np.dtype(kind).itemsize, alone)[thread].view(kind)
            new = [g[thread : thread + 1] for g in operands]
            if how == "cas":
                result = np.where(old == new[0], new[1], old)
            elif how == "exch":
                result = new[0]
            else:
                result = {**BINARY, "max": np.maximum, "min": np.minimum}[how](old, new[0])
            before[thread] = old[0]
            raw = np.tile(result.astype(kind).view(np.uint8), (self.threads, 1))
            self.store(space, base, offset, raw, alone)
        self.write(target, before, mask)

    def addresses(self, space: str, base, offset: int, mask: np.ndarray, size: int) -> np.ndarray:
        result = (self.bits(base).astype(np.int64) + offset)[mask]
        if (result % size).any():
            raise IndexError(
                f"{size} bytes at {int(result[result % size != 0][0]):#x}, not aligned"
            )
        if space != "global" and ((result < 0) | (result + size > len(self.shared))).any():
            raise IndexError(f"{size} bytes beyond the {len(self.shared)} of shared memory")
        return result

    def load(self, space: str, base, offset: int, size: int, mask: np.ndarray) -> np.ndarray:
        addresses = self.addresses(space, base, offset, mask, size)
        raw = np.zeros((self.threads, size), np.uint8)
        span = np.arange(size)
        if space == "global":
            threads = np.flatnonzero(mask)
            for array, which, starts in self.memory.at(addresses, size):
                raw[threads[which]] = array[starts[:, None] + span]
        else:
            raw[mask] = self.shared[addresses[:, None] + span]
        return raw

    def store(self, space: str, base, offset: int, raw: np.ndarray, mask: np.ndarray) -> None:
        size = raw.shape[1]
        addresses, span = self.addresses(space, base, offset, mask, size), np.arange(size)
        if space == "global":
            for array, which, starts in self.memory.at(addresses, size):
                array[starts[:, None] + span] = raw[mask][which]
        else:
            self.shared[addresses[:, None] + span] = raw[mask]

    def do_stmatrix(self, instruction: Instruction, mask: np.ndarray) -> None:
        (base, offset), source = instruction.operands
        sources = source if isinstance(source, tuple) else (source,)
        for i, rows in self.matrices(instruction, base, offset, len(sources), mask):
            words = self.read(sources[i], "u32").reshape(-1, 32, 1)
            halves = np.concatenate(halves_of(words), 2).reshape(-1, 8, 8)
            if "trans" in instruction.parts:
                halves = halves.transpose(0, 2, 1)
            raw = np.ascontiguousarray(halves).view(np.uint8).reshape(-1, 16)
            self.shared[rows.reshape(-1, 1) + np.arange(16)] = raw

    def do_ldmatrix(self, instruction: Instruction, mask: np.ndarray) -> None:
        target, (base, offset) = instruction.operands
        targets = target if isinstance(target, tuple) else (target,)
        for i, rows in self.matrices(instruction, base, offset, len(targets), mask):
            raw = self.shared[rows.reshape(-1, 1) + np.arange(16)]
            halves = raw.view(np.uint16).reshape(-1, 8, 8)
            if "trans" in instruction.parts:
                halves = halves.transpose(0, 2, 1)
            pairs = np.ascontiguousarray(halves).reshape(-1, 32, 2)
            self.write(targets[i], paired(pairs[..., 0], pairs[..., 1]).reshape(-1), mask)

    def matrices(self, instruction: Instruction, base, offset: int, count: int, mask: np.ndarray):
        """Return each matrix's number and where its rows lie, of every warp ``[W, 8]``."""
        assert {"m8n8", f"x{count}", "b16"} <= set(instruction.parts)
        assert mask.all()
        addresses = self.bits(base).astype(np.int64).reshape(-1, 32) + offset
        for i in range(count):
            rows = addresses[:, 8 * i : 8 * i + 8]
            if (rows % 16).any() or (rows < 0).any() or (rows + 16 > len(self.shared)).any():
                raise IndexError("a row of a matrix outside shared memory, or not aligned")
            yield i, rows


def launch(
    ptx: str,
    arguments: list[torch.Tensor | int | float],
    grid: tuple[int, int, int],
    threads: int,
    shared: int,
) -> None:
    """Run a kernel's whole grid; ``arguments`` are its parameters, as many as are given."""
    program = parse(ptx)
    memory = Memory(a for a in arguments if isinstance(a, torch.Tensor))
    values: dict[str, int] = {"%ntid.x": threads}
    for (name, type_), argument in zip(program.parameters, arguments, strict=False):
        if isinstance(argument, torch.Tensor):
            values[name] = argument.data_ptr()
        elif type_[0] == "f":
            values[name] = int(np.array(argument, kind_of(type_)).view(unsigned(int(type_[1:]))))
        else:
            values[name] = int(argument) & (1 << int(type_[1:])) - 1
    sizes = dict(zip("xyz", grid, strict=True))
    values |= {f"%nctaid.{axis}": size for axis, size in sizes.items()}
    for number in range(math.prod(grid)):
        x, rest = number % grid[0], number // grid[0]
        at = {"x": x, "y": rest % grid[1], "z": rest // grid[1]}
        here = {f"%ctaid.{axis}": index for axis, index in at.items()}
        Block(program, threads, shared, memory, values | here).run()
