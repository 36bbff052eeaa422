"""Read the W4A4 layers of "Nunchaku Lite" files (diffusers, `NunchakuLiteQuantizationConfig`; INT4 with groups of 64).

The tensors have the names and shapes of comfy-kitchen's natural layout, but their elements are in the order in which the threads of
Nunchaku's kernel read them. The order is that of the packer in diffusers, `quantizers/nunchaku/svdquant.py`, and in diffuse-compressor,
`backends/nunchaku/packing.py`. Both store `proj_down` divided by the smoothing, as comfy-kitchen does.

Symbols: N outputs, K inputs; R rank; G = K / 64 groups. Lanes are threads of a warp: 8 along the rows of a matrix, 4 along its columns.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .svdquant import GROUP_SIZE, SVDQuantWeight

TENSORS = ("qweight", "wscales", "proj_down", "proj_up", "smooth_factor")
_TILE = 128  # outputs, and inputs, that the packer pads to
_RANK_TILE = 16
_HALF = (torch.float16, torch.bfloat16)


def unpack(tensors: Mapping[str, Tensor]) -> SVDQuantWeight:
    """Return one layer in comfy-kitchen's natural layout.

    Args:
        tensors: the layer's tensors by their last name, see `TENSORS`; others are not read.

    Raises:
        ValueError: when a tensor is missing, or is not one of an INT4 layer.
    """
    missing = [name for name in TENSORS if name not in tensors]
    if missing:
        raise ValueError(f"a Nunchaku Lite W4A4 layer has no {', '.join(missing)}; {', '.join(TENSORS)} are needed")
    qweight, wscales, proj_down, proj_up, smooth = (tensors[name] for name in TENSORS)
    _check(qweight, wscales, proj_down, proj_up, smooth)
    return SVDQuantWeight(
        _weight(qweight),
        _rows_of_tiles(wscales.reshape(-1, len(wscales), _TILE)).transpose(0, 1).reshape(wscales.shape),
        _low_rank(proj_down, rank_is_row=True),
        _low_rank(proj_up, rank_is_row=False),
        unpack_vector(smooth),
    )


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


def _check(qweight: Tensor, wscales: Tensor, proj_down: Tensor, proj_up: Tensor, smooth: Tensor) -> None:
    if qweight.dtype != torch.int8 or qweight.ndim != 2 or wscales.dtype not in _HALF:
        raise ValueError(
            f"qweight is {qweight.dtype} {list(qweight.shape)} with {wscales.dtype} scales; only INT4 is read: int8 (N, K / 2) with "
            "16-bit scales. NVFP4 files have FP8 scales."
        )
    rows, columns = qweight.shape[0], qweight.shape[1] * 2
    rank = proj_down.shape[-1]
    if rows % _TILE or columns % _TILE or rank % _RANK_TILE:
        raise ValueError(
            f"the weight is {rows} x {columns} with a rank of {rank}; multiples of {_TILE} and a rank that is one of {_RANK_TILE} are needed"
        )
    found = {"wscales": wscales, "proj_down": proj_down, "proj_up": proj_up, "smooth_factor": smooth}
    wanted = ((columns // GROUP_SIZE, rows), (columns, rank), (rows, rank), (columns,))
    for (name, tensor), shape in zip(found.items(), wanted, strict=True):
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"{name} has the shape {list(tensor.shape)}; {list(shape)} is needed for a weight of {rows} x {columns}"
            )
