"""Several devices and processes: meshes, tensor parallelism, the start of processes."""
