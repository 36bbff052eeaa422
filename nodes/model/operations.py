"""ComfyUI's layer classes, able to hold the formats of `layouts.py` beside ComfyUI's own.

A format of ours is a `comfy_quant` marker like any other; only what ComfyUI does not know is read here. Weights in ComfyUI's own formats
keep their scales when a LoRA is merged (`kept_layouts.py`); their matrix products are ComfyUI's.
"""

from __future__ import annotations

import json
from typing import Any

import comfy.ops
import torch
from comfy.quant_ops import QuantizedTensor

from ...kernels.gguf import ops
from .kept_layouts import as_native, keep_scales
from .layouts import OWN_LAYOUTS, GGUFLayout, RowFP8Layout, SVDQuantLayout
from .storage import GGUF, MARKER, ROW_FP8

OWN_FORMATS = tuple(OWN_LAYOUTS)


def with_own_formats(base: Any) -> Any:
    """Return ComfyUI's mixed-precision operations (a class of layer classes) with the formats of ours added.

    Args:
        base: what `comfy.ops.mixed_precision_ops` returned.
    """

    class Operations(base):
        class Linear(base.Linear):
            def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
                shape = (self.out_features, self.in_features)
                if _load_own(self, state_dict, prefix, shape, base._compute_dtype):
                    # The input comes as it is: a layout that quantises it does so itself.
                    self._full_precision_mm = True
                    _load_rest(self, state_dict, prefix, *args)
                else:
                    super()._load_from_state_dict(state_dict, prefix, *args)
                    keep_scales(self.weight)

            def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", **kwargs: Any) -> Any:
                sd = super().state_dict(*args, destination=destination, prefix=prefix, **kwargs)
                return _write_marker(self, sd, prefix)

            def _forward(self, input: torch.Tensor, weight: Any, bias: torch.Tensor | None) -> torch.Tensor:
                linear = getattr(weight.layout_cls, "linear", None) if isinstance(weight, QuantizedTensor) else None
                return linear(input, weight, bias) if linear is not None else super()._forward(input, as_native(weight), bias)

        class Embedding(base.Embedding):
            def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
                shape = (self.num_embeddings, self.embedding_dim)
                if _load_own(self, state_dict, prefix, shape, base._compute_dtype):
                    _load_rest(self, state_dict, prefix, *args)
                else:
                    super()._load_from_state_dict(state_dict, prefix, *args)

            def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", **kwargs: Any) -> Any:
                sd = super().state_dict(*args, destination=destination, prefix=prefix, **kwargs)
                return _write_marker(self, sd, prefix)

            def forward_comfy_cast_weights(self, input: torch.Tensor, out_dtype: torch.dtype | None = None) -> Any:
                if getattr(self, "quant_format", None) != GGUF or self.weight_function:
                    return super().forward_comfy_cast_weights(input, out_dtype=out_dtype)
                return _look_up(self, input, out_dtype)

    return Operations


def _load_own(module: Any, state_dict: Any, prefix: str, shape: tuple[int, int], dtype: torch.dtype) -> bool:
    """Take a weight in a format of ours out of the state dict; False, with nothing taken, when it is in another one."""
    marker = state_dict.get(prefix + MARKER[1:])
    config = json.loads(bytes(marker.tolist())) if marker is not None else {}
    if config.get("format") not in OWN_FORMATS:
        return False
    del state_dict[prefix + MARKER[1:]]
    data = state_dict.pop(prefix + "weight")
    scale = state_dict.pop(prefix + "weight_scale", None)
    if config["format"] == GGUF:
        params: Any = GGUFLayout.Params(config["qtype"], dtype, shape)
    elif config["format"] == ROW_FP8:
        params = RowFP8Layout.Params(scale, dtype, shape)
    else:
        sides = {name: state_dict.pop(f"{prefix}weight_{name}") for name in ("proj_down", "proj_up", "smooth_factor")}
        params = SVDQuantLayout.Params(scale, dtype, shape, **sides)
    module.quant_format, module.layout_type = config["format"], OWN_LAYOUTS[config["format"]]
    module.weight = torch.nn.Parameter(QuantizedTensor(data, module.layout_type, params), requires_grad=False)
    return True


def _load_rest(module: Any, state_dict: Any, prefix: str, *args: Any) -> None:
    """Load the bias as torch does; the weight is in place already."""
    missing_keys: list[str] = args[2]
    torch.nn.Module._load_from_state_dict(module, state_dict, prefix, *args)
    if prefix + "weight" in missing_keys:
        missing_keys.remove(prefix + "weight")


def _write_marker(module: Any, sd: Any, prefix: str) -> Any:
    """Complete the marker of a GGUF weight: ComfyUI writes the format alone."""
    if getattr(module, "quant_format", None) == GGUF:
        text = json.dumps({"format": GGUF, "qtype": module.weight._params.qtype}).encode()
        sd[prefix + MARKER[1:]] = torch.tensor(list(text), dtype=torch.uint8)
    return sd


def _look_up(module: Any, tokens: torch.Tensor, out_dtype: torch.dtype | None) -> torch.Tensor:
    """Return the embeddings of tokens, expanding their rows only."""
    weight, _, stream = comfy.ops.cast_bias_weight(
        module, device=tokens.device, dtype=module.weight.dtype, bias_dtype=module.weight.dtype, offloadable=True
    )
    if isinstance(weight, QuantizedTensor):
        rows = weight._qdata.index_select(0, tokens.flatten())
        out = ops.dequantize(rows, weight._params.qtype, weight.dtype).view(*tokens.shape, -1)
    else:  # a LoRA was added while it was streamed
        out = torch.nn.functional.embedding(tokens, weight)
    comfy.ops.uncast_bias_weight(module, weight, None, stream)
    return out.to(out_dtype or out.dtype)
