"""Swap modules of a transformers model, and make transformers know of what replaces them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from dsv4.config import ModelConfig
from dsv4.integrations._arguments import transformers_version, warn_if_untested
from dsv4.integrations._expert_parallel import ExpertRange
from dsv4.integrations._experts import register_forward
from dsv4.integrations._guards import Guards, check_implementation
from dsv4.integrations._report import Replaced, Report
from dsv4.integrations._settings import changed_frequencies
from dsv4.integrations._swap import Plan


def modeling_module() -> Any:
    """Return transformers' module of DeepSeek-V4 code.

    Raises:
        ImportError: if transformers is not installed.
    """
    try:
        from transformers.models.deepseek_v4 import modeling_deepseek_v4
    except ImportError as error:
        raise ImportError(
            "dsv4.integrations.transformers needs transformers >= 5.17: "
            f"pip install 'dsv4[hf]' ({error})"
        ) from error
    return modeling_deepseek_v4


def swap_modules(
    model: Any,
    modeling: Any,
    config: ModelConfig,
    parts: tuple[str, ...],
    experts: ExpertRange | None = None,
) -> Report:
    """Swap the modules of some parts; see ``dsv4.integrations.transformers.apply`` for errors.

    Args:
        model: transformers' model.
        modeling: transformers' module of its code.
        config: The model's configuration.
        parts: Parts to swap.
        experts: Experts of this rank; None: all.

    Returns:
        The report of replaced modules and of others.
    """
    warn_if_untested(transformers_version())
    if "attention" in parts:
        check_implementation(model.config)
    plan = Plan(config, modeling, parts, changed_frequencies(model, config), experts)
    plan.visit(model)
    plan.check()
    register_forward()
    _install_recorders(model, modeling)
    replaced = plan.execute()
    guards = Guards.install(model, modeling, replaced)

    def undo() -> None:
        plan.undo()
        guards.remove()

    title = (
        f"dsv4 in {type(model).__name__}, numerics {config.numerics}, "
        f"activation {config.activation}"
    )
    return Report(title, replaced, tuple(plan.not_replaced), tuple(_notes(replaced)), _undo=undo)


def _install_recorders(model: nn.Module, modeling: Any) -> None:
    """Make transformers put its recording hooks on the modules now, so that a swap can keep them.

    It would otherwise do so when outputs are first asked for, by class, and miss the new modules:
    the answer would be an empty tuple.
    """
    from transformers.utils.output_capturing import maybe_install_capturing_hooks

    for module in model.modules():
        if isinstance(module, modeling.DeepseekV4Model):
            maybe_install_capturing_hooks(module)


def _notes(replaced: Iterable[Replaced]) -> Iterable[str]:
    parts = {entry.part for entry in replaced}
    if parts:
        yield "inference only: a backward pass through a replaced module raises"
    if "attention" in parts:
        yield "output_attentions=True raises: attention weights are never materialised"
        yield "attn_implementation other than eager raises, as do 4-D masks with a bias"
        yield "left-padded batches decode differently, but with paged_cache; see the module's text"
    if "experts" in parts:
        yield "experts_implementation has no effect on replaced experts"
