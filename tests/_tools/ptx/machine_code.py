"""Compiled kernels taken apart with the tools in Triton's wheel."""

from __future__ import annotations

import bisect
import itertools
import re
import struct
import subprocess
from pathlib import Path

import triton

from dsv4.cute.runtime import cubin_cache

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
REGISTER_FILE = 65536


def run(tool, *arguments):
    command = [TOOLS / tool, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _sections(cubin, name):
    """Contents of the sections of an ELF file whose names begin with ``name``."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<3H", cubin, 0x3A)
    headers = [struct.unpack_from("<2I4Q", cubin, table + i * size) for i in range(count)]
    start = headers[names][4]
    chosen = [h for h in headers if cubin[start + h[0] :].startswith(name)]
    return [cubin[h[4] : h[4] + h[5]] for h in chosen]


def machine_code(cubin):
    """The section of instructions of an ELF file."""
    (code,) = _sections(cubin, b".text.kernel")
    return code


_WITH_BYTES, _PARAMETER = 4, 0x17  # of an attribute: its format and its kind


def parameters_in(cubin):
    """Offsets and sizes of the parameters that a kernel reads, as its file tells the driver.

    Offsets from the first: where that is a TMA descriptor the assembler moves all to align it.
    """
    (attributes,) = _sections(cubin, b".nv.info.kernel")
    result, at = {}, 0
    while at < len(attributes):
        form, kind, length = struct.unpack_from("<2BH", attributes, at)
        at += 4
        if form == _WITH_BYTES:
            if kind == _PARAMETER:
                _, number, offset, rest = struct.unpack_from("<I2HI", attributes, at)
                result[number] = offset, rest >> 18
            at += length
    first, _ = result[0]
    return [(result[n][0] - first, result[n][1]) for n in range(len(result))]


def assert_parameters_lie_where_they_are_read(plan, image):
    """The bytes that are packed for a launch, against what the compiled kernel declares."""
    packed = cubin_cache.kernel_of(plan).abi.parameters
    declared = parameters_in(image.cubin)
    sizes = map(struct.calcsize, packed.kinds)
    assert list(zip(packed.offsets, sizes, strict=True)) == declared
    assert sum(declared[-1]) == packed.size


def instructions_of(images, arch, file):
    """Instructions of each with their operands, by one run of the disassembler."""
    codes = [machine_code(image.cubin) for image in images]
    file.write_bytes(b"".join(codes))
    binary = arch.replace("sm_", "SM")
    listing = run("nvdisasm", "--binary", binary, "--no-dataflow", file)
    starts = list(itertools.accumulate(map(len, codes), initial=0))
    result = [[] for _ in codes]
    for line in re.finditer(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][^;]*?)\s*;", listing):
        result[bisect.bisect(starts, int(line[1], 16)) - 1].append(line[2])
    assert all("EXIT" in instructions for instructions in result)
    return result


def usage_of(image, file):
    """Registers, and bytes of stack, local and static shared memory."""
    file.write_bytes(image.cubin)
    usage = run("cuobjdump", "-res-usage", file)
    return {name: int(n) for name, n in re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", usage)}


_GLOBAL_LOAD = re.compile(r"(LDG|LD|LDGSTS|UBLKCP|UTMALDG|ATOMG?|REDG?)\.")


def loads_before_wait(listing):
    """Loads of global memory that a thread may reach before it waits for the preceding kernel.

    Along every way. A load that the assembler moved there reads what that kernel has yet to write.
    ``listing``: what ``nvdisasm -c`` prints.
    """
    line = r"^(\.\S+):|/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+ )?\s*([A-Z][^;]*?)\s*;"
    labels, instructions = {}, []
    for label, predicate, instruction in re.findall(line, listing, re.MULTILINE):
        if label:
            labels[label] = len(instructions)
        else:
            instructions.append((predicate, instruction))
    seen, begun, result = set(), [0], []
    while begun:
        i = begun.pop()
        if i in seen:
            continue
        seen.add(i)
        predicate, instruction = instructions[i]
        name = instruction.split()[0]
        assert not name.startswith(("BRX", "JMP", "CALL", "RET")), instruction
        if _GLOBAL_LOAD.match(instruction):
            result.append(instruction)
        if name.startswith("BRA"):
            begun.append(labels[re.search(r"`\((\S+)\)", instruction)[1]])
        # Some branches have their predicate as an operand.
        always = not predicate and re.fullmatch(r"EXIT|BRA\S* `\(\S+\)", instruction)
        if name != "ACQBULK" and not always:
            begun.append(i + 1)
    return result


def parameters_of(text):
    """Offsets and sizes of the parameters that a kernel's PTX declares, and the end of all."""
    end, offsets, sizes = 0, [], []
    for kind, align, size in re.findall(
        r"\.param (?:\.(u32|f32|u64)|\.align (\d+) \.b8) \w+(?:\[(\d+)\])?[,\n]", text
    ):
        width = {"u32": 4, "f32": 4, "u64": 8}.get(kind) or int(size)
        start = -(-end // int(align or width)) * int(align or width)
        end = start + width
        offsets.append(start)
        sizes.append(width)
    return offsets, sizes, end
