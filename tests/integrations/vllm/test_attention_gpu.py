"""Against vLLM's CUDA kernels, and captured graphs; the other files need no GPU."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsv4.config import CSA, HCA, SLIDING
from dsv4.ops.attention import sparse_attention
from dsv4.ops.kv_cache import norm_rope_write_kv, write_kv
from dsv4.ops.norm import head_norm_rope_, rms_norm
from dsv4.ops.rope import rope_tables
from dsv4.testing.assertions import assert_bitwise, assert_ulp, assert_within_budget
from dsv4.testing.strategies import generator, normal

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.forward_context import ForwardContext, override_forward_context

from dsv4.integrations.vllm.cache_views import kv_pages
from tests.integrations.vllm import attention_modules as modules
from tests.integrations.vllm.attention_modules import Sizes, Step, Tables
from tests.integrations.vllm.test_attention import (
    MIXED,
    WINDOW,
    adopted,
    assert_close,
    inputs_of,
    own_layer,
    own_outputs,
)

pytestmark = pytest.mark.gpu
HEAD, ROPE, HEADS, EPS = 512, 64, 64, 1e-6
KINDS = (SLIDING, CSA, HCA)


def moved(value: Any, device: str) -> Any:
    """Tensors on a device, in whatever holds them here."""
    if isinstance(value, torch.nn.Parameter):
        return torch.nn.Parameter(value.to(device), requires_grad=False)
    if isinstance(value, torch.Tensor):
        return shared_blocks(value, device) if value.dtype == torch.uint8 else value.to(device)
    if isinstance(value, SimpleNamespace):
        for name, inner in vars(value).items():
            setattr(value, name, moved(inner, device))
        return value
    if dataclasses.is_dataclass(value):
        names = (f.name for f in dataclasses.fields(value))
        return dataclasses.replace(value, **{n: moved(getattr(value, n), device) for n in names})
    return value


def shared_blocks(cache: torch.Tensor, device: str) -> torch.Tensor:
    """A cache with its blocks as far apart as they were."""
    if cache.dim() != 3:
        return cache.to(device)
    memory = torch.zeros(cache.untyped_storage().nbytes(), dtype=torch.uint8, device=device)
    return memory.as_strided(cache.shape, cache.stride(), cache.storage_offset())


def on(module: Any, device: str) -> Any:
    """A module of ``attention_modules`` on a device."""
    for part in module.modules():
        for name, value in list(vars(part).items()):
            if isinstance(value, torch.Tensor | SimpleNamespace):
                setattr(part, name, moved(value, device))
    return module.to(device)


def metadata(module: Any, tables: Tables, step: Step, device: str) -> tuple[Any, torch.Tensor]:
    made, positions = modules.metadata(module, tables, step, WINDOW)
    return {name: moved(value, device) for name, value in made.items()}, positions.to(device)


@pytest.mark.parametrize("layer_type", KINDS)
def test_a_layer_equals_this_packages_own_on_a_gpu(layer_type):
    compare_layers(layer_type, "cuda")


def compare_layers(layer_type: str, device: str) -> None:
    """In bfloat16 another order of a sum may change a code of E4M3: a wider budget than a CPU's."""
    layer, sizes = own_layer(layer_type, 1).to(device), Sizes()
    inputs = [x.to(device) for x in inputs_of(layer, MIXED, 0)]
    module = on(adopted(layer, sizes), device)
    expected = own_outputs(layer, sizes, MIXED, inputs, device)
    tables = Tables(module, sizes, 0)
    for step, x, own in zip(MIXED, inputs, expected, strict=True):
        out = modules.run(module, *metadata(module, tables, step, device), x)
        assert_close(out[: own.shape[0]], own, 2.0**-4)


@pytest.mark.parametrize("layer_type", KINDS)
def test_a_captured_step_is_replayed_with_other_tokens(layer_type):
    """A padded decode step: metadata change in place, and a graph gives what eager code gives."""
    layer, sizes = own_layer(layer_type, 1).to("cuda"), Sizes()
    prompt, first, second = [
        Step([(0, 0, 30), (1, 0, 9), (2, 0, 1)], 0),
        Step([(0, 30, 1), (1, 9, 1)], 2, 2),
        Step([(0, 31, 1), (1, 10, 1), (2, 1, 1)], 3, 1),
    ]
    inputs = [x.cuda() for x in inputs_of(layer, [prompt, first, second], 0)]
    results = []
    for captured in (False, True):
        module = on(adopted(layer, sizes), "cuda")
        if module.indexer is not None:
            object.__setattr__(module.indexer, "takes_all", lambda: False)
        tables = Tables(module, sizes, 0)
        modules.run(module, *metadata(module, tables, prompt, "cuda"), inputs[0])
        made, positions = metadata(module, tables, first, "cuda")
        x = inputs[1].clone()
        graph = torch.cuda.CUDAGraph()
        if captured:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                modules.run(module, made, positions, x)
                modules.run(module, made, positions, x)
            torch.cuda.current_stream().wait_stream(stream)
            context = ForwardContext({}, made, {})
            with torch.inference_mode(), override_forward_context(context), torch.cuda.graph(graph):
                out = module(positions, x)
            graph.replay()
            outs = [out.clone()]
        else:
            outs = [modules.run(module, made, positions, x)]
        later, later_positions = metadata(module, tables, second, "cuda")
        if captured:
            for name, value in later.items():
                copy_tensors(made[name], value)
            positions.copy_(later_positions)
            x.copy_(inputs[2])
            graph.replay()
            outs.append(out.clone())
        else:
            outs.append(modules.run(module, later, later_positions, inputs[2]))
        results.append(outs)
    for step, eager, replayed in zip((first, second), *results, strict=True):
        count = eager.shape[0] - step.padding
        assert_close(replayed[:count], eager[:count], 2.0**-7)


