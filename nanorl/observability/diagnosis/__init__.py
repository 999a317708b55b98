"""Diagnosis: why a run does not learn, told from the numbers that it has written."""
