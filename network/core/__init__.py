"""Decisions of the network: pure rules over the state. No IO, no clock, no randomness."""
