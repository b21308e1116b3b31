"""Sources from which a run can be read: a node, with the caller's rights (`node_source`), or a ledger file
(`file_source`).

All sources provide the causes and effects of a message, reactions with their records, messages, and the log. A node
also provides new messages.
"""

from __future__ import annotations

from typing import TypeAlias

from roundelay.runs.file_source import FileSource
from roundelay.runs.node_source import LiveSource, NodeSource

Source: TypeAlias = LiveSource | FileSource
ReadableSource: TypeAlias = NodeSource | FileSource
"""Source that can explain messages and sum costs."""
