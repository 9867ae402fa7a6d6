"""Attention: its kernels, the selection of a kernel, and communication between devices that share a sequence."""
