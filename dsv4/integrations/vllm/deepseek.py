"""vLLM's DeepSeek-V4 with modules on this package's kernels.

vLLM builds its model as always. Then every part that ``DSV4_VLLM`` switches on walks over the
modules and replaces, on each instance, what it has a kernel for. When weights are loaded, the table
of what was replaced and what was not is logged, and saved where ``report.path_of_stage`` says.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from types import ModuleType

import torch
from vllm.config import VllmConfig
from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank
from vllm.models.deepseek_v4.nvidia import model as vllm_model

from dsv4.integrations.vllm import check, places, switches
from dsv4.integrations.vllm._log import logger
from dsv4.integrations.vllm.adoption import Adoption
from dsv4.integrations.vllm.report import path_of_stage
from dsv4.integrations.vllm.warm import warm_replaced

# A part and a module of this package with ``adopt(model, context)``, in the order of the calls.
ADOPTERS: tuple[tuple[str, str], ...] = (
    (switches.EXPERTS, "experts"),
    (switches.LINEAR, "linear"),
    (switches.HYPER_CONNECTION, "hyper_connection"),
    (switches.HYPER_CONNECTION, "norm"),
)


class DeepseekV4ForCausalLM(vllm_model.DeepseekV4ForCausalLM):
    """The class that the plugin registers for ``DSV4_VLLM=all`` or a list of parts.

    Attributes:
        dsv4: The context of the adoption, with the report.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.dsv4 = Adoption(vllm_config)
        self._dsv4_loading = False
        for module in known_adopters(self.dsv4):
            module.adopt(self, self.dsv4)
        check.adopt(self, self.dsv4)
        check_strict(self.dsv4)

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
            check_strict(self.dsv4)
            warm_replaced(self, self.dsv4)
            publish(self.dsv4)


def known_adopters(context: Adoption) -> Iterator[ModuleType]:
    """Import the modules of the parts that are switched on, where this vLLM is as they know it.

    A part that is not known gets a row in the report for each difference.
    """
    different = places.mismatches(places.CORE)
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


def publish(context: Adoption) -> None:
    """Log and save the report, in one process of each pipeline stage."""
    if get_tensor_model_parallel_rank() != 0:
        return
    report, stage, stages = context.report, get_pp_group().rank_in_group, get_pp_group().world_size
    logger().info("dsv4 in vLLM's DeepSeek-V4, pipeline stage %d of %d:\n%s", stage, stages, report)
    path = path_of_stage(stage, stages)
    if path is not None:
        try:
            report.save(path)
        except OSError as error:
            logger().warning("dsv4's report was not saved: %s", error)
