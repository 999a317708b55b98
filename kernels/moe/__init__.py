"""Mixture of experts: which experts a token goes to, and their products."""
