"""The registry of workers as a small program: what each call returns, and what is left."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Row:
    worker_id: str
    ttl: int
    registered_at: int
    heartbeat_at: int


@dataclass
class Registry:
    """Workers by namespace and instance. Time is in seconds, and moves when a test moves it."""

    now: int = 0
    rows: dict[tuple[str, str], Row] = field(default_factory=dict)
    told: dict[tuple[str, str], list[str]] = field(default_factory=dict)  # events without heartbeats

    def copy(self) -> Registry:
        return copy.deepcopy(self)

    def live(self, key: tuple[str, str]) -> Row | None:
        row = self.rows.get(key)
        return row if row is not None and row.heartbeat_at + row.ttl > self.now else None

    def _tell(self, key: tuple[str, str], event: str) -> None:
        self.told.setdefault(key, []).append(event)

    def register(self, key: tuple[str, str], worker_id: str, ttl: int) -> str:
        row = self.live(key)
        if row is not None and row.worker_id != worker_id:
            return "reassigned"
        if row is None:
            if key in self.rows:
                self._tell(key, "ttl_swept")
            self.rows[key] = Row(worker_id, ttl, self.now, self.now)
        else:
            self.rows[key] = Row(worker_id, ttl, row.registered_at, max(row.heartbeat_at, self.now))
        self._tell(key, "registered")
        return "registered" if row is None else "refreshed"

    def heartbeat(self, key: tuple[str, str]) -> str:
        row = self.live(key)
        if row is None:
            return "not_registered"
        self.rows[key] = Row(row.worker_id, row.ttl, row.registered_at, max(row.heartbeat_at, self.now))
        return "refreshed"

    def mark_dead(self, key: tuple[str, str]) -> str:
        if self.live(key) is None:
            return "not_registered"
        del self.rows[key]
        self._tell(key, "marked_dead")
        return "marked"

    def sweep(self) -> int:
        gone = [key for key in self.rows if self.live(key) is None]
        for key in gone:
            del self.rows[key]
            self._tell(key, "ttl_swept")
        return len(gone)

    def listed(self, namespace: str) -> list[tuple[str, str]]:
        return sorted((key[1], row.worker_id) for key in self.rows if key[0] == namespace and (row := self.live(key)))
