"""Numbers of devices as words, and clusters of those sizes."""

import pytest

from meshtrain.errors import UserError
from meshtrain.report.scaling import cluster_sizes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8,16,...,4096", [8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096]),
        ("1, 3, ..., 27", [1, 3, 9, 27]),
        ("1,2,4,...,16", [1, 2, 4, 8, 16]),
        ("8,16,...,32", [8, 16, 32]),
        ("64,100", [64, 100]),
    ],
)
def test_sizes(text, expected):
    assert cluster_sizes.read_sizes(text) == expected


@pytest.mark.parametrize(
    ("cluster", "num_devices", "expected"),
    [
        ("h100:8x8", 4096, "h100:512x8"),
        ("h100:8x8", 8, "h100:1x8"),
        ("a100:4", 2, "a100:1x2"),
        ("v5e:16x16", 8, "v5e:2x4"),
        ("v6e:2x2", 256, "v6e:16x16"),
        ("v5p:2x2x2", 96, "v5p:4x4x6"),
    ],
)
def test_a_cluster_keeps_its_hosts(cluster, num_devices, expected):
    assert cluster_sizes.resize(cluster, num_devices) == expected


@pytest.mark.parametrize(("cluster", "num_devices"), [("h100:8x8", 20), ("v5e:4x4", 22)])
def test_a_size_that_no_such_cluster_has_is_one_line(cluster, num_devices):
    with pytest.raises(UserError, match=rf"--scaling: got {num_devices} devices on .*nearest: \d+"):
        cluster_sizes.resize(cluster, num_devices)
