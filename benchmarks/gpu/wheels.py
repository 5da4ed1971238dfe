"""`python -m benchmarks.gpu.wheels FOLDER`: what a machine with torch and Triton alone still needs.

Downloads wheels for its Python, of the versions of this environment, which pass the tests. There
they need no installer:

    for wheel in FOLDER/*.whl; do python3 -m zipfile -e "$wheel" site; done
    PYTHONPATH=site python3 -m benchmarks.gpu

Without nixl, its cases of `transports` and `pairs` fail and the others go on.
"""

import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.support import report

# Of the node and of these phases; torch itself brings numpy, jinja2, yaml and packaging.
NEEDED = (
    *("msgspec", "structlog", "pyzmq", "uvicorn", "click", "h11", "httptools", "uvloop"),
    *("starlette", "anyio", "sniffio", "idna", "xxhash", "llguidance", "fla-core", "einops"),
    *("grpcio", "protobuf", "tokenizers", "safetensors", "prometheus-client", "psutil"),
    *("aiohttp", "aiosignal", "aiohappyeyeballs", "attrs", "frozenlist", "multidict"),
    *("propcache", "yarl", "typer", "rich", "markdown-it-py", "mdurl", "pygments"),
    *("shellingham", "annotated-doc", "pydantic", "pydantic-core", "annotated-types"),
    *("typing-inspection", "transformers", "regex", "huggingface-hub", "tqdm", "httpx2"),
    *("httpcore2", "truststore", "typing-extensions"),
)
NIXL, NIXL_UNUSED = "nixl-cu13", "nixl_ep"


def download(names: list[str], python: str, folder: Path) -> None:
    """Wheels of this environment's versions; none is built. Raises CalledProcessError."""
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in range(5, 40)]
    pinned = [f"{name}=={metadata.version(name)}" for name in names]
    options = ["--no-deps", "--only-binary=:all:", "--python-version", python]
    options += ["--implementation", "cp", "--dest", str(folder)]
    for platform in [*platforms, "manylinux2014_x86_64", "manylinux1_x86_64"]:
        options += ["--platform", platform]
    subprocess.run([sys.executable, "-m", "pip", "download", "-q", *options, *pinned], check=True)


def strip(wheel: Path) -> None:
    """Leaves the part of nixl out that only other engines use, half of its bytes."""
    part = wheel.with_suffix(".part")
    with zipfile.ZipFile(wheel) as full, zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED) as rest:
        for entry in full.infolist():
            if not entry.filename.startswith(NIXL_UNUSED):
                rest.writestr(entry, full.read(entry))
    part.rename(wheel)


def main(
    folder: Path,
    *,
    python: Annotated[str, typer.Option(help="Of that machine.")] = "3.12",
    nixl: Annotated[bool, typer.Option(help="With nixl.")] = False,
    leave_out: Annotated[list[str] | None, typer.Option(help="What it has; repeat.")] = None,
) -> None:
    """Downloads, and tells the size of each."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [name for name in NEEDED if name not in (leave_out or ())]
    download([*names, *([NIXL] if nixl else [])], python, folder)
    for wheel in folder.glob(f"{NIXL.replace('-', '_')}*.whl"):
        strip(wheel)
    sizes = {file.name: file.stat().st_size for file in folder.glob("*.whl")}
    rows = [(name.split("-cp")[0], f"{size / 1e6:.1f}") for name, size in sorted(sizes.items())]
    rows.append(("all", f"{sum(sizes.values()) / 1e6:.1f}"))
    Console(width=100).print(report.table("Wheels", ("wheel", "MB"), rows))


if __name__ == "__main__":
    typer.run(main)
