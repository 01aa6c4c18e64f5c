"""Build the stand-in libraries beside a torch's own, and the environment that puts them first."""

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

HERE = Path(__file__).parent
LIBRARIES = {"cudart": ("memory.cpp", "streams.cpp"), "nccl": ("nccl.cpp",)}
HANDLE = "(void **made) { *made = (void *)16; return 0; }"
ANSWERS = {
    "cublasCreate_v2": HANDLE,
    "cublasLtCreate": HANDLE,
    "cublasLtMatmulDescCreate": HANDLE,
    "cublasLtMatrixLayoutCreate": HANDLE,
    "cublasLtMatmulPreferenceCreate": HANDLE,
    "cublasGetVersion_v2": "(void *handle, int *version) { *version = 130000; return 0; }",
    "cublasGetMathMode": "(void *handle, int *mode) { *mode = 0; return 0; }",
    "cublasGetPointerMode_v2": "(void *handle, int *mode) { *mode = 0; return 0; }",
    "cublasLtMatmulAlgoGetHeuristic": (
        "(void *a, void *b, void *c, void *d, void *e, void *f, void *g, int most, void *found,"
        " int *count) { *count = 1; return 0; }"
    ),
    "cuCtxGetCurrent": "(void **made) { *made = (void *)16; return 0; }",
}
"""Functions that have to answer something; all others say that they did well (0)."""


def packages() -> Path:
    """Where torch and NVIDIA's packages are."""
    spec = importlib.util.find_spec("torch")
    assert spec.origin is not None
    return Path(spec.origin).parent.parent


def missing() -> str:
    """What the stand-in lacks here; nothing if it can be built."""
    if shutil.which("g++") is None or shutil.which("nm") is None:
        return "needs g++ and nm"
    if importlib.util.find_spec("torch") is None:
        return "needs torch"
    if not (packages() / "torch/lib/libtorch_cuda.so").exists():
        return "needs torch's CUDA build"
    if not list((packages() / "nvidia").glob("cu13/include/cuda_runtime_api.h")):
        return "needs a torch for CUDA 13 with NVIDIA's packages"
    return ""


def _asked_for(prefix: str, *libraries: str) -> list[str]:
    """Functions that torch's libraries want from others."""
    found = set()
    for library in libraries:
        path = packages() / "torch/lib" / library
        words = ["nm", "-D", "--undefined-only", str(path)]
        for line in subprocess.run(
            words, capture_output=True, text=True, check=True
        ).stdout.split():
            name = line.split("@")[0]
            if name.startswith(prefix):
                found.add(name)
    return sorted(found)


def _plain(names: list[str]) -> str:
    lines = [f"int {name}{ANSWERS.get(name, '(void) { return 0; }')}" for name in names]
    return "\n".join([*lines, ""])


def build(folder: Path) -> dict[str, str]:
    """The libraries, made in a folder; the variables that a process needs to run on them."""
    nvidia = packages() / "nvidia"
    headers = [HERE / "include", nvidia / "cu13/include", nvidia / "nccl/include"]
    flags = ["-O1", "-fPIC", "-shared", *(f"-I{path}" for path in headers)]
    made = []
    for name, sources in LIBRARIES.items():
        made.append(folder / f"libstand_in_{name}.so")
        words = ["g++", "-std=c++17", "-Wall", "-Werror", *flags, *(str(HERE / s) for s in sources)]
        subprocess.run([*words, "-o", str(made[-1])], check=True)
    cublas, driver = folder / "cublas.c", folder / "driver.c"
    cublas.write_text(
        _plain([*_asked_for("cublas", "libtorch_cuda.so"), "cublasLtCreate", "cublasGetVersion_v2"])
    )
    driver.write_text(
        _plain([n for n in _asked_for("cu", "libcaffe2_nvrtc.so") if n[2:3].isupper()])
    )
    made.append(folder / "libstand_in_cublas.so")
    quiet = ["gcc", "-w", *flags]
    subprocess.run([*quiet, str(cublas), "-o", str(made[-1])], check=True)
    named = ["-Wl,-soname,libcuda.so.1", "-o", str(folder / "libcuda.so.1")]
    subprocess.run([*quiet, str(driver), *named], check=True)
    return {
        **os.environ,
        "LD_PRELOAD": ":".join(map(str, made)),
        "LD_LIBRARY_PATH": str(folder),
        "PYTHONPATH": os.pathsep.join([str(HERE / "site"), str(HERE.parents[1])]),
        "PYTHONWARNINGS": "ignore",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "STAND_IN_MEETS": str(folder),
    }
