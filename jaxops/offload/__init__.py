"""Training with less device memory: what a step does not need at once stays on the host."""
