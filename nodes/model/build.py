"""Build ComfyUI's own ERNIE-Image model, of any size, from a probed checkpoint.

ComfyUI builds the released size only. The steps here are those of its `load_diffusion_model_state_dict`, with the sizes
taken from the checkpoint; modules, quantised weights, offloading and patching stay ComfyUI's.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import comfy.model_management
import comfy.model_patcher
import comfy.ops
import comfy.supported_models
import comfy.utils
import torch

from .checkpoint import open_checkpoint
from .forward import install
from .nunchaku_lite import unpack_layers
from .operations import with_own_formats
from .probe import CONVOLUTION, ModelProbe, probe_model
from .quantise import QuantisePolicy, quantise_state_dict, require_plain
from .state_dict import add_markers, read_tensors, require_formats
from .storage import MARKER

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

# The key of the patcher's attachment that says where a MODEL came from.
SOURCE = "ernie_fast_source"
COMPUTE = {"auto": None, "bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a MODEL came from: files, their name for messages, what was quantised at load, and bytes of weights in memory."""

    files: tuple[Path, ...]
    label: str
    policy: QuantisePolicy | None
    quantised_layers: int
    stored_bytes: int


@dataclass(frozen=True, slots=True)
class ComputePlan:
    """In which dtype a model is stored and computes, and the reason in a few words."""

    storage_dtype: torch.dtype
    manual_cast: torch.dtype | None
    reason: str

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of the activations and matrix products."""
        return self.storage_dtype if self.manual_cast is None else self.manual_cast


def plan_compute(
    model_config: comfy.supported_models.ErnieImage, sd: dict[str, torch.Tensor], compute: str, load_device: torch.device
) -> ComputePlan:
    """Choose the dtypes as ComfyUI does; `compute` overrides the dtype of the arithmetic.

    Args:
        model_config: its `quant_config` says whether weights are quantised.
        sd: the model's state dict; the most common dtype counts for plain weights.
        compute: a key of COMPUTE.
        load_device: where the model runs.
    """
    mm = comfy.model_management
    quantised = model_config.quant_config is not None
    supported = list(model_config.supported_inference_dtypes)
    weight_dtype = None if quantised else comfy.utils.weight_dtype(sd)
    parameters = comfy.utils.calculate_parameters(sd)
    storage_dtype = mm.unet_dtype(model_params=parameters, supported_dtypes=supported, weight_dtype=weight_dtype)
    chosen = COMPUTE[compute]
    if chosen is not None:
        manual_cast = None if chosen == storage_dtype and not quantised else chosen
        return ComputePlan(storage_dtype, manual_cast, "as chosen")
    manual_cast = mm.unet_manual_cast(None if quantised else storage_dtype, load_device, supported)
    plan = ComputePlan(storage_dtype, manual_cast, "")
    return ComputePlan(storage_dtype, manual_cast, _reason(plan.compute_dtype, storage_dtype, load_device))


def _reason(compute_dtype: torch.dtype, storage_dtype: torch.dtype, device: torch.device) -> str:
    if compute_dtype == torch.bfloat16:
        return f"{device.type} computes in bf16"
    if device.type == "cpu":
        return "on the CPU"
    if storage_dtype == torch.float32:
        return "the weights are fp32"
    return f"{device.type} has no fast bf16, and fp16 overflows in this model"


def load_model(
    path: Path,
    compute: str = "auto",
    label: str | None = None,
    policy: QuantisePolicy | None = None,
    disable_dynamic: bool = False,
) -> ModelPatcher:
    """Load a checkpoint into a MODEL that ComfyUI treats as one of its own.

    Args:
        path: a safetensors or GGUF file, or a folder of shards.
        compute: a key of COMPUTE.
        label: the name for messages.
        policy: quantise the weights; None leaves them as stored.
        disable_dynamic: build the patcher without dynamic VRAM, as ComfyUI asks for in its own loaders.

    Raises: CheckpointError, see `probe_model` and `build_model`.
    """
    return build_model(probe_model(open_checkpoint(path, label)), compute, policy, disable_dynamic)[0]


def build_model(
    probe: ModelProbe, compute: str, policy: QuantisePolicy | None = None, disable_dynamic: bool = False
) -> tuple[ModelPatcher, ComputePlan]:
    """Build the MODEL of a probed checkpoint. Arguments as in `load_model`.

    Raises:
        CheckpointError: the installed ComfyUI lacks the storage format, or the weights cannot be quantised.
        ValueError: the policy does not fit the model.
    """
    mm = comfy.model_management
    load_device, offload_device = mm.get_torch_device(), mm.unet_offload_device()
    sd = _state_dict(probe)
    layers = probe.storage.layers
    if policy is not None:
        require_plain(probe.storage, policy, probe.checkpoint.label)
        layers = quantise_state_dict(sd, probe.architecture, policy, load_device, probe.checkpoint.label)
    stored = sum(tensor.nbytes for tensor in sd.values())  # before ComfyUI takes them out one by one
    model_config = comfy.supported_models.ErnieImage(probe.architecture.unet_config())
    if layers:
        model_config.quant_config = {"mixed_ops": True}
    plan = plan_compute(model_config, sd, compute, load_device)
    model_config.set_inference_dtype(plan.storage_dtype, plan.manual_cast, device=load_device)
    if layers:
        base = comfy.ops.pick_operations(plan.storage_dtype, plan.manual_cast, model_config=model_config)
        model_config.custom_operations = with_own_formats(base)

    model = model_config.get_model(sd, "")
    patcher_class = comfy.model_patcher.ModelPatcher if disable_dynamic else comfy.model_patcher.CoreModelPatcher
    patcher = patcher_class(model, load_device=load_device, offload_device=offload_device)
    if not mm.is_device_cpu(offload_device):
        model.to(offload_device)
    model.load_model_weights(sd, "", assign=patcher.is_dynamic())
    install(patcher)
    # ComfyUI rebuilds the model through this for torch.compile, hooks and several GPUs.
    patcher.cached_patcher_init = (load_model, (probe.checkpoint.path, compute, probe.checkpoint.label, policy))
    patcher.set_attachments(SOURCE, ModelSource(probe.checkpoint.files, probe.checkpoint.label, policy, len(layers), stored))
    return patcher, plan


def _state_dict(probe: ModelProbe) -> dict[str, torch.Tensor]:
    """Read the model's tensors under ComfyUI's names, each quantised layer with its marker."""
    storage, prefix, unused = probe.storage, probe.prefix, set(probe.unused)
    require_formats(probe.checkpoint.label, storage.format_counts())

    def new_name(name: str) -> str | None:
        bare = name[len(prefix) :]
        if not name.startswith(prefix) or bare in storage.drop or bare in unused or bare.endswith(MARKER):
            return None
        return storage.rename.get(bare, bare)

    sd = read_tensors(probe.checkpoint, new_name, {f"{layer}.weight" for layer in storage.layers})
    if probe.checkpoint.gguf is not None:
        shape = next(shape for name, shape in probe.architecture.shapes() if name == CONVOLUTION)
        sd[CONVOLUTION] = sd[CONVOLUTION].view(shape)
    unpack_layers(sd)
    add_markers(sd, storage)
    return sd
