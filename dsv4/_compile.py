"""Compile many kernels in parallel, and keep them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dsv4 import _bundle, _compile_pool
from dsv4._compile_jobs import CuteJob, FindJob, KernelJob
from dsv4._recipe import Recipe
from dsv4._steps import Steps, Target, step_shapes
from dsv4.cute.runtime import cubin_cache

_SHARE = 50  # steps of a worker at least, which take less than its start


@dataclass(eq=False)
class Outcome:
    """What ``compile_all`` did.

    Attributes:
        jobs: All of them.
        stored: Files of kernels that were in a bundle or on disk, by key.
        compiled: Files of kernels that were compiled now, by key.
        failed: Names of kernels that could not be compiled, and why.
        lists: Lists of kernels that go into a bundle.
    """

    jobs: Sequence[KernelJob]
    stored: dict[bytes, bytes] = field(default_factory=dict)
    compiled: dict[bytes, bytes] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    lists: list[_bundle.Compiled] = field(default_factory=list)

    def images(self) -> list[_bundle.Compiled]:
        """All kernels that are there, and the lists."""
        files = {**self.stored, **self.compiled}
        kernels = [
            _bundle.Compiled(job.key, job.name, files[job.key])
            for job in self.jobs
            if job.key in files
        ]
        return [*kernels, *self.lists]


def compile_all(
    jobs: Sequence[KernelJob], advance: Callable[[], None], workers: int | None = None
) -> Outcome:
    """Compile kernels that are neither in a bundle nor on disk, and keep them on disk.

    Where the folder of compiled kernels cannot be used they stay in this process.

    Args:
        jobs: Each kernel once.
        advance: Called after each kernel.
        workers: Processes; None: as many as processors.

    Raises:
        RuntimeError: if a CuTeDSL kernel has to be compiled and CuTeDSL is not installed.
    """
    outcome, missing = Outcome(jobs), []
    for job in jobs:
        found = job.stored()
        if found is None:
            missing.append(job)
        else:
            outcome.stored[job.key] = found
            advance()
    _require_compiler(missing)
    for finished in _compile_pool.run(missing, workers):
        job, done = finished.job, finished.done
        if done.error:
            outcome.failed[job.name] = done.error
        else:
            content = done.result.content
            outcome.compiled[job.key] = content
            if not cubin_cache.keep(job.file_name, content):
                _bundle.active().fresh[job.key] = content
        advance()
    return outcome


def _require_compiler(missing: Sequence[KernelJob]) -> None:
    for job in missing:
        if isinstance(job, CuteJob):
            cubin_cache.require_compiler(job.plan)
            return


def find_steps(
    recipe: Recipe, target: Target, max_tokens: int, workers: int | None = None
) -> Steps:
    """``_steps.find_steps``, by several processes.

    Raises:
        RuntimeError: if one of them failed.
    """
    shapes = step_shapes(max_tokens, recipe.config.max_position_embeddings)
    most = _compile_pool.processors() if workers is None else workers
    count = max(1, min(most, len(shapes) // _SHARE))
    jobs = [FindJob(recipe, target, max_tokens, tuple(shapes[i::count])) for i in range(count)]
    found = Steps()
    for finished in _compile_pool.run(jobs, workers):
        if finished.done.error:
            raise RuntimeError(
                f"{finished.job.name} failed: {finished.done.error}\n{finished.done.details}"
            )
        found.add(finished.done.result)
    return found
