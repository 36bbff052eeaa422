"""Read "Nunchaku Lite" files: SVDQuant W4A4 blocks as `svdquant_w4a4` layers, AWQ W4A16 layers expanded to 16 bits.

rootonchair/diffuse-compressor writes them; its docs/nunchaku_lite_manifest_v1.md says what the header promises about the tensors, and
examples/text_to_image/quantize_ernie_image.py how ERNIE-Image is stored: AWQ outside of the blocks, without the reordering that the
manifest calls `adanorm_awq_w4a16`. Files that diffusers saves have the same tensors and no manifest.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn

import torch

from ...kernels import nunchaku_lite as lite
from ...kernels.formats import FLOAT_DTYPES
from .checkpoint import Checkpoint, CheckpointError, TensorInfo
from .storage import SVDQUANT, read_small_tensors

_SVDQ, _AWQ = "svdq_w4a4", "awq_w4a16"
_CODES = ".qweight"
# A tensor of an SVDQuant layer -> its name in a `comfy_quant` file.
_NAMES = {
    "qweight": "weight",
    "wscales": "weight_scale",
    "proj_down": "weight_proj_down",
    "proj_up": "weight_proj_up",
    "smooth_factor": "weight_smooth_factor",
}
_OWN = {*_NAMES, *lite.AWQ_TENSORS, "wcscales", "wtscale", "smooth_factor_orig"}
_DTYPES = {
    "I8": torch.int8, "I32": torch.int32, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32,
    "U8": torch.uint8, "F8_E4M3": torch.float8_e4m3fn,
}  # fmt: skip
_ADVICE = (
    "Use a Nunchaku Lite file of INT4, an SVDQuant file with comfy_quant markers, or the BF16 file with weight_format 'svdquant_w4a4'."
)


def as_comfy(
    checkpoint: Checkpoint, tensors: Mapping[str, TensorInfo], prefix: str
) -> tuple[Mapping[str, TensorInfo], dict[str, dict[str, Any]]]:
    """Describe the tensors of a Nunchaku Lite file as those that `unpack_layers` makes of them; others stay as they are.

    Args:
        checkpoint: the open checkpoint; small tensors of it are read.
        tensors: the model's tensors by name without prefix.
        prefix: what stood before the names in the file.

    Returns: (the tensors; layer -> `comfy_quant` configuration of those that stay quantised).
    Raises: CheckpointError for what is not read: FP4, reordered or logical layouts, a bias in a block.
    """
    layers = _layers(tensors)
    if not layers:
        return tensors, {}
    label = checkpoint.label
    _check_header(checkpoint, layers, prefix)
    out = {name: info for name, info in tensors.items() if not _is_part(name, layers)}
    biases: dict[str, TensorInfo] = {}
    for layer, kind in layers.items():
        parts = {name: tensors[f"{layer}.{name}"] for name in _OWN if f"{layer}.{name}" in tensors}
        _check_layer(layer, kind, parts, label)
        if kind == _AWQ:
            rows, columns = parts["qweight"].shape
            out[f"{layer}.weight"] = TensorInfo(parts["wscales"].dtype, (rows * 4, columns * 2), parts["qweight"].file)
            continue
        out |= {f"{layer}.{name}": parts[stored] for stored, name in _NAMES.items()}
        if f"{layer}.bias" in tensors:
            biases[f"{layer}.bias"] = out.pop(f"{layer}.bias")
    _check_zero(checkpoint, biases, prefix)
    return out, {layer: {"format": SVDQUANT} for layer, kind in layers.items() if kind == _SVDQ}


def unpack_layers(sd: dict[str, torch.Tensor]) -> None:
    """Replace the layers of a Nunchaku Lite file, which `as_comfy` has checked, in a state dict by those that ComfyUI can hold.

    Args:
        sd: bare names -> tensors; one without such layers stays as it is.
    """
    for layer, kind in _layers(sd).items():
        parts = {name: sd.pop(f"{layer}.{name}") for name in _OWN if f"{layer}.{name}" in sd}
        if kind == _AWQ:
            sd[f"{layer}.weight"] = lite.unpack_awq(parts)
            continue
        weight = lite.unpack(parts)
        sd |= {f"{layer}.{name}": getattr(weight, stored) for stored, name in _NAMES.items()}
        sd.pop(f"{layer}.bias", None)


def _layers(names: Mapping[str, Any]) -> dict[str, str]:
    """Return layer -> what the manifest calls its kind. AWQ and GPTQ files of other programs have `scales` beside `qweight`."""
    layers = [name[: -len(_CODES)] for name in names if name.endswith(_CODES)]
    return {layer: _AWQ if f"{layer}.wzeros" in names else _SVDQ for layer in layers if f"{layer}.wscales" in names}


def _is_part(name: str, layers: Mapping[str, str]) -> bool:
    layer, _, last = name.rpartition(".")
    return last in _OWN and layer in layers


def _check_layer(layer: str, kind: str, parts: Mapping[str, TensorInfo], label: str) -> None:
    described = {name: (_DTYPES.get(info.dtype), info.shape) for name, info in parts.items()}
    try:
        (lite.check_awq if kind == _AWQ else lite.check)(described)
    except ValueError as error:
        raise CheckpointError(f"{label}: layer '{layer}' of a Nunchaku Lite file: {error}. {_ADVICE}") from error


def _check_zero(checkpoint: Checkpoint, biases: Mapping[str, TensorInfo], prefix: str) -> None:
    """Refuse a bias in a block unless it is zero: ERNIE-Image has none there, and those of shifted inputs need the shift too."""
    plain = {name: info for name, info in biases.items() if info.dtype in FLOAT_DTYPES}
    zero = {name for name, tensor in read_small_tensors(checkpoint, prefix, plain).items() if not tensor.count_nonzero()}
    for name in biases:
        if name not in zero:
            _refuse(checkpoint.label, f"'{prefix}{name}'", "not zero", "no bias in a block, or one of zeros")


def _check_header(checkpoint: Checkpoint, layers: Mapping[str, str], prefix: str) -> None:
    """Check what the header of diffuse-compressor says; diffusers writes none.

    The manifest is left out where tensors are not in Nunchaku's order ("logical"), which their shapes do not show.
    """
    text = checkpoint.metadata.get("quantization_config")
    if text is None:
        return
    label = checkpoint.label
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{label}: the header's quantization_config cannot be read ({error}). Download the file again.") from error
    config = config if isinstance(config, dict) else {}
    manifest = config.get("runtime_manifest")
    if not isinstance(manifest, dict):
        _refuse(label, "runtime_manifest in the header", "missing", "a file with one; without it the tensors are in the 'logical' order")
    wanted: dict[str, Any] = {
        "schema": "nunchaku_lite.runtime_manifest", "version": 1, "nunchaku_format_version": 1, "structural_patches": [],
    }  # fmt: skip
    _compare(label, "runtime_manifest's", manifest, wanted)
    _compare(label, "quantization_config's", {"method": "svdquant", **config}, {"method": "svdquant"})
    targets = manifest.get("targets")
    for target in targets if isinstance(targets, list) else []:
        name = target.get("checkpoint_prefix") if isinstance(target, dict) else None
        layer = name[len(prefix) :] if isinstance(name, str) and name.startswith(prefix) else name
        if isinstance(layer, str) and layer in layers:
            _compare(label, f"layer '{layer}':", target, {"precision": "int4", "nunchaku_op": layers[layer], "group_size": 64})


def _compare(label: str, where: str, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    for key, value in wanted.items():
        if found.get(key) != value:
            _refuse(label, f"{where} {key}", repr(found.get(key))[:60], repr(value))


def _refuse(label: str, what: str, found: str, allowed: str) -> NoReturn:
    raise CheckpointError(f"{label}: a Nunchaku Lite file that is not read: {what} is {found}; allowed is {allowed}. {_ADVICE}")
