"""ErnieFastModelLoader: a checkpoint in any common form -> MODEL."""

from __future__ import annotations

import logging

from comfy_api.latest import io

from ..model.build import COMPUTE, ComputePlan, build_model
from ..model.checkpoint import CheckpointError
from ..model.probe import ModelProbe, probe_model, warn_about
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
                "Loads an ERNIE-Image or ERNIE-Image-Turbo diffusion model: one safetensors file, a folder of shards, or "
                "an all-in-one checkpoint; BF16, FP16, FP32, FP8, NVFP4, MXFP8, INT8 or ConvRot."
            ),
            search_aliases=["ernie", "ernie image", "ernie turbo", "unet loader", "load diffusion model", "fp8", "nvfp4"],
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
            ],
            outputs=[
                io.Model.Output(display_name="model", tooltip="The diffusion model, for any sampler."),
                io.String.Output(display_name="summary", tooltip="One line: size, storage format, compute dtype and why."),
            ],
        )

    @classmethod
    def validate_inputs(cls, unet_name: str | None = None) -> bool | str:
        """Read the headers before the run. Returns True or the message that the run would raise."""
        if unet_name is None:  # linked: known only at run time
            return True
        try:
            probe_model(open_model(CATEGORY, unet_name))
        except CheckpointError as error:
            return str(error)
        return True

    @classmethod
    def fingerprint_inputs(cls, unet_name: str | None, compute: str | None) -> str:
        """Load again when a file was replaced on disk. A linked input arrives as None."""
        files = "" if unet_name is None else open_model(CATEGORY, unet_name).fingerprint
        return f"{files}|{compute}"

    @classmethod
    def execute(cls, unet_name: str, compute: str) -> io.NodeOutput:
        """Load the model. Raises CheckpointError with one sentence for the user."""
        probe = probe_model(open_model(CATEGORY, unet_name))
        warn_about(probe)
        patcher, plan = build_model(probe, compute)
        line = summary(probe, plan)
        logger.info("%s", line)
        return io.NodeOutput(patcher, line)


def summary(probe: ModelProbe, plan: ComputePlan) -> str:
    """Return one line: the model, how it is stored, its size in memory, the compute dtype and why."""
    dtype = str(plan.compute_dtype).removeprefix("torch.")
    return (
        f"{probe.title}; {probe.storage.title}, {probe.storage.stored_bytes / 1e9:.2f} GB; "
        f"computes in {_DTYPE_NAMES.get(dtype, dtype)} ({plan.reason})"
    )
