"""Speedup, efficiency and Amdahl's serial share from numbers that are known."""

import pytest

from meshtrain.plan import speedup


def amdahl(share, base_devices, sizes):
    """Steps by the law itself, in seconds; that of the base takes 3."""
    return [(size, 3.0 * (share + (1 - share) * base_devices / size)) for size in sizes]


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, -0.02])
@pytest.mark.parametrize("base", [1, 8])
def test_the_serial_share_of_the_law_is_found_again(share, base):
    steps = amdahl(share, base, [base * 2**power for power in range(6)])
    assert speedup.fitted_serial_share(steps) == pytest.approx(share, abs=1e-12)
    for size, seconds in steps[1:]:
        assert speedup.serial_share(seconds, size, 3.0, base) == pytest.approx(share, abs=1e-12)


def test_a_base_alone_has_no_serial_share():
    assert speedup.fitted_serial_share([(8, 3.0)]) is None
    assert speedup.serial_share(3.0, 8, 3.0, 8) is None


def test_efficiency_is_the_throughput_of_a_device():
    # Four times the devices, three times the examples a second.
    assert speedup.speedup(30.0, 10.0) == 3
    assert speedup.efficiency(30.0, 32, 10.0, 8) == 0.75
