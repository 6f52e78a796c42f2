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

    return _register(name, body, fake)


def define_out(schema: str) -> Callable[..., None]:
    """Register ``name_out``: the operator of ``schema`` with its result in a tensor it is given.

    The schema has ``Tensor(a!) out`` before ``backend`` and no result. The implementations are
    those of the operator itself, which take ``out``, and dispatch chooses among them as there.

    Args:
        schema: What ``define`` got for the operator.
    """
    name, rest = schema.split("(", 1)
    arguments, _ = rest.split("str backend)")
    _LIBRARY.define(f"{name}_out({arguments}Tensor(a!) out, str backend) -> ()")

    def body(*args: Any) -> None:
        *others, out, backend = args
        with torch.no_grad():
            dispatch.run(name, (*others, backend), out=out)

    return _register(f"{name}_out", body, lambda *args: None)


def _register(name: str, body: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    _LIBRARY.impl(name, body, "CompositeExplicitAutograd")
    torch.library.register_fake(f"dsv4::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.dsv4, name).default
