"""One model definition, its Hugging Face folders, its tokenizer and chat template."""
