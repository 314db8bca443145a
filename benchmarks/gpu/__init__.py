"""`gradwire-bench gpu`: everything that only a GPU can say of the CUDA kernels, each part in a process of its own."""
