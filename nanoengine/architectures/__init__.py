"""What models compute beyond the dense decoder of nanoengine/model: the layers of other families,
mixtures of experts, scaled ropes, and matrices in 8 bits."""
