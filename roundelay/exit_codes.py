"""Exit codes of commands, and messages for unhandled errors."""

from __future__ import annotations

from collections.abc import Iterator

EXIT_FAILURE, EXIT_USAGE, EXIT_NO_CONNECTION, EXIT_INTERRUPTED = 1, 2, 3, 130


def explain(error: BaseException) -> tuple[str, int]:
    """Return the error message and the exit code for an unhandled error."""
    from roundelay.display.screen import tell_person
    from roundelay.display.text import sanitize, sanitize_lines
    from roundelay.network.credentials import hide_secrets
    from roundelay.network.errors import ConfigError, ConnectError, RoundelayError

    # When several tasks fail together, the first error is the most likely cause.
    first = next(list_errors(error))
    match first:
        case ConnectError():
            code = EXIT_NO_CONNECTION
        case ConfigError():
            code = EXIT_USAGE
        case _:
            code = EXIT_FAILURE
    if isinstance(first, RoundelayError):
        sentence = tell_person(sanitize(hide_secrets(str(first))))
        pasted = (
            sanitize_lines(hide_secrets(first.to_paste)) if isinstance(first, ConfigError) and first.to_paste else []
        )
        return "\n".join([sentence, *pasted]), code
    if isinstance(first, OSError) and first.strerror:
        place = f"{first.filename}: " if first.filename is not None else ""
        return sanitize(f"{place}{first.strerror}. Check the path and its permissions."), code
    text = hide_secrets(str(first))
    return sanitize(f"Unexpected {type(first).__name__}: {text}. Run the command with --debug to see where."), code


def list_errors(error: BaseException) -> Iterator[BaseException]:
    """Yield the errors inside an exception group, or the error itself."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from list_errors(inner)
    else:
        yield error
