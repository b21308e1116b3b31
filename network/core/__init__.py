"""Decisions of the network: pure rules that compute changes from the state. No IO, no clock, no randomness."""
