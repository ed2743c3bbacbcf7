"""A model of flows in plain Python, as the contract describes them. The engine must agree with it.

One `FlowModel` is one flow with its members, its edges and a clock that only the test moves. Executions are as simple
as flows allow: each call of a worker or an operator is a method here, without leases. Every method returns what the
engine should return, or raises `Refused` with the kind of the error, having changed nothing.

An end is resolved one hop far immediately, except for locked executions (`busy`); the rest, and everything after a
skip, waits as an undispatched event for `dispatch`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

OUTCOMES = {
    "completed": "success",
    "failed": "failed",
    "cancelled": "cancelled",
    "expired": "expired",
    "skipped": "skipped",
}
RUNNABLE = ("waiting", "delayed", "resumable", "waiting_children")
RACE_REASONS = ("sibling_quorum_satisfied", "sibling_quorum_impossible")
BACKOFF = 10_000
MAX_RETRIES = 3


class Refused(Exception):
    """A call that was refused, by the kind of its error."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


@dataclass
class Member:
    """An execution. `order` is the rank of its id."""

    name: str
    order: int
    created_at: int
    delay_until: int | None = None
    deadline: int | None = None
    state: str = "waiting"
    in_flow: bool = False
    frozen: bool = False
    lease_lost: bool = False
    pending: str | None = "first"
    resume_pending: bool = False
    attempts: int = 0
    retries: int = 0
    replays: int = 0
    result: bytes | None = None
    injected: bytes | None = None
    reason: str | None = None
    completed_at: int | None = None
    outcomes: list[str] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        return self.state in OUTCOMES

    @property
    def runs(self) -> int:
        """How many runs have ended: the first one and every replay."""
        return self.replays + self.ended

    @property
    def blocked_for(self) -> str | None:
        """The blocking reason."""
        if self.frozen:
            return "paused_by_flow_cancel"
        if self.state == "delayed":
            if self.pending == "retry":
                return "waiting_for_retry_backoff"
            return "waiting_for_resume_delay" if self.resume_pending else "waiting_for_delay"
        if self.state in ("waiting", "resumable") or self.lease_lost:
            return "waiting_for_worker"
        return {"waiting_children": "waiting_for_children", "suspended": "waiting_for_signal"}.get(self.state)


@dataclass
class Edge:
    """`outcome`: how the upstream ended, once that was counted. How runs before `from_run` ended does not count."""

    name: str
    up: Member
    down: Member
    ref: bool
    applied: bool = False
    outcome: str | None = None
    from_run: int = 0


@dataclass
class Group:
    """All applied edges into one member."""

    kind: str = "all_of"
    k: int | None = None
    cancel_rest: bool = False
    state: str = "pending"
    satisfied_at: int | None = None
    reason: str | None = None
    siblings: list[Member] | None = None  # to be cancelled; None: nothing is owed

    @property
    def races(self) -> bool:
        return self.kind != "all_of" and self.cancel_rest

    def decide(self, edges: Sequence[Edge]) -> str:
        """What the edges come to, for a group that is not decided."""
        n = len(edges)
        succeeded = sum(edge.outcome == "success" for edge in edges)
        lost = sum(edge.outcome not in (None, "success") for edge in edges)
        if self.kind == "all_of":
            return "impossible" if lost else "satisfied" if n and succeeded == n else "pending"
        if self.kind == "all_settled":
            return "satisfied" if n and succeeded + lost == n else "pending"
        assert self.k is not None
        if succeeded >= self.k:
            return "satisfied"
        return "impossible" if n >= self.k and lost > n - self.k else "pending"


@dataclass
class Event:
    """A completion event that is not dispatched. The engine numbers them."""

    member: Member
    run: int
    outcome: str
    number: int = 0


