"""What only a GPU needs: decode steps as CUDA graphs, draws on the device, sizes of its memory.

The engine of the root runs on a CPU and imports nothing from here; nanoinfer/variants/parts.py does
where the model lies on a GPU.
"""
