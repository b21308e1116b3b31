"""Script that validates values against JSON Schemas. `mcp_schemas` starts the script as a process, monitors it and ends
it.

This file runs as a script, so that it imports nothing else of this package. Each input line is a JSON list ``[schema,
value]``. The output line is a list of problems, or a text if the schema itself is invalid. The script never fetches
references.
"""

from __future__ import annotations

import json
import signal
import sys
from itertools import islice
from typing import Any

import jsonschema
from referencing import Registry
from referencing.exceptions import Unresolvable

MAX_PROBLEMS = 5
MAX_PROBLEM_CHARS = 300
ORPHAN_S = 60
MAX_BYTES = 1 << 30  # maximum memory in bytes, on systems that can limit a process


def find_problems(schema: dict[str, Any], value: Any) -> list[str] | str:
    """Return the problems of a value with their positions. If the schema itself is unusable, return a text instead."""
    try:
        kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
        kind.check_schema(schema)
        # Use an empty registry. By default, the library would fetch a `$ref` to a URL.
        errors = kind(schema, registry=Registry()).iter_errors(value)
        return [
            f"{'.'.join(map(str, problem.absolute_path)) or 'the arguments'}: {problem.message}"[:MAX_PROBLEM_CHARS]
            for problem in islice(errors, MAX_PROBLEMS)
        ]
    except jsonschema.SchemaError as error:
        return error.message[:MAX_PROBLEM_CHARS]
    except Unresolvable as error:
        return f"it refers to {str(error.ref)[:MAX_PROBLEM_CHARS]}, which it does not define"
    except RecursionError:
        return "it is nested too deeply"


def main() -> None:
    try:
        import resource
    except ImportError:  # Windows has no such limit
        pass
    else:
        resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    print("ready", flush=True)  # noqa: T201 (the parent reads it)
    for line in sys.stdin:
        _end_after(ORPHAN_S)
        print(json.dumps(find_problems(*json.loads(line))), flush=True)  # noqa: T201 (the parent reads it)
        _end_after(0)


def _end_after(seconds: int) -> None:
    """End this process after ``seconds``, or cancel the timer if ``seconds`` is 0. Without the timer, this process
    would outlive a parent that was killed during a check.
    """
    if hasattr(signal, "alarm"):  # false on Windows
        signal.alarm(seconds)


if __name__ == "__main__":
    main()
