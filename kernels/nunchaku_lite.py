"""Read the layers of "Nunchaku Lite" files (diffusers, `NunchakuLiteQuantizationConfig`; INT4 with groups of 64).

SVDQuant W4A4 layers have the names and shapes of comfy-kitchen's natural layout, but their elements are in the order in which the
threads of Nunchaku's kernel read them. The order is that of the packer in diffusers, `quantizers/nunchaku/svdquant.py`, and in
diffuse-compressor, `backends/nunchaku/packing.py`. Both store `proj_down` divided by the smoothing, as comfy-kitchen does.

AWQ W4A16 layers are TinyChat's: codes 0 to 15, weight = code * scale + zero, in the order of `pack_w4` of deepcompressor,
`backend/tinychat/utils.py`, which diffuse-compressor, `backends/nunchaku/layouts.py`, writes too. Nunchaku's kernel,
`src/kernels/awq/gemv_awq.cu`, multiplies and adds in the same way.

Symbols: N outputs, K inputs; R rank; G = K / 64 groups. Lanes are threads of a warp: 8 along the rows of a matrix, 4 along its columns.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .svdquant import GROUP_SIZE, SVDQuantWeight

TENSORS = ("qweight", "wscales", "proj_down", "proj_up", "smooth_factor")
AWQ_TENSORS = ("qweight", "wscales", "wzeros")
# What is known of a tensor before it is read; None stands for a dtype that no layer has.
Described = Mapping[str, tuple[torch.dtype | None, tuple[int, ...]]]
_TILE = 128  # outputs, and inputs, that the packer pads to
_RANK_TILE = 16
_AWQ_ROWS = 4  # outputs whose codes alternate, group by group
_HALF = (torch.float16, torch.bfloat16)


def unpack(tensors: Mapping[str, Tensor]) -> SVDQuantWeight:
    """Return one layer in comfy-kitchen's natural layout.

    Args:
        tensors: the layer's tensors by their last name, see `TENSORS`; others are not read.

    Raises:
        ValueError: when a tensor is missing, or is not one of an INT4 layer.
    """
    check(_describe(tensors))
    qweight, wscales, proj_down, proj_up, smooth = (tensors[name] for name in TENSORS)
    return SVDQuantWeight(
        _weight(qweight),
        _rows_of_tiles(wscales.reshape(-1, len(wscales), _TILE)).transpose(0, 1).reshape(wscales.shape),
        _low_rank(proj_down, rank_is_row=True),
        _low_rank(proj_up, rank_is_row=False),
        unpack_vector(smooth),
    )


def unpack_awq(tensors: Mapping[str, Tensor]) -> Tensor:
    """Return the weight of one AWQ W4A16 layer, (N, K) in the dtype of its scales.

    Args:
        tensors: the layer's tensors by their last name: qweight int32 (N / 4, K / 2), wscales and wzeros (G, N); others are not read.

    Raises:
        ValueError: when a tensor is missing, or is not one of such a layer.
    """
    check_awq(_describe(tensors))
    qweight, wscales, wzeros = (tensors[name] for name in AWQ_TENSORS)
    groups, rows = wscales.shape
    # A group of 64 inputs is two halves of four int32 per output. int32 p holds the inputs 2p of the half's four runs of eight in its
    # low 16 bits, the inputs 2p + 1 in its high ones. The outputs of a quad alternate.
    packed = qweight.contiguous().view(torch.uint8).view(rows // _AWQ_ROWS, groups, _AWQ_ROWS, 2, 4, 2, 2)
    codes = torch.stack([packed & 15, packed >> 4], dim=-1)
    # quad, group, output, half, pair, odd, run / 2, run -> quad, output, group, half, run / 2, run, pair, odd
    codes = codes.permute(0, 2, 1, 3, 6, 7, 4, 5).reshape(rows, groups, GROUP_SIZE)
    scales, zeros = (table.T.float().unsqueeze(-1) for table in (wscales, wzeros))
    return codes.float().mul_(scales).add_(zeros).to(wscales.dtype).view(rows, -1)


def check(found: Described) -> None:
    """Raise ValueError when tensors, (dtype, shape) by their last name, are not those of an INT4 SVDQuant layer."""
    _require(found, TENSORS, "W4A4")
    dtype, shape = found["qweight"]
    scale_dtype, rank = found["wscales"][0], found["proj_down"][1][-1:]
    if dtype != torch.int8 or len(shape) != 2 or scale_dtype not in _HALF:
        raise ValueError(
            f"qweight is {dtype} {list(shape)} with {scale_dtype} scales; only INT4 is read: int8 (N, K / 2) with 16-bit scales. "
            "FP4 (NVFP4) layers have FP8 scales."
        )
    rows, columns = shape[0], shape[1] * 2
    if not rows or not columns or rows % _TILE or columns % _TILE:
        raise ValueError(
            f"the weight is {rows} x {columns}; multiples of {_TILE} are needed, others are in the logical order"
        )
    if not rank or not rank[0] or rank[0] % _RANK_TILE:
        raise ValueError(
            f"proj_down has the shape {list(found['proj_down'][1])}; a rank that is a multiple of {_RANK_TILE} is needed"
        )
    _require_shapes(
        found,
        scale_dtype,
        {
            "wscales": (columns // GROUP_SIZE, rows),
            "proj_down": (columns, rank[0]),
            "proj_up": (rows, rank[0]),
            "smooth_factor": (columns,),
        },
    )


def check_awq(found: Described) -> None:
    """Raise ValueError when tensors, (dtype, shape) by their last name, are not those of an AWQ W4A16 layer."""
    _require(found, AWQ_TENSORS, "W4A16")
    dtype, shape = found["qweight"]
    scale_dtype = found["wscales"][0]
    if dtype != torch.int32 or len(shape) != 2 or scale_dtype not in _HALF:
        raise ValueError(
            f"qweight is {dtype} {list(shape)} with {scale_dtype} scales; int32 (N / {_AWQ_ROWS}, K / 2) with 16-bit scales is needed"
        )
    rows, columns = shape[0] * _AWQ_ROWS, shape[1] * 2
    if not rows or not columns or columns % GROUP_SIZE:
        raise ValueError(f"the weight is {rows} x {columns}; inputs in multiples of {GROUP_SIZE} are needed")
    table = (columns // GROUP_SIZE, rows)
    _require_shapes(found, scale_dtype, {"wscales": table, "wzeros": table})


def unpack_vector(vector: Tensor) -> Tensor:
    """Return the smoothing (K,) or the bias (N,) of a layer in natural order."""
    return _rows_of_tiles(vector.reshape(-1, 1, _TILE)).reshape(-1)


def _weight(packed: Tensor) -> Tensor:
    """Reorder INT4 codes, int8 (N, K / 2): tiles of 128 x 64, in each 8 x 8 x 4 pieces of 2 x 2 runs of eight codes."""
    rows, half = packed.shape
    # Four bytes hold a run of eight codes along K, the first in the low half of the first byte, as in the natural layout.
    runs = packed.reshape(rows // _TILE, half * 2 // GROUP_SIZE, 8, 8, 4, 2, 2, 4)
    # tile N, tile K, N / 16, lane N, lane K, N / 8, K / 32, byte -> tile N, N / 16, N / 8, lane N, tile K, K / 32, lane K, byte
    return runs.permute(0, 2, 5, 3, 1, 6, 4, 7).reshape(rows, half)


def _rows_of_tiles(scales: Tensor) -> Tensor:
    """Reorder the 128 numbers of tiles, (tiles, G, 128): in each 16, pairs alternate between the first and the second eight."""
    pieces = scales.reshape(*scales.shape[:2], 8, 4, 2, 2)
    return pieces.transpose(3, 4).reshape(scales.shape)


def _low_rank(packed: Tensor, rank_is_row: bool) -> Tensor:
    """Reorder a projection, (features, R): tiles of 16 x 16 with 8 x 4 lanes, each with 2 x 2 pairs."""
    features, rank = packed.shape
    tiles = packed.reshape(features // _RANK_TILE, rank // _RANK_TILE, 8, 4, 2, 2, 2)
    # tile, rank tile, lane row, lane column, row / 8, column / 8, pair; the rank is the row of a tile of `proj_down`
    order = (0, 5, 3, 6, 1, 4, 2) if rank_is_row else (0, 4, 2, 1, 5, 3, 6)
    return tiles.permute(order).reshape(features, rank)


def _describe(tensors: Mapping[str, Tensor]) -> Described:
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def _require(found: Described, names: tuple[str, ...], kind: str) -> None:
    missing = [name for name in names if name not in found]
    if missing:
        raise ValueError(f"a Nunchaku Lite {kind} layer has no {', '.join(missing)}; {', '.join(names)} are needed")


def _require_shapes(found: Described, dtype: torch.dtype | None, wanted: Mapping[str, tuple[int, ...]]) -> None:
    for name, shape in wanted.items():
        if found[name] != (dtype, shape):
            raise ValueError(f"{name} is {found[name][0]} {list(found[name][1])}; {dtype} {list(shape)} is needed")
