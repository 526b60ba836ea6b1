"""Threads that call at the same time, on one device: what one of them is doing there, no other may change."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from behaviour import make_case
from simt import build

import cupaged
from cupaged import cuda, shared_work
from cupaged.cuda_upload import DeviceSide

PAUSE = 0.1  # seconds, in which a thread that can go on does


class Memory:
    """A launcher whose copies take so long that another thread would refill the buffer they come from."""

    def __init__(self) -> None:
        self.staging = threading.Semaphore(0)

    def capturing(self) -> bool:
        self.staging.release()
        return False

    def empty(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        return np.empty(shape, dtype)

    pinned = staticmethod(lambda num_bytes: np.empty(num_bytes, np.uint8))
    record = synchronize = staticmethod(lambda *event: None)

    def copy_async(self, dst: np.ndarray, src: np.ndarray) -> None:
        for _ in range(2):  # this thread's own, and another's
            self.staging.acquire(timeout=PAUSE)
        dst[...] = src


def test_host_arrays_of_two_threads_do_not_meet_in_a_buffer() -> None:
    side = DeviceSide(Memory())
    arrays = [np.full(5, i, np.int32) for i in range(2)]
    with ThreadPoolExecutor(2) as threads:
        for found, sent in zip(threads.map(side._upload, arrays), arrays, strict=True):
            np.testing.assert_array_equal(found, sent)


def test_launches_of_one_call_follow_one_another(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second reads from memory of the stream what the first one wrote there."""
    if reason := build.unavailable():
        pytest.skip(reason)
    import simt_device

    monkeypatch.setattr(shared_work, "LAUNCH_BYTES_PER_SM", -1)
    monkeypatch.setattr(shared_work, "SUM_BYTES", 0)
    backend = cuda.Backend(simt_device.Launcher(90))
    case = make_case(rng, seq_lens=[40, 40], group=3, head_dim=64, block_size=16, dtype="float16", shared={1: (0, 2)})
    launch, copy, executor, launched = backend.launcher.launch, backend.launcher.copy_async, threading.Lock(), []

    def slowly(*arguments: Any) -> None:
        with executor:
            launched.append(threading.get_ident())
            launch(*arguments)
        threading.Event().wait(PAUSE)

    def copy_async(*arguments: Any) -> None:
        with executor:
            copy(*arguments)

    monkeypatch.setattr(backend.launcher, "launch", slowly)
    monkeypatch.setattr(backend.launcher, "copy_async", copy_async)

    def attend(_: int) -> np.ndarray:
        out: np.ndarray = cupaged.paged_attention(*case.arguments(), **case.options)
        return out

    with simt_device.in_place_of_a_gpu(backend), ThreadPoolExecutor(2) as threads:
        one, other = threads.map(attend, range(2))
    np.testing.assert_array_equal(one, other)
    assert len(launched) == 4 and len(set(launched)) == 2
    assert launched[0] == launched[1] and launched[2] == launched[3]


def test_a_device_has_one_backend_for_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2)

    class Made:
        def __init__(self, launcher: Any) -> None:
            both.wait(10)

    monkeypatch.setattr(cuda, "_backends", {})
    monkeypatch.setattr(cuda, "CupyLauncher", int)
    monkeypatch.setattr(cuda, "Backend", Made)
    with ThreadPoolExecutor(2) as threads:
        one, other = threads.map(cuda.backend, [0, 0])
    assert one is other is cuda.backend(0)
