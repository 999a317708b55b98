"""The OpenAI-compatible server: `python -m nanoinfer.server --model FOLDER`."""
