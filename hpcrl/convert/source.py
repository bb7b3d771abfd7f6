"""The settings of a run of another framework, as its file or its command names them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class SourceConfig:
    """What a file or a command sets.

    Attributes:
        given: settings that it names, by their present paths, in its order.
        names: present path of a setting to the name that it uses.
        unread: settings whose value cannot be read, by their present paths, with the reason.
    """

    given: dict[str, Any] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    unread: dict[str, str] = field(default_factory=dict)

    def __getitem__(self, path: str) -> Any:
        """Return the value of a setting, the framework's default where it is left out or could not be read."""
        raise NotImplementedError

    def number(self, path: str) -> int:
        """Return a whole number, at least 1; 1 where the source has something else, which is reported elsewhere."""
        value = self[path]
        return max(1, value) if isinstance(value, int) else 1

    def lack(self, path: str, name: str, reason: str) -> None:
        """Keep that the value which `name` gives a setting cannot be read."""
        self.unread[path], self.names[path] = reason, name
