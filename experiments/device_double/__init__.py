"""Double of a GPU for a CPU build of torch: the engine's GPU path runs on it, CUDA graphs included.

Tensors say ``cuda:0`` and hold their numbers in CPU memory. ``DoubleGpu`` is an ``engine.accelerator.Accelerator``, which
``engine.accelerator.use`` installs. It shows the order of work, devices, graphs and waits of a GPU. It does not show what kernels
compute, or how long they take: attention is written out, and products are the CPU's.
"""
