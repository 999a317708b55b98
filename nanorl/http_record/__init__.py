"""HTTP of environments and agents, recorded and replayed. Start at service.py; docs/network.md."""
