"""Layers and files as Nunchaku Lite stores them, packed element by element from the place that each has in its tile."""

from __future__ import annotations

import json
from typing import Any

import torch
from ernie_fast.kernels.svdquant import SVDQuantWeight
from ernie_files import StateDict, is_block_linear
from torch import Tensor

AWQ_LAYERS = (
    "text_proj", "time_embedding.linear_1", "time_embedding.linear_2", "adaLN_modulation.1", "final_norm.linear", "final_linear",
)  # fmt: skip


def _digits(index: Tensor, *sizes: int) -> list[Tensor]:
    """The digits of numbers in a mixed base, the most significant first; it has no bound."""
    found = []
    for size in reversed(sizes):
        found.append(index % size)
        index = index // size
    return [index, *reversed(found)]


def _place(parts: list[tuple[Tensor, int]]) -> Tensor:
    """The number of which (digit, base) are the digits: the inverse of `_digits`."""
    place = torch.zeros((), dtype=torch.int64)
    for part, size in parts:
        place = place * size + part
    return place.flatten()


def _put(values: Tensor, place: Tensor) -> Tensor:
    out = torch.empty(values.numel(), dtype=values.dtype)
    out[place] = values.flatten()
    return out


def _scales(table: Tensor) -> Tensor:
    group, row = torch.arange(len(table))[:, None], torch.arange(table.shape[1])[None, :]
    tile, n16, n8, pair, one = _digits(row, 8, 2, 4, 2)
    place = _place([(tile, 1), (group, len(table)), (n16, 8), (pair, 4), (n8, 2), (one, 2)])
    return _put(table, place).view(table.shape)


