"""Training state on disk: slices of parameters, checkpoints, resharding, export, the run's folder."""
