"""Records of data files of plans: what was measured of a GPU, and the rule for other GPUs.

A family is a kind of kernel whose plans are chosen together. It has constants (``costs``) and, for
sizes that were measured, the fastest plan.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dsv4.cute.sm90.costs import Costs
from dsv4.device import Gpu

CLUSTERS = (1, 2, 3, 4, 6, 8)  # CTAs of a cluster of the GEMMs
RULE, SHIPPED, TUNED = "rule", "shipped", "tuned"


@dataclass(frozen=True)
class SmallMKey:
    """A matrix and a number of tokens of the small-M GEMM.

    Attributes:
        token_tiles: Tiles of 8 tokens, 1 or 2.
        row_tiles: N / 16, all groups.
        group_tiles: Row tiles that share an input.
        columns: K.
    """

    token_tiles: int
    row_tiles: int
    group_tiles: int
    columns: int


@dataclass(frozen=True)
class SmallMConfiguration:
    """A configuration of the small-M GEMM, measured with bfloat16 results.

    Attributes:
        ctas: CTAs of a cluster.
        warps: Warps of a CTA.
        stages: Weight tiles that a lane has prefetched.
        rounds: Sets of registers for them.
        ring: Whether it is of the kernel with rings in shared memory.
    """

    ctas: int
    warps: int
    stages: int
    rounds: int
    ring: bool


@dataclass(frozen=True)
class WgmmaKey:
    """A large-M GEMM with NVFP4 weights.

    Attributes:
        rows: N, all groups.
        groups: Groups of rows with an input each.
        columns: K.
        tokens: M, as ``plans.counted_as`` gives it.
    """

    rows: int
    groups: int
    columns: int
    tokens: int


@dataclass(frozen=True)
class WgmmaConfiguration:
    """Fields of a ``WgmmaPlan`` with bfloat16 results and tokens without scales.

    Attributes:
        token_block: See ``WgmmaPlan``, as for what follows.
        warpgroups: See there.
        ctas: See there.
        stage_k_blocks: See there.
        warp_tiles: See there.
    """

    token_block: int
    warpgroups: int
    ctas: int
    stage_k_blocks: int
    warp_tiles: int


@dataclass(frozen=True)
class Fp8WgmmaKey:
    """A GEMM with FP8 weights in bfloat16.

    Attributes:
        rows: N, all groups.
        groups: Groups of rows with an input each.
        columns: K.
        tokens: M, as ``plans.counted_as`` gives it.
        folded: Whether scales are E8M0.
    """

    rows: int
    groups: int
    columns: int
    tokens: int
    folded: bool


@dataclass(frozen=True)
class Fp8WgmmaConfiguration:
    """Fields of an ``Fp8WgmmaPlan`` with bfloat16 results.

    Attributes:
        token_block: See ``Fp8WgmmaPlan``, as for what follows.
        warpgroups: See there.
        ctas: See there.
        ctas_per_sm: See there.
    """

    token_block: int
    warpgroups: int
    ctas: int
    ctas_per_sm: int


@dataclass(frozen=True)
class SmallMFp8Key:
    """A small-M GEMM with FP8 weights.

    Attributes:
        rows: N, all groups.
        groups: Groups of rows with an input each.
        columns: K.
        token_tiles: Tiles of 8 tokens: 1, 2 or 4.
    """

    rows: int
    groups: int
    columns: int
    token_tiles: int


@dataclass(frozen=True)
class SmallMFp8Configuration:
    """Fields of a ``SmallMFp8Plan`` with bfloat16 results.

    Attributes:
        ctas: See ``SmallMFp8Plan``, as for what follows.
        warps: See there.
        stages: See there.
        l2_bytes: See there.
    """

    ctas: int
    warps: int
    stages: int
    l2_bytes: int


@dataclass(frozen=True)
class E4m3Key:
    """A GEMM with FP8 arithmetic.

    Attributes:
        rows: N, all groups.
        columns: K.
        tokens: M, a multiple of 128: a plan is for the tokens up to it.
        is_block: Whether the weight is FP8, else NVFP4.
    """

    rows: int
    columns: int
    tokens: int
    is_block: bool


@dataclass(frozen=True)
class E4m3Configuration:
    """A form of such a GEMM.

    Attributes:
        token_rows: Blocks of 128 tokens of a tile, 1 or 2.
        converted: Whether the weight is converted first.
    """

    token_rows: int
    converted: bool


@dataclass(frozen=True)
class AttentionKey:
    """Sparse attention, but for few tokens.

    Attributes:
        tokens: Number of tokens.
        heads: Heads of a token.
        window: Slots of a token in the window's cache.
        compressed: Slots of a token in the compressed cache.
    """

    tokens: int
    heads: int
    window: int
    compressed: int


@dataclass(frozen=True)
class AttentionConfiguration:
    """A form of sparse attention.

    Attributes:
        form: ``"splits"``, ``"paired"`` or ``"columns"``.
        count: KV splits of a token, or CTAs of a cluster.
    """

    form: str
    count: int


Key = SmallMKey | WgmmaKey | Fp8WgmmaKey | SmallMFp8Key | E4m3Key | AttentionKey
Configuration = (
    SmallMConfiguration
    | WgmmaConfiguration
    | Fp8WgmmaConfiguration
    | SmallMFp8Configuration
    | E4m3Configuration
    | AttentionConfiguration
)


@dataclass(frozen=True)
class Entry:
    """The fastest plan that was measured for a key.

    Attributes:
        plan: The plan.
        us: Its microseconds; None in files from before times were kept.
        rule_us: Microseconds of the plan that the rule gives, in the same run.
    """

    plan: Configuration
    us: float | None = None
    rule_us: float | None = None

    def times(self) -> dict[str, float | None]:
        """Return both times by name."""
        return {"us": self.us, "rule_us": self.rule_us}


@dataclass(frozen=True)
class Origin:
    """The source of a family's plans.

    Attributes:
        kind: ``"rule"``, ``"shipped"`` (a file of the package) or ``"tuned"`` (the user's file).
        words: What else a user should know of it.
        date: Date of the measurement; empty for the rule.
    """

    kind: str
    words: str
    date: str = ""

    def __str__(self) -> str:
        kind = "tuned on this machine" if self.kind == TUNED else self.kind
        return f"{kind}, {self.words}"


@dataclass(frozen=True)
class Residual:
    """Errors of a cost model, as shares of the measured times.

    Attributes:
        points: Measured times.
        mean: Root of the mean square.
        worst: Largest one.
    """

    points: int
    mean: float
    worst: float


@dataclass(frozen=True)
class TunedData:
    """The facts of a GPU that plans are chosen by.

    Attributes:
        gpu: Name of the GPU that was measured.
        date: Date of the measurement.
        versions: Version of each package.
        source: How the figures were measured.
        sms: SMs of the GPU.
        bandwidth: Terabytes per second of its memory; None if nobody knows.
        clusters: Number of clusters that the GPU holds at a time, by CTAs of a cluster.
        costs: Constants of the cost models.
        entries: Plans that were measured.
        residuals: Errors of the constants that were fitted, by family.
        families: Names of the families that the file is about.
        origins: Where the plans of a family are from, by its name.
    """

    gpu: str
    date: str
    versions: Mapping[str, str]
    source: str
    sms: int
    bandwidth: float | None
    clusters: Mapping[int, int]
    costs: Costs
    entries: Mapping[Key, Entry]
    residuals: Mapping[str, Residual]
    families: tuple[str, ...]
    origins: Mapping[str, Origin]

    @property
    def digest(self) -> str:
        """SHA-256 of all that choices depend on."""
        entries = sorted((repr(key), repr(entry.plan)) for key, entry in self.entries.items())
        made_from = (self.sms, sorted(self.clusters.items()), self.costs, entries)
        return hashlib.sha256(repr(made_from).encode()).hexdigest()

    def plan_of(self, key: Key) -> Any:
        """Return the measured plan of a key, of the key's kind, or None."""
        entry = self.entries.get(key)
        return None if entry is None else entry.plan


def by_rule(base: TunedData, gpu: Gpu) -> TunedData:
    """Return the figures for a GPU that was not measured, from its SMs and its bandwidth.

    A GPU with as many SMs as the measured one takes its figures as they are: an H100, which has
    less bandwidth, was measured with those of an H200. For any other, no plan was measured;
    thresholds and clusters are scaled by the number of SMs, and the time of a byte from memory on
    an SM by the SMs that share the bandwidth.
    """
    if gpu.sms == base.sms:
        words = f"{gpu.sms} SMs as {base.gpu}, whose figures are taken"
        origins = dict.fromkeys(base.origins, Origin(RULE, words))
        bandwidth = gpu.bandwidth or base.bandwidth
        return replace(base, gpu=gpu.name, bandwidth=bandwidth, families=(), origins=origins)
    share, relative = gpu.sms / base.sms, 1.0
    if gpu.bandwidth and base.bandwidth:
        relative = share * base.bandwidth / gpu.bandwidth
    small = base.costs.gemm_small_m
    grouped = base.costs.grouped_gemm
    of_fp8 = base.costs.gemm_fp8_small_m
    enough = int(small.enough_warps * share)
    costs = replace(
        base.costs,
        gemm_small_m=replace(small, enough_warps=enough),
        grouped_gemm=replace(grouped, memory=grouped.memory * relative),
        gemm_fp8_small_m=of_fp8._replace(rate=of_fp8.rate * share / relative),
    )
    clusters = {ctas: max(1, int(count * share)) for ctas, count in base.clusters.items()}
    of_memory = f"{gpu.bandwidth:.1f} TB/s" if gpu.bandwidth else "unknown bandwidth"
    words = f"from {gpu.sms} SMs and {of_memory}, constants of {base.gpu}"
    return replace(
        base,
        gpu=gpu.name,
        sms=gpu.sms,
        bandwidth=gpu.bandwidth or base.bandwidth,
        clusters=clusters,
        costs=costs,
        entries={},
        residuals={},
        families=(),
        origins=dict.fromkeys(base.origins, Origin(RULE, words)),
    )


def merged(before: TunedData, now: TunedData, of_key: Mapping[type, str]) -> TunedData:
    """Return the content of a user's file after a run: its families replace those before.

    Args:
        before: Content of the file.
        now: What the run measured, on the same GPU.
        of_key: Family of each kind of key.
    """
    unchanged = tuple(name for name in before.families if name not in now.families)
    costs = {name: getattr(before.costs, name) for name in unchanged}
    entries = {k: e for k, e in before.entries.items() if of_key[type(k)] in unchanged}
    return replace(
        now,
        costs=replace(now.costs, **costs),
        entries={**entries, **now.entries},
        residuals={
            **{n: r for n, r in before.residuals.items() if n in unchanged},
            **now.residuals,
        },
        families=(*unchanged, *now.families),
        origins={**{name: before.origins[name] for name in unchanged}, **now.origins},
    )


def combined(below: TunedData, above: TunedData, of_key: Mapping[type, str]) -> TunedData:
    """Return figures in which the families of one file replace those of what has less weight.

    Args:
        below: A shipped file, or the rule.
        above: The user's file, of the same GPU.
        of_key: Family of each kind of key.
    """
    replaced = {name: getattr(above.costs, name) for name in above.families}
    old = below.entries.items()
    unchanged = {key: e for key, e in old if of_key[type(key)] not in above.families}
    own = {name: above.origins[name] for name in above.families}
    return replace(
        below,
        clusters=above.clusters,
        bandwidth=above.bandwidth or below.bandwidth,
        costs=replace(below.costs, **replaced),
        entries={**unchanged, **above.entries},
        residuals={**below.residuals, **above.residuals},
        origins={**below.origins, **own},
    )
