"""The parts of tools/gpu.py: the compiler's report, times of kernels, and times of whole models."""
