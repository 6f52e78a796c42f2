"""Runs straight-line PTX on the CPU: what ``ptx.assembly`` is given, one instruction at a time.

Registers hold bits. The instructions are those that quantisation in an epilogue is made of.
"""

from __future__ import annotations

import functools
import importlib
import re

import numpy as np
import torch

from tests._tools.ptx.arithmetic import looked_up


def bits(value):
    """Return the bits of a float32."""
    return int(np.float32(value).view(np.uint32))


def number(word):
    """The float32 of these bits."""
    return np.uint32(word & 0xFFFFFFFF).view(np.float32)


def _narrow(value, kind, most):
    """The byte of the nearest, ties to even, saturated."""
    if np.isnan(value):
        return 0x7F
    clamped = torch.tensor(float(np.clip(value, -most, most)), dtype=torch.float32)
    return int(clamped.to(kind).view(torch.uint8))


def _e4m3_as_halves(word):
    pair = torch.tensor([word & 0xFF, word >> 8 & 0xFF], dtype=torch.uint8)
    low, high = pair.view(torch.float8_e4m3fn).half().view(torch.int16).tolist()
    return low & 0xFFFF | (high & 0xFFFF) << 16


def _as_bfloat16(word):
    """Return the bits of the nearest bfloat16 of a float32's bits."""
    return int(torch.tensor(float(number(word))).bfloat16().view(torch.int16)) & 0xFFFF


def _fused(a, b, c):
    return np.float32(np.float64(a) * np.float64(b) + np.float64(c))


_FLOATS = {
    "div.rn": lambda a, b: a / b,
    "min": np.fmin,
    "max": np.fmax,
    "mul.rn": lambda a, b: a * b,
    "fma.rn": _fused,
    "abs": np.abs,
    "neg": np.negative,
    "rcp.approx.ftz": lambda a: np.float32(1) / a,
    "mov": lambda a: a,
}
_WORDS = {
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "shl": lambda a, b: a << b & 0xFFFFFFFF,
    "shr": lambda a, b: a >> b,
    "mov": lambda a: a,
    "lop3": lambda *words: int(looked_up(*np.array(words, np.uint32)[:, None])[0]),
}


def _permuted(a, b, selector):
    """Bytes that the selector's nibbles name; of those with the highest bit, the sign alone."""
    both = a.to_bytes(4, "little") + b.to_bytes(4, "little")
    nibbles = [selector >> 4 * i & 15 for i in range(4)]
    result = (both[n] if n < 8 else 255 * (both[n & 7] >> 7) for n in nibbles)
    return int.from_bytes(bytes(result), "little")


def _bfloat16_product(a, b):
    """The nearest, ties to even; subnormal numbers are kept."""
    x, y = (torch.tensor([w & 0xFFFF, w >> 16]).short().view(torch.bfloat16) for w in (a, b))
    low, high = (x.double() * y.double()).bfloat16().view(torch.int16).tolist()
    return low & 0xFFFF | (high & 0xFFFF) << 16


def _larger_halves(a, b):
    return max(a & 0xFFFF, b & 0xFFFF) | max(a >> 16, b >> 16) << 16


_UNSIGNED = {
    "prmt.b32": _permuted,
    "max.u16x2": _larger_halves,
    "mul.rn.bf16x2": _bfloat16_product,
    "max.u32": max,
    "add.u32": lambda a, b: a + b & 0xFFFFFFFF,
    "mad.lo.u32": lambda a, b, c: a * b + c & 0xFFFFFFFF,
    "shr.u32": lambda a, b: a >> b,
    "shf.r.wrap.b32": lambda low, high, bits: (high << 32 | low) >> (bits & 31) & 0xFFFFFFFF,
}
_CONVERSIONS = {
    "cvt.rn.satfinite.e4m3x2.f32": lambda high, low: (
        _narrow(number(low), torch.float8_e4m3fn, 448)
        | _narrow(number(high), torch.float8_e4m3fn, 448) << 8
    ),
    "cvt.rn.satfinite.e5m2x2.f32": lambda high, low: (
        _narrow(number(low), torch.float8_e5m2, 57344)
        | _narrow(number(high), torch.float8_e5m2, 57344) << 8
    ),
    "cvt.rn.f16x2.e4m3x2": _e4m3_as_halves,
    "cvt.rn.bf16x2.f32": lambda high, low: _as_bfloat16(low) | _as_bfloat16(high) << 16,
    "cvt.f32.f16": lambda a: bits(np.uint16(a & 0xFFFF).view(np.float16)),
    "cvt.u32.u16": lambda a: a & 0xFFFF,
}
_ORDERS = {"lt": lambda a, b: a < b, "gt": lambda a, b: a > b}


