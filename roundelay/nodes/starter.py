"""The files that ``roundelay init`` writes: a node's, and one agent that works at once, without a model."""

from __future__ import annotations

from pathlib import Path

NODE_FILE = """\
# A Roundelay node and its agents. Start it with: roundelay up
# A line that is commented out shows a default, or an example. Flags and ROUNDELAY_* variables go before this file;
# `roundelay config show --origin` tells what holds and why.

name: {name}

# Where it listens. Anything but loopback needs a certificate and its key (PEM), or `up --insecure`.
# host: 127.0.0.1
# port: 8700
# tls_cert: cert.pem
# tls_key: key.pem

# The ledger: one SQLite file. Relative to this file.
# db: roundelay.db

# full: no acknowledged message is lost, even at power loss. normal: not by a crash. memory: nothing is kept.
# durability: full

# What may enter an agent's prompt. people: what everyone who reads the incoming message's thread may know.
# strict, all, current: see docs/agents.md.
# visibility: people

# How long messages are kept. Without it everything is. See docs/operations.md.
# retain:
#   days: 90

# mods: [channels, discovery]

# limits:
#   max_hops: 32            # how far a chain of answers may go before a person is asked
#   max_root_messages: 256  # and how many messages it may have

# Agents that the node starts, each in a process of its own. A path, relative to this file, or an agent as in such a file.
agents:
  - agents/echo.yaml
"""

AGENT_FILE = """\
# An agent. Write to it: roundelay chat --to echo
id: echo
description: Says back what you wrote, backwards if you ask for it.
tags: [example]

# What a model reads first. The rules below need no model; see `model`.
instruction: |
  You are an example. Say back what people write to you.

# Without a model: the first rule that fits gives the answer. Texts are templates over what the agent was sent.
model:
  rules:
    - when: {regex: '(?i)^backwards:? *(?P<words>.+)'}
      do:
        - say: '{{ match.words | reverse }}'
    - do:
        - say: 'You wrote: {{ text }}'

# With a model, any OpenAI-compatible server: remove `rules` above and uncomment this. The key is read from the variable;
# `roundelay doctor` checks that the model answers.
#   openai:
#     name: gpt-4o-mini
#     api_key_env: OPENAI_API_KEY
#     # base_url: http://127.0.0.1:11434/v1

# What wakes it beside direct messages. mentions: people, @echo, and who asks it for a response. all: every message.
# react_to: mentions

# channels: [dev]                 # joined at the start
# tools: ['mytools:add']          # functions in mytools.py beside this file
# limits: {max_turns: 10}
"""


def write_starter(folder: Path, name: str) -> list[Path]:
    """Write both files and give their paths. Raises `FileExistsError`, before anything is written, for one that is there."""
    files = {folder / "roundelay.yaml": NODE_FILE.replace("{name}", name), folder / "agents" / "echo.yaml": AGENT_FILE}
    for path in files:
        if path.exists():
            raise FileExistsError(17, "File exists", str(path))
    for path in files:  # all of them first: where one cannot be, no file is written
        path.parent.mkdir(parents=True, exist_ok=True)
    for path, text in files.items():
        with path.open("x", encoding="utf-8") as file:  # exclusive: somebody may have been faster
            file.write(text)
    return list(files)
