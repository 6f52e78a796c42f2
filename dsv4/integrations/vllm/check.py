"""``DSV4_VLLM_CHECK=1``: which boundary of the model was the first that was not finite.

Inputs and outputs of all modules of the model, this package's or vLLM's, are marked on the device
(``dsv4.boundaries``), in CUDA graphs, too, and no step waits for its marks: they are examined when
a later step begins or a request ends. An incident is logged once per request, with the layer, the
part and its kernels, the token, the request's id and its position.

Model Runner V2 tells the ids through ``ModelState``, which a model may choose: the state that it
would have has two methods extended. V1 has no such place. There the number of the request in the
batch is logged if the step ran eagerly, and nothing where it replayed a whole graph; dummy runs are
watched as well. Padding of graphs is left out by a mask that this module fills for V2, before each
step, and by vLLM's own for V1.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.model_executor.models.utils import PPMissingLayer
from vllm.models.common.ops import sequence_parallel

from dsv4.boundaries import INPUT, OUTPUT, Boundaries, Boundary, Finding, Rows, Steps
from dsv4.integrations.vllm import places
from dsv4.integrations.vllm._log import logger
from dsv4.integrations.vllm.adoption import Adoption
from dsv4.integrations.vllm.batch import Batch, Token

LOGITS = ("compute_logits", "compute_logits_local")
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, PPMissingLayer)
_ALL = Rows()  # rows of logits: none is padding


def adopt(model: nn.Module, context: Adoption) -> None:
    """Watch a model, if ``DSV4_VLLM_CHECK=1``. To be called after all parts have adopted theirs.

    Args:
        model: vLLM's model, or this package's under vLLM's engine.
        context: Its configuration and report.

    Raises:
        RuntimeError: if this vLLM has not the places that are hooked.
        ValueError: with microbatches (``--enable-dbo``) or prefill context parallelism, where rows
            are not those of the batch.
    """
    if not context.switches.check:
        return
    places.require(places.CHECK_STATE if context.switches.model else places.CHECK)
    parallel = context.vllm_config.parallel_config
    if parallel.use_ubatching or parallel.prefill_context_parallel_size > 1:
        raise ValueError(
            "DSV4_VLLM_CHECK is 1 with microbatches or prefill context parallelism, where a token "
            "of a rank is not that of the batch: set DSV4_VLLM_CHECK=0 or leave them out"
        )
    watch = Watch(model, context)
    watch.attach()
    logger().info("DSV4_VLLM_CHECK=1: %d boundaries are watched", len(watch.boundaries))


class Watch:
    """Marks, steps and incidents of one model.

    Attributes:
        boundaries: The marks.
        steps: Them, step by step.
        by_state: Whether Model Runner V2 says when a step begins and which requests it has.
    """

    def __init__(self, model: nn.Module, context: Adoption) -> None:
        config = context.vllm_config
        device = next(model.parameters()).device
        self.boundaries = Boundaries(device)
        self.steps: Steps[Batch] = Steps(self.boundaries)
        self.by_state = bool(config.use_v2_model_runner)
        self._model = model
        self._context = context
        self._number = 0
        self._known: set[object] = set()  # incidents that were logged
        tokens = config.scheduler_config.max_num_batched_tokens
        with torch.inference_mode(False):  # it is written to in and out of that mode
            # All padding before the first step: neither profiling nor capture is looked at.
            self._padding = torch.ones(tokens, dtype=torch.bool, device=device)

    def attach(self) -> None:
        """Hook all modules, the methods that make logits and the state of Model Runner V2."""
        self._model.register_forward_pre_hook(self._enter, with_kwargs=True)
        for name, module in self._model.named_modules():
            if module is not self._model and not isinstance(module, _CONTAINERS):
                self.boundaries.hook(module, name)
        self._model.register_forward_hook(self._leave)
        for name in LOGITS:
            if hasattr(self._model, name):
                self._wrap(name)
        self.boundaries.reset()
        if self.by_state:
            self._offer_state(self._state_class)

    # One step.

    def begin(self, input_batch: Any) -> None:
        """Begin a step of Model Runner V2, before its first kernel and behind its inputs."""
        self._number += 1
        self.steps.begin(Batch.of_input_batch(self._number, input_batch))
        self._padding[: input_batch.num_tokens].fill_(False)
        self._padding[input_batch.num_tokens :].fill_(True)
        self.examine()

    def _enter(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        positions = kwargs["positions"] if "positions" in kwargs else args[1]
        context = get_forward_context() if is_forward_context_available() else None
        tokens = positions.shape[-1]
        padding: torch.Tensor | None = self._padding[:tokens]
        if not self.by_state:
            padding = None if context is None else context.is_padding
            self._begin_without_state(None if context is None else context.attn_metadata, positions)
        self.boundaries.begin(self._rows(positions, padding))

    def _leave(self, *_: Any) -> None:
        self.boundaries.end()

    def _begin_without_state(self, metadata: Any, positions: torch.Tensor) -> None:
        if positions.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        self._number += 1
        self.steps.begin(Batch.of_metadata(self._number, metadata, positions))
        self.examine()

    def _rows(self, positions: torch.Tensor, padding: torch.Tensor | None) -> dict[int, Rows]:
        """Rows of all tokens, and under sequence parallelism of those of this rank."""
        tokens = positions.shape[-1]
        rows = {tokens: Rows(padding)}
        if any(getattr(m, "use_sequence_parallel", False) for m in self._model.children()):
            own = sequence_parallel.sp_padding_mask(padding, positions)
            rank = get_tensor_model_parallel_rank()
            rows.setdefault(own.shape[0], Rows(own, rank * own.shape[0]))
        return rows

    # Logits, which are made after the forward pass, outside graphs.

    def _wrap(self, name: str) -> None:
        method = getattr(self._model, name)
        class_name = type(self._model).__name__
        before, after = (
            self.boundaries.add(Boundary(name, side, class_name)) for side in (INPUT, OUTPUT)
        )

        @functools.wraps(method)
        def watched(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self.boundaries.mark(before, hidden_states, _ALL)
            logits = method(hidden_states, *args, **kwargs)
            self.boundaries.mark(after, logits, _ALL)
            self.end()
            return logits

        setattr(self._model, name, watched)

    def end(self) -> None:
        """End a step: its marks are sent behind its kernels."""
        if not self.by_state and not self.steps.is_open:
            self._number += 1  # a replayed graph: marks of a step that nobody announced
            self.steps.resume(Batch(self._number))
        self.steps.end()
        self.boundaries.reset()

    # Model Runner V2's state.

    def _offer_state(self, state_class: Callable[[], type]) -> None:
        self._model.__dict__["get_model_state_cls"] = state_class

    def _state_class(self) -> type:
        """The class that the model would have without ``get_model_state_cls``, extended."""
        from vllm.v1.worker.gpu import model_states

        own = self._model.__dict__.pop("get_model_state_cls")
        try:
            base = model_states.resolve_model_state_cls(self._context.vllm_config, self._model)
        finally:
            self._offer_state(own)
        return watched_state(base, self)

    # Incidents.

    def examine(self, wait: bool = False) -> None:
        """Log what is new in the steps whose marks have arrived."""
        for batch, finding in self.steps.findings(wait):
            token = self._token(batch, finding)
            incident: object = token.request or finding.boundary
            if incident not in self._known:
                self._known.add(incident)
                logger().error("%s", self.describe(batch, finding, token))

    def forget(self, request: str) -> None:
        """Note that a request has ended; called between steps."""
        self.steps.end()
        self.examine()
        self._known.discard(request)

    def _token(self, batch: Batch, finding: Finding) -> Token:
        if finding.boundary.module == "compute_logits":
            return batch.logit(finding.row)
        if finding.boundary.module in LOGITS:
            return Token(finding.row)  # rows that other ranks' are sorted among
        return batch.token(finding.row)

    def describe(self, batch: Batch, finding: Finding, token: Token) -> str:
        """Say what happened, where and to whom."""
        text = f"step {batch.step}: NaN or infinity, first in the {finding.boundary}"
        text += f"{self._kernels(finding.boundary)}: {token}"
        if finding.before is not None:
            text += f". The {finding.before}, before it, was finite"
        return text

    def _kernels(self, boundary: Boundary) -> str:
        """Kernels of the module, or of what holds it where its input is what is wrong."""
        name = boundary.module
        if boundary.side == INPUT:
            name = name.rpartition(".")[0]
        rows = [row for row in self._context.report.rows if row.place == name]
        if not rows:
            return ""
        return ", made by " + ", ".join(row.kernel for row in rows)


def watched_state(base: type, watch: Watch) -> type:
    """Derive a ``ModelState`` that says which requests a step has and which end."""

    class WatchedState(base):  # type: ignore[valid-type, misc]
        """The model's state, telling a ``Watch`` of real batches."""

        def preprocess_state(self, input_batch: Any, *args: Any, **kwargs: Any) -> None:
            """Begin a step; called for real batches alone, before the forward pass."""
            watch.begin(input_batch)
            super().preprocess_state(input_batch, *args, **kwargs)

        def remove_request(self, req_id: str) -> None:
            """Examine what has arrived: after the last request no step follows."""
            watch.forget(req_id)
            super().remove_request(req_id)

    return WatchedState
