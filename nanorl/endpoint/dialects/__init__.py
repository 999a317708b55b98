"""The APIs that clients speak, each a stateless translation (`nanorl/endpoint/exchange.py`)."""
