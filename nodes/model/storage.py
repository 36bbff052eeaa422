"""How each linear weight of a checkpoint is stored, whatever way the file says it.

Files mark quantised weights in four ways: a `comfy_quant` tensor per layer, a `_quantization_metadata` header, the older
`scaled_fp8` with `scale_weight`, or not at all. All become one map: layer name -> the JSON of a `comfy_quant` marker.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import safetensors

from ...kernels.formats import DTYPE_BITS, FLOAT_DTYPES, FORMATS, FP8_DTYPES, StorageFormat
from .checkpoint import Checkpoint, CheckpointError, TensorInfo

MARKER = ".comfy_quant"
# The format of a layer of a GGUF file; its configuration also has "qtype", a key of QTYPES.
GGUF = "gguf"
# Formats that ComfyUI does not have; converters write the same words.
ROW_FP8, SVDQUANT = "float8_e4m3fn_rowwise", "svdquant_w4a4"
# Another word for a format of ComfyUI's: its INT8 may have a scale per row.
_SYNONYMS = {"int8_rowwise": "int8_tensorwise"}
# Endings of what stands beside a quantised weight, under today's names.
SIDE_TENSORS = (
    MARKER, ".weight_scale", ".weight_scale_2", ".input_scale", ".pre_quant_scale", ".weight_proj_down", ".weight_proj_up",
    ".weight_smooth_factor",
)  # fmt: skip
_MAX_MARKER_BYTES = 64 * 1024
# Tensors of formats that have no place in ComfyUI: SVDQuant of Nunchaku itself, bitsandbytes, AWQ and GPTQ.
_FOREIGN_QUANT = re.compile(r"\.(qweight|qzeros|wscales|wzeros|absmax|quant_map|quant_state\.\w+|proj_down|smooth_factor)$")


@dataclass(frozen=True)
class Storage:
    """How the tensors of one model are stored.

    Args:
        layers: quantised layer -> its `comfy_quant` configuration (always with "format").
        rename: tensor name in the file (without prefix) -> name that ComfyUI expects.
        drop: tensors of the file that carry no weights (old markers, scales of exactly 1).
        dtypes: parameter counts per dtype of the tensors that are not quantised.
        parameters: number of weights, 4-bit ones counted unpacked.
        stored_bytes: size of all weights and scales as stored.
    """

    layers: Mapping[str, Mapping[str, Any]]
    rename: Mapping[str, str]
    drop: frozenset[str]
    dtypes: Mapping[str, int]
    parameters: int
    stored_bytes: int

    def format_counts(self) -> Counter[str]:
        """Return how many layers each quantised format has."""
        return Counter(str(config["format"]) for config in self.layers.values())

    def titles(self) -> list[str]:
        """Return the names, for people, of the formats of the quantised layers, the most common first."""
        counts = Counter(_title(config) for config in self.layers.values())
        return [title for title, _ in counts.most_common()]

    @property
    def title(self) -> str:
        """The format's name for people: 'BF16', 'scaled FP8 (E4M3)', 'mixed: ...'."""
        names = self.titles()
        if not names:
            main = max(self.dtypes, key=lambda dtype: self.dtypes[dtype], default="F32")
            plain = {"F32": "FP32", "F16": "FP16", "F8_E4M3": "plain FP8 (E4M3)", "F8_E5M2": "plain FP8 (E5M2)"}
            return plain.get(main, main)
        return names[0] if len(names) == 1 else "mixed: " + ", ".join(names)


def _title(config: Mapping[str, Any]) -> str:
    return f"GGUF {config['qtype']}" if config["format"] == GGUF else FORMATS[config["format"]].title


def detect_storage(
    checkpoint: Checkpoint,
    tensors: Mapping[str, TensorInfo],
    prefix: str,
    declared: Mapping[str, Mapping[str, Any]] | None = None,
) -> Storage:
    """Find how each weight is stored and check that its scales are there.

    Args:
        checkpoint: the open checkpoint (its small marker tensors are read).
        tensors: the model's tensors by name without prefix.
        prefix: what stood before the names in the file.
        declared: layer -> configuration, where the file says it in a way that is not read here.

    Raises: CheckpointError for a format ComfyUI does not know, or for scales that are missing or have a wrong shape.
    """
    label = checkpoint.label
    _refuse_foreign_formats(tensors, label)
    rename, drop = _old_names(checkpoint, tensors, prefix)
    current = {rename.get(name, name): info for name, info in tensors.items() if name not in drop}
    layers = _declared_layers(checkpoint, tensors, current, prefix)
    layers |= {layer: dict(config) for layer, config in (declared or {}).items()}
    for name, info in current.items():
        if name.endswith(".weight") and name[: -len(".weight")] not in layers:
            guessed = _undeclared(name[: -len(".weight")], info, current, label)
            if guessed:
                layers[name[: -len(".weight")]] = guessed
    _add_full_precision_flag(layers, tensors)
    for layer, config in layers.items():
        _check_layer(layer, FORMATS[config["format"]], current, label)
        _check_options(layer, config, current[f"{layer}.weight"], label)
    return _summed(layers, rename, drop, current)


