"""The list of what a model's steps launch, kept, so that it is made once.

Making it takes some CPU seconds, and most of a start from a bundle. A list is kept like a compiled
kernel, in the folder of compiled kernels and in bundles, under a key of the model's recipe, the GPU
and all sources of this package. It is used for steps of as many tokens as it was made for, or
fewer, and only while every kernel of it is stored, too.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from dsv4.compilation import bundle, sealed_file
from dsv4.compilation.launch_recorder import Ran, Steps
from dsv4.compilation.target import Target
from dsv4.compilation.versions import Versions, digest
from dsv4.cute.runtime import cubin_cache

_MAGIC = b"dsv4lst\n"


@dataclass(frozen=True)
class Listing:
    """The list that is requested.

    Attributes:
        recipe: ``ModelRecipe`` of the model, or what else decides its steps: its text is part of
            the key.
        target: The GPU.
        max_tokens: Most tokens of a step.
    """

    recipe: Any
    target: Target
    max_tokens: int

    @property
    def key(self) -> bytes:
        """SHA-256 of all that the list depends on, but for ``max_tokens``, which it says itself."""
        from dsv4.triton._runtime import kernel_store as triton_images

        made_from = [self.recipe, self.target.arch, self.target.sms]
        if self.target.plans is not None:
            made_from.append(self.target.plans.digest)
        made_from += [Versions.current(), digest((".",)), triton_images.environment()]
        return hashlib.sha256(repr(made_from).encode()).digest()

    @property
    def file_name(self) -> str:
        """The file's name in the folder of compiled kernels."""
        return f"{self.key.hex()[:32]}.steps"

    def encode(self, steps: Steps) -> bundle.Compiled:
        """A list as it is kept."""
        ran = [
            [op, name, sorted(ran.kernels), ran.reasons] for (op, name), ran in steps.ran.items()
        ]
        kernels = {key.hex(): request.name for key, request in steps.requests.items()}
        content = {"kernels": kernels, "max_tokens": self.max_tokens, "ran": ran}
        words = json.dumps(content, sort_keys=True).encode()
        file = sealed_file.encode(_MAGIC, self.key, words)
        return bundle.Compiled(self.key, "the list of kernels of a model's steps", file)

    def stored(self) -> Steps | None:
        """The list, without requests, or one of longer steps; None if a kernel of it is missing."""
        from dsv4.triton._runtime import kernel_store as triton_images

        def decode(file: bytes) -> dict[str, Any]:
            return json.loads(sealed_file.decode(_MAGIC, self.key, file))

        content = cubin_cache.find(self.target.arch, self.key, self.file_name, decode)
        if content is None or content["max_tokens"] < self.max_tokens:
            return None
        known = {bytes.fromhex(key): name for key, name in content["kernels"].items()}
        for key in known:
            if not cubin_cache.is_kept(self.target.arch, key, triton_images.file_name(key)):
                return None
        ran = {
            (op, name): Ran(reasons, set(kernels)) for op, name, kernels, reasons in content["ran"]
        }
        return Steps(ran, known=known)

    def keep(self, steps: Steps) -> None:
        """Keep a list on disk, or in this process where that cannot be."""
        content = self.encode(steps).content
        if not cubin_cache.keep(self.file_name, content):
            bundle.active().fresh[self.key] = content
