"""The CPU backend on other machines: without Numba, on an older processor, in a second process that finds compiled code."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("numba", reason="the CPU backend needs numba: pip install 'cupaged[cpu]'")

ROOT = Path(__file__).parent.parent


def in_python(program: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]), **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("switched_off", [False, True], ids=["not installed", "NUMBA_DISABLE_JIT"])
def test_without_numba_one_warning_says_how_to_get_it(switched_off: bool) -> None:
    fix = "unset it" if switched_off else "pip install 'cupaged[cpu]'"
    printed = in_python(
        """
        import os, sys, warnings
        if "NUMBA_DISABLE_JIT" not in os.environ:
            sys.modules["numba"] = None
        import numpy as np, cupaged
        q = np.ones((1, 1, 8), np.float32)
        pages = np.ones((1, 1, 1, 8), np.float32)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                print(cupaged.paged_attention(q, pages, pages, [[0]], [1]).ravel()[0])
        print(len(caught), caught[0].message)
        try:
            import cupaged.cpu
        except ImportError as error:
            print(error)
        """,
        **({"NUMBA_DISABLE_JIT": "1"} if switched_off else {}),
    )
    assert printed.startswith("1.0\n1.0\n1 ")
    assert printed.count(fix) >= 2


@pytest.mark.parametrize("features", ["+sse2", "+avx2,+fma,+f16c,+sse4.2,+avx"])
def test_an_older_processor_gets_the_same_results(features: str, tmp_path: Path) -> None:
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("older x86 processors are only imitated on x86")
    printed = in_python(
        """
        import numpy as np, behaviour, devices
        from cupaged.cpu_vector import WIDTH
        rng = np.random.default_rng()
        for how in ({"dtype": "float16", "group": 3}, {"query_lens": [20, 9], "kv_dtype": "fp8_e4m3", "dtype": "bfloat16"}):
            case = behaviour.make_case(rng, seq_lens=[70, 9], head_dim=24, **how)
            behaviour.assert_close(case, *devices.cpu().paged_attention(*case.arguments(), **case.options))
        print("width", WIDTH)
        """,
        NUMBA_CPU_NAME="generic" if features == "+sse2" else "haswell",
        NUMBA_CPU_FEATURES=features,
        NUMBA_CACHE_DIR=str(tmp_path),
    )
    assert printed == "width 8\n"


def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    program = """
        import numpy as np, behaviour, devices
        case = behaviour.make_case(np.random.default_rng(0), seq_lens=[9], query_lens=[2])
        devices.cpu().paged_attention(*case.arguments(), **case.options)
        """
    in_python(program, NUMBA_CACHE_DIR=str(tmp_path))
    stored = sorted(p.stat().st_mtime_ns for p in tmp_path.rglob("*.nb*"))
    in_python(program, NUMBA_CACHE_DIR=str(tmp_path))
    assert stored
    assert sorted(p.stat().st_mtime_ns for p in tmp_path.rglob("*.nb*")) == stored


def test_no_two_specialisations_share_a_file_of_the_cache(tmp_path: Path) -> None:
    """Numba numbers the entries of one index file, and two processes that add one each at the same time take the same number."""
    program = """
        import numpy as np, cupaged
        for dtype, sinks in ((np.float32, np.zeros(8, np.float32)[::2]), (np.float16, None)):
            k = np.zeros((2, 4, 8), dtype)
            cache = np.zeros((1, 4, 4, 8), dtype)
            cupaged.write_kv(k, k, cache, cache.copy(), np.zeros(2, int))
            k.flags.writeable = False
            cupaged.merge_states(k[None], np.zeros((1, 2, 4), np.float32), sinks)
        """
    in_python(program, NUMBA_CACHE_DIR=str(tmp_path))
    indices, codes = ({path.name.split(".py3")[0] for path in tmp_path.rglob(f"*.{kind}")} for kind in ("nbi", "nbc"))
    assert indices == codes and len(codes) == len(list(tmp_path.rglob("*.nbc"))) > 3
