"""ComfyUI's quantised layouts, storing a changed weight on the scales that it had.

ComfyUI recalculates the scales when it merges a LoRA, so that every weight is rounded anew: the noise of that is larger than the noise of
the format itself, and often larger than the LoRA. On the old scales only the weights that the LoRA reaches move.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from comfy.quant_ops import QUANT_ALGOS, QuantizedTensor, get_layout_class, register_layout_class

from ...kernels import kept_scales

_Stored = tuple[torch.Tensor, dict[str, torch.Tensor]]
_Requantise = Callable[[torch.Tensor, Any, torch.Tensor, int], _Stored]


class KeepsGrid:
    """Part of a layout whose `quantize` takes `grid`: the weight before a change, on the scales of which the changed one is stored."""

    @classmethod
    def requantize_kwargs(cls, qtensor: QuantizedTensor) -> dict[str, Any]:
        """Return what `quantize` needs to know of the weight before the change."""
        return {"grid": qtensor}


def _fp8(data: torch.Tensor, params: Any, x: torch.Tensor, seed: int) -> _Stored:
    data, scale = kept_scales.requantize_fp8(data, params.scale, x, seed)
    return data, {"scale": scale}


def _nvfp4(data: torch.Tensor, params: Any, x: torch.Tensor, seed: int) -> _Stored:
    data, block_scale, scale = kept_scales.requantize_nvfp4(data, params.block_scale, params.scale, x, seed)
    return data, {"block_scale": block_scale, "scale": scale}


def _mxfp8(data: torch.Tensor, params: Any, x: torch.Tensor, seed: int) -> _Stored:
    data, scale = kept_scales.requantize_mxfp8(data, params.scale, x, seed)
    return data, {"scale": scale}


def _int8(data: torch.Tensor, params: Any, x: torch.Tensor, seed: int) -> _Stored:
    rotation = params.convrot_groupsize if params.convrot else 0
    data, scale = kept_scales.requantize_int8(data, params.scale, x, seed, rotation)
    return data, {"scale": scale}


def _int4(data: torch.Tensor, params: Any, x: torch.Tensor, seed: int) -> _Stored:
    data, scale = kept_scales.requantize_int4(data, params.scale, x, seed, params.convrot_groupsize)
    return data, {"scale": scale}


def _with_kept_scales(base: Any, requantise: _Requantise) -> Any:
    """Return ComfyUI's layout class `base` with a `quantize` that keeps the scales of the weight before the change."""

    class Layout(KeepsGrid, base):
        @classmethod
        def quantize(cls, tensor: torch.Tensor, *args: Any, grid: QuantizedTensor | None = None, **options: Any) -> Any:
            if grid is None:
                return super().quantize(tensor, *args, **options)
            seed = options.get("stochastic_rounding") or 0
            data, scales = requantise(grid._qdata, grid._params, tensor, seed)
            return data, dataclasses.replace(grid._params, orig_dtype=tensor.dtype, **scales)

    return Layout


_REQUANTISE: dict[str, _Requantise] = {
    "float8_e4m3fn": _fp8, "float8_e5m2": _fp8, "nvfp4": _nvfp4, "mxfp8": _mxfp8, "int8_tensorwise": _int8,
    "convrot_w4a4": _int4,
}  # fmt: skip
# ComfyUI's layout name -> ours, and back.
_KEPT: dict[str, str] = {}
_NATIVE: dict[str, str] = {}
for _format, _requantise in _REQUANTISE.items():
    if _format in QUANT_ALGOS:
        _native = str(QUANT_ALGOS[_format]["comfy_tensor_layout"])
        _KEPT[_native] = f"ErnieFast{_native}"
        _NATIVE[_KEPT[_native]] = _native
        register_layout_class(_KEPT[_native], _with_kept_scales(get_layout_class(_native), _requantise))


def keep_scales(weight: Any) -> None:
    """Make a weight keep its scales when a LoRA is merged into it. Other weights than ComfyUI's quantised ones stay as they are."""
    if isinstance(weight, QuantizedTensor):
        weight._layout_cls = _KEPT.get(weight._layout_cls, weight._layout_cls)


def as_native(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight under ComfyUI's own layout name, which its matrix products look for."""
    if not isinstance(weight, QuantizedTensor):
        return weight
    quantised: Any = weight  # the class has another form where comfy-kitchen is missing
    native = _NATIVE.get(quantised._layout_cls)
    return weight if native is None else QuantizedTensor(quantised._qdata, native, quantised._params)
