"""nanoengine: the model, how it is split and how it is trained. Read `engine.py` first, then
`model/config.py`."""
