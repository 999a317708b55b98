"""Engines other than the plain one: adapters, drafts, fp8 and int8, ranks, copied weights.

The engine of the root imports nothing from here: an `InferConfig` or a call that needs it names it.
"""