@functools.cache
def _parsed(code):
    """Names of instructions, and each one's operands; a pair of halves is a tuple."""
    code = re.sub(r"\{(\$[rw]\d+)\}", r"\1", code).strip()
    assert code.startswith("{") == code.endswith("}")
    result = []
    for instruction in filter(
        None, map(str.strip, code.removeprefix("{").removesuffix("}").split(";"))
    ):
        name, rest = instruction.split(None, 1)
        if name == ".reg":
            continue
        operands = [part.strip() for part in re.findall(r"\{[^}]*\}|[^,{}]+", rest)]
        result.append((name, [_operand(part) for part in operands if part]))
    return result


def _operand(text):
    if text.startswith("{"):
        return tuple(part.strip() for part in text[1:-1].split(","))
    if text.startswith("0f"):
        return int(text[2:], 16)
    return text if re.match(r"[$a-z]", text) else int(text, 0)


class Machine:
    """Registers by name."""

    def __init__(self, inputs):
        self.registers = {f"$r{i}": word for i, word in enumerate(inputs)}

    def read(self, operand):
        if isinstance(operand, tuple):
            low, high = map(self.read, operand)
            return low & 0xFFFF | (high & 0xFFFF) << 16
        return operand if isinstance(operand, int) else self.registers[operand]

    def run(self, name, target, *sources):
        actual = [self.read(source) for source in sources]
        kind, type_ = name.rsplit(".", 1)
        if isinstance(target, tuple):
            self.registers |= zip(target, (actual[0] & 0xFFFF, actual[0] >> 16), strict=True)
        elif name.startswith("setp"):
            _, order, *also = kind.split(".")
            assert also in ([], ["and"])
            result = bool(_ORDERS[order](*(map(number, actual[:2]) if type_ == "f32" else actual)))
            self.registers[target] = result and (not also or actual[2])
        elif name.startswith("selp"):
            self.registers[target] = actual[0] if actual[2] else actual[1]
        elif name in _UNSIGNED:
            self.registers[target] = _UNSIGNED[name](*actual)
        elif name in _CONVERSIONS:
            self.registers[target] = _CONVERSIONS[name](*actual)
        elif type_ == "f32":
            with np.errstate(all="ignore"):
                self.registers[target] = bits(_FLOATS[kind](*map(number, actual)))
        else:
            assert type_ == "b32"
            self.registers[target] = _WORDS[kind](*actual)


def run(code, outputs, inputs):
    """Results of the instructions, as ``ptx.assembly`` gives them.

    Args:
        code: Instructions that name results ``{$w0}`` on and inputs ``{$r0}`` on.
        outputs: ``np.float32`` for each result that is one, else what makes an integer.
        inputs: Integers, and float32 as such.
    """
    floats = tuple(kind is np.float32 for kind in outputs)
    words = tuple(bits(x) if isinstance(x, np.float32) else int(x) for x in inputs)
    result = _ran(code, words, floats)
    return result[0] if len(result) == 1 else result


@functools.lru_cache(maxsize=1 << 16)
def _ran(code, inputs, floats):
    machine = Machine(inputs)
    for name, operands in _parsed(code):
        machine.run(name, *operands)
    words = [machine.registers[f"$w{i}"] for i in range(len(floats))]
    return tuple(number(w) if is_float else w for w, is_float in zip(words, floats, strict=True))


def install(monkeypatch):
    """Let functions of ``dsv4.cute.device.ptx`` run here instead of being compiled."""
    for kind in ("arithmetic", "convert"):
        module = importlib.import_module(f"dsv4.cute.device.ptx.{kind}")
        monkeypatch.setattr(module, "assembly", run)
