"""Our own libraries and those that they rely on."""

from __future__ import annotations

import json
import platform
from importlib import metadata

from flashmoe_gguf.doctor.finding import Finding
from flashmoe_gguf.errors import FlashMoEError
from flashmoe_gguf.libs import library_dir

_PACKAGES = ("flashmoe-gguf", "llama-cpp-python", "gguf", "numpy", "cffi")


def check_software() -> list[Finding]:
    """Versions, and whether the libraries load together."""
    return [check_versions(), check_libraries()]


def check_versions() -> Finding:
    found = {name: _version(name) for name in _PACKAGES}
    needed = _built_from()
    value = ", ".join(f"{name} {version or 'missing'}" for name, version in found.items())
    data = {**found, "python": platform.python_version(), "built_from": needed}
    bindings = found["llama-cpp-python"]
    if needed and bindings != needed:
        return Finding(
            "versions",
            "hurts",
            value,
            f"the libraries were built for llama-cpp-python {needed}: install that version",
            data,
        )
    return Finding("versions", "good", f"{value}, Python {data['python']}", "", data)


def check_libraries() -> Finding:
    """Loads the patched llama.cpp and the expert cache, in this process."""
    try:
        from flashmoe_gguf._native import policy_names

        policies = sorted(policy_names())
    except FlashMoEError as error:
        return Finding("libraries", "hurts", error.message, error.hint)
    value = f"llama.cpp with its patches and the expert cache load; policies {', '.join(policies)}"
    return Finding("libraries", "good", value, "", {"policies": policies})


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        if package != "flashmoe-gguf":
            return None
        from flashmoe_gguf import __version__

        return __version__


def _built_from() -> str | None:
    """The version of llama-cpp-python whose llama.cpp was built; None where nothing says so."""
    try:
        text = (library_dir("patched").parent / "build.json").read_text(encoding="utf-8")
        version = json.loads(text)["archive"]["version"]
    except (FlashMoEError, OSError, ValueError, KeyError, TypeError):
        return None
    return version if isinstance(version, str) else None
