"""Tests of the CUDA path that need no GPU, and what they stand on."""
