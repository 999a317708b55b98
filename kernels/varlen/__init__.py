"""Attention over packed sequences with options that training on whole causal ones does not need."""
