"""Holds values against JSON Schemas, one a line: the process that `mcp_schemas` starts, watches and ends.

Run as a script, so that it loads nothing of this package. A line ``[schema, value]`` is answered by the list of what is
wrong, or by a text if the schema itself is. Nothing that a schema refers to is fetched.
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
MAX_BYTES = 1 << 30  # of memory, where the system can hold a process to it


def find_problems(schema: dict[str, Any], value: Any) -> list[str] | str:
    """Give what is wrong with a value, each with its place; a text for a schema that cannot be used."""
    try:
        kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
        kind.check_schema(schema)
        # An empty registry: by default a `$ref` to an address would be fetched.
        found = kind(schema, registry=Registry()).iter_errors(value)
        return [
            f"{'.'.join(map(str, problem.absolute_path)) or 'the arguments'}: {problem.message}"[:MAX_PROBLEM_CHARS]
            for problem in islice(found, MAX_PROBLEMS)
        ]
    except jsonschema.SchemaError as error:
        return error.message[:MAX_PROBLEM_CHARS]
    except Unresolvable as error:
        return f"it refers to {str(error.ref)[:MAX_PROBLEM_CHARS]}, which is not in it"
    except RecursionError:
        return "it is nested without end"


def main() -> None:
    try:
        import resource
    except ImportError:  # Windows has no such limit
        pass
    else:
        resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    print("ready", flush=True)  # noqa: T201 (what its parent reads)
    for line in sys.stdin:
        _end_after(ORPHAN_S)
        print(json.dumps(find_problems(*json.loads(line))), flush=True)  # noqa: T201 (likewise)
        _end_after(0)


def _end_after(seconds: int) -> None:
    """End this process unless that is taken back by 0: a parent that was killed in a check ends no process."""
    if hasattr(signal, "alarm"):  # not on Windows
        signal.alarm(seconds)


if __name__ == "__main__":
    main()
