"""What on this machine would make streaming slow, or fail: looked up and measured, not changed.

`finding` is what a check says; `drive`, `machine` and `software` hold the checks.
"""

from __future__ import annotations

from pathlib import Path

from flashmoe_gguf.doctor.drive import check_drive
from flashmoe_gguf.doctor.finding import Finding, System
from flashmoe_gguf.doctor.machine import check_machine
from flashmoe_gguf.doctor.software import check_software

__all__ = ["Finding", "System", "examine"]


def examine(folder: Path, *, seconds: float = 0.2, system: System | None = None) -> list[Finding]:
    """All findings for models in `folder`; each bandwidth is measured for `seconds`."""
    system = system or System()
    return [*check_drive(folder, system, seconds), *check_machine(system), *check_software()]
