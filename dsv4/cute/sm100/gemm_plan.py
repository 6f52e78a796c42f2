"""Arguments and configurations of the ``tcgen05`` NVFP4 GEMM in ``gemm``; needs no compiler.

A configuration determines what lies where in shared memory and tensor memory (TMEM). The methods at
the end of ``Tcgen05Plan`` are the kernel's index arithmetic: they take Python numbers in tests and
DSL values in device code.

No constant here was chosen by a measurement: the project has no GPU of compute capability 10.x.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from dsv4.cute.runtime.kernel_abi import Float32, Int32, KernelAbi, Pointer, TmaDescriptor
from dsv4.cute.sm100.mma_descriptors import instruction_descriptor
from dsv4.cute.sm100.tensor_maps import SCALE_TILE_BYTES, STAGE_K, Box, code_box, scale_box

SHARED_LIMIT = 232448  # bytes of shared memory of a CTA on compute capability 10.0 and 10.3
TMEM_COLUMNS = 512  # of 128 lanes and 32 bits each, of an SM
ROWS = 128  # of the weight in one CTA: the M of ``tcgen05.mma`` with one CTA
# Tokens that the epilogue loads from TMEM and stores at a time: a lane then has 32 accumulators.
CHUNK_TOKENS = 32
TOKEN_BLOCKS = (64, 128, 192, 256)
K_SPLITS = (2, 4, 8)
EPILOGUE_WARPS = 4  # each reads the 32 TMEM lanes that the hardware lets it read
MMA_WARP, COPY_WARP = 4, 5
_LINE_PADDING = 16  # bytes after a token's results: lines then begin in different banks
_ALIGNMENT = 1024  # of a stage: the period of the 128-byte swizzle
# Shared memory that is left free for mbarriers, the address of TMEM and gaps of alignment.
_SPARE_BYTES = _ALIGNMENT + 512


class Tcgen05Tma(NamedTuple):
    """The TMA copies of the operands; these parameters come first.

    In device code each is a ``gemm_pipeline.TmaOperand``: the copy atom and the operand's tensor,
    whose sizes are no parameters, because only the tensor map has them.

    Attributes:
        row_codes: Codes of the weight, ``[rows, K / 2]``.
        row_scales: Block scales of the weight, ``[rows / 128, K / 64, 512 bytes]``.
        token_codes: Codes of the tokens, ``[groups tokens, K / 2]``.
        token_scales: Block scales of the tokens; each group begins at a multiple of 128 tokens.
    """

    row_codes: TmaDescriptor
    row_scales: TmaDescriptor
    token_codes: TmaDescriptor
    token_scales: TmaDescriptor


class Tcgen05Args(NamedTuple):
    """Arguments of the GEMM.

    Attributes:
        global_scale: float32 global scales of the weight: one, one per segment, or one per row.
        token_scale: float32 global scales of the tokens, ``[groups, tokens]``, or one.
        out: ``[tokens, rows]``, or half as many columns after SwiGLU; bfloat16 or float32.
        tokens: At least 1.
        token_tiles: Tiles of ``token_block`` tokens.
        token_span: Token tiles that follow one another before the next block of rows does.
        k_stages: K / 256, rounded up.
        rows: Rows of the weight, a multiple of 16.
        row_blocks: Rows of the weight / rows of a tile, rounded up.
        group_blocks: Blocks of rows that share an input.
        cut0: First row of the second segment, which has a global scale of its own.
        cut1: First row of the third segment.
        cut2: First row of the fourth segment.
        scale_rows: 1 if every row has a global scale of its own, else 0.
        scale_tokens: 1 if every token has a global scale of its own, else 0.
        limit: Clamp of SwiGLU; infinity for none.
    """

    global_scale: Pointer
    token_scale: Pointer
    out: Pointer
    tokens: Int32
    token_tiles: Int32
    token_span: Int32
    k_stages: Int32
    rows: Int32
    row_blocks: Int32
    group_blocks: Int32
    cut0: Int32
    cut1: Int32
    cut2: Int32
    scale_rows: Int32
    scale_tokens: Int32
    limit: Float32


TCGEN05_ABI = KernelAbi(Tcgen05Tma, Tcgen05Args)


class OperandTile(NamedTuple):
    """Coordinates at which the TMA copies of a stage begin.

    Attributes:
        codes: Row, and byte of the row.
        scales: Tile of 128 rows, and tile of 64 columns.
    """

    codes: tuple[Any, Any]
    scales: tuple[Any, Any]


@dataclass(frozen=True)
class Tcgen05Plan:
    """One configuration of the kernel in ``gemm``.

    Attributes:
        token_block: Tokens of a tile: 64, 128, 192 or 256.
        ctas: CTAs of a cluster: 1, or 2 that compute one tile of 256 rows by common MMAs, or
            ``k_splits``.
        float32_out: Whether the result is float32, else bfloat16.
        swiglu: Whether rows are interleaved gate and up, and the result is their SwiGLU.
        k_splits: CTAs that share the K of one tile of 64 tokens: 1 (none), 2, 4 or 8.
    """

    token_block: int
    ctas: int
    float32_out: bool
    swiglu: bool = False
    k_splits: int = 1

    @property
    def kernel(self) -> str:
        """The kernel's class, as ``module:class``."""
        return "dsv4.cute.sm100.gemm:Tcgen05Kernel"

    @property
    def cta_group(self) -> int:
        """CTAs whose shared memory and TMEM one instruction works on: 1 or 2."""
        return self.ctas // self.k_splits

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return ROWS * self.cta_group

    @property
    def threads(self) -> int:
        """Threads of a CTA: four epilogue warps, the MMA warp and the copy warp."""
        return 32 * (EPILOGUE_WARPS + 2)

    # Stages of operands in shared memory.

    @property
    def cta_tokens(self) -> int:
        """Tokens of a tile whose codes a CTA holds."""
        return self.token_block // self.cta_group

    @property
    def scale_tiles(self) -> int:
        """Tiles of 128 tokens whose scales a tile needs, wherever it begins."""
        return -(-self.token_block // ROWS)

    @property
    def multicasts_scales(self) -> bool:
        """Return whether each of two CTAs copies half of the tokens' scales into both."""
        return self.cta_group == 2

    @property
    def token_scale_box(self) -> tuple[int, int]:
        """Tiles of 128 tokens and of 64 columns of one TMA copy of the tokens' scales."""
        if self.multicasts_scales:
            return (1, 4) if self.scale_tiles == 2 else (1, 2)
        return self.scale_tiles, 4

    @property
    def row_code_bytes(self) -> int:
        """Bytes of a stage: codes of a CTA's rows."""
        return ROWS * STAGE_K // 2

    @property
    def row_scale_bytes(self) -> int:
        """Bytes of a stage: scales of a CTA's rows."""
        return 4 * SCALE_TILE_BYTES

    @property
    def token_code_bytes(self) -> int:
        """Bytes of a stage: codes of a CTA's tokens."""
        return self.cta_tokens * STAGE_K // 2

    @property
    def token_scale_bytes(self) -> int:
        """Bytes of a stage: scales of the tile's tokens."""
        return self.scale_tiles * 4 * SCALE_TILE_BYTES

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage."""
        codes = self.row_code_bytes + self.token_code_bytes
        return codes + self.row_scale_bytes + self.token_scale_bytes

    @property
    def full_arrivals(self) -> int:
        """Arrivals that fill a stage, beside its bytes."""
        return 1

    @property
    def tma_bytes(self) -> int:
        """Bytes of a stage that TMA copies bring to a CTA."""
        return self.stage_bytes

    @property
    def stages(self) -> int:
        """Stages of operands: as many as fit."""
        other = _SPARE_BYTES + self.epilogue_bytes + self.table_bytes
        return (SHARED_LIMIT - other) // self.stage_bytes

    @property
    def barriers(self) -> int:
        """mbarriers of a CTA: two of each stage, two of each accumulator stage."""
        return 2 * self.stages + 2 * self.accumulator_stages

    @property
    def table_bytes(self) -> int:
        """Bytes of a table of the experts' tiles: none."""
        return 0

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a CTA."""
        buffers = self.stages * self.stage_bytes + self.epilogue_bytes + self.table_bytes
        return _ALIGNMENT + buffers + 8 * self.barriers + 16  # 16: the address of TMEM

    # The epilogue.

    @property
    def tile_outputs(self) -> int:
        """Results of a token in 16 rows."""
        return 8 if self.swiglu else 16

    @property
    def line_bytes(self) -> int:
        """Bytes from a token's line to the next in the transpose buffer: an odd multiple of 16."""
        return 2 * self.tile_outputs * ROWS // 16 + _LINE_PADDING

    @property
    def epilogue_bytes(self) -> int:
        """Bytes of the transpose buffer: bfloat16 results of a chunk of tokens."""
        return 0 if self.float32_out else CHUNK_TOKENS * self.line_bytes

    @property
    def chunks(self) -> int:
        """Chunks of ``CHUNK_TOKENS`` tokens of a tile."""
        return self.token_block // CHUNK_TOKENS

    @property
    def early_chunks(self) -> int:
        """Chunks that are loaded before the MMAs of the next tile but one may begin.

        Of overlapping accumulators: before those of the next tile.
        """
        return -(-self.overlap // CHUNK_TOKENS) if self.overlap else self.chunks

    @property
    def split_tiles(self) -> int:
        """Tiles of 8 tokens that a CTA of those that share K reduces and stores."""
        return self.token_block // 8 // self.k_splits

    # Tensor memory: two accumulators, then scales of a stage's rows and of its tokens.

    @property
    def scale_columns(self) -> int:
        """TMEM columns of the scales of a stage."""
        return 16 + 16 * self.scale_tiles

    @property
    def second_accumulator(self) -> int:
        """TMEM column of the second accumulator; the first is at 0."""
        return min(self.token_block, TMEM_COLUMNS - self.scale_columns - self.token_block)

    @property
    def overlap(self) -> int:
        """TMEM columns at the end of the first accumulator that the second one has, too.

        Two accumulators of 256 tokens and scales need more than 512 columns: they share 48.
        """
        return self.token_block - self.second_accumulator

    @property
    def accumulator_stages(self) -> int:
        """Pairs of mbarriers of accumulators: one for both if they overlap."""
        return 1 if self.overlap else 2

    @property
    def row_scale_column(self) -> int:
        """TMEM column of the rows' scales."""
        return self.second_accumulator + self.token_block

    @property
    def token_scale_column(self) -> int:
        """TMEM column of the tokens' scales."""
        return self.row_scale_column + 16

    @property
    def tmem_columns(self) -> int:
        """TMEM columns that a CTA allocates: a power of two."""
        used = self.token_scale_column + 16 * self.scale_tiles
        return 1 << (used - 1).bit_length()

    @property
    def instruction_descriptor(self) -> int:
        """Descriptor of the MMA instruction."""
        return instruction_descriptor(self.rows, self.token_block)

    # The launch.

    def k_stages(self, columns: int) -> int:
        """Stages of a tile: K / 256, rounded up."""
        return -(-columns // STAGE_K)

    def boxes(self, rows: int, columns: int, tokens: int, groups: int) -> tuple[Box, Box, Box, Box]:
        """Return what the TMA copies read, in the order of ``Tcgen05Tma``."""
        token_tiles = groups * -(-tokens // ROWS)
        return (
            code_box(rows, columns, ROWS),
            scale_box(-(-rows // ROWS), columns, (1, 4)),
            code_box(groups * tokens, columns, self.cta_tokens),
            scale_box(token_tiles, columns, self.token_scale_box),
        )

    # Index arithmetic of the kernel, on Python numbers or DSL values.

    def k_range(self, stages: Any, split: Any) -> tuple[Any, Any]:
        """First stage of a CTA's part of K, and that after its last."""
        return split * stages // self.k_splits, (split + 1) * stages // self.k_splits

    def row_tile(self, row_block: Any, rank: Any, k: Any) -> OperandTile:
        """Return where stage ``k`` of a CTA's rows begins."""
        tile = row_block * self.cta_group + rank
        return OperandTile((tile * ROWS, k * (STAGE_K // 2)), (tile, k * 4))

    def token_tile(self, token: Any, group: Any, tokens: Any, rank: Any, k: Any) -> OperandTile:
        """Return where stage ``k`` of the tile that begins with ``token`` begins, for a CTA.

        Each group's tokens have scales that begin at a multiple of 128 tokens. Where both CTAs
        share scales, each copies half: one of two tiles of 128 tokens, or half of the columns of
        one.
        """
        row = group * tokens + token + rank * self.cta_tokens
        tile = group * ((tokens + ROWS - 1) // ROWS) + token // ROWS
        copied_tiles, copied_k_tiles = self.token_scale_box
        k_tile = k * 4 + rank * (4 - copied_k_tiles)
        if self.multicasts_scales:
            tile += rank * (self.scale_tiles - copied_tiles)
        return OperandTile((row, k * (STAGE_K // 2)), (tile, k_tile))

    def token_scale_offset(self, rank: Any) -> Any:
        """Bytes from a stage's token scales to the half of them that a CTA copies."""
        return rank * (self.token_scale_bytes // 2) if self.multicasts_scales else 0

    def accumulator_column(self, count: Any) -> Any:
        """TMEM column of the accumulator of a cluster's ``count``-th tile."""
        return count % 2 * self.second_accumulator

    def accumulator_phase(self, count: Any) -> tuple[Any, Any]:
        """Accumulator stage of a cluster's ``count``-th tile, and the parity of its phase."""
        return count % self.accumulator_stages, count // self.accumulator_stages % 2

    def scale_shift(self, token_tile: Any) -> Any:
        """TMEM columns from the scales of 128 tokens to those of a tile's first token.

        Tiles of 64 and 192 tokens may begin in the middle of a tile of 128 tokens' scales.
        """
        return token_tile * self.token_block % ROWS // 32

    def chunk(self, i: Any, count: Any) -> Any:
        """Return which chunk of a cluster's ``count``-th tile is loaded as the ``i``-th.

        Of overlapping accumulators, first those with the columns that both have.
        """
        return i + (1 - count % 2) * (self.chunks - 1 - 2 * i) if self.overlap else i
