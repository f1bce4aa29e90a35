"""The kernels of GPUs, in Triton. Importing one needs Triton."""
