"""The emitted tokens of every attempt, and which front has got how many of them.

The engine never waits for a front. A token is appended to its attempt's record; a record that is watched is sent on
from the position its front asked for, a few batches ahead of what the front's stream has taken. What a slow front has
not taken yet simply stays in the records, so nothing is stored twice and a front that reconnects is served from the
same place. A record lives until its front says Forget, or for a named time after its attempt has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.agent.effects import SendRuns
from cluster.agent.limits import AgentLimits
from cluster.core.ids import AttemptId, FrontId, Outcome
from cluster.core.messages import LegTimeline
from cluster.core.token_messages import PROMPT_CHOICE, Forget, TokenInfo, TokenRun, Watch

RecordKey = tuple[AttemptId, int]
"""Attempt and choice (or PROMPT_CHOICE)."""


@dataclass(slots=True, kw_only=True)
class TokenRecord:
    """One choice's tokens from `first_position` on; `next_position` is the first one not yet handed to `front`."""

    attempt: AttemptId
    choice: int
    first_position: int
    next_position: int
    tokens: list[TokenInfo] = field(default_factory=list)
    front: FrontId | None = None
    finish: Outcome | None = None
    timeline: LegTimeline | None = None
    is_timeline_sent: bool = False
    is_ended: bool = False
    is_end_sent: bool = False
    is_forgotten: bool = False

    @property
    def key(self) -> RecordKey:
        return (self.attempt, self.choice)

    @property
    def end_position(self) -> int:
        return self.first_position + len(self.tokens)

    @property
    def has_news(self) -> bool:
        return self.next_position < self.end_position or (self.is_ended and not self.is_end_sent)


@dataclass(slots=True)
class _Link:
    """A connected front. `dirty` holds its records with news, in the order in which they got them."""

    dirty: dict[RecordKey, TokenRecord] = field(default_factory=dict)
    num_in_flight: int = 0
    num_stalled_tokens: int = 0


