"""What single requests may ask beyond a plain draw: penalties, grammars, truncation, texts, scores.

The engine of the root imports nothing from here: a request that asks for more brings it by name.
"""
