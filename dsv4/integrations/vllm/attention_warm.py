"""Steps of attention on scratch pages, before vLLM has allocated its caches.

They launch what steps of requests launch, so that no request waits for a compiler: prompts, or
sequences of one token, for each number of tokens and each width of block tables at which launchers
may choose another kernel. vLLM's own warm-up runs only the sizes that it captures.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from vllm.forward_context import ForwardContext, override_forward_context
from vllm.v1.worker.block_table import get_block_table_width

from dsv4.kv_cache.pages import entry_layout

_WINDOW_BLOCK = 64  # tokens of a block of vLLM's raw entries (fp8_ds_mla)
_ALIGNMENT = 576  # bytes; vLLM pads pages to multiples of them


@dataclass(frozen=True)
class Limits:
    """The engine's sizes that decide shapes.

    Attributes:
        block_tokens: Tokens of a block of compressed entries.
        max_tokens: Tokens of the longest sequence.
        max_sequences: Most sequences of a step.
    """

    block_tokens: int
    max_tokens: int
    max_sequences: int

    @classmethod
    def of(cls, vllm_config: Any, module: Any) -> Limits:
        """Read vLLM's configuration, as it will be for an attention module."""
        return cls(
            block_tokens(module, vllm_config),
            vllm_config.model_config.max_model_len,
            vllm_config.scheduler_config.max_num_seqs,
        )

    def contexts(self) -> list[int]:
        """Return the longest contexts at which tables get wider: powers of two of blocks."""
        blocks = -(-self.max_tokens // self.block_tokens)
        widths = [1 << i for i in range((blocks - 1).bit_length())]
        return [width * self.block_tokens for width in widths] + [self.max_tokens]


@dataclass(frozen=True)
class Shape:
    """A step.

    Attributes:
        tokens: New tokens.
        sequences: Their number; they are prompts, or if there are as many as tokens decode.
        longest: Longest context, by which tables are cut.
    """

    tokens: int
    sequences: int
    longest: int

    @property
    def tokens_of_each(self) -> int:
        """Tokens of a sequence, but for the last one."""
        return -(-self.tokens // self.sequences)


def block_tokens(module: Any, vllm_config: Any) -> int:
    """Tokens of a block of compressed entries.

    vLLM decides them after the model is built, and until then its configuration has a default.

    Args:
        module: vLLM's attention.
        vllm_config: Its configuration.
    """
    cache = vllm_config.cache_config
    if cache.user_specified_block_size:
        return int(cache.block_size)
    return int(module.backend_cls.get_preferred_block_size(cache.block_size))


def shapes(tokens: int, limits: Limits) -> Iterator[Shape]:
    """Yield the steps with this number of tokens that may launch different kernels.

    Prompts that share a step may all be shorter than it, so a step of many tokens has narrow tables
    as well, while its sequences are no more than the engine takes. Tables that are cut have powers
    of two of columns. With them launchers choose again behind powers of two of tokens.
    """
    every = _is_power(tokens) or _is_power(tokens - 1)
    for longest in limits.contexts() if every else limits.contexts()[-1:]:
        sequences = -(-tokens // longest)
        if sequences <= limits.max_sequences:
            yield Shape(tokens, sequences, longest)
        if 1 < tokens <= limits.max_sequences:
            yield Shape(tokens, tokens, longest)


def _is_power(number: int) -> bool:
    return number & (number - 1) == 0


def warm(module: Any, tokens: int, limits: Limits) -> None:
    """Run an adopted attention module on zeros.

    Args:
        module: vLLM's attention with this package's operators.
        tokens: New tokens of a step.
        limits: The engine's.
    """
    device = module.attn_sink.device
    with scratch(module, limits):
        for shape in dict.fromkeys(shapes(tokens, limits)):
            positions = torch.arange(tokens, device=device) % shape.tokens_of_each
            x = torch.zeros(tokens, module.hidden_size, dtype=torch.bfloat16, device=device)
            metadata = fake_metadata(module, shape, positions, limits)
            context = ForwardContext(no_compile_layers={}, attn_metadata=metadata, slot_mapping={})
            with override_forward_context(context):
                module(positions, x)
                module.dsv4_choose(x, positions)


@contextmanager
def scratch(module: Any, limits: Limits) -> Iterator[None]:
    """Give a module caches of one block each; afterwards it has what it had."""
    owners = list(_caches(module, limits))
    before = [owner.kv_cache for owner, _ in owners]
    try:
        for owner, cache in owners:
            owner.kv_cache = cache
        yield
    finally:
        for (owner, _), cache in zip(owners, before, strict=True):
            owner.kv_cache = cache


def _caches(module: Any, limits: Limits) -> Iterator[tuple[Any, torch.Tensor]]:
    """Yield what holds a cache, and a cache of one block for it."""
    device, ratio = module.attn_sink.device, module.compress_ratio
    kv = entry_layout("fp8", module.head_dim, module.rope_head_dim)
    entry_bytes = kv.data_bytes + kv.scale_bytes
    yield module.swa_cache_layer, _block(_WINDOW_BLOCK, entry_bytes, device)
    if module.compressor is not None:
        yield module, _block(limits.block_tokens // ratio, entry_bytes, device)
        yield module.compressor.state_cache, _states(module.compressor, device)
    indexer = module.indexer
    if indexer is not None:
        keys = entry_layout(indexer.entry_format, indexer.head_dim, 0)
        entry_bytes = keys.data_bytes + keys.scale_bytes
        yield indexer.k_cache, _block(limits.block_tokens // ratio, entry_bytes, device)
        yield indexer.compressor.state_cache, _states(indexer.compressor, device)


def _block(entries: int, entry_bytes: int, device: torch.device) -> torch.Tensor:
    """One block ``[1, entries, entry_bytes]``, padded as vLLM's are."""
    size = -(-entries * entry_bytes // _ALIGNMENT) * _ALIGNMENT
    memory = torch.zeros(size, dtype=torch.uint8, device=device)
    return memory.as_strided((1, entries, entry_bytes), (size, entry_bytes, 1))


def _states(compressor: Any, device: torch.device) -> torch.Tensor:
    width = 2 * compressor.coff * compressor.head_dim
    block = compressor.state_cache.block_size
    return torch.zeros(1, block, width, dtype=torch.float32, device=device)


def fake_metadata(
    module: Any, shape: Shape, positions: torch.Tensor, limits: Limits
) -> dict[str, Any]:
    """Make the fields of vLLM's metadata that the module reads; all block tables name block 0.

    Args:
        module: The attention module.
        shape: The step.
        positions: ``[T]``.
        limits: The engine's.
    """
    count, device = shape.tokens, positions.device
    prefilled = count if shape.sequences < count else 0
    rows = torch.arange(count, dtype=torch.int32, device=device)
    requests = rows.div(shape.tokens_of_each, rounding_mode="floor")
    offsets = torch.arange(module.window_size, dtype=torch.int32, device=device)
    seen = torch.where(offsets <= positions[:, None], offsets % _WINDOW_BLOCK, -1).to(torch.int32)
    decode, prefill = (None, seen.unsqueeze(1)) if prefilled else (seen.unsqueeze(1), None)
    valid: torch.Tensor | None = torch.ones(count, dtype=torch.bool, device=device)
    if module.dsv4_state.has_own_metadata:  # as ``step_metadata`` makes them
        decode = prefill = valid = None
        prefilled = 0

    def table(block_tokens: int) -> torch.Tensor:
        columns = get_block_table_width(-(-limits.max_tokens // block_tokens), block_tokens)
        return torch.zeros(shape.sequences, columns, dtype=torch.int32, device=device)

    made: dict[str, Any] = {
        module.swa_cache_layer.prefix: SimpleNamespace(
            slot_mapping=positions % _WINDOW_BLOCK,
            block_table=table(_WINDOW_BLOCK),
            block_size=_WINDOW_BLOCK,
            is_valid_token=valid,
            token_to_req_indices=requests,
            decode_swa_indices=decode,
            prefill_swa_indices=prefill,
            num_decode_tokens=count - prefilled,
            num_prefill_tokens=prefilled,
        )
    }
    if module.compressor is None:
        return made
    closes = (positions + 1) % module.compress_ratio == 0
    own = module.dsv4_state.has_own_metadata
    entries = SimpleNamespace(
        max_seq_len=shape.longest,
        slot_mapping=None if own else torch.where(closes, 0, -1),
        block_table=table(limits.block_tokens),
    )
    made[module.prefix] = entries
    compressors = [module.compressor]
    if module.indexer is not None:
        keys = {**vars(entries), "slot_mapping": None}  # as ``step_metadata`` makes them
        made[module.indexer.k_cache.prefix] = SimpleNamespace(**keys)
        compressors.append(module.indexer.compressor)
    for compressor in compressors:
        block = compressor.state_cache.block_size
        made[compressor.state_cache.prefix] = SimpleNamespace(
            slot_mapping=positions % block,
            token_to_req_indices=requests,
            block_table=table(block),
        )
    return made
