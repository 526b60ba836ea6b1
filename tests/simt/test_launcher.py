"""The launcher protocol: order, late copies, captured graphs, what a device would refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupaged.launcher import CupyLauncher, Launcher

from .launcher import DEVICES, SimtLauncher
from .native import SimtError

SOURCE = """
struct Params { const float* x; float* y; float factor; int n; };
extern "C" __global__ void scale(const Params p) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < p.n) p.y[i] = p.x[i] * p.factor;
}
"""


class Scale:
    """y = factor * x on a launcher."""

    def __init__(self, launcher: Launcher) -> None:
        self.launcher = launcher
        self.function = launcher.get("scale", "scale.cu", {})
        self.params = np.zeros(1, np.dtype([("x", "u8"), ("y", "u8"), ("factor", "f4"), ("n", "i4")]))

    def __call__(self, x: Any, y: Any, factor: float) -> None:
        self.params["x"], self.params["y"] = self.launcher.pointer(x), self.launcher.pointer(y)
        self.params["factor"], self.params["n"] = factor, x.size
        self.launcher.launch(self.function, (-(-x.size // 64), 1, 1), (64, 1, 1), self.params)


@pytest.fixture
def launcher(tmp_path: Path) -> SimtLauncher:
    (tmp_path / "scale.cu").write_text(SOURCE, encoding="utf-8")
    return SimtLauncher(folder=tmp_path)


def arrays(launcher: SimtLauncher, n: int = 100) -> tuple[Any, Any, Any]:
    pinned = launcher.pinned(4 * n).view(np.float32)
    pinned[:] = np.arange(n)
    return pinned, launcher.empty((n,), np.float32), launcher.empty((n,), np.float32)


def test_device_memory_is_aligned_and_starts_as_nan(launcher: SimtLauncher) -> None:
    for dtype in (np.float32, np.float16, np.float64):
        x = launcher.empty((3, 5), dtype)
        assert x.ctypes.data % 256 == 0 and np.isnan(x).all()


def test_work_runs_in_the_order_of_submission(launcher: SimtLauncher) -> None:
    pinned, x, y = arrays(launcher)
    scale = Scale(launcher)
    launcher.copy_async(x, pinned)
    scale(x, y, 2.0)
    scale(y, x, 3.0)
    launcher.copy_async(pinned, x)
    launcher.synchronize(launcher.record())
    np.testing.assert_array_equal(pinned, 6.0 * np.arange(100))


def test_a_copy_lands_late_so_a_buffer_reused_too_early_shows(launcher: SimtLauncher) -> None:
    pinned, x, y = arrays(launcher)
    launcher.copy_async(x, pinned)
    pinned[:] = -1  # without waiting for an event
    Scale(launcher)(x, y, 2.0)
    np.testing.assert_array_equal(y, -2)


def test_a_buffer_reused_after_its_event_is_right(launcher: SimtLauncher) -> None:
    pinned, x, y = arrays(launcher)
    launcher.copy_async(x, pinned)
    launcher.synchronize(launcher.record())
    pinned[:] = -1
    Scale(launcher)(x, y, 2.0)
    np.testing.assert_array_equal(y, 2.0 * np.arange(100))


def test_a_result_read_before_its_copy_was_waited_for_shows(launcher: SimtLauncher) -> None:
    pinned, x, y = arrays(launcher)
    launcher.copy_async(x, pinned)
    Scale(launcher)(x, y, 2.0)
    back = launcher.pinned(400).view(np.float32)
    launcher.copy_async(back, y)
    assert np.isnan(back).all()
    launcher.synchronize(launcher.record())
    np.testing.assert_array_equal(back, 2.0 * np.arange(100))


def test_lazy_work_waits_until_it_is_waited_for(launcher: SimtLauncher) -> None:
    launcher.lazy = True
    pinned, x, y = arrays(launcher)
    launcher.copy_async(x, pinned)
    Scale(launcher)(x, y, 2.0)
    assert np.isnan(y).all()
    launcher.synchronize(launcher.record())
    np.testing.assert_array_equal(y, 2.0 * np.arange(100))


def test_a_graph_freezes_arguments_and_reads_memory_anew(launcher: SimtLauncher) -> None:
    pinned, x, y = arrays(launcher)
    scale = Scale(launcher)
    with launcher.capture() as graph:
        launcher.copy_async(x, pinned)
        scale(x, y, 2.0)
        scale.params["factor"] = 99.0  # too late: launches hold their parameters by value
    assert np.isnan(y).all()
    for start in (0, 50):
        pinned[:] = start + np.arange(100)
        graph.replay()
        np.testing.assert_array_equal(y, 2.0 * (start + np.arange(100)))


@pytest.mark.parametrize("forbidden", ["get", "empty", "pinned", "synchronize", "capture"])
def test_what_a_capture_forbids_is_refused(launcher: SimtLauncher, forbidden: str) -> None:
    arguments: dict[str, Any] = {"get": ("scale", "scale.cu", {}), "empty": ((1,), np.float32), "pinned": (1,)}
    arguments |= {"synchronize": (None,), "capture": ()}
    with launcher.capture(), pytest.raises(SimtError, match=f"`{forbidden}` while a graph is captured"):
        result = getattr(launcher, forbidden)(*arguments[forbidden])
        if forbidden == "capture":
            result.__enter__()


def test_an_empty_grid_launches_nothing(launcher: SimtLauncher) -> None:
    scale = Scale(launcher)
    x, y = launcher.empty((0,), np.float32), launcher.empty((4,), np.float32)
    scale(x, y, 1.0)
    assert np.isnan(y).all()


def test_copies_need_contiguous_arrays_of_equal_bytes(launcher: SimtLauncher) -> None:
    pinned, x, _ = arrays(launcher)
    for dst, src in ((x[:5], pinned), (x[::2], pinned[:50])):
        with pytest.raises(SimtError, match="two contiguous arrays of equal bytes"):
            launcher.copy_async(dst, src)


def test_the_protocol_has_the_same_methods_on_a_gpu() -> None:
    def public(kind: type) -> set[str]:
        return {name for name in vars(kind) if not name.startswith("_") and callable(getattr(kind, name))}

    assert public(Launcher) == public(CupyLauncher) <= public(SimtLauncher)


def test_a_compile_error_shows_kernel_constants_and_the_compilers_words(tmp_path: Path) -> None:
    (tmp_path / "broken.cu").write_text(
        'extern "C" __global__ void broken(const int p) { kWrong(); }', encoding="utf-8"
    )
    with pytest.raises(RuntimeError, match=r"(?s)\['broken'\].*'kHeadDim': 64.*broken\.cu:1.*kWrong"):
        SimtLauncher(folder=tmp_path).get("broken", "broken.cu", {"kHeadDim": 64})


def test_only_dynamic_shared_memory_is_accepted(tmp_path: Path) -> None:
    source = 'extern "C" __global__ void k(const int p) { __shared__ int x[4]; x[0] = p; }'
    (tmp_path / "k.cu").write_text(source, encoding="utf-8")
    with pytest.raises(RuntimeError, match="only `extern __shared__` memory is supported"):
        SimtLauncher(folder=tmp_path).get("k", "k.cu", {})


@pytest.mark.parametrize("arch", DEVICES)
def test_the_architecture_is_the_devices(arch: int, tmp_path: Path) -> None:
    source = "struct Params { int* y; };\n"
    source += 'extern "C" __global__ void k(const Params p) { p.y[0] = __CUDA_ARCH__; }'
    (tmp_path / "k.cu").write_text(source, encoding="utf-8")
    launcher = SimtLauncher(arch, folder=tmp_path)
    y = launcher.empty((1,), np.int32)
    params = np.array([(launcher.pointer(y),)], [("y", "u8")])
    launcher.launch(launcher.get("k", "k.cu", {}), (1, 1, 1), (1, 1, 1), params)
    assert y[0] == 10 * arch == 10 * launcher.info.arch
