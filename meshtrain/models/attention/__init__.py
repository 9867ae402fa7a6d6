"""Attention: its kernels, the selection of a kernel, and the exchange if sequences are split over devices."""
