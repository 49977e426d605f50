"""Double of a GPU for a CPU build of torch: the engine's GPU path runs on it, CUDA graphs included.

Tensors say ``cuda:0`` and hold their numbers in the memory of the CPU. ``DoubleGpu`` is an ``engine.accelerator.Accelerator``;
``engine.accelerator.use`` installs it. It shows what a GPU shows of the order of work, of devices, of graphs and of waiting. It
does not show what kernels compute on a GPU, and how long they take: attention is written out, products are the CPU's.
"""
