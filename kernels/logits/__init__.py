"""Ops over rows of logits that a default run does not ask for: sampling on a GPU with its penalties
and masks, the likeliest tokens, a log-softmax whose sums have one order."""
