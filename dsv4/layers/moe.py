"""The mixture-of-experts block: router, routed experts, shared expert."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeGuard, TypeVar

import torch
from torch import nn

from dsv4.config import ModelConfig
from dsv4.layers._module import is_unwatched
from dsv4.layers._rounded import Values
from dsv4.layers._routed_rows import RoutedRows
from dsv4.layers.experts import DeepseekV4Experts
from dsv4.layers.mlp import DeepseekV4MLP
from dsv4.layers.router import DeepseekV4HashRouter, DeepseekV4TopKRouter
from dsv4.overlap import Streams, side_streams
from dsv4.parallel.context import ParallelContext, has_own_tokens, tensor_parallel
from dsv4.parallel.expert_exchange import ExpertExchange
from dsv4.parallel.reduce import all_reduce
from dsv4.parallel.split import LocalSizes

# From this many tokens on the shared expert would fill the GPU for several times as long as sorting
# and gathering rows takes. It is then launched after the router and leaves SMs for these, which
# memory bounds; the CTAs of the routed experts start there and count the tiles they take.
_RESERVING_TOKENS, _RESERVED_SMS = 4096, 20
# Up to this many tokens the shared expert's last GEMM waits until rows are sorted. Otherwise it can
# take SMs just before the routed experts' first GEMM, one CTA on each SM, which then begins late on
# those SMs: 26 us instead of 19 in half of the layers of a step of one token on an H200.
_LATE_TOKENS = 8
R = TypeVar("R")
UNROUTED = -1  # token id of padding that no rank's experts are to process


class DeepseekV4SparseMoeBlock(nn.Module):
    """``sum over the chosen experts + shared expert`` (specification, section 8).

    On CUDA the shared expert runs on a side stream during the routed experts and, for fewer than
    4096 tokens, during the router; also in a captured graph.

    For expert parallelism a block holds a range of the experts. Each block routes all tokens and
    returns its experts' part of the sum; only the block that holds expert 0 has the shared expert,
    which is None in the others. So the sum over blocks whose ranges make up all experts, by an
    all-reduce for instance, is the layer's output, each part rounded to the dtype of its input.

    With ``parallel`` a block holds this rank's range and its part of the shared expert, whose
    intermediate size is split, and returns the sum over the ranks. Where each rank has tokens of
    its own (``mode="dp"``), it has the whole shared expert, and tokens and results are exchanged
    with the ranks of their experts (``dsv4.parallel.expert_exchange``).

    Args:
        config: A ``ModelConfig`` or transformers' configuration.
        layer_idx: Index of the layer, which decides how it routes.
        first_expert: The first expert held here.
        num_local_experts: Number of experts held here; None for all from ``first_expert`` on.
        parallel: This rank of several, which decides what is held; None: this process alone.

    Raises:
        ValueError: if there are no such experts, or a range is given beside ``parallel``.
    """

    shared_experts: DeepseekV4MLP | None

    def __init__(
        self,
        config: Any,
        layer_idx: int,
        first_expert: int = 0,
        num_local_experts: int | None = None,
        *,
        parallel: ParallelContext | None = None,
    ) -> None:
        super().__init__()
        config = ModelConfig.of(config)
        self.parallel = tensor_parallel(parallel)
        self.exchange: ExpertExchange | None = None
        if parallel is not None and has_own_tokens(parallel):
            self.exchange = ExpertExchange(parallel, config.n_routed_experts)
        if parallel is not None:
            if first_expert or num_local_experts is not None:
                raise ValueError(
                    f"DeepseekV4SparseMoeBlock: first_expert is {first_expert} and "
                    f"num_local_experts {num_local_experts} beside parallel, wanted neither"
                )
            experts = LocalSizes.of(config, parallel).experts
            first_expert, num_local_experts = experts.start, len(experts)
        self.is_hash = config.is_hash(layer_idx)
        router = DeepseekV4HashRouter if self.is_hash else DeepseekV4TopKRouter
        self.gate = router(config)
        self.experts = DeepseekV4Experts(config, first_expert, num_local_experts)
        has_shared = first_expert == 0 or parallel is not None
        self.shared_experts = DeepseekV4MLP(config, self.parallel) if has_shared else None

    def forward(
        self,
        hidden_states: torch.Tensor,
        input_ids: torch.Tensor | None = None,
        *,
        reduce: bool = True,
        routed: torch.Tensor | None = None,
        slots: Callable[[], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Apply the block to ``[B, S, H]``; ``input_ids [B, S]`` are needed in hash layers.

        Without ``reduce`` the result on several ranks is this rank's part of the sum. Where each
        rank has tokens of its own, their sums are whole in any case, and tokens whose id is
        ``UNROUTED`` go to no expert. ``routed [B * S]``, int64, is negative for such tokens in any
        case; None: all others go to some. ``slots``: see ``DeepseekV4Experts.forward``.

        Raises:
            ValueError: if this is a hash layer and ``input_ids`` is None.
        """
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        if self.exchange is not None:
            exchanged = self._exchanged(self.exchange, flat, input_ids, routed)
            return exchanged.view(hidden_states.shape)
        output = self._partial(self.experts, flat, hidden_states, input_ids, routed, slots)
        if reduce:
            output = all_reduce(self.parallel, output)
        return output.view(hidden_states.shape)

    def routed_rows(
        self,
        hidden_states: torch.Tensor,
        input_ids: torch.Tensor | None = None,
        *,
        routed: torch.Tensor | None = None,
        slots: Callable[[], torch.Tensor] | None = None,
    ) -> RoutedRows:
        """Do what ``forward`` does on one rank, but do not add up the rows; if ``gives_rows``.

        Args:
            hidden_states: See ``forward``, also for the following arguments.
            input_ids: ``[B, S]``.
            routed: ``[B * S]``.
            slots: Slots of hosted experts, or None.
        """
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        experts = self.experts.routed_rows
        return self._partial(experts, flat, hidden_states, input_ids, routed, slots)

    def _route(
        self, hidden: torch.Tensor, ids: torch.Tensor | None, routed: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return weights and experts ``[T, k]`` of tokens ``[..., H]``.

        Args:
            hidden: The tokens.
            ids: Their ids ``[...]``, which hash layers read.
            routed: ``[T]`` int64, negative for a token that goes to no expert; None: no such token.
        """
        arguments = (hidden, ids) if self.is_hash else (hidden,)
        # A router of somebody else's may not take the argument.
        options = {} if routed is None else {"routed": routed}
        _, weights, indices = self.gate(*arguments, **options)
        return weights, indices

    def _partial(
        self,
        experts: Callable[..., R],
        flat: torch.Tensor,
        hidden_states: torch.Tensor,
        input_ids: torch.Tensor | None,
        routed: torch.Tensor | None,
        slots: Callable[[], torch.Tensor] | None,
    ) -> R:
        """Return what ``experts`` make of the part that is computed here: ``[T, H]``, or rows."""
        arguments = (hidden_states, input_ids, routed)
        mlp, streams = self.shared_experts, side_streams(flat)
        # Experts of another package may not take the argument.
        options: dict[str, Any] = {} if slots is None else {"slots": slots}
        if mlp is None:
            weights, indices = self._route(*arguments)
            return experts(flat, indices, weights, **options)
        shared: torch.Tensor | Callable[[], torch.Tensor]
        if flat.shape[0] <= _LATE_TOKENS and self._has_late_shared:
            with streams.on("shared"):
                inner = mlp.inner(flat)
            shared = partial(_shared_output, mlp, inner, streams)
            weights, indices = self._route(*arguments)
        elif flat.shape[0] < _RESERVING_TOKENS:
            with streams.on("shared"):
                shared = mlp(flat)
            weights, indices = self._route(*arguments)
        else:
            weights, indices = self._route(*arguments)
            with streams.on("shared"):
                if type(mlp) is DeepseekV4MLP:
                    shared = mlp(flat, reserve_sms=_RESERVED_SMS)
                else:  # another module may not take the argument
                    shared = mlp(flat)
        return experts(flat, indices, weights, shared, streams, **options)

    @property
    def _has_late_shared(self) -> bool:
        """Return whether the shared expert may run in two parts; not if somebody watches it.

        Nor where experts are in host memory: it then runs while the missing ones are loaded.
        """
        if self.shared_experts is None or not is_unwatched(self.experts, DeepseekV4Experts):
            return False
        if self.experts.hosted is not None:
            return False
        return is_unwatched(self.shared_experts, DeepseekV4MLP)

    def _exchanged(
        self,
        exchange: ExpertExchange,
        flat: torch.Tensor,
        input_ids: torch.Tensor | None,
        routed: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the output ``[T, H]`` for this rank's tokens, by the experts of all ranks."""
        mlp, streams = self.shared_experts, side_streams(flat)
        assert mlp is not None, "every rank has it"
        with streams.on("shared"):
            shared = mlp(flat)
        own = None if input_ids is None else input_ids.reshape(-1)
        weights, indices = self._route(flat, own if own is None else own.clamp(min=0), routed)
        if own is not None:
            indices = indices.masked_fill((own == UNROUTED).unsqueeze(1), -1)
        return exchange.run(self.experts, flat, indices, weights, shared, streams)


def _shared_output(mlp: DeepseekV4MLP, inner: Values, streams: Streams) -> torch.Tensor:
    """Launch the shared expert's last GEMM on its stream, behind what was launched until now."""
    with streams.on("shared", behind="shared"):
        return mlp.down_proj(inner)


def gives_rows(module: nn.Module) -> TypeGuard[DeepseekV4SparseMoeBlock]:
    """Return whether ``routed_rows`` may stand for a call of a layer's expert block on one rank.

    Not if somebody watches the block or its experts, whose output is then to be seen.
    """
    if not is_unwatched(module, DeepseekV4SparseMoeBlock):
        return False
    return module.exchange is None and is_unwatched(module.experts, DeepseekV4Experts)
