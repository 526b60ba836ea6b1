"""Shared prefixes: found in tables, taken where bytes say so, and attended to once with the result of attending many times."""

from __future__ import annotations

import behaviour
import numpy as np
import pytest
from behaviour import assert_close, make_case
from devices import Device
from simt import build

from cupaged import shared_work

if reason := build.unavailable():
    pytest.skip(reason, allow_module_level=True)

import simt_device


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sharing costs nothing, so that small cases share."""
    monkeypatch.setattr(shared_work, "LAUNCH_BYTES_PER_SM", -1)
    monkeypatch.setattr(shared_work, "SUM_BYTES", 0)


def run(case: behaviour.Case, arch: int = 90, kind: str = "plain") -> tuple[np.ndarray, np.ndarray, list[str]]:
    """`(out, lse)` and the names of the kernels that were launched."""
    backend = simt_device.backend(arch, kind=kind)
    with pytest.MonkeyPatch.context() as patch:
        launched: list[str] = []
        launch = backend.launcher.launch
        patch.setattr(backend.launcher, "launch", lambda f, *rest: (launched.append(f.name), launch(f, *rest)))
        out, lse = Device("simt", backend).paged_attention(*case.arguments(), **case.options)
    return out, lse, launched


@pytest.mark.usefixtures("always")
def test_beams(rng: np.random.Generator) -> None:
    case = make_case(
        rng, seq_lens=[200, 190, 193, 210], group=2, head_dim=64, block_size=16, dtype="float16",
        shared={1: (0, 11), 2: (0, 11), 3: (1, 10)},
    )  # fmt: skip
    out, lse, launched = run(case)
    assert launched == ["prefill", "decode_mma"]
    assert_close(case, out, lse, tensor_cores=True)