class Outbox:
    """See the module docstring."""

    def __init__(self, limits: AgentLimits) -> None:
        self._limits = limits
        self._records: dict[RecordKey, TokenRecord] = {}
        self._choices: dict[AttemptId, dict[int, None]] = {}
        """Of which each attempt has a record."""
        self._links: dict[FrontId, _Link] = {}
        self._touched: dict[FrontId, None] = {}
        # Both in the order of their deadlines, since each has one time to live.
        self._ended_ns: dict[RecordKey, int] = {}
        self._early_watches: dict[RecordKey, tuple[int, FrontId, Watch]] = {}

    # ---- records ----

    def open(self, attempt: AttemptId, choice: int, *, first_position: int) -> None:
        """A choice of an attempt starts here; a watch that came before it takes effect."""
        key = (attempt, choice)
        assert key not in self._records
        self._choices.setdefault(attempt, {})[choice] = None
        self._records[key] = TokenRecord(
            attempt=attempt, choice=choice, first_position=first_position, next_position=first_position
        )
        early = self._early_watches.pop(key, None)
        if early is not None:
            _, front, watch = early
            self._attach(self._records[key], front, watch.next_position)

    def has(self, attempt: AttemptId) -> bool:
        """Whether tokens of any choice of it are kept."""
        return attempt in self._choices

    def finished(self) -> list[AttemptId]:
        """Attempts of which every answer has ended here and is kept, and none goes on elsewhere."""
        ended = {
            attempt: [self._records[(attempt, choice)] for choice in choices if choice != PROMPT_CHOICE]
            for attempt, choices in self._choices.items()
        }
        return [attempt for attempt, records in ended.items() if records and all(r.finish is not None for r in records)]

    def append(self, attempt: AttemptId, choice: int, position: int, tokens: Sequence[TokenInfo]) -> None:
        record = self._records[(attempt, choice)]
        assert position == record.end_position, f"{attempt}: position {position} after {record.end_position - 1}"
        record.tokens.extend(tokens)
        self._mark(record)
        if record.front is not None and self._links[record.front].num_in_flight:
            self._links[record.front].num_stalled_tokens += len(tokens)

    def measured(self, attempt: AttemptId, choice: int, timeline: LegTimeline) -> None:
        """What is known before the end, since a front may need no more than the beginning. Goes with the next run."""
        self._records[(attempt, choice)].timeline = timeline

    def end_position(self, attempt: AttemptId, choice: int) -> int:
        """Position of its next token."""
        return self._records[(attempt, choice)].end_position

    def end(
        self, now_ns: int, attempt: AttemptId, choice: int, *, finish: Outcome | None, timeline: LegTimeline
    ) -> None:
        """No more tokens of it come from this worker; without `finish` another worker goes on."""
        record = self._records[(attempt, choice)]
        assert not record.is_ended
        record.is_ended = True
        record.finish = finish
        record.timeline = timeline
        self._mark(record)
        if record.is_forgotten:
            self._remove(record.key)
            return
        self._ended_ns[record.key] = now_ns
        if len(self._ended_ns) > self._limits.max_finished_records:
            self._remove(next(iter(self._ended_ns)))

    def drop(self, attempt: AttemptId) -> None:
        """The attempt failed or was cancelled: nobody gets more of it. What had ended before stays to be fetched."""
        self._drop_early_watches(attempt)
        for record in self._records_of(attempt):
            if not record.is_ended:
                self._remove(record.key)

    # ---- fronts ----

    def connect(self, front: FrontId) -> bool:
        """A stream has opened (or replaced an older one of the same front). False: too many fronts."""
        self.disconnect(front)
        if len(self._links) >= self._limits.max_fronts:
            return False
        self._links[front] = _Link()
        return True

    def disconnect(self, front: FrontId) -> None:
        """The front's stream has ended; its records wait for its next one."""
        self._touched.pop(front, None)
        if self._links.pop(front, None) is None:
            return
        for record in self._records.values():
            if record.front == front:
                record.front = None
        for key in [key for key, early in self._early_watches.items() if early[1] == front]:
            del self._early_watches[key]

    def request(self, now_ns: int, front: FrontId, request: Watch | Forget) -> None:
        """What a front said on its stream. Requests of a front whose stream has just ended are ignored."""
        if front not in self._links:
            return
        if isinstance(request, Forget):
            self._forget(request.attempt, request.choice)
            return
        key = (request.attempt, request.choice)
        record = self._records.get(key)
        if record is not None:
            self._attach(record, front, request.next_position)
            return
        self._early_watches.pop(key, None)
        self._early_watches[key] = (now_ns, front, request)
        if len(self._early_watches) > self._limits.max_early_watches:
            del self._early_watches[next(iter(self._early_watches))]

    def written(self, front: FrontId) -> None:
        """The front's stream has taken a batch."""
        link = self._links.get(front)
        if link is None:
            return
        assert link.num_in_flight > 0, f"{front}: more batches taken than sent"
        link.num_in_flight -= 1
        link.num_stalled_tokens = 0
        if link.dirty:
            self._touched[front] = None

    def stalled(self) -> list[AttemptId]:
        """Unended attempts of fronts that do not read, once for each of their choices."""
        fronts = [f for f in self._touched if self._links[f].num_stalled_tokens > self._limits.max_stalled_tokens]
        if not fronts:
            return []
        return [r.attempt for r in self._records.values() if r.front in fronts and not r.is_ended]

    def flush(self) -> list[SendRuns]:
        """Everything that may be sent now, at most a few batches a front."""
        batches: list[SendRuns] = []
        for front in self._touched:
            link = self._links[front]
            while link.dirty and link.num_in_flight < self._limits.max_batches_in_flight:
                link.num_in_flight += 1
                batches.append(SendRuns(front=front, runs=self._next_batch(link)))
        self._touched.clear()
        return batches

    # ---- time ----

    def expire(self, now_ns: int) -> None:
        while (deadline_ns := self._record_deadline_ns()) is not None and deadline_ns <= now_ns:
            self._remove(next(iter(self._ended_ns)))
        while (deadline_ns := self._watch_deadline_ns()) is not None and deadline_ns <= now_ns:
            del self._early_watches[next(iter(self._early_watches))]

    def next_deadline_ns(self) -> int | None:
        deadlines = [d for d in (self._record_deadline_ns(), self._watch_deadline_ns()) if d is not None]
        return min(deadlines, default=None)

    def num_records(self) -> int:
        return len(self._records)

    def num_early_watches(self) -> int:
        return len(self._early_watches)

    # ---- inside ----

    def _record_deadline_ns(self) -> int | None:
        ended_ns = next(iter(self._ended_ns.values()), None)
        return None if ended_ns is None else ended_ns + self._limits.finished_record_ttl_ns

    def _watch_deadline_ns(self) -> int | None:
        early = next(iter(self._early_watches.values()), None)
        return None if early is None else early[0] + self._limits.early_watch_ttl_ns

    def _attach(self, record: TokenRecord, front: FrontId, next_position: int) -> None:
        if record.front is not None:
            self._links[record.front].dirty.pop(record.key, None)
        record.front = front
        # Earlier positions than this attempt's first were delivered by earlier attempts.
        record.next_position = max(next_position, record.first_position)
        record.is_end_sent = False
        record.is_timeline_sent = False
        record.is_forgotten = False
        self._mark(record)

    def _mark(self, record: TokenRecord) -> None:
        if record.front is not None and record.has_news:
            self._links[record.front].dirty[record.key] = record
            self._touched[record.front] = None

    def _records_of(self, attempt: AttemptId) -> list[TokenRecord]:
        return [self._records[(attempt, choice)] for choice in self._choices.get(attempt, {})]

    def _drop_early_watches(self, attempt: AttemptId) -> None:
        for key in [key for key in self._early_watches if key[0] == attempt]:
            del self._early_watches[key]

    def _forget(self, attempt: AttemptId, choice: int | None) -> None:
        """Of an attempt, or of one of its choices."""
        if choice is None:
            self._drop_early_watches(attempt)
        for record in self._records_of(attempt):
            if choice is not None and record.choice != choice:
                continue
            if record.is_ended:
                self._remove(record.key)
            else:
                record.is_forgotten = True
                self._detach(record)

    def _detach(self, record: TokenRecord) -> None:
        if record.front is not None:
            self._links[record.front].dirty.pop(record.key, None)
            record.front = None

    def _remove(self, key: RecordKey) -> None:
        attempt, choice = key
        self._detach(self._records.pop(key))
        self._ended_ns.pop(key, None)
        del self._choices[attempt][choice]
        if not self._choices[attempt]:
            del self._choices[attempt]

    def _next_batch(self, link: _Link) -> tuple[TokenRun, ...]:
        budget = self._limits.max_tokens_per_batch
        runs: list[TokenRun] = []
        for key in list(link.dirty):
            if not budget:
                break
            record = link.dirty[key]
            run = _next_run(record, budget)
            budget -= len(run.tokens)
            runs.append(run)
            record.next_position = run.position + len(run.tokens)
            record.is_end_sent = run.leg_done or run.finish is not None
            record.is_timeline_sent = record.timeline is not None
            if not record.has_news:
                del link.dirty[key]
        return tuple(runs)

    def check_invariants(self) -> None:
        listed = [(attempt, choice) for attempt, choices in self._choices.items() for choice in choices]
        assert sorted(listed) == sorted(self._records) and all(self._choices.values()), "choices without a record"
        for key, record in self._records.items():
            assert record.key == key
            assert record.is_ended == (key in self._ended_ns), f"{key}: ended but without a time to live"
            assert record.next_position >= record.first_position
            if record.front is None:
                continue
            link = self._links[record.front]
            assert record.has_news == (key in link.dirty), f"{key}: news {record.has_news} but not so marked"
        for front, link in self._links.items():
            assert 0 <= link.num_in_flight <= self._limits.max_batches_in_flight
            is_full = link.num_in_flight == self._limits.max_batches_in_flight
            assert not link.dirty or is_full or front in self._touched, f"{front}: news that nothing will send"
            for key, record in link.dirty.items():
                assert self._records.get(key) is record and record.front == front
        assert len(self._links) <= self._limits.max_fronts
        assert len(self._ended_ns) <= self._limits.max_finished_records
        assert len(self._early_watches) <= self._limits.max_early_watches


def _next_run(record: TokenRecord, max_tokens: int) -> TokenRun:
    # A front may have asked for a position that is not drawn yet; the run is then empty and only carries the end.
    start = min(record.next_position, record.end_position)
    first = start - record.first_position
    tokens = tuple(record.tokens[first : first + max_tokens])
    is_last = record.is_ended and start + len(tokens) == record.end_position
    return TokenRun(
        attempt=record.attempt,
        choice=record.choice,
        position=start,
        tokens=tokens,
        finish=record.finish if is_last else None,
        leg_done=is_last,
        timeline=record.timeline if is_last or not record.is_timeline_sent else None,
    )
