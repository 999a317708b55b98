"""What goes out with a trained model: where it comes from, what it can do, and how to get it again.

model_source.py   the model that a run began with, in words and by its id on the hub
model_card.py     README.md of model-trained/ and adapter-trained/, which the hub reads
hub.py            uploads one of those folders (nanorl push)
"""
