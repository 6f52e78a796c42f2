"""Assertions that say where and by how much; they need torch alone.

Three questions, strictest first: are the bits equal (``assert_bitwise``), how many representable
numbers lie between (``assert_ulp``), is the error inside a budget that was derived from the
computation (``assert_within_budget`` with ``gemm_budget`` or one's own).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_UNIT_ROUNDOFF = {
    torch.float64: 2.0**-53,
    torch.float32: 2.0**-24,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
}


def unit_roundoff(dtype: torch.dtype) -> float:
    """Largest relative error of one rounding to nearest: 2^-24 for float32, 2^-8 for bfloat16."""
    return _UNIT_ROUNDOFF[dtype]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex() or tensor.dtype == torch.bool:
        return tensor
    return tensor.detach().contiguous().view(_INTEGER_OF_SIZE[tensor.element_size()])


def _same_kind(actual: torch.Tensor, expected: torch.Tensor) -> None:
    if actual.dtype != expected.dtype:
        raise AssertionError(f"dtype is {actual.dtype}, expected {expected.dtype}")
    if actual.shape != expected.shape:
        raise AssertionError(f"shape is {list(actual.shape)}, expected {list(expected.shape)}")
    if actual.device != expected.device:
        raise AssertionError(f"device is {actual.device}, expected {expected.device}")


def _report(what: str, bad: torch.Tensor, actual: torch.Tensor, expected: torch.Tensor) -> str:
    first = tuple(torch.nonzero(bad)[0].tolist())
    return (
        f"{what} at {int(bad.sum())} of {bad.numel()} places, first at {list(first)}: "
        f"{actual[first].item()!r}, expected {expected[first].item()!r}"
    )


def assert_bitwise(actual: torch.Tensor, expected: torch.Tensor, what: str = "tensor") -> None:
    """Require the same dtype, shape, device and bits; NaNs equal when both are, with any payload.

    Negative zero differs from zero.

    Args:
        actual: The result.
        expected: What it must be.
        what: Name used in the message.

    Raises:
        AssertionError: with the number of differing places and the first coordinate and values.
    """
    _same_kind(actual, expected)
    bad = _bits(actual) != _bits(expected)
    if actual.dtype.is_floating_point and bool(bad.any()):
        bad &= ~(_is_nan(actual) & _is_nan(expected))
    if bool(bad.any()):
        raise AssertionError(_report(f"{what} differs in its bits", bad, actual, expected))


def _is_nan(tensor: torch.Tensor) -> torch.Tensor:
    return torch.isnan(tensor.to(torch.float64 if tensor.element_size() > 4 else torch.float32))


def ulp_distance(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Number of representable values between two tensors of one floating dtype, int64.

    Zero and negative zero are 0 apart; NaN and NaN are 0 apart, NaN and a number 2^62.
    """
    _same_kind(actual, expected)
    if not actual.dtype.is_floating_point or actual.element_size() == 1:
        raise TypeError(f"dtype is {actual.dtype}, wanted a floating dtype of 16 bits or more")
    distance = (_ordered(actual) - _ordered(expected)).abs()
    nan, expected_nan = torch.isnan(actual), torch.isnan(expected)
    distance = torch.where(nan | expected_nan, torch.full_like(distance, 1 << 62), distance)
    return torch.where(nan & expected_nan, torch.zeros_like(distance), distance)


def _ordered(tensor: torch.Tensor) -> torch.Tensor:
    bits = _bits(tensor).to(torch.int64)
    lowest = -(1 << (8 * tensor.element_size() - 1))
    return torch.where(bits < 0, lowest - bits, bits)


def assert_ulp(
    actual: torch.Tensor, expected: torch.Tensor, max_ulps: int, what: str = "tensor"
) -> None:
    """Require at most ``max_ulps`` representable values between them, everywhere.

    Raises:
        AssertionError: with the worst distance and the first offending coordinate.
    """
    distance = ulp_distance(actual, expected)
    bad = distance > max_ulps
    if bool(bad.any()):
        worst = int(distance.max())
        words = f"{what} is more than {max_ulps} ulp off (worst {worst})"
        raise AssertionError(_report(words, bad, actual, expected))


