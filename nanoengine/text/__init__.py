"""From text to token ids and back: tokenizers, chat templates, and text that looks like a special
token."""