def logical_shapes(tensors: Mapping[str, TensorInfo], storage: Storage) -> dict[str, tuple[int, ...]]:
    """Return name -> shape with packed 4-bit weights counted unpacked."""
    shapes = {name: info.shape for name, info in tensors.items() if name not in storage.drop}
    for layer, config in storage.layers.items():
        key = f"{layer}.weight"
        if key in shapes and config["format"] != GGUF:
            shapes[key] = FORMATS[config["format"]].logical_shape(shapes[key])
    return shapes


def _refuse_foreign_formats(tensors: Iterable[str], label: str) -> None:
    for name in tensors:
        match = _FOREIGN_QUANT.search(name)
        if match:
            raise CheckpointError(
                f"{label}: '{name}' belongs to a format that is not read here (Nunchaku's own, bitsandbytes, AWQ or GPTQ). "
                f"Use a file in one of these: BF16, FP8, {', '.join(FORMATS)}."
            )


def _old_names(checkpoint: Checkpoint, tensors: Mapping[str, TensorInfo], prefix: str) -> tuple[dict[str, str], frozenset[str]]:
    """Map `scale_weight` and `scale_input` to today's names; drop the old marker and input scales of exactly 1."""
    rename: dict[str, str] = {}
    ones: dict[str, TensorInfo] = {}
    for name, info in tensors.items():
        if name.endswith(".scale_weight"):
            rename[name] = name[: -len("scale_weight")] + "weight_scale"
        elif name.endswith(".scale_input"):
            rename[name] = name[: -len("scale_input")] + "input_scale"
            if info.numel == 1 and info.dtype in FLOAT_DTYPES:
                ones[name] = info
    drop = {name for name, tensor in read_small_tensors(checkpoint, prefix, ones).items() if tensor.item() == 1.0}
    return rename, frozenset(drop | ({"scaled_fp8"} & tensors.keys()))


