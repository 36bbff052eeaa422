"""ComfyUI's own weight formats NVFP4, MXFP8 and INT8, decoded to floats or row-wise FP8. Written against comfy-kitchen 0.2.26."""
