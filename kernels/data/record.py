"""Records: arguments that belong together, and the names under which kernels read them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Record:
    """Arguments of a pass that belong together, a dataclass. Its `arguments` are the one list from which both backends
    take what a kernel reads: a kernel's parameter gets the argument of the same name.
    """

    def arguments(self, name: str) -> dict[str, Any]:
        """What a kernel may read of this record, if it is an argument with that name: the fields, by name. A field that
        is a record itself stands for the arguments of that one."""
        found = vars(self).copy()
        for name, value in vars(self).items():
            if isinstance(value, Record):
                found |= value.arguments(name)
        return found


class NamedRecord(Record):
    """A record whose fields kernels read under the record's name and their own: residual_value."""

    def arguments(self, name: str) -> dict[str, Any]:
        found = {}
        for field, value in vars(self).items():
            found[f"{name}_{field}"] = value
        return found


def argument(found: Mapping[str, Any], name: str) -> Any:
    """The argument that a kernel's parameter gets. None for a part of a record in whose place there is another value:
    None, or a tensor where there may be messages.
    """
    if name in found:
        return found[name]
    record = name.partition("_")[0]
    assert record in found, f"no pass has the field {name}: a kernel's parameters have the names of fields"
    assert not any(other.startswith(f"{record}_") for other in found), f"{record} has no {name}"
    return None
