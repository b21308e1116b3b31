"""Runs the agents of a recorded network again, on their recorded replies: ``roundelay replay``.

`files` reads what it is given, `run` does it: agents' connections are `links`, everybody else's part `hands` do, models and tools are answered from
the records (`answers`), and what comes is compared with what was (`compare`).
"""
