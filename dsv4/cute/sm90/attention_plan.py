"""Configurations of the sparse-attention kernels, and the number of KV splits of a token.

``attention_plan`` chooses among four kernels by times that were measured (``tuned``), else by
estimated clock cycles, which are linear in KV blocks, heads and bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dsv4.cute.sm90.costs import AttentionCosts
from dsv4.cute.sm90.tuned import tuned
from dsv4.cute.sm90.tuned_records import AttentionConfiguration, AttentionKey
from dsv4.device import cached

HEADS = 64  # heads of a tile of ``AttentionKernel``
BLOCK = 64  # entries of a KV block, which are multiplied at a time
DIMS, NOPE, ROPE = 512, 448, 64  # dims of a head; those without and with rotary embedding
STAGES = 2
CONSUMER_WARPS = 8
PACKED_BYTES = DIMS * 5 // 2  # of a head's partial sums for another CTA: 20 bits each
# Registers of a thread that multiplies and of one that dequantizes, by the warps that dequantize.
REGISTERS = {4: (208, 88), 8: (192, 64)}
STAGE_BYTES = BLOCK * DIMS * 2
WEIGHT_BYTES = HEADS * BLOCK * 2
INFO_BYTES = 16  # description of a stage: which entries exist, and whether it is the item's last
COLUMN_CLUSTERS = (1, 2, 4, 8)  # CTAs of a cluster of ``ColumnsKernel``
MAX_SPLITS = 64  # a multiple of a warp's lanes
MERGE_BATCH = 8  # partial sums that ``MergeKernel`` loads at once; divides 32
# A split token's last used slot is not looked for up to this many slots of the token, nor up to
# this many KV blocks of a split.
_FEW_SLOTS, _FEW_BLOCKS = 2048, 4
NARROW_CLUSTERS = (8, 9, 12, 16)  # CTAs of a cluster of ``NarrowKernel``
NARROW_STEPS = {32: 4, 64: 7}  # entries that it multiplies at a time, and the time of such a step
# Slots of a token up to which ``NarrowKernel`` is the best choice where nobody knows how many of
# them are used, by the most clusters. Slots without an entry cost it a tenth of others; where all
# are used, KV splits and a merge launch take less time. More than 12 clusters would share SMs.
_NARROW_SLOTS = {4: 8704, 12: 4352}
_NARROW_SMS = 132  # SMs of the GPU of these figures
SPLITS, PAIRED, COLUMNS = "splits", "paired", "columns"  # forms, as data files name them


def code_bytes(plan: AttentionPlan | ColumnsPlan) -> int:
    """Bytes of codes and rotary dims that wait in shared memory, of a group of dequant warps."""
    rows = BLOCK // (8 * plan.dequant_warps)
    pieces = NOPE // 64 * rows - plan.register_pieces + 2 * rows * plan.rope_staged
    return pieces * 512 * plan.dequant_warps


@dataclass(frozen=True)
class AttentionPlan:
    """One configuration of the kernel in ``attention``.

    Attributes:
        split: Whether a token's entries are split over CTAs that leave partial sums for
            ``MergeKernel``.
        paired: Whether the two CTAs of a cluster share a tile's entries and each adds and stores
            half of the dims.
        dequant_warps: Warps that dequantize, 8 or 4. Eight finish a stage sooner; with four, a CTA
            that has many tiles does more in the same time, because the others have more registers.
    """

    split: bool
    paired: bool = False
    dequant_warps: int = 8

    dequant_groups = 1  # groups of such warps, each with KV blocks of its own
    scan_bytes = 32  # of a group: the result of each of up to eight warps
    producer_fences = False  # consumers fence, because their barrier orders generic writes as well
    kernel = "dsv4.cute.sm90.attention:AttentionKernel"

    @property
    def register_pieces(self) -> int:
        """Groups of 64 codes of a lane that wait in registers; others wait in shared memory."""
        return 4 if self.dequant_warps == 8 else 7

    @property
    def rope_staged(self) -> bool:
        """Return whether rotary dims wait in shared memory beside codes.

        Else they are copied straight to a stage once it is free.
        """
        return self.dequant_warps == 8

    @property
    def ctas(self) -> int:
        """CTAs of a cluster."""
        return 2 if self.paired else 1

    @property
    def shared_words(self) -> int:
        """Words of references, sums of weights, items, sinks and angles; a pair's statistics."""
        return 4 * HEADS + CONSUMER_WARPS + ROPE + (8 * HEADS if self.paired else 0)

    @property
    def threads(self) -> int:
        """Threads of a CTA: two warpgroups multiply, one or two dequantize."""
        return 32 * (CONSUMER_WARPS + self.dequant_warps)

    @property
    def shared_bytes(self) -> int:
        """Queries, stages, weights, codes, ``shared_words``, descriptions of stages, barriers."""
        tiles = (1 + STAGES) * STAGE_BYTES + WEIGHT_BYTES + code_bytes(self)
        notes = STAGES * (INFO_BYTES + 24) + self.scan_bytes + 64
        return 1024 + tiles + 4 * self.shared_words + notes


