"""ErnieFastSaveCheckpoint: a MODEL, quantised or with LoRAs merged -> one safetensors file."""

from __future__ import annotations

import logging
from typing import Any

import folder_paths
from comfy_api.latest import io, ui

from .save import FOLDER, save_model, target_path

logger = logging.getLogger("ernie_fast")


class ErnieFastSaveCheckpoint(io.ComfyNode):
    """Saves an ERNIE-Image model as it is in memory."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Describe the node to ComfyUI."""
        return io.Schema(
            node_id="ErnieFastSaveCheckpoint",
            display_name="ERNIE Save Checkpoint",
            category="model/loaders/ernie",
            description=(
                f"Writes an ERNIE-Image model into output/{FOLDER} as one safetensors file: quantised as ERNIE Model Loader "
                "quantised it, with LoRAs merged. ComfyUI's own loader reads the file to the same weights."
            ),
            search_aliases=["save model", "export model", "quantize", "save checkpoint", "comfy_quant", "fp8", "nvfp4"],
            is_output_node=True,
            inputs=[
                io.Model.Input("model", tooltip="The ERNIE-Image model to save, with its LoRAs."),
                io.String.Input(
                    "filename",
                    default="ernie-image-quantised",
                    tooltip=f"The file's name in output/{FOLDER}, with or without .safetensors; folders may stand before it.",
                ),
                io.Boolean.Input(
                    "overwrite",
                    default=False,
                    tooltip="Replace a file of this name. Off: a file that is there stops the run and stays as it is.",
                ),
            ],
            outputs=[io.String.Output(display_name="summary", tooltip="The file, its size, and what reads it.")],
        )

    @classmethod
    def validate_inputs(cls, filename: str | None = None) -> bool | str:
        """Check the name before the run. Returns True or the message that the run would raise.

        A file that is there already is no reason to refuse: a graph that has saved it may be queued again, and saves nothing then.
        """
        if filename is None:  # linked: known only at run time
            return True
        try:
            target_path(filename, overwrite=True)
        except ValueError as error:
            return str(error)
        return True

    @classmethod
    def execute(cls, model: Any, filename: str, overwrite: bool) -> io.NodeOutput:
        """Save the model. Raises ValueError or OSError with one sentence for the user."""
        path = target_path(filename, overwrite)
        size, reader = save_model(model, path)
        line = f"{path.relative_to(folder_paths.get_output_directory()).as_posix()}: {size / 1e9:.2f} GB saved; {reader}"
        logger.info("%s", line)
        return io.NodeOutput(line, ui=ui.PreviewText(line))
