"""The mathematics of the update, as pure functions on packed tensors. Read in this order:

spec.py         `AlgorithmSpec`, which algorithm it is, and the recipes that have a name
advantages.py   how much better than expected each token was, and its weight in the loss
losses.py       the loss of a token, corrections for stale ones, KL
fields.py       the numbers that travel from the one to the other
segments.py     sums over sequences and groups
"""
