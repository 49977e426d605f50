"""The parts of ``experiments.gpu_suite``."""
