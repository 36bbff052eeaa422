"""Store a changed quantised weight on the scales that it has, so that what does not change stays bit for bit.

Other scales move every weight off the grid, and each is rounded anew. On the kept scales a weight moves from its present
code only by its change: with the probability change / step to the next code, so that small changes survive on average.

A group of weights (a tensor, a row or a block) gets another scale where a weight leaves its range:
- FP8 and MXFP8: the scale is doubled as often as needed. Codes halve, which floats store exactly (but for the subnormals).
- INT8 and INT4: the scale becomes what the quantiser of comfy-kitchen would choose, and the group is rounded anew. As that
  costs far more than a small excess, a weight less than one code beyond the end is stored at the end: its error stays below
  one step.
- NVFP4: one weight in nine is at the end of its block, so that to cut the excess would weaken every LoRA (measured: by 5 %).
  The block scale that is needed is rounded stochastically to E4M3, so that most blocks stay and the mean is right.

Each function compares `x` with the weight as comfy-kitchen dequantises it in the dtype of `x`, and stores the difference. So
the precision in which the weight was read is no change of the weight.

Symbols: O, I features of the weight; R, C rows and columns as stored, with padding; G groups of a row. `seed` above 0 keeps
small changes, 0 or None rounds to nearest. `x` is a finite float weight (O, I) on the device of `qdata`; float32 is computed. The
results are new tensors with the shapes and dtypes of the arguments.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from . import int4
from .kept_codes import FP4, FP8, INT4, INT8, TILE, Raise, doubled, store
from .native.eager import E2M1_VALUES, unpack_e2m1
from .rounding import E2M1, E4M3, ceil_log2, power_of_two, round_small_float

_NVFP4_GROUP = 16
_MXFP8_GROUP = 32


def requantize_fp8(qdata: Tensor, scale: Tensor, x: Tensor, seed: int | None) -> tuple[Tensor, Tensor]:
    """Store `x` in scaled FP8.

    Args:
        qdata: float8_e4m3fn or float8_e5m2 (O, I).
        scale: float () or one per row (O, 1).

    Returns:
        (qdata, scale).

    Raises:
        ValueError: for another dtype of `qdata`, or an `x` that does not fit it.
    """
    if qdata.dtype not in FP8:
        raise ValueError(f"qdata is {qdata.dtype}; use float8_e4m3fn or float8_e5m2")
    _check(x, tuple(qdata.shape))
    codes = FP8[qdata.dtype]
    kitchen = _kitchen()
    dtype = _read_dtype(x)

    def read(rows: slice) -> tuple[Tensor, Tensor]:
        value = qdata[rows].float()
        if scale.numel() == 1:
            old = kitchen.dequantize_per_tensor_fp8(qdata[rows], scale.reshape(()), dtype)
        else:  # comfy-kitchen has none; `fp8.dequantise_rowwise` does this
            old = (value * scale[rows].float()).to(dtype)
        return value, _change(x, old, rows)

    return store(qdata, scale, len(qdata), read, lambda c: c.to(qdata.dtype), codes, _double(codes.high), seed)


def requantize_int8(
    qdata: Tensor, scale: Tensor, x: Tensor, seed: int | None, rotation: int = 0
) -> tuple[Tensor, Tensor]:
    """Store `x` in INT8, rotated first for a ConvRot weight.

    Args:
        qdata: int8 (O, I).
        scale: float () or one per row (O, 1).
        rotation: group size of ConvRot's Hadamard rotation; 0 for none.

    Returns:
        (qdata, scale).

    Raises:
        ValueError: when `qdata`, `x` and the rotation do not fit together.
    """
    _check_dtype(qdata, torch.int8)
    _check(x, tuple(qdata.shape), rotation)
    _kitchen()  # registers the operators
    operators: Any = torch.ops.comfy_kitchen
    dtype_code = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}[_read_dtype(x)]

    def read(rows: slice) -> tuple[Tensor, Tensor]:
        row_scale = scale if scale.numel() == 1 else scale[rows]
        if rotation:
            old = operators.dequantize_int8_convrot_weight_dtype(qdata[rows], row_scale, rotation, dtype_code)
        else:
            old = operators.dequantize_int8_simple_dtype(qdata[rows], row_scale, dtype_code)
        return qdata[rows].float(), _rotated(_change(x, old, rows), rotation)

    return store(qdata, scale, len(qdata), read, lambda c: c.to(torch.int8), INT8, _peak_over(INT8.high), seed)


def requantize_int4(qdata: Tensor, scale: Tensor, x: Tensor, seed: int | None, rotation: int) -> tuple[Tensor, Tensor]:
    """Store `x` in ConvRot W4A4: rotated, two INT4 codes per byte, the even column in the low half.

    Args:
        qdata: int8 (O, I / 2).
        scale: float, one per row, (O,) or (O, 1).
        rotation: group size of ConvRot's Hadamard rotation.

    Returns:
        (qdata, scale).

    Raises:
        ValueError: when `qdata`, `x` and the rotation do not fit together.
    """
    _check_dtype(qdata, torch.int8)
    _check(x, (qdata.shape[0], qdata.shape[1] * 2), rotation)
    convrot: Any = importlib.import_module("comfy_kitchen.tensor.convrot_w4a4")
    dtype = _read_dtype(x)

    def read(rows: slice) -> tuple[Tensor, Tensor]:
        old = convrot.dequantize_convrot_w4a4_weight(qdata[rows], scale[rows], rotation, output_dtype=dtype)
        return int4.unpack(qdata[rows]).float(), _rotated(_change(x, old, rows), rotation)

    return store(qdata, scale, len(qdata), read, int4.pack, INT4, _peak_over(INT4.high), seed)


def requantize_nvfp4(
    qdata: Tensor, block_scale: Tensor, scale: Tensor, x: Tensor, seed: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Store `x` in NVFP4. The global scale stays; a block scale grows up to its largest number, 448.

    A block that needs a scale between the E4M3 numbers a and b > a gets b with the probability p that makes its mean right,
    and a otherwise, which cuts the weights beyond 6 a to 6 a. To make up for that, b stores a weight 6 a + e as 6 a + e / p,
    which for the largest weight is 6 b.

    Args:
        qdata: uint8 (R, C / 2), two E2M1 codes per byte, the even column in the high half. R >= O and C >= I are padded.
        block_scale: float8_e4m3fn, or its bytes as uint8, one per 16 columns in the tensor cores' tiled order.
        scale: float32 (), the global scale.

    Returns:
        (qdata, block_scale, scale).

    Raises:
        ValueError: when `qdata`, `block_scale` and `x` do not fit together.
    """
    _check_dtype(qdata, torch.uint8)
    rows, columns = qdata.shape[0], qdata.shape[1] * 2
    tiles = _tiles(block_scale, rows, columns // _NVFP4_GROUP).view(torch.float8_e4m3fn)
    _check(x, (rows, columns), padded=True)
    kitchen = _kitchen()
    dtype = _read_dtype(x)
    total = scale.float()
    present = _from_tiles(tiles, rows, columns // _NVFP4_GROUP).float() * total

    def read(part: slice) -> tuple[Tensor, Tensor]:
        old = kitchen.dequantize_nvfp4(qdata[part], scale, tiles[part.start : _to_tile(part.stop)], dtype)
        return unpack_e2m1(qdata[part], torch.float32), _change(x, old, part)

    def raised(peak: Tensor, _: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        # comfy-kitchen, quantize_nvfp4: amax / 6 / global scale, rounded to E4M3.
        needed = peak / E2M1.maximum / total
        if generator is None:
            return round_small_float(needed, E4M3) * total, peak
        chance = torch.rand(needed.shape, generator=generator, device=needed.device)
        blocks = round_small_float(needed, E4M3, chance)
        # The bytes of positive E4M3 numbers have the order of the numbers.
        below = (blocks.to(torch.float8_e4m3fn).view(torch.uint8) - 1).view(torch.float8_e4m3fn).float()
        return blocks * total, torch.where(blocks > needed, below * (total * E2M1.maximum), peak)

    data, kept = store(qdata, present, rows, read, _pack_e2m1, FP4, raised, seed)
    blocks = torch.where(kept == present, 0.0, kept / total).to(torch.float8_e4m3fn)
    tiles = _with_changed(tiles, blocks, kept != present)
    return data, tiles.view(block_scale.dtype).view(block_scale.shape), scale.clone()


def requantize_mxfp8(qdata: Tensor, block_scale: Tensor, x: Tensor, seed: int | None) -> tuple[Tensor, Tensor]:
    """Store `x` in MXFP8.

    Args:
        qdata: float8_e4m3fn (R, C). R >= O and C >= I are padded.
        block_scale: float8_e8m0fnu, or its bytes as uint8, one per 32 columns in the tensor cores' tiled order.

    Returns:
        (qdata, block_scale).

    Raises:
        ValueError: when `qdata`, `block_scale` and `x` do not fit together.
    """
    _check_dtype(qdata, torch.float8_e4m3fn)
    rows, columns = qdata.shape
    tiles = _tiles(block_scale, rows, columns // _MXFP8_GROUP)
    _check(x, (rows, columns), padded=True)
    kitchen = _kitchen()
    dtype = _read_dtype(x)
    exponents = _from_tiles(tiles, rows, columns // _MXFP8_GROUP).int()
    # comfy-kitchen, e8m0_to_f32: byte 0 stands for 0, unlike in the MX specification.
    present = torch.where(exponents == 0, 0.0, power_of_two(exponents - 127))

    def read(part: slice) -> tuple[Tensor, Tensor]:
        scales = tiles[part.start : _to_tile(part.stop)].view(torch.float8_e8m0fnu)
        return qdata[part].float(), _change(x, kitchen.dequantize_mxfp8(qdata[part], scales, dtype), part)

    codes = FP8[torch.float8_e4m3fn]
    data, kept = store(
        qdata, present, rows, read, lambda c: c.to(torch.float8_e4m3fn), codes, _double(codes.high), seed
    )
    bytes_ = (ceil_log2(torch.where(kept == present, 1.0, kept)) + 127).to(torch.uint8)
    tiles = _with_changed(tiles, bytes_, kept != present)
    return data, tiles.view(block_scale.dtype).view(block_scale.shape)


def _double(high: float) -> Raise:
    """Return the rule for float codes: double the scale."""
    return lambda peak, present, _: (doubled(peak, present, high), peak)


def _peak_over(high: float) -> Raise:
    """Return the rule of comfy-kitchen's integer quantisers: amax / largest code."""
    return lambda peak, _, __: (peak / high, peak)


def _change(x: Tensor, old: Tensor, rows: slice) -> Tensor:
    """Return the change of the rows as float32, 0 where the stored weight `old` is only padding of `x`."""
    wanted = x[rows].detach()
    change = torch.zeros(old.shape, dtype=torch.float32, device=old.device)
    size = tuple(slice(n) for n in wanted.shape)
    change[size] = wanted.float() - old[size].float()
    return change


def _rotated(change: Tensor, rotation: int) -> Tensor:
    """Rotate float32 (rows, I) as comfy-kitchen rotates a ConvRot weight, which is linear: W H^T per group."""
    if not rotation:
        return change
    module: Any = importlib.import_module("comfy_kitchen.tensor.int8_utils")
    hadamard = module._build_hadamard(rotation, device=change.device, dtype=torch.float32)
    return module._rotate_weight(change, hadamard, rotation)


def _pack_e2m1(codes: Tensor) -> Tensor:
    """Inverse of `unpack_e2m1`."""
    table = torch.tensor(E2M1_VALUES, device=codes.device)
    halves = torch.bucketize(codes.abs(), table).to(torch.uint8) | (codes.signbit().to(torch.uint8) << 3)
    return (halves[:, 0::2] << 4) | halves[:, 1::2]


def _to_tile(rows: int) -> int:
    return -(-rows // TILE) * TILE


def _tiles(block_scale: Tensor, rows: int, groups: int) -> Tensor:
    """Return the bytes of tiled block scales, uint8 (rows up to whole tiles, groups up to a multiple of 4)."""
    shape = (_to_tile(rows), -(-groups // 4) * 4)
    if block_scale.numel() != shape[0] * shape[1] or block_scale.element_size() != 1:
        raise ValueError(
            f"block_scale is {block_scale.dtype} {tuple(block_scale.shape)}; expected {shape} of one byte, tiled"
        )
    return block_scale.contiguous().view(torch.uint8).view(shape)


def _from_tiles(tiles: Tensor, rows: int, groups: int) -> Tensor:
    module: Any = importlib.import_module("comfy_kitchen.float_utils")
    return module.from_blocked(tiles, rows, groups)


def _with_changed(tiles: Tensor, blocks: Tensor, changed: Tensor) -> Tensor:
    """Return a copy of tiled scales in which the scales (rows, G) marked by `changed` are those of `blocks`."""
    module: Any = importlib.import_module("comfy_kitchen.float_utils")
    plain = module.from_blocked(tiles.view(torch.uint8), *tiles.shape).clone()
    part = plain[: blocks.shape[0], : blocks.shape[1]]
    part.copy_(torch.where(changed, blocks.view(torch.uint8), part))  # the padding of `plain` stays
    return module.to_blocked(plain, flatten=False)


def _read_dtype(x: Tensor) -> torch.dtype:
    return x.dtype if x.dtype in (torch.float16, torch.bfloat16) else torch.float32


def _kitchen() -> Any:
    return importlib.import_module("comfy_kitchen")


def _check_dtype(qdata: Tensor, dtype: torch.dtype) -> None:
    if qdata.dtype != dtype or qdata.ndim != 2:
        raise ValueError(f"qdata is {qdata.dtype} {tuple(qdata.shape)}; expected {dtype} of two dimensions")


def _check(x: Tensor, shape: tuple[int, ...], rotation: int = 0, padded: bool = False) -> None:
    fits = len(shape) == x.ndim == 2 and all(n == m or (padded and n < m) for n, m in zip(x.shape, shape, strict=True))
    if not x.is_floating_point() or not fits:
        raise ValueError(
            f"x is {x.dtype} {tuple(x.shape)}; expected a float of shape {shape}, that of the stored weight"
        )
    if rotation and shape[1] % rotation:
        raise ValueError(
            f"the weight has {shape[1]} columns; expected a multiple of the rotation's group size {rotation}"
        )
