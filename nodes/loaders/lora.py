"""Apply a LoRA file to an ERNIE-Image model and its text encoder: match, check, then patch a clone.

Everything that can be wrong with the file is found here, before sampling: ComfyUI itself only logs a line per layer.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import comfy.lora
import comfy.lora_convert
import comfy.model_base
import torch

from ..model.checkpoint import Checkpoint, CheckpointError
from ..model.foreign import describe
from ..model.state_dict import read_tensors
from .files import open_model
from .lora_alpha import StatedAlpha, stated_alpha
from .lora_keys import (
    DOTTED_PREFIXES,
    FLAT_PREFIXES,
    group_keys,
    is_text_encoder,
    match_modules,
    model_aliases,
    text_encoder_aliases,
    trained_for,
)

logger = logging.getLogger("ernie_fast")

CATEGORY = "loras"
_FULL = ("diff", "set_weight", "w_norm")
# Factors of a convolution's kernel (Tucker decomposition): ERNIE-Image has no kernel larger than one pixel.
_KERNEL = ("lora_mid.weight", "hada_t1", "hada_t2", "lokr_t2")

Shape = tuple[int, ...]


@dataclass(frozen=True)
class _LoraFile:
    """A LoRA file: its tensors by name, module -> {ending: tensor name}, the names with an unknown ending, and the alpha
    stated outside the tensors for the model's and the text encoder's modules."""

    label: str
    tensors: Mapping[str, torch.Tensor]
    modules: Mapping[str, Mapping[str, str]]
    unknown: list[str]
    model_alpha: StatedAlpha
    text_alpha: StatedAlpha

    @property
    def model_modules(self) -> list[str]:
        """The modules of the diffusion model."""
        return [name for name in self.modules if not is_text_encoder(name)]

    @property
    def text_modules(self) -> list[str]:
        """The modules of the text encoder."""
        return [name for name in self.modules if is_text_encoder(name)]


@dataclass(frozen=True)
class _Match:
    """What of the file changes one network: patches for ComfyUI, the number of their modules, the modules left over."""

    patches: Mapping[str, Any]
    count: int
    unmatched: list[str]


def open_lora(name: str) -> Checkpoint:
    """Open a LoRA file; only its header is read.

    Args:
        name: the file's name in ComfyUI's folder "loras".

    Raises: CheckpointError when it is missing, broken, of another type, or no LoRA.
    """
    checkpoint = open_model(CATEGORY, name)
    modules, _ = group_keys(checkpoint.tensors, name)
    if not modules:
        raise CheckpointError(f"{name}: this is no LoRA. {describe(checkpoint.tensors)}")
    return checkpoint


def apply_lora(
    checkpoint: Checkpoint, model: Any, clip: Any, strength_model: float, strength_clip: float
) -> tuple[Any, Any, str]:
    """Return clones of the model and the text encoder with the LoRA added, and a report.

    Args:
        checkpoint: the open LoRA file.
        model: a ModelPatcher of an ERNIE-Image model.
        clip: ComfyUI's CLIP, or None when none is connected.
        strength_model, strength_clip: factors of the change; at 0 that part is returned as it came.

    Returns: (model, clip, report of one line, or two when some modules are not used).
    Raises:
        ValueError: the model is not ERNIE-Image.
        CheckpointError: no module matches, or one is incomplete, of a wrong shape, or not finite.
    """
    if not isinstance(model.model, comfy.model_base.ErnieImage):
        raise ValueError(
            f"ERNIE LoRA Loader: the model is {type(model.model).__name__}; an ERNIE-Image model is needed. "
            "Connect an ERNIE-Image model, or use Load LoRA for other models."
        )
    tensors = comfy.lora_convert.convert_lora(read_tensors(checkpoint, lambda name: name))
    alphas = (stated_alpha(checkpoint, "transformer"), stated_alpha(checkpoint, "text_encoder"))
    file = _LoraFile(checkpoint.label, tensors, *group_keys(tensors, checkpoint.label), *alphas)
    shapes = _shapes(model.model)
    of_model = _match(file, file.model_modules, shapes, model_aliases(shapes))
    of_text = _Match({}, 0, [])
    if clip is not None:
        shapes = _shapes(clip.cond_stage_model)
        aliases = comfy.lora.model_lora_keys_clip(clip.cond_stage_model, {}) | text_encoder_aliases(shapes)
        of_text = _match(file, file.text_modules, shapes, aliases)
    unmatched = of_model.unmatched + of_text.unmatched + file.unknown
    matched = of_model.count + of_text.count
    if not matched:
        raise CheckpointError(_nothing_matches(file, unmatched))

    parts = [f"model {of_model.count} (strength {strength_model:g})"]
    if of_model.patches and strength_model != 0:
        model = model.clone()
        model.add_patches(of_model.patches, strength_model)
    if clip is not None:
        parts.append(f"text encoder {of_text.count} (strength {strength_clip:g})")
        if of_text.patches and strength_clip != 0:
            clip = clip.clone()
            clip.add_patches(of_text.patches, strength_clip)
    elif file.text_modules:
        parts.append(f"{len(file.text_modules)} for the text encoder not used, as no CLIP is connected")
    counts = f"{matched} of {matched + len(unmatched)} modules matched"
    return model, clip, _report(file.label, f"{counts}; {', '.join(parts)}", unmatched)


def _report(label: str, found: str, unmatched: list[str]) -> str:
    """Log what matched, warn of what did not, and return both."""
    logger.info("%s: %s", label, found)
    if not unmatched:
        return f"{label}: {found}"
    warning = f"{len(unmatched)} modules match nothing in this model and are not used, such as {_some(unmatched)}."
    logger.warning("%s: %s", label, warning)
    return f"{label}: {found}\n{warning}"


def _shapes(network: torch.nn.Module) -> dict[str, Shape]:
    """Return name -> shape of every parameter; a packed 4-bit weight states its shape unpacked."""
    return {name: tuple(parameter.shape) for name, parameter in network.named_parameters()}


def _match(file: _LoraFile, names: Iterable[str], shapes: Mapping[str, Shape], aliases: Mapping[str, str]) -> _Match:
    """Build the patches that the named modules make on a network. Raises CheckpointError, see `_patch`."""
    matched, unmatched = match_modules(names, aliases, file.label)
    patches: dict[str, Any] = {}
    for weight, module in matched.items():
        patches.update(_patch(file, module, weight, shapes))
    return _Match(patches, len(matched), unmatched)


def _patch(file: _LoraFile, module: str, weight: str, shapes: Mapping[str, Shape]) -> dict[str, Any]:
    """Return ComfyUI's patches of one module: parameter name -> patch.

    Raises: CheckpointError when the module is incomplete, does not fit the weight, or is not finite.
    """
    where = f"{file.label}: module '{module}'"
    tensors = _completed(file, module, shapes[weight])
    held = {kind: tuple(tensor.shape) for kind, tensor in tensors.items()}
    text = ", ".join(f"{kind} {list(shape)}" for kind, shape in held.items())
    try:
        fits = _fits(held, shapes[weight], shapes.get(weight.removesuffix(".weight") + ".bias"))
    except KeyError as error:
        raise CheckpointError(
            f"{where} holds only {text}; {error.args[0]} is missing. The file is incomplete; download it again."
        ) from error
    if not fits:
        raise CheckpointError(
            f"{where} holds {text}, which does not fit this model's weight {list(shapes[weight])}. The LoRA was "
            "trained for a model of another size; load that model, or use a LoRA trained for this one."
        )
    for kind, tensor in tensors.items():
        if not torch.isfinite(tensor.float()).all():
            raise CheckpointError(
                f"{where} holds NaN or infinity in {kind}; every picture would be black. The training failed or the "
                "file is damaged; use an earlier save of the LoRA or download it again."
            )
    named = {f"{module}.{kind}": tensor for kind, tensor in tensors.items()}
    return comfy.lora.load_lora(named, {module: weight}, log_missing=False)


def _completed(file: _LoraFile, module: str, weight: Shape) -> dict[str, torch.Tensor]:
    """Return ending -> tensor of one module, with what PEFT writes in another way or place made as ComfyUI reads it."""
    tensors = {kind: file.tensors[name] for kind, name in file.modules[module].items()}
    scale = tensors.get("dora_scale")
    if scale is not None and scale.dim() == 1:  # PEFT's magnitude: one number per row of the weight
        tensors["dora_scale"] = scale.reshape(-1, *[1] * (len(weight) - 1))
    down = tensors.get("lora_down.weight")
    if "alpha" not in tensors and down is not None and down.dim():
        stated = file.text_alpha if is_text_encoder(module) else file.model_alpha
        alpha = stated.of(module, down.shape[0])
        if alpha is not None:
            tensors["alpha"] = torch.tensor(float(alpha))
    return tensors


def _fits(held: Mapping[str, Shape], weight: Shape, bias: Shape | None) -> bool:
    """Tell whether the tensors of one module make a change of the weight's (and bias's) shape.

    Raises: KeyError naming a tensor that is missing.
    """
    flat = _flat(weight)
    if any(kind in held for kind in _KERNEL) or math.prod(held.get("alpha", ())) != 1:
        return False
    if any(held[kind] != bias for kind in ("diff_b", "b_norm") if kind in held):
        return False
    if any(kind in held for kind in _FULL):
        return all(held[kind] == weight for kind in _FULL if kind in held)
    if "dora_scale" in held and held["dora_scale"] not in ((weight[0], *[1] * len(weight[1:])), (1, *weight[1:])):
        return False
    if "oft_blocks" in held:
        blocks = held["oft_blocks"]  # (blocks, size, size); BOFT: (factors, blocks, size, size)
        return len(blocks) in (3, 4) and math.prod(blocks[-3:-1]) == weight[0] and blocks[-2] == blocks[-1]
    if any(kind.startswith("hada_") for kind in held):
        return flat == _product(held["hada_w1_a"], held["hada_w1_b"]) == _product(held["hada_w2_a"], held["hada_w2_b"])
    if any(kind.startswith("lokr_") for kind in held):
        first, second = _kronecker_factor(held, "lokr_w1"), _kronecker_factor(held, "lokr_w2")
        return flat == (first[0] * second[0], first[1] * second[1])
    if set(held) == {"diff_b"}:
        return True
    return flat == _product(held["lora_up.weight"], held["lora_down.weight"])


def _flat(shape: Shape) -> tuple[int, int]:
    """Return (rows, columns) of a tensor as a matrix; (0, 0) for a single number."""
    return (shape[0], math.prod(shape[1:])) if shape else (0, 0)


def _product(left: Shape, right: Shape) -> tuple[int, int]:
    """Return (rows, columns) of a matrix product of two flattened tensors; (0, 0) when they cannot be multiplied."""
    (rows, rank), (inner, columns) = _flat(left), _flat(right)
    return (rows, columns) if 0 < rank == inner else (0, 0)


def _kronecker_factor(held: Mapping[str, Shape], name: str) -> tuple[int, int]:
    """Return (rows, columns) of one factor of a LoKr, given whole or as a product."""
    if name in held:
        return _flat(held[name])
    return _product(held[f"{name}_a"], held[f"{name}_b"])


def _nothing_matches(file: _LoraFile, unmatched: list[str]) -> str:
    """Say why the LoRA would change nothing."""
    if not unmatched:
        return (
            f"{file.label}: all {len(file.text_modules)} modules are for the text encoder, and no CLIP is connected. "
            "Connect a CLIP to ERNIE LoRA Loader, or use another LoRA."
        )
    forms = ", ".join(f"'{prefix}'" for prefix in FLAT_PREFIXES + DOTTED_PREFIXES if prefix)
    origin = trained_for(unmatched)
    return (
        f"{file.label}: none of its {len(unmatched)} modules belongs to this ERNIE-Image model. "
        + (f"By its names it was trained for {origin}. " if origin else "")
        + f"Found {_some(unmatched)}; expected names such as 'layers.0.self_attention.to_q', alone or after one of "
        f"{forms}. Use a LoRA trained on ERNIE-Image."
    )


def _some(names: list[str]) -> str:
    """Return the first three names, quoted."""
    return ", ".join(f"'{name}'" for name in names[:3])