@dataclass(frozen=True)
class ColumnsPlan:
    """One configuration of the kernel in ``attention_columns``: entries as rows of both GEMMs.

    Attributes:
        ctas: CTAs of a cluster, which share a token's entries.
    """

    ctas: int

    kernel = "dsv4.cute.sm90.attention_columns:ColumnsKernel"
    heads = 16  # of a tile
    dequant_groups = 2  # groups of warps that dequantize, each with every other KV block
    dequant_warps = 4  # of such a group; another four warps multiply
    register_pieces = 7  # groups of 64 codes of a lane that wait in registers
    rope_staged = False  # rotary dims are copied straight to a stage once it is free
    scan_bytes = 16  # of a group: the result of each warp
    producer_fences = True
    threads = 384

    @property
    def shared_bytes(self) -> int:
        """Stages, queries, weights, codes, statistics, descriptions of stages, barriers."""
        tiles = STAGES * STAGE_BYTES + self.heads * (DIMS + BLOCK) * 2
        statistics = self.heads * (4 * 4 + self.ctas * 8) + (self.heads + ROPE) * 4
        notes = STAGES * INFO_BYTES + self.dequant_groups * self.scan_bytes
        return 1024 + tiles + self.dequant_groups * code_bytes(self) + statistics + notes + 256


@dataclass(frozen=True)
class MergePlan:
    """The kernel in ``attention_merge``, which adds the partial sums of a token's KV splits."""

    kernel = "dsv4.cute.sm90.attention_merge:MergeKernel"
    ctas = 1
    threads = DIMS // 8
    shared_bytes = 0


@dataclass(frozen=True)
class NarrowPlan:
    """One configuration of the kernel in ``attention_narrow``, for few tokens.

    Attributes:
        ctas: CTAs of a cluster, 8 to 16, which share the entries of 16 heads of a token. Not every
            GPU holds as many clusters of more than 8.
        step: Entries that are multiplied at a time, 32 or 64.
    """

    ctas: int = 8
    step: int = 32

    kernel = "dsv4.cute.sm90.attention_narrow:NarrowKernel"
    heads = 16  # of a tile
    threads = 256
    stages = 3  # of codes
    prefetched = 2  # steps whose codes are copied while one is multiplied

    @property
    def owners(self) -> int:
        """CTAs of the cluster that add partial sums and store."""
        return self.heads if self.ctas >= self.heads else 8

    @property
    def owned_heads(self) -> int:
        """Heads that an owner adds and stores."""
        return self.heads // self.owners

    @property
    def stage_bytes(self) -> int:
        """Bytes of the entries of a step and, once for every warp, of their scales."""
        return self.step * (NOPE + 2 * ROPE + 32)

    @property
    def shared_bytes(self) -> int:
        """The shared memory: more than half of an SM's, so that every CTA has an SM of its own."""
        sums = self.ctas * self.owned_heads * PACKED_BYTES
        weighing = self.heads * (8 * 4 + 2) * self.step
        return max(128 * 1024, self.stages * self.stage_bytes + sums + weighing + 2048)


Plan = AttentionPlan | ColumnsPlan | MergePlan | NarrowPlan


