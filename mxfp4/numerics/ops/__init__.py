"""What is done with tensors: quantize, multiply, rotate. Torch operators and the public functions over them."""
