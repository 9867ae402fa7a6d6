"""Configurations and plans that several files share; compiled once."""

import functools

import pytest

from meshtrain.assembly.assemble import assemble
from meshtrain.config.schema import Config
from meshtrain.data.sources import DataOptions
from meshtrain.hardware.accelerators import ACCELERATORS
from meshtrain.models.transformer.decoder import DecoderOptions
from meshtrain.pipeline.schedules import PipelineOptions
from meshtrain.plan import planner
from meshtrain.plan.cluster import clusters
from meshtrain.plan.timing.streams import Assumptions
from meshtrain.sharding.mesh import MeshOptions
from meshtrain.sharding.rules import AXES

H100 = next(one for one in ACCELERATORS if one.name == "h100")
MODEL = DecoderOptions(
    num_layers=2, embed_dim=64, mlp_dim=128, num_heads=4, num_kv_heads=4, vocab_size=256, within_documents=False
)


def config(mesh=None, **fields):
    """Returns a small decoder on a mesh."""
    values = {
        "batch_size": 16,
        "sequence_length": 32,
        "model": MODEL,
        "data": DataOptions("synthetic"),
        "pipeline": PipelineOptions("1f1b", num_microbatches=2),
        "mesh": MeshOptions(**(mesh or {})),
    }
    return Config(**values | fields)


def shape_of(**sizes):
    """Returns the size of each axis: those given, else 1."""
    return dict.fromkeys(AXES, 1) | sizes


def assembled(config, **sizes):
    """Returns an assembly on simulated devices, on the mesh given or else that of the configuration."""
    shape = shape_of(**sizes) if sizes else {axis: getattr(config.mesh, axis) for axis in AXES}
    return assemble(config, shape, clusters.open_cluster("cpu:8").devices)


@functools.cache
def planned(cluster, configuration, measured_seconds=None):
    target = clusters.open_cluster(cluster)
    shape = planner.shape_on(configuration, target)
    return planner.plan(configuration, shape, target, Assumptions(), measured_seconds)


@pytest.fixture
def small():
    """(mesh, fields) -> configuration."""
    return config


@pytest.fixture
def plan():
    """(cluster, configuration) -> plan."""
    return planned
