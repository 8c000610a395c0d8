"""Our own libraries and those that they rely on, and the devices that they find."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict
from importlib import metadata

from flashmoe_gguf.budget import format_size
from flashmoe_gguf.devices import Device, device_backends, list_devices
from flashmoe_gguf.doctor.finding import Finding
from flashmoe_gguf.errors import FlashMoEError
from flashmoe_gguf.libs import library_dir, load_llama_cpp

_PACKAGES = ("flashmoe-gguf", "llama-cpp-python", "gguf", "numpy", "cffi")


def check_software() -> list[Finding]:
    """Versions, whether the libraries load together, and what `--ngl` could use."""
    return [check_versions(), check_libraries(), check_devices()]


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


def check_devices() -> Finding:
    """What llama.cpp can put layers on beside the processor."""
    try:
        llama_cpp = load_llama_cpp()
    except FlashMoEError:
        return Finding("devices", "note", "not known: the libraries do not load")
    found, backends = list_devices(llama_cpp), device_backends(llama_cpp)
    data = {"backends": backends, "devices": [asdict(device) for device in found]}
    if found:
        return Finding("devices", "good", ", ".join(map(_described, found)), "", data)
    if backends:
        value = f"none, though llama.cpp was built with {', '.join(backends)}"
        advice = "--ngl needs one: check the driver, and what hides devices from programs"
        return Finding("devices", "note", value, advice, data)
    value = "none: llama.cpp was built for the processor only"
    return Finding("devices", "good", value, "", data)


def _described(device: Device) -> str:
    free = f", {format_size(device.free_bytes)} free" if device.total_bytes else ""
    return f"{device.name} ({device.description}{free})"


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
