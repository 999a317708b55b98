"""The model and its training, split over processes. Read mesh.py first."""
