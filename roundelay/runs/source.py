"""Sources of a run: a node, under the caller's rights (`node_source`), or a ledger's file (`file_source`).

Both kinds of sources provide the causes and effects of a message, reactions with their records, messages, and the log.
A node also yields new messages.
"""

from __future__ import annotations

from typing import TypeAlias

from roundelay.runs.file_source import FileSource
from roundelay.runs.node_source import LiveSource, NodeSource

Source: TypeAlias = LiveSource | FileSource
ReadableSource: TypeAlias = NodeSource | FileSource
"""Enough to explain messages and add up costs."""