def _projection(matrix: Tensor, rank_is_row: bool) -> Tensor:
    rank = matrix.shape[1]
    feature, r = torch.arange(len(matrix))[:, None], torch.arange(rank)[None, :]
    row, column = (r % 16, feature % 16) if rank_is_row else (feature % 16, r % 16)
    _, column8, lane_column, one = _digits(column, 2, 4, 2)
    tiles = (feature // 16, 1), (r // 16, rank // 16)
    place = _place([*tiles, (row % 8, 8), (lane_column, 4), (row // 8, 2), (column8, 2), (one, 2)])
    return _put(matrix, place).view(matrix.shape)


def pack_svdquant(natural: SVDQuantWeight) -> StateDict:
    """The tensors of an SVDQuant layer, by their last name, in the order of Nunchaku's kernel."""
    rows, columns = natural.qweight.shape[0], natural.qweight.shape[1] * 2
    halves = torch.stack([natural.qweight & 15, (natural.qweight >> 4) & 15], dim=-1).view(rows, columns)
    n, k = torch.arange(rows)[:, None], torch.arange(columns)[None, :]
    tile, n16, n8, lane_n = _digits(n, 8, 2, 8)
    k_tile, k32, lane_k, k1 = _digits(k, 2, 4, 8)
    tiles = [(tile, 1), (k_tile, columns // 64), (n16, 8)]
    nibbles = _put(halves, _place([*tiles, (lane_n, 8), (lane_k, 4), (n8, 2), (k32, 2), (k1, 8)]))
    return {
        "qweight": (nibbles[0::2] | (nibbles[1::2] << 4)).view(rows, columns // 2),
        "wscales": _scales(natural.wscales),
        "proj_down": _projection(natural.proj_down, rank_is_row=True),
        "proj_up": _projection(natural.proj_up, rank_is_row=False),
        "smooth_factor": _scales(natural.smooth_factor[None])[0],
    }


def pack_awq(weight: Tensor) -> tuple[Tensor, StateDict]:
    """Quantise a weight (N, K) to AWQ W4A16.

    Input c of a group of 64 is in int32 4 (c // 32) + (c % 8) // 2 of its output and group, in nibble (c % 32) // 8 + 4 (c % 2).

    Returns: (the weight that is stored, the layer's tensors by their last name).
    """
    rows, columns = weight.shape
    groups = weight.float().view(rows, -1, 64)
    zero = groups.amin(-1).bfloat16()
    scale = ((groups.amax(-1) - zero.float()) / 15).bfloat16()
    codes = ((groups - zero.float().unsqueeze(-1)) / scale.float().unsqueeze(-1)).round().clamp(0, 15)
    stored = (codes * scale.float().unsqueeze(-1) + zero.float().unsqueeze(-1)).bfloat16().view(rows, columns)
    qweight = torch.zeros(rows // 4, columns // 2, dtype=torch.int64)
    for c in range(64):
        nibble, word = (c % 32) // 8 + 4 * (c % 2), 4 * (c // 32) + (c % 8) // 2
        for row in range(4):
            # Of each four outputs: group 0 of the first, of the second, ..., then group 1.
            qweight[:, row * 8 + word :: 32] |= codes[row::4, :, c].long() << (4 * nibble)
    return stored, {
        "qweight": torch.where(qweight >= 1 << 31, qweight - (1 << 32), qweight).to(torch.int32),
        "wscales": scale.T.contiguous(),
        "wzeros": zero.T.contiguous(),
    }


def manifest(sd: StateDict) -> dict[str, Any]:
    """The runtime manifest that diffuse-compressor writes for a packed state dict."""
    layers = [name.removesuffix(".qweight") for name in sd if name.endswith(".qweight")]
    ops = {layer: "awq_w4a16" if f"{layer}.wzeros" in sd else "svdq_w4a4" for layer in layers}
    return {
        "schema": "nunchaku_lite.runtime_manifest",
        "version": 1,
        "component": "transformer",
        "nunchaku_format_version": 1,
        "producer": {"name": "diffuse_compressor", "version": "0.1.0"},
        "requirements": {"method": "svdquant", "precision": "int4", "rank": 32},
        "structural_patches": [],
        "targets": [
            {
                "name": layer, "checkpoint_prefix": layer, "source_modules": [layer], "roles": [], "kind": "linear", "nunchaku_op": op,
                "precision": "int4", "group_size": 64, "rank": 32 if op == "svdq_w4a4" else 0, "has_bias": f"{layer}.bias" in sd,
                "op_options": {}, "activation": {},
            }
            for layer, op in ops.items()
        ],
    }  # fmt: skip


def metadata(runtime_manifest: Any, **config: Any) -> dict[str, str]:
    """The header's text around a manifest."""
    return {
        "quantization_config": json.dumps(
            {"method": "svdquant", "rank": 32, "runtime_manifest": runtime_manifest, **config}
        )
    }


def nunchaku_lite(sd: StateDict, stored: dict[str, SVDQuantWeight]) -> tuple[StateDict, StateDict]:
    """An ERNIE state dict with the blocks given as SVDQuant weights, as a Nunchaku Lite file and as a `comfy_quant` one."""
    lite, comfy = {}, {}
    for name, tensor in sd.items():
        layer, _, last = name.rpartition(".")
        if is_block_linear(name):
            weight = stored[layer]
            lite |= {f"{layer}.{part}": value for part, value in pack_svdquant(weight).items()}
            comfy |= {
                f"{layer}.weight": weight.qweight,
                f"{layer}.weight_scale": weight.wscales,
                **{
                    f"{layer}.weight_{part}": getattr(weight, part)
                    for part in ("proj_down", "proj_up", "smooth_factor")
                },
                f"{layer}.comfy_quant": torch.tensor(list(b'{"format": "svdquant_w4a4"}'), dtype=torch.uint8),
            }
        elif last == "weight" and layer in AWQ_LAYERS:
            comfy[name], parts = pack_awq(tensor)
            lite |= {f"{layer}.{part}": value for part, value in parts.items()}
        else:
            lite[name] = comfy[name] = tensor
    return lite, comfy