def assert_within_budget(
    actual: torch.Tensor,
    oracle: torch.Tensor,
    budget: torch.Tensor | float,
    what: str = "tensor",
) -> None:
    """``|actual - oracle| <= budget`` everywhere, compared in float64.

    Where the oracle is NaN the result must be NaN, where it is infinite the same infinity, and
    nowhere else.

    Args:
        actual: The result, any floating dtype.
        oracle: The float64 truth, same shape.
        budget: Absolute error allowed, a number or a tensor that broadcasts to the shape.
        what: Name used in the message.

    Raises:
        AssertionError: with the worst ratio of error to budget and the first offending coordinate.
    """
    if actual.shape != oracle.shape:
        raise AssertionError(f"shape is {list(actual.shape)}, expected {list(oracle.shape)}")
    wide, truth = actual.to(torch.float64), oracle.to(torch.float64)
    allowed = torch.as_tensor(budget, dtype=torch.float64, device=actual.device)
    error = (wide - truth).abs()
    finite = torch.isfinite(truth)
    same = (wide == truth) | (torch.isnan(wide) & torch.isnan(truth))
    good = torch.where(finite, error <= allowed, same)
    if not bool(good.all()):
        ratio = float((error / allowed).nan_to_num(posinf=float("inf"), nan=0.0).max())
        words = f"{what} is outside its error budget (worst {ratio:.3g} times)"
        raise AssertionError(_report(words, ~good, wide, truth))


def gemm_budget(
    x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype, *, roundings: int = 3
) -> torch.Tensor:
    """Error allowed to ``x @ weight.T`` summed in float32 in any order, then rounded.

    A float32 sum of K products in any order is off by at most ``(K + 1) u S`` with ``u = 2^-24``
    and ``S = sum |x_k w_k|`` (Higham, Accuracy and Stability, 3.1: K-1 additions and one
    rounding per product, to first order). Scales applied before or after the sum add ``roundings``
    roundings of relative size u. The result's own rounding adds ``u_out |y|`` and half the smallest
    subnormal of its dtype. First-order terms are widened by 1 % for the higher orders.

    Args:
        x: float64 ``[..., K]``, the exact left operand.
        weight: float64 ``[N, K]``, the exact right operand.
        out_dtype: Dtype of the result.
        roundings: Extra float32 roundings per term or result (scales).

    Returns:
        float64 ``[..., N]``.
    """
    terms = x.shape[-1] + 1 + roundings
    magnitude = x.abs() @ weight.abs().T
    accumulate = 1.01 * terms * unit_roundoff(torch.float32) * magnitude
    exact = (x @ weight.T).abs()
    smallest = torch.finfo(out_dtype).smallest_normal * unit_roundoff(out_dtype)
    return accumulate + 1.01 * unit_roundoff(out_dtype) * (exact + accumulate) + smallest


def assert_pure(function: Callable[..., Any], *args: Any) -> None:
    """Require that a call changes no tensor argument and returns memory of none of them.

    What ``torch.library.opcheck``'s ``test_schema`` asks, for arguments of float8 dtypes, on which
    that check itself fails.

    Raises:
        AssertionError: naming the position of the argument.
    """
    tensors = {i: arg for i, arg in enumerate(args) if isinstance(arg, torch.Tensor)}
    before = {i: tensor.clone() for i, tensor in tensors.items()}
    results = function(*args)
    results = results if isinstance(results, (tuple, list)) else (results,)
    for i, tensor in tensors.items():
        assert_bitwise(_bits(tensor), _bits(before[i]), f"argument {i} after the call")
        for result in results:
            if result.numel() and result.untyped_storage().data_ptr() == (
                tensor.untyped_storage().data_ptr()
            ):
                raise AssertionError(f"a result shares the memory of argument {i}")
