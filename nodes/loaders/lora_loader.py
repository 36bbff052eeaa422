"""ErnieFastLoRALoader: a LoRA of any trainer -> patched MODEL and CLIP, with a report of what matched."""

from __future__ import annotations

from typing import Any

import folder_paths
from comfy_api.latest import io

from ..model.checkpoint import SAFETENSORS_SUFFIXES, CheckpointError
from .lora import CATEGORY, apply_lora, open_lora


class ErnieFastLoRALoader(io.ComfyNode):
    """Adds a LoRA to an ERNIE-Image model, and to its text encoder when one is connected."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Describe the node to ComfyUI."""
        return io.Schema(
            node_id="ErnieFastLoRALoader",
            display_name="ERNIE LoRA Loader",
            category="model/loaders/ernie",
            description=(
                "Adds a LoRA to an ERNIE-Image model, whichever trainer wrote it (kohya, OneTrainer, ai-toolkit, "
                "SimpleTuner, diffusers, PEFT, LyCORIS), and reports how many of its modules matched. A LoRA that does "
                "not fit or would do nothing is an error."
            ),
            search_aliases=["ernie lora", "lora", "load lora", "apply lora", "lora loader", "lycoris", "lokr", "dora"],
            inputs=[
                io.Model.Input("model", tooltip="The ERNIE-Image model to change, from any loader."),
                io.Combo.Input(
                    "lora_name",
                    options=[n for n in folder_paths.get_filename_list(CATEGORY) if n.lower().endswith(SAFETENSORS_SUFFIXES)],
                    tooltip="The LoRA: a safetensors file in models/loras.",
                ),
                io.Float.Input(
                    "strength_model",
                    default=1.0,
                    min=-100.0,
                    max=100.0,
                    step=0.01,
                    tooltip="How strongly the LoRA changes the model; 0 leaves it as it is, below 0 reverses it.",
                ),
                io.Clip.Input(
                    "clip",
                    optional=True,
                    tooltip="The text encoder, for LoRAs that were trained on it too; leave it open for all others.",
                ),
                io.Float.Input(
                    "strength_clip",
                    default=1.0,
                    min=-100.0,
                    max=100.0,
                    step=0.01,
                    optional=True,
                    advanced=True,
                    tooltip="How strongly the LoRA changes the text encoder; 0 leaves it as it is.",
                ),
            ],
            outputs=[
                io.Model.Output(display_name="model", tooltip="The model with the LoRA."),
                io.Clip.Output(display_name="clip", tooltip="The text encoder with the LoRA; empty without clip."),
                io.String.Output(display_name="report", tooltip="How many modules matched, and which did not."),
            ],
        )

    @classmethod
    def validate_inputs(cls, lora_name: str | None = None) -> bool | str:
        """Read the header before the run. Returns True or the message that the run would raise."""
        if lora_name is None:  # linked: known only at run time
            return True
        try:
            open_lora(lora_name)
        except CheckpointError as error:
            return str(error)
        return True

    @classmethod
    def fingerprint_inputs(
        cls,
        lora_name: str | None,
        strength_model: float | None,
        model: None = None,
        clip: None = None,
        strength_clip: float | None = 1.0,
    ) -> str:
        """Load again when the file was replaced on disk or a strength changed. A linked input arrives as None."""
        file = "" if lora_name is None else open_lora(lora_name).fingerprint
        return f"{file}|{strength_model}|{strength_clip}"

    @classmethod
    def execute(
        cls, model: Any, lora_name: str, strength_model: float, clip: Any | None = None, strength_clip: float = 1.0
    ) -> io.NodeOutput:
        """Apply the LoRA. Raises ValueError or CheckpointError with one sentence for the user."""
        if strength_model == 0 and (clip is None or strength_clip == 0):
            return io.NodeOutput(model, clip, f"{lora_name}: strength 0, not loaded")
        return io.NodeOutput(*apply_lora(open_lora(lora_name), model, clip, strength_model, strength_clip))
