"""Jobs of worker processes: compile one kernel, or list the kernels of some steps.

A job is pickled to the worker and its result back. No job needs a GPU.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from dsv4 import device as machine
from dsv4.compilation.bundle import Compiled
from dsv4.compilation.recipe import ModelRecipe
from dsv4.parallel import mailboxes

# Seconds that jobs took on an H100 machine with 16 jobs at a time, where that is not the usual.
_LONG = {
    "AttentionPlan": 3.0,
    "GroupedWgmmaPlan": 2.0,
    "ColumnsPlan": 2.0,
    "TopkClusterPlan": 1.7,
    "_update_kernel": 1.2,
}
_USUAL = {"cute": 0.7, "triton": 0.4, "list": 5.0, "plans": 6.0}


@dataclass(frozen=True, eq=False)
class CuteJob:
    """Compiles a CuTeDSL kernel.

    Attributes:
        plan: Its configuration.
        arch: A value of ``ARCHITECTURES``.
    """

    plan: Any
    arch: str

    @property
    def name(self) -> str:
        """The name in messages."""
        return f"CuTeDSL kernel {self.plan}"

    @property
    def seconds(self) -> float:
        """Estimate of the time; the longest jobs start first."""
        return _LONG.get(type(self.plan).__name__, _USUAL["cute"])

    @functools.cached_property
    def key(self) -> bytes:
        """The key of the compiled kernel."""
        from dsv4.cute.runtime import cubin_cache

        return cubin_cache.key(self.plan, self.arch)

    @property
    def file_name(self) -> str:
        """The file's name in the folder of compiled kernels."""
        from dsv4.cute.runtime import cubin_cache

        return cubin_cache.file_name(self.key)

    def stored(self) -> bytes | None:
        """The kernel's file if it is in a bundle or on disk."""
        from dsv4.cute.runtime import cubin_cache, cubin_file

        cubin = cubin_cache.stored(self.plan, self.arch)
        return None if cubin is None else cubin_file.encode(cubin, self.key)

    def run(self) -> Compiled:
        """Compile it."""
        from dsv4.cute.runtime import cubin_cache, cubin_file

        made = cubin_cache.compile_image(self.plan, cubin_cache.target(self.plan, self.arch))
        return Compiled(self.key, made.name, cubin_file.encode(made, self.key))


@dataclass(frozen=True, eq=False)
class TritonJob:
    """Compiles a specialisation of a Triton kernel.

    Attributes:
        request: A ``dsv4.triton._runtime.kernel_store.Request``.
    """

    request: Any

    @property
    def name(self) -> str:
        """The name in messages."""
        return f"Triton kernel {self.request.module}.{self.request.name}"

    @property
    def seconds(self) -> float:
        """Estimate of the time."""
        return _LONG.get(self.request.name, _USUAL["triton"])

    @property
    def key(self) -> bytes:
        """The key of the compiled kernel."""
        return self.request.key

    @property
    def file_name(self) -> str:
        """The file's name in the folder of compiled kernels."""
        from dsv4.triton._runtime import kernel_store

        return kernel_store.file_name(self.key)

    def stored(self) -> bytes | None:
        """The kernel's file if it is in a bundle or on disk."""
        from dsv4.triton._runtime import kernel_store

        return kernel_store.stored_file(self.request)

    def run(self) -> Compiled:
        """Compile it."""
        from dsv4.triton._runtime import kernel_store

        return Compiled(self.key, self.request.name, kernel_store.compile_request(self.request))


@dataclass(frozen=True, eq=False)
class FindJob:
    """Lists the Triton kernels of some steps.

    Attributes:
        recipe: Recipe of the model.
        target: The ``dsv4.compilation.target.Target``.
        max_tokens: Most tokens of a step.
        shapes: Shapes of the steps.
    """

    recipe: ModelRecipe
    target: Any
    max_tokens: int
    shapes: tuple[Any, ...]

    @property
    def name(self) -> str:
        """The name in messages."""
        return f"the list of Triton kernels of {len(self.shapes)} steps"

    @property
    def seconds(self) -> float:
        """Estimate of the time."""
        return _USUAL["list"]

    def run(self) -> Any:
        """The ``dsv4.compilation.launch_recorder.Steps``."""
        from dsv4.compilation import steps

        with mailboxes.kept_open():  # those of this process have the name of the recipe's
            model = self.recipe.build(self.target.arch)
            return steps.find_steps(model, self.target, self.max_tokens, self.shapes)


@dataclass(frozen=True, eq=False)
class PlanJob:
    """Chooses the CuTeDSL kernels of a model; fields as those of ``FindJob``."""

    recipe: ModelRecipe
    target: Any
    max_tokens: int

    @property
    def name(self) -> str:
        """The name in messages."""
        return "the list of CuTeDSL kernels"

    @property
    def seconds(self) -> float:
        """Estimate of the time; it is begun first, because others compile what it finds."""
        return _USUAL["plans"]

    def run(self) -> list[Any]:
        """Return the configurations of the kernels."""
        from dsv4.compilation.kernel_calls import every_call, kernel_plans
        from dsv4.cute.sm90 import tuned

        target = self.target
        plans = target.plans or tuned.resolve(None)
        facts = machine.pretend(capability=target.capability, sms=target.sms, plans=plans)
        with mailboxes.kept_open(), facts:
            calls = every_call(self.recipe.build(target.arch), target.arch)
            return kernel_plans(calls, self.max_tokens, target.arch)


Job = CuteJob | TritonJob | FindJob | PlanJob
KernelJob = CuteJob | TritonJob
