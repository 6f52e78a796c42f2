"""Time of a decode step of one layer without its GEMMs and its attention.

The layer is the real one, captured in a CUDA graph as it would be, but every GEMM and the
attention itself return a buffer that was filled before. What is left in the graph are the
steps between them. The baseline is transformers' own layer in eager mode, its kernels counted and
summed without those that multiply matrices.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

from dsv4.bench.environment import Rates
from dsv4.bench.problem import UsageError
from dsv4.bench.results import Row
from dsv4.config import CSA, ModelConfig
from dsv4.kv_cache.paged_cache import Batch, CacheStep, PagedCache
from dsv4.layers.decoder import DeepseekV4DecoderLayer
from dsv4.layers.rotary import LABELS, DeepseekV4RotaryEmbedding

# What a kernel's name contains if it multiplies matrices.
_GEMM_NAMES = ("gemm", "gemv", "nvjet", "cutlass", "splitk", "bmm", "dot_kernel", "sgemm")


@dataclass
class _Buffers:
    """Results of the GEMMs, in the order of the calls of one forward."""

    device: torch.device
    made: list[torch.Tensor] = field(default_factory=list)
    next: int = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if self.next == len(self.made):
            self.made.append(torch.randn(shape, device=self.device).to(dtype))
        self.next += 1
        return self.made[self.next - 1]

    @contextmanager
    def replacing_gemms(self) -> Iterator[None]:
        """Make the layers' GEMMs and attention return buffers and launch nothing, within it."""

        def linear(
            layer: Any, x: torch.Tensor, out_dtype: torch.dtype | None = None, **_: Any
        ) -> Any:
            width = layer.out_features // layer.groups
            return self.take((*x.shape[:-1], width), out_dtype or x.dtype)

        def fused(
            layers: Any, x: torch.Tensor, out_dtype: torch.dtype | None = None, **_: Any
        ) -> Any:
            width = sum(layer.out_features for layer in layers)
            return self.take((*x.shape[:-1], width), out_dtype or x.dtype)

        def split(layers: Any, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> Any:
            widths = [layer.out_features for layer in layers]
            return list(fused(layers, x, out_dtype).split(widths, -1))

        def experts(layer: Any, name: str, rows: torch.Tensor, *_: Any) -> Any:
            gate_up = name == "gate_up_proj"
            width = 2 * layer.intermediate_dim if gate_up else layer.hidden_dim
            return self.take((rows.shape[0], width), rows.dtype)

        def attention(q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            return self.take(tuple(q.shape), q.dtype)

        replaced: dict[str, Callable[..., Any]] = {
            "dsv4.layers.linear.Linear.forward": linear,
            "dsv4.layers.linear.DeepseekV4GroupedLinear.forward": linear,
            "dsv4.layers.attention.fused_linear": split,
            "dsv4.layers._pooling.fused_linear": split,
            "dsv4.layers.mlp.concatenated_linear": fused,
            "dsv4.layers.experts.DeepseekV4Experts._project": experts,
            "dsv4.layers.attention.sparse_attention": attention,
        }
        with ExitStack() as stack:
            for target, function in replaced.items():
                stack.enter_context(mock.patch(target, function))
            yield

    def rewind(self) -> None:
        self.next = 0


def between_gemms(
    preset: str, config: ModelConfig, tokens: int, context: int, device: torch.device
) -> tuple[float, list[tuple[str, float]]]:
    """Microseconds of one replay, and name and microseconds of each kernel in it.

    Args:
        preset: Name of ``config``, for messages.
        config: The model's.
        tokens: Sequences, one new token each.
        context: Tokens each sequence had before.
        device: A GPU.

    Raises:
        UsageError: if the model has no layer with an indexer.
    """
    index = _csa_layer(preset, config)
    with torch.device("meta"):
        empty = DeepseekV4DecoderLayer(config, index)
    layer = _filled(empty, device)
    cache = PagedCache(
        config, max_sequences=tokens, max_tokens=context + 8, max_chunk=8, device=device
    )
    rows = torch.arange(tokens, device=device)
    batch = Batch.decode(torch.full_like(rows, context), rows)
    shape = (1, tokens, config.hc_mult, config.hidden_size)
    streams = torch.randn(shape, device=device).bfloat16()
    rotary = DeepseekV4RotaryEmbedding(config)
    tables = {name: rotary(streams, rows.unsqueeze(0) * 0 + context, name) for name in LABELS}
    buffers = _Buffers(device)

    def forward() -> None:
        buffers.rewind()
        with torch.inference_mode():
            layer(
                streams,
                input_ids=rows.unsqueeze(0) * 0,
                position_embeddings=tables,
                past_key_values=CacheStep(cache, batch),
            )

    with buffers.replacing_gemms():
        graph = _captured(forward)
    times = [_replay_us(graph) for _ in range(20)]
    return statistics.median(times), _kernels(graph.replay)


def _csa_layer(preset: str, config: ModelConfig) -> int:
    for index in range(config.num_hidden_layers):
        if config.layer_type(index) == CSA and not config.is_hash(index):
            return index
    raise UsageError(f"layer: {preset} has no layer with an indexer and a learned router")


def _filled(layer: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """The layer on the device, the parameters of GEMMs left out, the others random."""
    small = 1 << 24
    for module in layer.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            size = parameter.numel()
            values = torch.randn(parameter.shape if size < small else (1,), device=device) * 0.02
            new = torch.nn.Parameter(values.to(parameter.dtype), requires_grad=False)
            setattr(module, name, new)
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, torch.zeros(buffer.shape, dtype=buffer.dtype, device=device))
    return layer.eval()


def _captured(forward: Callable[[], None]) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            forward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forward()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def _replay_us(graph: torch.cuda.CUDAGraph) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    # Time for the host to enqueue the replay before the first event is recorded.
    torch.cuda._sleep(200_000)
    start.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return 1e3 * start.elapsed_time(end)


def _kernels(run: Callable[[], Any]) -> list[tuple[str, float]]:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    events = [e for e in profiler.events() if e.device_type.name == "CUDA"]
    return [(e.name, float(e.device_time)) for e in events]


def transformers_layer(
    config: ModelConfig, tokens: int, context: int, device: torch.device
) -> tuple[float, list[tuple[str, float]]]:
    """Wall microseconds of a decode step of transformers' layer in bfloat16, and its kernels."""
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM
    from transformers.cache_utils import DynamicCache

    names: dict[str, Any] = {
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "q_lora_rank": config.q_lora_rank,
        "o_groups": config.o_groups,
        "n_routed_experts": config.n_routed_experts,
        "moe_intermediate_size": config.moe_intermediate_size,
        "index_topk": config.index_topk,
        "routed_scaling_factor": config.routed_scaling_factor,
    }
    theirs = DeepseekV4Config(
        vocab_size=1024,
        num_hidden_layers=1,
        layer_types=["compressed_sparse_attention"],
        mlp_layer_types=["moe"],
        **names,
    )
    with torch.device(device):
        model = DeepseekV4ForCausalLM(theirs).bfloat16().eval().model
    ids = torch.randint(0, 1024, (tokens, context), device=device)
    cache = DynamicCache(config=theirs)
    first_ids = ids[:, :1]
    with torch.inference_mode():
        for part in ids.split(1024, 1):
            model(input_ids=part, past_key_values=cache, use_cache=True)

        def step() -> None:
            model(input_ids=first_ids, past_key_values=cache, use_cache=True)

        for _ in range(5):
            step()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(20):
            step()
        torch.cuda.synchronize()
        wall = 1e6 * (time.perf_counter() - start) / 20
        return wall, _kernels(step)


def multiplies(kernel: str) -> bool:
    """Return whether a kernel of that name multiplies matrices."""
    return any(word in kernel.lower() for word in _GEMM_NAMES)


def row(
    preset: str, config: ModelConfig, tokens: int, context: int, rates: Rates, device: torch.device
) -> tuple[Row, list[tuple[str, float]]]:
    """Both measured; the result row, and our kernels."""
    us, ours = between_gemms(preset, config, tokens, context, device)
    baselines: dict[str, float] = {}
    shape = {"context": context, "launches": len(ours)}
    wall, theirs = transformers_layer(config, tokens, context, device)
    others = [(name, taken) for name, taken in theirs if not multiplies(name)]
    baselines["transformers eager, whole layer"] = wall
    baselines["transformers eager, kernels that are no GEMMs"] = sum(t for _, t in others)
    shape["transformers_launches"] = len(others)
    result = Row(
        op="layer",
        case=f"{preset} C4A between the GEMMs",
        shape=shape,
        tokens=tokens,
        backend="auto",
        reason="the layer as its modules run it",
        us=us,
        bound_us=len(ours) * rates.node_us,
        bytes=0,
        flops=0,
        baselines=baselines,
        timer="graph",
    )
    return result, ours
