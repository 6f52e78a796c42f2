"""Reference implementation of ``dsv4.ops.kv_cache``."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from dsv4.kv_cache.pages import GROUP, EntryLayout, IndexLayout, entry_layout
from dsv4.ops._library import as_record
from dsv4.ops.kv_cache import FakeQuantizeKvArgs, NormRopeWriteKvArgs, ReadKvArgs, WriteKvArgs
from dsv4.ops.norm import RmsNormArgs
from dsv4.ops.rope import RopeArgs
from dsv4.reference._exponent import ceil_log2, power_of_two
from dsv4.reference._index_entries import decode_keys, encode_keys
from dsv4.reference._scatter import merge_skipped
from dsv4.reference.norm import rms_norm
from dsv4.reference.rope import rope

_NAN_BYTE = 255  # NaN as an E8M0 scale
_NAN_CODE = 0x7F  # NaN as E4M3


def write_kv(args: WriteKvArgs) -> None:
    """See ``dsv4.ops.kv_cache.write_kv``."""
    data = args.data
    if args.entries.shape[0] == 0 or data.shape[0] == 0:
        return
    if args.entry_format == "plain":
        slot, rows = merge_skipped(args.slots, args.entries.to(data.dtype), data[0, :1])
        data[slot // args.page_size, slot % args.page_size] = rows
        return
    layout = entry_layout(args.entry_format, args.head_dim, args.rope_dim)
    zero = torch.zeros(1, dtype=torch.int64, device=args.slots.device)
    page, column = _bytes_of(layout, args.page_size, zero)
    slot, rows = merge_skipped(args.slots, _encode(args.entries, layout), data[page, column])
    page, column = _bytes_of(layout, args.page_size, slot)
    data[page, column] = rows


def read_kv(args: ReadKvArgs) -> torch.Tensor:
    """See ``dsv4.ops.kv_cache.read_kv``."""
    if args.data.shape[0] == 0 or args.slots.numel() == 0:
        return torch.zeros(
            *args.slots.shape, args.head_dim, dtype=args.dtype, device=args.data.device
        )
    slot = args.slots.to(torch.int64).clamp(min=0)
    if args.entry_format == "plain":
        out = args.data[slot // args.page_size, slot % args.page_size].to(args.dtype)
    else:
        layout = entry_layout(args.entry_format, args.head_dim, args.rope_dim)
        out = _decode(_entries_of(args.data, layout, args.page_size, slot), layout).to(args.dtype)
    return out.masked_fill_((args.slots < 0).unsqueeze(-1), 0)


def fake_quantize_kv(args: FakeQuantizeKvArgs) -> torch.Tensor:
    """See ``dsv4.ops.kv_cache.fake_quantize_kv``."""
    layout = EntryLayout(args.x.shape[-1], args.rope_dim)
    return _decode(_encode(args.x, layout), layout).to(args.x.dtype)


def norm_rope_write_kv(args: NormRopeWriteKvArgs) -> None:
    """See ``dsv4.ops.kv_cache.norm_rope_write_kv``."""
    normed = rms_norm(RmsNormArgs(args.kv, args.weight, args.eps))
    entries = rope(RopeArgs(normed, args.cos, args.sin, False))
    write_kv(as_record(WriteKvArgs, args, entries=entries))


def _entries_of(
    data: torch.Tensor, layout: EntryLayout | IndexLayout, page_size: int, slots: torch.Tensor
) -> torch.Tensor:
    # Bytes of each entry, data, then scales: whole rows of each part of the page.
    page, entry = slots // page_size, slots % page_size
    middle, end = layout.scale_offset(0, page_size), layout.scale_offset(page_size, page_size)
    rows = data[:, :middle].unflatten(1, (page_size, layout.data_bytes))
    scales = data[:, middle:end].unflatten(1, (page_size, layout.scale_bytes))
    return torch.cat((rows[page, entry], scales[page, entry]), dim=-1)


def _bytes_of(
    layout: EntryLayout | IndexLayout, page_size: int, slots: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    # Page and byte within the page of every byte of the entries: data, then scales. Never one flat
    # byte number: that would need the product of page and page size to fit.
    page, entry = slots // page_size, slots % page_size
    data = torch.arange(layout.data_bytes, device=slots.device)
    scale = torch.arange(layout.scale_bytes, device=slots.device)
    after_data = layout.scale_offset(0, page_size)
    column = torch.cat(
        (
            entry.unsqueeze(-1) * layout.data_bytes + data,
            after_data + entry.unsqueeze(-1) * layout.scale_bytes + scale,
        ),
        dim=-1,
    )
    return page.unsqueeze(-1), column


def _encode(x: torch.Tensor, layout: EntryLayout | IndexLayout) -> torch.Tensor:
    # [..., D] -> the bytes of each entry, [..., data_bytes + scale_bytes]
    if isinstance(layout, IndexLayout):
        return encode_keys(x, layout)
    nope, rope = x.split((layout.nope_dim, layout.rope_dim), dim=-1)
    padded = F.pad(nope.to(torch.float32), (0, layout.groups * GROUP - layout.nope_dim))
    groups = padded.unflatten(-1, (layout.groups, GROUP))
    amax = groups.abs().amax(-1, keepdim=True)
    exponent = ceil_log2(amax.clamp(1e-4) / 448)  # -22 .. 120 where amax is finite
    finite = amax.isfinite()
    scaled = groups * power_of_two(torch.where(finite, -exponent, 0), torch.float32)
    codes = scaled.to(torch.float8_e4m3fn).view(torch.uint8).masked_fill(~finite, _NAN_CODE)
    scales = (exponent + 127).masked_fill(~finite, _NAN_BYTE).to(torch.uint8).squeeze(-1)
    return torch.cat(
        (
            codes.flatten(-2)[..., : layout.nope_dim],
            _bfloat16(rope).contiguous().view(torch.uint8),
            F.pad(scales, (0, layout.scale_bytes - layout.groups)),
        ),
        dim=-1,
    )


def _bfloat16(x: torch.Tensor) -> torch.Tensor:
    # A cast keeps a NaN's sign on the CPU and not on a GPU; the stored bytes must not depend on it.
    return x.to(torch.bfloat16).masked_fill(x.isnan(), float("nan"))


def _decode(entries: torch.Tensor, layout: EntryLayout | IndexLayout) -> torch.Tensor:
    # Inverse of _encode, float32.
    if isinstance(layout, IndexLayout):
        return decode_keys(entries, layout)
    codes, rope, scales = entries.split(
        (layout.nope_dim, 2 * layout.rope_dim, layout.scale_bytes), dim=-1
    )
    scale = _scale_value(scales[..., : layout.groups])
    scale = scale.repeat_interleave(GROUP, dim=-1)[..., : layout.nope_dim]
    nope = codes.contiguous().view(torch.float8_e4m3fn).to(torch.float32) * scale
    return torch.cat((nope, rope.contiguous().view(torch.bfloat16).to(torch.float32)), dim=-1)


def _scale_value(byte: torch.Tensor) -> torch.Tensor:
    # E8M0. Byte 0 is 2^-127, below the normal range of float32: half of 2^-126.
    exponent = byte.to(torch.int32) - 127
    value = power_of_two(exponent.clamp(-126, 127), torch.float32)
    value = torch.where(byte == 0, value / 2, value)
    return value.masked_fill(byte == _NAN_BYTE, float("nan"))
