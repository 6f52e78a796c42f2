"""The kernels that the warm-up of replaced modules launches, listed before it runs.

The warm-up runs twice. The first run lists the kernels, which worker processes compile in parallel.
The second run launches them on the GPU. In the first run all tensors of the modules are on the meta
device: operators compute shapes alone, and vLLM's collectives exchange nothing. The modules get
back the attributes that they had before it.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from dsv4.compilation.launch_recorder import Steps, launches_of
from dsv4.compilation.target import Target
from dsv4.integrations.vllm._log import logger
from dsv4.integrations.vllm.adoption import Adoption

_STATE = "dsv4_state"  # the attribute that holds this package's state of a replaced module


@dataclass(frozen=True)
class Settings:
    """What decides the launches, as text; the key of a list that is kept.

    Attributes:
        modules: Of each kind.
        engine: vLLM and its configuration.
    """

    modules: tuple[str, ...]
    engine: tuple[str, ...]

    @classmethod
    def of(cls, model: nn.Module, context: Adoption) -> Settings:
        """Read them.

        Args:
            model: vLLM's model with replaced modules.
            context: Of the adoption.
        """
        config = context.vllm_config
        engine = (
            importlib.metadata.version("vllm"),
            config.model_config.hf_config.to_json_string(),
            config.model_config.max_model_len,
            config.scheduler_config.max_num_seqs,
            config.cache_config.block_size if config.cache_config.user_specified_block_size else "",
            config.cache_config.cache_dtype,
            config.parallel_config.tensor_parallel_size,
            getattr(config, "speculative_config", None) is not None,
        )
        modules = {_text(module) for module in model.modules() if _is_own(module)}
        return cls(tuple(sorted(modules)), tuple(map(str, engine)))


def _is_own(module: nn.Module) -> bool:
    return type(module).__module__.startswith("dsv4.") or hasattr(module, "dsv4_warm")


def _text(module: Any) -> str:
    """A module's class, sizes, and the types of its tensors."""
    own = [*module._parameters.items(), *module._buffers.items()]
    tensors = [f"{name} {list(t.shape)} {t.dtype}" for name, t in own if t is not None]
    name, formatted = type(module).__qualname__, getattr(module, "format", None)
    return f"{name} {module.extra_repr()} {formatted} {tensors}"


@dataclass
class Listed:
    """Makes the list of a model's warm-up.

    Attributes:
        model: vLLM's model with replaced modules.
        context: Of the adoption.
        pieces: Makes the functions that the warm-up consists of.
        problems: Why pieces have no list.
    """

    model: nn.Module
    context: Adoption
    pieces: Callable[[], Iterable[Callable[[], None]]]
    problems: list[str] = field(default_factory=list)

    @property
    def settings(self) -> Settings:
        """The key of the list."""
        return Settings.of(self.model, self.context)

    def parts(self, target: Target) -> Iterator[Steps]:
        """Yield what each piece launches on a GPU.

        The model has values again while nothing is asked for.
        """
        for piece in self.pieces():
            try:
                with without_values(self.model):
                    steps = launches_of(piece, target)
            except Exception as error:  # of vLLM's code, which may not run without values
                self.problems.append(f"{type(error).__name__}: {error}".partition("\n")[0])
                logger().info("dsv4 has no list of the kernels of a module: %s", self.problems[-1])
                continue
            yield steps


@contextmanager
def without_values(model: nn.Module) -> Iterator[None]:
    """Put all tensors of a model's modules on the meta device; nothing is copied.

    Behind the block the modules have all attributes that they had before it.
    """
    memory = [_Memory.of(module) for module in model.modules()]
    twins: dict[int, torch.Tensor] = {}
    try:
        for remembered in memory:
            remembered.leave(twins)
        yield
    finally:
        for remembered in memory:
            remembered.restore()


@dataclass(frozen=True)
class _Memory:
    """Attributes of a module, and those of its state.

    Attributes:
        owners: Dictionaries that hold them, and what they hold.
    """

    owners: tuple[tuple[dict[str, Any], dict[str, Any]], ...]

    @classmethod
    def of(cls, module: nn.Module) -> _Memory:
        own = vars(module)
        holders = [own, own["_parameters"], own["_buffers"]]
        if _STATE in own:
            holders.append(vars(own[_STATE]))
        return cls(tuple((holder, dict(holder)) for holder in holders))

    def leave(self, twins: dict[int, torch.Tensor]) -> None:
        """Replace tensors by twins, the same tensor by the same."""
        for holder, values in self.owners:
            for name, value in values.items():
                if isinstance(value, torch.Tensor):
                    holder[name] = twins.setdefault(id(value), _twin(value))

    def restore(self) -> None:
        """Undo everything since."""
        for holder, values in self.owners:
            holder.clear()
            holder.update(values)


def _twin(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same sizes and dtype on the meta device."""
    made = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=torch.device("meta")
    )
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, requires_grad=False)
    return made
