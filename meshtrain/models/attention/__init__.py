"""Attention: its kernels, which of them computes it, and the exchange where sequences are split over devices."""
