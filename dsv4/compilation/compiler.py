"""Compile many kernels in parallel, and keep them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dsv4.compilation import bundle
from dsv4.compilation.jobs import CuteJob, FindJob, KernelJob, PlanJob, TritonJob
from dsv4.compilation.launch_recorder import Steps
from dsv4.compilation.listing import Listing
from dsv4.compilation.pool import Finished, Pool
from dsv4.compilation.progress_line import Count
from dsv4.cute.runtime import cubin_cache

_SHARE = 50  # steps of a list at least, which take less than the start of another one


@dataclass(eq=False)
class Outcome:
    """The result of a ``Compilation``.

    Attributes:
        jobs: All of them.
        stored: Files of kernels that were in a bundle or on disk, by key.
        compiled: Files of kernels that were compiled now, by key.
        failed: Names of kernels that could not be compiled, and why.
        lists: Lists of kernels that go into a bundle.
    """

    jobs: list[KernelJob] = field(default_factory=list)
    stored: dict[bytes, bytes] = field(default_factory=dict)
    compiled: dict[bytes, bytes] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    lists: list[bundle.Compiled] = field(default_factory=list)

    def images(self) -> list[bundle.Compiled]:
        """All kernels that are there, and the lists."""
        files = {**self.stored, **self.compiled}
        kernels = [
            bundle.Compiled(job.key, job.name, files[job.key])
            for job in self.jobs
            if job.key in files
        ]
        return [*kernels, *self.lists]


class Compilation:
    """Compiles kernels that are neither in a bundle nor on disk, and keeps them on disk.

    Where the folder of compiled kernels cannot be used they stay in this process.

    Attributes:
        outcome: What was done so far.
    """

    def __init__(
        self, pool: Pool, count: Count, ready: Callable[[KernelJob], None] | None = None
    ) -> None:
        """Make one that has nothing to do yet.

        Args:
            pool: Does the jobs.
            count: Counts each kernel.
            ready: Called with each kernel that is there, in this thread, while others compile.
        """
        self.outcome = Outcome()
        self._pool, self._count, self._ready = pool, count, ready
        self._known: set[bytes] = set()
        self._parts: dict[Any, Steps | None] = {}
        self._error: RuntimeError | None = None

    def find(self, listing: Listing) -> None:
        """List what steps launch, in several processes, and compile each kernel when it is found.

        Args:
            listing: Says of what.
        """
        shapes = listing.recipe.shapes(listing.max_tokens)
        count = max(1, min(self._pool.workers, len(shapes) // _SHARE))
        where = (listing.recipe, listing.target, listing.max_tokens)
        jobs = [FindJob(*where, tuple(shapes[i::count])) for i in range(count)]
        self._parts = dict.fromkeys(jobs)
        self._pool.start()
        self._pool.add(jobs)

    def take(self, steps: Iterable[Steps]) -> None:
        """Compile what this process finds itself, while it finds the rest.

        Args:
            steps: Parts of the list.
        """
        for number, part in enumerate(steps):
            self._parts[number] = part
            self.add(TritonJob(request) for request in part.requests.values())

    def plan(self, listing: Listing) -> None:
        """Choose the CuTeDSL kernels of a model in another process, and compile them.

        Args:
            listing: Says of what.
        """
        self._pool.add([PlanJob(listing.recipe, listing.target, listing.max_tokens)])

    def add(self, jobs: Iterable[KernelJob]) -> None:
        """Compile these, too, each once.

        Raises:
            RuntimeError: if a CuTeDSL kernel has to be compiled and CuTeDSL is not installed.
        """
        new = {job.key: job for job in jobs if job.key not in self._known}
        self._known |= new.keys()
        self.outcome.jobs += new.values()
        self._count.expect(len(new))
        files = {key: job.stored() for key, job in new.items()}
        missing = [new[key] for key, file in files.items() if file is None]
        _require_compiler(missing)
        self._pool.add(missing)
        for key, file in files.items():
            if file is not None:
                self.outcome.stored[key] = file
                self._is_there(new[key])

    def finish(self) -> None:
        """Wait until everything is compiled.

        Raises:
            RuntimeError: as ``add``.
        """
        for finished in self._pool.finished():
            if isinstance(finished.job, FindJob):
                self._add_steps(finished)
            elif isinstance(finished.job, PlanJob):
                self._add_plans(finished)
            else:
                self._compiled(finished)

    def steps(self) -> Steps:
        """Return what was found, in the same order each time.

        Raises:
            RuntimeError: if a part of the list could not be made.
        """
        if self._error is not None:
            raise self._error
        steps = Steps()
        for part in self._parts.values():
            assert part is not None
            steps.add(part)
        return steps

    def _add_steps(self, finished: Finished) -> None:
        job, done = finished.job, finished.done
        if done.error:
            self._error = RuntimeError(f"{job.name} failed: {done.error}\n{done.details}")
        else:
            self._parts[job] = done.result
            self.add(TritonJob(request) for request in done.result.requests.values())

    def _add_plans(self, finished: Finished) -> None:
        job, done = finished.job, finished.done
        if done.error:
            raise RuntimeError(f"{job.name} failed: {done.error}\n{done.details}")
        self.add(CuteJob(plan, job.target.arch) for plan in done.result)

    def _compiled(self, finished: Finished) -> None:
        job, done = finished.job, finished.done
        if done.error:
            self.outcome.failed[job.name] = done.error
            self._count.advance()
            return
        content: Any = done.result.content
        self.outcome.compiled[job.key] = content
        if not cubin_cache.keep(job.file_name, content):
            bundle.active().fresh[job.key] = content
        self._is_there(job)

    def _is_there(self, job: KernelJob) -> None:
        if self._ready is not None:
            self._ready(job)
        self._count.advance()


def _require_compiler(missing: Sequence[KernelJob]) -> None:
    for job in missing:
        if isinstance(job, CuteJob):
            cubin_cache.require_compiler(job.plan)
            return
