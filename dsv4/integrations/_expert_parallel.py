"""Expert parallelism of transformers (``DistributedConfig``) with this package's experts.

transformers' own implementations split ``gate_up_proj`` and ``down_proj`` of a module and then read
``num_experts`` as the number of experts of this rank. Packed and quantised experts cannot be split
so: scales lie beside the codes, and ``num_experts`` is the number of all. So the module is built
with its rank's range, the plan's rules for its parameters do nothing (the style ``"dsv4_whole"``),
and the implementation ``"dsv4"`` hands it the ids of all experts and sums over the ranks.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

from dsv4 import ops
from dsv4.config import ModelConfig
from dsv4.integrations._arguments import transformers_version
from dsv4.layers.experts import DeepseekV4Experts
from dsv4.parallel.agreement import check_equal, described
from dsv4.parallel.kernel_facts import kernel_facts

IMPLEMENTATION = "dsv4"
WHOLE = "dsv4_whole"
_OLDEST = (5, 24)
_BUILT_IN = ("auto", "all_to_all", "all_reduce", "deepgemm_megamoe")
_EXPERTS = "model.layers.*.mlp.experts"
_PLAN = {
    f"{_EXPERTS}.gate_up_proj": WHOLE,
    f"{_EXPERTS}.down_proj": WHOLE,
    _EXPERTS: "ep_dispatch_experts",
}


@dataclass(frozen=True)
class ExpertRange:
    """The experts of a rank.

    Attributes:
        first: The first one.
        count: Their number.
    """

    first: int
    count: int

    def cut(self, model: nn.Module, modeling: Any) -> None:
        """Leave this range of the experts of a model on the meta device."""
        for module in model.modules():
            if not isinstance(module, modeling.DeepseekV4Experts):
                continue
            for name in ("gate_up_proj", "down_proj"):
                whole = module._parameters[name]
                assert whole is not None
                part = whole.detach()[self.first : self.first + self.count]
                module._parameters[name] = nn.Parameter(part, requires_grad=False)

    def others(self, config: ModelConfig) -> tuple[str, ...]:
        """Return shell patterns of the names of other ranks' experts in a checkpoint."""
        own = range(self.first, self.first + self.count)
        numbers = (n for n in range(config.n_routed_experts) if n not in own)
        return tuple(f"model.layers.*.mlp.experts.{n}.*" for n in numbers)

    def build(self, config: ModelConfig) -> DeepseekV4Experts:
        """Make the module that holds them."""
        return DeepseekV4Experts(config, self.first, self.count)


@dataclass(frozen=True)
class Distribution:
    """How transformers distributes a model over ranks.

    Attributes:
        config: transformers' ``DistributedConfig`` with the rules for this package's experts.
        meshes: transformers' meshes of processes.
        experts: Experts of this rank.
    """

    config: Any
    meshes: Any
    experts: ExpertRange

    @classmethod
    def prepare(
        cls,
        distributed: Any,
        modeling: Any,
        config: ModelConfig,
        parts: Iterable[str],
        device: torch.device,
    ) -> Distribution:
        """Check a ``DistributedConfig`` and set up its process groups.

        Raises:
            ImportError: if transformers is older than 5.24.
            TypeError: if it is neither a ``DistributedConfig`` nor a dict.
            ValueError: if it asks for what is not supported, or the ranks differ in configuration
                or version; nothing is allocated then.
        """
        register()
        from transformers.distributed import DistributedConfig

        if not isinstance(distributed, (dict, DistributedConfig)):
            kind = type(distributed).__name__
            raise TypeError(f"distributed_config is {kind}, wanted a DistributedConfig")
        if isinstance(distributed, dict):
            distributed = DistributedConfig.from_dict(distributed)
        reason = unsupported(distributed, config, parts)
        if reason is not None:
            raise ValueError(f"distributed_config: {reason}")
        # transformers 5.24 documents an empty plan, and then raises because it is empty.
        distributed = dataclasses.replace(distributed, ep_plan=dict(_PLAN), tp_plan=None)
        model = modeling.DeepseekV4ForCausalLM
        distributed, own_device, meshes = model.prepare_distribute_model(distributed)
        own_device = torch.device(own_device)
        if own_device.type != device.type:
            raise ValueError(f"device is {device}, and transformers' processes are on {own_device}")
        mesh = meshes.get_mesh("ep")
        _check_ranks(mesh.get_group(), config, parts, own_device)
        own = range_of(mesh.get_local_rank(), mesh.size(), config.n_routed_experts)
        return cls(distributed, meshes, own)

    def install(self, model: Any) -> None:
        """Let the experts of a filled model be called through ``"dsv4"``."""
        model._tp_plan = {"lm_head": WHOLE}
        type(model).maybe_distribute_model(model, self.config, self.meshes)


def _check_ranks(
    group: Any, config: ModelConfig, parts: Iterable[str], device: torch.device
) -> None:
    """Raise on all ranks unless they load one configuration with the same versions."""
    import torch.distributed as dist

    values = {f"{f.name} of config.json": getattr(config, f.name) for f in fields(config)}
    facts = {"the version of transformers": transformers_version(), **kernel_facts(device)}
    of_ranks: list[Any] = [None] * group.size()
    dist.all_gather_object(
        of_ranks, described({**facts, **values, "parts": tuple(parts)}), group=group
    )
    check_equal(of_ranks)


