"""A policy in Python by its name: `package.module:Class`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flashmoe_gguf.errors import OptionError

_HINT = "give package.module:Class; docs/POLICIES.md shows what the class needs"


@dataclass(frozen=True)
class PolicyClass:
    """A class found by its name."""

    name: str
    policy: type[Any]

    def make(self, n_expert: Sequence[int], n_slots: Sequence[int]) -> Any:
        """An object of it; raises OptionError when it cannot be made."""
        try:
            return self.policy(n_expert, n_slots)
        except Exception as error:
            raise OptionError(
                f"policy {self.name} cannot be made: {_text(error)}",
                "its __init__ takes n_expert and n_slots, each a list with a number per layer",
            ) from error


def find_class(name: str) -> PolicyClass:
    """Imports `package.module:Class`; raises OptionError when that is no policy.

    Modules are looked for where Python does, and in the current folder.
    """
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise OptionError(f"'{name}' is not the name of a policy in Python", _HINT)
    here = "" not in sys.path
    if here:
        sys.path.append("")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # the module runs code of its own
        raise OptionError(f"policy {name}: cannot import: {_text(error)}", _HINT) from error
    finally:
        if here:
            sys.path.remove("")
    policy: Any = module
    for part in attribute.split("."):
        policy = getattr(policy, part, None)
    if policy is None:
        raise OptionError(f"policy {name}: {module_name} has no {attribute}", _HINT)
    if not isinstance(policy, type) or not callable(getattr(policy, "victim", None)):
        raise OptionError(f"policy {name} is not a class with a method victim", _HINT)
    return PolicyClass(name, policy)


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".replace("\n", " ")
