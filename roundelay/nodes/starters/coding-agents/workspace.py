"""Tools of the coding agents. The tools can access only the files in `workspace/`."""

from pathlib import Path

from roundelay import tool

WORKSPACE = Path(__file__).with_name("workspace")
MAX_CHARS = 20_000


def _find(name: str) -> Path:
    path = (WORKSPACE / name).resolve()
    if not path.is_relative_to(WORKSPACE.resolve()):
        raise ValueError(f"{name} is outside of the workspace")
    return path


@tool(idempotent=True)
def list_files() -> str:
    """List the files of the workspace."""
    names = sorted(str(path.relative_to(WORKSPACE)) for path in WORKSPACE.rglob("*") if path.is_file())
    return "\n".join(names) or "The workspace is empty."


@tool(idempotent=True)
def read_file(name: str) -> str:
    """Read a file of the workspace."""
    return _find(name).read_text(encoding="utf-8")[:MAX_CHARS]


@tool(needs_approval=True)
def write_file(name: str, content: str) -> str:
    """Replace the whole content of a file of the workspace. A person must approve the call."""
    path = _find(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content, encoding="utf-8")
    return f"Wrote {name}, {len(content)} characters."
