"""`make gpu-check` where there is no GPU: what it asks of peers, how it puts figures together, what the wheel has of it."""

from __future__ import annotations

import ast
import inspect
import json
import sys
import time
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench import gpu_attention, gpu_check, gpu_peers

ROOT = Path(__file__).resolve().parent.parent

# What FlashInfer's wrappers take, in order; later versions have added keyword arguments, and made all after page_size keywords.
DECODE = (
    "workspace kv_layout use_cuda_graph use_tensor_cores indptr_buffer indices_buffer last_page_len_buffer jit_args"
)
DECODE_PLAN = "indptr indices last_page_len num_qo_heads num_kv_heads head_dim page_size"
DECODE_OPTIONS = (
    "pos_encoding_mode window_left logits_soft_cap q_data_type kv_data_type data_type sm_scale non_blocking"
)
PREFILL = "workspace kv_layout use_cuda_graph qo_indptr_buf indptr_buf indices_buf last_page_len_buf custom_mask_buf mask_indptr_buf"
PREFILL_PLAN = f"qo_indptr {DECODE_PLAN}"
PREFILL_OPTIONS = (
    "head_dim_vo custom_mask packed_custom_mask causal pos_encoding_mode q_data_type kv_data_type non_blocking"
)


def accepting(names: str, keywords: str = "") -> inspect.Signature:
    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    return inspect.Signature(
        [inspect.Parameter(n, kinds[0], default=None) for n in names.split()]
        + [inspect.Parameter(n, kinds[1], default=None) for n in keywords.split()]
    )


@pytest.mark.parametrize("rows", [1, 4])
def test_flashinfer_is_asked_as_every_version_since_0_2_wants(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    case = gpu_attention.Case(3, 40, num_heads=8, num_kv_heads=2, head_dim=64, rows=rows)
    planned: list[inspect.BoundArguments] = []

    def wrapper(made: inspect.Signature, plan: inspect.Signature) -> Any:
        def make(*given: Any, **named: Any) -> Any:
            made.bind(*given, **named)

            def plan_(*given: Any, **named: Any) -> None:
                planned.append(plan.bind(*given, **named))

            return SimpleNamespace(plan=plan_, run=lambda q, pages: (q, pages))

        return make

    flashinfer = SimpleNamespace(
        BatchDecodeWithPagedKVCacheWrapper=wrapper(accepting(DECODE), accepting(DECODE_PLAN, DECODE_OPTIONS)),
        BatchPrefillWithPagedKVCacheWrapper=wrapper(
            accepting(f"{PREFILL} backend jit_args"), accepting(PREFILL_PLAN, PREFILL_OPTIONS)
        ),
    )
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer)
    monkeypatch.setattr(
        gpu_peers, "_tensor", lambda torch, x, dtype: SimpleNamespace(dtype=dtype, device="cuda", array=x)
    )
    torch = SimpleNamespace(as_tensor=lambda x, device: x, zeros=lambda *a, **k: None, uint8=None)
    tables = np.arange(9, dtype=np.int32).reshape(3, 3)
    made = gpu_attention.Arrays(["p0", "p1"], [], tables, np.full(3, 40, np.int32), "q")
    call = gpu_peers._flashinfer(torch, case, made)
    assert call(3)[1].array == "p1"
    bound = planned[0].arguments
    assert bound["indptr"].tolist() == [0, 3, 6, 9] and bound["indices"].tolist() == list(range(9))
    assert bound["last_page_len"].tolist() == [8, 8, 8], "40 tokens end with 8 in the third block of 16"
    assert (bound["num_qo_heads"], bound["num_kv_heads"], bound["head_dim"], bound["page_size"]) == (8, 2, 64, 16)
    if rows > 1:
        assert bound["qo_indptr"].tolist() == [0, 4, 8, 12] and bound["causal"] is True


def test_times_of_peers_come_to_their_cases() -> None:
    results: list[dict[str, Any]] = [
        {"case": "a", "peer_us": {}},
        {"case": "b", "error": "x"},
        {"case": "c", "peer_us": {}},
    ]
    lines = [
        json.dumps({"case": "a", "peer": "sdpa", "us": 2.5}), "ninja: 3 files", "{", "[]",
        json.dumps({"case": "b", "peer": "sdpa", "us": 1}), json.dumps({"case": "c", "peer": "flashinfer", "us": "Error: no"}),
    ]  # fmt: skip
    gpu_check.add_peers("\n".join(lines), results)
    assert [r.get("peer_us") for r in results] == [{"sdpa": 2.5}, None, {"flashinfer": "Error: no"}]


def test_a_case_has_one_name() -> None:
    names = [case.name for case in gpu_attention.CASES]
    assert len(set(names)) == len(names)


def test_what_takes_too_long_is_stopped_with_its_children(tmp_path: Path) -> None:
    script = "import subprocess, sys; print('begun', flush=True); subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    start = time.monotonic()
    status = gpu_check.run([sys.executable, "-c", script], tmp_path / "log", 2.0)
    assert status == 124 and time.monotonic() - start < 40
    assert "begun" in (tmp_path / "log").read_text()


def test_the_wheel_has_what_its_benchmarks_import() -> None:
    """`python -m cupaged bench` of an installed package finds no other file of this folder."""
    included = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    files = {Path(name).stem for name in included["force-include"] if name.startswith("bench/")}
    for name in sorted(files):
        for node in ast.walk(ast.parse((ROOT / "bench" / f"{name}.py").read_text())):
            if isinstance(node, ast.ImportFrom) and node.level == 1:
                wanted = {node.module.split(".")[0]} if node.module else {alias.name for alias in node.names}
                assert wanted <= files, (
                    f"bench/{name}.py imports {wanted - files}, which pyproject.toml leaves out of the wheel"
                )
