"""vLLM's DeepSeek-V4 with modules on this package's kernels.

vLLM builds its model as always. Then every part that ``DSV4_VLLM`` switches on walks over the
modules and replaces, on each instance, what it has a kernel for. The table of what was replaced
and what was not is logged once per engine and saved where ``report.path_of_stage`` says.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType

from vllm.config import VllmConfig
from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank
from vllm.models.deepseek_v4.nvidia import model as vllm_model

from dsv4.integrations.vllm import places
from dsv4.integrations.vllm._log import logger
from dsv4.integrations.vllm.adoption import Adoption
from dsv4.integrations.vllm.report import path_of_stage

# A part and a module of this package with ``adopt(model, context)``, in the order of the calls.
# A module may have ``building(context)``, a context manager around vLLM's constructor.
ADOPTERS: tuple[tuple[str, str], ...] = ()


class DeepseekV4ForCausalLM(vllm_model.DeepseekV4ForCausalLM):
    """The class that the plugin registers for ``DSV4_VLLM=all`` or a list of parts."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        context = Adoption(vllm_config)
        modules = list(known_adopters(context))
        with _building(modules, context):
            super().__init__(vllm_config=vllm_config, prefix=prefix)
        for _, module in modules:
            module.adopt(self, context)
        self.dsv4_report = context.report
        finish(context)


def known_adopters(context: Adoption) -> Iterator[tuple[str, ModuleType]]:
    """Import the modules of the parts that are switched on, where this vLLM is as they know it.

    A part that is not known gets a row in the report for each difference.
    """
    different = places.mismatches(places.CORE)
    for part, name in ADOPTERS:
        if part not in context.switches.parts:
            continue
        reasons = different + places.mismatches(places.of_part(part))
        for reason in reasons:
            context.report.left(part, "*", "vLLM's", reason)
        if not reasons:
            yield part, importlib.import_module(f"dsv4.integrations.vllm.{name}")


@contextmanager
def _building(modules: list[tuple[str, ModuleType]], context: Adoption) -> Iterator[None]:
    with ExitStack() as stack:
        for _, module in modules:
            if hasattr(module, "building"):
                stack.enter_context(module.building(context))
        yield


def finish(context: Adoption) -> None:
    """Log and save the report, in one process of each pipeline stage.

    Raises:
        RuntimeError: if ``DSV4_VLLM_STRICT=1`` and something was not replaced.
    """
    report = context.report
    if context.switches.strict and not report.complete:
        raise RuntimeError(f"DSV4_VLLM_STRICT=1, and dsv4 did not replace everything:\n{report}")
    if get_tensor_model_parallel_rank() != 0:
        return
    stage, stages = get_pp_group().rank_in_group, get_pp_group().world_size
    logger().info("dsv4 in vLLM's DeepSeek-V4, pipeline stage %d of %d:\n%s", stage, stages, report)
    path = path_of_stage(stage, stages)
    if path is not None:
        try:
            report.save(path)
        except OSError as error:
            logger().warning("dsv4's report was not saved: %s", error)
