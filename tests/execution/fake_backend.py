"""An attention backend of which only the facts matter."""

from collections.abc import Callable
from dataclasses import dataclass

from headrace.config.resolve import AttentionNeeds


@dataclass(frozen=True)
class FakeBackend:
    name: str
    page_size: int = 1
    verified: frozenset[str] = frozenset({"cpu"})
    captures: bool = False
    refuses: Callable[[AttentionNeeds], bool] = lambda needs: False

    def reasons_against(self, needs: AttentionNeeds) -> list[str]:
        return ["not here"] if self.refuses(needs) else []
