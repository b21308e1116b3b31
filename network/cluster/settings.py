"""Timeouts and sizes of a cluster. Other modules read these constants as ``settings.NAME``, so that tests can change
them in this module.
"""

from __future__ import annotations

HEARTBEAT_S = 0.25
"""Interval between two heartbeats of a leader, in seconds."""
PRESENCE_S = 1.0
"""Interval between two heartbeats of a follower, in seconds. These heartbeats show the other nodes that the follower is
running."""
LEADER_TIMEOUT_S = 1.0
"""Time without a heartbeat of the leader after which a follower starts an election, in seconds."""
MAX_SILENCE_STEP_S = 2 * HEARTBEAT_S
"""Maximum silence of the leader that a follower counts between two checks, in seconds. Without this limit, a follower
that was paused and could not receive heartbeats would depose a healthy leader."""
POLL_END_S = 1.0
"""Interval at which a follower without new records queries the end of the log, in seconds."""
RETRY_S = 1.0
"""Pause before a node tries to use the log again after a failure, in seconds."""
RELEASE_TIMEOUT_S = 1.0
"""Maximum time for which a stopping leader tries to write its release to the log, in seconds."""
DURABILITY_CHECK_S = 10.0
"""Interval at which a leader checks whether the engine's settings keep acknowledged records on disk, in seconds."""
UNREACHABLE_S = 5.0
"""Time without an answer from the engine after which an idle leader gives up leadership, in seconds."""
READY_TIMEOUT_S = 1.0
"""Maximum time without an answer from the engine for which a leader still counts as ready, in seconds. After a longer
silence, another node may already be the leader."""
SUCCESSOR_TIMEOUT_S = 1.0
"""Maximum time for which a stopping leader waits for its successor, in seconds. The leader directs its clients to the
successor."""
BACKLOG_S = 0.05
"""Maximum time for which a former leader reads unread broadcasts, in seconds."""
FIND_LEADER_TIMEOUT_S = 0.5
"""Maximum time for which a deposed leader searches the log for its successor, in seconds."""
STALE_END_GRACE_S = 2.0
"""Time for which a deposed server of the engine may report an old end of the log, in seconds."""
QUIET_START_S = 2.0
"""Time after which a starting node reports that the log does not answer, in seconds."""
MAX_CLOCK_OFFSET_MS = 60_000
"""Minimum difference between the clocks of two nodes at which one of them counts as wrong, in ms."""
CLOCK_OFFSET_S = 2.0
"""Time for which the clocks of two nodes must differ before the difference counts, in seconds. A shorter difference may
be an error, because a node that was paused receives old heartbeats for a moment."""
INCOMPLETE_LOG_GRACE_S = 10.0
"""Time for which a node waits for a log that seems to be missing or shortened, in seconds. During an election of the
engine's servers, such a report may be wrong."""
RESERVE_BYTES = 8 * 1024 * 1024
"""Number of bytes in the log that commits must leave free. The next claim, trims and snapshots need this reserve, and
trims and snapshots make new room. The reserve is at most 1/64 of the log. A node does not claim a log if less than half
of the reserve is free."""
RECORD_OVERHEAD_BYTES = 256
"""Maximum number of bytes that an engine stores for a record in addition to the record's own data."""
ROOM_CHECK_S = 1.0
"""Interval at which a leader checks whether a full log has room again, in seconds."""
SMALL_TRIM_INTERVAL_S = 600.0
"""Minimum time between two small steps of a trim, in seconds. A step is small if it is the last step of its trim."""
REPLICA_RETRY_S = 10.0
"""Pause before a follower tries to start its read replica again, in seconds."""
SNAPSHOT_EVERY_RECORDS = 10_000
"""Number of records in the log at which the leader writes a new snapshot."""
SNAPSHOT_MIN_RECORDS, SNAPSHOT_FILL_DIVISOR = 100, 8
"""Conditions for an earlier snapshot: the log has at least 100 records, and 1/8 of its maximum size is used."""
SNAPSHOT_PAGE = 200
"""Number of values that are written in one step of a snapshot. No commit can be appended during a step."""
APPLY_ROWS, APPLY_BYTES = 256, 4 * 1024 * 1024
"""Limits of one transaction while a follower catches up: the number of rows and table writes, and the number of
bytes."""
