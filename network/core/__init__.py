"""What the network decides: pure rules over the state. No IO, no clock, no chance."""
