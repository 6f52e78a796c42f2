"""A compiled kernel's PTX as a list of instructions."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_HINTS = re.compile(r"^(L1::\w+|L2::\w+|nc|volatile|relaxed|cta|gpu|weak|aligned)$")


@dataclass
class Instruction:
    """One of a program: its name's parts, operands, and the predicate it depends on."""

    name: str
    operands: list
    predicate: str | None = None
    negated: bool = False

    @property
    def parts(self) -> list[str]:
        return [part for part in self.name.split(".") if not _HINTS.match(part)]


@dataclass
class Program:
    """Instructions, where labels stand among them, and how wide named registers are."""

    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    widths: dict[str, int] = field(default_factory=dict)
    parameters: list[tuple[str, str]] = field(default_factory=list)


def parse(ptx: str) -> Program:
    """The one kernel of a module."""
    ptx = re.sub(r"//[^\n]*", "", ptx)
    ptx = re.sub(r"^\s*\.(loc|file|section|pragma)\b[^\n]*$", "", ptx, flags=re.MULTILINE)
    head = re.search(r"\.entry\s+[\w$]+\s*\((.*?)\)[^{]*\{", ptx, re.DOTALL)
    assert head
    program = Program()
    for line in filter(None, map(str.strip, head[1].split(","))):
        type_, name = line.split()[1].lstrip("."), line.split()[-1]
        program.parameters.append((name, type_))
    body, at = ptx[head.end() :], 0
    scopes: list[dict[str, str]] = [{}]
    opened = 0
    statement = re.compile(r"\s*(?:(\{)|(\})|([$\w]+):(?!:)|([^;{}]*(?:\{[^}]*\}[^;{}]*)*);)")
    while True:
        result = statement.match(body, at)
        if not result:
            break
        at = result.end()
        if result[1]:
            opened += 1
            scopes.append({})
        elif result[2]:
            scopes.pop()
            if not scopes:
                break
        elif result[3]:
            program.labels[result[3]] = len(program.instructions)
        elif result[4].strip():
            _read(program, " ".join(result[4].split()), scopes, opened)
    assert not scopes, body[at : at + 80]
    return program


def _declare(program: Program, text: str, scope: dict[str, str], opened: int) -> None:
    """Names of a scope get its number; ``a<3>`` is a0, a1 and a2."""
    type_, names = re.match(r"\.reg\s+\.(\w+)\s+(.*)", text).groups()
    for name in map(str.strip, names.split(",")):
        numbered = re.match(r"(\w+)<(\d+)>$", name)
        for register in (
            [f"{numbered[1]}{i}" for i in range(int(numbered[2]))] if numbered else [name]
        ):
            scope[register] = f"{register}@{opened}"
            program.widths[f"{register}@{opened}"] = 0 if type_ == "pred" else int(type_[1:])


def _read(program: Program, text: str, scopes: list[dict[str, str]], opened: int) -> None:
    if text.startswith(".reg"):
        if len(scopes) > 1:  # names of the kernel itself tell their width
            _declare(program, text, scopes[-1], opened)
        return
    if text.startswith("."):
        # Triton 3.9 declares a byte of local memory that nothing uses.
        assert text.startswith((".shared", ".local")), text
        return

    def known(name):
        for scope in reversed(scopes):
            if name in scope:
                return scope[name]
        return name

    predicate = re.match(r"@(!?)\s*([%\w]+)\s+(.*)", text)
    text = predicate[3] if predicate else text
    name, _, rest = text.partition(" ")
    operands = []
    for part in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s{}\[\]][^,{}\[\]]*", rest):
        part = part.strip()
        if part[0] == "{":
            operands.append(tuple(known(p.strip()) for p in part[1:-1].split(",")))
        elif part[0] == "[":
            base, _, offset = part[1:-1].replace(" ", "").partition("+")
            operands.append([known(base), int(offset or "0", 0)])
        else:
            operands.append(known(part))
    program.instructions.append(
        Instruction(
            name,
            operands,
            known(predicate[2]) if predicate else None,
            bool(predicate and predicate[1]),
        )
    )


def space_of(parts: list[str]) -> str:
    """Return the memory space of an instruction that loads or stores."""
    return next(
        p.split("::")[0] for p in parts if p.split("::")[0] in ("param", "shared", "global")
    )
