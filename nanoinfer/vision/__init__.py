"""Pictures in the inference engine: what the rows of a step read, and where they stand."""
