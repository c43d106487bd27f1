"""FP8 formats, activations, and float32 arithmetic of kernels."""
