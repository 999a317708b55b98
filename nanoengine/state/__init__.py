"""Training state on disk: slices, checkpoints, resharding, export, the folder of a run."""