def unsupported(distributed: Any, config: ModelConfig, parts: Iterable[str]) -> str | None:
    """Return why a ``DistributedConfig`` cannot be obeyed, or None."""
    size, name = distributed.ep_size, distributed.ep_implementation
    if name in _BUILT_IN:
        return (
            f"ep_implementation is {name!r}, wanted {IMPLEMENTATION!r}: transformers' own read "
            "num_experts as the number of a rank's experts, which in dsv4's experts, whose scales "
            "lie beside their codes, is the number of all, so that one rank would run all of them"
        )
    if name != IMPLEMENTATION:
        return f"ep_implementation is {name!r}, wanted {IMPLEMENTATION!r}"
    if size < 2:
        return f"ep_size is {size}, wanted the number of ranks"
    others = {"tp_size": size, "fsdp_size": 1, "dp_replicate_size": 1, "pp_size": 1}
    for field, expected in others.items():
        if getattr(distributed, field) != expected:
            return (
                f"{field} is {getattr(distributed, field)}, wanted {expected}: all ranks process "
                "the same batch, and only experts are distributed"
            )
    if distributed.tp_plan != {}:
        return (
            f"tp_plan is {distributed.tp_plan!r}, wanted {{}}: attention, embedding and head are "
            "whole on every rank; dsv4.load splits them"
        )
    if distributed.ep_plan is not None:
        return "ep_plan is given, wanted None: dsv4 has rules of its own for its experts"
    if "experts" not in parts:
        return "parts leaves out 'experts', which are what is distributed"
    if config.n_routed_experts % size:
        return f"ep_size is {size}, which does not divide {config.n_routed_experts} experts"
    return None


def register() -> None:
    """Make ``ep_implementation="dsv4"`` and the style ``"dsv4_whole"`` known to transformers.

    Raises:
        ImportError: if transformers is older than 5.24.
    """
    version = transformers_version()
    if tuple(int(n) for n in re.findall(r"\d+", version)[:2]) < _OLDEST:
        raise ImportError(
            f"expert parallelism needs transformers >= {'.'.join(map(str, _OLDEST))}, whose "
            f"experts take implementations from outside; found {version}"
        )
    from transformers.distributed.expert_parallel import EPImplementationInterface
    from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

    EPImplementationInterface.register(IMPLEMENTATION, _implementation())
    ALL_PARALLEL_STYLES.register(WHOLE, _style())


@functools.cache
def _style() -> Any:
    """Make the style ``"dsv4_whole"``, which leaves parameters and modules as they are."""
    from transformers.distributed.expert_parallel import ExpertParallelLayer

    class Whole(ExpertParallelLayer):  # type: ignore[misc]
        """Neither splits parameters nor replaces the forward."""

        def install_forward(self, module: nn.Module, mesh: Any) -> nn.Module:
            """Return the module as it is."""
            return module

    return Whole()


@functools.cache
def _implementation() -> Any:
    """Make the class of ``ep_implementation="dsv4"``, whose base is transformers'."""
    from transformers.distributed.expert_parallel import EPImplementation

    class SummedExperts(EPImplementation):  # type: ignore[misc]
        """Each rank runs its experts on the batch that all share; the results are summed.

        No rank reads a number on the host, so steps can be captured. Sums are this package's, which
        give all ranks the same bits.
        """

        needs_shared_batch = True

        def __init__(self, experts: Any, ep_mesh: Any, tp_mesh: Any) -> None:
            super().__init__(experts, ep_mesh, tp_mesh)
            self.group = ep_mesh.get_group().group_name
            self.rank = ep_mesh.get_local_rank()
            self.takes_all_ids = isinstance(experts, DeepseekV4Experts)
            self.count: int = experts.num_experts  # of this rank, where transformers split it
            if isinstance(experts, DeepseekV4Experts):
                own = range_of(self.rank, ep_mesh.size(), experts.num_experts)
                held = ExpertRange(experts.first_expert, experts.num_local_experts)
                if held != own:
                    raise ValueError(f"rank {self.rank} holds {held}, wanted {own}")

        def __call__(
            self,
            hidden_states: torch.Tensor,
            top_k_index: torch.Tensor,
            top_k_weights: torch.Tensor,
        ) -> torch.Tensor:
            if not self.takes_all_ids:  # transformers' module numbers its own experts from 0
                local = top_k_index - self.rank * self.count
                is_own = (local >= 0) & (local < self.count)
                top_k_index = torch.where(is_own, local, self.count)
                top_k_weights = top_k_weights.masked_fill(~is_own, 0.0)
            partial = self.experts_forward(hidden_states, top_k_index, top_k_weights)
            return ops.all_reduce(partial, self.group)

    return SummedExperts


def range_of(rank: int, ranks: int, experts: int) -> ExpertRange:
    """Return the experts of a rank: contiguous ranges in the order of ranks."""
    count = experts // ranks
    return ExpertRange(rank * count, count)
