"""LoRA: adapters as data, PEFT's folders in and out, their product, and an engine that trains one
in place of the model's own weights."""
