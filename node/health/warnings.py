"""Standing warnings of one node: what is not in order now, in words for its owner."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field


@dataclass(slots=True)
class Health:
    """Warnings by topic: set while a condition lasts, cleared when it ends, each logged once."""

    log: logging.Logger
    warnings: dict[str, str] = field(default_factory=dict)

    def warn(self, topic: str, text: str) -> None:
        """Let ``text`` stand under ``topic``."""
        if self.warnings.get(topic) != text:
            self.log.warning("%s", text)
        self.warnings[topic] = text

    def clear(self, topic: str) -> None:
        """The condition is over."""
        if self.warnings.pop(topic, None) is not None:
            self.log.info("%s: in order again", topic)
