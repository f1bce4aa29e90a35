"""How a step is executed: ranks, CUDA graph, recomputation, order of sums. The loss curve does not depend on it."""
