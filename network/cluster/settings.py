"""Timeouts and sizes of a cluster. Modules read them as ``settings.NAME``, so that a test can change one here."""

from __future__ import annotations

HEARTBEAT_S = 0.25
"""Interval between two heartbeats of a leader."""
PRESENCE_S = 1.0
"""Interval between two heartbeats of a follower, which tell others that it exists."""
LEADER_TIMEOUT_S = 1.0
"""Silence of the leader after which a follower runs for election."""
MAX_SILENCE_STEP_S = 2 * HEARTBEAT_S
"""Maximum silence counted between two looks: a node that was paused has not listened meanwhile."""
POLL_END_S = 1.0
"""Interval at which a follower asks for the end of a log from which no record comes."""
RETRY_S = 1.0
"""Pause before a node tries again to use a log that failed."""
RELEASE_TIMEOUT_S = 1.0
"""Maximum time in which a leader that stops writes its release into the log."""
DURABILITY_CHECK_S = 10.0
"""Interval at which a leader asks whether acknowledged records are on disks."""
UNREACHABLE_S = 5.0
"""Time without an answer of the engine after which a leader without writes gives up."""
READY_TIMEOUT_S = 1.0
"""Maximum time without an answer of the engine during which a leader counts as ready: another node may lead by then."""
SUCCESSOR_TIMEOUT_S = 1.0
"""Maximum time for which a node that stops waits for its successor, so that it can name it to clients."""
BACKLOG_S = 0.05
"""Maximum time in which a node that led looks through the broadcasts that it has not read."""
FIND_LEADER_TIMEOUT_S = 0.5
"""Maximum time in which a node that lost leadership looks for its successor in the log."""
STALE_END_GRACE_S = 2.0
"""Grace period during which a deposed server of the engine may report a stale end of log."""
QUIET_START_S = 2.0
"""Time for which a node that starts says nothing about a log that does not answer."""
MAX_CLOCK_OFFSET_MS = 60_000
"""Difference between the clocks of two nodes from which on one of them counts as wrong."""
CLOCK_OFFSET_S = 2.0
"""Time for which clocks have to differ before it counts: a node that was paused hears old heartbeats for a moment."""
INCOMPLETE_LOG_GRACE_S = 10.0
"""Time for which a node waits for a log that seems to be gone or shortened: servers that elect may report that."""
RESERVE_BYTES = 8 * 1024 * 1024
"""Room that commits leave free for the next claim, and for trims and snapshots, which make room. It is at most a 64th
of the log. A node claims no log with less than half of it."""
RECORD_OVERHEAD_BYTES = 256
"""Maximum size of what an engine stores beside a record."""
ROOM_CHECK_S = 1.0
"""Interval at which a leader asks whether a full log has room again."""
SMALL_TRIM_INTERVAL_S = 600.0
"""Minimum time between two steps of a trim that drop fewer rows than a step may."""
REPLICA_RETRY_S = 10.0
"""Pause before a follower tries again to start its read replica."""
SNAPSHOT_EVERY_RECORDS = 10_000
"""Records between the first one of the log and a new snapshot."""
SNAPSHOT_MIN_RECORDS, SNAPSHOT_FILL_DIVISOR = 100, 8
"""A snapshot is due earlier, after this many records, once an eighth of the log is full."""
SNAPSHOT_PAGE = 200
"""Values written per step of a snapshot. No commit is appended during a step."""
APPLY_ROWS, APPLY_BYTES = 256, 4 * 1024 * 1024
"""Rows and table writes, or bytes of records, that a follower that is behind applies in one transaction."""
