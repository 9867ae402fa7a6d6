"""cuDNN's kernel, which computes on GPUs only, by XLA."""

import jax
import pytest


@pytest.fixture
def cudnn_by_xla(monkeypatch):
    """XLA computes what cuDNN's kernel is asked for, with the same arguments, which are those that the kernel takes."""
    attend = jax.nn.dot_product_attention

    def called(*qkv, implementation, **given):
        if implementation == "cudnn":
            assert given["mask"] is None or given["local_window_size"] is None
            assert given["local_window_size"] is None or given["is_causal"]
        return attend(*qkv, implementation="xla", **given)

    monkeypatch.setattr(jax.nn, "dot_product_attention", called)
