"""What a model answers beside the log-probs of a step: values, classes, its likeliest tokens."""
