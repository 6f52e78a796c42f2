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

    def _launch(self, kernel: Any, stream: CUstream, **options: Any) -> None:
        """Launch a kernel that has its arguments, for the compiler's sake, as one cluster.

        ``dsv4.cute`` launches the cubin itself.

        Args:
            kernel: What ``self.kernel`` returns.
            stream: The stream.
            **options: Further arguments of CuTeDSL's ``launch``, or others than the plan's. With
                ``min_blocks_per_mp=0`` the compiler chooses a bound of registers; it kept the merge
                of attention to 40, where loads wait for loads.
        """
        of_plan = {
            "grid": [self.plan.ctas, 1, 1],
            "block": [self.plan.threads, 1, 1],
            "cluster": [self.plan.ctas, 1, 1],
            "smem": self.plan.shared_bytes,
            "min_blocks_per_mp": 1,
        }
        kernel.launch(stream=stream, **{**of_plan, **options})
