"""How the model and its training are split over processes. Read mesh.py first."""
