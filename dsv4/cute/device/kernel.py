"""Base of kernels that hold their plan and take one record of arguments."""

from __future__ import annotations

from typing import Any, ClassVar

import cutlass.cute as cute
from cuda.bindings.driver import CUstream

from dsv4.cute.runtime.kernel_abi import KernelAbi


class PlannedKernel:
    """A kernel of one configuration.

    A subclass sets ``abi`` and defines ``kernel(self, args)``, and ``__call__(self, args, stream)``
    that launches it. Methods read the configuration as ``self.plan.<field>``: Python values, known
    when compiling.
    """

    abi: ClassVar[KernelAbi]

    def __init__(self, plan: Any) -> None:
        self.plan = plan

    def __repr__(self) -> str:
        # CuTeDSL makes the kernel's name of it, by which profiles tell kernels apart.
        return f"{type(self).__name__}({self.plan!r})"

    def compile(self, options: str) -> Any:
        """Compile with CuTeDSL; every argument is fixed in type, none in value."""
        return cute.compile(self, self.abi.placeholders(), CUstream(0), options=options)
