"""An agent without the roundelay package: it sends direct messages of people back to them, mirrored.

Start a node (roundelay up), then: python -I client.py ws://127.0.0.1:8700/ mirror Everything it needs is in
docs/protocol.md.
"""

import json
import os
import secrets
import sys

from websockets.sync.client import connect

if len(sys.argv) != 3:
    sys.exit("Usage: python -I client.py URL AGENT_ID, such as ws://127.0.0.1:8700/ mirror")
url, agent_id = sys.argv[1:]
token_file = f"{agent_id}.token"
if not os.path.exists(token_file):  # on loopback, the first use of an id binds it to the token that came with it
    with open(os.open(token_file, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
        file.write(secrets.token_urlsafe(32))
with open(token_file) as file:
    token = file.read()

with connect(url, subprotocols=["roundelay.v1"], compression=None) as socket:

    def send(**frame):
        socket.send(json.dumps(frame))

    send(
        type="hello",
        protocol=1,
        agent_id=agent_id,
        kind="agent",
        token=token,
        card={"description": "Mirrors what you write"},
    )
    for data in socket:
        frame = json.loads(data)
        if frame["type"] == "welcome":
            print(f"{agent_id} is connected to {frame['network']['name']}", flush=True)
        elif frame["type"] == "deliver":
            message, seq = frame["message"], frame["message"]["seq"]
            if message["kind"] == "direct" and message["sender_kind"] == "human":
                # The id is made of what it answers: after a crash the same answer is sent again, and stored once.
                to, text = f"agent:{message['sender_id']}", str(message["content"])[::-1]
                send(type="send", message_id=f"re-{seq}", to=to, content=text, reply_to=seq, cause=seq)
            else:
                send(type="ack", seq=seq, only=True)
        elif frame["type"] == "stored":  # durable, so the message that it answers is done with
            send(type="ack", seq=int(frame["message_id"].removeprefix("re-")), only=True)
        elif frame["type"] == "error":
            sys.exit(f"{frame['code']}: {frame['message']}")
