"""nanoengine: the model, how it is split and how it is trained. Read `model/config.py` first."""
