"""Tools of the research team, which search a folder of notes. Put your own Markdown files into `notes/`."""

from pathlib import Path

from roundelay import tool

NOTES = Path(__file__).with_name("notes")


@tool(idempotent=True)
def find_notes(words: str) -> str:
    """Find the sentences that contain one of the words, each with the name of its note."""
    wanted = {word.lower().strip(".,?!") for word in words.split() if len(word) > 3}
    found = [
        f"{sentence.strip()}. ({path.name})"
        for path in sorted(NOTES.glob("*.md"))
        for sentence in path.read_text(encoding="utf-8").replace("\n", " ").split(".")
        if any(word in sentence.lower() for word in wanted)
    ]
    return " ".join(found[:10]) or "The notes say nothing about that."
