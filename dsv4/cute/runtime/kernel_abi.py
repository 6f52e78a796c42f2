"""Typed declaration of a kernel's arguments, from which every list of them is derived.

A kernel declares its arguments as a ``NamedTuple`` whose fields have the types below::

    class ScaleArgs(NamedTuple):
        '''Arguments of ``ScaleKernel``.

        Attributes:
            source: ...
        '''

        source: Pointer
        out: Pointer
        rows: Int32
        factor: Float32

    SCALE_ABI = KernelAbi(ScaleArgs)

The declaration is used in four places, always by name:

* ``kernel(self, args: ScaleArgs)`` receives it in device code. CuTeDSL passes the fields of a named
  tuple as separate parameters, in order.
* ``cute.compile(kernel, SCALE_ABI.placeholders(), ...)`` compiles for any values of these types.
* ``SCALE_ABI.launch(kernel, ctas, rows=..., factor=...)`` packs everything but the pointers once.
* ``launch(stream, SCALE_ABI.pointers(source=..., out=...))`` writes the pointers of one launch with
  a single precompiled ``struct``. Hence all pointers of a kernel stand next to each other.

Nothing here needs CuTeDSL, except ``placeholders``.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, get_type_hints

from dsv4.cute.runtime.driver import Kernel, Launch, Parameters


@dataclass(frozen=True, eq=False)
class FieldType:
    """The way to pass an argument to a kernel.

    Attributes:
        format: Its bytes in a launch, as ``struct`` writes them with native alignment.
        scalar: Name of the CuTeDSL type of its value in device code; None for what the compiler
            makes, such as a TMA copy.
    """

    format: str
    scalar: str | None = None


_POINTER = FieldType("q", "Int64")
_TMA_DESCRIPTOR, _TMA_SIZES, _EMPTY = FieldType("128s"), FieldType("2i"), FieldType("s")

# Types of a declaration's fields. ``Any``, because the same field is a Python number on the host
# and a value of the DSL in device code.
Pointer = Annotated[Any, _POINTER]  # another value in every launch
Int64 = Annotated[Any, FieldType("q", "Int64")]
Int32 = Annotated[Any, FieldType("i", "Int32")]
Uint32 = Annotated[Any, FieldType("I", "Uint32")]
Float32 = Annotated[Any, FieldType("f", "Float32")]
# What the compiler makes of a TMA copy: its descriptor, and rows and columns of the tensor.
TmaDescriptor = Annotated[Any, _TMA_DESCRIPTOR]
TmaSizes = Annotated[Any, _TMA_SIZES]
Empty = Annotated[Any, _EMPTY]  # known when compiling; a byte that nobody reads


class KernelAbi:
    """Packing, placeholders and pointers of a kernel's arguments, from their declarations.

    Attributes:
        fields: ``FieldType`` by name, in the order of the kernel's parameters.
        parameters: Formats and offsets of the parameters for the driver.
        pointers: Gives the pointers that a launch takes, by name, in the kernel's order.
    """

    def __init__(self, *declarations: Any) -> None:
        """Derive it.

        Args:
            *declarations: Named tuples in the order in which the kernel takes them. The last one
                holds the scalars, those before it what the compiler makes of TMA copies.

        Raises:
            TypeError: if a field's type is none of this module's, or a name stands twice.
            ValueError: if other arguments stand between the pointers.
        """
        self._scalars = declarations[-1]
        self.fields: dict[str, FieldType] = {}
        for declaration in declarations:
            for name, hint in get_type_hints(declaration, include_extras=True).items():
                if name in self.fields:
                    raise TypeError(f"argument {name} of {declaration.__name__} is declared twice")
                self.fields[name] = _field_type(declaration, name, hint)
        names, types = list(self.fields), list(self.fields.values())
        self.parameters = Parameters(*(field.format for field in types))
        first, count = types.index(_POINTER), types.count(_POINTER)
        if types[first : first + count] != [_POINTER] * count:
            raise ValueError(f"arguments {names}: expected all pointers next to each other")
        pointers = names[first : first + count]
        # Made for these names, as ``collections.namedtuple`` makes its methods. Called by keyword
        # it costs what the tuple costs, 0.3 us (CPython 3.11); a named tuple would cost 1.4 us.
        order = ", ".join(pointers)
        self.pointers: Callable[..., tuple[int, ...]] = eval(f"lambda *, {order}: ({order},)")
        self._pointers = struct.Struct(f"@{count}q")
        self._before = [name for name in names[:first] if self.fields[name] != _TMA_DESCRIPTOR]
        self._after = names[first + count :]
        self._open = frozenset(self._scalars._fields) - set(pointers)

    def placeholders(self) -> Any:
        """Scalars to compile with: fixed in type, none in value."""
        import cutlass

        values = {}
        for name in self._scalars._fields:
            scalar = self.fields[name].scalar
            assert scalar is not None, f"{name} is no scalar"
            values[name] = getattr(cutlass, scalar)(1)
        return self._scalars(**values)

    def launch(
        self,
        kernel: Kernel,
        ctas: int,
        matrices: Sequence[Any] = (),
        describe: Callable[[int, Any], bytes] | None = None,
        /,
        **values: float,
    ) -> Launch:
        """A launch of which only the stream and the pointers are open.

        Args:
            kernel: Made ready on the current GPU.
            ctas: CTAs of the grid.
            matrices: What the TMA copies read, in the order of their descriptors: ``Matrix`` if
                the kernel has fields of type ``TmaSizes``.
            describe: Makes the descriptor of one of them at an address; by default that of a
                ``Matrix``.
            **values: Every scalar that is no pointer, by name.

        Raises:
            TypeError: if a scalar is missing or there is none of that name.
        """
        if values.keys() != self._open:
            missing, unknown = (
                sorted(self._open - values.keys()),
                sorted(values.keys() - self._open),
            )
            name = self._scalars.__name__
            raise TypeError(f"{name}: missing arguments {missing}, unknown arguments {unknown}")
        sizes = ((matrix.rows, matrix.columns) for matrix in matrices)
        before = self._packed(self._before, values, sizes, "0q")
        after = self._packed(self._after, values, sizes, "")
        return Launch(
            kernel, ctas, self.parameters, before, self._pointers, after, matrices, describe
        )

    def _packed(
        self,
        names: Sequence[str],
        values: Mapping[str, float],
        sizes: Iterator[tuple[int, int]],
        end: str,
    ) -> bytes:
        """Arguments that follow one another, up to the alignment of ``end``."""
        flat: list[Any] = []
        for name in names:
            field = self.fields[name]
            if field == _TMA_SIZES:
                flat += next(sizes)
            else:
                flat.append(b"" if field == _EMPTY else values[name])
        return struct.pack("@" + "".join(self.fields[n].format for n in names) + end, *flat)


def _field_type(declaration: Any, name: str, hint: Any) -> FieldType:
    """The ``FieldType`` of an annotation."""
    types = [item for item in getattr(hint, "__metadata__", ()) if isinstance(item, FieldType)]
    if len(types) != 1:
        raise TypeError(
            f"argument {name} of {declaration.__name__}: expected a type of "
            f"{__name__} (Pointer, Int32, ...), found {hint!r}"
        )
    return types[0]
