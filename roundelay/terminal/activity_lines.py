"""How what is under way looks on a terminal: who is at work, in a few words, and below the messages the texts that
grow.

Drawn from an `LiveActivity`. Everything in it is the writing of participants, so it goes through `clean`, and no line is
wider than asked for: one that is would be broken by the terminal, and could not be drawn over. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from roundelay.display.screen import CONTINUED, Paint
from roundelay.display.text import break_lines, display_width, fit_end, fit_start, sanitize, sanitize_lines
from roundelay.live_activity import ActiveCall, ActiveReaction, ActivityNews, GrowingText, LiveActivity


def describe_active(under_way: LiveActivity, me: str = "") -> str:
    """Who does what at the moment, for a prompt; empty when nobody does anything. ``me``: who is not told of their own
    typing, at another screen."""
    if not under_way.is_connected:
        return "not connected"
    asking = sorted({it.agent_id for it in under_way.requests.values()})
    busy = {agent_id: calls for agent_id, calls in under_way.list_busy().items() if agent_id not in asking}
    whose = "your" if under_way.list_own_requests() else "a person's"
    waits = f"{', '.join(asking)} {'waits' if len(asking) == 1 else 'wait'} for {whose} decision"
    parts = [waits] if asking else []
    parts += [f"{agent_id} {_describe_calls(calls)}" for agent_id, calls in busy.items() if calls]
    thinking = [agent_id for agent_id, calls in busy.items() if not calls]
    named = ((thinking, "thinking"), ([it for it in under_way.typing if it != me], "typing"))
    return sanitize("; ".join([*parts, *(f"{', '.join(names)} {verb}" for names, verb in named if names)]))


def describe_news(news: ActivityNews) -> str:
    """What a signal tells, in a line: ``bob › ann uses search``."""
    return sanitize(
        f"{' › '.join(news.who)}{': ' if news.verb == 'reports' else f' {news.verb} '}{news.object}".rstrip()
    )


def draw_growing_texts(under_way: LiveActivity, thread_id: str, *, width: int, rows: int, paint: Paint) -> list[str]:
    """What is being written in a thread, at most ``rows`` lines of at most ``width`` columns; the newest of each
    agent."""
    writing = under_way.list_writing(thread_id)
    if not writing or rows < 1:
        return []
    each = max(rows // len(writing), 1)
    return [line for work in writing for line in _draw_work(work, width, each, paint)][-rows:]


def _describe_calls(calls: Sequence[ActiveCall]) -> str:
    """What an agent is at, each thing once."""
    used = ", ".join(dict.fromkeys(it.tool for it in calls if not it.asked))
    awaited = ", ".join(dict.fromkeys(", ".join(it.asked) for it in calls if it.asked))
    return " and ".join([*([f"uses {used}"] if used else []), *([f"waits for {awaited}"] if awaited else [])])


def _draw_work(work: ActiveReaction, width: int, rows: int, paint: Paint) -> list[str]:
    """The agent's own text in full, as far as there is room; a line for each other thing that it is at."""
    own = [it for it in work.texts.values() if it.kind == "text" and not it.path][-1:]
    others = [it for it in work.texts.values() if it.kind != "text" or it.path]
    if own:
        others = others[-(rows // 3) :] if rows >= 3 else []
    lines = [_draw_line(work, it, width, paint) for it in others[-rows:]]
    if own:
        name = fit_start(sanitize(work.agent_id), width // 2)
        text = sanitize_lines(own[0].text[-2 * rows * width :])  # no more could be shown
        first, *rest = break_lines(text, width - len(CONTINUED), first_width=width - display_width(f"{name} … "))
        # As in a message, no line of it can look like one of ours.
        drawn = [f"{paint.name(name)}{paint.dim(' … ')}{first}", *(paint.dim(CONTINUED) + it for it in rest)]
        lines += drawn[-max(rows - len(lines), 1) :]
    return lines


def _draw_line(work: ActiveReaction, stream: GrowingText, width: int, paint: Paint) -> str:
    """Who it is and the end of what it writes; of a report of progress the beginning."""
    label = {"reasoning": "thinks: ", "tool": f"{stream.tool or 'tool'}: ", "progress": "", "text": "writes: "}[
        stream.kind
    ]
    is_report = stream.kind == "progress"
    text = stream.text[: 2 * width] if is_report else stream.text[-2 * width :]  # no more could be shown
    flat = sanitize(" ".join(text.split()))
    head = sanitize(f"{' › '.join(work.name_path(stream.path))} · {label}")
    head = fit_end(head, max(width * 2 // 3, width - display_width(flat)))
    room = width - display_width(head)
    return paint.dim(head + (fit_start(flat, room) if is_report else fit_end(flat, room)))
