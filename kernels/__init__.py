"""The shared kernel and quantisation module. Pure Python, torch and Triton: nothing of ComfyUI, nothing of `nodes`."""