def final_states(
    fates: Mapping[str, str], edges: Sequence[tuple[str, str]], groups: Mapping[str, Group]
) -> tuple[dict[str, str], dict[str, str]]:
    """How a graph ends when nothing is cancelled: the states of its nodes, and of the groups of those with upstreams.

    `fates`: upstreams first, how each node ends if it is not skipped.
    """
    states: dict[str, str] = {}
    decisions: dict[str, str] = {}
    for name, fate in fates.items():
        states[name] = fate
        ups = [Member(up, 0, 0, state=states[up]) for up, down in edges if down == name]
        if ups:
            counted = [Edge("", up, up, ref=False, outcome=OUTCOMES[up.state]) for up in ups]
            decisions[name] = groups[name].decide(counted)
            if decisions[name] == "impossible":
                states[name] = "skipped"
    return states, decisions


class FlowModel:
    """A flow, the executions around it and the clock, in milliseconds."""

    def __init__(self, now: int) -> None:
        self.now = now
        self.members: dict[str, Member] = {}
        self.edges: dict[str, Edge] = {}
        self.groups: dict[str, Group] = {}
        self.events: list[Event] = []
        self.owed: list[Member] = []
        self.owed_reason = ""
        self.policy: str | None = None  # of the cancellation; None: the flow is open
        self.reason: str | None = None
        self.revision = 0

    # What is asked of it

    def into(self, member: Member) -> list[Edge]:
        return [edge for edge in self.edges.values() if edge.down is member and edge.applied]

    def group(self, member: Member) -> Group | None:
        """The group that says something about the member."""
        return self.groups.get(member.name) if self.into(member) else None

    def eligible(self, event: Event) -> list[Edge]:
        """The edges that an end is still to be counted on, in the order in which they are."""
        found = [
            edge
            for edge in self.edges.values()
            if edge.up is event.member and edge.applied and edge.outcome is None and edge.from_run <= event.run
        ]
        return sorted(found, key=lambda edge: edge.down.order)

    def claimable(self, member: Member) -> bool:
        if member.state == "active":
            return member.lease_lost and member not in self.owed
        return member.state in ("waiting", "resumable") and not member.frozen

    def summary(self) -> tuple[str, Counter[str]]:
        """The derived state and the buckets."""
        buckets = Counter("waiting" if m.state == "resumable" else m.state for m in self._all())
        if all(member.ended for member in self._all()):
            stopped = [m for m in self._all() if m.state == "cancelled" and m.reason not in RACE_REASONS]
            if self.policy is not None:
                return "cancelled", buckets
            return "failed" if buckets["failed"] or buckets["expired"] or stopped else "completed", buckets
        if buckets["active"]:
            return "running", buckets
        if any(buckets[state] for state in ("suspended", "delayed", "rate_limited", "waiting_children")):
            return "blocked", buckets
        return "open", buckets

    def _all(self) -> list[Member]:
        return [member for member in self.members.values() if member.in_flow]

    # The graph

    def create(self, name: str, order: int, delay_until: int | None = None, deadline: int | None = None) -> Member:
        made = Member(name, order, self.now, delay_until, deadline, "waiting" if delay_until is None else "delayed")
        self.members[name] = made
        return made

    def add(self, members: Iterable[Member]) -> int:
        self.check_open()
        for member in members:
            self.revision += not member.in_flow
            member.in_flow = True
        return len(self._all())

    def set_policy(self, member: Member, kind: str, k: int | None, cancel_rest: bool) -> str:
        self.check_open()
        if any(edge.down is member for edge in self.edges.values()):
            raise Refused("invalid_input")
        new = Group(kind, k, cancel_rest)
        if self.groups.get(member.name) == new:
            return "AlreadySet"
        self.groups[member.name] = new
        return "Set"

    def stage(self, edges: Sequence[tuple[str, Member, Member, bool]], revision: int) -> int:
        """Put edges (name, upstream, downstream, with a ref?) into the graph, all or none."""
        if any(up is down for _, up, down, _ in edges):
            raise Refused("self_referencing_edge")
        self.check_open()
        if revision != self.revision:
            raise Refused("stale_graph_revision")
        if not all(up.in_flow and down.in_flow for _, up, down, _ in edges):
            raise Refused("execution_not_in_flow")
        added: list[Edge] = []
        for name, up, down, ref in edges:
            if self._reaches(down, up, added):
                raise Refused("cycle_detected")
            added.append(Edge(name, up, down, ref))
        names = [edge.name for edge in added]
        if len(set(names)) < len(names) or any(name in self.edges for name in names):
            raise Refused("dependency_already_exists")
        self.edges.update((edge.name, edge) for edge in added)
        self.revision += len(added)
        return self.revision

    def _reaches(self, start: Member, goal: Member, more: Sequence[Edge]) -> bool:
        edges, seen, todo = [*self.edges.values(), *more], {start.name}, [start]
        while todo:
            at = todo.pop()
            if at is goal:
                return True
            for edge in edges:
                if edge.up is at and edge.down.name not in seen:
                    seen.add(edge.down.name)
                    todo.append(edge.down)
        return False

    def apply(self, names: Sequence[str]) -> int | None:
        """Let staged edges gate; answers what is unsatisfied of the last one's group, None if it was applied before."""
        self.check_open()
        if any(name not in self.edges for name in names):
            raise Refused("invalid_dependency")
        edges = [self.edges[name] for name in names]
        if edges[-1].applied:
            return None
        downs = {edge.down.name: edge.down for edge in edges}
        for edge in edges:
            edge.applied, edge.from_run = True, edge.up.replays
        for down in downs.values():
            group = self.groups.setdefault(down.name, Group())
            if group.kind in ("all_of", "all_settled") and group.state == "satisfied":
                group.state, group.satisfied_at = "pending", None
            if group.state == "pending":
                self._block(down)
        ended = [edge for edge in edges if edge.up.ended]
        ended.sort(key=lambda edge: edge.up.completed_at or 0)
        self._resolve([(edge, OUTCOMES[edge.up.state]) for edge in ended])
        for edge in edges:  # late losers of a race that is over
            group = self.groups[edge.down.name]
            if group.races and group.state != "pending" and not edge.up.ended:
                self._owe_siblings(group, [edge.up])
        return sum(edge.outcome is None for edge in self.into(edges[-1].down))

    def check_open(self) -> None:
        if self.policy is not None:
            raise Refused("flow_already_terminal")

    def _block(self, member: Member) -> None:
        if member.state in RUNNABLE and not member.frozen:
            member.state = "waiting_children"

    # Decisions

    def _resolve(self, counted: Sequence[tuple[Edge, str]]) -> int:
        """Count ends on edges, decide each group once, and do what that means. Answers how many edges were resolved."""
        news: dict[str, list[Edge]] = {}
        for edge, outcome in counted:
            if edge.outcome is None:
                edge.outcome = outcome
                news.setdefault(edge.down.name, []).append(edge)
        skipped = []
        for name, edges in news.items():
            down, group = self.members[name], self.groups[name]
            before = group.state
            if before == "pending":
                group.state = group.decide(self.into(down))
            self._inject(down, group, edges, flipped=before == "pending" and group.state == "satisfied")
            if before != "pending" or group.state == "pending":
                continue
            if group.races:
                self._owe_siblings(group, [edge.up for edge in self.into(down)])
            if group.state == "satisfied":
                group.satisfied_at = self.now
                self._release(down)
            elif not down.ended and down not in self.owed:
                skipped.append(down)
        self.end(skipped, "skipped")
        return sum(map(len, news.values()))

    def _inject(self, down: Member, group: Group, new: Sequence[Edge], *, flipped: bool) -> None:
        """The results of upstreams take the place of the input."""
        if down.ended:
            return
        wins = [edge for edge in new if edge.outcome == "success"]
        if group.kind in ("any_of", "quorum"):
            assert group.k is not None
            earlier = sum(edge.outcome == "success" for edge in self.into(down)) - len(wins)
            wins = wins[group.k - earlier - 1 : group.k - earlier] if flipped else []
        for edge in wins:
            if edge.ref and edge.up.result is not None:
                down.injected = edge.up.result

    def _release(self, member: Member) -> None:
        if member.state == "waiting_children":
            self._offer(member)

    def _offer(self, member: Member) -> None:
        """Where a member goes that waits for nothing but perhaps a time."""
        late = member.delay_until is not None and member.delay_until > self.now
        member.state = "delayed" if late else "resumable" if member.resume_pending else "waiting"
        if not late:
            member.delay_until = None

    def _owe_siblings(self, group: Group, members: Iterable[Member]) -> None:
        group.reason = RACE_REASONS[group.state == "impossible"]
        listed = {member.name: member for member in group.siblings or ()}
        listed.update((member.name, member) for member in members if not member.ended)
        group.siblings = sorted(listed.values(), key=lambda member: member.order)

    def _gate(self, member: Member) -> None:
        """A member has become runnable: one that is owed a cancel is frozen, one that has to wait is blocked."""
        group = self.group(member)
        if member in self.owed:
            self._freeze(member)
        elif group is not None and group.state == "pending":
            self._block(member)

    def _freeze(self, member: Member) -> None:
        member.state, member.frozen, member.delay_until = "waiting", True, None

    # Ends and the cascade

    def end(
        self,
        members: Sequence[Member],
        state: str,
        *,
        results: Mapping[str, bytes | None] | None = None,
        reason: str | None = None,
        busy: Collection[str] = (),
    ) -> None:
        """These end at once, and with them one hop of what that leads to."""
        for member in members:
            member.state, member.reason, member.completed_at = state, reason, self.now
            member.result = results and results.get(member.name)
            member.frozen = member.lease_lost = member.resume_pending = False
            member.pending = member.delay_until = None
            member.outcomes.append(OUTCOMES[state])
        ends = [Event(member, member.replays, OUTCOMES[state]) for member in members if member.in_flow]
        if state != "skipped":
            self._resolve([(edge, e.outcome) for e in ends for edge in self.eligible(e) if edge.down.name not in busy])
        self.events += [event for event in ends if self.eligible(event)]

    def dispatch(self, events: int, edges: int, left: Collection[str]) -> tuple[int, int, int]:
        """One chunk of what ends have left to do: events seen, events done, edges resolved.

        `left`: the edges that come last among those between the same two members; that is up to the engine.
        """
        oldest = sorted(self.events, key=lambda event: event.number)[:events]
        # Of a member that ended twice the first end counts first; the other is for the next chunk.
        chosen = [e for i, e in enumerate(oldest) if all(e.member is not before.member for before in oldest[:i])]
        chunk = [
            (edge, event.outcome)
            for event in chosen
            for edge in sorted(self.eligible(event), key=lambda edge: (edge.down.order, edge.name in left))
        ][:edges]
        resolved = self._resolve(chunk)
        done = [event for event in chosen if not self.eligible(event)]
        self.events = [event for event in self.events if event not in done]
        return len(chosen), len(done), resolved

    def dispatch_completion(self, event: Event) -> int:
        resolved = self._resolve([(edge, event.outcome) for edge in self.eligible(event)])
        self.events.remove(event)
        return resolved

    # What becomes of one execution

    def claim(self, member: Member) -> str | None:
        """How it was claimed: fresh, resumed or reclaimed; None when it may not be."""
        if not self.claimable(member):
            return None
        how = "reclaimed" if member.lease_lost else "resumed" if member.pending == "interrupted" else "fresh"
        member.attempts += how != "resumed"
        member.state, member.pending, member.resume_pending, member.lease_lost = "active", None, False, False
        return how

    def fail(self, member: Member, *, retryable: bool, busy: Collection[str] = ()) -> None:
        if not retryable or member.retries >= MAX_RETRIES:
            self.end([member], "failed", busy=busy)
            return
        member.retries += 1
        member.state, member.pending, member.delay_until = "delayed", "retry", self.now + BACKOFF
        self._gate(member)

    def wait_children(self, member: Member) -> None:
        group = self.group(member)
        member.state, member.pending = "waiting", "interrupted"
        if group is not None and group.state != "satisfied":
            member.state = "waiting_children"
        self._gate(member)

    def give_back(self, member: Member, delay: int = 0) -> None:
        """A worker releases it, with a delay or at once."""
        member.state, member.pending = "waiting", "interrupted"
        if delay:
            member.state, member.delay_until = "delayed", self.now + delay
        self._gate(member)

    def lose_lease(self, member: Member) -> None:
        member.lease_lost, member.pending = True, "interrupted"

    def suspend(self, member: Member) -> None:
        member.state, member.pending = "suspended", "interrupted"

    def resume(self, member: Member, delay: int) -> None:
        member.resume_pending = True
        member.delay_until = self.now + delay if delay else None
        self._offer(member)
        self._gate(member)

    def pass_time(self, by: int) -> None:
        """Time goes by, and what is due happens: deadlines first."""
        self.now += by
        late = [m for m in self.members.values() if not m.ended and m.deadline is not None and m.deadline <= self.now]
        self.end(late, "expired")
        for member in self.members.values():
            if member.state == "delayed" and member.delay_until is not None and member.delay_until <= self.now:
                self._offer(member)
                self._gate(member)

    def replay(self, member: Member) -> str:
        """Answers the branch."""
        if not member.ended:
            raise Refused("execution_not_terminal")
        if member.replays >= 10:
            raise Refused("max_replays_exhausted")
        self.acknowledge(member)  # it ended while it was owed a cancel: that is done
        member.replays += 1
        member.state, member.pending, member.result, member.reason = "waiting", "replay", None, None
        member.completed_at = member.deadline = None
        group = self.group(member)
        branch = "normal"
        if group is not None and (group.state != "satisfied" or group.kind == "all_settled"):
            branch = "skipped_flow_member"
            self._reset(member, group)
        self._gate(member)
        return branch

    def _reset(self, member: Member, group: Group) -> None:
        turned = [edge for edge in self.into(member) if edge.outcome not in (None, "success")]
        for edge in turned:
            if edge.up.state == "completed" or (edge.up.ended and group.kind == "all_settled"):
                edge.outcome = OUTCOMES[edge.up.state]
            else:
                edge.outcome, edge.from_run = None, edge.up.runs
        group.siblings = group.reason = group.satisfied_at = None
        group.state = "pending"
        group.state = group.decide(self.into(member))
        won = sorted((edge for edge in turned if edge.outcome), key=lambda edge: edge.up.completed_at or 0)
        self._inject(member, group, won, flipped=group.state == "satisfied")
        if group.state == "satisfied":
            group.satisfied_at = self.now
            if group.races:
                self._owe_siblings(group, [edge.up for edge in self.into(member)])

    # Cancels

    def cancel_siblings(self, down: Member, limit: int) -> tuple[str, int]:
        """One chunk of what a group owes: what became of it, and how many were cancelled."""
        group = self.groups[down.name]
        assert group.siblings is not None
        chunk, rest = group.siblings[:limit], group.siblings[limit:]
        group.siblings = rest or None
        live = [member for member in chunk if not member.ended]
        self.end(live, "cancelled", reason=group.reason)
        return "more" if rest else "drained", len(live)

    def reconcile_siblings(self, down: Member) -> str:
        group = self.groups.get(down.name)
        if group is None or group.siblings is None or not all(member.ended for member in group.siblings):
            return "no_op"
        group.siblings = None
        return "completed_drain"

    def cancel_header(self, policy: str, reason: str) -> int:
        """How many are owed a cancel; if the flow was closed before, those that were replayed since."""
        is_again = self.policy is not None
        if self.policy is None:
            self.policy, self.reason = policy, reason
        targets: list[Member] = []
        if self.policy != "flow_only":
            spared = ("active", "suspended") if self.policy == "cancel_pending" else ()
            targets = [m for m in self._all() if not m.ended and m.state not in spared and m not in self.owed]
            if is_again:
                targets = [m for m in targets if m.replays > 0]
        if not self.owed:
            self.owed_reason = reason
        self.owed = sorted(self.owed + targets, key=lambda member: member.order)
        for member in targets:
            if member.state in RUNNABLE:
                self._freeze(member)
        return len(targets)

    def cancel_members(self, limit: int) -> None:
        """One chunk of what a cancelled flow owes its members."""
        chunk = self.owed[:limit]
        self.end([m for m in chunk if not m.ended], "cancelled", reason=self.owed_reason or "flow_cancelled")
        self.owed = self.owed[limit:]

    def acknowledge(self, member: Member) -> None:
        self.owed = [one for one in self.owed if one is not member]