def read_small_tensors(checkpoint: Checkpoint, prefix: str, tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    """Read small tensors, given without prefix, to the CPU; each file is opened once, as opening it parses its whole header."""
    out: dict[str, Any] = {}
    for file in checkpoint.files:
        names = [name for name, info in tensors.items() if info.file == file]
        if names:
            with safetensors.safe_open(str(file), framework="pt") as opened:
                out |= {name: opened.get_tensor(prefix + name) for name in names}
    return out


def _declared_layers(
    checkpoint: Checkpoint, tensors: Mapping[str, TensorInfo], current: Mapping[str, TensorInfo], prefix: str
) -> dict[str, dict[str, Any]]:
    """Collect the layers that the file itself declares as quantised."""
    label = checkpoint.label
    layers: dict[str, dict[str, Any]] = {}
    header = checkpoint.metadata.get("_quantization_metadata")
    if header is not None:
        for name, config in _header_layers(header, label).items():
            layer = name[len(prefix) :] if prefix and name.startswith(prefix) else name
            if f"{layer}.weight" in current:
                layers[layer] = _checked_config(layer, config, label)
    for layer, config in _read_markers(checkpoint, tensors, prefix).items():
        layers[layer] = _checked_config(layer, config, label)
    if "scaled_fp8" in tensors:
        for name in current:
            layer = name[: -len(".weight_scale")]
            if name.endswith(".weight_scale") and layer not in layers and f"{layer}.weight" in current:
                dtype = current[f"{layer}.weight"].dtype
                if dtype in FP8_DTYPES:
                    layers[layer] = {"format": FP8_DTYPES[dtype]}
    return layers


def _header_layers(header: str, label: str) -> Mapping[str, Any]:
    try:
        parsed = json.loads(header)
        layers = parsed["layers"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{label}: the header's _quantization_metadata cannot be read ({error!r}).") from error
    if not isinstance(layers, dict):
        raise CheckpointError(f"{label}: the header's _quantization_metadata has no map 'layers'.")
    return layers


def _read_markers(checkpoint: Checkpoint, tensors: Mapping[str, TensorInfo], prefix: str) -> dict[str, Any]:
    """Return layer -> parsed JSON of every `comfy_quant` tensor."""
    markers = {name: info for name, info in tensors.items() if name.endswith(MARKER)}
    for name, info in markers.items():
        if info.dtype != "U8" or info.numel > _MAX_MARKER_BYTES:
            raise CheckpointError(
                f"{checkpoint.label}: '{prefix}{name}' is {info.dtype} {list(info.shape)}; a short U8 text is needed."
            )
    configs: dict[str, Any] = {}
    for name, tensor in read_small_tensors(checkpoint, prefix, markers).items():
        try:
            configs[name[: -len(MARKER)]] = json.loads(bytes(tensor.flatten().tolist()))
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{checkpoint.label}: '{prefix}{name}' holds no valid JSON ({error}).") from error
    return configs


def _checked_config(layer: str, config: Any, label: str) -> dict[str, Any]:
    format_name = config.get("format") if isinstance(config, dict) else None
    format_name = _SYNONYMS.get(format_name, format_name) if isinstance(format_name, str) else format_name
    if not isinstance(format_name, str) or format_name not in FORMATS:
        raise CheckpointError(
            f"{label}: layer '{layer}' is stored as '{format_name}'; known formats are {', '.join(FORMATS)}. "
            "Use a file in one of these, or update ERNIE-Image Fast."
        )
    return {**config, "format": format_name}


def _undeclared(layer: str, info: TensorInfo, current: Mapping[str, TensorInfo], label: str) -> dict[str, Any] | None:
    """Name the format of a layer without a marker from its weight and scales; None for an ordinary weight.

    Raises: CheckpointError when scales are there but do not tell which format they belong to.
    """
    scale = current.get(f"{layer}.weight_scale")
    if scale is None:
        if info.dtype in FP8_DTYPES or info.dtype in FLOAT_DTYPES:
            return None
        raise CheckpointError(
            f"{label}: '{layer}.weight' is {info.dtype} without a scale or a format marker; it cannot be read back. "
            f"Known formats are BF16, FP16, FP32, FP8, {', '.join(FORMATS)}."
        )
    if len(info.shape) == 2 and info.dtype in FP8_DTYPES and scale.numel == 1:
        return {"format": FP8_DTYPES[info.dtype]}
    if len(info.shape) == 2 and info.dtype == "F8_E4M3" and scale.dtype == "F32" and scale.shape == (info.shape[0], 1):
        return {"format": ROW_FP8}
    for name in ("mxfp8", "nvfp4"):
        candidate = FORMATS[name]
        fits = info.dtype == candidate.weight_dtype and scale.dtype in candidate.scale_dtypes and len(info.shape) == 2
        if fits and scale.numel in candidate.scale_sizes(_pair(candidate.logical_shape(info.shape))):
            return {"format": name}
    raise CheckpointError(
        f"{label}: layer '{layer}' has a {info.dtype} weight {list(info.shape)} and a {scale.dtype} scale "
        f"{list(scale.shape)} but no format marker, and no known format looks like this ({', '.join(FORMATS)}). "
        "Convert the file again with a tool that writes comfy_quant markers."
    )


def _pair(shape: tuple[int, ...]) -> tuple[int, int]:
    return shape[0], shape[1]


def _add_full_precision_flag(layers: Mapping[str, dict[str, Any]], tensors: Mapping[str, TensorInfo]) -> None:
    """An old `scaled_fp8` marker of two elements asks for matrix products in full precision."""
    marker = tensors.get("scaled_fp8")
    if marker is not None and marker.numel == 2:
        for config in layers.values():
            config["full_precision_matrix_mult"] = True


def _check_layer(layer: str, storage_format: StorageFormat, current: Mapping[str, TensorInfo], label: str) -> None:
    """Check a quantised layer's weight and scales against its format."""
    what = f"{label}: layer '{layer}' ({storage_format.title})"
    weight = current.get(f"{layer}.weight")
    scale = current.get(f"{layer}.weight_scale")
    if weight is None:
        raise CheckpointError(f"{what} has no weight. The file is incomplete; download it again.")
    if len(weight.shape) != 2 or weight.dtype != storage_format.weight_dtype:
        raise CheckpointError(
            f"{what} has a {weight.dtype} weight {list(weight.shape)}; {storage_format.weight_dtype} with two "
            "dimensions is needed. The marker and the weight do not belong together."
        )
    if scale is None:
        raise CheckpointError(f"{what} has no weight_scale. The file is incomplete; download it again.")
    sizes = storage_format.scale_sizes(_pair(storage_format.logical_shape(weight.shape)))
    if scale.dtype not in storage_format.scale_dtypes or scale.numel not in sizes:
        raise CheckpointError(
            f"{what} has a {scale.dtype} weight_scale {list(scale.shape)}; {' or '.join(storage_format.scale_dtypes)} "
            f"with {' or '.join(map(str, sorted(sizes)))} elements is needed."
        )
    if storage_format.name == SVDQUANT:
        _check_svdquant(layer, current, label)
    second = current.get(f"{layer}.weight_scale_2")
    if storage_format.global_scale and (second is None or second.numel != 1):
        raise CheckpointError(f"{what} needs one number in weight_scale_2; found {'none' if second is None else list(second.shape)}.")


def _check_svdquant(layer: str, current: Mapping[str, TensorInfo], label: str) -> None:
    """Check the low-rank branch and the smoothing of an SVDQuant layer against its packed weight (O, I / 2)."""
    rows, packed = current[f"{layer}.weight"].shape
    down = current.get(f"{layer}.weight_proj_down")
    rank = down.shape[1] if down is not None and len(down.shape) == 2 else 0
    wanted = {"proj_down": (packed * 2, rank), "proj_up": (rows, rank), "smooth_factor": (packed * 2,)}
    for name, shape in wanted.items():
        info = current.get(f"{layer}.weight_{name}")
        if info is None or info.shape != shape or info.dtype not in FLOAT_DTYPES or not rank:
            found = "none" if info is None else f"{info.dtype} {list(info.shape)}"
            raise CheckpointError(
                f"{label}: layer '{layer}' (SVDQuant W4A4) needs weight_{name} with the shape {list(shape)}; found {found}. "
                "The file is incomplete or of another SVDQuant program; download it again."
            )


def _check_svdquant_options(layer: str, options: Mapping[str, Any], label: str) -> None:
    """Refuse what the layout cannot compute.

    convert_to_quant (at commit 0355180) takes the low-rank branch from the weight before the smoothing and applies it as if from the one
    after, which is the same only for smooth_mode "ones". `act_unsigned` shifts the inputs of a layer behind a GELU; ERNIE-Image has none.
    """
    for name, allowed, why in (
        ("smooth_mode", "ones", "the converter leaves the smoothing out of the low-rank branch"),
        ("act_unsigned", False, "the inputs of ERNIE-Image's layers are signed"),
    ):
        if options.get(name) not in (None, allowed):
            raise CheckpointError(
                f"{label}: layer '{layer}' (SVDQuant W4A4) has {name} {options[name]!r}, only {allowed!r} is read: {why}, so its pictures "
                "would be wrong. Convert the file again with that, or use the BF16 file with weight_format 'svdquant_w4a4'."
            )


def _check_options(layer: str, config: Mapping[str, Any], weight: TensorInfo, label: str) -> None:
    """Check the options of a marker; ComfyUI looks for them at the top and under "params"."""
    params = config.get("params")
    options = {**(params if isinstance(params, dict) else {}), **config}
    if config["format"] == SVDQUANT:
        _check_svdquant_options(layer, options, label)
    if not options.get("convrot") and config["format"] != "convrot_w4a4":
        return
    columns = FORMATS[config["format"]].logical_shape(weight.shape)[1]
    group_size = options.get("convrot_groupsize", 256)
    if type(group_size) is not int or group_size < 1 or columns % group_size:
        raise CheckpointError(
            f"{label}: layer '{layer}' has convrot_groupsize {group_size!r}; a divisor of its {columns} inputs is needed."
        )
    if options.get("linear_dtype", "int4") not in ("int4", "int8"):
        raise CheckpointError(f"{label}: layer '{layer}' has linear_dtype {options['linear_dtype']!r}; int4 or int8 is needed.")


def _summed(
    layers: Mapping[str, Mapping[str, Any]], rename: Mapping[str, str], drop: frozenset[str], current: Mapping[str, TensorInfo]
) -> Storage:
    """Count parameters and bytes and build the Storage."""
    dtypes: Counter[str] = Counter()
    parameters = stored_bits = 0
    for name, info in current.items():
        if name.endswith(MARKER):
            continue
        stored_bits += info.numel * DTYPE_BITS.get(info.dtype, 32)
        layer, _, kind = name.rpartition(".")
        if layer in layers and kind == "weight":
            parameters += info.numel * FORMATS[layers[layer]["format"]].packing
        elif kind in ("weight", "bias"):
            parameters += info.numel
            dtypes[info.dtype] += info.numel
    return Storage(layers, rename, drop, dict(dtypes), parameters, stored_bits // 8)