@cached
def attention_plan(
    tokens: int, heads: int, widths: tuple[int, int], sms: int
) -> tuple[AttentionPlan | ColumnsPlan | NarrowPlan, int]:
    """The fastest kernel, measured or by cycles, and over how many CTAs it splits a tile's entries.

    Args:
        tokens: At least 1.
        heads: Heads of a token.
        widths: Slots of a token in each cache.
        sms: SMs of the GPU.
    """
    if is_narrow(tokens, heads, widths, sms):
        clusters = tokens * -(-heads // NarrowPlan.heads)
        fitting = [c for c in NARROW_CLUSTERS if c == NarrowPlan.ctas or clusters * c <= sms]
        narrow = narrow_plan(widths, fitting)
        return narrow, narrow.ctas
    sizes = Sizes(tokens, heads, widths, sms)
    measured = tuned().plan_of(AttentionKey(tokens, heads, *widths)) if sms == tuned().sms else None
    if measured is not None:
        return plan_of(measured, sizes)
    costs = tuned().costs.attention
    split = AttentionConfiguration(SPLITS, kv_splits(*sizes))
    others = [form for form in candidates(sizes) if form.form != SPLITS]
    best = min((split, *others), key=lambda form: estimated_cycles(form, sizes, costs))
    return plan_of(best, sizes)


class Sizes(NamedTuple):
    """Arguments of ``attention_plan``."""

    tokens: int
    heads: int
    widths: tuple[int, int]
    sms: int


def candidates(sizes: Sizes) -> Iterator[AttentionConfiguration]:
    """Return every form that can attend, but for ``NarrowKernel``."""
    tokens, heads, widths, sms = sizes
    tiles = tokens * head_tiles(heads)
    most = max(1, min(MAX_SPLITS, _blocks(widths), 2 * sms // tiles))
    yield from (AttentionConfiguration(SPLITS, count) for count in range(1, most + 1))
    if 2 * tiles <= sms and _blocks(widths) > 1:  # all pairs run at the same time
        yield AttentionConfiguration(PAIRED, 2)
    for ctas in COLUMN_CLUSTERS:
        if ctas == 1 or _column_items(tokens, heads) <= _column_clusters(ctas, sms):
            yield AttentionConfiguration(COLUMNS, ctas)


def plan_of(form: AttentionConfiguration, sizes: Sizes) -> tuple[AttentionPlan | ColumnsPlan, int]:
    """Return the plan of a form, and the number of CTAs that share the entries of a tile."""
    if form.form == COLUMNS:
        return ColumnsPlan(form.count), form.count
    if form.form == PAIRED:
        return AttentionPlan(False, paired=True), 2
    return _unpaired_plan(form.count, *sizes), form.count


def fits(key: AttentionKey, form: AttentionConfiguration) -> bool:
    """Return whether a form can be chosen for a key on some GPU."""
    if key.tokens < 1 or key.heads < 1 or form.form not in (SPLITS, PAIRED, COLUMNS):
        return False
    widths = (key.window, key.compressed)
    if form.form == COLUMNS:
        return form.count in COLUMN_CLUSTERS
    if form.form == PAIRED:
        return form.count == 2 and _blocks(widths) > 1
    return form.count <= min(MAX_SPLITS, _blocks(widths))


def estimated_cycles(form: AttentionConfiguration, sizes: Sizes, costs: AttentionCosts) -> float:
    """Cycles of a form."""
    if form.form == COLUMNS:
        return _columns_cycles(form.count, sizes, costs)
    if form.form == PAIRED:
        blocks = -(-_blocks(sizes.widths) // 2)
        return _tile_cycles(sizes.heads, costs) + blocks * costs.block + costs.paired
    return _cycles(form.count, sizes, costs)


def narrow_plan(widths: tuple[int, int], clusters: Sequence[int]) -> NarrowPlan:
    """The configuration whose CTAs' steps take the least time.

    Of several that take the same time it is the largest cluster if that has 16 CTAs, else the
    smallest.

    Args:
        widths: Slots of a token in each cache.
        clusters: Cluster sizes, in CTAs, of which all clusters run at the same time.
    """

    def cost(plan: NarrowPlan) -> tuple[int, bool, int]:
        steps = -(-_steps(widths, plan.step) // plan.ctas)
        return steps * NARROW_STEPS[plan.step], plan.ctas != NARROW_CLUSTERS[-1], plan.ctas

    return min((NarrowPlan(c, step) for c in clusters for step in NARROW_STEPS), key=cost)


def _unpaired_plan(
    count: int, tokens: int, heads: int, widths: tuple[int, int], sms: int
) -> AttentionPlan:
    """The configuration for ``count`` KV splits whose CTAs exchange nothing."""
    persistent = count == 1 and tokens * head_tiles(heads) > sms
    return AttentionPlan(count > 1, dequant_warps=4 if persistent else 8)


def _columns_cycles(ctas: int, sizes: Sizes, costs: AttentionCosts) -> float:
    """Cycles of ``ColumnsKernel`` with clusters of ``ctas`` CTAs."""
    items, resident = _column_items(*sizes[:2]), _column_clusters(ctas, sizes.sms)
    fixed = costs.columns + costs.columns_cta * ctas
    item = fixed + -(-_blocks(sizes.widths) // ctas) * costs.columns_block
    return -(-items // resident) * item


def _column_items(tokens: int, heads: int) -> int:
    """Tiles of heads of ``ColumnsKernel``."""
    return tokens * -(-heads // ColumnsPlan.heads)


def _column_clusters(ctas: int, sms: int) -> int:
    """Clusters of ``ColumnsKernel`` that a GPU holds at a time.

    Larger clusters leave some SMs of a group (GPC) of 16 or 18 idle.
    """
    return max(1, sms // ctas if ctas < 4 else sms * 10 // 11 // ctas)


def is_narrow(tokens: int, heads: int, widths: tuple[int, int], sms: int = _NARROW_SMS) -> bool:
    """Return whether ``NarrowKernel`` takes less time than kernels of larger tiles.

    A GPU with fewer SMs than the measured ones holds fewer clusters.
    """
    clusters = tokens * -(-heads // NarrowPlan.heads) * _NARROW_SMS
    most = next((slots for count, slots in _NARROW_SLOTS.items() if clusters <= count * sms), -1)
    return sum(widths) <= most


def _steps(widths: tuple[int, int], step: int) -> int:
    """Steps of ``NarrowKernel`` for a token."""
    return sum(-(-width // step) for width in widths)


@cached
def kv_splits(tokens: int, heads: int, widths: tuple[int, int], sms: int) -> int:
    """The fastest number of KV splits of a token if ``MergeKernel`` adds their sums.

    Args:
        tokens: At least 1.
        heads: Heads of a token.
        widths: Slots of a token in each cache.
        sms: SMs of the GPU.
    """
    sizes, costs = Sizes(tokens, heads, widths, sms), tuned().costs.attention
    counts = [form.count for form in candidates(sizes) if form.form == SPLITS]
    return min(counts, key=lambda count: _cycles(count, sizes, costs))


def _cycles(count: int, sizes: Sizes, costs: AttentionCosts) -> float:
    """Cycles of ``AttentionKernel`` with ``count`` KV splits and of the merge launch."""
    tokens, heads, widths, sms = sizes
    tiles = tokens * head_tiles(heads)
    rounds = -(-tiles * count // sms)
    blocks = _blocks(widths)
    split_blocks = (1 - costs.mean) * -(-blocks // count) + costs.mean * blocks / count
    attention = rounds * (_tile_cycles(heads, costs) + split_blocks * costs.block)
    if count == 1:
        return attention
    stored = min(heads, HEADS)
    if 2 * tiles * count > sms:
        attention += costs.tpc * stored
    moved = PACKED_BYTES * stored * tiles * count / costs.bytes_per_cycle
    merge = costs.batch * -(-count // MERGE_BATCH)
    return attention + merge + (moved + costs.row * tokens * heads) / sms


def _tile_cycles(heads: int, costs: AttentionCosts) -> float:
    """Cycles of a tile of 64 heads beside its KV blocks; fewer heads have less to store."""
    return costs.tile + costs.head * min(heads, HEADS)


def scans_slots(count: int, widths: tuple[int, int]) -> bool:
    """Return whether a CTA of one of ``count`` KV splits looks for the token's last used slot.

    The scan takes microseconds where slots are many, and saves KV blocks without any entry.
    """
    return count == 1 or (sum(widths) > _FEW_SLOTS and _blocks(widths) > _FEW_BLOCKS * count)


def _blocks(widths: tuple[int, int]) -> int:
    """KV blocks of a token."""
    return max(1, sum(-(-width // BLOCK) for width in widths))


def head_tiles(heads: int) -> int:
    """Tiles of 64 heads of a token."""
    return -(-heads // HEADS)
