"""Training: configuration, model, loop, optimizer and evaluation."""
