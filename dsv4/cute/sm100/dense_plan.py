"""Which configuration of the kernel in ``dense`` a product takes; needs no compiler.

And the numbers of that kernel: what lies where in shared and tensor memory, in which order tiles
follow one another, and how the instructions' descriptions are made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

MOST_SHARED = 232448  # bytes of a block on compute capability 10.0 and 10.3
TENSOR_COLUMNS = 512
ROWS = 128  # of the weight in one block
STEP = 256  # columns of K in a stage: 128 bytes of codes, the widest swizzle
INSTRUCTION = 64  # columns of one instruction
ATOM = 512  # bytes of the scales of 128 rows and 64 columns
CHUNK = 32  # tokens whose results are turned at a time
TOKEN_BLOCKS = (64, 128, 192, 256)
PARTS = (2, 4, 8)
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


class Box(NamedTuple):
    """An operand in memory, and how much of it one tensor copy moves; the innermost axis first.

    Attributes:
        item_bytes: Bytes of an element.
        sizes: Elements of each axis; what lies beyond is read as zeros.
        strides: Bytes between elements of each axis but the innermost.
        box: Elements of a copy, which lie in shared memory one after another.
        swizzled: Whether 16-byte pieces of 128-byte rows are exchanged there.
    """

    item_bytes: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzled: bool


def code_box(rows: int, columns: int, copied: int) -> Box:
    """Codes ``[rows, columns / 2]``, ``copied`` rows of a stage at a time."""
    return Box(1, (columns // 2, rows), (columns // 2,), (STEP // 2, copied), True)


def scale_box(tiles: int, columns: int, copied: tuple[int, int]) -> Box:
    """Swizzled scales of ``tiles`` times 128 rows, so many tiles of rows and columns at a time.

    Of words of 16 bits, because a copy takes at most 256 of an axis and a tile has 512 bytes.
    """
    blocks = -(-columns // INSTRUCTION)
    high, wide = copied
    strides = (ATOM, blocks * ATOM)
    return Box(2, (ATOM // 2, blocks, tiles), strides, (ATOM // 2, wide, high), False)


@dataclass(frozen=True)
class DensePlan:
    """One configuration of the kernel.

    Attributes:
        token_block: Tokens of a tile: 64, 128, 192 or 256.
        blocks: Blocks of a cluster: 1, 2 that multiply one tile of 128 rows each, or ``parts``.
        float32_out: Whether the result is float32, else bfloat16.
        swiglu: Whether rows are gate and up in turn, and the result is their SwiGLU.
        parts: Blocks that share K, for one tile of 64 tokens: 1, 2, 4 or 8.
    """

    token_block: int
    blocks: int
    float32_out: bool
    swiglu: bool = False
    parts: int = 1

    @property
    def kernel(self) -> str:
        """Where the kernel's class is."""
        return "dsv4.cute.sm100.dense:DenseKernel"

    @property
    def pair(self) -> int:
        """Blocks that one instruction works in."""
        return self.blocks // self.parts

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return ROWS * self.pair

    @property
    def threads(self) -> int:
        """Threads of a block: four warps of results, one that multiplies, one that copies."""
        return 32 * (EPILOGUE_WARPS + 2)

    @property
    def own_tokens(self) -> int:
        """Tokens of a tile whose codes a block holds."""
        return self.token_block // self.pair

    @property
    def scale_tiles(self) -> int:
        """Tiles of 128 tokens whose scales a tile needs, wherever it begins."""
        return -(-self.token_block // ROWS)

    @property
    def shared_scales(self) -> bool:
        """Whether each block of the cluster copies a part of the tokens' scales for both."""
        return self.pair == 2

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
    def full_arrivals(self) -> int:
        """Arrivals that fill a stage, beside its bytes."""
        return 1

    @property
    def copied_bytes(self) -> int:
        """Bytes of a stage that tensor copies bring."""
        return self.stage_bytes

    @property
    def table_bytes(self) -> int:
        """Room for what is known of the tiles: nothing."""
        return 0

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
        spare = 1024 + 512 + self.turned_bytes + self.table_bytes
        return (MOST_SHARED - spare) // self.stage_bytes

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block; 1024 to begin at a multiple of it."""
        rooms = self.stages * self.stage_bytes + self.turned_bytes + self.table_bytes
        return 1024 + rooms + 8 * self.barriers + 16

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
    def own_tiles(self) -> int:
        """Tiles of 8 tokens that a block of those which share K stores."""
        return self.token_block // 8 // self.parts

    @property
    def early_chunks(self) -> int:
        """Chunks that are loaded before the next tile's product may begin."""
        return -(-self.overlap // CHUNK) if self.overlap else self.chunks

    @property
    def instruction(self) -> int:
        """The description of the product's instruction."""
        return instruction(self.rows, self.token_block)

    def steps(self, columns: int) -> int:
        """Stages of a tile: K / 256, rounded up."""
        return -(-columns // STEP)

    def boxes(self, rows: int, columns: int, tokens: int, groups: int) -> tuple[Box, Box, Box, Box]:
        """Codes and scales of the weight, codes and scales of the tokens."""
        scale_tiles = groups * -(-tokens // ROWS)
        return (
            code_box(rows, columns, ROWS),
            scale_box(-(-rows // ROWS), columns, (1, 4)),
            code_box(groups * tokens, columns, self.own_tokens),
            scale_box(scale_tiles, columns, self.scale_box),
        )

    # What follows is arithmetic on Python's numbers as well as on a kernel's.

    def share(self, steps: Any, part: Any) -> tuple[Any, Any]:
        """First stage of a block's part of K, and that after its last."""
        return part * steps // self.parts, (part + 1) * steps // self.parts

    def row_place(self, row_block: Any, rank: Any, k: Any) -> tuple[Any, Any]:
        """Where a stage of the block's rows begins: row and byte of codes, tiles of scales."""
        tile = row_block * self.pair + rank
        return (tile * ROWS, k * (STEP // 2)), (tile, k * 4)

    def token_place(
        self, token: Any, group: Any, tokens: Any, rank: Any, k: Any
    ) -> tuple[Any, Any]:
        """The same of what the block copies of the tile that begins with ``token``.

        Each group's tokens have scales that begin at a multiple of 128 rows. Where both blocks
        share them, each copies a part: one of two tiles of rows, or half of the columns of one.
        """
        row = group * tokens + token + rank * self.own_tokens
        tile = group * ((tokens + ROWS - 1) // ROWS) + token // ROWS
        high, wide = self.scale_box
        block = k * 4 + rank * (4 - wide)
        if self.shared_scales:
            tile += rank * (self.scale_tiles - high)
        return (row, k * (STEP // 2)), (tile, block)

    def token_scale_offset(self, rank: Any) -> Any:
        """Bytes of the tile's scales in a stage before the part that the block copies."""
        return rank * (self.token_scale_bytes // 2) if self.shared_scales else 0

    def first_column(self, count: Any) -> Any:
        """Column of the ``count``-th tile's sums."""
        return count % 2 * self.second_sums

    def sums(self, count: Any) -> tuple[Any, Any]:
        """Which barrier of sums is the ``count``-th tile's, and the parity of its end."""
        return count % self.sum_stages, count // self.sum_stages % 2

    def scale_shift(self, token_tile: Any) -> Any:
        """Columns from the first scales of a tile of 128 tokens to those of the tile's first."""
        return token_tile * self.token_block % ROWS // 32

    def chunk(self, i: Any, count: Any) -> Any:
        """Which chunk of the ``count``-th tile is the ``i``-th: first what both sums share."""
        return i + (1 - count % 2) * (self.chunks - 1 - 2 * i) if self.overlap else i
