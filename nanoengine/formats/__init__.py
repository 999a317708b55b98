"""Everything about how models lie on disks: config.json and what its families mean, Hugging Face
names and folders, GGUF files, MXFP4 tensors, and where folders come from."""
