"""Says why a run does not learn, from the numbers that it has written."""
