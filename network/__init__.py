"""The network: messages, ledger, hub, transports and client. Imports nothing of the other folders."""
