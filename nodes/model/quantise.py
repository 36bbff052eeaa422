"""Quantise the linear layers of ERNIE-Image while it is loaded, into formats that ComfyUI runs and saves."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import comfy.model_management
import comfy.utils
import torch
from comfy.quant_ops import QUANT_ALGOS, QuantizedTensor

from ...kernels.formats import FLOAT_DTYPES, FORMATS
from .architecture import BLOCK_LINEARS, ErnieArchitecture
from .checkpoint import CheckpointError
from .layouts import OWN_LAYOUTS
from .storage import MARKER, Storage

AS_STORED = "as stored"
# ConvRot rotates groups of this many inputs; powers of four, the largest that divides a layer's inputs is taken.
_ROTATIONS = (256, 64, 16)


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """One choice of the loader's `weight_format`.

    Args:
        title: the format's name for people.
        format: its word in a `comfy_quant` marker.
        options: what its layout's `quantize` is told beside the weight.
        rotated: True when groups of inputs are rotated first (ConvRot).
    """

    title: str
    format: str
    options: Mapping[str, Any]
    rotated: bool = False


WEIGHT_FORMATS: dict[str, WeightFormat] = {
    "fp8": WeightFormat("scaled FP8", "float8_e4m3fn", {"scale": "recalculate"}),
    "fp8_rowwise": WeightFormat("row-wise FP8", "float8_e4m3fn_rowwise", {}),
    "int8_convrot": WeightFormat("INT8 ConvRot", "int8_tensorwise", {"per_channel": True, "convrot": True}, rotated=True),
    "mxfp8": WeightFormat("MXFP8", "mxfp8", {}),
    "nvfp4": WeightFormat("NVFP4", "nvfp4", {"scale": "recalculate"}),
    "convrot_w4a4": WeightFormat("ConvRot W4A4", "convrot_w4a4", {}, rotated=True),
    "svdquant_w4a4": WeightFormat("SVDQuant W4A4", "svdquant_w4a4", {}),
}

_KEEP = re.compile(r"^(?:(?P<first>\d{1,4})(?:-(?P<last>\d{1,4}))?)?(?:(?P<dot>\.|^)(?P<name>[a-z][a-z0-9_.]*))?$")


@dataclass(frozen=True, slots=True)
class QuantisePolicy:
    """Which weights are quantised, and how. The layers outside of the blocks always stay in 16 bits.

    Args:
        weight_format: a key of WEIGHT_FORMATS.
        keep: what stays in 16 bits: blocks, layers, or layers of blocks, as in "0, 34-35, to_v, 1.self_attention".

    Raises: ValueError when one of the two is no such thing.
    """

    weight_format: str
    keep: str = ""

    def __post_init__(self) -> None:
        if self.weight_format not in WEIGHT_FORMATS:
            raise ValueError(f"weight_format is '{self.weight_format}'; allowed are {', '.join((AS_STORED, *WEIGHT_FORMATS))}.")
        self._rules()

    def _rules(self) -> list[tuple[range | None, str]]:
        """Return (blocks or None for all, name or "" for all layers) of each entry of `keep`."""
        rules: list[tuple[range | None, str]] = []
        for entry in filter(None, (part.strip() for part in self.keep.split(","))):
            match = _KEEP.match(entry)
            name = (match["name"] or "") if match else ""
            if match is None or (name and not any(_is_part(name, linear) for linear in BLOCK_LINEARS)):
                raise ValueError(
                    f"keep_16bit has '{entry}'; allowed are block numbers ('0', '34-35'), layers ('to_v', 'mlp'), or both "
                    f"('0.self_attention'), with commas between. Layers are {', '.join(BLOCK_LINEARS)}."
                )
            blocks = None if match["first"] is None else range(int(match["first"]), int(match["last"] or match["first"]) + 1)
            rules.append((blocks, name))
        return rules

    def layers(self, architecture: ErnieArchitecture) -> list[str]:
        """Return the names of the layers that are quantised.

        Raises: ValueError when `keep` names a block that the model does not have, or leaves nothing to quantise.
        """
        rules = self._rules()
        for blocks, _ in rules:
            if blocks is not None and (len(blocks) == 0 or blocks[-1] >= architecture.num_layers):
                raise ValueError(
                    f"keep_16bit has block {blocks.start if len(blocks) < 2 else f'{blocks[0]}-{blocks[-1]}'}; this model has "
                    f"blocks 0 to {architecture.num_layers - 1}, and a range runs from the lower to the higher number."
                )
        names = [
            f"layers.{block}.{linear}"
            for block in range(architecture.num_layers)
            for linear in BLOCK_LINEARS
            if not any((blocks is None or block in blocks) and (not name or _is_part(name, linear)) for blocks, name in rules)
        ]
        if not names:
            raise ValueError(f"keep_16bit is '{self.keep}', which keeps every layer in 16 bits. Name fewer of them.")
        return names


def _is_part(name: str, linear: str) -> bool:
    """Tell whether a name means a layer: a run of its dotted parts ('mlp', 'to_out', 'self_attention.to_v')."""
    return f".{name}." in f".{linear}."


def require_plain(storage: Storage, policy: QuantisePolicy, label: str) -> None:
    """Raise CheckpointError when a checkpoint is quantised already: quantising twice adds both errors."""
    if storage.layers or any(dtype not in FLOAT_DTYPES for dtype in storage.dtypes):
        raise CheckpointError(
            f"{label}: stored as {storage.title}, and weight_format is '{policy.weight_format}'. Only BF16, FP16 and FP32 files are "
            f"quantised at load; choose '{AS_STORED}', or load the BF16 file."
        )


def quantise_state_dict(
    sd: dict[str, torch.Tensor], architecture: ErnieArchitecture, policy: QuantisePolicy, device: torch.device, label: str
) -> dict[str, Mapping[str, Any]]:
    """Quantise the weights of a state dict in place, layer by layer, with a progress bar.

    Args:
        sd: bare names -> tensors; each quantised weight is replaced by its stored tensors and marker, on the CPU.
        architecture: the model's sizes.
        policy: which layers, and how.
        device: where the arithmetic runs.
        label: the file, for messages.

    Returns: layer -> its `comfy_quant` configuration.
    Raises:
        CheckpointError: a layer's size does not fit the format, or this ComfyUI does not know the format.
        InterruptProcessingException: the user cancelled.
    """
    chosen = WEIGHT_FORMATS[policy.weight_format]
    layout = _layout(chosen.format, label)
    names = policy.layers(architecture)
    progress = comfy.utils.ProgressBar(len(names))
    layers: dict[str, Mapping[str, Any]] = {}
    for name in names:
        comfy.model_management.throw_exception_if_processing_interrupted()
        weight = sd[f"{name}.weight"]
        options, marker = _options(chosen, weight, f"{label}: layer '{name}'")
        # comfy-kitchen's GPU kernels for 4-bit formats take 16-bit weights only.
        dtype = torch.bfloat16 if device.type != "cpu" and weight.dtype == torch.float32 else weight.dtype
        quantised = QuantizedTensor.from_float(weight.to(device, dtype, copy=True), layout, **options)
        for key, tensor in quantised.state_dict(f"{name}.weight").items():
            sd[key] = tensor.to("cpu").contiguous()
        sd[name + MARKER] = torch.tensor(list(json.dumps(marker).encode()), dtype=torch.uint8)
        layers[name] = marker
        progress.update(1)
    return layers


def _layout(format_name: str, label: str) -> str:
    if format_name in OWN_LAYOUTS:
        return OWN_LAYOUTS[format_name]
    if format_name not in QUANT_ALGOS:
        raise CheckpointError(f"{label}: this ComfyUI does not know the format {format_name}. Update ComfyUI, or choose another.")
    return str(QUANT_ALGOS[format_name]["comfy_tensor_layout"])


def _options(chosen: WeightFormat, weight: torch.Tensor, where: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (arguments of the layout's `quantize`, marker) for one weight. Raises CheckpointError when it does not fit."""
    columns = weight.shape[1]
    multiple = max(FORMATS[chosen.format].group_size, 16)
    if columns % multiple:
        raise CheckpointError(
            f"{where} has {columns} inputs; {chosen.title} needs a multiple of {multiple}. Choose another weight_format."
        )
    options, marker = dict(chosen.options), {"format": chosen.format}
    if chosen.rotated:
        group = next(size for size in _ROTATIONS if columns % size == 0)
        options["convrot_groupsize"] = group
        marker |= {"convrot_groupsize": group}
        if chosen.format == "int8_tensorwise":
            marker |= {"convrot": True}
    return options, marker