def copy_tensors(target: Any, source: Any) -> None:
    """Copy what a step changes: tensors of metadata; a table may have fewer rows."""
    for field in dataclasses.fields(target):
        new = getattr(source, field.name)
        if isinstance(new, torch.Tensor) and new.numel():
            old = getattr(target, field.name)
            rows = min(old.shape[0], new.shape[0])
            old[:rows].copy_(new[:rows])


def tables_of(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(cos, sin, vLLM's table)``."""
    frequencies = torch.rand(ROPE // 2, generator=generator(0)).to(positions.device)
    angles = torch.cat(rope_tables(torch.arange(4096, device="cuda"), frequencies), dim=1)
    cos, sin = angles[positions].chunk(2, dim=1)
    return cos.contiguous(), sin.contiguous(), angles


@pytest.mark.parametrize("tokens", [1, 7, 300])
def test_vllm_fused_insert(tokens):
    """The same bytes of NoPE dims and scales; rotated dims and queries to the last place."""
    kv = normal(0, (tokens, HEAD)).to(torch.bfloat16).cuda()
    q = normal(1, (tokens, HEADS, HEAD)).to(torch.bfloat16).cuda()
    weight = (1 + 0.1 * normal(2, (HEAD,))).to(torch.bfloat16).cuda()
    positions = torch.randint(0, 4096, (tokens,), generator=generator(1)).cuda()
    cos, sin, angles = tables_of(positions)
    slots = torch.randperm(8 * 64, generator=generator(2))[:tokens].cuda()
    slots[::5] = -1
    theirs, mine = (moved(modules.cache_of(8, 64, 584), "cuda") for _ in range(2))
    flat = theirs.as_strided((8, 37440), (theirs.stride(0), 1))
    out = torch.ops._C.fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert(
        q, rms_norm(kv, weight, EPS), flat, slots, positions, angles, HEADS, EPS, 64
    )
    own = q.clone()
    head_norm_rope_(own, cos, sin, EPS)
    norm_rope_write_kv(kv_pages(mine, HEAD, ROPE), kv, weight, cos, sin, slots, eps=EPS)
    # This package rounds the norm before it rotates, vLLM does not.
    assert_within_budget(out, own.double(), 2.0**-7 * own.double().abs().amax(-1, keepdim=True))
    pages = [cache.as_strided((8, 37440), (cache.stride(0), 1)).cpu() for cache in (theirs, mine)]
    data = [page[:, : 64 * 576].view(8, 64, 576) for page in pages]
    assert_bitwise(data[1][..., :448], data[0][..., :448], "codes")
    assert_bitwise(pages[1][:, 64 * 576 : 64 * 584], pages[0][:, 64 * 576 : 64 * 584], "scales")
    rotated = [part[..., 448:].contiguous().view(torch.bfloat16) for part in data]
    assert_ulp(rotated[1], rotated[0], 1, "rotated dims")


@pytest.mark.parametrize("tokens", [1, 5, 64])
@pytest.mark.parametrize("width", [0, 512])
def test_flash_mla_on_the_same_pages(tokens, width):
    """vLLM's decode kernel and this package's, with a sink and slots of -1."""
    from vllm.v1.attention.ops.flashmla import flash_mla_with_kvcache, get_mla_metadata

    gen = generator(tokens)
    caches = [moved(modules.cache_of(16, 64, 584), "cuda") for _ in range(2)]
    pages = [kv_pages(cache, HEAD, ROPE) for cache in caches]
    for i, pool in enumerate(pages):
        entries = normal(i, (pool.num_slots, HEAD)).to(torch.bfloat16).cuda()
        write_kv(pool, entries, torch.arange(pool.num_slots, device="cuda"))
    q = normal(5, (tokens, HEADS, HEAD)).to(torch.bfloat16).cuda()
    sink = normal(6, (HEADS,)).cuda()
    slots, lengths = [], []
    for columns in (128, width):
        length = torch.randint(1, max(2, columns + 1), (tokens,), generator=gen)
        chosen = torch.randint(0, 1024, (tokens, columns), generator=gen)
        chosen = chosen.masked_fill(torch.arange(columns) >= length.unsqueeze(1), -1)
        slots.append(chosen.to(torch.int32).cuda())
        lengths.append(length.to(torch.int32).cuda())
    extra: dict[str, Any] = {}
    if width:
        extra = {
            "extra_k_cache": caches[1].unsqueeze(-2),
            "extra_indices_in_kvcache": slots[1].unsqueeze(1),
            "extra_topk_length": lengths[1],
        }
    theirs, _ = flash_mla_with_kvcache(
        q=q.unsqueeze(1),
        k_cache=caches[0].unsqueeze(-2),
        block_table=None,
        head_dim_v=HEAD,
        tile_scheduler_metadata=get_mla_metadata()[0],
        cache_seqlens=None,
        is_fp8_kvcache=True,
        indices=slots[0].unsqueeze(1),
        topk_length=lengths[0],
        softmax_scale=HEAD**-0.5,
        attn_sink=sink,
        **extra,
    )
    second = (pages[1], slots[1]) if width else (None, None)
    mine = sparse_attention(q, pages[0], slots[0], *second, sink, scale=HEAD**-0.5)
    reference = sparse_attention(
        q.double(), pages[0], slots[0], *second, sink, scale=HEAD**-0.5, backend="reference"
    )
    for result in (mine, theirs.squeeze(1)):
        assert_within_budget(result, reference, 2.0**-6 * reference.abs().amax())
