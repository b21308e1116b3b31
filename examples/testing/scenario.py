"""A test of a team in virtual time: rules replace the models, and expectations state the result.

Run it: python examples/testing/scenario.py

It prints:

    passed: True
    mia -> desk: Refund order 12 please
    desk -> finance: Refund order 12 please
    finance -> desk: Approved, 40 EUR
    desk -> mia: You get 40 EUR back.
"""

from roundelay.testing import make_scenario, run_scenario

SCENARIO = {
    "scenario": "A refund needs finance",
    "people": ["mia"],
    "agents": {
        "desk": {
            "script": [
                {"when": {"from": "mia"}, "do": [{"send": {"to": "finance", "text": "{{ text }}"}}]},
                {"when": {"from": "finance"}, "do": [{"send": {"to": "mia", "text": "You get 40 EUR back."}}]},
            ]
        },
        "finance": {
            "script": [{"when": {"from": "desk"}, "do": [{"send": {"to": "desk", "text": "Approved, 40 EUR"}}]}]
        },
    },
    "steps": [{"as": "mia", "to": "desk", "send": "Refund order 12 please"}, {"wait": "idle"}],
    "expect": [
        {"order": ["mia -> desk", "desk -> finance", "finance -> desk", "desk -> mia"]},
        {"message": {"from": "desk", "to": "mia", "contains": "40 EUR", "count": 1}},
        {"no_dead_letters": True},
    ],
}

result = run_scenario(make_scenario(SCENARIO), seed=7)
print("passed:", result.passed)
for message in result.record.messages:
    print(f"{message.sender_id} -> {message.to.removeprefix('agent:')}: {message.text}")
