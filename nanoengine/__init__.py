"""nanoengine: the model, how it is packed and trained, how it is saved. Start at `engine.py`."""
