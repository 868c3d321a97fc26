"""Which code computes: the versions of the libraries that decide on numbers, and a digest of the package's own source.

No JAX.
"""

import hashlib
import platform
from functools import cache
from importlib import metadata
from pathlib import Path

PACKAGES = ("meshtrain", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


def versions() -> dict[str, str]:
    """Returns those of Python and the libraries here."""
    return {"python": platform.python_version()} | {
        name: _version(name) for name in PACKAGES
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # run from a checkout
        return "unknown"


@cache
def source_digest() -> str:
    """Returns SHA-256 over the package's Python files, by name; not over what editors leave beside them."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if not any(part.startswith(".") for part in name.parts):
            digest.update(
                f"{name.as_posix()}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\0".encode()
            )
    return digest.hexdigest()
