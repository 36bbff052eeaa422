"""GGUF weights: the table of types, decoding to floats or FP8, and encoding. Written against gguf-py and llama.cpp's `ggml-quants.c`."""
