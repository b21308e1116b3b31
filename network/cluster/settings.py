"""Timeouts and sizes of a cluster. Modules read them as ``settings.NAME``, so that a test can change them here."""

from __future__ import annotations

HEARTBEAT_S = 0.25
"""Interval between two heartbeats of a leader, in seconds."""
PRESENCE_S = 1.0
"""Interval between two heartbeats of a follower, in seconds. The heartbeats show other nodes that the follower
exists."""
LEADER_TIMEOUT_S = 1.0
"""Silence of the leader, in seconds, after which a follower runs for election."""
MAX_SILENCE_STEP_S = 2 * HEARTBEAT_S
"""Maximum silence of the leader that counts between two checks, in seconds. A paused node could not receive
heartbeats."""
POLL_END_S = 1.0
"""Interval in seconds at which a follower asks for the end of a log from which no record arrives."""
RETRY_S = 1.0
"""Pause in seconds before a node tries again to use a log that failed."""
RELEASE_TIMEOUT_S = 1.0
"""Maximum time in which a leader that stops writes its release into the log, in seconds."""
DURABILITY_CHECK_S = 10.0
"""Interval at which a leader checks whether the engine keeps acknowledged records on disks, in seconds."""
UNREACHABLE_S = 5.0
"""Time in seconds without an answer of the engine after which a leader without writes gives up."""
READY_TIMEOUT_S = 1.0
"""Maximum time in seconds without an answer of the engine during which a leader counts as ready. Afterwards another
node may lead."""
SUCCESSOR_TIMEOUT_S = 1.0
"""Maximum time in seconds for which a stopping node waits for its successor, so that it can name the successor to
clients."""
BACKLOG_S = 0.05
"""Maximum time that a former leader spends on reading its unread broadcasts, in seconds."""
FIND_LEADER_TIMEOUT_S = 0.5
"""Maximum time in seconds in which a node that lost leadership looks for its successor in the log."""
STALE_END_GRACE_S = 2.0
"""Grace period in seconds during which a deposed server of the engine may report a stale end of log."""
QUIET_START_S = 2.0
"""Time for which a starting node waits for a silent log before it reports the problem, in seconds."""
MAX_CLOCK_OFFSET_MS = 60_000
"""Difference between the clocks of two nodes, in ms, from which on one of them counts as wrong."""
CLOCK_OFFSET_S = 2.0
"""Time in seconds for which clocks must differ before the difference counts. A paused node receives old heartbeats for
a moment."""
INCOMPLETE_LOG_GRACE_S = 10.0
"""Time in seconds for which a node waits for a log that seems to be gone or shortened. Servers may report this during
an election."""
RESERVE_BYTES = 8 * 1024 * 1024
"""Room that commits leave free for the next claim, and for trims and snapshots, which make room. It is at most a 64th
of the log. A node does not claim a log with less than half of this room."""
RECORD_OVERHEAD_BYTES = 256
"""Maximum number of bytes that an engine stores for a record in addition to the record itself."""
ROOM_CHECK_S = 1.0
"""Interval in seconds at which a leader asks whether a full log has room again."""
SMALL_TRIM_INTERVAL_S = 600.0
"""Minimum time in seconds between two steps of a trim that delete fewer rows than the maximum of a step."""
REPLICA_RETRY_S = 10.0
"""Pause in seconds before a follower tries again to start its read replica."""
SNAPSHOT_EVERY_RECORDS = 10_000
"""Number of records between the first record of the log and a new snapshot."""
SNAPSHOT_MIN_RECORDS, SNAPSHOT_FILL_DIVISOR = 100, 8
"""A snapshot is due earlier, after this many records, if an eighth of the log is full."""
SNAPSHOT_PAGE = 200
"""Number of values written per step of a snapshot. No commit is appended during a step."""
APPLY_ROWS, APPLY_BYTES = 256, 4 * 1024 * 1024
"""Number of rows and table writes, or bytes of records, that a follower applies in one transaction when it is
behind."""
