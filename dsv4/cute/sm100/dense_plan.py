"""Which configuration of the kernel in ``dense`` a product takes; needs no compiler.

And the numbers of that kernel: what lies where in shared and tensor memory, in which order tiles
follow one another, and how the instructions' descriptions are made.
"""

from __future__ import annotations

from dataclasses import dataclass

MOST_SHARED = 232448  # bytes of a block on compute capability 10.0 and 10.3
TENSOR_COLUMNS = 512
ROWS = 128  # of the weight in one block
STEP = 256  # columns of K in a stage: 128 bytes of codes, the widest swizzle
INSTRUCTION = 64  # columns of one instruction
ATOM = 512  # bytes of the scales of 128 rows and 64 columns
CHUNK = 32  # tokens whose results are turned at a time
TOKEN_BLOCKS = (64, 128, 192, 256)
EPILOGUE_WARPS = 4
MULTIPLY_WARP, COPY_WARP = 4, 5
_LINE_PAD = 16  # bytes between lines of results: lines then begin in different banks

# Of operands in shared memory (PTX: matrix descriptor). Groups of 8 rows follow each other by so
# many 16-byte units; the leading offset is not looked at, 1; bit 46 is this descriptor's version.
_VERSION, _LEADING = 1 << 46, 1 << 16
CODES_DESCRIPTOR = (2 << 61) | _VERSION | (64 << 32) | _LEADING  # swizzled in 128 bytes
SCALES_DESCRIPTOR = _VERSION | (8 << 32) | _LEADING  # rows of 16 bytes, one after another


def instruction(rows: int, tokens: int) -> int:
    """The description of ``kind::mxf4nvf4`` for E2M1 with UE4M3 scales, K-major, K = 64.

    Args:
        rows: M, 128 or 256.
        tokens: N, a multiple of 16.
    """
    e2m1 = 1
    return (e2m1 << 7) | (e2m1 << 10) | (tokens // 8 << 17) | (rows // 128 << 27)


@dataclass(frozen=True)
class DensePlan:
    """One configuration of the kernel.

    Attributes:
        token_block: Tokens of a tile: 64, 128, 192 or 256.
        blocks: Blocks that multiply one tile, of 128 rows each: 1 or 2, a cluster.
        float32_out: Whether the result is float32, else bfloat16.
        swiglu: Whether rows are gate and up in turn, and the result is their SwiGLU.
    """

    token_block: int
    blocks: int
    float32_out: bool
    swiglu: bool = False

    @property
    def kernel(self) -> str:
        """Where the kernel's class is."""
        return "dsv4.cute.sm100.dense:DenseKernel"

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return ROWS * self.blocks

    @property
    def threads(self) -> int:
        """Threads of a block: four warps of results, one that multiplies, one that copies."""
        return 32 * (EPILOGUE_WARPS + 2)

    @property
    def own_tokens(self) -> int:
        """Tokens of a tile whose codes a block holds."""
        return self.token_block // self.blocks

    @property
    def scale_tiles(self) -> int:
        """Tiles of 128 tokens whose scales a tile needs, wherever it begins."""
        return -(-self.token_block // ROWS)

    @property
    def shared_scales(self) -> bool:
        """Whether each block of the cluster copies a part of the tokens' scales for both."""
        return self.blocks == 2

    @property
    def scale_box(self) -> tuple[int, int]:
        """Tiles of 128 tokens and of 64 columns of scales in one copy."""
        if self.shared_scales:
            return (1, 4) if self.scale_tiles == 2 else (1, 2)
        return self.scale_tiles, 4

    @property
    def row_code_bytes(self) -> int:
        """Bytes of a stage: codes of a block's rows."""
        return ROWS * STEP // 2

    @property
    def row_scale_bytes(self) -> int:
        """Bytes of a stage: scales of a block's rows."""
        return 4 * ATOM

    @property
    def token_code_bytes(self) -> int:
        """Bytes of a stage: codes of a block's tokens."""
        return self.own_tokens * STEP // 2

    @property
    def token_scale_bytes(self) -> int:
        """Bytes of a stage: scales of the tile's tokens."""
        return self.scale_tiles * 4 * ATOM

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage."""
        codes = self.row_code_bytes + self.token_code_bytes
        return codes + self.row_scale_bytes + self.token_scale_bytes

    @property
    def tile_outputs(self) -> int:
        """Results of a token in 16 rows."""
        return 8 if self.swiglu else 16

    @property
    def line(self) -> int:
        """Bytes from one token's results to the next where they are turned."""
        return 2 * self.tile_outputs * ROWS // 16 + _LINE_PAD

    @property
    def turned_bytes(self) -> int:
        """Room in which results are turned."""
        return 0 if self.float32_out else CHUNK * self.line

    @property
    def barriers(self) -> int:
        """Barriers of a block."""
        return 2 * self.stages + 2 * self.sum_stages

    @property
    def stages(self) -> int:
        """Stages of operands."""
        spare = 1024 + 512 + self.turned_bytes
        return (MOST_SHARED - spare) // self.stage_bytes

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block; 1024 to begin at a multiple of it."""
        return 1024 + self.stages * self.stage_bytes + self.turned_bytes + 8 * self.barriers + 16

    @property
    def scale_columns(self) -> int:
        """Columns of tensor memory: scales of a stage."""
        return 16 + 16 * self.scale_tiles

    @property
    def second_sums(self) -> int:
        """Column of the second accumulator; the first is at 0."""
        return min(self.token_block, TENSOR_COLUMNS - self.scale_columns - self.token_block)

    @property
    def overlap(self) -> int:
        """Columns that both accumulators share, at the end of the first: where 512 do not do."""
        return self.token_block - self.second_sums

    @property
    def sum_stages(self) -> int:
        """Accumulators that are waited for apart; with an overlap, one stands for both."""
        return 1 if self.overlap else 2

    @property
    def row_scale_column(self) -> int:
        """Column of the rows' scales."""
        return self.second_sums + self.token_block

    @property
    def token_scale_column(self) -> int:
        """Column of the tokens' scales."""
        return self.row_scale_column + 16

    @property
    def tensor_columns(self) -> int:
        """Columns of tensor memory that are allocated: a power of two."""
        used = self.token_scale_column + 16 * self.scale_tiles
        return 1 << (used - 1).bit_length()

    @property
    def chunks(self) -> int:
        """Parts of a tile's tokens whose results are stored one after another."""
        return self.token_block // CHUNK

    @property
    def early_chunks(self) -> int:
        """Chunks that are loaded before the next tile's product may begin."""
        return -(-self.overlap // CHUNK) if self.overlap else self.chunks

    @property
    def instruction(self) -> int:
        """The description of the product's instruction."""
        return instruction(self.rows, self.token_block)
