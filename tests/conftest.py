"""Fixtures and hypothesis profiles that all tests share."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

import devices
import numpy as np
import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("default")

DEVICES = [
    "reference",
    "cpu",
    "simt",
    "simt_sm75",
    pytest.param("cuda", marks=pytest.mark.gpu),
]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> devices.Device:
    """Every backend in turn."""
    return getattr(devices, request.param)()


@pytest.fixture
def rng() -> np.random.Generator:
    """A generator with a new seed each run; the seed is printed when the test fails."""
    seed = secrets.randbits(32)
    print(f"rng seed {seed}")
    return np.random.default_rng(seed)


@pytest.fixture(params=["simt", "simt_sm75", pytest.param("cuda", marks=pytest.mark.gpu)])
def machine(request: pytest.FixtureRequest) -> Iterator[devices.Machine]:
    """Every place where the CUDA path runs, in turn."""
    with devices.machine(request.param) as there:
        yield there


@pytest.fixture
def cupy() -> Any:
    """CuPy, where it has a device."""
    module = pytest.importorskip("cupy", reason="CuPy is not installed")
    if not module.cuda.is_available():
        pytest.skip("no CUDA device found")
    return module


@pytest.fixture
def all_threads() -> Iterator[None]:
    """Gives back the threads that a test takes from Numba."""
    numba = pytest.importorskip("numba", reason="the CPU backend needs numba: pip install 'cupaged[cpu]'")
    before = numba.get_num_threads()
    yield
    numba.set_num_threads(before)
