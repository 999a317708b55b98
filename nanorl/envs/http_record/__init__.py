"""HTTP of environments and agents, recorded and replayed. Start at recorder.py; docs/network.md."""
