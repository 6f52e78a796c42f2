"""One deliberate mistake, addressed by the function that it is made in."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

REFERENCE = "dsv4.reference."
TRITON = "dsv4.triton."
LAYERS = "dsv4.layers."

_Scope = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class StaleMutantError(ValueError):
    """The code no longer has what a mutant changes."""


@dataclass(frozen=True)
class Mutant:
    """One mistake.

    ``old`` and ``new`` are compared and replaced as syntax trees, so layout and comments of the
    code do not matter, and nothing outside the function does.

    Attributes:
        topic: ``pitfall N`` of the specification, or what else it concerns; see the package.
        what: The mistake in words.
        where: ``module:function``, with the classes and functions around it: ``a.b:Class.method``.
            ``module:Class`` and ``module:`` are statements of a class or a module outside its
            functions.
        old: An expression or statements of the function. Replaced wherever they occur in it.
        new: What the mistake makes of it. Empty: the statements are removed.
        test: The test that must fail.
    """

    topic: str
    what: str
    where: str
    old: str
    new: str
    test: str

    @property
    def file(self) -> str:
        """Where the mistake is made, relative to the repository."""
        return self.where.partition(":")[0].replace(".", "/") + ".py"

    def apply(self, source: str) -> str:
        """Return the text of the module with the mistake in it.

        Raises:
            StaleMutantError: The module has no such function, or the function no such code.
        """
        tree = ast.parse(source)
        name = self.where.partition(":")[2]
        scopes = list(_scopes(tree, name.split("."))) if name else [tree]
        if not scopes:
            raise StaleMutantError(f"{self.file} has no {name}")
        replacement = _Replacement(self.old, self.new)
        # From the last to the first, so that line numbers of those before it stay true.
        for scope in sorted(scopes, key=lambda node: -getattr(node, "lineno", 0)):
            source = _replaced(source, scope, replacement)
        if not replacement.count:
            raise StaleMutantError(f"{self.where} has no {self.old!r}")
        return source


def _scopes(node: ast.AST, names: list[str]) -> Iterator[_Scope]:
    """Definitions of a qualified name; one that is defined on several branches has several."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, _DEFINITIONS):
            yield from _scopes(child, names)
        elif child.name == names[0]:
            if names[1:]:
                yield from _scopes(child, names[1:])
            else:
                yield child


def _replaced(source: str, scope: _Scope, replacement: _Replacement) -> str:
    before = replacement.count
    changed = replacement.of(scope)
    if replacement.count == before:
        return source
    if isinstance(scope, ast.Module):
        return ast.unparse(changed) + "\n"
    first = min(node.lineno for node in (scope, *scope.decorator_list))
    lines = source.splitlines(keepends=True)
    lines[first - 1 : scope.end_lineno] = [_unparsed(changed, scope.col_offset // 4)]
    return "".join(lines)


def _unparsed(node: ast.AST, depth: int) -> str:
    """Text of a definition at a depth of indentation; lines of its docstrings stay as they are."""
    for _ in range(depth):
        node = ast.If(test=ast.Constant(True), body=[node], orelse=[])
    text = ast.unparse(ast.fix_missing_locations(node)) + "\n"
    return "".join(text.splitlines(keepends=True)[depth:])


class _Replacement(ast.NodeTransformer):
    """Replaces an expression or statements in a definition and counts how often."""

    def __init__(self, old: str, new: str) -> None:
        self.old = ast.parse(textwrap.dedent(old)).body
        self.new = ast.parse(textwrap.dedent(new)).body
        self.count = 0
        # An expression is looked for everywhere, statements as a run of a block.
        alone = len(self.old) == len(self.new) == 1
        self.is_expression = alone and all(isinstance(s[0], ast.Expr) for s in (self.old, self.new))
        self.keys = [ast.dump(node) for node in self.old]
        if self.is_expression:
            self.keys = [ast.dump(self.old[0].value)]

    def of(self, scope: _Scope) -> ast.AST:
        """The definition with the replacement, wherever it applies."""
        self.scope = scope
        return self.visit(scope)

    def visit(self, node: ast.AST) -> ast.AST:
        outside = not isinstance(self.scope, (ast.FunctionDef, ast.AsyncFunctionDef))
        if outside and node is not self.scope and isinstance(node, _DEFINITIONS):
            return node
        if self.is_expression:
            if isinstance(node, ast.expr) and ast.dump(node) == self.keys[0]:
                self.count += 1
                return self.new[0].value
            return self.generic_visit(node)
        self.generic_visit(node)
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list):
                setattr(node, name, self._block(block))
        return node

    def _block(self, block: list[ast.stmt]) -> list[ast.stmt]:
        keys, length = [ast.dump(node) for node in block], len(self.keys)
        result, i = [], 0
        while i < len(block):
            if keys[i : i + length] == self.keys:
                result += self.new
                self.count += 1
                i += length
            else:
                result.append(block[i])
                i += 1
        return result or ([ast.Pass()] if block else [])
