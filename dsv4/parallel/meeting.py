"""How the ranks of a process group find each other, and learn which one failed."""

from __future__ import annotations

import contextlib
import json
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from dsv4.parallel.context import RankError

_PATIENCE = 300.0  # seconds between the calls of ``load`` of two ranks
_POLL = timedelta(seconds=0.5)  # time between two looks at the store


class Meeting:
    """The keys by which the ranks of a process group find each other for one object.

    Attributes:
        store: Store that the processes met in.
        prefix: Beginning of the keys in it.
    """

    def __init__(self, store: Any, rank: int, size: int, prefix: str) -> None:
        self.store = store
        self.prefix = prefix
        self._failed = f"{prefix}/failed"
        self._rank = rank
        self._here = [f"{prefix}/here/{other}" for other in range(size)]

    @classmethod
    def next_of(cls, group: Any) -> Meeting:
        """Return the next meeting of a group; each rank calls this equally often."""
        store, rank = _store(), group.rank()
        members = "-".join(map(str, dist.get_process_group_ranks(group)))
        count = store.add(f"dsv4/{members}/made by {rank}", 1)
        return cls(store, rank, group.size(), f"dsv4/{members}/{count}")

    def fail(self, error: str) -> None:
        """Tell the others that this rank failed, unless one did before."""
        with contextlib.suppress(RuntimeError):  # the store's process may be gone
            if not self.has_failed():
                self.store.set(self._failed, json.dumps({"rank": self._rank, "error": error}))

    def has_failed(self) -> bool:
        """Return whether a rank failed."""
        return bool(self.store.check([self._failed]))

    def failure(self) -> RankError | None:
        """Return the first failure of a rank; None: no rank failed."""
        if not self.has_failed():
            return None
        record = json.loads(self.store.get(self._failed))
        rank = int(record["rank"])
        return RankError(f"rank {rank} failed: {record['error']}", failed=rank)

    def wait(self) -> None:
        """Wait until all ranks are here.

        Raises:
            RankError: if one failed, or does not come.
        """
        self.store.set(self._here[self._rank], "here")
        deadline = time.monotonic() + _PATIENCE
        while True:
            try:
                self.store.wait(self._here, _POLL)
                return
            except RuntimeError as error:
                failure = self.failure()
                if failure is not None:
                    raise failure from error
                if time.monotonic() > deadline:
                    raise RankError(self._absence()) from error

    def _absence(self) -> str:
        absent = [rank for rank, key in enumerate(self._here) if not self.store.check([key])]
        return (
            f"ranks {absent} did not come within {_PATIENCE:.0f} s, wanted all "
            f"{len(self._here)} ranks of the device_mesh"
        )


def named(error: BaseException) -> str:
    """Return an error with its type, as text."""
    return f"{type(error).__name__}: {error}"


def _store() -> Any:
    """Return the store that the processes met in; torch has no public function for it."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()
