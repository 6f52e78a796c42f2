"""The one place where operators are registered with torch.

Every schema ends in ``str backend`` and has no default values (torch drops trailing defaults before
it calls a Python implementation, which would shift the arguments). Inference only: no autograd
formula is registered, so torch warns when a backward pass reaches an operator, and no gradient
passes through it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dsv4 import dispatch

_LIBRARY = torch.library.Library("dsv4", "DEF")


def define(schema: str, fake: Callable[..., Any]) -> Callable[..., Any]:
    """Register ``schema`` with the dispatcher as its body and ``fake`` as its shape function.

    Returns:
        The operator overload, e.g. ``torch.ops.dsv4.rms_norm.default``.
    """
    name = schema.split("(", 1)[0]
    assert schema.rstrip().split("->")[0].rstrip().endswith("str backend)"), schema
    _LIBRARY.define(schema)

    def body(*args: Any) -> Any:
        if not torch.is_grad_enabled():
            return dispatch.run(name, args)
        # Without this the reference would build autograd's graph of its own intermediate tensors.
        with torch.no_grad():
            return dispatch.run(name, args)

    _LIBRARY.impl(name, body, "CompositeExplicitAutograd")
    torch.library.register_fake(f"dsv4::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.dsv4, name).default
