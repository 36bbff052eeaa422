"""ErnieFastModelLoader: a checkpoint in any common form -> MODEL."""

from __future__ import annotations

import logging

from comfy_api.latest import io

from ..model.build import COMPUTE, SOURCE, ComputePlan, ModelSource, build_model
from ..model.probe import ModelProbe, probe_model, warn_about
from ..model.quantise import AS_STORED, WEIGHT_FORMATS, QuantisePolicy, require_plain
from .files import list_models, open_model

logger = logging.getLogger("ernie_fast")

CATEGORY = "diffusion_models"
_DTYPE_NAMES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


class ErnieFastModelLoader(io.ComfyNode):
    """Loads an ERNIE-Image diffusion model."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Describe the node to ComfyUI."""
        return io.Schema(
            node_id="ErnieFastModelLoader",
            display_name="ERNIE Model Loader",
            category="model/loaders/ernie",
            description=(
                "Loads an ERNIE-Image or ERNIE-Image-Turbo diffusion model: one safetensors or GGUF file, a folder of "
                "shards, or an all-in-one checkpoint; BF16, FP16, FP32, FP8, NVFP4, MXFP8, INT8, ConvRot or SVDQuant. Can "
                "quantise a BF16 file while it loads."
            ),
            search_aliases=[
                "ernie", "ernie image", "ernie turbo", "unet loader", "load diffusion model", "fp8", "nvfp4", "gguf", "int8",
                "quantize", "svdquant",
            ],
            inputs=[
                io.Combo.Input(
                    "unet_name",
                    options=list_models(CATEGORY, "transformer"),
                    tooltip="The diffusion model: a file or shard folder in models/diffusion_models, a repository in "
                    "models/diffusers, or an all-in-one file in models/checkpoints.",
                ),
                io.Combo.Input(
                    "compute",
                    options=list(COMPUTE),
                    default="auto",
                    advanced=True,
                    tooltip="Dtype of the arithmetic. 'auto' takes bf16 where the device is fast in it, else fp32; "
                    "fp32 is slower and takes more memory.",
                ),
                io.Combo.Input(
                    "weight_format",
                    options=[AS_STORED, *WEIGHT_FORMATS],
                    default=AS_STORED,
                    optional=True,
                    tooltip="How the weights are kept in memory. 'as stored' changes nothing; the others quantise a BF16, FP16 or "
                    "FP32 file while it loads: fp8 and int8 halve its size, 4-bit formats quarter it and cost more quality.",
                ),
                io.String.Input(
                    "keep_16bit",
                    default="",
                    optional=True,
                    advanced=True,
                    tooltip="What stays in 16 bits when weight_format quantises: blocks ('0, 34-35'), layers ('to_v, mlp'), or "
                    "layers of blocks ('0.self_attention'). The layers outside of the blocks always do.",
                ),
            ],
            outputs=[
                io.Model.Output(display_name="model", tooltip="The diffusion model, for any sampler."),
                io.String.Output(display_name="summary", tooltip="One line: size, storage format, compute dtype and why."),
            ],
        )

    @classmethod
    def validate_inputs(
        cls, unet_name: str | None = None, weight_format: str | None = AS_STORED, keep_16bit: str | None = ""
    ) -> bool | str:
        """Read the headers before the run. Returns True or the message that the run would raise."""
        if unet_name is None:  # linked: known only at run time
            return True
        try:
            probe = probe_model(open_model(CATEGORY, unet_name))
            if weight_format is not None and keep_16bit is not None:
                _policy(probe, weight_format, keep_16bit)
        except ValueError as error:  # CheckpointError is one
            return str(error)
        return True

    @classmethod
    def fingerprint_inputs(
        cls, unet_name: str | None, compute: str | None, weight_format: str | None = AS_STORED, keep_16bit: str | None = ""
    ) -> str:
        """Load again when a file was replaced on disk. A linked input arrives as None."""
        files = "" if unet_name is None else open_model(CATEGORY, unet_name).fingerprint
        return f"{files}|{compute}|{weight_format}|{keep_16bit}"

    @classmethod
    def execute(
        cls, unet_name: str, compute: str, weight_format: str = AS_STORED, keep_16bit: str = ""
    ) -> io.NodeOutput:
        """Load the model. Raises CheckpointError or ValueError with one sentence for the user."""
        probe = probe_model(open_model(CATEGORY, unet_name))
        policy = _policy(probe, weight_format, keep_16bit)
        warn_about(probe)
        patcher, plan = build_model(probe, compute, policy)
        line = summary(probe, plan, patcher.get_attachment(SOURCE))
        logger.info("%s", line)
        return io.NodeOutput(patcher, line)


def _policy(probe: ModelProbe, weight_format: str, keep_16bit: str) -> QuantisePolicy | None:
    """Return what to quantise, None for nothing. Raises CheckpointError or ValueError when that does not fit the file."""
    if weight_format == AS_STORED:
        return None
    policy = QuantisePolicy(weight_format, keep_16bit)
    require_plain(probe.storage, policy, probe.checkpoint.label)
    policy.layers(probe.architecture)
    return policy


def summary(probe: ModelProbe, plan: ComputePlan, source: ModelSource) -> str:
    """Return one line: the model, how it is stored, its size in memory, the compute dtype and why."""
    dtype = str(plan.compute_dtype).removeprefix("torch.")
    stored = f"{probe.storage.title}, {source.stored_bytes / 1e9:.2f} GB"
    if source.policy is not None:
        title = WEIGHT_FORMATS[source.policy.weight_format].title
        stored = f"{probe.storage.title}, {source.quantised_layers} layers quantised at load to {title}, {source.stored_bytes / 1e9:.2f} GB"
    return f"{probe.title}; {stored}; computes in {_DTYPE_NAMES.get(dtype, dtype)} ({plan.reason})"
