"""Which attention kernel takes which sequences, and in which tile sizes.

A sequence has `group * m` packed rows for each KV head: its `m` query rows times the query heads that share the head. On tensor
cores (16-bit queries, sm_80 and newer) sequences of few packed rows go to decode_mma.cu, where warps split keys, and those of more
to prefill.cu, where warps split rows; everything else goes to decode.cu on CUDA cores. The choice follows from the sequence alone, and
of the sizes only `rows` and a prefill's `warps` follow from its neighbours, which do not change a row's bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from .arrays import numpy_dtype
from .kernels import CUDA_TYPES
from .launcher import DeviceInfo

FEW_ROWS = 16  # packed rows up to which warps split keys
MANY = 2**31 - 1
_REGISTERS = 65536  # of a multiprocessor


@dataclass(frozen=True, slots=True)
class KernelConfig:
    """One specialisation of an attention kernel, except for what a single call decides."""

    kernel: str  # the function's name; its source is `kernel + ".cu"`
    rows: int  # packed query rows of a unit
    tile: int  # tokens that are attended to at once; edges of work items are multiples
    warps: int
    shared_bytes: int
    resident: int  # blocks that one multiprocessor holds
    takes: tuple[int, int]  # fewest and most packed rows of its sequences
    defines: tuple[tuple[str, int | str], ...]

    @property
    def threads(self) -> int:
        return 32 * self.warps

    def blocks(self, block_size: int) -> tuple[tuple[str, int], ...]:
        """What decode_mma.cu is told of the block size: it where it is a power of two, as tiles are, else 0, and how many tokens to find
        together then, as they lie in one block: 2 where a lane has two of a tile. Other kernels are told nothing."""
        if self.kernel != "decode_mma":
            return ()
        known = block_size if block_size & (block_size - 1) == 0 else 0
        return ("kBlock", known), ("kRun", 2 if self.tile > 32 and block_size % 2 == 0 else 1)


def on_tensor_cores(info: DeviceInfo, dtype: str) -> bool:
    return info.arch >= 80 and dtype in ("float16", "bfloat16")


@cache
def attention_kernels(
    info: DeviceInfo, head_dim: int, dtype: str, kv_dtype: str, group: int, few: int, most: int
) -> tuple[KernelConfig, ...]:
    """The kernels that sequences of up to `most` packed rows need; those of at most 16 have up to `few`, or not many more.

    Each sequence belongs to exactly one of them (`takes`).
    """
    if not on_tensor_cores(info, dtype):
        return (decode_config(info, head_dim, dtype, kv_dtype, rows_for(head_dim, most, 1)),)
    if group > FEW_ROWS:
        return (prefill_config(info, head_dim, dtype, kv_dtype, most, (0, MANY)),)
    rows = 8 if few <= 8 else 16
    if most <= FEW_ROWS:
        return (decode_mma_config(info, head_dim, dtype, kv_dtype, rows, (0, MANY)),)
    return (
        decode_mma_config(info, head_dim, dtype, kv_dtype, rows, (0, FEW_ROWS)),
        prefill_config(info, head_dim, dtype, kv_dtype, most, (FEW_ROWS + 1, MANY)),
    )


# ------------------------------------------------------------------------------------------------------------ CUDA cores


def most_rows(head_dim: int) -> int:
    """How many packed rows of float32 sums a warp of decode.cu keeps in registers: 64 values a lane."""
    return 8 if head_dim > 128 else 16


def rows_for(head_dim: int, group: int, num_queries: int) -> int:
    """Rows of a unit of decode.cu for sequences of at most `num_queries` query rows: a power of two."""
    return min(1 << max(group * num_queries - 1, 0).bit_length(), most_rows(head_dim))


@cache
def decode_config(info: DeviceInfo, head_dim: int, dtype: str, kv_dtype: str, rows: int) -> KernelConfig:
    """The constants of decode.cu and what they cost; decode.cu asserts `kSharedBytes`."""
    item = numpy_dtype(kv_dtype).itemsize
    tile, most = 32, 8192 if info.arch < 80 else 16384  # bytes of a tile; without cp.async they pass through registers
    while tile > 8 and 2 * tile * head_dim * item > most:
        tile //= 2
    warps = 4
    while warps > 1 and _decode_bytes(head_dim, item, most_rows(head_dim), tile, warps) > info.shared_per_block:
        warps //= 2
    shared = _decode_bytes(head_dim, item, rows, tile, warps)
    sums = rows * (-(-head_dim // 128) * 4 + 2)  # output, and the largest logit and sum of each row
    by_registers = 3 if sums <= 32 else 2  # as many as do without spilling
    resident = max(1, min(by_registers, info.shared_per_sm // (shared + 1024)))  # the system takes 1 KiB a block
    defines: dict[str, int | str] = {
        "kHeadDim": head_dim, "kQueryType": CUDA_TYPES[dtype], "kCacheType": CUDA_TYPES[kv_dtype],
        "kRows": rows, "kTokens": tile, "kWarps": warps, "kSharedBytes": shared, "kMinBlocks": resident,
    }  # fmt: skip
    return KernelConfig("decode", rows, tile, warps, shared, resident, (0, MANY), tuple(defines.items()))


def _decode_bytes(head_dim: int, item: int, rows: int, tile: int, warps: int) -> int:
    stage = max(2 * tile * _row_bytes(head_dim * item), rows * head_dim * 4)
    row_floats = rows if rows <= 2 else (rows // 4 | 1) * 4
    warp = stage + -(-tile * row_floats * 4 // 16) * 16
    fixed = rows * head_dim * 4 + rows * 16 + warps * (tile * 16 + rows * 8) + 16
    return -(-fixed // 128) * 128 + warps * warp


# ---------------------------------------------------------------------------------------------------------- tensor cores


def decode_mma_config(
    info: DeviceInfo, head_dim: int, dtype: str, kv_dtype: str, rows: int, takes: tuple[int, int]
) -> KernelConfig:
    """The constants of decode_mma.cu: a tile of about 16 KiB a warp and stage, two warps a block, so that blocks fill an SM finely."""
    item, warps = numpy_dtype(kv_dtype).itemsize, 2
    tile = 64
    while tile > 16 and 2 * tile * head_dim * item > 16384:
        tile //= 2
    tile_bytes = 2 * tile * head_dim * item
    stages = 2 if tile_bytes > 8192 else 3 if tile_bytes > 4096 else 4  # small tiles: more of them in flight
    masks = warps * stages * (8 if tile > 32 else 4)
    fixed = warps * tile * 16 + rows * (_query_bytes(head_dim) + 20) + warps * rows * 8 + masks + 16
    ring = stages * 2 * tile * _row_bytes(head_dim * item)
    shared = -(-fixed // 128) * 128 + warps * max(ring, rows * (head_dim + 4) * 4)
    return _mma_config(info, "decode_mma", head_dim, dtype, kv_dtype, rows, rows, tile, stages, warps, shared, takes)


def prefill_config(
    info: DeviceInfo, head_dim: int, dtype: str, kv_dtype: str, most: int, takes: tuple[int, int]
) -> KernelConfig:
    """The constants of prefill.cu for sequences of up to `most` packed rows: 16 a warp, as many warps as there are rows for."""
    item, stages = numpy_dtype(kv_dtype).itemsize, 2
    in_registers = head_dim <= 128  # queries

    def shared_bytes(tile: int, warps: int) -> int:
        rows = 16 * warps
        queries = rows * _query_bytes(head_dim)
        fixed = 2 * tile * 16 + (16 if in_registers else queries) + rows * 28 + 16 * (-(-tile // 32) + 1) + 16
        ring = stages * 2 * tile * _row_bytes(head_dim * item)
        return -(-fixed // 128) * 128 + max(ring, rows * (head_dim + 4) * 4, queries if in_registers else 0)

    # two blocks of four warps on a multiprocessor if tiles of 64 tokens allow it; wider rows leave no registers for so many scores
    tile = 64 if head_dim <= 128 and 2 * (shared_bytes(64, 4) + 1024) <= info.shared_per_sm else 32
    warps = 2 if most <= 32 else 4 if most < 256 else 8  # 2: threads enough to fetch the pages of a tile
    while warps > 2 and shared_bytes(tile, warps) > info.shared_per_block:
        warps //= 2
    shared = shared_bytes(tile, warps)
    return _mma_config(info, "prefill", head_dim, dtype, kv_dtype, 16 * warps, 16, tile, stages, warps, shared, takes)


def _mma_config(
    info: DeviceInfo, kernel: str, head_dim: int, dtype: str, kv_dtype: str, rows: int, warp_rows: int, tile: int, stages: int,
    warps: int, shared: int, takes: tuple[int, int],
) -> KernelConfig:  # fmt: skip
    defines: dict[str, int | str] = {
        "kHeadDim": head_dim, "kQueryType": CUDA_TYPES[dtype], "kCacheType": CUDA_TYPES[kv_dtype], "kRows": rows,
        "kWarpRows": warp_rows, "kTokens": tile, "kStages": stages, "kWarps": warps, "kSharedBytes": shared,
    }  # fmt: skip
    by_registers = _REGISTERS // (32 * warps * 256)  # both kernels may use all 255 registers a thread
    resident = max(1, min(by_registers, info.shared_per_sm // (shared + 1024)))
    return KernelConfig(kernel, rows, tile, warps, shared, resident, takes, tuple(defines.items()))


def _row_bytes(num_bytes: int) -> int:
    """A row in shared memory: an odd number of 16-byte units."""
    return (-(-num_bytes // 16) | 1) * 16


def _query_bytes(head_dim: int) -> int:
    return (2 * -(-head_dim // 16) | 1) * 16
