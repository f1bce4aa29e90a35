"""Block quantization on the CPU: in C, and in few passes of torch where there is no compiler."""
