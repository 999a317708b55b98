"""Ops over rows of logits that a default run does not ask for: sampling on a GPU with its penalties
and masks, the likeliest tokens, log-probs over a part of them, a log-softmax whose sums have one
order."""
