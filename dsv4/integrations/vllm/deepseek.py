"""vLLM's DeepSeek-V4 with modules on this package's kernels.

vLLM builds its model as always. Then every part that ``DSV4_VLLM`` switches on walks over the
modules and replaces, on each instance, what it has a kernel for. When weights are loaded, the table
of what was replaced and what was not is logged, and saved where ``report.path_of_stage`` says.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank
from vllm.models.deepseek_v4.nvidia import model as vllm_model

from dsv4.integrations.vllm import check, jit_warmup, places, switches
from dsv4.integrations.vllm._log import logger
from dsv4.integrations.vllm.adoption import Adoption
from dsv4.integrations.vllm.report import DRAFT, path_of_stage
from dsv4.integrations.vllm.warm import warm_replaced

# A part and a module of this package with ``adopt(model, context)``, in the order of the calls.
ADOPTERS: tuple[tuple[str, str], ...] = (
    (switches.EXPERTS, "experts"),
    (switches.LINEAR, "linear"),
    (switches.ATTENTION, "attention"),
    (switches.HYPER_CONNECTION, "hyper_connection"),
    (switches.HYPER_CONNECTION, "norm"),
)

_COMPRESSED_TENSORS = "compressed-tensors"  # vLLM's name of a quantisation
_NOT_MAPPED = (
    "vLLM's DeepSeek-V4 does not know the names of tensors in checkpoints of compressed-tensors; "
    "DSV4_VLLM=model serves them"
)


class DeepseekV4ForCausalLM(vllm_model.DeepseekV4ForCausalLM):
    """The class that the plugin registers for ``DSV4_VLLM=all`` or a list of parts.

    Attributes:
        dsv4: The context of the adoption, with the report.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        registrations = jit_warmup.Registrations(vllm_config)
        with registrations.held():
            super().__init__(vllm_config=vllm_config, prefix=prefix)
        self._dsv4_loading = False
        self.dsv4 = adopt_parts(self, vllm_config, check.adopt)
        registrations.hand_on(self)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load as vLLM does; it calls ``process_weights_after_loading`` in here, too."""
        self._dsv4_loading = True
        try:
            return super().load_weights(weights)
        finally:
            self._dsv4_loading = False

    def process_weights_after_loading(self) -> None:
        """Finish as vLLM does, and when all layers are processed log and save the report."""
        super().process_weights_after_loading()
        if not self._dsv4_loading:
            finish(self, self.dsv4)


def adopt_parts(
    model: nn.Module, vllm_config: VllmConfig, last: Callable[[nn.Module, Adoption], None]
) -> Adoption:
    """Let every part that is switched on replace its modules of a model that was just built.

    Args:
        model: vLLM's model or draft.
        vllm_config: Its configuration.
        last: Called after all parts.

    Returns:
        The context, whose report has what is known before weights are loaded.

    Raises:
        RuntimeError: if ``DSV4_VLLM_STRICT=1`` and something is known to stay vLLM's.
    """
    context = Adoption(vllm_config)
    for module in known_adopters(context):
        module.adopt(model, context)
    last(model, context)
    if context.report.refused:
        check_strict(context)
    return context


def finish(model: nn.Module, context: Adoption, *, draft: bool = False) -> None:
    """Warm the kernels of a loaded model, log its report and save it.

    Args:
        model: vLLM's model or draft.
        context: Of ``adopt_parts``.
        draft: Whether it is a draft: its kernels are those that the main model's layers have
            compiled, but for sizes of its own.

    Raises:
        RuntimeError: as ``check_strict``.
    """
    context.report.nothing_replaced(context.switches.parts)
    check_strict(context)
    warm_replaced(model, context, draft=draft)
    publish(context, draft=draft)


def known_adopters(context: Adoption) -> Iterator[ModuleType]:
    """Import the modules of the parts that are switched on, where this vLLM is as they know it.

    A part that is not known gets a row in the report for each difference.
    """
    different = places.mismatches(places.CORE)
    if context.vllm_config.model_config.quantization == _COMPRESSED_TENSORS:
        logger().warning("dsv4 leaves vLLM's DeepSeek-V4 untouched: %s.", _NOT_MAPPED)
        different.append(_NOT_MAPPED)
    for part in switches.PARTS:
        if part not in context.switches.parts:
            continue
        reasons = different + places.mismatches(places.of_part(part))
        for reason in reasons:
            context.report.left(part, "*", "vLLM's", reason)
        for name in () if reasons else [name for owner, name in ADOPTERS if owner == part]:
            yield importlib.import_module(f"dsv4.integrations.vllm.{name}")


def check_strict(context: Adoption) -> None:
    """Raise RuntimeError if ``DSV4_VLLM_STRICT=1`` and something was not replaced."""
    if context.switches.strict and not context.report.complete:
        raise RuntimeError(
            f"DSV4_VLLM_STRICT=1, and dsv4 did not replace everything:\n{context.report}"
        )


def publish(context: Adoption, *, draft: bool = False) -> None:
    """Log and save the report, in one process of each pipeline stage.

    The report of a draft has a file of its own; that of an engine before goes with the model's.
    """
    if get_tensor_model_parallel_rank() != 0:
        return
    report, stage, stages = context.report, get_pp_group().rank_in_group, get_pp_group().world_size
    what = "draft of DeepSeek-V4" if draft else "DeepSeek-V4"
    where = f"pipeline stage {stage} of {stages}"
    logger().info("dsv4 in vLLM's %s, %s:\n%s", what, where, report)
    path, path_of_draft = path_of_stage(stage, stages), path_of_stage(DRAFT, stages)
    if path is not None and path_of_draft is not None:
        try:
            path_of_draft.unlink(missing_ok=True)
            report.save(path_of_draft if draft else path)
        except OSError as error:
            logger().warning("dsv4's report was not saved: %s", error)
