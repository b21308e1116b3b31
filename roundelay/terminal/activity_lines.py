"""Draw live activity on a terminal: short phrases about active agents, and growing texts below the messages.

This module performs no IO. All text comes from participants, so it is sanitized. No line is wider than requested.
Otherwise the terminal would break the line, and the prompt could not draw over it.
"""

from __future__ import annotations

from collections.abc import Sequence

from roundelay.display.screen import CONTINUED, Paint
from roundelay.display.text import break_lines, display_width, fit_end, fit_start, sanitize, sanitize_lines
from roundelay.live_activity import ActiveCall, ActiveReaction, ActivityNews, GrowingText, LiveActivity


def describe_active(under_way: LiveActivity, me: str = "") -> str:
    """Describe the current activity of all participants in a phrase for the prompt. The phrase is empty without
    activity.

    ``me`` is the person at this screen. Typing of the same person at another screen is not shown.
    """
    if not under_way.is_connected:
        return "not connected"
    asking = sorted({it.agent_id for it in under_way.requests.values()})
    # Mention an agent that waits for a decision only once, with the decision.
    busy = {agent_id: calls for agent_id, calls in under_way.list_busy().items() if agent_id not in asking}
    whose = "your" if under_way.list_own_requests() else "a person's"
    waits = f"{', '.join(asking)} {'waits' if len(asking) == 1 else 'wait'} for {whose} decision"
    parts = [waits] if asking else []
    parts += [f"{agent_id} {_describe_calls(calls)}" for agent_id, calls in busy.items() if calls]
    thinking = [agent_id for agent_id, calls in busy.items() if not calls]
    named = ((thinking, "Thinking…"), ([it for it in under_way.typing if it != me], "Typing…"))
    return sanitize("; ".join([*parts, *(f"{', '.join(names)}: {state}" for names, state in named if names)]))


def describe_news(news: ActivityNews) -> str:
    """Describe a live-activity event on one line, such as ``bob › ann uses search``."""
    return sanitize(
        f"{' › '.join(news.who)}{': ' if news.verb == 'reports' else f' {news.verb} '}{news.object}".rstrip()
    )


def draw_growing_texts(under_way: LiveActivity, thread_id: str, *, width: int, rows: int, paint: Paint) -> list[str]:
    """Draw the growing texts of a thread on at most ``rows`` lines of at most ``width`` columns."""
    writing = under_way.list_writing(thread_id)
    if not writing or rows < 1:
        return []
    each = max(rows // len(writing), 1)
    return [line for work in writing for line in _draw_work(work, width, each, paint)][-rows:]


def _describe_calls(calls: Sequence[ActiveCall]) -> str:
    """Describe the running calls of an agent. Equal descriptions are shown only once."""
    used = ", ".join(dict.fromkeys(it.tool for it in calls if not it.asked))
    awaited = ", ".join(dict.fromkeys(", ".join(it.asked) for it in calls if it.asked))
    return " and ".join([*([f"uses {used}"] if used else []), *([f"waits for {awaited}"] if awaited else [])])


def _draw_work(work: ActiveReaction, width: int, rows: int, paint: Paint) -> list[str]:
    """Draw the agent's own text on as many lines as fit, and each other text on one line."""
    own = [it for it in work.texts.values() if it.kind == "text" and not it.path][-1:]
    others = [it for it in work.texts.values() if it.kind != "text" or it.path]
    if own:
        others = others[-(rows // 3) :] if rows >= 3 else []
    lines = [_draw_line(work, it, width, paint) for it in others[-rows:]]
    if own:
        name = fit_start(sanitize(work.agent_id), width // 2)
        text = sanitize_lines(own[0].text[-2 * rows * width :])  # more would not fit
        first, *rest = break_lines(text, width - len(CONTINUED), first_width=width - display_width(f"{name} … "))
        # Indent the lines as in a message, so that no line of the text looks like a line of the program.
        drawn = [f"{paint.name(name)}{paint.dim(' … ')}{first}", *(paint.dim(CONTINUED) + it for it in rest)]
        lines += drawn[-max(rows - len(lines), 1) :]
    return lines


def _draw_line(work: ActiveReaction, stream: GrowingText, width: int, paint: Paint) -> str:
    """Draw the author and the end of a growing text, or the beginning of a progress report."""
    label = {"reasoning": "thinks: ", "tool": f"{stream.tool or 'tool'}: ", "progress": "", "text": "writes: "}[
        stream.kind
    ]
    is_report = stream.kind == "progress"
    text = stream.text[: 2 * width] if is_report else stream.text[-2 * width :]  # more would not fit
    flat = sanitize(" ".join(text.split()))
    head = sanitize(f"{' › '.join(work.name_path(stream.path))} · {label}")
    # A long path ends with the agent that writes, and the text gets at least a third of the line.
    head = fit_end(head, max(width * 2 // 3, width - display_width(flat)))
    room = width - display_width(head)
    return paint.dim(head + (fit_start(flat, room) if is_report else fit_end(flat, room)))
