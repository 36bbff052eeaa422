"""ComfyUI's QuantizedTensor for formats that ComfyUI does not have: GGUF blocks, row-wise FP8, SVDQuant.

A layout says how a weight is read back and how a changed weight is stored again. Offloading, streaming, pinning and LoRA
patching are ComfyUI's and work on any layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from comfy.quant_ops import QuantizedLayout, QuantizedTensor, register_layout_class
from comfy_kitchen.tensor import TensorCoreSVDQuantW4A4Layout
from comfy_kitchen.tensor.base import BaseLayoutParams

from ...kernels import fp8, kept_scales, svdquant
from ...kernels.gguf import ops
from ...kernels.gguf.requantise import requantize
from .kept_layouts import KeepsGrid
from .storage import GGUF, ROW_FP8, SVDQUANT


class GGUFLayout(KeepsGrid, QuantizedLayout):
    """GGUF blocks: uint8 (O, bytes per row), scales inside the blocks."""

    @dataclass(frozen=True)
    class Params:
        """What the bytes do not say. There are no tensors beside them, so nothing is moved or copied."""

        qtype: str
        orig_dtype: torch.dtype
        orig_shape: tuple[int, ...]

        def _tensor_fields(self) -> list[str]:
            return []

        def to_device(self, device: torch.device) -> GGUFLayout.Params:
            """Return itself."""
            return self

        def clone(self) -> GGUFLayout.Params:
            """Return itself."""
            return self

        def copy_from(self, src: GGUFLayout.Params, non_blocking: bool = False) -> None:
            """Do nothing: both describe the same weight."""

    @classmethod
    def quantize(
        cls, tensor: torch.Tensor, *, grid: QuantizedTensor, stochastic_rounding: int | None = 0, **_: Any
    ) -> tuple[torch.Tensor, Params]:
        """Store a changed weight (O, I) on the scales of the weight that it was made from.

        New scales would round every weight anew; on the old ones only those that the change reaches move.

        Args:
            tensor: the changed weight.
            grid: the weight before the change.
            stochastic_rounding: seed of the rounding, which keeps small changes on average; 0 rounds to nearest.
        """
        params: GGUFLayout.Params = grid._params
        data = requantize(grid._qdata, params.qtype, tensor, stochastic_rounding or 0)
        return data, cls.Params(params.qtype, tensor.dtype, tuple(tensor.shape))

    @classmethod
    def dequantize(cls, qdata: torch.Tensor, params: Params) -> torch.Tensor:
        """Return the weight (O, I) in `params.orig_dtype`."""
        return ops.dequantize(qdata, params.qtype, params.orig_dtype)

    @classmethod
    def get_plain_tensors(cls, qtensor: QuantizedTensor) -> tuple[torch.Tensor, ...]:
        """Return the blocks."""
        return (qtensor._qdata,)

    @classmethod
    def state_dict_tensors(cls, qdata: torch.Tensor, params: Params) -> dict[str, torch.Tensor]:
        """Return the blocks under the weight's own name."""
        return {"": qdata}

    @classmethod
    def supports_fast_matmul(cls) -> bool:
        """No: the weight is expanded before the matrix product."""
        return False


class RowFP8Layout(KeepsGrid, QuantizedLayout):
    """FP8 (E4M3) with one float32 scale per output row: weight (O, I), scale (O, 1)."""

    MIN_SM_VERSION = (8, 9)

    @dataclass(frozen=True)
    class Params(BaseLayoutParams):
        """The scale (O, 1), and the weight's dtype and shape."""

    @classmethod
    def quantize(
        cls, tensor: torch.Tensor, *, grid: QuantizedTensor | None = None, stochastic_rounding: int | None = 0, **_: Any
    ) -> tuple[torch.Tensor, Params]:
        """Quantise a weight (O, I), or store a changed one on the scales of `grid`. See `GGUFLayout.quantize`."""
        if grid is None:
            data, scale = fp8.quantise_rowwise(tensor)
        else:
            data, scale = kept_scales.requantize_fp8(grid._qdata, grid._params.scale, tensor, stochastic_rounding or 0)
        return data, cls.Params(scale, tensor.dtype, tuple(tensor.shape))

    @classmethod
    def dequantize(cls, qdata: torch.Tensor, params: Params) -> torch.Tensor:
        """Return the weight (O, I) in `params.orig_dtype`."""
        return fp8.dequantise_rowwise(qdata, params.scale, params.orig_dtype)

    @classmethod
    def get_plain_tensors(cls, qtensor: QuantizedTensor) -> tuple[torch.Tensor, ...]:
        """Return the FP8 weight and its scale."""
        return qtensor._qdata, qtensor._params.scale

    @classmethod
    def state_dict_tensors(cls, qdata: torch.Tensor, params: Params) -> dict[str, torch.Tensor]:
        """Return the weight and its scale under the names of a `comfy_quant` file."""
        return {"": qdata, "_scale": params.scale}

    @classmethod
    def linear(cls, x: torch.Tensor, weight: QuantizedTensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return F.linear(x, weight, bias): (..., I) -> (..., O), in FP8 where the GPU can."""
        out = fp8.linear_rowwise(x.reshape(-1, x.shape[-1]), weight._qdata, weight._params.scale, bias)
        return out.reshape(*x.shape[:-1], -1)


class SVDQuantLayout(KeepsGrid, TensorCoreSVDQuantW4A4Layout):
    """comfy-kitchen's SVDQuant W4A4, with the quantiser, the expansion and the CPU's float32 that it lacks."""

    @classmethod
    def quantize(
        cls, tensor: torch.Tensor, *, grid: QuantizedTensor | None = None, stochastic_rounding: int | None = 0, **_: Any
    ) -> tuple[torch.Tensor, Any]:
        """Quantise a weight (O, I), or store a changed one beside the low-rank branch of `grid`. See `GGUFLayout.quantize`."""
        if grid is None:
            stored = svdquant.quantize(tensor)
        else:
            stored = svdquant.requantize(cls.weight(grid._qdata, grid._params), tensor, stochastic_rounding or 0)
        params = cls.Params(
            stored.wscales, tensor.dtype, tuple(tensor.shape), stored.proj_down, stored.proj_up, stored.smooth_factor
        )
        return stored.qweight, params

    @classmethod
    def dequantize(cls, qdata: torch.Tensor, params: Any) -> torch.Tensor:
        """Return the weight (O, I), low-rank branch included, in `params.orig_dtype`."""
        return svdquant.dequantize(cls.weight(qdata, params)).to(params.orig_dtype)

    @classmethod
    def linear(cls, x: torch.Tensor, weight: QuantizedTensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return x @ weight.T + bias with the input quantised to 4 bits too: (..., I) -> (..., O)."""
        return svdquant.linear(x, cls.weight(weight._qdata, weight._params), bias)

    @classmethod
    def weight(cls, qdata: torch.Tensor, params: Any) -> svdquant.SVDQuantWeight:
        """Return the parts of a stored weight under their own names."""
        return svdquant.SVDQuantWeight(qdata, params.scale, params.proj_down, params.proj_up, params.smooth_factor)


OWN_LAYOUTS = {GGUF: "ErnieFastGGUFLayout", ROW_FP8: "ErnieFastRowFP8Layout", SVDQUANT: "ErnieFastSVDQuantLayout"}
register_layout_class(OWN_LAYOUTS[GGUF], GGUFLayout)
register_layout_class(OWN_LAYOUTS[ROW_FP8], RowFP8Layout)
register_layout_class(OWN_LAYOUTS[SVDQUANT], SVDQuantLayout)
