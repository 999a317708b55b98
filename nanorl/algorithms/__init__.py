"""The mathematics of the update, as pure functions on packed tensors. Read in this order:

spec.py             `AlgorithmSpec`, which algorithm it is
recipes.py          those that have a name
advantages.py       how much better than expected each token was
signal.py           whether a group teaches anything
token_baseline.py   a baseline for each token (OTB)
hierarchical.py     comparisons of turns in the same situation (HGPO)
aggregation.py      the weight of each token in the loss
covariance.py       which tokens Clip-Cov and KL-Cov choose
self_distillation.py  what a teacher with hindsight reads (SDFT, SDPO)
top_k.py            the KL over a teacher's likeliest tokens
loss_batch.py       what a loss reads
losses.py           the loss of a token
corrections.py      weights for tokens that another policy sampled
divergences.py      how far two policies are apart
fields.py           the numbers that travel from the advantages to the losses
segments.py         sums over sequences and groups
"""
